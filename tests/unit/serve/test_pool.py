"""Which models are loaded: those that requests ask for, within the memory, and none leaves that answers a request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE

from outrider.serve.errors import Refused
from outrider.serve.metrics import Metrics
from outrider.serve.options import ServeOptions
from outrider.serve.pool import ModelPool, PooledModel

pytestmark = pytest.mark.anyio
MB = 1 << 20


class Shelf:
    """A pool of models that are made of nothing. log: loads and ends, in their order. gate: loads wait for it."""

    def __init__(self, weights: dict[str, int], memory: float, caches: int = 0, **options: Any) -> None:
        self.log, self.gate = list[str](), threading.Event()
        self.gate.set()
        models = [PooledModel(ServeOptions(model=name, **options), size * MB) for name, size in weights.items()]

        def load(settings: ServeOptions, room: float) -> Any:
            self.gate.wait(PATIENCE)
            if settings.model == "bad":
                raise ValueError("bad has no weights")
            self.log.append(f"+{settings.model}")
            runtime = SimpleNamespace(loaded=SimpleNamespace(source=None))
            service: Any = SimpleNamespace(engine=None, settings=settings, runtime=runtime, caches=caches * MB)
            service.close = lambda: self.log.append(f"-{settings.model}")
            return service

        self.pool = ModelPool(models, Metrics("x"), load, memory * MB)


class Asker:
    """A request that borrows models until it ends. gone: its client leaves."""

    def __init__(self) -> None:
        self.gone, self.state = asyncio.Event(), SimpleNamespace(ends=ExitStack())

    async def receive(self) -> dict[str, str]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def ask(self, pool: ModelPool, name: str | None, **more: Any) -> str:
        return (await pool.lend(name, self, **more)).settings.model  # type: ignore[arg-type]

    def begin(self, pool: ModelPool, name: str, **more: Any) -> asyncio.Task[str]:
        return asyncio.ensure_future(self.ask(pool, name, **more))

    def end(self) -> None:
        self.state.ends.close()


async def waits(*tasks: asyncio.Task[Any]) -> None:
    """Nothing that can go on is left, and these wait."""
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not [task for task in tasks if task.done()]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def shelf(anyio_backend: str) -> AsyncIterator[Callable[..., Shelf]]:
    """Makes shelves, whose pools are closed at the end."""
    async with AsyncExitStack() as stack:

        def make(weights: dict[str, int], memory: float, **more: Any) -> Shelf:
            made = Shelf(weights, memory, **more)
            stack.push_async_callback(made.pool.close)
            stack.callback(made.gate.set)
            return made

        yield make


async def test_the_least_recently_used_model_leaves(shelf: Callable[..., Shelf]) -> None:
    one = shelf({"a": 3, "b": 3, "c": 3}, 10)  # two fit, with a share for their caches
    pool = one.pool
    pool.start()
    for name in ("a", "b", "a", "c", "a", "b"):
        asker = Asker()
        assert await asker.ask(pool, name) == name
        asker.end()
    assert [pool.state(model) for model in pool.models] == ["loaded", "loaded", "unloaded"]
    assert one.log == ["+a", "+b", "-b", "+c", "-c", "+b"]


@pytest.mark.parametrize(
    ("weights", "memory", "share"), [([1, 1, 10], 12, 2), ([5, 5, 5], 12, 7), ([1, 1], 12, 5), ([9], 10, 1)]
)
def test_as_many_models_as_possible_have_room_together(weights: list[int], memory: int, share: int) -> None:
    assert Shelf({str(n): size for n, size in enumerate(weights)}, memory).pool.share == share * MB


async def test_a_model_stays_while_it_answers_and_takes_no_further_request(shelf: Callable[..., Shelf]) -> None:
    """Nor do its requests keep the other one waiting for ever: those that come later wait for their turn."""
    one, first, second, third = shelf({"a": 3, "b": 3}, 4), Asker(), Asker(), Asker()
    assert await first.ask(one.pool, "a") == "a"
    wanted = second.begin(one.pool, "b")
    await waits(wanted)
    late = third.begin(one.pool, "a")
    await waits(wanted, late)
    assert one.log == ["+a"]
    first.end()
    assert await wanted == "b"
    await waits(late)
    second.end()
    assert await late == "a"
    third.end()
    assert one.log == ["+a", "-a", "+b", "-b", "+a"]


async def test_a_model_that_was_to_leave_stays_when_its_room_is_not_wanted_any_more(
    shelf: Callable[..., Shelf],
) -> None:
    one, first, second, third = shelf({"a": 3, "b": 3}, 4), Asker(), Asker(), Asker()
    await first.ask(one.pool, "a")
    wanted = second.begin(one.pool, "b")
    await waits(wanted)
    late = third.begin(one.pool, "a")
    await waits(late)
    second.gone.set()
    with pytest.raises(Refused, match="client has left"):
        await wanted
    assert await late == "a"
    first.end()
    third.end()
    assert (one.log, one.pool.models[0].users, one.pool.waiting) == (["+a"], 0, 0)
    assert one.pool.models[0].ready


async def test_requests_wait_for_one_load_and_others_go_on(shelf: Callable[..., Shelf]) -> None:
    one = shelf({"a": 1, "b": 1}, 10, max_queue=2)
    pool = one.pool
    pool.start()
    one.gate.clear()
    waiting = [Asker().begin(pool, "b") for _ in range(2)]
    await waits(*waiting)
    assert await Asker().ask(pool, "a") == "a"
    with pytest.raises(Refused, match="2 requests wait for models already") as full:
        await Asker().ask(pool, "b")
    assert full.value.status == 429
    assert [pool.state(model) for model in pool.models] == ["loaded", "loading"]
    one.gate.set()
    assert await asyncio.gather(*waiting) == ["b", "b"]
    assert one.log == ["+a", "+b"]
    assert pool.models[1].users == 2


async def test_a_request_waits_no_longer_than_it_may(shelf: Callable[..., Shelf]) -> None:
    one, asker = shelf({"a": 1, "b": 1}, 10), Asker()
    one.gate.clear()
    with pytest.raises(Refused, match=r"b was not loaded in 0\.01 s") as late:
        await Asker().ask(one.pool, "b", seconds=0.01)
    assert late.value.status == 408
    one.gate.set()
    assert await asker.ask(one.pool, "b") == "b"
    assert (asker.state.model, one.pool.models[1].users) == ("b", 1)


async def test_a_model_leaves_after_the_time_that_was_asked_for(shelf: Callable[..., Shelf]) -> None:
    one, first, second, third = shelf({"a": 1, "b": 1}, 10), Asker(), Asker(), Asker()
    [model, _] = one.pool.models
    await first.ask(one.pool, "a", keep=0.0)
    await second.ask(one.pool, "a", keep=60.0)  # the last request decides
    first.end()
    assert model.expires is None
    second.end()
    assert model.expires is not None
    await waits()
    assert one.log == ["+a"]
    await third.ask(one.pool, "a", keep=0.0)
    assert model.expires is None
    third.end()
    while model.service is not None:
        await asyncio.sleep(0.001)
    await waits()
    assert one.log == ["+a", "-a"]
    assert await Asker().ask(one.pool, "a") == "a"


async def test_a_model_whose_time_is_over_stays_if_a_request_comes_first(shelf: Callable[..., Shelf]) -> None:
    one, first, second, other = shelf({"a": 1, "b": 1}, 10), Asker(), Asker(), Asker()
    await first.ask(one.pool, "a", keep=0.0)
    one.gate.clear()
    loads = other.begin(one.pool, "b")
    await waits(loads)
    first.end()
    await waits(loads)  # its time is over, and it waits for the load
    assert await second.ask(one.pool, "a") == "a"
    one.gate.set()
    assert await loads == "b"
    await waits()
    assert one.log == ["+a", "+b"]


class Told(PooledModel):
    """Tells when it is handed to requests that waited for it, before they go on."""

    tell: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "users" and value and self.tell is not None:
            asyncio.get_running_loop().call_soon(self.tell)


async def test_a_model_that_was_handed_to_a_request_which_has_ended_is_free(shelf: Callable[..., Shelf]) -> None:
    one, asker = shelf({"a": 1, "b": 1}, 10), Asker()
    model = one.pool.models[1]
    model.__class__ = Told

    def end() -> None:
        for waiting in asyncio.all_tasks():
            if "ModelPool._loaded" in repr(waiting.get_coro()):
                waiting.cancel()

    one.gate.clear()
    task = asker.begin(one.pool, "b")
    await waits(task)
    model.tell, _ = end, one.gate.set()  # type: ignore[attr-defined]
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    asker.end()
    await waits()
    assert model.users == 0


async def test_a_model_that_cannot_be_had_is_an_error_of_its_requests_alone(shelf: Callable[..., Shelf]) -> None:
    pool = shelf({"a": 1, "bad": 1, "big": 1}, 10, caches=4).pool
    pool.start()
    for name, why in (("bad", "bad cannot be loaded: bad has no weights"), ("big", "more than --memory")):
        if name == "big":
            pool.memory = 4 * MB
        with pytest.raises(Refused, match=why) as refused:
            await Asker().ask(pool, name)
        assert (refused.value.status, refused.value.code) == (503, "model_not_loaded")
    await pool.close()
    with pytest.raises(Refused, match="stopping"):
        await Asker().ask(pool, "bad")


def test_names() -> None:
    pool = Shelf({"dir/a": 1, "b": 1}, 10).pool
    assert [pool.find(name).name for name in ("dir/a", "b")] == ["dir/a", "b"]
    with pytest.raises(Refused, match="there is no model 'c' here; this server has 'dir/a', 'b'") as unknown:
        pool.find("c")
    assert unknown.value.status == 404
    with pytest.raises(Refused, match="say which model is to answer: dir/a, b"):
        pool.find(None)
    assert Shelf({"a": 1}, 10).pool.find(None).name == "a"
    words = r"a has 20.0 MiB of weights, which is more than --memory 10.0 MiB; give --memory 26"
    with pytest.raises(ValueError, match=words):
        Shelf({"a": 20}, 10)
