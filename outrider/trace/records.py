"""What a trace file holds, line by line, as values that check themselves. One JSON object a line, told apart by `line`."""

from __future__ import annotations

from enum import Enum
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.core.origins import letters
from outrider.params import SamplingParams

FORMAT = 1  # raised when a field changes its meaning
TOP = 5  # tokens of a law that `Detail.PROBS` keeps

PHASES = ("draft", "target", "verify", "commit")

Id = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Law = list[tuple[Id, float]]  # the likeliest tokens and their probabilities, downwards


class Detail(Enum):
    """How much of a run is written down. Token ids are the text: who reads a trace with tokens reads the prompts."""

    COUNTS = "counts"  # how many guesses, how many kept, how long it took; no token, no text
    TOKENS = "tokens"  # also prompts, drafts and decisions, as token ids: enough to compute every step again
    PROBS = "probs"  # also the likeliest tokens of the target's and the draft's law at every node


class Line(BaseModel):
    """Unknown fields are an error, so that nothing is read as what it is not."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")

    def json_line(self) -> bytes:
        return self.model_dump_json(exclude_none=True).encode() + b"\n"


class Header(Line):
    """The first line: who wrote this, and what it was run with."""

    line: Literal["header"] = "header"
    kind: Literal["outrider-trace"] = "outrider-trace"
    format: int = FORMAT
    outrider: str  # its version
    date: str  # ISO 8601, UTC
    detail: Detail
    model: str
    dtype: str  # precision of the weights: float32, bfloat16, float16, int8, int4
    device: str
    vocab_size: Count
    max_length: Count  # tokens of prompt and output
    batch_invariant: bool  # do a row's logits not depend on its neighbours? Then a replay is equal bit for bit
    end_ids: list[Id]
    drafter: str  # its class
    verifier: str
    guarantee: str
    speculative_config: dict[str, Any] = {}  # what differs from the defaults
    machine: dict[str, str]  # processor, cores, versions


class Request(Line):
    """A request as it joins. prompt: its token ids, not under `Detail.COUNTS`; then `params` holds numbers only, too."""

    line: Literal["request"] = "request"
    request: Id
    prompt_tokens: Count
    seed: int
    params: dict[str, Any]  # of `SamplingParams`, what differs from the defaults
    prompt: list[Id] | None = None
    bad_words: list[list[Id]] | None = None
    grammar: bool = False  # held to one, which is not written down

    @property
    def sampling(self) -> SamplingParams:
        """Raises ValueError for parameters that make no sense."""
        given = dict(self.params)
        try:
            if given.get("logit_bias"):
                given["logit_bias"] = {int(token): float(bias) for token, bias in given["logit_bias"].items()}
            params = SamplingParams(**given)
            params.check_vocab(2**63)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"the sampling parameters cannot be read: {error}") from error
        return params

    @model_validator(mode="after")
    def _consistent(self) -> Request:
        if self.prompt is not None and len(self.prompt) != self.prompt_tokens:
            raise ValueError(f"the prompt has {len(self.prompt)} tokens, not {self.prompt_tokens}")
        _ = self.sampling
        return self


class Step(Line):
    """One row in one draft-verify round. Rows of one round share `round`, and `seconds` is the whole round's."""

    line: Literal["step"] = "step"
    request: Id
    round: Count  # of the run
    step: Count  # of the request; the noise is keyed by it
    position: Count  # committed tokens before
    drafted: Count  # guesses
    depth: Count  # levels of the draft
    accepted: Count  # guesses that the text has
    refused: Count  # guesses that were offered after the last accepted one, none of which was it
    committed: Count  # tokens written
    rows: Count  # in the round
    seconds: tuple[float, float, float, float]  # in draft, target, verify, commit
    # from Detail.TOKENS on
    tokens: list[Id] | None = None  # of the draft; node 0 is the last committed token
    parents: list[int] | None = None
    siblings: str | None = None
    path: list[Id] | None = None  # accepted nodes from the root down, before the text's end cut it
    token: int | None = None  # drawn at the last of them; -1 where there was no law
    budget: tuple[Count, Count, Count | None] | None = None  # depth, width, nodes
    note: str | None = None  # of the drafter: who guessed and why
    # with Detail.PROBS
    target_law: list[Law] | None = None  # of the token after each node
    draft_law: list[Law] | None = None  # that the children of each node were drawn from, where they were drawn
    chances: list[float] | None = None  # the drafter's own estimate that a node is accepted

    @model_validator(mode="after")
    def _consistent(self) -> Step:
        if not self.accepted <= self.depth <= self.drafted or not self.accepted <= self.committed <= self.accepted + 1:
            raise ValueError("accepted <= depth <= drafted and accepted <= committed <= accepted + 1 must hold")
        if self.tokens is None:
            return self
        tokens, parents, path = self.tokens, self.parents or [], self.path or []
        if len(tokens) != len(parents) or len(tokens) != self.drafted + 1 or parents[0] != -1:
            raise ValueError(f"tokens and parents are {self.drafted + 1} nodes, the root first, with parent -1")
        if any(not 0 <= up < n for n, up in enumerate(parents[1:], 1)):
            raise ValueError(f"a parent comes before its children, got parents {parents}")
        if path[:1] != [0] or any(n >= len(tokens) or parents[n] != up for up, n in pairwise(path)):
            raise ValueError(f"the path is no walk down the tree: {path} with parents {parents}")
        if self.token is None or self.siblings is None or self.budget is None:
            raise ValueError("token, siblings and budget are missing")
        if any(law is not None and len(law) != len(tokens) for law in (self.target_law, self.draft_law, self.chances)):
            raise ValueError("there is not one law for each node")
        return self

    @property
    def written(self) -> list[int]:
        """The tokens that this step added to the text. Raises ValueError where only counts were kept."""
        if self.tokens is None or self.path is None or self.token is None:
            raise ValueError(NO_TOKENS)
        return [*(self.tokens[n] for n in self.path[1:]), self.token][: self.committed]

    @property
    def origins(self) -> str:
        """A letter per written token, see `outrider.core.origins`."""
        return letters(self.drafted, self.accepted, self.refused > 0, self.committed)


class End(Line):
    """The end of a request. Times in seconds since it got its row."""

    line: Literal["end"] = "end"
    request: Id
    finish: str  # stop | length | error | abort
    output_tokens: Count
    steps: Count
    first: float | None = None  # to the first token
    seconds: float | None = None  # to the last


NO_TOKENS = (
    "this trace holds counts only; tokens are kept by --trace-detail tokens, or Recorder(path, Detail.TOKENS), and they "
    "are the prompts' text"
)
AnyLine = Annotated[Header | Request | Step | End, Field(discriminator="line")]
