"""`outrider generate` and `outrider demo`. Imports torch only when a command runs."""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.chat import no_template
from outrider.cli.options import (
    CHAT,
    WIDE,
    Debug,
    DraftModel,
    ModelOptions,
    NumSpeculativeTokens,
    PromptSpeculationOptions,
    SamplingOptions,
    SpeculationOptions,
    TraceOptions,
    option,
    own_draft,
)
from outrider.cli.terminal import DIM, GREEN, console, loading, paint, plain, printable, readable

if TYPE_CHECKING:
    from outrider.core.types import Step
    from outrider.decode import Sequence
    from outrider.llm import LLM
    from outrider.params import SamplingParams


def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT",
            help="The text to continue. - reads it from standard input, without the last newline.",
        ),
    ],
    model: ModelOptions,
    speculation: PromptSpeculationOptions,
    sampling: SamplingOptions,
    chat: Annotated[bool, option("Output", "Send the prompt as a user's chat message.", "--chat")] = False,
    *,
    trace: TraceOptions,
    debug: Debug = False,
) -> None:
    """Continue a prompt. The terminal shows the text as it comes, with accepted draft tokens coloured. A pipe gets only text.

    The last line shows tokens, tokens/s, acceptance length and rate, what drafted, seed and guarantee. In a pipe it goes to
    standard error.
    """
    with readable(debug):
        given = sys.stdin.buffer.read().removesuffix(b"\n") if prompt == "-" else os.fsencode(prompt)
        config = speculation.config(model.model)
        with loading(model.model):
            from outrider.llm import LLM
            from outrider.models.load import has_chat_template

            if chat and not has_chat_template(model.model):
                raise ValueError(no_template(model.model))
            params = sampling.params(secrets.randbits(32), speculation.predicted_text())
            llm = LLM(**asdict(model), speculative_config=config, max_num_seqs=1, trace=trace.recorder("tokens"))
        if _stream(llm, given.decode(errors="replace"), params, chat=chat):
            raise typer.Exit(130)


def demo(
    model: Annotated[
        str | None,
        option(
            "Model",
            f"A folder, a GGUF file, a hub name or a built-in model. Default: {CHAT}, if it is here.",
            "--model",
            "-m",
        ),
    ] = None,
    draft_model: DraftModel = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    tokens: Annotated[int, option("Measurement", "Tokens of each text.", min=1)] = 128,
    repeats: Annotated[int, option("Measurement", "Runs of each text, plain and speculative.", min=1)] = 2,
    json_file: Annotated[
        Path | None, option("Output", "Also write all numbers to a file.", "--json", metavar="FILE")
    ] = None,
    debug: Debug = False,
) -> None:
    """Compare plain and speculative decoding on several prompts: the speed, and whether the texts are identical.

    The two take turns in one process with the same weights. This takes about a minute. Exit code 1: a text differs.

    Without --model, it uses builtin:smollm2-135m and its trained head, if that model is on this machine. Nothing is downloaded.
    Else it uses builtin:code at the cost of 160 million weights. builtin:code itself is too small for a speedup.
    """
    with readable(debug):
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {json_file.absolute().parent} to write {json_file.name} to")
        from outrider.drafters.heads.shipped import own_head
        from outrider.models.builtin.download import DOWNLOADS, find

        chosen, model = model, model or (WIDE if find(DOWNLOADS[CHAT]) is None else CHAT)
        head = own_head(model) if draft_model is None else None
        draft_model = draft_model if head is None else str(head)
        draft_model = draft_model or own_draft(model)
        method = "suffix" if draft_model is None else None  # one cause for one effect
        options = SpeculationOptions(method, draft_model, num_speculative_tokens)
        config = options.config(model)
        with loading(model):
            from outrider.cli import demo as show
            from outrider.llm import LLM

            # as the model was published; in the 4 bits of its file a token costs so little that a draft hardly pays
            precision = "bfloat16" if chosen is None and model == CHAT else "auto"
            llm = LLM(model, dtype=precision, speculative_config=config, max_num_seqs=1)
        what = config.get("model") or f"the method {config['method']}"
        what = what if head is None else "its trained head"
        print(paint(f"{llm.loaded.name} generates, {what} drafts up to {llm.config.budget.depth} tokens ahead.", DIM))
        if model == WIDE:
            print(paint("It computes the same function as builtin:code, with as many weights as its name says.", DIM))
        if chosen is None and model == WIDE:
            print(
                paint(
                    f"{CHAT}, a real chat model with a trained head, is not on this machine. To fetch its 98 MB:", DIM
                )
            )
            print(paint(f"outrider chat -m {CHAT}", DIM))
        print()

        def stream(llm: LLM, prompt: str, params: SamplingParams, chat: bool) -> None:
            if _stream(llm, prompt, params, chat):
                raise KeyboardInterrupt
            print()

        command = " ".join(["outrider", *sys.argv[1:]])
        code = show.run(llm, console(), stream, tokens=tokens, repeats=repeats, file=json_file, command=command)
        print('Next: outrider generate "def fibonacci(n):" --temperature 0.8')
        raise typer.Exit(code)


