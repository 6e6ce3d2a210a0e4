"""What a generation returns: vLLM's shapes and field names, plus the guarantee that held and the seed that was used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.types import Guarantee


@dataclass(frozen=True)
class SpeculativeMetrics:
    """The fields of vLLM's `metrics.speculative_decoding`. Rates are fractions. Lengths count the bonus token."""

    num_spec_steps: int
    num_spec_tokens: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float  # committed tokens per step, 1 + accepted / steps; 1.0 without steps
    draft_acceptance_rate: float  # accepted / drafted; 0.0 without draft tokens
    acceptance_histogram: list[int]  # [num_spec_tokens + 1], steps by the number of accepted draft tokens
    acceptance_histogram_by_draft_length: dict[
        int, list[int]
    ]  # the same of the steps with k draft tokens, [k + 1], by k
    per_step_accepted: list[int]
    per_step_drafted: list[int]

    @classmethod
    def of(cls, drafted: Sequence[int], accepted: Sequence[int], num_spec_tokens: int) -> SpeculativeMetrics:
        """Count the steps of a text. Raises ValueError if the two lists differ in length.

        Args:
            drafted: int [step], the draft tokens of each step, all nodes of a tree.
            accepted: int [step], how many of these were accepted.
            num_spec_tokens: The deepest draft that the configuration allows. A step that accepted more raises it.
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
    """One continuation."""

    index: int
    text: str
    token_ids: list[int]  # of the text, without the prompt
    finish_reason: str | None  # stop | length | error | abort
    stop_reason: str | int | None  # the stop string or token id, or why
    seed: int  # give it back and the text comes back
    guarantee: Guarantee  # what the text promises about plain decoding
    logprobs: list[dict[int, float]] | None = None
    """For each token its own log-probability and the likeliest alternatives', by token id, of the model's own distribution
    (before sampling parameters); None if not asked for."""
    cumulative_logprob: float | None = None  # the sum over the tokens written


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its n continuations."""

    request_id: str
    prompt: Any  # as it was given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, float] | None] | None = None
    """For each prompt token as `CompletionOutput.logprobs`, None for the first, which is predicted by nothing."""
    finished: bool = True  # always; a text that is still being written comes as `Delta`


@dataclass(frozen=True)
class Delta:
    """What one step added to a text."""

    text: str
    token_ids: list[int]
    pieces: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    """(text, whether it came from the draft), cut at the borders of tokens."""
    drafted: int = 0  # draft tokens of the step
    accepted: int = 0  # of them
    output: RequestOutput | None = None  # the whole output, on the last delta of `LLM.stream`
    logprobs: list[dict[int, float]] = field(default_factory=list[dict[int, float]])  # of the new tokens, if asked for
    ended: bool = False  # this is the last delta
