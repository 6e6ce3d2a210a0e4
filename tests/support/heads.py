"""Heads for tests: those that speculators wrote, and made ones for small targets."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from light import Late, torch, transformers
from plain import write_checkpoint
from safetensors import numpy as arrays

from outrider.core.types import Array
from outrider.drafters.heads.block import BlockLattice, BlockModel, read_block
from outrider.drafters.heads.eagle import EagleConfig, MaskedPairs, Pairs, eagle_model, read_eagle
from outrider.drafters.heads.features import HeadOutput, PairModel, last_nodes
from outrider.drafters.heads.files import head_kind
from outrider.drafters.heads.medusa import MedusaLattice, read_medusa
from outrider.drafters.heads.reading import HeadWeights
from outrider.drafters.model.grower import TreeDrafter
from outrider.kernels.cpu import Scoring
from outrider.models.attention import attend, write
from outrider.models.base import Want
from outrider.models.load import Loaded, load
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes

linears = Late("outrider.models.hf.linear")
head_modules = Late("outrider_lab.heads.modules")

VOCAB, WIDTH = 64, 64  # of `chain_model`
GOLDEN = Path(__file__).parents[1] / "unit" / "drafters" / "heads" / "golden"
EAGLE3 = ("eagle3", "eagle3_full_vocab", "eagle31", "eagle3_before_fc", "eagle3_before_residual")
MEDUSA = ("vllm", "old", "shared", "target")
KINDS = ("eagle31", "eagle3_full_vocab", "eagle1", "peagle", "peagle_qwen3", *(f"medusa-{layout}" for layout in MEDUSA),
         "dflash", "dspark", "dspark-small", "dflash2")  # fmt: skip
_FOLDERS = TemporaryDirectory()  # of targets, until the tests end
PROMPT = [(7 * i * i + 3 * i + 11) % 127 for i in range(60)]


def small_config(vocab_size: int = 128, hidden_size: int = 32, layers: int = 8) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )


@cache
def small_target(vocab_size: int = 128, hidden_size: int = 32, layers: int = 8) -> Loaded:
    """A target of the golden heads' shape, with their embedding and output head where the sizes agree; float32."""
    given: dict[str, Any] = {"intermediate_size": 48, "max_position_embeddings": 256, "num_hidden_layers": layers}
    given |= {"vocab_size": vocab_size, "hidden_size": hidden_size}
    given |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    folder, draw = Path(_FOLDERS.name, f"{vocab_size}-{hidden_size}-{layers}"), np.random.default_rng(7)
    file = write_checkpoint(folder, seed=7, **given) / "model.safetensors"
    tensors = {
        name: x * np.float32(0.6) if x.ndim > 1 else np.ones_like(x) for name, x in arrays.load_file(file).items()
    }
    tensors["model.norm.weight"] = draw.uniform(0.5, 1.5, hidden_size).astype(np.float32)
    if (vocab_size, hidden_size) == (128, 32):
        tables = arrays.load_file(GOLDEN / "target.safetensors")
        tensors["model.embed_tokens.weight"] = tables["embedding"].astype(np.float32)
        tensors["lm_head.weight"] = tables["lm_head"].astype(np.float32)
    arrays.save_file(tensors, file)
    return replace(load(folder, device="cpu"), name="golden-target")


def torch_target() -> Loaded:
    """Such a target whose other weights torch draws: what a misreading costs depends on them, and is known for these."""
    torch.manual_seed(7)
    raw = transformers.LlamaForCausalLM(small_config()).eval()
    for p in raw.parameters():
        if p.dim() == 2:
            p.data.normal_(0, 0.15)
    raw.model.norm.weight.data.uniform_(0.5, 1.5)
    tables = arrays.load_file(GOLDEN / "target.safetensors")
    raw.get_input_embeddings().weight.data = torch.from_numpy(tables["embedding"].astype(np.float32))
    raw.get_output_embeddings().weight.data = torch.from_numpy(tables["lm_head"].astype(np.float32))
    return Loaded(NativeModel(raw), "golden-target", None, (), "float32", raw, raw.config)


def features(target: Loaded, tokens: list[int], taps: tuple[int, ...]) -> Array:
    """float [position, feature]: what the target gives for a text."""
    nodes = Nodes(np.array([tokens]), target.model.new_cache(1, len(tokens)), [0])
    out = target.model.forward(nodes, taps=taps, want="none").features
    assert out is not None
    return out[0]


def head_folder(kind: str, into: Path) -> Path:
    """A folder of one of KINDS."""
    if kind == "eagle1":
        return eagle1_folder(into)
    if kind.startswith("medusa-"):
        return medusa_folder(into, kind.removeprefix("medusa-"))
    if kind == "dspark-small":
        return copied("dspark", into, {"draft_vocab_size": 20}, **reduced("dspark", 20))
    return GOLDEN / kind


