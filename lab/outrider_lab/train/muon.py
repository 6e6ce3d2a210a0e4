"""Muon for many small matrices on a slow machine: equal shapes are orthogonalised in one batched product.

`torch.optim.Muon` works one matrix at a time in bfloat16, which a processor without bfloat16 units emulates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan 2024: the fastest quintic that lands singular values near one


def orthogonalise(matrices: Tensor, steps: int) -> Tensor:
    """The nearest matrix with all singular values about one, by Newton-Schulz. [matrix, rows, columns], any rows."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.flatten(1).norm(dim=1).clamp_min(1e-7)[:, None, None]
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, for the hidden matrices.

    dtype: of the orthogonalisation. bfloat16 is enough for it, and faster where the machine multiplies in it.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float = 0.95,
        steps: int = 5,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "steps": steps})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    assert p.grad is not None
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(state["momentum"], group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                directions = orthogonalise(torch.stack(updates).to(self._dtype), group["steps"])
                for p, update in zip(params, directions.to(params[0].dtype), strict=True):
                    p.add_(update, alpha=-group["lr"] * scale)
