"""The prefix cache in files: no text changes, whatever is in the folder and whoever else uses it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from architectures import tiny
from heads import GOLDEN, small_target
from helpers import Loop, request
from light import Late

from outrider import LLM
from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.core.store import HEAD, PREFIXES, Store
from outrider.drafters.base import Drafter, NoDraft
from outrider.drafters.heads.eagle import Pairs, eagle_model, read_eagle
from outrider.drafters.model import draft_model
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.grower import TreeDrafter
from outrider.engine import prefix_files
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.prefix_files import PrefixFiles
from outrider.engine.request import Request, Sequence
from outrider.kernels import cpu as native
from outrider.models.load import Loaded, load
from outrider.models.native.model import NativeModel

hf = Late("outrider.models.hf.model")

pytestmark = pytest.mark.skipif(not native.available(), reason="bit-identical prefixes need the native kernels")
ROOM, LENGTH, SEGMENT = 1 << 30, 120, 16


class Kind(NamedTuple):
    target: Loaded
    drafter: Callable[[], Drafter]


def hybrid(model: Any, name: str) -> Loaded:
    return Loaded(model, name, None, (), "float32", "builtin:code")  # a file here, so that its content has a name


@cache
def kind(name: str) -> Kind:
    if name == "head":
        target = replace(small_target(), source="builtin:code")
        head = eagle_model(read_eagle(GOLDEN / "eagle31", target), target.model, LENGTH, "none")
        return Kind(target, lambda: TreeDrafter(Pairs(head, 2, LENGTH)))
    if name == "hybrid":
        return Kind(hybrid(hf.HFModel(tiny("qwen3_5_text")), name), NoDraft)
    if name == "native hybrid":
        return Kind(hybrid(NativeModel(tiny("lfm2")), name), NoDraft)
    if name == "draft model":
        return Kind(load("builtin:code"), lambda: ModelDrafter(draft().model, 2, LENGTH))
    return Kind(load("builtin:code", kv_cache_dtype=name), NoDraft)


@cache
def draft() -> Loaded:
    return load("builtin:code-draft")


KINDS = ("auto", "bfloat16", "int8", "hybrid", "native hybrid", "head", "draft model")


class Process:
    """What a process that was just started is: nothing in memory. memory: bytes of the cache there."""

    def __init__(self, name: str, folder: Path, memory: int = 0, limit: int = ROOM) -> None:
        loaded, make = kind(name)
        self.drafter, self.folder = make(), Store.open(folder, limit, PREFIXES)
        self.files = PrefixFiles(self.folder, loaded)
        self.prefixes = PrefixCache(memory, self.files)
        if name == "draft model":
            self.drafted = PrefixFiles(self.folder, draft())
            self.drafter = ModelDrafter(draft().model, 2, LENGTH, prefixes=PrefixCache(0, self.drafted))
        self.loop = Loop(
            loaded.model, self.drafter, controller=Fixed(3), num_slots=2, max_length=LENGTH, prefixes=self.prefixes
        )

    def write(self, requests: list[Request]) -> list[Sequence]:
        found = self.loop.generate(requests)
        self.folder.flush()
        return found


def plain(name: str, requests: list[Request]) -> list[Sequence]:
    loaded, make = kind(name)
    return Loop(loaded.model, make(), controller=Fixed(3), num_slots=2, max_length=LENGTH).generate(requests)


def asked(tokens: list[int], count: int = 6, seed: int = 0, temperature: float = 0.0) -> Request:
    return request(tokens, SamplingParams(max_tokens=count, temperature=temperature, ignore_eos=True, seed=seed), seed)


def prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, 40) for _ in range(length)]


def outputs(found: list[Sequence]) -> list[list[int]]:
    return [one.output for one in found]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "SEGMENT", SEGMENT)
    monkeypatch.setattr(prefix_files, "OF_STATES", SEGMENT)
    monkeypatch.setattr(draft_model, "CHUNK", SEGMENT)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of each text has a file."""
    monkeypatch.setattr(prefix_files, "END_OF", 1)


