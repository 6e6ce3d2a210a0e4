"""langchain-openai: ChatOpenAI and OpenAI, streams, tools, structured output, and the Responses API."""

from __future__ import annotations

from typing import Any

from ask_common import MODEL, TOOL, URL, said, text
from langchain_openai import ChatOpenAI, OpenAI

common: dict[str, Any] = {"model": MODEL, "base_url": URL + "/v1", "api_key": "x", "temperature": 0.8, "max_retries": 0}
chat = ChatOpenAI(seed=3, max_tokens=24, **common)
assert chat.invoke("sort a list").content == said()
assert "".join(str(c.content) for c in chat.stream("sort a list")) == said()
assert [m.content for m in chat.batch(["sort a list"] * 3)] == [said()] * 3
assert OpenAI(seed=3, max_tokens=24, **common).invoke("def f(x):") == text("def f(x):")
long = ChatOpenAI(max_tokens=200, seed=1, **common)
[call] = long.bind_tools([TOOL], tool_choice="look").invoke("sort a list").tool_calls  # type: ignore[attr-defined]
assert call["args"]["at"] in ("sky", "sea")
schema = {**TOOL["function"]["parameters"], "title": "Place"}  # type: ignore[index]
made: Any = long.with_structured_output(schema, method="json_schema").invoke("sort a list")
assert made["at"] in ("sky", "sea")
new = ChatOpenAI(use_responses_api=True, max_tokens=24, extra_body={"seed": 3}, **common)
first = new.invoke("sort a list")
assert first.text == said()
assert "".join(c.text for c in new.stream("sort a list")) == said()
going = ChatOpenAI(use_responses_api=True, use_previous_response_id=True, max_tokens=24, **common)
assert going.invoke([("user", "sort a list"), first, ("user", "reverse it")]).text
new_tools = ChatOpenAI(use_responses_api=True, max_tokens=200, extra_body={"seed": 1}, **common).bind_tools(
    [TOOL], tool_choice="look"
)
[call] = new_tools.invoke("sort a list").tool_calls  # type: ignore[attr-defined]
assert call["args"]["at"] in ("sky", "sea")
print("chat, text, streams, a batch, tools, a schema, responses: the texts are those of raw requests")
