"""Long texts on one file: reading a prompt, writing behind it, a forward over several nodes there, and drafts there.

    python -m benchmarks.lengths MODEL.gguf --folder F --prompt 8192 --side outrider          and with --side llama.cpp
    python -m benchmarks.lengths MODEL.gguf --folder F --write 128 4096                       the sides in turns
    python -m benchmarks.lengths MODEL.gguf --folder F --nodes 1 5 --behind 128 8192
    python -m benchmarks.lengths MODEL.gguf --folder F --draft DRAFT.gguf --write 128 8192

The text is Python's standard library. A prompt is read in pieces. What was read stays in the folder, in the files of the prefix
cache and in saved slots of llama.cpp. So a run that is stopped goes on where it was. A piece that is read anew begins with
reading these files. `--program` is a llama-server, or a Python that has xllamacpp. `--ik` adds ik_llama.cpp. With `--nodes`
keys and values are random numbers, because the time does not depend on them. With `--draft` texts are written plainly, as the
planner chooses, and with drafts of one length. The draft model has read the prompt after the first turn, which is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
from contextlib import ExitStack
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.forwards import forward_seconds, random_context
from benchmarks.peers.llama_server import IK, LLAMA, LlamaServer
from benchmarks.real.journal import Journal
from benchmarks.ruler import order, parser
from outrider import LLM, SamplingParams
from outrider.models.load import load

OURS, PLANNED, FIXED = "outrider", "outrider with drafts", "outrider with drafts of one length"
SHIFT = 192  # tokens between the ends of the texts that are written behind one prompt


class Ours:
    """One way of drafting. A beginning that any process has read comes from files."""

    def __init__(self, llm: LLM, **fields: Any) -> None:
        """fields: of each request."""
        self._llm, self._fields = llm, fields

    def write(self, prompt: list[int], count: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        done = self._llm.scheduler.generate(self._llm.requests(prompt, params, **self._fields))[0]
        first = done.clock.time_to_first_token or 0.0
        return {
            "first": first,
            "token": (done.clock.total - first) / max(count - 1, 1),
            "steps": done.counts.speculative.num_spec_steps or count,
            "text": done.tokens[len(prompt) :],
        }


class Theirs:
    """llama.cpp with its defaults. A beginning that was read before comes from a saved slot."""

    def __init__(self, server: LlamaServer, folder: Path) -> None:
        self._server, self._folder = server, folder

    def write(self, prompt: list[int], count: int) -> dict[str, Any]:
        saved = [int(file.suffix[1:]) for file in self._folder.glob("slot.*")]
        held = max((n for n in saved if n <= len(prompt)), default=0)
        if held:
            self._server.slot("restore", f"slot.{held}")
        out = self._server.complete(prompt, count, ignore_eos=True, reuse=True)
        if count == 1:
            self._server.slot("save", f"slot.{len(prompt)}")
        return {
            "first": out.prompt_seconds,
            "token": out.seconds / max(count - 1, 1),
            "steps": count,
            "text": out.tokens,
        }


class Lengths:
    """One model, its text, and the journal of what was measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.folder / Path(args.model).stem
        self.folder.mkdir(parents=True, exist_ok=True)
        self.journal, self.loaded = Journal(self.folder / "journal.jsonl"), load(args.model, device="cpu")

    @cached_property
    def text(self) -> list[int]:
        wanted, ids = max([self.args.prompt, *self.args.write]), list[int]()
        tokenizer: Any = self.loaded.tokenizer
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            if len(ids) >= wanted:
                break
            ids += tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
        return ids[:wanted]

    def sides(self, stack: ExitStack) -> dict[str, Ours | Theirs]:
        """Those that are asked for."""
        length = min(max([self.args.prompt, *self.args.write]) + self.args.tokens, self.loaded.model.max_length)
        sides = dict[str, Ours | Theirs]()
        if self.args.side != LLAMA:
            config = {"method": "draft_model", "model": self.args.draft} if self.args.draft else {"method": "none"}
            fields = {"prefix_dir": self.folder / "starts", "max_model_len": length, "max_num_seqs": 1}
            llm = LLM(self.loaded, speculative_config=config, **fields)
            sides[OURS] = Ours(llm, method="none")
            if self.args.draft:
                sides |= {PLANNED: Ours(llm), FIXED: Ours(llm, num_speculative_tokens=self.args.fixed)}
        if self.args.side != OURS and not self.args.draft:
            for peer, program in ((LLAMA, self.args.program), (IK, self.args.ik)):
                if program:
                    folder = self.folder / peer
                    folder.mkdir(exist_ok=True)
                    options = ("--slot-save-path", f"{folder}/")
                    room = -(-length // 256) * 256
                    server = LlamaServer(program, self.args.model, length=room, options=options, peer=peer)
                    sides[peer] = Theirs(stack.enter_context(server), folder)
        return sides

    def prompt(self, sides: dict[str, Ours | Theirs]) -> None:
        """Read the next piece that the journal does not have, the sides in turns, until all are read."""
        ends = [*range(self.args.piece, self.args.prompt, self.args.piece), self.args.prompt]
        for side in sides.values():
            side.write(self.text[-40:], 2)
        for end, name in product(ends, sides):
            if not self.journal.has("piece", {"side": name, "end": end}):
                seconds = sides[name].write(self.text[:end], 1)["first"]
                self.journal.add("piece", {"side": name, "end": end}, {"seconds": seconds})
                print(f"{name}: the piece to {end:,} took {seconds:.2f} s", flush=True)
        done = {line["end"]: line for line in self.journal.of("piece") if line["end"] in ends}
        for name in (OURS, LLAMA):
            pieces = [p["seconds"] for p in self.journal.of("piece") if p["side"] == name and p["end"] in ends]
            if len(pieces) == len(done):
                print(f"{name}: {self.args.prompt:,} tokens in {sum(pieces):.1f} s")

    def write(self, sides: dict[str, Ours | Theirs]) -> None:
        """Texts behind prompts, the sides in turns."""
        args = self.args
        for turn in range(args.turns + 1):
            for context in args.write:
                # with drafts, texts that end elsewhere in one prompt, of which most is known
                end = max(args.write) - SHIFT * turn if args.draft else context
                prompt = self.text[:end][-context:]
                texts = {name: sides[name].write(prompt, args.tokens) for name in order([*sides], turn)}
                words = {name: text.pop("text") for name, text in texts.items()}
                equal = bool({LLAMA, IK} & {*sides}) or all(text == words[OURS] for text in words.values())
                if turn:  # the first one warms up
                    key = {"context": context, "tokens": args.tokens}
                    self.journal.add("write", key, {"sides": texts, "equal": equal})
        for context in args.write:
            lines = [
                line for line in self.journal.of("write") if line["context"] == context and {*line["sides"]} == {*sides}
            ]
            if not lines:
                continue
            times = {name: sorted(1e3 * line["sides"][name]["token"] for line in lines) for name in sides}
            for name, ms in times.items():
                print(f"{context:,} tokens, {name}: {statistics.median(ms):.1f} ms a token ({ms[0]:.1f}-{ms[-1]:.1f})")
            for one, other in ((OURS, LLAMA), (OURS, IK), (PLANNED, OURS), (FIXED, OURS)):
                if one in sides and other in sides:
                    ratios = sorted(line["sides"][other]["token"] / line["sides"][one]["token"] for line in lines)
                    steps = sum(line["sides"][one]["steps"] for line in lines) / len(lines)
                    print(
                        f"{context:,} tokens: {one} is {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) "
                        f"times as fast as {other} in {len(ratios)} texts; {args.tokens / steps:.2f} tokens a step; "
                        f"{sum(not line['equal'] for line in lines)} differ"
                    )

    def nodes(self) -> None:
        """A forward over several nodes, behind random keys and values."""
        model, nodes = self.loaded.model, self.args.nodes
        sides = {f"behind {n:,} tokens": (model, random_context(model, n)) for n in self.args.behind}
        for where, times in forward_seconds(sides, nodes, self.args.turns).items():
            median = {n: statistics.median(times[n]) for n in nodes}
            shares = (f"{n} in {1e3 * median[n]:.1f} ms ({median[n] / median[nodes[0]]:.2f})" for n in nodes)
            print(f"{where}, nodes: {', '.join(shares)}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model")
    options.add_argument("--folder", type=Path, required=True, help="for journals and what was read")
    options.add_argument("--program", type=Path, help="llama.cpp's")
    options.add_argument("--ik", type=Path, help="a llama-server of ik_llama.cpp")
    options.add_argument("--side", choices=(OURS, LLAMA), help="this one alone")
    options.add_argument("--draft", help="a draft model, beside plain decoding, in place of llama.cpp")
    options.add_argument("--fixed", type=int, default=4, help="draft tokens of a step, beside the planner's choice")
    options.add_argument("--prompt", type=int, default=0, help="tokens to read")
    options.add_argument("--piece", type=int, default=2048, help="tokens of a piece")
    options.add_argument("--write", type=int, nargs="+", default=[], help="lengths of prompts to write behind")
    options.add_argument("--tokens", type=int, default=32, help="to write")
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--nodes", type=int, nargs="+", help="nodes of forwards, the first to compare with")
    options.add_argument("--behind", type=int, nargs="+", default=[128, 8192], help="their lengths of text")
    args = options.parse_args()
    if args.draft and args.write and max(args.write) <= SHIFT * args.turns:
        options.error(
            f"texts end {SHIFT} tokens earlier in each turn: --write {SHIFT * args.turns + 64} or more, or fewer --turns"
        )
    lengths = Lengths(args)
    print(lengths.journal.machine)
    if args.nodes:
        lengths.nodes()
        return
    with ExitStack() as stack:
        sides = lengths.sides(stack)
        if args.prompt:
            lengths.prompt(sides)
        if args.write:
            lengths.write(sides)


if __name__ == "__main__":
    main()
