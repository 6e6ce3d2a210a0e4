"""The settings and tensors of a block drafter, DFlash (arXiv 2602.06036), DFlash2 or DSpark, and how folders say them.

The folders are as speculators, z-lab, Model-Optimizer, DeepSpec and transformers write them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.drafters.heads.config import Field, HeadShape
from outrider.drafters.heads.files import DFLASH, DFLASH2, DSPARK, HeadFolder, settings_named
from outrider.drafters.heads.reading import OUTPUT, HeadReader, HeadWeights, layer_shapes
from outrider.models.load import Loaded

_FIELDS = (
    Field("block_size", int, 0),
    Field("from_anchor", bool, key="sample_from_anchor"),
    Field("markov_rank", int, 0),
    Field("confidence", bool, False, "enable_confidence_head"),
    Field("confidence_markov", bool, True, "confidence_head_with_markov"),
    Field("selector_top_k", int, 16),
)


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadShape):
    """A block drafter: Qwen3-shaped layers over [root, mask, ...], which also attend to the projected features of the text."""

    block_size: int  # slots of a block
    mask_token_id: int  # the token of all slots but the first
    from_anchor: bool  # slot 0 drafts too (DSpark); in DFlash slot k drafts the token at its own position
    markov_rank: int = 0  # width of the bias by the token before; 0 without one
    confidence: bool = False  # it has a confidence head
    confidence_markov: bool = False  # the confidence reads the token before, too
    conv_kernel_size: int = 0  # taps of the convolutions around attention and MLP (DFlash2); 0 without
    conv_group_size: int = 16  # numbers that share a kernel
    selector_rank: int = 0  # width of DFlash2's choice among the likeliest tokens; 0 without
    selector_top_k: int = 16  # so many likeliest tokens

    @property
    def drafts(self) -> int:
        """Draft tokens of a block."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def candidates(self) -> int:
        """The likeliest tokens of a slot, among which the token before chooses; 0 for all tokens."""
        return self.selector_top_k if self.selector_rank else 0


def block_shapes(config: BlockConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a drafter, as speculators names them, without embedding and output head: a file may leave them out."""
    c, size, wide = config, config.hidden_size, len(config.taps) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, wide),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    if c.markov_rank:
        shapes["markov_head.markov_w1.weight"] = (c.vocab_size, c.markov_rank)
        shapes["markov_head.markov_w2.weight"] = (c.draft_vocab_size, c.markov_rank)
    if c.confidence:
        shapes["confidence_head.proj.weight"] = (1, size + (c.markov_rank if c.confidence_markov else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if c.selector_rank:
        tables = {f"{n}_codebook": (c.vocab_size, c.selector_rank) for n in ("predecessor", "successor")}
        tables["hidden_projection.weight"] = (c.selector_rank, size)
        shapes |= {f"candidate_selector.{n}": shape for n, shape in tables.items()}
    for i in range(c.num_layers):
        shapes |= layer_shapes(c, i, size, norms=True)
        for part in ("attention", "mlp") if c.conv_kernel_size else ():
            name, rows = f"layers.{i}.{part}_conv", 2 * c.conv_kernel_size * (size // c.conv_group_size)
            shapes[f"{name}.base_kernel"] = (2, c.conv_kernel_size, size)
            shapes[f"{name}.kernel_projection.weight"] = (rows, size)
    return shapes


@settings_named
def read_block(folder: str | Path | HeadFolder, target: Loaded) -> HeadWeights[BlockConfig]:
    """Read a DFlash, DFlash2 or DSpark drafter. Raises ValueError, naming both sides, for what does not fit."""
    reader = HeadReader(folder, target, DFLASH, DFLASH2, DSPARK)
    config, tensors = _config(reader), reader.tensors
    reader.check_whole(block_shapes(config), "block drafter")
    ids = reader.token_ids(config.vocab_size, config.draft_vocab_size)
    if OUTPUT in reader.spare or len(ids) < config.vocab_size:
        tensors[OUTPUT] = reader.output_rows(config.hidden_size, ids)
    return HeadWeights(config, tensors | reader.own_embedding(config.hidden_size), ids)


def _config(reader: HeadReader) -> BlockConfig:
    path, tensors = reader.path, reader.tensors
    settings = {"sample_from_anchor": reader.kind == DSPARK} | reader.given | (reader.given.get("dflash_config") or {})
    markov = tensors.get("markov_head.markov_w1.weight")
    settings["markov_rank"] = 0 if markov is None else markov.shape[1]
    settings["enable_confidence_head"] = "confidence_head.proj.weight" in tensors
    shape = reader.shape(settings, _FIELDS) | _convolutions(reader)
    if reader.kind == DFLASH2:
        shape["selector_rank"] = reader.tensor("candidate_selector.successor_codebook").shape[1]
    if settings.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(
            f"{path} has a Markov head of the kind {settings['markov_head_type']!r}; outrider runs 'vanilla'"
        )
    if shape["block_size"] < 2:
        raise ValueError(f"{path}: block_size is {shape['block_size']}; a block has two slots or more")
    layers = 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("layers."))
    if int(settings.get("num_hidden_layers", layers)) != layers:
        raise ValueError(f"{path} has {layers} layers, and config.json says {settings['num_hidden_layers']}")
    taps = _taps(reader, settings, shape["target_hidden_size"])
    return reader.made(BlockConfig, **shape, taps=taps, num_layers=layers, mask_token_id=reader.mask(settings))


def _convolutions(reader: HeadReader) -> dict[str, int]:
    """Their shapes; nothing for a drafter without them."""
    names = (f"layers.0.attention_conv.{n}" for n in ("base_kernel", "kernel_projection.weight"))
    base, rows = (reader.tensors.get(name) for name in names)
    if base is None or rows is None:
        return {}
    groups = len(rows) // (2 * base.shape[1])
    return {"conv_kernel_size": base.shape[1], "conv_group_size": base.shape[2] // max(groups, 1)}


def _taps(reader: HeadReader, given: Mapping[str, Any], wide: int) -> tuple[int, ...]:
    """speculators counts states before a layer, all others outputs of layers, where -1 is the embedding."""
    outputs, before = given.get("target_layer_ids"), given.get("aux_hidden_state_layer_ids")
    if before is None and outputs is None:
        raise ValueError(f"{reader.path} names no layers of its target: target_layer_ids or aux_hidden_state_layer_ids")
    if before is not None:
        return reader.taps("aux_hidden_state_layer_ids", [int(i) for i in before], wide)
    ids = [int(i) + 1 for i in outputs or ()]
    return reader.taps("target_layer_ids (it counts outputs of layers, one less)", ids, wide)
