"""What the caches may take, known before any of it is taken."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from outrider.models.base import LanguageModel
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.nodes import Nodes


class Memory:
    """The caches of a target and of its drafters, beside the prefix store's limit.

    A cache grows for all its rows at once, to the longest text that stands in it. So what it can take in the end is rows
    times the longest text there may be. With a limit that is compared beforehand, and taken at once: nothing grows or runs
    out later.
    """

    def __init__(self, target: LanguageModel, cache: SlotCache, drafters: Iterable[Any]) -> None:
        """drafters: those that run a model of their own have a `model` and a `cache`."""
        models: dict[int, tuple[LanguageModel, SlotCache]] = {id(cache): (target, cache)}
        for drafter in drafters:
            own = getattr(drafter, "cache", None)
            if isinstance(own, SlotCache):
                models[id(own)] = (drafter.model, own)
        self._models = list(models.values())
        self.limit: int | None = None

    @property
    def bytes(self) -> int:
        """Taken at this moment, without the prefix store."""
        return sum(cache.bytes for _, cache in self._models)

    def bound(self, limit: int, prefix_bytes: int) -> None:
        """Take all that the caches can ever need. Raises ValueError when that, and `prefix_bytes` for the prefix store, is
        more than `limit`, or more than the machine has."""
        self.limit = limit
        each = [per_token(model) for model, _ in self._models]
        caches = [cache for _, cache in self._models]
        states = sum(c.bytes_per_slot * c.num_slots for c in caches)
        need = prefix_bytes + states
        need += sum(n * c.num_slots * (c.max_length + SCRATCH) for n, c in zip(each, caches, strict=True))
        if need <= limit:
            self._take()
            return
        rows, length = caches[0].num_slots, caches[0].max_length
        fits = (limit - prefix_bytes - states) // max(sum(each) * rows, 1) - SCRATCH
        fewer = (limit - prefix_bytes) * rows // max(need - prefix_bytes, 1)
        ways = [f"--max-model-len {fits}"] * (2 <= fits < length) + [f"--max-num-seqs {fewer}"] * (fewer >= 1)
        ways += [f"--kv-cache-memory-bytes {need}"]
        raise ValueError(
            f"{rows} texts of {length} tokens may take {mib(need - prefix_bytes)} of keys and values ({sum(each)} bytes a token, "
            + (f"and {mib(states)} of states, " if states else "")
            + f"drafters included) and the prefix cache {mib(prefix_bytes)}, which is more than the {mib(limit)} allowed; "
            f"{', or '.join(ways)} would fit" + (", or a smaller --prefix-cache" if prefix_bytes else "")
        )

    def _take(self) -> None:
        for model, cache in self._models:
            cache.reserve([0], cache.max_length + SCRATCH)
            try:
                model.forward(Nodes(torch.zeros(1, 1, dtype=torch.long), cache, [0]), want="none")  # into scratch
            except (RuntimeError, MemoryError) as error:
                if isinstance(error, RuntimeError) and "memory" not in str(error):
                    raise
                raise ValueError(
                    f"this machine has no memory for {cache.num_slots} texts of {cache.max_length} tokens; use a smaller "
                    "--max-model-len or --max-num-seqs"
                ) from error


def per_token(model: LanguageModel) -> int:
    """Bytes of keys and values that a model keeps of a token, seen by letting it read one."""
    cache = model.new_cache(1, 1)
    model.forward(Nodes(torch.zeros(1, 1, dtype=torch.long), cache, [0]), want="none")
    return cache.bytes_per_token


def mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
