"""The step on a GPU, under Triton's interpreter: every text is that of plain decoding, whatever drafts, in any company."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, cast

import interpreted  # first: it makes Triton interpret
import numpy as np
import pytest
import torch
from heads import PROMPT, drafter_of, head_folder, torch_target
from helpers import KnownTree, Loop, RandomTree, decoder, plain_texts, request
from pretend import Pretend
from tiny_models import tiny_config, tiny_model, whole_config
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.params import SamplingParams
from outrider.core.types import Budget, Draft, Step
from outrider.drafters import Drafter, ModelDrafter, NgramDrafter, SuffixDrafter
from outrider.drafters.base import DraftContext
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.request import Request
from outrider.kernels.gpu import attention, choice
from outrider.kernels.gpu.coded import Coded
from outrider.models import load as loading
from outrider.models.base import FINAL_NORM, Chain, LazyArray, Pending, Verification
from outrider.models.cache import SlotCache
from outrider.models.gpu.model import GpuModel
from outrider.models.gpu.weights import DeviceMatrix, DeviceSource
from outrider.models.hf.model import HFModel
from outrider.models.hf.tensors import ModuleTensors, config_for
from outrider.models.load import Loaded
from outrider.models.native.model import build
from outrider.models.nodes import Nodes

pytestmark = interpreted.on_cpu
VOCAB, LENGTH = 97, 320
EVERY = {"ignore_eos": True}


def small() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=LENGTH, initializer_range=0.3,
    )  # fmt: skip


def model(seed: int, device: str = "cpu", noise: float = 0.0) -> GpuModel:
    """A Llama of one layer. noise: what is added to its output head."""
    torch.manual_seed(seed)
    llama = LlamaForCausalLM(small()).to(torch.bfloat16).eval()
    with torch.no_grad():
        llama.lm_head.weight += noise * torch.randn_like(llama.lm_head.weight)
    settings = config_for(llama)
    return GpuModel(build(settings.kind, settings, DeviceSource(ModuleTensors(llama), settings, device)), device)


@cache
def target() -> GpuModel:
    return model(0)


def known(asked: list[Request]) -> KnownTree:
    return KnownTree(target(), asked)


@pytest.fixture(autouse=True)
def _judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verdict is that of `outrider.verify` on the same logits, and the device has judged what it can."""
    step = GpuModel.step

    def both(self: GpuModel, cache: SlotCache, slots: list[int], check: Verification, *, taps: Any = ()) -> Pending:
        out, judge, first = step(self, cache, slots, check, taps=taps)
        assert isinstance(out.logits, LazyArray)
        if check.following:  # to read the logits would keep the next step from being told
            return Pending(out, judge, first)
        verdict = judge()
        assert verdict.host == check.verdict(np.asarray(out.logits)).host
        return Pending(out, lambda: verdict, first)

    monkeypatch.setattr(GpuModel, "step", both)


def some(count: int = 3, tokens: int = 8) -> list[Request]:
    """Greedy, drawn, and drawn by the host."""
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
    return [
        request([1 + i, 2, 3, 2, 3], SamplingParams(max_tokens=tokens, **EVERY, **kinds[i % 3]), 7 + i)
        for i in range(count)
    ]


def check(asked: list[Request], run: Loop) -> None:
    assert [one.output for one in run.generate(asked)] == plain_texts(target(), asked)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "ngram": lambda: NgramDrafter(1, 3),
    "suffix": lambda: SuffixDrafter(shared=0, least=0.01),
    "random tree": lambda: RandomTree(VOCAB),
    "known tree": lambda: known(some()),
    "draft model": lambda: ModelDrafter(model(0, noise=0.05), 4, LENGTH),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_text_is_that_of_plain_decoding(name: str) -> None:
    check(some(), decoder(target(), DRAFTERS[name](), budget=Budget(3, 2, 6)))


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"top_k": 5},
    {"min_p": 0.2, "temperature": 1.5},
    {"logit_bias": {5: 3.0, 9: -100.0}},
    {"bad_words": [[7]], "allowed_token_ids": [*range(3, 60)]},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.3, "stop_token_ids": [50, 51, 52]},
]


