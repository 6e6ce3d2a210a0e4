"""A runtime: a target and everything that it decodes with, made whole by one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from outrider.control import Controller, Fixed
from outrider.core.store import Store
from outrider.drafters.base import Drafter
from outrider.drafters.config import DrafterSetup, SpeculativeConfig, make_drafters, request_drafters
from outrider.drafters.contract import accept
from outrider.drafters.lookup.memory import TextMemory
from outrider.drafters.method import NONE, lookup_names, offered
from outrider.drafters.planned import PlannedDrafter
from outrider.engine.calibrate import make_planner
from outrider.engine.decoder import Decoder
from outrider.engine.prefix_cache import BYTES, PrefixCache
from outrider.engine.prefix_files import PrefixFiles
from outrider.engine.prompts import PromptEncoder
from outrider.models.load import Loaded


@dataclass(frozen=True)
class Runtime:
    """A target and what it decodes with."""

    loaded: Loaded  # the target and its tokenizer
    config: SpeculativeConfig  # how it drafts
    drafters: Mapping[str, Drafter]  # the configured ones, by name; none for plain decoding
    method: str  # what all of them together are called, "none" without one
    # the drafters under a planner, which chooses among them and says how long drafts are; None if nothing drafts
    roster: PlannedDrafter | None
    decoder: Decoder  # the loop, with the cache
    prompts: PromptEncoder  # from prompts to token ids
    files: PrefixFiles | None = None  # prefixes for later processes; None without a folder
    text_memory: TextMemory | None = None  # texts that later ones draft from


def build(
    loaded: Loaded,
    config: SpeculativeConfig,
    *,
    num_slots: int,
    max_length: int | None = None,
    device: str = "auto",
    drafters: Mapping[str, Drafter] | None = None,
    controller: Controller | None = None,
    calibrate: bool = False,
    warn: Callable[[str], None] | None = None,
    prefix_folder: Store | None = None,
    text_memory: TextMemory | None = None,
    any_method: bool = False,
) -> Runtime:
    """Make the drafters, the planner, the cache and the decoder of a target.

    Args:
        loaded: The target.
        config: How it drafts.
        num_slots: Sequences decoded concurrently.
        max_length: Tokens of prompt and output of a sequence; None for as many as the model was made for, or as fit.
        device: Of draft models.
        drafters: Objects of your own, by name, in place of the configured ones.
        controller: Of your own, in place of the configured one.
        calibrate: Measure anew what steps cost.
        warn: Gets a message when a drafter fails, and the text goes on without it; None lets it raise.
        prefix_folder: Where prefixes are kept for later processes.
        text_memory: Texts of earlier requests.
        any_method: A request may choose one drafter of several, and lookups that are not configured, as on a server.

    Raises ValueError if a drafter cannot draft here.
    """
    length = max_length or loaded.model.longest(num_slots)
    foreign = frozenset(filter(offered, config.methods) if drafters is None else drafters)
    method = "+".join(config.methods if drafters is None else drafters) or NONE
    setup = DrafterSetup(config, loaded, num_slots, length, device, text_memory)
    if drafters is None:
        draft_prefixes = None if prefix_folder is None else partial(_draft_prefixes, prefix_folder)
        drafters = make_drafters(replace(setup, prefixes=draft_prefixes))
    for name, drafter in drafters.items():
        accept(name, drafter)
    every = dict(drafters)
    if any_method:
        every = request_drafters(replace(setup, config=SpeculativeConfig.of(None))) | every
    roster = None
    if every:
        planner: Controller = make_planner(config, loaded, drafters or every, controller, calibrate)
        roster = PlannedDrafter(
            every,
            planner,
            loaded.model.vocab_size,
            lookup_names(every),
            {method: list(drafters)} if drafters else {},
            method,
            warn if foreign or any_method else None,
            every.keys() - foreign,
        )
    else:
        planner = controller or Fixed(config.budget.depth, config.budget.width, config.budget.nodes)
    files = prefixes = None
    if prefix_folder is not None:
        files = PrefixFiles(prefix_folder, loaded)
        prefixes = PrefixCache(BYTES, files)
    decoder = Decoder(
        loaded.model,
        roster,
        config.verifier,
        planner,
        num_slots=num_slots,
        max_length=length,
        end_ids=loaded.end_ids,
        tokenizer=loaded.tokenizer,
        prefixes=prefixes,
        text_memory=text_memory,
    )
    return Runtime(
        loaded,
        config,
        drafters,
        method if drafters else NONE,
        roster,
        decoder,
        PromptEncoder(loaded),
        files,
        text_memory,
    )


def _draft_prefixes(folder: Store, draft: Loaded) -> PrefixCache:
    """The prefixes that a draft model has read."""
    return PrefixCache(0, PrefixFiles(folder, draft))
