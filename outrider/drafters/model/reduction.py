"""What a draft model does without, so that a draft token costs less: bits of its weights, and tokens of its output head.

Neither changes what is guaranteed. A draft that is a little worse is rejected a little more often.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.drafters.model.draft_vocab import draft_vocab, token_map
from outrider.models.builtin.download import DOWNLOADS
from outrider.models.dtypes import DTYPES
from outrider.models.load import Contents, Reduction

SMALL = 2**24  # weights; a smaller draft model stays in the processor's caches, and fewer bits gain nothing
KEPT = 32768  # tokens of a head, if a corpus says which


@dataclass(frozen=True)
class ReductionNote:
    """What was left out of a draft model.

    quantization: the precision that was chosen, None if none was. kept: tokens of the output head, None for all. vocab_size:
    tokens of the model.
    """

    quantization: str | None
    kept: int | None
    vocab_size: int

    def __str__(self) -> str:
        parts = [f"{self.quantization} weights"] if self.quantization else []
        parts += [f"its head has {self.kept} of {self.vocab_size} tokens"] if self.kept else []
        return "draft model: " + ", ".join(parts)


class DraftReduction:
    """Decides how a draft model is kept. For `load(reduce=...)`.

    choose_quantization: int4 weights where they gain; False keeps what `load` was asked for. vocab: tokens of the output head,
    0 for all; None: all without a corpus. corpus: texts to count tokens in. token_map: a file of the head's tokens, in place of
    both.
    note: what was left out; None before the model is loaded, and if nothing was.
    """

    def __init__(
        self,
        choose_quantization: bool = True,
        vocab: int | None = None,
        corpus: Any = None,
        token_map: str | None = None,
    ) -> None:
        self.choose_quantization, self.vocab, self.corpus, self.token_map = (
            choose_quantization,
            vocab,
            corpus,
            token_map,
        )
        self.note: ReductionNote | None = None

    def may_leave_out(self, model: Any) -> bool:
        """Whether anything of this model may be left out. If not, `load` needs no `reduce`, and can use saved packed weights."""
        blocks = isinstance(model, (str, Path)) and (str(model).endswith(".gguf") or model in DOWNLOADS)
        chooses = self.choose_quantization and not blocks
        return chooses or bool(self.vocab) or self.corpus is not None or self.token_map is not None

    def __call__(self, contents: Contents) -> Reduction:
        """Raises ValueError for a corpus or a token map that cannot be read."""
        dense = contents.stored in DTYPES  # the blocks of a GGUF file are kept as they are
        gains = dense and contents.quantizable and contents.weights >= SMALL
        quantization = "int4" if self.choose_quantization and gains else None
        ids = self._head_ids(contents)
        if quantization or ids is not None:
            self.note = ReductionNote(quantization, None if ids is None else len(ids), contents.vocab_size)
        return quantization, ids

    def _head_ids(self, contents: Contents) -> Tensor | None:
        if self.token_map is not None:
            return token_map(self.token_map, contents.vocab_size)
        size = (0 if self.corpus is None else KEPT) if self.vocab is None else self.vocab
        if not size:
            return None
        return draft_vocab(size, contents.vocab_size, contents.tokenizer, contents.end_ids, self.corpus)