@pytest.mark.parametrize(
    "kind", ["gemma2", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("qwen2", "qwen3"))]
)
def test_texts_of_other_families_are_those_of_plain_decoding(kind: str) -> None:
    raw = tiny_model(tiny_config(whole_config(kind))).bfloat16().eval()
    settings = config_for(raw)
    far = GpuModel(build(settings.kind, settings, DeviceSource(ModuleTensors(raw), settings, "cpu")), "cpu")
    asked = some(3, 5)
    expected = plain_texts(far, asked, max_length=64)
    assert len({token for text in expected for token in text}) > 1
    for drafter in (NgramDrafter(1, 3), KnownTree(far, asked), RandomTree(far.vocab_size)):
        texts = decoder(far, drafter, budget=Budget(2, 2), max_length=64).generate(asked)
        assert [text.output for text in texts] == expected


def test_eight_texts_with_other_parameters_each_are_decoded_together() -> None:
    asked = [
        request([1 + i, 4, 5], SamplingParams(max_tokens=5, **EVERY, **more), 30 + i)
        for i, more in enumerate(PARAMETERS)
    ]
    run = decoder(target(), known(asked), rows=8, budget=Budget(2))
    check(asked, run)
    [wanted] = run.generate(asked[6:7])
    [alone] = decoder(target(), rows=1).generate(asked[6:7])
    assert wanted.logprobs == alone.logprobs


@pytest.mark.parametrize("drafts", [True, False])
def test_texts_join_leave_and_come_back(drafts: bool) -> None:
    """Three texts in two slots, a prompt of several chunks, one that was read before, one that is taken out and read again."""
    begin = [11 + n % 13 for n in range(17)]
    asked = [
        request([*begin, 1 + i] if i else begin[:3], SamplingParams(max_tokens=6, temperature=i % 2, **EVERY), 50 + i)
        for i in range(4)
    ]
    drafter, store = known(asked) if drafts else None, PrefixCache(1 << 20)
    run = decoder(target(), drafter, rows=2, budget=Budget(2), prefixes=store)
    run.chunk = 8
    waiting, texts, interrupted = [run.sequence(one) for one in asked], [], False
    texts = [*waiting]
    while any(text.finish is None for text in texts):
        for text in waiting[: len(run.free)]:
            run.admit(text)
            waiting.remove(text)
        run.step()
        for slot, text in [*run.sequences.items()]:
            out = not interrupted and len(text.output) == 3 and text.finish is None
            if out or text.finish is not None:
                run.release(slot)
                waiting += [text] * out
                interrupted |= out
    assert interrupted
    assert store.hits
    assert [text.output for text in texts] == plain_texts(target(), asked)


def test_a_text_goes_on_past_a_split_of_attention() -> None:
    prompt = [1 + n * n % 89 for n in range(attention.SPLIT - 3)]
    asked = [request(prompt, SamplingParams(max_tokens=6, **EVERY), 3)]
    check(asked, decoder(target(), known(asked), budget=Budget(3)))


def test_taps_of_a_step_are_those_of_a_forward() -> None:
    taps, asked, seen = (0, FINAL_NORM), some(2, 6), dict[int, list[np.ndarray]]()

    class Tapped(KnownTree):
        taps = (0, FINAL_NORM)

        def start(self, slot: int, tokens: Any, first: int, features: np.ndarray) -> None:
            seen.setdefault(slot, []).append(features.copy())

        def update(self, context: DraftContext, commits: Any, target: Any) -> None:
            for slot, commit in zip(context.slots, commits, strict=True):
                seen[slot].append(commit.features.copy())

    run = decoder(target(), Tapped(target(), asked), budget=Budget(2))
    texts = [run.start(one) for one in asked]
    for _ in run.run(texts):
        pass
    for text in texts:
        read = [text.tokens[: run.cache.length[text.slot]]]
        alone = target().forward(Nodes(np.array(read), target().new_cache(1, 64), [0]), taps=taps, want="none")
        assert alone.features is not None
        assert np.array_equal(np.concatenate(seen[text.slot]), alone.features[0])


