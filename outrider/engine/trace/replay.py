"""Computes a recorded step again, with the loop's own parts, and says why each draft token was accepted or rejected.

The trace has what cannot be computed: the text before the step, the draft and the seed. The replay computes the rest: the
target's distributions, the noise, the verdict and the tokens. With a batch-invariant model all is equal bit for bit. The replay
names what is not. Verifiers that divide by the draft's distribution need it. Then the drafter is asked again, and it must
propose the tree that was recorded.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.noise import Noise
from outrider.core.sampling import LogitsDistribution, LogitsWarper, TokenMask
from outrider.core.types import Budget, Draft, Siblings, Verdict
from outrider.drafters.base import DraftContext
from outrider.engine.decoder import Decoder, signed
from outrider.engine.request import Request, Sequence
from outrider.engine.trace.explain import ExplainedNode, explain
from outrider.engine.trace.reader import Trace, TracedText
from outrider.engine.trace.recorder import target_probs, top
from outrider.engine.trace.records import NO_TOKENS, StepRecord
from outrider.models.nodes import Nodes
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


def replay(
    trace: Trace, decoder: Decoder, step: int, request: int | None = None, mask: TokenMask | None = None
) -> Replay:
    """Compute step `step` of a request again, in a free slot of `decoder`. request: its id; None for the only one.

    decoder: with the model of the trace, as in `LLM(...).decoder`. Its verifier and draft lengths do not matter. Its drafter
    matters only if the verifier needs the draft's distribution. mask: the grammar of the request, if it had one.

    Raises ValueError for a step that does not exist, a trace without tokens, another model, a missing grammar, or a drafter
    that proposes another tree now. Raises IndexError if no slot of the decoder is free.
    """
    text = trace.text(request)
    recorded = text.step(step)
    _check(trace, text, decoder, mask)
    asked = _asked(text, mask)
    row = decoder.start(asked)
    try:
        row.advance([t for earlier in text.steps[:step] for t in earlier.written], step)
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
            f"request {text.id} had a grammar, which a trace does not contain; give it: replay(..., mask=...)"
        )


def _asked(text: TracedText, mask: TokenMask | None) -> Request:
    """The request, as the loop takes it."""
    bad = tuple(tuple(word) for word in text.request.bad_words or ())
    params = text.request.sampling.with_(prompt_logprobs=None, logprobs=None)
    asked = len(text.prompt) - text.request.continued
    continued = tuple(text.prompt[asked:])
    return Request(text.id, text.prompt[:asked], params, text.request.seed, bad, (), mask, continued=continued)


def _computed(trace: Trace, text: TracedText, step: StepRecord, decoder: Decoder, row: Sequence) -> Replay:
    assert step.tokens is not None
    assert step.parents is not None
    assert step.budget is not None
    device, verifier = decoder.target.device, VERIFIERS[trace.header.verifier]
    draft = Draft(torch.tensor([step.tokens]), torch.tensor([step.parents]))
    warp = LogitsWarper([row.state], device)
    seed = torch.tensor([signed(text.request.seed)], device=device)
    noise = Noise(seed, torch.tensor([row.steps], device=device))
    before = list(row.tokens)
    if step.tokens[0] != before[-1]:
        raise ValueError(
            f"the draft of step {step.step} begins at token {step.tokens[0]}, the text ends in {before[-1]}"
        )
    if verifier.needs_probs and step.drafted and step.siblings != Siblings.POINT.name:
        context = DraftContext(
            slots=[row.slot],
            tokens=[row.tokens],
            budgets=[Budget(*step.budget)],
            warp=warp,
            noise=noise,
            stream=verifier.draft_stream,
            needs_probs=True,
            prompt_lengths=[len(row.prompt)],
            predictions=[()],
            cache=decoder.cache,
        )
        draft = _proposed(decoder, context, draft, step)
    draft = draft.to(device)
    out = decoder.target.forward(Nodes(draft.tokens, decoder.cache, [row.slot], draft.parents))
    position = torch.tensor([len(before)], device=device)
    target = LogitsDistribution(out.logits, draft, warp)
    verdict = verifier(target, draft, noise, position)
    path = [n for n in verdict.path[0].tolist() if n >= 0]
    likely = target_probs(target, draft.nodes)
    nodes = explain(verifier, target, draft, noise, position, verdict, likely)
    written = _written(row, [*(step.tokens[n] for n in path[1:]), int(verdict.token[0])])
    differs = _differences(step, draft, verdict, path, written, likely)
    return Replay(
        text, step, tuple(nodes), tuple(path), int(verdict.token[0]), tuple(written), tuple(before), tuple(differs)
    )


def _proposed(decoder: Decoder, context: DraftContext, recorded: Draft, step: StepRecord) -> Draft:
    """The draft with its probs, which only the drafter knows. Raises ValueError if the drafter proposes another draft now."""
    kinds = {kind.name: kind for kind in Siblings}
    draft = decoder.drafter.propose(context)
    same = torch.equal(draft.tokens.cpu(), recorded.tokens) and torch.equal(draft.parents.cpu(), recorded.parents)
    if not same or draft.siblings is not kinds.get(str(step.siblings)) or draft.probs is None:
        raise ValueError(
            "the verifier needs the distributions that the draft tokens were drawn from, and "
            f"{type(decoder.drafter).__name__} proposes another tree now; load the model with the trace's speculative_config, "
            "or trace with verifier='match'"
        )
    return replace(draft, notes=())


def _written(row: Sequence, new: abc.Sequence[int]) -> list[int]:
    """The new tokens, up to the first that ends the text."""
    out = list[int]()
    for token in new:
        assert row.checker is not None
        end = row.checker.push(token)
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
    known = (("target", likely, step.target_law), ("draft", _tops(draft.probs), step.draft_law))
    for name, now, then in known:
        if now is None or then is None:
            continue
        wrong = [n for n, (a, b) in enumerate(zip(now, then, strict=True)) if a != b]
        if wrong:
            gap = max(_gap(now[n], then[n]) for n in wrong)
            out.append(f"the {name}'s probabilities differ at {len(wrong)} of {len(now)} nodes, by at most {gap:.2g}")
    return out


def _tops(probs: Tensor | None) -> list[list[tuple[int, float]]] | None:
    """The most likely tokens at each node of a draft of one sequence; probs: float32 [1, node, vocab]."""
    return None if probs is None else [top(distribution) for distribution in probs[0]]


def _gap(one: abc.Sequence[tuple[int, float]], other: abc.Sequence[tuple[int, float]]) -> float:
    a, b = dict(one), dict(other)
    return max((abs(a.get(t, 0.0) - b.get(t, 0.0)) for t in a.keys() | b.keys()), default=0.0)
