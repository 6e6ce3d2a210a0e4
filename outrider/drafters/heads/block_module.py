"""A block drafter in plain torch: what is trained, and the slow twin of the drafter on packed weights.

The block after position t holds the token x_{t+1} and masks. It attends to itself in both directions, and to the features of
positions 0 to t. The names of the parameters are those of speculators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from outrider.drafters.heads.config import BlockConfig
from outrider.drafters.heads.eagle_module import HeadAttention, HeadMLP
from outrider.drafters.heads.layers import turned, turns
from outrider.drafters.heads.reader import HeadWeights


class BlockAttention(HeadAttention):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.kv_heads = config.num_key_value_heads
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(self, y: Tensor, context: Tensor, visible: Tensor, own_turn: Tensor, context_turn: Tensor) -> Tensor:
        """[batch, anchor, slot, hidden] of normed states y of that shape.

        context: [batch, n, hidden], the projected features. visible: bool [batch, anchor, n]. own_turn, context_turn:
        turns of the slots [batch, anchor, slot, 1, dim] and of the features [n, 1, dim].
        """
        batch, anchors, slots, _ = y.shape
        d, kv = self.head_dim, self.kv_heads
        query = turned(self.q_norm(self.q_proj(y).unflatten(-1, (-1, d))), own_turn) * d**-0.5
        own_key = turned(self.k_norm(self.k_proj(y).unflatten(-1, (-1, d))), own_turn)
        own_value = self.v_proj(y).unflatten(-1, (-1, d))
        key = turned(self.k_norm(self.k_proj(context).unflatten(-1, (-1, d))), context_turn).transpose(1, 2)
        value = self.v_proj(context).unflatten(-1, (-1, d)).transpose(1, 2)
        # the query heads of a key head are rows of one product: [batch, kv, anchor, slot * group, dim]
        rows = query.unflatten(3, (kv, -1)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
        to_text = rows.flatten(2, 3) @ key.transpose(-1, -2)
        to_text = to_text.unflatten(2, (anchors, -1)).masked_fill(~visible[:, None, :, None], -math.inf)
        to_block = rows @ own_key.permute(0, 3, 1, 4, 2)
        shares = torch.cat([to_text, to_block], -1).softmax(-1).to(value.dtype)
        of_text, of_block = shares.split([key.shape[2], slots], -1)
        out = (of_text.flatten(2, 3) @ value).unflatten(2, (anchors, -1)) + of_block @ own_value.permute(0, 3, 1, 2, 4)
        heads = out.unflatten(3, (slots, -1)).permute(0, 2, 3, 1, 4, 5)
        return self.o_proj(heads.reshape(batch, anchors, slots, -1))


class BlockModuleLayer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = HeadMLP(config)


class MarkovHead(nn.Module):
    """A bias of the logits by the token before."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """Estimates how likely a slot's token is accepted, once the slot is reached."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        seen = config.markov_rank if config.confidence_markov else 0
        self.proj = nn.Linear(config.hidden_size + seen, 1)


