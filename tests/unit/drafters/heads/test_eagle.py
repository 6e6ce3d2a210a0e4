"""The EAGLE drafter: its numbers are those of the plain-torch head, its state follows the target's features alone, and no text
changes. Every fault that is known from other systems is planted once, and found."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import read, run
from heads import EAGLE3, GOLDEN, causal, small_target
from helpers import Loop, plain_texts, request
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.features import Features
from outrider.core.types import Budget, Draft
from outrider.drafters.base import DraftContext
from outrider.drafters.heads import layers
from outrider.drafters.heads.eagle.drafter import Pairs, eagle_model
from outrider.drafters.heads.eagle.files import read_eagle
from outrider.drafters.heads.eagle.module import Eagle, EagleConfig
from outrider.drafters.heads.layers import precision_of
from outrider.drafters.heads.reading import HeadWeights
from outrider.drafters.model.grower import Growth, Level, TreeDrafter
from outrider.engine import Engine
from outrider.kernels import cpu as native
from outrider.models.base import FINAL_NORM
from outrider.models.nodes import Nodes
from outrider.testing.contract import GREEDY, check_drafter, context

TARGET = small_target()
TABLE = TARGET.model.embedding_rows(torch.arange(128))
PROMPT = [(7 * i * i + 3 * i + 11) % 127 for i in range(60)]


def eagle1() -> HeadWeights[EagleConfig]:
    torch.manual_seed(3)
    config = EagleConfig.for_target(TARGET.config, eagle1=True, taps=(FINAL_NORM,), fc_bias=True)
    head = Eagle(config).initialise_(TABLE, TARGET.model.head_rows(torch.arange(128)))
    tensors = {n: torch.randn_like(t) * 0.2 if t.dim() == 2 else t for n, t in head.state_dict().items()}
    del tensors["embed_tokens.weight"]
    return HeadWeights(config, {n: t.detach() for n, t in tensors.items()}, torch.arange(128))


def weights(name: str) -> HeadWeights[EagleConfig]:
    return eagle1() if name == "eagle1" else read_eagle(GOLDEN / name, TARGET)


HEADS = (*EAGLE3, "eagle1")


def drafter(
    name: str = "eagle31", rows: int = 4, max_length: int = 256, plain: bool = False, **settings: Any
) -> TreeDrafter[Pairs]:
    model = eagle_model(weights(name), TARGET.model, max_length, "none", plain=plain)
    return TreeDrafter(Pairs(model, rows, max_length), **settings)


def features(tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    cache = TARGET.model.new_cache(1, len(tokens))
    out = TARGET.model.forward(Nodes(torch.tensor([tokens]), cache, [0]), taps=taps, want="none").features
    assert out is not None
    return out[0]


def fresh(made: TreeDrafter[Pairs], tokens: list[int], slot: int = 0) -> TreeDrafter[Pairs]:
    """A new drafter over the same weights that was told the whole text at once, and what was learned of their error."""
    new = TreeDrafter(Pairs(made.levels.model, made.levels.cache.num_slots, made.levels.cache.max_length))
    new.error.scale = made.error.scale
    new.start(slot, tokens, 0, features(tokens[:-1], made.taps))
    return new


@torch.no_grad()
def chain_of(head: Eagle, tokens: list[int], read: Tensor, depth: int) -> list[int]:
    """The most likely chain, by the plain-torch head."""
    y, past = causal(head, torch.tensor([tokens[1:]]), head.fuse(read[None]))
    out: list[int] = []
    for _ in range(depth):
        out.append(int(head.token_ids[head.logits(y[0, -1]).argmax()]))
        y, past = causal(head, torch.tensor([out[-1:]]), head.feedback(y[:, -1:]), past)
    return out


def reference(name: str, tokens: list[int], depth: int = 5) -> list[int]:
    head = weights(name)
    return chain_of(Eagle.of(head, TABLE).eval(), tokens, features(tokens[:-1], head.config.taps), depth)


def proposed(made: TreeDrafter[Pairs], tokens: list[int], depth: int = 5) -> list[int]:
    draft = made.propose(context([0], [tokens], [Budget(depth)], GREEDY))
    return [t for t, _ in draft.host[0][1:]]


@pytest.mark.parametrize("plain", [False, True], ids=["native", "torch"])
@pytest.mark.parametrize("name", HEADS)
def test_chains_are_those_of_the_plain_head(name: str, plain: bool) -> None:
    made = drafter(name, plain=plain)
    assert made.levels.has_draft_chains != plain
    for length in (2, 3, 17, 60):
        tokens = PROMPT[:length]
        assert proposed(fresh(made, tokens), tokens) == reference(name, tokens)


@pytest.mark.parametrize("kind", ["none", "int8"])
@pytest.mark.parametrize("name", HEADS)
def test_the_native_step_agrees_with_torch(name: str, kind: str) -> None:
    """Prompts of different lengths, the last nodes, all nodes of two levels; in a batch, from features and from g."""
    made = [eagle_model(weights(name), TARGET.model, 256, kind, plain=plain) for plain in (False, True)]
    read = torch.stack([features(PROMPT[i : i + 9], made[0].taps) for i in (0, 20)])
    tokens = torch.tensor([PROMPT[1:10], PROMPT[21:30]])
    parents = torch.tensor([[*range(-1, 8)], [*range(-1, 4), -2, -2, -2, -2]])  # the second has 5 pairs
    level = torch.tensor([[-1, 0, 0], [-1, 0, -2]])
    got: list[list[Tensor]] = []
    for model in made:
        cache = model.new_cache(3, 64)
        model.forward(Nodes(tokens, cache, [2, 0], parents), read, want="none")
        cache.commit([2, 0], [range(8), range(4)])
        root = torch.tensor([[PROMPT[9]], [PROMPT[25]]])
        out = model.forward(Nodes(root, cache, [2, 0]), torch.stack([read[0, 8:], read[1, 4:5]]))
        below = Nodes(torch.tensor([[5, 6], [7, 0]]), cache, [2, 0], level)
        nodes = model.forward(below, g=out.g.expand(-1, 2, -1))
        # the same without pieces: what waits is read by the call that wants the last pair of each
        again = model.forward(Nodes(tokens, model.new_cache(3, 64), [2, 0], parents), read, want="last")
        assert torch.allclose(again.logits, out.logits, atol=1e-5)
        assert torch.allclose(again.g, out.g, atol=1e-5)
        got.append([*out, *again, *(t[row, node] for t in nodes for row, node in ((0, 0), (0, 1), (1, 0)))])
    for fast, plain in zip(*got, strict=True):
        assert torch.allclose(fast, plain, atol=1e-4 if kind == "none" else 2e-2)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_in_one_call_are_those_grown_level_by_level(temperature: float, width: int) -> None:
    """Two rows of different length, one with a threshold that ends its chain; tokens, siblings, chances and what is learned."""
    params = SamplingParams(temperature=temperature)
    budgets = [Budget(5, width, min_probability=0.3), Budget(3, width, min_probability=1e-6)]
    drafts = []
    for plain in (False, True):
        made = drafter("eagle31", plain=plain)
        texts = [PROMPT[:30], PROMPT[5:20]]
        for slot, text in enumerate(texts):
            made.start(slot, text, 0, features(text[:-1], made.taps))
        drafts.append(made.propose(context([0, 1], texts, budgets, params)))
    one, level = drafts
    assert one.host == level.host
    assert 1 < len(one.host[0]) < 6 * width, "the threshold was chosen to end the chain"
    if width > 1:
        parents = [parent for _, parent in one.host[1]]
        assert parents == [-1, *[0] * width, *[1] * width, *[1 + width] * width], "nothing follows a sibling"
    assert one.confidence is not None
    assert level.confidence is not None
    assert torch.allclose(one.confidence, level.confidence, atol=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_every_path_of_a_tree_is_a_chain(name: str) -> None:
    """The logits after a node are those of a head that drafted that path alone."""
    made = fresh(drafter(name), PROMPT)
    head = Eagle.of(weights(name), TABLE).eval()
    seen: dict[tuple[int, ...], Tensor] = {}
    opens, extends = made.levels.open, made.levels.extend

    def watched(levels: list[Level], grown: Mapping[int, Growth]) -> list[Level]:
        for level in levels:
            seen.update((tuple(grown[b].path(n)), row) for (b, n), row in zip(level.nodes, level.logits, strict=True))
        return levels

    made.levels.open = lambda c, grown: watched(opens(c, grown), grown)  # type: ignore[method-assign]
    made.levels.extend = lambda c, grown, *at: watched(extends(c, grown, *at), grown)  # type: ignore[method-assign]
    made.propose(context([0], [PROMPT], [Budget(4, 3, 9)], GREEDY))
    assert len(seen) > 4
    with torch.no_grad():
        root, past = causal(head, torch.tensor([PROMPT[1:]]), head.fuse(features(PROMPT[:-1], made.taps)[None]))
        for path, got in seen.items():
            y, held = root[:, -1:], past
            for token in path:
                y, held = causal(head, torch.tensor([[token]]), head.feedback(y), held)
            assert torch.allclose(head.logits(y[0, -1]), got, atol=1e-4)


class _Checked(TreeDrafter[Pairs]):
    """Compares each draft with that of a new drafter that is told the whole text at once."""

    compared = 0

    def propose(self, context_: DraftContext) -> Draft:
        draft = super().propose(context_)
        for b, (slot, tokens) in enumerate(zip(context_.slots, context_.tokens, strict=True)):
            if len(tokens) < 2 or not context_.budgets[b].depth:
                continue
            one = replace(
                context_,
                slots=[slot],
                tokens=[tokens],
                budgets=[context_.budgets[b]],
                warp=context_.warp.select([b]),
                noise=context_.noise.select([b]),
            )
            again = fresh(self, list(tokens), slot).propose(one)
            assert again.host[0] == draft.host[b], f"slot {slot}: {draft.host[b]}, and from the text {again.host[0]}"
            self.compared += 1
        return draft


class _Lucky(_Checked):
    """Now and then the first draft token is the target's own, so that long and short drafts are accepted."""

    def propose(self, context_: DraftContext) -> Draft:
        draft = super().propose(context_)
        tokens = draft.tokens.clone()
        for b, text in enumerate(context_.tokens):
            nodes = [n for n, (_, parent) in enumerate(draft.host[b]) if parent == 0]
            if nodes and len(text) % 3:
                now = list(text)
                for n in range(nodes[0], len(draft.host[b])):
                    if draft.host[b][n][1] != (0 if n == nodes[0] else n - 1):
                        break
                    cache = TARGET.model.new_cache(1, len(now))
                    logits = TARGET.model.forward(Nodes(torch.tensor([now]), cache, [0]), want="last").logits[:, 0]
                    one = context_.warp.select([b])
                    at = torch.tensor([len(now)])
                    right = int(one.draw(logits, [now[len(text) :]], context_.noise.select([b]), context_.stream, at))
                    if right < 0 or right in [int(draft.tokens[b, m]) for m in nodes if m != n]:
                        break
                    tokens[b, n] = right
                    now.append(right)
        return Draft(tokens, draft.parents)


