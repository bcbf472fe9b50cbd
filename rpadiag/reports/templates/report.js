(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const phone = matchMedia("(max-width: 640px)");
  const PRINTED_WIDTH = 640; // pixels; fits A4 and Letter inside the margins, where no resize event comes
  const chosen = {};
  let printing = false;

  // Every light colour has one role, so exchanging strings is exchanging roles.
  function recolour(value) {
    if (typeof value === "string") return figures.twins[value] || value;
    if (Array.isArray(value)) return value.map(recolour);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, recolour(item)]));
    }
    return value;
  }

  // Objects are merged key by key; arrays and plain values of the later one win.
  function merge(base, over) {
    const plain = (item) => item && typeof item === "object" && !Array.isArray(item);
    if (!plain(base) || !plain(over)) return over;
    const merged = Object.assign({}, base);
    for (const [key, item] of Object.entries(over)) merged[key] = key in merged ? merge(merged[key], item) : item;
    return merged;
  }

  function draw(figure) {
    const onPhone = phone.matches && !printing;
    let data = figure.data;
    let layout = merge(figure.layout, { dragmode: onPhone ? false : "zoom" });
    if (onPhone) layout = merge(layout, figure.narrow);
    if (printing) layout = merge(layout, { width: PRINTED_WIDTH });
    if (figure.choices.length) {
      const choice = figure.choices[chosen[figure.key] || 0];
      data = data.map((trace, index) => Object.assign({}, trace, { visible: choice.traces.includes(index) }));
      layout = merge(layout, choice.layout);
    }
    if (dark.matches && !printing) {
      data = recolour(data);
      layout = recolour(layout);
    }
    const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" };
    // Plotly writes into what it is given; hand it its own copy.
    return Plotly.react(figure.key, structuredClone(data), structuredClone(layout), config);
  }

  const drawAll = () => Promise.all(figures.list.map(draw));

  document.querySelectorAll("fieldset[data-figure]").forEach((set) => {
    const figure = figures.list.find((item) => item.key === set.dataset.figure);
    const note = document.getElementById(figure.key + "-note");
    set.addEventListener("change", (event) => {
      chosen[figure.key] = Number(event.target.value);
      note.textContent = figure.choices[chosen[figure.key]].note;
      draw(figure);
    });
  });

  document.querySelectorAll(".command button").forEach((button) => {
    button.addEventListener("click", async () => {
      const text = button.parentElement.querySelector("code").textContent;
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(button.parentElement.querySelector("code"));
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  });

  dark.addEventListener("change", drawAll);
  phone.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => { printing = true; drawAll(); });
  addEventListener("afterprint", () => { printing = false; drawAll(); });
  drawAll().then(() => { document.documentElement.dataset.drawn = String(figures.list.length); });
})();
