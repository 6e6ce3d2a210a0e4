"""Trained heads of the EAGLE family: EAGLE-1, EAGLE-3 and EAGLE-3.1 draft chains and trees, P-EAGLE all tokens in one forward.

First the settings and tensors of a head, and how folders say them; then its program, and how it drafts. Over the slot cache and
at draft trees the native step runs it. The laboratory has the equations in plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outrider.core.tree import chain
from outrider.core.types import Array, Commit
from outrider.drafters.base import DraftContext
from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.config import HeadShape, default_taps, setting
from outrider.drafters.heads.features import HELD, FeatureCache, PairModel, last_nodes
from outrider.drafters.heads.files import EAGLE1, EAGLE3, PEAGLE, settings_named
from outrider.drafters.heads.lattice import Lattice
from outrider.drafters.heads.layers import precision_of
from outrider.drafters.heads.reading import OUTPUT, HeadReader, HeadWeights, layer_shapes, log
from outrider.drafters.heads.selftest import DEPTH, DraftHits, head_drafter, parallel_survival
from outrider.drafters.model.cached import CachedLevels, Feed, padded
from outrider.drafters.model.confidence import FOR_HEADS
from outrider.drafters.model.grower import TreeDrafter
from outrider.kernels import cpu as native
from outrider.models.base import FINAL_NORM, LanguageModel, Want
from outrider.models.checkpoint import let_go
from outrider.models.load import Loaded
from outrider.models.native.builder import Builder
from outrider.models.native.parts import attention, gated_mlp
from outrider.models.native.program import Program
from outrider.models.native.weights import StoredSource
from outrider.models.nodes import Nodes

_NAMES = {EAGLE3: "EAGLE-3", EAGLE1: "EAGLE-1", PEAGLE: "P-EAGLE"}
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class EagleConfig(HeadShape):
    """An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) and its variants: a decoder layer over features and tokens.

    Of several layers only the first one reads features.
    """

    norm_before_fc: bool = False  # one norm over all features side by side
    fc_norm: bool = False  # a norm for each feature
    # the output of the last norm is what the head feeds back (EAGLE-3.1 has this and fc_norm)
    norm_output: bool = setting(False)
    norm_before_residual: bool = setting(False)  # the normed feature is the residual
    # a head of EAGLE-1 (Li et al. 2024, 2401.15077). It reads the token and one feature, and predicts the next feature
    eagle1: bool = False
    attention_bias: bool = False  # the linears of the attention have a bias
    fc_bias: bool = False  # the linear over the features has a bias
    qk_norm: bool = False  # queries and keys are normed in each head, as in Qwen3
    mask_token_id: int | None = None  # token that stands for those that P-EAGLE does not know; None for other heads
    parallel_drafts: int = 0  # tokens that P-EAGLE drafts in one forward; 0 for other heads

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both true; a head has one norm over all features or one for each"
            )
        super().__post_init__()


def eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a head, as speculators names them, without embedding and output head: a file may leave them out."""
    c, size, wide = config, config.hidden_size, len(config.taps) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 2 * size if c.eagle1 else wide)}
    if c.fc_bias:
        shapes["fc.bias"] = (size,)
    if c.norm_before_fc:
        shapes["input_norm.weight"] = (wide,)
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(len(c.taps))}
    if c.mask_token_id is not None:
        shapes["mask_hidden"] = (1, 1, wide)
    for i in range(c.num_layers):
        width = size if c.eagle1 or i else 2 * size
        shapes |= layer_shapes(c, i, width, bias=c.attention_bias, norms=c.qk_norm, input_norm=not c.eagle1)
    return shapes if c.eagle1 else shapes | {"layers.0.hidden_norm.weight": (size,), "norm.weight": (size,)}


@settings_named
def read_eagle(folder: str | Path, target: Loaded) -> HeadWeights[EagleConfig]:
    """Read a head of EAGLE-3, EAGLE-3.1, P-EAGLE or EAGLE-1 for a target.

    Raises ValueError, naming both sides, for settings, tensors or a vocabulary that do not fit each other or the target.
    """
    reader = HeadReader(folder, target, EAGLE3, EAGLE1, PEAGLE)
    config, tensors, parallel = _config(reader), reader.tensors, reader.kind == PEAGLE
    ids = reader.token_ids(config.vocab_size, config.draft_vocab_size)
    reader.check_whole(eagle_shapes(config), f"{_NAMES[reader.kind]} head")
    output = {OUTPUT: reader.output_rows(config.hidden_size, ids)}
    # the embedding of P-EAGLE is trained, the row of the mask first of all
    return HeadWeights(config, tensors | output | reader.own_embedding(config.hidden_size, trained=parallel), ids)


