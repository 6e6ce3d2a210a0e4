"""`outrider deploy`. Imports nothing large until the command runs."""

from __future__ import annotations

import signal
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ValidationError

from outrider.cli.options import Debug, ModelArgument, ModelInstead, SpeculationOptions, one_model, option
from outrider.cli.serve import AddressOptions, EngineOptions, ServedModelOptions, ready_lines
from outrider.cli.terminal import loading, readable

if TYPE_CHECKING:
    from outrider.ray.cluster import Deployed
    from outrider.ray.options import DeployOptions


@dataclass(frozen=True)
class ReplicaOptions:
    """How many replicas there are, and what each of them gets."""

    replicas: Annotated[int | None, option("Replicas", "A fixed number; without it, 1.", min=1)] = None
    min_replicas: Annotated[int | None, option("Replicas", "The number follows the load, from this.", min=1)] = None
    max_replicas: Annotated[int | None, option("Replicas", "To this.", min=1)] = None
    target_requests: Annotated[
        float | None,
        option("Replicas", "Requests of one replica to aim at, waiting ones included; without it, --max-num-seqs."),
    ] = None
    upscale_delay: Annotated[float, option("Replicas", "Seconds of load before a replica is added.")] = 10.0
    downscale_delay: Annotated[float, option("Replicas", "Seconds without load before one is removed.")] = 300.0
    cpus: Annotated[float, option("Replicas", "CPUs of one replica.")] = 1.0
    gpus: Annotated[float, option("Replicas", "GPUs of one replica.")] = 0.0
    fronts: Annotated[int, option("Replicas", "Processes that clients talk to.", min=1)] = 1
    prefix_weight: Annotated[
        float, option("Replicas", "Waiting requests that a prompt in the prefix cache is worth; 0 looks at load only.")
    ] = 4.0
    patience: Annotated[float, option("Replicas", "Seconds that a request waits for a replica that lives.")] = 60.0


@dataclass(frozen=True)
class FrontLimitOptions:
    """What a client may take."""

    request_timeout: Annotated[float, option("Limits", "Seconds for a request, waiting included.")] = 600.0
    shutdown_timeout: Annotated[
        float, option("Limits", "Seconds for running requests of a replica that is replaced.")
    ] = 30.0
    max_connections: Annotated[int, option("Limits", "Requests at once. Beyond it clients get 503.", min=1)] = 256
    max_body: Annotated[int, option("Limits", "KiB of a request.", min=1)] = 4096


def deploy(
    model: ModelArgument = None,
    *,
    model_option: ModelInstead = None,
    speculation: SpeculationOptions,
    address: Annotated[
        str,
        option("Cluster", "local starts a cluster here; else auto, HOST:PORT or ray://HOST:PORT.", "--address"),
    ] = "local",
    name: Annotated[str, option("Cluster", "The name of the Serve application.")] = "outrider",
    start_timeout: Annotated[float, option("Cluster", "Seconds until all replicas must be healthy.")] = 600.0,
    listen: AddressOptions,
    replicas: ReplicaOptions,
    served: ServedModelOptions,
    engine_options: EngineOptions,
    limits: FrontLimitOptions,
    cors_origin: Annotated[
        list[str] | None, option("Privacy", "The origin of a web page that may call the server. May be repeated.")
    ] = None,
    metrics_prefix: Annotated[
        str, option("Output", "Prefix of the names at /metrics; vllm fits dashboards made for vLLM.")
    ] = "outrider",
    write_config: Annotated[
        Path | None,
        option("Output", "Write the configuration for `serve run` and `serve deploy` to this file, and stop."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve a model with many replicas behind one address, on Ray Serve. A stream survives the replica that writes it.

    Run it again on the same cluster with another --speculative-config, and replicas are replaced one after the other.
    """
    with readable(debug):
        model = one_model(model, model_option)
        config = speculation.config(model)
        try:
            import ray  # noqa: F401
            from ray import serve  # noqa: F401

            from outrider.ray.options import DeployOptions
        except ImportError as error:
            raise ValueError(
                f"replicas need Ray Serve ({error.name} is missing); pip install 'outrider[ray]'"
            ) from None
        own = address == "local" and write_config is None
        if listen.ssl_certfile is not None and not own:
            raise ValueError(
                "--ssl-certfile is for fronts of a local cluster; elsewhere Ray's proxies listen, without it"
            )
        given: dict[str, Any] = dict(
            model=model,
            speculative_config=config,
            **listen.for_server() | {"host": listen.host if own else ""},
            cors_origin=cors_origin or [],
            metrics_prefix=metrics_prefix,
            engines=f"{name}-engines",
            **served.for_server(),
            **asdict(engine_options),
            **asdict(limits),
            **asdict(replicas),
        )
        try:
            options = DeployOptions(**given)
        except ValidationError as error:
            found = [
                f"{'.'.join(map(str, e['loc']))}: {e['msg']}".removeprefix(": Value error, ") for e in error.errors()
            ]
            raise ValueError("; ".join(found)) from None
        if write_config is not None:
            from outrider.ray.config import serve_config

            write_config.write_text(serve_config(options, name, listen.host, listen.port), encoding="utf-8")
            print(f"serve run {write_config}   # here; on a cluster: serve deploy {write_config}")
            return
        from outrider.ray import cluster

        with loading(model):
            if own:
                cluster.free_port(listen.host, listen.port)
            cluster.join(address, options.cpus * options.fewest)
            deployed = cluster.start(options, name, listen.host, listen.port, own, start_timeout)
        _ready(options, deployed)
        if own:
            _wait()
            print("stopping: requests that run may finish", flush=True)
            cluster.stop(deployed)


def _ready(options: DeployOptions, deployed: Deployed) -> None:
    settings = options.settings()
    print(f"{options.fewest} replicas of {settings.model_name} are ready")
    end = "ctrl-C" if deployed.own else f"serve delete {deployed.name} && serve delete {deployed.engines}"
    ready_lines(settings, deployed.host, deployed.port, False, end)


def _wait() -> None:
    """Until ctrl-C or SIGTERM."""
    ended = threading.Event()

    def end(*_: Any) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    while not ended.wait(0.5):
        pass
