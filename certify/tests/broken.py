"""A small speculative engine in numpy, and everything that can be wrong with it: each fault was shipped by a real engine.

It shares no code with `sampled_distribution`, so that a certificate is tried on a foreign engine. Its model is a table over the
last two tokens in the cache and the position. So a wrong cache and a wrong position change the text. It has as many slots as
`SLOTS`. With more sequences, a sequence loses its slot after `PREEMPTED` tokens and gets it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache

import numpy as np

from outrider_certify.subject import GeneratedText, SpeculationVariant, Subject, TextRequest, TokenDistribution

LETTERS = "abcdefghijklmnopqrstuvwxyz"
DROPPED = {"top_k on the draft only": ("top_k",), "min_p dropped": ("min_p",), "logit_bias dropped": ("logit_bias",)}
SLOTS, PREEMPTED, WINDOW = 4, 5, 96


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


@lru_cache(1 << 12)
def race(*key: int, size: int) -> np.ndarray:
    """Exponential noise of a key, one number a token. Most keys come again: in plain decoding, and under the next fault."""
    noise = np.random.default_rng(key).exponential(size=size)
    noise.flags.writeable = False
    return noise


@lru_cache(1 << 12)
def signs(at: int, row: int, size: int) -> np.ndarray:
    """Which way the numbers of a row are rounded where several rows are computed at once."""
    return np.random.default_rng([at, row]).choice([-1.0, 1.0], size)


@lru_cache(1 << 12)
def filtered(logits: bytes, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution of a row of logits after temperature and filters."""
    x = np.frombuffer(logits)
    if temperature == 0:
        p = (np.arange(len(x)) == x.argmax()).astype(float)
    else:
        p = softmax(x / temperature)
        if top_k > 0:
            p = np.where(p >= np.sort(p)[-top_k], p, 0)
            p /= p.sum()
        if top_p < 1:
            order = np.argsort(-p, kind="stable")
            before = np.cumsum(p[order]) - p[order]
            p[order[before >= top_p]] = 0
            p /= p.sum()
        if min_p > 0:
            p = np.where(p >= min_p * p.max(), p, 0)
            p /= p.sum()
    p.flags.writeable = False
    return p


