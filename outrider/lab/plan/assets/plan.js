// The page of a plan: facts, pictures and formulas from the data that `outrider plan` wrote.

import { key, lines, plain } from "./chart.js";
import { byId, el, percent, seconds, short, sized } from "./dom.js";

const plan = JSON.parse(byId("data").textContent);
const NAMES = { plain: "plain decoding", fixed: "one draft length always", adaptive: "draft length by load" };
const COLORS = { plain: "var(--fill-grey)", fixed: "var(--fill-orange)", adaptive: "var(--fill-blue)" };
const DASHES = { plain: null, fixed: "7 3", adaptive: null };
const chosen = plan.fleets[plan.policy];
const fixedLength = plan.schedule[0][2];

function pieces(items) {
  return items.flatMap((item) => [el("dt", {}, item.name), el("dd", {}, item.value ?? seconds(item.seconds), el("span", { class: "soft" }, item.formula))]);
}

function table(caption, heads, rows) {
  return el("table", {}, el("caption", { class: "hidden-text" }, caption),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => (i ? el("td", {}, cell) : el("th", { scope: "row" }, cell)))))));
}

function replicas(n) {
  return `${n.toLocaleString("en-US")} replica${n === 1 ? "" : "s"}`;
}

function top() {
  byId("headline").textContent = plan.policy === "plain" ? `Do not speculate: ${replicas(chosen.replicas)}` : `Speculate: ${replicas(chosen.replicas)}, ${NAMES[plan.policy]}`;
  byId("subline").textContent = plan.inputs.filter((x) => ["model", "hardware", "demand", "costs"].includes(x.name)).map((x) => x.value).join(" · ");
  const facts = [
    [chosen.replicas.toLocaleString("en-US"), "replicas"],
    plan.speedup === null ? ["not enough", "as many replicas for plain decoding: its queue grows without end"] : [`${short(plan.speedup)}×`, "speed of an answer against plain decoding on as many replicas"],
    [seconds(chosen.latency), "latency of an answer, 90th percentile"],
    [seconds(chosen.ttft), "to the first token, 90th percentile"],
    [percent(chosen.load), "of its capacity in use"],
    plan.cost === null ? [short(plan.replica_hours), "replica hours for a million output tokens"] : [short(plan.cost), "cost of a million output tokens, in the currency of --price"],
  ];
  byId("facts").replaceChildren(...facts.map(([value, name]) => el("div", { class: "fact" }, el("b", {}, value), el("span", {}, name))));
  byId("notes").replaceChildren(...plan.notes.map((note) => el("li", {}, note)));
}

function map() {
  const depths = plan.table[0].by_depth.map((_, depth) => depth).slice(1);
  const cell = (row, depth) => {
    const speed = row.by_depth[depth];
    const part = `${Math.round(Math.min(Math.abs(Math.log2(speed)), 1) * 55)}%`;
    const kind = `${speed >= 1 ? "pays" : "loses"}${depth === row.depth ? " best" : ""}${row.reached ? "" : " far"}`;
    return el("td", { class: kind, style: { "--part": part } }, `${short(speed)}×`);
  };
  const head = el("tr", {}, el("th", { scope: "col" }, "batch"), depths.map((depth) => el("th", { scope: "col" }, String(depth))));
  byId("map").replaceChildren(el("table", { class: "map" },
    el("caption", { class: "hidden-text" }, "Speedup of decoding by batch size, down, and draft length, across. Below 1 speculation loses."),
    el("thead", {}, head),
    el("tbody", {}, plan.table.map((row) => el("tr", {}, el("th", { scope: "row" }, String(row.batch_size)), depths.map((depth) => cell(row, depth)))))));
  const note = (text, color) => el("li", {}, color ? key(color, "box") : "", text);
  byId("map-legend").replaceChildren(note("faster than plain decoding", "var(--fill-blue)"), note("slower: speculation loses", "var(--fill-orange)"),
    note("underlined: the best length for answers and prompts together"), note("across: draft tokens; down: sequences in the batch"),
    ...(plan.table.some((row) => !row.reached) ? [note("pale: a batch that this demand does not reach")] : []));
}

