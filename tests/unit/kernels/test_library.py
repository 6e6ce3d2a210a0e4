"""The library in a process: its enumerations and structs, instruction sets, threads, forks; and linears in modules."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
from ggml_blocks import random_blocks
from light import Late, torch
from patience import PATIENCE

from outrider.kernels import cpu as native
from outrider.kernels.blocks import Blocks
from outrider.kernels.cpu.library import ENUMERATIONS, STRUCTS, AnglesStruct, layout, load

linears = Late("outrider.models.hf.linear")
pytorch_utils = Late("transformers.pytorch_utils")

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("function", "reference"), [(0, np.exp), (1, np.log), (2, np.tanh)])
def test_functions_are_within_two_units_in_the_last_place(function: int, reference: object) -> None:
    x = np.concatenate(
        [np.linspace(-87, 88, 5001, dtype=np.float32), normal(5000), normal(5001)[1:] * np.float32(1e-3)]
    )
    x = np.abs(x) + np.float32(1e-30) if function == 1 else x
    y = np.empty_like(x)
    native.library().elementwise(function, x.ctypes.data, y.ctypes.data, len(x))
    exact = reference(x.astype(np.float64))  # type: ignore[operator]
    assert (np.abs(y - exact) / np.abs(exact).clip(1e-37)).max() < 2 * 2**-23


def test_callers_on_several_threads_do_not_disturb_each_other() -> None:
    packed = native.Packed([normal(800, 256)], "float32")
    inputs = [normal(4, 256) for _ in range(4)]
    expected = [packed.linear(x) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(50):
            if not np.array_equal(packed.linear(inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
@pytest.mark.parametrize(
    ("set_first", "environment"), [(True, {}), pytest.param(False, {"OMP_NUM_THREADS": "1"}, marks=pytest.mark.long)]
)
def test_one_core_or_one_openmp_thread_means_one_thread(set_first: bool, environment: dict[str, str]) -> None:
    code = """
import os
if {set_first}: os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])
import numpy as np
from outrider.kernels import cpu as native
print(native.num_threads(), *{*native.Packed([np.ones((1600, 512), np.float32)], "bfloat16").linear(np.ones((2, 512))).flat})
"""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    run = [sys.executable, "-c", code.replace("{set_first}", str(set_first))]
    done = subprocess.run(run, env=inherited | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "512.0"]


def test_an_instruction_set_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.isa()
    monkeypatch.setenv("OUTRIDER_ISA", "portable")
    found, why = load()
    assert (why, found and found.isa()) == (None, b"portable")
    native.use_isa(before)  # it is the same library
    monkeypatch.setenv("OUTRIDER_ISA", "mmx")
    assert "portable, avx2" in str(load()[1])


def test_structs_and_enumerations_are_those_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fields of one size that are swapped, or two ops, would otherwise be read as each other."""
    assert native.library().layout().decode() == layout()
    fields = list(AnglesStruct._fields_)
    fields[0], fields[1] = fields[1], fields[0]
    swapped = type("Swapped", (ctypes.Structure,), {"_fields_": fields})
    with monkeypatch.context() as one:
        one.setitem(STRUCTS, "Angles", swapped)
        found, why = load()
        assert found is None
        assert "its Angles differs" in str(why)
    for kinds in (["IDENTITY", "GELU", "SILU"], ["IDENTITY"]):
        with monkeypatch.context() as one:
            one.setitem(ENUMERATIONS, "Activation", IntEnum("Activation", kinds, start=0))
            found, why = load()
            assert found is None
            assert "its Activation differs); rebuild with `python setup.py build_ext --inplace`" in str(why)


@pytest.mark.long  # a slow start is all that a fault would do
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_bound_openmp_threads_do_not_bind_ours() -> None:
    """With OMP_PROC_BIND OpenMP ties the importing thread to one core; threads made by it would share that core."""
    code = """
import os, time, numpy as np, torch
from outrider.kernels import cpu as native
native.Packed([np.ones((1600, 512), np.float32)], "float32").linear(np.ones((8, 512)))
before = len(os.sched_getaffinity(0))
print(before, native.num_threads())
deadline = time.monotonic() + 600
while time.monotonic() < deadline:
    if native.num_threads() in [len(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")]:
        break
else:
    print("no thread may run on all cores")
"""
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core only")
    environment = os.environ | {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "OMP_NUM_THREADS": str(cores)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    bound, threads = map(int, done.stdout.split())
    assert threads == cores
    assert bound < cores


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_works_after_fork() -> None:
    packed = native.Packed([normal(1600, 512)], "float32")
    x = np.ones((3, 512))
    expected = packed.linear(x)

    def check() -> None:
        assert all(np.array_equal(packed.linear(x), expected) for _ in range(5))

    child = multiprocessing.get_context("fork").Process(target=check)
    child.start()
    child.join(PATIENCE)
    code, _ = child.exitcode, child.kill()
    assert code == 0
    check()


def test_several_matrices_side_by_side() -> None:
    ws, bs = [normal(n, 60) for n in (20, 7, 13)], [normal(20), None, normal(13)]
    x = normal(5, 60)
    whole = native.Packed(ws, "float32", bs).linear(x)
    parts = [native.Packed([w], "float32", [b]).linear(x) for w, b in zip(ws, bs, strict=True)]
    assert np.array_equal(whole, np.concatenate(parts, 1))
    with pytest.raises(ValueError, match="gate and up"):
        native.Packed([normal(20, 60), normal(7, 60)], "float32", paired=True)


@pytest.mark.parametrize("fallback", [False, True])
def test_pack_linears_replaces_every_linear(fallback: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fallback:
        monkeypatch.setattr(native, "available", lambda: False)
    conv = pytorch_utils.Conv1D(24, 40)
    torch.nn.init.normal_(conv.bias)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 40), torch.nn.Sequential(torch.nn.ReLU(), conv), torch.nn.Linear(24, 9, bias=False)
    ).eval()
    x = torch.randn(2, 7, 32)
    with torch.no_grad():
        before = model(x)
        linears.pack_linears_(model)
        assert sum(isinstance(m, linears.PackedLinear) for m in model.modules()) == 3
        after = model(x)
        ones = torch.cat([torch.cat([model(x[b : b + 1, i : i + 1]) for i in range(7)], 1) for b in range(2)])
    assert not any(isinstance(m, (torch.nn.Linear, pytorch_utils.Conv1D)) for m in model.modules())
    assert (before - after).abs().max() < 1e-5
    assert torch.equal(after, ones)


def test_packed_linear_takes_other_dtypes() -> None:
    layer = linears.PackedLinear(torch.randn(8, 16), weights="int8")
    assert layer(torch.randn(3, 16).bfloat16()).dtype == torch.bfloat16
    assert layer(torch.randn(0, 16)).shape == (0, 8)


def test_errors_name_what_would_work() -> None:
    with pytest.raises(ValueError, match="int8"):
        native.Packed([normal(4, 4)], "int2")
    with pytest.raises(ValueError, match="expected inputs"):
        native.Packed([normal(4, 4)], "float32").linear(np.ones((2, 5)))
    with pytest.raises(ValueError, match="at least one thread"):
        native.set_num_threads(0)
    with pytest.raises(ValueError, match="IQ2_XS"):
        native.Packed([Blocks(np.zeros((16, 74), np.uint8), "IQ2_XS", 256)], "float32")
    with pytest.raises(ValueError, match="multiple of 16 outputs"):
        native.Packed([random_blocks("Q4_K", 20, 256), random_blocks("Q6_K", 16, 256)], "float32")
