"""Calibration on toy models: what it holds, where it is kept, and when it is measured anew."""

import os
import shutil
import warnings
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from outrider import calibrate as module
from outrider.calibrate import calibrate, calibrated
from outrider.cli import main as cli
from outrider.config import SpeculativeConfig
from outrider.control import Calibrated, CostModel
from outrider.core.files import cache_folder
from outrider.core.types import Budget
from outrider.drafters.base import NoDraft
from outrider.drafters.combine.router import DrafterRouter
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.self_speculation import LayerSearch
from outrider.drafters.stubs import Wrong
from outrider.llm import LLM
from outrider.models.load import DATA
from outrider.params import SamplingParams
from outrider.testing.toy import ToyModel

LIMIT = Budget(3, 2, 4)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer rounds."""
    monkeypatch.setattr(module, "WHOLE", replace(module.WHOLE, rounds=2, several=4))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider"


def pair():
    """A target, and what makes a drafter for it."""
    draft = ToyModel(11, 1, 0, max_length=256)
    return ToyModel(11, 2, 0, max_length=256), lambda rows: ModelDrafter(draft, rows, 256)


def test_every_setting_has_its_seconds():
    cost = calibrate(*pair(), {}, LIMIT, rows=(1, 2))
    sizes = {(1, n) for n in (1, 2, 3, 6, 7, 9, 13, 17)} | {(2, n) for n in (1, 2, 5, 9)}
    assert {tuple(row[:2]) for row in cost.target} == sizes
    assert {tuple(row[:3]) for row in cost.draft} == {(r, w, d) for r in (1, 2) for w in (1, 2) for d in (0, 1, 3)}
    assert all(row[-1] > 0 for row in [*cost.target, *cost.draft])
    assert all(64 <= row[-2] < 192 for row in [*cost.target, *cost.draft])
    assert cost.prefill > 0
    assert cost.fixed > 0
    assert cost.step_seconds(1, 3, 3, 100) > cost.target_seconds(1, 4, 100)


def test_the_quick_one_measures_one_row_and_tells_of_several():
    cost = calibrate(*pair(), {}, Budget(16), rows=(1, 8), quick=True)
    assert {tuple(row[:2]) for row in cost.target} == {
        *((1, n) for n in (1, 2, 3, 5, 8, 9, 17)),
        *((8, n) for n in (1, 2, 5, 9)),
    }
    assert {tuple(row[:3]) for row in cost.draft} == {(r, 1, d) for r in (1, 8) for d in (0, 1, 8)}
    one = CostModel({}, [[1, n, 64, 1 + n / 10] for n in (1, 17)], [[1, 1, 4, 64, 0.5]], 0.25, 0.125)
    several = module.derive_batches(one, (1, 8), (1, 5))
    for nodes in (1, 5):  # as many as so many nodes in one row, also beyond what was measured
        assert several.target_seconds(8, nodes, 64) == pytest.approx(1 + 8 * nodes / 10)
    assert several.draft_seconds(8, 4, 64) == pytest.approx(0.5 * 1.8 / 1.1)
    assert several.target_seconds(1, 5, 64) == one.target_seconds(1, 5, 64)
    assert (several.prefill, several.fixed) == (0.25, 0.125)


@pytest.mark.parametrize(("patience", "rounds"), [(0.0, 1), (1e9, 3)])
def test_who_is_slow_waits_for_one_round(monkeypatch, patience, rounds):
    counted = []
    visit = module.Measurements.visit
    monkeypatch.setattr(module, "PATIENCE", patience)
    monkeypatch.setattr(module.Measurements, "visit", lambda *given: counted.append(1) or visit(*given))
    monkeypatch.setattr(module.Measurements, "sure", False)
    cost = calibrate(*pair(), {}, Budget(16), quick=True)
    assert len(counted) == rounds
    assert all(row[-1] > 0 for row in cost.target)


def test_of_three_times_a_pause_does_not_count():
    assert module.trimmed_mean([1.0, 3.0, 1.1]) == 1.1
    assert module.trimmed_mean([1.0, 2.0]) == 1.5
    assert module.trimmed_mean([0.0, *[1.0] * 18, 9.0]) == 1.0


def test_of_several_drafters_the_dearest_is_measured():
    """Which of them guesses here is the router's choice; what it costs when the model is asked must be known."""
    asked = []

    class Noted(ModelDrafter):
        def propose(self, batch):
            asked.append(batch.budgets[0].depth)
            return super().propose(batch)

    draft = ToyModel(11, 1, 0, max_length=256)

    def several(rows):
        return DrafterRouter({"free": Wrong(), "model": Noted(draft, rows, 256)}, {"model": 0.1})

    cost = calibrate(pair()[0], several, {}, Budget(16), quick=True)
    assert {1, 8} <= {*asked}
    assert {row[2] for row in cost.draft} == {0, 1, 8}


