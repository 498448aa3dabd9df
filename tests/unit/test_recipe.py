from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.corpus_spec import SampledCorpus, TextCorpus
from forge.recipe import Overrides, Recipe, RecipeError, dump, load_recipe, parse_recipe

RECIPES = Path(__file__).resolve().parents[2] / "runs" / "recipes"

TEXT = """
[campaign]
name = "try"
budget_calls = 8
[subject]
reference = "nano-llama"
[corpus]
kind = "sampled"
"""
TEXT_CORPUS = """
kind = "text"
path = "words.txt"
sequence_length = 64
calibration = [0, 4]
gate = [4, 6]
search = [6, 10]
confirm = [10, 12]
sealed = [12, 14]
"""


def load(tmp_path: Path, text: str, **overrides: Any) -> Recipe:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, Overrides(**overrides))


def problem_of(tmp_path: Path, text: str, **overrides: Any) -> str:
    with pytest.raises(RecipeError) as info:
        load(tmp_path, text, **overrides)
    return str(info.value)


def test_defaults_fill_what_a_short_recipe_leaves_out(tmp_path: Path) -> None:
    recipe = load(tmp_path, TEXT)
    assert recipe.corpus == SampledCorpus(kind="sampled")
    assert recipe.statistics.trigger_sigma == 5.0
    assert recipe.statistics.error_rate == 0.02
    assert recipe.campaign.contract_class == "online"
    assert recipe.sandbox.mode == "bubblewrap"
    assert recipe.limits.build().memory_bytes == 8 * 2**30


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "budget_calls = 8",
            "budget_call = 8",
            "unknown key 'budget_call' in section [campaign]; did you mean 'budget_calls'?",
        ),
        ("[subject]", "[subjects]", "unknown section 'subjects'; did you mean 'subject'?"),
        (
            'kind = "sampled"',
            'kind = "sampled"\nserach = 3',
            "unknown key 'serach' in section [corpus]; did you mean 'search'?",
        ),
        ('kind = "sampled"', 'kind = "wiki"', "unknown kind 'wiki' in section [corpus]; known: sampled, text, dataset"),
        ('kind = "sampled"', "", "key 'kind' is missing in section [corpus]"),
        ("budget_calls = 8", "", "key 'budget_calls' is missing in section [campaign]; give it there or with --budget"),
        (
            'reference = "nano-llama"',
            "",
            "key 'reference' is missing in section [subject]; give it there or with --subject",
        ),
        (
            "budget_calls = 8",
            'budget_calls = "8"',
            "budget_calls = '8' in section [campaign]: input should be a valid integer",
        ),
        (
            "budget_calls = 8",
            "budget_calls = 0",
            "budget_calls = 0 in section [campaign]: input should be greater than",
        ),
        ("budget_calls = 8", "budget_calls = true", "budget_calls = True"),
        (
            "budget_calls = 8",
            'budget_calls = 8\nproposer = "gpt"',
            "proposer = 'gpt' in section [campaign]: input should be",
        ),
        ("budget_calls = 8", 'budget_calls = 8\nproposer = "openai"', "needs the name of a model"),
        ('name = "try"', 'name = "../try"', "name = '../try'"),
        ("[corpus]", "[statistics]\nerror_rate = 0.7\n[corpus]", "error_rate = 0.7"),
        ("[corpus]", "[statistics]\ntrigger_sigma = nan\n[corpus]", "trigger_sigma = nan"),
        ("[corpus]", "[llm]\nmax_cost = 1.0\n[corpus]", "max_cost needs prompt_price and completion_price"),
        ("[corpus]", '[llm]\nkey_env = "sk-abc"\n[corpus]', "key_env = 'sk-abc'"),
        ("[corpus]", "[llm]\nkey = 'sk-abc'\n[corpus]", "unknown key 'key' in section [llm]; did you mean 'key_env'?"),
        ("[corpus]", "[evaluation]\nnoise_draws = 2\n[corpus]", "noise_draws = 2"),
        ("[subject]", "subject = 3\n[other]", "'subject'"),
        ('kind = "sampled"', TEXT_CORPUS.replace("[4, 6]", "[3, 6]"), "overlap; ranges are half-open"),
        (
            'kind = "sampled"',
            TEXT_CORPUS.replace('path = "words.txt"', ""),
            "'path' is missing in section [corpus]; give it there or with --corpus",
        ),
        ("[campaign]", "[campaign", "is no valid TOML"),
    ],
)
def test_what_is_wrong_is_told_with_its_place_and_a_repair(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in TEXT
    assert words in problem_of(tmp_path, TEXT.replace(old, new, 1))


def test_every_problem_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    told = problem_of(tmp_path, TEXT.replace("budget_calls = 8", "budget_calls = 0\nsed = 1"))
    assert len(told.split("\n")) == 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="does not exist; give the path"):
        load_recipe(tmp_path / "absent.toml")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="no UTF-8 text: byte 0 is 0xff"):
        load_recipe(tmp_path / "binary.toml")


