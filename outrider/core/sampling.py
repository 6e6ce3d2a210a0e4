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

import torch
from torch import Tensor

from outrider.core.noise import Noise, Stream
from outrider.core.params import SamplingParams
from outrider.core.types import Draft, ints
from outrider.kernels import why_no_kernels
from outrider.kernels.cpu import argmax, argmax_gumbel
from outrider.kernels.probabilities import running_total, softmax

_NO = float("-inf")
_ARITHMETIC = Context(prec=28)
# top-p sorts this many candidates first. The full sort gives the same result, slower.
_SHORTLIST = 256


class TokenMask(Protocol):
    """The tokens that a grammar allows next."""

    def allowed(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> Tensor:
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
    prompt_seen: Tensor | None = field(default=None, init=False)  # bool [vocab]
    counts: Tensor | None = field(default=None, init=False)  # float32 [vocab], of the output
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

    def apply(self, logits: Tensor, extra: Sequence[int]) -> Tensor:
        """float32 [vocab] -> a changed copy, for the token that follows the committed tokens and then `extra`."""
        p, out = self.params, logits.clone()
        written = len(self.tokens) - self.prompt_length + len(extra)
        if p.allowed_token_ids is not None:
            only = torch.full_like(out, _NO)
            ids = torch.as_tensor(p.allowed_token_ids, device=out.device)
            only[ids] = out[ids]
            out = only
        if self.mask is not None:
            allowed = self.mask.allowed(self.tokens, self.prompt_length, extra)
            out = out.masked_fill(~allowed.to(out.device), _NO)
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

    def _penalties(self, out: Tensor, extra: Sequence[int]) -> Tensor:
        p = self.params
        if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.0, 0.0, 0.0):
            return out
        if self.counts is None or self.prompt_seen is None:
            self.counts = torch.zeros_like(out)
            self.prompt_seen = torch.zeros_like(out, dtype=torch.bool)
            self.prompt_seen[self.tokens[: self.prompt_length]] = True
        new = self.tokens[self.prompt_length + self.counted :]
        if new:
            self.counts.index_add_(0, out.new_tensor(new, dtype=torch.long), out.new_ones(len(new)))
            self.counted += len(new)
        counts = self.counts
        if extra:
            counts = counts.index_add(0, out.new_tensor(extra, dtype=torch.long), out.new_ones(len(extra)))
        if p.repetition_penalty != 1:
            hurt = torch.where(out > 0, out / p.repetition_penalty, out * p.repetition_penalty)
            out = torch.where(self.prompt_seen | (counts > 0), hurt, out)
        return out - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)


def draw(scores: Tensor, noise: Noise, stream: Stream, position: Tensor) -> Tensor:
    """int64 [batch]: one draw from softmax(scores) of each row, by the Gumbel-max trick: argmax(scores + Gumbel noise).

    scores: float [batch, vocab], log probabilities up to a constant per row. position: int64 [batch]. The lowest index
    wins a tie. -1 if a row has NaN, inf or only -inf. `kernels.cpu.argmax_gumbel` is the same for one row.
    """
    return _largest(scores + noise.gumbel(stream, position, scores.shape[-1]))


def _largest(scores: Tensor) -> Tensor:
    """int64 [batch]: the lowest index of the largest score; -1 if a row has NaN, inf or only -inf."""
    best = scores.max(-1)
    return torch.where(best.values.isfinite(), best.indices, -1)


@dataclass(frozen=True, eq=False)
class TokenSubset:
    """The tokens that a draft proposes, if it has logits for some of the vocabulary only. All others have probability 0.

    ids: int64 [kept], ascending. vocab_size: tokens of the whole vocabulary.
    """

    ids: Tensor
    vocab_size: int

    def widened(self, values: Tensor, rest: float) -> Tensor:
        """[..., kept] -> [..., vocab]. rest: the value of the tokens that are not kept."""
        return values.new_full((*values.shape[:-1], self.vocab_size), rest).index_copy_(-1, self.ids, values)

    def tokens(self, places: Tensor) -> Tensor:
        """int64: the token at each place of `ids`; -1 stays -1."""
        return torch.where(places < 0, places, self.ids[places.clamp_min(0)])


