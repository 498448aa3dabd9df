"""Folds asked for by a program: checked before, compared after, undone where the model's function moved.

The logits of a short piece of calibration text are compared with those of the untouched model, so that many folds
cannot drift where one alone would be refused.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from evaluators.architecture import DecoderMap
from evaluators.errors import ContractError
from evaluators.folds import fold
from evaluators.scorer import head_logits, last_hidden
from evaluators.session import Layer, LayerRole, Site

PROBE_TOKENS = 64
MAX_LOGIT_DRIFT = 1e-3
"""Largest relative change of the probe's logits, ``||after - before|| / ||before||``, in float32."""


def touched_layers(decoder_map: DecoderMap, site: Site) -> list[Layer]:
    """Return the quantized layers whose weights a fold at `site` changes."""
    if site.kind == "residual_rotation":
        return list(decoder_map.layers)
    if site.kind == "norm_diagonal":
        return [layer for layer in decoder_map.layers if site.name.startswith(f"{layer.group}.")]
    roles: dict[str, tuple[LayerRole, ...]] = {
        "value_output": ("v", "o"),
        "up_down_diagonal": ("up", "down"),
        "up_down_permutation": ("gate", "up", "down"),
    }
    return [layer for layer in decoder_map.layers if layer.block == site.block and layer.role in roles[site.kind]]


class FoldGuard:
    """Makes folds on one model, whose layers are full-precision while a fold is made.

    Args:
        decoder_map: the model, changed in place.
        tokens_CL: (1, L) int64 text for the comparison; its first tokens are used.
    """

    def __init__(self, decoder_map: DecoderMap, tokens_CL: Tensor) -> None:
        self._map = decoder_map
        self._tokens_CL = tokens_CL[:1, :PROBE_TOKENS]
        self._original: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the next fold sends through the subject, made or refused."""
        return self._tokens_CL.numel() * (2 if self._original is None else 1)

    def fold(self, site: Site, matrix: Any) -> Tensor:
        """Make the fold, and return the matrix as a copy that the program cannot reach.

        Raises:
            ContractError: no tensor, a matrix that `fold` refuses, or logits that move; the model is then as before.
        """
        checked = _copy_matrix(site, matrix)
        if self._original is None:
            self._original = self._logits()
        was_tied = self._map.is_tied
        scope = self._map.model if site.block is None else self._map.block_modules[site.block]
        saved = {parameter: parameter.detach().clone() for parameter in scope.parameters()}
        try:
            fold(self._map, site, checked)
            drift = float((self._logits() - self._original).norm() / self._original.norm())
            if not drift <= MAX_LOGIT_DRIFT:
                raise ContractError(
                    f"fold at {site.name!r} changes the model's logits by {drift:.2g} of their norm; at most "
                    f"{MAX_LOGIT_DRIFT:g} is rounding, so give a better conditioned matrix"
                )
        except ContractError:
            self._restore(saved, was_tied)
            raise
        return checked

    def _logits(self) -> Tensor:
        with torch.no_grad():
            hidden_CLH = last_hidden(self._map.model, self._tokens_CL)
            return head_logits(self._map.model, hidden_CLH[0]).double()

    def _restore(self, saved: dict[nn.Parameter, Tensor], was_tied: bool) -> None:
        if was_tied and not self._map.is_tied:
            self._map.head.weight = cast(nn.Parameter, self._map.embedding.weight)
            cast(Any, self._map.model).config.tie_word_embeddings = True
        with torch.no_grad():
            for parameter, values in saved.items():
                parameter.copy_(values)


def _copy_matrix(site: Site, matrix: Any) -> Tensor:
    """Return a dense copy on the CPU; `fold` checks dtype, shape and values."""
    if not isinstance(matrix, Tensor) or matrix.layout is not torch.strided or matrix.device.type == "meta":
        raise ContractError(f"fold at {site.name!r} got {type(matrix).__name__}; give a dense tensor {site.shape}")
    return matrix.detach().to("cpu").clone(memory_format=torch.contiguous_format)
