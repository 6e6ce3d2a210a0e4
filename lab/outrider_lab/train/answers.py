"""The texts that a head learns from: prompts and the target's answers, kept as token ids in a file that grows line by
line."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from outrider.core.jsonl import JsonLines
from outrider.core.params import SamplingParams
from outrider.engine.decoder import nth_seed
from outrider.engine.llm import LLM
from outrider.engine.request import Request
from outrider_lab.traces import Trace, sampling
from outrider_lab.train.prompts import Asked, Source

HELD_OUT = 8  # one prompt of so many in a trace measures the head and does not train it
Keep = Callable[[Mapping[int, Sequence[int]], int], None]


@dataclass(frozen=True)
class TrainingText:
    """A prompt and its answer."""

    number: int  # of its prompt in the run
    source: str  # where the prompt came from
    tokens: list[int]  # prompt, then answer
    start: int  # index of the first token of the answer
    temperature: float  # at which it was written
    held_out: bool  # measures the head, and does not train it

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.start]


class AnswerFile:
    """Answers as JSON lines. A line that a kill left half written is dropped when the file is opened."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file with other lines."""
        self.path = path
        self.answers: list[TrainingText] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = JsonLines(path)
        for count, line in enumerate(self._file.whole(), 1):
            try:
                self.answers.append(TrainingText(**line.value))
            except TypeError as error:
                raise ValueError(
                    f"{path}, line {count} is no answer of a training run ({error}); move the file away, and it is "
                    "written again"
                ) from None

    @property
    def tokens(self) -> int:
        """Tokens of all answers, without their prompts."""
        return sum(len(a.tokens) - a.start for a in self.answers)

    def add(self, answer: TrainingText) -> None:
        self._file.add(json.dumps(asdict(answer), separators=(",", ":")).encode())
        self.answers.append(answer)

    def in_order(self) -> list[TrainingText]:
        """The answers by number. They end in another order than they began."""
        return sorted(self.answers, key=lambda a: a.number)


def parted(answers: Iterable[TrainingText]) -> tuple[list[TrainingText], list[TrainingText]]:
    """(texts to learn from, texts to measure with). Each text once. No text that is held out is learnt from, and no other answer
    to its prompt."""
    held: dict[tuple[int, ...], TrainingText] = {}
    learnt: dict[tuple[int, ...], TrainingText] = {}
    for answer in answers:
        (held if answer.held_out else learnt).setdefault(tuple(answer.tokens), answer)
    prompts = {tuple(a.prompt) for a in held.values()}
    return [a for text, a in learnt.items() if text not in held and tuple(a.prompt) not in prompts], [*held.values()]


