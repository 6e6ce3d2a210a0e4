"""`outrider generate`. Imports torch only when a command runs."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outrider.cli.command import as_command
from outrider.cli.conversation import Reply, no_template
from outrider.cli.options import CODE, PromptSpeculationOptions, SamplingOptions, TraceOptions
from outrider.cli.terminal import DIM, GREEN, check_folders, loading, paint, plain, printable, tell
from outrider.serve.options import FolderOptions, LoadOptions

if TYPE_CHECKING:
    from outrider.core.outputs import RequestOutput
    from outrider.core.params import SamplingParams
    from outrider.engine.llm import LLM


@as_command(
    "Use",
    'outrider generate "def quicksort(xs):"',
    'outrider generate "import argparse" --temperature 0.8 --top-p 0.95 --seed 7',
    'outrider generate "def f(x):" --method none',
    "cat part.py | outrider generate - --method suffix --max-tokens 64 > rest.py",
    'outrider generate "# part.py, with one change:" --prediction part.py -k 16',
    'outrider generate "Why is the sky blue?" --chat -m ./my-model -d ./my-small-model',
    usual="-m -d -k --method -t --top-p -n --seed --stop --chat --prediction --trace",
)
def generate(
    prompt: str,
    *,
    model: str = CODE,
    loaded: LoadOptions,
    folders: FolderOptions,
    max_model_len: int | None = None,
    speculation: PromptSpeculationOptions,
    sampling: SamplingOptions,
    chat: bool = False,
    trace: TraceOptions,
    fingerprint: Path | None = None,
) -> None:
    """Continue a prompt. The terminal shows the text as it comes, with accepted draft tokens coloured. A pipe gets only text.

    The last line shows tokens, tokens/s, acceptance length and rate, seed and guarantee. In a pipe it goes to
    standard error.

    Args:
        prompt: The text to continue. - reads it from standard input, without the last newline.
        max_model_len: Tokens of prompt and output together, at most.
        chat: Send the prompt as a user's chat message.
        fingerprint (FILE): Write what the text depends on, and its tokens, for outrider replay --fingerprint on any machine.
    """
    text = sys.stdin.buffer.read().removesuffix(b"\n") if prompt == "-" else os.fsencode(prompt)
    config = speculation.config(model)
    check_folders(fingerprint)
    with loading(model):
        from outrider.engine.llm import LLM
        from outrider.models.load import has_chat_template

        if chat and not has_chat_template(model):
            raise ValueError(no_template(model))
        params = sampling.params(secrets.randbits(32), speculation.predicted_text())
        options = {"max_model_len": max_model_len, "max_num_seqs": 1, **dict(loaded), **dict(folders)}
        llm = LLM(model, speculative_config=config, trace=trace.recorder("tokens"), **options)
    output = stream(llm, text.decode(errors="replace"), params, chat=chat)
    if output is None:
        raise typer.Exit(130)
    if fingerprint is not None:
        from outrider.engine.fingerprint import fingerprint as of

        of(llm, output, params).write(fingerprint)
        tell(f"{fingerprint} has its fingerprint; on any machine: outrider replay --fingerprint {fingerprint}")


def stream(llm: LLM, prompt: str, params: SamplingParams, chat: bool = False) -> RequestOutput | None:
    """Write the text as it comes, then the summary line. Returns the whole output, or None if ctrl-C ended it."""
    speculates, answer = llm.config.enabled, Reply()
    if speculates and not plain(sys.stdout):
        print(paint("accepted draft tokens", GREEN) + paint(" | tokens of the model itself\n", DIM))
    if sys.stdout.isatty() and not chat:
        sys.stdout.write(paint(printable(prompt), DIM))
    answer.write(llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params))
    facts = [*answer.figures(), *llm.notes, f"seed {params.seed}"]
    facts.append(llm.decoder.guarantee.value if speculates else "plain decoding")
    tell(("" if answer.output else "interrupted: ") + ", ".join(facts))
    return answer.output
