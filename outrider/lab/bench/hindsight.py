"""What was possible: a setting against an oracle, and against the best single choice in hindsight, by one recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outrider.drafters.registry import lookup_names
from outrider.engine.llm import LLM
from outrider.lab.bench.prompts import Prompt
from outrider.lab.tune.forecasts import LENGTHS, Forecasts
from outrider.lab.tune.race import Candidate, Racer
from outrider.lab.tune.replay import by_kind, oracle_texts


class Hindsight(NamedTuple):
    """Speeds over plain decoding, in the replay. setting: as it is. oracle: knows what will be accepted. best: the fastest single
    drafter with one length, or adaptive, chosen from these very texts."""

    name: str
    setting: float
    oracle: float
    best: str
    best_speed: float

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.setting:.2f} times plain decoding by the replay, {self.setting / self.oracle:.0%} of what an "
            f"oracle reaches with these drafters ({self.oracle:.2f}). The best single choice in hindsight is {self.best}, "
            f"{self.best_speed:.2f}."
        )


def hindsight(llms: Mapping[str, LLM], prompts: Sequence[Prompt], sampling: Mapping[str, Any]) -> list[Hindsight]:
    """One for each setting that drafts. Each is a pass over the prompts."""
    found = list[Hindsight]()
    for name, llm in llms.items():
        roster = llm.runtime.roster
        if roster is None:
            continue
        config = llm.config.model_dump(exclude_defaults=True)
        forecasts = Forecasts(Racer(llm.loaded, sampling), prompts, [(name, {"method": llm.config.method, **config})])
        for _ in forecasts.run():
            pass
        if not forecasts.methods:
            continue
        drafters = forecasts.methods[0].drafters
        fixed = llm.config.budget.depth if roster.planner.lengths is not None else None
        single = {
            f"{drafter}{f' k={length}' if length else ''}": forecasts.speed(Candidate("", {}, (drafter,), length))
            for drafter in drafters
            for length in (None, *LENGTHS)
        }
        best = max(single, key=single.__getitem__)
        lookups = lookup_names(drafters)
        models = [drafter for drafter in drafters if drafter not in lookups]
        played = oracle_texts(forecasts.texts, forecasts.costs, models, lookups)
        reached = forecasts.speed(Candidate(name, {}, drafters, fixed))
        found.append(Hindsight(name, reached, by_kind(played, forecasts.costs)["all"], best, single[best]))
    return found
