"""A run folder is made whole or not at all, and what lies in it is never half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forge.run_folder import PACKAGES, RunFolder, RunFolderError, describe_environment, write_atomically
from hypotheses.ledger.errors import LedgerStorageError


def create(root: Path) -> RunFolder:
    return RunFolder.create(root, recipe_toml='name = "ä"\n', environment={"seed": 1})


def test_a_new_folder_holds_recipe_environment_and_artifacts(tmp_path: Path) -> None:
    folder = create(tmp_path / "deep" / "down" / "run")
    assert folder.recipe.read_text(encoding="utf-8") == 'name = "ä"\n'
    assert json.loads(folder.environment.read_text()) == {"seed": 1}
    assert folder.artifacts.is_dir()
    assert [path.name for path in folder.root.parent.iterdir()] == ["run"]
    assert folder.root.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("there", ["folder", "file", "dangling link"])
def test_what_is_there_already_is_left_alone(tmp_path: Path, there: str) -> None:
    root = tmp_path / "run"
    if there == "folder":
        root.mkdir()
    elif there == "file":
        root.write_text("mine")
    else:
        root.symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="exists already; continue it with `quantforge resume"):
        create(root)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("name", ["file/run", "n" * 300])
def test_a_folder_that_cannot_be_made_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be made: .*; name another with --out"):
        create(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(RunFolderError, match="No space left"):
        create(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_what_belongs_in_is_there_before_the_folder_has_its_name(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def fill(made: RunFolder) -> None:
        assert not root.exists()
        assert made.recipe.is_file()
        made.ledger.write_text("whole")

    folder = RunFolder.create(root, recipe_toml="", environment={}, fill=fill)
    assert folder.ledger.read_text() == "whole"


def test_a_failure_while_it_is_filled_is_told_as_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    def fill(made: RunFolder) -> None:
        made.ledger.write_text("half")
        raise LedgerStorageError("the disk is full")

    with pytest.raises(LedgerStorageError, match="the disk is full"):
        RunFolder.create(tmp_path / "run", recipe_toml="", environment={}, fill=fill)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_half_written_is_swept_away(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    halves = [folder.artifacts / ".ab.safetensors.x1.tmp", folder.root / ".best.py-x1", folder.root / ".report.md-x1"]
    whole = [folder.artifacts / "ab.safetensors", folder.best, folder.report, folder.recipe, folder.environment]
    for path in (*halves, *whole):
        path.write_text("text")
    left = folder.artifacts / ".trace-x1.tmp"
    left.mkdir()
    (left / "ab.safetensors").write_text("text")
    folder.sweep()
    assert not left.exists()
    assert [path for path in halves if path.exists()] == []
    assert [path for path in whole if not path.exists()] == []


def test_only_a_folder_with_recipe_and_ledger_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no recipe\.toml and no ledger\.sqlite"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="no run folder"):
        RunFolder.open(tmp_path / ("n" * 300))
    folder = create(tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"it has no ledger\.sqlite"):
        RunFolder.open(folder.root)
    folder.ledger.write_bytes(b"")
    assert RunFolder.open(folder.root) == folder
    folder.discard()
    assert not folder.root.exists()
    folder.discard()


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    write_atomically(path, "old")
    write_atomically(path, "new: ä漢")
    assert path.read_text(encoding="utf-8") == "new: ä漢"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [item.name for item in tmp_path.iterdir()] == ["report.md"]
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "new: ä漢"
    assert [item.name for item in tmp_path.iterdir()] == ["report.md"]


def test_the_environment_names_versions_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    facts = describe_environment(seed=3)
    assert set(facts["packages"]) == set(PACKAGES)
    assert facts["packages"]["torch"] != "not installed"
    assert facts["seed"] == 3
    text = json.dumps(facts)
    assert "sk-secret" not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"
