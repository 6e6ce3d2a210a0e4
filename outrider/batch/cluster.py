"""Answers the lines of a batch on many machines, with actors of Ray Data."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from outrider.batch.answer import BatchAnswerer, BatchOptions
from outrider.batch.lines import BatchRequest

LOCAL = "local"


def connect(address: str) -> None:
    """Join a cluster, or start one of this machine for "local".

    Raises ValueError without Ray, ConnectionError without a cluster.
    """
    if (problem := _unreachable(address)) is not None:
        raise _no_cluster(address, problem)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError(f"--ray needs Ray, of which {error.name} is missing; pip install 'outrider[ray]'") from None
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address == LOCAL:
            ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        else:
            ray.init(address=address, **quiet)
    except Exception as error:  # Ray raises a bare one where a node does not start in time
        why = str(error).strip().partition("\n")[0]
        if address == LOCAL:
            raise ConnectionError(
                f"Ray could not start a cluster here ({why}); try again when the machine is less busy, or leave out --ray"
            ) from None
        raise _no_cluster(address, why) from None


def _no_cluster(address: str, why: str) -> ConnectionError:
    return ConnectionError(
        f"no Ray cluster answers at {address!r} ({why}); start one with `ray start --head`, or take --ray local"
    )


def _unreachable(address: str) -> str | None:
    """Why nothing answers at an address with a port. Ray itself would try for minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        return None
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def disconnect() -> None:
    """Leave the cluster; the one of this machine ends."""
    import ray

    ray.shutdown()


def answers(
    requests: Iterable[BatchRequest], options: BatchOptions, replicas: int, cpus: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The key and the row of each request, in the order of their ends. Call `connect` first.

    replicas: actors, at most; each has the model. cpus: of each actor; with device "cuda" it has a GPU, too. Raises
    ValueError if an actor cannot load the model, RuntimeError if the cluster fails.
    """
    import ray.data
    from ray.exceptions import RayError

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an error is told once, by us
    items = [{"key": r.key, "custom_id": r.custom_id, "url": r.url, "body": json.dumps(r.body)} for r in requests]
    size = 4 * options.max_num_seqs  # a slot is empty only at the end of a block, so blocks are several times the slots
    blocks = max(1, min(len(items), -(-len(items) // size)))
    made = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        _Actor,
        batch_size=size,
        num_cpus=cpus,
        num_gpus=1 if options.device == "cuda" else None,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=replicas),
        fn_constructor_kwargs={"options": options, "threads": cpus},
    )
    try:
        for row in made.iter_rows():
            if not row["key"]:
                raise ValueError(f"{row['row']}; answers so far are kept")
            yield row["key"], json.loads(row["row"])
    except RayError as error:
        said = str(error).strip().rpartition("\n")[2]
        raise RuntimeError(f"the cluster failed ({type(error).__name__}: {said}); answers so far are kept") from error


class _Actor:
    """A model in a process of the cluster. If it cannot be loaded, that is the answer: Ray would try again for ever."""

    def __init__(self, options: BatchOptions, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)  # torch counts the cores of the machine, not those that the actor was given
        self._answerer, self._problem = None, ""
        try:
            self._answerer = BatchAnswerer(options)
        except Exception as error:  # whatever it is, the driver must hear of it
            self._problem = f"a worker on {platform.node()} cannot load the model: {error}"

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Answer a block of lines. batch: the fields of `BatchRequest`, the body as JSON."""
        if self._answerer is None:
            return {"key": [""], "row": [self._problem]}
        names = ("key", "custom_id", "url", "body")
        given = [dict(zip(names, values, strict=True)) for values in zip(*(batch[n] for n in names), strict=True)]
        requests = [
            BatchRequest(str(g["key"]), str(g["custom_id"]), str(g["url"]), json.loads(g["body"])) for g in given
        ]
        done = [(request.key, json.dumps(row)) for request, row in self._answerer.answers(requests)]
        return {"key": [key for key, _ in done], "row": [row for _, row in done]}
