"""The models of a server: loaded when a request asks for them, and let go when others need their memory."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter, time

from fastapi import Request

from outrider.core.files import byte_count
from outrider.engine import Engine
from outrider.engine.llm import LLM
from outrider.engine.memory import gib, spare
from outrider.engine.trace import Recorder
from outrider.models.chat_template import set_chat_template
from outrider.models.load import device_of, stored_bytes
from outrider.serve.connection import unless_gone
from outrider.serve.dashboard.viewers import Dashboard
from outrider.serve.errors import Refused, no_model
from outrider.serve.logs import log
from outrider.serve.metrics import Metrics
from outrider.serve.options import ModelOptions, ServeOptions
from outrider.serve.service import Service

CACHES = 0.25  # share of the memory that the weights leave to keys and values, where they can
RETRY = 5  # seconds after which a client may ask for a model again
SWITCH = 0.0005  # seconds that a thread keeps Python to itself while the engine's waits for it


@dataclass(eq=False)
class PooledModel:
    """A model of a server."""

    settings: ServeOptions
    weights: int = 0  # bytes of its files
    service: Service | None = None  # None while it is not loaded
    users: int = 0  # requests that it answers
    leaving: bool = False  # it takes no more of them, because another model needs its memory
    keep: float | None = None  # seconds that it stays after the last one; None: until others need its memory
    used: float = 0.0  # when the last one came
    timer: asyncio.TimerHandle | None = None  # lets it go
    dashboard: Dashboard | None = None  # its live page, once that was opened

    @property
    def name(self) -> str:
        """What clients call it."""
        return self.settings.model_name

    @property
    def ready(self) -> bool:
        """It takes requests."""
        return self.service is not None and not self.leaving

    @property
    def expires(self) -> float | None:
        """When it will go, in seconds since 1970; None if no time is set."""
        return None if self.timer is None or self.users else time() + self.timer.when() - monotonic()

    @property
    def bytes(self) -> int:
        """What it may take: weights, keys and values, prefixes. Its weights alone while it is not loaded."""
        return self.weights + (0 if self.service is None else self.service.caches)


class ModelPool:
    """Models by name. A request borrows one with `lend`, and a model goes only while it answers no request.

    memory: bytes that all loaded models may take. load: makes one whose caches may take some bytes; it runs in a thread.
    """

    def __init__(
        self,
        models: Sequence[PooledModel],
        metrics: Metrics,
        load: Callable[[ServeOptions, float], Service],
        memory: float = math.inf,
    ) -> None:
        """Raises ValueError for a model that does not fit."""
        self.models, self.metrics, self.memory, self._load = list(models), metrics, memory, load
        self.settings, self.started, self.closing = models[0].settings, int(time()), False
        self._waiting = dict[asyncio.Future[None], PooledModel]()  # in the order in which they came
        self._tasks = set[asyncio.Task[None]]()
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        for one in models:
            if one.weights > memory:
                raise ValueError(
                    f"{one.name} has {gib(one.weights)} of weights, which is more than --memory {gib(int(memory))}; "
                    f"give --memory {gib(int(one.weights / (1 - CACHES)))}, or leave {one.name} out"
                )
        self.share = _share([one.weights for one in models], memory)

    @staticmethod
    def of(models: Sequence[ServeOptions], recorder: Recorder | None = None, fit: bool = False) -> ModelPool:
        """The pool of a server, from the options of its models. recorder, fit: see `assemble`.

        Raises what `stored_bytes` raises, and ValueError for a model that does not fit.
        """
        first, many = models[0], len(models) > 1
        memory = math.inf
        if first.memory is not None:
            memory = byte_count(first.memory)
        elif many:
            memory = spare(device_of(first.device)) or memory
        metrics = Metrics(first.metrics_prefix, "" if many else first.model_name)
        pooled = [PooledModel(one, weights_of(one) if memory < math.inf else 0) for one in models]
        return ModelPool(pooled, metrics, lambda one, room: assemble(one, room, metrics, recorder, fit), memory)

    def find(self, name: str | None) -> PooledModel:
        """The model of a name; without one, the only model. Raises Refused."""
        if name is None and len(self.models) == 1:
            return self.models[0]
        for one in self.models:
            if name in one.settings.names:
                return one
        names = [one.name for one in self.models]
        if name is None:
            raise Refused(f"say which model is to answer: {', '.join(names)}", param="model")
        raise no_model(name, names)

    @property
    def loaded(self) -> list[Service]:
        """The services of the models that are loaded."""
        return [one.service for one in self.models if one.service is not None]

    @property
    def waiting(self) -> int:
        """Requests that wait for a model."""
        return len(self._waiting)

    def state(self, one: PooledModel) -> str:
        """Loaded, loading or unloaded."""
        return "loaded" if one.ready else "loading" if one in self._waiting.values() else "unloaded"

    def dashboard(self, name: str | None = None) -> Dashboard:
        """The live page of a model that is loaded; without a name, of the one that was used last. Raises Refused without one."""
        loaded = [one for one in ([self.find(name)] if name else self.models) if one.service]
        if not loaded:
            why = "no model is loaded, so there is nothing to see; ask for a text first"
            raise Refused(why, 503, code="not_loaded", retry=RETRY)
        last = max(loaded, key=lambda one: one.used)
        assert last.service is not None
        last.dashboard = last.dashboard or Dashboard(last.service, lambda: [m.name for m in self.models if m.service])
        return last.dashboard

    async def lend(
        self, name: str | None, request: Request, seconds: float | None = None, keep: float | None = None
    ) -> Service:
        """The service of a model, for a request until its end. It is loaded if it is not.

        seconds: that the request may wait. keep: as of `PooledModel`, from this request on. Raises Refused.
        """
        one = self.find(name)
        one.keep = keep
        if not one.ready:
            begun, seconds = perf_counter(), min(seconds or math.inf, self.settings.request_timeout)
            try:
                async with asyncio.timeout(seconds):
                    await unless_gone(request.receive, self._loaded(one, request))
            except TimeoutError:
                raise Refused(
                    f"{one.name} was not loaded in {seconds:g} s; allow more time", 408, code="timeout"
                ) from None
            request.state.waited = perf_counter() - begun
        else:
            one.users, one.used = one.users + 1, perf_counter()
            request.state.ends.callback(self._give_back, one)
        request.state.model = one.name
        assert one.service is not None
        return one.service

    def start(self) -> Service:
        """Load the first model now, before there are requests. Raises what `LLM` and `Engine` raise."""
        return self._make(self.models[0])

    def drain(self, seconds: float) -> None:
        """Take no more requests. What is not finished after `seconds` ends with the text it has."""
        self.closing = True
        for service in self.loaded:
            service.engine.drain(seconds)

    async def close(self) -> None:
        """End all models. Waits for one that is loaded at this moment."""
        self.closing = True
        self._answer(None, Refused("the server is stopping", 503, code="stopped"))
        self._changed.set()
        await asyncio.gather(*self._tasks)
        for service in self.loaded:
            await asyncio.to_thread(service.close)

    def _give_back(self, one: PooledModel) -> None:
        """A request has ended. After the last one the time begins after which the model goes."""
        one.users -= 1
        self._changed.set()
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None
        if one.ready and not one.users and one.keep is not None and not self.closing:
            loop = asyncio.get_running_loop()
            one.timer = loop.call_later(one.keep, lambda: self._begin(self._expired(one)))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expired(self, one: PooledModel) -> None:
        async with self._turn:
            over = one.expires is not None and one.expires < time() + 0.01  # else a request has come meanwhile
            if over and one.ready and not self.closing:
                await self._leave(one)

    async def _loaded(self, one: PooledModel, request: Request) -> None:
        """Wait until a model is loaded, and borrow it for a request, which may end in the same moment. Raises Refused."""
        if self.closing:
            raise Refused("the server is stopping", 503, code="stopped")
        if self.waiting >= max(self.settings.max_queue, 1):
            raise Refused(f"{self.waiting} requests wait for models already", 429, code="queue_full", retry=RETRY)
        ready = asyncio.get_running_loop().create_future()
        self._waiting[ready] = one
        if len(self._waiting) == 1:
            self._begin(self._serve_waiting())
        try:
            await ready
            request.state.ends.callback(self._give_back, one)
        except BaseException:
            if self._waiting.pop(ready, None) is None and not ready.cancelled() and not ready.exception():
                self._give_back(one)  # it was handed over at the moment when its request ended
            self._changed.set()
            raise

    async def _serve_waiting(self) -> None:
        """Load one model after the other, in the order in which requests ask for them."""
        async with self._turn:
            while self._waiting:
                one = next(iter(self._waiting.values()))
                try:
                    if one.service is None and await self._make_room(one):
                        await asyncio.to_thread(self._make, one)
                        await asyncio.to_thread(settle)
                        await self._make_room(one)  # its caches may have become larger than their share
                except Exception as error:
                    log.error("%s cannot be loaded", one.name, exc_info=error)
                    said = str(error).replace(one.settings.model, one.name)
                    refused = Refused(f"{one.name} cannot be loaded: {said}", 503, code="model_not_loaded")
                    self._answer(one, refused)
                if one.ready:
                    self._answer(one)

    def _make(self, one: PooledModel) -> Service:
        """Load a model. Raises what `assemble` raises, and ValueError for one that does not fit."""
        service = self._load(one.settings, self.share)
        source = service.runtime.loaded.source
        if not one.weights and isinstance(source, (str, Path)):
            one.weights = stored_bytes(str(source))
        if one.weights + service.caches > self.memory:
            service.close()
            raise ValueError(
                f"it has {gib(one.weights)} of weights and may take {gib(service.caches)} of keys, values and prefixes, "
                f"which is more than --memory {gib(int(self.memory))}; give a smaller --max-model-len or --max-num-seqs"
            )
        self.metrics.of(one.name).attach(service.engine)
        one.service, one.used = service, perf_counter()
        return service

    async def _make_room(self, one: PooledModel) -> bool:
        """Let others go until a model fits, the least recently used ones first. False if no request waits for it any more."""
        while one in self._waiting.values():
            need = one.bytes + (0 if one.service else self.share)
            others = [other for other in self.models if other is not one and other.service]
            if not others or sum(other.bytes for other in others) + need <= self.memory:
                break
            idle = [other for other in others if not other.users]
            last = min(idle or others, key=lambda other: other.used)
            if idle:
                await self._leave(last)
                continue
            last.leaving = True  # it takes no more requests, so its last one will end
            self._changed.clear()
            await self._changed.wait()
        for other in self.models:
            if other.leaving:
                other.leaving = False
                self._answer(other)
        return one in self._waiting.values()

    async def _leave(self, one: PooledModel) -> None:
        """Free the memory of a model that answers no request."""
        assert one.service is not None
        assert not one.users
        if one.dashboard is not None:
            one.dashboard.close()
            one.dashboard = None
        if one.timer is not None:
            one.timer.cancel()
        end, one.service, one.leaving, one.keep = one.service.close, None, False, None
        self.metrics.of(one.name).detach()
        await asyncio.to_thread(end)
        del end
        await asyncio.to_thread(release)
        log.info("%s has left", one.name)

    def _answer(self, model: PooledModel | None, refused: Refused | None = None) -> None:
        """Let requests that wait for a model, None for any, borrow it, or refuse them."""
        for ready, one in [pair for pair in self._waiting.items() if model in (None, pair[1])]:
            del self._waiting[ready]
            if ready.done():
                continue
            if refused is None:
                one.users, one.used = one.users + 1, perf_counter()
                ready.set_result(None)
            else:
                ready.set_exception(refused)


def load_llm(options: ModelOptions, recorder: Recorder | None = None) -> tuple[LLM, str | None]:
    """Load the model and its drafter. Returns it, and what its user should know of its chat template.

    Raises what `LLM` raises, and ValueError for a chat template that is none.
    """
    llm = LLM(**options.of_llm(), trace=recorder, any_method=True)
    return llm, set_chat_template(llm.tokenizer, llm.loaded.name, options.chat_template)


def assemble(
    options: ServeOptions, room: float, metrics: Metrics, recorder: Recorder | None = None, fit: bool = False
) -> Service:
    """Load the model and start its engine. room: bytes that its caches may take. recorder: where steps are written. fit: let
    texts become no longer than fits in the room and in the free memory. Options for lengths or bytes go before it.

    Raises what `LLM` and `Engine` raise for options that are wrong and models that cannot be had.
    """
    llm, note = load_llm(options, recorder)
    most = min(room, spare(str(llm.loaded.model.device)) or math.inf)
    fit = fit and options.max_model_len is None and options.kv_cache_memory_bytes is None and most < math.inf
    prefix_bytes, longest = int(min(options.prefix_cache << 20, room / 2)), llm.decoder.max_length
    engine = Engine(
        llm.runtime,
        max_queue=options.max_queue,
        kv_tokens=options.kv_tokens,
        prefix_bytes=prefix_bytes,
        prefill_chunk=options.prefill_chunk,
        memory_limit=options.kv_cache_memory_bytes,
        room=int(most) if fit else None,
        observer=metrics.of(options.model_name),
        trace=recorder,
    )
    chats = note is None and bool(getattr(llm.tokenizer, "chat_template", None))
    notes = [*llm.notes, *([note] if note else [])]
    most, free = engine.memory.most, spare(str(llm.loaded.model.device))
    if engine.decoder.max_length < min(longest, engine.kv_limit):
        notes.append(
            f"not {longest} tokens: so much in each sequence would not fit in the memory that is free. For longer texts give a "
            f"smaller --max-num-seqs or --kv-cache-dtype int8; --max-model-len {longest} is believed"
        )
    elif engine.memory.limit is None and 0 < free < most:
        notes.append(f"that does not fit in the {gib(free)} that are free, if all sequences become so long")
    return Service(engine, options, notes, chats, most + prefix_bytes)


def weights_of(settings: ServeOptions) -> int:
    """Bytes of the files of a model and of its draft model. Raises what `stored_bytes` raises."""
    draft = settings.speculative_config.get("model")
    target = stored_bytes(settings.model, settings.quantization)
    return target + (stored_bytes(draft) if isinstance(draft, str) else 0)


def _share(weights: list[int], memory: float) -> float:
    """Bytes for the caches of each model, so that as many models as possible are loaded at once, whichever they are."""
    for count in range(len(weights), 0, -1):
        left = memory - sum(sorted(weights)[-count:])
        if left >= CACHES * memory or count == 1:
            return left / count
    return memory


def prepare() -> None:
    """Make a process ready to serve, when its first model is loaded."""
    sys.setswitchinterval(SWITCH)
    settle()


def settle() -> None:
    """Let the garbage collector leave out what is there now: to look through a model again stops every thread for a fifth of a
    second."""
    gc.collect()
    gc.freeze()


def release() -> None:
    """Free what a model leaves. What is there afterwards stays."""
    gc.unfreeze()
    settle()
