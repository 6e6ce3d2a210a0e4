"""`outrider layers`: which layers of a model draft best for it. Imports torch only when it runs."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.cli.command import as_command
from outrider.cli.options import CODE
from outrider.cli.terminal import loading, say
from outrider.serve.options import PrecisionOptions


@as_command(
    "Build",
    "outrider layers -m ./my-model --out layers.json",
    "outrider layers -m ./my-model --texts my-prompts.txt --out layers.json",
    'outrider generate "def f(x):" -m ./my-model --speculative-config '
    '\'{"method": "layer_skip", "layers": "layers.json"}\'',
)
def layers(
    *,
    model: str = CODE,
    texts: list[Path] | None = None,
    out: Path | None = None,
    precision: PrecisionOptions,
) -> None:
    """Find the layers of a model that draft best for it (layer_skip), by measured agreement and measured cost.

    Args:
        texts: Files with texts like yours; without it, a short sample.
        out (FILE): Write the layers to this file.
    """
    samples = [path.read_text(encoding="utf-8") for path in texts or []]
    with loading(model):
        from outrider.drafters.heads.selftest import SAMPLE
        from outrider.models.load import load
        from outrider_lab.layers import search_layers

        loaded = load(model, **dict(precision))
    if loaded.tokenizer is None:
        raise ValueError(f"{loaded.name} has no tokenizer, so it cannot read a text; choose a model with one")
    ids = [loaded.tokenizer(text)["input_ids"] for text in samples or [SAMPLE]]
    best = search_layers(loaded.model, ids, progress=say)
    if out is not None:
        best.save(out)
    chosen = f'{{"method": "layer_skip", "layers": {json.dumps(str(out)) if out else best.layers}, '
    chosen += f'"num_speculative_tokens": {max(best.depth, 1)}}}'
    if best.gain <= 1:
        print("No set of layers is expected to be faster than plain decoding. The best one:")
    print(
        f"layers {best.layers}: {best.acceptance:.0%} of their tokens are the model's. A token costs {best.cost:.2f} "
        f"of the model's; predicted {best.gain:.2f} times plain decoding\n--speculative-config '{chosen}'"
    )
