"""The child process that compiles grammars. xgrammar compiles in native code that nothing else can stop: a few letters of a
pattern keep it busy for hours.

The child needs the compiler of xgrammar only. Without torch it starts in less than a second and takes 50 MB.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from time import thread_time
from types import ModuleType
from typing import Any, cast

import numpy as np

from outrider.core.child import Child

MAX_COMPILED = 64 << 20  # bytes of one compiled grammar
# The masks of one text may take so many seconds, and so many more for each. A usual mask takes a fraction of a millisecond; a
# grammar that can be read in many ways may take seconds, and all texts wait for it.
MASK_SECONDS, MASK_SECONDS_EACH = 1.0, 0.02
_FOLLOWED = 24  # tokens that a new grammar is tried with


def compiler(info: str) -> Child:
    """A child that takes [method of xgrammar's compiler, arguments] and gives what `CompiledGrammar.serialize_json` writes.

    info: the tokenizer, as `TokenizerInfo.serialize_json` writes it.
    """
    return Child(__name__, info, "to compile", "make it smaller")


def prepare(info: str) -> Callable[[Any], Any]:
    """What the child does with a question; see `compiler`."""
    xgrammar = compiler_alone()
    tokens = xgrammar.tokenizer_info.TokenizerInfo.deserialize_json(info)
    made = xgrammar.compiler.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)

    def compiled(question: Any) -> str:
        method, arguments = question
        grammar = getattr(made, method)(*arguments)
        if grammar.memory_size_bytes > MAX_COMPILED:
            raise ValueError("it is too large once compiled")
        # the class of matchers needs torch, and what it wraps does not
        matcher = xgrammar.base._core.GrammarMatcher(grammar._handle, None, False, -1, None)
        follow(matcher, tokens.vocab_size, tokens.stop_token_ids)
        return grammar.serialize_json()

    return compiled


def follow(matcher: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
    """Write a text that a grammar allows. Raises ValueError if there is none, and if the masks of the text take too long.

    matcher: what xgrammar's class wraps, at the beginning of a text.
    """
    bits, text, started = np.zeros((1, (vocab_size + 31) // 32), np.int32), list[int](), thread_time()
    while len(text) < _FOLLOWED and not matcher.is_terminated():
        matcher.fill_next_token_bitmask(bits, 0, False)
        if thread_time() - started > MASK_SECONDS + MASK_SECONDS_EACH * (len(text) + 1):
            raise ValueError("it can be read in too many ways; write it without nested repeats")
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:vocab_size])
        if not len(allowed):
            break
        text.append(int(allowed[len(allowed) // 2]))
        if text[-1] in end_ids:
            break
        matcher.accept_token(text[-1], False)
    if not text:
        raise ValueError("no text fits, because it refers to itself without an end")


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
