"""The one addition to a registered explanation: controls for the rivals that nothing separates, before any control has run.

What is registered does not change. The answer writes the explanation again; what it adds are new controls, predicted by every
rival that stands, and revisions: new hypotheses that name the one they replace and predict every control themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hypotheses.predictions import Control, Explanation, ExplanationProblem, Hypothesis, Prediction


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What an answer adds. explanation: all that stands afterwards, revised hypotheses left out."""

    hypotheses: tuple[Hypothesis, ...]
    controls: tuple[Control, ...]
    predictions: tuple[Prediction, ...]
    explanation: Explanation

    def restricted_to(self, usable: set[str]) -> Extension:
        """Return the extension with those of its controls alone that turned out to run."""
        new = {control.key for control in self.controls}
        dropped = new - usable
        standing = {control.key for control in self.explanation.controls} - dropped
        return Extension(
            hypotheses=self.hypotheses,
            controls=tuple(control for control in self.controls if control.key in usable),
            predictions=tuple(row for row in self.predictions if row.control not in dropped),
            explanation=self.explanation.restricted_to(standing),
        )


def extend(registered: Explanation, ids: Mapping[str, str], answer: Explanation) -> Extension:
    """Return what an answer adds to the usable part of a registered explanation.

    Args:
        registered: hypotheses, usable controls and predictions as they stand in the ledger.
        ids: of its hypotheses in the ledger, by key.
        answer: the explanation written again.

    Raises:
        ExplanationProblem: it changes what is registered, drops a rival, adds no control, or leaves a prediction out.
    """
    old_hypotheses = {hypothesis.key: hypothesis for hypothesis in registered.hypotheses}
    old_controls = {control.key: control for control in registered.controls}
    given = {(row.hypothesis, row.control): row for row in answer.predictions}
    problems = []
    for control in answer.controls:
        old = old_controls.get(control.key)
        if old is not None and _made_of(control) != _made_of(old):
            problems.append(f"control {control.key!r} is registered as something else; give the new one another key")
    for hypothesis in answer.hypotheses:
        known = old_hypotheses.get(hypothesis.key)
        if known is not None and (hypothesis.claim != known.claim or hypothesis.predecessor is not None):
            problems.append(f"hypothesis {hypothesis.key!r} is registered as it is; a revision takes another slug")
        elif known is None and hypothesis.predecessor not in ids.values():
            listed = ", ".join(f"{key} is {ids[key]}" for key in old_hypotheses)
            problems.append(
                f"hypothesis {hypothesis.key!r} is new, so it revises one of the registered ones and names it: {listed}"
            )
    revised = [hypothesis.predecessor for hypothesis in answer.hypotheses if hypothesis.predecessor is not None]
    kept = {hypothesis.key for hypothesis in answer.hypotheses} & old_hypotheses.keys()
    for key in old_hypotheses:
        if (key in kept) + revised.count(ids[key]) != 1:
            problems.append(f"hypothesis {key!r} is to be written again or revised, one of the two and once")
    for row in registered.predictions:
        again = given.get((row.hypothesis, row.control))
        if row.hypothesis in kept and again is not None and again.interval != row.interval:
            problems.append(
                f"prediction of {row.hypothesis!r} for {row.control!r} is registered as [{row.low:g}, {row.high:g}] and never "
                "changes; a revision predicts otherwise under another slug"
            )
    new_hypotheses = tuple(h for h in answer.hypotheses if h.key not in old_hypotheses)
    new_controls = tuple(c for c in answer.controls if c.key not in old_controls)
    if not new_controls:
        problems.append("the answer adds no control")
    problems += [
        f"hypothesis {hypothesis.key!r} makes no prediction for control {key!r}"
        for hypothesis in new_hypotheses
        for key in old_controls
        if (hypothesis.key, key) not in given
    ]
    if problems:
        raise ExplanationProblem(problems)
    added = tuple(
        given[hypothesis.key, control]
        for hypothesis in answer.hypotheses
        for control in (*old_controls, *(control.key for control in new_controls))
        if hypothesis.key not in kept or control not in old_controls
    )
    standing = tuple(row for row in registered.predictions if row.hypothesis in kept)
    return Extension(
        hypotheses=new_hypotheses,
        controls=new_controls,
        predictions=added,
        explanation=registered.model_copy(
            update={
                "hypotheses": tuple(old_hypotheses.get(h.key, h) for h in answer.hypotheses),
                "controls": (*registered.controls, *new_controls),
                "predictions": (*standing, *added),
            }
        ),
    )


def _made_of(control: Control) -> tuple[object, ...]:
    return control.kind, control.removes, control.keeps, control.against, (control.edits or "").strip()
