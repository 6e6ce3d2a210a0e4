"""Our engine, callables, transformers and recorded texts as subjects, and the command line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.models import checkpoint
from outrider.models.load import Loaded
from outrider.testing import ToyModel
from outrider_certify.certificate import Certificate, CertificatePart, Conclusion
from outrider_certify.cli import CertifyOptions
from outrider_certify.contract import Contract
from outrider_certify.seeded import Seeded
from outrider_certify.statistical import TEMPERATURES, Statistical
from outrider_certify.subject import SamplingParams, TextRequest
from outrider_certify.trials import CertificateKind, TrialJournal, run_kinds
from outrider_lab.certify.engine import EngineSubject, subject_of
from outrider_lab.certify.exact import VerifierFunction

TOY_PROMPTS = ((1, 2), (3, 4), (5, 1))


def certified(kind: CertificateKind, most: int | None = None) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
    return part


def toy(verifier: str, **options) -> EngineSubject:
    """Our engine on a table, with a draft model that is mostly right."""
    target = Loaded(ToyModel(seed=1), "toy", None, (10,), "float64", "toy")
    draft = Loaded(ToyModel(seed=1, error=1.0), "toy-draft", None, (10,), "float64", "toy-draft")
    from outrider.drafters import ModelDrafter

    config = {"method": "ngram", "num_speculative_tokens": 3, "verifier": verifier, **options}
    subject = EngineSubject(target, config, TOY_PROMPTS, rows=4, max_length=96)
    if not options:
        subject.drafters = {"own": ModelDrafter(draft.model, 8, 96)}
    return subject


@pytest.mark.parametrize("verifier", ["match", "rejection", "block"])
def test_our_engine_passes(verifier: str) -> None:
    subject = toy(verifier)
    assert subject.exact_tokens is (verifier == "match")
    seeded = certified(Seeded(subject, length=8, rounds=1), most=5)
    assert seeded.conclusion is Conclusion.EXACT_TOKENS, seeded.sentence
    statistical = certified(Statistical(subject, length=24), most=3)
    assert statistical.conclusion is Conclusion.CANNOT_TELL, statistical.sentence
    assert statistical.tested["the drafter's probabilities"] == "known"


def test_our_engine_keeps_the_contract() -> None:
    part = certified(Contract(toy("match"), length=12))
    assert part.conclusion is Conclusion.HOLDS, part


def test_a_drafter_of_ours_that_lies_about_q_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Statistical, "strata", lambda self: TEMPERATURES)
    subject = toy("rejection")
    [own] = subject.drafters.values()
    honest = own.propose

    def lies(context):
        draft = honest(context)
        if draft.probs is not None:
            flat = draft.probs.sqrt()
            object.__setattr__(draft, "probs", flat / flat.sum(-1, keepdim=True))
        return draft

    own.propose = lies  # type: ignore[method-assign]
    part = certified(Statistical(subject, length=40), most=60)
    assert part.conclusion is Conclusion.DIFFERS, part.sentence


def test_a_draft_model_that_read_only_an_end_of_a_text_has_no_distributions_over_it() -> None:
    subject = toy("rejection")
    request = TextRequest(TOY_PROMPTS[0], SamplingParams(temperature=1, max_tokens=8, ignore_eos=True))
    [text], [drafter] = subject.plain([request]), subject.drafters.values()
    for length, known in ((len(text.prompt) + 8, True), (len(text.prompt) + 7, False)):
        drafter.levels.cache.max_length = length
        assert (subject.draft_distributions(request, text) is not None) == known


def test_a_verifier_is_found_by_name() -> None:
    for name, trees in (("reference_block", False), ("reference_rejection", True)):
        subject = subject_of(CertifyOptions(subject=f"outrider.verify:{name}"), None, {})
        assert isinstance(subject, VerifierFunction)
        assert subject.trees is trees
    with pytest.raises(ValueError, match="a verifier is f"):
        subject_of(CertifyOptions(subject="outrider.verify.reference:residual"), None, {})


def test_an_engine_that_fails_under_speculation_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_):
        raise MemoryError("no memory for the draft")

    subject = toy("match")
    monkeypatch.setattr(next(iter(subject.drafters.values())), "propose", crash)
    part = certified(Seeded(subject, length=8, rounds=1), most=1)
    assert part.conclusion is Conclusion.DIFFERS
    assert part.findings[0].title == "the engine fails under speculation"
    assert "no memory for the draft" in part.findings[0].evidence


# -- the command line ----------------------------------------------------------------------------------------------------------


def outrider(*words: str, code: int) -> str:
    done = CliRunner().invoke(app, ["certify", *words])
    assert done.exit_code == code, done.output
    return done.output


def test_a_verifier_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_for_certify.py").write_text(
        "def verify(tokens, parents, target, drafter, choose):\n"
        "    last = len(tokens) - 1\n"
        "    return list(range(last + 1)), choose.token(target(last), depth=last + 1)\n"
    )
    said = outrider("wrong_for_certify:verify", "-o", "a.html", code=1)
    assert "Differs. The total variation is up to" in said
    found = Certificate.load(tmp_path / "a.json")
    assert found.complete
    assert found.conclusion is Conclusion.DIFFERS
    assert "all branches:" in (tmp_path / "a.html").read_text()
    assert not (tmp_path / "a.journal").exists()
    assert "nothing changed" in outrider("--compare", "a.json", "a.json", code=0)
    assert json.loads((tmp_path / "a.json").read_text())["machine"]
    sys.modules.pop("wrong_for_certify", None)


def test_wrong_options_are_explained() -> None:
    assert "name what to certify" in outrider(code=2)
    assert "such as 90s" in outrider("x:y", "--budget", "soon", code=2)
    assert "for a server" in outrider("builtin:code", "--plain-url", "http://a", code=2)
    assert "certify ./model" not in outrider("http://127.0.0.1:9", "--budget", "1s", code=2)


GENERATE = ("--generate", '{"prompt_lookup_num_tokens": 3}')


@pytest.fixture(scope="module")
def unloadable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders and files that are no model of ours: `unknown`, `incomplete`, `empty` and `cut.gguf`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("unloadable")
    small = LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(small).save_pretrained(folder / "unknown")
    LlamaForCausalLM(small).save_pretrained(folder / "incomplete")
    small.num_hidden_layers = 2
    small.save_pretrained(folder / "incomplete")
    (folder / "unknown" / "config.json").write_text('{"model_type": "flyingfish"}')
    (folder / "empty").mkdir()
    (folder / "cut.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes([9, 0, 0, 0, 0, 0, 0, 0] * 3))
    return folder


@pytest.mark.parametrize("more", [(), GENERATE], ids=["outrider", "transformers"])
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere", "there is no folder .*; give a model folder"),
        ("missing.gguf", "there is no file .*; give the path of a GGUF file"),
        ("unknown", "model_type 'flyingfish'.* does not know.* A newer transformers may"),
        ("incomplete", "are incomplete: .*model.layers.1.* Download it again"),
        ("empty", "has no config.json and no .gguf file; give the folder"),
        ("cut.gguf", "cut.gguf .*download it again"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_explained(
    name: str, why: str, more: tuple[str, ...], unloadable: Path, tmp_path: Path
) -> None:
    said = " ".join(outrider(str(unloadable / name), *more, "-o", str(tmp_path / "a.html"), code=2).split())
    assert re.search(why, said), said
    assert "Error:" not in said
    assert not [*tmp_path.iterdir()]


def test_a_draft_model_and_a_reference_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)  # the certificate's journal is written there
    why = "there is no folder /nowhere; give a model folder"
    draft = ("--speculative-config", '{"method": "draft_model", "model": "/nowhere"}')
    assert why in outrider("builtin:code", *draft, code=2)
    assert why in outrider("builtin:code", "--generate", '{"assistant_model": "/nowhere"}', code=2)
    assert why in outrider("http://127.0.0.1:9", "--reference", "/nowhere", code=2)


def test_a_model_that_does_not_fit_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)  # nothing is to be written
    monkeypatch.setattr(checkpoint, "free_memory", lambda where: 30_000_000)
    said = outrider("builtin:code", "--budget", "1s", "--dtype", "float32", code=2)
    assert "GiB are free on cpu; bfloat16 weights would fit" in said
    said = outrider("builtin:code", "--budget", "1s", *GENERATE, code=2)
    assert "GiB as float32" in said
    assert "bfloat16 weights would fit" in said
    monkeypatch.setattr(checkpoint, "free_memory", lambda where: 20_000_000)
    assert "int8 weights would fit" in outrider("builtin:code", "--budget", "1s", code=2)
    assert "no precision of this model fits here" in outrider(
        "builtin:code", "--budget", "1s", *GENERATE, code=2
    )  # it has no int8
    assert not [*tmp_path.iterdir()]


def test_numbers_of_rows_and_plain_decoding_agree() -> None:
    """What the certificate takes for the target's distribution is what the engine draws from."""
    subject = toy("match")
    request = TextRequest(TOY_PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    [text] = subject.plain([request])
    assert [int(np.argmax(row.probs)) for row in subject.distributions(request, text)] == text.tokens
