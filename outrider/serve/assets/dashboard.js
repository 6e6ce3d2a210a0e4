// The live page of a server: reads its events and draws them. Closed while the page is hidden, so nothing is sent then.

import { lines } from "./chart.js";
import { byId, bytes, clipped, count, el, percent, radios, seconds, short, sized, visible } from "./dom.js";

const KEPT = 600; // points of a curve
const LEAST = 0.0005; // a share that is shown as zero
const WINDOWS = [["10", "10 s"], ["60", "1 min"], ["300", "5 min"]];
const ORIGINS = { a: "accepted", c: "corrected", b: "bonus", p: "plain", "?": "unknown" };
const PHASES = { target: "target", draft: "draft", verify: "verify", commit: "commit", outside: "outside steps" };
const DONE = { none: "no draft", reading: "reading the text" };
const SHOWN = 12;

let [source, hello, last, points, ended, span, failed, model] = [null, null, null, [], [], 60, [], ""];

const fact = (value, text) => el("div", { class: "fact" }, el("b", {}, value), el("span", {}, text));
const known = (x, show) => (x === null || x === undefined ? "–" : show(x));

/** Rows of [name, share of 1, text]. A full bar is 1. */
function bars(node, rows) {
  node.replaceChildren(...rows.flatMap(([name, share, text]) => [
    el("div", {}, name), el("div", { class: "bar" }, el("i", { style: { width: `${100 * share}%` } })), el("div", { class: "value" }, text),
  ]));
}

/** Survival by depth. The depths at its end that nothing reached are one row. */
function survivals(shares) {
  const alive = shares.findLastIndex((share) => share >= LEAST) + 1;
  const rows = shares.slice(0, alive).map((share, j) => [`first ${j + 1}`, share, percent(share)]);
  if (alive < shares.length) rows.push([`first ${alive + 1}${shares.length > alive + 1 ? " and more" : ""}`, 0, percent(0)]);
  return rows.length ? rows : [["no drafts", 0, "–"]];
}

function drawNow() {
  const now = last.windows[span];
  byId("box").className = `answer-box ${now.kind}`;
  byId("answer").textContent = visible(now.answer);
  const engine = last.engine;
  byId("facts").replaceChildren(
    fact(known(now.rate, short), "tokens/s, all requests"),
    fact(known(now.length, short), "tokens per request and step; 1 is plain"),
    fact(known(now.acceptance, percent), "of draft tokens accepted"),
    fact(`${engine.running} + ${engine.waiting}`, `running of ${hello.slots}, and waiting`),
    fact(bytes(engine.kv_bytes + engine.prefix_bytes), `keys and values; ${percent(engine.kv_tokens / engine.kv_limit)} of the tokens that fit`),
  );
  bars(byId("survival"), survivals(now.survival));
  drawPlans(now);
  const inside = Object.values(now.phases).reduce((sum, x) => sum + x, 0) || 1;
  bars(byId("phases"), Object.entries(PHASES).map(([name, text]) => [text, (now.phases[name] ?? 0) / inside, `${seconds(now.phases[name] ?? 0)}, ${percent((now.phases[name] ?? 0) / inside)}`]));
  const kinds = { error: "failed", abort: "were aborted" };
  const lost = Object.entries(kinds).map(([finish, word]) => [failed.filter((one) => one.finish === finish).length, word]);
  byId("errors").textContent = last.problem
    ? `The engine reports: ${visible(last.problem)}`
    : `${lost.map(([n, word]) => `${count(n, "request")} ${word}`).join(", ")} since you opened this page. The drafter failed ${count(engine.drafter_failures, "time")} since the server started.${failed.length ? ` Last reason: ${visible(failed.at(-1).reason ?? "unknown")}.` : ""}`;
}

function drawPlans(now) {
  const shares = Object.entries(now.plans).sort((a, b) => b[1] - a[1]);
  bars(byId("plans"), shares.length ? shares.map(([name, share]) => [DONE[name] ?? visible(name), share, percent(share)]) : [["no step yet", 0, "–"]]);
  const heads = ["drafter", "accepted lately", "expected tokens", "step", "verdict"];
  const rows = Object.values(now.weighed);
  byId("weighed").replaceChildren(...(rows.length ? [
    el("caption", { class: "hidden-text" }, "What was weighed last"),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((one) => el("tr", {}, [visible(one.name), percent(one.accepted), one.tokens.toFixed(2), one.seconds ? seconds(one.seconds) : "–", one.verdict].map((cell) => el("td", {}, cell))))),
  ] : []));
}

function drawSeries(node, name, which) {
  return (width) => {
    const now = points.at(-1)?.time;
    const shown = points.map((one) => [one.time - now, one.point[which]]).filter(([x, y]) => y !== null && x >= -Math.max(span, 30));
    const high = Math.max(...shown.map((p) => p[1]), 1) * 1.15;
    node.replaceChildren(lines({
      title: shown.length ? `${name}, now ${short(shown.at(-1)[1])}` : `${name}: nothing yet`, width, height: 190,
      x: { low: -Math.max(span, 30), high: 0, name: "seconds ago", show: (v) => String(Math.round(-v)) }, y: { low: 0, high, name },
      series: [{ points: shown, color: "var(--fill-blue)", width: 2 }],
    }));
  };
}

