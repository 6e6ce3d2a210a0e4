"""`outrider bench`. Imports nothing large until it runs. Reads a server's key from the environment."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import AfterValidator, Field

from outrider.cli.command import as_command
from outrider.cli.options import CODE, canonical_names, own_draft, parse_speculative_config, sampling
from outrider.cli.terminal import (
    DIM,
    GREEN,
    RED,
    YELLOW,
    check_folders,
    console,
    loading,
    paint,
    plain,
    printable,
    say,
    warn,
)
from outrider.drafters.method import AUTO, model_method
from outrider.serve.options import LoadOptions, Options, setting
from outrider_lab.cli.shared import DRAFT_MODEL, NUM_SPECULATIVE_TOKENS

if TYPE_CHECKING:
    from outrider_lab.bench.prompts import Prompt
    from outrider_lab.bench.run import Run, Sample, Setting
    from outrider_lab.bench.schedule import Backend

# Seconds.
SAVE_EVERY = 5.0
SAY_EVERY = 10.0  # seconds between two lines of progress in a pipe


Prompts = Annotated[
    str, typer.Argument(metavar="PROMPTS", help="A .jsonl or .txt file of prompts, or a set: code, chat.")
]


class WorkloadOptions(
    sampling("How", max_tokens=64, temperature=0.0, top_p=1.0, top_k=0, seed=0, ignore_eos=False),
):
    """What is generated for each prompt. Each repeat adds 1 to the seed."""

    num_prompts: int | None = setting(None, "How", "Use only the first so many prompts.", ge=1)

    def sampling(self) -> dict[str, Any]:
        """Fields of `SamplingParams`, those that say something."""
        changed = self.model_dump(exclude={"num_prompts"}, exclude_defaults=True)
        return {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": self.seed} | changed


class SettingOptions(Options):
    """The settings to compare with plain decoding."""

    model: str | None = setting(None, "What", f"A model; default {CODE}. For a server: the model's name there.")
    method: Annotated[list[str] | None, AfterValidator(canonical_names)] = setting(
        None,
        "What",
        "A drafting method to compare with plain decoding, or FILE.py:NAME, a drafter of your own. May be repeated.",
    )
    speculative_config: list[str] | None = setting(
        None, "What", "The same as JSON or a file. May be repeated.", metavar="JSON|FILE"
    )
    draft_model: str | None = DRAFT_MODEL
    num_speculative_tokens: int | None = NUM_SPECULATIVE_TOKENS
    before: str | None = setting(None, "What", "A draft model or head, to compare a later version with; needs --after.")
    after: str | None = setting(None, "What", "The later version of the one of --before.")

    def configs(self, remote: bool) -> list[tuple[str, dict[str, Any]]]:
        """Names and configurations. Raises ValueError for options that exclude or need another.

        Args:
            remote: Whether they are those of a server.
        """
        if self.before or self.after:
            return self._versions(remote)
        model, draft, methods = self.model or CODE, self.draft_model, self.method
        drafting = model_method(draft)
        if methods is None and self.speculative_config is None:
            methods = [] if remote else [drafting] if draft or own_draft(model) else [AUTO]
        if draft and not {drafting, AUTO} & {*(methods or ())}:
            raise ValueError(f"--draft-model {draft} is for --method {drafting}. Add it, or leave out the model")
        out = list[tuple[str, dict[str, Any]]]()
        for name in methods or ():
            config: dict[str, Any] = {"method": name}
            if name in (drafting, AUTO) and draft:
                config["model"] = draft
            elif name == drafting and not remote and own_draft(model):
                config["model"] = own_draft(model)
            if self.num_speculative_tokens is not None:
                config["num_speculative_tokens"] = self.num_speculative_tokens
            out.append(_named(config))
        out += [_config(text) for text in self.speculative_config or ()]
        names: dict[str, int] = {}
        for at, (name, config) in enumerate(out):
            names[name] = names.get(name, 0) + 1
            if names[name] > 1:
                out[at] = f"{name} #{names[name]}", config
        return out

    def _versions(self, remote: bool) -> list[tuple[str, dict[str, Any]]]:
        """The two versions of a drafter."""
        if not (self.before and self.after):
            raise ValueError(
                "--before and --after compare two versions of a drafter; give both: --before OLD --after NEW"
            )
        if remote or self.draft_model or self.method or self.speculative_config:
            raise ValueError(
                "--before and --after name the two drafters; leave out --draft-model, --method and --speculative-config. Two "
                "running servers are compared with --base-url ONE --base-url TWO"
            )
        more = self.model_dump(include={"num_speculative_tokens"}, exclude_none=True)
        both = {"before": self.before, "after": self.after}
        return [(name, {"method": model_method(model), "model": model, **more}) for name, model in both.items()]


class ServerOptions(Options):
    """Running servers to measure."""

    base_url: list[str] | None = setting(
        None, "Server", "Measure a running server. Give it twice to compare the second server with the first."
    )
    off_body: str | None = setting(
        None, "Server", 'Fields that stop speculation; default {"disable_spec_decode": true}.', metavar="JSON"
    )
    timeout: float = setting(600.0, "Server", "Seconds for an answer.")

    @property
    def urls(self) -> list[str]:
        return self.base_url or []


class FileOptions(Options):
    """The files of a measurement."""

    json_file: Path | None = setting(None, "Output", "Write the measurement to a file.", "--json", metavar="FILE")
    html: Path | None = setting(None, "Output", "Write a report page.", metavar="FILE")
    report: list[Path] | None = setting(
        None,
        "Output",
        "Measure nothing: make the page of a file of --json; given twice, also of what changed.",
        metavar="FILE",
    )
    resume: bool = setting(False, "Output", "Continue the interrupted measurement of --json.")

    def check(self) -> None:
        """Raise ValueError or FileNotFoundError for files that cannot be used."""
        if self.resume and self.json_file is None:
            raise ValueError("--resume continues the measurement of a file; name it: --json RUN.json --resume")
        if self.report and self.json_file is not None:
            raise ValueError(
                "--report is for what was measured before, and --json keeps a new measurement; leave one out"
            )
        check_folders(self.json_file, self.html)


@as_command(
    "Measure",
    "outrider bench",
    "outrider bench my-prompts.jsonl -m ./my-model --method suffix --method auto",
    "outrider bench --report before.json --report after.json",
    "outrider bench chat --base-url http://127.0.0.1:8000",
    "outrider bench chat --base-url http://one:8000 --base-url http://two:8000",
    "outrider bench my-prompts.jsonl -m ./my-model -d ./my-small-model --json run.json --html run.html",
    usual="-m -d -k --method --num-prompts -n -t -r --base-url --json --html --report",
)
def bench(
    *,
    prompts: Prompts = "code",
    what: SettingOptions,
    server: ServerOptions,
    workload: WorkloadOptions,
    repeats: Annotated[int | None, Field(ge=1)] = None,
    concurrency: Annotated[int, Field(ge=1)] = 1,
    loading_options: LoadOptions,
    files: FileOptions,
) -> None:
    """Measure plain against speculative decoding on your prompts, in this process or at a running server.

    The settings take turns on the same prompts and seeds. Reports speedups with 95 % intervals, and if texts are equal.

    Takes about a minute by default. Ctrl-C keeps what was measured.
    Exits with 1 if an output that must be identical differs, or if no request succeeded.

    Args:
        repeats: Measurements of each prompt and setting; 3, for servers 1.
        concurrency: Prompts to send at the same time.
    """
    files.check()
    if files.report:
        make_page(files.report, files.html)
        return
    configs = what.configs(bool(server.urls))
    sampling = workload.sampling()
    from outrider_lab.bench.prompts import read
    from outrider_lab.bench.schedule import check_resumable

    read_prompts, notes = read(prompts, workload.num_prompts)
    old = _interrupted_run(files)
    with loading("the client" if server.urls else what.model or CODE):
        from outrider_lab.bench.run import Run, Setting

        if server.urls:
            backend, settings, name = _servers(server, configs, what.model, sampling)
            lengths = None
        else:
            from outrider_lab.bench.local import Local

            name = what.model or CODE
            settings = [Setting(name="plain"), *(Setting(name=n, speculative_config=c) for n, c in configs)]
            backend = Local.load(settings, name, sampling, concurrency, **dict(loading_options))
            lengths = [backend.num_tokens(prompt) for prompt in read_prompts]
        run = Run.begun(
            name,
            settings,
            read_prompts,
            sampling,
            lengths,
            repeats=repeats or (1 if server.urls else 3),
            concurrency=concurrency,
        )
    if old is not None:
        check_resumable(old, run)
        run.samples = old.samples
    if server.urls and run.repeats > 1 and workload.temperature == 0:
        notes.append(
            "a server that remembers its answers (suffix, auto) finds each of them from the second repeat on, and looks "
            "too fast; use more prompts instead of --repeats"
        )
    code = run_and_report(run, backend, read_prompts, notes, files)
    if code == 130:
        _report_interrupt(run, files.json_file)
    raise typer.Exit(code)


def make_page(files: list[Path], out: Path | None) -> None:
    """Write the page of a measurement, or of the later of two and what changed. It needs no network.

    Args:
        files: One or two files of `--json`.
        out: The page; None puts it next to the last file.
    """
    from outrider_lab.bench.report.page import write
    from outrider_lab.bench.run import Run

    if len(files) > 2:
        raise ValueError(f"--report compares two measurements, got {len(files)}")
    runs = [Run.load(file) for file in files]
    path = out or files[-1].with_name("-".join(file.stem for file in files) + ".html")
    if path in files:
        raise ValueError(f"the page would overwrite the run {path}. Name another file: --html page.html")
    recommendation = write(runs[-1], path, other=runs[0] if len(runs) == 2 else None)
    colour = {"keep": GREEN, "broken": RED}.get(recommendation.kind, YELLOW)
    print(f"{paint(recommendation.label, colour)}: {printable(recommendation.headline)}")
    say(f"The page is {path}.")


def run_and_report(
    run: Run, backend: Any, prompts: list[Prompt], notes: list[str], files: FileOptions, tables: bool = True
) -> int:
    """Measure with a progress bar, save, show. Returns the exit code, 130 after ctrl-C.

    Args:
        tables: Whether to show the tables beside the sentences.
    """
    file = files.json_file
    from outrider_lab.bench.report.analysis import summary
    from outrider_lab.bench.report.page import write
    from outrider_lab.bench.report.terminal import show

    interrupted = False
    try:
        _measure(run, backend, prompts, file)
    except KeyboardInterrupt:
        interrupted = True
    run.summary = summary(run)
    if file is not None:
        run.save(file)
    for note in (*notes, *getattr(backend, "notes", ())):
        warn(f"note: {note}")
    answered = sum(s.error is None for s in run.samples)
    if answered:
        show(run, console(), tables)
        if file is not None:
            say(f"The measurement is in {file}. Make a page of it: outrider bench --report {file}")
        if files.html is not None:
            write(run, files.html)
            say(f"The page is {files.html}.")
    if interrupted:
        return 130
    if not answered:
        why = next((s.error for s in run.samples), "there was no request")
        said = f"error: none of {len(run.samples)} requests succeeded: {why}"
        warn(said, RED)
        return 1
    return int(any(f.get("texts_differing") and f["identity_promised"] for f in run.summary.values()))


def _measure(run: Run, backend: Backend, prompts: list[Prompt], file: Path | None) -> None:
    """Measure with a bar on a terminal or lines in a pipe, and save every few seconds."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from outrider_lab.bench.schedule import groups, measure

    total = len(groups(prompts, run.concurrency)) * len(run.settings) * run.repeats
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    saved = said = time.monotonic()
    piped = plain(sys.stderr)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=piped) as progress:
        done = len({s.turn for s in run.samples if s.error is None})
        task = progress.add_task("warming up", total=total, completed=done)
        for samples in measure(run, backend, prompts):
            progress.update(task, advance=1, description=_status(samples))
            if piped and time.monotonic() - said > SAY_EVERY:
                said, left = time.monotonic(), progress.tasks[0].time_remaining
                about = "" if left is None else f", about {left:.0f} s are left"
                warn(f"{progress.tasks[0].completed:.0f} of {total} measurements{about}", DIM)
            if file is not None and time.monotonic() - saved > SAVE_EVERY:
                run.save(file)
                saved = time.monotonic()


