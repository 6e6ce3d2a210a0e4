"""The kinds of heads that are trained: how each begins, and how one that exists goes on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.heads.block import BlockConfig, read_block
from outrider.drafters.heads.config import default_taps
from outrider.drafters.heads.eagle import EagleConfig, read_eagle
from outrider.drafters.heads.files import DFLASH, DSPARK, EAGLE3, MEDUSA, open_head
from outrider.drafters.heads.medusa import MedusaWeights, read_medusa
from outrider.drafters.heads.reading import HeadWeights
from outrider.models.load import Loaded, tensors
from outrider.models.matrix import dense
from outrider.models.native.weights import Tensors
from outrider_lab.heads.modules import BlockModule, Eagle, MedusaModule, config_for
from outrider_lab.heads.writers import write_block, write_eagle, write_medusa
from outrider_lab.train.answers import TrainingText
from outrider_lab.train.batches import Batch, batch_of, draw_anchors
from outrider_lab.train.method import Beginning, TrainedHead
from outrider_lab.train.teacher import Taught, Teacher

LAYERS, DRAFTS = 2, 6  # on a processor a block of six costs hardly more than one token, and few texts reach a seventh
MARKOV = 64, 256  # least and most numbers of the bias by a token; in between, a quarter of the hidden size


class TrainedBlock(TrainedHead):
    """A block drafter, DFlash or DSpark, with its blocks at anchors of a text. Weights of later tokens as in DeepSpec."""

    module: BlockModule
    decay = math.exp(-1 / 4)
    share = 0.125  # a block has as many output rows as it has drafts

    def __init__(self, module: BlockModule, teacher: Teacher, before: HeadWeights[BlockConfig] | None = None) -> None:
        super().__init__(module, teacher, module.token_ids, module.config.drafts)
        self._before = before

    def drafts(self, tokens: Tensor, taught: Taught, anchors: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        return self.module.drafts(tokens, taught.features, anchors)

    def write(self, folder: Path) -> None:
        write_block(folder, self.module.weights(self._before))

    def decisions(self) -> dict[str, Any]:
        return {"mask_token_id": self.module.config.mask_token_id}


def new_block(start: Beginning) -> TrainedBlock:
    """A drafter of two layers whose draft tokens are random at first. The method says whether it is a DSpark one."""
    loaded, ids, dspark = start.loaded, start.token_ids, start.method == "dspark"
    if start.decisions is None:
        mask = mask_token(start.answers, loaded.model.vocab_size, loaded.tokenizer, loaded.end_ids)
    else:
        mask = int(start.decisions["mask_token_id"])
    least, most, width = *MARKOV, loaded.config.get_text_config().hidden_size
    config = config_for(
        BlockConfig,
        loaded.config,
        draft_vocab_size=len(ids),
        verifier=start.verifier,
        num_layers=LAYERS,
        block_size=DRAFTS if dspark else DRAFTS + 1,
        mask_token_id=mask,
        from_anchor=dspark,
        markov_rank=min(most, max(least, width // 4)) if dspark else 0,
        confidence=dspark,
        confidence_markov=dspark,
    )
    teacher = Teacher(loaded, config.taps)
    torch.manual_seed(start.seed)
    output = teacher.output(ids).cpu()
    module = BlockModule(config, ids, teacher.embedding().cpu(), output).initialise_()
    return TrainedBlock(module, teacher)


def continued_block(weights: HeadWeights[BlockConfig], start: Beginning) -> TrainedBlock:
    """A drafter that was read. Raises ValueError for one with an embedding of its own, which could not be written."""
    if "embed_tokens.weight" in weights.tensors:
        raise ValueError("a drafter with an embedding of its own is not trained here; leave out --from")
    teacher = Teacher(start.loaded, weights.config.taps)
    output = teacher.output(torch.from_numpy(weights.token_ids)).cpu()
    return TrainedBlock(BlockModule.of(weights, teacher.embedding().cpu(), output), teacher, weights)


def mask_token(answers: Sequence[TrainingText], vocab_size: int, tokenizer: Any, ends: Sequence[int] = ()) -> int:
    """The token of a block's open places: one with an embedding that no text uses.

    That is a row beyond the tokenizer's tokens if there is one. Else it is a special token that no answer holds, else the
    highest token that no answer holds, else the rarest one.
    """
    if tokenizer is not None and len(tokenizer) < vocab_size:
        return vocab_size - 1
    counts = Counter(t for a in answers for t in a.tokens)
    special = [] if tokenizer is None else sorted(tokenizer.all_special_ids)
    unused = [t for t in [*range(vocab_size), *special] if not counts[t] and t not in ends]
    return unused[-1] if unused else min(range(vocab_size), key=lambda t: (counts[t], -t))


STEPS = 4  # of the unroll; drafts on a CPU are seldom longer
_READ = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")  # in a head these read the token too
_PLAIN = ("mlp.gate_proj", "mlp.up_proj")
_ADD = ("self_attn.o_proj", "mlp.down_proj")
# The norms that a copied layer can have: those of models with (1 + weight), as Gemma's, are others.
_KINDS = ("llama", "mistral", "qwen2", "qwen3")  # model types whose last layer is one of a head


class TrainedEagle(TrainedHead):
    """An EAGLE-3 or EAGLE-3.1 head: EAGLE's training-time test at sampled positions.

    The head drafts on from them as it will while it drafts (Li et al. 2025). The keys and values of the first step are computed
    at every position. All else is computed at the anchors only: queries, the MLP, the output head, and the later steps. That
    saves most of the cost, and neighbouring positions teach nearly the same.
    """

    module: Eagle

    def __init__(self, module: Eagle, teacher: Teacher, token_ids: Tensor, *, own_embedding: bool = False) -> None:
        super().__init__(module, teacher, token_ids, STEPS)
        module.lm_head.requires_grad_(False)  # it and the embedding stay the target's
        self._own_embedding = own_embedding

    def drafts(self, tokens: Tensor, taught: Taught, anchors: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        return ((logits, None) for logits in unrolled(self.module, tokens, taught.features, anchors, self.depth))

    def write(self, folder: Path) -> None:
        write_eagle(folder, self.module.weights(embedding=self._own_embedding))


def new_eagle(start: Beginning) -> TrainedEagle:
    """An EAGLE-3.1 head. Its layer begins as its target's last one (`copy_last_layer_`). Where that is of another kind, the layer
    adds nothing at first."""
    loaded, ids = start.loaded, start.token_ids
    config = config_for(
        EagleConfig, loaded.config, draft_vocab_size=len(ids), fc_norm=True, norm_output=True, verifier=start.verifier
    )
    teacher = Teacher(loaded, config.taps)
    torch.manual_seed(start.seed)
    head = Eagle(config, ids).initialise_(teacher.embedding().cpu(), teacher.output().cpu())
    batch = batch_of(start.answers[:4])
    features = teacher.read(batch.tokens).features
    high = features[..., -config.target_hidden_size :]
    copy_last_layer_(head, tensors(loaded), loaded.config, float(high.pow(2).mean(-1).sqrt().median()))
    if 0 < start.intermediate_size < config.intermediate_size:
        head = narrowed(head, start.intermediate_size, batch, features.cpu())
    return TrainedEagle(head, teacher, ids)


@torch.no_grad()
def narrowed(head: Eagle, neurons: int, batch: Batch, features: Tensor) -> Eagle:
    """A head with the neurons of the MLP whose outputs are largest on some texts: mean square, over the answers.

    features: [batch, n, taps * hidden]. A head reads an MLP of 8,960 neurons for each draft token, and learns it.
    """
    mlp, outputs = head.layer.mlp, list[Tensor]()
    hook = mlp.down_proj.register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    anchors = draw_anchors(batch, 1, 1.0, torch.Generator())
    list(unrolled(head, batch.tokens, features, anchors.at, 1))
    hook.remove()
    sizes = outputs[0][anchors.valid].pow(2).mean(0) * mlp.down_proj.weight.pow(2).sum(0)
    best = sizes.topk(neurons).indices.sort().values
    narrow = Eagle(replace(head.config, intermediate_size=neurons), head.token_ids)
    state = head.state_dict()
    rows = {name: state[name][best] for name in (f"layers.0.{plain}.weight" for plain in _PLAIN)}
    down = "layers.0.mlp.down_proj.weight"
    narrow.load_state_dict(state | rows | {down: state[down][:, best]})
    return narrow


def continued_eagle(weights: HeadWeights[EagleConfig], start: Beginning) -> TrainedEagle:
    """A head that was read. Raises ValueError for one of EAGLE-1."""
    if weights.config.eagle1:
        raise ValueError("heads of EAGLE-1 are not trained here; leave out --from, and an EAGLE-3 head is trained")
    teacher = Teacher(start.loaded, weights.config.taps)
    head = Eagle.of(weights, teacher.embedding().cpu())
    return TrainedEagle(head, teacher, head.token_ids, own_embedding=weights.own_embedding is not None)


@torch.no_grad()
def copy_last_layer_(head: Eagle, target: Tensors, settings: Any, size: float) -> bool:
    """Give a head with a norm for each feature the target's last layer and last norm, over the last feature alone.

    Returns whether it could: the target's last layer must be Llama's, of the head's shape. settings: the target's. size: root
    mean square of that feature. The head reads the feature divided by it, so what the layer adds is divided by it too.
    """
    width, config = head.config.hidden_size, head.config
    if settings.model_type not in _KINDS:
        return False
    last = f"model.layers.{settings.num_hidden_layers - 1}"

    def numbers(name: str) -> Tensor:
        return torch.from_numpy(np.array(dense(target.get(f"{name}.weight"))))

    matrices = {n: numbers(f"{last}.{n}") for n in (*_READ, *_PLAIN, *_ADD)}
    layer: Any = head.layer
    weights: dict[str, Tensor] = {n: layer.get_submodule(n).weight for n in matrices}
    fits = all(
        tuple(m.shape) == (len(weights[n]), width if n in _READ else weights[n].shape[1]) for n, m in matrices.items()
    )
    if not fits or not config.fc_norm or config.target_hidden_size != width:
        return False
    head.fc.weight.zero_()
    head.fc.weight[:, -width:] = torch.eye(width)
    for name, matrix in matrices.items():
        if name in _READ:
            weights[name][:, width:] = matrix
            weights[name][:, :width] *= 0.5
        else:
            weights[name].copy_(matrix / size if name in _ADD else matrix)
    head.layer.hidden_norm.weight.copy_(numbers(f"{last}.input_layernorm"))
    head.layer.post_attention_layernorm.weight.copy_(numbers(f"{last}.post_attention_layernorm"))
    head.norm.weight.copy_(numbers("model.norm"))
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
    diagonal = torch.eye(anchors.shape[1], dtype=torch.bool, device=tokens.device).expand(*mask.shape[:3], -1)
    y = head.attended(_at(x, anchors), _at(residual, anchors), anchors, seen, mask)
    yield head.logits(y)
    for step in range(1, steps):
        x, residual = head.pairs(tokens.gather(1, anchors + step + 1), head.feedback(y))
        seen = seen.then(head.keys_values(x, anchors + step))
        mask = torch.cat([mask, diagonal], -1)
        y = head.attended(x, residual, anchors + step, seen, mask)
        yield head.logits(y)


def _at(x: Tensor, anchors: Tensor) -> Tensor:
    """The rows of [batch, n, width] at the anchors."""
    return x.gather(1, anchors[..., None].expand(-1, -1, x.shape[-1]))


HEADS, BLOCKS = 4, 1  # of Medusa


class TrainedMedusa(TrainedHead):
    """Medusa heads. Head k predicts the token after k that the text has not shown yet, so later ones are right less often."""

    module: MedusaModule

    def __init__(self, weights: MedusaWeights, start: Beginning) -> None:
        teacher = Teacher(start.loaded, ())
        ids = torch.arange(teacher.vocab_size) if weights.token_ids is None else torch.from_numpy(weights.token_ids)
        rows = torch.empty(0) if weights.outputs else teacher.output().cpu()
        super().__init__(MedusaModule(weights, rows), teacher, ids, len(weights.blocks))
        self._verifier = start.verifier

    def drafts(self, tokens: Tensor, taught: Taught, anchors: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        hidden = taught.last.gather(1, anchors[..., None].expand(-1, -1, taught.last.shape[-1]))
        for head in range(self.depth):
            yield self.module.logits(hidden, head), None

    def write(self, folder: Path) -> None:
        weights = self.module.weights()
        write_medusa(folder, weights, "vllm" if weights.outputs else "tgi", verifier=self._verifier)


def new_medusa(start: Beginning) -> TrainedMedusa:
    """Heads that say at first what the target would say next (the paper's beginning: all blocks are zero)."""
    teacher = Teacher(start.loaded, ())
    size, ids = teacher.hidden, start.token_ids
    empty = np.zeros((size, size), np.float32), np.zeros(size, np.float32)
    subset, output = None if len(ids) == teacher.vocab_size else ids.numpy(), teacher.output(ids).cpu().numpy()
    weights = MedusaWeights([[empty] * BLOCKS] * HEADS, [output], subset, teacher.vocab_size, teacher.scale)
    return TrainedMedusa(weights, start)


@dataclass(frozen=True)
class _Kind:
    """read: a folder, for a target. new, going_on: a head in training."""

    read: Callable[..., Any]
    new: Callable[[Beginning], TrainedHead]
    going_on: Callable[..., TrainedHead]


_BLOCK = _Kind(read_block, new_block, continued_block)
METHODS = {
    EAGLE3: _Kind(read_eagle, new_eagle, continued_eagle),
    MEDUSA: _Kind(read_medusa, new_medusa, TrainedMedusa),
    DFLASH: _BLOCK,
    DSPARK: _BLOCK,
}


def head_to_begin_with(method: str, folder: str, target: Loaded) -> Any:
    """The head of a folder. Raises ValueError for one that is damaged, of another kind, or of another target."""
    opened = open_head(folder)
    if opened.kind != method:
        raise ValueError(
            f"{opened.path} is a head of the kind {opened.kind!r}, and this run trains {method!r}; write: outrider train "
            f"{opened.kind if opened.kind in METHODS else EAGLE3} -m {target.name} -o HEAD --from {folder}, or leave out --from"
        )
    return METHODS[method].read(opened.path, target)


def taps_of(method: str, folder: str | None, target: Loaded) -> tuple[int, ...]:
    """The layers that a head reads in training. folder: of the head to begin with, None for a new one."""
    if method == MEDUSA:
        return ()
    if folder:
        return head_to_begin_with(method, folder, target).config.taps
    return default_taps(target.config.get_text_config().num_hidden_layers)


def start_head(start: Beginning, weights: Any = None) -> TrainedHead:
    """A new head, or `given` in training. Raises ValueError for a target that cannot teach one."""
    kind = METHODS[start.method]
    if weights is None:
        return kind.new(start)
    ids = weights.token_ids
    ids = torch.arange(start.loaded.model.vocab_size) if ids is None else torch.from_numpy(ids)
    return kind.going_on(weights, replace(start, token_ids=ids))
