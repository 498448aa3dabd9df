"""A way to start workers, and the one that isolates nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from evaluators.limits import Limits
from evaluators.python_runtime import find_runtime, worker_environment
from evaluators.sandbox_process import PlainSandbox, Sandbox
from evaluators.template import Template


class Isolation(Protocol):
    """A way to start workers; `name` is what ledger and reports show."""

    @property
    def name(self) -> str: ...

    def acquire_template(self, *, threads: int) -> Template | None:
        """Return what workers can be forked from, to be given back to `evaluators.template.POOL`; None if nothing."""

    def start(
        self, connection: socket.socket, *, limits: Limits, threads: int, template: Template | None = None
    ) -> Sandbox:
        """Start a worker that inherits the socket and nothing else, from the template if that works here.

        Call it from a thread that outlives the worker: workers die with the thread that started them.

        Raises:
            SandboxUnavailableError: this host cannot isolate.
        """


@dataclass(frozen=True, kw_only=True)
class NoIsolation:
    """Runs workers as ordinary processes: for machines without namespaces, and to show what isolation prevents."""

    @property
    def name(self) -> str:
        return "none"

    def acquire_template(self, *, threads: int) -> Template | None:
        """See `Isolation.acquire_template`: every worker starts for itself."""
        return None

    def start(
        self, connection: socket.socket, *, limits: Limits, threads: int, template: Template | None = None
    ) -> Sandbox:
        """See `Isolation.start`."""
        runtime = find_runtime()
        scratch = Path(tempfile.mkdtemp(prefix="quantforge-"))
        mark = f"QUANTFORGE_WORKER={uuid.uuid4().hex}"
        key, _, value = mark.partition("=")
        environment = worker_environment(threads=threads, scratch=str(scratch)) | {key: value}
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        roots = [str(runtime.evaluators.parent), str(runtime.forge_kernels.parent)]
        command = worker_command(
            executable=str(runtime.executable),
            worker=str(runtime.evaluators / "worker.py"),
            import_paths=list(dict.fromkeys([*roots, *map(str, runtime.package_folders)])),
            socket_fd=connection.fileno(),
            limits=limits,
            threads=threads,
            process_limit=None,
            die_with_parent=True,
        )
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd=scratch,
            env=environment,
            pass_fds=(connection.fileno(),),
            start_new_session=True,
        )
        return PlainSandbox(process, mark=mark, scratch=scratch)


def worker_command(
    *,
    executable: str,
    worker: str,
    import_paths: list[str],
    socket_fd: int,
    limits: Limits,
    threads: int,
    process_limit: int | None,
    die_with_parent: bool = False,
) -> list[str]:
    """Return the command line of a worker; see `evaluators.worker` for the options of the interpreter."""
    config: dict[str, Any] = {
        "import_paths": import_paths,
        "socket_fd": socket_fd,
        "threads": threads,
        "die_with_parent": die_with_parent,
        "limits": worker_limits(limits, process_limit),
    }
    return [executable, "-I", "-S", "-B", "-u", "-X", "faulthandler", worker, json.dumps(config)]


def worker_limits(limits: Limits, process_limit: int | None) -> dict[str, Any]:
    """Return the limits that a worker sets for itself; see `evaluators.worker.limit_process`."""
    return {"file_bytes": limits.file_bytes, "open_files": limits.open_files, "processes": process_limit}
