"""LiLiCorr's choice among the candidates of a block (arXiv 2608.20530).

A block drafts each token for itself, so neighbours may not fit together. A small transformer reads the likeliest tokens of all
slots at once. It gives each one a vector for the token before it and a vector for the token after it. Two neighbours fit as far
as the vectors between them agree. The names of the parameters are those of the published checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

_FEATURES = 5  # of a candidate: log probability, probability, distance from the best, rank, and whether it is the best


@dataclass(frozen=True)
class LiLiCorrConfig:
    """candidate_topk: candidates of a slot. hidden_size: width of the transformer. mlp_ratio: width of its MLP over that.
    factor_dim: width of the vectors. vector_eps: the shortest length of a vector. logit_scale: factor of the scores."""

    candidate_topk: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    factor_dim: int
    vector_eps: float
    logit_scale: float

    def __post_init__(self) -> None:
        if wrong := [name for name, value in vars(self).items() if not 0 < value < float("inf")]:
            raise ValueError(f"lilicorr_{wrong[0]} is {getattr(self, wrong[0])}; it must be above 0")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"lilicorr_num_heads {self.num_heads} must divide lilicorr_hidden_size {self.hidden_size}")


class CandidateScores(NamedTuple):
    """Logits of the candidates of each slot, the likeliest first.

    ids: int64 [batch, slot, k]. first: float32 [batch, k], of the first slot. pairs: float32 [batch, slot - 1, k, k], of the next
    slot's candidates after each candidate of a slot.
    """

    ids: Tensor
    first: Tensor
    pairs: Tensor

    def after(self, line: int, slot: int, token: int) -> Tensor | None:
        """float32 [k]: of the candidates of a slot after `token`; None if the slot before has no such candidate."""
        if not slot:
            return self.first[line]
        places = (self.ids[line, slot - 1] == token).nonzero()
        return self.pairs[line, slot - 1, int(places[0])] if len(places) else None


class LiLiCorrLayer(nn.Module):
    def __init__(self, config: LiLiCorrConfig, eps: float) -> None:
        super().__init__()
        size, inner = config.hidden_size, int(config.hidden_size * config.mlp_ratio)
        self.attn_norm, self.mlp_norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.attn = nn.MultiheadAttention(size, config.num_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(size, inner), nn.SiLU(), nn.Linear(inner, size))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x: [batch, candidate, hidden]. bias: what is added to the scores, [batch * head, candidate, candidate]."""
        y = self.attn_norm(x)
        x = x + self.attn(y, y, y, attn_mask=bias, need_weights=False)[0]
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorr(nn.Module):
    """The transformer over the candidates, and the scores of neighbours.

    width: of the block drafter and of the target's embedding. block_size: slots of a block, the root's among them.
    """

    def __init__(self, config: LiLiCorrConfig, width: int, block_size: int, eps: float) -> None:
        super().__init__()
        self.config, self.slots = config, block_size - 1
        size, top, dim = config.hidden_size, config.candidate_topk, config.factor_dim
        self.token_proj = nn.Identity() if width == size else nn.Linear(width, size)
        self.pass_hidden_proj, self.context_proj = nn.Linear(width, size), nn.Linear(width, size)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(_FEATURES), nn.Linear(_FEATURES, size), nn.SiLU(), nn.Linear(size, size)
        )
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, self.slots, 1, size))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, top, size))
        self.relative_slot_bias = nn.Parameter(torch.empty(config.num_heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(config.num_heads))
        self.layers = nn.ModuleList(LiLiCorrLayer(config, eps) for _ in range(config.num_layers))
        self.output_norm, self.anchor_norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(size, dim) for _ in range(3))

    def forward(
        self, ids: Tensor, embeddings: Tensor, log_probs: Tensor, z: Tensor, anchor: Tensor, known: Tensor
    ) -> CandidateScores:
        """The scores of all slots' candidates, the likeliest first.

        ids: int64 [batch, slot, k]. embeddings: the target's, [batch, slot, k, width]. log_probs: over the whole vocabulary,
        [batch, slot, k]. z: the block drafter's states, [batch, slot, width]. anchor: the projected features of the last token
        that the target has read, [batch, width]. known: bool [batch], whether there is one.
        """
        batch, slots, top = ids.shape
        rank = torch.arange(top, device=ids.device)
        ranks = (rank / max(top - 1, 1), (rank == 0).float())
        features = [log_probs, log_probs.exp(), log_probs - log_probs.amax(-1, keepdim=True)]
        x = self.feature_mlp(torch.stack([*features, *(t.expand_as(log_probs) for t in ranks)], -1))
        x = x + self.token_proj(embeddings) + self.pass_hidden_proj(z)[:, :, None]
        x = (x + self.slot_embedding[0] + self.rank_embedding[0]).flatten(1, 2)
        bias = self._slot_bias(top).repeat(batch, 1, 1)
        layers: Any = self.layers
        for layer in layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (slots, top))
        before = self.anchor_norm(self.context_proj(anchor) * known[:, None])
        around = before[:, None, None].expand_as(x)
        x = F.silu(self.factor_input_proj(torch.cat([x, around, x * around], -1)))
        gives, takes = self._direction(self.out_head(x)), self._direction(self.in_head(x))
        first, scale = self._direction(self.anchor_out_head(before)), self.config.logit_scale
        start = torch.einsum("bd,bkd->bk", first, takes[:, 0])
        return CandidateScores(ids, scale * start, scale * (gives[:, :-1] @ takes[:, 1:].transpose(-1, -2)))

    def _direction(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1, eps=self.config.vector_eps)

    def _slot_bias(self, top: int) -> Tensor:
        """float32 [head, candidate, candidate]: by how far apart two candidates' slots are."""
        slot = torch.arange(self.slots, device=self.same_slot_bias.device).repeat_interleave(top)
        apart = slot[:, None] - slot
        same = (apart == 0) * self.same_slot_bias[:, None, None]
        return self.relative_slot_bias[:, apart + self.slots] + same