def _config(reader: HeadReader) -> EagleConfig:
    path, settings, tensors = reader.path, reader.given, reader.tensors
    eagle1, parallel = reader.kind == EAGLE1, reader.kind == PEAGLE
    layers = int(settings.get("num_hidden_layers", 1))
    if layers != 1 and not parallel:
        raise ValueError(
            f"{path}: the head has {layers} layers; engines disagree about the norms of the second, so outrider runs EAGLE heads "
            "of one, and P-EAGLE heads of several"
        )
    shape = reader.shape(settings, EagleConfig)
    norms = {"fc_norm": "fc_norm.0.weight" in tensors, "norm_before_fc": "input_norm.weight" in tensors}
    for name, there in norms.items():
        said = settings.get(name, (settings.get("eagle_config") or {}).get(name))
        if said is not None and bool(said) != there:
            raise ValueError(
                f"{path}: config.json says {name} is {said}, and the file {'has' if there else 'lacks'} its tensors; one of the "
                "two is of another head"
            )
    return reader.made(
        EagleConfig,
        **shape,
        **norms,
        taps=(FINAL_NORM,) if eagle1 else _taps(reader, shape["target_hidden_size"]),
        num_layers=layers,
        eagle1=eagle1,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        fc_bias="fc.bias" in tensors,
        qk_norm="layers.0.self_attn.q_norm.weight" in tensors,
        mask_token_id=reader.mask(settings) if parallel else None,
        parallel_drafts=_parallel_drafts(reader) if parallel else 0,
    )


def _taps(reader: HeadReader, wide: int) -> tuple[int, ...]:
    """The layers that the head reads, by the first list that the folder has; docs/guides/heads.md says how formats count."""
    settings, key = reader.given, LAYER_IDS
    ids, inner = settings.get(key), (settings.get("eagle_config") or {}).get(key)
    if ids is None and inner is not None:
        key = f"eagle_config.{key} (it counts outputs of layers, one less)"
        ids = [i + 1 for i in inner]  # SGLang's list
    if ids is None:
        ids = [t + 1 for t in default_taps(reader.target.model.num_layers)]
        said = (
            "%s names no layers of its target; the usual ones, before layers %s, may be others than it was trained on"
        )
        log.warning(said, reader.path, ids)
    return reader.taps(key, ids, wide)


def _parallel_drafts(reader: HeadReader) -> int:
    """Tokens that a P-EAGLE head was trained to draft at once: what its folder proposes."""
    methods = reader.given.get("speculators_config", {}).get("proposal_methods") or [{}]
    count = int(methods[0].get("speculative_tokens") or 0)
    if count < 1:
        raise ValueError(
            f"{reader.path}: speculators_config names no speculative_tokens, the tokens that the head drafts"
        )
    return count


_FEATURE_NORM = "feature_norm"  # of what comes from the target: one norm, or one for each tap


def eagle_model(
    head: HeadWeights[EagleConfig], target: LanguageModel, max_length: int, quantization: str = "auto"
) -> PairModel:
    """A head that is ready to draft.

    Args:
        head: As it was read.
        target: Its embedding serves a head without one.
        max_length: Tokens of the longest text.
        quantization: "auto", "none", "int8" or "int4".
    """
    config, length = head.config, min(max_length, head.config.max_position_embeddings, HELD)
    precision = precision_of(quantization, head.tensors.values())
    table = head.own_embedding
    if table is None:
        table = target.embedding_table
    if table is None:  # in memory of another device, or in no plain order
        table = target.embedding_rows(np.arange(config.vocab_size))
    pairs = PairModel(_program(head, _EagleSource(head, precision, table)), config.taps, length, head.subset)
    pairs.weight_bytes //= max(config.parallel_drafts, 1)
    return pairs


