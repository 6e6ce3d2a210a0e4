"""How good the pair is on code that neither of the two was trained on.

    python -m recipes.evaluate --target data/outrider_data/code --draft data/outrider_data/code-draft \\
        --tokens work/pair/tokenizer --humaneval HumanEval.jsonl.gz --out recipes/results.json

Acceptance is what the two models allow, measured without a speculative loop: along the target's own continuations, how
often the draft names the same token (temperature 0), and how much of the target's law the draft covers (temperature 1).
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from recipes.train import held_out_loss, load_stream

Report = dict[str, float | int]


def held_out_prompts(stream: np.ndarray, count: int, length: int) -> list[list[int]]:
    return [stream[s : s + length].tolist() for s in np.linspace(0, len(stream) - length - 1, count).astype(int)]


def humaneval_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """Evenly from the 164 tasks; the very long ones lose their beginning."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line)["prompt"] for line in lines]
    return [tokenizer.encode(rows[i])[-384:] for i in np.linspace(0, len(rows) - 1, count).astype(int)]


def padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Padding on the left, so that every continuation begins in the same column."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


@torch.inference_mode()
def acceptance(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: list[list[int]], new: int) -> Report:
    """Over continuations of `new` tokens, each up to its end token."""
    sums = {"greedy": 0.0, "sampled": 0.0}
    counts = {"greedy": 0.0, "sampled": 0.0}
    for start in range(0, len(prompts), 25):
        ids, mask = padded(prompts[start : start + 25])
        for name in sums:
            law = (
                {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
                if name == "sampled"
                else {"do_sample": False}
            )
            text = target.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **law)
            written = text[:, ids.shape[1] :]
            real = ((written == 0).cumsum(1) - (written == 0).long() == 0).float()  # through the first end token
            whole_mask = torch.cat([mask, torch.ones_like(written)], dim=1)
            places = (whole_mask.cumsum(1) - 1).clamp_min(0)
            seen = {"attention_mask": whole_mask, "position_ids": places, "logits_to_keep": written.shape[1] + 1}
            logits = [m(text, **seen).logits[:, :-1] for m in (target, draft)]
            if name == "greedy":
                agree = (logits[0].argmax(-1) == logits[1].argmax(-1)).float()
            else:
                agree = torch.minimum(logits[0].softmax(-1), logits[1].softmax(-1)).sum(-1)
            sums[name] += float((agree * real).sum())
            counts[name] += float(real.sum())
    return {
        "acceptance_temperature_0": round(sums["greedy"] / counts["greedy"], 4),
        "acceptance_temperature_1": round(sums["sampled"] / counts["sampled"], 4),
        "positions": int(counts["greedy"] + counts["sampled"]),
    }


@torch.inference_mode()
def step_times(models: list[LlamaForCausalLM], context: int = 128, rounds: int = 40) -> list[float]:
    """Median seconds of one token with a cache of `context`, the models taking turns so that they share the weather."""
    tokens = torch.arange(1, context + 1)[None]
    caches = [m(tokens, use_cache=True).past_key_values for m in models]
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, cache, taken in zip(models, caches, times, strict=True):
            begin = time.perf_counter()
            model(tokens[:, :1], past_key_values=cache, use_cache=True)
            taken.append(time.perf_counter() - begin)
            cache.crop(-1)
    return [statistics.median(taken) for taken in times]


def describe(folder: Path, model: LlamaForCausalLM, stream: np.ndarray, bytes_per_token: float, windows: int) -> Report:
    nats = held_out_loss(model, stream, torch.device("cpu"), windows=windows, length=512)
    return {
        "parameters": model.num_parameters(),
        "file_bytes": sum(p.stat().st_size for p in folder.iterdir()),
        "held_out_nats_per_token": round(nats, 4),
        "held_out_bits_per_byte": round(nats / math.log(2) / bytes_per_token, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--windows", type=int, default=128, help="of 512 tokens, for the held-out loss")
    args = parser.parse_args()

    torch.manual_seed(0)
    target, draft = (AutoModelForCausalLM.from_pretrained(p).eval() for p in (args.target, args.draft))
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    stream = load_stream(args.tokens / "held_out.bin")
    size = json.loads((args.tokens / "held_out.json").read_text())
    bytes_per_token = size["bytes"] / size["tokens"]
    results: dict[str, Report] = {
        "target": describe(args.target, target, stream, bytes_per_token, args.windows),
        "draft": describe(args.draft, draft, stream, bytes_per_token, args.windows),
        "held_out_packages": acceptance(target, draft, held_out_prompts(stream, args.prompts, 96), args.new),
    }
    if args.humaneval:
        prompts = humaneval_prompts(args.humaneval, tokenizer, args.prompts)
        results["humaneval_prompts"] = acceptance(target, draft, prompts, args.new)
    slow, fast = step_times([target, draft])
    results["one_token"] = {
        "target_ms": round(slow * 1e3, 3),
        "draft_ms": round(fast * 1e3, 3),
        "draft_over_target": round(fast / slow, 4),
        "threads": torch.get_num_threads(),
    }
    args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
