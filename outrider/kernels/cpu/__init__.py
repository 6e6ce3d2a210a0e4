"""The native kernels: packed linears, attention over the slot cache, noise, and the fused Llama step.

A shared library behind ctypes. It is compiled with the package, and optional: `available()` tells if it is there, `why()`
tells why it is not. Every function gives the same bits for any number of rows, neighbours and threads, and for any
instruction set. Imports torch only.
"""

from outrider.kernels.cpu.ops import Plan, argmax, argmax_gumbel, attention, gumbel, words
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
    "isa",
    "library",
    "num_threads",
    "one_torch_thread",
    "set_num_threads",
    "use_isa",
    "why",
    "words",
]
