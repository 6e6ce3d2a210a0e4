"""A training run from prompts to a head in a folder. It can be stopped at any time, and goes on where it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from outrider.control import Fixed
from outrider.drafters.heads.files import target_digest
from outrider.engine.llm import LLM
from outrider_lab.heads.writers import name_target
from outrider_lab.traces import read
from outrider_lab.train.answers import TrainingText, parted, traced_texts, write_answers
from outrider_lab.train.batches import batch_of, count_tokens, draw_anchors, epoch, positions
from outrider_lab.train.folder import Progress, RunFolder, point, verdict
from outrider_lab.train.kept import FeatureRecorder, KeptFeatures, KeptTeacher
from outrider_lab.train.method import Beginning, TrainedHead, loss_of
from outrider_lab.train.methods import head_to_begin_with, start_head, taps_of
from outrider_lab.train.muon import Muon
from outrider_lab.train.prompts import sources
from outrider_lab.train.settings import TrainingSettings
from outrider_lab.train.survival import HeldOut, Survival
from outrider_lab.train.teacher import multiplying_dtype

WRITING = 0.4  # share of the minutes in which answers are written
ANSWERS_PER_TOKEN = 0.25  # with a budget of tokens: each answer is read about four times
SLOTS = 40  # texts that the target writes side by side
MUON_RATE, ADAM_RATE, FALL = 0.01, 1e-3, 0.85
SAVE_SECONDS = 60.0
NEWS_SECONDS = 20.0
POINTS, MEASURED_TEXTS = 20, 40  # measurements of a run; texts of each
LEARNT_BETWEEN = 3  # tokens that train before each measurement, at least, for each token that it reads
WARM_UP = 0.02  # of the whole run
OLD_SHARE = (
    0.5  # of a head that goes on with texts of a trace: the mean keeps what it knew of others (arXiv 2109.01903)
)


@dataclass(frozen=True)
class TrainingBudget:
    """When a run ends: after so many minutes, writing included, or after so many tokens read in training. One of the two."""

    minutes: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Raises ValueError unless exactly one is given and positive."""
        if (self.minutes is None) == (self.tokens is None):
            raise ValueError("give the run minutes or tokens, one of the two; for example --minutes 60")
        if (self.minutes or self.tokens or 0) <= 0:
            raise ValueError(f"a run has a positive budget, got {self.minutes or self.tokens or 0}")

    @property
    def answer_tokens(self) -> int | None:
        """Tokens of answers to write; None for as many as there is time for."""
        return None if self.tokens is None else math.ceil(ANSWERS_PER_TOKEN * self.tokens)

    def written(self, tokens: int, seconds: float) -> float:
        """The share of the answers that is written, 1 for all. seconds: spent on it."""
        if self.answer_tokens is not None:
            return tokens / self.answer_tokens
        assert self.minutes is not None
        return seconds / (60 * WRITING * self.minutes)

    def done(self, progress: Progress) -> float:
        """The share of the training that is done."""
        if self.tokens is not None:
            return progress.tokens / self.tokens
        assert self.minutes is not None
        return progress.seconds / max(1.0, 60 * self.minutes - progress.writing_seconds)


Say = Callable[[str], None]


def train(settings: TrainingSettings, budget: TrainingBudget, out: Path, llm: LLM, say: Say = print) -> list[Survival]:
    """Train a head for `llm` and write it to `out`. Returns how its drafts survive on held-out answers.

    llm: the target, plain decoding, with SLOTS sequences side by side. say: gets a line of news now and then. A run with a
    budget of tokens gives the same head bit for bit, killed or not, on the same machine. Raises what `RunFolder` and
    `sources` raise, and ValueError if the prompts give no text to learn from or to measure with.
    """
    folder = RunFolder(out, settings)
    with folder.alone():
        features = None
        if settings.keep_features:
            taps = taps_of(settings.method, settings.start, llm.loaded)
            features = KeptFeatures(folder.features, llm.loaded.config.get_text_config().hidden_size, taps)
        write(folder, budget, llm, say, features)
        return Training(folder, budget, llm, say, features).run()


