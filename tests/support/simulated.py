"""A machine that only keeps time: a controller's steps with known costs and known acceptance, and no model at all.

python tests/support/simulated.py        how near `adaptive` comes to the best fixed depth, by the length of the text: minutes
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from outrider.control import Adaptive, Controller
from outrider.control.shapes import expected_accepted, geometric, optimal_shape, speedup
from outrider.core.types import Budget, Commit, Draft, Step, Verdict


@dataclass
class Machine:
    """Costs are in plain steps of one row. A guess is right with chance `alpha(row's tokens)`, given those before it."""

    alpha: Callable[[int], float] = lambda written: 0.7
    others: tuple[float, ...] = ()  # chances of the siblings that a tree has beside a chain's guess
    node: float = 0.05  # of one more guess in the target's forward, a row
    level: float = 0.1  # of one level of drafting
    wide: float = 1.0  # how much dearer a tree's level is
    read: float = 0.0  # per token that the drafter has missed
    row: float = 0.3  # of one more row in a plain step
    each: bool = False  # does a level cost as much again for every row?
    came: float = 1.0  # chance that the drafter has any guess at all
    sure: Callable[[random.Random, int], float] | None = None  # chance of a guess, drawn anew; the drafter knows it
    context: float = 0.0  # how much slower a plain step is per 1000 tokens
    jitter: float = 0.03
    pauses: float = 0.01  # chance of a step that takes 5 times as long
    swing: float = 1.0  # how many times as long everything takes in slow phases, which come and go about every 25 steps
    prompt: int = 50
    seed: int = 0
    time: float = 0.0
    plain_time: float = 0.0  # what the same tokens would have taken without drafting
    tokens: int = 0
    # Several drafters: machines whose alpha, level, read, each and came count for the rows in `method`.
    drafters: dict[str, Machine] = field(default_factory=dict)
    method: dict[int, str] = field(default_factory=dict)
    draft_seconds: dict[str, float] = field(default_factory=dict)  # of the last step, by drafter
    depths: list[int] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)  # of the last step

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.position: dict[int, int] = {}
        self.level_of: dict[int, int] = {}
        self.slowed = False

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
        rng, kept, nodes, parents = self.rng, [], 0, [[-1] for _ in rows]
        behind = dict.fromkeys(("", *self.drafters), 0)
        plain = self.plain(len(rows))
        for b, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
            path, name = [0], self.method.get(row, "")
            if budget.depth:
                drafter = self.drafters.get(name, self)
                behind[name] += self.position[row] - self.level_of[row]
                if drafter.sure is not None:
                    parents[b], path = drafter.judged(budget, self.position[row] - self.prompt, rng)
                    nodes = max(nodes, len(parents[b]) - 1)
                elif rng.random() < drafter.came:
                    alpha = drafter.alpha(self.position[row] - self.prompt)
                    parents[b], path = self.guesses(budget, alpha)
                    nodes = max(nodes, budget.max_nodes)
            kept.append(Commit([1] * len(path), path, len(path) - 1))
        positions = [self.position[row] for row in rows]
        for row, budget, k in zip(rows, budgets, kept, strict=True):
            self.position[row] += len(k.tokens)
            if budget.depth:
                self.level_of[row] = self.position[row]
        depth = nodes if self.sure is not None else max(b.depth for b in budgets)
        slow = rng.lognormvariate(0, self.jitter) * (5 if rng.random() < self.pauses else 1)
        if self.swing != 1:
            self.slowed ^= rng.random() < 1 / 25
            slow *= self.swing if self.slowed else 1
        self.draft_seconds = {}
        for name, missed in behind.items():
            own = [b for row, b in zip(rows, budgets, strict=True) if self.method.get(row, "") == name and b.depth]
            drafter = self.drafters.get(name, self)
            if own:
                width = drafter.wide if max(b.width for b in own) > 1 else 1.0
                deep = nodes if drafter.sure is not None else max(b.depth for b in own)
                level = drafter.level * deep * width * (len(own) if drafter.each else 1)
                self.draft_seconds[name] = (level + drafter.read * missed) * slow
        seconds = {
            "draft": sum(self.draft_seconds.values()),
            "target": plain * (1 + self.node * nodes) * slow,
            "verify": 0.0,
            "commit": 0.0,
        }
        written = sum(len(k.tokens) for k in kept)
        self.time += sum(seconds.values()) / slow  # the controller sees the noise; it is judged without
        self.plain_time += written / len(rows) * plain
        self.tokens += written
        self.depths.append(depth)
        self.budgets = budgets
        tree = torch.tensor([p + [-2] * (nodes + 1 - len(p)) for p in parents])
        none = torch.zeros(len(rows), dtype=torch.long)
        confidence = torch.ones(tree.shape) if self.sure is not None and depth else None
        return Step(
            Draft(tree, tree, confidence=confidence), Verdict(tree, none, none), kept, rows, positions, budgets, seconds
        )

    def judged(self, budget: Budget, written: int, rng: random.Random) -> tuple[list[int], list[int]]:
        """(parents, accepted nodes) of a chain by a drafter that knows the chance of each guess, and obeys the budget."""
        assert self.sure is not None
        parents, path, alive = [-1], [0], 1.0
        while len(parents) <= budget.depth and (len(parents) == 1 or alive >= budget.min_probability):
            chance = self.sure(rng, written + len(parents))
            alive *= chance
            if len(path) == len(parents) and rng.random() < chance:
                path.append(len(parents))
            parents.append(len(parents) - 1)
        return parents, path

    def guesses(self, budget: Budget, alpha: float) -> tuple[list[int], list[int]]:
        """(parents, accepted nodes) of a draft: the best tree for these chances, likeliest nodes first."""
        ranks = (alpha, *(o * (1 - alpha) for o in self.others))
        shape = optimal_shape(budget, ranks if budget.width > 1 else ranks[:1])
        parents, path = list(shape.parents), [0]
        while True:
            draw = self.rng.random()
            rank = next((r for r, total in enumerate(itertools.accumulate(ranks)) if draw < total), None)
            node = None if rank is None else shape.children.get((path[-1], rank))
            if node is None:
                return parents, path
            path.append(node)

    @property
    def speed(self) -> float:
        """Against plain decoding."""
        return self.plain_time / self.time

    def best(self, limit: Budget) -> float:
        """The speed of the best fixed budget for one row, exactly, reading aside."""
        alpha = self.alpha(0)
        ranks = (alpha, *(o * (1 - alpha) for o in self.others))
        speeds = [1.0]
        for depth in range(1, limit.depth + 1):
            speeds.append(speedup(geometric(alpha, depth), self.level * depth, 1 + self.node * depth))
            for nodes in range(depth + 1, limit.max_nodes + 1) if limit.width > 1 else ():
                worth = expected_accepted(optimal_shape(Budget(depth, limit.width, nodes), ranks), ranks)
                speeds.append((1 + worth) / (self.level * self.wide * depth + 1 + self.node * nodes))
        return max(speeds)


# chance that a guess is right, a node's and a level's share of a plain step, how slow slow phases are, and the longest draft
CASES = (
    (0.97, 0.04, 0.0, 1.0, 16),
    (0.97, 0.19, 0.0, 1.0, 16),
    (0.8, 0.06, 0.05, 1.0, 16),
    (0.7, 0.12, 0.025, 1.5, 16),
    (0.6, 0.04, 0.03, 2.0, 8),
    (0.48, 0.12, 0.025, 1.0, 16),
    (0.48, 0.12, 0.025, 1.5, 16),
    (0.3, 0.1, 0.05, 1.0, 8),
    (0.1, 0.12, 0.05, 1.0, 8),
    (0.0, 0.12, 0.05, 1.0, 8),
)


def main(runs: int = 100) -> None:
    print("right  node  level  swing  best | of the best, mean (lowest twentieth), over 64, 256 and 1500 tokens")
    for alpha, node, level, swing, depth in CASES:
        best, cells = Machine(alpha=lambda _, a=alpha: a, node=node, level=level).best(Budget(depth)), list[str]()
        for tokens in (64, 256, 1500):
            found = list[float]()
            for seed in range(runs):
                machine = Machine(lambda _, a=alpha: a, node=node, level=level, swing=swing, seed=seed)
                machine.start(0)
                machine.run(Adaptive(Budget(depth)), tokens=tokens)
                found.append(machine.speed / best)
            cells.append(f"{statistics.mean(found):.3f} ({sorted(found)[runs // 20]:.3f})")
        print(f"{alpha:5}  {node:4}  {level:5}  {swing:5}  {best:4.2f} | {'  '.join(cells)}", flush=True)


def always(alpha):
    return lambda written: alpha


def after(machine, controller, skip, tokens):
    """Speed against plain decoding over so many tokens, after the first ones."""
    machine.run(controller, tokens=skip)
    time, plain = machine.time, machine.plain_time
    machine.run(controller, tokens=tokens)
    return (machine.plain_time - plain) / (machine.time - time)


def machines(count, rows=1, **costs):
    for seed in range(count):
        machine = Machine(seed=seed, **costs)
        for row in range(rows):
            machine.start(row)
        yield machine


HOSTILE = {
    "wrong guesses that cost no time": {"alpha": always(0.0), "level": 0.0, "node": 0.1},
    "and dear nodes": {"alpha": always(0.0), "level": 0.0, "node": 0.5},
    "one in ten right": {"alpha": always(0.1), "level": 0.08, "node": 0.1, "read": 0.02},
    "a draft as large as the target": {"alpha": always(1.0), "level": 1.0, "node": 0.05, "read": 0.2},
    "as large, and wrong": {"alpha": always(0.0), "level": 1.0, "node": 0.05, "read": 0.2},
    "a lookup that finds nothing": {"came": 0.0, "level": 0.001},
    "a lookup that finds the wrong things": {"came": 0.3, "alpha": always(0.0), "level": 0.001, "node": 0.1},
    "nodes as dear as steps": {"alpha": always(0.5), "level": 0.02, "node": 1.0},
    "slower as the text grows": {"alpha": always(0.05), "level": 0.1, "node": 0.1, "context": 1.0},
}


if __name__ == "__main__":
    main()
