"""A conversation: messages, answers as they come, and the commands that begin with a slash. One loop for every backend."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, TextIO

from rich.cells import cell_len

from outrider.cli.backends import ChatBackend
from outrider.cli.terminal import GREEN, paint, printable, tell, unechoed
from outrider.core.params import NUMBERS
from outrider.core.suggest import did_you_mean

HELP = """\
/help or /?             this list
/bye                    end; ctrl-D does the same
/clear                  forget the conversation, keep the system message
/system TEXT            set the system message; without TEXT there is none
/set PARAMETER VALUE    temperature, top_p, top_k, min_p, repetition_penalty,
                        presence_penalty, frequency_penalty, max_tokens, stop,
                        seed; without VALUE the default
/show                   the model, the system message and the parameters
/save FILE, /load FILE  write the conversation to a file, go on with one
/stats on, /stats off   speed and accepted draft tokens after each answer
                        (Ollama's /set system, verbose and quiet work, too)
\"\"\"                     begins and ends a message of several lines
ctrl-C                  stops the answer and keeps the conversation"""
_PARAMETERS = (*NUMBERS, "top_k", "max_tokens", "stop", "seed")
PERIODS, LOOP = 30, 300
"""A text repeats itself if it ends in so many equal pieces, and they have so many characters together, a line of dashes not."""
_OLLAMA = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}


class Conversation:
    """Messages with a backend. What a person types goes to `handle`."""

    def __init__(self, backend: ChatBackend, options: dict[str, Any], *, system: str | None, stats: bool) -> None:
        """options: of `SamplingParams`; the n-th answer has the seed of the options plus n, so a conversation can be had
        again. system: the system message. stats: a line of figures after each answer.

        A limit that a person sets is obeyed. Without one an answer ends at `limit`, if there is one, or when it repeats itself:
        it would do so until the context is full, and a pipe may have no person to stop it.
        """
        self.limit: int | None = None
        self.backend, self.stats = backend, stats
        self.options, self._defaults = {k: v for k, v in options.items() if v is not None}, dict(options)
        self.messages = [{"role": "system", "content": system}] if system else []
        self._answers = 0
        self._figures = "there is no answer yet"
        self._commands: dict[str, Callable[[str], object]] = {
            "/help": lambda _: print(HELP), "/?": lambda _: print(HELP), "/clear": self._clear, "/system": self._system,
            "/set": self._set, "/show": self._show, "/save": self._save, "/load": self._load, "/stats": self._stats,
        }  # fmt: skip

    def handle(self, text: str) -> bool:
        """Obey a command, or answer a message. Returns whether the conversation goes on.

        Raises ValueError, ConnectionError or OSError if that cannot be done; the conversation is then as it was.
        """
        if not text.startswith("/") or "\n" in text:
            self.say(text)
            return True
        name, _, rest = text.partition(" ")
        if name in ("/bye", "/exit", "/quit"):
            return False
        if name not in self._commands:
            known = did_you_mean(name, [*self._commands, "/bye"])
            raise ValueError(
                f'there is no {name}; /help lists the commands, and a message with / in front stands in """{known}'
            )
        self._commands[name](rest.strip())
        return True

    def say(self, text: str) -> bool:
        """Send a message and show the answer as it comes. Returns whether ctrl-C stopped it; its text is kept."""
        self.messages.append({"role": "user", "content": text})
        limits = {"max_tokens": self.limit} if self.limit else {}
        options = {**limits, **self.options, "seed": (self.options["seed"] + self._answers) % 2**63}
        answer, finish, last, stopped, loop = "", None, dict[str, Any](), False, ""
        out = TextPrinter()
        try:
            with unechoed(), closing(self.backend.answer(self.messages, options)) as events:
                for event in events:
                    for choice in event.get("choices", ()):
                        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                        if ending := choice.get("finish_reason"):
                            finish = (ending == "length" and choice.get("stop_reason")) or ending
                        answer += text
                        out.write(text, choice.get("pieces", ()))
                    last = event if event.get("usage") else last
                    if "max_tokens" not in self.options and (loop := repeated(answer)):
                        break
        except KeyboardInterrupt:
            stopped = True
        except Exception:
            self.messages.pop()
            raise
        finally:
            out.end()
        if not answer and stopped:
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": answer})
            self._answers += 1
        self._figures = _figures(last, options["seed"]) if last else "the answer was stopped, so it has no figures"
        self._tell(answer, finish, stopped, last, loop)
        return stopped

    def _tell(self, answer: str, finish: str | None, stopped: bool, last: dict[str, Any], loop: str) -> None:
        """What a person should know of an answer, beside its text. It never stands in a pipe of texts."""
        limit = self.options.get("max_tokens", self.limit)
        if stopped:
            note = "stopped"
        elif loop:
            note = (
                f"ended: it repeats itself, {len(loop)} characters {PERIODS} times or more; a limit lets it go on: -n 2000, and "
                "in a conversation /set max_tokens 2000. /set repetition_penalty 1.1 may help"
            )
        elif finish == "length" and limit and last.get("usage", {}).get("completion_tokens", limit) >= limit:
            note = (
                f"cut at {limit} tokens; -n {2 * limit} allows more, and in a conversation /set max_tokens {2 * limit}"
            )
        elif finish == "length":
            note = "the conversation fills the model's context; /clear starts anew"
        elif finish not in ("stop", None):
            note = f"the answer ended early: {finish}"
        else:
            note = "" if answer.strip() else "the model wrote nothing"
        for line in (note, self._figures if self.stats else ""):
            if line:
                tell(line)

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
        from outrider.core.params import SamplingParams

        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        if name in ("system", "verbose", "quiet"):  # as in Ollama
            self._system(value) if name == "system" else self._stats("on" if name == "verbose" else "off")
            return
        name = _OLLAMA.get(name, name)
        if name not in _PARAMETERS:
            raise ValueError(f"/set has no {name!r}{did_you_mean(name, _PARAMETERS)}; it has {', '.join(_PARAMETERS)}")
        try:
            given = json.loads(value) if value else self._defaults.get(name)
        except ValueError:
            given = value  # a word
        options = {k: v for k, v in {**self.options, name: given}.items() if v is not None}
        try:
            SamplingParams(**options)
        except TypeError:
            raise ValueError(f"{value!r} is no value for {name}") from None
        self.options = options
        self._answers = 0 if name == "seed" else self._answers
        tell(f"{name} is {json.dumps(given) if given is not None else 'off'}")

    def _show(self, rest: str) -> None:
        rows = {"model": self.backend.name, "messages": str(sum(m["role"] != "system" for m in self.messages))}
        rows["system"] = next((m["content"] for m in self.messages if m["role"] == "system"), "none")
        rows |= {name: json.dumps(value) for name, value in self.options.items()}
        width = max(map(len, rows))
        print("\n".join(f"{name:{width}}  {printable(value)}" for name, value in rows.items()))

    def _save(self, rest: str) -> None:
        file = _file("/save", rest)
        if file.exists():
            _read(file)  # raises for another file, which stays as it is
        text = json.dumps({"model": self.backend.name, "messages": self.messages}, ensure_ascii=False, indent=1)
        file.write_text(text + "\n", encoding="utf-8")
        tell(f"{len(self.messages)} messages are in {file}")

    def _load(self, rest: str) -> None:
        file = _file("/load", rest)
        self.messages = _read(file)
        tell(f"{len(self.messages)} messages from {file}")

    def _stats(self, rest: str) -> None:
        if rest not in ("on", "off", ""):
            raise ValueError(
                f"/stats is on or off, got {rest!r}; without a word it shows the figures of the last answer"
            )
        self.stats = rest == "on" if rest else self.stats
        tell(f"figures are {rest}" if rest else self._figures)


