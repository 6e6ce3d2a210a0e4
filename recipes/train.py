"""Train the target from scratch, by wall time or by tokens. Stops and resumes at any point.

    python -m recipes.train --tokens work/pair/tokenizer --run work/pair/target --minutes 65

    python -m recipes.train --tokens work/other/tokenizer --run work/other/draft --role draft --minutes 12

The second line trains a draft with a tokenizer of its own; half of its text is `written.bin` in the folder of tokens, what
the target wrote, if that is there.

Short sequences first, long ones for the last fifth. Muon moves the hidden matrices, AdamW the rest; the rates warm up
and fall to zero: a short run is mostly noise at full rate, and the loss is won on the way down.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaForCausalLM

from outrider_lab.train.trainer import Muon, rate
from recipes.bigram import start_as_bigram
from recipes.models import build, export

LONG_FROM = 0.8  # of the whole run


@dataclass
class Corpus:
    """A stream of tokens cut into windows, the windows in a random order that depends on the seed and length alone."""

    stream: np.ndarray
    seed: int = 0
    orders: dict[int, np.ndarray] = field(default_factory=dict)

    def windows(self, first: int, count: int, length: int, device: torch.device) -> Tensor:
        """Windows first .. first + count, each of length + 1 tokens so that every position has a next token."""
        total = (len(self.stream) - 1) // length
        order = self.orders.setdefault(length, np.random.default_rng([self.seed, length]).permutation(total))
        starts = [int(order[i % total]) * length for i in range(first, first + count)]
        rows = np.stack([self.stream[s : s + length + 1] for s in starts]).astype(np.int64)
        return torch.from_numpy(rows).to(device)


def load_stream(path: Path) -> np.ndarray:
    return np.fromfile(path, dtype=np.uint16)


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    on = device.type == "cuda"
    return torch.autocast("cuda", torch.bfloat16) if on else contextlib.nullcontext()


def loss_of(model: torch.nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, stream: np.ndarray, device: torch.device, windows: int, length: int) -> float:
    """Over windows spread evenly, the same ones every time."""
    starts = np.linspace(0, len(stream) - length - 2, windows).astype(int)
    rows = torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64)).to(device)
    with autocast(device):
        return float(np.mean([loss_of(model, part).item() for part in rows.split(8)]))


def optimisers(model: LlamaForCausalLM, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if all(p is not h for h in hidden)]
    return [
        Muon(hidden, lr=muon_lr),
        torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def start(model: LlamaForCausalLM, stream: np.ndarray, path: Path, steps: int) -> None:
    """The counted start costs a minute or two, so a restarted run finds it on disk."""
    if not path.exists() and steps:
        start_as_bigram(model, stream, steps)
        torch.save(model.state_dict(), path)
    elif steps:
        model.load_state_dict(torch.load(path, weights_only=True))


@dataclass
class Progress:
    """What a resumed run must know. `seconds` counts time spent training, not time since the start."""

    seconds: float = 0.0
    tokens: int = 0
    step: int = 0
    windows: dict[int, int] = field(default_factory=dict)  # windows drawn so far, per length

    def fraction(self, minutes: float, budget: int) -> float:
        return max(self.seconds / (60 * minutes) if minutes else 0.0, self.tokens / budget if budget else 0.0)


def save(path: Path, model: LlamaForCausalLM, optims: list[torch.optim.Optimizer], progress: Progress) -> None:
    state = {"model": model.state_dict(), "optims": [o.state_dict() for o in optims], "progress": vars(progress)}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True, help="the folder that tokenizer wrote")
    parser.add_argument("--run", type=Path, required=True, help="checkpoint, log and the exported model go here")
    parser.add_argument("--role", default="target", choices=("target", "draft"))
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--budget", type=int, default=0, help="tokens; whichever of the two limits comes first")
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--micro", type=int, default=2048, help="tokens of a forward pass")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--long", type=int, default=1024, help="length of the last fifth")
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.85, help="share of the run over which the rates fall")
    parser.add_argument(
        "--counted", type=int, default=160, help="steps of fitting the bigram start; 0 for a random one"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save-every", type=float, default=300.0, help="seconds")
    args = parser.parse_args()
    if not (args.minutes or args.budget):
        parser.error("give --minutes or --budget")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.run.mkdir(parents=True, exist_ok=True)
    corpus, held = Corpus(load_stream(args.tokens / "train.bin")), load_stream(args.tokens / "held_out.bin")
    said = args.tokens / "written.bin"
    corpora = [corpus, Corpus(load_stream(said))] if said.exists() else [corpus]
    model = build(args.role, vocabulary=len(AutoTokenizer.from_pretrained(args.tokens))).to(device)
    optims = optimisers(model, args.muon_lr, args.adam_lr)
    base_rates = [o.param_groups[0]["lr"] for o in optims]
    progress, checkpoint = Progress(), args.run / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        progress = Progress(**state["progress"])
        print(f"resumed at step {progress.step}", flush=True)
    else:
        start(model, corpus.stream, args.run / "start.pt", args.counted)
    forward = torch.compile(model, dynamic=False) if args.compile else model
    log = (args.run / "log.jsonl").open("a")
    clock, saved_at, recent = time.monotonic(), progress.seconds, []

    while (done := progress.fraction(args.minutes, args.budget)) < 1.0:
        length = args.long if done >= LONG_FROM else args.length
        first, each = progress.windows.get(length, 0), max(1, args.batch // length // len(corpora))
        rows, count = torch.cat([c.windows(first, each, length, device) for c in corpora]), each * len(corpora)
        parts = rows.split(max(1, args.micro // length))
        loss = 0.0
        for part in parts:
            with autocast(device):
                part_loss = loss_of(forward, part) * (len(part) / count)
            part_loss.backward()
            loss += part_loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optim, base in zip(optims, base_rates, strict=True):
            optim.param_groups[0]["lr"] = base * rate(done, args.decay)
            optim.step()
            optim.zero_grad(set_to_none=True)
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss became {loss} at step {progress.step}")

        now = time.monotonic()
        progress.seconds, clock = progress.seconds + now - clock, now
        progress.windows[length] = first + each
        progress.tokens += rows[:, 1:].numel()
        progress.step += 1
        recent.append(loss)
        if progress.step % 20 == 0:
            print(f"{progress.step} {progress.seconds:.0f}s {np.mean(recent[-20:]):.4f}", flush=True)
        if progress.seconds - saved_at > args.save_every:
            saved_at = progress.seconds
            held_loss = held_out_loss(model, held, device, windows=32, length=256)
            row = {"step": progress.step, "seconds": round(progress.seconds), "tokens": progress.tokens,
                   "train": round(float(np.mean(recent)), 4), "held_out": round(held_loss, 4)}  # fmt: skip
            log.write(json.dumps(row) + "\n")
            log.flush()
            recent.clear()
            save(checkpoint, model, optims, progress)
    save(checkpoint, model, optims, progress)
    export(model, args.tokens, args.run / "model")


if __name__ == "__main__":
    main()
