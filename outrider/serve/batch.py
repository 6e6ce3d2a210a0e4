"""A batch: its input, what answers its lines with all slots in use, and the journal of the answers.

Each answer is on the disk before the next one counts. The input is a JSON object a line,
`{"custom_id", "method", "url", "body"}`. See
https://platform.openai.com/docs/api-reference/batch/request-input.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from outrider.core.files import written_whole
from outrider.core.jsonl import JsonLines
from outrider.engine import Engine
from outrider.serve.errors import Refused, called, dumps, no_model, refusing
from outrider.serve.logs import log
from outrider.serve.options import BatchOptions, ServeOptions
from outrider.serve.pool import load_llm
from outrider.serve.protocols.openai import CompletionWriter
from outrider.serve.protocols.responses import ResponsesRequest, ResponsesWriter
from outrider.serve.requests import MAX_CHOICES, ChatRequest, CompletionRequest, check_body
from outrider.serve.service import Service

BODIES = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}
_EXAMPLE = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}'


@dataclass(frozen=True)
class BatchRequest:
    """One valid line. key: a digest of the line."""

    key: str
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class BatchLine:
    """Where a line is, and what is wrong with it."""

    number: int  # from 1
    start: int  # where it begins, in bytes
    size: int  # in bytes
    key: str  # a digest of its bytes
    custom_id: str | None  # what its author calls it
    code: str | None = None  # of what is wrong
    problem: str | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The answer to a line that is not valid."""
        return {
            "id": f"batch_req_{self.key}",
            "custom_id": self.custom_id,
            "response": None,
            "error": {"code": self.code, "message": f"line {self.number}: {self.problem}"},
        }


def scan(path: Path) -> list[BatchLine]:
    """All lines of a file that are not blank. A broken line says what is wrong. Raises OSError."""
    lines, seen, start = list[BatchLine](), dict[str, int](), 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            place, start = (start, len(raw)), start + len(raw)
            if not raw.strip():
                continue
            key, name, code, problem = hashlib.sha256(raw.strip()).hexdigest()[:24], None, None, None
            try:
                value = _object(raw)
                name = value.get("custom_id") if isinstance(value.get("custom_id"), str) else None
                request = _request(value, key)
                if (first := seen.setdefault(request.custom_id, number)) != number:
                    raise Refused(
                        f"custom_id {name!r} is that of line {first}; make it unique", code="duplicate_custom_id"
                    )
            except Refused as broken:
                code, problem = broken.code, broken.message
            lines.append(BatchLine(number, *place, key, name, code, problem))
    return lines


