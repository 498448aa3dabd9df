"""Documents cannot drift from the code: commands, recipes, file tree, invariants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge.cli.app import app
from forge.recipe import Overrides, load_recipe

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def test_first_screen_has_exactly_two_commands() -> None:
    first = re.search(r"```sh\n(.*?)```", README, re.DOTALL)
    assert first is not None
    assert first[1].split("\n")[:-1] == ["make quickstart", "make test"]


def test_every_command_is_in_the_readme_and_has_help() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        assert f"`quantforge {name}" in README or f"quantforge {name}" in README, f"{name} is not in README.md"
        assert command.callback.__doc__, f"{name} has no help"


def test_every_recipe_is_valid() -> None:
    recipes = sorted((ROOT / "runs" / "recipes").glob("*.toml"))
    assert {path.name for path in recipes} >= {"quickstart.toml", "real_model.toml"}
    for path in recipes:
        load_recipe(
            path, Overrides(subject="nano-llama", corpus_path=None if "quick" in path.name else Path("text.txt"))
        )


def test_file_tree_of_the_readme_is_on_disk() -> None:
    tree = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    for line in tree[1].splitlines():
        path = line.split("  ")[0].strip()
        if path:
            assert (ROOT / path).exists(), f"README's tree names {path}"


def test_every_invariant_names_a_test_that_exists() -> None:
    section = ARCHITECTURE.split("## Invariants")[1].split("\n## ")[0]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", section)
    assert len(named) >= 10
    for path, name in named:
        assert re.search(rf"def {name}\b", (ROOT / path).read_text()), f"{path} has no {name}"


@pytest.mark.parametrize(
    "name", ["LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "runs/LOG.md", "constraints.txt", ".ci/run"]
)
def test_standing_files_are_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0
