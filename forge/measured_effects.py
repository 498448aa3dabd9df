"""Effects from settled runs: what is paired with what, and whose luck with the calibration text counts.

A candidate is measured beside the incumbent on the search split. A confirmation scores the parent's artifact beside the
child's on the confirm split, and controls are scored there too: they are compared with a child that was not chosen for its
luck on that text, and what the chunks do to both cancels from the retained effect.
"""

from __future__ import annotations

import math
import operator
from typing import Final

from forge.noise import NoiseModel
from hypotheses.effects import (
    Covariance,
    PairedEffect,
    expected_covariance,
    expected_width,
    paired_covariance,
    paired_effect,
)
from hypotheses.ledger import Settlement

CALIBRATION_OPERATIONS: Final = frozenset({"inputs", "second_moment", "output_error"})
"""Calls whose answers depend on the calibration draw."""


def is_calibrated(result: Settlement) -> bool:
    """Whether the run asked for anything that depends on the calibration draw."""
    return any(event.get("op") in CALIBRATION_OPERATIONS for event in result.evidence.get("events", ()))


def effect_on(parent: Settlement, child: Settlement, noise: NoiseModel) -> PairedEffect:
    """Return the effect of the child on the parent, both scored on the search split.

    Every calibrated run adds its program-level variance: each drew its own luck with the calibration text.
    """
    return _effect(parent.chunk_nll, child.chunk_nll, parent, child, noise)


def effect_on_reference(child: Settlement, parent: Settlement, noise: NoiseModel) -> PairedEffect:
    """Return the effect in a confirmation: the parent's artifact was scored beside the child's.

    parent: the run that made that artifact, on the search split.
    """
    return _effect(child.reference_chunk_nll, child.chunk_nll, parent, child, noise)


def control_effect(
    control: Settlement, confirmation: Settlement, parent: Settlement, noise: NoiseModel
) -> tuple[PairedEffect, Covariance]:
    """Return a control's effect on the observation's parent, and its covariance with the child's confirmed effect.

    Args:
        control: scored on the split of the confirmation.
        confirmation: of the child; the parent's artifact was scored beside it.
        parent: the run that made that artifact, on the search split.
        noise: of the campaign.
    """
    parent_nll = confirmation.reference_chunk_nll
    effect = _effect(parent_nll, control.chunk_nll, parent, control, noise)
    covariance = paired_covariance(
        parent_nll, control.chunk_nll, confirmation.chunk_nll, shared_variance=_luck(parent, parent.nll, noise)
    )
    return effect, covariance


def planned_width(confirmed: PairedEffect, parent: Settlement, noise: NoiseModel, *, level: float) -> float:
    """Return the expected width of a control's retained effect, before any control has run.

    A control differs from the parent about as the child does, so its noise is taken to be the child's.
    """
    covariance = expected_covariance(confirmed, shared_variance=_luck(parent, parent.nll, noise))
    return expected_width(confirmed, confirmed.standard_error, level=level, covariance=covariance)


def parent_luck(parent: Settlement, noise: NoiseModel) -> float:
    """Return the parent's own variance over calibration draws, which the effects of child and control share."""
    return _luck(parent, parent.nll, noise)


def _luck(result: Settlement, search_nll: float | None, noise: NoiseModel) -> float:
    assert search_nll is not None
    return noise.luck(search_nll) if is_calibrated(result) else 0.0


def _effect(
    parent_nll: tuple[float, ...],
    child_nll: tuple[float, ...],
    parent: Settlement,
    child: Settlement,
    noise: NoiseModel,
) -> PairedEffect:
    # On another split than the search split only the difference between the two is comparable.
    assert parent.nll is not None
    gain = math.fsum(map(operator.sub, parent_nll, child_nll)) / len(parent_nll)
    luck = _luck(parent, parent.nll, noise) + _luck(child, parent.nll - gain, noise)
    return paired_effect(
        parent_nll,
        child_nll,
        program_variance=luck,
        program_draws=noise.num_draws if is_calibrated(parent) or is_calibrated(child) else None,
    )
