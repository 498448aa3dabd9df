"""Measuring a gain again: on text that chose nothing, with another calibration draw, beside the parent.

Two things need it. A clear difference becomes an observation only when it holds there. And a campaign declares a program its
best only after it held there: the search split chose the incumbent, so its score on that split is the luckiest of many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forge.desk import Call, Desk
from forge.measured_effects import effect_on, effect_on_reference
from forge.noise import NoiseModel
from forge.recipe import Statistics
from forge.retaining import is_gain
from forge.scored import Scored, scored
from hypotheses.effects import PairedEffect
from hypotheses.ledger import Evaluation, Incumbent, LedgerReader, Settlement

CONFIRMATION_SPLIT: Final = "confirm"
"""Split of confirmations, and of the controls that are compared with them."""
CONFIRMATION_DRAW = 1
"""Calibration draw of confirmations. Searches and controls use draw 0: a control's probe compares what it installed with what
the child's or the parent's first run did."""


@dataclass(frozen=True, kw_only=True)
class Confirmation:
    """A program measured again beside its parent. effect: None when the run was not scored; `failure` says why."""

    evaluation: Evaluation
    effect: PairedEffect | None
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """The program that a campaign stands for.

    best: its best program that held when it was measured again, else the seed. confirmation: that measurement; None for the
    seed. passed_over: titles of later incumbents that are not declared, each with the reason, latest first.
    """

    best: Scored
    confirmation: Confirmation | None
    passed_over: tuple[tuple[str, str], ...] = ()


class Confirmer:
    """Measures programs of one campaign again, each once, and says which one may be declared its best."""

    def __init__(self, ledger: LedgerReader, noise: NoiseModel, statistics: Statistics, seed: int) -> None:
        self._ledger = ledger
        self._noise = noise
        self._statistics = statistics
        self._seed = seed

    @classmethod
    def of(cls, ledger: LedgerReader) -> Confirmer | None:
        """Return the one that a ledger's campaign used; None before its noise floor is measured."""
        noise, campaign = NoiseModel.of(ledger), ledger.campaign()
        if noise is None:
            return None
        return cls(ledger, noise, Statistics.model_validate(campaign.recipe.get("statistics", {})), campaign.seed)

    def confirm(self, desk: Desk, turn: int, parent: Scored, child: Scored) -> Confirmation:
        """Return the child's confirmation against its parent; costs a call unless the ledger holds it.

        Raises:
            BudgetExhausted: no call is left.
        """
        search = effect_on(parent.result, child.result, self._noise)
        evaluation = desk.evaluate(
            Call(
                program=child.program,
                kind="confirmation",
                split=CONFIRMATION_SPLIT,
                draw=CONFIRMATION_DRAW,
                seed=self._seed,
                turn=turn,
                reference_artifact=parent.result.artifact_hash,
                why=f"does {search.mean:+.4f} nats/token hold on other text?",
            )
        )
        return self._read(evaluation, parent.result)

    def spendable(self) -> int:
        """Return the free calls, less the one that is kept while the incumbent has not been measured again."""
        history = self._ledger.incumbents()
        kept = int(len(history) > 1 and self._stored(history[-1], history) is None)
        return max(0, self._ledger.budget().free - kept)

    def declare(self, desk: Desk | None = None) -> Declaration | None:
        """Return the program to stand for the campaign; None before the seed is scored.

        The latest incumbent that held when it was measured again is declared. With a desk, one that was never measured
        again is measured now, as long as a call is free.
        """
        history = self._ledger.incumbents()
        passed_over: list[tuple[str, str]] = []
        for entry in reversed(history[1:]):
            best, parent = self._scored(entry), self._parent(entry, history)
            confirmation = self._stored(entry, history)
            if confirmation is None and desk is not None and self._ledger.budget().free > 0:
                confirmation = self.confirm(desk, entry.turn, parent, best)
            reason = self._objection(confirmation, effect_on(parent.result, best.result, self._noise))
            if not reason:
                return Declaration(best=best, confirmation=confirmation, passed_over=tuple(passed_over))
            passed_over.append((best.program.title, reason))
        if not history:
            return None
        return Declaration(best=self._scored(history[0]), confirmation=None, passed_over=tuple(passed_over))

    def _objection(self, confirmation: Confirmation | None, search: PairedEffect) -> str:
        """Return why a program must not be declared the best, or nothing."""
        if confirmation is None:
            return "it was not measured again"
        effect = confirmation.effect
        if effect is None:
            return f"measured again, it was not scored: {confirmation.failure}"
        sigma = self._statistics.promotion_sigma
        # One that was promoted for being simpler has only not to be worse.
        was_gain = is_gain(search, promotion_sigma=sigma, noise_floor=self._noise.floor)
        if effect.z > (sigma if was_gain else -sigma):
            return ""
        return (
            f"its gain did not hold when it was measured again: search {search.mean:+.4f} +- {search.standard_error:.4f}, "
            f"confirm {effect.mean:+.4f} +- {effect.standard_error:.4f} nats/token"
        )

    def _stored(self, entry: Incumbent, history: tuple[Incumbent, ...]) -> Confirmation | None:
        parent = self._parent(entry, history).result
        for evaluation in self._ledger.evaluations(program_id=entry.program_id, kind="confirmation"):
            if evaluation.is_settled and evaluation.reference_artifact == parent.artifact_hash:
                return self._read(evaluation, parent)
        return None

    def _read(self, evaluation: Evaluation, parent: Settlement) -> Confirmation:
        result = scored(evaluation)
        if result is None:
            assert evaluation.result is not None
            failure = f"{evaluation.result.outcome}: {evaluation.result.reason}"
            return Confirmation(evaluation=evaluation, effect=None, failure=failure)
        return Confirmation(evaluation=evaluation, effect=effect_on_reference(result, parent, self._noise))

    def _scored(self, entry: Incumbent) -> Scored:
        return Scored(
            program=self._ledger.program(entry.program_id), evaluation=self._ledger.evaluation(entry.evaluation_id)
        )

    def _parent(self, entry: Incumbent, history: tuple[Incumbent, ...]) -> Scored:
        """Return the incumbent that a promoted program was made from."""
        parent_id = self._ledger.program(entry.program_id).parent_id
        found = next((other for other in history if other.program_id == parent_id), history[0])
        return self._scored(found)
