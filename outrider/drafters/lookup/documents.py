"""Makes a corpus of what a user gives: files, folders, texts and token ids. Texts go through the target's tokenizer."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.drafters.lookup.corpus import Corpus

Entry = str | Path | Mapping[str, str] | Sequence[int]
_PART = 2**20  # characters of a long file that are encoded at a time
_ZIP = b"PK\x03\x04"  # the first bytes of a saved corpus


def fingerprint(tokenizer: Any | None) -> str:
    """A short name of a tokenizer: tokenizers with equal vocabularies have equal names. "" without one."""
    if tokenizer is None:
        return ""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def read_corpus(entries: Entry | Sequence[Entry], tokenizer: Any | None, vocab_size: int, limit: int = 2**22) -> Corpus:
    """A corpus of a file, a folder (all text files in it), a saved corpus, {"text": ...}, token ids, or a list of these.

    Stops at `limit` tokens and warns about what was left out. Raises ValueError, with the name of the entry, if it is empty,
    missing, binary or not UTF-8. In a folder, files that are not text are skipped.
    """
    many = _entries(entries)
    if not many:
        raise ValueError("the corpus is an empty list; name a file or a folder, or leave it out")
    mark = fingerprint(tokenizer)
    corpus, documents, room, left_out = Corpus(limit, mark), list[list[int]](), limit, list[str]()
    for at, entry in enumerate(many):
        if isinstance(entry, (str, Path)) and _is_saved(Path(entry)):
            saved = Corpus.load(entry, mark, limit)
            for segment in saved.segments:
                _check(segment.vocabulary, vocab_size, repr(str(entry)))
            corpus.segments += saved.segments
            corpus.limit = max(limit, len(corpus))
            room -= len(saved)
            continue
        some = False
        for name, ids in _token_lists(entry, tokenizer, vocab_size):
            some = some or bool(ids)
            if len(ids) >= room:  # the border after it takes one
                left_out = [name, *map(_name, many[at + 1 :])]
                ids = ids[: max(room - 1, 0)]
            documents.append(ids)
            room -= len(ids) + 1
            if left_out:
                break
        if left_out:
            break
        if not some:
            raise ValueError(f"the corpus {_name(entry)} is empty: it has no text to draft from; leave it out")
    corpus.add(*documents)
    if left_out:
        warnings.warn(
            f"the corpus is full at {limit:,} tokens; cut or left out: from {left_out[0]} on"
            + (f", and {', '.join(left_out[1:4])}" if left_out[1:] else "")
            + "; raise corpus_tokens in speculative_config to take it in",
            RuntimeWarning,
            stacklevel=2,
        )
    return corpus


def read_texts(
    entries: Entry | Sequence[Entry], tokenizer: Any | None, vocab_size: int
) -> Iterator[tuple[str, list[int]]]:
    """(name, token ids) of each text of what `read_corpus` takes, long files in parts. A saved corpus is not a text.

    Raises ValueError, with the name of the entry, for what cannot be read.
    """
    for entry in _entries(entries):
        yield from _token_lists(entry, tokenizer, vocab_size)


def _entries(given: Any) -> list[Any]:
    return [given] if isinstance(given, (str, Path, Mapping)) or _is_ids(given) else list(given)


def _token_lists(entry: Any, tokenizer: Any | None, vocab_size: int) -> Iterator[tuple[str, list[int]]]:
    for name, part in _parts(entry):
        ids = _encode(part, tokenizer, name) if isinstance(part, str) else list(part)
        _check(ids, vocab_size, name)
        yield name, ids


def _is_ids(entry: Any) -> bool:
    return isinstance(entry, Sequence) and bool(entry) and all(isinstance(t, int) for t in entry)


def _is_saved(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".npz" or file.read(4) == _ZIP


def _name(entry: Any) -> str:
    if isinstance(entry, (str, Path)):
        return repr(str(entry))
    return "given as text" if isinstance(entry, Mapping) else "given as token ids"


def _parts(entry: Any) -> Iterator[tuple[str, str | Sequence[int]]]:
    """(name, text or ids) of one entry, long files in parts."""
    if isinstance(entry, Mapping):
        if set(entry) != {"text"} or not isinstance(entry["text"], str):
            raise ValueError(f'a corpus given as text is {{"text": "..."}}, got keys {sorted(entry)}')
        yield _name(entry), entry["text"]
    elif not isinstance(entry, (str, Path)):
        if not _is_ids(entry):
            raise ValueError(f"a corpus given as token ids is a list of integers, got {str(entry)[:60]}")
        yield _name(entry), entry
    elif (path := Path(entry)).is_dir():
        inside = sorted(p for p in path.rglob("*") if p.is_file())
        for file in inside:
            hidden = any(part.startswith((".", "__pycache__")) for part in file.relative_to(path).parts)
            if not hidden:
                try:
                    yield from _text(file)
                except UnicodeDecodeError:
                    continue
    elif path.is_file():
        try:
            yield from _text(path)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"the corpus {str(path)!r} is not UTF-8 text ({error.reason}): a binary file, or another encoding; "
                f"convert it, e.g. iconv -f latin1 -t utf-8 {path.name} > text.txt"
            ) from None
    else:
        raise ValueError(
            f'there is no file or folder {str(path)!r} for the corpus; to give a text itself, write {{"text": "..."}}'
        )


def _text(path: Path) -> Iterator[tuple[str, str]]:
    """A file in parts that end at the end of a line. Raises UnicodeDecodeError if it is not text."""
    with path.open(encoding="utf-8") as file:
        while part := file.read(_PART):
            part += file.readline(_PART)
            if "\0" in part:
                raise UnicodeDecodeError("utf-8", b"\0", part.index("\0"), part.index("\0") + 1, "a zero byte")
            yield repr(str(path)), part


def _encode(text: str, tokenizer: Any | None, name: str) -> list[int]:
    if tokenizer is None:
        raise ValueError(f"the corpus {name} is text and this model has no tokenizer; give token ids, e.g. [17, 4, 9]")
    # verbose=False: no warning about the length
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _check(ids: Sequence[int], vocab_size: int, name: str) -> None:
    wrong = [t for t in (min(ids, default=0), max(ids, default=0)) if not 0 <= t < vocab_size]
    if wrong:
        raise ValueError(f"the corpus {name} holds token {wrong[0]}, outside the target's {vocab_size} tokens")
