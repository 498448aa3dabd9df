"""One place where errors become exit codes: the user's with 2, the host's with 1, an interrupt with 130."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Iterator

import typer

from evaluators.errors import HostError, UserError
from forge.errors import ForgeError
from forge.plain_text import spell_out
from hypotheses.ledger.errors import LedgerError, LedgerStorageError

HOST_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)
"""What the operating system says when the machine is at its end, wherever it says it; others are mistakes of this code."""


@contextlib.contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Turn what a user or the host did wrong into one sentence on standard error and an exit code."""
    try:
        yield
    except (HostError, LedgerStorageError) as error:
        _tell(f"the host failed: {error}")
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
    except KeyboardInterrupt as error:
        _tell("interrupted; `quantforge resume` goes on where it stopped")
        raise typer.Exit(130) from error


def _tell(message: str) -> None:
    sys.stderr.write(f"quantforge: {spell_out(message)}\n")
