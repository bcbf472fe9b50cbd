// Drill-down: a sequence opens its tokens, unpacked on demand; arrow keys go from token to token.
(() => {
  "use strict";
  const { element, figures } = page;
  const STEPS = [0.02, 0.1, Math.log(1 / 0.8)]; // |d| in nats: 2 %, 10 % and, below, out of a usual clipping range
  const [LOW, HIGH] = [Math.log(0.8), Math.log(1.2)];
  const NUM_LISTED = 30;
  const opened = {};

  // Several lists share nothing but this: gzip in base64 -> object.
  async function unpack(key) {
    opened[key] ||= (async () => {
      const bytes = Uint8Array.from(atob(figures.packed[key]), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      return JSON.parse(await new Response(stream).text());
    })();
    return opened[key];
  }

  const signed = (value, digits = 4) => (value > 0 ? "+" : value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(digits);
  const visible = (text) => text.replaceAll("\r", "").replaceAll("\n", "\u23ce\n").replaceAll("\t", "\u21e5");
  const isOut = (d) => d < LOW || d > HIGH;

  function level(d) {
    if (isOut(d)) return 3;
    return STEPS.filter((limit) => Math.abs(d) >= limit).length;
  }

  function legend() {
    const box = element("p", null, { class: "legend" });
    const sample = (kind, text) => {
      const item = element("span");
      item.append(element("span", "token", { class: `tok ${kind}` }), element("span", text));
      return item;
    };
    box.append(
      sample("less2", "the trainer finds it less likely (line below)"),
      sample("more2", "more likely (line above)"),
      sample("less3", "thick line: ratio outside 0.8 to 1.2"),
      element("span", "Tint from |d| of 0.02 and 0.1 nats."),
    );
    return box;
  }

  function say(data, index) {
    const d = data.d[index];
    const flip = data.flips.includes(index) ? "; the stacks prefer different tokens here" : "";
    const how = d === 0 ? "equal to the last bit" : `d ${signed(d)} nats, ratio ${Math.exp(d).toFixed(3)}`;
    return `position ${data.positions[index]}: ${how}; trainer ${signed(data.p[index])}, rollout ${signed(data.q[index])} nats${flip}`;
  }

  function reader(data) {
    const box = element("div", null, { class: "reading" });
    const text = element("div", null, { class: "text", tabindex: "0", role: "application", "aria-roledescription": "text coloured by d", "aria-label": "Tokens. Arrow keys go from token to token and read its numbers." });
    const readout = element("p", "Point at a token, or focus the text and use the arrow keys.", { class: "readout", "aria-live": "polite" });
    const spans = data.texts.map((word, index) => {
      const d = data.d[index];
      const kind = level(d) ? (d < 0 ? "less" : "more") + level(d) : "";
      return element("span", visible(word), { class: `tok ${kind}${data.flips.includes(index) ? " flip" : ""}`, "data-i": index });
    });
    let at = data.d.reduce((best, d, index) => (Math.abs(d) > Math.abs(data.d[best]) ? index : best), 0);
    const go = (index) => {
      spans[at].classList.remove("here");
      at = Math.min(Math.max(index, 0), spans.length - 1);
      spans[at].classList.add("here");
      const word = visible(data.texts[at]).trim() || "\u2423";
      readout.replaceChildren(element("b", word, { class: "mono" }), ` ${say(data, at)}`);
    };
    if (data.before) text.append(element("span", `\u2026 ${data.before} tokens before `, { class: "gone" }));
    else if (data.positions[0] > 0) text.append(element("span", "\u2026", { class: "gone" })); // the first token has no log-probability
    spans.forEach((span, index) => {
      if (index === data.generated) text.append(element("span", "generated from here", { class: "tag" }));
      text.append(span);
    });
    if (data.after) text.append(element("span", ` \u2026 ${data.after} tokens after`, { class: "gone" }));
    text.addEventListener("pointerover", (event) => event.target.dataset.i && go(Number(event.target.dataset.i)));
    text.addEventListener("click", (event) => event.target.dataset.i && go(Number(event.target.dataset.i)));
    text.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -Infinity, End: Infinity }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      go(at + step);
      spans[at].scrollIntoView({ block: "nearest" });
    });
    go(at);
    box.append(legend(), text, readout, listed(data));
    return box;
  }

  // The same as a table, made when it is opened: the tokens furthest apart of this sequence.
  function listed(data) {
    const details = element("details");
    const order = data.d.map((_, index) => index).sort((a, b) => Math.abs(data.d[b]) - Math.abs(data.d[a])).slice(0, NUM_LISTED);
    details.append(element("summary", `Its ${order.length} tokens furthest apart as a table`));
    details.addEventListener("toggle", () => {
      if (details.querySelector("table")) return;
      const table = element("table");
      const head = element("tr");
      [["token", ""], ["position", "num"], ["d, nats", "num"], ["ratio", "num"], ["trainer, nats", "num"], ["rollout, nats", "num"]]
        .forEach(([title, kind]) => head.append(element("th", title, { scope: "col", class: kind })));
      const body = element("tbody");
      for (const i of order) {
        const row = element("tr");
        row.append(element("th", visible(data.texts[i]).trim() || "\u2423", { scope: "row", class: "mono" }));
        [data.positions[i], signed(data.d[i]), Math.exp(data.d[i]).toFixed(3), signed(data.p[i]), signed(data.q[i])]
          .forEach((value) => row.append(element("td", value, { class: "num" })));
        body.append(row);
      }
      const top = element("thead");
      top.append(head);
      table.append(element("caption", "Tokens of this sequence by |d|", { class: "hidden" }), top, body);
      details.append(table);
    });
    return details;
  }

  document.querySelectorAll(".sequences").forEach((list) => {
    list.addEventListener("click", async (event) => {
      const button = event.target.closest("button[data-prompt]");
      if (!button) return;
      const row = document.getElementById(button.getAttribute("aria-controls"));
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      row.hidden = open;
      if (open || row.cells[0].childElementCount) return;
      try {
        const data = await unpack(list.dataset.sequences);
        row.cells[0].replaceChildren(reader(data[button.dataset.prompt]));
      } catch (error) {
        row.cells[0].replaceChildren(element("p", `This browser cannot open the packed tokens (${error.name}); the run directory has them.`));
      }
    });
  });

  page.start();
})();
