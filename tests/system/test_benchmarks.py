"""The benchmarks: each starts, each runs with small numbers and writes what it measured, and their statistics are right.

Nothing is timed here. A new benchmark is found by its file, and needs a row of `RUNS`.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from serving import builtin, server_here, serving
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import ROOT, around, clients, edits, forwards, identity, machine, quality, ruler, serve, table, texts
from benchmarks.scale_up import Inflater, Size, compare, inflate
from benchmarks.trees import sized_shape
from outrider.core.types import Budget
from outrider.drafters.shapes import BY_RANK, Shape
from outrider.kernels import cpu as native
from outrider.models.cache import SlotCache
from outrider.models.load import load
from outrider.models.nodes import Nodes
from outrider.serve.options import ServeOptions

PAIR = "--target builtin:code --draft builtin:code-draft"
KERNELS = next((ROOT / "outrider" / "kernels" / "cpu").glob("_kernels.*"), None)
# Small settings of each command. OUT is a result file in FOLDER.
RUNS = {
    "around": "builtin:code --draft-model builtin:code-draft --texts 1 --tokens 16 --out OUT",
    "clients": "builtin:code --draft-model builtin:code-draft --clients 2 --rounds 2 --out OUT",
    "commits": f"{KERNELS} {KERNELS} --rounds 1 --formats Q4_K --rows 1",
    "first_token": """builtin:code --tokens 100 --beside 2 --config '{"method": "suffix"}'""",
    "gpu": "--tiny --out OUT",
    "heads": "--rounds 1 --precisions int8 --targets SmolLM2-135M --draft-vocab 256",
    "identity": "--tokens 1 --length 4 --weights float32 --afresh --out FOLDER",
    "instruction_sets": "builtin:code --record OUT",
    "lengths": "builtin:code --folder FOLDER --draft builtin:code-draft --write 256 --tokens 8 --turns 1",
    "never_slower": "--model builtin:code --cases wrong --texts 1 --tokens 64 --out OUT",
    "prompts": "builtin:code --count 3 --tokens 4 --long 20 --slots 2 --requests 300 --rounds 1 --out OUT",
    "quality": "builtin:code --quantization int8 --count 2 --length 60 --needle 100 --out OUT",
    "real": f"{PAIR} --methods plain suffix --workloads code --texts 1 --tokens 16 --length 512 --temperatures 0 --only texts "
    "prompt forward --journal FOLDER/j --out FOLDER",
    "replays": "--machines quiet --texts 1 --out OUT",
    "scale_up": "builtin:code --size 15M --out FOLDER/big",
    "schemas": "builtin:code --max-tokens 8 --subjects 1",
    "serve": "--start builtin:code --max-concurrency 1 --num-prompts 1 --output-len 8 --save-result OUT",
    "serve_soak": "--seconds 1 --slots 2 --queue 2 --save-result OUT",
    "shapes": "qwen2.5-0.5b --gguf FOLDER/a.gguf --layers 1",
    "start": "builtin:code --rounds 1 --out OUT",
    "steady": "builtin:code --draft-model builtin:code-draft --slots 2 --requests 1 --machines quiet --out OUT",
    "table": "--check",
    "traces": f"{PAIR} --part held --temperatures 0 --texts 1 --out FOLDER/t.jsonl.gz",
    "trees": f"{PAIR} --nodes 2 --temperatures 0 --tokens 8 --prompts 1 --out OUT",
}
# Programs for the Python of a peer, and parts of a command.
PARTS = {"real.start", *(f"peers.{name}" for name in ("convert", "requantize", "openvino_server", "xllamacpp_server"))}


def commands() -> set[str]:
    """The modules that can be run, by their names below `benchmarks`."""
    files = [f for f in (ROOT / "benchmarks").rglob("*.py") if "\nif __name__ ==" in f.read_text()]
    return {".".join(f.relative_to(ROOT / "benchmarks").with_suffix("").parts).removesuffix(".__main__") for f in files}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """What a command prints, in this process: a new one imports for seconds. It fails if the command does."""

    def call(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        code = None
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        assert not code
        return capsys.readouterr().out

    isa, threads = native.isa(), native.num_threads()
    yield call
    native.use_isa(isa)
    native.set_num_threads(threads)


def test_each_command_has_a_small_run() -> None:
    assert commands() - PARTS == {*RUNS}


def on_pages() -> dict[str, set[str]]:
    """The commands that the pages name, with their options. The log and the changelog name commands of their day."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("recipes/**/*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
    options: dict[str, set[str]] = {}
    for page in pages:
        if page.name not in ("log.md", "CHANGELOG.md"):
            text = page.read_text(encoding="utf-8").replace("\\\n", " ")
            for name, rest in re.findall(r"python -m benchmarks\.([a-z_.]+)([^`#\n]*)", text):
                options.setdefault(name.rstrip("."), set()).update(re.findall(r"(?<!\S)--[a-z-]+", rest))
    return options


