"""The prefix cache in files: no text changes, whatever is in the folder and whoever else uses it."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from architectures import tiny
from forked import Forked
from heads import GOLDEN, small_target
from helpers import Loop, request

from outrider import LLM
from outrider.control import Fixed
from outrider.core import contents
from outrider.core.contents import ContentFolder
from outrider.core.files import byte_count
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter, NoDraft
from outrider.drafters.heads.eagle.drafter import Pairs, eagle_model
from outrider.drafters.heads.eagle.files import read_eagle
from outrider.drafters.model import draft_model
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.model.grower import TreeDrafter
from outrider.engine import prefix_files
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.prefix_files import PrefixFiles
from outrider.engine.request import Request, Sequence
from outrider.kernels import cpu as native
from outrider.models.hf.model import HFModel
from outrider.models.load import Loaded, load
from outrider.models.native.model import NativeModel

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
        return Kind(hybrid(HFModel(tiny("qwen3_5_text")), name), NoDraft)
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
        self.drafter, self.folder = make(), ContentFolder(folder, limit)
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
    check(name, tmp_path, 250)


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
        file.write_bytes(file.read_bytes()[: contents.HEAD] + b"\xff" * (file.stat().st_size - contents.HEAD))
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
    assert {f.stat().st_size for f in files} == {each + contents.HEAD}
    assert len(files) == 100 // SEGMENT
    assert tmp_path.stat().st_mode & 0o777 == 0o700 or os.name == "nt"


# -- files that are not what they were ------------------------------------------------------------------------------------


def cut(file: Path, draw: random.Random) -> None:
    os.truncate(file, draw.randrange(file.stat().st_size))


def longer(file: Path, draw: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(draw.randbytes(draw.randint(1, 99)))


def flipped(file: Path, draw: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def zeros(file: Path, draw: random.Random) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def foreign(file: Path, draw: random.Random) -> None:
    file.write_bytes(draw.randbytes(draw.choice([0, 10, file.stat().st_size])))


def another(file: Path, draw: random.Random) -> None:
    """A whole file of other tokens under this name."""
    other = draw.choice([f for f in file.parent.glob(f"*{file.suffix}") if f != file])
    shutil.copy(other, file)


DAMAGES = (cut, longer, flipped, zeros, foreign, another)


def damage(name: str, folder: Path, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Damage a file, ask again: the text is the same, there is one line, and the file is whole after it."""
    draw, requests = random.Random(count), [asked(prompt(104), seed=3, temperature=0.9)]
    expected, seen = outputs(Process(name, folder).write(requests)), 0
    for n in range(count):
        file = draw.choice(sorted(folder.glob("*/*")))
        whole = file.read_bytes()
        DAMAGES[n % len(DAMAGES)](file, draw)
        if (damaged := file.read_bytes()) == whole:
            continue
        caplog.clear()
        process = Process(name, folder)
        for _ in range(2):
            assert outputs(process.write(requests)) == expected
        assert len(caplog.records) <= 1
        # of states only the last ones are needed, and nothing of the answer's end
        assert caplog.records or ".states" in file.name or file.read_bytes() == damaged
        # states that are passed over on the way to later ones need not come again
        assert not caplog.records or (".states" in file.name and not file.exists()) or file.read_bytes() == whole
        seen += len(caplog.records)
        file.write_bytes(whole)
    assert seen >= count // 3


@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("name", ["auto", "native hybrid", "head"])
def test_a_damaged_file_is_left_out_with_one_line_and_written_again(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(name, tmp_path, 6, caplog)


@pytest.mark.long
@pytest.mark.usefixtures("ends")
@pytest.mark.parametrize("name", KINDS)
def test_a_hundred_damaged_files(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(name, tmp_path, 100, caplog)


# -- a folder that several use, and that fails -----------------------------------------------------------------------------


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


def sizes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.glob("*/*"))


def test_the_least_recently_used_ends_make_room(tmp_path: Path) -> None:
    process = Process("auto", tmp_path)
    process.write([asked(prompt(64, 1), 1)])
    each = sizes(tmp_path) // 4
    limit = each * 8 + each // 2
    process = Process("auto", tmp_path, limit=limit)
    for seed in range(2, 5):
        process.write([asked(prompt(64, seed), 1)])
        process.write([asked(prompt(64, 1), 1)])  # it stays, because it is used
    process.folder.flush()
    assert sizes(tmp_path) <= limit
    found = [Process("auto", tmp_path).write([asked(prompt(64, seed), 1)])[0].counts.cached for seed in (1, 4, 2)]
    assert found[0] == 48  # the last token of a prompt is not looked up, so its last block is not
    assert found[2] == 0


def test_what_others_put_into_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    own = tmp_path / "letters" / "to-mother.txt"
    own.write_text("Dear mother")
    Process("auto", tmp_path, limit=1).write([asked(prompt(64))])
    assert own.read_text() == "Dear mother"
    assert [*tmp_path.glob("*/*")] == [own]


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, number: int):
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(contents, "written_whole", fail)
        yield


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_costs_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process, requests = Process("auto", tmp_path), [asked(prompt(100))]
    expected = outputs(plain("auto", requests))
    with failing(monkeypatch, number):
        assert [outputs(process.write(requests)) for _ in range(2)] == [expected] * 2
    assert len(caplog.records) == 1
    assert os.strerror(number) in caplog.text
    assert [*tmp_path.glob("*/*")] == []
    monkeypatch.setattr(contents, "_REST", 0)
    process = Process("auto", tmp_path)
    process.write(requests)
    assert len([*tmp_path.glob("*/*")]) == 6


