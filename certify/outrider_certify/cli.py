"""`outrider-certify`, and what `outrider certify` shares with it. Imports nothing large until it runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from outrider_certify.certificate import Certificate
    from outrider_certify.run import TestSettings
    from outrider_certify.subject import Prompt, Subject
    from outrider_certify.trials import TrialJournal

_COLOURS = {"good": "green", "bad": "red", "unsure": "yellow"}


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


_subject, _how, _output = partial(_option, "Subject"), partial(_option, "How"), partial(_option, "Output")
_gate = partial(_option, "Gate before a roll-out")
_ARGUMENT = typer.Argument(metavar="SUBJECT", help="A model, `module:name`, or the address of a server.")
_GENERATE = 'Certify transformers: arguments of its generate, as JSON, with "assistant_model".'
_KINDS = "exact, seeded, statistical, contract. May be repeated. Default: all that suit."
_ENDPOINT = "Of a server: completions, or chat, where a prompt is the message of a user."


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """The options of the command line, in the order of the help page."""

    subject: Annotated[str | None, _ARGUMENT] = None
    generate: Annotated[str | None, _subject(_GENERATE, metavar="JSON")] = None
    plain_url: Annotated[str | None, _subject("A server of the same model, without speculation.", metavar="URL")] = None
    off_body: Annotated[
        str | None, _subject("Fields of a request that turn it off on the same server.", metavar="JSON")
    ] = None
    on_body: Annotated[
        str | None, _subject("Fields of a request that turn it on, as LM Studio's draft_model.", metavar="JSON")
    ] = None
    reference: Annotated[
        str | None, _subject("A model with the server's weights: tells probabilities.", metavar="MODEL")
    ] = None
    served_model: Annotated[str | None, _subject("The model's name on the server.", metavar="NAME")] = None
    endpoint: Annotated[str, _subject(_ENDPOINT)] = "completions"
    texts: Annotated[Path | None, _subject("Audit recorded texts in place of new ones.", metavar="FILE.jsonl")] = None
    kind: Annotated[list[str] | None, _how(_KINDS, metavar="KIND")] = None
    budget: Annotated[str, _how("Time for all kinds: 90s, 10m, 1h.", metavar="TIME")] = "10m"
    confidence: Annotated[float, _how("Of every statement.", min=0.5, max=0.999999)] = 0.99
    deviation: Annotated[float, _how("The total variation that is to be excluded.", min=0.0001, max=1)] = 0.1
    prompts: Annotated[str, _how("code, chat, or a file of prompts.", metavar="NAME|FILE")] = "code"
    num_prompts: Annotated[int, _how("Prompts to use, at most.", min=2)] = 6
    max_tokens: Annotated[int, _how("Tokens of a text.", "--max-tokens", "-n", min=8)] = 48
    seed: Annotated[int, _how("Of all texts.")] = 0
    timeout: Annotated[float, _how("Seconds for an answer of a server.", min=1)] = 120.0
    out: Annotated[Path, _output("The page. The JSON file is next to it.", "--out", "-o", metavar="FILE")] = Path(
        "certificate.html"
    )
    before: Annotated[str | None, _gate("The server that is in use now.", metavar="URL")] = None
    after: Annotated[str | None, _gate("The server that is to take its place.", metavar="URL")] = None
    traffic: Annotated[Path | None, _gate("Requests of your own: a JSON body a line.", metavar="FILE.jsonl")] = None
    compare: Annotated[
        tuple[Path, Path] | None, _output("Show what changed between two certificates.", metavar="A.json B.json")
    ] = None
    board: Annotated[
        Path | None, _output("Write one page over all certificates of a folder: index.html.", metavar="FOLDER")
    ] = None


# -- what to certify --------------------------------------------------------------------------------------------------------


def server_subject(options: CertifyOptions, reference: Callable[[str, list[Prompt]], Subject]) -> Subject | None:
    """The server that `options` name; None if they name none.

    Args:
        reference: Makes the subject of --reference.

    Raises ValueError for options of a server without one, and what `ServerSubject` raises.
    """
    name, usual = options.subject or "", CertifyOptions()
    if not name.startswith(("http://", "https://")):
        for option in ("plain_url", "off_body", "on_body", "served_model", "reference", "endpoint"):
            if getattr(options, option) != getattr(usual, option):
                raise ValueError(
                    f"--{option.replace('_', '-')} is for a server, and {name} is none: give its address, http://..."
                )
        return None
    from outrider_certify.subjects.server import ServerSubject

    prompts = read_prompts(options)
    return ServerSubject(
        name,
        prompts,
        plain_url=options.plain_url,
        off_body=parse_json(options.off_body, "--off-body") if options.off_body else None,
        on_body=parse_json(options.on_body, "--on-body") if options.on_body else None,
        reference=reference(options.reference, prompts) if options.reference else None,
        model=options.served_model,
        api_key=os.environ.get("OUTRIDER_API_KEY"),
        timeout=options.timeout,
        endpoint=options.endpoint,
    )


def read_prompts(options: CertifyOptions) -> list[Prompt]:
    from outrider_certify.prompts import read_prompts

    return list(read_prompts(options.prompts, options.num_prompts))


def parse_json(text: str, option: str) -> dict[str, Any]:
    """The JSON object of an option. Raises ValueError for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} is not JSON ({error}), got {text}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} is a JSON object, got {text}")
    return value


