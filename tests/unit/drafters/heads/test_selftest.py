"""The self-test: a head that drafts well passes in silence, and every known misreading is named.

The target here writes what a golden head guesses, so the head is right when it is read as it was made.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from heads import GOLDEN, small_target
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.core.types import Budget
from outrider.drafters import make_drafter
from outrider.drafters.heads.eagle import EagleDrafter
from outrider.drafters.heads.eagle_model import EagleModel
from outrider.drafters.heads.reader import read_eagle
from outrider.drafters.heads.selftest import DEPTH, examine, survival
from outrider.models.base import BaseModel, Output, Want
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes
from outrider.testing.contract import GREEDY, context

TARGET = small_target()
TEXT = [(7 * i * i + 3 * i + 11) % 127 for i in range(80)]
GUESSED = "eagle31"


def model(name: str = GUESSED, **settings: Any) -> EagleModel:
    """A golden head, read with other settings than its own."""
    read = read_eagle(GOLDEN / name, TARGET)
    return EagleModel(replace(read, config=replace(read.config, **settings)), TARGET.model, 256, "none")


class Follower(BaseModel):
    """A target that writes what a head guesses: its logits are one where the head's first draft token is."""

    def __init__(self, head: EagleModel) -> None:
        self.inner, self.head = TARGET.model, head
        self.vocab_size, self.max_length, self.device = 128, 256, TARGET.model.device
        self.num_layers, self.batch_invariant = TARGET.model.num_layers, True

    def new_cache(self, num_slots: int, max_length: int):
        return self.inner.new_cache(num_slots, max_length)

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        return self.inner.embedding_rows(tokens)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        out = self.inner.forward(nodes, taps=(*taps, *self.head.taps), want="all")
        assert out.features is not None
        parts = out.features.unflatten(-1, (len(taps) + len(self.head.taps), -1))
        own, shown = parts[:, :, len(taps) :].flatten(2), parts[:, :, : len(taps)].flatten(2)
        cache = self.head.new_cache(1, 256)
        guess = self.head.forward(Nodes(nodes.tokens[:, 1:], cache, [0]), own[:, :-1]).logits[0].argmax(-1)
        guess = guess if self.head.subset is None else self.head.subset.ids[guess]
        logits = torch.zeros_like(out.logits)
        logits[0, torch.arange(1, nodes.count), guess] = 9.0
        return Output(logits, shown)


def target(name: str = GUESSED) -> Loaded:
    return replace(TARGET, model=cast("Any", Follower(model(name))))


def test_a_good_head_passes(caplog: pytest.LogCaptureFixture) -> None:
    report = examine(model(), target(), TEXT, "HEAD")
    assert report.found.hits[0] == 1.0
    assert report.better is None
    assert not caplog.records
    assert str(report).startswith("1.12 of 3 draft tokens are right")


def test_survival_is_what_drafts_give() -> None:
    """Against the drafter itself, at every position, fed with what it drafts there."""
    head = model()
    out = TARGET.model.forward(Nodes(torch.tensor([TEXT]), TARGET.model.new_cache(1, 256), [0]), taps=head.taps)
    assert out.features is not None
    made, hits = EagleDrafter(head, 1, 256), torch.zeros(DEPTH)
    right = [0] * len(TEXT)
    for t in range(len(TEXT) - 1 - DEPTH):  # what is right is set so that a third of all first tokens is
        made.start(0, TEXT[: t + 2], 0, out.features[0, : t + 1])
        first = made.propose(context([0], [TEXT[: t + 2]], [Budget(1)], GREEDY)).host[0][1][0]
        right[t + 1] = first if t % 3 == 0 else (first + 1) % 128
        hits[0] += t % 3 == 0
    found = survival(head, TEXT, out.features[0], right)
    assert found.hits[0] == pytest.approx(float(hits[0]) / (len(TEXT) - 1 - DEPTH))
    assert found.hits[0] >= found.hits[1] >= found.hits[2]


