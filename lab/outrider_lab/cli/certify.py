"""`outrider certify`: the command of the package outrider-certify, with subjects in this process. Imports nothing large."""

from __future__ import annotations

from typing import Any

import typer

from outrider.cli.command import as_command
from outrider.cli.options import own_draft, parse_speculative_config
from outrider.cli.terminal import loading
from outrider.serve.options import LoadOptions
from outrider_certify.cli import CertifyOptions, run


@as_command(
    "Measure",
    "outrider certify builtin:code",
    "outrider certify outrider.verify:reference_block",
    """outrider certify ./my-model --speculative-config '{"method": "suffix", "verifier": "rejection"}' --budget 30m""",
    "outrider certify --compare before.json after.json",
    usual="--speculative-config --plain-url --reference --texts --kind --budget --confidence --prompts -n -o --compare",
)
def certify(
    *,
    speculative_config: str | None = None,
    options: CertifyOptions,
    load: LoadOptions,
) -> None:
    """Is an engine lossless? Compare its texts with plain decoding, and say what would have been found.

    Certifies a model of ours with a speculative config, a verifier function, transformers, or a server with OpenAI's API.
    Exit codes: 0 nothing differs, 1 something differs, 3 cannot tell. The same command resumes an interrupted run.

    Args:
        speculative_config (JSON|FILE): For a model of ours: how it speculates, as JSON or a file with it.
    """
    config = _config(options.subject or "", speculative_config)

    def subject_of(options: CertifyOptions) -> Any:
        with loading(options.subject or ""):
            from outrider_lab.certify import engine

            return engine.subject_of(options, config, dict(load))

    raise typer.Exit(run(options, subject_of, "outrider", speculative_config=config, **dict(load)))


def _config(model: str, text: str | None) -> dict[str, Any] | None:
    if text is not None:
        return parse_speculative_config(text)
    draft = own_draft(model)
    return {"method": "draft_model", "model": draft} if draft else None
