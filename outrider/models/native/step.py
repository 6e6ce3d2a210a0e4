"""A program as Python calls it: one call for a forward, and one for whole chains of draft tokens."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from outrider.core.noise import Stream
from outrider.core.sampling import LogitsWarper, log_min_p
from outrider.core.types import PADDING
from outrider.kernels import cpu as native
from outrider.kernels.cpu.library import ChainsStruct, ChainStruct, DrawStruct, ForwardStruct
from outrider.kernels.cpu.packed import MOST
from outrider.kernels.vectors import packed_width
from outrider.models.base import Chain, DrawnChain, Verification, Want
from outrider.models.cache import KV_CACHE_DTYPES, SlotCache
from outrider.models.native.program import Program, address
from outrider.models.nodes import Nodes

# States of a slot that are kept during a step, besides the committed one.
KEPT = 8


class NativeStates:
    """The committed states of each slot, and the scratch of a step, in the recurrent layers of a native program.

    Native code keeps them for all layers (`src/states.hpp`). The reference is `LayerStates`, one layer in
    Python.

    Args:
        ops: the address of the program's ops, and their number.
        keep: what they point to.
        layout: the numbers of its recurrent ops.
        num_slots: of the cache.

    `handle` is what a forward is given.
    """

    def __init__(self, ops: tuple[int, int], keep: object, layout: dict[int, object], num_slots: int) -> None:
        self._library, self._keep, self.layout, self._kept = native.library(), keep, layout, KEPT
        self.handle: int = self._library.states_new(*ops, num_slots, KEPT)
        self._size: int = self._library.states_size(self.handle)
        self._slots = num_slots
        weakref.finalize(self, self._library.states_free, self.handle)

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the state after the last node of a path from the root, in all layers. Raises ValueError for nodes that are no such
        path, RuntimeError for nodes that no forward of this step has read."""
        nodes = (ctypes.c_int64 * len(path))(*path)
        wrong = self._library.states_commit(self.handle, slot, nodes, len(path))
        if wrong < 0:
            raise RuntimeError(
                f"no forward of this step has read node {path[-1 - wrong]} of slot {slot} in a recurrent layer"
            )
        if wrong:
            raise ValueError(f"{[*path]} is no path from the root")

    def reset(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        self._library.states_reset(self.handle, slot)

    def snapshot(self, slot: int) -> list[np.ndarray]:
        """A copy of the committed state of a slot, of all layers."""
        state = np.empty(self._size, np.float32)
        self._library.states_read(self.handle, slot, state.ctypes.data)
        return [state]

    def restore(self, slot: int, state: Sequence[np.ndarray]) -> None:
        """Give a slot the committed state that `snapshot` returned."""
        self._library.states_write(self.handle, slot, np.ascontiguousarray(state[0], np.float32).ctypes.data)

    @property
    def bytes(self) -> int:
        """Of the committed states of all slots, and of the others that are in memory now."""
        return 4 * self._size * max(self._slots, self._library.states_made(self.handle))

    @property
    def most_bytes(self) -> int:
        """The most that one slot takes: the committed state, and those of a step."""
        return 4 * self._size * (1 + self._kept)


@lru_cache(None)
def _int32s(count: int) -> Any:
    """A type of arrays. ctypes makes one that nothing holds again."""
    return ctypes.c_int32 * count


@lru_cache(None)
def _int64s(count: int) -> Any:
    """As `_int32s`."""
    return ctypes.c_int64 * count


_STATES = "native"
_WANT = {"none": 0, "last": 1, "all": 2}


class Forwarded(NamedTuple):
    """What a call gives. logits: float32 [batch, node, rows of the head], of the nodes that were wanted.

    features: [batch, node, taps * hidden], or None without taps. fed_back: [batch, node, width] of the nodes that were wanted,
    from a program that is given something; else None.
    """

    logits: np.ndarray
    features: np.ndarray | None
    fed_back: np.ndarray | None


class _ChainBuffers:
    """What native code reads and writes of a chain."""

    def __init__(self, chain: Chain) -> None:
        self.chain, depth, width = chain, chain.depth, chain.width
        self._features = None if chain.features is None else np.ascontiguousarray(chain.features, np.float32)
        self._tokens = (ctypes.c_int64 * (len(chain.tokens) + depth))(*chain.tokens)
        self._chances, self._siblings = (ctypes.c_float * (depth * width))(), (ctypes.c_int64 * (depth * (width - 1)))()

    def struct(self, length: int) -> ctypes.Structure:
        """length: committed tokens of its slot."""
        chain, count, tokens = self.chain, len(self.chain.tokens), ctypes.addressof(self._tokens)
        seed, stream, step, position = chain.noise  # ctypes keeps the lower bits
        return ChainStruct(
            tokens=tokens,
            features=address(self._features),
            drafted=tokens + 8 * count,
            count=count,
            depth=chain.depth,
            chances=ctypes.addressof(self._chances),
            siblings=ctypes.addressof(self._siblings),
            width=chain.width,
            seed=seed,
            row=chain.slot,
            length=length,
            stream=stream,
            step=step,
            position=position,
            temperature=chain.temperature,
            error=chain.error,
            min_probability=chain.min_probability,
        )

    def drawn(self, count: int) -> DrawnChain:
        """count: tokens that native code has drafted."""
        start, width = len(self.chain.tokens), self.chain.width
        chances = self._chances[: count * width] if self.chain.error else []
        siblings = list[list[tuple[int, float]]]()
        for n in range(count if width > 1 else 0):
            others = self._siblings[n * (width - 1) : (n + 1) * (width - 1)]
            each = zip(others, chances[n * width + 1 : (n + 1) * width], strict=True)
            siblings.append([one for one in each if one[0] >= 0])
        return DrawnChain(self._tokens[start : start + count], chances[::width], siblings)


class NativeStep:
    """A program that is ready to run."""

    def __init__(self, program: Program) -> None:
        self.program, self._keep, self._handles = program, list[object](), list[Any]()
        library = native.library()
        programs = [program.for_length(length).compiled() for length in ((0, MOST) if program.first_length else (0,))]
        self._keep += programs
        for struct, _ in programs:
            self._handles.append(library.program_new(struct))
            weakref.finalize(self, library.program_free, self._handles[-1])
        self._forward, self._judged, self._chains = library.forward, library.step, library.draft_chains
        self._draws: weakref.WeakKeyDictionary[LogitsWarper, Any] = weakref.WeakKeyDictionary()
        self._head_size, self._numbers = program.head.n, max(program.cells, default=-1) + 1
        self._ops, self._recurrent = (programs[-1][0].ops, programs[-1][0].count), program.recurrent
        self._addresses: weakref.WeakKeyDictionary[SlotCache, tuple[list[Any], Any, int]] = weakref.WeakKeyDictionary()

    def _handle(self, cache: SlotCache) -> Any:
        """Of the program for this cache. All its texts have the same angles, however long they are."""
        return self._handles[len(self._handles) > 1 and cache.max_length > self.program.first_length]

    def states(self, num_slots: int) -> dict[Hashable, NativeStates]:
        """Of the recurrent layers, for a cache. Empty without such layers."""
        if not self._recurrent:
            return {}
        return {_STATES: NativeStates(self._ops, (self._keep, self.program), self._recurrent, num_slots)}

    def forward(
        self, nodes: Nodes, taps: tuple[int, ...], want: Want, given: np.ndarray | None = None, fused: bool = False
    ) -> Forwarded:
        """given: float32 [batch, node, width], what the program is given: features, or if fused what was fed back.

        Raises ValueError for tokens, parents or a cache that do not fit, IndexError for slots."""
        parents, slots, held = nodes.parents, nodes.slots, nodes.held
        tokens = np.ascontiguousarray(nodes.tokens, np.int64)
        batch, count = tokens.shape
        if len(slots) != batch or not tokens.size:
            raise ValueError(
                f"tokens are {batch} x {count} for the cache slots {slots}: give each slot a line of one token at least"
            )
        if parents is not None:
            if parents.shape != (batch, held + count) or held < 0:
                raise ValueError(
                    f"tokens are {tokens.shape}, parents {parents.shape}; one parent per node, "
                    "first those of the nodes in the scratch"
                )
            parents = np.ascontiguousarray(parents, np.int64)
        places = address(tokens), address(parents), held, count
        return self._run(nodes.cache, slots, places, lambda: (tokens, parents), taps, want, given, fused)

    def step(
        self, cache: SlotCache, slots: list[int], taps: tuple[int, ...], check: Verification
    ) -> tuple[Forwarded, list[tuple[list[int], int]]]:
        """`forward` of a draft's nodes, and what `match` decides: `Verdict.host`, but for rows whose parameters read tokens."""
        draws = self._draws.get(check.warp)
        if draws is None:
            self._draws[check.warp] = draws = (DrawStruct * len(check.warp.histories))()
            for one, history, by_host in zip(draws, check.warp.histories, check.warp.active, strict=True):
                p = history.params
                one.temperature, one.top_k, one.top_p = p.temperature, p.top_k, p.top_p
                one.min_p, one.by_host = log_min_p(p), by_host
        draft, trees = check.draft, check.draft.host
        count = max(map(len, trees))
        size, numbers = len(trees) * count, list[int]()
        for part, none in ((0, 0), (1, PADDING)):  # of a node: its token, its parent
            for nodes in trees:
                numbers += [node[part] for node in nodes] + [none] * (count - len(nodes))
        tree = _int64s(3 * size)(*numbers)  # with room for the paths
        at = ctypes.addressof(tree)
        for b, (one, key) in enumerate(zip(draws, check.noise.keys(Stream.TOKEN, check.positions), strict=True)):
            one.path = at + 8 * (2 * size + b * count)
            one.seed, one.stream, one.step, one.position = key
        places, arrays = (at, at + 8 * size, 0, count), lambda: (draft.tokens, draft.parents)
        output = self._run(cache, slots, places, arrays, taps, "all", None, False, draws)
        begins = range(2 * size, 3 * size, count)
        return output, [(tree[n : n + one.accepted + 1], one.token) for n, one in zip(begins, draws, strict=True)]

    def _run(
        self,
        cache: SlotCache,
        slots: list[int],
        places: tuple[int | None, int | None, int, int],
        arrays: Callable[[], tuple[np.ndarray, np.ndarray | None]],
        taps: tuple[int, ...],
        want: Want,
        given: np.ndarray | None,
        fused: bool,
        *draws: Any,
    ) -> Forwarded:
        """places: addresses of tokens and parents, nodes that are held and new ones. arrays: both. draws: of a step."""
        program, batch, (tokens, parents, held, count) = self.program, len(slots), places
        table, kept = self._cache_table(cache, slots, held + count)
        shown = count if want == "all" else 1 if want == "last" else 0
        empty = np.empty if parents is None else np.zeros  # padding is not written
        logits = np.empty((batch, shown, self._head_size), np.float32)
        features = empty((batch, count, len(taps) * program.hidden), np.float32) if taps else None
        given = None if given is None else np.ascontiguousarray(given, np.float32)
        fed_back = None if given is None else empty((batch, shown, program.fed_back), np.float32)
        lengths = [cache.length[slot] for slot in slots]
        numbers = _int32s(2 * batch + len(taps))(*slots, *lengths, *taps)
        at = ctypes.addressof(numbers)
        job = ForwardStruct(
            tokens,
            parents,
            at,
            at + 4 * batch,
            ctypes.addressof(table),
            address(logits),
            address(features),
            at + 8 * batch,
            batch,
            held,
            count,
            cache.capacity,
            len(taps),
            _WANT[want],
            kept,
            address(given),
            address(fed_back),
            int(fused),
            self._states_of(cache),
        )
        error = (self._judged if draws else self._forward)(self._handle(cache), job, *draws)
        if error <= -(2**50):
            raise RuntimeError(f"slot {slots[-(2**50) - error]} has fewer nodes in its recurrent layers than {held}")
        if error:
            raise _explained(error, *arrays(), program.vocab_size)
        return Forwarded(logits, features, fed_back)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        """See `LanguageModel.draft_chains`. One native forward a token, for all chains."""
        drawn = [DrawnChain([], [], []) for _ in chains]
        asked = [i for i, c in enumerate(chains) if c.depth > 0]
        if not asked:
            return drawn
        room = max(len(c.tokens) + c.depth - 1 for c in chains)
        table, kept = self._cache_table(cache, [chains[i].slot for i in asked], room)
        buffers = [_ChainBuffers(chains[i]) for i in asked]
        structs = (ChainStruct * len(asked))(*(b.struct(cache.length[b.chain.slot]) for b in buffers))
        job = ChainsStruct(ctypes.addressof(structs), ctypes.addressof(table), len(asked), cache.capacity, kept)
        error = self._chains(self._handle(cache), job)
        if error:
            width = max(len(chains[i].tokens) for i in asked)
            tokens = np.array([[*chains[i].tokens, *[0] * width][:width] for i in asked])
            raise _explained(error, tokens, None, self.program.vocab_size)
        for i, b, struct in zip(asked, buffers, structs, strict=True):
            drawn[i] = b.drawn(struct.made)
        return drawn

    def _states_of(self, cache: SlotCache) -> int | None:
        """The handle of a cache's states. Raises ValueError for a cache of another model."""
        if not self._recurrent:
            return None
        states = cast("NativeStates | None", cache.states.get(_STATES))  # no other model has this key
        if states is None or not self._recurrent.items() <= states.layout.items():
            raise ValueError("this cache belongs to another model; use one made by new_cache of this one")
        return states.handle

    def _cache_table(self, cache: SlotCache, slots: list[int], count: int) -> tuple[Any, int]:
        """Addresses of the cache's arrays, and their format. Made again when the cache has grown."""
        if not all(0 <= s < cache.num_slots for s in slots):
            raise IndexError(f"slots are 0 to {cache.num_slots - 1} of this cache, got {slots}")
        cache.reserve(slots, count)
        entry = self._addresses.get(cache)
        if entry is not None and entry[0] is cache.layers:
            return entry[1:]
        dtype, table = KV_CACHE_DTYPES[cache.dtype] or np.dtype(np.float32), (ctypes.c_void_p * (2 * self._numbers))()
        cells = self.program.cells
        cache.make({i: ((heads, dim), (heads, value_dim)) for i, (heads, dim, value_dim) in cells.items()})
        for i, (heads, dim, value_dim) in cells.items():
            for part, (t, size) in enumerate(zip(cache.layers[i], (dim, value_dim), strict=True)):
                if t.shape[1:] != (heads, cache.capacity, packed_width(size, dtype)) or not t.flags.c_contiguous:
                    raise ValueError("this cache belongs to another model; use one made by new_cache of this one")
                table[2 * i + part] = t.ctypes.data
        self._addresses[cache] = (cache.layers, table, native.VECTOR_FORMATS[dtype])
        return self._addresses[cache][1:]


def _explained(error: int, tokens: np.ndarray, parents: np.ndarray | None, vocab: int) -> ValueError:
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
