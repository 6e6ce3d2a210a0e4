"""Real models: every method on every kind of text, against plain decoding and against peers on the same file.

    python -m benchmarks.real --target model.gguf --draft draft.gguf --llama PYTHON-WITH-xllamacpp
    python -m benchmarks.real --target model.gguf --weights file int8 --workloads code chat --texts 4 --minutes 20
    python -m benchmarks.real --target model.gguf --draft draft.gguf --llama ... --only start served
    python -m benchmarks.real --target model.gguf --llama ... --ik llama-server --openvino PYTHON --only prompt texts

Targets and drafts are files, folders, hub names or built-in names. All sides read the same token ids, with the chat template
where the model has one, and stop at the model's end tokens or after --tokens. Time per token runs from the first token to the
last. Our methods write a text in turns of a few tokens; llama.cpp writes it before or after them, from text to text. A finished
round is a line in --journal, so that a run may be stopped and goes on where it was. What is cut off by --minutes is texts, never
workloads or temperatures. The result, with medians and intervals, is written anew each time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import RESULTS, WORK, machine
from benchmarks.forwards import CONTEXT, forward_seconds, read_context, summary
from benchmarks.peers.llama_server import IK, LLAMA, OPENVINO, about
from benchmarks.real import report
from benchmarks.real.journal import Journal, identity
from benchmarks.real.served import served
from benchmarks.real.sides import METHODS, PLAIN, WEIGHTS, Ours, Peer
from benchmarks.real.start import measure, measure_llama
from benchmarks.ruler import command, order, parser
from benchmarks.texts import WORKLOADS, texts
from outrider.core.params import SamplingParams
from outrider.kernels import cpu as native
from outrider.models.files import weight_files
from outrider.models.load import load
from outrider_lab.bench.prompts import Prompt

PARTS = ("texts", "prompt", "forward", "start", "served")
# What keeps a side from instruction sets that are there.
LIMITS = ("OUTRIDER_ISA", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
PROMPT = 512  # tokens of the part `prompt`
WARM = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


class Real:
    """One target with its draft: what is measured goes to the journal."""

    def __init__(self, options: argparse.Namespace, journal: Journal) -> None:
        self.options, self.journal = options, journal
        self.files = {name: identity(name) for name in (options.target, options.draft, options.head) if name}
        self.target = self.files[options.target]["name"]
        self.draft = self.files[options.draft]["name"] if options.draft else None

    def key(self, weights: str) -> dict[str, Any]:
        """What every line of this bout holds."""
        digest = self.files[self.options.target].get("sha256")
        key = {"target": self.target, "sha256": digest, "draft": self.draft, "weights": weights}
        return key | ({"head": self.files[self.options.head]["sha256"]} if self.options.head else {})

    def llama_reads(self, weights: str) -> tuple[str, str | None] | None:
        """The target and draft files, where llama.cpp reads the target as we do."""
        target, draft = (_gguf(name) for name in (self.options.target, self.options.draft))
        return None if weights != "file" or target is None else (target, draft)

    def peers(self, weights: str, limit: int) -> Iterator[Peer]:
        """All peers that are given, each started on the target's file."""
        o, read = self.options, self.llama_reads(weights)
        for peer, program in programs(o).items():
            if read:
                tuned = ("--spec-draft-p-min", str(o.llama_p_min), "--spec-draft-sampling", o.llama_sampling)
                target, draft = read[0], o.openvino_draft if peer == OPENVINO and o.openvino_draft else read[1]
                yield Peer(
                    program, target, draft, o.llama_draft, limit, options=tuned if peer == LLAMA else (), peer=peer
                )

    def todo(self, weights: str, chat: bool) -> Iterator[tuple[dict[str, Any], Prompt]]:
        """Rounds that the journal does not have: the first text of every workload, then the second, and so on."""
        o = self.options
        every = {w: texts(w, chat, o.texts) for w in o.workloads}
        asked = {"methods": sorted(o.methods), "tokens": o.tokens, "ignore_eos": o.ignore_eos, "llama": bool(o.llama)}
        asked |= {name: True for name in ("ik", "openvino") if getattr(o, name)}
        for n in range(o.texts):
            for workload in o.workloads:
                for temperature in o.temperatures:
                    if n < len(every[workload]):
                        prompt = every[workload][n]
                        where = {"workload": workload, "text": prompt.id, "temperature": temperature}
                        key = {**self.key(weights), **where, **asked}
                        if not self.journal.has("round", key):
                            yield key, prompt

    def texts(self, weights: str, deadline: float) -> None:
        """The rounds of a bout, until the deadline."""
        o = self.options
        if next(self.todo(weights, False), None) is None:
            return
        print(f"{self.target}, {weights}: loading", file=sys.stderr, flush=True)
        ours = Ours(o.target, o.draft, weights, o.methods, o.length, o.head)
        if ours.missing:
            self.journal.add("missing", self.key(weights), {"methods": ours.missing})
        with ExitStack() as stack:
            sides: list[Ours | Peer] = [ours]
            sides += [stack.enter_context(peer) for peer in self.peers(weights, ours.limit)]
            warm = ours.encode(texts("code", ours.chat, 12)[-1].content)
            for side in sides:
                side.write(warm, WARM)
            for number, (key, prompt) in enumerate(self.todo(weights, ours.chat)):
                if time.monotonic() > deadline:
                    break
                ids = ours.encode(prompt.content)
                if len(ids) + o.tokens > ours.limit:
                    print(f"  {prompt.id} is longer than --length allows: {len(ids)} tokens", file=sys.stderr)
                    continue
                params = SamplingParams(
                    temperature=key["temperature"], max_tokens=o.tokens, ignore_eos=o.ignore_eos, seed=number
                )
                timings: dict[str, Any] = {}
                for side in order(sides, number):
                    timings |= {name: t.as_dict() for name, t in side.write(ids, params).items()}
                self.journal.add("round", key, {"seed": number, "prompt_tokens": len(ids), "timings": timings})
                ms = {name: round(1e3 * t["seconds"] / max(t["tokens"], 1), 1) for name, t in timings.items()}
                wrong = sum(t["differing"] for name, t in timings.items() if name in ours.llms)
                print(f"  {prompt.id}, T={key['temperature']:g}: {ms}, {wrong} differ", file=sys.stderr, flush=True)

    def prompt(self, weights: str) -> None:
        """Seconds to read a prompt of `PROMPT` tokens, all sides in turns."""
        o, key = self.options, {**self.key(weights), "prompt_tokens": PROMPT}
        left = [n for n in range(1, o.texts + 1) if not self.journal.has("prompt", {**key, "number": n})]
        if not left:
            return
        ours = Ours(o.target, None, weights, [PLAIN], PROMPT + 16)
        lengths, o.llama_draft = o.llama_draft, []  # plain alone
        with ExitStack() as stack:
            sides: list[Ours | Peer] = [ours]
            sides += [stack.enter_context(peer) for peer in self.peers(weights, ours.limit)]
            ids = [token for prompt in texts("code", False, 12) for token in ours.encode(prompt.content)]
            params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
            for number in (0, *left):  # the first one warms
                seconds = dict[str, float | None]()
                for side in order(sides, number):
                    timings = side.write(ids[number : number + PROMPT], params)
                    seconds |= {name: timing.prompt_seconds for name, timing in timings.items()}
                print(f"  prompt of {PROMPT}: {seconds}", file=sys.stderr, flush=True)
                if number:
                    self.journal.add("prompt", {**key, "number": number}, {"seconds": seconds})
        o.llama_draft = lengths

    def forward(self, weights: str) -> None:
        """Forwards over several nodes: what verification costs, and a draft token. The draft model is as it is stored."""
        if self.journal.has("forward", self.key(weights)):
            return
        models = {"target": load(self.options.target, device="cpu", **WEIGHTS[weights]).model}
        if self.options.draft:
            models["draft model"] = load(self.options.draft, device="cpu").model
        times = forward_seconds({name: (model, read_context(model, CONTEXT)) for name, model in models.items()})
        for name, seconds in times.items():
            line = {"model": name, "context": CONTEXT, **summary(seconds)}
            self.journal.add("forward", self.key(weights), line)
            print(f"  {name} {line['ms']} ms, {line['ratio']}", file=sys.stderr, flush=True)

    def start(self, weights: str) -> None:
        """Starts of new processes, ours and llama.cpp's."""
        size = self.files[self.options.target].get("bytes")
        read, target = self.llama_reads(weights) if self.options.llama else None, self.options.target
        measures = {"outrider": lambda: measure(target, weights)}
        if read:
            measures["llama.cpp"] = lambda: [measure_llama(self.options.llama, read[0])]
        for side, run in measures.items():
            key = {**self.key(weights), "side": side, "bytes": size}
            if self.journal.has("start", key):
                continue
            for line in run():
                self.journal.add("start", key, line)
                print(f"  {side} {line}", file=sys.stderr, flush=True)

    def served(self, weights: str) -> None:
        """Clients on servers."""
        o, files = self.options, self.llama_reads(weights)
        read = (o.llama, *files) if o.llama and files else None
        key = {
            **self.key(weights),
            "tokens": o.tokens,
            "clients": o.clients,
            "texts": o.texts,
            "llama": read is not None,
        }
        if not self.journal.has("served", key):
            longest = o.llama_draft[0] if o.llama_draft else 4
            for line in served(
                o.target, o.draft, weights, read, clients=o.clients, count=o.texts, tokens=o.tokens, llama_draft=longest
            ):
                self.journal.add("served", key, line)


