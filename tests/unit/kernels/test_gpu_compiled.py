"""The kernels of GPUs, compiled for cards that are not there: instructions, registers, and float sums by reduction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from light import ROOT

pytest.importorskip("triton", reason="needs triton")
CODED = ("*u8", "*i8")
SUMMED = {"sum_norm", "rope_store"}  # one program a row, and a block of its width


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One for each kernel and each setting of it, for Hopper; those with products for Ampere, too."""
    folder = tmp_path_factory.mktemp("triton")
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "DISABLE_MMA_V3", "DISABLE_MMA_V5")}
    done = subprocess.run(
        [sys.executable, ROOT / "tests/support/gpu_compiled.py", "90", "80"],
        capture_output=True,
        text=True,
        env=clean | {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_is_compiled(compiled: list[dict[str, Any]]) -> None:
    kernels = {each["kernel"] for each in compiled if each["architecture"] == 90}
    assert kernels == {
        "advance", "attend", "choose", "combine", "linear", "map", "move", "rank", "rope_store", "sum_norm", "take", "walk"
    }  # fmt: skip
    assert {each["kernel"] for each in compiled if each["architecture"] == 80} >= {"attend", "linear"}


def test_every_product_is_by_one_instruction(compiled: list[dict[str, Any]]) -> None:
    for each in compiled:
        assert each["products"] == (["mma.sync.aligned.m16n8k16"] if each["kernel"] in ("attend", "linear") else []), (
            each
        )


def test_no_product_is_computed_twice(compiled: list[dict[str, Any]]) -> None:
    """The warps of a program share its tile, in pieces of 16 rows and 8 columns."""
    for each in compiled:
        if each["kernel"] == "linear":
            assert each["tiles"], each
            for rows, columns in each["tiles"]:
                assert int(rows) * 16 <= each["constants"]["BM"], each
                assert int(columns) * 8 <= each["constants"]["BN"], each


def test_nothing_spills_and_shared_memory_fits_every_card(compiled: list[dict[str, Any]]) -> None:
    """What a compiler puts aside of a product is little, and never in the loop over its inputs."""
    for each in compiled:
        assert not each["spilled"] or (each["kernel"] == "linear" and each["constants"]["LOOP"]), each
        assert each["spilled"] <= 64, each
        assert not each["spilled_in_loop"], each
        assert each["shared"] <= 99 * 1024, each  # the least of the cards from 8.0 on


def test_floats_are_summed_and_fused_by_name_only(compiled: list[dict[str, Any]]) -> None:
    for each in compiled:
        assert not each["float_sums"] or each["kernel"] in SUMMED, each
        drawn = each["kernel"] in ("choose", "rank") and each["constants"].get("COUNT") != 1
        assert bool(each["fused"]) == (drawn or each["weights"] in CODED), each


def test_a_sum_lies_in_the_threads_alike_for_any_number_of_rows(compiled: list[dict[str, Any]]) -> None:
    """Many rows are another piece of code than few, which has parts. Its sums have the same layout."""
    layouts, parts = dict[tuple[str, int, str], set[str]](), dict[tuple[str, int, str], set[int]]()
    for each in compiled:
        if each["float_sums"]:
            numbers = each["constants"]
            key = each["kernel"], numbers.get("W", numbers.get("D")), each["out"]
            layouts.setdefault(key, set()).update(each["layouts"])
            parts.setdefault(key, set()).add(numbers["PARTS"])
    assert all(len(kinds) == 1 for kinds in layouts.values()), layouts
    both = {key for key in parts if len(parts[key]) > 1}
    assert {("sum_norm", 128, "*fp32"), ("sum_norm", 2048, "*bf16"), ("rope_store", 32, "")} <= both


def test_weights_and_keys_are_read_sixteen_bytes_at_a_time(compiled: list[dict[str, Any]]) -> None:
    for each in compiled:
        if each["kernel"] in ("attend", "linear"):
            assert each["asynchronous"], each
            narrow = each["constants"].get("TREE", False) or each["weights"] in CODED
            assert bool(each["narrow"]) == narrow, each  # the nodes of a path, and scales


def test_coded_weights_meet_their_inputs_alike_for_any_number_of_rows(compiled: list[dict[str, Any]]) -> None:
    """Which inputs one instruction adds up. Codes become numbers where they lie, without a way through shared memory."""
    together = dict[str, set[str]]()
    for each in compiled:
        if each["kernel"] == "linear":
            together.setdefault(each["weights"], set()).update(each["together"])
            assert not each["shared_in_loop"], each
    assert together == {"*bf16": {"2"}, "*i8": {"4"}, "*u8": {"8"}}
