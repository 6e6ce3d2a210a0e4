"""The search on made-up speeds: what is measured, what is dropped, and when it stops."""

import json
import random
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from outrider.bench import stats
from outrider.bench.prompts import Prompt
from outrider.bench.run import Run, Sample
from outrider.bench.tune import predict
from outrider.bench.tune.predict import TOO_EXPENSIVE, Predictor, neighbours
from outrider.bench.tune.race import Candidate, MethodTrial, Racer, plain_candidate
from outrider.bench.tune.search import Search
from outrider.bench.tune.simulate import budgets
from outrider.cli.main import app
from outrider.cli.tune import why_plain
from outrider.control import CostModel
from outrider.core.types import Budget
from outrider.llm import LLM
from outrider.models.load import load
from outrider.plan import acceptance_curve

PROMPTS = [Prompt(str(n), "all", f"prompt {n}") for n in range(12)]


class MadeUpRacer(Racer):
    """Candidates with known speeds in tokens/s. Each answer has a random error of `noise`."""

    def __init__(self, speeds, noise):
        self.speeds, self.noise, self.rng, self.turn = {"plain": 100.0, **speeds}, noise, random.Random(1), 0
        self.length = [self.rng.lognormvariate(0, 0.3) for _ in PROMPTS]

    def race(self, candidates, prompt, repeat):
        for candidate in candidates:
            speed = self.speeds.get(candidate.name, 1.0)
            seconds = 64 / speed * self.length[int(prompt.id)] * self.rng.lognormvariate(0, self.noise)
            self.turn += 1
            candidate.samples.append(
                Sample(
                    prompt=prompt.id, setting=candidate.name, repeat=repeat, turn=self.turn, seconds=seconds,
                    output_tokens=64,
                )
            )  # fmt: skip


class MadeUpPredictor(Predictor):
    """Predicts the given numbers."""

    def run(self):
        for prompt in self.pilots:
            self.racer.race([self.plain], prompt, 0)
        yield "predicted"


def made_up(speeds, predicted=None, noise=0.05):
    """A search among these settings."""
    racer = MadeUpRacer(speeds, noise)
    search = Search(racer, PROMPTS, [("suffix", {"method": "suffix"})], seconds=1e9)
    search.predictor = MadeUpPredictor(racer, search.plain, PROMPTS[:6], search.methods)
    config = {"method": "suffix", "num_speculative_tokens": 4, "controller": "fixed"}
    for name, speed in speeds.items():
        if not name.endswith("calibrated"):
            prediction = (predicted or {}).get(name, speed)
            search.predictor.candidates.append(Candidate(name, config, Budget(4), search.methods[0], prediction))
    return search


def test_the_fastest_is_found():
    search = made_up({"suffix k=4": 130.0, "suffix k=8": 180.0, "suffix k=2": 170.0, "suffix calibrated": 100.0})
    assert len([*search.run()]) > 3
    assert search.complete
    assert search.answer.name == "suffix k=8"
    assert search.standings.gain(search.answer).low > 1.5
    slow = next(a for a in search.candidates if a.name == "suffix k=4")
    assert "predicted to be slower" in slow.dropped
    assert not slow.samples


def test_plain_decoding_is_an_answer():
    search = made_up({"suffix k=4": 90.0, "suffix k=8": 80.0}, predicted={"suffix k=4": 110.0, "suffix k=8": 112.0})
    for _ in search.run():
        pass
    assert search.answer is search.plain
    assert search.standings.gain(search.plain) is None


def test_where_a_gain_is_likely_but_not_sure_the_controller_decides():
    """Two prompts are too few to be sure of anything; what stops where guesses do not pay has nothing to lose."""
    search = made_up({"suffix k=4": 200.0, "suffix calibrated": 190.0}, noise=0.3)
    search.prompts = search.prompts[:2]
    for line, _ in zip(search.run(), range(4), strict=False):
        assert line
    assert search.standings.gain(search.standings.leader).low < 1
    assert search.answer.name == "suffix calibrated"


def test_nothing_is_measured_where_nothing_could_win():
    search = made_up({"suffix k=4": 50.0, "suffix k=8": 40.0})
    for _ in search.run():
        pass
    assert not [a for a in search.candidates if a.samples and a is not search.plain]
    assert search.answer is search.plain


def test_an_adaptive_one_wins_a_near_draw():
    search = made_up({"suffix k=4": 150.0, "suffix calibrated": 149.0}, noise=0.01)
    for _ in search.run():
        pass
    assert search.answer.name == "suffix calibrated"


def test_what_is_known_when_somebody_stops():
    search = made_up({"suffix k=4": 200.0, "suffix k=8": 195.0, "suffix calibrated": 150.0})
    lines = search.run()
    assert next(lines) == "predicted"
    assert search.answer is search.plain
    for _ in range(4):
        next(lines)
    assert not search.complete
    assert search.answer.name.startswith("suffix k=")


def test_why_plain_decoding_is_best():
    search = made_up({"suffix k=4": 96.0, "suffix calibrated": 90.0})
    lines = search.run()
    assert why_plain(search) == "nothing else was examined yet"
    search.methods[0].best = search.predictor.candidates[0]
    assert why_plain(search) == "nothing else was measured yet. The best prediction is 96 tokens/s, suffix k=4"
    for _ in lines:
        pass
    assert why_plain(search).startswith("the best of 2 measured settings, suffix k=4, is 0.9")
    del search.candidates[1:]
    search.methods[0].best, search.methods[0].problem = None, TOO_EXPENSIVE.format("plain decoding")
    assert why_plain(search) == "suffix would be slower even if every draft token is accepted"


