// What a draft gains and what it costs. The functions and names are those of outrider/drafters/shapes.py and control/costs.py.

/** Survival if every draft token is accepted with probability alpha: alpha, alpha**2, ... */
export function geometric(alpha, depth) {
  return Array.from({ length: depth }, (_, j) => alpha ** (j + 1));
}

/** Tokens of a step on average, the target's own included. */
export function expectedTokens(survival) {
  return survival.reduce((sum, x) => sum + x, 1);
}

/** Tokens per second over those of plain decoding. draft, verify: times in units of a plain step. */
export function speedup(survival, draft, verify) {
  return expectedTokens(survival) / (draft + verify);
}

/** The depth with the most tokens per second; 0 is plain decoding. seconds[k]: time of a step with k levels. */
export function bestDepth(survival, seconds) {
  let [rate, tokens, best] = [1 / seconds[0], 1, 0];
  for (let depth = 1; depth < Math.min(seconds.length, survival.length + 1); depth += 1) {
    tokens += survival[depth - 1];
    if (tokens / seconds[depth] > rate) [rate, best] = [tokens / seconds[depth], depth];
  }
  return best;
}

/** Straight lines through points [[x, y], ...]; beyond them the last line goes on, never downwards. */
export function interpolate(points, x) {
  const sorted = [...points].sort((a, b) => a[0] - b[0]);
  const hit = sorted.find((point) => point[0] === x);
  if (hit) return hit[1];
  if (sorted.length === 1) return sorted[0][1];
  const above = sorted.findIndex((point) => point[0] >= x);
  const at = Math.min(Math.max(above < 0 ? sorted.length : above, 1), sorted.length - 1);
  const [low, high] = [sorted[at - 1], sorted[at]];
  const slope = (high[1] - low[1]) / (high[0] - low[0]);
  if (x > sorted.at(-1)[0]) return high[1] + Math.max(slope, 0) * (x - high[0]);
  const value = low[1] + slope * (x - low[0]);
  return x < sorted[0][0] ? Math.max(value, 0) : value;
}

// Acceptance by rank of an average draft (BY_RANK in expectation.py).
export const BY_RANK = [0.7, 0.12, 0.05, 0.03, 0.02, 0.015, 0.01, 0.008];

/** Acceptance by rank if the first child is accepted with probability `first`. */
export function ranks(first) {
  const left = (1 - first) / (1 - BY_RANK[0]);
  const out = [first];
  for (const usual of BY_RANK.slice(1)) out.push(Math.min(usual * left, out.at(-1)));
  return out;
}

/** The tree within a budget with the largest expected number of accepted nodes: {parents, ranks}. Sequoia, 2402.12374. */
export function optimalShape(depth, width, nodes, byRank) {
  const accepted = byRank.slice(0, width);
  const [parents, order, levels] = [[-1], [0], [0]];
  const waiting = []; // [value, level, parent, rank]
  const offer = (value, level, parent, rank) => {
    if (rank < accepted.length && level <= depth && accepted[rank] > 0) {
      waiting.push([value * accepted[rank], level, parent, rank]);
    }
  };
  const before = (a, b) => b[0] - a[0] || a[1] - b[1] || a[2] - b[2] || a[3] - b[3];
  offer(1, 1, 0, 0);
  while (waiting.length && parents.length <= nodes) {
    let at = 0;
    for (let i = 1; i < waiting.length; i += 1) if (before(waiting[i], waiting[at]) < 0) at = i;
    const [value, level, parent, rank] = waiting.splice(at, 1)[0];
    parents.push(parent);
    order.push(rank);
    levels.push(level);
    offer(value / accepted[rank], level, parent, rank + 1); // the next sibling
    offer(value, level + 1, parents.length - 1, 0); // the first child
  }
  return { parents, ranks: order };
}

/** Expected accepted nodes of a step: the sum over nodes of the product of chances along their paths. */
export function expectedAccepted(shape, byRank) {
  const value = [1];
  for (let n = 1; n < shape.parents.length; n += 1) value.push(value[shape.parents[n]] * byRank[shape.ranks[n]]);
  return value.slice(1).reduce((sum, x) => sum + x, 0);
}

/** Cost of a forward over `rows` rows, in units of one row, if memory and arithmetic overlap. balance: rows where they are equal. */
export function roofline(balance, rows) {
  return Math.max(rows, balance) / Math.max(1, balance);
}

/** Time of a pass over `rows` tokens by a cost curve of the page's data, in the curve's own unit. */
export function passCost(curve, rows) {
  return curve.balance ? roofline(curve.balance, rows) : interpolate(curve.nodes, rows);
}

/** Tokens, cost and speedup of one setting. setting: {alpha, survival, depth, width, c, verify}; verify: rows -> plain steps. */
export function setting({ alpha, survival, depth, width, c, verify }) {
  const nodes = depth * width;
  let tokens;
  if (width === 1) {
    tokens = expectedTokens(survival ? survival.slice(0, depth) : geometric(alpha, depth));
  } else {
    const byRank = ranks(alpha);
    tokens = 1 + expectedAccepted(optimalShape(depth, width, nodes, byRank), byRank);
  }
  const cost = depth ? depth * c + verify(nodes + 1) / verify(1) : 1;
  return { tokens, cost, speedup: tokens / cost };
}
