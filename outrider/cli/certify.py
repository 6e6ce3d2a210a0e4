"""`outrider certify`. Imports nothing large until it runs."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.options import Debug, LoadOptions, grouped, option, own_draft, parse_speculative_config
from outrider.cli.terminal import DIM, GREEN, RED, YELLOW, loading, paint, plain, printable, readable

if TYPE_CHECKING:
    from outrider.lab.certify.exact import VerifierFunction
    from outrider_certify.certificate import Certificate
    from outrider_certify.run import CertificateKind
    from outrider_certify.subjects.base import Subject

KINDS = ("exact", "seeded", "statistical", "contract", "quality")


@dataclass(frozen=True)
class SubjectOptions:
    """What is certified."""

    speculative_config: Annotated[
        str | None,
        option("Subject", "For a model of ours: how it speculates, as JSON or a file with it.", metavar="JSON|FILE"),
    ] = None
    generate: Annotated[
        str | None,
        option(
            "Subject",
            'Certify transformers: arguments of its generate, as JSON, with "assistant_model".',
            metavar="JSON",
        ),
    ] = None
    plain_url: Annotated[
        str | None, option("Subject", "A server of the same model that does not speculate.", metavar="URL")
    ] = None
    off_body: Annotated[
        str | None,
        option("Subject", "Fields of a request that turn speculation off on the same server.", metavar="JSON"),
    ] = None
    reference: Annotated[
        str | None,
        option("Subject", "A model with the server's weights: gives the target's probabilities.", metavar="MODEL"),
    ] = None
    served_model: Annotated[str | None, option("Subject", "The model's name on the server.", metavar="NAME")] = None
    endpoint: Annotated[
        str, option("Subject", "Of a server: completions, or chat, where a prompt is the message of a user.")
    ] = "completions"
    texts: Annotated[
        Path | None, option("Subject", "Audit recorded texts in place of new ones.", metavar="FILE.jsonl")
    ] = None


@dataclass(frozen=True)
class CertifyOptions:
    """How much is tested."""

    kind: Annotated[
        list[str] | None, option("How", f"{', '.join(KINDS)}. May be repeated. Default: all that suit.", metavar="KIND")
    ] = None
    budget: Annotated[str, option("How", "Time for all kinds: 90s, 10m, 1h.", metavar="TIME")] = "10m"
    confidence: Annotated[float, option("How", "Of every statement.", min=0.5, max=0.999999)] = 0.99
    deviation: Annotated[float, option("How", "The total variation that is to be excluded.", min=0.0001, max=1)] = 0.1
    prompts: Annotated[str, option("How", "code, chat, or a file of prompts.", metavar="NAME|FILE")] = "code"
    num_prompts: Annotated[int, option("How", "Prompts to use, at most.", min=2)] = 6
    max_tokens: Annotated[int, option("How", "Tokens of a text.", "--max-tokens", "-n", min=8)] = 48
    seed: Annotated[int, option("How", "Of all texts.")] = 0
    problems: Annotated[
        Path | None, option("How", "For quality: problems in HumanEval's format.", metavar="FILE.jsonl")
    ] = None
    timeout: Annotated[float, option("How", "Seconds for an answer of a server.", min=1)] = 120.0


@grouped
def certify(
    subject: Annotated[
        str | None,
        typer.Argument(metavar="SUBJECT", help="A model, `module:name`, or the address of a server."),
    ] = None,
    *,
    what: SubjectOptions,
    how: CertifyOptions,
    load: LoadOptions,
    out: Annotated[
        Path, option("Output", "The page. The JSON file is next to it.", "--out", "-o", metavar="FILE")
    ] = Path("certificate.html"),
    compare: Annotated[
        tuple[Path, Path] | None,
        option("Output", "Show what changed between two certificates.", metavar="A.json B.json"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Is an engine lossless? Compare its texts with plain decoding, and say what would have been found.

    Certifies a model of ours with a speculative config, a verifier function, transformers, or a server with OpenAI's API.
    Exit codes: 0 nothing differs, 1 something differs, 3 cannot tell. The same command resumes an interrupted run.
    """
    with readable(debug):
        if compare is not None:
            raise typer.Exit(_compare(*compare))
        if subject is None:
            raise ValueError("name what to certify, for example: outrider certify builtin:code")
        seconds = duration(how.budget)
        wrong = [k for k in how.kind or () if k not in KINDS]
        if wrong:
            raise ValueError(f"unknown kind {wrong[0]!r}; known: {', '.join(KINDS)}")
        if not out.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {out.absolute().parent} to write {out.name} to")
        if out.suffix == ".json":
            raise ValueError("the JSON file has the page's name; give the page: -o certificate.html")
        with loading(subject):
            from outrider.lab.certify.plan import kinds_of, subject_of

            given = {**asdict(what), **asdict(how), "load": dict(load)}
            given["speculative_config"] = _config(subject, what)
            found = subject_of(subject, given)
            kinds = kinds_of(found, given)
        certificate, interrupted = _run(found, kinds, seconds, how.confidence, out, given)
        _show(certificate, out)
        raise typer.Exit(130 if interrupted else certificate.conclusion.exit_code)


