"""A block drafter: its settings, and the module that is trained, which is the slow twin of the drafter on packed weights.

The block after position t holds the token x_{t+1} and masks. It attends to itself in both directions, and to the features of
positions 0 to t. The names of the parameters are those of speculators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from outrider.drafters.heads.config import HeadShape
from outrider.drafters.heads.layers import START, HeadAttention, HeadMLP, HeadModule, turned
from outrider.drafters.heads.reading import EMBED, OUTPUT, HeadWeights


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadShape):
    """A block drafter: Qwen3-shaped layers over [root, mask, ...], which also attend to the projected features of the text."""

    block_size: int  # slots of a block
    mask_token_id: int  # the token of all slots but the first
    from_anchor: bool  # slot 0 drafts too (DSpark); in DFlash slot k drafts the token at its own position
    markov_rank: int = 0  # width of the bias by the token before; 0 without one
    confidence: bool = False  # it has a confidence head
    confidence_markov: bool = False  # the confidence reads the token before, too
    conv_kernel_size: int = 0  # taps of the convolutions around attention and MLP (DFlash2); 0 without
    conv_group_size: int = 16  # numbers that share a kernel
    selector_rank: int = 0  # width of DFlash2's choice among the likeliest tokens; 0 without
    selector_top_k: int = 16  # so many likeliest tokens

    @property
    def drafts(self) -> int:
        """Draft tokens of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def candidates(self) -> int:
        """The likeliest tokens of a slot, among which the token before chooses; 0 for all tokens."""
        return self.selector_top_k if self.selector_rank else 0


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


def convolved(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """A causal convolution over the slots of a block, each with a kernel of its own (DFlash2).

    x: [..., slot, hidden]. base: [tap, hidden]. delta: [..., slot, tap, group], what is added to the kernel of each slot.
    """
    kernel = base + delta.repeat_interleave(x.shape[-1] // delta.shape[-1], -1)
    shifted = (F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :] * kernel[..., tap, :] for tap in range(len(base)))
    return sum(shifted, torch.zeros_like(x))


class BlockConvolution(nn.Module):
    """The convolutions before and after a part of a layer. One projection of the part's input gives both kernels."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        taps, size = config.conv_kernel_size, config.hidden_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // config.conv_group_size), bias=False)

    def forward(self, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """What the part makes of x, [..., slot, hidden]."""
        return around(self.kernel_projection, self.base_kernel, x, part)


def around(projection: Callable[[Tensor], Tensor], base: Tensor, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """A part of a layer between two convolutions. base: [2, tap, hidden]."""
    before, after = projection(x).unflatten(-1, (2, base.shape[1], -1)).unbind(-3)
    return convolved(part(convolved(x, base[0], before)), base[1], after)


class CandidateSelector(nn.Module):
    """DFlash2's score of a token after another one, added to the logits of the likeliest tokens."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)


class BlockLayer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.attention_conv = BlockConvolution(config) if config.conv_kernel_size else None
        self.mlp_conv = BlockConvolution(config) if config.conv_kernel_size else None
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = HeadMLP(config)

    def forward(self, s: Tensor, attend: Callable[[Any, Tensor], Tensor]) -> Tensor:
        """[..., slot, hidden] of states s of that shape. attend: what the attention makes of normed states."""

        def attended(y: Tensor) -> Tensor:
            return attend(self.self_attn, y)

        y = self.input_layernorm(s)
        s = s + (attended(y) if self.attention_conv is None else self.attention_conv(y, attended))
        y = self.post_attention_layernorm(s)
        return s + (self.mlp(y) if self.mlp_conv is None else self.mlp_conv(y, self.mlp))


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
    """DFlash, DSpark with `markov_rank`, and DFlash2 with `selector_rank`. Embedding and output head are frozen.

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
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None

    @classmethod
    def of(cls, given: HeadWeights[BlockConfig], embedding: Tensor, output: Tensor) -> BlockModule:
        """A drafter that was read. embedding, output: the target's, for what the drafter has not of its own."""
        tensors = {EMBED: embedding, OUTPUT: output} | given.tensors
        module = cls(given.config, given.token_ids, tensors[EMBED], tensors[OUTPUT])
        module.load_state_dict({n: t.float() for n, t in tensors.items()})
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
        layers: Any = self.layers
        for layer in layers:
            s = layer(s, lambda attention, y: attention(y, context, visible, block, text))
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

    def weights(self, stored: HeadWeights[BlockConfig] | None = None) -> HeadWeights[BlockConfig]:
        """The drafter as it is now, float32. stored: what it was made of; tables that it lacks are left out again.

        Without `stored`, the output head is kept if it has not a row for each token of the target.
        """
        left_out = {EMBED, OUTPUT}
        if stored is not None:
            left_out -= stored.tensors.keys()
        elif self.config.draft_vocab_size < self.config.vocab_size:
            left_out = {EMBED}
        tensors = {n: t.detach().cpu() for n, t in self.state_dict().items() if n not in left_out}
        return HeadWeights(self.config, tensors, self.token_ids.cpu())
