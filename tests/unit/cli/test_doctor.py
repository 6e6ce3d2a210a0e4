"""`outrider doctor` and `outrider methods`."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from outrider.cli import doctor
from outrider.cli.main import app
from outrider.drafters.method import METHODS
from outrider.engine.calibrate import WHOLE, all_stored
from outrider.kernels import cpu, gpu

ROOT = Path(__file__).parents[3]
PAIR = '{"method": ["suffix", "draft_model"], "model": "builtin:code-draft"}'


def run(*words: str):
    return CliRunner().invoke(app, [*words], env={"COLUMNS": "80"})


def test_doctor_says_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run("doctor")
    named = [line.split()[1] for line in done.stdout.splitlines() if line[0] != " "]
    wanted = ["versions", "torch", "processor", "kernels", "cores", "memory", "bandwidth", "large", "cache"]
    lacks = {"torch": find_spec("torch") is None, "large": not doctor.PAGES.exists(), "bandwidth": not cpu.available()}
    here = [name for name in wanted if not lacks.get(name)]
    assert named[: len(here)] == here
    assert len(done.stdout.splitlines()) <= 24, "one screen"
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.exit_code == int("✗" in done.stdout)


def test_memory_is_read_by_all_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of passes of 2, 1 and 4 seconds the fastest counts."""
    monkeypatch.setattr(doctor, "repeat", lambda act, **_: act() is not None and [2.0, 1.0, 4.0])
    assert doctor.read_speed(2**20) == 2**20


def test_doctor_gives_a_line_to_type_for_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(cpu, "why", lambda: "no compiler was there")
    done = run("doctor")
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("✗ kernels"))
    assert "no compiler was there" in lines[at]
    assert lines[at + 1].strip().startswith("pip install")


def test_doctor_says_why_an_instruction_set_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_ISA", raising=False)
    monkeypatch.setattr(cpu, "available", lambda: True)
    monkeypatch.setattr(cpu, "isas", lambda: ("portable", "avx2", "avx512", "avx512_vnni"))
    monkeypatch.setattr(cpu, "isa", lambda: "avx2")
    assert doctor.instruction_set().result == "avx2: the processor lacks avx512_vnni, avx512"
    monkeypatch.setattr(cpu, "isa", lambda: "avx512_vnni")
    assert doctor.instruction_set().result == "avx512_vnni: the fastest of this build"
    monkeypatch.setenv("OUTRIDER_ISA", "avx512_vnni")
    assert doctor.instruction_set().fix.startswith("unset OUTRIDER_ISA")


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_doctor_says_what_runs_models_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    card = SimpleNamespace(name="Test 9000", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20e9, 80e9))
    monkeypatch.setattr(doctor, "copy_speed", lambda: 2.8e12)
    monkeypatch.setattr(gpu, "why_not", lambda device: None)
    monkeypatch.delenv("OUTRIDER_GPU", raising=False)
    there, runs = doctor.gpu_checks()
    assert there.result == "Test 9000: compute capability 9.0, 20.0 of 80.0 GB are free, copies 2,800 GB/s"
    assert runs.result.startswith("the modelling code of transformers. Our kernels could: ")
    assert "not measured" in runs.result
    assert runs.fix.startswith("export OUTRIDER_GPU=1 ")
    monkeypatch.setenv("OUTRIDER_GPU", "1")
    assert list(doctor.gpu_checks())[1].result.startswith("our kernels, because OUTRIDER_GPU=1 is set")
    monkeypatch.setattr(gpu, "why_not", lambda device: "it is old")
    assert list(doctor.gpu_checks())[1].result.endswith("because our kernels cannot run: it is old")


def test_doctor_names_settings_that_cost_speed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cpu, "available", lambda: True)
    monkeypatch.setattr(cpu, "num_threads", lambda: 1)
    assert not doctor.thread_check(4).fix
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert doctor.thread_check(4).fix == "unset OMP_WAIT_POLICY"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert doctor.thread_check(4).fix == "unset OMP_NUM_THREADS"
    assert doctor.thread_check(1).fix == "unset OMP_WAIT_POLICY"

    pages = tmp_path / "enabled"
    monkeypatch.setattr(doctor, "PAGES", pages)
    monkeypatch.setattr(cpu, "available", lambda: False)
    for text, found in (("always madvise [never]", "never"), ("always [madvise] never", "madvise")):
        pages.write_text(text)
        check = list(doctor.memory_checks())[-1]
        assert check.result.startswith(f"{found}: ")
        assert bool(check.fix) == (found == "never")


def test_doctor_sees_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "llguidance":
            raise PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor, "version", version)
    fixes = {check.name: (check.result, check.fix, check.wrong) for check in doctor.package_checks()}
    lacks = "answers that fit a JSON schema; missing: llguidance"
    assert fixes["extra grammar"] == (lacks, "pip install '.[grammar]'   # in the checkout", False)
    assert fixes["extra serve"] == ("outrider serve and batch", "", False)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name.removeprefix("extra ") for name in fixes} | {"dev", "light"} == {*extras}


def test_with_a_model_it_prints_and_keeps_what_its_steps_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("outrider.engine.calibrate.ROUNDS", 1)
    done = CliRunner().invoke(app, ["doctor", "builtin:code", "--speculative-config", PAIR])
    assert done.exit_code == int("✗" in done.stdout), done.output
    shown = done.stdout.splitlines()
    first, *lines, last = shown[next(i for i, line in enumerate(shown) if line.startswith("A plain step")) :]
    assert first.startswith("A plain step, which writes one token, takes ")
    assert [line.split()[2] for line in lines if line.startswith("  to check")] == [str(n - 1) for n in WHOLE[1:]]
    assert "draft_model drafts a token in" in lines[-1]
    assert str(tmp_path) in last
    [kept] = all_stored()
    assert tuple(sorted(kept.target)) == WHOLE


@pytest.mark.parametrize("config", ['{"method": "none"}', '{"method": "suffix", "controller": "fixed"}'])
def test_it_refuses_what_needs_no_costs(config: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "builtin:code", "--speculative-config", config])
    assert done.exit_code == 2
    assert "uses no measured costs" in done.output + done.stderr


def test_methods_lists_the_registry() -> None:
    shown = run("methods").stdout
    words = shown.split()
    assert set(METHODS) <= set(words)
    assert max(map(len, shown.splitlines()[:-1])) <= 80
    assert METHODS["eagle"].needs == "-d FOLDER, a trained head"
    assert METHODS["draft_model"].needs == "-d MODEL"
    assert METHODS["ngram"].needs == "nothing"
