"""Ways to write a text, in turns. Nothing is timed here."""

import pytest
from helpers import decoder, plain_texts, request

from outrider.bench.local import Record
from outrider.bench.run import Sample
from outrider.bench.turns import Way, in_turns
from outrider.control import Fixed
from outrider.drafters import ModelDrafter, NoDraft
from outrider.params import SamplingParams
from outrider.testing.toy import ToyModel

ASKED = request([1, 2, 3], SamplingParams(max_tokens=21, ignore_eos=True))


def test_all_write_the_text_of_plain_decoding_in_as_many_stretches():
    target = ToyModel(97)
    drafters = {"plain": NoDraft(), "right": ModelDrafter(ToyModel(97), 1, 64)}
    ways = {name: Way(decoder(target, d, rows=1), ASKED) for name, d in drafters.items()}
    for _ in range(2):  # the rows are free again
        done = in_turns(ways, 4)
        assert done["plain"].row.output == done["right"].row.output == plain_texts(target, [ASKED])[0]
        assert [len(w.seconds) for w in done.values()] == [6, 6]
        assert done["plain"].steps == 21 > done["right"].steps
        assert done["plain"].drafted == 0 < done["right"].drafted


def test_ways_may_share_a_decoder_with_a_row_and_a_controller_each():
    target = ToyModel(97)
    shared = decoder(target, ModelDrafter(ToyModel(97), 3, 64), rows=3)
    samples = {k: Sample(prompt="a", setting=str(k), repeat=0, turn=0, seconds=0) for k in (0, 2, 4)}
    ways = {str(k): Way(shared, ASKED, Fixed(k), Record(samples[k])) for k in samples}
    done = in_turns(ways, 5)
    [text] = plain_texts(target, [ASKED])
    assert [done[str(k)].row.output for k in samples] == [text] * 3
    assert [done[str(k)].steps for k in samples] == [21, 7, 5]
    for k, sample in samples.items():
        written = done[str(k)]
        assert sample.token_ids == text
        assert sample.drafted is not None
        assert max(sample.drafted) == k
        assert written.prompt < sample.seconds <= written.prompt + written.total


def test_an_interrupt_frees_the_rows(monkeypatch):
    shared = decoder(ToyModel(97), rows=2)
    whole, left = shared.round, iter(range(4))

    def impatient(live):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return whole(live)

    monkeypatch.setattr(shared, "round", impatient)
    with pytest.raises(KeyboardInterrupt):
        in_turns({"a": Way(shared, ASKED), "b": Way(shared, ASKED)})
    assert not shared.rows
