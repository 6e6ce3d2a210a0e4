"""`outrider-certify`, and what `outrider certify` shares with it. Imports nothing large until it runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_type_hints

import typer

if TYPE_CHECKING:
    from outrider_certify.certificate import Certificate
    from outrider_certify.subject import Prompt, Subject
    from outrider_certify.trials import CertificateKind, TrialJournal

_DIM, _COLOURS = "2", {"good": "32", "bad": "31", "unsure": "33"}


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@dataclass(frozen=True, kw_only=True)
class CertifyOptions:
    """The options of the command line, in the order of the help page."""

    subject: Annotated[
        str | None, typer.Argument(metavar="SUBJECT", help="A model, `module:name`, or the address of a server.")
    ] = None
    generate: Annotated[
        str | None,
        _option(
            "Subject",
            'Certify transformers: arguments of its generate, as JSON, with "assistant_model".',
            metavar="JSON",
        ),
    ] = None
    plain_url: Annotated[
        str | None, _option("Subject", "A server of the same model that does not speculate.", metavar="URL")
    ] = None
    off_body: Annotated[
        str | None,
        _option("Subject", "Fields of a request that turn speculation off on the same server.", metavar="JSON"),
    ] = None
    reference: Annotated[
        str | None,
        _option("Subject", "A model with the server's weights: gives the target's probabilities.", metavar="MODEL"),
    ] = None
    served_model: Annotated[str | None, _option("Subject", "The model's name on the server.", metavar="NAME")] = None
    endpoint: Annotated[
        str, _option("Subject", "Of a server: completions, or chat, where a prompt is the message of a user.")
    ] = "completions"
    texts: Annotated[
        Path | None, _option("Subject", "Audit recorded texts in place of new ones.", metavar="FILE.jsonl")
    ] = None
    kind: Annotated[
        list[str] | None,
        _option(
            "How",
            "exact, seeded, statistical, contract, quality. May be repeated. Default: all that suit.",
            metavar="KIND",
        ),
    ] = None
    budget: Annotated[str, _option("How", "Time for all kinds: 90s, 10m, 1h.", metavar="TIME")] = "10m"
    confidence: Annotated[float, _option("How", "Of every statement.", min=0.5, max=0.999999)] = 0.99
    deviation: Annotated[float, _option("How", "The total variation that is to be excluded.", min=0.0001, max=1)] = 0.1
    prompts: Annotated[str, _option("How", "code, chat, or a file of prompts.", metavar="NAME|FILE")] = "code"
    num_prompts: Annotated[int, _option("How", "Prompts to use, at most.", min=2)] = 6
    max_tokens: Annotated[int, _option("How", "Tokens of a text.", "--max-tokens", "-n", min=8)] = 48
    seed: Annotated[int, _option("How", "Of all texts.")] = 0
    problems: Annotated[
        Path | None, _option("How", "For quality: problems in HumanEval's format.", metavar="FILE.jsonl")
    ] = None
    timeout: Annotated[float, _option("How", "Seconds for an answer of a server.", min=1)] = 120.0
    out: Annotated[Path, _option("Output", "The page. The JSON file is next to it.", "--out", "-o", metavar="FILE")] = (
        Path("certificate.html")
    )
    compare: Annotated[
        tuple[Path, Path] | None,
        _option("Output", "Show what changed between two certificates.", metavar="A.json B.json"),
    ] = None


def server_subject(options: CertifyOptions, reference: Callable[[str, list[Prompt]], Subject]) -> Subject | None:
    """The server that `options` name; None if they name none. reference: makes the subject of --reference.

    Raises ValueError for options of a server without one, and what `ServerSubject` raises.
    """
    name = options.subject or ""
    if not name.startswith(("http://", "https://")):
        usual = CertifyOptions()
        for option in ("plain_url", "off_body", "served_model", "reference", "endpoint"):
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


def _subject_of(options: CertifyOptions) -> Subject:
    """A server, a Python name, or a model of transformers."""
    from outrider_certify.subjects.function import imported, is_python_name, python_subject

    def transformers(model: str, generate: dict[str, Any] | None, prompts: list[Prompt]) -> Subject:
        try:
            from outrider_certify.subjects.transformers_generate import TransformersSubject
        except ImportError as error:
            raise ValueError(f"{model} is read by transformers ({error}): pip install torch transformers") from None
        return TransformersSubject(model, generate, prompts)

    name = options.subject or ""
    if server := server_subject(options, lambda model, prompts: transformers(model, None, prompts)):
        return server
    if is_python_name(name):
        return python_subject(imported(name), name)
    if not options.generate:
        raise ValueError(
            f"{name} is no address of a server, and no module:name. For a model of transformers add --generate; for a model "
            "that outrider runs: outrider certify"
        )
    return transformers(name, parse_json(options.generate, "--generate"), read_prompts(options))


def run(
    options: CertifyOptions,
    subject_of: Callable[[CertifyOptions], Subject] = _subject_of,
    program: str = "outrider-certify",
    **identity: Any,
) -> int:
    """What the command does. Returns its exit code.

    subject_of: makes the subject. program: its name. identity: what else the records depend on. Raises ValueError and OSError
    for options that are wrong.
    """
    if options.compare is not None:
        return _compare(*options.compare)
    if options.subject is None:
        raise ValueError("name what to certify, for example the address of a server: http://127.0.0.1:8000")
    seconds, out = duration(options.budget), options.out
    if not out.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.absolute().parent} to write {out.name} to")
    if out.suffix == ".json":
        raise ValueError("the JSON file has the page's name; give the page: -o certificate.html")
    from outrider_certify.page import write
    from outrider_certify.run import TestSettings, kinds_of, new_certificate
    from outrider_certify.trials import TrialJournal

    settings = TestSettings(**{f.name: getattr(options, f.name) for f in fields(TestSettings)})
    subject = subject_of(options)
    kinds = kinds_of(subject, options.kind or (), settings)
    certificate = new_certificate(subject, seconds, options.confidence, shlex.join([program, *sys.argv[1:]]))
    given = {f.name: str(getattr(options, f.name)) for f in fields(options) if f.name not in ("kind", "budget", "out")}
    journal = TrialJournal(out.with_suffix(".journal"), {**given, "name": subject.name, **subject.weights, **identity})
    stopped = _fill(certificate, subject, kinds, journal, seconds)
    certificate.save(out.with_suffix(".json"))
    write(certificate, out)
    if certificate.complete:
        journal.remove()
    _show(certificate, out)
    return 130 if stopped else certificate.conclusion.exit_code


def _fill(
    certificate: Certificate, subject: Subject, kinds: list[CertificateKind], journal: TrialJournal, seconds: float
) -> bool:
    """Add the parts. Returns whether the user stopped it."""
    from outrider_certify.trials import judged, run_kinds

    if journal.resumed:
        _say(f"{journal.resumed} trials of an earlier run are kept")

    def progress(line: str) -> None:
        end = "\n" if _plain(sys.stderr) else "\x1b[K\r"
        print(_paint(line[:110], _DIM, sys.stderr), end=end, file=sys.stderr, flush=True)

    try:
        for part in run_kinds(kinds, journal, seconds, progress=progress, ready=subject.ready):
            certificate.parts.append(part)
        gone = subject.ready()
        certificate.complete = not gone
        if gone:
            _say(f"{gone}; start it again, and the same command goes on from here", _COLOURS["bad"])
    except KeyboardInterrupt:
        known = {part.kind for part in certificate.parts}
        certificate.parts += [judged(k, r) for k in kinds if k.name not in known and (r := journal.of(k.name))]
        _say("interrupted; the same command goes on from here", _COLOURS["bad"])
        return True
    return False


def duration(given: str) -> float:
    """Seconds of `90s`, `10m`, `1.5h`, or of a plain number."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", given)
    if not parts or float(parts[1]) == 0:
        raise ValueError(f"--budget is a time such as 90s, 10m or 1h, got {given!r}")
    return float(parts[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[parts[2]]


def _show(certificate: Certificate, out: Path) -> None:
    worst = certificate.conclusion
    print(_paint(f"{certificate.subject}: {worst.value}", _COLOURS[worst.colour]))
    for part in certificate.parts:
        print(f"  {_paint(part.kind, _COLOURS[part.conclusion.colour])}: {_printable(part.sentence)}")
        for finding in part.findings:
            if finding.cause:
                print(f"    it looks like this: {_printable(finding.cause)}")
    print(_paint(f"The page is {out}, the data {out.with_suffix('.json')}.", _DIM))


def _compare(before: Path, after: Path) -> int:
    from outrider_certify.certificate import Certificate, compare

    lines, worse = compare(Certificate.load(before), Certificate.load(after))
    for line in lines or ["nothing changed"]:
        print(_printable(line))
    return int(worse)


# -- the terminal -----------------------------------------------------------------------------------------------------------


def _plain(stream: TextIO) -> bool:
    """Whether to write no escape codes: no terminal, a dumb one, or NO_COLOR (https://no-color.org)."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def _paint(text: str, code: str, stream: TextIO | None = None) -> str:
    return text if _plain(stream or sys.stdout) else f"\x1b[{code}m{text}\x1b[0m"


def _printable(text: str) -> str:
    """Text that is safe on a terminal: control characters are shown as codes and have no effect."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else f"\\x{ord(c):02x}" for c in text)


def _say(line: str, code: str = _DIM) -> None:
    print(_paint(line, code, sys.stderr), file=sys.stderr)


def _one_parameter_each(command: Callable[[CertifyOptions], None]) -> Callable[..., None]:
    """Let typer see each field of the options as a parameter of its own."""
    hints = get_type_hints(CertifyOptions, include_extras=True)

    def call(**given: Any) -> None:
        command(CertifyOptions(**given))

    call.__doc__ = command.__doc__
    call.__annotations__ = {f.name: hints[f.name] for f in fields(CertifyOptions)}
    call.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in fields(CertifyOptions)
        ]
    )
    return call


@_one_parameter_each
def command(options: CertifyOptions) -> None:
    """Is an engine's speculative decoding lossless? Compare its texts with plain decoding, and say what would have been found.

    Certifies a server with OpenAI's API, transformers, or a function of yours. Exit codes: 0 nothing differs, 1 something
    differs, 2 wrong options, 3 cannot tell. The same command resumes an interrupted run.
    """
    try:
        code = run(options)
    except (ValueError, OSError) as error:
        _say(f"error: {' '.join(str(error).split())}", _COLOURS["bad"])
        code = 2
    raise typer.Exit(code)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"help_option_names": ["-h", "--help"]})(command)


def main() -> None:
    app()
