"""`doctor`: what works on this machine, what does not, and how to mend it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evaluators.sandbox import diagnose_sandbox
from evaluators.subjects import SHIPPED, shipped_folder
from forge.run_folder import PACKAGES, describe_environment

Emit = Callable[[Any], None]
MIN_DISK_GB = 2.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check. `needed` ones decide the exit code; a protection of the sandbox is on or off."""

    name: str
    ok: bool
    detail: str
    repair: str = ""
    needed: bool = True
    is_protection: bool = False

    @property
    def mark(self) -> str:
        """What stands beside its name in the table."""
        if self.is_protection:
            return "on" if self.ok else ("OFF" if self.needed else "off")
        return "ok" if self.ok else ("FAILED" if self.needed else "no")


def examine(console: Console, emit: Emit | None) -> bool:
    """Print every finding; return whether a campaign can run here."""
    findings = [*_sandbox(), *_machine(), *_subjects(), *_model()]
    healthy = all(finding.ok for finding in findings if finding.needed)
    if emit is not None:
        emit({"healthy": healthy, "findings": [asdict(finding) for finding in findings]})
        return healthy
    table = Table()
    for heading in ("check", "", "found", "repair"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(
            Text(finding.name), finding.mark, Text(finding.detail), Text("" if finding.ok else finding.repair)
        )
    console.print(table)
    console.print(Text("a campaign can run here" if healthy else "a campaign would refuse to start here"))
    return healthy


def _sandbox() -> list[Finding]:
    return [
        Finding(
            name=f"sandbox: {check.name}",
            ok=check.ok,
            detail=check.detail,
            repair=check.repair,
            needed=check.needed,
            is_protection=True,
        )
        for check in diagnose_sandbox()
    ]


def _machine() -> list[Finding]:
    facts = describe_environment()
    versions = ", ".join(f"{name} {facts['packages'][name]}" for name in PACKAGES)
    free_gb = shutil.disk_usage(Path.cwd()).free / 2**30
    findings = [
        Finding(name="python", ok=True, detail=f"{platform.python_version()}; {versions}"),
        Finding(
            name="disk",
            ok=free_gb >= MIN_DISK_GB,
            detail=f"{free_gb:.1f} GB free in this folder",
            repair=f"a run folder wants {MIN_DISK_GB:.0f} GB; free some, or give --out on another disk",
        ),
    ]
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        findings.append(Finding(name="gpu", ok=True, detail=names, needed=False))
    else:
        findings.append(
            Finding(
                name="gpu",
                ok=False,
                detail="no CUDA device that torch can use",
                repair='not needed: set device = "cpu" in [subject]',
                needed=False,
            )
        )
    return findings


def _subjects() -> list[Finding]:
    findings = []
    for name in SHIPPED:
        folder = shipped_folder(name)
        findings.append(
            Finding(
                name=f"subject {name}",
                ok=(folder / "model.safetensors").is_file(),
                detail="shipped",
                repair="reinstall the package: its data files are missing",
            )
        )
    return findings


def _model() -> list[Finding]:
    has_key = bool(os.environ.get("OPENAI_API_KEY"))
    return [
        Finding(
            name="language model",
            ok=has_key,
            detail="OPENAI_API_KEY is set" if has_key else "OPENAI_API_KEY is not set",
            repair="only proposer 'openai' needs it; 'catalogue' works without",
            needed=False,
        )
    ]
