"""The replicas of the engine, as the front calls them through Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError, TaskCancelledError, WorkerCrashedError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from outrider.serve.errors import Refused
from outrider_ray.calls import ReplicaLost, ReplicaRequest, ResponseStart
from outrider_ray.direct import Connections

PAGE_TIMEOUT = 5.0  # seconds for the pages of all replicas
LOST = (RayActorError, WorkerCrashedError, DeploymentUnavailableError, ReplicaUnavailableError)


class RayReplicas:
    """The replicas behind a deployment handle. patience: seconds until one takes a call."""

    def __init__(self, handle: DeploymentHandle[Any], patience: float) -> None:
        self._handle, self._patience = handle, patience
        self._stream: Any = handle.options(stream=True)  # typed as if it did not stream
        self._connections, self._watching = Connections(), set[asyncio.Task[None]]()

    async def ask(self, call: ReplicaRequest) -> AsyncGenerator[ResponseStart | bytes, None]:
        """Send a call to one of them. Yields a `ResponseStart`, then the parts of the body.

        Raises ReplicaLost when the replica dies, and Refused when none can take the call. A reader that stops early
        cancels the call.
        """
        held, lost, ended = self._stream.take.remote(call.prompt, call.home), asyncio.Future[None](), False
        try:
            reservation = await asyncio.wait_for(anext(held), self._patience)
            self._watch(held, lost)
            async with aclosing(self._connections.ask(reservation, call, lost)) as parts:
                async for part in parts:
                    yield part
            ended = True
        except BackPressureError as full:
            raise Refused("all replicas have all that they can take", 429, code="queue_full", retry=2) from full
        except TimeoutError:
            raise Refused(
                f"no replica took the request in {self._patience:g} s", 503, code="no_replica", retry=5
            ) from None
        except LOST as lost:
            raise ReplicaLost(type(lost).__name__) from lost
        finally:
            if not ended:
                held.cancel()

    def _watch(self, held: Any, lost: asyncio.Future[None]) -> None:
        """Set `lost` if the replica dies while it holds a reservation."""

        async def watch() -> None:
            try:
                async for _ in held:
                    pass
            except LOST:
                if not lost.done():
                    lost.set_result(None)
            except (RequestCancelledError, TaskCancelledError):
                pass

        task = asyncio.ensure_future(watch())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def each(self, call: ReplicaRequest) -> dict[str, bytes]:
        """The body of every replica's answer, by replica. A replica that does not answer is left out."""
        try:
            response = self._handle.broadcast("page", call)
            pages = await response.results_async(timeout_s=PAGE_TIMEOUT, return_exceptions=True)
        except (*LOST, TimeoutError):
            return {}
        return dict(pair for pair in pages if isinstance(pair, tuple))
