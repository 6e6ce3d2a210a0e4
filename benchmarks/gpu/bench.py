"""What the parts share: shapes with random weights, clocks, texts, and a drafter that knows them."""

from __future__ import annotations

import multiprocessing
import statistics
import traceback
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, perf_counter
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from outrider import SamplingParams
from outrider.core.types import Draft
from outrider.drafters.base import BaseDrafter, DraftContext, draft_of
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.kernels.cpu.packed import rounded
from outrider.models.config import Config, config_of
from outrider.models.native.model import build

QWEN = {"model_type": "qwen2", "max_position_embeddings": 32768, "tie_word_embeddings": True}
LLAMA = {"model_type": "llama", "max_position_embeddings": 8192, "tie_word_embeddings": False}


def _shape(hidden: int, middle: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    attention = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    others = {"intermediate_size": middle, "num_hidden_layers": layers, "vocab_size": vocab}
    return {"hidden_size": hidden, **attention, **others}


SHAPES = {
    "0.5B": _shape(896, 4864, 24, 14, 2, 151936) | QWEN,
    "1.5B": _shape(1536, 8960, 28, 12, 2, 151936) | QWEN,
    "8B": _shape(4096, 14336, 32, 32, 8, 128256) | LLAMA,
    "tiny": _shape(32, 48, 1, 2, 1, 97) | QWEN | {"tie_word_embeddings": False},
}


class RandomTensors:
    """The shapes of a configuration: ones for norms, and zeros, all without memory. `Bench.model` makes matrices random."""

    precision, floats, sizes = "bfloat16", "bfloat16", None

    def __init__(self, config: Config) -> None:
        hidden, middle, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
        kv = hidden // config.num_attention_heads * config.num_key_value_heads
        norms = dict.fromkeys(("norm", "input_layernorm", "post_attention_layernorm"), (hidden,))
        tables = dict.fromkeys(("embed_tokens", *(() if config.tie_word_embeddings else ("lm_head",))), (vocab, hidden))
        attention = dict.fromkeys(("q_proj", "o_proj"), (hidden, hidden)) | dict.fromkeys(
            ("k_proj", "v_proj"), (kv, hidden)
        )
        feed = dict.fromkeys(("gate_proj", "up_proj"), (middle, hidden)) | {"down_proj": (hidden, middle)}
        self.parts: dict[str, tuple[int, ...]] = {**norms, **tables, **attention, **feed}
        self.biased = ("q_proj", "k_proj", "v_proj") if config.model_type == "qwen2" else ()

    def has(self, name: str) -> bool:
        part, kind = name.split(".")[-2:]
        return part in {"weight": self.parts, "bias": self.biased}.get(kind, ())

    def shape(self, name: str) -> tuple[int, ...]:
        part, kind = name.split(".")[-2:]
        return self.parts[part][: 1 if kind == "bias" else 2]

    def get(self, name: str) -> np.ndarray:
        return np.broadcast_to(ml_dtypes.bfloat16("norm" in name), self.shape(name))

    def check(self, further: bool = True) -> None: ...


class Bench:
    """What the parts share: the device, sizes, clocks, models and requests."""

    def __init__(self, tiny: bool, seconds: float) -> None:
        self.tiny, self.device, self.end = tiny, "cpu" if tiny else "cuda", monotonic() + seconds
        self.shapes = ["tiny"] if tiny else ["0.5B", "1.5B", "8B"]
        self.large, self.prompt, self.tokens = self.shapes[-2:], 9 if tiny else 512, 6 if tiny else 128

    def left(self) -> float:
        return self.end - monotonic()

    def apart(self, seconds: float, work: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """As the function. Without a card here, since threads of torch do not outlive a fork."""
        return work() if self.tiny else apart(seconds, work)

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device)

    def whole(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def seconds(self, run: Callable[[], Any], launched: bool = True) -> float:
        """The median of a call, by the clock of the device. launched: without the time of the host to launch it."""
        times = list[float]()
        for n in range(3 if self.tiny else 18):
            if launched and not self.tiny:
                torch.cuda._sleep(500_000)  # cycles, in which the host is ahead of the device
            began = self.mark()
            run()
            ended = self.mark()
            self.wait()
            times += [] if n < 2 else [ended - began if self.tiny else began.elapsed_time(ended) / 1000]
        return statistics.median(times)

    def mark(self) -> Any:
        """The time when the device is here."""
        if self.tiny:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def graph(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The same as one launch. It has run before, so nothing is compiled then."""
        if self.tiny:
            return run
        self.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            run()
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def matrices(self, shape: str) -> dict[str, tuple[int, int]]:
        """(n, k) of the products of a layer, and of the head."""
        m: Any = RandomTensors(config_of(SHAPES[shape])).parts
        qkv, up, hidden = m["q_proj"][0] + 2 * m["k_proj"][0], 2 * m["up_proj"][0], m["q_proj"][1]
        own = {"o": m["o_proj"], "down": m["down_proj"], "head": m["embed_tokens"]}
        return {"qkv": (qkv, hidden), "up": (up, hidden), **own}

    def bytes(self, shape: str) -> int:
        """Of the weights that a token reads."""
        layers = SHAPES[shape]["num_hidden_layers"]
        return sum(2 * n * k * (1 if name == "head" else layers) for name, (n, k) in self.matrices(shape).items())

    def model(self, shape: str, changes: dict[str, Any] | None = None) -> Any:
        """A `GpuModel` with random weights, which are made on the device."""
        # These modules import triton, which looks at what runs it first.
        from outrider.models.gpu.model import GpuModel
        from outrider.models.gpu.weights import DeviceSource

        class RandomSource(DeviceSource):
            def _packed(self, matrices: Any, kind: str, biases: Any, paired: bool = False) -> Any:
                rows = sum(map(len, matrices))
                out: Any = super()._packed([m[:1] for m in matrices], kind, [None] * len(matrices), paired)
                out.n = 2 * rounded(len(matrices[0])) if paired else rows
                out.weight = out.weight.new_empty(rows, out.k).normal_(0, out.k**-0.5)
                out.bias = None if biases[0] is None else torch.randn(rows, device=self.device)
                return out

        torch.manual_seed(0)
        config = config_of(SHAPES[shape] | ({} if self.tiny else changes or {}))
        source = RandomSource(cast("Any", RandomTensors(config)), config, self.device)
        return GpuModel(build(config.kind, config, source), self.device)

    def bare(self, model: Any, entries: int, nodes: int) -> float:
        """Seconds of the graph of a step alone, behind the prompt: forward, choice and walk."""
        from outrider.kernels.gpu import choice
        from outrider.models.gpu.rows import RowBuffer, reach

        start, count, cache = self.prompt, entries * nodes, model.new_cache(entries, self.prompt + self.tokens)
        buffer = RowBuffer(self.device, count, 0)
        views: Any = buffer.views(entries, nodes, 0, min(reach(start + nodes), cache.capacity))
        rows, host = views
        host["positions"][:] = host["cells"][:] = np.tile(np.arange(start, start + nodes), entries)
        host["parents"][:] = np.tile(np.arange(-1, nodes - 1), entries)
        host["slots"][:], host["starts"][:], host["temperatures"][:] = np.arange(entries), start, 1
        buffer.send(rows.size)
        best = self.random(count, choice.blocks_of(model.vocab_size))
        index, path, accepted = best.int(), rows.tokens.view(entries, nodes).clone(), rows.slots.clone()
        drawn = path.clone()

        def step() -> None:
            choice.choose(model.plan.run(rows, cache)[0], best, index, rows, rows.seeds, rows.temperatures)
            choice.walk(best, index, rows, path, accepted, drawn)

        return self.seconds(self.graph(step))

    def asked(self, count: int, tokens: int, prompt: int, seed: int = 0) -> list[Request]:
        """Requests with prompts of their own, at T = 1 and 0 in turn."""
        draw, out = np.random.default_rng(seed), list[Request]()
        for n in range(count):
            params = SamplingParams(temperature=1 - n % 2, max_tokens=tokens, ignore_eos=True)
            out.append(Request(n, draw.integers(97, size=prompt).tolist(), params, seed + n))
        return out


def decode(decoder: Decoder, asked: Sequence[Request], roster: Any = None) -> tuple[float, list[list[int]], float]:
    """(seconds a token, the texts, tokens a step). The first steps are not timed."""
    scheduler, marks = Scheduler(decoder, roster, raises=True), list[tuple[float, int]]()
    sequences = scheduler.add(asked)
    for step, _ in scheduler.run(sequences):
        if step is not None:
            marks.append((perf_counter(), sum(len(s.output) for s in sequences)))
    marks = marks[min(4, (len(marks) - 1) // 2) :]
    seconds, tokens = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
    return seconds / max(tokens, 1), [s.output for s in sequences], tokens / max(len(marks) - 1, 1)


class Scripted(BaseDrafter):
    """Knows the texts, and guesses each token right with a given chance. A width of 2 adds guesses at any node, so what is
    accepted lies apart in the scratch."""

    def __init__(self, asked: Sequence[Request], texts: Sequence[list[int]], vocab: int, chance: float) -> None:
        self.texts = {tuple(one.prompt): text for one, text in zip(asked, texts, strict=True)}
        self.vocab, self.chance, self.draw = vocab, chance, np.random.default_rng(0)

    def propose(self, context: DraftContext) -> Draft:
        trees = list[list[tuple[int, int]]]()
        for tokens, prompt, budget in zip(context.tokens, context.prompt_lengths, context.budgets, strict=True):
            nodes, parent, at = [(tokens[-1], -1)], 0, len(tokens) - prompt
            for right in self.texts[tuple(tokens[:prompt])][at : at + budget.depth]:
                if budget.width > 1 and self.draw.random() < 0.7:
                    nodes.append((int(self.draw.integers(self.vocab)), int(self.draw.integers(len(nodes)))))
                nodes.append(((right + int(self.draw.random() >= self.chance)) % self.vocab, parent))
                parent = len(nodes) - 1
            trees.append(nodes)
        return draft_of(trees)


def judged(wrong: Tensor | int) -> str:
    """What is said beside a number that must be 0."""
    return ", WRONG" if wrong else ""


def error_of(values: Tensor, right: Tensor) -> float:
    """Of all values together, relative."""
    return float((values - right).norm() / right.norm())


def apart(seconds: float, work: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """What a generator gives, in a process of its own, which ends with its time. Raises what it raises, in words."""
    context = multiprocessing.get_context("fork")  # nothing is imported twice, and CUDA has not begun here
    (here, there), end = context.Pipe(duplex=False), monotonic() + seconds

    def run() -> None:
        try:
            for each in work():
                there.send(each)
        except Exception as error:
            traceback.print_exc()
            there.send(RuntimeError(f"{type(error).__name__}: {error}"[:400]))

    child = context.Process(target=run)
    child.start()
    there.close()
    try:
        while here.poll(max(end - monotonic(), 0)):
            if isinstance(each := here.recv(), RuntimeError):
                raise each
            yield each
        raise RuntimeError(f"its {seconds:.0f} seconds were over")
    except EOFError:
        child.join()
        if child.exitcode:
            raise RuntimeError(f"its process ended with {child.exitcode}") from None
    finally:
        child.kill()
        child.join()
