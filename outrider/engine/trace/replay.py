"""Computes a recorded step again, with the loop itself, and says why each draft token was accepted or rejected.

The trace has what cannot be computed: the text before the step, the draft and the seed. The replay computes the rest: the
target's distributions, the noise, the verdict and the tokens. With a batch-invariant model all is equal bit for bit. The replay
names what is not. Verifiers that divide by the draft's distribution need it. Then the drafter is asked again, and it must
propose the tree that was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.control import Fixed
from outrider.core.sampling import TokenMask
from outrider.core.types import Draft, Siblings, Step
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter
from outrider.engine.decoder import Decoder, signed
from outrider.engine.request import Request
from outrider.engine.trace.explain import ExplainedNode, explain
from outrider.engine.trace.reader import Trace, TracedText
from outrider.engine.trace.recorder import target_distribution
from outrider.engine.trace.records import NO_TOKENS, StepRecord, TopProbs, top
from outrider.verify import VERIFIERS


@dataclass(frozen=True, eq=False)
class Replay:
    """A step, computed again.

    nodes: the draft's nodes, with distribution, noise and reason. path: the accepted nodes. token: drawn at the last of them.
    written: the tokens that the step added. before: the prompt and the text that the step continues. differs: what is not as
    recorded, in words; () if all is equal.
    """

    text: TracedText
    step: StepRecord
    nodes: tuple[ExplainedNode, ...]
    path: tuple[int, ...]
    token: int
    written: tuple[int, ...]
    before: tuple[int, ...]
    differs: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Draft, verdict and tokens are as recorded, and so is every probability that was recorded."""
        return not self.differs


class _Recorded(BaseDrafter):
    """Proposes the draft of a recorded step. drafter: knows the distributions that the draft was drawn from; None: not needed."""

    def __init__(self, step: StepRecord, drafter: Drafter | None) -> None:
        self.step, self.drafter = step, drafter
        self.taps = () if drafter is None else drafter.taps

    def start(self, slot: int, tokens: Sequence[int], first: int, features: Tensor) -> None:
        if self.drafter is not None:
            self.drafter.start(slot, tokens, first, features)

    def propose(self, context: DraftContext) -> Draft:
        """Raises ValueError if the drafter proposes another draft now."""
        recorded = Draft(torch.tensor([self.step.tokens]), torch.tensor([self.step.parents]))
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


def replay(
    trace: Trace, decoder: Decoder, step: int, request: int | None = None, mask: TokenMask | None = None
) -> Replay:
    """Compute step `step` of a request again. request: its id; None for the only one.

    decoder: with the model of the trace, as in `LLM(...).decoder`; nothing may run in it. Its verifier and draft lengths do not
    matter. Its drafter matters only if the verifier needs the draft's distribution. mask: the grammar of the request, if it had
    one.

    Raises ValueError for a step that does not exist, a trace without tokens, another model and a missing grammar. Also for a
    drafter that proposes another tree now.
    """
    text = trace.text(request)
    recorded = text.step(step)
    _check(trace, text, decoder, mask)
    assert recorded.tokens is not None
    assert recorded.budget is not None
    verifier = VERIFIERS[trace.header.verifier]
    drawn = verifier.needs_probs and recorded.drafted and recorded.siblings != Siblings.POINT.name
    again = Decoder(
        decoder.target,
        _Recorded(recorded, decoder.drafter if drawn else None),
        verifier.name,
        Fixed(*recorded.budget),
        rows=1,
        max_length=decoder.max_length,
        end_ids=decoder.end_ids,
        tokenizer=decoder.tokenizer,
    )
    row = again.start(_request(text, mask))
    try:
        row.advance([t for earlier in text.steps[:step] for t in earlier.written], step)
        before = tuple(row.tokens)
        if recorded.tokens[0] != before[-1]:
            raise ValueError(
                f"the draft of step {step} begins at token {recorded.tokens[0]}, the text ends in {before[-1]}"
            )
        while row in again.waiting:
            again.prefill(row)
        done = again.round([row])
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


def _request(text: TracedText, mask: TokenMask | None) -> Request:
    """The request, as the loop takes it."""
    bad = tuple(tuple(word) for word in text.request.bad_words or ())
    params = text.request.sampling.with_(prompt_logprobs=None, logprobs=None)
    border = len(text.prompt) - text.request.continued
    prompt, continued = text.prompt[:border], tuple(text.prompt[border:])
    return Request(text.id, prompt, params, text.request.seed, bad, (), mask, continued=continued)


def _differences(recorded: StepRecord, done: Step, path: Sequence[int], likely: list[TopProbs]) -> list[str]:
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
