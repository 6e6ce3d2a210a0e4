"""Our engine as a subject: a model with a speculative_config, every way to speculate, and its own plain decoding."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from outrider.control import Fixed
from outrider.core.extras import needs
from outrider.core.files import public_name, sha256
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsWarper, SequenceState
from outrider.core.types import Array, Guarantee
from outrider.drafters import ModelDrafter, make_drafters
from outrider.drafters.base import Drafter
from outrider.drafters.config import DrafterSetup, SpeculativeConfig
from outrider.engine.decoder import nth_seed
from outrider.engine.llm import LLM
from outrider.engine.request import Request
from outrider.engine.request import Sequence as Text
from outrider.engine.runtime import build
from outrider.engine.scheduler import Scheduler
from outrider.kernels.machine import machine
from outrider.models import checkpoint
from outrider.models.base import LanguageModel
from outrider.models.dtypes import DTYPES
from outrider.models.files import folder_of, gguf_files, weight_files
from outrider.models.load import Loaded, load
from outrider.models.nodes import Nodes
from outrider.testing.stubs import Wrong
from outrider.verify import VERIFIERS
from outrider_certify.cli import CertifyOptions, parse_json, read_prompts, server_subject
from outrider_certify.subject import (
    GeneratedText,
    Prompt,
    SpeculationVariant,
    Subject,
    TextRequest,
    TokenDistribution,
    Unsupported,
    failed,
)
from outrider_certify.subject import SamplingParams as CertifiedParams
from outrider_certify.subjects.function import EXAMPLE, imported, is_python_name, python_subject
from outrider_certify.trials import counted
from outrider_lab.certify.exact import VerifierFunction

_PLAIN = SpeculativeConfig.of(None)
CHUNK = 64  # tokens per forward, where a text is read


class EngineSubject(Subject):
    """A model with a speculative_config."""

    batches = True

    def __init__(
        self,
        model: Any,
        config: dict[str, Any] | None,
        prompts: Sequence[Prompt],
        *,
        rows: int = 6,
        max_length: int = 512,
        **options: Any,
    ) -> None:
        """Load a model, and the drafters when they are first asked.

        Args:
            model: As `LLM` takes it.
            config: The speculative_config to certify.
            prompts: Texts or token ids.
            rows: Sequences side by side.
            options: Precision, as `load` takes it.
        """
        super().__init__()
        self.loaded: Loaded = model if isinstance(model, Loaded) else load(model, **options)
        self.config = SpeculativeConfig.of(config)
        target = self.loaded.model
        self.vocab_size, self.end_ids = target.vocab_size, tuple(self.loaded.end_ids)
        self.exact_numbers = target.batch_invariant
        self.slots, self.max_length = rows, min(max_length, target.max_length)
        self.long_context = self.max_length // 2
        self.llm = LLM(self.loaded, max_num_seqs=rows, max_model_len=self.max_length)
        promise = VERIFIERS[self.config.verifier].guarantee if target.batch_invariant else Guarantee.EXACT_DISTRIBUTION
        self.exact_tokens = promise is Guarantee.EXACT_TOKENS
        about = machine()
        self.versions = {name: about[name] for name in ("torch", "transformers", "outrider") if name in about}
        name = public_name(self.loaded.name)
        self.name = f"outrider, {name} ({self.loaded.weights}), {self.config.method}, {self.config.verifier}"
        self.properties = {
            "engine": "outrider, in this process",
            "model": name,
            "precision": self.loaded.weights,
            "speculative_config": json.dumps(_readable(config or {})),
            "verifier": self.config.verifier,
            "promise": promise.value,
            "kernels": about["kernels"],
        }
        self.weights = {name: weights_hash(self.loaded.name)}
        most = self.max_length // 2
        self._prompts = [tuple(self.encode(p, prompt=True) if isinstance(p, str) else p)[-most:] for p in prompts]
        self._noise: float | None = 0.0 if self.exact_numbers else None

    def encode(self, text: str, *, prompt: bool) -> list[int]:
        if prompt:
            return self.llm.encode(text)
        if self.loaded.tokenizer is None:
            raise Unsupported("the model has no tokenizer; give token ids")
        return self.loaded.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    def variants(self) -> Sequence[SpeculationVariant]:
        depth = self.config.budget.depth
        variants = [SpeculationVariant("as configured", {"depth": depth})]
        if self.config.enabled:
            variants += [SpeculationVariant(counted(n, "draft token"), {"depth": n}) for n in (1, 2, 7) if n != depth]
            if VERIFIERS[self.config.verifier].trees and self.config.verifier == "match":
                variants.append(SpeculationVariant("trees of width 2", {"depth": 3, "width": 2}))
        end = self.end_ids[0] if self.end_ids else 0
        # The loop must refuse a token that the target does not have, and the text must not change.
        hostile = {"always wrong": 1, "always the end token": end, "outside of the vocabulary": self.vocab_size + 3}
        return variants + [
            SpeculationVariant(name, {"depth": 4, "drafter": Wrong(token)}, adversarial=True)
            for name, token in hostile.items()
        ]

    def generate(self, requests: Sequence[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        options, drafter = variant.options, variant.options.get("drafter")
        width = options.get("width", self.config.budget.width)
        nodes = self.config.tree_nodes if width == self.config.budget.width else 2 * options["depth"]
        drafters = self.drafters if drafter is None else {"adversarial": drafter}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lengths = Fixed(options["depth"], width, nodes)
            return self._run(requests, self.config, drafters, lengths, self.slots)

    def plain(self, requests: Sequence[TextRequest]) -> list[GeneratedText]:
        """One text after the other, without a batch."""
        alone = [replace(request, companions=0) for request in requests]
        return [text for request in alone for text in self._run([request], _PLAIN, {}, Fixed(0), 1)]

    @cached_property
    def drafters(self) -> dict[str, Drafter]:
        """The configured drafters, by name; none for plain decoding."""
        return make_drafters(DrafterSetup(self.config, self.loaded, self.slots, self.max_length, "auto"))

    def _run(
        self,
        requests: Sequence[TextRequest],
        config: SpeculativeConfig,
        drafters: dict[str, Drafter],
        lengths: Fixed,
        rows: int,
    ) -> list[GeneratedText]:
        tell = None if drafters is self.drafters else lambda message: None  # a failure that a variant plans is not told
        runtime = build(
            self.loaded,
            config,
            num_slots=rows,
            max_length=self.max_length,
            drafters=drafters,
            controller=lengths,
            warn=tell,
        )
        decoder = runtime.decoder
        texts = [text for request in requests for text in self._texts(request)]
        mates = max((request.companions for request in requests), default=0)
        others = [self._companion(i, len(texts)) for i in range(mates)]
        try:
            done = Scheduler(decoder, raises=True).generate([*texts, *others])
        except Exception as error:  # whatever it fails with is a finding
            return [failed(error) for _ in texts]
        finally:
            decoder.drafter.reset()
        return [self._text(text, config.verifier) for text in done[: len(texts)]]

    def _texts(self, request: TextRequest) -> list[Request]:
        prompt = request.prompt
        ids = self.llm.encode(prompt) if isinstance(prompt, str) else list(prompt)
        [first, *_] = self.llm.requests(ids, SamplingParams(**asdict(request.params)))
        return [replace(first, id=first.id * 64 + i, seed=nth_seed(first.seed, i)) for i in range(request.params.n)]

    def _companion(self, number: int, at: int) -> Request:
        prompt = self._prompts[number % len(self._prompts)][: 2 + 3 * number]
        params = SamplingParams(temperature=1.2, max_tokens=8 + 11 * number, ignore_eos=True)
        return Request(-1 - number, list(prompt), params, seed=at + number)

    def _text(self, text: Text, verifier: str) -> GeneratedText:
        done = text.completion(VERIFIERS[verifier].guarantee)
        return GeneratedText(
            tokens=done.token_ids,
            text=done.text,
            prompt=list(text.prompt),
            finish=done.finish_reason,
            logprobs=done.logprobs,
            drafted=list(text.counts.drafted),
            accepted=list(text.counts.accepted),
            usage=len(text.output),
            error=None if done.finish_reason in ("stop", "length") else f"{done.finish_reason}: {done.stop_reason}",
        )

    # -- the target's own numbers -----------------------------------------------------------------------------------------

    def distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        return self._read(self.loaded.model, request, text)

    def draft_distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution] | None:
        drafter = next(iter(self.drafters.values()), None) if len(self.drafters) == 1 else None
        if not isinstance(drafter, ModelDrafter) or drafter.levels.vocab_size != self.vocab_size:
            return None
        if len(text.prompt) + len(text.tokens) > drafter.levels.cache.max_length:
            return None  # it reads only an end of the text
        return self._read(drafter.levels.model, request, text)

    def _read(self, model: LanguageModel, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        """The distributions of the engine's own warper, to the last bit."""
        start, tokens = len(text.prompt), [*text.prompt, *text.tokens]
        params, out = SamplingParams(**asdict(request.params)), list[TokenDistribution]()
        for at, logits in enumerate(forward(model, tokens)[start - 1 : len(tokens) - 1]):
            state = SequenceState(params, self.end_ids, (), tokens[: start + at], start)
            scores = LogitsWarper([state]).scores(logits[None], [[]])[0].astype(np.float64)
            shares = np.exp(scores - scores.max())
            out.append(TokenDistribution(shares / shares.sum(), logits=logits))
        return out

    def noise(self) -> float | None:
        """Measured once: the same tokens read in two ways, one by one and many at a time."""
        if self._noise is None:
            params = CertifiedParams(temperature=0, max_tokens=24, ignore_eos=True)
            [text] = self.plain([TextRequest(self._prompts[0], params)])
            tokens = [*self._prompts[0], *text.tokens]
            model = self.loaded.model
            self._noise = float(np.abs(forward(model, tokens) - forward(model, tokens, 1)).max())
        return self._noise

    def show(self, tokens: Sequence[int]) -> str:
        tokenizer = self.loaded.tokenizer
        return repr(tokenizer.decode(list(tokens)))[1:-1] if tokenizer is not None else super().show(tokens)


