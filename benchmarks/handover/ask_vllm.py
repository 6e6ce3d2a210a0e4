"""Asks vLLM's own parser and configuration. Runs in vLLM's environment, by its Python: stdin and stdout are JSON.

stdin: name -> words of a command line after `vllm serve`. stdout: name -> what vLLM made of it, or {"refused": why}.
"""

from __future__ import annotations

import json
import logging
import os
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
logging.disable(logging.WARNING)
out, sys.stdout = sys.stdout, sys.stderr  # vLLM's own lines must not be among the answers

from dataclasses import fields  # noqa: E402

import vllm  # noqa: E402  # pyright: ignore[reportMissingImports]
from vllm.config import SpeculativeConfig  # noqa: E402  # pyright: ignore[reportMissingImports]
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402  # pyright: ignore[reportMissingImports]
from vllm.entrypoints.launchers.cli_args import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    make_arg_parser,
    validate_parsed_serve_args,
)
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402  # pyright: ignore[reportMissingImports]
from vllm.v1.spec_decode.dynamic.utils import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    build_dynamic_sd_schedule_lookup,
)


def asked(words: list[str]) -> dict[str, object]:
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    if args.model_tag:
        args.model = args.model_tag
    validate_parsed_serve_args(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    found = config.speculative_config
    if found is None:
        return {"method": None}
    schedule = found.num_speculative_tokens_per_batch_size
    if schedule:
        build_dynamic_sd_schedule_lookup(schedule, 16, found.num_speculative_tokens)
    return {
        "method": found.method,
        "num_speculative_tokens": found.num_speculative_tokens,
        "rejection_sample_method": found.rejection_sample_method,
        "draft_sample_method": found.draft_sample_method,
        "schedule": schedule,
        "second_model_runner": bool(config.use_v2_model_runner),
    }


answers: dict[str, object] = {
    "version": vllm.__version__,
    "options": sorted(
        f.name for f in fields(SpeculativeConfig) if not f.name.startswith(("draft_", "target_")) or "sample" in f.name
    ),
}
for name, words in json.load(sys.stdin).items():
    try:
        answers[name] = asked(words)
    except BaseException as error:
        answers[name] = {"refused": f"{type(error).__name__}: {error}"[:600]}
json.dump(answers, out)
