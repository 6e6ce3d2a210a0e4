"""The rulers themselves: big models that compute a small one's function, the runner, the tables. Nothing is timed here."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import clients, decode, draft_vocab, forward, identity, machine, pairs, quality, table, workloads
from benchmarks.figures import HEAD, figures, names
from benchmarks.inflate import Inflater, Size, compare, inflate, perturb
from benchmarks.peers.llama_cpp import TYPES, converted
from benchmarks.peers.ours import Ours, config_of
from benchmarks.prompts import humaneval
from benchmarks.report import markdown
from benchmarks.side import Missing, Run
from benchmarks.trees import sized_shape
from outrider.core.types import Budget
from outrider.drafters.shapes import BY_RANK, Shape
from outrider.models.cache import SlotCache
from outrider.models.load import load
from outrider.models.nodes import Nodes
from outrider.serve.options import ServeOptions
from tests.support.serving import builtin, serving

VOCAB = 97


def tiny(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 40,
            "vocab_size": VOCAB,
            "tie_word_embeddings": True,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "eos_token_id": 0,
            **changes,
        }
    )
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


def test_the_comparison_sees_a_wrong_model(tmp_path: Path) -> None:
    small = tiny()
    inflate(small, Size(64, 4, 8, 2, 16, 96), tmp_path / "big", torch.float32)
    big = LlamaForCausalLM.from_pretrained(tmp_path / "big").eval()
    told = compare(small, perturb(big, 0.1), [[1, 2, 3]], 64)
    assert told["max_logit_difference"] > 1e-2 * told["max_logit"]


def test_no_matrix_of_the_big_model_can_be_skipped() -> None:
    groups = Inflater(tiny(), Size(64, 5, 8, 2, 16, 96), torch.float32).groups()
    for name, t in ((n, t) for group in groups for n, t in group.items()):
        assert (t != 0).all(), name
        if t.dim() == 2 and "k_proj" not in name:  # k is quiet where the small model has no pair of dimensions
            rows, columns = t.pow(2).mean(1).sqrt(), t.pow(2).mean(0).sqrt()
            assert rows.min() > 0.02 * rows.mean(), name
            assert columns.min() > 0.02 * columns.mean(), name


def test_the_same_in_bfloat16_stays_close(tmp_path: Path) -> None:
    small = tiny()
    inflate(small, Size(64, 6, 8, 2, 16, 96), tmp_path / "big", torch.bfloat16)
    big = LlamaForCausalLM.from_pretrained(tmp_path / "big", dtype=torch.float32).eval()
    told = compare(small, big, [[1, 2, 3]], 8)
    assert told["max_logit_difference"] < 0.1 * told["max_logit"]


def test_a_size_that_cannot_hold_the_source_is_refused() -> None:
    with pytest.raises(ValueError, match="layers, hidden"):
        Inflater(tiny(), Size(16, 1, 8, 2, 16, 96), torch.float32)
    with pytest.raises(ValueError, match="head_dim"):
        Inflater(tiny(), Size(64, 4, 8, 2, 12, 96), torch.float32)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    folder = tmp_path_factory.mktemp("draft")
    perturb(tiny(), 0.05).save_pretrained(folder)
    return Ours(load(tiny(), dtype="float32", device="cpu"), {"draft": str(folder)})


def test_methods_are_told_by_name() -> None:
    drafts = {"own": "folder"}
    assert config_of("plain", drafts, None).method == "none"
    assert config_of("ngram:7", drafts, None).num_speculative_tokens == 7
    assert config_of("self-int4:3", drafts, None).quantization == "int4"
    assert config_of("own:2", drafts, "int8").model_dump(include={"model", "quantization"}) == {
        "model": "folder",
        "quantization": "int8",
    }
    with pytest.raises(ValueError, match="unknown method 'nrgam'"):
        config_of("nrgam:2", drafts, None)


def test_heads_and_precisions_of_a_draft_are_compared_on_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    given = "--target builtin:code --draft builtin:code-draft --quantizations none int4 --sizes 0 512 --corpus outrider/core"
    rest = f"--workloads code --texts 1 --tokens 20 --temperatures 0 --out {out}"
    monkeypatch.setattr("sys.argv", ["draft_vocab", *given.split(), *rest.split()])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    draft_vocab.main()
    found = json.loads(out.read_text())
    assert found["corpus"] == ["core"]
    rows = {r["draft"]: r for r in found["draft_vocab"]}
    assert list(rows) == ["float32, all", "float32, 512", "int4, all", "int4, 512"]
    assert rows["float32, all"]["bytes"] > rows["float32, 512"]["bytes"] > rows["int4, 512"]["bytes"]
    assert all(1 <= r["length"] <= 5 and r["draft_seconds"] > 0 for r in rows.values())


def test_the_runner_compares_methods_on_the_same_texts(worker: Ours) -> None:
    methods = ["plain", "draft:3", "ngram:4"]
    records = decode.compare({"outrider": (worker, methods)}, [[1, 2, 3], [4, 5, 6]], tokens=24, rounds=2, context=16)
    assert [r["method"] for r in records] == methods
    by = {r["method"]: r for r in records}
    for r in records:
        assert r["identical_texts"] == r["texts"] == 4
        assert r["tokens_per_second"] > 0
    assert by["plain"]["speedup"] == 1
    assert by["plain"]["acceptance_length"] == 1
    assert by["draft:3"]["acceptance_length"] > 1
    assert 0 < by["draft:3"]["conditional_rate"] <= 1
    assert by["draft:3"]["draft_ms"] > 0
    assert by["draft:3"]["efficiency"] == pytest.approx(
        by["draft:3"]["speedup"] / by["draft:3"]["allowed_speedup"], rel=0.01
    )


def test_time_runs_from_the_first_step_to_the_last(worker: Ours) -> None:
    run = worker.generate("draft:3", [1, 2, 3], 20)
    plain = worker.generate("plain", [1, 2, 3], 20)
    assert run.tokens == plain.tokens
    assert len(plain.tokens) == 20
    assert plain.timed == plain.steps == 19
    assert run.timed == run.steps + sum(run.accepted) < 20
    assert run.seconds >= sum(run.parts.values()) * 0.99


def test_a_speedup_is_of_time_per_token_over_the_whole_set() -> None:
    plain = [[Run([1] * 11, 10, 10.0, 10), Run([2] * 11, 10, 10.0, 10)]]
    fast = [[Run([1] * 11, 10, 2.0, 5, [3] * 5, [1] * 5), Run([9] * 11, 10, 8.0, 10, [3] * 10, [0] * 10)]]
    ideal = decode.allowed(fast[0], {1: 1.0, 4: 1.5}, 0.1)
    assert ideal == pytest.approx(20 / (15 * 1.5 + 45 * 0.1))
    told = decode.summary(fast, plain, ideal)
    assert told["speedup"] == 2
    assert told["identical_texts"] == 1
    assert told["acceptance_rate"] == round(5 / 45, 3)
    assert told["conditional_rate"] == round(5 / 20, 3)
    assert decode.guesses(Run([], 10, 1.0, 4, [12], [6])) == [3.0] * 4  # a peer that tells the sum alone


def test_ratios_are_taken_within_a_round() -> None:
    told = forward.summary({1: [1.0, 10.0, 2.0], 4: [1.5, 15.0, 2.0]})
    assert told["ratio"] == {1: 1.0, 4: 1.5}
    assert told["spread"][4] == [1.0, 1.5]
    assert told["ms_least"] == 1000


def test_forwards_are_measured_side_by_side() -> None:
    asked: list[tuple[str, int]] = []

    def side(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, forward=lambda m, context, repeats: asked.append((name, m)) or [m * 1e-3] * repeats
        )

    times = forward.measure([side("a"), side("b")], rows=(1, 2), rounds=2)  # pyright: ignore[reportArgumentType]
    assert asked == [("a", 1), ("a", 2), ("b", 1), ("b", 2)] * 3
    assert times["b"] == {1: [1e-3] * 2, 2: [2e-3] * 2}
    records = forward.table(times, 2e6, 4.0)
    assert records[0]["gb_per_second"] == 2.0
    assert records[0]["share"] == 0.5


def test_tables_are_made_from_the_newest_result(tmp_path: Path) -> None:
    facts = {**machine.facts(), "read_gb_per_second": {"one": 10.0, "all": 20.0, "how": "compiled loop"}}
    method = {
        "side": "outrider", "tokens_per_second": 30.0, "spread": [29.0, 31.0], "speedup": 1.0, "acceptance_length": 1.0,
        "acceptance_rate": None, "conditional_rate": None, "draft_share": None, "overhead_share": 0.01, "identical_texts": 6,
        "texts": 6,
    }  # fmt: skip
    fast = {**method, "tokens_per_second": 60.0, "speedup": 2.0, "acceptance_rate": 0.6, "efficiency": 0.95}
    peer = {**fast, "side": "llama.cpp", "method": "draft:8", "tokens_per_second": 40.0}
    records = [
        {**method, "method": "plain"}, {**fast, "method": "draft:4"},
        {**method, "side": "llama.cpp", "method": "plain"}, peer,
    ]  # fmt: skip
    wide = {
        "side": "outrider",
        "ms": 20.0,
        "ratio": {"1": 1.0, "2": 1.1, "4": 1.2, "8": 1.5},
        "gb_per_second": 18.0,
        "share": 0.9,
    }
    result = {
        "name": "bench", "command": "python -m benchmarks", "machine": facts,
        "forward": [{"size": "0.5B", "precision": "float32", "records": [wide]}],
        "decode": [{"kind": "draft", "size": "0.5B", "precision": "float32", "temperature": 0.0, "weight_bytes": 5e8,
                    "records": records}],
    }  # fmt: skip
    (tmp_path / "2026-01-01-bench.json").write_text(json.dumps({**result, "command": "stale"}))
    (tmp_path / "2026-01-02-bench.json").write_text(json.dumps(result))
    (tmp_path / "2026-01-02-identity.json").write_text(json.dumps({"differing": 0, "tokens": 1000064, "units": []}))
    document = "a\n<!-- table: figures bench -->\nold\n<!-- /table -->\nb\n<!-- table: decode none -->\nkept\n<!-- /table -->\n"
    document += "<!-- table: machine bench --><!-- /table -->".replace(" --><", " -->\n<")
    text = table.fill(document, tmp_path)
    assert "old" not in text
    assert "kept" in text
    assert "stale" not in text
    assert "0 in 1,000,064" in text
    assert "| forward over 2, 4, 8 tokens over 1: 0.5B float32 | 1.08 1.20 1.45 | 1.10 1.20 1.50 |" in text
    assert table.fill(text, tmp_path) == text
    lines = figures(result)
    assert any(n.startswith("efficiency, draft:4") for n in names(lines))
    over = next(line for line in lines if "over llama.cpp's best" in line[0])
    assert over[1:3] == ["1.25", "1.50"]
    assert markdown(HEAD, lines).count("\n") == len(lines) + 1


def test_the_document_names_results_that_the_tables_know() -> None:
    if not table.DOCUMENT.exists():
        pytest.skip("no document yet")
    found = [m.groups()[1:3] for m in table.MARKER.finditer(table.DOCUMENT.read_text(encoding="utf-8"))]
    assert found
    for kind, name in found:
        assert kind in table.KINDS
        if result := table.newest(name):
            table.render(kind, result, None)


def test_the_exactness_run_counts_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny().save_pretrained(tmp_path / "target")
    perturb(tiny(), 0.05).save_pretrained(tmp_path / "draft")
    bench = identity.Bench(str(tmp_path / "target"), str(tmp_path / "draft"), "float32")
    bench.makers = {k: bench.makers[k] for k in ("draft_model", "ngram", "wrong")}
    monkeypatch.setattr(identity, "LENGTH", 64)
    state = {"mark": ["abc"], "round": 0, "tokens": 0, "differing": 0, "seconds": 0.0, "units": {}, "where": []}
    seen: list[int] = []
    identity.run({"float32": bench}, [[1, 2, 3], [4, 5]], 700, 16, state, lambda s: seen.append(s["round"]))
    assert state["tokens"] == 3 * 2 * 8 * 16
    assert state["differing"] == 0
    assert seen == [1]
    assert set(state["units"]) == {"float32/draft_model", "float32/ngram", "float32/wrong"}
    assert identity.differing([1, 2, 3], [1, 5, 3, 4]) == 2
    told = identity.result(state, "a", "b")
    assert told["machine"]["commit"] == "abc"
    [units] = [u for u in told["units"] if u["drafter"] == "wrong"]
    assert units["tokens"] == 256


def test_a_peer_that_is_not_built_says_how_to_build_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.llama_cpp.PEERS", tmp_path)
    tiny().save_pretrained(tmp_path / "model")
    with pytest.raises(Missing, match="run benchmarks"):
        converted(tmp_path / "model", TYPES[0])


def test_prompts_and_sizes() -> None:
    prompts = humaneval(32)
    assert len(set(prompts)) == 32
    with pytest.raises(ValueError, match="32 prompts"):
        humaneval(33)
    assert pairs.drafts_of(["x", "own=y"]) == {"draft": "x", "own": "y"}
    assert machine.facts()["cores"] >= 1


def test_the_best_of_many_alike_is_not_flattered_by_its_noise() -> None:
    """Eight methods that take a second with noise: the best sum is 4 % below it, what the halves choose for each other is not."""
    draw = np.random.default_rng(1)
    many = [{f"m{n}": draw.normal(1.0, 0.3, 40) for n in range(8)} for _ in range(200)]
    flattered = np.mean([min(t.mean() for t in taken.values()) for taken in many])
    fair = np.mean([workloads.fastest(taken).mean() for taken in many])
    assert flattered < 0.96
    assert abs(fair - 1) < 0.01
    taken = {"slow": np.full(17, 2.0), "fast": np.full(17, 1.0)}
    assert workloads.fastest(taken).tolist() == [1.0] * 17
    assert workloads.fastest({"plain": np.ones(3)}).tolist() == [1.0] * 3


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
        loaded.model.forward(Nodes(ids, SlotCache(1, 100, dtype), [0])).logits[0, :-1].double().log_softmax(-1)
        for dtype in ("auto", "int8")
    ]
    for found, logp in zip((exact, rounded), whole, strict=True):
        assert found["tokens"] == ids.shape[1] - 1
        assert found["perplexity"] == pytest.approx(float(torch.nn.functional.nll_loss(logp, ids[0, 1:]).exp()))
        moved = float((whole[0].exp() * (whole[0] - logp)).sum(-1).mean())
        assert found["divergence"] == pytest.approx(moved, rel=0.05, abs=1e-12)
        assert found["same"] == float((whole[0].argmax(-1) == logp.argmax(-1)).double().mean())
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
        losses.append(torch.nn.functional.cross_entropy(logits, window[0, 9:], reduction="sum"))
    assert ours["tokens"] == 7 * len(losses)
    assert ours["perplexity"] == pytest.approx(float((torch.stack(losses).sum() / ours["tokens"]).exp()), rel=1e-5)

    tool.write_text(f"#!{sys.executable}\nraise SystemExit('no such model')\n")
    with pytest.raises(RuntimeError, match="no such model"):
        list(quality.measure("builtin:code", ["float32"], ["auto"], [str(file)], 1, 16, tool))


def test_clients_at_once_are_compared_with_plain_decoding() -> None:
    bodies = clients.requests(["code", "chat"], [0, 1.0], chat=False)
    rounds = [[{**next(bodies), "max_tokens": 6} for _ in range(4)] for _ in range(2)]
    with serving(builtin(), ServeOptions(model="model")) as live:
        found = clients.compared(live.url, os.getpid(), rounds, [clients.PLAIN, {}], 2)
        with pytest.raises(AssertionError, match="texts of a round differ"):
            clients.compared(live.url, os.getpid(), rounds, [{}, {"seed": 99}], 2)
    assert [len(arm["latency"]) for took in found for arm in took] == [4] * 4
    assert len({body["prompt"] for some in rounds for body in some}) == 8


def test_clients_gain_by_wall_time_rounds_and_the_slowest_request() -> None:
    plain = {"seconds": 4.0, "processor": 2.0, "latency": [2.0, 4.0], "ttft": [0.1, 0.1]}
    auto = {"seconds": 2.0, "processor": 2.5, "latency": [1.0, 5.0], "ttft": [0.2, 0.2]}
    told = clients.summary([[plain, plain, auto]] * 2, 2)
    assert (told["wall"][0], told["processor"][0], told["median_request"]) == (2.0, 0.8, 1.4)
    assert (told["rounds"], told["slowest_over_plain"], told["first_token_over_plain"]) == ([1.0, 1.0], 1.25, 2.0)
