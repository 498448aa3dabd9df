"""Loss of a model on token chunks: the number that every comparison in this project rests on.

    chunk loss = mean over t = 1..L-1 of -log p(token_t | tokens before t),    nats per token

Log-softmax in float32, means in float64. Chunks are independent sequences without padding and without a key-value
cache, so that a chunk's loss does not depend on what shares its batch beyond floating-point rounding. Logits are never
held for more than a few rows at a time: a batch of them would be larger than the model.

Legend: C chunks, L tokens per chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from evaluators.parallel import run_side_by_side

MAX_LOGITS = 2**23
"""Most logits held at once: 32 MiB in float32, which also keeps them near the processor's caches."""


def score(model: nn.Module, chunks_CL: Tensor, batch_size: int = 4) -> tuple[float, ...]:
    """Return the loss of each chunk in nats per token; NaN for a chunk with any non-finite logit.

    Args:
        model: a transformers causal LM, in eval mode.
        chunks_CL: (C, L) int64 tokens, L at least 2.
        batch_size: chunks per forward pass; changes speed, and results by rounding only.
    """

    def losses_of(tokens_CL: Tensor) -> list[float]:
        with torch.no_grad():
            values: list[float] = chunk_losses(model, last_hidden(model, tokens_CL), tokens_CL).tolist()
        return values

    per_batch = run_side_by_side(losses_of, torch.split(chunks_CL, batch_size))
    return tuple(loss for losses in per_batch for loss in losses)


def last_hidden(model: nn.Module, tokens_CL: Tensor) -> Tensor:
    """Return the decoder's output after its final norm, (C, L, H), from a forward pass without a cache."""
    body = cast(Any, model).model
    return cast(Tensor, body(input_ids=tokens_CL, use_cache=False).last_hidden_state)


def head_logits(model: nn.Module, hidden_RH: Tensor) -> Tensor:
    """Return float32 logits (R, V) of rows of the final hidden state, with the soft cap where the model has one."""
    logits_RV = cast(Any, model).lm_head(hidden_RH).to(torch.float32)
    cap = getattr(cast(Any, model).config, "final_logit_softcapping", None)
    if cap is not None:
        logits_RV = torch.tanh(logits_RV / cap) * cap
    return cast(Tensor, logits_RV)


def chunk_losses(model: nn.Module, hidden_CLH: Tensor, tokens_CL: Tensor) -> Tensor:
    """Return the loss of each chunk, (C,) float64 on the CPU, from the final hidden state."""
    num_chunks, length = tokens_CL.shape
    rows_RH = hidden_CLH[:, :-1].reshape(num_chunks * (length - 1), -1)
    targets_R = tokens_CL[:, 1:].reshape(-1)
    vocab_size = int(cast(Any, model).lm_head.weight.shape[0])
    losses: list[Tensor] = []
    rows_at_once = max(1, MAX_LOGITS // vocab_size)
    pieces = zip(torch.split(rows_RH, rows_at_once), torch.split(targets_R, rows_at_once), strict=True)
    for rows, targets in pieces:
        logits_RV = head_logits(model, rows)
        losses_R = functional.cross_entropy(logits_RV, targets, reduction="none").double()
        # A logit of minus infinity leaves the loss of another token finite; it is not what a sound model returns.
        lowest, highest = torch.aminmax(logits_RV)
        if not bool(lowest.isfinite() & highest.isfinite()):
            losses_R = losses_R.masked_fill(~logits_RV.isfinite().all(dim=-1), torch.nan)
        losses.append(losses_R)
    return torch.cat(losses).reshape(num_chunks, length - 1).mean(dim=1).cpu()
