"""A session in the same process, for tests and for developing programs: no sandbox, no limits, nothing is trusted.

It differs from `session_client.RemoteSession` in nothing that a program can see, except that it is faster. Scores that
count come from `evaluator.Evaluator`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evaluators.contract import Contract
from evaluators.corpora import Corpus
from evaluators.errors import ContractError
from evaluators.random_streams import keyed_generator
from evaluators.session import Group, Layer, Session, Site, Stream
from evaluators.session_server import SessionServer, draw_chunks
from evaluators.subjects import Subject
from forge_kernels.rules import ActivationRule, Encoded, LowRank
from forge_kernels.transforms import IDENTITY, Transform


class LocalSession(Session):
    """Calls a server directly."""

    def __init__(self, server: SessionServer) -> None:
        self.server = server
        self.layers = server.layers
        self.groups = server.groups
        self.sites = server.sites
        self.device = torch.device(server.hello().device)

    def weight(self, layer: Layer | str) -> Tensor:
        """See `Session.weight`."""
        return self.server.weight(_name(layer)).to(self.device)

    def inputs(self, group: Group | str, *, stream: Stream = "quantized", max_tokens: int | None = None) -> Tensor:
        """See `Session.inputs`."""
        return self.server.inputs(_name(group), stream=stream, max_tokens=max_tokens).to(self.device)

    def second_moment(
        self, group: Group | str, *, stream: Stream = "quantized", max_tokens: int | None = None
    ) -> Tensor:
        """See `Session.second_moment`."""
        return self.server.second_moment(_name(group), stream=stream, max_tokens=max_tokens).to(self.device)

    def output_error(
        self,
        layer: Layer | str,
        weight: Encoded,
        *,
        transform: Transform = IDENTITY,
        activation: ActivationRule | None = None,
        low_rank: LowRank | None = None,
    ) -> float:
        """See `Session.output_error`."""
        return self.server.output_error(
            _name(layer), weight, transform=transform, activation=activation, low_rank=low_rank
        )

    def gate_loss(self) -> float:
        """See `Session.gate_loss`."""
        return self.server.gate_loss()

    def fold(self, site: Site | str, matrix: Tensor) -> None:
        """See `Session.fold`."""
        self.server.fold(_name(site), matrix)

    def install(
        self,
        layer: Layer | str,
        weight: Encoded,
        *,
        transform: Transform = IDENTITY,
        activation: ActivationRule | None = None,
        low_rank: LowRank | None = None,
    ) -> None:
        """See `Session.install`."""
        self.server.install(_name(layer), weight, transform=transform, activation=activation, low_rank=low_rank)

    def rng(self, layer: Layer | Group | str, purpose: str) -> torch.Generator:
        """See `Session.rng`."""
        return keyed_generator(self.server.seed, _name(layer), purpose)

    def log(self, message: str) -> None:
        """See `Session.log`."""
        self.server.log(str(message))


def open_local_session(
    subject: Subject, corpus: Corpus, contract: Contract, *, calibration_chunks: int = 32, draw: int = 0, seed: int = 0
) -> LocalSession:
    """Return a session on the same text that `evaluator.Evaluator` gives a program with the same draw and seed."""
    calibration_CL = draw_chunks(corpus.splits["calibration"], calibration_chunks, draw)
    server = SessionServer(
        subject, calibration_CL=calibration_CL, gate_CL=corpus.splits["gate"], contract=contract, seed=seed
    )
    return LocalSession(server)


def _name(named: Any) -> str:
    name = named if isinstance(named, str) else getattr(named, "name", None)
    if not isinstance(name, str):
        raise ContractError(f"{type(named).__name__} is not a layer, group or site, nor the name of one")
    return name
