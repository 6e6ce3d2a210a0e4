"""A folder that holds a trained head: which kind it is, its settings and its tensors, from every layout in use.

The kind is decided by the settings and the names of the tensors, in the order of `_kind`. No file is trusted to run code:
`pytorch_model.bin` is read with `weights_only`.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from ml_dtypes import bfloat16

from outrider.core.extras import needs
from outrider.core.files import read_settings
from outrider.core.types import Array
from outrider.models.checkpoint import header, indexed, view
from outrider.models.checkpoint import tensors as tensors_in
from outrider.models.files import content
from outrider.models.load import Loaded

EAGLE3, EAGLE1, PEAGLE = "eagle3", "eagle1", "peagle"
MEDUSA, DFLASH, DFLASH2, DSPARK = "medusa", "dflash", "dflash2", "dspark"
KINDS = (EAGLE3, EAGLE1, PEAGLE, MEDUSA, DFLASH, DFLASH2, DSPARK)
# Kinds that are known by name and cannot be run: kind -> why.
REFUSED = {
    "mtp": 'MTP layers are read from their own model\'s checkpoint, by the method "mtp"',
    "xpress": "it has layers of its own kind",
    "mlp_speculator": "MLP speculators are no longer supported by vLLM and speculators either",
    "hydra": "Hydra heads are not read by any engine",
    "lilicorr": "a transformer of its own chooses among its candidates; DFlash, DFlash2 and DSpark blocks run",
}
TARGET_DIGEST = "target_sha256"
"""The key of config.json that names the model of a head of `outrider train`."""
_Reader = TypeVar("_Reader", bound=Callable[..., Any])
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
_MEDUSA_BLOCK = re.compile(r"(medusa_heads\.)?\d+\.\d+\.linear\.weight")


@dataclass(frozen=True, eq=False)
class HeadFolder:
    """kind: one of KINDS. settings: config.json, with `transformer_layer_config` merged in."""

    path: Path
    kind: str
    settings: dict[str, Any]

    @property
    def verifier(self) -> str | None:
        """The target's name, as far as the folder says; a hint only."""
        name = self.settings.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
        return name or self.settings.get("base_model_name_or_path") or None

    @cached_property
    def tensors(self) -> dict[str, Array]:
        """All tensors by name, without the prefix `model.` that some trainers put before them. Raises ValueError for a damaged
        file."""
        return {_plain(name): t for file in _files(self.path) for name, t in _read(file).items()}


def head_kind(folder: str | Path) -> str | None:
    """The kind of a head's folder: one of KINDS or REFUSED. None for anything else, such as the folder of a whole model."""
    try:
        return _looked(Path(folder).expanduser())[0]
    except (ValueError, OSError):
        return None  # the loader of models says what is wrong


