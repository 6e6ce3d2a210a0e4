"""Heads in plain torch: what is trained, and the slow twins of drafters. The names of the parameters are those of speculators.

Position t of an EAGLE head reads the pair (x_{t+1}, g_t): a token, and the fused features of the position before it. The logits
there are those of x_{t+2}. While it drafts, its own output takes the place of g. The block after position t holds the token
x_{t+1} and masks. It attends to itself in both directions, and to the features of positions 0 to t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from outrider.core.types import Array
from outrider.drafters.heads.block import BlockConfig
from outrider.drafters.heads.config import FIELDS, HeadShape, default_taps, fields_of, plain_rope
from outrider.drafters.heads.eagle import EagleConfig
from outrider.drafters.heads.medusa import MedusaWeights
from outrider.drafters.heads.reading import EMBED, OUTPUT, Config, HeadWeights
from outrider_lab.heads.writers import check_trainable

START = 0.02  # standard deviation of the weights that training begins with


def floats(stored: Array) -> Tensor:
    """float32: what is stored of a head, for a module."""
    return torch.from_numpy(stored.astype(np.float32))


def stored(trained: Tensor) -> Array:
    """What a module holds, for a head that is stored."""
    return trained.detach().cpu().numpy()


def config_for(
    kind: type[Config],
    target: Any,
    *,
    draft_vocab_size: int | None = None,
    taps: Sequence[int] | None = None,
    **settings: Any,
) -> Config:
    """The settings of a head of a target's own shape.

    Args:
        kind: `EagleConfig` or `BlockConfig`.
        target: The target's configuration of transformers.
        draft_vocab_size: None for all tokens.
        taps: None for `default_taps`.
        settings: Any other field.
    """
    text, names = target.get_text_config(), {f.name for f in fields(kind)}
    # a head has its own activation
    shape = {f.name: getattr(text, f.name, None) for f in FIELDS if f.name != "hidden_act"}
    shape = {name: value for name, value in shape.items() if value} | {"draft_vocab_size": draft_vocab_size or 0}
    values = fields_of(shape, HeadShape, {"head_dim": text.hidden_size // text.num_attention_heads})
    values["taps"] = tuple(default_taps(text.num_hidden_layers) if taps is None else taps)
    values["rope_parameters"] = plain_rope(getattr(text, "rope_parameters", None))
    values["verifier"] = getattr(target, "_name_or_path", None) or None
    if unknown := sorted(set(settings) - names):
        raise ValueError(f"{kind.__name__} has no field {unknown[0]!r}; it has {', '.join(sorted(names))}")
    return kind(**(values | settings))


class HeadModule(nn.Module):
    """A head that can be trained. Its rotary embedding is computed at the positions that are asked for.

    token_ids: int64 [draft_vocab], ascending: the target's token of each row of the output head; None for all. Raises
    ValueError for ids that do not fit.
    """

    token_ids: Tensor
    _frequencies: Tensor

    def __init__(self, config: HeadShape, token_ids: Tensor | None = None) -> None:
        super().__init__()
        self.config, rows = config, config.draft_vocab_size
        ids = torch.arange(rows, device="cpu") if token_ids is None else token_ids.clone()
        if len(ids) != rows or not bool((ids.diff() > 0).all()) or int(ids[-1]) >= config.vocab_size:
            raise ValueError(
                f"token_ids are {rows} ascending ids below {config.vocab_size}, one for each row of the output head; got "
                f"{len(ids)}, the last {int(ids[-1])}"
            )
        frequencies, self._rope_factor = config.rotary()
        self.register_buffer("token_ids", ids, persistent=False)
        self.register_buffer("_frequencies", torch.from_numpy(frequencies), persistent=False)

    def turn(self, positions: Tensor) -> Tensor:
        """float32 [..., dim]: the cosines and then the sines of the rotary embedding at positions [...]."""
        angle = positions[..., None].float() * self._frequencies
        return torch.cat([angle.cos(), angle.sin()], -1) * self._rope_factor


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """x [..., dim], its halves turned as in Llama. turn: of `HeadModule.turn`, broadcast to x."""
    cosine, sine = turn.to(x.dtype).chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class HeadAttention(nn.Module):
    """width: of what it reads. bias: of all linears but the last. norms: of each head's queries and keys."""

    def __init__(self, config: HeadShape, width: int, *, bias: bool = False, norms: bool = False) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=bias)
        self.k_proj = nn.Linear(width, keys, bias=bias)
        self.v_proj = nn.Linear(width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        if norms:
            self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)

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


