"""A campaign goes on with the recipe and the surroundings it began with, or says exactly what differs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluators.evaluator import runtime_versions
from forge import continuity
from forge.continuity import (
    ReplayError,
    recorded_recipe,
    require_all_met,
    require_same_recipe,
    require_same_surroundings,
    surroundings,
)
from forge.errors import RecipeError
from forge.progress import QuietProgress
from forge.recipe import Recipe, parse_recipe
from hypotheses.ledger import Ledger, NewNote
from tests.ledger_builders import new_campaign, new_program


class Told(QuietProgress):
    """Keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def milestone(self, message: str) -> None:
        self.lines.append(message)


def recipe(**sections: dict[str, Any]) -> Recipe:
    data: dict[str, Any] = {
        "campaign": {"name": "t", "budget_calls": 4, "seed": 7},
        "subject": {"reference": "nano-llama"},
        "corpus": {"kind": "sampled", "gate": 2},
    }
    for section, table in sections.items():
        data[section] = data.get(section, {}) | table
    return parse_recipe(data)


RECORDED = recorded_recipe(recipe())


def refused(now: Recipe) -> str:
    with pytest.raises(RecipeError) as info:
        require_same_recipe(RECORDED, now, QuietProgress())
    return str(info.value)


def test_the_same_recipe_goes_on_wherever_its_folder_is() -> None:
    told = Told()
    require_same_recipe(RECORDED, recipe(campaign={"out": "/elsewhere"}), told)
    assert told.lines == []


def test_every_changed_key_is_named_with_both_values() -> None:
    told = refused(recipe(campaign={"budget_calls": 9}, limits={"wall_s": 5.0}, corpus={"gate": 3}))
    assert told.startswith("recipe.toml was changed since this run began: ")
    assert told.endswith("figures would not be comparable; bring back what it was, or start a new run")
    assert re.findall(r"\[\w+\] \w+ was \S+ and is now [^\s;:]+", told) == [
        "[campaign] budget_calls was 4 and is now 9",
        "[corpus] gate was 2 and is now 3",
        "[limits] wall_s was 900.0 and is now 5.0",
    ]


CHANGED: dict[str, Any] = {
    "name": "u", "seed": 8, "budget_calls": 5, "seed_program": "gptq", "contract_class": "folded", "max_turns": 3,
    "device": "cuda", "sequence_length": 64, "calibration": 3, "gate": 3, "search": 5, "confirm": 5,
    "sealed": 5, "bos": True, "calibration_chunks": 4, "noise_draws": 6, "threads": 2, "wall_s": 5.0, "memory_gb": 1.0,
    "output_mb": 1.0, "processes": 9, "mode": "none", "promotion_sigma": 1.0, "trigger_sigma": 1.0, "confirm_sigma": 1.0,
    "error_rate": 0.1, "explain_losses": False, "temperature": 0.5, "max_reply_tokens": 9, "reference": "nano-qwen3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("section", "key"), [(section, key) for section, table in RECORDED.items() for key in table if key in CHANGED]
)
def test_a_key_that_changes_figures_or_replies_is_refused(section: str, key: str) -> None:
    told = refused(recipe(**{section: {key: CHANGED[key]}}))
    assert f"[{section}] {key} was {RECORDED[section][key]!r} and is now {CHANGED[key]!r}" in told


def test_another_kind_of_corpus_names_its_keys(tmp_path: Path) -> None:
    text = {"kind": "text", "path": str(tmp_path / "t.txt"), "sequence_length": 8, "gate": [2, 4], "calibration": [0, 2],
            "search": [4, 6], "confirm": [6, 8], "sealed": [8, 9]}  # fmt: skip
    told = refused(recipe(corpus=text))
    assert "[corpus] kind was 'sampled' and is now 'text'" in told
    assert "[corpus] gate was 2 and is now [2, 4]" in told


def test_keys_that_only_reach_a_model_may_change_and_are_told() -> None:
    told = Told()
    changes = {"max_tokens_total": 5000, "request_timeout_s": 9.0, "key_env": "OTHER_KEY"}
    require_same_recipe(RECORDED, recipe(llm=changes), told)
    (line,) = told.lines
    assert line.startswith("going on with a changed recipe: ")
    assert "[llm] max_tokens_total was None and is now 5000" in line
    assert line.count(" was ") == 3


