"""Backend in this process: one target, loaded once, with a drafter and a controller for each setting."""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from outrider.core.origins import letters
from outrider.core.params import SamplingParams
from outrider.core.types import Step
from outrider.engine.llm import LLM
from outrider.engine.request import Request, Sequence
from outrider_lab.bench.prompts import Prompt
from outrider_lab.bench.run import Arrivals, Sample, Setting


class Local:
    """Models of this process."""

    def __init__(self, llms: Mapping[str, LLM], sampling: Mapping[str, Any]) -> None:
        self.llms = dict(llms)  # by the name of the setting
        self.sampling = dict(sampling)  # fields of `SamplingParams`

    @classmethod
    def load(
        cls, settings: abc.Sequence[Setting], model: str, sampling: Mapping[str, Any], slots: int, **options: Any
    ) -> Local:
        """An LLM for each setting; all share the weights of the first. Fills in each setting's `guarantee`.

        Args:
            slots: Prompts that are answered at the same time.
            options: For `LLM`.

        Raises what LLM raises.
        """
        llms, source = dict[str, LLM](), model
        for setting in settings:
            llm = LLM(source, speculative_config=setting.speculative_config, max_num_seqs=slots, **options)
            llms[setting.name], source = llm, llm.loaded
            setting.guarantee = llm.decoder.guarantee.value
        return cls(llms, sampling)

    @property
    def notes(self) -> list[str]:
        """What `LLM.notes` says, by setting."""
        return [f"{name}: {note}" for name, llm in self.llms.items() for note in llm.notes]

    def num_tokens(self, prompt: Prompt) -> int:
        """The length of a prompt. Raises ValueError for a prompt that does not fit."""
        llm = next(iter(self.llms.values()))
        try:
            request = request_of(llm, self.sampling, prompt, 0)
            llm.decoder.check(request)
            return len(request.prompt)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id}: {error}") from None

    def warm(self, setting: Setting, prompts: abc.Sequence[Prompt]) -> None:
        for sample in self.answer(setting, prompts, 0, 0):
            if sample.error:
                raise RuntimeError(f"{setting.name} gives no answer: {sample.error}")

    def reset(self) -> None:
        for llm in self.llms.values():
            llm.decoder.drafter.reset()

    def answer(self, setting: Setting, prompts: abc.Sequence[Prompt], repeat: int, turn: int) -> list[Sample]:
        llm = self.llms[setting.name]
        requests = [request_of(llm, self.sampling, p, repeat) for p in prompts]
        recorders = {
            r.id: SampleRecorder(prompt=p.id, setting=setting.name, repeat=repeat, turn=turn, seed=r.seed)
            for p, r in zip(prompts, requests, strict=True)
        }
        start, failed = perf_counter(), None
        try:
            for step, rows in llm.scheduler.run(llm.scheduler.add(requests)):
                now = perf_counter() - start
                for b, row in enumerate(rows):
                    assert step is not None
                    recorders[row.id].add(step, b, row, now)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        return [recorders[r.id].sample(failed) for r in requests]


def request_of(llm: LLM, sampling: Mapping[str, Any], prompt: Prompt, repeat: int) -> Request:
    """A request for a prompt: with the parameters of the measurement, and the prompt's own. Repeat r adds r to the seed."""
    of_prompt = {name: value for name in ("max_tokens", "temperature") if (value := getattr(prompt, name)) is not None}
    of_prompt |= {"seed": sampling["seed"] + repeat, "prediction": prompt.prediction}
    [request] = llm.requests(llm.encode(prompt.content), SamplingParams(**{**sampling, **of_prompt}))
    return request


class SampleRecorder:
    """Collects what a sample says, step by step. about: the fields that are known before: prompt, setting, repeat, turn, seed."""

    def __init__(self, **about: Any) -> None:
        self._about, self._came = about, Arrivals()
        self._row: Sequence | None = None
        self._origins = ""
        self._phases = dict[str, float]()

    def add(self, step: Step, b: int, row: Sequence, now: float) -> None:
        """b: index of the sequence in the step. now: seconds since the request."""
        self._row = row
        self._came.add(now, len(step.commits[b].tokens))
        self._origins += origins(step, b)
        for name, seconds in step.seconds.items():
            self._phases[name] = self._phases.get(name, 0.0) + seconds

    def sample(self, error: str | None = None) -> Sample:
        """What was collected. error: why there is no answer."""
        fields = {**self._about, **vars(self._came), "phases": self._phases, "origins": self._origins, "error": error}
        row = self._row
        if row is None:
            return Sample(**fields)
        fields |= {"drafted": list(row.counts.drafted), "accepted": list(row.counts.accepted)}
        if row.finish is None:
            return Sample(**fields)
        fields["phases"] = {**self._phases, "rest": max(0.0, self._came.seconds - sum(self._phases.values()))}
        if row.checker.marks:
            borders = [0, *(min(mark, len(row.text)) for mark in row.checker.marks)]
            borders[-1] = len(row.text)
            fields["pieces"] = [row.text[a:b] for a, b in itertools.pairwise(borders)]
        if row.finish.finish == "error":
            fields["error"] = str(row.finish.reason)
        return Sample(
            **fields,
            prompt_tokens=len(row.prompt),
            output_tokens=len(row.output),
            token_ids=row.output,
            text=row.text,
            finish_reason=row.finish.finish,
        )


def origins(step: Step, b: int) -> str:
    """A letter for each token that a sequence committed in a step, see `outrider.core.origins`; empty for none."""
    commit = step.commits[b]
    if not commit.tokens:
        return ""
    # A child of the last accepted node was rejected.
    rejected = bool((step.draft.parents[b] == commit.nodes[-1]).any())
    return letters(len(step.draft.host[b]) - 1, commit.num_accepted, rejected, len(commit.tokens))
