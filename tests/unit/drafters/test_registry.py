"""From a configuration to a drafter: every method, several at once, one of a user's own, and what cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from helpers import configured

from outrider import LLM, SamplingParams
from outrider.core.docstrings import arguments
from outrider.core.types import Budget
from outrider.drafters import make_drafters
from outrider.drafters.config import DrafterSetup, SpeculativeConfig, request_drafters
from outrider.drafters.method import METHODS, DraftMethod, level_cost, lookup_names
from outrider.drafters.model.self_speculation import TargetCache
from outrider.kernels import cpu as native
from outrider.models.load import Loaded, load
from outrider.testing.stubs import Wrong
from outrider_lab.tune.candidates import TuneInputs, candidates

PROMPT = "def read(path):\n    with open(path) as file:\n        return"
ENV = {**os.environ, "COLUMNS": "400", "TERM": "dumb"}
PARAMS = [SamplingParams(temperature=t, max_tokens=24, seed=3) for t in (0.0, 1.0)]


@pytest.fixture(scope="module")
def code() -> Loaded:
    return load("builtin:code", device="cpu")


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return texts(None)


def texts(config: dict[str, Any] | None) -> list[str]:
    llm = LLM("builtin:code", speculative_config=config, device="cpu", max_model_len=512)
    return [o.outputs[0].text for o in llm.generate([PROMPT] * 2, PARAMS)]


@pytest.mark.parametrize(
    "config",
    [
        {"method": "auto"},
        {"method": "auto", "tree_width": 3, "tree_nodes": 8},
        {"method": "layer_skip", "layers": [0, 1]},
    ],
    ids=str,
)
def test_what_the_recorded_texts_lack_writes_the_plain_text(config: dict[str, Any], plain: list[str]) -> None:
    assert texts(config) == plain


def make(target: Loaded, **config: Any) -> Any:
    return configured(config, target, 1, 256)


def test_auto_takes_what_there_is(code: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters = make_drafters(DrafterSetup(SpeculativeConfig.of({"method": "auto"}), code, 1, 256, "cpu"))
    assert list(drafters) == ["prediction", "suffix", "draft_model"]
    assert lookup_names(drafters) == ["prediction", "suffix"]
    assert 0.05 < level_cost("draft_model", drafters["draft_model"], code.model) < 0.4
    assert level_cost("suffix", drafters["suffix"], code.model) == 0
    unknown = Loaded(code.model, "some-model", code.tokenizer, code.end_ids, code.weights, code.source)
    ask = SpeculativeConfig.of({"method": "auto"})
    made = make_drafters(DrafterSetup(ask, unknown, 1, 256, "cpu"))
    assert list(made) == ["prediction", "suffix", "quantized_self"]
    coarse = Loaded(code.model, "some-model", code.tokenizer, code.end_ids, "int4", code.source)
    assert list(make_drafters(DrafterSetup(ask, coarse, 1, 256, "cpu"))) == ["prediction", "suffix"]
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why", lambda: "a test")
    assert list(make_drafters(DrafterSetup(ask, unknown, 1, 256, "cpu"))) == ["prediction", "suffix"]
    with pytest.raises(ValueError, match="needs the native kernels: a test"):
        make(unknown, method="quantized_self")


def test_no_node_is_no_draft(code: Loaded) -> None:
    for key in ("num_speculative_tokens", "tree_nodes"):
        config = SpeculativeConfig.of({"method": "suffix", key: 0})
        assert make_drafters(DrafterSetup(config, code, 1, 256, "cpu")) == {}
    assert SpeculativeConfig.of({"tree_width": 3, "tree_nodes": 7}).budget == Budget(5, 3, 7)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "sufix"}, "did you mean 'suffix'"),
        ({"method": ["suffix", "auto"]}, "a list of methods names drafters"),
        ({"method": []}, "a list of methods names drafters"),
        ({"method": ["suffix", "draft_model"]}, "needs a model"),
        ({"method": "suffix", "tree_nodes": 10_000}, r"tree_nodes.*4095"),
        ({"method": "ngram", "corpus": "x"}, 'corpus is for the method "suffix", got "ngram"'),
        ({"prediction": "x"}, 'prediction is for the method "prediction", got "none"'),
        ({"method": "suffix", "layers": [0]}, 'layers is for the method "layer_skip", got "suffix"'),
        ({"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2}, "prompt_lookup_min=5"),
        ({"method": "ngram", "verifier": "matches"}, "unknown verifier 'matches'.*did you mean 'match'"),
        ({"verifier": "typical"}, "unknown verifier 'typical'; known: match, rejection, block, traversal"),
        ({"model": "a", "draft_model": "b"}, "has a key twice, under two names: model, draft_model"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"method": "suffix", "tree_width": 2, "verifier": "block"}, '"block" takes chains only.*"traversal"'),
        ({"method": "suffix", "draft_vocab": 5}, 'draft_vocab is for the method "draft_model"'),
        ({"model": "m", "draft_vocab": -1}, "draft_vocab"),
        ({"model": "m", "draft_vocab": 0, "draft_vocab_corpus": "x"}, "keeps all tokens"),
        ({"model": "m", "quantization": "int5"}, "'auto', 'none', 'int8' or 'int4'"),
    ],
)
def test_a_configuration_that_cannot_be_says_what_would_work(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig.of(config)


def test_a_configuration_takes_vllms_names() -> None:
    assert SpeculativeConfig.of({"model": "builtin:code-draft"}).method == "draft_model"
    assert SpeculativeConfig.of({"method": "ngram", "rejection_sample_method": "standard"}).verifier == "rejection"
    assert SpeculativeConfig.of({"method": "ngram", "rejection_sample_method": "block"}).verifier == "block"
    assert (
        SpeculativeConfig.of({"method": "quantized_self", "quantization": None}).quantization == "auto"
    )  # as it once was


class Stubborn(Wrong):
    """A drafter as another package would offer it."""

    def __init__(self, setting: Any, token: int = 1) -> None:
        assert setting.target.model.vocab_size > token
        super().__init__(token)


def not_a_drafter(setting: Any) -> object:
    return object()


ROW = DraftMethod("rowed", "a row from another package", lambda setup: Wrong(2), default_depth=7, cost="lookup")


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = [
        EntryPoint("stubborn", f"{__name__}:Stubborn", "outrider.drafters"),
        EntryPoint("nothing", f"{__name__}:not_a_drafter", "outrider.drafters"),
        EntryPoint("gone", "no_such_package:Drafter", "outrider.drafters"),
        EntryPoint("rowed", f"{__name__}:ROW", "outrider.drafters"),
    ]
    monkeypatch.setattr("outrider.drafters.method.entry_points", lambda group: [e for e in found if e.group == group])
    return


@pytest.mark.usefixtures("plugins")
def test_a_drafter_of_ones_own(code: Loaded, plain: list[str]) -> None:
    drafter = make(code, method="stubborn", options={"token": 7})
    assert isinstance(drafter, Stubborn)
    assert drafter.token == 7
    assert texts({"method": "stubborn"}) == plain
    assert texts({"method": ["stubborn", "suffix"], "options": {"token": 7}}) == plain
    with pytest.raises(ValueError, match=r"'stubborn'.*unexpected keyword argument 'colour'"):
        make(code, method="stubborn", options={"colour": "red"})
    with pytest.raises(ValueError, match="returned a object, which is not a drafter"):
        make(code, method="nothing")
    with pytest.raises(ValueError, match=r"'gone'.*No module named"):
        make(code, method="gone")
    both = SpeculativeConfig.of({"method": ["rowed", "suffix"]})
    assert both.budget.depth == 16
    assert SpeculativeConfig.of({"method": "rowed"}).budget.depth == 7
    drafters = make_drafters(DrafterSetup(both, code, 1, 256, "cpu"))
    assert isinstance(drafters["rowed"], Wrong)
    assert lookup_names(drafters) == ["rowed", "suffix"]


OWN = """
from outrider.drafters.method import DraftMethod
from outrider.testing import Wrong

