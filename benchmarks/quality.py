"""What rounding does to a model: perplexity, and how far its distributions move, by precision.

    python -m benchmarks.quality model.gguf --quantization int8 int4 --kv-cache-dtype auto int8
    python -m benchmarks.quality FOLDER --dtype float32 bfloat16 --texts code chat my-own.txt --out quality.json

The first precision of a model is the reference of its others: put float32 first to measure against it. Texts are read once, a
chunk of tokens at a time, as a prompt is. Perplexity is exp of the mean of -log p(token | the tokens before it). `divergence` is
the mean of KL(reference || this), over the reference's 1,000 likeliest tokens and the rest as one. `same` is the share of
positions at which the likeliest token is the reference's. `nats` is the difference of the mean of -log p, with its standard
error over the tokens.

    python -m benchmarks.quality model.gguf --dtype float32 auto --quantization int8 int4 --llama llama-perplexity

With --needle, a number is hidden at nine depths of a text of so many tokens, and asked for at its end. `found` is how many of
them the model writes again.

With --llama, llama.cpp's tool reads the same file. All sides then read the texts as that tool does: joined, in windows of
--length tokens, and only the second half of each window counts.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.real.journal import identity
from benchmarks.ruler import markdown, parser, save
from benchmarks.texts import lines, spec_bench
from outrider.core.sampling import largest
from outrider.core.types import Array
from outrider.models.base import LanguageModel
from outrider.models.cache import KV_CACHE_DTYPES, SlotCache
from outrider.models.dtypes import DTYPES, QUANTIZATIONS
from outrider.models.load import load
from outrider.models.nodes import Nodes

KEPT = 1000  # likeliest tokens of the reference that are compared one by one
CHUNK = 64
HEAD = ["weights", "keys and values", "tokens", "perplexity", "nats over the reference", "divergence", "same", "found"]
DEPTHS = 9


class Reading(NamedTuple):
    """What a model makes of a text. One element per predicted token.

    Args:
        loss: -log p(token).
        best: the likeliest token.
        top: log p of tokens `ids` [token, KEPT].
        ids: the tokens that are kept.
    """

    loss: Array
    best: Array
    top: Array
    ids: Array


def code(count: int) -> list[str]:
    """The first `count` functions of HumanEval that are kept here, with their solutions."""
    return [line["prompt"] + line["canonical_solution"] for line in lines("humaneval")[:count]]


def chat(count: int) -> list[str]:
    """The first `count` long prompts of Spec-Bench: articles to summarise, and passages that answer a question."""
    return [line["turns"][0] for line in spec_bench("summarization", "rag")[:count]]


def texts(names: Sequence[str], count: int) -> list[str]:
    """The texts of "code", of "chat", or of text files. Raises FileNotFoundError for a file that is not there."""
    kinds = {"code": code, "chat": chat}
    return [t for n in names for t in (kinds[n](count) if n in kinds else [Path(n).read_text(encoding="utf-8")])]


def read(model: LanguageModel, ids: Sequence[int], kv_cache_dtype: str, top: Array | None = None) -> Reading:
    """Read a text.

    Args:
        model: that reads it.
        ids: its tokens.
        kv_cache_dtype: of the keys and values.
        top: int64 [token, KEPT], whose log-probabilities are kept; None is those of the likeliest.
    """
    cache, parts = SlotCache(1, len(ids), kv_cache_dtype), list[Reading]()
    for start in range(0, len(ids) - 1, CHUNK):
        end = min(start + CHUNK, len(ids) - 1)
        logits = model.forward(Nodes(np.array([ids[start:end]]), cache, [0])).logits[0].astype(np.float64)
        cache.commit([0], [range(end - start)])
        logp = logits - logits.max(-1, keepdims=True)
        logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
        wanted = np.array(ids[start + 1 : end + 1])
        best = largest(logp, min(KEPT, logp.shape[1]))[0] if top is None else top[start:end]
        loss, kept = -logp[np.arange(end - start), wanted], np.take_along_axis(logp, best, 1)
        parts.append(Reading(loss, logp.argmax(-1), kept, best))
    return Reading(*map(np.concatenate, zip(*parts, strict=True)))


def needles(model: LanguageModel, tokenizer: Any, kv_cache_dtype: str, length: int) -> int:
    """How many of DEPTHS numbers, each hidden in a text of `length` tokens, are the likeliest continuation at its end."""
    text, hits = tokenizer("\n\n".join(code(10**6)))["input_ids"][:length], 0
    for depth in range(DEPTHS):
        hint = "\n# The secret number is"
        number = 1_000_000 * (depth + 1) + 871_234 * (depth + 3) % 1_000_000
        asked, told = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (hint, f"{hint} {number}"))
        at = len(text) * depth // DEPTHS
        ids, cache = [*text[:at], *told, *text[at:]], SlotCache(1, 2 * length, kv_cache_dtype)
        for start in range(0, len(ids), 256):
            part = ids[start : start + 256]
            model.forward(Nodes(np.array([part]), cache, [0]), want="none")
            cache.commit([0], [range(len(part))])
        best = model.forward(Nodes(np.array([told]), cache, [0])).logits[0].argmax(-1).tolist()
        hits += best[len(asked) - 1 : -1] == told[len(asked) :]
    return hits


def windows(ids: Sequence[int], length: int, first: int | None) -> list[list[int]]:
    """The whole windows of a text, as llama.cpp's tool makes them. first: replaces the first token of each, if not None."""
    cut = [list(ids[n : n + length]) for n in range(0, len(ids) - length + 1, length)]
    return cut if first is None else [[first, *window[1:]] for window in cut]


