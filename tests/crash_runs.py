"""Starting, killing and resuming the campaign of `tests.crash_campaign`, and holding what is left to what was promised."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from evaluators.artifact_store import ArtifactStore
from forge.cli.app import app
from forge.recomputing import recompute
from hypotheses.ledger import Ledger
from tests.crash_campaign import write_campaign
from tests.crash_points import BY_NAME, Point
from tests.driver_forks import Driver, fork_driver, start_nurseries
from tests.ledger_queries import violations

TIMEOUT_S = 280.0
GRACE_S = 15.0
"""How long what a killed orchestrator started may outlive it: seconds where tests compete for cores, else a tenth of one."""
SET_CHILD_SUBREAPER = 36

SETTLED_TWICE = "SELECT ref FROM events WHERE kind = 'evaluation_settled' GROUP BY ref HAVING count(*) > 1"
ATTEMPTS = "SELECT max(attempt) FROM leases"
CALLS = "SELECT total, used, reserved, free FROM budget"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that ended: its exit status, what it printed, and what of its own it left running."""

    status: int
    out: str
    err: str
    left: tuple[str, ...]
    wall_s: float

    @property
    def summary(self) -> dict[str, Any]:
        assert self.status == 0, self.err[-3000:]
        data: dict[str, Any] = json.loads(self.out)
        return data


