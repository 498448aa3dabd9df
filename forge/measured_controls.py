"""What the paid run of a control showed: its effect, and whether its change executed.

The campaign asks here when the run is settled, and whoever recomputes its verdicts asks again.
"""

from __future__ import annotations

from forge.controls import BITS_TOLERANCE
from forge.desk import probe_evidence
from forge.measured_effects import control_effect
from forge.noise import NoiseModel
from forge.scored import Scored, scored
from hypotheses.ledger import Evaluation, Program, Settlement
from hypotheses.predictions import Control
from hypotheses.probes import ProbeResult, ProbeStatus, check_control
from hypotheses.verdicts import ControlMeasurement


def measure_control(
    control: Control,
    program: Program,
    evaluation: Evaluation,
    *,
    parent: Scored,
    child: Scored,
    confirmation: Settlement,
    noise: NoiseModel,
) -> tuple[ControlMeasurement, ProbeResult | None]:
    """Return the measurement, and the answer of the control's probe; no answer for a run that was not scored.

    Args:
        control: as registered.
        program: the control's.
        evaluation: its settled run on the split of the confirmation.
        parent: the observation's parent, as scored on the search split.
        child: the observation's program, as scored on the search split.
        confirmation: of the child.
        noise: of the campaign.
    """
    result = scored(evaluation)
    if result is None:
        assert evaluation.result is not None
        failed = ControlMeasurement(
            control=control.key,
            effect=None,
            executed=None,
            outcome=evaluation.result.outcome,
            reason=evaluation.result.reason,
        )
        return failed, None
    base = parent if control.against == "parent" else child
    answer = check_control(
        probe_evidence(result.evidence, program.source),
        probe_evidence(base.result.evidence, base.program.source),
    )
    executed = None if answer.status is ProbeStatus.UNDETERMINED else answer.status is ProbeStatus.EXECUTED
    outcome = "scored"
    spent, allowed = result.effective_bits, child.result.effective_bits
    if control.kind == "substitute" and abs((spent or 0.0) - (allowed or 0.0)) > BITS_TOLERANCE:
        outcome = "unequal_bits"
    effect, covariance = control_effect(result, confirmation, parent.result, noise)
    measurement = ControlMeasurement(
        control=control.key,
        effect=effect,
        covariance=covariance,
        executed=executed,
        outcome=outcome,
        reason=answer.detail,
    )
    return measurement, answer
