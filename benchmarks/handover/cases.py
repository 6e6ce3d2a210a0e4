"""The settings that are exported: one for each method, and one for each thing that is said in another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    """config: a speculative_config. lengths: draft tokens by batch size. other_tokens: as `exports` takes it."""

    config: dict[str, Any]
    lengths: dict[int, int] | None = None
    other_tokens: bool = False


DRAFT = {"method": "draft_model", "model": "builtin:code-draft", "num_speculative_tokens": 4}
LENGTHS = {1: 4, 4: 2, 8: 0}


def cases(heads: Path | None) -> dict[str, Case]:
    """By name. heads: a folder of trained heads of builtin:code, each in a folder `head-KIND`; None leaves them out."""
    out = {
        "none": Case({"method": "none"}),
        "draft_model": Case(DRAFT),
        "draft_model rejection": Case({**DRAFT, "verifier": "rejection"}),
        "draft_model block": Case({**DRAFT, "verifier": "block"}),
        "draft_model tree": Case({**DRAFT, "tree_width": 3, "tree_nodes": 10}),
        "draft_model int8": Case({**DRAFT, "quantization": "int8"}),
        "draft_model lengths": Case(DRAFT, LENGTHS),
        "draft_model lengths from 2": Case(DRAFT, {2: 6, 4: 3}),
        "draft_model no lengths": Case(DRAFT, {1: 0, 2: 0}),
        "draft_model other tokens": Case(DRAFT, None, True),
        "ngram": Case({"method": "ngram"}),
        "ngram lengths": Case({"method": "ngram", "num_speculative_tokens": 5}, LENGTHS),
        "ngram tree": Case({"method": "ngram", "num_speculative_tokens": 5, "tree_width": 3, "tree_nodes": 10}),
        "ngram lookup": Case({"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 4}),
        "suffix": Case({"method": "suffix"}),
        "suffix long": Case({"method": "suffix", "num_speculative_tokens": 32, "suffix_shared_tokens": 0}),
        "suffix corpus": Case({"method": "suffix", "corpus": "texts.jsonl"}),
        "suffix lengths from 2": Case({"method": "suffix", "num_speculative_tokens": 6}, {2: 6, 4: 3}),
        "suffix and draft_model": Case({**DRAFT, "method": ["suffix", "draft_model"]}),
        "layer_skip": Case({"method": "layer_skip"}),
        "auto": Case({"method": "auto"}),
    }
    for method, kind in (("eagle", "eagle3"), ("medusa", "medusa"), ("dflash", "dflash"), ("dspark", "dspark")):
        if heads is not None and (heads / f"head-{kind}").is_dir():
            config = {"method": method, "model": str(heads / f"head-{kind}"), "num_speculative_tokens": 4}
            out[kind] = Case(config)
            out[f"{kind} lengths"] = Case(config, LENGTHS)
    return out
