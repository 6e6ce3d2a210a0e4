"""Finds and loads the shared library, and mirrors the structs and enumerations of src. Nothing here needs torch."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import IntEnum, IntFlag
from itertools import zip_longest
from pathlib import Path
from typing import Any

# By the names of src/abi.hpp.
Format = IntEnum(
    "Format", "FLOAT32 BFLOAT16 FLOAT16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4", start=0
)
CacheFormat = IntEnum("CacheFormat", "CACHE_FLOAT32 CACHE_BFLOAT16 CACHE_INT8", start=0)
Finish = IntEnum("Finish", "STORE ADD SWIGLU GEGLU CLAMPED", start=0)
Recurrence = IntEnum("Recurrence", "DELTA_RULE SELECTIVE", start=0)
# By the names of src/program.hpp, which says what each means.
OpKind = IntEnum(
    "OpKind",
    "OP_EMBED OP_NORM OP_LINEAR OP_HEADS OP_ROPE OP_STORE OP_ATTEND OP_ROUTE OP_EXPERTS OP_GATE OP_MAP OP_CONV OP_SCAN "
    "OP_ROWS OP_GIVEN OP_HEAD",
    start=0,
)
OpFlag = IntFlag("OpFlag", "OP_ADD OP_PER_GROUP OP_INTERLEAVED OP_NORMALISED OP_TAP OP_FRESH OP_FED OP_SAME")
Norm = IntEnum("Norm", "RMS_NORM LAYER_NORM", start=0)
Activation = IntEnum("Activation", "IDENTITY SILU GELU GELU_TANH RELU RELU2 SIGMOID SWISH", start=0)
Map = IntEnum("Map", "LINEAR_MAP SOFTPLUS EXP EXP_NEGATIVE SIGMOID_MAP SOFTCAP", start=0)
Router = IntEnum("Router", "SOFTMAX_TOP TOP_SOFTMAX SIGMOID_TOP", start=0)
ENUMERATIONS: dict[str, type[IntEnum] | type[IntFlag]] = {
    kind.__name__: kind
    for kind in (Format, CacheFormat, Finish, Recurrence, OpKind, OpFlag, Norm, Activation, Map, Router)
}


# The structs of src/abi.hpp by their names there, with the types and names of their fields.
_TYPES = {"p": c_void_p, "i": c_int32, "q": c_int64, "I": c_uint32, "Q": c_uint64, "f": c_float, "d": c_double}
_FIELDS = {
    "Rows": "p from; q row_bytes n",
    "Packed": "p data bias; q n k panel_bytes; i format panels; p parts; i count alternate; p unread; q unread_count",
    "Plan": "p index segment chain position slot parent",
    "AttentionJob": "p q k v out segment row length chain position slot parent index sinks; q segments heads kv_heads dim "
    "value_dim capacity ldq ldo window; f scale softcap; p begin; q chunk share; p task_segment task_first; i "
    "format; p parts; q chunks slice slices",
    "Op": "i kind flags; i3 in other out; i count; p w p q; i8 i; f6 f",
    "Angles": "p inv_freq factor; i half every factors",
    "Program": "p ops width angles head_ids; q count registers tables vocab",
    "ForwardJob": "p tokens parents rows lengths cache logits features taps; q batch held nodes capacity taps_count; i want "
    "cache_format; p given fed_back; i fused; p states",
    "DrawJob": "p path; q accepted token top_k; d top_p; Q seed; I stream step position; f temperature min_p; i by_host",
    "ChainJob": "p tokens features drafted; q count depth; p chances siblings; q width made; Q seed; i row length; I "
    "stream step position; f temperature error min_probability alive",
    "ChainsJob": "p chains cache; q count capacity; i cache_format",
    "ScanJob": "p records out states starts chains a through; q count heads keys width groups query key value step "
    "decay; f factor; i kind per_column",
    "RouteJob": "p logits out correction scale; q rows ldx ldo experts k groups kept; i kind normalised; f factor added",
    "ExpertsJob": "p w x routed out; q rows ldx ldr ldo experts k; i finish add; f factor limit slope plus",
    "Segment": "p tokens order; q count",
    "Segments": "p segments; q count",
    "LookupJob": "p unread corpora forced; q unread_count corpora_count forced_count depth width nodes; d least doubt; p "
    "tokens parents masses; q made match",
}  # fmt: skip


def _struct(name: str, fields: str) -> type[ctypes.Structure]:
    """fields: "TYPE NAME ...; TYPE NAME ...". A type is one of `_TYPES`, and a number after it makes it an array."""
    places = list[tuple[str, type]]()
    for part in fields.split("; "):
        code, *names = part.split()
        kind: Any = _TYPES[code[0]]
        places += [(each, kind * int(code[1:]) if code[1:] else kind) for each in names]
    return type(name, (ctypes.Structure,), {"_fields_": places})


STRUCTS = {name: _struct(name, fields) for name, fields in _FIELDS.items()}
RowsStruct = STRUCTS["Rows"]
PackedStruct = STRUCTS["Packed"]
PlanStruct = STRUCTS["Plan"]
AttentionStruct = STRUCTS["AttentionJob"]
OpStruct = STRUCTS["Op"]
AnglesStruct = STRUCTS["Angles"]
ProgramStruct = STRUCTS["Program"]
ForwardStruct = STRUCTS["ForwardJob"]
DrawStruct = STRUCTS["DrawJob"]
ChainStruct = STRUCTS["ChainJob"]
ChainsStruct = STRUCTS["ChainsJob"]
ScanStruct = STRUCTS["ScanJob"]
RouteStruct = STRUCTS["RouteJob"]
ExpertsStruct = STRUCTS["ExpertsJob"]
SegmentStruct = STRUCTS["Segment"]
SegmentsStruct = STRUCTS["Segments"]
LookupStruct = STRUCTS["LookupJob"]
_NOISE = (c_uint64, c_uint32, c_uint32, c_uint32)  # seed, stream, step, position
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "layout": (c_char_p, ()),
    "isas": (c_char_p, ()),
    "isa": (c_char_p, ()),
    "select_isa": (c_int32, (c_char_p,)),
    "set_threads": (None, (c_int32,)),
    "set_cores": (None, (POINTER(c_int32), c_int64)),
    "threads": (c_int32, ()),
    "advise_huge": (None, (c_void_p, c_int64)),
    "panel_bytes": (c_int64, (c_int32, c_int64)),
    "pack": (None, (POINTER(PackedStruct), c_void_p, c_int32, c_int64, c_int64, c_int64, c_int64, c_int32)),
    "pack_rows": (None, (POINTER(PackedStruct), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32)),
    "complete": (None, (POINTER(PackedStruct),)),
    "linear": (None, (POINTER(PackedStruct), c_void_p, c_void_p, c_int64, c_int64, c_int64)),
    "unpack_column": (None, (POINTER(PackedStruct), c_int64, c_void_p)),
    "plan": (c_int64, (c_int64, c_int64, c_int64, c_void_p, c_void_p, POINTER(PlanStruct))),
    "attention": (None, (POINTER(AttentionStruct),)),
    "pack_vectors": (None, (c_int32, c_void_p, c_void_p, c_int64, c_int64)),
    "program_new": (c_void_p, (POINTER(ProgramStruct),)),
    "program_free": (None, (c_void_p,)),
    "forward": (c_int64, (c_void_p, POINTER(ForwardStruct))),
    "step": (c_int64, (c_void_p, POINTER(ForwardStruct), POINTER(DrawStruct))),
    "truncate": (None, (c_void_p, c_int64, c_int64, c_double, c_float)),
    "draft_chains": (c_int64, (c_void_p, POINTER(ChainsStruct))),
    "scan": (None, (POINTER(ScanStruct),)),
    "states_new": (c_void_p, (c_void_p, c_int64, c_int64, c_int64)),
    "states_free": (None, (c_void_p,)),
    "states_commit": (c_int64, (c_void_p, c_int64, c_void_p, c_int64)),
    "states_reset": (None, (c_void_p, c_int64)),
    "states_read": (None, (c_void_p, c_int64, c_void_p)),
    "states_write": (None, (c_void_p, c_int64, c_void_p)),
    "states_size": (c_int64, (c_void_p,)),
    "states_made": (c_int64, (c_void_p,)),
    "route": (None, (POINTER(RouteStruct),)),
    "experts": (None, (POINTER(ExpertsStruct),)),
    "words": (None, (*_NOISE, c_int64, c_void_p)),
    "gumbel": (None, (*_NOISE, c_int64, c_void_p)),
    "gumbel_at": (None, (*_NOISE, c_void_p, c_int64, c_void_p)),
    "argmax": (c_int64, (c_void_p, c_int64)),
    "argmax_gumbel": (c_int64, (c_void_p, c_void_p, c_int64, c_float, *_NOISE)),
    "softmax": (None, (c_int32, c_void_p, c_void_p, c_int64, c_int64)),
    "log": (None, (c_void_p, c_void_p, c_int64)),
    "total": (None, (c_void_p, c_void_p, c_int64, c_int64)),
    "sine_cosine": (None, (c_void_p, c_void_p, c_void_p, c_int64)),
    "elementwise": (None, (c_int32, c_void_p, c_void_p, c_int64)),
    "lookup_new": (c_void_p, ()),
    "lookup_free": (None, (c_void_p,)),
    "lookup": (None, (c_void_p, POINTER(LookupStruct))),
}
# These take less time than to let other threads have Python and to get it back.
_BRIEF = {"lookup"}


class Library:
    """The loaded functions, as attributes without the `outrider_` prefix."""

    def __init__(self, path: Path) -> None:
        self.path, self._dll, held = path, ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(held if name in _BRIEF else self._dll, f"outrider_{name}")
            function.restype, function.argtypes = result, list(arguments)
            setattr(self, name, function)

    def __getattr__(self, name: str) -> ctypes._NamedFuncPointer:  # pyright: ignore[reportPrivateUsage]
        raise AttributeError(f"the native library has no function {name!r}")


def layout() -> str:
    """What the library must print of itself, a line each: the enumerations, and the structs as ctypes lays them out.

    Of an enumeration name:0:end, and name:value:0 of each value; of a struct name:0:bytes, and name:offset:bytes of each field.
    """
    lines = list[str]()
    for name, kind in ENUMERATIONS.items():
        end = len(kind) if issubclass(kind, IntEnum) else 1 << len(kind)
        lines.append(" ".join([f"{name}:0:{end}", *(f"{value.name}:{value.value}:0" for value in kind)]))
    for name, struct in STRUCTS.items():
        places = [(field[0], getattr(struct, field[0])) for field in struct._fields_]  # pyright: ignore[reportPrivateUsage]
        lines.append(" ".join([f"{name}:0:{ctypes.sizeof(struct)}", *(f"{n}:{p.offset}:{p.size}" for n, p in places)]))
    return "\n".join(lines)


def load() -> tuple[Library | None, str | None]:
    """The library, or None and the reason."""
    file = Path(__file__).with_name("_kernels" + {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so"))
    if not file.exists():
        return None, "the package was installed without a C++ compiler; install g++ or clang and reinstall outrider"
    try:
        library = Library(file)
    except (OSError, AttributeError) as error:
        return None, f"{file.name} cannot be loaded ({error}); reinstall outrider on this machine"
    if (theirs := library.layout().decode()) != layout():
        lines = zip_longest(theirs.splitlines(), layout().splitlines(), fillvalue="end")
        part = next(b.split(":")[0] for a, b in lines if a != b)
        return None, (
            f"{file.name} is from another version of outrider (its {part} differs); rebuild with "
            "`python setup.py build_ext --inplace`"
        )
    isa = os.environ.get("OUTRIDER_ISA")  # for tests: a slower variant than the processor's best
    if isa:
        names = library.isas().decode().split()
        if isa not in names:
            return None, f"OUTRIDER_ISA must be one of {', '.join(names)}, got {isa!r}"
        if not library.select_isa(isa.encode()):
            return None, f"OUTRIDER_ISA={isa} was asked for and this processor does not have it"
    return library, None
