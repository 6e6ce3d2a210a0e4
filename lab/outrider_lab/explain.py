"""The explainer: a run as one interactive page that needs no network.

From a trace to the records of the page, see `outrider_lab.pages.explained`; with the model, also what the trace does not hold.
"""

from __future__ import annotations

import math
from collections import abc
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from outrider.control import CostModel
from outrider.core.noise import Noise
from outrider.core.sampling import LogitsDistribution, LogitsWarper
from outrider.core.types import Budget, Draft
from outrider.drafters import ModelDrafter
from outrider.drafters.base import DraftContext
from outrider.drafters.shapes import BY_RANK, Shape, optimal_shape
from outrider.engine.calibrate import all_stored
from outrider.engine.decoder import Decoder, signed
from outrider.engine.llm import LLM
from outrider.engine.memory import per_token
from outrider.engine.request import Sequence
from outrider.engine.trace import Detail
from outrider.models.base import LanguageModel
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes
from outrider.verify import VERIFIERS
from outrider_lab.pages.explained import (
    ComparedDrafts,
    CostCurve,
    ExplainedRequest,
    ExplainedRun,
    ExplainedStep,
    ModelSize,
    TreeDraft,
    curve,
)
from outrider_lab.replay import replay, request_of
from outrider_lab.traces import Trace, TracedStep, TracedText, sampling

MOST_STEPS = 400  # of all requests, that are computed again
COMPARED = 96  # positions of the first request at which drafts are compared
NODES, DEPTH, WIDTH = 16, 8, 4  # of the trees that are compared; the chain has as many tokens

# Operations a second of 16-bit arithmetic without sparsity, and bytes a second of memory, by the data sheets: A100 SXM 80 GB
# (2021), H100 SXM (2023), Ada architecture paper 2.01 (2023).
ACCELERATORS = {
    "NVIDIA A100 80 GB": (312e12, 2.039e12),
    "NVIDIA H100 SXM": (989e12, 3.35e12),
    "NVIDIA RTX 4090": (165e12, 1.008e12),
}


def explained(trace: Trace, tokenizer: Any | None = None) -> ExplainedRun:
    """What the page shows of a trace, without the model.

    Args:
        tokenizer: For the texts of tokens. None shows numbers.
    """
    header, notes = trace.header, list[str]()
    if trace.problem is not None:
        notes.append(f"The file is damaged, and everything before the damage is shown: {trace.problem}.")
    if header.detail is Detail.COUNTS:
        notes.append("This trace has counts only. Tokens need a trace with --trace-detail tokens.")
    elif tokenizer is None:
        notes.append("The model's tokenizer was not found, so tokens are shown as numbers.")
    requests = [_request(text, header.detail) for text in trace.texts.values()]
    steps = [s for text in trace.texts.values() for s in text.steps]
    plain = [sum(_seconds(s)) for s in steps if not s.drafted and s.rows == 1]
    return ExplainedRun(
        title=trace.path.name,
        detail=header.detail.value,
        **_same(header, "model verifier guarantee date machine"),
        drafter=", ".join(header.drafters) or header.method,
        requests=requests,
        texts={} if tokenizer is None else _texts(requests, tokenizer),
        plain_seconds=median(plain) if len(plain) > 2 else None,
        costs=[*machine_curves(), *rooflines()],
        notes=notes,
    )


def _same(record: Any, names: str) -> dict[str, Any]:
    """Fields of a line of the trace that the page has under the same names."""
    return {name: getattr(record, name) for name in names.split()}


def with_model(run: ExplainedRun, trace: Trace, llm: LLM) -> ExplainedRun:
    """The run with what the model can tell: every probability, the draft model's too, and drafts of several shapes.

    At most `MOST_STEPS` steps are computed again.

    Args:
        llm: With the model of the trace, and with its drafter for the draft's part.
    """
    model, left, notes = _draft_model(llm), MOST_STEPS, list(run.notes)
    requests = list[ExplainedRequest]()
    for request in run.requests:
        text, steps = trace.text(request.id), request.steps
        if text.request.grammar:
            notes.append(f"Request {request.id} had a grammar, which a trace does not hold; it was not computed again.")
        elif request.prompt is not None:
            some = steps[:left]
            steps = [*(_computed(trace, text, step, llm.decoder, model) for step in some), *steps[left:]]
            left -= len(some)
        requests.append(replace(request, steps=steps))
    if left <= 0 and sum(len(r.steps) for r in run.requests) > MOST_STEPS:
        notes.append(f"All probabilities are known for the first {MOST_STEPS} steps.")
    compared = list[ComparedDrafts]()
    if model is None:
        notes.append(
            "This drafter has no draft model with the target's tokens, so drafts of other shapes are not compared."
        )
    elif requests and requests[0].prompt is not None and not trace.texts[requests[0].id].request.grammar:
        compared = compare(trace.texts[requests[0].id], llm.decoder, model)
    texts = run.texts if llm.tokenizer is None else _texts(requests, llm.tokenizer, compared)
    size = model_size(llm.loaded)
    return replace(run, requests=requests, compared=compared, size=size, notes=notes, texts=texts)


