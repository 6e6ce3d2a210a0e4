"""What the loop asks of a language model: logits and hidden states at the nodes of draft trees, over a slot cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsDistribution, LogitsWarper
from outrider.core.types import Array, Draft, Verdict
from outrider.models.cache import SlotCache
from outrider.models.nodes import Nodes
from outrider.verify import Verifier
from outrider.verify.batched import walk

if TYPE_CHECKING:
    from outrider.kernels.cpu import Packed

Want = Literal["all", "last", "none"]

# Taps name hidden states of the model. Tap 0 and up: the output of that layer, before the final norm.
# The output of the last layer is tap `num_layers - 1`. In transformers' numbering, tap i is `hidden_states[i + 1]`.
FINAL_NORM = -1  # the output of the final norm: what the output head reads
EMBEDDING = -2  # the input of layer 0: `hidden_states[0]` of transformers


class LazyArray:
    """An array on a device. Indexed as numpy's; it is copied to the host when it is first read."""

    def __init__(self, read: Callable[[], np.ndarray]) -> None:
        self._read = read

    @cached_property
    def host(self) -> np.ndarray:
        """The copy. The next forward may overwrite what was not read."""
        return self._read()

    def __getitem__(self, at: Any) -> np.ndarray:
        return self.host[at]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.host, dtype, copy=copy)


class Output(NamedTuple):
    """What a forward gives.

    logits: float32 [batch, node, vocab]. Of all new nodes ("all"), of the last one of each tree ("last": node = 1), or
    of no node ("none": node = 0).
    features: float32 [batch, node, len(taps) * hidden], the tapped hidden states side by side, or None without taps.

    Those of a `step` may be a `LazyArray`, so index them or call `np.asarray`.
    """

    logits: np.ndarray
    features: np.ndarray | None


class Verification(NamedTuple):
    """How the drafts of a step are judged.

    verifier: of `outrider.verify`. draft: the nodes of the step. warp, noise: of its sequences. positions: of the token after
    each root. following: True: nothing may draft now, so the next step is probably plain, too. False: a text ends with this one.
    None: neither is known."""

    verifier: Verifier
    draft: Draft
    warp: LogitsWarper
    noise: Noise
    positions: Sequence[int]
    following: bool | None = None

    def verdict(self, logits: Array) -> Verdict:
        """logits: float32 [batch, node, vocab], of all nodes."""
        target = LogitsDistribution(logits, self.draft, self.warp)
        return self.verifier(target, self.draft, self.noise, np.asarray(self.positions, np.int64))

    def completed(self, drawn: list[tuple[list[int], int]], by_host: Sequence[bool], logits: Array) -> Verdict:
        """The verdict of `match`, most of which a kernel has drawn, as `Verdict.host`. by_host: the rows that it left."""
        for row, left in enumerate(by_host):
            if left:
                target = LogitsDistribution(logits, self.draft, self.warp)
                key = self.noise.keys(Stream.TOKEN, self.positions)[row]
                drawn[row] = walk(target, row, self.draft.host[row], key)
        return Verdict(drawn)


class Pending(NamedTuple):
    """A step whose verdict may still be on its way.

    judge: waits for it. first: it took what later ones of its shape do not, such as a compilation, so its time says nothing."""

    output: Output
    judge: Callable[[], Verdict]
    first: bool = False

    def result(self) -> Verdict:
        """What was decided."""
        return self.judge()


class Chain(NamedTuple):
    """One chain for `LanguageModel.draft_chains` to draft."""

    slot: int  # cache slot; each chain has its own
    tokens: Sequence[int]  # tokens to read first, at least one
    depth: int  # tokens to draft
    temperature: float = 0.0  # 0 drafts the most likely token
    # (seed, stream, step, position) of the first drafted token, as `Noise.keys` gives them.
    noise: tuple[int, int, int, int] = (0, 0, 0, 0)
    # scale of the logits' errors (`drafters.model.confidence`), which gives each token a chance to be accepted; 0 computes
    # none.
    error: float = 0.0
    min_probability: float = 0.0  # the chain ends after a token whose chance, times those before it, is lower
    features: np.ndarray | None = None  # float32 [token, feature], of the target; for trained heads
    # tokens of a level, 8 at most; nothing follows those beside the drafted one. More than 1 need `error`.
    width: int = 1


class DrawnChain(NamedTuple):
    """What `LanguageModel.draft_chains` has drawn. chances: of each token, given those before it; empty without `error`.

    siblings: of each token, the next most likely ones in its place and their chances, in falling order."""

    tokens: list[int]
    chances: list[float]
    siblings: list[list[tuple[int, float]]]