class KeysValues(NamedTuple):
    """Rotated keys, and values, of pairs: both [batch, kv_head, pair, head_dim]."""

    keys: Tensor
    values: Tensor

    def then(self, more: KeysValues) -> KeysValues:
        """Both, one after the other."""
        return KeysValues(torch.cat([self.keys, more.keys], 2), torch.cat([self.values, more.values], 2))


class EagleLayer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        if not config.eagle1:
            self.input_layernorm = nn.RMSNorm(size, eps)  # of the token's embedding
            self.hidden_norm = nn.RMSNorm(size, eps)  # of g
        self.self_attn = HeadAttention(config, size if config.eagle1 else 2 * size, bias=config.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = HeadMLP(config)


class Eagle(HeadModule):
    """EAGLE-3, EAGLE-3.1 and EAGLE-1, by the flags of their config; the slow twin of `PairModel`.

    The embedding is the target's, and no optimiser should change it: other engines take the target's too. `lm_head` has one row
    for each token of the draft vocabulary. token_ids: see `HeadModule`.
    """

    config: EagleConfig
    layers: Any
    input_norm: Any
    fc_norm: Any

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
        self.layers = nn.ModuleList([EagleLayer(config)])
        if not config.eagle1:
            self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)

    @classmethod
    def of(cls, read: HeadWeights[EagleConfig], embedding: Tensor) -> Eagle:
        """A head that was read, float32. embedding: float [vocab, hidden], the target's; used if the head has none.

        Raises ValueError for a head that cannot be trained."""
        check_trainable(read.config)
        head = cls(read.config, torch.from_numpy(read.token_ids))
        tensors = {n: floats(t) for n, t in read.tensors.items()}
        head.load_state_dict({EMBED: embedding.float()} | tensors)
        return head

    def weights(self, *, embedding: bool = False) -> HeadWeights[EagleConfig]:
        """The head as it is now, float32. embedding: with its table of tokens; without one, engines take the target's."""
        tensors = {n: stored(t) for n, t in self.state_dict().items() if embedding or n != EMBED}
        return HeadWeights(self.config, tensors, stored(self.token_ids))

    @property
    def layer(self) -> EagleLayer:
        return self.layers[0]

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


