"""Rival hypotheses, the controls that could tell them apart, and what each rival predicts: what a proposer writes down.

A hypothesis claims one *cause* for what one *mechanism* did to the loss. A control changes the program so that the
causes part ways. A prediction is the interval in which a hypothesis expects the control's retained effect: 0 means
that the control is as bad as the observation's parent, 1 that it is as good as the child. Everything here comes from
text, so an explanation that could not be decided, or could not be wrong, is refused, with all its problems at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from hypotheses.effects import Interval
from hypotheses.errors import HypothesesError

Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+([-_][a-z0-9]+)*$", max_length=64)]
"""Short key in lower case: letters, digits, single dashes or underscores between them."""
MechanismName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=64)]
"""Name of a top-level function of a program, listed in its ``MECHANISMS``."""
ControlKind = Literal["knockout", "knockin", "substitute"]

NONE_OF_THESE = "none of these"
"""The implicit rival of every explanation. No slug can collide with it."""

MAX_HYPOTHESES = 8
MAX_CONTROLS = 16
MAX_PREDICTIONS = MAX_HYPOTHESES * MAX_CONTROLS
MAX_PREDICTION_WIDTH = 2.0
PLAUSIBLE = Interval(low=-0.25, high=1.25)
"""Where the retained effect of a control lies as far as anyone would believe: from a little worse than the parent to a little
better than the child. A prediction that leaves no room in it to be wrong is right whatever the control does."""
CONCEIVABLE = Interval(low=-2.0, high=3.0)
"""Nothing that a control could do lies beyond: a prediction out there is no prediction."""

_T = TypeVar("_T")


class ExplanationProblem(HypothesesError):
    """An explanation was refused. `problems` has one exact sentence for each thing wrong with it.

    Not a ValueError, so that pydantic passes it through unchanged.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems: list[str] = list(problems)
        super().__init__("; ".join(self.problems))


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hypothesis(_Model):
    """One claimed cause of an observation.

    cause: short name of the claimed cause (``capacity``, ``selection``, ``outlier_spreading``); with `mechanism` it is
        the claim that a verdict supports or refutes.
    predecessor: id in the ledger of the earlier hypothesis that this one revises; predictions themselves never change.
    """

    key: Slug
    cause: Slug
    mechanism: MechanismName
    statement: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]
    predecessor: str | None = None

    @property
    def claim(self) -> tuple[str, str]:
        """The pair (mechanism, cause) that a verdict is about."""
        return (self.mechanism, self.cause)


class Control(_Model):
    """A program evaluated to tell rivals apart. Its effect, like the child's, is always measured against the parent.

    kind: knockout (the child without `removes`), knockin (the parent with `keeps` alone), substitute (`removes`
        replaced by something else at equal effective bits).
    against: the program whose source the control starts from.
    edits: text of the edits that make it, or the name under which the reply gives them; None when replacing the
        functions in `removes` by their declared neutrals is the whole change.
    cost: evaluator calls.
    """

    key: Slug
    kind: ControlKind
    removes: tuple[MechanismName, ...] = ()
    keeps: tuple[MechanismName, ...] = ()
    against: Literal["child", "parent"] = "child"
    edits: str | None = None
    description: Annotated[str, StringConstraints(strip_whitespace=True, max_length=2000)] = ""
    cost: Annotated[int, Field(ge=1, le=1000)] = 1

    def problems(self) -> list[str]:
        """Return what makes this control no control of its kind."""
        found = []
        if self.kind == "knockout" and not self.removes:
            found.append(f"control {self.key!r} is a knockout but removes no mechanism; name one in `removes`")
        if self.kind == "knockin" and not self.keeps:
            found.append(f"control {self.key!r} is a knockin but keeps no mechanism; name one in `keeps`")
        if self.kind == "substitute" and not self.removes:
            found.append(f"control {self.key!r} is a substitute but replaces no mechanism; name one in `removes`")
        if self.kind == "substitute" and self.edits is None:
            found.append(
                f"control {self.key!r} is a substitute without edits; give the edits that put something else there"
            )
        if self.kind == "knockout" and self.against == "parent":
            found.append(f"control {self.key!r} is a knockout against the parent; a knockout starts from the child")
        if self.against == "parent" and self.edits is None:
            found.append(
                f"control {self.key!r} starts from the parent without edits, so it is the parent; give its edits"
            )
        both = sorted(set(self.removes) & set(self.keeps))
        if both:
            found.append(f"control {self.key!r} both removes and keeps {', '.join(map(repr, both))}")
        return found


