// Unit tests of the pages' modules, for node --test.
import assert from "node:assert/strict";
import { test } from "node:test";
import { clipped, label, short, visible } from "./dom.js";
import { at, clock, momentsOf, prepare } from "./moments.js";
import { moved, pick, tempered } from "./rules.js";
import { roofline } from "./speed.js";
import { coverage, fitted, layout } from "./trees.js";
import { ticks } from "./chart.js";

const step = (position, drafted, path, committed, refused) => ({
  step: 0, position, drafted, depth: drafted, accepted: Math.min(path.length - 1, committed), refused, committed, seconds: [1, 2, 0, 0],
  tokens: Array.from({ length: drafted + 1 }, (_, n) => 10 * position + n), parents: Array.from({ length: drafted + 1 }, (_, n) => n - 1), path, token: 7,
});
const steps = [step(3, 0, [0], 1, 0), step(4, 3, [0, 1, 2], 3, 1), step(7, 2, [0, 1, 2], 2, 0)];

test("moments visit each draft token, the pass and each written token, once", () => {
  const run = prepare({ steps, prompt: [1, 2, 3] }, 0.5);
  assert.equal(run.moments, steps.reduce((sum, one) => sum + momentsOf(one), 0));
  let last = -1;
  for (let moment = 0; moment < run.moments; moment += 1) {
    const place = at(run, moment);
    const done = place.before + place.walked;
    assert.ok(done >= last);
    last = done;
    if (place.kind === "draft") assert.ok(place.nodes >= 2 && place.walked === 0);
  }
  assert.equal(last, 6);
  assert.equal(run.tokens.length, 6);
  assert.equal(run.origins, "paacaa");
  // The last step ended inside its draft: there is no token of the target's own.
  assert.equal(at(run, run.moments - 1).kind, "walk");
});

test("both clocks end at the end, and plain decoding is never ahead of its own pace", () => {
  const run = prepare({ steps, prompt: [] }, 0.5);
  const end = at(run, run.moments - 1);
  assert.deepEqual(clock(run, end, "passes"), { time: 3, plain: 3, all: 6 });
  assert.deepEqual(clock(run, end, "seconds"), { time: 9, plain: 6, all: 3 });
  assert.equal(clock(run, at(run, 0), "passes").plain, 1);
});

test("moving a bar keeps a distribution", () => {
  for (const value of [-1, 0, 0.3, 1, 2]) {
    const now = moved([0.2, 0.5, 0.3], 1, value);
    assert.ok(Math.abs(now.reduce((a, b) => a + b) - 1) < 1e-12);
    assert.ok(now.every((x) => x >= 0 && x <= 1));
  }
  assert.deepEqual(moved([0, 1, 0], 1, 0.5), [0.25, 0.5, 0.25]);
});

test("a draw falls where the running sum says", () => {
  assert.deepEqual([0, 0.49, 0.5, 0.99, 1].map((u) => pick([0.5, 0, 0.5], u)), [0, 0, 2, 2, 0]);
  assert.deepEqual(tempered([0.8, 0.2, 0], 1).map((x) => Number(x.toFixed(9))), [0.8, 0.2, 0]);
});

test("a roofline is level until arithmetic is the limit", () => {
  assert.deepEqual([1, 100, 200].map((m) => roofline(100, m)), [1, 1, 2]);
});

test("texts are shown, never interpreted", () => {
  assert.equal(visible("a\u202eb\u0000\n"), "a\\u202eb\\u0000\n");
  assert.equal(label("  x\n"), "··x↵");
  assert.equal(label(""), "(empty)");
  assert.equal(clipped("abcdef", 4), "abc…");
  assert.equal([0, 0.123456, 12.345, 123456, Infinity].map(short).join(" "), "0 0.123 12.3 123,456 –");
});

test("places of a tree are apart", () => {
  const { row, column } = layout([-1, 0, 0, 1, 1, 2]);
  assert.equal(new Set(row.map((r, n) => `${r},${column[n]}`)).size, 6);
});

test("means over positions, and ticks", () => {
  const positions = [{ text: [1, 2, 3], chain: { tokens: [0, 1, 2, 9], parents: [-1, 0, 1, 2] } }, { text: [4], chain: { tokens: [0, 5, 5, 5], parents: [-1, 0, 1, 2] } }];
  assert.deepEqual(coverage(positions, "chain", 3), { tokens: 1, levels: 3 });
  assert.deepEqual(coverage(positions, "chain", 1), { tokens: 0.5, levels: 1 });
  assert.deepEqual(ticks(0, 1, 4), [0, 0.25, 0.5, 0.75, 1]);
});

test("a tree fits into its room: to the right, down, or smaller", () => {
  const box = { wide: 106, high: 44, column: 122, row: 56 };
  const chain = Array.from({ length: 7 }, (_, n) => n - 1);
  const broad = [-1, ...Array.from({ length: 30 }, () => 0)];
  assert.ok(fitted(chain, 900, box).across);
  assert.ok(!fitted(chain, 340, box).across);
  for (const parents of [[-1], chain, broad, [-1, 0, 0, 1, 1, 2, 5, 6]]) {
    for (const room of [120, 340, 900]) {
      const { x, y, width, height, scale } = fitted(parents, room, box);
      assert.ok(scale <= 1 && width * scale <= room + 1e-9);
      parents.forEach((_, n) => assert.ok(x[n] >= 0 && x[n] + box.wide <= width && y[n] >= 0 && y[n] + box.high <= height));
    }
  }
});