def test_overrides_are_checked_and_written_into_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = TEXT.replace('kind = "sampled"', TEXT_CORPUS)
    recipe = load(
        tmp_path,
        text,
        budget_calls=3,
        seed=7,
        subject="./model",
        corpus_path=Path("other.txt"),
        sandbox="none",
        out=Path("here"),
    )
    assert (recipe.campaign.budget_calls, recipe.campaign.seed, recipe.sandbox.mode) == (3, 7, "none")
    assert isinstance(recipe.corpus, TextCorpus)
    assert recipe.corpus.path == Path(os.getcwd()) / "other.txt"
    assert recipe.subject.reference == str(Path(os.getcwd()) / "model")
    assert recipe.campaign.out == Path(os.getcwd()) / "here"
    (tmp_path / "copy.toml").write_text(dump(recipe))
    monkeypatch.chdir("/")
    assert load_recipe(tmp_path / "copy.toml") == recipe
    assert "budget_calls = 0" in problem_of(tmp_path, text, budget_calls=0)
    assert "mode = 'chroot' in section [sandbox]" in problem_of(tmp_path, text, sandbox="chroot")


def test_a_text_for_a_recipe_without_chunk_ranges_is_refused(tmp_path: Path) -> None:
    assert "--corpus 'x.txt' needs a recipe whose [corpus]" in problem_of(tmp_path, TEXT, corpus_path=Path("x.txt"))


def test_hub_ids_and_shipped_names_are_left_alone(tmp_path: Path) -> None:
    for reference in ("nano-llama", "org/name"):
        assert load(tmp_path, TEXT, subject=reference).subject.reference == reference


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_are_valid_and_write_back(path: Path, tmp_path: Path) -> None:
    needs_paths = "--subject" in path.read_text()
    overrides = Overrides(subject="/models/m", corpus_path=Path("/t.txt")) if needs_paths else Overrides()
    recipe = load_recipe(path, overrides)
    copy = tmp_path / "copy.toml"
    copy.write_text(dump(recipe))
    assert load_recipe(copy) == recipe
    assert dump(load_recipe(copy)) == dump(recipe)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda c: st.lists(c, max_size=2),
    max_leaves=3,
)
SECTIONS = st.sampled_from([*Recipe.model_fields, "other"])
KEYS = st.sampled_from(["name", "seed", "budget_calls", "reference", "kind", "path", "mode", "model", "search", "x"])


@given(st.dictionaries(SECTIONS, VALUES | st.dictionaries(KEYS, VALUES, max_size=4), max_size=6))
def test_any_data_is_a_recipe_or_a_problem(data: dict[str, Any]) -> None:
    try:
        parse_recipe(data)
    except RecipeError as problem:
        told = str(problem)
    else:
        told = "valid"
    assert told
