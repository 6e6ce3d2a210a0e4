"""What the caches may take, known before any of it is taken."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from outrider.drafters.base import Drafter
from outrider.models.base import LanguageModel
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.checkpoint import free_memory
from outrider.models.nodes import Nodes


class Memory:
    """The caches of a target and of its drafters, beside the prefix store's limit.

    A cache grows for all its slots at once, to the longest text in it. So what it can take in the end is the slots times
    the longest text there may be. With a limit that is compared beforehand, and taken at once: nothing grows or runs
    out later.
    """

    def __init__(self, target: LanguageModel, cache: SlotCache, drafters: Iterable[Drafter]) -> None:
        models: dict[int, tuple[LanguageModel, SlotCache]] = {id(cache): (target, cache)}
        for drafter in drafters:
            held = drafter.resources()
            if held.cache is not None:
                models[id(held.cache)] = (held.model, held.cache)
        self._models, self._cache = list(models.values()), cache
        self.limit: int | None = None

    @property
    def bytes(self) -> int:
        """Taken at this moment, without the prefix store."""
        return sum(cache.bytes for _, cache in self._models)

    @property
    def most(self) -> int:
        """Taken when each slot holds the longest text, without the prefix store."""
        return self._need(self._cache.max_length)

    def longest(self, room: int) -> int:
        """Tokens of the longest texts of which each slot can hold one, in `room` bytes; 0 for none."""
        return bisect_right(range(1, self._cache.max_length + 1), room, key=self._need)

    def _need(self, length: int) -> int:
        """Bytes taken when each slot holds a text of this length. The cache of a draft model ends with its window."""
        caches = zip(self._each, self._models, strict=True)
        taken = (n * c.num_slots * (min(c.max_length, length) + SCRATCH) for n, (_, c) in caches)
        return self._states + sum(taken)

    def shorten(self, length: int) -> None:
        """Let the drafters' caches hold texts of this length at most."""
        for _, cache in self._models[1:]:
            cache.shorten(length)

    @cached_property
    def _each(self) -> list[int]:
        """Bytes of a token in one slot of each cache."""
        return [per_token(model) for model, _ in self._models]

    @property
    def _states(self) -> int:
        return sum(cache.bytes_per_slot * cache.num_slots for _, cache in self._models)

    def bound(self, limit: int, prefix_bytes: int) -> None:
        """Take all that the caches can ever need. Raises ValueError when that, and `prefix_bytes` for the prefix store, is
        more than `limit`, or more than the machine has."""
        self.limit = limit
        need = prefix_bytes + self.most
        if need <= limit:
            self._take()
            return
        num_slots, length, states = self._cache.num_slots, self._cache.max_length, self._states
        fits = self.longest(limit - prefix_bytes)
        fewer = (limit - prefix_bytes) * num_slots // max(self.most, 1)
        ways = [f"--max-model-len {fits}"] * (2 <= fits < length) + [f"--max-num-seqs {fewer}"] * (fewer >= 1)
        ways += [f"--kv-cache-memory-bytes {need}"]
        raise ValueError(
            f"{num_slots} texts of {length} tokens may take {gib(self.most)} of keys and values "
            f"({sum(self._each)} bytes a token, "
            + (f"and {gib(states)} of states, " if states else "")
            + f"drafters included) and the prefix cache {gib(prefix_bytes)}, which is more than the {gib(limit)} allowed; "
            f"{', or '.join(ways)} would fit" + (", or a smaller --prefix-cache" if prefix_bytes else "")
        )

    def _take(self) -> None:
        for model, cache in self._models:
            cache.reserve([0], cache.max_length + SCRATCH)
            try:
                model.forward(Nodes(np.zeros((1, 1), np.int64), cache, [0]), want="none")  # into scratch
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
    model.forward(Nodes(np.zeros((1, 1), np.int64), cache, [0]), want="none")
    return cache.bytes_per_token


def spare(device: str) -> int:
    """Bytes that caches can take beside the weights; 0 if unknown. Files that this process has mapped count as free for the
    system, and weights are among them."""
    free = free_memory(device)
    if device != "cpu" or not free:
        return free
    mapped = int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    return max(free - mapped, 1)


def gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