class Prediction(_Model):
    """The interval [low, high] in which `hypothesis` expects the retained effect of `control`.

    Immutable once registered. Bounds are checked by `Explanation`, so that all its problems are told together.
    """

    hypothesis: str
    control: str
    low: float
    high: float

    @property
    def interval(self) -> Interval:
        """The predicted interval; ValueError when it is reversed or not finite."""
        return Interval(low=self.low, high=self.high)

    def problems(self) -> list[str]:
        """Return what makes this interval unfit to be tested."""
        what = f"prediction of {self.hypothesis!r} for {self.control!r}"
        shown = f"[{self.low:g}, {self.high:g}]"
        if not (math.isfinite(self.low) and math.isfinite(self.high)):
            return [f"{what}: {shown} is not finite; give two numbers"]
        if self.low > self.high:
            return [f"{what}: {shown} is reversed; the low end comes first"]
        if self.high - self.low > MAX_PREDICTION_WIDTH or self.interval.contains(PLAUSIBLE):
            return [
                f"{what}: {shown} is vacuous, nothing could refute it; at most {MAX_PREDICTION_WIDTH:g} wide "
                f"and not covering [{PLAUSIBLE.low:g}, {PLAUSIBLE.high:g}]"
            ]
        if not self.interval.overlaps(CONCEIVABLE):
            return [
                f"{what}: {shown} lies where no control could; retained effects lie in "
                f"[{CONCEIVABLE.low:g}, {CONCEIVABLE.high:g}], 0 is the parent and 1 the child"
            ]
        return []

    def is_vacuous(self, width: float) -> bool:
        """Whether no measured interval of this width, about an estimate in `PLAUSIBLE`, could be disjoint from it."""
        return self.low <= PLAUSIBLE.low + width / 2 and self.high >= PLAUSIBLE.high - width / 2


class Explanation(_Model):
    """At least two rivals, at least one control, and exactly one prediction for every rival and control.

    Raises:
        ExplanationProblem: on construction, listing everything wrong with it.
    """

    hypotheses: tuple[Hypothesis, ...]
    controls: tuple[Control, ...]
    predictions: tuple[Prediction, ...]

    @model_validator(mode="after")
    def _refuse_problems(self) -> Self:
        problems = explanation_problems(self.hypotheses, self.controls, self.predictions)
        if problems:
            raise ExplanationProblem(problems)
        return self

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Build from plain data; malformed fields are reported as problems too, in the words of the field's path."""
        try:
            return cls.model_validate(data)
        except ValidationError as err:
            raise ExplanationProblem(
                f"{'.'.join(str(part) for part in detail['loc']) or 'explanation'}: {detail['msg']}"
                for detail in err.errors(include_url=False)
            ) from err

    def restricted_to(self, controls: Collection[str]) -> Self:
        """Return the explanation with these of its controls only, such as those that turned out to run.

        Rivals that only the others told apart may now predict the same everywhere; the design names such pairs.

        Raises:
            KeyError: a control is not of this explanation.
        """
        unknown = sorted(set(controls) - {control.key for control in self.controls})
        if unknown:
            raise KeyError(f"no control {unknown[0]!r} in this explanation")
        # Its parts are valid already, and fewer controls need not separate every pair.
        return self.model_copy(
            update={
                "controls": tuple(control for control in self.controls if control.key in controls),
                "predictions": tuple(prediction for prediction in self.predictions if prediction.control in controls),
            }
        )

    def prediction(self, hypothesis: str, control: str) -> Prediction:
        """Return the one prediction of `hypothesis` for `control`."""
        for prediction in self.predictions:
            if prediction.hypothesis == hypothesis and prediction.control == control:
                return prediction
        raise KeyError(f"no prediction of {hypothesis!r} for {control!r}")

    def hypothesis(self, key: str) -> Hypothesis:
        """Return the hypothesis of that key."""
        return next(hypothesis for hypothesis in self.hypotheses if hypothesis.key == key)

    def control(self, key: str) -> Control:
        """Return the control of that key."""
        return next(control for control in self.controls if control.key == key)


def explanation_problems(
    hypotheses: Iterable[Hypothesis], controls: Iterable[Control], predictions: Iterable[Prediction]
) -> list[str]:
    """Return everything that keeps these from being an explanation, one sentence each, in a stable order."""
    hypotheses, controls, predictions = tuple(hypotheses), tuple(controls), tuple(predictions)
    problems = _size_problems(hypotheses, controls, predictions)
    if problems:  # what is wrong between so many is more than anyone would read
        return problems
    problems = _count_problems(hypotheses, controls)
    for control in controls:
        problems += control.problems()
    pairs = _completeness_problems(hypotheses, controls, predictions)
    intervals = [problem for prediction in predictions for problem in prediction.problems()]
    problems += pairs + intervals
    if not pairs and not intervals and len(hypotheses) >= 2 and controls:
        problems += _rival_problems(hypotheses, controls, predictions)
    return problems


def vacuous_problems(explanation: Explanation, width: float) -> list[str]:
    """Return the predictions that nothing could refute when what is measured is `width` wide, one sentence each.

    An infinite width tells nothing of the predictions: then nothing at all can be measured.
    """
    if not math.isfinite(width):
        return []
    return [
        f"prediction of {row.hypothesis!r} for {row.control!r}: [{row.low:g}, {row.high:g}] is vacuous: a measurement will be "
        f"about {width:.2g} wide, and none with an estimate in [{PLAUSIBLE.low:g}, {PLAUSIBLE.high:g}] could lie outside it; "
        f"begin it above {PLAUSIBLE.low + width / 2:.2f} or end it below {PLAUSIBLE.high - width / 2:.2f}"
        for row in explanation.predictions
        if row.is_vacuous(width)
    ]


