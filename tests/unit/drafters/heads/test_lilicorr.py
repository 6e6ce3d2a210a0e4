"""LiLiCorr: the scores of candidates are those of SGLang's head. `test_parallel` has its texts, beside those of other blocks."""

from __future__ import annotations

import torch
from heads import GOLDEN, golden, small_target

from outrider.drafters.heads.block.drafter import BlockDrafter
from outrider.drafters.heads.block.files import read_block

TARGET = small_target()


def lilicorr() -> BlockDrafter:
    return BlockDrafter(read_block(GOLDEN / "lilicorr", TARGET), TARGET.model, 2, 256, "none")


def test_candidates_are_those_of_sglang() -> None:
    want, made = golden("lilicorr"), lilicorr()
    for at, ids, start, pairs in zip(*(want[n] for n in ("anchors", "candidates", "start", "pairs")), strict=True):
        made.release(1)
        if at:
            made.start(1, want["tokens"][: at + 1].tolist(), 0, want["features"][:at])
        logits = made._logits([1], [want["tokens"][: at + 1].tolist()], 4)[0]
        for level, theirs in enumerate(ids):
            tokens, places = theirs.sort()
            for before in (0,) if not level else range(len(theirs)):
                wanted = start if not level else pairs[level - 1, before]
                token = int(ids[level - 1, before]) if level else int(want["tokens"][at])
                found, subset = made._given_token(0, level, token, logits[level], made._possible(logits[level]))
                assert subset is not None
                assert torch.equal(subset.ids, tokens)
                assert torch.allclose(found, wanted[places], atol=1e-4), (at, level, before)


def test_candidates_without_an_anchor_are_those_of_sglang() -> None:
    """A cache whose last position was not read as features has no anchor."""
    want, model = golden("lilicorr"), lilicorr().model
    cache = model.new_cache(1, 64)
    for at, hidden, logits, start in zip(
        *(want[n] for n in ("anchors", "hidden", "logits", "start_without_anchor")), strict=True
    ):
        model.read(cache, 0, want["features"][: at + 1])
        cache.keep(0, int(at))
        found = model.scores(cache, [0], hidden[None, 1:], logits[None, 1:])
        assert found is not None
        assert torch.allclose(found.first[0], start, atol=1e-4)
        cache.release(0)


def test_a_token_that_is_no_candidate_leaves_the_logits() -> None:
    made = lilicorr()
    want = golden("lilicorr")
    text = want["tokens"].tolist()
    made.start(0, text, 0, want["features"][:-1])
    logits = made._logits([0], [text], 4)[0]
    before, places = (made._possible(row) for row in logits[:2])
    assert before is not None
    assert places is not None
    other = next(t for t in range(128) if t not in before.tolist())
    found, _ = made._given_token(0, 1, other, logits[1], places)
    assert torch.equal(found, logits[1][places])