def test_the_pages_name_commands_of_this_tree() -> None:
    assert len(on_pages()) > 15
    assert not on_pages().keys() - commands()


@pytest.mark.parametrize("name", sorted(RUNS))
def test_each_command_starts_and_has_the_options_of_the_pages(name: str, run: Callable[..., str]) -> None:
    text = run(name, "--help")
    assert f"usage: python -m benchmarks.{name}" in text
    assert not [option for option in on_pages().get(name, ()) if option not in text]


@pytest.mark.parametrize("name", sorted(RUNS))
def test_each_command_measures_and_writes_a_result(
    name: str, tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    words = [w.replace("OUT", str(out)).replace("FOLDER", str(tmp_path)) for w in shlex.split(RUNS[name])]
    monkeypatch.setattr(serve, "own_server", server_here)  # `serve` itself starts a process
    printed = run(name, *words)
    assert "WRONG" not in printed
    assert printed or name in ("table", "shapes", "traces")
    if "OUT" in RUNS[name] or name in ("identity", "real"):
        [file] = tmp_path.glob("*.json")
        result = json.loads(file.read_text())
        assert result["machine"]["cores"] == machine.cores()
        assert str(tmp_path) not in str(result.get("command"))


# Statistics


def test_turns_are_reversed_and_warm_up_first() -> None:
    assert [*ruler.turns("ab", 2, warm=1)] == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a")]


def test_a_speedup_is_a_ratio_of_sums_and_a_median_has_its_texts_interval() -> None:
    fast = ruler.speedup([1.0, 3.0, 2.0], [1.0, 1.0, 1.0])
    assert fast.value == 2.0
    assert fast.low < 2 < fast.high
    middle = ruler.median_interval([1.0, 2.0, 9.0])
    assert (middle.value, middle.low, middle.high) == (2.0, 1.0, 9.0)
    assert ruler.shown(middle) == "2.00 (1.00-9.00)"
    assert ruler.differing([1, 2, 3], [1, 5, 3, 4]) == 2


def test_a_call_within_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr(around, "thread_time", lambda: float(next(ticks)))
    meter = around.Meter()
    inner = meter.timed("target", lambda: None)
    meter.timed("model", inner)()
    assert meter.seconds == {"model": 1.0}
    inner()
    assert meter.seconds == {"model": 1.0, "target": 1.0}


def test_ratios_of_forwards_are_taken_within_a_round() -> None:
    assert forwards.summary({1: [1.0, 10.0, 2.0], 4: [1.5, 15.0, 2.0]}) == {"ms": 2000.0, "ratio": {"1": 1.0, "4": 1.5}}
    model = load("builtin:code-draft").model
    sides = {name: (model, forwards.read_context(model, 8)) for name in "ab"}
    times = forwards.forward_seconds(sides, [1, 2], rounds=2, repeats=1)
    assert [len(seconds) for side in times.values() for seconds in side.values()] == [2] * 4
    assert forwards.random_context(model, 8).layers[0][0].shape == sides["a"][1].layers[0][0].shape


def test_clients_at_once_are_compared_with_plain_decoding() -> None:
    bodies = clients.requests(["code", "chat"], [0, 1.0], chat=False)
    rounds = [[{**next(bodies), "max_tokens": 6} for _ in range(4)] for _ in range(2)]
    with serving(builtin(), ServeOptions(model="model")) as live:
        results = clients.compared(live.url, os.getpid(), rounds, [clients.PLAIN, {}], 2)
        with pytest.raises(AssertionError, match="texts of a round differ"):
            clients.compared(live.url, os.getpid(), rounds, [{}, {"seed": 99}], 2)
    assert [len(arm["latency"]) for took in results for arm in took] == [4] * 4
    assert len({body["prompt"] for some in rounds for body in some}) == 8


def test_clients_gain_by_wall_time_rounds_and_the_slowest_request() -> None:
    plain = {"seconds": 4.0, "processor": 2.0, "latency": [2.0, 4.0], "ttft": [0.1, 0.1]}
    auto = {"seconds": 2.0, "processor": 2.5, "latency": [1.0, 5.0], "ttft": [0.2, 0.2]}
    told = clients.summary([[plain, plain, auto]] * 2, 2)
    assert (told["wall"].value, told["processor"].value, told["median_request"]) == (2.0, 0.8, 1.4)
    assert (told["rounds"], told["slowest_over_plain"], told["first_token_over_plain"]) == ([1.0, 1.0], 1.25, 2.0)


def test_the_tree_shrinks_where_nodes_are_expensive() -> None:
    limit = Budget(6, 4, 24)

    def size(node_price: float, draft_price: float = 0.05) -> Shape:
        return sized_shape(limit, BY_RANK, lambda n: 1 + node_price * (n - 1), lambda d: draft_price * d)

    free, cheap, expensive, absurd = (size(p) for p in (0.0, 0.03, 0.2, 1.0))
    assert len(free.parents) == 25
    assert len(free.parents) > len(cheap.parents) > len(expensive.parents) > len(absurd.parents) == 1
    assert expensive.ranks == (0,) * len(expensive.ranks)  # a chain
    assert len(size(0.0, draft_price=5.0).parents) == 1  # a drafter as expensive as the target


def test_quality_is_cross_entropy_and_the_divergence_of_whole_distributions(tmp_path: Path) -> None:
    """Against torch on all tokens. A text file is read, too."""
    file = tmp_path / "text.txt"
    file.write_text("def area(radius):\n    return 3.14 * radius * radius\n" * 3)
    [exact, rounded] = quality.measure("builtin:code", ["float32"], ["auto", "int8"], [str(file)], 1, 100)
    loaded = load("builtin:code", dtype="float32")
    ids = torch.tensor([loaded.tokenizer(file.read_text())["input_ids"][:100]])  # type: ignore[misc]
    whole = [
        torch.from_numpy(loaded.model.forward(Nodes(ids, SlotCache(1, 100, dtype), [0])).logits[0, :-1])
        .double()
        .log_softmax(-1)
        for dtype in ("auto", "int8")
    ]
    for record, logp in zip((exact, rounded), whole, strict=True):
        assert record["tokens"] == ids.shape[1] - 1
        assert record["perplexity"] == pytest.approx(float(torch.nn.functional.nll_loss(logp, ids[0, 1:]).exp()))
        moved = float((whole[0].exp() * (whole[0] - logp)).sum(-1).mean())
        assert record["divergence"] == pytest.approx(moved, rel=0.05, abs=1e-12)
        assert record["same"] == float((whole[0].argmax(-1) == logp.argmax(-1)).double().mean())
    assert exact["nats"] == exact["divergence"] == 0
    assert rounded["divergence"] > 0


def test_quality_reads_the_windows_of_llama_cpps_tool(tmp_path: Path) -> None:
    """That tool scores the tokens after the middle of each window; a window alone gives the same figure."""
    file, tool = tmp_path / "text.txt", tmp_path / "llama-perplexity"
    file.write_text("def area(radius):\n    return 3.14 * radius * radius\n" * 6)
    tool.write_text(f"#!{sys.executable}\nprint('Final estimate: PPL = 4.0000 +/- 0.10000')\n")
    tool.chmod(0o755)
    [ours, theirs] = quality.measure("builtin:code", ["float32"], ["auto"], [str(file)], 1, 16, tool)
    assert (theirs["weights"], theirs["perplexity"], theirs["error"]) == ("llama.cpp", 4.0, 0.025)
    loaded = load("builtin:code", dtype="float32")
    ids = loaded.tokenizer(file.read_text())["input_ids"]  # type: ignore[misc]
    losses = []
    for start in range(0, len(ids) - 15, 16):
        window = torch.tensor([ids[start : start + 16]])
        logits = loaded.model.forward(Nodes(window, SlotCache(1, 16), [0])).logits[0, 8:15]
        losses.append(torch.nn.functional.cross_entropy(torch.as_tensor(logits), window[0, 9:], reduction="sum"))
    assert ours["tokens"] == 7 * len(losses)
    assert ours["perplexity"] == pytest.approx(float((torch.stack(losses).sum() / ours["tokens"]).exp()), rel=1e-5)

    tool.write_text(f"#!{sys.executable}\nraise SystemExit('no such model')\n")
    with pytest.raises(RuntimeError, match="no such model"):
        list(quality.measure("builtin:code", ["float32"], ["auto"], [str(file)], 1, 16, tool))


def test_the_exactness_run_counts_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "TEXTS", 2)
    bench = identity.Bench("builtin:code", "builtin:code-draft", "float32")
    bench.makers = {k: bench.makers[k] for k in ("ngram", "wrong", identity.BOTH)}
    decode, ngram, rounds = bench.decode, bench.makers["ngram"](), list[int]()

    def spoiled(drafter, *more):
        """The texts of `ngram` end one token early."""
        rows = decode(drafter, *more)
        return [SimpleNamespace(output=row.output[:-1]) for row in rows] if drafter is ngram else rows

    monkeypatch.setattr(bench, "decode", spoiled)
    state = {"mark": ["abc"], "round": 0, "tokens": 0, "differing": 0, "seconds": 0.0, "units": {}, "where": []}
    identity.run({"float32": bench}, [[1, 2, 3], [4, 5]], 1, 16, state, lambda s: rounds.append(s["round"]))
    texts_of_a_round = len(identity.TEMPERATURES) * identity.TEXTS
    assert rounds == [1]
    assert state["tokens"] == 3 * texts_of_a_round * 16
    assert state["differing"] == len(state["where"]) == texts_of_a_round
    assert {name: bad for name, (_, bad) in state["units"].items()} == {
        "float32/ngram": texts_of_a_round, "float32/wrong": 0, f"float32/{identity.BOTH}": 0
    }  # fmt: skip


