"""Files with a record in each line, as a user writes them."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from outrider_certify.subject import Unsupported

Value = TypeVar("Value")
_GZIP = b"\x1f\x8b"


def read_lines(path: Path, parse: Callable[[str], Value], example: str, most: int | None = None) -> list[Value]:
    """What `parse` makes of each line that is not empty, at most `most` of them. The file is UTF-8, compressed by gzip or not.

    Raises ValueError with file, line, reason and a line that is right.
    """
    data, values = path.read_bytes(), list[Value]()
    try:
        lines = (gzip.decompress(data) if data[:2] == _GZIP else data).decode("utf-8-sig").splitlines()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text ({error}); a correct line is {example}") from None
    for number, line in enumerate(lines, 1):
        if line.strip() and (most is None or len(values) < most):
            try:
                values.append(parse(line))
            except (ValueError, TypeError, LookupError, AttributeError, Unsupported) as error:
                why = _first(error) if isinstance(error, ValidationError) else error
                raise ValueError(f"{path}, line {number}: {why}; a correct line is {example}") from None
    if not values:
        raise ValueError(f"{path} is empty; a correct line is {example}")
    return values


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
