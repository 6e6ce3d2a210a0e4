"""A request, and one run of it: what is asked, and the text that comes of it."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from outrider.core.outputs import CompletionOutput, Delta, SpeculativeMetrics
from outrider.core.params import SamplingParams
from outrider.core.sampling import SequenceState, TokenMask
from outrider.core.stopping import FinishReason, StopChecker
from outrider.core.types import Commit, Guarantee


@dataclass(frozen=True, eq=False)
class Request:
    """One text to write. Complete when it is made; it may be run more than once."""

    id: int  # the caller's
    prompt: list[int]  # token ids, not empty
    params: SamplingParams  # sampling parameters
    seed: int = 0  # of the noise
    bad_words: tuple[tuple[int, ...], ...] = ()  # as token ids
    prediction: tuple[int, ...] = ()  # tokens that the answer is expected to repeat
    mask: TokenMask | None = None  # what a grammar allows
    prefill_only: bool = False  # read the prompt and write nothing, for its log-probabilities
    client: str = ""  # sequences of different clients take turns in a queue
    owner: str = ""  # slots are shared among owners; "" is none
    method: str | None = None  # the drafter, None for the configured one, "none" for none
    num_speculative_tokens: int | None = None  # draft tokens per step, None for the controller's choice
    deadline: float = math.inf  # a `perf_counter` time
    # the thread that steps calls it with every `Delta`; None without a reader
    sink: Callable[[Delta], None] | None = None
    # tokens that an earlier run wrote before it was cut off. Limits, penalties and stop strings count them
    continued: tuple[int, ...] = ()

    @property
    def whose(self) -> str:
        """The client, as a memory of texts knows it."""
        return whose(self.owner, self.client)


def whose(owner: str, client: str) -> str:
    """One name for both: two owners may name their clients alike."""
    return f"{owner}\n{client}"


@dataclass
class Clock:
    """When things happened to a sequence, in `perf_counter` seconds."""

    arrived: float = field(default_factory=perf_counter)
    admitted: float | None = None
    first: float | None = None  # its first token
    last: float | None = None  # its last step
    between: float | None = None  # seconds between its last two steps
    done: float | None = None

    @property
    def queued(self) -> float:
        """Seconds until it first had a slot."""
        return (self.admitted or self.done or perf_counter()) - self.arrived

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival; None without a token."""
        return None if self.first is None else self.first - self.arrived

    @property
    def total(self) -> float:
        """Seconds from arrival to its end, or until now."""
        return (self.done or perf_counter()) - self.arrived


@dataclass
class Counts:
    """What a sequence took."""

    cached: int = 0  # prompt tokens that the prefix cache had
    drafted: list[int] = field(default_factory=list)  # draft tokens of each step
    accepted: list[int] = field(default_factory=list)  # of them
    preemptions: int = 0
    method: str = "none"  # the drafter; "none" for none
    depth: int = 0  # draft tokens per step, at most
    undrafted: str | None = None  # why its drafter was taken away

    @property
    def speculative(self) -> SpeculativeMetrics:
        """The counts of draft tokens."""
        return SpeculativeMetrics.of(self.drafted, self.accepted, self.depth)


@dataclass
class Cursor:
    """How much of a text was handed out."""

    tokens: int = 0
    characters: int = 0
    marks: int = 0
    from_draft: set[int] = field(default_factory=set)  # places of the output tokens that drafts brought
    continued_text: str = ""  # the text that the continued tokens had given out
    ended: bool = False  # the last delta was handed out


