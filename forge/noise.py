"""The noise of a campaign, measured before its first turn.

Two programs of equal worth differ by luck: in the chunks that were scored, and in the calibration text that each of them
drew. The first is seen anew in every paired comparison; the second is measured here, once, as the variance of one
calibrated program's mean loss over several calibration draws. The seed program alone would not do where it reads no
calibration text at all (RTN does not): its draws are equal by construction, so the shipped `gptq` stands in for the
programs that the search will find.

Luck is in proportion to damage. To second order the loss that quantization adds is a quadratic form of many rounding errors;
another draw rounds them another way, which moves the sum by a share of itself that hangs on their number and not on their size.
On nano-llama five programs whose damage lies between 0.39 and 0.68 nats per token have standard deviations of 1.7% to 1.9% of it.
So the measured variance is scaled by the square of a program's damage over that of `gptq`, no further than to half or twice
its standard deviation, and not at all where the damage of `gptq` itself is not clear of its own noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hypotheses.effects import noise_floor, paired_effect, program_variance
from hypotheses.ledger import LedgerReader, Settlement
from hypotheses.ledger.errors import LedgerStorageError

CLEAR_DAMAGE: Final = 5.0
"""Standard deviations over draws that the damage of the noise program must have before luck is taken in proportion to it."""
LARGEST_SCALE: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class NoiseFigures:
    """What the ledger keeps of the noise. draw_means: mean losses of the noise program by calibration draw, nats per token."""

    floor: float
    chunk_variance: float
    draw_variance: float
    num_chunks: int
    draw_means: tuple[float, ...]

    @classmethod
    def measured(cls, seed: Settlement, draws: Sequence[Settlement]) -> NoiseFigures:
        """Return the figures of the scored seed and of scored draws of the noise program, on the same chunks.

        Raises:
            ValueError: fewer than two draws, or losses that do not pair.
        """
        means = tuple(draw.nll for draw in draws if draw.nll is not None)
        variance = program_variance(means)
        effect = paired_effect(seed.chunk_nll, draws[0].chunk_nll, program_variance=2 * variance)
        return cls(
            floor=noise_floor(effect.chunk_variance / effect.num_chunks, 2 * variance),
            chunk_variance=effect.chunk_variance,
            draw_variance=variance,
            num_chunks=effect.num_chunks,
            draw_means=means,
        )


@dataclass(frozen=True, kw_only=True)
class NoiseModel:
    """Program-level variance and the floor.

    draw_variance: sample variance of the mean loss over calibration draws, (nats per token)^2. num_draws: behind it.
    floor: one standard error of the effect between two programs as lucky as the noise program, nats per token:
        sqrt(chunk variance of the mean + 2 draw_variance).
    full_precision: loss of the subject itself on the search split, nats per token. reference_damage: what the noise program
        loses beyond it, the mean over draws.
    """

    draw_variance: float
    num_draws: int
    floor: float
    full_precision: float
    reference_damage: float

    @classmethod
    def of(cls, ledger: LedgerReader) -> NoiseModel | None:
        """Return what a ledger holds of it; None before it is measured."""
        measured = ledger.noise()
        if not measured:
            return None
        noise = measured[0]
        losses = [loss for id in noise.evaluation_ids if (loss := ledger.evaluation(id).nll) is not None]
        if not losses:
            raise LedgerStorageError(f"{noise.id} names no scored run, so the ledger was altered; see show --recompute")
        subject = (row.nll for row in ledger.evaluations(kind="setup") if row.program_id is None)
        full_precision = next((loss for loss in subject if loss is not None), math.fsum(losses) / len(losses))
        return cls(
            draw_variance=noise.draw_variance,
            num_draws=len(losses),
            floor=noise.floor,
            full_precision=full_precision,
            reference_damage=math.fsum(losses) / len(losses) - full_precision,
        )

    def luck(self, nll: float) -> float:
        """Return the variance over calibration draws of a calibrated program with this loss on the search split."""
        if self.reference_damage <= CLEAR_DAMAGE * self.draw_variance**0.5:
            return self.draw_variance
        scale = (nll - self.full_precision) / self.reference_damage
        return self.draw_variance * min(max(scale, 1 / LARGEST_SCALE), LARGEST_SCALE) ** 2
