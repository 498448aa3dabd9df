"""Proposers: whatever answers a prompt in the one text format of `forge.replies`."""
