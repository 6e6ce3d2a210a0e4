"""The native kernels: one plain shared library without Python's or torch's headers, loaded with ctypes.

Optional: where no C++ compiler is to be had the package installs without it, and `outrider.kernels.cpu.why()` says so.
"""

from pathlib import Path

from setuptools import Extension, setup

SOURCE = Path("outrider/kernels/cpu/src")

setup(
    ext_modules=[
        Extension(
            "outrider.kernels.cpu._kernels",
            sources=sorted(map(str, SOURCE.glob("*.cpp"))),
            depends=sorted(map(str, [*SOURCE.glob("*.hpp"), *SOURCE.rglob("*.inc")])),
            # No -march and no -ffast-math: the instruction set is chosen at run time, and every rounding is meant.
            extra_compile_args=[
                "-std=c++20",
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