def _file(command: str, given: str) -> Path:
    if not given:
        raise ValueError(f"{command} needs the name of a file, as in {command} talk.json")
    return Path(given).expanduser()


def _read(file: Path) -> list[dict[str, str]]:
    """The messages of a file that /save wrote. Raises OSError or ValueError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["messages"]
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in found]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is no saved conversation; /save writes one") from None


def _figures(event: dict[str, Any], seed: int) -> str:
    """One line about an answer, from its last event. `metrics` and `guarantee` may be absent: other servers lack them."""
    metrics, usage = event.get("metrics") or {}, event["usage"]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    parts = [f"{usage['completion_tokens']} tokens"]
    if speed := metrics.get("tokens_per_second"):
        parts.append(f"{speed:.1f} tokens/s")
    parts.append(f"prompt of {usage['prompt_tokens']}, {usage['prompt_tokens'] - cached} of them new")
    if spec := metrics.get("speculative_decoding"):
        accepted, drafted = spec["num_accepted_draft_tokens"], spec["num_draft_tokens"]
        parts.append(f"acceptance length {spec['mean_acceptance_length']:.2f}")
        parts.append(f"{accepted} of {drafted} draft tokens accepted")
    return ", ".join([*parts, f"seed {seed}", *([event["guarantee"]] if "guarantee" in event else [])])


def repeated(text: str) -> str:
    """The piece that a text repeats at its end; empty if it does not."""
    for size in range(1, len(text) // PERIODS + 1):
        piece = text[-size:]
        if text.endswith(piece, 0, len(text) - size) and text.endswith(piece * max(PERIODS, -(-LOOP // size))):
            return piece
    return ""


_TAB = 8


class TextPrinter:
    """Prints a text as it comes. On a terminal lines break between words, and accepted draft tokens are green."""

    def __init__(self) -> None:
        self._wrap = WordWrap(sys.stdout) if sys.stdout.isatty() else None
        self._last = "\n"

    def write(self, text: str, pieces: Iterable[tuple[str, bool]] = (), colour: str = "") -> None:
        """Add text.

        Args:
            text: What a model wrote.
            pieces: The same text in parts, and of each whether a draft token made it.
            colour: An ANSI code for what no draft token made.
        """
        parts, self._last = list(pieces), text[-1:] or self._last
        parts = parts if "".join(part for part, _ in parts) == text else [(text, False)]
        if self._wrap is None:
            sys.stdout.write(printable(text))
        else:
            for part, from_draft in parts:
                self._wrap.write(printable(part), GREEN if from_draft else colour)
        sys.stdout.flush()

    def end(self) -> None:
        """Write what was held back, and end the line."""
        if self._wrap is not None:
            self._wrap.end()
        if self._last != "\n" if self._wrap is None else self._wrap.column:
            print(flush=True)


class WordWrap:
    """Writes text as it comes, and breaks lines between words. A word is written when its end is known: call `end` at last."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.column = 0  # cells of this line that are written
        self._gap = self._word = ""
        self._runs = list[tuple[str, str]]()  # the parts of the word, each with its colour

    def write(self, text: str, colour: str = "") -> None:
        """Add text. Control characters other than a newline and a tab must not be in it.

        Args:
            text: What is written.
            colour: An ANSI code; empty for none.
        """
        width = shutil.get_terminal_size().columns
        for character in text:
            if character == "\n":
                self.end()
                self._out.write("\n")
                self.column = 0
            elif character == "\t":
                self._put()
                self._gap += " " * (_TAB - (self.column + len(self._gap)) % _TAB)
            elif character == " ":
                self._put()
                self._gap += " "
            else:
                self._word += character
                if not self._runs or self._runs[-1][0] != colour:
                    self._runs.append((colour, ""))
                self._runs[-1] = colour, self._runs[-1][1] + character
                # between wide characters a line can always break; a longer word the terminal breaks anyway
                if cell_len(character) > 1 or len(self._word) > width:
                    self._put()
        self._out.flush()

    def end(self) -> None:
        """Write what was held back."""
        self._put()
        self._gap = ""
        self._out.flush()

    def _put(self) -> None:
        if not self._word:
            return
        size, width = cell_len(self._word), shutil.get_terminal_size().columns
        if self.column and self.column + len(self._gap) + size > width:
            self._out.write("\n")
            self.column, self._gap = 0, ""
        self._out.write(self._gap + "".join(paint(s, code, self._out) if code else s for code, s in self._runs))
        self.column += len(self._gap) + size
        if self.column > width:  # the terminal broke a word that is longer than a line
            self.column = (self.column - 1) % width + 1
        self._gap = self._word = ""
        self._runs.clear()
