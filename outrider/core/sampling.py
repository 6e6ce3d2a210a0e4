"""From logits to the distribution of the next token, at any node of a draft, with every sampling parameter.

The order is that of transformers and vLLM. First come allowed ids, bad words, min_tokens, logit bias and penalties. They
may depend on the tokens before the node: the committed tokens and the node's ancestors. Then come temperature, top-k,
top-p and min-p. A distribution is kept as *scores*: log probabilities up to a constant per row, -inf for tokens that
cannot be drawn. Greedy decoding is a distribution with all its mass on the lowest index of the largest logit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Protocol

import numpy as np

from outrider.core.noise import Noise, Stream
from outrider.core.params import SamplingParams
from outrider.core.types import Array, Draft
from outrider.kernels import cpu
from outrider.kernels.probabilities import running_total, softmax

_NO = float("-inf")
_ARITHMETIC = Context(prec=28)
# top-p sorts this many candidates first. The full sort gives the same result, slower.
_SHORTLIST = 256
_BLOCK = 64  # numbers of which the largest is found first


class TokenMask(Protocol):
    """The tokens that a grammar allows next."""

    def allowed(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> Array:
        """bool [vocab]: the tokens that may follow `tokens[start:]` and then `extra`. `tokens` are committed. `extra` are
        draft tokens, which may be rejected."""
        ...

    def legal_prefix(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> int:
        """How many of the draft tokens `extra`, from the first one on, may follow `tokens[start:]`."""
        ...

    def forced_tokens(self, tokens: Sequence[int], start: int) -> list[int]:
        """Tokens to draft after `tokens[start:]`, because the grammar leaves no other text there; may be empty."""
        ...


@dataclass(eq=False)
class SequenceState:
    """What the parameters that depend on earlier tokens need to know of one sequence. It is updated as the sequence grows."""

    params: SamplingParams
    end_ids: tuple[int, ...]  # tokens that would end the text; forbidden before min_tokens
    bad_words: tuple[tuple[int, ...], ...]
    tokens: list[int]  # prompt and output; shared with the sequence, never changed here
    prompt_length: int
    mask: TokenMask | None = None
    prompt_seen: Array | None = field(default=None, init=False)  # bool [vocab]
    counts: Array | None = field(default=None, init=False)  # float32 [vocab], of the output
    counted: int = field(default=0, init=False)  # output tokens already in counts

    @property
    def active(self) -> bool:
        p = self.params
        if self.mask is not None:
            return True
        return bool(p.logit_bias or self.bad_words or p.allowed_token_ids is not None or p.min_tokens) or (
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty,
        ) != (1.0, 0.0, 0.0)

    def apply(self, logits: Array, extra: Sequence[int]) -> Array:
        """float32 [vocab] -> a changed copy, for the token that follows the committed tokens and then `extra`."""
        p, out = self.params, logits.copy()
        written = len(self.tokens) - self.prompt_length + len(extra)
        if p.allowed_token_ids is not None:
            forbidden = np.ones(len(out), bool)
            forbidden[[*p.allowed_token_ids]] = False
            out[forbidden] = _NO
        if self.mask is not None:
            out[~self.mask.allowed(self.tokens, self.prompt_length, extra)] = _NO
        for word in self.bad_words:
            head, last = word[:-1], word[-1]
            context = [*self.tokens[-len(head) :], *extra][-len(head) :] if head else []
            if list(head) == context:
                out[last] = _NO
        if written < p.min_tokens:
            out[list(self.end_ids)] = _NO
        for token, bias in (p.logit_bias or {}).items():
            out[int(token)] += bias
        return self._penalties(out, extra)

    def _penalties(self, out: Array, extra: Sequence[int]) -> Array:
        p = self.params
        if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0):
            return out
        if self.counts is None or self.prompt_seen is None:
            self.counts = np.zeros_like(out)
            self.prompt_seen = np.zeros(len(out), bool)
            self.prompt_seen[self.tokens[: self.prompt_length]] = True
        new = self.tokens[self.prompt_length + self.counted :]
        if new:
            np.add.at(self.counts, new, 1)
            self.counted += len(new)
        counts = self.counts
        if extra:
            counts = counts.copy()
            np.add.at(counts, [*extra], 1)
        if p.repetition_penalty != 1:
            hurt = np.where(out > 0, out / p.repetition_penalty, out * p.repetition_penalty)
            out = np.where(self.prompt_seen | (counts > 0), hurt, out)
        return out - p.frequency_penalty * counts - p.presence_penalty * (counts > 0).astype(out.dtype)


def draw(scores: Array, noise: Noise, stream: Stream, position: Array) -> Array:
    """int64 [batch]: one draw from softmax(scores) of each row, by the Gumbel-max trick: argmax(scores + Gumbel noise).

    scores: float [batch, vocab], log probabilities up to a constant per row. position: int64 [batch]. The lowest index
    wins a tie. -1 if a row has NaN, inf or only -inf. `kernels.cpu.argmax_gumbel` is the same for one row.
    """
    return _likeliest(scores + noise.gumbel(stream, position, scores.shape[-1]))


def _likeliest(scores: Array) -> Array:
    """int64 [batch]: the lowest index of the largest score; -1 if a row has NaN, inf or only -inf."""
    best = scores.argmax(-1)  # NaN is the largest
    return np.where(np.isfinite(np.take_along_axis(scores, best[:, None], -1)[:, 0]), best, -1)


def largest(values: Array, count: int) -> tuple[Array, Array]:
    """(places, values) [row, count] of the largest of each row, in falling order; the lowest places of equals come first.

    values: float [row, n]; NaN comes last. count: at most n."""
    if values.shape[1] <= _BLOCK:
        places = np.argsort(-values, 1, kind="stable")[:, :count]
    else:
        places = np.array([_largest_of(row, count) for row in values], np.int64).reshape(len(values), count)
    return places, np.take_along_axis(values, places, -1)


def _largest_of(row: Array, count: int) -> Array:
    """`largest` of one row. As many blocks as are asked for have a value from the border on, so no smaller one is among them."""
    width = min(_BLOCK, max(len(row) // max(2 * count, 1), 1))
    tops = np.maximum.reduceat(row, np.arange(0, len(row), width))
    border = np.partition(tops, len(tops) - max(count, 1))[len(tops) - max(count, 1)]
    found = (~(row < border)).nonzero()[0]
    return found[np.argsort(-row[found], kind="stable")[:count]]


@dataclass(frozen=True, eq=False)
class TokenSubset:
    """The tokens that a draft proposes, if it has logits for some of the vocabulary only. All others have probability 0.

    ids: int64 [kept], ascending. vocab_size: tokens of the whole vocabulary.
    """

    ids: Array
    vocab_size: int

    def widened(self, values: Array, rest: float) -> Array:
        """[..., kept] -> [..., vocab]. rest: the value of the tokens that are not kept."""
        out = np.full((*values.shape[:-1], self.vocab_size), rest, values.dtype)
        out[..., self.ids] = values
        return out

    def tokens(self, places: Array) -> Array:
        """int64: the token at each place of `ids`; -1 stays -1."""
        return np.where(places < 0, places, self.ids[np.maximum(places, 0)])


class LogitsWarper:
    """The sampling parameters of a batch, compiled once. Entries are independent: each has the same result in any batch."""

    def __init__(self, histories: Sequence[SequenceState]) -> None:
        self.histories = list(histories)
        params = [h.params for h in histories]
        self.greedy = [p.greedy for p in params]
        self.all_greedy = all(self.greedy)
        self.active = [h.active for h in histories]
        self.filtered = [not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params]
        temperature = [p.temperature if p.temperature > 0 else 1.0 for p in params]
        self.temperature = None if all(t == 1 for t in temperature) else np.array(temperature, np.float32)[:, None]

    def processed(self, logits: Array, extra: Sequence[Sequence[int]], subset: TokenSubset | None = None) -> Array:
        """float32 [batch, vocab] -> the logits after the parameters that depend on tokens, before temperature.

        subset: the tokens that the columns of `logits` stand for; None for the whole vocabulary."""
        if not any(self.active):
            return logits
        rows = zip(logits, self.histories, self.active, extra, strict=True)
        return np.stack([_applied(h, x, e, subset) if active else x for x, h, active, e in rows])

    def scores(self, logits: Array, extra: Sequence[Sequence[int]], subset: TokenSubset | None = None) -> Array:
        """float32 [batch, vocab] -> log probabilities up to a constant per row. extra: the draft tokens from below the root
        down to the node, for each row. subset: as in `processed`."""
        logits = self.processed(logits, extra, subset)
        out = logits if self.temperature is None else logits / self.temperature
        if any(self.filtered):
            rows = zip(out, self.histories, self.filtered, strict=True)
            out = np.stack([truncate(x, h.params) if on else x for x, h, on in rows])
        if any(self.greedy):
            best = logits.argmax(-1)[:, None]  # NaN is the largest
            most, hot = np.take_along_axis(logits, best, -1), np.full_like(logits, _NO)
            np.put_along_axis(hot, best, np.where(np.isfinite(most), 0.0, _NO), -1)
            hot[np.isnan(most[:, 0])] = np.nan
            out = np.where(np.array(self.greedy)[:, None], hot, out)
        return out

    def draw(
        self,
        logits: Array,
        extra: Sequence[Sequence[int]],
        noise: Noise,
        stream: Stream,
        position: Array,
        subset: TokenSubset | None = None,
    ) -> Array:
        """int64 [batch]: one draw per row, see `sampling.draw`. -1 if the logits hold NaN or inf, or no token is allowed.

        subset: as in `processed`. The noise is that of its tokens, and the result is one of them."""
        keys = noise.keys(stream, position)
        return np.array([self.draw_row(b, logits[b], extra[b], key, subset) for b, key in enumerate(keys)], np.int64)

    def draw_row(
        self,
        b: int,
        logits: Array,
        extra: Sequence[int],
        key: tuple[int, int, int, int],
        subset: TokenSubset | None = None,
    ) -> int:
        """`draw` for row b alone. One native pass adds the noise and finds the largest score; greedy needs no noise.

        logits: float32 [vocab]. key: the row of `noise.keys`.
        """
        params, ids = self.histories[b].params, None if subset is None else subset.ids
        scores = _applied(self.histories[b], logits, extra, subset) if self.active[b] else logits
        temperature = params.temperature
        if self.filtered[b]:
            scores, temperature = truncate(scores / temperature, params), 1.0
        if self.greedy[b]:
            token = int(scores.argmax())  # NaN is the largest
        elif cpu.available():
            try:
                token = cpu.argmax_gumbel(scores, *key, temperature=temperature, ids=ids)
            except ValueError:  # NaN
                return -1
        else:
            (seed, stream, step, at), n = key, len(scores) if subset is None else subset.vocab_size
            noise = Noise([seed], [step]).gumbel(Stream(stream), np.array([at]), n, ids)[0]
            token = int((scores / temperature + noise).argmax())
        if not math.isfinite(scores[token]):
            return -1  # everything was forbidden, or the logits hold inf
        return token if subset is None else int(subset.ids[token])

    def simple(self, row: int) -> bool:
        """True if the distribution of a row is softmax(logits / temperature), and no other parameter changes it."""
        return not self.active[row] and not self.filtered[row]

    def select(self, rows: Sequence[int]) -> LogitsWarper:
        """The parameters of some of the rows."""
        return LogitsWarper([self.histories[r] for r in rows])


def _applied(history: SequenceState, logits: Array, extra: Sequence[int], subset: TokenSubset | None) -> Array:
    if subset is None:
        return history.apply(logits, extra)
    return history.apply(subset.widened(logits, _NO), extra)[subset.ids]


def truncate(scores: Array, params: SamplingParams) -> Array:
    """float32 [vocab] -> the same, with -inf outside top-k, then top-p, then min-p.

    top-k and min-p keep all tokens that tie at the border. top-p keeps the shortest run of the sorted tokens that reaches
    its mass; among equals the lowest id comes first."""
    if cpu.available():
        return cpu.truncate(scores, params.top_k, params.top_p, log_min_p(params))
    return _truncated(scores, params)


def log_min_p(params: SamplingParams) -> float:
    """The logarithm of min_p; -inf for 0. Decimal has its own arithmetic: the C library's is not the same everywhere."""
    return float(_ARITHMETIC.ln(Decimal(params.min_p)))


