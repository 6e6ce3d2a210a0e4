"""The plugin of pytest: `pytest --certify "http://127.0.0.1:8000 --budget 10m"` adds a test for each check of an engine.

The words after `--certify` are those of the command line. All checks belong to one certificate, which the first of these tests
makes. A test passes, fails with the evidence, or is INCONCLUSIVE, which is a skipped test of pytest. A project can use the
fixtures `certify_subject` and `certificate`, and select the tests with `-m certify`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from outrider_certify.certificate import Certificate, CertificatePart
    from outrider_certify.cli import CertifyOptions
    from outrider_certify.trials import CertificateKind

INCONCLUSIVE = "INCONCLUSIVE"
_EXAMPLE = 'pytest --certify "http://127.0.0.1:8000 --budget 10m"'


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("certify", "certify an inference engine").addoption(
        "--certify", metavar="WORDS", help=f"The words of outrider-certify: a subject and its options. {_EXAMPLE}"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "certify: a check of an engine, which --certify adds.")
    words = config.getoption("certify")
    if words is None:
        return
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(f"--certify asks one engine one thing at a time, so it cannot run with -n: {_EXAMPLE}")
    config.stash[_SESSION] = _Certification(words)


class _Certification:
    """One certificate for a whole run of pytest."""

    def __init__(self, words: str) -> None:
        from outrider_certify.cli import started
        from outrider_certify.run import kinds_of

        self.words = words
        try:
            self.options = _parsed(words)
            self.subject, self.settings, self.journal = started(self.options, {})
            self.kinds = kinds_of(self.subject, self.options.kind or (), self.settings)
        except (ValueError, OSError) as error:
            raise pytest.UsageError(f"--certify: {' '.join(str(error).split())}") from None
        self.result: Certificate | None = None
        self.failed: Exception | None = None

    @property
    def certificate(self) -> Certificate:
        """The certificate. The first call makes it, and that takes the budget."""
        if self.result is not None:
            return self.result
        if self.failed is not None:  # it is not asked again for each test
            pytest.fail(f"{type(self.failed).__name__}: {self.failed}", pytrace=False)
        try:
            return self._make()
        except Exception as error:
            self.failed = error
            raise

    def _make(self) -> Certificate:
        from outrider_certify.cli import certified

        command = f"pytest --certify {shlex.quote(self.words)}"
        words = self.options, self.subject, self.settings, self.journal
        self.result, stopped = certified(*words, lambda line: None, command)
        if stopped:
            raise KeyboardInterrupt
        return self.result

    def part(self, kind: CertificateKind, check: str) -> CertificatePart | None:
        """What the records of one check say; None if the budget did not reach it."""
        from outrider_certify.trials import judged

        part = self.certificate.part(kind.name)
        if not check or part is None:
            return part
        records = [r for r in self.journal.of(kind.name) if check in (r.get("set"), r["key"])]
        if not records:
            return None
        part = judged(kind, records)
        part.seconds = sum(r["seconds"] for r in records)
        return part


_SESSION = pytest.StashKey[_Certification]()


def _parsed(words: str) -> CertifyOptions:
    """The options of the command line. Raises ValueError for words that it does not know."""
    import typer

    from outrider_certify.cli import CertifyOptions, app

    try:
        context = typer.main.get_command(app).make_context("--certify", shlex.split(words))
    except typer.Exit:
        raise ValueError("the help is at: outrider-certify --help") from None
    except Exception as error:
        # click's errors: an older typer has them in click, a newer one in a copy of its own
        if not hasattr(error, "format_message"):
            raise
        raise ValueError(error.format_message()) from None  # pyright: ignore[reportAttributeAccessIssue]
    return CertifyOptions(**context.params)


@pytest.fixture(scope="session")
def certify_subject(pytestconfig: pytest.Config) -> Any:
    """The subject that `--certify` names. Tests that ask for it are skipped without the option."""
    return _of(pytestconfig).subject


@pytest.fixture(scope="session")
def certificate(pytestconfig: pytest.Config) -> Any:
    """The certificate of the subject. It is made once, within the budget."""
    return _of(pytestconfig).certificate


def _of(config: pytest.Config) -> _Certification:
    certification = config.stash.get(_SESSION, None)
    if certification is None:
        pytest.skip(f"no engine is named: {_EXAMPLE}")
    return certification


# -- the tests ----------------------------------------------------------------------------------------------------------------


class CertifiedKind(pytest.Collector):
    """The tests of a kind: one for each check, or one for all of it."""

    def __init__(self, *, certification: _Certification, kind: CertificateKind, **node: Any) -> None:
        super().__init__(**node)
        self.certification, self.kind = certification, kind
        self.add_marker("certify")

    def collect(self) -> Iterator[pytest.Item]:
        for check in self.kind.checks_by_name() or ("all",):
            yield CertifiedCheck.from_parent(self, name=check)


class CertifiedCheck(pytest.Item):
    """One check. Its outcome is that of its records in the certificate."""

    parent: CertifiedKind

    def runtest(self) -> None:
        certification, kind = self.parent.certification, self.parent.kind
        check = self.name if kind.checks_by_name() else ""
        part = certification.part(kind, check)
        if part is None:
            pytest.skip(f"{INCONCLUSIVE}: a budget of {certification.options.budget} did not reach this check")
        self.user_properties.append(("budget", f"{part.seconds:.1f} s"))
        if part.conclusion.colour == "bad":
            raise _Differs(part)
        if part.conclusion.colour == "unsure":
            why = part.skipped[0] if part.skipped else part.sentence
            pytest.skip(f"{INCONCLUSIVE} after {part.seconds:.1f} s: {why}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, _Differs) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, f"{self.parent.name}: {self.name}"


class _Differs(Exception):
    """A check that failed: the sentence of its part, and the evidence of each finding."""

    def __init__(self, part: CertificatePart) -> None:
        lines = [f"{part.sentence} ({part.seconds:.1f} s of the budget)"]
        for f in part.findings:
            lines += [f"- {f.title}" + (f": {f.cause}" if f.cause else ""), *([f"  {f.where}"] if f.where else ())]
            lines += [f"    {line}" for line in f.evidence.splitlines()]
        super().__init__("\n".join(lines))


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    certification = config.stash.get(_SESSION, None)
    if certification is None:
        return
    for kind in certification.kinds:
        name = f"certify[{kind.name}]"
        parent = CertifiedKind.from_parent(
            session, certification=certification, kind=kind, name=name, nodeid=name, path=config.rootpath
        )
        items.extend(item for item in parent.collect() if isinstance(item, pytest.Item))


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    if report.skipped and isinstance(report.longrepr, tuple) and INCONCLUSIVE in str(report.longrepr[2]):
        return "inconclusive", "i", INCONCLUSIVE
    return None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    certification = config.stash.get(_SESSION, None)
    if certification is None or certification.result is None:
        return
    result, out = certification.result, certification.options.out
    terminalreporter.section("certificate")
    for report in terminalreporter.stats.get("inconclusive", ()):
        terminalreporter.write_line(f"{report.nodeid}: {report.longrepr[2].removeprefix('Skipped: ')}")
    terminalreporter.write_line(f"{result.subject}: {result.conclusion.value}. The page is {out}.")
