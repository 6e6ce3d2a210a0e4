"""Any decoder-only model of transformers, run by its own modelling code with our attention, cache and linears.

transformers lets a model run with a registered attention function; ours receives the new queries, keys and values, writes
the keys and values into the slot cache and attends under the tree mask. So trees, ragged batches and `commit` work for
every architecture without a line of model code here. The few models whose code does not go through the interface (Falcon,
GPT-J) get the same through the cache object they do use, with a four-dimensional mask.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider import native
from outrider.models.attention import Nodes, attend_masked, attend_reference, write
from outrider.models.base import Output, Want
from outrider.models.cache import SlotCache

_NAME = "outrider"


class UnsupportedModel(ValueError):
    """The model cannot be run with a cache that keeps single nodes."""


class _Call:
    """Where the attention modules of one model find the nodes of the forward under way."""

    nodes: Nodes | None = None


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query, key, value [batch, head, node, head_dim] -> [batch, node, head, dim]."""
    call: _Call | None = getattr(module, "_outrider_call", None)
    if call is None or call.nodes is None:
        raise RuntimeError(f"{type(module).__name__} ran outside of outrider's forward; use HFModel.forward")
    layer = int(module.layer_idx)  # pyright: ignore[reportArgumentType]
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    write(call.nodes, layer, key, value)
    attend = (
        _attend_native
        if query.device.type == "cpu" and native.available()
        else (attend_reference if query.device.type == "cpu" else attend_masked)
    )
    return attend(call.nodes, layer, query, scaling, sliding_window, softcap, s_aux), None


def _attend_native(
    nodes: Nodes,
    layer: int,
    query: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return attend_reference(nodes, layer, query, scaling, window, softcap, sinks)


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)


