"""The input and the journal of a batch: broken lines are named, and a torn file loses no whole answer."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from outrider.serve.batch import Journal, line_seed, read, scan
from outrider.serve.options import BatchOptions
from outrider_ray.cluster import join

MADE = {"model": "m", "seed": 0}


def line(name: object, url: str = "/v1/completions", **more: object) -> bytes:
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": {"prompt": "x"}, **more}).encode()


def test_each_broken_line_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    given = [
        (b"\xef\xbb\xbf" + line("first"), None, ""),  # some editors write a byte order mark
        (b'{"custom_id": "cut", ', "invalid_json", "not JSON"),
        (b'{"custom_id": "\xff"}', "invalid_json", "not UTF-8"),
        (b"   ", "blank", ""),
        (b"[1, 2]", "invalid_line", "one JSON object"),
        (b"[" * 100_000, "invalid_json", "not JSON"),
        (line(None), "missing_custom_id", "found by it"),
        (line(7), "missing_custom_id", "found by it"),
        (line("\ud800"), "invalid_custom_id", "surrogate"),
        (line("get", method="GET"), "invalid_method", 'got "GET"'),
        (line("embed", url="/v1/embeddings"), "invalid_url", "/v1/chat/completions"),
        (line("list", body=[]), "invalid_body", "would be sent to /v1/completions"),
        (line("first", body={"prompt": "other"}), "duplicate_custom_id", "that of line 1"),
        (line("é last"), None, ""),
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(raw for raw, *_ in given))  # no newline at the end
    found = {each.number: each for each in scan(path)}
    for number, (_, code, words) in enumerate(given, 1):
        if code == "blank":
            assert number not in found
            continue
        assert found[number].code == code
        if code is not None:
            row = found[number].row
            assert (row["response"], row["error"]["code"]) == (None, code)
            assert row["error"]["message"].startswith(f"line {number}: ")
            assert words in row["error"]["message"]
    good = [each for each in found.values() if each.code is None]
    assert [(r.custom_id, r.body) for r in read(path, good)] == [
        ("first", {"prompt": "x"}),
        ("é last", {"prompt": "x"}),
    ]
    path.write_bytes(path.read_bytes().replace(b"last", b"lost"))
    with pytest.raises(ValueError, match="changed while it was read"):
        list(read(path, good))


def test_whatever_byte_a_kill_cuts_at_whole_answers_stay_and_none_is_twice(tmp_path: Path) -> None:
    path, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(b"\n".join(line(name) for name in "abc") + b"\nbroken\n")
    lines = scan(path)
    rows = {each.key: {"custom_id": each.custom_id, "text": "äöü\n" * number} for number, each in enumerate(lines)}
    first = Journal(out, MADE)
    for count, each in enumerate((lines[2], lines[0]), 1):  # answers end in any order
        first.add(each.key, rows[each.key])
        assert first.path.read_bytes().count(b"\n") == 1 + count  # a process that is killed now keeps it
    with pytest.raises(ValueError, match="an answer already"):
        first.add(lines[0].key, {})
    with pytest.raises(BlockingIOError, match="another process writes"):
        Journal(out, MADE)
    first.close()
    whole = first.path.read_bytes()
    ends = [at for at in range(len(whole) + 1) if at == 0 or whole[at - 1 : at] == b"\n"]
    for cut in [*range(0, len(whole), 23), *ends, len(whole) - 1]:
        first.path.write_bytes(whole[:cut])
        journal = Journal(out, MADE)
        kept = [key for key in rows if key in journal]
        assert len(kept) == len(journal) == max(0, sum(end <= cut for end in ends[1:]) - 1)
        assert all(journal.row(key) == rows[key] for key in kept)
        for each in lines[:3]:
            if each.key not in journal:
                journal.add(each.key, rows[each.key])
        journal.close()
        journal = Journal(out, MADE)  # killed once more: nothing after the first cut is lost
        assert [key for key in rows if key in journal] == [each.key for each in lines[:3]]
        assert not out.exists()  # until it is complete
        journal.finish(lines)
        written = [json.loads(x) for x in out.read_bytes().splitlines()]
        assert written == [*(rows[each.key] for each in lines[:3]), lines[3].row]
        assert not journal.path.exists()
        out.unlink()


def test_a_journal_of_other_settings_and_a_finished_output_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    Journal(out, MADE).close()
    with pytest.raises(ValueError, match=r"begun with model='m'; start with that again"):
        Journal(out, {**MADE, "model": "other"})
    Journal(out, MADE).close()
    for other in ("[1]\n", "something else\n", "something else"):
        (tmp_path / "out.jsonl.partial").write_text(other)
        with pytest.raises(ValueError, match="delete it to start again"):
            Journal(out, MADE)
        assert (tmp_path / "out.jsonl.partial").read_text() == other
    (done := tmp_path / "done.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="is there already"):
        Journal(done, MADE)
    with pytest.raises(FileNotFoundError, match="no folder"):
        Journal(tmp_path / "none" / "out.jsonl", MADE)


def test_what_changes_a_text_is_in_the_journal_and_drafters_are_not() -> None:
    suffix, draft = ({"method": method} for method in ("suffix", "draft_model"))
    one = BatchOptions(model="m", speculative_config=suffix, max_num_seqs=2)
    two = one.with_(speculative_config=draft, max_num_seqs=4)
    assert one.of_texts == two.of_texts
    block = [one.with_(speculative_config={**config, "verifier": "block"}).of_texts for config in (suffix, draft)]
    assert block[0] != block[1]
    for other in ({"dtype": "bfloat16"}, {"seed": 1}, {"chat_template": "x"}, {"max_model_len": 64}):
        assert one.with_(**other).of_texts != one.of_texts


def test_seeds_of_lines_differ_and_do_not_move() -> None:
    assert line_seed(0, "a") == 3820132076998346
    assert len({line_seed(seed, name) for seed in range(3) for name in ("a", "b", "ä")}) == 9
    assert all(0 <= line_seed(s, "x") < 2**53 for s in range(50))


@pytest.mark.parametrize(("address", "said"), [("local", "or leave out --ray"), ("auto", "or take --ray local")])
def test_a_cluster_that_does_not_start_is_one_line(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nmore")  # a bare one, as Ray raises it

    ray = ModuleType("ray")
    ray.init, ray.is_initialized = init, lambda: False  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(ConnectionError, match=f"timed out during startup.*{said}"):
        join(address, "--ray", ", or leave out --ray")


@pytest.mark.parametrize(
    "bad", [b"5\n", b'{"row": {}}\n', b'{"key": 3, "row": {}}\n', b'{"key": "a", "row": []}\n', b"{]\n"]
)
def test_a_broken_line_of_the_journal_is_named(bad: bytes, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "out.jsonl", MADE)
    for key in ("a" * 16, "b" * 16):
        journal.add(key, {"id": key})
    journal.close()
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join([*lines[:2], bad, *lines[2:]]))
    with pytest.raises(ValueError, match=r"out.jsonl.partial, line 3: this is no answer of a batch. Delete the line"):
        Journal(tmp_path / "out.jsonl", MADE)
    journal.path.write_bytes(b"".join(lines))  # as the message says
    assert len(Journal(tmp_path / "out.jsonl", MADE)) == 2


def test_a_full_disk_names_the_file_and_the_same_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal(tmp_path / "out.jsonl", MADE)
    journal.add("a" * 16, {"id": "a"})
    monkeypatch.setattr("outrider.core.jsonl.JsonLines.add", full)
    with pytest.raises(OSError, match=r"No space left on device; .* run the same command again: .*out.jsonl.partial"):
        journal.add("b" * 16, {"id": "b"})
    journal.close()
    assert "a" * 16 in Journal(tmp_path / "out.jsonl", MADE)
