"""Settings measured in this process: one target, loaded once, with a drafter and a controller for each setting."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from outrider.bench.prompts import Ask
from outrider.bench.run import Sample, Setting
from outrider.core.origins import letters
from outrider.core.types import Step
from outrider.decode import Row
from outrider.drafters.base import Drafter
from outrider.llm import LLM, len_drafted
from outrider.params import SamplingParams


class Local:
    """Models of this process. `llms` by name of the setting; all share the weights of the first."""

    def __init__(
        self, settings: Sequence[Setting], model: str, sampling: dict[str, Any], rows: int, **options: Any
    ) -> None:
        """sampling: fields of `SamplingParams`. rows: prompts that are answered together. options: for `LLM`; settles each
        setting's `guarantee`. Raises what LLM raises."""
        self.sampling = sampling
        self.llms: dict[str, LLM] = {}
        source: Any = model
        for setting in settings:
            llm = LLM(source, speculative_config=setting.speculative_config, max_num_seqs=rows, **options)
            self.llms[setting.name], source = llm, llm.loaded
            setting.guarantee = llm.decoder.guarantee.value

    def tokens(self, ask: Ask) -> int:
        """The length of a prompt. Raises ValueError for one that cannot be answered."""
        llm = next(iter(self.llms.values()))
        try:
            return len(llm.requests(ask.prompt, self._params(ask, 0))[0].prompt)
        except ValueError as error:
            raise ValueError(f"prompt {ask.id}: {error}") from None

    def warm(self, setting: Setting, asks: Sequence[Ask]) -> None:
        for sample in self.answer(setting, asks, 0, 0):
            if sample.error:
                raise RuntimeError(f"{setting.name} gives no answer: {sample.error}")

    def forget(self) -> None:
        for llm in self.llms.values():
            forget(llm.drafter)

    def answer(self, setting: Setting, asks: Sequence[Ask], repeat: int, turn: int) -> list[Sample]:
        llm = self.llms[setting.name]
        requests = [llm.requests(ask.prompt, self._params(ask, repeat))[0] for ask in asks]
        records = {
            id(r): Record(Sample(prompt=a.id, setting=setting.name, repeat=repeat, turn=turn, seconds=0, seed=r.seed))
            for a, r in zip(asks, requests, strict=True)
        }
        start = perf_counter()
        try:
            for step, moved in llm.decoder.steps(requests):
                now = perf_counter() - start
                for b, row in enumerate(moved):
                    assert step is not None
                    records[id(row.request)].add(step, b, row, now)
        except Exception as error:
            for record in records.values():
                record.sample.error = f"{type(error).__name__}: {error}"
        return [records[id(r)].sample for r in requests]

    def _params(self, ask: Ask, repeat: int) -> SamplingParams:
        own = {"seed": self.sampling["seed"] + repeat, "prediction": ask.prediction}
        if ask.max_tokens is not None:
            own["max_tokens"] = ask.max_tokens
        return SamplingParams(**{**self.sampling, **own})


def forget(drafter: Drafter) -> None:
    """Let a drafter, and those it asks, forget the answers they have seen; what they cannot forget they are not asked to."""
    for part in getattr(drafter, "drafters", {}).values():
        forget(part)
    if hasattr(drafter, "forget"):
        drafter.forget()  # pyright: ignore[reportAttributeAccessIssue]


class Record:
    """A sample as it grows, step by step."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        sample.origins, sample.drafted, sample.accepted = "", [], []

    def add(self, step: Step, b: int, row: Row, now: float) -> None:
        """b: the row's place in the step. now: seconds since it was asked for."""
        sample, kept = self.sample, step.commits[b]
        assert sample.origins is not None
        assert sample.drafted is not None
        assert sample.accepted is not None
        if sample.ttft is None:
            sample.ttft = now
        else:
            sample.gaps.append((now - sample.seconds, len(kept.tokens)))
        sample.seconds = now
        drafted = len_drafted(step, b)
        sample.drafted.append(drafted)
        sample.accepted.append(kept.num_accepted)
        sample.origins += origins(step, b, drafted)
        for name, seconds in step.seconds.items():
            sample.phases[name] = sample.phases.get(name, 0.0) + seconds
        if row.end is not None:
            self._end(row)

    def _end(self, row: Row) -> None:
        sample, end, text = self.sample, row.end, row.ending.text
        assert end is not None
        sample.prompt_tokens, sample.output_tokens = len(row.request.prompt), len(row.output)
        sample.token_ids, sample.text, sample.finish_reason = row.output, text, end.finish
        sample.phases["rest"] = max(0.0, sample.seconds - sum(sample.phases.values()))
        if row.ending.marks:
            borders = [0, *(min(mark, len(text)) for mark in row.ending.marks)]
            borders[-1] = len(text)
            sample.pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
        if end.finish == "error":
            sample.error = str(end.reason)


def origins(step: Step, b: int, drafted: int) -> str:
    """A letter for every token that a row kept in a step, see `outrider.core.origins`. drafted: how many guesses it had."""
    kept = step.commits[b]
    if not kept.tokens:
        return ""  # a row without a law
    refused = bool((step.draft.parents[b] == kept.nodes[-1]).any())  # the last node kept had children
    return letters(drafted, kept.num_accepted, refused, len(kept.tokens))
