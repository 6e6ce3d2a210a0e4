"""Computes a recorded step again, with the loop itself, and says why each draft token was accepted or rejected.

The trace has what cannot be computed: the text before the step, the draft and the seed. The replay computes the rest: the
target's distributions, the noise, the verdict and the tokens. With a batch-invariant model all is equal bit for bit. The replay
names what is not. Verifiers that divide by the draft's distribution need it. Then the drafter is asked again, and it must
propose the tree that was recorded.

The reasons are for people: slow and complete. A verifier with coins is explained by its reference, run again with the same
noise. A verifier without coins compares draft tokens with the target's own sample, and that sample is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.control import Controller, Fixed
from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsDistribution, TokenMask
from outrider.core.tree import levels, validate
from outrider.core.types import Array, Draft, Siblings, Step
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter
from outrider.engine.decoder import Decoder, signed
from outrider.engine.request import Request
from outrider.engine.trace import TopProbs, target_distribution, top
from outrider.verify import VERIFIERS, Verifier
from outrider.verify.batched import draw
from outrider.verify.reference import Number
from outrider_lab.traces import NO_TOKENS, Trace, TracedStep, TracedText, sampling


@dataclass(frozen=True, eq=False)
class Replay:
    """A step, computed again."""

    text: TracedText
    step: TracedStep
    nodes: tuple[ExplainedNode, ...]  # the draft's nodes, with distribution, noise and reason
    path: tuple[int, ...]  # the accepted nodes
    token: int  # drawn at the last of them
    written: tuple[int, ...]  # the tokens that the step added
    before: tuple[int, ...]  # the prompt and the text that the step continues
    differs: tuple[str, ...]  # what is not as recorded, in words; () if all is equal

    @property
    def same(self) -> bool:
        """Draft, verdict and tokens are as recorded, and so is every probability that was recorded."""
        return not self.differs


class _Recorded(BaseDrafter):
    """Proposes the draft of a recorded step."""

    def __init__(self, step: TracedStep, drafter: Drafter | None) -> None:
        """Propose one step.

        Args:
            drafter: Knows the distributions that the draft was drawn from. None where they are not needed.
        """
        self.step, self.drafter = step, drafter
        self.taps = () if drafter is None else drafter.taps

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Array) -> None:
        if self.drafter is not None:
            self.drafter.start(slot, tokens, first, features)

    def propose(self, context: DraftContext) -> Draft:
        """Raises ValueError if the drafter proposes another draft now."""
        recorded = Draft(np.array([self.step.tokens]), np.array([self.step.parents]))
        if self.drafter is None:
            return recorded
        draft = self.drafter.propose(context)
        same = draft.host == recorded.host and draft.siblings.name == self.step.siblings
        if not same or draft.probs is None:
            raise ValueError(
                "the verifier needs the distributions that the draft tokens were drawn from, and "
                f"{type(self.drafter).__name__} proposes another tree now; load the model with the trace's "
                "speculative_config, or trace with verifier='match'"
            )
        return replace(draft, notes=())

    def release(self, slot: int) -> None:
        if self.drafter is not None:
            self.drafter.release(slot)


def beside(decoder: Decoder, drafter: Drafter, controller: Controller, **other: Any) -> Decoder:
    """Another decoder of the same target, with a cache of its own. Only one of the two may run at a time.

    other: what else is not the same, as of `Decoder`."""
    same = {"verifier": decoder.verifier.name, "num_slots": decoder.cache.num_slots, "max_length": decoder.max_length}
    same |= {"end_ids": decoder.end_ids, "tokenizer": decoder.tokens.tokenizer}
    return Decoder(decoder.target, drafter, controller=controller, **(same | other))


def replay(
    trace: Trace, decoder: Decoder, step: int, request: int | None = None, mask: TokenMask | None = None
) -> Replay:
    """Compute step `step` of a request again.

    Args:
        decoder: With the model of the trace, as in `LLM(...).decoder`. Nothing may run in it. Its verifier and draft lengths do
            not matter. Its drafter matters only if the verifier needs the draft's distribution.
        request: Its id. None for the only one.
        mask: The grammar of the request, if it had one.

    Raises ValueError for a step that does not exist, a trace without tokens, another model and a missing grammar. Also for a
    drafter that proposes another tree now.
    """
    text = trace.text(request)
    recorded = text.step(step)
    _check(trace, text, decoder, mask)
    if recorded.tokens is None or recorded.budget is None:
        raise ValueError(f"{trace.path}: {NO_TOKENS}")
    validate(Draft(np.array([recorded.tokens]), np.array([recorded.parents])), decoder.target.vocab_size)
    verifier = VERIFIERS[trace.header.verifier]
    drawn = verifier.needs_probs and recorded.drafted and recorded.siblings != Siblings.POINT.name
    drafter = _Recorded(recorded, decoder.drafter if drawn else None)
    again = beside(decoder, drafter, Fixed(**recorded.budget), verifier=verifier.name, num_slots=1)
    row = again.start(request_of(text, mask))
    try:
        row.advance([t for earlier in text.steps[:step] for t in earlier.written], step)
        before = tuple(row.tokens)
        if recorded.tokens[0] != before[-1]:
            raise ValueError(
                f"the draft of step {step} begins at token {recorded.tokens[0]}, the text ends in {before[-1]}"
            )
        done = next(again.run([row]))
        target = target_distribution(done, 0, row)
        nodes = explain(verifier, target, done, signed(text.request.seed), row.steps - 1)
        path, token = tuple(node.node for node in nodes if node.accepted), int(done.verdict.token[0])
        written = tuple(done.commits[0].tokens)
        differs = _differences(recorded, done, path, [node.likely for node in nodes])
        return Replay(text, recorded, tuple(nodes), path, token, written, before, tuple(differs))
    finally:
        again.release(row.slot)


def _check(trace: Trace, text: TracedText, decoder: Decoder, mask: TokenMask | None) -> None:
    """Raise ValueError for what cannot be computed."""
    header = trace.header
    if text.request.prompt is None:
        raise ValueError(f"{trace.path}: {NO_TOKENS}")
    if header.vocab_size != decoder.target.vocab_size:
        raise ValueError(
            f"{trace.path} was made with {header.model}, of {header.vocab_size} tokens; this model has "
            f"{decoder.target.vocab_size}. Load {header.model}"
        )
    if header.verifier not in VERIFIERS:
        raise ValueError(f"{trace.path} names the verifier {header.verifier!r}; there are {', '.join(VERIFIERS)}")
    if text.request.grammar and mask is None:
        raise ValueError(
            f"request {text.id} had a grammar, which a trace does not contain; give it: replay(..., mask=...)"
        )


def request_of(text: TracedText, mask: TokenMask | None = None) -> Request:
    """The request of a traced text, as the loop takes it."""
    bad = tuple(tuple(word) for word in text.request.bad_words or ())
    params = sampling(text.request).with_(prompt_logprobs=None, logprobs=None)
    border = len(text.prompt) - text.request.continued
    prompt, continued = text.prompt[:border], tuple(text.prompt[border:])
    return Request(text.id, prompt, params, text.request.seed, bad, (), mask, continued=continued)


def _differences(recorded: TracedStep, done: Step, path: Sequence[int], likely: list[TopProbs]) -> list[str]:
    out, token, written = list[str](), int(done.verdict.token[0]), done.commits[0].tokens
    if [*path] != recorded.path:
        out.append(f"the accepted nodes are {[*path]}, recorded are {recorded.path}")
    if token != recorded.token:
        out.append(f"token {token} is drawn after them, recorded is {recorded.token}")
    if written != recorded.written and not out:
        out.append(f"{len(written)} tokens are written, recorded are {recorded.committed}")
    probs = done.draft.probs
    drafted = None if probs is None else [top(distribution) for distribution in probs[0]]
    for name, now, then in (("target", likely, recorded.target_probs), ("draft", drafted, recorded.draft_probs)):
        if now is None or then is None:
            continue
        wrong = [n for n, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
        if wrong:
            gap = max(_gap(now[n], then[n]) for n in wrong)
            out.append(f"the {name}'s probabilities differ at {len(wrong)} of {len(now)} nodes, by at most {gap:.2g}")
    return out


def _gap(one: TopProbs, other: TopProbs) -> float:
    a, b = dict(one), dict(other)
    return max((abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in a.keys() | b.keys()), default=0.0)


@dataclass(frozen=True)
class Coin:
    """It accepts if value < probability."""

    value: float  # uniform noise in (0, 1)
    probability: float

    @property
    def accepts(self) -> bool:
        return self.value < self.probability


@dataclass(frozen=True)
class Evidence:
    """What a verifier looked at when it judged a node: `coin` with coins, the other two without."""

    noise: float | None = None  # Gumbel noise of the node's token, None for greedy decoding
    rival: tuple[int, float, float | None] | None = (
        None  # (token, p, noise) of the token that the target drew instead, if any
    )
    coin: Coin | None = None  # None where the verifier needed no coin


@dataclass(frozen=True)
class ExplainedNode:
    """A node of the draft, and what the verifier did with it."""

    node: int  # its index in the draft
    parent: int
    depth: int
    token: int
    accepted: bool
    parent_accepted: bool
    p: float  # the target's probability of its token
    rank: int  # the token's place in the target's distribution, 1 is the most likely
    likely: TopProbs  # the most likely tokens after this node
    drawn: int | None  # the token that the target drew after it, None where it drew none
    evidence: Evidence | None  # None if the verifier did not judge the node
    explains_by: str | None  # see `Verifier`

    @property
    def judged(self) -> bool:
        return self.evidence is not None

    def why(self, show: Callable[[int], str] = str) -> str:
        """The reason in words.

        Args:
            show: How to write a token.
        """
        if self.node == 0:
            return "the last token of the text, where the draft begins"
        if self.evidence is None:
            sibling = self.parent_accepted
            return f"never judged: {'a sibling was accepted' if sibling else 'the token above it was rejected'}"
        if self.explains_by is None:
            return self._why_sample(self.evidence, show)
        return self._why_coin(self.evidence.coin, self.explains_by)

    def _why_coin(self, coin: Coin | None, limit: str) -> str:
        if coin is None or (self.accepted and not coin.accepts):
            return "accepted: a token below it was accepted"
        value, bound = f"its coin {coin.value:.3f}", f"{limit}, {coin.probability:.3f}"
        return f"accepted: {value} is below {bound}" if self.accepted else f"rejected: {value} is not below {bound}"

    def _why_sample(self, seen: Evidence, show: Callable[[int], str]) -> str:
        odds = _odds(self.p, seen.noise)
        if self.accepted:
            how = "it is the target's most likely token" if seen.noise is None else "the target drew it too"
            return f"accepted: {how} ({odds})"
        if seen.rival is None:
            return "rejected: a sibling has the same token, and the walk went there"
        token, p, noise = seen.rival
        rival = "nothing: no token is allowed" if token < 0 else show(token)
        if token >= 0 and noise is not None:
            rival += f" ({_odds(p, noise)})"
        if seen.noise is None:
            return f"rejected: the target's most likely token is {rival}"
        if self.p == 0:
            return f"rejected: the sampling parameters forbid it; the target drew {rival}"
        return f"rejected: the target drew {rival}; this one had {odds}"


def _odds(p: float, noise: float | None) -> str:
    return f"p {p:.3g}" if noise is None else f"p {p:.3g}, noise {noise:+.2f}"


def explain(verifier: Verifier, target: LogitsDistribution, step: Step, seed: int, number: int) -> list[ExplainedNode]:
    """Explain the nodes of a step of one sequence.

    Args:
        target: The distribution that the verifier was given.
        seed: Of the sequence, as int64.
        number: Of the step, which the noise is keyed by.
    """
    judged = _Judged(target, step.draft, Noise(np.array([seed]), np.array([number])), np.array(step.positions))
    path = step.verdict.host[0][0]
    drawn = dict(zip(path, [*(judged.tokens[n] for n in path[1:]), int(step.verdict.token[0])], strict=True))
    evidence = _by_coin(verifier, judged, path) if verifier.explains_by else _by_sample(judged, drawn)
    return [
        ExplainedNode(
            node=n,
            parent=parent,
            depth=judged.depth[n],
            token=token,
            accepted=n in drawn,
            parent_accepted=n == 0 or parent in drawn,
            p=judged.p(parent)[token] if n else 1.0,
            rank=1 + sum(x > judged.p(parent)[token] for x in judged.p(parent)) if n else 1,
            likely=top(target.probs(np.array([n]))[0]),
            drawn=drawn.get(n),
            evidence=evidence.get(n),
            explains_by=verifier.explains_by,
        )
        for n, (token, parent) in enumerate(zip(judged.tokens, judged.parents, strict=True))
    ]


class _Judged:
    """The draft of one sequence as lists, and the distributions at its nodes."""

    def __init__(self, target: LogitsDistribution, draft: Draft, noise: Noise, position: Array) -> None:
        self.target, self.draft, self.noise, self.position = target, draft, noise, position
        self.tokens, self.parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        self.depth = levels(self.parents)
        self._probs: dict[int, list[float]] = {}

    def p(self, node: int) -> list[float]:
        """The target's distribution after a node."""
        if node not in self._probs:
            self._probs[node] = self.target.probs(np.array([node]))[0].tolist()
        return self._probs[node]

    def q(self, node: int) -> list[float]:
        """The distribution that the children of a node were drawn from. A chosen child has probability 1."""
        if self.draft.probs is not None:
            return self.draft.probs[0, node].tolist()
        child = next((n for n, up in enumerate(self.parents) if up == node), 0)
        return [float(token == self.tokens[child]) for token in range(len(self.p(0)))]