def same_rivals(explanation: Explanation, width: float) -> tuple[tuple[str, str], ...]:
    """Return the pairs of rivals that predict the same within the noise: no control with a gap of more than `width`."""
    intervals = {(row.hypothesis, row.control): row.interval for row in explanation.predictions}
    return tuple(
        (a, b)
        for a, b in combinations(sorted(hypothesis.key for hypothesis in explanation.hypotheses), 2)
        if not any(
            intervals[a, control.key].is_disjoint(intervals[b, control.key], width) for control in explanation.controls
        )
    )


def same_problems(explanation: Explanation, width: float) -> list[str]:
    """Return the pairs of `same_rivals`, one sentence each; none for an infinite width, at which all are the same."""
    if not math.isfinite(width):
        return []
    return [
        f"rivals {a!r} and {b!r} predict the same within the noise: for no control are their intervals more than "
        f"{width:.2g} apart, which a measurement would not tell; add a control on which they part, or leave one out"
        for a, b in same_rivals(explanation, width)
    ]


def _size_problems(
    hypotheses: tuple[Hypothesis, ...], controls: tuple[Control, ...], predictions: tuple[Prediction, ...]
) -> list[str]:
    problems = []
    if len(hypotheses) > MAX_HYPOTHESES:
        problems.append(f"{len(hypotheses)} hypotheses are too many to tell apart; at most {MAX_HYPOTHESES}")
    if len(controls) > MAX_CONTROLS:
        problems.append(f"{len(controls)} controls are too many; at most {MAX_CONTROLS}")
    if len(predictions) > MAX_PREDICTIONS:
        problems.append(
            f"{len(predictions)} predictions are too many; one for every hypothesis and control are at most {MAX_PREDICTIONS}"
        )
    return problems


def _count_problems(hypotheses: tuple[Hypothesis, ...], controls: tuple[Control, ...]) -> list[str]:
    problems = []
    if len(hypotheses) < 2:
        given = ", ".join(repr(hypothesis.key) for hypothesis in hypotheses) or "none"
        problems.append(f"an explanation needs at least two rival hypotheses; given {len(hypotheses)} ({given})")
    if not controls:
        problems.append("an explanation needs at least one control; given none")
    problems += [
        f"{n} hypotheses go by the name {key!r}; the slug of a cause is its hypothesis's name, give each its own"
        for key, n in _repeated(h.key for h in hypotheses)
    ]
    problems += [f"control key {key!r} is used {n} times" for key, n in _repeated(c.key for c in controls)]
    for (mechanism, cause), n in _repeated(h.claim for h in hypotheses):
        problems.append(
            f"{n} hypotheses claim the same cause {cause!r} for {mechanism!r}; rivals claim different causes"
        )
    return problems


def _completeness_problems(
    hypotheses: tuple[Hypothesis, ...], controls: tuple[Control, ...], predictions: tuple[Prediction, ...]
) -> list[str]:
    problems = []
    hypothesis_keys = list(dict.fromkeys(h.key for h in hypotheses))
    control_keys = list(dict.fromkeys(c.key for c in controls))
    for prediction in predictions:
        if prediction.hypothesis not in hypothesis_keys:
            problems.append(
                f"prediction for unknown hypothesis {prediction.hypothesis!r}; known: {_known(hypothesis_keys)}"
            )
        if prediction.control not in control_keys:
            problems.append(f"prediction for unknown control {prediction.control!r}; known: {_known(control_keys)}")
    given = Counter((p.hypothesis, p.control) for p in predictions)
    for (hypothesis, control), n in given.items():
        if n > 1:
            problems.append(f"{n} predictions of {hypothesis!r} for {control!r}; give one")
    for hypothesis in hypothesis_keys:
        for control in control_keys:
            if (hypothesis, control) not in given:
                problems.append(f"hypothesis {hypothesis!r} makes no prediction for control {control!r}")
    return problems


def _rival_problems(
    hypotheses: tuple[Hypothesis, ...], controls: tuple[Control, ...], predictions: tuple[Prediction, ...]
) -> list[str]:
    interval = {(p.hypothesis, p.control): p.interval for p in predictions}
    problems = []
    any_separated = False
    for a, b in combinations(dict.fromkeys(h.key for h in hypotheses), 2):
        keys = [control.key for control in controls]
        if all(interval[a, key] == interval[b, key] for key in keys):
            problems.append(f"rivals {a!r} and {b!r} predict the same for every control; nothing could tell them apart")
        any_separated |= any(interval[a, key].is_disjoint(interval[b, key]) for key in keys)
    if not any_separated:
        problems.append(
            "no control separates any pair of rivals; at least one must have two predictions that do not overlap"
        )
    return problems


def _repeated(values: Iterable[_T]) -> list[tuple[_T, int]]:
    return [(value, n) for value, n in Counter(values).items() if n > 1]


def _known(keys: list[str]) -> str:
    return ", ".join(map(repr, keys)) or "none"
