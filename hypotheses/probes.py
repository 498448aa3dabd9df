"""Probes: machine checks that a change really executes, from evidence that trusted code saw.

Evidence is the evaluator's log of `Session` calls and what it decoded from the artifact (`evaluators.results.Evidence`
as JSON). Program text and in-process traces prove nothing, because the program controls both: a name in the source is
used only to say that something is *not* there, and line hits are advisory. What a call returned may be thrown away, so
a measurement counts only where knocking its mechanism out changes the installed tensors.

A probe answers `executed`, `not_executed` or `undetermined`; it never says anything about a hypothesis.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypotheses.probe_kinds import (
    EVERYWHERE,
    MEASUREMENTS,
    AbsentProbe,
    ArtifactProbe,
    CallProbe,
    EventPattern,
    KnockoutProbe,
    LineProbe,
    OrderProbe,
    Place,
    Probe,
    event_layers,
    has_step,
    split_name,
)
from hypotheses.probe_results import ProbeEvidence, ProbeResult, ProbeStatus

__all__ = [
    "EVERYWHERE",
    "MEASUREMENTS",
    "AbsentProbe",
    "ArtifactProbe",
    "CallProbe",
    "EventPattern",
    "KnockoutProbe",
    "LineProbe",
    "OrderProbe",
    "Place",
    "Probe",
    "ProbeEvidence",
    "ProbeResult",
    "ProbeStatus",
    "Removal",
    "check_control",
    "check_probe",
    "installs_the_same",
    "probe_mechanism",
    "probe_problems",
    "with_fingerprint",
]


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What a program was to be freed of a mechanism: runs of the one that had it, same seed and draw as the program's.

    before: with the mechanism. without: with the mechanism at its neutral.
    """

    before: ProbeEvidence
    without: ProbeEvidence


def check_probe(
    probe: Probe,
    evidence: ProbeEvidence,
    *,
    knocked_out: ProbeEvidence | None = None,
    not_neutral: str = "",
    removal: Removal | None = None,
) -> ProbeResult:
    """Answer one probe from the evidence of a run.

    Args:
        probe: what to check.
        evidence: the run of the program.
        knocked_out: the run of the same program, same seed and draw, with the probe's mechanism replaced by its
            neutral; None when there was none or it did not finish, which leaves the question open.
        not_neutral: why the program's neutrals are none; then a difference to `knocked_out` says nothing about the
            mechanism.
        removal: for `absent`, the program before; None leaves it to names and code.
    """
    if isinstance(probe, LineProbe):
        return _check_line(probe, evidence)
    if not evidence.layers:
        return _undetermined("the run left no artifact to look at")
    if isinstance(probe, CallProbe | OrderProbe) and evidence.events_left_out:
        return _undetermined(f"the last {evidence.events_left_out} calls of the run were too many to be kept")
    if not_neutral and not isinstance(probe, ArtifactProbe) and probe_mechanism(probe) in evidence.mechanisms:
        return _not_executed(not_neutral)
    if isinstance(probe, CallProbe):
        return _check_call(probe, evidence, knocked_out)
    if isinstance(probe, OrderProbe):
        return _check_order(probe, evidence, knocked_out)
    if isinstance(probe, ArtifactProbe):
        return _check_artifact(probe, evidence)
    if isinstance(probe, KnockoutProbe):
        return _check_knockout(probe, evidence, knocked_out)
    return _check_absent(probe, evidence, knocked_out, removal)


def installs_the_same(one: ProbeEvidence, other: ProbeEvidence) -> bool:
    """Whether two runs installed the same in every layer; False where either left no artifact."""
    if not one.layers or one.layers.keys() != other.layers.keys():
        return False
    return all(layer.get("digest") == other.layers[name].get("digest") for name, layer in one.layers.items())


def with_fingerprint(probe: Probe, mechanisms: Mapping[str, str], shapes: Mapping[str, str] | None = None) -> Probe:
    """Return the probe knowing what it is to find absent, whatever a proposer gave; other kinds as they are.

    Args:
        probe: of a required edit.
        mechanisms: fingerprints of the functions of the program that is to lose one (`ProbeEvidence.fingerprints`).
        shapes: the same with numbers left out (`ProbeEvidence.shapes`), so that another constant is no other mechanism.
    """
    if not isinstance(probe, AbsentProbe) or probe.mechanism not in mechanisms:
        return probe
    return probe.model_copy(
        update={
            "fingerprint": mechanisms[probe.mechanism],
            "shape": (shapes or {}).get(probe.mechanism),
            "others": tuple(sorted({value for name, value in mechanisms.items() if name != probe.mechanism})),
        }
    )


