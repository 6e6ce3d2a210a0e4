"""What several tests share: toy decoders, requests, and every drafter by name."""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from outrider.control import CostModel, Costs, DraftCost, Fixed, Planner
from outrider.core.noise import Noise, Stream
from outrider.core.params import SamplingParams
from outrider.core.tree import tree
from outrider.core.types import Budget, Draft, Step
from outrider.drafters.base import BaseDrafter, DraftContext, Drafter, NoDraft
from outrider.drafters.config import DrafterSetup, SpeculativeConfig, make_drafters
from outrider.drafters.lookup.ngram import NgramDrafter
from outrider.drafters.lookup.prediction import PredictionDrafter
from outrider.drafters.lookup.suffix import SuffixDrafter
from outrider.drafters.lookup.token_recycling import TokenRecyclingDrafter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.planned import PlannedDrafter
from outrider.drafters.shapes import optimal_shape
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request, Sequence
from outrider.engine.scheduler import Scheduler
from outrider.models.base import LanguageModel
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes
from outrider.testing.stubs import Echo, Noisy, Wrong
from outrider.testing.toy import ToyModel

VOCAB = 11
_ids = itertools.count()


def path_to(parents: abc.Sequence[int], node: int) -> list[int]:
    """The nodes from the root down to `node`."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


class RandomTree(BaseDrafter):
    """Random tokens on a random tree within the budget: nothing a verifier may rely on but the contract."""

    def __init__(self, vocab_size: int = VOCAB, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.draw = np.random.default_rng(seed)

    def propose(self, batch: DraftContext) -> Draft:
        rows = []
        for tokens, budget in zip(batch.tokens, batch.budgets, strict=True):
            nodes, level = [(tokens[-1], -1)], [0]
            for _ in range(int(self.draw.integers(budget.max_nodes + 1)) if budget.depth else 0):
                full = {n for n in range(len(nodes)) if sum(p == n for _, p in nodes) >= budget.width}
                open_ = [n for n, d in enumerate(level) if d < budget.depth and n not in full]
                if not open_:
                    break
                parent = open_[int(self.draw.integers(len(open_)))]
                nodes.append((int(self.draw.integers(self.vocab_size)), parent))
                level.append(level[parent] + 1)
            rows.append(nodes)
        return Draft(*tree(rows))


class TargetTree(BaseDrafter):
    """Trees that hold the target's own choice among others: the accepted path runs through the scratch, out of order."""

    def __init__(self, model: ToyModel, decoys: int = 2) -> None:
        self.model, self.decoys = model, decoys

    def propose(self, batch: DraftContext) -> Draft:
        rows = []
        for b, (tokens, budget) in enumerate(zip(batch.tokens, batch.budgets, strict=True)):
            nodes, parent, text = [(tokens[-1], -1)], 0, list(tokens)
            for level in range(budget.depth):
                cache = self.model.new_cache(1, len(text))
                logits = np.asarray(self.model.forward(Nodes(np.array([text]), cache, [0]), want="last").logits[:, 0])
                right = int(
                    batch.warp.select([b]).draw(
                        logits,
                        [text[len(tokens) :]],
                        batch.noise.select([b]),
                        Stream.TOKEN,
                        batch.positions[[b]] + level,
                    )[0]
                )
                if right < 0:
                    break
                nodes += [((right + i + 1) % VOCAB, parent) for i in range(self.decoys)]
                nodes.append((right, parent))
                parent = len(nodes) - 1
                text.append(right)
            rows.append(nodes)
        return Draft(*tree(rows))


class KnownTree(BaseDrafter):
    """Trees that hold the next tokens of known texts, each behind another one: what is accepted lies apart in the scratch. Every
    fifth token of a text is wrong."""

    def __init__(self, target: LanguageModel, asked: list[Request]) -> None:
        """asked: no two with the same prompt. `plain_texts` writes them."""
        self.vocab, texts = target.vocab_size, plain_texts(target, asked)
        self.texts = {tuple(one.prompt): text for one, text in zip(asked, texts, strict=True)}

    def propose(self, batch: DraftContext) -> Draft:
        rows = []
        for tokens, prompt, budget in zip(batch.tokens, batch.prompt_lengths, batch.budgets, strict=True):
            nodes, parent, at = [(tokens[-1], -1)], 0, len(tokens) - prompt
            for n, right in enumerate(self.texts[tuple(tokens[:prompt])][at : at + budget.depth], at):
                nodes += [((right + 1) % self.vocab, parent), ((right + 2 * (n % 5 == 4)) % self.vocab, parent)]
                parent = len(nodes) - 1
            rows.append(nodes)
        return Draft(*tree(rows))


def request(prompt: list[int], params: SamplingParams, seed: int = 0, **fields: Any) -> Request:
    bad: Any = tuple(tuple(w) for w in params.bad_words)
    return Request(next(_ids), prompt, params, seed, bad, **fields)


