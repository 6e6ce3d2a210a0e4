"""What every setting would reach on some prompts: one recording, and replays at the costs of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from outrider.control import CostModel, Fixed
from outrider.drafters import make_drafters
from outrider.drafters.base import Drafter
from outrider.drafters.config import DrafterSetup, SpeculativeConfig
from outrider.drafters.method import AUTO, lookup_names, method_of
from outrider.engine.calibrate import AT_LOAD, measure
from outrider_lab.bench.prompts import Prompt
from outrider_lab.replay import beside
from outrider_lab.tune.candidates import deepest
from outrider_lab.tune.race import Candidate, Racer
from outrider_lab.tune.recorded import DraftRecorder, RecordedText, record
from outrider_lab.tune.replay import DEEPEST, Machine, auto, fixed, plain_seconds

TOGETHER = 4
"""Prompts that are recorded side by side."""
HEAVY = 2
"""Drafters with weights of their own that are in memory at a time."""
ROUNDS = 3
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
BATCH_SIZES = (1, 2, 4, 8, 16)
TOO_EXPENSIVE = "slower than plain decoding even if every draft token is accepted"


class Forecasts:
    """Records the drafters of some methods, and replays settings."""

    def __init__(self, racer: Racer, prompts: Sequence[Prompt], configs: Sequence[tuple[str, dict[str, Any]]]) -> None:
        self.racer, self.prompts, self.configs = racer, list(prompts), list(configs)
        self.methods = list[Candidate]()  # those that can draft here
        self.problems = dict[str, str]()  # why the others cannot, by name
        self.texts, self.costs = list[RecordedText](), CostModel({}, {1: 1.0})  # both are known after `run`
        self.names = set[str]()  # of all drafters

    def run(self) -> Iterator[str]:
        """Record all drafters. Yields a line of progress for each pass over the prompts."""
        light = [c for c in self.configs if lookup_names([str(c[1]["method"])])]
        heavy = [c for c in self.configs if c not in light]
        passes = [light + heavy[:HEAVY], *(heavy[n : n + HEAVY] for n in range(HEAVY, len(heavy), HEAVY))]
        for some in passes:
            drafters = self._make(some)
            if not drafters and self.texts:
                continue
            models = {name: drafter for name, drafter in drafters.items() if name not in lookup_names(drafters)}
            costs = measure(self.racer.target.model, models, {}, AT_LOAD, ROUNDS)
            target = costs.target if not self.costs.drafters else self.costs.target
            self.costs = CostModel({}, target, {**self.costs.drafters, **costs.drafters})
            for method in [m for m in self.methods if set(m.drafters) & set(models)]:
                if problem := self._hopeless(method, costs):
                    self.problems[method.name] = problem
                    self.methods.remove(method)
                    drafters = {name: drafter for name, drafter in drafters.items() if name not in method.drafters}
            yield f"recording {len(self.prompts)} answers and the drafts of {', '.join(drafters) or 'none'}"
            failed = self._record(drafters)
            for method in [m for m in self.methods if set(m.drafters) & set(failed)]:
                self.problems[method.name] = next(failed[n] for n in method.drafters if n in failed)
                self.methods.remove(method)

    def _hopeless(self, method: Candidate, costs: CostModel) -> str:
        """Why a method cannot be faster than plain decoding, whatever is accepted; "" if it may be."""
        models = [name for name in method.drafters if name not in lookup_names(method.drafters)]
        if any(name not in costs.drafters for name in models):
            return "it cannot draft in a context as short as this model's"
        plain = costs.forward(1)
        best = max(
            (d + 1) * plain / (costs.drafters[name].seconds(d) + costs.forward(d + 1))
            for name in models
            for d in LENGTHS
        )
        return "" if best > 1 or len(models) < len(method.drafters) else TOO_EXPENSIVE

    def _make(self, configs: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Drafter]:
        """The drafters of some configurations, by name. Those that cannot be made are `problems`."""
        drafters, target = dict[str, Drafter](), self.racer.target
        for name, config in configs:
            try:
                checked = SpeculativeConfig.of(config)
                length = self.racer.plain.decoder.max_length
                more = make_drafters(DrafterSetup(checked, target, TOGETHER, length, str(target.model.device)))
            except (ValueError, OSError) as error:
                self.problems[name] = " ".join(str(error).split())
                continue
            if set(more) & self.names:  # two precisions of one method
                more = {f"{key} {name.rpartition('-')[2]}": drafter for key, drafter in more.items()}
            drafters |= more
            self.methods.append(Candidate(name, config, tuple(more)))
            self.names |= set(more)
        return drafters

    def _record(self, drafters: Mapping[str, Drafter]) -> dict[str, str]:
        """Write the prompts plainly, beside the drafters. A later pass writes the same texts. Returns which drafters failed, and
        how."""
        lookups, plain = lookup_names(drafters), self.racer.plain.decoder
        recorder = DraftRecorder(drafters, lookups, deepest(name for name in drafters if name not in lookups))
        decoder = beside(plain, recorder, Fixed(DEEPEST), num_slots=TOGETHER)
        requests = [(p.category, self.racer.request(p)) for p in self.prompts]
        texts = record(decoder, recorder, requests)
        if not self.texts:
            self.texts = texts
        for old, new in zip(self.texts, texts, strict=True):
            old.drafts |= new.drafts
        return recorder.problems

    def candidates(self, whole: dict[str, Any] | None) -> list[Candidate]:
        """Every setting with its speed over plain decoding, the fastest first.

        Args:
            whole: The configuration of "auto". None where the user named methods.
        """
        settings = list[Candidate]()
        for method in self.methods:
            settings.append(method)
            for length in (k for k in LENGTHS if k <= deepest(method.drafters)):
                config = {**method.config, "num_speculative_tokens": length, "controller": "fixed"}
                settings.append(Candidate(f"{method.name} k={length}", config, method.drafters, length))
        lookups = [m for m in self.methods if _only_looks_up(m)]
        for method in [m for m in self.methods if m not in lookups] or [None]:
            settings += self._together(lookups, method, whole)
        for candidate in settings:
            candidate.predicted = self.speed(candidate)
        return sorted(settings, key=lambda c: -(c.predicted or 0.0))

    def _together(
        self, lookups: Sequence[Candidate], model: Candidate | None, whole: dict[str, Any] | None
    ) -> list[Candidate]:
        """Lookups with one other method: as "auto" where that means the same, else as a list of methods."""
        if whole is not None:
            of_auto = [m for m in lookups if (row := method_of(m.name)) is not None and row.auto is not None]
            first = next(
                (m for m in self.methods if not _only_looks_up(m) and (r := method_of(m.drafters[0])) and r.auto), None
            )
            if model is first:
                names = tuple(n for m in [*of_auto, *([model] if model else [])] for n in m.drafters)
                return [Candidate(AUTO, whole, names)] if names else []
            lookups = of_auto
        every = [*lookups, *([model] if model else [])]
        if len(every) < 2:
            return []
        rest = {} if model is None else {k: v for k, v in model.config.items() if k != "method"}
        config = {"method": [m.config["method"] for m in every], **rest}
        return [Candidate("+".join(m.name for m in every), config, tuple(n for m in every for n in m.drafters))]

    def speed(self, candidate: Candidate) -> float:
        """Speed over plain decoding of a setting, with all texts through one planner."""
        plain = sum(plain_seconds(text, self.costs) for text in self.texts)
        return plain / self.seconds(candidate.drafters, candidate.length)

    def seconds(self, drafters: Sequence[str], length: int | None, slots: int = 1) -> float:
        """Seconds that all texts take, so many at a time. Several at a time are written again and again, so that a batch stays
        full."""
        planner = auto(self.costs, DEEPEST) if length is None else fixed(self.costs, length)
        machine = Machine(self.costs, planner, drafters, lookup_names(drafters), slots=slots)
        machine.write(self.texts * (1 if slots == 1 else -(-4 * slots // len(self.texts))))
        return machine.seconds

    def best_lengths(self, drafters: Sequence[str], sizes: Sequence[int] = BATCH_SIZES) -> dict[int, int]:
        """The fastest fixed length of one drafter for each batch size, 0 where plain decoding is the fastest."""
        best = dict[int, int]()
        for size in sizes:
            taken = {k: self.seconds(drafters if k else (), k, size) for k in (0, *(n for n in LENGTHS if n <= 8))}
            best[size] = min(taken, key=taken.__getitem__)
        return best


def _only_looks_up(method: Candidate) -> bool:
    return len(lookup_names(method.drafters)) == len(method.drafters)
