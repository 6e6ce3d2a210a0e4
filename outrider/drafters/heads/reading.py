"""Reads the folder of a head, and checks it against its target, so that nothing drafts nonsense in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from outrider.core.sampling import TokenSubset
from outrider.core.types import Array
from outrider.drafters.heads.config import HeadShape, fields_of, plain_rope, tap_of
from outrider.drafters.heads.files import open_head
from outrider.models.load import Loaded

log = logging.getLogger("outrider.heads")
EMBED, OUTPUT = "embed_tokens.weight", "lm_head.weight"
_SPARE = ("t2d", "d2t", EMBED, OUTPUT)  # tensors that a file may leave out
_COMPARED = 256  # rows of an embedding that are compared with the target's
_RENAMED = {
    "aux_norm_low.weight": "fc_norm.0.weight",  # SGLang's names
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
Config = TypeVar("Config", bound=HeadShape)
_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class HeadWeights(Generic[Config]):
    """A head as it was read. tensors: by the names of its module, without the embedding unless it is the head's own. A block
    drafter of all tokens has no `lm_head.weight` either: then it uses the target's.

    token_ids: int64 [draft_vocab], ascending: the target's token of each row of the output head.
    """

    config: Config
    tensors: dict[str, Array]
    token_ids: Array

    @property
    def own_embedding(self) -> Array | None:
        """float [vocab, hidden], or None for the target's."""
        return self.tensors.get(EMBED)

    @property
    def subset(self) -> TokenSubset | None:
        """The draft vocabulary; None if it is the whole one."""
        whole = self.config.vocab_size
        return None if len(self.token_ids) == whole else TokenSubset(self.token_ids, whole)


