"""The command line: one typer app, and a module for each command. Imports torch only when a command runs."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from copy import copy
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from outrider._version import __version__
from outrider.cli.batch import batch
from outrider.cli.bench import bench, report
from outrider.cli.calibrate import calibrate
from outrider.cli.certify import certify
from outrider.cli.chat import chat, run
from outrider.cli.demo import demo
from outrider.cli.deploy import deploy
from outrider.cli.doctor import doctor
from outrider.cli.explain import explain
from outrider.cli.export import export
from outrider.cli.generate import generate
from outrider.cli.models import layers, list_, methods, models, pack, pull, rm
from outrider.cli.options import grouped
from outrider.cli.replay import replay
from outrider.cli.serve import serve
from outrider.cli.terminal import show_warnings
from outrider.cli.train import train
from outrider.cli.tune import tune

# Variables that torch and transformers read when they are imported. Values of the user stay.
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads that spin slow every other program on the same core
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}

app = typer.Typer(
    name="outrider",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="[bold]Start here[/bold]\noutrider demo\n"
    'outrider run smollm2 "Why is the sky blue?"\n'
    "outrider serve smollm2\n"
    "outrider serve --help",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"outrider {__version__}")
        raise typer.Exit


@app.callback()
def outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact speculative decoding: language models generate faster, and the text stays the same.

    A small drafter proposes the next tokens. The model checks them all in one pass, so the text is always the model's own.
    """