def traced_texts(trace: Trace, length: int, llm: LLM) -> Iterator[TrainingText]:
    """The finished texts of a trace, the newest first, so that the latest held-out ones measure the head.

    One prompt of `HELD_OUT` is held out. That depends on its tokens alone, so it is the same prompts in every trace.

    Args:
        trace: has tokens, not counts only.
        length: tokens of prompt and answer. Of a longer prompt the end is left, at most half of the length.
        llm: the model that wrote the texts.

    Raises ValueError for a trace with counts only, and for one of another vocabulary.
    """
    vocab = llm.loaded.model.vocab_size
    if trace.header.vocab_size != vocab:
        raise ValueError(
            f"{trace.path} is a trace of {trace.header.model} with a vocabulary of {trace.header.vocab_size} tokens, and "
            f"{llm.loaded.name} has {vocab}; give a trace of the model that the head drafts for"
        )
    ended = [text for text in trace.texts.values() if text.finish in ("stop", "length")]
    for number, text in enumerate(reversed(ended)):
        start = len(text.prompt) - text.request.continued
        prompt, answer = text.prompt[:start], text.prompt[start:] + text.tokens
        held_out = int(sha256(json.dumps(prompt).encode()).hexdigest()[:8], 16) % HELD_OUT == 0
        prompt = prompt[-(length // 2) :]
        tokens = (prompt + answer)[:length]
        yield TrainingText(number, trace.path.name, tokens, len(prompt), sampling(text.request).temperature, held_out)


def write_answers(
    llm: LLM,
    sources: Sequence[Source],
    file: AnswerFile,
    *,
    length: int,
    temperatures: Sequence[float],
    seed: int,
    round_size: int,
    tokens: int | None = None,
    keep: Keep | None = None,
) -> Generator[int, None, None]:
    """Let the target answer prompts. Yields the number of answers that each step ended, so the caller can stop at any time.

    The sources take turns, and so do the temperatures of each source. An answer depends on its number and the seed alone,
    so a run that was killed goes on with what is missing. The step that writes the last token of a text cut by its length has
    no features for it. So with `keep` such a text is written one token further, and cut.

    Args:
        llm: The target.
        sources: Of the prompts.
        file: Gets the answers.
        length: Tokens of prompt and answer together; a prompt of more than half of it is skipped.
        temperatures: Of the answers.
        seed: Of the run.
        round_size: Prompts that are answered together.
        tokens: It ends after the round that makes so many tokens of answers; None never ends.
        keep: Gets the texts that each step ended, by number, before they are in the file, and the length.
    """
    first, empty = 0, 0
    while True:
        whole = [a for a in file.answers if a.number < first]
        if tokens is not None and sum(len(a.tokens) - a.start for a in whole) >= tokens:
            return
        empty = 0 if not first or any(a.number >= first - round_size for a in whole) else empty + 1
        if empty > 2:
            raise ValueError(
                f"{3 * round_size} prompts in a row gave no answer: they are empty, or longer than {length // 2} tokens; "
                f"raise the length from {length}, or give other prompts"
            )
        answered = {a.number for a in file.answers}
        numbers = range(first, first + round_size)
        first = numbers.stop
        if answered and max(answered) >= numbers.stop + round_size:  # what is missing there could not be used
            continue
        yield from _round(
            llm, sources, file, [n for n in numbers if n not in answered], length, temperatures, seed, keep
        )


def _round(
    llm: LLM,
    sources: Sequence[Source],
    file: AnswerFile,
    numbers: Sequence[int],
    length: int,
    temperatures: Sequence[float],
    seed: int,
    keep: Keep | None,
) -> Iterator[int]:
    running: dict[int, tuple[int, str, float, bool]] = {}
    begun: list[Request] = []
    for number, source, asked in _asked(sources, numbers):
        if len(asked.tokens) > length // 2:
            continue
        temperature = temperatures[number // len(sources) % len(temperatures)]
        if asked.answer is not None:
            tokens = (asked.tokens + asked.answer)[:length]
            file.add(TrainingText(number, source, tokens, len(asked.tokens), temperature, asked.held_out))
            continue
        room = length - len(asked.tokens)
        params = SamplingParams(
            temperature=temperature, max_tokens=room + (keep is not None), seed=nth_seed(seed, number)
        )
        [request] = llm.requests(asked.tokens, params)
        running[request.id] = number, source, temperature, asked.held_out
        begun.append(request)
    for _, moved in llm.scheduler.run(llm.scheduler.add(begun)):
        ended = [s for s in moved if s.finish]
        if keep is not None:
            keep({running[s.id][0]: s.tokens for s in ended}, length)
        for sequence in ended:
            number, source, temperature, held = running[sequence.id]
            file.add(TrainingText(number, source, sequence.tokens[:length], len(sequence.prompt), temperature, held))
        yield len(ended)


def _asked(sources: Sequence[Source], numbers: Sequence[int]) -> Iterator[tuple[int, str, Asked]]:
    """(number, source, prompt) of the prompts that can be used. The sources take turns by number."""
    prompts: dict[int, tuple[str, Asked]] = {}
    for at, source in enumerate(sources):
        turns = [n for n in numbers if n % len(sources) == at]
        for number, asked in zip(turns, source.take([n // len(sources) for n in turns]), strict=True):
            if asked is not None:
                prompts[number] = source.name, asked
    for number in sorted(prompts):
        yield number, *prompts[number]
