"""A draft model with another tokenizer than the target's (Timor et al. 2025, arXiv 2502.05202): two ways.

*TLI*, token-level intersection: the draft's distribution is restricted to the tokens that both have, in the target's ids. It is
an ordinary distribution, so growing trees and verification work unchanged. *SLEM*, string-level exact match: the draft writes
its own tokens. Their text is encoded by the target's tokenizer and proposed as a chain of chosen tokens.

Both ways share one cache: the draft reads the committed text in its own tokens. New here: under `match`, SLEM too is coupled
with the target's noise. Each draft token is mapped to the target token that it begins with, and its probability is added
there. The noise chooses one of these target tokens. The draft then writes its own likeliest token that begins with it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from outrider.core.noise import Stream
from outrider.core.sampling import TokenSubset
from outrider.core.types import Array, Commit, Draft
from outrider.drafters.base import DraftContext, Resources, chains
from outrider.drafters.config import DrafterSetup
from outrider.drafters.lookup.corpus import alike
from outrider.drafters.model.cached import CachedLevels, Feed
from outrider.drafters.model.draft_model import CHUNK, DraftReduction, ModelDrafter, OwnCache
from outrider.drafters.model.grower import TreeDrafter
from outrider.drafters.model.vocabulary import Pairing, Spelling, Vocabulary, continued
from outrider.drafters.proposal import Proposal, join
from outrider.kernels.probabilities import log, softmax
from outrider.models.base import LanguageModel, Want
from outrider.models.load import Loaded, load
from outrider.models.nodes import Nodes

Way = Literal["tli", "slem"]
_NO = float("-inf")


class _SpelledText(Spelling):
    """One sequence's text in the draft's tokens.

    held: the tokens in the cache, then those in the scratch. held_sure: how many of them later text cannot change. left_out: how
    many the window leaves out.
    """

    def __init__(self, pairing: Pairing) -> None:
        super().__init__(pairing)
        self.held, self.held_sure, self.left_out = list[int](), 0, 0


class OtherTokenizer(CachedLevels):
    """Levels of a draft model that reads the committed text in its own tokens. The logits are those of the tokens that both have
    (TLI)."""

    def __init__(self, model: LanguageModel, pairing: Pairing, num_slots: int, **origin: Any) -> None:
        """origin: reduction and prefixes, as of `OwnCache`."""
        none = pairing.target.size  # for draft tokens that begin with no token of the target
        shared = np.array(sorted(pairing.shared.items()), np.int64).reshape(-1, 2)
        super().__init__(model, TokenSubset(shared[:, 0].copy(), pairing.target.size), pairing.shared)
        self.own = OwnCache(model, num_slots, model.max_length, **origin)
        self.cache, self.pairing, self.vocab_size = self.own.cache, pairing, pairing.target.size
        self._columns = shared[:, 1]  # of the model's logits
        self.has_draft_chains = False  # a chain in one call is drawn from the draft's own tokens
        self._first = np.array([none if t < 0 else t for t in pairing.first])
        self._texts: dict[int, _SpelledText] = {}

    def room(self, slot: int, tokens: list[int]) -> int:
        # 0 as well if the text has no token of the draft to read
        ids = self._spelled(slot, tokens)
        return self.cache.max_length - len(ids) if ids else 0

    def missing(self, slot: int, tokens: list[int]) -> int:
        """See `OwnCache.missing`. First the cache is cut to the tokens that the text still begins with.

        Tokens that the draft wrote itself and that were accepted are committed to it.
        """
        if self.room(slot, tokens) <= 0:
            return 0
        ids, text, cache = self._spelled(slot, tokens), self._texts[slot], self.cache
        sure = max(text.sure - text.left_out, 0)
        if self.own.recall(slot, ids[:sure]):
            text.held, text.held_sure = ids[: cache.length[slot]], sure
        same = min(alike(text.held, ids, min(text.held_sure, len(text.held))), len(ids) - 1)
        length = cache.length[slot]
        if same < length:
            same = cache.keep(slot, same)
        else:
            cache.commit([slot], [range(same - length)])
        text.held, text.held_sure = ids[:same], sure
        return len(ids) - 1 - same

    def read(self, slot: int, tokens: list[int], count: int) -> None:
        ids = self._spelled(slot, tokens)
        self.own.read_ids(slot, ids, count)
        self.places.pop(slot, None)  # the scratch was overwritten
        self._texts[slot].held = ids[: self.cache.length[slot]]

    def unread(self, slot: int, tokens: list[int]) -> Feed:
        while self.missing(slot, tokens) >= CHUNK:
            self.read(slot, tokens, CHUNK)
        unread = self._spelled(slot, tokens)[self.cache.length[slot] :]
        self._texts[slot].held += unread
        return unread, None

    def forward(self, nodes: Nodes, features: Array | None, want: Want) -> Array:
        return self.own.forward(nodes, features, want)[..., self._columns]

    def update(self, context: DraftContext, commits: Sequence[Commit]) -> None:
        """The accepted part of the scratch is committed, the rest is dropped."""
        for slot, commit in zip(context.slots, commits, strict=True):
            if self.keep(slot, commit):
                held = self._texts[slot].held
                held += [self.pairing.shared.get(t, -1) for t in commit.tokens]
                del held[self.cache.length[slot] :]

    def release(self, slot: int) -> None:
        self.own.release(slot)
        self.places.pop(slot, None)
        self._texts.pop(slot, None)

    def resources(self) -> Resources:
        return self.own.resources()

    def _spelled(self, slot: int, tokens: list[int]) -> list[int]:
        """What the window of the draft holds of a text."""
        if slot not in self._texts:
            self._texts[slot] = _SpelledText(self.pairing)
        text = self._texts[slot]
        ids = self.own.window(slot, text.read(tokens))
        left_out = self.own.left_out.get(slot, 0)
        if text.left_out != left_out:
            text.held, text.held_sure, text.left_out = [], 0, left_out
        return ids

    def written(self, context: DraftContext) -> list[list[int]]:
        """SLEM: what the draft writes, in the target's tokens, as a chain for each entry of the batch."""
        proposals: list[list[int]] = [[] for _ in context.slots]
        asked = [min(b.depth, b.max_nodes) for b in context.budgets]
        room = [min(2 * n, self.room(context.slots[b], context.tokens[b])) for b, n in enumerate(asked)]
        live = [b for b, n in enumerate(room) if n > 0]
        if not live:
            return proposals
        texts = [b""] * len(context.slots)
        slots = [context.slots[b] for b in live]
        logits = self.ingest(slots, [self.unread(context.slots[b], context.tokens[b]) for b in live], self.own.forward)
        count = 0
        while True:
            feed: list[int] = []
            for b, line in zip(list(live), logits, strict=True):
                token = self._next(context, b, proposals[b], line)
                piece = self.pairing.draft.pieces[token] if token >= 0 else None
                if piece is None:  # no token may follow, or the token ends the text or stands for no text
                    proposals[b] += [t for t in (self.pairing.first[token],) if token >= 0 and t >= 0]
                    live.remove(b)
                    continue
                texts[b] += piece
                proposals[b] = continued(self.pairing.target, context.tokens[b], whole(texts[b]))
                if len(proposals[b]) > asked[b] or count + 1 >= room[b]:  # the last token may still grow
                    live.remove(b)
                else:
                    feed.append(token)
            if not live:
                return proposals
            count += 1
            slots = [context.slots[b] for b in live]
            for slot, token in zip(slots, feed, strict=True):
                self._texts[slot].held.append(token)
            parents = np.tile(np.arange(-1, count), (len(live), 1))
            nodes = Nodes(np.array(feed)[:, None], self.cache, slots, parents)
            logits = self.own.forward(nodes, None, "all")[:, 0]

    def _next(self, context: DraftContext, b: int, proposed: Sequence[int], logits: Array) -> int:
        """The draft's next token, -1 for none: the likeliest one that begins with the target token that the noise chooses.

        logits: float32 [vocab of the draft]. proposed: the target's tokens proposed so far.
        """
        mass = np.zeros(self.vocab_size + 1, np.float32)
        np.add.at(mass, self._first, softmax(logits))
        log_probs, warp = log(mass[None, :-1]).astype(np.float32), context.warp.select([b])
        if context.stream is Stream.TOKEN:
            at = context.positions[[b]] + len(proposed)
            chosen = int(warp.draw(log_probs, [proposed], context.noise.select([b]), context.stream, at)[0])
        else:  # the target's noise must not be used: take the likeliest
            scores = warp.processed(log_probs, [proposed])[0]
            chosen = int(scores.argmax()) if scores.max() > _NO else -1
        return -1 if chosen < 0 else int(np.where(self._first == chosen, logits, _NO).argmax())