def check(name: str, folder: Path, tokens: int, seed: int = 0) -> None:
    """Random texts that begin alike, in processes that end after some of them: all are those without a cache."""
    draw, texts, written, found = random.Random(seed), list[list[int]](), 0, 0
    while written < tokens or not found:
        process = Process(name, folder, draw.choice([0, 20_000, 1 << 24]), draw.choice([ROOM, 300_000]))
        process.loop.chunk = draw.choice([7, 16, 256])
        for _ in range(draw.randint(1, 3)):
            requests = list[Request]()
            for _ in range(draw.randint(1, 2)):
                start = draw.choice(texts)[: draw.randrange(70)] if texts else []
                start = start + prompt(draw.randint(2, 30), draw.randrange(1 << 30))
                requests.append(asked(start, draw.randint(1, 20), draw.randrange(99), draw.choice([0.0, 0.9])))
            had = process.files.read
            run, expected = process.write(requests), plain(name, requests)
            assert outputs(run) == outputs(expected)
            assert not process.prefixes.check()
            assert all(s.counts.cached <= len(s.prompt) for s in run)
            assert sum(s.counts.cached for s in run) >= process.files.read - had
            texts += [s.tokens for s in run]
            written += sum(len(s.tokens) for s in run)
        found += process.files.read


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("name", KINDS)
def test_no_token_differs(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, 150)


@pytest.mark.long
@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("name", KINDS)
def test_no_token_of_a_hundred_thousand_differs(name: str, tmp_path: Path) -> None:
    for seed in range(5):
        check(name, tmp_path / str(seed), 3000, seed + 1)  # of each kind; a hundred thousand together


@pytest.mark.parametrize("name", KINDS)
def test_the_next_process_reads_what_the_first_one_wrote(name: str, tmp_path: Path) -> None:
    first, second = Process(name, tmp_path), Process(name, tmp_path)
    requests = [asked(prompt(100))]
    [a] = first.write(requests)
    [b] = second.write(requests)
    assert a.output == b.output
    assert (a.counts.cached, b.counts.cached) == (0, 96)
    assert second.files.read == 96
    if name == "draft model":
        assert second.drafted.read == 96
    if name == "head":
        assert a.counts.accepted == b.counts.accepted
    sizes = sum(f.stat().st_size for f in tmp_path.glob("*/*"))
    assert second.folder.bytes <= sizes


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("name", KINDS)
def test_no_token_of_a_known_prompt_is_read_again(name: str, tmp_path: Path) -> None:
    """Also those behind the last whole segment, and those of the answer. Nothing of it is copied into memory."""
    [first] = Process(name, tmp_path).write([asked(prompt(100))])
    for known in (prompt(100), [*first.tokens[:-1], 7]):
        process = Process(name, tmp_path, memory=1 << 24)
        requests = [asked(known)]
        run = process.write(requests)
        assert outputs(run) == outputs(plain(name, requests))
        assert run[0].counts.cached == len(known) - 1
        assert process.prefixes.bytes == 0


@pytest.mark.usefixtures("ends")
def test_a_text_goes_on_after_the_end_of_another(tmp_path: Path) -> None:
    """That end is not read again at each small chunk. A later text in its slot is kept in memory."""
    Process("auto", tmp_path).write([asked(prompt(100), 1)])
    process, requests = Process("auto", tmp_path, memory=1 << 24), [asked([*prompt(99), *prompt(12, 5)])]
    process.loop.chunk = 3
    assert outputs(process.write(requests)) == outputs(plain("auto", requests))
    assert process.files.read == 99
    process.write([asked(prompt(20, 6))])
    assert process.prefixes.bytes > 0


def test_the_end_of_a_short_text_has_no_file(tmp_path: Path) -> None:
    """It would be a larger part of the bytes than the fiftieth that is allowed."""
    Process("auto", tmp_path).write([asked(prompt(100))])
    assert len([*tmp_path.glob("*/*")]) == 100 // SEGMENT


def test_a_segment_belongs_to_all_tokens_before_it(tmp_path: Path) -> None:
    """The tokens of a segment and of the one before it are not enough: keys and values depend on the beginning, too."""
    first, other, same, last = (prompt(SEGMENT, seed) for seed in range(4))
    for known in ([*first, *same, *last, 5], [*other, *same, 5]):
        Process("auto", tmp_path).write([asked(known)])
    process, text = Process("auto", tmp_path), [asked([*other, *same, *last, 5])]
    assert outputs(process.write(text)) == outputs(plain("auto", text))
    assert process.files.read == 2 * SEGMENT


