"""One page of metrics from the pages of all replicas."""

from __future__ import annotations

from collections import abc

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

FRONT = "front"  # the label of what the front itself counts


class _Families:
    """A collector of families that were read from pages."""

    def __init__(self, families: abc.Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> abc.Iterable[Metric]:
        return self._families


def merged_metrics(pages: abc.Mapping[str, bytes], front: bytes, prefix: str) -> bytes:
    """A page in Prometheus' text format. Each sample of a replica's page has the label `replica` more.

    HTTP responses are counted by the front alone: it sees also what no replica was asked.
    """
    http, found = f"{prefix}:http_requests", dict[str, Metric]()
    for replica, page in [*sorted(pages.items()), (FRONT, front)]:
        for family in text_string_to_metric_families(page.decode()):
            if (family.name == http) != (replica == FRONT):
                continue
            merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry = CollectorRegistry()
    registry.register(_Families(found.values()))  # pyright: ignore[reportArgumentType]
    return generate_latest(registry)