class Mine(Wrong):
    def __init__(self):
        super().__init__(3)

def make(setup, token=4):
    assert setup.target.model.vocab_size > token
    return Wrong(token)

row = DraftMethod("row", "a row", lambda setup: Wrong(5), default_depth=9)
"""


def test_a_drafter_in_a_file(code: Loaded, plain: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    for name, token, depth in (("Mine", 3, 5), ("make", 4, 5), ("row", 5, 9)):
        config = {"method": f"{file}:{name}"}
        drafter = make(code, **config)
        assert isinstance(drafter, Wrong)
        assert (drafter.token, SpeculativeConfig.of(config).budget.depth) == (token, depth)
        assert texts(config) == plain
        assert candidates(TuneInputs(code.weights), [config["method"]]) == [(config["method"], config)]
    assert make(code, method=f"{file}:make", options={"token": 7}).token == 7
    both = SpeculativeConfig.of({"method": [f"{file}:make", "suffix"]})
    assert list(make_drafters(DrafterSetup(both, code, 1, 256, "cpu"))) == both.methods
    for wrong, words in ((f"{file}:other", "no attribute 'other'"), (f"{tmp_path}/gone.py:make", "No such file")):
        with pytest.raises(ValueError, match=words):
            make(code, method=wrong)


def test_a_quantized_copy_of_something_coarse_is_refused(code: Loaded) -> None:
    assert isinstance(make(code, method="quantized_self").levels, TargetCache)
    coarse = Loaded(code.model, "x", code.tokenizer, code.end_ids, "int8", code.source)
    with pytest.raises(ValueError, match="gain nothing"):
        make(coarse, method="quantized_self")


def test_a_method_is_added_in_one_place(code: Loaded, plain: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One row: then help, configuration, server, auto and tune know the method."""
    row = DraftMethod(
        "wrong",
        "always a wrong token",
        lambda setup: Wrong(),
        cost="lookup",
        default_depth=3,
        keys=("layers",),
        per_request=True,
        auto=lambda setup: True,
    )
    monkeypatch.setitem(METHODS, "wrong", row)
    assert texts({"method": "wrong"}) == plain
    assert SpeculativeConfig.of({"method": "wrong"}).budget == Budget(3)
    ask = SpeculativeConfig.of({"method": "auto"})
    made = make_drafters(DrafterSetup(ask, code, 1, 256, "cpu"))
    assert list(made) == ["prediction", "suffix", "wrong", "draft_model"]
    setup = DrafterSetup(SpeculativeConfig(), code, 1, 64, "cpu")
    assert list(request_drafters(setup)) == ["prediction", "suffix", "ngram", "wrong"]
    assert ("wrong", {"method": "wrong"}) in candidates(TuneInputs(code.weights), None)
    monkeypatch.delitem(METHODS, "layer_skip")
    with pytest.raises(ValueError, match='layers is for the method "wrong", got "suffix"'):
        SpeculativeConfig.of({"method": "suffix", "layers": [0]})


def test_each_key_of_a_configuration_is_explained() -> None:
    assert arguments(SpeculativeConfig).keys() == SpeculativeConfig.model_fields.keys()


def test_the_list_of_methods_has_each_row_and_needs_no_numpy() -> None:
    code = (
        "import dataclasses, sys\n"
        "from outrider.drafters.method import METHODS\n"
        "METHODS['mine'] = dataclasses.replace(METHODS['ngram'], name='mine', help='a method of this test')\n"
        "from outrider.cli.main import app\n"
        "app(['methods'], standalone_mode=False)\n"
        "assert not {'numpy', 'torch'} & {*sys.modules}\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**ENV, "COLUMNS": "300"}
    ).stdout
    text = " ".join(out.split())
    assert "mine nothing a method of this test" in text
    assert all(name in text and row.help in text for name, row in METHODS.items()), text
