"""What Prometheus may read. The names behind the prefix are vLLM's; with the prefix `vllm` so are the whole names, and
dashboards and `vllm bench serve` read this server as they read that one.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from outrider.core.types import Step
from outrider.engine import Engine, Job, Result

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 4, 8, 15, 30, 60, 120)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2, 5)
WHOLE = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)


class Metrics:
    """Counts steps and finished jobs (the `Observer` of the engine), and reads the engine when it is read itself."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self.registry, self._prefix, self._model = CollectorRegistry(), prefix, model_name
        self._engine: Engine | None = None

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{prefix}:{name}", text, ["model_name", *labels], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"{prefix}:{name}", text, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model_name)

        self.drafts = counter("spec_decode_num_drafts", "Drafts made, one a row and step.").labels(model_name)
        self.drafted = counter("spec_decode_num_draft_tokens", "Tokens guessed.").labels(model_name)
        self.accepted = counter("spec_decode_num_accepted_tokens", "Guesses kept.").labels(model_name)
        self._per_position = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Guesses kept, by position in the draft.", "position"
        )
        self.generated = counter("generation_tokens", "Tokens written.").labels(model_name)
        self.prompts = counter("prompt_tokens", "Tokens of prompts.").labels(model_name)
        self._success = counter("request_success", "Texts finished, by reason.", "finished_reason")
        self._http = counter("http_requests", "Answers, by status.", "status")
        self.log_failures = counter("log_failures", "Lines that could not be written to the log.").labels(model_name)
        self.first = histogram("time_to_first_token_seconds", "From request to first token.", FIRST)
        self.between = histogram("inter_token_latency_seconds", "From one step's tokens to the next's.", BETWEEN)
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time of a token after the first.", BETWEEN
        )
        self.whole = histogram("e2e_request_latency_seconds", "From request to last token.", WHOLE)
        self.queued = histogram("request_queue_time_seconds", "Waiting for a row.", WHOLE)
        self.registry.register(self)

    def attach(self, engine: Engine) -> None:
        self._engine = engine

    def http(self, status: int) -> None:
        self._http.labels(self._model, str(status)).inc()

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """See `Observer.step`."""
        for kept, drafted, waited in zip(step.commits, step.draft.num_draft_tokens.tolist(), seconds, strict=True):
            self.generated.inc(len(kept.tokens))
            if waited is not None:
                self.between.observe(waited)
            if drafted:
                self.drafts.inc()
                self.drafted.inc(drafted)
                self.accepted.inc(kept.num_accepted)
                for position in range(kept.num_accepted):
                    self._per_position.labels(self._model, str(position)).inc()

    def finished(self, job: Job, result: Result) -> None:
        self.prompts.inc(result.prompt_tokens)
        self._success.labels(self._model, str(result.output.finish_reason)).inc()
        self.whole.observe(result.total)
        self.queued.observe(result.queued)
        if result.first is not None:
            self.first.observe(result.first)
            if (more := len(result.output.token_ids) - 1) > 0:
                self.per_token.observe((result.total - result.first) / more)

    def collect(self) -> Iterable[Metric]:
        """The engine at this moment; called by the registry."""
        if self._engine is None:
            return
        stats = self._engine.stats
        gauges = {
            "num_requests_running": ("Texts being written.", stats.running),
            "num_requests_waiting": ("Texts in the queue.", stats.waiting),
            "kv_cache_usage_perc": ("Share of the cache in use, 1 is all.", stats.kv_tokens / stats.kv_limit),
            "kv_cache_bytes": ("Keys and values of texts, the drafters' among them.", stats.kv_bytes),
            "prefix_cache_bytes": ("Keys and values kept for prompts that start alike.", stats.prefix_bytes),
        }
        if stats.memory_limit is not None:
            gauges["kv_cache_limit_bytes"] = ("What these two may take at most.", stats.memory_limit)
        counters = {
            "requests_accepted": ("Texts that were queued.", stats.accepted),
            "prefix_cache_queries": ("Prompt tokens looked up.", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found.", stats.prefix_hits),
            "num_preemptions": ("Texts that gave their row away and took one again.", stats.preemptions),
            "drafter_failures": ("Times that a drafter raised or broke its contract.", stats.drafter_failures),
        }
        for kind, named in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in named.items():
                family = kind(f"{self._prefix}:{name}", text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family

    def page(self) -> bytes:
        return generate_latest(self.registry)
