"""`outrider tune`, of a model here and, with `--engine`, of another engine's server. Imports nothing large until it runs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.bench import Prompts, WorkloadOptions
from outrider.cli.options import (
    CODE,
    DRAFT_MODEL,
    MODEL,
    Debug,
    Options,
    PrecisionOptions,
    option,
    own_draft,
    setting,
)
from outrider.cli.terminal import (
    DIM,
    GREEN,
    RED,
    YELLOW,
    check_folders,
    console,
    loading,
    plain,
    readable,
    say,
    table,
    warn,
)

if TYPE_CHECKING:
    from outrider.core.intervals import Interval
    from outrider.drafters.method import TuneInputs
    from outrider.lab.bench.prompts import Prompt
    from outrider.lab.tune.engine import EngineSearch, EngineTrial
    from outrider.lab.tune.race import Candidate
    from outrider.lab.tune.search import Search


EQUAL = 0.03
"""A drift that matters: plain decoding at the end over plain decoding at the beginning."""


class EngineOptions(Options):
    """The engine whose server is tuned in place of a model in this process."""

    engine: str | None = setting(
        None, "Engine", "Tune the server of vllm, sglang, llama.cpp or trt-llm: it is started for each candidate."
    )
    command: str | None = setting(
        None,
        "Engine",
        "The command that starts the server. Port and speculative options are added, or replace {port} and {options}.",
    )
    concurrency: int = setting(1, "Engine", "Prompts to send at the same time.", "--concurrency", "-c", ge=1)
    logs: Path | None = setting(
        None, "Engine", "The folder for the servers' logs. Default: a new temporary one.", metavar="FOLDER"
    )
    ready_timeout: float = setting(600.0, "Engine", "Seconds that a server has to start.", ge=1)

    def check(self) -> bool:
        """Whether an engine's server is tuned. Raises ValueError for options that lack another."""
        if self.engine is None:
            if self.command is not None:
                raise ValueError("--command starts the server of an engine; name the engine: --engine vllm")
            if self.concurrency > 1:
                raise ValueError("--concurrency is for the server of an engine; add --engine and --command")
            return False
        if self.command is None:
            raise ValueError(
                f"--engine {self.engine} needs the command that starts its server: --command 'vllm serve MODEL --dtype float32'"
            )
        return True


def tune_engine(
    options: EngineOptions,
    prompts: list[Prompt],
    configs: list[tuple[str, dict[str, Any]]],
    sampling: dict[str, Any],
    *,
    model: str | None,
    seconds: float,
    out: Path,
    json_file: Path | None = None,
) -> int:
    """Measure, show, and write the answer. Returns the exit code."""
    from outrider.lab.tune.engine import EngineSearch

    assert options.engine is not None
    assert options.command is not None
    logs = Path(tempfile.mkdtemp(prefix="outrider-tune-")) if options.logs is None else options.logs.absolute()
    if logs.exists() and not logs.is_dir():
        raise ValueError(f"--logs {logs} is a file; name a folder")
    logs.mkdir(parents=True, exist_ok=True)
    search = EngineSearch(
        options.engine,
        options.command,
        prompts,
        configs,
        sampling,
        logs=logs,
        model=model,
        concurrency=options.concurrency,
        seconds=seconds,
        ready=options.ready_timeout,
        api_key=os.environ.get("OUTRIDER_API_KEY") or os.environ.get("OPENAI_API_KEY"),
    )
    interrupted = False
    before = signal.signal(signal.SIGTERM, _interrupt)  # so that the server is stopped too
    try:
        for line in search.run():
            warn(line, DIM)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGTERM, before)
    for note in search.notes:
        warn(f"note: {note}")
    if not search.plain.answered:
        why = search.plain.dropped or "it was interrupted"
        warn(f"error: plain decoding could not be measured: {why}", RED)
        return 130 if interrupted else 1
    show_trials(search)
    answer = search.answer
    words = " ".join([options.command, shlex.join(answer.options)]).strip()
    name, complete = search.model or f"a server of {search.engine}", not interrupted
    use = f"There it is: {words}"
    keep(answer, use, out, json_file, name, prompts, search.trials, sampling, complete, search.concurrency)
    say(f"The logs are in {logs}.")
    if interrupted:
        warn("interrupted: this is known so far", RED)
    return 130 if interrupted else 0


