"""`outrider bench`. Imports nothing heavy until it runs, and reads the environment for a server's key."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import WIDE, Debug, option, own_draft, parse_speculative_config
from outrider.cli.terminal import DIM, RED, YELLOW, console, loading, paint, plain, readable, working

if TYPE_CHECKING:
    from outrider.bench.prompts import Ask
    from outrider.bench.run import Run, Sample, Setting
    from outrider.bench.schedule import Side

SAVE_EVERY = 5.0  # seconds


def bench(
    prompts: Annotated[
        str, typer.Argument(metavar="PROMPTS", help="A .jsonl or .txt file of prompts, or a set: code, chat.")
    ] = "code",
    model: Annotated[
        str | None,
        option("What", f"A model, {WIDE} if not given; of a server: the name it is asked for.", "--model", "-m"),
    ] = None,
    method: Annotated[
        list[str] | None, option("What", "A way to guess, measured against plain decoding; may be repeated.")
    ] = None,
    speculative_config: Annotated[
        list[str] | None, option("What", "The same as JSON or a file with it; may be repeated.", metavar="JSON|FILE")
    ] = None,
    draft_model: Annotated[
        str | None, option("What", "The small model for the method draft_model.", "--draft-model", "-d")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        option("What", "Guesses per step at most, for every --method.", "--num-speculative-tokens", "-k", min=1),
    ] = None,
    base_url: Annotated[
        list[str] | None,
        option("Server", "A running server in place of a model here; twice: the second against the first."),
    ] = None,
    off_body: Annotated[
        str | None,
        option("Server", 'How one server is told not to guess; {"disable_spec_decode": true}.', metavar="JSON"),
    ] = None,
    timeout: Annotated[float, option("Server", "Seconds for an answer.")] = 600.0,
    num_prompts: Annotated[int | None, option("How", "The first so many prompts only.", min=1)] = None,
    repeats: Annotated[
        int | None, option("How", "Measurements of each prompt and setting; 3, of servers 1.", "--repeats", "-r", min=1)
    ] = None,
    concurrency: Annotated[int, option("How", "Prompts that are asked at once.", "--concurrency", "-c", min=1)] = 1,
    max_tokens: Annotated[int, option("How", "Tokens of an answer at most.", "--max-tokens", "-n", min=1)] = 64,
    temperature: Annotated[float, option("How", "0 is greedy.", "--temperature", "-t")] = 0.0,
    top_p: Annotated[float | None, option("How", "1 is off.")] = None,
    top_k: Annotated[int | None, option("How", "0 is off.")] = None,
    seed: Annotated[int, option("How", "Of the first repeat; the others count on.")] = 0,
    ignore_eos: Annotated[bool, option("How", "Write on after the end token.", "--ignore-eos")] = False,
    dtype: Annotated[str, option("Model", "auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, option("Model", "auto, cpu or cuda.")] = "auto",
    quantization: Annotated[str | None, option("Model", "int8 or int4 weights, on the CPU.")] = None,
    json_file: Annotated[
        Path | None, option("Output", "Write everything that was measured.", "--json", metavar="FILE")
    ] = None,
    html: Annotated[Path | None, option("Output", "Write a page to look at.", metavar="FILE")] = None,
    resume: Annotated[bool, option("Output", "Go on with the file of --json.", "--resume")] = False,
    debug: Debug = False,
) -> None:
    """Does speculation help here? Your prompts, plain against speculative, in this process or at a running server.

    Settings take turns on the same prompts and seeds. Tells the ratio of speeds with its 95 % interval, and if texts are equal.

    About a minute without options. Ctrl-C keeps what was measured. Exit code 1: a text differs that must not, or nobody answered.
    """
    with readable(debug):
        if resume and json_file is None:
            raise ValueError("--resume goes on with a file; name it: --json RUN.json --resume")
        for path in (json_file, html):
            if path is not None and not path.absolute().parent.is_dir():
                raise FileNotFoundError(f"there is no folder {path.absolute().parent} to write {path.name} to")
        configs = _configs(
            model or WIDE, method, speculative_config, draft_model, num_speculative_tokens, bool(base_url)
        )
        sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        given = {"top_p": top_p, "top_k": top_k, "ignore_eos": ignore_eos or None}
        sampling |= {name: value for name, value in given.items() if value is not None}
        from outrider.bench.prompts import read
        from outrider.bench.schedule import resumable

        asks, notes = read(prompts, num_prompts)
        old = _old(json_file, resume)
        with loading(model or WIDE if not base_url else "what asks servers"):
            from outrider.bench.run import Prompt, Run
            from outrider.kernels.machine import machine

            if base_url:
                side, settings, name = _servers(base_url, configs, model, sampling, off_body, timeout)
                lengths = [None] * len(asks)
            else:
                options = {"dtype": dtype, "device": device, "quantization": quantization}
                side, settings, name = _local(model or WIDE, configs, sampling, concurrency, options)
                lengths = [side.tokens(ask) for ask in asks]
            run = Run(
                date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                command=shlex.join(["outrider", *sys.argv[1:]]),
                model=name,
                machine={key: str(value) for key, value in machine().items()},
                sampling=sampling,
                repeats=repeats or (1 if base_url else 3),
                concurrency=concurrency,
                settings=settings,
                prompts=[
                    Prompt(id=a.id, category=a.category, text=a.text, tokens=n)
                    for a, n in zip(asks, lengths, strict=True)
                ],
            )
        if old is not None:
            resumable(old, run)
            run.samples, run.limits, run.predicted = old.samples, old.limits, old.predicted
        if base_url and run.repeats > 1 and temperature == 0:
            notes.append(
                "a server that remembers its answers (suffix, auto) has seen each of them from the second repeat on, which "
                "flatters it; more prompts tell more than --repeats"
            )
        raise typer.Exit(_measure(run, side, asks, notes, json_file, html))


def _measure(run: Run, side: Any, asks: list[Ask], notes: list[str], file: Path | None, html: Path | None) -> int:
    """Measure with a progress bar, save, show. Returns the exit code."""
    from outrider.bench.report.terminal import show
    from outrider.bench.summary import summary

    interrupted = False
    try:
        for _ in _progress(run, side, asks, file):
            pass
    except KeyboardInterrupt:
        interrupted = True
    run.summary = summary(run)
    if file is not None:
        run.save(file)
    for note in (*notes, *getattr(side, "notes", ())):
        print(paint(f"note: {note}", YELLOW, sys.stderr), file=sys.stderr)
    answered = sum(s.error is None for s in run.samples)
    if answered:
        show(run, console())
        _keep(run, side, file, html, interrupted)
    if interrupted:
        _interrupted(run, file)
        return 130
    if not answered:
        why = next((s.error for s in run.samples), "nothing was asked")
        print(
            paint(f"error: none of {len(run.samples)} requests was answered: {why}", RED, sys.stderr), file=sys.stderr
        )
        return 1
    return int(any(f.get("texts_differing") and f["identity_promised"] for f in run.summary.values()))


def _keep(run: Run, side: Any, file: Path | None, html: Path | None, interrupted: bool) -> None:
    """Write the files that were asked for, with what the machine allows beside what was measured."""
    from outrider.bench.local import Local

    if file is None and html is None:
        return
    if isinstance(side, Local) and not interrupted:
        from outrider.bench.roofline import measure_limits

        with suppress(KeyboardInterrupt), working("measuring what the machine allows"):
            measure_limits(run, side.llms)
    if file is not None:
        run.save(file)
        print(paint(f"Everything is in {file}; a page of it: outrider report {file}", DIM))
    if html is not None:
        from outrider.bench.report import page

        page.write(run, html)
        print(paint(f"The page is {html}.", DIM))


def _progress(run: Run, side: Side, asks: list[Ask], file: Path | None) -> Any:
    """Measure, saving now and then; a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from outrider.bench.schedule import groups, measure

    total = len(groups(asks, run.concurrency)) * len(run.settings) * run.repeats
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    saved = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=plain(sys.stderr)) as progress:
        done = len({s.turn for s in run.samples if s.error is None})
        task = progress.add_task("warming up", total=total, completed=done)
        for samples in measure(run, side, asks):
            progress.update(task, advance=1, description=_doing(samples))
            if file is not None and time.monotonic() - saved > SAVE_EVERY:
                run.save(file)
                saved = time.monotonic()
            yield samples


