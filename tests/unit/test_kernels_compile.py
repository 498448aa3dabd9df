"""Kernels compile for a Hopper GPU, on a machine without one, and those that should stay within registers do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

IN_REGISTERS = ("encode, hadamard 1", "encode, hadamard 32", "encode search")


def test_they_compile_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_compiling", "--few"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8, sorted(found)
    # A thread that owns whole blocks needs no shared memory; with tiles laid out otherwise they take twice the instructions.
    for name in IN_REGISTERS:
        assert found[name] == 0, f"{name} takes {found[name]} bytes of shared memory"