class _EagleSource(StoredSource):
    """The tensors of a head, by their names in its file. A matrix is packed when it is asked for."""

    def __init__(self, head: HeadWeights[EagleConfig], precision: str, table: native.Packed | Array) -> None:
        tensors, ids = dict(head.tensors), head.token_ids
        names = [f"{n}.weight" for n in ("input_norm", *(f"fc_norm.{i}" for i in range(len(head.config.taps))))]
        if norms := [tensors[n] for n in names if n in tensors]:
            tensors[f"{_FEATURE_NORM}.weight"] = np.concatenate(norms)
        super().__init__({}, tensors, head.config.vocab_size)
        self.head_ids = ids if len(ids) < self.vocab_size else None
        self._precision, self._embedding = precision, table

    def matrix(self, *names: str, paired: bool = False) -> native.Packed:
        biases = [self.named.get(f"{n}.bias") for n in names]
        weights = [self.named[f"{n}.weight"] for n in names]
        packed = native.Packed(weights, self._precision, biases, paired=paired)
        let_go(weights[0])
        return packed

    def table(self, name: str) -> native.Packed | Array:
        return self._embedding


def _program(head: HeadWeights[EagleConfig], source: _EagleSource) -> Program:
    """EAGLE-3: its first layer attends over [norm(e); norm(g)]. EAGLE-1: over fc([e; g]).

    e is the embedding of a token, and g the state before it: made by fc of features of the target, or what the head fed back."""
    c, b, eps = head.config, Builder(source), head.config.rms_norm_eps
    hidden, taps = c.hidden_size, len(c.taps)
    pair = b.value(2 * hidden)
    token, state = pair.split(hidden, hidden)
    b.embed(out=token)
    if c.eagle1:
        b.given(hidden, out=state)
        x = h = b.linear(pair, "fc", width=hidden)
    else:
        features = b.given(taps * c.target_hidden_size, when="features")
        if b.has(_FEATURE_NORM):
            group = c.target_hidden_size if c.fc_norm else 0
            b.norm(features, _FEATURE_NORM, eps=eps, group=group, per_group=True, out=features, when="features")
        x, h = b.linear(features, "fc", width=hidden, when="features"), pair
        b.given(hidden, when="fed", out=x)
        b.norm(token, "layers.0.input_layernorm", eps=eps, out=token)
        b.norm(x, "layers.0.hidden_norm", eps=eps, out=state)
        x = state if c.norm_before_residual else x
    table = b.angles(*c.rotary())
    for b.layer in range(c.num_layers):
        layer = f"layers.{b.layer}"
        if b.layer:
            h = b.norm(x, f"{layer}.input_layernorm", eps=eps)
        attention(
            b, h, x, f"{layer}.self_attn", heads=c.num_attention_heads, kv_heads=c.num_key_value_heads, dim=c.head_dim,
            table=table, scale=c.head_dim**-0.5, eps=eps,
        )  # fmt: skip
        h = b.norm(x, f"{layer}.post_attention_layernorm", eps=eps)
        gated_mlp(b, h, x, f"{layer}.mlp", width=c.intermediate_size, activation="silu")
    b.layer = -1
    last = b.norm(x, "norm", eps=eps) if b.has("norm") else x
    b.head(last, fed_back=last if c.norm_output else x)
    return b.program()