class Loop(Decoder):
    """A decoder that runs sequences by itself, as a library's user would with a scheduler."""

    def step(self) -> Step | None:
        """A chunk of the oldest unread prompt, then a round of all that decode: for tests of sequences that join and leave."""
        if self.waiting:
            self.prefill(self.waiting)
        return self.round(live) if (live := self.live) else None

    def steps(self, requests: Iterable[Request]) -> Iterator[tuple[Step | None, list[Sequence]]]:
        scheduler = Scheduler(self, raises=True)
        return scheduler.run(scheduler.add(requests))

    def generate(self, requests: Iterable[Request]) -> list[Sequence]:
        return Scheduler(self, raises=True).generate(requests)


def costs(names: abc.Iterable[str] = (), level: float = 0.1, read: float = 0.02) -> CostModel:
    """A machine on which a plain step takes a second and a node more takes a twentieth of it."""
    drafters = {name: DraftCost(0.01, level, read) for name in names}
    return CostModel({}, {1: 1.0, 17: 1.8}, drafters)


def planned(
    drafters: dict[str, Drafter],
    lookups: abc.Sequence[str] = (),
    budget: Budget | None = None,
    fixed: bool = False,
    vocab: int = VOCAB,
    **options: Any,
) -> PlannedDrafter:
    """Drafters under a planner with made-up costs. fixed: every draft has this budget."""
    budget, lengths = budget or Budget(8), Fixed(0)
    lengths.budget = budget
    models = [name for name in drafters if name not in lookups]
    planner = Planner(budget, Costs(costs(models)), lengths if fixed else None)
    return PlannedDrafter(drafters, planner, vocab, lookups, **options)


def decoder(target: LanguageModel, drafter: Drafter | None = None, depth: int = 4, rows: int = 4, **options) -> Loop:
    budget = options.pop("budget", Budget(depth))
    controller: Any = Fixed(0)
    controller.budget = budget
    if isinstance(drafter, PlannedDrafter):
        controller = drafter.planner
    return Loop(target, drafter, controller=controller, num_slots=rows, end_ids=options.pop("end_ids", (0,)), **options)


def plain_texts(target: LanguageModel, requests: list[Request], **options) -> list[list[int]]:
    """One at a time, no drafter: the definition of what every text must be. The same model writes the same request once."""
    known = _plain.setdefault(target, {})
    texts = list[list[int]]()
    for asked in requests:
        key = repr((replace(asked, id=0, sink=None), options)) if asked.mask is None else ""
        if key not in known or not key:
            known[key] = decoder(target, NoDraft(), rows=1, **options).generate([asked])[0].output
        texts.append(list(known[key]))
    return texts


_plain: WeakKeyDictionary[LanguageModel, dict[str, list[int]]] = WeakKeyDictionary()


def configured(config: dict[str, Any], target: Loaded, num_slots: int, max_length: int) -> Any:
    """The drafter of a configuration with one method."""
    setup = DrafterSetup(SpeculativeConfig.of(config), target, num_slots, max_length, "cpu")
    [drafter] = make_drafters(setup).values()
    return drafter


def toy_drafters(target: ToyModel, rows: int = 4) -> dict[str, Callable[[], Drafter]]:
    """Every drafter that can draft for a toy target, made anew by each call."""

    def draft(error: float, **options: Any) -> ModelDrafter:
        model = ToyModel(target.vocab_size, target.order, 0, error=error, max_length=target.max_length)
        return ModelDrafter(model, rows, target.max_length, **options)

    return {
        "none": NoDraft,
        "wrong": lambda: Wrong(1),
        "noisy": lambda: Noisy(draft(0.3), 0.7, target.vocab_size),
        "ngram": lambda: NgramDrafter(1, 3),
        "suffix": lambda: SuffixDrafter(shared=0, least=0.01),
        "suffix_shared": lambda: SuffixDrafter(least=0.01),
        "prediction": lambda: PredictionDrafter([t * t % target.vocab_size for t in range(30)]),
        "token_recycling": lambda: TokenRecyclingDrafter(target.vocab_size, 4),
        "draft_model": lambda: draft(0.5),
        "self": lambda: draft(0.0),
        "shape": lambda: draft(0.5, shape=optimal_shape),
        "random_tree": lambda: RandomTree(target.vocab_size),
        "target_tree": lambda: TargetTree(target),
        "echo": lambda: Echo({}),
    }


def noise(seed: list[int], step: int = 0) -> Noise:
    return Noise(np.array(seed, np.int64), np.full(len(seed), step))


def counts(steps: list[Step]) -> tuple[int, int]:
    """Guesses and accepted guesses over all rows of some steps."""
    return sum(int(s.draft.num_draft_tokens.sum()) for s in steps), sum(int(s.verdict.accepted.sum()) for s in steps)
