"""`outrider tune`. Imports nothing heavy until it runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import WIDE, Debug, option, own_draft
from outrider.cli.terminal import DIM, GREEN, RED, YELLOW, console, loading, paint, plain, readable

if TYPE_CHECKING:
    from outrider.bench.tune.search import Arm, Search
    from outrider.models.load import Loaded


def tune(
    prompts: Annotated[
        str, typer.Argument(metavar="PROMPTS", help="A .jsonl or .txt file of prompts, or a set: code, chat.")
    ] = "code",
    model: Annotated[str, option("What", "A folder, a hub name or a built-in model.", "--model", "-m")] = WIDE,
    draft_model: Annotated[
        str | None, option("What", "A small model that may guess; builtin:code brings its own.", "--draft-model", "-d")
    ] = None,
    method: Annotated[
        list[str] | None, option("What", "Who may guess; may be repeated. All that is possible if not given.")
    ] = None,
    layers: Annotated[
        Path | None, option("What", "A file of outrider layers: the model's own layers may guess.", metavar="FILE")
    ] = None,
    verifier: Annotated[
        list[str] | None,
        option("What", "A rule that is allowed; may be repeated. match alone if not given: no text changes."),
    ] = None,
    num_prompts: Annotated[int | None, option("How", "The first so many prompts only.", min=1)] = None,
    max_tokens: Annotated[int, option("How", "Tokens of an answer at most.", "--max-tokens", "-n", min=2)] = 64,
    temperature: Annotated[float, option("How", "0 is greedy.", "--temperature", "-t")] = 0.0,
    seed: Annotated[int, option("How", "Of the first repeat; the others count on.")] = 0,
    ignore_eos: Annotated[bool, option("How", "Write on after the end token.", "--ignore-eos")] = False,
    seconds: Annotated[float, option("How", "To measure for at most, when all is predicted.", min=1)] = 120.0,
    dtype: Annotated[str, option("Model", "auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    quantization: Annotated[str | None, option("Model", "int8 or int4 weights, on the CPU.")] = None,
    out: Annotated[Path, option("Output", "Where the setting is written.", metavar="FILE")] = Path(
        "speculative_config.json"
    ),
    debug: Debug = False,
) -> None:
    """Find the fastest way to speculate on your prompts, or that there is none.

    Predicts every drafter, length and tree from a few answers and this machine's costs, measures those that could win, in
    turns, and stops when one is ahead for sure. Ctrl-C tells what is known so far.
    """
    with readable(debug):
        if not out.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {out.absolute().parent} to write {out.name} to")
        sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        if ignore_eos:
            sampling["ignore_eos"] = True
        with loading(model):
            from outrider.bench.prompts import read
            from outrider.bench.tune.search import Search
            from outrider.models.load import load

            asks, notes = read(prompts, num_prompts)
            target = load(model, dtype=dtype, quantization=quantization)
        for note in notes:
            print(paint(f"note: {note}", YELLOW, sys.stderr), file=sys.stderr)
        expects = any(ask.prediction for ask in asks)
        methods = candidates(target, draft_model, method, str(layers) if layers else None, expects)
        search = Search(target, asks, methods, sampling, verifiers=verifier or ["match"], seconds=seconds)
        interrupted = False
        try:
            _run(search)
        except KeyboardInterrupt:
            interrupted = True
        if not search.plain.samples:
            raise typer.Exit(130)
        answer = show(search)
        if interrupted:
            print(paint("interrupted: this is what is known so far", RED, sys.stderr), file=sys.stderr)
        out.write_text(json.dumps(answer.config, indent=1) + "\n", encoding="utf-8")
        print(f"Written to {out}. Use it: outrider generate ... -m {model} --speculative-config {out}\n")
        elsewhere(search, {} if interrupted else None)
        raise typer.Exit(130 if interrupted else 0)


def candidates(
    target: Loaded, draft: str | None, wanted: list[str] | None, layers: str | None, expects: bool
) -> list[tuple[str, dict[str, Any]]]:
    """Names and configurations to try. Raises ValueError for a method that is unknown or that lacks an input.

    draft: name of a draft model. wanted: methods that the user named, None for all. layers: a file of `outrider layers`.
    expects: whether a prompt brings a prediction.
    """
    from outrider.config import SpeculativeConfig
    from outrider.drafters.registry import METHODS, TuneInputs, find

    inputs = TuneInputs(target.weights, draft or own_draft(target.name), layers, expects)
    if wanted is None:
        return [pair for method in METHODS.values() for pair in method.tune_candidates(inputs).items()]
    out = list[tuple[str, dict[str, Any]]]()
    for name in wanted:
        SpeculativeConfig.of({"method": name, **({"model": inputs.draft} if inputs.draft else {})})
        some = find(name).tune_candidates(inputs)
        if not some:
            raise ValueError(f"--method {name} is nothing to tune here: {find(name).tune_hint}")
        out += some.items()
    return out


def _run(search: Search) -> None:
    """Search, showing what is done: a line that changes on a terminal, lines elsewhere."""
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


def show(search: Search) -> Arm:
    """The table, and the answer in a sentence. Returns the answer."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from outrider.bench import stats

    table = Table(title="Settings on these prompts", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("setting", no_wrap=True)
    for head in ("expected\ntokens/s", "measured\ntokens/s", "over plain\n(95 %)"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    best = {id(m.best) for m in search.methods}
    shown = [a for a in search.arms if a.samples or id(a) in best]
    order = sorted(shown, key=lambda a: (-len(a.samples), -(a.predicted or 0.0)))
    for arm in order:
        speed = stats.rate(arm.samples) if arm.samples else None
        over = stats.ratio(arm.samples, search.plain.samples) if arm.samples and arm is not search.plain else None
        told = "" if over is None else f"{over.value:.2f} x ({over.low:.2f}-{over.high:.2f})"
        table.add_row(
            arm.name,
            "" if arm.predicted is None else f"{arm.predicted:.0f}",
            "" if speed is None else f"{speed.value:.0f}",
            told,
            arm.out,
        )
    console().print(table)
    for method in search.methods:
        if method.problem:
            print(paint(f"{method.name}: {method.problem}", DIM))
    answer = search.chosen
    gain = search.over_plain(answer)
    if answer is search.plain:
        print(paint(f"Plain decoding is best here, because {because(search)}.", YELLOW))
    elif gain is not None:
        said = f"{answer.name}: {gain.value:.2f} times plain decoding (95 %: {gain.low:.2f} to {gain.high:.2f})."
        if gain.low <= 1:
            said += " More prompts would make it certain; its controller stops where guesses do not pay."
        print(paint(said, GREEN))
    return answer


def because(search: Search) -> str:
    """Why nothing that was looked at beats plain decoding."""
    from outrider.bench import stats
    from outrider.bench.tune.search import HOPELESS

    tried = [a for a in search.arms if a.samples and a is not search.plain]
    if tried:
        found = [(a, stats.ratio(a.samples, search.plain.samples)) for a in tried]
        best, gain = max(found, key=lambda pair: pair[1].value if pair[1] else 0.0)
        if gain is not None:
            return (
                f"the best of {len(tried)} measured settings, {best.name}, is {gain.value:.2f} x as fast (95 %: "
                f"{gain.low:.2f} to {gain.high:.2f}), which is not more for sure"
            )
    looked = [m.best for m in search.methods if m.best is not None]
    if not looked:
        hopeless = [m.name for m in search.methods if m.problem == HOPELESS.format("plain decoding")]
        if hopeless:
            return f"guesses of {', '.join(hopeless)} would make it slower even if all were right"
        return "nobody can guess for this model here" if search.complete else "nothing else was looked at yet"
    best = max(looked, key=lambda a: a.predicted or 0.0)
    so_far = (
        "even the most hopeful setting"
        if search.complete
        else "nothing else was measured yet; the most hopeful setting"
    )
    return f"{so_far}, {best.name}, is expected to write {best.predicted:.0f} tokens/s"


def elsewhere(search: Search, lengths: dict[int, int] | None) -> None:
    """The same for other engines. lengths: by texts side by side, None to find them now."""
    from outrider.integrations.engines import exports

    if lengths is None:
        with loading("what other engines are told"):
            lengths = search.lengths()
    print("The same elsewhere")
    for export in exports(search.chosen.config, lengths):
        print(f"  {export.engine}: {export.command or '-'}")
        for note in export.notes:
            print(paint(f"    not there, or other: {note}", DIM))
