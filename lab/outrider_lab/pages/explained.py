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
    """One draft-verify round of a request. The first fields are those of `TracedStep`. What is not known is None."""

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
    # one entry for each node
    p: list[Number] | None = None  # the target's probability of its token
    rank: list[int] | None = None  # the token's place in the target's distribution, 1 is the most likely
    q: list[Number] | None = None  # the draft model's probability
    q_rank: list[int] | None = None  # the token's place in the draft model's distribution
    confidence: list[Number] | None = None  # the drafter's estimate that the node is accepted
    likely: list[TopTokens] | None = None  # the most likely tokens after the node


@dataclass(frozen=True)
class ExplainedRequest:
    """A request and its steps."""

    id: int
    seed: str  # as text, because a number of JavaScript holds 53 bits only
    temperature: Number
    steps: list[ExplainedStep]
    prompt: list[int] | None = None
    title: str | None = None  # what the page calls it; without one it has its number
    about: str | None = None  # a line on it


@dataclass(frozen=True)
class TreeDraft:
    """Draft tokens in the order in which a growing budget keeps them: the first n + 1 nodes are the draft of n tokens."""

    tokens: list[int]
    parents: list[int]


@dataclass(frozen=True)
class ComparedDrafts:
    """What one drafter proposes at one position of a run, as a chain, as a fixed tree and best first."""

    at: int  # committed tokens before
    text: list[int]  # the tokens that the run wrote from there on
    chain: TreeDraft
    fixed: TreeDraft
    best: TreeDraft


@dataclass(frozen=True)
class ModelSize:
    """What attention and weights cost to read."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    kv_bytes: Number  # of one key or value
    weight_bytes: int  # of all weights


@dataclass(frozen=True)
class CostCurve:
    """What steps cost, in plain steps: measured `nodes`, or the `balance` of a roofline."""

    name: str
    source: str  # where the figures come from, in words
    nodes: list[tuple[int, Number]] = field(default_factory=list)  # (rows, cost of a target forward over so many rows)
    draft: Number | None = None  # cost of one level of the draft
    plain_seconds: Number | None = None  # of a plain step
    balance: Number | None = None  # the rows at which arithmetic takes as long as reading the weights


@dataclass(frozen=True)
class ExplainedRun:
    """A run for the page. Its first fields are those of the trace's header."""

    title: str  # what the page calls it
    model: str
    drafter: str
    verifier: str
    guarantee: str
    detail: str
    date: str
    machine: dict[str, str]
    requests: list[ExplainedRequest]
    texts: dict[int, str]  # by token id
    plain_seconds: Number | None = None  # of a plain step, if some were measured
    compared: list[ComparedDrafts] = field(default_factory=list)  # drafts of several shapes, along the first request
    size: ModelSize | None = None
    costs: list[CostCurve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what is missing and why, in sentences
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