class Sequence:
    """One run of a request. `Decoder.sequence` makes it.

    Attributes:
        request: What is asked. Its id, prompt, params, seed and client are here, too.
        slot: Of the cache; -1 without one.
        tokens: Committed ones: prompt, then output.
        checker: Decides where the text ends.
        logprobs: Of each written token.
        cancelled: Its reader has left.
    """

    def __init__(
        self,
        request: Request,
        checker: StopChecker,
        end_ids: tuple[int, ...] = (),
        method: str = "none",
        depth: int = 0,
    ) -> None:
        """
        Args:
            request: What is asked.
            checker: It has read the continued tokens.
            end_ids: Tokens that would end the text.
            method: As in `Counts`.
            depth: As in `Counts`.
        """
        self.request, self.checker, self.slot = request, checker, -1
        self.id, self.prompt, self.params = request.id, request.prompt, request.params
        self.seed, self.client = request.seed, request.client
        self.tokens, prompt = [*request.prompt, *request.continued], len(request.prompt)
        self.state = SequenceState(request.params, end_ids, request.bad_words, self.tokens, prompt, request.mask)
        self.finish: FinishReason | None = None
        self.logprobs: list[dict[int, float]] = []
        self.prompt_logprobs: list[dict[int, float] | None] = []
        self.counts, self.clock, self.cursor = Counts(method=method, depth=depth), Clock(), Cursor()
        self.cancelled = False
        if request.continued:  # their text counts as given out
            self.delta()
            self.cursor.continued_text = self.text[: self.cursor.characters]

    @property
    def steps(self) -> int:
        """Draft-verify rounds so far. Each continued token counts for one: no earlier step can have had a higher number, so
        no noise is used twice."""
        return len(self.request.continued) + len(self.counts.drafted)

    @property
    def left(self) -> int:
        """Output tokens that may follow, at most."""
        return self.checker.limit + len(self.prompt) - len(self.tokens)

    @property
    def output(self) -> list[int]:
        """The token ids of the text so far, the continued ones among them."""
        return self.tokens[len(self.prompt) :]

    @property
    def written(self) -> list[int]:
        """The token ids written so far by this run."""
        return self.tokens[len(self.prompt) + len(self.request.continued) :]

    @property
    def text(self) -> str:
        """The text written so far, cut at a stop string. Empty without a tokenizer."""
        return self.checker.text

    @property
    def new_text(self) -> str:
        """The text after the text that the continued tokens had given out."""
        return self.text[len(self.cursor.continued_text) :]

    def take(self, slot: int) -> None:
        """Take a slot, in which nothing is read yet. The text has ended if the continued tokens end it."""
        self.slot = slot
        self.clock.admitted = self.clock.admitted or perf_counter()
        if self.checker.end is not None:
            self.clock.done, self.finish = perf_counter(), self.checker.end
        if not self.written:
            self.prompt_logprobs.clear()

    def step_done(self, drafted: int, commit: Commit, logprobs: abc.Sequence[dict[int, float]] = ()) -> None:
        """Take over what a step wrote. The checker has read it. logprobs: of the new tokens, if they are shown."""
        clock, now = self.clock, perf_counter()
        clock.between = None if clock.last is None else now - clock.last
        clock.first, clock.last = clock.first or now, now
        if self.checker.end is not None:
            clock.done, self.finish = now, self.checker.end
        if commit.num_accepted:
            at = len(self.tokens) - len(self.prompt)
            self.cursor.from_draft.update(range(at, at + commit.num_accepted))
        self.tokens += commit.tokens
        self.logprobs += logprobs
        self.counts.drafted.append(drafted)
        self.counts.accepted.append(commit.num_accepted)

    def recalled(self, before: int, done: int) -> None:
        """The prefix cache had the tokens between these two places. A sequence that is read again has counted them."""
        if not self.written:
            earlier = self.counts.cached if before else 0
            self.counts.cached = earlier + max(min(done, len(self.prompt)) - before, 0)

    def read(self, logprobs: abc.Iterable[dict[int, float]]) -> None:
        """Take over the log-probabilities of tokens that were read. The first of a prompt has none: nothing predicts it."""
        self.prompt_logprobs += logprobs if self.prompt_logprobs else [None, *logprobs]
        del self.prompt_logprobs[len(self.prompt) :]

    def advance(self, tokens: abc.Sequence[int], steps: int) -> None:
        """Take over what earlier steps wrote, as a replay does, before the sequence is read."""
        for token in tokens:
            self.checker.push(token)
        self.tokens += tokens
        self.counts.drafted, self.counts.accepted = [0] * steps, [0] * steps

    def end(self, finish: str, reason: str | int | None = None) -> None:
        """End it with what it has, if it has not ended. Text held back for a stop string is text now."""
        if self.finish is None:
            self.finish = FinishReason(finish, reason)
            self.clock.done = perf_counter()
            self.checker.finish(self.finish)

    def delta(self) -> Delta:
        """What was written since the last call. Text that may still become a stop string is held back. `ended` is true from the
        end on."""
        text, marks, cursor = self.checker.settled, self.checker.marks, self.cursor
        pieces, at = list[tuple[str, bool]](), cursor.characters
        while cursor.marks < len(marks) and marks[cursor.marks] <= len(text):
            mark = marks[cursor.marks]
            pieces.append((text[at:mark], cursor.marks in cursor.from_draft))
            at = max(at, mark)
            cursor.marks += 1
        if self.finish is not None or not marks:
            pieces.append((text[at:], cursor.marks in cursor.from_draft))
            at = len(text)
        new, tokens = text[cursor.characters : at], self.output[cursor.tokens :]
        logprobs = self.logprobs[max(0, cursor.tokens - len(self.request.continued)) :]
        cursor.characters, cursor.tokens = at, cursor.tokens + len(tokens)
        counts = (self.counts.drafted[-1], self.counts.accepted[-1]) if self.counts.drafted else (0, 0)
        cursor.ended = ended = self.finish is not None
        return Delta(new, tokens, [p for p in pieces if p[0]], *counts, logprobs=logprobs, ended=ended)

    def completion(self, guarantee: Guarantee, index: int = 0) -> CompletionOutput:
        """What was written, as an output."""
        asked = self.params.logprobs is not None
        total = sum(x[t] for x, t in zip(self.logprobs, self.written, strict=False)) if asked else None
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.output,
            finish_reason=self.finish.finish if self.finish else "abort",
            stop_reason=self.finish.reason if self.finish else None,
            seed=self.request.seed,
            guarantee=guarantee,
            logprobs=self.logprobs if asked else None,
            cumulative_logprob=total,
        )
