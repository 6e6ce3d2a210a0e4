"""The table of all classes: how a tiny model is made and put through its checks, and that the checks find faults."""

from __future__ import annotations

import json
import runpy
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from outrider.models import attention
from outrider.models.hf.model import HFModel
from outrider.models.nodes import Nodes
from tests.support import coverage
from tests.support.coverage import REFUSED, RUNS, UNAVAILABLE, WRONG, report_of
from tests.support.tiny_models import tiny_config, tiny_model, whole_config

ROOT = Path(__file__).parents[3]
RESULTS = json.loads((ROOT / "docs" / "models.json").read_text())["models"]


def test_a_class_runs_or_is_refused_or_is_no_model() -> None:
    report = report_of("qwen3", whole_config("qwen3"))
    assert (report.status, report.reason) == (RUNS, "")
    assert all(report.checks.values())
    assert "batch invariant" in report.checks
    refused = report_of("reformer", whole_config("reformer"))
    assert (refused.status, "Reformer" in refused.reason) == (REFUSED, True)
    assert report_of("llama", AutoConfig.for_model("llama", hidden_act="no such function")).status == UNAVAILABLE


@pytest.mark.long  # the next one is of the same kind
def test_a_window_that_is_off_by_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = attention.attend

    def short(nodes: Nodes, layer: int, query: np.ndarray, scoring: Any) -> np.ndarray:
        return attend(nodes, layer, query, replace(scoring, window=scoring.window and scoring.window - 1))

    monkeypatch.setattr(attention, "attend", short)
    assert report_of("cwm", whole_config("cwm")).status == WRONG


def test_a_node_that_sees_its_siblings_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are right, trees are not."""
    attend = attention.attend

    def leaky(nodes: Nodes, layer: int, query: np.ndarray, scoring: Any) -> np.ndarray:
        if nodes.parents is None or not bool((nodes.tree[:, 1:] != np.arange(nodes.tree.shape[1] - 1)).any()):
            return attend(nodes, layer, query, scoring)
        return attend(nodes, layer, np.roll(query, 1, 2), scoring)

    own_check = HFModel.compare

    def blind(model: HFModel, ids: list[int], own: np.ndarray) -> bool:
        with suppress(ValueError):
            own_check(model, ids, own)
        return True

    monkeypatch.setattr(HFModel, "compare", blind)
    monkeypatch.setattr(attention, "attend", leaky)
    report = report_of("cwm", whole_config("cwm"))
    assert report.status == WRONG
    assert report.checks["plain"]
    assert not report.checks["tree"]


def test_a_tiny_model_keeps_what_matters() -> None:
    """One layer of each kind, the ratio of heads, tied embeddings, windows."""
    config = whole_config("gemma3_text")
    small = tiny_config(config)
    assert set(small.layer_types) == set(config.layer_types)
    assert small.num_attention_heads > small.num_key_value_heads > 1
    assert small.tie_word_embeddings == config.tie_word_embeddings
    assert 0 < small.sliding_window < 20
    assert sum(p.numel() for p in tiny_model(small).parameters()) < 200_000


def test_the_page_is_made_of_the_results() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "models.py"))
    results = json.loads((ROOT / "docs" / "models.json").read_text())
    assert (ROOT / "docs" / "models.md").read_text() == made["page"](results), "run python -m docs.models --page"


def test_no_class_is_wrong_or_crashes() -> None:
    bad = [m["name"] for m in RESULTS.values() if m["status"] not in (RUNS, REFUSED, UNAVAILABLE)]
    assert not bad
    assert all(m["reason"] for m in RESULTS.values() if m["status"] != RUNS)
    assert all(all(m["checks"].values()) for m in RESULTS.values() if m["status"] == RUNS)


@pytest.mark.long
def test_every_class_is_as_the_page_says() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "models.py"))
    for kind, name in made["classes"]().items():
        found = made["isolated"](kind, name)
        assert (found["name"], found["status"]) == (RESULTS[kind]["name"], RESULTS[kind]["status"]), found.get("reason")


def test_reports_never_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise IndexError("a planted error")

    monkeypatch.setattr(coverage, "load", broken)
    report = report_of("gpt2", whole_config("gpt2"))
    assert (report.status, report.reason) == (WRONG, "IndexError: a planted error")
