"""Trees against chains at equal node count: accepted tokens per step, whatever a node may cost.

    python -m benchmarks.trees                                   the built-in pair, temperatures 0, 0.3, 0.7 and 1
    python -m benchmarks.trees --nodes 8 --tokens 64 --prompts 4  shorter

Every arm drafts the same number of nodes a step for the same prompts and seeds. Arms under `match` write the same text, so
they are compared at the very same positions; the others keep the distribution and write their own. Counts, no times.
"""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import RESULTS
from benchmarks.forwards import CONTEXT, forward_seconds, read_context
from benchmarks.ruler import markdown, parser, save
from benchmarks.texts import humaneval
from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.core.tree import depth
from outrider.core.types import Budget, Siblings, Step
from outrider.drafters.model.children import child_scores, children
from outrider.drafters.model.confidence import LogitError
from outrider.drafters.model.draft_model import ModelDrafter
from outrider.drafters.shapes import BY_RANK, Shape, optimal_shape
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.models.load import Loaded, load
from outrider_lab.gain import expected_accepted

LENGTH = 1024
WIDTH = 8


class NoiseBlind(ModelDrafter):
    """Ranks children by q alone, as other systems do."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.error = RankedByQ()


class RankedByQ(LogitError):
    def likeliest(
        self, warp: Any, logits: Any, extra: Any, width: int, noise: Any, stream: Any, position: Any, subset: Any
    ) -> Any:
        best = children(child_scores(warp, logits, extra, subset), width, Siblings.POINT, noise, stream, position,
                        greedy=[True] * len(logits), subset=subset)  # fmt: skip
        return best.tokens.tolist(), best.log_q.tolist()


@dataclass(frozen=True)
class Arm:
    """A way to spend the nodes."""

    name: str
    verifier: str
    budget: Callable[[int], Budget]
    drafter: type[ModelDrafter] = ModelDrafter
    siblings: Siblings = Siblings.WITHOUT_REPLACEMENT
    shaped: bool = False  # by the optimal shape for measured chances by rank


def sized_shape(
    limit: Budget, by_rank: abc.Sequence[float], target_ms: Callable[[int], float], draft_ms: Callable[[int], float]
) -> Shape:
    """The shape with the most committed tokens per second, from the root alone up to the limit.

    If nodes are expensive the answer is a chain, or the root alone: "do not speculate". Each depth and node count is tried.

    Args:
        limit: of depth, width and nodes.
        by_rank: the chance of a child by its rank.
        target_ms: time of a target's forward over so many nodes, the root counted.
        draft_ms: time of drafting so many levels.
    """
    best, rate = Shape((-1,), (0,)), 1.0 / target_ms(1)
    for levels in range(1, limit.depth + 1):
        whole = optimal_shape(Budget(levels, limit.width, limit.max_nodes), by_rank)
        value, total = [1.0], 1.0
        for n, (parent, rank) in enumerate(zip(whole.parents[1:], whole.ranks[1:], strict=True), start=1):
            value.append(value[parent] * by_rank[rank])
            total += value[n]  # nodes come in the order of their value: a prefix is the best tree of its size
            per_ms = total / (target_ms(n + 1) + draft_ms(levels))
            if per_ms > rate:
                best, rate = Shape(whole.parents[: n + 1], whole.ranks[: n + 1]), per_ms
    return best


def deep(nodes: int) -> int:
    """Levels that a tree of so many nodes may have."""
    return max(2, nodes // 2 + 1)


ARMS = (
    Arm("chain, match (shared noise)", "match", lambda n: Budget(n)),
    Arm("tree, match: noise-aware, best first", "match", lambda n: Budget(deep(n), WIDTH, n)),
    Arm("tree, match: noise-aware, optimal shape", "match", lambda n: Budget(deep(n), WIDTH, n), shaped=True),
    Arm("tree, match: top of q, best first", "match", lambda n: Budget(deep(n), WIDTH, n), drafter=NoiseBlind),
    Arm("chain, rejection", "rejection", lambda n: Budget(n)),
    Arm("chain, block", "block", lambda n: Budget(n)),
    Arm("tree, rejection without replacement", "rejection", lambda n: Budget(deep(n), WIDTH, n), shaped=True),
    Arm(
        "tree, rejection with replacement",
        "rejection",
        lambda n: Budget(deep(n), WIDTH, n),
        siblings=Siblings.IID,
        shaped=True,
    ),
    Arm(
        "tree, top k-1 and one drawn",
        "rejection",
        lambda n: Budget(deep(n), WIDTH, n),
        siblings=Siblings.TOP_THEN_SAMPLED,
        shaped=True,
    ),
    Arm("tree, traversal", "traversal", lambda n: Budget(deep(n), WIDTH, n), shaped=True),
)


def by_rank(steps: abc.Sequence[Step], width: int = WIDTH) -> list[float]:
    """The chance that the child of rank r is the accepted one, at visited nodes that have it; made not increasing."""
    hit, seen = np.zeros(width), np.zeros(width)
    for step in steps:
        for parents, (nodes, _) in zip(step.draft.parents.tolist(), step.verdict.host, strict=True):
            for at, follow in zip(nodes, [*nodes[1:], -1], strict=True):
                children = [n for n, p in enumerate(parents) if p == at][:width]
                seen[: len(children)] += 1
                if follow in children:
                    hit[children.index(follow)] += 1
    chances = (hit + 0.01) / (seen + 1)
    return np.minimum.accumulate(chances).tolist()


def run(
    arm: Arm, nodes: int, target: Loaded, draft: Any, prompts: abc.Sequence[abc.Sequence[int]], tokens: int, temperature: float,
    shape: Callable[[Budget], Shape] | None,
) -> list[Step]:  # fmt: skip
    """All steps of an arm over the prompts, one text at a time."""
    drafter = arm.drafter(draft, 1, LENGTH, siblings=arm.siblings, shape=shape)
    budget = arm.budget(nodes)
    engine = Decoder(target.model, drafter, arm.verifier, Fixed(budget.depth, budget.width, budget.nodes), num_slots=1,
                     max_length=LENGTH)  # fmt: skip
    params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
    requests = [Request(n, list(p), params, seed=n) for n, p in enumerate(prompts)]
    scheduler = Scheduler(engine, raises=True)
    return [step for step, _ in scheduler.run(scheduler.add(requests)) if step is not None]


def measure(
    target: Loaded,
    draft: Any,
    prompts: abc.Sequence[abc.Sequence[int]],
    nodes: abc.Sequence[int],
    tokens: int,
    temperature: float,
) -> list[dict[str, Any]]:
    """One record per arm and node count: accepted tokens per step, and nodes drafted per step."""
    records = []
    for arm in ARMS:
        if temperature == 0 and arm.verifier != "match":
            continue  # all of them walk the same argmax
        shape, chances = None, None
        if arm.shaped:
            wide = Budget(4, WIDTH, 32)
            pilot = run(
                arm, 32, target, draft, prompts[:2], tokens, temperature, lambda _: optimal_shape(wide, BY_RANK)
            )
            chances = by_rank(pilot)
            shape = lambda b, chances=chances: optimal_shape(b, chances)  # noqa: E731
        for n in nodes:
            steps = run(arm, n, target, draft, prompts, tokens, temperature, shape)
            accepted = [int(a) for s in steps for a in s.verdict.accepted]
            drafted = [int(d) for s in steps for d in s.draft.num_draft_tokens]
            records.append(
                {
                    "arm": arm.name, "temperature": temperature, "nodes": n,
                    "accepted": float(np.mean(accepted)), "drafted": float(np.mean(drafted)),
                    "error": float(np.std(accepted) / len(accepted) ** 0.5), "steps": len(steps),
                    "by_rank": chances and [round(c, 4) for c in chances],
                }
            )  # fmt: skip
            print(f"T={temperature} n={n:2} {arm.name:45} {records[-1]['accepted']:.3f} ± {records[-1]['error']:.3f} "
                  f"({records[-1]['drafted']:.1f} nodes)", flush=True)  # fmt: skip
    return records


def best_here(target: Loaded, draft: Any, chances: abc.Sequence[float], most: int = 16) -> dict[str, Any]:
    """The tree that pays best on this machine: the optimal shape for these chances, sized by measured forwards."""
    times = forward_seconds({"target": (target.model, read_context(target.model, CONTEXT))}, range(1, most + 2))[
        "target"
    ]
    of_target = {nodes: min(seconds) for nodes, seconds in times.items()}
    level = min(forward_seconds({"draft": (draft, read_context(draft, CONTEXT))}, [1])["draft"][1])
    ratio = [round(of_target[n] / of_target[1], 3) for n in (1, 2, 4, 8, 16)]
    shape = sized_shape(Budget(8, WIDTH, most), chances, of_target.__getitem__, lambda levels: levels * level)
    deepest = int(depth(np.array([shape.parents])).max())
    rate = (1 + expected_accepted(shape, chances)) * of_target[1]
    drafted = level * deepest + of_target[len(shape.parents)]
    return {"target_over_one": ratio, "draft_over_target": round(level / of_target[1], 3), "nodes": len(shape.parents) - 1,
            "depth": deepest, "widest": max(shape.widths), "predicted_speedup": round(rate / drafted, 2)}  # fmt: skip


def table(records: abc.Sequence[dict[str, Any]]) -> str:
    """Markdown: an arm a line, a column for each temperature and node count."""
    columns = sorted({(r["temperature"], r["nodes"]) for r in records})
    cells = {(r["arm"], r["temperature"], r["nodes"]): f"{r['accepted']:.2f}" for r in records}
    head = ["accepted tokens per step", *(f"T={t:g}, {n} nodes" for t, n in columns)]
    body = [[name, *(cells.get((name, *c), "") for c in columns)] for name in dict.fromkeys(r["arm"] for r in records)]
    return markdown(head, body)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="builtin:code")
    options.add_argument("--draft", default="builtin:code-draft")
    options.add_argument("--nodes", type=int, nargs="+", default=[4, 8, 16])
    options.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 0.7, 1.0])
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument(
        "--price", action="store_true", help="only: the tree that pays best here, by the newest chances"
    )
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    target = load(args.target, device="cpu")  # in the precision of the checkpoint
    draft = load(args.draft, device="cpu").model
    if args.price:
        newest = json.loads(sorted(RESULTS.glob("*-trees.json"))[-1].read_text(encoding="utf-8"))["trees"]
        for r in newest:
            if r["by_rank"] and "noise-aware" in r["arm"] and r["nodes"] == 8:
                print(f"T={r['temperature']:g}", best_here(target, draft, r["by_rank"]))
        return
    prompts = [target.tokenizer(p)["input_ids"] for p in humaneval(args.prompts)]  # pyright: ignore[reportOptionalCall]
    records = [r for t in args.temperatures for r in measure(target, draft, prompts, args.nodes, args.tokens, t)]
    print(table(records))
    pair = {"target": args.target, "draft": args.draft, "tokens": args.tokens, "prompts": args.prompts}
    print(f"written to {save('trees', args.out, **pair, trees=records)}")


if __name__ == "__main__":
    main()
