"""A second, smaller model drafts chains and trees. Its cache holds committed tokens only, so it needs no rollback.

`DraftReduction` says what the model does without, so that a draft token costs less: bits of its weights, and tokens of its output
head. Neither changes what is guaranteed. A draft that is a little worse is rejected a little more often. The head keeps the most
frequent tokens (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). A token outside has probability 0 in the draft, so every verifier
stays exact. The price is acceptance where the text has such a token. A token's frequency is estimated from its id, from the
prompts of this package and from the user's texts. The ids of a tokenizer follow the order of its merges or scores. So a low id
means a frequent token where the tokenizer was trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.types import Array, Budget, Siblings
from outrider.drafters.base import Resources
from outrider.drafters.config import Prefixes
from outrider.drafters.lookup.corpus import Entry, read_texts
from outrider.drafters.model.cached import CachedLevels, Feed
from outrider.drafters.model.grower import TreeDrafter
from outrider.drafters.model.vocabulary import Vocabulary
from outrider.drafters.shapes import Shape
from outrider.models.base import LanguageModel
from outrider.models.builtin.download import DOWNLOADS
from outrider.models.dtypes import DTYPES
from outrider.models.load import Contents, Reduction
from outrider.models.nodes import Nodes

WINDOW = 2048  # tokens of a text that a draft model holds, at most
_BEGINNING = 64  # of them that stay: they say what kind of text it is
CHUNK = 256  # prompt tokens read per forward


class OwnCache(CachedLevels):
    """Levels of a draft model over a cache of its own.

    The cache takes in committed tokens only: the accepted nodes of the scratch, and what the next proposal reads because it is
    missing. So full acceptance, rejection, steps without a draft and reuse of a slot are one case.

    Of a text that is longer than its window the model reads the first tokens and an end, as one text (StreamingLLM, arXiv
    2309.17453; MagicDec, 2408.11049). A draft token then costs the same behind any text. When the window is full, its later half
    is read again.

    Attributes:
        left_out: by slot, how many tokens of the text are not in its window.
    """

    def __init__(
        self,
        model: LanguageModel,
        num_slots: int,
        max_length: int,
        reduction: str | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        """
        Args:
            model: the draft model.
            num_slots: slots of the cache.
            max_length: tokens of a text, of which a slot holds `WINDOW` at most.
            reduction: what was left out of the model to make it cheaper, in words; None if nothing was.
            prefixes: what it has read before; None if nothing is kept.
        """
        super().__init__(model)
        self.left_out = dict[int, int]()
        self.cache = model.new_cache(num_slots, min(max_length, model.max_length, WINDOW))
        self._reduction, self._prefixes = reduction, prefixes
        self._sought = set[int]()  # slots whose text was looked up

    def room(self, slot: int, tokens: list[int]) -> int:
        return self.cache.max_length - len(self.window(slot, tokens))

    def missing(self, slot: int, tokens: list[int]) -> int:
        """How many tokens the model must read before it can draft for a sequence, the root not counted. Those that it has read
        before are in the cache then. tokens: the committed tokens of the sequence."""
        ids = self.window(slot, tokens)
        self.recall(slot, ids)
        return len(ids) - 1 - self.cache.length[slot]

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        """Read the next `count` missing tokens, in one forward."""
        self.read_ids(slot, self.window(slot, tokens), count)

    def read_ids(self, slot: int, ids: list[int], count: int) -> None:
        """`read`, of what the window holds."""
        have = self.cache.length[slot]
        end = have + count
        if self._prefixes is not None:
            end = self._prefixes.chunk_end(self.cache, ids, have, end)
        part = ids[have:end]
        self.model.forward(Nodes(np.array([part]), self.cache, [slot]), want="none")
        self.ingested(slot, len(part) + 1)
        if self._prefixes is not None:
            self._prefixes.keep(self.cache, slot, ids[:end])

    def recall(self, slot: int, ids: list[int]) -> bool:
        """Let an empty slot have what was read before of a window. Returns whether there was any."""
        if self._prefixes is None or slot in self._sought or self.cache.length[slot]:
            return False
        self._sought.add(slot)
        held = -1
        while held < self.cache.length[slot]:
            held = self.cache.length[slot]
            self._prefixes.fetch(self.cache, slot, ids[:-1])
        return held > 0

    def window(self, slot: int, ids: list[int]) -> list[int]:
        """What the window holds of a text, the root last. It follows from the number of tokens alone, so a draft does not depend
        on how its text was read. ids: the text in the model's own tokens."""
        most = self.cache.max_length
        step, first = max(most // 2, 1), min(_BEGINNING, most // 4)
        left_out = max((len(ids) - most) // step + 1, 0) * step
        if left_out != self.left_out.get(slot, 0):
            self.cache.release(slot)
            self._sought.discard(slot)
            self.left_out[slot] = left_out
        return ids[:first] + ids[first + left_out :] if left_out else ids

    def unread(self, slot: int, tokens: list[int]) -> Feed:
        while self.missing(slot, tokens) >= CHUNK:
            self.read(slot, tokens, CHUNK)
        return self.window(slot, tokens)[self.cache.length[slot] :], None

    def release(self, slot: int) -> None:
        super().release(slot)
        self._sought.discard(slot)

    def resources(self) -> Resources:
        return replace(super().resources(), reduction=self._reduction)


class ModelDrafter(TreeDrafter[OwnCache]):
    """Drafts from an independent model with the target's vocabulary (Leviathan et al. 2211.17192; Chen et al. 2302.01318)."""

    def __init__(
        self,
        model: LanguageModel,
        num_slots: int,
        max_length: int,
        *,
        shape: Callable[[Budget], Shape] | None = None,
        siblings: Siblings = Siblings.WITHOUT_REPLACEMENT,
        **origin: Any,
    ) -> None:
        """model to max_length and origin: see `OwnCache`. shape, siblings: see `TreeDrafter`."""
        super().__init__(OwnCache(model, num_slots, max_length, **origin), shape, siblings)


SMALL = 2**24  # weights; a smaller draft model stays in the processor's caches, and fewer bits gain nothing
KEPT = 32768  # tokens of a head, if a corpus says which
PROMPTS = Path(__file__).resolve().parents[2] / "data" / "prompts"
_ZIPF = 1000  # the prior probability of id n is proportional to 1 / (n + this); fitted to real tokenizers' texts


@dataclass(eq=False)
class DraftReduction:
    """Decides how a draft model is kept. For `load(reduce=...)`."""

    choose_quantization: bool = True  # int4 weights where they gain; False keeps what `load` was asked for
    vocab: int | None = None  # tokens of the output head, 0 for all. None means all without a corpus
    corpus: Any = None  # texts to count tokens in
    note: str | None = None  # what was left out, in words; None before the model is loaded, and if nothing was

    def may_leave_out(self, model: Any) -> bool:
        """Whether anything of this model may be left out. If not, `load` needs no `reduce`, and can use saved packed weights."""
        blocks = isinstance(model, (str, Path)) and (str(model).endswith(".gguf") or model in DOWNLOADS)
        return (self.choose_quantization and not blocks) or bool(self.vocab) or self.corpus is not None

    def __call__(self, contents: Contents) -> Reduction:
        """Raises ValueError for a corpus that cannot be read."""
        dense = contents.stored in DTYPES  # the blocks of a GGUF file are kept as they are
        gains = dense and contents.quantizable and contents.weights >= SMALL
        quantization = "int4" if self.choose_quantization and gains else None
        size = (0 if self.corpus is None else KEPT) if self.vocab is None else self.vocab
        about = contents.vocab_size, contents.tokenizer, contents.end_ids
        ids = draft_vocab(size, *about, self.corpus) if size else None
        parts = [f"{quantization} weights"] if quantization else []
        parts += [f"its head has {len(ids)} of {contents.vocab_size} tokens"] if ids is not None else []
        self.note = f"draft model: {', '.join(parts)}" if parts else None
        return quantization, ids


def draft_vocab(
    size: int,
    vocab_size: int,
    tokenizer: Any | None,
    end_ids: Sequence[int] = (),
    corpus: Entry | Sequence[Entry] | None = None,
) -> Array | None:
    """The tokens to keep, int64 [n] ascending, about `size` of them. None if that is the whole vocabulary.

    Special tokens, end tokens and tokens of single bytes are always among them. corpus: texts like the answers, as for the
    method suffix. Without a tokenizer only the ids count. Raises ValueError for a corpus that cannot be read.
    """
    if size >= vocab_size:
        return None
    score = 1.0 / (np.arange(vocab_size) + _ZIPF)
    score /= score.sum()
    always = [i for i in end_ids if i < vocab_size]
    if tokenizer is not None:
        for counts in (token_counts(PROMPTS, tokenizer, vocab_size), token_counts(corpus, tokenizer, vocab_size)):
            score += counts / max(counts.sum(), 1)
        words = Vocabulary(tokenizer, vocab_size)
        none = [i for i, piece in enumerate(words.pieces) if piece is None]
        score[none] = -1.0  # unused ids; special tokens come back below
        always += [i for i, piece in enumerate(words.pieces) if piece is not None and len(piece) == 1]
        always += [*words.names.values(), *(i for i in tokenizer.added_tokens_decoder if i < vocab_size)]
    elif corpus is not None:
        score += token_counts(corpus, None, vocab_size)
    score[always] = np.inf
    return np.sort(np.argsort(-score, kind="stable")[: max(size, len(set(always)))])


def token_counts(corpus: Entry | Sequence[Entry] | None, tokenizer: Any | None, vocab_size: int) -> Array:
    """float64 [vocab]: how often each token is in the texts. Raises ValueError for what cannot be read."""
    counts = np.zeros(vocab_size)
    for _, ids in read_texts([] if corpus is None else corpus, tokenizer, vocab_size):
        counts += np.bincount(np.array(ids, dtype=np.int64), minlength=vocab_size)
    return counts
