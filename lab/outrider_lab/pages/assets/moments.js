// The moments of a run: what has happened after each click. Pure functions over the steps of a request.

import { origins, written } from "./trees.js";

/** Moments of a step: each draft token, the pass, each token that was written. */
export function momentsOf(step) {
  return step.drafted + 1 + Math.max(step.committed, 1);
}

/** A request prepared for stepping. starts[k]: the first moment of step k. ends[k]: tokens written after step k. */
export function prepare(request, plainSeconds) {
  const { steps } = request;
  const [starts, ends, times] = [[0], [], []];
  const [tokens, letters] = [[], []];
  let [count, time] = [0, 0];
  for (const step of steps) {
    starts.push(starts.at(-1) + momentsOf(step));
    count += step.committed;
    ends.push(count);
    time += step.seconds.reduce((sum, s) => sum + s, 0);
    times.push(time);
    if (step.tokens) tokens.push(...written(step));
    letters.push(origins(step));
  }
  return { request, starts, ends, times, tokens, origins: letters.join(""), moments: starts.at(-1), plainSeconds, known: tokens.length === count };
}

/** Where a moment is: the step, and what of it has happened. kind: draft, pass, walk or own. */
export function at(run, moment) {
  let [low, high] = [0, run.request.steps.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (run.starts[middle] <= moment) low = middle;
    else high = middle - 1;
  }
  const step = run.request.steps[low];
  const local = moment - run.starts[low];
  const before = low ? run.ends[low - 1] : 0;
  if (local < step.drafted) return { index: low, step, kind: "draft", nodes: local + 2, walked: 0, before };
  if (local === step.drafted) return { index: low, step, kind: "pass", nodes: step.drafted + 1, walked: 0, before };
  const walked = Math.min(local - step.drafted, step.committed);
  return { index: low, step, kind: walked > step.accepted ? "own" : "walk", nodes: step.drafted + 1, walked, before };
}

/** The time of a moment, and the tokens that plain decoding has written by then. clock: "passes" or "seconds". */
export function clock(run, place, which) {
  const { index, step, kind, nodes } = place;
  let time;
  if (which === "passes") time = index + (kind === "draft" ? 0 : 1);
  else {
    const start = index ? run.times[index - 1] : 0;
    const [draft, target] = step.seconds;
    if (kind === "draft") time = start + (draft * (nodes - 1)) / step.drafted;
    else time = kind === "pass" ? start + draft + target : run.times[index];
  }
  const unit = which === "passes" ? 1 : run.plainSeconds;
  const total = run.ends.at(-1) ?? 0;
  const all = total * unit;
  return { time, plain: Math.min(Math.floor(time / unit + 1e-9), total), all };
}
