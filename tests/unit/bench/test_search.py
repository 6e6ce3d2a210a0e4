"""The search on made-up speeds: what is measured, who drops out, and when it stops."""

import json
import random
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from outrider.bench.prompts import Ask
from outrider.bench.run import Sample
from outrider.bench.tune import search as tune
from outrider.bench.tune.search import HOPELESS, Arm, Method, Search, _ladder
from outrider.bench.tune.simulate import budgets
from outrider.cli.main import app
from outrider.cli.tune import because
from outrider.control import CostModel
from outrider.core.types import Budget
from outrider.llm import LLM
from outrider.models.load import load

ASKS = [Ask(str(n), "all", f"prompt {n}") for n in range(12)]


class MadeUp(Search):
    """Settings with known speeds in tokens/s; an answer differs from the next by `noise`."""

    def __init__(self, speeds, predicted=None, noise=0.05, **more):
        super().__init__(None, ASKS, [], {"temperature": 0.0, "seed": 0}, seconds=1e9, **more)
        self.speeds, self.noise, self.rng = {"plain": 100.0, **speeds}, noise, random.Random(1)
        self.length = [self.rng.lognormvariate(0, 0.3) for _ in ASKS]
        for name, speed in speeds.items():
            if name.endswith("calibrated"):
                continue
            config = {"method": "suffix", "num_speculative_tokens": 4, "controller": "fixed"}
            self.arms.append(Arm(name, config, Budget(4), (predicted or {}).get(name, speed)))
        self.methods = [Method("suffix", {"method": "suffix"})]

    def _predict(self):
        for ask in self.pilots:
            self.race([self.plain], ask, 0)
        yield "predicted"

    def race(self, arms, ask, repeat):
        for arm in arms:
            speed = self.speeds.get(arm.name, 1.0)
            seconds = 64 / speed * self.length[int(ask.id)] * self.rng.lognormvariate(0, self.noise)
            self.turn += 1
            arm.samples.append(
                Sample(
                    prompt=ask.id, setting=arm.name, repeat=repeat, turn=self.turn, seconds=seconds, output_tokens=64
                )
            )


def test_the_fastest_is_found():
    search = MadeUp({"suffix k=4": 130.0, "suffix k=8": 180.0, "suffix k=2": 170.0, "suffix calibrated": 100.0})
    assert len([*search.run()]) > 3
    assert search.complete
    assert search.chosen.name == "suffix k=8"
    assert search.over_plain(search.chosen).low > 1.5
    slow = next(a for a in search.arms if a.name == "suffix k=4")
    assert "expected to be slower" in slow.out
    assert not slow.samples


def test_plain_decoding_is_an_answer():
    search = MadeUp({"suffix k=4": 90.0, "suffix k=8": 80.0}, predicted={"suffix k=4": 110.0, "suffix k=8": 112.0})
    for _ in search.run():
        pass
    assert search.chosen is search.plain
    assert search.over_plain(search.plain) is None


def test_where_a_gain_is_likely_but_not_sure_the_controller_decides():
    """Two prompts are too few to be sure of anything; what stops where guesses do not pay has nothing to lose."""
    search = MadeUp({"suffix k=4": 200.0, "suffix calibrated": 190.0}, noise=0.3)
    search.asks = search.asks[:2]
    for line, _ in zip(search.run(), range(4), strict=False):
        assert line
    assert search.over_plain(search.leader).low < 1
    assert search.chosen.name == "suffix calibrated"


def test_nothing_is_measured_where_nothing_could_win():
    search = MadeUp({"suffix k=4": 50.0, "suffix k=8": 40.0})
    for _ in search.run():
        pass
    assert not [a for a in search.arms if a.samples and a is not search.plain]
    assert search.chosen is search.plain


def test_an_adaptive_one_wins_a_near_draw():
    search = MadeUp({"suffix k=4": 150.0, "suffix calibrated": 149.0}, noise=0.01)
    for _ in search.run():
        pass
    assert search.chosen.name == "suffix calibrated"


def test_what_is_known_when_somebody_stops():
    search = MadeUp({"suffix k=4": 200.0, "suffix k=8": 195.0, "suffix calibrated": 150.0})
    lines = search.run()
    assert next(lines) == "predicted"
    assert search.chosen is search.plain
    for _ in range(4):
        next(lines)
    assert not search.complete
    assert search.chosen.name.startswith("suffix k=")


def test_why_plain_decoding_is_best():
    search = MadeUp({"suffix k=4": 96.0, "suffix calibrated": 90.0})
    lines = search.run()
    assert because(search) == "nothing else was looked at yet"
    search.methods[0].best = search.arms[1]
    assert because(search).startswith(
        "nothing else was measured yet; the most hopeful setting, suffix k=4, is expected"
    )
    for _ in lines:
        pass
    assert because(search).startswith("the best of 2 measured settings, suffix k=4, is 0.9")
    search.arms, search.methods[0].best, search.methods[0].problem = (
        search.arms[:1],
        None,
        HOPELESS.format("plain decoding"),
    )
    assert because(search) == "guesses of suffix would make it slower even if all were right"


