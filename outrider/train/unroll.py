"""EAGLE's training-time test, at sampled positions: the head drafts on from them as it will while it drafts (Li et al. 2025).

The keys and values of the first step are computed at every position. All else is computed at the anchors only: queries, the
MLP, the output head, and the later steps. That saves most of the cost, and neighbouring positions teach nearly the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider.drafters.heads.eagle.module import Eagle


def unrolled(head: Eagle, tokens: Tensor, features: Tensor, anchors: Tensor, steps: int) -> Iterator[Tensor]:
    """The logits [batch, anchor, draft_vocab] of step 0, 1, ...: step k at anchor t is about token t + 2 + k.

    Until then the head reads the text's own tokens, and from step 1 on its own output in place of the target's features. A
    later step at t sees the first step's keys up to t and those of its own steps, not those of its neighbours' steps.
    tokens: int64 [batch, n]. features: [batch, n, taps * hidden]. anchors: int64 [batch, anchor], 0 to n - 2 - steps.
    """
    count = tokens.shape[1] - 1
    x, residual = head.pairs(tokens[:, 1:], head.fuse(features[:, :count]))
    places = torch.arange(count, device=tokens.device)
    seen = head.keys_values(x, places)
    mask = (places <= anchors[..., None])[:, None]
    own = torch.eye(anchors.shape[1], dtype=torch.bool, device=tokens.device).expand(*mask.shape[:3], -1)
    y = head.attended(_at(x, anchors), _at(residual, anchors), anchors, seen, mask)
    yield head.logits(y)
    for step in range(1, steps):
        x, residual = head.pairs(tokens.gather(1, anchors + step + 1), head.feedback(y))
        seen = seen.then(head.keys_values(x, anchors + step))
        mask = torch.cat([mask, own], -1)
        y = head.attended(x, residual, anchors + step, seen, mask)
        yield head.logits(y)


def _at(x: Tensor, anchors: Tensor) -> Tensor:
    """The rows of [batch, n, width] at the anchors."""
    return x.gather(1, anchors[..., None].expand(-1, -1, x.shape[-1]))
