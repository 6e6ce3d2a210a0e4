"""Ollama's own client: a chat, a stream, a prompt, a schema, a tool, the lists, an error."""

from __future__ import annotations

import json
from typing import Any

import ollama
from ask_common import HELLO, MODEL, TOOL, URL, raw

OPTIONS: dict[str, Any] = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 3, "num_predict": 24}
said = raw("/v1/chat/completions", messages=HELLO, temperature=0.8, max_tokens=24, seed=3)["choices"][0]["message"]
client = ollama.Client(host=URL)
made = client.chat(model=MODEL, messages=HELLO, options=OPTIONS, keep_alive="5m")
assert made.message.content == said["content"]
assert 0 < (made.eval_duration or 0) <= (made.total_duration or 0)
stream = client.chat(model=MODEL, messages=HELLO, options=OPTIONS, stream=True)
assert "".join(part.message.content or "" for part in stream) == said["content"]
assert client.generate(model=MODEL, prompt="sort a list", options=OPTIONS).response == said["content"]
place: dict[str, Any] = {"enum": ["sky", "sea"]}
assert json.loads(client.chat(model=MODEL, messages=HELLO, format=place).message.content or "") in ("sky", "sea")
assert client.chat(model=MODEL, messages=HELLO, tools=[TOOL], options={**OPTIONS, "num_predict": 4}).done
assert [model.model for model in client.list().models] == [model.model for model in client.ps().models] == [MODEL]
assert "completion" in (client.show(MODEL).capabilities or [])
statuses = list[int]()
for act in (lambda: client.embed(MODEL, "x"), lambda: client.chat("other", messages=HELLO)):
    try:
        act()
    except ollama.ResponseError as error:
        statuses.append(error.status_code)
assert statuses == [400, 404]
print("a chat, a stream, a prompt, a schema, tools, lists, errors: the texts are those of raw requests")