def _doing(samples: list[Sample]) -> str:
    from outrider.bench.stats import rate

    found = rate([s for s in samples if s.error is None])
    speed = "failed" if found is None else f"{found.value:.0f} tokens/s"
    return f"{samples[0].setting:.20} · {samples[0].prompt:.20} · {speed}".ljust(50)


def _interrupted(run: Run, file: Path | None) -> None:
    """Say what was kept, and how to go on."""
    have = len({s.turn for s in run.samples})
    if file is None:
        said = f"interrupted after {have} measurements; with --json RUN.json they would be kept, to be resumed or looked at"
    else:
        command = run.command if " --resume" in run.command else f"{run.command} --resume"
        said = f"interrupted after {have} measurements, kept in {file}; go on with: {command}"
    print(paint(said, RED, sys.stderr), file=sys.stderr)


def _old(file: Path | None, resume: bool) -> Run | None:
    """The run to go on with. Raises ValueError for a file that would be lost."""
    if file is None or not file.exists():
        return None
    from outrider.bench.run import Run

    old = Run.load(file)
    if resume:
        return old
    if not old.complete:
        raise ValueError(f"{file} holds an interrupted measurement; go on with it by --resume, or remove the file")
    return None


def _configs(
    model: str,
    methods: list[str] | None,
    given: list[str] | None,
    draft: str | None,
    guesses: int | None,
    remote: bool,
) -> list[tuple[str, dict[str, Any]]]:
    """Names and configurations of what is measured against plain decoding."""
    out = list[tuple[str, dict[str, Any]]]()
    if methods is None and given is None:
        methods = [] if remote else ["draft_model"] if draft or own_draft(model) else ["auto"]
    if draft and "draft_model" not in (methods or ()) and "auto" not in (methods or ()):
        raise ValueError(f"--draft-model {draft} is for --method draft_model; add it, or leave out the model")
    for name in methods or ():
        config: dict[str, Any] = {"method": name}
        if name in ("draft_model", "auto") and draft:
            config["model"] = draft
        elif name == "draft_model" and not remote and own_draft(model):
            config["model"] = own_draft(model)
        out.append(_named({**config, **({"num_speculative_tokens": guesses} if guesses else {})}))
    for text in given or ():
        out.append(_config(text))
    names: dict[str, int] = {}
    for at, (name, config) in enumerate(out):
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            out[at] = f"{name} #{names[name]}", config
    return out


