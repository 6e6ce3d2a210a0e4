"""The loop: propose, forward, verify, commit. Plain decoding is the same loop with a drafter that proposes nothing.

Invariant before and after every step, for every slot that decodes: `cache.length[slot] == len(tokens) - 1`, and the last
token is the root of the next draft.
"""

from __future__ import annotations

import secrets
import threading
from collections import abc
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from outrider.control import Controller, Fixed
from outrider.core.detokenizer import TokenBytes
from outrider.core.noise import Noise
from outrider.core.params import BadParameter, ContextOverflow
from outrider.core.sampling import LogitsWarper, largest
from outrider.core.stopping import FinishReason, StopChecker
from outrider.core.tree import chain
from outrider.core.types import PHASES, Array, Commit, Draft, Guarantee, Step, Verdict
from outrider.drafters.base import DraftContext, Drafter, NoDraft, TargetPass
from outrider.drafters.lookup.memory import TextMemory
from outrider.drafters.method import NONE
from outrider.engine.prefix_cache import BLOCK, PrefixCache
from outrider.engine.request import Request, Sequence
from outrider.kernels.probabilities import log_softmax
from outrider.models.base import LanguageModel, Output, Verification
from outrider.models.nodes import Nodes
from outrider.verify import VERIFIERS

_NO_DRAFT = NoDraft()
PREFILL_CHUNK = 256  # prompt tokens of a forward, of one sequence or several; those that decode wait for one at most


class _Chunk(NamedTuple):
    """What a forward reads of a prompt."""

    sequence: Sequence
    start: int  # the place of the first token
    part: list[int]  # the tokens
    wanted: int | None  # log-probabilities of each


