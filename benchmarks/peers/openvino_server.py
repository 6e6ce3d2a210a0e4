"""OpenVINO GenAI behind the two addresses of llama-server that we use: /health and /completion.

Runs in a Python of its own that has the package (pip install openvino-genai): it imports nothing of outrider. It reads GGUF files
of Llama, Qwen2 and Qwen3 whose blocks are Q8_0, Q4_0, Q4_1, Q4_K or Q6_K, and makes a model of its own from them. A draft model
must be such a model in a folder: one from a GGUF file is kept in work/bench.
"""

from __future__ import annotations

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
import openvino_genai as genai  # pyright: ignore[reportMissingImports]

from benchmarks import WORK


class Texts:
    """The pipeline: plain, with prompt lookup, or with a draft model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.guesses = args.lookup or (args.spec_draft_n_max if args.spec_draft_model else 0)
        self.lookup = bool(args.lookup)
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": args.threads}
        if "ONEDNN_MAX_CPU_ISA" in os.environ:
            # It asks the processor itself for bfloat16, which this setting hides from its matrices.
            options |= {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
        # As its own default, without what is kept of prompts: with it, a pipeline with a draft model fails at a known prompt.
        schedule = genai.SchedulerConfig()
        schedule.enable_prefix_caching, schedule.max_num_batched_tokens = False, 2**30
        more: dict[str, Any] = {"scheduler_config": schedule, **({"prompt_lookup": True} if args.lookup else {})}
        if args.spec_draft_model:
            more["draft_model"] = genai.draft_model(folder_of(Path(args.spec_draft_model)), "CPU", **options)
        self.pipe = genai.LLMPipeline(args.model, "CPU", **options, **more)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What llama-server would answer, by the pipeline's own clock."""
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos = body["n_predict"], body["ignore_eos"]
        config.do_sample = body["temperature"] > 0
        if config.do_sample:
            config.temperature, config.rng_seed, config.top_k, config.top_p = (
                body["temperature"],
                body["seed"],
                2**31,
                1.0,
            )
        if self.guesses:
            config.num_assistant_tokens = self.guesses
            config.max_ngram_size = 3 if self.lookup else 0
        ids = np.array([body["prompt"]], np.int64)
        out = self.pipe.generate(
            genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))), config
        )
        tokens, clock = list(out.tokens[0]), out.perf_metrics
        first, whole = clock.get_ttft().mean, clock.get_generate_duration().mean
        told = {"prompt_n": len(body["prompt"]), "prompt_ms": first, "predicted_ms": whole - first}
        if self.guesses:  # the lookup tells only how many forward passes there were
            drafts = out.extended_perf_metrics
            told["draft_n"] = drafts.get_num_draft_tokens() if drafts else 0
            told["draft_n_accepted"] = len(tokens) - len(clock.raw_metrics.m_batch_sizes)
        return {"tokens": tokens, "timings": told}


def folder_of(model: Path) -> str:
    """The folder of a model in OpenVINO's own form. That of a GGUF file is made once."""
    if model.is_dir():
        return str(model)
    folder = WORK / "openvino" / model.stem
    if not (folder / "openvino_model.xml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / model.name
        link.unlink(missing_ok=True)
        link.symlink_to(model.resolve())
        genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="version", version=f"openvino-genai {genai.__version__}")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lookup", type=int, default=0, help="draft tokens of a step from the prompt")
    parser.add_argument("--spec-draft-model")
    parser.add_argument("--spec-draft-n-max", type=int)
    args, _ = parser.parse_known_args()
    texts = Texts(args)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say({"status": "ok"})

        def do_POST(self) -> None:
            self.say(texts.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def say(self, what: dict[str, Any]) -> None:
            data = json.dumps(what).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the name of the method that this replaces)
            pass

    HTTPServer(("127.0.0.1", args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
