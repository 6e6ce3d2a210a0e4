"""GGUF files: each architecture gives transformers' logits on the values in the file, in every format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architectures import FAMILIES, LLAMA3, VOCAB, prompts, tiny
from gguf_files import CORRECTIONS, tokenizer_metadata, write_file, write_gguf
from light import Late, torch, transformers

from outrider import LLM, SamplingParams
from outrider.core.extras import MissingExtra
from outrider.kernels import cpu as native
from outrider.models import checkpoint
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.gguf.model import sizes
from outrider.models.gguf.reader import PACKED_FORMATS, read
from outrider.models.load import Loaded
from outrider.models.load import load as load_model
from outrider.models.native.model import NativeModel, supports
from outrider.models.nodes import Nodes

hf = Late("outrider.models.hf.model")

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = FAMILIES["phi3-long"][1]["rope_parameters"] | {"original_max_position_embeddings": 64}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # rows of whole blocks, in every format
_LATENT = {"moe_intermediate_size": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32}
_SHAPE = {"hidden_size": 64, "intermediate_size": 96}


def load(model: Any, **given: Any) -> Loaded:
    """With keys and values in float32, as the modelling code of transformers has them."""
    settings: dict[str, Any] = {"kv_cache_dtype": "float32"} | given
    return load_model(model, **settings)


_MOE = {"moe_intermediate_size": 32}
# name: (model type, changes of the tiny model). The first ones are those of `test_families.py`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: FAMILIES[name]
        for name in (
            "llama", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma4", "phi3", "granite", "stablelm", "olmo2", "olmo3",
            "starcoder2", "ernie4_5", "arcee", "phi", "nemotron", "falcon_h1", "lfm2", "mixtral", "olmoe", "gpt_oss",
            "granitemoe", "qwen3_5",
        )
    },
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}, "head_dim": 16}),
    "llama-linear": ("llama", {"rope_parameters": _LINEAR}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-small": ("mistral", {"sliding_window": None}),
    "qwen2vl": ("qwen2", {}),
    "qwen3vl": ("qwen3", {}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": _YARN}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "layer_types": None}),
    "gemma4-equal": ("gemma4_text", FAMILIES["gemma4-equal"][1] | FAMILIES["gemma4-experts"][1] | _MOE),
    "phi3-partial": ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "phi3-long": ("phi3", {"rope_parameters": _LONG, "original_max_position_embeddings": 64, "hidden_size": 32}),
    "stablelm-2": ("stablelm", {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    "olmo": ("olmo", {"clip_qkv": 1.5}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": None}),
    "glm4": ("glm4", {"attention_bias": True}),
    "command-r": FAMILIES["cohere-norms"],
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "layer_types": None}),
    "internlm2": ("llama", {}),
    "exaone4": ("exaone4", {"num_hidden_layers": 5, "layer_types": None, "sliding_window": 6}),
    "seed_oss": ("seed_oss", {"attention_bias": True}),
    "granite-hybrid": ("granitemoehybrid", FAMILIES["granite_hybrid"][1] | {"mamba_expand": 1}),
    "granite-hybrid-moe": ("granitemoehybrid", {"mamba_expand": 1, "residual_multiplier": 0.7}),
    "mamba2": ("mamba2", {"hidden_size": 32}),
    "nemotron-h": ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"], "head_dim": 16, "mamba_head_dim": 16}),
    "nemotron-h-moe": ("nemotron_h", {"head_dim": 16, "mamba_head_dim": 16, "moe_latent_size": 32} | _MOE),
    "bamba": ("bamba", {"mamba_expand": 1}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "deepseek-v3": ("deepseek_v3", {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, **_LATENT}),
    "deepseek-v2": ("deepseek_v2", {"q_lora_rank": None, **_LATENT}),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENT),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True} | _MOE),
    "qwen2_moe": ("qwen2_moe", {"shared_expert_intermediate_size": 64} | _MOE),
    "ernie4_5_moe": ("ernie4_5_moe", _MOE),
    "lfm2_moe": ("lfm2_moe", _MOE),
    "qwen35moe": ("qwen3_5_moe_text", {"linear_num_value_heads": 6, "shared_expert_intermediate_size": 64} | _MOE),
    "qwen3next": ("qwen3_next", {"linear_num_value_heads": 6, "shared_expert_intermediate_size": 64} | _MOE),
    "dots1": ("dots1", _MOE),
}  # fmt: skip

_OTHER_NAMES = {
    "mistral-small": "mistral3",
    "qwen2vl": "qwen2vl",
    "qwen3vl": "qwen3vl",
    "internlm2": "internlm2",
    "nemotron-h-moe": "nemotron_h_moe",
}


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    return torch.from_numpy(model.forward(Nodes(np.array([ids]), model.new_cache(1, 64), [0])).logits[0])


def far(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The difference, relative to the reference."""
    return float((ours - reference).norm() / reference.norm())