def lucky(name: str = "eagle31", **more: Any) -> _Lucky:
    return _Lucky(Pairs(eagle_model(weights(name), TARGET.model, 256, "none"), 4, 256), **more)


def requests(count: int = 5, tokens: int = 12) -> list:
    lengths = itertools.cycle([1, 2, 40, 9])
    return [
        request(PROMPT[i : i + n], SamplingParams(max_tokens=tokens, seed=i, temperature=i % 2), seed=i)
        for i, n in zip(range(count), lengths, strict=False)
    ]


@pytest.mark.parametrize("chunk", [3, 256])
@pytest.mark.parametrize("budget", [Budget(4), Budget(3, 3, 8), Budget(0)], ids=str)
@pytest.mark.parametrize("name", ["eagle3", "eagle31", "eagle1"])
def test_a_draft_depends_on_the_text_alone(name: str, budget: Budget, chunk: int) -> None:
    """After acceptance, rejection, prompts in pieces and slots that are used again: as if the text were new."""
    made = lucky(name)
    loop = Loop(
        TARGET.model, made, controller=Fixed(budget.depth, budget.width, budget.nodes), num_slots=2, max_length=128
    )
    loop.chunk = chunk
    asked = requests()
    rows = loop.generate(asked)
    assert [r.output for r in rows] == plain_texts(TARGET.model, asked)
    assert made.compared >= (10 if budget.depth else 0)
    assert not budget.depth or sum(map(sum, (r.counts.accepted for r in rows))) > 8
    assert not made.levels.features.waiting
    assert made.levels.cache.length == [0] * 4


