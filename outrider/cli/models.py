"""`outrider models` and `outrider layers`. Imports torch only when a command runs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from outrider.cli.options import CODE, Debug, Model, PrecisionOptions, option
from outrider.cli.terminal import DIM, console, loading, paint, readable


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


def models(debug: Debug = False) -> None:
    """List the built-in models, whether they are here, and what the cache folder holds."""
    with readable(debug):
        with loading("the list"):
            from outrider.core.files import cache_folder
            from outrider.models.builtin.download import DOWNLOADS, find
            from outrider.models.load import BUILTIN, DATA, SYNTHETIC
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
            numbers = [f"{_parameters(weights) / 1e6:.2f} M", f"{size / 1e6:.1f} MB"]
            numbers += [str(config["vocab_size"]), str(config["max_position_embeddings"])]
            table.add_row(name, *numbers, what)
        for name, model in DOWNLOADS.items():
            here = find(model)
            where = "fetched on first use" if here is None else "cached" if here == model.cached else "installed"
            numbers = [f"{model.parameters / 1e6:.2f} M", f"{model.size / 1e6:.1f} MB"]
            numbers += [str(model.vocabulary), str(model.context)]
            table.add_row(name, *numbers, f"{model.title}, {model.licence} ({where})")
        console().print(table)
        print(
            f"The same function as builtin:code at the cost of a larger model, for measurements: {', '.join(SYNTHETIC)}"
        )
        print(f"In the cache folder {cache_folder()}: {_held(cache_folder())}")
        print(f'Use one: outrider generate "def main():" --model {CODE}')


def _held(folder: Path) -> str:
    """The kinds of files in the cache folder, with their number and size."""
    kinds = {"fetched models": folder.glob("models/*.gguf"), "measured costs": folder.glob("cost-*.json")}
    sizes = {kind: [file.stat().st_size for file in files] for kind, files in kinds.items()}
    parts = [f"{len(each)} {kind} ({sum(each) / 1e6:.1f} MB)" for kind, each in sizes.items() if each]
    return ", ".join(parts) or "nothing"


def _parameters(weights: Path) -> int:
    """Stored numbers of a safetensors file, from its header."""
    with weights.open("rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
