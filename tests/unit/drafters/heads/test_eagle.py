"""The EAGLE drafter: its numbers are those of the plain-torch head, in chains, trees and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from heads import EAGLE3, GOLDEN, PROMPT, TorchPairs, causal, features, small_target

from outrider import SamplingParams
from outrider.core.types import Array, Budget
from outrider.drafters.heads.eagle import EagleConfig, Pairs, eagle_model, eagle_shapes, read_eagle
from outrider.drafters.heads.features import PairModel
from outrider.drafters.heads.layers import precision_of
from outrider.drafters.heads.reading import HeadWeights
from outrider.drafters.model.grower import Growth, Level, TreeDrafter
from outrider.kernels import cpu as native
from outrider.models.base import FINAL_NORM
from outrider.models.nodes import Nodes
from outrider.testing.contract import GREEDY, context
from outrider_lab.heads.modules import Eagle, config_for

TARGET = small_target()
TABLE = torch.from_numpy(TARGET.model.embedding_rows(np.arange(128)))


def eagle1() -> HeadWeights[EagleConfig]:
    torch.manual_seed(3)
    config = config_for(EagleConfig, TARGET.config, eagle1=True, taps=(FINAL_NORM,), fc_bias=True)
    shapes = eagle_shapes(config) | {"lm_head.weight": (128, 32)}
    tensors = {
        n: (torch.randn(shape) * 0.2 if len(shape) == 2 else torch.rand(shape) + 0.5).numpy()
        for n, shape in shapes.items()
    }
    return HeadWeights(config, tensors, np.arange(128))


def weights(name: str) -> HeadWeights[EagleConfig]:
    return eagle1() if name == "eagle1" else read_eagle(GOLDEN / name, TARGET)


HEADS = (*EAGLE3, "eagle1")


def paired(name: str, max_length: int, kind: str, plain: bool) -> PairModel:
    head = weights(name)
    return TorchPairs(head, TABLE, max_length, kind) if plain else eagle_model(head, TARGET.model, max_length, kind)


def drafter(
    name: str = "eagle31", rows: int = 4, max_length: int = 256, plain: bool = False, **settings: Any
) -> TreeDrafter[Pairs]:
    model = paired(name, max_length, "none", plain)
    return TreeDrafter(Pairs(model, rows, max_length), **settings)


def fresh(made: TreeDrafter[Pairs], tokens: list[int], slot: int = 0) -> TreeDrafter[Pairs]:
    """A new drafter over the same weights that was told the whole text at once, and what was learned of their error."""
    new = TreeDrafter(Pairs(made.levels.model, made.levels.cache.num_slots, made.levels.cache.max_length))
    new.error.scale = made.error.scale
    new.start(slot, tokens, 0, features(TARGET, tokens[:-1], made.taps))
    return new


@torch.no_grad()
def chain_of(head: Eagle, tokens: list[int], read: Array, depth: int) -> list[int]:
    """The most likely chain, by the plain-torch head."""
    y, past = causal(head, torch.tensor([tokens[1:]]), head.fuse(torch.as_tensor(read)[None]))
    out: list[int] = []
    for _ in range(depth):
        out.append(int(head.token_ids[head.logits(y[0, -1]).argmax()]))
        y, past = causal(head, torch.tensor([out[-1:]]), head.feedback(y[:, -1:]), past)
    return out


def reference(name: str, tokens: list[int], depth: int = 5) -> list[int]:
    head = weights(name)
    return chain_of(Eagle.of(head, TABLE).eval(), tokens, features(TARGET, tokens[:-1], head.config.taps), depth)


def proposed(made: TreeDrafter[Pairs], tokens: list[int], depth: int = 5) -> list[int]:
    draft = made.propose(context([0], [tokens], [Budget(depth)], GREEDY))
    return [t for t, _ in draft.host[0][1:]]


@pytest.mark.parametrize("plain", [False, True], ids=["native", "torch"])
@pytest.mark.parametrize("name", HEADS)
def test_chains_are_those_of_the_plain_head(name: str, plain: bool) -> None:
    made = drafter(name, plain=plain)
    assert made.levels.has_draft_chains != plain
    for length in (2, 3, 17, 60):
        tokens = PROMPT[:length]
        assert proposed(fresh(made, tokens), tokens) == reference(name, tokens)


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", HEADS)
def test_the_native_step_agrees_with_torch(name: str, kind: str) -> None:
    """Prompts of different lengths, the last nodes, all nodes of two levels; in a batch, from features and from g."""
    made = [paired(name, 256, kind, plain) for plain in (False, True)]
    read = np.stack([features(TARGET, PROMPT[i : i + 9], made[0].taps) for i in (0, 20)])
    tokens = np.array([PROMPT[1:10], PROMPT[21:30]])
    parents = np.array([[*range(-1, 8)], [*range(-1, 4), -2, -2, -2, -2]])  # the second has 5 pairs
    level = np.array([[-1, 0, 0], [-1, 0, -2]])
    got: list[list[Array]] = []
    for model in made:
        cache = model.new_cache(3, 64)
        model.forward(Nodes(tokens, cache, [2, 0], parents), read, want="none")
        cache.commit([2, 0], [range(8), range(4)])
        root = np.array([[PROMPT[9]], [PROMPT[25]]])
        out = model.forward(Nodes(root, cache, [2, 0]), np.stack([read[0, 8:], read[1, 4:5]]))
        below = Nodes(np.array([[5, 6], [7, 0]]), cache, [2, 0], level)
        nodes = model.forward(below, g=np.repeat(out.g, 2, 1))
        # the same without pieces: what waits is read by the call that wants the last pair of each
        again = model.forward(Nodes(tokens, model.new_cache(3, 64), [2, 0], parents), read, want="last")
        assert np.allclose(again.logits, out.logits, atol=1e-5)
        assert np.allclose(again.g, out.g, atol=1e-5)
        got.append([*out, *again, *(t[row, node] for t in nodes for row, node in ((0, 0), (0, 1), (1, 0)))])
    for fast, plain in zip(*got, strict=True):
        assert np.allclose(fast, plain, atol=1e-4 if kind == "none" else 2e-2)


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_chains_in_one_call_are_those_grown_level_by_level(temperature: float, width: int) -> None:
    """Two rows of different length, one with a threshold that ends its chain; tokens, siblings, chances and what is learned."""
    params = SamplingParams(temperature=temperature)
    budgets = [Budget(5, width, min_probability=0.3), Budget(3, width, min_probability=1e-6)]
    drafts = []
    for plain in (False, True):
        made = drafter("eagle31", plain=plain)
        texts = [PROMPT[:30], PROMPT[5:20]]
        for slot, text in enumerate(texts):
            made.start(slot, text, 0, features(TARGET, text[:-1], made.taps))
        drafts.append(made.propose(context([0, 1], texts, budgets, params)))
    one, level = drafts
    assert one.host == level.host
    assert 1 < len(one.host[0]) < 6 * width, "the threshold was chosen to end the chain"
    if width > 1:
        parents = [parent for _, parent in one.host[1]]
        assert parents == [-1, *[0] * width, *[1] * width, *[1 + width] * width], "nothing follows a sibling"
    assert one.confidence is not None
    assert level.confidence is not None
    assert np.allclose(one.confidence, level.confidence, atol=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_every_path_of_a_tree_is_a_chain(name: str) -> None:
    """The logits after a node are those of a head that drafted that path alone."""
    made = fresh(drafter(name), PROMPT)
    head = Eagle.of(weights(name), TABLE).eval()
    seen: dict[tuple[int, ...], Array] = {}
    opens, extends = made.levels.open, made.levels.extend

    def watched(levels: list[Level], grown: Mapping[int, Growth]) -> list[Level]:
        for level in levels:
            seen.update((tuple(grown[b].path(n)), row) for (b, n), row in zip(level.nodes, level.logits, strict=True))
        return levels

    made.levels.open = lambda c, grown: watched(opens(c, grown), grown)  # type: ignore[method-assign]
    made.levels.extend = lambda c, grown, *at: watched(extends(c, grown, *at), grown)  # type: ignore[method-assign]
    made.propose(context([0], [PROMPT], [Budget(4, 3, 9)], GREEDY))
    assert len(seen) > 4
    with torch.no_grad():
        read = torch.as_tensor(features(TARGET, PROMPT[:-1], made.taps))
        root, past = causal(head, torch.tensor([PROMPT[1:]]), head.fuse(read[None]))
        for path, got in seen.items():
            y, held = root[:, -1:], past
            for token in path:
                y, held = causal(head, torch.tensor([[token]]), head.feedback(y), held)
            assert np.allclose(head.logits(y[0, -1]), got, atol=1e-4)


# -- every way to run it --------------------------------------------------------------------------------------------------


def test_a_large_head_is_rounded_and_the_kernels_alone_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    large = np.zeros((2**11, 2**11), np.float32)
    assert precision_of("auto", [large]) == "int8"
    assert precision_of("auto", [large[1:]]) == "float32"
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "why", lambda: "a test")
    with pytest.raises(ValueError, match="draft with the native kernels alone, which are not here: a test"):
        eagle_model(weights("eagle31"), TARGET.model, 256)
