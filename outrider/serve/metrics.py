"""Metrics for Prometheus. The names after the prefix and the labels are vLLM's.

With the prefix `vllm`, dashboards and `vllm bench serve` read this server as they read vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

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


class Metrics:
    """The metrics of a server. Those of a model have its name as a label."""

    def __init__(self, prefix: str, model_name: str = "") -> None:
        """prefix: stands before every name, with a colon. model_name: the label of what is counted before the model is known."""
        self.registry, self._prefix, self.model_name = CollectorRegistry(), prefix, model_name
        self._models = dict[str, ModelMetrics]()
        self.responses = self.counter("http_requests", "HTTP responses, by status.", "status")
        failures = self.counter("log_failures", "Lines that could not be written to the log.")
        self.log_failures = failures.labels(model_name, ENGINE)
        self.drafts = self.counter(
            "spec_decode_num_drafts", "Drafts: one for each sequence and step that had draft tokens."
        )
        self.drafted = self.counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self.accepted = self.counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self.per_position = self.counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens, by position in the draft.", "position"
        )
        self.generated = self.counter("generation_tokens", "Tokens written.")
        self.prompts = self.counter("prompt_tokens", "Tokens of prompts.")
        self.success = self.counter("request_success", "Finished texts, by reason.", "finished_reason")
        self.loads = self.counter("model_loads", "Times that the model was loaded.")
        self.first = self.histogram("time_to_first_token_seconds", "From request to first token.", FIRST)
        self.between = self.histogram("inter_token_latency_seconds", "Between the tokens of two steps.", BETWEEN)
        self.per_token = self.histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first, by text.", BETWEEN
        )
        self.whole = self.histogram("e2e_request_latency_seconds", "From request to last token.", WHOLE)
        self.queued = self.histogram("request_queue_time_seconds", "Time in the queue.", WHOLE)
        self.registry.register(self)

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A new counter of a model, with further labels."""
        return Counter(f"{self._prefix}:{name}", text, [*LABELS, *labels], registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """A new histogram of a model."""
        return Histogram(f"{self._prefix}:{name}", text, LABELS, buckets=buckets, registry=self.registry)

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
            for family in model.now(self._prefix):
                if (same := families.setdefault(family.name, family)) is not family:
                    same.samples += family.samples
        return families.values()


class ModelMetrics:
    """Counts steps and finished texts of a model as the `Observer` of its engine. Reads the engine's state for each scrape."""

    def __init__(self, all_: Metrics, model_name: str) -> None:
        """all_: of the server."""
        self._all, self._labels = all_, (model_name, ENGINE)
        self._engine: Engine | None = None
        self._loads = all_.loads.labels(*self._labels)
        counters = all_.drafts, all_.drafted, all_.accepted, all_.generated, all_.prompts
        self._drafts, self._drafted, self._accepted, self._generated, self._prompts = [
            one.labels(*self._labels) for one in counters
        ]
        histograms = all_.first, all_.between, all_.per_token, all_.whole, all_.queued
        self._first, self._between, self._per_token, self._whole, self._queued = [
            one.labels(*self._labels) for one in histograms
        ]

    def attach(self, engine: Engine) -> None:
        """Read this engine from now on."""
        self._engine = engine
        self._loads.inc()

    def detach(self) -> None:
        """The model is not loaded any more."""
        self._engine = None

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """See `Observer.step`."""
        for commit, drafted, waited in zip(step.commits, step.draft.num_draft_tokens.tolist(), seconds, strict=True):
            self._generated.inc(len(commit.tokens))
            if waited is not None:
                self._between.observe(waited)
            if drafted:
                self._drafts.inc()
                self._drafted.inc(drafted)
                self._accepted.inc(commit.num_accepted)
                for position in range(commit.num_accepted):
                    self._all.per_position.labels(*self._labels, str(position)).inc()

    def finished(self, sequence: Sequence) -> None:
        """See `Observer.finished`."""
        self._prompts.inc(len(sequence.prompt))
        self._all.success.labels(*self._labels, sequence.finish.finish if sequence.finish else "abort").inc()
        self._whole.observe(sequence.clock.total)
        self._queued.observe(sequence.clock.queued)
        if sequence.clock.time_to_first_token is not None:
            self._first.observe(sequence.clock.time_to_first_token)
            if (more := len(sequence.written) - 1) > 0:
                self._per_token.observe((sequence.clock.total - sequence.clock.time_to_first_token) / more)

    def now(self, prefix: str) -> Iterator[Metric]:
        """The engine at this moment, and whether there is one."""
        loaded = GaugeMetricFamily(f"{prefix}:model_loaded", "1 while the model is loaded.", labels=LABELS)
        loaded.add_metric(self._labels, float(self._engine is not None))
        yield loaded
        if self._engine is None:
            return
        stats = self._engine.stats
        gauges = {
            "num_requests_running": ("Texts in the batch.", stats.running),
            "num_requests_waiting": ("Texts in the queue.", stats.waiting),
            "kv_cache_usage_perc": ("Share of the KV cache in use; 1 is all of it.", stats.kv_tokens / stats.kv_limit),
            "kv_cache_bytes": ("Keys and values of texts, those of draft models too.", stats.kv_bytes),
            "prefix_cache_bytes": ("Keys and values of the prefix cache.", stats.prefix_bytes),
            "prefix_cache_disk_bytes": ("Files of the prefix cache.", stats.prefix_file_bytes),
        }
        if stats.memory_limit is not None:
            gauges["kv_cache_limit_bytes"] = (
                "Limit of the KV cache and the prefix cache together.",
                stats.memory_limit,
            )
        counters = {
            "requests_accepted": ("Texts that were queued.", stats.accepted),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", stats.prefix_hits),
            "prefix_cache_disk_hits": ("Tokens that the prefix cache read from files.", stats.prefix_file_tokens),
            "num_preemptions": ("Texts that lost their cache slot and were computed again.", stats.preemptions),
            "drafter_failures": ("Times that a drafter raised or broke its contract.", stats.drafter_failures),
        }
        for kind, named in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in named.items():
                family = kind(f"{prefix}:{name}", text, labels=LABELS)
                family.add_metric(self._labels, value)
                yield family
        yield self._cache_config(prefix, self._engine)

    def _cache_config(self, prefix: str, engine: Engine) -> Metric:
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
        family = GaugeMetricFamily(f"{prefix}:cache_config_info", "The KV cache.", labels=list(config))
        family.add_metric(list(config.values()), 1)
        return family
