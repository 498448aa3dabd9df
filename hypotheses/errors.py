"""Base of the errors raised by this package."""

from __future__ import annotations


class HypothesesError(Exception):
    """Base of every error raised by the `hypotheses` package."""
