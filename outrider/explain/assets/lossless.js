// Section 2: one position, two distributions, and what a rule makes of them.

import { byId, choice, el, percent, radios, short, sized, svg } from "./dom.js";
import { key } from "./chart.js";
import { acceptance, agreement, moved, normalized, outcome, overlap, race, raced, residual, sampled, totalVariation } from "./rules.js";

const NAMES = ["blue", "clear", "dark", "full", "grey", "high", "low", "red"]; // after “The sky is”
const PRESETS = {
  similar: ["Similar", [0.5, 0.22, 0.12, 0.07, 0.04, 0.03, 0.01, 0.01], [0.4, 0.3, 0.1, 0.08, 0.05, 0.03, 0.02, 0.02]],
  different: ["Different", [0.08, 0.42, 0.25, 0.12, 0.06, 0.03, 0.02, 0.02], [0.5, 0.1, 0.06, 0.05, 0.1, 0.09, 0.05, 0.05]],
  sure: ["Draft is sure, and wrong", [0.1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.02, 0.01], [0.9, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01]],
  equal: ["Equal", [0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01], [0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01]],
};
const RULE_TEXT = {
  right: ["The rule", "Keep x with probability min(1, p/q). After a rejection, draw from what is missing, max(p − q, 0). (Leviathan et al. 2211.17192, algorithm 1)"],
  no_residual: ["Wrong: no residual", "Keep x with probability min(1, p/q). After a rejection, draw from p again. The tokens that the draft likes come out too often."],
  argmax: ["Wrong: keep only the likeliest", "Keep x only if it is the target's most likely token. That token comes out too often."],
  temperature: ["Wrong: another draft temperature", "Draw the draft token from q at temperature 2, but judge it by q at temperature 1. The rule divides by probabilities that were not used."],
  match: ["match: shared noise", "Target and draft add the same noise to their log-probabilities, and each takes the largest sum. The token is always the target's own draw. It is accepted if the draft took the same."],
};
const SEED = "20260";

