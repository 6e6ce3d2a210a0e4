"""What a docstring says of each argument. Help pages and request bodies show the same words. Imports nothing large."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

_ARGUMENT = re.compile(r"^    (\w+)(?: \(([^)]+)\))?: (.*(?:\n {5,}.*)*)", re.MULTILINE)


class Description(NamedTuple):
    """Of an argument. placeholder: what stands for its value, such as FILE; empty for none."""

    text: str
    placeholder: str


def summary(documented: Any) -> str:
    """The docstring of a function or a class, or the text of one, without its `Args:`, a paragraph a line."""
    text = inspect.cleandoc(documented) if isinstance(documented, str) else inspect.getdoc(documented) or ""
    text = text.partition("\nArgs:\n")[0]
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def arguments(documented: Any) -> dict[str, Description]:
    """The `Args:` of a docstring: a line is `name: text` or `name (PLACEHOLDER): text`, and goes on deeper."""
    _, _, section = (inspect.getdoc(documented) or "").partition("\nArgs:\n")
    section = section.partition("\n\n")[0]
    return {
        name: Description(" ".join(text.split()), placeholder) for name, placeholder, text in _ARGUMENT.findall(section)
    }
