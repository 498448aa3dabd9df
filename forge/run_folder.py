"""The folder of one run: where everything a campaign leaves behind is kept.

    recipe.toml        the recipe as it ran, overrides included
    environment.json   versions, device, commit, seeds, hashes; written before the first evaluation
    ledger.sqlite      the record of everything (and ledger.sqlite-wal while it runs)
    blobs/             texts of the record that are too long for a row, by hash; they belong to ledger.sqlite
    artifacts/         quantized subjects by hash, safetensors
    best.py            source of the incumbent
    report.md          what was found, rewritten when the run ends

A run folder is made whole or not at all: it is filled under a temporary name, its ledger included, and renamed. What a killed
process was writing has a name that begins with a dot, and is swept away by the next one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from evaluators.errors import HostError
from forge.errors import ForgeError
from hypotheses.ledger.blob_files import flush_folder

PACKAGES = (
    "quantforge",
    "torch",
    "transformers",
    "safetensors",
    "sqlalchemy",
    "pydantic",
    "scipy",
    "openai",
    "datasets",
)


class RunFolderError(ForgeError, ValueError):
    """The run folder cannot be made or is no run folder; the message holds the repair."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside one run folder."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.toml"

    @property
    def environment(self) -> Path:
        return self.root / "environment.json"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def best(self) -> Path:
        return self.root / "best.py"

    @property
    def report(self) -> Path:
        return self.root / "report.md"

    @classmethod
    def create(
        cls,
        root: Path,
        *,
        recipe_toml: str,
        environment: dict[str, Any],
        fill: Callable[[RunFolder], None] | None = None,
    ) -> RunFolder:
        """Make the folder with its recipe and environment, and with whatever `fill` puts in before it gets its name.

        Raises:
            RunFolderError: the folder exists already, or cannot be written.
        """
        cls.require_free(root)
        scratch = None
        try:
            try:
                root.parent.mkdir(parents=True, exist_ok=True)
                scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}-", dir=root.parent))
                made = cls(scratch)
                _write_flushed(made.recipe, recipe_toml)
                _write_flushed(made.environment, json.dumps(environment, indent=2, sort_keys=True) + "\n")
                made.artifacts.mkdir()
                scratch.chmod(0o755)
            except OSError as err:
                raise _cannot_be_made(root, err) from err
            if fill is not None:
                fill(made)
            try:
                flush_folder(scratch)
                scratch.rename(root)
                flush_folder(root.parent)
            except OSError as err:
                raise _cannot_be_made(root, err) from err
        except BaseException:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        return cls(root)

    @staticmethod
    def require_free(root: Path) -> None:
        """Check that a run folder can get this name.

        Raises:
            RunFolderError: something is there already.
        """
        if os.path.lexists(root):
            raise RunFolderError(
                f"run folder {str(root)!r} exists already; continue it with `quantforge resume {root}`, "
                "or name another with --out"
            )

    @classmethod
    def open(cls, root: Path) -> RunFolder:
        """Return the folder of an earlier run.

        Raises:
            RunFolderError: there is no run in it.
        """
        folder = cls(root)
        missing = [path.name for path in (folder.recipe, folder.ledger) if not os.path.isfile(path)]
        if missing:
            raise RunFolderError(
                f"{str(root)!r} is no run folder: it has no {' and no '.join(missing)}; "
                "give the folder that `quantforge run` printed"
            )
        return folder

    def sweep(self) -> None:
        """Remove files and folders that a killed process left half written; only for who holds the run's lock."""
        for path in (*self.root.glob(".best.py-*"), *self.root.glob(".report.md-*"), *self.artifacts.glob(".*.tmp")):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove a folder whose run could not even be set up."""
        shutil.rmtree(self.root, ignore_errors=True)


def _cannot_be_made(root: Path, err: OSError) -> RunFolderError:
    return RunFolderError(f"run folder {str(root)!r} cannot be made: {err}; name another with --out")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a crash, sees the old file or the new one.

    Raises:
        HostError: the disk is full or fails; the old file is as it was, and nothing half-written is left.
    """
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        try:
            _write_flushed(temporary, text)
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush_folder(path.parent)
    except OSError as err:
        raise HostError(
            f"cannot write {str(path)!r}: {err.strerror or err}; mend that and resume, nothing recorded so far is lost"
        ) from err


def _write_flushed(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def describe_environment(**facts: Any) -> dict[str, Any]:
    """Return versions, machine and commit of this process, with `facts` beside them. Holds no secret and no path."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        **facts,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return the commit of the checkout that this package is imported from, or an empty text for an installed one."""
    checkout = Path(__file__).resolve().parent.parent
    if not (checkout / ".git").exists():
        return ""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=checkout,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
