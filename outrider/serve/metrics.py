"""Metrics for Prometheus. The names after the prefix and the labels are vLLM's.

With the prefix `vllm`, dashboards and `vllm bench serve` read this server as they read vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from outrider.core.types import Step
from outrider.engine import Engine
from outrider.engine.prefix_cache import BLOCK
from outrider.engine.request import Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 4, 8, 15, 30, 60, 120)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 5)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
LABELS = ("model_name", "engine")
ENGINE = "0"  # vLLM numbers the engines of a server; this server has one
# What is counted for each model: the text for Prometheus, and the buckets of a histogram.
COUNTERS = {
    "spec_decode_num_drafts": "Drafts: one for each sequence and step that had draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens.",
    "spec_decode_num_accepted_tokens": "Accepted draft tokens.",
    "generation_tokens": "Tokens written.",
    "prompt_tokens": "Tokens of prompts.",
    "model_loads": "Times that the model was loaded.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From request to first token.", FIRST),
    "inter_token_latency_seconds": ("Between the tokens of two steps.", BETWEEN),
    "request_time_per_output_token_seconds": ("Mean time of a token after the first, by text.", BETWEEN),
    "e2e_request_latency_seconds": ("From request to last token.", WHOLE),
    "request_queue_time_seconds": ("Time in the queue.", WHOLE),
}


class Metrics:
    """The metrics of a server. Those of a model have its name as a label."""

    def __init__(self, prefix: str, model_name: str = "") -> None:
        """prefix: stands before every name, with a colon. model_name: the label of what is counted before the model is known."""
        self.registry, self.prefix, self.model_name = CollectorRegistry(), prefix, model_name
        self._models = dict[str, ModelMetrics]()
        self.responses = self._counter("http_requests", "HTTP responses, by status.", "status")
        failures = self._counter("log_failures", "Lines that could not be written to the log.")
        self.log_failures = failures.labels(model_name, ENGINE)
        self.per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by position in the draft.", "position"
        )
        self.success = self._counter("request_success", "Finished texts, by reason.", "finished_reason")
        self.plain: dict[str, Any] = {name: self._counter(name, text) for name, text in COUNTERS.items()}
        for name, (text, buckets) in HISTOGRAMS.items():
            self.plain[name] = Histogram(f"{prefix}:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        self.registry.register(self)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}:{name}", text, [*LABELS, *labels], registry=self.registry)

    def of(self, model_name: str) -> ModelMetrics:
        """Those of a model. They go on counting when it is loaded again."""
        return self._models.setdefault(model_name, ModelMetrics(self, model_name))

    def page(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """The engines at this moment; called by the registry."""
        families = dict[str, Metric]()
        for model in self._models.values():
            for family in model.now():
                if (same := families.setdefault(family.name, family)) is not family:
                    same.samples += family.samples
        return families.values()


class ModelMetrics:
    """Counts steps and finished texts of a model as the `Observer` of its engine. Reads the engine's state for each scrape."""

    def __init__(self, all_: Metrics, model_name: str) -> None:
        """all_: of the server."""
        self._all, self._labels = all_, (model_name, ENGINE)
        self._own = {name: one.labels(*self._labels) for name, one in all_.plain.items()}
        self._engine: Engine | None = None

    def attach(self, engine: Engine) -> None:
        """Read this engine from now on."""
        self._engine = engine
        self._own["model_loads"].inc()

    def detach(self) -> None:
        """The model is not loaded any more."""
        self._engine = None

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """See `Observer.step`."""
        own = self._own
        own["generation_tokens"].inc(sum([len(commit.tokens) for commit in step.commits]))
        for commit, tree, waited in zip(step.commits, step.draft.host, seconds, strict=True):
            if waited is not None:
                own["inter_token_latency_seconds"].observe(waited)
            if drafted := len(tree) - 1:
                own["spec_decode_num_drafts"].inc()
                own["spec_decode_num_draft_tokens"].inc(drafted)
                own["spec_decode_num_accepted_tokens"].inc(commit.num_accepted)
                for position in range(commit.num_accepted):
                    self._all.per_position.labels(*self._labels, str(position)).inc()

    def finished(self, sequence: Sequence) -> None:
        """See `Observer.finished`."""
        own, clock = self._own, sequence.clock
        own["prompt_tokens"].inc(len(sequence.prompt))
        self._all.success.labels(*self._labels, sequence.finish.finish if sequence.finish else "abort").inc()
        own["e2e_request_latency_seconds"].observe(clock.total)
        own["request_queue_time_seconds"].observe(clock.queued)
        if clock.time_to_first_token is not None:
            own["time_to_first_token_seconds"].observe(clock.time_to_first_token)
            if (more := len(sequence.written) - 1) > 0:
                own["request_time_per_output_token_seconds"].observe((clock.total - clock.time_to_first_token) / more)

    def now(self) -> Iterator[Metric]:
        """The engine at this moment, and whether there is one."""
        gauges = {"model_loaded": ("1 while the model is loaded.", float(self._engine is not None))}
        counters = dict[str, tuple[str, float]]()
        if self._engine is not None:
            stats = self._engine.stats
            gauges |= {
                "num_requests_running": ("Texts in the batch.", stats.running),
                "num_requests_waiting": ("Texts in the queue.", stats.waiting),
                "kv_cache_usage_perc": (
                    "Share of the KV cache in use; 1 is all of it.",
                    stats.kv_tokens / stats.kv_limit,
                ),
                "kv_cache_bytes": ("Keys and values of texts, those of draft models too.", stats.kv_bytes),
                "prefix_cache_bytes": ("Keys and values of the prefix cache.", stats.prefix_bytes),
                "prefix_cache_disk_bytes": ("Files of the prefix cache.", stats.prefix_file_bytes),
            }
            if stats.memory_limit is not None:
                text = "Limit of the KV cache and the prefix cache together."
                gauges["kv_cache_limit_bytes"] = text, stats.memory_limit
            counters = {
                "requests_accepted": ("Texts that were queued.", stats.accepted),
                "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
                "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
                "prefix_cache_disk_hits": ("Tokens that the prefix cache read from files.", stats.prefix_file_tokens),
                "num_preemptions": ("Texts that lost their cache slot and were computed again.", stats.preemptions),
                "drafter_failures": ("Times that a drafter raised or broke its contract.", stats.drafter_failures),
            }
            yield self._cache_config(self._engine)
        for kind, named in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in named.items():
                family = kind(f"{self._all.prefix}:{name}", text, labels=LABELS)
                family.add_metric(self._labels, value)
                yield family

    def _cache_config(self, engine: Engine) -> Metric:
        """vLLM's `cache_config_info`: the value is 1, the labels tell. A block is one of the prefix cache."""
        config = {
            "model_name": self._labels[0],
            "engine": ENGINE,
            "block_size": str(BLOCK),
            "num_gpu_blocks": str(engine.kv_limit // BLOCK),
            "num_cpu_blocks": "0",
            "cache_dtype": "auto",
            "enable_prefix_caching": str(engine.prefixes is not None),
        }
        return InfoMetricFamily(f"{self._all.prefix}:cache_config", "The KV cache.", value=config)
