"""Calibration on toy models: what it holds, where it is kept, and when it is measured anew."""

import pytest

from outrider.models.toy import ToyModel
from outrider.tune import calibrate as module
from outrider.tune.calibrate import cache_folder, calibrate, calibrated


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider"


def pair():
    return ToyModel(11, 2, 0, max_length=256), ToyModel(11, 1, 0, max_length=256)


def test_every_setting_has_its_seconds():
    cost = calibrate(*pair(), {}, rows=(1, 2))
    assert {tuple(row[:3]) for row in cost.target} == {(r, n, 64) for r in (1, 2) for n in (1, 2, 4, 8, 16)}
    assert {tuple(row[:2]) for row in cost.draft} == {(1, 64), (2, 64)}
    assert all(row[-1] > 0 for row in [*cost.target, *cost.draft])
    assert cost.prefill > 0
    assert cost.step_seconds(1, 3, 3, 100) > cost.target_seconds(1, 4, 100)


def test_without_a_draft_model():
    cost = calibrate(pair()[0], None, {})
    assert (cost.draft, cost.prefill) == ([], 0.0)
    assert cost.draft_seconds(1, 5, 64) == 0


def test_it_is_measured_once_and_again_when_anything_differs(folder, monkeypatch):
    target, draft = pair()
    counted = []
    measure = calibrate
    monkeypatch.setattr(module, "calibrate", lambda *given: counted.append(given) or measure(*given))
    names = {"target": "toy float32", "draft": "toy"}
    first = calibrated(target, draft, names)
    assert calibrated(target, draft, names) == first
    assert len(counted) == 1
    calibrated(target, draft, {**names, "target": "toy int8"})
    monkeypatch.setattr(module, "machine", lambda: {"threads": "another number"})
    calibrated(target, draft, names)
    assert len(counted) == 3
    assert cache_folder() == folder
    assert len(list(folder.glob("cost-*.json"))) == 3


@pytest.mark.parametrize("text", ["", "{}", "half a fi"])
def test_a_broken_file_is_measured_anew(folder, text):
    target, draft = pair()
    calibrated(target, draft, {})
    [path] = folder.glob("cost-*.json")
    path.write_text(text)
    assert calibrated(target, draft, {}).key
    assert len(path.read_text()) > 100


def test_a_folder_that_is_not_named_lies_in_the_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-2:] == (".cache", "outrider")
