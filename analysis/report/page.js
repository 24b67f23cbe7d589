"use strict";
// Draws each figure's data as SVG: shows values under the pointer, hides cells, zooms into steps.
// It sets text as text only, so no record becomes markup.
const make = (name, attributes = {}, ...children) => {
  const svg = ["svg", "path", "line", "rect", "text", "g"].includes(name);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};
const series = (colour) => `var(--series${colour})`;
const swatch = (colour) => { const box = make("i"); box.style.background = series(colour); return box; };
const figureOf = (value, digits = 4) => {
  if (value === null) return "not finite";
  return value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(digits - 1) : String(Number(value.toPrecision(digits)));
};
const linear = ([low, high], [from, to]) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);
const extent = (values) => [values.reduce((a, b) => Math.min(a, b), Infinity), values.reduce((a, b) => Math.max(a, b), -Infinity)];

function ticks(low, high, wanted) {
  const raw = (high - low || 1) / wanted, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((times) => times * power >= raw);
  const found = [];
  for (let value = Math.ceil(low / step); value * step <= high + step * 1e-9; value++) found.push(value * step);
  return found;
}

// Logarithmic, with a place for zero below the smallest value.
function logarithmic(values, [bottom, top]) {
  const [least, most] = extent([...values.filter((value) => value > 0), ...(values.some((value) => value > 0) ? [] : [1])]);
  const high = Math.ceil(Math.log10(most * 1.5)), low = Math.max(Math.floor(Math.log10(least)), high - 9);
  const place = linear([low, high], [bottom - 14, top]);
  const scale = (value) => (value > 0 ? Math.min(place(Math.log10(value)), bottom - 7) : bottom);
  const stride = Math.ceil((high - low) / 5), marks = [[0, "0"]];
  for (let power = low; power <= high; power += stride) marks.push([10 ** power, `1e${power}`]);
  return [scale, marks];
}

