"""`outrider calibrate`. Imports torch only when the command runs."""

from __future__ import annotations

from typing import Annotated

from outrider.cli.command import as_command
from outrider.cli.options import Debug, LoadOptions, ModelArgument, option, parse_speculative_config
from outrider.cli.terminal import loading, readable


@as_command(
    "Measure",
    "outrider calibrate builtin:code",
    """outrider calibrate ./my-model --speculative-config '{"model": "./my-small-model"}'""",
)
def calibrate(
    model: ModelArgument,
    speculative_config: Annotated[
        str,
        option(
            "Speculation", 'How to speculate, as JSON or a file with it; "auto" tries all methods.', metavar="JSON|FILE"
        ),
    ] = '{"method": "auto"}',
    *,
    load: LoadOptions,
    debug: Debug = False,
) -> None:
    """Measure what steps and drafts of a model cost on this machine. Drafts are planned with these costs.

    Every command measures them for a second when it first loads a model. This measures more sizes, more often. Later runs with
    the same model and settings start from the result.
    """
    with readable(debug):
        config = parse_speculative_config(speculative_config)
        with loading(model):
            from outrider.core.files import cache_folder
            from outrider.engine.llm import LLM

            llm = LLM(model, speculative_config=config, calibrate=True, **dict(load))
        roster = llm.runtime.roster
        if roster is None or roster.planner.lengths is not None:
            raise ValueError(
                f"{config} uses no measured costs: nothing drafts, or its controller is fixed. "
                'Measure for example {"method": "auto"}'
            )
        costs = roster.planner.costs.model
        plain = costs.forward(1)
        print(f"A plain step, which writes one token, takes {1000 * plain:.1f} ms.")
        for nodes, seconds in sorted(costs.target.items()):
            if nodes > 1:
                tokens = f"{nodes - 1} draft token{'s' if nodes > 2 else ''}"
                print(f"  to check {tokens:<15} {seconds / plain:.2f} plain steps")
        for name, cost in costs.drafters.items():
            reads = f", {1000 * cost.read:.2g} ms to read a token of the prompt" if cost.read else ""
            print(f"  {name} drafts a token in {cost.level / plain:.2f} plain steps{reads}")
        print(f"The costs are kept in {cache_folder()}.")
