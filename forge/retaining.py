"""Whether a candidate becomes the incumbent: by its score alone, whatever explains it.

A candidate is compared with the incumbent of the moment, chunk by chunk, within the contract class and the bits that the
recipe allows. It is promoted when its effect is beyond the noise: more than `promotion_sigma` standard errors of this
comparison, and as many noise floors of the campaign. The floor holds where the comparison itself sees no luck: a program with
another seed, or one that reads no calibration text, differs from its parent by chance alone and yet by the same on every chunk.

A candidate that discharges a simplifying required edit (remove, replace) is promoted already when it is not worse beyond the
noise and spends no more bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from evaluators.results import ContractClass
from hypotheses.effects import PairedEffect
from hypotheses.ledger import Settlement

CLASS_ORDER: tuple[ContractClass, ...] = ("folded", "online", "corrected")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """promoted, and why in a sentence; `worse` when the candidate lost beyond the noise."""

    promoted: bool
    worse: bool
    reason: str


def is_class_allowed(contract_class: str | None, allowed: ContractClass) -> bool:
    """Whether a class is within the one that the recipe searches; each class contains those before it."""
    known = [str(item) for item in CLASS_ORDER]
    return contract_class in known and known.index(str(contract_class)) <= CLASS_ORDER.index(allowed)


def is_gain(effect: PairedEffect, *, promotion_sigma: float, noise_floor: float) -> bool:
    """Whether an effect is a gain beyond the noise: of its own comparison, and of the campaign."""
    return effect.mean > promotion_sigma * max(effect.standard_error, noise_floor)


def is_loss(effect: PairedEffect, *, promotion_sigma: float, noise_floor: float) -> bool:
    """Whether an effect is a loss beyond the noise, by the same measure as a gain."""
    return effect.mean < -promotion_sigma * max(effect.standard_error, noise_floor)


def judge(
    effect: PairedEffect,
    candidate: Settlement,
    incumbent: Settlement,
    *,
    promotion_sigma: float,
    noise_floor: float,
    allowed: ContractClass,
    simplifies: bool,
) -> Retention:
    """Return whether the candidate becomes the incumbent.

    Args:
        effect: of the candidate on the incumbent, paired by chunk.
        candidate: its scored result.
        incumbent: the scored result of the incumbent.
        promotion_sigma: standard errors, and noise floors, that count as beyond the noise.
        noise_floor: of the campaign, nats per token.
        allowed: the contract class that is searched.
        simplifies: whether it discharged a simplifying required edit.
    """
    size = f"{effect.mean:+.4f} +- {effect.standard_error:.4f} nats/token ({effect.z:+.1f} standard errors)"
    worse = is_loss(effect, promotion_sigma=promotion_sigma, noise_floor=noise_floor)
    if not is_class_allowed(candidate.contract_class, allowed):
        return Retention(
            promoted=False, worse=worse, reason=f"{size}, but class {candidate.contract_class!r} is beyond {allowed!r}"
        )
    if is_gain(effect, promotion_sigma=promotion_sigma, noise_floor=noise_floor):
        return Retention(promoted=True, worse=False, reason=f"better beyond the noise: {size}")
    bits, before = candidate.effective_bits, incumbent.effective_bits
    if simplifies and not worse and bits is not None and before is not None and bits <= before + 1e-9:
        return Retention(promoted=True, worse=False, reason=f"simpler and not worse beyond the noise: {size}")
    return Retention(
        promoted=False, worse=worse, reason=f"{'worse' if worse else 'no better'} beyond the noise: {size}"
    )
