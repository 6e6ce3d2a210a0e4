"""A figure that stands on several pages is the same on all, and that of the code or of the result file which it comes from."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from ml_dtypes import bfloat16

from benchmarks.table import DOCUMENT, MARKER, README, TREES, newest
from outrider.cli.main import app
from outrider.kernels.vectors import packed_width
from outrider.models.builtin.download import DOWNLOADS
from outrider.serve import connection, grammar

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def default(command: str, option: str) -> Any:
    return next(p.default for p in COMMANDS[command].params if p.name == option)


def result(name: str) -> dict[str, Any]:
    found = newest(name)
    assert found, f"benchmarks/results has no {name}"
    return found


def real(name: str, key: str, **where: Any) -> list[float]:
    """This ratio of all records of a result of `benchmarks.real` that have these fields."""
    every = [r for r in result(name)["records"] if all(r[k] == v for k, v in where.items())]
    assert every, (name, where)
    return sorted(r[key]["value"] for r in every)


def speedup(workload: str, setting: str = "auto") -> str:
    [value] = real("real-planner", "speedup", workload=workload, setting=setting, temperature=0)
    return f"{value:.1f}"


def span(values: list[float]) -> str:
    return f"{values[0]:.1f} to {values[-1]:.1f}"


def worst(*machines: str) -> str:
    """The slowest first request on these tables of costs."""
    every = [r for r in result("replays")["records"] if r["machine"] in machines]
    return f"{min(s['worst'] for r in every for s in r['settings'] if s['setting'] == 'auto, first request'):.2f}"


def classes(path: str | None = None) -> str:
    runs = [
        one for one in json.loads((ROOT / "docs/models.json").read_text())["models"].values() if one["status"] == "runs"
    ]
    return str(len([one for one in runs if path in (None, one["path"])]))


def int8_of_bfloat16() -> str:
    return f"{100 * packed_width(64, np.dtype(np.int8)) / (64 * np.dtype(bfloat16).itemsize):.0f}"


def accepted(arm: str) -> str:
    """Accepted tokens a step of the built-in pair at temperature 1 with 8 nodes."""
    [record] = [r for r in result("trees")["trees"] if (r["arm"], r["temperature"], r["nodes"]) == (arm, 1.0, 8)]
    return f"{record['accepted']:.2f}"


def pinned(package: str) -> str:
    return re.findall(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)[0]


def file_size(name: str) -> str:
    return f"{result('real-planner')['files'][name]['bytes'] / 1e6:,.0f}"


def lowest_python() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")


# What -> (where it comes from, and a pattern for each page that says it, with the figure in its group).
FACTS: dict[str, tuple[Callable[[], str], dict[str, str]]] = {
    "megabytes of SmolLM2": (
        lambda: DOWNLOADS["builtin:smollm2-135m"].megabytes,
        {
            "README.md": r"once \((\d+ MB)|model of (\d+ MB)",
            "docs/start.md": r"once \((\d+ MB)|model of (\d+ MB)",
            "docs/guides/packs.md": r"GGUF file of (\d+ MB)",
            "lab/outrider_lab/cli/demo.py": r"once \((\d+ MB)",
        },
    ),
    "megabytes of the 1.5B": (
        lambda: file_size("qwen2.5-coder-1.5b.gguf"),
        {"docs/guides/gguf.md": r"([\d,]+) and \d+ MB", "docs/guides/memory.md": r"1\.5B-Instruct, Q4_K_M \| ([\d,]+)"},
    ),
    "megabytes of the 0.5B": (
        lambda: file_size("qwen2.5-coder-0.5b.gguf"),
        {"docs/guides/gguf.md": r"[\d,]+ and (\d+) MB", "docs/guides/memory.md": r"0\.5B-Instruct, Q4_K_M \| ([\d,]+)"},
    ),
    "gigabytes of make": (
        lambda: "3.1",  # measured: du -s .venv
        {"README.md": r"everything: (\d\.\d) GB", "docs/guides/operate.md": r"`make install` takes (\d\.\d) GB"},
    ),
    "prose with auto": (
        lambda: speedup("talk"),
        {
            "README.md": r"`auto` is (\d\.\d) and \d\.\d\s+times",
            "docs/performance.md": r"On prose it was (\d\.\d) times",
            "docs/faq.md": r"with a draft model was (\d\.\d) to",
        },
    ),
    "maths with auto": (
        lambda: speedup("maths"),
        {
            "README.md": r"`auto` is \d\.\d and (\d\.\d)\s+times",
            "docs/performance.md": r"on mathematics (\d\.\d) times",
            "docs/faq.md": r"with a draft model was \d\.\d to (\d\.\d)",
        },
    ),
    "code and edits with auto": (
        lambda: f"{speedup('code')} and {speedup('edit')}",
        {"docs/performance.md": r"`auto` was (\d\.\d and\s+\d\.\d) times"},
    ),
    "edits with auto": (
        lambda: f"{float(speedup('edit')):.0f}",
        {"docs/faq.md": r"such as edits, were about (\d) times"},
    ),
    "the 1.5B over llama.cpp, both for AVX-512": (
        lambda: span(real("real-native", "over_llama_plain", setting="plain", target="qwen2.5-coder-1.5b.gguf")),
        {"README.md": r"plain decoding is (\d\.\d to \d\.\d) times"},
    ),
    "plain decoding over llama.cpp, both for AVX-512": (
        lambda: span(real("real-native", "over_llama_plain", setting="plain")),
        {"docs/performance.md": r"Plain decoding was (\d\.\d to \d\.\d) times"},
    ),
    "plain decoding over llama.cpp, both with AVX2": (
        lambda: span(real("real-avx2", "over_llama_plain", setting="plain")),
        {"docs/performance.md": r"With AVX2 on both sides it was (\d\.\d to\s+\d\.\d) times"},
    ),
    "draft tokens of llama.cpp": (
        lambda: " ".join(
            sorted(
                {
                    n
                    for name in ("real-planner", "real-full")
                    for r in result(name)["records"]
                    for n in re.findall(r"^llama.cpp draft (\d+)", r["setting"])
                }
            )
        ),
        {
            "README.md": r"It drafts (\d) tokens a step|llama\.cpp, draft (\d)",
            "docs/performance.md": r"it drafts (\d) tokens a step",
        },
    ),
    "drafts that are always wrong": (
        lambda: f"{min(c['whole'] for c in result('never-slower')['cases']):.2f}",
        {"docs/performance.md": r"cannot gain had (\d\.\d+) of plain speed"},
    ),
    "the cost of drafts that are always wrong": (
        lambda: f"{100 - 100 * min(c['whole'] for c in result('never-slower')['cases']):.0f}",
        {"docs/faq.md": r"always wrong \[cost (\d) %"},
    ),
    "the slowest text with a draft model": (
        lambda: worst("quiet", "vnni", "never", "gpu"),
        {
            "docs/faq.md": r"had (\d\.\d\d) of plain speed with a draft model",
            "docs/guides/tune.md": r"falls below (\d\.\d\d)",
        },
    ),
    "the slowest text with a head": (
        lambda: worst("head"),
        {"docs/faq.md": r"and (\d\.\d\d) with a head", "docs/guides/tune.md": r"without-a-clock\)\s+has (\d\.\d\d)\."},
    ),
    "classes that run": (classes, {"docs/faq.md": r"Of (\d+) classes", "docs/models.md": r"\| runs \| (\d+) \|"}),
    "classes that run natively": (lambda: classes("native"), {"docs/faq.md": r"classes (\d+) run natively"}),
    "int8 keys and values, of bfloat16": (
        int8_of_bfloat16,
        {
            "docs/guides/memory.md": r"int8` takes (\d+) % of bfloat16",
            "docs/guides/serve.md": r"int8` keeps them in (\d+) % of bfloat16",
        },
    ),
    "slots": (
        lambda: str(default("serve", "max_num_seqs")),
        {"docs/guides/memory.md": r"`--max-num-seqs`, (\d+) by default"},
    ),
    "the prefix cache": (
        lambda: str(default("serve", "prefix_cache")),
        {"docs/guides/memory.md": r"`--prefix-cache`, (\d+) MiB by default"},
    ),
    "the queue": (lambda: str(default("serve", "max_queue")), {"SECURITY.md": r"waiting sequences \| (\d+);"}),
    "requests at once": (
        lambda: str(default("serve", "max_connections")),
        {"SECURITY.md": r"requests at once \| (\d+) "},
    ),
    "the time of a request": (
        lambda: f"{default('serve', 'request_timeout'):.0f}",
        {"SECURITY.md": r"waiting included \| (\d+) s"},
    ),
    "the body of a request": (
        lambda: f"{default('serve', 'max_body') // 1024} MiB",
        {
            "SECURITY.md": r"body of a request \| (\d+ MiB)",
            "docs/guides/serve.md": r"\| body \| (\d+ MiB)",
            "docs/guides/operate.md": r"A body of (\d+ MiB) and a byte",
        },
    ),
    "the head of a request": (
        lambda: f"{connection.HEAD >> 10} KiB",
        {
            "SECURITY.md": r"head of a request \| (\d+ KiB)",
            "docs/guides/serve.md": r"head of a request \| (\d+ KiB)",
        },
    ),
    "the time of a head": (
        lambda: f"{connection.HEAD_SECONDS:.0f} s",
        {"SECURITY.md": r"KiB, and (\d+ s) from", "docs/guides/serve.md": r"time to send a head.*\| (\d+ s)"},
    ),
    "a grammar": (
        lambda: f"{grammar.MAX_BYTES >> 20} MiB",
        {
            "SECURITY.md": r"a grammar \| (\d+ MiB)",
            "docs/guides/serve.md": r"a schema, regular expression or list of choices \| (\d+ MiB)",
        },
    ),
    "seconds of tune": (lambda: f"{default('tune', 'seconds'):.0f}", {"docs/guides/tune.md": r"`--seconds` \((\d+)\)"}),
    "torch": (lambda: pinned("torch"), {"docs/guides/operate.md": r"`([\d.]+)\+cpu` comes before|before `([\d.]+)`"}),
    "python": (
        lowest_python,
        dict.fromkeys(
            ("README.md", "docs/start.md", "docs/guides/operate.md", "Makefile"), r"Python (\d\.\d+) or newer"
        ),
    ),
    "a chain of match": (
        lambda: accepted("chain, match (shared noise)"),
        {"docs/guides/choose.md": r"\| `match` \| (\d\.\d\d) \|"},
    ),
    "a tree of match": (
        lambda: accepted("tree, match: noise-aware, best first"),
        {"docs/guides/choose.md": r"\| `match` \| \d\.\d\d \| (\d\.\d\d) \|"},
    ),
    "a chain of rejection": (
        lambda: accepted("chain, rejection"),
        {"docs/guides/choose.md": r"\| `rejection` \| (\d\.\d\d) \|"},
    ),
    "a tree of rejection": (
        lambda: accepted("tree, rejection without replacement"),
        {"docs/guides/choose.md": r"\| `rejection` \| \d\.\d\d \| (\d\.\d\d) \|"},
    ),
    "a chain of block": (lambda: accepted("chain, block"), {"docs/guides/choose.md": r"\| `block` \| (\d\.\d\d) \|"}),
    "a tree of traversal": (
        lambda: accepted("tree, traversal"),
        {"docs/guides/choose.md": r"\| `traversal` \| \| (\d\.\d\d) \|"},
    ),
}


@pytest.mark.parametrize("what", FACTS)
def test_a_figure_is_the_same_wherever_it_stands(what: str) -> None:
    source, pages = FACTS[what]
    true = source()
    for page, pattern in pages.items():
        told = [
            next(group for group in found.groups() if group)
            for found in re.finditer(pattern, (ROOT / page).read_text())
        ]
        assert told, f"{page} no longer says {what}; change its pattern"
        assert {" ".join(one.split()) for one in told} == {true}, f"{page}: {what}"


def sections(page: Path) -> list[str]:
    return re.split(r"^(?=#{1,3} )", page.read_text(encoding="utf-8"), flags=re.M)


@pytest.mark.parametrize("page", [DOCUMENT, TREES, README], ids=lambda page: page.name)
def test_a_table_of_a_result_says_its_date(page: Path) -> None:
    """In its section: in the heading, in a sentence, or in the list of conditions."""
    for section in sections(page):
        for found in MARKER.finditer(section):
            [*_, file] = sorted((ROOT / "benchmarks" / "results").glob(f"????-??-??-{found[3]}.json"))
            assert file.name[:10] in section, f"{page.name}, {section.splitlines()[0]}: {file.name}"


def test_a_commit_of_a_result_is_here_or_said_to_be_missing() -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no clone")
    for section in sections(DOCUMENT):
        for commit in re.findall(r"\b([0-9a-f]{12})(?:-dirty)?, ", section):
            known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
            assert not known.returncode or f"not the commit {commit}" in section, commit
