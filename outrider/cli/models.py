"""`outrider models`: which are here, and what can be done with one. Imports torch only when a command runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

import typer

from outrider.cli.command import Debug, as_command, full_name
from outrider.cli.options import CODE
from outrider.cli.terminal import home, loading, readable, say, working
from outrider.core.suggest import did_you_mean
from outrider.serve.options import PrecisionOptions

HUB = "in the hub's cache"


models = typer.Typer(
    name="models",
    add_completion=False,
    rich_markup_mode="rich",
    epilog="[bold]Examples[/bold]\noutrider models\noutrider models pull builtin:smollm2-135m\n\n"
    "[bold]outrider list[/bold], [bold]outrider pull[/bold] and [bold]outrider rm[/bold] are the same as with models before them",
)


@models.callback(invoke_without_command=True, rich_help_panel="Models")
def about(context: typer.Context, debug: Debug = False) -> None:
    """List the models that are here, fetch or remove one, or pack its weights."""
    if context.invoked_subcommand is None:
        with readable(debug):
            show_list()


@as_command("Commands", "outrider models list", "outrider list", to=models)
def list_() -> None:
    """List the models that are here: name, size, where. Built-in, fetched and packed ones, and those of the hub's cache."""
    show_list()


def show_list() -> None:
    """Print the models that are here, and those that can be fetched."""
    with loading("the list"):
        from outrider.models.builtin.download import DOWNLOADS
        from outrider.models.packs import store

        held = _held()
    names = [one.name for one in held]
    absent = {name: model for name, model in DOWNLOADS.items() if name not in names}
    width = max(map(len, [*names, *absent]))
    for one in held:
        print(f"{one.name:<{width}}  {_size(one.bytes):>9}  {one.kind}")
        for line in filter(None, (one.what, home(one.path))):
            say(f"  {line}")
    for name, model in absent.items():
        print(f"{name:<{width}}  {_size(model.size):>9}  not here; outrider pull {name}")
    print(
        f"\nRemove one from a cache: outrider rm NAME. Packs take {_size(store.limit())} at most; {store.LIMIT} changes that."
    )
    print(f'Use one: outrider generate "def main():" -m {CODE}')


@as_command(
    "Commands",
    "outrider models pull builtin:smollm2-135m",
    "outrider pull Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf",
    to=models,
)
def pull(name: str) -> None:
    """Fetch a model now, so that the first use needs no network.

    Args:
        name: A built-in model, a hub name, or owner/name:file.gguf on the hub.
    """
    model = full_name(name)
    with working(f"looking for {model}"):
        from outrider.models.builtin.download import DOWNLOADS, fetch
        from outrider.models.builtin.shipped import BUILTIN, builtin_folder
        from outrider.models.files import gguf_files

        if model in DOWNLOADS:
            where = fetch(DOWNLOADS[model])
        elif model in BUILTIN:
            where = builtin_folder(model)
        elif model.startswith(("builtin:", ".", "~", "/")) or model.count("/") != 1:
            raise ValueError(
                f"{model} is no name to fetch; give {', '.join(DOWNLOADS)}, owner/name or owner/name:FILE.gguf"
            )
        elif files := gguf_files(model):
            where = files[0]
        else:
            from huggingface_hub import snapshot_download

            where = Path(
                snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"])
            )
    print(f"{model} is here:\n  {home(where)}")


@as_command("Commands", "outrider models rm builtin:smollm2-135m", "outrider rm all -y", to=models)
def rm(names: list[str], *, yes: bool = False) -> None:
    """Remove models from the cache folders. Nothing outside of them is ever removed.

    Args:
        names (NAME): Names as `outrider list` shows them; all: fetched and packed.
        yes: Do not ask.
    """
    with loading("the list"):
        cached = [one for one in _held() if one.remove is not None]
    chosen = list[Held]()
    for name in names:
        matches = [one for one in cached if one.name == name or (name == "all" and one.kind != HUB)]
        if not matches and name != "all":
            names_here = [one.name for one in cached]
            raise ValueError(
                f"the caches hold no {name!r}{did_you_mean(name, names_here)}; `outrider list` shows what they hold. A file of "
                "your own is yours to remove"
            )
        chosen += matches
    if not yes:
        for one in chosen:
            print(f"{one.name}  {_size(one.bytes)}\n  {home(one.path)}")
        if chosen and not typer.confirm("Remove this?"):
            raise typer.Exit(1)
    for one in chosen:
        assert one.remove is not None
        one.remove()
        print(f"removed {one.name} ({_size(one.bytes)})")


@as_command(
    "Commands",
    "outrider models pack ./my-model --quantization int8 -o ./my-model-int8",
    "outrider models pack model.gguf -o ./my-model && outrider run ./my-model",
    to=models,
)
def pack(model: str, *, out: Path, precision: PrecisionOptions) -> None:
    """Save a model as the kernels keep it. It then starts without being quantised again.

    Args:
        out (FOLDER): The folder to write.
    """
    with loading(model):
        from outrider.models.load import pack as write

        size = write(model, out, **dict(precision))
    print(f"{out}: {_size(size)}. Use it: outrider run {out}")


@dataclass(frozen=True)
class Held:
    """A model that is here. bytes: what it takes. remove: takes it out of its cache folder; None if it is in none."""

    name: str
    bytes: int
    kind: str
    path: Path
    what: str = ""
    remove: Callable[[], object] | None = None


def _held() -> list[Held]:
    """The models that are here, except those in folders of the user."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    from outrider.models.builtin.download import DOWNLOADS, find
    from outrider.models.builtin.shipped import BUILTIN, data_folder
    from outrider.models.packs import store

    held = list[Held]()
    if (data := data_folder()) is not None:
        for name, what in BUILTIN.items():
            folder = data / name.removeprefix("builtin:")
            sizes = [file.stat().st_size for file in folder.glob("*")]
            state = "in the package" if (folder / "model.safetensors").exists() else "its files are missing"
            held.append(Held(name, sum(sizes), state, folder, what))
    for name, model in DOWNLOADS.items():
        if (here := find(model)) is not None:
            remove = here.unlink if here == model.cached else None
            state, what = "fetched" if remove else "installed", f"{model.title}, {model.licence}"
            held.append(Held(name, model.size, state, here, what, remove))
    for pack in sorted(store.packs(), key=lambda p: -p.used):
        source = home(Path(pack.source)) if pack.source else "another version of outrider, which alone can use it"
        used = f"last used {datetime.fromtimestamp(pack.used):%Y-%m-%d}, from {source}"
        where, remove = store.folder() / pack.name, partial(store.remove, pack.name)
        held.append(Held(pack.name, pack.bytes, f"packed {pack.weights}".strip(), where, used, remove))
    with suppress(CacheNotFound):
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
        for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
            if repo.repo_type == "model":
                remove = cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute
                held.append(Held(repo.repo_id, repo.size_on_disk, HUB, repo.repo_path, remove=remove))
    return held


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
