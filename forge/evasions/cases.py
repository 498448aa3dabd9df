"""The ways a change can fail to be one, each as real edits of the shipped `rtn` program; and sound changes beside them."""

from __future__ import annotations

from dataclasses import dataclass

from forge.edits import EditBlock
from hypotheses.probe_kinds import ArtifactProbe, CallProbe, EventPattern, KnockoutProbe, Place, Probe

MECHANISM = "spin"
_IMPORTS = "from forge_kernels import ActivationRule, encode, transform_weight"
_ALL_IMPORTS = (
    "import torch\n"
    "from forge_kernels import ActivationRule, Diagonal, Hadamard, LowRank, Permutation, encode, transform_weight"
)
_DECLARED = "MECHANISMS = ()"
_PLACE = "    steps = ()"
_CALL = "    steps = spin(session, group)"
_BRANCHES = "    branches = {}"
_ACTS = "    return (Hadamard(size=32),)"
_NOTHING = "    return ()"

ROTATED: Probe = ArtifactProbe(property="transform_kind", value="hadamard", share=0.5)
INSTALLED: Probe = CallProbe(event=EventPattern(op="install", transform="hadamard"), share=0.5, mechanism=MECHANISM)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A change that claims a mechanism.

    edits: of the seed program. artifact: the property that it claims for what is installed. is_sound: whether the mechanism
    really acts.
    """

    key: str
    what: str
    edits: tuple[EditBlock, ...]
    claims: tuple[str, ...] = (MECHANISM,)
    artifact: Probe = ROTATED
    knockout: KnockoutProbe = KnockoutProbe(mechanism=MECHANISM, share=0.5)
    is_sound: bool = False


def _spin(
    body: str = _ACTS, *, neutral: str = _NOTHING, call: str = _CALL, beside: str = "", names: str = '"spin",'
) -> tuple[EditBlock, ...]:
    """Return the edits that add the mechanism; `beside` is more code after its neutral."""
    functions = f"def spin(session, group):\n{body}\n\n\ndef without_spin(session, group):\n{neutral}{beside}"
    edits = [
        EditBlock(search=_IMPORTS, replace=_ALL_IMPORTS),
        EditBlock(search=_DECLARED, replace=f"MECHANISMS = ({names})\n\n\n{functions}"),
    ]
    if call != _PLACE:
        edits.append(EditBlock(search=_PLACE, replace=call))
    return tuple(edits)


def _only_beside_it() -> tuple[EditBlock, ...]:
    """A sound mechanism, and a dead one whose neutral harms where the sound one acts."""
    beside = (
        "\n\n\ndef twist(session, group, steps):\n    return steps\n\n\n"
        "def without_twist(session, group, steps):\n    return (*steps, Hadamard(size=16)) if steps else steps"
    )
    call = f"{_CALL}\n    steps = twist(session, group, steps)"
    return _spin(call=call, beside=beside, names='"spin", "twist"')


_TOKENS = (
    "    num_inputs = group.num_inputs\n"
    "    return (Permutation(index_K=torch.arange(num_inputs)), Diagonal(scale_K=torch.ones(num_inputs)))"
)
_ZERO_BRANCH = (
    "    branches = {}\n"
    "    if spin(session, group):\n"
    "        for layer in group.layers:\n"
    "            a_RK = torch.zeros(8, layer.num_inputs, dtype=torch.bfloat16)\n"
    "            b_NR = torch.zeros(layer.num_outputs, 8, dtype=torch.bfloat16)\n"
    "            branches[layer.name] = LowRank(a_RK=a_RK, b_NR=b_NR)"
)

CASES: tuple[Case, ...] = (
    Case(key="honest", what="a rotation of every group", edits=_spin(), is_sound=True),
    Case(
        key="beyond_the_truncated_subject",
        what="a rotation from the third block on",
        edits=_spin(f"{_ACTS} if group.block >= 2 else ()"),
        is_sound=True,
    ),
    Case(key="never_called", what="dead code: the mechanism is never called", edits=_spin(call=_PLACE)),
    Case(
        key="if_false_at_the_call",
        what="called under if False",
        edits=_spin(call=f"{_PLACE}\n    if False:\n    {_CALL}"),
    ),
    Case(
        key="if_false_in_the_body",
        what="if False in the body",
        edits=_spin(f"    if False:\n    {_ACTS}\n{_NOTHING}"),
    ),
    Case(
        key="redefined_at_top_level",
        what="defined again at top level",
        edits=_spin(beside=f"\n\n\ndef spin(session, group):\n{_NOTHING}"),
    ),
    Case(
        key="redefined_inside",
        what="defined again inside the function that calls it",
        edits=_spin(call=f"    def spin(session, group):\n        return ()\n\n{_CALL}"),
    ),
    Case(
        key="caught_exception",
        what="raises, and the exception is caught",
        edits=_spin(
            '    raise ValueError("no")', call=f"    try:\n    {_CALL}\n    except ValueError:\n        steps = ()"
        ),
    ),
    Case(
        key="alias",
        what="an alias of the neutral is called instead",
        edits=_spin(call="    steps = keep(session, group)", beside="\n\n\nkeep = without_spin"),
    ),
    Case(
        key="stale_import",
        what="imported from a module of that name",
        edits=_spin(call=f"    from spin import spin\n\n{_CALL}"),
    ),
    Case(
        key="only_comments",
        what="an edit in comments only",
        edits=(EditBlock(search=_DECLARED, replace="MECHANISMS = ()  # spin: a rotation of every group"),),
        claims=(),
    ),
    Case(
        key="result_thrown_away",
        what="called, and its result thrown away",
        edits=_spin(call=f"    spin(session, group)\n{_PLACE}"),
    ),
    Case(
        key="overwritten",
        what="its result overwritten before the install",
        edits=_spin(call=f"{_CALL}\n{_PLACE}"),
    ),
    Case(
        key="harmful_neutral",
        what="a dead body, and a neutral that harms",
        edits=_spin(_NOTHING, neutral="    return (Hadamard(size=16),)"),
    ),
    Case(
        key="harmful_neutral_later",
        what="acts, with a neutral that harms from the third block on",
        edits=_spin(
            f"{_ACTS} if group.block < 2 else ()", neutral="    return (Hadamard(size=16),) if group.block >= 2 else ()"
        ),
    ),
    Case(
        key="harmful_neutral_beside",
        what="a dead mechanism whose neutral harms where a sound one acts",
        edits=_only_beside_it(),
        claims=(MECHANISM, "twist"),
        knockout=KnockoutProbe(mechanism="twist", share=0.5),
    ),
    Case(
        key="empty_steps",
        what="a permutation in order and a diagonal of ones",
        edits=_spin(_TOKENS),
        artifact=ArtifactProbe(property="has_transform", value=True, share=0.5),
    ),
    Case(
        key="zero_branch",
        what="a branch of rank 8 of zeros",
        edits=(
            *_spin("    return True", neutral="    return False", call=_PLACE),
            EditBlock(search=_BRANCHES, replace=_ZERO_BRANCH),
        ),
        artifact=ArtifactProbe(property="rank", comparison=">=", value=8, share=0.5),
    ),
    Case(
        key="only_on_the_truncated_subject",
        what="acts where there are few layers, not on the whole subject",
        edits=_spin(f"{_ACTS} if len(session.groups) <= 8 else ()"),
    ),
    Case(
        key="first_blocks_only",
        what="acts in the first two blocks, claimed for the later ones too",
        edits=_spin(f"{_ACTS} if group.block < 2 else ()"),
        knockout=KnockoutProbe(mechanism=MECHANISM, place=Place(blocks=(2, 3))),
        artifact=ArtifactProbe(property="transform_kind", value="hadamard", place=Place(blocks=(2, 3))),
    ),
)
