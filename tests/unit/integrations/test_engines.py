"""A setting in the words of other engines."""

import json
import shlex

import pytest

from outrider.integrations.engines import exports
from outrider.verify import VERIFIERS


def by_engine(config, lengths=None):
    return {e.engine: e for e in exports(config, lengths)}


def vllm(export):
    flag, text = shlex.split(export.command)
    assert flag == "--speculative-config"
    return json.loads(text)


def test_a_draft_model():
    found = by_engine(
        {"method": "draft_model", "model": "me/small", "num_speculative_tokens": 4, "controller": "fixed"}
    )
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


def test_a_tree_is_a_chain_where_there_are_none():
    config = {"method": "draft_model", "model": "s", "num_speculative_tokens": 3, "tree_width": 4, "tree_nodes": 8}
    found = by_engine(config)
    assert "--speculative-eagle-topk 4 --speculative-num-draft-tokens 9" in found["SGLang"].command
    for engine in ("vLLM", "llama.cpp"):
        assert any(note.startswith("trees:") for note in found[engine].notes)


def test_lengths_by_the_number_of_texts():
    lengths = {1: 4, 2: 4, 4: 2, 8: 0}
    found = by_engine({"method": "draft_model", "model": "s", "num_speculative_tokens": 4}, lengths)
    told = vllm(found["vLLM"])
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 3, 4], [4, 7, 2], [8, 4096, 0]]
    assert told["num_speculative_tokens"] == 4
    [adaptive] = [n for n in found["SGLang"].notes if "adaptive-config" in n]
    slots = json.loads(adaptive[adaptive.index("{") :])
    assert slots["1"] == {"candidate_steps": [1, 4]}
    assert slots["8"] == {"candidate_steps": [0, 1]}


def test_lookups():
    found = by_engine({"method": "ngram", "num_speculative_tokens": 10, "prompt_lookup_min": 3})
    assert vllm(found["vLLM"])["prompt_lookup_min"] == 3
    assert found["SGLang"].command.startswith("--speculative-algorithm NGRAM --speculative-num-draft-tokens 11")
    assert (
        found["llama.cpp"].command
        == "--spec-type ngram-simple --spec-ngram-simple-size-m 10 --spec-ngram-simple-size-n 3"
    )
    assert vllm(by_engine({"method": "suffix"})["vLLM"])["suffix_decoding_min_token_prob"] == 0.1


@pytest.mark.parametrize("method", ["token_recycling", "quantized_self", "layer_skip", "prediction"])
def test_methods_that_only_exist_here(method):
    for export in exports({"method": method}):
        assert export.command == ""
        assert export.notes == (f"{method}: this engine has no such method",)


def test_plain_decoding():
    assert [e.command for e in exports({"method": "none"})] == ["", "", "--spec-type none"]


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_rule_is_said_or_named_as_lost(verifier):
    found = by_engine({"method": "draft_model", "model": "s", "verifier": verifier})
    told = any(verifier in note for note in found["vLLM"].notes)
    assert told == (verifier not in ("rejection", "block"))
    assert vllm(found["vLLM"]).get("rejection_sample_method") == ("block" if verifier == "block" else None)
