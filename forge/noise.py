"""The noise floor of a campaign, measured before its first turn.

Two programs of equal worth differ by luck: in the chunks that were scored, and in the calibration text that one of them
drew. The first is seen anew in every paired comparison; the second is measured here, once, as the variance of one
calibrated program's mean loss over several calibration draws. The seed program alone would not do where it reads no
calibration text at all (RTN does not): its draws are equal by construction, so the shipped `gptq` stands in for the
programs that the search will find.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypotheses.ledger import Ledger


@dataclass(frozen=True, kw_only=True)
class NoiseModel:
    """Program-level variance and the floor.

    draw_variance: sample variance of the mean loss over calibration draws, (nats per token)^2. num_draws: behind it.
    floor: one standard error of the effect between two calibrated programs, nats per token:
        sqrt(chunk variance of the mean + 2 draw_variance).
    """

    draw_variance: float
    num_draws: int
    floor: float

    @classmethod
    def of(cls, ledger: Ledger) -> NoiseModel | None:
        """Return what a ledger holds of it; None before it is measured."""
        measured = ledger.noise()
        if not measured:
            return None
        return cls(
            draw_variance=measured[0].draw_variance, num_draws=len(measured[0].evaluation_ids), floor=measured[0].floor
        )
