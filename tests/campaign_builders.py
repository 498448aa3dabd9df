"""Small real campaigns for tests: a tiny random model, few tokens, real sandboxed workers."""

from __future__ import annotations

from pathlib import Path

from forge.recipe import Overrides, Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "runs" / "recipes" / "quickstart.toml"

TINY = """
[campaign]
name = "tiny"
seed = 12
budget_calls = {budget}
contract_class = "corrected"
max_turns = 12

[subject]
reference = "nano-llama"

[corpus]
kind = "sampled"
calibration = 8
gate = 1
search = {chunks}
confirm = {chunks}
sequence_length = 64

[evaluation]
calibration_chunks = 4

[limits]
wall_s = 120.0
memory_gb = 4.0

[statistics]
explain_losses = false
"""


def tiny_recipe(folder: Path, *, budget: int = 4, chunks: int = 6, **overrides: object) -> Recipe:
    """Return a recipe of a campaign that takes seconds."""
    path = folder / "tiny.toml"
    path.write_text(TINY.format(budget=budget, chunks=chunks))
    return load_recipe(path, Overrides(**overrides))  # type: ignore[arg-type]