class _CacheView(Cache):
    """Our slot cache as the cache object of models whose attention is their own: one step, all slots, one mask."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        keys, values = write(self.nodes, layer_idx, key_states, value_states)
        index, slots = torch.tensor(self.nodes.rows, device=keys.device), self.nodes.visible.shape[-1]
        return keys[index, :, :slots], values[index, :, :slots]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.nodes.visible.shape[-1] - self.nodes.count

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.nodes.visible.shape[-1], 0

    @property
    def is_compileable(self) -> bool:
        return False


class HFModel:
    """A `LanguageModel` around a transformers causal language model.

    `own=True` takes the model over: its attention and linears are replaced in place. Otherwise the weights are shared and
    the caller's model stays as it was. Raises UnsupportedModel with the reason when the model cannot be run.
    """

    def __init__(self, model: PreTrainedModel, *, own: bool = False) -> None:
        refuse(model)
        self.model = model if own else shared_copy(model)
        self.model.eval()
        config = self.model.config.get_text_config()
        self.vocab_size: int = self.model.get_output_embeddings().weight.shape[0]
        self.max_length: int = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", 2048)
        self.device = next(self.model.parameters()).device
        self.layers: int = config.num_hidden_layers
        self._call = _Call()
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                module._outrider_call = self._call  # pyright: ignore[reportArgumentType]
        self._interface = self._goes_through_interface()
        self._check()

    def new_cache(self, rows: int, max_length: int) -> SlotCache:
        return SlotCache(rows, max_length)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        cache: SlotCache,
        rows: list[int],
        *,
        parents: Tensor | None = None,
        taps: tuple[int, ...] = (),
        want: Want = "all",
    ) -> Output:
        """See `LanguageModel.forward`. Taps: layer i gives transformers' hidden_states[i + 1], -1 the final one."""
        count = tokens.shape[1]
        cache.reserve(rows, count)
        nodes = Nodes(cache, rows, count, parents, self.device)
        arguments: dict[str, Any] = {"output_hidden_states": True} if taps else {}
        ragged = want == "last" and parents is not None and bool((parents == -2).any())
        if want != "all" and not ragged:
            arguments["logits_to_keep"] = 1
        if not self._interface:
            mask = torch.zeros(nodes.visible.shape, dtype=self.model.dtype, device=self.device)
            mask = mask.masked_fill_(~nodes.visible, torch.finfo(self.model.dtype).min)
            arguments |= {"attention_mask": mask[:, None], "past_key_values": _CacheView(nodes)}
        self._call.nodes = nodes
        try:
            out = self.model(
                input_ids=tokens.to(self.device),
                position_ids=nodes.positions,
                use_cache=not self._interface,
                **arguments,
            )
        finally:
            self._call.nodes = None
        logits = out.logits.float()
        if want == "none":
            logits = logits[:, :0]
        elif ragged:
            last = (nodes.tree >= -1).sum(1) - 1
            logits = logits[torch.arange(len(rows)), last.to(self.device)][:, None]
        features = torch.cat([out.hidden_states[t if t < 0 else t + 1] for t in taps], dim=-1) if taps else None
        return Output(logits, features)

    def _goes_through_interface(self) -> bool:
        implementations = {}
        self.model.config._attn_implementation = _NAME
        for config in _configs(self.model):
            implementations[config] = config._attn_implementation
            config._attn_implementation = _NAME
        probe = torch.zeros(1, 1, dtype=torch.long)
        self._interface = True
        try:
            cache = self.new_cache(1, 4)
            self.forward(probe, cache, [0])
            if len(cache.layers) == self.layers:
                return True
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError):
            pass
        for config in implementations:
            config._attn_implementation = "eager"
        return False

    def _check(self) -> None:
        """The same four tokens in two chunks through our cache and in one pass through the model's own code."""
        ids = torch.arange(1, 5)[None] % self.vocab_size
        cache = self.new_cache(1, 16)
        try:
            first = self.forward(ids[:, :2], cache, [0]).logits
            cache.commit([0], [[0, 1]])
            second = self.forward(ids[:, 2:], cache, [0]).logits
            configs = {c: c._attn_implementation for c in _configs(self.model)}
            for config in configs:
                config._attn_implementation = "eager"
            try:
                with torch.inference_mode():
                    own = self.model(input_ids=ids.to(self.device), use_cache=False).logits.float()
            finally:
                for config, implementation in configs.items():
                    config._attn_implementation = implementation
        except Exception as error:
            raise UnsupportedModel(
                f"{type(self.model).__name__} does not run with outrider's cache and attention ({error}); "
                "models with plain causal attention do"
            ) from error
        ours = torch.cat([first, second], dim=1)
        gap = (ours - own).abs().max() / own.abs().max().clamp_min(1e-6)
        if not gap < (1e-3 if self.model.dtype == torch.float32 else 0.1) and bool(own.isfinite().all()):
            raise UnsupportedModel(
                f"{type(self.model).__name__} gives other logits through outrider's cache than by itself (relative gap "
                f"{gap:.2g}): its state is not plain causal attention over keys and values, which is all that can be "
                "committed node by node"
            )


def refuse(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for models whose state cannot be committed node by node."""
    config, name = model.config, type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; outrider runs decoder-only causal language models")
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    odd = kinds - {"full_attention", "sliding_attention"}
    recurrent = any(
        hasattr(m, "A_log") or "Mamba" in type(m).__name__ or "RWKV" in type(m).__name__.upper()
        for m in model.modules()
    )
    if odd or recurrent:
        what = ", ".join(sorted(odd)) or "a recurrent state"
        raise UnsupportedModel(
            f"{name} keeps {what}, which cannot be committed node by node; use an attention-only model"
        )
    if getattr(text, "alibi", False) or getattr(text, "position_embedding_type", "") == "alibi":
        raise UnsupportedModel(
            f"{name} uses ALiBi biases, which outrider's attention does not have; use a rotary model"
        )
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no language-model head; load it with AutoModelForCausalLM")


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Another model object over the very same weight tensors, so that changing its modules leaves the caller's alone."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every distinct config object in the model: modules read the attention implementation from their own."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return list(found.values())
