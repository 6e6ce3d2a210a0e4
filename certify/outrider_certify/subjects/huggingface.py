"""transformers' own generate as a subject: assisted generation, prompt lookup, or any other arguments that speculate."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from outrider.lab.bench.report.format import count
from outrider.lab.certify.engine import weights_hash
from outrider.models.dtypes import parse_dtype
from outrider.models.load import files_of
from outrider.models.pretrained import check_whole
from outrider_certify.causes import warped
from outrider_certify.subjects.base import Job, Prompt, Row, Subject, Unsupported, Way, Writing, failed

_SPECULATIVE = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate")


class TransformersSubject(Subject):
    """model: a folder, a hub name, `builtin:code`, or a loaded model. generate: arguments of generate; "assistant_model" is
    given as `model` is. dtype: of both models. Its sampled texts promise the distribution."""

    def __init__(
        self,
        model: Any,
        generate: dict[str, Any],
        prompts: Sequence[Prompt],
        *,
        dtype: str = "float32",
        tokenizer: Any | None = None,
    ) -> None:
        super().__init__()
        if not any(name in generate for name in _SPECULATIVE):
            raise ValueError(
                f"generate={generate} does not speculate; give for example "
                '{"assistant_model": "./my-small-model"} or {"prompt_lookup_num_tokens": 5}'
            )
        self.dtype: torch.dtype = getattr(torch, parse_dtype("float32" if dtype == "auto" else dtype))
        self.model, self.tokenizer = _loaded(model, self.dtype, tokenizer)
        self.options = dict(generate)
        self.assistant: Any = None
        if "assistant_model" in generate:
            self.assistant, _ = _loaded(generate["assistant_model"], self.dtype, self.tokenizer)
            self.options["assistant_model"] = self.assistant
        name = model if isinstance(model, str) else type(model).__name__
        named = {k: str(v) if k == "assistant_model" else v for k, v in generate.items()}
        precision = str(self.dtype).removeprefix("torch.")
        self.name = f"transformers {version('transformers')}, {name} ({precision}), {json.dumps(named)}"
        self.properties = {
            "engine": f"transformers {version('transformers')}",
            "model": name,
            "precision": str(self.dtype),
            "arguments of generate": json.dumps(named),
        }
        self.weights = {str(m): weights_hash(m) for m in (model, generate.get("assistant_model")) if isinstance(m, str)}
        config = self.model.generation_config.eos_token_id
        self.end_ids = tuple([config] if isinstance(config, int) else config or ())
        self.vocab_size = int(self.model.config.vocab_size)
        self._prompts = [self._ids(p) for p in prompts]
        self._noise: float | None = None

    def _ids(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError("the model has no tokenizer, and prompts are texts")
        return tuple(self.tokenizer(prompt)["input_ids"])

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def ways(self) -> Sequence[Way]:
        ways = [Way("as configured")]
        if self.assistant is not None:
            fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            ways += [Way(count(n, "draft token"), {"num_assistant_tokens": n, **fixed}) for n in (1, 4)]
        return ways

    def write(self, jobs: Sequence[Job], way: Way) -> list[Writing]:
        if self.assistant is not None:
            draft = self.assistant.generation_config
            before = {k: getattr(draft, k) for k in way.options}
            try:
                for name, value in way.options.items():
                    setattr(draft, name, value)
                return [self._one(job, self.options) for job in jobs]
            finally:
                for name, value in before.items():
                    setattr(draft, name, value)
        return [self._one(job, self.options) for job in jobs]

    def plain(self, jobs: Sequence[Job]) -> list[Writing]:
        rest = {k: v for k, v in self.options.items() if k not in _SPECULATIVE}
        return [self._one(job, rest) for job in jobs]

    @torch.inference_mode()
    def _one(self, job: Job, options: dict[str, Any]) -> Writing:
        p, ends = job.params, self._ends(job)
        if p.n > 1 or p.presence_penalty or p.frequency_penalty or p.allowed_token_ids is not None:
            raise Unsupported("transformers' generate has no such parameter, or not together with speculation")
        if p.logprobs is not None:
            raise Unsupported("transformers' generate returns scores, and no log-probabilities of tokens")
        given: dict[str, Any] = {"do_sample": p.temperature > 0, "max_new_tokens": p.max_tokens}
        if p.temperature > 0:
            given |= {"temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p or None}
        if p.repetition_penalty != 1:
            given["repetition_penalty"] = p.repetition_penalty
        if p.bad_words:
            given["bad_words_ids"] = [list(w) for w in p.bad_words]
        if p.logit_bias:
            given["sequence_bias"] = [[[int(t)], float(b)] for t, b in p.logit_bias.items()]
        if p.min_tokens and ends:
            given["min_new_tokens"] = p.min_tokens
        if p.stops:
            given |= {"stop_strings": list(p.stops), "tokenizer": self.tokenizer}
        # Without an end token generate would take that of the model, so an impossible one stands for none.
        config = copy.deepcopy(self.model.generation_config)
        config.update(**given, eos_token_id=list(ends) or -1, pad_token_id=ends[0] if ends else 0)
        ids = torch.tensor([[int(t) for t in job.prompt]])
        torch.manual_seed((p.seed or 0) % 2**63)
        more = {"tokenizer": self.tokenizer} if p.stops else {}
        try:
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, **options, **more
            )
        except ValueError as error:
            raise Unsupported(f"transformers' generate refuses it ({error})"[:300]) from None
        except Exception as error:  # whatever it fails with is a finding
            return failed(error)
        tokens = out[0, ids.shape[1] :].tolist()
        text = self.tokenizer.decode(tokens) if self.tokenizer is not None else ""
        stop = next((s for s in p.stops if s in text), None)
        if stop is not None:
            text = text[: text.index(stop)]
        ended = stop is not None or (bool(tokens) and tokens[-1] in ends)
        return Writing(tokens, text, [int(t) for t in job.prompt], "stop" if ended else "length", usage=len(tokens))

    def _ends(self, job: Job) -> tuple[int, ...]:
        return (*(() if job.params.ignore_eos else self.end_ids), *job.params.stop_token_ids)

    # -- the target's own numbers -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _logits(self, model: Any, tokens: Sequence[int]) -> np.ndarray:
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()

    def _rows(self, model: Any, job: Job, writing: Writing) -> list[Row]:
        text, start = [*writing.prompt, *writing.tokens], len(writing.prompt)
        logits = self._logits(model, text)[:, : self.vocab_size]
        return [
            Row(warped(x, job.params, text[: start + at], start, self._ends(job)), logits=x)
            for at, x in enumerate(logits[start - 1 : len(text) - 1])
        ]

    def rows(self, job: Job, writing: Writing) -> list[Row]:
        return self._rows(self.model, job, writing)

    def draft_rows(self, job: Job, writing: Writing) -> list[Row] | None:
        if self.assistant is None or self.assistant.config.vocab_size != self.vocab_size:
            return None
        return self._rows(self.assistant, job, writing)

    @torch.inference_mode()
    def noise(self) -> float | None:
        """The same text read at once, and token by token with a cache."""
        if self._noise is None:
            tokens = list(self._prompts[0])
            [text] = self.plain([Job(tuple(tokens), _greedy(24))])
            tokens += text.tokens
            whole, past, gaps = self._logits(self.model, tokens), None, list[float]()
            for at, token in enumerate(tokens):
                out = self.model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
                past = out.past_key_values
                gaps.append(float(np.abs(out.logits[0, -1].float().numpy() - whole[at]).max()))
            self._noise = max(gaps)
        return self._noise

    def margin(self, job: Job, writing: Writing, at: int, other: int | None) -> float | None:
        if other is None:
            return None
        text = Writing(writing.tokens[: at + 1], prompt=writing.prompt)
        probs = self.rows(job.with_(temperature=1.0), text)[at].probs
        with np.errstate(divide="ignore"):
            return float(abs(np.log(probs[writing.tokens[at]]) - np.log(probs[other])))

    def show(self, tokens: Sequence[int]) -> str:
        return repr(self.tokenizer.decode(list(tokens)))[1:-1] if self.tokenizer is not None else super().show(tokens)


def _greedy(tokens: int) -> Any:
    from outrider.core.params import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def _loaded(model: Any, dtype: torch.dtype, tokenizer: Any | None) -> tuple[Any, Any]:
    """A model of transformers in a precision, and its tokenizer. Raises what `files_of` raises."""
    if not isinstance(model, str):
        return model.eval(), tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, more = files_of(model, str(dtype).removeprefix("torch.")), dict[str, Any]()
    if path.suffix == ".gguf":
        path, more = path.parent, {"gguf_file": path.name}

    def read(kind: Any, **options: Any) -> Any:
        try:
            return kind.from_pretrained(path, trust_remote_code=False, **options, **more)
        except Exception as error:  # transformers and the readers of files raise many kinds
            raise ValueError(
                f"transformers {version('transformers')} cannot load {model} ({type(error).__name__}: {error}). Without "
                f"--generate outrider's own engine is certified: outrider certify {model}"
            ) from error

    raw, info = read(AutoModelForCausalLM, dtype=dtype, output_loading_info=True)
    check_whole(model, raw, info)
    return raw.eval(), tokenizer or read(AutoTokenizer)