# -- planted faults -------------------------------------------------------------------------------------------------------


def _off_by_one(made: TreeDrafter[Pairs]) -> None:
    add = made.levels.add
    made.levels.add = lambda slot, f, first: add(slot, f.roll(1, 0), first)  # type: ignore[method-assign]


def _wrong_tap(made: TreeDrafter[Pairs]) -> None:
    made.taps = tuple(t - 1 for t in made.taps)


def _feedback_kept(made: TreeDrafter[Pairs]) -> None:
    update, kept = made.update, set[int]()

    def keeps(context_: DraftContext, commits: Any, target: Any) -> None:
        for slot, commit in zip(context_.slots, commits, strict=True):
            places = made.levels.places.get(slot, [])
            forwarded = [n for n in commit.nodes if n < len(places) and places[n] >= 0]
            if len(forwarded) > 1:
                made.levels.places.pop(slot)
                made.levels.features.waiting.pop(slot)
                made.levels.cache.commit([slot], [range(len(forwarded))])
                first = len(context_.tokens[context_.slots.index(slot)]) - len(commit.features) + len(forwarded) - 2
                made.levels.features.waiting[slot] = Features(first, commit.features[len(forwarded) - 1 :])
                kept.add(slot)
        rest = [replace(c, features=None) if s in kept else c for s, c in zip(context_.slots, commits, strict=True)]
        kept.clear()
        update(context_, rest, target)

    made.update = keeps  # type: ignore[method-assign]


