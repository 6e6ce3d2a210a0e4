"""outrider as a side: plain decoding and every drafter, over one copy of the target's weights in one process."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch

from benchmarks.pairs import drafts_of
from benchmarks.side import Run, serve
from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters import ModelDrafter, make_drafter
from outrider.drafters.config import SpeculativeConfig
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.models.base import LanguageModel
from outrider.models.cache import SlotCache
from outrider.models.load import Loaded, load
from outrider.models.nodes import Nodes

MAX_LENGTH = 1024


def config_of(method: str, drafts: Mapping[str, str], quantization: str | None) -> SpeculativeConfig:
    """A method as it is named on the command line: plain, ngram:5, suffix:8, self-int8:4, or DRAFT:4 with a draft's name."""
    name, _, length = method.partition(":")
    tokens = {"num_speculative_tokens": int(length)} if length else {}
    if name == "plain":
        return SpeculativeConfig.of(None)
    if name in drafts:
        return SpeculativeConfig.of(
            {"method": "draft_model", "model": drafts[name], "quantization": quantization, **tokens}
        )
    if name.startswith("self-"):
        return SpeculativeConfig.of({"method": "quantized_self", "quantization": name.removeprefix("self-"), **tokens})
    return SpeculativeConfig.of({"method": name, **tokens})


class Ours:
    """A `Worker`. The target is loaded once; a method's decoder is made when it is first asked for, and kept."""

    def __init__(
        self,
        target: str | Loaded,
        drafts: Mapping[str, str] | None = None,
        *,
        dtype: str = "auto",
        quantization: str | None = None,
    ) -> None:
        given = (
            target if isinstance(target, Loaded) else load(target, dtype=dtype, device="cpu", quantization=quantization)
        )
        self.target, self.drafts, self.quantization = given, dict(drafts or {}), quantization
        self.length = min(MAX_LENGTH, given.model.max_length)
        self._decoders: dict[str, Decoder] = {}
        self._contexts: dict[tuple[str, int], SlotCache] = {}

    def facts(self) -> dict[str, Any]:
        return {
            "weights": self.target.weights,
            "model": type(self.target.model).__name__,
            "threads": torch.get_num_threads(),
        }

    def decoder(self, method: str) -> Decoder:
        if method not in self._decoders:
            config = config_of(method, self.drafts, self.quantization)
            self._decoders[method] = Decoder(
                self.target.model,
                make_drafter(config, self.target, num_slots=1, max_length=self.length, device="cpu"),
                controller=Fixed(*config.budget.parts),
                num_slots=1,
                max_length=self.length,
                end_ids=self.target.end_ids,
                tokenizer=self.target.tokenizer,
            )
        return self._decoders[method]

    def drafter_model(self, method: str) -> LanguageModel:
        drafter = self.decoder(method).drafter
        if not isinstance(drafter, ModelDrafter):
            raise ValueError(f"the drafter of {method} runs no model")
        return drafter.levels.model

    def forward(self, rows: int, context: int, repeats: int, which: str = "target") -> list[float]:
        """which: target, or a method whose drafter runs a model."""
        model = self.target.model if which == "target" else self.drafter_model(which)
        if (which, context) not in self._contexts:
            cache = model.new_cache(1, context + 64)
            model.forward(Nodes(some_tokens(context, model.vocab_size), cache, [0]), want="none")
            cache.commit([0], [range(context)])
            self._contexts[which, context] = cache
        cache, tokens, times = self._contexts[which, context], some_tokens(rows, model.vocab_size), []
        for _ in range(repeats):
            start = perf_counter()
            model.forward(Nodes(tokens, cache, [0]))
            times.append(perf_counter() - start)
        return times

    def generate(self, method: str, prompt: list[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> Run:
        decoder = self.decoder(method)
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        clock, text, steps = [], [], []
        scheduler = Scheduler(decoder, raises=True)
        for step, moved in scheduler.run(scheduler.add([Request(0, prompt, params, seed)])):
            if step is None:
                continue
            clock.append(perf_counter())
            steps.append((int(step.draft.num_draft_tokens[0]), step.commits[0], step.seconds))
            text = moved[0].output
        timed = steps[1:]
        parts: dict[str, float] = {}
        for _, _, seconds in timed:
            for name, value in seconds.items():
                parts[name] = parts.get(name, 0.0) + value
        return Run(
            tokens=list(text),
            timed=sum(len(kept.tokens) for _, kept, _ in timed),
            seconds=clock[-1] - clock[0],
            steps=len(timed),
            drafted=[d for d, _, _ in timed],
            accepted=[kept.num_accepted for _, kept, _ in timed],
            parts=parts,
        )


def some_tokens(count: int, vocab_size: int) -> torch.Tensor:
    """int64 [1, count], always the same."""
    draw = torch.Generator().manual_seed(count)
    return torch.randint(vocab_size, (1, count), generator=draw)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    args = parser.parse_args()
    serve(Ours(args.model, drafts_of(args.draft), dtype=args.dtype, quantization=args.quantization))


if __name__ == "__main__":
    main()
