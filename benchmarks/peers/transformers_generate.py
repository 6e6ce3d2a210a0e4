"""transformers as a side: its own generate, plain, assisted and with prompt lookup, on the same weights."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.generation.streamers import BaseStreamer

from benchmarks.pairs import drafts_of
from benchmarks.peers.ours import some_tokens
from benchmarks.side import Run, serve


class Stamps(BaseStreamer):
    """When tokens came, and how many. The first call holds the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(perf_counter())
        self.counts.append(value.numel())

    def end(self) -> None: ...


class Transformers:
    """A `Worker` around `model.generate`."""

    def __init__(self, model: str, drafts: dict[str, str], dtype: str) -> None:
        self.target = self._load(model, dtype)
        self.drafts = {name: self._load(folder, dtype) for name, folder in drafts.items()}
        self._contexts: dict[tuple[str, int], DynamicCache] = {}
        self._drafted: list[int] = []
        self._draft_seconds = 0.0
        self._watch()

    def _watch(self) -> None:
        """Count the guesses of every step and the time they took; generate tells neither."""
        make = self.target._get_candidate_generator

        def watched(*args: Any, **kwargs: Any) -> Any:
            generator = make(*args, **kwargs)
            inner = generator.get_candidates

            def get(input_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
                start = perf_counter()
                out = inner(input_ids, *more, **named)
                self._draft_seconds += perf_counter() - start
                self._drafted.append(out[0].shape[1] - input_ids.shape[1])
                return out

            generator.get_candidates = get
            return generator

        self.target._get_candidate_generator = watched

    def _load(self, path: str, dtype: str) -> Any:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        model.generation_config.eos_token_id = None  # every text has the length asked for
        model.generation_config.pad_token_id = 0
        return model

    def facts(self) -> dict[str, Any]:
        return {
            "version": transformers.__version__,
            "weights": str(self.target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }

    @torch.inference_mode()
    def forward(self, rows: int, context: int, repeats: int, which: str = "target") -> list[float]:
        """which: target, or a method whose drafter is a model."""
        model = self.target if which == "target" else self.drafts[which.partition(":")[0]]
        vocab = model.get_output_embeddings().weight.shape[0]
        if (which, context) not in self._contexts:
            cache = DynamicCache(config=model.config)
            model(some_tokens(context, vocab), past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._contexts[which, context] = cache
        cache, times = self._contexts[which, context], []
        for _ in range(repeats):
            start = perf_counter()
            model(some_tokens(rows, vocab), past_key_values=cache, use_cache=True)
            times.append(perf_counter() - start)
            cache.crop(context)
        return times

    @torch.inference_mode()
    def generate(self, method: str, prompt: list[int], tokens: int, temperature: float = 0.0, seed: int = 0) -> Run:
        name, _, length = method.partition(":")
        stamps, ids = Stamps(), torch.tensor([prompt])
        more: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            torch.manual_seed(seed)
            more |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        if name in self.drafts:
            settings = self.drafts[name].generation_config
            settings.num_assistant_tokens = int(length)
            settings.num_assistant_tokens_schedule = "constant"
            settings.assistant_confidence_threshold = 0.0
            more["assistant_model"] = self.drafts[name]
        elif name == "lookup":
            more["prompt_lookup_num_tokens"] = int(length)
        elif name != "plain":
            raise ValueError(
                f"transformers has no method {method!r} here; there are plain, lookup:N and drafts by name"
            )
        self._drafted, self._draft_seconds = [], 0.0
        out = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, streamer=stamps, **more
        )
        times, counts = stamps.times[1:], stamps.counts[1:]
        drafted = self._drafted[1:]
        return Run(
            tokens=out[0, len(prompt) :].tolist(),
            timed=sum(counts[1:]),
            seconds=times[-1] - times[0],
            steps=len(counts) - 1,
            drafted=drafted,
            accepted=[n - 1 for n in counts[1:]] if drafted else [],
            parts={"draft": self._draft_seconds} if drafted else {},
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    serve(Transformers(args.model, drafts_of(args.draft), args.dtype))


if __name__ == "__main__":
    main()
