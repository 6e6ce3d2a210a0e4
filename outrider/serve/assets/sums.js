// What the numbers of the dashboard are: sums of ticks over a window. outrider/serve/figures.py computes the same.

/** The ticks of the last `seconds`, newest last. */
export function recent(ticks, seconds) {
  const kept = [];
  let whole = 0;
  for (let n = ticks.length - 1; n >= 0 && whole < seconds - 1e-9; n -= 1) {
    kept.unshift(ticks[n]);
    whole += ticks[n].elapsed;
  }
  return kept;
}

/** The figures of some ticks; null where nothing happened that could say. */
export function figures(ticks) {
  const sum = (name) => ticks.reduce((total, tick) => total + tick[name], 0);
  const ratio = (part, whole) => (whole > 0 ? part / whole : null);
  const [phases, plans, weighed] = [{}, {}, {}];
  for (const tick of ticks) {
    for (const [name, value] of Object.entries(tick.seconds)) phases[name] = (phases[name] ?? 0) + value;
    for (const [name, count] of Object.entries(tick.plans)) plans[name] = (plans[name] ?? 0) + count;
    Object.assign(weighed, tick.weighed);
  }
  const planned = Object.values(plans).reduce((total, x) => total + x, 0);
  const inside = Object.values(phases).reduce((total, x) => total + x, 0);
  const byDepth = [];
  for (const tick of ticks) {
    tick.by_depth.forEach(([drafted, accepted], level) => {
      byDepth[level] = [(byDepth[level]?.[0] ?? 0) + drafted, (byDepth[level]?.[1] ?? 0) + accepted];
    });
  }
  const elapsed = sum("elapsed");
  return {
    elapsed,
    rate: ratio(sum("tokens"), elapsed),
    speedup: ratio(sum("worth"), sum("taken")),
    length: ratio(sum("tokens"), sum("rows")),
    acceptance: ratio(sum("accepted"), sum("drafted")),
    depth: ratio(sum("depth"), sum("rows")),
    sigma: ratio(sum("sigma"), sum("planned")),
    rows: ratio(sum("rows"), sum("steps")),
    survival: byDepth.map(([, accepted]) => accepted / byDepth[0][0]),
    plans: Object.fromEntries(Object.entries(plans).map(([name, count]) => [name, count / planned])),
    weighed,
    phases: { ...phases, outside: Math.max(elapsed - inside, 0) },
  };
}
