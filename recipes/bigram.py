"""Start a model as the bigram model of its corpus, so that training begins at syntax instead of at word counts.

On a small machine the first fifth of a run goes into learning which token follows which, and that can be counted. The
counts are factored at low rank, and the factors are laid into the weights so that the fresh model computes them:

    embedding   [ u | v | 1 | 0 ]   u: the token as the last one seen, v: the same token as the next one, and a constant
    layer 0     the constant opens a few gates of the MLP, which then copies u to where v lies
    last norm   lets that half through, so that logits = u(last) . v(next)

Nothing is frozen: all of it is trained on from there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

U_SIZE, V_SIZE = 0.6, 0.15  # root mean squares of u and v
COPIED, GATE, UP = 2.0, 3.0, 0.3  # gain of the copy, and how it is shared out among the three matrices


def next_token_laws(stream: np.ndarray, vocabulary: int, smoothing: float = 2.0) -> tuple[Tensor, Tensor]:
    """How often each token occurs, and the law of the token after it, smoothed towards the first."""
    pairs = stream[:-1].astype(np.int64) * vocabulary + stream[1:]
    counts = torch.from_numpy(np.bincount(pairs, minlength=vocabulary**2).astype(np.float32)).view(
        vocabulary, vocabulary
    )
    often = (counts.sum(0) + 0.1) / (counts.sum() + 0.1 * vocabulary)
    return often, (counts + smoothing * often) / (counts.sum(1, keepdim=True) + smoothing)


def factor(often: Tensor, laws: Tensor, rank: int, steps: int, rows: int = 1024) -> tuple[Tensor, Tensor, float]:
    """u with rows of unit size and v, such that softmax(u v') is close to the laws; and the cross-entropy reached."""
    torch.manual_seed(0)
    weight = often**0.25
    logs = laws.log()
    logs -= logs.mean(1, keepdim=True)
    left, sizes, right = torch.svd_lowrank(weight[:, None] * logs * weight, q=rank, niter=2)
    u = left * sizes.sqrt() / weight[:, None]
    size = u.pow(2).mean(1, keepdim=True).sqrt()
    u, v = (u / size).requires_grad_(), (right * sizes.sqrt() / weight[:, None] * size.median()).requires_grad_()
    del logs
    optim = torch.optim.Adam([u, v], lr=0.02, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        optim.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
        picked = torch.multinomial(often, rows, replacement=True)
        last = u[picked]
        logits = last / last.pow(2).mean(1, keepdim=True).sqrt() @ v.T
        loss = torch.nn.functional.cross_entropy(logits, laws[picked])
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"bigram {step} {np.mean(losses[-20:]):.4f}", flush=True)
    with torch.no_grad():
        return u / u.pow(2).mean(1, keepdim=True).sqrt(), v.detach(), float(np.mean(losses[-20:]))


@torch.no_grad()
def lay_in(model: LlamaForCausalLM, u: Tensor, v: Tensor) -> None:
    width, rank = model.config.hidden_size, u.shape[1]
    one = 2 * rank
    table = model.get_input_embeddings().weight
    spread = v.pow(2).mean().sqrt()
    table.zero_()
    table[:, :rank] = U_SIZE * u
    table[:, rank : 2 * rank] = V_SIZE * v / spread
    table[:, one] = U_SIZE

    norm = (((U_SIZE**2 + V_SIZE**2) * rank + U_SIZE**2) / width) ** 0.5
    opened = torch.nn.functional.silu(torch.tensor(GATE * U_SIZE / norm))
    mlp, units = model.model.layers[0].mlp, torch.arange(rank)
    mlp.gate_proj.weight[:rank] = 0
    mlp.gate_proj.weight[:rank, one] = GATE
    mlp.up_proj.weight[:rank] = 0
    mlp.up_proj.weight[units, units] = UP
    mlp.down_proj.weight[rank + units, units] = COPIED * norm / (opened * UP)

    last = (((U_SIZE**2 + (COPIED * U_SIZE) ** 2 + V_SIZE**2) * rank + U_SIZE**2) / width) ** 0.5
    model.model.norm.weight.zero_()
    model.model.norm.weight[rank : 2 * rank] = spread / V_SIZE * last / (COPIED * U_SIZE)


def start_as_bigram(model: LlamaForCausalLM, stream: np.ndarray, steps: int = 160) -> None:
    often, laws = next_token_laws(stream, model.config.vocab_size)
    u, v, reached = factor(often, laws, model.config.hidden_size // 2 - 1, steps)
    lay_in(model, u, v)
    print(f"starts as a bigram model of {reached:.3f} nats", flush=True)
