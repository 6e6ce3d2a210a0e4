"""Models whose memory of earlier tokens cannot be kept node by node: their own forward reads the whole text again.

The definition of a node's logits is the model's own forward over the node's path, alone. This is right for every model, and
slow: the cost of a token grows with the text. Only the tokens are kept between steps.

Most models attend to the past only. Then one forward over the path of a leaf gives the logits of all its ancestors, so a
draft costs about what one token costs. The path is filled up to a length that the position of a node decides, and that
alone. So all shapes, and with them all bits, depend on the path only.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from outrider.models.attention import write
from outrider.models.hf.hooks import UnsupportedModel
from outrider.models.nodes import Nodes

_BLOCK = 64  # positions; a path is filled up to a multiple of them
_COPIES = 3  # of the scores of one layer's attention, in memory at a time
_PROBE = _BLOCK + 20  # tokens; no multiple of a block


class Reading(NamedTuple):
    """One forward of the model. row: of the batch. inputs: its arguments. at: new node -> the row of the output that answers."""

    row: int
    inputs: dict[str, Any]
    at: dict[int, int]


class WholeText:
    """Which forwards of a model answer for the nodes of a step.

    causal: the logits of a token do not depend on later ones, which a test of one text has shown.
    """

    def __init__(self, model: PreTrainedModel, vocab_size: int, most: int, tolerance: float) -> None:
        """most: tokens of the longest text. tolerance: how far logits may be apart by rounding, relative to the largest. The
        model must have its own attention now. Raises UnsupportedModel for an encoder, and what the model raises."""
        self._model, self._most = model, most
        parameters = inspect.signature(model.forward).parameters
        self._options = {name: False for name in ("use_cache", "use_mems") if name in parameters}
        own, usual = (getattr(kind, "prepare_inputs_for_generation", None) for kind in (type(model), GenerationMixin))
        self._prepares = own is not None and own is not usual
        self.causal = True
        self.causal = self._is_causal(vocab_size, tolerance)
        if not self.causal and getattr(model.config, "is_decoder", True) is False:
            raise UnsupportedModel(
                f"{type(model).__name__} attends both ways by itself, as an encoder; if its weights are those of a decoder, set "
                "is_decoder=True in its configuration"
            )

    def readings(self, nodes: Nodes, wanted: list[list[int]]) -> Iterator[Reading]:
        """The forwards that answer for the wanted new nodes of each row. Writes the tokens to the scratch."""
        nothing = nodes.tokens.new_empty(len(nodes.slots), 0, nodes.count, 0)
        kept, _ = write(nodes, 0, nodes.tokens[:, None, :, None], nothing)
        for b, (slot, start, parents) in enumerate(zip(nodes.slots, nodes.lengths, nodes.parent_lists, strict=True)):
            left = {nodes.held + n for n in wanted[b]}
            for node in sorted(left, reverse=True):  # children first: their forward answers for their ancestors
                if node not in left:
                    continue
                path = _path(parents, node)
                text = torch.cat([kept[slot, 0, :start, 0], kept[slot, 0, start + torch.tensor(path), 0]])
                inputs, length = self._inputs(text), self._length(len(text))
                at = {n: start + i for i, n in enumerate(path) if n in left and self._length(start + i + 1) == length}
                at = at if self.causal else {node: -1}
                left -= at.keys()
                yield Reading(b, inputs, {n - nodes.held: row for n, row in at.items()})

    def after(self, text: list[int]) -> Tensor:
        """float32 [vocab]: the definition, what follows a text."""
        return self._model(**self._as_generate(torch.tensor([text], device=self._model.device))).logits[0, -1].float()

    def _length(self, count: int) -> int:
        """Tokens that a forward reads to answer for the last of so many."""
        return max(count, min(-(-count // _BLOCK) * _BLOCK, self._most)) if self.causal else count

    def _inputs(self, text: Tensor) -> dict[str, Any]:
        if not self.causal:
            return self._as_generate(text[None])
        filler = text[-1:].expand(self._length(len(text)) - len(text))
        return {"input_ids": torch.cat([text, filler])[None], **self._options}

    def _as_generate(self, ids: Tensor) -> dict[str, Any]:
        """What `generate` gives the model when there is no cache."""
        model: Any = self._model
        made = model.prepare_inputs_for_generation(ids) if self._prepares else {"input_ids": ids}
        return {name: value for name, value in made.items() if value is not None} | self._options

    def _is_causal(self, vocab_size: int, tolerance: float) -> bool:
        """Whether the rows of one forward have the same bits for other tokens behind them, and are what follows each text."""
        draw = torch.Generator().manual_seed(0)
        count, length = min(_PROBE, self._most - 1), self._length(min(_PROBE, self._most - 1))
        padding = getattr(self._model.config.get_text_config(), "pad_token_id", None)
        tokens = [n for n in torch.randint(vocab_size, (3 * length,), generator=draw).tolist() if n != padding]
        text, one, other = tokens[:count], tokens[count:length], tokens[length : 2 * length - count]
        read = [torch.tensor([text + rest], device=self._model.device) for rest in (one, other)]
        first, second = (self._model(input_ids=ids, **self._options).logits[0, :count].float() for ids in read)
        if len(first) != count or not torch.equal(first, second):
            return False
        most = tolerance * first.abs().max()
        return all(bool((self.after(text[: n + 1]) - first[n]).abs().max() <= most) for n in (0, 1, 8, count - 1))


def longest(model: PreTrainedModel, length: int, free: int) -> int:
    """Tokens of the longest text whose forward takes at most half of the free memory. free: bytes; 0 if unknown."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None) or 1
    if not free:
        return length
    return min(length, max(_BLOCK, int((free / 2 / (4 * heads * _COPIES)) ** 0.5) // _BLOCK * _BLOCK))


def _path(parents: list[int], node: int) -> list[int]:
    """From the root to the node."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]
