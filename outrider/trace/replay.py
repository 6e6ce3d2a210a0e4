"""Computes a recorded step again, by the loop's own parts, and says why each guess was kept or refused.

What cannot be computed is in the trace: the text before the step, the draft, the seed. What can be is computed here: the
target's laws, the noise, the verdict, the tokens. Under a model whose rows do not depend on their neighbours it is all equal
bit for bit; where something is not, the replay says what. Verifiers that divide by the draft's law need it, and then the
drafter is asked again; what it proposes must be the tree that was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.noise import Noise
from outrider.core.sampling import LogitsDistribution, LogitsWarper, TokenMask
from outrider.core.types import Budget, Draft, Siblings, Verdict
from outrider.decode import Decoder, Row, _signed
from outrider.decode import Request as Asked
from outrider.drafters.base import DraftContext
from outrider.models.nodes import Nodes
from outrider.trace.explain import ExplainedNode, explain
from outrider.trace.reader import Trace, TracedText
from outrider.trace.recorder import target_probs, top
from outrider.trace.records import NO_TOKENS, StepRecord
from outrider.verify import VERIFIERS


@dataclass(frozen=True, eq=False)
class Replay:
    """A step, computed again. written: the tokens it added. differs: what is not as recorded, in words; () if all is.

    nodes: the draft's, with law, noise and reason. before: prompt and text that the step continues.
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


def replay(
    trace: Trace, decoder: Decoder, step: int, request: int | None = None, mask: TokenMask | None = None
) -> Replay:
    """Step `step` of a request (the only one, if none is named), computed again in a free row of `decoder`.

    decoder: of the model that the trace was made with, as in `LLM(...).decoder`; its verifier and lengths do not matter, its
    drafter only where the verifier needs the draft's law. mask: the grammar that the request was held to, if it was.

    Raises ValueError for a step that is not there, a trace without tokens, another model, a missing grammar, and a drafter
    that proposes something else now; IndexError when no row of the decoder is free.
    """
    text = trace.text(request)
    recorded = text.step(step)
    _check(trace, text, decoder, mask)
    asked = _asked(text, mask)
    row = decoder.admit(asked)
    try:
        for token in (t for earlier in text.steps[:step] for t in earlier.written):
            row.ending.push(token)
            row.tokens.append(token)
        row.steps = recorded.step
        while row in decoder.waiting:
            decoder.prefill(row)
        return _computed(trace, text, recorded, decoder, row)
    finally:
        decoder.release(row.slot)


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
            f"request {text.id} was held to a grammar, which a trace does not hold; give it: replay(..., mask=...)"
        )


def _asked(text: TracedText, mask: TokenMask | None) -> Asked:
    """The request, as the loop takes it."""
    bad = tuple(tuple(word) for word in text.request.bad_words or ())
    params = text.request.sampling.with_(prompt_logprobs=None, logprobs=None)
    return Asked(text.id, text.prompt, params, text.request.seed, bad, (), mask)


def _computed(trace: Trace, text: TracedText, step: StepRecord, decoder: Decoder, row: Row) -> Replay:
    assert step.tokens is not None
    assert step.parents is not None
    assert step.budget is not None
    device, verifier = decoder.target.device, VERIFIERS[trace.header.verifier]
    draft = Draft(torch.tensor([step.tokens]), torch.tensor([step.parents]))
    warp = LogitsWarper([row.history], device)
    seed = torch.tensor([_signed(text.request.seed)], device=device)
    noise = Noise(seed, torch.tensor([row.steps], device=device))
    before = list(row.tokens)
    if step.tokens[0] != before[-1]:
        raise ValueError(
            f"the draft of step {step.step} begins at token {step.tokens[0]}, the text ends in {before[-1]}"
        )
    if verifier.needs_probs and step.drafted and step.siblings != Siblings.POINT.name:
        batch = DraftContext(
            slots=[row.slot],
            tokens=[row.tokens],
            budgets=[Budget(*step.budget)],
            warp=warp,
            noise=noise,
            stream=verifier.draft_stream,
            needs_probs=True,
            prompt_lengths=[len(text.prompt)],
            predictions=[()],
            cache=decoder.cache,
        )
        draft = _proposed(decoder, batch, draft, step)
    draft = draft.to(device)
    out = decoder.target.forward(Nodes(draft.tokens, decoder.cache, [row.slot], draft.parents))
    position = torch.tensor([len(before)], device=device)
    laws = LogitsDistribution(out.logits, draft, warp)
    verdict = verifier(laws, draft, noise, position)
    path = [n for n in verdict.path[0].tolist() if n >= 0]
    likely = target_probs(laws, draft.nodes)
    nodes = explain(verifier, laws, draft, noise, position, verdict, likely)
    written = _written(row, [*(step.tokens[n] for n in path[1:]), int(verdict.token[0])])
    differs = _differences(step, draft, verdict, path, written, likely)
    return Replay(
        text, step, tuple(nodes), tuple(path), int(verdict.token[0]), tuple(written), tuple(before), tuple(differs)
    )


def _proposed(decoder: Decoder, batch: DraftContext, recorded: Draft, step: StepRecord) -> Draft:
    """The draft with the laws it was drawn from, which only the drafter knows. Raises ValueError if it is another now."""
    kinds = {kind.name: kind for kind in Siblings}
    draft = decoder.drafter.propose(batch)
    same = torch.equal(draft.tokens.cpu(), recorded.tokens) and torch.equal(draft.parents.cpu(), recorded.parents)
    if not same or draft.siblings is not kinds.get(str(step.siblings)) or draft.probs is None:
        raise ValueError(
            f"the verifier needs the law that the guesses were drawn from, and {type(decoder.drafter).__name__} proposes "
            "another tree now; load the model with the trace's speculative_config, or trace with verifier='match'"
        )
    return replace(draft, notes=())


def _written(row: Row, new: Sequence[int]) -> list[int]:
    """The new tokens, up to the first that ends the text."""
    out = list[int]()
    for token in new:
        end = row.ending.push(token)
        if token >= 0:
            out.append(token)
        if end is not None:
            break
    return out


def _differences(
    step: StepRecord,
    draft: Draft,
    verdict: Verdict,
    path: list[int],
    written: list[int],
    likely: list[list[tuple[int, float]]],
) -> list[str]:
    out = list[str]()
    token = int(verdict.token[0])
    if path != step.path:
        out.append(f"the accepted nodes are {path}, recorded are {step.path}")
    if token != step.token:
        out.append(f"token {token} is drawn after them, recorded is {step.token}")
    if written != step.written and not out:
        out.append(f"{len(written)} tokens are written, recorded are {step.committed}")
    known = (("target", likely, step.target_law), ("draft", _laws(draft.probs), step.draft_law))
    for name, now, then in known:
        if now is None or then is None:
            continue
        wrong = [n for n, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
        if wrong:
            gap = max(_gap(now[n], then[n]) for n in wrong)
            out.append(f"the {name}'s law differs at {len(wrong)} of {len(now)} nodes, by {gap:.2g} at most")
    return out


def _laws(probs: Tensor | None) -> list[list[tuple[int, float]]] | None:
    return None if probs is None else [top(law) for law in probs[0]]


def _gap(one: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> float:
    a, b = dict(one), dict(other)
    return max((abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in a.keys() | b.keys()), default=0.0)
