"""Calibration on toy models: what it measures, where it is kept, and when it is measured anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from outrider.control import CostModel, DraftCost, Fixed
from outrider.control.costs import tokens_read
from outrider.core.files import cache_folder
from outrider.core.params import SamplingParams
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.engine import calibrate as module
from outrider.engine import decoder
from outrider.engine.calibrate import AT_LOAD, WHOLE, conditions, costs, costs_of, make_planner, measure
from outrider.engine.llm import LLM
from outrider.kernels import cpu as native
from outrider.models.base import LanguageModel
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.load import Loaded, load
from outrider.testing.stubs import Wrong
from outrider.testing.toy import ToyModel


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The only clock: it goes where the test says so."""
    now = [1.0]
    for timed in (module, decoder):
        monkeypatch.setattr(timed, "perf_counter", lambda: now[0])
    return now


def timed(target: Any, clock: list[float], seconds: Callable[[Any], float]) -> Any:
    """A target whose forward over some nodes takes so long."""
    forward = target.forward

    def slow(nodes: Any, **more: Any) -> Any:
        clock[0] += seconds(nodes)
        return forward(nodes, **more)

    target.forward, target.step = slow, partial(LanguageModel.step, target)
    return target


class Timed(Wrong):
    """A drafter that takes so long for a draft token."""

    def __init__(self, clock: list[float], seconds: Callable[[], float]) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def propose(self, context: Any) -> Any:
        self.clock[0] += self.seconds() * context.budgets[0].depth
        return super().propose(context)


def toy(length: int = 256) -> ToyModel:
    return ToyModel(11, 2, 0, max_length=length)


def drafter(length: int = 256) -> ModelDrafter:
    return ModelDrafter(ToyModel(11, 1, 0, max_length=length), 2, length)


@pytest.mark.parametrize("sizes", [AT_LOAD, WHOLE])
def test_every_setting_has_its_seconds(sizes: tuple[int, ...]) -> None:
    own = drafter()
    own.error.observe([0.9] * 30, [False] * 30)
    cost = measure(toy(), {"draft": own}, {"k": "v"}, sizes)
    assert set(cost.target) == set(sizes)
    assert all(seconds > 0 for seconds in cost.target.values())
    falling = [cost.target[n] for n in sizes]
    assert falling == sorted(falling), "more nodes never take less"
    assert cost.drafters["draft"].level > 0
    assert cost.drafters["draft"].first > 0
    assert cost.drafters["draft"].read >= 0
    assert cost.key == {"k": "v"}
    assert sum(own.levels.cache.length) == 0, "the drafter forgets the text"
    assert own.error.scale == type(own.error)().scale


def test_the_measured_nodes_are_different_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tokens wake the same experts of a mixture: many nodes would look as cheap as one."""
    target, seen = toy(), list[list[int]]()
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda nodes, *a, **k: (seen.append(nodes.tokens[0].tolist()), forward(nodes, *a, **k))[1]
    )
    measure(target, {}, {}, AT_LOAD)
    drafts = [tokens[1:] for tokens in seen if len(tokens) in AT_LOAD]
    assert {*map(len, drafts)} == {nodes - 1 for nodes in AT_LOAD}
    assert all(len({*draft}) == min(len(draft), target.vocab_size) for draft in drafts)


def test_a_slow_draft_is_measured_as_slow(clock: list[float]) -> None:
    """What is measured is the drafter's own time, not that of the target."""
    target = timed(toy(), clock, lambda nodes: 0.01 * nodes.tokens.shape[1])
    cost = measure(target, {"slow": Timed(clock, lambda: 0.002), "quick": Wrong()}, {})
    assert cost.drafters["slow"].level == pytest.approx(0.002)
    assert cost.drafters["quick"].level < 1e-6


@pytest.mark.parametrize(("busy", "right"), [(9, (True, True)), (40, (False, True)), (999, (False, False))])
def test_a_drafter_that_another_program_slows_is_measured_again(
    clock: list[float], busy: int, right: tuple[bool, bool]
) -> None:
    """At this start or at the next one. No step corrects it: what looks too dear is never asked."""
    calls, config = count(1), SpeculativeConfig.model_validate({})
    target = replace(loaded(), model=timed(copy(loaded().model), clock, lambda _: 0.01))
    head = Timed(clock, lambda: 0.02 if next(calls) <= busy else 0.001)
    for well in right:
        level = costs(config, target, {"head": head}).drafters["head"].level
        assert level == pytest.approx(0.001 if well else 0.02)
    asked = next(calls)
    costs(config, target, {"head": head})
    assert (next(calls) > asked + 1) is not right[1], "what is plausible is not measured again"