def forward(model: LanguageModel, tokens: Sequence[int], chunk: int = CHUNK) -> Array:
    """float32 [token, vocab]: the logits after each token of one text, `chunk` tokens at a time."""
    cache, parts = model.new_cache(1, len(tokens)), list[Array]()
    for start in range(0, len(tokens), chunk):
        part = list(tokens[start : start + chunk])
        parts.append(model.forward(Nodes(np.array([part]), cache, [0])).logits[0])
        cache.commit([0], [range(len(part))])
    return np.concatenate(parts)


def subject_of(options: CertifyOptions, speculative_config: dict[str, Any] | None, load: dict[str, Any]) -> Subject:
    """The subject of a command line. Raises ValueError for no subject.

    Args:
        load: Options of `outrider.models.load.load`.
    """
    name = options.subject or ""
    if server := server_subject(options, lambda model, prompts: EngineSubject(model, None, prompts, **load)):
        return server
    if is_python_name(name):
        target = imported(name)
        if VerifierFunction.recognizes(target):
            return VerifierFunction(target, name)
        return python_subject(target, name, f"a verifier is f(tokens, parents, target, drafter, choose); {EXAMPLE}")
    prompts = read_prompts(options)
    if not options.generate:
        return EngineSubject(name, speculative_config, prompts, **load)
    from outrider_certify.subjects.transformers_generate import TransformersSubject

    generate = parse_json(options.generate, "--generate")
    return TransformersSubject(name, generate, prompts, dtype=load["dtype"], find=_files_of)


def _files_of(name: str, dtype: str) -> Path:
    """The folder or GGUF file of a model that transformers is to load, with dense weights on the CPU. A hub name stays.

    Raises FileNotFoundError, ConnectionError, ValueError or MemoryError, as `load` does.
    """
    where = "cpu"
    if files := gguf_files(name):
        from outrider.models.gguf import model, reader

        checkpoint.fits(name, model.sizes(reader.read(files)), dtype, where, tuple(DTYPES))
        return files[0]
    with needs("torch", "a model that transformers runs"):
        from outrider.models.hf.folder import read_config
    path = Path(folder_of(name))
    read_config(name, str(path))
    if path.is_dir() and (stored := checkpoint.sizes(name, path)):
        checkpoint.fits(name, stored, dtype, where, tuple(DTYPES))
    return path


def weights_hash(model: str) -> str:
    """sha256 over the contents of a model's files; "not at hand" without them."""
    try:
        files = weight_files(model)
    except (OSError, ValueError):
        files = []
    return sha256(files) if files else "not at hand"


def _readable(config: dict[str, Any]) -> dict[str, Any]:
    return {k: public_name(v) if isinstance(v, str) else v for k, v in config.items()}