class HeadReader:
    """The folder of a head, while it is read for a target.

    given: its settings. tensors: by the names of its module. spare: those that a file may leave out. Buffers that are computed
    anew, and notes about the target, are in neither. Each method raises ValueError, with the path, for what does not fit.
    """

    def __init__(self, folder: str | Path, target: Loaded, *kinds: str) -> None:
        """kinds: those that may be read. Raises ValueError for a head of another kind."""
        opened = open_head(folder)
        self.path, self.kind, self.given, self.target = opened.path, opened.kind, opened.settings, target
        self.verifier = opened.verifier
        if opened.kind not in kinds:
            raise ValueError(f"{opened.path} is a head of the kind {opened.kind!r}, not {' or '.join(kinds)}")
        named = {_RENAMED.get(n, n): t for n, t in opened.tensors.items()}
        self.tensors = {n: t for n, t in named.items() if "rotary_emb" not in n and not n.startswith("verifier_")}
        self.spare = {n: self.tensors.pop(n) for n in _SPARE if n in self.tensors}

    def shape(self, given: Mapping[str, Any], kind: type[HeadShape]) -> dict[str, Any]:
        """The fields that config.json says, and the others of a `HeadShape` but its taps and layers."""
        path = self.path
        fc, gate = self.needed("fc.weight", "layers.0.mlp.gate_proj.weight")
        hidden, heads = int(given.get("hidden_size") or len(fc)), int(given.get("num_attention_heads") or 0)
        if len(fc) != hidden:
            raise ValueError(f"{path}: fc.weight has {len(fc)} rows, and config.json says hidden_size {hidden}")
        if not heads:
            raise ValueError(f"{path}: config.json does not say num_attention_heads")
        if any(kind != "full_attention" for kind in given.get("layer_types") or ()):
            raise ValueError(f"{path} has layers of sliding attention, which outrider's heads do not have")
        implied = {"hidden_size": hidden, "vocab_size": self.target.model.vocab_size, "head_dim": hidden // heads}
        inner = {"intermediate_size": len(gate)}
        shape = fields_of(given, kind, implied | inner) | inner
        self.check_target(shape["vocab_size"], shape["target_hidden_size"])
        return shape | {"rope_parameters": self._rope(given), "verifier": self.verifier}

    def taps(self, key: str, ids: Sequence[Any], wide: int) -> tuple[int, ...]:
        """The taps for the states before some layers. key: where config.json names them. wide: numbers in a hidden state."""
        layers, columns = self.target.model.num_layers, self.tensors["fc.weight"].shape[1]
        wrong = [i for i in ids if not (isinstance(i, int) and 0 <= i <= layers)]
        if wrong:
            raise ValueError(
                f"{self.path} reads the state before layer {wrong[0]} of its target; {self.target.name} has {layers} layers. "
                f"Correct {key} in its config.json, or give the model that it was trained for"
            )
        if columns != len(ids) * wide:
            trained = f"{columns // wide} layers" if columns % wide == 0 else "features of another width"
            raise ValueError(
                f"{self.path}: fc.weight reads {columns} numbers, which is {trained} of a target {wide} wide; its settings name "
                f"{len(ids)} layers, so {len(ids) * wide}. Write the layers that it was trained on as {key} in its config.json"
            )
        return tuple(tap_of(i) for i in ids)

    def mask(self, given: Mapping[str, Any]) -> int:
        """The token that stands for those that are not known."""
        mask, size = given.get("mask_token_id"), self.target.model.vocab_size
        if mask is None or not 0 <= int(mask) < size:
            raise ValueError(f"{self.path}: mask_token_id is {mask}; it must be a token of the target, 0 to {size - 1}")
        return int(mask)

    def made(self, kind: Callable[..., _Made], **fields: Any) -> _Made:
        """A configuration. Its ValueError names the path."""
        try:
            return kind(**fields)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def check_whole(self, wanted: Mapping[str, tuple[int, ...]], kind: str) -> None:
        """The tensors must be those that the settings say. wanted: their shapes. kind: of head, in words."""
        for name, tensor in zip(wanted, self.needed(*wanted), strict=True):
            if tensor.shape != wanted[name]:
                raise ValueError(f"{self.path}: {name} is {tensor.shape}, and the settings say {wanted[name]}")
        if more := sorted(set(self.tensors) - set(wanted)):
            raise ValueError(
                f"{self.path} holds {more[0]}{f' and {len(more) - 1} more tensors' if more[1:] else ''} that no {kind} of these "
                "settings has; without them it would draft badly. Give it the config.json that it was trained with"
            )

    def check_target(self, vocab_size: int, hidden_size: int) -> None:
        """The head must have been made for a target of this shape."""
        for what, head, wanted in (
            ("tokens in the vocabulary", vocab_size, self.target.model.vocab_size),
            ("numbers in a hidden state", hidden_size, self.target_width),
        ):
            if head != wanted:
                hint = f" (it names {self.verifier})" if self.verifier else ""
                raise ValueError(
                    f"{self.path} was trained for a target with {head} {what}{hint}, and {self.target.name} has {wanted}; a head "
                    f"drafts only for the model that it was trained for. Train one: outrider train eagle3 -m {self.target.name} "
                    "-o NEW"
                )

    def token_ids(self, size: int, rows: int) -> Array:
        """int64 [draft_vocab], ascending: the target's token of each row of the output head.

        The file may hold d2t, the offset from each row to its token, and t2d, bool [vocab], the tokens with a row. size: tokens
        of the target. rows: those that config.json says.
        """
        path, offsets, has = self.path, self.spare.get("d2t"), self.spare.get("t2d")
        if offsets is None and has is None:
            if rows != size:
                raise ValueError(
                    f"{path} has {rows} draft tokens of {size} and no map (d2t or t2d) that says which; the file is not whole"
                )
            return np.arange(size)
        with_row = None if has is None else has.astype(bool).nonzero()[0]
        ids = with_row if offsets is None else offsets.astype(np.int64) + np.arange(len(offsets))
        assert ids is not None
        if offsets is not None and len(ids) and (np.diff(offsets) > 0).all() and offsets[-1] < size <= ids.max():
            raise ValueError(
                f"{path}: d2t holds token ids, and it must hold offsets: id - row. Write d2t - np.arange({len(ids)})"
            )
        if len(ids) != rows:
            raise ValueError(
                f"{path}: the map has {len(ids)} draft tokens, and config.json says draft_vocab_size {rows}"
            )
        if not len(ids) or ids.min() < 0 or ids.max() >= size or not (np.diff(ids) > 0).all():
            raise ValueError(
                f"{path}: the map d2t gives the tokens {ids.min()} to {ids.max()}; they must ascend, from 0 to "
                f"{size - 1}"
            )
        if with_row is not None and not np.array_equal(with_row, ids):
            raise ValueError(f"{path}: d2t and t2d name different tokens; one of the two is of another head")
        return ids

    def output_rows(self, hidden: int, ids: Array) -> Array:
        """float [draft_vocab, hidden]: the output head. Without one in the file it is the target's, for the draft tokens."""
        stored, model = self.spare.get(OUTPUT), self.target.model
        if stored is None:
            if hidden != self.target_width:
                raise ValueError(
                    f"{self.path} has no lm_head.weight, and the target's is {self.target_width} wide where the head is "
                    f"{hidden}; the file is not whole"
                )
            return model.embedding_rows(ids) if self.given.get("tie_word_embeddings") else model.head_rows(ids)
        if stored.shape == (model.vocab_size, hidden) and len(ids) < model.vocab_size:
            raise ValueError(
                f"{self.path}: lm_head.weight has a row for all {model.vocab_size} tokens, and config.json says "
                f"draft_vocab_size {len(ids)}"
            )
        self._check_table(OUTPUT, (len(ids), hidden))
        return stored

    def own_embedding(self, hidden: int, *, trained: bool = False) -> dict[str, Array]:
        """The embedding of the file by its name. Nothing if there is none, or if it is the target's up to rounding.

        trained: it is kept anyway."""
        table, target = self.spare.get(EMBED), self.target
        if table is None:
            return {}
        self._check_table(EMBED, (target.model.vocab_size, hidden))
        if not trained and hidden == self.target_width:
            some = np.linspace(0, len(table) - 1, min(_COMPARED, len(table))).astype(np.int64)
            theirs = target.model.embedding_rows(some)
            gap = np.abs(table[some] - theirs).max(1) / np.maximum(np.abs(theirs).max(1), 1e-6)
            if np.median(gap) < 0.1:
                return {}
            said = "%s has an embedding of its own, not that of %s; it is used, and engines that ignore it draft badly"
            log.warning(said, self.path, target.name)
        return {EMBED: table}

    @property
    def target_width(self) -> int:
        """Numbers in a hidden state of the target."""
        return self.target.model.embedding_rows(np.zeros(1, np.int64)).shape[1]

    def needed(self, *names: str) -> list[Array]:
        """Tensors by their names. Raises ValueError if some are missing."""
        if missing := [n for n in names if n not in self.tensors]:
            raise ValueError(
                f"{self.path} lacks {', '.join(missing[:3])}; the file is not whole, or of a head of another kind. "
                "Download it again, with all its files"
            )
        return [self.tensors[n] for n in names]

    def _check_table(self, name: str, wanted: tuple[int, int]) -> None:
        if self.spare[name].shape != wanted:
            raise ValueError(f"{self.path}: {name} is {self.spare[name].shape}, and the settings say {wanted}")

    def _rope(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The rotary embedding: `rope_parameters`, else `rope_theta` and `rope_scaling`."""
        if given.get("rope_parameters"):
            return plain_rope(given["rope_parameters"])
        theta = given.get("rope_theta")
        if theta is None:
            log.warning(
                "%s has no rope_theta; 10000 is taken, and a head that was trained with another drafts badly", self.path
            )
        scaling = dict(given.get("rope_scaling") or {})
        kind = scaling.pop("type", None)
        return plain_rope({"rope_theta": float(theta or 10000.0)} | ({"rope_type": kind} if kind else {}) | scaling)


def layer_shapes(
    config: HeadShape, i: int, width: int, *, bias: bool = False, norms: bool = False, input_norm: bool = True
) -> dict[str, tuple[int, ...]]:
    """The tensors of layer i of a head.

    Args:
        config: Of the head.
        i: Number of the layer.
        width: Of what its attention reads.
        bias: All linears of the attention but the last have one.
        norms: Each head's queries and keys are normed.
        input_norm: What the attention reads is normed.
    """
    size, dim, inner = config.hidden_size, config.head_dim, config.intermediate_size
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    rows = {"q": queries, "k": keys, "v": keys}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{n}_proj.weight": (count, width) for n, count in rows.items()}
    if bias:
        shapes |= {f"self_attn.{n}_proj.bias": (count,) for n, count in rows.items()}
    if norms:
        shapes |= {f"self_attn.{n}_norm.weight": (dim,) for n in "qk"}
    if input_norm:
        shapes["input_layernorm.weight"] = (size,)
    shapes |= {f"mlp.{n}_proj.weight": (inner, size) for n in ("gate", "up")}
    shapes |= {"self_attn.o_proj.weight": (size, queries), "mlp.down_proj.weight": (size, inner)}
    return {f"layers.{i}.{n}": shape for n, shape in (shapes | {"post_attention_layernorm.weight": (size,)}).items()}
