"""What the page of a run shows, as records. A page holds one `ExplainedRun` as JSON.

The numbers of the page are computed by the ES modules in `assets/`. Tests compare them with Python (lab/tests/pages).

A field that is not known is left out of the JSON. Token texts stand in one table, so a token is a number everywhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import PlainSerializer, TypeAdapter

from outrider._version import __version__
from outrider.control import CostModel
from outrider.serve.page import assemble

BUILTIN, ASSETS = Path(__file__).with_name("builtin.json"), Path(__file__).with_name("assets")
Number = Annotated[float, PlainSerializer(lambda x: float(f"{x:.6g}"))]
"""Six digits of it stand in the page."""
TopTokens = list[tuple[int, Number]]  # the most likely tokens and their probabilities, most likely first


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
    seconds: tuple[Number, Number, Number, Number]
    tokens: list[int] | None = None
    parents: list[int] | None = None
    path: list[int] | None = None
    token: int | None = None
    note: str | None = None
    p: list[Number] | None = None
    rank: list[int] | None = None
    q: list[Number] | None = None
    q_rank: list[int] | None = None
    confidence: list[Number] | None = None
    likely: list[TopTokens] | None = None


@dataclass(frozen=True)
class ExplainedRequest:
    """A request and its steps. seed: as text, because a number of JavaScript holds 53 bits only.

    title, about: what the page calls it, and a line on it; without a title it has its number."""

    id: int
    seed: str
    temperature: Number
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
    kv_bytes: Number
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
    nodes: list[tuple[int, Number]] = field(default_factory=list)
    draft: Number | None = None
    plain_seconds: Number | None = None
    balance: Number | None = None


@dataclass(frozen=True)
class ExplainedRun:
    """A run for the page.

    title: what the page calls it. model, drafter, verifier, ...: of the trace's header.
    texts: token id -> text. plain_seconds: of a plain step, if some were measured. compared: drafts of several shapes at
    positions of the first request. notes: what is missing and why, in sentences.
    """

    title: str
    model: str
    drafter: str
    verifier: str
    guarantee: str
    detail: str
    date: str
    machine: dict[str, str]
    requests: list[ExplainedRequest]
    texts: dict[int, str]
    plain_seconds: Number | None = None
    compared: list[ComparedDrafts] = field(default_factory=list)
    size: ModelSize | None = None
    costs: list[CostCurve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    format: Literal[1] = 1  # increased when a field changes its meaning
    outrider: str = __version__

    def to_json(self) -> str:
        """The run as JSON, with ASCII only."""
        return json.dumps(_RUN.dump_python(self, exclude_none=True), separators=(",", ":"), allow_nan=False)

    def page(self) -> str:
        """The page in HTML. It is ASCII, and texts of the run are data, never markup."""
        return assemble(ASSETS / "explain.html", ASSETS / "explain.css", ASSETS / "explain.js", self.to_json())


_RUN = TypeAdapter(ExplainedRun)


def builtin() -> ExplainedRun:
    """The run that comes with outrider; `python docs/builtin_run.py` made it."""
    return _RUN.validate_json(BUILTIN.read_bytes())


def curve(model: CostModel, name: str, source: str) -> CostCurve:
    """A measured cost model as a curve over rows. The draft is the most expensive one."""
    plain = model.forward(1)
    nodes = [(n, seconds / plain) for n, seconds in sorted(model.target.items())]
    draft = max((cost.level / plain for cost in model.drafters.values()), default=None)
    return CostCurve(name, source, nodes, draft, plain)
