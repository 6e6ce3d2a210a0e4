"""Measurements: one ruler for outrider and its peers. Imports outrider; nothing imports it. Not installed.

python -m benchmarks.real            real models: every method and text, against peers on the same file (make bench)
python -m benchmarks.clients         a default server for one or several clients at once, over its own plain decoding
python -m benchmarks.serve           load on a server: throughput and latency by concurrency
python -m benchmarks.serve_soak      a server under clients that behave badly, for ten minutes
python -m benchmarks.schemas         speed under a JSON schema, also beside another checkout
python -m benchmarks.first_token     the first token of a long prompt, also after a restart
python -m benchmarks.lengths         long texts: reading, writing and drafts behind them
python -m benchmarks.quality         perplexity by precision of weights, keys and values
python -m benchmarks.heads           what a draft with a trained head costs, with random weights
python -m benchmarks.trees           trees against chains at equal node count
python -m benchmarks.traces          records what drafters would propose
python -m benchmarks.replays         `auto` without a clock: recorded texts on tables of seconds
python -m benchmarks.around          the time around a draft: what a step takes beside its forwards
python -m benchmarks.never_slower    the planner with drafters that cannot help
python -m benchmarks.identity        a million tokens: how many differ from plain decoding
python -m benchmarks.instruction_sets  whole texts over instruction sets and threads: how many tokens differ
python -m benchmarks.commits OLD NEW  two checkouts, or two builds of the kernels: did a change make anything slower
python -m benchmarks.shapes          GGUF files of true shapes with random weights, for models that are not at hand
python -m benchmarks.scale_up        a Llama of any size that computes the function of a small one
python -m benchmarks.gpu             a GPU in a quarter of an hour: equal bits, kernels, steps and texts of random weights
python -m benchmarks.table           the tables of the pages, from the files in benchmarks/results
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "work" / "bench"  # models and journals; git-ignored
RESULTS = Path(__file__).resolve().parent / "results"
DATA = Path(__file__).resolve().parent / "data"
