"""What a native step does beside a family's forward: rounding, memory, chains of drafts, heads of some tokens, and errors.

`test_families.py` compares its logits and taps with transformers, and its rows with those of the text alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import FAMILIES, ODD, VOCAB, tiny
from native_parts import argmax
from transformers import PreTrainedModel

from outrider.drafters.model.confidence import RIVALS, LogitError
from outrider.kernels import cpu as native
from outrider.kernels.vectors import unpack_vectors
from outrider.models.base import Chain
from outrider.models.cache import KV_CACHE_DTYPES
from outrider.models.hf.model import HFModel
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

_GRANITE = ODD | {"hidden_size": 96, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
MODELS = {
    "llama": FAMILIES["llama-odd"],
    "qwen2": FAMILIES["qwen2-odd"],
    "qwen3": FAMILIES["qwen3-odd"],
    "granite": ("granite", _GRANITE),
}


def build(name: str) -> PreTrainedModel:
    """With matrices small enough that a rounding of the activations stays small."""
    kind, changes = MODELS[name]
    raw = tiny(kind, max_position_embeddings=512, **changes)
    for parameter in raw.parameters():
        parameter.data *= 0.5 if parameter.dim() > 1 else 1
    return raw


SOME = np.array([0, 3, 4, 7, 8, 11, 12, 19, 20, 21, 22, 23, 29, 30, 31, 34, 36])
TEXT = np.random.default_rng(3).integers(0, VOCAB, (1, 120))


def test_64_nodes_behind_32k_tokens_have_the_bits_of_one_at_a_time() -> None:
    model, length, nodes = NativeModel(build("llama"), weights="int8"), 32_700, 64
    cache, tokens = model.new_cache(1, length + nodes), TEXT[:, :nodes]
    model.forward(Nodes(tokens[:, :1], cache, [0]), want="none")  # makes the tensors
    cache.reserve([0], length + nodes)
    for t in (t for pair in cache.layers for t in pair):
        t[:] = np.random.default_rng(0).standard_normal(t.shape, np.float32)
    cache.length[0] = length
    star = model.forward(Nodes(tokens, cache, [0], np.array([[-1] + [0] * (nodes - 1)]))).logits
    for n in (1, 63):
        pair = model.forward(Nodes(tokens[:, [0, n]], cache, [0])).logits
        assert np.array_equal(star[0, [0, n]], pair[0])
    chain = model.forward(Nodes(tokens, cache, [0])).logits
    for n in (0, 1, 37, 63):
        cache.length[0] = length + n
        assert np.array_equal(model.forward(Nodes(tokens[:, n : n + 1], cache, [0])).logits[0, 0], chain[0, n])


def test_memory_in_large_pages_begins_with_one_and_holds_zeros() -> None:
    for count in (1, 100, (2 << 20) - 1, 2 << 20, (5 << 20) + 3):
        memory = native.zeros_in_large_pages(count)
        assert (memory.shape, bool(memory.any())) == ((count,), False)
        assert count < 2 << 20 or memory.ctypes.data % (2 << 20) == 0
        memory.fill(1)


@pytest.mark.parametrize("weights", native.KINDS)
def test_weights_are_close_to_what_they_round(weights: str) -> None:
    """A model whose matrices are replaced by what the kernels hold gives, in transformers, the same logits."""
    theirs = build("qwen2")
    ours = NativeModel(theirs, weights=weights)
    head = "int8" if weights in ("int8", "int4") else weights
    with torch.no_grad():
        for module in theirs.modules():
            if isinstance(module, torch.nn.Linear):
                kind = head if module is theirs.lm_head else weights
                module.weight.copy_(torch.from_numpy(native.Packed([module.weight.detach().numpy()], kind).dense()))
        expected = theirs(torch.from_numpy(TEXT)).logits.numpy()
    got = ours.forward(Nodes(TEXT, ours.new_cache(1, 512), [0])).logits
    rounding = {"int8": 1e-3, "int4": 0.1}.get(weights, 1e-4)  # of the activations
    assert np.abs(got - expected).max() < rounding * np.abs(expected).max()


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("name", ["qwen3", "granite"])
def test_rounded_keys_and_values_are_close_and_the_same_as_on_the_general_path(name: str, kv_cache_dtype: str) -> None:
    theirs = build(name)
    exact, ours, general = (
        make(theirs, kv_cache_dtype=dtype)
        for make, dtype in ((NativeModel, "auto"), (NativeModel, kv_cache_dtype), (HFModel, kv_cache_dtype))
    )
    cache, twin = ours.new_cache(1, 512), general.new_cache(1, 512)
    got, other = ours.forward(Nodes(TEXT, cache, [0])).logits, general.forward(Nodes(TEXT, twin, [0])).logits
    expected = exact.forward(Nodes(TEXT, exact.new_cache(1, 512), [0])).logits
    for logits in (got, other):
        assert 0 < np.abs(logits - expected).mean() / np.abs(expected).mean() < 0.05
    for mine, its in zip(cache.layers[0], twin.layers[0], strict=True):
        assert mine.shape == its.shape
        assert mine.dtype == its.dtype == KV_CACHE_DTYPES[kv_cache_dtype]
        assert np.abs(unpack_vectors(mine) - unpack_vectors(its)).mean() < 1e-4  # a tie may fall the other way
    again = ours.forward(Nodes(TEXT, general.new_cache(1, 512), [0])).logits  # a cache carries its dtype
    assert np.array_equal(again, got)
    mixed = exact.forward(Nodes(TEXT, cache, [0])).logits
    assert np.array_equal(mixed, got)


@pytest.mark.parametrize(
    ("weights", "kv_cache_dtype", "ids"),
    [*(("auto", kept, None) for kept in KV_CACHE_DTYPES), *((w, "auto", SOME) for w in ("float32", "int8", "int4"))],
)
def test_draft_chains_are_the_loop_in_one_call(weights: str, kv_cache_dtype: str, ids: np.ndarray | None) -> None:
    """Rows of other lengths, depths, temperatures and seeds: each as the loop draws it alone, and the scratch too. From a head of
    some tokens, the noise is that of the token."""
    model = NativeModel(build("llama"), weights, head_ids=ids, kv_cache_dtype=kv_cache_dtype)
    cache = model.new_cache(4, 300)
    starts = {0: 40, 1: 250, 3: 7}
    for row, n in starts.items():
        model.forward(Nodes(TEXT[:, :n], cache, [row]), want="none")
        cache.commit([row], [range(n)])
    chains = [
        Chain(1, [3, 4], 7, 0.8, (9, 1, 2, 11)),
        Chain(0, [5], 3, 0.0),
        Chain(2, [1, 2, 3], 0, 0.5),
        Chain(3, [6, 7, 8, 9, 1], 5, 1.3, (-4, 0, 0, 12)),
    ]
    drawn = [d.tokens for d in model.draft_chains(cache, chains)]
    assert drawn[2] == []
    for c, got in zip(chains, drawn, strict=True):
        if not c.depth:
            continue
        start, end = starts[c.slot], starts[c.slot] + len(c.tokens) + c.depth - 1
        scratch = [t[c.slot, :, start:end].copy() for pair in cache.layers for t in pair]
        feed, expected = [*c.tokens], list[int]()
        seed, stream, step, position = c.noise
        for i in range(c.depth):
            logits = model.forward(Nodes(np.array([feed]), cache, [c.slot]), want="last").logits[0, 0]
            cache.commit([c.slot], [range(len(feed))])
            if c.temperature:
                noise = (seed, stream, step, position + i)
                expected.append(native.argmax_gumbel(logits, *noise, temperature=c.temperature))
            else:
                expected.append(argmax(logits))
            feed = [expected[-1]]
        assert got == expected
        assert ids is None or set(got) <= set(ids.tolist())
        alone = [t[c.slot, :, start:end] for pair in cache.layers for t in pair]
        assert all(np.array_equal(a, b) for a, b in zip(scratch, alone, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.3])
@pytest.mark.parametrize("ids", [None, "some"])
def test_a_chain_states_its_chances_and_ends_where_they_are_low(temperature: float, ids: str | None) -> None:
    model = NativeModel(build("llama"), head_ids=None if ids is None else SOME)
    cache, error, ended = model.new_cache(1, 64), LogitError(), set[int]()
    for first in range(1, 16):
        noise = (first, 0, 0, 5)
        [whole] = model.draft_chains(cache, [Chain(0, [first], 6, temperature, noise, error.scale)])
        [bare] = model.draft_chains(cache, [Chain(0, [first], 6, temperature, noise)])
        assert bare == (whole.tokens, [], [])
        nodes = Nodes(np.array([[first, *whole.tokens[:-1]]]), cache, [0])
        keys = model.forward(nodes).logits[0] / (temperature or 1.0)
        if temperature:
            keys += np.stack([native.gumbel(*noise[:3], 5 + i, VOCAB) for i in range(6)])
        best = -np.sort(-keys, 1)[:, :RIVALS]
        expected = np.exp(error.log_chances(best, [temperature] * 6))
        assert np.abs(whole.chances - expected[:, 0]).max() < 2e-3  # rivals that are far behind are left out
        [wide] = model.draft_chains(cache, [Chain(0, [first], 6, temperature, noise, error.scale, width=4)])
        assert wide[:2] == whole[:2]
        for line, family, chances in zip(keys, wide.siblings, expected, strict=True):
            others = np.argsort(-line)[1:4].tolist()
            assert [t for t, _ in family] == others[: len(family)]
            assert [chance for _, chance in family] == pytest.approx(chances[1 : len(family) + 1].tolist(), abs=2e-3)
            assert chances[len(family) + 1 : 4].sum() < 2e-3, "those that are far behind are left out"
        least = 0.1
        [cut] = model.draft_chains(cache, [Chain(0, [first], 6, temperature, noise, error.scale, least)])
        alive = np.cumprod(whole.chances)
        length = next((n for n, chance in enumerate(alive.tolist(), 1) if chance < least), 6)
        assert cut == (whole.tokens[:length], whole.chances[:length], [])
        ended.add(length)
    assert len(ended) > 2


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "granite"])  # tied, untied, scaled logits
def test_a_head_of_some_tokens(name: str, weights: str) -> None:
    """Its logits are those of the whole head, bit for bit, and -inf for every other token."""
    raw = build(name).to(torch.bfloat16)  # the embedding has the same values in a table and in a packed head
    whole, some = NativeModel(raw, weights), NativeModel(raw, weights, head_ids=SOME)
    masked = whole.forward(Nodes(TEXT, whole.new_cache(1, 512), [0])).logits
    masked[..., [t for t in range(VOCAB) if t not in SOME]] = -np.inf
    for want in ("all", "last", "none"):
        logits = some.forward(Nodes(TEXT, some.new_cache(1, 512), [0]), want=want).logits  # type: ignore[arg-type]
        assert np.array_equal(logits, {"all": masked, "last": masked[:, -1:], "none": masked[:, :0]}[want])
    assert some.vocab_size == VOCAB
    assert whole.weight_bytes - some.weight_bytes == (7 - 2) * 16 * whole.program.hidden * (
        4 if weights == "float32" else 2
    )


@pytest.mark.parametrize(
    ("ids", "words"),
    [([], "at least one"), ([3, 3], "ascending"), ([4, 3], "ascending"), ([0, VOCAB], "0 to 96"), ([-1, 3], "0 to 96")],
)
def test_a_head_of_tokens_that_are_none(ids: list[int], words: str) -> None:
    for make in (NativeModel, HFModel):
        with pytest.raises(ValueError, match=words):
            make(build("llama"), head_ids=np.array(ids, np.int64))


# Tokens, parents, taps, and what the error says.
BROKEN: list[tuple[Any, Any, tuple[int, ...], str]] = [
    ([[1, 99]], None, (), r"token 99 .* vocabulary of 97"),
    ([[1, 2]], [[-1, 1]], (), "node 1 of entry 0 has parent 1"),
    ([[1, 2]], [[-2, -2]], (), "every entry has a root"),
    ([[]], None, (), "one token at least"),
    ([[1, 1, 1]] * 2, None, (), "give each slot a line"),
    ([[1, 2]], [[-1]], (), "one parent per node"),
    ([[1]], [[-1, -2, 1]], (), "node 2 of entry 0 has parent 1"),  # node 1 is padding
    ([[1, 2]], None, (7,), "taps are layers"),
]


def test_errors_name_what_is_wrong() -> None:
    model = NativeModel(build("llama"))
    cache = model.new_cache(1, 64)
    for tokens, parents, taps, words in BROKEN:
        with pytest.raises(ValueError, match=words):
            lines = None if parents is None else np.array(parents)
            model.forward(Nodes(np.array(tokens, np.int64), cache, [0], lines), taps=taps)
    with pytest.raises(ValueError, match="fit"):
        cache.commit([0], [range(65)])
    with pytest.raises(ValueError, match="token 99"):
        model.draft_chains(cache, [Chain(0, [99], 2)])
    with pytest.raises(IndexError, match="slots are 0 to 0"):
        model.forward(Nodes(np.array([[1]]), cache, [-1]))
    small = NativeModel(tiny("llama"))
    other = small.new_cache(1, 64)
    small.forward(Nodes(np.array([[1]]), other, [0]))
    with pytest.raises(ValueError, match="another model"):
        model.forward(Nodes(np.array([[1]]), other, [0]))
