"""The report: one page, nothing in it but text and tables, and a verdict that follows from the numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import HOSTILE, PLAIN_SETTING, WORDS, Simulated, simulate
from typer.testing import CliRunner

from outrider.cli import main as cli
from outrider.core import intervals
from outrider.core.intervals import Interval
from outrider_lab.bench import stats
from outrider_lab.bench.report.analysis import analyse, summary
from outrider_lab.bench.report.compare import versions
from outrider_lab.bench.report.page import render, visible, write
from outrider_lab.bench.report.recommend import BROKEN, CHANGE, DROP, KEEP, OPEN, recommend
from outrider_lab.bench.run import Run, Sample

VOID = {"meta", "br", "img", "link", "input", "hr"}
TAGS = (
    "html head meta title style body main header section article h1 h2 h3 p b bdi time div ul li pre code figure table "
    "thead tbody tr th td small details summary span dl dt dd"
)


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intervals, "DRAWS", 200)


class Page(HTMLParser):
    """Reads a page strictly: every tag known and closed in order. text: what a reader sees."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.links: list[str] = []
        self.heads: list[dict[str, str | None]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS.split(), f"where does <{tag}> come from?"
        given = dict(attrs)
        assert not any(name.startswith("on") for name in given), given
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "action", "xlink:href", "style")]
        if tag == "th":
            self.heads.append(given)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.text += data


def read(run: Run, other: Run | None = None) -> Page:
    html, _ = render(run, other=other)
    page = Page(html)
    assert not page.links
    assert not re.search(r"@import|url\(|https?://(?!127)", html)
    assert all(head.get("scope") in ("col", "row") for head in page.heads)
    assert "nan" not in html.lower().replace("nano", "")
    assert "inf " not in page.text
    return page


def _without(run: Run, **values: object) -> Run:
    return run.model_copy(update={"samples": [s.model_copy(update=values) for s in run.samples]})


