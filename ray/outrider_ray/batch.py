"""Answers the lines of a batch on many machines, with actors of Ray Data."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from outrider.core.extras import needs
from outrider.serve.batch import BatchAnswerer, BatchRequest
from outrider.serve.options import BatchOptions
from outrider_ray.cluster import join, leave


def answers(
    requests: Iterable[BatchRequest], options: BatchOptions, address: str, replicas: int, cpus: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The key and the row of each request, in the order of their ends. `outrider batch --ray` calls it by its entry point.

    Args:
        requests: The lines.
        options: How the model is loaded.
        address: Of the cluster, as `join` takes it.
        replicas: Actors, at most; each has the model.
        cpus: Of each actor. With device "cuda" it has a GPU, too.

    Raises ValueError without Ray Data and if an actor cannot load the model, RuntimeError if the cluster fails.
    """
    join(address, "--ray", ", or leave out --ray")
    try:
        yield from _answers(requests, options, replicas, cpus)
    finally:
        leave()


def _answers(
    requests: Iterable[BatchRequest], options: BatchOptions, replicas: int, cpus: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    with needs("ray", "--ray"):
        import ray.data
    from ray.exceptions import RayError

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an error is told once, by us
    items = [{"request": json.dumps(asdict(request))} for request in requests]
    size = 4 * options.max_num_seqs  # a slot is empty only at the end of a block, so blocks are several times the slots
    blocks = max(1, min(len(items), -(-len(items) // size)))
    dataset = ray.data.from_items(items, override_num_blocks=blocks).map_batches(
        _Actor,
        batch_size=size,
        num_cpus=cpus,
        num_gpus=1 if options.device == "cuda" else None,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=replicas),
        fn_constructor_kwargs={"options": options, "threads": cpus},
    )
    try:
        for row in dataset.iter_rows():
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
        """Answer a block of lines. batch: `BatchRequest`s as JSON."""
        if self._answerer is None:
            return {"key": [""], "row": [self._problem]}
        requests = [BatchRequest(**json.loads(text)) for text in batch["request"]]
        done = [(request.key, json.dumps(row)) for request, row in self._answerer.answers(requests)]
        return {"key": [key for key, _ in done], "row": [row for _, row in done]}
