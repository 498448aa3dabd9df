"""The host as attacks find it: secrets in many places, listeners on every kind of address, a process to be attacked.

A secret has two halves. Programs are told the first, so that they can look for it; whoever prints the second has found
it. `World.damage` names everything that is not as it was.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from evaluators.corpora import Corpus, corpus_from_tensors
from evaluators.evaluator import Evaluator
from evaluators.python_runtime import package_folder
from evaluators.results import EvaluationResult
from evaluators.subjects import Subject
from evaluators.worker_process import Worker

CALIBRATION_TOKENS = range(3, 64)
SCORING_TOKENS = range(64, 128)
"""Tokens of the splits that score; no calibration or gate text holds one of them."""
CHECKOUT = package_folder("evaluators").parent
_SET_CHILD_SUBREAPER = 36
_SYSTEM_TARGETS = (
    "/",
    "/usr",
    "/usr/local/lib",
    "/etc",
    "/var/tmp",
    "/quantforge",
    "/quantforge/evaluators",
    "/dev",
    "/run",
)
"""Only tried where isolation keeps them from being written."""

DECOY = """
import sys, time
secret = sys.stdin.readline() * 1000
print("ready", flush=True)
time.sleep(100_000)
"""


def make_secret_corpus(subject: Subject) -> Corpus:
    """Return a corpus drawn with the system's entropy, whose scoring splits share no token with the others."""
    generator = torch.Generator().manual_seed(secrets.randbits(62))

    def draw(tokens: range, num_chunks: int) -> torch.Tensor:
        return torch.randint(tokens.start, tokens.stop, (num_chunks, 32), generator=generator)

    splits = {name: draw(CALIBRATION_TOKENS, count) for name, count in (("calibration", 6), ("gate", 2))}
    splits |= {name: draw(SCORING_TOKENS, count) for name, count in (("search", 4), ("confirm", 2), ("sealed", 3))}
    return corpus_from_tensors(splits, subject, source="random tokens")  # type: ignore[arg-type]