class LogitsWarper:
    """The sampling parameters of a batch, compiled once. Entries are independent: each has the same result in any batch."""

    def __init__(self, histories: Sequence[SequenceState], device: torch.device | str = "cpu") -> None:
        self.histories = list(histories)
        params = [h.params for h in histories]
        self.greedy = [p.greedy for p in params]
        self.all_greedy = all(self.greedy)
        self.active = [h.active for h in histories]
        self.filtered = [not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) for p in params]
        temperature = [p.temperature if p.temperature > 0 else 1.0 for p in params]
        self.temperature = (
            None if all(t == 1 for t in temperature) else torch.tensor(temperature, device=device)[:, None]
        )

    def processed(self, logits: Tensor, extra: Sequence[Sequence[int]], subset: TokenSubset | None = None) -> Tensor:
        """float32 [batch, vocab] -> the logits after the parameters that depend on tokens, before temperature.

        subset: the tokens that the columns of `logits` stand for; None for the whole vocabulary."""
        if not any(self.active):
            return logits
        rows = zip(logits, self.histories, self.active, extra, strict=True)
        return torch.stack([_applied(h, x, e, subset) if active else x for x, h, active, e in rows])

    def scores(self, logits: Tensor, extra: Sequence[Sequence[int]], subset: TokenSubset | None = None) -> Tensor:
        """float32 [batch, vocab] -> log probabilities up to a constant per row. extra: the draft tokens from below the root
        down to the node, for each row. subset: as in `processed`."""
        logits = self.processed(logits, extra, subset)
        out = logits if self.temperature is None else logits / self.temperature
        if any(self.filtered):
            rows = zip(out, self.histories, self.filtered, strict=True)
            out = torch.stack([truncate(x, h.params) if on else x for x, h, on in rows])
        if any(self.greedy):
            best = logits.max(-1, keepdim=True)
            hot = torch.full_like(logits, _NO).scatter_(-1, best.indices, torch.where(best.values.isfinite(), 0.0, _NO))
            hot = torch.where(best.values.isnan(), best.values, hot)
            out = torch.where(torch.tensor(self.greedy, device=out.device)[:, None], hot, out)
        return out

    def draw(
        self,
        logits: Tensor,
        extra: Sequence[Sequence[int]],
        noise: Noise,
        stream: Stream,
        position: Tensor,
        subset: TokenSubset | None = None,
    ) -> Tensor:
        """int64 [batch]: one draw per row, see `sampling.draw`. -1 if the logits hold NaN or inf, or no token is allowed.

        subset: as in `processed`. The noise is that of its tokens, and the result is one of them."""
        if not why_no_kernels(logits.device):
            keys = noise.keys(stream, position)
            return torch.tensor([self.draw_row(b, logits[b], extra[b], key, subset) for b, key in enumerate(keys)])
        return self._draw(logits, extra, noise, stream, position, subset)

    def _draw(
        self,
        logits: Tensor,
        extra: Sequence[Sequence[int]],
        noise: Noise,
        stream: Stream,
        position: Tensor,
        subset: TokenSubset | None,
    ) -> Tensor:
        if self.all_greedy:
            best = _largest(self.processed(logits, extra, subset))
        elif subset is None:
            return draw(self.scores(logits, extra), noise, stream, position)
        else:
            added = noise.gumbel(stream, position, subset.vocab_size, subset.ids)
            best = _largest(self.scores(logits, extra, subset) + added)
        return best if subset is None else subset.tokens(best)

    def draw_row(
        self,
        b: int,
        logits: Tensor,
        extra: Sequence[int],
        key: tuple[int, int, int, int],
        subset: TokenSubset | None = None,
    ) -> int:
        """`draw` for row b alone. One native pass adds the noise and finds the largest score; greedy needs no noise.

        logits: float32 [vocab]. key: the row of `noise.keys`.
        """
        if why_no_kernels(logits.device):
            seed, stream, step, at = (torch.tensor([part]) for part in key)
            noise = Noise(seed, step)
            return int(self.select([b])._draw(logits[None], [extra], noise, Stream(int(stream)), at, subset)[0])
        history = self.histories[b]
        params = history.params
        scores = _applied(history, logits, extra, subset) if self.active[b] else logits
        temperature = params.temperature
        if self.filtered[b]:
            scores, temperature = truncate(scores / temperature, params), 1.0
        try:
            ids = None if subset is None else subset.ids
            token = argmax(scores) if self.greedy[b] else argmax_gumbel(scores, *key, temperature=temperature, ids=ids)
        except ValueError:  # NaN
            return -1
        if not math.isfinite(scores[token].item()):
            return -1  # everything was forbidden, or the logits hold inf
        return token if subset is None else int(subset.ids[token])

    def simple(self, row: int) -> bool:
        """True if the distribution of a row is softmax(logits / temperature), and no other parameter changes it."""
        return not self.active[row] and not self.filtered[row]

    def select(self, rows: Sequence[int]) -> LogitsWarper:
        """The parameters of some of the rows."""
        device = "cpu" if self.temperature is None else self.temperature.device
        return LogitsWarper([self.histories[r] for r in rows], device)


