"""Heads here read whole texts: their drafts are compared with those of plain models. `test_window.py` tests the rest."""

from __future__ import annotations

import pytest

from outrider.drafters.heads import features


@pytest.fixture(autouse=True)
def whole_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they fit into half of a head's cache."""
    monkeypatch.setattr(features, "NEWEST", 1 << 30)
