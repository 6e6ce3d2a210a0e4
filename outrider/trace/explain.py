"""Why a verifier kept or refused each guess, from the laws and the noise it read. For people: slow and complete.

The ratio verifiers are explained by their definitions (`outrider.verify.reference`), run once more with the same noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from outrider.core.noise import Noise, Stream
from outrider.core.sampling import LogitsDistribution
from outrider.core.types import Draft, Siblings, Verdict
from outrider.trace.records import Law
from outrider.verify import reference_block, reference_rejection, reference_traversal
from outrider.verify.reference import Number

_RATIO = {
    "rejection": "p/q",  # the target's chance of it over the draft's
    "block": "the chance of its chain",
    "traversal": "the chance of its path",
}


@dataclass(frozen=True)
class Coin:
    """A guess is kept if value < chance. value: uniform noise in (0, 1)."""

    value: float
    chance: float

    @property
    def kept(self) -> bool:
        return self.value < self.chance


@dataclass(frozen=True)
class Node:
    """A node of the draft and what became of it.

    p, noise: of its token in the target's law after its parent, and in the noise the target drew with (`match` at a
    temperature above 0). rival: the token that the target drew there, with its p and noise, where that is another one.
    coin: what the other verifiers decided by, where they looked. law: the likeliest tokens after this node. drawn: the
    token that the target drew after it, where it did.
    """

    node: int
    parent: int
    depth: int
    token: int
    kept: bool
    verifier: str
    judged: bool
    p: float
    law: Law
    noise: float | None = None
    rival: tuple[int, float, float | None] | None = None
    coin: Coin | None = None
    drawn: int | None = None
    parent_kept: bool = True

    def why(self, show: Callable[[int], str] = str) -> str:
        """The reason in words. show: how to write a token."""
        if self.node == 0:
            return "the last token of the text, where the draft begins"
        if not self.judged:
            return f"never judged: {'a guess beside it was kept' if self.parent_kept else 'the guess above it was refused'}"
        if self.verifier == "match":
            return self._match(show)
        ratio = _RATIO[self.verifier]
        if self.coin is None or (self.kept and not self.coin.kept):
            return "kept: a guess below it was kept"
        coin, limit = f"its coin {self.coin.value:.3f}", f"{ratio}, {self.coin.chance:.3f}"
        return f"kept: {coin} is below {limit}" if self.kept else f"refused: {coin} is not below {limit}"

    def _match(self, show: Callable[[int], str]) -> str:
        if self.kept:
            how = "it is the target's likeliest token" if self.noise is None else "the target drew it too"
            return f"kept: {how} ({_odds(self.p, self.noise)})"
        if self.rival is None:
            return "refused: the same token stands beside it, and that one was followed"
        if self.p == 0 and self.noise is not None:
            how = "the sampling parameters leave it no chance"
            return f"refused: {how}; the target drew {self._rival(show)}"
        if self.noise is None:
            return f"refused: the target's likeliest token is {self._rival(show)}"
        return f"refused: the target drew {self._rival(show)}; this one had {_odds(self.p, self.noise)}"

    def _rival(self, show: Callable[[int], str]) -> str:
        assert self.rival is not None
        token, p, noise = self.rival
        if token < 0:
            return "nothing: its law was empty"
        return show(token) if noise is None else f"{show(token)} ({_odds(p, noise)})"


def _odds(p: float, noise: float | None) -> str:
    return f"p {p:.3g}" if noise is None else f"p {p:.3g}, noise {noise:+.2f}"


def explain(
    verifier: str,
    laws: LogitsDistribution,
    draft: Draft,
    noise: Noise,
    position: torch.Tensor,
    verdict: Verdict,
    likely: Sequence[Law],
) -> list[Node]:
    """The nodes of a one-row draft. likely: the likeliest tokens after each of them."""
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    path = [n for n in verdict.path[0].tolist() if n >= 0]
    drawn = dict(zip(path, [*(tokens[n] for n in path[1:]), int(verdict.token[0])], strict=True))
    level = [0] * len(tokens)
    coins = {} if verifier == "match" else _coins(verifier, laws, draft, noise, position)
    greedy = laws.warp.all_greedy
    cache = dict[int, list[float]]()
    out = list[Node]()

    def law(node: int) -> list[float]:
        if node not in cache:
            cache[node] = laws.probs(torch.tensor([node], device=draft.tokens.device))[0].tolist()
        return cache[node]

    def gumbel(at: int, token: int) -> float | None:
        if verifier != "match" or greedy:
            return None
        return float(noise.gumbel(Stream.TOKEN, position + at, token + 1)[0, token])

    for n, (token, up) in enumerate(zip(tokens, parents, strict=True)):
        level[n] = level[up] + 1 if n else 0
        judged = n > 0 and (up in path if verifier == "match" else n in coins or n in path)
        own, own_noise, rival = 1.0, None, None
        if n:
            own = law(up)[token]
        if judged and verifier == "match":
            own_noise = gumbel(level[up], token)
            other = drawn[up]
            if other != token:
                mass = law(up)[other] if other >= 0 else 0.0
                rival = (other, mass, gumbel(level[up], other) if other >= 0 else None)
        out.append(
            Node(
                node=n,
                parent=up,
                depth=level[n],
                token=token,
                kept=n in path,
                verifier=verifier,
                judged=judged,
                p=own,
                law=likely[n],
                noise=own_noise,
                rival=rival,
                coin=coins.get(n),
                drawn=drawn.get(n),
                parent_kept=up in path or n == 0,
            )
        )
    return out


@dataclass
class _Told:
    """Choices of a reference, from one row's noise, read where the batched forms read it; remembers the coins."""

    noise: Noise
    position: torch.Tensor
    coins: dict[int, Coin] = field(default_factory=dict)

    def coin(self, part: Number, whole: Number, *, depth: int, node: int) -> bool:
        u = float(self.noise.uniform(Stream.ACCEPT, self.position + depth - 1, node + 1)[0, node])
        chance = 1.0 if whole <= part else float(part / whole)
        self.coins[node] = Coin(u, chance)
        return u * whole < part

    def token(self, law: Sequence[Number], *, depth: int) -> int:
        weights = torch.tensor([float(x) for x in law], dtype=torch.float64)
        gumbel = self.noise.gumbel(Stream.RESIDUAL, self.position + depth - 1, len(law))[0].cpu()
        return int((weights.log() + gumbel).argmax())


def _coins(
    verifier: str, laws: LogitsDistribution, draft: Draft, noise: Noise, position: torch.Tensor
) -> dict[int, Coin]:
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    cache = dict[int, list[float]]()

    def p(node: int) -> list[float]:
        if node not in cache:
            cache[node] = laws.probs(torch.tensor([node], device=draft.tokens.device))[0].double().tolist()
        return cache[node]

    def q(node: int) -> list[float]:
        if draft.probs is not None:
            return draft.probs[0, node].double().tolist()
        child = next((n for n, up in enumerate(parents) if up == node), 0)
        return [float(token == tokens[child]) for token in range(len(p(0)))]  # chosen: all mass on the guess

    told = _Told(noise, position)
    siblings = draft.siblings if draft.probs is not None else Siblings.POINT
    if verifier == "block":
        reference_block(tokens, parents, p, q, told)
    elif verifier == "rejection":
        reference_rejection(tokens, parents, p, q, told, siblings)
    else:
        reference_traversal(tokens, parents, p, q, told, siblings)
    return told.coins
