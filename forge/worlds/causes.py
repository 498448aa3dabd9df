"""Causes of a gain, controls that could tell them apart, and how much of the gain a control retains under each cause.

The numbers are no measurements: they say how the causes are meant. A world adds variety to them. Its proposer knows the table up
to the width of its predictions, except where the world says that it is mistaken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hypotheses.predictions import Control, ControlKind

CAUSES: Final = ("capacity", "selection", "spreading", "weight_side", "activation_side")
LUCK: Final = "luck"


@dataclass(frozen=True, kw_only=True)
class KnownControl:
    """A control of the table. retained: of the child's effect, by cause, in the order of `CAUSES`.

    A child has one mechanism, so there is no knockin: its mechanism alone in the parent is the child.
    """

    key: str
    kind: ControlKind
    cost: int
    retained: tuple[float, float, float, float, float]

    def control(self) -> Control:
        """Return it as a proposer would write it down."""
        edits = "edits" if self.kind == "substitute" else None
        return Control(key=self.key, kind=self.kind, removes=("mechanism",), edits=edits, cost=self.cost)


CONTROLS: Final = (
    # Everything that was added is gone: 0 whatever the cause, so it tells nothing.
    KnownControl(key="mechanism_off", kind="knockout", cost=1, retained=(0.0, 0.0, 0.0, 0.0, 0.0)),
    # As many channels, directions or bits, chosen at random.
    KnownControl(key="random_choice", kind="substitute", cost=1, retained=(0.95, 0.2, 0.85, 0.8, 0.8)),
    # Half of what was added.
    KnownControl(key="half_capacity", kind="substitute", cost=1, retained=(0.5, 0.8, 0.95, 0.9, 0.9)),
    # A permutation in place of a mixing: outliers move and stay.
    KnownControl(key="no_mixing", kind="substitute", cost=1, retained=(0.9, 0.85, 0.15, 0.6, 0.55)),
    # Only on the weights, only on the activations.
    KnownControl(key="weights_alone", kind="substitute", cost=1, retained=(0.6, 0.6, 0.45, 0.95, 0.1)),
    KnownControl(key="activations_alone", kind="substitute", cost=1, retained=(0.4, 0.4, 0.5, 0.1, 0.9)),
    # Channels of another layer: as much capacity, the wrong choice, at a longer run.
    KnownControl(key="foreign_choice", kind="substitute", cost=2, retained=(0.95, 0.05, 0.7, 0.7, 0.7)),
    KnownControl(key="twice_the_capacity", kind="substitute", cost=3, retained=(1.4, 1.05, 1.0, 1.0, 1.0)),
    # One half of the layers: the same whatever the cause.
    KnownControl(key="half_the_layers", kind="knockout", cost=1, retained=(0.5, 0.5, 0.5, 0.5, 0.5)),
)