def test_a_key_that_came_later_is_its_default_in_older_runs() -> None:
    older = {section: dict(table) for section, table in RECORDED.items()}
    del older["evaluation"]["threads"]
    require_same_recipe(older, recipe(), QuietProgress())
    with pytest.raises(RecipeError, match=r"\[evaluation\] threads was 1 and is now 2"):
        require_same_recipe(older, recipe(evaluation={"threads": 2}), QuietProgress())


def test_a_key_of_another_version_is_no_mistake_of_the_recipe() -> None:
    newer = {section: dict(table) for section, table in RECORDED.items()}
    newer["campaign"]["arms"] = 3
    with pytest.raises(RecipeError, match="'arms'.*begun by another version of QuantForge"):
        require_same_recipe(newer, recipe(), QuietProgress())


# Surroundings


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        yield ledger


def begin(ledger: Ledger, *, device: str = "cpu", processor: str | None = None, **versions: str) -> None:
    details = surroundings(recipe()) | ({"processor": processor} if processor else {})
    ledger.record_environment(device=device, versions=runtime_versions() | versions, details=details)


def test_the_same_surroundings_and_a_run_that_recorded_none_go_on(ledger: Ledger) -> None:
    told = Told()
    require_same_surroundings(ledger, recipe(), told)
    begin(ledger)
    require_same_surroundings(ledger, recipe(), told)
    assert told.lines == []


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ({"torch": "2.0.0"}, "torch was '2.0.0' and is now"),
        ({"transformers": "4.0"}, "transformers was '4.0' and is now"),
        ({"quantforge": "0.0.1"}, "quantforge was '0.0.1' and is now"),
        ({"python": "3.9.1"}, "python was '3.9.1' and is now"),
        ({"device": "cuda"}, "device was 'cuda' and is now 'cpu'"),
    ],
)
def test_other_software_or_another_device_is_refused(ledger: Ledger, then: dict[str, str], words: str) -> None:
    begin(ledger, **then)
    with pytest.raises(RecipeError) as info:
        require_same_surroundings(ledger, recipe(), QuietProgress())
    assert words in str(info.value)
    assert "bring back what it was, or start a new run" in str(info.value)


def test_another_catalogue_is_refused_only_where_it_proposes(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(ledger)
    monkeypatch.setattr(continuity, "catalogue_hash", lambda: "another")
    with pytest.raises(RecipeError, match="catalogue was '[0-9a-f]+' and is now 'another'"):
        require_same_surroundings(ledger, recipe(), QuietProgress())
    other = recipe(campaign={"proposer": "openai"}, llm={"model": "m"})
    require_same_surroundings(ledger, other, QuietProgress())


def test_another_processor_and_a_patch_of_python_are_told(ledger: Ledger) -> None:
    patch = ".".join([*runtime_versions()["python"].split(".")[:2], "99"])
    begin(ledger, processor="an abacus", python=patch)
    told = Told()
    require_same_surroundings(ledger, recipe(), told)
    (line,) = told.lines
    assert "last digits may differ" in line
    assert "processor was 'an abacus' and is now" in line
    assert f"python was '{patch}'" in line


# The end of a walk


def test_a_walk_that_ends_before_what_was_recorded_is_told(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, new_campaign()) as ledger:
        ledger.add_program(new_program(0))
        second = ledger.add_program(new_program(1))
        ledger.add_note(NewNote(turn=1, topic="stopped", text="the server is down"))
        ledger.add_note(NewNote(turn=1, topic="end", text="60 turns are over"))
    with Ledger.open(path) as ledger:
        ledger.add_program(new_program(0))
        with pytest.raises(ReplayError, match=f"before 1 recorded events, the first of them program {second.id}"):
            require_all_met(ledger, "60 turns are over")
        ledger.add_program(new_program(1))
        require_all_met(ledger, "60 turns are over")
        with pytest.raises(ReplayError, match="the first of them note"):
            require_all_met(ledger, "all evaluator calls are spent")
