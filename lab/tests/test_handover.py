"""A setting in the words of other engines. Each mismatch that a run or a source showed has a test.

`data/handover-parsers.json` has what the engines' own parsers know and made of each case: the guard of the tables.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from heads import GOLDEN, eagle1_folder, medusa_folder
from light import Late

from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.heads.eagle import EagleConfig
from outrider.drafters.heads.files import open_head
from outrider.models.builtin.shipped import builtin_folder
from outrider.models.load import Loaded, load
from outrider.verify import VERIFIERS
from outrider_lab.handover import ENGINES, TABLES, EngineCommand, exports, head_of, same_tokens, write_head
from outrider_lab.heads.writers import write_eagle

head_modules = Late("outrider_lab.heads.modules")

KNOWN = json.loads((Path(__file__).parent / "data" / "handover-parsers.json").read_text())
PARSED = {"method": "draft_model", "model": "builtin:code-draft", "num_speculative_tokens": 4}
LENGTHS = {1: 4, 4: 2, 8: 0}
TREE = {"tree_width": 3, "tree_nodes": 10}
# What the parsers were asked: a speculative_config, draft tokens by batch size, and whether the draft model has other tokens.
CASES: dict[str, tuple[dict[str, Any], dict[int, int] | None, bool]] = {
    "none": ({"method": "none"}, None, False),
    "draft_model": (PARSED, None, False),
    "draft_model rejection": ({**PARSED, "verifier": "rejection"}, None, False),
    "draft_model block": ({**PARSED, "verifier": "block"}, None, False),
    "draft_model tree": ({**PARSED, **TREE}, None, False),
    "draft_model int8": ({**PARSED, "quantization": "int8"}, None, False),
    "draft_model lengths": (PARSED, LENGTHS, False),
    "draft_model lengths from 2": (PARSED, {2: 6, 4: 3}, False),
    "draft_model no lengths": (PARSED, {1: 0, 2: 0}, False),
    "draft_model other tokens": (PARSED, None, True),
    "ngram": ({"method": "ngram"}, None, False),
    "ngram lengths": ({"method": "ngram", "num_speculative_tokens": 5}, LENGTHS, False),
    "ngram tree": ({"method": "ngram", "num_speculative_tokens": 5, **TREE}, None, False),
    "ngram lookup": ({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 4}, None, False),
    "suffix": ({"method": "suffix"}, None, False),
    "suffix long": ({"method": "suffix", "num_speculative_tokens": 32, "suffix_shared_tokens": 0}, None, False),
    "suffix corpus": ({"method": "suffix", "corpus": "texts.jsonl"}, None, False),
    "suffix lengths from 2": ({"method": "suffix", "num_speculative_tokens": 6}, {2: 6, 4: 3}, False),
    "suffix and draft_model": ({**PARSED, "method": ["suffix", "draft_model"]}, None, False),
    "layer_skip": ({"method": "layer_skip"}, None, False),
    "auto": ({"method": "auto"}, None, False),
}
DRAFT = {"method": "draft_model", "model": "me/small", "num_speculative_tokens": 4}


def by_engine(config: dict[str, Any], lengths: dict[int, int] | None = None, **more: Any) -> dict[str, EngineCommand]:
    return {e.engine: e for e in exports(config, lengths, **more)}


def vllm(export: EngineCommand) -> dict[str, Any]:
    flag, text = shlex.split(export.command)
    assert flag == "--speculative-config"
    return json.loads(text)


def flags(export: EngineCommand) -> dict[str, str]:
    """Flags with their values; a flag without one has ""."""
    out: dict[str, str] = {}
    last = ""
    for word in shlex.split(export.command):
        if word.startswith("--"):
            out[last := word] = ""
        else:
            out[last] = word
    return out


def said(export: EngineCommand, *words: str) -> bool:
    """Whether one note has all the words."""
    return any(all(word in note for word in words) for note in export.notes)


def test_a_draft_model() -> None:
    found = by_engine({**DRAFT, "controller": "fixed"})
    assert vllm(found["vLLM"]) == {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "model": "me/small",
        "draft_sample_method": "probabilistic",
    }
    assert found["SGLang"].command == (
        "--speculative-algorithm STANDALONE --speculative-draft-model-path me/small --speculative-num-steps 4 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5"
    )
    assert found["llama.cpp"].command == (
        "--spec-type draft-simple --spec-draft-model me/small.gguf --spec-draft-n-max 4"
    )
    text = found["TensorRT-LLM"].files["trt-llm.yaml"]
    assert '"decoding_type": "Draft_Target", "max_draft_len": 4, "speculative_model": "me/small"' in text
    assert "disable_overlap_scheduler: true" in text


def test_the_whole_command_line_and_its_files(tmp_path: Path) -> None:
    found = by_engine(DRAFT, model="builtin:code", out=tmp_path)
    code = str(builtin_folder("builtin:code"))
    assert found["vLLM"].serve == f"vllm serve {code} {found['vLLM'].command}"
    assert found["SGLang"].serve.startswith(
        f"python -m sglang.launch_server --model-path {code} --speculative-algorithm"
    )
    assert found["llama.cpp"].serve.startswith(f"llama-server -m {code}.gguf --spec-type draft-simple")
    assert found["TensorRT-LLM"].serve == f"trtllm-serve {code} --config {tmp_path}/trt-llm.yaml"
    first, second = found["vLLM"].files["vllm.yaml"].splitlines()
    assert json.loads(first.removeprefix("model: ")) == code
    assert json.loads(second.removeprefix("speculative-config: ")) == vllm(found["vLLM"])
    assert "spec-draft-n-max = 4" in found["llama.cpp"].files["llama.cpp.ini"]
    assert "speculative-num-steps: 4" in found["SGLang"].files["sglang.yaml"]
    for export in found.values():
        assert all((tmp_path / name).read_text() == text for name, text in export.files.items())


def test_no_engine_is_told_that_it_keeps_a_distribution_which_it_does_not() -> None:
    """B.3, 2 and 3: vLLM on a CPU, and SGLang on a CPU, an XPU and ROCm."""
    for verifier in VERIFIERS:
        for config in ({**DRAFT, "verifier": verifier}, {"method": "suffix", "verifier": verifier}):
            found = by_engine(config)
            assert said(found["vLLM"], "on a CPU", "do not keep the distribution", "55005")
            assert said(found["vLLM"], "logit_bias is refused (HTTP 400)", "min_p above temperature 0")
            assert said(found["SGLang"], "on a CPU", "XPU", "ROCm", "greedy")
            assert not any("same distribution" in n and "CUDA" not in n for n in found["SGLang"].notes)
            assert said(found["SGLang"], "penalties", "within a step")


def test_what_vllm_refuses_is_named() -> None:
    found = by_engine({"method": "ngram"})["vLLM"]
    assert said(found, "min_p", "logit_bias", "400")


def test_lookups_in_sglang_need_no_cuda() -> None:
    """B.3, 1 and 13: the lookup lengths and a corpus are kept."""
    found = by_engine({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4})["SGLang"]
    assert not any("CUDA" in note and "NGRAM" in note for note in found.notes)
    assert flags(found)["--speculative-ngram-max-trie-depth"] == "10"
    assert said(found, "2 to 4")
    kept = by_engine({"method": "suffix", "corpus": "texts.jsonl"})["SGLang"]
    assert flags(kept)["--speculative-ngram-external-corpus-path"] == "texts.jsonl"
    budget = int(flags(kept)["--speculative-ngram-external-sam-budget"])
    assert 0 < budget <= int(flags(kept)["--speculative-num-draft-tokens"]) - 1  # else SGLang does not start
    lost = by_engine({"method": "suffix", "corpus": "texts"})["SGLang"]
    assert "--speculative-ngram-external-corpus-path" not in flags(lost)
    assert said(lost, "corpus", "left out")


def test_block_verification() -> None:
    """B.3, 4: only vLLM's second model runner has it. SGLang has it for block drafters."""
    found = by_engine({**DRAFT, "verifier": "block"})
    assert vllm(found["vLLM"])["rejection_sample_method"] == "block"
    assert said(found["vLLM"], "block", "VLLM_USE_V2_MODEL_RUNNER=1")
    drafter = by_engine({"method": "dflash", "model": "/head", "verifier": "block"})["SGLang"]
    assert "--speculative-use-block-verification" in flags(drafter)
    assert "--speculative-use-block-verification" not in flags(found["SGLang"])