def machine_curves() -> list[CostCurve]:
    """The curves that were measured on this machine: of each target the one with the most sizes."""
    best = dict[str, CostModel]()
    for model in sorted(all_stored(), key=lambda model: len(model.target)):
        best[model.key["target"].split(" ")[0]] = model
    return [curve(model, f"This machine: {target}", "measured here") for target, model in best.items()]


def rooflines() -> list[CostCurve]:
    """Curves from data sheets: the best that the hardware allows."""
    why = "a bound from the data sheet, 16-bit weights; measure your own with outrider doctor MODEL"
    # Two bytes and two operations for each weight and row: arithmetic takes as long as reading at half / bandwidth rows.
    return [CostCurve(name, why, balance=half / bandwidth) for name, (half, bandwidth) in ACCELERATORS.items()]


def model_size(loaded: Loaded) -> ModelSize | None:
    """What attention and weights of a model cost to read; None if its configuration does not say."""
    config = getattr(loaded.config, "text_config", loaded.config)
    heads, layers = getattr(config, "num_attention_heads", None), getattr(config, "num_hidden_layers", None)
    if not heads or not layers:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    values = layers * 2 * kv_heads * dim
    return ModelSize(
        loaded.name, layers, heads, kv_heads, dim, per_token(loaded.model) / values, loaded.model.weight_bytes
    )


def compare(text: TracedText, decoder: Decoder, model: LanguageModel) -> list[ComparedDrafts]:
    """What a draft model proposes along a text: a chain, the tree that is best for usual acceptance by rank, and the likeliest
    nodes, with `NODES` draft tokens each. The first n tokens of each are its draft for a budget of n."""
    output, prompt, room = text.tokens, text.prompt, text.request.prompt_tokens + text.output_tokens + NODES + 1
    free, fixed = (
        ModelDrafter(model, 1, min(room, model.max_length), shape=shape)
        for shape in (None, lambda budget: optimal_shape(budget, BY_RANK))
    )
    tree = Budget(DEPTH, WIDTH, NODES)
    compared = list[ComparedDrafts]()
    for at in range(min(len(output) - 1, COMPARED)):
        before = [*prompt, *output[:at]]
        if len(before) + NODES > model.max_length:
            break
        chain, shaped, best = (
            _drafted(text, before, decoder, drafter, budget)
            for drafter, budget in ((free, Budget(NODES)), (fixed, tree), (free, tree))
        )
        compared.append(ComparedDrafts(len(before), output[at : at + NODES], chain, shaped, best))
    return compared


def _drafted(text: TracedText, before: list[int], decoder: Decoder, drafter: ModelDrafter, budget: Budget) -> TreeDraft:
    """A draft after some tokens, with the noise that the target will use. Nodes are in the order in which a budget keeps them."""
    row = _row(text, before, decoder)
    try:
        warp = LogitsWarper([row.state])
        noise = Noise(np.array([signed(text.request.seed)]), np.array([0]))
        stream = VERIFIERS["match"].draft_stream
        draft = drafter.propose(
            DraftContext([0], [before], [budget], warp, noise, stream, False, [len(text.prompt)], [()])
        )
    finally:
        decoder.release(row.slot)
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    order = list(range(len(tokens)))
    if drafter.shape is not None:
        order = [0, *_insertion(drafter.shape(budget), tokens, parents)]
    elif draft.confidence is not None:
        likely = draft.confidence[0].tolist()
        order = [0, *sorted(order[1:], key=lambda n: (-likely[n], n))]
    new = {old: n for n, old in enumerate(order)}
    return TreeDraft([tokens[n] for n in order], [-1, *(new[parents[n]] for n in order[1:])])


def _insertion(shape: Shape, tokens: list[int], parents: list[int]) -> list[int]:
    """The nodes of a draft in the order in which `optimal_shape` added them to the shape: the most valuable first."""
    role, seen = {0: 0}, dict[int, int]()
    for n in range(1, len(tokens)):
        rank = seen.get(parents[n], 0)
        seen[parents[n]] = rank + 1
        role[n] = shape.children[role[parents[n]], rank]
    return sorted(range(1, len(tokens)), key=role.__getitem__)


