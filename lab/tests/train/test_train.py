"""A whole run on a tiny target whose structure is known: learnt, resumable bit for bit, and clear about bad input."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import GOLDEN, VOCAB, chain_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.core.params import SamplingParams
from outrider.drafters.heads.eagle import read_eagle
from outrider.drafters.heads.files import target_digest
from outrider.engine.llm import LLM
from outrider.engine.trace import Recorder
from outrider.models.load import load
from outrider_lab.traces import read
from outrider_lab.train import trainer
from outrider_lab.train.answers import AnswerFile, traced_texts
from outrider_lab.train.folder import RunFolder
from outrider_lab.train.methods import METHODS
from outrider_lab.train.settings import TRAINED as METHOD_NAMES
from outrider_lab.train.settings import TrainingSettings
from outrider_lab.train.survival import HeldOut
from outrider_lab.train.trainer import TrainingBudget, train

SETTINGS = TrainingSettings(method="eagle3", model="tiny", length=64, draft_vocab_size=0, batch_tokens=512)


def vary(**changes: object) -> TrainingSettings:
    return SETTINGS.with_(**changes)


def ring_model() -> LlamaForCausalLM:
    """Each token has one successor; only after token 0, which begins a text, all are alike. Heads that do not know the tokens
    between can learn it too."""
    model = chain_model(24, (14.0,))
    with torch.no_grad():
        first, rows = model.model.embed_tokens.weight[0], model.lm_head.weight
        rows -= torch.outer(rows @ first, first)
        rows[0] -= 5 * first
    return model


@pytest.fixture(scope="module")
def ring() -> LLM:
    return LLM(ring_model(), max_num_seqs=trainer.SLOTS)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(chain_model(), max_num_seqs=trainer.SLOTS)


def stopped_after(lines: int, with_word: str) -> Callable[[str], None]:
    """A reader of news that pulls the plug at the last of so many lines with a word."""
    left = [lines]

    def say(line: str) -> None:
        left[0] -= with_word in line
        if left[0] <= 0:
            raise KeyboardInterrupt

    return say


@pytest.mark.parametrize(
    ("method", "tokens"), [("eagle3", 6_000), ("medusa", 6_000), ("dflash", 9_000), ("dspark", 9_000)]
)
def test_a_known_structure_is_learnt_and_the_head_is_read_again(
    method: str, tokens: int, ring: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"POINTS": 4, "MEASURED_TEXTS": 8, "MUON_RATE": 0.03, "ADAM_RATE": 3e-3}.items():
        monkeypatch.setattr(trainer, name, value)
    said = list[str]()
    # there are few greedy texts, and none that was seen measures
    settings = vary(method=method, temperatures=(0.0, 2.0), length=32, batch_tokens=64)
    measured = train(settings, TrainingBudget(tokens=tokens), tmp_path / "head", ring, said.append)
    groups = {s.group: s for s in measured}
    assert set(groups) == {"all", "self", "temperature 2", "temperature 0"}
    shares = groups["temperature 0"].shares
    assert shares[0] > 0.9
    assert shares[-1] > 0.8  # the last token of a draft too
    depth = len(shares)
    assert depth == (4 if method in ("eagle3", "medusa") else 6)
    assert groups["all"].accepted_length == 1 + sum(groups["all"].shares)
    run = json.loads((tmp_path / "head" / "training" / "run.json").read_text())
    assert run["training"]["tokens"] >= tokens
    assert run["curve"][0]["held_out"][0]["S"][-1] < 0.3
    assert len(run["curve"]) == trainer.POINTS + 1
    assert f"S_{depth} | tokens a step" in (tmp_path / "head" / "MODEL_CARD.md").read_text()
    assert said[-1].startswith("the first drafted token is right at")
    [last] = [line for line in said if "held-out drafts survive" in line][-1:]
    assert re.search(r"tokens a step \((\d\.\d\d at temperature [02](, )?){2}\)", last), last
    # the drafter reads the folder, and its draft tokens are accepted
    config = {"model": str(tmp_path / "head"), "num_speculative_tokens": depth, "controller": "fixed"}
    fast = LLM(ring.loaded, speculative_config=config)
    [out] = fast.generate([{"prompt_token_ids": [0, 5]}], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    counted = out.metrics.speculative_decoding
    assert counted is not None
    # a text seldom begins with these two tokens; most drafts behind are right
    drafted = sum(counted.per_step_drafted[2:])
    assert drafted > 30
    assert sum(counted.per_step_accepted[2:]) > 0.6 * drafted
    more = settings.with_(start=str(tmp_path / "head"))
    again = train(more, TrainingBudget(tokens=1_600), tmp_path / "more", ring, lambda _: None)
    [greedy] = [s for s in again if s.group == "temperature 0"]
    assert greedy.shares[-1] > 0.5  # a new head has less than 0.3 after as many tokens


@pytest.mark.parametrize("method", ["eagle3", "medusa", "dspark"])
def test_a_run_that_was_killed_gives_the_same_head_bit_for_bit(
    method: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"POINTS": 4, "MEASURED_TEXTS": 8, "NEWS_SECONDS": 0.0}.items():
        monkeypatch.setattr(trainer, name, value)
    eagle = method == "eagle3"
    settings = vary(method=method, length=32, batch_tokens=128, keep_features=eagle, intermediate_size=12 * eagle)
    budget = TrainingBudget(tokens=2_400 if eagle else 1_600)
    train(settings, budget, tmp_path / "whole", llm, lambda _: None)
    monkeypatch.setattr(trainer, "SAVE_SECONDS", 0.0)
    kills = ((2, "answers:"), (1, "survive"), (5, "loss"), (3, "survive"))
    for lines, word in kills if eagle else ((1, "survive"), (4, "loss"), (2, "survive")):
        with pytest.raises(KeyboardInterrupt):
            train(settings, budget, tmp_path / "killed", llm, stopped_after(lines, word))
        part = tmp_path / "killed" / "training" / "answers.jsonl"
        part.write_bytes(part.read_bytes() + b'{"number": 7, "sou')  # as a kill leaves it
    train(settings, budget, tmp_path / "killed", llm, lambda _: None)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name
    curves = [json.loads((tmp_path / n / "training" / "run.json").read_text())["curve"] for n in ("whole", "killed")]
    for curve in curves:
        for entry in curve:
            del entry["seconds"], entry["loss"]
    assert curves[0] == curves[1]
    texts = [AnswerFile(tmp_path / n / "training" / "answers.jsonl").in_order() for n in ("whole", "killed")]
    assert texts[0] == texts[1]
    assert not (tmp_path / "killed" / "training" / "features").exists()
    if eagle:
        assert read_eagle(tmp_path / "killed", llm.loaded).config.intermediate_size == 12


def test_minutes_end_a_run_and_more_minutes_go_on(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    # each look at the clock takes an eighth of a second
    monkeypatch.setattr(trainer.time, "monotonic", lambda: next(ticks) / 8)
    runs, said = [], list[str]()
    for name, value in {"POINTS": 3, "MEASURED_TEXTS": 8, "NEWS_SECONDS": 0}.items():
        monkeypatch.setattr(trainer, name, value)
    for minutes in (0.25, 0.5):
        train(vary(length=32, batch_tokens=64), TrainingBudget(minutes=minutes), tmp_path / "head", llm, said.append)
        runs.append(json.loads((tmp_path / "head" / "training" / "run.json").read_text()))
        used = runs[-1]["answers"]["seconds"], runs[-1]["training"]["seconds"]
        assert used == pytest.approx((24 * minutes, 36 * minutes), abs=1.5)
    assert runs[1]["answers"]["tokens"] > runs[0]["answers"]["tokens"] > 0
    assert runs[1]["training"]["tokens"] > runs[0]["training"]["tokens"] > 0
    assert any(line.endswith(" 0 min left") for line in said)
    assert not any(line.endswith("-0 min left") for line in said)


def test_measurements_read_a_bounded_share_of_what_is_learnt(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is too short for POINTS of them has as many as their price allows."""
    read = list[int]()

    class Counted(HeldOut):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            read.append(self.tokens)

    monkeypatch.setattr(trainer, "HeldOut", Counted)
    train(vary(length=32, batch_tokens=64), TrainingBudget(tokens=3_000), tmp_path / "head", llm, lambda _: None)
    curve = json.loads((tmp_path / "head" / "training" / "run.json").read_text())["curve"]
    learnt = [later["tokens"] - before["tokens"] for before, later in pairwise(curve)]
    assert 2 < len(curve) < trainer.POINTS
    assert all(tokens >= trainer.LEARNT_BETWEEN * read[-1] for tokens in learnt[:-1])


