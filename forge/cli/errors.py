"""One place where errors become exit codes: the user's with 2, the host's with 1, Ctrl-C with 130, SIGTERM with 143."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import typer

from evaluators.errors import HostError, UserError
from forge.errors import ForgeError
from forge.plain_text import spell_out
from hypotheses.ledger.errors import LedgerError, LedgerStorageError

HOST_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)
"""What the operating system says when the machine is at its end, wherever it says it; others are mistakes of this code."""

SIGNAL_BASE = 128
"""What shells add to the number of the signal that ended a process."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised where Ctrl-C would be: workers are ended and the ledger is closed on the way out."""


@contextlib.contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Turn what a user, the host or a signal did into one sentence on standard error and an exit code."""
    try:
        with _terminable():
            yield
    except (HostError, LedgerStorageError) as error:
        _tell(f"the host failed: {error}", error)
        raise typer.Exit(1) from error
    except (ForgeError, UserError, LedgerError) as error:
        _tell(str(error))
        raise typer.Exit(2) from error
    except OSError as error:
        if error.errno not in HOST_ERRORS:
            raise
        where = f" ({error.filename})" if error.filename else ""
        _tell(f"the host failed: {error.strerror}{where}; mend that and resume, nothing recorded so far is lost")
        raise typer.Exit(1) from error
    except Terminated as error:
        _tell("terminated", error)
        raise typer.Exit(SIGNAL_BASE + signal.SIGTERM) from error
    except KeyboardInterrupt as error:
        _tell("interrupted", error)
        raise typer.Exit(SIGNAL_BASE + signal.SIGINT) from error


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Raise `Terminated` in this block on the first SIGTERM; further ones are ignored until the way out is walked."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(message: str, error: BaseException | None = None) -> None:
    """Write a message and what was noted on the error: how to go on."""
    notes = getattr(error, "__notes__", ())
    sys.stderr.write(f"quantforge: {spell_out('; '.join([message, *notes]))}\n")
