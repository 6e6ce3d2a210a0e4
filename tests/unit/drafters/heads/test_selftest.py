"""The self-test: a head that drafts well passes in silence, and every known misreading is named.

The target here writes what a golden head guesses, so the head is right when it is read as it was made.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from heads import GOLDEN, copied, drafter_of, features, torch_target
from helpers import configured
from safetensors.numpy import save_file

from outrider.core.types import Budget
from outrider.drafters.heads.eagle import survival
from outrider.drafters.heads.files import target_digest
from outrider.drafters.heads.medusa import read_medusa
from outrider.drafters.heads.selftest import DEPTH, examine, parallel_survival
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.base import LanguageModel, Output, Want
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes
from outrider.testing.contract import GREEDY, context
from outrider_lab.heads.writers import name_target

TARGET = torch_target()
TEXT = [(7 * i * i + 3 * i + 11) % 127 for i in range(80)]
HEAD = GOLDEN / "eagle31"
KEY = "eagle_aux_hidden_state_layer_ids"


def first_token(head: TreeDrafter[Any], text: list[int]) -> int:
    """What a head drafts after a text whose features it has."""
    return head.propose(context([0], [text], [Budget(1)], GREEDY)).host[0][1][0]


class Follower(LanguageModel):
    """A target that writes what a head drafts: its logits are large where the head's first draft token is.

    shown: the taps by which the head reads it.
    """

    def __init__(self, head: TreeDrafter[Any], shown: tuple[int, ...]) -> None:
        self.inner, self.head, self.shown = TARGET.model, head, shown
        self.vocab_size, self.max_length, self.device = 128, 256, TARGET.model.device
        self.num_layers, self.batch_invariant = TARGET.model.num_layers, True

    def new_cache(self, num_slots: int, max_length: int):
        return self.inner.new_cache(num_slots, max_length)

    def embedding_rows(self, tokens: np.ndarray) -> np.ndarray:
        return self.inner.embedding_rows(tokens)

    def output_head(self, hidden: np.ndarray) -> np.ndarray:
        return self.inner.output_head(hidden)

    def head_rows(self, tokens: np.ndarray) -> np.ndarray:
        return self.inner.head_rows(tokens)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        out = self.inner.forward(nodes, taps=(*taps, *self.shown), want="all")
        assert out.features is not None
        parts, text = np.split(out.features[0], len(taps) + len(self.shown), -1), nodes.tokens[0].tolist()
        own, logits = np.concatenate(parts[len(taps) :], -1), np.zeros_like(out.logits)
        for t in range(len(text) - 1):
            self.head.start(0, text[: t + 2], t, own[t : t + 1])
            logits[0, t + 1, first_token(self.head, text[: t + 2])] = 9.0
        self.head.release(0)
        return Output(logits, np.concatenate(parts[: len(taps)], -1)[None])


def followed(folder: Path, shown: tuple[int, ...] | None = None, **settings: Any) -> Loaded:
    """A target for a head that is read with other settings, or whose features are of other layers."""
    made = drafter_of(folder, TARGET, 1, **settings)
    model, ids = cast("Any", Follower(made, shown or made.taps)), TEXT if "eagle3" in folder.name else TEXT[:44]
    return replace(TARGET, model=model, tokenizer=lambda text, **_: {"input_ids": ids})


def test_a_good_head_passes(caplog: pytest.LogCaptureFixture) -> None:
    report = examine(drafter_of(HEAD, TARGET), [], survival, followed(HEAD), 256, "HEAD")
    assert report is not None
    assert report.hits[0] == 1.0
    assert report.better is None
    assert not caplog.records
    assert str(report).startswith("1.12 of 3 draft tokens are right")


def test_survival_is_what_drafts_give() -> None:
    """Against the drafter itself, at every position, fed with what it drafts there."""
    made = drafter_of(HEAD, TARGET, 1)
    states = features(TARGET, TEXT, made.taps)
    hits, right = 0, [0] * len(TEXT)
    for t in range(len(TEXT) - 1 - DEPTH):  # what is right is set so that a third of all first tokens is
        made.start(0, TEXT[: t + 2], 0, states[: t + 1])
        first = first_token(made, TEXT[: t + 2])
        right[t + 1] = first if t % 3 == 0 else (first + 1) % 128
        hits += t % 3 == 0
    found = survival(made, TEXT, states, right)
    assert found[0] == pytest.approx(hits / (len(TEXT) - 1 - DEPTH))
    assert found[0] >= found[1] >= found[2]


def test_later_tokens_are_fed_back() -> None:
    """The second token of a draft follows the text's token and the head's own state, as in a draft."""
    made = drafter_of(HEAD, TARGET, 1)
    head, states = made.levels.model, features(TARGET, TEXT, made.taps)
    t, cache = 20, head.new_cache(1, 256)
    head.forward(Nodes(np.array([TEXT[1 : t + 1]]), cache, [0]), states[None, :t], want="none")
    cache.commit([0], [range(t)])
    logits, g = head.forward(Nodes(np.array([TEXT[t + 1 : t + 2]]), cache, [0]), states[None, t : t + 1])
    first = int(logits[0, 0].argmax())
    parents = np.array([[-1, 0]])
    again = head.forward(Nodes(np.array([TEXT[t + 2 : t + 3]]), cache, [0], parents), g=g)
    second = int(again.logits[0, 0].argmax())
    assert head.subset is not None
    ids = head.subset.ids.tolist()
    for wrong in (False, True):
        right = [0] * len(TEXT)
        right[t + 1], right[t + 2] = ids[first], ids[second] if not wrong else (ids[second] + 1) % 128
        one = survival(made, TEXT, states, right)[1] * (len(TEXT) - 1 - DEPTH)
        zero = [0] * len(TEXT)
        zero[t + 1] = ids[first]
        base = survival(made, TEXT, states, zero)[1] * (len(TEXT) - 1 - DEPTH)
        assert round(one - base) == (0 if wrong else 1)


@pytest.mark.parametrize(
    ("digest", "words"),
    [
        (None, "no known misreading mends that; it was trained for another model, or for other text"),
        ("that of the target", "it was trained for this model, but is right rarely on this text. Train it longer"),
        ("another", "it was trained for another model, or another file of this one: target_sha256 differs"),
    ],
)
def test_a_head_that_names_its_model_is_compared_with_it_first(
    digest: str | None, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied("eagle31", tmp_path / "head")
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": np.ones(2)}, tmp_path / "model.safetensors")
    loaded = replace(TARGET, tokenizer=lambda text, **_: {"input_ids": TEXT}, source=str(tmp_path))
    if digest is not None:
        found = target_digest(loaded)
        assert found is not None
        name_target(folder, digest.replace("that of the target", found))
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        configured({"model": str(folder)}, loaded, 1, 128)
    assert words in caplog.text


def medusa_folder(into: Path) -> Path:
    """Two random heads; the second is not like the first."""
    draw = np.random.default_rng(2)
    tensors = {f"blocks.{i}.layers.0.weight": 0.3 * draw.normal(size=(32, 32)) for i in range(2)}
    tensors |= {f"lm_heads.{i}.weight": draw.normal(size=(128, 32)) for i in range(2)}
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, into / "model.safetensors")
    settings = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "vocab_size": 128}
    (into / "config.json").write_text(json.dumps(settings))
    return into


def tried(folder: Path, loaded: Loaded) -> None:
    configured({"model": str(folder), "quantization": "none"}, loaded, 2, 256)


# head -> (other settings of its folder, taps by which it was trained, settings with which it was trained, what mends it)
MISREADINGS: dict[str, tuple[str, dict[str, Any], tuple[int, ...] | None, dict[str, Any], str]] = {
    "eagle, residual": ("eagle3_before_residual", {}, None, {"norm_before_residual": False}, "norm_before_residual false"),
    "eagle, rope": ("eagle31", {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, None, {}, "rope_theta 500000"),
    "eagle, layers above": ("eagle31", {}, (0, 2, 6), {}, "the layers before [1, 3, 7] in place of [2, 4, 8]"),
    "eagle, layers below": ("eagle31", {KEY: [1, 3, 7]}, None, {}, "the layers before [2, 4, 8] in place of [1, 3, 7]"),
    "eagle, norm": ("eagle31", {}, (1, 3, -1), {}, "the last layer after the final norm"),
    "dflash, slot": ("dflash", {}, None, {"from_anchor": True}, "sample_from_anchor true"),
    "dflash, rope": ("dflash", {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, None, {}, "rope_theta 500000"),
    "dflash, norm": ("dflash", {}, (1, 3, -1), {}, "the last layer after the final norm"),
    "dspark, slot": ("dspark", {}, None, {"from_anchor": False}, "sample_from_anchor false"),
    "dspark, layers": ("dspark", {}, (0, 2, 6), {}, "the layers before [1, 3, 7] in place of [2, 4, 8]"),
    "peagle, residual": ("peagle", {}, None, {"norm_before_residual": True}, "norm_before_residual true"),
    "peagle, layers": ("peagle_qwen3", {}, (0, 2, 6), {}, "the layers before [1, 3, 7] in place of [2, 4, 8]"),
    "medusa, norm": ("medusa", {}, (7,), {}, "the last layer before the final norm"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISREADINGS)
def test_a_misreading_is_named(
    what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, changed, shown, settings, mends = MISREADINGS[what]
    right = medusa_folder(tmp_path) if name == "medusa" else GOLDEN / name
    folder = copied(right, tmp_path / "read", changed) if changed else right
    # random layers resemble their neighbours
    monkeypatch.setattr("outrider.drafters.heads.selftest.ENOUGH", 0.99)
    monkeypatch.setattr("outrider.drafters.heads.selftest.CLEAR", 0.02)
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        tried(folder, followed(right, shown, **settings))
    assert f"With {mends} it is" in caplog.text
    assert "correct that in its config.json" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        tried(folder, followed(folder))
    assert not caplog.records, "a head that is right passes in silence"


def test_a_medusa_head_one_position_off_is_named(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """The first head is for the token that the target gives itself, as some trainers count."""
    folder = medusa_folder(tmp_path)
    read = read_medusa(folder, TARGET)
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        tried(folder, followed(folder, blocks=read.blocks[1:], outputs=read.outputs[1:]))
    assert "With the first head for the token that is known already it is" in caplog.text


def test_parallel_hits_are_what_drafts_give() -> None:
    """Against drafts along the text, by hand: the text's own tokens come before each guess."""
    made = drafter_of(GOLDEN / "dspark", TARGET, 1)
    states = features(TARGET, TEXT, made.taps)
    right = [0] * len(TEXT)
    t = 3 * ((len(TEXT) - 1 - DEPTH) // 24)  # one of the positions that are tried
    made.start(0, TEXT[: t + 2], 0, states[: t + 1])
    right[t + 1 : t + 4] = made.levels.best(0, TEXT[: t + 2], TEXT[t + 2 : t + 4])
    assert right[t + 1] == first_token(made, TEXT[: t + 2])
    found = parallel_survival(made, TEXT, states, right)
    assert all(h > 0 for h in found)
    right[t + 2] += 1
    assert parallel_survival(made, TEXT, states, right)[1] < found[1]