def _stream(llm: LLM, prompt: str, params: SamplingParams, chat: bool = False) -> bool:
    """Write the text as it comes, then the summary line. Returns whether ctrl-C ended it."""
    bare, speculates = plain(sys.stdout), llm.config.enabled
    used = StepsByDrafter(llm.method)
    llm.scheduler.observers = (used,)
    source = llm.stream([{"role": "user", "content": prompt}] if chat else prompt, params)
    tokens, last, interrupted, started = 0, "\n", False, perf_counter()
    steps = drafted = accepted = 0
    if sys.stdout.isatty() and speculates and not bare:
        print(paint("accepted draft tokens", GREEN) + paint(" | tokens of the model itself\n", DIM))
    try:
        echo = prompt if sys.stdout.isatty() and not chat else ""
        for delta in source:
            pieces = [(printable(text), from_draft) for text, from_draft in delta.pieces]
            shown = "".join(paint(t, GREEN) if from_draft and not bare else t for t, from_draft in pieces)
            sys.stdout.write(paint(printable(echo), DIM) + shown)
            sys.stdout.flush()
            tokens, last, echo = tokens + len(delta.token_ids), (delta.text or echo or last)[-1], ""
            steps, drafted, accepted = steps + 1, drafted + delta.drafted, accepted + delta.accepted
    except KeyboardInterrupt:
        interrupted = True
    llm.scheduler.observers = ()
    seconds = perf_counter() - started
    if last != "\n":
        sys.stdout.write("\n")
    sys.stdout.flush()
    facts = [f"{tokens} tokens", f"{tokens / seconds:.1f} tokens/s"]
    if speculates and steps:
        facts += [f"acceptance length {1 + accepted / steps:.2f} (bonus counted)"]
        facts += [f"acceptance rate {accepted / drafted:.2f}", used.sentence] if drafted else ["no draft tokens"]
    facts += [*llm.notes, f"seed {params.seed}", llm.decoder.guarantee.value if speculates else "plain decoding"]
    line = ("interrupted: " if interrupted else "") + ", ".join(facts)
    where = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(paint(line, DIM, where), file=where, flush=True)
    return interrupted


class StepsByDrafter:
    """An `Observer` that counts the steps in which each drafter's tokens were checked."""

    def __init__(self, method: str) -> None:
        """method: that drafts, where no plan says so."""
        self._method, self._steps, self._drafted = method, 0, Counter[str]()

    def step(self, step: Step, seconds: list[float | None]) -> None:
        """Count the drafter of one sequence."""
        self._steps += 1
        if step.draft.nodes > 1:
            [note] = step.draft.notes or [None]
            self._drafted[getattr(getattr(note, "plan", None), "drafter", None) or self._method] += 1

    def finished(self, sequence: Sequence) -> None:
        """Nothing is counted at the end."""

    @property
    def sentence(self) -> str:
        """What drafted, and in how many of the steps."""
        counts = ", ".join(f"{name} {count}" for name, count in self._drafted.most_common())
        return f"drafts in {self._drafted.total()} of {self._steps} steps ({counts})"
