"""The parts: each gives lines of what it measures, how much that is, and the goal of it."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.bench import SHAPES, Bench, Scripted, decode, error_of, judged
from benchmarks.ruler import differing
from outrider import LLM
from outrider.control import Fixed
from outrider.drafters import NgramDrafter
from outrider.engine.decoder import Decoder
from outrider.models.config import config_of
from outrider.models.load import Loaded

TWO_LAYERS = {"num_hidden_layers": 2, "vocab_size": 4096, "tie_word_embeddings": False}  # many texts in a minute
HEAD = {"num_hidden_layers": 1, "vocab_size": 32768}  # about what a pass of a trained head costs
GOALS = {"1.5B": "1.6 (H100), 1.3 (H200)", "8B": "6.0 (H100), 4.4 (H200)"}  # ms of a plain token
TREE = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6], [0, 1, 3, 7]]  # the path of each node
HEADS = (14, 2, 64), (12, 2, 128), (32, 8, 128), (2, 1, 16)  # of queries and keys, and numbers of each, by shape
Line = tuple[str, str, str]  # what, how much, the goal


def rows(b: Bench) -> Iterator[Line]:
    """Rows of products among others, in both forms, beside the same rows in a prompt."""
    from outrider.kernels.gpu import APART, linear

    def product(x: Tensor) -> Tensor:
        if name.endswith("up"):
            linear.gated(x, weight, None, out := torch.full((len(x), n // 2), float("nan"), device=b.device), "silu")
            return out
        parts = linear.split(n, k)[0] if len(x) <= APART else 1
        linear.linear(x, weight, out := torch.full((parts, len(x), n), float("nan"), device=b.device))
        total = out[0]
        for part in out[1:]:
            total = total + part
        return total

    most, counts = (70, (1, 16, 33)) if b.tiny else (512, (1, 2, 7, 8, 16, 17, 32, 33, 48, 64, 65, 130, 300))
    every = [(f"{shape} {name}", size) for shape in b.large for name, size in b.matrices(shape).items()]
    for name, (n, k) in every:
        weight, wrong, tried, error = (k**-0.5 * b.random(n, k)).bfloat16(), b.whole([0]), 0, ""
        for x in b.random(1 if b.tiny else 2, most, k):
            whole = product(x)
            for count in counts:
                for at in range(0, most - count + 1, max(count, most // (2 if b.tiny else 128))):
                    wrong += (~(product(x[at : at + count]) == whole[at : at + count])).any(1).sum()
                    tried += count
            if not name.endswith("up"):
                error = f", error {error_of(whole, x.bfloat16().double() @ weight.double().T):.0e}"
        yield f"{name}, {n} x {k}", f"{int(wrong)} of {tried:,} rows differ{error}{judged(wrong)}", "0"


def attention(b: Bench) -> Iterator[Line]:
    """Nodes of a tree, of a chain, of a batch and of a prompt, against the same node alone."""
    from outrider.kernels.gpu import attention as own

    def attend(
        q: Tensor, starts: list[int], paths: list[list[int]], tree: bool, few: bool, cells: list[Tensor]
    ) -> Tensor:
        """Entries in slots 1 and 0, which have these paths each."""
        width, deep = max(map(len, paths)) if tree else 0, [start + len(p) - 1 for start in starts for p in paths]
        flat = [n for _ in starts for p in paths for n in (*p, *[0] * (width - len(p)))] if tree else []
        slots, first, positions = (b.whole(numbers) for numbers in ([1, 0][: len(starts)], starts, deep))
        table = b.whole(flat).view(-1, width) if tree else None
        each: Any = SimpleNamespace(slots=slots, starts=first, positions=positions, paths=table)
        splits, out = own.splits_of(max(deep) + 1), torch.full_like(q, float("nan"))
        space = b.random(own.workspace_size(len(q), heads, dim, splits)) if few else None
        own.attend(q, cells[0], cells[1], each, out, space, heads=heads, scale=dim**-0.5, splits=splits)
        return out

    starts = (250,) if b.tiny else (0, 5, 31, 250, 255, 256, 511, 777, 2040, 4090, 8191, 16000)
    for heads, kv_heads, dim in HEADS[-1 if b.tiny else 0 : len(HEADS) if b.tiny else -1]:
        wrong, tried, worst, long = 0, 0, 0.0, 20 if b.tiny else 300
        cells = [b.random(2, kv_heads, max(starts) + 512, dim).bfloat16() for _ in range(2)]
        for start in starts:
            q, moved = b.random(long, heads * dim), [t.clone() for t in cells]
            company = [attend(q[:8], [start], TREE, True, few, cells) for few in (True, False)]
            company.append(attend(q[:16], [start, start // 2], TREE, True, True, cells)[:8])
            for n, path in enumerate(TREE):
                for to, source in zip(moved, cells, strict=True):
                    to[1, :, start : start + len(path)] = source[1][:, [start + node for node in path]]
                alone, others = attend(q[n : n + 1], [start + len(path) - 1], [[0]], False, True, moved)[0], []
                if len(path) == 4:
                    others.append(attend(q[path], [start], [[0] * (i + 1) for i in range(4)], False, True, moved)[-1])
                others += [each[n] for each in company]
                wrong += sum(not torch.equal(alone, other) for other in others)
                tried += len(others)
                seen = [t[1, :, : start + len(path)].double() for t in moved]
                keys, values = (t.repeat_interleave(heads // kv_heads, 0) for t in seen)
                weights = (keys @ q[n].bfloat16().double().view(heads, dim, 1) * dim**-0.5).softmax(1)
                worst = max(worst, error_of(alone, (weights.mT @ values).flatten()))
            whole = attend(q, [start], [[0] * (n + 1) for n in range(long)], False, False, cells)
            for n in range(0, long, long // 5):
                wrong += not torch.equal(attend(q[n : n + 1], [start + n], [[0]], False, True, cells)[0], whole[n])
                tried += 1
        name = f"{heads} heads of {dim}, {kv_heads} of keys, to {max(starts):,} tokens"
        yield name, f"{wrong} of {tried} nodes differ, error {worst:.0e}{judged(wrong)}", "0"


def _prompt(b: Bench, flag: str) -> Iterator[Any]:
    """The products of a prompt, compiled anew. flag: "1" forbids wgmma."""
    from outrider.kernels.gpu import linear

    folder = tempfile.mkdtemp()
    with patch.dict(os.environ, TRITON_CACHE_DIR=folder, DISABLE_MMA_V3=flag):
        torch.manual_seed(0)
        out, run = list[np.ndarray](), list[Callable[[], None]]()
        for n, k in b.matrices(b.large[0]).values():
            x, weight, y = b.random(256, k), b.random(n, k).bfloat16(), b.random(1, 256, n)
            run = [lambda: linear.linear(x, weight, y)]
            run[0]()
            out.append(y[..., :4096].cpu().numpy())
        seconds = b.seconds(run[0])
    yield out, any("wgmma" in file.read_text() for file in Path(folder).rglob("*.ptx")), seconds


def instruction(b: Bench) -> Iterator[Line]:
    """Whether the two instructions of tensor cores agree. Each is compiled in a process of its own."""
    sides = [next(b.apart(b.left() / 2, lambda: _prompt(b, flag))) for flag in "10"]
    (first, no, slow), (second, yes, fast) = sides
    part = np.mean([np.mean(x != y) for x, y in zip(first, second, strict=True)])
    said = f"{'equal' if not part else f'{part:.2%} differ'}; {slow / fast:.2f} times as fast at 256 rows of the head"
    yield "wgmma beside mma.sync", said + ("" if (no, yes) == (False, True) else f"; in the code: {no}, {yes}"), ""


def compiling(b: Bench) -> Iterator[Line]:
    """What later parts launch, compiled by several processes at once. One layer has all kernels of a model."""

    def one(shape: str, entries: int, nodes: int) -> Iterator[float]:
        yield 0.0  # the next process may begin
        model = b.model(shape, {"num_hidden_layers": 1})
        yield b.bare(model, entries, nodes)
        if entries * nodes == 1:
            yield decode(Decoder(model, num_slots=1, max_length=b.prompt + 8), b.asked(1, 8, b.prompt))[0]

    jobs = [(shape, 1, 1) for shape in b.shapes]
    jobs += [
        (shape, *size) for shape in b.large for n in (() if b.tiny else (8, 16, 32, 64)) for size in ((1, n), (n, 1))
    ]
    done = [b.apart(b.left() - 5, lambda job=job: one(*job)) for job in jobs]
    for process in done:
        next(process)
    for process in done:
        deque(process, 0)
    yield "kernels of steps are compiled", f"by {len(done)} processes", ""


def launches(b: Bench) -> Iterator[Line]:
    """What one more kernel costs in a graph, and a graph on the host."""
    from outrider.kernels.gpu import elementwise, norms

    x, y, parts, index = b.random(1, 1536), b.random(1, 1536), b.random(8, 1, 1536), b.whole([0])
    most = 3 if b.tiny else 500
    small = b.graph(take := lambda: elementwise.take(x[:, :64], index, y[:, :64]))
    kinds = {"64 numbers": take, "sum_norm": lambda: norms.sum_norm(parts, None, x, y, weight=x[0], eps=1e-6)}
    for name, launch in kinds.items():
        few, many = (b.seconds(b.graph(lambda: [launch() for _ in range(n)])) for n in (1, 1 + most))
        yield f"a kernel in a graph, {name}", f"{1e6 * (many - few) / most:.2f} us", "1.5"
    pinned, times = torch.zeros(65, dtype=torch.int32, pin_memory=not b.tiny), list[tuple[float, float]]()
    there = pinned.to(b.device)
    for _ in range(4 if b.tiny else 100):
        began = perf_counter()
        small()
        sent = perf_counter()
        pinned.copy_(there, non_blocking=True)
        b.wait()
        times.append((sent - began, perf_counter() - began))
    sent, read = (1e6 * statistics.median(each) for each in zip(*times, strict=True))
    yield "a replay, and with a read", f"{sent:.1f} and {read:.1f} us", "15"


def splits(b: Bench) -> Iterator[Line]:
    """Attention of a layer by the positions that a program adds up. Bits are those of this number."""
    from outrider.kernels.gpu import attention as own

    for heads, kv_heads, dim in HEADS[3:] if b.tiny else HEADS[1:3]:
        for length, count in ((70, 1),) if b.tiny else ((512, 1), (4096, 1), (512, 8)):
            layers = b.random(1 if b.tiny else 32, 2, 1, kv_heads, length, dim).bfloat16()
            q, out, said = b.random(count, heads * dim), b.random(count, heads * dim), list[str]()
            places = b.whole(range(length - count, length))
            each: Any = SimpleNamespace(slots=b.whole([0]), starts=places[:1], positions=places, paths=None)
            for size in (256, 128, 64):
                with patch.object(own, "SPLIT", size):
                    n = own.splits_of(length)
                    space: Any = b.random(own.workspace_size(count, heads, dim, n))
                    one = partial(own.attend, heads=heads, scale=dim**-0.5, splits=n)
                    run = b.graph(lambda: [one(q, keys, values, each, out, space) for keys, values in layers])
                    said.append(f"{size}: {1e6 * b.seconds(run) / len(layers):.1f} us")
            yield f"{heads} heads of {dim}, {count} rows behind {length} tokens", ", ".join(said), ""


def products(b: Bench) -> Iterator[Line]:
    """Rates beside those of a copy and of torch; over enough matrices that no cache holds them."""
    from outrider.kernels.gpu import linear

    source, target = torch.zeros(2, 2**20 if b.tiny else 2**31, dtype=torch.uint8, device=b.device)
    copied = 2 * len(source) / b.seconds(lambda: target.copy_(source))
    yield "a copy", f"{copied / 1e9:,.0f} GB/s", ""
    for shape in b.large:
        total: dict[str, float] = {"ours": 0.0, "torch": 0.0}
        for name, (n, k) in b.matrices(shape).items():
            many, said = 1 if b.tiny else max(2, 4 * 10**8 // (2 * n * k)), list[str]()
            weights = [b.random(n, k).bfloat16() for _ in range(many)]
            for count in (1, 8):
                x, parts = b.random(count, k), 1 if name == "head" else linear.split(n, k)[0]
                half, out, wide = x.bfloat16(), b.random(parts, count, n), b.random(count, n // 2)
                up, own = lambda w: linear.gated(x, w, None, wide, "silu"), lambda w: linear.linear(x, w, out)
                for side, run in {"ours": up if name == "up" else own, "torch": lambda w: half @ w.T}.items():
                    taken = b.seconds(b.graph(lambda: [run(w) for w in weights])) / len(weights)
                    said.append(f"{side} {2e-9 * n * k / taken:,.0f} ({2 * n * k / taken / copied:.0%})")
                    times = 1 if name == "head" else SHAPES[shape]["num_hidden_layers"]
                    total[side] += taken * times * (count == 1)
            yield f"{shape} {name}, GB/s", f"{', '.join(said[:2])}; 8 rows {', '.join(said[2:])}", "80 %; 8B: 88 %"
        said = [f"{side} {1000 * taken:.2f} ms" for side, taken in total.items()]
        yield f"{shape} products of a token", ", ".join(said), "1.05 of torch"


def plain(b: Bench) -> Iterator[Line]:
    """A token of plain decoding: by the engine, and the graph alone."""
    for shape in b.shapes:
        model = b.model(shape)
        bare, decoder = b.bare(model, 1, 1), Decoder(model, num_slots=1, max_length=b.prompt + b.tokens)
        taken = [decode(decoder, b.asked(1, b.tokens, b.prompt))[0] for _ in range(2 if b.tiny else 4)][1:]
        rate = f"the graph {1000 * bare:.2f} ms, {b.bytes(shape) / bare / 1e9:,.0f} GB/s"
        yield f"{shape} a token", f"{1000 * statistics.median(taken):.2f} ms; {rate}", GOALS.get(shape, "")


def forwards(b: Bench) -> Iterator[Line]:
    """Steps of more rows over one of one row."""
    for shape in b.large:
        one = b.bare(model := b.model(shape), 1, 1)
        for count in (4,) if b.tiny else (8, 16, 32, 64):
            chain, batch = b.bare(model, 1, count) / one, b.bare(model, count, 1) / one
            goal = "1.08; 8B: 1.05" if count == 8 else ""
            yield f"{shape} {count} rows over one", f"{chain:.3f} in a chain, {batch:.3f} in a batch", goal


def texts(b: Bench) -> Iterator[Line]:
    """Texts under drafts and in company against plain decoding of each alone."""
    half = b.left() / 2
    for changes, end, prompt in ((TWO_LAYERS, half, 4), ({}, 15, b.prompt))[: 1 if b.tiny else 2]:
        model, wrong, tried, n, length = b.model(b.large[0], changes), 0, 0, 0, prompt + 24
        alone = Decoder(model, num_slots=1, max_length=length)
        while b.left() > end and n < (2 if b.tiny else 125):
            asked = b.asked(2 if b.tiny else 8, 6 if b.tiny else 16, prompt, seed=8 * n)
            right = [decode(alone, [one])[1][0] for one in asked]
            script, depth = Scripted(asked, right, model.vocab_size, 0.8), 2 + n % 4
            kinds = (script, Fixed(depth, 2)), (script, Fixed(depth)), (NgramDrafter(1, 3), Fixed(3)), (None, None)
            drafter, budget = kinds[n % 4]
            together = Decoder(model, drafter, controller=budget, num_slots=1 + n % 8, max_length=length)
            wrong += sum(map(differing, decode(together, asked)[1], right))
            tried, n = tried + len(asked), n + 1
        yield (
            f"{b.large[0]}, {model.num_layers} layers",
            f"{wrong} tokens differ in {tried:,} texts{judged(wrong)}",
            "0",
        )


def drafts(b: Bench) -> Iterator[Line]:
    """Guesses that are right by a script, over plain decoding. A head's own passes are added by arithmetic."""
    for shape in b.large:
        model, asked, length = b.model(shape), b.asked(1, b.tokens, b.prompt), b.prompt + b.tokens
        head, decoder = b.bare(b.model(shape, HEAD), 1, 1), Decoder(model, num_slots=1, max_length=length)
        (_, right, _), *runs = [decode(decoder, asked) for _ in range(2 if b.tiny else 4)]
        base = statistics.median(run[0] for run in runs)
        for name, depth, chance, passes, goal in (("lookup", 8, 0.845, 0, "3.5"), ("head", 5, 0.7, 5, "1.9")):
            drafter = Scripted(asked, right, model.vocab_size, chance)
            budget = Fixed(min(depth, b.tokens // 3))
            decoder = Decoder(model, drafter, controller=budget, num_slots=1, max_length=length)
            decode(decoder, asked)
            drafter.draw = np.random.default_rng(0)  # the same drafts again, whose graphs are there
            taken, out, each = decode(decoder, asked)
            said = f"{base / (taken + passes * head / each):.2f} times as fast; {each:.2f} tokens a step of "
            said += f"{1000 * taken * each:.2f} ms and {passes} passes of {1000 * head:.2f} ms"
            yield f"{shape}, {depth} guesses of a {name}", said + judged(out != right), goal


def planner(b: Bench) -> Iterator[Line]:
    """Plain decoding with a planner whose lookups find nothing, over the graph alone."""
    for shape in b.large:
        model, length = b.model(shape), b.prompt + b.tokens
        loaded = Loaded(model, shape, None, (), "bfloat16", "", config_of(SHAPES[shape]))
        llm = LLM(loaded, speculative_config={"method": "suffix"}, max_num_seqs=1, max_model_len=length)
        asked = [b.asked(1, b.tokens, b.prompt, seed=n) for n in range(2 if b.tiny else 4)]
        taken, bare = [decode(llm.decoder, one, llm.runtime.roster)[0] for one in asked][1:], b.bare(model, 1, 1)
        yield f"{shape} planned over the graph", f"{statistics.median(taken) / bare:.3f}", "1.02"


def peers(b: Bench) -> Iterator[Line]:
    """transformers on the same card: plain, with prompt lookup, and its static cache in a graph and compiled."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    def generate(count: int, **more: Any) -> float:
        b.wait()
        began, more = perf_counter(), more | {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **more)
        b.wait()
        return perf_counter() - began

    @torch.no_grad()
    def forward() -> None:
        for length in lengths:
            length.fill_(b.prompt)
        model(ids[:, :1], position_ids=position, past_key_values=cache, use_cache=True)

    for shape in b.large:
        config = AutoConfig.for_model(**SHAPES[shape])
        with torch.device(b.device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        ids, position = torch.randint(97, (1, b.prompt), device=b.device), b.whole([b.prompt])[None].long()
        few, many = (1, 3) if b.tiny else (8, 40)
        for name, more in {"generate": {}, "prompt lookup": {"prompt_lookup_num_tokens": 4}}.items():
            generate(few, **more)
            taken = (generate(many, **more) - generate(few, **more)) / (many - few)
            yield f"{shape} transformers, {name}", f"{1000 * taken:.2f} ms a token", ""
        cache = StaticCache(config=config, max_cache_len=2 * b.prompt)
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
        lengths = [t for each in cache.layers for t in vars(each).values() if isinstance(t, Tensor) and t.numel() == 1]
        yield f"{shape} transformers, in a graph", f"{1000 * b.seconds(b.graph(forward)):.2f} ms", ""
        how: dict[str, Any] = {"backend": "eager"} if b.tiny else {"mode": "reduce-overhead"}
        model.forward = torch.compile(model.forward, **how)
        yield f"{shape} transformers, compiled", f"{1000 * b.seconds(forward, False):.2f} ms", ""
        torch._dynamo.reset()


PARTS: dict[Callable[[Bench], Iterator[Line]], float] = {rows: 60, attention: 75, instruction: 50, compiling: 75}
PARTS |= {launches: 30, products: 60, plain: 75, forwards: 50, texts: 90, drafts: 60}
PARTS |= {planner: 50, splits: 30, peers: 120}
"""Each part, the most important first, and its seconds at most."""
