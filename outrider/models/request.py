"""What a source of weights is asked for, and what it gives: see `outrider.models.load`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.models.native.program import Program


class LoadRequest(NamedTuple):
    """A model that is asked for by name. name, dtype, quantization: as for `load`.

    tokenizer: its own is wanted. cache: its pack may be in the cache. modules: those of transformers are wanted, so a folder of
    packed weights stands for the model that it was made of.
    """

    name: str
    dtype: str = "auto"
    device: torch.device = torch.device("cpu")
    quantization: str | None = None
    tokenizer: bool = True
    cache: bool = True
    modules: bool = False

    @property
    def weights(self) -> str | None:
        """The precision that is asked for; None for that of the checkpoint."""
        return self.quantization or (None if self.dtype == "auto" else self.dtype)


class ReadModel(NamedTuple):
    """A model that was read. tokenizer: its own, if it was wanted. weights: their precision if it is decided, else None.

    config: of transformers. packed: it comes from a pack, so nothing of it can be reduced.
    """

    model: PreTrainedModel | Program
    tokenizer: Any | None
    weights: str | None
    end_ids: tuple[int, ...]
    config: Any
    packed: bool = False


def token_ids(given: Any) -> tuple[int, ...]:
    """End tokens as a configuration has them: one, several or None."""
    return tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (int(given),)
