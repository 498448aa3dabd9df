"""The source of a control: made mechanically for knock-outs and knock-ins, from the proposer's edits for substitutes.

Edits are held to what the control says that it removes: that changes, or the calls of it go, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge import program_source
from forge.control_edits import foreign_changes, removal_problems
from forge.edits import apply_edits, parse_blocks
from forge.errors import ForgeError, ReplyProblem
from forge.program_identity import ast_hash
from forge.screening import Refusal, added_mechanisms, check_source
from hypotheses.predictions import Control

BITS_TOLERANCE = 0.1
"""Effective bits per weight that a substitute may differ from the child: a permutation's index, not a branch."""


class ControlProblem(ForgeError, ValueError):
    """The control cannot be made of these programs; the message says why."""


def build_control(control: Control, *, parent: str, child: str) -> str:
    """Return the source of a control.

    knockout: the child with `removes` at their neutrals. knockin: the child with every mechanism that it has beyond the
    parent, except `keeps`, at its neutral: the parent with `keeps` alone. substitute: the edits applied to `against`.

    Raises:
        ControlProblem: it names a mechanism that is not there, does not apply, or is no program; it changes something else
            than it says; or it equals the child or the parent.
    """
    try:
        if control.edits is not None:
            unknown = [name for name in control.removes if name not in program_source.mechanisms(child)]
            if unknown:
                raise ControlProblem(
                    f"control {control.key!r} replaces {', '.join(map(repr, unknown))}, which is no mechanism of the child"
                )
            base = parent if control.against == "parent" else child
            source = apply_edits(base, parse_blocks(control.edits))
            check_source(source)
            _require_what_it_says(control, source, base=base, parent=parent, child=child)
        elif control.kind == "knockin":
            added = added_mechanisms(parent, child)
            foreign = [name for name in control.keeps if name not in added]
            if foreign:
                raise ControlProblem(
                    f"control {control.key!r} keeps {', '.join(map(repr, foreign))}, which the child does not add; "
                    f"it adds {', '.join(map(repr, added)) or 'none'}"
                )
            beyond = [name for name in added if name not in control.keeps]
            source = program_source.knock_out(child, beyond) if beyond else child
        else:
            source = program_source.knock_out(child, control.removes)
        check_source(source)
    except ReplyProblem as problem:
        raise ControlProblem("; ".join(problem.problems)) from problem
    except Refusal as refusal:
        raise ControlProblem(str(refusal)) from refusal
    for name, other in (("child", child), ("parent", parent)):
        if ast_hash(source) == ast_hash(other):
            raise ControlProblem(f"control {control.key!r} equals the {name}, so it can tell nothing")
    return source


def _require_what_it_says(control: Control, source: str, *, base: str, parent: str, child: str) -> None:
    """Raise `ControlProblem` unless the edits change the mechanisms that the control removes, and only those."""
    removes = _removed(control, parent=parent, child=child)
    problems = removal_problems(removes, source, child=child)
    problems += foreign_changes(removes, source, base=base)
    if problems and ast_hash(source) not in (ast_hash(parent), ast_hash(child)):
        raise ControlProblem(f"control {control.key!r} does not do what it says: {'; '.join(problems)}")


def _removed(control: Control, *, parent: str, child: str) -> Sequence[str]:
    if control.kind != "knockin":
        return control.removes
    return [name for name in added_mechanisms(parent, child) if name not in control.keeps]
