"""One page of metrics for all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

FRONT = "front"  # the label `replica` of what the front itself counts


class _Families(dict[str, Metric]):
    """Families that were read from pages, as a collector."""

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def collect(self) -> Iterable[Metric]:
        return self.values()


def merged_metrics(pages: Mapping[str, bytes], front: bytes, prefix: str) -> bytes:
    """A page in Prometheus' text format. Each sample of a replica's page has the label `replica` more.

    HTTP responses are counted by the front alone: it sees also what no replica was asked.
    """
    http, families = f"{prefix}:http_requests", _Families()
    for replica, page in [*sorted(pages.items()), (FRONT, front)]:
        for family in text_string_to_metric_families(page.decode()):
            if (family.name == http) != (replica == FRONT):
                continue
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
    registry = CollectorRegistry()
    registry.register(families)  # pyright: ignore[reportArgumentType]
    return generate_latest(registry)
