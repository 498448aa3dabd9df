"""Claims that stand refuted, and how a claim is recognised under another name.

A refuted claim is a pair (mechanism, cause). It binds every later proposal, also on another branch and after the edit
that followed from it has expired, until a newer verdict supports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hypotheses.verdict_records import VerdictStatus


@dataclass(frozen=True, kw_only=True)
class JudgedClaim:
    """A claim with the verdict on it, and the mechanism as it was when it was judged.

    fingerprint: AST hash of the mechanism after renaming of identifiers.
    program: id of the program that had it.
    """

    mechanism: str
    cause: str
    status: VerdictStatus
    fingerprint: str | None = None
    program: str | None = None


@dataclass(frozen=True, kw_only=True)
class BarredClaim:
    """A refuted claim: the mechanism by name, and where known by fingerprint and by a program that has it."""

    mechanism: str
    cause: str
    fingerprint: str | None = None
    program: str | None = None


def barred_claims(judged: Iterable[JudgedClaim]) -> frozenset[BarredClaim]:
    """Return the claims that stand refuted; a later verdict that supports a claim lifts its bar, whatever its name.

    Args:
        judged: every verdict of the whole campaign, oldest first.
    """
    barred: dict[tuple[str, str], BarredClaim] = {}
    for claim in judged:
        cause = same_cause(claim.cause)
        if claim.status is VerdictStatus.SUPPORTED:
            barred = {
                key: other
                for key, other in barred.items()
                if key != (claim.mechanism, cause)
                and not (key[1] == cause and claim.fingerprint is not None and other.fingerprint == claim.fingerprint)
            }
        elif claim.status is VerdictStatus.REFUTED:
            barred[claim.mechanism, cause] = BarredClaim(
                mechanism=claim.mechanism, cause=claim.cause, fingerprint=claim.fingerprint, program=claim.program
            )
    return frozenset(barred.values())


def claim_is_barred(
    mechanism: str,
    fingerprint: str | None,
    cause: str,
    barred: Iterable[BarredClaim],
    *,
    installs_the_same: Callable[[BarredClaim], bool] | None = None,
) -> BarredClaim | None:
    """Return the refuted claim that this one repeats, or None.

    The cause must be the same; the mechanism is the same by name, by fingerprint (the same code under another name), or
    by what it installs on the smoke run.

    Args:
        mechanism: that the claim is about.
        fingerprint: of the mechanism as it is now.
        cause: that is claimed for it.
        barred: what stands refuted.
        installs_the_same: whether the refuted mechanism in this one's place installs the same; asked last, because a
            run answers it.
    """
    alike = sorted(
        (claim for claim in barred if same_cause(claim.cause) == same_cause(cause)), key=lambda claim: claim.mechanism
    )
    for claim in alike:
        if claim.mechanism == mechanism or (fingerprint is not None and claim.fingerprint == fingerprint):
            return claim
    return next((claim for claim in alike if installs_the_same is not None and installs_the_same(claim)), None)


def same_cause(cause: str) -> str:
    """Return a cause in the form in which two are compared: case, dashes and underscores make no difference."""
    return cause.lower().replace("-", "_")
