"""Makes the built-in run: `python -m outrider.explain.record -m MODEL -d DRAFT`.

It is a real run, computed again step by step. Costs are measured in the same go, so nothing else should run.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from outrider.calibrate import WHOLE, costs_of, measure
from outrider.explain.data import ExplainedRun, curve
from outrider.explain.facts import explained, rooflines, with_model
from outrider.explain.page import BUILTIN
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.trace import Detail, Recorder, Trace, read

PROMPT = 'def slugify(title):\n    """Turn a title into a part of a URL."""\n'
SHAPE = {"num_speculative_tokens": 4, "tree_width": 2, "tree_nodes": 6, "controller": "fixed"}


def record(model: str, draft: str, prompt: str, sampling: SamplingParams) -> tuple[ExplainedRun, LLM]:
    """A run of a pair with all its probabilities and the time of plain steps, and the models that made it."""
    llm, trace = _run(model, prompt, sampling, {"model": draft, **SHAPE})
    run = with_model(explained(trace, llm.tokenizer), trace, llm)
    _, plain = _run(model, prompt, sampling, None)
    return replace(run, plain_seconds=median(sum(step.seconds) for step in plain.steps)), llm


def _run(model: str, prompt: str, sampling: SamplingParams, config: dict[str, object] | None) -> tuple[LLM, Trace]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        llm = LLM(model, speculative_config=config, max_num_seqs=1, trace=Recorder(file, Detail.TOKENS))
        llm.generate(prompt, sampling)
        return llm, read(file)


def main(
    model: Annotated[str, typer.Option("--model", "-m")],
    draft: Annotated[str, typer.Option("--draft-model", "-d")],
    name: Annotated[str, typer.Option(help="What the page calls the target.")],
    draft_name: Annotated[str, typer.Option(help="What the page calls the draft model.")],
    prompt: str = PROMPT,
    temperature: float = 1.0,
    seed: int = 3,
    max_tokens: int = 56,
    out: Path = BUILTIN,
) -> None:
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    run, llm = record(model, draft, prompt, sampling)
    costs = measure(llm.decoder.target, llm.drafters, costs_of(llm.config, llm.loaded), WHOLE)
    machine = f"{run.machine['cores']} CPU cores, measured with the built-in run"
    run = replace(
        run,
        builtin=True,
        title="The built-in run",
        model=name,
        drafter=draft_name,
        speculative_config={**run.speculative_config, "model": draft_name},
        size=None if run.size is None else replace(run.size, name=name),
        costs=[curve(costs, f"{name} with {draft_name}", machine), *rooflines()],
    )
    out.write_text(run.to_json() + "\n", encoding="ascii")
    print(f"{out}: {len(run.requests[0].steps)} steps, {out.stat().st_size} bytes")


if __name__ == "__main__":
    typer.run(main)
