"""A verifier of your own is one function, its reference, and one row: it decodes, is proved, and its trace replays."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles import judging
from traces import SAMPLED, loop, record, replays, three

from outrider.core.noise import Noise
from outrider.core.tree import depth
from outrider.core.types import Array, Draft, Siblings, Verdict
from outrider.engine.trace import Detail
from outrider.testing.oracle import composed, drawn_chain, plain, toys
from outrider.verify import VERIFIERS, FixedDistribution, TargetDistribution, reference_rejection, rejection
from outrider_lab.traces import read


def shallow(target: TargetDistribution, draft: Draft, noise: Noise, position: Array) -> Verdict:
    """`rejection` on the first level of the draft; deeper tokens are never accepted. Exact, and slow on purpose."""
    parents = np.where(depth(draft.parents) > 1, -2, draft.parents)
    return rejection(target, replace(draft, parents=parents), noise, position)


def reference_shallow(tokens, parents, target, drafter, choose, siblings=Siblings.IID):
    first = [up if up < 1 else -2 for up in parents]
    return reference_rejection(tokens, first, target, drafter, choose, siblings)


ROW = replace(
    VERIFIERS["rejection"],
    name="shallow",
    function=shallow,
    reference=reference_shallow,
    explains_by="p/q on the first level",
    help="accept at most one draft token with probability min(1, p/q): the distribution of plain decoding",
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS, "shallow", ROW)


@pytest.mark.parametrize("width", [1, 3])
def test_its_trace_is_replayed_and_explained(tmp_path: Path, width: int) -> None:
    rows = record(tmp_path / "t", loop("draft_model", "shallow", width), three(SAMPLED), Detail.PROBS)
    trace, written, reasons = read(tmp_path / "t"), dict[int, list[int]](), set[str]()
    assert trace.header.verifier == "shallow"
    for again in replays(trace, loop("draft_model", "shallow", width)):
        assert again.differs == ()
        written.setdefault(again.text.id, []).extend(again.written)
        for node in again.nodes[1:]:
            assert node.judged <= (node.depth == 1)
            assert node.evidence is None or node.evidence.coin.accepts == node.accepted  # type: ignore[union-attr]
            reasons.add(
                node.why().split(":")[0] + (" by p/q on the first level" if "first level" in node.why() else "")
            )
    assert list(written.values()) == [row.output for row in rows]
    assert {"accepted by p/q on the first level", "rejected by p/q on the first level", "never judged"} <= reasons


def test_its_reference_keeps_the_distribution() -> None:
    for toy in toys(14):
        assert composed(toy, judging("shallow", Siblings.IID), drawn_chain(2), 3) == plain(toy, 3)


def test_its_twins_agree() -> None:
    rng = random.Random(3)
    for _ in range(30):
        p, q = np.random.default_rng(rng.randrange(99)).dirichlet(np.ones(5), (2, 1, 4)).astype(np.float32)
        tokens = [[0, *(rng.randrange(5) for _ in range(3))]]
        draft = Draft(np.array(tokens), np.array([[-1, 0, 1, 2]]), q, Siblings.IID)
        noise, position = Noise(np.array([rng.randrange(99)]), np.array([0])), np.array([4])
        verdict = ROW(FixedDistribution(p), draft, noise, position)
        short = Draft(draft.tokens[:, :2], draft.parents[:, :2], q[:, :2], Siblings.IID)
        alone = rejection(FixedDistribution(p[:, :2]), short, noise, position)
        assert (verdict.accepted.item(), verdict.token.item()) == (alone.accepted.item(), alone.token.item())
