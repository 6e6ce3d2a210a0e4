"""What accelerators can do at most, by their data sheets, and the part of it that a program reaches."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from outrider.core.files import read_settings
from outrider.core.suggest import did_you_mean, faults

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Cost = Annotated[float, Field(ge=0)]


@dataclass(frozen=True)
class Accelerator:
    """One device. Arithmetic is dense, in operations per second; a multiplication with an addition is two.

    memory: bytes. bandwidth: bytes per second of its memory. half, fp8: arithmetic with 16 and 8 bits; fp8 None where it has
    none. link: bytes per second to its neighbours, in one direction. source: where the figures are printed, and the year.
    """

    name: str
    memory: Positive
    bandwidth: Positive
    half: Positive
    fp8: float | None
    link: Positive
    source: str


# Compared with the public data sheets in November 2026. NVIDIA prints the bandwidth of links in both directions together.
ACCELERATORS = {
    "h100": Accelerator(
        "NVIDIA H100 SXM", 80e9, 3.35e12, 989e12, 1979e12, 450e9, "NVIDIA H100 data sheet, SXM, 2023; half of its "
        "sparse figures"
    ),
    "h200": Accelerator(
        "NVIDIA H200 SXM", 141e9, 4.8e12, 989e12, 1979e12, 450e9, "NVIDIA H200 data sheet, SXM, 2024; half of its "
        "sparse figures"
    ),
    "b200": Accelerator(
        "NVIDIA HGX B200", 180e9, 7.7e12, 2250e12, 4500e12, 900e9, "NVIDIA Blackwell data sheet, HGX B200, 2025; half of its "
        "sparse figures"
    ),
    "a100": Accelerator(
        "NVIDIA A100 80 GB", 80e9, 2.039e12, 312e12, None, 300e9, "NVIDIA A100 data sheet, SXM 80 GB, 2021; dense figures"
    ),
    "l40s": Accelerator(
        "NVIDIA L40S", 48e9, 864e9, 362e12, 733e12, 32e9, "NVIDIA L40S data sheet, 2023; dense figures, PCIe 4.0 x16"
    ),
    "l4": Accelerator(
        "NVIDIA L4", 24e9, 300e9, 121e12, 242e12, 32e9, "NVIDIA L4 data sheet, 2023; half of its sparse figures, PCIe 4.0 x16"
    ),
    "rtx4090": Accelerator(
        "NVIDIA RTX 4090", 24e9, 1.008e12, 165e12, 330e12, 32e9, "NVIDIA Ada architecture paper, version 2.01, 2023; dense "
        "figures with 32-bit sums, PCIe 4.0 x16"
    ),
    "mi300x": Accelerator(
        "AMD MI300X", 192e9, 5.3e12, 1307e12, 2615e12, 448e9, "AMD Instinct MI300X data sheet, 2023; dense "
        "figures, seven links"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """The devices of one replica, and what a program reaches of their figures.

    The shares, `sync_seconds` and `step_seconds` are assumptions. A measurement of your own engine replaces them.
    memory_share: of the memory that weights, keys and values may take. sync_seconds: of one sum over all devices, without its
    transfer. step_seconds: of a step outside of the model: scheduling, launches, choosing tokens. price: of one device for an
    hour; None if the user gave none.
    """

    device: Accelerator
    count: Annotated[int, Field(ge=1)] = 1
    bandwidth_share: Share = 0.75
    arithmetic_share: Share = 0.5
    memory_share: Share = 0.9
    sync_seconds: Cost = 10e-6
    step_seconds: Cost = 1e-3
    price: Cost | None = None

    @property
    def name(self) -> str:
        return f"{self.count} x {self.device.name}" if self.count > 1 else self.device.name

    @property
    def memory(self) -> float:
        """Bytes for weights, keys and values."""
        return self.count * self.device.memory * self.memory_share

    @property
    def bandwidth(self) -> float:
        """Bytes per second of all devices together, as far as a program reaches them."""
        return self.count * self.device.bandwidth * self.bandwidth_share

    def arithmetic(self, bits: int) -> float:
        """Operations per second of all devices together for weights of so many bits, as far as a program reaches them.

        Weights of 8 bits use 8-bit arithmetic where the device has it. All others use 16 bits.
        """
        fastest = self.device.fp8 if bits == 8 and self.device.fp8 else self.device.half
        return self.count * fastest * self.arithmetic_share


_UNITS = {"memory_gb": ("memory", 1e9), "bandwidth_gb_s": ("bandwidth", 1e9), "half_tflops": ("half", 1e12),
          "fp8_tflops": ("fp8", 1e12), "link_gb_s": ("link", 1e9)}  # fmt: skip
_EXAMPLE = '{"name": "my box", "memory_gb": 48, "bandwidth_gb_s": 864, "half_tflops": 362, "link_gb_s": 32, "count": 2}'


def find_hardware(text: str) -> Hardware:
    """The hardware of `h100`, `h100x8`, or of a JSON file. Raises ValueError, or FileNotFoundError for a file.

    A file names its figures as in the example of the error, or a known device as "base" with changes to it.
    """
    if text.endswith(".json"):
        try:
            return _of_file(Path(text))
        except ValidationError as error:
            raise ValueError(f"{text}: {'; '.join(faults(error))}") from None
    found = re.fullmatch(r"([a-z][a-z0-9]*?)(?:x(\d+))?", text.lower())
    if found is None or found[1] not in ACCELERATORS:
        near = did_you_mean(found[1] if found else text, ACCELERATORS)
        raise ValueError(
            f"no hardware is known as {text!r}{near}; known: {', '.join(ACCELERATORS)}, with x8 for eight of them, or a "
            f"file FILE.json such as {_EXAMPLE}"
        )
    return Hardware(ACCELERATORS[found[1]], int(found[2] or 1))


def _of_file(path: Path) -> Hardware:
    values = read_settings(path, f"a hardware file is {_EXAMPLE}")
    base, name, source = values.pop("base", None), values.pop("name", None), values.pop("source", str(path))
    figures = {_UNITS[key][0]: float(values.pop(key)) * _UNITS[key][1] for key in list(values) if key in _UNITS}
    shares = {f.name for f in fields(Hardware)} - {"device"}
    if wrong := sorted(set(values) - shares):
        raise ValueError(
            f"{path} has {wrong[0]!r}, which is none of {', '.join([*_UNITS, *sorted(shares), 'base', 'name'])}"
        )
    if base is not None:
        hardware = find_hardware(str(base))
        if figures or name:
            figures |= {"name": name or f"{hardware.device.name}, changed", "source": source}
        return replace(hardware, device=replace(hardware.device, **figures), **values)
    if missing := [key for key, (field, _) in _UNITS.items() if field not in {*figures, "fp8", "link"}]:
        raise ValueError(f"{path} lacks {', '.join(missing)}, or a known device as base; a hardware file is {_EXAMPLE}")
    device = {"fp8": None, "link": 32e9, "name": name or path.stem, "source": source, **figures}
    return Hardware(Accelerator(**device), **values)
