// Section 5: the attention mask of a draft, and the bytes that are read.

import { bytesPerToken, bytesRead, weightsRead } from "./attention.js";
import { byId, bytes, clipped, count, el, short, sized, slider, svg } from "./dom.js";
import { ancestorMask } from "./trees.js";

export function attentionView(data) {
  const body = byId("attention-body");
  const steps = data.requests.flatMap((request) => request.steps).filter((step) => step.tokens?.length > 1).slice(0, 400);
  if (!steps.length) {
    body.append(el("p", {}, "This run has no drafts with tokens, so there is no mask to draw."));
    return;
  }
  const name = (token) => data.texts[token] ?? `#${token}`;
  const widest = steps.reduce((best, step, n) => (step.tokens.length > steps[best].tokens.length ? n : best), 0);
  let [at, context] = [widest, 4096];
  const mask = el("div", {});
  const reads = el("div", { class: "bytes" });
  const says = el("p", { role: "status", "aria-live": "polite" });

  const drawMask = (width) => {
    const step = steps[at];
    const { tokens, parents } = step;
    const seen = ancestorMask(parents);
    const [left, top] = [Math.min(110, width * 0.28), 74];
    const cell = Math.max(Math.min((width - left - 96) / tokens.length, 30), 12);
    const cache = Math.min(90, width - left - cell * tokens.length - 8);
    const node = svg("svg", { class: "chart", viewBox: `0 0 ${width} ${top + cell * tokens.length + 8}`, height: top + cell * tokens.length + 8, role: "img", "aria-label": `What ${tokens.length} tokens of a pass may look at. Each sees all ${step.position} tokens of the text; of the draft it sees itself and what stands before it on its branch.` });
    node.append(svg("text", { class: "tick", x: left, y: 14 }, `${step.position} tokens of text`));
    tokens.forEach((token, i) => {
      const y = top + i * cell;
      node.append(svg("text", { class: "mono", x: left - 6, y: y + cell / 2 + 4, "text-anchor": "end" }, clipped(name(token), width < 500 ? 8 : 12)));
      node.append(svg("rect", { x: left, y: y + 1, width: cache - 4, height: cell - 2, fill: "var(--fill-blue)", opacity: 0.55 }));
      const x = left + cache + i * cell + cell / 2;
      node.append(svg("text", { class: "mono", transform: `translate(${x + 4},${top - 5}) rotate(-60)` }, clipped(name(token), 9)));
      tokens.forEach((_, j) => {
        const on = seen[i][j];
        node.append(svg("rect", { x: left + cache + j * cell + 1, y: y + 1, width: cell - 2, height: cell - 2, rx: 2, fill: on ? (i === j ? "var(--fill-orange)" : "var(--fill-blue)") : "var(--raised)", stroke: "var(--line)" }));
        if (on) node.append(svg("circle", { cx: left + cache + j * cell + cell / 2, cy: y + cell / 2, r: 2, fill: "var(--paper)" }));
      });
    });
    mask.replaceChildren(node);
  };

  const draw = () => {
    const step = steps[at];
    const rows = step.tokens.length;
    const dots = ancestorMask(step.parents).flat().filter(Boolean).length;
    says.textContent = `Step ${step.step + 1}: ${count(rows, "token")} in one pass. A line is a token, and its filled squares are what it may look at. ${dots} of ${rows * rows} squares are filled.`;
    if (data.size) {
      const read = bytesRead(data.size, context, rows);
      const weights = weightsRead(data.size, rows);
      const all = [
        ["One pass over the draft, fused", "the notes on the text (keys and values) are read once for all tokens", read.one_pass + weights.one_pass, "best"],
        ["The same without grouped-query attention", "each query head would have keys and values of its own", read.no_groups + weights.one_pass, ""],
        [`${rows} plain steps`, "weights and keys are read anew for each token", read.one_by_one + weights.one_by_one, ""],
      ];
      const most = Math.max(...all.map((row) => row[2]));
      reads.replaceChildren(...all.flatMap(([title, why, value, kind]) => [
        el("div", {}, title, el("div", { class: "small soft" }, why)),
        el("div", { class: `bar ${kind}` }, el("i", { style: { width: `${(100 * value) / most}%` } })),
        el("div", { class: "value" }, bytes(value)),
      ]));
      table.textContent = `${data.size.name}: ${count(data.size.layers, "layer")}, ${data.size.heads} query heads over ${data.size.kv_heads} key-value heads of ${data.size.head_dim}, ${short(data.size.kv_bytes)} bytes a value: ${bytes(bytesPerToken(data.size))} of keys and values a token. Weights: ${bytes(data.size.weight_bytes)}, read once a pass. With ${context.toLocaleString("en-US")} tokens of text, the keys and values are ${bytes(read.one_pass)} of the first bar.`;
    } else table.textContent = "The size of this model is not in the trace, so bytes cannot be counted. outrider explain without --recorded reads the model.";
    again?.();
  };
  const table = el("p", { class: "small soft" });
  body.append(
    el("div", { class: "fields" },
      slider({ id: "attention-step", name: "Step", min: 0, max: steps.length - 1, step: 1, value: at, show: (v) => `step ${steps[v].step + 1}, ${count(steps[v].tokens.length, "token")}`, change: (v) => { at = v; draw(); } }).node,
      slider({ id: "attention-context", name: "Tokens of text before the draft", min: 256, max: 131072, step: 256, value: context, show: (v) => v.toLocaleString("en-US"), change: (v) => { context = v; draw(); } }).node),
    says, mask, el("h3", {}, "Bytes read for these tokens"), reads, table,
  );
  let again = null;
  draw();
  again = sized(mask, drawMask);
}
