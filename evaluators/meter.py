"""Counts what a run of a program spends on forward passes, and ends the run beyond the contract's cap."""

from __future__ import annotations

from evaluators.errors import ProgramError
from evaluators.results import Outcome


class Meter:
    """Subject-forward tokens: tokens times decoder blocks actually run, divided by the number of blocks.

    A block that is stopped in the middle counts as a whole one. The count is kept in whole block-tokens and rounded up
    when it is read.
    """

    def __init__(self, *, num_blocks: int, max_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self._block_tokens = 0

    @property
    def tokens(self) -> int:
        """Subject-forward tokens spent so far."""
        return -(-self._block_tokens // self.num_blocks)

    def charge(self, num_tokens: int, num_blocks: int = 1) -> None:
        """Charge `num_tokens` sent through `num_blocks` blocks, before they are run.

        Raises:
            ProgramError: the run has spent more than its cap; the outcome is ``OVER_METERED``.
        """
        self._block_tokens += num_tokens * num_blocks
        if self.tokens > self.max_tokens:
            raise ProgramError(
                f"the program spent {self.tokens} subject-forward tokens; the contract allows {self.max_tokens}",
                Outcome.OVER_METERED,
            )
