"""What a command loads before it does anything."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.campaign_builders import ROOT


def test_a_ledger_is_shown_without_the_packages_that_take_seconds_to_load() -> None:
    script = "import sys, forge.cli.showing; print(sorted({'torch', 'transformers', 'scipy.stats'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