class BlockAttention(HeadAttention):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, config.hidden_size, norms=True)
        self.kv_heads = config.num_key_value_heads

    def forward(self, y: Tensor, context: Tensor, visible: Tensor, own_turn: Tensor, context_turn: Tensor) -> Tensor:
        """[batch, anchor, slot, hidden] of normed states y of that shape.

        Args:
            y: See above.
            context: [batch, n, hidden], the projected features.
            visible: bool [batch, anchor, n].
            own_turn: Turns of the slots, [batch, anchor, slot, 1, dim].
            context_turn: Turns of the features, [n, 1, dim].
        """
        batch, anchors, slots, _ = y.shape
        d, kv = self.head_dim, self.kv_heads
        query = turned(self.q_norm(self.q_proj(y).unflatten(-1, (-1, d))), own_turn) * d**-0.5
        own_key = turned(self.k_norm(self.k_proj(y).unflatten(-1, (-1, d))), own_turn)
        own_value = self.v_proj(y).unflatten(-1, (-1, d))
        key = turned(self.k_norm(self.k_proj(context).unflatten(-1, (-1, d))), context_turn).transpose(1, 2)
        value = self.v_proj(context).unflatten(-1, (-1, d)).transpose(1, 2)
        # the query heads of a key head are rows of one product: [batch, kv, anchor, slot * group, dim]
        rows = query.unflatten(3, (kv, -1)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
        to_text = rows.flatten(2, 3) @ key.transpose(-1, -2)
        to_text = to_text.unflatten(2, (anchors, -1)).masked_fill(~visible[:, None, :, None], -math.inf)
        to_block = rows @ own_key.permute(0, 3, 1, 4, 2)
        shares = torch.cat([to_text, to_block], -1).softmax(-1).to(value.dtype)
        of_text, of_block = shares.split([key.shape[2], slots], -1)
        out = (of_text.flatten(2, 3) @ value).unflatten(2, (anchors, -1)) + of_block @ own_value.permute(0, 3, 1, 2, 4)
        heads = out.unflatten(3, (slots, -1)).permute(0, 2, 3, 1, 4, 5)
        return self.o_proj(heads.reshape(batch, anchors, slots, -1))


class BlockLayer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = HeadMLP(config)

    def forward(self, s: Tensor, *attended: Tensor) -> Tensor:
        """[batch, anchor, slot, hidden] of states s of that shape. attended: as of `BlockAttention`."""
        s = s + self.self_attn(self.input_layernorm(s), *attended)
        return s + self.mlp(self.post_attention_layernorm(s))


class MarkovHead(nn.Module):
    """A bias of the logits by the token before."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Estimates how likely a slot's token is accepted, once the slot is reached."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        seen = config.markov_rank if config.confidence_markov else 0
        self.proj = nn.Linear(config.hidden_size + seen, 1)


class BlockModule(HeadModule):
    """DFlash, and DSpark with `markov_rank`. Embedding and output head are frozen.

    Args:
        config: Its settings.
        token_ids: See `HeadModule`.
        embedding: float [vocab, hidden]; None leaves the parameter unset.
        output: float [draft_vocab, hidden], the rows of `token_ids`; None leaves the parameter unset.
    """

    config: BlockConfig

    def __init__(
        self,
        config: BlockConfig,
        token_ids: Tensor | None = None,
        embedding: Tensor | None = None,
        output: Tensor | None = None,
    ) -> None:
        super().__init__(config, token_ids)
        size, eps = config.hidden_size, config.rms_norm_eps
        table = torch.empty(config.vocab_size, size) if embedding is None else embedding.float()
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=True)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False).requires_grad_(False)
        if output is not None:
            self.lm_head.weight.copy_(output)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None

    @classmethod
    def of(cls, read: HeadWeights[BlockConfig], embedding: Tensor, output: Tensor) -> BlockModule:
        """A drafter that was read. embedding, output: the target's, for what the drafter has not of its own."""
        tensors = {EMBED: embedding, OUTPUT: output} | {n: floats(t) for n, t in read.tensors.items()}
        module = cls(read.config, torch.from_numpy(read.token_ids), tensors[EMBED], tensors[OUTPUT])
        module.load_state_dict(tensors)
        return module

    def initialise_(self) -> BlockModule:
        """Ready to be trained: the layers, the bias and the confidence add nothing yet."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not parameter.requires_grad or parameter.dim() != 2:
                    continue
                if name.endswith(
                    ("o_proj.weight", "down_proj.weight", "markov_w2.weight", "confidence_head.proj.weight")
                ):
                    parameter.zero_()
                else:
                    parameter.normal_(std=START * min(1.0, math.sqrt(1024 / parameter.shape[1])))
        return self

    def forward(self, roots: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """[batch, anchor, slot, hidden], after the final norm: the blocks after some positions of a text.

        Args:
            roots: int64 [batch, anchor], the token after each anchor.
            features: [batch, n, taps * target_hidden].
            anchors: int64 [batch, anchor], the last position that a block sees.
        """
        c, device = self.config, roots.device
        context = self.hidden_norm(self.fc(features))
        slots, places = torch.arange(c.block_size, device=device), torch.arange(features.shape[1], device=device)
        ids = torch.where(slots == 0, roots[..., None], c.mask_token_id)
        s = self.embed_tokens(ids).to(context.dtype)
        visible = places <= anchors[..., None]
        block, text = (self.turn(at)[..., None, :] for at in (anchors[..., None] + 1 + slots, places))  # for all heads
        for layer in self.layers:
            s = layer(s, context, visible, block, text)
        return self.norm(s)

    def drafts(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(logits [batch, anchor, draft_vocab], confidence [batch, anchor] before its sigmoid or None) of each draft token.

        Token k at anchor t is about token t + 2 + k of the text, and follows the text's own token before it. tokens: int64
        [batch, n], with one token more than the features of the last anchor.
        """
        z = self(tokens.gather(1, anchors + 1), features, anchors)
        first = 0 if self.config.from_anchor else 1
        for k in range(self.config.drafts):
            row = z[:, :, first + k]
            logits, seen = self.lm_head(row), None
            if self.markov_head is not None:
                seen = self.markov_head.markov_w1(tokens.gather(1, anchors + 1 + k))
                logits = logits + self.markov_head.markov_w2(seen)
            sure = None
            if self.confidence_head is not None:  # it learns from the states, and they do not learn from it
                read = row if seen is None or not self.config.confidence_markov else torch.cat([row, seen], -1)
                sure = self.confidence_head.proj(read.detach())[..., 0]
            yield logits, sure

    def weights(self, before: HeadWeights[BlockConfig] | None = None) -> HeadWeights[BlockConfig]:
        """The drafter as it is now, float32. before: what it was made of; tables that it lacks are left out again.

        Without it, the output head is kept if it has not a row for each token of the target.
        """
        left_out = {EMBED, OUTPUT}
        if before is not None:
            left_out -= before.tensors.keys()
        elif self.config.draft_vocab_size < self.config.vocab_size:
            left_out = {EMBED}
        tensors = {n: stored(t) for n, t in self.state_dict().items() if n not in left_out}
        return HeadWeights(self.config, tensors, stored(self.token_ids))


class MedusaModule(nn.Module):
    """The heads in plain torch, to be trained, and the slow twin of `MedusaModel`. The output matrices stay as they are.

    start: the heads to begin with. rows: float [kept, hidden], the target's output rows, for heads without any of their own.
    """

    def __init__(self, start: MedusaWeights, rows: Tensor) -> None:
        super().__init__()
        self._start = start
        self.blocks = nn.ModuleList(nn.ModuleList(_linear(*block) for block in blocks) for blocks in start.blocks)
        outputs = [*map(floats, start.outputs)] or [rows.float()]
        self.outputs = nn.ParameterList([nn.Parameter(m, requires_grad=False) for m in outputs])

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """[..., kept] of states [..., hidden], which the target's output head reads."""
        z, blocks = hidden, cast("nn.ModuleList", self.blocks[head])
        for block in blocks:
            z = z + F.silu(block(z))
        return (z @ self.outputs[min(head, len(self.outputs) - 1)].T) * self._start.logit_scale

    def weights(self) -> MedusaWeights:
        """The heads as they are now, float32."""
        trained = [
            [(stored(b.weight), None if b.bias is None else stored(b.bias)) for b in blocks]  # pyright: ignore
            for blocks in self.blocks  # pyright: ignore[reportGeneralTypeIssues]
        ]
        return replace(self._start, blocks=trained)


def _linear(weight: Array, bias: Array | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.load_state_dict({"weight": floats(weight)} | ({} if bias is None else {"bias": floats(bias)}))
    return linear