def _post_for_pre_norm(made: TreeDrafter[Pairs]) -> None:
    """The last layer after the final norm, where it must be before it (golden heads read it)."""
    made.taps = tuple(FINAL_NORM if t == TARGET.model.num_layers - 1 else t for t in made.taps)


FAULTS: dict[str, Callable[[TreeDrafter[Pairs]], None]] = {
    "features off by one position": _off_by_one,
    "wrong tap": _wrong_tap,
    "feedback kept": _feedback_kept,
    "post- for pre-norm": _post_for_pre_norm,
}


def _texts(fault: Callable[[TreeDrafter[Pairs]], None] | None) -> list[list[int]]:
    made = lucky()
    if fault is not None:
        fault(made)
    loop = Loop(TARGET.model, made, controller=Fixed(4), num_slots=2, max_length=128)
    return [r.output for r in loop.generate(requests())]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taps = drafter().taps
    monkeypatch.setattr(
        f"{__name__}.fresh",
        lambda made, tokens, slot=0: _right(made, tokens, slot, taps),
    )
    assert _texts(None) == plain_texts(TARGET.model, requests())
    with pytest.raises(AssertionError, match="and from the text"):
        _texts(FAULTS[fault])


def _right(made: TreeDrafter[Pairs], tokens: list[int], slot: int, taps: tuple[int, ...]) -> TreeDrafter[Pairs]:
    new = TreeDrafter(Pairs(made.levels.model, made.levels.cache.num_slots, made.levels.cache.max_length))
    new.start(slot, tokens, 0, features(tokens[:-1], taps))
    return new


# -- every way to run it --------------------------------------------------------------------------------------------------

