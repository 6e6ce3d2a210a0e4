"""Compiles the kernels of `kernels.gpu` for GPUs that are not there, as their launches ask for: `python gpu_compiled.py 90 80`.

A launch of this process runs nothing. It is compiled by triton, whose wheel has the assembler, and prints a line of JSON.
Arguments are tensors of the device "meta" with the shapes of real models. Without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from outrider.kernels.gpu import APART, attention, choice, elementwise, linear, norms, rope
from outrider.kernels.gpu.coded import Coded

PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64", torch.int8: "*i8",
    torch.uint8: "*u8",
}  # fmt: skip
compiled = dict[tuple[Any, ...], None]()
architecture = 0


def launch(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In the place of a run: compile for `architecture`, unless it was, and print what the code is joint of."""
    given = dict(zip(self.arg_names, args, strict=False)) | {k: v for k, v in options.items() if k in self.arg_names}
    options = {k: v for k, v in options.items() if k not in self.arg_names}
    signature, constants, aligned = dict[str, str](), dict[str, Any](), dict[tuple[int], Any]()
    for place, parameter in enumerate(self.params):
        value = given[parameter.name]
        general = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not general):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        tensor = isinstance(value, torch.Tensor)
        kind = (
            TYPES[value.dtype] if tensor else "fp32" if isinstance(value, float) else "i32" if value < 2**31 else "i64"
        )
        signature[parameter.name] = kind
        address = value.storage_offset() * value.element_size() if tensor else value
        if (tensor or (isinstance(value, int) and not general)) and address % 16 == 0:
            aligned[(place,)] = [["tt.divisibility", 16]]
    key = (architecture, self.__name__, *signature.items(), *map(repr, constants.items()), *aligned, *options.items())
    if key in compiled:
        return
    compiled[key] = None
    source = ASTSource(self, signature, constants, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file, tempfile.NamedTemporaryFile(suffix=".cubin") as out:
        file.write(code.asm["ptx"])
        file.flush()
        suffix = "a" if architecture >= 90 else ""
        command = [PTXAS, "-v", "--fmad=false", f"-arch=sm_{architecture}{suffix}", file.name, "-o", out.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        listing = subprocess.run(
            [PTXAS.parent / "nvdisasm", "-c", out.name], capture_output=True, text=True, check=True
        )
    loop = product_loop(listing.stdout.splitlines())
    layouts = dict(re.findall(r"(#\w+) = (#ttg\.\S+<.*>)", code.asm["ttgir"]))
    reduced = re.findall(r'"tt\.reduce".*?: \(tensor<\d+xf32, (#\w+)', code.asm["ttgir"], re.DOTALL)
    blocks = code.asm["ttgir"].split('"tt.reduce"')[1:]
    instructions = re.findall(r"(?:wgmma\.mma_async|tcgen05\.mma|mma)\S*m\d+n\d+k\d+|tcgen05\.mma", code.asm["ptx"])
    said = {
        "architecture": architecture,
        "kernel": self.__name__.removeprefix("_"),
        "constants": {k: v for k, v in constants.items() if self.params[self.arg_names.index(k)].is_constexpr},
        "tiles": re.findall(r"nvidia_mma<\{.*?warpsPerCTA = \[(\d+), (\d+)\]", code.asm["ttgir"]),
        "out": signature.get("out", ""),
        "warps": options["num_warps"],
        "grid": list(grid),
        "registers": int(re.search(r"Used (\d+) registers", report)[1]),  # pyright: ignore[reportOptionalSubscript]
        "spilled": int(re.search(r"(\d+) bytes spill stores", report)[1]),  # pyright: ignore[reportOptionalSubscript]
        "spilled_in_loop": sum("STL" in line or "LDL" in line for line in loop),
        "shared_in_loop": sum(bool(re.search(r"[^G]STS", line)) for line in loop),
        "shared": code.metadata.shared,
        "products": sorted(set(instructions)),
        "asynchronous": len(re.findall(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", code.asm["ptx"])),
        "narrow": len(re.findall(r"cp\.async\.ca\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x4", code.asm["ptx"])),
        "float_sums": sum("arith.addf" in block[:600] for block in blocks),
        "layouts": sorted({layouts[name] for name in reduced}),
        "weights": signature.get("weight"),
        "together": sorted(set(re.findall(r"kWidth = (\d+)", code.asm["ttgir"]))),
        "fused": len(re.findall(r"\bfma\.rn\.f32", code.asm["ptx"])),
    }
    print(json.dumps(said), flush=True)


def product_loop(lines: list[str]) -> list[str]:
    """The instructions of the shortest loop with products."""
    labels, loops = dict[str, int](), list[list[str]]()
    for i, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = i
        to = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if to and to[1] in labels:
            body = [each for each in lines[labels[to[1]] : i + 1] if each.rstrip().endswith(";") or "*/ " in each]
            loops += [body] if any("HMMA" in each for each in body) else []
    return min(loops, key=len, default=[])


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def whole(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)


def halves(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.bfloat16)


def coded(n: int, k: int, bits: int, group: int) -> Coded:
    width, kind = -(-k // 128) * 128, torch.uint8 if bits == 4 else torch.int8
    return Coded(tensor(n, width * bits // 8, dtype=kind), whole(n, width // group), k, bits, group)


def rows(entries: int, nodes: int, tree: bool = False) -> Any:
    count = entries * nodes
    return SimpleNamespace(
        tokens=whole(count), positions=whole(count), cells=whole(count), slots=whole(entries), starts=whole(entries),
        paths=whole(count, 64) if tree else None, parents=whole(count) if tree else None,
    )  # fmt: skip


def product(x: torch.Tensor, n: int) -> torch.Tensor:
    out = tensor(linear.split(n, x.shape[1])[0] if len(x) <= APART else 1, len(x), n)
    linear.linear(x, halves(n, x.shape[1]), out)
    return out


def layer(x: torch.Tensor, heads: int, kv_heads: int, dim: int, middle: int, norm: torch.Tensor | None = None) -> None:
    """The kernels of a layer, for the rows of one chain."""
    count, hidden = x.shape
    joint, cache, angles = (
        product(x, (heads + 2 * kv_heads) * dim),
        halves(4, kv_heads, 4096, dim),
        tensor(4096, dim // 2),
    )
    pair = None if norm is None else (norm, norm)
    query, stream = tensor(count, heads * dim), tensor(count, hidden)
    rope.rope_store(joint, joint[0, 0], query, cache, cache, rows(1, count), angles, angles, heads=heads, norms=pair)
    attended, between = query.to(x.dtype), tensor(count, middle).to(x.dtype)
    attend(query, attended, kv_heads, dim, rows(1, count))
    norms.sum_norm(product(attended, hidden), None, stream, x, weight=tensor(hidden), eps=1e-6)
    linear.gated(x, halves(2 * middle, hidden), None, between, "silu")
    norms.sum_norm(product(between, hidden), None, stream, x, weight=tensor(hidden), eps=1e-6)


def coded_layer(x: torch.Tensor, bits: int, group: int) -> None:
    """The products of a layer with codes."""
    count, hidden = x.shape
    down, up, between = (
        coded(hidden, 8960, bits, group),
        coded(17920, hidden, bits, group),
        tensor(count, 8960).to(x.dtype),
    )
    for parts in {1, linear.split(*down.shape)[0] if count <= APART else 1}:
        linear.linear(between, down, tensor(parts, count, hidden))
    linear.gated(x, up, None, between, "silu")


def attend(query: torch.Tensor, out: torch.Tensor, kv_heads: int, dim: int, each: Any, **settings: Any) -> None:
    splits, cache, heads = 16, halves(4, kv_heads, 4096, dim), query.shape[1] // dim
    room = None if len(query) > APART else tensor(attention.workspace_size(len(query), heads, dim, splits))
    attention.attend(query, cache, cache, each, out, room, heads=heads, scale=dim**-0.5, splits=splits, **settings)


def main(architectures: list[int]) -> None:
    global architecture
    JITFunction.run = launch
    for architecture in architectures:
        for count in (1, 8, 32, 48, 512):
            layer(halves(count, 1536), 12, 2, 128, 8960)
            coded_layer(halves(count, 1536), 4, 32)
            if architecture == architectures[0]:
                coded_layer((tensor if count == 8 else halves)(count, 1536), 8, 32 if count == 8 else 16)
        if architecture != architectures[0]:
            continue
        layer(tensor(8, 4096), 32, 8, 128, 14336, tensor(128))
        for heads, kv_heads, dim in ((14, 2, 64), (32, 8, 128), (4, 1, 256)):
            attend(*(tensor(20, heads * dim),) * 2, kv_heads, dim, rows(1, 20, tree=True), softcap=50.0, window=512)
            attend(*(tensor(1, heads * dim),) * 2, kv_heads, dim, rows(1, 1), sinks=tensor(heads))
            attend(*(tensor(512, heads * dim),) * 2, kv_heads, dim, rows(1, 512))
            attend(*(tensor(128, heads * dim),) * 2, kv_heads, dim, rows(2, 64, tree=True))
        wide, angles = tensor(8, 2048), tensor(4096, 64)
        linear.linear(
            tensor(32, 2048), halves(152064, 2048), tensor(1, 32, 152064), tensor(152064), factor=0.5, softcap=30.0
        )
        linear.gated(wide, halves(8192, 2048), tensor(8192), tensor(8, 4096), "gelu_tanh")
        norms.sum_norm(
            wide[None], wide[0], wide, wide, weight=wide[0], shift=wide[0], layer_norm=True, post=(wide[0], None, 1e-6)
        )
        for count in (1, 3, 16, 100):  # of a width that no alignment divides
            parts = tensor(3 if count <= 64 else 1, count, 100)
            norms.sum_norm(parts, None, parts[0], parts[0], weight=tensor(100), eps=1e-6)
            cache, angles = halves(4, 1, 4096, 20), tensor(4096, 10)
            pair = tensor(20), tensor(20)
            rope.rope_store(
                parts, None, parts[0, :, :60], cache, cache, rows(1, count), angles, angles, heads=3, norms=pair
            )
        norms.group_norm(wide, wide, wide[0], group=128, eps=1e-6)
        rope.rope(wide, whole(8), angles, angles, dim=128)
        rope.store(wide, wide, halves(4, 16, 4096, 128), halves(4, 16, 4096, 128), rows(1, 8))
        attention.move(halves(56, 4, 2, 4096, 128), rows(2, 4), whole(2, 4), whole(2))
        elementwise.embed(whole(8), halves(152064, 2048), wide, 2.0)
        for function in ("silu", "gelu_tanh", "relu2", "sigmoid"):
            elementwise.gate(wide, wide, function, wide)
        for function in ("identity", "softplus", "exp"):
            elementwise.map_rows(wide, function, wide, scale=wide[0], shift=wide[0], factor=0.5)
        elementwise.take(wide, whole(8), wide)
        best, index = tensor(8, choice.blocks_of(152064)), whole(8, choice.blocks_of(152064))
        choice.choose(tensor(8, 152064), best, index, rows(1, 8), tensor(1, dtype=torch.int64), tensor(1))
        choice.walk(tensor(64, 149), whole(64, 149), rows(1, 64, tree=True), whole(1, 64), whole(1), whole(1, 64))
        choice.advance(rows(4, 1), whole(4, 1))
        alone = rows(8, 1)
        alone.last, alone.seeds, alone.temperatures = whole(8), tensor(8, dtype=torch.int64), tensor(8)
        choice.choose(tensor(8, 152064), best, index, alone, alone.seeds, alone.temperatures, whole(8))
        for count in (1, 8):
            choice.rank(tensor(8, 152064), best, index, alone, whole(8), whole(64, 8, count), tensor(64, 8, count))
        choice.walk(best, index, rows(1, 8, tree=True), whole(1, 8), whole(1), whole(1, 8))


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]])
