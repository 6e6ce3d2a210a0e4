"""Teach the draft to say what the target would say.

    python -m recipes.distill --tokens work/pair/tokenizer --target work/pair/target/model --run work/pair/draft \\
        --minutes 25

What counts is acceptance: at temperature 1 it is the mean of sum(min(p, q)), one minus the total variation, so that is
the loss, led in by the forward KL divergence, which still pulls where the two laws hardly overlap. The text is half
training text and half what the target itself writes, since that is the text on which a draft is asked.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider_lab.train.method import divergence
from outrider_lab.train.trainer import rate
from recipes.models import build, export
from recipes.train import Corpus, Progress, autocast, load_stream, optimisers, save, start

PROMPT, WRITTEN = 64, 192
TEMPERATURES = (0.0, 1.0, 0.0, 0.7)  # in turn; greedy twice, because greedy is what most people run


@torch.inference_mode()
def write(target: LlamaForCausalLM, prompts: Tensor, temperature: float) -> Tensor:
    """The target's continuations of prompts of one length, untruncated law. After an end token all is end token."""
    law = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if temperature
        else {"do_sample": False}
    )
    with autocast(prompts.device):
        return target.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=WRITTEN, pad_token_id=0, **law
        )


def collect(
    target: LlamaForCausalLM, corpus: Corpus, path: Path, tokens: int, batch: int, device: torch.device
) -> np.ndarray:
    """Rows of prompt and continuation, kept on disk, so that a resumed run does not write them again."""
    if path.exists():
        return np.load(path)
    torch.manual_seed(0)
    rows: list[np.ndarray] = []
    while len(rows) * batch * WRITTEN < tokens:
        # Prompts from the far end of the order: the target has seen it least, so it continues rather than recites.
        prompts = corpus.windows(-(len(rows) + 1) * batch, batch, PROMPT + WRITTEN, device)[:, :PROMPT]
        text = write(target, prompts, TEMPERATURES[len(rows) % len(TEMPERATURES)])
        full = torch.zeros(batch, PROMPT + WRITTEN, dtype=torch.long, device=device)
        full[:, : text.shape[1]] = text
        rows.append(full.cpu().numpy().astype(np.uint16))
        print(f"wrote {len(rows) * batch * WRITTEN} tokens", flush=True)
    written = np.concatenate(rows)
    np.random.default_rng(0).shuffle(written)
    np.save(path, written)
    return written


def asked(rows: Tensor) -> Tensor:
    """Positions whose text is real: all up to the padding that follows an end token, which is a run of end tokens."""
    padding = (rows == 0) & (rows.roll(1, dims=1) == 0)
    padding[:, 0] = False
    return (~padding).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--budget", type=int, default=0, help="tokens; whichever of the two limits comes first")
    parser.add_argument("--written", type=int, default=120_000, help="tokens that the target writes")
    parser.add_argument("--writers", type=int, default=64, help="continuations written at once")
    parser.add_argument("--batch", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--micro", type=int, default=2048)
    parser.add_argument(
        "--counted", type=int, default=160, help="steps of fitting the bigram start; 0 for a random one"
    )
    parser.add_argument("--muon-lr", type=float, default=0.01)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.85)
    parser.add_argument("--save-every", type=float, default=180.0)
    args = parser.parse_args()
    if not (args.minutes or args.budget):
        parser.error("give --minutes or --budget")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.run.mkdir(parents=True, exist_ok=True)
    target = LlamaForCausalLM.from_pretrained(args.target).to(device).eval().requires_grad_(False)
    corpus = Corpus(load_stream(args.tokens / "train.bin"), seed=1)
    written = collect(target, corpus, args.run / "written.npy", args.written, args.writers, device)

    draft = build("draft", seed=1)
    draft.to(device)
    optims = optimisers(draft, args.muon_lr, args.adam_lr)
    base_rates = [o.param_groups[0]["lr"] for o in optims]
    progress, checkpoint = Progress(), args.run / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        draft.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        progress = Progress(**state["progress"])
    else:
        start(draft, corpus.stream, args.run / "start.pt", args.counted)
    log = (args.run / "log.jsonl").open("a")
    length = PROMPT + WRITTEN
    each = args.batch // length // 2  # rows of training text, and as many of the target's
    clock, saved_at, recent = time.monotonic(), progress.seconds, []

    while (done := progress.fraction(args.minutes, args.budget)) < 1.0:
        text = corpus.windows(progress.step * each, each, length, device)[:, :length]
        picked = [(progress.step * each + i) % len(written) for i in range(each)]
        rows = torch.cat([text, torch.from_numpy(written[picked].astype(np.int64)).to(device)])
        variation_weight = 0.1 + 0.8 * done
        measured = np.zeros(2)
        parts = rows.split(max(1, args.micro // length))
        for part in parts:
            mask = asked(part)
            with autocast(device):
                with torch.no_grad():
                    target_logits = target(part, use_cache=False).logits
                loss, kl, tv = divergence(target_logits, draft(part, use_cache=False).logits, variation_weight)
            ((loss * mask).sum() / mask.sum() / len(parts)).backward()
            measured += np.array([float((x * mask).sum() / mask.sum()) for x in (kl, tv)]) / len(parts)
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        for optim, base in zip(optims, base_rates, strict=True):
            optim.param_groups[0]["lr"] = base * rate(done, args.decay)
            optim.step()
            optim.zero_grad(set_to_none=True)

        now = time.monotonic()
        progress.seconds, clock = progress.seconds + now - clock, now
        progress.tokens += rows.numel()
        progress.step += 1
        recent.append(measured)
        if progress.step % 20 == 0:
            kl_mean, tv_mean = np.mean(recent[-20:], axis=0)
            print(f"{progress.step} {progress.seconds:.0f}s kl {kl_mean:.4f} accept {1 - tv_mean:.4f}", flush=True)
        if progress.seconds - saved_at > args.save_every:
            saved_at = progress.seconds
            kl_mean, tv_mean = np.mean(recent, axis=0)
            row = {"step": progress.step, "seconds": round(progress.seconds), "tokens": progress.tokens,
                   "kl": round(kl_mean, 4), "acceptance": round(1 - tv_mean, 4)}  # fmt: skip
            log.write(json.dumps(row) + "\n")
            log.flush()
            recent.clear()
            save(checkpoint, draft, optims, progress)
    save(checkpoint, draft, optims, progress)
    export(draft, args.tokens, args.run / "model")


if __name__ == "__main__":
    main()
