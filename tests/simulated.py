"""A machine that only keeps time: a controller's steps with known costs and known acceptance, and no model at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from outrider.tune import Controller
from outrider.types import Budget, Draft, Kept, Step, Verdict


@dataclass
class Machine:
    """Costs are in plain steps of one row. A guess is right with chance `alpha(row's tokens)`, given those before it."""

    alpha: Callable[[int], float] = lambda written: 0.7
    node: float = 0.05  # of one more guess in the target's forward, a row
    level: float = 0.1  # of one level of drafting
    read: float = 0.0  # per token that the drafter has missed
    row: float = 0.3  # of one more row in a plain step
    came: float = 1.0  # chance that the drafter has any guess at all
    context: float = 0.0  # how much slower a plain step is per 1000 tokens
    jitter: float = 0.03
    pauses: float = 0.01  # chance of a step that takes 5 times as long
    prompt: int = 50
    seed: int = 0
    time: float = 0.0
    plain_time: float = 0.0  # what the same tokens would have taken without drafting
    tokens: int = 0
    depths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.position: dict[int, int] = {}
        self.level_of: dict[int, int] = {}

    def start(self, row: int) -> None:
        self.position[row], self.level_of[row] = self.prompt, 0

    def plain(self, rows: int) -> float:
        return (1 + self.row * (rows - 1)) * (1 + self.context * max(self.position.values()) / 1000)

    def run(self, controller: Controller, steps: int = 0, tokens: int = 0) -> None:
        """So many steps, or until so many tokens are written in all."""
        stop = self.tokens + tokens
        while steps > 0 or self.tokens < stop:
            steps -= 1
            rows = [*self.position]
            budgets = controller.budgets(rows)
            controller.observe(self.step(rows, budgets))

    def step(self, rows: list[int], budgets: list[Budget]) -> Step:
        rng, kept, behind, nodes = self.rng, [], 0, 0
        plain = self.plain(len(rows))
        for row, budget in zip(rows, budgets, strict=True):
            right = 0
            if budget.depth:
                behind += self.position[row] - self.level_of[row]
                if rng.random() < self.came:
                    nodes = max(nodes, budget.max_nodes)
                    while right < budget.depth and rng.random() < self.alpha(self.position[row] - self.prompt):
                        right += 1
            kept.append(Kept([1] * (right + 1), [0], right))
        positions = [self.position[row] for row in rows]
        for row, budget, k in zip(rows, budgets, kept, strict=True):
            self.position[row] += len(k.tokens)
            if budget.depth:
                self.level_of[row] = self.position[row]
        depth = max(b.depth for b in budgets)
        slow = rng.lognormvariate(0, self.jitter) * (5 if rng.random() < self.pauses else 1)
        draft = self.level * depth + self.read * behind
        seconds = {
            "draft": draft * slow,
            "target": plain * (1 + self.node * nodes) * slow,
            "verify": 0.0,
            "commit": 0.0,
        }
        written = sum(len(k.tokens) for k in kept)
        self.time += sum(seconds.values()) / slow  # the controller sees the noise; it is judged without
        self.plain_time += written / len(rows) * plain
        self.tokens += written
        self.depths.append(depth)
        tokens = torch.zeros(len(rows), nodes + 1, dtype=torch.long)
        none = torch.zeros(len(rows), dtype=torch.long)
        return Step(Draft(tokens, tokens), Verdict(tokens, none, none), kept, rows, positions, budgets, seconds)

    @property
    def speed(self) -> float:
        """Against plain decoding."""
        return self.plain_time / self.time
