"""The native functions have the same bits on every instruction set and on every processor that can be run here.

`tests/native/witness.cpp` prints a hash of the result of each function, and `tests/native/witness.txt` has its lines. A
change of arithmetic changes texts: write the file anew with the program that `witness` below builds, and say why in the log.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outrider.kernels import cpu as native

ROOT = Path(__file__).resolve().parents[3]
SOURCE, NATIVE = ROOT / "outrider/kernels/cpu/src", ROOT / "tests/native"
EXPECTED = (NATIVE / "witness.txt").read_text().splitlines()
LIBRARY = ROOT / f"outrider/kernels/cpu/_kernels{'.dylib' if sys.platform == 'darwin' else '.so'}"
# as in setup.py
FLAGS = ("-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fwrapv", "-fno-tree-reassoc", "-Wno-psabi", "-pthread")
# processor of qemu-user: the instruction set that is chosen there
ARM = {"cortex-a53": "portable", "neoverse-n1": "neon", "max": "neon"}
X86 = {"Nehalem": "portable", "SandyBridge": "portable", "Haswell": "avx2"}


def build(*command: str, of: list[Path]) -> Path:
    """The program that a compiler makes. It is kept in the folder for temporary files, under the hash of what it is made of."""
    made_of = hashlib.sha256("\n".join(command).encode())
    for path in of:
        made_of.update(path.read_bytes())
    folder = Path(tempfile.gettempdir()) / f"outrider-witness-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / made_of.hexdigest()[:32]
    if not program.exists():
        with tempfile.TemporaryDirectory(dir=folder) as empty:
            subprocess.run([*command, "-o", f"{empty}/witness"], check=True)
            os.replace(f"{empty}/witness", program)
    return program


def headers() -> list[Path]:
    return sorted([*SOURCE.glob("*.hpp"), *SOURCE.rglob("*.inc"), NATIVE / "inputs.hpp", NATIVE / "witness.cpp"])


@pytest.fixture(scope="module")
def witness() -> Path:
    """The program with the library of this machine."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not LIBRARY.exists():
        pytest.skip("no C++ compiler, or no native library")
    link = [str(LIBRARY), f"-Wl,-rpath,{LIBRARY.parent}"]
    program = str(NATIVE / "witness.cpp")
    return build(compiler, "-std=c++20", "-O1", f"-I{SOURCE}", program, *link, "-pthread", of=[*headers(), LIBRARY])


# -O1 takes half of the time of -O3, which ships. `make dist` runs the program with the libraries of the wheels.
@pytest.fixture(scope="module", params=["-O1", pytest.param("-O3", marks=pytest.mark.long)])
def arm_witness(request: pytest.FixtureRequest) -> Path:
    """The program for aarch64, with the sources of the library."""
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if compiler is None:
        pytest.skip("no compiler for aarch64: apt-get install g++-aarch64-linux-gnu")
    sources = [*sorted(SOURCE.glob("*.cpp")), NATIVE / "witness.cpp"]
    flags = request.param, *FLAGS
    return build(compiler, *flags, f"-I{SOURCE}", "-static", *map(str, sources), of=[*headers(), *sources])


def emulator(name: str) -> str:
    found = shutil.which(name) or shutil.which(f"{name}-static")
    if found is None:
        pytest.skip(f"no {name}: apt-get install qemu-user")
    return found


def check(*command: str | Path, isa: str) -> None:
    """The program uses the instruction set, ends well and prints the expected lines."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    said = [
        line for line in done.stderr.splitlines() if not line.startswith("qemu")
    ]  # it warns of features that it lacks
    assert (done.returncode, said) == (0, [isa])
    assert done.stdout.splitlines() == EXPECTED


@pytest.mark.parametrize("isa", native.isas())
def test_every_instruction_set_of_this_machine_gives_the_expected_bits(witness: Path, isa: str) -> None:
    check(witness, isa, isa=isa)


# The other old processor runs the same instructions as Nehalem, and the test below sees what it chooses.
@pytest.mark.parametrize(
    ("processor", "isa"),
    [pytest.param(*one, marks=pytest.mark.long if one[0] == "SandyBridge" else ()) for one in X86.items()],
)
def test_older_x86_processors_choose_what_they_have_and_give_the_same_bits(
    witness: Path, processor: str, isa: str
) -> None:
    if "avx2" not in native.isas():
        pytest.skip("the library is not for x86")
    check(emulator("qemu-x86_64"), "-cpu", processor, witness, isa=isa)


@pytest.mark.parametrize(("processor", "isa"), ARM.items())
def test_arm_processors_choose_what_they_have_and_give_the_same_bits(
    arm_witness: Path, processor: str, isa: str
) -> None:
    check(emulator("qemu-aarch64"), "-cpu", processor, arm_witness, isa=isa)


def refused(machine: str, processor: str, program: Path, isa: str) -> None:
    """The processor lacks the instruction set, and the program says so."""
    command = [emulator(machine), "-cpu", processor, str(program), isa]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip().splitlines()[-1:]) == (2, [f"this processor has no {isa}"])


def test_an_instruction_set_that_the_processor_lacks_is_refused(arm_witness: Path) -> None:
    refused("qemu-aarch64", "cortex-a53", arm_witness, "neon")


@pytest.mark.parametrize("processor", [name for name, isa in X86.items() if isa == "portable"])
def test_a_processor_with_vectors_of_other_kinds_has_no_avx2(witness: Path, processor: str) -> None:
    """SandyBridge has AVX: that is not enough."""
    if "avx2" not in native.isas():
        pytest.skip("the library is not for x86")
    refused("qemu-x86_64", processor, witness, "avx2")


def instructions(disassembler: str, program: Path) -> dict[str, str]:
    """The disassembly of each function of outrider, by its mangled name."""
    found = shutil.which(disassembler)
    if found is None:
        pytest.skip(f"no {disassembler}")
    command = [found, "-d", "--no-show-raw-insn", str(program)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.findall(r"^[0-9a-f]+ <([^>]+)>:\n((?:.+\n)+)", text, re.MULTILINE)
    assert any("8outrider" in name for name, _ in functions)
    return {name: body for name, body in functions if "outrider" in name or not name.startswith("_")}


def test_only_the_variants_have_instructions_that_a_processor_may_lack() -> None:
    if "avx2" not in native.isas():
        pytest.skip("the library is not for x86")
    vex = re.compile(r"\tv[a-z]|%[yz]mm")
    functions = instructions("objdump", LIBRARY)
    wide = {name for name, body in functions.items() if vex.search(body)}
    variant = re.compile(r"8outrider(4avx2|6avx512|11avx512_vnni|8avx_vnni)")
    assert wide
    assert not [name for name in wide if not variant.search(name)]


def test_only_the_variant_for_arm_has_products_of_bytes(arm_witness: Path) -> None:
    functions = instructions("aarch64-linux-gnu-objdump", arm_witness)
    products = {name for name, body in functions.items() if re.search(r"\t[su]dot\t", body)}
    assert products
    assert not [name for name in products if "8outrider4neon" not in name]
