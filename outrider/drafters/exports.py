"""How other engines run our methods: the settings for each method, by engine.

The names are those of vLLM 0.32 (`vllm/config/speculative.py`), SGLang 0.5.23 (`srt/arg_groups/fields/spec.py`), llama.cpp of
autumn 2026 (`llama-server --help`) and TensorRT-LLM 1.3 (`tensorrt_llm/llmapi/llm_args.py`). `outrider.integrations.engines`
adds what does not depend on the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.drafters.method import EngineExport

if TYPE_CHECKING:
    from outrider.config import SpeculativeConfig

LLAMA_MATCH = 3
"""Tokens that llama.cpp looks up for suffix decoding. Its own default, 12, hardly ever matches a short text."""


def named_model(config: SpeculativeConfig) -> str:
    """The draft model for another engine. A built-in model is a folder of this package, or the file that was fetched."""
    return model_path(str(config.model))


def model_path(name: str) -> str:
    """A model's name for another engine."""
    if not name.startswith("builtin:"):
        return name
    from outrider.models.builtin.download import DOWNLOADS
    from outrider.models.load import DATA

    return str(DOWNLOADS[name].cached) if name in DOWNLOADS else str(Path(DATA) / name.removeprefix("builtin:"))


def gguf_path(name: str) -> str:
    """The GGUF file that llama.cpp reads: the model itself, or the one to convert its folder to."""
    path = model_path(name)
    return path if path.endswith(".gguf") else f"{path.rstrip('/')}.gguf"


def _gguf_notes(config: SpeculativeConfig) -> list[str]:
    source, wanted = named_model(config), gguf_path(str(config.model))
    return (
        []
        if source == wanted
        else [f"model: convert it first: python convert_hf_to_gguf.py {source} --outfile {wanted}"]
    )


def _head_notes(config: SpeculativeConfig) -> list[str]:
    source, wanted = named_model(config), gguf_path(str(config.model))
    if source == wanted:
        return []
    return [
        f"head: convert it first: python convert_hf_to_gguf.py {source} --target-model-dir TARGET --outtype bf16 "
        f"--outfile {wanted}"
    ]


def _copies(config: SpeculativeConfig, how: Mapping[str, str]) -> list[str]:
    """A note for a draft model with weights of 8 or 4 bits. how: what to do there, by our name."""
    return (
        [f"{config.quantization} weights of the draft: {how[config.quantization]}"]
        if config.quantization in how
        else []
    )


def _draft_vocab(config: SpeculativeConfig) -> list[str]:
    if config.draft_vocab is None and config.draft_vocab_corpus is None and config.speculative_token_map is None:
        return []
    return ["draft vocabulary: the draft's output head keeps all tokens, so each draft token costs more"]


def _memory(config: SpeculativeConfig) -> list[str]:
    """A note for a corpus that an engine cannot read."""
    return [] if config.corpus is None else ["corpus: not read there, so drafts come from prompts and answers only"]


def _matches(config: SpeculativeConfig, rule: str) -> str:
    return f"lookup of {config.prompt_lookup_min} to {config.prompt_lookup_max} tokens: {rule}"


def _eagle1(config: SpeculativeConfig) -> bool:
    """Whether the head is one of EAGLE-1. A head that is not here is taken for EAGLE-3."""
    from outrider.drafters.heads.files import EAGLE1, head_kind

    return head_kind(named_model(config)) == EAGLE1


# -- vLLM -----------------------------------------------------------------------------------------------------------------


def _head(config: SpeculativeConfig) -> dict[str, Any]:
    return {"model": named_model(config)}


VLLM_DRAFT_MODEL = EngineExport(
    lambda c: {"model": named_model(c), "draft_sample_method": "probabilistic"},
    lambda c: [
        *_copies(
            c, dict.fromkeys(("int8", "int4"), "give a checkpoint that is quantized to it, else a draft costs more")
        ),
        *_draft_vocab(c),
    ],
)
VLLM_EAGLE = EngineExport(lambda c: {"method": "eagle" if _eagle1(c) else "eagle3", **_head(c)})
VLLM_PEAGLE = EngineExport(lambda c: {"method": "eagle3", **_head(c), "parallel_drafting": True})
VLLM_MTP = EngineExport(lambda c: {"method": "mtp"})
VLLM_MEDUSA = EngineExport(_head, lambda c: ["medusa: vLLM 0.33 no longer has this method; 0.32 does"])
VLLM_BLOCK = EngineExport(_head)
VLLM_SUFFIX = EngineExport(
    lambda c: {
        "suffix_decoding_max_tree_depth": max(24, c.budget.depth + 8),
        "suffix_decoding_max_spec_factor": 1.0,
        "suffix_decoding_min_token_prob": c.suffix_decoding_min_token_prob,
        **({} if c.suffix_shared_tokens else {"suffix_decoding_max_cached_requests": 0}),
    },
    lambda c: [
        "install: pip install arctic-inference==0.1.1",
        "length: suffix_decoding_max_spec_factor 1.0 drafts no more tokens than the match is long; more is bolder",
        *_memory(c),
    ],
)
VLLM_NGRAM = EngineExport(
    lambda c: {"prompt_lookup_min": c.prompt_lookup_min, "prompt_lookup_max": c.prompt_lookup_max}
)

