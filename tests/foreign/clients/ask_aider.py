"""aider: one turn about a file, through its providers for OpenAI's, Ollama's and Anthropic's protocols."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model
from ask_common import MODEL, URL, raw

os.environ |= {"OPENAI_API_BASE": URL + "/v1", "OPENAI_API_KEY": "x"}
os.environ |= {"OLLAMA_API_BASE": URL, "ANTHROPIC_API_BASE": URL, "ANTHROPIC_API_KEY": "x"}
file = Path("calc.py")
file.write_text("def add(a, b):\n    return a - b\n")
answers, sent = list[str](), list[Any]()


class Asked(Model):
    """aider's model, which also shows the messages that it sends."""

    def send_completion(self, messages: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(list(messages))
        return super().send_completion(messages, *args, **kwargs)


for provider in ("openai", "ollama_chat", "anthropic"):
    model = Asked(f"{provider}/{MODEL}")
    model.extra_params = {"seed": 3, "max_tokens": 24, "top_k": 0, "top_p": 1.0}
    io: Any = InputOutput(yes=True, pretty=False, fancy_input=False)
    coder: Any = Coder.create(main_model=model, fnames=[str(file)], io=io, use_git=False, stream=provider != "openai")
    answers.append(coder.run("mend add"))
asked = {"messages": sent[0], "temperature": 0, "max_tokens": 24, "seed": 3}
expected = raw("/v1/chat/completions", **asked)["choices"][0]["message"]["content"]
assert sent == [sent[0]] * 3
assert answers == [expected] * 3, (answers, expected)
print("a turn through three protocols: the texts are those of raw requests")
