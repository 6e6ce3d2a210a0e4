"""Trains heads of EAGLE-3 and EAGLE-3.1: how one begins, and EAGLE's training-time test at sampled positions.

The head drafts on from them as it will while it drafts (Li et al. 2025). The keys and values of the first step are computed at
every position. All else is computed at the anchors only: queries, the MLP, the output head, and the later steps. That saves most
of the cost, and neighbouring positions teach nearly the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.heads.eagle.files import write_eagle
from outrider.drafters.heads.eagle.module import Eagle, EagleConfig
from outrider.drafters.heads.reading import HeadWeights
from outrider.models.load import modules
from outrider.models.matrix import dense, matrix_of
from outrider.train.batches import batch_of
from outrider.train.method import Beginning, DraftedToken, TrainedHead
from outrider.train.teacher import Taught, Teacher

STEPS = 4  # of the unroll; drafts on a CPU are seldom longer
_READ = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # in a head these read the token too
_PLAIN = ("mlp.gate_proj", "mlp.up_proj")
_ADD = ("self_attn.o_proj", "mlp.down_proj")
# The norms that a copied layer can have: those of models with (1 + weight), as Gemma's, are others.
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


class TrainedEagle(TrainedHead):
    """An EAGLE-3 head, unrolled over its own states."""

    module: Eagle

    def __init__(self, module: Eagle, teacher: Teacher, token_ids: Tensor, *, own_embedding: bool = False) -> None:
        super().__init__(module, teacher, token_ids, STEPS)
        module.lm_head.requires_grad_(False)  # it and the embedding stay the target's
        self._own_embedding = own_embedding

    def drafts(self, tokens: Tensor, taught: Taught, anchors: Tensor) -> Iterator[DraftedToken]:
        return map(DraftedToken, unrolled(self.module, tokens, taught.features, anchors, self.depth))

    def write(self, folder: Path) -> None:
        write_eagle(folder, self.module, embedding=self._own_embedding)


def new_eagle(start: Beginning) -> TrainedEagle:
    """An EAGLE-3.1 head. Its layer begins as its target's last one (`copy_last_layer_`). Where that is of another kind, the layer
    adds nothing at first."""
    loaded, ids = start.loaded, start.token_ids
    config = EagleConfig.for_target(
        loaded.config, draft_vocab_size=len(ids), fc_norm=True, norm_output=True, verifier=start.verifier
    )
    teacher = Teacher(loaded, config.taps)
    torch.manual_seed(start.seed)
    head = Eagle(config, ids).initialise_(teacher.embedding().cpu(), teacher.output().cpu())
    high = teacher.read(batch_of(start.answers[:4]).tokens).features[..., -config.target_hidden_size :]
    copy_last_layer_(head, modules(loaded), float(high.pow(2).mean(-1).sqrt().median()))
    return TrainedEagle(head, teacher, ids)


def continued_eagle(given: HeadWeights[EagleConfig], start: Beginning) -> TrainedEagle:
    """A head that was read. Raises ValueError for one of EAGLE-1."""
    if given.config.eagle1:
        raise ValueError("heads of EAGLE-1 are not trained here; leave out --from, and an EAGLE-3 head is trained")
    teacher = Teacher(start.loaded, given.config.taps)
    head = Eagle.of(given, teacher.embedding().cpu())
    return TrainedEagle(head, teacher, given.token_ids, own_embedding=given.own_embedding is not None)


@torch.no_grad()
def copy_last_layer_(head: Eagle, target: Any, size: float) -> bool:
    """Give a head with a norm for each feature the target's last layer and last norm, over the last feature alone.

    Returns whether it could: the target's last layer must be Llama's, of the head's shape. size: root mean square of that
    feature. The head reads the feature divided by it, so what the layer adds is divided by it too.
    """
    width, config = head.config.hidden_size, head.config
    try:
        base: Any = target.get_submodule("model")
        last = base.get_submodule(f"layers.{target.config.num_hidden_layers - 1}")
        matrices = {n: dense(matrix_of(last.get_submodule(n)), torch.float32).float() for n in (*_READ, *_PLAIN, *_ADD)}
        norms = (last.input_layernorm, last.post_attention_layernorm, base.norm)
    except AttributeError:
        return False
    layer: Any = head.layer
    own: dict[str, Tensor] = {n: layer.get_submodule(n).weight for n in matrices}
    fits = all(tuple(m.shape) == (len(own[n]), width if n in _READ else own[n].shape[1]) for n, m in matrices.items())
    if not fits or not config.fc_norm or config.target_hidden_size != width or type(norms[0]).__name__ not in _NORMS:
        return False
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)
    for name, matrix in matrices.items():
        if name in _READ:
            own[name][:, width:] = matrix
            own[name][:, :width] *= 0.5
        else:
            own[name].copy_(matrix / size if name in _ADD else matrix)
    own_norms = (head.layer.hidden_norm, head.layer.post_attention_layernorm, head.norm)
    for norm, theirs in zip(own_norms, norms, strict=True):
        norm.weight.copy_(theirs.weight)
    return True


def unrolled(head: Eagle, tokens: Tensor, features: Tensor, anchors: Tensor, steps: int) -> Iterator[Tensor]:
    """The logits [batch, anchor, draft_vocab] of step 0, 1, ...: step k at anchor t is about token t + 2 + k.

    Until then the head reads the text's own tokens, and from step 1 on its own output in place of the target's features. A
    later step at t sees the first step's keys up to t and those of its own steps, not those of its neighbours' steps.
    tokens: int64 [batch, n]. features: [batch, n, taps * hidden]. anchors: int64 [batch, anchor], 0 to n - 2 - steps.
    """
    count = tokens.shape[1] - 1
    x, residual = head.pairs(tokens[:, 1:], head.fuse(features[:, :count]))
    places = torch.arange(count, device=tokens.device)
    seen = head.keys_values(x, places)
    mask = (places <= anchors[..., None])[:, None]
    own = torch.eye(anchors.shape[1], dtype=torch.bool, device=tokens.device).expand(*mask.shape[:3], -1)
    y = head.attended(_at(x, anchors), _at(residual, anchors), anchors, seen, mask)
    yield head.logits(y)
    for step in range(1, steps):
        x, residual = head.pairs(tokens.gather(1, anchors + step + 1), head.feedback(y))
        seen = seen.then(head.keys_values(x, anchors + step))
        mask = torch.cat([mask, own], -1)
        y = head.attended(x, residual, anchors + step, seen, mask)
        yield head.logits(y)


def _at(x: Tensor, anchors: Tensor) -> Tensor:
    """The rows of [batch, n, width] at the anchors."""
    return x.gather(1, anchors[..., None].expand(-1, -1, x.shape[-1]))
