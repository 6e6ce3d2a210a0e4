"""How sure a draft model may be of its tokens: learned from which of them the target accepted."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, log1p

import numpy as np

from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsWarper, TokenSubset
from outrider.core.types import Array, Commit, Siblings
from outrider.drafters.model.children import child_scores, children
from outrider.kernels.probabilities import log_softmax

RIVALS = 8  # candidates that share a token's chance
SCALES = (0.3, 0.4, 0.55, 0.75, 1.0, 1.4)
START = 0.75
FOR_HEADS = 1.0
"""Scales before anything was observed: of a draft model, and of a head."""
_PRIOR = 4.0  # what each step away from START costs at first, in nats; it fades with the observations
_KEEP = 1 - 1 / 256  # observations after which one counts 1/e
_CERTAIN = 1e-4  # chances are kept so far from 0 and 1


class LogitError:
    """The error of a draft model's logits, and with it the chance that the target chooses a draft token.

    Model: the target's logits are the draft's plus independent Gumbel errors of one scale. Both are divided by the temperature.
    So the chance is softmax(keys * temperature / scale), with the keys logits / temperature + noise (docs/trees.md). The scale
    is the likeliest one of a few, by what was accepted lately. Measured: 0.3-0.5 for the built-in pair, 0.8-0.9 for Qwen2.5
    0.5B under 1.5B. It ranks and ends drafts; no text depends on it.
    """

    def __init__(self, start: float = START) -> None:
        """start: the scale before anything was observed, one of `SCALES`."""
        self._start = start
        self.reset()

    def reset(self) -> None:
        """Forget what was observed."""
        self.scale = self._start
        # slot -> node, its first child and the chance of that, of the last proposal
        self._stated: dict[int, list[tuple[int, int, float]]] = {}
        usual = SCALES.index(self._start)
        self._losses = [_PRIOR * abs(n - usual) for n in range(len(SCALES))]  # negative log likelihoods, fading

    def state(self, slot: int, parents: Sequence[int], weights: Sequence[float]) -> None:
        """Remember what was said of a proposal. parents: of its nodes. weights: log chance that each node is accepted."""
        first = {parent: n for n, parent in reversed([*enumerate(parents[: len(weights)])]) if parent >= 0}
        self._stated[slot] = [(parent, n, exp(weights[n] - weights[parent])) for parent, n in first.items()]

    def learn(self, slots: Sequence[int], commits: Sequence[Commit]) -> None:
        """Compare what was stated of these slots with what was accepted."""
        for slot, commit in zip(slots, commits, strict=True):
            stated, good = self._stated.pop(slot, []), {*commit.nodes}
            if commit.finish is None:  # a text that was cut says nothing of what was rejected
                reached = [(chance, child in good) for node, child, chance in stated if node in good]
                self.observe([chance for chance, _ in reached], [right for _, right in reached])

    def release(self, slot: int) -> None:
        """The sequence in this slot has left."""
        self._stated.pop(slot, None)

    def observe(self, chances: Sequence[float], accepted: Sequence[bool]) -> None:
        """Draft tokens whose parents were accepted: the chances that were computed with the present scale, and the outcome."""
        for chance, right in zip(chances, accepted, strict=True):
            chance = min(max(chance, _CERTAIN), 1 - _CERTAIN)
            margin = self.scale * log(chance / (1 - chance)) * (1 if right else -1)
            each = [-margin / scale for scale in SCALES]
            # log(1 + exp(x)), without an overflow
            lost = [max(x, 0.0) + log1p(exp(-abs(x))) for x in each]
            self._losses = [_KEEP * before + new for before, new in zip(self._losses, lost, strict=True)]
        self.scale = SCALES[min(range(len(SCALES)), key=self._losses.__getitem__)]

    def likeliest(
        self,
        warp: LogitsWarper,
        logits: Array,
        extra: Sequence[Sequence[int]],
        width: int,
        noise: Noise,
        stream: Stream,
        position: Array,
        subset: TokenSubset | None,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The best candidates of each row and their log chances, for `Siblings.POINT`. At least `width` of each.

        logits: float32 [row, vocab], or [row, kept] with a subset.
        """
        best = children(child_scores(warp, logits, extra, subset), max(width, RIVALS), Siblings.POINT, noise, stream,
                        position, greedy=warp.greedy, subset=subset)  # fmt: skip
        temperatures = [h.params.temperature for h in warp.histories]
        return best.tokens.tolist(), self.log_chances(best.keys, temperatures).tolist()

    def log_chances(self, keys: Array, temperature: Sequence[float]) -> Array:
        """float32 [node, candidate]: the log chance of each of the best candidates.

        keys: float32 [node, candidate], descending; logits without noise where the temperature is 0.
        """
        factor = np.array([t or 1.0 for t in temperature], np.float32)[:, None] / self.scale
        return log_softmax(keys * factor)
