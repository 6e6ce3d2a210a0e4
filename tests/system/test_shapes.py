"""Files of true shapes with random weights: their tensors have llama.cpp's names, and outrider runs those of its families."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.shapes import FAMILIES, cut, formats, values, write
from outrider import LLM, SamplingParams

# Architectures whose files run today: one family of each.
RUN = ("gemma3-270m", "llama3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "olmo2-1b")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_names_are_those_of_the_architecture(name: str) -> None:
    family = FAMILIES[name]
    number = next(n for n, arch in gguf.MODEL_ARCH_NAMES.items() if arch == family.arch)
    of_next_token = {
        n for n in gguf.TENSOR_NAMES.values() if ".nextn." in n
    }  # the package lists them for some families only
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[number]} | of_next_token
    for tensor in formats(family):
        stem = re.sub(r"\.(weight|bias)$", "", re.sub(r"^blk\.\d+", "blk.{bid}", tensor))
        assert stem in known | {n.removesuffix(".bias") for n in known}, tensor
    assert len({t.split(".")[1] for t in formats(cut(family, 2)) if t.startswith("blk.")}) == 2


@pytest.mark.parametrize("name", RUN)
def test_a_file_is_read_and_writes_a_text(name: str, tmp_path: Path) -> None:
    family = replace(cut(FAMILIES[name], 1), vocab=300)
    write(family, tmp_path / "a.gguf")
    llm = LLM(str(tmp_path / "a.gguf"), device="cpu", max_model_len=64, max_num_seqs=1)
    [out] = llm.generate(["def f"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(out.outputs[0].token_ids) == 4
    assert llm.encode("def f") == [llm.encode(letter)[0] for letter in "def f"]


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0", "Q8_0", "MXFP4"])
def test_a_matrix_keeps_the_size_of_its_input(kind: str) -> None:
    data = values("blk.0.ffn_up.weight", (64, 1024), kind, np.random.default_rng(1))
    meant = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert meant.shape == (64, 1024)
    assert 0.7 < meant.std() * 32 < 1.4
    assert abs(meant.mean()) < meant.std() / 15
