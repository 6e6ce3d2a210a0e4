"""The command line. Imports torch only when a command needs it, and is the one place that reads the environment."""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from outrider._version import __version__
from outrider.methods import METHODS

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.llm import LLM
    from outrider.params import SamplingParams

CODE, CODE_DRAFT = "builtin:code", "builtin:code-draft"
DIM, RED, GREEN, YELLOW = "2", "31", "32", "33"

app = typer.Typer(
    name="outrider",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[bold]Start here[/bold]\noutrider demo\n"
    'outrider generate "def quicksort(xs):" --temperature 0.8 --seed 7\n'
    "outrider generate --help",
)


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


Model = Annotated[str, _option("Model", "A folder, a hub name or a built-in model.", "--model", "-m")]
Draft = Annotated[
    str | None,
    _option("Speculation", "The small model that guesses; builtin:code brings its own.", "--draft-model", "-d"),
]
Guesses = Annotated[int, _option("Speculation", "Guesses per step.", "--num-speculative-tokens", "-k")]
Debug = Annotated[bool, _option("Output", "Show the traceback of an error.", "--debug")]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Language models that generate faster and say the same: exact speculative decoding.

    A small drafter guesses the next tokens, the model checks them all in one pass, and the text is the model's own.
    """


@app.command(
    epilog="[bold]Examples[/bold]\n"
    'outrider generate "def quicksort(xs):"\n'
    'outrider generate "import argparse" --temperature 0.8 --top-p 0.95 --seed 7\n'
    'outrider generate "def f(x):" --method none\n'
    "cat part.py | outrider generate - --method suffix --max-tokens 64 > rest.py\n"
    'outrider generate "Why is the sky blue?" --chat -m ./my-model -d ./my-small-model'
)
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from standard input.")
    ],
    model: Model = CODE,
    dtype: Annotated[str, _option("Model", "auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, _option("Model", "auto, cpu or cuda.")] = "auto",
    quantization: Annotated[str | None, _option("Model", "int8 or int4 weights, on the CPU.")] = None,
    max_model_len: Annotated[int | None, _option("Model", "Tokens of prompt and output together.")] = None,
    method: Annotated[
        str | None,
        _option("Speculation", "Who guesses:\n\n" + "\n\n".join(f"{m}: {why}" for m, why in METHODS.items())),
    ] = None,
    draft_model: Draft = None,
    num_speculative_tokens: Guesses = 5,
    verifier: Annotated[
        str, _option("Speculation", "match (the very tokens of plain decoding), rejection or block (the same law).")
    ] = "match",
    speculative_config: Annotated[
        str | None, _option("Speculation", "The same as JSON, in place of these options.", metavar="JSON")
    ] = None,
    temperature: Annotated[float, _option("Sampling", "0 is greedy.", "--temperature", "-t")] = 0.0,
    top_p: Annotated[float, _option("Sampling", "1 is off.")] = 1.0,
    top_k: Annotated[int, _option("Sampling", "0 is off.")] = 0,
    min_p: Annotated[float, _option("Sampling", "0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, _option("Sampling", "1 is off.")] = 1.0,
    max_tokens: Annotated[int, _option("Sampling", "Tokens to write at most.", "--max-tokens", "-n")] = 128,
    stop: Annotated[
        list[str] | None, _option("Sampling", "A text to stop at; may be repeated.", metavar="<str>")
    ] = None,
    ignore_eos: Annotated[bool, _option("Sampling", "Write on after the end token.", "--ignore-eos")] = False,
    seed: Annotated[int | None, _option("Sampling", "Drawn and shown if not given.")] = None,
    chat: Annotated[bool, _option("Output", "Send the prompt as a user's chat message.", "--chat")] = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt. Text streams to the terminal, accepted guesses coloured; a pipe gets the text alone.

    The last line (on standard error in a pipe) tells tokens, tokens/s, acceptance length and rate, seed and guarantee.
    """
    with _readable(debug):
        given = sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)
        config = _speculation(model, method, draft_model, num_speculative_tokens, verifier, speculative_config)
        with _loading(model):
            from outrider.llm import LLM
            from outrider.params import SamplingParams

            params = SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                max_tokens=max_tokens,
                stop=stop or (),
                ignore_eos=ignore_eos,
                seed=secrets.randbits(32) if seed is None else seed,
            )
            llm = LLM(
                model,
                speculative_config=config,
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                max_num_seqs=1,
                quantization=quantization,
            )
        if _stream(llm, given.decode(errors="replace"), params, chat=chat):
            raise typer.Exit(130)


