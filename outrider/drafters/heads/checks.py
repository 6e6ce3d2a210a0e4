"""Checks that the readers of heads share: does a head fit its target, and do its settings fit its tensors?"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.heads.config import plain_rope
from outrider.drafters.heads.files import HeadFolder
from outrider.models.load import Loaded

log = logging.getLogger("outrider.heads")
SPARE = ("t2d", "d2t", "embed_tokens.weight", "lm_head.weight")  # tensors that a file may leave out
_COMPARED = 256  # rows of an embedding that are compared with the target's


def rope_of(given: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The rotary embedding: `rope_parameters`, else `rope_theta` and `rope_scaling`."""
    if given.get("rope_parameters"):
        return plain_rope(given["rope_parameters"])
    theta = given.get("rope_theta")
    if theta is None:
        log.warning("%s has no rope_theta; 10000 is taken, and a head that was trained with another drafts badly", path)
    scaling = dict(given.get("rope_scaling") or {})
    kind = scaling.pop("type", None)
    return plain_rope({"rope_theta": float(theta or 10000.0)} | ({"rope_type": kind} if kind else {}) | scaling)


def check_target(path: Path, vocab_size: int, hidden_size: int, verifier: str | None, target: Loaded) -> None:
    """Raise ValueError if a head was made for a target of another shape. verifier: the name of that target, if it is known."""
    for what, head, own in (
        ("tokens in the vocabulary", vocab_size, target.model.vocab_size),
        ("numbers in a hidden state", hidden_size, target_width(target)),
    ):
        if head != own:
            hint = f" (it names {verifier})" if verifier else ""
            raise ValueError(
                f"{path} was trained for a target with {head} {what}{hint}, and {target.name} has {own}; a head drafts only for "
                f"the model that it was trained for. Train one: outrider train eagle3 -m {target.name} -o NEW"
            )


def check_layers(path: Path, key: str, ids: Sequence[Any], columns: int, wide: int, target: Loaded) -> None:
    """Raise ValueError if the target lacks one of the layers that a head reads, or if they are not as many as it was trained on.

    key: where config.json names them. ids: as states before a layer. columns: of fc. wide: numbers in a hidden state.
    """
    layers = target.model.num_layers
    wrong = [i for i in ids if not (isinstance(i, int) and 0 <= i <= layers)]
    if wrong:
        raise ValueError(
            f"{path} reads the state before layer {wrong[0]} of its target; {target.name} has {layers} layers. Correct {key} in "
            "its config.json, or give the model that it was trained for"
        )
    if columns != len(ids) * wide:
        trained = f"{columns // wide} layers" if columns % wide == 0 else "features of another width"
        raise ValueError(
            f"{path}: fc.weight reads {columns} numbers, which is {trained} of a target {wide} wide; its settings name "
            f"{len(ids)} layers, so {len(ids) * wide}. Write the layers that it was trained on as {key} in its config.json"
        )


def check_whole(path: Path, tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]], kind: str) -> None:
    """Raise ValueError unless a head's tensors are those of its settings. wanted: their shapes. kind: of head, in words."""
    needed(path, tensors, *wanted)
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{path}: {name} is {tuple(tensors[name].shape)}, and the settings say {shape}")
    if more := sorted(set(tensors) - set(wanted)):
        raise ValueError(
            f"{path} holds {more[0]}{f' and {len(more) - 1} more tensors' if more[1:] else ''} that no {kind} of these settings "
            "has; without them it would draft badly. Give it the config.json that it was trained with"
        )


def say_length(path: object, positions: int, wanted: int) -> None:
    """Warn if a head knows shorter texts than the engine may write. positions: of the head. wanted: tokens of a text."""
    if positions < wanted:
        log.warning(
            "%s drafts in texts of up to %d tokens, and a text may have %d here; beyond that nothing is drafted. Give a head "
            "with larger max_position_embeddings, or another method beside it: --method suffix,eagle",
            path,
            positions,
            wanted,
        )


