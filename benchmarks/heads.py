"""What a draft with a head costs, for targets of real shapes, with random weights: its own forwards, and all around them.

    python -m benchmarks.heads --depth 4 --precisions bfloat16 int8
    python -m benchmarks.heads --kinds          # every kind of head, beside a forward of its target

Cost does not depend on the values of weights. A draft reads two new pairs, as after a step with one accepted token, and draws a
chain. What is compared takes turns within a round. Medians over the rounds, the first discarded.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, Glm4MoeConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.forwards import read_context, some_tokens
from benchmarks.ruler import markdown, parser, turns
from outrider.core.types import Array, Budget, Commit
from outrider.drafters.heads.block import BlockConfig, BlockLattice, BlockModel
from outrider.drafters.heads.eagle import EagleConfig, MaskedPairs, Pairs, eagle_model, eagle_shapes
from outrider.drafters.heads.mtp import mtp_model
from outrider.drafters.heads.reading import HeadWeights
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.base import LanguageModel, Output, Want
from outrider.models.cache import SlotCache
from outrider.models.load import load
from outrider.models.native.model import NativeModel
from outrider.models.nodes import Nodes
from outrider.testing.contract import GREEDY, context

COSTS = [
    "target",
    "precision",
    "MB read",
    "first token, ms",
    "each later one, ms",
    "around the forwards, ms",
    "prompt, us a token",
]
KINDS = ["head", "target", "draft, ms", "forward of the target, ms", "a draft token, in forwards", "by weights"]
TEXT = 512  # tokens before the draft
ROOM = 2048
RANK = 256  # of the bias of a DSpark head
Shapes = dict[str, tuple[int, ...]]


def drawn(*shape: int) -> Array:
    """float32, standard normal."""
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def random_weights(shapes: Shapes) -> dict[str, Array]:
    """bfloat16 of the size of trained ones."""
    return {name: (drawn(*shape) * 0.02).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}


class Draft(NamedTuple):
    """Seconds of a draft.

    Args:
        prompt: for a token of the prompt.
        inside: of the head's own forwards.
        whole: of the update with the last step and of the draft.
    """

    prompt: float
    inside: float
    whole: float


class Side:
    """A drafter with a head, on a text.

    Args:
        drafter: with one slot.
        features: numbers that the head reads of a position.
        name: of the head.
        target: the model that the head is for.
        target_name: as the table shows it.
    """

    def __init__(self, drafter: TreeDrafter, features: int, name: str, target: LanguageModel, target_name: str) -> None:
        self.drafter, self.features, self.inside = drafter, features, 0.0
        self.name, self.target, self.target_name = name, target, target_name
        self.model: Any = cast("Any", drafter.levels).model
        chains = getattr(self.model, "draft_chains", None)

        def timed(*arguments: Any) -> Any:
            start = perf_counter()
            drafts = cast("Any", chains)(*arguments)
            self.inside += perf_counter() - start
            return drafts

        if chains is not None:
            self.model.draft_chains = timed

    def draft(self, depth: int) -> Draft:
        """A draft of so many tokens behind a text."""
        drafter: Any = self.drafter
        text = [(7 * i) % 1000 for i in range(TEXT)]
        start = perf_counter()
        drafter.start(0, text, 0, drawn(TEXT - 1, self.features))
        prompt = (perf_counter() - start) / TEXT
        drafter.propose(context([0], [text], [Budget(1)], GREEDY))
        text += [3, 5]
        step, self.inside = context([0], [text], [Budget(depth)], GREEDY), 0.0
        commit = Commit([3, 5], [0, 1], 1, None, cast("Any", drawn(2, self.features)))
        start = perf_counter()
        drafter.update(step, [commit], cast("Any", None))
        drafter.propose(step)
        return Draft(prompt, self.inside, perf_counter() - start)


# Precisions of an EAGLE-3 head
class Shape(NamedTuple):
    """What a head takes from its target."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int
    layers: int


SHAPES = (
    Shape("SmolLM2-135M", 576, 1536, 9, 3, 64, 49152, 30),
    Shape("Qwen2.5-1.5B", 1536, 8960, 12, 2, 128, 151936, 28),
)


class Embedding(LanguageModel):
    """A target that only lends its embedding."""

    def __init__(self, table: Array) -> None:
        self.table, self.device = table, "cpu"

    @property
    def embedding_table(self) -> Any:
        return self.table

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        raise NotImplementedError

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        raise NotImplementedError