PLAIN, DRAFT = PLAIN_SETTING, Simulated("draft 4", 4)
MANY = PLAIN, DRAFT, Simulated("draft 8", 8), Simulated("wrong", 8, 0.0), Simulated("int8", 3, 0.9, differing=0.2)
RUNS: dict[str, Callable[[], Run]] = {
    "two settings": simulate,
    "many": lambda: simulate(*MANY),
    "plain only": lambda: simulate(PLAIN),
    "one prompt": lambda: simulate(prompts=1, repeats=1),
    "one token": lambda: simulate(tokens=1, prompts=4),
    "remote": lambda: simulate(PLAIN, DRAFT, details=False),
    "incomplete": lambda: simulate(complete=False),
    "first answer only": lambda: simulate().model_copy(update={"samples": simulate().samples[:1], "complete": False}),
    "no baseline": lambda: simulate(replace(PLAIN, failing=1.0), DRAFT),
    "only the baseline": lambda: simulate(PLAIN, replace(DRAFT, failing=1.0)),
    "some failures": lambda: simulate(PLAIN, replace(DRAFT, failing=0.3)),
    "one category": lambda: simulate(categories=("all",)),
    "hostile": lambda: simulate(PLAIN, Simulated("d", 4, differing=0.5), words=HOSTILE, prompts=6),
    "no phases": lambda: _without(simulate(), phases={}),
    "no gaps": lambda: _without(simulate(), gaps=[], ttft=None),
    "nothing written": lambda: _without(simulate(), output_tokens=0, token_ids=[], pieces=[], origins="", text=""),
    "no time passed": lambda: _without(simulate(), seconds=0.0),
    "trees": lambda: simulate(PLAIN, Simulated("tree", 4, config={"tree_width": 2})),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_page_of_every_run_is_whole(name: str) -> None:
    run = RUNS[name]()
    page = read(run)
    assert "How it was measured" in page.text
    assert "outrider bench prompts.jsonl" in page.text
    said = recommend(run)
    assert said.label in page.text
    assert said.headline in page.text


def test_what_prompts_and_models_write_is_only_text(tmp_path: Path) -> None:
    name = "<b onclick='x'>\"><i>\u202e{{ 1 }}"
    run = simulate(
        PLAIN_SETTING, Simulated(name, 4, differing=0.5), words=HOSTILE, prompts=6, categories=(name, "</table>")
    )
    run.command = run.model = "<script>"
    run.machine = {"<i>": "<i>"}
    run.sampling = {"stop": ["</pre>"]}
    run.settings[1].speculative_config = {"method": "</code><script>"}
    page = read(run)  # knows no script, and no tag that the template does not write
    assert "</script><script>alert(1)</script>" in page.text
    assert "<img src=x onerror=alert(2)>" in page.text
    assert "{{ 7*7 }}" in page.text
    html, _ = render(run)
    assert not set(html) & set("\x00\x1b\u202e")
    assert "script-src" not in html
    assert "default-src 'none'" in html
    write(run, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == html
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_hidden_characters_are_shown() -> None:
    assert visible("a\n\tb\x00\x1b[0m\u202ec\x85") == "a\n\tb␀␛[0m⟨202E⟩c⟨0085⟩"


def test_half_a_character_does_not_stop_the_page(tmp_path: Path) -> None:
    run = simulate(prompts=2)
    run.prompts[0].text = "half \ud83d"
    write(run, tmp_path / "page.html")
    assert "half ?" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_page_is_small() -> None:
    run = simulate(PLAIN_SETTING, Simulated("draft 4", 4), prompts=200, tokens=60)
    html, _ = render(run)
    assert len(html) < 200_000
    assert len(html) < len(run.model_dump_json()) / 4


D, WRONG = Simulated("d", 4), Simulated("wrong", 4, 0.0)
OTHER = replace(D, differing=0.3)
RECOMMENDATIONS = {
    "faster": ([], {}, KEEP, "times as fast as plain"),
    "slower": ([WRONG], {}, DROP, "wrong is slower"),
    "the same": ([Simulated("again", guarantee=None)], {"prompts": 60}, DROP, "not worth a setting"),
    "noise": ([Simulated("again", guarantee=None)], {"prompts": 8, "noise": 0.3}, OPEN, "can be chance"),
    "one prompt": ([], {"prompts": 1}, OPEN, "one prompt is too few"),
    "a broken promise": ([OTHER], {}, BROKEN, "Do not trust d"),
    "one of two broken": ([D, Simulated("bad", 6, differing=0.2)], {}, BROKEN, "Do not trust bad"),
    "no guarantee": ([replace(OTHER, guarantee=None)], {}, KEEP, "times as fast"),
    "nobody but the baseline": ([replace(D, failing=1.0)], {}, OPEN, "d gave no answer"),
    "one bad category": (
        [replace(D, categories={"prose": 0.02})],
        {},
        CHANGE,
        "differs too much from prompt to prompt",
    ),
}


def against_plain(settings: list[Simulated], **more: Any) -> Run:
    return simulate(*([PLAIN_SETTING, *settings] if settings else ()), **more)


@pytest.mark.parametrize("name", RECOMMENDATIONS)
def test_the_verdict_follows_from_the_numbers(name: str) -> None:
    settings, more, kind, words = RECOMMENDATIONS[name]
    said = recommend(against_plain(settings, **more))
    assert (said.kind, words in said.headline) == (kind, True), said
    assert (said.config is not None) == (kind == KEEP)


def test_runs_that_compare_nothing_have_no_verdict() -> None:
    for run, words in (
        (simulate(PLAIN_SETTING), "nothing to compare"),
        (simulate(Simulated("plain", failing=1.0), D), "plain gave no answer"),
    ):
        said = recommend(run)
        assert (said.kind, words in said.headline) == (OPEN, True), said


def test_an_interval_without_an_end_is_no_crash() -> None:
    run = simulate(prompts=3)
    plain, draft = analyse(run)
    said = recommend(run, [plain, replace(draft, ratio=Interval(1e-9, 0.0, 2.0, 3))])
    assert "differs too much from prompt to prompt" in said.headline


@pytest.mark.parametrize(
    ("settings", "more", "words"),
    [
        ([], {}, "Identical texts: all 48 answers of draft 4 are equal to those of plain"),
        ([], {"complete": False}, "64 of 96 answers are here"),
        ([replace(D, failing=0.3)], {}, "Most often: connection refused"),
        ([replace(OTHER, guarantee=None)], {}, "judge the quality"),
        ([replace(OTHER, guarantee="exact-distribution")], {}, "rounding decides"),
        ([replace(OTHER, guarantee="exact-distribution")], {"temperature": 1.0}, "the distribution is the same"),
        ([OTHER], {"details": False}, "There is no guarantee"),
        ([replace(D, categories={"prose": 0.02})], {}, "slower for prose"),
        ([D, Simulated("e", 4)], {}, "not clearly slower than"),
        ([D, WRONG], {}, "slower than d"),
        ([], {"tokens": 4}, "of the time is outside of steps"),
    ],
)
def test_reasons(settings: list[Simulated], more: dict[str, Any], words: str) -> None:
    said = recommend(against_plain(settings, **more))
    assert words in " ".join([said.headline, *said.reasons, *said.advice])


def test_nothing_is_said_without_a_reason() -> None:
    assert len(recommend(simulate()).reasons) == 2
    assert recommend(simulate()).advice == []


def test_tokens_are_marked_by_origin_without_colour_too() -> None:
    html, _ = render(simulate(prompts=4))
    for kind, line in {"accepted": "solid", "corrected": "wavy", "bonus": "double"}.items():
        assert f'<span class="{kind}">' in html
        assert f'<span class="origin {kind}">{kind}</span>' in html
        assert re.search(rf"\.{kind} {{[^}}]*underline {line}", html)
    run = simulate(prompts=4)
    run.samples[1].origins = "aa"  # fewer than tokens: nobody knows whose they are
    page = read(_without(run, origins="aa"))
    assert "is unknown" in page.text


def test_texts_that_part_are_shown_where_they_part() -> None:
    run = simulate(PLAIN_SETTING, Simulated("d", 4, differing=0.2), prompts=10)
    found = analyse(run)[1].texts
    assert found is not None
    assert found.differing == len(stats.differing(stats.answered(run, "d"), stats.answered(run, "plain"))[0]) > 0
    assert {d.at for d in found.examples} == {40}
    assert all(d.base != d.ours for d in found.examples)
    assert "token 41" in read(run).text


def test_figures_against_arithmetic() -> None:
    steps = {"drafted": [4, 4, 2, 0], "accepted": [4, 1, 2, 0]}
    sample = Sample(prompt="p", setting="s", repeat=0, turn=0, seconds=1.0, output_tokens=11, **steps)
    assert stats.by_depth(stats.steps([sample])) == [(3, 3), (3, 2), (1, 1), (1, 1)]


def test_the_page_has_the_spread_over_prompts_and_the_times_of_all_settings() -> None:
    run = simulate(prompts=8)
    text = " ".join(read(run).text.split())
    ratios = analyse(run)[1].prompts.values()
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as plain. 0 of 8 prompts slower." in text
    times = [1000 * (s.ttft or 0.0) for s in stats.answered(run, "plain")]
    percentiles = "".join(f"{x:.1f}" for x in np.percentile(times, (50, 90, 99)))
    assert f"tothefirsttokenplain{percentiles}" in "".join(text.split())
    assert "one prompt" in read(simulate(prompts=1)).text


@pytest.mark.parametrize(
    ("factor", "kind", "words"),
    [
        (0.8, "better", "This is more than noise"),
        (1.25, "worse", "This is more than noise"),
        (1.0, "noise", "This is not more than noise"),
    ],
)
def test_two_runs_are_compared(factor: float, kind: str, words: str) -> None:
    before, after = simulate(seed=3), simulate(PLAIN_SETTING, Simulated("draft 4", 4, factor=factor), seed=3)
    if kind == "noise":
        after = after.model_copy(update={"samples": simulate(seed=3, noise=0.031).samples})
    html, _ = render(after, other=before)
    assert f'class="recommendation {kind}"' in html
    page = read(after, before)
    assert words in page.text
    assert page.text.index("What changed since") < page.text.index("All answers of each setting")


def test_what_else_differed_between_two_runs_is_said() -> None:
    before, after = simulate(), simulate(Simulated("plain", factor=1.3), Simulated("draft 5", 5, factor=1.3), seed=2)
    before.model = "another"
    text = read(after, before).text
    assert "draft 5 is compared with draft 4" in text
    assert "plain itself changed" in text
    assert "The runs differ in model and prompts" in text


def test_runs_without_a_common_setting() -> None:
    other = simulate(Simulated("a"), Simulated("b", 4))
    assert "no setting with answers to the same prompts" in read(simulate(), other).text


def test_two_versions_of_a_drafter() -> None:
    old, new = Simulated("before", 4, alpha=0.6), Simulated("after", 4, alpha=0.9, differing=0.1)
    run = simulate(PLAIN_SETTING, old, new)
    told = summary(run)["after"]["over_before"]
    before, after = (stats.answered(run, name) for name in ("before", "after"))
    paired = stats.ratio(after, before)
    assert paired is not None
    assert told["tokens/s"] == pytest.approx({"value": paired.value, "low": paired.low, "high": paired.high})
    lengths = [a.length for some in (after, before) if (a := stats.acceptance(some))]
    assert told["acceptance length"]["value"] == pytest.approx(lengths[0] / lengths[1])
    assert 1 < told["acceptance length"]["low"] < told["acceptance length"]["high"]
    assert told["texts_differing"] == len(stats.differing(after, before)[0]) > 0
    page = read(run).text
    for words in (
        "What changed from before to after",
        f"Tokens a step: {lengths[1]:.2f} before, {lengths[0]:.2f} after, +",
        f"{48 - told['texts_differing']} of 48 texts are equal before and after",
    ):
        assert words in page
    assert versions(simulate(PLAIN_SETTING, old)) is None
    assert versions(simulate(PLAIN_SETTING, old, replace(new, failing=1.0))) is None


def test_the_command(tmp_path: Path) -> None:
    def report(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli.app, ["bench", *words])
        return result.exit_code, result.output

    one, two = tmp_path / "one.json", tmp_path / "two.json"
    simulate().save(one)
    simulate(seed=2).save(two)
    code, said = report("--report", str(one))
    assert code == 0
    assert said.startswith("Keep it: draft 4 is 1.8")
    Page((tmp_path / "one.html").read_text(encoding="utf-8"))
    assert report("--report", str(one), "--report", str(two))[0] == 0
    assert "What changed" in (tmp_path / "one-two.html").read_text(encoding="utf-8")
    assert report("--report", str(one), "--html", str(tmp_path / "page.html"))[0] == 0
    assert (tmp_path / "page.html").exists()


def _empty() -> Run:
    return simulate(prompts=2).model_copy(update={"samples": []})


def _failed() -> Run:
    return simulate(replace(PLAIN, failing=1.0), replace(DRAFT, failing=1.0), prompts=2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda: "{}", "is not a measurement"),
        (lambda: "# a page", "is not a measurement"),
        (lambda: b"\xff\xfe\x00", "Invalid JSON"),
        (lambda: simulate(prompts=2).model_copy(update={"format": 99}).model_dump_json(), "format 99"),
        (lambda: _empty().model_dump_json(), "ended before the first"),
        (lambda: _failed().model_dump_json(), "connection refused"),
    ],
)
def test_errors_teach(tmp_path: Path, content: Callable[[], str | bytes], words: str) -> None:
    file, text = tmp_path / "run.json", content()
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    result = CliRunner().invoke(cli.app, ["bench", "--report", str(file)])
    assert result.exit_code == 2
    assert words in result.output
    assert not (tmp_path / "run.html").exists()


def test_the_page_does_not_overwrite_the_run(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    simulate().save(file)
    for words, said in (([str(file)], "would overwrite"), ([str(tmp_path / "no" / "page.html")], "there is no folder")):
        result = CliRunner().invoke(cli.app, ["bench", "--report", str(file), "--html", *words])
        assert result.exit_code == 2
        assert said in result.output
    with pytest.raises(ValueError, match="earlier run is empty"):
        render(simulate(), other=_empty())


def test_words_of_the_simulation_are_the_ones_shown() -> None:
    assert "# of a circle" in WORDS
    assert "# of a circle" in read(simulate(prompts=3)).text
