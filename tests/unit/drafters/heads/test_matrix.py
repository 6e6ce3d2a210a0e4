"""Every kind of head, in every way an engine runs it; and faults that are planted in each, which the comparison must find."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import read, run
from heads import GOLDEN, eagle1_folder, medusa_folder, small_target
from helpers import Loop, plain_texts, request
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.types import Draft
from outrider.drafters.base import DraftContext
from outrider.drafters.heads.block.drafter import BlockLattice
from outrider.drafters.heads.block.files import read_block
from outrider.drafters.heads.eagle.drafter import MaskedPairs, Pairs, eagle_model
from outrider.drafters.heads.eagle.files import read_eagle
from outrider.drafters.heads.medusa.drafter import MedusaLattice
from outrider.drafters.heads.medusa.files import read_medusa
from outrider.drafters.model.grower import TreeDrafter
from outrider.engine import Engine
from outrider.models.base import FINAL_NORM
from outrider.models.nodes import Nodes

TARGET = small_target()
LAST = TARGET.model.num_layers - 1
PROMPT = [(7 * i * i + 3 * i + 11) % 127 for i in range(60)]
NAMES = ("eagle", "eagle1", "peagle", "medusa", "dflash", "dspark", "dflash2")
LAYOUTS = ("medusa-old", "medusa-shared", "medusa-target")  # the other ways in which Medusa heads have outputs


class EveryThird:
    """A grammar whose next tokens depend on the token before them: one in three is forbidden."""

    def allowed(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> Tensor:
        last = extra[-1] if extra else tokens[-1]
        return (torch.arange(128) + last) % 3 != 0

    def legal_prefix(self, tokens: Sequence[int], start: int, extra: Sequence[int]) -> int:
        legal = (self.allowed(tokens, start, extra[:n])[token] for n, token in enumerate(extra))
        return len(list(itertools.takewhile(bool, legal)))

    def forced_tokens(self, tokens: Sequence[int], start: int) -> list[int]:
        return []


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Any]]:
    made, model = tmp_path_factory.mktemp("made"), TARGET.model
    folder, old = medusa_folder(made), eagle1_folder(made)
    return {
        "eagle1": lambda: TreeDrafter(Pairs(eagle_model(read_eagle(old, TARGET), model, 160, "none"), 3, 160)),
        "eagle": lambda: TreeDrafter(
            Pairs(eagle_model(read_eagle(GOLDEN / "eagle31", TARGET), model, 160, "none"), 3, 160)
        ),
        "peagle": lambda: TreeDrafter(MaskedPairs(read_eagle(GOLDEN / "peagle", TARGET), model, 3, 160, "none")),
        "medusa": lambda: TreeDrafter(MedusaLattice(read_medusa(folder, TARGET), model, "none")),
        "dflash": lambda: TreeDrafter(BlockLattice(read_block(GOLDEN / "dflash", TARGET), model, 3, 160, "none")),
        "dspark": lambda: TreeDrafter(BlockLattice(read_block(GOLDEN / "dspark", TARGET), model, 3, 160, "none")),
        "dflash2": lambda: TreeDrafter(BlockLattice(read_block(GOLDEN / "dflash2", TARGET), model, 3, 160, "none")),
    }


# -- texts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 3], ids=["chain", "tree"])
@pytest.mark.parametrize("name", [*NAMES, *LAYOUTS])
def test_an_engine_changes_no_text(name: str, width: int, tmp_path: Path) -> None:
    """A batch of greedy and sampled rows: preempted, with stored prefixes, chunked prompts, a grammar, a row without a head."""
    kind, _, layout = name.partition("-")
    made = {"medusa": lambda: medusa_folder(tmp_path, layout or "vllm"), "eagle1": lambda: eagle1_folder(tmp_path)}
    folder = made[kind]() if kind in made else GOLDEN / {"eagle": "eagle31"}.get(name, name)
    config = {"model": str(folder), "controller": "fixed", "num_speculative_tokens": 3}
    config |= {"tree_width": 3, "tree_nodes": 7} if width > 1 else {}
    llm = LLM(TARGET, speculative_config=config, max_num_seqs=3, max_model_len=160)
    with closing(Engine(llm.runtime, kv_tokens=200, prefill_chunk=16)) as eng:
        asked = [
            request(PROMPT[:n], SamplingParams(max_tokens=40, temperature=t, seed=5, ignore_eos=True), seed=n)
            for n, t in ((48, 1.0), (59, 0.0), (50, 0.7), (55, 1.0))
        ]
        asked[2] = replace(asked[2], mask=EveryThird())
        asked[3] = replace(asked[3], method="none")
        texts = run(eng, [read(s) for s in asked])
        assert eng.scheduler.preemptions > 0
        assert eng.stats.prefix_hits > 0
        assert eng.roster.failures == 0
    assert [t.output for t in texts] == plain_texts(TARGET.model, asked, end_ids=())  # as the engine has them
    assert all(sum(texts[n].counts.drafted) > 10 for n in (0, 1, 2))
    assert sum(texts[3].counts.drafted) == 0
    assert all((a + b) % 3 for a, b in zip([PROMPT[49], *texts[2].output], texts[2].output, strict=False))


# -- planted faults -------------------------------------------------------------------------------------------------------


def features(tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    cache = TARGET.model.new_cache(1, len(tokens))
    out = TARGET.model.forward(Nodes(torch.tensor([tokens]), cache, [0]), taps=taps, want="none").features
    assert out is not None
    return out[0]


def checked(make: Callable[[], Any], fault: Callable[[Any], None] | None) -> Any:
    """A drafter whose drafts are compared with those of a new one that is told the whole text at once, and rightly."""
    made = make()
    taps, propose = made.taps, made.propose
    if fault is not None:
        fault(made)

    def compared(asked: DraftContext) -> Draft:
        draft = propose(asked)
        for b, (slot, tokens) in enumerate(zip(asked.slots, asked.tokens, strict=True)):
            if not asked.budgets[b].depth or len(tokens) < 2:
                continue
            new = make()
            new.start(slot, tokens, 0, features(list(tokens[:-1]), taps))
            one = replace(
                asked, slots=[slot], tokens=[tokens], budgets=[asked.budgets[b]], warp=asked.warp.select([b]),
                noise=asked.noise.select([b]),
            )  # fmt: skip
            assert new.propose(one).host[0] == draft.host[b], "the draft is not that of the text"
        return draft

    made.propose = compared
    return made


def _off_by_one(made: Any) -> None:
    add = made.levels.add
    made.levels.add = lambda slot, f, first: add(slot, f.roll(1, 0) if len(f) > 1 else f * 0.5, first)


def _wrong_tap(made: Any) -> None:
    made.taps = tuple(LAST - 1 if t == FINAL_NORM else t - 1 for t in made.taps)


def _other_side_of_the_norm(made: Any) -> None:
    """Post- for pre-norm, and for Medusa pre- for post-norm."""
    made.taps = tuple(FINAL_NORM if t == LAST else LAST if t == FINAL_NORM else t for t in made.taps)


def _slots_kept(made: Any) -> None:
    """The first slot of a draft stays in the cache, in place of the features of that position."""
    logits, keep = made.levels.logits, made.levels.cache

    def kept(slots: Sequence[int], texts: Any, depth: int) -> Tensor:
        found = logits(slots, texts, depth)
        for slot in slots:
            place = keep.length[slot]
            for key, value in keep.layers:
                for t in (key, value):
                    t[slot, :, place - 1] = t[slot, :, place]
        return found

    made.levels.logits = kept


FAULTS: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "features off by one position": (_off_by_one, NAMES),
    "wrong tap": (_wrong_tap, NAMES),
    "the other side of the norm": (_other_side_of_the_norm, NAMES),
    "slots kept": (_slots_kept, ("peagle", "dflash", "dspark")),
}


def texts(made: Any, width: int = 1) -> list[list[int]]:
    asked = [
        request(PROMPT[:n], SamplingParams(max_tokens=6, temperature=t, seed=n), seed=n) for n, t in ((30, 0), (9, 1))
    ]
    loop = Loop(TARGET.model, made, controller=Fixed(3, width, 3 * width), num_slots=2, max_length=128)
    loop.chunk = 5
    return [r.output for r in loop.generate(asked)]


@pytest.mark.parametrize(("fault", "name"), [(f, n) for f, (_, names) in FAULTS.items() for n in names])
def test_planted_faults_are_found(fault: str, name: str, makers: dict[str, Callable[[], Any]]) -> None:
    with pytest.raises(AssertionError, match="the draft is not that of the text"):
        # the best token of the random DFlash head is often the same; its next ones are not
        texts(checked(makers[name], FAULTS[fault][0]), width=3 if name == "dflash" else 1)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_fault_nothing_is_found(name: str, makers: dict[str, Callable[[], Any]]) -> None:
    assert len(texts(checked(makers[name], None))[0]) == 6