def expected(raw: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return raw(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_an_architecture_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    kind, changes = MODELS[name]
    raw, file = tiny(kind, **_SHAPE | changes), tmp_path / "model.gguf"
    if name == "stablelm-2":  # norms without weights of their own would hide a wrong order
        for n, p in raw.named_parameters():
            if "layernorm.norms" in n:
                p.data.normal_()
    for n, b in raw.named_buffers():
        if n.endswith((*CORRECTIONS, "layer_scalar")):
            b += torch.randn(b.shape) * 0.3
    named = {"general.architecture": _OTHER_NAMES[name]} if name in _OTHER_NAMES else None
    form = "F32" if kind == "falcon_h1" else "Q8_0"  # its matrices are multiplied first
    write_gguf(raw, file, form, metadata=named)
    loaded = load(file, dtype="float32")
    assert loaded.weights == "float32"
    assert isinstance(loaded.model, NativeModel) == (supports(raw) is None)
    [ids] = prompts(12)
    # transformers' own Nemotron-H limits its time steps in a prompt, and not in the tokens that follow
    reference = logits(hf.HFModel(raw), ids) if kind == "nemotron_h" else expected(raw, ids)
    torch.testing.assert_close(logits(loaded.model, ids), reference, atol=3e-4, rtol=1e-4)


# `test_kernels.py` has the values and the products of each format.
@pytest.mark.parametrize(
    "kind",
    [
        *("F32", "BF16", "Q4_0", "Q6_K"),
        *(pytest.param(n, marks=pytest.mark.long) for n in ("F16", *PACKED_FORMATS) if n not in ("Q4_0", "Q6_K")),
    ],
)
def test_a_format_gives_the_logits_of_its_values(kind: str, tmp_path: Path) -> None:
    raw, file = tiny("llama", **_WIDE), tmp_path / "model.gguf"
    write_gguf(raw, file, kind)
    [ids] = prompts(9)
    assert far(logits(load(file, dtype="float32").model, ids), expected(raw, ids)) < 3e-5
    own = load(file)
    assert own.weights == {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(kind, "gguf")
    assert far(logits(own.model, ids), expected(raw, ids)) < 0.08  # the activations are rounded


@pytest.mark.parametrize("kind", ["llama", "olmo"])  # the native step, the general path
def test_int8_and_bfloat16_of_a_file_are_those_of_its_values(kind: str, tmp_path: Path) -> None:
    """Rounded activations are not taken for another attention: Gemma 3 270M in Q4_K_M differs by 0.05 from its own."""
    raw, file = tiny(kind, **_SHAPE), tmp_path / "model.gguf"
    write_gguf(raw, file, "Q5_1")
    models = load(file).model, load(file, dtype="float32").model
    assert [getattr(model, "tolerance", None) for model in models] == [5e-4 if kind == "olmo" else None] * 2
    raw.save_pretrained(tmp_path / "folder")
    [ids] = prompts(9)
    for options in ({"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}):
        ours, folder = load(file, **options), load(tmp_path / "folder", **options)
        assert ours.weights == folder.weights
        # an embedding in blocks is packed, one in floats is not; the norms of a folder get its dtype
        assert far(logits(ours.model, ids), logits(folder.model, ids)) < 0.05


def test_a_file_of_many_formats(tmp_path: Path) -> None:
    raw, file = tiny("llama", **_WIDE), tmp_path / "model.gguf"
    formats = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q8_0", "attn_k": "F16", "ffn_up": "F32"}
    write_gguf(raw, file, lambda name: next((f for n, f in formats.items() if n in name), "Q4_K"))
    [ids] = prompts(9)
    assert far(logits(load(file, dtype="float32").model, ids), expected(raw, ids)) < 3e-5
    assert far(logits(load(file).model, ids), expected(raw, ids)) < 0.08


@pytest.mark.parametrize("kind", ["IQ2_XXS", "TQ2_0"])
def test_other_formats_become_bfloat16_with_a_warning(kind: str, tmp_path: Path) -> None:
    raw, file = tiny("llama", **_WIDE), tmp_path / "model.gguf"
    write_gguf(raw, file, kind)
    [ids] = prompts(9)
    with pytest.warns(RuntimeWarning, match=f"has weights in {kind}.*bfloat16.*GiB"):
        loaded = load(file)
    for parameter in raw.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.bfloat16().float()
    assert loaded.weights == "bfloat16"
    assert far(logits(loaded.model, ids), expected(raw, ids)) < 3e-5


@pytest.mark.parametrize(("name", "kind"), [("llama", "Q6_K"), ("llama-tied", "Q8_0"), ("olmo", "Q4_0")])
def test_a_head_of_some_tokens_of_a_file(name: str, kind: str, tmp_path: Path) -> None:
    """Rows of blocks: the logits of the whole head, bit for bit if the embedding is not tied to it."""
    file, some = tmp_path / "model.gguf", np.arange(0, VOCAB, 3)
    write_gguf(tiny(MODELS[name][0], **MODELS[name][1] | _WIDE), file, kind)
    [ids] = prompts(9)
    whole = logits(load(file).model, ids)
    part = logits(load(file, reduce=lambda contents: (None, some)).model, ids)
    assert far(part[:, some], whole[:, some]) < (1e-9 if name == "llama" else 0.03)
    assert bool(part[:, [t for t in range(VOCAB) if t % 3]].isneginf().all())


def test_a_tied_embedding_is_packed_once_and_nothing_of_the_file_stays_mapped(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for kind, tied in (("llama", True), ("llama", False), ("olmo", True)):
        write_gguf(tiny(kind, **_SHAPE, tie_word_embeddings=tied), file, "Q8_0")
        model: Any = load(file).model
        assert str(file) not in Path("/proc/self/maps").read_text()
        if kind == "llama":
            assert (model.program.table is model.program.head) == tied


def test_a_draft_model_in_a_file_keeps_the_text(tmp_path: Path) -> None:
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    source = transformers.AutoModelForCausalLM.from_pretrained(builtin_folder("builtin:code"), dtype=torch.float32)
    tokens = tokenizer_metadata(transformers.AutoTokenizer.from_pretrained(builtin_folder("builtin:code")), "gpt-2")
    write_gguf(source, target, "Q8_0", metadata=tokens)
    write_gguf(source, draft, "Q4_0", metadata=tokens)
    plain = LLM(str(target)).generate("def add(a, b):", SamplingParams(temperature=0, max_tokens=24))
    fast = LLM(str(target), speculative_config={"method": "draft_model", "model": str(draft)}).generate(
        "def add(a, b):", SamplingParams(temperature=0, max_tokens=24)
    )
    assert fast[0].outputs[0].token_ids == plain[0].outputs[0].token_ids


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_without_kernels_the_blocks_become_float32(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw, file = tiny(kind, **_SHAPE), tmp_path / "model.gguf"
    write_gguf(raw, file, "Q5_0")
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why", lambda: "a test")
    loaded = load(file)
    assert (loaded.weights, type(loaded.model)) == ("float32", hf.HFModel)
    [ids] = prompts(9)
    assert far(logits(loaded.model, ids), expected(raw, ids)) < 3e-5


@pytest.mark.parametrize(
    ("kind", "formats"),
    [("gpt_oss", ("Q8_0",) * 3), ("gpt_oss", ("MXFP4",) * 3), ("mixtral", ("Q8_0", "Q5_0", "F16"))],
)
def test_experts_keep_the_formats_of_a_file(kind: str, formats: tuple[str, str, str], tmp_path: Path) -> None:
    raw, file = tiny(kind, **_SHAPE), tmp_path / "model.gguf"
    of = dict(zip(("gate_exps", "up_exps", "down_exps"), formats, strict=True))
    write_gguf(raw, file, lambda name: next((f for n, f in of.items() if n in name), "F32"))
    [ids] = prompts(9)
    loaded = load(file)
    assert far(logits(loaded.model, ids), expected(raw, ids)) < 0.02
    assert far(logits(load(file, dtype="float32").model, ids), expected(raw, ids)) < 3e-5


@pytest.mark.parametrize("lost", ["blk.1.ffn_up_exps.weight", "blk.0.ffn_down_exps.bias"])
def test_a_file_without_a_tensor_of_its_experts_is_refused(lost: str, tmp_path: Path) -> None:
    file, broken = tmp_path / "model.gguf", tmp_path / "broken.gguf"
    write_gguf(tiny("gpt_oss", **_SHAPE), file, "Q8_0")
    whole = read([file])
    tensors = {n: (np.asarray(whole.floats(n)), "F32") for n in whole.tensors if n != lost}
    write_file(broken, whole.metadata, tensors)
    with pytest.raises(ValueError, match=lost.rpartition(".")[0] if "weight" in lost else "biases of experts"):
        load(broken)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "attention.key_length"])
def test_numbers_beyond_the_tensors_are_refused_before_anything_is_made_of_them(key: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny("llama"), file, metadata={f"llama.{key}": 2**31})
    with pytest.raises(
        ValueError, match=rf"llama.{key} is 2147483648, and the file has 21 tensors of at most \d+ rows"
    ):
        load(file)


def test_a_model_that_transformers_runs_needs_memory_for_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny("olmo", **_SHAPE), file, "Q4_0")
    monkeypatch.setattr(checkpoint, "free_memory", lambda _: 1.2 * sizes(read([file])).bytes("gguf"))
    with pytest.raises(MemoryError, match="GiB as bfloat16"):
        load(file)


def test_without_transformers_a_file_runs_natively_or_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native_file, other = tmp_path / "llama.gguf", tmp_path / "olmo.gguf"
    write_gguf(tiny("llama"), native_file)
    write_gguf(tiny("olmo"), other)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert isinstance(load(native_file).model, NativeModel)
    with pytest.raises(MissingExtra, match=r"a olmo, .* needs transformers, .*pip install '\.\[torch\]'"):
        load(other)
