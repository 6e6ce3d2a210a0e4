"""The command line. Imports torch only when a command needs it, and is the one place that reads the environment."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider._version import __version__
from outrider.cli import bench as measurement
from outrider.cli import models as models_cli
from outrider.cli import replay as tracing
from outrider.cli import report as report_cli
from outrider.cli import serve as server
from outrider.cli import tune as tune_cli
from outrider.cli.terminal import (
    CODE,
    DIM,
    GREEN,
    WIDE,
    Debug,
    Model,
    TraceDetail,
    console,
    environment,
    loading,
    option,
    own_draft,
    paint,
    plain,
    printable,
    readable,
    speculation,
)
from outrider.drafters.registry import METHODS

if TYPE_CHECKING:
    from outrider.llm import LLM
    from outrider.params import SamplingParams

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


Draft = Annotated[
    str | None,
    option("Speculation", "The small model that guesses; builtin:code brings its own.", "--draft-model", "-d"),
]
Guesses = Annotated[
    int | None,
    option("Speculation", "Guesses per step at most; as many as pay if not given.", "--num-speculative-tokens", "-k"),
]


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
    'outrider generate "# part.py, with one change:" --prediction part.py -k 16\n'
    'outrider generate "Why is the sky blue?" --chat -m ./my-model -d ./my-small-model'
)
def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT", help="The text to continue; - reads it from standard input, less one last newline."
        ),
    ],
    model: Model = CODE,
    dtype: Annotated[str, option("Model", "auto (the checkpoint's own), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, option("Model", "auto, cpu or cuda.")] = "auto",
    quantization: Annotated[str | None, option("Model", "int8 or int4 weights, on the CPU.")] = None,
    max_model_len: Annotated[int | None, option("Model", "Tokens of prompt and output together.")] = None,
    method: Annotated[
        str | None,
        option("Speculation", "How to draft:\n\n" + "\n\n".join(f"{m.name}: {m.help}" for m in METHODS.values())),
    ] = None,
    draft_model: Draft = None,
    num_speculative_tokens: Guesses = None,
    tree_width: Annotated[int, option("Speculation", "Guesses side by side; 1 is a chain.")] = 1,
    tree_nodes: Annotated[int | None, option("Speculation", "Guesses per step in all.")] = None,
    prediction: Annotated[
        Path | None, option("Speculation", "A text file that most of the answer will repeat, for prediction.")
    ] = None,
    corpus: Annotated[
        list[str] | None,
        option("Speculation", "A file or folder of texts for suffix; may be repeated.", metavar="PATH"),
    ] = None,
    verifier: Annotated[
        str,
        option("Speculation", "match (the very tokens of plain decoding); rejection, block, traversal (the same law)."),
    ] = "match",
    speculative_config: Annotated[
        str | None, option("Speculation", "The same as JSON or a file, in place of these options.", metavar="JSON|FILE")
    ] = None,
    temperature: Annotated[float, option("Sampling", "0 is greedy.", "--temperature", "-t")] = 0.0,
    top_p: Annotated[float, option("Sampling", "1 is off.")] = 1.0,
    top_k: Annotated[int, option("Sampling", "0 is off.")] = 0,
    min_p: Annotated[float, option("Sampling", "0 is off.")] = 0.0,
    repetition_penalty: Annotated[float, option("Sampling", "1 is off.")] = 1.0,
    max_tokens: Annotated[int, option("Sampling", "Tokens to write at most.", "--max-tokens", "-n")] = 128,
    stop: Annotated[
        list[str] | None, option("Sampling", "A text to stop at; may be repeated.", metavar="<str>")
    ] = None,
    ignore_eos: Annotated[bool, option("Sampling", "Write on after the end token.", "--ignore-eos")] = False,
    seed: Annotated[int | None, option("Sampling", "Drawn and shown if not given.")] = None,
    chat: Annotated[bool, option("Output", "Send the prompt as a user's chat message.", "--chat")] = False,
    trace: Annotated[
        Path | None,
        option(
            "Output",
            "Write every step there, for outrider replay. Token ids tell the prompt to whoever reads the file.",
            metavar="FILE",
        ),
    ] = None,
    trace_detail: TraceDetail = None,
    debug: Debug = False,
) -> None:
    """Continue a prompt. Text streams to the terminal, accepted guesses coloured; a pipe gets the text alone.

    The last line (on standard error in a pipe) tells tokens, tokens/s, acceptance length and rate, seed and guarantee.
    """
    with readable(debug):
        given = sys.stdin.buffer.read().removesuffix(b"\n") if prompt == "-" else os.fsencode(prompt)
        budget = {"num_speculative_tokens": num_speculative_tokens, "tree_width": tree_width, "tree_nodes": tree_nodes}
        if method is None and draft_model is None and speculative_config is None and (prediction or corpus):
            method = "prediction" if prediction else "suffix"
        config = _speculation(model, method, draft_model, budget, verifier, speculative_config)
        if corpus:
            config = {**(config or {}), "corpus": corpus}
        with loading(model):
            from outrider.llm import LLM
            from outrider.params import SamplingParams
            from outrider.trace import asked

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
                prediction=_text(prediction) if prediction else None,
            )
            llm = LLM(
                model,
                speculative_config=config,
                dtype=dtype,
                device=device,
                max_model_len=max_model_len,
                max_num_seqs=1,
                quantization=quantization,
                trace=asked(trace, trace_detail, "tokens"),
            )
        if _stream(llm, given.decode(errors="replace"), params, chat=chat):
            raise typer.Exit(130)


@app.command(
    epilog="[bold]Examples[/bold]\noutrider demo\noutrider demo --tokens 200 --repeats 5 --json numbers.json\n"
    "outrider demo -m ./my-model -d ./my-small-model -k 4"
)
def demo(
    model: Model = WIDE,
    draft_model: Draft = None,
    num_speculative_tokens: Guesses = None,
    tokens: Annotated[int, option("Measurement", "Tokens of each text.", min=1)] = 128,
    repeats: Annotated[int, option("Measurement", "Runs of each text, plain and speculative.", min=1)] = 2,
    json_file: Annotated[
        Path | None, option("Output", "Also write all numbers to a file.", "--json", metavar="FILE")
    ] = None,
    debug: Debug = False,
) -> None:
    """Plain against speculative decoding on several prompts: speed, and whether the texts are identical.

    The two take turns in one process on the same weights. Takes about a minute. Exit code 1: a text differs.

    Without --model, builtin:code writes at the cost of 160 million weights: as small as it is, there is nothing to save.
    """
    with readable(debug):
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {json_file.absolute().parent} to write {json_file.name} to")
        budget = {"num_speculative_tokens": num_speculative_tokens}
        config = _speculation(model, None, draft_model, budget, "match", None) or {"method": "suffix", **budget}
        with loading(model):
            from outrider.cli import demo as show
            from outrider.llm import LLM

            llm = LLM(model, speculative_config=config, max_num_seqs=1)
        what = config.get("model") or f"the method {config['method']}"
        print(paint(f"{llm.loaded.name} writes, {what} guesses up to {llm.config.budget.depth} tokens ahead.", DIM))
        if model == WIDE:
            print(paint("It is builtin:code, computed with as many weights as its name says: the same function.", DIM))
        print()

        def stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
            if _stream(llm, prompt, params):
                raise KeyboardInterrupt
            print()

        command = " ".join(["outrider", *sys.argv[1:]])
        code = show.run(llm, console(), stream, tokens=tokens, repeats=repeats, file=json_file, command=command)
        print('Next: outrider generate "def fibonacci(n):" --temperature 0.8')
        raise typer.Exit(code)


app.command(
    epilog="[bold]Examples[/bold]\noutrider layers -m ./my-model --out layers.json\n"
    "outrider layers -m ./my-model --texts my-prompts.txt --out layers.json\n"
    'outrider generate "def f(x):" -m ./my-model --speculative-config '
    '\'{"method": "layer_skip", "layers": "layers.json"}\''
)(models_cli.layers)
app.command()(models_cli.models)
app.command(
    epilog="[bold]Examples[/bold]\noutrider serve builtin:code\n"
    """outrider serve ./my-model --speculative-config '{"method": "draft_model", "model": "./my-small-model"}'\n"""
    "OUTRIDER_API_KEY=... outrider serve builtin:code --host 0.0.0.0 --metrics-prefix vllm"
)(server.serve)
app.command(
    epilog='[bold]Examples[/bold]\noutrider generate "def f(x):" --trace run.jsonl\noutrider replay run.jsonl\n'
    "outrider replay run.jsonl --step 3"
)(tracing.replay)
app.command(
    epilog="[bold]Examples[/bold]\noutrider bench\noutrider bench my-prompts.jsonl -m ./my-model --method suffix --method auto\n"
    "outrider bench my-prompts.jsonl -m ./my-model -d ./my-small-model --json run.json --html run.html\n"
    "outrider bench chat --base-url http://127.0.0.1:8000\n"
    "outrider bench chat --base-url http://one:8000 --base-url http://two:8000"
)(measurement.bench)
app.command(
    epilog="[bold]Examples[/bold]\noutrider tune\noutrider tune my-prompts.jsonl -m ./my-model -d ./my-small-model\n"
    "outrider tune code -m builtin:code --method suffix --method draft_model --seconds 30"
)(tune_cli.tune)
app.command(
    epilog="[bold]Examples[/bold]\noutrider report run.json\noutrider report run.json --out page.html\n"
    "outrider report before.json after.json"
)(report_cli.report)
app.command(epilog="[bold]Examples[/bold]\noutrider chat\noutrider chat http://127.0.0.1:8000 -t 0 -n 64")(server.chat)


def main() -> None:
    """The entry point of the `outrider` command."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    environment()
    app()


