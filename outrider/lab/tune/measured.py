"""What `outrider tune` measured, as a run of `outrider bench`: for `outrider report` and `outrider plan --acceptance`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.lab.bench.prompts import Prompt
from outrider.lab.bench.run import Run, Setting
from outrider.lab.bench.summary import summary
from outrider.lab.tune.race import Candidate


def as_run(
    model: str,
    prompts: Sequence[Prompt],
    candidates: Sequence[Candidate],
    sampling: dict[str, Any],
    complete: bool,
    concurrency: int = 1,
) -> Run:
    """The candidates that were measured. An engine tells of draft tokens in sums, so these are in the summary only."""
    measured = [c for c in candidates if c.answered]
    configs = [None if c.config["method"] == "none" else c.config for c in measured]
    settings = [Setting(name=c.name, speculative_config=config) for c, config in zip(measured, configs, strict=True)]
    samples = [sample for c in measured for sample in c.samples]
    repeats = 1 + max(sample.repeat for sample in samples)
    more: dict[str, Any] = {"repeats": repeats, "concurrency": concurrency, "samples": samples, "complete": complete}
    run = Run.begun(model, settings, prompts, sampling, **more)
    run.summary = summary(run)
    for candidate in measured:
        run.summary[candidate.name] |= candidate.told
    return run
