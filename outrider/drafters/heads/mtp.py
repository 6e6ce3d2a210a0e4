"""MTP: the layer of a checkpoint that predicts one token further (DeepSeek-V3, arXiv 2412.19437, section 2.2), as a drafter.

It reads pairs as an EAGLE head does: a token's embedding and the target's state before it, both normed, side by side. Then come
one layer of the target's own kind, a norm, and an output head. DeepSeek-V3, GLM-4.5 and their like keep it behind their last
layer (`model.layers.N`), Qwen3-Next and Qwen3.5 under `mtp`. transformers leaves it out when it loads the model.

The layer is run as a model of one layer by the target's own modelling code, over the target's embedding. A checkpoint with
several such layers is read too; the first of them drafts all tokens.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.drafters.config import DrafterSetup
from outrider.drafters.heads.eagle.drafter import EagleDrafter
from outrider.drafters.heads.features import HeadOutput, PairModel
from outrider.models.base import FINAL_NORM, LanguageModel, Want
from outrider.models.cache import SlotCache
from outrider.models.checkpoint import header, indexed
from outrider.models.hf.model import HFModel
from outrider.models.load import Loaded
from outrider.models.nodes import Nodes

# A checkpoint's name below the layer's prefix -> (the name in a model of one layer, or in `_Join`).
_BEHIND = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "fc", "shared_head.norm": "norm", "shared_head.head": "head"}
_APART = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "fc", "norm": "norm"}
_PRE_NORM = ("glm4_moe",)  # model types that feed back the state before the last norm, as vLLM runs them
_UNREAD = ("embed_tokens.weight", "rotary_emb.inv_freq")  # the target's own


class MtpWeights:
    """The first MTP layer of a checkpoint. join: enorm, hnorm, fc, norm and perhaps head. layer: by the names of a decoder layer.

    Raises ValueError, naming the folder, if there is none or its tensors are of a kind that is not known.
    """

    def __init__(self, target: Loaded) -> None:
        self.folder = _folder(target)
        text = target.config.get_text_config()
        found = _mtp_names(self.folder, int(text.num_hidden_layers))
        if not found:
            raise ValueError(
                f"{target.name} has no MTP layers: {self.folder} holds no tensor of model.layers.{text.num_hidden_layers} or mtp"
            )
        if getattr(text, "mtp_hidden_states_first", False):
            raise ValueError(
                f"the MTP layers of a {text.model_type} read the state before the token, which outrider does not"
            )
        names = _APART if any(n.startswith("fc.") for n in found) else _BEHIND
        self.join: dict[str, Tensor] = {}
        self.layer: dict[str, Tensor] = {}
        for short, tensor in _tensors(found).items():
            stem, own = short.rsplit(".", 1)[0], short.removeprefix("layers.0.")
            if stem in names:
                self.join[names[stem]] = tensor
            elif short not in _UNREAD and (names is _BEHIND or own != short):
                self.layer[own] = tensor
        lacking = [theirs for theirs, ours in names.items() if ours not in {*self.join, "head"}]
        if lacking:
            raise ValueError(
                f"the MTP layer in {self.folder} lacks {lacking[0]}; outrider knows those of DeepSeek-V3, GLM-4.5, Qwen3-Next "
                f"and their like, and this is a {text.model_type}"
            )


class MtpModel(PairModel):
    """An MTP layer as `EagleDrafter` reads a head. Cell t of a slot holds the keys and values of the pair (x_{t+1}, h_t)."""

    def __init__(self, weights: MtpWeights, target: Loaded, max_length: int, quantization: str = "auto") -> None:
        model = target.model
        self.taps, self.device, self.vocab_size = (FINAL_NORM,), model.device, model.vocab_size
        raw = _one_layer(weights, target)
        norm = cast("nn.Module", cast("Any", raw).model.norm)
        self._join = _Join(weights, norm, model)
        raw.set_input_embeddings(self._join)
        raw.set_output_embeddings(_own_head(weights.join["head"]) if "head" in weights.join else _TargetHead(model))
        raw.to(self.device)  # pyright: ignore[reportArgumentType]
        given = target.weights if quantization in ("auto", "none") else quantization
        self._model = HFModel(raw, weights=given if given in ("int8", "int4") else "auto", own=True)
        text = target.config.get_text_config()
        self._fed_back = 0 if text.model_type in _PRE_NORM else FINAL_NORM
        self.max_length = min(max_length, self._model.max_length)
        self.weight_bytes = self._model.weight_bytes + (0 if "head" in weights.join else model.head_bytes)

    def new_cache(self, num_slots: int, max_length: int) -> SlotCache:
        return self._model.new_cache(num_slots, min(max_length, self.max_length))

    def forward(
        self, nodes: Nodes, features: Tensor | None = None, *, g: Tensor | None = None, want: Want = "all"
    ) -> HeadOutput:
        self._join.states = features if features is not None else g
        try:
            out = self._model.forward(nodes, taps=(self._fed_back,), want=want)
        finally:
            self._join.states = None
        assert out.features is not None
        fed_back = out.features.float()
        if want == "last":
            fed_back = fed_back[torch.arange(len(nodes.slots)), nodes.last][:, None]
        return HeadOutput(out.logits, fed_back[:, :0] if want == "none" else fed_back)


class _Join(nn.Module):
    """Takes the place of the embedding: token ids -> W [norm(E[x]) ; norm(h)], with the states of the call.

    states: float [batch, node, hidden]; None for zeros.
    """

    def __init__(self, weights: MtpWeights, norm: nn.Module, target: LanguageModel) -> None:
        super().__init__()
        self.states: Tensor | None = None
        self._embed = target.embedding_rows
        given = weights.join
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        size, width = given["fc"].shape
        self.fc = nn.Linear(width, size, bias=False, dtype=given["fc"].dtype)
        self.load_state_dict({f"{n}.weight": given[n] for n in ("enorm", "hnorm", "fc")})

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self._embed(tokens).to(cast("Tensor", self.enorm.weight).dtype)
        states = torch.zeros_like(embedded) if self.states is None else self.states.to(embedded)
        return self.fc(torch.cat([self.enorm(embedded), self.hnorm(states)], -1))


def _own_head(weight: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


class _TargetHead(nn.Module):
    """The target's output head, over its own memory."""

    def __init__(self, target: LanguageModel) -> None:
        super().__init__()
        self.weight = torch.empty(target.vocab_size, 0)  # its rows are the tokens
        self._read = target.output_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self._read(hidden)