def token_ids(spare: Mapping[str, Tensor], config: Any, path: Path) -> Tensor:
    """int64 [draft_vocab], ascending: the target's token of each row of the output head. Raises ValueError for a broken map.

    spare: may hold d2t, the offset from each row to its token, and t2d, bool [vocab], the tokens with a row. config: has
    vocab_size and draft_vocab_size.
    """
    offsets, has = spare.get("d2t"), spare.get("t2d")
    size, rows = config.vocab_size, config.draft_vocab_size
    if offsets is None and has is None:
        if rows != size:
            raise ValueError(
                f"{path} has {rows} draft tokens of {size} and no map (d2t or t2d) that says which; the file is not whole"
            )
        return torch.arange(size)
    if offsets is None:
        assert has is not None
        ids = has.bool().nonzero().flatten()
    else:
        ids = offsets.long() + torch.arange(len(offsets))
        given = offsets.long()
        if len(given) and bool((given.diff() > 0).all()) and int(given[-1]) < size <= int(ids.max()):
            raise ValueError(
                f"{path}: d2t holds token ids, and it must hold offsets: id - row. Write d2t - torch.arange({len(given)})"
            )
    if len(ids) != rows:
        raise ValueError(f"{path}: the map has {len(ids)} draft tokens, and config.json says draft_vocab_size {rows}")
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= size or not bool((ids.diff() > 0).all()):
        raise ValueError(
            f"{path}: the map d2t gives the tokens {int(ids.min())} to {int(ids.max())}; they must ascend, from 0 to {size - 1}"
        )
    if has is not None and not torch.equal(has.bool().nonzero().flatten(), ids):
        raise ValueError(f"{path}: d2t and t2d name different tokens; one of the two is of another head")
    return ids


def output_rows(stored: Tensor | None, config: Any, ids: Tensor, opened: HeadFolder, target: Loaded) -> Tensor:
    """float [draft_vocab, hidden]: the output head. Without one in the file it is the target's, for the draft tokens."""
    wanted = (len(ids), config.hidden_size)
    if stored is None:
        if config.hidden_size != target_width(target):
            raise ValueError(
                f"{opened.path} has no lm_head.weight, and the target's is {target_width(target)} wide where the head is "
                f"{config.hidden_size}; the file is not whole"
            )
        tied = opened.settings.get("tie_word_embeddings")
        return target.model.embedding_rows(ids) if tied else target.model.head_rows(ids)
    if tuple(stored.shape) == (config.vocab_size, config.hidden_size) and len(ids) < config.vocab_size:
        raise ValueError(
            f"{opened.path}: lm_head.weight has a row for all {config.vocab_size} tokens, and config.json says "
            f"draft_vocab_size {len(ids)}"
        )
    if tuple(stored.shape) != wanted:
        raise ValueError(f"{opened.path}: lm_head.weight is {tuple(stored.shape)}, and the settings say {wanted}")
    return stored


def own_embedding(
    spare: Mapping[str, Tensor], config: Any, target: Loaded, path: Path, *, trained: bool = False
) -> dict[str, Tensor]:
    """The embedding of the file by its name. Nothing if there is none, or if it is the target's up to rounding.

    trained: it is kept anyway. Raises ValueError for an embedding of another shape."""
    own, wanted = spare.get("embed_tokens.weight"), (config.vocab_size, config.hidden_size)
    if own is None:
        return {}
    if tuple(own.shape) != wanted:
        raise ValueError(f"{path}: embed_tokens.weight is {tuple(own.shape)}, and the settings say {wanted}")
    if not trained and config.hidden_size == target_width(target):
        some = torch.linspace(0, len(own) - 1, min(_COMPARED, len(own))).long()
        theirs = target.model.embedding_rows(some).cpu()
        gap = (own[some].float() - theirs).abs().amax(1) / theirs.abs().amax(1).clamp_min(1e-6)
        if float(gap.median()) < 0.1:
            return {}
        said = "%s has an embedding of its own, not that of %s; it is used, and engines that ignore it draft badly"
        log.warning(said, path, target.name)
    return {"embed_tokens.weight": own}


def parted(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the head's own tensors, those of `SPARE`). Buffers that are computed anew and notes about the target are left out."""
    own = {n: t for n, t in tensors.items() if "rotary_emb" not in n and not n.startswith("verifier_")}
    spare = {n: own.pop(n) for n in SPARE if n in own}
    return own, spare


def needed(path: Path, tensors: Mapping[str, Tensor], *names: str) -> Tensor:
    """The first of some tensors. Raises ValueError if one is missing."""
    if missing := [n for n in names if n not in tensors]:
        raise ValueError(
            f"{path} lacks {', '.join(missing[:3])}; the file is not whole, or of a head of another kind. "
            "Download it again, with all its files"
        )
    return tensors[names[0]]


def target_width(target: Loaded) -> int:
    """Numbers in a hidden state of the target."""
    return int(target.config.get_text_config().hidden_size)