PARAMS = {
    "greedy": {"temperature": 0},
    "hot": {"temperature": 1.4},
    "top_k": {"temperature": 1, "top_k": 9},
    "top_p": {"temperature": 0.8, "top_p": 0.6},
    "min_p": {"temperature": 1, "min_p": 0.2},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    "frequency": {"temperature": 0, "frequency_penalty": 1.0},
    "bias": {"temperature": 1, "logit_bias": {3: 4.0, 50: -9.0}},
    "allowed": {"temperature": 1, "allowed_token_ids": [*range(5, 40)]},
    "min_tokens": {"temperature": 1, "min_tokens": 6, "stop_token_ids": [*range(30)]},
}


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("budget", [Budget(4), Budget(4, 3, 10)], ids=["chain", "tree"])
def test_no_text_changes(params: str, budget: Budget) -> None:
    asked = [
        request(PROMPT[i : i + 9 * i + 1], SamplingParams(max_tokens=14, seed=i, **PARAMS[params]), seed=i)
        for i in range(4)
    ]
    for name in ("eagle3", "eagle3_full_vocab"):
        loop = Loop(
            TARGET.model, drafter(name, 3), controller=Fixed(4, budget.width, budget.nodes), num_slots=3, max_length=128
        )
        assert [r.output for r in loop.generate(asked)] == plain_texts(TARGET.model, asked, end_ids=())


@pytest.mark.parametrize("verifier", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("name", ["eagle31", "eagle3_full_vocab"])
def test_other_verifiers_run(name: str, verifier: str) -> None:
    width = 1 if verifier == "block" else 2
    loop = Loop(TARGET.model, drafter(name), verifier, controller=Fixed(3, width, 6), num_slots=3, max_length=128)
    rows = loop.generate(requests())
    assert all(len(r.output) == 12 for r in rows)


@pytest.mark.parametrize("name", ["eagle31", "eagle3_full_vocab", "eagle1"])
def test_the_contract(name: str) -> None:
    size = 32 * len(weights(name).config.taps)
    check_drafter(lambda: drafter(name), 128, feature_size=size)


def test_prefix_cache_and_preemption() -> None:
    llm = LLM(TARGET, drafter=drafter(rows=3), max_num_seqs=3, max_model_len=160)
    with closing(Engine(llm.runtime, kv_tokens=240, prefill_chunk=16)) as engine:
        params = SamplingParams(max_tokens=90, seed=5, ignore_eos=True)
        jobs = [read(request(PROMPT[:n], params)) for n in (48, 59, 50, 55)]
        texts = run(engine, jobs)
        assert engine.scheduler.preemptions > 0
        assert engine.stats.prefix_hits > 0
        assert engine.roster.failures == 0
    assert [t.output for t in texts] == plain_texts(TARGET.model, [j.request for j in jobs])


def test_lower_precision_drafts_nearly_the_same() -> None:
    read = weights("eagle3_full_vocab")
    tokens = PROMPT[:30]
    want = None
    for kind in ("none", "int8", "int4"):
        made = TreeDrafter(Pairs(eagle_model(read, TARGET.model, 256, kind), 1, 256))
        made.start(0, tokens, 0, features(tokens[:-1], made.taps))
        ask = context([0], [tokens], [Budget(1)], GREEDY)
        got = made.levels.open(ask, {0: Growth(tokens[-1], Budget(1))})[0].logits
        want = got if want is None else want
        assert float((got - want).norm() / want.norm()) < 0.2


def test_a_large_head_is_rounded_only_if_kernels_can_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    large = [torch.zeros(2**11, 2**11)]
    assert precision_of("auto", large) == "int8"
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why", lambda: "a test")
    assert precision_of("auto", large) == "float32"
    monkeypatch.setattr(layers, "SMALL", 0)
    made = TreeDrafter(Pairs(eagle_model(weights("eagle31"), TARGET.model, 256), 1, 256))
    assert proposed(fresh(made, PROMPT), PROMPT) == reference("eagle31", PROMPT)
