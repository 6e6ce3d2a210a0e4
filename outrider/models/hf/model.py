"""Any decoder-only model of transformers, run by its own modelling code with our attention, cache, linears and experts.

transformers runs a model with any registered attention function. Ours receives the new queries, keys and values, writes
the keys and values to the slot cache, and attends under the tree mask. So trees, ragged batches and `commit` work for
every architecture that uses this interface, and there is no model code here. A model is tried when it is made. If its logits are
then not those of its own attention and cache, it is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.models.base import (
    FINAL_NORM,
    LanguageModel,
    Output,
    Want,
    check_head_ids,
    check_layers,
    check_whole_head,
    over_vocabulary,
)
from outrider.models.cache import SlotCache
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.hf.arrays import as_array
from outrider.models.hf.device import DeviceCache
from outrider.models.hf.experts import pack_experts_, weight_bytes
from outrider.models.hf.hooks import NAME, SURVEY, ForwardState, LayerStack
from outrider.models.hf.linear import BatchInvariantOps, PackedLinear, one_thread, pack_linears_
from outrider.models.hf.precision import FORWARD
from outrider.models.hf.recurrent import Recurrences, StateView, attends, stores_state
from outrider.models.hf.states import LayerStates
from outrider.models.matrix import float_rows
from outrider.models.nodes import Nodes

_OWN = "outrider's attention cannot take the place of its own"
# Kinds of attention layers that `outrider.models.attention` has.
_ATTENTION = {"full_attention", "sliding_attention"}


class HFModel(LanguageModel):
    """A `LanguageModel` around a transformers causal language model.

    `batch_invariant` is found by a test forward when the model is made.

    Args:
        model: of transformers.
        weights: the precision of the linear weights on the CPU: "auto" keeps the checkpoint's own, "int8" and "int4" quantise.
            Activations are float32 on the CPU.
        own: change `model` in place, which saves memory. Otherwise `model` stays as it was, and weights that are not repacked
            are shared with it.
        head_ids: int64 [n], ascending: the tokens that the output head keeps. All other logits are -inf. None keeps all.
        kv_cache_dtype: how the caches of `new_cache` keep keys and values. A forward takes a cache of any dtype.
        device: where to move it, on others than the CPU as `weights`; None: where it is.

    Raises UnsupportedModel with the reason if the model cannot be run, and ValueError for head_ids that it does not have.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        weights: str = "auto",
        own: bool = False,
        head_ids: np.ndarray | None = None,
        kv_cache_dtype: str = "auto",
        device: str | None = None,
    ) -> None:
        refuse(model)
        self.model = model if own else shared_copy(model)
        self.model.eval()
        if device is not None:
            self.model.to(device, None if device == "cpu" else getattr(torch, weights))  # pyright: ignore
        self.vocab_size: int = vocabulary(self.model)
        self._head_ids: np.ndarray | None = None
        ids = None if head_ids is None else check_head_ids(head_ids, self.vocab_size)
        if ids is not None:
            _keep_head_(self.model, torch.from_numpy(ids))
        self.device = str(next(self.model.parameters()).device)
        if self.device == "cpu":
            pack_linears_(self.model, weights)
            pack_experts_(self.model, weights)
            _activations_float32_(self.model)
        self.weight_bytes = weight_bytes(self.model)
        text = self.model.config.get_text_config()
        self.max_length: int = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", 2048)
        self.num_layers: int = text.num_hidden_layers
        self.stack = LayerStack(self.model, self.num_layers)
        parameters = inspect.signature(self.model.forward).parameters
        self._keeps = "logits_to_keep" in parameters
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._call = ForwardState()
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                module._outrider_call = self._call  # pyright: ignore[reportArgumentType]
        self.recurrences = Recurrences(self.model, self._call, self._context)
        ropes = [(m, getattr(m, "rope_type", None)) for m in self.model.modules()]
        self._ropes: list[tuple[Any, str]] = [(m, kind) for m, kind in ropes if kind in ("longrope", "dynamic")]
        self._dtype = torch.float32 if self.device == "cpu" else self.model.dtype
        self._stable = BatchInvariantOps()
        self._careful = self.device == "cpu"  # run under `_stable`
        # On other devices the matrix kernels change with the batch.
        self.batch_invariant = self._is_its_own() and self.device == "cpu"
        self.windows = tuple(self._call.windows.get(layer) or 0 for layer in range(self.num_layers))
        self.kv_cache_dtype = kv_cache_dtype  # it was tried without rounding
        self._careful &= self._stable.needed > 0
        # only now: the check above compared the head's own
        self._head_ids = ids

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        states = {key: LayerStates(start, num_slots) for key, start in self.recurrences.starts.items()}
        if self.device == "cpu":
            return SlotCache(num_slots, max_length, self.kv_cache_dtype, states)
        return DeviceCache(num_slots, max_length, self.kv_cache_dtype, states, self.device)

    @torch.no_grad()  # not inference_mode: the cache is written to outside of it, too
    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`."""
        nodes.cache.reserve(nodes.slots, nodes.total)
        arguments: dict[str, Any] = {}
        wanted = sorted(set(nodes.last)) if want == "last" else [0]
        if want != "all" and self._keeps:
            arguments["logits_to_keep"] = torch.tensor(wanted, device=self.device)
        if self.recurrences.layers:
            arguments[self._cache_name] = StateView(nodes, self.recurrences)
        arguments |= {"input_ids": self._put(nodes.tokens), "position_ids": self._put(nodes.positions)}
        with FORWARD, self._call.running(nodes):
            self._scale_ropes(nodes.cache.max_length)
            logits, features = self._run(taps, use_cache=False, **arguments)
        if want == "none":
            logits = logits[:, :0]
        elif want == "last":
            at = [wanted.index(n) for n in nodes.last] if self._keeps else nodes.last
            if len(wanted) > 1 or not self._keeps:
                logits = logits[range(len(nodes.slots)), at][:, None]
        out = logits.cpu().numpy()
        if self._head_ids is not None:
            out = over_vocabulary(out, self._head_ids, self.vocab_size)
        return Output(out, None if features is None else features.float().cpu().numpy())

    def _put(self, numbers: np.ndarray) -> Tensor:
        return torch.tensor(numbers, device=self.device)

    def _run(self, taps: tuple[int, ...], **arguments: Any) -> tuple[Tensor, Tensor | None]:
        """The logits of the model's forward, and the tapped hidden states side by side."""
        if FINAL_NORM in taps:
            arguments["output_hidden_states"] = True
        with self._context(), self.stack.run(taps) as hidden:
            out = self.model(**arguments)
        states = [out.hidden_states[-1] if t == FINAL_NORM else hidden[t] for t in taps]
        return out.logits.float(), torch.cat(states, dim=-1) if taps else None

    @contextmanager
    def _context(self) -> Iterator[None]:
        """The arithmetic of a forward."""
        with self._stable if self._careful else nullcontext(), one_thread(self.device):
            yield

    def layer_subset(self, layers: Sequence[int]) -> HFModel:
        """See `LanguageModel.layer_subset`. Raises ValueError also if the model does not run without the rest."""
        chosen = check_layers(layers, self.num_layers)
        part = copy.copy(self)
        part.stack, part.num_layers = LayerStack(self.model, self.num_layers, chosen), len(chosen)
        part.weight_bytes = 0
        try:
            part.forward(Nodes(np.zeros((1, 2), np.int64), part.new_cache(1, 2), [0]), want="none")
        except Exception as error:  # a model's code may raise anything
            raise ValueError(
                f"{type(self.model).__name__} does not run with layers {chosen} alone ({error}); methods that need all layers "
                'work, for example {"method": "quantized_self"} or {"method": "suffix"}'
            ) from error
        return part

    @property
    def embedding_table(self) -> np.ndarray | None:
        weight = cast("Any", self.model.get_input_embeddings()).weight
        return as_array(weight) if weight.is_contiguous() and weight.device.type == "cpu" else None

    def embedding_rows(self, tokens: np.ndarray) -> np.ndarray:
        return self._rows(self.model.get_input_embeddings(), tokens)

    def head_rows(self, tokens: np.ndarray) -> np.ndarray:
        check_whole_head(self._head_ids)
        head: Any = self.model.get_output_embeddings()
        if getattr(head, "matrix", head) is None:
            raise ValueError("a matrix of this model is in oneDNN's own layout; the native kernels could share it")
        return self._rows(head, tokens)

    def _rows(self, module: Any, tokens: np.ndarray) -> np.ndarray:
        if isinstance(module, PackedLinear) and module.matrix is not None:
            return float_rows(module.matrix, tokens)
        return module.weight.detach()[torch.from_numpy(tokens)].float().cpu().numpy()

    @torch.no_grad()
    def output_head(self, hidden: np.ndarray) -> np.ndarray:
        check_whole_head(self._head_ids)
        head: Any = self.model.get_output_embeddings()
        return head(torch.tensor(hidden, dtype=self._dtype, device=self.device)).float().cpu().numpy()

    def _scale_ropes(self, length: int) -> None:
        """Choose the rotary factors from the longest text that the cache may hold, as vLLM does.

        The long factors are for a length beyond the one that the model was first trained for. If the longest position of a
        forward decided, a sequence would depend on its neighbours, and a text on how its prompt was cut.
        """
        if not self._ropes:
            return
        rope, _ = self._ropes[0]
        parameters = getattr(rope.config, "rope_parameters", None) or {}
        first = parameters.get("original_max_position_embeddings")
        first = first or getattr(rope, "original_max_seq_len", None) or self.max_length
        long = length > first
        for rope, kind in self._ropes:
            at = torch.tensor([[length - 1 if long else 0]], device=self.device)
            rope.rope_type = kind
            rope(torch.zeros(1, device=self.device), at)  # its own code sets the frequencies
            rope.rope_type = "fixed"

    def _is_its_own(self) -> bool:
        """Whether a node has the same bits in a batch of trees as alone.

        Raises UnsupportedModel unless the logits are those of the model's own attention and cache.
        """
        ids = [n % self.vocab_size for n in range(1, 7)]
        options = {"use_cache": True} if self.recurrences.layers else {}
        try:
            self._attend_by("eager")
            with torch.inference_mode(), FORWARD:
                out = self.model(input_ids=torch.tensor([[*ids[:3], ids[4]]], device=self.device), **options)
            expected, cache = out.logits[0].float().cpu().numpy(), getattr(out, self._cache_name, None)
        except Exception as error:
            raise UnsupportedModel(f"{type(self.model).__name__} does not run by itself: {error!r}") from error
        self.recurrences.learn(cache)
        self._attend_by(SURVEY)
        try:
            equal = self.compare(ids, expected)
        except Exception as error:  # a model's code may raise anything for arguments that it does not know
            _refuse_by_node(self.model, error if isinstance(error, ValueError) else _OWN)
        if not self._call.attended | self.recurrences.scanned >= self._reading(cache):
            _refuse_by_node(self.model, _OWN)
        self._attend_by(NAME)
        return equal

    def _attend_by(self, name: str) -> None:
        """name: what transformers calls the attention that all modules run with from now on."""
        configs: dict[int, Any] = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        for config in configs.values():
            config._attn_implementation = name

    def _reading(self, kept: Any) -> set[int]:
        """The layers that read earlier tokens. kept: the model's own cache after a forward."""
        if not self.recurrences.layers:
            return set(range(self.num_layers))
        layers = enumerate(getattr(kept, "layers", []))
        keys = {i for i, layer in layers if getattr(layer, "keys", None) is not None and layer.keys.numel()}
        return keys | set(self.recurrences.layers)

    def compare(self, ids: list[int], own: np.ndarray) -> bool:
        """Compare a ragged batch of trees with `own`, float32 [4, vocab], the logits of the model's own attention.

        ids 0, 1, 2 and 4 are the paths of the trees; the others are side branches. Returns whether a node of a tree has the
        same bits as alone. Raises ValueError if the logits differ by more than rounding.
        """
        a, b, c, x, d, y = ids
        tokens, parents = np.array([[c, x, d, y], [a, b, 0, 0]]), np.array([[-1, 0, 0, 2], [-1, 0, -2, -2]])
        cache = self.new_cache(2, 16)
        self.forward(Nodes(np.array([[a, b]]), cache, [0]), want="none")
        cache.commit([0], [[0, 1]])
        tree = self.forward(Nodes(tokens, cache, [0, 1], parents)).logits
        alone = self.forward(Nodes(np.array([[c]]), cache, [0])).logits[0, 0]
        gap = float(np.abs(tree[[1, 1, 0, 0], [0, 1, 0, 2]] - own).max() / max(np.abs(own).max(), 1e-6))
        if np.isfinite(own).all() and not gap < self.tolerance:
            raise ValueError(f"it gives other logits than by itself, by {gap:.2g} of the largest")
        return np.array_equal(tree[0, 0], alone)

    @property
    def tolerance(self) -> float:
        """How far logits may be from those of the model's own attention, relative to the largest.

        A rounding of the attention changes how the activations of later layers are rounded to integers. Each such change is
        small, and all layers together were seen to change logits by 0.05 (docs/log.md).
        """
        if any(getattr(m, "rounds_inputs", False) for m in self.model.modules()):
            return 0.25
        return 5e-4 if self._dtype == torch.float32 else 0.1


def refuse(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for what is no causal language model, or keeps its memory of earlier tokens in another way."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; outrider runs decoder-only causal language models")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head; load it with AutoModelForCausalLM")
    if (reason := _why_not_by_node(model)) is not None:
        _refuse_by_node(model, reason)


def _refuse_by_node(model: PreTrainedModel, reason: object) -> NoReturn:
    raise UnsupportedModel(
        f"{type(model).__name__} cannot keep its memory of earlier tokens node by node ({reason}), and without that each token "
        "would read the whole text again: give another model, of which docs/models.md lists the classes, or run this one with "
        "transformers alone, model.generate(...)"
    )


def _why_not_by_node(model: PreTrainedModel) -> str | None:
    """Why the memory of earlier tokens cannot be kept node by node, if the configuration or the modules tell."""
    text = model.config.get_text_config()
    odd = sorted(set(getattr(text, "layer_types", None) or []) - _ATTENTION)
    recurrent = [module for module in model.modules() if stores_state(module)]
    if any(attends(module) for module in recurrent):
        return "it keeps a state within its attention"
    plain = not any("_attention" in kind and kind != "linear_attention" for kind in odd)
    if not (recurrent and plain) and (odd or getattr(model, "_is_stateful", False)):
        return f"it has {' and '.join(odd) or 'a recurrent state'}"
    if (size := getattr(text, "keep_window_size", None)) and size < text.max_position_embeddings:
        return f"it attends to {size} tokens that it chooses by their values"
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        return "it uses ALiBi biases"
    return None


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Another model object over the memory of the same weights.

    It has its own parameter objects, modules and configuration. Changing these does not change the caller's model.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(b): b.detach() for b in model.buffers()}
    return copy.deepcopy(model, memo)


def vocabulary(model: PreTrainedModel) -> int:
    """Tokens of the output head."""
    head: Any = model.get_output_embeddings()
    return int(getattr(head, "out_features", None) or head.weight.shape[0])


def _keep_head_(model: PreTrainedModel, ids: Tensor) -> None:
    """Give the model an output head with the rows of these tokens. An embedding that was tied to it keeps all its rows."""
    old: Any = model.get_output_embeddings()
    ids = ids.to(old.weight.device)
    new = nn.Linear(old.in_features, len(ids), bias=False, device="meta")
    new.weight = nn.Parameter(old.weight.detach()[ids], requires_grad=False)
    if getattr(old, "bias", None) is not None:
        new.bias = nn.Parameter(old.bias.detach()[ids], requires_grad=False)
    model.set_output_embeddings(new)


def _activations_float32_(model: nn.Module) -> None:
    """Convert to float32 what linears and experts did not pack.

    Plain embeddings are large, so they keep their precision and only the looked-up rows are converted.
    """
    for module in model.modules():
        if type(module) is nn.Embedding and module.weight.dtype != torch.float32:
            module.register_forward_hook(lambda _, __, out: out.float())
            continue
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if t.is_floating_point():
                t.data = t.data.float()