def _applied(history: SequenceState, logits: Tensor, extra: Sequence[int], subset: TokenSubset | None) -> Tensor:
    if subset is None:
        return history.apply(logits, extra)
    return history.apply(subset.widened(logits, _NO), extra)[subset.ids]


def truncate(scores: Tensor, params: SamplingParams) -> Tensor:
    """float32 [vocab] -> the same, with -inf outside top-k, then top-p, then min-p.

    top-k and min-p keep all tokens that tie at the border. top-p keeps the shortest run of the sorted tokens that reaches
    its mass; among equals the lowest id comes first."""
    if 0 < params.top_k < len(scores):
        border = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < border, _NO)
    if params.top_p < 1:
        scores = _top_p(scores, params.top_p)
    if params.min_p > 0:
        # Decimal has its own arithmetic: the C library's logarithm is not the same everywhere
        border = scores.max() + float(_ARITHMETIC.ln(Decimal(params.min_p)))
        scores = scores.masked_fill(scores < border, _NO)
    return scores


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    probs = softmax(scores)
    best = probs.topk(min(_SHORTLIST, len(probs))).values
    if (mass := running_total(best))[-1] < top_p:
        best = probs.sort(descending=True).values
        mass = running_total(best)
    before = mass - best  # mass of the tokens ahead
    keep = max(1, int((before < top_p).sum()))
    border = best[keep - 1]
    above = probs > border
    # among equals at the border the lowest ids stay, as many as the run has room for
    equal = (probs == border).nonzero().flatten()[: keep - int(above.sum())]
    above[equal] = True
    return scores.masked_fill(~above, _NO)


class LogitsDistribution:
    """The target's distribution at the nodes of a draft, computed when a verifier asks for it.

    It is the `TargetDistribution` of `outrider.verify`."""

    def __init__(self, logits: Tensor, draft: Draft, warp: LogitsWarper) -> None:
        """logits: float32 [batch, node, vocab]."""
        self.logits, self.draft, self.warp = logits, draft, warp

    def _at(self, node: Tensor) -> tuple[Tensor, list[list[int]]]:
        rows = self.logits[torch.arange(len(node), device=node.device), node]
        if not any(self.warp.active):
            return rows, [[]] * len(rows)
        return rows, [self._ancestors(b, n) for b, n in enumerate(ints(node))]

    def _ancestors(self, b: int, node: int) -> list[int]:
        """The draft tokens from below the root down to `node`."""
        parents, tokens = self.draft.parents[b], self.draft.tokens[b]
        path: list[int] = []
        while node > 0:
            path.append(int(tokens[node]))
            node = int(parents[node])
        return path[::-1]

    def sample(self, node: Tensor, noise: Noise, position: Tensor) -> Tensor:
        logits, extra = self._at(node)
        return self.warp.draw(logits, extra, noise, Stream.TOKEN, position)

    def probs(self, node: Tensor) -> Tensor:
        logits, extra = self._at(node)
        return softmax(self.warp.scores(logits, extra))

    def sample_row(self, row: int, node: int, key: tuple[int, int, int, int]) -> int:
        """`sample` for one row; see `outrider.verify.batched.RowTargetDistribution`."""
        extra = self._ancestors(row, node) if self.warp.active[row] else ()
        return self.warp.draw_row(row, self.logits[row, node], extra, key)
