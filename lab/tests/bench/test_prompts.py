"""Prompts of a measurement: every form that is read, and what is said of broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider_lab.bench.prompts import SETS, Prompt, read


def written(tmp_path: Path, text: str, name: str = "p.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return str(path)


def test_prompts_and_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Why?"}]
    lines = [
        {"prompt": "a", "category": "x", "id": "first", "max_tokens": 7, "prediction": "b"},
        {"messages": messages, "temperature": 1},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "W"}, {"type": "text", "text": "hy?"}]}]},
    ]
    file = written(tmp_path, "\ufeff" + "\n\n".join(json.dumps(x) for x in lines) + "\n")
    prompts, notes = read(file)
    assert prompts[0] == Prompt("first", "x", "a", 7, "b")
    assert prompts[1] == Prompt("3", "all", messages)
    assert prompts[2].content == messages
    assert [a.text for a in prompts] == ["a", "Why?", "Why?"]
    assert notes == [f"'temperature' in 1 line of {file} is not used"]
    assert read(file, 1)[0] == prompts[:1]


def test_openais_batch_format(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 5, "top_p": 0.5}
    body["prediction"] = {"type": "content", "content": "Ho"}
    line = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    prompts, notes = read(written(tmp_path, json.dumps(line)))
    assert prompts == [Prompt("r-1", "all", [{"role": "user", "content": "Hi"}], 5, "Ho")]
    assert "'top_p' in 1 line" in notes[0]


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    prompts, _ = read(written(tmp_path, "one {\r\n\n  two\n", "p.txt"))
    assert [(a.id, a.content) for a in prompts] == [("1", "one {"), ("3", "  two")]


@pytest.mark.parametrize("name", SETS)
def test_sets_come_along(name: str) -> None:
    prompts, notes = read(name)
    assert len(prompts) >= 12
    assert len({a.category for a in prompts}) > 1
    assert not notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts; a correct line is"),
        ("\n\n", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ("[1]", "line 1: a line must be an object, got a list"),
        ("{}", "line 1: it has no prompt and no messages"),
        ('{"prompt": "a", "messages": []}', "line 1: it has both"),
        ('{"prompt": ""}', "line 1: the prompt must be a text that is not empty, got an empty text"),
        ('{"prompt": [1, 2]}', "got a list"),
        ('{"messages": []}', "messages must be a list that is not empty"),
        ('{"messages": ["hi"]}', "message 0 has no role"),
        ('{"messages": [{"role": "user", "content": null}]}', "the content of message 0 must be text, got null"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be an integer of at least 1, got 0"),
        ('{"prompt": "a", "prediction": 3}', "the prediction must be text, got 3"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}', "line 2: line 1 already has the id '1'"),
        ('{"body": {"input": "embed me"}}', "line 1: it has no prompt"),
        (r'{"prompt": "\ud800"}', "line 1: the prompt holds half of a surrogate pair"),
        ("[" * 100_000, "line 1: not JSON"),
    ],
)
def test_broken_files_are_told_by_line_and_reason(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ValueError) as caught:
        read(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(file)


def test_not_text_and_not_there(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n\xff\n')
    with pytest.raises(ValueError, match="line 2: this is not UTF-8"):
        read(str(file))
    with pytest.raises(FileNotFoundError, match=r"did you mean 'code'.*or a set: code"):
        read("cod")