# A big model that computes a small one's function

VOCAB = 97


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=40,
        vocab_size=VOCAB, tie_word_embeddings=True, max_position_embeddings=256, initializer_range=0.3, eos_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    "size",
    [
        Size(24, 2, 4, 2, 8, 40),  # the same shape: another basis, nothing more
        Size(64, 5, 8, 2, 16, 96),  # wider heads, copies in a group, new layers
        Size(48, 4, 12, 4, 32, 128),  # odd groups: the groups of the two halves are twins
    ],
    ids=str,
)
def test_a_big_model_computes_the_function_of_the_small_one(tmp_path: Path, size: Size) -> None:
    small = tiny()
    inflate(small, size, tmp_path / "big", torch.float32)
    big = LlamaForCausalLM.from_pretrained(tmp_path / "big").eval()
    assert sum(p.numel() for p in big.parameters()) == size.parameters(VOCAB) + (2 * size.layers + 1) * size.hidden
    told = compare(small, big, [[1, 2, 3], [50, 7]], 64)
    assert told["max_logit_difference"] < 1e-3 * told["max_logit"]
    assert told["differing_tokens"] == 0
    with torch.no_grad():
        big.lm_head.weight[3] *= 1.5
    assert compare(small, big, [[1, 2, 3]], 8)["max_logit_difference"] > 1e-3 * told["max_logit"]


