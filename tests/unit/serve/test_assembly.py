"""A server from its options: what its start says of the memory that keys and values may take."""

from __future__ import annotations

import math
import re

import pytest

from outrider.serve.metrics import Metrics
from outrider.serve.options import ServeOptions
from outrider.serve.pool import assemble


@pytest.mark.parametrize(
    ("given", "length", "note"),
    [
        ({}, 256, "not 2048 tokens: .* --max-model-len 2048 is believed"),
        ({"max_model_len": 2048}, 2048, r"does not fit in the 1\.0 MiB that are free"),
        ({"kv_cache_memory_bytes": 1 << 30}, 2048, None),
    ],
)
def test_texts_fit_in_the_memory_that_is_free(given, length, note, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.serve.pool.spare", lambda device: 1 << 20)
    options = ServeOptions(model="builtin:code", speculative_config={"method": "none"}, prefix_cache=0, **given)
    made = assemble(options, math.inf, Metrics("outrider", "code"), fit=True)
    assert made.engine.decoder.max_length == length
    found = [text for text in made.notes if re.search(note or "fit", text)]
    assert len(found) == (note is not None)
    made.engine.close()
