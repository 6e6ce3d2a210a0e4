"""Makes the built-in runs: `python docs/builtin_run.py -m MODEL -d DRAFT --bad-model OTHER`.

They are real runs of one sentence, computed again step by step: a good draft at temperature 0, the same with noise, and a bad
draft. Costs are measured in the same go, so nothing else should run.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from outrider.core.params import SamplingParams
from outrider.engine.calibrate import WHOLE, costs_of, measure
from outrider.engine.llm import LLM
from outrider.engine.trace import Detail, Recorder
from outrider_lab.explain import explained, rooflines, with_model
from outrider_lab.pages.explained import BUILTIN, ExplainedRun, curve
from outrider_lab.traces import read

PROMPT = "The seven days of the week are"
CHAIN = {"num_speculative_tokens": 3, "controller": "fixed"}
TREE = {"num_speculative_tokens": 4, "tree_width": 2, "tree_nodes": 6, "controller": "fixed"}
REPEATS = 3  # of each run; the quickest one counts


def record(llm: LLM, file: Path, sampling: SamplingParams, repeats: int = REPEATS) -> ExplainedRun:
    """The quickest of some runs with all its probabilities. llm: writes its trace to `file`."""
    for _ in range(repeats):
        llm.generate(PROMPT, sampling)
    trace = read(file)
    run = explained(trace, llm.tokenizer)
    quickest = min(run.requests, key=lambda request: sum(sum(step.seconds) for step in request.steps))
    return with_model(replace(run, requests=[quickest]), trace, llm)


def _llm(model: Any, file: Path, config: dict[str, object] | None, calibrate: bool = False) -> LLM:
    return LLM(
        model,
        speculative_config=config,
        max_num_seqs=1,
        trace=Recorder(file, Detail.TOKENS),
        calibrate=calibrate,
    )


def _lengths(run: ExplainedRun) -> str:
    steps = run.requests[0].steps
    none, tokens = sum(not step.drafted for step in steps), sum(step.drafted for step in steps)
    return f"{none} of {len(steps)} steps had no draft, and the others {tokens / max(len(steps) - none, 1):.1f} tokens"


def main(
    model: Annotated[str, typer.Option("--model", "-m")],
    draft: Annotated[str, typer.Option("--draft-model", "-d")],
    name: Annotated[str, typer.Option(help="What the page calls the target.")],
    draft_name: Annotated[str, typer.Option(help="What the page calls the draft model.")],
    bad_model: str = "builtin:code-draft",
    bad_name: str = "a small model that has read Python only",
    temperature: float = 0.8,
    seed: int = 1,
    max_tokens: int = 45,
    out: Path = BUILTIN,
) -> None:
    greedy = SamplingParams(temperature=0, seed=seed, max_tokens=max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{n}.jsonl" for n in range(4)]
        llm = _llm(model, files[0], {"model": draft, **CHAIN})
        run = record(llm, files[0], greedy)
        tree = _llm(llm.loaded, files[3], {"model": draft, **TREE})
        noisy = record(tree, files[3], replace(greedy, temperature=temperature))
        costs = measure(llm.decoder.target, llm.drafters, costs_of(llm.config, llm.loaded), WHOLE)
        # Once: the next request begins with what the planner has learnt.
        bad = record(_llm(llm.loaded, files[1], {"model": bad_model}, calibrate=True), files[1], greedy, 1)
        plain = record(_llm(llm.loaded, files[2], None), files[2], greedy)
    about = [
        ("A sentence", f"Temperature 0: the likeliest token is written. {draft_name} drafts."),
        (
            "With noise",
            f"Temperature {temperature}: noise lets other tokens win. {draft_name} drafts trees with the same noise.",
        ),
        (
            "A bad draft",
            f"The first sentence again, but {bad_name} drafts. The planner tries, sees that it does not pay, and stops: "
            f"{_lengths(bad)}. The tries cost time; the text is the same.",
        ),
    ]
    requests = [
        replace(one.requests[0], id=n, title=title, about=words)
        for n, (one, (title, words)) in enumerate(zip((run, noisy, bad), about, strict=True))
    ]
    machine = f"{run.machine['cores']} CPU cores, measured with the built-in run"
    run = replace(
        run,
        title="The built-in run",
        model=name,
        drafter=draft_name,
        requests=requests,
        texts=dict(sorted((run.texts | noisy.texts | bad.texts).items())),
        plain_seconds=median(sum(step.seconds) for step in plain.requests[0].steps),
        size=None if run.size is None else replace(run.size, name=name),
        costs=[curve(costs, f"{name} with {draft_name}", machine), *rooflines()],
        notes=[],
    )
    out.write_text(run.to_json() + "\n", encoding="ascii")
    print(f"{out}: {[len(request.steps) for request in run.requests]} steps, {out.stat().st_size} bytes")


if __name__ == "__main__":
    typer.run(main)
