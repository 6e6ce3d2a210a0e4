"""Whether a class of transformers runs here, and with what promise: a tiny random model of it is put through every check.

The definition of its texts is transformers' own greedy `generate`. A class that fails a check is `wrong`; none may be. See
`tests.support.tiny_models` for the models, and docs/models.md for the results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters.base import Drafter, NoDraft
from outrider.engine.decoder import Decoder
from outrider.engine.request import Request
from outrider.models.base import LanguageModel
from outrider.models.hf.model import UnsupportedModel
from outrider.models.load import load
from outrider.models.nodes import Nodes
from outrider.testing.stubs import Echo, Wrong
from tests.support.row_checks import Guided, assert_rows_do_not_depend_on_their_neighbours
from tests.support.tiny_models import VOCAB_SIZE, tiny_config, tiny_model

NEW = 24  # tokens of an answer; with the longer prompt, four windows of a tiny model
_PROMPTS = (3, 13)
_CHUNK = 5  # prompt tokens per forward
_SEEDS = range(12)
_NEAR_TIE = 2e-4  # relative to the largest; two logits so close may be in the other order after rounding
_ROUNDING = 1e-3  # of the largest logit
# Median cosine of the logits of int8 weights with those of floats. With random weights a state or a router amplifies rounding.
_ALIKE = 0.9
RUNS, REFUSED, UNAVAILABLE, WRONG = "runs", "refused", "unavailable", "wrong"


@dataclass(frozen=True)
class ClassReport:
    """What is known of one class.

    status: "runs"; "refused": load says why not; "unavailable": transformers itself makes or continues no such model here;
    "wrong": a check failed. checks: what was compared, and whether it was equal.
    """

    name: str
    model_type: str
    status: str
    reason: str = ""  # for all but "runs"
    path: str = ""  # "native" or "general"
    guarantee: str = ""  # of a text with speculation
    note: str = ""  # what a user should know
    whole: bool = False  # none of its layers can be left out
    checks: dict[str, bool] = field(default_factory=dict[str, bool])

    def as_dict(self) -> dict[str, Any]:
        """For a file of JSON."""
        return {key: value for key, value in asdict(self).items() if value}


def report_of(model_type: str, config: PreTrainedConfig) -> ClassReport:
    """Put a tiny model with the layers of this configuration through all checks. Takes seconds.

    Never raises: what goes wrong is the report.
    """
    name = model_type
    try:
        small = tiny_config(config)
        name = type(raw := tiny_model(small)).__name__
    except Exception as error:  # each class checks its settings in its own way
        return ClassReport(name, model_type, UNAVAILABLE, _line(error))
    with suppress(AttributeError, LookupError):  # transformers itself may not run it, which is found out below
        try:
            load(raw)
        except UnsupportedModel as error:
            return ClassReport(name, model_type, REFUSED, str(error))
    try:
        raw, texts, note = _certain(small)
    except Exception as error:
        return ClassReport(name, model_type, UNAVAILABLE, _line(error))
    known = ClassReport(name, model_type, WRONG, note=note)
    try:
        return _checked(known, raw, texts)
    except Exception as error:
        return replace(known, reason=f"{type(error).__name__}: {_line(error)}")


class _Answer(NamedTuple):
    """text: prompt and continuation. gap: the smallest distance of the two likeliest tokens, relative to the largest logit.
    note: how `generate` differs from it; empty if it wrote it."""

    text: list[int]
    gap: float
    note: str


def _certain(config: PreTrainedConfig) -> tuple[PreTrainedModel, list[list[int]], str]:
    """A model that is sure of its tokens, or a difference would mean nothing; its texts; and how those of `generate` differ."""
    draw = torch.Generator().manual_seed(1)
    best: tuple[float, PreTrainedModel, list[_Answer]] | None = None
    prompts = [torch.randint(2, VOCAB_SIZE, (n,), generator=draw).tolist() for n in _PROMPTS]
    for seed in _SEEDS:
        raw = tiny_model(config, seed)
        size = raw.config.get_text_config().vocab_size
        written = [_greedy(raw, [t % size for t in prompt]) for prompt in prompts]
        gap = min(answer.gap for answer in written)
        if best is None or gap > best[0]:
            best = gap, raw, written
        if gap > _NEAR_TIE:
            break
    assert best is not None
    if best[0] <= _NEAR_TIE:
        raise ValueError(f"in {len(_SEEDS)} random models two tokens were too alike to compare texts")
    return best[1], [answer.text for answer in best[2]], next((a.note for a in best[2] if a.note), "")


def _greedy(raw: Any, prompt: list[int]) -> _Answer:
    """What `generate` writes, unless the model's own forward over that text would write something else.

    The latter happens: a cache forgets what the forward sees, or `generate` counts positions in another way.
    """
    written = _generated(raw, prompt)
    text, note = list(prompt), ""
    if _own_logits(raw, written[:-1])[-NEW:].argmax(-1).tolist() == written[-NEW:]:
        text = written
    else:
        note = "generate differs from the model's own forward, which outrider follows"
        for _ in range(NEW):
            text.append(int(_own_logits(raw, text)[-1].argmax()))
    logits = _own_logits(raw, text[:-1])[-NEW:]
    best = logits.topk(2).values
    return _Answer(text, float(((best[:, 0] - best[:, 1]) / best.abs().amax().clamp_min(1e-6)).min()), note)


def _generated(raw: Any, prompt: list[int]) -> list[int]:
    """The prompt, and what `generate` writes after it."""
    ids = torch.tensor([prompt])
    out = raw.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
    )
    text = out[0].tolist()
    if len(text) != len(prompt) + NEW:
        raise ValueError(f"generate wrote {len(text) - len(prompt)} tokens in place of {NEW}")
    return text


def _own_logits(raw: Any, text: list[int]) -> torch.Tensor:
    """float32 [token, vocab], without a cache."""
    with torch.inference_mode():
        return raw(torch.tensor([text]), use_cache=False).logits[0].float()


def _checked(known: ClassReport, raw: PreTrainedModel, texts: list[list[int]]) -> ClassReport:
    model = load(raw).model
    guarantee = "exact-tokens" if model.batch_invariant else "exact-distribution"
    known = replace(known, path=model.path, guarantee=guarantee, whole=_whole(model))
    prompts = [text[:-NEW] for text in texts]
    answers = [text[-NEW:] for text in texts]
    echo = Echo({tuple(prompt): text for prompt, text in zip(prompts, texts, strict=True)})
    checks: dict[str, Callable[[], bool]] = {
        "logits": lambda: _same_logits(raw, model, texts[1]),
        "plain": lambda: _written(model, prompts) == answers,
        "chain": lambda: _written(model, prompts, Guided(texts, model.vocab_size), width=1) == answers,
        "tree": lambda: _written(model, prompts, Guided(texts, model.vocab_size)) == answers,
        "always right": lambda: _written(model, prompts, echo) == answers,
        "always wrong": lambda: _written(model, prompts, Wrong(0)) == answers,
    }
    if model.batch_invariant:
        checks["sampled"] = lambda: _sampled_alike(model, prompts)
        checks["batch invariant"] = lambda: _same_bits(model)
    checks["int8"] = lambda: _int8(raw, model, texts)
    done = {what: check() for what, check in checks.items()}
    failed = [what for what, held in done.items() if not held]
    reason = f"{', '.join(failed)}: not what it must be" if failed else ""
    return replace(known, status=WRONG if failed else RUNS, reason=reason, checks=done)


def _whole(model: Any) -> bool:
    """Whether no layer can be left out."""
    try:
        model.layer_subset([0])
    except ValueError:
        return True
    return False


def _same_logits(raw: PreTrainedModel, model: LanguageModel, text: list[int]) -> bool:
    """Those of the model's own forward up to rounding: a small fault need not change a token."""
    own = _own_logits(raw, text)
    ours = torch.from_numpy(model.forward(Nodes(np.array([text]), model.new_cache(1, 64), [0])).logits[0])
    gaps = (ours - own).abs().amax(
        -1
    ) / own.abs().max()  # a state that is squared makes the rounding of one token large
    return float(gaps.median()) <= _ROUNDING and float(gaps.max()) <= 20 * _ROUNDING


