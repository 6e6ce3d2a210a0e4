"""`outrider run`: a conversation in the terminal, or one answer."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outrider.cli.command import as_command
from outrider.cli.conversation import Conversation, no_template
from outrider.cli.options import SpeculationOptions, sampling
from outrider.cli.terminal import RED, loading, tell
from outrider.core.files import state_folder
from outrider.serve.options import FolderOptions, LoadOptions, setting

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

HISTORY = 1000  # lines
QUOTES = '"""'


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

    def conversation(self, llm: LLM) -> Conversation:
        """A new conversation with a model."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens, "seed": seed}
        return Conversation(llm.loaded.name, llm.stream, options, system=self.system, stats=self.stats)


@as_command(
    "Use",
    "outrider run builtin:smollm2-135m",
    'outrider run model.gguf "Why is the sky blue?"',
    'cat notes.txt | outrider run model.gguf "Sum this up:" > summary.txt',
    usual="-d -k --method --quantization --system -t -n --seed --stats",
)
def run(
    model: str,
    prompt: list[str] | None = None,
    *,
    loaded: LoadOptions,
    folders: FolderOptions,
    speculation: SpeculationOptions,
    talk: TalkOptions,
) -> None:
    """Chat with a model, or get one answer: to PROMPT, to a text that is piped in, or to both.

    At a terminal, /help lists the commands of a conversation. Ctrl-C stops an answer, ctrl-D ends.
    A pipe behind the command gets only the text of the answer.

    Args:
        prompt: One message. The command ends with its answer.
    """
    message = None
    if prompt or not sys.stdin.isatty():
        piped = "" if sys.stdin.isatty() else sys.stdin.read()
        message = "\n\n".join(text for text in (" ".join(prompt or ()), piped.strip()) if text)
        if not message:
            raise ValueError("there is no message; give one: outrider run MODEL 'Why is the sky blue?'")
    conversation = talk.conversation(chat_model(model, loaded, folders, speculation))
    if message is None:
        _talk(conversation, talk.history)
    elif conversation.say(message):
        raise typer.Exit(130)


def _talk(conversation: Conversation, history: bool) -> None:
    """Handle what is typed, until there is no more."""
    keyboard = Keyboard(state_folder() / "chat_history" if history else None)
    tell(f"{conversation.name}, seed {conversation.options['seed']}. /help lists the commands, ctrl-D ends.")
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


def chat_model(model: str, loaded: LoadOptions, folders: FolderOptions, speculation: SpeculationOptions) -> LLM:
    """A model that chats. The text that it has read of a conversation is not read again."""
    config = speculation.config(model)
    with loading(model):
        from outrider.engine.llm import LLM
        from outrider.engine.prefix_cache import BYTES, PrefixCache
        from outrider.models.chat_template import set_chat_template
        from outrider.models.load import has_chat_template

        if not model.startswith("builtin:") and not has_chat_template(model):
            raise ValueError(no_template(model))
        llm = LLM(model, speculative_config=config, max_num_seqs=1, **dict(loaded), **dict(folders))
        llm.decoder.limit(llm.decoder.max_length, PrefixCache(BYTES, llm.runtime.files))
        note = set_chat_template(llm.tokenizer, llm.loaded.name, None)
    for line in [*llm.notes, *([note] if note else [])]:
        tell(line)
    return llm


class Keyboard:
    """Lines of a terminal. Arrow keys, a history that the next start still has, and pasted lines that stay together.

    history: the file of the history; None keeps it in memory. It is readable by its owner only. A file that cannot be
    written is no error: the history is in memory then.
    """

    def __init__(self, history: Path | None) -> None:
        self._history = history
        try:
            import readline  # it changes the terminal
        except ImportError:  # a Python without it still reads lines
            self._readline = None
            return
        self._readline = readline
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python switches it off
        readline.set_auto_history(False)  # a message is one entry, however many lines it has
        readline.set_history_length(HISTORY)
        if history is not None:
            with suppress(OSError):
                history.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(history, os.O_CREAT | os.O_APPEND, 0o600))
                readline.read_history_file(history)

    def line(self, prompt: str) -> str | None:
        """The next line without its newline; None at the end. Raises KeyboardInterrupt for ctrl-C."""
        if not sys.stdout.isatty():  # what is piped on is text only
            print(prompt, end="", file=sys.stderr, flush=True)
            prompt = ""
        with suppress(EOFError):
            return input(prompt)

    def remember(self, message: str) -> None:
        """Add a message to the history."""
        if self._readline is not None:
            self._readline.add_history(message)
            if self._history is not None:
                with suppress(OSError):
                    self._readline.append_history_file(1, self._history)


def message(line: Callable[[str], str | None]) -> str | None:
    '''The next message: a line, or the lines between """ and """. None at the end, also within quotes.'''
    text = line(">>> ")
    if text is None or not text.lstrip().startswith(QUOTES):
        return text
    text = text.lstrip().removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        more = line("... ")
        if more is None:
            return None
        text += "\n" + more
    return text.rstrip().removesuffix(QUOTES).strip("\n")
