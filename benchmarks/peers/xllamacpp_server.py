"""llama.cpp's server from the prebuilt package `xllamacpp`, with the options of the `llama-server` program that we use.

Runs in a Python of its own that has the package (pip install --no-deps xllamacpp): it imports nothing of outrider.
"""

from __future__ import annotations

import argparse
import threading

import xllamacpp  # pyright: ignore[reportMissingImports]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="version", version=about())
    parser.add_argument("--model", required=True)
    parser.add_argument("--ctx-size", type=int, required=True)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-ram", type=int, default=0)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slot-save-path", default="")
    parser.add_argument("--spec-type")
    parser.add_argument("--spec-draft-model")
    parser.add_argument("--spec-draft-n-max", type=int)
    parser.add_argument("--spec-draft-p-min", type=float, default=0.0)
    parser.add_argument("--spec-draft-sampling", default="greedy")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = args.model, args.ctx_size, args.parallel
    params.cache_ram_mib, params.hostnames, params.port = args.cache_ram, [args.host], args.port
    params.slot_save_path = args.slot_save_path
    draft = params.speculative.draft
    for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        cpu.n_threads = args.threads
    if args.spec_draft_model:
        draft.mparams.path, draft.n_max, draft.p_min = (
            args.spec_draft_model,
            args.spec_draft_n_max,
            args.spec_draft_p_min,
        )
        draft.probabilistic = args.spec_draft_sampling == "probabilistic"
    if args.spec_type:
        kind = f"COMMON_SPECULATIVE_TYPE_{args.spec_type.upper().replace('-', '_')}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


def about() -> str:
    """The package's version and what its code was compiled for."""
    return f"xllamacpp {xllamacpp.__version__}, {' '.join(xllamacpp.get_system_info().split())}"


if __name__ == "__main__":
    main()
