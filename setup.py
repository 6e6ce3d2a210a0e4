"""The native kernels: one plain shared library without Python's or torch's headers, loaded with ctypes.

Optional: where no C++ compiler is to be had the package installs without it, and `outrider.kernels.cpu.why()` says so.

CXX names the compiler. OUTRIDER_PLATFORM names the platform of a wheel for another machine, which CXX compiles for.
Such a wheel must have its library. `make dist` sets both.
"""

import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCE = Path("outrider/kernels/cpu/src")
PLATFORM = os.environ.get("OUTRIDER_PLATFORM", "")
SUFFIXES = {"win": ".dll", "mac": ".dylib", "darwin": ".dylib"}  # else .so
# No -march and no -ffast-math: the instruction set is chosen at run time, and every rounding is meant.
FLAGS = ["-std=c++20", "-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi"]
# Without it gcc shapes the loops around the tiles otherwise: 3% of the time of one row (benchmarks.commits).
FLAGS += ["-fwrapv"]
# gcc would sum integer products as trees, and then has too few registers. clang does not know the flag.
GCC_FLAGS = ["-fno-tree-reassoc"]
# clang would split each sum of products of words in two, which takes 1.16 of the time of five rows of Q8_0.
CLANG_X86_FLAGS = ["-Xclang", "-target-feature", "-Xclang", "+fast-dpwssd"]


class BuildLibrary(build_ext):
    """Compiles without the flags that this machine's Python was built with. The library does not depend on Python's version."""

    def get_ext_filename(self, fullname: str) -> str:
        system = PLATFORM or sys.platform
        suffix = next((end for start, end in SUFFIXES.items() if system.startswith(start)), ".so")
        return str(Path(*fullname.split("."))) + suffix

    def build_extension(self, ext: Extension) -> None:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        version = run([*compiler, "--version"])
        flags = FLAGS + ([] if "clang" in version else GCC_FLAGS)
        if "Target: x86_64" in version:  # clang says so, gcc does not
            flags += CLANG_X86_FLAGS
        folder, library = Path(self.build_temp), Path(self.get_ext_fullpath(ext.name))
        folder.mkdir(parents=True, exist_ok=True)
        library.parent.mkdir(parents=True, exist_ok=True)
        built, sources = Path(self.get_ext_filename(ext.name)), [Path("setup.py"), *SOURCE.rglob("*.*")]
        changed = max(file.stat().st_mtime for file in sources)
        if self.editable_mode and "CXX" not in os.environ and built.is_file() and built.stat().st_mtime > changed:
            shutil.copy2(built, library)  # another environment of this checkout has made it
            return
        windows = (PLATFORM or sys.platform).startswith("win")
        pic, threads = ([], []) if windows else (["-fPIC"], ["-pthread"])

        def compiled(source: str) -> str:
            made = folder / f"{Path(source).stem}.o"
            run([*compiler, *flags, *pic, "-c", source, "-o", str(made)])
            return str(made)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compiled, ext.sources))
        strip = ["-s"] if PLATFORM else []  # else profilers, and a test that reads the code, need the names
        hidden = list[str]()
        if (PLATFORM or sys.platform).startswith(("linux", "manylinux")):
            # A runtime that is linked in must not take the place of another library's.
            shown = folder / "exports"
            shown.write_text("{ global: outrider_*; local: *; };\n", encoding="utf-8")
            hidden = [f"-Wl,--version-script={shown}"]
        run([*compiler, "-shared", *strip, *hidden, *threads, *objects, "-o", str(library)])


class PlatformWheel(bdist_wheel):
    """A wheel for every Python of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", PLATFORM or super().get_tag()[2]


def run(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(f"the native kernels were not built: {error}") from error


kernels = Extension(
    "outrider.kernels.cpu._kernels",
    sources=sorted(map(str, SOURCE.glob("*.cpp"))),
    depends=sorted(map(str, [*SOURCE.glob("*.hpp"), *SOURCE.rglob("*.inc")])),
    optional=not PLATFORM,
)
setup(ext_modules=[kernels], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": PlatformWheel})
