"""The figures that are aimed at, and what a result file says about each. Ratios within one run; nothing is timed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.report import show

Record = Mapping[str, Any]
WIDE = {"float32": (1.08, 1.20, 1.45), "bfloat16": (1.10, 1.30, 1.9), "int8": (1.15, 1.6, 2.8)}
SHARE = {"float32": 0.85, "bfloat16": 0.85, "int8": 0.75}
ASSISTED = {"float32": 3.0, "bfloat16": 6.0}
SPECULATIVE = {"float32": 1.25, "bfloat16": 1.5, "int8": 1.5}
OURS, HF, CPP = "outrider", "transformers", "llama.cpp"


def figures(result: Record, identity: Record | None = None) -> list[list[str]]:
    """Lines of (figure, wanted, reached, peers)."""
    out: list[list[str]] = []
    for f in result.get("forward", []):
        out += _wide(f)
    for d in result.get("decode", []):
        out += {"draft": _draft, "own": _own, "text": _text}.get(d["kind"], _trained)(d, result)
    if identity:
        out.append(
            ["differing tokens, speculative against plain", "0 in 1,000,000",
             f"{identity['differing']} in {identity['tokens']:,}", ""]
        )  # fmt: skip
    return out


def _wide(f: Record) -> list[list[str]]:
    name, precision = f"{f['size']} {f['precision']}", f["precision"]
    by = {r["side"]: r for r in f["records"]}
    if f["size"] == "15M":
        peers = _peers(by, lambda r: f"{r['ms']:.1f} ms")
        return [[f"one token of a drafter, {name}", "2.5 ms", f"{by[OURS]['ms']:.2f} ms", peers]]
    wanted = WIDE[precision]

    def ratios(r: Record) -> str:
        ratio = {str(k): v for k, v in r["ratio"].items()}
        return " ".join(show(ratio.get(m)) for m in ("2", "4", "8"))

    return [
        [f"forward over 2, 4, 8 tokens over 1: {name}", " ".join(show(w) for w in wanted), ratios(by[OURS]), _peers(by, ratios)],
        [f"forward over 1: weights read, of read bandwidth: {name}", show(SHARE[precision]), show(by[OURS].get("share")),
         _peers(by, lambda r: show(r.get("share")))],
    ]  # fmt: skip


def _draft(d: Record, result: Record) -> list[list[str]]:
    name, precision = f"{d['size']} {d['precision']}", d["precision"]
    plain = {s: _one(d, s, "plain") for s in (OURS, HF, CPP)}
    best = {s: _best(d, s, "draft:") for s in (OURS, HF, CPP)}
    mine, base, hf, cpp = best[OURS], plain[OURS], plain[HF], plain[CPP]
    out = []
    if plain[OURS] and (read := result["machine"].get("read_gb_per_second", {}).get("all")):
        shares = {s: r["tokens_per_second"] * d["weight_bytes"] / 1e9 / read for s, r in plain.items() if r}
        rest = ", ".join(f"{s} {x:.2f}" for s, x in shares.items() if s != OURS)
        what = f"plain decoding: weights read, of read bandwidth: {name}"
        out.append([what, show(SHARE[precision]), show(shares[OURS]), rest])
    for r in d["records"]:
        if r["side"] == OURS and r.get("efficiency"):
            peer = "; ".join(
                f"{s} {x['efficiency']:.2f}"
                for s in (HF, CPP)
                if (x := _one(d, s, r["method"])) and x.get("efficiency")
            )
            out.append([f"efficiency, {r['method']}: {name}", "0.92", show(r["efficiency"]), peer])
    assisted, theirs = best[HF], best[CPP]
    if mine and assisted and precision in ASSISTED:
        out.append(_over(f"over transformers' assisted generation: {name}", show(ASSISTED[precision]), mine, assisted))
    if base and hf:
        out.append(_over(f"plain over transformers' plain: {name}", "1.80", base, hf))
        if mine:
            out.append(_over(f"with a draft, over transformers' plain: {name}", "4.00", mine, hf))
    if base and cpp:
        out.append(_over(f"plain over llama.cpp's plain: {name}", "1.00", base, cpp))
    if mine and theirs:
        out.append(_over(f"speculative over llama.cpp's best: {name}", show(SPECULATIVE[precision]), mine, theirs))
    return out


def _own(d: Record, _: Record) -> list[list[str]]:
    name = f"{d['size']} {d['precision']}"
    mine, theirs = _best(d, OURS, "own:"), _best(d, CPP, "own:")
    if not mine:
        return []
    peer = f"llama.cpp {theirs['acceptance_rate']:.2f}" if theirs else ""
    out = [
        [f"temperature 1, draft = target's own function, accepted: {name}", "1.00", show(mine["acceptance_rate"]), peer]
    ]
    if theirs:
        out.append(_over(f"the same, over llama.cpp's best: {name}", "2.00", mine, theirs))
    return out


def _text(d: Record, _: Record) -> list[list[str]]:
    name, out = f"{d['size']} {d['precision']}", []
    lookup = _best(d, HF, "lookup:")
    for r in d["records"]:
        if r["side"] == OURS and r["method"].startswith(("ngram", "suffix")):
            peer = f"prompt lookup {lookup['speedup']:.2f}" if lookup else ""
            out.append(
                [f"text that does not repeat, {r['method']} over plain: {name}", "0.98", show(r["speedup"]), peer]
            )
    return out


def _trained(d: Record, _: Record) -> list[list[str]]:
    name = f"{d['size']} {d['precision']}"
    r = _best(d, OURS, "trained:")
    if not r:
        return []
    what = f"{r['method']} of the built-in pair over plain: {name}"
    return [[what, "", f"{r['speedup']:.2f}, acceptance length {r['acceptance_length']:.2f}", ""]]


def _one(d: Record, side: str, method: str) -> Record | None:
    return next((r for r in d["records"] if r["side"] == side and r["method"] == method), None)


def _best(d: Record, side: str, start: str) -> Record | None:
    found = [r for r in d["records"] if r["side"] == side and r["method"].startswith(start)]
    return max(found, key=lambda r: r["tokens_per_second"], default=None)


def _over(figure: str, wanted: str, mine: Record, theirs: Record) -> list[str]:
    ratio = mine["tokens_per_second"] / theirs["tokens_per_second"]
    told = f"{mine['tokens_per_second']:.1f} ({mine['method']}) against {theirs['tokens_per_second']:.1f} ({theirs['method']})"
    return [f"tokens/s {figure}", wanted, show(ratio), told]


def _peers(by: Mapping[str, Record], tell: Any) -> str:
    return "; ".join(f"{s} {tell(r)}" for s, r in by.items() if s != OURS)


HEAD = ["figure", "wanted", "reached", "peers"]


def names(lines: Iterable[list[str]]) -> list[str]:
    return [line[0] for line in lines]
