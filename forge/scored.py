"""A program together with the evaluation that scored it."""

from __future__ import annotations

from dataclasses import dataclass

from hypotheses.ledger import Evaluation, Program, Settlement


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A program with its scored evaluation on the search split."""

    program: Program
    evaluation: Evaluation

    @property
    def result(self) -> Settlement:
        result = scored(self.evaluation)
        assert result is not None, f"{self.evaluation.id} carries no score"
        return result


def scored(evaluation: Evaluation) -> Settlement | None:
    """Return the result of an evaluation when it carries a score."""
    return evaluation.result if evaluation.result is not None and evaluation.result.is_scored else None
