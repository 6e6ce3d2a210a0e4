"""The child process that compiles grammars. xgrammar compiles in native code that nothing else can stop: a few letters of a
pattern keep it busy for hours.

The child needs the compiler of xgrammar only. Without torch it starts in less than a second and takes 50 MB.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from outrider.core.child import Child, answer

MAX_COMPILED = 64 << 20  # bytes of one compiled grammar


def compiler(info: str) -> Child:
    """A child that takes [method of xgrammar's compiler, arguments] and gives what `CompiledGrammar.serialize_json` writes.

    info: the tokenizer, as `TokenizerInfo.serialize_json` writes it.
    """
    return Child(__name__, info, "to compile", "make it smaller")


def serve() -> None:
    """What the child runs."""
    answer(_prepare)


def _prepare(info: str) -> Callable[[Any], Any]:
    xgrammar = compiler_alone()
    tokens = xgrammar.tokenizer_info.TokenizerInfo.deserialize_json(info)
    made = xgrammar.compiler.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)

    def compiled(question: Any) -> str:
        method, arguments = question
        grammar = getattr(made, method)(*arguments)
        if grammar.memory_size_bytes > MAX_COMPILED:
            raise ValueError("it is too large once compiled")
        return grammar.serialize_json()

    return compiled


def compiler_alone() -> Any:
    """xgrammar without the parts that import torch and transformers. The whole package, should its parts ever move."""
    found = importlib.util.find_spec("xgrammar")
    assert found is not None
    bare, names = ModuleType("xgrammar"), ModuleType("transformers")
    bare.__path__ = list(found.submodule_search_locations or ())
    names.PreTrainedTokenizerBase = names.PreTrainedTokenizerFast = object  # pyright: ignore[reportAttributeAccessIssue]
    stand_ins = {
        "torch": cast(ModuleType, None),
        "transformers": names,
        "xgrammar": bare,
    }  # None: it cannot be imported
    sys.modules.update(stand_ins)
    try:
        for part in ("load_binding", "tokenizer_info", "compiler"):
            importlib.import_module(f"xgrammar.{part}")
        return bare
    except (ImportError, AttributeError):
        for name in [n for n in sys.modules if n in stand_ins or n.startswith("xgrammar.")]:
            del sys.modules[name]
        return importlib.import_module("xgrammar")
