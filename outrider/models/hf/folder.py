"""A folder, a name on the hub or a model object, as the modules of transformers, where no native program reads its tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import set_tqdm_hook

from outrider.core.files import read_settings
from outrider.core.suggest import did_you_mean
from outrider.models import checkpoint
from outrider.models.checkpoint import LoadRequest, ReadModel, UnsupportedModel, token_ids
from outrider.models.hf import precision
from outrider.models.hf.experts import mixtures
from outrider.models.hf.linear import linears
from outrider.models.hf.model import refuse
from outrider.models.hf.skeleton import other_shape, skeleton_of
from outrider.models.hf.tensors import ModuleTensors, config_for
from outrider.models.quantised.reader import QuantisedTensors
from outrider.models.tensors import missing_tensor
from outrider.models.tokenizer import tokenizer_of

# A table of the tensors that are not read, such as those for images. `read_folder` says what is missing.
logging.getLogger("transformers.modeling_utils").addFilter(lambda record: "LOAD REPORT" not in record.getMessage())
SMALL = 2**24  # weights that a configuration may ask for beside those of its files, such as buffers


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


@_no_bar_of_weights()
def read_folder(request: LoadRequest, path: str) -> ReadModel:
    """A folder, or a name on the hub. Raises ValueError, MemoryError or UnsupportedModel."""
    config = read_config(request.name, path)
    tokenizer = tokenizer_of(path) if request.tokenizer else None  # before the weights: it may be refused
    if getattr(config, "quantization_config", None):
        return _read_quantised(request, Path(path), config, tokenizer)
    raw, info = _from_floats(request, path, config)
    if missing := sorted(info["missing_keys"]):
        held = info["unexpected_keys"]
        raise missing_tensor(request.name, missing[0], type(raw).__name__, raw.config, held)
    packed = {*mixtures(raw), *linears(raw).values()}
    for p in (p for module in raw.modules() if module not in packed for p in module.parameters(recurse=False)):
        p.data = p.data.clone()  # it is a view of the mapped file. One that is left keeps the whole file in memory
    return read_object(raw, request.quantization, tokenizer, angles=False)


def _read_quantised(request: LoadRequest, folder: Path, config: Any, tokenizer: Any) -> ReadModel:
    """A checkpoint with a `quantization_config`."""
    if not folder.is_dir():
        folder = Path(snapshot_download(str(folder), allow_patterns=["*.safetensors", "*.json"]))
    tensors = QuantisedTensors(request.name, folder, config, request.dtype)
    del config.quantization_config
    checkpoint.fits(request.name, tensors.sizes, request.weights or tensors.floats, request.device)
    refuse(skeleton_of(config))
    return ReadModel(tensors, tokenizer, request.quantization, checkpoint.end_ids(folder, config), config)


def read_object(
    raw: PreTrainedModel, quantization: str | None = None, tokenizer: Any | None = None, angles: bool = True
) -> ReadModel:
    """A model object, as one that was read. angles: as for `ModuleTensors`.

    Raises UnsupportedModel for a class that cannot run."""
    refuse(raw)
    end = raw.generation_config.eos_token_id if raw.generation_config else None
    ends = token_ids(getattr(raw.config.get_text_config(), "eos_token_id", None) if end is None else end)
    try:
        config: Any = config_for(raw)
    except ValueError:  # no family has it
        config = raw.config
    return ReadModel(ModuleTensors(raw, angles), tokenizer, quantization, ends, config)


@precision.making()
def _from_floats(request: LoadRequest, path: str, config: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model, and transformers' report of missing and unexpected tensors."""
    name, folder = request.name, Path(path)
    shell = skeleton_of(config)
    refuse(shell)
    if folder.is_dir() and (stored := checkpoint.sizes(name, folder)):
        checkpoint.fits(name, stored, request.weights, request.device)
        _check_sizes(name, shell, stored, checkpoint.shapes(folder))
    try:
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


def _check_sizes(
    name: str, shell: PreTrainedModel, stored: checkpoint.Sizes, shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise ValueError for a configuration of another model than the weights', before memory is taken for it.

    shapes: of the tensors as stored. Those whose names the model has must have its sizes. transformers renames the others, so
    they are counted only.
    """
    wanted = {n: t.shape for n, t in (*shell.named_parameters(), *shell.named_buffers())}
    if wrong := next((n for n, s in wanted.items() if n in shapes and math.prod(shapes[n]) != s.numel()), None):
        raise other_shape(wrong, shapes[wrong], wanted[wrong])
    asked, held = sum(shape.numel() for shape in wanted.values()), stored.matrices + stored.rest
    if asked > 2 * held + SMALL:
        raise ValueError(f"config.json of {name} asks for {asked} weights, and its files hold {held} at most")


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
    if type(text) is type(config) or type(text) not in AutoModelForCausalLM._model_mapping:  # pyright: ignore[reportOperatorIssue]
        return config
    text._name_or_path, tied = config._name_or_path, text.tie_word_embeddings or config.tie_word_embeddings
    text.update({"dtype": text.dtype or config.dtype, "tie_word_embeddings": tied})
    if settings := getattr(config, "quantization_config", None):
        text.update({"quantization_config": settings})
    return text
