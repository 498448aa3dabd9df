"""Disks that are full, read-only, gone or failing: one clear sentence, nothing half-written, and after that it goes on.

A small tmpfs is made with bubblewrap, in a mount namespace of the test's own; what happens in it happens for real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from evaluators.bubblewrap import find_bubblewrap
from hypotheses.ledger import Ledger, LedgerStorageError
from tests.campaign_builders import ROOT, TINY
from tests.ledger_builders import candidate, evaluate, new_campaign, new_program, scored

PREAMBLE = """
import contextlib, os, sys
from pathlib import Path
disk = Path(sys.argv[1])

def fill(leave=0):
    '''Write ballast until `leave` bytes are free.'''
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    with contextlib.suppress(OSError), open(disk / "ballast", "wb", buffering=0) as file:
        for _ in range(max(free - leave, 0) // 4096):
            file.write(bytes(4096))

def make_room():
    (disk / "ballast").unlink()

def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "ballast")
"""


def on_small_disk(disk: Path, body: str, *, megabytes: int = 4, timeout: float = 120) -> str:
    """Run Python with a tmpfs of that size at `disk`, and return what it printed."""
    disk.mkdir()
    command = [str(find_bubblewrap()), "--dev-bind", "/", "/", "--size", str(megabytes << 20), "--tmpfs", str(disk)]
    return _run([*command, sys.executable, "-c", PREAMBLE + dedent(body), str(disk)], timeout)


def _run(command: list[str], timeout: float = 120) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_ledger_on_a_full_disk_stops_loses_nothing_and_goes_on_after_room_is_made(tmp_path: Path) -> None:
    body = """
    from hypotheses.ledger import *
    from tests.ledger_builders import *
    path = disk / "ledger.sqlite"
    long = {"events": [{"index": i, "op": "weight", "digest": str(i ** 9)} for i in range(9000)], "layers": {}}
    ledger = Ledger.create(path, new_campaign())
    first = evaluate(ledger, candidate(ledger.add_program(new_program(0))), scored(evidence=long))
    waiting = ledger.reserve_evaluation(candidate(ledger.add_program(new_program(1))))
    before, content = ledger.events(), ledger.content_hash()
    fill()
    files = names(disk)
    told = set()
    for step in (
        lambda: ledger.settle_evaluation(waiting.id, scored(2.5, 2.5, evidence=long | {"layers": {"a": {}}})),
        lambda: [ledger.add_program(new_program(number, source="#" * 60_000 + str(number))) for number in range(2, 99)],
    ):
        try:
            step()
        except LedgerStorageError as err:
            told.add(str(err).rpartition(": ")[2])
        else:
            raise AssertionError("the disk was not full")
    assert told == {"the disk is full; make room and resume, nothing recorded so far is lost"}, told
    assert names(disk) == files, names(disk)
    assert ledger.evaluation(first.id) == first
    assert ledger.evaluation(waiting.id) == waiting
    assert ledger.events()[:len(before)] == before
    ledger.close()
    with Ledger.open(path, read_only=True) as reader:
        assert reader.evaluation(first.id) == first
        assert reader.check_invariants() == []
    make_room()
    with Ledger.open(path) as ledger:
        for number, losses in ((0, (3.0, 3.5)), (1, (2.5, 2.5))):
            evaluate(ledger, candidate(ledger.add_program(new_program(number))), scored(*losses, evidence=long))
        assert (ledger.budget().used, ledger.budget().reserved) == (2, 0)
        assert ledger.check_invariants() == []
    print("well")
    """
    assert on_small_disk(tmp_path / "disk", body) == "well\n"


def test_no_ledger_is_left_of_one_that_could_not_be_created(tmp_path: Path) -> None:
    body = """
    from hypotheses.ledger import *
    from tests.ledger_builders import *
    fill(leave=40_000)
    try:
        Ledger.create(disk / "ledger.sqlite", new_campaign())
    except LedgerStorageError as err:
        print(err)
    assert names(disk) == ["ledger.sqlite.lock"], names(disk)
    make_room()
    Ledger.create(disk / "ledger.sqlite", new_campaign()).close()
    """
    assert "the disk is full; make room" in on_small_disk(tmp_path / "disk", body)


def test_artifact_report_and_best_program_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    body = """
    import torch, typer
    from evaluators.artifact import Artifact
    from evaluators.artifact_store import ArtifactStore
    from evaluators.errors import HostError
    from forge.cli.errors import told_in_one_sentence
    from forge.run_folder import RunFolder, RunFolderError, write_atomically
    from safetensors.torch import save_file

    def told(work):
        try:
            with told_in_one_sentence():
                work()
        except typer.Exit as end:
            return end.exit_code
        return 0

    folder = RunFolder.create(disk / "run", recipe_toml="", environment={})
    write_atomically(folder.report, "old")
    artifact = Artifact(
        contract="mxfp4-w4a4/1", subject_name="x", subject_hash="5" * 64, groups={}, folds=(),
        changed={"weight": torch.arange(2.0 ** 18)},
    )
    fill(leave=8192)
    files = names(disk)
    assert told(lambda: write_atomically(folder.report, "new" * 10_000)) == 1
    assert told(lambda: write_atomically(folder.best, "new" * 10_000)) == 1
    assert told(lambda: ArtifactStore(folder.artifacts).keep(artifact)) == 1
    assert told(lambda: RunFolder.create(disk / "other", recipe_toml="x" * 10_000, environment={})) == 2
    assert names(disk) == files, (names(disk), files)
    assert folder.report.read_text() == "old"
    make_room()
    assert told(lambda: write_atomically(folder.report, "new" * 10_000)) == 0
    assert told(lambda: ArtifactStore(folder.artifacts).keep(artifact)) == 0
    assert folder.report.read_text() == "new" * 10_000
    """
    assert on_small_disk(tmp_path / "disk", body) == ""


def test_what_is_told_of_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    body = """
    import typer
    from forge.cli.errors import told_in_one_sentence
    from forge.run_folder import write_atomically
    fill()
    sys.stderr = sys.stdout
    try:
        with told_in_one_sentence():
            write_atomically(disk / "report.md", "new" * 10_000)
    except typer.Exit as end:
        print(end.exit_code)
    """
    assert on_small_disk(tmp_path / "disk", body).splitlines() == [
        f"quantforge: the host failed: cannot write '{tmp_path}/disk/report.md': No space left on device; "
        "mend that and resume, nothing recorded so far is lost",
        "1",
    ]


def test_a_read_only_disk_is_read_and_says_so_to_a_writer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    evidence = {"events": [{"index": index, "op": "weight", "layer": "blocks.0.q"} for index in range(3000)]}
    with Ledger.create(folder / "ledger.sqlite", new_campaign()) as ledger:
        evaluate(ledger, candidate(ledger.add_program(new_program())), scored(evidence=evidence))
    body = """
    from hypotheses.ledger import *
    with Ledger.open(disk / "ledger.sqlite", read_only=True) as reader:
        print(len(reader.evaluations()[0].result.evidence["events"]), reader.check_invariants())
    try:
        Ledger.open(disk / "ledger.sqlite")
    except LedgerStorageError as err:
        print(err)
    """
    command = [str(find_bubblewrap()), "--dev-bind", "/", "/", "--ro-bind", str(folder), str(folder)]
    read, told = _run([*command, sys.executable, "-c", PREAMBLE + dedent(body), str(folder)]).splitlines()
    assert read == "3000 []"
    assert told.endswith("Read-only file system")


@pytest.mark.parametrize("how", ["folder removed", "file removed", "file replaced"])
def test_a_ledger_that_is_taken_away_while_it_is_open_is_noticed_at_the_next_write(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run" / "ledger.sqlite"
    path.parent.mkdir()
    with Ledger.create(path, new_campaign()) as ledger:
        ledger.add_program(new_program())
        if how == "folder removed":
            shutil.rmtree(path.parent)
        else:
            path.rename(path.with_name("elsewhere"))
            if how == "file replaced":
                shutil.copy(path.with_name("elsewhere"), path)
        told = "replaced by another file" if how == "file replaced" else "removed|moved"
        for number in (1, 2):
            with pytest.raises(LedgerStorageError, match=told):
                ledger.add_program(new_program(number))


FAILING_FLUSH = """
import ctypes, errno, platform, struct
from hypotheses.ledger import *
from tests.ledger_builders import *

