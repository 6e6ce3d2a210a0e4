"""MTP layers of a checkpoint: the numbers of transformers' own MTP code, texts that do not change, and what cannot be.

The models are those of the shapes, tiny and random. DeepSeek-V3 and GLM-4.5 keep the layer behind their last one, Qwen3-Next
keeps it apart.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import mtp_layer, write_gguf
from helpers import Loop, configured, plain_texts, request
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.modeling_layers import MtpLayer, MtpModel

from outrider import SamplingParams
from outrider.control import Fixed
from outrider.core.types import Array
from outrider.drafters import make_drafters
from outrider.drafters.config import DrafterSetup, SpeculativeConfig
from outrider.drafters.heads.eagle import Pairs
from outrider.drafters.heads.mtp import mtp_model
from outrider.drafters.method import level_cost
from outrider.drafters.model.grower import TreeDrafter
from outrider.engine.request import Request
from outrider.kernels import cpu as native
from outrider.models.base import FINAL_NORM
from outrider.models.hf.model import HFModel
from outrider.models.load import Loaded, load, pack
from outrider.models.nodes import Nodes
from outrider_lab.handover import exports
from outrider_lab.tune.candidates import TuneInputs, candidates

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
    "moe_intermediate_size": 16, "num_experts_per_tok": 2,
}  # fmt: skip
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "n_shared_experts": 1, "topk_group": 1, "first_k_dense_replace": 1}
LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "deepseek_v3": lambda: DeepseekV3Config(
        **SHAPE, **ROUTED, num_key_value_heads=4, n_group=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16,
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SHAPE, **ROUTED, num_key_value_heads=2, head_dim=8, n_group=1, use_qk_norm=True
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, **LINEAR, layer_types=["linear_attention", "full_attention"],
        mtp_num_hidden_layers=1,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, shared_expert_intermediate_size=16, num_experts=4,
        layer_types=["full_attention"] * 2, num_mtp_layers=1,
    ),
}  # fmt: skip
PROMPT = [(7 * i * i + 3 * i + 11) % 95 for i in range(40)]


def random_(model: torch.nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.15 if p.dim() > 1 else torch.rand_like(p) + 0.5


def saved(model: Any, folder: Path) -> dict[str, Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def checkpoint(kind: str, config: Any, out: Path, extra: Path) -> Path:
    """A random checkpoint with an MTP layer. Its tensors are those of a model of one layer, under the names of real checkpoints.

    extra: an empty folder.
    """
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config).eval()
    random_(model)
    weights = saved(model, out)
    one = copy.deepcopy(model.config)
    one.num_hidden_layers, apart = 1, kind.startswith("qwen3")
    one.first_k_dense_replace, one.layer_types = 0, ["full_attention"] if apart else None
    layer = AutoModelForCausalLM.from_config(one)
    random_(layer)
    own = {n.removeprefix("model.layers.0."): t for n, t in saved(layer, extra).items() if "layers.0." in n}
    prefix, inner = ("mtp.", "mtp.layers.0.") if apart else ("model.layers.2.", "model.layers.2.")
    weights |= {f"{inner}{n}": t for n, t in own.items()}
    names = (
        ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        if apart
        else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    )
    for name in names:
        shape = (32, 64) if name in ("fc", "eh_proj") else (32,)
        weights[f"{prefix}{name}.weight"] = torch.randn(shape) * 0.2 if len(shape) > 1 else torch.rand(shape) + 0.5
    if (
        kind == "deepseek_v3"
    ):  # its own output head and embedding, as the released checkpoints have; copies of the target's
        weights |= {
            f"{prefix}shared_head.head.weight": weights["lm_head.weight"].clone(),
            f"{prefix}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each shape."""
    new = tmp_path_factory.mktemp
    return {kind: checkpoint(kind, config(), new(kind), new("layer")) for kind, config in CONFIGS.items()}


def target(folder: Path, kind: str) -> Loaded:
    if kind != "qwen3_next":
        return load(str(folder), device="cpu")
    raw: Any = AutoModelForCausalLM.from_pretrained(folder)
    vars(raw)["_is_stateful"] = False  # transformers says so of the family; all layers here are attention
    return Loaded(HFModel(raw), str(folder), None, (), "float32", str(folder), raw.config)


