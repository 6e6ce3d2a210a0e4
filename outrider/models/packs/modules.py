"""Packed matrices at the modules that they belong to, by name.

Packing leaves a module's matrix as `module.__dict__["packed"]`: a `Packed`, or one per expert by name. A group of linears that
are packed side by side has it at its first. A saved pack gives it back, and then nothing is packed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from outrider.kernels.cpu import Packed

_ATTRIBUTE = "packed"


def packed_before(module: nn.Module) -> Any:
    """The `Packed` of a module, or those of its experts by name. None if it was not packed."""
    return module.__dict__.get(_ATTRIBUTE)


def leave_packed_(module: nn.Module, packed: Packed | Mapping[str, Packed]) -> None:
    module.__dict__[_ATTRIBUTE] = packed


def packed_in(model: nn.Module) -> Iterator[tuple[str, Packed]]:
    """Every packed matrix of a model, with its name."""
    for name, module in model.named_modules():
        found = packed_before(module)
        if isinstance(found, Packed):
            yield name, found
        elif found is not None:
            yield from ((f"{name}.{part}", packed) for part, packed in found.items())


def give_packed_(model: nn.Module, packed: Mapping[str, Packed]) -> None:
    """The reverse of `packed_in`. Raises KeyError for a name that the model does not have."""
    modules = dict(model.named_modules())
    for name, matrix in packed.items():
        if name in modules:
            leave_packed_(modules[name], matrix)
            continue
        path, which, number = name.rsplit(".", 2)
        modules[path].__dict__.setdefault(_ATTRIBUTE, {})[f"{which}.{number}"] = matrix