def _written(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    *,
    width: int = 3,
    temperature: float = 0.0,
    rows: int | None = None,
) -> list[list[int]]:
    """The answers to all prompts. rows: how many are written at a time."""
    params = SamplingParams(temperature=temperature, max_tokens=NEW, ignore_eos=True)
    waiting = [Request(n, list(prompt), params, seed=n) for n, prompt in enumerate(prompts)]
    answers = list[list[int]]()
    rows = rows or len(waiting)
    decoder = Decoder(model, drafter or NoDraft(), controller=Fixed(4, width, 4 * width), num_slots=rows)
    decoder.chunk = _CHUNK
    for start in range(0, len(waiting), rows):
        running = [decoder.start(text) for text in waiting[start : start + rows]]
        for _ in decoder.run(running):
            pass
        for text in running:
            decoder.release(text.slot)
            answers.append(text.output)
    return answers


def _sampled_alike(model: LanguageModel, prompts: list[list[int]]) -> bool:
    """Sampled texts with trees are those of plain decoding, one text at a time."""
    plain = _written(model, prompts, temperature=0.7, rows=1)
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)]
    return _written(model, prompts, Guided(known, model.vocab_size), temperature=0.7) == plain


def _same_bits(model: LanguageModel) -> bool:
    """The logits of a tree in a ragged batch, of chunks of a prompt, and of one token at a time have the same bits."""
    with suppress(AssertionError):
        assert_rows_do_not_depend_on_their_neighbours(model)
        return True
    return False


def _int8(raw: PreTrainedModel, model: LanguageModel, texts: list[list[int]]) -> bool:
    """With int8 weights most logits stay close, and trees still give the texts of plain decoding.

    Not all: a router may choose another expert for a token.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small = load(raw, quantization="int8").model
    ids = np.array(texts[1:2])
    both = (torch.from_numpy(m.forward(Nodes(ids, m.new_cache(1, 64), [0])).logits[0]) for m in (model, small))
    if float(torch.cosine_similarity(*both).median()) < _ALIKE:
        return False
    if not small.batch_invariant:
        return True
    prompts = [text[:-NEW] for text in texts]
    plain = _written(small, prompts, rows=1)
    known = [[*prompt, *answer] for prompt, answer in zip(prompts, plain, strict=True)]
    return _written(small, prompts, Guided(known, small.vocab_size)) == plain and _same_bits(small)


def _line(error: BaseException) -> str:
    """The first line of an error, short."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 240 else f"{text[:237]}..."
