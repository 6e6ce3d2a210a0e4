"""Reads the MTP layer of a checkpoint: the layer that predicts one token further (`models.native.mtp`).

DeepSeek-V3, GLM-4.5 and their like keep it behind their last layer (`model.layers.N`), Qwen3-Next and Qwen3.5 under `mtp`.
transformers leaves it out when it loads the model. Of several such layers the first one is read.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.models.checkpoint import header, indexed
from outrider.models.native.families import family_of
from outrider.models.native.mtp import JOIN, MTP, changes

# A checkpoint's name below the layer's prefix -> (the name in a model of one layer, or in `JOIN`).
_BEHIND = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
}
_APART = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "fc", "norm": "norm"}
_UNREAD = ("embed_tokens.weight", "rotary_emb.inv_freq")  # the target's own
_NUMBERS = ("num_mtp_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers")


def add_(model: PreTrainedModel, read: Callable[[], PreTrainedModel | None]) -> None:
    """Give a model that the native step runs the MTP layer of its checkpoint. Warns if it is there and cannot be run."""
    if family_of(type(model).__name__) is None:
        return
    try:
        if (layer := read()) is None:
            return
        model.add_module(MTP, layer)
    except ValueError as error:
        warnings.warn(
            f"the MTP layer of {model.config._name_or_path} cannot draft: {error}", RuntimeWarning, stacklevel=4
        )


def tensors_of(name: str, config: Any) -> dict[str, tuple[Path, str]]:
    """The tensors of the first MTP layer of a checkpoint: the name below its prefix -> (the file, the name there). Empty if it is
    not here, or has none."""
    text, folder = config.get_text_config(), _folder(name)
    if folder is None or not any(getattr(text, number, 0) for number in _NUMBERS):
        return {}
    return _names(folder, int(text.num_hidden_layers))


def of_folder(name: str, config: Any) -> PreTrainedModel | None:
    """The layer as a model of one layer, with the modules of `JOIN`. None for a checkpoint without one. Its embedding is that of
    the whole model, and so is its output head unless it has its own.

    name: the folder, or its name on the hub. Raises ValueError for a layer of a kind that is not known, or not whole."""
    text = config.get_text_config()
    if not (places := tensors_of(name, config)):
        return None
    if getattr(text, "mtp_hidden_states_first", False):
        raise ValueError(f"that of a {text.model_type} reads the state before the token, which outrider does not")
    names = _APART if any(n.startswith("fc.") for n in places) else _BEHIND
    join, layer = dict[str, Tensor](), dict[str, Tensor]()
    for short, tensor in _tensors(places).items():
        stem, inner = short.rsplit(".", 1)[0], short.removeprefix("layers.0.")
        if stem in names:
            join[names[stem]] = tensor
        elif short not in _UNREAD and (names is _BEHIND or inner != short):
            layer[inner] = tensor
    lacking = [theirs for theirs, ours in names.items() if ours not in {*join, "lm_head"}]
    if lacking:
        raise ValueError(
            f"it lacks {lacking[0]}; outrider knows the layers of DeepSeek-V3, GLM-4.5, Qwen3-Next and their like, and "
            f"this is a {text.model_type}"
        )
    state = {f"model.layers.0.{n}": t for n, t in layer.items()} | {"model.norm.weight": join["norm"]}
    model = _of_tensors(config, state, join["fc"].dtype)
    whole = joined_(model, own_head="lm_head" in join)
    for name, module in whole.named_children():
        if name in join:
            cast("Any", module).weight = nn.Parameter(join[name], requires_grad=False)
    return whole


def one_layer(config: Any) -> Any:
    """The configuration of a model whose only layer is the MTP layer."""
    small = copy.deepcopy(config.get_text_config())
    small.update(changes(small) | {"tie_word_embeddings": False, "pad_token_id": None})
    return small


def joined_(model: PreTrainedModel, own_head: bool) -> PreTrainedModel:
    """A model of one layer with the modules of `JOIN`, on "meta", and without an embedding."""
    base: Any = model.base_model
    size = model.config.hidden_size
    for name in JOIN[:2]:
        model.add_module(name, copy.deepcopy(base.norm))
    model.add_module(JOIN[2], nn.Linear(2 * size, size, bias=False, device="meta"))
    base.embed_tokens = None
    if not own_head:
        model.lm_head = None  # pyright: ignore[reportAttributeAccessIssue]
    return model


def _folder(name: str) -> Path | None:
    """The folder of a checkpoint; None if it is not here, or has no safetensors."""
    path = Path(name).expanduser()
    if name and not path.exists() and name.count("/") == 1:
        cached = try_to_load_from_cache(name, "config.json")
        path = Path(cached).parent if isinstance(cached, str) else path
    return path if name and path.is_dir() and any(path.glob("*.safetensors")) else None


def _names(folder: Path, layers: int) -> dict[str, tuple[Path, str]]:
    """Name below the prefix of the first MTP layer -> (its file, its name there)."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = indexed(index)
    else:
        where = {n: file for file in sorted(folder.glob("*.safetensors")) for n in header(file)[0]}
    prefix = re.compile(rf"(?:.*\.)?(?:layers\.{layers}|mtp)\.(?!layers\.[1-9])(.+)")
    return {m[1]: (file, n) for n, file in where.items() if (m := prefix.fullmatch(n))}


def _tensors(names: Mapping[str, tuple[Path, str]]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted({file for file, _ in names.values()}):
        if not file.is_file():
            raise ValueError(f"{file} is not there, and it holds MTP layers; the download is incomplete")
        with safe_open(file, framework="pt") as opened:
            tensors |= {short: opened.get_tensor(name) for short, (path, name) in names.items() if path == file}
    return tensors


def _of_tensors(config: Any, state: dict[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """A model of the target's class with one layer, of these tensors."""
    small, classes = one_layer(config), cast("Any", AutoModelForCausalLM)._model_mapping
    vocab = small.vocab_size
    small.update({"vocab_size": 1})
    state |= {f"{n}.weight": torch.zeros(1, small.hidden_size) for n in ("model.embed_tokens", "lm_head")}
    fits = "is that of another model, or not whole"
    try:
        model, info = classes[type(small)].from_pretrained(
            None, config=small, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"it {fits}: {error}") from error
    for what, names in (("lacks", info["missing_keys"]), ("also holds", info["unexpected_keys"])):
        if wrong := sorted(names):
            short = wrong[0].removeprefix("model.layers.0.")
            raise ValueError(f"it {what} {short}; it {fits}")
    small.update({"vocab_size": vocab})
    return model
