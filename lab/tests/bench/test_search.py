"""The search on made-up speeds: what is measured, what is dropped, and when it stops."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.control import CostModel
from outrider.control.costs import DraftCost
from outrider.core.types import Draft
from outrider.drafters import make_drafters
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, chains
from outrider.drafters.config import DrafterSetup
from outrider.models.load import load
from outrider_lab.bench.prompts import Prompt
from outrider_lab.bench.run import Run, Sample
from outrider_lab.cli.tune import why_plain
from outrider_lab.tune import forecasts
from outrider_lab.tune.race import Candidate, Racer
from outrider_lab.tune.search import Search

PROMPTS = [Prompt(str(n), "all", f"prompt {n}") for n in range(12)]


class MadeUpRacer(Racer):
    """Candidates with known speeds in tokens/s. Each answer has a random error of `noise`."""

    def __init__(self, speeds: dict[str, float], noise: float) -> None:
        self.speeds, self.noise, self.rng, self.turn = {"plain": 100.0, **speeds}, noise, random.Random(1), 0
        self.length = [self.rng.lognormvariate(0, 0.3) for _ in PROMPTS]

    def race(self, candidates: Any, prompt: Prompt, repeat: int) -> None:
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


class MadeUpForecasts:
    """Replays that say what they are told."""

    def __init__(self, found: list[Candidate]) -> None:
        self.found, self.problems, self.costs = found, dict[str, str](), None

    def run(self) -> Any:
        yield "recorded"

    def candidates(self, whole: Any) -> list[Candidate]:
        return sorted(self.found, key=lambda c: -(c.predicted or 0.0))


def made_up(speeds: dict[str, float], predicted: dict[str, float] | None = None, noise: float = 0.05) -> Search:
    """A search among these settings. "auto" is the default."""
    search = Search(MadeUpRacer(speeds, noise), PROMPTS, [], seconds=1e9)
    some = list[Candidate]()
    for name, speed in speeds.items():
        config = {"method": "auto"} if name == "auto" else {"method": "suffix", "controller": "fixed"}
        length = None if name == "auto" else int(name.partition("=")[2])
        some.append(Candidate(name, config, ("suffix",), length, (predicted or {}).get(name, speed / 100)))
    search.forecasts = MadeUpForecasts(some)  # type: ignore[assignment]
    return search


def finished(search: Search) -> None:
    for _ in search.run():
        pass


def test_a_setting_that_is_clearly_faster_than_the_default_is_the_answer() -> None:
    search = made_up({"auto": 150.0, "suffix k=4": 130.0, "suffix k=8": 190.0, "suffix k=2": 120.0})
    assert len([*search.run()]) > 3
    assert search.complete
    assert search.answer.name == "suffix k=8"
    found = search.gain(search.answer)
    assert found is not None
    assert found.low > 1.5
    slow = next(a for a in search.candidates if a.name == "suffix k=4")
    assert slow.dropped == "slower in the replay"
    assert not slow.samples


def test_the_answer_is_never_behind_the_default() -> None:
    """A near draw, and a setting that the replay overrates: the default."""
    for other, predicted in ((151.0, 1.6), (110.0, 2.5), (80.0, 3.0)):
        search = made_up({"auto": 150.0, "suffix k=4": other}, {"suffix k=4": predicted}, noise=0.03)
        finished(search)
        assert search.answer.name == "auto"


def test_the_default_is_measured_whatever_the_replay_says() -> None:
    search = made_up({"auto": 160.0, "suffix k=4": 150.0, "suffix k=8": 140.0}, {"auto": 0.5})
    finished(search)
    assert search.answer.name == "auto"


def test_plain_decoding_is_an_answer() -> None:
    search = made_up({"auto": 90.0, "suffix k=8": 80.0}, predicted={"auto": 1.1, "suffix k=8": 1.12})
    finished(search)
    assert search.answer is search.plain
    assert search.gain(search.plain) is None


def test_a_setting_that_is_clearly_faster_than_plain_decoding_is_not_lost_beside_a_slow_default() -> None:
    """The default is too noisy to be called slower, and it does not look faster than plain decoding."""
    search = made_up({"auto": 100.0, "suffix k=4": 180.0})
    racer = search.racer
    assert isinstance(racer, MadeUpRacer)
    search.choose(search.forecasts.candidates(None))
    for prompt in PROMPTS[:4]:
        racer.noise = 0.02
        racer.race([search.plain, search.candidates[1]], prompt, 0)
        racer.noise = 1.5
        racer.race([search.default], prompt, 0)
    gain = search.gain(search.candidates[1])
    assert gain is not None
    assert gain.low > 1
    assert search.answer.name == "suffix k=4"


def test_other_engines_get_a_single_method() -> None:
    search = made_up({"auto": 190.0, "suffix k=4": 150.0, "suffix k=2": 120.0})
    finished(search)
    assert search.answer.name == "auto"
    assert search.exported.name == "suffix k=4"


def test_where_a_gain_is_likely_but_not_sure_the_default_decides() -> None:
    """Two prompts are too few to be sure of anything; what stops where drafts do not pay has nothing to lose."""
    search = made_up({"suffix k=4": 200.0, "auto": 190.0}, noise=0.3)
    search.prompts = search.prompts[:2]
    for line, _ in zip(search.run(), range(5), strict=False):
        assert line
    assert search.answer.name in ("auto", "plain")


def test_what_is_known_when_somebody_stops() -> None:
    search = made_up({"suffix k=4": 200.0, "suffix k=8": 195.0, "auto": 150.0})
    lines = search.run()
    assert next(lines) == "recorded"
    assert search.answer is search.plain
    for _ in range(5):
        next(lines)
    assert not search.complete
    assert search.answer.name != "plain"


def test_why_plain_decoding_is_best() -> None:
    search = made_up({"suffix k=4": 96.0, "auto": 90.0})
    lines = search.run()
    assert why_plain(search) == "nothing else was examined yet"
    next(lines)
    next(lines)
    assert (
        why_plain(search)
        == "nothing else was measured yet. The best in the replay is suffix k=4, 0.96 times plain decoding"
    )
    for _ in lines:
        pass
    assert why_plain(search).startswith("the best of 2 measured settings, ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-file"], "there is no file no-such-file"),
        (["http://127.0.0.1:1"], "bench PROMPTS --base-url http://127.0.0.1:1"),
        (["code", "--method", "sufix"], "did you mean 'suffix'?"),
        (["code", "--method", "prediction"], "no prompt has a prediction"),
        (["code", "--out", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_tuned(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["tune", *words, "-m", "builtin:code-draft"])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("methods", [["suffix"], []])
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: list[str]) -> None:
    """On the built-in pair, as short as it can be: the file it writes is taken by generate."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    file, answers = Path("config.json"), tmp_path / "answers.json"
    words = ["tune", "-m", "builtin:code", "--num-prompts", "2", "-n", "12"]
    words += [word for method in methods for word in ("--method", method)]
    result = CliRunner().invoke(app, [*words, "--seconds", "1", "--export", "--out", str(file), "--json", str(answers)])
    assert result.exit_code == 0, result.output
    assert "plain" in result.output
    assert "  vLLM: " in result.output
    assert result.stdout.splitlines()[-1].endswith("--speculative-config config.json")
    assert json.loads(file.read_text())["method"] in (
        *methods,
        "none",
        "auto",
        "draft_model",
        "suffix",
        "quantized_self",
    )
    assert ("draft_model" in result.output) == (methods != ["suffix"])
    words = ["generate", "def f(x):", "-n", "4", "--speculative-config", str(file)]
    assert CliRunner().invoke(app, words).exit_code == 0
    run = Run.load(answers)
    assert {sample.setting for sample in run.samples} == {setting.name for setting in run.settings}
    words = ["bench", "--report", str(answers), "--html", str(tmp_path / "page.html")]
    assert CliRunner().invoke(app, words).exit_code == 0


