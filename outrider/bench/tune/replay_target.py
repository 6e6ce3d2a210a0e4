"""A target whose text is known costs nothing: what a drafter's guesses are worth along it.

Under `match` the text is the same whatever is guessed. Once plain decoding has written it, nobody needs the target again to
judge guesses, but for drafters that look into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.bench.local import forget
from outrider.bench.tune.simulate import Seen
from outrider.core.tree import depth
from outrider.core.types import Budget
from outrider.decode import Decoder, Request
from outrider.drafters.base import Drafter
from outrider.drafters.combine.guard import trusted
from outrider.drafters.model.self_speculation import QuantizedSelfDrafter
from outrider.models.base import BaseModel, LanguageModel, Output, Want
from outrider.models.cache import SlotCache
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes


class Told(BaseModel):
    """Says `text`, prompt and answer, by a logit far above all others at each node, by the node's place. Computes nothing;
    where a guess has left the text, what it says is of no account. One row."""

    def __init__(self, model: LanguageModel) -> None:
        self.text = list[int]()
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.device, self.batch_invariant = torch.device("cpu"), True

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, max_length)

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`; no features, and logits of all nodes of a step or of none."""
        if want == "none" or nodes.parents is None:
            return Output(torch.zeros(1, 0, self.vocab_size), None)
        logits = torch.zeros(1, nodes.count, self.vocab_size)
        insist(logits, nodes.parents, nodes.lengths, self.text)
        return Output(logits, None)


def insist(logits: Tensor, parents: Tensor, lengths: Sequence[int], text: Sequence[int]) -> None:
    """Raise, in place, the logit of the text's next token far above all others at each node, by the node's place in the text.
    logits: [batch, node, vocab]. parents: [batch, node]. lengths: committed tokens of each row."""
    for b, levels in enumerate(depth(parents).tolist()):
        for n, level in enumerate(levels):
            at = lengths[b] + level + 1
            if at < len(text):
                logits[b, n, text[at]] += 1e4


class Known:
    """Texts that plain decoding has written, and a decoder that writes them again: with the target itself only if the drafter
    looks into it, as `needs_target` says."""

    def __init__(
        self, target: Loaded, drafter: Drafter, requests: Sequence[Request], answers: Sequence[Sequence[int]]
    ) -> None:
        looks = (
            bool(drafter.taps) or hasattr(drafter, "watch") or isinstance(drafter, QuantizedSelfDrafter)
        )  # in the target's cache
        self.needs_target = looks or not trusted(drafter)  # who knows what others' drafters look into
        self._texts, self._told = list(zip(requests, answers, strict=True)), Told(target.model)
        longest = max(len(r.prompt) + len(a) for r, a in self._texts)
        self.decoder = Decoder(
            target.model if self.needs_target else self._told,
            drafter,
            rows=1,
            max_length=min(longest + 1, target.model.max_length),
            end_ids=target.end_ids,
            tokenizer=target.tokenizer,
        )

    def requests(self) -> Iterator[Request]:
        """One by one, each to be answered before the next is asked for. The drafter first forgets other texts."""
        forget(self.decoder.drafter)
        for request, answer in self._texts:
            self._told.text = [*request.prompt, *answer]
            yield request


def watched(
    target: Loaded, drafter: Drafter, requests: Sequence[Request], answers: Sequence[Sequence[int]], *budgets: Budget
) -> Seen:
    """What a drafter's guesses are worth along the answers of plain decoding, by a run with each budget: one of the longest
    chain, one of the largest tree if trees are to be predicted."""
    seen, known = Seen(Budget(budgets[0].depth, *budgets[-1].parts[1:])), Known(target, drafter, requests, answers)
    for budget in budgets:
        for request in known.requests():
            seen.watch(known.decoder, request, budget)
    return seen


def play(
    seen: Seen,
    target: Loaded,
    drafter: Drafter,
    requests: Sequence[Request],
    answers: Sequence[Sequence[int]],
    *trees: Budget,
) -> bool:
    """Know the steps of these trees instead of estimating them from the largest. False, and nothing done, where that needs the
    target: then it could as well be measured."""
    known = Known(target, drafter, requests, answers)
    for tree in trees if not known.needs_target else ():
        for request in known.requests():
            seen.play(known.decoder, request, tree)
    return not known.needs_target
