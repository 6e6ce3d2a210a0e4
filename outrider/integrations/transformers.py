"""outrider from inside transformers: `model.generate(**inputs, custom_generate=outrider.custom_generate(...))`.

transformers prepares everything (generation config, logits processors, stopping criteria, expanded inputs) and calls us
in place of its own sampling loop. What it prepared is read back here, object by object: each is either translated into
`SamplingParams` or refused by name, so nothing is ignored.
"""

from __future__ import annotations

import inspect
import threading
import warnings
import weakref
from collections import abc
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import logits_process as lp
from transformers.generation import stopping_criteria as sc
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.control import Controller
from outrider.core.outputs import SpeculativeMetrics
from outrider.core.params import SamplingParams
from outrider.core.types import Guarantee
from outrider.drafters.base import Drafter
from outrider.drafters.config import SpeculativeConfig
from outrider.engine.decoder import nth_seed
from outrider.engine.llm import LLM
from outrider.engine.prompts import PromptEncoder
from outrider.engine.request import Request, Sequence

# What can be translated, in the order outrider applies it; `generate` builds its own list in this order too.
_ORDER: tuple[type, ...] = (
    lp.SequenceBiasLogitsProcessor,
    lp.RepetitionPenaltyLogitsProcessor,
    lp.NoBadWordsLogitsProcessor,
    lp.MinLengthLogitsProcessor,
    lp.MinNewTokensLengthLogitsProcessor,
    lp.SuppressTokensLogitsProcessor,
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.LogitNormalization,  # changes no distribution
)
_HARMLESS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}


def custom_generate(
    speculative_config: SpeculativeConfig | dict[str, Any] | None = None,
    *,
    tokenizer: Any | None = None,
    seed: int | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    drafter: Drafter | None = None,
    controller: Controller | None = None,
) -> CustomGenerate:
    """A callable for `model.generate(custom_generate=...)`. Keep it: a second call with the same model starts at once.

    tokenizer: needed for stop_strings (transformers hands none to a callable). seed: of the sampling, 64 bits, row i with a
    seed made of it and i; None draws one from torch's generator, so `torch.manual_seed` decides. `generate(seed=...)` goes
    before it. max_num_seqs: rows that decode side by side; `generate` may be given more. The others are `LLM`'s; the device is
    the model's.

    Raises ValueError for a wrong speculative_config at once, and for the rest when `generate` calls: for what `LLM` refuses,
    and for every setting of `generate` that outrider has no equal of, by name.
    """
    options = {
        "tokenizer": tokenizer,
        "speculative_config": SpeculativeConfig.of(speculative_config),
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "drafter": drafter,
        "controller": controller,
    }
    return CustomGenerate(options, seed)


@dataclass(frozen=True)
class LastCall:
    """How the latest `generate` went: its guarantee, the seed it used, and one entry of each list per returned row."""

    guarantee: Guarantee
    seed: int
    metrics: list[SpeculativeMetrics]


