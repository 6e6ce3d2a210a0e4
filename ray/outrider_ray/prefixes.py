"""Which replica has read the beginning of a prompt before.

A prompt is cut into blocks, and the hash of a block covers all blocks before it. For each hash the index keeps the replica
that was sent it last. It forgets what was not used for the longest time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, abc

BLOCK = 64  # characters
WEIGHT = 4.0  # waiting requests that a whole prompt in the prefix cache is worth


class PrefixIndex:
    """Maps beginnings of prompts to replicas. limit: hashes to keep."""

    def __init__(self, limit: int = 200_000) -> None:
        self.limit, self._owners = limit, OrderedDict[bytes, str]()

    def add(self, prompt: str, replica: str) -> None:
        """A prompt was sent to a replica."""
        for key in hashes(prompt):
            self._owners[key] = replica
            self._owners.move_to_end(key)
        while len(self._owners) > self.limit:
            self._owners.popitem(last=False)

    def forget(self, replica: str) -> None:
        """A replica is gone, and its cache with it."""
        for key in [key for key, owner in self._owners.items() if owner == replica]:
            del self._owners[key]

    def shares(self, prompt: str) -> dict[str, float]:
        """The share of a prompt's blocks that each replica was sent before, in [0, 1]; only replicas with a share."""
        keys, shares = hashes(prompt), dict[str, float]()
        for count, key in enumerate(keys, 1):
            owner = self._owners.get(key)
            if owner is None:
                break
            shares[owner] = count / len(keys)  # the longest beginning that it had
        return shares


def hashes(prompt: str) -> list[bytes]:
    """The hash of each whole block of a prompt, with all before it."""
    digest, digests = hashlib.blake2b(digest_size=12), list[bytes]()
    for at in range(BLOCK, len(prompt) + 1, BLOCK):
        digest.update(prompt[at - BLOCK : at].encode("utf-8", "replace"))
        digests.append(digest.digest())
    return digests


def ranked(
    prompt: str, loads: abc.Mapping[str, int], shares: abc.Mapping[str, float], weight: float = WEIGHT
) -> list[str]:
    """The replicas, the best first. loads: requests that each has now.

    A replica costs its requests, less `weight` for a prompt that it has read. Equals are ordered by a hash of the
    beginning of the prompt, so fronts that know nothing of each other choose alike.
    """
    head = prompt[:BLOCK].encode("utf-8", "replace")

    def order(replica: str) -> tuple[float, bytes]:
        cost = loads[replica] - weight * shares.get(replica, 0.0)
        return cost, hashlib.blake2b(head + replica.encode(), digest_size=8).digest()

    return sorted(loads, key=order)
