"""Which mechanisms an edit touches, and what comparing a program with itself at their neutrals says."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from forge.execution import Execution, examine, touched_mechanisms
from forge.program_source import knock_out, mechanisms
from hypotheses.ledger import Program
from hypotheses.probes import ProbeEvidence
from tests.program_builders import CHILD, PARENT

NESTED = CHILD.replace("    return weight * 0.5", "    return scale(weight) * share()").replace(
    'MECHANISMS = ("shrink", "flip")',
    'MECHANISMS = ("shrink", "flip", "share")\n\n\ndef share():\n    return 0.5\n\n\ndef without_share():\n    return 1.0\n\n\n'
    "def scale(weight):\n    return weight * 1.0",
)


@pytest.mark.parametrize(
    ("parent", "child", "new", "changed", "removed"),
    [
        (PARENT, PARENT, "", "", ""),
        (PARENT, CHILD, "shrink flip", "", ""),
        (CHILD, PARENT, "", "", "shrink flip"),
        (CHILD, CHILD.replace("* 0.5", "* 0.4"), "", "shrink", ""),
        (
            CHILD,
            CHILD.replace("weight):\n    return weight\n", "weight):\n    return weight * 2\n", 1),
            "",
            "shrink",
            "",
        ),
        (CHILD, CHILD.replace("# ", "# more "), "", "", ""),
        (CHILD, CHILD.replace('scale_rule="even")', 'scale_rule="floor")'), "", "", ""),
        (NESTED, NESTED.replace("return 0.5", "return 0.4"), "", "share", ""),
        (NESTED, NESTED.replace("weight * 1.0", "weight * 1.1"), "", "shrink", ""),
        (NESTED, NESTED.replace("def quantize(session):", "def quantize(session):\n    scale(1)"), "", "shrink", ""),
    ],
    ids=[
        "nothing",
        "two added",
        "two removed",
        "a body",
        "a neutral",
        "comments",
        "outside",
        "inside another",
        "a helper",
        "shared",
    ],
)
def test_touched_mechanisms(parent: str, child: str, new: str, changed: str, removed: str) -> None:
    touched = touched_mechanisms(parent, child)
    assert (touched.new, touched.changed, touched.removed) == tuple(tuple(t.split()) for t in (new, changed, removed))


def program(source: str, key: str) -> Program:
    return Program(
        id=key, source=source, origin="candidate", ast_hash=key, normalized_ast_hash=key, title=key,
        mechanisms=mechanisms(source), parent_id=None, seq=1, at=datetime(2026, 12, 1, tzinfo=UTC),
    )  # fmt: skip


def shown(parent: str, child: str, installs: Callable[[str], dict[str, str] | str], *leaning_on: str) -> Execution:
    """Examine with runs that install what `installs` says of a source."""

    def look(one: Program) -> ProbeEvidence | str:
        made = installs(one.source)
        if isinstance(made, str):
            return made
        return ProbeEvidence(layers={name: {"digest": value} for name, value in made.items()})

    return examine(
        program(child, "child"),
        program(parent, "parent"),
        twins=lambda one, names: program(knock_out(one.source, names), f"{one.id} without {names}"),
        look=look,
        where="the run",
        leaning_on=leaning_on,
    )


def runs(source: str) -> dict[str, str] | str:
    """Run the programs of the builders on one number in the place of a weight."""
    if "raise" in source:
        return "crashed"
    names: dict[str, object] = {}
    body = source.replace("from forge_kernels import ActivationRule, encode", "")
    body = body.replace("encode(weight, scale_rule=", "(lambda w, r: (w, r))(weight, ").replace(
        "ActivationRule(scale_rule=", "("
    )
    installed: dict[str, str] = {}

    class Session:
        layers = ("a", "b")

        def weight(self, layer: str) -> float:
            return 1.0 if layer == "a" else 3.0

        def install(self, layer: str, value: object, activation: object) -> None:
            installed[layer] = repr(value)

    exec(compile(body, "program", "exec"), names)
    names["quantize"](Session())  # type: ignore[operator]
    return installed


def test_honest_edits_pass() -> None:
    assert shown(PARENT, CHILD, runs) == Execution(mechanisms=("shrink", "flip"))
    assert shown(CHILD, CHILD.replace("* 0.5", "* 0.4"), runs) == Execution(mechanisms=("shrink",))
    assert shown(CHILD, PARENT, runs) == Execution()
    # A part of an inherited mechanism made a mechanism of its own carries the edit alone.
    part = CHILD.replace("weight * 0.5", "weight * share()").replace(
        'MECHANISMS = ("shrink", "flip")',
        'MECHANISMS = ("shrink", "flip", "share")\n\n\ndef share():\n    return 0.4\n\n\ndef without_share():\n    return 0.5',
    )
    assert shown(CHILD, part, runs) == Execution(mechanisms=("share",))


def test_an_edit_beside_its_mechanisms_is_told() -> None:
    beside = CHILD.replace("flip(shrink(session.weight(layer)))", "flip(shrink(session.weight(layer))) + 1")
    found = shown(PARENT, beside, runs)
    assert found.not_neutral == (
        "with 'shrink' and 'flip' at the neutral the run does not install what its parent installs: 2 of 2 layers differ, "
        "such as a"
    )
    assert (found.acting, found.is_explainable) == ((), False)


def test_a_neutral_that_does_not_run_is_none() -> None:
    broken = CHILD.replace(
        "def without_flip(weight):\n    return weight", "def without_flip(weight):\n    raise ValueError"
    )
    # The text of the neutral stands in every program here, so every run ends so, but for the child's own.
    found = shown(PARENT, broken, lambda source: "crashed" if "return without_flip" in source else {"a": source[:9]})
    assert found.not_neutral == "with 'shrink' and 'flip' at the neutral the run ends so: crashed"


def test_an_edit_where_a_mechanism_is_called_is_carried_by_it_or_not() -> None:
    parent = CHILD.replace("flip(shrink(session.weight(layer)))", "session.weight(layer)")
    more = "flip(shrink(session.weight(layer)))"
    assert touched_mechanisms(parent, CHILD) == touched_mechanisms(CHILD, CHILD)
    assert shown(parent, CHILD, runs) == Execution()
    assert shown(parent, CHILD, runs, "shrink", "flip") == Execution(mechanisms=("shrink", "flip"))
    lone = shown(parent, CHILD.replace(more, "shrink(session.weight(layer))"), runs, "flip")
    assert lone.not_neutral.startswith(
        "with 'flip' at the neutral the run does not install what its parent without 'flip' installs"
    )
