"""`outrider replay`: sums up a trace, or computes one of its steps again. Imports nothing large until it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import Field

from outrider.cli.command import as_command
from outrider.cli.terminal import (
    DIM,
    GREEN,
    RED,
    YELLOW,
    console,
    loading,
    paint,
    printable,
    say,
    working,
)
from outrider_lab.cli.shared import table

if TYPE_CHECKING:
    from rich.tree import Tree

    from outrider.engine.fingerprint import Fingerprint
    from outrider.engine.trace import RunRecord
    from outrider_lab.replay import ExplainedNode, Replay
    from outrider_lab.traces import Trace, TracedText

_STYLES = {"✓": "green", "✗": "red", "·": "dim"}


@as_command(
    "Look inside",
    'outrider generate "def f(x):" --trace run.jsonl',
    "outrider replay run.jsonl",
    "outrider replay run.jsonl --step 3",
    "outrider replay --fingerprint answer.json",
)
def replay(
    trace: Path | None = None,
    *,
    step: Annotated[int | None, Field(ge=0)] = None,
    request: Annotated[int | None, Field(ge=0)] = None,
    model: str | None = None,
    fingerprint: Path | None = None,
) -> None:
    """Sum up a trace, or explain one of its steps: the draft tokens, and why each was accepted or rejected.

    The step is computed again with the model that the trace names, and compared with the record. Exit code 1: it differs.

    With --fingerprint, the whole text is written again, without drafts. Exit code 2: another model, precision or version.

    Args:
        trace: A file that --trace has written.
        step: Compute this step of the request again and explain it.
        request: The number of the request; needed if there are several.
        model: Where the model is now; without it, where the trace says.
        fingerprint (FILE): Write the text of this file again, and compare it. In place of a trace.
    """
    if fingerprint is not None:
        if trace is not None or step is not None or request is not None:
            raise ValueError("--fingerprint writes a whole text again; leave out the trace, --step and --request")
        raise typer.Exit(_rewrite(fingerprint, model))
    if trace is None:
        raise ValueError("name a file: outrider replay TRACE, or outrider replay --fingerprint FILE")
    with loading("the trace"):
        from outrider_lab.traces import read

        recorded = read(trace)
    if recorded.problem is not None:
        say(f"note: {recorded.problem}; everything before it is shown", YELLOW)
    if step is None:
        _summary(recorded, request)
        return
    text = recorded.text(request)
    # Errors about the step or the prompt come before the model is loaded.
    _ = text.step(step), text.prompt
    with loading(recorded.header.model):
        llm = trace_model(recorded, model)
    with working(f"computing step {step} again"):
        from outrider_lab.replay import replay as again

        result = again(recorded, llm.decoder, step, text.id)
    _show(result, recorded, llm.tokenizer)
    raise typer.Exit(0 if result.same else 1)


def trace_model(trace: Trace, name: str | None, drafts: bool = False) -> Any:
    """Load the model of a trace, with its drafter if the verifier reads the drafter's probabilities.

    Args:
        drafts: Whether to load the drafter in any case.
    """
    from outrider.engine.llm import LLM
    from outrider.verify import VERIFIERS

    header = trace.header
    needed = drafts or (header.verifier in VERIFIERS and VERIFIERS[header.verifier].needs_probs)
    config = header.speculative_config if needed else None
    return LLM(name or header.model, speculative_config=config, max_num_seqs=1, **_precision(header))


def _precision(recorded: RunRecord | Fingerprint) -> dict[str, Any]:
    """The arguments of `LLM` that keep weights, keys and values as recorded. The blocks of a GGUF file stay as they are."""
    name = recorded.dtype
    weights = {"quantization": name} if name in ("int8", "int4") else {"dtype": "auto" if name == "gguf" else name}
    return weights | ({"kv_cache_dtype": recorded.kv_cache_dtype} if recorded.kv_cache_dtype else {})


def _rewrite(file: Path, model: str | None) -> int:
    """Write the text of a fingerprint again and say whether it is the same. Returns the exit code."""
    from outrider.engine.llm import LLM
    from outrider.kernels.machine import machine
    from outrider_lab.fingerprints import read_fingerprint, rewrite

    recorded = read_fingerprint(file)
    name = model or recorded.model
    with loading(name):
        llm = LLM(name, max_model_len=recorded.max_length, max_num_seqs=1, **_precision(recorded))
    here = {key: str(fact) for key, fact in machine().items()}
    moved = [
        f"{key} {recorded.machine[key]}, here {here[key]}"
        for key in here
        if here[key] != recorded.machine.get(key, here[key])
    ]
    if moved:
        say(f"recorded on another machine: {'; '.join(moved)}")
    with working(f"writing {len(recorded.tokens)} tokens again"):
        tokens, at = rewrite(recorded, llm)
    if at is None:
        say(f"the same {len(tokens)} tokens", GREEN)
        return 0
    was, now = (
        row[at] if at < len(row) else f"the end ({why})"
        for row, why in ((recorded.tokens, recorded.finish), (tokens, ""))
    )
    say(f"differs at token {at}: recorded {was}, here {now}", RED)
    if recorded.path != "native":
        say(f"the {recorded.path} path wrote it, whose bits are promised on one machine only")
    return 1


# -- the summary ----------------------------------------------------------------------------------------------------------


def _summary(trace: Trace, request: int | None) -> None:
    header, out = trace.header, console()
    texts = [trace.text(request)] if request is not None else list(trace.texts.values())
    config = ", ".join(f"{k} {v}" for k, v in header.speculative_config.items()) or "plain decoding"
    cells = f", {header.kv_cache_dtype} keys and values" if header.kv_cache_dtype else ""
    print(f"{header.model}, {header.dtype} on {header.device}{cells}; {config}")
    print(f"verifier {header.verifier}, {header.guarantee}; outrider {header.outrider}, {header.date}")
    heads = "request", "prompt", "tokens", "steps", "accepted of drafted", "tokens/step", "seconds", "<ended by"
    shown = table(None, *heads)
    for text in texts[:40]:
        shown.add_row(*_row(text))
    out.print(shown)
    if len(texts) > 40:
        print(f"... and {len(texts) - 40} more; --request ID shows one")
    if request is not None:
        print("tokens, | between steps (a accepted, c correction, b bonus, p plain):")
        print("|".join(step.origins for step in texts[0].steps))
    elif trace.acceptance:
        rates = "  ".join(f"{d.depth}: {d.rate:.0%} of {d.drafted}" for d in trace.acceptance)
        print(f"accepted by depth of the draft token   {rates}")
    if trace.seconds:
        whole = sum(trace.seconds.values())
        shares = "  ".join(f"{phase} {part:.2f} s ({part / whole:.0%})" for phase, part in trace.seconds.items())
        print(f"time in steps   {shares}")
    if header.detail.value != "counts" and texts and texts[0].steps:
        which = f" --request {texts[0].id}" if len(trace.texts) > 1 else ""
        telling = max(texts[0].steps, key=lambda s: (s.accepted, s.drafted)).step
        say(f"Next: outrider replay {trace.path}{which} --step {telling}")


def _row(text: TracedText) -> list[str]:
    m, end = text.metrics, text.end
    length = f"{m.mean_acceptance_length:.2f}" if m.num_spec_steps else "-"
    seconds = "-" if end is None or end.seconds is None else f"{end.seconds:.2f}"
    counts = (text.id, text.request.prompt_tokens, text.output_tokens, m.num_spec_steps)
    accepted = f"{m.num_accepted_draft_tokens} of {m.num_draft_tokens}"
    return [*map(str, counts), accepted, length, seconds, text.finish or "not seen"]


# -- a step -------------------------------------------------------------------------------------------------------------


def _show(result: Replay, trace: Trace, tokenizer: Any) -> None:
    def show(token: int) -> str:
        return f"token {token}" if tokenizer is None else repr(texts.label(token))

    from outrider.core.detokenizer import TokenBytes

    texts = TokenBytes(tokenizer)
    step, params, text = result.step, result.text.request.params, result.text
    asked = (
        ", ".join(f"{k} {v}" for k, v in params.items() if k not in ("max_tokens", "ignore_eos")) or "temperature 1.0"
    )
    print(
        f"request {text.id}, step {step.step} of {len(text.steps)}, position {step.position}: {trace.header.verifier}, {asked}, "
        f"seed {text.request.seed}"
    )
    if tokenizer is not None:
        print("after " + paint(repr(printable(texts.decode(result.before[-24:]))), DIM))
    if step.note:
        say(step.note)
    print()
    console().print(_tree(result, show))
    accepted = min(len(result.path) - 1, len(result.written))
    after_draft = "in place of the draft token" if step.refused else "the bonus"
    kind = after_draft if step.drafted else "plain decoding"
    last = f"{show(result.token)} is the target's, {kind}" if len(result.written) > accepted else "then the text ended"
    written = " ".join(map(show, result.written))
    print(f"\nresult: {written}   ({accepted} of {step.drafted} draft tokens accepted; {last})")
    if result.same:
        say("computed again: the same draft, verdict and tokens as recorded", GREEN)
        return
    why = "" if trace.header.batch_invariant else "; this model's logits depend on the batch, so near-ties can differ"
    for line in result.differs:
        say(f"differs: {line}", RED)
    say(f"Recorded by outrider {trace.header.outrider} on {trace.header.machine}{why}")


def _tree(result: Replay, show: Any) -> Tree:
    from rich.tree import Tree

    root = Tree(_label(result.nodes[0], result, show))
    branches = {0: root}
    for node in result.nodes[1:]:
        branches[node.node] = branches[node.parent].add(_label(node, result, show))
    return root


def _label(node: ExplainedNode, result: Replay, show: Any) -> Any:
    """The token, whether it was accepted, and why. Below an accepted token: the likeliest next tokens of the target."""
    from rich.text import Text as Styled

    late = node.judged and len(result.written) < min(node.depth, len(result.path))
    mark = "·" if late or not node.judged else "✓" if node.accepted else "✗"
    label = Styled(show(node.token), style="bold" if node.accepted else "")
    if node.node:
        why = "not used: the text had ended" if late else node.why(show)
        label = Styled(f"{mark} ", style=_STYLES[mark]) + label + Styled(f"  {why}", style=_STYLES[mark])
    if node.drawn is not None and not late:
        likely = ", ".join(f"{show(t)} {p:.2f}" for t, p in node.likely[:3])
        label.append(f"\nlikeliest next: {likely}", style="dim")
        if node.node == result.path[-1]:
            rest = node.explains_by and result.step.refused
            drew = "the residual distribution gave" if rest else "the target drew"
            label.append(
                f"\n{drew} {show(node.drawn)}" if node.drawn >= 0 else "\nno token has a probability above 0 here"
            )
    return label
