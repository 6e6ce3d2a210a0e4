"""The native kernels: one plain shared library without Python's or torch's headers, loaded with ctypes.

Optional: where no C++ compiler is to be had the package installs without it, and `outrider.kernels.cpu.why()` says so.
"""

from setuptools import Extension, setup

VARIANTS = ["avx2", "avx512", "avx512_vnni", "avx_vnni", "portable"]
SOURCES = ["api", "decoder", *(f"isa_{name}" for name in VARIANTS), "pack", "plan", "pool"]
HEADERS = ["abi.hpp", "isa.hpp", "plan.hpp", "pool.hpp", "quant.hpp"]
PIECES = ["attention", "floats", "kernels", "linear", "maths", "noise", "quantised", "recurrence", "vec"]

setup(
    ext_modules=[
        Extension(
            "outrider.kernels.cpu._kernels",
            sources=[f"outrider/kernels/cpu/src/{name}.cpp" for name in SOURCES],
            depends=[f"outrider/kernels/cpu/src/{name}" for name in HEADERS]
            + [f"outrider/kernels/cpu/src/{name}.inc" for name in PIECES],
            # No -march and no -ffast-math: the instruction set is chosen at run time, and every rounding is meant.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-ffp-contract=off",
                "-fno-math-errno",
                # gcc would sum integer products as trees, and then has too few registers.
                "-fno-tree-reassoc",
                "-fvisibility=hidden",
                "-Wno-psabi",
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
    ]
)
