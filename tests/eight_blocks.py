"""A subject of eight blocks, truncated to two in a smoke run: a program gives each layer one number, in this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from evaluators.results import LayerError

BLOCKS, SMOKE_BLOCKS = 8, 2
ROLES = ("q", "o", "up", "down")
SEED = """MECHANISMS = ()


def value(session, layer):
    total = 0.0
    return total


def quantize(session):
    for layer in session.layers:
        session.install(layer, value(session, layer))
"""


@dataclass(frozen=True)
class Layer:
    """One layer of the subject."""

    block: int
    role: str

    @property
    def name(self) -> str:
        return f"blocks.{self.block}.{self.role}"


@dataclass
class Session:
    """What a program is given, and what it installed."""

    num_blocks: int
    installed: dict[str, float] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def layers(self) -> list[Layer]:
        return [Layer(block, role) for block in range(self.num_blocks) for role in ROLES]

    def install(self, layer: Layer, number: float) -> None:
        self.installed[layer.name] = number
        event = {"index": len(self.events), "op": "install", "layer": layer.name, "block": layer.block}
        self.events.append(event | {"role": layer.role, "rank": 0, "transform": []})


class InProcess:
    """What every evaluator of this subject does alike."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def abort(self) -> None: ...

    def has_artifact(self, artifact_hash: str) -> bool:
        return True

    def error_map(self, artifact_hash: str) -> tuple[LayerError, ...]:
        return ()
