"""Which GGUF files a name stands for: a file, any part of a split one, a folder, or a file on the hub."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.models.builtin.download import DOWNLOADS, fetch

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


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
