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
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import comb
from pathlib import Path
from time import sleep

from benchmarks import ROOT
from benchmarks.machine import facts
from benchmarks.serve import Sample, ask
from outrider.models.load import load

NAME = "model"
WRITTEN = 64  # tokens of a text


@contextmanager
def served(model: str, *options: str) -> Iterator[int]:
    """The port of a server, which is killed at the end."""
    command = [sys.executable, "-u", "-m", "outrider", "serve", model, "--port", "0", "--max-num-seqs", "1", *options]
    command += ["--served-model-name", NAME, "--request-timeout", "3600", "--log-file", "/dev/null"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("curl"):
                    yield int(line.split()[2].partition("//127.0.0.1:")[2].partition("/")[0])
                    break
            else:
                raise SystemExit(f"{model} did not start: {' '.join(command)}")
        finally:
            process.send_signal(signal.SIGKILL)


def asked(port: int, prompt: list[int], tokens: int = 16, plain: bool = False) -> Sample:
    """The answer to a prompt: time to its first token, and its text. plain: without drafts."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    body["disable_spec_decode"] = plain
    found = asyncio.run(ask("127.0.0.1", port, "/v1/completions", body))
    if found.error:
        raise SystemExit(found.error)
    return found


def written(folder: Path) -> int:
    """Bytes of the files, once their number does not change."""
    before = -1
    while before != (now := sum(f.stat().st_size for f in folder.glob("*/*"))):
        before = now
        sleep(1.0)
    return now


def beside(
    model: str, config: str, tokens: int, count: int, draw: Callable[[int], list[int]], cached: bool = False
) -> None:
    """First tokens with speculation over those without. cached: all prompts are the same one, which is known by then."""
    none, warm = '{"method": "none"}', 2 if cached else 1
    room = ["--prefix-cache", "1024"] if cached else []  # MiB, for the whole prompt
    with (
        served(model, "--speculative-config", config, *room) as one,
        served(model, "--speculative-config", none, *room) as other,
    ):
        ratios, texts, prompt = list[float](), 0, draw(tokens)
        for n in range(count + warm):
            prompt = prompt if cached else draw(tokens)
            order = (one, other) if n % 2 else (other, one)
            found = {port: asked(port, prompt) for port in order}
            if n >= warm:
                ratios.append(found[one].ttft / found[other].ttft)
                texts += found[one].text == found[other].text
                print(f"{1000 * found[one].ttft:.0f} and {1000 * found[other].ttft:.0f} ms", flush=True)
    print(f"{tokens} tokens, {config}: first token {middle(ratios)} of that without; {texts} texts equal")


def middle(values: list[float]) -> str:
    """The median, and where it lies with 95 %: between two order statistics, whatever the distribution is."""
    values, count = sorted(values), len(values)
    beyond = next(k for k in range(count) if sum(comb(count, n) for n in range(k + 1)) > 0.025 * 2**count)
    return f"{statistics.median(values):.3f} ({values[max(beyond - 1, 0)]:.3f}-{values[-max(beyond, 1)]:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=16000)
    parser.add_argument("--config", default='{"method": "none"}', help="the speculative_config")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--beside", type=int, help="prompts that servers with and without speculation read in turns")
    parser.add_argument("--cached", type=int, help="requests of one prompt, which both servers have read before")
    parser.add_argument("--folder", help="where the files stay; by default they are removed")
    parser.add_argument("--compare", action="store_true", help="also read the prompt without a folder")
    given = parser.parse_args()
    vocab = load(given.model).model.vocab_size // 2
    draw = random.Random(given.tokens)

    def drawn(count: int) -> list[int]:
        return [draw.randrange(vocab) for _ in range(count)]

    prompt = drawn(given.tokens)
    other = [*prompt[: given.tokens // 2], *reversed(prompt[-8:])]
    options = ["--speculative-config", given.config, "--kv-cache-dtype", given.kv_cache_dtype]
    print(facts())
    if given.beside or given.cached:
        count = given.cached or given.beside
        beside(given.model, given.config, given.tokens, count, drawn, bool(given.cached))
        return
    with nullcontext(given.folder) if given.folder else tempfile.TemporaryDirectory() as folder:
        disk = [*options, "--prefix-dir", folder]
        with served(given.model, *disk) as port:
            asked(port, prompt[-40:])
            first = asked(port, prompt)
            size = written(Path(folder))
        with served(given.model, *disk) as port:
            asked(port, prompt[-40:])
            again, half = asked(port, prompt), asked(port, other)
        print(
            f"{given.tokens} tokens: first token after {first.ttft:.2f} s, and after a kill and a start {again.ttft:.3f} s"
        )
        print(f"share {again.ttft / first.ttft:.4f}; the first half with another end {half.ttft:.3f} s")
        print(f"{size / given.tokens:.0f} bytes a token on disk; texts equal: {again.text == first.text}")
    if given.compare:
        with served(given.model, *options) as port:
            print(f"texts of a server without a folder equal: {asked(port, prompt).text == first.text}")


if __name__ == "__main__":
    main()
