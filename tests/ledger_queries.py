"""What must hold in the ledger of any campaign, and what the quickstart must show, in plain SQL."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

from hypotheses.design import Design
from hypotheses.effects import PairedEffect
from hypotheses.predictions import Explanation
from hypotheses.verdicts import ControlMeasurement, VerdictStatus, decide

BUDGET = "SELECT total - used - reserved - free FROM budget"
LATE_PREDICTIONS = """
    SELECT p.id FROM predictions p JOIN evaluations e ON e.control_id = p.control_id WHERE p.registered_seq > e.reserved_seq
"""
UNPREDICTED_CONTROLS = """
    SELECT e.id FROM evaluations e WHERE e.kind = 'control'
    AND NOT EXISTS (SELECT 1 FROM predictions p WHERE p.control_id = e.control_id)
"""
LONELY_HYPOTHESES = "SELECT observation_id FROM hypotheses GROUP BY observation_id HAVING count(*) < 2"
UNPROVEN_DISCHARGES = """
    SELECT s.edit_id FROM required_edit_states s WHERE s.state = 'discharged' AND NOT EXISTS (
        SELECT 1 FROM probe_results r WHERE r.target_id = s.edit_id AND r.program_id = s.program_id
        AND r.status = 'executed' AND NOT r.provisional AND r.evaluation_id IS NOT NULL)
"""
OBSERVATIONS_WITH_RIVALS = """
    SELECT count(*) FROM (SELECT observation_id FROM hypotheses GROUP BY observation_id HAVING count(*) >= 2)
"""
VERDICTS = "SELECT count(*) FROM verdicts WHERE status = ?"
DISCHARGED_LATER = """
    SELECT count(*) FROM required_edit_states s JOIN required_edits r ON r.id = s.edit_id
    WHERE s.state = 'discharged' AND s.turn > r.turn
"""
REFUSED_BEFORE_A_CALL = """
    SELECT count(*) FROM proposals p WHERE p.kind = 'candidate' AND p.status = 'refused' AND NOT EXISTS (
        SELECT 1 FROM evaluations e WHERE e.program_id = p.program_id)
"""
RETURNED_RENAMED = """
    SELECT count(*) FROM proposals p WHERE p.kind = 'candidate' AND p.status = 'refused' AND p.stage = 'barred claim'
    AND p.reason LIKE '%''range_migration'' acts through %(as ''balancing'')%'
    AND NOT EXISTS (SELECT 1 FROM evaluations e WHERE e.program_id = p.program_id)
    AND NOT EXISTS (SELECT 1 FROM programs g WHERE g.origin = 'candidate' AND g.mechanisms LIKE '%range_migration%')
"""


def violations(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Return the rows that break an invariant, by its name; empty when all hold."""
    checks = {
        "late predictions": LATE_PREDICTIONS,
        "controls without a prediction": UNPREDICTED_CONTROLS,
        "hypotheses without a rival": LONELY_HYPOTHESES,
        "discharged without evidence of a paid run": UNPROVEN_DISCHARGES,
    }
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        found = {name: connection.execute(sql).fetchall() for name, sql in checks.items()}
        found["budget"] = [row for row in connection.execute(BUDGET) if row[0] != 0]
    return {name: rows for name, rows in found.items() if rows}


def count(path: Path, sql: str, *arguments: str) -> int:
    """Return the one number of a query."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        ((number,),) = connection.execute(sql, arguments).fetchall()
    return int(number)


def recomputed(path: Path, *, swap: bool = False) -> dict[str, dict[str, tuple[str, str]]]:
    """Return (stored, recomputed) status of every hypothesis by observation, from what the ledger holds alone.

    swap: exchange the child's role: every measured effect r becomes 1 - r of the child's, as if the controls had come out
        the other way round.
    """
    found: dict[str, dict[str, tuple[str, str]]] = {}
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        connection.row_factory = sqlite3.Row
        for (observation,) in connection.execute("SELECT id FROM observations").fetchall():
            rows = connection.execute("SELECT * FROM hypotheses WHERE observation_id = ?", (observation,)).fetchall()
            designs = connection.execute("SELECT body FROM designs WHERE observation_id = ?", (observation,)).fetchall()
            if not rows or not designs:
                continue
            names = {row["id"]: row["name"] for row in rows}
            controls = connection.execute("SELECT * FROM controls WHERE observation_id = ?", (observation,)).fetchall()
            control_names = {row["id"]: row["name"] for row in controls}
            predictions = connection.execute(
                "SELECT * FROM predictions WHERE observation_id = ?", (observation,)
            ).fetchall()
            verdicts = connection.execute("SELECT * FROM verdicts WHERE observation_id = ?", (observation,)).fetchall()
            if not predictions:
                continue
            explanation = Explanation.model_validate(
                {
                    "hypotheses": [json.loads(row["body"]) for row in rows],
                    "controls": [json.loads(row["body"]) for row in controls],
                    "predictions": [
                        {
                            "hypothesis": names[row["hypothesis_id"]],
                            "control": control_names[row["control_id"]],
                            "low": row["low"],
                            "high": row["high"],
                        }
                        for row in predictions
                    ],
                }
            )
            evidence = json.loads(verdicts[0]["evidence"])
            child = PairedEffect.from_json(evidence["child_effect"])
            measurements = [ControlMeasurement.from_json(item) for item in evidence["measurements"]]
            if swap:
                measurements = [_mirrored(measurement, child) for measurement in measurements]
            decided = decide(
                explanation,
                child,
                measurements,
                Design.from_json(json.loads(designs[0]["body"])),
                alpha=evidence["alpha"],
            )
            stored = {names[row["hypothesis_id"]]: row["status"] for row in verdicts}
            found[observation] = {v.hypothesis: (stored[v.hypothesis], VerdictStatus(v.status).value) for v in decided}
    return found


def _mirrored(measurement: ControlMeasurement, child: PairedEffect) -> ControlMeasurement:
    effect = measurement.effect
    if effect is None:
        return measurement
    data = measurement.to_json()
    shared = measurement.covariance
    variance = effect.standard_error**2 + child.standard_error**2 - 2 * shared.total
    data["effect"] = effect.to_json() | {"mean": child.mean - effect.mean, "standard_error": math.sqrt(variance)}
    data["covariance"] = {"chunks": child.standard_error**2 - shared.total, "programs": 0.0}
    return ControlMeasurement.from_json(data)
