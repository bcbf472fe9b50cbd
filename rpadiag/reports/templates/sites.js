// Drill-down: a cell of a map, chosen by pointer, by arrow keys on the map or by the two lists, opens the numbers of its site.
(() => {
  "use strict";
  const { element } = page;
  const STEP = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const BARS = [["made here", "local"], ["inherited", "muted"], ["end to end", "muted"]];

  function explore(key, sites) {
    const plot = document.getElementById(key);
    const panel = document.getElementById(key + "-site");
    const [points, layers] = ["point", "layer"].map((name) => panel.querySelector(`[data-pick=${name}]`));
    const numbers = panel.querySelector(".numbers");
    const columns = [...Array(sites.layers + 2).keys()].map(String).concat("all");
    let [column, row] = sites.start.split(":");
    row = Number(row);

    const has = (c, r) => `${c}:${r}` in sites.cells;
    const nameOf = (c) => (c === "all" ? "all layers" : c === "0" ? "before the layers" : Number(c) === sites.layers + 1 ? "after the layers" : String(c - 1));

    sites.points.forEach((point, index) => points.append(element("option", `${point.name} (${point.region})`, { value: index })));

    function fillLayers() {
      layers.replaceChildren(...columns.filter((c) => has(c, row)).map((c) => element("option", nameOf(c), { value: c })));
      layers.value = column;
      points.value = String(row);
    }

    function frame() {
      const pooled = column === "all";
      const x = Number(column) - 1;
      return [{
        type: "rect", xref: pooled ? "x2" : "x", yref: "y", x0: pooled ? 0 : x - 0.5, x1: pooled ? 1 : x + 0.5,
        y0: row - 0.5, y1: row + 0.5, line: { color: "#bd5b12", width: 2.5 }, fillcolor: "rgba(0,0,0,0)", layer: "above",
      }];
    }

    function show() {
      const cell = sites.cells[`${column}:${row}`];
      const point = sites.points[row];
      fillLayers();
      const level = Number(numbers.dataset.level);
      const bars = element("dl", null, { class: "shares" });
      cell.shares.forEach(([share, text], index) => {
        const line = element("div");
        const value = element("dd");
        const track = element("span", null, { class: "track", "aria-hidden": "true" });
        const fill = element("span", null, { class: BARS[index][1] });
        fill.style.width = `${100 * (share || 0)}%`;
        track.append(fill);
        value.append(element("b", text), track);
        line.append(element("dt", BARS[index][0]), value);
        bars.append(line);
      });
      const facts = element("dl", null, { class: "facts" });
      for (const [name, text] of cell.facts) facts.append(element("dt", name), element("dd", text));
      const parts = [element(`h${level}`, cell.site, { class: "mono" }), element("p", `${point.text}; region ${point.region}${point.reads ? `; reads ${point.reads}` : ""}`, { class: "soft" }), bars];
      if (cell.ulp.length) parts.push(histogram(cell.ulp));
      numbers.replaceChildren(...parts, facts);
      page.shapes[key] = frame();
      if (plot.classList.contains("js-plotly-plot")) Plotly.relayout(plot, { shapes: page.themed(structuredClone(frame())) });
    }

    function histogram(bins) {
      const box = element("div", null, { class: "ulp" });
      box.append(element("p", "How far, of those that are made different here:", { class: "soft" }));
      const list = element("dl");
      for (const [name, share, text] of bins) {
        const line = element("div");
        const value = element("dd");
        const track = element("span", null, { class: "track", "aria-hidden": "true" });
        const fill = element("span", null, { class: "local" });
        fill.style.width = `${100 * share}%`;
        track.append(fill);
        value.append(track, element("span", text));
        line.append(element("dt", name), value);
        list.append(line);
      }
      box.append(list);
      return box;
    }

    function go(c, r) {
      if (!has(c, r)) return false;
      [column, row] = [String(c), r];
      show();
      return true;
    }

    points.addEventListener("change", () => {
      const r = Number(points.value);
      if (!go(column, r)) go(columns.find((c) => has(c, r)), r);
    });
    layers.addEventListener("change", () => go(layers.value, row));
    plot.addEventListener("keydown", (event) => {
      const step = STEP[event.key];
      let moved = false;
      if (step) {
        let at = columns.indexOf(column), r = row;
        do {
          at += step[0];
          r += step[1];
          moved = go(columns[at], r);
        } while (!moved && at >= 0 && at < columns.length && r >= 0 && r < sites.points.length);
      } else if (event.key === "Home" || event.key === "End") {
        const inRow = columns.filter((c) => has(c, row));
        moved = go(event.key === "Home" ? inRow[0] : inRow[inRow.length - 1], row);
      }
      if (step || moved) event.preventDefault();
    });
    page.listeners[key] = (graph) => graph.on("plotly_click", (event) => {
      const { x, y } = event.points[0];
      go(String(x + 1), y);
    });
    show();
  }

  for (const [key, sites] of Object.entries(page.figures.sites)) explore(key, sites);
})();
