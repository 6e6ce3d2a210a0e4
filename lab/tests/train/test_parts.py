"""The parts of a training run: loss, unroll, batches, anchors, draft vocabulary, noise of a held-out text, prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from heads import causal, small_config
from torch import Tensor

from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters.heads.eagle import EagleConfig
from outrider.engine.llm import LLM
from outrider.models.hf.skeleton import module_of
from outrider.models.load import load, tensors
from outrider_lab.heads.modules import Eagle, config_for
from outrider_lab.train import prompts
from outrider_lab.train.answers import AnswerFile, TrainingText, parted, write_answers
from outrider_lab.train.batches import batch_of, count_tokens, draw_anchors, epoch, positions
from outrider_lab.train.folder import verdict
from outrider_lab.train.kept import FeatureRecorder, KeptFeatures, KeptTeacher
from outrider_lab.train.method import divergence, loss_of
from outrider_lab.train.methods import TrainedEagle, copy_last_layer_, mask_token, narrowed, unrolled
from outrider_lab.train.prompts import sources
from outrider_lab.train.survival import Survival, noise_given
from outrider_lab.train.teacher import Taught, Teacher
from outrider_lab.train.trainer import rate

TARGET = small_config(96)


def answer(*lengths: int, number: int = 0, temperature: float = 0.0) -> TrainingText:
    """A prompt and an answer of so many tokens."""
    prompt, written = lengths
    return TrainingText(number, "self", [n % 90 for n in range(prompt + written)], prompt, temperature, held_out=False)


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True, "norm_before_residual": True}]
)
def test_the_anchored_unroll_is_the_full_one_at_its_anchors(flags: dict[str, bool]) -> None:
    torch.manual_seed(0)
    head = Eagle(config_for(EagleConfig, TARGET, **flags))
    for p in head.parameters():
        p.data = torch.randn_like(p) * 0.2 if p.dim() == 2 else torch.rand_like(p) + 0.5
    tokens, features, steps = torch.randint(96, (2, 12)), torch.randn(2, 12, 96), 4
    anchors = torch.tensor([[0, 3, 6], [1, 2, 6]])
    found = list(unrolled(head, tokens, features, anchors, steps))
    for b in range(2):
        for a, t in enumerate(anchors[b].tolist()):  # as a drafter does it: read all pairs to t, then draft on
            g = head.fuse(features[b : b + 1, : t + 1])
            y, past = causal(head, tokens[b : b + 1, 1 : t + 2], g)
            y = y[:, -1:]
            for step in range(steps):
                assert torch.allclose(found[step][b, a], head.logits(y)[0, 0], atol=1e-5), (b, t, step)
                y, past = causal(head, tokens[b : b + 1, t + step + 2 : t + step + 3], head.feedback(y), past)
    everywhere = torch.arange(7).expand(2, -1)
    for part, whole in zip(found, unrolled(head, tokens, features, everywhere, steps), strict=True):
        at = anchors[..., None].expand(-1, -1, part.shape[-1])
        assert torch.allclose(part, whole.gather(1, at), atol=1e-5)


@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
def test_the_gradient_of_the_loss_is_autograds(weight: float) -> None:
    torch.manual_seed(1)
    target, draft = torch.randn(3, 5, 17) * 3, (torch.randn(3, 5, 17) * 3).requires_grad_()
    loss, kl, tv = divergence(target, draft, weight)
    of = torch.rand(3, 5)
    (gradient,) = torch.autograd.grad((loss * of).sum(), draft)
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    plain_kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    plain_tv = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    plain = (1 - weight) * plain_kl + weight * plain_tv
    (wanted,) = torch.autograd.grad((plain * of).sum(), draft)
    assert torch.allclose(kl, plain_kl, atol=1e-5)
    assert torch.allclose(tv, plain_tv, atol=1e-5)
    assert torch.allclose(loss, plain, atol=1e-5)
    assert torch.allclose(gradient, wanted, atol=1e-5)


def test_the_teacher_of_a_draft_vocabulary_is_a_distribution_and_answers_alone_are_learnt() -> None:
    loaded = load("builtin:code")
    config = config_for(EagleConfig, loaded.config, draft_vocab_size=7, fc_norm=True, norm_output=True)
    teacher = Teacher(loaded, config.taps)
    assert teacher.scale == pytest.approx(1, abs=0.01)
    ids = torch.tensor([1, 5, 9, 200, 300, 1000, 8000])
    batch = batch_of([answer(20, 30), answer(5, 9)])
    taught = teacher.read(batch.tokens)
    law = teacher.logits(taught.last, teacher.output(ids)).softmax(-1)
    assert torch.allclose(law.sum(-1), torch.ones(2, 50), atol=1e-5)
    head = TrainedEagle(Eagle(config, ids).initialise_(teacher.embedding(), teacher.output()), teacher, ids)
    anchors = draw_anchors(batch, 4, 1.0, torch.Generator().manual_seed(0))
    assert [positions(batch, 4)[i] for i in (0, 1)] == [range(18, 45), range(3, 9)]
    assert anchors.at[0, anchors.valid[0]].tolist() == list(range(18, 45))
    assert anchors.at[1, anchors.valid[1]].tolist() == list(range(3, 9))
    rows = teacher.output(ids)
    loss, accepted = loss_of(head, rows, batch, taught, anchors, 0.5)
    assert len(accepted) == 4
    assert all(0 < a < 1 for a in accepted)
    filled = batch._replace(tokens=batch.tokens.clone())
    filled.tokens[1, 14:] = 77  # behind the end of the second text
    again, _ = loss_of(head, rows, filled, teacher.read(filled.tokens), anchors, 0.5)
    assert float(again.detach()) == pytest.approx(float(loss.detach()), abs=1e-5)


def test_a_head_can_begin_as_its_targets_last_layer() -> None:
    loaded = load("builtin:code")
    config = config_for(EagleConfig, loaded.config, fc_norm=True, norm_output=True)
    target = tensors(loaded), loaded.config
    head = Eagle(config)
    assert copy_last_layer_(head, *target, 1.0)
    last = module_of(*target, "float32").float().model.layers[-1]  # pyright: ignore[reportAttributeAccessIssue]
    x, e = torch.randn(1, 6, config.hidden_size), torch.zeros(1, 6, config.hidden_size)
    q = head.layer.self_attn.q_proj(torch.cat([e, head.layer.hidden_norm(x)], -1))
    assert torch.allclose(q, last.self_attn.q_proj(last.input_layernorm(x)), atol=1e-4)
    assert torch.equal(head.layer.mlp.down_proj.weight, last.mlp.down_proj.weight.float())
    assert not copy_last_layer_(Eagle(config_for(EagleConfig, TARGET, fc_norm=True)), *target, 1.0)
    assert not copy_last_layer_(Eagle(config_for(EagleConfig, loaded.config)), *target, 1.0)


def test_a_narrow_head_keeps_the_neurons_that_do_something() -> None:
    torch.manual_seed(0)
    head = Eagle(config_for(EagleConfig, TARGET))
    for p in head.parameters():
        p.data = torch.randn_like(p) * 0.2 if p.dim() == 2 else torch.rand_like(p) + 0.5
    mlp, many = head.layer.mlp, head.config.intermediate_size
    dead = torch.randperm(many)[: many // 3]
    mlp.down_proj.weight.data[:, dead] *= 1e-6
    batch, features = batch_of([answer(2, 9), answer(4, 8)]), torch.randn(2, 12, 96)
    narrow = narrowed(head, many - len(dead), batch, features)
    assert narrow.layer.mlp.up_proj.weight.shape == (many - len(dead), 32)
    anchors = torch.tensor([[0, 3, 6], [1, 2, 6]])
    for own, whole in zip(*(unrolled(h, batch.tokens, features, anchors, 3) for h in (narrow, head)), strict=True):
        assert (own - whole).abs().max() < 1e-3 < whole.abs().max()


def test_a_pass_reads_every_text_once_within_its_batches() -> None:
    lengths = [10 + 7 * n % 90 for n in range(301)]
    batches = epoch(lengths, 256, 3, 0)
    assert sorted(i for b in batches for i in b) == list(range(301))
    assert all(len(b) * max(lengths[i] for i in b) <= 256 for b in batches)
    filled = sum(len(b) * max(lengths[i] for i in b) for b in batches)
    assert filled < 1.2 * sum(lengths)
    assert epoch(lengths, 256, 3, 0) == batches
    assert epoch(lengths, 256, 3, 1) != batches
    assert epoch([500], 256, 3, 0) == [[0]]


def test_anchors_are_a_share_of_the_answers() -> None:
    batch = batch_of([answer(10, 50), answer(30, 6)])
    drawn = draw_anchors(batch, 4, 0.5, torch.Generator().manual_seed(0))
    assert drawn.valid.sum(1).tolist() == [24, 2]
    again = draw_anchors(batch, 4, 0.5, torch.Generator().manual_seed(0))
    assert torch.equal(again.at, drawn.at)
    with pytest.raises(ValueError, match="4 tokens"):
        draw_anchors(batch_of([answer(2, 1)]), 4, 0.5, torch.Generator())


def test_the_draft_vocabulary_holds_the_most_frequent_tokens_of_the_answers() -> None:
    texts = [TrainingText(0, "self", [1, 2, 70, 70, 50, 60, 60, 60], 2, 0.0, held_out=False)]
    assert count_tokens(texts, 3, 96, (5,)).tolist() == [5, 60, 70]
    assert count_tokens(texts, 6, 96).tolist() == [0, 1, 2, 50, 60, 70]
    assert count_tokens(texts, 0, 96).tolist() == list(range(96))
    assert count_tokens(texts, 200, 96).tolist() == list(range(96))


def test_the_mask_is_a_token_that_no_text_uses() -> None:
    texts = [TrainingText(0, "self", [1, 2, 9, 9], 2, 0.0, held_out=False)]

    class Tokenizer:
        all_special_ids = (0, 3, 7)

        def __len__(self) -> int:
            return 10

    assert mask_token(texts, 12, Tokenizer()) == 11  # beyond the tokenizer
    assert mask_token(texts, 10, Tokenizer()) == 7
    assert mask_token(texts, 10, Tokenizer(), (7,)) == 3
    assert mask_token(texts, 10, None, (8,)) == 7
    assert mask_token([*texts, TrainingText(1, "self", [0, 3, 4, 5, 6, 7, 8], 2, 0.0, held_out=False)], 10, None) == 8


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    assert rate(0.0, 0.85) == 0
    assert rate(0.01, 0.85) == pytest.approx(0.5)
    assert rate(0.1, 0.85) == 1
    assert rate(0.575, 0.85) == pytest.approx(0.5)
    assert rate(1.0, 0.85) == 0


def test_the_noise_of_a_text_draws_it_again_and_is_gumbel_noise() -> None:
    draw = torch.Generator().manual_seed(0)
    count, vocab = 20_000, 6
    log_p = torch.randn(vocab, generator=draw).log_softmax(-1).expand(count, -1)
    tokens = torch.multinomial(log_p[0].exp(), count, replacement=True, generator=draw)
    ids = torch.tensor([0, 2, 3, 5])
    noise = noise_given(log_p[:, ids], tokens, ids, draw)
    keys = log_p[:, ids] + noise
    known = torch.isin(tokens, ids)
    assert torch.equal(ids[keys.argmax(-1)][known], tokens[known])
    assert torch.allclose(noise.mean(0), torch.full((4,), 0.5772), atol=0.04)
    assert torch.allclose(noise.var(0), torch.full((4,), torch.pi**2 / 6), atol=0.12)


def test_the_verdict_follows_the_curve() -> None:
    def entry(tokens: int, share: float) -> dict[str, object]:
        return {"tokens": tokens, "held_out": [{"S": [share]}]}

    now = Survival("all", (6000, 0, 0, 0), 10_000)
    rising, flat = [entry(600, 0.5), entry(900, 0.6)], [entry(600, 0.595), entry(900, 0.6)]
    assert "more training will help" in verdict(rising, now)
    assert "0.100" in verdict(rising, now)
    assert "will not help" in verdict(flat, now)
    assert "too few" in verdict(flat, Survival("all", (60, 0, 0, 0), 100))
    assert "too few" in verdict([entry(900, 0.6)], now)


def test_a_file_of_answers_drops_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    file = AnswerFile(path)
    file.add(answer(3, 4, number=2))
    file.add(answer(5, 6, number=0))
    path.write_bytes(path.read_bytes()[:-4])
    again = AnswerFile(path)
    assert [a.number for a in again.answers] == [2]
    again.add(answer(5, 6, number=0))
    assert [a.number for a in AnswerFile(path).in_order()] == [0, 2]
    assert AnswerFile(path).tokens == 10


def test_prompts_come_from_files_conversations_and_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("builtin:code", max_num_seqs=4)
    llm.tokenizer.chat_template = (  # pyright: ignore[reportOptionalMemberAccess]
        "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}# assistant\n{% endif %}"
    )
    path = tmp_path / "talks.jsonl"
    turn = {"role": "user", "content": "x = 1"}
    lines = [
        {"prompt": "def area(r):"},
        {"messages": [turn]},
        {"messages": [turn, {"role": "assistant", "content": "y = x + 1  # one more"}]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    [talks] = sources([str(path)], llm, 0, 48)
    plain, asked, given = talks.take([0, 1, 2])
    assert plain is not None
    assert asked is not None
    assert given is not None
    assert (plain.tokens, plain.answer, plain.held_out) == (llm.encode("def area(r):"), None, True)
    assert asked.tokens == given.tokens == llm.encode([turn])
    assert given.answer is not None
    assert llm.tokenizer.decode(given.answer) == "y = x + 1  # one more\n"  # pyright: ignore[reportOptionalMemberAccess]
    assert talks.take([3]) == [plain]
    monkeypatch.setattr(prompts, "_INVENTED", SamplingParams(temperature=0.8, stop="\n"))
    invented = sources(["self"], llm, 0, 48)[0].take(range(12))
    assert sum(asked is not None for asked in invented) > 5
    assert len({tuple(asked.tokens) for asked in invented if asked}) > 3
    assert [asked.held_out for asked in invented if asked][1:] == [False] * (sum(map(bool, invented)) - 1)
    assert sources(["self"], llm, 0, 48)[0].take(range(12)) == invented
    assert sources(["self"], llm, 1, 48)[0].take(range(12)) != invented
    file = AnswerFile(tmp_path / "answers.jsonl")
    options = {"length": 64, "temperatures": (0.8, 0.0), "seed": 0, "round_size": 8}
    assert sum(write_answers(llm, [talks], file, **options, tokens=1)) == 6
    found = file.in_order()
    assert [a.number for a in found] == list(range(8))
    assert [a.temperature for a in found] == [0.8, 0.0] * 4
    assert found[2].tokens == found[5].tokens == given.tokens + given.answer
    again = AnswerFile(tmp_path / "stopped.jsonl")
    making = write_answers(llm, [talks], again, **options)
    while len(again.answers) < 5:
        next(making)
    making.close()
    assert sum(write_answers(llm, [talks], again, **options, tokens=1)) > 0
    assert again.in_order() == found
    path.write_text(json.dumps({"prompt": "x = 1\n" * 50}))
    with pytest.raises(ValueError, match="24 prompts in a row gave no answer"):
        list(
            write_answers(
                llm, sources([str(path)], llm, 0, 48), AnswerFile(tmp_path / "none.jsonl"), **options, tokens=1
            )
        )
    path.write_text(json.dumps({"messages": [{"role": "assistant", "content": "y"}]}))
    with pytest.raises(ValueError, match="without a question"):
        sources([str(path)], llm, 0, 48)[0].take([0])


def test_a_model_without_a_chat_template_begins_texts_of_its_own() -> None:
    """Answers at temperature 0 to one and the same prompt would be one text, learnt and held out."""
    llm = LLM("builtin:code", max_num_seqs=4)
    [source] = sources(["self"], llm, 0, 16)
    found = [asked for asked in source.take(range(12)) if asked]
    assert len({tuple(asked.tokens) for asked in found}) > 10
    assert len({len(asked.tokens) for asked in found}) > 3
    assert all(
        asked.tokens[0] == llm.loaded.end_ids[0] and asked.tokens[-1] not in llm.loaded.end_ids for asked in found
    )
    assert source.take([5, 2]) == [source.take([5])[0], source.take([2])[0]]


def test_what_measures_a_head_was_not_learnt() -> None:
    def text(tokens: list[int], number: int, held_out: bool = False) -> TrainingText:
        return TrainingText(number, "self", tokens, 2, 0.0, held_out)

    learnt = [text([1, 2, 3], 1), text([1, 2, 4], 2), text([5, 6, 7], 3)]
    held = [text([8, 9, 3], 0, True), text([8, 9, 4], 25, True)]
    seen = [text([8, 9, 5], 50), replace(held[0], number=51, start=1, held_out=False)]
    got = parted([*seen, *learnt, *held, replace(learnt[2], number=100), replace(held[1], number=125)])
    assert [a.tokens for a in got[0]] == [a.tokens for a in learnt]
    assert [a.tokens for a in got[1]] == [a.tokens for a in held]


def test_texts_are_read_once_and_kept_in_eight_bits(tmp_path: Path) -> None:
    class Counting(Teacher):
        """Says how many texts it has read."""

        texts = 0

        def read(self, tokens: Tensor) -> Taught:
            Counting.texts += len(tokens)
            return super().read(tokens)

    teacher = Counting(load("builtin:code"), (0, 2, 4))
    texts = [answer(2, 5, number=4), answer(3, 9, number=0), answer(1, 3, number=9)]
    kept = KeptTeacher(teacher, KeptFeatures(tmp_path / "features", teacher.hidden, teacher.taps))
    exact, found = Teacher.read(teacher, batch_of(texts[:2]).tokens), kept.read(texts[:2])
    for whole, part in zip(exact, found, strict=True):
        for row, text in enumerate(texts[:2]):
            last = len(text.tokens) - 1
            block = whole[row, :last].unflatten(-1, (-1, 32))
            step = block.abs().amax(-1, keepdim=True) / 127
            error = (part[row, :last].unflatten(-1, (-1, 32)) - block).abs()
            assert (error <= 0.51 * step + 0.07 * step).all()  # half a step, and what a float16 rounds
            assert not part[row, last:].any()
    assert Counting.texts == 2
    for name in ("numbers", "scales", "index.jsonl"):  # as a kill leaves them
        with (tmp_path / "features" / name).open("ab") as file:
            file.write(b"[7")
    again = KeptTeacher(teacher, KeptFeatures(tmp_path / "features", teacher.hidden, teacher.taps))
    assert all(a.equal(b) for a, b in zip(again.read(texts[:2]), found, strict=True))
    assert Counting.texts == 2
    third = again.read(texts[1:])
    assert Counting.texts == 3
    assert third.features[0, :12].equal(found.features[1, :12])
    exact = Teacher.read(teacher, batch_of(texts[2:]).tokens).last[:, :3]
    assert (again.read(texts[2:]).last[:, :3] - exact).abs().max() <= 0.01 * exact.abs().max()
    again.features.remove()
    assert not (tmp_path / "features").exists()


def test_what_the_target_says_while_it_writes_is_what_it_says_of_the_text(tmp_path: Path) -> None:
    teacher = Teacher(load("builtin:code"), (0, 2, 4))
    kept = KeptFeatures(tmp_path / "written", teacher.hidden, teacher.taps)
    recorder = FeatureRecorder(kept)
    file = AnswerFile(tmp_path / "answers.jsonl")
    llm = LLM("builtin:code", drafter=recorder, controller=Fixed(1), max_num_seqs=3)
    llm.decoder.chunk = 16
    path, asked = tmp_path / "prompts.jsonl", ["def f(x):", "x = 1\n" * 6, "def f(x):", "import"]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))  # one fills more than one chunk
    made = write_answers(
        llm,
        sources([str(path)], llm, 0, 48),
        file,
        length=80,
        temperatures=[0.0],
        seed=0,
        round_size=8,
        tokens=1,
        keep=recorder.keep,
    )
    assert sum(made) == len(file.answers) == 8
    read = KeptTeacher(teacher, KeptFeatures(tmp_path / "read", teacher.hidden, teacher.taps))
    for text in file.in_order():
        features, last = read.read([text])
        assert np.array_equal(torch.cat([features, last], -1)[0, :-1], kept.read(text.number))
