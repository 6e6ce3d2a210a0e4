"""The native kernels: packed linears, attention over the slot cache, noise, and the fused Llama step.

A shared library behind ctypes, compiled with the package and optional: `available()` says whether it is there, `why()`
why it is not. Every function gives the same bits for any number of rows, neighbours, threads and instruction set.
Imports torch only; `outrider.models` and whoever chooses tokens may import it.
"""

from outrider.kernels.cpu.ops import Plan, argmax, argmax_gumbel, attention, gumbel, gumbel_at, words
from outrider.kernels.cpu.packed import FORMATS, Packed
from outrider.kernels.cpu.state import (
    available,
    isa,
    library,
    num_threads,
    one_torch_thread,
    set_num_threads,
    use_isa,
    why,
)

__all__ = [
    "FORMATS",
    "Packed",
    "Plan",
    "argmax",
    "argmax_gumbel",
    "attention",
    "available",
    "gumbel",
    "gumbel_at",
    "isa",
    "library",
    "num_threads",
    "one_torch_thread",
    "set_num_threads",
    "use_isa",
    "why",
    "words",
]
