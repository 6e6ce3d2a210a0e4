"""Strangers without a key attack a server in all ways at once: the texts of a good client stay what they are alone."""

from __future__ import annotations

import resource

import pytest

from tests.system.attack import attacked, server


@pytest.mark.parametrize(
    ("seconds", "heads", "bodies", "unit"),
    [(3, 100, 40, 2 << 20), pytest.param(60, 3000, 256, 57 << 20, marks=pytest.mark.long)],
)
def test_a_good_client_gets_its_texts_while_strangers_attack(
    seconds: float, heads: int, bodies: int, unit: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * heads)), hard))
    with server("--prefix-cache", "16") as (port, process):
        report = attacked(port, process.pid, seconds, heads=heads, bodies=bodies, unit=unit)
        assert process.poll() is None
    print(report)
    assert report.texts
    assert not report.wrong
    before, after = report.memory
    assert after - before < 400, report  # MiB: what is held for strangers is bounded, and most of it is given back
    assert len(report.attacks) == 7
