"""A second, smaller model drafts. Its cache is level after every outcome, because level is looked up, not remembered."""

from __future__ import annotations

import torch

from outrider.drafters.base import BaseDrafter, Batch
from outrider.models.base import LanguageModel
from outrider.tree import chain
from outrider.types import Draft, Siblings

_CHUNK = 256  # prompt tokens ingested per forward


class ModelDrafter(BaseDrafter):
    """Chains from an independent model with the target's vocabulary.

    `seen[row]` are the tokens whose keys and values stand in this drafter's cache, committed or guessed. Each proposal
    first keeps the prefix of them that came true and ingests whatever else was committed, so full acceptance, rejection,
    steps without a draft and reuse of a row are one case.
    """

    def __init__(self, model: LanguageModel, rows: int, max_length: int) -> None:
        self.model = model
        self.cache = model.new_cache(rows, max_length)
        self.seen: list[list[int]] = [[] for _ in range(rows)]
        self._true = [0] * rows  # how many of `seen` are known to be committed tokens

    def release(self, row: int) -> None:
        self.cache.release(row)
        self.seen[row], self._true[row] = [], 0

    def propose(self, batch: Batch) -> Draft:
        room = [self.model.max_length - len(t) for t in batch.tokens]  # a short-sighted drafter stops drafting, no more
        some = [b for b, budget in enumerate(batch.budgets) if 0 < min(budget.depth, budget.max_nodes) <= room[b]]
        guesses: list[list[int]] = [[] for _ in batch.rows]
        laws: list[torch.Tensor] = []
        if some:
            laws = self._draft(batch, some, guesses)
        tokens, parents = chain([[t[-1], *g] for t, g in zip(batch.tokens, guesses, strict=True)])
        if not batch.law:
            return Draft(tokens, parents)
        probs = torch.zeros(*tokens.shape, self.model.vocab_size, device=self.model.device)
        for d, law in enumerate(laws):
            probs[some, d] = law.float()
        return Draft(tokens, parents, probs, Siblings.IID)

    def _draft(self, batch: Batch, some: list[int], guesses: list[list[int]]) -> list[torch.Tensor]:
        """Fills the guesses of the rows in `some`, level by level; returns the laws drawn from where they are asked for."""
        if len(some) == 1 and not batch.law and hasattr(self.model, "draft_chain") and batch.warp.simple(some[0]):
            guesses[some[0]] = self._chain(batch, some[0])
            return []
        logits = self._ingest(batch, some)
        depth = [min(batch.budgets[b].depth, batch.budgets[b].max_nodes) for b in some]
        rows, every = [batch.rows[b] for b in some], len(some) == len(batch.rows)
        warp = batch.warp if every else batch.warp.select(some)
        noise = batch.noise if every else batch.noise.select(some)
        position, laws = batch.positions[some], []
        for level in range(max(depth)):
            extra = [guesses[b] for b in some]
            if batch.law:
                laws.append(warp.scores(logits, extra).softmax(-1))
            drawn = warp.draw(logits, extra, noise, batch.stream, position + level).tolist()
            for b, d, token in zip(some, depth, drawn, strict=True):
                if level < d and len(guesses[b]) == level and token >= 0:
                    guesses[b].append(token)
            if level + 1 == max(depth):
                break
            feed = [max(t, 0) for t in drawn]  # rows that have stopped ride along; what they write is never kept
            logits = self.model.forward(torch.tensor(feed)[:, None], self.cache, rows).logits[:, 0]
            for row, token in zip(rows, feed, strict=True):
                self.cache.commit([row], [[0]])
                self.seen[row].append(token)
        return laws

    def _chain(self, batch: Batch, b: int) -> list[int]:
        """The same for one row without a law, in one call of a model that offers it: a small model's token costs less
        than the way through Python."""
        row, budget = batch.rows[b], batch.budgets[b]
        feed = self._level(batch, b)
        params = batch.warp.histories[b].params
        seed, stream, step, position = batch.noise.select([b]).keys(batch.stream, batch.positions[[b]])[0]
        drawn = self.model.draft_chain(  # pyright: ignore[reportAttributeAccessIssue]
            self.cache,
            row,
            feed,
            min(budget.depth, budget.max_nodes),
            temperature=params.temperature,
            seed=seed,
            stream=stream,
            step=step,
            position=position,
        )
        written = [*drawn[:-1]]  # the last one drawn was not forwarded
        self.cache.commit([row], [range(len(feed) + len(written))])
        self.seen[row] += written
        return drawn

    def _level(self, batch: Batch, b: int) -> list[int]:
        """Keeps what came true of a row and ingests what is long; returns the tokens that are left to forward."""
        row, tokens = batch.rows[b], batch.tokens[b]
        seen, n = self.seen[row], self._true[row]
        limit = min(len(seen), len(tokens) - 1)  # the root is forwarded anew: its logits are needed
        while n < limit and seen[n] == tokens[n]:
            n += 1
        self.cache.keep(row, n)
        while len(tokens) - n > _CHUNK:
            part = torch.tensor([tokens[n : n + _CHUNK]])
            self.model.forward(part, self.cache, [row], want="none")
            self.cache.commit([row], [range(_CHUNK)])
            n += _CHUNK
        self.seen[row], self._true[row] = tokens[:], len(tokens)
        return tokens[n:]

    def _ingest(self, batch: Batch, some: list[int]) -> torch.Tensor:
        """Brings the rows level with their committed tokens; returns logits [row, vocab] after the last of each."""
        feeds = [self._level(batch, b) for b in some]
        rows = [batch.rows[b] for b in some]
        tokens, parents = chain(feeds)
        logits = self.model.forward(tokens, self.cache, rows, parents=parents, want="last").logits[:, 0]
        self.cache.commit(rows, [range(len(f)) for f in feeds])
        return logits
