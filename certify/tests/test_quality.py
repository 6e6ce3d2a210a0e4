"""Recorded texts, and the quality of solutions."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from broken import ToyEngine

from outrider_certify import quality
from outrider_certify.certificate import CertificatePart, Conclusion
from outrider_certify.quality import Quality, read_problems, solves
from outrider_certify.statistical import Statistical
from outrider_certify.subject import GeneratedText, SamplingParams, TextRequest
from outrider_certify.trials import CertificateKind, TrialJournal, run_kinds


def certified(kind: CertificateKind, most: int | None = None) -> CertificatePart:
    [part] = run_kinds([kind], TrialJournal(None, {}), 1e9, most=most)
    return part


def test_recorded_texts_of_a_broken_sampler() -> None:
    broken, honest = ToyEngine("no residual", error=2.0), ToyEngine(error=2.0)
    params = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)

    def recorded(engine: ToyEngine) -> list[tuple[TextRequest, GeneratedText]]:
        requests = [TextRequest((i % 8, 1), replace(params, seed=i)) for i in range(12)]
        return list(zip(requests, engine.generate(requests, engine.variants()[0]), strict=True))

    bad = certified(Statistical(honest, recorded=recorded(broken)))
    assert bad.conclusion is Conclusion.DIFFERS
    assert "no residual" in bad.findings[0].cause
    assert certified(Statistical(honest, recorded=recorded(honest))).conclusion is Conclusion.CANNOT_TELL


PROBLEM = {
    "task_id": "T/1",
    "prompt": "def add(a, b):\n",
    "entry_point": "add",
    "test": "def check(f):\n    assert f(1, 2) == 3\n",
}


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("    return a + b\n", True),
        ("    return a - b\n", False),
        ("    while True: pass\n", False),
        ("    import os; os.system('touch /tmp/no'); return 3\n", False),
        ("    import subprocess; subprocess.run(['ls']); return 3\n", False),
        ("    import sys; sys.exit(0)\n", False),
        ("    import os; os._exit(0)\n", False),
        ("    x = 'a' * 3_000_000_000; return 3\n", False),
        ("    import socket; socket.socket(); return 3\n", False),
        ("    retur", False),
    ],
)
def test_programs_run_in_a_sandbox(text: str, good: bool) -> None:
    assert solves(PROBLEM, text, seconds=2) is good


def test_a_program_is_ended_where_the_system_limits_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_LIMITED", False)
    monkeypatch.setattr(quality, "_BYTES", 128 << 20)
    greedy = "    x = bytearray(b'a') * (BYTES << 20)\n    import time; time.sleep(0.3)\n    return a + b\n"
    assert solves(PROBLEM, greedy.replace("BYTES", "1"), seconds=60)
    assert not solves(PROBLEM, greedy.replace("BYTES", "500"), seconds=60)


def test_problems_may_be_compressed(tmp_path: Path) -> None:
    line = json.dumps(PROBLEM).encode()
    (tmp_path / "a.jsonl").write_bytes(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line))
    assert read_problems(tmp_path / "a.jsonl") == read_problems(tmp_path / "a.jsonl.gz") == [PROBLEM]
    for wrong in (gzip.compress(line)[:-9], b"\xff\xfe", b"{}", b""):
        (tmp_path / "wrong.jsonl").write_bytes(wrong)
        with pytest.raises(ValueError, match=r"wrong\.jsonl"):
            read_problems(tmp_path / "wrong.jsonl")


def test_quality_counts_both_sides() -> None:
    class Half(ToyEngine):
        def generate(self, requests, variant):
            return [GeneratedText(text="    return a - b\n") for _ in requests]

        def plain(self, requests):
            return [GeneratedText(text="    return a + b\ndef more():\n") for _ in requests]

    part = certified(Quality(Half(), [{**PROBLEM, "task_id": f"T/{i}"} for i in range(8)]))
    assert part.conclusion is Conclusion.DIFFERS
    assert (part.figures["with"], part.figures["without"], part.figures["lost"]) == (0, 8, 8)
    assert "0 of 8" in part.sentence
