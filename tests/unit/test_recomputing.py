"""What a ledger concluded follows from what it measured, and whatever was altered is found and named."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forge.cli.app import app
from forge.recomputing import Recomputation, recompute
from hypotheses.ledger import Ledger
from hypotheses.verdicts import RULE
from tests.played_campaigns import two_turns


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_turns(tmp_path_factory.mktemp("played"))


@pytest.fixture
def copy(played: Path, tmp_path: Path) -> Path:
    """A copy of the played ledger in a run folder, for a test to alter."""
    shutil.copy(played, tmp_path / "ledger.sqlite")
    (tmp_path / "recipe.toml").write_text("")
    return tmp_path / "ledger.sqlite"


def again(path: Path) -> Recomputation:
    with Ledger.open(path, read_only=True) as ledger:
        return recompute(ledger)


def alter(path: Path, statement: str, *values: object) -> None:
    """Change a row as nobody can who respects the triggers."""
    connection = sqlite3.connect(path)
    triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        connection.execute(f"DROP TRIGGER {name}")
    assert connection.execute(statement, values).rowcount > 0
    for _, sql in triggers:
        connection.execute(sql)
    connection.commit()
    connection.close()


def test_every_verdict_of_a_played_campaign_follows_from_its_measurements(played: Path) -> None:
    found = again(played)
    assert found.differences == ()
    assert found.violations == ()
    assert found.verdicts == found.agreeing == 3
    assert found.holds
    with Ledger.open(played, read_only=True) as ledger:
        assert sorted(verdict.status for verdict in ledger.verdicts()) == ["refuted", "refuted", "supported"]


def chunk(path: Path, kind: str, column: str = "chunk_nll", change: float = 0.001) -> None:
    """Alter one loss of the first evaluation of a kind."""
    connection = sqlite3.connect(path)
    row, text = connection.execute(
        f"SELECT id, {column} FROM evaluations WHERE kind = ? AND {column} <> '[]' ORDER BY reserved_seq", (kind,)
    ).fetchone()
    connection.close()
    losses = json.loads(text)
    losses[3] += change
    alter(path, f"UPDATE evaluations SET {column} = ? WHERE id = ?", json.dumps(losses), row)


def fields(found: Recomputation) -> set[str]:
    return {f"{difference.record.partition('-')[0]}.{difference.field}" for difference in found.differences}


def test_one_altered_loss_of_a_control_is_found(copy: Path) -> None:
    chunk(copy, "control")
    found = again(copy)
    assert not found.holds
    assert found.agreeing == 0
    assert "verdict.evidence.measurements[0].effect.mean" in fields(found)
    assert "verdict.evidence.verdict.checks[0].estimate" in fields(found)
    assert not any(field.startswith("obs.") for field in fields(found))


@pytest.mark.parametrize("column", ["chunk_nll", "reference_chunk_nll"])
def test_one_altered_loss_of_a_confirmation_is_found(copy: Path, column: str) -> None:
    chunk(copy, "confirmation", column)
    assert {"obs.confirmed_effect", "obs.body.confirmed.chunk_variance"} <= fields(again(copy))
    assert "verdict.evidence.child_effect.mean" in fields(again(copy))


def test_one_altered_loss_of_a_draw_is_found_in_the_noise(copy: Path) -> None:
    connection = sqlite3.connect(copy)
    (draws,) = connection.execute("SELECT evaluation_ids FROM noise").fetchone()
    (text,) = connection.execute("SELECT chunk_nll FROM evaluations WHERE id = ?", (json.loads(draws)[2],)).fetchone()
    connection.close()
    losses = json.loads(text)
    losses[0] += 0.5
    alter(copy, "UPDATE evaluations SET chunk_nll = ? WHERE id = ?", json.dumps(losses), json.loads(draws)[2])
    found = again(copy)
    assert {"noise.draw_variance", "noise.floor", "noise.draw_means[2]"} <= fields(found)


def test_a_loss_that_makes_the_effect_impossible_is_told_and_no_crash(copy: Path) -> None:
    connection = sqlite3.connect(copy)
    (control,) = connection.execute("SELECT id FROM evaluations WHERE kind = 'control' LIMIT 1").fetchone()
    connection.close()
    alter(copy, "UPDATE evaluations SET chunk_nll = '[3.0, 3.1]' WHERE id = ?", control)
    found = again(copy)
    assert not found.holds
    assert "chunks do not pair" in str(found.differences[0])


@pytest.mark.parametrize("end", ["low", "high"])
def test_one_altered_prediction_is_found(copy: Path, end: str) -> None:
    alter(copy, f"UPDATE predictions SET {end} = {end} {'-' if end == 'low' else '+'} 0.01 WHERE rowid = 1")
    found = again(copy)
    assert any(field.startswith("verdict.evidence.verdict.checks[") for field in fields(found))
    assert any(field.endswith(f"predicted.{end}") for field in fields(found))


def test_a_reversed_prediction_is_found(copy: Path) -> None:
    connection = sqlite3.connect(copy)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("DROP TRIGGER predictions_no_update")
    connection.execute("UPDATE predictions SET low = 2.0 WHERE rowid = 1")
    connection.commit()
    connection.close()
    assert "is reversed" in str(again(copy).differences[0])


def test_altered_evidence_of_a_control_is_found(copy: Path) -> None:
    """The control's evidence is exchanged for that of the program it started from: it then changed nothing."""
    alter(
        copy,
        "UPDATE evaluations SET evidence_hash = (SELECT e.evidence_hash FROM evaluations e JOIN observations o "
        "ON o.program_id = e.program_id WHERE e.kind = 'candidate') WHERE kind = 'control'",
    )
    found = again(copy)
    assert {"probe.probe[0].status", "verdict.evidence.measurements[0].executed"} <= fields(found)
    assert {"verdict.status", "verdict.evidence.verdict.void"} & fields(found)


