"""Budget, journal and resumption; the file, the page and the comparison of certificates."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from broken import ToyEngine

from outrider_certify.board import write_board
from outrider_certify.certificate import Certificate, CertificatePart, Conclusion, Finding, compare
from outrider_certify.page import render, words
from outrider_certify.statistical import Statistical
from outrider_certify.trials import CertificateKind, TrialJournal, run_kinds


class Counting(CertificateKind):
    """A kind whose trials take one second each, by its own clock."""

    def __init__(
        self, name: str = "counting", share: float = 1.0, count: int | None = None, *, last: int = 10**9
    ) -> None:
        self.name, self.share, self.count, self.last = name, share, count, last
        self.ran = list[int]()

    def trials(self):
        number = 0
        while self.count is None or number < self.count:
            yield (str(number), lambda n=number: self._run(n))
            number += 1

    def _run(self, number: int) -> dict:
        self.ran.append(number)
        Clock.now += 1
        return {"number": number}

    def done(self, records) -> bool:
        return records[-1]["number"] >= self.last

    def judge(self, records) -> CertificatePart:
        return CertificatePart(kind=self.name, conclusion=Conclusion.HOLDS, sentence=f"{len(records)} records.")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return Clock.now


def run(kinds, journal, seconds, **more):
    return [p.sentence for p in run_kinds(kinds, journal, seconds, clock=Clock(), **more)]


def test_time_is_shared_and_what_is_left_goes_on() -> None:
    assert run([Counting("a"), Counting("b", 3.0)], TrialJournal(None, {}), 8) == ["2 records.", "6 records."]
    assert run([Counting("a", count=1), Counting("b")], TrialJournal(None, {}), 8) == ["1 records.", "7 records."]
    assert run([Counting("a", last=2)], TrialJournal(None, {}), 100) == ["3 records."]
    assert run([Counting("a"), Counting("b")], TrialJournal(None, {}), 0) == ["1 records.", "1 records."]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "certificate.journal"
    first = Counting()
    run([first], TrialJournal(path, {"a": 1}), 3)
    second = Counting()
    journal = TrialJournal(path, {"a": 1})
    assert journal.resumed == 3
    assert run([second], journal, 5) == ["5 records."]
    assert second.ran == [3, 4]
    third = Counting()
    run([third], TrialJournal(path, {"a": 2}), 2)  # another subject: nothing is kept
    assert third.ran == [0, 1]


def test_half_a_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "certificate.journal"
    run([Counting()], TrialJournal(path, {}), 3)
    path.write_text(path.read_text()[:-9])
    again = Counting()
    run([again], TrialJournal(path, {}), 4)
    assert again.ran == [2, 3]
    assert TrialJournal(path, {}).resumed == 4


def test_a_resumed_certificate_is_the_same(tmp_path: Path) -> None:
    def part(path: Path | None, most: int) -> CertificatePart:
        [found] = run_kinds([Statistical(ToyEngine(), length=24)], TrialJournal(path, {}), 1e9, most=most)
        found.seconds = 0.0
        found.sentence = found.sentence.split(", ")[0]  # without the time
        return found

    whole = part(None, 6)
    part(tmp_path / "a.journal", 3)
    assert part(tmp_path / "a.journal", 6) == whole


def certificate(**parts: Conclusion) -> Certificate:
    made = [CertificatePart(kind=k, conclusion=c, sentence=f"{k} says {c.value}.") for k, c in parts.items()]
    return Certificate(subject="an engine", parts=made, complete=True)


def test_the_worst_part_decides() -> None:
    assert certificate(seeded=Conclusion.EXACT_TOKENS, contract=Conclusion.HOLDS).conclusion.exit_code == 0
    assert certificate(seeded=Conclusion.DIFFERS, contract=Conclusion.HOLDS).conclusion.exit_code == 1
    assert certificate(seeded=Conclusion.CANNOT_TELL, contract=Conclusion.NOT_TESTED).conclusion.exit_code == 3
    assert certificate(contract=Conclusion.NOT_TESTED).conclusion.exit_code == 3
    assert "says differs" in certificate(seeded=Conclusion.DIFFERS, contract=Conclusion.HOLDS).sentence


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = certificate(seeded=Conclusion.DIFFERS)
    made.parts[0].findings.append(Finding(title="it differs", cause="a cause", evidence="line\nline"))
    made.save(tmp_path / "a.json")
    assert Certificate.load(tmp_path / "a.json") == made
    assert made.parts[0].causes == ["a cause"]


@pytest.mark.parametrize("text", ["", "{}", '{"subject": 3}', "\ud800"])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, errors="surrogatepass")
    with pytest.raises(ValueError, match="is not a certificate"):
        Certificate.load(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(json.dumps({"subject": "x", "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        Certificate.load(tmp_path / "b.json")


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    certificate(seeded=Conclusion.DIFFERS).save(file)
    file.write_text(file.read_text().replace('"differs"', '"exact tokens"'))
    with pytest.raises(ValueError, match="was changed after it was written"):
        Certificate.load(file)


def test_a_board_has_a_row_for_each_certificate_and_leads_to_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no certificate"):
        write_board(tmp_path)
    ours = certificate(seeded=Conclusion.DIFFERS, contract=Conclusion.HOLDS)
    ours.parts[1].figures = {"checks": 1}
    ours.save(tmp_path / "ours.json")
    other = certificate(seeded=Conclusion.EXACT_TOKENS)
    other.subject, other.parts[0].figures = "<script>", {"tokens": 12000, "ties": 3}
    other.properties, other.versions, other.date = {"engine": "vLLM"}, {"server": "0.32.0"}, "2026-11-26T03:00:00+00:00"
    other.save(tmp_path / "theirs.json")
    html = write_board(tmp_path).read_text()
    heads = re.findall("<th>(.*?)</th>", html)
    assert heads == ["certificate", "seeded", "contract"]
    assert re.findall(r'<a class="verdict word (\w+)" href="(\w+).html">(.*?)</a>', html) == [
        ("bad", "ours", "differs"), ("good", "ours", "holds"), ("good", "theirs", "exact tokens"),
    ]  # fmt: skip
    assert "12,000 tokens; 3 ties" in html
    assert "1 check<" in html
    assert "vLLM 0.32.0, 2026-11-26" in html
    assert "<script>" not in html


def test_a_comparison_says_what_changed() -> None:
    before, after = certificate(seeded=Conclusion.EXACT_TOKENS), certificate(seeded=Conclusion.DIFFERS)
    lines, worse = compare(before, after)
    assert worse
    assert "exact tokens before, differs now" in lines[0]
    assert compare(after, before)[1] is False
    assert compare(before, before) == ([], False)
    assert compare(before, certificate(contract=Conclusion.HOLDS)) == (
        ["contract: tested now, not before. contract says holds.", "seeded: tested before, not now"],
        True,
    )


def test_the_page_shows_texts_as_text() -> None:
    made = certificate(seeded=Conclusion.DIFFERS)
    made.parts[0].findings.append(Finding(title="<script>alert(1)</script>", cause="a & b", evidence="\x1b[31m"))
    page = render(made)
    assert "<script>" not in page
    assert "a &amp; b" in page
    assert "\x1b" not in page


def test_the_page_speaks_in_words() -> None:
    made = certificate(statistical=Conclusion.HOLDS)
    made.subject = 'transformers 5, code, {"assistant_model": "draft", "k": 4}'
    made.parts[0].figures = {"p_values": {"two tokens": 0.25}, "tests_level": 0.001}
    page = render(made)
    assert "<title>Certificate: transformers 5, code, assistant_model draft, k 4</title>" in page
    assert '<p class="subject">transformers 5, code, assistant_model draft, k 4</p>' in page
    assert '<th scope="row">two tokens</th><td>0.25</td>' in page
    assert "<strong>Total variation</strong> says" in page
    assert words("a server, {half") == "a server, {half"
    assert words("smollm2") == "smollm2"


def test_the_table_of_published_certificates_is_that_of_their_files() -> None:
    path = Path(__file__).parents[2] / "docs" / "certificates.py"
    spec = importlib.util.spec_from_file_location("published", path)
    assert spec is not None
    assert spec.loader is not None
    published = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(published)
    text = (published.FOLDER / "README.md").read_text(encoding="utf-8")
    assert published.page(text) == text, "run: python docs/certificates.py"
