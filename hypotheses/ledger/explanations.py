"""Rivals, controls and predictions, registered together, and what follows from them: verdicts and required edits.

One registration is one transaction: either every hypothesis has a prediction for every control of it, or nothing is
stored. A later round on the same observation may add hypotheses and controls; it can neither change nor predict what is
known already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from hypotheses.ledger import models
from hypotheses.ledger.claims import (
    Control,
    Hypothesis,
    NewControl,
    NewDesign,
    NewHypothesis,
    NewPrediction,
    NewRequiredEdit,
    NewVerdict,
    Registration,
    RequiredEdit,
    RequiredEditState,
    Verdict,
)
from hypotheses.ledger.errors import LedgerNotFound, LedgerRefused
from hypotheses.ledger.tables import (
    CONTROLS,
    DESIGNS,
    HYPOTHESES,
    OBSERVATIONS,
    PREDICTIONS,
    REQUIRED_EDIT_STATES,
    REQUIRED_EDITS,
    VERDICTS,
    R,
    fields_of,
)
from hypotheses.ledger.transaction import Transaction

MIN_RIVALS = 2
SUPERSEDED = "superseded"


def register(
    tx: Transaction,
    observation_id: str,
    *,
    hypotheses: Sequence[NewHypothesis],
    controls: Sequence[NewControl],
    predictions: Sequence[NewPrediction],
    design: NewDesign,
    round: int,
) -> Registration:
    """Store one explanation whole; see `Ledger.register_explanation`."""
    tx.row(OBSERVATIONS, observation_id)
    place = {"observation_id": observation_id, "round": round}
    _check_names(observation_id, [item.name for item in hypotheses], "hypotheses")
    _check_names(observation_id, [item.name for item in controls], "controls")
    stored_hypotheses = tuple(tx.insert(HYPOTHESES, fields_of(item) | place) for item in hypotheses)
    stored_controls = tuple(tx.insert(CONTROLS, fields_of(item) | place) for item in controls)
    _check_predecessors(tx, observation_id, stored_hypotheses, round)
    known = [item for item in tx.all(HYPOTHESES, observation_id=observation_id) if item.round <= round]
    revised = {item.predecessor_id for item in known}
    rivals = {item.name: item for item in known if item.id not in revised}
    candidates = {item.name: item for item in tx.all(CONTROLS, observation_id=observation_id) if item.round <= round}
    if len(rivals) < MIN_RIVALS:
        raise LedgerRefused(
            f"{observation_id} has {len(rivals)} hypotheses; an explanation needs at least {MIN_RIVALS} rivals"
        )
    _check_pairs(observation_id, rivals, stored_controls, predictions)
    stored_predictions = tuple(
        tx.insert(
            PREDICTIONS,
            {
                "observation_id": observation_id,
                "hypothesis_id": _named(rivals, item.hypothesis, "hypothesis").id,
                "control_id": _named(candidates, item.control, "control").id,
                "low": item.low,
                "high": item.high,
                "body": item.body,
            },
        )
        for item in predictions
    )
    stored_design = tx.insert(
        DESIGNS,
        place
        | {
            "chosen": tuple(_named(candidates, name, "control").id for name in design.chosen),
            "unseparated": tuple(
                tuple(_named(rivals, name, "hypothesis").id for name in pair) for pair in design.unseparated
            ),
            "cost": design.cost,
            "body": design.body,
        },
    )
    return Registration(
        observation_id=observation_id,
        round=round,
        hypotheses=stored_hypotheses,
        controls=stored_controls,
        predictions=stored_predictions,
        design=stored_design,
    )


def add_verdicts(tx: Transaction, verdicts: Sequence[NewVerdict]) -> tuple[Verdict, ...]:
    """Store verdicts in the order given."""
    stored = []
    for verdict in verdicts:
        hypothesis = tx.row(HYPOTHESES, verdict.hypothesis_id)
        stored.append(tx.insert(VERDICTS, fields_of(verdict) | {"observation_id": hypothesis.observation_id}))
    return tuple(stored)


def add_edit(
    tx: Transaction, new: NewRequiredEdit, *, state: str, reason: str, supersedes: Sequence[str]
) -> RequiredEdit:
    """Store a required edit with its first state, and close those that it supersedes."""
    row = tx.insert_row(REQUIRED_EDITS, fields_of(new))
    for edit_id in supersedes:
        why = f"superseded by {row.id}"
        change_edit(tx, edit_id, SUPERSEDED, turn=new.turn, reason=why, program_id=None, body={})
    change_edit(tx, row.id, state, turn=new.turn, reason=reason, program_id=None, body={})
    return load_edit(tx, row)


def change_edit(
    tx: Transaction,
    edit_id: str,
    state: str,
    *,
    turn: int,
    reason: str,
    program_id: str | None,
    body: dict[str, object],
) -> RequiredEditState:
    """Append to the history of a required edit."""
    tx.row(REQUIRED_EDITS, edit_id)
    content = {
        "edit_id": edit_id,
        "turn": turn,
        "state": state,
        "reason": reason,
        "program_id": program_id,
        "body": body,
    }
    return tx.insert(REQUIRED_EDIT_STATES, content)


def load_edit(tx: Transaction, row: models.RequiredEdit) -> RequiredEdit:
    """Return a required edit with its history as of the position."""
    history = tx.all(REQUIRED_EDIT_STATES, edit_id=row.id)
    return tx.load(REQUIRED_EDITS, row, history=history)


def _check_predecessors(tx: Transaction, observation_id: str, new: Sequence[Hypothesis], round: int) -> None:
    """Refuse a revision that revises nothing, and a later hypothesis that is no revision: it would have seen what others did."""
    taken: dict[str, str] = {}
    for item in new:
        if item.predecessor_id is None:
            if round > 0:
                raise LedgerRefused(
                    f"{observation_id}: hypothesis {item.name!r} of round {round} names no predecessor; after round 0 a "
                    "hypothesis is the revision of an earlier one"
                )
            continue
        earlier = tx.get(HYPOTHESES, item.predecessor_id)
        if earlier.observation_id != observation_id or earlier.round >= round:
            raise LedgerRefused(
                f"{observation_id}: hypothesis {item.name!r} of round {round} revises {earlier.id}, which is of "
                f"{earlier.observation_id}, round {earlier.round}; a predecessor is an earlier hypothesis of the same observation"
            )
        if earlier.id in taken:
            raise LedgerRefused(f"{observation_id}: {taken[earlier.id]!r} and {item.name!r} both revise {earlier.id}")
        taken[earlier.id] = item.name


def _check_names(observation_id: str, names: Sequence[str], what: str) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise LedgerRefused(
            f"{observation_id}: two {what} are called {repeated[0]!r}; names are unique within an observation"
        )


def _check_pairs(
    observation_id: str,
    rivals: dict[str, Hypothesis],
    controls: Sequence[Control],
    predictions: Sequence[NewPrediction],
) -> None:
    given = [(item.hypothesis, item.control) for item in predictions]
    if len(set(given)) < len(given):
        pair = next(pair for pair in given if given.count(pair) > 1)
        raise LedgerRefused(f"{observation_id}: two predictions of {pair[0]!r} for control {pair[1]!r}")
    missing = [pair for pair in product(rivals, (item.name for item in controls)) if pair not in set(given)]
    if missing:
        raise LedgerRefused(
            f"{observation_id}: hypothesis {missing[0][0]!r} has no prediction for control {missing[0][1]!r}; "
            f"every rival predicts every control before it runs ({len(missing)} missing)"
        )
    for item in predictions:
        if item.low > item.high:
            raise LedgerRefused(
                f"{observation_id}: {item.hypothesis!r} predicts [{item.low!r}, {item.high!r}] for {item.control!r}; "
                "the lower end comes first"
            )


def _named(known: Mapping[str, R], name: str, what: str) -> R:
    if name not in known:
        raise LedgerNotFound(f"no {what} {name!r} in this explanation; known: {', '.join(known) or 'none'}")
    return known[name]