def test_a_schedule_begins_with_one_text() -> None:
    """B.3, 5: vLLM does not start with another."""
    told = vllm(by_engine({"method": "suffix", "num_speculative_tokens": 6}, {2: 6, 4: 3})["vLLM"])
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 3, 6], [4, 4096, 3]]


def test_a_schedule_without_drafts_is_plain_decoding() -> None:
    """B.3, 6."""
    found = by_engine(DRAFT, {1: 0, 2: 0})
    assert [e.command for e in found.values()] == ["", "", "--spec-type none", ""]
    assert all(said(e, "no batch size gains") for e in found.values())
    assert all(e.supported for e in found.values())


def test_suffix_decoding_in_vllm_is_said_whole() -> None:
    """B.3, 7."""
    found = by_engine({"method": "suffix", "num_speculative_tokens": 20})["vLLM"]
    told = vllm(found)
    assert told["suffix_decoding_min_token_prob"] == 0.1
    assert told["suffix_decoding_max_spec_factor"] == 1.0
    assert told["suffix_decoding_max_tree_depth"] > 20  # of a match and a draft together
    assert said(found, "pip install arctic-inference==0.1.1")
    alone = vllm(by_engine({"method": "suffix", "suffix_shared_tokens": 0})["vLLM"])
    assert alone["suffix_decoding_max_cached_requests"] == 0


