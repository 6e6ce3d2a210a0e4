"""Models and tokenizers that transformers makes: from a folder, the hub, a GGUF file, or a built-in name.

A start from a pack of the native step needs nothing of this, and so it does not import it.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import set_tqdm_hook

from outrider.core.files import read_settings
from outrider.core.suggest import did_you_mean
from outrider.models import checkpoint, precision_gate
from outrider.models.base import LanguageModel
from outrider.models.checkpoint import LoadRequest, ReadModel, token_ids
from outrider.models.config import TEXT_KINDS
from outrider.models.dtypes import DTYPES
from outrider.models.hf.experts import mixtures
from outrider.models.hf.model import HFModel, UnsupportedModel, refuse, shared_copy, vocabulary
from outrider.models.hf.powers import ExactPowers
from outrider.models.hf.skeleton import module_of, skeleton_of
from outrider.models.hf.tensors import ModuleTensors, config_for
from outrider.models.native.weights import Tensors
from outrider.models.quantised.reader import QuantisedTensors
from outrider.models.safetensors import FolderTensors
from outrider.models.tokenizer import tokenizer_of

# A table of the tensors that are not read, such as those for images. `check_whole` says what is missing.
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())
SMALL = 2**24  # weights that a configuration may ask for beside those of its files, such as buffers


@precision_gate.making()
def runnable(
    raw: PreTrainedModel, own: bool, where: str, weights: str, kv_cache_dtype: str, head_ids: Any
) -> LanguageModel:
    """The model by the modelling code of transformers. own: change `raw` in place."""
    if not own:  # the caller's model must not be moved or converted
        raw = shared_copy(raw)
    raw.eval()
    if where == "cpu":
        raw.to(where)  # pyright: ignore[reportArgumentType]
    else:
        raw.to(where, getattr(torch, weights))  # pyright: ignore[reportArgumentType, reportCallIssue]
        weights = "auto"
    return HFModel(raw, weights=weights, own=True, kv_cache_dtype=kv_cache_dtype, head_ids=head_ids)


@precision_gate.making()
def modules_of(tensors: Tensors, config: Any, weights: str) -> PreTrainedModel:
    """A model of transformers of these tensors. weights: the precision of its matrices; quantised ones begin as float32."""
    if type(tensors) is FolderTensors:  # transformers reads it, and says what is wrong
        request = LoadRequest(tensors.name, tensors.floats, tokenizer=False)
        return read_folder(request, str(tensors.folder)).model.raw  # pyright: ignore[reportAttributeAccessIssue]
    raw = module_of(tensors, config, getattr(torch, weights if weights in DTYPES else "float32"))
    refuse(raw)
    return raw


@contextmanager
def _no_bar_of_weights() -> Iterator[None]:
    """transformers' bar of weights that are read stays off the terminal. Those of downloads show."""

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        return factory(*args, **given | ({"disable": True} if given.get("desc") == "Loading weights" else {}))

    before = set_tqdm_hook(bar)
    try:
        yield
    finally:
        set_tqdm_hook(before)


@precision_gate.making()
@_no_bar_of_weights()
def read_folder(request: LoadRequest, path: str) -> ReadModel:
    """A folder, or a name on the hub. Raises ValueError, MemoryError or UnsupportedModel."""
    config = read_config(request.name, path)
    tokenizer = tokenizer_of(path) if request.tokenizer else None  # before the weights: it may be refused
    if getattr(config, "quantization_config", None):
        raw = _from_quantised(request, path, config)
    else:
        raw, info = _from_floats(request, path, config)
        check_whole(request.name, raw, info)
    _unmap_(raw)
    return read_object(raw, request.quantization, tokenizer)


def read_object(raw: PreTrainedModel, quantization: str | None = None, tokenizer: Any | None = None) -> ReadModel:
    """A model object, as one that was read. Raises UnsupportedModel for a class that cannot run."""
    refuse(raw)
    end = raw.generation_config.eos_token_id if raw.generation_config else None
    ends = token_ids(getattr(raw.config.get_text_config(), "eos_token_id", None) if end is None else end)
    try:
        config: Any = config_for(raw)
    except ValueError:  # no family has it
        config = raw.config
    return ReadModel(ModuleTensors(raw), tokenizer, quantization, ends, config)


def _from_floats(request: LoadRequest, path: str, config: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' report of missing and unexpected tensors."""
    name, folder = request.name, Path(path)
    shell = _shell(name, config)
    if folder.is_dir() and (stored := checkpoint.sizes(name, folder)):
        checkpoint.fits(name, stored, request.weights, request.device)
        _check_sizes(name, shell, stored, checkpoint.shapes(folder))
    try:
        with ExactPowers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                config=config,
                dtype=request.dtype,
                output_loading_info=True,
                trust_remote_code=False,
                key_mapping=checkpoint.TEXT_NAMES,
            )
        return loaded
    except Exception as error:  # each architecture fails in its own way
        raise ValueError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error


