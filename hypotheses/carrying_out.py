"""Whether a run carries a required edit out: its probe, and for what builds on a mechanism that something was built.

A probe says what a program does; a required edit asks for a change. `remove` and `replace` have probes that cannot hold
before the change. The probe of `extend` and `refine` may hold for any program that merely keeps the mechanism, so there
the run must also differ from the incumbent: in what it installs at the place, and in the code of the mechanism or by a
new part of it, which acts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hypotheses.edit_states import RequiredEdit
from hypotheses.probe_results import ProbeEvidence, ProbeResult, ProbeStatus
from hypotheses.probes import Removal, check_control, check_probe, probe_mechanism

BUILDING = ("extend", "refine")
"""Kinds that keep the mechanism and change it."""


def check_carried_out(
    edit: RequiredEdit,
    run: ProbeEvidence,
    *,
    incumbent: ProbeEvidence,
    altered: Collection[str],
    knocked_out: ProbeEvidence | None = None,
    not_neutral: str = "",
    idle: Mapping[str, str] | None = None,
    removal: Removal | None = None,
) -> ProbeResult:
    """Answer whether a run carries the edit out.

    Args:
        edit: what is required.
        run: of the program that says it discharges the edit.
        incumbent: the run of the program that it was made from, same seed and draw.
        altered: mechanisms that are new in the program or have other code of their own than in the incumbent.
        knocked_out: the run without the probe's mechanism, see `check_probe`.
        not_neutral: why the program's neutrals are none: then nothing shows which of its mechanisms changed what.
        idle: mechanisms of the program that do not act, with what showed it.
        removal: for a probe of absence, see `check_probe`.
    """
    idle = idle or {}
    name = probe_mechanism(edit.probe)
    # What is to go may be idle; what is to act may not.
    is_to_act = edit.kind in BUILDING or name != edit.mechanism
    why_idle = idle.get(name, "") if name is not None and is_to_act else ""
    answer = check_probe(edit.probe, run, knocked_out=knocked_out, not_neutral=not_neutral or why_idle, removal=removal)
    if not answer.is_decisive or edit.kind not in BUILDING:
        return answer
    if not_neutral:
        return ProbeResult(status=ProbeStatus.NOT_EXECUTED, detail=not_neutral)
    part = new_part(edit)
    is_new = part is not None and part in altered and part not in incumbent.mechanisms
    carriers = [part] if part is not None and is_new else []
    carriers += [edit.mechanism] if edit.mechanism in altered else []
    if not carriers:
        missing = f", and {part!r} is no new mechanism" if part is not None else ""
        return ProbeResult(
            status=ProbeStatus.NOT_EXECUTED,
            detail=f"{edit.mechanism!r} has the code that it has in the incumbent{missing}",
        )
    if all(carrier in idle for carrier in carriers):
        return ProbeResult(status=ProbeStatus.NOT_EXECUTED, detail=f"{carriers[0]!r} does not act: {idle[carriers[0]]}")
    changed = check_control(run, incumbent, place=edit.place)
    if changed.status is ProbeStatus.EXECUTED:
        return answer
    if changed.status is ProbeStatus.NOT_EXECUTED:
        return ProbeResult(
            status=ProbeStatus.NOT_EXECUTED, detail=f"what is installed at {edit.place} is what the incumbent installs"
        )
    return changed


def new_part(edit: RequiredEdit) -> str | None:
    """Return the name of the mechanism that the edit is to bring; None when it changes the one that is there."""
    if edit.part is not None:
        return edit.part
    # Edits recorded before parts were declared name theirs in the probe alone.
    name = probe_mechanism(edit.probe)
    return name if name != edit.mechanism else None
