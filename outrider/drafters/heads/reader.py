"""Reads heads with layers, and checks them against their target, so that nothing drafts nonsense in silence.

`read_eagle` reads the EAGLE family. `read_block` reads block drafters: DFlash (arXiv 2602.06036) and DSpark, as speculators,
z-lab, DeepSpec and transformers write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor

from outrider.drafters.heads.checks import (
    check_layers,
    check_target,
    check_whole,
    log,
    needed,
    output_rows,
    own_embedding,
    parted,
    rope_of,
    token_ids,
)
from outrider.drafters.heads.config import (
    BLOCK_FIELDS,
    EAGLE_FIELDS,
    FIELDS,
    FINAL_NORM,
    BlockConfig,
    Field,
    HeadConfig,
    HeadShape,
    default_taps,
    fields_of,
    tap_of,
)
from outrider.drafters.heads.files import DFLASH, DSPARK, EAGLE1, EAGLE3, PEAGLE, HeadFolder, open_head, settings_named
from outrider.models.load import Loaded

_RENAMED = {
    "aux_norm_low.weight": "fc_norm.0.weight",  # SGLang's names
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
Config = TypeVar("Config", HeadConfig, BlockConfig)
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class HeadWeights(Generic[Config]):
    """A head as it was read. tensors: by the names of its module, without the embedding unless it is the head's own. A block
    drafter of all tokens has no `lm_head.weight` either: then it uses the target's.

    token_ids: int64 [draft_vocab], ascending: the target's token of each row of the output head.
    """

    config: Config
    tensors: dict[str, Tensor]
    token_ids: Tensor

    @property
    def own_embedding(self) -> Tensor | None:
        """float [vocab, hidden], or None for the target's."""
        return self.tensors.get("embed_tokens.weight")


@settings_named
def read_eagle(folder: str | Path | HeadFolder, target: Loaded) -> HeadWeights[HeadConfig]:
    """Read a head of EAGLE-3, EAGLE-3.1, P-EAGLE or EAGLE-1 for a target.

    Raises ValueError, naming both sides, for settings, tensors or a vocabulary that do not fit each other or the target.
    """
    opened, tensors, spare = _opened(folder, (EAGLE3, EAGLE1, PEAGLE), "not of the EAGLE family")
    config = _eagle_config(opened, tensors, target)
    ids = token_ids(spare, config, opened.path)
    config = replace(config, draft_vocab_size=len(ids))
    kind = "EAGLE-1" if config.eagle1 else "EAGLE-3" if config.mask_token_id is None else "P-EAGLE"
    check_whole(opened.path, tensors, _eagle_shapes(config), f"{kind} head")
    tensors["lm_head.weight"] = output_rows(spare.get("lm_head.weight"), config, ids, opened, target)
    # that of P-EAGLE is trained, the row of the mask first of all
    tensors |= own_embedding(spare, config, target, opened.path, trained=config.mask_token_id is not None)
    return HeadWeights(config, tensors, ids)


@settings_named
def read_block(folder: str | Path | HeadFolder, target: Loaded) -> HeadWeights[BlockConfig]:
    """Read a DFlash or a DSpark drafter. Raises ValueError, naming both sides, for what does not fit."""
    opened, tensors, spare = _opened(folder, (DFLASH, DSPARK), "not a block drafter")
    config = _block_config(opened, tensors, target)
    confidence = "confidence_head.proj.weight" in tensors
    check_whole(opened.path, tensors, _block_shapes(config, confidence), "block drafter")
    ids = token_ids(spare, config, opened.path)
    if "lm_head.weight" in spare or len(ids) < config.vocab_size:
        tensors["lm_head.weight"] = output_rows(spare.get("lm_head.weight"), config, ids, opened, target)
    tensors |= own_embedding(spare, config, target, opened.path)
    return HeadWeights(config, tensors, ids)


def _opened(
    folder: str | Path | HeadFolder, kinds: Sequence[str], other: str
) -> tuple[HeadFolder, dict[str, Tensor], dict[str, Tensor]]:
    """A folder, and its tensors as `parted` gives them. Raises ValueError for a head of another kind."""
    opened = folder if isinstance(folder, HeadFolder) else open_head(folder)
    if opened.kind not in kinds:
        raise ValueError(f"{opened.path} is a head of the kind {opened.kind!r}, {other}")
    return opened, *parted({_RENAMED.get(n, n): t for n, t in opened.tensors.items()})


