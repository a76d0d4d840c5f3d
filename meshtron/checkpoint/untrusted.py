"""Reading from a folder that anybody may have written: files only, no links, and JSON that is what it should be."""

import json
import math
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MOST_LEVELS = 100
"""Levels of lists and objects inside one another that ``meta`` and ``rank_state`` may have."""
_MOST = 1 << 62  # 64-bit numbers with a sign, and room for the sum of two


def open_file(path: Path) -> FileIO:
    """Open a file for reading, unbuffered.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe, a device or a folder; ``filename`` is set.
    """
    # Without O_NONBLOCK a pipe would keep us waiting for somebody who writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a file", str(path))
    return FileIO(descriptor, "rb")


def read_json(text: str | bytes) -> Any:
    """What JSON text says.

    Raises:
        ValueError: it is no JSON, nests without end, or holds a number that is none or is too large.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("lists or objects nest too deep") from None


def check_levels(value: Any) -> None:
    """Raise ValueError where ``value``, which JSON can hold, nests deeper than ``MOST_LEVELS``."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise ValueError(f"lists or objects nest deeper than {MOST_LEVELS} levels")


def count(value: Any) -> int:
    """``value``, if it is a whole number that a size, an offset or a step can be; else ValueError."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"expected a whole number from 0 to 2^62 - 1, found {_short(value)}")
    return value


def counts(value: Any) -> tuple[int, ...]:
    """``value``, if it is a list of such numbers; else ValueError."""
    return tuple(count(number) for number in instance(value, list))


def instance(value: Any, kind: type[T]) -> T:
    """``value``, if it is a ``kind``; else ValueError."""
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, found {_short(value)}")
    return value


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> float:
    raise ValueError(f"{_short(text)} is no number")


def _short(value: Any) -> str:
    text = type(value).__name__ if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
