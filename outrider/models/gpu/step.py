"""A step on a GPU under the rule `match`: forward, choice, walk and move in one graph. The host sends once and reads once.

Where nothing drafts, the device has all that the next step needs. So it is told that step before the host reads this one, and the
host works while the device does. If the next step is another one, or the text has ended, what was told is not read. Where drafts
may come, that is done if it pays: see `_Pace`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider.core.types import PADDING
from outrider.kernels.gpu import attention, choice
from outrider.kernels.gpu.jit import power_of_two
from outrider.models.base import LazyArray, Verification
from outrider.models.gpu.cache import GpuCache
from outrider.models.gpu.plan import GpuPlan
from outrider.models.gpu.rows import RowBuffer, Rows, paths_of, reach

MOST_ROWS = 256  # of a step
_SEEN = 64  # steps that are remembered: the host takes 3 to 9 % of a step of 1.5B, and one in vain must count for less
T = TypeVar("T")


class Graphs:
    """What a device was told, captured by a key, and told again in one launch. A device without graphs is told each time."""

    def __init__(self, device: str) -> None:
        self._captures, self._graphs, self._pool = device.startswith("cuda"), dict[Hashable, Any](), None

    def __len__(self) -> int:
        """Captured ones."""
        return len(self._graphs)

    def run(self, key: Hashable, tell: Callable[[], T]) -> T:
        """tell: gives the device the same commands for a key, whatever the numbers in its memory are. Returns what it returns."""
        if key in self._graphs:
            graph, out = self._graphs[key]
            graph.replay()
            return out
        out = tell()  # it also compiles what is missing, and allots what it needs
        if self._captures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                tell()
            self._graphs[key], self._pool = (graph, out), graph.pool()
        return out


@dataclass
class _Command:
    """A step that the device was told.

    Attributes:
        check: What asked for it, or for the step before it.
        turn, told: Of the plan, and the clock, when it was told.
        latest: The turn of the plan as long as its logits can be read.
        tokens: Of its roots; None until the step before it is read.
        after: The step that was told before it was asked for.
    """

    cache: GpuCache
    slots: list[int]
    starts: list[int]
    check: Verification
    taps: tuple[int, ...]
    rows: Rows
    results: Tensor
    done: Any
    logits: Tensor
    features: Tensor | None
    turn: int
    told: float
    latest: int = 0
    tokens: list[int] | None = None
    after: _Command | None = None

    def serves(self, cache: GpuCache, slots: list[int], starts: list[int], check: Verification) -> bool:
        """Whether it is the step that is asked for. It has no taps, and a node for each text."""
        before, trees = self.check, check.draft.host
        alike = cache is self.cache and check.warp is before.warp and check.noise.seed is before.noise.seed
        if not alike or (slots, starts) != (self.slots, self.starts) or any(len(tree) > 1 for tree in trees):
            return False
        return [tree[0][0] for tree in trees] == self.tokens


class _Pace:
    """Whether it pays to tell the next step before it is asked for, by what was seen after the last steps without drafts.

    It hides the work of the host between two steps. In vain it costs a step, as often as another one than that is asked for.
    """

    def __init__(self) -> None:
        self._host, self._device, self.vain = (deque[float](maxlen=_SEEN) for _ in range(3))  # seconds, seconds, 0 or 1
        self._judged = 0.0  # when the last step was read

    @property
    def pays(self) -> bool:
        host, device = (sorted(each)[len(each) // 2] if each else 0.0 for each in (self._host, self._device))
        return host > device * sum(self.vain) / _SEEN

    def asked(self, same: bool) -> None:
        """After a step without drafts another is asked for. same: it is the one that the device could be told."""
        self._host.append(perf_counter() - self._judged)
        self.vain.append(not same)

    def read(self, told: float) -> None:
        """A step that was told at this time."""
        now = perf_counter()
        self._device.append(now - max(told, self._judged))
        self._judged = now


class Launched(NamedTuple):
    """A step that is on its way.

    logits, features: as of a forward. verdicts: waits, and gives the path and the token of each entry, as `Verdict.host`.
    first: a graph was captured for it, or for the step after it.
    """

    logits: LazyArray
    features: LazyArray | None
    verdicts: Callable[[], list[tuple[list[int], int]]]
    first: bool


class GpuStep:
    """The steps of a plan."""

    def __init__(self, plan: GpuPlan) -> None:
        self._plan, self._buffers, device = plan, dict[int, RowBuffer](), plan.device
        most, blocks = min(MOST_ROWS, plan.logit_rows), choice.blocks_of(plan.program.head.n)
        self._best = torch.zeros(most, blocks, device=device)
        self._index = torch.zeros(most, blocks, dtype=torch.int32, device=device)
        self._results = torch.zeros(3 * most, dtype=torch.int32, device=device)
        cuda = self._results.is_cuda  # two of these: a step is told before the one before it is read
        self._told = [
            (torch.zeros(3 * most, dtype=torch.int32, pin_memory=cuda), torch.cuda.Event() if cuda else None)
            for _ in range(2)
        ]
        self._next: _Command | None = None  # told, and not yet asked for
        self._pace = _Pace()
        self._before: tuple[Any, list[int]] | None = None  # parameters and slots of the last step, if it had no drafts

    def launch(
        self, cache: GpuCache, slots: list[int], taps: tuple[int, ...], check: Verification, by_host: Sequence[bool]
    ) -> Launched | None:
        """Tell the device a step. None: it has more rows than a step may have, or tokens that the model does not.

        by_host: the entries that the host judges. Of these the device accepts nothing, and their token means nothing."""
        starts, now, known = [cache.length[slot] for slot in slots], self._next, len(self.graphs(cache))
        if self._before is not None:
            self._pace.asked(self._before == (check.warp, slots) and check.draft.nodes == 1)
        self._next = self._before = None
        if now is not None and not taps and now.serves(cache, slots, starts, check):
            now.check = check
        else:
            if (rows := self._rows(cache, slots, starts, check, by_host)) is None:
                return None
            now = self._tell(cache, slots, starts, check, taps, rows)
        logprobs = any(history.params.logprobs is not None for history in check.warp.histories)
        if now.rows.nodes == 1 and not (taps or logprobs or any(by_host)):
            self._before, after = (check.warp, slots), [start + 1 for start in starts]
            if max(after) < now.rows.length and (self._pace.pays if check.following is None else check.following):
                self._next = now.after = self._tell(cache, slots, after, check, taps, now.rows)
        now.latest = self._plan.turn
        read = partial(self._read, now)
        out = LazyArray(partial(read, "logits")), LazyArray(partial(read, "features")) if taps else None
        return Launched(*out, partial(self._verdicts, now, by_host), len(self.graphs(cache)) > known)

    def _rows(
        self, cache: GpuCache, slots: list[int], starts: list[int], check: Verification, by_host: Sequence[bool]
    ) -> Rows | None:
        """Send the rows of a step."""
        trees, batch = check.draft.host, len(slots)
        count = max(map(len, trees))
        chains = all(parent == n - 1 for tree in trees for n, (_, parent) in enumerate(tree))
        paths = [] if chains else [paths_of([up for _, up in tree]) for tree in trees]
        width = 0 if chains else power_of_two(max(len(path) for each in paths for path in each))
        entries, nodes = power_of_two(batch), power_of_two(count)
        if entries * nodes > len(self._best):
            return None
        tokens, positions, cells, parents, nodes_above = (list[int]() for _ in range(5))
        for b, (tree, start) in enumerate(zip(trees, starts, strict=True)):
            own, rest = range(start, start + len(tree)), nodes - len(tree)
            tokens += [token for token, _ in tree] + [0] * rest
            cells += [*own] + [0] * rest
            positions += ([*own] if chains else [start + len(path) - 1 for path in paths[b]]) + [-1] * rest
            parents += [-1] + [PADDING] * (nodes - 1) if by_host[b] else [up for _, up in tree] + [PADDING] * rest
            for path in paths[b] if paths else ():
                nodes_above += path + [0] * (width - len(path))
            nodes_above += [0] * (rest * width)
        if not 0 <= min(tokens) <= max(tokens) < self._plan.program.vocab_size:
            return None
        cache.reserve(slots, count)
        if width not in self._buffers:  # a graph knows its address, so it stays
            self._buffers[width] = RowBuffer(self._plan.device, len(self._best), width)
        length = min(reach(max(starts) + count + 1), cache.capacity)
        rows, fields = self._buffers[width].views(entries, nodes, width, length)
        temperatures, unused = [history.params.temperature for history in check.warp.histories], entries - batch
        each: dict[str, Any] = {"seeds": check.noise.seed, "slots": slots, "starts": starts}
        for name, numbers in (each | {"temperatures": temperatures}).items():
            fields[name][:] = [*numbers, *[0] * unused]
        unused *= nodes
        fields["tokens"][:], fields["cells"][:] = tokens + [0] * unused, cells + [0] * unused
        fields["positions"][:], fields["parents"][:] = positions + [-1] * unused, parents + [PADDING] * unused
        if width:
            fields["paths"].reshape(-1)[: len(nodes_above)] = nodes_above
        self._buffers[width].send(rows.size)
        return rows

    def forget(self) -> None:
        """Drop the step that was told ahead, which holds the memory of its cache."""
        self._next = None

    def graphs(self, cache: GpuCache) -> Graphs:
        """Of the steps over a cache."""
        if (graphs := cache.kept.get(self)) is None:
            graphs = cache.kept[self] = Graphs(self._plan.device)
        return graphs

    def _tell(
        self,
        cache: GpuCache,
        slots: list[int],
        starts: list[int],
        check: Verification,
        taps: tuple[int, ...],
        rows: Rows,
    ) -> _Command:
        """rows: sent, or left by the step before."""
        self._plan.turn += 1
        logits, features = self.graphs(cache).run((rows, taps), lambda: self._commands(cache, taps, rows))
        self._told.reverse()
        told, done = self._told[0]
        size = rows.entries + 2 * rows.count
        told[:size].copy_(self._results[:size], non_blocking=True)
        if done is not None:
            done.record()
        more = told[:size], done, logits, features, self._plan.turn, perf_counter()
        return _Command(cache, slots, starts, check, taps, rows, *more)

    def _commands(self, cache: GpuCache, taps: tuple[int, ...], rows: Rows) -> tuple[Tensor, Tensor | None]:
        """All kernels of a step. A step of roots leaves the rows of the one after it."""
        (logits, features), (count, entries) = self._plan.run(rows, cache, taps), (rows.count, rows.entries)
        best, index = self._best[:count], self._index[:count]
        accepted, path, drawn = self._results[: entries + 2 * count].split([entries, count, count])
        path, drawn = path.view(entries, -1), drawn.view(entries, -1)
        choice.choose(logits, best, index, rows, rows.seeds, rows.temperatures)
        choice.walk(best, index, rows, path, accepted, drawn)
        if rows.paths is not None:
            for cells in cache.groups:
                attention.move(cells, rows, path, accepted)
        if rows.nodes == 1:
            choice.advance(rows, drawn)
        return logits, features

    def _read(self, one: _Command, what: str) -> np.ndarray:
        """A copy of what a step has left: its "logits" or "features"."""
        if self._plan.turn != one.latest:
            raise RuntimeError(
                "a later forward of this model has overwritten the logits of a step; read them before it"
            )
        if (
            one.turn != one.latest
        ):  # by the step after it: this one is told again, and then that one, when it is asked for
            self._next, batch = None, len(one.slots)
            self._pace.vain.extend([1.0] * _SEEN)
            rows = self._rows(one.cache, one.slots, one.starts, one.check, [False] * batch)
            assert rows is not None and rows is one.rows  # noqa: PT018
            one.turn = one.latest = self._tell(one.cache, one.slots, one.starts, one.check, one.taps, rows).turn
        values, rows, (batch, count) = getattr(one, what), one.rows, one.check.draft.tokens.shape
        return values.view(rows.entries, rows.nodes, -1)[:batch, :count].cpu().numpy()

    def _verdicts(self, one: _Command, by_host: Sequence[bool]) -> list[tuple[list[int], int]]:
        if one.done is not None:
            one.done.synchronize()
        if one.rows.nodes == 1:
            self._pace.read(one.told)
        rows, numbers, out = one.rows, one.results.tolist(), list[tuple[list[int], int]]()
        for b, accepted in enumerate(numbers[: len(one.slots)]):
            at = rows.entries + b * rows.nodes
            path = numbers[at : at + accepted + 1]
            out.append((path, numbers[at + rows.count + path[-1]]))
        if rows.paths is not None:
            each = zip(one.slots, out, by_host, strict=True)
            one.cache.placed = {slot: path for slot, (path, _), host in each if not host}
        if one.after is not None:
            one.after.tokens, one.after = [token for _, token in out], None
        return out
