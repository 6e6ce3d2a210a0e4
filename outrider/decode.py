"""The loop: propose, forward, verify, commit. Plain decoding is the same loop with a drafter that guesses nothing.

Invariant before and after every step, for every row that decodes: `cache.length[row] == len(tokens) - 1`, and the last
token is the root of the next draft.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import torch

from outrider.control import Controller, Fixed
from outrider.core.noise import Noise
from outrider.core.sampling import LogitsDistribution, LogitsWarper, SequenceState, TokenMask
from outrider.core.stopping import FinishReason, StopChecker
from outrider.core.types import Budget, Commit, Draft, Guarantee, Step, Verdict
from outrider.drafters.base import DraftContext, Drafter, NoDraft, TargetPass
from outrider.kernels import cpu as native
from outrider.models.base import LanguageModel, Output
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes
from outrider.params import SamplingParams
from outrider.verify import VERIFIERS

_NOBODY = NoDraft()
PREFILL_CHUNK = 256  # prompt tokens per forward; rows that decode wait for one chunk at most


@dataclass(eq=False)
class Request:
    """A prompt to continue. `id` is the caller's; prompt: token ids, not empty."""

    id: int
    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    prediction: tuple[int, ...] = ()  # tokens that the answer is expected to repeat
    mask: TokenMask | None = None  # what may be written where, as by a grammar
    prefill_only: bool = False  # read the prompt, write nothing: for its log-probabilities


@dataclass(eq=False)
class Row:
    """A request in a cache row, as it grows."""

    request: Request
    slot: int
    tokens: list[int]  # committed: prompt, then output
    history: SequenceState
    ending: StopChecker
    limit: int  # output tokens that may be written at most
    steps: int = 0
    cached: int = 0  # prompt tokens that were not computed, because an earlier text began with them
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)  # of the prompt while it is read, for the prefix cache
    arrived: float = field(default_factory=perf_counter)
    first: float | None = None  # when the first token came
    done: float | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def end(self) -> FinishReason | None:
        return self.ending.end


class PrefixSource(Protocol):
    """Keys and values of texts that were read before."""

    def fetch(self, cache: SlotCache, slot: int, tokens: Sequence[int]) -> tuple[int, torch.Tensor | None]:
        """Put the longest known start of `tokens` into an empty slot and commit it.

        Returns its length, and the features [token, feature] of the tapped layers if they were kept.
        """
        ...

    def keep(self, cache: SlotCache, slot: int, tokens: Sequence[int], features: torch.Tensor | None) -> None:
        """Remember a slot, which holds `tokens`. features: float [token, feature] of the tapped layers, None without taps."""
        ...