@dataclass(frozen=True, kw_only=True)
class Row:
    """What became of one kill. calls: used, reserved, free."""

    point: str
    status: int
    before: tuple[int, int, int] | None
    after: tuple[int, int, int]
    attempts: int
    same_incumbent: bool
    same_hash: bool
    wall_s: float
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Crashes:
    """One campaign on disk, run once without a kill and once up to its first turn; the kills start from there.

    reference: the summary of the run that nothing disturbed. calm: its folder. begun: the folder of a run that was killed on
    its way, last when set-up was over.
    """

    folder: Path
    recipe: Path
    reference: dict[str, Any]

    @property
    def calm(self) -> Path:
        return self.folder / "calm" / "run"

    @property
    def begun(self) -> Path:
        return self.folder / "begun" / "run"

    @classmethod
    def build(cls, folder: Path, *, kills: Sequence[str] = ("set-up-over",), **changes: int) -> Crashes:
        """Write the campaign, run it, and begin it a second time with these kills on the way."""
        folder.mkdir(parents=True, exist_ok=True)
        recipe = write_campaign(folder, **changes)
        calm = start("run", recipe, "--out", folder / "calm" / "run")
        made = cls(folder=folder, recipe=recipe, reference={})
        try:
            for name in kills:
                _, _, problems = made._kill(made.begun, BY_NAME[name])
                assert problems == [], f"killed at {name}: {problems}"
            out, err = calm.communicate(timeout=TIMEOUT_S)
        finally:
            calm.kill()
        assert calm.returncode == 0, err[-3000:]
        (folder / "reference.json").write_text(out)
        return cls.load(folder)

    @classmethod
    def load(cls, folder: Path) -> Crashes:
        """Return what `build` made."""
        reference = json.loads((folder / "reference.json").read_text())
        return cls(folder=folder, recipe=folder / "recipe.toml", reference=reference)

    @classmethod
    def shared(cls, folder: Path, **options: Any) -> Crashes:
        """Return what `build` makes, made once for all processes that test side by side."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return cls.load(folder) if (folder / "reference.json").exists() else cls.build(folder, **options)

    def place(self, name: str, *, setup: bool = False) -> Path:
        """Return a run folder to work in: where a run may be made, or a copy of the one that has begun."""
        run = self.folder / name / "run"
        if not setup:
            shutil.copytree(self.begun, run)
        return run

    def go(self, run: Path, *options: str, point: str | None = None) -> Ended:
        """Run the campaign into a folder, or resume it if the folder is there."""
        armed = ["--point", point] if point is not None else []
        if run.exists():
            return drive("resume", run, *armed, *options)
        return drive("run", self.recipe, "--out", run, *armed, *options)

    def kill_in_turn(self, points: Sequence[Point]) -> list[Row]:
        """Die at each point in turn, look at what each kill left, go on to the end, and compare with the undisturbed run.

        Returns:
            A row for each point; what the end shows is the same in all of them.
        """
        began = time.monotonic()
        run = self.place("+".join(point.name for point in points), setup=points[0].setup)
        kills = [self._kill(run, point) for point in points]
        resumed = self.go(run)
        problems = self.compare(run, resumed)
        after, _ = left_by_a_kill(run)
        with contextlib.closing(sqlite3.connect(f"file:{run}/ledger.sqlite?mode=ro", uri=True)) as connection:
            ((attempts,),) = connection.execute(ATTEMPTS).fetchall()
        data = resumed.summary if resumed.status == 0 else {"content_hash": "", "figures": [{"program_id": ""}]}
        return [
            Row(
                point=point.name,
                status=status,
                before=before,
                after=after,
                attempts=attempts,
                same_incumbent=data["figures"][-1]["program_id"] == self.reference["figures"][-1]["program_id"],
                same_hash=data["content_hash"] == self.reference["content_hash"],
                wall_s=time.monotonic() - began,
                problems=(*found, *problems),
            )
            for point, (status, before, found) in zip(points, kills, strict=True)
        ]

    def _kill(self, run: Path, point: Point) -> tuple[int, tuple[int, int, int] | None, list[str]]:
        """Let a run die at a point; return its exit status, the calls that it left, and what must not be."""
        killed = self.go(run, point=point.name)
        problems = [] if killed.status == -signal.SIGKILL else [f"ended with {killed.status}: {killed.err[-2000:]}"]
        problems += [f"{GRACE_S} s after the kill there still was {process}" for process in killed.left]
        if run.exists():
            before, found = left_by_a_kill(run)
            return killed.status, before, problems + found
        again = drive("resume", run)
        if again.status != 2 or "is no run folder" not in again.err:
            problems.append(f"resuming where nothing is: {again.status}: {again.err[-500:]}")
        return killed.status, None, problems

    def compare(self, run: Path, resumed: Ended) -> list[str]:
        """Return in which ways a resumed run that has ended differs from the run that nothing disturbed."""
        if resumed.status != 0:
            return [f"the resumed run ended with {resumed.status}: {resumed.err[-1500:]}"]
        data = resumed.summary
        problems = [f"after the end there still was {process}" for process in resumed.left]
        for key in ("content_hash", "budget", "figures", "observations", "required_edits", "ending", "violations"):
            if data[key] != self.reference[key]:
                problems.append(f"{key}: {data[key]!r}, undisturbed {self.reference[key]!r}")
        for name in ("best.py", "report.md"):
            if (run / name).read_text() != (self.calm / name).read_text():
                problems.append(f"{name} differs from the undisturbed one")
        scraps = [path.name for folder in (run, run / "artifacts") for path in folder.glob(".*")]
        problems += [f"left half written: {name}" for name in scraps]
        return problems


def left_by_a_kill(run: Path) -> tuple[tuple[int, int, int], list[str]]:
    """Look into a run folder as a stranger does; return used, reserved and free calls, and what must not be."""
    problems = [f"{name}: {rows}" for name, rows in violations(run / "ledger.sqlite").items()]
    with contextlib.closing(sqlite3.connect(f"file:{run}/ledger.sqlite?mode=ro", uri=True)) as connection:
        ((total, used, reserved, free),) = connection.execute(CALLS).fetchall()
        problems += [f"settled twice: {ref}" for (ref,) in connection.execute(SETTLED_TWICE)]
    if used + reserved + free != total:
        problems.append(f"{used} used + {reserved} reserved + {free} free is not {total}")
    with Ledger.open(run / "ledger.sqlite", read_only=True) as ledger:
        problems += ledger.check_invariants()
        problems += [str(difference) for difference in recompute(ledger).differences]
    shown = CliRunner().invoke(app, ["show", str(run), "--json"])
    if shown.exit_code != 0:
        problems.append(f"`show` ended with {shown.exit_code}: {shown.stderr}")
    for path in (run / "artifacts").glob("*.safetensors"):
        ArtifactStore(path.parent).load(path.stem)  # raises when the file is not whole, or not what its name says
    return (used, reserved, free), problems


def start(*arguments: object) -> Driver:
    """Start the driver in a process group of its own."""
    return fork_driver([str(argument) for argument in arguments])


def drive(*arguments: object) -> Ended:
    """Run the driver to its end, whichever that is."""
    began = time.monotonic()
    with orphans() as left:
        process = start(*arguments)
        return finish(process, left, began)


def finish(process: Driver, left: Orphans, began: float) -> Ended:
    """Wait for a driver that was started within `orphans`."""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return Ended(status=process.returncode, out=out, err=err, left=left.after_grace(), wall_s=time.monotonic() - began)


class Orphans:
    """Processes that fell to this one when those that had started them died."""

    def __init__(self) -> None:
        self._before = set(_children())

    def after_grace(self) -> tuple[str, ...]:
        """Return what still runs when all had time to end."""
        deadline = time.monotonic() + GRACE_S
        while (alive := [pid for pid in _children() if pid not in self._before and not _reaped(pid)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return tuple(_command(pid) for pid in alive)


@contextlib.contextmanager
def orphans() -> Iterator[Orphans]:
    """Let what outlives its parents become a child of this process, so that it cannot hide."""
    start_nurseries()  # here at the latest, so that they do not count
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "this kernel cannot make a process collect its orphans")
    try:
        yield Orphans()
    finally:
        libc.prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children() -> list[int]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _reaped(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    return f"process {pid} {b' '.join(words)[:200].decode('utf-8', 'replace')}"
