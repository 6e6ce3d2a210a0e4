"""What a head is before its training: as much of its target as it can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.drafters.heads.eagle.module import Eagle, EagleConfig
from outrider.drafters.heads.reading import HeadWeights
from outrider.models.load import Loaded, modules
from outrider.models.matrix import dense, matrix_of
from outrider.train.teacher import Teacher

_READ = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # in a head these read the token too
_PLAIN = ("mlp.gate_proj", "mlp.up_proj")
_ADD = ("self_attn.o_proj", "mlp.down_proj")
# The norms that a copied layer can have: those of models with (1 + weight), as Gemma's, are others.
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


def new_head(
    loaded: Loaded, teacher: Teacher, config: EagleConfig, token_ids: Tensor, seed: int, sample: Tensor
) -> Eagle:
    """A head at the beginning of its training. Its embedding and output head are the target's, and are not trained.

    The layer begins as the target's last layer (`copy_last_layer_`). Where that is of another kind, the layer adds nothing
    at first.
    sample: int64 [batch, n], texts of the target.
    """
    torch.manual_seed(seed)
    head = Eagle(config, token_ids).initialise_(teacher.embedding().cpu(), teacher.output().cpu())
    head.lm_head.requires_grad_(False)
    high = teacher.read(sample).features[..., -config.target_hidden_size :]
    copy_last_layer_(head, modules(loaded), float(high.pow(2).mean(-1).sqrt().median()))
    return head.to(teacher.device)


def continued_head(given: HeadWeights[EagleConfig], teacher: Teacher) -> Eagle:
    """A head that was read from a folder, to be trained further. Its embedding and output head stay as they are.

    Raises ValueError for a head of EAGLE-1.
    """
    if given.config.eagle1:
        raise ValueError("heads of EAGLE-1 are not trained here; leave out --from, and an EAGLE-3 head is trained")
    head = Eagle.of(given, teacher.embedding().cpu())
    head.lm_head.requires_grad_(False)
    return head.to(teacher.device)


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
