"""Reads a head of the EAGLE family and checks it against its target, so that nothing drafts nonsense in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from outrider.drafters.heads.checks import (
    SPARE,
    add_embedding,
    check_target,
    log,
    needed,
    output_rows,
    parted,
    rope_of,
    token_ids,
)
from outrider.drafters.heads.config import FINAL_NORM, HeadConfig, default_taps, tap_of
from outrider.drafters.heads.eagle_module import Eagle
from outrider.drafters.heads.files import EAGLE1, EAGLE3, HeadFolder, open_head
from outrider.models.load import Loaded

_SGLANG_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


@dataclass(frozen=True, eq=False)
class EagleWeights:
    """A head as it was read. tensors: by the names of `Eagle`, without the embedding unless it is the head's own.

    token_ids: int64 [draft_vocab], ascending: the target's token of each row of `lm_head`.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    token_ids: Tensor

    @property
    def own_embedding(self) -> Tensor | None:
        """float [vocab, hidden], or None for the target's."""
        return self.tensors.get("embed_tokens.weight")

    def module(self, embedding: Tensor) -> Eagle:
        """The head in plain torch, float32. embedding: float [vocab, hidden], the target's; used if the head has none."""
        head = Eagle(self.config, self.token_ids)
        own = {n: t.float() for n, t in self.tensors.items()}
        head.load_state_dict({"embed_tokens.weight": embedding.float()} | own)
        return head


def read_eagle(folder: str | Path | HeadFolder, target: Loaded) -> EagleWeights:
    """Read a head of EAGLE-3, EAGLE-3.1 or EAGLE-1 for a target.

    Raises ValueError, naming both sides, for settings, tensors or a vocabulary that do not fit each other or the target.
    """
    opened = folder if isinstance(folder, HeadFolder) else open_head(folder)
    if opened.kind not in (EAGLE3, EAGLE1):
        raise ValueError(f"{opened.path} is a head of the kind {opened.kind!r}, not of the EAGLE family")
    tensors = dict(opened.tensors)
    for theirs, ours in _SGLANG_NORMS.items():
        if f"{theirs}.weight" in tensors:
            tensors[f"{ours}.weight"] = tensors.pop(f"{theirs}.weight")
    tensors, spare = parted(tensors)
    config = _settings(opened, tensors, target)
    ids = token_ids(spare, config, opened.path)
    config = replace(config, draft_vocab_size=len(ids))
    _check_shapes(opened.path, config, tensors)
    tensors["lm_head.weight"] = output_rows(spare.get("lm_head.weight"), config, ids, opened, target)
    add_embedding(tensors, spare.get("embed_tokens.weight"), config, target, opened.path)
    return EagleWeights(config, tensors, ids)


def _settings(opened: HeadFolder, tensors: Mapping[str, Tensor], target: Loaded) -> HeadConfig:
    path, given = opened.path, opened.settings
    eagle1 = opened.kind == EAGLE1
    fc = needed(path, tensors, "fc.weight")
    hidden = int(given.get("hidden_size") or fc.shape[0])
    if fc.shape[0] != hidden:
        raise ValueError(f"{path}: fc.weight has {fc.shape[0]} rows, and config.json says hidden_size {hidden}")
    wide = int(given.get("target_hidden_size") or hidden)
    heads = int(given.get("num_attention_heads") or 0)
    if not heads:
        raise ValueError(f"{path}: config.json does not say num_attention_heads")
    if int(given.get("num_hidden_layers", 1)) != 1:
        raise ValueError(
            f"{path}: the head has {given['num_hidden_layers']} layers; engines disagree about the norms of the second, so "
            "outrider runs heads of one"
        )
    kv_heads = int(given.get("num_key_value_heads") or heads)
    vocab_size = int(given.get("vocab_size") or target.model.vocab_size)
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
    check_target(path, vocab_size, wide, opened.verifier, target)
    taps = (FINAL_NORM,) if eagle1 else _taps(opened, fc.shape[1], wide, target)
    try:
        return HeadConfig(
            hidden_size=hidden,
            vocab_size=vocab_size,
            draft_vocab_size=int(given.get("draft_vocab_size") or vocab_size),
            taps=taps,
            intermediate_size=needed(path, tensors, "layers.0.mlp.gate_proj.weight").shape[0],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=int(given.get("head_dim") or hidden // heads),
            target_hidden_size=wide,
            max_position_embeddings=int(given.get("max_position_embeddings") or 2048),
            rms_norm_eps=float(given.get("rms_norm_eps", 1e-6)),
            rope_parameters=rope_of(given, path),
            hidden_act=str(given.get("hidden_act", "silu")),
            norm_output=bool(given.get("norm_output", False)),
            norm_before_residual=bool(given.get("norm_before_residual", False)),
            eagle1=eagle1,
            attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
            fc_bias="fc.bias" in tensors,
            verifier=opened.verifier,
            **flags,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _taps(opened: HeadFolder, columns: int, wide: int, target: Loaded) -> tuple[int, ...]:
    """The layers that the head reads, by the first list that the folder has; see docs/guides/heads.md for who counts how."""
    given, path = opened.settings, opened.path
    inner = (given.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = given.get("eagle_aux_hidden_state_layer_ids")
    layers = target.model.num_layers
    if ids is None and inner is not None:
        ids = [i + 1 for i in inner]  # SGLang's list counts outputs of layers
    if ids is None:
        taps = default_taps(layers)
        log.warning(
            "%s names no layers of its target; the usual ones, before layers %s, may be others than it was trained on",
            path,
            [t + 1 for t in taps],
        )
    else:
        wrong = [i for i in ids if not (isinstance(i, int) and 0 <= i <= layers)]
        if wrong:
            raise ValueError(
                f"{path} reads the state before layer {wrong[0]} of its target; {target.name} has {layers} layers"
            )
        taps = tuple(tap_of(i) for i in ids)
    if columns != len(taps) * wide:
        trained = f"{columns // wide} layers" if columns % wide == 0 else "features of another width"
        raise ValueError(
            f"{path}: fc.weight reads {columns} numbers, which is {trained} of a target {wide} wide; its settings name "
            f"{len(taps)} layers, so {len(taps) * wide}"
        )
    return taps


def _check_shapes(path: Path, config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    with torch.device("meta"):
        wanted = {
            n: tuple(t.shape)
            for n, t in Eagle(replace(config, draft_vocab_size=config.vocab_size)).state_dict().items()
        }
    wanted = {n: s for n, s in wanted.items() if n not in SPARE}
    needed(path, tensors, *wanted)
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{path}: {name} is {tuple(tensors[name].shape)}, and the settings say {shape}")
    if more := sorted(set(tensors) - set(wanted)):
        raise ValueError(
            f"{path} holds {more[0]}{f' and {len(more) - 1} more tensors' if more[1:] else ''} that no "
            f"{'EAGLE-1' if config.eagle1 else 'EAGLE-3'} head of these settings has; without them it would draft badly"
        )