class CrossTokenizerDrafter(TreeDrafter[OtherTokenizer]):
    """Drafts from a model with its own tokenizer (Timor et al. 2025, arXiv 2502.05202).

    way: "tli" or "slem". None means SLEM for a text at temperature 0 and TLI for others (docs/guides/choose.md has the figures).
    Verifiers that need probs get TLI.
    """

    def __init__(
        self, model: LanguageModel, pairing: Pairing, num_slots: int, way: Way | None = None, **origin: Any
    ) -> None:
        """
        Args:
            model: the draft model.
            pairing: of the target's vocabulary and the model's.
            num_slots: slots of the draft's cache.
            way: see above.
            origin: reduction and prefixes, as of `OwnCache`.
        """
        super().__init__(OtherTokenizer(model, pairing, num_slots, **origin))
        self.way: Way | None = "slem" if not pairing.shared else "tli" if pairing.total else way

    def propose(self, context: DraftContext) -> Draft:
        written = [b for b in range(len(context.slots)) if self._way(context, b) == "slem"]
        if not written:
            return super().propose(context)
        if len(written) == len(context.slots):
            return chains(context, self.levels.written(context))
        others = [b for b in range(len(context.slots)) if b not in written]
        parts = dict[int, Proposal]()
        for some in (written, others):
            draft = self.propose(context.select(some))
            parts |= {b: Proposal(draft, n) for n, b in enumerate(some)}
        return join(context, parts)

    def _way(self, context: DraftContext, b: int) -> Way:
        if self.way is not None:
            return self.way
        return "slem" if context.warp.greedy[b] and not context.needs_probs else "tli"


