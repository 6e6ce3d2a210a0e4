"""Which files a name stands for: a built-in model, a folder, a GGUF file, or a name on the hub; and what is in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider.core.files import content_digest
from outrider.core.suggest import did_you_mean
from outrider.models.builtin.download import DOWNLOADS, fetch
from outrider.models.builtin.shipped import BUILTIN, builtin_folder

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# Seconds that the hub has to answer. transformers would try for half a minute per file.
_HUB_TIMEOUT = 5.0


def gguf_files(name: str) -> tuple[Path, ...] | None:
    """The files of the model, all parts in order. None if the name is no GGUF file.

    name: a path ending in .gguf, a folder with one model in GGUF and no config.json, or `owner/name:file.gguf` on the hub. A name
    of `DOWNLOADS` is fetched if it is not here. Raises FileNotFoundError, ValueError or ConnectionError with the reason.
    """
    if name in DOWNLOADS:
        return (fetch(DOWNLOADS[name]),)
    path = Path(name).expanduser()
    if path.is_dir():
        return None if (path / "config.json").exists() else _in_folder(path)
    if not path.name.endswith(".gguf"):
        return None
    if path.is_file():
        return _parts(path)
    hub, colon, file = name.partition(":")
    if colon and hub.count("/") == 1 and not hub.startswith((".", "~", "/")):
        return tuple(_downloaded(hub, part) for part in part_names(file))
    if _PART.fullmatch(path.name):
        _parts(path)  # says which of the parts are missing
    raise FileNotFoundError(
        f"there is no file {path}; give the path of a GGUF file, or `owner/name:file.gguf` for one on the hub"
    )


def part_names(name: str) -> list[str]:
    """All parts of a split file, in order, from the name of any; else the name alone."""
    match = _PART.fullmatch(name)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{i:05}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]


def _parts(path: Path) -> tuple[Path, ...]:
    parts = tuple(path.with_name(n) for n in part_names(path.name))
    if missing := [p.name for p in parts if not p.is_file()]:
        raise FileNotFoundError(
            f"{path} is one of {len(parts)} parts, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in "
            f"{path.parent}; the download is incomplete"
        )
    return parts


def _in_folder(folder: Path) -> tuple[Path, ...] | None:
    models = {tuple(part_names(p.name)): p for p in sorted(folder.glob("*.gguf"))}
    if len(models) > 1:
        names = ", ".join(names[0] for names in models)
        raise ValueError(f"{folder} has {len(models)} GGUF models; give one of them: {names}")
    return _parts(next(iter(models.values()))) if models else None


def _downloaded(hub: str, file: str) -> Path:
    from huggingface_hub import errors, hf_hub_download, try_to_load_from_cache

    try:
        return Path(hf_hub_download(hub, file))
    except errors.HFValidationError as error:
        raise ValueError(f"{hub!r} cannot be a name on the hub; give `owner/name:file.gguf`") from error
    except errors.LocalEntryNotFoundError as error:
        cached = try_to_load_from_cache(hub, file)
        if isinstance(cached, str):
            return Path(cached)
        raise ConnectionError(
            f"{file} of {hub} is not in the hub's cache, and the hub cannot be reached ({type(error).__name__}). Fetch it where "
            f"there is a network (`hf download {hub} {file}`), bring the file, and give its path"
        ) from error
    except (errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        raise FileNotFoundError(
            f"there is no {file} in {hub} on the hub that can be read without logging in; check the spelling, or run "
            "`hf auth login`"
        ) from error
    except Exception as error:  # the hub's client raises many kinds of errors if the network does not answer
        raise ConnectionError(f"{file} of {hub} could not be fetched from the hub: {error}") from error


def folder_of(name: str, find: Callable[[str], str] | None = None) -> str:
    """A folder to load from, or a name that the hub knows. find: says which, in place of asking the hub."""
    if name.startswith("builtin:"):
        if name not in BUILTIN:
            raise ValueError(
                f"there is no built-in model {name!r}{did_you_mean(name, (*BUILTIN, *DOWNLOADS))}; there are {names()}"
            )
        name = str(builtin_folder(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            raise FileNotFoundError(
                f"{path} has no config.json and no .gguf file; give the folder that save_pretrained wrote"
            )
        return str(path)
    if path.is_file():
        raise FileNotFoundError(
            f"{path} is a file, and not a .gguf one; give the folder of the model, which must also hold config.json"
        )
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise FileNotFoundError(
            f"there is no folder {path}; give a model folder, a GGUF file, a hub name, or one of {names()}"
        )
    return (find or _hub)(name)


def cached(name: str) -> str:
    """The folder of the copy in the hub's cache; the name if there is none."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "config.json")
    return str(Path(cached).parent) if isinstance(cached, str) else name


def _hub(name: str) -> str:
    """The name if the hub has it; the folder of the cached copy if the hub cannot be reached."""
    from huggingface_hub import HfApi, errors

    otherwise = f"Give a folder that save_pretrained wrote, or one of {names()}"
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT)
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is not a folder here and cannot be a name on the hub. {otherwise}") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"there is no folder {name!r} here, and no such model on the hub that can be read without logging in; check "
            f"the spelling, or run `hf auth login`. {otherwise}"
        ) from error
    except Exception as error:  # the hub's client raises many kinds of errors if the network does not answer
        if (copy := cached(name)) != name:
            return copy
        raise ConnectionError(
            f"{name!r} is not a folder here, no copy of it is in the hub's cache, and the hub cannot be reached "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no answer'}). {otherwise}; or "
            f"fetch it where there is a network (`hf download {name}`) and bring the folder"
        ) from error
    return name


def names() -> str:
    return ", ".join((*BUILTIN, *DOWNLOADS))


def weight_files(model: str) -> list[Path]:
    """The files that hold a model's weights: GGUF, all parts, or safetensors. Empty for a name whose files are not at hand.

    Raises what `outrider.models.load.load` raises for a GGUF file that cannot be had.
    """
    if files := gguf_files(model):
        return list(files)
    path = builtin_folder(model) if model.startswith("builtin:") else Path(model).expanduser()
    return sorted(path.glob("*.safetensors"))


def content(model: Any) -> str:
    """A digest of all that a model's arithmetic reads of its files: weights and settings. It does not depend on where they are.

    It is kept in the cache folder until the files change. Raises ValueError for a model that has no files here.
    """
    files = weight_files(str(model)) if isinstance(model, (str, Path)) else []
    if not files:
        raise ValueError(
            "the model has no files here whose content could name what is kept of its texts; load it from its folder or "
            "GGUF file, or leave out prefix_dir"
        )
    if files[0].suffix != ".gguf":
        files += [f for f in map(files[0].with_name, ("config.json", "outrider_pack.json")) if f.exists()]
    return content_digest(files)
