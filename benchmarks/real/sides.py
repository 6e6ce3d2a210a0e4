"""The two sides of a comparison: outrider's methods over one copy of the target in this process, and peers' servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.peers.llama_server import LLAMA, LOOKUP, LlamaServer
from benchmarks.ruler import differing
from benchmarks.stretches import TimedRun, interleave
from outrider.core.params import SamplingParams
from outrider.drafters.heads.selftest import SAMPLE
from outrider.engine.llm import LLM
from outrider.engine.prefix_cache import PrefixCache
from outrider.models.load import load
from outrider_lab.bench.local import SampleRecorder
from outrider_lab.layers import search_layers

STRETCH = 8  # tokens that a method writes before the next one's turn
PREFIX_BYTES = 2**31
PLAIN = "plain"

# By name: speculative_config, without the draft model or the trained head. What is not given is the product's default.
METHODS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "draft_model": {"method": "draft_model"},
    "draft_model 4": {"method": "draft_model", "num_speculative_tokens": 4, "controller": "fixed"},
    "draft_model chain": {"method": "draft_model", "tree_width": 1},
    "head": {"method": "eagle"},
    "head chain": {"method": "eagle", "tree_width": 1},
    "head 2": {"method": "eagle", "num_speculative_tokens": 2, "controller": "fixed"},
    "head 4": {"method": "eagle", "num_speculative_tokens": 4, "controller": "fixed"},
    "head tree": {
        "method": "eagle",
        "num_speculative_tokens": 3,
        "tree_width": 3,
        "tree_nodes": 6,
        "controller": "fixed",
    },
    "quantized_self": {"method": "quantized_self", "quantization": "int4"},
    "layer_skip": {"method": "layer_skip"},
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram"},
    "token_recycling": {"method": "token_recycling"},
    "auto": {"method": "auto"},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "file": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}


@dataclass(frozen=True)
class Timing:
    """One text by one setting.

    Args:
        tokens: of the decode, from the first token (or the first step) to the last.
        seconds: of the same.
        written: tokens of the text.
        prompt_seconds: for the prompt, None where it was not read anew.
        steps: of the decode.
        drafted: draft tokens.
        accepted: those of them that are in the text.
        differing: tokens that plain decoding of the same side would not have written.
        depths: steps in which at least one draft token was accepted, at least two, and so on; ours only.
    """

    tokens: int
    seconds: float
    written: int
    prompt_seconds: float | None
    steps: int
    drafted: int
    accepted: int
    differing: int
    depths: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}


class Ours:
    """One target and an LLM for each method; all share the weights. `missing` says why a method cannot be had here.

    Raises what `LLM` raises for the target itself.

    Args:
        target: a model.
        draft: its draft model, if any. `auto` takes it, else the head.
        weights: one of `WEIGHTS`.
        methods: of `METHODS`.
        limit: tokens of prompt and text.
        head: the folder of a trained head, if any.
    """

    def __init__(
        self, target: str, draft: str | None, weights: str, methods: Sequence[str], limit: int, head: str | None = None
    ) -> None:
        self.target = load(target, device="cpu", **WEIGHTS[weights])
        self.limit = min(limit, self.target.model.max_length)
        self.llms: dict[str, LLM] = {}
        self.missing: dict[str, str] = {}
        self._prefixes = PrefixCache(PREFIX_BYTES) if self.target.model.batch_invariant else None
        for name in [PLAIN, *(m for m in methods if m != PLAIN)]:
            try:
                self.llms[name] = self._llm(METHODS[name], draft, head)
            except ValueError as reason:
                self.missing[name] = str(reason)
                print(f"  {name} is left out: {reason}", file=sys.stderr, flush=True)

    def _llm(self, config: dict[str, Any], draft: str | None, head: str | None) -> LLM:
        if config.get("method") == "layer_skip" and self.target.tokenizer is not None:
            texts = [self.target.tokenizer(SAMPLE)["input_ids"]]
            config = config | {"layers": search_layers(self.target.model, texts).layers}
        model = {"draft_model": draft, "eagle": head, "auto": draft or head}.get(config.get("method", ""))
        whole = config | ({"model": model} if model is not None else {})
        llm = LLM(self.target, speculative_config=whole, max_model_len=self.limit, max_num_seqs=1)
        # A head must see the target read: what others have read has no features for it.
        if not llm.decoder.drafter.taps:
            llm.decoder.prefixes = self._prefixes
        return llm

    @property
    def chat(self) -> bool:
        """Whether the model has a chat template."""
        return bool(getattr(self.target.tokenizer, "chat_template", None))

    def encode(self, content: Any) -> list[int]:
        """The token ids that all sides read."""
        return self.llms[PLAIN].encode(content)

    def write(self, prompt: list[int], params: SamplingParams) -> dict[str, Timing]:
        """The same text by every method, in turns. Each method forgets the texts before.

        The prompt is read once, and again for each method with a head.
        """
        runs = {
            name: TimedRun(
                llm.decoder,
                llm.requests(prompt, params)[0],
                recorder=SampleRecorder(prompt="", setting=name, repeat=0, turn=0),
            )
            for name, llm in self.llms.items()
        }
        if self._prefixes is not None:
            self._prefixes.clear()
        for llm in self.llms.values():
            llm.decoder.drafter.reset()
        interleave(runs, STRETCH)
        plain = runs[PLAIN].row.output
        fresh = {name for name, llm in self.llms.items() if name == PLAIN or llm.decoder.prefixes is None}
        return {name: _timing(run, plain, name in fresh) for name, run in runs.items()}


def _timing(run: TimedRun, plain: Sequence[int], fresh: bool) -> Timing:
    assert run.recorder is not None
    sample = run.recorder.sample()
    return Timing(
        tokens=sum(count for _, count in sample.gaps),
        seconds=sum(seconds for seconds, _ in sample.gaps),
        written=len(run.row.output),
        prompt_seconds=run.prefill if fresh else None,
        steps=len(sample.gaps),
        drafted=sum((sample.drafted or [])[1:]),
        accepted=sum((sample.accepted or [])[1:]),
        differing=differing(run.row.output, plain),
        depths=_depths((sample.accepted or [])[1:]),
    )


def _depths(accepted: Sequence[int]) -> tuple[int, ...]:
    """How many steps accepted at least 1, 2, ... draft tokens."""
    return tuple(sum(n >= depth for n in accepted) for depth in range(1, max(accepted, default=0) + 1))


class Peer:
    """A peer on the same file: a server that decodes plainly, one with the draft for each length, and one with its own lookup.

    Use as a context manager. Raises Missing, or RuntimeError if a server does not start.

    Args:
        program: of the peer.
        target: a file.
        draft: another one, if any.
        lengths: draft tokens of a step, at most.
        limit: tokens of prompt and text.
        options: further ones of the servers with a draft.
        peer: its name, of `llama_server.PEERS`.
    """

    def __init__(
        self,
        program: Path,
        target: str,
        draft: str | None,
        lengths: Sequence[int],
        limit: int,
        *,
        options: tuple[str, ...] = (),
        peer: str = LLAMA,
    ) -> None:
        with ExitStack() as stack:
            self.servers = {peer: stack.enter_context(LlamaServer(program, target, length=limit, peer=peer))}
            for n in lengths if draft else ():
                server = LlamaServer(program, target, draft, longest=n, length=limit, options=options, peer=peer)
                self.servers[f"{peer} draft {n}"] = stack.enter_context(server)
            if peer in LOOKUP and lengths:
                server = LlamaServer(program, target, length=limit, options=LOOKUP[peer], peer=peer)
                self.servers[f"{peer} lookup"] = stack.enter_context(server)
            self._stack = stack.pop_all()

    def write(self, prompt: list[int], params: SamplingParams) -> dict[str, Timing]:
        """The text by every setting. `differing` is against this side's own plain text; its numbers may differ from ours."""
        timings, plain = dict[str, Timing](), list[int]()
        assert params.max_tokens is not None
        for name, server in self.servers.items():
            out = server.complete(
                prompt, params.max_tokens, params.temperature, params.seed or 0, ignore_eos=params.ignore_eos
            )
            plain = plain or out.tokens
            timed = out.written - 1
            timings[name] = Timing(
                tokens=timed,
                seconds=out.seconds,
                written=out.written,
                prompt_seconds=out.prompt_seconds,
                steps=timed - out.accepted,
                drafted=out.drafted,
                accepted=out.accepted,
                differing=differing(out.tokens, plain),
            )
        return timings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
