"""llama.cpp's convert_hf_to_gguf.py, for models whose tokenizer it does not know.

    python -m benchmarks.peers.convert LLAMA_CPP_TREE MODEL_FOLDER --outtype f32 --outfile OUT

The script knows a tokenizer's way of splitting text by a hash and refuses others. Prompts of the benchmark are token ids,
so the split is never used; "gpt-2" is written for a tokenizer it does not know. Nothing else is changed.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    tree = Path(sys.argv[1])
    sys.path[:0] = [str(tree), str(tree / "gguf-py")]
    from conversion.base import TextModel  # pyright: ignore[reportMissingImports]

    base = TextModel.get_vocab_base_pre

    def named(self: Any, tokenizer: Any) -> str:
        try:
            return base(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    def absent(self: Any, *args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError("tokenizer.model")

    TextModel.get_vocab_base_pre = named
    if importlib.util.find_spec("sentencepiece") is None:  # tried first, imported even when there is no such file
        TextModel._set_vocab_sentencepiece = absent
    sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
    runpy.run_path(str(tree / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
