"""Several decoders write one text in turns. Nothing is timed here."""

import pytest
from helpers import decoder, plain_texts, request

from outrider.control import Fixed
from outrider.core.params import SamplingParams
from outrider.drafters import ModelDrafter, NoDraft
from outrider.lab.bench.local import SampleRecorder
from outrider.lab.tune.race import TimedRun, interleave
from outrider.testing.toy import ToyModel

REQUEST = request([1, 2, 3], SamplingParams(max_tokens=21, ignore_eos=True))


def test_all_write_the_text_of_plain_decoding_in_as_many_stretches():
    target = ToyModel(97)
    decoders = {
        "plain": decoder(target, NoDraft(), rows=1),
        "right": decoder(target, ModelDrafter(ToyModel(97), 1, 64), rows=1),
    }
    for _ in range(2):  # the slots are free again
        runs = {name: TimedRun(d, REQUEST) for name, d in decoders.items()}
        interleave(runs, 4)
        assert runs["plain"].row.output == runs["right"].row.output == plain_texts(target, [REQUEST])[0]
        assert [len(r.seconds) for r in runs.values()] == [6, 6]
        assert runs["plain"].steps == 21 > runs["right"].steps
        assert runs["plain"].drafted == 0 < runs["right"].drafted


def test_runs_may_share_a_decoder_with_a_slot_and_a_controller_each():
    target = ToyModel(97)
    shared = decoder(target, ModelDrafter(ToyModel(97), 3, 64), rows=3)
    recorders = {k: SampleRecorder(prompt="a", setting=str(k), repeat=0, turn=0) for k in (0, 2, 4)}
    runs = {str(k): TimedRun(shared, REQUEST, Fixed(k), recorder) for k, recorder in recorders.items()}
    interleave(runs, 5)
    [text] = plain_texts(target, [REQUEST])
    assert [run.row.output for run in runs.values()] == [text] * 3
    assert [run.steps for run in runs.values()] == [21, 7, 5]
    for k, recorder in recorders.items():
        run, sample = runs[str(k)], recorder.sample()
        assert sample.token_ids == text
        assert sample.drafted is not None
        assert max(sample.drafted) == k
        assert run.prefill < sample.seconds <= run.prefill + run.total


def test_an_interrupt_frees_the_slots(monkeypatch):
    shared = decoder(ToyModel(97), rows=2)
    whole, left = shared.round, iter(range(4))

    def impatient(live):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return whole(live)

    monkeypatch.setattr(shared, "round", impatient)
    with pytest.raises(KeyboardInterrupt):
        interleave({"a": TimedRun(shared, REQUEST), "b": TimedRun(shared, REQUEST)})
    assert not shared.sequences
