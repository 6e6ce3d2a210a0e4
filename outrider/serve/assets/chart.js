// Line charts as SVG. A chart has a title for screen readers; the numbers also stand in a table or in text beside it.

import { svg } from "./dom.js";

/** Round values for an axis from 0 or `low` to `high`. */
export function ticks(low, high, about) {
  const raw = (high - low) / Math.max(about, 1);
  if (!(raw > 0)) return [low];
  const size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * size).find((s) => s >= raw);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-6; x += step) found.push(Number(x.toPrecision(12)));
  return found;
}

/** A number of an axis, without zeros at its end. */
export function plain(x) {
  return String(Number(x.toPrecision(3)));
}

/** A chart.
 *
 * x, y: {low, high, name, show}. series: {name, points: [[x, y], ...], color, dash, width, dots, label}. bands: {from, to, color,
 * text} in y. marks: {x, y, text, color}. */
export function lines({ title, width, height = 260, x, y, series, bands = [], marks = [] }) {
  const [left, right, top, bottom] = [46, 14, 22, 40];
  const [wide, high] = [Math.max(width - left - right, 40), height - top - bottom];
  const px = (v) => left + ((v - x.low) / (x.high - x.low || 1)) * wide;
  const py = (v) => top + high - ((Math.min(Math.max(v, y.low), y.high) - y.low) / (y.high - y.low || 1)) * high;
  const node = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
  for (const band of bands) {
    const [from, to] = [py(band.to), py(band.from)];
    node.append(svg("rect", { x: left, y: from, width: wide, height: Math.max(to - from, 0), fill: band.color }));
    if (band.text && to - from > 16) node.append(svg("text", { class: "tick", x: left + wide - 6, y: to - 6, "text-anchor": "end" }, band.text));
  }
  const show = (axis) => axis.show ?? plain;
  for (const v of ticks(y.low, y.high, high / 50)) {
    node.append(svg("line", { class: "grid", x1: left, x2: left + wide, y1: py(v), y2: py(v) }));
    node.append(svg("text", { class: "tick", x: left - 6, y: py(v) + 4, "text-anchor": "end" }, show(y)(v)));
  }
  for (const v of ticks(x.low, x.high, wide / 70)) {
    node.append(svg("text", { class: "tick", x: px(v), y: top + high + 16, "text-anchor": "middle" }, show(x)(v)));
  }
  node.append(svg("line", { class: "axis", x1: left, x2: left + wide, y1: top + high, y2: top + high }));
  node.append(svg("text", { class: "tick", x: left + wide, y: height - 6, "text-anchor": "end" }, x.name));
  node.append(svg("text", { class: "tick", x: 0, y: 11 }, y.name));
  const ends = [];
  for (const one of series) {
    const known = one.points.filter((p) => Number.isFinite(p[1]));
    if (!known.length) continue;
    const path = known.map((p, i) => `${i ? "L" : "M"}${px(p[0]).toFixed(1)},${py(p[1]).toFixed(1)}`).join("");
    node.append(svg("path", { d: path, fill: "none", stroke: one.color, "stroke-width": one.width ?? 2, "stroke-dasharray": one.dash, "stroke-linejoin": "round" }));
    if (one.dots) for (const p of known) node.append(svg("circle", { cx: px(p[0]), cy: py(p[1]), r: 3, fill: one.color }));
    if (one.label) {
      const last = known.at(-1);
      let at = py(last[1]) - 7;
      while (ends.some((other) => Math.abs(other - at) < 14)) at -= 14;
      ends.push(at);
      node.append(svg("text", { x: Math.min(px(last[0]), left + wide), y: at, "text-anchor": "end", style: { fill: one.ink ?? one.color } }, one.label));
    }
  }
  // A label stands above every line beneath it, with a thread to its mark.
  const roof = (from, to) => Math.min(...series.flatMap((one) => one.points.filter((p, i, all) => px((all[i + 1] ?? p)[0]) >= from && px((all[i - 1] ?? p)[0]) <= to && Number.isFinite(p[1])).map((p) => py(p[1]))));
  const near = (a, b) => Math.abs(px(a.x) - px(b.x)) < 130 && Math.abs(py(a.y) - py(b.y)) < 18;
  for (const [n, mark] of marks.entries()) {
    node.append(svg("circle", { cx: px(mark.x), cy: py(mark.y), r: 6, fill: "none", stroke: mark.color, "stroke-width": 2.5 }));
    const end = px(mark.x) > left + wide * 0.6;
    if (!mark.text) continue;
    const [at, reach] = [px(mark.x) + (end ? -10 : 10), 8 * mark.text.length * (end ? -1 : 1)];
    const [from, to] = [Math.min(at, at + reach), Math.max(at, at + reach)];
    const above = marks.slice(0, n).some((other) => near(mark, other)) ? 28 : 10; // a label above that of a mark beside it
    const line = Math.max(Math.min(py(mark.y), roof(from, to)) - above, 22);
    node.append(svg("line", { x1: px(mark.x), y1: py(mark.y) - 7, x2: at, y2: line, stroke: mark.color }));
    node.append(svg("text", { x: at, y: line, "text-anchor": end ? "end" : "start", style: { "font-weight": 600 } }, mark.text));
  }
  return node;
}

/** A small picture of a line or a box for a legend. */
export function key(color, kind = "line", dash = null) {
  const box = svg("svg", { width: 18, height: 12, "aria-hidden": "true" });
  if (kind === "box") box.append(svg("rect", { width: 14, height: 12, rx: 2, fill: color }));
  else box.append(svg("line", { x1: 0, x2: 18, y1: 6, y2: 6, stroke: color, "stroke-width": 3, "stroke-dasharray": dash }));
  return box;
}
