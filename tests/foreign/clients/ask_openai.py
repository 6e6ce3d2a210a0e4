"""The openai package: text, chat, streams, tools, JSON, responses."""

from __future__ import annotations

import json
from typing import Any

import openai
from ask_common import HELLO, MODEL, OPTIONS, TOOL, URL, said, text

client: Any = openai.OpenAI(base_url=URL + "/v1", api_key="x", max_retries=0, timeout=300)
assert MODEL in [m.id for m in client.models.list()]
assert client.completions.create(model=MODEL, prompt="def f(x):", **OPTIONS).choices[0].text == text("def f(x):")
parts = client.completions.create(model=MODEL, prompt="def f(x):", stream=True, **OPTIONS)
assert "".join(c.choices[0].text for c in parts if c.choices) == text("def f(x):")
assert client.chat.completions.create(model=MODEL, messages=HELLO, **OPTIONS).choices[0].message.content == said()
with client.chat.completions.stream(model=MODEL, messages=HELLO, **OPTIONS) as stream:
    assert "".join(e.delta for e in stream if e.type == "content.delta") == said()
call: Any = {"type": "function", "function": {"name": "look"}}
chosen = client.chat.completions.create(
    model=MODEL, messages=HELLO, tools=[TOOL], tool_choice=call, max_tokens=100, seed=1
)
assert json.loads(chosen.choices[0].message.tool_calls[0].function.arguments)["at"] in ("sky", "sea")
schema = {"name": "place", "schema": TOOL["function"]["parameters"], "strict": True}  # type: ignore[index]
form = {"type": "json_schema", "json_schema": schema}
made = client.chat.completions.create(model=MODEL, messages=HELLO, response_format=form, max_tokens=100, seed=1)
assert json.loads(made.choices[0].message.content)["at"] in ("sky", "sea")
options: dict[str, Any] = {"temperature": 0.8, "max_output_tokens": 24, "extra_body": {"seed": 3}}
first = client.responses.create(model=MODEL, input="sort a list", **options)
assert first.output_text == said()
stream = client.responses.create(model=MODEL, input="sort a list", stream=True, **options)
assert "".join(e.delta for e in stream if e.type == "response.output_text.delta") == said()
assert client.responses.create(model=MODEL, input="go on", previous_response_id=first.id, **options).output_text
refused = ""
try:
    client.chat.completions.create(model="other", messages=HELLO)
except openai.NotFoundError as error:
    refused = str(error.code)
assert refused == "model_not_found"
print("text, chat, streams, a tool, a schema, responses: the texts are those of raw requests")
