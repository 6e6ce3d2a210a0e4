"""Trained drafters of a block of tokens in one forward: DFlash (arXiv 2602.06036), DFlash2 with its convolutions and its choice
among candidates, and DSpark with its Markov bias and its confidence.

The folders are as speculators, z-lab, Model-Optimizer, DeepSpec and transformers write them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.types import Array
from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.config import HeadShape, setting
from outrider.drafters.heads.features import HELD, FeatureCache
from outrider.drafters.heads.files import DFLASH, DFLASH2, DSPARK, settings_named
from outrider.drafters.heads.lattice import Lattice
from outrider.drafters.heads.layers import Linears, precision_of, silu
from outrider.drafters.heads.reading import OUTPUT, HeadReader, HeadWeights, layer_shapes
from outrider.drafters.heads.selftest import head_drafter, parallel_survival
from outrider.drafters.model.grower import TreeDrafter
from outrider.kernels import cpu as native
from outrider.models.base import LanguageModel
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadShape):
    """A block drafter: Qwen3-shaped layers over [root, mask, ...], which also attend to the projected features of the text."""

    block_size: int = setting(0)  # slots of a block
    mask_token_id: int  # the token of all slots but the first
    # slot 0 drafts too (DSpark); in DFlash slot k drafts the token at its own position
    from_anchor: bool = setting(key="sample_from_anchor")
    markov_rank: int = setting(0)  # width of the bias by the token before; 0 without one
    confidence: bool = setting(False, key="enable_confidence_head")  # it has a confidence head
    # the confidence reads the token before, too
    confidence_markov: bool = setting(True, key="confidence_head_with_markov")
    conv_kernel_size: int = 0  # taps of the convolutions around attention and MLP (DFlash2); 0 without
    conv_group_size: int = 16  # numbers that share a kernel
    selector_rank: int = 0  # width of DFlash2's choice among the likeliest tokens; 0 without
    selector_top_k: int = setting(16)  # so many likeliest tokens

    @property
    def drafts(self) -> int:
        """Draft tokens of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def candidates(self) -> int:
        """The likeliest tokens of a slot, among which the token before chooses; 0 for all tokens."""
        return self.selector_top_k if self.selector_rank else 0


