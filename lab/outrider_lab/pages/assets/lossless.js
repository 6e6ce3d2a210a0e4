// Section 2: one position, two distributions, and what each rule makes of them. All rules draw at once, beside each other.

import { byId, choice, el, percent, short, sized, svg } from "./dom.js";
import { key } from "./chart.js";
import { acceptance, agreement, moved, normalized, outcome, overlap, race, raced, residual, sampled, totalVariation } from "./rules.js";

const NAMES = ["blue", "clear", "dark", "full", "grey", "high", "low", "red"]; // after “The sky is”
const PRESETS = {
  similar: ["Similar", [0.5, 0.22, 0.12, 0.07, 0.04, 0.03, 0.01, 0.01], [0.4, 0.3, 0.1, 0.08, 0.05, 0.03, 0.02, 0.02]],
  different: ["Different", [0.08, 0.42, 0.25, 0.12, 0.06, 0.03, 0.02, 0.02], [0.5, 0.1, 0.06, 0.05, 0.1, 0.09, 0.05, 0.05]],
  sure: ["Draft is sure, and wrong", [0.1, 0.5, 0.2, 0.1, 0.05, 0.02, 0.02, 0.01], [0.9, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01]],
  equal: ["Equal", [0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01], [0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01]],
};
// Each rule: its name, what it does, and whether it is right.
const PANELS = {
  match: ["match, as above", "Write the token that the target draws.", true],
  right: ["The coin", "Keep x with probability min(1, p/q). After a rejection, draw from what is missing.", true],
  no_residual: ["Wrong: draw from p again", "As the coin, but after a rejection draw from all of p. What the draft likes comes too often."],
  argmax: ["Wrong: keep only the likeliest", "Keep x only if it is the target's likeliest token. That token comes too often."],
  temperature: ["Wrong: another draft temperature", "Draw x at temperature 2, but judge it by q at temperature 1. The coin uses the wrong q."],
};
const SEED = "20260";
const AT_ONCE = 10000;