def duration(given: str) -> float:
    """Seconds of `90s`, `10m`, `1.5h`, or of a plain number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", given)
    if not found or float(found[1]) == 0:
        raise ValueError(f"--budget is a time such as 90s, 10m or 1h, got {given!r}")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def _config(subject: str, what: SubjectOptions) -> dict[str, Any] | None:
    if what.speculative_config is not None:
        return parse_speculative_config(what.speculative_config)
    draft = own_draft(subject)
    return {"method": "draft_model", "model": draft} if draft else None


def _run(
    subject: Subject | VerifierFunction,
    kinds: list[CertificateKind],
    seconds: float,
    confidence: float,
    out: Path,
    given: dict[str, Any],
) -> tuple[Certificate, bool]:
    """The certificate, and whether the user stopped it."""
    from outrider.lab.certify.plan import blank
    from outrider_certify.page import write
    from outrider_certify.run import TrialJournal, run_kinds
    from outrider_certify.subjects.base import Subject

    certificate = blank(subject, shlex.join(["outrider", *sys.argv[1:]]), seconds, confidence)
    identity = {k: str(v) for k, v in given.items() if k not in ("kind", "budget")}
    journal = TrialJournal(
        out.with_suffix(".journal"), {"subject": certificate.subject, **certificate.weights, **identity}
    )
    if journal.resumed:
        print(paint(f"{journal.resumed} trials of an earlier run are kept", DIM, sys.stderr), file=sys.stderr)

    def progress(line: str) -> None:
        end = "\n" if plain(sys.stderr) else "\x1b[K\r"
        print(paint(line[:110], DIM, sys.stderr), end=end, file=sys.stderr, flush=True)

    ready = subject.ready if isinstance(subject, Subject) else str
    interrupted = False
    try:
        for part in run_kinds(kinds, journal, seconds, progress=progress, ready=ready):
            certificate.parts.append(part)
        certificate.complete = not (gone := ready())
        if gone:
            print(
                paint(f"{gone}; start it again, and the same command goes on from here", RED, sys.stderr),
                file=sys.stderr,
            )
    except KeyboardInterrupt:
        interrupted = True
        known = {part.kind for part in certificate.parts}
        certificate.parts += [k.judge(r) for k in kinds if k.name not in known and (r := journal.of(k.name))]
        print(paint("interrupted; the same command goes on from here", RED, sys.stderr), file=sys.stderr)
    certificate.save(out.with_suffix(".json"))
    write(certificate, out)
    if certificate.complete:
        journal.remove()
    return certificate, interrupted


def _show(certificate: Certificate, out: Path) -> None:
    from outrider_certify.page import COLOURS

    shades = {"good": GREEN, "bad": RED, "unsure": YELLOW}
    print(paint(f"{certificate.subject}: {certificate.conclusion.value}", shades[COLOURS[certificate.conclusion]]))
    for part in certificate.parts:
        print(f"  {paint(part.kind, shades[COLOURS[part.conclusion]])}: {printable(part.sentence)}")
        for finding in part.findings:
            if finding.cause:
                print(f"    it looks like this: {printable(finding.cause)}")
    print(paint(f"The page is {out}, the data {out.with_suffix('.json')}.", DIM))


def _compare(before: Path, after: Path) -> int:
    from outrider_certify.certificate import Certificate, compare

    lines, worse = compare(Certificate.load(before), Certificate.load(after))
    for line in lines or ["nothing changed"]:
        print(printable(line))
    return int(worse)