def keep(answer: Candidate, use: str, out: Path, json_file: Path | None, *measured: Any) -> None:
    """Write the setting, and with --json all answers. use: what to do with the setting. measured: the arguments of `as_run`."""
    out.write_text(json.dumps(answer.config, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {out}. {use}")
    if json_file is None:
        return
    from outrider.lab.tune.race import as_run

    as_run(*measured).save(json_file)
    which = "" if answer.config["method"] == "none" else f" --setting {shlex.quote(answer.name)}"
    say(
        f"All answers are in {json_file}: outrider report {json_file}, or outrider plan ... --acceptance {json_file}{which}"
    )


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def show_trials(search: EngineSearch) -> None:
    """Print the table, and the answer in a sentence."""
    heads = "<setting", "start\ns", "tokens/s", "over plain\n(95 %)", "accepted\nof drafted", "equal\ntexts"
    shown = table(f"Settings of {search.engine}", *heads)
    for trial in sorted(search.trials, key=lambda t: -t.speed):
        shown.add_row(trial.name, *_cells(search, trial))
    console().print(shown)
    for trial in search.trials:
        if trial.dropped:
            say(f"{trial.name}: {trial.dropped}")
    say(verdict(search), GREEN if search.answer is not search.plain else YELLOW)
    if abs(search.drift - 1) > EQUAL:
        say(
            f"The machine drifted: plain decoding was {search.drift:.2f} times as fast at the end. Smaller gains than that "
            "are not certain.",
            YELLOW,
        )
    if search.sampling.get("temperature") == 0:
        different = [t.name for t in search.trials if (both := search.same_texts(t))[0] < both[1]]
        if different:
            say(
                f"Greedy texts differ from plain decoding: {', '.join(different)}. With 16 bit weights near ties decide "
                "differently; if a text is wrong, do not use the setting.",
                YELLOW,
            )
        else:
            say("Every greedy text equals that of plain decoding.")


def _cells(search: EngineSearch, trial: EngineTrial) -> list[str]:
    if not trial.answered:
        return ["", "", "", "", ""]
    gain = None if trial is search.plain else trial.gain(search.plain)
    same, compared = search.same_texts(trial)
    return [
        f"{trial.start:.0f}",
        f"{trial.speed:.0f}",
        _cell(gain),
        f"{trial.accepted} of {trial.drafted}" if trial.drafted else "",
        "" if trial is search.plain else f"{same} of {compared}",
    ]


def _cell(gain: Interval | None) -> str:
    return "" if gain is None else f"{gain.value:.2f} x ({gain.low:.2f}-{gain.high:.2f})"


def _said(gain: Interval) -> str:
    return f"{gain.value:.2f} times plain decoding (95 %: {gain.low:.2f} to {gain.high:.2f})"


def verdict(search: EngineSearch) -> str:
    """Which setting is the best there, and whether speculation helps at all."""
    best, answer = search.best, search.answer
    if best is None:
        return f"No setting could be measured in {search.engine} beside plain decoding, so this says nothing about speculation."
    gain = best.gain(search.plain)
    said = "" if gain is None else _said(gain)
    if answer is best:
        return f"Speculation helps in {search.engine} here. The best setting is {best.name}: {said}."
    if gain is not None and gain.value > 1:
        return f"Whether speculation helps in {search.engine} is not certain: {best.name} is {said}. More prompts decide it."
    return f"Speculation does not help in {search.engine} here: the best setting, {best.name}, is {said}."


class CandidateOptions(Options):
    """What the search may try."""

    model: str = setting(CODE, "Model", MODEL, "--model", "-m")
    draft_model: str | None = DRAFT_MODEL
    method: list[str] | None = setting(
        None, "What", "A drafting method to try. May be repeated. Default: all that are possible."
    )
    layers: Path | None = setting(
        None, "What", "A file of outrider layers: the model drafts with some of its own layers.", metavar="FILE"
    )
    verifier: list[str] | None = setting(
        None, "What", "A verifier to allow. May be repeated. Default: match, which keeps every text as it is."
    )


def tune(
    *,
    prompts: Prompts = "code",
    what: CandidateOptions,
    workload: WorkloadOptions,
    seconds: Annotated[
        float, option("How", "Measure at most so long. The recording and starts of servers are not included.", min=1)
    ] = 120.0,
    engine: EngineOptions,
    precision: PrecisionOptions,
    out: Annotated[Path, option("Output", "The file for the setting.", metavar="FILE")] = Path(
        "speculative_config.json"
    ),
    json_file: Annotated[
        Path | None,
        option(
            "Output",
            "A file for all answers, as of outrider bench --json: for outrider report, and outrider plan --acceptance.",
            "--json",
            metavar="FILE",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Find the fastest speculative setting for your prompts, or that plain decoding is the fastest.

    Records once what every drafter would propose, and replays all settings at the costs of this machine. Then measures the best
    two and "auto" in turns, until one is clearly ahead. Ctrl-C stops and reports what is known so far.
    """
    with readable(debug):
        check_folders(out, json_file)
        if workload.max_tokens < 2:
            raise ValueError("one token an answer leaves nothing to draft; use --max-tokens 2 or more")
        served, model = engine.check(), what.model
        if served and (what.layers is not None or what.verifier):
            raise ValueError("--layers and --verifier are for a model in this process; leave them out with --engine")
        with loading("the prompts" if served else model):
            from outrider.drafters.method import TuneInputs
            from outrider.lab.bench.prompts import read

            read_prompts, notes = read(prompts, workload.num_prompts)
            if served:
                target, methods = None, candidates(TuneInputs("", what.draft_model), what.method, engine.engine)
            else:
                from outrider.models.load import load

                target = load(model, **dict(precision))
                draft, layers = what.draft_model or own_draft(target.name), str(what.layers) if what.layers else None
                predictions = any(prompt.prediction for prompt in read_prompts)
                inputs = TuneInputs(target.weights, draft, layers, predictions, target.has_mtp)
                methods = candidates(inputs, what.method)
        for note in notes:
            warn(f"note: {note}")
        sampling = workload.sampling()
        if target is None:
            name = None if model == CODE else model
            files = {"out": out, "json_file": json_file}
            code = tune_engine(engine, read_prompts, methods, sampling, model=name, seconds=seconds, **files)
            raise typer.Exit(code)
        from outrider.lab.tune.race import Racer
        from outrider.lab.tune.search import Search

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
        if not search.plain.samples:
            raise typer.Exit(130)
        answer = show(search)
        if interrupted:
            warn("interrupted: this is known so far", RED)
        use = f"Use it: outrider generate ... -m {model} --speculative-config {out}"
        keep(answer, use, out, json_file, target.name, read_prompts, search.candidates, sampling, not interrupted)
        print()
        show_exports(search, out, {} if interrupted else None)
        raise typer.Exit(130 if interrupted else 0)


def candidates(
    inputs: TuneInputs, wanted: list[str] | None, engine: str | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """Names and configurations to try. Raises ValueError for a method that is unknown, that lacks an input, or that the engine
    cannot run.

    wanted: methods that the user named, None for all. engine: whose server is tuned; None for a model in this process.
    """
    from outrider.drafters.config import SpeculativeConfig
    from outrider.drafters.method import METHODS, find
    from outrider.integrations.engines import exports

    out = list[tuple[str, dict[str, Any]]]()
    for name in wanted or METHODS:
        if wanted:
            SpeculativeConfig.of({"method": name, **({"model": inputs.draft} if inputs.draft else {})})
        some = find(name).tune_candidates(inputs)
        if wanted and not some:
            raise ValueError(f"--method {name} is nothing to tune here: {find(name).tune_hint}")
        for candidate, config in some.items():
            if engine is not None:
                [command] = exports(config, engines=[engine])
                if wanted and not command.supported:
                    raise ValueError(
                        f"--method {name}: {command.notes[0]}; outrider export shows what {engine} can run"
                    )
                if not command.supported:
                    continue
                config = {**config, "controller": "fixed"}
            out.append((candidate, config))
    return out


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


def show(search: Search) -> Candidate:
    """Print the table, and the answer in a sentence. Returns the answer."""
    from outrider.lab.bench import stats

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
            _cell(gain),
            candidate.dropped,
        )
    console().print(shown)
    for name, problem in search.forecasts.problems.items():
        say(f"{name}: {problem}")
    if said := search.drafts_with_a_model():
        print(said)
    answer = search.answer
    gain = search.gain(answer)
    if answer is search.plain:
        say(f"Plain decoding is the fastest here: {why_plain(search)}.", YELLOW)
    elif gain is not None:
        said = f"{answer.name}: {_said(gain)}."
        if gain.low <= 1:
            said += " More prompts would make it certain. It stops where draft tokens do not pay."
        say(said, GREEN)
    return answer


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


def show_exports(search: Search, out: Path, depths: dict[int, int] | None) -> None:
    """Print the same setting for other engines. depths: best chain by batch size, None to predict it now."""
    from outrider.cli.export import show_commands
    from outrider.integrations.engines import exports

    if depths is None:
        with loading("the settings of other engines"):
            depths = search.best_depths()
    setting, given = search.exported, str(out)
    if setting is search.answer:
        print("The same setting in other engines")
    else:
        print(f"Other engines do not choose among drafters. The best single setting for them is {setting.name}")
        given = shlex.quote(json.dumps(setting.config))
    show_commands(exports(setting.config, depths, model=search.racer.target.name))
    lengths = f" --lengths {','.join(f'{n}:{k}' for n, k in sorted(depths.items()))}" if depths else ""
    say(f"Files for one of them: outrider export {given} --to ENGINE -m MODEL{lengths} -o FOLDER")
