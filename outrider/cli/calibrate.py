"""`outrider calibrate`. Imports torch only when the command runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from outrider.cli.options import Debug, LoadOptions, option, parse_speculative_config
from outrider.cli.terminal import loading, readable


def calibrate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, a hub name or a built-in model.")
    ],
    speculative_config: Annotated[
        str,
        option(
            "Speculation", 'How to speculate, as JSON or a file with it; "auto" tries all methods.', metavar="JSON|FILE"
        ),
    ] = '{"method": "auto"}',
    max_num_seqs: Annotated[int, option("Engine", "Texts that are written side by side, at most.", min=1)] = 8,
    *,
    load: LoadOptions,
    debug: Debug = False,
) -> None:
    """Measure what a step costs on this machine, once. Later runs with the same settings start from these costs."""
    with readable(debug):
        config = parse_speculative_config(speculative_config)
        with loading(model):
            from outrider.core.files import cache_folder
            from outrider.llm import LLM

            llm = LLM(model, speculative_config=config, max_num_seqs=max_num_seqs, calibrate=True, **asdict(load))
        if llm.planner is None or llm.planner.lengths is not None:
            raise ValueError(
                f"{config} uses no measured costs: nothing drafts, or its controller is fixed. "
                'Measure for example {"method": "auto"}'
            )
        model = llm.planner.costs.model
        print(f"a plain step takes {1000 * model.forward(1):.1f} ms")
        for nodes, seconds in sorted(model.target.items()):
            print(f"  a step over {nodes} nodes: {seconds / model.forward(1):.2f} plain steps")
        for name, cost in model.drafters.items():
            level, read = cost.level / model.forward(1), 1000 * cost.read
            print(f"  {name}: {level:.2f} plain steps a token, and {read:.2f} ms for a token of the prompt")
        print(f"kept in {cache_folder()}")