class LanguageModel(ABC):
    """A causal language model over a slot cache. The logits of node n are those of the token after it.

    A model gives the first four attributes, `new_cache` and `forward`. What else it lacks has a default here.
    """

    vocab_size: int
    # Tokens of the longest sequence that the model can read.
    max_length: int
    device: str
    # True if the logits of a tree are, bit for bit, those of decoding it alone. Then `match` gives plain decoding's tokens.
    batch_invariant: bool
    # 0 if the model is not made of layers.
    num_layers: int = 0
    # Bytes of weights that a forward of one token reads. 0 if unknown.
    weight_bytes: int = 0
    # Tokens that each attention reads at most; 0: the whole text.
    windows: tuple[int, ...] = (0,)
    # True if a forward computes nothing for padding.
    skips_padding: bool = False
    # True if `draft_chains` can be called.
    has_draft_chains: bool = False
    # How a forward runs. "native" is our own code alone, with the same bits on every machine.
    path: str = "general"
    # How `new_cache` keeps keys and values: a name of `outrider.models.cache.KV_CACHE_DTYPES`.
    kv_cache_dtype: str = "auto"

    @abstractmethod
    def new_cache(self, num_slots: int, max_length: int) -> SlotCache: ...

    def longest(self, num_slots: int) -> int:
        """Tokens of the longest text, if no number is given: a cache that is made at once must fit for all slots."""
        return self.max_length

    @abstractmethod
    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """The logits after each new node, and the hidden states that `taps` name.

        Writes the keys and values of the nodes to the scratch of each slot, cell `length + node`. Never changes
        `cache.length`: `SlotCache.commit` does that.

        taps: layer numbers, FINAL_NORM or EMBEDDING. want: the nodes whose logits are needed. "last" is the last node of
        each tree that is not padding. Raises ValueError for a tap that the model does not have.
        """

    def step(self, cache: SlotCache, slots: list[int], check: Verification, *, taps: tuple[int, ...] = ()) -> Pending:
        """`forward` of the nodes of `check.draft`, and the verdict on it. A model may do both in one call; this is their twin.

        slots: of the cache, one for each sequence. taps: as for `forward`, whose errors it raises."""
        out = self.forward(Nodes(check.draft.tokens, cache, slots, check.draft.parents), taps=taps)
        return Pending(out, partial(check.verdict, out.logits))

    def layer_subset(self, layers: Sequence[int]) -> LanguageModel:
        """The same model with these layers only, over the same weights.

        It reads and writes those layers of the whole model's caches. Raises ValueError for layers that the model does not
        have or cannot leave out.
        """
        raise ValueError(
            f"{type(self).__name__} has no layers to leave out; layer_skip works for models loaded by outrider.models.load"
        )

    @property
    def embedding_table(self) -> Packed | np.ndarray | None:
        """What `embedding_rows` reads, for native code: packed, or floats [vocab, hidden]. None if it is neither."""
        return None

    def embedding_rows(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [*tokens.shape, hidden]: the rows of the embedding, as the checkpoint has them, without a factor."""
        raise self._lacks("embedding")

    def head_rows(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [n, hidden]: the rows of the output head for int64 [n] tokens, with the rounding of its precision.

        Raises ValueError if the head does not keep one of them, or if it is not a plain matrix.
        """
        raise self._lacks("output head")

    def output_head(self, hidden: np.ndarray) -> np.ndarray:
        """float32 [..., vocab]: the product of the output head with float32 [..., hidden], without a factor or a cap.

        Raises ValueError if the head keeps some tokens only."""
        raise self._lacks("output head")

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        """Draft a chain of tokens in each of several slots, in one call. Call it only if `has_draft_chains`.

        Each chain first reads its `tokens` after the committed tokens of its slot. Then it draws `depth` tokens one
        after another, each from the logits after the one before: argmax(logits / temperature + noise at position,
        position + 1, ...), or argmax(logits) at temperature 0. A chain ends early if its logits hold NaN, or by its
        `min_probability`.

        Writes all but the last token of a chain to the scratch of its slot. Commits nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts no chains in one call; check has_draft_chains first")

    def _lacks(self, what: str) -> ValueError:
        return ValueError(
            f"{type(self).__name__} has no {what} to share; heads work for models loaded by outrider.models.load"
        )


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raise ValueError for a tap that a model with this many layers does not have."""
    if not all(EMBEDDING <= t < num_layers for t in taps):
        raise ValueError(
            f"taps are layers 0 to {num_layers - 1}, FINAL_NORM ({FINAL_NORM}) or EMBEDDING ({EMBEDDING}); got {tuple(taps)}"
        )


def check_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """The layers as a list. Raises ValueError unless they are increasing layer numbers, at least one."""
    chosen = list(layers)
    if not chosen or chosen != sorted(set(chosen)) or not 0 <= chosen[0] <= chosen[-1] < num_layers:
        raise ValueError(
            f"the layers to draft with are increasing numbers from 0 to {num_layers - 1}, at least one, got {chosen}; for "
            f"example {list(range(0, num_layers, 2))}"
        )
    return chosen


def check_head_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """The tokens that an output head keeps, int64 [n]. Raises ValueError unless they are ascending tokens, at least one."""
    if ids.dtype != np.int64 or ids.ndim != 1 or not len(ids) or not (np.diff(ids) > 0).all():
        raise ValueError(f"head_ids are ascending token ids, int64 [n], at least one; got {ids.dtype} {[*ids.shape]}")
    if not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise ValueError(
            f"head_ids are tokens of the model, 0 to {vocab_size - 1}, got {int(ids[0])} to {int(ids[-1])}"
        )
    return np.ascontiguousarray(ids)


def check_whole_head(head_ids: np.ndarray | None) -> None:
    """Raise ValueError for an output head that keeps some tokens only."""
    if head_ids is not None:
        raise ValueError("the output head of this model keeps some of its tokens only; load it without head_ids")


def over_vocabulary(logits: np.ndarray, ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """float32 [..., len(ids)] -> [..., vocab_size]: the logits of tokens that the head does not keep are -inf."""
    out = np.full((*logits.shape[:-1], vocab_size), -np.inf, np.float32)
    out[..., ids] = logits
    return out
