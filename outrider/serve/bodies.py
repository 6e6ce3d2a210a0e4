"""What is checked of a JSON body before it is read. Reading and validation are single calls that stop every thread.

So they cannot move to a worker. Their time grows with the number of values, and that number is bounded before they start.
"""

from __future__ import annotations

import re
from math import isfinite

import numpy as np

# The text of a prompt is one value, and each id of a token is one. A list, an object and a name cost more.
MAX_VALUES, MAX_PARTS = 250_000, 40_000

_HIGH, _LOW = rb"\\u[dD][89abAB]..", rb"\\u[dD][c-fC-F].."
_HALF = re.compile(_HIGH + rb"(?!" + _LOW + rb")|(?<!" + _HIGH + rb")" + _LOW)  # of a surrogate pair

# Numbers that Python reads and JSON has not, or that no float holds. Each begins where its digits begin, so the search is linear.
_ENDLESS = re.compile(rb"NaN|Infinity|(?<![\d.])\d+(?:\.\d+)?[eE]\+?\d{3,}|(?<!\d)\d{309,}\.")
_STRING = re.compile(rb'"[^"]*"')
# Without one of these, once its digits are zeros, a body has no such number. That takes a hundredth of the time.
_ZEROS, _SUSPECTS = (
    bytes.maketrans(b"123456789E", b"000000000e"),
    (b"NaN", b"Infinity", b"0e000", b"0e+000", b"0" * 309),
)


def check_body(body: bytes) -> None:
    """Raise ValueError for JSON with more than MAX_VALUES values, or with more than MAX_PARTS lists, objects and names.

    Also for half of a surrogate pair, for a number that is not finite, and for another encoding than UTF-8. Parses nothing."""
    if b"\0" in body:  # Python also reads UTF-16 and UTF-32, and halves of pairs in them
        raise ValueError("the body is not UTF-8, so it is not JSON")
    for pair in (b"\\\\", b'\\"') if b"\\" in body else ():  # what is left of quotes then begins or ends a string
        body = body.replace(pair, b"  ")
    if b"\\u" in body and _HALF.search(body):
        raise ValueError("the request has half of a surrogate pair, which is not a character")
    zeros = body.translate(_ZEROS)
    if any(suspect in zeros for suspect in _SUSPECTS):
        for number in _ENDLESS.findall(_STRING.sub(b"", body)):
            if not isfinite(float(number)):
                raise ValueError(f"the request has the number {number[:20].decode()}, and a number in JSON is finite")
    if body.count(b",") <= MAX_VALUES and sum(map(body.count, (b"[", b"{", b":"))) <= MAX_PARTS:
        return
    codes = np.frombuffer(body, np.uint8)
    outside = np.cumsum(codes == ord('"'), dtype=np.uint8) % 2 == 0
    counts = np.bincount(codes[outside], minlength=256)
    if counts[ord(",")] > MAX_VALUES:
        raise ValueError(f"the body has more than {MAX_VALUES} values; send fewer, or text in place of token ids")
    if sum(counts[code] for code in b"[{:") > MAX_PARTS:
        raise ValueError(f"the body has more than {MAX_PARTS} lists, objects and names; send fewer")
