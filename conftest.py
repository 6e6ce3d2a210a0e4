"""Set-up that all tests share: helpers, threads, the cache folder, and one hypothesis profile.

Test files import the modules of `tests/support`, `lab/tests/support` and `ray/tests/support` by name. Small tensors stay on one
thread. Calibrations are kept in a temporary folder and not in the user's cache.
"""

import gc
import os
import ssl
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import certifi
import hypothesis
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "ray" / "tests" / "support"))
sys.path.insert(0, str(ROOT / "lab" / "tests" / "support"))
sys.path.insert(0, str(ROOT / "tests" / "support"))

from light import absent  # noqa: E402
from patience import PATIENCE  # noqa: E402

LIGHT = find_spec("torch") is None
"""Whether this is `make light`: without torch, and without the packages of tests that need it or check others."""

if LIGHT:
    from outrider.kernels import cpu

    cpu.set_num_threads(1)
else:
    import torch

    torch.set_num_threads(1)
    # Read when triton is imported, which transformers may do first.
    os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a hundred processes of the tests would compile the same files
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # as `outrider` does; before transformers is imported

# No test depends on how fast the machine is. In CI the examples are the same in every run.
hypothesis.settings.register_profile("outrider", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("outrider")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without the garbage collector: modules and tests stay, and to look at all of them again took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # later collections leave them out, too: 0.7 s each
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """A file of tests that asks for a package that is not installed is left out, in `make light` only."""
    report: Any = yield
    if LIGHT and report.failed and (name := absent(report.call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """So is a test."""
    report: Any = yield
    if LIGHT and report.failed and call.excinfo and (name := absent(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: needs {name}")
    return report


@pytest.fixture(autouse=True, scope="session")
def _clients() -> Iterator[None]:
    """Each client of httpx reads the certificates of all authorities: 20 ms of a request that takes two. They are read once.

    They wait long, where a busy machine would miss the five seconds of httpx."""
    made = ssl.create_default_context
    known = cache(made)
    usual = [{"cafile": certifi.where()}]  # and what the environment names in its place
    usual += [
        {k: os.environ[name]}
        for k, name in (("cafile", "SSL_CERT_FILE"), ("capath", "SSL_CERT_DIR"))
        if name in os.environ
    ]

    def create(*given: Any, **named: Any) -> ssl.SSLContext:
        return known(**named) if not given and named in usual else made(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", create)
        for kind in ("read", "write", "connect", "pool"):
            patch.setattr(DEFAULT_TIMEOUT_CONFIG, kind, PATIENCE)
        yield


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> Iterator[None]:
    """A file leaves the instruction set and the threads of the kernels as they are: all later ones were once ten times slower."""
    yield
    if (native := sys.modules.get("outrider.kernels.cpu")) is not None and native.available():
        now = (native.isa(), native.num_threads())
        assert now == _first.setdefault("kernels", now)


_first = dict[str, tuple[str, int]]()  # as the first file left them


@pytest.fixture(autouse=True)
def _published() -> Iterator[None]:
    """Each answer of a server of `serving` has the published form, whichever test asked for it."""
    yield
    if "published" in sys.modules:
        sys.modules["published"].judge()
