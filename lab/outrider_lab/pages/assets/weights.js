// The opening figure: the weights are read once for each pass, however many tokens the pass checks.

import { byId, bytes, count, el, seconds, short, slider } from "./dom.js";
import { passCost } from "./speed.js";

const MOST = 8;

export function weightsView(data) {
  const curve = data.costs[0];
  const body = byId("weights-body");
  const [bars, says] = [el("div", { class: "lanes readings" }), el("p", { role: "status", "aria-live": "polite" })];
  const time = (steps) => (curve.plain_seconds ? seconds(steps * curve.plain_seconds) : `${short(steps)} × one token`);
  const size = data.size ? `, ${bytes(data.size.weight_bytes)},` : "";

  const lane = (title, kind, readings, cost) => [
    el("div", {}, title),
    el("div", { class: `bar ${kind}` }, Array.from({ length: readings }, () => el("i", { class: "smooth", style: { width: `${(100 * cost) / readings / MOST}%` } }))),
    el("div", { class: "many" }, time(cost)),
  ];
  const draw = (tokens) => {
    const once = passCost(curve, tokens) / passCost(curve, 1);
    bars.replaceChildren(...lane("One by one", "plain", tokens, tokens), ...lane("In one pass", "fast", 1, once));
    says.textContent = tokens === 1
      ? `To write one token, all weights${size} are read once: ${time(1)}.`
      : `${tokens} tokens one by one read all weights${size} ${tokens} times. One pass over ${tokens} tokens reads them once: ${short(once)} times as long as one token.`;
  };
  body.append(
    el("h2", {}, "Almost as cheap as one"),
    slider({ id: "weights-tokens", name: "Tokens", min: 1, max: MOST, step: 1, value: 5, show: (n) => count(n, "token"), change: draw }).node,
    bars, says,
    el("p", { class: "small soft" }, `Each block is one reading of the weights, as wide as it takes time. ${curve.name}: ${curve.source}.`),
  );
  draw(5);
}
