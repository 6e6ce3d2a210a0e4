"""A server from its options: model, engine, service, metrics. For a process of its own, and for a replica among many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from outrider.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.memory import gib, spare
from outrider.engine.trace import Recorder
from outrider.models.chat_template import check_template
from outrider.serve.metrics import Metrics
from outrider.serve.options import ModelOptions, ServeOptions
from outrider.serve.service import Service

PLAIN = Path(__file__).with_name("assets") / "plain.jinja"


@dataclass
class Assembly:
    """A model that is loaded. notes: what its user should know. chats: it has a chat template of its own. caches: bytes that
    keys, values and prefixes may take."""

    service: Service
    notes: list[str]
    chats: bool
    caches: int = 0


def load_llm(options: ModelOptions, recorder: Recorder | None = None) -> tuple[LLM, str | None]:
    """Load the model and its drafter. Returns it, and what its user should know of its chat template.

    Raises what `LLM` raises.
    """
    llm = LLM(**options.of_llm(), trace=recorder, any_method=True)
    return llm, set_chat_template(llm, options.chat_template)


def set_chat_template(llm: LLM, template: str | None) -> str | None:
    """Give the model this template, if there is one. Returns a note for the user, or None.

    A built-in model that has none gets a plain one, so that every chat client works: messages are comments, and answers
    are code. Raises ValueError for a model without a tokenizer, and for a text that is no template.
    """
    tokenizer = llm.tokenizer
    if template is not None:
        if tokenizer is None:
            raise ValueError(
                f"{llm.loaded.name} has no tokenizer, so it cannot use a chat template; leave out --chat-template"
            )
        check_template(template)
        tokenizer.chat_template = template
    elif tokenizer is not None and not tokenizer.chat_template and llm.loaded.name.startswith("builtin:"):
        tokenizer.chat_template = PLAIN.read_text(encoding="utf-8")
        return "it has no chat template, so chat messages reach it as comments before code"
    return None


def assemble(
    options: ServeOptions, room: float, metrics: Metrics, recorder: Recorder | None = None, fit: bool = False
) -> Assembly:
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
    service = Service(engine, options)
    notes = [*llm.notes, *([note] if note else [])]
    most, free = engine.memory.most, spare(str(llm.loaded.model.device))
    if engine.decoder.max_length < min(longest, engine.kv_limit):
        notes.append(
            f"not {longest} tokens: so much in each sequence would not fit in the memory that is free. For longer texts give a "
            f"smaller --max-num-seqs or --kv-cache-dtype int8; --max-model-len {longest} is believed"
        )
    elif engine.memory.limit is None and 0 < free < most:
        notes.append(f"that does not fit in the {gib(free)} that are free, if all sequences become so long")
    return Assembly(service, notes, chats, most + prefix_bytes)
