"""The pages' JavaScript computes what outrider's Python computes: tables of cases, equal to 1e-6."""

from __future__ import annotations

import json
import math
import random
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from depths import best_depth
from scipy.stats import chisquare

from outrider.control.costs import interpolate
from outrider.core.noise import Noise, Stream
from outrider.core.sampling import draw
from outrider.core.tree import ancestor_mask, levels
from outrider.core.types import Budget
from outrider.drafters.shapes import BY_RANK, optimal_shape
from outrider.engine.memory import per_token
from outrider.kernels.probabilities import log
from outrider.models.load import load
from outrider.testing.oracle import distribution, total_variation
from outrider.verify.reference import reference_match, reference_rejection, residual
from outrider_lab.explain import _step, model_size
from outrider_lab.gain import expected_accepted, expected_tokens, geometric, speedup
from outrider_lab.pages.explained import ExplainedStep, builtin
from outrider_lab.traces import TracedStep, read

CASES = 40
Call = Callable[[list[tuple[str, str, list[Any]]]], list[Any]]


def close(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(close(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(close, found, wanted))
    if isinstance(wanted, str | bool):
        return found == wanted
    return found == pytest.approx(float(wanted), rel=1e-6, abs=1e-6)


def check(call: Call, module: str, name: str, table: list[tuple[list[Any], Any]]) -> None:
    assert table
    for (arguments, wanted), found in zip(table, call([(module, name, a) for a, _ in table]), strict=True):
        assert close(found, wanted), f"{name}({arguments}) is {found}, in Python {wanted}"


def rng() -> random.Random:
    return random.Random(20)


def probs(draw_: random.Random, size: int, zeros: bool = True) -> list[float]:
    weights = [draw_.choice([0, 1, 2, 3, 5, 8]) if zeros else draw_.random() for _ in range(size)]
    weights[draw_.randrange(size)] += 1
    return [w / sum(weights) for w in weights]


def pairs(zeros: bool = True) -> list[tuple[list[float], list[float]]]:
    make = rng()
    return [(probs(make, n, zeros), probs(make, n, zeros)) for n in (3, 5, 8) for _ in range(CASES // 3)]


def exact(values: list[float]) -> list[Fraction]:
    found = [Fraction(v).limit_denominator(10**6) for v in values]
    return [v / sum(found) for v in found]


def trees(count: int = CASES) -> list[list[int]]:
    make = rng()
    return [[-1, *(make.randrange(n) for n in range(1, size))] for size in (1, 2, 4, 9) for _ in range(count // 4)]


# -- noise and rules ------------------------------------------------------------------------------------------------------


def test_noise(javascript: Call) -> None:
    make, uniforms, gumbels = rng(), [], []
    for _ in range(CASES):
        seed, stream = make.getrandbits(64), make.choice(list(Stream))
        step, position, index = make.randrange(1000), make.randrange(100_000), make.randrange(50_000)
        signed = seed - 2**64 if seed >= 2**63 else seed
        noise, at = Noise(np.array([signed]), np.array([step])), np.array([position])
        key = [str(seed), stream.value, step, position, index]
        uniforms.append((key, float(noise.uniform(stream, at, index + 1)[0, index])))
        gumbels.append((key, float(noise.gumbel(stream, at, index + 1)[0, index])))
    check(javascript, "noise", "uniform", uniforms)
    check(javascript, "noise", "gumbel", gumbels)


def test_overlap_and_residual(javascript: Call) -> None:
    both = [(p, q, dict(enumerate(exact(p))), dict(enumerate(exact(q)))) for p, q in pairs()]
    check(javascript, "rules", "totalVariation", [([p, q], total_variation(a, b)) for p, q, a, b in both])
    check(javascript, "rules", "overlap", [([p, q], 1 - total_variation(a, b)) for p, q, a, b in both])
    rest = [([p, q], [float(x) for x in residual(1, p, q)]) for p, q, _, _ in both]
    check(javascript, "rules", "residual", [(a, [x / sum(r) for x in r]) for a, r in rest])


def outcome(rule: str, p: list[Fraction], q: list[Fraction]) -> dict[int, Fraction]:
    """The distribution of a rule, by enumeration. The right one is outrider's own reference."""

    def program(choose: Any) -> int:
        if rule == "right":
            draft = choose.token(q, depth=1)
            path, token = reference_rejection([0, draft], [-1, 0], lambda n: p, lambda n: q, choose)
            return draft if len(path) > 1 else token
        drawn = [x * x for x in q] if rule == "temperature" else q
        draft = choose.token(drawn, depth=1)
        likeliest = p.index(max(p))
        part, whole = (int(draft == likeliest), 1) if rule == "argmax" else (p[draft], q[draft])
        if choose.coin(part, whole, depth=1, node=1):
            return draft
        return choose.token(p if rule == "no_residual" else residual(1, p, q), depth=1)

    return distribution(program)


@pytest.mark.parametrize("rule", ["right", "no_residual", "argmax"])
def test_rules_converge_where_enumeration_says(javascript: Call, rule: str) -> None:
    table = []
    for p, q in pairs(zeros=False):
        found = outcome(rule, exact(p), exact(q))
        table.append(([rule, p, q], [float(found.get(i, 0)) for i in range(len(p))]))
    check(javascript, "rules", "outcome", [(a, w) for a, w in table])
    if rule == "right":
        check(javascript, "rules", "outcome", [([rule, p, q], p) for p, q in pairs()])
    else:
        assert any(not close(p, wanted) for (_, p, _), wanted in table)


def test_the_wrong_temperature_converges_where_enumeration_says(javascript: Call) -> None:
    """Draft tokens are drawn at temperature 2, which is exact for squared probabilities: q is the square of what was drawn."""
    table = []
    for p, root in pairs(zeros=False):
        half = exact(root)
        q = [x * x / sum(y * y for y in half) for x in half]
        accept = [min(Fraction(1), a / b) for a, b in zip(exact(p), q, strict=True)]
        kept = [a * b for a, b in zip(half, accept, strict=True)]
        rest = residual(1, exact(p), q)
        wanted = [k + (1 - sum(kept)) * r / sum(rest) for k, r in zip(kept, rest, strict=True)]
        table.append((["temperature", p, [float(x) for x in q]], [float(x) for x in wanted]))
    check(javascript, "rules", "outcome", table)


def test_the_race_is_that_of_match(javascript: Call) -> None:
    table = []
    for n, (p, q) in enumerate(pairs()):
        noise, at = Noise(np.array([n]), np.array([0])), np.array([n])
        tokens = [int(draw(log(np.array([x])), noise, Stream.TOKEN, at)[0]) for x in (p, q)]
        table.append(([p, q, str(n), n], tokens))
    for (arguments, wanted), found in zip(table, javascript([("rules", "race", a) for a, _ in table]), strict=True):
        assert [found["token"], found["drafted"]] == wanted, arguments


def test_agreement_of_the_race_is_what_pythons_noise_gives(javascript: Call) -> None:
    count, some = 20_000, pairs(zeros=False)[:4]
    found = javascript([("rules", "agreement", [p, q]) for p, q in some])
    for (p, q), share in zip(some, found, strict=True):
        at = np.arange(count)
        gumbel = Noise(np.full(count, 5), np.zeros(count, np.int64)).gumbel(Stream.TOKEN, at, len(p))
        same = ((np.log(p) + gumbel).argmax(1) == (np.log(q) + gumbel).argmax(1)).mean()
        assert abs(float(same) - share) < 4.5 * (share * (1 - share) / count) ** 0.5
        tv = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        assert (1 - tv) / (1 + tv) - 1e-9 <= share <= 1 - tv + 1e-9


@pytest.mark.parametrize("rule", ["right", "match", "no_residual", "argmax", "temperature"])
def test_the_histogram_passes_a_chi_square_test_only_for_the_right_rules(javascript: Call, rule: str) -> None:
    p, q = [0.5, 0.22, 0.12, 0.1, 0.06], [0.2, 0.4, 0.2, 0.1, 0.1]
    name, arguments = ("raced", [p, q]) if rule == "match" else ("sampled", [rule, p, q])
    for seed in ("1", "2", "3"):
        [found] = javascript([("rules", name, [*arguments, seed, 0, 10_000])])
        chance = chisquare(found["counts"], [10_000 * x for x in p]).pvalue
        assert (chance > 1e-4) == (rule in ("right", "match")), f"seed {seed}: {chance}"


# -- speed --------------------------------------------------------------------------------------------------------------------


def test_expected_speed(javascript: Call) -> None:
    make = rng()
    depths = [(make.random(), make.randrange(17)) for _ in range(CASES)]
    check(javascript, "speed", "geometric", [([a, d], geometric(a, d)) for a, d in depths])
    check(
        javascript,
        "speed",
        "expectedTokens",
        [([geometric(a, d)], expected_tokens(geometric(a, d))) for a, d in depths],
    )
    costs = [(geometric(a, d), make.random(), 1 + make.random()) for a, d in depths]
    check(javascript, "speed", "speedup", [([*c], speedup(*c)) for c in costs])
    times = [(geometric(a, d), [1.0, *(1 + make.random() * 3 for _ in range(d))]) for a, d in depths]
    check(javascript, "speed", "bestDepth", [([*t], best_depth(*t)) for t in times])


def test_interpolation(javascript: Call) -> None:
    make, table = rng(), []
    for _ in range(CASES):
        points = {make.randrange(1, 30): make.random() for _ in range(make.randrange(1, 6))}
        table += [([[*map(list, points.items())], x], interpolate(points, x)) for x in (0, 1, 7, 12.5, 60)]
    check(javascript, "speed", "interpolate", table)


def ranks(first: float) -> list[float]:
    """Acceptance by rank, as the usual one, if the first child is accepted with this probability."""
    out, left = [first], (1 - first) / (1 - BY_RANK[0])
    for usual in BY_RANK[1:]:
        out.append(min(usual * left, out[-1]))
    return out


def test_shapes(javascript: Call) -> None:
    firsts = [0.05, 0.3, 0.62, 0.7, 0.9, 0.99]
    check(javascript, "speed", "ranks", [([x], ranks(x)) for x in firsts])
    [usual] = javascript([("speed", "ranks", [BY_RANK[0]])])
    assert close(usual, BY_RANK)
    shapes, values = [], []
    for x in firsts:
        for depth, width, nodes in ((4, 3, 7), (8, 4, 16), (3, 1, 3), (2, 8, 30), (16, 4, 64)):
            by_rank = ranks(x)
            shape = optimal_shape(Budget(depth, width, nodes), by_rank)
            fields = {"parents": [*shape.parents], "ranks": [*shape.ranks]}
            shapes.append(([depth, width, nodes, by_rank], fields))
            values.append(([fields, by_rank], expected_accepted(shape, by_rank)))
    check(javascript, "speed", "optimalShape", shapes)
    check(javascript, "speed", "expectedAccepted", values)


def test_a_setting_is_its_parts(javascript: Call, modules: Path) -> None:
    """`setting` takes a function, so it is called inside node, with V(M) = 1 + 0.1 (M - 1)."""
    code = (
        "import {setting} from './speed.js'; const verify = (m) => 1 + 0.1 * (m - 1); const out = [];"
        "for (const alpha of [0.3, 0.8]) for (const depth of [0, 1, 5]) for (const width of [1, 3])"
        "  out.push(setting({alpha, survival: null, depth, width, c: 0.2, verify}).speedup);"
        "console.log(JSON.stringify(out));"
    )
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code], capture_output=True, text=True, cwd=modules, check=True
    )
    wanted = []
    for alpha in (0.3, 0.8):
        for depth in (0, 1, 5):
            for width in (1, 3):
                by_rank = ranks(alpha)
                shape = optimal_shape(Budget(depth, width), by_rank)
                gain = expected_accepted(shape, by_rank) if width > 1 else sum(geometric(alpha, depth))
                cost = depth * 0.2 + 1 + 0.1 * depth * width if depth else 1.0
                wanted.append((1 + gain) / cost)
    assert close(json.loads(done.stdout), wanted)


# -- trees and texts --------------------------------------------------------------------------------------------------------


def test_masks_and_levels(javascript: Call) -> None:
    check(javascript, "trees", "levels", [([t], levels(t)) for t in trees()])
    check(javascript, "trees", "ancestorMask", [([t], ancestor_mask(np.array([t]))[0].tolist()) for t in trees()])


def test_what_a_draft_covers_is_what_match_accepts(javascript: Call) -> None:
    make, table = rng(), []
    for parents in trees():
        tokens = [make.randrange(3) for _ in parents]
        text = [make.randrange(3) for _ in range(6)]
        path, _ = reference_match(tokens, parents, lambda n: [], lambda n: [], _Told(text))
        table.append(([tokens, parents, text], len(path) - 1))
    assert len({wanted for _, wanted in table}) > 2
    check(javascript, "trees", "covered", table)


class _Told:
    """Choices that draw a given text."""

    def __init__(self, text: list[int]) -> None:
        self.text = [*text, *[-9] * 20]

    def token(self, probs: Any, *, depth: int) -> int:
        return self.text[depth - 1]

    def coin(self, *_: Any, **__: Any) -> bool:
        raise AssertionError


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trace of the small built-in pair, with its model."""
    from explained import small_run

    return small_run(tmp_path_factory.mktemp("run") / "run.jsonl")


def test_steps_read_as_in_the_trace(javascript: Call, run: Any) -> None:
    steps: list[TracedStep] = read(run[0]).text().steps
    shown = [_fields(_step(step)) for step in steps]
    check(javascript, "trees", "origins", [([s], step.origins) for s, step in zip(shown, steps, strict=True)])
    check(javascript, "trees", "written", [([s], step.written) for s, step in zip(shown, steps, strict=True)])
    rates = [d.rate for d in read(run[0]).acceptance]
    check(javascript, "trees", "survivalOf", [([shown], rates)])


def test_verdicts_are_those_of_a_replay(javascript: Call, run: Any) -> None:
    from outrider_lab.replay import replay

    trace, table = read(run[0]), []
    for step in trace.text().steps:
        nodes = replay(trace, run[1].decoder, step.step).nodes
        words = ["accepted" if n.accepted else "rejected" if n.parent_accepted else "unseen" for n in nodes]
        table.append(([step.parents, step.path], ["root", *words[1:]]))
    check(javascript, "trees", "verdicts", table)


def _fields(step: ExplainedStep) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(step)


def test_bytes_are_those_of_the_cache(javascript: Call) -> None:
    loaded = load("builtin:code")
    size = model_size(loaded)
    assert size is not None
    fields = _fields(size)  # type: ignore[arg-type]
    check(javascript, "attention", "bytesPerToken", [([fields], per_token(loaded.model))])
    per, many = per_token(loaded.model), size.heads / size.kv_heads
    wanted = {"one_pass": per * 108, "no_groups": per * many * 108, "one_by_one": per * sum(range(101, 109))}
    check(javascript, "attention", "bytesRead", [([fields, 100, 8], wanted)])
    check(
        javascript,
        "attention",
        "weightsRead",
        [([fields, 8], {"one_pass": size.weight_bytes, "one_by_one": 8 * size.weight_bytes})],
    )


def test_the_built_in_run_obeys_the_rule_of_match(javascript: Call) -> None:
    """The target's token has the largest log p + noise among the likeliest, with noise that the page computes itself."""
    calls, places = [], []
    for request in builtin().requests:
        for step in request.steps:
            assert step.likely is not None
            assert step.tokens is not None
            assert step.path is not None
            drawn = [*(step.tokens[n] for n in step.path[1:]), step.token][: step.committed]
            for depth, (node, token) in enumerate(zip(step.path, drawn, strict=False)):
                for candidate, p in step.likely[node]:
                    calls.append(("noise", "gumbel", [request.seed, 0, step.step, step.position + depth, candidate]))
                    places.append(((request.id, step.step, depth, token), candidate, p, request.temperature > 0))
    scores: dict[tuple[int, int, int, int | None], dict[int, float]] = {}
    for (key, candidate, p, noisy), noise in zip(places, javascript(calls), strict=True):
        scores.setdefault(key, {})[candidate] = math.log(p) + noisy * noise
    known = {key: found for key, found in scores.items() if key[3] in found}
    assert len(known) > 0.9 * len(scores) > 100
    for (*_, token), found in known.items():
        assert max(found, key=found.__getitem__) == token


def test_modules_by_themselves(modules: Path) -> None:
    """The unit tests in JavaScript."""
    source = Path(__file__).with_name("modules.test.mjs")
    (modules / source.name).write_text(source.read_text())
    done = subprocess.run(["node", "--test", source.name], capture_output=True, text=True, cwd=modules)
    assert done.returncode == 0, done.stdout[-3000:]
