"""Which file system a ledger lies on: the write-ahead log needs memory shared by all its processes, so one host.

On a network file system two hosts would each keep an index of the log of their own, and locks may not reach across: the
database is damaged without an error. Such a folder is refused for writing; reading a ledger there is warned about.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import NamedTuple

from hypotheses.ledger.errors import LedgerStorageError

MOUNTINFO = Path("/proc/self/mountinfo")

NETWORK_KINDS = frozenset(
    {
        "9p", "acfs", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "gfs", "gfs2", "glusterfs", "gpfs", "lustre",
        "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf", "weka", "wekafs",
    }
)  # fmt: skip
NETWORK_FUSE = frozenset(
    {
        "afp", "beegfs", "ceph", "ceph-fuse", "cephfs", "curlftpfs", "davfs", "davfs2", "gcsfuse", "glusterfs", "gvfsd-fuse",
        "juicefs", "juicefs:", "mfs", "moosefs", "rclone", "s3fs", "smbnetfs", "sshfs", "vmhgfs-fuse",
    }
)  # fmt: skip
"""What follows ``fuse.`` in the kind of a mount."""

_OCTAL = re.compile(r"\\([0-7]{3})")
_log = logging.getLogger("hypotheses.ledger")


class Mount(NamedTuple):
    """One mounted file system. `source` is what was mounted, for example ``server:/export``."""

    id: int
    parent: int
    point: str
    kind: str
    source: str

    @property
    def is_network(self) -> bool:
        """Whether processes of several hosts may have it mounted at once."""
        kind, _, sub = self.kind.partition(".")
        return kind in NETWORK_KINDS or (kind in ("fuse", "fuseblk") and sub in NETWORK_FUSE)


def read_mounts(text: str) -> list[Mount]:
    """Read the text of ``/proc/self/mountinfo``; lines that are none are passed over.

    A line: id, parent, device, root, mount point, options, any number of tags, ``-``, kind, source, super options. Spaces
    and the like are octal escapes.
    """
    mounts = []
    for line in text.splitlines():
        head, dash, tail = line.partition(" - ")
        fields, rest = head.split(" "), tail.split(" ")
        if dash and len(fields) >= 6 and len(rest) >= 2 and fields[0].isdigit() and fields[1].isdigit():
            point, source = _unescaped(fields[4]), _unescaped(rest[1])
            mounts.append(Mount(int(fields[0]), int(fields[1]), point, rest[0], source))
    return mounts


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """Return the mount that an absolute path without links lies on; None when the table has no answer.

    The walk goes from the root down as the kernel's does, from each mount into what is mounted first on the way. So of two
    mounts at one place the later counts, and one that a later mount above it hides does not.
    """
    above = [mount for mount in mounts if _covers(mount.point, path)]
    known = {mount.id for mount in above}
    roots = [mount for mount in above if mount.parent not in known or mount.parent == mount.id]
    current = max(roots, key=lambda mount: len(mount.point), default=None)
    seen: set[int] = set()
    while current is not None:
        seen.add(current.id)
        inside = [mount for mount in above if mount.parent == current.id and mount.id not in seen]
        nearest = min(inside, key=lambda mount: len(mount.point), default=None)
        if nearest is None:
            return current
        current = nearest
    return None


def find_mount(path: Path) -> Mount | None:
    """Return the mount that a file (or the place of one to be made) lies on; None where the host does not tell."""
    try:
        text = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
        resolved = path.resolve()
    except (OSError, RuntimeError):
        return None
    return mount_of(str(resolved), read_mounts(text))


def require_local(path: Path) -> None:
    """Check that a ledger may be written here.

    Raises:
        LedgerStorageError: the folder is on a network file system.
    """
    mount = find_mount(path)
    if mount is not None and mount.is_network:
        raise LedgerStorageError(
            f"{str(path.parent)!r} is on a network file system ({mount.kind}, {mount.source} at {mount.point}), where "
            "SQLite's write-ahead log is not safe; put the run into a local folder with --out and copy it when it ended"
        )


def warn_of_network(path: Path) -> None:
    """Log a warning when a ledger is read from a network file system."""
    mount = find_mount(path)
    if mount is not None and mount.is_network:
        _log.warning(
            "%r is read from a network file system (%s, %s at %s): while another host writes to it, what is read may be "
            "damaged or old; copy the folder of the run to a local disk",
            str(path), mount.kind, mount.source, mount.point,
        )  # fmt: skip


def _covers(point: str, path: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescaped(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
