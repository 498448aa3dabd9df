"""How many lines of each of its functions a program ran, counted in the program's own process: advisory, it can be forged.

It tells the author of a change that does nothing whether the code was never reached or its result never used. Nothing is decided
by it. Only the truncated subject is run with it, since counting slows the program down.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

MAX_LINES = 1000
"""Counted per function; after that its frames run at full speed."""
MAX_FUNCTIONS = 256
MAX_NAME = 100


class LineCounter:
    """Counts the lines that run in functions of one file. A context manager; the count goes on in threads begun inside it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._hits: dict[str, int] = {}

    def __enter__(self) -> LineCounter:
        threading.settrace(self._enter)
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    @property
    def hits(self) -> dict[str, int]:
        """Lines by the function of the file's top level in which they ran, at most `MAX_LINES` of each."""
        return dict(list(self._hits.items())[:MAX_FUNCTIONS])

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename != self._path:
            return None
        name = frame.f_code.co_qualname.partition(".")[0]
        if not name.isidentifier() or len(name) > MAX_NAME or self._hits.get(name, 0) >= MAX_LINES:
            return None

        def count(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
            if event == "line":
                self._hits[name] = hits = self._hits.get(name, 0) + 1
                if hits >= MAX_LINES:
                    frame.f_trace_lines = False
                    return None
            return count

        return count


def check_line_hits(value: object) -> dict[str, int] | None:
    """Return the counts in a message of a worker, or None if they are none: a program may have written it."""
    if not isinstance(value, dict) or len(value) > MAX_FUNCTIONS:
        return None
    for name, hits in value.items():
        if not isinstance(name, str) or not name.isidentifier() or len(name) > MAX_NAME:
            return None
        if type(hits) is not int or not 0 < hits <= MAX_LINES:
            return None
    return value