class BlockModule(nn.Module):
    """DFlash, and DSpark with `markov_rank` (the equations: docs/guides/heads.md). Embedding and output head are frozen.

    embedding: float [vocab, hidden]. output: float [draft_vocab, hidden], the rows of `token_ids`. confidence: whether it has
    a confidence head.
    """

    def __init__(
        self, config: BlockConfig, token_ids: Tensor, embedding: Tensor, output: Tensor, *, confidence: bool
    ) -> None:
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding.from_pretrained(embedding.float(), freeze=True)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, size, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockModuleLayer(config) for _ in range(config.num_layers))
        self.lm_head = nn.Linear(size, len(token_ids), bias=False)
        self.lm_head.weight = nn.Parameter(output.float().clone(), requires_grad=False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if confidence else None
        frequencies, self._rope_factor = config.rotary()
        self.token_ids: Tensor
        self._frequencies: Tensor
        self.register_buffer("token_ids", token_ids.clone(), persistent=False)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    @classmethod
    def of(cls, given: HeadWeights[BlockConfig], embedding: Tensor, output: Tensor) -> BlockModule:
        """A drafter that was read. embedding, output: the target's, for what the drafter has not of its own."""
        own = {n: t.float() for n, t in given.tensors.items()}
        embedding, output = own.pop("embed_tokens.weight", embedding), own.pop("lm_head.weight", output)
        made = cls(given.config, given.token_ids, embedding, output, confidence="confidence_head.proj.weight" in own)
        made.load_state_dict({"embed_tokens.weight": embedding.float(), "lm_head.weight": output.float()} | own)
        return made

    def initialise_(self, std: float = 0.02) -> BlockModule:
        """Ready to be trained: the layers, the bias and the confidence add nothing yet."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if not parameter.requires_grad or parameter.dim() != 2:
                    continue
                if name.endswith(
                    ("o_proj.weight", "down_proj.weight", "markov_w2.weight", "confidence_head.proj.weight")
                ):
                    parameter.zero_()
                else:
                    parameter.normal_(std=std * min(1.0, math.sqrt(1024 / parameter.shape[1])))
        return self

    def forward(self, roots: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
        """[batch, anchor, slot, hidden], after the final norm: the blocks after some positions of a text.

        roots: int64 [batch, anchor], the token after each anchor. features: [batch, n, taps * target_hidden]. anchors: int64
        [batch, anchor], the last position that a block sees.
        """
        c, device = self.config, roots.device
        context = self.hidden_norm(self.fc(features))
        slots, places = torch.arange(c.block_size, device=device), torch.arange(features.shape[1], device=device)
        ids = torch.where(slots == 0, roots[..., None], c.mask_token_id)
        s = self.embed_tokens(ids).to(context.dtype)
        visible = places <= anchors[..., None]
        own, text = self._turn(anchors[..., None] + 1 + slots), self._turn(places)
        for layer in self.layers:
            assert isinstance(layer, BlockModuleLayer)
            s = s + layer.self_attn(layer.input_layernorm(s), context, visible, own, text)
            s = s + layer.mlp(layer.post_attention_layernorm(s))
        return self.norm(s)

    def drafts(self, tokens: Tensor, features: Tensor, anchors: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """(logits [batch, anchor, draft_vocab], confidence [batch, anchor] before its sigmoid or None) of each draft token.

        Token k at anchor t is about token t + 2 + k of the text, and follows the text's own token before it. tokens: int64
        [batch, n], with one token more than the features of the last anchor.
        """
        z = self(tokens.gather(1, anchors + 1), features, anchors)
        first = 0 if self.config.from_anchor else 1
        for k in range(self.config.drafts):
            row = z[:, :, first + k]
            logits, seen = self.lm_head(row), None
            if self.markov_head is not None:
                seen = self.markov_head.markov_w1(tokens.gather(1, anchors + 1 + k))
                logits = logits + self.markov_head.markov_w2(seen)
            sure = None
            if self.confidence_head is not None:  # it learns from the states, and they do not learn from it
                read = row if seen is None or not self.config.confidence_markov else torch.cat([row, seen], -1)
                sure = self.confidence_head.proj(read.detach())[..., 0]
            yield logits, sure

    def weights(self, stored: HeadWeights[BlockConfig] | None = None) -> HeadWeights[BlockConfig]:
        """The drafter as it is now, float32. stored: what it was made of; tables that it lacks are left out again.

        Without `stored`, the output head is kept if it has not a row for each token of the target.
        """
        frozen = {"embed_tokens.weight", "lm_head.weight"}
        tensors = {n: t.detach().cpu() for n, t in self.state_dict().items() if n not in frozen}
        full = self.config.draft_vocab_size == self.config.vocab_size
        kept = ({"lm_head.weight"} if not full else set[str]()) if stored is None else frozen & stored.tensors.keys()
        tensors |= {n: t.detach().cpu() for n, t in self.state_dict().items() if n in kept}
        return HeadWeights(self.config, tensors, self.token_ids.cpu())

    def _turn(self, positions: Tensor) -> Tensor:
        """[..., 1, dim]: of all heads at positions."""
        return turns(self._frequencies, self._rope_factor, positions)[..., None, :]
