"""A head of the EAGLE family in plain torch: what is trained, and the slow twin of the drafter on packed kernels.

Position t of a head reads the pair (x_{t+1}, g_t): a token, and the fused features of the position before it. The logits there
are those of x_{t+2}. While it drafts, its own output takes the place of g. The names of the parameters are those of speculators.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from outrider.drafters.heads.config import HeadConfig, HeadShape
from outrider.drafters.heads.layers import turned, turns
from outrider.drafters.heads.reader import HeadWeights


class KeysValues(NamedTuple):
    """Rotated keys, and values, of pairs: both [batch, kv_head, pair, head_dim]."""

    keys: Tensor
    values: Tensor

    def then(self, more: KeysValues) -> KeysValues:
        """Both, one after the other."""
        return KeysValues(torch.cat([self.keys, more.keys], 2), torch.cat([self.values, more.values], 2))


class HeadAttention(nn.Module):
    """width: of what it reads. bias: of all linears but the last."""

    def __init__(self, config: HeadShape, width: int, bias: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)

    def split(self, x: Tensor) -> Tensor:
        """[batch, pair, head * head_dim] -> [batch, head, pair, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class HeadMLP(nn.Module):
    def __init__(self, config: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        if not config.eagle1:
            self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # of the token's embedding
            self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)  # of g
        width = config.hidden_size * (1 if config.eagle1 else 2)
        self.self_attn = HeadAttention(config, width, config.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = HeadMLP(config)


class Eagle(nn.Module):
    """EAGLE-3, EAGLE-3.1 and EAGLE-1, by the flags of their config (the equations: docs/guides/heads.md).

    The embedding is the target's, and no optimiser should change it: other engines take the target's too. `lm_head` has one row
    for each token of the draft vocabulary. token_ids: int64 [draft_vocab], ascending: the target's id of each; None for all.

    Raises ValueError for ids that do not fit.
    """

    def __init__(self, config: HeadConfig, token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        size, eps, taps = config.hidden_size, config.rms_norm_eps, len(config.taps)
        self.embed_tokens = nn.Embedding(config.vocab_size, size).requires_grad_(False)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(taps * config.target_hidden_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in range(taps))
        width = 2 * size if config.eagle1 else taps * config.target_hidden_size
        self.fc = nn.Linear(width, size, bias=config.fc_bias)
        self.layers = nn.ModuleList([HeadLayer(config)])
        if not config.eagle1:
            self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        ids = torch.arange(config.draft_vocab_size, device="cpu") if token_ids is None else token_ids.long().clone()
        if len(ids) != config.draft_vocab_size or not bool((ids.diff() > 0).all()) or int(ids[-1]) >= config.vocab_size:
            raise ValueError(
                f"token_ids are {config.draft_vocab_size} ascending ids below {config.vocab_size}, one for each row of the "
                f"output head; got {len(ids)}, the last {int(ids[-1])}"
            )
        frequencies, self._rope_factor = config.rotary()
        self.token_ids: Tensor
        self._frequencies: Tensor
        self.register_buffer("token_ids", ids, persistent=False)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    @classmethod
    def of(cls, given: HeadWeights[HeadConfig], embedding: Tensor) -> Eagle:
        """A head that was read, float32. embedding: float [vocab, hidden], the target's; used if the head has none.

        Raises ValueError for a head that cannot be trained."""
        c = given.config
        if c.num_layers > 1 or c.qk_norm or c.mask_token_id is not None:
            raise ValueError("heads of P-EAGLE, and of Qwen3's layers, draft here and cannot be trained or written")
        head = cls(c, given.token_ids)
        own = {n: t.float() for n, t in given.tensors.items()}
        head.load_state_dict({"embed_tokens.weight": embedding.float()} | own)
        return head

    @property
    def layer(self) -> HeadLayer:
        found = self.layers[0]
        assert isinstance(found, HeadLayer)
        return found

    def fuse(self, features: Tensor) -> Tensor:
        """g [..., hidden] of features [..., taps * target_hidden], the tapped layers side by side."""
        config = self.config
        if config.eagle1:
            return features
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            parts = features.chunk(len(config.taps), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def pairs(self, tokens: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(x, residual): what the layer's attention reads, and what its output is added to.

        tokens: int64 [batch, pair]. g: [batch, pair, hidden]. x: [batch, pair, hidden], twice as wide in EAGLE-3.
        """
        embedded = self.embed_tokens(tokens).to(g.dtype)
        if self.config.eagle1:
            joined = self.fc(torch.cat([embedded, g], -1))
            return joined, joined
        normed = self.layer.hidden_norm(g)
        residual = normed if self.config.norm_before_residual else g
        return torch.cat([self.layer.input_layernorm(embedded), normed], -1), residual

    def keys_values(self, x: Tensor, positions: Tensor) -> KeysValues:
        """Of pairs. positions: int64 [batch, pair] or [pair], those of the features."""
        attention = self.layer.self_attn
        keys, values = attention.split(attention.k_proj(x)), attention.split(attention.v_proj(x))
        return KeysValues(self._rotated(keys, positions), values)

    def attended(self, x: Tensor, residual: Tensor, positions: Tensor, seen: KeysValues, mask: Tensor) -> Tensor:
        """The layer's output y [batch, pair, hidden] of some pairs, over keys and values that hold their own too.

        mask: bool, broadcast to [batch, head, pair, key]: what a pair attends to.
        """
        layer = self.layer
        attention = layer.self_attn
        query = self._rotated(attention.split(attention.q_proj(x)), positions)
        out = F.scaled_dot_product_attention(query, seen.keys, seen.values, attn_mask=mask, enable_gqa=True)
        y = residual + attention.o_proj(out.transpose(1, 2).flatten(2))
        return y + layer.mlp(layer.post_attention_layernorm(y))

    def forward(
        self, tokens: Tensor, g: Tensor, past: KeysValues | None = None, first: int | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Read pairs causally, after those of `past`. Returns y [batch, pair, hidden] and the keys and values of all.

        tokens: int64 [batch, pair], x_{t+1}. g: [batch, pair, hidden], of `fuse` or of `feedback`. first: position of the first
        pair; None for the number of pairs in `past`.
        """
        held, count = 0 if past is None else past.keys.shape[2], tokens.shape[1]
        positions = torch.arange(count, device=tokens.device) + (held if first is None else first)
        x, residual = self.pairs(tokens, g)
        own = self.keys_values(x, positions)
        seen = own if past is None else past.then(own)
        mask = torch.ones(count, held + count, dtype=torch.bool, device=tokens.device).tril(held)
        return self.attended(x, residual, positions, seen, mask), seen

    def feedback(self, y: Tensor) -> Tensor:
        """The g of the next pair, while the head drafts."""
        return self.norm(y) if self.config.norm_output else y

    def logits(self, y: Tensor) -> Tensor:
        """[..., draft_vocab]: of the token after the pair's own."""
        return self.lm_head(y if self.config.eagle1 else self.norm(y))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [batch, head, pair, head_dim]. The halves of a head are its pairs of coordinates, as in Llama."""
        turn = turns(self._frequencies, self._rope_factor, positions)
        return turned(x, turn[:, None] if positions.dim() > 1 else turn)

    def initialise_(self, embedding: Tensor, output: Tensor | None = None, std: float = 0.02) -> Eagle:
        """Ready to be trained: the embedding and output head are the target's, and the layer adds nothing yet.

        embedding: [vocab, hidden], the target's. output: [vocab, hidden], its output head; None for one that is tied. Raises
        ValueError for tables of another shape.
        """
        output = embedding if output is None else output
        wanted = (self.config.vocab_size, self.config.hidden_size)
        for name, table in (("embedding", embedding), ("output head", output)):
            if tuple(table.shape) != wanted:
                raise ValueError(f"the target's {name} is {tuple(table.shape)}, and the head's config says {wanted}")
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=std * min(1.0, math.sqrt(1024 / parameter.shape[1])))
            for module in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
                module.weight.zero_()
            self.embed_tokens.weight.copy_(embedding)
            self.lm_head.weight.copy_(output[self.token_ids.to(output.device)])
        return self
