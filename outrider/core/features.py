"""Features of the target that wait for a drafter: kept as they came, and joined once."""

from __future__ import annotations

import torch
from torch import Tensor

_SMALL = 16  # positions of a part that may be kept for the sake of its last ones


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

    def keep(self, count: int) -> None:
        """Forget all but the newest `count` positions. They are not copied, unless much would be kept with them."""
        while self.parts and len(self) - len(self.parts[0]) >= count:
            self._forget(len(self.parts.pop(0)))
        if (spare := len(self) - count) > 0:
            part = self.parts[0][spare:]
            self.parts[0] = part if len(part) + spare <= _SMALL else part.clone()
            self._forget(spare)

    def _forget(self, count: int) -> None:
        self.first, self._count = self.first + count, self._count - count

    def joined(self) -> Tensor:
        """float [position, feature]."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
