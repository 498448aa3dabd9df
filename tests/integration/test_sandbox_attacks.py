"""Attacks as tests: hostile programs through the real evaluator. `evaluators/SECURITY.md` lists what each one shows.

``--sandbox none`` runs them without isolation, so that one sees which properties then fail; `test_no_isolation` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evaluators.artifact import ArtifactError
from evaluators.errors import ProgramError
from evaluators.results import Outcome
from evaluators.sandbox import BubblewrapIsolation, Isolation, NoIsolation
from tests.attacks import ATTACKS
from tests.attacks.artifacts import FILE_ATTACKS, FileAttack, path_attacks, read_safetensors, write_safetensors
from tests.attacks.attack import HONEST, Attack
from tests.attacks.range import Range


@pytest.fixture(scope="module")
def isolation(request: pytest.FixtureRequest) -> Isolation:
    return NoIsolation() if request.config.getoption("--sandbox") == "none" else BubblewrapIsolation()


@pytest.fixture(scope="module")
def range_(isolation: Isolation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    with Range(tmp_path_factory.mktemp("attacks"), isolation) as opened:
        yield opened


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave out, without isolation, what would harm the machine of whoever looks."""
    if metafunc.function is test_attacks_fail:
        is_isolated = metafunc.config.getoption("--sandbox") != "none"
        attacks = [attack for attack in ATTACKS if is_isolated or not attack.harm]
        marks = {True: (), False: (pytest.mark.slow,)}
        metafunc.parametrize("attack", [pytest.param(a, id=a.name, marks=marks[a.quick]) for a in attacks])


def test_attacks_fail(range_: Range, attack: Attack) -> None:
    problems = range_.carry_out(attack)
    assert problems == [], f"{attack.property}: does not hold"


@pytest.mark.parametrize("attack", [pytest.param(attack, id=attack.name) for attack in FILE_ATTACKS])
def test_forged_artifact_files_are_refused(range_: Range, attack: FileAttack) -> None:
    evaluator = range_.evaluators["patient"]
    assert range_.honest.artifact_hash is not None
    path = evaluator.artifacts_dir / f"{range_.honest.artifact_hash}.safetensors"
    good = path.read_bytes()
    try:
        write_safetensors(path, *attack.forge(*read_safetensors(path)))
        with pytest.raises((ArtifactError, ProgramError)):
            evaluator.evaluate(HONEST, split="search", reference_artifact=range_.honest.artifact_hash)
        with pytest.raises((ArtifactError, ProgramError)):
            evaluator.score_artifact(range_.honest.artifact_hash, "search")
    finally:
        path.write_bytes(good)
    assert evaluator.score_artifact(range_.honest.artifact_hash, "search") == range_.honest.chunk_nll


def test_names_of_artifacts_lead_nowhere_else(range_: Range) -> None:
    evaluator = range_.evaluators["patient"]
    good = evaluator.artifacts_dir / f"{range_.honest.artifact_hash}.safetensors"
    names = path_attacks(evaluator.artifacts_dir, good)
    try:
        for what, name in names.items():
            with pytest.raises(ArtifactError):
                evaluator.load_artifact(name)
            assert what == "link" or not evaluator.has_artifact(name), f"{what}: {name!r} is taken for an artifact"
    finally:
        (evaluator.artifacts_dir / f"{names['link']}.safetensors").unlink()


def test_a_failure_of_the_host_is_no_outcome(range_: Range, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    evaluator = range_.evaluators["patient"]
    monkeypatch.setattr("evaluators.session_server.SessionServer.install", fail)
    with pytest.raises(OSError, match="No space left"):
        evaluator.evaluate(HONEST, split="search")
    monkeypatch.undo()
    result = evaluator.evaluate(HONEST, split="search")
    assert (result.outcome, result.chunk_nll) == (Outcome.SCORED, range_.honest.chunk_nll)
