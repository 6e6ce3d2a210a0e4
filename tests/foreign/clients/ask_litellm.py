"""litellm: chat, text, streams, tools and responses through its OpenAI provider."""

from __future__ import annotations

import json
from typing import Any

import litellm
from ask_common import HELLO, MODEL, OPTIONS, TOOL, URL, said, text

litellm.telemetry = False
common: dict[str, Any] = {"api_base": URL + "/v1", "api_key": "x", "max_retries": 0}
made: Any = litellm.completion(model=f"openai/{MODEL}", messages=HELLO, **OPTIONS, **common)
assert made.choices[0].message.content == said()
stream: Any = litellm.completion(model=f"openai/{MODEL}", messages=HELLO, stream=True, **OPTIONS, **common)
assert "".join(c.choices[0].delta.content or "" for c in stream) == said()
old: Any = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="def f(x):", **OPTIONS, **common)
assert old.choices[0].text == text("def f(x):")
call: Any = {"type": "function", "function": {"name": "look"}}
chosen: Any = litellm.completion(
    model=f"openai/{MODEL}", messages=HELLO, tools=[TOOL], tool_choice=call, max_tokens=100, seed=1, **common
)
assert json.loads(chosen.choices[0].message.tool_calls[0].function.arguments)["at"] in ("sky", "sea")
new: Any = litellm.responses(
    model=f"openai/{MODEL}",
    input="sort a list",
    temperature=0.8,
    max_output_tokens=24,
    extra_body={"seed": 3},
    **common,
)
assert new.output[0].content[0].text == said()
print("chat, text, a stream, a tool, responses: the texts are those of raw requests")
