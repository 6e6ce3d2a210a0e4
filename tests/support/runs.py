"""Simulated measurements: runs with known effects, for tests of what reads them. No clock, no model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.run import Limits, Prompt, Run, Sample, Setting
from outrider.core.origins import ACCEPTED, BONUS, CORRECTED, PLAIN

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
class Way:
    """A setting to simulate. alpha: the chance that a guess is kept. factor: its time over what the simulated costs give."""

    name: str
    depth: int = 0
    alpha: float = 0.75
    factor: float = 1.0
    differing: float = 0.0  # share of answers with another text
    failing: float = 0.0
    guarantee: str | None = "exact-tokens"
    categories: dict[str, float] = field(default_factory=dict)  # another alpha in some of them
    config: dict[str, Any] = field(default_factory=dict)


PLAIN_WAY = Way("plain", guarantee=None)
FORWARD, MORE, DRAFT, FIXED = (
    0.030,
    0.0015,
    0.003,
    0.001,
)  # seconds: a forward, one node more, a draft token, a step beside


def simulate(
    *ways: Way,
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
    drift: float = 0.0,
) -> Run:
    """A run of these ways over one set of prompts. details=False: what a server from elsewhere tells, no token ids, steps or
    phases. noise: of every answer's time, relative. drift: how much slower the machine is at the end, relative."""
    ways = ways or (PLAIN_WAY, Way("draft 4", 4))
    draw = random.Random(seed)
    asked = [
        Prompt(id=f"p{i}", category=categories[i % len(categories)], text="".join(draw.choices(words, k=12)), tokens=40)
        for i in range(prompts)
    ]
    samples, turns = [], prompts * repeats * len(ways)
    for repeat in range(repeats):
        for prompt in asked:
            for way in ways if repeat % 2 == 0 else ways[::-1]:
                turn = len(samples)
                slow = way.factor * (1 + drift * turn / turns) * max(draw.gauss(1, noise), 0.2)
                samples.append(_answer(way, prompt, repeat, turn, tokens, words, slow, details, draw))
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
                name=way.name,
                speculative_config={"method": "draft_model", "num_speculative_tokens": way.depth, **way.config}
                if way.depth
                else None,
                base_url=None if details else f"http://127.0.0.1:8000/{i}",
                guarantee=way.guarantee,
            )
            for i, way in enumerate(ways)
        ],
        prompts=asked,
        samples=samples,
        limits=Limits(
            plain_step=FORWARD,
            target={str(n): FORWARD + MORE * (n - 1) for n in (1, 2, 4, 8, 16)},
            draft_token=DRAFT,
            weight_bytes=1_000_000_000,
            read_bytes_per_second=40e9,
        )
        if details
        else Limits(),
        predicted={way.name: 31.0 if way.depth == 0 else 56.0 for way in ways} if details else {},
        complete=complete,
    )


def _answer(
    way: Way, prompt: Prompt, repeat: int, turn: int, tokens: int, words: list[str], slow: float, details: bool,
    draw: random.Random,
) -> Sample:  # fmt: skip
    """One answer: its tokens from the prompt alone, its steps and times from the way."""
    known = {"prompt": prompt.id, "setting": way.name, "repeat": repeat, "turn": turn, "seed": repeat}
    if draw.random() < way.failing:
        return Sample(**known, seconds=0.1, error="connection refused <by the server>")
    text = random.Random(f"{prompt.id} {repeat}")
    ids = [text.randrange(len(words)) for _ in range(tokens)]
    if draw.random() < way.differing:
        ids[tokens // 2 :] = [(i + 1) % len(words) for i in ids[tokens // 2 :]]
    alpha = way.categories.get(prompt.category, way.alpha)
    alpha = min(max(alpha + (int(prompt.id[1:]) % 7 - 3) * 0.03, 0.0), 1.0)
    origins, drafted, accepted, gaps = "", [], [], []
    target = draft = 0.0
    while len(origins) < tokens:
        depth = min(way.depth, tokens - len(origins) - 1)
        kept = next((j for j in range(depth) if draw.random() >= alpha), depth)
        last = PLAIN if way.depth == 0 else BONUS if kept == depth else CORRECTED
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
        "drafted": drafted if way.depth else None, "accepted": accepted if way.depth else None,
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