def served(path: Path, detail: str = "tokens") -> str:
    """A trace of 60 texts with 24 prompts."""
    prompts = [{"prompt_token_ids": [n % 24, n % 3]} for n in range(60)]
    params = [SamplingParams(max_tokens=20, seed=n) for n in range(60)]
    with Recorder(path, detail) as trace:
        LLM(chain_model(), trace=trace, max_num_seqs=8).generate(prompts, params)
    return str(path)


def test_a_head_that_goes_on_with_a_trace_stays_half_what_it_was(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(vary(length=32), TrainingBudget(tokens=800), tmp_path / "old", llm, lambda _: None)
    settings = vary(batch_tokens=256, texts=served(tmp_path / "served.jsonl"), start=str(tmp_path / "old"))
    found = {"old": load_file(tmp_path / "old" / "model.safetensors")}
    for share in (0.0, 0.5):
        monkeypatch.setattr(trainer, "OLD_SHARE", share)
        train(settings, TrainingBudget(tokens=600), tmp_path / f"{share}", llm, lambda _: None)
        found[f"{share}"] = load_file(tmp_path / f"{share}" / "model.safetensors")
    for name, mean in found["0.5"].items():
        if mean.is_floating_point():
            old, trained = (found[n][name].float() for n in ("old", "0.0"))
            assert torch.allclose(mean.float(), (old + trained) / 2, rtol=2e-2, atol=1e-3), name
    assert not found["0.0"]["fc.weight"].equal(found["old"]["fc.weight"])


def test_the_texts_of_a_trace_are_what_was_asked_and_answered(llm: LLM, tmp_path: Path) -> None:
    """Newest first. A prompt is held out with all its answers, and a long one loses its beginning."""
    trace = read(served(tmp_path / "served.jsonl"))
    texts, cut = list(traced_texts(trace, 64, llm)), list(traced_texts(trace, 2, llm))
    asked = sorted((text.prompt, text.tokens) for text in trace.texts.values())
    assert sorted((text.prompt, text.tokens[text.start :]) for text in texts) == asked
    assert [text.prompt for text in texts] == [text.prompt for text in reversed(trace.texts.values())]
    assert [text.prompt for text in cut] == [text.prompt[-1:] for text in texts]
    held_out = {tuple(text.prompt) for text in texts if text.held_out}
    assert 0 < len(held_out) < 24
    assert held_out.isdisjoint(tuple(text.prompt) for text in texts if not text.held_out)


def test_a_trace_that_cannot_train_is_refused(llm: LLM, tmp_path: Path) -> None:
    counts = served(tmp_path / "counts.jsonl", "counts")
    with pytest.raises(ValueError, match="this trace has counts only"):
        train(vary(texts=counts), TrainingBudget(tokens=8), tmp_path / "a", llm, lambda _: None)
    texts = served(tmp_path / "tokens.jsonl")
    other = LLM("builtin:code", max_num_seqs=trainer.SLOTS)
    with pytest.raises(ValueError, match=r"tokens\.jsonl is a trace of .* give a trace of the model"):
        train(vary(texts=texts, model="builtin:code"), TrainingBudget(tokens=8), tmp_path / "b", other, lambda _: None)
    said = list[str]()
    with open(texts, "a") as file:
        file.write('{"line": "st')
    train(vary(texts=texts), TrainingBudget(tokens=8), tmp_path / "c", llm, said.append)
    assert said[0].endswith("cut off in the middle; the texts before it train the head")


def test_prompts_of_words_need_a_tokenizer(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        train(vary(prompts=("code",)), TrainingBudget(tokens=2_000), tmp_path / "head", llm)


def test_bad_input_is_explained(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="of the kind 'dspark', and this run trains 'eagle3'; write: outrider train dspark"
    ):
        train(vary(start=str(GOLDEN / "dspark")), TrainingBudget(tokens=1000), tmp_path / "c", llm, lambda _: None)
    with pytest.raises(ValueError, match="one of the two"):
        TrainingBudget()
    with pytest.raises(ValueError, match="one of the two"):
        TrainingBudget(minutes=1, tokens=1)
    with pytest.raises(ValueError, match="positive"):
        TrainingBudget(tokens=0)
    with pytest.raises(FileNotFoundError, match=r"there is no file nowhere\.jsonl"):
        train(vary(prompts=("nowhere.jsonl",)), TrainingBudget(tokens=1000), tmp_path / "a", llm)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("hello")
    with pytest.raises(FileExistsError, match="no training run"):
        train(SETTINGS, TrainingBudget(tokens=1000), tmp_path / "other", llm)
    RunFolder(tmp_path / "a", SETTINGS)  # nothing was kept, so the prompts may be mended
    (tmp_path / "b" / "training").mkdir(parents=True)
    (tmp_path / "b" / "training" / "settings.json").write_text(
        (tmp_path / "a" / "training" / "settings.json").read_text()
    )
    (tmp_path / "b" / "training" / "answers.jsonl").write_text('{"words": 3}\n')
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 1 is no answer"):
        train(vary(prompts=("nowhere.jsonl",)), TrainingBudget(tokens=1000), tmp_path / "b", llm)
    with pytest.raises(ValueError, match=r"prompts=\['nowhere\.jsonl'\], and this one has \['self'\]"):
        train(SETTINGS, TrainingBudget(tokens=1000), tmp_path / "b", llm)


def test_two_processes_cannot_train_in_one_folder(llm: LLM, tmp_path: Path) -> None:
    """The second one would append the same answers again, and the two checkpoints would replace each other."""
    with RunFolder(tmp_path / "head", SETTINGS).alone(), pytest.raises(ValueError, match=r"another process trains in"):
        train(SETTINGS, TrainingBudget(None, 2000), tmp_path / "head", llm)


@pytest.mark.parametrize("other", [{"method": "medusa"}, {"start": "head"}])
def test_neurons_are_chosen_for_a_new_eagle_head_alone(other: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"--intermediate-size 12 is for a new eagle3 head"):
        TrainingSettings(**{"method": "eagle3", "model": "tiny", "intermediate_size": 12, **other})


def test_a_run_from_before_a_setting_goes_on(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "head", SETTINGS).alone():
        (tmp_path / "head" / "training" / "checkpoint.pt").write_bytes(b"kept")
    file = tmp_path / "head" / "training" / "settings.json"
    stored = json.loads(file.read_text())
    del stored["keep_features"]
    file.write_text(json.dumps(stored))
    assert RunFolder(tmp_path / "head", SETTINGS).answers.tokens == 0


def test_a_target_that_is_no_product_of_state_and_rows_is_refused(tmp_path: Path) -> None:
    model = chain_model()
    model.lm_head.bias = torch.nn.Parameter(torch.randn(VOCAB) * 2)
    biased = LLM(model, max_num_seqs=trainer.SLOTS)
    with pytest.raises(ValueError, match="bias"):
        train(SETTINGS, TrainingBudget(tokens=1000), tmp_path / "head", biased, lambda _: None)


@pytest.mark.parametrize("kept", [False, True])
def test_texts_that_are_longer_than_the_model_are_refused(llm: LLM, tmp_path: Path, kept: bool) -> None:
    """Texts of all its tokens are written. With their features they would lack those of the last place."""
    longest = llm.decoder.max_length - kept
    for length in (longest + 1, longest):
        given = vary(length=length, keep_features=kept)
        if length > longest:
            with pytest.raises(ValueError, match=f"use --length {longest} or less"):
                train(given, TrainingBudget(tokens=8), tmp_path / "long", llm, lambda _: None)
        else:
            train(given, TrainingBudget(tokens=8), tmp_path / "whole", llm, lambda _: None)


def test_the_command(tmp_path: Path) -> None:
    def run(method: str, *more: str, ends: int) -> str:
        given = ["train", method, "-m", "builtin:code", "--tokens", "600", "--length", "32", "-o", str(out), *more]
        result = CliRunner().invoke(app, given)
        assert result.exit_code == ends, result.output
        return result.output

    out = tmp_path / "head"
    said = run("eagle3", "--draft-vocab-size", "1024", ends=0)
    assert "held-out drafts survive" in said
    assert f"the head is in {out}" in said
    settings = json.loads((out / "config.json").read_text())
    assert settings["draft_vocab_size"] == 1024
    assert settings["target_sha256"] == target_digest(load("builtin:code"))
    assert "outrider train eagle3" in run("medusa3", ends=2)
    wrong = run("medusa", "--intermediate-size", "12", ends=2)
    assert " ".join(wrong.split()).endswith("and this run trains medusa; leave it out")
    assert tuple(METHODS) == METHOD_NAMES
