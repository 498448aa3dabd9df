"""Closed-form and sequential solvers that programs compose: codes, block transforms, balances, corrections."""