def _from_quantised(request: LoadRequest, path: str, config: Any) -> PreTrainedModel:
    """A checkpoint with a `quantization_config`, in floats."""
    name, shell = request.name, _shell(request.name, config)
    here = Path(path).is_dir()
    folder = Path(path if here else snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    stored = QuantisedTensors(name, folder, config, request.dtype)
    checkpoint.fits(name, stored.sizes, request.weights or stored.floats, request.device)
    _check_sizes(name, shell, stored.sizes, {})
    plain = copy.deepcopy(config)
    del plain.quantization_config
    try:
        raw = module_of(stored, plain, getattr(torch, stored.floats))
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ValueError(f"{name} cannot be loaded: {error}") from error
    with suppress(OSError):  # without one, the class's own stays
        raw.generation_config = GenerationConfig.from_pretrained(folder)
    return raw


def _shell(name: str, config: Any) -> PreTrainedModel:
    """The modules of a model that runs here, before its weights are fetched. Raises ValueError or UnsupportedModel."""
    try:
        shell = skeleton_of(config)
    except Exception as error:  # each architecture checks its settings in its own way
        raise ValueError(f"the configuration of {name} makes no model: {type(error).__name__}: {error}") from error
    refuse(shell)
    return shell


def _check_sizes(
    name: str, shell: PreTrainedModel, stored: checkpoint.Sizes, shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise ValueError for a configuration of another model than the weights', before memory is taken for it.

    shapes: of the tensors as stored. Those whose names the model has must have its sizes. transformers renames the others, so
    they are counted only.
    """
    wanted = {n: t.shape for n, t in (*shell.named_parameters(), *shell.named_buffers())}
    if wrong := next((n for n, s in wanted.items() if n in shapes and math.prod(shapes[n]) != s.numel()), None):
        raise ValueError(
            f"{name}: tensor {wrong} is {list(shapes[wrong])} in the weights, and config.json asks for {list(wanted[wrong])}; "
            "one of the two files is of another model"
        )
    asked, held = sum(shape.numel() for shape in wanted.values()), stored.matrices + stored.rest
    if asked > 2 * held + SMALL:
        raise ValueError(f"config.json of {name} asks for {asked} weights, and its files hold {held} at most")


def check_whole(name: str, raw: PreTrainedModel, info: dict[str, Any]) -> None:
    """Raise ValueError if tensors of the model are in no file. info: transformers' report."""
    if missing := sorted(info["missing_keys"]):
        packed = [n for n in sorted(info["unexpected_keys"]) if n.endswith((".qweight", ".weight_packed", "_blocks"))]
        if packed and getattr(raw.config, "quantization_config", None) is None:
            raise ValueError(
                f"{name} has tensor {packed[0]}, so its weights are quantised, and config.json has no quantization_config, which "
                "says how; take config.json from where the weights are from"
            )
        raise ValueError(
            f"the weights of {name} are incomplete: {len(missing)} tensors of a {type(raw).__name__} are in no file, "
            f"{missing[0]} among them. Download it again, or save it again with save_pretrained"
        )


def _unmap_(raw: PreTrainedModel) -> None:
    """Copy the weights that are not repacked out of the mapped file.

    Weights read from safetensors are views of that file. A single view that is left keeps the whole file in memory.
    """
    repacked = {id(m) for m in (*mixtures(raw), *(m for m in raw.modules() if isinstance(m, (nn.Linear, Conv1D))))}
    for module in raw.modules():
        if id(module) not in repacked:
            for p in module.parameters(recurse=False):
                p.data = p.data.clone()


def read_config(name: str, path: str) -> Any:
    """The model's configuration, from a folder or a name on the hub. No code of the model runs.

    Of a model that also reads images or sound, that of its text model.

    Raises ValueError or UnsupportedModel unless it is a causal language model that this transformers knows.
    """
    stored = Path(path, "config.json")
    if stored.exists():
        settings = read_settings(stored)
        kind = settings.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
            code = ", and its own code (trust_remote_code) is not run here" if "auto_map" in settings else ""
            raise ValueError(
                f"{name} has model_type {kind!r} in its config.json, which transformers {transformers.__version__} does "
                f"not know{code}{did_you_mean(str(kind), list(CONFIG_MAPPING))}. A newer transformers may, or load the model "
                "yourself and give the object: LLM(model)"
            )
        checkpoint.check_folder(stored.parent)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # each architecture checks its settings in its own way
        raise ValueError(f"the configuration of {name} cannot be read: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder; outrider runs decoder-only causal language models")
    config = _text(config)
    if type(config) not in AutoModelForCausalLM._model_mapping:  # pyright: ignore[reportOperatorIssue]
        raise UnsupportedModel(f"{name} is a {config.model_type}, of which transformers has no causal language model")
    config._attn_implementation = None  # a repository may name a kernel of the hub here, which is code
    return config


def _text(config: Any) -> Any:
    """The text model's configuration, if transformers has a class for it alone; else the one that is given."""
    text = config.get_text_config()
    if kind := TEXT_KINDS.get(text.model_type):
        values, names = text.to_dict() | {"model_type": kind}, CONFIG_MAPPING[kind]().to_dict()
        values["rope_parameters"] = {k: v for k, v in values["rope_parameters"].items() if not k.startswith("mrope")}
        text = CONFIG_MAPPING[kind].from_dict({k: values[k] for k in names if k in values})
    if type(text) is type(config) or type(text) not in AutoModelForCausalLM._model_mapping:  # pyright: ignore[reportOperatorIssue]
        return config
    text._name_or_path, tied = config._name_or_path, text.tie_word_embeddings or config.tie_word_embeddings
    text.update({"dtype": text.dtype or config.dtype, "tie_word_embeddings": tied})
    if settings := getattr(config, "quantization_config", None):
        text.update({"quantization_config": settings})
    return text


def multiplied(raw: PreTrainedModel) -> int:
    """Numbers in the matrices that a forward of one token multiplies with, all experts counted."""
    linears = [m for m in raw.modules() if isinstance(m, nn.Linear)]
    others = [p for m in (*mixtures(raw), *(m for m in raw.modules() if isinstance(m, Conv1D))) for p in m.parameters()]
    return sum(m.in_features * m.out_features for m in linears) + sum(p.numel() for p in others)


__all__ = ["vocabulary"]
