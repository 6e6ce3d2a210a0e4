"""From scores to probabilities: the exact values to rounding, and the same bits whatever vectors numpy itself uses."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from scipy import special

from outrider.kernels import cpu as native
from outrider.kernels.probabilities import log, log_softmax, running_total, softmax, total

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why()))


@pytest.mark.parametrize("n", [1, 7, 8, 33, 50001])
def test_softmax_is_exact_to_rounding(n: int) -> None:
    scores = np.random.default_rng(n).standard_normal((3, n), np.float32) * 6
    scores[1, ::3] = -math.inf
    if n > 1:
        scores[1, 1] = 2.0
    else:
        scores[1, 0] = 0.0
    exact = special.softmax(scores.astype(np.float64), -1), special.log_softmax(scores.astype(np.float64), -1)
    np.testing.assert_allclose(softmax(scores), exact[0], rtol=4e-6, atol=1e-30)
    np.testing.assert_allclose(log_softmax(scores), exact[1], rtol=1e-6, atol=1e-6)
    assert np.array_equal(softmax(scores[2]), softmax(scores)[2])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_a_distribution_is_nan(bad: float) -> None:
    scores = np.zeros((3, 20), np.float32)
    scores[0, 13], scores[1] = bad, -math.inf
    for function in (softmax, log_softmax):
        assert np.isnan(function(scores)).all(1).tolist() == [True, True, False]


def test_logarithms_are_within_one_unit_in_the_last_place() -> None:
    values = np.random.default_rng(1).random(20001) ** 40
    values[:3] = 0.0, 1.0, math.nan
    found = log(values)
    assert found[0] == -math.inf
    assert found[1] == 0
    assert np.isnan(found[2])
    exact = np.log(values[3:])
    assert np.all(np.abs(found[3:] - exact) <= np.spacing(np.abs(exact)))


@pytest.mark.parametrize("n", [0, 1, 5, 8, 4001])
def test_sums_are_exact_to_rounding(n: int) -> None:
    values = np.random.default_rng(n).random((2, n))
    assert total(values).shape == (2, 1)
    for row, found in zip(values.tolist(), total(values)[:, 0].tolist(), strict=True):
        assert found == pytest.approx(math.fsum(row), rel=1e-14)


def test_a_running_total_adds_one_after_another() -> None:
    values = np.random.default_rng(2).random(501, np.float32)
    sums, so_far = [], 0.0
    for value in values.tolist():
        so_far += value
        sums.append(so_far)
    assert running_total(values).tolist() == sums


def test_sine_and_cosine_are_within_one_unit_in_the_last_place() -> None:
    positions = np.arange(0, 131072, 7, dtype=np.float64)
    angles = np.concatenate([positions, positions.astype(np.float32) * np.float32(0.0172), -positions[:5], [8e6]])
    sine, cosine = np.empty_like(angles), np.empty_like(angles)
    native.library().sine_cosine(angles.ctypes.data, sine.ctypes.data, cosine.ctypes.data, len(angles))
    for found, exact in ((sine, np.sin(angles)), (cosine, np.cos(angles))):
        assert np.all(np.abs(found - exact) <= np.spacing(np.maximum(np.abs(exact), 1e-300)) * 1.5)
        assert np.array_equal(found.astype(np.float32), exact.astype(np.float32))


PROGRAM = """
import hashlib
import numpy as np
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__
from outrider.core.noise import Noise, Stream
from outrider.core.params import SamplingParams
from outrider.core.sampling import LogitsDistribution, LogitsWarper, SequenceState
from outrider.core.types import Draft, Siblings
from outrider.drafters.model.children import children
from outrider.engine.decoder import logprobs
from outrider.verify import VERIFIERS

generator = np.random.default_rng(5)
noise = Noise(np.arange(4), np.arange(4))
print(",".join(name for name in __cpu_dispatch__ if __cpu_features__[name]) or "none")
found = hashlib.sha256()
kinds = [dict(top_p=0.9), dict(min_p=0.03), dict(top_k=40, repetition_penalty=1.2), dict(frequency_penalty=0.4)]
for turn in range(6):
    # integers, so that the inputs do not come from numpy's generator of normal numbers
    logits = generator.integers(-(2**20), 2**20, (4, 5, 3001)).astype(np.float32) / np.float32(2**17)
    histories = [
        SequenceState(SamplingParams(temperature=0.8, seed=1, **kind), (0,), (), [7, 9, 11, 9], 2) for kind in kinds
    ]
    warp = LogitsWarper(histories)
    position = np.full(4, 10 + turn)
    extra = [[3]] * 4
    scores = warp.scores(logits[:, 0], extra)
    found.update(scores.tobytes())
    found.update(warp.draw(logits[:, 0], extra, noise, Stream.TOKEN, position).tobytes())
    found.update(repr(logprobs(logits[0, 0], 5, 3)).encode())
    for kind in (Siblings.IID, Siblings.WITHOUT_REPLACEMENT, Siblings.TOP_THEN_SAMPLED):
        made = children(scores, 2, kind, noise, Stream.DRAFT, position)
        found.update(made.tokens.tobytes() + made.keys.tobytes() + made.probs.tobytes())
        tokens = np.concatenate([np.zeros((4, 1), np.int64), made.tokens], 1)
        parents = np.array([[-1, 0, 0]] * 4)
        probs = np.stack([made.probs] * 3, 1)
        for name in ("rejection", "traversal"):
            draft = Draft(tokens, parents, probs, siblings=kind)
            verdict = VERIFIERS[name](LogitsDistribution(logits, draft, warp), draft, noise, position)
            found.update(repr(verdict).encode())
    chain = Draft(tokens[:, :2], parents[:, :2], probs[:, :2], siblings=Siblings.IID)
    found.update(repr(VERIFIERS["block"](LogitsDistribution(logits, chain, warp), chain, noise, position)).encode())
print(found.hexdigest())
"""


def test_filters_and_verifiers_have_the_same_bits_for_every_vector_width_of_numpy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of this process, and of one whose numpy uses no wide vectors."""
    exec(PROGRAM, {})
    used, bits = capsys.readouterr().out.split()
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": used}
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == ["none", bits]
