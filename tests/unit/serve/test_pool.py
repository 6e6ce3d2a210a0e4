"""Which models are loaded: those that requests ask for, within the memory, and none leaves that answers a request."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from patience import PATIENCE

from outrider.serve.assembly import Assembly
from outrider.serve.errors import Refused
from outrider.serve.metrics import Metrics
from outrider.serve.options import ServeOptions
from outrider.serve.pool import ModelPool, PooledModel

MB = 1 << 20


class Shelf:
    """A pool of models that are made of nothing. log: loads and ends, in their order. gate: loads wait for it."""

    def __init__(self, weights: dict[str, int], memory: float, caches: int = 0, **options: Any) -> None:
        self.log, self.gate = list[str](), threading.Event()
        self.gate.set()
        models = [PooledModel(ServeOptions(model=name, **options), size * MB) for name, size in weights.items()]

        def load(settings: ServeOptions, room: float) -> Assembly:
            self.gate.wait(PATIENCE)
            if settings.model == "bad":
                raise ValueError("bad has no weights")
            self.log.append(f"+{settings.model}")
            ended = lambda: self.log.append(f"-{settings.model}")  # noqa: E731
            loaded = SimpleNamespace(source=None)
            service: Any = SimpleNamespace(
                engine=None, close=ended, settings=settings, runtime=SimpleNamespace(loaded=loaded)
            )
            return Assembly(service, [], True, caches * MB)

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

    def end(self) -> None:
        self.state.ends.close()


async def waits(*tasks: asyncio.Task[Any]) -> None:
    """Nothing that can go on is left, and these wait."""
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert not [task for task in tasks if task.done()]


def begun(asker: Asker, pool: ModelPool, name: str, **more: Any) -> asyncio.Task[str]:
    return asyncio.ensure_future(asker.ask(pool, name, **more))


def test_the_least_recently_used_model_leaves() -> None:
    shelf = Shelf({"a": 3, "b": 3, "c": 3}, 10)  # two fit, with a share for their caches
    pool = shelf.pool

    async def run() -> None:
        pool.start()
        for name in ("a", "b", "a", "c", "a", "b"):
            asker = Asker()
            assert await asker.ask(pool, name) == name
            asker.end()
        assert [pool.state(one) for one in pool.models] == ["loaded", "loaded", "unloaded"]
        await pool.close()

    asyncio.run(run())
    assert shelf.log[:6] == ["+a", "+b", "-b", "+c", "-c", "+b"]
    assert pool.share == 2 * MB


@pytest.mark.parametrize(
    ("weights", "memory", "share"), [([1, 1, 10], 12, 2), ([5, 5, 5], 12, 7), ([1, 1], 12, 5), ([9], 10, 1)]
)
def test_as_many_models_as_possible_have_room_together(weights: list[int], memory: int, share: int) -> None:
    assert Shelf({str(n): size for n, size in enumerate(weights)}, memory).pool.share == share * MB


def test_a_model_stays_while_it_answers_and_takes_no_further_request() -> None:
    """Nor do its requests keep the other one waiting for ever: those that come later wait for their turn."""
    shelf = Shelf({"a": 3, "b": 3}, 4)
    pool = shelf.pool

    async def run() -> None:
        first, second, third = Asker(), Asker(), Asker()
        assert await first.ask(pool, "a") == "a"
        wanted = begun(second, pool, "b")
        await waits(wanted)
        late = begun(third, pool, "a")
        await waits(wanted, late)
        assert shelf.log == ["+a"]
        first.end()
        assert await wanted == "b"
        await waits(late)
        second.end()
        assert await late == "a"
        third.end()
        assert shelf.log == ["+a", "-a", "+b", "-b", "+a"]
        await pool.close()

    asyncio.run(run())


def test_a_model_that_was_to_leave_stays_when_its_room_is_not_wanted_any_more() -> None:
    shelf = Shelf({"a": 3, "b": 3}, 4)
    pool = shelf.pool

    async def run() -> None:
        first, second, third = Asker(), Asker(), Asker()
        await first.ask(pool, "a")
        wanted = begun(second, pool, "b")
        await waits(wanted)
        late = begun(third, pool, "a")
        await waits(late)
        second.gone.set()
        with pytest.raises(Refused, match="client has left"):
            await wanted
        assert await late == "a"
        assert shelf.log == ["+a"]
        first.end()
        third.end()
        assert (pool.models[0].users, pool.waiting) == (0, 0)
        assert pool.models[0].ready
        await pool.close()
        assert shelf.log == ["+a", "-a"]

    asyncio.run(run())


def test_requests_wait_for_one_load_and_others_go_on() -> None:
    shelf = Shelf({"a": 1, "b": 1}, 10, max_queue=2)
    pool = shelf.pool

    async def run() -> None:
        pool.start()
        shelf.gate.clear()
        waiting = [begun(Asker(), pool, "b") for _ in range(2)]
        await waits(*waiting)
        assert await Asker().ask(pool, "a") == "a"
        with pytest.raises(Refused, match="2 requests wait for models already") as full:
            await Asker().ask(pool, "b")
        assert full.value.status == 429
        assert [pool.state(one) for one in pool.models] == ["loaded", "loading"]
        shelf.gate.set()
        assert await asyncio.gather(*waiting) == ["b", "b"]
        assert shelf.log == ["+a", "+b"]
        assert pool.models[1].users == 2
        await pool.close()

    asyncio.run(run())


def test_a_request_waits_no_longer_than_it_may() -> None:
    shelf = Shelf({"a": 1, "b": 1}, 10)
    pool = shelf.pool

    async def run() -> None:
        shelf.gate.clear()
        with pytest.raises(Refused, match=r"b was not loaded in 0\.01 s") as late:
            await Asker().ask(pool, "b", seconds=0.01)
        assert late.value.status == 408
        shelf.gate.set()
        asker = Asker()
        assert await asker.ask(pool, "b") == "b"
        assert asker.state.model == "b"
        assert pool.models[1].users == 1
        await pool.close()

    asyncio.run(run())


def test_a_model_leaves_after_the_time_that_was_asked_for() -> None:
    shelf = Shelf({"a": 1, "b": 1}, 10)
    pool = shelf.pool

    async def run() -> None:
        first, second = Asker(), Asker()
        await first.ask(pool, "a", keep=0.0)
        await second.ask(pool, "a", keep=60.0)  # the last request decides
        first.end()
        assert pool.models[0].expires is None
        second.end()
        assert pool.models[0].expires is not None
        await waits()
        assert shelf.log == ["+a"]
        third = Asker()
        await third.ask(pool, "a", keep=0.0)
        assert pool.models[0].expires is None
        third.end()
        while pool.models[0].assembly is not None:
            await asyncio.sleep(0.001)
        await waits()
        assert shelf.log == ["+a", "-a"]
        assert await Asker().ask(pool, "a") == "a"
        await pool.close()

    asyncio.run(run())


def test_a_model_whose_time_is_over_stays_if_a_request_comes_first() -> None:
    shelf = Shelf({"a": 1, "b": 1}, 10)
    pool = shelf.pool

    async def run() -> None:
        first, second, other = Asker(), Asker(), Asker()
        await first.ask(pool, "a", keep=0.0)
        shelf.gate.clear()
        loads = begun(other, pool, "b")
        await waits(loads)
        first.end()
        await waits(loads)  # its time is over, and it waits for the load
        assert await second.ask(pool, "a") == "a"
        shelf.gate.set()
        assert await loads == "b"
        await waits()
        assert shelf.log == ["+a", "+b"]
        await pool.close()

    asyncio.run(run())


def test_a_model_that_was_handed_to_a_request_which_has_ended_is_free() -> None:
    shelf = Shelf({"a": 1, "b": 1}, 10)
    pool = shelf.pool

    async def run() -> None:
        shelf.gate.clear()
        asker = Asker()
        task = begun(asker, pool, "b")
        await waits(task)
        pool._hand_over(pool.models[1])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        asker.end()
        assert pool.models[1].users == 0
        waiting: Any = asyncio.ensure_future(pool._loaded(pool.models[1], asker))  # type: ignore[arg-type]
        await waits(waiting)
        pool._hand_over(pool.models[1])
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert pool.models[1].users == 0
        shelf.gate.set()
        await pool.close()

    asyncio.run(run())


def test_a_model_that_cannot_be_had_is_an_error_of_its_requests_alone() -> None:
    shelf = Shelf({"a": 1, "bad": 1, "big": 1}, 10, caches=4)
    pool = shelf.pool

    async def run() -> None:
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

    asyncio.run(run())


def test_names() -> None:
    pool = Shelf({"dir/a": 1, "b": 1}, 10).pool
    assert [pool.find(name).name for name in ("dir/a", "b")] == ["dir/a", "b"]
    with pytest.raises(Refused, match="there is no model 'c' here; this server has 'dir/a', 'b'") as unknown:
        pool.find("c")
    assert unknown.value.status == 404
    with pytest.raises(Refused, match="say which model is to answer: dir/a, b"):
        pool.find(None)
    assert Shelf({"a": 1}, 10).pool.find(None).name == "a"
    with pytest.raises(
        ValueError, match=r"a has 20.0 MiB of weights, which is more than --memory 10.0 MiB; give --memory 26"
    ):
        Shelf({"a": 20}, 10)