def pairs(loaded: Loaded) -> tuple[Tensor, Array]:
    """(tokens x_1 to x_n [1, n], states h_0 to h_{n-1} [1, n, hidden])."""
    ids = torch.tensor([PROMPT])
    cache = loaded.model.new_cache(1, 64)
    features = loaded.model.forward(Nodes(ids, cache, [0]), taps=(FINAL_NORM,)).features
    assert features is not None
    return ids[:, 1:], features[:, :-1]


@torch.no_grad()
def theirs(folder: Path, kind: str, tokens: Tensor, states: Array) -> Array:
    """[n, vocab]: the logits of transformers' own MTP code, on the same pairs."""
    raw: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    positions = torch.arange(tokens.shape[1])[None]
    mask = torch.full((1, 1, tokens.shape[1], tokens.shape[1]), -1e9).triu(1)
    if kind.startswith("qwen3"):  # transformers reads none of these, so its layer takes the tensors by hand
        own = {n: t for n, t in load_file(folder / "model.safetensors").items() if n.startswith("mtp.")}
        block = AutoModelForCausalLM.from_config(
            type(raw.config)(**{**raw.config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
        )
        norm, layer = type(raw.model.norm), MtpLayer(block.config, type(raw.model.layers[0]), type(raw.model.norm), 0)
        assert isinstance(layer.post_norm, norm)
        names = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "post_norm"}
        layer.load_state_dict({f"{o}.weight": own[f"mtp.{t}.weight"] for t, o in names.items()}, strict=False)
        inner = {n.removeprefix("mtp.layers.0."): t for n, t in own.items() if n.startswith("mtp.layers.0.")}
        state = {f"model.layers.0.{n}": t for n, t in inner.items()}
        loaded: Any = type(raw).from_pretrained(None, config=block.config, state_dict=state)
        layer.mtp_block = loaded.model.layers[0]
        layer.eval()
    else:
        vars(raw)["_keys_to_ignore_on_load_unexpected"] = [r"model\.layers\.2.*"]
        model = MtpModel.from_pretrained(raw).eval()
        layer = model.layers[0]
    embedded = raw.get_input_embeddings()(tokens)
    turned = raw.model.rotary_emb(embedded, position_ids=positions)
    out = layer(
        embedded,
        torch.as_tensor(states),
        position_embeddings=turned,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=None,
    )
    return raw.lm_head(out)[0].numpy()


@pytest.mark.parametrize("kind", CONFIGS)
def test_numbers_are_those_of_transformers(kind: str, folders: dict[str, Path]) -> None:
    loaded = target(folders[kind], kind)
    tokens, states = pairs(loaded)
    model = mtp_model(loaded, 64)
    got = model.forward(Nodes(tokens, model.new_cache(1, 64), [0]), states)
    want = theirs(folders[kind], kind, tokens, states)
    assert float(want.std()) > 0.05
    assert np.allclose(got.logits[0], want, atol=1e-4)
    last = model.forward(Nodes(tokens, model.new_cache(1, 64), [0]), states, want="last")
    assert np.allclose(last.logits[0, 0], want[-1], atol=1e-4)
    assert np.array_equal(last.g[:, 0], got.g[:, -1])
    # GLM feeds back the state before the last norm, the others the one after it, which their output head reads
    from_state = loaded.model.output_head(got.g)[0]
    assert np.allclose(from_state, want, atol=1e-4) == (kind != "glm4_moe")


def drafter(loaded: Loaded) -> TreeDrafter[Pairs]:
    made = configured({"method": "mtp"}, loaded, 2, 96)
    assert isinstance(made.levels, Pairs)
    return made


def asks(count: int) -> list[Request]:
    """For so many tokens, greedy and sampled."""
    lengths = ((1, 0.0), (40, 1.0), (9, 0.7))
    return [request(PROMPT[:n], SamplingParams(max_tokens=count, temperature=t, seed=n), seed=n) for n, t in lengths]


def check_texts(loaded: Loaded, asked: list[Request]) -> None:
    """Batches, chunks of prompts, chains and trees write the texts of plain decoding."""
    for width, nodes in ((1, None), (2, 5)):
        loop = Loop(loaded.model, drafter(loaded), controller=Fixed(3, width, nodes), num_slots=2, max_length=96)
        loop.chunk = 7
        rows = loop.generate(asked)
        assert [r.output for r in rows] == plain_texts(loaded.model, asked, end_ids=())
        assert sum(map(sum, (r.counts.drafted for r in rows))) > 12


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_text_changes(kind: str, folders: dict[str, Path]) -> None:
    """And a verifier that reads distributions runs."""
    loaded = target(folders[kind], kind)
    asked = asks(5)
    check_texts(loaded, asked)
    if kind == "glm4_moe":
        loop = Loop(loaded.model, drafter(loaded), "rejection", controller=Fixed(2), num_slots=2, max_length=96)
        assert all(len(r.output) == 5 for r in loop.generate(asked))


@pytest.fixture(scope="module", params=["qwen3_5", "glm4_moe", "deepseek_v3"])
def gguf(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The file of llama.cpp's converter, of a checkpoint."""
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    raw = AutoModelForCausalLM.from_pretrained(folders[request.param])
    write_gguf(raw, path, "F32", mtp=mtp_layer(folders[request.param]))
    return path


def test_gguf_files_and_packs(folders: dict[str, Path], gguf: Path, tmp_path: Path) -> None:
    file = load(str(gguf), device="cpu")
    assert file.config.num_hidden_layers == 2
    tokens, states = pairs(file)
    want = theirs(folders[gguf.stem], gguf.stem, tokens, states)
    pack(str(gguf), tmp_path / "pack")
    found = []
    for loaded in (file, load(str(tmp_path / "pack"), device="cpu")):
        made = make_drafters(DrafterSetup(SpeculativeConfig.of({"method": "auto"}), loaded, 1, 64, "cpu"))
        assert list(made)[-1] == "mtp"
        model = mtp_model(loaded, 64)
        found.append(model.forward(Nodes(tokens, model.new_cache(1, 64), [0]), states).logits[0])
    assert np.allclose(found[0], want, atol=1e-4)
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_layer_of_its_own_precision(gguf: Path, quantization: str) -> None:
    loaded = load(str(gguf), device="cpu")
    tokens, states = pairs(loaded)
    whole, small = mtp_model(loaded, 64), mtp_model(loaded, 64, quantization)
    assert small.weight_bytes < (0.75 if quantization == "int8" else 0.6) * whole.weight_bytes
    a, b = (m.forward(Nodes(tokens, m.new_cache(1, 64), [0]), states).logits for m in (whole, small))
    assert 0 < np.abs(a - b).max() < 0.3 * np.abs(a).max()


def test_a_file_of_many_layers(folders: dict[str, Path], tmp_path: Path) -> None:
    """The layer alone has fewer tensors than the file has layers."""
    config: Any = CONFIGS["qwen3_5"]()
    config.num_hidden_layers, config.layer_types = 20, ["linear_attention", "full_attention"] * 10
    model, layer = AutoModelForCausalLM.from_config(config), mtp_layer(folders["qwen3_5"])
    write_gguf(model, tmp_path / "model.gguf", "F32", mtp=layer)
    assert load(str(tmp_path / "model.gguf"), device="cpu").has_mtp


def test_a_pair_has_the_same_bits_in_any_company(gguf: Path) -> None:
    loaded = load(str(gguf), device="cpu")
    model, (tokens, states) = mtp_model(loaded, 64), pairs(loaded)
    count = tokens.shape[1]
    want = model.forward(Nodes(tokens, model.new_cache(1, 64), [0]), states)
    for chunk in (1, 5, 16):
        cache = model.new_cache(1, 64)
        for at in range(0, count, chunk):
            part = slice(at, min(at + chunk, count))
            got = model.forward(Nodes(tokens[:, part], cache, [0]), states[:, part])
            assert np.array_equal(got.logits, want.logits[:, part])
            assert np.array_equal(got.g, want.g[:, part])
            cache.commit([0], [range(got.g.shape[1])])
    # each node of the text with a wrong sibling, in a batch with the text turned around
    cache = model.new_cache(2, 96)
    nodes, parents = torch.stack([tokens[0], tokens[0] + 1], 1).flatten(), torch.arange(2 * count) // 2 * 2 - 2
    parents[:2] = torch.tensor([-1, 0])
    both = torch.stack([nodes, torch.cat([tokens[0].flip(0), nodes[count:]])])
    given = np.repeat(states[0], 2, 0)
    got = model.forward(
        Nodes(both, cache, [1, 0], torch.stack([parents, torch.arange(-1, 2 * count - 1)])),
        np.stack([given, given[::-1]]),
    )
    assert np.array_equal(got.logits[0, ::2], want.logits[0])


def test_a_target_with_recurrent_layers(tmp_path: Path) -> None:
    """Qwen3-Next as it is: linear attention beside full attention. The states of a step are those of the accepted path."""
    layers = ["linear_attention", "full_attention"]
    config = Qwen3NextConfig(
        **SHAPE, num_key_value_heads=2, head_dim=8, shared_expert_intermediate_size=16, num_experts=4, num_mtp_layers=1,
        layer_types=layers, **LINEAR,
    )  # fmt: skip
    (tmp_path / "layer").mkdir()
    loaded = load(str(checkpoint("qwen3_next", config, tmp_path, tmp_path / "layer")), device="cpu")
    model: Any = loaded.model
    assert model.program.recurrent
    assert loaded.has_mtp
    check_texts(loaded, asks(8))


def test_it_is_found(folders: dict[str, Path]) -> None:
    loaded = target(folders["glm4_moe"], "glm4_moe")
    assert loaded.has_mtp
    auto = make_drafters(DrafterSetup(SpeculativeConfig.of({"method": "auto"}), loaded, 1, 64, "cpu"))
    assert list(auto)[-1] == "mtp"
    # the weights of a token, and two of four experts; the output head is the target's, and both read it
    read = {
        n: t.numel() * (0.5 if ".experts." in n else 1.0)
        for n, t in load_file(folders["glm4_moe"] / "model.safetensors").items()
        if "embed_tokens" not in n
    }
    own = sum(size for n, size in read.items() if "layers.2." in n or n.startswith("lm_head"))
    whole = sum(size for n, size in read.items() if "layers.2." not in n)
    assert level_cost("mtp", auto["mtp"], loaded.model) == pytest.approx(own / whole, rel=0.1)
    assert ("mtp", {"method": "mtp"}) in candidates(TuneInputs(loaded.weights, mtp=loaded.has_mtp), None)
    found = {e.engine: e.command for e in exports({"method": "mtp", "num_speculative_tokens": 2})}
    assert '"method": "mtp"' in found["vLLM"]
    assert "--speculative-algorithm EAGLE" in found["SGLang"]
    assert "draft-model-path" not in found["SGLang"]


def changed(folder: Path, into: Path, drop: str = "", **settings: Any) -> Loaded:
    """A copy without the tensors whose name holds `drop`."""
    config = json.loads((folder / "config.json").read_text()) | settings
    (into / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in weights.items() if not drop or drop not in n}
    save_file(kept, into / "model.safetensors", metadata={"format": "pt"})
    return load(str(into), device="cpu")


def test_what_cannot_be(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(loaded: Loaded, **config: Any) -> Any:
        return configured({"method": "mtp", **config}, loaded, 1, 64)

    folder, loaded = folders["glm4_moe"], target(folders["qwen3_next"], "qwen3_next")
    with pytest.raises(ValueError, match="part of the target's own checkpoint, so leave out"):
        make(loaded, model=str(folder))
    with pytest.raises(ValueError, match="has no MTP layer that can draft"):  # transformers runs the target
        make(replace(loaded, source=str(tmp_path / "gone")))
    with monkeypatch.context() as patch:
        patch.setattr(native, "available", lambda: False)
        patch.setattr(native, "why", lambda: "of this test")
        assert not loaded.has_mtp
        with pytest.raises(ValueError, match="cannot draft: heads need the native kernels: of this test"):
            make(loaded)
    for n, (drop, message) in enumerate(
        {
            "eh_proj": "it lacks eh_proj; outrider knows the layers of DeepSeek-V3",
            "2.mlp.experts.3.": r"mlp\.experts.*3.*4",
            "2.self_attn.q_norm": r"self_attn\.q_norm\.weight of a \w+ is in no file",
        }.items()
    ):
        into = tmp_path / str(n)
        into.mkdir()
        with pytest.warns(RuntimeWarning, match=f"MTP layer of .* cannot draft: .*{message}"):
            broken = changed(folder, into, drop)
        assert not broken.has_mtp
        with pytest.raises(ValueError, match="has no MTP layer that can draft"):
            make(broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert not changed(folder, tmp_path, "layers.2.").has_mtp