@app.command(
    epilog="[bold]Examples[/bold]\noutrider demo\noutrider demo --tokens 200 --repeats 5 --json numbers.json\n"
    "outrider demo -m ./my-model -d ./my-small-model -k 4"
)
def demo(
    model: Model = CODE,
    draft_model: Draft = None,
    num_speculative_tokens: Guesses = 5,
    tokens: Annotated[int, _option("Measurement", "Tokens of each text.", min=1)] = 128,
    repeats: Annotated[int, _option("Measurement", "Runs of each text, plain and speculative.", min=1)] = 2,
    json_file: Annotated[
        Path | None, _option("Output", "Also write all numbers to a file.", "--json", metavar="FILE")
    ] = None,
    debug: Debug = False,
) -> None:
    """Plain against speculative decoding on several prompts: speed, and whether the texts are identical.

    The two take turns in one process on the same weights. Takes about half a minute. Exit code 1: a text differs.
    """
    with _readable(debug):
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {json_file.absolute().parent} to write {json_file.name} to")
        config = _speculation(model, None, draft_model, num_speculative_tokens, "match", None)
        config = config or {"method": "suffix", "num_speculative_tokens": num_speculative_tokens}
        with _loading(model):
            from outrider import demo as show
            from outrider.llm import LLM

            llm = LLM(model, speculative_config=config, max_num_seqs=1)
        what = config.get("model") or f"the method {config['method']}"
        print(paint(f"{llm.loaded.name} writes, {what} guesses {num_speculative_tokens} tokens ahead.\n", DIM))

        def stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
            if _stream(llm, prompt, params):
                raise KeyboardInterrupt
            print()

        command = " ".join(["outrider", *sys.argv[1:]])
        code = show.run(llm, _console(), stream, tokens=tokens, repeats=repeats, file=json_file, command=command)
        print('Next: outrider generate "def fibonacci(n):" --temperature 0.8')
        raise typer.Exit(code)


