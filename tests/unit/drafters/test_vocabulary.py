"""Drafts whose tokenizer is not the target's: bytes of tokens, text spelled anew, both ways of drafting, and the choice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import VOCAB, counts, decoder, plain_texts, planned, request
from hypothesis import given, settings
from hypothesis import strategies as st
from light import torch, transformers
from vocabularies import CODE, END, TOY, TOY_DRAFT, byte_level, letters, pairing, vocabulary

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.tree import chain, validate
from outrider.core.types import Budget, Commit, Draft, Siblings
from outrider.drafters import TargetPass
from outrider.drafters.lookup.corpus import alike
from outrider.drafters.model.cross_tokenizer import CrossTokenizerDrafter, Way, whole
from outrider.drafters.model.vocabulary import Pairing, Spelling, Vocabulary, continued
from outrider.kernels.probabilities import softmax
from outrider.models.base import Output
from outrider.models.nodes import Nodes
from outrider.testing.contract import check_drafter, context
from outrider.testing.toy import ToyModel

NOTHING = TargetPass(Draft(*chain([[0]])), np.zeros((1, 1, VOCAB), np.float32))
WAYS: tuple[Way, ...] = ("tli", "slem")

# SentencePiece cannot tell `▁` from a space
TEXT = st.binary(max_size=40).filter(lambda b: "▁".encode() not in b) | st.text(
    st.characters(exclude_characters="▁", codec="utf-8"), max_size=40
).map(str.encode)


def drafter(way: Way | None, rows: int = 4, error: float = 0.5) -> CrossTokenizerDrafter:
    return CrossTokenizerDrafter(ToyModel(len(TOY_DRAFT), seed=3, error=error), pairing(), rows, way)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@settings(max_examples=25)
@given(text=TEXT)
def test_any_text_is_encoded_to_the_tokens_that_stand_for_it(kind: str, text: bytes) -> None:
    known = vocabulary(kind)
    assert known.decode(known.encode(text)) == text


def test_what_tokens_stand_for() -> None:
    by_letters, by_pieces = vocabulary("bytes"), vocabulary("pieces")
    assert by_letters.pieces[by_letters.ids[b" for"]] == b" for" == by_pieces.pieces[by_pieces.ids[b" for"]]
    assert by_pieces.pieces[1 + 0x0A] == b"\n"
    assert (by_letters.leads, by_pieces.leads) == (False, True)
    assert by_letters.pieces[0] is None is by_pieces.pieces[0]
    assert by_pieces.tokenizer.convert_ids_to_tokens(by_pieces.ids[b"A"]) == "A"  # not <0x41>
    both = Pairing(by_letters, by_pieces)
    assert all(by_letters.pieces[t] == by_pieces.pieces[d] for t, d in both.shared.items())
    assert both.shared[0] == 0
    assert len(both.shared) > 256
    assert [t for t in both.first if t < 0] == []


def test_a_begin_token_is_put_before_the_text_once() -> None:
    tokenizer = byte_level(300)
    begun = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, bos_token=END, eos_token=END
    )
    draft = Vocabulary(tokenizer, len(tokenizer))
    draft.begin = 0
    target = Vocabulary(begun, len(begun))
    ids = tokenizer("def f")["input_ids"]
    assert Spelling(Pairing(target, draft)).read([0, *ids]) == [0, *ids] == Spelling(Pairing(target, draft)).read(ids)


@pytest.mark.parametrize(("source", "into"), [("bytes", "pieces"), ("pieces", "bytes"), ("bytes", "small")])
@settings(max_examples=25)
@given(data=st.data())
def test_a_text_is_spelled_the_same_however_it_came_about(source: str, into: str, data: st.DataObject) -> None:
    both = Pairing(vocabulary(source), vocabulary(into))
    piece = st.integers(0, both.target.size - 1)
    words = st.sampled_from(CODE.split("\n")).map(lambda line: both.target.encode(line.encode() + b"\n"))
    parts = data.draw(st.lists(st.lists(piece, max_size=6) | words, min_size=1, max_size=12))
    tokens, grown, sure = [], Spelling(both), []
    for select in parts:
        tokens += select
        ids = grown.read(tokens)
        assert ids[: len(sure)] == sure
        sure = ids[: grown.sure]
        assert len(both.draft.decode(ids)) - len(both.draft.decode(sure)) <= 260
    assert grown.ids == Spelling(both).read(tokens)
    text, told = both.target.decode(tokens), both.draft.decode(grown.ids)
    text = text.removeprefix(b" ") if both.target.leads else text
    assert told in (text, b" " + text if both.draft.leads else text)
    assert grown.ids.count(0) == tokens.count(0)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@settings(max_examples=25)
@given(data=st.data())
def test_what_is_proposed_continues_the_text(kind: str, data: st.DataObject) -> None:
    known = vocabulary(kind)
    committed = data.draw(st.lists(st.integers(0, known.size - 1), max_size=8))
    text = data.draw(TEXT)
    assert known.decode(continued(known, committed, text)) == text
    committed = known.encode(b"return sel")
    assert known.decode([*committed, *continued(known, committed, b"f.name")]).endswith(b"return self.name")


def test_text_that_goes_on_like_the_committed_is_encoded_with_it() -> None:
    known = vocabulary("bytes")
    ids = known.encode(b"import torch\n\n\ndef test_what():\n    assert")
    for n in range(1, len(ids)):
        rest = known.decode(ids[n:])
        assert continued(known, ids[:n], rest) == ids[n:]


def test_a_character_that_is_not_whole_waits() -> None:
    text = "aé中😀".encode()
    assert [len(whole(text[:n])) for n in range(len(text) + 1)] == [0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10]
    assert whole(b"\x80\x80") == b"\x80\x80"
    assert alike([1, 2, 3], [1, 2, 4], 1) == 2


@pytest.mark.parametrize("way", [*WAYS, None])
def test_contract(way: Way | None) -> None:
    check_drafter(lambda: drafter(way), VOCAB, shares=way is None)


@pytest.mark.parametrize("way", [*WAYS, None])
@pytest.mark.parametrize("budget", [Budget(4), Budget(3, 2, 7)])
def test_no_token_differs_from_plain_decoding(way: Way | None, budget: Budget) -> None:
    target = ToyModel(VOCAB)
    requests = [request([1 + n, 3], SamplingParams(temperature=n % 3 / 2, max_tokens=25, ignore_eos=True), seed=n)
                for n in range(4)]  # fmt: skip
    engine = decoder(target, drafter(way), rows=3, budget=budget)
    assert [r.output for r in engine.generate(requests)] == plain_texts(target, requests)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=20)
@given(data=st.data())
def test_the_draft_does_not_depend_on_the_pieces_that_were_read(way: Way, data: st.DataObject) -> None:
    made, tokens = drafter(way, rows=2), list[int]()
    for step in range(4):
        tokens = tokens + data.draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=30))
        count = data.draw(st.integers(1, 9))
        while (missing := made.missing(1, tokens)) > 0 and data.draw(st.booleans()):
            made.read(1, tokens, min(missing, count))
            assert made.missing(1, tokens) == missing - min(missing, count)
        ask = context([1], [tokens], [Budget(3)], SamplingParams(temperature=step % 2), step=step)
        draft = made.propose(ask)
        chain = [token for token, _ in draft.host[0][1:]]
        assert draft.host[0] == drafter(way, rows=2).propose(ask).host[0]
        right = chain[: data.draw(st.integers(0, 3))]
        made.update(ask, [Commit([*right, 1], list(range(len(right) + 1)), len(right))], NOTHING)
        tokens = [*tokens, *right, 1]


@pytest.mark.parametrize("rule", ["rejection", "block", "traversal"])
@pytest.mark.parametrize("way", [*WAYS, None])
def test_every_verifier_takes_the_drafts(way: Way | None, rule: str) -> None:
    wide = Budget(3, 1 if rule == "block" else 2)
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    engine = decoder(ToyModel(VOCAB), drafter(way), budget=wide, verifier=rule)
    steps = [s for s, _ in engine.steps([request([1, 2], params, seed=n) for n in range(4)]) if s]
    assert counts(steps)[0] > 30
    assert {s.draft.siblings is Siblings.POINT for s in steps if s.draft.nodes > 1} == {way == "slem"}


@pytest.mark.parametrize("top_k", [0, 3])
def test_declared_probs_are_those_that_were_drawn_from(top_k: int) -> None:
    both = pairing()
    model = ToyModel(len(TOY_DRAFT), seed=3)
    ask = context([0, 1], [TOY("cab ab")["input_ids"], TOY("f\na")["input_ids"]], [Budget(3), Budget(2)],
                SamplingParams(temperature=0.8, top_k=top_k), needs_probs=True)  # fmt: skip
    blind = context([0], [TOY("\n")["input_ids"]], [Budget(3)], SamplingParams(), needs_probs=True)
    assert (
        CrossTokenizerDrafter(model, both, 1, "tli").propose(blind).nodes == 1
    )  # no token of the draft's for this text
    made = CrossTokenizerDrafter(model, both, 2, "tli").propose(ask)
    assert made.probs is not None
    validate(made, VOCAB)
    for b, tokens in enumerate(ask.tokens):
        read = Spelling(both).read(tokens)
        for node, (token, parent) in enumerate(made.host[b]):
            if node:
                extra = [t for t, _ in made.host[b][1:node]]
                ids = torch.tensor([[*read, *(both.shared[t] for t in extra)]])
                own = model.forward(Nodes(ids, model.new_cache(1, 50), [0]), want="last").logits[0, 0]
                logits = np.full((1, VOCAB), -np.inf, np.float32)
                for t, d in both.shared.items():
                    logits[0, t] = own[d]
                distribution = softmax(ask.warp.select([b]).scores(logits, [extra]))[0]
                assert np.array_equal(made.probs[b, parent], distribution)
                assert distribution[token] > 0
                assert int((distribution > 0).sum()) == (top_k or len(both.shared))


class Renamed(ToyModel):
    """A toy target under other ids: what a draft is whose tokens have other numbers."""

    def __init__(self, order: list[int], size: int) -> None:
        """order: by target id, the id here."""
        super().__init__(VOCAB)
        self.inner, self.order, self.vocab_size = ToyModel(VOCAB), np.array(order), size

    def forward(self, nodes, **options) -> Output:
        back = np.zeros(self.vocab_size, np.int64)
        back[self.order] = np.arange(VOCAB)
        out = self.inner.forward(replace(nodes, tokens=back[nodes.tokens]), **options)
        logits = np.full((*out.logits.shape[:2], self.vocab_size), -9.0, np.float32)
        logits[..., self.order] = out.logits
        return Output(logits, out.features)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_noise_of_a_token_is_that_of_its_target_id(way: Way, temperature: float) -> None:
    """A draft that is the target under other ids is right about every token that it can name, at any temperature."""
    single = letters(*"abcdefghi", "\n")
    other = letters("\n", *"ihgfedcba", "zz", "yy")
    both = pairing(other, single)
    assert not both.total
    order = [other.convert_tokens_to_ids(single.convert_ids_to_tokens(t)) for t in range(VOCAB)]
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, bad_words=[[0]])
    engine = decoder(ToyModel(VOCAB), CrossTokenizerDrafter(Renamed(order, len(other)), both, 4, way))
    steps = [s for s, _ in engine.steps([request([1, 2], params, seed=n) for n in range(4)]) if s]
    drafted, accepted = counts(steps)
    assert drafted == accepted > 100


def test_the_same_tokens_under_other_ids_are_translated_one_by_one() -> None:
    single, other = letters(*"abc"), letters(*"cab")
    both = pairing(other, single)
    assert both.total
    assert not both.equal
    assert Spelling(both).read([1, 2, 0, 3]) == [2, 3, 0, 1]
    assert CrossTokenizerDrafter(ToyModel(4), both, 1).way == "tli"


def test_nothing_is_drafted_where_every_shared_token_is_forbidden() -> None:
    only = TOY.convert_tokens_to_ids(["ab", "cd"])
    params = SamplingParams(allowed_token_ids=only, max_tokens=10)
    for needs_probs in (False, True):
        for way in WAYS:
            made = drafter(way).propose(context([0], [[1, 2]], [Budget(3)], params, needs_probs=needs_probs))
            validate(made, VOCAB)
            assert way == "slem" or made.nodes == 1
    for rule in ("match", "rejection", "block"):
        row = decoder(ToyModel(VOCAB), drafter("tli"), verifier=rule).generate([request([1, 2], params)])[0]
        assert set(row.output) <= set(only)


def test_the_end_of_a_text_can_be_drafted() -> None:
    for way in WAYS:
        params = SamplingParams(temperature=0, allowed_token_ids=[0])
        made = drafter(way).propose(context([0], [[1, 2]], [Budget(1)], params))
        assert made.host[0][1:] == [(0, 0)]


def test_both_ways_draft_under_a_planner_and_the_text_stays() -> None:
    asked = [
        request([i, 1, 2], SamplingParams(temperature=t, max_tokens=80, ignore_eos=True), i)
        for i, t in enumerate((0, 1))
    ]
    for verifier in ("match", "rejection"):
        used = planned({"both": drafter(None, rows=2)}, (), Budget(3))
        run = decoder(ToyModel(VOCAB), used, verifier=verifier, rows=2)
        steps = [s for s, _ in run.steps(asked) if s]
        assert "both" in {note.plan.drafter for step in steps for note in step.draft.notes}
    rows = decoder(ToyModel(VOCAB), planned({"both": drafter(None, rows=2)}, (), Budget(3)), rows=2).generate(asked)
    assert [r.output for r in rows] == plain_texts(ToyModel(VOCAB), asked)


def tiny(vocab_size: int) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=vocab_size, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                    num_attention_heads=2, max_position_embeddings=512, eos_token_id=0, tie_word_embeddings=True)
    )  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with a tokenizer of its own."""
    path = tmp_path_factory.mktemp("drafts") / request.param
    tokenizer = vocabulary(request.param).tokenizer
    tiny(len(tokenizer)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_text_of_a_real_target_stays_its_own(folder: Path) -> None:
    prompts = ["def quicksort(xs):\n", "# é中😀\nclass Node:\n    def __init__(self, left, right):\n"]
    params = [SamplingParams(temperature=t, max_tokens=40, seed=1, ignore_eos=True) for t in (0, 1)]
    plain = LLM("builtin:code").generate(prompts, params)
    llm = LLM("builtin:code", speculative_config={"model": str(folder)}, controller=Fixed(3))
    fast = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in fast] == [o.outputs[0].token_ids for o in plain]
    assert all(o.metrics.speculative_decoding.num_draft_tokens for o in fast)


def test_the_temperature_of_a_text_decides_how_it_is_drafted() -> None:
    """In a batch of both kinds each text gets the draft that it gets alone, by its own way."""
    texts = [TOY("cab ab")["input_ids"], TOY("f\na")["input_ids"], TOY("ab cd")["input_ids"]]
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.0)]
    budgets = [Budget(3), Budget(3, 2), Budget(2)]
    asked = context([0, 1, 2], texts, budgets, params[1])
    warp = LogitsWarper([SequenceState(p, (), (), t, 1) for p, t in zip(params, texts, strict=True)])
    both = drafter(None).propose(replace(asked, warp=warp))
    for b, way in enumerate(("slem", "tli", "slem")):
        alone = drafter(way).propose(context([b], [texts[b]], [budgets[b]], params[b]))
        assert both.host[b][: len(alone.host[0])] == alone.host[0]
        assert int(both.num_draft_tokens[b]) == alone.nodes - 1 > 0
