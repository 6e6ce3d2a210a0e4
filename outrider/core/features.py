"""Features of the target that wait for a drafter or for the prefix cache: kept as they came, and joined once."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 16  # positions of a part that may be kept for the sake of its last one


class Features:
    """Features of positions that follow each other, from `first` on. Most steps add one, so they are joined when read."""

    def __init__(self, first: int = 0, *parts: Tensor) -> None:
        """parts: float [position, feature]. They must not change."""
        self.first, self.parts, self._count = first, list(parts), sum(map(len, parts))

    def __len__(self) -> int:
        return self._count

    def add(self, part: Tensor) -> None:
        self.parts.append(part)
        self._count += len(part)

    def joined(self) -> Tensor:
        """float [position, feature]."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)

    def last(self) -> Features:
        """The last position alone. Not copied, unless much would be kept with it."""
        part = self.parts[-1]
        alone = part if len(part) == 1 else part[-1:] if len(part) <= _SMALL else part[-1:].clone()
        return Features(self.first + self._count - 1, alone)
