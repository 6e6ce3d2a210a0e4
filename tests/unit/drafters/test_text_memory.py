"""The memory of texts: it changes no text, mixes no clients, keeps its bounds, and survives kills and damage."""

from __future__ import annotations

import os
import random
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import Loop, request
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.control import Fixed
from outrider.core.store import TEXTS, Store
from outrider.drafters.lookup.corpus import REACH, Corpus, Index, bordered
from outrider.drafters.lookup.memory import TextMemory
from outrider.drafters.lookup.suffix import SuffixDrafter
from outrider.engine.request import Request, Sequence
from outrider.models.load import load

VOCAB, ROOM, DAY = 512, 1 << 24, 86400.0


model = cache(lambda: load("builtin:code"))


def memory(folder: Path, limit: int = ROOM, age: float = 30 * DAY, shared: bool = False) -> TextMemory:
    return TextMemory(Store.open(folder, limit, TEXTS, age), None, VOCAB, shared)


def texts(held: TextMemory, client: str = "") -> list[int]:
    """All tokens that are known for a client, the borders included."""
    corpus = held.corpus(client)
    held.folder.flush()
    return [token for segment in corpus.segments for token in segment.tokens.tolist()]


def kept(held: TextMemory, *some: list[int], client: str = "") -> None:
    for one in some:
        held.keep(client, one)
        held.folder.flush()


def text(seed: int, length: int = 300) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


def held_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.texts"))


def found(corpus: Corpus, tail: list[int]) -> int:
    return max((context.length for context in corpus.contexts(tail[-REACH:])), default=0)


# -- texts are equal ------------------------------------------------------------------------------------------------------


def process(folder: Path | None, shared: bool = False) -> Loop:
    """What a process that was just started is."""
    loaded = model()
    own = None
    if folder is not None:
        own = TextMemory(Store.open(folder, ROOM, TEXTS), loaded.tokenizer, loaded.model.vocab_size, shared)
    drafter = SuffixDrafter(text_memory=own, least=0.01)
    return Loop(loaded.model, drafter, controller=Fixed(4), num_slots=2, max_length=200, text_memory=own)


def run(loop: Loop, requests: list[Request]) -> list[Sequence]:
    done = loop.generate(requests)
    if loop.text_memory is not None:
        loop.text_memory.folder.flush()
    return done


@pytest.mark.parametrize("shared", [False, True])
def test_no_token_differs_over_processes_that_end_and_files_that_break(shared: bool, tmp_path: Path) -> None:
    draw, said, drafted = random.Random(shared), [[5, 6, 7]], 0
    for _ in range(4):
        loop = process(tmp_path, shared)
        for _ in range(2):
            requests = []
            for n in range(2):
                start = [*draw.choice(said)[: draw.randrange(2, 60)], *text(draw.randrange(99), draw.randrange(4))]
                params = SamplingParams(max_tokens=draw.randint(1, 30), temperature=draw.choice([0.0, 0.9]), seed=n)
                requests.append(request(start, params, draw.randrange(99), client=draw.choice("ab")))
            done, expected = run(loop, requests), run(process(None), requests)
            assert [one.output for one in done] == [one.output for one in expected]
            said += [one.tokens for one in done]
            drafted += sum(sum(one.counts.accepted) for one in done)
        for file in held_in(tmp_path):
            if draw.random() < 0.3:
                file.write_bytes(file.read_bytes()[: draw.randrange(100)])
    assert drafted > 20


def test_the_next_process_drafts_what_the_first_one_wrote(tmp_path: Path) -> None:
    ask = [request([*b"def add(a, b):\n"], SamplingParams(max_tokens=60, temperature=0), client="a")]
    [first] = run(process(tmp_path), ask)
    [again] = run(process(tmp_path), ask)
    loop = process(tmp_path)
    assert loop.text_memory is not None
    loop.text_memory.corpus("\na")
    loop.text_memory.folder.flush()
    [later] = run(loop, ask)
    assert first.output == again.output == later.output
    assert len(later.counts.accepted) == 12 < len(first.counts.accepted)  # five tokens a step


# -- clients --------------------------------------------------------------------------------------------------------------


