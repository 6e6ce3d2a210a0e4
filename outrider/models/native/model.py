"""Models of every family in `families`: one native call per forward, without the modelling code of transformers.

A node has the same bits as a node of a tree, in a batch, and in any chunk of a prompt. The reference is `HFModel`, which
runs the modelling code of transformers. The two agree up to rounding, not to the bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.kernels import cpu as native
from outrider.models.base import (
    EMBEDDING,
    Chain,
    DrawnChain,
    LanguageModel,
    Output,
    Pending,
    Verification,
    Want,
    check_layers,
    check_taps,
    check_whole_head,
    over_vocabulary,
)
from outrider.models.cache import SlotCache
from outrider.models.config import Config, config_of
from outrider.models.matrix import float_rows
from outrider.models.mtp import JOIN, MTP
from outrider.models.native.builder import Builder
from outrider.models.native.families import family_of
from outrider.models.native.mtp import BEFORE_NORM, MtpBuilder, OneLayer
from outrider.models.native.program import NotNative, Program
from outrider.models.native.step import NativeStep
from outrider.models.native.weights import Facts, ShapeSource, StoredSource, Tensors, TensorSource
from outrider.models.nodes import Nodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Settings that change nothing in a forward without training: it is seen in the weights, or it is for training and generation.
_WITHOUT_EFFECT = (
    "architectures attention_bias bos_token_id chunk_size chunk_size_feed_forward dtype eos_token_id expand hidden_size "
    "id2label initializer_range label2id mamba_chunk_size mamba_expand mamba_ssm_cache_dtype max_window_layers mlp_bias "
    "model_type num_logits_to_keep num_mtp_layers output_attentions output_hidden_states output_router_logits pad_token_id "
    "pretraining_tp "
    "problem_type rescale_prenorm_residual residual_in_fp32 return_dict router_aux_loss_coef router_jitter_noise state_size "
    "tie_word_embeddings time_step_floor time_step_max time_step_rank transformers_version use_cache use_mamba_kernels "
    "use_sliding_window vocab_size"
)


def build(kind: str, config: Any, source: TensorSource | StoredSource) -> Program:
    """The program of a model of this class of transformers. Raises NotNative or ValueError if there is none.

    config: all that is read of it is in `Program.facts`. Its `mtp` is there if the source has such a layer."""
    family = family_of(kind)
    if family is None:
        raise NotNative(f"{kind} is not one of the families that it runs")
    settings, builder = Facts(config), Builder(source)
    max_length = getattr(settings, "max_position_embeddings", 2048)
    if type(max_length) is not int or max_length < 1:
        raise ValueError(f"max_position_embeddings is {max_length!r}")
    family(builder, settings)
    program, mtp = replace(builder.program(), max_length=max_length), None
    if (part := source.part(MTP)) is not None:
        further = MtpBuilder(part, before_norm=kind in BEFORE_NORM)
        family(further, OneLayer(settings))
        mtp = replace(further.program(), max_length=max_length)
    facts = {"kind": kind, "config": settings.read, "numbers": source.facts, "vocab_size": source.vocab_size}
    return replace(program, facts=facts, named=source.named, mtp=mtp)


def stored(facts: Mapping[str, Any], named: Mapping[str, Any]) -> Program:
    """The program of a pack. facts, named: of the program that it was made of. Raises what `build` raises, and KeyError."""
    source = StoredSource(facts["numbers"], named, facts["vocab_size"])
    return build(facts["kind"], SimpleNamespace(**facts["config"]), source)


def supports(model: PreTrainedModel) -> str | None:
    """None if the native step can run this model, else the reason why not."""
    from outrider.models.hf.tensors import ModuleTensors, config_for

    try:
        outlined(config_for(model), ModuleTensors(model))
    except ValueError as error:
        return str(error)
    return None


def outlined(config: Config, tensors: Tensors) -> Program:
    """The program of these tensors, with the sizes of matrices in their place.

    Raises ValueError with the reason if there is none. Warns if there is an MTP layer that cannot draft; it is left out.
    """
    if not native.available():
        raise NotNative(f"the native kernels are not available: {native.why()}")
    try:
        program = _outlined(config, tensors, True)
    except ValueError as error:
        if not tensors.has(f"{MTP}.{JOIN[-1]}.weight"):
            raise
        program = _outlined(config, tensors, False)
        text = f"the MTP layer of {config._name_or_path} cannot draft: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    settings, usual = config.to_dict(), config_of({"model_type": config.model_type}).to_dict()
    if (program.vocab_size, program.hidden) != (config.vocab_size, config.hidden_size):
        raise NotNative(
            f"its embedding has {program.vocab_size} tokens of {program.hidden} numbers, and its configuration says "
            f"{config.vocab_size} of {config.hidden_size}; one of the two files is of another model"
        )
    read = {*program.facts["config"], *_WITHOUT_EFFECT.split()}
    for name in usual:
        if name not in read and name[0] != "_" and "dropout" not in name and settings.get(name) != usual[name]:
            raise NotNative(f"it does not know the setting {name} = {settings.get(name)}")
    return program


def _outlined(config: Config, tensors: Tensors, further: bool) -> Program:
    try:
        program = build(config.kind, config, ShapeSource(tensors, config, further=further))
    except (LookupError, AttributeError, TypeError, ArithmeticError) as error:  # of a setting that is none
        raise NotNative(str(error)) from error
    tensors.check(further)
    return program


class NativeModel(LanguageModel):
    """A model of a family in `families`, run by the native step.

    `program` is what it computes.

    Args:
        model: of transformers, or its `Program`; then weights and head_ids are those that it was made with.
        weights: the precision of the packed weights: float32, bfloat16, float16, int8, int4, or gguf for the blocks of a GGUF
            file. "auto" keeps the checkpoint's own. With int4 weights the output head is int8, and so is an embedding that is
            tied to it. A separate embedding of floats is not packed, because a forward reads only a few of its rows.
        head_ids: int64 [n], ascending: the tokens that the output head keeps. All other logits are -inf, and their weights are
            not read. None keeps all. A tied embedding is then kept as a table of its own, with every token.
        kv_cache_dtype: how the caches of `new_cache` keep keys and values. A forward takes a cache of any dtype.

    Raises ValueError if the native step cannot run the model (see `supports`), or for tokens that it does not have.
    """

    path = "native"

    def __init__(
        self,
        model: PreTrainedModel | Program,
        weights: str = "auto",
        head_ids: np.ndarray | None = None,
        kv_cache_dtype: str = "auto",
    ) -> None:
        if not isinstance(model, Program):
            from outrider.models.hf.tensors import ModuleTensors, config_for

            reason = supports(model)
            if reason is not None:
                raise ValueError(f"the native step cannot run this model: {reason}; HFModel can")
            config = config_for(model)
            model = build(config.kind, config, TensorSource(ModuleTensors(model), config, weights, head_ids))
        self.vocab_size, self.max_length, self.kv_cache_dtype = model.vocab_size, model.max_length, kv_cache_dtype
        self.device = "cpu"
        self.batch_invariant = self.skips_padding = True
        self.weight_bytes = sum(m.bytes for m in model.matrices)
        self._run(model)

    def _run(self, program: Program) -> None:
        self.program, self.num_layers, self._step = program, program.num_layers, NativeStep(program)
        self.windows = program.windows
        # A chain runs on cells that nothing has committed, and a state has no cells.
        self.has_draft_chains = not program.recurrent

    def layer_subset(self, layers: Sequence[int]) -> NativeModel:
        out = copy.copy(self)
        out._run(self.program.subset(check_layers(layers, self.num_layers)))
        return out

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, max_length, self.kv_cache_dtype, self._step.states(num_slots))

    def forward(self, nodes: Nodes, *, taps: tuple[int, ...] = (), want: Want = "all") -> Output:
        """See `LanguageModel.forward`. Raises ValueError for tokens, parents or a cache that do not fit, IndexError for slots."""
        check_taps(taps, self.num_layers)
        logits, features, _ = self._step.forward(nodes, taps, want)
        if self.program.head_ids is not None:
            logits = over_vocabulary(logits, self.program.head_ids, self.vocab_size)
        for i, t in enumerate(taps):
            if features is not None and t == EMBEDDING:
                features[..., i * self.program.hidden : (i + 1) * self.program.hidden] = self._embedded(nodes.tokens)
        return Output(logits, features)

    def step(self, cache: SlotCache, slots: list[int], check: Verification, *, taps: tuple[int, ...] = ()) -> Pending:
        """See `LanguageModel.step`. One native call, but for sequences whose parameters depend on their tokens."""
        if check.verifier.name != "match" or self.program.head_ids is not None or EMBEDDING in taps:
            return super().step(cache, slots, check, taps=taps)
        logits, features, drawn = self._step.step(cache, slots, taps, check)
        return Pending(Output(logits, features), lambda: check.completed(drawn, check.warp.active, logits))

    @property
    def embedding_table(self) -> native.Packed | np.ndarray:
        return self.program.table

    def embedding_rows(self, tokens: np.ndarray) -> np.ndarray:
        return float_rows(self.program.table, tokens)

    def head_rows(self, tokens: np.ndarray) -> np.ndarray:
        ids = self.program.head_ids
        places = tokens if ids is None else np.searchsorted(ids, tokens)
        if ids is not None and not np.array_equal(ids[np.minimum(places, len(ids) - 1)], tokens):
            raise ValueError(
                "the output head of this model does not keep some of these tokens; load it without head_ids"
            )
        return float_rows(self.program.head, places)

    def output_head(self, hidden: np.ndarray) -> np.ndarray:
        check_whole_head(self.program.head_ids)
        return self.program.head.linear(hidden)

    def _embedded(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [batch, node, hidden]: the input of layer 0."""
        return self.embedding_rows(tokens) * np.float32(self.program.embedding_factor)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        return self._step.draft_chains(cache, chains)
