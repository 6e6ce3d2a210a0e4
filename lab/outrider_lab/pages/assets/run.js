// Section 1: step through a run.

import { byId, choice, clipped, count, el, label, parts, percent, radios, seconds, short, sized, svg, visible } from "./dom.js";
import { at, clock, prepare } from "./moments.js";
import { ACCEPT, TOKEN, gumbel, uniform } from "./noise.js";
import { edge, fitted, levels, verdicts } from "./trees.js";

const BOX = { wide: 106, high: 44, column: 122, row: 56 };
const SHOWN = 400; // tokens of text around the present moment
const CLASSES = { a: "accepted", c: "corrected", b: "bonus", p: "plain" };
const MEANINGS = {
  a: ["accepted", "drafted and accepted"],
  c: ["corrected", "by the target, in place of a rejected draft token"],
  b: ["bonus", "by the target, after all draft tokens were accepted"],
  p: ["plain", "by the target, in a step without a draft"],
};

export function runView(data) {
  const view = parts(byId("run"));
  const name = (token) => (token === undefined || token < 0 ? "(none)" : (data.texts[token] ?? `#${token}`));
  let [run, moment, playing, which, chosen, room] = [null, 0, null, data.plain_seconds ? "seconds" : "passes", null, 600];
  let [answered, asked, right] = [null, 0, 0]; // the node that a reader believes to be the last one kept

  const open = (request) => {
    stop();
    run = prepare(request, data.plain_seconds);
    view.about.textContent = visible(request.about ?? "");
    view.scrub.max = Math.max(run.moments - 1, 0);
    // Begin where the first draft is complete: a picture says more than an empty stage.
    const first = request.steps.findIndex((step) => step.drafted > 1);
    const k = Math.max(first, 0);
    go(run.moments ? run.starts[k] + run.request.steps[k].drafted : 0);
  };

  const go = (to) => {
    if (!run.moments) {
      view.caption.textContent = "This request has no steps.";
      return;
    }
    moment = Math.min(Math.max(to, 0), run.moments - 1);
    chosen = answered = null;
    draw();
  };

  const ends = (step) => step.path[Math.min(step.accepted, step.path.length - 1)];
  const asks = ({ step, kind }) => kind === "pass" && step.drafted > 0 && step.tokens !== undefined;

  /** Take a reader's answer, and show the verdict. */
  const answer = ({ step, index }, n) => {
    go(run.starts[index + 1] - 1);
    [answered, asked, right] = [n, asked + 1, right + (n === ends(step) ? 1 : 0)];
    draw();
    view.stage.focus({ preventScroll: true }); // the node that was chosen is drawn anew; keys go on from here
  };

  const feedback = (step) => {
    const said = answered === 0 ? "none" : quoted(step.tokens[answered]);
    const was = ends(step) === 0 ? "none" : quoted(step.tokens[ends(step)]);
    return answered === ends(step) ? `Your answer, ${said}, is right (${right} of ${asked}). ` : `Your answer was ${said}; the last one kept is ${was} (${right} of ${asked} right). `;
  };

  const draw = () => {
    const place = at(run, moment);
    view.scrub.value = moment;
    const where = `Step ${place.index + 1} of ${run.request.steps.length}`;
    view.scrub.setAttribute("aria-valuetext", `${where}, ${place.kind}`);
    view.caption.replaceChildren(el("b", {}, `${where}. `), answered === null ? "" : feedback(place.step), sentence(place));
    view.ask.hidden = !asks(place);
    view.back.disabled = view.first.disabled = moment === 0;
    view.next.disabled = moment === run.moments - 1;
    view.skip.disabled = place.index === run.request.steps.length - 1;
    view.note.textContent = place.step.note ? `What was weighed: ${visible(place.step.note)}.` : "";
    tree(place);
    text(place);
    lanes(place);
  };

  const quoted = (token) => `“${clipped(name(token), 24)}”`;

  const sentence = ({ step, kind, nodes, walked }) => {
    if (!step.tokens) {
      const own = step.committed > step.accepted ? " and one of its own" : "";
      return `${count(step.drafted, "draft token")}; the target kept ${step.accepted}${own}.`;
    }
    if (kind === "draft") {
      const parent = step.parents[nodes - 1];
      const after = parent === 0 ? `the last token of the text, ${quoted(step.tokens[0])}` : quoted(step.tokens[parent]);
      const sibling = step.parents.indexOf(parent) < nodes - 1 && step.parents.indexOf(parent) >= 0 && parent >= 0 ? " as another choice" : "";
      return `The draft model proposes ${quoted(step.tokens[nodes - 1])} after ${after}${sibling}.`;
    }
    if (kind === "pass") {
      if (!step.drafted) return "There is no draft. The target reads the last token alone, as in plain decoding.";
      return `One pass of the target reads the last token of the text and ${count(step.drafted, "draft token")}. It now knows what it would write after each of them.`;
    }
    if (kind === "walk") {
      const node = step.path[walked];
      return `The target's own token here is ${quoted(step.tokens[node])}, and the draft has it. It is accepted.`;
    }
    const own = quoted(step.token);
    if (!step.drafted) return `The target writes ${own}.`;
    if (step.refused) return `The target's own token is ${own}, and the draft does not have it here. The walk stops; the target's token takes its place. ${count(step.committed, "token")} for one pass.`;
    return `Everything on the way was accepted. The target's own next token, ${own}, comes on top as a bonus. ${count(step.committed, "token")} for one pass.`;
  };

  // -- the tree --------------------------------------------------------------------------------------------------------

  const tree = (place) => {
    const { step, kind, nodes, walked } = place;
    if (!step.tokens) {
      view.tree.replaceChildren(el("p", { class: "soft" }, "This trace has counts only, so there is no tree to show."));
      for (const node of [view.tree, view.trees]) node.style.setProperty("height", "auto");
      view.passline.textContent = "";
      view.detail.replaceChildren();
      return;
    }
    const hasOwn = step.committed > step.accepted;
    const parents = hasOwn ? [...step.parents, ends(step)] : step.parents;
    const places = fitted(parents, room, BOX);
    const { x, y, scale } = places;
    const own = hasOwn ? parents.length - 1 : -1;
    const judged = verdicts(step.parents, step.path.slice(0, walked + 1));
    const done = kind === "own" || (kind === "walk" && walked === step.committed);
    const status = (n) => {
      if (n === 0 || kind === "draft" || kind === "pass") return "waiting";
      if (judged[n] === "accepted") return "accepted";
      if (done) return judged[n];
      return judged[n] === "rejected" && parents[n] !== step.path[walked] ? "rejected" : "waiting";
    };
    const picture = svg("svg", { width: places.width, height: places.height, "aria-hidden": "true" });
    if (kind !== "draft") {
      const [right_, bottom] = [x, y].map((at_) => Math.max(...step.parents.map((_, n) => at_[n])));
      picture.append(svg("rect", { x: 0, y: 0, width: right_ + BOX.wide, height: bottom + BOX.high, rx: 9, fill: "var(--shade)", opacity: kind === "pass" ? 1 : 0.45 }));
    }
    const boxes = [];
    parents.forEach((parent, n) => {
      if (n === own ? !done : n >= nodes) return;
      if (n > 0) {
        const good = n === own || status(n) === "accepted";
        picture.append(svg("path", { d: edge(places, BOX, parent, n), fill: "none", stroke: good ? "var(--green)" : "var(--grey)", "stroke-width": good ? 3 : 1.5, "stroke-dasharray": n === own ? "2 4" : null }));
      }
      boxes.push(box(place, n, own, n === own ? "own" : status(n), { left: `${x[n]}px`, top: `${y[n]}px`, width: `${BOX.wide}px`, height: `${BOX.high}px` }));
    });
    for (const [key, size] of [["width", places.width], ["height", places.height]]) view.tree.style.setProperty(key, `${size}px`);
    view.tree.style.setProperty("transform", `scale(${scale})`);
    view.trees.style.setProperty("height", `${Math.ceil(places.height * scale)}px`);
    view.tree.replaceChildren(picture, ...boxes);
    view.passline.textContent = kind === "pass" ? `The shaded box is one pass of the target over ${step.drafted + 1} tokens.` : "";
    const shown = chosen ?? (done && own >= 0 ? own : kind === "walk" ? step.path[walked] : nodes - 1);
    if (asks(place)) view.detail.replaceChildren(el("p", { class: "soft" }, "Point at a token, or go to it with the tab key, to see its numbers."));
    else detail(place, shown, own);
  };

  const box = (place, n, own, state, style) => {
    const { step, kind } = place;
    const token = n === own ? step.token : step.tokens[n];
    const [mark, word] = {
      accepted: ["✓", "accepted"],
      rejected: ["✗", "rejected"],
      unseen: ["·", "not reached"],
      own: step.refused ? ["↳", "correction"] : ["+", step.drafted ? "bonus" : "written"],
      waiting: ["", n === 0 ? "last token" : "proposed"],
    }[state];
    const known = n > 0 && n !== own && step.p && kind !== "draft" && kind !== "pass" ? `p ${short(step.p[n])}` : word;
    const classes = ["node", n === 0 ? "root" : "", `is-${state}`, n === own ? `own ${step.refused ? "is-corrected" : ""}` : "", n === chosen ? "current" : ""];
    return el(
      "button",
      {
        type: "button", class: classes.join(" "), style, "data-node": n, "aria-pressed": chosen === n,
        "aria-label": asks(place) ? (n ? `Answer: ${label(name(token))} is the last token kept` : "Answer: none is kept") : `${label(name(token))}, ${word}${state !== "waiting" && step.p && n < step.p.length && n > 0 ? `, probability ${short(step.p[n])}` : ""}`,
        onclick: () => (asks(place) ? answer(place, n) : pickNode(n)), onmouseenter: () => detail(place, n, own), onfocus: () => detail(place, n, own),
      },
      el("bdi", {}, `${mark ? `${mark} ` : ""}${clipped(name(token), mark ? 10 : 12)}`),
      el("small", {}, known),
    );
  };

  const pickNode = (n) => {
    chosen = chosen === n ? null : n;
    draw();
    view.tree.querySelector(`[data-node="${n}"]`)?.focus();
  };

  // -- one token -------------------------------------------------------------------------------------------------------

  const detail = (place, n, own) => {
    const { step, kind } = place;
    const token = n === own ? step.token : step.tokens[n];
    const parent = n === own ? ends(step) : step.parents[n];
    const open_ = kind === "draft" || kind === "pass"; // the verdict is not known yet
    const out = [el("h3", {}, el("bdi", { class: "mono" }, clipped(name(token), 30)))];
    if (n === 0) {
      out.push(el("p", {}, "The last token of the text. The draft begins here."));
      view.detail.replaceChildren(...out);
      return;
    }
    const depth = levels(step.parents)[parent] + 1;
    const position = step.position + depth - 1;
    const greedy = run.request.temperature === 0;
    const shared = data.verifier === "match";
    const noise = (id) => gumbel(run.request.seed, TOKEN, 0, position, id);
    const rows = [];
    const target = n !== own && step.p ? step.p[n] : step.likely?.[parent]?.find((pair) => pair[0] === token)?.[1];
    const rank = n !== own ? step.rank?.[n] : null;
    if (target !== undefined && !open_) rows.push(["p: the target gives it", short(target), rank ? `rank ${rank}` : ""]);
    if (n !== own && step.q) rows.push(["q: the draft gives it", short(step.q[n]), `rank ${step.q_rank[n]}`]);
    if (n !== own && step.confidence) rows.push(["estimate that it stays", percent(step.confidence[n]), ""]);
    if (shared && !greedy) rows.push(["noise at this place", short(noise(token)), ""]);
    if (!shared && n !== own) rows.push(["coin", short(uniform(run.request.seed, ACCEPT, step.step, position, n)), ""]);
    if (rows.length) out.push(el("table", {}, el("tbody", {}, rows.map((cells) => el("tr", {}, el("th", { scope: "row" }, cells[0]), cells.slice(1).map((cell) => el("td", {}, cell)))))));
    const likely = open_ ? null : step.likely?.[parent];
    if (likely?.length && shared) {
      const all = [...likely];
      if (target !== undefined && !all.some((pair) => pair[0] === token)) all.push([token, target]);
      const score = (pair) => Math.log(pair[1]) + (greedy ? 0 : noise(pair[0]));
      const best = all.reduce((a, b) => (score(b) > score(a) ? b : a));
      out.push(el("p", { class: "small soft" }, greedy ? "The target takes its most likely token here:" : "The target takes the token with the largest sum of log p and noise. The draft uses the same noise, so it often finds the same token:"));
      const heads = greedy ? ["token", "p"] : ["token", "p", "noise", "sum"];
      out.push(
        el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
          el("tbody", {}, all.map((pair) =>
            el("tr", {}, el("td", {}, el("bdi", { class: "mono" }, `${pair === best ? "▶ " : ""}${clipped(name(pair[0]), 12)}`)), el("td", {}, short(pair[1])),
              greedy ? [] : [el("td", {}, short(noise(pair[0]))), el("td", {}, pair === best ? el("b", {}, short(score(pair))) : short(score(pair)))]))),
        ),
      );
    } else if (!rows.length && !open_) {
      out.push(el("p", { class: "soft" }, "This trace holds no probabilities of this token. --trace-detail probs records some; outrider explain with the model computes all."));
    }
    view.detail.replaceChildren(...out);
  };

  // -- text and clock --------------------------------------------------------------------------------------------------

  const text = (place) => {
    const upTo = place.before + place.walked;
    const out = [];
    const prompt = run.request.prompt ?? [];
    const from = Math.max(0, upTo - SHOWN);
    if (from > 0) out.push(el("span", { class: "prompt" }, `… ${count(from + prompt.length, "token")} before …`));
    else if (prompt.length) {
      const tail = prompt.slice(-SHOWN);
      out.push(el("span", { class: "prompt" }, (prompt.length > SHOWN ? "… " : "") + visible(tail.map(name).join(""))));
    }
    if (!run.known) out.push(el("span", {}, run.origins.slice(from, upTo)));
    else for (let n = from; n < upTo; n += 1) {
      const kind = CLASSES[run.origins[n]];
      out.push(el("span", { class: `${kind}${n >= place.before ? " new" : ""}`, title: `${label(name(run.tokens[n]))}: ${MEANINGS[run.origins[n]][1]}` }, visible(name(run.tokens[n]))));
    }
    view.text.replaceChildren(...out);
    view.text.scrollTop = view.text.scrollHeight;
  };

  const lane = (title, kind, tokens, total, tail) => [
    el("div", {}, title),
    el("div", { class: `bar ${kind}` }, el("i", { style: { width: `${(100 * tokens) / Math.max(total, 1)}%` } })),
    el("div", { class: "many" }, count(tokens, "token")),
    el("div", { class: "tail", "aria-hidden": "true" }, el("bdi", {}, tail)),
  ];

  const lanes = (place) => {
    const total = run.ends.at(-1);
    const now = clock(run, place, which);
    const mine = place.before + place.walked;
    const tail = (n) => (run.known ? label(run.tokens.slice(Math.max(0, n - 24), n).map(name).join("")) : "");
    view.lanes.replaceChildren(...lane("With the draft", "fast", mine, total, tail(mine)), ...lane("Plain decoding", "plain", now.plain, total, tail(now.plain)));
    const whole = which === "passes" ? run.request.steps.length : run.times.at(-1);
    const say = which === "passes" ? (t) => count(Math.round(t), "pass").replace("passs", "passes") : seconds;
    view.saved.replaceChildren(
      el("b", {}, `After ${say(now.time)}${place.kind === "pass" ? ", before the verdict" : ""}: ${mine} against ${now.plain} tokens. `),
      `The whole text of ${count(total, "token")} takes ${say(whole)} with the draft and ${say(now.all)} without: ${short(now.all / whole)} times ${which === "passes" ? "as many passes" : "as long"}. Both texts are the same.`,
      which === "passes" && run.plainSeconds ? " Passes are not time, because drafting takes some: the seconds show it." : "",
    );
    if (!run.request.steps.length) view.saved.replaceChildren();
  };

  // -- controls --------------------------------------------------------------------------------------------------------

  const stop = () => {
    if (playing !== null) clearInterval(playing);
    playing = null;
    view.play.textContent = "Play";
    view.caption.setAttribute("aria-live", "polite");
  };
  const play = () => {
    if (playing !== null) return stop();
    if (moment === run.moments - 1) go(0);
    view.play.textContent = "Pause";
    view.caption.setAttribute("aria-live", "off"); // a screen reader cannot follow at this pace
    const pace = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1500 : 600;
    playing = setInterval(() => {
      go(moment + 1);
      if (moment === run.moments - 1) stop();
    }, pace);
    return undefined;
  };
  const step = (by) => {
    const { index } = at(run, moment);
    const to = by < 0 && moment > run.starts[index] ? index : index + by;
    go(run.starts[Math.min(Math.max(to, 0), run.request.steps.length - 1)]);
  };
  const actions = {
    first: () => go(0), back: () => go(moment - 1), next: () => go(moment + 1), skip: () => step(1),
  };
  for (const [id, act] of Object.entries(actions)) view[id].addEventListener("click", () => { stop(); act(); });
  view.play.addEventListener("click", play);
  view.scrub.addEventListener("input", () => { stop(); go(Number(view.scrub.value)); });
  const keys = {
    ArrowLeft: () => go(moment - 1), ArrowRight: () => go(moment + 1), ArrowUp: () => step(-1), ArrowDown: () => step(1),
    Home: () => go(0), End: () => go(run.moments - 1), " ": play,
  };
  view.stage.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select") || (event.key === " " && event.target.matches("button"));
    const scrolls = event.target.matches("#run-text") && event.key !== " ";
    if (!keys[event.key] || typing || scrolls || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (event.key !== " ") stop();
    keys[event.key]();
  });
  if (data.requests.length > 1) {
    const named = data.requests.every((request) => request.title);
    const options = data.requests.slice(0, 200).map((request, n) => [String(n), request.title ?? `request ${request.id}, ${count(request.steps.length, "step")}`]);
    const change = (n) => open(data.requests[Number(n)]);
    byId("run-request").append(named ? radios({ name: "The run", options, value: "0", change }) : choice({ id: "run-choice", name: "Request", options, value: "0", change }).node);
  }
  if (data.plain_seconds) {
    view.clock.append(radios({ name: "Clock", options: [["seconds", "Seconds, measured"], ["passes", "Passes of the target"]], value: which, change: (value) => { which = value; draw(); } }));
  } else view.clock.append(el("p", { class: "soft small" }, "The clock counts passes of the target. Seconds of plain decoding were not measured in this trace."));
  view.legend.append(...Object.values(MEANINGS).map(([kind, text_]) => el("li", {}, el("span", { class: `origin ${kind}` }, kind), ` ${text_}`)));
  sized(view.trees, (width) => { room = width; if (run?.moments) draw(); });
  if (data.requests.length) open(data.requests[0]);
  else view.caption.textContent = "This trace has no request.";
}