def read(path: Path, lines: Iterable[BatchLine]) -> Iterator[BatchRequest]:
    """The requests of valid lines. Raises ValueError if the file changed after it was scanned."""
    with path.open("rb") as file:
        for line in lines:
            file.seek(line.start)
            raw = file.read(line.size)
            if hashlib.sha256(raw.strip()).hexdigest()[:24] != line.key:
                raise ValueError(f"{path} changed while it was read; start again, and answers are kept")
            yield _request(_object(raw), line.key)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise Refused(f"this is not UTF-8 ({error.reason} at byte {error.start})", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        raise Refused(f"this is not JSON ({error}); a line is {_EXAMPLE}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise Refused(f"a line is one JSON object, such as {_EXAMPLE}", code="invalid_line")
    return value


def _request(value: dict[str, Any], key: str) -> BatchRequest:
    name, url, body, method = value.get("custom_id"), value.get("url"), value.get("body"), value.get("method", "POST")
    if not isinstance(name, str) or not name:
        raise Refused("custom_id is a text that no other line has; answers are found by it", code="missing_custom_id")
    if name.encode("utf-8", "replace").decode() != name:
        raise Refused("custom_id has half of a surrogate pair, which is not a character", code="invalid_custom_id")
    if method != "POST":
        raise Refused(f'method is "POST", got {json.dumps(method)[:40]}', code="invalid_method")
    if url not in BODIES:
        raise Refused(f"url is one of {', '.join(BODIES)}, got {json.dumps(url)[:80]}", code="invalid_url")
    if not isinstance(body, dict):
        raise Refused(f"body is the JSON object that would be sent to {url}", code="invalid_body")
    return BatchRequest(key, name, url, body)


class BatchAnswerer:
    """A model that answers lines. Use it in a `with` block. Raises what `LLM` raises."""

    def __init__(self, options: BatchOptions) -> None:
        self.options = options
        llm, _ = load_llm(options)
        # a line may wait for as long as the batch takes
        settings = ServeOptions(**options.model_dump(exclude={"seed"}), request_timeout=math.inf)
        self.window = 2 * options.max_num_seqs  # lines in work: as many wait as there are slots, so no slot waits
        self.service = Service(Engine(llm.runtime, max_queue=self.window * MAX_CHOICES), settings)
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> BatchAnswerer:
        return self

    def __exit__(self, *_: object) -> None:
        self.service.close()
        self._loop.close()

    def answers(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[BatchRequest, dict[str, Any]]]:
        """Each request with its row of the output, in the order of their ends.

        Raises RuntimeError if the engine dies: then the lines in work have no answer.
        """
        source, tasks = iter(requests), dict[asyncio.Task[dict[str, Any]], BatchRequest]()
        try:
            while True:
                while len(tasks) < self.window and (request := next(source, None)) is not None:
                    tasks[self._loop.create_task(self._answer(request))] = request
                if not tasks:
                    return
                done, _ = self._loop.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
                for task in done:
                    request = tasks.pop(task)
                    yield request, task.result()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks))

    async def _answer(self, request: BatchRequest) -> dict[str, Any]:
        engine = self.service.engine
        try:
            status, answer = 200, await self._whole(request)
        except Exception as error:
            if engine.problem is not None or not engine.alive:
                raise RuntimeError(f"{engine.problem or 'the engine has stopped'}; answers so far are kept") from error
            refused = error if isinstance(error, Refused) else Refused("the batch failed on this line", 500)
            if refused is not error:
                log.error("line %s failed", request.custom_id, exc_info=error)
            status, answer = refused.status, refused.body
        response = {"status_code": status, "request_id": request.key, "body": answer}
        row = {"id": f"batch_req_{request.key}", "custom_id": request.custom_id}
        return row | {"response": response, "error": None}

    async def _whole(self, request: BatchRequest) -> dict[str, Any]:
        make, body = CompletionWriter, self._body(request)
        if request.url == "/v1/responses":
            if body.previous_response_id is not None:
                raise Refused(
                    "the lines of a batch do not follow each other; send the whole conversation as input",
                    param="previous_response_id",
                )
            make = partial(ResponsesWriter, name=f"resp_{request.key}", body=body)
            body = body.chat([])
        writer = await self.service.accept(body, make, request.key, "batch")
        return await writer.whole()

    def _body(self, request: BatchRequest) -> Any:
        with called():
            with refusing():
                check_body(json.dumps(request.body).encode())
            body: Any = BODIES[request.url].model_validate(request.body)
        if body.model is not None and body.model not in self.service.settings.names:
            raise no_model(body.model, [self.service.settings.model_name])
        if body.stream:
            raise Refused("a batch has whole answers; leave out stream", param="stream")
        if body.seed is None:
            body = body.model_copy(update={"seed": line_seed(self.options.seed, request.custom_id)})
        return body


def line_seed(seed: int, custom_id: str) -> int:
    """The seed of a line that has none. It does not depend on the other lines. JSON keeps it exactly."""
    named = hashlib.sha256(f"{seed} {custom_id}".encode("utf-8", "replace")).digest()
    return int.from_bytes(named[:8], "big") % 2**53


_FORMAT = 1


