"""One contract for all stores: an entry is whole or absent, bounds are kept, and what others left does no harm."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

import pytest
from filelock import Timeout
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from patience import PATIENCE

from outrider.core import store as module
from outrider.core.files import byte_count, disk_bytes, written_whole
from outrider.core.store import FETCHED, HEAD, PACKS, PREFIXES, TEXTS, Store

KINDS = {
    "prefixes": (PREFIXES, f"{7:016x}/{1:016x}-{{:040x}}.keys"),
    "texts": (TEXTS, f"{7:016x}/{1:016x}-{{:040x}}.texts"),
    "packs": (PACKS, "llama-3.2-{:016x}"),
    "fetched": (FETCHED, "model{}.gguf"),
}
ROOM, DAY = 10**6, 86400.0
each_kind = pytest.mark.parametrize("name", KINDS)


class Shelf:
    """A store of a kind, and entries by number. A pack is a folder of two files, another entry is a file."""

    def __init__(self, name: str, folder: Path, limit: float = ROOM, age: float = float("inf")) -> None:
        self.kind, self.names = KINDS[name]
        self.store = Store(folder, limit, self.kind, age)

    def path(self, number: int) -> Path:
        return self.store.path / self.names.format(number)

    def make(self, number: int, size: int = 1000, error: BaseException | None = None) -> None:
        def write(half: Path) -> None:
            files = [half]
            if self.kind is PACKS:
                half.mkdir()
                files = [half / "a", half / "b"]
            for file in files:
                file.write_bytes(bytes([number]) * (size // len(files)))
                if error is not None:
                    raise error

        self.store.make(self.path(number), write, size)

    def aged(self, number: int, days: float) -> None:
        then = time.time() - days * DAY
        os.utime(self.path(number), (then, then))

    def there(self) -> list[int]:
        return [number for number in range(20) if self.path(number).exists()]


@each_kind
def test_an_entry_is_whole_or_absent(name: str, tmp_path: Path) -> None:
    shelf = Shelf(name, tmp_path / "new")
    for error in (OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt(), ValueError("another content")):
        with pytest.raises(type(error)):
            shelf.make(1, error=error)
        assert not [file for file in tmp_path.rglob("*") if file.is_file() and file.name != ".lock"]
    shelf.make(1)
    shelf.make(1, 2000)  # takes the place of the first
    assert [(e.path, e.bytes) for e in shelf.store.entries()] == [(shelf.path(1), 2000)]
    private = os.stat(tmp_path / "new").st_mode & 0o077 == 0
    assert private == (not shelf.kind.alone) or os.name == "nt"


@each_kind
def test_the_least_recently_used_entries_make_room(name: str, tmp_path: Path) -> None:
    shelf = Shelf(name, tmp_path, limit=4500)
    for number in range(4):
        shelf.make(number)
        shelf.aged(number, 4 - number)
    shelf.store.used([shelf.path(0)])
    shelf.store.flush()
    shelf.make(4)
    assert shelf.there() == [0, 2, 3, 4]
    shelf.make(5, 5000)
    assert shelf.there() == [0, 2, 3, 4], "too large for the store: nothing is removed"
    shelf.aged(4, 0.1)
    smaller = Shelf(name, tmp_path, limit=2500)
    smaller.make(6)
    assert smaller.there() == [0, 6]
    assert smaller.store.bytes == 2000 == sum(e.bytes for e in smaller.store.entries())


@each_kind
def test_what_is_too_old_goes_when_a_store_opens(name: str, tmp_path: Path) -> None:
    shelf = Shelf(name, tmp_path)
    for number in range(2):
        shelf.make(number)
        shelf.aged(number, 20 * number)
    Store.open(tmp_path, ROOM, shelf.kind, 10 * DAY).flush()
    assert shelf.there() == [0]


@each_kind
def test_half_an_entry_of_a_process_that_is_gone_is_removed(name: str, tmp_path: Path) -> None:
    """In its turn a process is alone. Without turns another process may still write: ten minutes tell."""
    shelf = Shelf(name, tmp_path)
    shelf.make(1)
    halves = [shelf.path(1).with_name(f"{shelf.path(1).name}{end}.partial") for end in ("", ".12-34")]
    for half in halves:
        shutil.copytree(shelf.path(1), half) if shelf.path(1).is_dir() else shutil.copy(shelf.path(1), half)
    assert len(shelf.store.entries()) == 1
    Shelf(name, tmp_path).make(2)
    assert [half.exists() for half in halves] == [not shelf.kind.alone] * 2
    for half in halves:
        if half.exists():
            os.utime(half, (1, 1))
    Shelf(name, tmp_path).make(3)
    assert not any(half.exists() for half in halves)
    assert shelf.there() == [1, 2, 3]


@each_kind
def test_what_others_put_into_the_folder_stays(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{7:016x}").mkdir()
    letters = [tmp_path / "to-mother.txt", tmp_path / f"{7:016x}" / "to-father.txt"]
    for letter in letters:
        letter.write_text("Dear")
        os.utime(letter, (1, 1))
    shelf = Shelf(name, tmp_path, limit=1500, age=DAY)
    for number in range(3):
        shelf.make(number)
    assert all(letter.read_text() == "Dear" for letter in letters)
    assert len(shelf.there()) == 1


def test_a_folder_of_two_kinds_is_bounded_for_each_apart(tmp_path: Path) -> None:
    prefixes, texts = Shelf("prefixes", tmp_path, limit=2500), Shelf("texts", tmp_path, limit=1500, age=DAY)
    for number in range(2):
        prefixes.make(number)
        prefixes.aged(number, 5)
    for number in range(3):
        texts.make(number)
    assert (prefixes.there(), texts.there()) == ([0, 1], [2])
    smaller = Shelf("prefixes", tmp_path, limit=1500)
    smaller.make(3)
    assert (smaller.there(), texts.there()) == ([3], [2])


def test_chains_are_forgotten_from_their_ends(tmp_path: Path) -> None:
    """Each file needs those before it, so the last ones go first."""
    shelf = Shelf("prefixes", tmp_path, limit=6500)
    for number in range(6):
        shelf.make(number)
    shelf.store.used(map(shelf.path, (3, 4, 5)))
    shelf.store.used(map(shelf.path, (0, 1, 2)))
    shelf.store.flush()
    for number, rest in ((6, [0, 1, 2, 3, 4]), (7, [0, 1, 2, 3]), (8, [0, 1, 2])):
        shelf.make(number)
        assert [n for n in shelf.there() if n < 6] == rest
        shelf.store.used([shelf.path(number)])
        shelf.store.flush()


@pytest.mark.parametrize("name", ["packs", "fetched"])
def test_one_process_at_a_time_has_the_turn(name: str, tmp_path: Path) -> None:
    first, second = Shelf(name, tmp_path / "new"), Shelf(name, tmp_path / "new")
    with first.store.turn(), first.store.turn(0), pytest.raises(Timeout):
        second.store.turn(0)
    with second.store.turn(0):
        second.make(1)


# -- files with a checksum ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [lambda whole: b"", lambda whole: whole[:-1], lambda whole: whole[:-1] + b"x"],
    ids=["empty", "cut", "changed"],
)
def test_a_damaged_file_is_left_out_with_one_line_and_written_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The state machine below damages files in any way."""
    shelf = Shelf("prefixes", tmp_path)
    file, content = shelf.path(1), bytes(range(100))
    for _ in range(2):
        assert shelf.store.put(file, [content[:30], content[30:]])
        assert shelf.store.read(file, 100) == content
        file.write_bytes(damage(file.read_bytes()))
        assert shelf.store.read(file, 100) is None
        assert not file.exists()
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is damaged or was not written by outrider; it is left out"
    ]


