"""The kernels of NVIDIA GPUs, in Triton. A row has the same bits alone, in a chain, in a tree, in a batch and in a prompt.

Five rules make it so, and every kernel keeps them:

1. The order of a sum follows from sizes of the model alone, never from the number of rows. K is cut in parts, each is summed from
   zero, and parts are added in order: by the next kernel for few rows, in a loop of one program for many.
2. A row meets its keys by position, not by cell. Its ancestors in the scratch are gathered along its path.
3. Every product is by one tensor-core instruction, mma.sync m16n8k16. Triton is told to take no other for larger tiles.
4. What is masked adds exactly nothing.
5. No sum of floats is a reduction whose layout depends on the rows. The mass of a softmax is a product with ones. Norms have one
   program a row, and a block of the row's width. Multiplication and addition are fused by name only.

A function launches one kernel, or two where it says so. It allocates nothing and reads no tensor on the host, so a graph can hold
it. Its grid follows from shapes alone; programs with nothing to do end at once. The modules import triton, this one does not.
"""

from __future__ import annotations

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

os.environ |= {"DISABLE_MMA_V3": "1", "DISABLE_MMA_V5": "1"}  # rule 3, of Hopper and of Blackwell; read at compilation

APART = 64  # rows up to which the parts of a sum are apart: fewer programs would leave multiprocessors idle


class RowTensors(Protocol):
    """The rows of a forward: E entries of N nodes each, entry after entry, R = E * N. All are int32 on the device.

    tokens: [R]. positions: [R], of a row's token; -1 for a row that is unused. cells: [R], where its keys are written.
    slots: [E], of the cache. starts: [E], committed tokens. paths: [R, W], of trees: scratch nodes from the root to the
    row's own node, whose cells are start + node; None for chains, whose cells are their positions. parents: [R], of trees.
    """

    tokens: Tensor
    positions: Tensor
    cells: Tensor
    slots: Tensor
    starts: Tensor
    paths: Tensor | None
    parents: Tensor | None


def why_not(device: Any) -> str | None:
    """Why the kernels cannot run on a device of torch; None if they can, or if Triton's interpreter runs them on the CPU."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    import torch

    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the device is {device}, and they need a GPU of NVIDIA"
    if device.index not in (None, torch.cuda.current_device()):
        return f"they run on one GPU, and {device} is another one; choose it with CUDA_VISIBLE_DEVICES={device.index}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, and they need 8.0"


def arithmetic(device: Any) -> str:
    """What the bits of a model depend on beside its numbers: the card, Triton's version, and the code of the kernels."""
    import torch
    import triton

    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    card = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "no card"
    return f"{card}, triton {triton.__version__}, kernels {hashlib.sha256(code).hexdigest()[:8]}"