class Decoder:
    """Continues requests in the rows of one cache; rows join and leave between steps."""

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        verifier: str = "match",
        controller: Controller | None = None,
        *,
        rows: int = 8,
        max_length: int | None = None,
        end_ids: Sequence[int] = (),
        tokenizer: Any | None = None,
        prefixes: PrefixSource | None = None,
    ) -> None:
        """max_length: tokens of prompt and output per row. end_ids: the model's end tokens. tokenizer: for text. prefixes:
        where prompts that begin alike are found; without it every prompt is computed."""
        self.target, self.drafter = target, drafter or NoDraft()
        self.verifier = VERIFIERS[verifier]
        self.controller = controller or Fixed(5)
        self.max_length = min(max_length or target.max_length, target.max_length)
        self.end_ids, self.tokenizer = tuple(end_ids), tokenizer
        self.prefixes, self.chunk = prefixes, PREFILL_CHUNK
        self.cache = target.new_cache(rows, self.max_length)
        self.free = list(range(rows))[::-1]
        self.rows: dict[int, Row] = {}  # by slot, in order of admission
        self.waiting: list[Row] = []  # rows whose prompt is not in the cache yet
        self._batch: tuple[tuple[int, ...], LogitsWarper, torch.Tensor] | None = None

    @property
    def guarantee(self) -> Guarantee:
        """What holds for the texts. Where a row's logits change with its neighbours, a near-tie may fall the other way, and
        then only the law is promised."""
        if not self.target.batch_invariant:
            return Guarantee.EXACT_DISTRIBUTION
        return Guarantee.EXACT_TOKENS if isinstance(self.drafter, NoDraft) else self.verifier.guarantee

    def check(self, request: Request) -> int:
        """Raise ValueError if the request cannot be run; returns how many tokens may be written."""
        p, n = request.params, len(request.prompt)
        if not n:
            raise ValueError("the prompt is empty; a model continues at least one token (its begin token will do)")
        wrong = [t for t in request.prompt if not 0 <= t < self.target.vocab_size]
        if wrong:
            raise ValueError(f"prompt token {wrong[0]} is outside the vocabulary of {self.target.vocab_size} tokens")
        p.check_vocab(self.target.vocab_size)
        if n >= self.max_length:
            raise ValueError(
                f"the prompt has {n} tokens and the model holds {self.max_length} of prompt and output; shorten it"
            )
        if request.prefill_only:
            return 0
        if p.max_tokens is not None and n + p.max_tokens > self.max_length:
            raise ValueError(
                f"prompt ({n} tokens) plus max_tokens ({p.max_tokens}) is more than the {self.max_length} that fit; "
                f"use max_tokens={self.max_length - n} or less"
            )
        return self.max_length - n if p.max_tokens is None else p.max_tokens

    def admit(self, request: Request) -> Row:
        """Give the request a free row. Raises IndexError when there is none and ValueError for a bad request."""
        limit = self.check(request)
        p, tokens = request.params, list(request.prompt)
        ends = (*(() if p.ignore_eos else self.end_ids), *p.stop_token_ids)
        history = SequenceState(p, ends, request.bad_words, tokens, len(tokens), request.mask)
        ending = StopChecker(p, self.end_ids, limit, self.tokenizer, tokens)
        row = Row(request, -1, tokens, history, ending, limit)
        self.resume(row)
        return row

    def resume(self, row: Row) -> None:
        """Seat a row that `release` took out of the cache: what it holds is computed again, and its text goes on as if
        nothing had happened, for the noise is keyed by position. Raises IndexError when no slot is free."""
        row.slot = self.free.pop()
        row.features.clear()
        if not row.output:
            row.prompt_logprobs.clear()
        self.rows[row.slot] = row
        self.waiting.append(row)

    def release(self, slot: int) -> None:
        """Free a row, finished or not."""
        row = self.rows.pop(slot)
        if row in self.waiting:
            self.waiting.remove(row)
        self.cache.release(slot)
        self.drafter.release(slot)
        self.controller.release(slot)
        self.free.append(slot)

    def step(self) -> Step | None:
        """Prefill a chunk of the oldest waiting prompt, then one draft-verify round of the rows that decode, if any."""
        if self.waiting:
            self.prefill(self.waiting[0])
        live = self.live
        return self.round(live) if live else None

    @property
    def live(self) -> list[Row]:
        """The rows that decode."""
        return [row for row in self.rows.values() if row not in self.waiting and row.end is None]

    def round(self, live: list[Row]) -> Step:
        """One draft-verify round of some of the rows that decode."""
        with native.one_torch_thread(self.target.device):
            return self._round(live)

    def _round(self, live: list[Row]) -> Step:
        at = [len(row.tokens) for row in live]
        clock = [perf_counter()]
        batch = self._view(live)
        asked = any(b.depth and b.max_nodes for b in batch.budgets)  # a drafter that may not guess costs nothing
        draft = (self.drafter if asked else _NOBODY).propose(batch).to(self.target.device)
        clock.append(perf_counter())
        out = self.target.forward(Nodes(draft.tokens, self.cache, batch.slots, draft.parents), taps=self.drafter.taps)
        clock.append(perf_counter())
        verdict = self.verifier(LogitsDistribution(out.logits, draft, batch.warp), draft, batch.noise, batch.positions)
        clock.append(perf_counter())
        kept = self._commit(live, draft, verdict, out)
        if asked or self.drafter.taps:
            self.drafter.update(batch, kept, TargetPass(draft, out.logits))
        clock.append(perf_counter())
        times: dict[str, float] = dict(
            zip(("draft", "target", "verify", "commit"), (b - a for a, b in itertools.pairwise(clock)), strict=True)
        )
        step = Step(draft, verdict, kept, batch.slots, at, batch.budgets, times, out.logits)
        self.controller.observe(step)
        return step

    def steps(self, requests: Iterable[Request]) -> Iterator[tuple[Step | None, list[Row]]]:
        """Run requests to their ends, as many at a time as there are rows. Yields each step with the rows it moved.

        A reader that stops early leaves every row free.
        """
        queue, mine = iter(requests), set[int]()
        following = next(queue, None)
        try:
            while following is not None or mine:
                while following is not None and self.free:
                    mine.add(self.admit(following).slot)
                    following = next(queue, None)
                step = self.step()
                moved = [self.rows[slot] for slot in step.slots] if step else []
                for row in moved:
                    if row.end is not None:
                        self.release(row.slot)
                        mine.discard(row.slot)
                yield step, moved
        finally:
            for slot in mine:
                self.release(slot)

    def generate(self, requests: Iterable[Request]) -> list[Row]:
        """Run requests to their ends; the finished rows in the order of the requests."""
        done: dict[int, Row] = {}
        requests = list(requests)
        for _, moved in self.steps(requests):
            done.update({id(row.request): row for row in moved if row.end is not None})
        return [done[id(r)] for r in requests]

    def prefill(self, row: Row) -> None:
        """Put the next chunk of a row's tokens, all but the last, into the cache."""
        tokens, last = row.tokens, len(row.tokens) - 1
        wanted = row.request.params.prompt_logprobs
        if row.output:
            wanted = None  # a row that was resumed has told them
        done = self.cache.length[row.slot]
        if done == 0 and self.prefixes is not None and wanted is None:
            done, features = self.prefixes.fetch(self.cache, row.slot, tokens[:last])
            row.cached = row.cached if row.output else done
            if features is not None:
                self._started(row, 0, features)
        part = tokens[done : min(done + self.chunk, last)]
        if part:
            want = "none" if wanted is None else "all"
            out = self.target.forward(
                Nodes(torch.tensor([part]), self.cache, [row.slot]), taps=self.drafter.taps, want=want
            )
            self.cache.commit([row.slot], [range(len(part))])
            if out.features is not None:
                self._started(row, done, out.features[0])
            if wanted is not None:
                following = tokens[done + 1 : done + 1 + len(part)]
                row.prompt_logprobs += [logprobs(x, t, wanted) for x, t in zip(out.logits[0], following, strict=True)]
        if self.cache.length[row.slot] == last:
            self.waiting.remove(row)
            if self.prefixes is not None:
                features = torch.cat(row.features) if row.features else None
                self.prefixes.keep(self.cache, row.slot, tokens[:last], features)
            row.features.clear()
            if wanted is not None:
                row.prompt_logprobs.insert(0, None)  # the first token has no law
            if row.request.prefill_only:
                row.ending.end = FinishReason("length")

    def _started(self, row: Row, first: int, features: torch.Tensor) -> None:
        """Hand a chunk's features to the drafter, and keep them for the prefix cache until the prompt is read."""
        if self.prefixes is not None:
            row.features.append(features)
        self.drafter.start(row.slot, row.tokens, first, features)

    def _view(self, live: list[Row]) -> DraftContext:
        """What the drafter sees of this step. The compiled parameters live as long as the batch stays the same."""
        key = tuple(id(row.history) for row in live)  # the Warp keeps them alive: no id is used twice
        if self._batch is None or self._batch[0] != key:
            seeds = torch.tensor([_signed(row.request.seed) for row in live], device=self.target.device)
            self._batch = (key, LogitsWarper([row.history for row in live], self.target.device), seeds)
        _, warp, seeds = self._batch
        budgets = [
            budget.clipped(row.limit - row.ending.count - 1)
            for row, budget in zip(live, self.controller.budgets([r.slot for r in live]), strict=True)
        ]
        return DraftContext(
            slots=[row.slot for row in live],
            tokens=[row.tokens for row in live],
            budgets=budgets,
            warp=warp,
            noise=Noise(seeds, torch.tensor([row.steps for row in live], device=seeds.device)),
            stream=self.verifier.draft_stream,
            needs_probs=self.verifier.needs_probs,
            prompt_lengths=[len(row.request.prompt) for row in live],
            predictions=[row.request.prediction for row in live],
            cache=self.cache,
        )

    def _commit(self, live: list[Row], draft: Draft, verdict: Verdict, out: Output) -> list[Commit]:
        """Move what was accepted into cache and text, cut at the first thing that ends it."""
        tokens, paths = draft.tokens.tolist(), verdict.path.tolist()
        kept = []
        for b, (row, path, last) in enumerate(zip(live, paths, verdict.token.tolist(), strict=True)):
            nodes = [n for n in path if n >= 0]
            new = [*(tokens[b][n] for n in nodes[1:]), last]
            end = None
            for count, token in enumerate(new, 1):
                end = row.ending.push(token)
                if end is not None:
                    new = new[:count]
                    break
            if new[-1] < 0:
                new = new[:-1]  # a row without a law has no token
            if (wanted := row.request.params.logprobs) is not None:
                row.logprobs += [logprobs(out.logits[b, n], t, wanted) for n, t in zip(nodes, new, strict=False)]
            now = perf_counter()
            row.first = row.first or now
            row.done = now if end else None
            row.tokens += new
            row.steps += 1
            drafted = min(len(new), len(nodes) - 1)
            held = nodes[: len(new)]
            features = None if out.features is None else out.features[b, held]
            kept.append(Commit(new, held, drafted, end.finish if end else None, features))
        self.cache.commit([row.slot for row in live], [k.nodes for k in kept])
        return kept


def logprobs(logits: torch.Tensor, token: int, alternatives: int) -> dict[int, float]:
    """The log-probabilities, under the model's own law, of a token and of the likeliest `alternatives`."""
    law = logits.float().log_softmax(-1)
    best = law.topk(min(alternatives, len(law)))
    return {token: float(law[token]), **dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))}


def draw_seed() -> int:
    """A fresh seed for a request that names none."""
    return secrets.randbits(63)


def nth_seed(seed: int, n: int) -> int:
    """The seed of the n-th output of one prompt: the seed itself for the first, well mixed for the others (splitmix64)."""
    if n == 0:
        return seed
    z = (seed + n * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return z ^ (z >> 31)


def _signed(seed: int) -> int:
    """64 unsigned bits as torch's int64 holds them."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed


__all__ = ["Budget", "Decoder", "Request", "Row", "draw_seed", "logprobs", "nth_seed"]