def drafter_of(folder: Path, target: Loaded, slots: int = 4, **settings: Any) -> TreeDrafter[Any]:
    """The drafter of a head's folder, at the precision of its weights. settings: in place of its own."""
    kind, model = head_kind(folder), target.model
    if kind == "medusa":
        return TreeDrafter(MedusaLattice(replace(read_medusa(folder, target), **settings), model, "none"))
    read: Any = (read_eagle if kind in ("peagle", "eagle3", "eagle1") else read_block)(folder, target)
    head = replace(read, config=replace(read.config, **settings))
    if kind in ("eagle3", "eagle1"):
        return TreeDrafter(Pairs(eagle_model(head, model, 256, "none"), slots, 256))
    if kind == "peagle":
        return TreeDrafter(MaskedPairs(head, eagle_model(head, model, 256, "none"), slots, 256))
    return TreeDrafter(BlockLattice(head, BlockModel(head, model, 256, "none"), slots, 256))


def reduced(name: str, rows: int) -> dict[str, Array]:
    """The tensors of a golden block head with a draft vocabulary."""
    ids, has = np.arange(128)[3::5][:rows], np.zeros(128, bool)
    has[ids] = True
    second = arrays.load_file(GOLDEN / name / "model.safetensors")["markov_head.markov_w2.weight"][ids]
    output = arrays.load_file(GOLDEN / "target.safetensors")["lm_head"].astype(np.float32)[ids]
    return {
        "d2t": ids - np.arange(rows),
        "t2d": has,
        "lm_head__weight": output,
        "markov_head__markov_w2__weight": second,
    }


def golden(name: str) -> dict[str, Array]:
    """What speculators computed: tokens, features, logits..."""
    return arrays.load_file(GOLDEN / name / "expected.safetensors")


def copied(
    head: str | Path, into: Path, settings: dict[str, Any] | None = None, **tensors: torch.Tensor | Array | None
) -> Path:
    """A golden head, or one of a folder, with some settings and tensors changed; None leaves one out."""
    source = GOLDEN / head if isinstance(head, str) else head
    out = into / source.name
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    for key, value in (settings or {}).items():
        layers = config.get("transformer_layer_config", {})  # a flat folder has none
        inner = layers if key in layers else config
        inner.pop(key, None) if value is None else inner.__setitem__(key, value)
    (out / "config.json").write_text(json.dumps(config))
    weights = arrays.load_file(out / "model.safetensors") | {
        n.replace("__", "."): np.asarray(t) for n, t in tensors.items() if t is not None
    }
    weights = {
        n: t for n, t in weights.items() if n not in {n.replace("__", ".") for n, t in tensors.items() if t is None}
    }
    arrays.save_file(weights, out / "model.safetensors")
    return out


def medusa_folder(into: Path, layout: str = "vllm", heads: int = 3, layers: int = 2) -> Path:
    """Random heads; the biases matter. Layouts: that of vLLM with own or with one shared output, and the old one."""
    draw = np.random.default_rng(5)

    def normal(*shape: int) -> Array:
        return draw.normal(size=shape).astype(np.float32)

    out = into / f"medusa-{layout}"
    out.mkdir()
    config: dict[str, Any] = {
        "model_type": "medusa",
        "num_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": 128,
    }
    tensors: dict[str, Array] = {}
    for i, j in itertools.product(range(heads), range(layers)):
        name = f"{i}.{j}.linear" if layout == "old" else f"blocks.{i}.layers.{j}"
        tensors |= {f"{name}.weight": normal(32, 32) * np.float32(0.3), f"{name}.bias": normal(32)}
    if layout == "shared":
        ids = draw.permutation(128)[:40]
        config |= {"original_lm_head": True, "truncated_vocab_size": 40, "medusa_fc_bias": True}
        tensors |= {"lm_head.weight": normal(40, 32), "token_map": ids}
    elif layout != "target":
        name = "{i}.{layers}.weight" if layout == "old" else "lm_heads.{i}.weight"
        tensors |= {name.format(i=i, layers=layers): normal(128, 32) for i in range(heads)}
    if layout == "old":
        config = {"medusa_num_heads": heads, "medusa_num_layers": layers, "base_model_name_or_path": "golden-target"}
        torch.save({f"medusa_heads.{n}": torch.as_tensor(t) for n, t in tensors.items()}, out / "medusa_lm_head.pt")
    else:
        arrays.save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config))
    return out


