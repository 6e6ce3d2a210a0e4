"""Reads block drafters: DFlash (arXiv 2602.06036) and DSpark, as speculators, z-lab, DeepSpec and transformers write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.drafters.heads.checks import (
    add_embedding,
    check_layers,
    check_target,
    check_whole,
    needed,
    output_rows,
    parted,
    rope_of,
    token_ids,
)
from outrider.drafters.heads.config import plain_rope, rotary_of, tap_of
from outrider.drafters.heads.files import DFLASH, DSPARK, HeadFolder, open_head, settings_named
from outrider.models.load import Loaded

_ENCODER = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


@dataclass(frozen=True)
class BlockConfig:
    """A block drafter: Qwen3-shaped layers over [root, mask, ...], which also attend to the projected features of the text.

    block_size: slots of a block. mask_token_id: the token of all slots but the first. from_anchor: slot 0 drafts too (DSpark);
    in DFlash slot k drafts the token at its own position. markov_rank: width of the bias by the token before; 0 without one.
    confidence_markov: the confidence reads that token too. The others: as in `HeadConfig`.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    target_hidden_size: int
    num_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    from_anchor: bool
    markov_rank: int = 0
    confidence_markov: bool = False
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: plain_rope(None))
    verifier: str | None = None

    @property
    def drafts(self) -> int:
        """Draft tokens of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1

    def rotary(self) -> tuple[Tensor, float]:
        """See `HeadConfig.rotary`."""
        return rotary_of(self.rope_parameters, self.hidden_size, self.head_dim, self.max_position_embeddings)


@dataclass(frozen=True, eq=False)
class BlockWeights:
    """tensors: by the names of speculators. Without `embed_tokens.weight` and `lm_head.weight` the target's are used.

    token_ids: int64 [draft_vocab], ascending: the token of each row of the output head."""

    config: BlockConfig
    tensors: dict[str, Tensor]
    token_ids: Tensor


@settings_named
def read_block(folder: str | Path | HeadFolder, target: Loaded) -> BlockWeights:
    """Read a DFlash or a DSpark drafter. Raises ValueError, naming both sides, for what does not fit."""
    opened = folder if isinstance(folder, HeadFolder) else open_head(folder)
    if opened.kind not in (DFLASH, DSPARK):
        raise ValueError(f"{opened.path} is a head of the kind {opened.kind!r}, not a block drafter")
    tensors = {_ENCODER.get(n, n): t for n, t in opened.tensors.items()}
    tensors, spare = parted(tensors)
    config = _settings(opened, tensors, target)
    _check_shapes(opened.path, config, tensors)
    ids = token_ids(spare, config, opened.path)
    if "lm_head.weight" in spare or len(ids) < config.vocab_size:
        tensors["lm_head.weight"] = output_rows(spare.get("lm_head.weight"), config, ids, opened, target)
    add_embedding(tensors, spare.get("embed_tokens.weight"), config, target, opened.path)
    return BlockWeights(config, tensors, ids)


def _settings(opened: HeadFolder, tensors: Mapping[str, Tensor], target: Loaded) -> BlockConfig:
    path = opened.path
    given = {**opened.settings, **(opened.settings.get("dflash_config") or {})}
    fc = needed(path, tensors, "fc.weight", "hidden_norm.weight", "norm.weight")
    hidden = int(given.get("hidden_size") or fc.shape[0])
    wide = int(given.get("target_hidden_size") or hidden)
    vocab_size = int(given.get("vocab_size") or target.model.vocab_size)
    check_target(path, vocab_size, wide, opened.verifier, target)
    if any(kind != "full_attention" for kind in given.get("layer_types") or ()):
        raise ValueError(f"{path} has layers of sliding attention, which outrider's block drafters do not have")
    if given.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(f"{path} has a Markov head of the kind {given['markov_head_type']!r}; outrider runs 'vanilla'")
    mask, size = given.get("mask_token_id"), int(given.get("block_size") or 0)
    if mask is None or not 0 <= int(mask) < vocab_size:
        raise ValueError(f"{path}: mask_token_id is {mask}; it must be a token of the target, 0 to {vocab_size - 1}")
    if size < 2:
        raise ValueError(f"{path}: block_size is {size}; a block has two slots or more")
    dspark = opened.kind == DSPARK
    heads = int(given.get("num_attention_heads") or 0)
    if not heads:
        raise ValueError(f"{path}: config.json does not say num_attention_heads")
    rank = tensors["markov_head.markov_w1.weight"].shape[1] if "markov_head.markov_w1.weight" in tensors else 0
    layers = 1 + max((int(n.split(".")[1]) for n in tensors if n.startswith("layers.")), default=-1)
    if int(given.get("num_hidden_layers", layers)) != layers:
        raise ValueError(f"{path} has {layers} layers, and config.json says {given['num_hidden_layers']}")
    return BlockConfig(
        hidden_size=hidden,
        vocab_size=vocab_size,
        draft_vocab_size=int(given.get("draft_vocab_size") or vocab_size),
        taps=_taps(opened, given, fc.shape[1], wide, target),
        target_hidden_size=wide,
        num_layers=layers,
        intermediate_size=needed(path, tensors, "layers.0.mlp.gate_proj.weight").shape[0],
        num_attention_heads=heads,
        num_key_value_heads=int(given.get("num_key_value_heads") or heads),
        head_dim=int(given.get("head_dim") or hidden // heads),
        block_size=size,
        mask_token_id=int(mask),
        from_anchor=bool(given.get("sample_from_anchor", dspark)),
        markov_rank=rank,
        confidence_markov=bool(given.get("confidence_head_with_markov", True)),
        max_position_embeddings=int(given.get("max_position_embeddings") or 2048),
        rms_norm_eps=float(given.get("rms_norm_eps", 1e-6)),
        rope_parameters=rope_of(given, path),
        verifier=opened.verifier,
    )


def _taps(opened: HeadFolder, given: Mapping[str, Any], columns: int, wide: int, target: Loaded) -> tuple[int, ...]:
    """speculators counts states before a layer, all others outputs of layers, where -1 is the embedding."""
    path = opened.path
    outputs, before = given.get("target_layer_ids"), given.get("aux_hidden_state_layer_ids")
    if before is None and outputs is None:
        raise ValueError(f"{path} names no layers of its target: target_layer_ids or aux_hidden_state_layer_ids")
    ids = [int(i) for i in before] if before is not None else [int(i) + 1 for i in outputs or ()]
    key = "target_layer_ids (it counts outputs of layers, one less)" if before is None else "aux_hidden_state_layer_ids"
    check_layers(path, key, ids, columns, wide, target)
    return tuple(tap_of(i) for i in ids)


def _check_shapes(path: Path, c: BlockConfig, tensors: Mapping[str, Tensor]) -> None:
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    wanted: dict[str, tuple[int, ...]] = {
        "fc.weight": (c.hidden_size, len(c.taps) * c.target_hidden_size),
        "hidden_norm.weight": (c.hidden_size,),
        "norm.weight": (c.hidden_size,),
    }
    for i in range(c.num_layers):
        own = {
            "input_layernorm": (c.hidden_size,),
            "post_attention_layernorm": (c.hidden_size,),
            "self_attn.q_proj": (queries, c.hidden_size),
            "self_attn.k_proj": (keys, c.hidden_size),
            "self_attn.v_proj": (keys, c.hidden_size),
            "self_attn.o_proj": (c.hidden_size, queries),
            "self_attn.q_norm": (c.head_dim,),
            "self_attn.k_norm": (c.head_dim,),
            "mlp.gate_proj": (c.intermediate_size, c.hidden_size),
            "mlp.up_proj": (c.intermediate_size, c.hidden_size),
            "mlp.down_proj": (c.hidden_size, c.intermediate_size),
        }
        wanted |= {f"layers.{i}.{n}.weight": shape for n, shape in own.items()}
    if c.markov_rank:
        wanted["markov_head.markov_w1.weight"] = c.vocab_size, c.markov_rank
        wanted["markov_head.markov_w2.weight"] = c.draft_vocab_size, c.markov_rank
    if "confidence_head.proj.weight" in tensors:
        wanted["confidence_head.proj.weight"] = 1, c.hidden_size + (c.markov_rank if c.confidence_markov else 0)
        wanted["confidence_head.proj.bias"] = (1,)
    check_whole(path, tensors, wanted, "block drafter")
