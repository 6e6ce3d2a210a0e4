// A draft is a tree, given by the parents of its nodes: -1 for the root, else a smaller index (outrider/core/tree.py).

/** Generations below the root, of each node. */
export function levels(parents) {
  const found = [];
  parents.forEach((parent, n) => found.push(parent < 0 ? 0 : found[parent] + 1));
  return found;
}

/** mask[i][j]: whether node i sees node j. It sees itself and its ancestors, no sibling. */
export function ancestorMask(parents) {
  return parents.map((_, i) => {
    const row = parents.map(() => false);
    for (let n = i; n >= 0; n = parents[n]) row[n] = true;
    return row;
  });
}

/** What became of each node: root, accepted, rejected (its parent was accepted) or unseen (its parent was not). */
export function verdicts(parents, path) {
  const accepted = new Set(path);
  return parents.map((parent, n) => {
    if (n === 0) return "root";
    if (accepted.has(n)) return "accepted";
    return accepted.has(parent) ? "rejected" : "unseen";
  });
}

/** One letter for each new token: a accepted, c corrected, b bonus, p plain (outrider/core/origins.py). */
export function origins(step) {
  const own = step.drafted === 0 ? "p" : step.refused > 0 ? "c" : "b";
  return ("a".repeat(step.accepted) + own).slice(0, step.committed);
}

/** The tokens that a step added to the text. */
export function written(step) {
  return [...step.path.slice(1).map((n) => step.tokens[n]), step.token].slice(0, step.committed);
}

/** How many tokens of `text` a draft covers: the longest path from the root that spells its beginning. */
export function covered(tokens, parents, text) {
  let [node, length] = [0, 0];
  for (;;) {
    const child = parents.findIndex((parent, n) => parent === node && tokens[n] === text[length]);
    if (child < 0 || length >= text.length) return length;
    node = child;
    length += 1;
  }
}

/** The part of a draft that a budget of `nodes` draft tokens keeps. Nodes are listed in the order in which they are kept. */
export function within(draft, nodes) {
  return { tokens: draft.tokens.slice(0, nodes + 1), parents: draft.parents.slice(0, nodes + 1) };
}

/** Mean tokens covered and mean levels of one kind of draft within a budget, over the positions of a run. */
export function coverage(positions, kind, nodes) {
  let [tokens, depth] = [0, 0];
  for (const position of positions) {
    const draft = within(position[kind], nodes);
    tokens += covered(draft.tokens, draft.parents, position.text);
    depth += Math.max(...levels(draft.parents));
  }
  return { tokens: tokens / positions.length, levels: depth / positions.length };
}

/** Places of the nodes of a tree: column is the level, row is such that no two nodes share a place and children stand beside their parent. */
export function layout(parents) {
  const column = levels(parents);
  const row = parents.map(() => 0);
  let next = 0;
  const visit = (node) => {
    const children = parents.flatMap((parent, n) => (parent === node ? [n] : []));
    if (children.length === 0) {
      row[node] = next;
      next += 1;
      return;
    }
    children.forEach(visit);
    row[node] = row[children[0]];
  };
  if (parents.length) visit(0);
  return { column, row, rows: Math.max(next, 1), columns: Math.max(...column, 0) + 1 };
}

/** Survival of a run: the share of the steps with j or more levels of draft in which the first j draft tokens were accepted. */
export function survivalOf(steps) {
  const deepest = steps.reduce((most, step) => Math.max(most, step.depth), 0);
  return Array.from({ length: deepest }, (_, j) => {
    const tried = steps.filter((step) => step.depth > j).length;
    return steps.filter((step) => step.depth > j && step.accepted > j).length / tried;
  });
}

/** Places for the boxes of a tree in `room` pixels: {x, y, width, height, scale, across}; a box of node n is at x[n], y[n].
 *
 * box: {wide, high, column, row}, pixels of a box and of a place. The tree grows to the right, or down where that needs less
 * shrinking; scale is at most 1, and width * scale is at most `room`. */
export function fitted(parents, room, box) {
  const { column, row } = layout(parents);
  const [deep, broad] = [column, row].map((places) => Math.max(...places, 0));
  const [right, down] = [deep * box.column + box.wide, broad * box.column + box.wide];
  const across = right <= Math.max(room, down);
  const [level, line] = across ? [box.column, box.row] : [box.row, box.column];
  const [width, height] = across ? [right, broad * box.row + box.high] : [down, deep * box.row + box.high];
  const [along, beside] = [column.map((n) => n * level), row.map((n) => n * line)];
  return { x: across ? along : beside, y: across ? beside : along, width, height, scale: Math.min(1, room / width), across };
}

/** The line of an edge of a fitted tree, from one node to another, as an SVG path. */
export function edge(place, box, from, to) {
  const { x, y, across } = place;
  if (across) {
    const [x1, y1, x2, y2] = [x[from] + box.wide, y[from] + box.high / 2, x[to], y[to] + box.high / 2];
    return `M${x1},${y1}C${(x1 + x2) / 2},${y1} ${(x1 + x2) / 2},${y2} ${x2},${y2}`;
  }
  const [x1, y1, x2, y2] = [x[from] + box.wide / 2, y[from] + box.high, x[to] + box.wide / 2, y[to]];
  return `M${x1},${y1}C${x1},${(y1 + y2) / 2} ${x2},${(y1 + y2) / 2} ${x2},${y2}`;
}