def _by_sample(judged: _Judged, drawn: dict[int, int]) -> dict[int, Evidence]:
    """For a verifier that compares with the target's own sample: every child of an accepted node was judged."""
    greedy = judged.target.warp.all_greedy

    def gumbel(node: int, token: int) -> float | None:
        at = judged.position + judged.depth[node] - 1
        return None if greedy else float(judged.noise.gumbel(Stream.TOKEN, at, token + 1)[0, token])

    evidence = dict[int, Evidence]()
    for n, parent in enumerate(judged.parents):
        if parent not in drawn:
            continue
        token, rival = drawn[parent], None
        if token < 0:
            rival = (token, 0.0, None)
        elif token != judged.tokens[n]:
            rival = (token, judged.p(parent)[token], gumbel(n, token))
        evidence[n] = Evidence(gumbel(n, judged.tokens[n]), rival)
    return evidence


def _by_coin(verifier: Verifier, judged: _Judged, path: list[int]) -> dict[int, Evidence]:
    """For a verifier with coins: the coins that its reference reads from the same noise."""
    choices = _NoiseChoices(judged.noise, judged.position)
    siblings = judged.draft.siblings if judged.draft.probs is not None else Siblings.POINT
    verifier.reference(judged.tokens, judged.parents, judged.p, judged.q, choices, siblings)
    return {n: Evidence(coin=choices.coins.get(n)) for n in {*choices.coins, *path[1:]}}


@dataclass
class _NoiseChoices:
    """Choices for a reference, from the noise that the batched forms read. It remembers the coins."""

    noise: Noise
    position: Array
    coins: dict[int, Coin] = field(default_factory=dict)

    def coin(self, part: Number, whole: Number, *, depth: int, node: int) -> bool:
        u = float(self.noise.uniform(Stream.ACCEPT, self.position + depth - 1, node + 1)[0, node])
        self.coins[node] = Coin(u, 1.0 if whole <= part else float(part / whole))
        return u * whole < part

    def token(self, probs: Sequence[Number], *, depth: int) -> int:
        weights = np.array([[float(x) for x in probs]])
        return int(draw(weights, self.noise, Stream.RESIDUAL, self.position + depth - 1)[0])
