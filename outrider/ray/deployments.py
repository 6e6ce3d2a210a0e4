"""The two deployments: replicas of the engine, and the front that clients talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError, WorkerCrashedError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address
from starlette.types import ASGIApp

from outrider.ray.calls import Call, ReplicaLost, Start, answered
from outrider.ray.direct import IDLE, SHUTDOWN, Connections, Listener, Place, Tickets
from outrider.ray.front import Front, guarded
from outrider.ray.options import DeployOptions
from outrider.ray.router import PrefixRouter
from outrider.serve.app import create_app
from outrider.serve.assembly import ServerOptions, assemble
from outrider.serve.errors import Refused
from outrider.serve.settings import Settings

SPARE = 16  # requests of a replica beside texts: models, tokens, pages
PAGE_TIMEOUT = 5.0  # seconds for the pages of all replicas
LOST = (RayActorError, WorkerCrashedError, DeploymentUnavailableError, ReplicaUnavailableError)


class OutriderEngine:
    """One replica: the server's application without an address."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._service = (made := assemble(ServerOptions.model_validate(options))).service
        self._name = serve.get_replica_context().replica_id.unique_id
        made.service.settings = replace(made.service.settings, replica=self._name)
        self._asgi = create_app(made.service, made.metrics)
        self._tickets = Tickets(self._asgi)
        settings = replace(made.service.settings, shutdown_timeout=SHUTDOWN)
        self._listener = Listener(self._tickets, get_node_ip_address(), settings=settings, timeout_keep_alive=IDLE)

    async def take(self, prompt: str, home: str) -> AsyncIterator[Place]:
        """Hold a place for a request. Ends when it was answered. prompt, home: as in `Call`, for the router."""
        ticket = self._tickets.issue()
        try:
            yield Place(self._name, self._listener.url, ticket)
            await self._tickets.used(ticket)
        finally:
            self._tickets.drop(ticket)

    async def page(self, call: Call) -> tuple[str, bytes]:
        """The replica's name and the body of its answer."""
        return self._name, b"".join([p async for p in answered(self._asgi, call) if isinstance(p, bytes)])

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        engine, limit = self._service.engine, self._service.settings.stall_timeout
        if not engine.alive or engine.problem is not None:
            raise RuntimeError(engine.problem or "the engine has stopped")
        if engine.stalled > limit:
            raise RuntimeError(f"the engine has been busy with one step for {engine.stalled:.0f} s")


class RayReplicas:
    """The replicas behind a deployment handle. patience: seconds until one takes a call."""

    def __init__(self, handle: DeploymentHandle[Any], patience: float) -> None:
        self._handle, self._patience = handle, patience
        self._stream: Any = handle.options(stream=True)  # typed as if it did not stream
        self._connections, self._watching = Connections(), set[asyncio.Task[None]]()

    async def ask(self, call: Call) -> AsyncGenerator[Start | bytes, None]:
        """See `Replicas.ask`."""
        held, lost, ended = self._stream.take.remote(call.prompt, call.home), asyncio.Future[None](), False
        try:
            place = await asyncio.wait_for(anext(held), self._patience)
            self._watch(held, lost)
            async with aclosing(self._connections.ask(place, call, lost)) as parts:
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
        """Set `lost` if the replica dies while it holds a place."""

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

    async def each(self, call: Call) -> dict[str, bytes]:
        """See `Replicas.each`."""
        try:
            response = self._handle.broadcast("page", call)
            found = await response.results_async(timeout_s=PAGE_TIMEOUT, return_exceptions=True)
        except (*LOST, TimeoutError):
            return {}
        return dict(pair for pair in found if isinstance(pair, tuple))


@serve.ingress()
class OutriderFront:
    """The address that clients use. engines: the handle of the replicas, or the name of their application.

    listen: an address of its own, host and port, in place of Ray's proxy.
    """

    def __init__(
        self,
        engines: DeploymentHandle[Any] | str,
        settings: Settings,
        patience: float,
        listen: tuple[str, int] | None = None,
    ) -> None:
        handle = serve.get_app_handle(engines) if isinstance(engines, str) else engines
        self._outrider = guarded(Front(RayReplicas(handle, patience), settings, patience))
        self._listener = None
        if listen is not None:
            settings = replace(settings, shutdown_timeout=settings.request_timeout)
            self._listener = Listener(self._outrider, *listen, settings, reuse=True)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve's hook for an application that is made in the replica."""
        return self._outrider

    async def __del__(self) -> None:
        """Ray Serve calls it when the front ends: what runs is answered first."""
        if self._listener is not None:
            await self._listener.close()


Given = DeployOptions | dict[str, Any]  # Ray hands over what a file or a command line says, as it is


def build(args: Given) -> Application:
    """Front and engines as one Serve application: `serve run outrider.ray:build model=builtin:code replicas=2`."""
    return _front(DeployOptions.model_validate(args), build_engines(args))


def build_front(args: Given) -> Application:
    """The front alone. The engines are the application `engines`, so it goes on while they are replaced."""
    args = DeployOptions.model_validate(args)
    return _front(args, args.engines)


def build_engines(args: Given) -> Application:
    """The replicas of the engine alone: an application without a route."""
    args = DeployOptions.model_validate(args)
    scaling: dict[str, Any] = {"num_replicas": args.fewest}
    if args.max_replicas is not None:
        look_back = max(2.0, min(30.0, args.upscale_delay))
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=args.fewest,
                max_replicas=args.max_replicas,
                target_ongoing_requests=args.target_requests or float(args.max_num_seqs),
                upscale_delay_s=args.upscale_delay,
                downscale_delay_s=args.downscale_delay,
                metrics_interval_s=look_back / 2,
                look_back_period_s=look_back,
            )
        }
    router = RequestRouterConfig(
        request_router_class=PrefixRouter,  # pyright: ignore[reportArgumentType]
        request_router_kwargs={"prefix_weight": args.prefix_weight},
    )
    engine: Any = serve.deployment(
        OutriderEngine,
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
        max_ongoing_requests=args.max_num_seqs + args.max_queue + SPARE,
        max_queued_requests=args.max_queue + SPARE,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=args.shutdown_timeout,
        request_router_config=router,
        **scaling,
    )
    return engine.bind(args.server())


def _front(args: DeployOptions, engines: Application | str) -> Application:
    settings = args.settings()
    front: Any = serve.deployment(
        OutriderFront,  # pyright: ignore[reportArgumentType]
        name=args.front_name,
        num_replicas=args.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,  # the guard has the limit of the options
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=args.request_timeout,
    )
    return front.bind(engines, settings, args.patience, args.listen)


__all__ = ["OutriderEngine", "OutriderFront", "RayReplicas", "build", "build_engines", "build_front"]