def test_a_draft_with_other_tokens() -> None:
    """B.3, 8."""
    found = by_engine(DRAFT, other_tokens=True)
    told = vllm(found["vLLM"])
    assert told["use_heterogeneous_vocab"] is True
    assert "draft_sample_method" not in told  # vLLM refuses the two together
    assert said(found["SGLang"], "tokens", "refuses")
    assert said(found["llama.cpp"], "tokens", "passes the text")
    assert said(found["TensorRT-LLM"], "tokens")
    for export in exports(DRAFT):
        assert not said(export, "tokens:")


def test_whether_two_models_have_the_same_tokens(tmp_path: Path) -> None:
    assert same_tokens("builtin:code", "builtin:code-draft") is True
    assert same_tokens("builtin:code", "someone/else") is None
    padded = tmp_path / "padded"
    padded.mkdir()
    for file in (builtin_folder("builtin:code-draft")).iterdir():
        (padded / file.name).symlink_to(file)
    settings = json.loads((padded / "config.json").read_text())
    (padded / "config.json").unlink()
    (padded / "config.json").write_text(json.dumps({**settings, "vocab_size": settings["vocab_size"] + 64}))
    assert same_tokens("builtin:code", str(padded)) is False  # the same tokens, and another size: engines refuse it


def test_several_methods() -> None:
    """B.3, 9: llama.cpp takes a list. TensorRT-LLM helps an EAGLE head with look-ups."""
    found = by_engine({"method": ["suffix", "draft_model"], "model": "s.gguf"})
    assert flags(found["llama.cpp"])["--spec-type"] == "ngram-simple,draft-simple"
    assert flags(found["llama.cpp"])["--spec-draft-model"] == "s.gguf"
    for engine in ("vLLM", "SGLang", "TensorRT-LLM"):
        assert not found[engine].supported
        assert said(found[engine], "together")
    twice = by_engine({"method": ["suffix", "ngram"]})["llama.cpp"]
    assert flags(twice)["--spec-type"] == "ngram-simple"
    helped = by_engine({"method": ["suffix", "eagle"], "model": "/head"})["TensorRT-LLM"]
    assert '"decoding_type": "Eagle3"' in helped.files["trt-llm.yaml"]
    assert '"sa_config": {"threshold": 4, "enable_global_pool": true}' in helped.files["trt-llm.yaml"]


