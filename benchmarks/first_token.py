"""The first token of a long prompt: after a server was killed and started again, and with speculation over without.

    python -m benchmarks.first_token MODEL --tokens 16000
    python -m benchmarks.first_token MODEL --tokens 512 --beside 9 --config '{"method": "auto"}'
    python -m benchmarks.first_token MODEL --tokens 5838 --cached 15 --config '{"method": "auto"}'

One server reads a prompt of random tokens and is killed by SIGKILL. Another one with the same folder gets the same prompt, then
the first half of it with another end. With `--compare` a server without a folder reads the prompt, too. The texts must be equal.
With `--folder` the files stay, so that a second run measures the start alone. With `--beside N` two servers, one of them without
speculation, read N new prompts each, in turns. With `--cached N` they get one prompt N times, which both have read before.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from time import sleep
from urllib.parse import urlsplit

from benchmarks.machine import facts
from benchmarks.ruler import median_interval, parser, shown, turns
from benchmarks.serve import Sample, ask, own_server
from outrider.models.load import load

NAME = "model"


@contextmanager
def served(model: str, *options: str) -> Iterator[str]:
    """The address of a server, which is killed at the end."""
    flags = ["--max-num-seqs", "1", "--served-model-name", NAME, "--request-timeout", "3600", "--log-file", "/dev/null"]
    with own_server(model, *flags, *options) as (url, process):
        try:
            yield url
        finally:
            process.kill()


def answer(url: str, prompt: list[int]) -> Sample:
    """Some tokens behind a prompt: the time to the first one, and the text."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True, "ignore_eos": True}
    sample = asyncio.run(ask("127.0.0.1", urlsplit(url).port or 80, "/v1/completions", body))
    if sample.error:
        raise SystemExit(sample.error)
    return sample


def bytes_of(folder: Path) -> int:
    """Bytes of the files, once their number does not change."""
    before = -1
    while before != (now := sum(f.stat().st_size for f in folder.glob("*/*"))):
        before = now
        sleep(1.0)
    return now


def beside(args: argparse.Namespace, draw: Callable[[int], list[int]]) -> None:
    """First tokens with speculation over those without. With `--cached` all prompts are one, which is known by then."""
    count, room = args.cached or args.beside, ["--prefix-cache", "1024"] if args.cached else []  # MiB
    prompts = [draw(args.tokens)] * (count + 1) if args.cached else [draw(args.tokens) for _ in range(count + 1)]
    seconds, texts = [list[float](), list[float]()], dict[int, set[str]]()
    with ExitStack() as stack:
        configs = (args.config, '{"method": "none"}')
        urls = [stack.enter_context(served(args.model, "--speculative-config", c, *room)) for c in configs]
        for n, side in turns((0, 1), count, warm=2 if args.cached else 1):
            sample = answer(urls[side], prompts[max(n, -1)])
            if n >= 0:
                seconds[side].append(sample.ttft)
                texts.setdefault(n, set()).add(sample.text)
                print(f"{('with', 'without')[side]} drafts: {1000 * sample.ttft:.0f} ms", flush=True)
    ratio = shown(median_interval([a / b for a, b in zip(*seconds, strict=True)]))
    equal = sum(len(both) == 1 for both in texts.values())
    print(f"{args.tokens} tokens, {args.config}: first token {ratio} of that without; {equal} texts equal")


def restart(args: argparse.Namespace, draw: Callable[[int], list[int]]) -> None:
    """First tokens before and after a kill."""
    prompt = draw(args.tokens)
    other = [*prompt[: args.tokens // 2], *reversed(prompt[-8:])]
    options = ["--speculative-config", args.config, "--kv-cache-dtype", args.kv_cache_dtype]
    with nullcontext(args.folder) if args.folder else tempfile.TemporaryDirectory() as folder:
        disk = [*options, "--prefix-dir", folder]
        with served(args.model, *disk) as url:
            answer(url, prompt[-40:])
            first = answer(url, prompt)
            size = bytes_of(Path(folder))
        with served(args.model, *disk) as url:
            answer(url, prompt[-40:])
            again, half = answer(url, prompt), answer(url, other)
    print(
        f"{args.tokens} tokens: first token after {first.ttft:.2f} s, and after a kill and a start {again.ttft:.3f} s"
    )
    print(f"share {again.ttft / first.ttft:.4f}; the first half with another end {half.ttft:.3f} s")
    print(f"{size / args.tokens:.0f} bytes a token on disk; texts equal: {again.text == first.text}")
    if args.compare:
        with served(args.model, *options) as url:
            print(f"texts of a server without a folder equal: {answer(url, prompt).text == first.text}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("--tokens", type=int, default=16000)
    options.add_argument("--config", default='{"method": "none"}', help="the speculative_config")
    options.add_argument("--kv-cache-dtype", default="auto")
    options.add_argument("--beside", type=int, help="prompts that servers with and without speculation read in turns")
    options.add_argument("--cached", type=int, help="requests of one prompt, which both servers have read before")
    options.add_argument("--folder", help="where the files stay; by default they are removed")
    options.add_argument("--compare", action="store_true", help="also read the prompt without a folder")
    args = options.parse_args()
    vocab, draw = load(args.model).model.vocab_size // 2, random.Random(args.tokens)
    print(facts())
    measure = beside if args.beside or args.cached else restart
    measure(args, lambda count: [draw.randrange(vocab) for _ in range(count)])


if __name__ == "__main__":
    main()