def _transformers(model: str, generate: dict[str, Any] | None, prompts: list[Prompt]) -> Subject:
    try:
        from outrider_certify.subjects.transformers_generate import TransformersSubject
    except ImportError as error:
        raise ValueError(f"{model} is read by transformers ({error}): pip install torch transformers") from None
    return TransformersSubject(model, generate, prompts)


def subject_of(options: CertifyOptions) -> Subject:
    """A server, a Python name, or a model of transformers. Raises ValueError for anything else."""
    from outrider_certify.subjects.function import imported, is_python_name, python_subject

    name = options.subject or ""
    if server := server_subject(options, lambda model, prompts: _transformers(model, None, prompts)):
        return server
    if is_python_name(name):
        return python_subject(imported(name), name)
    if re.fullmatch(r"[\w.-]+:\d+(/\S*)?", name):
        raise ValueError(f"{name} has no http:// before it; give http://{name}")
    if not options.generate:
        raise ValueError(
            f"{name} is no address of a server, and no module:name. For a model of transformers add --generate; for a model "
            "that outrider runs: outrider certify"
        )
    return _transformers(name, parse_json(options.generate, "--generate"), read_prompts(options))


# -- a run ------------------------------------------------------------------------------------------------------------------


def run(
    options: CertifyOptions,
    subject_of: Callable[[CertifyOptions], Subject] = subject_of,
    program: str = "outrider-certify",
    **identity: Any,
) -> int:
    """What the command does. Returns its exit code.

    Args:
        subject_of: Makes the subject.
        program: The name of the command.
        identity: What else the records depend on.

    Raises ValueError and OSError for options that are wrong.
    """
    if options.compare is not None:
        return _compare(*options.compare)
    if options.board is not None:
        from outrider_certify.board import write_board

        _print(f"The page is {write_board(options.board)}.")
        return 0
    if options.before or options.after or options.traffic:
        return _gated(options, shlex.join([program, *sys.argv[1:]]))
    subject, settings, journal = started(options, identity, subject_of)
    if journal.resumed:
        _say(f"{journal.resumed} trials of an earlier run are kept")
    for name in ("speculation", "without speculation"):
        if name in subject.properties:
            _say(f"{name}: {subject.properties[name]}")
    command = shlex.join([program, *sys.argv[1:]])
    certificate, stopped = certified(options, subject, settings, journal, _progress, command)
    if not certificate.complete:
        _say("this is not complete; the same command goes on from here", "red")
    _show(certificate, options.out)
    return 130 if stopped else certificate.conclusion.exit_code


def started(
    options: CertifyOptions, identity: dict[str, Any], subject_of: Callable[[CertifyOptions], Subject] = subject_of
) -> tuple[Subject, TestSettings, TrialJournal]:
    """The subject, what is tested of it, and the records so far.

    Args:
        identity: What else the records depend on.

    Raises ValueError and OSError for options that are wrong.
    """
    if not options.subject:
        raise ValueError("name what to certify, for example the address of a server: http://127.0.0.1:8000")
    duration(options.budget)
    out = options.out
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.absolute().parent} to write {out.name} to")
    if out.suffix == ".json":
        raise ValueError("the JSON file has the page's name; give the page: -o certificate.html")
    from outrider_certify.run import TestSettings
    from outrider_certify.trials import TrialJournal

    settings = TestSettings(**{f.name: getattr(options, f.name) for f in fields(TestSettings)})
    subject = subject_of(options)
    words = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("kind", "budget", "out")}
    identity = {**words, "name": subject.name, **subject.weights, **identity}
    return subject, settings, TrialJournal(out.with_suffix(".journal"), {k: str(v) for k, v in identity.items()})