def test_lookups_in_llama_cpp() -> None:
    """B.3, 10 and 11: only options that ngram-simple reads, and a length that matches short texts."""
    found = by_engine({"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 3})["llama.cpp"]
    assert flags(found) == {
        "--spec-type": "ngram-simple",
        "--spec-ngram-simple-size-n": "3",
        "--spec-ngram-simple-size-m": "10",
    }
    assert not any("--spec-draft" in note for note in found.notes)
    assert said(found, "3 to 5")
    suffix = by_engine({"method": "suffix"})["llama.cpp"]
    assert int(flags(suffix)["--spec-ngram-simple-size-n"]) < 12
    assert said(suffix, "suffix", "nearest")


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantized_draft_is_named_everywhere(weights: str) -> None:
    """B.3, 12."""
    found = by_engine({**DRAFT, "quantization": weights})
    for export in found.values():
        assert said(export, f"{weights} weights of the draft"), export
    assert said(found["SGLang"], "--speculative-draft-model-quantization")
    assert said(found["llama.cpp"], "q8_0" if weights == "int8" else "Q4_0")


def test_lengths_by_batch_size(tmp_path: Path) -> None:
    """B.3, 14: SGLang's --speculative-num-steps must be one of the file's candidates."""
    lengths = {1: 5, 2: 5, 4: 2, 8: 0}
    found = by_engine(DRAFT, lengths)
    told = vllm(found["vLLM"])
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 3, 5], [4, 7, 2], [8, 4096, 0]]
    assert told["num_speculative_tokens"] == 5
    assert said(found["SGLang"], "lengths by batch size", "EAGLE")
    assert said(found["llama.cpp"], "lengths by batch size", "none")
    assert '"draft_len_schedule": {3: 5, 7: 2}' in found["TensorRT-LLM"].files["trt-llm.yaml"]
    head = by_engine({"method": "eagle", "model": "/head", "num_speculative_tokens": 3}, lengths, out=tmp_path)[
        "SGLang"
    ]
    slots = json.loads(head.files["sglang-adaptive.json"])
    assert slots == {
        "1": {"candidate_steps": [1, 5]},
        "2": {"candidate_steps": [1, 5]},
        "4": {"candidate_steps": [1, 2]},
        "8": {"candidate_steps": [0, 1]},
    }
    union = {step for slot in slots.values() for step in slot["candidate_steps"]}
    assert int(flags(head)["--speculative-num-steps"]) in union
    assert flags(head)["--speculative-adaptive-config"] == f"{tmp_path}/sglang-adaptive.json"


def test_lengths_that_grow_cannot_be_said_in_tensorrt_llm() -> None:
    found = by_engine(DRAFT, {1: 2, 4: 5})["TensorRT-LLM"]
    assert "draft_len_schedule" not in found.files["trt-llm.yaml"]
    assert said(found, "lengths by batch size", "longest")


def test_a_tree_is_a_chain_where_there_are_none() -> None:
    config = {"method": "draft_model", "model": "s", "num_speculative_tokens": 3, "tree_width": 4, "tree_nodes": 8}
    found = by_engine(config)
    assert "--speculative-eagle-topk 4 --speculative-num-draft-tokens 9" in found["SGLang"].command
    for engine in ("vLLM", "llama.cpp", "TensorRT-LLM"):
        assert any(note.startswith("trees:") for note in found[engine].notes)
    eagle = by_engine({**config, "method": "eagle"})["TensorRT-LLM"]
    assert '"dynamic_tree_max_topK": 4, "max_total_draft_tokens": 8' in eagle.files["trt-llm.yaml"]


def test_heads() -> None:
    """B.3, 15: Medusa is gone from vLLM 0.33. llama.cpp and SGLang run block drafters."""
    medusa = by_engine({"method": "medusa", "model": "/head"})
    assert said(medusa["vLLM"], "0.33")
    assert [e.supported for e in medusa.values()] == [True, False, False, False]
    spark = by_engine({"method": "dspark", "model": "/head"}, model="m")
    assert spark["vLLM"].environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert spark["vLLM"].serve.startswith("env VLLM_USE_V2_MODEL_RUNNER=1 vllm serve m ")
    assert flags(spark["llama.cpp"])["--spec-type"] == "draft-dspark"
    assert flags(spark["SGLang"])["--speculative-num-draft-tokens"] == "8"
    flash = by_engine({"method": "dflash", "model": "/head"})
    assert flags(flash["llama.cpp"])["--spec-type"] == "draft-dflash"
    assert said(flash["SGLang"], "not on a CPU")
    eagle = by_engine({"method": "eagle", "model": "/head"})["llama.cpp"]
    assert flags(eagle)["--spec-type"] == "draft-eagle3"
    assert said(eagle, "--target-model-dir")


def test_a_gguf_file_keeps_its_name_and_is_named_where_it_is_not_read() -> None:
    found = by_engine({"method": "draft_model", "model": "small.gguf"}, model="big.gguf")
    assert found["llama.cpp"].serve.startswith(
        "llama-server -m big.gguf --spec-type draft-simple --spec-draft-model small.gguf"
    )
    assert not said(found["llama.cpp"], "convert")
    for engine in ("vLLM", "SGLang", "TensorRT-LLM"):
        assert said(found[engine], "big.gguf is a GGUF file")
        assert said(found[engine], "small.gguf is a GGUF file")


