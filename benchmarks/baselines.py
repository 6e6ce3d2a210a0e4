"""Two simple planners on recorded texts. Nothing may be added to the planner that does not beat them.

`MovingAverage` drafts with one model or head. Its only number is a moving average of acceptance: it gives the length of every
draft. `Small` has fixed thresholds beside moving averages: a chain ends where its stated survival falls below 0.6. Both keep the
accounts of `outrider_lab.tune.replay.Machine`, for one text at a time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

from outrider.control import CostModel
from outrider.drafters.method import METHODS
from outrider_lab.tune.recorded import RecordedText
from outrider_lab.tune.replay import DRAFTED, PLANNED, Played

BOUNDS = (1, 2, 3, 5, 8, 16)
RIGHT = (0.25, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)  # by class of match, before the first was seen
STOP, LATER = 0.6, 0.85


class MovingAverage:
    """The best prefix of a chain whose tokens are right as often as lately. Without stated chances, and without lookups."""

    def __init__(self, costs: CostModel) -> None:
        self.costs, self.rate = costs, 0.65

    def write(self, text: RecordedText, names: Sequence[str]) -> Played:
        """What became of a text. names: its drafters; lookups are not asked."""
        [name] = [name for name in names if METHODS[name].cost != "lookup"]
        cost, forward, played = self.costs.drafters[name], self.costs.forward, Played(text)
        head, at, end, rested = bool(METHODS[name].heads), 0, len(text.output), 0
        missing = 0 if head else len(text.prompt)
        while at < end:
            most = min(text.limit - at - 1, 8)
            speeds = [
                (1 + sum(self.rate**j for j in range(1, k + 1))) / (cost.seconds(k) * (k > 0) + forward(k + 1))
                for k in range(most + 1)
            ]
            k = max(range(most + 1), key=speeds.__getitem__) if at else 0
            gain = (1 / speeds[0] - 1 / speeds[k]) * (text.limit - at)
            rested += 1
            if not k and rested >= 64 and most > 0 and missing <= 64:
                k = 1
            elif missing > 2 and gain <= cost.read * missing:
                k = 0
            accepted = min(text.drafts[name][at].accepted, k)
            played.seconds += PLANNED + forward(k + 1)
            if k:
                played.seconds += DRAFTED + cost.seconds(k) + cost.read * missing
                missing, rested = 0 if head else accepted == k, 0
                for j in range(min(accepted + 1, k)):
                    self.rate += 0.05 * ((j < accepted) - self.rate)
            missing += 0 if head else accepted + 1 if not k else 1
            at, played.steps = at + accepted + 1, played.steps + 1
        return played


class Small:
    """Acceptance by drafter and by class of match, mean length of answers; everything else is a threshold."""

    def __init__(self, costs: CostModel) -> None:
        self.costs, self.length = costs, 60.0
        self.rates, self.classes = dict[str, float](), dict[str, list[float]]()

    def write(self, text: RecordedText, names: Sequence[str]) -> Played:
        """What became of a text. names: its drafters."""
        costs, played, end, plain = self.costs, Played(text), len(text.output), 1 / self.costs.forward(1)
        models = [name for name in names if METHODS[name].cost != "lookup"]
        rates, shifts = {name: self.rates.get(name, 0.6) for name in models}, dict.fromkeys(names, 0.0)
        unread = {name: 0 if METHODS[name].heads else len(text.prompt) for name in models}
        rested, at, pause, misses = dict.fromkeys(models, 0), 0, 0, 0
        while at < end:
            most, options, asked = min(text.limit - at - 1, 16), [(plain, "", 0)], False
            pause -= pause > 0
            for name in [] if pause else [name for name in names if name not in models]:
                offer = text.drafts[name][at]
                asked = True
                if offer.length and most > 0:
                    table = self.classes.setdefault(name, [*RIGHT])
                    first = _shifted(table[bisect_left(BOUNDS, offer.match)], shifts[name])
                    later = max(first, LATER if offer.match > 3 else first)
                    options.append(self._best(name, [first] + [later] * (min(offer.length, most) - 1), 0.0, 0.0))
            if asked:  # lookups that offer nothing worth taking wait 1, 2, 4, 8 steps
                misses, pause = (0, 0) if max(options)[0] > 1.1 * plain else (misses + 1, min(2**misses, 8))
            for name in models if most > 0 else ():
                cost, rested[name] = costs.drafters[name], rested[name] + 1
                one = self._best(
                    name, [rates[name]] * min(most, 8), cost.first + cost.read * min(unread[name], 2), cost.level
                )
                if not one[2] and rested[name] >= 48 and unread[name] < 64:
                    one = (plain + 1e-9, name, 1)
                rest = min(max(self.length - at, at / 2, 8), text.limit - at)
                gain = (1 / max(options)[0] - 1 / one[0]) * rest if one[2] else 0.0
                if one[2] and at and (unread[name] <= 2 or gain > 1.5 * cost.read * unread[name]):
                    options.append(one)
            _, name, k = max(options)
            seconds = PLANNED if asked or models else 0.0
            offer = text.drafts[name][at] if k else None
            if offer is not None and name in models:
                alive, k, rested[name] = 1.0, 0, 0
                while k < min(most, 12) and alive >= STOP:
                    alive *= offer.chances[k] if k < len(offer.chances) else 1e-4
                    k += 1
                seconds += costs.drafters[name].seconds(k) + costs.drafters[name].read * unread[name]
                unread[name] = 0
            elif offer is not None:
                k = min(k, offer.length)
            accepted = min(offer.accepted, k) if offer is not None else 0
            played.seconds += seconds + costs.forward(k + 1) + DRAFTED * (k > 0)
            if offer is not None and name in models:
                for j in range(min(accepted + 1, k)):
                    rates[name] += 0.05 * ((j < accepted) - rates[name])
            elif offer is not None:
                table, place = self.classes[name], bisect_left(BOUNDS, offer.match)
                shift = shifts[name] + 0.3 * ((accepted > 0) - _shifted(table[place], shifts[name]))
                shifts[name] = min(max(shift, -3), 3)
                table[place] = min(max(table[place] + 0.02 * ((accepted > 0) - table[place]), 0.02), 0.98)
            for other in unread:
                if not METHODS[other].heads:
                    unread[other] += 1 + (accepted == k) if other == name and k else accepted + 1
            at, played.steps = at + accepted + 1, played.steps + 1
        for name, rate in rates.items():
            self.rates[name] = 0.8 * self.rates.get(name, 0.6) + 0.2 * rate
        self.length += 0.1 * (end - self.length)
        return played

    def _best(self, name: str, chances: Sequence[float], extra: float, level: float) -> tuple[float, str, int]:
        """Tokens a second of the best prefix of a chain, the drafter, and the prefix's length."""
        tokens, alive, best = 1.0, 1.0, (1 / self.costs.forward(1), name, 0)
        for k, chance in enumerate(chances, 1):
            alive *= chance
            tokens += alive
            best = max(best, (tokens / (extra + level * k + self.costs.forward(k + 1)), name, k))
        return best


def _shifted(chance: float, shift: float) -> float:
    return 1 / (1 + math.exp(-shift) * (1 - chance) / chance)
