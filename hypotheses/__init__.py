"""Hypotheses: predictions, control design, verdicts, required edits, probes, and the ledger that keeps them."""
