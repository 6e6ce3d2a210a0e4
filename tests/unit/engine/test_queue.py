"""The queue, as a state machine beside a plain list of turns."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.engine.queue import FairQueue


class Turns(RuleBasedStateMachine):
    """turns: clients in the order of their turns, each with what it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(9)
        self.turns: list[tuple[str, list[SimpleNamespace]]] = []

    def of(self, client: str) -> list[SimpleNamespace] | None:
        return next((waiting for name, waiting in self.turns if name == client), None)

    @rule(client=st.sampled_from("abc"))
    def put(self, client: str) -> None:
        one, waiting = SimpleNamespace(client=client), self.of(client)
        self.queue.put(one)
        self.turns += [] if waiting is not None else [(client, [])]
        self.turns[[name for name, _ in self.turns].index(client)][1].append(one)

    @rule(client=st.sampled_from("abc"))
    def preempted_goes_first(self, client: str) -> None:
        one, waiting = SimpleNamespace(client=client), self.of(client) or []
        self.queue.put_back(one)
        self.turns = [(client, [one, *waiting]), *(turn for turn in self.turns if turn[0] != client)]

    @precondition(lambda self: self.turns)
    @rule()
    def pop(self) -> None:
        client, (first, *waiting) = self.turns.pop(0)
        assert self.queue.pop() is first
        self.turns += [(client, waiting)] if waiting else []

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        _, waiting = data.draw(st.sampled_from(self.turns))
        gone = data.draw(st.sampled_from(waiting))
        self.queue.remove(gone)
        waiting.remove(gone)
        self.turns = [turn for turn in self.turns if turn[1]]

    @invariant()
    def holds_the_same_in_the_same_order(self) -> None:
        every = [one for _, waiting in self.turns for one in waiting]
        assert [*map(id, self.queue)] == [*map(id, every)]
        assert len(self.queue) == len(every)


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=40)
