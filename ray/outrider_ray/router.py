"""The router of the engine's replicas, on Ray Serve's public interface: prefix against load."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider_ray.prefixes import PrefixIndex, ranked


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has read most of its prompt, unless others have much less to do."""

    def initialize_state(self, prefix_weight: float = 4.0, **_: Any) -> None:
        """prefix_weight: waiting requests that a whole prompt in the prefix cache is worth; 0 looks at load only."""
        self._prefixes, self._weight = PrefixIndex(), prefix_weight
        self._sent = Counter[str]()  # requests that each replica has from here, now

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates one by one, the best first."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if (home := _asked(pending_request, 1)) in by_name:
            return [[by_name[home]]]
        prompt = _asked(pending_request, 0)
        loads = {name: self._load(replica) for name, replica in by_name.items()}
        shares = self._prefixes.shares(prompt) if self._weight else {}
        return [[by_name[name]] for name in ranked(prompt, loads, shares, self._weight)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember what the replica reads now."""
        self._sent[replica_id.unique_id] += 1
        if self._weight and (prompt := _asked(pending_request, 0)):
            self._prefixes.add(prompt, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """One request less."""
        self._sent[replica_id.unique_id] -= 1

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Its cache is gone."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.forget(replica_id.unique_id)
        del self._sent[replica_id.unique_id]

    def _load(self, replica: RunningReplica) -> int:
        """Requests of a replica: those sent from here, or all that it last reported if they are more."""
        told = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return max(told, self._sent[replica.replica_id.unique_id])


def _asked(pending: PendingRequest | None, number: int) -> str:
    """An argument of `OutriderEngine.take`; empty for other calls."""
    value = pending.args[number] if pending is not None and len(pending.args) > number else ""
    return value if isinstance(value, str) else ""
