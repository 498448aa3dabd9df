"""What a probe can ask, as data: typed models that come from a proposer's text. `hypotheses.probes` answers them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator

from hypotheses.predictions import MechanismName

Role = Literal["q", "k", "v", "o", "gate", "up", "down"]
GroupRole = Literal["qkv", "o", "gate_up", "down"]
ROLES_OF_GROUP: dict[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "o": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
MEASUREMENTS = ("weight", "inputs", "second_moment", "output_error", "gate_loss")
"""Operations that return something and change nothing."""
Operation = Literal["weight", "inputs", "second_moment", "output_error", "gate_loss", "fold", "install"]
Share = Annotated[float, Field(gt=0, le=1)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Place(_Model):
    """Where in the subject: layers of these roles (or groups of these roles) in these blocks; empty means every one."""

    roles: tuple[Role, ...] = ()
    blocks: tuple[Annotated[int, Field(ge=0, lt=100_000)], ...] = ()
    groups: tuple[GroupRole, ...] = ()

    @property
    def is_everywhere(self) -> bool:
        return not (self.roles or self.blocks or self.groups)

    def has_layer(self, name: str) -> bool:
        """Whether the layer ``blocks.<block>.<role>`` lies here."""
        block, role = split_name(name)
        return self._has_block(block) and self._has_role(role)

    def overlaps(self, other: Place) -> bool:
        """Whether some layer could lie in both."""
        shared_blocks = not self.blocks or not other.blocks or bool(set(self.blocks) & set(other.blocks))
        return shared_blocks and bool(self._all_roles() & other._all_roles())

    def is_within(self, other: Place) -> bool:
        """Whether every layer here lies in `other` too."""
        blocks = not other.blocks or (bool(self.blocks) and set(self.blocks) <= set(other.blocks))
        return blocks and self._all_roles() <= other._all_roles()

    def _has_block(self, block: int | None) -> bool:
        return not self.blocks or block in self.blocks

    def _has_role(self, role: str) -> bool:
        return role in self._all_roles()

    def _all_roles(self) -> set[str]:
        every = {role for roles in ROLES_OF_GROUP.values() for role in roles}
        named: set[str] = set(self.roles) or every
        grouped = {role for group in self.groups for role in ROLES_OF_GROUP[group]} if self.groups else every
        return named & grouped

    def __str__(self) -> str:
        if self.is_everywhere:
            return "everywhere"
        roles = ", ".join(sorted(self._all_roles())) if self.roles or self.groups else "all roles"
        return f"{roles} of " + (f"blocks {', '.join(map(str, self.blocks))}" if self.blocks else "all blocks")


EVERYWHERE = Place()


class EventPattern(_Model):
    """A kind of `Session` call. What is left out matches anything.

    transform: kind of a step that must be among the event's (``hadamard`` also matches ``hadamard:32``).
    min_rank: smallest rank of the low-rank branch.
    """

    op: Operation
    place: Place = EVERYWHERE
    stream: Literal["quantized", "reference"] | None = None
    site: str | None = None
    transform: str | None = None
    min_rank: Annotated[int, Field(ge=1)] | None = None

    def matches(self, event: Mapping[str, Any]) -> bool:
        """Whether one logged event is of this kind."""
        if event.get("op") != self.op or not self._is_here(event):
            return False
        if self.stream is not None and event.get("stream") != self.stream:
            return False
        if self.site is not None and not _site_matches(self.site, str(event.get("site", ""))):
            return False
        if self.transform is not None and not has_step(event.get("transform"), self.transform):
            return False
        return self.min_rank is None or int(event.get("rank") or 0) >= self.min_rank

    def _is_here(self, event: Mapping[str, Any]) -> bool:
        if self.place.is_everywhere:
            return True
        layers = event_layers(event)
        if layers:
            return any(self.place.has_layer(layer) for layer in layers)
        block = event.get("block")
        return not (self.place.roles or self.place.groups) and block is not None and block in self.place.blocks


class CallProbe(_Model):
    """A Session or install event happened: where, how often, with what.

    at_least: number of matching events. Of several installs of one layer only the last counts: the others were
        replaced.
    share: share of the layers at the event's place that need a matching event of their own or of their group; 0 asks
        none.
    mechanism: when named, the tensors installed at the place must also change when it is knocked out, so that a
        measurement whose result is thrown away does not count.
    """

    kind: Literal["call"] = "call"
    event: EventPattern
    at_least: Annotated[int, Field(ge=1)] = 1
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    mechanism: MechanismName | None = None


class OrderProbe(_Model):
    """All events of the kind `first` came before all of the kind `then`.

    scope: "block" compares within each block in which either occurs (both must), "model" over the whole run.
    mechanism: as in `CallProbe`; the place is that of `then`.
    """

    kind: Literal["order"] = "order"
    first: EventPattern
    then: EventPattern
    scope: Literal["block", "model"] = "block"
    mechanism: MechanismName | None = None


ArtifactProperty = Literal[
    "transform_kind", "has_transform", "rank", "scale_rule", "code_rule", "bits", "weight_error", "distinct_digests"
]
Comparison = Literal["==", "!=", "<", "<=", ">", ">="]
_TEXT_PROPERTIES = ("transform_kind", "scale_rule", "code_rule")
_NUMBER_PROPERTIES = ("rank", "bits", "weight_error", "distinct_digests")


class ArtifactProbe(_Model):
    """A property of what was installed, decoded by trusted code.

    ``transform_kind == hadamard`` holds for a layer when some step is of that kind (``hadamard`` matches every size,
    ``hadamard:32`` one); ``!=`` when none is. ``distinct_digests`` counts different installs over the whole place; all
    other properties are compared layer by layer, and `share` of the layers must satisfy them.
    """

    kind: Literal["artifact"] = "artifact"
    property: ArtifactProperty
    comparison: Comparison = "=="
    value: StrictBool | StrictInt | StrictFloat | StrictStr
    place: Place = EVERYWHERE
    share: Share = 1.0

    @model_validator(mode="after")
    def _value_fits(self) -> Self:
        if self.property in _TEXT_PROPERTIES:
            if not isinstance(self.value, str):
                raise ValueError(f"{self.property} is compared with text, not with {self.value!r}")
        elif self.property == "has_transform":
            if not isinstance(self.value, bool):
                raise ValueError(f"has_transform is compared with true or false, not with {self.value!r}")
        elif isinstance(self.value, bool | str) or not math.isfinite(self.value):
            raise ValueError(f"{self.property} is compared with a number, not with {self.value!r}")
        if self.property not in _NUMBER_PROPERTIES and self.comparison not in ("==", "!="):
            raise ValueError(f"{self.property} can be compared by == or != only, not by {self.comparison}")
        return self


class KnockoutProbe(_Model):
    """The named function replaced by its declared neutral: the decoded tensors at the place must (or must not) change.

    share: share of the layers at the place that must change; with "unchanged" every layer must stay the same.
    """

    kind: Literal["knockout"] = "knockout"
    mechanism: MechanismName
    place: Place = EVERYWHERE
    expect: Literal["changed", "unchanged"] = "changed"
    share: Share = 1.0


class LineProbe(_Model):
    """Lines of the function ran, as counted inside the program's own process. Advisory: that process can forge it.

    Lines are counted in the smoke run alone; of other runs it is undetermined. No required edit takes it for its probe.
    """

    kind: Literal["line"] = "line"
    function: MechanismName
    at_least: Annotated[int, Field(ge=1)] = 1


class AbsentProbe(_Model):
    """A barred or removed mechanism left no mark at the place.

    It is gone from the program (name and, where given, fingerprint and shape), or its knocked-out twin installs the same
    tensors there; and no layer there satisfies `mark` (a property that only the mechanism produces), under whatever name.

    fingerprint, shape: of the mechanism as `ProbeEvidence` has them; `with_fingerprint` fills them in.
    others: fingerprints of what else the program held then, which may stay.
    """

    kind: Literal["absent"] = "absent"
    mechanism: MechanismName
    place: Place = EVERYWHERE
    fingerprint: str | None = None
    shape: str | None = None
    others: tuple[str, ...] = ()
    mark: ArtifactProbe | None = None


Probe = Annotated[
    CallProbe | OrderProbe | ArtifactProbe | KnockoutProbe | LineProbe | AbsentProbe, Field(discriminator="kind")
]


def split_name(name: str) -> tuple[int | None, str]:
    """Return block and role (of a layer or group) from ``blocks.<block>.<role>``; (None, "") for any other name."""
    parts = name.split(".")
    if len(parts) == 3 and parts[0] == "blocks" and parts[1].isdecimal():
        return int(parts[1]), parts[2]
    return None, ""


def event_layers(event: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the layers that a logged event is about: its layer, or all layers of its group."""
    layer = event.get("layer")
    if isinstance(layer, str) and layer:
        return (layer,)
    block, role = split_name(str(event.get("group") or ""))
    return () if block is None else tuple(f"blocks.{block}.{name}" for name in ROLES_OF_GROUP.get(role, ()))


def has_step(steps: object, kind: str) -> bool:
    """Whether a list of step kinds has this one; a kind without a size matches every size."""
    names = steps if isinstance(steps, list | tuple) else ()
    return any(name == kind or str(name).split(":")[0] == kind for name in names)


def _site_matches(wanted: str, site: str) -> bool:
    """A site is named by its full name or by its kind, the part after the last dot."""
    return site == wanted or site.rsplit(".", 1)[-1] == wanted
