"""A folder of safetensors, or a repository on the hub, as the tensors and the configuration of a native program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.core.files import read_settings
from outrider.models import checkpoint
from outrider.models.checkpoint import LoadRequest, ReadModel
from outrider.models.config import config_of, native_kind
from outrider.models.files import cached
from outrider.models.mtp import JOIN, MTP
from outrider.models.quantised.reader import QuantisedTensors
from outrider.models.safetensors import FolderTensors
from outrider.models.tokenizer import tokenizer_of


def read_model(request: LoadRequest, path: str) -> ReadModel | None:
    """A folder, or a name on the hub. None for a class that has no native program, and for older weights (*.bin).

    Raises ValueError, MemoryError, FileNotFoundError or UnsupportedModel, with the reason.
    """
    name, folder = request.name, Path(path)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download, snapshot_download

        if native_kind(read_settings(Path(hf_hub_download(path, "config.json")))) is None:
            return None
        folder = Path(
            snapshot_download(
                path, allow_patterns=["*.safetensors", "*.json"], ignore_patterns=["consolidated*", "*/*"]
            )
        )
    settings = checkpoint.settings(folder)
    if native_kind(settings) is None or (whole := checkpoint.sizes(name, folder)) is None:
        return None
    checkpoint.check_folder(folder)
    try:
        config = config_of(settings)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"the configuration of {name} cannot be read: {error}") from error
    config._name_or_path = path
    if hasattr(config, "quantization_config"):
        tensors = QuantisedTensors(name, folder, config, request.dtype)
        whole = tensors.sizes
    else:
        tensors = FolderTensors(name, folder, config, request.dtype)
    checkpoint.fits(name, whole, request.weights, request.device)
    tokenizer = tokenizer_of(path) if request.tokenizer else None
    return ReadModel(tensors, tokenizer, request.quantization, checkpoint.end_ids(folder, config), config)


def tensors_with_layer(name: str, config: Any) -> FolderTensors | None:
    """The tensors of a checkpoint, if it is here and has an MTP layer. name: the folder, or its name on the hub."""
    path = Path(name).expanduser()
    if not path.exists() and name.count("/") == 1:
        path = Path(cached(name))
    if not (name and path.is_dir() and any(path.glob("*.safetensors")) and native_kind(config.to_dict())):
        return None
    tensors = FolderTensors(name, path, config_of(config.to_dict()))
    return tensors if tensors.has(f"{MTP}.{JOIN[-1]}.weight") else None