def write(folder: RunFolder, budget: TrainingBudget, llm: LLM, say: Say, features: KeptFeatures | None = None) -> None:
    """Write the answers that are still missing. features: gets what the model says of them meanwhile.

    Raises ValueError for texts that are longer than the model's, and what `sources` raises."""
    settings, file, wanted = folder.settings, folder.answers, budget.answer_tokens
    if settings.texts is not None:
        if not file.answers:
            trace = read(settings.texts)
            if trace.problem:
                say(f"{trace.problem}; the texts before it train the head")
            for text in traced_texts(trace, settings.length, llm):
                file.add(text)
        return
    longest = llm.decoder.max_length - bool(features)  # texts with features are written one token further
    if settings.length > longest:
        raise ValueError(
            f"--length {settings.length} is more than fits: {settings.model} holds {llm.decoder.max_length} tokens"
            f"{', one of them for what --keep-features keeps' if features else ''}; use --length {longest} or less"
        )
    seconds = folder.writing_seconds
    if wanted is None and budget.written(file.tokens, seconds) >= 1:
        return
    prompts = sources(settings.prompts, llm, settings.seed, settings.length // 4)
    most = math.inf if wanted is None else math.ceil(wanted / settings.length)
    recorder = FeatureRecorder(features) if features else None
    making = write_answers(
        LLM(llm.loaded, drafter=recorder, controller=Fixed(1), max_num_seqs=SLOTS) if recorder else llm,
        prompts,
        file,
        length=settings.length,
        temperatures=settings.temperatures,
        seed=settings.seed,
        round_size=int(min(2 * SLOTS, max(8, most))),
        tokens=wanted,
        keep=recorder.keep if recorder else None,
    )
    begun = clock = told = saved = time.monotonic()
    before = file.tokens
    for _ in making:
        now = time.monotonic()
        seconds, clock = seconds + now - clock, now
        share = budget.written(file.tokens, seconds)
        if now - saved > 10:
            folder.writing_seconds, saved = seconds, now
        if now - told >= NEWS_SECONDS:
            told, speed = now, (file.tokens - before) / (now - begun)
            left = seconds * max(0.0, 1 - share) / max(share, 1e-6)
            say(
                f"answers: {file.tokens:,} tokens in {len(file.answers):,} texts, {speed:.0f} tokens/s, {_minutes(left)} left"
            )
        if wanted is None and share >= 1:
            break
    making.close()
    folder.writing_seconds = seconds


class Training:
    """The second half of a run: a head learns from the answers of its folder."""

    def __init__(
        self, folder: RunFolder, budget: TrainingBudget, llm: LLM, say: Say, features: KeptFeatures | None = None
    ) -> None:
        self._folder, self._budget, self._say = folder, budget, say
        settings, loaded, state = folder.settings, llm.loaded, folder.load()
        self._name = Path(settings.model).name if "/" in settings.model else settings.model
        self._digest = target_digest(loaded)
        self._answers, held = parted(folder.answers.in_order())
        self._check(held)
        weights = head_to_begin_with(settings.method, settings.start, loaded) if settings.start else None
        size, most = settings.draft_vocab_size, loaded.model.vocab_size
        ids = state["token_ids"] if state else count_tokens(self._answers, size, most, loaded.end_ids)
        decisions = state.get("kept", {}) if state else None
        start = Beginning(
            loaded,
            settings.method,
            settings.seed,
            self._answers,
            ids,
            self._name,
            decisions,
            settings.intermediate_size,
        )
        self.head: TrainedHead = start_head(start, weights)
        depth, device = self.head.depth, self.head.teacher.device
        self._answers = [a for a in self._answers if len(positions(batch_of([a]), depth)[0])]
        self._check(held)
        self._teacher = KeptTeacher(self.head.teacher, features) if features else None
        self._dtype = torch.bfloat16 if state and state["bfloat16"] else torch.float32
        if state is None:
            self._dtype = multiplying_dtype(device)
        matrices, rest = self.head.split()
        self._trained = [*matrices, *rest]
        self._optimisers: list[torch.optim.Optimizer] = []
        if matrices:
            self._optimisers.append(Muon(matrices, lr=MUON_RATE, dtype=self._dtype))
        if rest:
            self._optimisers.append(torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0))
        self._old = [p.detach().clone() for p in self._trained] if weights and settings.texts else []
        self._rates = [o.param_groups[0]["lr"] for o in self._optimisers]
        self._rows = self.head.teacher.output(self.head.token_ids)
        self._held = HeldOut(held[:MEASURED_TEXTS], self.head, settings.seed, self._dtype)
        begun = state["progress"] if state else {}
        self.progress = Progress(**{**begun, "writing_seconds": folder.writing_seconds})
        if state:
            self.head.module.load_state_dict(state["head"], strict=False)
            for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            say(f"goes on at step {self.progress.step}, after {self.progress.tokens:,} tokens")

    def run(self) -> list[Survival]:
        """Train until the budget is used, with measurements on the way."""
        progress, settings = self.progress, self._folder.settings
        lengths = [len(a.tokens) for a in self._answers]
        clock = saved = told = time.monotonic()
        begun, done = clock, self._budget.done(progress)
        first, recent, measured = done, list[float](), None
        if not progress.curve:
            measured = self._measure(0.0)
        while done < 1:
            batches = epoch(lengths, settings.batch_tokens, settings.seed, progress.epoch)
            if progress.batch >= len(batches):
                progress.next_epoch()
                continue
            loss, accepted = self._step(batches[progress.batch], done)
            recent.append(loss)
            now = time.monotonic()
            progress.step_ends(now - clock)
            clock = now
            before, done = done, self._budget.done(progress)
            if now - told >= NEWS_SECONDS:
                told, left = now, (now - begun) * max(1 - done, 0) / max(done - first, 1e-9)
                shares = " ".join(f"{a:.2f}" for a in accepted)
                self._say(
                    f"{progress.tokens:,} tokens, loss {loss:.3f}, training acceptance {shares}, {_minutes(left)} left"
                )
            if done >= 1 and self._old:
                with torch.no_grad():
                    for old, trained in zip(self._old, self._trained, strict=True):
                        trained.lerp_(old, OLD_SHARE)
            enough = progress.tokens - progress.curve[-1]["tokens"] >= LEARNT_BETWEEN * self._held.tokens
            if (enough and int(done * POINTS) > int(before * POINTS)) or done >= 1:
                measured = self._measure(sum(recent) / len(recent))
                recent.clear()
                self._save()
                saved = time.monotonic()
            elif now - saved >= SAVE_SECONDS:
                self._save()
                saved = now
        measured = measured or self._held.measure()
        if self._teacher:
            self._teacher.features.remove()
        for group in measured[1:]:
            self._say(f"{group.group}: {group.accepted_length:.2f} tokens a step at {group.places:,} held-out places")
        self._say(verdict(progress.curve, measured[0]))
        return measured

    def _check(self, held: list[TrainingText]) -> None:
        if not self._answers or not held:
            raise ValueError(
                f"{len(self._answers)} answers train the head and {len(held)} measure it; both need some, and what has the "
                "prompt of a held-out answer does not train. Give more prompts, or a longer trace"
            )

    def _step(self, numbers: list[int], done: float) -> tuple[float, list[float]]:
        """One update by the answers with these numbers. Returns the loss, and the acceptance at each step of the unroll."""
        progress, answers = self.progress, [self._answers[i] for i in numbers]
        batch = batch_of(answers)
        generator = torch.Generator().manual_seed(self._folder.settings.seed * 1_000_003 + progress.step)
        anchors = draw_anchors(batch, self.head.depth, self.head.share, generator)
        progress.step_begins(batch.size)
        taught = self._teacher.read(answers) if self._teacher else self.head.teacher.read(batch.tokens)
        device = self.head.teacher.device
        with torch.autocast(device.type, self._dtype, enabled=self._dtype != torch.float32):
            loss, accepted = loss_of(self.head, self._rows, batch, taught, anchors, weight=0.1 + 0.8 * min(done, 1.0))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, 1.0)
        for optimiser, base in zip(self._optimisers, self._rates, strict=True):
            optimiser.param_groups[0]["lr"] = base * rate(done, FALL)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        lost, *shares = torch.cat([loss.detach()[None], accepted]).tolist()  # a device is waited for once
        if not math.isfinite(lost):
            raise FloatingPointError(f"the loss became {lost} at step {progress.step}")
        return lost, shares

    def _measure(self, loss: float) -> list[Survival]:
        """Measure the held-out answers, and write head and card."""
        measured = self._held.measure()
        self.progress.curve.append(point(self.progress, loss, measured))
        every = measured[0]
        shares = " ".join(f"{x:.3f}" for x in every.shares)
        some = ", ".join(
            f"{s.accepted_length:.2f} at {s.group}" for s in measured if s.group.startswith("temperature ")
        )
        self._say(
            f"{self.progress.tokens:,} tokens: held-out drafts survive {shares}, {every.accepted_length:.2f} tokens a step "
            f"({some})"
        )
        self.head.write(self._folder.path)
        if self._digest:
            name_target(self._folder.path, self._digest)
        self._folder.write_card(self.progress, self._name, sum(p.numel() for p in self._trained))
        return measured

    def _save(self) -> None:
        module = self.head.module
        frozen = {n for n, p in module.named_parameters() if not p.requires_grad}
        self._folder.save(
            {
                "head": {n: t for n, t in module.state_dict().items() if n not in frozen},
                "optimisers": [o.state_dict() for o in self._optimisers],
                "token_ids": self.head.token_ids.cpu(),
                "kept": self.head.decisions(),
                "bfloat16": self._dtype == torch.bfloat16,
                "progress": asdict(self.progress),
            }
        )


def rate(progress: float, decay: float) -> float:
    """The learning rate's factor at this share of the run: warm up, hold, fall linearly to zero over the last `decay`."""
    return max(0.0, min(1.0, progress / WARM_UP, (1.0 - progress) / decay))


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
