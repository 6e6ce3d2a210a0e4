"""A runtime: a target and everything that it decodes with, made whole by one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from outrider.control import Controller, Fixed, Planner
from outrider.core.contents import ContentFolder
from outrider.drafters import make_drafters
from outrider.drafters.base import Drafter
from outrider.drafters.combine.planned import PlannedDrafter
from outrider.drafters.config import DrafterSetup, SpeculativeConfig
from outrider.drafters.contract import accept
from outrider.drafters.lookup.memory import TextMemory
from outrider.drafters.method import NONE, offered
from outrider.drafters.registry import lookup_names, request_drafters
from outrider.engine.calibrate import make_planner
from outrider.engine.decoder import Decoder
from outrider.engine.prefix_cache import BYTES, PrefixCache
from outrider.engine.prefix_files import PrefixFiles
from outrider.models.load import Loaded


@dataclass(frozen=True)
class Runtime:
    """A target and what it decodes with.

    drafters: the configured ones, by name; none for plain decoding. method: what all of them together are called, "none" without
    one. roster: the drafters under a planner, which chooses among them and says how long drafts are; None if nothing drafts.
    foreign: names of drafters that others wrote.
    files: what later processes find of starts of texts; None without a folder. memory: texts that later ones draft from.
    """

    loaded: Loaded
    config: SpeculativeConfig
    drafters: Mapping[str, Drafter]
    method: str
    roster: PlannedDrafter | None
    decoder: Decoder
    foreign: frozenset[str] = frozenset()
    files: PrefixFiles | None = None
    memory: TextMemory | None = None

    def serving(
        self, max_length: int, prefixes: PrefixCache | None = None, tell: Callable[[str], None] | None = None
    ) -> tuple[Decoder, PlannedDrafter]:
        """A decoder for a server: a request may choose one drafter of several, and lookups that are not configured.

        max_length, prefixes: as for `Decoder`. tell: as for `build`. Target, drafters and planner are shared: only one of the
        two decoders may run.
        """
        own, loaded = self.decoder, self.loaded
        rows, device = own.cache.num_slots, str(loaded.model.device)
        setup = DrafterSetup(SpeculativeConfig.of(None), loaded, rows, own.max_length, device, memory=self.memory)
        every = {**request_drafters(setup), **self.drafters}
        planner = self.roster.planner if self.roster else make_planner(self.config, loaded, every)
        roster = _roster(loaded, self.drafters, every, self.method, planner, tell, self.foreign)
        return own.sibling(roster, planner, max_length=max_length, prefixes=prefixes), roster

    def remade(self, name: str, model: str) -> Drafter:
        """The drafter of one name with other weights. It is not tried on a text, so the target may run meanwhile."""
        config = self.config.model_copy(update={"method": name, "model": model})
        made = make_drafters(
            config,
            self.loaded,
            rows=self.decoder.cache.num_slots,
            max_length=self.decoder.max_length,
            device=str(self.loaded.model.device),
            tried=False,
        )
        return made[name]


def build(
    loaded: Loaded,
    config: SpeculativeConfig,
    *,
    rows: int,
    max_length: int | None = None,
    device: str = "auto",
    drafters: Mapping[str, Drafter] | None = None,
    controller: Controller | None = None,
    calibrate: bool = False,
    tell: Callable[[str], None] | None = None,
    prefix_folder: ContentFolder | None = None,
    memory: TextMemory | None = None,
) -> Runtime:
    """Make the drafters, the planner, the cache and the decoder of a target.

    rows: sequences that decode side by side. max_length: tokens of prompt and output of a sequence, None for as many as the model
    was made for. device: of draft models. drafters: objects of your own, by name, in place of the configured ones. controller: of
    your own, in place of the configured one. calibrate: measure what steps cost anew. tell: gets a message when a drafter that
    others wrote fails, and the text goes on without it; None lets it raise. prefix_folder: where the starts of texts are kept for
    later processes. memory: texts of earlier requests. Raises ValueError if a drafter cannot draft here.
    """
    length = max_length or loaded.model.max_length
    foreign = frozenset(filter(offered, config.methods) if drafters is None else drafters)
    method = "+".join(config.methods if drafters is None else drafters)
    if drafters is None:
        known = None if prefix_folder is None else partial(_known, prefix_folder)
        drafters = make_drafters(
            config, loaded, rows=rows, max_length=length, device=device, memory=memory, known=known
        )
    for name, drafter in drafters.items():
        accept(name, drafter)
    roster = None
    if drafters:
        planner: Controller = make_planner(config, loaded, drafters, controller, calibrate)
        roster = _roster(loaded, drafters, drafters, method, planner, tell if foreign else None, foreign)
    else:
        method, planner = NONE, controller or Fixed(config.budget.depth, config.budget.width, config.budget.nodes)
    files = prefixes = None
    if prefix_folder is not None:
        files = PrefixFiles(prefix_folder, loaded)
        prefixes = PrefixCache(BYTES, files)
    decoder = Decoder(
        loaded.model,
        roster,
        config.verifier,
        planner,
        rows=rows,
        max_length=length,
        end_ids=loaded.end_ids,
        tokenizer=loaded.tokenizer,
        prefixes=prefixes,
        memory=memory,
    )
    return Runtime(loaded, config, drafters, method, roster, decoder, foreign, files, memory)


def _known(folder: ContentFolder, draft: Loaded) -> PrefixCache:
    """The starts of texts that a draft model has read."""
    return PrefixCache(0, PrefixFiles(folder, draft))


def _roster(
    loaded: Loaded,
    drafters: Mapping[str, Drafter],
    every: Mapping[str, Drafter],
    method: str,
    planner: Planner,
    tell: Callable[[str], None] | None,
    foreign: frozenset[str],
) -> PlannedDrafter:
    """Drafters under a planner. drafters: those of `method`. every: also those that only a request chooses."""
    own = {method: list(drafters)} if drafters else {}
    return PlannedDrafter(
        every, planner, loaded.model.vocab_size, lookup_names(every), own, method, tell, every.keys() - foreign
    )