def test_no_matrix_of_the_big_model_can_be_skipped() -> None:
    groups = Inflater(tiny(), Size(64, 5, 8, 2, 16, 96), torch.float32).groups()
    for name, t in ((n, t) for group in groups for n, t in group.items()):
        assert (t != 0).all(), name
        if t.dim() == 2 and "k_proj" not in name:  # k is quiet where the small model has no pair of dimensions
            rows, columns = t.pow(2).mean(1).sqrt(), t.pow(2).mean(0).sqrt()
            assert rows.min() > 0.02 * rows.mean(), name
            assert columns.min() > 0.02 * columns.mean(), name


def test_a_size_that_cannot_hold_the_source_is_refused() -> None:
    with pytest.raises(ValueError, match="layers, hidden"):
        Inflater(tiny(), Size(16, 1, 8, 2, 16, 96), torch.float32)
    with pytest.raises(ValueError, match="head_dim"):
        Inflater(tiny(), Size(64, 4, 8, 2, 12, 96), torch.float32)


# Prompts and pages


def test_every_workload_has_twelve_texts_for_chat_and_for_base_models() -> None:
    for workload in texts.WORKLOADS:
        base, chat = texts.texts(workload, False), texts.texts(workload, True)
        assert len({p.id for p in base}) == 12
        assert [p.id for p in chat] == [p.id for p in base]
        assert all(isinstance(p.content, str) for p in base)
        assert all(p.content[0]["role"] == "user" for p in chat if not isinstance(p.content, str))
        assert not any(isinstance(p.content, str) for p in chat)
    with pytest.raises(ValueError, match="there are code, chat"):
        texts.texts("prose", True)
    with pytest.raises(ValueError, match="32 prompts"):
        texts.humaneval(33)


