"""Every family on the native step: the logits and taps of transformers' code, and the same bits in any company.

A row is a tiny model. `test_gguf.py` writes the same models to files.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from architectures import FAMILIES, MUP, prompts, tiny
from crossed import crossed
from histories import check_histories
from row_checks import Guided, assert_rows_do_not_depend_on_their_neighbours, one_at_a_time, outputs
from transformers import PreTrainedModel

from outrider.core.tree import tree
from outrider.kernels import cpu as native
from outrider.models.base import EMBEDDING, FINAL_NORM
from outrider.models.cache import KV_CACHE_DTYPES
from outrider.models.hf.model import HFModel
from outrider.models.native import step
from outrider.models.native.model import NativeModel, supports
from outrider.models.nodes import Nodes

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))

# Settings that no family's file names: (model type, changes, a word of the reason).
OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu"}, "relu"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "rotary"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "attend to later ones"),
    ("stablelm", {"qk_layernorm": True}, "norm for each head"),
    ("olmoe", {"clip_qkv": 8.0}, "clips"),
    ("mixtral", {"hidden_act": "relu"}, "relu"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 5 experts"),
    ("falcon_h1", MUP | {"time_step_limit": (0.0, 0.5)}, "time_step_limit"),
    ("bamba", {"time_step_limit": (0.0, 0.5)}, "time_step_limit"),
    ("nemotron_h", {"head_dim": 8, "mlp_hidden_act": "gelu"}, "gelu"),
]
TAPS = (EMBEDDING, 0, 1, FINAL_NORM)
# What a family needs a kernel for. Their nodes are tried in any company, and in every precision.
VARIED = ("llama3-odd", "qwen2-odd", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_moe", "falcon_h1", "qwen3_next")
# Other ways in which ops follow each other.
ORDERS = (
    "cohere",
    "gemma4",
    "gemma4-experts",
    "granite_hybrid-moe",
    "lfm2",
    "mamba2",
    "nemotron_h-latent",
    "phi",
    "phi3-long",
)
PRECISIONS = [*((w, "auto") for w in native.KINDS), *(("bfloat16", k) for k in KV_CACHE_DTYPES)]


@cache
def raw_of(name: str) -> PreTrainedModel:
    """With norms, biases and corrections that do something: ones and zeros would hide a wrong place of a weight."""
    kind, changes = FAMILIES[name]
    raw = tiny(kind, **changes)
    for where, parameter in raw.named_parameters():
        if "norm" in where or (where.endswith("_bias") and not where.endswith("dt_bias")):
            parameter.data += torch.randn(parameter.shape) * 0.3
    for where, buffer in raw.named_buffers():
        if where.endswith(("correction_bias", "expert_bias")):
            buffer.normal_(0, 0.3)
        elif where.endswith("layer_scalar"):
            buffer += torch.rand(1)
    return raw


@cache
def native_of(name: str, weights: str = "float32", kv_cache_dtype: str = "auto") -> NativeModel:
    return NativeModel(raw_of(name), weights, kv_cache_dtype=kv_cache_dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gives_the_logits_and_taps_of_transformers(name: str) -> None:
    """Of a text and of a tree, whose nodes are out of order and padded."""
    ours, reference = native_of(name), HFModel(raw_of(name), weights="float32")
    [text, ids] = prompts(30, 9)
    grown = tree([[(n, p) for n, p in zip(ids, [-1, 0, 1, 1, 3, 2, 0, 6, 5], strict=True)], [(ids[0], -1)]])
    for tokens, parents in ((np.array([text]), None), grown):
        slots = [*range(len(tokens))]
        pair = [
            m.forward(Nodes(tokens, m.new_cache(len(slots), 64), slots, parents), taps=TAPS) for m in (ours, reference)
        ]
        real = slice(None) if parents is None else parents >= -1
        for mine, right in zip(*pair, strict=True):
            assert mine is not None
            assert right is not None
            np.testing.assert_allclose(mine[real], right[real], atol=1e-4 * np.abs(right).max(), rtol=0)
    assert ours.program.recurrent or ours.windows == reference.windows


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in VARIED + ORDERS else pytest.mark.long) for n in FAMILIES]
)
def test_a_node_of_a_family_has_the_same_bits_in_any_company(name: str) -> None:
    model, texts = native_of(name), prompts(30, 18)
    assert_rows_do_not_depend_on_their_neighbours(model)
    check_histories(model, 6, samples=2)
    plain = outputs(model, texts)
    assert outputs(model, texts, Guided(plain)) == plain


@pytest.mark.parametrize(("name", "precision"), crossed(VARIED, PRECISIONS, share=0.1))
def test_a_node_has_the_same_bits_in_every_precision(name: str, precision: tuple[str, str]) -> None:
    """Random trees, in random slots, in pieces; and each instruction set, on one thread and two."""
    model, isa, threads, [ids] = native_of(name, *precision), native.isa(), native.num_threads(), prompts(40)
    check_histories(model, 6, samples=3)
    alone = one_at_a_time(model, ids)
    try:
        for other in native.isas():
            for count in (1, 2):
                native.set_num_threads(count)
                if native.use_isa(other):
                    logits = model.forward(Nodes(np.array([ids]), model.new_cache(1, 64), [0])).logits[0]
                    assert np.array_equal(logits, alone), (other, count)
    finally:
        native.use_isa(isa)
        native.set_num_threads(threads)


@pytest.mark.parametrize("kept", [1, step.KEPT])
@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_5"])
def test_after_any_history_the_state_is_that_of_the_tokens(
    name: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "KEPT", kept)
    check_histories(native_of(name), 30)


@pytest.mark.long
def test_ten_thousand_histories() -> None:
    for seed in range(100):
        check_histories(native_of("falcon_h1"), 50, seed)
        check_histories(native_of("qwen3_5"), 50, seed)


def test_a_cache_of_other_states_or_nodes_is_refused() -> None:
    """`test_states.py` says which paths can be committed."""
    model = native_of("lfm2")
    cache, more = model.new_cache(1, 64), np.array([[9]])
    with pytest.raises(RuntimeError, match="fewer nodes"):
        model.forward(Nodes(more, cache, [0], np.array([[-1, 0, 1, 2, 3, 4, 5]])))
    with pytest.raises(ValueError, match="another model"):
        model.forward(Nodes(more, native_of("bamba").new_cache(1, 64), [0]))


@pytest.mark.parametrize(("dtype", "close"), [("auto", 1e-5), ("bfloat16", 0.01), ("int8", 0.03)])
def test_the_cache_of_a_latent_holds_nothing_else(dtype: str, close: float) -> None:
    """A value is the first numbers of its key. Fewer bits choose other experts now and then."""
    raw, [ids] = raw_of("deepseek_v3"), prompts(40)
    model, reference, tokens = (
        native_of("deepseek_v3", kv_cache_dtype=dtype),
        HFModel(raw, weights="float32"),
        np.array([ids]),
    )
    cache = model.new_cache(1, 64)
    logits, exact = (
        m.forward(Nodes(tokens, c, [0])).logits for m, c in ((model, cache), (reference, reference.new_cache(1, 64)))
    )
    numbers = raw.config.kv_lora_rank + raw.config.qk_rope_head_dim
    assert cache.bytes_per_token == 2 * {"auto": 4 * numbers, "bfloat16": 2 * numbers, "int8": numbers + 4}[dtype]
    assert np.abs(logits - exact).mean() < close * np.abs(exact).max()


@pytest.mark.parametrize("length", [16, 17])
def test_the_longest_text_of_a_cache_chooses_the_angles_of_longrope(length: int) -> None:
    """A text of one length has other angles in a cache for longer texts, and the same on both sides of a border."""
    ours, reference, [text] = native_of("phi3-long"), HFModel(raw_of("phi3-long"), weights="float32"), prompts(16)
    pair = [m.forward(Nodes(np.array([text]), m.new_cache(1, length), [0])).logits for m in (ours, reference)]
    np.testing.assert_allclose(pair[0], pair[1], atol=1e-4 * np.abs(pair[1]).max(), rtol=0)
    other = ours.forward(Nodes(np.array([text]), ours.new_cache(1, 33 - length), [0])).logits
    assert np.abs(pair[0] - other).max() > 1e-2
    cache, parts = ours.new_cache(1, length), list[np.ndarray]()
    for a, b in ((0, 9), (9, 16)):
        parts.append(ours.forward(Nodes(np.array([text[a:b]]), cache, [0])).logits)
        cache.commit([0], [range(b - a)])
    assert np.array_equal(np.concatenate(parts, 1), pair[0])


@pytest.mark.parametrize(("kind", "changes", "reason"), OTHERS)
def test_a_setting_that_a_family_does_not_know_is_left_to_transformers(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    raw = tiny(kind, **changes)
    assert reason in str(supports(raw))
    with pytest.raises(ValueError, match="HFModel can"):
        NativeModel(raw)
