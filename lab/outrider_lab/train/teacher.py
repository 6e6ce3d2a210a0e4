"""The frozen target of a training run: one forward gives the features that the head reads and the distribution that it
learns.

Nothing of it is kept on disk. On the CPU the forward is the engine's own, in the precision in which the target will be used;
it is faster there than torch in float32 or bfloat16.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core.types import Array
from outrider.models.base import FINAL_NORM, LanguageModel, Want
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes


class Taught(NamedTuple):
    """What the target says of some texts.

    features: [batch, n, taps * hidden], the tapped states side by side. last: [batch, n, hidden], what its output head reads
    at each token, for the logits of the token after it. Both float32.
    """

    features: Tensor
    last: Tensor


class Teacher:
    """A loaded target, read with some taps.

    hidden: width of its states. taps: layers that are read. Raises ValueError for a target whose logits are not its last state
    times a matrix.
    """

    def __init__(self, loaded: Loaded, taps: tuple[int, ...]) -> None:
        self.model: LanguageModel = loaded.model
        self.hidden = loaded.config.get_text_config().hidden_size
        self.device, self.vocab_size = torch.device(self.model.device), self.model.vocab_size
        self.taps = taps
        self.scale = self._scale(loaded.name)

    def embedding(self) -> Tensor:
        """float32 [vocab, hidden]. It is as large as it looks, so it is not kept."""
        return self._here(self.model.embedding_rows(np.arange(self.vocab_size)))

    def output(self, ids: Tensor | None = None) -> Tensor:
        """float32 [n, hidden]: rows of the output head, all without ids."""
        rows = np.arange(self.vocab_size) if ids is None else ids.cpu().numpy()
        return self._here(self.model.head_rows(rows))

    def read(self, tokens: Tensor) -> Taught:
        """tokens: int64 [batch, n], each a text from its start."""
        _, states = self._forward(tokens.numpy(), (*self.taps, FINAL_NORM), "none")
        return Taught(states[..., : -self.hidden], states[..., -self.hidden :])

    def _forward(self, tokens: Array, taps: tuple[int, ...], want: Want) -> tuple[Tensor, Tensor]:
        """(logits, features) of texts from their start."""
        cache = self.model.new_cache(*tokens.shape)
        out = self.model.forward(Nodes(tokens, cache, [*range(len(tokens))]), taps=taps, want=want)
        return self._here(out.logits), self._here(out.features)

    def _here(self, given: Any) -> Tensor:
        """What the engine gives, for torch."""
        return torch.as_tensor(given, device=self.device)

    def logits(self, last: Tensor, rows: Tensor) -> Tensor:
        """[..., n] of states [..., hidden], for rows [n, hidden] of the output head; in the precision of autocast."""
        return (last @ rows.T) * self.scale

    def _scale(self, name: str) -> float:
        """The factor of the logits: some models have one. Found by comparing with the model's own logits."""
        theirs, states = self._forward(np.arange(8)[None] % self.vocab_size, (FINAL_NORM,), "all")
        ours = states @ self.output().T
        scale = float((theirs * ours).sum() / (ours * ours).sum())
        error = (theirs - scale * ours).norm() / theirs.norm()
        if not error < 0.05:
            raise ValueError(
                f"the logits of {name} are not its last hidden state times the rows of its output head (they differ by "
                f"{float(error):.0%}), so there is nothing to teach a head with; a bias or a cap on the logits is the "
                "usual reason"
            )
        return scale


def multiplying_dtype(device: torch.device) -> torch.dtype:
    """The precision to multiply in: bfloat16 where that is at least 1.5 times as fast as float32, as on a GPU, else
    float32."""
    seconds: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(512, 512, device=device, dtype=dtype)
        _ = a @ a
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            b = a @ a
            b[0, 0].item()
            best = min(best, time.perf_counter() - started)
        seconds[dtype] = best
    faster = device.type == "cuda" or seconds[torch.float32] > 1.5 * seconds[torch.bfloat16]
    return torch.bfloat16 if faster else torch.float32
