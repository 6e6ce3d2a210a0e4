"""Part of a model's layers as a model of its own, over the same weights and in the same cache.

Committed keys and values are the whole model's, at every layer; the part reads those of its layers and writes its scratch
there, which the whole model's next forward overwrites. So a model can draft for itself without a second cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from outrider.models.base import LanguageModel, Output, Want
from outrider.models.cache import SlotCache
from outrider.models.hf.model import HFModel
from outrider.models.native_llama import LlamaModel
from outrider.models.nodes import Nodes


def layer_subset(model: LanguageModel, layers: Sequence[int]) -> LanguageModel:
    """The model with these layers only, in this order. Raises ValueError for layers it does not have, or cannot leave out."""
    if not isinstance(model, (HFModel, LlamaModel)):
        raise ValueError(
            f"{type(model).__name__} has no layers to leave out; layer_skip works for models loaded by outrider.models.load"
        )
    count, chosen = model.layers, list(layers)
    if not chosen or chosen != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < count:
        raise ValueError(
            f"the layers to draft with are increasing numbers from 0 to {count - 1}, at least one, got {chosen}; for example "
            f"{list(range(0, count, 2))}"
        )
    return model.part(chosen) if isinstance(model, LlamaModel) else _Part(model, chosen)


class _Part:
    """Runs a transformers model with some of its layers out of the way."""

    def __init__(self, whole: HFModel, layers: list[int]) -> None:
        self.whole, self.layers = whole, layers
        self.vocab_size, self.max_length, self.device = whole.vocab_size, whole.max_length, whole.device
        self.batch_invariant = whole.batch_invariant
        stacks = [m for m in whole.model.modules() if isinstance(m, nn.ModuleList) and len(m) == whole.layers]
        parents = [(m, name) for m in whole.model.modules() for name, child in m.named_children()
                   if any(child is s for s in stacks)]  # fmt: skip
        if len(parents) != 1:
            raise ValueError(
                f"{type(whole.model).__name__} keeps its {whole.layers} layers in {len(parents)} lists, not in one; draft "
                'for it with {"method": "quantized_self"} or {"method": "suffix"}'
            )
        [(self._owner, self._name)] = parents
        stack = self._owner.get_submodule(self._name)
        assert isinstance(stack, nn.ModuleList)
        self._all, self._some = stack, nn.ModuleList([stack[i] for i in layers])

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return self.whole.new_cache(num_slots, max_length)

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        config = self.whole.model.config.get_text_config()
        setattr(self._owner, self._name, self._some)
        config.num_hidden_layers = len(self.layers)  # some slice their list by it
        try:
            yield
        finally:
            setattr(self._owner, self._name, self._all)
            config.num_hidden_layers = self.whole.layers

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`; taps count the layers that are left."""
        with self._shortened():
            return self.whole.forward(nodes, taps=taps, want=want)