def _shape(
    opened: HeadFolder, given: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Loaded, more: Sequence[Field]
) -> dict[str, Any]:
    """The fields of `FIELDS` and `more`, and the others of a `HeadShape` but its taps and layers. Checks them."""
    path = opened.path
    fc = needed(path, tensors, "fc.weight", "layers.0.mlp.gate_proj.weight")
    hidden, heads = int(given.get("hidden_size") or len(fc)), int(given.get("num_attention_heads") or 0)
    if len(fc) != hidden:
        raise ValueError(f"{path}: fc.weight has {len(fc)} rows, and config.json says hidden_size {hidden}")
    if not heads:
        raise ValueError(f"{path}: config.json does not say num_attention_heads")
    if any(kind != "full_attention" for kind in given.get("layer_types") or ()):
        raise ValueError(f"{path} has layers of sliding attention, which outrider's heads do not have")
    inner = len(tensors["layers.0.mlp.gate_proj.weight"])
    known = {"hidden_size": hidden, "vocab_size": target.model.vocab_size, "head_dim": hidden // heads}
    found = fields_of(given, (*FIELDS, *more), known | {"intermediate_size": inner}) | {"intermediate_size": inner}
    check_target(path, found["vocab_size"], found["target_hidden_size"], opened.verifier, target)
    return found | {"rope_parameters": rope_of(given, path), "verifier": opened.verifier}


def _mask(path: Path, given: Mapping[str, Any], vocab_size: int) -> int:
    mask = given.get("mask_token_id")
    if mask is None or not 0 <= int(mask) < vocab_size:
        raise ValueError(f"{path}: mask_token_id is {mask}; it must be a token of the target, 0 to {vocab_size - 1}")
    return int(mask)


def _made(kind: type[Config], path: Path, **fields: Any) -> Config:
    """A configuration. Its ValueError names the path."""
    try:
        return kind(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _eagle_config(opened: HeadFolder, tensors: Mapping[str, Tensor], target: Loaded) -> HeadConfig:
    path, given = opened.path, opened.settings
    eagle1, parallel = opened.kind == EAGLE1, opened.kind == PEAGLE
    layers = int(given.get("num_hidden_layers", 1))
    if layers != 1 and not parallel:
        raise ValueError(
            f"{path}: the head has {layers} layers; engines disagree about the norms of the second, so outrider runs EAGLE heads "
            "of one, and P-EAGLE heads of several"
        )
    shape = _shape(opened, given, tensors, target, EAGLE_FIELDS)
    flags = {
        "fc_norm": any(n.startswith("fc_norm.") for n in tensors),
        "norm_before_fc": "input_norm.weight" in tensors,
    }
    for name, there in flags.items():
        said = given.get(name, (given.get("eagle_config") or {}).get(name))
        if said is not None and bool(said) != there:
            raise ValueError(
                f"{path}: config.json says {name} is {said}, and the file {'has' if there else 'lacks'} its tensors; one of the "
                "two is of another head"
            )
    columns, wide = tensors["fc.weight"].shape[1], shape["target_hidden_size"]
    return _made(
        HeadConfig,
        path,
        **shape,
        **flags,
        taps=(FINAL_NORM,) if eagle1 else _eagle_taps(opened, columns, wide, target),
        num_layers=layers,
        eagle1=eagle1,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        mask_token_id=_mask(path, given, shape["vocab_size"]) if parallel else None,
        parallel_drafts=_parallel_drafts(opened) if parallel else 0,
    )


def _eagle_taps(opened: HeadFolder, columns: int, wide: int, target: Loaded) -> tuple[int, ...]:
    """The layers that the head reads, by the first list that the folder has; see docs/guides/heads.md for who counts how."""
    given, path = opened.settings, opened.path
    inner = (given.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = given.get("eagle_aux_hidden_state_layer_ids")
    key = "eagle_aux_hidden_state_layer_ids"
    if ids is None and inner is not None:
        key = f"eagle_config.{key} (it counts outputs of layers, one less)"
        ids = [i + 1 for i in inner]  # SGLang's list
    if ids is None:
        ids = [t + 1 for t in default_taps(target.model.num_layers)]
        log.warning(
            "%s names no layers of its target; the usual ones, before layers %s, may be others than it was trained on",
            path,
            ids,
        )
    check_layers(path, key, ids, columns, wide, target)
    return tuple(tap_of(i) for i in ids)


def _parallel_drafts(opened: HeadFolder) -> int:
    """Tokens that a P-EAGLE head was trained to draft at once: what its folder proposes."""
    methods = opened.settings.get("speculators_config", {}).get("proposal_methods") or [{}]
    found = int(methods[0].get("speculative_tokens") or 0)
    if found < 1:
        raise ValueError(
            f"{opened.path}: speculators_config names no speculative_tokens, the tokens that the head drafts"
        )
    return found


def _block_config(opened: HeadFolder, tensors: Mapping[str, Tensor], target: Loaded) -> BlockConfig:
    path = opened.path
    given = {**opened.settings, **(opened.settings.get("dflash_config") or {})}
    given.setdefault("sample_from_anchor", opened.kind == DSPARK)
    shape = _shape(opened, given, tensors, target, BLOCK_FIELDS)
    if given.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(f"{path} has a Markov head of the kind {given['markov_head_type']!r}; outrider runs 'vanilla'")
    if shape["block_size"] < 2:
        raise ValueError(f"{path}: block_size is {shape['block_size']}; a block has two slots or more")
    markov = tensors.get("markov_head.markov_w1.weight")
    layers = 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("layers."))
    if int(given.get("num_hidden_layers", layers)) != layers:
        raise ValueError(f"{path} has {layers} layers, and config.json says {given['num_hidden_layers']}")
    return _made(
        BlockConfig,
        path,
        **shape,
        taps=_block_taps(opened, given, tensors["fc.weight"].shape[1], shape["target_hidden_size"], target),
        num_layers=layers,
        mask_token_id=_mask(path, given, shape["vocab_size"]),
        markov_rank=0 if markov is None else markov.shape[1],
    )


def _block_taps(
    opened: HeadFolder, given: Mapping[str, Any], columns: int, wide: int, target: Loaded
) -> tuple[int, ...]:
    """speculators counts states before a layer, all others outputs of layers, where -1 is the embedding."""
    path = opened.path
    outputs, before = given.get("target_layer_ids"), given.get("aux_hidden_state_layer_ids")
    if before is None and outputs is None:
        raise ValueError(f"{path} names no layers of its target: target_layer_ids or aux_hidden_state_layer_ids")
    ids = [int(i) for i in before] if before is not None else [int(i) + 1 for i in outputs or ()]
    key = "target_layer_ids (it counts outputs of layers, one less)" if before is None else "aux_hidden_state_layer_ids"
    check_layers(path, key, ids, columns, wide, target)
    return tuple(tap_of(i) for i in ids)


def _layer_shapes(c: HeadShape, i: int, read: int, *, bias: bool, qk_norm: bool) -> Shapes:
    """The shape of each tensor of a layer but its input norm. read: columns of what its attention reads."""
    size, queries, keys = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    rows = {"q": queries, "k": keys, "v": keys}
    found: Shapes = {f"self_attn.{n}_proj.weight": (count, read) for n, count in rows.items()}
    found |= {
        "self_attn.o_proj.weight": (size, queries),
        "post_attention_layernorm.weight": (size,),
        "mlp.gate_proj.weight": (c.intermediate_size, size),
        "mlp.up_proj.weight": (c.intermediate_size, size),
        "mlp.down_proj.weight": (size, c.intermediate_size),
    }
    if bias:
        found |= {f"self_attn.{n}_proj.bias": (count,) for n, count in rows.items()}
    if qk_norm:
        found |= {f"self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
    return {f"layers.{i}.{n}": shape for n, shape in found.items()}


def _eagle_shapes(c: HeadConfig) -> Shapes:
    """The shape of each tensor that a head must have."""
    size, wide = c.hidden_size, len(c.taps) * c.target_hidden_size
    wanted: Shapes = {"fc.weight": (size, 2 * size if c.eagle1 else wide)}
    if c.fc_bias:
        wanted["fc.bias"] = (size,)
    if c.norm_before_fc:
        wanted["input_norm.weight"] = (wide,)
    if c.fc_norm:
        wanted |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(len(c.taps))}
    if not c.eagle1:
        wanted |= {"norm.weight": (size,), "layers.0.hidden_norm.weight": (size,)}
        wanted |= {f"layers.{i}.input_layernorm.weight": (size,) for i in range(c.num_layers)}
    if c.mask_token_id is not None:
        wanted["mask_hidden"] = (1, 1, wide)
    for i in range(c.num_layers):
        read = size if i or c.eagle1 else 2 * size
        wanted |= _layer_shapes(c, i, read, bias=c.attention_bias, qk_norm=c.qk_norm)
    return wanted


def _block_shapes(c: BlockConfig, confidence: bool) -> Shapes:
    size = c.hidden_size
    wanted: Shapes = {"fc.weight": (size, len(c.taps) * c.target_hidden_size)}
    wanted |= {"hidden_norm.weight": (size,), "norm.weight": (size,)}
    for i in range(c.num_layers):
        wanted |= _layer_shapes(c, i, size, bias=False, qk_norm=True) | {f"layers.{i}.input_layernorm.weight": (size,)}
    if c.markov_rank:
        wanted["markov_head.markov_w1.weight"] = c.vocab_size, c.markov_rank
        wanted["markov_head.markov_w2.weight"] = c.draft_vocab_size, c.markov_rank
    if confidence:
        wanted["confidence_head.proj.weight"] = 1, size + (c.markov_rank if c.confidence_markov else 0)
        wanted["confidence_head.proj.bias"] = (1,)
    return wanted
