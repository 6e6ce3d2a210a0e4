"""`outrider models`, `outrider pack` and `outrider layers`. Imports torch only when a command runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.options import CODE, Debug, Model, PrecisionOptions, option
from outrider.cli.terminal import DIM, console, loading, paint, readable

if TYPE_CHECKING:
    from outrider.models.builtin.download import Download


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

            loaded = load(model, **asdict(precision))
        if loaded.tokenizer is None:
            raise ValueError(f"{loaded.name} has no tokenizer, so it cannot read a text; choose a model with one")
        ids = [loaded.tokenizer(text)["input_ids"] for text in samples or [SAMPLE]]
        found = search_layers(loaded.model, ids, progress=lambda line: print(paint(line, DIM)))
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


def models(
    remove: Annotated[
        list[str] | None,
        option(
            "Cache", "Remove this from the cache folder; `all` removes everything. May be repeated.", metavar="NAME"
        ),
    ] = None,
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
    """List the built-in models, whether they are here, and what the cache folder holds; or check any model."""
    with readable(debug):
        if check is not None:
            with loading(check):
                from outrider.testing.compatibility import as_json
                from outrider.testing.compatibility import check as checked

                found = checked(check)
            print(as_json(found) if json_ else "\n".join(found.lines()))
            raise typer.Exit(0 if found.runs else 1)
        with loading("the list"):
            from outrider.models.builtin.download import DOWNLOADS
            from outrider.models.load import BUILTIN, DATA, SYNTHETIC
            from outrider.models.packs import store
        if remove:
            _remove(remove)
            return
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(title="Built-in models", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("name", no_wrap=True)
        for head in ("parameters", "on disk", "vocabulary", "context"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("what")
        for name, what in BUILTIN.items():
            folder = DATA / name.removeprefix("builtin:")
            weights = folder / "model.safetensors"
            if not weights.exists() or not (folder / "config.json").exists():
                table.add_row(name, "-", "-", "-", "-", f"{what} [red](its files are missing)[/red]")
                continue
            config = json.loads((folder / "config.json").read_text())
            size = sum(f.stat().st_size for f in folder.iterdir())
            numbers = [f"{_parameters(weights) / 1e6:.2f} M", _size(size)]
            numbers += [str(config["vocab_size"]), str(config["max_position_embeddings"])]
            table.add_row(name, *numbers, what)
        for name, model in DOWNLOADS.items():
            numbers = [f"{model.parameters / 1e6:.2f} M", _size(model.size), str(model.vocabulary), str(model.context)]
            table.add_row(name, *numbers, f"{model.title}, {model.licence} ({_where(model)})")
        console().print(table)
        print(
            f"The same function as builtin:code at the cost of a larger model, for measurements: {', '.join(SYNTHETIC)}"
        )
        print(f'Use one: outrider generate "def main():" --model {CODE}')
        print(f"In the cache folder {store.folder().parent}: {_held(store.folder().parent)}")
        if packs := store.packs():
            table = Table(title="Packed weights", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for head, side in (("name", "left"), ("weights", "left"), ("on disk", "right"), ("last used", "left")):
                table.add_column(head, justify=side, no_wrap=True)  # pyright: ignore[reportArgumentType]
            table.add_column("source", overflow="fold")
            for pack in sorted(packs, key=lambda p: -p.used):
                day = datetime.fromtimestamp(pack.used).strftime("%Y-%m-%d %H:%M")
                table.add_row(pack.name, pack.weights, _size(pack.bytes), day, pack.source)
            console().print(table)
            print(f"The cache keeps at most {_size(store.limit())} of them ({store.LIMIT} changes that)")
            print(f"Remove one: outrider models --remove {packs[0].name}")


def pack(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, a GGUF file, a hub name or a built-in model.")
    ],
    out: Annotated[Path, option("Output", "The folder to write.", "--out", "-o", metavar="FOLDER")],
    *,
    precision: PrecisionOptions,
    debug: Debug = False,
) -> None:
    """Save a model as the kernels keep it. It then starts without being quantised again."""
    with readable(debug):
        with loading(model):
            from outrider.models.load import pack as write

            size = write(model, out, **asdict(precision))
        print(f"{out}: {_size(size)}. Use it: outrider chat -m {out}")


def _where(model: Download) -> str:
    from outrider.models.builtin.download import find

    here = find(model)
    return "fetched on first use" if here is None else "cached" if here == model.cached else "installed"


def _held(folder: Path) -> str:
    """The kinds of files in the cache folder, with their number and size."""
    kinds = {
        "fetched models": folder.glob("models/*.gguf"),
        "files of packed weights": folder.glob("packs/*/*"),
        "measured costs": folder.glob("cost-*.json"),
    }
    sizes = {kind: [file.stat().st_size for file in files] for kind, files in kinds.items()}
    parts = [f"{len(each)} {kind} ({_size(sum(each))})" for kind, each in sizes.items() if each]
    return ", ".join(parts) or "nothing"


def _remove(names: list[str]) -> None:
    """Remove packs by name, and fetched models by their built-in name."""
    from outrider.models.builtin.download import DOWNLOADS
    from outrider.models.packs import store

    for name in names:
        fetched = [m for n, m in DOWNLOADS.items() if name in (n, "all") and m.cached.exists()]
        for model in fetched:
            model.cached.unlink()
            print(f"removed {model.cached} ({_size(model.size)})")
        if not fetched or name == "all":
            for pack in store.remove(name):
                print(f"removed {pack.name} ({_size(pack.bytes)})")


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _parameters(weights: Path) -> int:
    """Stored numbers of a safetensors file, from its header."""
    with weights.open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