def _status(samples: list[Sample]) -> str:
    from outrider_lab.bench.stats import rate

    measured = rate([s for s in samples if s.error is None])
    speed = "failed" if measured is None else f"{measured.value:.0f} tokens/s"
    return f"{samples[0].setting:.20} · {samples[0].prompt:.20} · {speed}".ljust(50)


def _report_interrupt(run: Run, file: Path | None) -> None:
    """Say what was kept, and how to continue."""
    have = len({s.turn for s in run.samples})
    if file is None:
        said = f"interrupted after {have} measurements. With --json RUN.json they are kept and can be resumed"
    else:
        command = run.command if " --resume" in run.command else f"{run.command} --resume"
        said = f"interrupted after {have} measurements, kept in {file}. Continue with: {command}"
    warn(said, RED)


def _interrupted_run(files: FileOptions) -> Run | None:
    """The run to continue. Raises ValueError if an interrupted measurement would be overwritten."""
    file = files.json_file
    if file is None or not file.exists():
        return None
    from outrider_lab.bench.run import Run

    old = Run.load(file)
    if files.resume:
        return old
    if not old.complete:
        raise ValueError(f"{file} holds an interrupted measurement. Continue it with --resume, or delete the file")
    return None


def _config(text: str) -> tuple[str, dict[str, Any]]:
    """A configuration and its name: that of its file, or a short description."""
    config, path = parse_speculative_config(text), Path(text)
    return (path.stem, config) if not text.lstrip().startswith("{") and path.is_file() else _named(config)


