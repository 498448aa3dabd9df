"""A refuted claim tested again: what a proposal must bring along, and what its explanation must then hold.

A `retest` lifts the bar of its claim for one proposal, in exchange for a sharper control. The proposal makes the claim and
brings a control of the mechanism that was never run; if the run shows an effect, the rivals that explain it must include the
claim, and their controls the one that was brought. What comes of it is a verdict, which alone settles the retest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forge.controls import ControlProblem, build_control
from forge.program_identity import ast_hash
from forge.screening import Draft, Refusal, Rules
from hypotheses.ledger import Ledger, Proposal
from hypotheses.predictions import Control, Explanation
from hypotheses.required_edits import EditRecord, same_cause


def check_retests(draft: Draft, rules: Rules, run_before: frozenset[str]) -> None:
    """Hold a draft that discharges a retest to the claim and to the control that the retest asks for.

    Args:
        draft: the candidate.
        rules: what it is held to.
        run_before: `ast_hash` of every control that was run.

    Raises:
        Refusal: with what is missing.
    """
    problems = [
        problem
        for record in retests(rules.open_edits, draft.proposal.discharges)
        for problem in _missing(record, draft, rules, run_before)
    ]
    if problems:
        raise Refusal("required edit", problems)


def retests(open_edits: Iterable[EditRecord], discharges: Sequence[str]) -> list[EditRecord]:
    """Return the open retests among the edits that a proposal says it discharges."""
    return [record for record in open_edits if record.edit.kind == "retest" and record.key in discharges]


def to_proposal_body(draft: Draft, rules: Rules) -> dict[str, object]:
    """Return what the ledger keeps of the retests of an accepted draft; empty where there are none."""
    claims = [
        [record.edit.mechanism, record.edit.cause] for record in retests(rules.open_edits, draft.proposal.discharges)
    ]
    if not claims:
        return {}
    return {"retests": claims, "controls": [control.model_dump(mode="json") for control in draft.proposal.controls]}


def of_turn(ledger: Ledger, turn: int) -> tuple[tuple[tuple[str, str], ...], tuple[Control, ...]]:
    """Return the claims that the candidate of a turn tests again, as (mechanism, cause), and the controls that it brought."""
    for proposal in ledger.proposals(turn=turn, status="accepted"):
        if proposal.kind == "candidate":
            return _of(proposal)
    return (), ()


def explanation_problems(
    explanation: Explanation,
    claims: Sequence[tuple[str, str]],
    brought: Sequence[Control],
    *,
    parent: str,
    child: str,
) -> list[str]:
    """Return what an explanation leaves out of the retests that its candidate came with."""
    stated = {(h.mechanism, same_cause(h.cause)) for h in explanation.hypotheses}
    problems = [
        f"The claim that {mechanism!r} acts through {cause!r} is tested again; list it under Hypotheses."
        for mechanism, cause in claims
        if (mechanism, same_cause(cause)) not in stated
    ]
    given = {_program(control, parent=parent, child=child) for control in explanation.controls}
    problems += [
        f"Control {control.key!r}, which the proposal brought for the retest, is missing; list it with its edits."
        for control in brought
        if _program(control, parent=parent, child=child) not in given
    ]
    return problems


def _missing(record: EditRecord, draft: Draft, rules: Rules, run_before: frozenset[str]) -> list[str]:
    edit = record.edit
    what = f"Required edit {record.key} tests again whether {edit.mechanism!r} acts through {edit.cause!r}"
    problems = []
    claims = {(claim.name, same_cause(claim.cause)) for claim in draft.proposal.mechanisms}
    if (edit.mechanism, same_cause(edit.cause)) not in claims:
        problems.append(f"{what}: claim it under Mechanisms, '- {edit.mechanism}: {edit.cause} | ...'.")
    reasons = []
    for control in draft.proposal.controls:
        if edit.mechanism not in (*control.removes, *control.keeps):
            continue
        try:
            source = build_control(control, parent=rules.incumbent, child=draft.source)
        except ControlProblem as problem:
            reasons.append(str(problem))
            continue
        if ast_hash(source) not in run_before:
            return problems
        reasons.append(f"control {control.key!r} was run before")
    why = f" ({'; '.join(reasons)})" if reasons else ""
    problems.append(
        f"{what}: bring a sharper control of it{why}, under '## Controls' as "
        f"'- key: substitute {edit.mechanism} in child | text' with '## Edits key' against your candidate."
    )
    return problems


def _of(proposal: Proposal) -> tuple[tuple[tuple[str, str], ...], tuple[Control, ...]]:
    claims = tuple((str(mechanism), str(cause)) for mechanism, cause in proposal.body.get("retests", ()))
    return claims, tuple(Control.model_validate(control) for control in proposal.body.get("controls", ()))


def _program(control: Control, *, parent: str, child: str) -> str | None:
    try:
        return ast_hash(build_control(control, parent=parent, child=child))
    except ControlProblem:
        return None
