"""A conversation: messages, answers as they come, and the commands that begin with a slash."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

from outrider.cli.terminal import GREEN, paint, printable, tell, unechoed
from outrider.core.params import NUMBERS, SamplingParams
from outrider.core.suggest import did_you_mean

if TYPE_CHECKING:
    from outrider.core.outputs import Delta, RequestOutput

HELP = """\
/help or /?             this list
/bye                    end; ctrl-D does the same
/clear                  forget the conversation, keep the system message
/system TEXT            set the system message; without TEXT there is none
/set PARAMETER VALUE    temperature, top_p, top_k, min_p, repetition_penalty,
                        presence_penalty, frequency_penalty, max_tokens, stop,
                        seed; without VALUE the default
/show                   the model, the system message and the parameters
/stats on, /stats off   speed and accepted draft tokens after each answer
                        (Ollama's /set system, verbose and quiet work, too)
\"\"\"                     begins and ends a message of several lines
ctrl-C                  stops the answer and keeps the conversation"""
_PARAMETERS = (*NUMBERS, "top_k", "max_tokens", "stop", "seed")
PERIODS, LOOP = 30, 300
"""A text repeats itself if it ends in so many equal pieces, and they have so many characters together, a line of dashes not."""
_OLLAMA = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
Messages = list[dict[str, str]]


class Reply:
    """A text on standard output, as it comes. On a terminal accepted draft tokens are green."""

    def __init__(self) -> None:
        self.text, self.tokens = "", 0
        self.stopped = False  # by ctrl-C
        self.loop = ""  # the piece that it repeated until it was ended
        self.output: RequestOutput | None = None  # if it was written to its end
        self._steps = self._drafted = self._accepted = 0

    def write(self, deltas: Iterator[Delta], loops: bool = True) -> None:
        """Show a text until it ends, or ctrl-C stops it.

        Args:
            deltas: The text.
            loops: Whether a text that repeats itself goes on.
        """
        began = perf_counter()
        try:
            with unechoed(), closing(cast("Generator[Delta]", deltas)):
                for delta in deltas:
                    self.text += delta.text
                    self.tokens += len(delta.token_ids)
                    self._steps += 1
                    self._drafted, self._accepted = self._drafted + delta.drafted, self._accepted + delta.accepted
                    self.output = delta.output
                    for piece, from_draft in delta.pieces or [(delta.text, False)]:
                        sys.stdout.write(paint(printable(piece), GREEN if from_draft else ""))
                    sys.stdout.flush()
                    if not loops and (loop := repeated(self.text)):
                        self.loop = loop
                        break
        except KeyboardInterrupt:
            self.stopped = True
        finally:
            self._seconds = perf_counter() - began
            if self.text and not self.text.endswith("\n"):
                print(flush=True)

    def figures(self) -> list[str]:
        """Speed and drafts of the text."""
        facts = [f"{self.tokens} tokens", f"{self.tokens / self._seconds:.1f} tokens/s"]
        if self._drafted:
            facts.append(f"acceptance length {1 + self._accepted / self._steps:.2f} (bonus counted)")
            facts.append(f"acceptance rate {self._accepted / self._drafted:.2f}")
        return facts


class Conversation:
    """Messages with a model. What a person types goes to `handle`."""

    def __init__(
        self,
        name: str,
        stream: Callable[[Messages, SamplingParams], Iterator[Delta]],
        options: dict[str, Any],
        *,
        system: str | None,
        stats: bool,
    ) -> None:
        """A new conversation. Its n-th answer has the seed of the options plus n, so it can be had again.

        A limit that a person sets is obeyed. Without one an answer ends when it repeats itself: it would do so until the
        context is full.

        Args:
            name: Of the model.
            stream: Answers messages, as `LLM.stream`.
            options: Of `SamplingParams`.
            system: The system message.
            stats: Whether a line of figures follows each answer.
        """
        self.name, self.stats, self._stream = name, stats, stream
        self.options, self._defaults = {k: v for k, v in options.items() if v is not None}, dict(options)
        self.messages: Messages = [{"role": "system", "content": system}] if system else []
        self._answers = 0
        self._figures = "there is no answer yet"
        self.commands: dict[str, Callable[[str], object]] = {
            "/help": lambda _: print(HELP), "/?": lambda _: print(HELP), "/clear": self._clear, "/system": self._system,
            "/set": self._set, "/show": self._show, "/stats": self._stats,
        }  # fmt: skip

    def handle(self, text: str) -> bool:
        """Obey a command, or answer a message. Returns whether the conversation goes on.

        Raises ValueError if that cannot be done, or what the model raises; the conversation is then as it was.
        """
        if not text.startswith("/") or "\n" in text:
            self.say(text)
            return True
        name, _, rest = text.partition(" ")
        if name in ("/bye", "/exit", "/quit"):
            return False
        if name not in self.commands:
            near = did_you_mean(name, [*self.commands, "/bye"])
            raise ValueError(
                f'there is no {name}; /help lists the commands, and a message with / in front stands in """{near}'
            )
        self.commands[name](rest.strip())
        return True

    def say(self, text: str) -> bool:
        """Send a message and show the answer as it comes. Returns whether ctrl-C stopped it; its text is kept."""
        self.messages.append({"role": "user", "content": text})
        seed = (self.options["seed"] + self._answers) % 2**63
        params = SamplingParams(**{"max_tokens": None, **self.options, "seed": seed})
        answer = Reply()
        try:
            answer.write(self._stream(self.messages, params), loops=params.max_tokens is not None)
        except Exception:
            self.messages.pop()
            raise
        if answer.stopped and not answer.text:
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": answer.text})
            self._answers += 1
        guarantee = [answer.output.outputs[0].guarantee.value] if answer.output else []
        self._figures = ", ".join([*answer.figures(), f"seed {seed}", *guarantee])
        for line in (_note(answer, params.max_tokens), self._figures if self.stats else ""):
            if line:
                tell(line)
        return answer.stopped

    # -- commands -------------------------------------------------------------------------------------------------------

    def _clear(self, rest: str) -> None:
        self.messages = [m for m in self.messages if m["role"] == "system"]
        tell("the conversation is forgotten")

    def _system(self, rest: str) -> None:
        rest = rest.strip().strip('"')
        self.messages = [m for m in self.messages if m["role"] != "system"]
        if rest:
            self.messages.insert(0, {"role": "system", "content": rest})
        tell("the system message is set" if rest else "there is no system message")

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        if name in ("system", "verbose", "quiet"):  # as in Ollama
            self._system(value) if name == "system" else self._stats("on" if name == "verbose" else "off")
            return
        name = _OLLAMA.get(name, name)
        if name not in _PARAMETERS:
            raise ValueError(f"/set has no {name!r}{did_you_mean(name, _PARAMETERS)}; it has {', '.join(_PARAMETERS)}")
        try:
            chosen = json.loads(value) if value else self._defaults.get(name)
        except ValueError:
            chosen = value  # a word
        options = {k: v for k, v in {**self.options, name: chosen}.items() if v is not None}
        try:
            SamplingParams(**options)
        except TypeError:
            raise ValueError(f"{value!r} is no value for {name}") from None
        self.options = options
        self._answers = 0 if name == "seed" else self._answers
        tell(f"{name} is {json.dumps(chosen) if chosen is not None else 'off'}")

    def _show(self, rest: str) -> None:
        rows = {"model": self.name, "messages": str(sum(m["role"] != "system" for m in self.messages))}
        rows["system"] = next((m["content"] for m in self.messages if m["role"] == "system"), "none")
        rows |= {name: json.dumps(value) for name, value in self.options.items()}
        width = max(map(len, rows))
        print("\n".join(f"{name:{width}}  {printable(value)}" for name, value in rows.items()))

    def _stats(self, rest: str) -> None:
        if rest not in ("on", "off", ""):
            raise ValueError(
                f"/stats is on or off, got {rest!r}; without a word it shows the figures of the last answer"
            )
        self.stats = rest == "on" if rest else self.stats
        tell(f"figures are {rest}" if rest else self._figures)


