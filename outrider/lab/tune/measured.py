"""What `outrider tune` measured, as a run of `outrider bench`: for `outrider report` and `outrider plan --acceptance`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.lab.bench.prompts import Prompt
from outrider.lab.bench.run import Run, Sample, Setting
from outrider.lab.bench.summary import summary
from outrider.lab.tune.engine import EngineSearch
from outrider.lab.tune.search import Search


def of_search(search: Search, sampling: dict[str, Any], complete: bool) -> Run:
    """The measured candidates of a model in this process."""
    found = {c.name: (None if c is search.plain else c.config, c.samples) for c in search.candidates if c.samples}
    return _run(search.racer.target.name, search.prompts, found, sampling, complete)


def of_engine(search: EngineSearch, sampling: dict[str, Any], complete: bool) -> Run:
    """The measured settings of another engine's server. It tells of draft tokens in sums, so they are in the summary."""
    found = {t.name: (None if t.depth == 0 else t.config, t.samples) for t in search.trials if t.answered}
    run = _run(search.model or f"a server of {search.engine}", search.prompts, found, sampling, complete)
    run.concurrency = search.concurrency
    for trial in search.trials:
        if trial.name in run.summary and trial.by_position:
            run.summary[trial.name] |= {
                "spec_decode_draft_tokens": trial.drafted,
                "spec_decode_accepted_tokens": trial.accepted,
                "spec_decode_per_position_acceptance_rates": trial.by_position,
            }
    return run


def _run(
    model: str,
    prompts: Sequence[Prompt],
    found: dict[str, tuple[dict[str, Any] | None, list[Sample]]],
    sampling: dict[str, Any],
    complete: bool,
) -> Run:
    """found: by setting, its configuration, None for plain decoding, and its answers."""
    samples = [sample for _, some in found.values() for sample in some]
    settings = [Setting(name=name, speculative_config=config) for name, (config, _) in found.items()]
    repeats = 1 + max(sample.repeat for sample in samples)
    run = Run.begun(model, settings, prompts, sampling, repeats=repeats, samples=samples, complete=complete)
    run.summary = summary(run)
    return run