def _row(text: TracedText, before: list[int], decoder: Decoder) -> Sequence:
    """A sequence of the request that stands after `before`, in a slot; nothing is computed for it."""
    row = decoder.start(request_of(text))
    row.advance(before[len(text.prompt) :], 0)
    return row


def _draft_model(llm: LLM) -> LanguageModel | None:
    """The draft model, if there is one that reads and writes the target's tokens."""
    for drafter in llm.drafters.values():
        if type(drafter) is ModelDrafter and drafter.levels.subset is None:
            model = drafter.levels.model
            return model if model.vocab_size == llm.decoder.target.vocab_size else None
    return None


def _request(text: TracedText, detail: Detail) -> ExplainedRequest:
    asked = text.request
    return ExplainedRequest(
        id=text.id,
        seed=str(asked.seed),
        temperature=sampling(asked).temperature,
        steps=[_step(step) for step in text.steps],
        prompt=asked.prompt,
    )


def _seconds(step: TracedStep) -> tuple[float, float, float, float]:
    of = step.seconds
    return of["draft"], of["target"], of["verify"], of["commit"]


def _step(step: TracedStep) -> ExplainedStep:
    """The step as it was recorded. Probabilities are known of tokens among the most likely ones."""
    probs = step.target_probs
    return ExplainedStep(
        **_same(step, "step position drafted depth accepted refused committed tokens parents path token note"),
        seconds=_seconds(step),
        confidence=None if step.confidence is None else [_finite(x) for x in step.confidence],
        likely=None if probs is None else [[(t, _finite(p)) for t, p in tokens] for tokens in probs],
    )


def _finite(x: float) -> float:
    return x if math.isfinite(x) else 0.0


def _computed(
    trace: Trace, text: TracedText, step: ExplainedStep, decoder: Decoder, model: LanguageModel | None
) -> ExplainedStep:
    """The step with every probability, from the target and from the draft model."""
    again = replay(trace, decoder, step.step, text.id)
    q = ranks = None
    if model is not None and step.tokens is not None and step.parents is not None:
        q, ranks = _draft_probs(text, list(again.before), step.tokens, step.parents, decoder, model)
    return replace(
        step,
        p=[node.p for node in again.nodes],
        rank=[node.rank for node in again.nodes],
        likely=[[(t, p) for t, p in node.likely] for node in again.nodes],
        q=q,
        q_rank=ranks,
    )


def _draft_probs(
    text: TracedText, before: list[int], tokens: list[int], parents: list[int], decoder: Decoder, model: LanguageModel
) -> tuple[list[float], list[int]]:
    """The draft model's probability of each node's token, and the token's place in its distribution."""
    draft = Draft(np.array([tokens]), np.array([parents]))
    cache = model.new_cache(1, len(before) + len(tokens))
    if len(before) > 1:
        model.forward(Nodes(np.array([before[:-1]]), cache, [0]), want="none")
        cache.commit([0], [range(len(before) - 1)])
    out = model.forward(Nodes(draft.tokens, cache, [0], draft.parents))
    row = _row(text, before, decoder)
    try:
        target = LogitsDistribution(out.logits, draft, LogitsWarper([row.state]))
        probs = {n: target.probs(np.array([n]))[0] for n in {up for up in parents if up >= 0}}
    finally:
        decoder.release(row.slot)
    q, ranks = [1.0], [1]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        mine = float(probs[parent][token])
        q.append(mine)
        ranks.append(1 + int((probs[parent] > mine).sum()))
    return q, ranks


def _texts(
    requests: list[ExplainedRequest], tokenizer: Any, compared: abc.Sequence[ComparedDrafts] = ()
) -> dict[int, str]:
    """The text of each token that occurs. A token may be a part of a character; then its text has a replacement character."""
    used = set[int]()
    for request in requests:
        used |= {*(request.prompt or ())}
        for step in request.steps:
            used |= {*(step.tokens or ()), *([] if step.token is None else [step.token])}
            used |= {t for node in step.likely or () for t, _ in node}
    for at in compared:
        used |= {*at.text, *at.chain.tokens, *at.fixed.tokens, *at.best.tokens}
    anchor = tokenizer.decode([next(iter(used))]) if used else ""
    first = next(iter(used), 0)
    # After another token: some tokenizers drop the space before the first word of a text.
    return {t: tokenizer.decode([first, t]).removeprefix(anchor) for t in sorted(used) if t >= 0}