def test_no_draft_has_a_token_of_another_client(tmp_path: Path) -> None:
    canary = [*range(400, 440)]
    for shared in (False, True):
        folder = tmp_path / str(shared)
        kept(memory(folder, shared=shared), [1, 2, 3, *canary], client="a")
        held = memory(folder, shared=shared)
        assert (canary[0] in texts(held, "b")) == shared
        assert canary[0] in texts(held, "a")
        drafter = SuffixDrafter(text_memory=held, least=0.0)
        loop = Loop(model().model, drafter, controller=Fixed(4), num_slots=2, max_length=200, text_memory=held)
        seen = set[int]()
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for step, _ in loop.steps([request([1, 2, 3, 400, 401], params, client=client) for client in "bc"]):
            if step is not None:
                seen |= {token for tree in step.draft.host for token, _ in tree[1:]}
            held.folder.flush()
        assert bool(seen & set(canary[2:])) == shared  # the others are in the prompt


def test_two_owners_may_name_their_clients_alike() -> None:
    names = {
        request([1], SamplingParams(), client=client, owner=owner).whose
        for owner in ("x", "y")
        for client in ("a", "b")
    }
    assert len(names) == 4


def test_a_client_can_be_forgotten(tmp_path: Path) -> None:
    held = memory(tmp_path)
    for client in ("a", "b"):
        kept(held, text(1), client=client)
    held.forget("a")
    for one in (held, memory(tmp_path)):
        assert not texts(one, "a")
        assert texts(one, "b")


def test_models_of_other_tokenizers_have_texts_of_their_own_and_forget_together(tmp_path: Path) -> None:
    ours, other = memory(tmp_path), TextMemory(Store.open(tmp_path, ROOM, TEXTS), None, VOCAB + 1)
    kept(ours, text(1), client="a")
    assert not texts(other, "a")
    kept(other, text(2), client="a")
    assert len(texts(memory(tmp_path), "a")) == 301
    other.forget("a")
    assert not held_in(tmp_path)


def test_many_clients_are_not_all_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafters.lookup.memory.CLIENTS", 2)
    held = memory(tmp_path)
    for n in range(5):
        kept(held, text(n), client=str(n))
    assert [bool(texts(held, str(n))) for n in range(5)] == [True] * 5


def test_a_client_leaves_memory_while_its_text_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafters.lookup.memory.CLIENTS", 1)
    held = memory(tmp_path)
    for n in range(4):
        held.keep(str(n % 2), text(n))
    for client in ("0", "1"):
        assert len(texts(held, client)) == 602


