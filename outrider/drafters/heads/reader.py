"""Reads a head of the EAGLE family and checks it against its target, so that nothing drafts nonsense in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from outrider.drafters.heads.checks import (
    add_embedding,
    check_embedding,
    check_layers,
    check_target,
    check_whole,
    log,
    needed,
    output_rows,
    parted,
    rope_of,
    token_ids,
)
from outrider.drafters.heads.config import FINAL_NORM, HeadConfig, default_taps, tap_of
from outrider.drafters.heads.eagle_module import Eagle
from outrider.drafters.heads.files import EAGLE1, EAGLE3, PEAGLE, HeadFolder, open_head, settings_named
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
        c = self.config
        if c.num_layers > 1 or c.qk_norm or c.mask_token_id is not None:
            raise ValueError("heads of P-EAGLE, and of Qwen3's layers, draft here and cannot be trained or written")
        head = Eagle(c, self.token_ids)
        own = {n: t.float() for n, t in self.tensors.items()}
        head.load_state_dict({"embed_tokens.weight": embedding.float()} | own)
        return head


@settings_named
def read_eagle(folder: str | Path | HeadFolder, target: Loaded) -> EagleWeights:
    """Read a head of EAGLE-3, EAGLE-3.1, P-EAGLE or EAGLE-1 for a target.

    Raises ValueError, naming both sides, for settings, tensors or a vocabulary that do not fit each other or the target.
    """
    opened = folder if isinstance(folder, HeadFolder) else open_head(folder)
    if opened.kind not in (EAGLE3, EAGLE1, PEAGLE):
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
    embedding = spare.get("embed_tokens.weight")
    if config.mask_token_id is None:
        add_embedding(tensors, embedding, config, target, opened.path)
    elif embedding is not None:  # it is trained, the row of the mask first of all
        check_embedding(embedding, config, opened.path)
        tensors["embed_tokens.weight"] = embedding
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
    layers, parallel = int(given.get("num_hidden_layers", 1)), opened.kind == PEAGLE
    if layers != 1 and not parallel:
        raise ValueError(
            f"{path}: the head has {layers} layers; engines disagree about the norms of the second, so outrider runs EAGLE heads "
            "of one, and P-EAGLE heads of several"
        )
    if any(kind != "full_attention" for kind in given.get("layer_types") or ()):
        raise ValueError(f"{path} has layers of sliding attention, which outrider's heads do not have")
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
    mask = int(given.get("mask_token_id") or 0) if parallel else None
    if mask is not None and ("mask_token_id" not in given or not 0 <= mask < vocab_size):
        raise ValueError(
            f"{path}: mask_token_id is {given.get('mask_token_id')}; it must be a token of the target, 0 to {vocab_size - 1}"
        )
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
            qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
            num_layers=layers,
            mask_token_id=mask,
            parallel_drafts=_parallel_drafts(opened) if parallel else 0,
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


def _check_shapes(path: Path, config: HeadConfig, tensors: Mapping[str, Tensor]) -> None:
    kind = "EAGLE-1" if config.eagle1 else "EAGLE-3" if config.mask_token_id is None else "P-EAGLE"
    check_whole(path, tensors, _shapes(config), f"{kind} head")


def _shapes(c: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a head must have."""
    size, wide = c.hidden_size, len(c.taps) * c.target_hidden_size
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    wanted: dict[str, tuple[int, ...]] = {"fc.weight": (size, 2 * size if c.eagle1 else wide)}
    if c.fc_bias:
        wanted["fc.bias"] = (size,)
    if c.norm_before_fc:
        wanted["input_norm.weight"] = (wide,)
    if c.fc_norm:
        wanted |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(len(c.taps))}
    if not c.eagle1:
        wanted |= {"norm.weight": (size,), "layers.0.hidden_norm.weight": (size,)}
    if c.mask_token_id is not None:
        wanted["mask_hidden"] = (1, 1, wide)
    for i in range(c.num_layers):
        read = size if i or c.eagle1 else 2 * size
        own = {
            "self_attn.q_proj.weight": (queries, read),
            "self_attn.k_proj.weight": (keys, read),
            "self_attn.v_proj.weight": (keys, read),
            "self_attn.o_proj.weight": (size, queries),
            "post_attention_layernorm.weight": (size,),
            "mlp.gate_proj.weight": (c.intermediate_size, size),
            "mlp.up_proj.weight": (c.intermediate_size, size),
            "mlp.down_proj.weight": (size, c.intermediate_size),
        }
        if not c.eagle1:
            own["input_layernorm.weight"] = (size,)
        if c.attention_bias:
            own |= {f"self_attn.{n}_proj.bias": (rows,) for n, rows in (("q", queries), ("k", keys), ("v", keys))}
        if c.qk_norm:
            own |= {f"self_attn.{n}_norm.weight": (c.head_dim,) for n in "qk"}
        wanted |= {f"layers.{i}.{n}": shape for n, shape in own.items()}
    return wanted
