"""From the journal to records, the result file and Markdown tables. Ratios are of seconds per token, text by text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import zip_longest
from statistics import median
from typing import Any

from benchmarks.peers.llama_server import LLAMA, PEERS
from benchmarks.real.journal import Journal
from benchmarks.real.sides import PLAIN
from benchmarks.ruler import markdown, median_interval, shown
from benchmarks.texts import WORKLOADS

LEAST = 8  # decoded tokens of a text that counts; shorter ones say nothing about a speed
Round = dict[str, Any]


def cells(rounds: Iterable[Round]) -> dict[tuple[Any, ...], list[Round]]:
    """Rounds by target, draft, weights, workload and temperature."""
    groups: dict[tuple[Any, ...], list[Round]] = defaultdict(list)
    for r in rounds:
        groups[r["target"], r["draft"], r["weights"], r["workload"], r["temperature"]].append(r)
    return groups


def records(rounds: Iterable[Round]) -> list[dict[str, Any]]:
    """One record for each setting of each cell."""
    out = []
    for (target, draft, weights, workload, temperature), some in cells(rounds).items():
        long = [r for r in some if min(t["tokens"] for t in r["timings"].values()) >= LEAST]
        names = dict.fromkeys(name for r in long for name in r["timings"])
        for name in names:
            mine = [r for r in long if name in r["timings"]]
            out.append(
                {
                    "target": target, "draft": draft, "weights": weights, "workload": workload, "temperature": temperature,
                    "setting": name, **_record(name, mine, len(some) - len(long)),
                }
            )  # fmt: skip
    return out


def _record(name: str, rounds: list[Round], short: int) -> dict[str, Any]:
    timings = [r["timings"][name] for r in rounds]
    total = {k: sum(t[k] for t in timings) for k in ("tokens", "seconds", "steps", "drafted", "accepted", "differing")}
    ms = [1e3 * _per_token(t) for t in timings]
    prompts = [
        1e3 * t["prompt_seconds"] / r["prompt_tokens"]
        for r, t in zip(rounds, timings, strict=True)
        if t["prompt_seconds"] is not None
    ]
    out: dict[str, Any] = {
        "texts": len(rounds), "short_texts": short, "tokens": total["tokens"], "ms_per_token": round(median(ms), 3),
        "prompt_ms_per_token": round(median(prompts), 3) if prompts else None,
        "acceptance_length": round(total["tokens"] / total["steps"], 3) if total["steps"] else None,
        "acceptance_rate": round(total["accepted"] / total["drafted"], 3) if total["drafted"] else None,
        "accepted_by_depth": by_depth([t.get("depths", []) for t in timings], total["steps"]),
        "differing_tokens": total["differing"],
        "commits": sorted({r["commit"] for r in rounds}),
    }  # fmt: skip
    side = _side(name)
    if name != side:
        out["speedup"] = _ratio(rounds, lambda r: _per_token(r["timings"][side]), name)
    for peer in PEERS if side == PLAIN else ():
        theirs = sorted({n for r in rounds for n in r["timings"] if _side(n) == peer})
        if theirs:
            key = f"over_{peer.removesuffix('.cpp')}"
            out[f"{key}_plain"] = _ratio(rounds, lambda r, p=peer: _per_token(r["timings"][p]), name)
            best = min(theirs, key=lambda p: median(_per_token(r["timings"][p]) for r in rounds if p in r["timings"]))
            out[f"{key}_best"] = _ratio(rounds, lambda r, b=best: _per_token(r["timings"][b]), name) | {"best": best}
    return out


def _side(name: str) -> str:
    """The plain setting of the side that a setting belongs to."""
    return next((peer for peer in PEERS if name == peer or name.startswith(f"{peer} ")), PLAIN)


def by_depth(texts: list[list[int]], steps: int) -> list[float]:
    """The share of steps in which at least 1, 2, ... draft tokens were accepted."""
    return [round(sum(counts) / steps, 3) for counts in zip_longest(*texts, fillvalue=0)]


def _per_token(timing: dict[str, Any]) -> float:
    return timing["seconds"] / timing["tokens"]


def _ratio(rounds: list[Round], base: Callable[[Round], float], name: str) -> dict[str, float]:
    """How many times faster than `base`, over the rounds that have both."""
    ratios = list[float]()
    for r in rounds:
        with suppress(KeyError):
            ratios.append(base(r) / _per_token(r["timings"][name]))
    ratio = median_interval(ratios)
    return {"value": round(ratio.value, 3), "low": round(ratio.low, 3), "high": round(ratio.high, 3)}


def result_of(journal: Journal, name: str) -> dict[str, Any]:
    """The whole result: commands, files with their hashes, versions and threads; then what was measured."""
    runs = journal.of("run")
    return {
        "name": name,
        "commands": list(dict.fromkeys(run["command"] for run in runs)),
        "files": {file["name"]: file for run in runs for file in run["files"].values()},
        "llama.cpp": next((run["llama.cpp"] for run in reversed(runs) if run["llama.cpp"]), None),
        "threads": runs[-1]["threads"],
        "machine": journal.lines[0],
        "records": records(journal.of("round")),
        "missing": journal.of("missing"),
        "forward": journal.of("forward"),
        "prompt": journal.of("prompt"),
        "peers": {peer: version for run in runs for peer, version in run.get("peers", {}).items()},
        "isa": runs[-1].get("isa"),
        "start": journal.of("start"),
        "served": journal.of("served"),
    }


def tables(result: dict[str, Any]) -> str:
    """Markdown: a table for each target and weights, then starts and servers."""
    parts, every = list[str](), result["records"]
    for target, draft, weights in dict.fromkeys((r["target"], r["draft"], r["weights"]) for r in every):
        some = [r for r in every if (r["target"], r["draft"], r["weights"]) == (target, draft, weights)]
        title = f"**{target}, {'as in the file' if weights == 'file' else weights}**"
        parts.append(f"{title}{f', draft model {draft}' if draft else ''}\n\n{_table(some)}")
    if result.get("prompt"):
        parts.append(f"**A prompt, in tokens per second**\n\n{_prompts(result['prompt'])}")
    if result.get("forward"):
        parts.append(f"**A forward over several rows, in forwards over one**\n\n{_forwards(result['forward'])}")
    if result["start"]:
        parts.append(f"**Start to first token, and memory**\n\n{_starts(result['start'])}")
    if result["served"]:
        parts.append(f"**Served**\n\n{_served(result['served'])}")
    return "\n\n".join(parts)


def conditions(result: dict[str, Any]) -> str:
    """Markdown: machine, versions, files with their hashes, commands."""
    m, every = result["machine"], result["records"]
    commits = sorted({c for r in every for c in r["commits"]})
    lines = [
        f"- {m['cpu']} ({m['cores']} cores, {', '.join(m['isa']) or 'no vector extensions named'}), {m['memory_gib']} GiB, "
        f"{m['system']}; {result['threads']} threads on all sides",
        f"- Python {m['python']}, torch {m['torch']}, transformers {m['transformers']}, outrider {m['outrider']} at "
        f"{', '.join(commits)}, {m['date']}",
        f"- llama.cpp: {result['llama.cpp'] or 'left out'}",
        *(f"- {peer}: {version}" for peer, version in result.get("peers", {}).items()),
        *(
            f"- {f['name']}: {f['bytes']:,} bytes, sha256 `{f['sha256']}`"
            for f in result["files"].values()
            if "sha256" in f
        ),
        *(f"- `{command}`" for command in result["commands"]),
    ]
    return "\n".join(lines)


def short(result: dict[str, Any]) -> str:
    """Markdown for the README: greedy tokens per second of the largest file that llama.cpp read too, a workload a line."""
    read = [r for r in result["records"] if r["weights"] == "file" and r["temperature"] == 0]
    names = {r["target"] for r in read if r["setting"] == LLAMA}
    if not names:
        return ""
    target = max(names, key=lambda n: result["files"][n]["bytes"])
    some = [r for r in read if r["target"] == target]
    peers = sorted({r["setting"] for r in some if r["setting"].startswith(f"{LLAMA} ")})
    methods = ("draft_model 4", "draft_model", "auto")
    columns = [LLAMA, "plain", *(m for m in methods if any(r["setting"] == m for r in some))]
    head = [
        "",
        "llama.cpp",
        *([f"llama.cpp, {' and '.join(p.removeprefix(f'{LLAMA} ') for p in peers)}"] if peers else []),
        *(f"outrider, {c}" for c in columns[1:]),
    ]
    body = list[list[str]]()
    for workload in (w for w in WORKLOADS if any(r["workload"] == w for r in some)):
        speed = {r["setting"]: 1e3 / r["ms_per_token"] for r in some if r["workload"] == workload}
        best = [max(speed.get(p, 0.0) for p in peers)] if peers else []
        body.append(
            [workload, *(f"{v:.1f}" for v in (speed.get(LLAMA, 0.0), *best, *(speed.get(c, 0.0) for c in columns[1:])))]
        )
    return markdown(head, body)


def _table(some: list[dict[str, Any]]) -> str:
    columns = sorted({(r["workload"], r["temperature"]) for r in some}, key=lambda c: (c[1], WORKLOADS.index(c[0])))
    by = {(r["setting"], r["workload"], r["temperature"]): r for r in some}
    names = sorted(dict.fromkeys(r["setting"] for r in some), key=lambda n: (_side(n) != PLAIN, n != PLAIN))
    head = ["", *(f"{w}, T={t:g}" for w, t in columns)]
    body = [[name, *(_cell(by.get((name, *c))) for c in columns)] for name in names]
    ours = [n for n in names if _side(n) == PLAIN]
    for peer in (p for p in PEERS if p in names):
        key = f"over_{peer.removesuffix('.cpp')}"
        body.append([f"plain over {peer}'s plain", *(_over(by.get((PLAIN, *c)), f"{key}_plain") for c in columns)])
        for name in ours[1:]:
            body.append([f"{name} over {peer}'s best", *(_over(by.get((name, *c)), f"{key}_best") for c in columns)])
    differing = [[r for r in some if (r["workload"], r["temperature"]) == c and _ours(r)] for c in columns]
    body.append(["differing tokens", *(f"{sum(r['differing_tokens'] for r in c)}" for c in differing)])
    body.append(["texts", *(f"{max((r['texts'] for r in c), default=0)}" for c in differing)])
    return markdown(head, body)


def _ours(record: dict[str, Any]) -> bool:
    return _side(record["setting"]) == PLAIN


def _cell(record: dict[str, Any] | None) -> str:
    """Milliseconds a token; behind them the speedup with its interval, and the acceptance length."""
    if record is None:
        return ""
    ms = f"{record['ms_per_token']:.1f} ms"
    if "speedup" not in record:
        return ms
    return f"{ms}, {_over(record, 'speedup')}, {record['acceptance_length']:.1f}"


def _over(record: dict[str, Any] | None, name: str) -> str:
    if record is None or name not in record:
        return ""
    ratio = record[name]
    if record["texts"] == 1:
        return f"{ratio['value']:.2f}"
    return f"{ratio['value']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _starts(lines: list[dict[str, Any]]) -> str:
    head = [
        "",
        "weights",
        "start",
        "seconds to first token",
        "peak memory, GB",
        "over the file",
        "over it without imports",
    ]
    body = []
    for line in lines:
        size, peak, imports = line.get("bytes"), line["peak_bytes"], line.get("imports_bytes")
        body.append(
            [f"{line['side']}, {line['target']}", line["weights"], line["start"], f"{line['seconds']:.1f}", f"{peak / 1e9:.2f}",
             f"{peak / size:.2f}" if size else "", f"{(peak - imports) / size:.2f}" if size and imports else ""]
        )  # fmt: skip
    return markdown(head, body)


def _prompts(lines: list[dict[str, Any]]) -> str:
    """The median speed of each side, and how many times faster ours is, prompt by prompt."""
    head = ["target", "side", "tokens/s", "ours over it"]
    body = []
    for target in dict.fromkeys(line["target"] for line in lines):
        mine = [line for line in lines if line["target"] == target]
        for name in mine[0]["seconds"]:
            speeds = [line["prompt_tokens"] / line["seconds"][name] for line in mine]
            over = median_interval([line["seconds"][name] / line["seconds"][PLAIN] for line in mine])
            ratio = "" if name == PLAIN else shown(over)
            body.append([target, "outrider" if name == PLAIN else name, f"{median(speeds):.0f}", ratio])
    return markdown(head, body)


def _forwards(lines: list[dict[str, Any]]) -> str:
    """The medians over the rounds."""
    rows = [m for m in lines[0]["ratio"] if int(m) > 1]
    head = ["model", "weights", "one row", *(f"{m} rows" for m in rows)]
    body = [
        [line["target"] if line["model"] == "target" else line["draft"], line["weights"] if line["model"] == "target" else "file",
         f"{line['ms']:.1f} ms", *(f"{line['ratio'][m]:.2f}" for m in rows)]
        for line in lines
    ]  # fmt: skip
    return markdown(head, body)


def _served(lines: list[dict[str, Any]]) -> str:
    head = ["target", "clients", "", "tokens/s", "first token, ms", "per token, ms", "failed"]
    body = [
        [line["target"], str(line["max_concurrency"]), line["arm"], f"{line['output_throughput']:.1f}",
         f"{line.get('median_ttft_ms', 0):.0f}", f"{line.get('median_tpot_ms', 0):.1f}", str(line["failed"])]
        for line in lines
    ]  # fmt: skip
    runs = {(line["target"], line["weights"]): (line["differing_texts"], line["compared_texts"]) for line in lines}
    differ, compared = (sum(counts) for counts in zip(*runs.values(), strict=True))
    return f"{markdown(head, body)}\n\nTexts that differ between `plain` and `auto`: {differ} of {compared}."
