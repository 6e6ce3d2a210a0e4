"""A head of the EAGLE family on packed weights: what `eagle_module` computes, over the slot cache and at draft trees."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from outrider.core.sampling import TokenSubset
from outrider.drafters.heads.config import HeadConfig
from outrider.drafters.heads.layers import Linears, Norm, Rotary, precision_of
from outrider.drafters.heads.reader import EagleWeights
from outrider.kernels import for_device
from outrider.kernels.attention import Scoring
from outrider.models.attention import attend, write
from outrider.models.base import LanguageModel
from outrider.models.cache import SCRATCH, SlotCache
from outrider.models.nodes import Nodes

_PREFIX = "layers.0."


class EagleModel:
    """The layer of a head. Cell t of a slot holds the key and value of the pair (x_{t+1}, g_t).

    target: gives the embedding, unless the head has its own. quantization: "auto", "none", "int8" or "int4".
    max_length: tokens of the longest text. weight_bytes: that a forward of one pair reads.
    """

    def __init__(self, head: EagleWeights, target: LanguageModel, max_length: int, quantization: str = "auto") -> None:
        config, tensors = head.config, head.tensors
        self.config, self.device, self.vocab_size = config, target.device, config.vocab_size
        self.max_length = min(max_length, config.max_position_embeddings)
        self.taps = config.taps
        self.subset: TokenSubset | None = None
        if len(head.token_ids) < config.vocab_size:
            self.subset = TokenSubset(head.token_ids.to(self.device), config.vocab_size)
        self._target = target
        self._embedding = None if head.own_embedding is None else head.own_embedding.to(self.device)
        linears = Linears(self.device, precision_of(quantization, [t for n, t in tensors.items() if "norm" not in n]))

        def linear(*names: str):
            return linears([tensors[f"{n}.weight"] for n in names], [tensors.get(f"{n}.bias") for n in names])

        def norm(name: str) -> Norm | None:
            weight = tensors.get(f"{name}.weight")
            return None if weight is None else Norm(weight, config.rms_norm_eps, self.device)

        self._fc = linear("fc")
        fused = 0 if config.eagle1 else linears.bytes  # of a draft token only EAGLE-1 reads it
        attention, mlp = f"{_PREFIX}self_attn.", f"{_PREFIX}mlp."
        self._attention_in = linear(*(f"{attention}{n}_proj" for n in "qkv"))
        self._out = linear(f"{attention}o_proj")
        self._gate_up = linear(f"{mlp}gate_proj", f"{mlp}up_proj")
        self._down = linear(f"{mlp}down_proj")
        self._lm_head = linear("lm_head")
        self.weight_bytes = linears.bytes - fused
        self._input_norm = norm("input_norm")
        self._fc_norms = [norm(f"fc_norm.{i}") for i in range(len(config.taps))]
        self._token_norm, self._hidden_norm = norm(f"{_PREFIX}input_layernorm"), norm(f"{_PREFIX}hidden_norm")
        self._middle_norm, self._norm = norm(f"{_PREFIX}post_attention_layernorm"), norm("norm")
        self._rotary = Rotary(*config.rotary(), self.max_length + SCRATCH, self.device)
        self._scoring = Scoring(config.head_dim**-0.5)

    def read_as(self, config: HeadConfig) -> EagleModel:
        """The same weights with other settings: flags, taps and the rotary embedding."""
        out = copy.copy(self)
        out.config, out.taps = config, config.taps
        out._rotary = Rotary(*config.rotary(), self.max_length + SCRATCH, self.device)
        return out

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return SlotCache(num_slots, min(max_length, self.max_length))

    def fuse(self, features: Tensor) -> Tensor:
        """float32 [pair, hidden]: g of features [pair, taps * target_hidden]."""
        features = features.float()
        if self.config.eagle1:
            return features
        if self._input_norm is not None:
            features = self._input_norm(features)
        if self.config.fc_norm:
            parts = features.chunk(len(self._fc_norms), -1)
            features = torch.cat([n(p) for n, p in zip(self._fc_norms, parts, strict=True) if n is not None], -1)
        return self._fc(features)

    def read(self, cache: SlotCache, slots: Sequence[int], counts: Sequence[int], tokens: Tensor, g: Tensor) -> None:
        """Commit the keys and values of pairs. They depend on no other pair, so nothing else of the layer is computed.

        counts: pairs of each slot. tokens: int64 [pair], those of all slots one after another. g: float32 [pair, hidden].
        """
        first = [cache.length[slot] for slot in slots]
        cache.reserve(slots, max(counts))
        positions = torch.cat([torch.arange(at, at + n) for at, n in zip(first, counts, strict=True)]).to(self.device)
        _, key, value = self._attended(self._pairs(tokens, g)[0], positions)
        shape = key.shape[1], key.shape[2]
        keys, values = cache.layer(0, shape, shape, key)
        done = 0
        for slot, at, n in zip(slots, first, counts, strict=True):
            keys[slot, :, at : at + n] = key[done : done + n].transpose(0, 1)
            values[slot, :, at : at + n] = value[done : done + n].transpose(0, 1)
            cache.commit([slot], [range(n)])
            done += n

    def forward(self, nodes: Nodes, g: Tensor | None = None, *, want: str = "all") -> Tensor:
        """y, float32 [batch, node, hidden], at the nodes of draft trees. Node 0 is the last pair that is not committed.

        g: float32 [batch, node, hidden], of `fuse` or `feedback`; None: 0, to see what a cache takes. want: for the call of a
        language model, without effect.
        """
        nodes = nodes.to(self.device)
        nodes.cache.reserve(nodes.slots, nodes.total)
        if g is None:
            g = torch.zeros(*nodes.tokens.shape, self.config.hidden_size, device=self.device)
        x, residual = self._pairs(nodes.tokens, g)
        query, key, value = self._attended(x, self._positions(nodes))
        write(nodes, 0, key.transpose(1, 2), value.transpose(1, 2))
        attended = attend(nodes, 0, query.transpose(1, 2), self._scoring)
        y = residual + self._out(attended.flatten(2))
        assert self._middle_norm is not None
        gate, up = self._gate_up(self._middle_norm(y)).chunk(2, -1)
        return y + self._down(F.silu(gate) * up)

    def feedback(self, y: Tensor) -> Tensor:
        """The g of a node's children."""
        return self._norm(y) if self.config.norm_output and self._norm is not None else y

    def logits(self, y: Tensor) -> Tensor:
        """float32 [..., draft_vocab]."""
        return self._lm_head(y if self._norm is None else self._norm(y))

    def _pairs(self, tokens: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(x, residual): what the attention reads, and what its output is added to."""
        table = self._embedding
        embedded = self._target.embedding_rows(tokens) if table is None else table[tokens].float()
        if self._token_norm is None or self._hidden_norm is None:  # EAGLE-1
            joined = self._fc(torch.cat([embedded, g], -1))
            return joined, joined
        normed = self._hidden_norm(g)
        x = torch.cat([self._token_norm(embedded), normed], -1)
        return x, normed if self.config.norm_before_residual else g

    def _attended(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [..., head, head_dim]. Queries and keys are turned."""
        c = self.config
        heads = self._attention_in(x).unflatten(-1, (-1, c.head_dim))
        turned = self._rotary(heads[..., : c.num_attention_heads + c.num_key_value_heads, :], positions)
        query, key = turned.split([c.num_attention_heads, c.num_key_value_heads], -2)
        return query, key, heads[..., -c.num_key_value_heads :, :]

    def _positions(self, nodes: Nodes) -> Tensor:
        """int64 [batch, node]."""
        batch, count = nodes.tokens.shape
        if self.device.type == "cpu" and for_device(self.device).attention is not None:
            plan = nodes.plan  # has them already; not those of padding
            if plan.count == batch * count:
                return plan.positions.view(batch, count)
        return nodes.positions.expand(batch, -1)