def test_an_altered_answer_of_a_probe_is_found(copy: Path) -> None:
    alter(copy, "UPDATE probe_results SET status = 'not_executed' WHERE target_id LIKE 'ctl-%'")
    found = again(copy)
    assert "probe.probe[0].status" in fields(found)
    assert found.agreeing == found.verdicts
    assert not found.holds


@pytest.mark.parametrize(
    ("statement", "field"),
    [
        ("UPDATE verdicts SET status = 'supported' WHERE status = 'refuted'", "verdict.status"),
        ("UPDATE verdicts SET reason = 'because'", "verdict.reason"),
        ("UPDATE verdicts SET evidence = json_set(evidence, '$.verdict.alpha', 0.5)", "verdict.evidence.verdict.alpha"),
        (
            "UPDATE verdicts SET evidence = json_remove(evidence, '$.verdict.survivors')",
            "verdict.evidence.verdict.survivors",
        ),
        ("UPDATE designs SET body = json_set(body, '$.widths.half', 0.5)", "design.widths.half"),
        ("UPDATE designs SET body = json_set(body, '$.chosen', json_array('quarter'))", "design.chosen"),
        ("UPDATE observations SET confirmed_se = 2 * confirmed_se", "obs.confirmed_se"),
        ("UPDATE hypotheses SET cause = 'another' WHERE cause = 'mlp'", "hyp.cause"),
        ("UPDATE verdicts SET rule = 'verdict/0'", "verdict.rule"),
        ("UPDATE verdicts SET round = 7, status = 'supported'", "verdict.design"),
        ("UPDATE verdicts SET round = -1, status = 'supported'", "verdict.design"),
        ("DELETE FROM designs", "verdict.design"),
        ("UPDATE controls SET round = 3", "verdict.verdict"),
        ("UPDATE controls SET statement = 'another'", "ctl.statement"),
        ("UPDATE controls SET body = json_set(body, '$.edits', 'nonsense')", "ctl.control"),
        ("UPDATE controls SET body = '[]'", "ctl.control"),
        ("UPDATE hypotheses SET body = '[]'", "obs.records"),
        (
            "UPDATE hypotheses SET predecessor_id = (SELECT id FROM hypotheses LIMIT 1) WHERE cause = 'mlp'",
            "hyp.predec",
        ),
        ("UPDATE noise SET evaluation_ids = '[]'", "obs.noise"),
        ("UPDATE campaign SET recipe = '[]'", "obs.records"),
    ],
)
def test_what_was_concluded_cannot_be_altered_unseen(copy: Path, statement: str, field: str) -> None:
    alter(copy, statement)
    found = again(copy)
    assert any(name.startswith(field) for name in fields(found)), fields(found)
    assert not found.holds


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE evaluations SET split = 'search' WHERE kind = 'control'", "its id was made from another kind,"),
        ("UPDATE evaluations SET draw = draw + 5 WHERE kind = 'confirmation'", "its id was made from another kind,"),
        ("UPDATE required_edits SET mechanism = 'other'", "its id was made from another observation_id,"),
        ("UPDATE evaluations SET nll = nll - 1 WHERE kind = 'candidate'", "nats per token, its chunks of"),
        ("UPDATE evaluations SET chunk_nll = '[null]' WHERE kind = 'control'", "that are no numbers"),
        ("DELETE FROM verdicts", ", which verdicts does not hold"),
        ("DELETE FROM events WHERE kind = 'evaluation_settled'", "events between 1 and"),
    ],
)
def test_what_a_record_is_known_by_cannot_be_altered_unseen(copy: Path, statement: str, words: str) -> None:
    alter(copy, statement)
    found = again(copy)
    assert any(words in violation for violation in found.violations), found.violations
    assert not found.holds


