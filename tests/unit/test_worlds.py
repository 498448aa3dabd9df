"""Generated worlds: that they are what they say, that the same number gives the same world, and that counts add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from forge.cli.app import app
from forge.recipe import Statistics
from forge.worlds.bench import Count, judge_worlds
from forge.worlds.causes import CAUSES, LUCK
from forge.worlds.generate import KINDS, World, make_world
from forge.worlds.judge import WAYS, judge, observe
from forge.worlds.losses import CONFIRM, SEARCH, SubjectLosses, load_losses
from hypotheses.verdicts import VerdictStatus

LOSSES = load_losses()
WORLDS = [make_world(number, 5, LOSSES) for number in range(150)]


def misses(world: World) -> list[str]:
    """Controls for which the true cause predicts what does not happen."""
    return [
        p.control
        for p in world.explanation.predictions
        if p.hypothesis == world.truth and not p.interval.contains(world.retained[p.control])
    ]


def test_the_losses_that_ship_are_of_two_subjects_on_two_splits() -> None:
    assert sorted(LOSSES) == ["nano-llama", "nano-qwen3"]
    for losses in LOSSES.values():
        assert len(losses.lucks) == 16
        assert len(losses.patterns) >= 4
        for split in (SEARCH, CONFIRM):
            lengths = {len(base[split]) for base in losses.bases.values()} | {len(luck[split]) for luck in losses.lucks}
            assert lengths == {len(losses.full_precision[split])}
        assert all(float(pattern[SEARCH].mean()) == pytest.approx(1.0) for pattern in losses.patterns)
        assert losses.reference_damage > 0.1


def test_the_same_number_gives_the_same_world() -> None:
    assert [make_world(number, 5, LOSSES) for number in (3, 0)] == [WORLDS[3], WORLDS[0]]
    assert make_world(3, 6, LOSSES) != WORLDS[3]


def test_kinds_are_what_they_say_and_each_is_there() -> None:
    for world in WORLDS:
        keys = {hypothesis.key for hypothesis in world.explanation.hypotheses}
        if world.kind == "none of these":
            assert world.truth is None
            assert world.cause not in keys
        else:
            assert world.truth == world.cause
            assert world.truth in keys
            assert bool(misses(world)) == (world.kind == "misspecified"), (world.kind, misses(world))
        assert set(world.retained) == set(world.controls) == {c.key for c in world.explanation.controls}
    assert {world.kind for world in WORLDS} == set(KINDS)
    assert {world.cause for world in WORLDS} == {*CAUSES, LUCK}
    assert sum(world.kind == "misspecified" for world in WORLDS) > 0.2 * len(WORLDS)


def quiet(losses: SubjectLosses) -> SubjectLosses:
    """The same subject with a thousandth of the luck and effects that are the same on every chunk."""
    return replace(
        losses,
        lucks=tuple({split: 1e-3 * values for split, values in luck.items()} for luck in losses.lucks),
        patterns=tuple({split: np.ones_like(values) for split, values in p.items()} for p in losses.patterns),
    )


def test_almost_without_noise_the_truth_is_never_refuted_and_nearly_always_supported_where_it_is_separated() -> None:
    losses, statistics = {name: quiet(one) for name, one in LOSSES.items()}, Statistics()
    separated, supported = 0, 0
    for number in range(120):
        world = make_world(number, 9, losses)
        confirmed = observe(world, statistics)
        if world.kind != "well specified" or confirmed is None:
            continue
        for way, found in judge(world, confirmed, statistics, number).items():
            assert world.truth is not None
            assert found.statuses[world.truth] is not VerdictStatus.REFUTED, (number, way, found)
            wrong = [key for key, status in found.statuses.items() if status is VerdictStatus.SUPPORTED]
            assert wrong in ([], [world.truth]), (number, way, found)
            separated += found.is_separated
            supported += found.is_separated and wrong == [world.truth]
    # A measurement at the very end of its prediction may lie outside by a hair.
    assert separated > 60
    assert supported >= 0.9 * separated, (supported, separated)


def test_counts_add_up_and_more_of_the_same_gives_the_same() -> None:
    tally = judge_worlds(30, 2)
    document = tally.to_json(worlds=30, seed=2)
    assert json.loads(json.dumps(document)) == judge_worlds(30, 2).to_json(worlds=30, seed=2)
    for way in WAYS:
        rows = document["ways"][way]
        assert rows["all"]["worlds"] == sum(rows[kind]["worlds"] for kind in KINDS) == 30
        for row in rows.values():
            truths = row["true_supported"] + row["true_refuted"] + row["true_inconclusive"]
            assert truths <= row["worlds"]
            assert row["supported_separated"] <= min(row["separated"], row["true_supported"])
    assert document["ways"]["cheapest set"]["all"]["calls"] <= document["ways"]["every control"]["all"]["calls"]
    assert Count().rates()["false_refutation"] is None


def test_the_command_prints_every_way_and_refuses_what_cannot_be(tmp_path: Path) -> None:
    out = tmp_path / "verdicts.json"
    done = CliRunner().invoke(app, ["bench", "verdicts", "--worlds", "3", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(out.read_text())
    assert set(json.loads(done.stdout)["ways"]) == set(WAYS)
    shown = CliRunner().invoke(app, ["bench", "verdicts", "--worlds", "3"])
    assert all(way.split()[0] in shown.stdout for way in WAYS), shown.output
    for given, told in (
        (["--worlds", "0"], "worlds is 0; give at least 1"),
        (["--out", str(tmp_path)], "cannot be written"),
    ):
        refused = CliRunner().invoke(app, ["bench", "verdicts", *given])
        assert refused.exit_code == 2, refused.output
        assert told in refused.output
        assert "Traceback" not in refused.output
