"""Texts too long for a row: one compressed file for each, named by the sha256 of the text.

    ledger.sqlite
    blobs/<sha256>.gz      UTF-8, gzip; `zcat` shows it

The folder lies beside the ledger and moves with it. A file is whole on the disk before the row that names it is
committed: it is written under another name, flushed, renamed, and the folder is flushed too. A process killed in between
leaves a file that no row names; it does no harm, and is used when the same text comes again. Nothing is ever deleted.
Every reading checks the hash.
"""

from __future__ import annotations

import errno
import gzip
import os
import uuid
import zlib
from pathlib import Path

from hypotheses.ledger.canonical import text_hash
from hypotheses.ledger.errors import LedgerStorageError

MAX_INLINE_BYTES = 64 * 1024
"""Longer texts go to files: rows stay short, so that transactions and the write-ahead log do."""

MAX_TEXT_BYTES = 1 << 20
_LEVEL = 6
_MODE = 0o644
_REPAIRS = {
    errno.ENOSPC: "the disk is full; make room and resume, nothing recorded so far is lost",
    errno.EDQUOT: "the disk quota is used up; make room and resume, nothing recorded so far is lost",
    errno.EFBIG: "files may not grow this large here; raise the limit and resume, nothing recorded so far is lost",
    errno.EROFS: "the disk is read-only; make it writable, or open the ledger read-only",
    errno.EACCES: "the folder may not be written; make it writable, or open the ledger read-only",
    errno.ENOENT: "the folder of the run was removed",
}


class BlobFiles:
    """The folder of long texts of one ledger. Several threads may keep and read at once.

    ledger_path: the database file; the folder is made beside it when the first long text comes.
    """

    def __init__(self, ledger_path: Path) -> None:
        self.folder = ledger_path.absolute().with_name("blobs")

    def path(self, digest: str) -> Path:
        """Return where a text is, or would be."""
        return self.folder / f"{digest}.gz"

    def keep(self, text: str, digest: str) -> None:
        """Write a text, unless its file is there and holds it; a damaged file is replaced.

        Raises:
            LedgerStorageError: it cannot be written; nothing half-written is left under its name.
        """
        try:
            if self.read(digest) == text:
                return
        except LedgerStorageError:
            pass  # missing or damaged: written now
        path = self.path(digest)
        temporary = path.with_name(f".{digest}.{uuid.uuid4().hex}.part")
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(exist_ok=True)
                flush_folder(self.folder.parent)
            try:
                self._write(temporary, gzip.compress(text.encode("utf-8"), _LEVEL, mtime=0))
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            flush_folder(self.folder)
        except OSError as err:
            repair = _REPAIRS.get(err.errno or 0, f"{err.strerror or err}; nothing of this step was stored")
            raise LedgerStorageError(f"{str(path)!r} cannot be written: {repair}") from err

    def read(self, digest: str) -> str:
        """Return a text.

        Raises:
            LedgerStorageError: its file is missing, cannot be read, or holds something else.
        """
        path = self.path(digest)
        try:
            with gzip.open(path) as file:
                data = file.read(MAX_TEXT_BYTES + 1)
            text = data.decode("utf-8")
        except FileNotFoundError as err:
            raise LedgerStorageError(
                f"{str(path)!r} is missing, which holds a text of this ledger; "
                f"copy the folder {self.folder.name!r} from where the ledger came from"
            ) from err
        except (EOFError, zlib.error, UnicodeDecodeError, gzip.BadGzipFile) as err:
            raise LedgerStorageError(f"{str(path)!r} is damaged: {err}; restore it from a copy") from err
        except OSError as err:
            raise LedgerStorageError(f"{str(path)!r} cannot be read: {err.strerror or err}") from err
        if text_hash(text) != digest:
            raise LedgerStorageError(f"{str(path)!r} was altered: it holds another text; restore it from a copy")
        return text

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
