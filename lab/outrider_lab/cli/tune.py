"""`outrider tune`. Imports nothing large until it runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import AfterValidator, Field

from outrider.cli.command import MODEL, as_command
from outrider.cli.options import CODE, canonical_names, own_draft
from outrider.cli.terminal import (
    GREEN,
    RED,
    YELLOW,
    check_folders,
    command,
    console,
    loading,
    plain,
    say,
    warn,
)
from outrider.core.files import write_whole
from outrider.serve.options import Options, PrecisionOptions, setting
from outrider_lab.cli.bench import Prompts, WorkloadOptions
from outrider_lab.cli.shared import DRAFT_MODEL, program, table

if TYPE_CHECKING:
    from outrider_lab.tune.search import Search


class CandidateOptions(Options):
    """What the search may try."""

    model: str = setting(CODE, "Model", MODEL)
    draft_model: str | None = DRAFT_MODEL
    method: Annotated[list[str] | None, AfterValidator(canonical_names)] = setting(
        None,
        "What",
        "A drafting method to try, or FILE.py:NAME, a drafter of your own. May be repeated. Default: all that are possible.",
    )
    layers: Path | None = setting(
        None, "What", "A file of outrider layers: the model drafts with some of its own layers.", metavar="FILE"
    )
    verifier: list[str] | None = setting(
        None, "What", "A verifier to allow. May be repeated. Default: match, which keeps every text as it is."
    )


@as_command(
    "Measure",
    "outrider tune",
    "outrider tune my-prompts.jsonl -m ./my-model -d ./my-small-model",
    "outrider tune code -m builtin:code --method suffix --method draft_model --seconds 30",
    usual="-m -d --method --seconds --num-prompts -n -t --out --export --json",
)
def tune(
    *,
    prompts: Prompts = "code",
    what: CandidateOptions,
    workload: WorkloadOptions,
    seconds: Annotated[float, Field(ge=1)] = 120.0,
    precision: PrecisionOptions,
    out: Path | None = None,
    export: bool = False,
    json_: Path | None = None,
) -> None:
    """Find the fastest speculative setting for your prompts, or that plain decoding is the fastest.

    Records once what every drafter would propose, and replays all settings at the costs of this machine. Then measures the best
    two and "auto" in turns, until one is clearly ahead. Ctrl-C stops and reports what is known so far.

    Args:
        seconds: Measure at most so long. The recording is not included.
        out (FILE): Also write the setting to a file.
        export: Also show the setting for vLLM, SGLang, llama.cpp and TensorRT-LLM.
        json_ (FILE): A file for all answers, as of outrider bench --json: for outrider bench --report.
    """
    check_folders(out, json_)
    if workload.max_tokens < 2:
        raise ValueError("one token an answer leaves nothing to draft; use --max-tokens 2 or more")
    with loading(what.model):
        from outrider.models.load import load
        from outrider_lab.bench.prompts import read
        from outrider_lab.tune.candidates import TuneInputs, candidates

        read_prompts, notes = read(prompts, workload.num_prompts)
        target = load(what.model, **dict(precision))
        draft, layers = what.draft_model or own_draft(target.name), str(what.layers) if what.layers else None
        predictions = any(prompt.prediction for prompt in read_prompts)
        inputs = TuneInputs(target.weights, draft, layers, predictions, target.has_mtp)
        methods = candidates(inputs, what.method)
    for note in notes:
        warn(f"note: {note}")
    sampling = workload.sampling()
    from outrider_lab.tune.race import Racer, as_run
    from outrider_lab.tune.search import Search

    racer = Racer(target, sampling)
    whole = {"method": "auto", **({"model": what.draft_model} if what.draft_model else {})}
    verifiers = what.verifier or ["match"]
    search = Search(
        racer, read_prompts, methods, whole=None if what.method else whole, verifiers=verifiers, seconds=seconds
    )
    interrupted = False
    try:
        _run(search)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted and not search.plain.samples:
        raise typer.Exit(130)
    if not search.plain.samples:
        problems = "".join(f" {name}: {problem}." for name, problem in search.forecasts.problems.items())
        raise ValueError(f"nothing was measured in {seconds:g} s; give more --seconds.{problems}")
    show_table(search)
    answer = search.answer
    show_exports(search, export, {} if interrupted else None)
    if json_ is not None:
        as_run(target.name, read_prompts, search.candidates, sampling, not interrupted).save(json_)
        say(f"All answers are in {json_}. To see them:")
        print("  " + command("outrider bench --report", shlex.quote(str(json_))))
    print()
    show_answer(search)
    if interrupted:
        warn("interrupted: this is known so far", RED)
    config = shlex.quote(json.dumps(answer.config))
    if out is not None:
        write_whole(out, json.dumps(answer.config, indent=1) + "\n")
        config = shlex.quote(str(out))
    print("Use it, also with run and serve:")
    words = f"-m {shlex.quote(what.model)}", f"--speculative-config {config}"
    print("  " + command(f"{program()} generate", "'def f(x):'", *words))
    raise typer.Exit(130 if interrupted else 0)


def _run(search: Search) -> None:
    """Search with progress: a line that changes on a terminal, lines elsewhere."""
    if plain(sys.stderr):
        for line in search.run():
            print(line, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    stage = Console(stderr=True)
    with stage.status("warming up") as status:
        for line in search.run():
            if "leads with" not in line:
                stage.print(f"[dim]{line}[/dim]", highlight=False)
            status.update(line)


def show_table(search: Search) -> None:
    """Print what was found of each setting."""
    from outrider_lab.bench import stats

    heads = "<setting", "replayed\nover plain", "measured\ntokens/s", "over plain\n(95 %)", "<"
    shown = table("Settings on these prompts", *heads)
    best = {c.drafters: c for c in reversed(search.candidates) if not c.samples}
    for candidate in sorted(search.candidates, key=lambda c: (-len(c.samples), -(c.predicted or 0.0))):
        if not candidate.samples and best.get(candidate.drafters) is not candidate:
            continue
        speed = stats.rate(candidate.samples) if candidate.samples else None
        gain = search.gain(candidate) if candidate.samples else None
        shown.add_row(
            candidate.name,
            "" if candidate.predicted is None else f"{candidate.predicted:.2f} x",
            "" if speed is None else f"{speed.value:.0f}",
            "" if gain is None else f"{gain.value:.2f} x ({gain.low:.2f}-{gain.high:.2f})",
            candidate.dropped,
        )
    console().print(shown)
    for name, problem in search.forecasts.problems.items():
        say(f"{name}: {problem}")


def show_answer(search: Search) -> None:
    """Print the answer in a sentence."""
    answer = search.answer
    gain = search.gain(answer)
    if answer is search.plain:
        say(f"Plain decoding is the fastest here: {why_plain(search)}.", YELLOW)
    elif gain is not None:
        said = f"{answer.name}: {gain.value:.2f} times plain decoding (95 %: {gain.low:.2f} to {gain.high:.2f})."
        if gain.low <= 1:
            said += " More prompts would make it certain. It stops where draft tokens do not pay."
        say(said, GREEN)


def why_plain(search: Search) -> str:
    """Why no candidate is faster than plain decoding."""
    measured = [c for c in search.candidates if c.samples and c is not search.plain]
    if measured:
        gains = [(c, search.gain(c)) for c in measured]
        best, gain = max(gains, key=lambda pair: pair[1].value if pair[1] else 0.0)
        if gain is not None:
            return (
                f"the best of {len(measured)} measured settings, {best.name}, is {gain.value:.2f} x as fast (95 %: "
                f"{gain.low:.2f} to {gain.high:.2f}), which is not clearly more"
            )
    replayed = [c for c in search.candidates if c is not search.plain]
    if not replayed:
        return "no method can draft for this model here" if search.complete else "nothing else was examined yet"
    best = max(replayed, key=lambda c: c.predicted or 0.0)
    return f"nothing else was measured yet. The best in the replay is {best.name}, {best.predicted:.2f} times plain decoding"


def show_exports(search: Search, whole: bool, depths: dict[int, int] | None) -> None:
    """Print how other engines get the best setting that they can express.

    Args:
        whole: Whether to print their own command lines, else only ours that makes them.
        depths: The best chain by batch size, None to predict it now.
    """
    from outrider_lab.cli.export import show_commands
    from outrider_lab.handover import exports

    setting, name = search.exported, search.racer.target.name
    same = "" if setting is search.answer else f": they do not choose among drafters, so they get {setting.name}"
    words = [shlex.quote(json.dumps(setting.config)), f"-m {shlex.quote(name)}"]
    say(f"For other engines{same}:")
    if whole:
        if depths is None:
            with loading("the settings of other engines"):
                depths = search.best_depths()
        show_commands(exports(setting.config, depths, model=name))
        words += [f"--lengths {','.join(f'{n}:{k}' for n, k in sorted(depths.items()))}"] if depths else []
        words += ["--to ENGINE", "-o FOLDER"]
    print("  " + command("outrider export", *words))