class BriefCommand(TyperCommand):
    """A command whose `--help` shows its arguments and the options of `usual`. The page has at most 45 lines of 80 columns."""

    usual: tuple[str, ...] = ()
    """The options to show, by any of their names, in the order of the page; without one, all of them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words of the command line. `--help-all` among them shows all options and ends."""
        if "--help-all" in args:
            super().format_help(ctx, formatter := ctx.make_formatter())
            typer.echo(formatter.getvalue(), nl=False)
            ctx.exit()
        rest = super().parse_args(ctx, args)
        if ctx.params.get("model_option") and ctx.get_parameter_source("model").name == "DEFAULT_MAP":
            ctx.params["model"] = None  # the command line goes before the file of --config
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page. Raises KeyError if `usual` names no option."""
        page, options = copy(self), [p for p in self.params if p.param_type_name == "option"]
        named = {name: option for option in options for name in option.opts}
        shown = [named[name] for name in self.usual] or options
        page.add_help_option = False
        page.params = [p for p in self.params if p not in options] + [_row(option) for option in shown]
        if self.usual:
            page.help = (self.help or "").partition("\n\n")[0]
            examples = "\n".join((self.epilog or "").splitlines()[:4])  # the heading and three
            page.epilog = f"{examples}\n\n[bold]--help-all[/bold] shows all {len(options)} options"
        TyperCommand.format_help(page, ctx, formatter)


def brief(*usual: str) -> type[BriefCommand]:
    """The kind of command whose page shows these options."""
    return type("Brief", (BriefCommand,), {"usual": usual})


def _row(option: Any) -> Any:
    """The same option in two columns: its names and the text. Headings, types and ranges take the width of the text."""
    row, shown = copy(option), option.default
    row.rich_help_panel = row.min = row.max = None
    metavar = "" if (option.metavar or "<").startswith("<") else option.metavar
    row.opts, row.metavar = [" ".join([*sorted(option.opts, key=len), metavar]).strip()], ""
    row.required = row.show_default = False
    if option.required:
        row.help += " Required."
    if isinstance(shown, (int, float, str)) and not isinstance(shown, bool) and "efault" not in row.help:
        row.help += f" Default: {shown}."
    return row


def add(panel: str, command: Callable[..., Any], *examples: str, usual: str = "") -> None:
    """Add a command.

    Args:
        panel: The heading of the command in the list of commands.
        examples: Lines at the end of the command's help page.
        usual: The options of a page that does not show all.
    """
    name, epilog = command.__name__.rstrip("_"), "[bold]Examples[/bold]\n" + "\n".join(examples)
    app.command(name, epilog=epilog, rich_help_panel=panel, cls=brief(*usual.split()))(grouped(command))


add(
    "Use",
    run,
    "outrider run builtin:smollm2-135m",
    'outrider run model.gguf "Why is the sky blue?"',
    'cat notes.txt | outrider run model.gguf "Sum this up:" > summary.txt',
    usual="-d -k --method --quantization --system -t -n --seed --stats",
)
add(
    "Use",
    chat,
    "outrider chat -m builtin:smollm2-135m",
    'outrider chat -m model.gguf -d small.gguf --system "Be brief."',
    "outrider chat http://127.0.0.1:8000 -t 0 -n 64",
    usual="-m -d -k --method --quantization --system -t -n --seed --stats",
)
add(
    "Use",
    generate,
    'outrider generate "def quicksort(xs):"',
    'outrider generate "import argparse" --temperature 0.8 --top-p 0.95 --seed 7',
    'outrider generate "def f(x):" --method none',
    "cat part.py | outrider generate - --method suffix --max-tokens 64 > rest.py",
    'outrider generate "# part.py, with one change:" --prediction part.py -k 16',
    'outrider generate "Why is the sky blue?" --chat -m ./my-model -d ./my-small-model',
    usual="-m -d -k --method -t --top-p -n --seed --stop --chat --prediction --quantization --trace",
)
add(
    "Use",
    serve,
    "outrider serve builtin:code",
    "outrider serve ./my-model -d ./my-small-model -k 4",
    "outrider serve smollm2 ./coder.gguf --memory 12GiB --speculative-config coder=coder.json",
    "OUTRIDER_API_KEY=... outrider serve builtin:code --host 0.0.0.0 --metrics-prefix vllm",
    usual="-d -k --method --config --host --port --api-key --served-model-name --quantization --max-model-len --max-num-seqs",
)
add(
    "Use",
    batch,
    "outrider batch requests.jsonl -o answers.jsonl",
    "outrider batch requests.jsonl -o answers.jsonl -m ./my-model --served-model-name gpt-4o-mini --max-num-seqs 16",
    "outrider batch requests.jsonl -o answers.jsonl -m ./my-model --ray auto --replicas 8 --cpus 4",
    usual="-o -m -d -k --method --served-model-name --quantization --max-num-seqs --ray --replicas",
)
add(
    "Use",
    deploy,
    "outrider deploy builtin:code --replicas 2 --cpus 0.5",
    "outrider deploy ./my-model --min-replicas 1 --max-replicas 4 --address auto",
    "outrider deploy ./my-model --replicas 2 --write-config ray.yaml && serve run ray.yaml",
    usual="-d -k --method --replicas --min-replicas --max-replicas --cpus --gpus --address --host --port --write-config",
)
add(
    "Measure",
    demo,
    "outrider demo",
    "outrider demo --tokens 200 --repeats 5 --json numbers.json",
    "outrider demo -m ./my-model -d ./my-small-model -k 4",
)
add(
    "Measure",
    bench,
    "outrider bench",
    "outrider bench my-prompts.jsonl -m ./my-model --method suffix --method auto",
    "outrider bench my-prompts.jsonl -m ./my-model -d ./my-small-model --json run.json --html run.html",
    "outrider bench chat --base-url http://127.0.0.1:8000",
    "outrider bench chat --base-url http://one:8000 --base-url http://two:8000",
    usual="-m -d -k --method --num-prompts -n -t -r -c --base-url --json --html",
)
add(
    "Measure",
    report,
    "outrider report run.json",
    "outrider report run.json --out page.html",
    "outrider report before.json after.json",
)
add(
    "Measure",
    tune,
    "outrider tune",
    "outrider tune my-prompts.jsonl -m ./my-model -d ./my-small-model",
    "outrider tune code -m builtin:code --method suffix --method draft_model --seconds 30",
    usual="-m -d --method --seconds --num-prompts -n -t --out --export --json",
)
add(
    "Measure",
    calibrate,
    "outrider calibrate builtin:code",
    """outrider calibrate ./my-model --speculative-config '{"model": "./my-small-model"}'""",
)
add(
    "Measure",
    certify,
    "outrider certify builtin:code",
    "outrider certify outrider.verify:reference_block",
    """outrider certify ./my-model --speculative-config '{"method": "suffix", "verifier": "rejection"}' --budget 30m""",
    "outrider certify --compare before.json after.json",
    usual="--speculative-config --plain-url --reference --texts --kind --budget --confidence --prompts -n -o --compare",
)
add("Models", models, "outrider models", "outrider models --check Qwen/Qwen3-8B")
add("Models", list_, "outrider list")
add("Models", pull, "outrider pull builtin:smollm2-135m", "outrider pull Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf")
add("Models", rm, "outrider rm builtin:smollm2-135m", "outrider rm all -y")
add(
    "Models",
    pack,
    "outrider pack ./my-model --quantization int8 -o ./my-model-int8",
    "outrider pack model.gguf -o ./my-model && outrider chat -m ./my-model",
)
add(
    "Look inside",
    explain,
    "outrider explain",
    'outrider generate "def f(x):" --trace run.jsonl && outrider explain run.jsonl',
    "outrider explain run.jsonl --recorded -o page.html",
)
add(
    "Look inside",
    replay,
    'outrider generate "def f(x):" --trace run.jsonl',
    "outrider replay run.jsonl",
    "outrider replay run.jsonl --step 3",
    "outrider replay --fingerprint answer.json",
)
add("Look inside", methods, "outrider methods")
add("Look inside", doctor, "outrider doctor")
add(
    "Build",
    train,
    "outrider train eagle3 -m ./my-model --minutes 60 -o ./my-head",
    "outrider train eagle3 -m ./my-model --prompts my-prompts.jsonl --prompts self --minutes 60 -o ./my-head",
    usual="-m -o --prompts --minutes --tokens --temperature --length --draft-vocab-size --seed --from",
)
add(
    "Build",
    layers,
    "outrider layers -m ./my-model --out layers.json",
    "outrider layers -m ./my-model --texts my-prompts.txt --out layers.json",
    'outrider generate "def f(x):" -m ./my-model --speculative-config '
    '\'{"method": "layer_skip", "layers": "layers.json"}\'',
)
add(
    "Build",
    export,
    """outrider export '{"method": "suffix"}' --to vllm""",
    "outrider export speculative_config.json --to vllm --to sglang -m ./my-model --lengths 1:4,4:2,8:0 -o ./handover",
)


def main() -> None:
    """The entry point of the `outrider` command."""
    # Registered first, so it runs last: libraries in C++ then list what they never free, and a person can do nothing about it.
    atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    show_warnings()  # also of what runs behind a command
    app()
