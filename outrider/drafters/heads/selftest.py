"""Tries a head on known text when it is loaded. A head that was read the wrong way accepts nothing, and no other check sees it.

If almost nothing is right, the known misreadings are tried, and the one that mends it is named. A head that names this model
as its own has none. Trainers and engines disagree about each of them: docs/guides/heads.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from outrider.core.files import read_settings
from outrider.core.types import Array
from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.config import tap_of
from outrider.drafters.heads.files import TARGET_DIGEST, head_of, target_digest
from outrider.drafters.heads.lattice import Lattice
from outrider.drafters.heads.reading import Config, HeadWeights, log
from outrider.drafters.model.grower import Levels, TreeDrafter
from outrider.models.base import FINAL_NORM, LanguageModel
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes

SAMPLE = '''def read_lines(path):
    """Return the lines of a text file, without those that are empty or start with a hash sign."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if line and not line.startswith("#"):
                lines.append(line)
    return lines


The committee met on Tuesday to discuss the report. It was agreed that the first part should be sent to the members before
the end of the month, and that the second part would be read again at the next meeting.
'''
DEPTH = 3  # draft tokens after each position
POSITIONS = 96
SOME = 24  # positions that are tried with a head whose drafts are a forward each
ENOUGH = 0.3  # draft tokens right on average; heads that were trained for an hour on other text have more
CLEAR = 0.2  # by how much a misreading must be better, far more than chance over so many positions


DraftHits = tuple[float, ...]
"""What a head gets right along a text: the share of positions at which the draft tokens up to each depth are all right. Their
sum is the number of draft tokens that are right on average."""
_Model = TypeVar("_Model")
_Source = TypeVar("_Source", bound=Levels)
# in words, the taps, and the drafter read so
Misreading = tuple[str, tuple[int, ...], Callable[[], TreeDrafter[_Source]]]
Hits = Callable[[TreeDrafter[_Source], Sequence[int], Array, Sequence[int]], DraftHits]


@dataclass(frozen=True)
class HeadReport:
    """What a head gets right."""

    hits: DraftHits  # as the head was read
    # the misreading that mends it, in words, and what it gives; None if none does
    better: tuple[str, DraftHits] | None = None
    same: bool | None = None  # whether its folder names this model, or another; None if it says nothing

    def __str__(self) -> str:
        said = f"{sum(self.hits):.2f} of {DEPTH} draft tokens are right along a known text"
        if self.better is not None:
            what, mended = self.better
            return f"{said}. With {what} it is {sum(mended):.2f}: correct that in its config.json"
        if sum(self.hits) >= ENOUGH:
            return said
        if self.same:
            return f"{said}; it was trained for this model, but is right rarely on this text. Train it longer, or on such text"
        if self.same is False:
            return f"{said}; it was trained for another model, or another file of this one: {TARGET_DIGEST} differs"
        return f"{said}, and no known misreading mends that; it was trained for another model, or for other text"


def head_drafter(
    setup: DrafterSetup,
    read: Callable[[Any, Loaded], HeadWeights[Config]],
    model: Callable[[HeadWeights[Config], LanguageModel, int, str], _Model],
    levels: Callable[[HeadWeights[Config], _Model, int, int], _Source],
    flags: Mapping[str, str],
    hits: Hits[_Source],
) -> TreeDrafter[_Source]:
    """Read the head of a configuration, make its drafter and try it. flags: see `misread`. hits: see `examine`.

    The package's own head is not tried: it belongs to this content of the model, and a test has tried it."""
    target, path = setup.target, head_of(setup.config.model, setup.target.name)
    head = read(path, target)

    def made(config: Config) -> TreeDrafter[_Source]:
        read_so = replace(head, config=config)
        runs = model(read_so, target.model, setup.max_length, setup.config.quantization)
        return TreeDrafter(levels(read_so, runs, setup.num_slots, setup.max_length))

    drafter = made(head.config)
    if setup.config.model is None:
        return drafter
    wrong = misread(head.config, target.model.num_layers, flags)
    others = [(what, config.taps, partial(made, config)) for what, config in wrong]
    examine(drafter, others, hits, target, min(setup.max_length, head.config.max_position_embeddings), path)
    return drafter


def examine(
    own: TreeDrafter[_Source],
    others: Sequence[Misreading[_Source]],
    hits: Hits[_Source],
    target: Loaded,
    longest: int,
    path: str | Path,
) -> HeadReport | None:
    """Draft along a sample of text, and warn if almost nothing is right, with what mends it. Takes one forward of the target.

    Args:
        own: The head as it was read.
        others: Known misreadings, which are tried only if almost nothing is right.
        hits: (drafter, text, features, right) -> what it gets right.
        target: Of the head.
        longest: Tokens of the longest text that the head knows.
        path: Names the head in the warning.

    Returns None for a target without a tokenizer.
    """
    if target.tokenizer is None:
        return None
    ids = [*target.tokenizer(SAMPLE)["input_ids"]][: min(POSITIONS + DEPTH + 1, longest, target.model.max_length)]
    taps = tuple(dict.fromkeys(t for some in (own.taps, *(taps for _, taps, _ in others)) for t in some))
    cache = target.model.new_cache(1, len(ids))
    out = target.model.forward(Nodes(np.array([ids]), cache, [0]), taps=taps)
    assert out.features is not None
    columns = out.features[0].reshape(len(ids), len(taps), -1)
    right = out.logits[0].argmax(-1).tolist()

    def tried(drafter: TreeDrafter[_Source], read: tuple[int, ...]) -> DraftHits:
        return hits(drafter, ids, columns[:, [taps.index(t) for t in read]].reshape(len(ids), -1), right)

    as_read = tried(own, own.taps)
    if sum(as_read) >= ENOUGH:
        return HeadReport(as_read)
    named = read_settings(Path(path) / "config.json").get(TARGET_DIGEST) if Path(path).is_dir() else None
    same = named == target_digest(target) if named else None
    mends = [(what, tried(make(), read)) for what, read, make in others if not same]
    best = max(mends, key=lambda pair: sum(pair[1]), default=None)
    report = HeadReport(as_read, best if best is not None and sum(best[1]) > sum(as_read) + CLEAR else None, same)
    log.warning("%s: %s", path, report)
    return report


def parallel_survival(
    drafter: TreeDrafter[Lattice], text: Sequence[int], features: Array, right: Sequence[int]
) -> DraftHits:
    """What a head of several positions gets right at some positions of a text. Slot 0 of the drafter must be free.

    features: float [position, feature] of the text. right: the target's most likely token after each position.
    """
    count = len(text) - 1 - DEPTH
    some = range(0, count, max(1, count // SOME))
    hits, read = [0] * DEPTH, 0
    for t in some:
        start = [*text[: t + 2]]
        drafter.start(0, start, read, features[read : t + 1])
        read = t + 1
        for depth, token in enumerate(drafter.levels.best(0, start, text[t + 2 : t + 1 + DEPTH])):
            if token != right[t + 1 + depth]:
                break
            hits[depth] += 1
    drafter.release(0)
    return tuple(n / len(some) for n in hits)


def misread(config: Config, num_layers: int, flags: Mapping[str, str]) -> Iterator[tuple[str, Config]]:
    """The known misreadings of a head, in words and as settings. flags: field -> its name in config.json."""
    if FINAL_NORM in config.taps:  # EAGLE-1
        return
    for name, said in flags.items():
        changed = not getattr(config, name)
        yield f"{said} {str(changed).lower()}", replace(config, **{name: changed})
    theta = float(config.rope_parameters["rope_theta"])
    for value in {10000.0, 500000.0, 1000000.0} - {theta}:
        rope = {**config.rope_parameters, "rope_theta": value}
        yield f"rope_theta {value:.0f}", replace(config, rope_parameters=rope)
    read = config.layer_ids
    for step in (-1, 1):
        ids = [i + step for i in read]
        if all(0 <= i <= num_layers for i in ids):
            yield f"the layers before {ids} in place of {read}", replace(config, taps=tuple(map(tap_of, ids)))
    if config.taps[-1] == num_layers - 1:
        yield "the last layer after the final norm", replace(config, taps=(*config.taps[:-1], FINAL_NORM))
