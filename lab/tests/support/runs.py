"""Simulated measurements: runs with known effects, for tests of what reads them. No clock, no model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from outrider.core.origins import ACCEPTED, BONUS, CORRECTED, PLAIN
from outrider_lab.bench.run import PromptRecord, Run, Sample, Setting

WORDS = [
    "def ",
    "area",
    "(r)",
    ":\n",
    "    ",
    "return ",
    "math",
    ".",
    "pi",
    " * ",
    "r",
    "\n",
    "# of a circle",
    "x = 1\n",
]
HOSTILE = [
    "</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "\"' onload='alert(3)", "{{ 7*7 }}{% raw %}",
    "\x00\x1b[31m", "\u202eright to left", "&lt;already&gt; &amp;", "</style></svg></table>", "]]>", "<!-- ", "x" * 300,
]  # fmt: skip


@dataclass(frozen=True)
class Simulated:
    """A setting to simulate. alpha: chance that a draft token is accepted. factor: multiplies the simulated times."""

    name: str
    depth: int = 0
    alpha: float = 0.75
    factor: float = 1.0
    differing: float = 0.0  # share of answers with another text
    failing: float = 0.0
    guarantee: str | None = "exact-tokens"
    categories: dict[str, float] = field(default_factory=dict)  # another alpha in some of them
    config: dict[str, Any] = field(default_factory=dict)


PLAIN_SETTING = Simulated("plain", guarantee=None)
# Seconds: a forward, one more node, a draft token, the rest of a step.
FORWARD, MORE, DRAFT, FIXED = 0.030, 0.0015, 0.003, 0.001


def simulate(
    *settings: Simulated,
    prompts: int = 24,
    categories: tuple[str, ...] = ("code", "prose", "edit"),
    repeats: int = 2,
    tokens: int = 80,
    noise: float = 0.03,
    seed: int = 1,
    words: list[str] = WORDS,
    details: bool = True,
    temperature: float = 0.0,
    complete: bool = True,
) -> Run:
    """A run of these settings over one set of prompts.

    details=False: what another server reports: no token ids, steps or phases. noise: of each answer's time, relative.
    """
    settings = settings or (PLAIN_SETTING, Simulated("draft 4", 4))
    draw = random.Random(seed)
    asked = [
        PromptRecord(
            id=f"p{i}", category=categories[i % len(categories)], text="".join(draw.choices(words, k=12)), tokens=40
        )
        for i in range(prompts)
    ]
    samples = []
    for repeat in range(repeats):
        for prompt in asked:
            for setting in settings if repeat % 2 == 0 else settings[::-1]:
                turn = len(samples)
                slow = setting.factor * max(draw.gauss(1, noise), 0.2)
                samples.append(_answer(setting, prompt, repeat, turn, tokens, words, slow, details, draw))
    if not complete:
        samples = samples[: len(samples) * 2 // 3]
    return Run(
        date="2026-11-21T10:00:00Z",
        command="outrider bench prompts.jsonl --json run.json",
        model="builtin:code",
        machine={"processor": "a simulated one", "cores": "2", "python": "3.11"},
        sampling={"temperature": temperature, "max_tokens": tokens},
        repeats=repeats,
        settings=[
            Setting(
                name=setting.name,
                speculative_config={"method": "draft_model", "num_speculative_tokens": setting.depth, **setting.config}
                if setting.depth
                else None,
                base_url=None if details else f"http://127.0.0.1:8000/{i}",
                guarantee=setting.guarantee,
            )
            for i, setting in enumerate(settings)
        ],
        prompts=asked,
        samples=samples,
        complete=complete,
    )


def _answer(
    setting: Simulated, prompt: PromptRecord, repeat: int, turn: int, tokens: int, words: list[str], slow: float, details: bool,
    draw: random.Random,
) -> Sample:  # fmt: skip
    """One answer: its tokens from the prompt alone, its steps and times from the setting."""
    known = {"prompt": prompt.id, "setting": setting.name, "repeat": repeat, "turn": turn, "seed": repeat}
    if draw.random() < setting.failing:
        return Sample(**known, seconds=0.1, error="connection refused <by the server>")
    text = random.Random(f"{prompt.id} {repeat}")
    ids = [text.randrange(len(words)) for _ in range(tokens)]
    if draw.random() < setting.differing:
        ids[tokens // 2 :] = [(i + 1) % len(words) for i in ids[tokens // 2 :]]
    alpha = setting.categories.get(prompt.category, setting.alpha)
    alpha = min(max(alpha + (int(prompt.id[1:]) % 7 - 3) * 0.03, 0.0), 1.0)
    origins, drafted, accepted, gaps = "", [], [], []
    target = draft = 0.0
    while len(origins) < tokens:
        depth = min(setting.depth, tokens - len(origins) - 1)
        kept = next((j for j in range(depth) if draw.random() >= alpha), depth)
        last = PLAIN if setting.depth == 0 else BONUS if kept == depth else CORRECTED
        origins += ACCEPTED * kept + last
        drafted.append(depth)
        accepted.append(kept)
        now_target, now_draft = FORWARD + MORE * depth, DRAFT * depth
        target, draft = target + now_target * slow, draft + now_draft * slow
        gaps.append(((now_target + now_draft + FIXED) * slow, kept + 1))
    first, fixed = 0.05 * slow, FIXED * len(drafted) * slow
    phases = {"target": target, "draft": draft, "verify": fixed / 2, "commit": fixed / 2, "rest": first}
    more = {
        "token_ids": ids, "pieces": [words[i] for i in ids], "origins": origins, "phases": phases,
        "drafted": drafted if setting.depth else None, "accepted": accepted if setting.depth else None,
    }  # fmt: skip
    return Sample(
        **known,
        seconds=first + target + draft + fixed,
        ttft=first + gaps[0][0],
        gaps=gaps[1:],
        prompt_tokens=prompt.tokens or 0,
        output_tokens=tokens,
        finish_reason="length",
        text="".join(words[i] for i in ids),
        **(more if details else {}),
    )