def test_a_file_under_another_name_is_damaged(tmp_path: Path) -> None:
    shelf = Shelf("prefixes", tmp_path)
    shelf.store.put(shelf.path(1), [b"content"])
    shutil.copy(shelf.path(1), shelf.path(2))
    assert shelf.store.read(shelf.path(2), 7) is None
    assert shelf.store.read(shelf.path(1), 8) is None, "another size"


def test_what_cannot_be_read_is_left_out_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf("texts", tmp_path)
    shelf.path(1).mkdir(parents=True)
    assert shelf.store.read(shelf.path(1), 5) is None
    assert "cannot be read" in caplog.text
    assert shelf.path(1).is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_disk_that_takes_nothing_costs_one_line(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf("prefixes", tmp_path)

    def fail(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(module, "written_whole", fail)
        for n in range(3):
            shelf.store.write(shelf.path(n), 4, lambda: [b"text"])
        shelf.store.flush()
    assert shelf.there() == []
    assert len(caplog.records) == 1
    assert os.strerror(number) in caplog.text
    shelf.store.write(shelf.path(1), 4, lambda: [b"text"])
    shelf.store.flush()
    assert shelf.store.read(shelf.path(1), 4) == b"text"


def test_what_is_there_or_waits_is_not_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, copies = Shelf("prefixes", tmp_path), list[int]()

    def content(number: int) -> list[bytes]:
        copies.append(number)
        return [b"12345"]

    def ask(*numbers: int) -> list[int]:
        copies.clear()
        for number in numbers:
            shelf.store.write(shelf.path(number), 5, lambda: content(number))
        return [*copies]

    monkeypatch.setattr(module, "PENDING", 12)
    disk = Event()
    shelf.store.later(disk.wait)
    assert ask(1, 1, 2, 3) == [1, 2], "the disk is late"
    disk.set()
    shelf.store.flush()
    assert ask(1, 2, 3) == [3]
    shelf.store.flush()
    shutil.rmtree(tmp_path)
    assert ask(1) == [1], "the folder was removed"
    shelf.store.flush()
    assert shelf.there() == [1]
    assert os.stat(tmp_path).st_mode & 0o077 == 0 or os.name == "nt"


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the prefix cache cannot use .*file.*--prefix-dir"):
        Store.open(tmp_path / "file", ROOM, PREFIXES)
    with pytest.raises(ValueError, match="memory_disk must be 1 byte or more"):
        Store.open(tmp_path, 0, TEXTS)


# -- threads and processes ------------------------------------------------------------------------------------------------


def test_an_error_of_the_writer_goes_to_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path, ROOM, TEXTS)
    store.later(lambda: 1 // 0)
    store.flush()
    assert "the memory of texts failed" in caplog.text


@each_kind
def test_threads_may_make_the_same_entry(name: str, tmp_path: Path) -> None:
    def make(shelf: Shelf) -> None:
        with shelf.store.turn() if shelf.kind.alone else nullcontext():
            for number in range(5):
                shelf.make(number)

    shelves = [Shelf(name, tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        [*pool.map(make, shelves)]
    assert [e.bytes for e in shelves[0].store.entries()] == [1000] * 5


PROCESS = """
import os, signal, sys, time
from pathlib import Path
from outrider.core.store import PREFIXES, Store
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background ignores it, and so would this process
store = Store(sys.argv[1], 10**9, PREFIXES)
def slowly(half):
    half.write_bytes(b"a part")
    os.write(1, b"half\\n")
    time.sleep(float(sys.argv[2]))
    half.write_bytes(b"the whole")
store.later(store.make, store.path / sys.argv[3], slowly, 9)
"""


def process(folder: Path, seconds: float, file: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, str(folder), str(seconds), file]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_the_end_of_a_process_waits_for_what_is_written(tmp_path: Path) -> None:
    shelf = Shelf("prefixes", tmp_path)
    with process(tmp_path, 0.3, KINDS["prefixes"][1].format(1)) as child:
        assert child.wait(PATIENCE) == 0
    assert shelf.path(1).read_bytes() == b"the whole"


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_nothing_that_counts(by: signal.Signals, tmp_path: Path) -> None:
    shelf = Shelf("prefixes", tmp_path)
    with process(tmp_path, 600, KINDS["prefixes"][1].format(1)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "half\n"
        while child.poll() is None:  # again where the first came before the end, which then waits for the writer
            child.send_signal(by)
            time.sleep(0.1)
    assert shelf.store.entries() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_writes_by_itself_and_does_not_wait_for_its_parent(tmp_path: Path) -> None:
    shelf, disk = Shelf("prefixes", tmp_path), Event()
    shelf.store.later(disk.wait)

    def write() -> None:
        shelf.store.write(shelf.path(1), 4, lambda: [b"text"])
        shelf.store.flush()

    child = multiprocessing.get_context("fork").Process(target=write)
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 0
    disk.set()
    assert shelf.store.read(shelf.path(1), 4) == b"text"


# -- any order of all that can happen -------------------------------------------------------------------------------------


numbers = st.integers(0, 9)


class Life(RuleBasedStateMachine):
    """A store beside a dict of what it must hold: number -> (last use, size). Each use is a second after the one before it."""

    @initialize(limit=st.integers(200, 400))
    def begin(self, limit: int) -> None:
        self.temporary, self.limit = TemporaryDirectory(), limit
        self.now, self.held = 0, dict[int, tuple[int, int]]()
        self.another_process()

    def teardown(self) -> None:
        self.temporary.cleanup()

    def note(self, number: int, size: int) -> None:
        self.now += 1
        self.held[number] = self.now, size
        os.utime(self.shelf.path(number), (10**9 + self.now,) * 2)

    @rule()
    def another_process(self) -> None:
        self.shelf = Shelf("prefixes", Path(self.temporary.name), self.limit)

    @rule(number=numbers, size=st.integers(1, 60))
    def put(self, number: int, size: int) -> None:
        assert self.shelf.store.put(self.shelf.path(number), [bytes([number]) * size])
        there = self.shelf.there()
        gone = [use for n, (use, _) in self.held.items() if n not in there]
        needed = HEAD + size + sum(HEAD + old for _, old in self.held.values())
        self.held = {n: self.held[n] for n in there if n in self.held and n != number}
        assert all(one < use for one in gone for use, _ in self.held.values()), "those that were used longest ago go"
        assert not gone or needed > self.limit, "there was room"
        self.note(number, size)

    @rule(number=numbers)
    def use(self, number: int) -> None:
        self.shelf.store.used([self.shelf.path(number)])
        self.shelf.store.flush()
        if number in self.held:
            assert self.shelf.path(number).stat().st_mtime > 10**9 + self.now
            self.note(number, self.held[number][1])

    @rule(number=numbers, size=st.integers(1, 60))
    def read(self, number: int, size: int) -> None:
        size = self.held.get(number, (0, size))[1]
        content = self.shelf.store.read(self.shelf.path(number), size)
        assert content == (bytes([number]) * size if number in self.held else None)

    @rule(number=numbers, garbage=st.binary(max_size=90))
    def damage(self, number: int, garbage: bytes) -> None:
        if number in self.held:
            self.shelf.path(number).write_bytes(garbage)
            assert self.shelf.store.read(self.shelf.path(number), self.held.pop(number)[1]) is None

    @rule(number=numbers)
    def lose(self, number: int) -> None:
        self.shelf.path(number).unlink(missing_ok=True)
        self.held.pop(number, None)

    @rule(number=numbers, old=st.booleans())
    def crash(self, number: int, old: bool) -> None:
        half = self.shelf.path(number).with_name(f"{self.shelf.path(number).name}.1-2.partial")
        half.parent.mkdir(exist_ok=True)
        half.write_bytes(b"half")
        if old:
            os.utime(half, (1, 1))

    @invariant()
    def it_holds_what_it_must(self) -> None:
        if hasattr(self, "shelf"):
            held = {(self.shelf.path(n), HEAD + size, 10**9 + use) for n, (use, size) in self.held.items()}
            assert {(e.path, e.bytes, e.used) for e in self.shelf.store.entries()} == held
            assert sum(size for _, size, _ in held) <= self.limit


Life.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
test_any_order = Life.TestCase


# -- what it stands on ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"), [("20GiB", 20 << 30), ("1.5 kb", 1500), (77, 77), ("12", 12), ("3MiB", 3 << 20)]
)
def test_numbers_of_bytes(text: str | int, count: int) -> None:
    assert byte_count(text) == count


@pytest.mark.parametrize("text", ["", "many", "20 cats", "-3GiB", "1e9"])
def test_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 20GiB"):
        byte_count(text)


def test_a_folder_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    for content in ("one", "three"):
        with written_whole(tmp_path / "folder") as half:
            half.mkdir()
            (half / "file").write_text(content)
        assert disk_bytes(tmp_path / "folder") == len(content)
    assert [*tmp_path.iterdir()] == [tmp_path / "folder"]
