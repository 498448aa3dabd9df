"""Errors of the evaluator, sorted by whose they are.

The user's (recipe, files, hardware): `UserError`; the message says what was given and what would work, and the command line
prints it without a traceback and exits with 2. The program's: `ProgramError`; caught by the evaluator and recorded as the
outcome of that evaluation. The host's: `HostError`; it stops the campaign and is never evidence against a hypothesis.
"""

from __future__ import annotations

from evaluators.results import Outcome


class EvaluatorError(Exception):
    """Base of every error raised by this package."""


class UserError(EvaluatorError):
    """Something the user gave cannot work; the message holds the repair."""


class SubjectError(UserError, ValueError):
    """The subject cannot be loaded, mapped or quantized."""


class CorpusError(UserError, ValueError):
    """The corpus cannot be read or is too short for its splits."""


class SandboxUnavailableError(UserError, RuntimeError):
    """No bubblewrap or no namespaces: the host cannot isolate a program."""


class HostError(EvaluatorError, RuntimeError):
    """The machine failed, not the program."""


class ProgramError(EvaluatorError):
    """The program failed; `outcome` says how."""

    outcome: Outcome = Outcome.CRASHED

    def __init__(self, message: str, outcome: Outcome | None = None) -> None:
        super().__init__(message)
        if outcome is not None:
            self.outcome = outcome


class ContractError(ProgramError):
    """An install or fold broke the contract. Raised to the program, which may catch it and try something else."""

    outcome = Outcome.CONTRACT