class CustomGenerate:
    """What `custom_generate` returns. `last` tells about the latest call.

    Greedy texts are those of `model.generate`. Sampled rows follow the same distribution, with other draws. Three differences are
    meant. Padding does not count as written text for the repetition penalty. Stop strings are looked for in the new text only.
    The model runs in evaluation mode.
    """

    def __init__(self, options: dict[str, Any], seed: int | None = None) -> None:
        self.last: LastCall | None = None
        self._options, self._seed = options, seed
        self._engines: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, LLM]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: Iterable[Any],
        stopping_criteria: Iterable[Any],
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any | None = None,
        *,
        stop_strings: str | abc.Sequence[str] | None = None,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Called by `generate`, which hands over its arguments stop_strings and seed because they are named here."""
        streamer = streamer or _dropped(model, "streamer")
        if _dropped(model, "assistant_model") is not None:
            raise ValueError(
                "assistant_model is not used with custom_generate; give the draft model to outrider instead:\n"
                'outrider.custom_generate({"method": "draft_model", "model": assistant})'
            )
        if synced_gpus:
            raise ValueError("synced_gpus: outrider runs a model on one device; call generate without custom_generate")
        check_config(generation_config)
        prompts = _prompts(input_ids, model_kwargs)
        stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
        params = translate(generation_config, logits_processor, stopping_criteria, input_ids.shape[1], stops)
        pad = _pad_id(generation_config, params, len(prompts))
        if params.stops and self._options["tokenizer"] is None:
            raise ValueError(
                "stop_strings need the tokenizer, and transformers does not hand it to a callable; give it here:\n"
                "outrider.custom_generate(..., tokenizer=tokenizer)"
            )
        seed = self._seed if seed is None else seed
        if seed is None:
            seed = 0 if params.greedy else int(torch.randint(2**63 - 1, ()))
        with self._lock:
            engine = self.engine(model)
            out = self._run(engine, prompts, params, seed, streamer, pad)
        new = torch.tensor(out, dtype=input_ids.dtype, device=input_ids.device)
        sequences: Any = torch.cat([input_ids, new], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def engine(self, model: PreTrainedModel) -> LLM:
        """The model made ready, once. Made again when its weights were changed or exchanged since."""
        mark = hash(tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()))
        held = self._engines.get(model)
        if held is None or held[0] != mark:
            training = [m for m in model.modules() if m.training]
            self._engines.pop(model, None)  # before the new one takes its memory
            try:
                engine = LLM(model, device=str(model.device), **self._options)
            finally:
                for module in training:
                    module.training = True
            # Without its source: an engine that kept the model, its own key here, alive would never go.
            loaded = replace(engine.loaded, source=engine.loaded.name)
            engine.prompts = PromptEncoder(loaded)
            engine.runtime = replace(engine.runtime, loaded=loaded, prompts=engine.prompts)
            held = self._engines[model] = (mark, engine)
        return held[1]

    def _run(
        self, engine: LLM, prompts: list[list[int]], params: SamplingParams, seed: int, streamer: Any | None, pad: int
    ) -> list[list[int]]:
        """New tokens of every row, padded to the longest."""
        words: Any = tuple(params.bad_words)
        requests = [Request(i, p, params, nth_seed(seed, i), words) for i, p in enumerate(prompts)]
        rows, sent = engine.scheduler.add(requests), 0
        for _ in engine.scheduler.run(rows):
            if streamer is not None and all(row.output for row in rows):
                sent = _put(streamer, rows, sent, pad)
        if streamer is not None:
            streamer.end()
        for row in rows:
            if row.finish and row.finish.finish == "error":
                warnings.warn(f"row {row.id} was stopped: {row.finish.reason}", RuntimeWarning, stacklevel=5)
        self.last = LastCall(engine.decoder.guarantee, seed, [row.counts.speculative for row in rows])
        longest = max(len(row.output) for row in rows)
        return [row.output + [pad] * (longest - len(row.output)) for row in rows]


def check_config(config: GenerationConfig) -> None:
    """Raise ValueError for modes and outputs that no processor shows."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"outrider decodes greedily or by sampling, and this generation config asks for {mode.value}; set "
            "num_beams=1 and leave out assistant, prompt-lookup, penalty_alpha, constraint and dola settings, or call "
            "generate without custom_generate"
        )
    if config.cache_implementation == "quantized":
        raise ValueError(
            "cache_implementation='quantized' changes the text, and outrider has its own cache; leave it out"
        )
    asked = [
        k for k in ("output_scores", "output_logits", "output_attentions", "output_hidden_states") if getattr(config, k)
    ]
    if asked and config.return_dict_in_generate:
        raise ValueError(
            f"outrider returns sequences only, and {', '.join(asked)} was asked for; leave it out, or use "
            "outrider.LLM with SamplingParams(logprobs=...) for log-probabilities"
        )


