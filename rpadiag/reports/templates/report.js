// Figures: drawn when they come near the window, the rest while the page is idle; redrawn for another theme, width or paper.
const page = (() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const phone = matchMedia("(max-width: 640px)");
  const PRINTED_WIDTH = 640; // pixels; fits A4 and Letter inside the margins, where no resize event comes
  const chosen = {};
  const shapes = {}; // figure key -> shapes over those of its layout
  const listeners = {}; // figure key -> called once, after its first drawing
  const drawn = new Set();
  let printing = false;

  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches);

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

  const themed = (value) => (isDark() && !printing ? recolour(value) : value);

  function draw(figure) {
    const onPhone = phone.matches && !printing;
    let data = figure.data;
    let layout = merge(figure.layout, { dragmode: onPhone || figures.sites[figure.key] ? false : "zoom" });
    if (onPhone) layout = merge(layout, figure.narrow);
    if (printing) layout = merge(layout, { width: PRINTED_WIDTH });
    if (figure.choices.length) {
      const choice = figure.choices[chosen[figure.key] || 0];
      data = data.map((trace, index) => Object.assign({}, trace, { visible: choice.traces.includes(index) }));
      layout = merge(layout, choice.layout);
    }
    if (shapes[figure.key] && !printing) layout = merge(layout, { shapes: [...(layout.shapes || []), ...shapes[figure.key]] });
    const config = { displayModeBar: false, responsive: true, scrollZoom: false, doubleClick: "reset" };
    const first = !drawn.has(figure.key);
    drawn.add(figure.key);
    // Plotly writes into what it is given; hand it its own copy.
    const done = Plotly.react(figure.key, structuredClone(themed(data)), structuredClone(themed(layout)), config);
    if (first && listeners[figure.key]) listeners[figure.key](document.getElementById(figure.key));
    if (drawn.size === figures.list.length) root.dataset.drawn = String(drawn.size);
    return done;
  }

  const redraw = () => Promise.all(figures.list.filter((figure) => drawn.has(figure.key)).map(draw));

  document.querySelectorAll("fieldset[data-figure]").forEach((set) => {
    const figure = figures.list.find((item) => item.key === set.dataset.figure);
    const note = document.getElementById(figure.key + "-note");
    set.addEventListener("change", (event) => {
      chosen[figure.key] = Number(event.target.value);
      note.textContent = figure.choices[chosen[figure.key]].note;
      draw(figure);
    });
  });

  document.querySelectorAll("button.copy").forEach((button) => {
    button.addEventListener("click", async () => {
      const code = button.parentElement.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1600);
    });
  });

  // The theme: the system's until the reader asks for the other one.
  const theme = document.getElementById("theme");
  const nameTheme = () => { theme.textContent = isDark() ? "Light page" : "Dark page"; };
  theme.hidden = false;
  nameTheme();
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
    redraw();
  });
  systemDark.addEventListener("change", () => { nameTheme(); redraw(); });
  phone.addEventListener("change", redraw);
  addEventListener("beforeprint", () => { printing = true; figures.list.forEach(draw); });
  addEventListener("afterprint", () => { printing = false; redraw(); });

  function start() {
    const byKey = new Map(figures.list.map((figure) => [figure.key, figure]));
    const near = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        near.unobserve(entry.target);
        if (!drawn.has(entry.target.id)) draw(byKey.get(entry.target.id));
      }
    }, { rootMargin: "400px" });
    for (const figure of figures.list) near.observe(document.getElementById(figure.key));
    const idle = globalThis.requestIdleCallback ? (next) => requestIdleCallback(next, { timeout: 2000 }) : (next) => setTimeout(next, 60);
    const rest = () => {
      const figure = figures.list.find((item) => !drawn.has(item.key));
      if (!figure) return;
      draw(figure);
      idle(rest);
    };
    idle(rest);
    if (!figures.list.length) root.dataset.drawn = "0";
    root.dataset.ready = String(Math.round(performance.now()));
  }

  const element = (name, text, attributes = {}) => {
    const made = document.createElement(name);
    if (text !== undefined && text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  return { figures, shapes, listeners, themed, start, element };
})();
