"""An HTTP request on its way to a replica, and how an answer comes back."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.serve.guard import OWNER

DROP_FROM_REQUEST = {
    b"content-length",
    b"connection",
    b"transfer-encoding",
    b"keep-alive",
    b"host",
    b"authorization",
    b"origin",
    OWNER,
}
DROP_FROM_RESPONSE = {b"connection", b"transfer-encoding", b"x-request-id"}


@dataclass(frozen=True)
class ReplicaRequest:
    """An HTTP request. prompt: what its prompt begins with, for the router; empty if it has none.

    home: the replica that keeps what the request is about; empty if any will do.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    prompt: str = ""
    home: str = ""


@dataclass(frozen=True)
class ResponseStart:
    """The first part of an answer. replica: which one answers."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    replica: str = ""


class ReplicaLost(Exception):
    """A replica is gone, and its answer with it. Another one may be asked."""
