"""OpenTelemetry: one span for each request that was queued, sent to a collector. Needs the extra `otel`.

Names follow the semantic conventions for generative AI (gen-ai-spans.md of open-telemetry/semantic-conventions-genai,
status: development). Names without a convention begin with `outrider.`. No text, token or stop string is sent.
A request with a `traceparent` header makes a child span.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter, time_ns
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode

from outrider._version import __version__

if TYPE_CHECKING:
    from outrider.serve.answer import Answer
    from outrider.serve.requests import ChatRequest, CompletionRequest

_ASKED = {  # attribute -> field of the request, sent if the request has it
    "gen_ai.request.temperature": "temperature",
    "gen_ai.request.top_p": "top_p",
    "gen_ai.request.frequency_penalty": "frequency_penalty",
    "gen_ai.request.presence_penalty": "presence_penalty",
}


class Spans:
    """Makes the spans of a server. exporter: None sends OTLP over HTTP to `endpoint`."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        """Raises ValueError for an endpoint that is not an http(s) address."""
        if exporter is None and not endpoint.startswith(("http://", "https://")):
            raise ValueError(
                f"--otlp-traces-endpoint is the address of an OTLP collector over HTTP, got {endpoint!r}; for example "
                "http://127.0.0.1:4318/v1/traces"
            )
        resource = Resource({"service.name": "outrider", "service.version": __version__})
        self._provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("outrider", __version__)

    def flush(self) -> None:
        """Send the spans that have ended."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send the remaining spans and stop."""
        self._provider.shutdown()

    def watch(
        self, answer: Answer, model: str, body: CompletionRequest | ChatRequest, headers: Mapping[str, str]
    ) -> Callable[[], None]:
        """Begin the span of a request. Returns what ends it. headers: those of the request."""
        began = time_ns() - int((perf_counter() - answer.sequences[0].clock.arrived) * 1e9)
        operation = "chat" if hasattr(body, "messages") else "text_completion"
        asked: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": model,
        }
        host, _, port = headers.get("host", "").rpartition(":")
        if host and port.isdigit():
            asked |= {"server.address": host, "server.port": int(port)}
        span = self._tracer.start_span(
            f"{operation} {model}",
            context=propagate.extract(headers),
            kind=SpanKind.SERVER,
            attributes=asked,
            start_time=began,
        )

        def end() -> None:
            attributes = {**_request(answer, body), **_answer(answer, model)}
            span.set_attributes({k: v for k, v in attributes.items() if v is not None})
            if problem := _problem(answer):
                span.set_attribute("error.type", problem)
                span.set_status(Status(StatusCode.ERROR))
            span.end()

        return end


def _request(answer: Answer, body: CompletionRequest | ChatRequest) -> dict[str, Any]:
    params = answer.sequences[0].params
    fields: dict[str, Any] = {name: getattr(body, field) for name, field in _ASKED.items()}
    return {
        **fields,
        "gen_ai.request.seed": body.seed if abs(body.seed or 0) < 2**63 else None,  # an attribute holds no larger one
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.top_k": float(params.top_k) if params.top_k > 0 else None,
        "gen_ai.request.choice.count": body.n if (body.n or 1) != 1 else None,
        "gen_ai.request.stream": True if body.stream else None,
        "gen_ai.output.type": "json" if body.form else "text" if body.response_format else None,
    }


def _answer(answer: Answer, model: str) -> dict[str, Any]:
    results = [answer.results[i] for i in sorted(answer.results)]
    prompts = {id(s.prompt): len(s.prompt) for s in answer.sequences}  # its n texts share a prompt
    counts = [r.counts.speculative for r in results if r.counts.method != "none"]
    steps, drafted = sum(s.num_spec_steps for s in counts), sum(s.num_draft_tokens for s in counts)
    accepted = sum(s.num_accepted_draft_tokens for s in counts)
    firsts = [r.clock.time_to_first_token for r in results if r.clock.time_to_first_token is not None]
    decoder = answer.engine.decoder
    return {
        "gen_ai.response.id": answer.id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [r.finish.finish for r in results if r.finish] or None,
        "gen_ai.response.time_to_first_chunk": min(firsts, default=None),
        "gen_ai.usage.input_tokens": sum(prompts.values()),
        "gen_ai.usage.output_tokens": sum(len(r.output) for r in results),
        "gen_ai.usage.cache_read.input_tokens": sum(r.counts.cached for r in results),
        "outrider.guarantee": decoder.guarantee.value,
        "outrider.verifier": decoder.verifier.name,
        "outrider.speculation.method": answer.sequences[0].counts.method,
        "outrider.speculation.steps": steps,
        "outrider.speculation.draft_tokens": drafted,
        "outrider.speculation.accepted_tokens": accepted,
        "outrider.speculation.mean_acceptance_length": 1 + accepted / steps if steps else None,
        "outrider.speculation.draft_acceptance_rate": accepted / drafted if drafted else None,
        "outrider.queue.seconds": max((r.clock.queued for r in results), default=None),
        "outrider.preemptions": sum(r.counts.preemptions for r in results),
    }


def _problem(answer: Answer) -> str | None:
    """Why there is no answer: generation_failed, aborted (deadline or shutdown), cancelled (the client left)."""
    reasons = [r.finish.finish for r in answer.results.values() if r.finish]
    if "error" in reasons:
        return "generation_failed"
    if len(reasons) < len(answer.sequences):
        return "cancelled"
    return "aborted" if "abort" in reasons else None
