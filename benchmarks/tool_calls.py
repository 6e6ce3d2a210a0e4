"""Forced tool calls: `python -m benchmarks.tool_calls MODEL`. Speed over plain decoding, and whether the calls are equal.

Each tool is asked for once by its name, with the model's own template. Plain decoding and `auto` write each call in turns, in one
process. The time is that after the first token. What other calls said is forgotten before each one.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from outrider import LLM, SamplingParams
from outrider.core.intervals import interval
from outrider.serve.grammar import Grammar, Grammars
from outrider.serve.tools import PLAIN, chosen, offered

TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}


def tool(name: str, about: str, required: int, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties][:required],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = [
    tool("read_file", "Read a file of the project.", 1, path=TEXT, start_line=COUNT, end_line=COUNT),
    tool(
        "search_text", "Search for a pattern.", 2, pattern=TEXT, directory=TEXT, case_sensitive=FLAG, max_results=COUNT
    ),
    tool("edit_file", "Replace a text in a file.", 3, path=TEXT, old_text=TEXT, new_text=TEXT),
    tool("run_command", "Run a command.", 2, command=TEXT, shell={"enum": ["bash", "zsh"]}, timeout_seconds=COUNT),
    tool("create_ticket", "Create a ticket.", 3, title=TEXT, priority={"enum": ["low", "high"]}, assignee=TEXT),
    tool(
        "get_weather", "The weather of a place.", 3, city=TEXT, country_code=TEXT, unit={"enum": ["celsius", "kelvin"]}
    ),
    tool("send_email", "Send an email.", 3, recipient=TEXT, subject=TEXT, body=TEXT, urgent=FLAG),
    tool("book_table", "Book a table.", 3, restaurant=TEXT, guests=COUNT, date=TEXT, outside=FLAG),
]
ASKED = [
    "Show me the first 40 lines of src/app/main.py.",
    "Find all functions whose name begins with load_ in the folder src.",
    "In util.py, change 'return x' to 'return x + 1'.",
    "Run the tests with pytest in bash, for at most a minute.",
    "Ann must look at it at once: the program stops at its start.",
    "How warm is it in Oslo, in celsius?",
    "Tell bob@example.org that the meeting is at ten.",
    "A table for four at Chez Marie on Friday, outside please.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    llm = LLM(args.model, speculative_config={"method": "auto"}, max_num_seqs=1)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    grammars = Grammars(tokenizer, llm.loaded.model.vocab_size, llm.loaded.end_ids)
    form = chosen(None, str(tokenizer.chat_template)) or PLAIN
    params, rows = SamplingParams(temperature=0, max_tokens=args.max_tokens), list[list[float]]()
    differ = written = steps = 0
    for one, text in zip(TOOLS, ASKED, strict=True):
        offer = offered(TOOLS, {"type": "function", "function": {"name": one["function"]["name"]}}, False)
        assert offer is not None
        compiled = grammars.compiled(Grammar.tools(offer.grammar(form), [offer.tools[name] for name in offer.names]))
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(chat, tools=TOOLS, add_generation_prompt=True, return_dict=False)
        llm.decoder.drafter.reset()
        sides = [
            llm.scheduler.generate(llm.requests(ids, params, method=method, mask=grammars.mask(compiled)))[0]
            for method in ("none", None)
        ]
        plain, auto = (side.clock.total - (side.clock.time_to_first_token or 0.0) for side in sides)
        rows.append([plain, auto])
        differ += sides[0].tokens != sides[1].tokens
        written += len(sides[1].output)
        steps += sides[1].counts.speculative.num_spec_steps
        print(f"{len(sides[1].output)} tokens, {plain / auto:.2f} of plain: {sides[1].text!r}", flush=True)
    ratio = interval(np.array(rows))
    print(
        f"{len(rows)} calls: {ratio.value:.2f} times plain ({ratio.low:.2f} to {ratio.high:.2f}), "
        f"{written / steps:.2f} tokens a step, {differ} calls differ"
    )


if __name__ == "__main__":
    main()