def whole(text: bytes) -> bytes:
    """UTF-8 text without an incomplete character at its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("ignore")
    decoder.decode(text)
    unread, _ = decoder.getstate()
    return text[: len(text) - len(unread)]


def paired(draft: Loaded, target: Loaded) -> Pairing | None:
    """How tokens of a draft model and of a target become each other; None where they are the same.

    Raises ValueError if neither tokens nor text can pass from one to the other.
    """
    sizes = (draft.model.vocab_size, target.model.vocab_size)
    if draft.tokenizer is None or target.tokenizer is None:
        if sizes[0] == sizes[1]:
            return None
        lacking = " and ".join(x.name for x in (draft, target) if x.tokenizer is None)
        raise ValueError(
            f"the draft {draft.name} has a vocabulary of {sizes[0]} tokens and the target {target.name} one of {sizes[1]}; "
            f"a draft with other tokens needs the tokenizers of both, and {lacking} has none. Save a tokenizer in the "
            "folder of its model (model.save_pretrained(FOLDER); tokenizer.save_pretrained(FOLDER)) and give the folder, "
            'or use a method that needs no second model: {"method": "suffix"}'
        )
    if sizes[0] == sizes[1] and draft.tokenizer.get_vocab() == target.tokenizer.get_vocab():
        return None
    loaded = [(x, Vocabulary(x.tokenizer, x.model.vocab_size, x.end_ids)) for x in (target, draft)]
    try:
        pairing = Pairing(*(vocabulary for _, vocabulary in loaded))
    except ValueError as error:
        raise ValueError(
            f"the draft {draft.name} cannot draft for the target {target.name}: {error}. Use a draft trained on the same kind "
            'of text, or a method that needs none: {"method": "suffix"}'
        ) from error
    return None if pairing.equal else pairing


def from_setup(setup: DrafterSetup) -> ModelDrafter | CrossTokenizerDrafter:
    """Load the draft model that a configuration names, and make its drafter."""
    config = setup.config
    name, asked = config.model or "builtin:code-draft", config.quantization
    reduce = DraftReduction(asked == "auto", config.draft_vocab, config.draft_vocab_corpus)
    quantization = None if asked in ("auto", "none") else asked
    chosen = reduce if reduce.may_leave_out(name) else None
    draft = load(name, device=setup.device, quantization=quantization, reduce=chosen)
    pairing = paired(draft, setup.target)
    origin: dict[str, Any] = {"reduction": reduce.note, "prefixes": setup.prefixes and setup.prefixes(draft)}
    if pairing is None:
        return ModelDrafter(draft.model, setup.num_slots, setup.max_length, **origin)
    return CrossTokenizerDrafter(draft.model, pairing, setup.num_slots, **origin)