def test_a_folder_that_is_removed_while_it_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, requests = tmp_path / "prefixes", [asked(prompt(100))]
    process = Process("auto", folder)
    first = outputs(process.write(requests))
    shutil.rmtree(folder)
    for cached in (0, 96):  # written again, then found
        [found] = process.write(requests)
        assert [found.output] == first
        assert found.counts.cached == cached
    assert not caplog.records


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the prefix cache cannot use .*file.*--prefix-dir"):
        ContentFolder(tmp_path / "file", ROOM)
    with pytest.raises(ValueError, match="prefix_disk must be 1 byte or more"):
        ContentFolder(tmp_path, 0)


def test_a_clock_that_went_back_lets_old_files_go(tmp_path: Path) -> None:
    process = Process("auto", tmp_path)
    process.write([asked(prompt(64, 1), 1)])
    future = time.time() + 10**6
    for file in tmp_path.glob("*/*"):
        os.utime(file, (future, future))
    half = tmp_path / "0123456789abcdef" / f"{'0' * 16}-{'1' * 40}.keys.1-2.partial"
    half.parent.mkdir()
    half.write_bytes(b"of a process that is gone")
    os.utime(half, (future, future))
    Process("auto", tmp_path).folder.flush()
    assert not half.exists()
    assert all(f.stat().st_mtime < future - 10**5 for f in tmp_path.glob("*/*"))


def test_a_disk_that_is_slower_than_the_model_is_not_read(tmp_path: Path) -> None:
    requests = [asked(prompt(100))]
    Process("auto", tmp_path).write(requests)
    process = Process("auto", tmp_path)
    process.write([asked(prompt(100)[:40])])  # measures the disk
    process.files.computed(10**9, 1e-9)
    for _ in range(20):
        process.files.computed(10**9, 1e-9)
    had = process.files.read
    assert outputs(process.write(requests)) == outputs(plain("auto", requests))
    assert process.files.read == had > 0


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {here!r})
import test_prefix_files as tests
tests.prefix_files.SEGMENT = tests.SEGMENT
folder, draw = Path({folder!r}), random.Random(1)
for seed in range({count}):
    have, child = len(list(folder.glob("*/*"))), os.fork()
    if not child:
        try:
            tests.Process("auto", folder).write([tests.asked(tests.prompt(110, seed), 1)])
        finally:
            os._exit(0)
    while len(list(folder.glob("*/*"))) == have:
        if os.waitpid(child, os.WNOHANG)[0]:
            child = 0  # on a slow machine it may have ended before we look
            break
        time.sleep(0.0002)
    if child:
        time.sleep(draw.random() * 0.003)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""


def killed(folder: Path, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Processes that are killed while they write. What they left gives no wrong text and no line."""
    folder.mkdir(exist_ok=True)
    script = KILLED.format(here=str(Path(__file__).parent), folder=str(folder), count=count)
    with Forked(code=script) as process:
        assert process.wait(60 + 10 * count) == 0, process.said
    assert [*folder.glob("*/*")]
    read = 0
    for seed in range(count):
        process, requests = Process("auto", folder), [asked(prompt(110, seed))]
        assert outputs(process.write(requests)) == outputs(plain("auto", requests))
        read += process.files.read
    assert 0 < read <= count * 96
    assert not caplog.records


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kills_while_files_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed(tmp_path, 3, caplog)


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_hundred_kills(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    killed(tmp_path, 200, caplog)


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
        LLM(small_target(), prefix_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "count"), [("20GiB", 20 << 30), ("1.5 kb", 1500), (77, 77), ("12", 12), ("3MiB", 3 << 20)]
)
def test_numbers_of_bytes(text: str | int, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "20 cats", "-3GiB", "1e9"])
def test_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 20GiB"):
        byte_count(text)


def test_states_have_longer_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "OF_STATES", 4 * SEGMENT)
    sizes = {name: Process(name, tmp_path).files.segment for name in ("auto", "hybrid", "native hybrid")}
    assert sizes == {"auto": SEGMENT, "hybrid": 4 * SEGMENT, "native hybrid": 4 * SEGMENT}
