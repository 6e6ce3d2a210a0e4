"""Everything, in order: text, tokenizer, target, draft, export, evaluation, card. Finished steps are not done again.

    python -m recipes.make_pair --work work/pair --humaneval HumanEval.jsonl.gz --prose FOLDER

On a machine with a GPU the same command with `--target-minutes 8 --draft-minutes 4 --batch 32768 --micro 32768` sees
a hundred times the tokens. `--publish-only` exports whatever the checkpoints hold now, also while a run goes on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch

from recipes.models import FOLDERS, build, export

CARD = """---
license: apache-2.0
language: [en, code]
---

# builtin:{name}

{what} A small model for trying, testing and measuring speculative decoding without a download. It writes text that
looks like Python and means little, and at temperature 0 it soon repeats itself; do not use it to write programs.

| | |
| --- | --- |
| parameters | {parameters:,} (stored in bfloat16, run in float32, Llama architecture, tied embeddings) |
| vocabulary | 8192, byte-level BPE, the same for `builtin:code` and `builtin:code-draft` |
| context | 2048 positions, trained on windows of {windows} tokens |
| seen in training | {tokens:,} tokens |
| held-out loss | {held_out_nats_per_token} nats per token, {held_out_bits_per_byte} bits per byte |
| acceptance of the draft, held-out packages | {held_0} at temperature 0, {held_1} at temperature 1 |
| acceptance of the draft, HumanEval prompts | {human_0} at temperature 0, {human_1} at temperature 1 |

**Data.** The Python standard library and {packages} Python packages under MIT, BSD, Apache-2.0 and PSF licences, by
name and version in `recipes/sources.py`, with under 3 % of English questions and answers. {held_packages} packages and
some modules of the standard library were held out whole; documents that quote HumanEval were dropped.

**Training.** {how} `recipes/README.md` has the commands.

**Acceptance** is measured along the target's own continuations: at temperature 0 the share of positions at which both
models name the same token, at temperature 1 the mean of sum(min(p, q)). All numbers are in `recipes/results.json`.

**Licence.** The weights are under Apache-2.0. They were trained on permissively licensed open source text, whose authors
keep their rights in it; a model of this size may still quote a common line.
"""
WHAT = {
    "target": "The target of the built-in pair.",
    "draft": "The draft of the built-in pair, distilled from `builtin:code`.",
}
HOW = {
    "target": "From a counted bigram start, by Muon and AdamW, rates falling to zero at the end.",
    "draft": "From a counted bigram start, on a mix of forward KL and total variation to the target's law, over training "
    "text and text that the target wrote.",
}


def step(module: str, done: Path, *arguments: object) -> None:
    if done.exists():
        print(f"{module}: {done} is there", flush=True)
        return
    subprocess.run([sys.executable, "-m", f"recipes.{module}", *map(str, arguments)], check=True)


def publish(run: Path, role: str, tokens: Path, data: Path) -> None:
    """From the checkpoint, so that it works during a run as well as after it."""
    model = build(role)
    state = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    export(model, tokens, data / FOLDERS[role])
    print(f"published {role} at {state['progress']['tokens']} tokens", flush=True)


def write_card(role: str, run: Path, data: Path, results: dict[str, dict[str, float]]) -> None:
    from recipes.sources import HELD_OUT, TRAIN

    state = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
    held, human = results["held_out_packages"], results.get("humaneval_prompts", {})
    card = CARD.format(
        name=FOLDERS[role],
        what=WHAT[role],
        how=HOW[role],
        windows=" and ".join(map(str, state["progress"]["windows"] or [256])),
        tokens=state["progress"]["tokens"],
        packages=len(TRAIN),
        held_packages=len(HELD_OUT),
        held_0=held["acceptance_temperature_0"],
        held_1=held["acceptance_temperature_1"],
        human_0=human.get("acceptance_temperature_0", "not measured"),
        human_1=human.get("acceptance_temperature_1", "not measured"),
        **results[role],
    )
    (data / FOLDERS[role] / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("work/pair"))
    parser.add_argument("--data", type=Path, default=Path("outrider/data"))
    parser.add_argument("--results", type=Path, default=Path("recipes/results.json"))
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl.gz: kept out of training, used to evaluate")
    parser.add_argument("--prose", type=Path, help="folder of *.jsonl question sets")
    parser.add_argument("--cap-mb", type=float, default=2.0)
    parser.add_argument("--target-minutes", type=float, default=65)
    parser.add_argument("--draft-minutes", type=float, default=25)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--micro", type=int, default=2048)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--publish-only", action="store_true")
    args = parser.parse_args()

    text, tokens = args.work / "text", args.work / "tokenizer"
    runs = {"target": args.work / "target", "draft": args.work / "draft"}
    if not args.publish_only:
        gather = ["--prose", args.prose] if args.prose else []
        gather += ["--keep-out", args.humaneval] if args.humaneval else []
        step("gather", text / "train.jsonl", "--out", text, "--cap-mb", args.cap_mb, *gather)
        step("tokenizer", tokens / "train.bin", "--text", text, "--out", tokens)
        sizes = ["--tokens", tokens, "--batch", args.batch, "--micro", args.micro]
        compiled = ["--compile"] if args.compile else []
        target = runs["target"] / "model"
        step("train", target, "--run", runs["target"], "--minutes", args.target_minutes, *sizes, *compiled)
        draft = ["--run", runs["draft"], "--target", target, "--minutes", args.draft_minutes]
        step("distill", runs["draft"] / "model", *draft, *sizes)
    for role, run in runs.items():
        if (run / "checkpoint.pt").exists():
            publish(run, role, tokens, args.data)
    if args.publish_only:
        return
    folders = [args.data / FOLDERS["target"], args.data / FOLDERS["draft"]]
    asked = ["--humaneval", args.humaneval] if args.humaneval else []
    args.results.unlink(missing_ok=True)
    step("evaluate", args.results, "--target", folders[0], "--draft", folders[1], "--tokens", tokens, *asked,
         "--out", args.results)  # fmt: skip
    results = json.loads(args.results.read_text())
    for role, run in runs.items():
        write_card(role, run, args.data, results)


if __name__ == "__main__":
    main()