def _truncated(scores: Array, params: SamplingParams) -> Array:
    if 0 < params.top_k < len(scores):
        scores = _from(scores, largest(scores[None], params.top_k)[1][0, -1])
    if params.top_p < 1:
        scores = _top_p(scores, params.top_p)
    if params.min_p > 0:
        scores = _from(scores, scores.max() + log_min_p(params))
    return scores


def _from(scores: Array, border: float) -> Array:
    """The scores from a border on, and -inf for lower ones."""
    return np.where(scores < border, _NO, scores)


def _top_p(scores: Array, top_p: float) -> Array:
    probs = softmax(scores)
    _, [best] = largest(probs[None], min(_SHORTLIST, len(probs)))
    if (mass := running_total(best))[-1] < top_p:
        best = np.sort(probs)[::-1]
        mass = running_total(best)
    before = mass - best  # mass of the tokens ahead
    keep = max(1, int((before < top_p).sum()))
    border = best[keep - 1]
    above = probs > border
    # among equals at the border the lowest ids stay, as many as the run has room for
    above[(probs == border).nonzero()[0][: keep - int(above.sum())]] = True
    return np.where(above, scores, _NO)


class LogitsDistribution:
    """The target's distribution at the nodes of a draft, computed when a verifier asks for it.

    It is the `TargetDistribution` of `outrider.verify`."""

    def __init__(self, logits: Array, draft: Draft, warp: LogitsWarper) -> None:
        """logits: float32 [batch, node, vocab]."""
        self.logits, self.draft, self.warp = logits, draft, warp

    def _ancestors(self, b: int, node: int) -> list[int]:
        """The draft tokens from below the root down to `node`, if the parameters of row b read tokens."""
        path, tree = list[int](), self.draft.host[b]
        while self.warp.active[b] and node > 0:
            token, node = tree[node]
            path.append(token)
        return path[::-1]

    def probs(self, node: Array) -> Array:
        rows = self.logits[np.arange(len(node)), node]
        return softmax(self.warp.scores(rows, [self._ancestors(b, n) for b, n in enumerate(node.tolist())]))

    def sample_row(self, row: int, node: int, key: tuple[int, int, int, int]) -> int:
        return self.warp.draw_row(row, self.logits[row, node], self._ancestors(row, node), key)
