"""Every kind of head on made weights: seconds of a whole draft, and of a forward of its target over one token."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.report import rich_table
from outrider.core.types import Budget, Commit
from outrider.drafters.base import Drafter
from outrider.drafters.heads.block.drafter import BlockLattice
from outrider.drafters.heads.block.module import BlockConfig
from outrider.drafters.heads.eagle.drafter import MaskedPairs, Pairs, eagle_model
from outrider.drafters.heads.eagle.module import EagleConfig
from outrider.drafters.heads.mtp import mtp_model
from outrider.drafters.heads.reading import HeadWeights
from outrider.drafters.model.grower import TreeDrafter
from outrider.kernels import cpu as native
from outrider.models.base import LanguageModel
from outrider.models.load import load
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes
from outrider.testing.contract import GREEDY, context

HEAD = ["head", "target", "draft, ms", "forward of the target, ms", "a draft token, in forwards", "by weights"]
TEXT = 256  # tokens before the draft


class Side(NamedTuple):
    """A head and its target. features: numbers that the head reads of a position. weight_bytes: of a draft token."""

    name: str
    target_name: str
    target: LanguageModel
    drafter: Drafter
    features: int
    weight_bytes: int


def layer(i: int, read: int, size: int, inner: int, heads: int, kv_heads: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer whose attention reads `read` numbers."""
    own = {"q_proj": (heads * dim, read), "k_proj": (kv_heads * dim, read), "v_proj": (kv_heads * dim, read)}
    shapes = {f"self_attn.{n}": s for n, s in own.items()} | {"self_attn.o_proj": (size, heads * dim)}
    shapes |= {"mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size), "mlp.down_proj": (size, inner)}
    shapes |= {"input_layernorm": (size,), "post_attention_layernorm": (size,)}
    return {f"layers.{i}.{n}.weight": s for n, s in shapes.items()}


def made(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {n: (torch.randn(s) * 0.02).bfloat16() for n, s in shapes.items()}


def llama(config: LlamaConfig) -> LanguageModel:
    return NativeModel(LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval(), own=True)


def sides(depth: int, draft_vocab: int, folder: Path) -> list[Side]:
    """Heads for a Llama of 234 million weights, and the MTP layer of a GLM of 280 million. bfloat16."""
    size, inner, heads, kv_heads, dim, vocab, layers = 1024, 3072, 16, 8, 64, 32000, 16
    config = LlamaConfig(
        hidden_size=size, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, vocab_size=vocab, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    target, named = llama(config), "Llama, 234M"
    ids = torch.arange(draft_vocab) * (vocab // draft_vocab)
    common: dict[str, Any] = {
        "hidden_size": size, "vocab_size": vocab, "draft_vocab_size": draft_vocab, "taps": (1, 7, 12),
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
        "target_hidden_size": size, "max_position_embeddings": 2048,
    }  # fmt: skip

    def layer_of(i: int, read: int) -> dict[str, tuple[int, ...]]:
        return layer(i, read, size, inner, heads, kv_heads, dim)

    ends = {"norm.weight": (size,), "lm_head.weight": (draft_vocab, size), "fc.weight": (size, 3 * size)}
    paired = ends | layer_of(0, 2 * size) | {"layers.0.hidden_norm.weight": (size,)}
    eagle = TreeDrafter(
        Pairs(eagle_model(HeadWeights(EagleConfig(**common), made(paired), ids), target, 2048, "none"), 1, 2048)
    )
    settings = EagleConfig(**common, num_layers=2, mask_token_id=5, parallel_drafts=depth)
    shapes = paired | layer_of(1, size) | {"mask_hidden": (1, 1, 3 * size)}
    peagle = TreeDrafter(MaskedPairs(HeadWeights(settings, made(shapes), ids), target, 1, 2048, "none"))
    found = [
        Side("EAGLE-3", named, target, eagle, 3 * size, eagle.levels.model.weight_bytes),
        Side("P-EAGLE, 2 layers", named, target, peagle, 3 * size, peagle.levels.model.weight_bytes),
        dspark(named, target, common, ids, layer_of(0, size) | layer_of(1, size) | ends, depth),
    ]
    return [*found, mtp(folder)]


def dspark(
    named: str,
    target: LanguageModel,
    common: dict[str, Any],
    ids: Tensor,
    shapes: dict[str, tuple[int, ...]],
    depth: int,
) -> Side:
    """Two layers, a Markov bias and a confidence. shapes: of the layers, fc, the last norm and the output head."""
    size, dim, rank = common["hidden_size"], common["head_dim"], 256
    config = BlockConfig(
        **common, num_layers=2, block_size=depth, mask_token_id=5, from_anchor=True, markov_rank=rank, confidence=True
    )
    norms = {f"layers.{i}.self_attn.{n}_norm.weight": (dim,) for i in (0, 1) for n in "qk"}
    tables = {
        "hidden_norm.weight": (size,),
        "markov_head.markov_w1.weight": (common["vocab_size"], rank),
        "markov_head.markov_w2.weight": (len(ids), rank),
        "confidence_head.proj.weight": (1, size),
        "confidence_head.proj.bias": (1,),
    }
    head = HeadWeights(config, made(shapes | norms | tables), ids)
    drafter = TreeDrafter(BlockLattice(head, target, 1, 2048, "none"))
    return Side(f"DSpark, {depth} slots", named, target, drafter, 3 * size, drafter.levels.model.weight_bytes)


def mtp(folder: Path) -> Side:
    """A checkpoint of GLM-4.5's shape, with the layer behind its last one."""
    size, layers = 768, 8
    config = Glm4MoeConfig(
        vocab_size=32000, hidden_size=size, intermediate_size=2048, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=4, moe_intermediate_size=512, n_routed_experts=16, num_experts_per_tok=4,
        n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, max_position_embeddings=2048,
    )  # fmt: skip
    raw: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    raw.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    last = f"model.layers.{layers - 1}."
    own = {n.removeprefix(last): t.clone() for n, t in weights.items() if n.startswith(last)}
    own |= made({"eh_proj.weight": (size, 2 * size)})
    own |= {f"{n}.weight": torch.ones(size).bfloat16() for n in ("enorm", "hnorm", "shared_head.norm")}
    save_file(
        weights | {f"model.layers.{layers}.{n}": t for n, t in own.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded = load(str(folder), device="cpu")
    model = mtp_model(loaded, 2048)
    drafter = TreeDrafter(Pairs(model, 1, 2048))
    return Side("MTP", "GLM, 16 experts", loaded.model, drafter, size, model.weight_bytes)


def forward_of(target: LanguageModel) -> Callable[[], float]:
    """Seconds of a forward of one token, after a text."""
    cache = target.new_cache(1, TEXT + 8)
    target.forward(Nodes(torch.arange(TEXT)[None], cache, [0]), want="none")
    cache.commit([0], [range(TEXT)])

    def timed() -> float:
        begun = perf_counter()
        target.forward(Nodes(torch.tensor([[7]]), cache, [0]))
        return perf_counter() - begun

    return timed


def draft_of(side: Side, depth: int) -> float:
    """Seconds of an update with two new tokens and a draft, after a text."""
    drafter: Any = side.drafter
    text = [(7 * i) % 1000 for i in range(TEXT)]
    drafter.start(0, text, 0, torch.randn(TEXT - 1, side.features))
    drafter.propose(context([0], [text], [Budget(1)], GREEDY))
    text += [3, 5]
    asked, commit = (
        context([0], [text], [Budget(depth)], GREEDY),
        Commit([3, 5], [0, 1], 1, None, torch.randn(2, side.features)),
    )
    begun = perf_counter()
    drafter.update(asked, [commit], cast("Any", None))
    drafter.propose(asked)
    return perf_counter() - begun


def kinds_table(depth: int, draft_vocab: int, rounds: int) -> Table:
    """A row for each kind of head. The last column is what `auto` takes for the one before."""
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder, native.one_torch_thread(torch.device("cpu")):
        for side in sides(depth, draft_vocab, Path(folder)):
            forward = forward_of(side.target)
            taken = [(draft_of(side, depth), forward()) for _ in range(rounds + 1)][1:]
            ratio = statistics.median(a / b for a, b in taken) / depth
            draft, one = (1e3 * statistics.median(t) for t in zip(*taken, strict=True))
            weights = side.weight_bytes / side.target.weight_bytes
            rows.append([side.name, side.target_name, f"{draft:.2f}", f"{one:.2f}", f"{ratio:.3f}", f"{weights:.3f}"])
    return rich_table(f"drafts of {depth} tokens, {draft_vocab} draft tokens, bfloat16", HEAD, rows)