class Figure {
  constructor(root) {
    this.root = root;
    this.data = JSON.parse(root.querySelector("script").textContent);
    this.hidden = new Set();
    this.drawing = make("div");
    this.values = make("div", { class: "values", hidden: "" });
    root.append(this.legend(), this.drawing, this.values);
    new ResizeObserver(() => this.draw()).observe(root);
  }
  items() { return this.data.curves || this.data.boxes || this.data.bars; }
  shown(items) { return items.filter((item) => !this.hidden.has(item.label)); }
  legend() {
    const cells = new Map(this.items().map((item) => [item.label, item.colour]));
    return make("div", { class: "legend" }, ...[...cells].map(([label, colour]) => {
      const button = make("button", { type: "button", "aria-pressed": "true" }, swatch(colour), label);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(label)) this.hidden.add(label);
        button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
        this.draw();
      });
      return button;
    }));
  }
  draw() {
    const width = Math.max(260, this.root.clientWidth - 26);
    if (width === this.drawn && !this.changed()) return;
    this.drawn = width;
    this.drawing.replaceChildren(...this[this.data.kind](width));
  }
  changed() { const now = JSON.stringify([[...this.hidden], this.zoom]); const was = this.was; this.was = now; return now !== was; }
  say(event, title, rows) {
    const box = this.root.getBoundingClientRect();
    this.values.replaceChildren(make("b", {}, title), ...rows.map(([colour, text]) => make("div", {}, swatch(colour), text)));
    this.values.hidden = false;
    const right = event.clientX - box.left > box.width / 2;
    this.values.style.left = right ? "auto" : `${event.clientX - box.left + 14}px`;
    this.values.style.right = right ? `${box.right - event.clientX + 14}px` : "auto";
    this.values.style.top = `${event.clientY - box.top + 14}px`;
  }
  quiet() { this.values.hidden = true; }

  curves(width) {
    const { curves: lines, axes, differences, noise_floor: floor, margin, capture } = this.data;
    const steps = lines.flatMap((line) => [line.step[0], line.step[line.step.length - 1]]);
    const whole = extent(steps), domain = this.zoom || whole;
    const within = (line) => line.y.filter((y, at) => y !== null && line.step[at] >= domain[0] && line.step[at] <= domain[1]);
    const x = linear(domain, [52, width - 8]);
    const panels = [], upper = [230, 8], lower = [150, 8];
    const ys = this.shown(lines).flatMap(within);
    const span = ys.length ? extent([0, ...ys]) : [0, 1];
    panels.push(this.panel(width, 250, x, domain, linear(span, upper), ticks(...span, 5).map((value) => [value, figureOf(value)]),
      this.shown(lines), false, capture));
    const shown = this.shown(differences), behind = floor ? [{ ...floor, eager: true }] : [];
    const [scale, marks] = logarithmic([margin, ...[...shown, ...behind].flatMap(within)], lower);
    const second = this.panel(width, 170, x, domain, scale, marks, [...behind, ...shown], true, capture);
    second.append(make("line", { class: "margin", x1: 52, x2: width - 8, y1: scale(margin), y2: scale(margin) }));
    panels.push(make("p", {}, `${axes[1]}; dashed: the margin ${figureOf(margin)}${floor ? "; grey: noise floor of eager repeats" : ""}`), second);
    panels.forEach((panel) => panel.tagName === "svg" && this.follow(panel, x, domain));
    return [make("p", {}, axes[0]), ...panels, make("p", {}, this.zoom ? `steps ${Math.ceil(domain[0])} to ${Math.floor(domain[1])}; double-click to show all` : "step; drag to zoom" + (this.data.thinned ? `; ${this.data.steps} steps are thinned to the extremes of short intervals` : ""))];
  }
  panel(width, height, x, domain, y, marks, lines, differences, capture) {
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": this.root.querySelector("figcaption").textContent });
    const bottom = height - 20;
    for (const [value, text] of marks) {
      svg.append(make("line", { class: "axis", x1: 52, x2: width - 8, y1: y(value), y2: y(value) }),
        make("text", { x: 48, y: y(value) + 4, "text-anchor": "end" }, text));
    }
    for (const value of ticks(...domain, width / 110)) svg.append(make("text", { x: x(value), y: height - 5, "text-anchor": "middle" }, figureOf(value)));
    if (capture !== null && capture >= domain[0] && capture <= domain[1]) {
      svg.append(make("line", { class: "mark", x1: x(capture), x2: x(capture), y1: 4, y2: bottom }));
      if (!differences) svg.append(make("text", { x: x(capture) + 4, y: bottom - 4 }, "capture"));
    }
    for (const line of lines) {
      let path = "", crosses = "", pen = "M";
      line.y.forEach((value, at) => {
        const step = line.step[at];
        if (step < domain[0] || step > domain[1]) return;
        if (value === null) { crosses += `M${x(step) - 3} 5l6 6m0 -6l-6 6`; pen = "M"; return; }
        path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      });
      const eager = line.eager || (!differences && line.colour === 0);
      const drawn = make("path", { class: eager ? "curve eager" : "curve", d: path, "data-label": line.label });
      drawn.style.stroke = series(line.colour);
      svg.append(drawn);
      if (crosses) svg.append(make("path", { class: "bad", d: crosses }));
    }
    return svg;
  }
  // A row a cell: its repeats' values, then their differences.
  rows(step) {
    const values = (lines, label, digits) => lines.filter((line) => line.label === label && line.step.includes(step))
      .map((line) => figureOf(line.y[line.step.indexOf(step)], digits)).join(", ");
    const cells = new Map(this.shown(this.data.curves).map((line) => [line.label, line.colour]));
    return [...cells].map(([label, colour]) => {
      const value = values(this.data.curves, label, 7), difference = values(this.data.differences, label, 2);
      return [colour, `${label}: ${value || "no such step"}${difference ? `; difference ${difference}` : ""}`];
    });
  }
  follow(svg, x, domain) {
    const at = (event) => {
      const box = svg.getBoundingClientRect(), place = ((event.clientX - box.left) / box.width) * this.drawn;
      const share = (place - x(domain[0])) / (x(domain[1]) - x(domain[0]));
      return domain[0] + Math.min(1, Math.max(0, share)) * (domain[1] - domain[0]);
    };
    let from = null, mark = null;
    svg.addEventListener("pointerdown", (event) => { from = at(event); svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointermove", (event) => {
      const now = at(event);
      if (mark) mark.remove();
      const left = Math.min(x(from ?? now), x(now)), wide = Math.abs(x(now) - x(from ?? now)) || 1;
      mark = make("rect", { class: "zoomed", x: left, y: 4, width: wide, height: svg.viewBox.baseVal.height - 24 });
      svg.append(mark);
      this.say(event, `step ${Math.round(now)}`, this.rows(Math.round(now)));
    });
    const end = (event) => {
      const to = from === null ? null : at(event);
      if (to !== null && Math.abs(x(to) - x(from)) > 8) { this.zoom = [Math.min(from, to), Math.max(from, to)]; this.draw(); }
      from = null;
    };
    svg.addEventListener("pointerup", end);
    svg.addEventListener("pointercancel", () => { from = null; });
    svg.addEventListener("pointerleave", () => { this.quiet(); if (mark) mark.remove(); });
    svg.addEventListener("dblclick", () => { this.zoom = undefined; this.draw(); });
  }

  speeds(width) {
    const bars = this.shown(this.data.bars), height = 34 + 26 * bars.length, x = linear([this.data.left, this.data.right], [40, width - 12]);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "speed-ups" });
    for (const value of [...ticks(this.data.left, this.data.right, width / 110), 1]) {
      svg.append(make("line", { class: value === 1 ? "mark" : "axis", x1: x(value), x2: x(value), y1: 4, y2: height - 22 }),
        make("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, figureOf(value)));
    }
    const edge = (value) => x(Math.min(value, this.data.right));
    bars.forEach((bar, row) => {
      const { low, high, bound } = bar, y = 16 + 26 * row, colour = series(bar.colour), group = make("g", { "data-label": bar.name },
        make("rect", { x: 0, y: y - 13, width, height: 26, fill: "transparent" }), make("text", { x: 34, y: y + 4, "text-anchor": "end" }, bar.name));
      if (low !== null) group.append(make("line", { x1: edge(low), x2: edge(high), y1: y, y2: y, stroke: colour, "stroke-width": 2.5 }));
      if (high > this.data.right) group.append(make("path", { class: "beyond", d: `M${width - 4} ${y}l-9-5v10z`, fill: colour }));
      group.append(make("rect", { x: x(bar.ratio) - 5, y: y - 5, width: 10, height: 10, rx: 5, fill: colour }));
      if (bound !== null) group.append(make("line", { class: "bound", x1: x(bound), x2: x(bound), y1: y - 9, y2: y + 9 }));
      group.addEventListener("pointermove", (event) => this.say(event, `${bar.name}: ${bar.label}`, [[bar.colour,
        `${bar.ratio.toFixed(2)}x${low === null ? "" : `, ${low.toFixed(2)} to ${high.toFixed(2)}`}${bound === null ? "" : `; upper bound ${bound.toFixed(2)}x`}`]]));
      group.addEventListener("pointerleave", () => this.quiet());
      svg.append(group);
    });
    const marks = bars.some((bar) => bar.bound !== null) ? ", bar: upper bound" : "";
    return [svg, make("p", {}, `${this.data.unit}; dot: speed-up, line: its interval (an arrow if it goes on)${marks}`)];
  }

  times(width) {
    const boxes = this.shown(this.data.boxes), height = 34 + 34 * boxes.length;
    const ends = boxes.flatMap((box) => box.percentiles);
    const span = [0, ends.length ? extent(ends)[1] : 1], x = linear(span, [12, width - 12]);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "step times" });
    for (const value of ticks(...span, width / 110)) {
      svg.append(make("line", { class: "axis", x1: x(value), x2: x(value), y1: 4, y2: height - 22 }),
        make("text", { x: x(value), y: height - 6, "text-anchor": "middle" }, figureOf(value)));
    }
    boxes.forEach((box, row) => {
      const [low, first, middle, third, high] = box.percentiles, y = 8 + 34 * row, colour = series(box.colour);
      const group = make("g", { "data-label": box.label },
        make("rect", { x: 0, y: y - 4, width, height: 34, fill: "transparent" }),
        make("line", { x1: x(low), x2: x(high), y1: y + 11, y2: y + 11, stroke: colour, "stroke-width": 1.5 }),
        make("rect", { x: x(first), y, width: Math.max(1, x(third) - x(first)), height: 22, fill: colour, opacity: 0.45 }),
        make("line", { x1: x(middle), x2: x(middle), y1: y, y2: y + 22, stroke: colour, "stroke-width": 3 }));
      group.addEventListener("pointermove", (event) => this.say(event, box.label, [
        [box.colour, `median ${figureOf(middle, 5)}`], [box.colour, `middle half of ${box.steps} steps ${figureOf(first, 5)} to ${figureOf(third, 5)}`],
        [box.colour, `5% to 95% ${figureOf(low, 5)} to ${figureOf(high, 5)}`]]));
      group.addEventListener("pointerleave", () => this.quiet());
      svg.append(group);
    });
    return [svg, make("p", {}, `${this.data.unit}; line: median, box: middle half, whiskers: 5 to 95%`)];
  }

  memory(width) {
    const bars = this.shown(this.data.bars), columns = this.data.columns, height = 240;
    const top = Math.max(1e-9, extent(bars.flatMap((bar) => bar.heights.map((found, place) => found + bar.floors[place])))[1]), y = linear([0, top], [height - 24, 10]);
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "memory by phase" });
    for (const value of ticks(0, top, 5)) {
      svg.append(make("line", { class: "axis", x1: 40, x2: width - 4, y1: y(value), y2: y(value) }),
        make("text", { x: 36, y: y(value) + 4, "text-anchor": "end" }, figureOf(value)));
    }
    const wide = (width - 44) / columns.length, each = (wide * 0.84) / (bars.length || 1);
    columns.forEach((column, place) => {
      const group = make("g", {}, make("rect", { x: 40 + wide * place, y: 0, width: wide, height, fill: "transparent" }));
      bars.forEach((bar, index) => {
        const found = bar.heights[place] ?? 0, floor = bar.floors[place];
        group.append(make("rect", { x: 40 + wide * (place + 0.08) + each * index, y: y(floor + found), width: each * 0.92, height: y(0) - y(found),
          fill: series(bar.colour), opacity: bar.colour ? 0.9 : 0.6, "data-label": bar.label }));
      });
      group.append(make("text", { x: 40 + wide * (place + 0.5), y: height - 8, "text-anchor": "middle" }, wide < 6.2 * column.length ? column.slice(0, Math.max(3, wide / 7)) : column));
      group.addEventListener("pointermove", (event) => this.say(event, column, bars.map((bar) =>
        [bar.colour, `${bar.heights[place] === null ? "none" : figureOf(bar.heights[place]) + " GiB"} ${bar.label}`])));
      group.addEventListener("pointerleave", () => this.quiet());
      svg.append(group);
    });
    return [svg, make("p", {}, `GiB of ${this.data.unit}`)];
  }
}

// A column sorts by the first number of each cell, or by its text where it has none.
function sortable(table) {
  table.querySelectorAll("th").forEach((head, column) => {
    head.tabIndex = 0;
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const key = (row) => { const text = row.cells[column].textContent, found = /-?\d[\d,]*\.?\d*(e[-+]?\d+)?/i.exec(text); return [found ? Number(found[0].replaceAll(",", "")) : Infinity, text]; };
      const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
      const order = column === 0 ? ([a], [b]) => a[1].localeCompare(b[1], "en", { numeric: true }) : ([a], [b]) => a[0] - b[0] || (a[1] < b[1] ? -1 : a[1] > b[1] ? 1 : 0);
      rows.sort((a, b) => (down ? -1 : 1) * (order(a, b) || 0));
      table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows.map(([, row]) => row));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); } });
  });
}

document.querySelectorAll("table").forEach(sortable);
document.querySelectorAll("figure").forEach((root) => new Figure(root));