def check_control(control: ProbeEvidence, base: ProbeEvidence, *, place: Place = EVERYWHERE) -> ProbeResult:
    """Did a control's change execute: are other tensors installed at the place than by the program it was made from?

    Args:
        control: the control's run.
        base: the run of the program the control's source starts from (the child, or the parent), same seed and draw.
        place: where a difference counts.
    """
    if not control.layers or not base.layers:
        return _undetermined("one of the two runs left no artifact to look at")
    return _compare_digests(control, base, place, share=None, what="the control")


def probe_mechanism(probe: Probe) -> str | None:
    """Return the mechanism whose knocked-out twin `check_probe` wants to see; None when it needs none."""
    return None if isinstance(probe, ArtifactProbe | LineProbe) else probe.mechanism


def probe_problems(probe: Probe, *, mechanisms: Sequence[str], source_names: frozenset[str]) -> list[str]:
    """Return what keeps a probe from being run on a program: it names a function that is not there.

    Args:
        probe: the probe.
        mechanisms: what the program declares.
        source_names: functions defined in the program.
    """
    if isinstance(probe, LineProbe):
        return (
            [] if probe.function in source_names else [f"probe names function {probe.function!r}, which is not there"]
        )
    name = probe_mechanism(probe)
    if name is None or isinstance(probe, AbsentProbe) or name in mechanisms:
        return []
    known = ", ".join(map(repr, mechanisms)) or "none"
    return [f"probe names mechanism {name!r}, which the program does not declare; declared: {known}"]


def _check_line(probe: LineProbe, evidence: ProbeEvidence) -> ProbeResult:
    if not evidence.line_hits:
        return ProbeResult(status=ProbeStatus.UNDETERMINED, detail="no lines were counted in this run", advisory=True)
    hits = evidence.line_hits.get(probe.function, 0)
    status = ProbeStatus.EXECUTED if hits >= probe.at_least else ProbeStatus.NOT_EXECUTED
    detail = f"{hits} line hits in {probe.function!r}, {probe.at_least} wanted"
    return ProbeResult(status=status, detail=detail, advisory=True)


def _check_call(probe: CallProbe, evidence: ProbeEvidence, knocked_out: ProbeEvidence | None) -> ProbeResult:
    place = probe.event.place
    events = _matching(probe.event, evidence)
    wanted = f"{probe.event.op}{_of_stream(probe.event)} {_at(place)}"
    if not events:
        here = _layers_at(place, evidence)
        if not here and not place.is_everywhere:
            return _undetermined(f"this subject has no layer at {place}")
        return _not_executed(f"no {wanted} as described")
    if len(events) < probe.at_least:
        return _not_executed(f"{len(events)} of {probe.at_least} calls of {wanted}")
    if probe.share > 0:
        here = _layers_at(place, evidence)
        if not here:
            return _undetermined(f"this subject has no layer at {place}")
        reached = {layer for event in events for layer in event_layers(event)} & set(here)
        if not _reaches(len(reached), len(here), probe.share):
            return _not_executed(f"{wanted} reached {len(reached)} of {len(here)} layers, {probe.share:.0%} wanted")
    found = f"{len(events)} calls of {wanted}"
    return _with_result_used(found, probe.mechanism, place, evidence, knocked_out)


def _check_order(probe: OrderProbe, evidence: ProbeEvidence, knocked_out: ProbeEvidence | None) -> ProbeResult:
    first, then = _positions(probe.first, evidence, probe.scope), _positions(probe.then, evidence, probe.scope)
    if not first or not then:
        missing = probe.then if not then else probe.first
        if not missing.place.is_everywhere and not _layers_at(missing.place, evidence):
            return _undetermined(f"this subject has no layer at {missing.place}")
        return _not_executed(f"no {missing.op} at {missing.place} as described")
    for block in sorted(first.keys() | then.keys(), key=lambda key: -1 if key is None else key):
        where = "" if block is None else f" in block {block}"
        if block not in first or block not in then:
            missing = probe.first if block not in first else probe.then
            return _not_executed(f"no {missing.op} at {missing.place}{where} as described")
        if max(first[block]) >= min(then[block]):
            return _not_executed(f"{probe.then.op} came before the last {probe.first.op}{where}")
    found = f"every {probe.first.op} at {probe.first.place} came before every {probe.then.op} at {probe.then.place}"
    return _with_result_used(found, probe.mechanism, probe.then.place, evidence, knocked_out)


