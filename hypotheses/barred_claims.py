"""Claims that stand refuted, and how a claim is recognised under another name.

A refuted claim is a pair (mechanism, cause). It binds every later proposal, also on another branch and after the edit
that followed from it has expired, until a newer verdict supports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hypotheses.verdict_records import Verdict, VerdictStatus


@dataclass(frozen=True, kw_only=True)
class BarredClaim:
    """A refuted claim: the mechanism by name, and where known by fingerprint and by what it installs.

    fingerprint: AST hash of the mechanism after renaming of identifiers.
    artifact: hash of what its program installed on the smoke run.
    """

    mechanism: str
    cause: str
    fingerprint: str | None = None
    artifact: str | None = None


def barred_claims(
    verdicts: Iterable[Verdict],
    *,
    fingerprints: Mapping[str, str] | None = None,
    artifacts: Mapping[str, str] | None = None,
) -> frozenset[BarredClaim]:
    """Return the claims that stand refuted; a later verdict that supports a claim lifts its bar.

    Args:
        verdicts: of the whole campaign, oldest first.
        fingerprints: AST hash of each mechanism after renaming of identifiers, by name, as it was when refuted.
        artifacts: hash of what each mechanism's program installed on the smoke run, by mechanism.
    """
    barred: dict[tuple[str, str], BarredClaim] = {}
    for verdict in verdicts:
        key = (verdict.mechanism, same_cause(verdict.cause))
        if verdict.status is VerdictStatus.SUPPORTED:
            barred.pop(key, None)
        elif verdict.status is VerdictStatus.REFUTED:
            barred[key] = BarredClaim(
                mechanism=verdict.mechanism,
                cause=verdict.cause,
                fingerprint=(fingerprints or {}).get(verdict.mechanism),
                artifact=(artifacts or {}).get(verdict.mechanism),
            )
    return frozenset(barred.values())


def claim_is_barred(
    mechanism: str,
    fingerprint: str | None,
    cause: str,
    barred: Iterable[BarredClaim],
    *,
    artifact: str | None = None,
) -> BarredClaim | None:
    """Return the refuted claim that this one repeats, or None.

    The cause must be the same; the mechanism is the same by name, by fingerprint (the same code under another name), or
    by what it installs on the smoke run.
    """
    for claim in sorted(barred, key=lambda claim: (claim.mechanism, claim.cause)):
        if same_cause(claim.cause) != same_cause(cause):
            continue
        same_code = fingerprint is not None and claim.fingerprint == fingerprint
        same_artifact = artifact is not None and claim.artifact == artifact
        if claim.mechanism == mechanism or same_code or same_artifact:
            return claim
    return None


def same_cause(cause: str) -> str:
    """Return a cause in the form in which two are compared: case, dashes and underscores make no difference."""
    return cause.lower().replace("-", "_")
