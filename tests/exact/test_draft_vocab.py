"""A draft model whose head has some tokens only: every verifier stays exact, and the native step drafts what its twin drafts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from light import transformers
from oracles import RULES, judging

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.types import Siblings
from outrider.drafters import ModelDrafter
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.kernels import cpu as native
from outrider.models.base import LanguageModel, Output, Want
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.cache import SlotCache
from outrider.models.load import Loaded, load
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes
from outrider.testing.oracle import Probs, Text, Toy, by_level, composed, drawn_chain, grown_tree, normal, plain

native_only = pytest.mark.skipif(not native.available(), reason=str(native.why()))


class SmallHead(Toy):
    """The drafter's distribution over some tokens only; the target's mass may be anywhere."""

    def __init__(self, seed: int, kind: str, kept: tuple[int, ...]) -> None:
        super().__init__(seed, kind)
        self.kept = kept

    def q(self, text: Text) -> Probs:
        return normal([w * 60 if i in self.kept else 0 for i, w in enumerate(super().q(text))])  # pyright: ignore


def heads() -> Iterator[SmallHead]:
    for seed, kept in enumerate([(0,), (1,), (0, 2), (1, 2)] * 3):
        yield SmallHead(seed, ("random", "ties", "one-hot p")[seed // 4], kept)


@pytest.mark.parametrize("rule", RULES)
def test_chains_from_some_tokens_keep_the_distribution(rule: str) -> None:
    for toy in heads():
        assert composed(toy, RULES[rule], drawn_chain(2), 3) == plain(toy, 3), (toy.kind, toy.kept)


@pytest.mark.parametrize("siblings", list(Siblings), ids=lambda s: s.name)
@pytest.mark.parametrize("rule", ["match", "rejection", "traversal"])
def test_trees_from_some_tokens_keep_the_distribution(rule: str, siblings: Siblings) -> None:
    """Two children, where a head of one token has only one."""
    for toy in heads():
        tree = grown_tree(by_level(2, 1), siblings, 3)
        assert composed(toy, judging(rule, siblings), tree, 3) == plain(toy, 3), (toy.kind, toy.kept)


class Masked(LanguageModel):
    """The obvious twin: a whole model, and -inf for the tokens that the head does not keep."""

    def __init__(self, whole: LanguageModel, ids: np.ndarray) -> None:
        self.whole, self.vocab_size, self.max_length = whole, whole.vocab_size, whole.max_length
        self.device, self.batch_invariant = whole.device, whole.batch_invariant
        self.out = np.ones(whole.vocab_size, bool)
        self.out[ids] = False

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return self.whole.new_cache(num_slots, max_length)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        return Output(np.where(self.out, -np.inf, self.whole.forward(nodes, want=want).logits), None)


STARTS = ["def quicksort(xs):\n", "import os\n\n\nclass Config:\n", "x = [1, 2, 3]\ny = [1,", "# words\n"]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "logit_bias": {8000: 5.0, 5: 2.0}, "repetition_penalty": 1.2},
]


@cache
def pair() -> tuple[Loaded, transformers.LlamaForCausalLM]:
    return load("builtin:code"), transformers.LlamaForCausalLM.from_pretrained(builtin_folder("builtin:code-draft"))


@cache
def small_head() -> tuple[LanguageModel, np.ndarray]:
    ids = np.sort(np.random.default_rng(0).permutation(8192)[:3000])
    return NativeModel(pair()[1], "float32", head_ids=ids), ids


@cache
def whole_head() -> LanguageModel:
    return NativeModel(pair()[1], "float32")


@cache
def even_head() -> LanguageModel:
    return NativeModel(pair()[1], head_ids=np.arange(0, 8192, 2))


@native_only
@pytest.mark.parametrize(
    ("verifier", "width"), [("match", 1), ("match", 3), ("rejection", 1), ("rejection", 2), ("block", 1)]
)
def test_the_twin_drafts_the_same_tokens(verifier: str, width: int) -> None:
    """Draft for draft, over chains of the native step, chains with filters, trees, and draws for the ratio rules."""
    target, _ = pair()
    small, ids = small_head()
    prompts = [target.tokenizer(text)["input_ids"] for text in STARTS]  # pyright: ignore[reportOptionalCall]

    def run(model: LanguageModel) -> tuple[list[list[int]], list[list[list[tuple[int, int]]]]]:
        drafter = ModelDrafter(model, 4, 200)
        decoder = Decoder(target.model, drafter, verifier, Fixed(4, width, 8), num_slots=4, max_length=200)
        made = [Request(i, p, SamplingParams(max_tokens=24, ignore_eos=True, **x), i) for i, (p, x) in
                enumerate(zip(prompts, PARAMS, strict=True))]  # fmt: skip
        scheduler = Scheduler(decoder, raises=True)
        rows = scheduler.add(made)
        drafts = [step.draft.host for step, _ in scheduler.run(rows) if step is not None]
        return [s.output for s in rows], drafts

    texts, drafts = run(small)
    assert (texts, drafts) == run(Masked(whole_head(), ids))
    drafted = {token for step in drafts for nodes in step for token, _ in nodes[1:]}
    assert drafted <= set(ids.tolist())
    assert len(drafted) > 20


@native_only
@pytest.mark.parametrize("config", [{}, {"tree_width": 3, "tree_nodes": 9}, {"method": "auto"}], ids=str)
def test_no_token_differs_from_plain_decoding(config: dict[str, Any]) -> None:
    speculation = {"model": "builtin:code-draft", "method": "draft_model", "draft_vocab": 1024, **config}
    made, plain_llm = LLM("builtin:code", speculative_config=speculation, max_model_len=256), LLM("builtin:code")
    assert made.notes == ["draft model: its head has 1024 of 8192 tokens"]
    params = [SamplingParams(max_tokens=30, seed=i, ignore_eos=True, **x) for i, x in enumerate(PARAMS)]
    texts = [[o.outputs[0].token_ids for o in llm.generate(STARTS, params)] for llm in (made, plain_llm)]
    assert texts[0] == texts[1]


@native_only
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("verifier", "width"), [("match", 1), ("match", 3), ("rejection", 3), ("block", 1), ("traversal", 3)]
)
def test_a_request_that_allows_no_token_of_the_head(verifier: str, width: int, temperature: float) -> None:
    """The draft ends, and the text goes on; the draft starts again where a token of the head is allowed."""
    for step in (2, 3):
        allowed = range(1, 8192, step)
        texts = written(ModelDrafter(even_head(), 2, 200), verifier, width, temperature, step)
        assert all(set(output) <= set(allowed) and len(output) == 12 for output in texts)
        if verifier == "match" or temperature == 0:
            assert texts == plain_texts(temperature, step)


def written(drafter: ModelDrafter | None, verifier: str, width: int, temperature: float, step: int) -> list[list[int]]:
    """Two texts of every `step`-th token."""
    decoder = Decoder(pair()[0].model, drafter, verifier, Fixed(3, width, 6), num_slots=2, max_length=200)
    allowed = [*range(1, 8192, step)]
    params = SamplingParams(temperature=temperature, max_tokens=12, allowed_token_ids=allowed, ignore_eos=True)
    return [
        s.output
        for s in Scheduler(decoder, raises=True).generate([Request(i, [1 + i, 5, 9], params, i) for i in range(2)])
    ]


@cache
def plain_texts(temperature: float, step: int) -> list[list[int]]:
    return written(None, "match", 1, temperature, step)
