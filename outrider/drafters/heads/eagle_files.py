"""The settings and tensors of a head of the EAGLE family, and how folders say them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.drafters.heads.config import Field, HeadShape, default_taps
from outrider.drafters.heads.files import EAGLE1, EAGLE3, PEAGLE, HeadFolder, settings_named
from outrider.drafters.heads.reading import OUTPUT, HeadReader, HeadWeights, layer_shapes, log
from outrider.models.base import FINAL_NORM
from outrider.models.load import Loaded

_NAMES = {EAGLE3: "EAGLE-3", EAGLE1: "EAGLE-1", PEAGLE: "P-EAGLE"}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = (
    Field("norm_output", bool, False),
    Field("norm_before_residual", bool, False),
)


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadShape):
    """An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) and its variants: a decoder layer over features and tokens.

    Of several layers only the first one reads features.
    """

    norm_before_fc: bool = False  # one norm over all features side by side
    fc_norm: bool = False  # a norm for each feature
    # the output of the last norm is what the head feeds back (EAGLE-3.1 has this and fc_norm)
    norm_output: bool = False
    norm_before_residual: bool = False  # the normed feature is the residual
    # a head of EAGLE-1 (Li et al. 2024, 2401.15077). It reads the token and one feature, and predicts the next feature
    eagle1: bool = False
    attention_bias: bool = False  # the linears of the attention have a bias
    fc_bias: bool = False  # the linear over the features has a bias
    qk_norm: bool = False  # queries and keys are normed in each head, as in Qwen3
    mask_token_id: int | None = None  # token that stands for those that P-EAGLE does not know; None for other heads
    parallel_drafts: int = 0  # tokens that P-EAGLE drafts in one forward; 0 for other heads

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both true; a head has one norm over all features or one for each"
            )
        super().__post_init__()


def eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a head, as speculators names them, without embedding and output head: a file may leave them out."""
    c, size, wide = config, config.hidden_size, len(config.taps) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 2 * size if c.eagle1 else wide)}
    if c.fc_bias:
        shapes["fc.bias"] = (size,)
    if c.norm_before_fc:
        shapes["input_norm.weight"] = (wide,)
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(len(c.taps))}
    if c.mask_token_id is not None:
        shapes["mask_hidden"] = (1, 1, wide)
    for i in range(c.num_layers):
        width = size if c.eagle1 or i else 2 * size
        shapes |= layer_shapes(c, i, width, bias=c.attention_bias, norms=c.qk_norm, input_norm=not c.eagle1)
    return shapes if c.eagle1 else shapes | {"layers.0.hidden_norm.weight": (size,), "norm.weight": (size,)}


@settings_named
def read_eagle(folder: str | Path | HeadFolder, target: Loaded) -> HeadWeights[EagleConfig]:
    """Read a head of EAGLE-3, EAGLE-3.1, P-EAGLE or EAGLE-1 for a target.

    Raises ValueError, naming both sides, for settings, tensors or a vocabulary that do not fit each other or the target.
    """
    reader = HeadReader(folder, target, EAGLE3, EAGLE1, PEAGLE)
    config, tensors, parallel = _config(reader), reader.tensors, reader.kind == PEAGLE
    ids = reader.token_ids(config.vocab_size, config.draft_vocab_size)
    reader.check_whole(eagle_shapes(config), f"{_NAMES[reader.kind]} head")
    output = {OUTPUT: reader.output_rows(config.hidden_size, ids)}
    # the embedding of P-EAGLE is trained, the row of the mask first of all
    return HeadWeights(config, tensors | output | reader.own_embedding(config.hidden_size, trained=parallel), ids)


def _config(reader: HeadReader) -> EagleConfig:
    path, settings, tensors = reader.path, reader.given, reader.tensors
    eagle1, parallel = reader.kind == EAGLE1, reader.kind == PEAGLE
    layers = int(settings.get("num_hidden_layers", 1))
    if layers != 1 and not parallel:
        raise ValueError(
            f"{path}: the head has {layers} layers; engines disagree about the norms of the second, so outrider runs EAGLE heads "
            "of one, and P-EAGLE heads of several"
        )
    shape = reader.shape(settings, _FLAGS)
    norms = {"fc_norm": "fc_norm.0.weight" in tensors, "norm_before_fc": "input_norm.weight" in tensors}
    for name, there in norms.items():
        said = settings.get(name, (settings.get("eagle_config") or {}).get(name))
        if said is not None and bool(said) != there:
            raise ValueError(
                f"{path}: config.json says {name} is {said}, and the file {'has' if there else 'lacks'} its tensors; one of the "
                "two is of another head"
            )
    return reader.made(
        EagleConfig,
        **shape,
        **norms,
        taps=(FINAL_NORM,) if eagle1 else _taps(reader, shape["target_hidden_size"]),
        num_layers=layers,
        eagle1=eagle1,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        mask_token_id=reader.mask(settings) if parallel else None,
        parallel_drafts=_parallel_drafts(reader) if parallel else 0,
    )


def _taps(reader: HeadReader, wide: int) -> tuple[int, ...]:
    """The layers that the head reads, by the first list that the folder has; docs/guides/heads.md says how formats count."""
    settings, key = reader.given, LAYER_IDS
    ids, inner = settings.get(key), (settings.get("eagle_config") or {}).get(key)
    if ids is None and inner is not None:
        key = f"eagle_config.{key} (it counts outputs of layers, one less)"
        ids = [i + 1 for i in inner]  # SGLang's list
    if ids is None:
        ids = [t + 1 for t in default_taps(reader.target.model.num_layers)]
        said = (
            "%s names no layers of its target; the usual ones, before layers %s, may be others than it was trained on"
        )
        log.warning(said, reader.path, ids)
    return reader.taps(key, ids, wide)


def _parallel_drafts(reader: HeadReader) -> int:
    """Tokens that a P-EAGLE head was trained to draft at once: what its folder proposes."""
    methods = reader.given.get("speculators_config", {}).get("proposal_methods") or [{}]
    count = int(methods[0].get("speculative_tokens") or 0)
    if count < 1:
        raise ValueError(
            f"{reader.path}: speculators_config names no speculative_tokens, the tokens that the head drafts"
        )
    return count
