"""Required edits: what later programs must do, or must not claim, because of a verdict.

What a verdict refutes is a claim, the pair (mechanism, cause), not code: inherited code stays legal. An edit is worded by
the proposer; code checks that it follows from its verdict and has a probe that can show that it executes. It is open until
a paid run discharges it, until three paid attempts were in vain, until it turns out to cost quality, or until a newer
verdict supersedes it: so it can always be closed, and it never holds a lineage for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from hypotheses.errors import HypothesesError
from hypotheses.predictions import MechanismName, Slug
from hypotheses.probe_kinds import EVERYWHERE, Place, Probe

EditKind = Literal["remove", "replace", "extend", "refine", "retest"]
MAX_PAID_ATTEMPTS = 3


class EditStateError(HypothesesError):
    """A transition that the state of a required edit does not allow."""


class RequiredEdit(BaseModel):
    """One demand on later programs.

    kind: remove (take the mechanism out), replace (put something in its stead), extend (carry a supported mechanism to more
        places), refine (improve it where it is), retest (bring a sharper control for the claim).
    cause: of the claim that the verdict was about.
    blocking: programs of the lineage must address it; at most one per lineage.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: EditKind
    mechanism: MechanismName
    cause: Slug
    place: Place = EVERYWHERE
    wording: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]
    probe: Probe
    blocking: bool = True


class EditState(StrEnum):
    """Where a required edit stands. Only `OPEN` can change."""

    OPEN = "open"
    DISCHARGED = "discharged"
    EXPIRED = "expired"
    COSTLY = "costly"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, kw_only=True)
class EditRecord:
    """A required edit with its history.

    key: identity in the ledger. lineage: name of the line of programs that it binds.
    order: position of its verdict among all verdicts; the larger is the newer.
    note: why it stands where it stands.
    """

    key: str
    edit: RequiredEdit
    lineage: str
    order: int
    state: EditState = EditState.OPEN
    paid_attempts: int = 0
    note: str = ""

    @property
    def is_open(self) -> bool:
        return self.state is EditState.OPEN

    @property
    def blocks(self) -> bool:
        """Whether programs of its lineage must address it now."""
        return self.is_open and self.edit.blocking


@dataclass(frozen=True, kw_only=True)
class BarredClaim:
    """A refuted claim: the mechanism by name and, where known, by fingerprint and by what it installs on a smoke run."""

    mechanism: str
    cause: str
    fingerprint: str | None = None
    artifact: str | None = None