# -- what is kept ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=200), min_size=1, max_size=6))
@settings(max_examples=60)
def test_a_kept_text_is_found_and_a_known_one_adds_nothing(
    tmp_path_factory: pytest.TempPathFactory, some: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("memory")
    held = memory(folder)
    kept(held, *some)
    for again in (held, memory(folder)):
        before = texts(again)
        for one in some:
            for end in range(1, len(one) + 1):
                reach = min(end, REACH // 2)
                assert found(again.corpus(""), one[:end]) >= min(reach, 1)
        kept(again, *some)
        assert texts(again) == before


def test_the_text_before_a_gap_is_kept_before_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = memory(tmp_path)
    monkeypatch.setattr(held, "_gap", (500, 501, 502))
    before, after, answer = [*range(100, 140)], [*range(200, 240)], [*range(300, 340)]
    kept(held, [500, *before, 501, *after, 502, *answer])
    assert found(held.corpus(""), [*before, *answer]) == REACH


def test_a_conversation_that_grows_is_kept_once(tmp_path: Path) -> None:
    held, said = memory(tmp_path), list[int]()
    for turn in range(10):
        said = [*said, *text(turn, 200)]
        kept(held, said)
    assert len(said) <= len(texts(held)) <= 1.5 * len(said)
    for end in range(REACH, len(said), 50):
        assert found(held.corpus(""), said[:end]) >= REACH // 3


def test_few_files_hold_many_texts(tmp_path: Path) -> None:
    held = memory(tmp_path)
    kept(held, *(text(n, 100) for n in range(60)))
    assert len(held_in(tmp_path)) <= 8
    assert len(held.corpus("").segments) == len(held_in(tmp_path))


# -- bounds ---------------------------------------------------------------------------------------------------------------


def aged(folder: Path, days: float) -> None:
    for file in held_in(folder):
        then = file.stat().st_mtime - days * DAY
        os.utime(file, (then, then))


def test_texts_that_are_too_old_go_also_while_a_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = memory(tmp_path, age=10 * DAY)
    kept(held, text(0))
    now = time.time()
    monkeypatch.setattr("outrider.drafters.lookup.memory.time", lambda: now + 9 * DAY)
    kept(held, text(1))
    assert len(held_in(tmp_path)) == 2  # texts of different ages are not merged
    monkeypatch.setattr("outrider.drafters.lookup.memory.time", lambda: now + 11 * DAY)
    kept(held, text(2, 40))
    assert found(held.corpus(""), text(0)) < REACH
    assert found(held.corpus(""), text(1)) == REACH
    aged(tmp_path, 11)
    assert not texts(memory(tmp_path, age=10 * DAY))
    assert not held_in(tmp_path)


def test_a_merged_file_is_as_old_as_its_oldest_text(tmp_path: Path) -> None:
    kept(memory(tmp_path), text(0))
    aged(tmp_path, 2)
    then = held_in(tmp_path)[0].stat().st_mtime
    kept(memory(tmp_path), text(1))
    [merged] = held_in(tmp_path)
    assert abs(merged.stat().st_mtime - then) < 1


# -- files ----------------------------------------------------------------------------------------------------------------


def test_files_that_are_no_texts_are_left_out(tmp_path: Path) -> None:
    kept(memory(tmp_path), text(0))
    [good] = held_in(tmp_path)
    good.with_name(f"{good.name[:16]}-{'a' * 40}.texts").write_bytes(
        good.read_bytes()
    )  # the name is part of the checksum
    good.with_name(f"{good.name[:16]}-x.texts").mkdir()
    os.mkfifo(good.with_name(f"{good.name[:16]}-pipe.texts"))
    assert [t for t in texts(memory(tmp_path)) if t < VOCAB] == text(0)


@pytest.mark.parametrize("wrong", ["token", "place", "negative"])
def test_whole_files_with_impossible_numbers_are_left_out(wrong: str, tmp_path: Path) -> None:
    held = memory(tmp_path)
    kept(held, text(0))
    [good] = held_in(tmp_path)
    index = Index(bordered([text(1)]))
    numbers = np.stack([index.tokens, index.order])
    numbers[{"token": (0, 3), "place": (1, 3), "negative": (1, 4)}[wrong]] = -5 if wrong == "negative" else 10**6
    bad = good.with_name(f"{good.name[:16]}-{'c' * 40}.texts")
    held.folder.put(bad, [numbers.tobytes()])
    assert [t for t in texts(memory(tmp_path)) if t < VOCAB] == text(0)


def test_a_kill_between_two_files_leaves_no_text_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = memory(tmp_path)
    kept(held, text(0))
    monkeypatch.setattr("outrider.drafters.lookup.memory.discard", lambda file: None)  # it was killed before
    kept(held, text(1))
    monkeypatch.undo()
    assert len(held_in(tmp_path)) == 2
    again = memory(tmp_path)
    assert len(texts(again)) == 602
    assert len(held_in(tmp_path)) == 1


def test_processes_share_a_folder(tmp_path: Path) -> None:
    kept(memory(tmp_path), text(0))
    first, second = memory(tmp_path), memory(tmp_path)
    for held in (first, second):
        texts(held)
    kept(first, text(1))
    kept(second, text(2))
    again = memory(tmp_path)
    texts(again)
    for n in range(3):
        assert found(again.corpus(""), text(n)) == REACH


def test_a_full_disk_costs_no_older_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(memory(tmp_path), text(0))

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    held = memory(tmp_path)
    texts(held)
    monkeypatch.setattr("outrider.core.store.written_whole", full)
    kept(held, text(1))
    assert found(held.corpus(""), text(1)) == REACH
    monkeypatch.undo()
    again = memory(tmp_path)
    texts(again)
    assert found(again.corpus(""), text(0)) == REACH


# -- settings -------------------------------------------------------------------------------------------------------------


def test_llm_takes_a_memory(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=40, temperature=0)
    ask = "def mean(values):\n"
    config = {"method": "suffix"}
    expected = LLM("builtin:code", speculative_config=config).generate(ask, params)[0].outputs[0]
    for _ in range(2):
        llm = LLM("builtin:code", speculative_config=config, memory_dir=tmp_path)
        assert llm.generate(ask, params)[0].outputs[0].token_ids == expected.token_ids
        assert llm.runtime.text_memory is not None
        llm.runtime.text_memory.folder.flush()
    assert held_in(tmp_path)
    assert (tmp_path.stat().st_mode & 0o777) == 0o700 or tmp_path.stat().st_uid == os.getuid()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"memory_by": "team"}, "memory_by is one of client, all, got 'team'"),
        ({"memory_days": 0}, "memory_days must be more than 0"),
        ({"memory_disk": 0}, "memory_disk must be 1 byte or more"),
        ({"memory_disk": "much"}, "is no number of bytes"),
        ({"memory_dir": "/dev/null/x"}, "the memory of texts cannot use /dev/null/x"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("builtin:code", **{"memory_dir": tmp_path, **wrong})
