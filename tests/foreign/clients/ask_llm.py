"""llm: a prompt, a conversation, a schema and a tool, through OpenAI's protocol and its plugins for Ollama and Anthropic."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ask_common import MODEL, URL, raw

user = Path("llm")
user.mkdir(exist_ok=True)
models = [
    {"model_id": "ours", "model_name": MODEL, "api_base": URL + "/v1", "supports_schema": True, "supports_tools": True}
]
(user / "extra-openai-models.yaml").write_text(json.dumps(models))
os.environ |= {"LLM_USER_PATH": str(user), "OLLAMA_HOST": URL}

import llm  # noqa: E402  (it reads the environment)
from llm_anthropic import ClaudeMessages  # noqa: E402

WORDS = {"system": "Be brief.", "temperature": 0}
PLACE: Any = {"type": "string", "enum": ["sky", "sea"]}


def look(at: str) -> str:
    """Look at a place."""
    return f"{at} is blue"


def said(messages: list[dict[str, str]]) -> str:
    made = raw("/v1/chat/completions", messages=messages, temperature=0, max_tokens=24)
    return made["choices"][0]["message"]["content"]


begun = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "sort a list"}]
first = said(begun)
on = [*begun, {"role": "assistant", "content": first}, {"role": "user", "content": "reverse it"}]
second = said(on)
anthropic: Any = ClaudeMessages("code", MODEL, base_url=URL, use_structured_outputs=True)
anthropic.key = "x"
for model, limit in (
    (llm.get_model("ours"), {"max_tokens": 24}),
    (llm.get_model(f"ollama/{MODEL}"), {"num_predict": 24}),
    (anthropic, {"max_tokens": 24}),
):
    asked: dict[str, Any] = {"temperature": 0, **limit}
    for stream in (True, False):
        talk = model.conversation()
        assert talk.prompt("sort a list", system="Be brief.", stream=stream, **asked).text() == first, model
        assert talk.prompt("reverse it", stream=stream, **asked).text() == second, model
    assert json.loads(model.prompt("sort a list", schema=PLACE, **asked).text()) in ("sky", "sea"), model
    assert not model.supports_tools or model.chain("sort a list", tools=[look], options=asked).text(), model
print("prompts, conversations, schemas and tools in three protocols: the texts are those of raw requests")
