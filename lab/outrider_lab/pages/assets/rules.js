// Why verification keeps the target's distribution: overlap, residual, the rules, right and wrong, and the race of `match`.
// Probabilities are arrays over a small vocabulary. The definitions are those of outrider/verify/reference.py.

import { ACCEPT, DRAFT, RESIDUAL, TOKEN, gumbel, uniform } from "./noise.js";

export function total(values) {
  return values.reduce((sum, x) => sum + x, 0);
}

/** The same proportions with sum 1; unchanged if all are zero. */
export function normalized(values) {
  const sum = total(values);
  return sum > 0 ? values.map((x) => x / sum) : values.slice();
}

/** How much of two distributions is common: the probability that a draft token is accepted. */
export function overlap(p, q) {
  return total(p.map((x, i) => Math.min(x, q[i])));
}

/** What the draft leaves uncovered, max(p - q, 0), with sum 1. p itself if nothing is left. */
export function residual(p, q) {
  const rest = p.map((x, i) => Math.max(x - q[i], 0));
  return total(rest) > 0 ? normalized(rest) : p.slice();
}

/** Half the summed difference of two distributions: 0 if they are equal, 1 if nothing is common. */
export function totalVariation(p, q) {
  return total(p.map((x, i) => Math.abs(x - q[i]))) / 2;
}

/** The probability that a token x from q is accepted. Leviathan et al. 2211.17192: min(1, p(x) / q(x)). */
export function acceptance(p, q) {
  return p.map((x, i) => (q[i] > x ? x / q[i] : x > 0 ? 1 : 0));
}

function largest(values) {
  return values.reduce((best, x, i) => (x > values[best] ? i : best), 0);
}

/** q at another temperature. */
export function tempered(q, temperature) {
  return normalized(q.map((x) => (x > 0 ? x ** (1 / temperature) : 0)));
}

export const WRONG_TEMPERATURE = 2;

/** The rules of the page. Each gives [distribution the draft token is drawn from, accept probabilities, distribution after a rejection]. */
export const RULES = {
  right: (p, q) => [q, acceptance(p, q), residual(p, q)],
  no_residual: (p, q) => [q, acceptance(p, q), p],
  argmax: (p, q) => [q, p.map((_, i) => (i === largest(p) ? 1 : 0)), residual(p, q)],
  temperature: (p, q) => [tempered(q, WRONG_TEMPERATURE), acceptance(p, q), residual(p, q)],
};

/** The distribution that a rule converges to: accepted mass, plus the rejected mass drawn anew. */
export function outcome(rule, p, q) {
  const [drawn, accept, after] = RULES[rule](p, q);
  const kept = drawn.map((x, i) => x * accept[i]);
  const lost = 1 - total(kept);
  return kept.map((x, i) => x + lost * after[i]);
}

/** The index where a uniform number falls in the running sum of a distribution. */
export function pick(distribution, u) {
  let sum = 0;
  for (let i = 0; i < distribution.length; i += 1) {
    sum += distribution[i];
    if (u < sum) return i;
  }
  return largest(distribution);
}

/** Counts [token] of `count` steps of a rule, beginning with step `first`. accepted: how many kept the draft token. */
export function sampled(rule, p, q, seed, first, count) {
  const [drawn, accept, after] = RULES[rule](p, q);
  const counts = p.map(() => 0);
  let accepted = 0;
  for (let step = first; step < first + count; step += 1) {
    const draft = pick(drawn, uniform(seed, DRAFT, step, 0, 0));
    const keep = uniform(seed, ACCEPT, step, 0, 0) < accept[draft];
    accepted += keep ? 1 : 0;
    counts[keep ? draft : pick(after, uniform(seed, RESIDUAL, step, 0, 0))] += 1;
  }
  return { counts, accepted };
}

/** One race of `match`: the scores log p + noise and log q + noise with the same noise, and the winner of each. */
export function race(p, q, seed, position) {
  const noise = p.map((_, i) => gumbel(seed, TOKEN, 0, position, i));
  const target = p.map((x, i) => Math.log(x) + noise[i]);
  const draft = q.map((x, i) => Math.log(x) + noise[i]);
  return { noise, target, draft, token: largest(target), drafted: largest(draft) };
}

/** Counts of the target's tokens in `count` races, and how often the draft chose the same token. */
export function raced(p, q, seed, first, count) {
  const counts = p.map(() => 0);
  let accepted = 0;
  for (let position = first; position < first + count; position += 1) {
    const { token, drafted } = race(p, q, seed, position);
    counts[token] += 1;
    accepted += token === drafted ? 1 : 0;
  }
  return { counts, accepted };
}

/** The probability that both win a race with shared noise (Daliri et al. 2408.07978): between (1 - tv) / (1 + tv) and 1 - tv. */
export function agreement(p, q) {
  return total(p.map((x, i) => (x > 0 && q[i] > 0 ? 1 / total(p.map((y, j) => Math.max(y / x, q[j] / q[i]))) : 0)));
}

/** Change one entry of a distribution to `value`; the others keep their proportions and take the rest. */
export function moved(distribution, index, value) {
  const kept = Math.min(Math.max(value, 0), 1);
  const rest = total(distribution) - distribution[index];
  const others = distribution.length - 1;
  return distribution.map((x, i) => {
    if (i === index) return kept;
    return rest > 0 ? (x / rest) * (1 - kept) : (1 - kept) / others;
  });
}
