"""What comes out of a run of a program, made fit for storage: a program must not be able to stop the campaign by it.

Losses and effects are never touched here; those must be finite, or the write is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hypotheses.ledger.blob_files import MAX_TEXT_BYTES
from hypotheses.ledger.canonical import canonical_json
from hypotheses.ledger.records import Json


def clean_text(text: str) -> str:
    """Return `text` without what SQLite cannot keep: lone surrogates become ``?``, NUL becomes U+FFFD."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "\ufffd")


def fit_evidence(evidence: Mapping[str, Any]) -> Json:
    """Return evidence that can be stored.

    A number that is not finite becomes null, of which no property holds. What is above the cap on texts keeps its first
    events and says in ``events_left_out`` how many had to go.
    """
    finite: Json = _finite(evidence)
    if len(canonical_json(finite, name="evidence")) <= MAX_TEXT_BYTES:
        return finite
    events = list(finite.get("events", ()))
    rest = {name: value for name, value in finite.items() if name != "events"}
    room = MAX_TEXT_BYTES - len(canonical_json(rest | {"events": [], "events_left_out": len(events)}))
    num_kept = 0
    for item in events:
        room -= len(canonical_json(item)) + 1
        if room < 0:
            break
        num_kept += 1
    return rest | {"events": events[:num_kept], "events_left_out": len(events) - num_kept}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