def _check_artifact(probe: ArtifactProbe, evidence: ProbeEvidence) -> ProbeResult:
    here = _layers_at(probe.place, evidence)
    if not here:
        return _undetermined(f"this subject has no layer at {probe.place}")
    wanted = f"{probe.property} {probe.comparison} {probe.value}"
    if probe.property == "distinct_digests":
        count = len({str(evidence.layers[name].get("digest")) for name in here})
        holds = _COMPARE[probe.comparison](count, probe.value)
        return _answer(holds, f"{count} distinct installs {_at(probe.place)}, {wanted} wanted")
    holding = [name for name in here if _has_property(probe, evidence.layers[name])]
    detail = f"{wanted} holds for {len(holding)} of {len(here)} layers {_at(probe.place)}, {probe.share:.0%} wanted"
    return _answer(_reaches(len(holding), len(here), probe.share), detail)


def _check_knockout(probe: KnockoutProbe, evidence: ProbeEvidence, knocked_out: ProbeEvidence | None) -> ProbeResult:
    if not _is_defined(probe.mechanism, evidence):
        if probe.expect == "unchanged":
            return _executed(f"{probe.mechanism!r} is not in the program, so nothing depends on it")
        return _not_executed(f"{probe.mechanism!r} is not in the program")
    if knocked_out is None or not knocked_out.layers:
        return _undetermined(f"the program without {probe.mechanism!r} left no artifact to compare")
    what = f"knocking out {probe.mechanism!r}"
    if probe.expect == "changed":
        return _compare_digests(evidence, knocked_out, probe.place, share=probe.share, what=what)
    return _opposite(_compare_digests(evidence, knocked_out, probe.place, share=None, what=what))


def _check_absent(
    probe: AbsentProbe, evidence: ProbeEvidence, knocked_out: ProbeEvidence | None, removal: Removal | None
) -> ProbeResult:
    if probe.mark is not None:
        marked = [
            name
            for name in _layers_at(probe.place, evidence)
            if probe.mark.place.has_layer(name) and _has_property(probe.mark, evidence.layers[name])
        ]
        if marked:
            return _not_executed(f"{len(marked)} layers still bear its mark, such as {marked[0]}")
    same = _again(probe, evidence)
    if same is not None:
        return _not_executed(f"{same!r} is the same mechanism under another name")
    kept = _kept_layers(probe, evidence, removal)
    if kept is not None:
        return _not_executed(kept)
    if not _is_defined(probe.mechanism, evidence):
        return _executed(f"{probe.mechanism!r} is gone from the program")
    if knocked_out is None or not knocked_out.layers:
        return _undetermined(f"{probe.mechanism!r} is still defined, and no run without it shows whether it acts")
    what = f"knocking out {probe.mechanism!r}"
    return _opposite(_compare_digests(evidence, knocked_out, probe.place, share=None, what=what))


def _again(probe: AbsentProbe, evidence: ProbeEvidence) -> str | None:
    """Return the function that is the mechanism under another name, with the same or with other numbers in it."""
    for name in sorted(evidence.fingerprints.keys() - {probe.mechanism}):
        if probe.fingerprint is not None and evidence.fingerprints[name] == probe.fingerprint:
            return name
        # By shape only among mechanisms: the small helpers of a program look alike.
        is_new = name in evidence.mechanisms and evidence.fingerprints[name] not in probe.others
        if is_new and probe.shape is not None and evidence.shapes.get(name) == probe.shape:
            return name
    return None


def _kept_layers(probe: AbsentProbe, evidence: ProbeEvidence, removal: Removal | None) -> str | None:
    """Say where the layers that the mechanism made are still installed as it made them, if that is in half of them."""
    if removal is None:
        return None
    made = [
        name
        for name in _layers_at(probe.place, evidence)
        if name in removal.before.layers
        and name in removal.without.layers
        and removal.before.layers[name].get("digest") != removal.without.layers[name].get("digest")
    ]
    kept = [
        name
        for name in made
        if _is_kept(evidence.layers[name], removal.before.layers[name], removal.without.layers[name])
    ]
    if not made or not _reaches(len(kept), len(made), _KEPT_SHARE):
        return None
    return (
        f"{len(kept)} of the {len(made)} layers that {probe.mechanism!r} changed {_at(probe.place)} "
        f"are still installed as with it, such as {kept[0]}"
    )


_KEPT_SHARE = 0.5
"""Share of the layers that a mechanism made from which on they count as still made by it."""
_KEPT_NEARNESS = 0.05
"""How near to the old error, as a part of what the mechanism changed it by, counts as the same install retuned."""


