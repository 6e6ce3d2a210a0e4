"""A target whose text is known costs nothing: what a drafter's guesses are worth along it.

Under `match` the text is the same whatever is guessed. Once plain decoding has written it, nobody needs the target again to
judge guesses, but for drafters that look into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decode import Decoder, Request
from outrider.drafters.base import Drafter
from outrider.drafters.roster import trusted
from outrider.drafters.skip import SelfDrafter
from outrider.measure.local import forget
from outrider.measure.predict import Seen
from outrider.models.base import LanguageModel, Output, Want
from outrider.models.cache import SlotCache
from outrider.models.load import Loaded
from outrider.tree import depth
from outrider.types import Budget


class Told:
    """Says `text`, prompt and answer, by a logit far above all others at each node, by the node's place. Computes nothing;
    where a guess has left the text, what it says is of no account. One row."""

    def __init__(self, model: LanguageModel) -> None:
        self.text = list[int]()
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.device, self.rows_equal = torch.device("cpu"), True

    def new_cache(self, rows: int, max_length: int) -> SlotCache:
        return SlotCache(rows, max_length)

    def forward(
        self,
        tokens: Tensor,
        cache: SlotCache,
        rows: list[int],
        *,
        parents: Tensor | None = None,
        taps: tuple[int, ...] = (),
        want: Want = "all",
    ) -> Output:
        """See `LanguageModel.forward`; no features, and logits of all nodes of a step or of none."""
        if want == "none" or parents is None:
            return Output(torch.zeros(1, 0, self.vocab_size), None)
        logits = torch.zeros(1, tokens.shape[1], self.vocab_size)
        insist(logits, parents, [cache.length[row] for row in rows], self.text)
        return Output(logits, None)


def insist(logits: Tensor, parents: Tensor, lengths: Sequence[int], text: Sequence[int]) -> None:
    """Raise, in place, the logit of the text's next token far above all others at each node, by the node's place in the text.
    logits: [batch, node, vocab]. parents: [batch, node]. lengths: committed tokens of each row."""
    for b, levels in enumerate(depth(parents).tolist()):
        for n, level in enumerate(levels):
            at = lengths[b] + level + 1
            if at < len(text):
                logits[b, n, text[at]] += 1e4


def watched(
    target: Loaded, drafter: Drafter, requests: Sequence[Request], answers: Sequence[Sequence[int]], *budgets: Budget
) -> Seen:
    """What a drafter's guesses are worth along the answers of plain decoding, by a run with each budget: one of the longest
    chain, one of the largest tree if trees are to be predicted. What the drafter remembers of other texts is forgotten before
    each run."""
    seen = Seen(Budget(budgets[0].depth, *budgets[-1].parts[1:]))
    looks = bool(drafter.taps) or hasattr(drafter, "watch") or isinstance(drafter, SelfDrafter)  # in the target's cache
    needs = looks or not trusted(drafter)  # who knows what others' drafters look into
    told = Told(target.model)
    longest = max(len(r.prompt) + len(a) for r, a in zip(requests, answers, strict=True))
    decoder = Decoder(
        target.model if needs else told,
        drafter,
        rows=1,
        max_length=min(longest + 1, target.model.max_length),
        end_ids=target.end_ids,
        tokenizer=target.tokenizer,
    )
    for budget in budgets:
        forget(drafter)
        for request, answer in zip(requests, answers, strict=True):
            told.text = [*request.prompt, *answer]
            seen.watch(decoder, request, budget)
    return seen
