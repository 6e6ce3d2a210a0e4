// Section 4: the same budget as a chain, a fixed tree and a best-first tree.

import { key, lines } from "./chart.js";
import { byId, clipped, el, short, sized, slider, svg } from "./dom.js";
import { interpolate } from "./speed.js";
import { coverage, covered, layout, within } from "./trees.js";

const KINDS = {
  chain: ["Chain", "all on one line", "var(--fill-blue)", null],
  fixed: ["Fixed tree", "a shape chosen beforehand, best on average", "var(--fill-purple)", "7 3"],
  best: ["Best-first tree", "the nodes that the draft finds likeliest now", "var(--fill-green)", "2 3"],
};
const MOST = 16;

/** Tokens of the run that one draft covers within a budget. */
function reached(position, kind, nodes) {
  const draft = within(position[kind], nodes);
  return covered(draft.tokens, draft.parents, position.text);
}

export function shapeView(data) {
  const body = byId("shape-body");
  const positions = data.compared ?? [];
  if (!positions.length) {
    body.append(el("p", {}, "This page holds no drafts of other shapes. They need the model and a draft model: outrider explain RUN.jsonl, without --recorded."));
    return;
  }
  const name = (token) => data.texts[token] ?? `#${token}`;
  const curve = data.costs[0];
  const verify = (rows) => (curve.balance ? Math.max(rows, curve.balance) / curve.balance : interpolate(curve.nodes, rows));
  const level = curve.draft ?? 0.1;
  const better = positions.findIndex((one) => reached(one, "best", 6) > reached(one, "chain", 6) + 1); // a tree that saves something
  let [nodes, at] = [6, Math.max(better, 0)];
  const table = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, Array.from({ length: MOST + 1 }, (_, n) => {
    const found = coverage(positions, kind, n);
    const cost = n ? found.levels * level + verify(n + 1) / verify(1) : 1;
    return { ...found, cost, speedup: (1 + found.tokens) / cost };
  })]));

  const pictures = el("div", { class: "trees" });
  const chart = el("div", {});
  const says = el("p", { role: "status", "aria-live": "polite" });
  const numbers = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Coverage and cost by shape" });

  const picture = (kind) => {
    const position = positions[at];
    const draft = within(position[kind], nodes);
    const kept = covered(draft.tokens, draft.parents, position.text);
    const { column, row, rows, columns } = layout(draft.parents);
    const [wide, high, cw, ch] = [64, 22, 78, 30];
    const node = svg("svg", { width: (columns - 1) * cw + wide + 2, height: (rows - 1) * ch + high + 2, role: "img", "aria-label": `${KINDS[kind][0]} of ${draft.tokens.length - 1} draft tokens; ${kept} of them are what the run wrote` });
    const good = new Set([0]);
    draft.parents.forEach((parent, n) => { if (n && good.has(parent) && draft.tokens[n] === position.text[column[n] - 1]) good.add(n); });
    draft.parents.forEach((parent, n) => {
      const [x, y] = [column[n] * cw + 1, row[n] * ch + 1];
      if (n) node.append(svg("path", { d: `M${column[parent] * cw + wide + 1},${row[parent] * ch + high / 2 + 1}C${x - 7},${row[parent] * ch + high / 2 + 1} ${x - 7},${y + high / 2} ${x},${y + high / 2}`, fill: "none", stroke: good.has(n) ? "var(--green)" : "var(--grey)", "stroke-width": good.has(n) ? 2.5 : 1 }));
      node.append(svg("rect", { x, y, width: wide, height: high, rx: 4, fill: n && good.has(n) ? "var(--accepted)" : "var(--raised)", stroke: n && good.has(n) ? "var(--green)" : "var(--grey)", "stroke-dasharray": n ? null : "3 2" }));
      node.append(svg("text", { class: "mono", x: x + 5, y: y + 15, style: { "font-size": "10.5px" } }, `${n && good.has(n) ? "✓ " : ""}${clipped(name(draft.tokens[n]), n && good.has(n) ? 6 : 8)}`));
    });
    const total = table[kind][nodes];
    return el("div", {}, el("h3", {}, KINDS[kind][0]), el("p", { class: "small soft" }, `${KINDS[kind][1]}. Here ${kept} kept; on average ${short(total.tokens)} of ${nodes}.`), el("div", { class: "mini", tabindex: 0, role: "region", "aria-label": KINDS[kind][0] }, node));
  };

  const drawChart = (width) => {
    const costs = Object.values(table).flat().map((one) => one.cost);
    const [low, high] = [1, Math.max(...costs) * 1.04];
    const most = Math.max(...Object.values(table).flat().map((one) => one.tokens)) + 1.3;
    chart.replaceChildren(lines({
      title: "Tokens a step by cost of a step, for chains, fixed trees and best-first trees", width, height: 280,
      x: { low, high, name: "cost of a step, in plain steps" }, y: { low: 1, high: most, name: "tokens a step" },
      series: [
        { points: [[low, low], [Math.min(high, most), Math.min(high, most)]], color: "var(--grey)", dash: "3 4", width: 1.5 },
        ...Object.entries(KINDS).map(([kind, [, , color, dash]]) => ({ points: table[kind].slice(0, MOST + 1).map((one) => [one.cost, 1 + one.tokens]), color, dash, width: 2.5 })),
      ],
      marks: Object.entries(KINDS).map(([kind, [, , color]]) => ({ x: table[kind][nodes].cost, y: 1 + table[kind][nodes].tokens, text: "", color })),
    }));
  };

  const draw = () => {
    pictures.replaceChildren(...Object.keys(KINDS).map(picture));
    const order = Object.keys(KINDS).sort((a, b) => table[b][nodes].tokens - table[a][nodes].tokens);
    const gain = table[order[0]][nodes].tokens - table.chain[nodes].tokens;
    says.textContent = `With ${nodes} draft tokens a step: ${order.map((kind) => `${KINDS[kind][0].toLowerCase()} ${short(1 + table[kind][nodes].tokens)} tokens a step at cost ${short(table[kind][nodes].cost)}`).join("; ")}. ${order[0] === "chain" ? "Here the chain covers most: the draft is rarely unsure." : `The ${KINDS[order[0]][0].toLowerCase()} covers ${short(gain)} tokens more than the chain.`}`;
    numbers.replaceChildren(el("table", {}, el("caption", { class: "hidden-text" }, "Tokens a step, cost and speedup by shape and budget"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "draft tokens"), Object.values(KINDS).flatMap(([title]) => [el("th", { scope: "col" }, title), el("th", { scope: "col" }, "cost"), el("th", { scope: "col" }, "speedup")]))),
      el("tbody", {}, [1, 2, 4, 6, 8, 12, 16].map((n) => el("tr", {}, el("th", { scope: "row" }, n), Object.keys(KINDS).flatMap((kind) => [el("td", {}, short(1 + table[kind][n].tokens)), el("td", {}, short(table[kind][n].cost)), el("td", {}, `${short(table[kind][n].speedup)}×`)]))))));
    again?.();
  };
  body.append(
    el("div", { class: "fields" },
      slider({ id: "shape-nodes", name: "Budget: draft tokens a step", min: 1, max: MOST, step: 1, value: nodes, show: String, change: (v) => { nodes = v; draw(); } }).node,
      slider({ id: "shape-at", name: "Position in the run", min: 0, max: positions.length - 1, step: 1, value: at, show: (v) => `after token ${positions[v].at}`, change: (v) => { at = v; draw(); } }).node),
    pictures, says, chart,
    el("ul", { class: "legend" }, Object.values(KINDS).map(([title, , color, dash]) => el("li", {}, key(color, "line", dash), title)), el("li", {}, key("var(--grey)", "line", "3 4"), "break-even: below it plain decoding is faster")),
    el("p", { class: "small soft" }, `Each point is a budget from 1 to ${MOST}; the circles mark the chosen one. Means over ${positions.length} positions of this run, with the costs of ${curve.name}. A tree of ${MOST} nodes was drafted at each position; smaller budgets keep its first nodes.`),
    el("details", {}, el("summary", {}, "The numbers"), numbers),
  );
  let again = null;
  draw();
  again = sized(chart, drawChart);
}
