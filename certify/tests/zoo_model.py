"""The engines of the zoo over a language model, with its logits in place of the table and its draft model as the drafter."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from broken import ToyEngine
from zoo import Fault

from outrider.cli.options import own_draft
from outrider.models.load import Loaded, load
from outrider.models.nodes import Nodes
from outrider_certify.prompts import read_prompts
from outrider_certify.subject import Subject

_ROWS = 24_000  # logits that are kept: all plain texts of a round, which every engine writes again
_LONGEST = 512  # tokens of a text
_PROMPT = 16  # tokens, so that texts end before the window of the fault "positions end at the window"


class Rows:
    """The logits of a model after a text, remembered. A text that goes on from the last one costs its new tokens."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self._known = loaded, OrderedDict[tuple[int, ...], np.ndarray]()
        self._cache, self._read = loaded.model.new_cache(1, _LONGEST), list[int]()

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> None:
        """Compute the logits after each token that the last text does not have."""
        if tuple(tokens) in self._known:
            return
        same = next((i for i, (a, b) in enumerate(zip(tokens, self._read, strict=False)) if a != b), len(self._read))
        same = self._cache.keep(0, min(same, len(tokens) - 1))
        rows = self.loaded.model.forward(Nodes(np.array([tokens[same:]]), self._cache, [0])).logits[0]
        self._cache.commit([0], [range(len(tokens) - same)])
        self._read = list(tokens)
        for at, row in enumerate(rows.float().numpy(), same + 1):
            if (text := tuple(tokens[:at])) not in self._known:
                self._known[text] = row.copy()  # not a part of all rows, which it would keep
        while len(self._known) > _ROWS:
            self._known.popitem(last=False)

    def after(self, tokens: list[int]) -> np.ndarray:
        self.read(tokens)
        return self._known[tuple(tokens)].astype(np.float64)


class ModelEngine(ToyEngine):
    """A wrong position is a text without its first tokens: the logits are those of another place."""

    name = "a small engine over a model"

    def __init__(self, target: Rows, draft: Rows, fault: str = "", rule: str = "rejection", **given: Any) -> None:
        super().__init__(fault, rule, **given)
        self.vocab_size, self.end_ids = target.loaded.model.vocab_size, tuple(target.loaded.end_ids)
        self.table, self.wrong = target, draft  # type: ignore[assignment]
        self._tokenizer: Any = target.loaded.tokenizer
        texts = read_prompts("code", 6)
        self._prompts = [tuple(self._tokenizer(t)["input_ids"][:_PROMPT]) for t in texts]

    def prompts(self) -> list[tuple[int, ...]]:
        return self._prompts

    def piece(self, token: int) -> str:
        return self._tokenizer.decode([token])

    def prepare(self, table: Any, cache: list[int]) -> None:
        table.read(cache)

    def logits(self, table: Any, cache: list[int], position: int) -> np.ndarray:
        return table.after(cache[max(len(cache) - position, 0) :])

    def show(self, tokens: Any) -> str:
        return repr(self._tokenizer.decode(list(tokens)))


def engines(model: str) -> tuple[Callable[[str, Fault], Subject], dict[str, Callable[[int], Subject]]]:
    """What makes a faulty engine over a model, and right engines by name."""
    target, draft = Rows(load(model)), Rows(load(own_draft(model) or model))

    def faulty(name: str, fault: Fault) -> Subject:
        return ModelEngine(target, draft, name, fault.rule)

    def right(**given: Any) -> Callable[[int], Subject]:
        return lambda seed: ModelEngine(target, draft, **given)

    return faulty, {
        "match": right(rule="match"),
        "rejection": right(rule="rejection"),
        "block": right(rule="block"),
        "one draft token": right(rule="rejection", gamma=1),
        "seven draft tokens": right(rule="block", gamma=7),
        "row counts round differently": right(rule="rejection", rounding=1e-5),
    }
