"""LLM: a model with a drafter beside it, from prompts to texts. The names are vLLM's."""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections import abc, deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from outrider.control import Controller
from outrider.core.files import MEMORY_DAYS, MEMORY_DISK, PREFIX_DISK, byte_count
from outrider.core.outputs import Delta, RequestMetrics, RequestOutput
from outrider.core.params import SamplingParams
from outrider.core.store import PREFIXES, Store
from outrider.drafters.base import Drafter
from outrider.drafters.config import SpeculativeConfig
from outrider.drafters.lookup.memory import text_memory
from outrider.engine.prompts import Prompt
from outrider.engine.request import Request, Sequence
from outrider.engine.runtime import build
from outrider.engine.scheduler import Scheduler
from outrider.models.load import Loaded, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outrider.engine.trace import Recorder

log = logging.getLogger("outrider.engine")


class LLM:
    """A model ready to generate.

    Args:
        model: A folder, a GGUF file, a hub name, `builtin:code`, a loaded transformers model (which stays as it is), or what
            another LLM has `loaded`. Then both share the weights, and tokenizer and precision are that one's.
        tokenizer: A transformers tokenizer, or a folder or hub name of one. None is the model's own, if it is loaded by name.
            Without a tokenizer, prompts are token ids.
        speculative_config: See `SpeculativeConfig`; None is plain decoding.
        dtype: Precision of the weights: float32, bfloat16 or float16; "auto" is that of the checkpoint.
        device: "cpu" or "cuda"; "auto" is the GPU if there is one, and for a loaded model where it is.
        max_model_len: Tokens of prompt and output together, at least 2; None: as many as the model was made for.
        max_num_seqs: Sequences that decode concurrently, at least 1; further ones wait.
        quantization: "int8" or "int4" for the weights, on the CPU; None keeps them at dtype.
        kv_cache_dtype: Precision of keys and values: "float32", "bfloat16" in half of its memory, or "int8" in 28 % of it.
            "auto" on the CPU is bfloat16 for weights of 16 bits or fewer, and float32 for others; on the GPU it is dtype.
            A draft model keeps its own as with "auto".
        drafter: A `outrider.drafters.base.Drafter` of your own, in place of a configured method. If it fails, there is a
            warning and the text goes on without it.
        controller: A `outrider.control.Controller` of your own, in place of the configured one.
        calibrate: Measure what a step costs anew, and more precisely than the second at the first load does.
        trace: A file that every step is written to (docs/guides/trace.md), with the token ids of prompts and texts. A
            `Recorder` says how much.
        prefix_dir: A folder that keeps keys and values of texts, so that a later process need not read the same beginning
            again (docs/guides/memory.md). Several processes may share it. None keeps them in no file.
        prefix_disk: Bytes that it may take, or a text such as "20GiB".
        memory_dir: A folder that keeps the texts of requests, to draft later ones from (docs/guides/memory.md). None keeps no
            text: texts on a disk are a secret to guard, which only their owner can agree to.
        memory_disk: As prefix_disk.
        memory_days: Texts that are older go.
        memory_by: "client" for a memory of each client, "all" for one.
        any_method: Its `runtime` is for a server, where a request may choose among the methods and lookups.

    Raises ValueError, with what would work, for arguments that are wrong or contradict each other, also those of
    speculative_config; what `outrider.models.load.load` raises for a model that cannot be had or does not fit; OSError for a
    trace that cannot be written.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | Loaded,
        tokenizer: Any | None = None,
        speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        *,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        drafter: Drafter | None = None,
        controller: Controller | None = None,
        calibrate: bool = False,
        trace: Recorder | str | os.PathLike[str] | None = None,
        prefix_dir: str | os.PathLike[str] | None = None,
        prefix_disk: int | str = PREFIX_DISK,
        memory_dir: str | os.PathLike[str] | None = None,
        memory_disk: int | str = MEMORY_DISK,
        memory_days: float = MEMORY_DAYS,
        memory_by: str = "client",
        any_method: bool = False,
    ) -> None:
        self.config = SpeculativeConfig.of(speculative_config)
        for name, number in {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}.items():
            if type(number) is not int and (number is not None or name == "max_num_seqs"):
                raise ValueError(f"{name} must be a whole number, got {number!r}; for example {name}=8")
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be 1 or more, got {max_num_seqs}")
        if controller is not None and not isinstance(controller, Controller):  # pyright: ignore[reportUnnecessaryIsInstance]
            how = 'a configured one is chosen with speculative_config={"controller": "fixed"}'
            raise ValueError(f"controller={controller!r:.80} has no budgets, observe and release; {how}")
        if not isinstance(model, Loaded):
            model = load(
                model, tokenizer, dtype=dtype, device=device, quantization=quantization, kv_cache_dtype=kv_cache_dtype
            )
        longest = model.model.max_length
        if max_model_len is not None and not 2 <= max_model_len <= longest:
            raise ValueError(f"max_model_len must be in 2..{longest} for {model.name}, got {max_model_len}")
        earlier = None
        if memory_dir is not None:
            earlier = text_memory(model, memory_dir, memory_disk, memory_days, memory_by)
        self.runtime = build(
            model,
            self.config,
            num_slots=max_num_seqs,
            max_length=max_model_len,
            device=device,
            drafters=None if drafter is None else {type(drafter).__name__: drafter},
            controller=controller,
            calibrate=calibrate,
            warn=log.warning if any_method else partial(warnings.warn, category=RuntimeWarning),
            prefix_folder=None if prefix_dir is None else Store.open(prefix_dir, byte_count(prefix_disk), PREFIXES),
            text_memory=earlier,
            any_method=any_method,
        )
        self.decoder, self.drafters, self.method = self.runtime.decoder, self.runtime.drafters, self.runtime.method
        self.prompts = self.runtime.prompts
        self.trace: Recorder | None = None
        if trace is not None:
            from outrider.engine.trace import Recorder, describe

            self.trace = Recorder(trace) if isinstance(trace, (str, os.PathLike)) else trace
            self.trace.begin(describe(self.loaded, self.config, self.decoder))

    @cached_property
    def scheduler(self) -> Scheduler:
        """What `generate` and `stream` run in. An engine on the same `runtime` has one of its own; the two step in turns."""
        return Scheduler(self.decoder, self.runtime.roster, trace=self.trace, raises=True)

    @property
    def loaded(self) -> Loaded:
        """The model, its tokenizer and where they came from."""
        return self.runtime.loaded

    @property
    def notes(self) -> list[str]:
        """What was chosen for this run: how its draft model was made cheaper. Empty if nothing was."""
        reductions = dict.fromkeys(drafter.resources().reduction for drafter in self.drafters.values())
        return [reduction for reduction in reductions if reduction is not None]

    @property
    def tokenizer(self) -> Any | None:
        """The model's own, with the names of transformers, or the object that was given."""
        return self.prompts.tokenizer

    def generate(
        self,
        prompts: Prompt | abc.Sequence[Prompt],
        sampling_params: SamplingParams | abc.Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or a list. A prompt is a string, a list of chat messages, or {"prompt_token_ids": [...]}.

        sampling_params: one for all, or one per prompt; None is `SamplingParams()`. Returns one output per prompt, in their
        order. Raises ValueError for a bad request before anything runs.
        """
        one = isinstance(prompts, (str, Mapping)) or not isinstance(prompts, abc.Iterable)
        many: list[Any] = [prompts] if one else list(prompts)
        if not one and many and all(isinstance(p, Mapping) and "role" in p for p in many):
            many = [many]  # the messages of one chat
        one_or_many: Any = sampling_params or SamplingParams()
        several = isinstance(one_or_many, abc.Iterable) and not isinstance(one_or_many, Mapping)
        params: list[Any] = list(one_or_many) if several else [one_or_many] * len(many)
        if wrong := [one for one in params if not isinstance(one, SamplingParams)]:
            raise ValueError(f"sampling_params are SamplingParams(temperature=0, ...), got {wrong[0]!r:.80}")
        if len(params) != len(many):
            raise ValueError(
                f"{len(params)} sampling_params for {len(many)} prompts; give one for all, or one per prompt"
            )
        requests = itertools.chain.from_iterable(map(self.requests, map(self.encode, many), params))
        with closing(self.scheduler.each(requests)) as done:
            outputs = ([*itertools.islice(done, asked.n)] for asked in params)
            return [*map(self._output, many, outputs)]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, given as to `generate`, and yield what each step adds to the text, from no tokens to many.

        Text that may still become a stop string is held back. The last delta carries the whole output.
        sampling_params: with n=1; None is `SamplingParams()`. Raises ValueError for a bad request, at the first `next`. A
        reader that stops early leaves the slot free.
        """
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"stream writes one text, got n={params.n}; use generate for several")
        deltas = deque[Delta]()  # another reader's steps add to it, too
        [sequence] = self.scheduler.add(self.requests(self.encode(prompt), params, sink=deltas.append))
        for _ in itertools.chain(self.scheduler.run([sequence]), [None]):
            while deltas:
                delta = deltas.popleft()
                yield replace(delta, output=self._output(prompt, [sequence])) if delta.ended else delta

    def requests(self, ids: list[int], params: SamplingParams, **fields: Any) -> list[Request]:
        """As `PromptEncoder.requests`."""
        return self.prompts.requests(ids, params, **fields)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. Raises ValueError for what cannot be encoded."""
        return self.prompts.encode(prompt)

    def _output(self, prompt: Prompt, sequences: list[Sequence]) -> RequestOutput:
        """The finished sequences of one prompt."""
        first, speculative = sequences[0], None
        drafts = self.config.enabled or not self.decoder.plain
        if len(sequences) == 1 and drafts:
            speculative = first.counts.speculative
        return RequestOutput(
            request_id=str(first.id),
            prompt=prompt,
            prompt_token_ids=first.prompt,
            outputs=[s.completion(self.decoder.guarantee, index) for index, s in enumerate(sequences)],
            metrics=RequestMetrics(
                time_to_first_token=first.clock.time_to_first_token,
                e2e_latency=max(s.clock.total for s in sequences),
                speculative_decoding=speculative,
            ),
            prompt_logprobs=first.prompt_logprobs if first.params.prompt_logprobs is not None else None,
        )