class Decoder:
    """Continues sequences in the slots of one cache. Sequences join and leave between steps.

    Attributes:
        sequences: Those that have a slot, by slot, in order of admission.
        free: The other slots.
        waiting: Sequences whose tokens are not all in the cache yet.
        chunk: Prompt tokens per forward, of all sequences that it reads.
        plain: Nothing drafts.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafter: Drafter | None = None,
        verifier: str = "match",
        controller: Controller | None = None,
        *,
        num_slots: int = 8,
        max_length: int | None = None,
        end_ids: abc.Sequence[int] = (),
        tokenizer: Any | None = None,
        prefixes: PrefixCache | None = None,
        text_memory: TextMemory | None = None,
    ) -> None:
        """
        Args:
            target: The model that judges.
            drafter: None decodes plainly.
            verifier: A name of `outrider.verify.VERIFIERS`.
            controller: Says how long drafts may be; None: 5 tokens.
            num_slots: Sequences decoded concurrently.
            max_length: Tokens of prompt and output of a sequence, at most; None: as many as the target takes.
            end_ids: The model's end tokens.
            tokenizer: For text.
            prefixes: Keys and values of prompts that were read before; None reads every prompt.
            text_memory: Where finished texts are kept for drafts of later ones; None keeps none.
        """
        self.target, self.drafter, self.plain = target, drafter or _NO_DRAFT, drafter is None
        self.verifier = VERIFIERS[verifier]
        self.controller = controller or Fixed(5)
        self.max_length = min(max_length or target.max_length, target.max_length)
        self.end_ids, self.tokens = tuple(end_ids), TokenBytes(tokenizer)
        self.prefixes, self.text_memory, self.chunk = prefixes, text_memory, PREFILL_CHUNK
        self.cache = target.new_cache(num_slots, self.max_length)
        self.free = list(range(num_slots))[::-1]
        self.sequences: dict[int, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.stepping = threading.RLock()  # two schedulers may share a decoder, but not a step
        self._batch: tuple[list[Sequence], DraftContext] | None = None  # that of the last round

    def limit(self, max_length: int, prefixes: PrefixCache | None) -> None:
        """Before the first sequence: shorten the longest one, and take another prefix cache.

        Args:
            max_length: Tokens of prompt and output of a sequence, at most.
            prefixes: In place of the one that the decoder was made with.
        """
        self.max_length, self.prefixes = min(self.max_length, max_length), prefixes
        self.cache.shorten(self.max_length)

    @property
    def guarantee(self) -> Guarantee:
        """What holds for the texts. Where logits change with the batch, a near-tie may fall the other way. Then only the
        distribution is promised."""
        if not self.target.batch_invariant:
            return Guarantee.EXACT_DISTRIBUTION
        return Guarantee.EXACT_TOKENS if self.plain else self.verifier.guarantee

    def check(self, request: Request) -> int:
        """Raise ValueError if the request cannot run. Returns how many tokens may be written."""
        p, n, vocab = request.params, len(request.prompt), self.target.vocab_size
        if not n:
            message = "the prompt is empty; a model continues at least one token (its begin token will do)"
            raise BadParameter(message, "prompt")
        for name, tokens in (("prompt", request.prompt), ("continued", request.continued)):
            if wrong := [t for t in tokens if not 0 <= t < vocab]:
                raise BadParameter(f"{name} token {wrong[0]!s:.20} is outside the vocabulary of {vocab} tokens", name)
        p.check_vocab(vocab)
        if p.stops and self.tokens.tokenizer is None:
            raise ValueError("stop strings need a tokenizer; give LLM(..., tokenizer=...) or use stop_token_ids")
        if n >= self.max_length:
            raise ContextOverflow(n, self.max_length)
        if request.prefill_only:
            if request.continued:
                raise ValueError("a text of no tokens cannot be continued; raise max_tokens")
            return 0
        if p.max_tokens is not None and n + p.max_tokens > self.max_length:
            raise ContextOverflow(n, self.max_length, p.max_tokens)
        return self.max_length - n if p.max_tokens is None else p.max_tokens

    def sequence(self, request: Request, method: str = NONE, depth: int = 0) -> Sequence:
        """A sequence of a request. method, depth: as in `Counts`. A draft length of the request's own comes first.

        Raises ValueError for a request that cannot run, and for a text that ends before its last continued token.
        """
        p, limit = request.params, self.check(request)
        if (count := request.num_speculative_tokens) is not None:
            method, depth = method if count else NONE, count
        # a grammar allows an end token where it is complete, and nothing can follow
        model_ends = () if p.ignore_eos and request.mask is None else self.end_ids
        checker = StopChecker(p, model_ends, limit, self.tokens, request.prompt)
        for count, token in enumerate(request.continued, 1):
            end = checker.push(token)
            if end is not None and count < len(request.continued):
                why = "max_tokens is reached" if end.finish == "length" else "it stops there"
                raise ValueError(
                    f"the text ends at token {count} of the {len(request.continued)} to continue, because {why}; "
                    "continue a text with the parameters that it began with"
                )
        return Sequence(request, checker, (*model_ends, *p.stop_token_ids), method, depth)

    def start(self, request: Request) -> Sequence:
        """A new sequence of the request, in a free slot. Raises what `sequence` and `admit` raise."""
        sequence = self.sequence(request)
        self.admit(sequence)
        return sequence

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence a free slot. It may have ended then, if the tokens that it continues end the text.

        One that `release` took out is read again. Its text goes on as if nothing had happened, because noise is keyed by
        position. Raises IndexError when no slot is free.
        """
        if not self.free:
            raise IndexError("no slot is free; release one, or make the decoder with more")
        sequence.take(self.free.pop())
        self.sequences[sequence.slot] = sequence
        self.waiting.append(sequence)

    def release(self, slot: int) -> None:
        """Free a slot, whether its sequence has finished or not."""
        sequence, self._batch = self.sequences.pop(slot), None
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.cache.release(slot)
        self.drafter.release(slot)
        self.controller.release(slot)
        self.free.append(slot)

    def run(self, sequences: abc.Sequence[Sequence], tokens: int | None = None) -> abc.Iterator[Step]:
        """Read the prompts of some sequences, then decode them side by side. Yields each draft-verify round.

        Args:
            sequences: They have slots, and keep them.
            tokens: Output tokens at which a sequence rests; None decodes all to their ends.
        """
        while unread := [sequence for sequence in sequences if sequence in self.waiting]:
            self.prefill(unread)
        while live := [s for s in sequences if s.finish is None and (tokens is None or len(s.output) < tokens)]:
            yield self.round(live)

    @property
    def live(self) -> list[Sequence]:
        """The sequences that decode."""
        return [s for s in self.sequences.values() if s not in self.waiting and s.finish is None]

    def round(self, live: list[Sequence]) -> Step:
        """One draft-verify round of some of the sequences that decode."""
        context = self._context(live)
        # a drafter that may not draft costs nothing
        asked = not self.plain and any(b.depth and b.max_nodes for b in context.budgets)
        before, began = [len(sequence.tokens) for sequence in live], perf_counter()
        draft = (self.drafter if asked else _NO_DRAFT).propose(context)
        drafted = perf_counter()
        following = min(context.left) > 1 and (None if asked else True)
        check = Verification(self.verifier, draft, context.warp, context.noise, before, following)
        out, *_ = pending = self.target.step(self.cache, context.slots, check, taps=self.drafter.taps)
        forwarded = perf_counter()
        verdict = pending.result()
        judged = perf_counter()
        commits = self._commit(live, draft, verdict, out)
        if asked:
            self.drafter.update(context, commits, TargetPass(draft, out.logits))
        elif out.features is not None:
            for sequence, commit, first in zip(live, commits, before, strict=True):
                assert commit.features is not None
                self.drafter.start(sequence.slot, sequence.tokens, first - 1, commit.features)
        parts = drafted - began, forwarded - drafted, judged - forwarded, perf_counter() - judged
        parts = (parts[0], 0.0, 0.0, 0.0) if pending.first else parts
        seconds: dict[str, float] = dict(zip(PHASES, parts, strict=True))
        step = Step(draft, verdict, commits, context.slots, before, context.budgets, seconds, out.logits)
        self.controller.observe(step)
        return step

    def prefill(self, sequences: abc.Sequence[Sequence], rows: int | None = None) -> None:
        """Read the next tokens of some sequences into the cache, in one forward. All but the last of each are read.

        Args:
            sequences: Some of `waiting`. The first is served first, and the others share the rows that it leaves.
            rows: Tokens of the forward, in place of `chunk`.
        """
        chunks = list[_Chunk]()
        for sequence in sequences:
            if room := self._room(chunks, sequence, rows or self.chunk):
                more = [*chunks, *self._chunks(sequence, room)]
                cells = max((c.start for c in more), default=0) + max((len(c.part) for c in more), default=0)
                if len(more) <= 1 or cells <= self.max_length:  # the cache needs no more cells than for one of them
                    chunks = more
        if unread := [c for c in chunks if c.part]:
            slots = [c.sequence.slot for c in unread]
            tokens, parents = chain([c.part for c in unread])
            nodes = Nodes(tokens, self.cache, slots, parents if len(unread) > 1 else None)
            want = "none" if chunks[0].wanted is None else "all"
            out = self.target.forward(nodes, taps=self.drafter.taps, want=want)
            self.cache.commit(slots, [range(len(c.part)) for c in unread])
            for place, (sequence, start, part, wanted) in enumerate(unread):
                if out.features is not None:
                    self.drafter.start(sequence.slot, sequence.tokens, start, out.features[place, : len(part)])
                if wanted is not None:
                    following = sequence.tokens[start + 1 : start + 1 + len(part)]
                    logits = np.asarray(out.logits[0])
                    sequence.read(logprobs(x, t, wanted) for x, t in zip(logits, following, strict=True))
        for chunk in chunks:
            self._after(chunk.sequence, chunk.wanted)

    def _room(self, chunks: list[_Chunk], sequence: Sequence, rows: int) -> int:
        """How many tokens of a sequence a forward has room for, beside these chunks. rows: of the forward."""
        if not chunks:
            return rows
        asks = [one.params.prompt_logprobs for one in (chunks[0].sequence, sequence)]
        if asks != [None, None]:
            return 0  # the logits of all its tokens: it is read alone
        room = rows - sum(len(c.part) for c in chunks)
        if not self.target.skips_padding:
            room = rows // (len(chunks) + 1)
            room = room if room >= max(len(c.part) for c in chunks) else 0
        if room and self.prefixes is not None and not self.cache.length[sequence.slot]:
            tokens = sequence.tokens[:-1]
            alike = self.prefixes.parting(tokens) + BLOCK
            if any(len(tokens) >= alike and c.sequence.tokens[:alike] == tokens[:alike] for c in chunks):
                return 0  # another one reads what it begins with: the prefix cache will have it
        return room

    def _chunks(self, sequence: Sequence, room: int) -> list[_Chunk]:
        """The next tokens that a sequence reads, at most `room`; nothing while the prefix cache may have more of them."""
        tokens, last = sequence.tokens, len(sequence.tokens) - 1
        # a resumed sequence has the log-probabilities of its prompt already
        wanted = None if sequence.written else sequence.params.prompt_logprobs
        done = self.cache.length[sequence.slot]
        if self.prefixes is not None and wanted is None:
            before = done
            done = self.prefixes.fetch(self.cache, sequence.slot, tokens[:last])
            sequence.recalled(before, done)
            if before < done < last and self.prefixes.files is not None:
                return []  # there may be more, and others need not wait for it
        end = min(done + room, last)
        if self.prefixes is not None and self.cache.states:
            end = self.prefixes.chunk_end(self.cache, tokens[:last], done, end)
        return [_Chunk(sequence, done, tokens[done:end], wanted)]

    def _after(self, sequence: Sequence, wanted: int | None) -> None:
        """After a chunk was read."""
        held, last = self.cache.length[sequence.slot], len(sequence.tokens) - 1
        if held == last or (self.prefixes is not None and self.prefixes.keeps_chunks(self.cache)):
            self.remember(sequence)
        if held == last:
            self.waiting.remove(sequence)
            if wanted is not None:
                sequence.read(())  # of a prompt of one token nothing was
            if sequence.request.prefill_only:
                sequence.end("length")

    def remember(self, sequence: Sequence) -> None:
        """Let the prefix cache have what is read of a sequence that has a slot."""
        if self.prefixes is not None:
            held = sequence.tokens[: self.cache.length[sequence.slot]]
            self.prefixes.keep(self.cache, sequence.slot, held, ended=len(held) >= len(sequence.tokens) - 1)

    def _context(self, live: list[Sequence]) -> DraftContext:
        """What the drafter sees of this step. Most of it lives as long as the batch stays the same."""
        if self._batch is None or self._batch[0] != live:
            context = DraftContext(
                slots=[sequence.slot for sequence in live],
                tokens=[sequence.tokens for sequence in live],
                budgets=[],
                warp=LogitsWarper([sequence.state for sequence in live]),
                noise=Noise([signed(sequence.request.seed) for sequence in live], []),
                stream=self.verifier.draft_stream,
                needs_probs=self.verifier.needs_probs,
                prompt_lengths=[len(sequence.prompt) for sequence in live],
                predictions=[sequence.request.prediction for sequence in live],
                cache=self.cache,
                clients=() if self.text_memory is None else [sequence.request.whose for sequence in live],
            )
            self._batch = live, context
        context, left = self._batch[1], [sequence.left for sequence in live]
        budgets = self.controller.budgets(context.slots)
        return context.but(
            budgets=[budget.clipped(most - 1) for budget, most in zip(budgets, left, strict=True)],
            noise=Noise(context.noise.seed, [sequence.steps for sequence in live]),
            left=left,
            waiting=len(self.waiting),
        )

    def _commit(self, live: list[Sequence], draft: Draft, verdict: Verdict, out: Output) -> list[Commit]:
        """Move what was accepted into cache and text, cut at the first thing that ends it."""
        trees, commits = draft.host, list[Commit]()
        for b, (sequence, (nodes, last)) in enumerate(zip(live, verdict.host, strict=True)):
            new, end = [trees[b][n][0] for n in nodes[1:]], None
            new.append(last)
            for count, token in enumerate(new, 1):
                end = sequence.checker.push(token)
                if end is not None:
                    new = new[:count]
                    break
            if new[-1] < 0:
                new = new[:-1]  # the distribution was empty: there is no token
                if np.isfinite(out.logits[b, nodes[-1]].max()):
                    end = self._nothing_left(sequence, new)
                    sequence.checker.finish(end)
            shown, held, features = (), nodes[: len(new)], None
            if (wanted := sequence.params.logprobs) is not None:
                shown = [logprobs(out.logits[b, n], t, wanted) for n, t in zip(nodes, new, strict=False)]
            if out.features is not None:
                line = len(live) == 1 and held == [*range(len(held))]  # as a slice: nothing is copied
                features = out.features[b, : len(held)] if line else out.features[b, held]
            commit = Commit(new, held, min(len(new), len(nodes) - 1), end.finish if end else None, features)
            sequence.step_done(len(trees[b]) - 1, commit, shown)
            commits.append(commit)
        self.cache.commit([sequence.slot for sequence in live], [commit.nodes for commit in commits])
        return commits

    def _nothing_left(self, sequence: Sequence, new: list[int]) -> FinishReason:
        """Why a text ends where its parameters forbid every token. If its grammar is complete, this is its end."""
        mask, p = sequence.request.mask, sequence.params
        if mask is not None and mask.allowed(sequence.tokens, len(sequence.prompt), new)[list(self.end_ids)].any():
            return FinishReason("stop")
        used = [name for name in ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias") if getattr(p, name)]
        used += ["the grammar"] * (mask is not None)
        return FinishReason("length", note=f"the text ends here, because no token is left that {', '.join(used)} allow")


def logprobs(logits: Array, token: int, alternatives: int) -> dict[int, float]:
    """The log-probabilities, by the model's own distribution, of a token and of the `alternatives` most likely ones."""
    scores = log_softmax(logits)
    [best], [values] = largest(scores[None], min(alternatives, len(scores)))
    return {token: float(scores[token]), **dict(zip(best.tolist(), values.tolist(), strict=True))}


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


def signed(seed: int) -> int:
    """64 unsigned bits as numpy's int64 holds them."""
    seed &= 2**64 - 1
    return seed - 2**64 if seed >= 2**63 else seed
