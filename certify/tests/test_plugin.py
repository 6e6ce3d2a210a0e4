"""The plugin of pytest, in runs of pytest of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken import ToyEngine  # numpy is then imported once, and not anew in each run of pytest

from outrider_certify import Certificate

pytest_plugins = ["pytester"]
ENGINES = """
from broken import ToyEngine

class Small(ToyEngine):
    def prompts(self):
        return super().prompts()[:2]

def right():
    return Small(rule="match")

def wrong():
    return Small("min_p dropped", "match")
"""


ONE_ROUND = "--budget 1h --deviation 1"  # so little is to be excluded that each kind ends after its first round


@pytest.fixture
def engines(pytester: pytest.Pytester) -> Iterator[Path]:
    pytester.makepyfile(engines_for_certify=ENGINES)
    yield pytester.path
    sys.modules.pop("engines_for_certify", None)


def run(pytester: pytest.Pytester, words: str, *more: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider", "-v", "--certify", words, *more)


def test_each_check_of_a_right_engine_is_a_test_with_a_name(pytester: pytest.Pytester, engines: Path) -> None:
    result = run(pytester, f"engines_for_certify:right --kind seeded --kind contract {ONE_ROUND}")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.re_match_lines([r"certify\[seeded\]::min_p PASSED", r"certify\[contract\]::logprobs PASSED"])
    result.stdout.re_match_lines([r"certify\[contract\]::grammar PASSED"])
    result.stdout.fnmatch_lines([f"{ToyEngine.name}: holds. The page is certificate.html."])
    made = Certificate.load(engines / "certificate.json")
    assert made.complete
    assert made.command.startswith("pytest --certify 'engines_for_certify:right")


def test_a_mistake_fails_the_tests_that_are_about_it_and_no_others(pytester: pytest.Pytester, engines: Path) -> None:
    result = run(pytester, f"engines_for_certify:wrong --kind seeded --kind contract {ONE_ROUND}")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.re_match_lines([r"certify\[seeded\]::min_p FAILED", r"certify\[contract\]::min_p FAILED"])
    result.stdout.fnmatch_lines(["*min_p is not applied under speculation*", "*plain *", "*speculation *"])
    assert result.parseoutcomes()["failed"] == 2


def test_what_the_budget_does_not_reach_is_inconclusive(pytester: pytest.Pytester, engines: Path) -> None:
    result = run(pytester, "engines_for_certify:right --kind seeded --budget 0.000001s")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["*top_p: INCONCLUSIVE: a budget of 0.000001s did not reach this check"])


def test_a_project_uses_the_fixtures_in_tests_of_its_own(pytester: pytest.Pytester, engines: Path) -> None:
    pytester.makepyfile(
        test_mine="def test_the_total_variation(certify_subject, certificate):\n"
        "    assert certify_subject.name == 'a toy engine'\n"
        "    assert [part.kind for part in certificate.parts] == ['contract']\n"
    )
    words = f"engines_for_certify:right --kind contract {ONE_ROUND}"
    assert run(pytester, words, "-m", "not certify").parseoutcomes()["passed"] == 1
    without = pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:cacheprovider", "-rs")
    without.stdout.fnmatch_lines(["*no engine is named: pytest --certify*"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("engines_for_certify:nothing", "cannot be imported"),
        ("engines_for_certify:right --budget soon", "such as 90s"),
        ("engines_for_certify:right --fast", "No such option*--fast"),
        ("engines_for_certify:right --help", "outrider-certify --help"),
        ("", "name what to certify"),
    ],
)
def test_wrong_words_are_explained(pytester: pytest.Pytester, engines: Path, words: str, why: str) -> None:
    result = run(pytester, words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{why}*"])


def test_several_processes_are_refused(pytester: pytest.Pytester, engines: Path) -> None:
    result = pytester.runpytest_inprocess("-n", "2", "--certify", "engines_for_certify:right")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*it cannot run with -n*"])


def test_an_engine_that_cannot_be_asked_any_more_is_not_asked_again(pytester: pytest.Pytester, engines: Path) -> None:
    pytester.makepyfile(
        ends_for_certify="from broken import ToyEngine\n"
        "class Ends(ToyEngine):\n"
        "    calls = 0\n"
        "    def prompts(self):\n"
        "        return super().prompts()[:2]\n"
        "    def generate(self, requests, variant):\n"
        "        self.calls += 1\n"
        "        if self.calls > 4:\n"
        "            raise OSError(f'the engine is gone at call {self.calls}')\n"
        "        return super().generate(requests, variant)\n"
        "def ends():\n    return Ends()\n"
    )
    result = run(pytester, "ends_for_certify:ends --kind contract")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*the engine is gone at call 5*"])
    result.stdout.no_fnmatch_line("*at call 6*")
    result.stdout.no_fnmatch_line("*INTERNALERROR*")
    sys.modules.pop("ends_for_certify", None)