# -- SGLang ---------------------------------------------------------------------------------------------------------------


def _sglang_model(algorithm: str) -> Callable[[SpeculativeConfig], dict[str, Any]]:
    return lambda c: {
        "--speculative-algorithm": algorithm,
        "--speculative-draft-model-path": named_model(c),
        "--speculative-num-steps": c.budget.depth,
        "--speculative-eagle-topk": c.tree_width,
        "--speculative-num-draft-tokens": c.budget.max_nodes + 1,  # SGLang counts the root
    }


def _sglang_block(algorithm: str) -> EngineExport:
    return EngineExport(
        lambda c: {
            "--speculative-algorithm": algorithm,
            "--speculative-draft-model-path": named_model(c),
            "--speculative-num-draft-tokens": c.budget.depth + 1,
            **({"--speculative-use-block-verification": None} if c.verifier == "block" else {}),
        },
        lambda c: ["device: SGLang runs this method on CUDA, NPU and XPU, not on a CPU"],
    )


def _sglang_ngram(config: SpeculativeConfig) -> dict[str, Any]:
    longest = config.prompt_lookup_max if config.method == "ngram" else 16
    flags: dict[str, Any] = {
        "--speculative-algorithm": "NGRAM",
        "--speculative-num-draft-tokens": config.budget.max_nodes + 1,
        "--speculative-ngram-max-bfs-breadth": config.tree_width,
        # a path of the trie is a match and what followed it
        "--speculative-ngram-max-trie-depth": longest + config.budget.depth,
    }
    if _jsonl(config.corpus):
        flags["--speculative-ngram-external-corpus-path"] = config.corpus
        flags["--speculative-ngram-external-sam-budget"] = max(1, config.budget.max_nodes // 2)
    return flags


def _jsonl(corpus: Any) -> bool:
    return isinstance(corpus, (str, Path)) and str(corpus).endswith(".jsonl")


def _sglang_corpus(config: SpeculativeConfig) -> list[str]:
    if config.corpus is None:
        return []
    if _jsonl(config.corpus):
        return ["corpus: SGLang reads one JSON string a line, and gives half of the draft to it"]
    return [
        "corpus: SGLang reads a .jsonl file with one JSON string a line, --speculative-ngram-external-corpus-path; this one "
        "is left out, so drafts come from prompts and answers only"
    ]


SGLANG_DRAFT_MODEL = EngineExport(
    _sglang_model("STANDALONE"),
    lambda c: [
        *_copies(
            c,
            {
                "int8": "give a w8a8_int8 checkpoint and --speculative-draft-model-quantization w8a8_int8",
                "int4": "give a gptq or awq checkpoint and --speculative-draft-model-quantization",
            },
        ),
        *_draft_vocab(c),
    ],
)
SGLANG_EAGLE = EngineExport(lambda c: _sglang_model("EAGLE" if _eagle1(c) else "EAGLE3")(c))
SGLANG_MTP = EngineExport(
    lambda c: {k: v for k, v in _sglang_model("EAGLE")(c).items() if k != "--speculative-draft-model-path"},
    lambda c: ["MTP: without a draft model, EAGLE is the layer of the checkpoint"],
)
SGLANG_DFLASH = _sglang_block("DFLASH")
SGLANG_DSPARK = _sglang_block("DSPARK")
SGLANG_SUFFIX = EngineExport(
    _sglang_ngram,
    lambda c: [
        "suffix: NGRAM is the nearest; it shares a trie of prompts and answers between all requests",
        *_sglang_corpus(c),
    ],
)
SGLANG_NGRAM = EngineExport(
    _sglang_ngram,
    lambda c: (
        [_matches(c, f"SGLang matches 1 token or more, so drafts shorter than {c.prompt_lookup_min} come too")]
        if c.prompt_lookup_min > 1
        else []
    ),
)

# -- llama.cpp ------------------------------------------------------------------------------------------------------------


def _llama_model(kind: str) -> Callable[[SpeculativeConfig], dict[str, Any]]:
    return lambda c: {
        "--spec-type": kind,
        "--spec-draft-model": gguf_path(str(c.model)),
        "--spec-draft-n-max": c.budget.depth,
    }


def _llama_ngram(config: SpeculativeConfig, match: int) -> dict[str, Any]:
    return {
        "--spec-type": "ngram-simple",
        "--spec-ngram-simple-size-n": match,
        "--spec-ngram-simple-size-m": config.budget.depth,
    }


LLAMA_CPP_DRAFT_MODEL = EngineExport(
    _llama_model("draft-simple"),
    lambda c: [
        *_gguf_notes(c),
        *_copies(
            c,
            {
                "int8": "convert it with --outtype q8_0, else a draft costs more",
                "int4": "llama-quantize FILE.gguf FILE-q4.gguf Q4_0 makes it, else a draft costs more",
            },
        ),
        *_draft_vocab(c),
    ],
)
LLAMA_CPP_EAGLE = EngineExport(_llama_model("draft-eagle3"), _head_notes)
LLAMA_CPP_DFLASH = EngineExport(_llama_model("draft-dflash"), _head_notes)
LLAMA_CPP_DSPARK = EngineExport(
    _llama_model("draft-dspark"),
    lambda c: [*_head_notes(c), "dspark: llama.cpp runs drafters with a Qwen3 backbone only"],
)
LLAMA_CPP_SUFFIX = EngineExport(
    lambda c: _llama_ngram(c, LLAMA_MATCH),
    lambda c: [
        "suffix: ngram-simple is the nearest; it uses one length, the last match and one text, so it drafts less often",
        *_memory(c),
    ],
)
LLAMA_CPP_NGRAM = EngineExport(
    lambda c: _llama_ngram(c, c.prompt_lookup_min),
    lambda c: (
        [_matches(c, f"ngram-simple looks up one length, {c.prompt_lookup_min}, and takes the last match")]
        if c.prompt_lookup_max > c.prompt_lookup_min
        else []
    ),
)

# -- TensorRT-LLM ---------------------------------------------------------------------------------------------------------


TRT_LLM_DRAFT_MODEL = EngineExport(
    lambda c: {"decoding_type": "Draft_Target", "speculative_model": named_model(c)},
    lambda c: [
        *_copies(
            c, dict.fromkeys(("int8", "int4"), "give a checkpoint that is quantized to it, else a draft costs more")
        ),
        *_draft_vocab(c),
    ],
)
TRT_LLM_EAGLE = EngineExport(
    lambda c: {
        "decoding_type": "Eagle3",
        "speculative_model": named_model(c),
        **(
            {
                "use_dynamic_tree": True,
                "dynamic_tree_max_topK": c.tree_width,
                "max_total_draft_tokens": min(c.budget.max_nodes, c.tree_width * c.budget.depth),
            }
            if c.tree_width > 1
            else {}
        ),
    }
)
TRT_LLM_DFLASH = EngineExport(
    lambda c: {"decoding_type": "DFlash", "speculative_model": named_model(c)},
    lambda c: [
        "dflash: TensorRT-LLM reads `dflash_config` of config.json, as z-lab writes it; that of speculators is untried"
    ],
)
TRT_LLM_SUFFIX = EngineExport(
    lambda c: {
        "decoding_type": "SA",
        "max_matching_ngram_size": -1,
        **({"enable_global_pool": True} if c.suffix_shared_tokens else {}),
    },
    lambda c: [
        "suffix: a draft is always as long as max_draft_len, whatever its chance is, so weak matches cost more",
        *_memory(c),
    ],
)
TRT_LLM_NGRAM = EngineExport(
    lambda c: {
        "decoding_type": "NGram",
        "max_matching_ngram_size": c.prompt_lookup_max,
        "is_public_pool": False,
        "is_use_oldest": False,
    },
    lambda c: (
        [_matches(c, f"NGram matches 1 to {c.prompt_lookup_max}, so weaker drafts come too")]
        if c.prompt_lookup_min > 1
        else []
    ),
)