@pytest.mark.parametrize("method", ["token_recycling", "quantized_self", "layer_skip", "prediction"])
def test_methods_that_only_exist_here(method: str) -> None:
    for export in exports({"method": method}):
        assert export.command == ""
        assert export.notes == (f"{method}: this engine has no such method",)
        assert not export.supported


def test_auto_is_tuned_first() -> None:
    assert all("outrider tune prints" in export.notes[0] for export in exports({"method": "auto"}))


def test_plain_decoding() -> None:
    assert [e.command for e in exports({"method": "none"})] == ["", "", "--spec-type none", ""]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_verifier_is_said_or_named_as_lost(verifier: str) -> None:
    found = by_engine({"method": "draft_model", "model": "s", "verifier": verifier})
    for engine, export in found.items():
        kept = verifier == "rejection" and engine != "SGLang"
        assert any(note.startswith((verifier, f"the verifier {verifier}")) for note in export.notes) != kept, engine
    assert vllm(found["vLLM"]).get("rejection_sample_method") == ("block" if verifier == "block" else None)
    sampled = flags(found["llama.cpp"]).get("--spec-draft-sampling") == "probabilistic"
    assert sampled == (verifier == "rejection")
    assert ("use_rejection_sampling" in found["TensorRT-LLM"].files["trt-llm.yaml"]) == (verifier == "rejection")


# A value for each key, for the methods that read it: no engine may lose one in silence.
KEYS: dict[str, tuple[str, Any]] = {
    "num_speculative_tokens": ("suffix", 7),
    "tree_width": ("draft_model", 3),
    "corpus": ("suffix", "texts"),
    "suffix_shared_tokens": ("suffix", 0),
    "prompt_lookup_min": ("ngram", 3),
    "prompt_lookup_max": ("ngram", 9),
    "verifier": ("draft_model", "traversal"),
    "quantization": ("draft_model", "int8"),
    "draft_vocab": ("draft_model", 1024),
    "model": ("draft_model", "another"),
}
# What an engine has no counterpart for, where the texts and the drafts stay the same.
SILENT = {("suffix_shared_tokens", "SGLang"), ("suffix_shared_tokens", "llama.cpp")}


@pytest.mark.parametrize("key", KEYS)
def test_no_key_is_lost_in_silence(key: str) -> None:
    method, value = KEYS[key]
    plain = {"method": method} | ({"model": "s"} if method == "draft_model" else {})
    before, after = by_engine(plain), by_engine({**plain, key: value})
    for engine in before:
        if (key, engine) not in SILENT:
            assert before[engine] != after[engine], f"{engine} says nothing of {key}"


def test_a_row_of_a_package_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLES["vllm"]["methods"], "token_recycling", "mine")
    monkeypatch.setitem(TABLES["vllm"], "rows", [*TABLES["vllm"]["rows"], ["token_recycling", {"more": 1}, "differs"]])
    found = by_engine({"method": "token_recycling"})
    assert vllm(found["vLLM"]) | {"method": "mine", "more": 1} == vllm(found["vLLM"])
    assert said(found["vLLM"], "differs")
    assert not found["SGLang"].supported


@pytest.mark.parametrize("lengths", [{0: 4}, {-1: 2}, {1: -1}, {1: 5000}])
def test_lengths_that_are_none(lengths: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="1:4,4:2,8:0"):
        exports(DRAFT, lengths)


def test_an_unknown_engine() -> None:
    with pytest.raises(ValueError, match="did you mean 'vllm'"):
        exports(DRAFT, engines=["vlm"])
    assert ENGINES == ["vllm", "sglang", "llama.cpp", "trt-llm"]


# -- what the engines' own parsers said ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", KNOWN)
def test_every_flag_of_a_table_is_known_there(engine: str) -> None:
    """Of each row, also of those that no case comes to."""
    known = set(KNOWN[engine]["options"])
    rows = [row[1] for row in (*TABLES[engine]["rows"], *TABLES["all"]["rows"])]
    names = {name for sets in [*rows, TABLES[engine].get("plain", {})] for name in sets}
    assert len(names) > 5
    assert names <= known, f"{engine} {KNOWN[engine]['version']} does not know {names - known}"