def test_edits_are_what_they_say_and_always_the_same() -> None:
    some = edits.edits(9, seed=4)
    assert some == edits.edits(9, seed=4) != edits.edits(9, seed=5)
    assert [e.kind for e in some] == ["rename", "insert", "delete"] * 3
    for edit in some:
        ast.parse(edit.after)
        assert edit.asked in edit.prompt
        assert edit.before in edit.prompt
        before, after = edit.before.splitlines(), edit.after.splitlines()
        if edit.kind == "insert":
            [new] = [line for line in after if "logger.debug('entering" in line]
            after.remove(new)
            assert after == before
        elif edit.kind == "delete":
            assert len(after) < len(before)
            assert set(after) <= set(before)
        else:
            assert len(after) == len(before)
            old, new = edit.asked.removeprefix("Rename ").removesuffix(".").split(" to ")
            assert old in edit.before.replace(new, "")
            assert new in edit.after


def test_tables_are_made_from_the_newest_result(tmp_path: Path) -> None:
    result = {
        "machine": machine.facts(),
        "command": "new",
        "units": [{"weights": "w", "drafter": "d", "tokens": 1024, "differing": 0}],
    }
    (tmp_path / "2026-01-01-identity.json").write_text(json.dumps({**result, "command": "stale"}))
    (tmp_path / "2026-01-02-identity.json").write_text(json.dumps(result))
    marked = "<!-- table: {} -->\nold\n<!-- /table -->\n"
    document = (
        "a\n"
        + "".join(marked.format(m) for m in ("identity identity", "machine identity"))
        + marked.format("real none")
    )
    text = table.fill(document, tmp_path)
    assert text.count("old") == 1
    assert "| w | d | 1,024 | 0 |" in text
    assert "`new`" in text
    assert "stale" not in text
    assert table.fill(text, tmp_path) == text


@pytest.mark.parametrize("page", [table.DOCUMENT, table.TREES, table.README], ids=lambda page: page.name)
def test_the_documents_name_results_that_the_tables_know(page: Path) -> None:
    markers = [m.groups()[1:3] for m in table.MARKER.finditer(page.read_text(encoding="utf-8"))]
    assert markers
    for kind, name in markers:
        result = table.newest(name)
        assert result is not None, name
        assert table.render(kind, result)
