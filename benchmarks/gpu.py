"""A card against the limit of its memory: kernels, graphs, steps and texts, by our own kernels.

    python -m benchmarks.gpu 1.5B 8B --out FILE           on a card
    python -m benchmarks.gpu tiny --device cpu            that the code runs, in Triton's interpreter; its times mean nothing

Weights are random, of the true shapes: no time depends on their values. A guess is right by a script, with a given chance. Each
line is a figure, and the goal that the design has for it. A time is the median of several, after a warm-up.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which transformers may do

import ml_dtypes
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from benchmarks.ruler import markdown, parser, save
from outrider import LLM, SamplingParams
from outrider.core.types import Draft
from outrider.drafters.base import BaseDrafter, DraftContext, chains
from outrider.models.hf.tensors import ModuleTensors, config_for
from outrider.models.load import Loaded
from outrider.models.native.model import build

QWEN: dict[str, Any] = {"vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}
SHAPES: dict[str, PreTrainedConfig] = {
    "tiny": Qwen2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                        num_key_value_heads=1, vocab_size=97),
    "0.5B": Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                        num_key_value_heads=2, **QWEN),
    "1.5B": Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                        num_key_value_heads=2, **QWEN),
    "8B": LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                      num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False),
}  # fmt: skip
GOALS = {"1.5B": "1.6 (H100), 1.3 (H200)", "8B": "6.0 (H100), 4.4 (H200)"}  # ms of a plain token
GUESSES, CHANCE = 5, 0.75  # tokens of a draft, and the chance of each to be right
Line = tuple[str, str, str]  # what, how much, the goal


class RandomTensors(ModuleTensors):
    """Noise in the shapes of a configuration, and ones for norms."""

    def __init__(self, config: PreTrainedConfig) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        super().__init__(model)
        if not config.tie_word_embeddings:
            self._named["lm_head.weight"] = model.get_output_embeddings().weight
        self._noise = (0.02 * np.random.default_rng(0).standard_normal(2**22)).astype(ml_dtypes.bfloat16)

    def get(self, name: str) -> np.ndarray:
        shape = self.shape(name)
        return np.ones(shape, ml_dtypes.bfloat16) if "norm" in name else np.resize(self._noise, shape)


class Scripted(BaseDrafter):
    """Knows the texts, and guesses each token right with the given chance."""

    def __init__(self, text: list[int], vocab: int, chance: float) -> None:
        self.text, self.vocab, self.chance, self.draw = text, vocab, chance, np.random.default_rng(0)

    def propose(self, context: DraftContext) -> Draft:
        rows = []
        for tokens, prompt, budget in zip(context.tokens, context.prompt_lengths, context.budgets, strict=True):
            at = len(tokens) - prompt
            right = self.text[at : at + budget.depth]
            wrong = self.draw.random(len(right)) >= self.chance
            rows.append([(token + int(no)) % self.vocab for token, no in zip(right, wrong, strict=True)])
        return chains(context, rows)


class Card:
    """What is measured, on a device."""

    def __init__(self, device: str, shape: str, rounds: int) -> None:
        from outrider.models.gpu.model import GpuModel
        from outrider.models.gpu.weights import DeviceSource

        self.device, self.shape, self.rounds, self.cuda = device, shape, rounds, device.startswith("cuda")
        tensors = RandomTensors(SHAPES[shape])
        config = config_for(tensors.raw)
        self.model = GpuModel(build(config.kind, config, DeviceSource(tensors, config, device)), device)
        self.loaded = Loaded(self.model, shape, None, (), "bfloat16", "", config)
        self.prompt = [1 + n * n % 89 for n in range(512 if self.cuda else 20)]

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any]) -> float:
        """The median of a call, on the host's clock, until the device is done."""
        times = []
        for n in range(self.rounds + 2):
            self.wait()
            began = perf_counter()
            run()
            self.wait()
            if n >= 2:
                times.append(perf_counter() - began)
        return statistics.median(times)

    def graph(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The same as one launch."""
        from outrider.models.gpu.step import Graphs

        graphs = Graphs(self.device)
        graphs.run(0, run)
        return lambda: graphs.run(0, run)

    def basics(self) -> Iterator[Line]:
        """What a copy gives, and what a kernel and a launch cost."""
        from outrider.kernels.gpu import elementwise

        n = 2**30 if self.cuda else 2**20
        source, target = (torch.zeros(n, dtype=torch.uint8, device=self.device) for _ in range(2))
        self.copied = 2 * n / self.seconds(lambda: target.copy_(source))
        yield "copy, GB/s", f"{self.copied / 1e9:,.0f}", ""
        one, other = (torch.zeros(1, 64, device=self.device) for _ in range(2))
        index, count = torch.zeros(1, dtype=torch.int32, device=self.device), 200 if self.cuda else 2
        few, many = (
            self.seconds(self.graph(lambda k=k: [elementwise.take(one, index, other) for _ in range(k)]))
            for k in (1, 1 + count)
        )
        yield "a kernel in a graph, us", f"{1e6 * (many - few) / count:.2f}", "1.5"
        yield "a launch and a wait, us", f"{1e6 * few:.1f}", "15"

    def products(self) -> Iterator[Line]:
        """The share of the copied rate that each product of a layer reaches, beside cuBLAS."""
        from outrider.kernels.gpu import linear

        shapes = {
            (m.n, m.k) for op in self.model.program.ops for m in op.matrices if op.kind == "linear" and not op.layer
        }
        for n, k in sorted(shapes):
            copies = max(1, int(4e8 if self.cuda else 1) // (2 * n * k) + 1)  # more than a cache holds
            weights = [torch.randn(n, k, device=self.device).bfloat16() for _ in range(copies)]
            for rows, goal in ((1, "80 %"), (8, "88 %")):
                x, parts = torch.randn(rows, k, device=self.device), linear.split(n, k)[0]
                out, half = torch.zeros(parts, rows, n, device=self.device), x.bfloat16()
                ours = self.seconds(self.graph(lambda: [linear.linear(x, w, out) for w in weights]))
                theirs = self.seconds(self.graph(lambda: [half @ w.T for w in weights]))
                share, theirs = (100 * copies * 2 * n * k / s / self.copied for s in (ours, theirs))
                yield f"{n} x {k}, {rows} rows, % of the copied rate", f"{share:.0f}; cuBLAS {theirs:.0f}", goal

    def forwards(self) -> Iterator[Line]:
        """The graph of a forward alone, of 1, 8 and 64 rows after a prompt."""
        from outrider.models.gpu.rows import RowBuffer

        cache, start, one = self.model.new_cache(1, 1024), len(self.prompt), 0.0
        for rows in (1, 8, 64) if self.cuda else (1, 8):
            buffer = RowBuffer(self.device, rows, 0)
            views, fields = buffer.views(1, rows, 0, 1024)
            fields["positions"][:] = fields["cells"][:] = np.arange(start, start + rows)
            fields["starts"][:] = start
            buffer.send(views.size)
            taken = self.seconds(self.graph(lambda views=views: self.model.plan.run(views, cache)))
            one = one or taken
            share = f"{100 * self.model.weight_bytes / taken / self.copied:.0f} % of the copied rate"
            more = f"{taken / one:.2f} of one" if rows > 1 else share
            yield (
                f"forward of {rows} rows, ms",
                f"{1000 * taken:.2f}; {more}",
                {8: "1.08 (1.5B), 1.05 (8B)"}.get(rows, ""),
            )

    def texts(self, tokens: int) -> Iterator[Line]:
        """The engine, plain, planned and with guesses that a script has right."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)

        def write(llm: LLM) -> tuple[float, list[int]]:
            prompt, times, text = {"prompt_token_ids": self.prompt}, list[float](), list[int]()
            for n in range(self.rounds + 1):
                began = perf_counter()
                text = llm.generate(prompt, params)[0].outputs[0].token_ids
                if n:
                    times.append(perf_counter() - began)
            return statistics.median(times) / tokens, list(text)

        made: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": len(self.prompt) + tokens + 8}
        plain, text = write(LLM(self.loaded, **made))
        yield "plain, ms a token", f"{1000 * plain:.2f}", GOALS.get(self.shape, "")
        drafters: dict[str, tuple[dict[str, Any], str]] = {
            "lookup and planner over plain": (
                {"speculative_config": {"method": "suffix"}},
                "1 / 1.02 where nothing is found",
            ),
            f"{GUESSES} guesses right by {CHANCE} over plain": (
                {
                    "drafter": Scripted(text, self.model.vocab_size, CHANCE),
                    "speculative_config": {"controller": "fixed", "num_speculative_tokens": GUESSES},
                },
                "",
            ),
        }
        for name, (options, goal) in drafters.items():
            taken, other = write(LLM(self.loaded, **made, **options))
            yield name, f"{plain / taken:.2f}{'' if other == text else ', WRONG text'}", goal


def main() -> None:
    options = parser(__doc__)
    options.add_argument("shapes", nargs="+", choices=SHAPES)
    options.add_argument("--device", default="cuda")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--tokens", type=int, default=128, help="of each text")
    options.add_argument("--out", type=Path, help="a file, or a folder")
    given = options.parse_args()
    name = torch.cuda.get_device_name() if given.device != "cpu" else "Triton's interpreter; times mean nothing"
    lines = dict[str, list[Line]]()
    for shape in given.shapes:
        card, lines[shape] = Card(given.device, shape, given.rounds), list[Line]()
        for part in (card.basics(), card.products(), card.forwards(), card.texts(given.tokens)):
            for line in part:
                lines[shape].append(line)
                print(f"{shape:6}{line[0]:50} {line[1]}", flush=True)
        del card
    print(
        f"\n{name}\n" + markdown(["shape", "", "", "goal"], [[s, *line] for s, each in lines.items() for line in each])
    )
    save("gpu", given.out, device=name, lines=lines)


if __name__ == "__main__":
    main()