@pytest.mark.parametrize("name", CASES)
def test_the_parsers_read_what_is_meant(name: str) -> None:
    """What each parser made of the exported line, in vLLM's and SGLang's own words."""
    config, lengths, other_tokens = CASES[name]
    found = by_engine(config, lengths, other_tokens=other_tokens)
    read = KNOWN["vllm"].get(f"{name}, command")
    told = vllm(found["vLLM"]) if found["vLLM"].command else {}
    assert (read is not None) == found["vLLM"].supported
    if read is not None and "refused" not in read:
        assert told.get("method") == read["method"]
        for key in told.keys() & read.keys():
            assert told[key] == read[key], key
        assert told.get("num_speculative_tokens_per_batch_size") == read.get("schedule")
    read = KNOWN["sglang"].get(f"{name}, command")
    assert (read is not None) == found["SGLang"].supported
    for key, value in flags(found["SGLang"]).items():
        short = key.removeprefix("--speculative-").replace("-", "_")
        if read is not None and short in read and short != "draft_model_path":
            assert value == str(read[short]), key
    assert (f"{name}, command" in KNOWN["llama.cpp"]) == found["llama.cpp"].supported


# -- trained heads --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def code() -> Loaded:
    return load("builtin:code")


@pytest.fixture
def head(code: Loaded, tmp_path: Path) -> Path:
    return write_eagle(
        tmp_path / "head", head_modules.Eagle(head_modules.config_for(EagleConfig, code.config)).weights()
    )


@pytest.mark.parametrize("engine", ["sglang", "trt-llm"])
def test_a_head_is_written_as_the_engine_reads_it(engine: str, head: Path, tmp_path: Path) -> None:
    config = {"method": "eagle", "model": str(head)}
    [told] = exports(config, engines=[engine])
    assert said(told, "head: ", "flat", "--out FOLDER and -m MODEL")
    [command] = exports(config, model="builtin:code", engines=[engine], out=tmp_path / "out")
    written, opened = open_head(tmp_path / "out" / f"head-{engine}"), open_head(head)
    assert str(written.path) in command.serve + "".join(command.files.values())
    assert not said(command, "head: ")
    assert "speculators_model_type" in opened.settings
    assert written.kind == "eagle3"
    assert "speculators_model_type" not in written.settings
    old, new = opened.tensors, written.tensors
    assert {t.dtype for t in new.values()} == {t.dtype for t in old.values()}
    assert bool((new["fc.weight"] == old["fc.weight"]).all())


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_a_head_that_an_engine_reads_stays(engine: str, head: Path, tmp_path: Path) -> None:
    [command] = exports({"method": "eagle", "model": str(head)}, model="builtin:code", engines=[engine], out=tmp_path)
    assert str(head) in command.serve
    assert not (tmp_path / f"head-{engine}").exists()


def test_heads_that_an_engine_does_not_run(tmp_path: Path) -> None:
    first = by_engine({"method": "eagle", "model": str(eagle1_folder(tmp_path))})
    assert [e.supported for e in first.values()] == [True, True, False, False]
    assert said(first["llama.cpp"], "EAGLE-1", "outrider train eagle3")
    assert vllm(first["vLLM"])["method"] == "eagle"
    assert flags(first["SGLang"])["--speculative-algorithm"] == "EAGLE"
    block = by_engine({"method": "dflash", "model": str(GOLDEN / "dflash")})["SGLang"]
    assert not block.supported
    assert said(block, "z-lab", "original checkpoint")
    medusa = by_engine({"method": "medusa", "model": str(medusa_folder(tmp_path, "old"))})["vLLM"]
    assert said(medusa, "head: ", "FasterDecoding")


def test_a_head_is_not_overwritten(code: Loaded, tmp_path: Path) -> None:
    own = write_eagle(
        tmp_path / "head-sglang", head_modules.Eagle(head_modules.config_for(EagleConfig, code.config)).weights()
    )
    with pytest.raises(ValueError, match="is the head itself"):
        write_head(open_head(own), "sglang", "builtin:code", tmp_path)


def test_a_head_for_another_target(head: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hidden|layers|wide"):
        write_head(open_head(head), "sglang", "builtin:code-draft", tmp_path / "out")


def test_a_folder_that_holds_no_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no weights"):
        head_of(SpeculativeConfig.of({"method": "eagle", "model": str(tmp_path)}))
    assert head_of(SpeculativeConfig.of({"method": "eagle", "model": "someone/head"})) is None