def _note(answer: Reply, limit: int | None) -> str:
    """What a person should know of an answer, beside its text; empty if nothing. It never stands in a pipe of texts."""
    if answer.stopped:
        return "stopped"
    if answer.loop:
        return (
            f"ended: it repeats itself, {len(answer.loop)} characters {PERIODS} times or more; a limit lets it go on: "
            "-n 2000, and in a conversation /set max_tokens 2000. /set repetition_penalty 1.1 may help"
        )
    finish = answer.output.outputs[0].finish_reason if answer.output else None
    if finish == "length" and limit is not None and answer.tokens >= limit:
        return f"cut at {limit} tokens; -n {2 * limit} allows more, and in a conversation /set max_tokens {2 * limit}"
    if finish == "length":
        return "the conversation fills the model's context; /clear starts anew"
    return "" if answer.text.strip() else "the model wrote nothing"


def repeated(text: str) -> str:
    """The piece that a text repeats at its end; empty if it does not."""
    for size in range(1, len(text) // PERIODS + 1):
        piece = text[-size:]
        if text.endswith(piece, 0, len(text) - size) and text.endswith(piece * max(PERIODS, -(-LOOP // size))):
            return piece
    return ""


def no_template(model: str) -> str:
    """Why a model cannot chat, and what it can do."""
    return (
        f"{model} is a base model: it has no chat template, so it cannot chat. It continues a text: "
        f'outrider generate "Once upon a time" -m {model}'
    )
