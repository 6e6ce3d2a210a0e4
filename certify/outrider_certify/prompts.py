"""The prompts of a certificate: from a file, or a small set that is installed."""

from __future__ import annotations

import json
from pathlib import Path

from outrider_certify.lines import read_lines

SETS = {
    "code": (
        "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n    while low <= high:",
        'def read_config(path):\n    """Return the settings of a file."""\n    settings = {}\n    for line in open(path):',
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
        'def is_prime(n: int) -> bool:\n    """Return True if n is a prime number."""\n',
        "import json\nimport os\nimport sys\n\n\ndef main():\n    if len(sys.argv) < 2:",
        "def test_sum():\n    assert sum([1, 2, 3]) == 6\n    assert sum([]) == 0\n    assert",
        'def word_counts(text):\n    """Return how often each word of a text occurs."""\n    counts = {}\n',
        "for row in range(height):\n    for column in range(width):\n        if grid[row][column] ==",
    ),
    "chat": (
        "Why is the sky blue?",
        "Write a Python function that reverses a linked list.",
        "Translate to French: The train leaves at eight in the morning.",
        "What is 17 times 23? Show each step.",
        "Summarize in one sentence: Rain fell for three days. The river rose, and the old bridge was closed to all traffic.",
        "Give me five names for a bakery.",
        "Explain to a child how a refrigerator keeps food cold.",
        "Answer with JSON only: name, population and continent of Kenya.",
    ),
}
EXAMPLE = '{"prompt": "def area(r):"}  or  {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'


def read_prompts(source: str, most: int) -> list[str]:
    """The first prompts of a file, or of a set of `SETS`.

    A `.txt` file has one prompt a line. Any other file has lines of JSON with "prompt" or "messages", of which the last one
    counts; in OpenAI's batch format they are in "body". Raises FileNotFoundError, or ValueError with file, line and reason.
    """
    path = Path(source)
    if source in SETS and not path.exists():
        return list(SETS[source][:most])
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no file {source}; give a .jsonl or .txt file of prompts, or {', '.join(SETS)}"
        )
    return read_lines(path, str if path.suffix == ".txt" else _prompt, EXAMPLE, most)


def _prompt(line: str) -> str:
    given = json.loads(line)
    body = given.get("body", given)
    if "messages" in body:
        content = body["messages"][-1]["content"]
        prompt = content if isinstance(content, str) else "".join(part["text"] for part in content if "text" in part)
    else:
        prompt = body["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("the prompt must be a text that is not empty")
    return prompt
