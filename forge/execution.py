"""Whether what an edit adds really acts, and whether its neutrals are neutral: a program against runs of itself.

A knock-out shows that a mechanism acts only if its neutral does nothing. So with the mechanisms that an edit touches at
their neutrals the program must install what its parent installs: then whatever it installs besides comes through them, and a
dead body with a neutral that harms is seen for what it is. New mechanisms are held against the parent as it is; where the
edit also changes mechanisms that the parent has, those are at their neutrals on both sides.

Of several mechanisms each must also act without the others. Else the neutral of one could do its harm only while another
acts, and would look neutral where both are out.

All evidence here is what trusted code saw: digests of the layers that were installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from forge import program_source
from forge.program_identity import own_fingerprint
from hypotheses.ledger import Program
from hypotheses.probes import ProbeEvidence, installs_the_same

Look = Callable[[Program], ProbeEvidence | str]
"""The evidence of a run of a program, or how the run ended."""


class Twins(Protocol):
    """Makes programs with mechanisms at their neutrals."""

    def __call__(self, program: Program, mechanisms: Sequence[str]) -> Program | None: ...


@dataclass(frozen=True, kw_only=True)
class Touched:
    """Mechanisms in which a child differs from its parent."""

    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def altered(self) -> tuple[str, ...]:
        """Those that the child has, new or changed."""
        return (*self.new, *self.changed)


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What the runs showed.

    mechanisms: those that the edit stands on: the new ones, and the changed ones where the new do not carry the edit alone.
    not_neutral: why the neutrals are none, as a sentence without its end; empty when they are, or when there was nothing to ask.
    idle: mechanisms that do not act, with what showed it.
    """

    mechanisms: tuple[str, ...] = ()
    not_neutral: str = ""
    idle: Mapping[str, str] = field(default_factory=dict)

    @property
    def acting(self) -> tuple[str, ...]:
        """Mechanisms that an effect can be laid to."""
        return () if self.not_neutral else tuple(name for name in self.mechanisms if name not in self.idle)

    @property
    def is_explainable(self) -> bool:
        """Whether there may be something to explain an effect by; of an edit that touches no mechanism nothing is known."""
        return bool(self.acting) or not self.mechanisms


def touched_mechanisms(parent: str, child: str) -> Touched:
    """Return the mechanisms that the child adds, has with other code or another neutral, and lacks.

    What other mechanisms do inside it, and what the program uses outside its mechanisms too, is not code of a mechanism.
    """
    before, after = program_source.mechanisms(parent), program_source.mechanisms(child)
    shared = [name for name in after if name in before]
    return Touched(
        new=tuple(name for name in after if name not in before),
        changed=tuple(name for name in shared if own_fingerprint(parent, name) != own_fingerprint(child, name)),
        removed=tuple(name for name in before if name not in after),
    )


def examine(
    child: Program, parent: Program, *, twins: Twins, look: Look, where: str, leaning_on: Sequence[str] = ()
) -> Execution:
    """Compare a program with its parent, and with itself at the neutrals of what the edit touches.

    Args:
        child: the edited program.
        parent: the program it was edited from.
        twins: makes the programs to compare with.
        look: runs a program, the same way for all of them.
        where: what `look` runs, for people: ``the smoke run``.
        leaning_on: mechanisms that a reply claims or promises something of. Where the edit touches none itself, such as
            one that carries a mechanism to other layers where it is called, these must carry it.
    """
    touched = touched_mechanisms(parent.source, child.source)
    both = touched.altered
    if not both:
        both = tuple(dict.fromkeys(n for n in leaning_on if n in child.mechanisms and n in parent.mechanisms))
    own = look(child)
    if not both or isinstance(own, str):
        return Execution()
    inherited = tuple(name for name in both if name not in touched.new)
    attempts: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(touched.new, ())] if touched.new else []
    attempts += [(both, inherited)] if inherited else []
    why = ""
    for mechanisms, at_neutral in attempts:
        restored = _run_without(child, mechanisms, twins, look)
        # A removed mechanism is gone, or what it did stands in the program for good.
        bases = [(*at_neutral, *touched.removed), at_neutral] if touched.removed else [at_neutral]
        differences = [
            _difference(restored, _run_without(parent, base, twins, look), mechanisms, base, where) for base in bases
        ]
        if "" in differences:
            assert isinstance(restored, ProbeEvidence)
            idle = _idle(child, mechanisms, own, restored, twins, look, where)
            return Execution(mechanisms=mechanisms, idle=idle)
        why = differences[0]
    return Execution(mechanisms=both, not_neutral=why)


def _idle(
    child: Program,
    mechanisms: Sequence[str],
    own: ProbeEvidence,
    restored: ProbeEvidence,
    twins: Twins,
    look: Look,
    where: str,
) -> dict[str, str]:
    """Return which mechanisms do not act, with what showed it."""
    idle: dict[str, str] = {}
    if installs_the_same(own, restored):
        listed = _listed(mechanisms)
        return dict.fromkeys(mechanisms, f"with {listed} at the neutral {where} installs the same")
    for name in mechanisms:
        others = tuple(other for other in mechanisms if other != name)
        without = _run_without(child, (name,), twins, look)
        if isinstance(without, ProbeEvidence) and installs_the_same(own, without):
            idle[name] = f"with its neutral in its place {where} installs the same"
            continue
        alone = _run_without(child, others, twins, look) if others else own
        if isinstance(alone, ProbeEvidence) and installs_the_same(alone, restored):
            idle[name] = (
                f"without {_listed(others)}, which the edit brings too, {where} installs what it installs without both, so "
                "nothing shows that its neutral is one; make one mechanism of them, or bring them one after the other"
            )
    return idle


def _run_without(program: Program, mechanisms: Sequence[str], twins: Twins, look: Look) -> ProbeEvidence | str:
    if not mechanisms:
        return look(program)
    twin = twins(program, mechanisms)
    return look(twin) if twin is not None else "it cannot be made"


def _difference(
    restored: ProbeEvidence | str,
    base: ProbeEvidence | str,
    mechanisms: Sequence[str],
    at_neutral: Sequence[str],
    where: str,
) -> str:
    """Say how the program without its mechanisms differs from its parent; empty when it does not."""
    given = f"with {_listed(mechanisms)} at the neutral"
    parent = f"its parent without {_listed(at_neutral)}" if at_neutral else "its parent"
    if isinstance(restored, str):
        return f"{given} {where} ends so: {restored}"
    if isinstance(base, str):
        return f"there is nothing to compare it with, because {where} of {parent} ends so: {base}"
    if installs_the_same(restored, base):
        return ""
    names = [
        name
        for name, layer in restored.layers.items()
        if layer.get("digest") != base.layers.get(name, {}).get("digest")
    ]
    return (
        f"{given} {where} does not install what {parent} installs: {len(names)} of {len(restored.layers)} layers differ, "
        f"such as {names[0] if names else 'one that is missing'}"
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))
