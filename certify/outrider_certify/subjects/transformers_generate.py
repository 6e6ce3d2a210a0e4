"""transformers' own generate as a subject: assisted generation, prompt lookup, or any other arguments that speculate."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider_certify.sampling import distributions_of
from outrider_certify.subject import (
    GeneratedText,
    Prompt,
    SamplingParams,
    SpeculationVariant,
    Subject,
    TextRequest,
    TokenDistribution,
    Unsupported,
    failed,
)
from outrider_certify.trials import counted

_SPECULATIVE = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate")
DTYPES = ("float32", "bfloat16", "float16")


class TransformersSubject(Subject):
    """Its sampled texts promise the distribution, and not the tokens."""

    def __init__(
        self,
        model: Any,
        generate: dict[str, Any] | None,
        prompts: Sequence[Prompt],
        *,
        dtype: str = "float32",
        tokenizer: Any | None = None,
        find: Callable[[str, str], str | Path] = lambda name, dtype: name,
    ) -> None:
        """Load a model and its assistant.

        Args:
            model: A folder, a hub name, or a loaded model.
            generate: Arguments of generate; "assistant_model" is named as `model` is. None for a model that only tells its
                probabilities.
            dtype: Of both models, of DTYPES.
            find: From the name of a model to the folder or GGUF file that transformers loads.

        Raises ValueError for a model that transformers cannot load.
        """
        super().__init__()
        if generate is not None and not any(name in generate for name in _SPECULATIVE):
            raise ValueError(
                f"generate={generate} does not speculate; give for example "
                '{"assistant_model": "./my-small-model"} or {"prompt_lookup_num_tokens": 5}'
            )
        if dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype must be one of auto, {', '.join(DTYPES)}; got {dtype!r}")
        dtype = "float32" if dtype == "auto" else dtype
        self.model, self.tokenizer = _loaded(model, dtype, tokenizer, find)
        self.options = dict(generate or {})
        self.assistant: Any = None
        if "assistant_model" in self.options:
            self.assistant, _ = _loaded(self.options["assistant_model"], dtype, self.tokenizer, find)
            self.options["assistant_model"] = self.assistant
        name = model if isinstance(model, str) else type(model).__name__
        named = json.dumps({k: str(v) if k == "assistant_model" else v for k, v in (generate or {}).items()})
        self.name = f"transformers {version('transformers')}, {name} ({dtype}), {named}"
        self.properties = {
            "engine": f"transformers {version('transformers')}",
            "model": name,
            "precision": f"torch.{dtype}",
            "arguments of generate": named,
        }
        self.versions = {"torch": torch.__version__, "transformers": version("transformers")}
        names = [m for m in (model, (generate or {}).get("assistant_model")) if isinstance(m, str)]
        self.weights = {m: weights_hash(find(m, dtype)) for m in names}
        config = self.model.generation_config.eos_token_id
        self.end_ids = tuple([config] if isinstance(config, int) else config or ())
        self.vocab_size = int(self.model.config.vocab_size)
        self._prompts = [tuple(self.encode(p, prompt=True)) if isinstance(p, str) else p for p in prompts]
        self._noise: float | None = None

    def encode(self, text: str, *, prompt: bool) -> list[int]:
        if self.tokenizer is None:
            raise Unsupported("the model has no tokenizer; give token ids")
        return self.tokenizer(text, add_special_tokens=prompt)["input_ids"]

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def variants(self) -> Sequence[SpeculationVariant]:
        variants = [SpeculationVariant("as configured")]
        if self.assistant is not None:
            fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            variants += [
                SpeculationVariant(counted(n, "draft token"), {"num_assistant_tokens": n, **fixed}) for n in (1, 4)
            ]
        return variants

    def generate(self, requests: Sequence[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        draft = self.assistant.generation_config if self.assistant is not None else None
        before = {k: getattr(draft, k) for k in variant.options}
        try:
            for name, value in variant.options.items():
                setattr(draft, name, value)
            return [self._one(request, self.options) for request in requests]
        finally:
            for name, value in before.items():
                setattr(draft, name, value)

    def plain(self, requests: Sequence[TextRequest]) -> list[GeneratedText]:
        rest = {k: v for k, v in self.options.items() if k not in _SPECULATIVE}
        return [self._one(request, rest) for request in requests]

    @torch.inference_mode()
    def _one(self, request: TextRequest, options: dict[str, Any]) -> GeneratedText:
        p, ends = request.params, self._ends(request)
        if p.n > 1 or p.presence_penalty or p.frequency_penalty or p.allowed_token_ids is not None:
            raise Unsupported("transformers' generate has no such parameter, or not together with speculation")
        if p.logprobs is not None:
            raise Unsupported("transformers' generate returns scores, and no log-probabilities of tokens")
        settings: dict[str, Any] = {"do_sample": p.temperature > 0, "max_new_tokens": p.max_tokens}
        if p.temperature > 0:
            settings |= {"temperature": p.temperature, "top_k": p.top_k, "top_p": p.top_p, "min_p": p.min_p or None}
        if p.repetition_penalty != 1:
            settings["repetition_penalty"] = p.repetition_penalty
        if p.bad_words:
            settings["bad_words_ids"] = [list(w) for w in p.bad_words]
        if p.logit_bias:
            settings["sequence_bias"] = [[[t], b] for t, b in p.logit_bias.items()]
        if p.min_tokens and ends:
            settings["min_new_tokens"] = p.min_tokens
        if p.stop:
            settings["stop_strings"] = list(p.stop)
        # Without an end token generate would take that of the model, so an impossible one stands for none.
        config = copy.deepcopy(self.model.generation_config)
        config.update(**settings, eos_token_id=list(ends) or self.vocab_size, pad_token_id=ends[0] if ends else 0)
        prompt = [int(t) for t in request.prompt]
        ids = torch.tensor([prompt])
        torch.manual_seed((p.seed or 0) % 2**63)
        more = {"tokenizer": self.tokenizer} if p.stop else {}
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
        stop = next((s for s in p.stop if s in text), None)
        if stop is not None:
            text = text[: text.index(stop)]
        ended = stop is not None or (bool(tokens) and tokens[-1] in ends)
        return GeneratedText(tokens, text, prompt, "stop" if ended else "length", usage=len(tokens))

    def _ends(self, request: TextRequest) -> tuple[int, ...]:
        return (*(() if request.params.ignore_eos else self.end_ids), *request.params.stop_token_ids)

    # -- the target's own numbers -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _logits(self, model: Any, tokens: Sequence[int]) -> np.ndarray:
        return model(torch.tensor([list(tokens)])).logits[0].float().numpy()

    def _read(self, model: Any, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        start = len(text.prompt)
        logits = self._logits(model, [*text.prompt, *text.tokens])[start - 1 : -1, : self.vocab_size]
        return distributions_of(logits, request, text, self._ends(request))

    def distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        return self._read(self.model, request, text)

    def draft_distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution] | None:
        if self.assistant is None or self.assistant.config.vocab_size != self.vocab_size:
            return None
        return self._read(self.assistant, request, text)

    @torch.inference_mode()
    def noise(self) -> float | None:
        """The same text read at once, and token by token with a cache."""
        if self._noise is None:
            tokens = list(self._prompts[0])
            params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
            tokens += self.plain([TextRequest(tuple(tokens), params)])[0].tokens
            whole, past, gaps = self._logits(self.model, tokens), None, list[float]()
            for at, token in enumerate(tokens):
                out = self.model(torch.tensor([[token]]), past_key_values=past, use_cache=True)
                past = out.past_key_values
                gaps.append(float(np.abs(out.logits[0, -1].float().numpy() - whole[at]).max()))
            self._noise = max(gaps)
        return self._noise

    def show(self, tokens: Sequence[int]) -> str:
        return repr(self.tokenizer.decode(list(tokens)))[1:-1] if self.tokenizer is not None else super().show(tokens)


def _loaded(model: Any, dtype: str, tokenizer: Any | None, find: Callable[[str, str], str | Path]) -> tuple[Any, Any]:
    """A model of transformers in a precision, and its tokenizer. Raises ValueError, and what `find` raises."""
    if not isinstance(model, str):
        return model.eval(), tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, more = find(model, dtype), dict[str, Any]()
    if str(path).endswith(".gguf"):
        path, more = Path(path).parent, {"gguf_file": Path(path).name}

    def read(kind: Any, **options: Any) -> Any:
        try:
            return kind.from_pretrained(path, trust_remote_code=False, **options, **more)
        except Exception as error:  # transformers and the readers of files raise many kinds
            raise ValueError(
                f"transformers {version('transformers')} cannot load {model} ({type(error).__name__}: {error})"
            ) from error

    raw, info = read(AutoModelForCausalLM, dtype=getattr(torch, dtype), output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"the weights of {model} are incomplete: {len(missing)} tensors of a {type(raw).__name__} are in no file, "
            f"{missing[0]} among them. Download it again, or save it again with save_pretrained"
        )
    return raw.eval(), tokenizer or read(AutoTokenizer)


def weights_hash(path: str | Path) -> str:
    """sha256 over the weights of a folder, or of a GGUF file; "not at hand" without them."""
    path = Path(path).expanduser()
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(2**22):
                digest.update(block)
    return digest.hexdigest() if files else "not at hand"
