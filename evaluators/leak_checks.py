"""Checks on the measuring itself: a scored model must not see what comes later, nor what shares its batch.

Both are run on the very model that is scored, because neither a subject's configuration nor ours should be taken at
its word. Causality: tokens after the middle of a chunk are replaced, and the final hidden states before the middle must
stay as they were. Batches: a chunk's loss must be the same alone and among others.

Legend: L tokens per chunk, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evaluators.scorer import last_hidden, score

CAUSALITY_TOLERANCE = 1e-4
"""Largest difference of a hidden state, relative to the largest of them. Equal shapes round alike, so it is 0 in general."""
BATCH_TOLERANCE = 1e-3
"""Nats per token. Batches of another shape may round differently; a leak is orders of magnitude larger."""


def causality_gap(model: nn.Module, tokens_L: Tensor, other_L: Tensor) -> float:
    """Return how far the hidden states of the first half move when the second half is replaced.

    Args:
        model: a transformers causal LM, quantized or not.
        tokens_L: (L,) int64, L at least 4.
        other_L: (L,) int64, of which the second half is taken.

    Returns:
        max |h - h'| / max |h| over the first half; NaN or infinity when these states are not finite.
    """
    half = len(tokens_L) // 2
    changed_L = torch.cat([tokens_L[:half], other_L[half:]])
    with torch.no_grad():
        before_LH = last_hidden(model, tokens_L[None])[0, :half].float()
        after_LH = last_hidden(model, changed_L[None])[0, :half].float()
    return float((before_LH - after_LH).abs().max() / before_LH.abs().max().clamp_min(torch.finfo(torch.float32).tiny))


def batch_gap(model: nn.Module, chunks_CL: Tensor) -> float:
    """Return the largest difference of a chunk's loss between alone and in one batch in reversed order, nats per token."""
    alone = score(model, chunks_CL, 1)
    together = score(model, chunks_CL.flip(0), len(chunks_CL))[::-1]
    return max(abs(a - b) for a, b in zip(alone, together, strict=True))


def find_leak(model: nn.Module, chunks_CL: Tensor, *, check_batches: bool) -> str | None:
    """Return what is wrong with measuring this model on these chunks, or None.

    Args:
        model: what is scored.
        chunks_CL: (C, L) int64, of which the first few are used. Chunks of fewer than 4 tokens are too short to tell.
        check_batches: also compare batches; rounding may tip codes of a quantized model, so it is for unquantized ones.
    """
    if chunks_CL.shape[1] < 4:
        return None
    gap = causality_gap(model, chunks_CL[0], chunks_CL[-1].flip(0))
    if gap > CAUSALITY_TOLERANCE:
        return f"hidden states change by {gap:.2g} of their size when only later tokens change: it is not causal"
    if check_batches:
        gap = batch_gap(model, chunks_CL[:3])
        if gap > BATCH_TOLERANCE:
            return f"a chunk's loss changes by {gap:.2g} nats per token with what shares its batch"
    return None