def eagle1_folder(into: Path) -> Path:
    """A random head of EAGLE-1 for `small_target()`, in the layout of SafeAILab."""
    torch.manual_seed(3)
    out = into / "eagle1"
    out.mkdir()
    given = small_config()
    shapes = {f"{n}_proj": (16 if n in "kv" else 32, 32) for n in "qkvo"}
    tensors = {f"layers.0.self_attn.{n}.weight": torch.randn(shape) * 0.2 for n, shape in shapes.items()}
    tensors |= {f"layers.0.mlp.{n}_proj.weight": torch.randn(48, 32) * 0.2 for n in ("gate", "up")}
    tensors |= {
        "layers.0.mlp.down_proj.weight": torch.randn(32, 48) * 0.2,
        "layers.0.post_attention_layernorm.weight": torch.rand(32) + 0.5,
        "fc.weight": torch.randn(32, 64) * 0.2,
        "fc.bias": torch.randn(32) * 0.2,
    }
    torch.save(tensors, out / "pytorch_model.bin")
    settings = given.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": True}
    (out / "config.json").write_text(json.dumps(settings))
    return out


def causal(
    head: head_modules.Eagle,
    tokens: torch.Tensor,
    g: torch.Tensor,
    past: head_modules.KeysValues | None = None,
    first: int | None = None,
) -> tuple[torch.Tensor, head_modules.KeysValues]:
    """Read pairs causally, after those of `past`. Returns y [batch, pair, hidden] and the keys and values of all.

    tokens: int64 [batch, pair], x_{t+1}. g: [batch, pair, hidden], of `fuse` or of `feedback`. first: position of the first
    pair; None for the number of pairs in `past`.
    """
    held, count = 0 if past is None else past.keys.shape[2], tokens.shape[1]
    positions = torch.arange(count) + (held if first is None else first)
    x, residual = head.pairs(tokens, g)
    own = head.keys_values(x, positions)
    seen = own if past is None else past.then(own)
    mask = torch.ones(count, held + count, dtype=torch.bool).tril(held)
    return head.attended(x, residual, positions, seen, mask), seen


class TorchPairs(PairModel):
    """The equations of an EAGLE head in torch, over the slot cache and at draft trees: the slow twin of `PairModel`."""

    has_draft_chains = False

    def __init__(
        self, head: HeadWeights[EagleConfig], embedding: torch.Tensor, max_length: int, precision: str
    ) -> None:
        self.head = head_modules.Eagle.of(head, embedding).eval()
        linears.pack_linears_(self.head, "auto" if precision == "none" else precision)
        self.taps, self.vocab_size, self.max_length = head.config.taps, head.config.vocab_size, max_length
        self.weight_bytes, self.subset = sum(t.nbytes for t in head.tensors.values()), head.subset

    def forward(
        self, nodes: Nodes, features: Array | None = None, *, g: Array | None = None, want: Want | int = "all"
    ) -> HeadOutput:
        with torch.no_grad():
            return self._forward(nodes, features, g, want)

    def _forward(self, nodes: Nodes, features: Array | None, g: Array | None, want: Want | int) -> HeadOutput:
        head, tokens, positions = self.head, torch.as_tensor(nodes.tokens), torch.as_tensor(nodes.positions)
        nodes.cache.reserve(nodes.slots, nodes.total)
        states = torch.as_tensor(g) if features is None else head.fuse(torch.as_tensor(features))
        x, residual = head.pairs(tokens, states)
        write(nodes, 0, *(t.numpy() for t in head.keys_values(x, positions)))
        attention, layer = head.layer.self_attn, head.layer
        query = head._rotated(attention.split(attention.q_proj(x)), positions)
        attended = attend(nodes, 0, query.numpy(), Scoring(attention.head_dim**-0.5))
        y = residual + attention.o_proj(torch.from_numpy(attended).flatten(2))
        y = y + layer.mlp(layer.post_attention_layernorm(y))
        logits, fed_back = head.logits(y).numpy(), head.feedback(y).numpy()
        if want == "all":
            return HeadOutput(logits, fed_back)
        some = last_nodes(nodes, want if isinstance(want, int) else 1) if want != "none" else np.s_[:, :0]
        return HeadOutput(logits[some], fed_back[some])


def chain_model(vocab: int = VOCAB, weights: tuple[float, ...] = (8.0, 7.0, 6.0)) -> transformers.LlamaForCausalLM:
    """Each token has successors of different weight, and the layers add nothing: a Markov chain."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q[:vocab]
        model.model.embed_tokens.weight.copy_(table)
        model.lm_head.weight.zero_()
        for weight in weights:
            following = torch.randperm(vocab - 1) + 1  # nothing leads to token 0, which ends a text
            model.lm_head.weight[following[torch.arange(vocab) % (vocab - 1)]] += weight / WIDTH**0.5 * table
    return model
