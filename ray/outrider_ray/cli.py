"""`outrider deploy`. Imports nothing large until the command runs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated, Any

from outrider.cli.command import as_command
from outrider.cli.options import NO_MODEL, Config, SpeculationOptions
from outrider.cli.serve import ready_lines
from outrider.cli.terminal import loading
from outrider.core.extras import needs
from outrider.core.files import write_whole
from outrider_ray.options import DeployOptions, serve_config


@as_command(
    "Use",
    "outrider deploy builtin:code --replicas 2 --cpus 0.5",
    "outrider deploy ./my-model --min-replicas 1 --max-replicas 4 --address auto",
    "outrider deploy ./my-model --replicas 2 --write-config ray.yaml && serve run ray.yaml",
    usual="-d -k --method --replicas --min-replicas --max-replicas --cpus --gpus --address --host --port --write-config",
)
def deploy(
    model: str | None = None,
    *,
    speculation: SpeculationOptions,
    address: str = "local",
    name: str = "outrider",
    start_timeout: float = 600.0,
    config_file: Config = None,
    values: Annotated[dict[str, Any], DeployOptions],
    write_config: Path | None = None,
) -> None:
    """Serve a model with many replicas behind one address, on Ray Serve. A stream survives the replica that writes it.

    Run it again on the same cluster with another --speculative-config, and replicas are replaced one after the other.

    Args:
        address: local starts a cluster here; else auto, HOST:PORT or ray://HOST:PORT.
        name: The name of the Serve application.
        start_timeout: Seconds until all replicas must be healthy.
        write_config: Write the configuration for `serve run` and `serve deploy` to this file, and stop.
    """
    if model is None:
        raise ValueError(NO_MODEL)
    config = speculation.config(model)
    with needs("ray", "outrider deploy"):
        import ray.serve  # noqa: F401
    local = address == "local" and write_config is None
    values |= {"model": model, "speculative_config": config, "engines": f"{name}-engines"}
    options = DeployOptions(**values)
    if write_config is not None:
        write_whole(write_config, serve_config(options, name))
        print(f"serve run {write_config}   # here; on a cluster: serve deploy {write_config}")
        return
    from outrider_ray import cluster

    with loading(model):
        if local:
            cluster.free_port(options.host, options.port)
        cluster.join_for(options, address)
        deployed = cluster.start(options, name, local, start_timeout)
    print(f"{options.fewest} replicas of {options.model_name} are ready")
    end = "ctrl-C" if deployed.local else f"serve delete {deployed.name} && serve delete {deployed.engines}"
    ready_lines(options, deployed.port, False, end)
    if local:
        ended = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        while not ended.wait(0.5):
            pass
        print("stopping: requests that run may finish", flush=True)
        cluster.stop(deployed)