@app.command()
def models(debug: Debug = False) -> None:
    """List the built-in models."""
    with _readable(debug):
        with _loading("the list"):
            from outrider.models.load import BUILTIN, DATA
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(title="Built-in models", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("name", no_wrap=True)
        for head in ("parameters", "on disk", "vocabulary", "context"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("what")
        for name, what in BUILTIN.items():
            folder = DATA / name.removeprefix("builtin:")
            weights = folder / "model.safetensors"
            if not weights.exists() or not (folder / "config.json").exists():
                table.add_row(name, "-", "-", "-", "-", f"{what} [red](its files are missing)[/red]")
                continue
            config = json.loads((folder / "config.json").read_text())
            size = sum(f.stat().st_size for f in folder.iterdir())
            numbers = [f"{_parameters(weights) / 1e6:.2f} M", f"{size / 1e6:.1f} MB"]
            numbers += [str(config["vocab_size"]), str(config["max_position_embeddings"])]
            table.add_row(name, *numbers, what)
        _console().print(table)
        print(f'Use one: outrider generate "def main():" --model {CODE}')


def main() -> None:
    """The entry point of the `outrider` command."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    _environment()
    app()


def _environment() -> None:
    """Settings that count only before torch and transformers are imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin stall when another program wants the core
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@contextmanager
def _readable(debug: bool) -> Iterator[None]:
    """Errors as one red line and exit code 2; ctrl-C as exit code 130."""

    def note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if debug or issubclass(category, RuntimeWarning):
            print(paint(f"note: {message}", YELLOW, sys.stderr), file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = note
        try:
            yield
        except KeyboardInterrupt:
            print(paint("interrupted", RED, sys.stderr), file=sys.stderr)
            raise typer.Exit(130) from None
        except typer.Exit:  # a RuntimeError
            raise
        except BrokenPipeError:  # the reader has gone, as in `outrider generate ... | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except Exception as error:
            if debug:
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            if not isinstance(error, (ValueError, OSError, MemoryError)):
                message = f"{type(error).__name__}: {message} (--debug shows where)"
            print(paint(f"error: {message}", RED, sys.stderr), file=sys.stderr)
            raise typer.Exit(2) from None


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """A spinner on a terminal; transformers' own bars and logs stay silent."""
    from rich.console import Console

    with nullcontext() if _plain(sys.stderr) else Console(stderr=True).status(f"loading {what} ..."):
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield


def _speculation(
    model: str, method: str | None, draft: str | None, guesses: int, verifier: str, as_json: str | None
) -> dict[str, Any] | None:
    """The speculative_config that the options ask for; None is plain decoding."""
    if as_json is not None:
        if method or draft:
            raise ValueError("--speculative-config replaces --method and --draft-model; give one or the other")
        try:
            config = json.loads(as_json)
        except json.JSONDecodeError as error:
            raise ValueError(
                f'--speculative-config is not JSON ({error}); an example: \'{{"method": "suffix"}}\''
            ) from None
        if not isinstance(config, dict):
            raise ValueError(
                f'--speculative-config is a JSON object, got {as_json}; an example: \'{{"method": "suffix"}}\''
            )
        return config
    if draft is not None and method not in (None, "draft_model"):
        raise ValueError(f"--method {method} uses no draft model; leave out --draft-model {draft} or --method")
    if method in (None, "draft_model") and draft is None and model == CODE:
        draft = CODE_DRAFT
    if method is None and draft is None:
        return None
    config = {"method": method or "draft_model", "num_speculative_tokens": guesses, "verifier": verifier}
    return config if draft is None else {**config, "model": draft}


def _stream(llm: LLM, prompt: str, params: SamplingParams, chat: bool = False) -> bool:
    """Write the text as it comes, then the summary line. Returns whether ctrl-C ended it."""
    plain, speculates = _plain(sys.stdout), llm.config.method != "none" and llm.config.num_speculative_tokens > 0
    source = llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params)
    tokens, last, interrupted, started = 0, "\n", False, perf_counter()
    steps = drafted = accepted = 0
    if sys.stdout.isatty() and speculates and not plain:
        print(paint("guessed by the drafter and accepted", GREEN) + paint(" | written by the model itself\n", DIM))
    try:
        echo = prompt if sys.stdout.isatty() and not chat else ""
        for delta in source:
            pieces = [(_printable(text), guessed) for text, guessed in delta.pieces]
            shown = "".join(paint(t, GREEN) if guessed and not plain else t for t, guessed in pieces)
            sys.stdout.write(paint(_printable(echo), DIM) + shown)
            sys.stdout.flush()
            tokens, last, echo = tokens + len(delta.token_ids), (delta.text or echo or last)[-1], ""
            steps, drafted, accepted = steps + 1, drafted + delta.drafted, accepted + delta.accepted
    except KeyboardInterrupt:
        interrupted = True
    seconds = perf_counter() - started
    if last != "\n":
        sys.stdout.write("\n")
    sys.stdout.flush()
    facts = [f"{tokens} tokens", f"{tokens / seconds:.1f} tokens/s"]
    if speculates and steps:
        facts += [f"acceptance length {1 + accepted / steps:.2f} (bonus counted)"]
        facts += [f"acceptance rate {accepted / drafted:.2f}" if drafted else "nothing was guessed"]
    facts += [f"seed {params.seed}", llm.decoder.guarantee.value if speculates else "plain decoding"]
    line = ("interrupted: " if interrupted else "") + ", ".join(facts)
    where = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(paint(line, DIM, where), file=where, flush=True)
    return interrupted


def paint(text: str, code: str, stream: TextIO | None = None) -> str:
    """The text with a colour, where the stream shows colours."""
    return text if not text or _plain(stream or sys.stdout) else f"\x1b[{code}m{text}\x1b[0m"


def _plain(stream: TextIO) -> bool:
    """No escape codes: not a terminal, a dumb one, or NO_COLOR (https://no-color.org)."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def _printable(text: str) -> str:
    """On a terminal, control characters a model writes are shown and not obeyed."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else f"\\x{ord(c):02x}" for c in text)


def _console() -> Console:
    from rich.console import Console

    return Console(color_system=None if _plain(sys.stdout) else "auto")


def _parameters(weights: Path) -> int:
    """Stored numbers of a safetensors file, from its header."""
    with weights.open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


if __name__ == "__main__":
    main()
