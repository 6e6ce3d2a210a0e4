"""The queue that sequences wait in, and what it says when it is full."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from outrider.engine.request import Sequence


class QueueFull(Exception):
    """No room to wait. retry_after: seconds until there may be."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(f"{waiting} requests are waiting already; try again in {retry_after} s")
        self.retry_after = retry_after


class EngineStopped(Exception):
    """The engine takes no requests: it is shutting down, or its thread has died."""


class FairQueue:
    """First come, first served within a client; clients take turns. Bounded. Any thread may ask for its length."""

    def __init__(self, limit: float) -> None:
        self.limit, self._count = limit, 0
        self._clients: OrderedDict[str, deque[Sequence]] = OrderedDict()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequences in self._clients.values() for sequence in sequences)

    def put(self, sequence: Sequence) -> None:
        self._count += 1
        self._clients.setdefault(sequence.client, deque()).append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that was preempted is the next one."""
        self._count += 1
        self._clients.setdefault(sequence.client, deque()).appendleft(sequence)
        self._clients.move_to_end(sequence.client, last=False)

    def pop(self) -> Sequence:
        """Take the sequence whose turn it is, the first in order; its client goes to the end of the line."""
        client, sequences = next(iter(self._clients.items()))
        sequence = sequences.popleft()
        self._count -= 1
        del self._clients[client]
        if sequences:
            self._clients[client] = sequences
        return sequence

    def remove(self, sequence: Sequence) -> None:
        sequences = self._clients[sequence.client]
        sequences.remove(sequence)
        self._count -= 1
        if not sequences:
            del self._clients[sequence.client]
