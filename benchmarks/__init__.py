"""Measurements: one ruler for outrider and its peers. Imports outrider; nothing imports it. Not installed.

python -m benchmarks                 the table of docs/performance.md, measured here (make bench)
python -m benchmarks.real            real models: every method and text, against llama.cpp on the same file
python -m benchmarks.shapes          GGUF files of true shapes with random weights, for models that are not at hand
python -m benchmarks.machine         this machine: cores, instruction sets, read bandwidth
python -m benchmarks.inflate         a Llama of any size that computes the function of a small one
python -m benchmarks.forward         the time of a forward over M tokens, over one over a single token
python -m benchmarks.hybrids         a hybrid model: kept states, V(M) beside llama.cpp, prefill
python -m benchmarks.quality         perplexity by precision of weights, keys and values
python -m benchmarks.attention       attention over long contexts, by precision of keys and values
python -m benchmarks.heads           what a draft with a trained head costs, with made weights
python -m benchmarks.decode          tokens/s of methods and peers, interleaved
python -m benchmarks.workloads       every drafter on code, prose and edits
python -m benchmarks.trees           trees against chains at equal node count
python -m benchmarks.draft_vocab     precision and head of a draft model: what they cost and are worth
python -m benchmarks.traces          records what drafters would propose
python -m benchmarks.replays         `auto` without a clock: recorded texts on tables of seconds
python -m benchmarks.around          the time around a draft: what a step takes beside its forwards
python -m benchmarks.never_slower    the planner with drafters that cannot help
python -m benchmarks.tuned           what tune chooses, against a long race of the best settings
python -m benchmarks.edits           edits of real files: what the text itself foretells
python -m benchmarks.identity        a million tokens: how many differ from plain decoding
python -m benchmarks.instruction_sets  whole texts over instruction sets and threads: how many tokens differ
python -m benchmarks.instructions    instructions for a weight of the kernels for ARM: a count, not a speed
python -m benchmarks.libraries OLD.so NEW.so  two builds of the kernels against each other
python -m benchmarks.commits         two checkouts against each other: did a change make anything slower
python -m benchmarks.schemas         speed under a JSON schema, also beside another checkout
python -m benchmarks.clients         a default server for one or several clients at once, over its own plain decoding
python -m benchmarks.serve           load on a server: throughput and latency by concurrency
python -m benchmarks.serve_soak      a server under clients that behave badly, for ten minutes
python -m benchmarks.handover.parsers exported command lines, by the parsers of other engines
python -m benchmarks.table           the tables of docs/performance.md, from the files in benchmarks/results
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "work" / "bench"  # models made here; git-ignored
PEERS = ROOT / "work" / "peers"  # peers built here; git-ignored
RESULTS = Path(__file__).resolve().parent / "results"
DATA = Path(__file__).resolve().parent / "data"


def headline(doc: str | None) -> str:
    """The first line of a module's docstring, for --help."""
    return (doc or "").partition("\n")[0]
