"""Prompts that start alike are computed once: keys and values of earlier texts, in blocks, the least used ones dropped.

Keys and values of a token depend on the tokens up to it and on nothing else, bit for bit where a model's rows are equal
(`LanguageModel.batch_invariant`), so a copy is what computing it again would give.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.models.cache import SlotCache

BLOCK = 16  # tokens that are found or missed together


class _Block:
    """A block of tokens behind the blocks before it."""

    __slots__ = ("bytes", "children", "features", "key", "layers", "parent")

    def __init__(
        self,
        parent: _Block | None,
        key: tuple[int, ...],
        layers: list[tuple[Tensor, Tensor]],
        features: Tensor | None = None,
    ) -> None:
        self.parent, self.key, self.layers, self.features = parent, key, layers, features
        self.children: dict[tuple[int, ...], _Block] = {}
        held = [t for pair in layers for t in pair] + ([] if features is None else [features])
        self.bytes = sum(t.numel() * t.element_size() for t in held)


class PrefixCache:
    """A tree of blocks, at most `limit` bytes of keys and values. The `PrefixSource` of `outrider.decode`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.root = _Block(None, (), [])
        self.bytes = self.queries = self.hits = 0  # queries, hits: tokens asked for, tokens found
        self._used: OrderedDict[_Block, None] = OrderedDict()  # least used first; a parent is used whenever a child is

    def fetch(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> tuple[int, Tensor | None]:
        """Copy the longest known start of `tokens` into an empty slot and commit it.

        Returns its length, and the features [token, feature] that were kept with it, if any.
        """
        path = self._path(tokens)
        count = BLOCK * len(path)
        self.queries, self.hits = self.queries + len(tokens), self.hits + count
        if not path:
            return 0, None
        cache.reserve([slot], count)
        for layer, (keys, values) in enumerate(cache.layers):
            keys[slot, :, :count] = torch.cat([block.layers[layer][0] for block in path], 1)
            values[slot, :, :count] = torch.cat([block.layers[layer][1] for block in path], 1)
        cache.commit([slot], [range(count)])
        features = [block.features for block in path if block.features is not None]
        return count, torch.cat(features) if features else None

    def keep(self, cache: SlotCache, slot: int, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Remember the whole blocks of a slot, which holds `tokens`, and their features [token, feature]."""
        path = self._path(tokens)
        at = path[-1] if path else self.root
        for start in range(BLOCK * len(path), len(tokens) - BLOCK + 1, BLOCK):
            end = start + BLOCK
            layers = [(k[slot, :, start:end].clone(), v[slot, :, start:end].clone()) for k, v in cache.layers]
            own = None if features is None else features[start:end].clone()
            block = _Block(at, tuple(tokens[start:end]), layers, own)
            if block.bytes > self.limit:
                break
            at.children[block.key] = block
            self.bytes += block.bytes
            path.append(block)
            at = block
        for block in reversed(path):
            self._used[block] = None
            self._used.move_to_end(block)
        while self.bytes > self.limit:
            self._drop(next(iter(self._used)))

    def clear(self) -> None:
        while self._used:
            self._drop(next(iter(self._used)))

    def check(self) -> list[str]:
        """What is wrong with the tables; nothing, unless there is a bug."""
        wrong = []
        if self.bytes != sum(block.bytes for block in self._used):
            wrong.append(f"the prefix cache counts {self.bytes} bytes and holds {sum(b.bytes for b in self._used)}")
        if any(b.parent is None or b.parent.children.get(b.key) is not b for b in self._used):
            wrong.append("a block of the prefix cache hangs in the air")
        return wrong

    def _path(self, tokens: Sequence[int]) -> list[_Block]:
        """The known blocks that `tokens` starts with, marked as used."""
        path, at = list[_Block](), self.root
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            found = at.children.get(tuple(tokens[start : start + BLOCK]))
            if found is None:
                break
            path.append(found)
            at = found
        for block in reversed(path):
            self._used.move_to_end(block)
        return path

    def _drop(self, block: _Block) -> None:
        """The least used block of all has no children: they would have been used less."""
        del self._used[block]
        assert block.parent is not None
        del block.parent.children[block.key]
        self.bytes -= block.bytes
