"""Controls are made of the two programs as their kind says, or refused with the reason."""

from __future__ import annotations

import pytest

from forge import program_source
from forge.controls import ControlProblem, build_control
from forge.program_identity import ast_hash
from hypotheses.predictions import Control
from tests.program_builders import CHILD, PARENT, blocks


def build(child: str = CHILD, parent: str = PARENT, **fields: object) -> str:
    return build_control(Control(key="trial", **fields), parent=parent, child=child)  # type: ignore[arg-type]


def test_a_knockout_is_the_child_with_the_mechanism_at_its_neutral() -> None:
    source = build(kind="knockout", removes=("shrink",))
    assert source == program_source.knock_out(CHILD, ("shrink",))
    assert "return without_shrink(weight)" in source
    assert "return -weight" in source


def test_a_knockin_is_the_child_without_everything_else_that_it_adds() -> None:
    assert build(kind="knockin", keeps=("shrink",)) == program_source.knock_out(CHILD, ("flip",))


def test_a_mechanism_that_the_parent_has_already_stays_in_a_knockin() -> None:
    parent = program_source.knock_out(CHILD, ()).replace('("shrink", "flip")', '("flip",)')
    child = CHILD.replace('("shrink", "flip")', '("shrink", "flip", "twist")') + (
        "\n\ndef twist(weight):\n    return weight.flip(0)\n\n\ndef without_twist(weight):\n    return weight\n"
    )
    assert build(child, parent, kind="knockin", keeps=("shrink",)) == program_source.knock_out(child, ("twist",))


def test_a_substitute_applies_its_edits_to_the_program_it_names() -> None:
    child = build(
        kind="substitute", removes=("shrink",), edits=blocks("    return weight * 0.5", "    return weight * 2")
    )
    assert child == CHILD.replace("weight * 0.5", "weight * 2")
    parent = build(
        kind="substitute",
        removes=("shrink",),
        against="parent",
        edits=blocks("        weight = session.weight(layer)", "        weight = session.weight(layer) * 2"),
    )
    assert parent == PARENT.replace("session.weight(layer)\n", "session.weight(layer) * 2\n")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "knockout", "removes": ("swirl",)}, "'swirl' is no mechanism of the program; its mechanisms: shrink"),
        (
            {"kind": "knockin", "keeps": ("swirl",)},
            "keeps 'swirl', which the child does not add; it adds 'shrink', 'flip'",
        ),
        (
            {"kind": "substitute", "removes": ("swirl",), "edits": blocks("    return -weight", "    return weight")},
            "replaces 'swirl', which is no mechanism of the child",
        ),
        ({"kind": "knockout"}, "'trial' equals the child"),
        ({"kind": "knockin", "keeps": ("shrink", "flip")}, "'trial' equals the child"),
        (
            {
                "kind": "substitute",
                "removes": ("shrink",),
                "edits": blocks("    return weight * 0.5", "    return weight * 0.5  # the same"),
            },
            "equals the child",
        ),
        (
            {
                "kind": "substitute",
                "removes": ("shrink",),
                "against": "parent",
                "edits": blocks("MECHANISMS = ()", "MECHANISMS = ()  # the same"),
            },
            "equals the parent",
        ),
        (
            {"kind": "substitute", "removes": ("shrink",), "edits": blocks("    return weight * 3", "    return 1")},
            "SEARCH stands nowhere in the program",
        ),
        ({"kind": "substitute", "removes": ("shrink",), "edits": "prose"}, "no SEARCH/REPLACE block"),
        (
            {"kind": "substitute", "removes": ("shrink",), "edits": blocks("    return weight * 0.5", "    return (")},
            "convention: The program does not parse",
        ),
        (
            {"kind": "substitute", "removes": ("shrink",), "edits": blocks("    return weight * 0.5", "    eval('1')")},
            "static: Line",
        ),
    ],
)
def test_what_makes_no_control_is_refused_with_its_reason(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ControlProblem) as info:
        build(**fields)  # type: ignore[arg-type]
    assert words in str(info.value)


SUBSTITUTE: dict[str, object] = {"kind": "substitute", "removes": ("shrink",)}
HELPED = CHILD.replace("    return weight * 0.5", "    return half(weight)").replace(
    "def without_shrink", "def half(weight):\n    return weight * SHARE\n\n\nSHARE = 0.5\n\n\ndef without_shrink"
)
CALL = "        weight = flip(shrink(session.weight(layer)))"


@pytest.mark.parametrize(
    ("child", "edits"),
    [
        (CHILD, (CALL, "        weight = flip(session.weight(layer) * 2)")),
        (CHILD, (CALL, "        share = 2\n        weight = flip(session.weight(layer) * share)")),
        (HELPED, ("    return weight * SHARE", "    return weight * 2")),
        (HELPED, ("SHARE = 0.5", "SHARE = 2")),
        (
            CHILD,
            ("    return weight * 0.5", "    return other(weight)\n\n\ndef other(weight):\n    return weight * 2"),
        ),
    ],
)
def test_a_substitute_may_change_what_it_removes_and_the_calls_of_it(child: str, edits: tuple[str, str]) -> None:
    assert build(child, **SUBSTITUTE, edits=blocks(*edits)) == child.replace(*edits)


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (("    return -weight", "    return weight * 3"), "'shrink' is still there as it was"),
        (("    return -weight", "    return weight * 3"), "it changes 'flip' too"),
        (("    return weight * 0.5", "    return weight * 2", "    return -weight", "    return weight"), "'flip' too"),
        ((CALL, "        weight = shrink(flip(session.weight(layer)))"), "'shrink' is still there as it was"),
        (
            (
                "    return weight * 0.5",
                "    return weight * 2",
                'encode(weight, scale_rule="even")',
                'encode(weight, scale_rule="floor")',
            ),  # fmt: skip
            "it changes 'quantize' too",
        ),
        (
            (
                "    return weight * 0.5",
                "    return weight * 2",
                "ActivationRule, encode",
                "ActivationRule, gptq as encode",
            ),
            "it gives 'encode' another meaning",
        ),
        (
            ("    return weight * 0.5", "    return weight * 2\n\n\ndef len(*a, **b):\n    return 0"),
            "it binds 'len' anew",
        ),
    ],
)
def test_a_control_does_what_it_says_and_nothing_else(edits: tuple[str, ...], words: str) -> None:
    changed = CHILD
    pairs = list(zip(edits[::2], edits[1::2], strict=True))
    for search, replace in pairs:
        changed = changed.replace(search, replace)
    # One block for the whole program: what counts is what changes, not how it is written.
    with pytest.raises(ControlProblem, match="does not do what it says") as info:
        build(**SUBSTITUTE, edits=blocks(CHILD.strip("\n"), changed.strip("\n")))
    assert words in str(info.value)


def test_a_substitute_in_the_parent_leaves_the_parents_mechanisms_alone() -> None:
    parent = (
        program_source.knock_out(CHILD, ()).replace('("shrink", "flip")', '("flip",)').replace("flip(shrink(", "(flip(")
    )
    edits = blocks("    return -weight", "    return weight * 3")
    with pytest.raises(ControlProblem, match="it changes 'flip' too"):
        build(CHILD, parent, **SUBSTITUTE, against="parent", edits=edits)


def test_a_control_is_a_program_of_its_own() -> None:
    hashes = {
        ast_hash(source)
        for source in (
            PARENT,
            CHILD,
            build(kind="knockout", removes=("shrink",)),
            build(kind="knockout", removes=("flip",)),
            build(kind="knockout", removes=("shrink", "flip")),
        )
    }
    assert len(hashes) == 5
