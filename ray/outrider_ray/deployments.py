"""The two deployments: replicas of the engine, and the front that clients talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.util import get_node_ip_address
from starlette.types import ASGIApp

from outrider.serve.app import create_app, trouble
from outrider.serve.options import ServeOptions
from outrider.serve.pool import ModelPool, prepare
from outrider_ray.calls import ReplicaRequest
from outrider_ray.direct import IDLE, SHUTDOWN, Connections, Listener, Reservation, ReservationMiddleware
from outrider_ray.front import Front, guarded
from outrider_ray.options import DeployOptions
from outrider_ray.replicas import RayReplicas
from outrider_ray.router import PrefixRouter
from ray import serve

SPARE = 16  # requests of a replica beside texts: models, tokens, pages


class OutriderEngine:
    """One replica: the server's application without an address."""

    def __init__(self, options: ServeOptions) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        options = options.with_(replica_name=self._name, shutdown_timeout=SHUTDOWN)
        self._pool = ModelPool.of([options])
        self._pool.start()
        prepare()
        self._reservations = ReservationMiddleware(create_app(self._pool))
        self._listener = Listener(self._reservations, get_node_ip_address(), settings=options, timeout_keep_alive=IDLE)
        self._connections = Connections()

    async def take(self, prompt: str, home: str) -> AsyncIterator[Reservation]:
        """Reserve room for a request, until it was answered. prompt, home: as in `ReplicaRequest`, for the router."""
        ticket = self._reservations.issue()
        try:
            yield Reservation(self._name, self._listener.url, ticket)
            await self._reservations.used(ticket)
        finally:
            self._reservations.drop(ticket)

    async def page(self, call: ReplicaRequest) -> tuple[str, bytes]:
        """The replica's name and the body of its answer."""
        reservation, never = (
            Reservation(self._name, self._listener.url, self._reservations.issue()),
            asyncio.Future[None](),
        )
        parts = self._connections.ask(reservation, call, never)
        return self._name, b"".join([part async for part in parts if isinstance(part, bytes)])

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if (problem := trouble(self._pool)) is not None:
            raise RuntimeError(problem)


@serve.ingress()
class OutriderFront:
    """The address that clients use. engines: the handle of the replicas, or the name of their application."""

    def __init__(self, engines: DeploymentHandle[Any] | str, options: DeployOptions) -> None:
        handle = serve.get_app_handle(engines) if isinstance(engines, str) else engines
        self._outrider = guarded(Front(RayReplicas(handle, options.patience), options, options.patience))
        self._listener = None
        if options.listen is not None:
            settings = options.with_(shutdown_timeout=options.request_timeout)
            self._listener = Listener(self._outrider, *options.listen, settings, reuse=True)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Ray Serve's hook for an application that is made in the replica."""
        return self._outrider

    async def __del__(self) -> None:
        """Ray Serve calls it when the front ends: what runs is answered first."""
        if self._listener is not None:
            await self._listener.close()


Given = DeployOptions | dict[str, Any]  # Ray hands over what a file or a command line says, as it is


def build(args: Given) -> Application:
    """Front and engines as one Serve application: `serve run outrider_ray:build model=builtin:code replicas=2`."""
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
    return engine.bind(args.of_replica())


def _front(args: DeployOptions, engines: Application | str) -> Application:
    front: Any = serve.deployment(
        OutriderFront,  # pyright: ignore[reportArgumentType]
        name=args.front_name,
        num_replicas=args.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=10_000,  # the guard has the limit of the options
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=args.request_timeout,
    )
    return front.bind(engines, args.of_front())