export function losslessView() {
  const body = byId("lossless-body");
  let [size, preset] = [5, "similar"];
  let [p, q] = [[], []];
  let [drawn, draws, kept, later] = [{}, 0, 0, null]; // drawn: counts of each rule

  const reset = () => {
    [drawn, draws, kept] = [Object.fromEntries(Object.keys(PANELS).map((rule) => [rule, p.map(() => 0)])), 0, 0];
  };
  const load = () => {
    [p, q] = [1, 2].map((n) => normalized(PRESETS[preset][n].slice(0, size)));
    reset();
    draw();
    sample(AT_ONCE);
  };

  const bars = el("div", { role: "group", "aria-label": "The two distributions. Drag a bar, or use the arrow keys." });
  const facts = el("div", { class: "facts" });
  const panels = el("div", { class: "panels" });
  const says = el("p", { role: "status", "aria-live": "polite" });
  const racing = el("div", {});
  const raceSays = el("p", { class: "small", role: "status", "aria-live": "polite" });
  const numbers = el("div", {});
  let at = 0; // the place whose race is shown

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
    clearTimeout(later); // a dragged bar draws anew when it rests
    later = setTimeout(() => sample(AT_ONCE), 150);
  };

  // -- the race of match -----------------------------------------------------------------------------------------------

  const drawRace = (width) => {
    const now = race(p, q, SEED, at);
    const all = [...now.target, ...now.draft].filter(Number.isFinite);
    const [low, high] = [Math.min(...all, -3), Math.max(...all, 3)];
    const [left, right, row] = [52, 16, 32];
    const x = (v) => left + ((Math.max(v, low) - low) / (high - low)) * (width - left - right);
    const node = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${size * row + 24}`, height: size * row + 24, role: "img", "aria-label": `Place ${at + 1}: the target takes “${NAMES[now.token]}”, the draft takes “${NAMES[now.drafted]}”` });
    p.forEach((_, i) => {
      const y = row * (i + 0.5);
      node.append(svg("text", { x: left - 8, y: y + 4, "text-anchor": "end", class: "mono" }, NAMES[i]), svg("line", { class: "grid", x1: left, x2: width - right, y1: y, y2: y }));
      for (const [scores, color, dy, won] of [[now.target, "var(--fill-blue)", -6, now.token === i], [now.draft, "var(--fill-orange)", 6, now.drafted === i]]) {
        if (!Number.isFinite(scores[i])) continue;
        node.append(svg("line", { x1: x(low), x2: x(scores[i]), y1: y + dy, y2: y + dy, stroke: color, "stroke-width": 2, opacity: 0.4 }));
        node.append(svg("circle", { cx: x(scores[i]), cy: y + dy, r: won ? 6 : 3.5, fill: color }));
        if (won) node.append(svg("circle", { cx: x(scores[i]), cy: y + dy, r: 9, fill: "none", stroke: color, "stroke-width": 2 }));
      }
    });
    node.append(svg("text", { class: "tick", x: width - right, y: size * row + 16, "text-anchor": "end" }, "log of the probability + noise: the farthest right wins"));
    racing.replaceChildren(node);
    raceSays.textContent = `Place ${at + 1}. Each word gets one noise, for both. The target takes “${NAMES[now.token]}”, the draft predicted “${NAMES[now.drafted]}”: ${now.token === now.drafted ? "the same, so the draft token is accepted." : "another word, so the target's own word is written."}`;
  };

  // -- what comes out --------------------------------------------------------------------------------------------------

  const panel = (rule) => {
    const [title, does, fair] = PANELS[rule];
    const [left, top, high, width] = [4, 16, 96, 210];
    const slot = (width - left) / size;
    const limits = rule === "match" ? p : outcome(rule, p, q);
    const seen = drawn[rule].map((n) => (draws ? n / draws : 0));
    const most = Math.max(0.3, ...p, ...seen, ...limits);
    const y = (v) => top + high - (v / most) * high;
    const node = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${top + high + 20}`, role: "img", "aria-label": `${title}: share of each word in ${draws} draws: ${seen.map((v, i) => `${NAMES[i]} ${percent(v)}, wanted ${percent(p[i])}`).join("; ")}` });
    p.forEach((_, i) => {
      const [x, wide] = [left + slot * (i + 0.2), slot * 0.6];
      node.append(svg("rect", { class: "smooth", x, y: y(seen[i]), width: wide, height: y(0) - y(seen[i]), fill: fair ? "var(--fill-green)" : "var(--fill-orange)", opacity: 0.7 }));
      node.append(svg("line", { x1: x - 3, x2: x + wide + 3, y1: y(p[i]), y2: y(p[i]), stroke: "var(--ink)", "stroke-width": 2.5 }));
      node.append(svg("text", { x: x + wide / 2, y: top + high + 15, "text-anchor": "middle", class: "mono", style: { "font-size": size > 6 ? "9px" : "11px" } }, NAMES[i]));
      if (draws && size < 7) node.append(svg("text", { x: x + wide / 2, y: Math.min(y(seen[i]), y(p[i])) - 5, "text-anchor": "middle", class: "tick", style: { "font-size": "10px" } }, percent(seen[i])));
    });
    const [now, ever] = [totalVariation(seen, p), totalVariation(limits, p)];
    return el("figure", { class: `panel ${fair ? "fair" : "unfair"}`, "data-rule": rule },
      el("h4", {}, `${fair ? "✓" : "✗"} ${title}`), el("p", { class: "small soft" }, does), node,
      el("figcaption", { class: "small" }, draws ? el("b", {}, `${percent(now)} of the draws are misplaced. `) : "No draws yet. ",
        ever < 1e-9 ? (fair ? "More draws bring this to 0." : "With these bars this rule is right by luck.") : `More draws end at ${percent(ever)}, never at 0.`));
  };

  const draw = () => {
    const list = (values) => values.map((v, i) => `${NAMES[i]} ${percent(v)}`).join(", ");
    facts.replaceChildren(
      el("div", { class: "fact" }, el("b", {}, percent(overlap(p, q))), el("span", {}, "overlap of the bars: how often the coin keeps a draft token")),
      el("div", { class: "fact" }, el("b", {}, percent(agreement(p, q))), el("span", {}, "how often match accepts a draft token, with shared noise")),
    );
    numbers.replaceChildren(
      el("p", { class: "small" }, `The coin keeps a draft token with probability: ${list(acceptance(p, q))}.`),
      el("p", { class: "small" }, overlap(p, q) > 1 - 1e-9 ? "Nothing is missing: the bars are equal, and nothing is ever rejected." : `After a rejection it draws from: ${list(residual(p, q))}.`),
    );
    again.forEach((one) => one());
    count();
  };

  const count = () => panels.replaceChildren(...Object.keys(PANELS).map(panel)); // without the bars: they keep the focus

  const sample = (n) => {
    for (const rule of Object.keys(PANELS)) {
      const made = rule === "match" ? raced(p, q, SEED, draws, n) : sampled(rule, p, q, SEED, draws, n);
      drawn[rule] = drawn[rule].map((c, i) => c + made.counts[i]);
      if (rule === "right") kept += made.accepted;
    }
    draws += n;
    says.textContent = `${draws.toLocaleString("en-US")} draws by each rule. The coin kept ${percent(kept / draws)} of the draft tokens. The short lines are p, what the target wants.`;
    count();
  };

  const again = [];
  const buttons = [1, 100, AT_ONCE].map((n) => el("button", { type: "button", "data-draws": n, onclick: () => sample(n) }, `Draw ${n.toLocaleString("en-US")} more`));
  const clear = el("button", { type: "button", onclick: () => { reset(); draw(); says.textContent = "No draws. The short lines are p, what the target wants."; } }, "Clear");
  const setup = (act) => (value) => { act(value); load(); };
  body.append(
    el("div", { class: "card" },
      el("div", { class: "two" },
        el("div", {}, el("h3", {}, "The next word after “The sky is”: drag a bar"), bars,
          el("ul", { class: "legend" }, el("li", {}, key("var(--fill-blue)", "box"), "p, the target"), el("li", {}, key("var(--fill-orange)", "box"), "q, the draft"), el("li", {}, key("var(--fill-green)", "box"), "overlap")),
          el("div", { class: "fields" },
            choice({ id: "lossless-preset", name: "Draft and target are", options: Object.entries(PRESETS).map(([k, v]) => [k, v[0]]), value: preset, change: setup((v) => { preset = v; }) }).node,
            choice({ id: "lossless-size", name: "Words", options: [3, 4, 5, 6, 7, 8].map((n) => [String(n), String(n)]), value: "5", change: setup((v) => { size = Number(v); }) }).node)),
        el("div", {}, el("h3", {}, "match: both add the same noise, and each takes its largest sum"), racing, raceSays,
          el("div", { class: "controls" }, el("button", { type: "button", id: "lossless-race", onclick: () => { at += 1; draw(); } }, "Next place")))),
      facts),
    el("h3", {}, "Other engines flip a coin"),
    el("div", { class: "words" },
      el("p", {}, "They draw the draft token x from q, with a noise of its own. Then they keep it with probability min(1, p(x)/q(x)), the part of q that p also has: the green overlap. After a rejection they draw from what is missing: the striped part, where p is larger than q. Overlap and missing part together are p, so the text has the right chances. It need not be the same text: other coins were flipped."),
      el("p", {}, "outrider has these rules too: ", el("code", {}, "rejection"), ", ", el("code", {}, "block"), " and ", el("code", {}, "traversal"), ". They are easy to get wrong. Below, each rule draws from the bars above. The wrong ones look right in a program, and only the counts show the mistake.")),
    el("div", { class: "card" }, panels, says, el("div", { class: "controls" }, buttons, clear),
      el("details", {}, el("summary", {}, "The proof for the coin"), numbers,
        el("p", { class: "formula" }, "P(x) = min(p, q) + (1 − Σ min(p, q)) · max(p − q, 0) / Σ max(p − q, 0) = p(x)"),
        el("p", { class: "small" }, "The first part is what stays, the second what is drawn after a rejection. Both sums of the second part are equal, so they cancel, and p is left. (Leviathan et al. 2211.17192, algorithm 1.)"),
        el("p", { class: "small" }, "outrider proves each of its rules by enumeration: tests take every branch with exact fractions, and the result must equal plain decoding. There is no tolerance and no seed. See ", el("code", {}, "docs/lossless.md"), ", “Proof by enumeration”, and ", el("code", {}, "tests/exact/test_verify_exact.py"), "."))),
  );
  load();
  again.push(sized(bars, drawBars), sized(racing, drawRace));
}
