"""`outrider models`, `methods`, `list`, `pull`, `rm`, `pack` and `layers`. Imports torch only when a command runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import CODE, Debug, Model, ModelArgument, PrecisionOptions, full_name, option
from outrider.cli.terminal import console, home, loading, readable, say, working
from outrider.core.suggest import did_you_mean
from outrider.drafters.method import METHODS, plugins
from outrider.drafters.method import find as find_method

HUB = "in the hub's cache"


def layers(
    model: Model = CODE,
    texts: Annotated[
        list[Path] | None, option("Measurement", "Files with texts like yours; without it, a short sample.")
    ] = None,
    out: Annotated[Path | None, option("Output", "Write the layers to this file.", metavar="FILE")] = None,
    *,
    precision: PrecisionOptions,
    debug: Debug = False,
) -> None:
    """Find the layers of a model that draft best for it (layer_skip), by measured agreement and measured cost."""
    with readable(debug):
        samples = [path.read_text(encoding="utf-8") for path in texts or []]
        with loading(model):
            from outrider.drafters.model.self_speculation import SAMPLE, search_layers
            from outrider.models.load import load

            loaded = load(model, **dict(precision))
        if loaded.tokenizer is None:
            raise ValueError(f"{loaded.name} has no tokenizer, so it cannot read a text; choose a model with one")
        ids = [loaded.tokenizer(text)["input_ids"] for text in samples or [SAMPLE]]
        found = search_layers(loaded.model, ids, progress=say)
        if out is not None:
            found.save(out)
        chosen = f'{{"method": "layer_skip", "layers": {json.dumps(str(out)) if out else found.layers}, '
        chosen += f'"num_speculative_tokens": {max(found.depth, 1)}}}'
        if found.gain <= 1:
            print("No set of layers is expected to be faster than plain decoding. The best one:")
        print(
            f"layers {found.layers}: {found.acceptance:.0%} of their tokens are the model's. A token costs {found.cost:.2f} "
            f"of the model's; predicted {found.gain:.2f} times plain decoding\n--speculative-config '{chosen}'"
        )


def methods(debug: Debug = False) -> None:
    """List the drafting methods: name, what it needs, what it is good for. Give one to --method, or several as JSON."""
    with readable(debug):
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("method", no_wrap=True)
        table.add_column("needs", max_width=24)
        table.add_column("what it is, and where it helps")
        for method in (*METHODS.values(), *map(find_method, plugins())):
            table.add_row(method.name, method.needs, method.help)
        console().print(table)
        print('One: --method suffix\nSeveral: --speculative-config \'{"method": ["suffix", "draft_model"]}\'')


def models(
    check: Annotated[
        str | None,
        option(
            "Check",
            "Say whether this model runs here, and how, from its configuration alone: a folder, a config.json, a GGUF file or a "
            "hub name. Fetches nothing.",
            metavar="MODEL",
        ),
    ] = None,
    json_: Annotated[bool, option("Output", "Print the answer to --check as JSON.", "--json")] = False,
    debug: Debug = False,
) -> None:
    """List the models that are here, as `outrider list` does; or check any model."""
    with readable(debug):
        if check is None:
            list_(debug)
            return
        with loading(check):
            from outrider.cli import compatibility

            found = compatibility.check(check)
        print(json.dumps(found) if json_ else "\n".join(compatibility.lines(check, found)))
        raise typer.Exit(0 if found["runs"] else 1)


def list_(debug: Debug = False) -> None:
    """List the models that are here: name, size, where. Built-in, fetched and packed ones, and those of the hub's cache."""
    with readable(debug):
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


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A built-in model, a hub name, or owner/name:file.gguf on the hub.",
            callback=full_name,
        ),
    ],
    debug: Debug = False,
) -> None:
    """Fetch a model now, so that the first use needs no network."""
    with readable(debug), working(f"looking for {model}"):
        from outrider.models.builtin.download import DOWNLOADS, fetch
        from outrider.models.builtin.shipped import BUILTIN, builtin_folder
        from outrider.models.gguf.files import gguf_files

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


def rm(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help="Names as `outrider list` shows them; all: fetched and packed."),
    ],
    yes: Annotated[bool, option("Cache", "Do not ask.", "--yes", "-y")] = False,
    debug: Debug = False,
) -> None:
    """Remove models from the cache folders. Nothing outside of them is ever removed."""
    with readable(debug):
        with loading("the list"):
            cached = [one for one in _held() if one.remove is not None]
        chosen = list[Held]()
        for name in names:
            found = [one for one in cached if one.name == name or (name == "all" and one.kind != HUB)]
            if not found and name != "all":
                known = [one.name for one in cached]
                raise ValueError(
                    f"the caches hold no {name!r}{did_you_mean(name, known)}; `outrider list` shows what they hold. A file of "
                    "your own is yours to remove"
                )
            chosen += found
        if not yes:
            for one in chosen:
                print(f"{one.name}  {_size(one.bytes)}\n  {home(one.path)}")
            if chosen and not typer.confirm("Remove this?"):
                raise typer.Exit(1)
        for one in chosen:
            assert one.remove is not None
            one.remove()
            print(f"removed {one.name} ({_size(one.bytes)})")


def pack(
    model: ModelArgument,
    out: Annotated[Path, option("Output", "The folder to write.", "--out", "-o", metavar="FOLDER")],
    *,
    precision: PrecisionOptions,
    debug: Debug = False,
) -> None:
    """Save a model as the kernels keep it. It then starts without being quantised again."""
    with readable(debug):
        with loading(model):
            from outrider.models.load import pack as write

            size = write(model, out, **dict(precision))
        print(f"{out}: {_size(size)}. Use it: outrider chat -m {out}")


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
    from huggingface_hub import CacheNotFound, scan_cache_dir

    from outrider.models.builtin.download import DOWNLOADS, find
    from outrider.models.builtin.shipped import BUILTIN, data_folder
    from outrider.models.packs import store

    found = list[Held]()
    if (data := data_folder()) is not None:
        for name, what in BUILTIN.items():
            folder = data / name.removeprefix("builtin:")
            sizes = [file.stat().st_size for file in folder.glob("*")]
            state = "in the package" if (folder / "model.safetensors").exists() else "its files are missing"
            found.append(Held(name, sum(sizes), state, folder, what))
    for name, model in DOWNLOADS.items():
        if (here := find(model)) is not None:
            remove = here.unlink if here == model.cached else None
            state, what = "fetched" if remove else "installed", f"{model.title}, {model.licence}"
            found.append(Held(name, model.size, state, here, what, remove))
    for pack in sorted(store.packs(), key=lambda p: -p.used):
        source = home(Path(pack.source)) if pack.source else "another version of outrider, which alone can use it"
        used = f"last used {datetime.fromtimestamp(pack.used):%Y-%m-%d}, from {source}"
        where, remove = store.folder() / pack.name, partial(store.remove, pack.name)
        found.append(Held(pack.name, pack.bytes, f"packed {pack.weights}".strip(), where, used, remove))
    with suppress(CacheNotFound):
        cache = scan_cache_dir()
        for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
            if repo.repo_type == "model":
                remove = cache.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute
                found.append(Held(repo.repo_id, repo.size_on_disk, HUB, repo.repo_path, remove=remove))
    return found


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