def certified(
    options: CertifyOptions,
    subject: Subject,
    settings: TestSettings,
    journal: TrialJournal,
    progress: Callable[[str], None],
    command: str,
) -> tuple[Certificate, bool]:
    """The certificate, which is written to its files too, and whether ctrl-C stopped it.

    Args:
        command: Makes the certificate again.
    """
    from outrider_certify.run import Interrupted, certify

    seconds, stopped = duration(options.budget), False
    try:
        certificate = certify(subject, seconds, options.kind or (), settings, journal, progress)
    except Interrupted as stop:
        certificate, stopped = stop.certificate, True
    _written(certificate, command, options.out)
    if certificate.complete:
        journal.remove()
    return certificate, stopped


def _gated(options: CertifyOptions, command: str) -> int:
    """The gate before a roll-out. Returns its exit code."""
    from outrider_certify.gate import GateServer, gate, read_traffic
    from outrider_certify.subjects.transport import ServerClient

    before, after, traffic = options.before, options.after, options.traffic
    if before is None or after is None or traffic is None:
        raise ValueError("the gate needs two servers and requests: --before URL --after URL --traffic requests.jsonl")
    key = os.environ.get("OUTRIDER_API_KEY")
    bodies = read_traffic(traffic)
    first, second = (
        GateServer(ServerClient(url, api_key=key, timeout=options.timeout), options.served_model)
        for url in (before, after)
    )
    certificate = gate(first, second, bodies, confidence=options.confidence, progress=_progress)
    _written(certificate, command, options.out)
    _show(certificate, options.out)
    return certificate.conclusion.exit_code


def _written(certificate: Certificate, command: str, out: Path) -> None:
    """Write the page and, next to it, the JSON file."""
    from outrider_certify.page import write

    certificate.command = command
    certificate.save(out.with_suffix(".json"))
    write(certificate, out)


def duration(text: str) -> float:
    """Seconds of `90s`, `10m`, `1.5h`, or of a plain number."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if not parts or float(parts[1]) == 0:
        raise ValueError(f"--budget is a time such as 90s, 10m or 1h, got {text!r}")
    return float(parts[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[parts[2]]


def _compare(before: Path, after: Path) -> int:
    from outrider_certify.certificate import Certificate, compare

    lines, worse = compare(Certificate.load(before), Certificate.load(after))
    _print("\n".join(lines or ["nothing changed"]))
    return int(worse)


def _show(certificate: Certificate, out: Path) -> None:
    from outrider_certify.page import visible

    def head(text: str, colour: str) -> str:
        return typer.style(text, fg=_COLOURS[colour])

    _print(head(f"{certificate.subject}: {certificate.conclusion.value}", certificate.conclusion.colour))
    for part in certificate.parts:
        _print(f"  {head(part.kind, part.conclusion.colour)}: {visible(part.sentence)}")
        for cause in part.causes:
            _print(f"    it looks like this: {visible(cause)}")
    _print(f"The page is {out}, the data {out.with_suffix('.json')}.")


def _print(text: str, *, error: bool = False) -> None:
    typer.echo(text, err=error, color=False if os.environ.get("NO_COLOR") else None)


def _say(line: str, colour: str | None = None) -> None:
    _print(typer.style(line, fg=colour, dim=colour is None), error=True)


def _progress(line: str) -> None:
    print(line[:110], end="\x1b[K\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


# -- the command ------------------------------------------------------------------------------------------------------------


def _main(**given: Any) -> None:
    """Is an engine's speculative decoding lossless? Compare its texts with plain decoding, and say what would have been found.

    Certifies a server with OpenAI's API, transformers, or a function of yours. Exit codes: 0 nothing differs, 1 something
    differs, 2 wrong options, 3 cannot tell. The same command resumes an interrupted run.
    """
    try:
        code = run(CertifyOptions(**given))
    except (ValueError, OSError) as error:
        _say(f"error: {' '.join(str(error).split())}", "red")
        code = 2
    raise typer.Exit(code)


# typer sees each field of the options as a parameter of its own
_main.__annotations__ = get_type_hints(CertifyOptions, include_extras=True)
_main.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess]
    [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=_main.__annotations__[f.name])
        for f in fields(CertifyOptions)
    ]
)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"help_option_names": ["-h", "--help"]})(_main)


def main() -> None:
    app()
