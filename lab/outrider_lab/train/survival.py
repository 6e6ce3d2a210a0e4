"""How far drafts get on texts that no training saw: S_j, the share of places where the first j draft tokens are all right.

A text of temperature 0 is compared with the head's likeliest tokens. For a text that was drawn, the draft uses the noise that
drew it, as the verifier `match` does. That noise is drawn again here, given the text: the key of the text's token is the
largest, and the others are Gumbel variables below it (Maddison et al. 2014, arXiv 1411.0030).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_lab.train.answers import TrainingText
from outrider_lab.train.batches import Batch, batch_of, positions
from outrider_lab.train.method import TrainedHead
from outrider_lab.train.teacher import Taught


@dataclass(frozen=True)
class Survival:
    """survived: how often the first 1, 2, ... draft tokens were right. places: drafts that were tried. group: a source, or a
    temperature."""

    group: str
    survived: tuple[int, ...]
    places: int

    @property
    def shares(self) -> list[float]:
        """S_1, S_2, ...: shares of the places."""
        return [n / max(1, self.places) for n in self.survived]

    @property
    def accepted_length(self) -> float:
        """Mean tokens of a step: the accepted ones and the target's own."""
        return 1 + sum(self.shares)

    @property
    def error(self) -> float:
        """The standard error of S_1, as if one place in eight were independent: neighbours resemble each other."""
        first = self.shares[0]
        return math.sqrt(max(first * (1 - first), 1e-4) / max(1.0, self.places / 8))


@dataclass(frozen=True)
class _Text:
    """A held-out text, and what does not change while the head learns. total: float32 [n - 1], the logarithm of the sum of
    the exponentials of all logits, divided by the temperature, before each token but the first."""

    answer: TrainingText
    batch: Batch
    taught: Taught
    total: Tensor


class HeldOut:
    """Texts that measure a head while it learns. Raises ValueError if none is long enough.

    Attributes:
        tokens: of all texts.
    """

    def __init__(self, answers: Sequence[TrainingText], head: TrainedHead, seed: int, dtype: torch.dtype) -> None:
        self._head, self._teacher, self._ids = head, head.teacher, head.token_ids
        self._seed, self._dtype, depth = seed, dtype, head.depth
        every = self._teacher.output()
        self._rows = every[self._ids]
        self._texts = [self._text(a, every) for a in answers if len(positions(batch_of([a]), depth)[0])]
        if not self._texts:
            raise ValueError(
                f"no held-out answer has {depth + 2} tokens or more, so acceptance cannot be measured; give more prompts"
            )

        self.tokens = sum(len(text.answer.tokens) for text in self._texts)

    def measure(self) -> list[Survival]:
        """For all texts, group "all"; then for each source and each temperature."""
        counts: dict[str, Tensor] = {}
        for text in self._texts:
            right = self._survived(text)
            counted = torch.cat([right.sum(1), torch.tensor([right.shape[1]])])
            for group in ("all", text.answer.source, f"temperature {text.answer.temperature:g}"):
                counts[group] = counts.get(group, torch.zeros_like(counted)) + counted
        return [Survival(group, tuple(c[:-1].tolist()), int(c[-1])) for group, c in counts.items()]

    def _text(self, answer: TrainingText, every: Tensor) -> _Text:
        batch = batch_of([answer])
        taught = self._teacher.read(batch.tokens)
        total = torch.zeros(0)
        if answer.temperature:
            logits = self._teacher.logits(taught.last[0, :-1], every)
            total = (logits.float() / answer.temperature).logsumexp(-1)
        return _Text(answer, batch, Taught(taught.features.to(torch.bfloat16), taught.last), total)

    @torch.no_grad()
    def _survived(self, text: _Text) -> Tensor:
        """bool [depth, place]: whether the draft is right up to there."""
        device, temperature = text.taught.last.device, text.answer.temperature
        places = positions(text.batch, self._head.depth)[0]
        anchors = torch.arange(places.start, places.stop, device=device)[None]
        tokens = text.batch.tokens.to(device)
        noise = self._noise(text) if temperature else None
        alive, rows = torch.ones(len(places), dtype=torch.bool, device=device), []
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            taught = text.taught._replace(features=text.taught.features.float())
            for step, (logits, _) in enumerate(self._head.drafts(tokens, taught, anchors)):
                aim = anchors[0] + 2 + step
                keys = logits[0].float()
                if noise is not None:
                    keys = keys / temperature + noise[aim]
                alive = alive & (self._ids[keys.argmax(-1)] == tokens[0, aim])
                rows.append(alive)
        return torch.stack(rows).cpu()

    def _noise(self, text: _Text) -> Tensor:
        """float32 [n, draft_vocab]: Gumbel noise of each position's tokens, given that it drew the text."""
        last, tokens = text.taught.last[0, :-1], text.batch.tokens[0, 1:].to(text.taught.last.device)
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + text.answer.number)
        logits = self._teacher.logits(last, self._rows).float() / text.answer.temperature
        noise = noise_given(logits - text.total[:, None], tokens, self._ids, generator)
        return torch.cat([noise[:1], noise])  # row 0 is of no draft


def noise_given(log_p: Tensor, tokens: Tensor, ids: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise with which each token was drawn: float32 [n, draft_vocab], log_p + noise is the largest at the token.

    log_p: [n, draft_vocab], log-probabilities of the tokens `ids`; what is missing to 1 is outside of them. tokens: int64
    [n], what was drawn; one outside of `ids` leaves all keys below its own.
    """
    uniform = torch.rand(len(tokens), 1 + len(ids), generator=generator).to(log_p.device)
    gumbel = -(-uniform.clamp(1e-7, 1 - 1e-7).log()).log()
    highest = gumbel[:, :1]  # the key of the drawn token: the largest of keys whose exponentials sum to one
    noise = -torch.logaddexp(-highest, -(log_p + gumbel[:, 1:])) - log_p
    at = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
    drawn = (ids[at] == tokens).nonzero()[:, 0]
    noise[drawn, at[drawn]] = highest[drawn, 0] - log_p[drawn, at[drawn]]
    return noise
