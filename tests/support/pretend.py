"""A pretended accelerator: tensors that say they are on another device and hold CPU memory.

    with Pretend() as seen:
        model = GpuModel(..., device="pretend")
        ...                                   # any code; it runs, with the values that the CPU gives
    seen.waits, seen.uploads, seen.kernels

Within the context a tensor on the device behaves as one on a GPU. An operation that mixes it with a CPU tensor of more than no
dimension raises. What reads it to the host is counted in `waits`, what writes it from there in `uploads`, and every operation
that a GPU would launch a kernel for in `kernels`. Triton's interpreter gets the memory behind. The device is torch's place for
those of others, so no driver is needed. One `Pretend` runs at a time.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

backend_registration._setup_privateuseone_for_python_backend("pretend")  # device guards that do nothing
DEVICE = torch.device("pretend", 0)
_CPU = torch.device("cpu")
_ALLOTS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
_MAKES = _ALLOTS | {"zeros", "ones", "full", "arange", "clone", "_to_copy"}
_VIEWS = """view _unsafe_view expand permute transpose t slice select unsqueeze squeeze split detach alias as_strided unbind
split_with_sizes lift_fresh lift diagonal narrow view_as_real is_pinned _reshape_alias unfold"""
_NO_KERNEL = _ALLOTS | set(_VIEWS.split())
_READS = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "_unique2", "unique_consecutive", "masked_select"}
_MIXES = ("copy_", "_to_copy", "set_", "index_put_", "index", "_index_put_impl_")


class DeviceTensor(Tensor):
    """A tensor of the pretended device. `memory`: a CPU tensor."""

    memory: Tensor

    @staticmethod
    def __new__(cls, memory: Tensor, requires_grad: bool = False) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls, memory.size(), strides=memory.stride(), storage_offset=memory.storage_offset(), dtype=memory.dtype,
            device=DEVICE, requires_grad=requires_grad,
        )  # fmt: skip
        made.memory = memory
        return made

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"DeviceTensor({self.memory!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Pretend.now is None:
            raise RuntimeError("a tensor of the pretended device was used outside of Pretend()")
        return Pretend.now.run(func, args, kwargs or {})


class Pretend(TorchDispatchMode):
    """See the module.

    Attributes:
        launches: While it is a list, what was launched: the kernel's name, its grid, and its arguments, addresses for tensors.
    """

    now: Pretend | None = None

    def __init__(self, within: str = "outrider") -> None:
        """within: files whose path has this are named in what is counted."""
        super().__init__()
        self.within, self.launches, self._captures = within, None, False
        self.clear()

    def clear(self) -> None:
        """Count anew."""
        self.kernels, self.waits, self.uploads = Counter[str](), Counter[str](), Counter[str]()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """What a graph captures: kernels, and copies within the device or to the host's memory. Anything else raises."""
        self._captures = True
        try:
            yield
        finally:
            self._captures = False

    def __enter__(self) -> Pretend:
        Pretend.now, self._stack, launch = self, ExitStack(), interpreter.GridExecutor.__call__

        def call(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._launched(executor, args, kwargs)
            given, named = tree_map(lambda a: a.memory if isinstance(a, DeviceTensor) else a, (args, kwargs))
            with _disable_current_modes():
                launch(executor, *given, **named)

        self._stack.enter_context(patch.object(interpreter.GridExecutor, "__call__", call))
        # a Python tensor cannot be made within it
        self._stack.enter_context(patch.object(torch, "inference_mode", torch.no_grad))
        self._stack.enter_context(_Made())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()
        Pretend.now = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def _launched(self, executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        name = executor.fn.__name__
        if any(not isinstance(t, DeviceTensor) for t in tensors):
            raise RuntimeError(f"the kernel {name} was given a tensor of the host at {self.where()}")
        self.kernels[name] += 1
        if self.launches is not None:
            plain = tree_map(lambda a: a.memory.data_ptr() if isinstance(a, DeviceTensor) else a, (args, kwargs))
            self.launches.append((name, executor.grid, *tree_leaves(plain)))

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of torch."""
        name = str(func).split(".")[1]
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        there = [t for t in tensors if isinstance(t, DeviceTensor)]
        asked = kwargs.get("device")
        target = None if asked is None else torch.device(asked).type
        out_there = bool(there) if target is None else target == DEVICE.type
        apart = [t for t in tensors if not isinstance(t, DeviceTensor) and t.dim()]
        if there and target is None and name not in _MIXES and apart:
            raise RuntimeError(f"Expected all tensors to be on the same device ({name} at {self.where()})")
        if name in ("index", "index_put_", "_index_put_impl_") and there:
            if not isinstance(args[0], DeviceTensor):
                raise RuntimeError(f"indices are on the device and the tensor is not ({name} at {self.where()})")
            some = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor)]
            if any(not isinstance(t, DeviceTensor) for t in some):
                self.uploads[f"index from the host, {self.where()}"] += 1
            if any(t.dtype == torch.bool for t in some):
                self.waits[f"bool index, {self.where()}"] += 1
        if name == "copy_" and len(tensors) == 2 and len(there) == 1:
            (self.uploads if isinstance(tensors[0], DeviceTensor) else self.waits)[f"copy_, {self.where()}"] += 1
        if self._captures and (there or out_there) and (name in _MAKES or name in _READS):
            raise RuntimeError(f"{name} within a capture at {self.where()}")
        kwargs = kwargs if target is None else {**kwargs, "device": _CPU}
        inner = tree_map(lambda a: a.memory if isinstance(a, DeviceTensor) else a, (args, kwargs))
        with _disable_current_modes():
            out = func(*inner[0], **inner[1])
        if name == "_to_copy" and target is not None and out_there != bool(there):
            (self.uploads if out_there else self.waits)[f"to, {self.where()}"] += 1
        if there and name in _READS:
            self.waits[f"{name}, {self.where()}"] += 1
            if name in ("_local_scalar_dense", "equal", "is_nonzero"):
                return out
        if (there or out_there) and name not in _NO_KERNEL:
            self.kernels[name] += 1
        if not out_there:
            return out
        first = args[0] if args and isinstance(args[0], DeviceTensor) else None
        if first is not None and name.endswith("_") and not name.endswith("__") and isinstance(out, Tensor):
            return first
        known = {id(t.memory): t for t in there}
        return tree_map(lambda o: known.get(id(o)) or DeviceTensor(o) if isinstance(o, Tensor) else o, out)

    def where(self) -> str:
        """The two innermost places of the code that is looked at."""
        frames = [f for f in traceback.extract_stack() if self.within in f.filename and "pretend" not in f.filename]
        return (
            " < ".join(f"{f.filename.split(self.within + '/')[-1]}:{f.lineno}" for f in frames[:-3:-1]) or "elsewhere"
        )


class _Made(TorchFunctionMode):
    """torch.tensor and its like make a tensor on the host and move it, which is what they do on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(device)
        if func is Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            kwargs.setdefault("dtype", args[0].dtype)
            return torch.tensor(*args[1:], **kwargs).to(DEVICE)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(
            args[0], DeviceTensor
        ):  # lists become tensors
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            at = tuple(torch.tensor(i) if isinstance(i, list) else i for i in at)
            return func(args[0], at if isinstance(args[1], tuple) else at[0], *args[2:])
        if func is Tensor.tolist and isinstance(args[0], DeviceTensor):
            mode = Pretend.now
            assert mode is not None
            mode.waits[f"tolist, {mode.where()}"] += 1
            return args[0].memory.tolist()
        return func(*args, **kwargs)
