"""`outrider run`: a conversation in the terminal, or one answer, from a model in this process or from a server."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import typer

from outrider.cli.backends import ChatBackend, LocalBackend, ServerBackend
from outrider.cli.command import as_command
from outrider.cli.conversation import Conversation
from outrider.cli.options import ApiKey, FolderOptions, LoadOptions, SpeculationOptions, sampling
from outrider.cli.terminal import RED, loading, tell
from outrider.core.files import state_folder
from outrider.serve.options import setting

PIPE_TOKENS = 2048
"""Of an answer in a pipe, at most, where a person gives no limit: it may be that no person sees that it does not end."""


class TalkOptions(sampling("Conversation", temperature=0.7, max_tokens=None, seed=None)):
    """How answers are written and shown."""

    system: str | None = setting(None, "Conversation", "The system message.")
    stats: bool = setting(False, "Conversation", "Show speed and accepted draft tokens after each answer.")
    history: bool = setting(
        True,
        "Conversation",
        "Keep what is typed for the arrow keys of the next start.",
        envvar="OUTRIDER_HISTORY",
    )

    def conversation(self, backend: ChatBackend) -> Conversation:
        """A new conversation."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": seed}
        return Conversation(backend, options, system=self.system, stats=self.stats)


@as_command(
    "Use",
    "outrider run builtin:smollm2-135m",
    'outrider run model.gguf "Why is the sky blue?"',
    'cat notes.txt | outrider run model.gguf "Sum this up:" > summary.txt',
    "outrider run http://127.0.0.1:8000 -t 0 -n 64",
    usual="-d -k --method --quantization --system -t -n --seed --stats",
)
def run(
    model: str,
    prompt: list[str] | None = None,
    *,
    served_model: str | None = None,
    loaded: LoadOptions,
    folders: FolderOptions,
    speculation: SpeculationOptions,
    talk: TalkOptions,
    api_key: ApiKey = None,
) -> None:
    """Chat with a model or a server, or get one answer: to PROMPT, to a text that is piped in, or to both.

    At a terminal, /help lists the commands of a conversation. Ctrl-C stops an answer, ctrl-D ends.
    A pipe behind the command gets only the text of the answer.

    Args:
        model: A folder, a GGUF file, a hub name, a built-in model, or the address of a server.
        prompt: One message. The command ends with its answer.
        served_model (NAME): Of a server: the model's name there; without it, its first.
    """
    asked = None
    if prompt or not sys.stdin.isatty():
        piped = "" if sys.stdin.isatty() else sys.stdin.read()
        asked = "\n\n".join(text for text in (" ".join(prompt or ()), piped.strip()) if text)
        if not asked:
            raise ValueError("there is no message; give one: outrider run MODEL 'Why is the sky blue?'")
    with _backend(model, served_model, api_key, loaded, folders, speculation) as backend:
        if asked is None:
            _talk(talk, backend)
        else:
            conversation = talk.conversation(backend)
            piped = not (sys.stdin.isatty() and sys.stdout.isatty())
            room = backend.room([*conversation.messages, {"role": "user", "content": asked}]) if piped else None
            if room is not None and room > PIPE_TOKENS:
                conversation.limit = PIPE_TOKENS
            if conversation.say(asked):
                raise typer.Exit(130)


def is_address(model: str) -> bool:
    """Whether this names a server: http://..., or HOST:PORT."""
    return "://" in model or re.fullmatch(r"[\w.-]+:\d+", model) is not None


def _talk(talk: TalkOptions, backend: ChatBackend) -> None:
    """Handle what is typed, until there is no more."""
    from outrider.cli.keyboard import Keyboard, message  # readline changes the terminal

    conversation = talk.conversation(backend)
    keyboard = Keyboard(state_folder() / "chat_history" if talk.history else None)
    name, seed = backend.name, conversation.options["seed"]
    tell(f"{name}, seed {seed}. /help lists the commands, ctrl-D ends.")
    while True:
        try:
            text = message(keyboard.line)
            if text is None:
                print()
                return
            if text.strip():
                keyboard.remember(text)
                if not conversation.handle(text):
                    return
                print()
        except KeyboardInterrupt:
            print()
            tell("ctrl-D or /bye ends")
        except (ValueError, OSError, RuntimeError) as error:  # the conversation goes on
            tell(f"error: {' '.join(str(error).split())}", RED)


@contextmanager
def _backend(
    model: str,
    served_model: str | None,
    api_key: str | None,
    loaded: LoadOptions,
    folders: FolderOptions,
    speculation: SpeculationOptions,
) -> Iterator[ChatBackend]:
    """What answers: a server, or a model in this process for the length of a block."""
    if is_address(model):
        # a folder may come from the environment, for all commands
        elsewhere = folders.prefix_dir is not None and folders.prefix_dir != os.environ.get("OUTRIDER_PREFIX_DIR")
        if elsewhere or (loaded, speculation) != (LoadOptions(), SpeculationOptions()):
            raise ValueError(
                "a server decides how its model is loaded and drafted for; give these options to outrider serve, or name a "
                "model: outrider run MODEL"
            )
        yield ServerBackend(model, api_key, served_model)
        return
    if served_model is not None:
        raise ValueError(f"--served-model {served_model} is for a server, and {model} is none; leave it out")
    with _here(model, loaded, folders, speculation) as backend:
        yield backend


@contextmanager
def _here(
    model: str, loaded: LoadOptions, folders: FolderOptions, speculation: SpeculationOptions
) -> Iterator[LocalBackend]:
    """A model in this process, for the length of a block."""
    config = speculation.config(model)
    with loading(model):
        from outrider.engine import Engine
        from outrider.engine.llm import LLM
        from outrider.models.load import has_chat_template
        from outrider.serve.assembly import set_chat_template

        if not model.startswith("builtin:") and not has_chat_template(model):
            raise ValueError(no_template(model))
        llm = LLM(model, speculative_config=config, max_num_seqs=1, any_method=True, **dict(loaded), **dict(folders))
        note = set_chat_template(llm, None)
        engine = Engine(llm.runtime)
    for line in [*llm.notes, *([note] if note else [])]:
        tell(line)
    with closing(engine):
        yield LocalBackend(llm, engine)


def no_template(model: str) -> str:
    """Why a model cannot chat, and what it can do."""
    return (
        f"{model} is a base model: it has no chat template, so it cannot chat. It continues a text: "
        f'outrider generate "Once upon a time" -m {model}'
    )
