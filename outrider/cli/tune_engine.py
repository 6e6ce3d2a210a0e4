"""`outrider tune --engine`: the best setting of another engine's server. Imports nothing large until it runs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.options import Options, setting
from outrider.cli.terminal import DIM, GREEN, RED, YELLOW, console, say, table, warn

if TYPE_CHECKING:
    from outrider.lab.bench.prompts import Prompt
    from outrider.lab.tune.engine import EngineSearch, EngineTrial
    from outrider.lab.tune.race import Candidate

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
        "" if gain is None else f"{gain.value:.2f} x ({gain.low:.2f}-{gain.high:.2f})",
        f"{trial.accepted} of {trial.drafted}" if trial.drafted else "",
        "" if trial is search.plain else f"{same} of {compared}",
    ]


def verdict(search: EngineSearch) -> str:
    """Which setting is the best there, and whether speculation helps at all."""
    best, answer = search.best, search.answer
    if best is None:
        return f"No setting could be measured in {search.engine} beside plain decoding, so this says nothing about speculation."
    gain = best.gain(search.plain)
    said = "" if gain is None else f"{gain.value:.2f} times plain decoding (95 %: {gain.low:.2f} to {gain.high:.2f})"
    if answer is best:
        return f"Speculation helps in {search.engine} here. The best setting is {best.name}: {said}."
    if gain is not None and gain.value > 1:
        return f"Whether speculation helps in {search.engine} is not certain: {best.name} is {said}. More prompts decide it."
    return f"Speculation does not help in {search.engine} here: the best setting, {best.name}, is {said}."
