"""Tries a head on known text when it is loaded. A head that was read the wrong way accepts nothing, and no other check sees it.

If almost nothing is right, the known misreadings are tried, and the one that mends it is named. Trainers and engines disagree
about each of them: docs/guides/heads.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.drafters.heads.checks import log
from outrider.drafters.heads.config import HeadConfig
from outrider.drafters.heads.eagle_model import EagleModel
from outrider.models.base import EMBEDDING, FINAL_NORM
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes

DEPTH = 3  # draft tokens after each position
POSITIONS = 96
ENOUGH = 0.3  # draft tokens right on average; heads that were trained for an hour on other text have more
CLEAR = 0.2  # by how much a misreading must be better, far more than chance over so many positions


@dataclass(frozen=True)
class DraftHits:
    """What a head gets right along a text. hits: share of positions at which the draft tokens up to that depth are all right."""

    hits: tuple[float, ...]

    @property
    def accepted(self) -> float:
        """Draft tokens that are right on average."""
        return sum(self.hits)


@dataclass(frozen=True)
class HeadReport:
    """found: as the head was read. better: the misreading that mends it, in words, and what it gives; None if none does."""

    found: DraftHits
    better: tuple[str, DraftHits] | None = None

    def __str__(self) -> str:
        said = f"{self.found.accepted:.2f} of {DEPTH} draft tokens are right along a known text"
        if self.better is not None:
            what, survival = self.better
            return f"{said}. With {what} it is {survival.accepted:.2f}: correct that in its config.json"
        if self.found.accepted < ENOUGH:
            return f"{said}, and no known misreading mends that; it was trained for another model, or for other text"
        return said


def examine(model: EagleModel, target: Loaded, text: Sequence[int], path: object) -> HeadReport:
    """Draft along a text, and warn if almost nothing is right. Takes one forward of the target.

    text: token ids, at least 8; the first hundred are read. path: names the head in the warning.
    """
    ids = [*text][: min(POSITIONS + DEPTH + 1, model.max_length, target.model.max_length)]
    readings = list(_readings(model, target.model.num_layers))
    taps = tuple(dict.fromkeys(t for _, reading in [("", model), *readings] for t in reading.taps))
    cache = target.model.new_cache(1, len(ids))
    out = target.model.forward(Nodes(torch.tensor([ids]), cache, [0]), taps=taps)
    assert out.features is not None
    columns = out.features[0].unflatten(-1, (len(taps), -1))
    right = out.logits[0].argmax(-1).tolist()

    def tried(reading: EagleModel) -> DraftHits:
        own = [taps.index(t) for t in reading.taps]
        return survival(reading, ids, columns[:, own].flatten(1), right)

    found = tried(model)
    if found.accepted >= ENOUGH:
        return HeadReport(found)
    others = [(what, tried(reading)) for what, reading in readings]
    best = max(others, key=lambda pair: pair[1].accepted, default=None)
    better = best if best is not None and best[1].accepted > found.accepted + CLEAR else None
    report = HeadReport(found, better)
    log.warning("%s: %s", path, report)
    return report


def survival(model: EagleModel, text: Sequence[int], features: Tensor, right: Sequence[int]) -> DraftHits:
    """Drafts after each position of a text, fed with the text's own tokens. All positions are branches of one tree.

    features: float [position, feature] of the text. right: the target's most likely token after each position.
    """
    count = len(text) - 1 - DEPTH
    cache = model.new_cache(1, len(text))
    g = torch.empty(0)
    alive = torch.ones(count, dtype=torch.bool)
    hits: list[float] = []
    parents = torch.arange(-1, count - 1)
    for depth in range(DEPTH):
        # level 0 is the text itself, a chain; each later level has one node below each node of the level before
        tokens = torch.tensor([list(text[1 + depth : 1 + depth + count])])
        if depth:
            parents = torch.cat([parents, torch.arange(count) + (depth - 1) * count])
        nodes = Nodes(tokens, cache, [0], parents[None])
        logits, g = model.forward(nodes, g=g) if depth else model.forward(nodes, features[None, :count])
        guess = logits[0].argmax(-1)
        guess = guess if model.subset is None else model.subset.ids[guess]
        alive &= guess.cpu() == torch.tensor(right[1 + depth : 1 + depth + count])
        hits.append(float(alive.float().mean()))
    return DraftHits(tuple(hits))


def _readings(model: EagleModel, num_layers: int) -> Iterator[tuple[str, EagleModel]]:
    """The known misreadings, in words, and the head read so."""
    config = model.config
    if config.eagle1:
        return

    def other(what: str, changed: HeadConfig) -> tuple[str, EagleModel]:
        return what, model.read_as(changed)

    for name in ("norm_output", "norm_before_residual"):
        changed = not getattr(config, name)
        yield other(f"{name} {str(changed).lower()}", replace(config, **{name: changed}))
    theta = float(config.rope_parameters["rope_theta"])
    for value in {10000.0, 500000.0, 1000000.0} - {theta}:
        yield other(
            f"rope_theta {value:.0f}", replace(config, rope_parameters={**config.rope_parameters, "rope_theta": value})
        )
    for step in (-1, 1):
        ids = [i + step for i in config.layer_ids]
        if all(0 <= i <= num_layers for i in ids):
            taps = tuple(EMBEDDING if i == 0 else i - 1 for i in ids)
            yield other(f"the layers before {ids} in place of {config.layer_ids}", replace(config, taps=taps))
    if config.taps[-1] == num_layers - 1:
        yield other("the last layer after the final norm", replace(config, taps=(*config.taps[:-1], FINAL_NORM)))
