"""Which files a worker's Python needs: the interpreter, the folders of third-party packages, and our own few modules.

Works for virtual environments, interpreters outside /usr (pyenv, conda, uv), distribution packages, and our packages
installed as a wheel (beside torch) or as a checkout. A worker is started from the base interpreter without `site`, so
the virtual environment matters only for its package folder. All paths are resolved: what is bound into a sandbox has
one name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evaluators.errors import HostError

OUR_PACKAGES: Final = ("evaluators", "forge", "hypotheses", "forge_kernels")
WORKER_MODULES: Final = (
    "__init__.py",
    "errors.py",
    "line_counts.py",
    "random_streams.py",
    "results.py",
    "session.py",
    "session_client.py",
    "transport.py",
    "wire.py",
    "worker.py",
)
"""The files of this package that a worker imports; nothing else of it is visible in a sandbox."""
TEMPLATE_MODULES: Final = (*WORKER_MODULES, "joining.py")
"""The files of this package that a template imports."""


@dataclass(frozen=True, kw_only=True)
class PythonRuntime:
    """Absolute paths on this host.

    executable: the base interpreter, links resolved.
    prefix_folders: folders of the base installation that hold its standard library, shared libraries and headers.
    package_folders: folders of third-party packages, in import order; the one of torch is among them.
    evaluators, forge_kernels: our packages.
    """

    executable: Path
    prefix_folders: tuple[Path, ...]
    package_folders: tuple[Path, ...]
    evaluators: Path
    forge_kernels: Path

    def worker_files(self) -> list[Path]:
        """Return the existing files of `WORKER_MODULES`."""
        return [self.evaluators / name for name in WORKER_MODULES if (self.evaluators / name).is_file()]


def find_runtime() -> PythonRuntime:
    """Return the runtime of the running interpreter.

    Raises:
        HostError: torch or one of our packages is not where an import would find it.
    """
    executable = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    base = Path(sys.base_prefix).resolve()
    prefix_folders = [base / name for name in ("bin", "lib", "lib64", "include") if (base / name).is_dir()]
    folders = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    package_folders = [package_folder("torch").parent, *(folder.resolve() for folder in folders if folder.is_dir())]
    return PythonRuntime(
        executable=executable,
        prefix_folders=tuple(dict.fromkeys(folder.resolve() for folder in prefix_folders)),
        package_folders=tuple(dict.fromkeys(package_folders)),
        evaluators=package_folder("evaluators"),
        forge_kernels=package_folder("forge_kernels"),
    )


def package_folder(name: str) -> Path:
    """Return the folder of a package without importing it.

    Raises:
        HostError: there is no such package.
    """
    spec = importlib.util.find_spec(name)
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not locations:
        raise HostError(f"package {name!r} is not importable, so no worker can be started")
    return Path(locations[0]).resolve()


def worker_environment(*, threads: int, scratch: str) -> dict[str, str]:
    """Return the whole environment of a worker: nothing of the host's but what selects devices and driver libraries."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "USER": "program",
        "LOGNAME": "program",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TRITON_CACHE_DIR": f"{scratch}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
        "XDG_CACHE_HOME": f"{scratch}/cache",
        "CUDA_CACHE_PATH": f"{scratch}/cuda",
    }
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        environment[name] = str(threads)
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
        if name in os.environ:
            environment[name] = os.environ[name]
    return environment