def block_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a drafter, as speculators names them, without embedding and output head: a file may leave them out."""
    c, size, wide = config, config.hidden_size, len(config.taps) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, wide),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    if c.markov_rank:
        shapes["markov_head.markov_w1.weight"] = (c.vocab_size, c.markov_rank)
        shapes["markov_head.markov_w2.weight"] = (c.draft_vocab_size, c.markov_rank)
    if c.confidence:
        shapes["confidence_head.proj.weight"] = (1, size + (c.markov_rank if c.confidence_markov else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if c.selector_rank:
        tables = {f"{n}_codebook": (c.vocab_size, c.selector_rank) for n in ("predecessor", "successor")}
        tables["hidden_projection.weight"] = (c.selector_rank, size)
        shapes |= {f"candidate_selector.{n}": shape for n, shape in tables.items()}
    for i in range(c.num_layers):
        shapes |= layer_shapes(c, i, size, norms=True)
        for part in ("attention", "mlp") if c.conv_kernel_size else ():
            name, rows = f"layers.{i}.{part}_conv", 2 * c.conv_kernel_size * (size // c.conv_group_size)
            shapes[f"{name}.base_kernel"] = (2, c.conv_kernel_size, size)
            shapes[f"{name}.kernel_projection.weight"] = (rows, size)
    return shapes


@settings_named
def read_block(folder: str | Path, target: Loaded) -> HeadWeights[BlockConfig]:
    """Read a DFlash, DFlash2 or DSpark drafter. Raises ValueError, naming both sides, for what does not fit."""
    reader = HeadReader(folder, target, DFLASH, DFLASH2, DSPARK)
    config, tensors = _config(reader), reader.tensors
    reader.check_whole(block_shapes(config), "block drafter")
    ids = reader.token_ids(config.vocab_size, config.draft_vocab_size)
    if OUTPUT in reader.spare or len(ids) < config.vocab_size:
        tensors[OUTPUT] = reader.output_rows(config.hidden_size, ids)
    return HeadWeights(config, tensors | reader.own_embedding(config.hidden_size), ids)


def _config(reader: HeadReader) -> BlockConfig:
    path, tensors = reader.path, reader.tensors
    settings = {"sample_from_anchor": reader.kind == DSPARK} | reader.given | (reader.given.get("dflash_config") or {})
    markov = tensors.get("markov_head.markov_w1.weight")
    settings["markov_rank"] = 0 if markov is None else markov.shape[1]
    settings["enable_confidence_head"] = "confidence_head.proj.weight" in tensors
    shape = reader.shape(settings, BlockConfig) | _convolutions(reader)
    if reader.kind == DFLASH2:
        [codebook] = reader.needed("candidate_selector.successor_codebook")
        shape["selector_rank"] = codebook.shape[1]
    if settings.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(
            f"{path} has a Markov head of the kind {settings['markov_head_type']!r}; outrider runs 'vanilla'"
        )
    if shape["block_size"] < 2:
        raise ValueError(f"{path}: block_size is {shape['block_size']}; a block has two slots or more")
    layers = 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("layers."))
    if int(settings.get("num_hidden_layers", layers)) != layers:
        raise ValueError(f"{path} has {layers} layers, and config.json says {settings['num_hidden_layers']}")
    taps = _taps(reader, settings, shape["target_hidden_size"])
    return reader.made(BlockConfig, **shape, taps=taps, num_layers=layers, mask_token_id=reader.mask(settings))


def _convolutions(reader: HeadReader) -> dict[str, int]:
    """Their shapes; nothing for a drafter without them."""
    names = (f"layers.0.attention_conv.{n}" for n in ("base_kernel", "kernel_projection.weight"))
    base, rows = (reader.tensors.get(name) for name in names)
    if base is None or rows is None:
        return {}
    groups = len(rows) // (2 * base.shape[1])
    return {"conv_kernel_size": base.shape[1], "conv_group_size": base.shape[2] // max(groups, 1)}


def _taps(reader: HeadReader, given: Mapping[str, Any], wide: int) -> tuple[int, ...]:
    """speculators counts states before a layer, all others outputs of layers, where -1 is the embedding."""
    outputs, before = given.get("target_layer_ids"), given.get("aux_hidden_state_layer_ids")
    if before is None and outputs is None:
        raise ValueError(f"{reader.path} names no layers of its target: target_layer_ids or aux_hidden_state_layer_ids")
    if before is not None:
        return reader.taps("aux_hidden_state_layer_ids", [int(i) for i in before], wide)
    ids = [int(i) + 1 for i in outputs or ()]
    return reader.taps("target_layer_ids (it counts outputs of layers, one less)", ids, wide)


Part = Callable[[Array], Array]
Wrap = Callable[[Array, Part], Array]


class PackedLayer:
    """A layer on packed weights."""

    def __init__(self, linears: Linears, i: int, config: BlockConfig) -> None:
        attention, layer = f"layers.{i}.self_attn", f"layers.{i}"
        self.query = linears.named(f"{attention}.q_proj")
        self.keys_values = linears.named(f"{attention}.k_proj", f"{attention}.v_proj")
        self.out = linears.named(f"{attention}.o_proj")
        self._gate_up = linears.named(f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj")
        self._down, self._inner = linears.named(f"{layer}.mlp.down_proj"), config.intermediate_size
        self.q_norm, self.k_norm = linears.norm(f"{attention}.q_norm"), linears.norm(f"{attention}.k_norm")
        self.input_layernorm = linears.norm(f"{layer}.input_layernorm")
        self.post_attention_layernorm = linears.norm(f"{layer}.post_attention_layernorm")
        self.wrap_attention: Wrap = lambda x, part: part(x)
        self.wrap_mlp = self.wrap_attention
        if config.conv_kernel_size:
            self.wrap_attention, self.wrap_mlp = (_around(linears, f"{layer}.{p}_conv") for p in ("attention", "mlp"))

    def mlp(self, x: Array) -> Array:
        """[..., hidden] of a normed state of that shape."""
        both = self._gate_up(x)
        return self._down(silu(both[..., : self._inner]) * both[..., self._inner :])


class BlockModel:
    """The layers of a block drafter on packed weights. A slot's cells hold each layer's keys and values of the text's features.

    weight_bytes: that a draft of all depths reads, a share of it for each depth.
    """

    def __init__(
        self, head: HeadWeights[BlockConfig], target: LanguageModel, max_length: int, quantization: str = "auto"
    ) -> None:
        config, tensors = head.config, head.tensors
        self.config = config
        self.max_length = min(max_length, config.max_position_embeddings, HELD)
        self._wide = len(config.taps) * config.target_hidden_size
        linears = Linears(precision_of(quantization, tensors.values()), tensors, config.rms_norm_eps)
        self._fc = linears.named("fc")
        self._context_norm, self._norm = linears.norm("hidden_norm"), linears.norm("norm")
        read_once = linears.bytes
        self._layers = [PackedLayer(linears, i, config) for i in range(config.num_layers)]
        # float32 [..., kept] of states [..., hidden]
        self.logits = linears.named("lm_head") if OUTPUT in tensors else target.output_head
        own = head.own_embedding
        self._embedded: Part = target.embedding_rows if own is None else lambda ids: own[ids].astype(np.float32)
        self.weight_bytes = (linears.bytes - read_once) // config.drafts
        small = ("markov_head.markov_w2.", "confidence_head.", "candidate_selector.")
        self._tables = {n: t.astype(np.float32) for n, t in tensors.items() if n.startswith(small)}
        self._before = tensors.get("markov_head.markov_w1.weight")  # of the Markov head, by the token before
        frequencies, factor = config.rotary()
        length = self.max_length + SCRATCH + config.block_size
        angles = np.arange(length, dtype=np.float32)[:, None] * frequencies
        self._turns = np.cos(angles) * factor, np.sin(angles) * factor

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, min(max_length, self.max_length))

    def read(self, cache: SlotCache, slot: int, features: Array) -> None:
        """Commit the keys and values of features [position, taps * target_hidden] that follow those of the slot."""
        start, count = cache.length[slot], len(features)
        cache.reserve([slot], count + self.config.block_size)
        context, positions = self._context_norm(self._fc(features))[None], np.arange(start, start + count)
        for i in range(len(self._layers)):
            self._write(cache, i, [slot], [start], context, positions)
        cache.commit([slot], [range(count)])

    def forward(self, nodes: Nodes, *, want: str = "none") -> None:
        """Read nodes without features, as the engine does to see what a cache takes. want: as a language model has it."""
        for slot in nodes.slots:
            length = nodes.cache.length[slot]
            self.read(nodes.cache, slot, np.zeros((nodes.count, self._wide), np.float32))
            nodes.cache.keep(slot, length)

    def block(self, cache: SlotCache, slots: Sequence[int], roots: Sequence[int]) -> Array:
        """float32 [batch, slot, hidden], after the final norm: the block after each root. Attention within it looks both ways."""
        c, size = self.config, self.config.block_size
        cache.reserve(slots, size)
        ids = np.full((len(slots), size), c.mask_token_id)
        ids[:, 0] = roots
        s = self._embedded(ids)
        starts = [cache.length[slot] for slot in slots]
        positions = np.array(starts)[:, None] + np.arange(size)
        # one node at the end of each block sees all of it, and has the heads of all its slots
        plan = native.AttentionPlan(slots, [start + size - 1 for start in starts], 1)

        def attended(i: int, y: Array) -> Array:
            """What the attention of layer i makes of normed states [batch, slot, hidden] of the blocks."""
            layer = self._layers[i]
            self._write(cache, i, slots, starts, y, positions)  # in the scratch, which the next read overwrites
            query = self._turned(layer.q_norm(layer.query(y).reshape(*y.shape[:2], -1, c.head_dim)), positions)
            # the query heads of a key head are neighbours
            grouped = query.reshape(*y.shape[:2], c.num_key_value_heads, -1, c.head_dim).swapaxes(1, 2)
            one_node = grouped.reshape(len(y), 1, -1, c.head_dim)
            out = native.attention(plan, one_node, *cache.layers[i], native.Scoring(c.head_dim**-0.5))
            return layer.out(out.reshape(grouped.shape).swapaxes(1, 2).reshape(*y.shape[:2], -1))

        for i, layer in enumerate(self._layers):
            s = s + layer.wrap_attention(layer.input_layernorm(s), partial(attended, i))
            s = s + layer.wrap_mlp(layer.post_attention_layernorm(s), layer.mlp)
        return self._norm(s)

    def bias(self, z: Array, token: int, places: Array | None) -> Array:
        """float32 [kept]: of a slot's logits after a token. z: float32 [hidden], of the slot. places: some of the columns."""
        if self.config.selector_rank:
            names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
            before, table, project = (self._tables[f"candidate_selector.{n}"] for n in names)
            vector = before[token] * np.einsum("rh,h->r", project, z)  # one thread, other than a product
        else:
            assert self._before is not None
            table, vector = self._tables["markov_head.markov_w2.weight"], self._before[token].astype(np.float32)
        return np.einsum("nr,r->n", table if places is None else table[places], vector)

    def log_confidence(self, z: Array, token: int) -> float:
        """Log probability that the token of a slot is right, given that the slot is reached. z: float32 [hidden], of the slot."""
        if not self.config.confidence:
            return 0.0
        weight, bias = (self._tables[f"confidence_head.proj.{n}"] for n in ("weight", "bias"))
        if self.config.confidence_markov and self._before is not None:
            z = np.concatenate([z, self._before[token]])
        return -math.log1p(math.exp(-float(np.clip(weight[0] @ z + bias, -30, 30)[0])))

    def _turned(self, x: Array, positions: Array) -> Array:
        """x [..., head, dim], its halves turned as in Llama. positions: int64 [...]."""
        cosine, sine = (table[positions][..., None, :] for table in self._turns)
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)

    def _write(
        self, cache: SlotCache, i: int, slots: Sequence[int], starts: Sequence[int], x: Array, positions: Array
    ) -> None:
        """Write layer i's keys and values of normed states [batch, position, hidden], from a cell of each slot on."""
        layer = self._layers[i]
        both = layer.keys_values(x).reshape(*x.shape[:-1], 2, -1, self.config.head_dim)
        key, value = self._turned(layer.k_norm(both[..., 0, :, :]), positions), both[..., 1, :, :]
        shape = key.shape[2], key.shape[3]
        for stored, new in zip(cache.layer(i, shape, shape), (key, value), strict=True):
            for slot, start, some in zip(slots, starts, new, strict=True):
                stored[slot, :, start : start + len(some)] = some.swapaxes(0, 1)


