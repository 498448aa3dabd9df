"""What a probe looks at and what it answers, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ProbeEvidence:
    """What is known of one run of one program.

    events, layers: as `evaluators.results.Evidence` describes them; no layers means that no artifact came out of the
        run.
    mechanisms: what the program declares in ``MECHANISMS``.
    source_names: names of the functions defined in its source.
    fingerprints: AST hash of each function after renaming of identifiers, by name.
    shapes: the same with every number left out, by name.
    events_left_out: how many events at the end of the run were too many to be kept.
    line_hits: traced lines by function, from the program's own process.
    """

    events: tuple[Mapping[str, Any], ...] = ()
    layers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mechanisms: tuple[str, ...] = ()
    source_names: frozenset[str] = frozenset()
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)
    events_left_out: int = 0
    line_hits: Mapping[str, int] = field(default_factory=dict)


class ProbeStatus(StrEnum):
    """Whether the change took place, as far as trusted code can tell."""

    EXECUTED = "executed"
    NOT_EXECUTED = "not_executed"
    UNDETERMINED = "undetermined"


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Answer of one probe; an advisory one is shown and never decides."""

    status: ProbeStatus
    detail: str
    advisory: bool = False

    @property
    def is_decisive(self) -> bool:
        """Whether it proves execution."""
        return self.status is ProbeStatus.EXECUTED and not self.advisory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