def second_half(reading: Reading, length: int) -> Reading:
    """What counts of a window of so many tokens."""
    return Reading(*(part[length // 2 :] for part in reading))


def llama_perplexity(program: Path, model: str, text: str, length: int) -> dict[str, float]:
    """Perplexity of a text by llama.cpp's tool, and its standard error, in nats. Raises RuntimeError if it prints none."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        window = ["-c", str(length), "-b", str(length)]
        command = [str(program), "-m", model, "-f", file.name, *window, "--ppl-output-type", "0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = re.search(r"PPL = ([0-9.]+) \+/- ([0-9.]+)", done.stdout + done.stderr)
    if printed is None:
        raise RuntimeError(f"{program} printed no perplexity: {done.stderr[-400:]}")
    perplexity, error = map(float, printed.groups())
    return {"perplexity": perplexity, "error": error / perplexity}


def divergence(reference: Array, other: Array) -> Array:
    """KL(reference || other) of each position, from log-probabilities [token, KEPT] of the same tokens, the rest as one."""
    rest = [np.log(np.maximum(1 - np.exp(logp).sum(-1), 1e-12)) for logp in (reference, other)]
    return (np.exp(reference) * (reference - other)).sum(-1) + np.exp(rest[0]) * (rest[0] - rest[1])


def compared(readings: Sequence[Reading], references: Sequence[Reading]) -> dict[str, Any]:
    """The figures of a precision, over all texts."""
    loss = np.concatenate([r.loss for r in readings])
    over = loss - np.concatenate([r.loss for r in references])
    moved = np.concatenate([divergence(a.top, b.top) for a, b in zip(references, readings, strict=True)])
    same = np.concatenate([a.best == b.best for a, b in zip(references, readings, strict=True)])
    return {
        "tokens": len(loss),
        "perplexity": math.exp(float(loss.mean())),
        "nats": float(over.mean()),
        "error": float(over.std(ddof=1)) / math.sqrt(len(loss)),
        "divergence": float(moved.mean()),
        "same": float(same.mean()),
    }


def measure(
    model: str,
    weights: Sequence[str],
    cells: Sequence[str],
    names: Sequence[str],
    count: int,
    length: int,
    llama: Path | None = None,
    needle: int = 0,
) -> Iterator[dict[str, Any]]:
    """A record for each precision of weights, and of keys and values. The first is the reference.

    Args:
        model: a folder, a GGUF file, a hub name or a built-in model.
        weights: names of a dtype or a quantization.
        cells: kinds of keys and values.
        names: of texts.
        count: texts of a kind, at most.
        length: tokens of a text, at most.
        llama: the tool that reads them, too; all then read windows.
        needle: tokens of the text in which numbers are hidden, 0 for none.
    """
    references, words, name = list[Reading](), texts(names, count), {"model": Path(model).name}
    for kind in weights:
        precision: dict[str, Any] = {"quantization" if kind in QUANTIZATIONS else "dtype": kind}
        loaded = load(model, **precision)
        if loaded.tokenizer is None:
            raise ValueError(f"{model} has no tokenizer, so no text can be read; give a model with one")
        ids = [loaded.tokenizer(text)["input_ids"][:length] for text in words]
        if llama is not None:
            whole, bos = loaded.tokenizer("\n\n".join(words))["input_ids"], loaded.tokenizer.bos_token_id
            ids = windows(whole, length, bos if whole[0] == bos else None)
        for cell in cells:
            tops = [r.ids for r in references] or [None] * len(ids)
            readings = [read(loaded.model, t, cell, top) for t, top in zip(ids, tops, strict=True)]
            references = references or readings
            both = readings, references
            if llama is not None:
                both = tuple([second_half(r, length) for r in some] for some in both)
            record = {**name, "weights": loaded.weights, "kv_cache_dtype": cell, **compared(*both)}
            hits = needles(loaded.model, loaded.tokenizer, cell, needle) if needle else None
            yield record | ({"found": hits} if llama is None else {})
        del loaded
    if llama is not None:
        yield {**name, "weights": "llama.cpp", **llama_perplexity(llama, model, "\n\n".join(words), length)}


def row(record: dict[str, Any]) -> list[str]:
    if record["weights"] == "llama.cpp":
        return ["llama.cpp", "", "", f"{record['perplexity']:.4f}", *[""] * 4]
    return [
        record["weights"],
        record["kv_cache_dtype"],
        f"{record['tokens']:,}",
        f"{record['perplexity']:.4f}",
        f"{record['nats']:+.5f} ± {record['error']:.5f}",
        f"{record['divergence']:.2e}",
        f"{record['same']:.2%}",
        "" if record.get("found") is None else f"{record['found']} of {DEPTHS}",
    ]


def table(records: Sequence[dict[str, Any]]) -> str:
    """The records of all models, as Markdown."""
    rows = [[record["model"], *row(record)] for record in records]
    width = None if any(line[-1] for line in rows) else -1  # without --needle nothing was hidden
    return markdown(["model", *HEAD][:width], [line[:width] for line in rows])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("models", nargs="+", metavar="MODEL", help="a folder, GGUF file, hub name or built-in model")
    options.add_argument(
        "--dtype", nargs="+", choices=("auto", *DTYPES), default=["auto"], help="weights kept as these"
    )
    options.add_argument("--quantization", nargs="+", choices=QUANTIZATIONS, default=[], help="and in these precisions")
    options.add_argument("--kv-cache-dtype", nargs="+", choices=list(KV_CACHE_DTYPES), default=["auto"])
    options.add_argument("--texts", nargs="+", default=["code"], help="code, chat, or text files")
    options.add_argument("--count", type=int, default=20, help="texts of a kind, at most")
    options.add_argument("--length", type=int, default=400, help="tokens of a text, at most")
    options.add_argument("--needle", type=int, default=0, help="tokens of a text in which a number is hidden; 0: none")
    options.add_argument("--llama", type=Path, help="llama.cpp's llama-perplexity, which reads the same GGUF file")
    options.add_argument("--out", type=Path, help="also write the figures to this file")
    args = options.parse_args()
    records, weights = list[dict[str, Any]](), [*args.dtype, *args.quantization]
    sizes = args.texts, args.count, args.length, args.llama, args.needle
    for model in args.models:
        records += measure(model, weights, args.kv_cache_dtype, *sizes)
        if args.out:
            models = [identity(name) for name in args.models]
            save("quality", args.out, texts=args.texts, models=models, records=records)
    print(table(records))


if __name__ == "__main__":
    main()
