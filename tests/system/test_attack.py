"""Strangers without a key attack a server in all ways at once: the texts of a good client stay what they are alone."""

from __future__ import annotations

import resource

import pytest

from tests.system.attack import attacked, serving


@pytest.mark.parametrize(
    ("seconds", "heads", "bodies", "unit"),
    [(1, 60, 20, 1 << 20), pytest.param(60, 3000, 256, 57 << 20, marks=pytest.mark.long)],
)
def test_a_good_client_gets_its_texts_while_strangers_attack(
    seconds: float, heads: int, bodies: int, unit: int
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * heads)), hard))
    with serving("--prefix-cache", "16") as server:
        report = attacked(server, seconds, heads=heads, bodies=bodies, unit=unit)
        assert server.process.poll() is None
    print(report)
    assert report.texts
    assert not report.wrong
    assert report.memory["after"] - report.memory["calm"] < 400, report  # MiB: what is held for strangers is bounded
    assert len(report.attacks) == 7