def refuse(numbers):
    '''Let system calls fail with EIO from now on, by a seccomp filter.'''
    steps = [(0x20, 0, 0, 0)]
    for number in numbers:
        steps += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EIO)]
    code = b"".join(struct.pack("<HBBI", *step) for step in [*steps, (0x06, 0, 0, 0x7FFF0000)])
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(keep := ctypes.create_string_buffer(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(program), 0, 0) == 0, os.strerror(ctypes.get_errno())

ledger = Ledger.open(disk / "ledger.sqlite")
ledger.add_program(new_program(0))
ledger.add_program(new_program(1))
refuse({"x86_64": (74, 75), "aarch64": (82, 83)}[platform.machine()])
for source in ("# short", "# long" + "x" * 100_000):
    try:
        ledger.add_program(new_program(2, source=source))
    except LedgerStorageError as err:
        print(err)
"""


def test_a_flush_that_fails_is_told_and_what_was_recorded_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger.create(path, new_campaign()) as ledger:
        ledger.add_program(new_program(0))
    short, long = _run([sys.executable, "-c", PREAMBLE + FAILING_FLUSH, str(tmp_path)]).splitlines()
    assert short == f"{str(path)!r}: the disk gave an input/output error; nothing of this step was stored"
    assert "gz' cannot be written: Input/output error" in long
    assert not list((tmp_path / "blobs").glob("*"))
    with Ledger.open(path) as ledger:
        for number in (0, 1):
            ledger.add_program(new_program(number))
        ledger.add_program(new_program(2, source="# short"))
        assert [program.title for program in ledger.programs()] == ["program 0", "program 1", "program 2"]
        assert ledger.check_invariants() == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_campaign_on_a_full_disk_ends_with_one_sentence_and_is_resumed_after_room_is_made(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY.format(budget=2, chunks=2))
    body = f"""
    import shutil
    from evaluators.bubblewrap import BubblewrapIsolation
    from forge.cli.app import app
    from hypotheses.ledger import Ledger
    from typer.testing import CliRunner

    def campaign(run, kilobytes):
        fill(leave=kilobytes * 1024)
        end = CliRunner().invoke(app, ["run", {str(recipe)!r}, "--out", str(run)])
        told = [line for line in end.stderr.splitlines() if line.startswith("quantforge: ")]
        assert end.exit_code == (1 if run.exists() else end.exit_code) and end.exit_code in (1, 2), (end.exit_code, end.output)
        assert len(told) == 1 and "Traceback" not in end.output, end.output
        assert not [name for name in names(disk) if name.endswith((".part", ".tmp")) or "/." in name], names(disk)
        print(end.exit_code, told[0], [name for name in names(disk)])
        make_room()
        again = ["resume", str(run)] if run.exists() else ["run", {str(recipe)!r}, "--out", str(run)]
        end = CliRunner().invoke(app, again)
        assert end.exit_code == 0, (end.output, end.exception)
        with Ledger.open(run / "ledger.sqlite", read_only=True) as reader:
            assert (reader.budget().used, reader.budget().reserved) == (2, 0)
            assert reader.check_invariants() == []
        print(again[0])

    BubblewrapIsolation().acquire_template(threads=1)  # held, so that the workers of all campaigns are forked from one
    for kilobytes in (100, 500, 2000):
        print(f"{{kilobytes}} KB are left", flush=True)
        campaign(disk / "run", kilobytes)
        shutil.rmtree(disk / "run")
    """
    print(on_small_disk(tmp_path / "disk", body, megabytes=64, timeout=1700))
