"""Keys and values of 8 bit in the engine: the texts of plain decoding with such a cache, in a quarter of the memory."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from crossed import crossed
from engines import read, run, settled

from outrider import LLM
from outrider.core.params import SamplingParams
from outrider.engine import Engine
from outrider.engine.memory import per_token
from outrider.engine.request import Request
from outrider.kernels import cpu as native
from outrider.kernels.probabilities import log_softmax
from outrider.models.load import load
from outrider.models.nodes import Nodes

START = "class Node:\n    def __init__(self, left, right):\n        self.left = left\n        self.right = right\n\n"
ENDS = [
    "    def depth(self):\n",
    "    def __repr__(self):\n",
    "    def walk(self):\n        if self.left:\n",
    "    def size(",
]

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@cache
def small() -> LLM:
    return LLM("builtin:code", kv_cache_dtype="int8", max_model_len=100, any_method=True)


def requests(llm: LLM, prompts: list[str]) -> list[Request]:
    return [llm.requests(llm.encode(p), PARAMS.with_(temperature=i % 2, seed=i))[0] for i, p in enumerate(prompts)]


@cache
def expected() -> tuple[list[int], ...]:
    llm = LLM(small().loaded, max_num_seqs=1, max_model_len=100)
    given = [PARAMS.with_(temperature=i % 2, seed=i) for i in range(len(ENDS))]
    return tuple(out.outputs[0].token_ids for out in llm.generate([START + end for end in ENDS], given))


@pytest.mark.skipif(not native.available(), reason="bit-identical rows need the native kernels")
@pytest.mark.parametrize(
    ("method", "room"),
    crossed(
        ["none", "layer_skip", "quantized_self", "suffix"],
        [(0, None), (1 << 20, None), (40_000, None), (1 << 20, 140)],
        share=0.0,
    ),
    ids=str,
)
def test_prefix_cache_and_preemption_change_no_token(method: str, room: tuple[int, int | None]) -> None:
    """room: bytes of the prefix cache, and tokens of all sequences."""
    prefix_bytes, kv_tokens = room
    config = {"method": method, "controller": "fixed", "num_speculative_tokens": 4}
    if method == "layer_skip":
        config["layers"] = [0, 1, 2]
    llm = LLM(small().loaded, speculative_config=config, max_num_seqs=3, max_model_len=100, any_method=True)
    eng = Engine(llm.runtime, prefix_bytes=prefix_bytes, kv_tokens=kv_tokens)
    assert eng.decoder.cache.dtype == "int8"
    for _ in range(1 + bool(prefix_bytes)):  # the second time from the prefix cache
        rows = run(eng, [read(r) for r in requests(llm, [START + end for end in ENDS])])
        assert [r.output for r in rows] == list(expected())
    assert (eng.stats.prefix_hits > 0) == bool(prefix_bytes)
    assert (eng.stats.preemptions > 0) == bool(kv_tokens)
    settled(eng)


def test_a_token_takes_a_quarter_of_the_memory_and_the_error_counts_it() -> None:
    wide, narrow = load("builtin:code").model, small().loaded.model
    assert narrow.kv_cache_dtype == "int8"
    assert per_token(wide) * 36 == per_token(narrow) * 128  # a block of 32: 32 bytes and a scale, or 32 floats
    fits = per_token(narrow) * 8 * (400 + 64)
    eng = Engine(LLM(small().loaded, max_model_len=400, any_method=True).runtime, prefix_bytes=0, memory_limit=fits)
    assert eng.stats.kv_bytes == fits
    settled(eng)
    with pytest.raises(ValueError, match=f"{per_token(wide)} bytes a token"):
        Engine(LLM("builtin:code", max_model_len=400, any_method=True).runtime, prefix_bytes=0, memory_limit=fits)


def test_rounding_changes_the_logits_of_the_built_in_model_little() -> None:
    prompt = small().encode(START * 3)
    ids, out = np.array([prompt]), []
    for dtype in ("auto", "bfloat16", "int8"):
        model = load("builtin:code", dtype="float32", kv_cache_dtype=dtype).model
        out.append(log_softmax(model.forward(Nodes(ids, model.new_cache(1, 400), [0])).logits[0]))
    exact, half, eighth = out
    for rounded, bound in ((half, 1e-4), (eighth, 1e-3)):
        divergence = (np.exp(exact) * (exact - rounded)).sum(-1).mean()
        assert 0 < float(divergence) < bound


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"kv_cache_dtype must be auto, float32, bfloat16, int8; got 'int88' \(did you mean 'int8'"
    ):
        LLM("builtin:code", kv_cache_dtype="int88")
