"""A byte-level BPE for code: 8192 entries, one digit per token, a line's end and the next line's indentation in one.

    python -m recipes.tokenizer --text work/pair/text --out work/pair/tokenizer

Every byte has an entry and nothing is normalised, so `decode(encode(text)) == text` for any text. It also writes the
documents as one stream of 16-bit tokens, each document followed by the end token. For a draft with a tokenizer of its own,
`--vocabulary 4096 --pieces words` makes one that cuts text elsewhere, and `--written` also spells in it what a target wrote.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY = 8192

# In order: a word with the one mark before it; one digit; marks; line ends with the indentation after them, which is
# where code is most predictable; other space, leaving one blank to the word that follows.
PIECES = r"[^\s\p{L}\p{N}]?\p{L}+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]*[\r\n]+[ \t]*|\s+(?!\S)|\s+"

WORDS = (
    r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # whole numbers; line end and indentation apart from words
)
SPLITS = {"code": PIECES, "words": WORDS}


def documents(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def written(rows: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The texts that `distill` had a target write, which are rows of the target's tokens."""
    yield from tokenizer.batch_decode(np.load(rows).astype(np.int64), skip_special_tokens=True)


def train(texts: Iterator[str], vocabulary: int = VOCABULARY, pieces: str = PIECES) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pieces), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def check(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Exactness is a promise of the pair, so refuse to save a tokenizer that breaks it."""
    odd = "  a\tb\r\n\n  \u00e9\u4e2d\U0001f600 \x00 12345 'don''t'   \n\n    x = {'a':1} ,b . ! \ufeff\u2028 end  "
    for sample in (text, odd, "", " ", "\n", "   ", "<|end", "a  b"):
        if tokenizer.decode(tokenizer.encode(sample)) != sample:
            raise ValueError(f"the tokenizer does not give back {sample[:80]!r}")


def write_stream(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str], out: Path) -> None:
    end, pieces, size, batch = tokenizer.eos_token_id, [], 0, []

    def flush() -> None:
        for ids in tokenizer(batch)["input_ids"]:
            pieces.append(np.array([*ids, end], dtype=np.uint16))
        batch.clear()

    for document in texts:
        size += len(document.encode())
        batch.append(document)
        if len(batch) == 256:
            flush()
    flush()
    stream = np.concatenate(pieces)
    stream.tofile(out)
    out.with_suffix(".json").write_text(json.dumps({"tokens": len(stream), "bytes": size}))
    print(f"{out.name}: {len(stream) / 1e6:.2f}M tokens, {size / len(stream):.2f} bytes per token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="the folder that gather wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--pieces", choices=SPLITS, default="code", help="where text is cut before entries are counted")
    parser.add_argument("--written", type=Path, help="the written.npy of a distill run: becomes written.bin")
    parser.add_argument("--writer", type=Path, help="the tokenizer of the target that wrote it")
    args = parser.parse_args()
    if bool(args.written) != bool(args.writer):
        parser.error("--written holds tokens of a target: give its tokenizer too, e.g. --writer work/pair/tokenizer")
    tokenizer = train(documents(args.text / "train.jsonl"), args.vocabulary, SPLITS[args.pieces])
    check(tokenizer, next(documents(args.text / "held_out.jsonl")))
    tokenizer.save_pretrained(args.out)
    for split in ("held_out", "train"):
        write_stream(tokenizer, documents(args.text / f"{split}.jsonl"), args.out / f"{split}.bin")
    if args.written:
        texts = written(args.written, AutoTokenizer.from_pretrained(args.writer))
        write_stream(tokenizer, texts, args.out / "written.bin")


if __name__ == "__main__":
    main()