def test_the_best_tree_is_simulated_before_it_is_believed(monkeypatch):
    """If nodes and drafts cost nothing, a tree is the best, and its prediction must come from its own steps."""
    free = CostModel(
        {}, [[1, n, 0, 1.0] for n in (1, 17)], [[1, w, d, 0, 0.0] for w in (1, 4) for d in (1, 8)], 0.0, 0.0
    )
    monkeypatch.setattr(predict, "calibrated", lambda *given, **more: free)
    sampling = {"temperature": 0.0, "seed": 0, "max_tokens": 24, "ignore_eos": True}
    prompts = [Prompt(str(n), "all", text) for n, text in enumerate(("def area(r):\n", "class Stack:\n"))]
    method = {"method": "draft_model", "model": "builtin:code-draft"}
    racer, trial = Racer(load("builtin:code", device="cpu"), sampling), MethodTrial("draft_model", method)
    list(Predictor(racer, plain_candidate(), prompts, [trial]).run())
    assert trial.best.budget.width > 1
    assert trial.best.budget in trial.statistics.tree_steps


def test_the_settings_of_a_drafter():
    assert budgets(Budget(3), 6) == [Budget(1), Budget(2), Budget(3)]
    trees = [b for b in budgets(Budget(8, 4, 16), 6) if b.width > 1]
    assert all(b.depth < b.max_nodes <= 4 * b.depth and b.depth <= 6 for b in trees)
    trees = [b for b in budgets(Budget(16, 4, 4), None) if b.width > 1]  # from texts, levels are free
    assert trees == [Budget(1, 4, 2), Budget(2, 4, 3), Budget(3, 4, 4)]
    order = [Candidate(str(n), {}, Budget(n)) for n in (4, 5, 3, 6, 7, 8, 2, 1)]
    order.append(Candidate("tree", {}, Budget(3, 2, 4)))
    assert [c.name for c in neighbours(order)] == ["4", "6", "2", "tree"]
    assert [c.name for c in neighbours(order[::-1])] == ["tree", "1", "5"]
    assert [c.name for c in neighbours(order[-2:-1])] == ["1"]


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
    file, answers = tmp_path / "config.json", tmp_path / "answers.json"
    words = ["tune", "-m", "builtin:code", "--method", method, "--num-prompts", "2", "-n", "12"]
    result = CliRunner().invoke(app, [*words, "--seconds", "1", "--out", str(file), "--json", str(answers)])
    assert result.exit_code == 0, result.output
    assert "plain" in result.output
    assert "vLLM:" in result.output
    assert json.loads(file.read_text())["method"] in (method, "none")
    words = ["generate", "def f(x):", "-n", "4", "--speculative-config", str(file)]
    assert CliRunner().invoke(app, words).exit_code == 0
    run = Run.load(answers)
    assert run.settings[0].speculative_config is None
    assert {sample.setting for sample in run.samples} == {setting.name for setting in run.settings}
    name = next(s.name for s in run.settings if stats.acceptance(stats.answered(run, s.name)) is not None)
    monkeypatch.setattr(acceptance_curve, "_TRIES", 1)  # two short prompts are few
    words = ["plan", "--model-params", "8B", "--hardware", "h100", "--qps", "1", "--prompt", "100", "--output", "50"]
    words += ["--draft-params", "100M"] if method == "draft_model" else []
    planned = CliRunner().invoke(app, [*words, "--acceptance", str(answers), "--setting", name])
    assert planned.exit_code == 0, planned.output
    assert f"setting {name}" in " ".join(planned.output.split())
    assert CliRunner().invoke(app, ["report", str(answers), "--out", str(tmp_path / "page.html")]).exit_code == 0


def test_candidates_remember_only_their_own_answers():
    """Two lengths of one drafter that learns from answers. Neither finds the other's answer in its memory, nor its own after
    `reset`. The weights of a draft model are loaded once."""
    target = load("builtin:code-draft")
    config = {"method": "draft_model", "model": "builtin:code-draft"}
    trials = [MethodTrial("suffix", {"method": "suffix"}), MethodTrial("draft_model", config)]
    prompt = Prompt("0", "all", "def area(r):\n    return")
    racer = Racer(target, {"temperature": 0.0, "seed": 0, "max_tokens": 24, "ignore_eos": True})
    for trial in trials:
        trial.llm = LLM(target, speculative_config={**trial.config, "controller": "fixed"}, max_num_seqs=4)
    some = [Candidate(f"{trial.name} k={k}", trial.config, Budget(k), trial) for trial in trials for k in (2, 5)]

    def accepted(candidate):
        return sum(candidate.samples[-1].accepted)

    racer.race(some, prompt, 0)
    texts = [c.samples[-1].token_ids for c in some]
    first = accepted(some[1])
    racer.race(some[:1], prompt, 0)
    racer.race(some[1:2], prompt, 0)
    assert accepted(some[1]) > first  # its own answer, found again
    racer.reset(some)
    racer.race(some, prompt, 0)
    assert accepted(some[1]) == first
    assert texts == [c.samples[-1].token_ids for c in some] == [texts[0]] * 4
    assert some[0].decoder is not some[1].decoder
    assert some[2].decoder is some[3].decoder
