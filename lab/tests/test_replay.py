"""`outrider replay`: the reason beside each draft token is the one of the record."""

from __future__ import annotations

from pathlib import Path

from traces import SAMPLED, loop, record, replays, three

from outrider.engine.trace import read
from outrider_lab.cli.replay import _label


def test_a_token_below_a_rejected_one_was_never_judged(tmp_path: Path) -> None:
    """The text had ended only for accepted tokens behind its last one."""
    below = ended = 0
    for drafter in ("draft_model", "self"):
        run = loop(drafter)
        record(tmp_path / drafter, run, three(SAMPLED.with_(stop_token_ids=[4])))
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