def test_the_tree_that_looks_best_is_played_before_it_is_believed(monkeypatch):
    """Where nodes and drafts cost nothing some tree is best, and what is said of it must be of its own steps."""
    free = CostModel(
        {}, [[1, n, 0, 1.0] for n in (1, 17)], [[1, w, d, 0, 0.0] for w in (1, 4) for d in (1, 8)], 0.0, 0.0
    )
    monkeypatch.setattr(tune, "calibrated", lambda *given, **more: free)
    sampling = {"temperature": 0.0, "seed": 0, "max_tokens": 24, "ignore_eos": True}
    asks = [Ask(str(n), "all", text) for n, text in enumerate(("def area(r):\n", "class Stack:\n"))]
    method = {"method": "draft_model", "model": "builtin:code-draft"}
    search = Search(load("builtin:code", device="cpu"), asks, [("draft_model", method)], sampling)
    list(search._predict())
    [found] = search.methods
    assert found.best.budget.width > 1
    assert found.best.budget in found.seen.played


def test_the_settings_of_a_drafter():
    assert budgets(Budget(3), 6) == [Budget(1), Budget(2), Budget(3)]
    trees = [b for b in budgets(Budget(8, 4, 16), 6) if b.width > 1]
    assert all(b.depth < b.max_nodes <= 4 * b.depth and b.depth <= 6 for b in trees)
    trees = [b for b in budgets(Budget(16, 4, 4), None) if b.width > 1]  # from texts, levels are free
    assert trees == [Budget(1, 4, 2), Budget(2, 4, 3), Budget(3, 4, 4)]
    arms = [Arm(str(n), {}, Budget(n)) for n in (4, 5, 3, 6, 7, 8, 2, 1)] + [Arm("tree", {}, Budget(3, 2, 4))]
    assert [a.name for a in _ladder(arms)] == ["4", "6", "2", "tree"]
    assert [a.name for a in _ladder(arms[::-1])] == ["tree", "1", "5"]
    assert [a.name for a in _ladder(arms[-2:-1])] == ["1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-file"], "there is no file no-such-file"),
        (["code", "--method", "sufix"], "did you mean 'suffix'?"),
        (["code", "--method", "prediction"], "no prompt has a prediction"),
        (["code", "--out", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_tuned(words, said):
    result = CliRunner().invoke(app, ["tune", *words, "-m", "builtin:code-draft"])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_the_command(tmp_path, monkeypatch, method):
    """On the built-in pair, as short as it can be: the file it writes is taken by generate."""
    from outrider import calibrate

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "WHOLE", replace(calibrate.WHOLE, rounds=2, contexts=(32,)))
    file = tmp_path / "config.json"
    words = ["tune", "-m", "builtin:code", "--method", method, "--num-prompts", "2", "-n", "12"]
    result = CliRunner().invoke(app, [*words, "--seconds", "1", "--out", str(file)])
    assert result.exit_code == 0, result.output
    assert "plain" in result.output
    assert "vLLM:" in result.output
    assert json.loads(file.read_text())["method"] in (method, "none")
    words = ["generate", "def f(x):", "-n", "4", "--speculative-config", str(file)]
    assert CliRunner().invoke(app, words).exit_code == 0


def test_arms_remember_what_they_have_seen_themselves():
    """Two lengths of one drafter that learns from answers: neither finds the other's answer in its memory, nor after
    `forget` its own; a model's weights are there once."""
    target = load("builtin:code-draft")
    methods = [
        ("suffix", {"method": "suffix"}),
        ("draft_model", {"method": "draft_model", "model": "builtin:code-draft"}),
    ]
    asks = [Ask("0", "all", "def area(r):\n    return")]
    search = Search(target, asks, methods, {"temperature": 0.0, "seed": 0, "max_tokens": 24, "ignore_eos": True})
    search._reader = LLM(target, max_num_seqs=1)
    for method in search.methods:
        method.llm = LLM(target, speculative_config={**method.config, "controller": "fixed"}, max_num_seqs=4)
    arms = [Arm(f"{name} k={k}", config, Budget(k)) for name, config in methods for k in (2, 5)]

    def accepted(arm):
        return sum(arm.samples[-1].accepted)

    search.race(arms, asks[0], 0)
    texts = [arm.samples[-1].token_ids for arm in arms]
    first = accepted(arms[1])
    search.race(arms[:1], asks[0], 0)
    search.race(arms[1:2], asks[0], 0)
    assert accepted(arms[1]) > first  # its own answer, found again
    search.forget(arms)
    search.race(arms, asks[0], 0)
    assert accepted(arms[1]) == first
    assert texts == [arm.samples[-1].token_ids for arm in arms] == [texts[0]] * 4
    assert arms[0].decoder is not arms[1].decoder
    assert arms[2].decoder is arms[3].decoder