def _is_kept(layer: Mapping[str, Any], before: Mapping[str, Any], without: Mapping[str, Any]) -> bool:
    if layer.get("digest") == before.get("digest"):
        return True
    if layer.get("digest") == without.get("digest"):
        return False
    if any(layer.get(name) != before.get(name) for name in ("transform", "scale_rule", "code_rule", "rank")):
        return False
    now, then, gone = (one.get("weight_error") for one in (layer, before, without))
    if now is None or then is None or gone is None or then == gone:
        return False
    # A comparison with NaN is false.
    return bool(abs(now - then) <= _KEPT_NEARNESS * abs(then - gone))


def _with_result_used(
    found: str, mechanism: str | None, place: Place, evidence: ProbeEvidence, knocked_out: ProbeEvidence | None
) -> ProbeResult:
    """Add to a call found in the log the proof that what it returned reached the artifact."""
    if mechanism is None:
        return _executed(found)
    used = _check_knockout(KnockoutProbe(mechanism=mechanism, place=place, share=1e-9), evidence, knocked_out)
    return ProbeResult(status=used.status, detail=f"{found}; {used.detail}")


def _compare_digests(
    evidence: ProbeEvidence, other: ProbeEvidence, place: Place, *, share: float | None, what: str
) -> ProbeResult:
    """Executed when enough layers at the place were installed differently; at least one when `share` is None."""
    here = _layers_at(place, evidence)
    if not here:
        return _undetermined(f"this subject has no layer at {place}")
    missing = [name for name in here if name not in other.layers or not evidence.layers[name].get("digest")]
    if missing:
        return _undetermined(f"no digest to compare for {missing[0]}")
    changed = sum(evidence.layers[name]["digest"] != other.layers[name].get("digest") for name in here)
    detail = f"{what} changes {changed} of {len(here)} layers {_at(place)}"
    if share is None:
        return _answer(changed > 0, detail)
    return _answer(changed > 0 and _reaches(changed, len(here), share), f"{detail}, {_share(share)} wanted")


def _matching(pattern: EventPattern, evidence: ProbeEvidence) -> list[Mapping[str, Any]]:
    """Return the events of this kind; of several installs of one layer only the last, which the artifact has."""
    events = evidence.events
    if pattern.op == "install":
        last = {str(event.get("layer")): event for event in events if event.get("op") == "install"}
        events = tuple(last.values())
    return [event for event in events if pattern.matches(event)]


def _positions(pattern: EventPattern, evidence: ProbeEvidence, scope: str) -> dict[int | None, list[int]]:
    positions: dict[int | None, list[int]] = {}
    order = {id(event): index for index, event in enumerate(evidence.events)}
    for event in _matching(pattern, evidence):
        layers = event_layers(event)
        block = split_name(layers[0])[0] if layers else event.get("block")
        positions.setdefault(block if scope == "block" else None, []).append(order[id(event)])
    return positions


def _has_property(probe: ArtifactProbe, layer: Mapping[str, Any]) -> bool:
    if probe.property == "transform_kind":
        return has_step(layer.get("transform"), str(probe.value)) == (probe.comparison == "==")
    if probe.property == "has_transform":
        return (bool(layer.get("transform")) == probe.value) == (probe.comparison == "==")
    value = layer.get(probe.property)
    if probe.property == "rank":
        value = value or 0
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return False
    return _COMPARE[probe.comparison](value, probe.value)


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _layers_at(place: Place, evidence: ProbeEvidence) -> list[str]:
    return sorted(name for name in evidence.layers if place.has_layer(name))


def _is_defined(mechanism: str, evidence: ProbeEvidence) -> bool:
    return mechanism in evidence.mechanisms or mechanism in evidence.source_names


def _reaches(count: int, total: int, share: float) -> bool:
    # The tolerance keeps a share such as 1/3 from missing by a rounding error.
    return count >= share * total - 1e-9


def _opposite(result: ProbeResult) -> ProbeResult:
    swap = {ProbeStatus.EXECUTED: ProbeStatus.NOT_EXECUTED, ProbeStatus.NOT_EXECUTED: ProbeStatus.EXECUTED}
    return ProbeResult(status=swap.get(result.status, result.status), detail=result.detail)


def _answer(holds: bool, detail: str) -> ProbeResult:
    return _executed(detail) if holds else _not_executed(detail)


def _executed(detail: str) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.EXECUTED, detail=detail)


def _not_executed(detail: str) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.NOT_EXECUTED, detail=detail)


def _undetermined(detail: str) -> ProbeResult:
    return ProbeResult(status=ProbeStatus.UNDETERMINED, detail=detail)


def _at(place: Place) -> str:
    return str(place) if place.is_everywhere else f"at {place}"


def _of_stream(pattern: EventPattern) -> str:
    return "" if pattern.stream is None else f" of the {pattern.stream} stream"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 else "any"