class Journal:
    """`OUTPUT.partial`: one line on how the answers are made, then one for each answer, in the order of their ends.

    `finish` writes OUTPUT in the order of the input and removes the journal. So OUTPUT is there only when it is complete.
    A process that is killed loses no answer of the journal. A line that was cut is dropped.
    """

    def __init__(self, output: Path, made_with: dict[str, Any]) -> None:
        """made_with: what changes the texts. Raises ValueError for a journal of other settings, and for an output that is
        there already; OSError for a journal that another process writes or that cannot be written."""
        self.output, self.path = output, output.with_name(output.name + ".partial")
        if not output.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {output.absolute().parent} to write {output.name} to")
        if output.exists() and not self.path.exists():
            raise ValueError(f"{output} is there already; delete it, or name another file with -o")
        self._places = dict[str, tuple[int, int]]()  # where the row of a key starts, and its bytes
        try:
            self._file = JsonLines(self.path, alone=True)
        except BlockingIOError:
            raise BlockingIOError(f"another process writes {self.path}; wait for it, or name another output") from None
        self._synced = monotonic()
        try:
            self._recover(made_with)
        except BaseException:
            self._file.close()
            raise

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, key: str, row: dict[str, Any]) -> None:
        """Keep an answer. Raises ValueError if the line has one."""
        if key in self._places:
            raise ValueError(f"line {key} has an answer already")
        line = dumps({"key": key, "row": row})
        with _naming(self.path):
            self._places[key] = self._file.add(line), len(line)
            if monotonic() - self._synced > 1:  # a lost machine keeps all but the last second
                self._file.sync()
                self._synced = monotonic()

    def row(self, key: str) -> dict[str, Any]:
        """The answer of a line. Raises KeyError if it has none."""
        return json.loads(self._file.read(*self._places[key]))["row"]

    def finish(self, lines: Sequence[BatchLine]) -> None:
        """Write the output and remove the journal. Raises KeyError if a valid line has no answer."""
        with _naming(self.output), written_whole(self.output) as path, path.open("wb") as file:
            for line in lines:
                file.write(dumps(self.row(line.key) if line.code is None else line.row) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.path.unlink()
        self.close()

    def close(self) -> None:
        """Let another process continue."""
        with suppress(OSError):  # of what is still to write; `add` has said so
            self._file.close()

    def _recover(self, made_with: dict[str, Any]) -> None:
        """Read the answers of an earlier process, and cut what it did not finish."""
        header = {"outrider_batch": _FORMAT, "made_with": made_with}
        first, end = json.dumps(header).encode(), 0
        for number, line in enumerate(self._file.lines()):
            if number == 0 and not (line.value is None and first.startswith(line.raw)):
                self._check(line.value, header)
            if not line.whole:
                break
            if number:
                key, row = (line.value.get(n) if isinstance(line.value, dict) else None for n in ("key", "row"))
                if not (isinstance(key, str) and isinstance(row, dict)):
                    raise ValueError(
                        f"{self.path}, line {number + 1}: this is no answer of a batch. Delete the line, and its request is "
                        "answered again; or delete the file to start anew"
                    )
                self._places[key] = line.start, len(line.raw)
            end = line.end
        with _naming(self.path):
            self._file.cut(end)
            if end == 0:
                self._file.add(first)

    def _check(self, found: Any, wanted: dict[str, Any]) -> None:
        if found == wanted:
            return
        old = found.get("made_with") if isinstance(found, dict) else None
        if not isinstance(old, dict) or found.get("outrider_batch") != _FORMAT:
            raise ValueError(f"{self.path} is not the beginning of a batch of this version; delete it to start again")
        names = sorted(n for n in {*old, *wanted["made_with"]} if old.get(n) != wanted["made_with"].get(n))
        was = ", ".join(f"{name}={old.get(name)!r}" for name in names)
        raise ValueError(
            f"{self.path} was begun with {was}; start with that again to continue, or delete the file to start anew"
        )


@contextmanager
def _naming(path: Path) -> Generator[None, None, None]:
    """Give an error of the disk the file's name, and what to do."""
    try:
        yield
    except OSError as error:
        how = f"{error.strerror}; nothing that was answered is lost: make room, and run the same command again"
        raise OSError(error.errno, how, str(path)) from error
