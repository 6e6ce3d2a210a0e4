"""Some layers of a transformers model as a model of its own, over the same weights and in the same cache.

The whole model commits keys and values at every layer. The subset reads those of its layers and writes its scratch there.
The next forward of the whole model overwrites that scratch. So a model can draft for itself without a second cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from outrider.models.base import LanguageModel, Output, Want, check_layers
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes

if TYPE_CHECKING:
    from outrider.models.hf.model import HFModel


class HFLayerSubset(LanguageModel):
    """Runs a transformers model with some of its layers out of the way."""

    def __init__(self, whole: HFModel, layers: Sequence[int]) -> None:
        """layers: increasing layer numbers. Raises ValueError for others, if the model's layers cannot be found, and if the
        model does not run without the rest."""
        chosen = check_layers(layers, whole.num_layers)
        self._owner, self._name = whole.stack.place()
        self._all = whole.stack.layers()
        self._some = nn.ModuleList([self._all[i] for i in chosen])
        self.whole, self.num_layers = whole, len(chosen)
        self.vocab_size, self.max_length, self.device = whole.vocab_size, whole.max_length, whole.device
        self.batch_invariant, self.kv_cache_dtype = whole.batch_invariant, whole.kv_cache_dtype
        try:
            self.forward(Nodes(torch.zeros(1, 2, dtype=torch.long), self.new_cache(1, 2), [0]), want="none")
        except Exception as error:  # a model's code may raise anything
            raise ValueError(
                f"{type(whole.model).__name__} does not run with layers {chosen} alone ({error}); methods that need all layers "
                'work, for example {"method": "quantized_self"} or {"method": "suffix"}'
            ) from error

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return self.whole.new_cache(num_slots, max_length)

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        config = self.whole.model.config.get_text_config()
        setattr(self._owner, self._name, self._some)
        # Some models slice their list by this number.
        config.num_hidden_layers = self.num_layers
        try:
            yield
        finally:
            setattr(self._owner, self._name, self._all)
            config.num_hidden_layers = self.whole.num_layers

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`. Taps count the layers of the subset."""
        with self._shortened():
            return self.whole.forward(nodes, taps=taps, want=want)
