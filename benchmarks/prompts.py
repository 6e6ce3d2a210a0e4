"""Many short prompts in one call: how fast they are read, and what a request costs among many others.

    python -m benchmarks.prompts smollm2-135m.gguf
    python -m benchmarks.prompts smollm2-135m.gguf --count 512 --tokens 40 --slots 8

Prompts of random tokens are read in one call, with one token of text each. In turns with them one long prompt is read. The ratio
is prompt tokens a second of many over one. Then a tiny model writes two tokens for each of few requests and of very many, in
turns. The ratio is the processor time of a request among many over one among few.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from time import perf_counter, process_time

from benchmarks.ruler import median_interval, parser, save, shown, turns
from outrider import LLM, SamplingParams
from outrider.testing.toy import ToyModel

FEW = 250


def reading(args: argparse.Namespace) -> dict[str, list[float]]:
    """Prompt tokens a second, in each round."""
    llm = LLM(args.model, max_num_seqs=args.slots, max_model_len=max(args.long, args.tokens) + 64)
    draw, vocab = random.Random(0), llm.loaded.model.vocab_size
    rates: dict[str, list[float]] = {"many": [], "one": []}
    for number, side in turns(("many", "one"), args.rounds):
        count, length = (args.count, args.tokens) if side == "many" else (1, args.long)
        prompts = [{"prompt_token_ids": [draw.randrange(vocab) for _ in range(length)]} for _ in range(count)]
        start = perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        if number >= 0:
            rates[side].append(count * length / (perf_counter() - start))
    return rates


def requests(args: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds of the processor for a request, in each round."""
    llm = LLM("builtin:code", max_num_seqs=8, max_model_len=64)
    toy = ToyModel(llm.loaded.model.vocab_size)
    llm.decoder.target, llm.decoder.cache = toy, toy.new_cache(8, 64)
    spent: dict[str, list[float]] = {"many": [], "few": []}
    for number, side in turns(("many", "few"), args.rounds):
        count, repeats = (args.requests, 1) if side == "many" else (FEW, max(args.requests // FEW // 4, 1))
        prompts = [{"prompt_token_ids": [1 + n % 50, 1 + n // 50 % 50]} for n in range(count)]
        start = process_time()
        for _ in range(repeats):
            llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        if number >= 0:
            spent[side].append(1e6 * (process_time() - start) / count / repeats)
    return spent


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("--count", type=int, default=128, help="short prompts of a call")
    options.add_argument("--tokens", type=int, default=23, help="of a short prompt")
    options.add_argument("--long", type=int, default=512, help="tokens of the long prompt")
    options.add_argument("--slots", type=int, default=32)
    options.add_argument("--requests", type=int, default=20_000, help="of the tiny model, in one call")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    rates = reading(args)
    ratio = median_interval([a / b for a, b in zip(rates["many"], rates["one"], strict=True)])
    print(f"{args.count} prompts of {args.tokens} tokens: {max(rates['many']):,.0f} tokens a second at best")
    print(f"one prompt of {args.long}: {max(rates['one']):,.0f}; many over one {shown(ratio)}")
    spent = requests(args)
    cost = median_interval([a / b for a, b in zip(spent["many"], spent["few"], strict=True)])
    print(f"a request among {args.requests:,}: {min(spent['many']):,.0f} us; over one among {FEW} {shown(cost)}")
    print(save("prompts", args.out, rates=rates, microseconds=spent))


if __name__ == "__main__":
    main()
