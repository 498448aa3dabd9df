"""What one run of a program may use; exceeding a limit is that program's recorded outcome."""

from __future__ import annotations

from dataclasses import dataclass, fields

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one run; all are positive.

    wall_s: seconds from handing over the job to its end, time spent serving its calls included.
    memory_bytes: resident memory of all its processes, plus its temporary files and messages in flight.
    processes: processes and threads together.
    output_bytes: bytes written to stdout and stderr together.
    file_bytes: length of any single file it writes; the private temporary folder as a whole holds twice that.
    open_files: file descriptors per process.
    calls: Session calls.
    """

    wall_s: float = 900.0
    memory_bytes: int = 8 * GIB
    processes: int = 256
    output_bytes: int = 4 << 20
    file_bytes: int = GIB
    open_files: int = 1024
    calls: int = 200_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"limit {field.name}={value!r} is not positive")
