"""The Llama family in one native call per forward: the same `LanguageModel`, without the modelling code.

Every row of a forward has the bits it would have alone: as a node of a tree, in a batch, in any chunk of a prompt. The
modelling code of transformers (`models/hf.py`) is the reference; the two agree to rounding, not to the bit.
"""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.kernels import cpu as native
from outrider.kernels.cpu.library import ChainsStruct, ChainStruct, ForwardStruct, LayerStruct, ModelStruct
from outrider.models.base import Output, Want
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes

_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GraniteForCausalLM")
_ACTIVATIONS = {"silu": 2, "swish": 2, "gelu_pytorch_tanh": 3}
_WANT = {"none": 0, "last": 1, "all": 2}
_FREE_OF_LENGTH = ("default", "linear", "llama3", "yarn")  # rotary types whose frequencies do not depend on the length


def supports(model: PreTrainedModel) -> str | None:
    """None if the native step can run this model, else the reason why not."""
    name, config = type(model).__name__, model.config
    if not native.available():
        return f"the native kernels are not to be had: {native.why()}"
    if name not in _FAMILY:
        return f"{name} is not one of {', '.join(_FAMILY)}"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in _FREE_OF_LENGTH:
        return f"its rotary embedding ({kind}) changes with the length of the text"
    if config.hidden_act not in _ACTIVATIONS:
        return f"its activation is {config.hidden_act}"
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            return f"its linears are {type(module).__name__}, not plain matrices"
    for p in model.parameters():
        if p.device.type != "cpu" or p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"a weight is {p.dtype} on {p.device}"
    return None


class Chain(NamedTuple):
    """What `LlamaModel.draft_chains` draws for a row. tokens: to ingest first, one at least. noise: (seed, stream, step,
    position) of the first drawn token, as `Noise.keys` gives them."""

    row: int
    tokens: Sequence[int]
    depth: int
    temperature: float = 0.0
    noise: tuple[int, int, int, int] = (0, 0, 0, 0)