def test_nothing_is_left_of_a_measurement_that_was_far_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are wrong in both directions: beside another program a longer draft may take no longer."""
    target, models = loaded(), {"draft": drafter()}
    wrong, right = DraftCost(90.0, 1e-7, 0.0), DraftCost(0.1, 0.3, 0.2)
    monkeypatch.setattr(module, "measure", lambda m, d, key, *more: CostModel(dict(key), {1: 1.0}, {"draft": wrong}))
    monkeypatch.setattr(module, "draft_cost", lambda *about: right)
    config = SpeculativeConfig.model_validate({})
    assert costs(config, target, models).drafters == {"draft": wrong}
    assert costs(config, target, models).drafters == {"draft": right}
    monkeypatch.setattr(module, "draft_cost", lambda *about: wrong)
    assert costs(config, target, models).drafters == {"draft": right}, "and it is stored"


@pytest.mark.parametrize(("windows", "read"), [((0,), 2048), ((512, 512, 512, 0), 896), ((), 0)])
def test_what_a_text_adds_to_a_node_is_measured(clock: list[float], windows: tuple[int, ...], read: int) -> None:
    """read: tokens of the 2,048 that a layer reads, in the mean."""
    target = timed(toy(6000), clock, lambda n: 0.01 + 1e-6 * n.tokens.shape[1] * n.lengths[0] * read / 2048)
    target.windows = windows
    costs = measure(target, {}, {})
    assert costs.attention == pytest.approx(1e-6 if read else 0)
    assert costs.attention * tokens_read(costs.windows, 2048) == pytest.approx(1e-6 * read)


@pytest.mark.parametrize("length", [4, 12, 20, 40])
def test_a_short_context_is_measured_as_far_as_it_goes(length: int) -> None:
    cost = measure(toy(length), {"draft": drafter(length)}, {})
    assert cost.target[1] > 0


@cache
def loaded() -> Loaded:
    return load("builtin:code", device="cpu")


def test_it_is_measured_once_and_again_when_anything_differs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted, target = list[Any](), loaded()
    monkeypatch.setattr(
        module, "measure", lambda model, models, key, *more: counted.append(key) or CostModel(dict(key), {1: 1.0})
    )
    config = SpeculativeConfig.of({"model": "builtin:code-draft"})
    first = costs(config, target, {"draft_model": Wrong()})
    assert costs(config, target, {"draft_model": Wrong()}) == first
    assert len(counted) == 1
    costs(config, target, {})
    costs(
        SpeculativeConfig.of({"model": "builtin:code-draft", "quantization": "int8"}), target, {"draft_model": Wrong()}
    )
    costs(
        SpeculativeConfig.of({"model": "builtin:code-draft", "num_speculative_tokens": 3}),
        target,
        {"draft_model": Wrong()},
    )
    assert len(counted) == 3, "a length changes no cost"
    monkeypatch.setattr(module, "conditions", lambda: {"threads": "another number"})
    costs(config, target, {"draft_model": Wrong()})
    costs(config, target, {"draft_model": Wrong()}, whole=True)
    assert len(counted) == 5
    assert cache_folder() == folder
    assert len(list(folder.glob("cost-*.json"))) == 4


def test_another_build_of_the_kernels_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is another instruction set of the same build."""
    if not native.available():
        pytest.skip("there are no kernels")
    best, found = native.isa(), [conditions()]
    native.use_isa(native.isas()[0] if best != native.isas()[0] else native.isas()[-1])
    found.append(conditions())
    native.use_isa(best)
    assert conditions() == found[0]
    (tmp_path / "kernels").write_bytes(b"another build")
    monkeypatch.setattr(native.library(), "path", tmp_path / "kernels")
    found.append(conditions())
    assert len({about["kernels"] for about in found}) == 3
    assert len({tuple(value for name, value in about.items() if name != "kernels") for about in found}) == 1


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("part", ["target", "draft", "layers"])
def test_files_that_are_written_anew_are_measured_anew(tmp_path: Path, part: str, file: str) -> None:
    """The target's, the draft model's, and the layers of layer_skip."""
    place = tmp_path / "model"
    shutil.copytree(builtin_folder("builtin:code-draft"), place)
    drafts = {
        "target": {"method": "ngram"},
        "draft": {"model": str(place)},
        "layers": {"method": "layer_skip", "layers": str(place / file)},
    }
    config = SpeculativeConfig.of(drafts[part])
    target = replace(loaded(), source=str(place)) if part == "target" else loaded()
    before = costs_of(config, target)
    (place / "README.md").write_text("nothing that costs")
    assert costs_of(config, target) == before
    stat = (place / file).stat()
    os.utime(place / file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert costs_of(config, target) != before


@pytest.mark.parametrize("text", ["", "{}", "half a fi"])
def test_a_broken_file_is_measured_anew(folder: Path, text: str) -> None:
    config, target = SpeculativeConfig.of({"method": "suffix"}), loaded()
    costs(config, target, {})
    [path] = folder.glob("cost-*.json")
    path.write_text(text)
    assert costs(config, target, {}).target
    assert len(path.read_text()) > 100


def test_a_cache_that_cannot_be_written_costs_a_second_at_each_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert costs(SpeculativeConfig.of({"method": "suffix"}), loaded(), {}).target


def test_a_folder_that_is_not_named_lies_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder().parts[-2:] == (".cache", "outrider")


def test_the_constructor_measures_and_the_text_is_plain_decodings(folder: Path) -> None:
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=40)
    plain = LLM("builtin:code", max_num_seqs=1).generate("def area(r):", params)[0].outputs[0]
    assert not [*folder.glob("cost-*.json")], "plain decoding needs no costs"
    for _ in range(2):
        llm = LLM("builtin:code", speculative_config={"method": "auto"}, max_num_seqs=1)
        assert llm.runtime.roster is not None
        costs = llm.runtime.roster.planner.costs.model
        assert set(costs.drafters) == {"draft_model"}
        assert set(costs.target) == set(AT_LOAD)
        assert llm.generate("def area(r):", params)[0].outputs[0].token_ids == plain.token_ids
    assert len(list(folder.glob("cost-*.json"))) == 1
    whole = LLM("builtin:code", speculative_config={"method": "auto"}, max_num_seqs=1, calibrate=True)
    assert whole.runtime.roster is not None
    assert set(whole.runtime.roster.planner.costs.model.target) == set(WHOLE)
    assert len(list(folder.glob("cost-*.json"))) == 1


