"""A program as Python calls it: one call for a forward, and one for whole chains of draft tokens."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Hashable, Sequence
from operator import is_not
from typing import Any, NamedTuple, cast

import numpy as np

from outrider.core.noise import Stream
from outrider.core.sampling import log_min_p
from outrider.core.types import PADDING
from outrider.kernels import cpu as native
from outrider.kernels.cpu.library import ChainsStruct, ChainStruct, DrawStruct, ForwardStruct
from outrider.kernels.cpu.packed import MOST
from outrider.kernels.vectors import packed_width
from outrider.models.base import Chain, DrawnChain, Verification, Want, check_taps
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

    def __init__(self, chain: Chain, length: int) -> None:
        """length: committed tokens of its slot."""
        self.chain, count, depth, width = chain, len(chain.tokens), chain.depth, chain.width
        self._features = None if chain.features is None else np.ascontiguousarray(chain.features, np.float32)
        self._tokens = (ctypes.c_int64 * (count + depth))(*chain.tokens)
        self._chances, self._siblings = (ctypes.c_float * (depth * width))(), (ctypes.c_int64 * (depth * (width - 1)))()
        seed, stream, step, position = chain.noise  # ctypes keeps the lower bits
        self.struct = ChainStruct(
            tokens=ctypes.addressof(self._tokens),
            features=address(self._features),
            drafted=ctypes.addressof(self._tokens) + 8 * count,
            count=count,
            depth=depth,
            chances=ctypes.addressof(self._chances),
            siblings=ctypes.addressof(self._siblings),
            width=width,
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


class _Kept:
    """What is kept of a cache for a program, until the cache grows: addresses of its arrays, their format, and the last step."""

    def __init__(self, layers: list[Any], table: ctypes.Array[ctypes.c_void_p], vectors: int) -> None:
        self.layers, self.table, self.vectors = layers, table, vectors
        self.call: _StepCall | None = None


class _StepCall:
    """A step as native code takes it and answers it: kept for a batch, because most of it stays from step to step."""

    def __init__(
        self, step: NativeStep, cache: SlotCache, kept: _Kept, given: tuple[Any, ...], check: Verification, count: int
    ) -> None:
        """given: what it is kept for. count: nodes of the largest tree."""
        self.given, (slots, taps, *_), program = given, given, step.program
        self.handle = step.handle(cache)
        check_taps(taps, program.num_layers)
        batch, self.room = len(slots), 1 << (count - 1).bit_length()
        self._count, self._rows, self._width = 0, batch, len(taps) * program.hidden
        self._logits, self.features = np.empty((batch * self.room, program.head.n), np.float32), None
        self._places = (ctypes.c_int32 * (2 * batch + len(taps)))(*slots, *[0] * batch, *taps)
        self._lengths = (ctypes.c_int32 * batch).from_buffer(self._places, 4 * batch)
        self._tokens, self._parents, self._paths = [(ctypes.c_int64 * (batch * self.room))() for _ in range(3)]
        self.draws = (DrawStruct * batch)()
        self._each = list(self.draws)
        keys = check.noise.keys(Stream.TOKEN, check.positions)
        for b, (one, history, key) in enumerate(zip(self._each, check.warp.histories, keys, strict=True)):
            p, one.path = history.params, ctypes.addressof(self._paths) + 8 * b * self.room
            one.temperature, one.top_k, one.top_p, one.min_p = p.temperature, p.top_k, p.top_p, log_min_p(p)
            one.by_host, (one.seed, one.stream, one.step, one.position) = check.warp.active[b], key
        at = ctypes.addressof(self._places)
        self.job = ForwardStruct(
            tokens=ctypes.addressof(self._tokens),
            rows=at,
            lengths=at + 4 * batch,
            cache=ctypes.addressof(kept.table),
            logits=address(self._logits),
            taps=at + 8 * batch,
            batch=batch,
            capacity=cache.capacity,
            taps_count=len(taps),
            want=_WANT["all"],
            cache_format=kept.vectors,
            states=step.states_of(cache),
        )

    def ask(
        self, trees: Sequence[Sequence[tuple[int, int]]], count: int, lengths: list[int], check: Verification
    ) -> None:
        """Set what is new in a step. count: nodes of the largest tree."""
        job, size = self.job, self._rows * count
        if count != self._count:
            self._count = job.nodes = count
            self.logits = self._logits[: self._rows * count].reshape(self._rows, count, -1)
            job.parents = ctypes.addressof(self._parents) if count > 1 else None
        if self._width:  # drafters keep them
            self.features = np.zeros((self._rows, count, self._width), np.float32)  # padding is not written
            job.features = address(self.features)
        self._lengths[:] = lengths
        if count == 1:
            self._tokens[:size] = [tree[0][0] for tree in trees]
        else:
            flat = [node for tree in trees for node in (*tree, *[(0, PADDING)] * (count - len(tree)))]
            self._tokens[:size], self._parents[:size] = zip(*flat, strict=True)
        for one, position in zip(self._each, check.positions, strict=True):
            one.position = position

    def told(self) -> list[tuple[list[int], int]]:
        """As `Verdict.host`, but for the rows of the host."""
        out, room = list[tuple[list[int], int]](), self.room
        for b, one in enumerate(self._each):
            accepted = one.accepted
            out.append((self._paths[b * room : b * room + accepted + 1] if accepted else [0], one.token))
        return out


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
        self._ops, self._recurrent = (programs[-1][0].ops, programs[-1][0].count), program.recurrent

    def handle(self, cache: SlotCache) -> Any:
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
        cache, parents, slots, held, program = nodes.cache, nodes.parents, nodes.slots, nodes.held, self.program
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
        kept = self._kept(cache, slots, held + count)
        shown = count if want == "all" else 1 if want == "last" else 0
        empty = np.empty if parents is None else np.zeros  # padding is not written
        logits = np.empty((batch, shown, program.head.n), np.float32)
        features = empty((batch, count, len(taps) * program.hidden), np.float32) if taps else None
        given = None if given is None else np.ascontiguousarray(given, np.float32)
        fed_back = None if given is None else empty((batch, shown, program.fed_back), np.float32)
        numbers = np.array([*slots, *nodes.lengths, *taps], np.int32)
        at = numbers.ctypes.data
        job = ForwardStruct(
            address(tokens),
            address(parents),
            at,
            at + 4 * batch,
            ctypes.addressof(kept.table),
            address(logits),
            address(features),
            at + 8 * batch,
            batch,
            held,
            count,
            cache.capacity,
            len(taps),
            _WANT[want],
            kept.vectors,
            address(given),
            address(fed_back),
            int(fused),
            self.states_of(cache),
        )
        if error := self._forward(self.handle(cache), job):
            raise self._explained(error, slots, held, tokens, parents)
        return Forwarded(logits, features, fed_back)

    def step(
        self, cache: SlotCache, slots: list[int], taps: tuple[int, ...], check: Verification
    ) -> tuple[np.ndarray, np.ndarray | None, list[tuple[list[int], int]]]:
        """(logits, features) as of `forward`, which the next step writes anew, and what `match` decides.

        That is `Verdict.host`, but for rows whose parameters read tokens."""
        trees, given = check.draft.host, (slots, taps, check.warp, check.noise.seed)
        count = max(map(len, trees))
        kept = self._kept(cache, slots, count)
        call = kept.call
        if call is None or call.room < count or any(map(is_not, call.given, given)):
            call = kept.call = _StepCall(self, cache, kept, given, check, count)
        call.ask(trees, count, [cache.length[slot] for slot in slots], check)
        if error := self._judged(call.handle, call.job, call.draws):
            raise self._explained(error, slots, 0, check.draft.tokens, check.draft.parents)
        return call.logits, call.features, call.told()

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        """See `LanguageModel.draft_chains`. One native forward a token, for all chains."""
        asked = [chain for chain in chains if chain.depth > 0]
        drawn = list[DrawnChain]()
        if asked:
            room = max([len(chain.tokens) + chain.depth - 1 for chain in asked])
            kept = self._kept(cache, [chain.slot for chain in asked], room)
            buffers = [_ChainBuffers(chain, cache.length[chain.slot]) for chain in asked]
            structs = (ChainStruct * len(asked))(*[each.struct for each in buffers])
            begin, table = ctypes.addressof(structs), ctypes.addressof(kept.table)
            job = ChainsStruct(begin, table, len(asked), cache.capacity, kept.vectors)
            if error := self._chains(self.handle(cache), job):
                width = max(len(chain.tokens) for chain in asked)
                tokens = np.array([[*chain.tokens, *[0] * width][:width] for chain in asked])
                raise self._explained(error, [], 0, tokens, None)
            drawn = [each.drawn(struct.made) for each, struct in zip(buffers, structs, strict=True)]
        following = iter(drawn)
        return [next(following) if chain.depth > 0 else DrawnChain([], [], []) for chain in chains]

    def states_of(self, cache: SlotCache) -> int | None:
        """The handle of a cache's states. Raises ValueError for a cache of another model."""
        if not self._recurrent:
            return None
        states = cast("NativeStates | None", cache.states.get(_STATES))  # no other model has this key
        if states is None or not self._recurrent.items() <= states.layout.items():
            raise ValueError("this cache belongs to another model; use one made by new_cache of this one")
        return states.handle

    def _kept(self, cache: SlotCache, slots: list[int], count: int) -> _Kept:
        """What is kept of a cache, which has room for so many nodes then."""
        if min(slots) < 0 or max(slots) >= cache.num_slots:
            raise IndexError(f"slots are 0 to {cache.num_slots - 1} of this cache, got {slots}")
        cache.reserve(slots, count)
        kept: _Kept | None = cache.kept.get(self)
        if kept is not None and kept.layers is cache.layers:
            return kept
        dtype, cells = KV_CACHE_DTYPES[cache.dtype] or np.dtype(np.float32), self.program.cells
        table = (ctypes.c_void_p * (2 * max(cells, default=-1) + 2))()
        cache.make({i: ((heads, dim), (heads, value_dim)) for i, (heads, dim, value_dim) in cells.items()})
        for i, (heads, dim, value_dim) in cells.items():
            for part, (t, size) in enumerate(zip(cache.layers[i], (dim, value_dim), strict=True)):
                if t.shape[1:] != (heads, cache.capacity, packed_width(size, dtype)) or not t.flags.c_contiguous:
                    raise ValueError("this cache belongs to another model; use one made by new_cache of this one")
                table[2 * i + part] = t.ctypes.data
        kept = cache.kept[self] = _Kept(cache.layers, table, native.VECTOR_FORMATS[dtype])
        return kept

    def _explained(
        self, error: int, slots: list[int], held: int, tokens: np.ndarray, parents: np.ndarray | None
    ) -> Exception:
        """What a call of native code says is wrong."""
        if error <= -(2**50):
            return RuntimeError(f"slot {slots[-(2**50) - error]} has fewer nodes in its recurrent layers than {held}")
        nodes = tokens.shape[1]
        if error <= -(2**40):
            entry, node = divmod(-(2**40) - error, nodes)
            vocab = self.program.vocab_size
            return ValueError(
                f"token {int(tokens[entry, node])} (entry {entry}, node {node}) is not in the vocabulary of {vocab}"
            )
        entry, node = divmod(-1 - error, nodes if parents is None else parents.shape[1])
        parent = "none" if parents is None else int(parents[entry, node])
        return ValueError(
            f"node {node} of entry {entry} has parent {parent}: a parent is -1 for the root, -2 for padding, else a smaller "
            "node that is no padding, and every entry has a root"
        )
