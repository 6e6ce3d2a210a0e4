"""Earlier responses, so that a request can go on from one by its id. In memory, bounded, gone with the process."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from outrider.serve.errors import Refused, dumps


@dataclass(frozen=True)
class StoredResponse:
    """response: as it was sent. items: of the whole conversation, without instructions. size: bytes."""

    response: dict[str, Any]
    items: list[dict[str, Any]]
    size: int


class ResponseStore:
    """The responses that were used last. limit: how many. limit_bytes: of all, as JSON; one that is larger is not kept."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        self.limit, self.limit_bytes, self.bytes = limit, limit_bytes, 0
        self._kept = OrderedDict[str, StoredResponse]()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Keep a response, and let go of the oldest ones."""
        size = len(dumps(response)) + len(dumps(items))
        self._kept[response["id"]] = StoredResponse(response, items, size)
        self.bytes += size
        while self._kept and (len(self._kept) > self.limit or self.bytes > self.limit_bytes):
            _, old = self._kept.popitem(last=False)
            self.bytes -= old.size

    def get(self, name: str, status: int = 404, param: str | None = None) -> StoredResponse:
        """A response. Raises Refused, with this status and param, if it is not here."""
        if name not in self._kept:
            raise Refused(
                f"there is no response {name[:80]!r} here: the server keeps the last {self.limit} in memory, of up to "
                f"{self.limit_bytes >> 20} MiB, and none with store=false; send the whole conversation as input",
                status,
                param=param,
                code="previous_response_not_found" if param else "response_not_found",
            )
        self._kept.move_to_end(name)
        return self._kept[name]

    def drop(self, name: str) -> None:
        """Let go of a response. Raises Refused if it is not here."""
        self.bytes -= self.get(name).size
        del self._kept[name]
