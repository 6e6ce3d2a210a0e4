"""`auto` without a clock: recorded texts replayed on tables of seconds, so that every figure is the same in every run.

    python -m benchmarks.replays                         the recordings of tests/data, four machines; two minutes
    python -m benchmarks.replays --machines quiet --jitter 0.15
    python -m benchmarks.replays --traces FILE --costs FILE      your own recording and costs (outrider doctor MODEL keeps them)

A replay runs the real planner. Only the drafters are played back (`benchmarks.traces`), and the target's answer is what
was recorded. Every figure is a speed over plain decoding: seconds of decoding with all drafting and all reading of the draft
model, without the target's prefill. `first request` starts anew for every text, `server` is one planner for all of them, in
three orders. The oracle knows what will be accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.baselines import MovingAverage, Small
from benchmarks.ruler import markdown, parser, save
from benchmarks.traces import read
from outrider.control import CostModel, DraftCost, Planner
from outrider.drafters.method import METHODS
from outrider_lab.tune.recorded import RecordedText
from outrider_lab.tune.replay import Machine, Played, auto, fixed, plain_seconds

TRACES = Path(__file__).resolve().parents[1] / "tests" / "data" / "traces"


def _table(plain: float, sizes: dict[int, float], drafter: str, cost: DraftCost) -> CostModel:
    """sizes: forwards in plain steps, by nodes."""
    return CostModel({}, {nodes: plain * size for nodes, size in sizes.items()}, {drafter: cost})


_QUIET = {1: 1.0, 2: 1.13, 3: 1.23, 4: 1.36, 5: 1.51, 6: 1.64, 7: 1.73, 9: 1.92, 12: 2.6, 17: 3.6}
_VNNI = {1: 1.0, 2: 1.08, 4: 1.15, 6: 1.25, 8: 1.34, 12: 1.75, 16: 2.4, 32: 4.4}
MACHINES = {
    # Qwen2.5-Coder-1.5B with its 0.5B, both Q4_K_M: two quiet AVX2 cores, and two cores with AVX-512 VNNI
    "quiet": _table(0.039, _QUIET, "draft_model", DraftCost(0.001, 0.0078, 0.0014)),
    "vnni": _table(0.0256, _VNNI, "draft_model", DraftCost(0.0004, 0.0095, 0.0006)),
    # made up: a draft as large as the target, and an accelerator that reads sixteen rows as fast as one
    "never": _table(0.039, _QUIET, "draft_model", DraftCost(0.001, 0.039, 0.004)),
    "gpu": _table(0.02, {1: 1.0, 17: 1.025, 32: 1.1}, "draft_model", DraftCost(0.0002, 0.0022, 0.0001)),
    # SmolLM2-135M with its head, two cores with AVX-512 VNNI
    "head": _table(0.0025, {1: 1.0, 4: 1.17, 16: 2.54, 32: 4.72}, "eagle", DraftCost(0.0006, 0.0001, 0.0)),
}  # fmt: skip
FILES = {"head": "smollm2-head"}


class Replays:
    """Settings on some texts at the costs of a machine. Each returns what became of every text."""

    def __init__(self, costs: CostModel, texts: Sequence[RecordedText], jitter: float = 0.0) -> None:
        self.costs, self.texts, self.jitter = costs, list(texts), jitter
        self.names = list(texts[0].drafts)
        self.lookups = [name for name in self.names if METHODS[name].cost == "lookup"]
        self.models = [name for name in self.names if name not in self.lookups]

    def planner(self) -> Planner:
        return auto(self.costs)

    def server(self, names: Sequence[str], planner: Planner, texts: Sequence[RecordedText]) -> list[Played]:
        """All texts through one planner."""
        machine = Machine(self.costs, planner, names, self.lookups, jitter=self.jitter, seed=3)
        return machine.write(texts)

    def first(self, names: Sequence[str], make: Callable[[], Planner]) -> list[Played]:
        """Each text through a planner of its own."""
        return [played for text in self.texts for played in self.server(names, make(), [text])]

    def rows(self) -> dict[str, list[Played]]:
        """Every setting, by name."""
        rows: dict[str, list[Played]] = {}
        for name in self.models:
            rows |= {f"{name} {k}": self.first([name], lambda k=k: fixed(self.costs, k)) for k in range(1, 6)}
        for name in self.lookups:
            rows[f"{name} 16"] = self.first([name], lambda: fixed(self.costs, 16))
        rows |= {name: self.first([name], self.planner) for name in self.names}
        rows["auto, first request"] = self.first(self.names, self.planner)
        mixed = list(self.texts)
        random.Random(5).shuffle(mixed)
        for order, texts in (("", self.texts), (", reversed", self.texts[::-1]), (", mixed", mixed)):
            rows[f"auto, server{order}"] = self.server(self.names, self.planner(), texts)
        for name, make in (("moving average", MovingAverage), ("small rules", Small)):
            rows[f"{name}, first request"] = [make(self.costs).write(text, self.names) for text in self.texts]
            one = make(self.costs)
            rows[f"{name}, server, mixed"] = [one.write(text, self.names) for text in mixed]
        return {**rows, "oracle": oracle_texts(self.texts, self.costs, self.models, self.lookups)}


def oracle(text: RecordedText, costs: CostModel, models: Sequence[str], lookups: Sequence[str]) -> float:
    """Seconds of decoding by a policy that knows what will be accepted: no policy is faster with these drafters."""
    end, best = len(text.output), dict[tuple[int, str], float]()
    plain, names = costs.forward(1), (*models, "")
    reads = {name: costs.drafters[name].read for name in models}
    for name in names:
        best[end, name] = 0.0
    for at in range(end - 1, -1, -1):
        for on in names:  # the model that has read the text, "" for none
            behind = reads[on] if on else 0.0
            least = plain + behind + best[at + 1, on]
            for name in lookups:
                n = text.drafts[name][at].accepted
                if n:
                    to = min(at + n + 1, end)
                    least = min(least, costs.forward(n + 1) + behind * (to - at) + best[to, on])
            for name in models:
                cost = costs.drafters[name]
                first = 0.0 if name == on else cost.read * (len(text.prompt) + at)
                for n in range(1, text.drafts[name][at].accepted + 1):
                    to = min(at + n + 1, end)
                    taken = cost.first + cost.level * n + cost.read + costs.forward(n + 1)
                    least = min(least, first + taken + best[to, name])
            best[at, on] = least
    return best[0, ""]


def oracle_texts(
    texts: Sequence[RecordedText], costs: CostModel, models: Sequence[str], lookups: Sequence[str]
) -> list[Played]:
    """What the oracle does with each text."""
    return [Played(text, oracle(text, costs, models, lookups)) for text in texts]


def by_kind(played: Sequence[Played], costs: CostModel) -> dict[str, float]:
    """Speed over plain decoding of each kind of text, and of all."""
    total: dict[str, list[float]] = {}
    for one in played:
        for kind in (one.text.kind, "all"):
            sums = total.setdefault(kind, [0.0, 0.0])
            sums[0] += plain_seconds(one.text, costs)
            sums[1] += one.seconds
    return {kind: plain / taken for kind, (plain, taken) in total.items()}


def measure(costs: CostModel, texts: Sequence[RecordedText], jitter: float) -> list[dict[str, Any]]:
    """A record for each setting. worst: the slowest text of 32 tokens or more."""
    out = list[dict[str, Any]]()
    for name, played in Replays(costs, texts, jitter).rows().items():
        speeds = [plain_seconds(p.text, costs) / p.seconds for p in played if p.tokens >= 32]
        kinds = {kind: round(speed, 3) for kind, speed in by_kind(played, costs).items()}
        out.append({"setting": name, **kinds, "worst": round(min(speeds), 3)})
    return out


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each machine and temperature, with the settings that matter most."""
    head = ["machine", "T", "auto, first request", "auto, server", "worst text", "small rules", "moving average"]
    head += ["best single setting", "share of the oracle"]
    body = list[list[str]]()
    for record in records:
        by = {r["setting"]: r for r in record["settings"]}
        simple = ("auto", "oracle", "moving average", "small rules")
        single = max((r for n, r in by.items() if not n.startswith(simple)), key=lambda r: r["all"])
        first, server = by["auto, first request"], min(r["all"] for n, r in by.items() if n.startswith("auto, server"))
        body.append(
            [record["machine"], f"{record['temperature']:g}", f"{first['all']:.2f}", f"{server:.2f}", f"{first['worst']:.2f}",
             *(f"{by[f'{n}, first request']['all']:.2f}, {by[f'{n}, server, mixed']['all']:.2f}" for n in simple[:1:-1]),
             f"{single['all']:.2f} ({single['setting']})", f"{first['all'] / by['oracle']['all']:.2f}"]
        )  # fmt: skip
    return markdown(head, body)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES))
    options.add_argument("--jitter", type=float, default=0.0, help="of single steps, the deviation of the logarithm")
    options.add_argument("--traces", type=Path)
    options.add_argument("--costs", type=Path)
    options.add_argument("--texts", type=int, help="at each temperature, spread over the file; all, if not given")
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    costs = CostModel.from_json(args.costs.read_text(encoding="utf-8")) if args.costs else None
    records = list[dict[str, Any]]()
    for machine in ["own"] if costs else args.machines:
        every = read(args.traces or TRACES / f"{FILES.get(machine, 'qwen2.5-coder')}.jsonl.gz")
        for temperature in sorted({text.temperature for text in every}):
            texts = [text for text in every if text.temperature == temperature]
            texts = texts[:: max(1, len(texts) // (args.texts or len(texts)))]
            settings = measure(costs or MACHINES[machine], texts, args.jitter)
            records.append({"machine": machine, "temperature": temperature, "texts": len(texts), "settings": settings})
            print(f"\n{machine}, T={temperature:g}, {len(texts)} texts\n")
            head = ["setting", "all", "worst", *(c for c in settings[0] if c not in ("setting", "all", "worst"))]
            print(markdown(head, [[r["setting"], *(f"{r[c]:.2f}" for c in head[1:])] for r in settings]), flush=True)
    print(f"written to {save('replays', args.out, jitter=args.jitter, records=records)}")


if __name__ == "__main__":
    main()