def test_a_drafter_that_guesses_nothing_costs_what_a_step_costs_anyway():
    cost = calibrate(pair()[0], lambda rows: NoDraft(), {}, Budget(0))
    assert {tuple(row[:3]) for row in cost.draft} == {(1, 1, 0)}
    assert cost.prefill >= 0


def test_it_is_measured_once_and_again_when_anything_differs(folder, monkeypatch):
    target, drafter = pair()
    counted = []
    measure = calibrate
    monkeypatch.setattr(module, "calibrate", lambda *given: counted.append(given) or measure(*given))
    names = {"target": "toy float32", "draft": "toy"}
    said: list[str] = []
    first = calibrated(target, drafter, names, LIMIT, say=said.append)
    assert calibrated(target, drafter, names, LIMIT, say=said.append) == first
    assert len(counted) == len(said) == 1
    assert str(folder) in said[0]
    calibrated(target, drafter, {**names, "target": "toy int8"}, LIMIT)
    calibrated(target, drafter, names, Budget(3))
    monkeypatch.setattr(module, "conditions", lambda: {"threads": "another number"})
    calibrated(target, drafter, names, LIMIT)
    assert len(counted) == 4
    assert cache_folder() == folder
    assert len(list(folder.glob("cost-*.json"))) == 4


def files(folder, part):
    """A model's folder, and what of an LLM lies in it: the target, the draft model, or the layers of layer_skip."""
    shutil.copytree(DATA / "code-draft", folder)
    if part == "target":
        return folder, {"method": "ngram"}
    if part == "draft":
        return "builtin:code", {"method": "draft_model", "model": str(folder)}
    LayerSearch([0], 0.5, 0.5, 1, 1.0).save(folder / "layers.json")
    return "builtin:code", {"method": "layer_skip", "layers": str(folder / "layers.json")}


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("target", "model.safetensors"),
        ("target", "config.json"),
        ("draft", "model.safetensors"),
        ("layers", "layers.json"),
    ],
)
def test_files_that_are_written_anew_are_measured_anew(tmp_path, monkeypatch, part, file):
    counted, place = [], tmp_path / "model"

    def cheap(target, drafter, key, *more):
        counted.append(key)
        return CostModel(key, [[1, 1, 64, 0.001]], [[1, 1, 0, 64, 0.0]], 0.0, 0.0)

    monkeypatch.setattr(module, "calibrate", cheap)
    model, config = files(place, part)

    def made():
        LLM(model, speculative_config={**config, "controller": "calibrated"}, max_num_seqs=1)
        return len(counted)

    assert (made(), made()) == (1, 1)
    (place / "README.md").write_text("nothing that costs")
    assert made() == 1
    stat = (place / file).stat()
    os.utime(place / file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert (made(), made()) == (2, 2)


@pytest.mark.parametrize("text", ["", "{}", "half a fi"])
def test_a_broken_file_is_measured_anew(folder, text):
    target, drafter = pair()
    calibrated(target, drafter, {}, LIMIT)
    [path] = folder.glob("cost-*.json")
    path.write_text(text)
    assert calibrated(target, drafter, {}, LIMIT).key
    assert len(path.read_text()) > 100


def test_a_folder_that_is_not_named_lies_in_the_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-2:] == (".cache", "outrider")


def calibrated_llm(**more):
    config = {
        "method": "draft_model",
        "model": "builtin:code-draft",
        "num_speculative_tokens": 3,
        "controller": "calibrated",
    }
    return LLM("builtin:code", speculative_config={**config, **more}, max_num_seqs=1)


