"""Random histories of slots: trees that are read, paths that are committed, slots that are freed, and prefixes."""

from __future__ import annotations

import random

import numpy as np
from architectures import VOCAB
from helpers import path_to
from row_checks import one_at_a_time

from outrider.core.tree import tree
from outrider.engine.prefix_cache import PrefixCache
from outrider.models.base import LanguageModel
from outrider.models.nodes import Nodes


def committed(model: LanguageModel, tokens: list[int]) -> list[np.ndarray]:
    """The definition: the states after reading a text token by token."""
    cache = model.new_cache(1, 256)
    for token in tokens:
        model.forward(Nodes(np.array([[token]]), cache, [0]), want="none")
        cache.commit([0], [[0]])
    return [t for part in cache.snapshot(0) for t in part]


SHORT = 24  # tokens of a text whose nodes are compared with those of the text alone


def check_histories(model: LanguageModel, rounds: int, seed: int = 0, samples: int = 0) -> None:
    """Random trees in random slots, grown in one or two forwards, and random paths of them committed; now and then a slot is
    freed, or moved through the prefix cache. Then every state must be that of its tokens.

    samples: nodes of each tree whose logits must be those of its text, read token by token. "last" must give those of the last.
    """
    draw, rows = random.Random(seed), 3
    cache, prefixes = model.new_cache(rows, 256), PrefixCache(1 << 26)
    texts: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(rounds):
        slots = draw.sample(range(rows), draw.randint(1, rows))
        trees = []
        for _ in slots:
            count, chain = draw.choice([1, 2, 5, 9, 20]), draw.random() < 0.4
            trees.append(
                [(draw.randrange(VOCAB), i - 1 if chain else draw.randrange(-1 + (i > 0), i)) for i in range(count)]
            )
        tokens, parents = tree(trees)
        cut, want = draw.randint(1, tokens.shape[1]), "all" if samples else "none"
        logits = [model.forward(Nodes(tokens[:, :cut], cache, slots, parents[:, :cut]), want=want).logits]
        if cut < tokens.shape[1]:
            logits.append(model.forward(Nodes(tokens[:, cut:], cache, slots, parents), want=want).logits)
        every = np.concatenate(logits, 1)
        for i, (slot, t) in enumerate(zip(slots, trees, strict=True)):
            for node in draw.sample(range(len(t)), min(samples, len(t))):
                text = texts[slot] + [t[n][0] for n in path_to([p for _, p in t], node)]
                if len(text) <= SHORT:
                    assert np.array_equal(every[i, node], one_at_a_time(model, text)[-1]), f"node {node} of slot {slot}"
        if samples:
            end = model.forward(Nodes(tokens[:, cut - 1 :], cache, slots, parents), want="last").logits[:, 0]
            whole = [every[i, len(t) - 1] for i, t in enumerate(trees) if len(t) >= cut]
            assert np.array_equal(end[[i for i, t in enumerate(trees) if len(t) >= cut]], np.stack(whole))
        last = [max(draw.randrange(-1, len(t)) for _ in range(2)) for t in trees]
        paths = [path_to([p for _, p in t], node) if node >= 0 else [] for t, node in zip(trees, last, strict=True)]
        cache.commit(slots, paths)
        for slot, t, path in zip(slots, trees, paths, strict=True):
            texts[slot] += [t[node][0] for node in path]
        slot = draw.randrange(rows)
        if draw.random() < 0.3:
            prefixes.keep(cache, slot, texts[slot])
            cache.release(slot)
            found = prefixes.fetch(cache, slot, texts[slot])
            assert found == len(texts[slot]) or not cache.states, "without states whole blocks are kept"
            texts[slot] = texts[slot][:found]
        elif draw.random() < 0.05:
            cache.release(slot)
            texts[slot] = []
    assert samples or max(map(len, texts)) > 16
    for slot, text in enumerate(texts):
        assert cache.length[slot] == len(text)
        if text:
            found = [t for part in cache.snapshot(slot) for t in part]
            assert all(np.array_equal(a, b) for a, b in zip(found, committed(model, text), strict=True)), f"slot {slot}"
