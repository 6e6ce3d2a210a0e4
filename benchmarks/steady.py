"""A steady load of several sequences, without a clock: each step is priced by a table of seconds, as in `benchmarks.replays`.

    python -m benchmarks.steady MODEL --draft-model SMALL             4, 8 and 16 slots, half code, half chat

The requests are those of `benchmarks.clients`, some for each slot, and all wait from the beginning. The models really write
them, plainly and by default, and the texts must be equal. The planner believes the table and learns no other seconds. So other
programs change nothing, and the same command prints the same figures. A prompt costs both sides the same: its tokens at the
price of the largest step. `benchmarks.clients` measures the same load live.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.clients import Body, requests
from benchmarks.replays import MACHINES
from benchmarks.ruler import parser, save
from benchmarks.texts import WORKLOADS
from outrider import LLM, SamplingParams
from outrider.control import Costs
from outrider.control.costs import MOST
from outrider.core.types import Step
from outrider.engine.request import Sequence as Text
from outrider.models.load import Loaded, load

PAIR = ("quiet", "vnni")  # machines on which a draft model was measured beside its target
FIELDS = ("temperature", "top_p", "max_tokens", "seed")


class TableCosts(Costs):
    """Costs that no step corrects."""

    def observe_forward(self, nodes: int, seconds: float) -> None: ...

    def observe_draft(self, name: str, rows: int, levels: int, read: int, seconds: float) -> None: ...


class Steps:
    """What the steps of a load did."""

    def __init__(self) -> None:
        self.nodes, self.charges = list[int](), list[Any]()

    def step(self, step: Step, seconds: list[float | None]) -> None:
        self.nodes.append(sum(map(len, step.draft.host)))
        self.charges += step.draft.notes[0].charges if step.draft.notes else ()

    def finished(self, sequence: Text) -> None: ...

    def seconds(self, costs: Costs) -> tuple[float, float]:
        """What they cost: in all, and the part of drafters."""
        costs.stand(0.0)
        drafting = 0.0
        for charge in self.charges:
            drafting += costs.draft(charge.name, charge.rows, charge.levels) if charge.rows else 0.0
            drafting += costs.reading(charge.name, charge.read)
        return sum(map(costs.forward, self.nodes)) + drafting, drafting


def write(
    model: Loaded, config: Body, slots: int, bodies: Sequence[Body], costs: Costs | None = None
) -> tuple[Steps, list[Text]]:
    """What the steps did for some requests, and the texts. costs: that the planner believes."""
    llm, steps = LLM(model, speculative_config=config, max_num_seqs=slots), Steps()
    if costs is not None and llm.runtime.roster is not None:
        llm.runtime.roster.planner.costs = costs
    llm.scheduler.watch(steps)
    asked = list[Any]()
    for body in bodies:
        params = SamplingParams(**{name: body[name] for name in FIELDS})
        asked += llm.requests(llm.encode(body.get("messages") or body["prompt"]), params)
    return steps, llm.scheduler.generate(asked)


def main(words: Sequence[str] | None = None) -> None:
    args = parser(__doc__)
    args.add_argument("model")
    args.add_argument("--draft-model", help="for the method, if it has one")
    args.add_argument("--method", default="auto")
    args.add_argument("--slots", type=int, nargs="+", default=[4, 8, 16], help="sequences at once")
    args.add_argument("--requests", type=int, default=3, help="for each slot")
    args.add_argument("--machines", nargs="+", choices=PAIR, default=PAIR)
    args.add_argument("--workloads", nargs="+", default=["code", "chat"], choices=WORKLOADS)
    args.add_argument("--temperatures", type=float, nargs="+", default=[0, 0, 0.7, 1.0], help="one is drawn")
    args.add_argument("--out", type=Path, help="a file for the measurement")
    options = args.parse_args(words)
    model, results = load(options.model, device="cpu"), list[Body]()
    chat = bool(getattr(model.tokenizer, "chat_template", None))
    config = {"method": options.method} | ({"model": options.draft_model} if options.draft_model else {})
    for slots in options.slots:
        bodies = list(islice(requests(options.workloads, options.temperatures, chat), slots * options.requests))
        plain, texts = write(model, {"method": "none"}, slots, bodies)
        for machine in options.machines:
            costs = TableCosts(MACHINES[machine])
            steps, same = write(model, config, slots, bodies, costs)
            assert [text.output for text in same] == [text.output for text in texts], "texts differ"
            (base, _), (seconds, drafting) = plain.seconds(costs), steps.seconds(costs)
            prompts = sum(len(text.prompt) for text in texts) * costs.forward(MOST) / MOST
            result = {
                "slots": slots,
                "machine": machine,
                "decoding": base / seconds,
                "requests": (base + prompts) / (seconds + prompts),
                "prompts": prompts / (base + prompts),
                "drafting": drafting / seconds,
                "steps": len(steps.nodes) / len(plain.nodes),
            }
            results.append(result)
            print(
                f"{slots} slots, {machine}, {len(bodies)} texts equal: {result['decoding']:.3f} times as fast without "
                f"prompts, {result['requests']:.3f} with them; of the time {result['prompts']:.2f} is prompts (plain), "
                f"{result['drafting']:.3f} drafters; {result['steps']:.2f} of plain's steps",
                flush=True,
            )
    if options.out is not None:
        save("steady", options.out, options=vars(options), results=results)


if __name__ == "__main__":
    main()