function batches() {
  const depths = [...new Set([1, Math.ceil(fixedLength / 2), fixedLength, plan.table[0].by_depth.length - 1])].filter((d) => d > 0 && d < plan.table[0].by_depth.length).sort((a, b) => a - b);
  const colors = ["var(--fill-green)", "var(--fill-purple)", "var(--fill-orange)", "var(--fill-yellow)"];
  const dashes = ["2 3", "9 3 2 3", "7 3", "1 4"];
  const best = plan.table.map((row) => [Math.log2(row.batch_size), row.speedup]);
  const series = depths.map((depth, i) => ({ points: plan.table.map((row) => [Math.log2(row.batch_size), row.by_depth[depth]]), color: colors[i], dash: dashes[i] }));
  const high = Math.max(1.2, ...best.map((p) => p[1]), ...series.flatMap((s) => s.points.map((p) => p[1]))) * 1.1;
  const box = byId("batch-chart");
  const from = plan.loses_from;
  sized(box, (width) => box.replaceChildren(lines({
    title: `Speed of decoding against plain decoding, by batch size. ${from ? `A draft of ${fixedLength} tokens is slower from batch size ${from} on.` : "No size here loses."}`,
    width, height: 280, x: { low: 0, high: best.at(-1)[0] || 1, name: "sequences in the batch", show: (v) => (Number.isInteger(v) ? String(2 ** v) : "") },
    y: { low: 0, high, name: "times as fast as plain decoding", show: (v) => `${plain(v)}×` },
    bands: [{ from: 0, to: 1, color: "var(--bad)", text: "speculation loses" }],
    series: [...series, { points: best, color: COLORS.adaptive, width: 3.5, dots: true }],
  })));
  byId("batch-legend").replaceChildren(el("li", {}, key(COLORS.adaptive), "best length for each size"), ...depths.map((depth, i) => el("li", {}, key(colors[i], "line", dashes[i]), `${depth} draft token${depth === 1 ? "" : "s"} always`)));
}

function load() {
  if (!plan.sweep.length) return byId("load").closest("section").remove();
  const qps = plan.qps;
  const names = Object.keys(plan.fleets);
  const of = (name) => plan.sweep.filter(([, f]) => f.policy === name);
  const series = names.map((name) => ({ points: of(name).map(([share, f]) => [share * qps, f.stable ? f.latency : NaN]), color: COLORS[name], dash: DASHES[name], dots: true, width: name === plan.policy ? 3.5 : 2 }));
  const known = series.flatMap((s) => s.points.map((p) => p[1])).filter(Number.isFinite);
  const lowest = Math.min(...known);
  const lost = names.filter((name) => name !== "plain").flatMap((name) => of(name).filter(([share, f]) => {
    const other = of("plain").find(([s]) => s === share)[1];
    return !f.stable || (other.stable && f.latency > other.latency);
  }).map(([share]) => [name, share * qps]));
  const first = lost.length ? lost.reduce((a, b) => (b[1] < a[1] ? b : a)) : null;
  byId("load-text").textContent = `Latency of ${replicas(chosen.replicas)} when more or fewer requests come. A line ends where its queue grows without end. ` + (first ? `From ${short(first[1])} requests per second on, ${NAMES[first[0]]} is slower than plain decoding.` : "In this range speculation does not lose.");
  const box = byId("load-chart");
  sized(box, (width) => box.replaceChildren(lines({
    title: `90th percentile of latency by requests per second for ${names.map((n) => NAMES[n]).join(", ")}.`,
    width, height: 300, x: { low: 0, high: qps * Math.max(...plan.sweep.map(([share]) => share)), name: "requests per second", show: plain },
    y: { low: 0, high: Math.min(Math.max(...known), 6 * lowest) * 1.08, name: "seconds to the last token, 90th percentile", show: plain }, series,
  })));
  byId("load-legend").replaceChildren(...names.map((name) => el("li", {}, key(COLORS[name], "line", DASHES[name]), NAMES[name])));
  byId("load-table").replaceChildren(table("Forecasts by load", ["requests/s", ...names.map((n) => NAMES[n])],
    [...new Set(plan.sweep.map(([share]) => share))].map((share) => [short(share * qps), ...names.map((name) => { const f = of(name).find(([s]) => s === share)[1]; return f.stable ? seconds(f.latency) : "no end"; })])));
}

function tables() {
  const fleets = Object.entries(plan.fleets).map(([name, f]) => [NAMES[name], f.replicas.toLocaleString("en-US"), percent(f.load), seconds(f.wait), seconds(f.ttft), seconds(f.tpot), seconds(f.latency), short(f.batch_size)]);
  byId("fleet-table").replaceChildren(table("Replicas by policy", ["policy", "replicas", "load", "p90 wait", "p90 first token", "p90 per token", "p90 answer", "mean batch"], fleets));
  const rows = plan.table.map((r) => [String(r.batch_size), seconds(r.plain_seconds), String(r.depth), seconds(r.seconds), `${short(r.speedup)}×`, short(r.plain_tokens), short(r.tokens), r.reached ? "" : "not reached"]);
  byId("batch-table").replaceChildren(table("A replica by batch size", ["batch", "plain round", "best draft", "round with it", "decoding", "plain tokens/s", "best tokens/s", "note"], rows));
  byId("inputs").replaceChildren(...pieces(plan.inputs));
  byId("figures").replaceChildren(...pieces(plan.figures));
  byId("terms").replaceChildren(...pieces(plan.terms.length ? plan.terms : [{ name: "measured", value: "", formula: "rounds of each batch size and draft length were timed on a server" }]));
}

top();
map();
batches();
load();
tables();