def _speculation(
    model: str, method: str | None, draft: str | None, budget: dict[str, Any], verifier: str, as_json: str | None
) -> dict[str, Any] | None:
    """The speculative_config that the options ask for; None is plain decoding."""
    if as_json is not None:
        if method or draft:
            raise ValueError("--speculative-config replaces --method and --draft-model; give one or the other")
        return speculation(as_json)
    if draft is not None and method not in (None, "auto", "draft_model"):
        raise ValueError(f"--method {method} uses no draft model; leave out --draft-model {draft} or --method")
    if method in (None, "draft_model"):
        draft = draft or own_draft(model)
    if method is None and draft is None:
        return None
    config = {"method": method or "draft_model", **budget, "verifier": verifier}
    return config if draft is None else {**config, "model": draft}


def _text(path: Path) -> str:
    """A text file. Raises ValueError for one that is none."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--prediction {path} is not UTF-8 text; name the text that the answer will repeat") from None


def _stream(llm: LLM, prompt: str, params: SamplingParams, chat: bool = False) -> bool:
    """Write the text as it comes, then the summary line. Returns whether ctrl-C ended it."""
    bare, speculates = plain(sys.stdout), llm.config.method != "none" and llm.config.budget.max_nodes > 0
    source = llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params)
    tokens, last, interrupted, started = 0, "\n", False, perf_counter()
    steps = drafted = accepted = 0
    if sys.stdout.isatty() and speculates and not bare:
        print(paint("guessed by the drafter and accepted", GREEN) + paint(" | written by the model itself\n", DIM))
    try:
        echo = prompt if sys.stdout.isatty() and not chat else ""
        for delta in source:
            pieces = [(printable(text), guessed) for text, guessed in delta.pieces]
            shown = "".join(paint(t, GREEN) if guessed and not bare else t for t, guessed in pieces)
            sys.stdout.write(paint(printable(echo), DIM) + shown)
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


if __name__ == "__main__":
    main()
