"""Errors of the orchestrator, sorted by whose they are.

The user's (recipe, key, model name): `RecipeError`, `ProposerError`; the message holds the repair, the command line
prints it without a traceback and exits with 2. The model's (a reply that cannot be used): `ReplyProblem` and its kinds;
shown back to the model once with the exact reasons and recorded, never a reason to stop by itself.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_PROBLEMS = 20
"""Reasons told of one reply; a runaway reply has thousands, and they go into a prompt and the ledger."""


class ForgeError(Exception):
    """Base of every error raised by this package."""


class RecipeError(ForgeError, ValueError):
    """A recipe cannot be read: names the place, what was given and what would work."""


class ProposerError(ForgeError, RuntimeError):
    """The proposer cannot answer at all (key, model name, endpoint, deadline); the message holds the repair."""


class ProposerExhausted(ForgeError):
    """The proposer has nothing left to propose."""


class ReplyProblem(ForgeError, ValueError):
    """A reply cannot be used; `problems` are whole sentences that tell the model what to mend."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        told = (problems,) if isinstance(problems, str) else tuple(problems)
        if len(told) > MAX_PROBLEMS:
            told = (*told[:MAX_PROBLEMS], f"And {len(told) - MAX_PROBLEMS} more problems.")
        self.problems: tuple[str, ...] = told
        super().__init__("\n".join(self.problems))


class TruncatedReply(ReplyProblem):
    """The reply was cut off: by the token limit, or in the middle of a block."""


class EditProblem(ReplyProblem):
    """SEARCH/REPLACE blocks that cannot be read or applied; nothing of them was applied."""


class ProgramProblem(ReplyProblem):
    """A source text that is no program: it does not parse, or breaks the program convention."""
