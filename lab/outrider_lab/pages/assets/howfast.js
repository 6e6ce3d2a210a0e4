// Section 3: expected speed, by acceptance, draft length, tree width and costs.

import { key, lines, plain } from "./chart.js";
import { byId, choice, count, el, percent, radios, short, sized, slider } from "./dom.js";
import { geometric, passCost, setting } from "./speed.js";
import { survivalOf } from "./trees.js";

const DEEPEST = 16;
const WIDTHS = [1, 2, 3, 4];
const COLORS = ["var(--fill-blue)", "var(--fill-orange)", "var(--fill-green)", "var(--fill-purple)"];
const INKS = ["var(--blue)", "var(--orange)", "var(--green)", "var(--purple)"];
const DASHES = [null, "7 3", "2 3", "9 3 2 3"];

export function speedView(data) {
  const body = byId("speed-body");
  const same = data.requests.filter((request) => !request.title || request === data.requests[0]); // named runs have different drafts
  const steps = same.flatMap((request) => request.steps);
  const measured = survivalOf(steps);
  const curves = [...data.costs, { name: "Ideal: more tokens cost nothing", source: "a bound that no hardware reaches", nodes: [[1, 1]], draft: null }];
  let now = { alpha: 0.8, depth: 2, width: 1, c: curves[0].draft ?? 0.1, batch: 1, curve: 0, shape: "alpha" };

  const verify = () => {
    return (rows) => passCost(curves[now.curve], rows * now.batch);
  };
  const survival = () => (now.shape === "measured" && measured.length ? measured : null);
  const reach = () => (survival() ? measured.length : DEEPEST);
  const value = (depth, width) => setting({ alpha: now.alpha, survival: width === 1 ? survival() : null, depth, width, c: now.c, verify: verify() });

  const chart = el("div", {});
  const facts = el("div", { class: "facts" });
  const verdict = el("p", { role: "status", "aria-live": "polite" });
  const table = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Speedup by draft length and width" });
  const source = el("p", { class: "small soft" });

  const all = () => WIDTHS.map((width) => Array.from({ length: (width === 1 ? reach() : DEEPEST) + 1 }, (_, depth) => value(depth, width)));

  const best = (grid) => {
    let found = { width: 1, depth: 0, ...grid[0][0] };
    grid.forEach((row, w) => row.forEach((one, depth) => { if (one.speedup > found.speedup + 1e-12) found = { width: WIDTHS[w], depth, ...one }; }));
    return found;
  };

  const best_ = (top) => (top.width > 1 ? `a tree ${top.depth} deep with ${top.width} choices` : `a chain of ${top.depth}`);

  const drawChart = (width) => {
    const grid = all();
    const top = best(grid);
    const most = Math.max(1.5, top.speedup * 1.15, ...grid.flatMap((row) => row.map((one) => one.speedup)).filter((x) => x < 20));
    const own = value(now.depth, now.width);
    const marks = [{ x: now.depth, y: own.speedup, text: `chosen: ${short(own.speedup)}×`, color: "var(--ink)" }];
    if (top.depth && (top.depth !== now.depth || top.width !== now.width)) marks.push({ x: top.depth, y: top.speedup, text: `best: ${short(top.speedup)}×`, color: "var(--green)" });
    chart.replaceChildren(lines({
      title: `Speedup against plain decoding by draft length. Chosen ${short(own.speedup)}, best ${short(top.speedup)} with drafts of ${top.depth}, ${top.width} choices each.`,
      width, height: 300, x: { low: 0, high: DEEPEST, name: "draft length, tokens", show: String }, y: { low: 0, high: most, name: "times as fast as plain decoding", show: (v) => `${plain(v)}×` },
      bands: [{ from: 0, to: 1, color: "var(--bad)", text: "slower than plain decoding" }], marks,
      series: WIDTHS.map((w, i) => ({ name: `width ${w}`, points: grid[i].map((one, depth) => [depth, one.speedup]), color: COLORS[i], dash: DASHES[i], width: w === now.width ? 3.5 : 1.75 })),
    }));
  };

  const draw = () => {
    const grid = all();
    const top = best(grid);
    const own = value(now.depth, now.width);
    facts.replaceChildren(
      el("div", { class: "fact" }, el("b", {}, short(own.tokens)), el("span", {}, "tokens a step, on average")),
      el("div", { class: "fact" }, el("b", {}, short(own.cost)), el("span", {}, "time of a step, in plain steps")),
      el("div", { class: "fact" }, el("b", { id: "speed-result" }, `${short(own.speedup)}×`), el("span", {}, own.speedup >= 1 ? "as fast as plain decoding" : "as fast as plain decoding: slower")),
      el("div", { class: "fact" }, el("b", {}, top.depth ? `${short(top.speedup)}×` : "plain"), el("span", {}, top.depth ? `best: ${best_(top)}` : "best: no draft at all")),
    );
    const chosenCost = verify()(now.depth * now.width + 1) / verify()(1);
    verdict.textContent = top.depth
      ? `One pass over ${now.depth * now.width + 1} tokens takes as long as ${short(chosenCost)} plain steps here. The best is ${best_(top)}: ${short(top.speedup)} times plain decoding.`
      : `Here no draft helps. One pass over ${now.depth * now.width + 1} tokens takes as long as ${short(chosenCost)} plain steps, and the draft comes on top. Plain decoding is best; a good engine then stops drafting.`;
    source.textContent = `${curves[now.curve].name}: ${curves[now.curve].source}.`;
    table.replaceChildren(el("table", {}, el("caption", { class: "hidden-text" }, "Speedup by draft length and width"),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "draft length"), WIDTHS.map((w) => el("th", { scope: "col" }, w === 1 ? "chain" : `${w} choices`)))),
      el("tbody", {}, [1, 2, 3, 4, 6, 8, 12, 16].map((depth) => el("tr", {}, el("th", { scope: "row" }, depth), grid.map((row) => el("td", {}, row[depth] ? `${short(row[depth].speedup)}×` : "–")))))));
    again?.();
  };
  const set = (name) => (v) => { now[name] = v; draw(); };

  const cost = slider({ id: "speed-c", name: "Time to draft one token, in plain steps", min: 0, max: 0.6, step: 0.005, value: Math.min(now.c, 0.6), show: short, change: set("c") });
  const alpha = slider({ id: "speed-alpha", name: "How often a draft token is right", min: 0.05, max: 0.98, step: 0.01, value: now.alpha, show: percent, change: set("alpha") });
  const hardware = choice({
    id: "speed-curve", name: "Model and machine", options: curves.map((curve, i) => [String(i), curve.name]), value: "0",
    change: (v) => { now.curve = Number(v); const own = curves[now.curve].draft; if (own !== null && own !== undefined) { now.c = own; cost.set(Math.min(own, 0.6)); } draw(); },
  });
  body.append(
    measured.length ? radios({ name: "How often drafts are right", options: [["alpha", "Each token is right as often"], ["measured", "As often as in this run"]], value: "alpha", change: (v) => { now.shape = v; alpha.input.disabled = v === "measured"; if (v === "measured") { now.alpha = measured[0]; alpha.set(measured[0]); } draw(); } }) : "",
    el("div", { class: "fields" }, alpha.node,
      slider({ id: "speed-depth", name: "Draft length, tokens", min: 0, max: DEEPEST, step: 1, value: now.depth, show: String, change: set("depth") }).node,
      slider({ id: "speed-width", name: "Choices for each place (1 is a chain)", min: 1, max: 4, step: 1, value: now.width, show: String, change: set("width") }).node,
      cost.node, hardware.node,
      slider({ id: "speed-batch", name: "Requests at once", min: 1, max: 128, step: 1, value: 1, show: String, change: set("batch") }).node),
    source, facts, verdict, chart,
    el("ul", { class: "legend" }, WIDTHS.map((w, i) => el("li", {}, key(COLORS[i], "line", DASHES[i]), el("span", { style: { color: INKS[i] } }, w === 1 ? "chain" : `tree with ${w} choices`)))),
    el("details", {}, el("summary", {}, "The numbers, and the formulas"), table,
      el("p", { class: "small soft" }, "α: how often a draft token is right. γ: draft length. c: time to draft one token. V(M): time of a pass over M tokens. S: how often the first j draft tokens are all kept. Times are in plain steps."),
      el("p", { class: "formula" }, "tokens a step = 1 + Σ S", el("sub", {}, "j"), " = (1 − α", el("sup", {}, "γ+1"), ") / (1 − α)"),
      el("p", { class: "formula" }, "speedup = tokens a step / (γ · c + V(M) / V(1)),  M = draft tokens + 1"),
      el("p", { class: "small soft" }, "First formula: Leviathan et al. 2211.17192, equation 1; with V = 1 the second is their theorem 3.8. Trees are the best ones for usual acceptance by rank (Sequoia, 2402.12374, section 4.1). For several requests, the tokens of all of them stand in the same pass. A figure from a data sheet takes the larger of the times for arithmetic and for reading the weights."),
      el("p", { class: "small soft" }, measured.length ? `S in this run: ${measured.map((s, j) => `${j + 1}: ${percent(s)}`).join(", ")}. At α = 70 % it would be ${geometric(0.7, measured.length).map((s) => percent(s)).join(", ")}.` : "")),
  );
  let again = null;
  draw();
  again = sized(chart, drawChart);
}
