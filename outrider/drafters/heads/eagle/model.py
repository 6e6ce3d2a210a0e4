"""A head of the EAGLE family over the slot cache and at draft trees: by the native step, or in torch over packed linears."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.drafters.heads.eagle.module import EagleConfig, EagleEquations
from outrider.drafters.heads.features import HeadOutput, PairModel
from outrider.drafters.heads.layers import Linears, PackedLayer, Rotary, precision_of
from outrider.drafters.heads.reading import HeadWeights
from outrider.kernels import cpu as native
from outrider.kernels.attention import Scoring
from outrider.kernels.cpu.library import LayerStruct, PairsStruct
from outrider.models.attention import attend, write
from outrider.models.base import Chain, DrawnChain, LanguageModel, Want
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.llama_weights import LlamaLayerWeights, LlamaSettings
from outrider.models.native_decoder import NativeDecoder
from outrider.models.native_llama import address, layer_struct, model_struct
from outrider.models.nodes import Nodes


def eagle_model(
    head: HeadWeights[EagleConfig],
    target: LanguageModel,
    max_length: int,
    quantization: str = "auto",
    *,
    plain: bool = False,
) -> EagleModel:
    """A head that is ready to draft. The native step runs those of a single layer of Llama, on a CPU.

    target: gives the embedding, unless the head has its own. quantization: "auto", "none", "int8" or "int4".
    max_length: tokens of the longest text. plain: in torch also where the native step could run it; the reference.
    """
    runs = head.config.one_plain_layer and target.device.type == "cpu" and native.available()
    kind = NativeEagle if runs and not plain and _table(head, target) is not None else TorchEagle
    return kind(head, target, max_length, quantization)


def _table(head: HeadWeights[EagleConfig], target: LanguageModel) -> native.Packed | Tensor | None:
    own = head.own_embedding
    return target.embedding_table if own is None else own.contiguous()


class EagleModel(PairModel):
    """The layers of a head. Cell t of a slot holds the keys and values of the pair (x_{t+1}, g_t).

    weight_bytes: that a forward of one pair reads; fc is read only where features come from the target. In P-EAGLE the share of
    each draft token.
    """

    def __init__(
        self, head: HeadWeights[EagleConfig], target: LanguageModel, max_length: int, quantization: str = "auto"
    ) -> None:
        self.config = config = head.config
        self.taps, self.device, self.vocab_size = config.taps, target.device, config.vocab_size
        self.max_length = min(max_length, config.max_position_embeddings)
        if len(head.token_ids) < config.vocab_size:
            self.subset = TokenSubset(head.token_ids.to(self.device), config.vocab_size)
        precision = precision_of(quantization, [t for n, t in head.tensors.items() if "norm" not in n])
        self._build(head, target, precision)

    def _build(self, head: HeadWeights[EagleConfig], target: LanguageModel, precision: str) -> None:
        """Pack the weights. precision: of the linears."""
        raise NotImplementedError

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, min(max_length, self.max_length))

    def _given(self, nodes: Nodes, g: Tensor | None) -> Tensor:
        """What is read in place of features: zeros where a forward only shows what a cache takes."""
        return torch.zeros(*nodes.tokens.shape, self.config.hidden_size, device=self.device) if g is None else g


class NativeEagle(EagleModel):
    """By the native step: a forward is one call, and so are whole chains."""

    has_draft_chains = True

    def _build(self, head: HeadWeights[EagleConfig], target: LanguageModel, precision: str) -> None:
        config, tensors = head.config, head.tensors

        def matrix(*names: str, paired: bool = False) -> native.Packed:
            biases = [tensors.get(f"{n}.bias") for n in names]
            return native.Packed([tensors[f"{n}.weight"] for n in names], precision, biases, paired=paired)

        def norm(*names: str) -> Tensor | None:
            found = [tensors[f"{n}.weight"].float() for n in names if f"{n}.weight" in tensors]
            return torch.cat(found).contiguous() if found else None

        layer = "layers.0."
        attention, mlp, taps = f"{layer}self_attn.", f"{layer}mlp.", len(config.taps)
        fc, qkv = matrix("fc"), matrix(*(f"{attention}{n}_proj" for n in "qkv"))
        out, gate_up = matrix(f"{attention}o_proj"), matrix(f"{mlp}gate_proj", f"{mlp}up_proj", paired=True)
        down, lm_head = matrix(f"{mlp}down_proj"), matrix("lm_head")
        read = [qkv, out, gate_up, down, lm_head, *([fc] if config.eagle1 else [])]
        self.weight_bytes = sum(m.bytes for m in read)
        token_norm, hidden_norm = norm(f"{layer}input_layernorm"), norm(f"{layer}hidden_norm")
        middle_norm, last_norm = norm(f"{layer}post_attention_layernorm"), norm("norm")
        feature_norm = norm("input_norm", *(f"fc_norm.{i}" for i in range(taps)))
        frequencies, rope_factor = config.rotary()
        inv_freq, ids, table = frequencies.contiguous(), head.token_ids.long().contiguous(), _table(head, target)
        weights = LlamaLayerWeights(qkv, out, gate_up, down, None, middle_norm, None, None)
        pairs = PairsStruct(
            fc=ctypes.addressof(fc.struct),
            token_norm=address(token_norm),
            hidden_norm=address(hidden_norm),
            feature_norm=address(feature_norm),
            feature_size=config.hidden_size if config.eagle1 else taps * config.target_hidden_size,
            parts=taps if config.fc_norm else 1,
            normed_residual=int(config.norm_before_residual),
            norm_output=int(config.norm_output),
        )
        settings = LlamaSettings(
            vocab_size=config.vocab_size,
            max_length=self.max_length,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=config.head_dim,
            activation="silu",
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            rope_factor=rope_factor,
            embedding_factor=1.0,
            residual_factor=1.0,
            logits_factor=1.0,
            windows=(0,),
        )
        kept = None if self.subset is None else ids
        model = model_struct(settings, lm_head, table, kept, last_norm, inv_freq, pairs)
        norms = (token_norm, hidden_norm, middle_norm, last_norm, feature_norm)
        keep = (fc, *read, *norms, inv_freq, ids, table, pairs)
        self._decoder = NativeDecoder(model, (LayerStruct * 1)(layer_struct(weights, 0)), [0], keep)

    def forward(
        self, nodes: Nodes, features: Tensor | None = None, *, g: Tensor | None = None, want: Want = "all"
    ) -> HeadOutput:
        given = self._given(nodes, g) if features is None else features
        logits, _, fed_back = self._decoder.forward(nodes, (), want, given.float().contiguous(), features is None)
        assert fed_back is not None
        return HeadOutput(logits, fed_back)

    def draft_chains(self, cache: SlotCache, chains: Sequence[Chain]) -> list[DrawnChain]:
        """See `LanguageModel.draft_chains`. What the head feeds back stays in the call."""
        return self._decoder.draft_chains(cache, chains)


class TorchEagle(EagleEquations, EagleModel):
    """In torch over packed linears: for other devices, for P-EAGLE, and the reference of the native step."""

    config: EagleConfig

    def _build(self, head: HeadWeights[EagleConfig], target: LanguageModel, precision: str) -> None:
        config, own = head.config, head.own_embedding
        self.embed_tokens = target.embedding_rows
        if own is not None:
            table = own.to(self.device)
            self.embed_tokens = lambda tokens: table[tokens].float()
        made = Linears(self.device, precision, head.tensors, config.rms_norm_eps)
        self.fc = made.named("fc")
        fused = 0 if config.eagle1 else made.bytes
        self.layers = [PackedLayer(made, i, "qkv") for i in range(config.num_layers)]
        self._lm_head = made.named("lm_head")
        self.weight_bytes = (made.bytes - fused) // max(config.parallel_drafts, 1)
        self.input_norm, self._norm = made.norm("input_norm"), made.norm("norm")
        self.fc_norm = [made.norm(f"fc_norm.{i}") for i in range(len(config.taps))]
        self._rotary = Rotary(config, self.max_length + SCRATCH, self.device)
        self._scoring = Scoring(config.head_dim**-0.5)

    def forward(
        self, nodes: Nodes, features: Tensor | None = None, *, g: Tensor | None = None, want: Want | int = "all"
    ) -> HeadOutput:
        """want: as for `LanguageModel.forward`, or a number: so many of each sequence's last nodes."""
        given = self._given(nodes, g) if features is None else self.fuse(features.float())
        nodes = nodes.to(self.device)
        nodes.cache.reserve(nodes.slots, nodes.total)
        c, batch = self.config, len(nodes.slots)
        x, residual = self.pairs(nodes.tokens, given)
        y = residual
        for i, layer in enumerate(self.layers):
            if i:
                x, residual = layer.input_layernorm(y), y
            query = self._written(nodes, i, layer, x)
            last = i == len(self.layers) - 1
            if last and want == "none":
                return HeadOutput(x.new_empty(batch, 0, c.draft_vocab_size), x.new_empty(batch, 0, c.hidden_size))
            attended = attend(nodes, i, query.transpose(1, 2), self._scoring).flatten(2)
            if last and want != "all":
                count = 1 if want == "last" else want
                assert isinstance(count, int)
                at = torch.tensor(nodes.last)[:, None] + torch.arange(1 - count, 1)
                own = torch.arange(batch)[:, None], at
                attended, residual = attended[own], residual[own]
            y = layer.after(residual, attended)
        z = self._norm(y)
        return HeadOutput(self._lm_head(z), z if c.norm_output else y)

    def _written(self, nodes: Nodes, i: int, layer: PackedLayer, x: Tensor) -> Tensor:
        """Write the keys and values of a layer. Returns the rotated queries, [batch, node, head, head_dim]."""
        c = self.config
        heads = layer.reads[0](x).unflatten(-1, (-1, c.head_dim))
        query, key, value = heads.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads], -2)
        both = self._rotary(torch.cat([layer.q_norm(query), layer.k_norm(key)], -2), nodes.positions)
        query, key = both.split([c.num_attention_heads, c.num_key_value_heads], -2)
        write(nodes, i, key.transpose(1, 2), value.transpose(1, 2))
        return query