def programs(options: argparse.Namespace) -> dict[str, Path]:
    """The peers that are given."""
    every = {LLAMA: options.llama, IK: options.ik, OPENVINO: options.openvino}
    return {peer: program for peer, program in every.items() if program}


def _gguf(name: str | None) -> str | None:
    """The GGUF file of a model, the first part of a split one; None if it is stored otherwise."""
    files = weight_files(name) if name else []
    return str(files[0]) if files and files[0].suffix == ".gguf" else None


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    args = parser(__doc__)
    args.add_argument("--target", required=True, help="a GGUF file, a folder, a hub name or a built-in name")
    args.add_argument("--draft", help="a draft model, the same way")
    args.add_argument("--head", help="the folder of an EAGLE head, for the methods of heads")
    args.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["file"], help="file: as they are stored")
    args.add_argument("--methods", nargs="+", choices=METHODS, help="all that are possible, if not given")
    args.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    args.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    args.add_argument("--texts", type=int, default=6, help="of each workload, at most 12")
    args.add_argument("--tokens", type=int, default=96, help="of a text, at most")
    args.add_argument("--length", type=int, default=1536, help="tokens of prompt and text")
    args.add_argument("--ignore-eos", action="store_true", help="write on behind end tokens, on all sides")
    args.add_argument("--llama", type=Path, help="a llama-server, or a Python that has xllamacpp; none: leave it out")
    args.add_argument("--ik", type=Path, help="a llama-server of ik_llama.cpp: benchmarks/peers/build_ik_llama_cpp.sh")
    args.add_argument("--openvino", type=Path, help="a Python that has openvino-genai")
    args.add_argument("--openvino-draft", help="its draft, where it cannot read --draft: benchmarks.peers.requantize")
    args.add_argument(
        "--llama-draft", type=int, nargs="*", default=[4, 2, 8], help="llama.cpp's draft tokens of a step"
    )
    args.add_argument("--llama-p-min", type=float, default=0.0, help="llama.cpp's least probability of a draft token")
    args.add_argument("--llama-sampling", choices=("greedy", "probabilistic"), default="greedy", help="of its draft")
    args.add_argument("--only", nargs="+", choices=PARTS, default=["texts"])
    args.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8], help="for served")
    args.add_argument("--minutes", type=float, default=float("inf"), help="for the texts, shared by all --weights")
    args.add_argument("--journal", type=Path, default=WORK / "real.jsonl")
    args.add_argument("--name", default="real")
    args.add_argument("--out", type=Path, default=RESULTS, help="folder for the result file")
    options = args.parse_args(arguments)
    if options.methods is None:
        absent = [start for start, model in (("draft_model", options.draft), ("head", options.head)) if not model]
        options.methods = [m for m in METHODS if not m.startswith(tuple(absent))]
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = options_of(arguments)
    journal = Journal(options.journal)
    real = Real(options, journal)
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    versions = {peer: about(program, peer) for peer, program in programs(options).items()}
    journal.add(
        "run", {"command": " ".join([*limits, command("benchmarks.real", arguments)])},
        {"files": real.files, "threads": machine.cores(), "isa": native.isa(), "llama.cpp": versions.pop(LLAMA, None),
         "peers": versions},
    )  # fmt: skip
    end = time.monotonic() + 60 * options.minutes
    try:
        for number, weights in enumerate(options.weights):
            now = time.monotonic()
            if "texts" in options.only:
                real.texts(weights, now + (end - now) / (len(options.weights) - number))
            for part in (real.prompt, real.forward, real.start, real.served):
                if part.__name__ in options.only:
                    part(weights)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
    result = report.result_of(journal, options.name)
    path = options.out / f"{journal.lines[0]['date']}-{options.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report.tables(result))
    print(f"\nwritten to {path}", file=sys.stderr)
    return result


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a run that is ended closes its servers
    main()
