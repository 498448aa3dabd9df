"""The template: a trusted process that has imported what workers need, and forks one for each program.

Started as ``python -I -S -B -u - FD`` with this file as its standard input, so that neither its command line nor its
modules name a folder of the host. It never sees a program, a key, a token, a text or a model, and never asks for a GPU.
For every request on its socket it forks twice:

    template    stays outside, single-threaded, knows only its socket
    keeper      enters the namespaces of a sandbox that bubblewrap has made, gives up all privileges, forks the worker,
                waits for it and tells the sandbox's first command how it ended, which ends the sandbox. It stays in the
                pid namespace of the host, where the worker cannot name it
    worker      is born in the pid namespace of the sandbox: a session of its own, the sandbox's folder and environment,
                its output, its channel and no other descriptor, limits, seccomp filter; says so, and becomes what
                `evaluators.worker` describes once the evaluator has looked and has put it into its control group

What a fork shares: memory, copied when either side writes to it; addresses, stack canaries and hash seed, which all
workers of a template have in common (each runs code of its program's choice anyway). Shared writable mappings and other
threads would be more than that, so a template that has either refuses to serve. Random generators are seeded anew.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import signal
import socket
import sys
import types
from typing import Any, NoReturn

MAX_REQUEST = 1 << 17
CHANNEL_FD = 3
CONTROL_FD = 4
DESCRIPTORS = 1 << 16
"""More than a template ever has."""
STATUS_WHEN_KILLED = 128


class OurSources:
    """Finds our packages in the folders of the host, and lets them believe that they lie where a sandbox has them."""

    def __init__(self, folders: dict[str, str], inside: str, files: set[str]) -> None:
        self._folders = folders
        self._inside = inside
        self._files = files
        self._loaders: list[_SourceLoader] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        package, _, rest = name.partition(".")
        if package not in self._folders:
            return None
        stem = rest.replace(".", "/")
        for file in (f"{stem}/__init__.py".lstrip("/"), f"{stem}.py"):
            source = f"{self._folders[package]}/{file}"
            if (package == "evaluators" and file not in self._files) or not os.path.isfile(source):
                continue
            shown = f"{self._inside}/{package}/{file}"
            loader = _SourceLoader(name, shown)
            loader.source = source
            self._loaders.append(loader)
            folders = [os.path.dirname(shown)] if file.endswith("__init__.py") else None
            return importlib.util.spec_from_file_location(
                name, shown, loader=loader, submodule_search_locations=folders
            )
        raise ModuleNotFoundError(f"no module named {name!r} in a template", name=name)

    def forget(self) -> None:
        """Leave the import system, and let what was loaded read its source where it is said to be."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        for loader in self._loaders:
            loader.source = loader.path


class _SourceLoader(importlib.machinery.SourceFileLoader):
    source = ""

    def get_data(self, path: str) -> bytes:
        return super().get_data(self.source)

    def path_stats(self, path: str) -> Any:
        # No bytecode: its place would be derived from the path that is shown.
        raise OSError


def main() -> None:
    """Import, then fork workers until the evaluator closes its end."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    config = json.loads(connection.recv(MAX_REQUEST))
    sources = OurSources(config["folders"], config["inside"], set(config["files"]))
    sys.meta_path.insert(0, sources)
    sys.path[:0] = config["package_folders"]

    from evaluators import joining

    joining.die_with_parent(signal.SIGKILL, config["parent"])

    import gc

    import torch  # noqa: F401

    import evaluators.line_counts
    import evaluators.session_client  # noqa: F401
    from evaluators import worker

    sources.forget()
    # Pages that no collection visits stay shared.
    gc.collect()
    gc.freeze()
    serve(connection, joining, worker)


def serve(connection: socket.socket, joining: types.ModuleType, worker: types.ModuleType) -> None:
    """Fork a worker for each request."""
    connection.send(json.dumps({"refusal": find_obstacle()}).encode())
    while True:
        data, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, 8)
        _reap()
        if not data:
            os._exit(0)
        if os.fork() == 0:
            try:
                connection.close()
                keep_worker(json.loads(data), fds, joining, worker)
            finally:
                os._exit(1)
        for fd in fds:
            os.close(fd)


def find_obstacle() -> str | None:
    """Return why forks of this process would share more than they may, or None."""
    if len(os.listdir("/proc/self/task")) != 1:
        return "a library starts threads when it is imported"
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split()
            if "w" in fields[1] and "s" in fields[1]:
                return f"a library shares writable memory: {' '.join(fields[5:]) or 'anonymous'}"
    return None


def keep_worker(request: dict[str, Any], fds: list[int], joining: types.ModuleType, worker: types.ModuleType) -> None:
    """Enter a sandbox, fork its worker, and pass on how that ended."""
    pidfd, channel_fd, output_fd, control_fd, waiting_fd = fds
    control = socket.socket(fileno=control_fd)
    try:
        try:
            os.setgroups([])
        except PermissionError:
            pass  # only the superuser may; bubblewrap leaves them as well
        joining.join_namespaces(pidfd, request["namespaces"])
        joining.drop_privileges()
        joining.set_dumpable(False)
        pid = os.fork()
        if pid == 0:
            become_worker(request, channel_fd, output_fd, control.detach(), joining, worker)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    for fd in (pidfd, channel_fd, output_fd):
        os.close(fd)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(waiting_fd, str(status if status >= 0 else STATUS_WHEN_KILLED - status).encode())


def become_worker(
    request: dict[str, Any],
    channel_fd: int,
    output_fd: int,
    control_fd: int,
    joining: types.ModuleType,
    worker: types.ModuleType,
) -> NoReturn:
    """Turn this fork into a worker; returns to nobody."""
    try:
        os.setsid()
        os.chdir(request["scratch"])
        _arrange_descriptors(channel_fd, output_fd, control_fd)
        worker.limit_core_files()
        worker.limit_process(request["limits"])
        forget_host(request)
        joining.set_dumpable(True)
        if request["filter"] is not None:
            joining.install_filter(bytes.fromhex(request["filter"]))
        with socket.socket(fileno=CONTROL_FD) as control:
            control.send(b'{"joined": true}')
            if not control.recv(1):
                os._exit(0)
        worker.serve_job(socket.socket(fileno=CHANNEL_FD), request["threads"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(1)


def forget_host(request: dict[str, Any]) -> None:
    """Make the interpreter what a fresh one in the sandbox would be: environment, paths, caches, random generators."""
    import importlib
    import linecache
    import platform
    import tempfile

    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [request["inside"]]
    script = f"{request['inside']}/evaluators/worker.py"
    sys.argv[:] = [script]
    main_module = types.ModuleType("__main__")
    main_module.__file__ = script
    sys.modules["__main__"] = main_module
    for name in ("worker", "joining"):
        del sys.modules[f"evaluators.{name}"]
        delattr(sys.modules["evaluators"], name)
    importlib.invalidate_caches()
    linecache.clearcache()
    tempfile.tempdir = None
    platform._uname_cache = None  # type: ignore[attr-defined]  # it holds the name of the host
    # `random` does so by itself after a fork.
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def _arrange_descriptors(channel_fd: int, output_fd: int, control_fd: int) -> None:
    import fcntl

    lowest = CONTROL_FD + 1
    channel_fd, output_fd, control_fd = (
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest) for fd in (channel_fd, output_fd, control_fd)
    )
    null_fd = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.dup2(channel_fd, CHANNEL_FD, inheritable=False)
    os.dup2(control_fd, CONTROL_FD, inheritable=False)
    os.closerange(lowest, DESCRIPTORS)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


if __name__ == "__main__":
    main()
