"""Asks SGLang's own parser and its checks of speculation. Runs in SGLang's environment: stdin and stdout are JSON.

stdin: name -> words after `python -m sglang.launch_server`. stdout: name -> what SGLang made of it, or {"refused": why}.
The wheel alone is enough, without its packages for GPUs: those that only need to be there are empty modules here.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.metadata
import importlib.util
import json
import logging
import os
import sys
import types
from importlib.machinery import ModuleSpec
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
logging.disable(logging.WARNING)
out, sys.stdout = sys.stdout, sys.stderr
ABSENT = ("gguf", "torchvision", "flash_attn", "soundfile", "sgl_kernel", "flashinfer", "decord", "IPython", "torchao")


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes an empty module of a package that is not installed, and of what is below it."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in absent else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module: types.ModuleType = mock.MagicMock(__spec__=spec, __path__=[], __version__="0")
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


absent = [name for name in ABSENT if importlib.util.find_spec(name) is None]
sys.meta_path.insert(0, Empty())

from sglang.srt.server_args import (  # noqa: E402  # pyright: ignore[reportMissingImports]
    ServerArgs,
    prepare_server_args,
)

FIELDS = (
    "algorithm",
    "num_steps",
    "eagle_topk",
    "num_draft_tokens",
    "draft_model_path",
    "adaptive",
    "ngram_max_trie_depth",
)


def asked(words: list[str]) -> dict[str, object]:
    found = prepare_server_args([*words, "--device", "cpu"])
    found.resolve_once()
    found.check_server_args()
    return {name: getattr(found, f"speculative_{name}", None) for name in FIELDS}


parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
answers: dict[str, object] = {
    "version": importlib.metadata.version("sglang"),
    "options": sorted(word for action in parser._actions for word in action.option_strings if "speculative" in word),
}
for name, words in json.load(sys.stdin).items():
    try:
        answers[name] = asked(words)
    except BaseException as error:
        answers[name] = {"refused": f"{type(error).__name__}: {error}"[:600]}
json.dump(answers, out, default=str)