@pytest.mark.parametrize(
    "config", [{"controller": "fixed"}, {"method": "none"}, {"num_speculative_tokens": 0}, {"verifier": "rejection"}]
)
def test_a_fixed_length_is_not_measured(folder: Path, config: dict[str, Any]) -> None:
    LLM("builtin:code", speculative_config={"method": "auto", **config}, max_num_seqs=1)
    assert not [*folder.glob("cost-*.json")]


def test_a_drafter_of_ones_own_is_not_measured(folder: Path) -> None:
    class Counted(Wrong):
        asked = 0

        def propose(self, context: Any) -> Any:
            self.asked += 1
            return super().propose(context)

    own = Counted()
    llm = LLM("builtin:code", drafter=own, max_num_seqs=1)
    assert own.asked == 0
    assert llm.runtime.roster is not None
    assert llm.runtime.roster.planner.costs.model.drafters == {}


def test_a_controller_of_ones_own_says_how_long() -> None:
    target = loaded()
    planner = make_planner(SpeculativeConfig.of({"method": "auto"}), target, {"suffix": Wrong()}, Fixed(3))
    assert planner.lengths is not None
    assert planner.budgets([0])[0].depth == 3
    assert {"target", "draft"} <= set(costs_of(SpeculativeConfig.of(None), target))


def test_of_two_measurements_the_faster_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs can only slow a step down."""
    target, models = loaded(), {"draft": drafter()}
    given = iter(
        [
            ({1: 4.0, 4: 5.0, 16: 9.0}, DraftCost(0.1, 0.3, 0.2)),
            ({1: 7.0, 2: 8.0, 4: 4.5, 16: 20.0}, DraftCost(0.2, 0.1, 0.2)),
        ]
    )

    def measured(model: Any, models: Any, key: Any, *more: Any) -> CostModel:
        seconds, draft = next(given)
        return CostModel(dict(key), seconds, {"draft": draft})

    monkeypatch.setattr(module, "measure", measured)
    config = SpeculativeConfig.model_validate({})
    costs(config, target, models)
    again = costs(config, target, models, whole=True)
    assert again.target == {1: 4.0, 2: 4.5, 4: 4.5, 16: 9.0}
    assert again.drafters == {"draft": DraftCost(0.1, 0.1, 0.2)}
    assert costs(config, target, models) == again, "and it is stored"


def test_a_drafter_that_ranks_tokens_anyway_gets_siblings() -> None:
    """In torch as in native code: a toy's chains are not drafted in one call."""
    asked = {
        width: make_planner(
            SpeculativeConfig.of({"method": "auto", "tree_width": width}),
            loaded(),
            {"draft": drafter(), "suffix": Wrong()},
        ).siblings
        for width in (None, 1)
    }
    assert asked == {None: {"draft"}, 1: set()}
