"""Breaks the files of models, heads, batches and traces, and reads them: `python fuzz.py COUNT SEED FOLDER KIND...`.

Each kind has a process of its own, so that a crash is seen as one. It is a fork of this one, which has imported what is large. A
case that takes a minute ends its process with a stack. The address space may grow by half a gigabyte, and the files are small.
Each case must be read, or refused with an error that `load` documents. FOLDER/KIND gets a file `found`, JSON: how many were read
and refused, and the bad ones. A process that ended early leaves none. `stderr` is what it said, and `case` is its last case.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from light import torch

SECONDS, ROOM = 60, 1 << 29
NUMBERS = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**36, 2**40, 2**63 - 1, 2**63, 2**64 - 1, 10**30, 0.5, 1e300, -1e9)
VALUES = (
    None,
    True,
    False,
    "",
    "x",
    "9",
    [],
    {},
    [[]],
    [1, 2],
    {"a": 1},
    ["x"] * 3,
    float("inf"),
    float("nan"),
    *NUMBERS,
)


def bytes_changed(data: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """A few flips, numbers, cuts or copies in data[:end]; now and then it is cut off."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(max(min(len(out), end or len(out)), 1))
        match rng.randrange(6):
            case 0 | 1:
                out[at : at + 1] = bytes([out[at] ^ 1 << rng.randrange(8)] if out else b"x")
            case 2:
                size = rng.choice((1, 2, 4, 8))
                out[at : at + size] = (int(rng.choice(NUMBERS)) % 2 ** (8 * size)).to_bytes(size, "little")
            case 3:
                at -= at % 4
                out[at : at + 8] = int(
                    rng.choice((0, 1, 2**31, 2**32, 2**62, 2**64 - 1, len(data), 8 * len(data)))
                ).to_bytes(8, "little")
            case 4:
                del out[at : at + rng.choice((1, 4, 8, 64))]
            case _:
                out[at:at] = out[at : at + rng.choice((1, 4, 8, 64))]
    return bytes(out[: rng.randrange(len(out) + 1)]) if rng.random() < 0.1 else bytes(out)