def test_kinds_of_keys_and_values_live_side_by_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("bfloat16", "int8"):
        Process(name, tmp_path).write([asked(prompt(100))])
    again = Process("bfloat16", tmp_path)
    again.write([asked(prompt(100))])
    assert again.files.read == 96
    assert not caplog.records


def test_nothing_of_a_damaged_file_stays_in_the_cache(tmp_path: Path) -> None:
    """Its bits may be no numbers, and a masked cell counts as zero times what it holds."""
    Process("auto", tmp_path).write([asked(prompt(100))])
    for file in tmp_path.glob("*/*"):
        file.write_bytes(file.read_bytes()[:HEAD] + b"\xff" * (file.stat().st_size - HEAD))
    process = Process("auto", tmp_path)
    process.files.load(process.loop.cache, 0, prompt(100))
    assert process.loop.cache.length[0] == 0
    for t in (t for pair in process.loop.cache.layers for t in pair):
        assert not t[0, :, SEGMENT - 8 : SEGMENT].any()


def test_a_file_takes_what_its_keys_and_values_take(tmp_path: Path) -> None:
    process = Process("auto", tmp_path)
    process.write([asked(prompt(100))])
    files = [*tmp_path.glob("*/*")]
    each = process.loop.cache.bytes_per_token * SEGMENT
    assert {f.stat().st_size for f in files} == {each + HEAD}
    assert len(files) == 100 // SEGMENT
    assert tmp_path.stat().st_mode & 0o777 == 0o700 or os.name == "nt"


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("name", ["auto", "native hybrid", "head"])
def test_damaged_and_lost_files_change_no_text(name: str, tmp_path: Path) -> None:
    """Each file once: it is whole again after the text was asked for again, unless the text does not need it."""
    requests = [asked(prompt(104), seed=3, temperature=0.9)]
    expected = outputs(Process(name, tmp_path).write(requests))
    for n, file in enumerate(sorted(tmp_path.glob("*/*"))):
        whole = file.read_bytes()
        if n % 2:
            file.unlink()
        else:
            file.write_bytes(bytes(len(whole)))
        process = Process(name, tmp_path)
        for _ in range(2):
            assert outputs(process.write(requests)) == expected
        assert not file.exists() or file.read_bytes() in (whole, bytes(len(whole)))
        file.write_bytes(whole)


def test_another_version_finds_nothing_and_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [asked(prompt(100))]
    [first] = Process("auto", tmp_path).write(requests)
    before = {f: f.read_bytes() for f in tmp_path.glob("*/*")}
    for what, value in (("ARITHMETIC", 10**6), ("SEGMENT", 32)):
        with monkeypatch.context() as other:
            other.setattr(prefix_files, what, value)
            [found] = Process("auto", tmp_path).write(requests)
            assert (found.counts.cached, found.output) == (0, first.output)
    assert {f: f.read_bytes() for f in before} == before
    assert Process("bfloat16", tmp_path).write(requests)[0].counts.cached == 0


# -- the options ----------------------------------------------------------------------------------------------------------


def test_an_llm_with_a_folder(tmp_path: Path) -> None:
    params, text = SamplingParams(max_tokens=5, temperature=0), "def f(a, b):\n    return a + b\n\n" * 6
    expected = LLM("builtin:code").generate(text, params)[0].outputs[0].text
    for read in (False, True):
        llm = LLM("builtin:code", prefix_dir=tmp_path, prefix_disk="1 MB")
        assert llm.generate(text, params)[0].outputs[0].text == expected
        assert llm.runtime.files is not None
        llm.runtime.files.folder.flush()
        assert (llm.runtime.files.read > 0) == read
        assert llm.runtime.files.folder.limit == 10**6
    with pytest.raises(ValueError, match="the model has no files here"):
        LLM(replace(small_target(), source=""), prefix_dir=tmp_path)


def test_states_have_longer_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "OF_STATES", 4 * SEGMENT)
    sizes = {name: Process(name, tmp_path).files.segment for name in ("auto", "hybrid", "native hybrid")}
    assert sizes == {"auto": SEGMENT, "hybrid": 4 * SEGMENT, "native hybrid": 4 * SEGMENT}
