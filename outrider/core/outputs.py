"""What a generation returns: vLLM's shapes and field names, plus the guarantee that held and the seed that was used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.types import Guarantee


@dataclass(frozen=True)
class SpeculativeMetrics:
    """The fields of vLLM's `metrics.speculative_decoding`. Rates are fractions. Lengths count the bonus token.

    mean_acceptance_length: committed tokens per step, 1 + accepted / steps; 1.0 without steps.
    draft_acceptance_rate: accepted / drafted; 0.0 without draft tokens.
    acceptance_histogram: steps by the number of accepted draft tokens, int [num_spec_tokens + 1].
    acceptance_histogram_by_draft_length: the same for the steps that had k draft tokens, int [k + 1], by k.
    per_step_accepted, per_step_drafted: int [step].
    """

    num_spec_steps: int
    num_spec_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[int, list[int]]
    per_step_accepted: list[int]
    per_step_drafted: list[int]

    @classmethod
    def of(cls, drafted: Sequence[int], accepted: Sequence[int], num_spec_tokens: int) -> SpeculativeMetrics:
        """Count the steps of a text.

        drafted: int [step], the draft tokens of each step, all nodes of a tree. accepted: int [step], how many of these
        were accepted. num_spec_tokens: the deepest draft that the configuration allows. A step that accepted more
        raises it. Raises ValueError if the two lists differ in length.
        """
        num_spec_tokens = max(num_spec_tokens, *accepted, 0)
        histogram = [0] * (num_spec_tokens + 1)
        by_length: dict[int, list[int]] = {}
        for d, a in zip(drafted, accepted, strict=True):
            histogram[a] += 1
            by_length.setdefault(d, [0] * (d + 1))[a] += 1
        steps, total, num_accepted = len(drafted), sum(drafted), sum(accepted)
        return cls(
            num_spec_steps=steps,
            num_spec_tokens=num_spec_tokens,
            num_draft_tokens=total,
            num_accepted_draft_tokens=num_accepted,
            mean_acceptance_length=1 + num_accepted / steps if steps else 1.0,
            draft_acceptance_rate=num_accepted / total if total else 0.0,
            acceptance_histogram=histogram,
            acceptance_histogram_by_draft_length=dict(sorted(by_length.items())),
            per_step_accepted=list(accepted),
            per_step_drafted=list(drafted),
        )


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds from the moment the request arrived. speculative_decoding: None without speculation or n > 1."""

    time_to_first_token: float | None
    e2e_latency: float
    speculative_decoding: SpeculativeMetrics | None


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation.

    token_ids: what was written, the prompt not among it. finish_reason: stop | length | error | abort; stop_reason: the stop
    string or token id, or why. seed: give it back and the text comes back. guarantee: what the text promises about plain
    decoding. logprobs: for each token its own log-probability and the likeliest alternatives', by token id, of the model's
    own distribution (before sampling parameters); None if not asked for. cumulative_logprob: the sum over the tokens written.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    seed: int
    guarantee: Guarantee
    logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its n continuations.

    prompt: as it was given. prompt_logprobs: for each prompt token as `CompletionOutput.logprobs`, None for the first, which
    is predicted by nothing; None if not asked for. finished: always true; a text that is still being written comes as `Delta`.
    """

    request_id: str
    prompt: Any
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finished: bool = True


@dataclass(frozen=True)
class Delta:
    """What one step added to a text.

    pieces: (text, whether it came from the draft), cut at the borders of tokens. logprobs: of the new tokens, if asked for.
    drafted, accepted: draft tokens of the step, and how many were accepted. ended: this is the last delta.
    output: the whole output, on the last delta of `LLM.stream`.
    """

    text: str
    token_ids: list[int]
    pieces: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    drafted: int = 0
    accepted: int = 0
    output: RequestOutput | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    ended: bool = False
