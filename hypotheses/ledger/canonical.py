"""Canonical text and ids.

Two values are the same content when their canonical JSON is the same text: keys sorted, no spaces, ASCII, floats by
`repr` (the shortest text that reads back as the same number). NaN and infinity have no place in it and are refused with
the path at which they were found. An id is a tag and the start of the sha256 of the record's natural key, so it does
not depend on order, time or host.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from hypotheses.ledger.errors import LedgerValueError

ID_DIGITS = 10


def canonical_json(value: Any, *, name: str = "value") -> str:
    """Return the canonical JSON text of `value`.

    Args:
        value: None, bool, int, float, str, or lists, tuples and mappings (with string keys) of these.
        name: what to call it in an error.

    Raises:
        LedgerValueError: NaN, infinity, a key that is no string, or a type that JSON does not have.
    """
    _check(value, name)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=dict)


def _check(value: Any, path: str) -> None:
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise LedgerValueError(
                f"{path} is {value!r}; the ledger stores finite numbers only, record None and a reason instead"
            )
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise LedgerValueError(f"{path} has the key {key!r}; JSON keys are strings")
            _check(item, f"{path}.{key}")
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
        return
    raise LedgerValueError(f"{path} is a {type(value).__name__}; the ledger stores JSON values only")


def text_hash(text: str) -> str:
    """Return the sha256 of the UTF-8 text, in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def make_id(tag: str, *key: Any) -> str:
    """Return ``<tag>-<hex>`` for a natural key."""
    return f"{tag}-{text_hash(canonical_json([tag, *key], name=f'key of {tag}'))[:ID_DIGITS]}"