def json_changed(value: Any, rng: random.Random) -> Any:
    """Another value somewhere: eight times it, none, huge, of another type, or gone."""
    places: list[tuple[Any, Any]] = []

    def walk(at: Any) -> None:
        for key in at if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else ():
            places.append((at, key))
            if len(places) < 20_000:
                walk(at[key])

    walk(value)
    if not places:
        return rng.choice(VALUES)
    # Numbers first: most places of a tokenizer are its words.
    numbers = [(at, key) for at, key in places if isinstance(at[key], (int, float))]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, key = rng.choice(numbers if numbers and rng.random() < 0.5 else places)
        with contextlib.suppress(KeyError, IndexError):
            old = at[key]
            match rng.randrange(5):
                case 0 if isinstance(old, (int, float)):
                    at[key] = rng.choice((old * 8, old * 2, old + 1, old - 1, -old, old // 2))
                case 1 if isinstance(old, (list, str)):
                    at[key] = rng.choice((old * 2, old[:-1], old[1:]))
                case 2:
                    del at[key]
                case _:
                    at[key] = rng.choice(VALUES)
    return value


def text_changed(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.25:
        return bytes_changed(data, rng)
    return json.dumps(json_changed(json.loads(data), rng)).encode()


def lines_changed(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            return bytes_changed(data, rng)
        case 1:
            lines[at] = rng.choice(VALUES).__repr__().encode() + b"\n"
        case 2:
            lines[at : at + 1] = rng.choice(([], [lines[at]] * 2, [lines[at], lines[0]]))
        case _:
            lines[at] = text_changed(lines[at], rng).rstrip(b"\n") + b"\n"
    return b"".join(lines)


def weights_changed(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file: most often its header, as JSON."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        return bytes_changed(data, rng, 8 + length)
    table = json.dumps(json_changed(json.loads(data[8 : 8 + length]), rng)).encode()
    return len(table).to_bytes(8, "little") + table + data[8 + length :]


def gguf_changed(data: bytes, rng: random.Random) -> bytes:
    return bytes_changed(data, rng, data.find(b"token_embd.weight") + 600 if rng.random() < 0.9 else None)


# -- the kinds: what a sound folder holds, how a file is changed, and who reads it -------------------------------------------


def _words() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE({**{f"w{i}": i for i in range(95)}, "w": 95, "1": 96}, [("w", "1")], unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])  # pyright: ignore
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w5", chat_template="{{ messages }}")


def _run(loaded: Any) -> None:
    """A forward of a few tokens, of the first again, and a chain of drafts."""
    from outrider.models.base import Chain
    from outrider.models.nodes import Nodes

    model = loaded.model
    cache = model.new_cache(1, 32)
    tokens = torch.tensor([[1, model.vocab_size - 1, 0, model.vocab_size // 2]])
    assert model.forward(Nodes(tokens, cache, [0])).logits.shape == (1, 4, model.vocab_size)
    if model.has_draft_chains:
        model.draft_chains(cache, [Chain(0, [1, 2], 3)])
    if loaded.tokenizer is not None:
        loaded.tokenizer.decode(loaded.tokenizer("w1 w2 x")["input_ids"][:50])


def _make_folder(folder: Path) -> None:
    from architectures import tiny

    tiny("llama").bfloat16().save_pretrained(folder)
    _words().save_pretrained(folder)


def _load(folder: Path) -> None:
    from outrider.models.load import load

    _run(load(folder))


def _make_pack(folder: Path) -> None:
    from outrider.models.load import pack
    from outrider.models.packs import folder as packs

    packs.checksum = lambda t: 0  # whoever changes a tensor can change its checksum, too
    source = folder.with_name("source")
    _make_folder(source)
    pack(source, folder, quantization="int8")
    shutil.rmtree(source)


def _make_gguf(folder: Path) -> None:
    from architectures import tiny
    from gguf_files import tokenizer_metadata, write_gguf

    folder.mkdir()
    write_gguf(tiny("llama"), folder / "model.gguf", "Q8_0", metadata=tokenizer_metadata(_words(), "gpt-2"))


def _load_gguf(folder: Path) -> None:
    from outrider.models.load import load

    _run(load(folder / "model.gguf"))


def _make_tokenizer(folder: Path) -> None:
    _words().save_pretrained(folder)


def _load_tokenizer(folder: Path) -> None:
    from outrider.models.tokenizer import of_folder

    made = of_folder(str(folder))
    made.decode(made("w1 w2 x")["input_ids"][:50])


def _make_head(name: str, folder: Path) -> None:
    from heads import GOLDEN

    shutil.copytree(GOLDEN / name, folder)


def _load_eagle(folder: Path) -> None:
    from outrider.drafters.heads.eagle import eagle_model, read_eagle
    from outrider.models.base import Chain

    target = _target()
    head = read_eagle(folder, target)
    model = eagle_model(head, target.model, 64)
    if model.has_draft_chains:
        wide = len(model.taps) * head.config.target_hidden_size
        model.draft_chains(model.new_cache(1, 32), [Chain(0, [1, 2], 3, features=torch.zeros(2, wide))])


def _load_block(folder: Path) -> None:
    from outrider.drafters.heads.block import read_block

    read_block(folder, _target())


def _target(made: list[Any] = []) -> Any:  # noqa: B006
    from heads import small_target

    if not made:
        made.append(small_target())
    return made[0]


MADE_WITH = {"model": "m", "seed": 1}


def _make_journal(folder: Path) -> None:
    from outrider.serve.batch import Journal

    folder.mkdir()
    journal = Journal(folder / "out.jsonl", MADE_WITH)
    for i in range(6):
        journal.add(f"{i:016x}", {"id": f"batch_req_{i}", "response": {"body": {"text": "x" * i}}})
    journal.close()


def _load_journal(folder: Path) -> None:
    from outrider.serve.batch import Journal

    journal = Journal(folder / "out.jsonl", MADE_WITH)
    for key in (f"{i:016x}" for i in range(6)):
        if key in journal:
            journal.row(key)
    journal.close()


def _make_trace(folder: Path) -> None:
    from helpers import request
    from traces import SAMPLED, loop, record

    folder.mkdir()
    record(folder / "run.jsonl", loop("random", width=2), [request([1, 2, 3], SAMPLED), request([4, 5], SAMPLED)])


def _load_trace(folder: Path) -> None:
    from outrider_lab.traces import read

    trace = read(folder / "run.jsonl")
    _ = trace.metrics, trace.acceptance, trace.seconds, [t.tokens for t in trace.texts.values()]


Change = Callable[[bytes, random.Random], bytes]
KINDS: dict[str, tuple[Callable[[Path], None], dict[str, Change], Callable[[Path], None]]] = {
    "safetensors": (_make_folder, {"model.safetensors": weights_changed, "config.json": text_changed}, _load),
    "gguf": (_make_gguf, {"model.gguf": gguf_changed}, _load_gguf),
    "tokenizer": (
        _make_tokenizer,
        {"tokenizer.json": text_changed, "tokenizer_config.json": text_changed},
        _load_tokenizer,
    ),
    "pack": (
        _make_pack,
        {"outrider_pack.json": text_changed, "packed.safetensors": weights_changed, "config.json": text_changed},
        _load,
    ),
    "head": (
        partial(_make_head, "eagle3"),
        {"model.safetensors": weights_changed, "config.json": text_changed},
        _load_eagle,
    ),
    "block": (
        partial(_make_head, "dflash"),
        {"model.safetensors": weights_changed, "config.json": text_changed},
        _load_block,
    ),
    "journal": (_make_journal, {"out.jsonl.partial": lines_changed}, _load_journal),
    "trace": (_make_trace, {"run.jsonl": lines_changed}, _load_trace),
}


def main(kind: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    make, changes, read = KINDS[kind]
    warnings.simplefilter("ignore")
    sound = folder / "sound"
    make(sound)
    files = {name: (sound / name).read_bytes() for name in changes}
    read(sound)  # it is sound, and what is imported lazily is imported
    for name, data in files.items():
        (sound / name).write_bytes(data)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, used + ROOM))
    found: dict[str, Any] = {"read": 0, "refused": 0, "bad": []}
    for number in range(count):
        (folder / "case").write_text(f"{kind} {seed} {number}")
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        rng = random.Random(f"{kind} {seed} {number}")
        name = rng.choice([*changes])
        (sound / name).write_bytes(changes[name](files[name], rng))
        try:
            read(sound)
            found["read"] += 1
        except BaseException as error:  # Rust's panics are no Exception
            text = f"{type(error).__name__}: {error}"
            if (
                isinstance(error, (ValueError, OSError))
                and "allocate" not in text
                and not isinstance(error, UnicodeError)
            ):
                found["refused"] += 1
            else:
                found["bad"].append(f"{kind} {seed} {number} ({name}): {text[:300]}")
        (sound / name).write_bytes(files[name])
        for extra in {*sound.iterdir()} - {sound / n for n in files}:
            if extra.suffix == ".partial" and kind != "journal":
                extra.unlink()
    faulthandler.cancel_dump_traceback_later()
    return found


def apart(kind: str, count: int, seed: int, folder: Path) -> None:
    """The work of the process of one kind."""
    with (folder / "stderr").open("wb") as said:
        os.dup2(said.fileno(), 2)
    (folder / "found").write_text(json.dumps(main(kind, count, seed, folder)))


if __name__ == "__main__":
    import architectures  # noqa: F401
    import heads  # noqa: F401

    forks = multiprocessing.get_context("fork")
    for kind in sys.argv[4:]:
        own = Path(sys.argv[3]) / kind
        own.mkdir()
        process = forks.Process(target=apart, args=(kind, int(sys.argv[1]), int(sys.argv[2]), own))
        process.start()
        process.join()
