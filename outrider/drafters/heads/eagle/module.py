"""A head of the EAGLE family: its settings, its equations, and the module that is trained.

Position t of a head reads the pair (x_{t+1}, g_t): a token, and the fused features of the position before it. The logits there
are those of x_{t+2}. While it drafts, its own output takes the place of g. The names of the parameters are those of speculators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from outrider.drafters.heads.config import HeadShape
from outrider.drafters.heads.layers import START, HeadAttention, HeadMLP, HeadModule, turned
from outrider.drafters.heads.reading import HeadWeights


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadShape):
    """An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) and its variants: a decoder layer over features and tokens.

    Of several layers only the first one reads features.
    """

    norm_before_fc: bool = False  # one norm over all features side by side
    fc_norm: bool = False  # a norm for each feature
    # the output of the last norm is what the head feeds back (EAGLE-3.1 has this and fc_norm)
    norm_output: bool = False
    norm_before_residual: bool = False  # the normed feature is the residual
    # a head of EAGLE-1 (Li et al. 2024, 2401.15077). It reads the token and one feature, and predicts the next feature
    eagle1: bool = False
    attention_bias: bool = False  # the linears of the attention have a bias
    fc_bias: bool = False  # the linear over the features has a bias
    qk_norm: bool = False  # queries and keys are normed in each head, as in Qwen3
    mask_token_id: int | None = None  # token that stands for those that P-EAGLE does not know; None for other heads
    parallel_drafts: int = 0  # tokens that P-EAGLE drafts in one forward; 0 for other heads

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both true; a head has one norm over all features or one for each"
            )
        super().__post_init__()

    @property
    def one_plain_layer(self) -> bool:
        """Whether it is a single layer of Llama's kind. Only such heads are trained, written, and run by the native step."""
        return self.num_layers == 1 and not self.qk_norm and self.mask_token_id is None


class EagleEquations:
    """The equations of a head (docs/guides/heads.md), over the linears and norms that it has: trained ones or packed ones."""

    config: EagleConfig
    embed_tokens: Any
    input_norm: Any
    fc_norm: Any
    fc: Any
    layers: Any

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
        embedded, layer = self.embed_tokens(tokens).to(g.dtype), self.layers[0]
        if self.config.eagle1:
            joined = self.fc(torch.cat([embedded, g], -1))
            return joined, joined
        normed = layer.hidden_norm(g)
        residual = normed if self.config.norm_before_residual else g
        return torch.cat([layer.input_layernorm(embedded), normed], -1), residual


class KeysValues(NamedTuple):
    """Rotated keys, and values, of pairs: both [batch, kv_head, pair, head_dim]."""

    keys: Tensor
    values: Tensor

    def then(self, more: KeysValues) -> KeysValues:
        """Both, one after the other."""
        return KeysValues(torch.cat([self.keys, more.keys], 2), torch.cat([self.values, more.values], 2))


class EagleLayer(nn.Module):
    """first: it reads pairs; the other layers of P-EAGLE are ordinary."""

    def __init__(self, config: EagleConfig, *, first: bool) -> None:
        super().__init__()
        size, eps, pairs = config.hidden_size, config.rms_norm_eps, first and not config.eagle1
        if not config.eagle1:
            self.input_layernorm = nn.RMSNorm(size, eps)  # of the token's embedding in the first layer
        if pairs:
            self.hidden_norm = nn.RMSNorm(size, eps)  # of g
        width = 2 * size if pairs else size
        self.self_attn = HeadAttention(config, width, bias=config.attention_bias, norms=config.qk_norm)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = HeadMLP(config)


class Eagle(EagleEquations, HeadModule):
    """EAGLE-3, EAGLE-3.1 and EAGLE-1, by the flags of their config. Of P-EAGLE it knows the parameters only.

    The embedding is the target's, and no optimiser should change it: other engines take the target's too. `lm_head` has one row
    for each token of the draft vocabulary. token_ids: see `HeadModule`.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig, token_ids: Tensor | None = None) -> None:
        super().__init__(config, token_ids)
        size, eps, taps = config.hidden_size, config.rms_norm_eps, len(config.taps)
        table = torch.empty(config.vocab_size, size)
        if not table.is_meta:  # for a table without memory, torch would import its compiler here
            table.normal_()
        self.embed_tokens = nn.Embedding.from_pretrained(table)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(taps * config.target_hidden_size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(config.target_hidden_size, eps) for _ in range(taps))
        width = 2 * size if config.eagle1 else taps * config.target_hidden_size
        self.fc = nn.Linear(width, size, bias=config.fc_bias)
        self.layers = nn.ModuleList(EagleLayer(config, first=i == 0) for i in range(config.num_layers))
        if not config.eagle1:
            self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, width))

    @classmethod
    def of(cls, given: HeadWeights[EagleConfig], embedding: Tensor) -> Eagle:
        """A head that was read, float32. embedding: float [vocab, hidden], the target's; used if the head has none.

        Raises ValueError for a head that cannot be trained."""
        if not given.config.one_plain_layer:
            raise ValueError("heads of P-EAGLE, and of Qwen3's layers, draft here and cannot be trained or written")
        head = cls(given.config, given.token_ids)
        tensors = {n: t.float() for n, t in given.tensors.items()}
        head.load_state_dict({"embed_tokens.weight": embedding.float()} | tensors)
        return head

    @property
    def layer(self) -> EagleLayer:
        return self.layers[0]

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

    def feedback(self, y: Tensor) -> Tensor:
        """The g of the next pair, while the head drafts."""
        return self.norm(y) if self.config.norm_output else y

    def logits(self, y: Tensor) -> Tensor:
        """[..., draft_vocab]: of the token after the pair's own."""
        return self.lm_head(y if self.config.eagle1 else self.norm(y))

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [batch, head, pair, head_dim]."""
        return turned(x, self.turn(positions[:, None] if positions.dim() > 1 else positions))

    def initialise_(self, embedding: Tensor, output: Tensor | None = None) -> Eagle:
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
                    parameter.normal_(std=START * min(1.0, math.sqrt(1024 / parameter.shape[1])))
            for module in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
                module.weight.zero_()
            self.embed_tokens.weight.copy_(embedding)
            self.lm_head.weight.copy_(output[self.token_ids.to(output.device)])
        return self
