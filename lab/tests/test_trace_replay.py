"""Steps that are computed again from a trace, and texts that are written again from a fingerprint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from crossed import crossed
from helpers import VOCAB, decoder, request
from light import torch
from traces import GREEDY, RICH, SAMPLED, loop, record, replays, three
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.engine.request import Request
from outrider.engine.trace import Detail
from outrider.testing.toy import ToyModel
from outrider_lab.cli.replay import _label
from outrider_lab.fingerprints import read_fingerprint
from outrider_lab.replay import replay
from outrider_lab.traces import read

RUNS = [
    ("none", "match", 1), ("draft_model", "match", 1), ("draft_model", "match", 3), ("random", "match", 3),
    ("target_tree", "match", 3), ("suffix", "match", 1), ("draft_model", "rejection", 1), ("draft_model", "rejection", 3),
    ("random", "rejection", 3), ("draft_model", "block", 1), ("ngram", "block", 1), ("draft_model", "traversal", 1),
    ("draft_model", "traversal", 3), ("random", "traversal", 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "chosen"), crossed({"greedy": GREEDY, "sampled": SAMPLED, "rich": RICH}.items(), RUNS, share=0.0), ids=str
)
def test_every_step_is_computed_again_in_company(tmp_path: Path, kind, chosen) -> None:
    (_, params), (drafter, verifier, width) = kind, chosen
    rows = record(tmp_path / "t", loop(drafter, verifier, width), three(params), Detail.PROBS)
    trace, fresh = read(tmp_path / "t"), loop(drafter, verifier, width)
    assert trace.problem is None
    written: dict[int, list[int]] = {}
    for again in replays(trace, fresh):
        assert again.differs == ()
        assert again.path == tuple(again.step.path or ())
        assert [n.node for n in again.nodes] == list(range(again.step.drafted + 1))
        assert [n.node for n in again.nodes if n.accepted] == list(again.path)
        words = [n.why() for n in again.nodes]
        assert all(word.startswith(("accepted", "rejected", "never judged", "the last token")) for word in words)
        for node, word in zip(again.nodes[1:], words[1:], strict=True):
            assert word.startswith("accepted") == node.accepted
            if node.evidence and node.evidence.coin and verifier == "rejection":
                assert node.evidence.coin.accepts == node.accepted
        written.setdefault(again.text.id, []).extend(again.written)
    assert list(written.values()) == [row.output for row in rows]
    assert not fresh.sequences
    assert sum(fresh.cache.length) == 0


def test_a_replay_says_what_the_noise_chose(tmp_path: Path) -> None:
    """The reason holds in numbers: log p + noise of what was drawn is the largest."""
    record(tmp_path / "t", loop("random", width=3), three())
    refused = 0
    for again in replays(read(tmp_path / "t"), loop("none")):
        for node in again.nodes[1:]:
            if node.evidence and node.evidence.rival is not None and node.p > 0:
                _, p, noise = node.evidence.rival
                assert math.log(p) + noise >= math.log(node.p) + node.evidence.noise - 1e-5  # type: ignore[operator]
                refused += 1
    assert refused > 10


def test_another_model_is_detected(tmp_path: Path) -> None:
    record(tmp_path / "t", loop(), three(), Detail.PROBS)
    trace = read(tmp_path / "t")
    other = decoder(ToyModel(VOCAB, seed=5, max_length=200))
    found = list(replays(trace, other))
    assert any("recorded is" in why for again in found for why in again.differs)
    assert all(any("the target's probabilities differ" in why for why in again.differs) for again in found)
    with pytest.raises(ValueError, match="Load toy"):
        replay(trace, decoder(ToyModel(VOCAB + 1, max_length=200)), 0, next(iter(trace.texts)))


def test_what_cannot_be_computed_is_said(tmp_path: Path) -> None:
    requests = three()
    record(tmp_path / "t", loop(verifier="rejection"), requests)
    trace, run = read(tmp_path / "t"), loop(verifier="rejection")
    with pytest.raises(ValueError, match="holds 3 requests; name one of them"):
        replay(trace, run, 0)
    with pytest.raises(ValueError, match="has no request 99"):
        replay(trace, run, 0, 99999999)
    with pytest.raises(ValueError, match=r"steps 0 to \d+, not step 500"):
        replay(trace, run, 500, requests[0].id)
    with pytest.raises(ValueError, match="proposes another tree now"):
        replay(trace, loop("ngram"), 0, requests[0].id)
    record(tmp_path / "c", loop(), [asked := request([1, 2], GREEDY)], Detail.COUNTS)
    with pytest.raises(ValueError, match="--trace-detail tokens"):
        replay(read(tmp_path / "c"), run, 0)

    class Odd:
        def allowed(self, tokens, start, extra):
            return torch.arange(VOCAB) % 2 == 1

        def expected(self, tokens, start):
            return []

    asked = Request(123, [1, 2], SAMPLED, 0, mask=Odd())
    record(tmp_path / "g", loop(), [asked], Detail.PROBS)
    held = read(tmp_path / "g")
    with pytest.raises(ValueError, match="grammar"):
        replay(held, run, 0)
    assert all(replay(held, loop(), n, mask=Odd()).same for n in range(len(held.text().steps)))
    assert not run.sequences


def test_a_draft_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """A digit that was written twice makes such a token. Random changes of a file seldom do."""
    record(tmp_path / "t", loop(width=2), three(RICH), Detail.PROBS)
    trace = read(tmp_path / "t")
    [text, *_] = trace.texts.values()
    kept = text.steps[0]
    for changed, words in (
        (kept.model_copy(update={"tokens": [*kept.tokens[:-1], 44]}), "outside the target's 11 tokens"),
        (kept.model_copy(update={"tokens": None}), "this trace has counts only"),
    ):
        text.steps[0] = changed
        with pytest.raises(ValueError, match=words):
            replay(trace, loop(), 0, text.id)


def test_the_command_line_says_same_differs_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    runner = CliRunner()
    words = "-m builtin:code-draft -n 12 --seed 1 -t 0.8 --fingerprint"
    asked = ["generate", "class Stack:\n", *words.split(" "), str(file)]
    assert runner.invoke(app, asked).exit_code == 0
    again = ["replay", "--fingerprint", str(file)]
    done = runner.invoke(app, again)
    assert (done.exit_code, "the same 12 tokens" in done.output) == (0, True)
    recorded = read_fingerprint(file)
    other = [*recorded.tokens[:3], 7, *recorded.tokens[4:]]
    recorded.model_copy(update={"tokens": other, "machine": {**recorded.machine, "cpu": "another"}}).sealed().write(
        file
    )
    done = runner.invoke(app, again)
    assert done.exit_code == 1
    assert f"differs at token 3: recorded 7, here {recorded.tokens[3]}" in done.output
    assert "cpu another, here" in done.output
    refused = runner.invoke(app, [*again, "-m", "builtin:code"])
    assert refused.exit_code == 2
    assert "content of the model's files" in refused.output
    assert runner.invoke(app, ["replay"]).exit_code == 2
    assert runner.invoke(app, [*again, "--step", "1"]).exit_code == 2


def test_a_token_below_a_rejected_one_was_never_judged(tmp_path: Path) -> None:
    """The text had ended only for accepted tokens behind its last one."""
    below = ended = 0
    for drafter in ("draft_model", "self"):
        run = loop(drafter)
        record(tmp_path / drafter, run, three(SAMPLED.with_(stop_token_ids=[2])))
        for step in replays(read(tmp_path / drafter), run):
            cut = len(step.written) < len(step.path)
            for node in step.nodes[1:]:
                line = str(_label(node, step, str)).splitlines()[0]
                late = cut and node.accepted and node.depth > len(step.written)
                assert ("the text had ended" in line) == late, line
                if not node.judged and not node.parent_accepted:
                    assert "never judged: the token above it was rejected" in line
                    below += 1
                ended += late
    assert below
    assert ended
