"""Prompts that start alike are computed once: keys and values of earlier texts, in blocks, the least used ones dropped.

Keys and values of a token depend on the tokens up to it and on nothing else. This is true bit for bit where a model is
batch invariant (`LanguageModel.batch_invariant`). There a copy is what computing it again would give.

The state of a recurrent layer holds all tokens up to it and cannot be cut. So a text with such states can be taken up only
where its state was stored: at the end of a text, at the end of each chunk of a prompt, and where two prompts were seen to part.

Files are a second level, which outlives the process (`outrider.engine.prefix_files`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from outrider.engine.prefix_files import PrefixFiles
from outrider.models.cache import SlotCache

BYTES = 256 << 20  # of a cache in memory, where nothing else is said
BLOCK = 16  # tokens that are found or missed together


class _Block:
    """A block of tokens behind the blocks before it. states: of recurrent layers after its last token, if they were kept.

    Only the end of a text whose states are kept has fewer than BLOCK tokens, and no children.
    """

    __slots__ = ("bytes", "children", "key", "layers", "parent", "states")

    def __init__(
        self, parent: _Block | None, key: tuple[int, ...], layers: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        self.parent, self.key, self.layers = parent, key, layers
        self.children: dict[tuple[int, ...], _Block] = {}
        self.states: list[list[np.ndarray]] | None = None
        self.bytes = sum(t.nbytes for pair in layers for t in pair)


class PrefixCache:
    """A tree of blocks, at most `limit` bytes of keys and values, and files behind it if there is a folder.

    Attributes:
        bytes: Of the blocks.
        queries: Tokens of the texts that were looked up.
        hits: Those of them that were here.
    """

    def __init__(self, limit: int, files: PrefixFiles | None = None) -> None:
        self.limit, self.files = limit, files
        self.root = _Block(None, (), [])
        self.bytes = self.queries = self.hits = 0
        self._used: OrderedDict[_Block, None] = OrderedDict()  # least used first; a parent is used whenever a child is
        self._filed = set[int]()  # slots whose text began in files: the system keeps those in memory, too

    def fetch(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> int:
        """Copy the longest known start of `tokens` into an empty slot and commit it. With files, a slot that holds a start of
        them is continued, too, and a later call may find more. Returns the length now.
        """
        before = cache.length[slot]
        if not before:
            self.queries += len(tokens)
            self._filed.discard(slot)
            path = self._path(tokens)
            if cache.states:
                path += self._ends(path[-1] if path else self.root, tokens[BLOCK * len(path) :])
                while path and path[-1].states is None:
                    path.pop()
            if path:
                count = sum(len(block.key) for block in path)
                cache.restore(slot, count, path[-1].states or (), [block.layers for block in path])
        if self.files is not None and self.files.load(cache, slot, tokens):
            self._filed.add(slot)
        self.hits += cache.length[slot] - before
        return cache.length[slot]

    def keep(self, cache: SlotCache, slot: int, tokens: Sequence[int], *, ended: bool = False) -> None:
        """Remember the whole blocks of a slot, which holds `tokens`. ended: a prompt or a text ends here, so that files keep its
        end, too."""
        if slot not in self._filed:
            self._remember(cache, slot, tokens)
        if self.files is not None:
            self.files.keep(cache, slot, tokens, ended)

    def _remember(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> None:
        """Keep in memory. With states, the rest of the tokens is a block as well, and the last block gets the states."""
        path = self._path(tokens)
        at = path[-1] if path else self.root
        stop = len(tokens) - (0 if cache.states else len(tokens) % BLOCK)
        rest = tokens[BLOCK * len(path) :]
        if cache.states and (ends := self._ends(at, rest)) and len(ends[0].key) == len(rest):
            path += ends
            at = ends[0]
        total = sum(block.bytes for block in path)
        for start in range(sum(len(block.key) for block in path), stop, BLOCK):
            end = min(start + BLOCK, stop)
            block = _Block(at, tuple(tokens[start:end]), cache.block(slot, start, end))
            if (total := total + block.bytes) > self.limit:
                break  # its own end would be dropped at once
            at.children[block.key] = block
            self.bytes += block.bytes
            path.append(block)
            at = block
        if cache.states and path and sum(len(block.key) for block in path) == len(tokens) and at.states is None:
            at.states = cache.snapshot(slot)
            size = sum(t.nbytes for part in at.states for t in part)
            at.bytes += size
            self.bytes += size
        for block in reversed(path):
            self._used[block] = None
            self._used.move_to_end(block)
        while self.bytes > self.limit:
            self._drop(next(iter(self._used)))

    def keeps_chunks(self, cache: SlotCache) -> bool:
        """Whether `keep` is to be called after each chunk of a prompt: states are gone later, and files are written meanwhile."""
        return bool(cache.states) or self.files is not None

    def chunk_end(self, cache: SlotCache, tokens: Sequence[int], start: int, end: int) -> int:
        """Where a chunk of `tokens` from `start` to `end` should end. A state can be found again only where one was kept."""
        if not cache.states:
            return end
        if start < (border := self.parting(tokens)):
            end = min(end, border)
        return end if self.files is None else min(end, start - start % self.files.segment + self.files.segment)

    def parting(self, tokens: Sequence[int]) -> int:
        """How many of these tokens earlier texts begin with, in whole blocks, whether their states were kept or not."""
        return BLOCK * len(self._path(tokens))

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
            child = at.children.get(tuple(tokens[start : start + BLOCK]))
            if child is None:
                break
            path.append(child)
            at = child
        for block in reversed(path):
            self._used.move_to_end(block)
        return path

    def _ends(self, at: _Block, rest: Sequence[int]) -> list[_Block]:
        """The longest known end of a text that `rest` begins with after this block, if there is one."""
        short = [b for key, b in at.children.items() if len(key) < BLOCK and tuple(rest[: len(key)]) == key]
        return sorted(short, key=lambda block: len(block.key))[-1:]

    def _drop(self, block: _Block) -> None:
        """The least used block of all has no children: they would have been used less."""
        del self._used[block]
        assert block.parent is not None
        del block.parent.children[block.key]
        self.bytes -= block.bytes