def has_mtp(target: Loaded) -> bool:
    """Whether the target's checkpoint holds an MTP layer, and its forwards give what the layer reads."""
    config = target.config
    text = None if config is None else config.get_text_config()
    if text is None or not any(getattr(text, name, 0) for name in ("num_mtp_layers", "mtp_num_hidden_layers")):
        return False
    try:
        return bool(_mtp_names(_folder(target), int(text.num_hidden_layers)))
    except ValueError:
        return False


def from_setup(setup: DrafterSetup) -> EagleDrafter:
    """Raises ValueError if the target's checkpoint holds no MTP layer that can be run."""
    if setup.config.model is not None:
        raise ValueError(
            f'MTP layers are part of the target\'s own checkpoint, so leave out "model": "{setup.config.model}"'
        )
    target = setup.target
    model = MtpModel(MtpWeights(target), target, setup.max_length, setup.config.quantization)
    return EagleDrafter(model, setup.rows, setup.max_length)


def _folder(target: Loaded) -> Path:
    """The folder of the target's checkpoint. Raises ValueError if it is none with safetensors."""
    named = target.source if isinstance(target.source, (str, Path)) else getattr(target.config, "_name_or_path", "")
    path = Path(named).expanduser()
    if named and not path.exists() and str(named).count("/") == 1:
        cached = try_to_load_from_cache(str(named), "config.json")
        path = Path(cached).parent if isinstance(cached, str) else path
    if not named or not path.is_dir() or not any(path.glob("*.safetensors")):
        raise ValueError(
            f"MTP layers are read from a checkpoint's folder of safetensors, and {target.name} was not loaded from one; "
            "give the folder: -m FOLDER"
        )
    return path


def _mtp_names(folder: Path, layers: int) -> dict[str, tuple[Path, str]]:
    """Name below the prefix of the first MTP layer -> (its file, its name there)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = indexed(index)
    else:
        where = {n: file for file in sorted(folder.glob("*.safetensors")) for n in header(file)[0]}
    prefix = re.compile(rf"(?:.*\.)?(?:layers\.{layers}|mtp)\.(?!layers\.[1-9])(.+)")
    return {m[1]: (file, n) for n, file in where.items() if (m := prefix.fullmatch(n))}


def _tensors(names: Mapping[str, tuple[Path, str]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted({file for file, _ in names.values()}):
        if not file.is_file():
            raise ValueError(f"{file} is not there, and it holds MTP layers; the download is incomplete")
        with safe_open(file, framework="pt") as opened:
            found |= {short: opened.get_tensor(name) for short, (own, name) in names.items() if own == file}
    return found


def _one_layer(weights: MtpWeights, target: Loaded) -> PreTrainedModel:
    """A model of the target's class whose only layer is the MTP layer. Its embedding and output head are to be set."""
    config = copy.deepcopy(target.config.get_text_config())
    config.num_hidden_layers = 1
    config.tie_word_embeddings, config.pad_token_id, vocab = False, None, config.vocab_size
    config.vocab_size = 1
    for name, value in {
        "first_k_dense_replace": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse"],
    }.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    known: Any = AutoModelForCausalLM._model_mapping  # pyright: ignore[reportAttributeAccessIssue]
    kind = known[type(config)]
    state = {f"model.layers.0.{n}": t for n, t in weights.layer.items()}
    state["model.norm.weight"] = weights.join["norm"]
    state |= {f"{n}.weight": torch.zeros(1, config.hidden_size) for n in ("model.embed_tokens", "lm_head")}
    fits = f"is that of another model than {target.name}, or not whole"
    try:
        raw, info = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=weights.join["fc"].dtype, output_loading_info=True
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"the MTP layer in {weights.folder} {fits}: {error}") from error
    for what, names in (("lacks", info["missing_keys"]), ("also holds", info["unexpected_keys"])):
        if wrong := sorted(names):
            own = wrong[0].removeprefix("model.layers.0.")
            raise ValueError(f"the MTP layer in {weights.folder} {what} {own}; it {fits}")
    config.vocab_size = vocab
    raw._is_stateful = False  # its layer is attention, also where the target has others
    return raw
