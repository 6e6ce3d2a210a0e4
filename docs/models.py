"""Put every causal language model class of transformers through its checks; write the page of them.

    python -m docs.models [--only llama gpt2] [--again] [--page]

Each class runs in a process of its own, at low priority and with a time limit. Each result is kept in docs/models.json at
once, so a run that was stopped goes on where it was. --only: these model types. --again: also what has a result of this
transformers. --page: run nothing, write docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.coverage import UNAVAILABLE, ClassReport, report_of
from tests.support.tiny_models import whole_config

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md"
SECONDS, MEMORY = 300, 6 << 30  # SECONDS of the processor: a machine that others use makes no class crash


def classes() -> dict[str, str]:
    """Model type -> class. A class that several model types have is there once."""
    first = {name: kind for kind, name in reversed(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())}
    return {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if first[name] == kind}


def one(model_type: str, name: str, out: Connection) -> None:
    """Send the report of one class. Runs in a process of its own."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
    try:
        config = whole_config(model_type)
    except Exception as error:
        report = ClassReport(name, model_type, UNAVAILABLE, " ".join(str(error).split())[:200])
    else:
        report = report_of(model_type, config)
    out.send({**report.as_dict(), "name": name})


def isolated(model_type: str, name: str) -> dict[str, Any]:
    """The report of one class, from a process of its own."""
    fork = multiprocessing.get_context("fork")  # so that nothing is imported again
    receive, send = fork.Pipe(duplex=False)
    process = fork.Process(target=one, args=(model_type, name, send))
    process.start()
    send.close()
    crashed = {"name": name, "model_type": model_type, "status": "crashed"}
    try:
        if not receive.poll(20 * SECONDS):
            return crashed | {"reason": f"no result after {20 * SECONDS} seconds"}
        return receive.recv()
    except EOFError:
        process.join()
        return crashed | {"reason": f"the process ended with status {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def page(results: dict[str, Any]) -> str:
    """docs/models.md."""
    models = sorted(results["models"].values(), key=lambda m: m["name"].lower())
    count = Counter(m["status"] for m in models)
    lines = [
        "# Every model class of transformers",
        "",
        f"This page is made by `python -m docs.models`, with transformers {results['transformers']}. Do not edit it.",
        "",
        "Each causal language model class was made as a tiny random model. Its logits were compared with those of its own",
        "forward, and its texts with those of `generate`.",
        "There were plain texts, and texts with a chain, with a tree, and with a draft that is always right or always wrong.",
        "Sampled texts with a tree were compared with those without. The bits of the logits were compared with those of one",
        "token at a time. int8 weights were compared in the same way.",
        "",
        "| result | classes |",
        "| --- | --- |",
        f"| runs | {count['runs']} |",
        f"| refused, with a reason | {count['refused']} |",
        f"| transformers itself does not run it here | {count['unavailable']} |",
        f"| a check failed | {count['wrong']} |",
        f"| crashed | {count['crashed']} |",
        "",
        "## What runs",
        "",
        "| path | what it means |",
        "| --- | --- |",
        "| native | one native call runs a whole forward: the fastest |",
        "| general | the modelling code of transformers, with outrider's kernels for matrices, experts and attention |",
        "",
        "With `exact-tokens`, speculation gives the very tokens of plain decoding.",
        "",
        "| class | path | guarantee | int8 | note |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {m['name']} | {m['path']} | {m['guarantee']} | yes | {m.get('note', '')} |"
            for m in models
            if m["status"] == "runs"
        ),
    ]
    for status, title in (
        ("refused", "What is refused"),
        ("unavailable", "What transformers itself does not run here"),
        ("wrong", "Where a check failed"),
        ("crashed", "What crashed"),
    ):
        chosen = [m for m in models if m["status"] == status]
        if chosen:
            lines += ["", f"## {title}", "", "| class | reason |", "| --- | --- |"]
            lines += [f"| {m['name']} | {m['reason'].replace('|', '/')} |" for m in chosen]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if known.get("transformers") != transformers.__version__:
        known = {"transformers": transformers.__version__, "models": {}}
    names = classes()
    for model_type in [] if given.page else given.only or names:
        if given.only or given.again or model_type not in known["models"]:
            found = known["models"][model_type] = isolated(model_type, names[model_type])
            known["models"] = dict(sorted(known["models"].items()))
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
            print(f"{found['name']}: {found['status']} {found.get('path', '')} {found.get('reason', '')}", flush=True)
    PAGE.write_text(page(known))


if __name__ == "__main__":
    main()
