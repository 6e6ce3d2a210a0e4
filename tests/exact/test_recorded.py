"""The same request gives the same tokens in every version, compared with a record.

The record is of the version that stored the built-in weights in bfloat16. Before it, the texts had been the same since commit
3aedf71 in float32 and bfloat16, and since the first integer kernels in int8 and int4.

`tests/support/record.py` wrote the record. The target runs on the native kernels, which give the same
bits on every machine. The default run compares all groups in float32 and one or two groups for each other precision.
`pytest -m long` compares the rest.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import record
from architectures import VOCAB, tiny

from outrider import LLM, SamplingParams
from outrider.kernels import cpu as native

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())
GROUPS = {group.name: group for group in record.groups()}
QUICK = {"bfloat16/draft_tree", "int8/rejection-tree", "int8/token_recycling", "int4/several"}


def cases() -> list[object]:
    default = QUICK | {name for name in GROUPS if name.startswith("float32/")}
    return [pytest.param(name, marks=() if name in default else pytest.mark.long) for name in GROUPS]


def test_the_record_holds_every_group() -> None:
    assert list(RECORDED) == list(GROUPS)
    assert [len(RECORDED[name]) for name in GROUPS] == [group.size for group in GROUPS.values()]


@pytest.mark.skipif(not native.available(), reason="torch's own kernels may round differently on another machine")
@pytest.mark.parametrize("name", cases())
def test_the_tokens_are_those_that_were_recorded(name: str) -> None:
    assert GROUPS[name].run() == RECORDED[name]


@pytest.mark.skipif(not native.available(), reason="needs the native kernels")
def test_another_seed_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: one sampling seed of the group moves by one."""
    params = record.SamplingParams
    moved = lambda seed, **given: params(seed=seed + (seed == 1001), **given)  # noqa: E731
    monkeypatch.setattr(record, "SamplingParams", moved)
    new, old = GROUPS["float32/none"].run(), RECORDED["float32/none"]
    assert [a == b for a, b in zip(new, old, strict=True)] == [True, False, True, True]


@pytest.mark.parametrize("method", ["suffix", "ngram", "token_recycling", "layer_skip"])
def test_a_model_of_transformers_keeps_the_text_of_plain_decoding(method: str) -> None:
    """Torch's own kernels may round differently elsewhere, so this compares two runs on one machine."""
    prompts = [{"prompt_token_ids": [(7 * i + j * j) % VOCAB for j in range(9)]} for i in range(4)]
    params = [SamplingParams(max_tokens=30, seed=i, temperature=float(i % 2 == 0), top_k=i // 2 * 9) for i in range(4)]
    config = dict(record.CONFIGS[method]) | ({"layers": [0]} if method == "layer_skip" else {})
    model = tiny("gpt_neox")

    def texts(config: dict[str, object]) -> list[list[int]]:
        llm = LLM(model, speculative_config=config, max_num_seqs=2, dtype="float32", device="cpu")
        return [out.outputs[0].token_ids for out in llm.generate(prompts, params)]

    assert texts(config) == texts({"method": "none"})
