"""Small real campaigns for tests: a tiny random model, few tokens, real sandboxed workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
memory_gb = 2.0

[statistics]
explain_losses = false
"""


def tiny_recipe(folder: Path, *, budget: int = 4, chunks: int = 6, **overrides: object) -> Recipe:
    """Return a recipe of a campaign that takes seconds."""
    path = folder / "tiny.toml"
    path.write_text(TINY.format(budget=budget, chunks=chunks))
    return load_recipe(path, Overrides(**overrides))  # type: ignore[arg-type]


def run_quickstart(folder: Path, *arguments: str) -> Path:
    """Run the quickstart as a user does; return its ledger."""
    command = [sys.executable, "-m", "forge", "run", str(QUICKSTART), "--out", str(folder), "--json", *arguments]
    # As a user runs it: the number of threads changes the last bits, and with them the luck.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    # Threads that wait by spinning would take a core from the other test process.
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    done = subprocess.run(command, capture_output=True, text=True, timeout=1400, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["violations"] == []
    return folder / "ledger.sqlite"
