"""Test files import the helpers beside them by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks again does not wait."""
    from outrider_certify.subjects import transport

    monkeypatch.setattr(transport.time, "sleep", lambda seconds: None)