def eagle_head(shape: Shape, draft_vocab: int) -> HeadWeights[EagleConfig]:
    """A head of EAGLE-3.1 with random weights."""
    config = EagleConfig(
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        draft_vocab_size=draft_vocab,
        taps=(1, shape.layers // 2 - 1, shape.layers - 4),
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.dim,
        target_hidden_size=shape.hidden,
        max_position_embeddings=ROOM,
        fc_norm=True,
        norm_output=True,
    )
    shapes = eagle_shapes(config) | {"lm_head.weight": (draft_vocab, shape.hidden)}
    return HeadWeights(config, random_weights(shapes), np.arange(draft_vocab) * (shape.vocab // draft_vocab))


def precisions_table(
    targets: Sequence[str], draft_vocab: int, depth: int, precisions: Sequence[str], rounds: int
) -> str:
    """A line for each target and precision."""
    body = list[list[str]]()
    for shape in (s for s in SHAPES if s.name in targets):
        head = eagle_head(shape, draft_vocab)
        target = cast("LanguageModel", Embedding(drawn(shape.vocab, shape.hidden).astype(ml_dtypes.bfloat16)))
        sides = {
            p: Side(TreeDrafter(Pairs(eagle_model(head, target, ROOM, "none" if p == "bfloat16" else p), 1, ROOM)),
                    3 * shape.hidden, "EAGLE-3", target, shape.name)
            for p in precisions
        }  # fmt: skip
        drafts: dict[tuple[str, int], list[Draft]] = {(p, length): [] for p in sides for length in (1, depth)}
        for number, (p, length) in turns([*drafts], rounds):
            draft = sides[p].draft(length)
            if number >= 0:
                drafts[p, length].append(draft)
        for p, side in sides.items():
            first, whole = (statistics.median(d.inside for d in drafts[p, n]) for n in (1, depth))
            around = statistics.median(d.whole - d.inside for d in drafts[p, depth])
            prompt = statistics.median(d.prompt for d in drafts[p, depth])
            figures = [1e3 * first, 1e3 * (whole - first) / (depth - 1), 1e3 * around, 1e6 * prompt]
            body.append([shape.name, p, f"{side.model.weight_bytes / 1e6:.0f}", *(f"{n:.2f}" for n in figures)])
    return markdown(COSTS, body)


# Kinds of heads
def layer(size: int, inner: int, heads: int, kv_heads: int, dim: int, i: int, read: int) -> Shapes:
    """Shapes of a layer whose attention reads `read` numbers."""
    qkv = {"q_proj": (heads * dim, read), "k_proj": (kv_heads * dim, read), "v_proj": (kv_heads * dim, read)}
    shapes = {f"self_attn.{n}": s for n, s in qkv.items()} | {"self_attn.o_proj": (size, heads * dim)}
    shapes |= {"mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size), "mlp.down_proj": (size, inner)}
    shapes |= {"input_layernorm": (size,), "post_attention_layernorm": (size,)}
    return {f"layers.{i}.{n}.weight": s for n, s in shapes.items()}


def sides_of_kinds(depth: int, draft_vocab: int, folder: Path) -> Iterator[Side]:
    """Heads for a Llama of 234 million weights, and the MTP layer of a GLM of 280 million. bfloat16."""
    size, inner, heads, kv_heads, dim, vocab, layers = 1024, 3072, 16, 8, 64, 32000, 16
    config = LlamaConfig(
        hidden_size=size, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, vocab_size=vocab, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip
    raw = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    target = NativeModel(raw)
    on_target = target, "234M weights"
    ids = np.arange(draft_vocab) * (vocab // draft_vocab)
    common: dict[str, Any] = {
        "hidden_size": size, "vocab_size": vocab, "draft_vocab_size": draft_vocab, "taps": (1, 7, 12),
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim,
        "target_hidden_size": size, "max_position_embeddings": 2048,
    }  # fmt: skip
    layer_of = partial(layer, size, inner, heads, kv_heads, dim)
    ends = {"norm.weight": (size,), "lm_head.weight": (draft_vocab, size), "fc.weight": (size, 3 * size)}
    paired = ends | layer_of(0, 2 * size) | {"layers.0.hidden_norm.weight": (size,)}
    eagle = eagle_model(HeadWeights(EagleConfig(**common), random_weights(paired), ids), target, ROOM, "none")
    yield Side(TreeDrafter(Pairs(eagle, 1, ROOM)), 3 * size, "EAGLE-3", *on_target)
    masked = EagleConfig(**common, num_layers=2, mask_token_id=5, parallel_drafts=depth)
    shapes = paired | layer_of(1, size) | {"mask_hidden": (1, 1, 3 * size)}
    head = HeadWeights(masked, random_weights(shapes), ids)
    slots = MaskedPairs(head, eagle_model(head, target, ROOM, "none"), 1, ROOM)
    yield Side(TreeDrafter(slots), 3 * size, "P-EAGLE, 2 layers", *on_target)
    block = BlockConfig(
        **common,
        num_layers=2,
        block_size=depth,
        mask_token_id=5,
        from_anchor=True,
        markov_rank=RANK,
        confidence=True,
        confidence_markov=False,
    )
    norms = {f"layers.{i}.self_attn.{n}_norm.weight": (dim,) for i in (0, 1) for n in "qk"}
    tables = {
        "hidden_norm.weight": (size,), "markov_head.markov_w1.weight": (vocab, RANK), "confidence_head.proj.bias": (1,),
        "markov_head.markov_w2.weight": (draft_vocab, RANK), "confidence_head.proj.weight": (1, size),
    }  # fmt: skip
    shapes = layer_of(0, size) | layer_of(1, size) | ends | norms | tables
    drafter = HeadWeights(block, random_weights(shapes), ids)
    lattice = BlockLattice(drafter, BlockModel(drafter, target, ROOM, "none"), 1, ROOM)
    yield Side(TreeDrafter(lattice), 3 * size, "DSpark, 2 layers", *on_target)
    yield mtp(folder)


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
    added = {n.removeprefix(last): t for n, t in weights.items() if n.startswith(last)}
    added |= random_weights({"eh_proj.weight": (size, 2 * size)})
    added |= {f"{n}.weight": np.ones(size, ml_dtypes.bfloat16) for n in ("enorm", "hnorm", "shared_head.norm")}
    save_file(
        weights | {f"model.layers.{layers}.{n}": t for n, t in added.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    loaded = load(str(folder), device="cpu")
    drafter = TreeDrafter(Pairs(mtp_model(loaded, ROOM), 1, ROOM))
    return Side(drafter, size, "MTP", loaded.model, "16 experts, 4 for a token")


def kinds_table(depth: int, draft_vocab: int, rounds: int) -> str:
    """A row for each kind of head. The last column is what `auto` takes for the one before."""
    body = list[list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        for side in sides_of_kinds(depth, draft_vocab, Path(folder)):
            target, cache = side.target, read_context(side.target, TEXT)
            seconds: dict[str, list[float]] = {"draft": [], "forward": []}
            for number, what in turns([*seconds], rounds):
                start = perf_counter()
                if what == "forward":
                    target.forward(Nodes(some_tokens(1, target.vocab_size), cache, [0]))
                took = perf_counter() - start if what == "forward" else side.draft(depth).whole
                if number >= 0:
                    seconds[what].append(took)
            ratio = statistics.median(a / b for a, b in zip(*seconds.values(), strict=True)) / depth
            draft, one = (1e3 * statistics.median(s) for s in seconds.values())
            weights = side.model.weight_bytes / target.weight_bytes
            body.append([side.name, side.target_name, f"{draft:.2f}", f"{one:.2f}", f"{ratio:.3f}", f"{weights:.3f}"])
    return markdown(KINDS, body)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--depth", type=int, default=4, help="draft tokens, at least 2")
    options.add_argument("--draft-vocab", type=int, default=8192)
    options.add_argument("--precisions", nargs="+", choices=("bfloat16", "int8", "int4"), default=["bfloat16", "int8"])
    options.add_argument("--targets", nargs="+", choices=[s.name for s in SHAPES], default=[s.name for s in SHAPES])
    options.add_argument("--rounds", type=int, default=30)
    options.add_argument("--kinds", action="store_true", help="every kind of head, beside a forward of its target")
    args = options.parse_args()
    if args.kinds:
        print(kinds_table(args.depth, args.draft_vocab, args.rounds))
    else:
        print(precisions_table(args.targets, args.draft_vocab, args.depth, args.precisions, args.rounds))


if __name__ == "__main__":
    main()
