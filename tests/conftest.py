"""Shared set-up: tests find their helpers beside them, small tensors stay on one thread, and what is calibrated is kept elsewhere
than with the user."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
