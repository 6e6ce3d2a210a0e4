"""The native kernels: packed linears, attention over the slot cache, noise, and the fused Llama step.

A shared library, loaded with ctypes. It is compiled with the package and is optional. `available()` returns whether it is
there, and `why()` returns why it is not. Every function gives the same bits for any number of rows, neighbours and threads, and
for any instruction set.
"""

from outrider.kernels.cpu.ops import (
    VECTOR_FORMATS,
    AttentionPlan,
    Scoring,
    argmax_gumbel,
    attention,
    gumbel,
    log,
    pack_vectors,
    softmax,
    total,
    truncate,
    words,
)
from outrider.kernels.cpu.packed import FORMATS, KINDS, Packed, Reserve, zeros_in_large_pages
from outrider.kernels.cpu.state import (
    available,
    build,
    isa,
    isas,
    library,
    num_threads,
    set_num_threads,
    use_isa,
    why,
)

__all__ = [
    "FORMATS",
    "KINDS",
    "VECTOR_FORMATS",
    "AttentionPlan",
    "Packed",
    "Reserve",
    "Scoring",
    "argmax_gumbel",
    "attention",
    "available",
    "build",
    "gumbel",
    "isa",
    "isas",
    "library",
    "log",
    "num_threads",
    "pack_vectors",
    "set_num_threads",
    "softmax",
    "total",
    "truncate",
    "use_isa",
    "why",
    "words",
    "zeros_in_large_pages",
]