def open_head(folder: str | Path) -> HeadFolder:
    """Read the settings of a head's folder. Raises ValueError for a folder that holds no head, or one of REFUSED."""
    path = Path(folder).expanduser()
    kind, settings, names = _looked(path)
    if kind is None:
        raise ValueError(
            f"{path} holds no head that outrider knows: EAGLE-1, EAGLE-3, P-EAGLE, Medusa, DFlash or DSpark. Its tensors "
            f"begin with {', '.join(sorted(names)[:3])}. A whole model drafts too: -d MODEL"
        )
    if kind in REFUSED:
        raise ValueError(f"{path} is a head of the kind {kind!r}, which outrider does not run: {REFUSED[kind]}")
    nested = settings.get("transformer_layer_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"{path / 'config.json'}: transformer_layer_config is no object; download it again")
    return HeadFolder(path, kind, {**nested, **settings})


def _looked(path: Path) -> tuple[str | None, dict[str, Any], set[str]]:
    """(kind, settings, names of the tensors) of a folder with config.json and weights. The kind is None if it is not known."""
    if not path.is_dir():
        raise ValueError(
            f"there is no folder {path}; a head is read from a folder here (hf download OWNER/NAME makes one)"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; the folder of a head holds one, and model.safetensors beside it")
    settings = read_settings(path / "config.json")
    files = _files(path)
    if not files:
        raise ValueError(f"{path} has no weights; a head's folder holds model.safetensors or pytorch_model.bin")
    # the header of a safetensors file says the names
    names = {n for file in files for n in (header(file)[0] if file.suffix == ".safetensors" else _read(file))}
    names.discard("__metadata__")
    return _kind(settings, names), settings, names


def settings_named(read: _Reader) -> _Reader:
    """A reader of heads that raises ValueError, naming config.json, for a setting of another type than heads have."""

    @wraps(read)
    def named(folder: str | Path, target: Any) -> Any:
        try:
            return read(folder, target)
        except (ValueError, OSError):
            raise
        except Exception as error:  # a number that is a list, a dictionary that is a text...
            why = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{Path(folder) / 'config.json'} has a setting that no head has ({why}); download it again"
            ) from error

    return cast("_Reader", named)


def _kind(settings: Mapping[str, Any], names: set[str]) -> str | None:
    named = settings.get("speculators_model_type")
    if named is not None:
        if named not in (*KINDS, *REFUSED):
            raise ValueError(
                f"the folder says speculators_model_type {named!r}, which outrider does not know; it runs {', '.join(KINDS)}"
            )
        return named
    medusa = settings.get("model_type") == MEDUSA or "medusa_num_heads" in settings
    if medusa or any(map(_MEDUSA_BLOCK.fullmatch, names)):
        return MEDUSA
    plain = set(map(_plain, names))
    if "mask_hidden" in plain:
        return PEAGLE
    if any(n.startswith(("fc_norm.", "midlayer.")) for n in plain) or "layers.0.hidden_norm.weight" in plain:
        return EAGLE3
    if "encoder.fc.weight" in plain or {"layers.0.self_attn.q_norm.weight", "fc.weight", "hidden_norm.weight"} <= plain:
        if "candidate_selector.hidden_projection.weight" in plain:
            return DFLASH2
        if "lilicorr.slot_embedding" in plain:
            return "lilicorr"
        return DSPARK if any(n.startswith("markov_head.") for n in plain) else DFLASH
    if "fc.weight" in plain and any(n.startswith("layers.0.") for n in plain):
        if "layers.0.input_layernorm.weight" not in plain:
            return EAGLE1
        return "mtp" if "pre_fc_norm_hidden.weight" in plain else None
    return "mtp" if plain and all(n.startswith(("mtp.", "mtp_layers.")) for n in plain) else None


def _plain(name: str) -> str:
    return name.removeprefix("model.").replace("midlayer.", "layers.0.")


def _files(path: Path) -> list[Path]:
    """The files of weights. Raises ValueError if an index names one that is not there."""
    for name in _INDEXES:
        index = path / name
        if index.is_file():
            files = sorted(set(indexed(index).values()))
            if missing := [f.name for f in files if not f.is_file()]:
                raise ValueError(f"{path} lacks {missing[0]}, which {name} names; the download is incomplete")
            return files
    return next(([path / name] for name in _WHOLE if (path / name).is_file()), [])


def _read(file: Path) -> dict[str, Array]:
    try:
        if file.suffix == ".safetensors":
            content = np.memmap(file, np.uint8, "r")
            return {name: view(content, t, f"{file}: {name}") for name, t in tensors_in([file]).items()}
        with needs("torch", f"{file}, which torch wrote,"):
            import torch
        tensors: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file} cannot be read as weights ({error}); download it again") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise ValueError(f"{file} holds no tensors by name; a head's weights are a state_dict")
    halves = {n: t.view(torch.int16).numpy().view(bfloat16) for n, t in tensors.items() if t.dtype == torch.bfloat16}
    return {n: halves[n] if n in halves else t.numpy() for n, t in tensors.items()}


def head_of(model: Any, target: str) -> Any:
    """The head's folder: the one that was given as `model`, else the one that the package outrider-data has for the target.

    None if it has none, or is not installed. target: the name of a built-in model, or the path of a file with its content.
    """
    from outrider.models.builtin.download import name_of
    from outrider.models.builtin.shipped import data_folder

    if model is not None:
        return model
    name = target if target.startswith("builtin:") else name_of(target)
    if name is None or (data := data_folder()) is None:
        return None
    folder = data / "heads" / name.removeprefix("builtin:")
    return folder if (folder / "config.json").is_file() else None


def target_digest(target: Loaded) -> str | None:
    """What names the content of a model; None for one without files here."""
    try:
        return content(target.source)
    except (ValueError, OSError):
        return None