def convolved(x: Array, base: Array, delta: Array) -> Array:
    """A causal convolution over the slots of a block, each with a kernel of its own (DFlash2).

    x: [..., slot, hidden]. base: [tap, hidden]. delta: [..., slot, tap, group], what is added to the kernel of each slot.
    """
    kernel = base + np.repeat(delta, x.shape[-1] // delta.shape[-1], -1)
    out = np.zeros_like(x)
    for tap in range(len(base)):
        out[..., tap:, :] += x[..., : x.shape[-2] - tap, :] * kernel[..., tap:, tap, :]
    return out


def _around(linears: Linears, name: str) -> Wrap:
    """A part of a layer between two convolutions (DFlash2)."""
    projection = linears.named(f"{name}.kernel_projection")
    base = linears.tensors[f"{name}.base_kernel"].astype(np.float32)

    def wrap(x: Array, part: Part) -> Array:
        both = projection(x).reshape(*x.shape[:-1], *base.shape[:2], -1)
        return convolved(part(convolved(x, base[0], both[..., 0, :, :])), base[1], both[..., 1, :, :])

    return wrap


class BlockLattice(Lattice):
    """Levels of a block over [root, mask, ...]. The cache holds features of committed tokens only.

    Attributes:
        model: the layers.
        cache: keys and values of the features of each text.
        hidden: float32 [line, drafts, hidden], of the last block of each line.
    """

    def __init__(self, head: HeadWeights[BlockConfig], model: BlockModel, num_slots: int, max_length: int) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each."""
        config, self.model = head.config, model
        self.cache = model.new_cache(num_slots, max_length)
        self.features, self.taps = FeatureCache(self.cache, pairs=False), config.taps
        super().__init__(config.vocab_size, config.drafts, head.subset)
        self.first_order = config.markov_rank + config.selector_rank > 0
        self.learns, self.candidates = not self.first_order, config.candidates
        self.hidden = np.empty(0)

    def logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Array:
        for slot in slots:
            if len(self.features.waiting.get(slot, ())):
                self.model.read(self.cache, slot, self.features.newest(slot))
                self.features.keep(slot, 0)
        z = self.model.block(self.cache, slots, [tokens[-1] for tokens in texts])
        first = 0 if self.model.config.from_anchor else 1
        self.hidden = np.ascontiguousarray(z[:, first : first + depth])
        return self.model.logits(self.hidden)

    def after_token(self, line: int, level: int, token: int, logits: Array, places: Array | None) -> Array:
        return logits + self.model.bias(self.hidden[line, level], token, places)

    def log_confidence(self, line: int, level: int, token: int) -> float:
        return self.model.log_confidence(self.hidden[line, level], token)


def from_setup(setup: DrafterSetup) -> TreeDrafter[BlockLattice]:
    return head_drafter(
        setup, read_block, BlockModel, BlockLattice, {"from_anchor": "sample_from_anchor"}, parallel_survival
    )
