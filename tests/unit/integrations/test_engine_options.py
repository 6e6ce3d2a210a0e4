"""Every option that is exported is one that the engine knows. `benchmarks.handover.parsers` writes the lists, and asks more."""

from __future__ import annotations

import json
import shlex

import pytest

from benchmarks.handover.cases import cases
from benchmarks.handover.parsers import OPTIONS
from outrider.integrations.engines import exports

KNOWN = json.loads(OPTIONS.read_text())
HEADS = {
    kind: {"method": method, "model": "/head"}
    for method, kind in (("eagle", "eagle3"), ("medusa", "medusa"), ("dflash", "dflash"), ("dspark", "dspark"))
}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_every_option_is_known_there(engine: str) -> None:
    known = set(KNOWN[engine]["options"])
    assert len(known) > 15
    settings = [(case.config, case.lengths) for case in cases(None).values()]
    settings += [
        (config | more, lengths)
        for config in HEADS.values()
        for more in ({}, {"verifier": "block"})
        for lengths in (None, {1: 3, 4: 0})
    ]
    said = set[str]()
    for config, lengths in settings:
        [command] = exports(config, lengths, engines=[engine], folder="out")
        words = shlex.split(command.command)
        if engine == "vllm":
            said |= json.loads(words[1]).keys() if words else set()
        else:
            said |= {word for word in words if word.startswith("--")}
    assert said
    assert said <= known, f"{engine} {KNOWN[engine]['version']} does not know {said - known}"