def _config(text: str) -> tuple[str, dict[str, Any]]:
    """A configuration and its name: that of its file, or what tells it from its neighbours."""
    config, path = parse_speculative_config(text), Path(text)
    return (path.stem, config) if not text.lstrip().startswith("{") and path.is_file() else _named(config)


def _named(config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A short name that tells a configuration from its neighbours."""
    method = config.get("method") or ("draft_model" if config.get("model") else "server")
    words = ["+".join(method) if isinstance(method, list) else str(method)]
    short = {"num_speculative_tokens": "k", "tree_width": "width", "tree_nodes": "nodes"}
    words += [f"{word}={config[key]}" for key, word in short.items() if key in config]
    for key in sorted(set(config) - set(short) - {"method", "model"}):
        words.append(f"{config[key]}" if isinstance(config[key], str) and len(config[key]) < 12 else key)
    return " ".join(words), config


def _local(
    model: str, configs: list[tuple[str, dict[str, Any]]], sampling: dict[str, Any], rows: int, options: dict[str, Any]
) -> tuple[Any, list[Setting], str]:
    from outrider.bench.local import Local
    from outrider.bench.run import Setting

    settings = [Setting(name="plain"), *(Setting(name=name, speculative_config=config) for name, config in configs)]
    return Local(settings, model, sampling, rows, **options), settings, model


def _servers(
    urls: list[str],
    configs: list[tuple[str, dict[str, Any]]],
    model: str | None,
    sampling: dict[str, Any],
    off: str | None,
    timeout: float,
) -> tuple[Any, list[Setting], str]:
    from outrider.bench.remote import Remote, address
    from outrider.bench.run import Setting

    if len(urls) > 2:
        raise ValueError(f"--base-url is given once or twice, got {len(urls)}")
    urls = [address(url) for url in urls]
    if len(urls) == 2:
        if configs or off:
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
        body = json.loads(off) if off else None
        if body is not None and not isinstance(body, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise ValueError(
            f'--off-body {off} is not JSON ({error}); an example: {{"disable_spec_decode": true}}'
        ) from None
    if any("model" in config for _, config in configs):
        raise ValueError(
            "a running server has its models; leave out the draft model, or start one with it: outrider serve"
        )
    side = Remote(settings, model, sampling, api_key=key, timeout=timeout, off=body)
    return side, settings, " and ".join(dict.fromkeys(side.models.values()))