@pytest.mark.parametrize(
    "statement", ["DELETE FROM hypotheses WHERE rowid = 1", "UPDATE noise SET evaluation_ids = '[]'"]
)
def test_a_ledger_that_cannot_be_read_whole_is_told_in_one_sentence(copy: Path, statement: str) -> None:
    alter(copy, statement)
    told = CliRunner().invoke(app, ["show", str(copy.parent)])
    assert told.exit_code in (1, 2)
    assert "show --recompute" in told.stderr
    assert told.stderr.count("\n") == 1


def test_a_part_is_not_asked_for_beside_recomputing(copy: Path) -> None:
    told = CliRunner().invoke(app, ["show", str(copy.parent), "edits", "--recompute"])
    assert told.exit_code == 2
    assert "stands in place of a part" in told.stderr


@pytest.mark.parametrize("column", ["hypotheses SET body", "verdicts SET evidence", "evaluations SET chunk_nll"])
def test_a_value_that_is_no_json_is_told_in_one_sentence(copy: Path, column: str) -> None:
    alter(copy, f"UPDATE {column} = '{{'")
    told = CliRunner().invoke(app, ["show", str(copy.parent), "--recompute"])
    assert told.exit_code == 1
    assert "the ledger holds a value that is no JSON" in told.stderr
    assert "Traceback" not in told.output


def test_an_altered_text_is_told_too(copy: Path) -> None:
    alter(copy, "UPDATE blobs SET text = text || ' ' WHERE hash = (SELECT source_hash FROM programs LIMIT 1)")
    found = again(copy)
    assert any("was altered" in violation for violation in found.violations)
    assert not found.holds


def test_the_command_says_how_many_agree_and_exits_with_1_where_one_does_not(copy: Path) -> None:
    run = CliRunner()
    good = run.invoke(app, ["show", str(copy.parent), "--recompute"])
    assert good.exit_code == 0, good.output
    assert f"3 of 3 verdicts follow from what was measured, by rule {RULE}" in good.stdout
    chunk(copy, "control")
    bad = run.invoke(app, ["show", str(copy.parent), "--recompute", "--json"])
    assert bad.exit_code == 1
    data = json.loads(bad.stdout)
    assert (data["verdicts"], data["agreeing"], data["holds"]) == (3, 0, False)
    named = {difference["field"]: difference for difference in data["differences"]}
    mean = named["evidence.measurements[0].effect.mean"]
    assert mean["stored"] - mean["recomputed"] == pytest.approx(0.001 / 24)
    told = run.invoke(app, ["show", str(copy.parent), "--recompute"])
    assert told.exit_code == 1
    assert "evidence.measurements[0].effect.mean: stored" in " ".join(told.stdout.split())


def test_a_running_campaign_is_recomputed_beside_its_writer(copy: Path) -> None:
    before = copy.read_bytes()
    with Ledger.open(copy) as writer:
        assert again(copy).holds
        assert writer.check_invariants() == []
    assert copy.read_bytes() == before
