"""The event stream, however the network cuts it, and what is no event stream."""

from __future__ import annotations

import json

import pytest

from outrider_lab.bench.events import StreamError, events

EVENTS = [{"text": "a"}, {"text": "ü 世界\n"}, {"choices": []}]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_how_the_stream_is_cut_changes_nothing(size: int, end: bytes) -> None:
    lines = [b"data: " + json.dumps(e, ensure_ascii=False).encode() for e in EVENTS]
    body = end.join([b": a comment", *lines, b"data: [DONE]", b'data: {"after": "the end"}', b""])
    assert list(events(body[i : i + size] for i in range(0, len(body), size))) == EVENTS
    assert list(events([body.split(b"data: [DONE]")[0].rstrip()])) == EVENTS  # no end mark, no last line break


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<html>busy</html>", "not an event stream: <html>busy"),
        (b'{"error": 1}', "not an event stream"),
        (b"data: {no\n", "not JSON: {no"),
        (b"data: [1]\n", "not an object"),
        (b"x" * (1 << 25), "not an event stream: xxx"),
    ],
)
def test_what_is_no_event_stream_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(StreamError, match=message.replace("[", r"\[")):
        list(events([body]))
