"""The child process that renders chat templates. A template is a program of the model's author: it cannot reach files, but it can
loop without end or take all memory. So it runs where it can be ended.

The child needs transformers' renderer only. Without torch it starts in about a second and takes 60 MB.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from outrider.core.child import Child

MAX_RENDERED = 64 << 20  # characters of a rendered chat


def renderer() -> Child:
    """A child that takes a template and its variables, and gives the text. {"chat_template": ..., "messages": ..., ...}"""
    return Child(__name__, None, "to render", "send a smaller chat, or serve a model with another template")


def prepare(_: Any) -> Callable[[Any], Any]:
    """What the child does with a question; see `renderer`."""
    sys.modules["torch"] = cast(ModuleType, None)  # it cannot be imported
    render = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template

    def rendered(question: Any) -> str:
        [text], _ = render(conversations=[question.pop("messages")], **question)
        if len(text) > MAX_RENDERED:
            raise ValueError("the text that it makes is too long")
        return text

    return rendered