@pytest.mark.parametrize("fault", ["move", "walk"])
def test_a_planted_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = some(1)
    run = decoder(target(), known(asked), budget=Budget(3))
    if fault == "move":
        monkeypatch.setattr(attention, "move", lambda *given: None)
        [text] = run.generate(asked)
        assert [text.output] != plain_texts(target(), asked)
    else:
        monkeypatch.setattr(choice, "walk", lambda best, index, rows, path, accepted, drawn: drawn.fill_(3))
        with pytest.raises(AssertionError):
            run.generate(asked)


class Watched:
    """Graphs of a pretended device: commands are noted by key, and nothing is in them that a graph cannot hold."""

    def __init__(self, seen: Pretend) -> None:
        self.seen, self.told, self.again = seen, dict[Any, list[Any]](), 0

    def __len__(self) -> int:
        return len(self.told)

    def run(self, key: Any, tell: Callable[[], Any]) -> Any:
        self.seen.launches = launches = []
        with self.seen.capture() if key in self.told else nullcontext():  # the first compiles and allots
            out = tell()
        self.seen.launches = None
        self.again += key in self.told
        assert self.told.setdefault(key, launches) == launches, "a graph would repeat other commands"
        return out


def test_a_step_sends_once_reads_once_and_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # `_judged` reads logits
    asked = some(2)
    drafters = NgramDrafter(90, 91), None, known(asked)  # their texts are written on the CPU
    with Pretend() as seen:
        far = model(0, "pretend")
        graphs = list[Watched]()  # of each cache
        monkeypatch.setattr(
            "outrider.models.gpu.step.Graphs", lambda device: graphs.append(Watched(seen)) or graphs[-1]
        )
        monkeypatch.setattr("outrider.models.gpu.cache.free_memory", lambda device: 2**40)
        for drafter in drafters:
            run = decoder(far, drafter, budget=Budget(1, 2))
            texts, sent, read = [run.start(one) for one in asked], list[int](), 0
            seen.clear()
            for _ in run.run(texts):
                read += sum(seen.waits.values())
                sent.append(sum(seen.uploads.values()))
                seen.clear()
            # where no draft is, the device is told a step more, and knows each but the first two
            assert sent[2:] == [int(isinstance(drafter, KnownTree))] * (len(sent) - 2)
            assert read <= len(sent) + 1
            assert [text.output for text in texts] == plain_texts(target(), asked)
    assert all(each.again for each in graphs)


def test_a_variable_takes_our_kernels_where_they_can_run_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = LlamaForCausalLM(small()).bfloat16()
    mixtral = tiny_model(tiny_config(whole_config("mixtral"))).bfloat16()
    monkeypatch.setattr(loading, "device_of", lambda *given: "cpu:0")  # another device, as far as the loader knows
    monkeypatch.setattr(loading, "why_no_kernels", lambda device: None if device == "cpu" else "it is another one")
    monkeypatch.setattr(loading, "_said", set())
    monkeypatch.delenv("OUTRIDER_GPU", raising=False)
    assert isinstance(loading.load(llama).model, HFModel)
    monkeypatch.setenv("OUTRIDER_GPU", "1")
    loaded = loading.load(llama)
    assert isinstance(loaded.model, GpuModel)
    assert loaded.model.path.startswith("gpu: no card, triton 3.")
    for model, options, why in (
        (LlamaForCausalLM(small()), {}, "these are float32 and auto: give dtype='bfloat16'"),
        (llama, {"kv_cache_dtype": "int8"}, "these are bfloat16 and int8"),
        (mixtral, {}, "cannot run it: route"),
    ):
        with pytest.warns(RuntimeWarning, match=why):
            assert isinstance(loading.load(model, **options).model, HFModel)
    few = loading.load(llama, quantization="int4")
    assert few.program is not None
    assert few.weights == "int4"
    kept = [cast("DeviceMatrix", m).weight for m in few.program.matrices]
    assert {m.bits for m in kept if isinstance(m, Coded)} == {8, 4}  # the head has 8
    with pytest.raises(ValueError, match=r"needs our kernels: .* cannot run it: route"):
        loading.load(mixtral, quantization="int8")


