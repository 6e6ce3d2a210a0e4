"""`outrider demo`: a text that you watch, then `outrider bench` with its own prompts. Imports torch only when it runs."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from outrider.cli.command import as_command
from outrider.cli.generate import stream
from outrider.cli.options import CODE, SpeculationOptions, own_draft
from outrider.cli.terminal import DIM, command, loading, paint, say
from outrider.serve.options import Options
from outrider_lab.cli.bench import FileOptions, run_and_report
from outrider_lab.cli.shared import DRAFT_MODEL, NUM_SPECULATIVE_TOKENS, program

if TYPE_CHECKING:
    from outrider.engine.llm import LLM
    from outrider_lab.bench.prompts import Prompt

CHAT = "builtin:smollm2-135m"
"""A real model with a trained head. builtin:code itself is too small for a speedup."""
SEED = 20261121
# The first text on the screen. Greedy texts of the small built-in model repeat themselves; with this seed it reads like code.
FIRST_PROMPT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a file, without the newline at the end."""'''
FIRST_SAMPLING = {"temperature": 0.7, "top_p": 0.85, "seed": 20}
# For models with a chat template.
FIRST_QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it."
FIRST_CHAT_SAMPLING: dict[str, Any] = {"temperature": 0.0, "seed": 20}
QUESTIONS = {
    "chat: a plant": "Explain in simple words how a plant makes its food.",
    "chat: a letter": "Write a short letter that thanks a colleague for her help with a project.",
    "chat: advice": "What are three good habits for someone who wants to sleep better?",
    "code: a class": "Write a Python class for a stack with push, pop and peek.",
    "code: a file": "Write a Python function that reads a CSV file and returns a list of dictionaries.",
    "code: a loop": "Write a Python function that counts how often each word occurs in a text.",
}
KINDS = {"greedy": 0.0, "temperature 0.8": 0.8}


class DraftOptions(Options):
    """What drafts."""

    draft_model: str | None = DRAFT_MODEL
    num_speculative_tokens: int | None = NUM_SPECULATIVE_TOKENS


@as_command(
    "Measure",
    "outrider demo",
    "outrider demo --tokens 200 --repeats 5 --json numbers.json",
    "outrider demo -m ./my-model -d ./my-small-model -k 4",
)
def demo(
    *,
    model: str | None = None,
    drafts: DraftOptions,
    tokens: Annotated[int, Field(ge=1)] = 128,
    repeats: Annotated[int, Field(ge=1)] = 2,
    json_: Path | None = None,
    details: bool = False,
) -> None:
    """Compare plain and speculative decoding on several prompts: the speed, and whether the texts are identical.

    The two take turns in one process with the same weights. Exit code 1: a text differs.

    Without --model, it uses builtin:smollm2-135m and its trained head, and fetches that model once (98 MB). Where it cannot be
    fetched, it uses builtin:code, which is too small for a speedup.

    Args:
        model: A folder, a GGUF file, a hub name or a built-in model. Default: builtin:smollm2-135m.
        tokens: Tokens of each text.
        repeats: Runs of each text, plain and speculative.
        json_ (FILE): Also write all numbers to a file.
        details: Show the tables, too: speeds, categories, latencies.
    """
    files = FileOptions(json_file=json_)
    files.check()
    from outrider.drafters.heads.files import head_of

    chosen, model = model, model or default_model()
    head = head_of(None, model) if drafts.draft_model is None else None
    draft_model = drafts.draft_model or (str(head) if head else own_draft(model))
    method = "suffix" if draft_model is None else None  # one cause for one effect
    config = SpeculationOptions(
        method=method, draft_model=draft_model, num_speculative_tokens=drafts.num_speculative_tokens
    ).config(model)
    with loading(model):
        from outrider.core.params import SamplingParams
        from outrider_lab.bench.local import Local
        from outrider_lab.bench.run import Run, Setting

        sampling: dict[str, Any] = {"max_tokens": tokens, "seed": SEED}
        settings = [Setting(name="plain"), Setting(name="speculative", speculative_config=config)]
        # as the model was published; in the 4 bits of its file a token costs so little that a draft hardly pays
        precision = "bfloat16" if chosen is None and model == CHAT else "auto"
        backend = Local.load(settings, model, sampling, 1, dtype=precision)
        llm = backend.llms["speculative"]
    what = config.get("model") or f"the method {config['method']}"
    what = what if head is None else "its trained head"
    say(f"{llm.loaded.name} generates, {what} drafts up to {llm.config.budget.depth} tokens ahead.")
    if chosen is None and model == CODE:
        say(f"{CODE} is too small for a speedup: one of its tokens takes about 1 ms.")
    chat = talks(llm)
    first, first_sampling = (FIRST_QUESTION, FIRST_CHAT_SAMPLING) if chat else (FIRST_PROMPT, FIRST_SAMPLING)
    print(paint(f"\n{first}", DIM), end="\n\n" if chat else "", flush=True)
    if stream(llm, first, SamplingParams(max_tokens=tokens, **first_sampling), chat) is None:
        raise KeyboardInterrupt
    print()
    prompts = prompts_for(llm)
    run = Run.begun(llm.loaded.name, settings, prompts, sampling, repeats=repeats)
    texts = 2 * repeats * len(prompts)
    say(
        f"\nPlain and speculative decoding now take turns: {texts} texts of at most {tokens} tokens. This takes longest."
    )
    code = run_and_report(run, backend, prompts, [], files, tables=details)
    if code == 130:
        raise KeyboardInterrupt
    print("Next: " + next_command(chosen, drafts.draft_model, chat))
    raise typer.Exit(code)


def next_command(model: str | None, draft_model: str | None, chat: bool) -> str:
    """What to try after the demo, with its models. model: None for the default one. chat: it answers messages."""
    named = None if model is None else shlex.quote(model)
    words = (
        ["run", named or "smollm2"] if chat else ["generate", "'def fibonacci(n):'", *(["-m", named] if named else [])]
    )
    return command(f"{program()} {' '.join(words)}", *(["-d", shlex.quote(draft_model)] if draft_model else []))


def default_model() -> str:
    """The chat model, fetched if it is not here; the built-in code model, with the reason, if it cannot be had."""
    from outrider.models.builtin.download import DOWNLOADS, fetch

    try:
        fetch(DOWNLOADS[CHAT])
    except OSError as error:
        print(f"note: {error}", file=sys.stderr)
        return CODE
    return CHAT


def talks(llm: LLM) -> bool:
    """Whether the model has a chat template. The demo then asks it questions."""
    return bool(getattr(llm.loaded.tokenizer, "chat_template", None))


def prompts_for(llm: LLM) -> list[Prompt]:
    """Every prompt greedily, then every prompt sampled."""
    from outrider_lab.bench.prompts import Prompt, read

    if talks(llm):
        asked = [Prompt(name, "", [{"role": "user", "content": text}]) for name, text in QUESTIONS.items()]
    else:
        asked = [prompt for prompt in read("code")[0] if prompt.category == "begun"]
    return [
        replace(prompt, id=f"{kind} · {prompt.id}", category=kind, temperature=temperature)
        for kind, temperature in KINDS.items()
        for prompt in asked
    ]
