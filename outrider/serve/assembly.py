"""A server from its options: model, engine, service, metrics. For a process of its own, and for a replica among many."""

from __future__ import annotations

import math

from outrider.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.memory import gib, spare
from outrider.engine.trace import Recorder
from outrider.models.chat_template import set_chat_template
from outrider.serve.metrics import Metrics
from outrider.serve.options import ModelOptions, ServeOptions
from outrider.serve.service import Service


def load_llm(options: ModelOptions, recorder: Recorder | None = None) -> tuple[LLM, str | None]:
    """Load the model and its drafter. Returns it, and what its user should know of its chat template.

    Raises what `LLM` raises, and ValueError for a chat template that is none.
    """
    llm = LLM(**options.of_llm(), trace=recorder, any_method=True)
    return llm, set_chat_template(llm.tokenizer, llm.loaded.name, options.chat_template)


def assemble(
    options: ServeOptions, room: float, metrics: Metrics, recorder: Recorder | None = None, fit: bool = False
) -> Service:
    """Load the model and start its engine. room: bytes that its caches may take. recorder: where steps are written. fit: let
    texts become no longer than fits in the room and in the free memory. Options for lengths or bytes go before it.

    Raises what `LLM` and `Engine` raise for options that are wrong and models that cannot be had.
    """
    llm, note = load_llm(options, recorder)
    most = min(room, spare(str(llm.loaded.model.device)) or math.inf)
    fit = fit and options.max_model_len is None and options.kv_cache_memory_bytes is None and most < math.inf
    prefix_bytes, longest = int(min(options.prefix_cache << 20, room / 2)), llm.decoder.max_length
    engine = Engine(
        llm.runtime,
        max_queue=options.max_queue,
        kv_tokens=options.kv_tokens,
        prefix_bytes=prefix_bytes,
        prefill_chunk=options.prefill_chunk,
        memory_limit=options.kv_cache_memory_bytes,
        room=int(most) if fit else None,
        observer=metrics.of(options.model_name),
        trace=recorder,
    )
    chats = note is None and bool(getattr(llm.tokenizer, "chat_template", None))
    notes = [*llm.notes, *([note] if note else [])]
    most, free = engine.memory.most, spare(str(llm.loaded.model.device))
    if engine.decoder.max_length < min(longest, engine.kv_limit):
        notes.append(
            f"not {longest} tokens: so much in each sequence would not fit in the memory that is free. For longer texts give a "
            f"smaller --max-num-seqs or --kv-cache-dtype int8; --max-model-len {longest} is believed"
        )
    elif engine.memory.limit is None and 0 < free < most:
        notes.append(f"that does not fit in the {gib(free)} that are free, if all sequences become so long")
    return Service(engine, options, notes, chats, most + prefix_bytes)