function drawRequests() {
  const rows = ended.slice(-SHOWN).reverse();
  const heads = ["request", "prompt", "tokens", "steps", "tokens/step", "accepted", "first token", "tokens/s", "method", "ended by"];
  byId("requests").replaceChildren(
    el("caption", { class: "hidden-text" }, "Recent requests, the newest first"),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, rows.map((r) => el("tr", {}, [
      r.id, r.prompt_tokens, r.tokens, r.steps, r.steps ? short(r.tokens / r.steps) : "–", r.drafted ? `${percent(r.accepted / r.drafted)}` : "–",
      known(r.first, seconds), r.tokens > 1 && r.first !== null && r.seconds > r.first ? short((r.tokens - 1) / (r.seconds - r.first)) : "–", r.method, r.finish,
    ].map((cell) => el("td", {}, cell))))),
  );
  if (!hello.shows_text) return;
  byId("texts").replaceChildren(...rows.map((r) => el("details", {}, el("summary", {}, `Request ${r.id}: ${clipped(r.prompt, 48)}`),
    el("div", { class: "answer tokens", tabindex: 0, role: "region", "aria-label": `Prompt and answer of request ${r.id}` },
      el("span", { class: "soft" }, visible(r.prompt)), r.text.map(([letter, text]) => el("span", { class: ORIGINS[letter] }, visible(text)))))));
}

function keep(requests) {
  ended = [...ended, ...requests].slice(-100);
  failed = [...failed, ...requests.filter((r) => r.finish === "error" || r.finish === "abort")].slice(-1000);
}

const say = (text) => {
  byId("dot").classList.toggle("live", text === "Live.");
  if (byId("state").textContent !== text) byId("state").textContent = text;
};

/** An address of the dashboard, for the model that is chosen. */
const at = (path) => `dashboard/${path}${model ? `?model=${encodeURIComponent(model)}` : ""}`;

/** Offer the models that are loaded, if there are several. */
function offer(names = []) {
  const known = [...byId("choice").options].map((one) => one.value);
  if (names.join("\n") === known.join("\n")) return;
  byId("choice").replaceChildren(...names.map((name) => el("option", { value: name }, visible(name))));
  byId("choice").value = hello.model;
  byId("pick").hidden = names.length < 2;
}

function connect() {
  source = new EventSource(at("events"));
  source.addEventListener("hello", (event) => {
    hello = JSON.parse(event.data);
    byId("server").textContent = visible(`${hello.model}: ${hello.method}, up to ${count(hello.num_speculative_tokens, "draft token")}, verifier ${hello.verifier} (${hello.guarantee}).`);
    byId("requests-note").textContent = hello.shows_text ? "Prompts and answers are shown because the server's trace holds them." : "Prompts and answers are not shown. The server shows them only with --trace FILE --trace-detail tokens.";
    byId("legend").hidden = !hello.shows_text;
    keep(hello.ended.filter((r) => !ended.some((one) => one.id === r.id)));
    drawRequests();
    say("Live.");
  });
  source.addEventListener("tick", (event) => {
    last = JSON.parse(event.data);
    offer(last.models);
    points = [...points, { time: last.time, point: last.point }].slice(-KEPT);
    if (last.ended.length) {
      keep(last.ended);
      drawRequests();
    }
    drawNow();
    charts.forEach((draw) => draw());
    say("Live.");
    byId("updated").textContent = `Updated at ${new Date(1000 * last.time).toLocaleTimeString("en-GB")}.`;
  });
  source.addEventListener("error", () => {
    say("No connection. The page tries again; what it shows is old.");
    if (source.readyState !== EventSource.CLOSED) return; // the server refused, because the model has left
    model = "";
    setTimeout(() => {
      if (source?.readyState === EventSource.CLOSED) connect();
    }, 5000);
  });
}

function disconnect() {
  source?.close();
  source = null;
}

byId("window").append(radios({ name: "Window", options: WINDOWS, value: "60", change: (v) => {
  span = Number(v);
  if (last) drawNow();
  charts.forEach((draw) => draw());
} }));
byId("legend").append(...Object.values(ORIGINS).slice(0, 4).map((kind) => el("li", {}, el("span", { class: `origin ${kind}` }, kind))));
const charts = [
  sized(byId("rate-chart"), drawSeries(byId("rate-chart"), "tokens/s", 0)),
  sized(byId("depth-chart"), drawSeries(byId("depth-chart"), "levels of a draft", 1)),
];
byId("choice").addEventListener("change", () => {
  model = byId("choice").value;
  [points, ended, failed] = [[], [], []];
  disconnect();
  connect();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    disconnect();
    say("Paused while hidden.");
  } else if (!source) connect();
});
connect();