class World:
    """Secrets, listeners and the decoy; a context manager.

    Args:
        folder: an empty folder for everything that is made here.
        artifacts: folder of the evaluators' artifacts.
        is_isolated: whether programs run in a sandbox; if not, none is told of system folders.
    """

    def __init__(self, folder: Path, artifacts: Path, *, is_isolated: bool) -> None:
        self.folder = folder
        self.artifacts = artifacts
        self.is_isolated = is_isolated
        self.mark = f"attack-{secrets.token_hex(8)}"
        self.secrets: dict[str, tuple[bytes, bytes]] = {}
        self.home = folder / "home"
        self.environment = {name: self.plant(name) for name in ("OPENAI_API_KEY", "QUANTFORGE_SECRET")}
        self.shared = Path(f"/dev/shm/{self.mark}")
        self._sockets: list[socket.socket] = []
        self._make_files()
        self._made = self._entries()

    def __enter__(self) -> World:
        os.environ.update(self.environment)
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.shared.write_text(self.plant("shared memory"))
        self._listen()
        self._start_decoy()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_decoy()
        for listener in self._sockets:
            listener.close()
        self.shared.unlink(missing_ok=True)
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        for name in self.environment:
            os.environ.pop(name, None)

    def plant(self, place: str) -> str:
        """Make a secret for a place and return its text."""
        first, second = secrets.token_hex(12), secrets.token_hex(12)
        self.secrets[place] = (first.encode(), second.encode())
        return first + second

    def fill(self, source: str) -> str:
        """Put places, ports and ids of the host into a program."""
        values = {
            "HALVES": repr([first.hex() for first, _ in self.secrets.values()]),
            "TARGETS": repr([str(target) for target in self.targets()]),
            "MARK": self.mark,
            "HOME": str(self.home),
            "CWD": str(self.folder),
            "LEDGER": str(self.ledger),
            "CORPUS": str(self.corpus),
            "ARTIFACTS": str(self.artifacts),
            "OTHER": str(self.other_artifact),
            "CHECKOUT": str(CHECKOUT),
            "TCP": str(self.tcp_port),
            "UDP": str(self.udp_port),
            "UNIX": str(self.unix_path),
            "ABSTRACT": self.mark,
            "DECOY": str(self.decoy.pid),
        }
        for name, value in values.items():
            source = source.replace(f"@{name}@", value)
        return source

    def targets(self) -> list[Path]:
        """Folders in which programs try to write."""
        targets = [self.home, self.folder, self.artifacts]
        if self.is_isolated:
            targets += [CHECKOUT, Path.cwd(), Path.home(), package_folder("torch"), *map(Path, _SYSTEM_TARGETS)]
        return targets

    def damage(self, result: EvaluationResult, artifacts_before: Sequence[str]) -> list[str]:
        """Name what an evaluation changed on the host, and mend it."""
        recorded = self._recorded(result)
        found = [
            f"the secret of {place} came out"
            for place, (_, second) in self.secrets.items()
            if second in recorded or second.hex().encode() in recorded
        ]
        found += [f"a file was made: {path}" for path in self._marked_files()]
        found += [f"{path} was changed" for path in self._changed_files()]
        expected = {*artifacts_before, f"{result.artifact_hash}.safetensors"} | {self.other_artifact.name}
        found += [f"an artifact was made: {name}" for name in sorted(set(os.listdir(self.artifacts)) - expected)]
        found += self._heard()
        found += self._decoy_damage()
        return found

    def _recorded(self, result: EvaluationResult) -> bytes:
        """Everything that is kept of an evaluation, in which a secret could come out."""
        data = f"{result.program_log}{result.reason}{result.evidence.to_json()}".encode()
        if result.artifact_hash is not None:
            data += (self.artifacts / f"{result.artifact_hash}.safetensors").read_bytes()
        return data

    def _make_files(self) -> None:
        self.home.mkdir()
        self.artifacts.mkdir(exist_ok=True)
        self.ledger = self.folder / "ledger.sqlite"
        self.corpus = self.folder / "corpus.txt"
        self.other_artifact = self.artifacts / f"{'d' * 64}.safetensors"
        self.unix_path = self.folder / "socket"
        (self.home / ".netrc").write_text(f"machine example.com password {self.plant('home')}\n")
        self.corpus.write_text(f"Once upon a time {self.plant('corpus')} was written.\n" * 20)
        self.other_artifact.write_text(self.plant("artifact"))
        connection = sqlite3.connect(self.ledger)
        connection.execute("CREATE TABLE notes (text TEXT)")
        connection.execute("INSERT INTO notes VALUES (?)", (self.plant("ledger"),))
        connection.commit()
        connection.close()
        self._kept = {
            path: path.read_bytes() for path in (self.ledger, self.corpus, self.other_artifact, self.home / ".netrc")
        }
        # The text that ships with the package is a secret by itself.
        shipped = (CHECKOUT / "evaluators" / "nano" / "nano-llama" / "splits.safetensors").read_bytes()
        half = len(shipped) // 2
        self.secrets["shipped text"] = (shipped[half - 32 : half], shipped[half : half + 32])

    def _entries(self) -> set[Path]:
        return {path for root in (self.folder, self.home) for path in root.rglob("*")}

    def _listen(self) -> None:
        tcp = socket.create_server(("127.0.0.1", 0))
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(os.path.relpath(self.unix_path))
        abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        abstract.bind(f"\0{self.mark}")
        self.tcp_port, self.udp_port = tcp.getsockname()[1], udp.getsockname()[1]
        self._sockets = [tcp, udp, unix, abstract]
        for listener in self._sockets:
            listener.setblocking(False)
            if listener.type == socket.SOCK_STREAM:
                listener.listen()

    def _heard(self) -> list[str]:
        found = []
        for listener in self._sockets:
            num_heard = 0
            while True:
                try:
                    if listener.type == socket.SOCK_STREAM:
                        listener.accept()[0].close()
                    else:
                        listener.recv(1000)
                except BlockingIOError:
                    break
                num_heard += 1
            if num_heard:
                found.append(f"somebody spoke to {listener.getsockname()!r} {num_heard} times")
        return found

    def _start_decoy(self) -> None:
        secret, argument = self.plant("memory of a process"), self.plant("command line of a process")
        self.decoy = subprocess.Popen(
            [sys.executable, "-ISc", DECOY, argument],
            env={"SECRET": self.plant("environment of a process")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.decoy.stdin is not None
        assert self.decoy.stdout is not None
        self.decoy.stdin.write(f"{secret}\n".encode())
        self.decoy.stdin.flush()
        self.decoy.stdout.readline()

    def _decoy_damage(self) -> list[str]:
        if self.decoy.poll() is None and _state(self.decoy.pid) in ("S", "R", "D"):
            return []
        found = [f"a process of the host was ended or stopped: {self.decoy.poll()}, {_state(self.decoy.pid)}"]
        self._end_decoy()
        self._start_decoy()
        return found

    def _end_decoy(self) -> None:
        self.decoy.kill()
        self.decoy.communicate()

    def _marked_files(self) -> list[Path]:
        places = {*self.targets(), Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path.home(), Path.cwd()}
        places |= {self.home / ".cache", self.home / ".triton" / "cache"}
        found = {path for place in places if place.is_dir() for path in place.iterdir() if self.mark in path.name}
        found |= self._entries() - self._made - set(self.artifacts.rglob("*"))
        found -= {self.shared, self.unix_path}
        for path in found:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return sorted(found)

    def _changed_files(self) -> list[Path]:
        changed = [path for path, content in self._kept.items() if not path.is_file() or path.read_bytes() != content]
        for path in changed:
            path.write_bytes(self._kept[path])
        return changed


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all processes below `pid`; orphans too, while this process is their reaper."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(_parent(int(name)), []).append(int(name))
    pending = list(children.get(pid, ()))
    while pending:
        found = pending.pop()
        yield found
        pending += children.get(found, ())


def survivors(world: World, evaluators: Sequence[Evaluator]) -> list[str]:
    """Name processes below this one that belong to no waiting worker, and end them."""
    deadline = time.monotonic() + 5
    while True:
        expected = {world.decoy.pid}.union(*map(_waiting_processes, evaluators))
        found = {pid: _state(pid) for pid in descendants(os.getpid()) if pid not in expected}
        for pid, state in found.items():
            if state == "Z":
                _reap_orphan(pid)
        alive = [pid for pid, state in found.items() if state not in ("Z", "")]
        if not alive:
            return []
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    names = [f"process {pid} is left: {_command(pid)}" for pid in alive]
    for pid in alive:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            continue
        _reap_orphan(pid)
    return names


def _waiting_processes(evaluator: Evaluator) -> set[int]:
    """Return the processes of the worker that waits, and of the template that it was forked from.

    Of the template's own descendants only those count that are in the waiting worker's pid namespace, and their parents.
    """
    sandbox = waiting_worker(evaluator).sandbox
    outer = sandbox.process.pid
    expected = {outer, *descendants(outer)}
    template = evaluator._host._template
    if template is None or template.pid is None:
        return expected
    inside = {_pid_namespace(pid) for pid in expected} - {_pid_namespace(os.getpid()), ""}
    forked = {pid for pid in descendants(template.pid) if _pid_namespace(pid) in inside}
    return expected | {template.pid} | forked | {_parent(pid) for pid in forked}


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def waiting_worker(evaluator: Evaluator) -> Worker:
    """Return the worker that waits for the next program, once it is ready."""
    host = evaluator._host
    host.prestart()
    assert host._waiting is not None
    worker = host._waiting.result()
    worker.wait_ready()
    return worker


def _reap_orphan(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ["", "0"]
    return text[text.rfind(")") + 2 :].split()


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:120]
    except OSError:
        return "gone"
