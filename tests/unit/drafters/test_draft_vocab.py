"""Which tokens a draft model's head keeps, in which precision its weights are, and who says so."""

from __future__ import annotations

from typing import Any

import pytest
from vocabularies import END, byte_level, sentencepiece

from outrider import LLM, SamplingParams
from outrider.drafters.model.draft_model import DraftReduction, draft_vocab, token_counts
from outrider.kernels import cpu as native
from outrider.models.load import Contents, load

TEXT = {"text": "the zebra and the quagga; the zebra\n" * 3}


@pytest.mark.parametrize("tokenizer", [byte_level(500), sentencepiece(500)], ids=["bytes", "pieces"])
def test_special_tokens_and_bytes_are_always_kept(tokenizer: Any) -> None:
    size = len(tokenizer) + 20  # a model may have more rows than its tokenizer has tokens
    ids = draft_vocab(450, size, tokenizer, [7])
    assert ids is not None
    kept = set(ids.tolist())
    assert ids.tolist() == sorted(kept)
    assert len(kept) == 450
    assert {7, tokenizer.convert_tokens_to_ids(END)} <= kept
    assert max(kept) < len(tokenizer)

    assert draft_vocab(1, size, tokenizer) is not None  # still every byte: any text can be written
    few = set(draft_vocab(1, size, tokenizer).tolist())  # type: ignore[union-attr]
    assert 256 < len(few) < 400
    assert {
        i
        for i, piece in enumerate(tokenizer.convert_ids_to_tokens(range(len(tokenizer))))
        if len(piece) == 1 and piece.isascii()
    } <= few


def test_what_is_counted_comes_first_then_low_ids() -> None:
    tokenizer = byte_level(500)
    rare = max(tokenizer(" zebra")["input_ids"])
    without, counted = (set(draft_vocab(400, 500, tokenizer, corpus=c).tolist()) for c in (None, TEXT))  # type: ignore
    assert set(tokenizer(TEXT["text"])["input_ids"]) <= counted
    assert rare in counted
    assert draft_vocab(3, 10, None).tolist() == [0, 1, 2]  # type: ignore[union-attr]
    assert draft_vocab(3, 10, None, [9]).tolist() == [0, 1, 9]  # type: ignore[union-attr]
    assert draft_vocab(3, 10, None, corpus=[5, 5, 8]).tolist() == [0, 5, 8]  # type: ignore[union-attr]
    assert draft_vocab(10, 10, None) is None is draft_vocab(11, 10, None)
    assert len(without) == len(counted) == 400


def test_counts_are_those_of_the_tokens() -> None:
    tokenizer = byte_level(500)
    counts = token_counts([TEXT, [3, 3, 4]], tokenizer, 500)
    ids = tokenizer(TEXT["text"])["input_ids"]
    assert counts.sum() == len(ids) + 3
    assert counts[ids[0]] == ids.count(ids[0])
    with pytest.raises(ValueError, match="there is no file or folder"):
        token_counts("nowhere.txt", tokenizer, 500)


def contents(stored: str = "bfloat16", weights: int = 500, vocab: int = 151_936, fast: bool = True) -> Contents:
    """weights: in millions; a 0.5B model by default."""
    return Contents("draft", stored, weights * 10**6, vocab, (), None, fast)


@pytest.mark.parametrize(
    ("given", "quantization"),
    [
        (contents(), "int4"),
        (contents("float32"), "int4"),
        (contents("gguf"), None),
        (contents("int8"), None),
        (contents(fast=False), None),
        (contents(weights=1), None),  # stays in the caches
    ],
    ids=str,
)
def test_which_precision_is_chosen(given: Contents, quantization: str | None) -> None:
    reduce = DraftReduction()
    assert reduce(given) == (quantization, None)
    assert (reduce.note is None) == (quantization is None)
    asked = DraftReduction(choose_quantization=False)
    assert asked(given) == (None, None)
    assert asked.note is None


@pytest.mark.parametrize(
    ("vocab", "corpus", "kept"), [(None, None, None), (None, [5], 32768), (0, None, None), (8192, None, 8192)]
)
def test_how_many_tokens_are_kept(vocab: int | None, corpus: Any, kept: int | None) -> None:
    _, ids = DraftReduction(vocab=vocab, corpus=corpus)(contents())
    assert (None if ids is None else len(ids)) == kept
    assert DraftReduction(vocab=vocab, corpus=corpus)(contents(vocab=8000))[1] is None  # it has no more


def test_a_file_whose_blocks_stay_can_come_from_saved_packed_weights() -> None:
    assert not DraftReduction().may_leave_out("draft.gguf")
    assert not DraftReduction().may_leave_out("builtin:smollm2-135m")
    assert not DraftReduction(choose_quantization=False, vocab=0).may_leave_out("folder")
    assert DraftReduction().may_leave_out("folder")
    for head in ({"vocab": 9}, {"corpus": "texts"}):
        assert DraftReduction(**head).may_leave_out("draft.gguf")  # type: ignore[arg-type]


def test_the_note_says_what_was_left_out() -> None:
    reduce = DraftReduction(vocab=32768)
    reduce(contents())
    assert str(reduce.note) == "draft model: int4 weights, its head has 32768 of 151936 tokens"


@pytest.mark.skipif(not native.available(), reason="without the native kernels there is no int8")
def test_the_configuration_reaches_the_draft_model() -> None:
    target = load("builtin:code")
    texts, sizes = dict[str, str](), dict[str, int]()
    for name, config, note in (
        ("as it is", {}, []),
        ("small", {"draft_vocab": 600, "draft_vocab_corpus": {"text": "def area(w, h):\n"}}, ["600 of 8192"]),
        ("all", {"draft_vocab": 0, "quantization": "none"}, []),
        ("int8", {"quantization": "int8", "draft_vocab": 512}, ["512 of 8192"]),
    ):
        llm = LLM(target, speculative_config={"model": "builtin:code-draft", **config}, max_model_len=128)
        assert len(llm.notes) == len(note)
        assert all(words in said for words, said in zip(note, llm.notes, strict=True))
        texts[name] = llm.generate("def area(", SamplingParams(temperature=1, seed=3))[0].outputs[0].text
        sizes[name] = llm.drafters["draft_model"].resources().model.weight_bytes
    assert sizes["small"] < sizes["as it is"] == sizes["all"] > sizes["int8"]
    assert len(set(texts.values())) == 1