export function losslessView() {
  const body = byId("lossless-body");
  let [size, preset, rule] = [5, "similar", "right"];
  let [p, q] = [[], []];
  let [counts, draws, kept, position] = [[], 0, 0, 0];

  const reset = () => {
    [counts, draws, kept, position] = [p.map(() => 0), 0, 0, 0];
  };
  const load = () => {
    [p, q] = [1, 2].map((n) => normalized(PRESETS[preset][n].slice(0, size)));
    reset();
  };

  const bars = el("div", { role: "group", "aria-label": "The two distributions. Drag a bar, or use the arrow keys." });
  const facts = el("div", { class: "facts" });
  const histogram = el("div", {});
  const says = el("p", { role: "status", "aria-live": "polite" });
  const explains = el("p", {});
  const racing = el("div", {});

  // -- the bars --------------------------------------------------------------------------------------------------------

  const drawBars = (width) => {
    const [left, top, high] = [34, 14, 180];
    const slot = (width - left) / size;
    const thick = Math.max(Math.min(slot / 2 - 5, 34), 8);
    const most = Math.max(0.5, ...p, ...q);
    const y = (v) => top + high - (v / most) * high;
    const node = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${top + high + 34}`, height: top + high + 34 });
    for (const v of [0, most / 2, most]) {
      node.append(svg("line", { class: "grid", x1: left, x2: width, y1: y(v), y2: y(v) }), svg("text", { class: "tick", x: left - 6, y: y(v) + 4, "text-anchor": "end" }, percent(v)));
    }
    const handles = [];
    p.forEach((_, i) => {
      const middle = left + slot * (i + 0.5);
      const common = Math.min(p[i], q[i]);
      const bar = (value, x, color, who) => {
        node.append(svg("rect", { x, y: y(value), width: thick, height: Math.max(y(0) - y(value), 0), fill: "none", stroke: color, "stroke-width": 2 }));
        node.append(svg("rect", { x: x + 1, y: y(common), width: thick - 2, height: Math.max(y(0) - y(common), 0), fill: "var(--fill-green)", opacity: 0.45 }));
        if (who === "p" && value > common) node.append(svg("rect", { x: x + 1, y: y(value), width: thick - 2, height: y(common) - y(value), fill: "url(#stripes)" }));
        const handle = svg("rect", {
          class: "handle", x: x - 3, y: Math.max(y(value) - 12, 0), width: thick + 6, height: 24, fill: "transparent", tabindex: 0, role: "slider", "data-bar": `${who}${i}`,
          "aria-label": `${who === "p" ? "target" : "draft"}, probability of “${NAMES[i]}”`, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * value), "aria-valuetext": percent(value), "aria-orientation": "vertical",
        });
        node.append(svg("rect", { x: x - 2, y: y(value) - 3, width: thick + 4, height: 6, rx: 3, fill: color }));
        handles.push(handle);
        handle.addEventListener("keydown", (event) => {
          const by = { ArrowUp: 0.02, ArrowRight: 0.02, ArrowDown: -0.02, ArrowLeft: -0.02, PageUp: 0.1, PageDown: -0.1 }[event.key];
          if (!by) return;
          event.preventDefault();
          change(who, i, value + by);
          bars.querySelector(`[data-bar="${who}${i}"]`).focus();
        });
        handle.addEventListener("pointerdown", (event) => {
          event.preventDefault();
          const box = node.getBoundingClientRect();
          const scale = (top + high + 34) / box.height;
          const move = (now) => change(who, i, ((top + high - (now.clientY - box.top) * scale) / high) * most);
          const up = () => {
            window.removeEventListener("pointermove", move);
            window.removeEventListener("pointerup", up);
          };
          window.addEventListener("pointermove", move);
          window.addEventListener("pointerup", up);
        });
      };
      bar(p[i], middle - thick - 2, "var(--fill-blue)", "p");
      bar(q[i], middle + 2, "var(--fill-orange)", "q");
      node.append(svg("text", { x: middle, y: top + high + 18, "text-anchor": "middle", class: "mono" }, NAMES[i]));
    });
    node.append(
      svg("defs", {}, svg("pattern", { id: "stripes", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("rect", { width: 2.5, height: 5, fill: "var(--fill-blue)" }))),
      ...handles,
    );
    bars.replaceChildren(node);
  };

  const change = (who, i, value) => {
    if (who === "p") p = moved(p, i, value);
    else q = moved(q, i, value);
    reset();
    draw();
  };

  // -- what comes out --------------------------------------------------------------------------------------------------

  const limit = () => (rule === "match" ? p : outcome(rule, p, q));

  const drawHistogram = (width) => {
    const [left, top, high] = [34, 18, 150];
    const slot = (width - left) / size;
    const limits = limit();
    const seen = counts.map((n) => (draws ? n / draws : 0));
    const most = Math.max(0.5, ...p, ...seen, ...limits);
    const y = (v) => top + high - (v / most) * high;
    const node = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${top + high + 34}`, height: top + high + 34, role: "img", "aria-label": `Share of each token in ${draws} draws, beside p` });
    for (const v of [0, most / 2, most]) {
      node.append(svg("line", { class: "grid", x1: left, x2: width, y1: y(v), y2: y(v) }), svg("text", { class: "tick", x: left - 6, y: y(v) + 4, "text-anchor": "end" }, percent(v)));
    }
    p.forEach((_, i) => {
      const x = left + slot * i + slot * 0.2;
      const wide = slot * 0.6;
      node.append(svg("rect", { class: "smooth", x, y: y(seen[i]), width: wide, height: y(0) - y(seen[i]), fill: "var(--fill-grey)", opacity: 0.7 }));
      node.append(svg("line", { x1: x - 4, x2: x + wide + 4, y1: y(p[i]), y2: y(p[i]), stroke: "var(--fill-blue)", "stroke-width": 3 }));
      if (Math.abs(limits[i] - p[i]) > 0.002) node.append(svg("line", { x1: x - 4, x2: x + wide + 4, y1: y(limits[i]), y2: y(limits[i]), stroke: "var(--fill-orange)", "stroke-width": 3, "stroke-dasharray": "5 3" }));
      node.append(svg("text", { x: x + wide / 2, y: top + high + 18, "text-anchor": "middle", class: "mono" }, NAMES[i]));
      if (draws) node.append(svg("text", { x: x + wide / 2, y: Math.min(y(seen[i]), y(p[i]), y(limits[i])) - 5, "text-anchor": "middle", class: "tick" }, percent(seen[i])));
    });
    histogram.replaceChildren(node);
  };

  const drawRace = (width) => {
    if (rule !== "match") {
      racing.replaceChildren();
      return;
    }
    const at = race(p, q, SEED, Math.max(position - 1, 0));
    const all = [...at.target, ...at.draft].filter(Number.isFinite);
    const [low, high] = [Math.min(...all, -3), Math.max(...all, 3)];
    const [left, right, row] = [52, 16, 32];
    const x = (v) => left + ((Math.max(v, low) - low) / (high - low)) * (width - left - right);
    const node = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${size * row + 24}`, height: size * row + 24, role: "img", "aria-label": `One race: the target takes “${NAMES[at.token]}”, the draft takes “${NAMES[at.drafted]}”` });
    p.forEach((_, i) => {
      const y = row * (i + 0.5);
      node.append(svg("text", { x: left - 8, y: y + 4, "text-anchor": "end", class: "mono" }, NAMES[i]), svg("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }));
      for (const [scores, color, dy, won] of [[at.target, "var(--fill-blue)", -6, at.token === i], [at.draft, "var(--fill-orange)", 6, at.drafted === i]]) {
        if (!Number.isFinite(scores[i])) continue;
        node.append(svg("line", { x1: x(low), x2: x(scores[i]), y1: y + dy, y2: y + dy, stroke: color, "stroke-width": 2, opacity: 0.4 }));
        node.append(svg("circle", { cx: x(scores[i]), cy: y + dy, r: won ? 6 : 3.5, fill: color }));
        if (won) node.append(svg("circle", { cx: x(scores[i]), cy: y + dy, r: 9, fill: "none", stroke: color, "stroke-width": 2 }));
      }
    });
    node.append(svg("text", { class: "tick", x: width - right, y: size * row + 16, "text-anchor": "end" }, "log-probability + noise: the one farthest right wins"));
    const same = at.token === at.drafted;
    racing.replaceChildren(
      el("h3", {}, "One race"),
      el("p", { class: "small" }, `Each token gets one noise, for both runners. The target takes “${NAMES[at.token]}”, the draft took “${NAMES[at.drafted]}”: ${same ? "the same, so it is accepted." : "another token, so the target's is written in its place."}`),
      node,
    );
  };

  const draw = () => {
    const alpha = rule === "match" ? agreement(p, q) : overlap(p, q);
    const rest = residual(p, q);
    const goes = limit();
    const off = totalVariation(goes, p);
    const accept = acceptance(p, q);
    const list = (values) => values.map((v, i) => `${NAMES[i]} ${percent(v)}`).join(", ");
    facts.replaceChildren(
      el("div", { class: "fact" }, el("b", {}, percent(overlap(p, q))), el("span", {}, "overlap of p and q")),
      el("div", { class: "fact" }, el("b", {}, percent(alpha)), el("span", {}, rule === "match" ? "of proposals are accepted with shared noise" : "of proposals are accepted by the rule")),
      el("div", { class: "fact" }, el("b", { id: "lossless-tv" }, draws ? short(totalVariation(counts.map((n) => n / draws), p)) : "–"), el("span", {}, `distance of the ${draws.toLocaleString("en-US")} draws from p (total variation)`)),
      el("div", { class: "fact" }, el("b", {}, short(off)), el("span", {}, off < 1e-9 ? "distance after endless draws: none" : "distance after endless draws: it never goes away")),
    );
    numbers.replaceChildren(
      el("p", { class: "small soft" }, `Kept with probability: ${list(accept)}.`),
      el("p", { class: "small soft" }, overlap(p, q) > 1 - 1e-9 ? "Nothing is missing: p and q are equal, and nothing is ever rejected." : `After a rejection drawn from: ${list(rest)}.`),
    );
    explains.textContent = RULE_TEXT[rule][1];
    again.forEach((one) => one());
  };

  const sample = (n) => {
    const made = rule === "match" ? raced(p, q, SEED, position, n) : sampled(rule, p, q, SEED, position, n);
    counts = counts.map((c, i) => c + made.counts[i]);
    [draws, kept, position] = [draws + n, kept + made.accepted, position + n];
    draw();
    says.textContent = `${draws.toLocaleString("en-US")} draws, ${percent(kept / draws)} of the proposals kept. Distance from p: ${short(totalVariation(counts.map((c) => c / draws), p))}.`;
  };

  const numbers = el("div", {});
  const buttons = [1, 100, 10000].map((n) => el("button", { type: "button", "data-draws": n, class: n === 10000 ? "main" : "", onclick: () => sample(n) }, `Draw ${n.toLocaleString("en-US")}`));
  const clear = el("button", { type: "button", onclick: () => { reset(); draw(); says.textContent = ""; } }, "Clear");
  const setup = (act) => (value) => { act(value); load(); says.textContent = ""; draw(); };
  body.append(
    el("div", { class: "fields" },
      choice({ id: "lossless-preset", name: "Draft and target are", options: Object.entries(PRESETS).map(([k, v]) => [k, v[0]]), value: preset, change: setup((v) => { preset = v; }) }).node,
      choice({ id: "lossless-size", name: "Tokens", options: [3, 4, 5, 6, 7, 8].map((n) => [String(n), String(n)]), value: "5", change: setup((v) => { size = Number(v); }) }).node),
    el("div", { class: "two" },
      el("div", {}, el("h3", {}, "The next token after “The sky is”: drag a bar"), bars,
        el("ul", { class: "legend" },
          el("li", {}, key("var(--fill-blue)", "box"), "p, the target"), el("li", {}, key("var(--fill-orange)", "box"), "q, the draft"),
          el("li", {}, key("var(--fill-green)", "box"), "overlap: stays"), el("li", {}, "striped: missing, drawn after a rejection")), numbers),
      el("div", {}, el("h3", {}, "What comes out"), histogram,
        el("ul", { class: "legend" }, el("li", {}, key("var(--fill-grey)", "box"), "draws"), el("li", {}, key("var(--fill-blue)"), "p"), el("li", {}, key("var(--fill-orange)", "line", "5 3"), "where a wrong rule goes")))),
    el("h3", {}, "The rule"),
    radios({ name: "The rule", options: Object.entries(RULE_TEXT).map(([k, v]) => [k, v[0]]), value: rule, change: (v) => { rule = v; reset(); says.textContent = ""; draw(); } }),
    explains, el("div", { class: "controls" }, buttons, clear), says, facts, racing,
    el("p", { class: "formula" }, "P(x) = min(p, q) + (1 − Σ min(p, q)) · max(p − q, 0) / Σ max(p − q, 0) = p(x)"),
    el("p", { class: "small soft" }, "The first part is what stays, the second what is drawn after a rejection. Both sums of the second part are equal, so they cancel, and p is left. For ", el("code", {}, "match"), " no such argument is needed: each token is the target's own draw. It also gives the same tokens as plain decoding with the same seed."),
  );
  const again = [];
  load();
  again.push(sized(bars, drawBars), sized(histogram, drawHistogram), sized(racing, drawRace));
  draw();
}
