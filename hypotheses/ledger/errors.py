"""Errors of the ledger.

`BudgetExhausted` is a normal end of a campaign. `LedgerConflict` means that a replayed step differs from what was
recorded. `LedgerRefused` means that a rule of the ledger (order of registration, immutability, links between rows)
forbids the write. All others are failures of the file or of the host.
"""

from __future__ import annotations

from hypotheses.errors import HypothesesError


class LedgerError(HypothesesError):
    """Base of every error raised by `hypotheses.ledger`."""


class LedgerNotFound(LedgerError, LookupError):
    """No record with that id, or no ledger at that path."""


class LedgerConflict(LedgerError):
    """The same key was recorded before with other content; the message names the fields that differ."""


class LedgerRefused(LedgerError):
    """A rule of the ledger forbids this write; nothing was stored."""


class LedgerBusy(LedgerError):
    """Another process writes to this run, or holds the database for longer than the time-out."""


class LedgerSchemaError(LedgerError):
    """The file is no ledger, or has a schema that this version cannot read."""


class LedgerStorageError(LedgerError, OSError):
    """The disk is full, read-only or damaged. Nothing of the failed step was stored."""


class LedgerValueError(LedgerError, ValueError):
    """A value that must not be stored: NaN, infinity, or a text above the size cap."""


class EvaluationInProgress(LedgerError):
    """This process has reserved the evaluation already and has neither settled nor released it."""


class BudgetExhausted(LedgerError):
    """No evaluator call is free."""

    def __init__(self, *, total: int, used: int, reserved: int) -> None:
        self.total = total
        self.used = used
        self.reserved = reserved
        super().__init__(f"no evaluator call is free: budget {total}, used {used}, reserved {reserved}")
