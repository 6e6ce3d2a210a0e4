"""Medusa, DFlash and DSpark: numbers, the lattice, and folders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from heads import (
    GOLDEN,
    MEDUSA,
    PROMPT,
    copied,
    drafter_of,
    features,
    golden,
    head_folder,
    medusa_folder,
    small_target,
)
from safetensors.numpy import load_file
from scipy.special import softmax

from outrider.core.types import Array, Budget
from outrider.drafters.heads.block import BlockModel, read_block
from outrider.drafters.heads.files import head_kind
from outrider.drafters.heads.lattice import Lattice
from outrider.drafters.heads.layers import silu
from outrider.drafters.heads.medusa import MedusaLattice, MedusaWeights, read_medusa
from outrider.drafters.model.grower import TreeDrafter
from outrider.models.nodes import Nodes
from outrider.testing.contract import GREEDY, HOT, context
from outrider_lab.heads.modules import BlockModule, MedusaModule

TARGET = small_target()
EMBEDDING, OUTPUT = (rows(np.arange(128)) for rows in (TARGET.model.embedding_rows, TARGET.model.head_rows))


# -- numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_blocks_are_those_of_speculators(name: str) -> None:
    want, model = golden(name), BlockModel(read_block(GOLDEN / name, TARGET), TARGET.model, 256, "none")
    for at, hidden, logits in zip(want["anchors"].tolist(), want["hidden"], want["logits"], strict=True):
        cache = model.new_cache(2, 64)
        if at:
            model.read(cache, 1, want["features"][:at])
        got = model.block(cache, [1], [int(want["tokens"][at])])[0]
        assert np.allclose(got, hidden, atol=1e-4), at
        assert np.allclose(model.logits(got), logits, atol=1e-4), at


def test_candidates_are_those_of_speculators() -> None:
    want, made = golden("dflash2"), drafter_of(GOLDEN / "dflash2", TARGET)
    for at, hidden, logits, ids, scores in zip(
        *(want[n] for n in ("anchors", "hidden", "logits", "candidates", "scores")), strict=True
    ):
        made.levels.hidden = hidden[None]
        for slot in range(1, len(hidden)):
            before = int(want["tokens"][int(at) + slot - 1])
            found, subset = made.levels.given_token(0, slot, before, logits[slot], made.levels.possible(logits[slot]))
            assert subset is not None
            order = ids[slot].argsort()
            assert np.array_equal(subset.ids, ids[slot][order])
            assert np.allclose(found, scores[slot][order], atol=1e-4)


_SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")


def _chain_by_hand(name: str, tokens: list[int], depth: int) -> tuple[list[int], list[float]]:
    """The most likely chain and the confidence of each token, from the equations and the golden weights."""
    read = read_block(GOLDEN / name, TARGET)
    model, own = BlockModel(read, TARGET.model, 256, "none"), {n: t.astype(np.float32) for n, t in read.tensors.items()}
    cache = model.new_cache(1, 256)
    model.read(cache, 0, features(TARGET, tokens[:-1], read.config.taps))
    z = model.block(cache, [0], [tokens[-1]])[0]
    out, sure, last = list[int](), list[float](), tokens[-1]
    for k in range(depth):
        row = z[k if name == "dspark" else k + 1]
        logits = row @ OUTPUT.T
        if name == "dspark":
            seen = own["markov_head.markov_w1.weight"][last]
            logits = logits + own["markov_head.markov_w2.weight"] @ seen
            score = own["confidence_head.proj.weight"] @ np.concatenate([row, seen]) + own["confidence_head.proj.bias"]
            sure.append(1 / (1 + math.exp(-float(score[0]))))
        if name == "dflash2":
            before, after, project = (own[f"candidate_selector.{n}"] for n in _SELECTOR)
            best = (-logits).argsort()[: read.config.selector_top_k]
            chosen = np.full_like(logits, -math.inf)
            chosen[best] = logits[best] + after[best] @ (before[last] * (project @ row))
            logits = chosen
        last = int(logits.argmax())
        out.append(last)
    return out, sure


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_chains_follow_the_equations(name: str) -> None:
    for length in (2, 3, 30):
        tokens, made = PROMPT[:length], drafter_of(GOLDEN / name, TARGET)
        made.start(0, tokens, 0, features(TARGET, tokens[:-1], made.taps))
        draft = made.propose(context([0], [tokens], [Budget(4, min_probability=1e-30)], GREEDY))
        want, sure = _chain_by_hand(name, tokens, 4)
        assert [t for t, _ in draft.host[0][1:]] == want
        if name == "dspark":
            assert draft.confidence is not None
            assert math.isclose(made.levels.log_confidence(0, 0, tokens[-1]), math.log(sure[0]), abs_tol=1e-5)
            stated = draft.confidence[0].tolist()
            assert all(s <= math.prod(sure[:n]) + 1e-5 for n, s in enumerate(stated))


@pytest.mark.parametrize("layout", MEDUSA)
def test_medusa_follows_its_equation(layout: str, tmp_path: Path) -> None:
    folder = medusa_folder(tmp_path, layout)
    made, read = drafter_of(folder, TARGET), read_medusa(folder, TARGET)
    h = features(TARGET, PROMPT[:-1], (-1,))
    made.start(0, PROMPT, 0, h)
    draft = made.propose(context([0], [PROMPT], [Budget(9)], GREEDY))
    want = []
    for i, blocks in enumerate(read.blocks):
        z = h[-1]
        for a, b in blocks:
            assert b is not None
            z = z + silu(a @ z + b)
        outputs = read.outputs or [OUTPUT]
        place = int((outputs[min(i, len(outputs) - 1)] @ z).argmax())
        want.append(place if read.token_ids is None else int(read.token_ids[place]))
    assert [t for t, _ in draft.host[0][1:]] == want  # 3 heads, so 3 tokens
    if layout == "shared":  # token_map is an index, in any order
        stored = load_file(folder / "model.safetensors")
        z = h[-1]
        for a, b in read.blocks[0]:
            z = z + silu(a @ z + b)
        assert want[0] == int(stored["token_map"][(stored["lm_head.weight"] @ z).argmax()])


# -- the lattice ----------------------------------------------------------------------------------------------------------


class _Lattice(Lattice):
    """Three depths over three tokens, with a bias by the token before and a confidence, or without."""

    def __init__(self, first_order: bool) -> None:
        super().__init__(3, 3)
        draw = torch.Generator().manual_seed(int(first_order))
        self.first_order, self.learns = first_order, not first_order
        self.depths, self.biases = (torch.randn(shape, generator=draw).numpy() for shape in ((3, 3), (3, 3, 3)))
        self.sure = torch.rand(3, 3, generator=draw).numpy()

    def room(self, slot: int, tokens: list[int]) -> int:
        return 3

    def log_confidence(self, line: int, level: int, token: int) -> float:
        return math.log(self.sure[level, token])

    def logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Array:
        return np.repeat(self.depths[None, :depth], len(slots), 0)

    def after_token(self, line: int, level: int, token: int, logits: Array, places: Array | None) -> Array:
        bias = self.biases[level, token]
        return logits + (bias if places is None else bias[places])


@pytest.mark.parametrize("first_order", [False, True])
def test_the_lattice_holds_the_likeliest_nodes(first_order: bool) -> None:
    """Against every tree of the lattice, by listing all its nodes."""
    made, root = _Lattice(first_order), 1
    scores = made.depths[:, None] + (made.biases if first_order else np.zeros((3, 3, 3), np.float32))
    sure = made.sure if first_order else np.ones((3, 3))
    chances = (softmax(scores, -1) * sure[..., None]).tolist()  # [level][token before][token]
    every = sorted(
        (
            math.prod(chances[n][before][token] for n, (before, token) in enumerate(pairwise((root, *path))))
            for depth in (1, 2, 3)
            for path in itertools.product(range(3), repeat=depth)
        ),
        reverse=True,
    )
    for count in (1, 4, 9, 39):
        draft = TreeDrafter(made).propose(context([0, 1], [[0, root], [2, root]], [Budget(3, 3, count)] * 2, GREEDY))
        assert draft.confidence is not None
        for nodes, stated in zip(draft.host, draft.confidence, strict=True):
            assert len(nodes) == count + 1
            found = sorted(stated[1:].tolist(), reverse=True)
            assert np.allclose(found, every[:count], atol=1e-6)
            assert all(parent < n for n, (_, parent) in enumerate(nodes))


# -- texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "ids"), [("dspark-small", range(3, 100, 5)), ("medusa-shared", None)])
def test_a_draft_has_tokens_of_the_heads_vocabulary_alone(kind: str, ids: range | None, tmp_path: Path) -> None:
    folder = head_folder(kind, tmp_path)
    made = drafter_of(folder, TARGET)
    made.start(0, PROMPT, 0, features(TARGET, PROMPT[:-1], made.taps))
    draft = made.propose(context([0], [PROMPT], [Budget(3, 3, 9)], HOT))
    tokens = {token for token, _ in draft.host[0][1:]}
    assert tokens <= set(load_file(folder / "model.safetensors")["token_map"].tolist() if ids is None else ids)
    assert len(tokens) > 2


# -- folders --------------------------------------------------------------------------------------------------------------


def test_other_layouts_of_blocks(tmp_path: Path) -> None:
    """z-lab and DeepSpec name outputs of layers, transformers another encoder."""
    want = read_block(GOLDEN / "dspark", TARGET)
    deepspec = {
        "speculators_model_type": None,
        "aux_hidden_state_layer_ids": None,
        "sample_from_anchor": None,
        "target_layer_ids": [1, 3, 7],
    }
    assert read_block(copied("dspark", tmp_path, deepspec), TARGET).config == want.config
    weights = load_file(GOLDEN / "dflash" / "model.safetensors")
    names = {"fc__weight": None, "hidden_norm__weight": None}
    moved = {
        "encoder__fc__weight": weights["fc.weight"],
        "encoder__output_norm_enc__weight": weights["hidden_norm.weight"],
    }
    z_lab = {
        "speculators_model_type": None,
        "aux_hidden_state_layer_ids": None,
        "mask_token_id": None,
        "dflash_config": {"target_layer_ids": [1, 3, 7], "mask_token_id": 127},
    }
    folder = copied("dflash", tmp_path, z_lab, **names, **moved)
    assert head_kind(folder) == "dflash"
    assert replace(read_block(folder, TARGET).config) == read_block(GOLDEN / "dflash", TARGET).config


def _numbers(head: MedusaWeights) -> list[Array]:
    blocks = [t for one in head.blocks for pair in one for t in pair if t is not None]
    return [*blocks, *head.outputs, *([] if head.token_ids is None else [head.token_ids])]


def test_a_logit_scale_is_used(tmp_path: Path) -> None:
    plain = read_medusa(medusa_folder(tmp_path, "shared"), TARGET)
    again = replace(plain, logit_scale=0.25)
    hidden = torch.randn(2, 32).numpy()
    logits = [MedusaLattice(h, TARGET.model, "none").model.logits(hidden, 2) for h in (plain, again)]
    assert np.allclose(0.25 * logits[0], logits[1])


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_block_module_is_its_slow_twin(name: str) -> None:
    """The module that is trained gives the numbers of speculators, and its weights go back as they came."""
    read, want = read_block(GOLDEN / name, TARGET), golden(name)
    module = BlockModule.of(read, *map(torch.as_tensor, (EMBEDDING, OUTPUT)))
    texts, states, anchors = (torch.as_tensor(want[n])[None] for n in ("tokens", "features", "anchors"))
    z = module(texts.gather(1, anchors), states, anchors - 1)
    assert np.allclose(z[0].detach(), want["hidden"], atol=1e-4)
    assert {n: t.tolist() for n, t in module.weights(read).tensors.items()} == {
        n: t.tolist() for n, t in read.tensors.items()
    }
    anchors = torch.tensor([[3, 9]])
    made = drafter_of(GOLDEN / name, TARGET)
    for k, (logits, sure) in enumerate(module.drafts(texts, states, anchors)):
        for a, t in enumerate(anchors[0].tolist()):
            tokens = want["tokens"][: t + 2 + k].tolist()
            made.release(0)
            made.start(0, tokens[: t + 2], 0, want["features"][: t + 1])
            drafted = made.levels.logits([0], [tokens[: t + 2]], 5)[0, k]
            if name == "dspark":
                drafted = made.levels.after_token(0, k, tokens[-1], drafted, None)
                assert sure is not None
                log = torch.nn.functional.logsigmoid(sure[0, a].detach())
                assert math.isclose(made.levels.log_confidence(0, k, tokens[-1]), float(log), abs_tol=1e-4)
            assert np.allclose(drafted, logits[0, a].detach(), atol=1e-4), (k, t)


@pytest.mark.parametrize("layout", MEDUSA)
def test_a_medusa_module_is_its_slow_twin(layout: str, tmp_path: Path) -> None:
    read = read_medusa(medusa_folder(tmp_path, layout), TARGET)
    module = MedusaModule(read, torch.as_tensor(OUTPUT))
    hidden = torch.randn(3, 32)
    drafted = MedusaLattice(read, TARGET.model, "none").model.logits(hidden.numpy(), 3)
    for head in range(3):
        assert np.allclose(module.logits(hidden, head).detach(), drafted[:, head], atol=1e-4)
    assert all(np.array_equal(a, b) for a, b in zip(_numbers(module.weights()), _numbers(read), strict=True))


def test_noise_is_that_of_the_target() -> None:
    """With the target's own distribution a draft is the target's choice, at any temperature."""
    made = drafter_of(GOLDEN / "dflash", TARGET)
    made.start(0, PROMPT, 0, features(TARGET, PROMPT[:-1], made.taps))
    cache = TARGET.model.new_cache(1, 64)
    logits = TARGET.model.forward(Nodes(np.array([PROMPT]), cache, [0]), want="last").logits[:, 0]
    made.levels.logits = lambda c, some, depth: np.repeat(logits[:, None], depth, 1)  # type: ignore[method-assign]
    for width in (1, 3):
        ask = context([0], [PROMPT], [Budget(1, width)], HOT)
        right = int(ask.warp.draw(logits, [[]], ask.noise, ask.stream, ask.positions)[0])
        assert made.propose(ask).host[0][1] == (right, 0)
