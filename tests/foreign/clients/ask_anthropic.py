"""Anthropic's own client: messages, a stream, a tool, counted tokens, an error."""

from __future__ import annotations

from typing import Any

import anthropic
from ask_common import HELLO, MODEL, TOOL, URL, raw

SAME: dict[str, Any] = {"max_tokens": 24, "extra_body": {"seed": 3, "temperature": 0.8}}
said = raw("/v1/chat/completions", messages=HELLO, temperature=0.8, max_tokens=24, seed=3)["choices"][0]["message"]
client = anthropic.Anthropic(base_url=URL, api_key="x", max_retries=0)
messages: Any = HELLO
made = client.messages.create(model=MODEL, messages=messages, **SAME)
assert made.content[0].type == "text"
assert made.content[0].text == said["content"]
with client.messages.stream(model=MODEL, messages=messages, **SAME) as stream:
    assert "".join(stream.text_stream) == said["content"]
    final = stream.get_final_message()
assert (final.stop_reason, final.usage.output_tokens) == (made.stop_reason, made.usage.output_tokens)
function = TOOL["function"]
tool: Any = {"name": "look", "description": "Look.", "input_schema": function["parameters"]}
choice: Any = {"type": "tool", "name": "look"}
called = client.messages.create(
    model=MODEL, messages=messages, tools=[tool], tool_choice=choice, max_tokens=100, extra_body={"seed": 1}
)
assert called.stop_reason == "tool_use"
[block] = called.content
assert block.type == "tool_use"
result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "blue"}
turns: Any = [*HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(model=MODEL, messages=turns, tools=[tool], max_tokens=8).content
counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
assert counted == made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
assert [model.id for model in client.models.list()] == [MODEL]
refused = ""
try:
    client.messages.create(model="other", messages=messages, max_tokens=5)
except anthropic.NotFoundError as error:
    refused = str(error.type)
assert refused == "not_found_error"
print(
    "messages, a stream, a tool and its result, counted tokens, models, an error: the texts are those of raw requests"
)
