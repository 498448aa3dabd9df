"""The lock of a run: one writer at a time, known by its pid.

An advisory `flock` on ``<ledger>.lock``. The kernel drops it when the process ends in any way, so that nothing has to
be cleaned up after `kill -9`; the pid in the file only serves the message of the one that is refused. The descriptor is
not inherited by programs that this process starts. Not covered: file systems on which `flock` does not work between
hosts.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from hypotheses.ledger.errors import LedgerBusy, LedgerStorageError

GRACE_S = 0.5
"""A killed process, or one that is just starting a program, may hold its descriptors for some milliseconds longer."""


def boot_id() -> str:
    """Return the id of this boot of the host, or ``unknown`` where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


class RunLock:
    """Exclusive lock beside a ledger file.

    Raises:
        LedgerBusy: another process (or another `Ledger` of this one) holds it.
        LedgerStorageError: the lock file cannot be made.
    """

    def __init__(self, ledger_path: Path) -> None:
        self.path = ledger_path.with_name(ledger_path.name + ".lock")
        try:
            self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as err:
            raise LedgerStorageError(f"cannot make the lock {str(self.path)!r}: {err.strerror}") from err
        if not self._acquire(self._descriptor):
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise LedgerBusy(
                f"{str(ledger_path)!r} is being written by process {holder}; "
                "wait until it ends, or open the ledger read-only"
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode("ascii"), 0)

    @staticmethod
    def _acquire(descriptor: int) -> bool:
        deadline = time.monotonic() + GRACE_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.02)
            else:
                return True

    def release(self) -> None:
        """Give the lock back; harmless when done twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