class LlamaModel:
    """A Llama, Mistral, Qwen2, Qwen3 or Granite model, run by the native step.

    weights: float32, bfloat16, float16, int8 or int4; "auto" keeps the checkpoint's own. Quantised models keep the head
    (and an embedding that is tied to it) in int8; an embedding of its own stays as it is, since it costs no time.
    own: the weights of `model` may be freed as they are packed; it cannot be used afterwards.
    """

    def __init__(self, model: PreTrainedModel, weights: str = "auto", own: bool = False) -> None:
        reason = supports(model)
        if reason is not None:
            raise ValueError(f"the native step cannot run this model: {reason}; HFModel can")
        config: Any = model.config
        base: Any = model.model
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight  # pyright: ignore
        tied = embedding.data_ptr() == head.data_ptr()  # pyright: ignore[reportCallIssue]
        self.kind = str(embedding.dtype).removeprefix("torch.") if weights == "auto" else weights
        attention = base.layers[0].self_attn
        self.layers, self.hidden = len(base.layers), int(config.hidden_size)
        self.heads, self.kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self.dim = int(attention.head_dim)
        self.vocab_size, self.max_length = int(head.shape[0]), int(config.max_position_embeddings)
        self.device = torch.device("cpu")
        self.batch_invariant = True
        self._keep: list[Any] = []  # what the C structs point to
        layers = (LayerStruct * self.layers)(*(self._layer(layer, config, own) for layer in base.layers))
        rotary = base.rotary_emb
        inv_freq = rotary.inv_freq.detach().float().contiguous()
        top = self._packed(
            [model.get_output_embeddings()], "int8" if self.kind in ("int8", "int4") else self.kind, own and not tied
        )
        table = None if tied else embedding.detach().contiguous()  # pyright: ignore[reportCallIssue]
        if own and tied:
            _free(model.get_input_embeddings(), model.get_output_embeddings())
        self.struct = ModelStruct(
            layers=ctypes.addressof(layers),
            head=top,
            embedding=None if table is None else table.data_ptr(),
            final_norm=self._floats(base.norm.weight),
            inv_freq=inv_freq.data_ptr(),
            count=self.layers,
            hidden=self.hidden,
            intermediate=int(config.intermediate_size),
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=self.dim,
            rotary=2 * len(inv_freq),
            vocab=self.vocab_size,
            embedding_format=0 if table is None else native.FORMATS[str(table.dtype).removeprefix("torch.")],
            activation=_ACTIVATIONS[config.hidden_act],
            eps=float(config.rms_norm_eps),
            scale=float(attention.scaling),
            rope_factor=float(rotary.attention_scaling),
            embedding_factor=float(getattr(config, "embedding_multiplier", 1.0)),
            residual_factor=float(getattr(config, "residual_multiplier", 1.0)),
            logits_factor=1.0 / float(getattr(config, "logits_scaling", 1.0)),
        )
        self._keep += [layers, table, inv_freq, self.struct]
        library = native.library()
        self._structs, self._numbers = layers, range(self.layers)
        self._decoder = library.decoder_new(self.struct)
        self._forward, self._chains = library.forward, library.draft_chains
        self._tables: weakref.WeakKeyDictionary[SlotCache, tuple[list[Any], Any]] = weakref.WeakKeyDictionary()
        weakref.finalize(self, library.decoder_free, self._decoder)

    def part(self, layers: Sequence[int]) -> LlamaModel:
        """The same model with these of its layers only, over the same weights; it reads and writes those layers of the
        whole model's caches. See models/part.py."""
        out = copy.copy(self)
        out.layers, out._numbers = len(layers), list(layers)
        out._structs = (LayerStruct * len(layers))(*(self._structs[self._numbers.index(i)] for i in layers))
        out.struct = ModelStruct.from_buffer_copy(self.struct)
        out.struct.layers, out.struct.count = ctypes.addressof(out._structs), len(layers)
        library = native.library()
        out._decoder = library.decoder_new(out.struct)
        out._tables = weakref.WeakKeyDictionary()
        weakref.finalize(out, library.decoder_free, out._decoder)
        return out

    @property
    def bytes(self) -> int:
        """What a forward of one token reads: the packed weights."""
        return sum(p.bytes for p in self._keep if isinstance(p, native.Packed))

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, max_length)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`. A tap is a layer's number (its output), or -1 for what the head reads."""
        tokens, parents, slots, cache = nodes.tokens, nodes.parents, nodes.slots, nodes.cache
        batch, count = tokens.shape
        if len(slots) != batch or not tokens.numel():
            raise ValueError(
                f"tokens are {batch} x {count} for the cache slots {slots}: give each slot a line of one token at least"
            )
        if tokens.dtype != torch.int64 or not tokens.is_contiguous():
            tokens = tokens.long().contiguous()
        held = nodes.held
        if parents is not None:
            if parents.shape != (batch, held + count) or held < 0:
                raise ValueError(
                    f"tokens are {tuple(tokens.shape)}, parents {tuple(parents.shape)}; one parent per node, those that "
                    "stand in the scratch already first"
                )
            parents = parents.long().contiguous()
        table = self._table(cache, slots, held + count)
        shown = count if want == "all" else 1 if want == "last" else 0
        logits = torch.empty(batch, shown, self.vocab_size)
        features = None
        if taps:
            make = torch.empty if parents is None else torch.zeros
            features = make(batch, count, len(taps) * self.hidden)
            if not all(-1 <= t < self.layers for t in taps):
                raise ValueError(
                    f"taps are layers 0 to {self.layers - 1}, or -1 for the final norm's output; got {taps}"
                )
        ints = ctypes.c_int32 * batch
        slot, length, tap = ints(*slots), ints(*nodes.lengths), (ctypes.c_int32 * len(taps))(*taps)
        job = ForwardStruct(
            tokens.data_ptr(),
            None if parents is None else parents.data_ptr(),
            ctypes.addressof(slot),
            ctypes.addressof(length),
            ctypes.addressof(table),
            logits.data_ptr(),
            None if features is None else features.data_ptr(),
            ctypes.addressof(tap),
            batch,
            held,
            count,
            cache.capacity,
            len(taps),
            _WANT[want],
        )
        error = self._forward(self._decoder, job)
        if error:
            raise _explained(error, tokens, parents, self.vocab_size)
        return Output(logits, features)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[list[int]]:
        """For each chain (of a row of its own): ingest its tokens behind the row's prefix, then draw `depth` tokens one after
        another, each from the logits after the one before: argmax(logits / temperature + noise at position, position + 1,
        ...), or argmax at temperature 0. One forward a level for all chains. A chain ends early where its logits hold NaN.

        All but a chain's last token are written to its row's scratch behind its tokens; nothing is committed.
        """
        drawn: list[list[int]] = [[] for _ in chains]
        asked = [i for i, c in enumerate(chains) if c.depth > 0]
        if not asked:
            return drawn
        table = self._table(cache, [chains[i].row for i in asked], max(len(c.tokens) + c.depth - 1 for c in chains))
        structs, keep = (ChainStruct * len(asked))(), []
        for struct, i in zip(structs, asked, strict=True):
            c = chains[i]
            given, out = (ctypes.c_int64 * len(c.tokens))(*c.tokens), (ctypes.c_int64 * c.depth)()
            keep.append((given, out))
            struct.tokens, struct.drafted = ctypes.addressof(given), ctypes.addressof(out)
            struct.count, struct.depth, struct.row, struct.length = len(c.tokens), c.depth, c.row, cache.length[c.row]
            seed, struct.stream, step, position = c.noise
            struct.seed, struct.step, struct.position = seed & (2**64 - 1), step & (2**32 - 1), position & (2**32 - 1)
            struct.temperature = c.temperature
        job = ChainsStruct(ctypes.addressof(structs), ctypes.addressof(table), len(asked), cache.capacity)
        error = self._chains(self._decoder, job)
        if error:
            width = max(len(chains[i].tokens) for i in asked)
            raise _explained(
                error, torch.tensor([[*chains[i].tokens, *[0] * width][:width] for i in asked]), None, self.vocab_size
            )
        for struct, i, (_, out) in zip(structs, asked, keep, strict=True):
            drawn[i] = out[: struct.made]
        return drawn

    def _table(self, cache: SlotCache, slots: list[int], count: int) -> Any:
        """Addresses of the cache's tensors; made anew when it has grown."""
        if not all(0 <= s < cache.num_slots for s in slots):
            raise IndexError(f"slots are 0 to {cache.num_slots - 1} of this cache, got {slots}")
        cache.reserve(slots, count)
        found = self._tables.get(cache)
        if found is not None and found[0] is cache.layers:
            return found[1]
        like, shape = torch.empty(0), (self.kv_heads, self.dim)
        for i in self._numbers:
            keys, _ = cache.layer(i, shape, shape, like)
            if keys.shape[1:] != (self.kv_heads, cache.capacity, self.dim) or not keys.is_contiguous():
                raise ValueError("this cache belongs to another model; use one made by new_cache of this one")
        pairs = [cache.layers[i] for i in self._numbers]
        table = (ctypes.c_void_p * (2 * self.layers))(*(t.data_ptr() for pair in pairs for t in pair))
        self._tables[cache] = (cache.layers, table)
        return table

    def _layer(self, layer: Any, config: Any, own: bool) -> LayerStruct:
        a, mlp = layer.self_attn, layer.mlp
        window = (
            getattr(a, "sliding_window", None)
            if hasattr(a, "sliding_window")
            else getattr(config, "sliding_window", None)
        )
        q_norm, k_norm = getattr(a, "q_norm", None), getattr(a, "k_norm", None)
        return LayerStruct(
            qkv=self._packed([a.q_proj, a.k_proj, a.v_proj], self.kind, own),
            out=self._packed([a.o_proj], self.kind, own),
            gate_up=self._packed([mlp.gate_proj, mlp.up_proj], self.kind, own, paired=True),
            down=self._packed([mlp.down_proj], self.kind, own),
            norm1=self._floats(layer.input_layernorm.weight),
            norm2=self._floats(layer.post_attention_layernorm.weight),
            q_norm=None if q_norm is None else self._floats(q_norm.weight),
            k_norm=None if k_norm is None else self._floats(k_norm.weight),
            window=window or 0,
        )

    def _packed(self, linears: list[Any], kind: str, own: bool, *, paired: bool = False) -> int:
        biases = [None if m.bias is None else m.bias.detach() for m in linears]
        packed = native.Packed([m.weight.detach() for m in linears], kind, biases, paired=paired)
        if own:
            _free(*linears)
        self._keep.append(packed)
        return ctypes.addressof(packed.struct)

    def _floats(self, weight: Tensor) -> int:
        floats = weight.detach().float().clone()
        self._keep.append(floats)
        return floats.data_ptr()


def _free(*modules: Any) -> None:
    for m in modules:
        m.weight = nn.Parameter(torch.empty(0, dtype=m.weight.dtype), requires_grad=False)


def _explained(error: int, tokens: Tensor, parents: Tensor | None, vocab: int) -> ValueError:
    nodes = tokens.shape[1]
    if error <= -(2**40):
        entry, node = divmod(-(2**40) - error, nodes)
        return ValueError(
            f"token {int(tokens[entry, node])} (entry {entry}, node {node}) is not in the vocabulary of {vocab}"
        )
    entry, node = divmod(-1 - error, nodes if parents is None else parents.shape[1])
    parent = "none" if parents is None else int(parents[entry, node])
    return ValueError(
        f"node {node} of entry {entry} has parent {parent}: a parent is -1 for the root, -2 for padding, else a smaller "
        "node that is no padding, and every entry has a root"
    )