class ToyEngine(Subject):
    """fault: what is wrong, "" for nothing. rule: match, rejection or block. error: how wrong the drafter is.

    rounding: the largest difference of a logit between one row and several. Then the engine promises no numbers.
    """

    name, exact_numbers, batches, slots, long_context = "a toy engine", True, True, SLOTS, 160

    def __init__(
        self,
        fault: str = "",
        rule: str = "rejection",
        *,
        gamma: int = 3,
        vocab: int = 8,
        error: float = 1.2,
        seed: int = 0,
        rounding: float = 0.0,
        prompts: int = 6,
    ) -> None:
        super().__init__()
        self.fault, self.rule, self.gamma, self.vocab_size = fault, rule, gamma, vocab
        self.rounding, self.exact_numbers = rounding, not rounding
        self.num_prompts = prompts
        self.seen = set[tuple[int, ...]]()
        self.plain_texts = dict[str, list[GeneratedText]]()
        self.end_ids = (vocab - 1,)
        self.exact_tokens = rule == "match" and not rounding
        rng = np.random.default_rng(seed)
        self.table = 1.3 * rng.standard_normal((997, vocab))
        self.table[:, vocab - 1] -= 1.0
        self.wrong = self.table + error * rng.standard_normal((997, vocab))

    def prompts(self) -> list[tuple[int, ...]]:
        return [(i % self.vocab_size, (3 * i + 1) % self.vocab_size) for i in range(self.num_prompts)]

    def variants(self) -> list[SpeculationVariant]:
        return [
            SpeculationVariant("as it is"),
            SpeculationVariant("one draft token", {"gamma": 1}),
            SpeculationVariant("always wrong", {"draft": "wrong"}, adversarial=True),
        ]

    def generate(self, requests: Sequence[TextRequest], variant: SpeculationVariant) -> list[GeneratedText]:
        texts = [self._text(request, i, variant.options) for request in requests for i in range(request.params.n)]
        self.seen |= {tuple(request.prompt) for request in requests}
        return texts

    def plain(self, requests: Sequence[TextRequest]) -> list[GeneratedText]:
        """Asked again and again for the same texts, and they are kept."""
        texts = list[GeneratedText]()
        for request in requests:
            key = repr((request.prompt, request.params))
            if key not in self.plain_texts:
                self.plain_texts[key] = [self._text(request, i, None) for i in range(request.params.n)]
            texts += deepcopy(self.plain_texts[key])
        return texts

    def constrained(self, request: TextRequest, choices: Sequence[str]) -> GeneratedText:
        """Letter by letter, two letters a step: the mask of a letter is what the grammar allows after those before it."""
        rng, text = np.random.default_rng(request.params.seed), ""
        while text not in choices:
            known = text[:-1] if self.fault == "grammar mask of the parent node" and len(text) % 2 else text
            allowed = sorted({c[len(known)] for c in choices if c.startswith(known) and len(c) > len(known)})
            text += allowed[rng.integers(len(allowed))] if allowed else "?"
            if len(text) > 40:
                break
        return GeneratedText(text=text, finish="stop")

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.piece, tokens))

    def encode(self, text: str, *, prompt: bool) -> list[int]:
        return [LETTERS.index(c) for c in text]

    def noise(self) -> float | None:
        return self.rounding

    # -- the model --------------------------------------------------------------------------------------------------------

    def piece(self, token: int) -> str:
        return LETTERS[token]

    def prepare(self, table, cache: list[int]) -> None:
        """Told before the logits after several ends of `cache` are asked for."""

    def logits(self, table: np.ndarray, cache: list[int], position: int) -> np.ndarray:
        a, b = cache[-2:]
        return table[(a * 131 + b * 17 + (position % 5) * 53) % len(table)]

    def warp(self, logits: np.ndarray, params, text: list[int], prompt: int, drop: tuple[str, ...] = ()) -> np.ndarray:
        x, written = logits.copy(), text[prompt:]
        for word in () if "bad_words" in drop else params.bad_words:
            head, last = list(word[:-1]), word[-1]
            if text[len(text) - len(head) :] == head:
                x[last] = -np.inf
        if len(written) < params.min_tokens:
            x[[*(() if params.ignore_eos else self.end_ids), *params.stop_token_ids]] = -np.inf
        for token, bias in ({} if "logit_bias" in drop else params.logit_bias or {}).items():
            x[int(token)] += bias
        if params.presence_penalty or params.frequency_penalty:
            for token, count in Counter(written).items():
                x[token] -= params.presence_penalty + params.frequency_penalty * count
        if params.repetition_penalty != 1:
            for token in set(text):
                x[token] = (
                    x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
                )
        top_k, min_p = 0 if "top_k" in drop else params.top_k, 0.0 if "min_p" in drop else params.min_p
        return filtered(x.tobytes(), params.temperature, top_k, params.top_p, min_p)

    # -- the loop ---------------------------------------------------------------------------------------------------------

    def _text(self, request: TextRequest, index: int, options: dict | None) -> GeneratedText:
        fault = self.fault if options is not None else ""
        params, prompt = request.params, list(request.prompt_ids)
        rows = 1 + (request.companions if options is not None else 0)
        seed = (params.seed or 0) + (0 if fault == "shared seeds" else 1_000_003 * index)
        if fault == "seed ignored":
            seed = int(np.random.default_rng().integers(2**31))
        if fault == "noise of another slot" and rows > 1:
            seed += 77
        gamma = 0 if options is None else options.get("gamma", self.gamma)
        out = GeneratedText(prompt=prompt, logprobs=None if params.logprobs is None else [])
        tokens, cache, step, preempted = list(prompt), list(prompt), 0, rows <= SLOTS
        wrong_prefix = fault == "prefix cache of another prompt" and tuple(prompt) in self.seen
        if wrong_prefix or (fault == "the second text of n reads another prompt" and index):
            cache[-1] = cache[max(len(cache) - 2, 0)]
        while out.finish is None:
            depth = min(gamma, params.max_tokens - len(out.tokens) - 1)
            drafted, qs = self._draft(tokens, cache, params, len(prompt), depth, seed, step, options or {}, fault)
            if fault == "q of another row above two sequences" and rows > 2:
                qs = [np.roll(q, 1) for q in qs]
            ps, raw = self._target(tokens, cache, params, len(prompt), drafted, fault)
            if not preempted and len(out.tokens) >= PREEMPTED:
                preempted = True
                if fault == "stale logits after preemption":
                    ps[0] = self.warp(self.logits(self.table, cache[:-1], len(tokens) - 1), params, tokens, len(prompt))
            accepted, token = self._judge(drafted, qs, ps, len(tokens), seed, step, fault)
            if fault == "bonus token from the draft" and accepted == len(drafted) > 0:
                _, more = self._draft(
                    tokens + drafted, cache + drafted, params, len(prompt), 1, seed, step, options or {}, fault
                )
                token = int(
                    np.random.default_rng([seed, len(tokens), step, 9]).choice(len(more[0]), p=more[0] / more[0].sum())
                )
            new = [*drafted[:accepted], token]
            kept = self._stopped(out, new, params, fault)
            tokens += kept
            cache += kept
            if fault == "cache off by one" and accepted < len(drafted):
                cache.append(drafted[accepted])
            if out.logprobs is not None:
                of = raw[: len(kept)]
                if fault == "logprobs of the wrong row" and len(of) > 1:
                    of = [of[0]] * len(of)
                out.logprobs += [{t: float(np.log(softmax(r)[t]))} for t, r in zip(kept, of, strict=True)]
            out.drafted.append(depth)
            out.accepted.append(min(accepted, len(kept)) if fault != "counters past the end" else accepted + 2)
            step += 1
        out.usage = len(out.tokens) + (2 if fault == "usage past the end" and out.finish == "stop" else 0)
        return out

    def _draft(self, tokens, cache, params, prompt, depth, seed, step, options, fault):
        drafted, qs = [], []
        for i in range(depth):
            logits = self.logits(self.wrong, cache + drafted, len(tokens) + i)
            q = self.warp(logits, params, tokens + drafted, prompt)
            if options.get("draft") == "wrong":
                x = int(self.logits(self.table, cache + drafted, len(tokens) + i).argmin())
                drafted.append(x)
                qs.append((np.arange(len(q)) == x).astype(float))
                continue
            noise = race(seed, len(tokens) + i, *(() if self.rule == "match" else (step, 1)), size=len(q))
            drawn = q
            if fault == "draft temperature ignored" and params.temperature:
                drawn = softmax(logits)
            if fault == "truncated q vocabulary":
                part = np.where(np.arange(len(q)) < len(q) / 2, q, 0)
                drawn = part / part.sum() if part.sum() else q
            x = int(q.argmax()) if fault == "wrong q" else int((noise / np.where(drawn > 0, drawn, 1e-300)).argmin())
            if fault == "low q dropped" and q[x] < 0.2:
                break
            drafted.append(x)
            qs.append(softmax(logits) if fault == "raw q" and params.temperature else q)
        return drafted, qs

    def _target(self, tokens, cache, params, prompt, drafted, fault):
        ps, raw = [], []
        self.prepare(self.table, cache + drafted)
        for i in range(len(drafted) + 1):
            position = len(tokens) + (0 if fault == "constant positions" else i)
            if fault == "positions end at the window":
                position = min(position, WINDOW)
            if fault == "rows shift by one with logprobs" and params.logprobs is not None and i:
                position -= 1
            logits = self.logits(self.table, cache + drafted[:i], position)
            if len(drafted) and (self.rounding or fault == "one ulp between row counts"):
                logits = logits + (self.rounding or np.spacing(8.0)) * signs(len(tokens), i, len(logits))
            text = tokens if fault == "penalties per step" else tokens + drafted[:i]
            drop = DROPPED.get(fault, ())
            if fault == "bad words at the first token only" and i:
                drop = ("bad_words",)
            ps.append(self.warp(logits, params, text, prompt, drop))
            raw.append(logits)
            if fault == "greedy at any temperature":
                ps[-1] = (np.arange(len(logits)) == logits.argmax()).astype(float)
        return ps, raw

    def _judge(self, drafted, qs, ps, position, seed, step, fault):
        def draw(p, at, salt):
            noise = race(seed, at, *(() if salt is None else (step, salt)), size=len(p))
            return int(np.divide(noise, p, out=np.full(len(p), np.inf), where=p > 0).argmin())

        if self.rule == "match":
            for i in range(len(drafted) + 1):
                token = draw(ps[i], position + i, None)
                if i == len(drafted) or token != drafted[i]:
                    return i, token
        coins = np.random.default_rng([seed, position, step, 2]).random(len(drafted) + 1)
        if self.rule == "block":
            return self._block(drafted, qs, ps, coins, lambda p, i: draw(p, position + i, 3), fault)
        for i, x in enumerate(drafted):
            p, q = ps[i], qs[max(i - 1, 0)] if fault == "stale q" else qs[i]
            if fault == "everything accepted" or coins[i] * q[x] < p[x]:
                continue
            rest = np.maximum(p - q, 0)
            if fault == "no residual" or rest.sum() <= 0:
                rest = p
            return i, draw(rest / rest.sum(), position + i, 1 if fault == "shared noise" else 3)
        return len(drafted), draw(ps[-1], position + len(drafted), 3)

    def _block(self, drafted, qs, ps, coins, draw, fault):
        kept, kept_weight, weight, n = 0, 1.0, 1.0, len(drafted)
        for i, x in enumerate(drafted, 1):
            weight = min(weight * ps[i - 1][x] / qs[i - 1][x], 1.0) if qs[i - 1][x] else 0.0
            h = weight
            if i < n:
                mass = np.maximum(weight * ps[i] - qs[i], 0).sum()
                h = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
            if coins[i] <= h:
                kept, kept_weight = i, weight
            elif fault == "first-failure block rule":
                break
        if kept == n:
            return n, draw(ps[n], n)
        rest = np.maximum(kept_weight * ps[kept] - qs[kept], 0)
        return kept, draw(rest / rest.sum() if rest.sum() > 0 else ps[kept], kept)

    def _stopped(self, out: GeneratedText, new: list[int], params, fault: str) -> list[int]:
        """Add new tokens to the text, up to the first thing that ends it. Returns those that were added."""
        ends = (*(() if params.ignore_eos else self.end_ids), *params.stop_token_ids)
        for at, token in enumerate(new):
            out.tokens.append(token)
            out.text += self.piece(token)
            skipped = fault == "end token inside an accepted run" and at < len(new) - 1
            if token in ends and not skipped:
                out.finish = "stop"
            for stop in params.stop:
                seen = out.text if fault != "stop string at the end of a step only" or at == len(new) - 1 else ""
                if stop in seen and (fault != "stop string at the end of a step only" or seen.endswith(stop)):
                    out.text, out.finish = out.text[: out.text.index(stop)], "stop"
            if out.finish is None and len(out.tokens) >= params.max_tokens:
                out.finish = "length"
            if out.finish:
                return new[: at + 1]
        return new

    # -- what it should do, by the honest code ------------------------------------------------------------------------------

    def _rows(self, request: TextRequest, writing: GeneratedText, table: np.ndarray) -> list[TokenDistribution]:
        prompt, rows = list(request.prompt_ids), []
        self.prepare(table, prompt + writing.tokens)
        for i in range(len(writing.tokens)):
            text = prompt + writing.tokens[:i]
            logits = self.logits(table, text, len(text))
            rows.append(TokenDistribution(self.warp(logits, request.params, text, len(prompt)), logits=logits))
        return rows

    def distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution]:
        return self._rows(request, text, self.table)

    def draft_distributions(self, request: TextRequest, text: GeneratedText) -> list[TokenDistribution] | None:
        return self._rows(request, text, self.wrong)

    def show(self, tokens) -> str:
        return "".join(LETTERS[t] for t in tokens)
