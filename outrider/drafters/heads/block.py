"""Drafts a block of tokens in one forward: DFlash, DFlash2 with its convolutions and its choice among candidates, and DSpark
with its Markov bias and its confidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.block_files import BlockConfig, read_block
from outrider.drafters.heads.features import HELD, FeatureCache
from outrider.drafters.heads.lattice import Lattice
from outrider.drafters.heads.layers import Linears, PackedLayer, Rotary, precision_of
from outrider.drafters.heads.reading import OUTPUT, HeadWeights
from outrider.drafters.heads.selftest import head_drafter, parallel_survival
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.base import LanguageModel
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.nodes import Nodes

Wrap = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


def _bare(x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    return part(x)


class BlockModel:
    """The layers of a block drafter on packed weights. A slot's cells hold each layer's keys and values of the text's features.

    weight_bytes: that a draft of all depths reads, a share of it for each depth.
    """

    def __init__(
        self, head: HeadWeights[BlockConfig], target: LanguageModel, max_length: int, quantization: str = "auto"
    ) -> None:
        config, tensors = head.config, head.tensors
        self.config, self.device = config, target.device
        self.max_length = min(max_length, config.max_position_embeddings, HELD)
        self._target, self._wide = target, len(config.taps) * config.target_hidden_size
        precision = precision_of(quantization, [t for t in tensors.values() if t.dim() == 2])
        linears = Linears(self.device, precision, tensors, config.rms_norm_eps)
        self._fc = linears.named("fc")
        self._context_norm, self._norm = linears.norm("hidden_norm"), linears.norm("norm")
        read_once = linears.bytes
        self._layers = [PackedLayer(linears, i, "q", "kv") for i in range(config.num_layers)]
        self._lm_head = linears.named("lm_head") if OUTPUT in tensors else target.output_head
        self._embedding = None if head.own_embedding is None else head.own_embedding.to(self.device)
        self.weight_bytes = (linears.bytes - read_once) // config.drafts
        self._markov = self._confidence = self._selector = None
        self._convolutions = [self._wraps(linears, tensors, i) for i in range(config.num_layers)]
        if config.markov_rank:
            first, second = (tensors[f"markov_head.markov_w{n}.weight"].to(self.device) for n in (1, 2))
            self._markov = first, second.float()
        if config.confidence:
            weight, bias = (tensors[f"confidence_head.proj.{n}"].float().to(self.device) for n in ("weight", "bias"))
            self._confidence = weight[0], bias
        if config.selector_rank:
            names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
            before, after, project = (tensors[f"candidate_selector.{n}"].float().to(self.device) for n in names)
            self._selector = before, after, project
        self._rotary = Rotary(config, self.max_length + SCRATCH + config.block_size, self.device)

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, min(max_length, self.max_length))

    def read(self, cache: SlotCache, slot: int, features: Tensor) -> None:
        """Commit the keys and values of features [position, taps * target_hidden] that follow those of the slot."""
        start, count = cache.length[slot], len(features)
        cache.reserve([slot], count + self.config.block_size)
        context = self._context_norm(self._fc(features.float()))
        positions = torch.arange(start, start + count, device=self.device)
        for i, layer in enumerate(self._layers):
            self._write(cache, i, slot, start, *self._keys_values(layer, context, positions))
        cache.commit([slot], [range(count)])

    def forward(self, nodes: Nodes, *, want: str = "none") -> None:
        """Read nodes without features, as the engine does to see what a cache takes. want: as a language model has it."""
        for slot in nodes.slots:
            length = nodes.cache.length[slot]
            self.read(nodes.cache, slot, torch.zeros(nodes.count, self._wide, device=self.device))
            nodes.cache.keep(slot, length)

    def block(self, cache: SlotCache, slots: Sequence[int], roots: Sequence[int]) -> Tensor:
        """float32 [batch, slot, hidden], after the final norm: the block after each root. Attention within it looks both ways."""
        c, size = self.config, self.config.block_size
        cache.reserve(slots, size)
        ids = torch.full((len(slots), size), c.mask_token_id, device=self.device)
        ids[:, 0] = torch.tensor(list(roots), device=self.device)
        s = self._target.embedding_rows(ids) if self._embedding is None else self._embedding[ids].float()
        lengths = [cache.length[slot] for slot in slots]
        positions = torch.tensor(lengths, device=self.device)[:, None] + torch.arange(size, device=self.device)
        for i, layer in enumerate(self._layers):
            wrap_attention, wrap_mlp = self._convolutions[i]
            s = s + wrap_attention(
                layer.input_layernorm(s), partial(self._attended, i, cache, slots, lengths, positions)
            )
            s = s + wrap_mlp(layer.post_attention_layernorm(s), layer.mlp)
        return self._norm(s)

    def _attended(
        self, i: int, cache: SlotCache, slots: Sequence[int], lengths: Sequence[int], positions: Tensor, y: Tensor
    ) -> Tensor:
        """What the attention of a layer makes of normed states [batch, slot, hidden] of the blocks."""
        c, size, layer = self.config, self.config.block_size, self._layers[i]
        query = self._rotary(layer.q_norm(layer.reads[0](y).unflatten(-1, (-1, c.head_dim))), positions)
        key, value = self._keys_values(layer, y, positions)
        attended: list[Tensor] = []
        for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            self._write(cache, i, slot, length, key[b], value[b])  # scratch, overwritten by the next read
            keys, values = (t[slot : slot + 1, :, : length + size] for t in cache.layers[i])
            out = F.scaled_dot_product_attention(
                query[b : b + 1].transpose(1, 2), keys, values, scale=c.head_dim**-0.5, enable_gqa=True
            )
            attended.append(out.transpose(1, 2).flatten(2))
        return layer.out(torch.cat(attended))

    def _wraps(self, linears: Linears, tensors: Mapping[str, Tensor], i: int) -> tuple[Wrap, Wrap]:
        """What stands around attention and MLP of a layer: convolutions in DFlash2, else nothing."""
        if not self.config.conv_kernel_size:
            return _bare, _bare
        names = [f"layers.{i}.{part}_conv" for part in ("attention", "mlp")]
        convolutions = [
            partial(
                around, linears.named(f"{n}.kernel_projection"), tensors[f"{n}.base_kernel"].float().to(self.device)
            )
            for n in names
        ]
        return convolutions[0], convolutions[1]

    def logits(self, z: Tensor) -> Tensor:
        """float32 [..., kept]."""
        return self._lm_head(z)

    def bias(self, z: Tensor, token: int, places: Tensor | None) -> Tensor:
        """float32 [kept]: of a slot's logits after a token. z: float32 [hidden], of the slot. places: some of the columns."""
        if self._selector is not None:
            before, after, project = self._selector
            return (after if places is None else after[places]) @ (before[token] * (project @ z))
        assert self._markov is not None
        first, second = self._markov
        return (second if places is None else second[places]) @ first[token].float()

    def log_confidence(self, z: Tensor, token: int) -> float:
        """Log probability that the token of a slot is right, given that the slot is reached. z: float32 [hidden], of the slot."""
        if self._confidence is None:
            return 0.0
        weight, bias = self._confidence
        if self.config.confidence_markov and self._markov is not None:
            z = torch.cat([z, self._markov[0][token].float()])
        return -math.log1p(math.exp(-float((weight @ z + bias).clamp(-30, 30))))

    def _keys_values(self, layer: PackedLayer, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Both [..., kv_head, head_dim]."""
        key, value = layer.reads[1](x).unflatten(-1, (2, -1, self.config.head_dim)).unbind(-3)
        return self._rotary(layer.k_norm(key), positions), value

    def _write(self, cache: SlotCache, i: int, slot: int, start: int, key: Tensor, value: Tensor) -> None:
        """key, value: [position, kv_head, head_dim]."""
        shape = key.shape[1], key.shape[2]
        for stored, new in zip(cache.layer(i, shape, shape, key), (key, value), strict=True):
            stored[slot, :, start : start + len(new)] = new.transpose(0, 1)


def convolved(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """A causal convolution over the slots of a block, each with a kernel of its own (DFlash2).

    x: [..., slot, hidden]. base: [tap, hidden]. delta: [..., slot, tap, group], what is added to the kernel of each slot.
    """
    kernel = base + delta.repeat_interleave(x.shape[-1] // delta.shape[-1], -1)
    shifted = (F.pad(x, (0, 0, tap, 0))[..., : x.shape[-2], :] * kernel[..., tap, :] for tap in range(len(base)))
    return sum(shifted, torch.zeros_like(x))


def around(projection: Callable[[Tensor], Tensor], base: Tensor, x: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """A part of a layer between two convolutions. base: [2, tap, hidden]."""
    before, after = projection(x).unflatten(-1, (2, base.shape[1], -1)).unbind(-3)
    return convolved(part(convolved(x, base[0], before)), base[1], after)


class BlockLattice(Lattice):
    """Levels of a block over [root, mask, ...]. The cache holds features of committed tokens only.

    Attributes:
        model: the layers.
        cache: keys and values of the features of each text.
        hidden: float32 [line, drafts, hidden], of the last block of each line.
    """

    def __init__(
        self,
        head: HeadWeights[BlockConfig],
        target: LanguageModel,
        num_slots: int,
        max_length: int,
        quantization: str = "auto",
    ) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each."""
        config, self.model = head.config, BlockModel(head, target, max_length, quantization)
        self.cache = self.model.new_cache(num_slots, max_length)
        self.features, self.taps = FeatureCache(self.cache, pairs=False), config.taps
        super().__init__(config.vocab_size, target.device, config.drafts, head.subset(target.device))
        self.first_order = config.markov_rank + config.selector_rank > 0
        self.learns = not self.first_order
        self.hidden = torch.empty(0)

    def logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Tensor:
        for slot in slots:
            if waiting := self.features.waiting.get(slot):
                self.model.read(self.cache, slot, self.features.joined(slot))
                waiting.keep(0)
        z = self.model.block(self.cache, slots, [tokens[-1] for tokens in texts])
        first = 0 if self.model.config.from_anchor else 1
        self.hidden = z[:, first : first + depth].contiguous()
        return self.model.logits(self.hidden)

    def after_token(self, line: int, level: int, token: int, logits: Tensor, places: Tensor | None) -> Tensor:
        return logits + self.model.bias(self.hidden[line, level], token, places)

    def possible(self, logits: Tensor) -> Tensor | None:
        count = min(self.model.config.candidates, len(logits))
        return logits.topk(count).indices.sort().values if count else None

    def log_confidence(self, line: int, level: int, token: int) -> float:
        return self.model.log_confidence(self.hidden[line, level], token)


def from_setup(setup: DrafterSetup) -> TreeDrafter[BlockLattice]:
    return head_drafter(setup, read_block, BlockLattice, {"from_anchor": "sample_from_anchor"}, parallel_survival)