def test_a_recording_has_every_drafter_and_the_texts_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replays of a model's own recording: a longer fixed length is never forecast from tokens that were not proposed.

    Costs are given, because what a machine measures on a toy model is chance. At twice a forward a token, a drafter is left out.
    """

    def costs(model: Any, drafters: dict[str, Drafter], *_: Any) -> CostModel:
        levels = {name: DraftCost(0.0, 2.0 if name.endswith("int4") else 0.1, 0.0) for name in drafters}
        return CostModel({}, {1: 1.0, 64: 1.5}, levels)

    monkeypatch.setattr(forecasts, "measure", costs)
    target = load("builtin:code", device="cpu")
    racer = Racer(target, {"temperature": 0.0, "seed": 0, "max_tokens": 24, "ignore_eos": True})
    prompts = [Prompt(str(n), "all", text) for n, text in enumerate(("def area(r):\n", "class Stack:\n"))]
    configs = [
        ("suffix", {"method": "suffix"}),
        ("token_recycling", {"method": "token_recycling"}),
        ("draft_model", {"method": "draft_model", "model": "builtin:code-draft"}),
        ("quantized_self-int8", {"method": "quantized_self", "quantization": "int8"}),
        ("quantized_self-int4", {"method": "quantized_self", "quantization": "int4"}),
        ("eagle", {"method": "eagle", "model": "no-such-folder"}),
    ]
    search = Search(racer, prompts, configs, whole={"method": "auto"})
    lines = list(search.forecasts.run())
    assert len(lines) == 2, "two drafters with weights at a time"
    found = search.forecasts
    assert found.problems.keys() == {"eagle", "quantized_self-int4"}, found.problems
    assert found.problems["quantized_self-int4"] == forecasts.TOO_EXPENSIVE
    assert {m.name for m in found.methods} == {name for name, _ in configs} - {"eagle", "quantized_self-int4"}
    plain = racer.plain.generate([p.content for p in prompts], racer.request(prompts[0]).params)  # type: ignore[arg-type]
    assert [t.output for t in found.texts] == [o.outputs[0].token_ids for o in plain]
    for text in found.texts:
        assert len(text.drafts) == 4
        assert all(len(every) == len(text.output) for every in text.drafts.values())
    names = {c.name for c in found.candidates({"method": "auto"})}
    assert {"auto", "suffix", "suffix k=16", "draft_model k=3", "quantized_self-int8 k=4"} <= names
    assert "draft_model k=12" not in names
    assert found.speed(Candidate("", {}, ("draft_model",), 4)) > 0
    assert found.best_lengths(("draft_model",), (1, 4)).keys() == {1, 4}


class Failing(BaseDrafter):
    """A drafter that raises in its third step."""

    steps = 0

    def propose(self, context: DraftContext) -> Draft:
        self.steps += 1
        if self.steps > 2:
            raise RuntimeError("no memory left")
        return chains(context, [[1] for _ in context.slots])


def test_a_drafter_that_fails_is_a_problem_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(setup: DrafterSetup) -> dict[str, Drafter]:
        return {"ngram": Failing()} if setup.config.method == "ngram" else make_drafters(setup)

    monkeypatch.setattr(forecasts, "make_drafters", made)
    racer = Racer(load("builtin:code-draft"), {"temperature": 0.0, "seed": 0, "max_tokens": 12, "ignore_eos": True})
    configs = [("ngram", {"method": "ngram"}), ("suffix", {"method": "suffix"})]
    found = forecasts.Forecasts(racer, [Prompt("0", "all", "def f(x):")], configs)
    list(found.run())
    assert found.problems == {"ngram": "it failed: RuntimeError: no memory left"}
    assert [m.name for m in found.methods] == ["suffix"]
    assert found.texts[0].drafts.keys() == {"suffix"}


def test_a_draft_model_that_cannot_be_loaded_is_a_problem_and_the_others_go_on(tmp_path: Path) -> None:
    words = ["tune", "-m", "builtin:code-draft", "-d", str(tmp_path / "none"), "--num-prompts", "2", "-n", "8"]
    file = tmp_path / "config.json"
    result = CliRunner().invoke(app, [*words, "--seconds", "1", "--export", "--out", str(file)])
    assert result.exit_code == 0, result.output
    assert "there is no folder" in " ".join(result.output.split())
    assert "model" not in json.loads(file.read_text())


def test_lengths_of_a_batch_do_not_depend_on_the_number_of_texts() -> None:
    racer = Racer(load("builtin:code-draft"), {"temperature": 0.0, "seed": 0, "max_tokens": 16, "ignore_eos": True})
    prompts = [Prompt(str(n), "all", text) for n, text in enumerate(("def f(x):", "class A:"))]
    found = forecasts.Forecasts(racer, prompts, [("suffix", {"method": "suffix"})])
    list(found.run())
    found.costs = CostModel({}, {1: 1.0, 16: 1.2, 32: 2.0, 64: 4.0})
    few = found.best_lengths(("suffix",), (8,))
    found.texts = found.texts * 8
    assert found.best_lengths(("suffix",), (8,)) == few


def test_candidates_remember_only_their_own_answers() -> None:
    """Two lengths of one drafter that learns from answers. Neither finds the other's answer in its memory, nor its own after
    `reset`."""
    racer = Racer(load("builtin:code-draft"), {"temperature": 0.0, "seed": 0, "max_tokens": 24, "ignore_eos": True})
    prompt = Prompt("0", "all", "def area(r):\n    return")
    some = [
        Candidate(
            f"suffix k={k}", {"method": "suffix", "num_speculative_tokens": k, "controller": "fixed"}, ("suffix",), k
        )
        for k in (2, 5)
    ]

    def accepted(candidate: Candidate) -> int:
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
    assert texts == [c.samples[-1].token_ids for c in some] == [texts[0]] * 2
