"""Assisted generation of transformers as a subject."""

from __future__ import annotations

import pytest
from toy_server import certified

from outrider_certify.certificate import Conclusion
from outrider_certify.seeded import Seeded
from outrider_certify.statistical import Statistical
from outrider_certify.subjects.transformers_generate import TransformersSubject

torch = pytest.importorskip("torch")
TOY_PROMPTS = ((1, 2), (3, 4), (5, 1))


@pytest.fixture(scope="module")
def pair():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)  # as in tests/conftest.py: two threads for tensors this small wait for each other

    def small(seed: int):
        torch.manual_seed(seed)
        config = LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
                             max_position_embeddings=128, eos_token_id=23, bos_token_id=1, pad_token_id=0)  # fmt: skip
        model = LlamaForCausalLM(config)
        model.lm_head.weight.data *= 12
        return model

    return small(0), small(1)


def test_transformers_assisted_generation(pair) -> None:
    target, draft = pair
    subject = TransformersSubject(target, {"assistant_model": draft}, TOY_PROMPTS)
    assert not subject.exact_tokens
    assert (subject.noise() or 0) < 1e-3
    seeded = certified(Seeded(subject, length=10, rounds=1), most=6)
    assert seeded.conclusion is Conclusion.EXACT_TOKENS, seeded.sentence
    assert any("presence_penalty" in line for line in seeded.skipped)
    statistical = certified(Statistical(subject, length=12), most=2)
    assert statistical.figures["tokens"] == 2 * 3 * 12, statistical


def test_transformers_that_fail_and_that_refuse(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = pair
    subject = TransformersSubject(target, {"assistant_model": draft}, TOY_PROMPTS)
    generate = target.generate

    def assisted(error: Exception):
        def broken(*given, assistant_model=None, **more):
            if assistant_model is not None:
                raise error
            return generate(*given, **more)

        return broken

    monkeypatch.setattr(target, "generate", assisted(IndexError("index 24 is out of range")))
    part = certified(Seeded(subject, length=8, rounds=1), most=1)
    assert part.conclusion is Conclusion.DIFFERS
    assert "out of range" in part.findings[0].evidence
    monkeypatch.setattr(target, "generate", assisted(ValueError("no min_p with an assistant")))
    part = certified(Seeded(subject, length=8, rounds=1), most=1)
    assert part.conclusion is Conclusion.CANNOT_TELL
    assert "no min_p with an assistant" in part.findings[0].evidence


def test_transformers_that_are_not_asked_to_speculate() -> None:
    with pytest.raises(ValueError, match="does not speculate"):
        TransformersSubject("builtin:code", {"max_new_tokens": 5}, TOY_PROMPTS)