@pytest.mark.parametrize("budget", [Budget(2), Budget(3, 3, min_probability=0.2)])
def test_chains_that_the_device_draws_are_those_of_level_by_level(budget: Budget) -> None:
    drafts, draft = list[list[Any]](), model(0, noise=0.1)

    class Noted(ModelDrafter):
        def propose(self, context: DraftContext) -> Draft:
            draft = super().propose(context)
            drafts[-1].append((draft.host, draft.stated and [np.round(row, 5).tolist() for row in draft.stated]))
            return draft

    for draft.has_draft_chains in (True, False):
        drafts.append([])
        check(some(2, 5), decoder(target(), Noted(draft, 4, LENGTH), budget=budget))
    assert drafts[0] == drafts[1]
    assert any(len(tree) > 2 for trees, _ in drafts[0] for tree in trees)


def test_a_chain_is_sent_once_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.gpu.cache.free_memory", lambda device: 2**40)
    long, asked = [1 + n % 80 for n in range(70)], [(4, 1.0, (9, 0, 0, 3)), (2, 0.0, (0, 0, 0, 1))]
    chains = [
        Chain(0, [5, 6, 7], *asked[0], 0.7),
        Chain(2, [8], *asked[1]),
        Chain(1, [], 0),
        Chain(3, long, 1, error=0.5),
    ]

    def draw(far: GpuModel) -> list[Any]:
        return far.draft_chains(far.new_cache(4, 128), chains)

    with Pretend() as seen:
        far = model(0, "pretend")
        cache = far.new_cache(4, 128)
        seen.clear()
        short = far.draft_chains(cache, chains[:3])
        assert sum(seen.uploads.values()) == sum(seen.waits.values()) == 1
        assert [len(one.tokens) for one in short] == [4, 2, 0]
        assert [len(one.chances) for one in short] == [4, 0, 0]
        there = draw(far)
    assert draw(target()) == there
    assert len(there[3].tokens) == 1


def test_a_head_drafts_for_a_target_on_a_gpu() -> None:
    """It runs on the CPU, and reads the features of the target's steps."""
    raw = torch_target().source.bfloat16()
    settings = config_for(raw)
    far = GpuModel(build(settings.kind, settings, DeviceSource(ModuleTensors(raw), settings, "cpu")), "cpu")
    drafter = drafter_of(
        head_folder("eagle31", Path()), Loaded(far, "golden-target", None, (), "bfloat16", raw, raw.config)
    )
    asked = [request(PROMPT[:3], SamplingParams(max_tokens=4, **EVERY), 5)]
    [text] = decoder(far, drafter, budget=Budget(2), max_length=64).generate(asked)
    assert [text.output] == plain_texts(far, asked, max_length=64)
    assert sum(text.counts.drafted) > 1


def test_logits_can_be_read_although_the_next_step_was_told() -> None:
    [asked] = some(1, 6)
    run = decoder(target(), None)
    text = run.start(asked)
    steps = list[Step]()
    for count, step in enumerate(run.run([text])):
        steps.append(step)
        if count % 3 == 1:
            assert np.asarray(step.logits)[0, 0].argmax() == text.tokens[-1]
    assert [text.output] == plain_texts(target(), [asked])
    with pytest.raises(RuntimeError, match="read them before it"):
        target().forward(Nodes(np.array([[1]]), target().new_cache(1, 64), [0]))
        np.asarray(steps[0].logits)


def test_a_step_whose_graph_is_new_says_nothing_of_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keys(dict[Any, None]):
        """Graphs that capture nothing, and know how many they would have."""

        def run(self, key: Any, tell: Callable[[], Any]) -> Any:
            self[key] = None
            return tell()

    monkeypatch.setattr("outrider.models.gpu.step.Graphs", lambda device: Keys())
    [asked] = some(1, 6)
    run = decoder(target(), None)
    text = run.start(asked)
    seconds = [sum(step.seconds.values()) - step.seconds["draft"] for step in run.run([text])]
    assert seconds[0] == 0
    assert all(seconds[1:])


def test_no_step_is_told_after_one_that_ends_a_text() -> None:
    [asked] = some(1, 3)
    run = decoder(target(), None)
    text = run.start(asked)
    told = list[bool]()
    for _ in run.run([text]):
        assert target()._steps is not None
        told.append(target()._steps._next is not None)
    assert told == [True, True, False]