def test_later_tokens_are_fed_back() -> None:
    """The second token of a draft follows the text's token and the head's own state, as in a draft."""
    head = model()
    out = TARGET.model.forward(Nodes(torch.tensor([TEXT]), TARGET.model.new_cache(1, 256), [0]), taps=head.taps)
    assert out.features is not None
    t, cache = 20, head.new_cache(1, 256)
    head.forward(Nodes(torch.tensor([TEXT[1 : t + 1]]), cache, [0]), out.features[:, :t], want="none")
    cache.commit([0], [range(t)])
    logits, g = head.forward(Nodes(torch.tensor([TEXT[t + 1 : t + 2]]), cache, [0]), out.features[:, t : t + 1])
    first = int(logits[0, 0].argmax())
    parents = torch.tensor([[-1, 0]])
    again = head.forward(Nodes(torch.tensor([TEXT[t + 2 : t + 3]]), cache, [0], parents), g=g)
    second = int(again.logits[0, 0].argmax())
    assert head.subset is not None
    ids = head.subset.ids.tolist()
    for wrong in (False, True):
        right = [0] * len(TEXT)
        right[t + 1], right[t + 2] = ids[first], ids[second] if not wrong else (ids[second] + 1) % 128
        one = survival(head, TEXT, out.features[0], right).hits[1] * (len(TEXT) - 1 - DEPTH)
        zero = [0] * len(TEXT)
        zero[t + 1] = ids[first]
        base = survival(head, TEXT, out.features[0], zero).hits[1] * (len(TEXT) - 1 - DEPTH)
        assert round(one - base) == (0 if wrong else 1)


MISREADINGS = {
    "norm_before_residual true": (
        "eagle3_before_residual",
        {"norm_before_residual": False},
    ),
    "rope_theta 500000": ("eagle31", {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}),
    "the layers before [2, 4, 8] in place of [1, 3, 7]": ("eagle31", {"taps": (0, 2, 6)}),
    "the layers before [1, 3, 7] in place of [2, 4, 8]": ("lower", {}),
    "the last layer after the final norm": ("post", {}),
}


@pytest.mark.parametrize("mends", MISREADINGS)
def test_a_misreading_is_named(mends: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    name, settings = MISREADINGS[mends]
    if name in ("lower", "post"):  # the head was made for other layers than its folder says
        made = {"lower": (0, 2, 6), "post": (1, 3, -1)}[name]
        loaded = replace(TARGET, model=cast("Any", Follower(model(taps=made))))
        read = model()
    else:
        loaded, read = target(name), model(name, **settings)
    monkeypatch.setattr("outrider.drafters.heads.selftest.ENOUGH", 0.99)  # random layers resemble their neighbours
    monkeypatch.setattr("outrider.drafters.heads.selftest.CLEAR", 0.05)
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        report = examine(read, loaded, TEXT, "HEAD")
    assert report.better is not None
    assert report.better[0] == mends
    assert report.better[1].hits[0] == 1.0
    assert "correct that in its config.json" in caplog.text


def test_norm_output_shows_in_later_tokens() -> None:
    """The first token does not depend on what is fed back, and the second does."""
    read = model(norm_output=False)
    other = read.read_as(replace(read.config, norm_output=True))
    out = TARGET.model.forward(Nodes(torch.tensor([TEXT]), TARGET.model.new_cache(1, 256), [0]), taps=read.taps)
    assert out.features is not None
    first, second = (
        head.forward(Nodes(torch.tensor([TEXT[1:5]]), head.new_cache(1, 9), [0]), out.features[:, :4])
        for head in (read, other)
    )
    assert torch.equal(first.logits, second.logits)
    assert not torch.allclose(first.g, second.g)


def test_a_head_of_another_model_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Random weights; the maker runs the test for a target with a tokenizer."""
    tokenized = replace(TARGET, tokenizer=lambda text, **_: {"input_ids": TEXT})
    config = SpeculativeConfig.of({"model": str(GOLDEN / "eagle31")})
    with caplog.at_level(logging.WARNING, "outrider.heads"):
        make_drafter(config, tokenized, rows=1, max_length=128, device="cpu")
    assert "no known misreading mends that; it was trained for another model" in caplog.text
