"""Writes a Llama of any size that computes the function of a small one (benchmarks/scale_up.py says how), and drafts
for it.

    python -m benchmarks.inflate builtin:code --size 0.5B --out work/bench/0.5B --dtype bfloat16 --check
    python -m benchmarks.inflate builtin:code-draft --out work/bench/draft --noise 0.8   # a draft accepted 0.8 of the time

`benchmarks.forward --random` compares the time of its forwards with that of random weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks import headline
from benchmarks.prompts import humaneval
from benchmarks.scale_up import SIZES, Inflater, Size, rms
from outrider.models.builtin.shipped import builtin_folder


def inflate(
    source: LlamaForCausalLM, size: Size, folder: Path, dtype: torch.dtype, seed: int = 0, *, random: bool = False
) -> None:
    """Write the big model as transformers would, a shard per layer, so that two layers are in memory at most.

    random: normal noise of the same size in the place of every matrix, for comparing costs.
    """
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    big = Inflater(source, size, dtype, seed)
    index: dict[str, str] = {}
    total = 0
    for i, tensors in enumerate(big.groups()):
        if random:
            noise = {k: (rms(t.float()) * big.normal(*t.shape)).to(dtype) for k, t in tensors.items() if t.dim() == 2}
            tensors = {**tensors, **noise}
        name = f"model-{i + 1:05d}-of-{size.layers + 1:05d}.safetensors"
        save_file(tensors, fresh / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    meta: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": index}
    (fresh / "model.safetensors.index.json").write_text(json.dumps(meta, indent=1))
    config = big.big_config()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(fresh)
    source.generation_config.save_pretrained(fresh)
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def perturb(model: LlamaForCausalLM, sigma: float, seed: int = 0) -> LlamaForCausalLM:
    """The model with normal noise of `sigma` times the size of each matrix, embeddings left alone."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2 and "layers." in name:
                p += sigma * rms(p) * torch.randn(p.shape, generator=draw, dtype=p.dtype)
    return model


@torch.inference_mode()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, texts: list[list[int]], start: list[int]) -> float:
    """How often the draft's greedy token is the target's, over the greedy texts of the target."""
    same = total = 0
    for text, begin in zip(texts, start, strict=True):
        ids = torch.tensor([text])
        guess = draft(ids).logits[0, begin - 1 : -1].argmax(-1)
        same += int((guess == ids[0, begin:]).sum())
        total += len(text) - begin
    return same / total


def weaken(
    source: LlamaForCausalLM, tokenizer: Any, rate: float, seed: int = 0
) -> tuple[LlamaForCausalLM, float, float]:
    """The source with just enough noise that a guess is right with probability `rate`. Returns it, sigma, the rate met."""
    prompts = [tokenizer(p)["input_ids"] for p in humaneval(16)]
    texts = []
    for p in prompts:
        out = cast(Any, source).generate(
            torch.tensor([p]), max_new_tokens=128, min_new_tokens=128, do_sample=False, pad_token_id=0
        )
        texts.append(out[0].tolist())
    begin, low, high = [len(p) for p in prompts], 0.0, 4.0
    weights = {k: v.clone() for k, v in source.state_dict().items()}
    draft = LlamaForCausalLM(source.config).eval()

    def rated(sigma: float) -> float:
        draft.load_state_dict(weights)
        return agreement(source, perturb(draft, sigma, seed), texts, begin)

    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if rated(middle) > rate else (low, middle)
    return draft, low, rated(low)


def load_source(name: str) -> tuple[LlamaForCausalLM, Any]:
    """The small model in float32, and its tokenizer. A built-in name or a folder."""
    path = str(builtin_folder(name)) if name.startswith("builtin:") else name
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)  # pyright: ignore[reportReturnType]


@torch.inference_mode()
def compare(small: LlamaForCausalLM, big: LlamaForCausalLM, prompts: list[list[int]], tokens: int) -> dict[str, float]:
    """Largest and typical difference of the logits along the small model's greedy text, and greedy tokens that differ."""
    gap, size, differ, total = 0.0, 0.0, 0, 0
    for p in prompts:
        kw: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        a, b = (cast(Any, m).generate(torch.tensor([p]), **kw)[0] for m in (small, big))
        differ += int((a != b).sum())
        total += tokens
        x, y = (m(a[None]).logits.float() for m in (small, big))
        gap, size = max(gap, float((x - y).abs().max())), max(size, float(x.abs().max()))
    return {"max_logit_difference": gap, "max_logit": size, "differing_tokens": differ, "tokens": total}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inflate", description=headline(__doc__))
    parser.add_argument("source", help="a small Llama: builtin:code, builtin:code-draft, or a folder")
    parser.add_argument("--size", choices=SIZES, help="the shape to write; without it the source's own")
    parser.add_argument("--layers", type=int, help="another number of layers than the size has")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--noise", type=float, metavar="RATE", help="weaken the source until a guess is right this often"
    )
    parser.add_argument("--random", action="store_true", help="random weights of that size instead, to compare costs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare with the source afterwards, in float32")
    args = parser.parse_args()
    source, tokenizer = load_source(args.source)
    dtype = getattr(torch, args.dtype)
    told: dict[str, Any] = {"source": args.source, "dtype": args.dtype}
    weakened = source
    if args.noise is not None:
        weakened, sigma, rate = weaken(source, tokenizer, args.noise, args.seed)
        told |= {"sigma": sigma, "agreement": rate}
    if args.size:
        size = replace(SIZES[args.size], **({"layers": args.layers} if args.layers else {}))
        inflate(weakened, size, args.out, dtype, args.seed, random=args.random)
        told |= {"size": asdict(size), "parameters": size.parameters(source.config.vocab_size)}
    else:
        weakened.to(dtype).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    if args.check:
        big = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
        told |= compare(source, big, [tokenizer(p)["input_ids"] for p in humaneval(4)], 64)
    (args.out / "inflate.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