def test_the_calibrated_controller_by_name(folder, monkeypatch):
    """It is measured for once, and the text is plain decoding's."""
    monkeypatch.setattr(module, "WHOLE", replace(module.WHOLE, contexts=(32,)))
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
    plain = LLM("builtin:code", max_num_seqs=1).generate("def area(r):", params)[0].outputs[0]
    for _ in range(2):
        llm = calibrated_llm(tree_width=2, tree_nodes=5)
        assert isinstance(llm.decoder.controller.costs, Calibrated)
        assert llm.generate("def area(r):", params)[0].outputs[0].token_ids == plain.token_ids
    assert len(list(folder.glob("cost-*.json"))) == 1


def test_auto_measures_only_where_the_user_asks_and_then_uses_what_is_stored(folder):
    """The constructor learns costs from the steps; one measurement serves every number of sequences."""
    config = {"method": "auto"}
    assert not isinstance(LLM("builtin:code", speculative_config=config).decoder.controller.costs, Calibrated)
    assert not folder.exists()
    with pytest.warns(RuntimeWarning, match="a hundred tokens take, once; it is kept in"):
        first = LLM("builtin:code", speculative_config=config, calibrate=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = LLM("builtin:code", speculative_config=config)
        third = LLM("builtin:code", speculative_config=config, max_num_seqs=1, calibrate=True)
    assert first.decoder.controller.costs.model == second.decoder.controller.costs.model
    assert {row[0] for row in third.decoder.controller.costs.model.target} == {1}
    assert {row[0] for row in second.decoder.controller.costs.model.target} == {1, 8}
    assert len(list(folder.glob("cost-*.json"))) == 1


def test_the_command_measures_and_keeps_it(folder):
    result = CliRunner().invoke(cli.app, ["calibrate", "builtin:code-draft"])
    assert result.exit_code == 0, result.output
    assert "a plain step takes" in result.output
    assert len(list(folder.glob("cost-*.json"))) == 1
    llm = LLM("builtin:code-draft", speculative_config={"method": "auto"})
    assert isinstance(llm.decoder.controller.costs, Calibrated)


def test_the_command_refuses_a_configuration_without_costs(folder):
    result = CliRunner().invoke(cli.app, ["calibrate", "builtin:code", "--speculative-config", '{"method": "none"}'])
    assert result.exit_code
    assert "uses no measured costs" in result.output
    assert not folder.exists()


@pytest.mark.parametrize("config", [{"controller": "adaptive"}, {"method": "none"}, {"num_speculative_tokens": 0}])
def test_who_does_not_ask_for_it_is_not_measured(folder, config):
    llm = LLM("builtin:code", speculative_config={"method": "auto", **config}, calibrate=True)
    assert not isinstance(llm.decoder.controller.costs, Calibrated)
    assert not folder.exists()


def test_a_drafter_of_ones_own_is_not_measured_by_auto(folder):
    LLM("builtin:code", speculative_config={"method": "auto"}, drafter=Wrong(), calibrate=True)
    assert not folder.exists()


def test_a_drafter_of_ones_own_cannot_be_measured_by_name():
    with pytest.raises(ValueError, match='cannot make yours; use "adaptive"'):
        LLM("builtin:code", speculative_config={"method": "suffix", "controller": "calibrated"}, drafter=Wrong())


def test_every_context_tells_of_the_others():
    """Costs that grow with nodes times context come out as they are; noise at one context is shared by both."""
    cells = {
        n: [module.SettingTimes([c], [1 + 0.1 * (n - 1) + 0.0002 * (n - 1) * c]) for c in (64, 512)] for n in (1, 5, 9)
    }
    exact = {n: [cell.share for cell in some] for n, some in cells.items()}
    module.smooth_contexts(cells)
    assert {n: [cell.share for cell in some] for n, some in cells.items()} == {
        n: pytest.approx(shares) for n, shares in exact.items()
    }
    cells[5][0].shares[0] += 0.2
    for some in cells.values():
        for cell in some:
            cell.smoothed = None
    module.smooth_contexts(cells)
    assert exact[5][0] + 0.05 < cells[5][0].share < exact[5][0] + 0.15
    flat = {n: [module.SettingTimes([c], [1.0 - c / 1000]) for c in (64, 512)] for n in (1, 5)}
    module.smooth_contexts(flat)
    assert flat[5][0].share == flat[5][1].share  # nothing gets cheaper


def test_the_old_name_of_the_calibrated_controller_still_works():
    with pytest.warns(DeprecationWarning, match='write "controller": "calibrated"'):
        config = SpeculativeConfig.of({"method": "suffix", "controller": "optimal"})
    assert config.controller == "calibrated"
