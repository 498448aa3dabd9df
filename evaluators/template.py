"""The evaluator's side of a template: starting it, asking it for workers, ending it; one per kind of worker.

Importing torch costs one to two CPU seconds, which is a large part of an evaluation of a small subject. A template does it
once, and every worker is forked from it (see `evaluators.template_process` for what happens inside and for what a fork
shares, `evaluators.warm_start` for how a worker gets into its sandbox). Workers are single-use all the same.

The interpreter is executed through the mount of a sandbox, which is read-only: /proc/self/exe of a worker leads to the file
that its template was started from, and with the host's own mount a program of the superuser could overwrite it.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evaluators.errors import EvaluatorError
from evaluators.python_runtime import TEMPLATE_MODULES, PythonRuntime

LOGGER = logging.getLogger(__name__)
IMPORT_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 2.0
MAX_ANSWER: Final = 1 << 16
PROCESS_FILE: Final = "template_process.py"


class TemplateError(EvaluatorError):
    """This worker cannot be had from a template: it died, or was ended."""


class TemplateRefusedError(TemplateError):
    """No worker can be had from this template, now or later."""


@dataclass(frozen=True, kw_only=True)
class TemplatePlan:
    """What a template is started from; equal plans share one.

    runtime: interpreter and packages.
    inside: folder of a sandbox in which our packages lie.
    environment: of the template, as pairs.
    """

    runtime: PythonRuntime
    inside: str
    environment: tuple[tuple[str, str], ...]

    def config(self) -> dict[str, Any]:
        """Return what the process is told first."""
        runtime = self.runtime
        return {
            "parent": os.getpid(),
            "folders": {"evaluators": str(runtime.evaluators), "forge_kernels": str(runtime.forge_kernels)},
            "inside": self.inside,
            "files": list(TEMPLATE_MODULES),
            "package_folders": [str(folder) for folder in runtime.package_folders],
        }


class Template:
    """A template process that is started when the first worker is asked for, and again when it has died.

    Safe to use from several threads. `refusal` is why workers cannot be forked here, once that is known.
    """

    def __init__(self, plan: TemplatePlan) -> None:
        self.plan = plan
        self.refusal: str | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._ended = False

    @property
    def pid(self) -> int | None:
        """Process id, None while it does not run."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def request(self, body: dict[str, Any], fds: Sequence[int], *, view: str) -> None:
        """Ask for a worker; the descriptors are copied.

        Args:
            body: see `evaluators.template_process`.
            fds: what the worker and its keeper get.
            view: path to the root of a sandbox, through which the interpreter is executed if it must be started.

        Raises:
            TemplateRefusedError: workers cannot be forked on this host.
            TemplateError: it was ended, or died.
        """
        with self._lock:
            if self.pid is None:
                self._stop()
                self._start(view)
            assert self._connection is not None
            try:
                socket.send_fds(self._connection, [json.dumps(body).encode()], list(fds))
            except OSError as err:
                self._stop()
                raise TemplateError("the template died") from err

    def refuse(self, reason: str) -> None:
        """Serve no more workers, and say so once."""
        with self._lock:
            if self.refusal is None and not self._ended:
                self.refusal = reason
                LOGGER.warning("workers start without a template, and import torch each: %s", reason)
            self._stop()

    def end(self) -> None:
        """End the process; workers that were forked live on."""
        self._ended = True
        process = self._process
        if process is not None and self._lock.locked():
            # It may be importing, with a thread waiting for it.
            process.kill()
        with self._lock:
            self._stop()

    def _start(self, view: str) -> None:
        if self._ended:
            raise TemplateError("the template was ended")
        if self.refusal is not None:
            raise TemplateRefusedError(self.refusal)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = ours
        output = os.memfd_create("quantforge-template", os.MFD_CLOEXEC)
        try:
            self._process = self._execute(view, theirs, output)
            # So that the end of the process is the end of the connection.
            theirs.close()
            answer = self._greet(ours)
            if answer is None:
                raise TemplateRefusedError(f"it ended while it imported: {_tail(output) or 'it printed nothing'}")
            if answer["refusal"] is not None:
                raise TemplateRefusedError(answer["refusal"])
        except (OSError, ValueError, KeyError) as err:
            self._stop()
            raise TemplateRefusedError(f"it does not start: {err}") from err
        except TemplateError:
            self._stop()
            if self._ended:
                raise TemplateError("the template was ended") from None
            raise
        finally:
            theirs.close()
            os.close(output)

    def _execute(self, view: str, connection: socket.socket, output: int) -> subprocess.Popen[bytes]:
        runtime = self.plan.runtime
        command = [str(runtime.executable), "-I", "-S", "-B", "-u", "-X", "faulthandler", "-", str(connection.fileno())]
        started: Future[subprocess.Popen[bytes]] = Future()

        def keep() -> None:
            # The process dies with the thread that started it, so this one stays as long.
            try:
                with open(runtime.evaluators / PROCESS_FILE, "rb") as script:
                    process = subprocess.Popen(
                        command,
                        executable=f"{view}{runtime.executable}",
                        stdin=script,
                        stdout=output,
                        stderr=output,
                        cwd="/",
                        env=dict(self.plan.environment),
                        pass_fds=(connection.fileno(),),
                        start_new_session=True,
                    )
            except BaseException as err:
                started.set_exception(err)
                return
            started.set_result(process)
            process.wait()

        threading.Thread(target=keep, name="template-keeper", daemon=True).start()
        return started.result()

    def _greet(self, connection: socket.socket) -> dict[str, Any] | None:
        """Tell the process what to import, and return its answer when it has; None if it ended."""
        connection.send(json.dumps(self.plan.config()).encode())
        assert self._process is not None
        deadline = time.monotonic() + IMPORT_TIMEOUT_S
        while self._process.poll() is None:
            if select.select([connection], [], [], 0.5)[0]:
                break
            if time.monotonic() > deadline:
                raise TemplateRefusedError(f"its imports take longer than {IMPORT_TIMEOUT_S:g} s")
        try:
            data = connection.recv(MAX_ANSWER)
        except ConnectionError:
            return None
        answer: dict[str, Any] | None = json.loads(data) if data else None
        return answer

    def _stop(self) -> None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            # It ends by itself at the end of its requests.
            connection.close()
        if process is None:
            return
        try:
            process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class TemplatePool:
    """The templates of this process, each shared by all who need the same and ended with its last user."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[TemplatePlan, int] = {}
        self._templates: dict[TemplatePlan, Template] = {}

    def acquire(self, plan: TemplatePlan) -> Template:
        """Return the template of a plan; give it back by `release`."""
        with self._lock:
            self._users[plan] = self._users.get(plan, 0) + 1
            if plan not in self._templates:
                self._templates[plan] = Template(plan)
            return self._templates[plan]

    def release(self, template: Template) -> None:
        """Give a template back; the last one ends it."""
        with self._lock:
            self._users[template.plan] -= 1
            if self._users[template.plan]:
                return
            del self._users[template.plan], self._templates[template.plan]
        template.end()


POOL: Final = TemplatePool()


def _tail(fd: int) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, 1000, max(0, size - 1000)).decode("utf-8", "replace").strip()


def template_environment(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the environment of a template whose workers have this one.

    Folders are left out: they are those of a sandbox, and on the host they may be anybody's. The BLAS library of numpy
    starts its threads when it is loaded, and a template must have one thread.
    """
    scratch = str(Path(environment["HOME"]))
    kept = {key: value.replace(scratch, "/nonexistent") for key, value in environment.items()}
    return tuple(sorted({**kept, "OPENBLAS_NUM_THREADS": "1"}.items()))
