// Adds reading to what stands there already: a cross-hair over the charts, the completion behind a bar, runs switched off.
// Without this script the page still shows every figure and every number.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const tip = document.getElementById("tip");

  const percent = (v) => (Math.abs(v) < 0.1 && v !== 0 ? (100 * v).toFixed(1) : (100 * v).toFixed(0)) + "%";
  const number = (v) =>
    Number.isInteger(v) || Math.abs(v) >= 100
      ? Math.round(v).toLocaleString("en-US")
      : String(Number(v.toPrecision(Math.abs(v) >= 0.1 ? 3 : 2)));
  const seconds = (v) =>
    v < 60 ? v.toFixed(v < 10 ? 1 : 0) + " s" : Math.floor(v / 60) + " min " + String(Math.round(v) % 60).padStart(2, "0") + " s";
  const formats = { percent, number, seconds };

  function showTip(x, y, fill) {
    tip.replaceChildren();
    fill(tip);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 14 + box.width > innerWidth - 8 ? x - 14 - box.width : x + 14;
    const top = y + 14 + box.height > innerHeight - 8 ? y - 14 - box.height : y + 14;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = Math.max(8, top) + "px";
  }
  const hideTip = () => { tip.hidden = true; };
  // A finger that is lifted leaves what it pointed at: there the reading stays until the next touch or scroll.
  const onLeave = (node, clear) => {
    node.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") clear(); });
    document.addEventListener("pointerdown", (event) => { if (!node.contains(event.target)) clear(); });
    document.addEventListener("scroll", () => { if (!tip.hidden) clear(); }, { passive: true });
  };
  function add(parent, kind, text, css) {
    const node = document.createElement(kind);
    node.textContent = text;
    if (css) node.className = css;
    parent.append(node);
    return node;
  }

  // Cross-hair: the recorded value nearest to the pointer, of every line that is shown.
  const isShown = (run) => {
    const box = document.querySelector(`.show[data-run="${run}"]`);
    return !box || box.checked;
  };
  function nearest(xs, target) {
    let best = -1;
    xs.forEach((x, i) => { if (x !== null && (best < 0 || Math.abs(x - target) < Math.abs(xs[best] - target))) best = i; });
    return best;
  }
  for (const plot of document.querySelectorAll(".plot")) {
    const readouts = JSON.parse(plot.dataset.readouts);
    const [x0, x1] = plot.dataset.domain.split(" ").map(Number);
    const canvas = plot.querySelector(".canvas");
    const cross = add(canvas, "div", "", "cross");
    cross.hidden = true;
    const columns = (r) => data.runs[r.run][r.source];
    const places = [...new Set(readouts.flatMap((r) => (columns(r)[r.x] || []).filter((x) => x !== null)))].sort((a, b) => a - b);
    let at = -1;

    function read(index, clientY) {
      at = index;
      const x = places[index];
      const box = canvas.getBoundingClientRect();
      const share = (x - x0) / (x1 - x0);
      cross.hidden = false;
      cross.style.left = 100 * share + "%";
      showTip(box.left + share * box.width, clientY ?? box.top + box.height / 3, (node) => {
        add(node, "b", `${plot.dataset.xLabel} ${number(x)}`);
        for (const r of readouts) {
          if (!isShown(r.run)) continue;
          const xs = columns(r)[r.x] || [];
          const i = nearest(xs, x);
          const value = i < 0 ? null : (columns(r)[r.y] || [])[i] ?? null;
          if (value === null) continue;
          const elsewhere = xs[i] === x ? "" : ` (at ${number(xs[i])})`;
          add(node, "div", `${r.label}: ${formats[plot.dataset.style](value)}${elsewhere}`);
        }
      });
    }
    function leave() {
      if (cross.hidden) return;
      cross.hidden = true;
      at = -1;
      hideTip();
    }
    function point(event) {
      const box = canvas.getBoundingClientRect();
      const target = x0 + ((event.clientX - box.left) / box.width) * (x1 - x0);
      const index = nearest(places, target);
      if (index >= 0) read(index, event.clientY);
    }
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("blur", leave);
    onLeave(plot, leave);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length }[event.key];
      if (event.key === "Escape") leave();
      if (move === undefined || !places.length) return;
      event.preventDefault();
      read(Math.min(Math.max(at + move, 0), places.length - 1));
    });
  }

  // The completion behind a bar, read from the table below the figure.
  for (const svg of document.querySelectorAll(".bars")) {
    const table = svg.closest(".panel").querySelector("tbody");
    function clear() {
      if (!svg.classList.contains("picked")) return;
      svg.classList.remove("picked");
      svg.querySelectorAll(".same, .this").forEach((bar) => bar.classList.remove("same", "this"));
      hideTip();
    }
    function pick(event) {
      const bar = event.target.closest("rect");
      if (!bar) { clear(); return; }
      const cells = (index) => table.querySelector(`tr[data-row="${index}"]`).cells;
      const [group, sample, length, reward, text] = [...cells(bar.dataset.row)].map((cell) => cell.textContent);
      if (!bar.classList.contains("this")) {
        clear();
        svg.classList.add("picked");
        svg.querySelectorAll("rect").forEach((other) => {
          if (other.dataset.group === bar.dataset.group) other.classList.add(other === bar ? "this" : "same");
        });
      }
      showTip(event.clientX, event.clientY, (node) => {
        add(node, "b", `group ${group}, sample ${sample}: ${length} tokens, reward ${reward}`);
        if (text) add(node, "div", text, "sample");
      });
    }
    svg.addEventListener("pointermove", pick);
    svg.addEventListener("pointerdown", pick);
    onLeave(svg, clear);
  }

  // Runs switched off disappear from the charts that show several.
  function update(box) {
    document.querySelectorAll(`[data-of="${box.dataset.run}"]`).forEach((node) => node.classList.toggle("off", !box.checked));
  }
  document.querySelectorAll(".show").forEach((box) => {
    update(box); // a reload may restore the boxes as they were left
    box.addEventListener("change", () => update(box));
  });
})();