def _named(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A short name from the fields of a configuration."""
    method = config.get("method") or (model_method(config["model"]) if config.get("model") else "server")
    words = ["+".join(method) if isinstance(method, list) else str(method)]
    short = {"num_speculative_tokens": "k", "tree_width": "width", "tree_nodes": "nodes"}
    words += [f"{word}={config[key]}" for key, word in short.items() if key in config]
    for key in sorted(set(config) - set(short) - {"method", "model"}):
        words.append(f"{config[key]}" if isinstance(config[key], str) and len(config[key]) < 12 else key)
    return " ".join(words), config


def _servers(
    server: ServerOptions, configs: list[tuple[str, dict[str, Any]]], model: str | None, sampling: dict[str, Any]
) -> tuple[Any, list[Setting], str]:
    """The backend, the settings, and the names of the models."""
    from outrider_lab.bench.remote import Remote, address
    from outrider_lab.bench.run import Setting

    if len(server.urls) > 2:
        raise ValueError(f"give --base-url once or twice, got {len(server.urls)}")
    urls = [address(url) for url in server.urls]
    if len(urls) == 2:
        if configs or server.off_body:
            raise ValueError(
                "two servers are compared as they are; leave out --method, --speculative-config and --off-body"
            )
        names = [url.partition("//")[2] for url in urls]
        names[1] += " #2" if names[0] == names[1] else ""
        settings = [Setting(name=n, base_url=u, speculative_config={}) for n, u in zip(names, urls, strict=True)]
    else:
        settings = [Setting(name="plain", base_url=urls[0])]
        for name, config in configs or [("server", {})]:
            settings.append(Setting(name=name, base_url=urls[0], speculative_config=config))
    key = os.environ.get("OUTRIDER_API_KEY") or os.environ.get("OPENAI_API_KEY")
    try:
        off = json.loads(server.off_body) if server.off_body else None
        if off is not None and not isinstance(off, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise ValueError(
            f'--off-body {server.off_body} is not JSON ({error}); an example: {{"disable_spec_decode": true}}'
        ) from None
    if any("model" in config for _, config in configs):
        raise ValueError(
            "a running server already has its models. Leave out the draft model, or start a server with it: outrider serve"
        )
    backend = Remote(settings, model, sampling, api_key=key, timeout=server.timeout, off=off)
    return backend, settings, " and ".join(dict.fromkeys(backend.models.values()))
