"""Required edits: which ones follow from a verdict, and which claims a verdict bars.

What a verdict refutes is a claim, the pair (mechanism, cause), not code: inherited code stays legal, and nothing here
ever looks at what a program inherits. An edit is worded by the proposer; code checks that it follows from its verdict
and has a probe that can show that it executes. How an edit lives and ends is in `hypotheses.edit_states`, what it bars
in `hypotheses.barred_claims`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypotheses.barred_claims import BarredClaim, JudgedClaim, barred_claims, claim_is_barred, same_cause
from hypotheses.carrying_out import check_carried_out, new_part
from hypotheses.edit_states import (
    MAX_PAID_ATTEMPTS,
    MAX_REFUSED_TURNS,
    EditKind,
    EditRecord,
    EditState,
    EditStateError,
    RequiredEdit,
    attempt,
    close_costly,
    contradict,
    discharge,
    expire,
    refuse,
    settle,
    supersede,
)
from hypotheses.predictions import Explanation
from hypotheses.probe_kinds import (
    EVERYWHERE,
    MEASUREMENTS,
    AbsentProbe,
    CallProbe,
    KnockoutProbe,
    LineProbe,
    OrderProbe,
    Place,
    Probe,
)
from hypotheses.probes import ProbeEvidence, ProbeStatus, check_probe, probe_mechanism, probe_problems
from hypotheses.verdict_records import Verdict, VerdictStatus

__all__ = [
    "MAX_PAID_ATTEMPTS",
    "MAX_REFUSED_TURNS",
    "BarredClaim",
    "EditKind",
    "EditRecord",
    "EditState",
    "EditStateError",
    "JudgedClaim",
    "RequiredEdit",
    "attempt",
    "barred_claims",
    "check_carried_out",
    "check_required_edit",
    "claim_is_barred",
    "close_costly",
    "contradict",
    "default_edits",
    "discharge",
    "expire",
    "new_part",
    "refine_instead",
    "refuse",
    "same_cause",
    "settle",
    "supersede",
]

ENTRY_POINT = "quantize"
"""Function that every program is entered by; no mechanism."""

_KINDS: dict[VerdictStatus, tuple[EditKind, ...]] = {
    VerdictStatus.REFUTED: ("remove", "replace", "retest"),
    VerdictStatus.SUPPORTED: ("extend", "refine"),
    VerdictStatus.INCONCLUSIVE: ("retest",),
    VerdictStatus.NOT_EXECUTED: ("retest",),
    VerdictStatus.INVALID: ("retest",),
}
_PROBES: dict[EditKind, tuple[str, ...]] = {
    "remove": ("absent", "knockout"),
    "replace": ("absent", "artifact", "call", "order", "knockout"),
    "extend": ("knockout", "artifact", "call"),
    "refine": ("knockout", "artifact", "call", "order"),
    "retest": ("knockout", "artifact", "call", "order"),
}
_PART_KINDS: tuple[EditKind, ...] = ("replace", "extend", "refine")
_TYPICAL_SHARE = 0.5
"""Share of layers that the probes of default edits want changed: gated mechanisms rightly leave some alone."""


def check_required_edit(
    edit: RequiredEdit,
    verdict: Verdict,
    *,
    mechanisms: Sequence[str] | None = None,
    incumbent: ProbeEvidence | None = None,
    incumbent_knocked_out: ProbeEvidence | None = None,
) -> list[str]:
    """Return what is wrong with a required edit: it does not follow from its verdict, or nothing could show it done.

    Args:
        edit: as worded by the proposer.
        verdict: the verdict it is to follow from.
        mechanisms: what the incumbent declares; None skips the checks that need it.
        incumbent: evidence of the incumbent's own run: a probe that holds there already could never show a change.
        incumbent_knocked_out: the incumbent without the probe's mechanism; without layers when that did not run to its
            end, None when it was not tried.
    """
    problems = _claim_problems(edit, verdict) + _probe_fit_problems(edit)
    if mechanisms is not None:
        problems += _incumbent_problems(edit, mechanisms)
    if problems or incumbent is None:
        return problems
    if not any(edit.place.has_layer(name) for name in incumbent.layers):
        return [f"the subject has no layer at {edit.place}"]
    # A refinement keeps what is there and makes it better, so its probe may hold before and after; a new verdict and
    # nothing else settles a retest.
    if edit.kind in ("refine", "retest"):
        return []
    result = check_probe(edit.probe, incumbent, knocked_out=incumbent_knocked_out)
    if result.is_decisive:
        problems.append(
            f"its probe holds for the incumbent already ({result.detail}), so it could not show that the edit was made"
        )
    elif result.status is ProbeStatus.UNDETERMINED and incumbent_knocked_out is not None:
        problems.append(f"its probe has no answer for the incumbent ({result.detail})")
    return problems


def default_edits(
    verdicts: Iterable[Verdict], explanation: Explanation, *, worst: Place = EVERYWHERE
) -> list[RequiredEdit]:
    """Return the edits that the verdicts on one observation call for when nobody words better ones.

    Supported: extend the mechanism to where errors are worst; this one is blocking. Refuted while a rival with another
    mechanism is supported: remove the mechanism, which the verdict made superfluous. Refuted otherwise: retest, since
    the cause is open. There is nothing to do about a refuted cause of the mechanism that is carried on: its bar
    suffices.

    Args:
        verdicts: on one observation.
        explanation: the one they judge.
        worst: where the error map of the incumbent is worst.
    """
    ordered = sorted(verdicts, key=lambda verdict: verdict.hypothesis)
    supported = [verdict for verdict in ordered if verdict.status is VerdictStatus.SUPPORTED]
    edits = [_extend(verdict, worst) for verdict in supported]
    carried = {verdict.mechanism for verdict in supported}
    removed: set[str] = set()
    for verdict in ordered:
        if verdict.status is not VerdictStatus.REFUTED or verdict.mechanism in carried | removed:
            continue
        statement = explanation.hypothesis(verdict.hypothesis).statement
        if carried:
            edits.append(_remove(verdict, statement))
            removed.add(verdict.mechanism)
        else:
            edits.append(_retest(verdict, statement))
    return edits


def refine_instead(edit: RequiredEdit) -> RequiredEdit:
    """Return what takes the place of a default `extend` where the mechanism acts at the place already."""
    return edit.model_copy(
        update={
            "kind": "refine",
            "wording": f"Supported: {edit.cause} through {edit.mechanism}. It acts at {edit.place} already, where errors are "
            "worst: make it do more there.",
        }
    )


def _claim_problems(edit: RequiredEdit, verdict: Verdict) -> list[str]:
    problems = []
    if (edit.mechanism, same_cause(edit.cause)) != (verdict.mechanism, same_cause(verdict.cause)):
        problems.append(
            f"the edit is about ({edit.mechanism}, {edit.cause}), "
            f"its verdict about ({verdict.mechanism}, {verdict.cause})"
        )
    allowed = _KINDS[verdict.status]
    if edit.kind not in allowed:
        problems.append(
            f"a claim that is {verdict.status.value} does not call for {edit.kind!r}; "
            f"it calls for {' or '.join(allowed)}"
        )
    if edit.blocking and verdict.status not in (VerdictStatus.REFUTED, VerdictStatus.SUPPORTED):
        problems.append(f"a verdict of {verdict.status.value!r} decides nothing, so its edit cannot be blocking")
    return problems


def _probe_fit_problems(edit: RequiredEdit) -> list[str]:
    probe, problems = edit.probe, []
    if probe.kind not in _PROBES[edit.kind]:
        why = " (line hits are advisory)" if isinstance(probe, LineProbe) else ""
        problems.append(
            f"a probe of kind {probe.kind!r} cannot show that {edit.kind!r} was done{why}; "
            f"use {' or '.join(_PROBES[edit.kind])}"
        )
    name = probe_mechanism(probe)
    if isinstance(probe, KnockoutProbe):
        wanted = "unchanged" if edit.kind == "remove" else "changed"
        if probe.expect != wanted:
            problems.append(f"a knockout probe of {edit.kind!r} expects {wanted!r}, not {probe.expect!r}")
        if edit.kind == "replace" and name == edit.mechanism:
            problems.append(f"knocking out {name!r} cannot show that it was replaced; name what replaces it")
    if edit.part is not None and edit.kind not in _PART_KINDS:
        problems.append(f"{edit.kind!r} brings no part, so {edit.part!r} has no place in it")
    if edit.part == edit.mechanism:
        problems.append(f"the part that is to come is named {edit.part!r} like the mechanism itself")
    subjects = (edit.mechanism,) if isinstance(probe, AbsentProbe) else (edit.mechanism, edit.part)
    if name is not None and name not in subjects:
        problems.append(f"the probe is about {name!r}, the edit about {edit.mechanism!r}{_part_hint(edit, name)}")
    if isinstance(probe, CallProbe | OrderProbe) and name is None and _last_op(probe) in MEASUREMENTS:
        problems.append(
            f"the result of a call of {_last_op(probe)!r} may be thrown away; "
            "name the mechanism that uses it in the probe"
        )
    if not edit.place.is_within(_probe_place(probe)):
        problems.append(f"the probe looks at {_probe_place(probe)}, which does not cover {edit.place}")
    return problems


def _incumbent_problems(edit: RequiredEdit, mechanisms: Sequence[str]) -> list[str]:
    if edit.mechanism == ENTRY_POINT:
        return [f"{ENTRY_POINT!r} is the program itself; the incumbent stays whatever becomes of its explanation"]
    problems = []
    if edit.kind != "retest" and edit.mechanism not in mechanisms:
        known = ", ".join(map(repr, mechanisms)) or "none"
        problems.append(f"mechanism {edit.mechanism!r} is not in the incumbent; declared there: {known}")
    # Knocking out what is there already would show nothing about the change.
    if edit.part is not None and edit.part in mechanisms:
        problems.append(f"part {edit.part!r} is in the incumbent already; name the part that is to come")
    elif not problems and probe_mechanism(edit.probe) != edit.part:
        problems += probe_problems(edit.probe, mechanisms=mechanisms, source_names=frozenset())
    return problems


def _part_hint(edit: RequiredEdit, name: str) -> str:
    """How to name a part that is to come, where the kind of edit and the probe are about one."""
    if edit.kind not in _PART_KINDS or isinstance(edit.probe, AbsentProbe):
        return ""
    if edit.part is not None:
        return f" with {edit.part!r}"
    return f"; a part that is to come is declared, as in '{edit.kind} {edit.mechanism} with {name} at ...'"


def _last_op(probe: CallProbe | OrderProbe) -> str:
    return probe.event.op if isinstance(probe, CallProbe) else probe.then.op


def _probe_place(probe: Probe) -> Place:
    if isinstance(probe, CallProbe):
        return probe.event.place
    if isinstance(probe, OrderProbe):
        return probe.then.place
    return EVERYWHERE if isinstance(probe, LineProbe) else probe.place


def _extend(verdict: Verdict, worst: Place) -> RequiredEdit:
    return RequiredEdit(
        kind="extend",
        mechanism=verdict.mechanism,
        cause=verdict.cause,
        place=worst,
        wording=f"Supported: {verdict.cause} through {verdict.mechanism}. Carry it to {worst}, where errors are worst.",
        probe=KnockoutProbe(mechanism=verdict.mechanism, place=worst, share=_TYPICAL_SHARE),
        blocking=True,
    )


def _remove(verdict: Verdict, statement: str) -> RequiredEdit:
    return RequiredEdit(
        kind="remove",
        mechanism=verdict.mechanism,
        cause=verdict.cause,
        wording=f"Refuted: {statement} Take {verdict.mechanism} out; the gain has another cause.",
        probe=AbsentProbe(mechanism=verdict.mechanism),
        blocking=False,
    )


def _retest(verdict: Verdict, statement: str) -> RequiredEdit:
    return RequiredEdit(
        kind="retest",
        mechanism=verdict.mechanism,
        cause=verdict.cause,
        wording=f"Refuted: {statement} Bring a control that tells what else {verdict.mechanism} does.",
        probe=KnockoutProbe(mechanism=verdict.mechanism, share=_TYPICAL_SHARE),
        blocking=False,
    )
