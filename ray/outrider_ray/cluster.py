"""Ray on this machine or elsewhere: join it, start the applications, wait until they answer, stop them."""

from __future__ import annotations

import os
import socket
import time
from collections import abc
from dataclasses import dataclass
from typing import Any

from outrider.core.extras import needs
from outrider.serve.connection import bound
from outrider_ray.options import DeployOptions

LOCAL = "local"
CONNECT = 5.0  # seconds to reach a cluster
# A cluster of our own shares this machine with the model, so Ray must take little of it.
OWN = {
    "RAY_worker_niceness": "0",  # replicas are servers, and Ray gives its workers 15
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # seconds between two looks at the replicas; Ray's own value is 0.1
    "RAY_enable_metrics_collection": "0",  # Ray's own; ours are at /metrics
}
OBJECTS = 200_000_000  # bytes of the object store of a cluster of our own: requests are small


@dataclass(frozen=True)
class Deployed:
    """Applications that run."""

    name: str
    engines: str
    port: int  # where clients find them
    local: bool  # the cluster was started here and ends with us


def join(address: str, option: str = "--address", otherwise: str = "", **settings: Any) -> None:
    """Connect to a cluster, or start one on this machine for `local`.

    Args:
        address: local, auto, HOST:PORT or ray://HOST:PORT.
        option: Of the command line, that says where.
        otherwise: What works without a cluster.
        settings: Of `ray.init`, for a cluster that is started.

    Raises ConnectionError for a cluster that is not there, ValueError without Ray and for what is no address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address not in (LOCAL, "auto"):
        _reach(address, option)
    with needs("ray", option):
        import ray
    if ray.is_initialized():
        return
    arguments: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        settings["_node_ip_address"] = "127.0.0.1"  # else its ports are open to the network
        arguments |= {"include_dashboard": False, **settings}
    try:
        ray.init(**arguments)
    except Exception as error:  # Ray raises a bare one where a node does not start in time
        why = str(error).strip().partition("\n")[0]
        if address != LOCAL:
            raise _no_cluster(address, why, option) from None
        raise ConnectionError(
            f"Ray could not start a cluster here ({why}); try again when the machine is less busy{otherwise}"
        ) from None


def leave() -> None:
    """Leave the cluster. One of this machine ends."""
    import ray

    ray.shutdown()


def join_for(options: DeployOptions, address: str) -> None:
    """`join` for replicas. Raises ValueError, too, for replicas that do not fit on this machine."""
    cpus, there = options.cpus * options.fewest, os.cpu_count() or 1
    if address == LOCAL:
        if cpus > there:
            raise ValueError(
                f"the replicas need {cpus:g} CPUs, and this machine has {there}; use fewer replicas, or --cpus "
                f"{there / cpus:.2g}"
            )
        for name, value in OWN.items():
            os.environ.setdefault(name, value)
    join(address, object_store_memory=OBJECTS)


def start(options: DeployOptions, name: str, local: bool, timeout: float) -> Deployed:
    """Start the engines, then the front, or update them: only what has changed is replaced.

    Args:
        options: Of the replicas and the front.
        name: Of the front's application.
        local: The cluster was started here.
        timeout: Seconds until all is healthy.

    Raises ValueError for a port that is taken, TimeoutError and RuntimeError, with
    what Ray says, for replicas that do not become healthy.
    """
    from ray.serve.config import ProxyLocation

    from outrider_ray.deployments import build_engines, build_front
    from ray import serve

    running, host, port = _status(), options.host, options.port
    if not running and local:
        port = free_port(host, port)
        serve.start(proxy_location=ProxyLocation.Disabled)
    elif not running:
        serve.start(http_options={"host": host, "port": port})
    if local:
        options = options.with_(listen=(host, port))  # Ray's proxy takes a millisecond for each token
    until = time.monotonic() + timeout
    serve.run_many(
        [serve.RunTarget(build_engines(options), name=options.engines, route_prefix=None)],
        wait_for_ingress_deployment_creation=False,
        wait_for_applications_running=False,
    )
    _healthy(options.engines, until, timeout)
    front = running.get(name)
    if front is None or options.front_name not in front.deployments:
        serve.run_many(
            [serve.RunTarget(build_front(options), name=name, route_prefix=None if local else "/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        _healthy(name, until, timeout)
    return Deployed(name, options.engines, port, local)


def stop(deployed: Deployed) -> None:
    """End the front, which finishes its requests, then the engines, then a cluster of our own."""
    from ray import serve

    serve.delete(deployed.name)
    serve.delete(deployed.engines)
    if deployed.local:
        serve.shutdown()
        leave()


def free_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises ValueError if it is taken or the address is not of this machine."""
    held = bound(host, port)
    for one in held:
        port = port or one.getsockname()[1]
        one.close()
    return port


def _reach(address: str, option: str) -> None:
    """Raise if nothing listens at `host:port` or `ray://host:port`: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{option} is local, auto, HOST:PORT or ray://HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, str(error), option) from None


def _no_cluster(address: str, why: str, option: str) -> ConnectionError:
    return ConnectionError(
        f"no Ray cluster answers at {address!r} ({why}); start one with: ray start --head, or take {option} {LOCAL}"
    )


def _status() -> abc.Mapping[str, Any]:
    """The applications that run, by name."""
    from ray.serve.exceptions import RayServeException

    from ray import serve

    try:
        return serve.status().applications
    except RayServeException:
        return {}


def _healthy(name: str, until: float, timeout: float) -> None:
    """Wait for an application. Raises as `start` does."""
    while True:
        application = _status().get(name)
        status = "NOT_STARTED" if application is None else application.status.value
        if status == "RUNNING":
            return
        said = [] if application is None else [d.message for d in application.deployments.values() if d.message]
        if status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RuntimeError(
                f"{name} did not become healthy:\n" + _last_lines(said or [application.message if application else ""])
            )
        if time.monotonic() > until:
            raise TimeoutError(
                f"{name} is not healthy after {timeout:g} s ({status}):\n{_last_lines(said)}\n"
                "ray status shows what the cluster has; --start-timeout waits longer"
            )
        time.sleep(0.2)


def _last_lines(messages: abc.Sequence[str]) -> str:
    """The end of what Ray says: the exception stands there, below its traceback."""
    lines = [line for message in messages for line in message.splitlines() if line.strip()]
    return "\n".join(lines[-6:])
