"""What a head learns from 300 served answers of one kind: `python -m benchmarks.learning MODEL --folder DIR`. Resumable.

Three kinds: support questions over one manual, SQL over one schema, summaries of documentation. The model answers, the texts
are kept as a server with --learn keeps them, and the head that the package ships trains on. It is measured on held-out prompts
of its kind, and on those of the other two. `all` trains on the three together, as a server that has all of them does. Half of
the answers are greedy, the others have temperature 0.8. `--tokens` is the budget.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pydoc
import random
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import facts
from outrider import LLM, SamplingParams
from outrider.core.files import write_whole
from outrider.drafters.heads.files import head_of, open_head
from outrider.serve.learn.learner import LENGTH, compared
from outrider.serve.learn.reservoir import ServedText, kept_texts
from outrider.train.settings import TrainingSettings
from outrider.train.trainer import SLOTS, TrainingBudget, train

ALL = "all"
TEXTS, ANSWER = 300, 128  # of a kind; tokens of an answer
MANUAL = """You answer questions of customers about the coffee machine Brevo 300, by its manual.
Manual. The tank holds 1.8 litres. Fill it with cold water up to the mark MAX. Switch on: hold the power button for two
seconds; the light blinks while the machine heats and stays on when it is ready, after about 40 seconds. Espresso: put
in a capsule, close the lever, press the small cup (40 ml). Lungo: press the large cup (110 ml). Steam: turn the dial to
STEAM, wait for the green light, then open the valve. Descale every 300 cups, when the orange light is on: fill one
sachet of descaler and 0.5 litres of water, hold both cup buttons for five seconds, run until the tank is empty, rinse
with a full tank. Error E1: no water. Error E2: the capsule holder is full. Error E3: too hot, wait ten minutes. Error
E4: call the service, 0800 555 300. The guarantee is two years."""
PARTS = [
    "the tank",
    "the power button",
    "the capsule holder",
    "the lever",
    "the steam dial",
    "the valve",
    "the orange light",
    "the light",
    "the small cup button",
    "the large cup button",
]
DOUBTS = [
    "What is {} for?",
    "How do I use {} for the first time?",
    "Something is wrong with {}. What should I do?",
    "My {1} of ten years asks: when do I need {0}?",
    "Can I clean {} myself, and how often?",
    "I pressed something and now {} does nothing, why?",
    "Is {} covered by the guarantee?",
    "Explain {} to a guest in three steps.",
]
PEOPLE = ["daughter", "son", "neighbour", "father"]
SCHEMA = """Write one SQL query for the question, and nothing else.
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, city TEXT, country TEXT, created_at DATE);
CREATE TABLE products (id INTEGER PRIMARY KEY, title TEXT, category TEXT, price DECIMAL(10, 2), stock INTEGER);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customers(id), ordered_at DATE, status TEXT);
CREATE TABLE order_items (order_id INTEGER REFERENCES orders(id), product_id INTEGER REFERENCES products(id), number INTEGER);"""
ASKED = [
    "How many {a} are there {b}?",
    "List the ten latest {a} {b}.",
    "Which {a} have no order {b}?",
    "What is the total revenue by {a} {b}?",
    "Show the average order value of {a} {b}, highest first.",
    "Count {a} by month {b}.",
    "Find {a} with more than {n} orders {b}.",
    "Which products are bought most by {a} {b}?",
]
OF = ["customers", "products", "orders", "customers in Berlin", "products of the category books", "open orders"]
WHEN = [
    "in 2023",
    "in 2024",
    "since March 2022",
    "in the last 30 days",
    "from Italy",
    "with the status shipped",
    "under 20 euros",
    "of new customers",
]
BRIEF = "Summarise the documentation that you are given in two plain sentences."
MODULES = [
    "os",
    "shutil",
    "json",
    "re",
    "random",
    "statistics",
    "itertools",
    "functools",
    "collections",
    "pathlib",
    "subprocess",
    "socket",
    "threading",
    "logging",
    "argparse",
    "inspect",
    "textwrap",
    "datetime",
    "email",
    "http.client",
    "urllib.parse",
    "tempfile",
    "zipfile",
    "csv",
    "sqlite3",
    "heapq",
    "bisect",
    "queue",
    "asyncio",
    "contextlib",
    "unittest",
    "decimal",
]


def support() -> Iterator[tuple[str, str]]:
    for doubt, part, person in itertools.product(DOUBTS, PARTS, PEOPLE):
        yield MANUAL, f"I write for my {person}. " * ("{1}" not in doubt) + doubt.format(part, person)


def sql() -> Iterator[tuple[str, str]]:
    for n, (asked, of, when) in enumerate(itertools.product(ASKED, OF, WHEN)):
        yield SCHEMA, asked.format(a=of, b=when, n=2 + n % 5)


def summaries() -> Iterator[tuple[str, str]]:
    for module in map(pydoc.locate, MODULES):
        for name in sorted(vars(module)):
            told = pydoc.getdoc(getattr(module, name))
            if not name.startswith("_") and len(told) > 200:
                yield BRIEF, textwrap.shorten(f"{name}: {told}", 900)


KINDS = {"support": support, "sql": sql, "summaries": summaries}


def answered(llm: LLM, kind: str, file: Path, learnt: bool) -> list[ServedText]:
    """The texts of a kind. What the file has not is written and added to it. learnt: else those that measure are enough."""
    asked = list(KINDS[kind]())
    random.Random(0).shuffle(asked)
    known = {tuple(text.prompt) for text in kept_texts(file)} if file.exists() else set()
    missing = list[tuple[int, ServedText]]()
    for n, (system, user) in enumerate(asked[:TEXTS]):
        prompt = llm.encode([{"role": "system", "content": system}, {"role": "user", "content": user}])
        text = ServedText(prompt, [], 0.8 * (n % 2), kind, "", 0.0)
        if tuple(prompt) not in known and (learnt or text.held_out):
            missing.append((n, text))
    for first in range(0, len(missing), 2 * SLOTS):
        some = missing[first : first + 2 * SLOTS]
        params = [SamplingParams(temperature=text.temperature, max_tokens=ANSWER, seed=n) for n, text in some]
        outs = llm.generate([{"prompt_token_ids": text.prompt} for _, text in some], params)
        with file.open("a") as grown:
            for (_, text), out in zip(some, outs, strict=True):
                grown.write(json.dumps(asdict(replace(text, answer=list(out.outputs[0].token_ids)))) + "\n")
        print(f"{kind}: {first + len(some)} answers", flush=True)
    return list(kept_texts(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--head", help="a head to begin with; without it, the one that the package ships")
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS, ALL], choices=[*KINDS, ALL])
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(args.model, max_num_seqs=SLOTS)
    head = open_head(head_of(args.head, llm.loaded.name))
    texts = {
        kind: answered(llm, kind, args.folder / f"{kind}.jsonl", kind in args.kinds or ALL in args.kinds)
        for kind in KINDS
    }
    rows = list[tuple[str, str, Any]]()
    for kind in args.kinds:
        lines = [t for name, some in texts.items() for t in some if t.held_out or kind in (name, ALL)]
        file = args.folder / f"learn-{kind}.jsonl"
        write_whole(file, "".join(json.dumps(asdict(t)) + "\n" for t in lines))
        settings = TrainingSettings(
            method=head.kind,
            model=args.model,
            texts=str(file),
            start=str(head.path),
            length=LENGTH,
            keep_features=True,
        )
        out = args.folder / f"head-{kind}"
        train(settings, TrainingBudget(tokens=args.tokens), out, llm, lambda line: print(f"{kind}: {line}", flush=True))
        curve = json.loads((out / "training" / "run.json").read_text())["curve"]
        found = compared(curve[0]["texts"], curve[-1]["texts"])
        rows += [(kind, name, ratio) for name, ratio in found["workloads"].items()]
        print(f"{kind}: {found['why']}; {found['workloads']}", flush=True)
    print(facts())
    for kind, name, ratio in rows:
        print(f"learnt from {kind}, measured on {name}: {ratio:.3f} times as many tokens a step")


if __name__ == "__main__":
    main()