def translate(
    config: GenerationConfig,
    processors: Iterable[Any],
    criteria: Iterable[Any],
    length: int,
    stops: abc.Sequence[str] = (),
) -> SamplingParams:
    """From transformers' prepared objects to parameters, with bad words as token ids. length: tokens of the padded prompts.

    Raises ValueError.
    """
    chosen: dict[str, Any] = {
        "temperature": 1.0 if config.do_sample else 0.0,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    words: list[tuple[int, ...]] = []
    least, rank = 0, -1
    for p in processors:
        kind = type(p)
        if kind not in _ORDER:
            raise ValueError(
                f"outrider has no equal of {kind.__name__}, so the text would not be what was asked for; leave out the "
                "setting or object that brings it, or call generate without custom_generate"
            )
        if _ORDER.index(kind) <= rank:
            raise ValueError(
                f"{kind.__name__} comes twice or in another order than outrider applies it; give it as a setting"
            )
        rank = _ORDER.index(kind)
        if getattr(p, "filter_value", float("-inf")) != float("-inf") or getattr(p, "min_tokens_to_keep", 1) != 1:
            raise ValueError(
                f"{kind.__name__} with filter_value or min_tokens_to_keep of its own is not supported; leave them out"
            )
        match p:
            case lp.NoBadWordsLogitsProcessor():  # a SequenceBias too, so it comes first
                words += [tuple(int(t) for t in w) for w in p.sequence_bias]
            case lp.SequenceBiasLogitsProcessor():
                if any(len(s) != 1 for s in p.sequence_bias):
                    raise ValueError("sequence_bias over several tokens is not supported; biases of single tokens are")
                chosen["logit_bias"] = {int(s[0]): float(b) for s, b in p.sequence_bias.items()}
            case lp.RepetitionPenaltyLogitsProcessor():
                if p.prompt_ignore_length:
                    raise ValueError(
                        "RepetitionPenaltyLogitsProcessor(prompt_ignore_length=...) is not supported; leave it out"
                    )
                chosen["repetition_penalty"] = p.penalty
            case lp.MinLengthLogitsProcessor():
                least = max(least, p.min_length - length)
            case lp.MinNewTokensLengthLogitsProcessor():
                least = max(least, p.min_new_tokens + p.prompt_length_to_skip - length)
            case lp.SuppressTokensLogitsProcessor():
                words += [(int(t),) for t in p.suppress_tokens.tolist()]
            case lp.TemperatureLogitsWarper():
                chosen["temperature"] = p.temperature if config.do_sample else 0.0
            case _:
                chosen |= {name: getattr(p, name) for name in ("top_k", "top_p", "min_p") if hasattr(p, name)}
    stops, ends, most = list(stops), list[int](), config.max_length
    for c in criteria:
        match c:
            case sc.MaxLengthCriteria() if type(c) is sc.MaxLengthCriteria:
                most = c.max_length
            case sc.EosTokenCriteria() if type(c) is sc.EosTokenCriteria:
                ends = [int(t) for t in c.eos_token_id.tolist()]
            case sc.StopStringCriteria() if type(c) is sc.StopStringCriteria:
                stops += c.stop_strings
            case _:
                raise ValueError(
                    f"outrider cannot ask {type(c).__name__} in the middle of a step; use max_new_tokens, eos_token_id "
                    "or stop_strings, or call generate without custom_generate"
                )
    if most is None:
        raise ValueError("outrider needs a length to stop at; give max_new_tokens")
    least = min(least, most - length)
    if stops and least:
        raise ValueError(
            "stop_strings with min_new_tokens is not supported: in outrider the minimum holds for both; leave one out"
        )
    return SamplingParams(
        **chosen, bad_words=words, max_tokens=most - length, min_tokens=least, stop=stops, stop_token_ids=ends
    )


def _prompts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[list[int]]:
    """The rows without their padding. Raises ValueError for inputs that cannot be run."""
    odd = [k for k, v in model_kwargs.items() if v is not None and k not in _HARMLESS]
    if odd:
        raise ValueError(
            f"outrider continues token ids and was given {', '.join(odd)} too; call generate without custom_generate"
        )
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "outrider keeps its own cache; leave out past_key_values and pass the whole prompt as input_ids"
        )
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    if mask.shape != input_ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            f"attention_mask must hold 0 and 1 in the shape {tuple(input_ids.shape)}, got {tuple(mask.shape)}"
        )
    if not bool(mask[:, -1].all()):
        raise ValueError("the prompts are padded on the right; set tokenizer.padding_side = 'left'")
    positions = model_kwargs.get("position_ids")
    usual = mask.cumsum(-1) - 1
    if positions is not None and (positions.shape != usual.shape or bool(((positions != usual) & (mask == 1)).any())):
        raise ValueError(
            "position_ids other than 0, 1, 2, ... of each row's own tokens are not supported; leave them out"
        )
    return [ids[on == 1].tolist() for ids, on in zip(input_ids, mask, strict=True)]


def _pad_id(config: GenerationConfig, params: SamplingParams, rows: int) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is not None:
        return int(pad)
    if rows > 1 and params.stops:
        raise ValueError("rows that stop at different lengths are padded; give pad_token_id")
    return 0  # rows of one length, or a single one


def _put(streamer: Any, rows: list[Sequence], sent: int, pad: int) -> int:
    """Hand complete columns [row] to a streamer, as transformers does; a row that has ended is padded."""
    texts = [row.output for row in rows]
    open_rows = [len(t) for t, row in zip(texts, rows, strict=True) if row.finish is None]
    ready = min(open_rows) if open_rows else max(len(t) for t in texts)
    for i in range(sent, ready):
        streamer.put(torch.tensor([t[i] if i < len(t) else pad for t in texts]))
    return max(sent, ready)


def _dropped(model: PreTrainedModel, name: str) -> Any:
    """An argument of the `generate` call we are in. transformers (5.19) keeps `streamer` and `assistant_model` from
    callables (`_extract_generation_mode_kwargs`); a dropped streamer would leave its reader waiting for ever."""
    for caller in inspect.stack(0)[2:6]:
        if caller.function == "generate" and caller.frame.f_locals.get("self") is model:
            return caller.frame.f_locals.get(name)
    return None
