"""One place where errors become exit codes: the user's with 2, the host's with 1, an interrupt with 130."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer

from evaluators.errors import HostError, UserError
from forge.errors import ForgeError
from forge.plain_text import spell_out
from hypotheses.ledger.errors import LedgerError, LedgerStorageError


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
    except KeyboardInterrupt as error:
        _tell("interrupted; `quantforge resume` goes on where it stopped")
        raise typer.Exit(130) from error


def _tell(message: str) -> None:
    sys.stderr.write(f"quantforge: {spell_out(message)}\n")
