"""Several decoders write one text in turns. Nothing is timed here."""

import pytest
from helpers import decoder, plain_texts, request

from outrider.core.params import SamplingParams
from outrider.core.types import Budget
from outrider.drafters import ModelDrafter, NoDraft
from outrider.testing.toy import ToyModel
from outrider_lab.bench.local import SampleRecorder
from outrider_lab.tune.race import interleave

REQUEST = request([1, 2, 3], SamplingParams(max_tokens=21, ignore_eos=True))


def recorder(name: str) -> SampleRecorder:
    return SampleRecorder(prompt="a", setting=name, repeat=0, turn=0)


def test_all_write_the_text_of_plain_decoding():
    target = ToyModel(97)
    decoders = {
        "plain": decoder(target, NoDraft(), rows=1),
        "right": decoder(target, ModelDrafter(ToyModel(97), 1, 64), rows=1),
    }
    [text] = plain_texts(target, [REQUEST])
    for _ in range(2):  # the slots are free again
        recorders = {name: recorder(name) for name in decoders}
        interleave([(d, recorders[name]) for name, d in decoders.items()], REQUEST, 4)
        plain, right = (recorders[name].sample() for name in decoders)
        assert plain.token_ids == right.token_ids == text
        assert plain.drafted == [0] * 21
        assert right.drafted is not None
        assert len(right.drafted) < 21
        assert sum(right.drafted) > 0


def test_texts_may_share_a_decoder():
    target = ToyModel(97)
    shared = decoder(target, ModelDrafter(ToyModel(97), 3, 64), rows=3, budget=Budget(2))
    recorders = [recorder(str(n)) for n in range(3)]
    interleave([(shared, one) for one in recorders], REQUEST, 5)
    [text] = plain_texts(target, [REQUEST])
    for sample in (one.sample() for one in recorders):
        assert sample.token_ids == text
        assert sample.drafted is not None
        assert max(sample.drafted) == 2
        assert len(sample.drafted) == 7
        assert 0 < (sample.ttft or 0) < sample.seconds


def test_an_interrupt_frees_the_slots(monkeypatch):
    shared = decoder(ToyModel(97), rows=2)
    whole, left = shared.round, iter(range(4))

    def impatient(live):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return whole(live)

    monkeypatch.setattr(shared, "round", impatient)
    with pytest.raises(KeyboardInterrupt):
        interleave([(shared, recorder("a")), (shared, recorder("b"))], REQUEST)
    assert not shared.sequences