class Pairs(CachedLevels):
    """Levels of a head that reads pairs of a token and a feature (Li et al. 2025, arXiv 2503.01840; docs/guides/heads.md).

    The cache holds pairs of the target's features only. What the head feeds back to itself while it drafts is in the scratch,
    which is never committed: the same positions are read again from true features. Pairs wait until a draft reads them, and all
    but the last one cost only their keys and values.

    Attributes:
        model: the head.
        features: what it holds of each text.
    """

    scale = FOR_HEADS

    def __init__(self, model: PairModel, num_slots: int, max_length: int) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each."""
        super().__init__(model, model.subset)
        self.taps, self.cache = model.taps, model.new_cache(num_slots, max_length)
        self.features = FeatureCache(self.cache, pairs=True)
        # slot -> g of the children of each node in the scratch, [place, hidden]
        self._fed_back = dict[int, Array]()

    def room(self, slot: int, tokens: list[int]) -> int:
        return self.features.room(slot, tokens)

    def add(self, slot: int, features: Array, first: int) -> None:
        self.features.add(slot, features, first)

    def unread(self, slot: int, tokens: list[int]) -> Feed:
        return self.features.pair_tokens(slot, tokens), self.features.newest(slot)

    def ingested(self, slot: int, count: int) -> None:
        self.features.ingested(slot, count)

    def forward(self, nodes: Nodes, features: Array | None, want: Want) -> Array:
        if features is not None:
            logits, g = self.model.forward(nodes, features, want=want)
            self._fed_back |= zip(nodes.slots, g, strict=True)
            return logits
        assert nodes.parents is not None
        above = np.maximum(nodes.parents[:, nodes.held :], 0)
        fed_back = [self._fed_back[slot] for slot in nodes.slots]
        logits, g = self.model.forward(nodes, g=np.stack([k[up] for k, up in zip(fed_back, above, strict=True)]))
        for slot, before, new in zip(nodes.slots, fed_back, g, strict=True):
            self._fed_back[slot] = np.concatenate([before, new])
        return logits

    def update(self, context: DraftContext, commits: Sequence[Commit]) -> None:
        """Of a draft the root's pair alone is kept: it was read from the target's features."""
        for slot in context.slots:
            if self.places.pop(slot, None) is not None:
                self.cache.commit([slot], [[0]])
                self.features.keep(slot, 0)
                self._fed_back.pop(slot, None)

    def release(self, slot: int) -> None:
        super().release(slot)
        self.features.release(slot)
        self._fed_back.pop(slot, None)


class MaskedPairs(Lattice):
    """Levels of P-EAGLE: a head of several layers that drafts all tokens of a step in one forward.

    The slots after the root's pair hold a mask token and a learnt feature in place of the target's. Each slot attends to the
    text and to the slots before it, so the distributions of later tokens do not depend on draft tokens. The
    cache holds pairs of committed tokens only, as that of `Pairs` does.
    """

    def __init__(self, head: HeadWeights[EagleConfig], model: PairModel, num_slots: int, max_length: int) -> None:
        """num_slots, max_length: slots of the cache, and tokens of each."""
        config, self.model = head.config, model
        self.cache = model.new_cache(num_slots, max_length)
        self.features, self.taps = FeatureCache(self.cache, pairs=True), config.taps
        super().__init__(config.vocab_size, config.parallel_drafts, model.subset)
        assert config.mask_token_id is not None
        self._mask = config.mask_token_id
        self._mask_features = head.tensors["mask_hidden"].astype(np.float32).reshape(1, -1)

    def logits(self, slots: Sequence[int], texts: Sequence[Sequence[int]], depth: int) -> Array:
        waiting = [self.features.newest(slot) for slot in slots]
        masked = [self._mask] * (depth - 1)
        feeds = [[*self.features.pair_tokens(slot, t), *masked] for slot, t in zip(slots, texts, strict=True)]
        tokens, parents = chain(feeds)
        masks = [self._mask_features] * (depth - 1)
        features = padded([np.concatenate([features_of, *masks]) for features_of in waiting])
        nodes = Nodes(tokens, self.cache, [*slots], parents)
        logits = self.model.forward(nodes, features).logits[last_nodes(nodes, depth)]
        for slot, features_of in zip(slots, waiting, strict=True):
            self.features.ingested(slot, len(features_of))
        return logits


def from_setup(setup: DrafterSetup) -> TreeDrafter[Pairs]:
    """Read the head of a configuration, and try it on a known text."""
    flags = {name: name for name in ("norm_output", "norm_before_residual")}
    return head_drafter(setup, read_eagle, eagle_model, lambda _, *given: Pairs(*given), flags, survival)


def parallel_from_setup(setup: DrafterSetup) -> TreeDrafter[MaskedPairs]:
    flags = {"norm_before_residual": "norm_before_residual"}
    return head_drafter(setup, read_eagle, eagle_model, MaskedPairs, flags, parallel_survival)


def survival(drafter: TreeDrafter[Pairs], text: Sequence[int], features: Array, right: Sequence[int]) -> DraftHits:
    """Drafts after each position of a text, fed with the text's own tokens. All positions are branches of one tree.

    features: float [position, feature] of the text. right: the target's most likely token after each position.
    """
    count, model = len(text) - 1 - DEPTH, drafter.levels.model
    cache = model.new_cache(1, len(text))
    g, alive, hits = np.empty(0), np.ones(count, bool), list[float]()
    parents = np.arange(-1, count - 1)
    for depth in range(DEPTH):
        # level 0 is the text itself, a chain; each later level has one node below each node of the level before
        tokens = np.array([text[1 + depth : 1 + depth + count]])
        if depth:
            parents = np.concatenate([parents, np.arange(count) + (depth - 1) * count])
        nodes = Nodes(tokens, cache, [0], parents[None])
        logits, g = model.forward(nodes, g=g) if depth else model.forward(nodes, features[None, :count])
        best = logits[0].argmax(-1)
        best = best if model.subset is None else model.subset.ids[best]
        alive &= best == right[1 + depth : 1 + depth + count]
        hits.append(float(alive.mean()))
    return tuple(hits)
