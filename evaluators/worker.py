"""The untrusted process: waits for its job, runs one program, says how it ended.

Forked from a template that has imported everything (`evaluators.template_process`), or, where that cannot be, started as
``python -I -S -B -u worker.py CONFIG``: isolated, so that no file of the working folder and no variable of the environment
can shadow a module, and without `site`, so that no .pth file runs. That leaves only the standard library on the import
path; CONFIG (JSON) names the folders that are added. Until those are set, this file imports nothing else.

Order of events: own limits, imports, ``ready`` over the channel, wait; job in, program runs, ``done`` or ``failed``
out. Everything up to the job is trusted code; from then on the process belongs to the program, and the evaluator
believes nothing it says except about its own end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import linecache
import os
import resource
import select
import signal
import socket
import sys
import traceback
import types
from typing import Any, NoReturn

PROGRAM_FILE = "program.py"
MAX_REASON = 2000
MAX_FRAMES = 8
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve one job on the inherited socket, then end the process without running exit hooks."""
    config = json.loads(sys.argv[1])
    del sys.argv[1:]
    limit_process(config["limits"])
    if config["die_with_parent"]:
        # Under bubblewrap the first process of the namespace sees to this, and the host to core files.
        limit_core_files()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if _is_abandoned(config["socket_fd"]):
        os._exit(0)
    sys.path[:0] = config["import_paths"]
    serve_job(socket.socket(fileno=config["socket_fd"]), config["threads"])


def serve_job(connection: socket.socket, threads: int) -> NoReturn:
    """Say that this process is ready, run one program, and end."""
    import torch

    import evaluators.line_counts
    import evaluators.session_client
    from evaluators.transport import ChannelClosedError, connect_channel

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    try:
        channel = connect_channel(connection)
        channel.send({"op": "ready", "args": {"versions": {"torch": torch.__version__}}})
        job = channel.receive().body
    except ChannelClosedError:
        os._exit(0)
    # The evaluator and its watchdog go first when a program keeps every core busy.
    os.nice(10)
    torch.manual_seed(job["seed"])
    try:
        report = _run(job["source"], lambda: evaluators.session_client.RemoteSession(channel), job["count_lines"])
        sys.stdout.flush()
        sys.stderr.flush()
        channel.send(report)
    finally:
        os._exit(0)


def _run(source: str, open_session: Any, count_lines: bool) -> dict[str, Any]:
    from evaluators.errors import ContractError
    from evaluators.line_counts import LineCounter

    path = os.path.join(os.getcwd(), PROGRAM_FILE)
    counter = LineCounter(path)
    try:
        module = _load(source, path)
        quantize = getattr(module, "quantize", None)
        if not callable(quantize):
            return _failed("crashed", "the program has no function quantize(session)")
        session = open_session()
        with counter if count_lines else contextlib.nullcontext():
            quantize(session)
    except ContractError as err:
        return _failed("contract", _describe(err, path))
    except SystemExit as err:
        return _failed("contract", f"the program left quantize by SystemExit({str(err.code)[:80]})")
    except BaseException as err:  # the process boundary: whatever a program raises is its outcome
        is_memory = isinstance(err, MemoryError) or type(err).__name__ == "OutOfMemoryError"
        return _failed("out_of_memory" if is_memory else "crashed", _describe(err, path))
    return {"op": "done", "args": {"line_hits": counter.hits}}


def _load(source: str, path: str) -> types.ModuleType:
    """Execute the program as module ``program``; the file is there for tracebacks and for those who inspect it."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(source)
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    module = types.ModuleType("program")
    module.__file__ = path
    sys.modules["program"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module


def _failed(kind: str, reason: str) -> dict[str, Any]:
    text = reason.encode("utf-8", "replace").decode("utf-8")
    return {"op": "failed", "args": {"kind": kind, "reason": text[:MAX_REASON]}}


def _describe(error: BaseException, path: str) -> str:
    """Return the exception with the lines of the program that led to it; frames of other files say nothing about it."""
    try:
        head = f"{type(error).__name__}: {error}"
    except Exception:  # the exception's own __str__ belongs to the program
        head = type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        return head
    lines = [f"  line {frame.lineno} in {frame.name}: {(frame.line or '')[:160]}" for frame in frames[-MAX_FRAMES:]]
    return "\n".join([head[: MAX_REASON // 2], *lines])


def limit_process(limits: dict[str, Any]) -> None:
    """Set the limits that the kernel enforces on each process: lengths of files, descriptors, number of processes.

    Not that of core files: it has to stand before the filter of system calls does.
    """
    _set_limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _set_limit(resource.RLIMIT_NOFILE, limits["open_files"])
    if limits["processes"] is not None:
        _set_limit(resource.RLIMIT_NPROC, limits["processes"])


def limit_core_files() -> None:
    """Keep the kernel from writing core files. One byte: with 0 it would still call the host's handler, as superuser."""
    _set_limit(resource.RLIMIT_CORE, 1)


def _is_abandoned(socket_fd: int) -> bool:
    """Whether the evaluator is dead already: killed before anyone had asked to die with it, so that no signal came."""
    poller = select.poll()
    poller.register(socket_fd, select.POLLIN)
    return any(seen & select.POLLHUP for _, seen in poller.poll(0))


def _set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


if __name__ == "__main__":
    main()
