"""What the page of a run shows, as records. A page holds one `ExplainedRun` as JSON.

A field that is not known is left out of the JSON. Token texts stand in one table, so a token is a number everywhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from outrider._version import __version__
from outrider.control import CostModel

FORMAT = 1  # increased when a field changes its meaning
TopTokens = list[tuple[int, float]]  # the most likely tokens and their probabilities, most likely first


@dataclass(frozen=True)
class ExplainedStep:
    """One draft-verify round of a request. The first fields are those of `StepRecord`.

    With one entry for each node: p: the target's probability of its token. rank: the token's place in the target's distribution,
    1 is the most likely. q, q_rank: the same in the draft model's distribution. confidence: the drafter's estimate that the
    node is accepted. likely: the most likely tokens after the node. All of them are None where they are not known.
    """

    step: int
    position: int
    drafted: int
    depth: int
    accepted: int
    refused: int
    committed: int
    seconds: tuple[float, float, float, float]
    tokens: list[int] | None = None
    parents: list[int] | None = None
    path: list[int] | None = None
    token: int | None = None
    note: str | None = None
    p: list[float] | None = None
    rank: list[int] | None = None
    q: list[float] | None = None
    q_rank: list[int] | None = None
    confidence: list[float] | None = None
    likely: list[TopTokens] | None = None


@dataclass(frozen=True)
class ExplainedRequest:
    """A request and its steps. seed: as text, because a number of JavaScript holds 53 bits only.

    title, about: what the page calls it, and a line on it; without a title it has its number."""

    id: int
    prompt_tokens: int
    seed: str
    temperature: float
    params: dict[str, Any]
    finish: str | None
    steps: list[ExplainedStep]
    prompt: list[int] | None = None
    title: str | None = None
    about: str | None = None


@dataclass(frozen=True)
class TreeDraft:
    """Draft tokens in the order in which a growing budget keeps them: the first n + 1 nodes are the draft of n tokens."""

    tokens: list[int]
    parents: list[int]


@dataclass(frozen=True)
class ComparedDrafts:
    """What one drafter proposes at one position of a run, as a chain, as a fixed tree and best first.

    at: committed tokens before. text: the tokens that the run wrote from there on.
    """

    at: int
    text: list[int]
    chain: TreeDraft
    fixed: TreeDraft
    best: TreeDraft


@dataclass(frozen=True)
class ModelSize:
    """What attention and weights cost to read. kv_bytes: of one key or value. weight_bytes: of all weights."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: float
    weight_bytes: int


@dataclass(frozen=True)
class CostCurve:
    """What steps cost, in plain steps.

    nodes: [rows, cost of a target forward over so many rows]; the cost of 1 row is 1. draft: cost of one level of the draft.
    source: where the figures come from, in words. plain_seconds: of a plain step. balance: for a roofline in place of `nodes`,
    the rows at which arithmetic takes as long as reading the weights.
    """

    name: str
    source: str
    nodes: list[tuple[int, float]] = field(default_factory=list)
    draft: float | None = None
    plain_seconds: float | None = None
    balance: float | None = None


@dataclass(frozen=True)
class ExplainedRun:
    """A run for the page.

    title: what the page calls it. builtin: whether it came with outrider. model, drafter, verifier, ...: of the trace's header.
    texts: token id -> text. plain_seconds: of a plain step, if some were measured. compared: drafts of several shapes at
    positions of the first request. notes: what is missing and why, in sentences.
    """

    title: str
    builtin: bool
    model: str
    device: str
    drafter: str
    verifier: str
    guarantee: str
    detail: str
    date: str
    machine: dict[str, str]
    speculative_config: dict[str, Any]
    requests: list[ExplainedRequest]
    texts: dict[int, str]
    plain_seconds: float | None = None
    compared: list[ComparedDrafts] = field(default_factory=list)
    size: ModelSize | None = None
    costs: list[CostCurve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    format: int = FORMAT
    outrider: str = __version__

    def to_json(self) -> str:
        """The run as JSON, with ASCII only."""
        return json.dumps(_known(self), separators=(",", ":"), allow_nan=False)


def read_run(path: Path) -> ExplainedRun:
    """Read a run that `to_json` wrote. Raises ValueError for another format."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("format") != FORMAT:
        raise ValueError(f"{path} has format {found.get('format')}, this outrider reads {FORMAT}")
    steps = [[ExplainedStep(**step) for step in request.pop("steps")] for request in found["requests"]]
    requests = [ExplainedRequest(**r, steps=s) for r, s in zip(found.pop("requests"), steps, strict=True)]
    drafts = found.pop("compared", [])
    shaped = [
        ComparedDrafts(d["at"], d["text"], *(TreeDraft(**d[k]) for k in ("chain", "fixed", "best"))) for d in drafts
    ]
    size = found.pop("size", None)
    found["texts"] = {int(token): text for token, text in found["texts"].items()}
    found["costs"] = [CostCurve(**known) for known in found.get("costs", [])]
    found["size"] = None if size is None else ModelSize(**size)
    return ExplainedRun(**found, requests=requests, compared=shaped)


def curve(model: CostModel, name: str, source: str) -> CostCurve:
    """A measured cost model as a curve over rows. The draft is the most expensive one."""
    plain = model.forward(1)
    nodes = [(n, seconds / plain) for n, seconds in sorted(model.target.items())]
    draft = max((cost.level / plain for cost in model.drafters.values()), default=None)
    return CostCurve(name, source, nodes, draft, plain)


def _known(value: Any) -> Any:
    """Plain values for JSON, without fields that are None, and with numbers of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if is_dataclass(value):
        found = ((f.name, getattr(value, f.name)) for f in fields(value))
        return {name: _known(item) for name, item in found if item is not None}
    if isinstance(value, dict):
        return {key: _known(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return (
            value if isinstance(value, list) and value and type(value[0]) is int else [_known(item) for item in value]
        )
    return value


__all__ = [
    "ComparedDrafts",
    "CostCurve",
    "ExplainedRequest",
    "ExplainedRun",
    "ExplainedStep",
    "ModelSize",
    "TreeDraft",
    "curve",
    "read_run",
]
