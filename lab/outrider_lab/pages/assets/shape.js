// Section 4: the same budget as a chain, a fixed tree and a best-first tree.

import { key, lines } from "./chart.js";
import { byId, clipped, count, el, short, sized, slider, svg } from "./dom.js";
import { passCost } from "./speed.js";
import { coverage, covered, edge, fitted, levels, within } from "./trees.js";

const KINDS = {
  chain: ["Chain", "all on one line", "var(--fill-blue)", null],
  fixed: ["Fixed tree", "a shape chosen beforehand, best on average", "var(--fill-purple)", "7 3"],
  best: ["Best-first tree", "the nodes that the draft finds likeliest now", "var(--fill-green)", "2 3"],
};
const MOST = 16;
const BOX = { wide: 76, high: 24, column: 92, row: 34 };

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
  const verify = (rows) => passCost(curve, rows);
  const level = curve.draft ?? 0.1;
  const saved = (one, n) => reached(one, "best", n) - reached(one, "chain", n);
  let nodes = 6;
  const gains = positions.map((one) => saved(one, nodes));
  let at = gains.indexOf(Math.max(...gains)); // where a second choice saves most
  let room = 600;
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
    const places = fitted(draft.parents, room, BOX);
    const { x, y, width, height, scale } = places;
    const node = svg("svg", { viewBox: `-1 -1 ${width + 2} ${height + 2}`, width: (width + 2) * Math.min(scale, room / (width + 2)), role: "img", "aria-label": `${KINDS[kind][0]} of ${draft.tokens.length - 1} draft tokens; ${kept} of them are what the run wrote` });
    const good = new Set([0]);
    const depth = levels(draft.parents);
    draft.parents.forEach((parent, n) => { if (n && good.has(parent) && draft.tokens[n] === position.text[depth[n] - 1]) good.add(n); });
    draft.parents.forEach((parent, n) => {
      const on = n > 0 && good.has(n);
      if (n) node.append(svg("path", { d: edge(places, BOX, parent, n), fill: "none", stroke: on ? "var(--green)" : "var(--grey)", "stroke-width": on ? 2.5 : 1 }));
      node.append(svg("rect", { class: "leaf", x: x[n], y: y[n], width: BOX.wide, height: BOX.high, rx: 4, fill: on ? "var(--accepted)" : "var(--raised)", stroke: on ? "var(--green)" : "var(--grey)", "stroke-dasharray": n ? null : "3 2" }));
      node.append(svg("text", { class: "mono", x: x[n] + 5, y: y[n] + 16, style: { "font-size": "11px" } }, `${on ? "✓ " : ""}${clipped(name(draft.tokens[n]), on ? 8 : 10)}`));
    });
    const total = table[kind][nodes];
    return el("div", { class: "shape" }, el("div", {}, el("h3", {}, KINDS[kind][0]), el("p", { class: "small soft" }, `${KINDS[kind][1]}. Here ${kept} kept; on average ${short(total.tokens)} of ${nodes}.`)), el("div", { class: "drawing" }, node));
  };

  const drawChart = (width) => {
    const costs = Object.values(table).flat().map((one) => one.cost);
    const [low, high] = [1, Math.max(...costs) * 1.04];
    const most = Math.max(...Object.values(table).flat().map((one) => one.tokens)) + 1.3;
    chart.replaceChildren(lines({
      title: "Tokens a step by time of a step, for chains, fixed trees and best-first trees", width, height: 280,
      x: { low, high, name: "time of a step, in plain steps" }, y: { low: 1, high: most, name: "tokens a step" },
      series: [
        { points: [[low, low], [Math.min(high, most), Math.min(high, most)]], color: "var(--grey)", dash: "3 4", width: 1.5 },
        ...Object.entries(KINDS).map(([kind, [, , color, dash]]) => ({ points: table[kind].slice(0, MOST + 1).map((one) => [one.cost, 1 + one.tokens]), color, dash, width: 2.5 })),
      ],
      marks: Object.entries(KINDS).map(([kind, [, , color]]) => ({ x: table[kind][nodes].cost, y: 1 + table[kind][nodes].tokens, text: "", color })),
    }));
  };

  const draw = () => {
    pictures.replaceChildren(...Object.keys(KINDS).map(picture));
    const gain = saved(positions[at], nodes);
    const fastest = (kind) => table[kind].reduce((most, one, n) => (one.speedup > most.speedup ? { ...one, n } : most), { speedup: 1, n: 0 });
    const [chain, tree] = ["chain", "best"].map(fastest);
    const pays = ({ n, speedup }, what) => (n ? `the fastest ${what} has ${count(n, "draft token")} and is ${short(speedup)} times as fast as plain decoding` : `no ${what} is faster than plain decoding`);
    says.textContent = `${gain > 0 ? `With ${nodes} draft tokens, second choices save ${count(gain, "token")} here: the chain stops at a wrong token, and the best-first tree goes on with another choice.` : gain < 0 ? `With ${nodes} draft tokens the chain is ahead here: its first choices are right, and the tree has spent tokens on others.` : `With ${nodes} draft tokens, second choices save nothing here.`} ${Math.max(...gains) > 0 ? "" : "No position of this run has one that saves a token with a budget of 6. "}On average over the run, with these costs, ${pays(chain, "chain")}, and ${pays(tree, "tree")}.`;
    numbers.replaceChildren(el("table", {}, el("caption", { class: "hidden-text" }, "Tokens a step, time and speedup by shape and budget"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "draft tokens"), Object.values(KINDS).flatMap(([title]) => [el("th", { scope: "col" }, title), el("th", { scope: "col" }, "time"), el("th", { scope: "col" }, "speedup")]))),
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
  new ResizeObserver(() => {
    const now = Math.floor(pictures.querySelector(".drawing").clientWidth);
    if (now !== room) { room = now; draw(); }
  }).observe(pictures);
}
