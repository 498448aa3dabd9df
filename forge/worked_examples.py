"""The worked examples of the prompts: real replies to a small program, checked by the same code that reads any reply.

They show the form. Their subject is deliberately plain (a scale rule), so that they suggest as little as can be.
"""

from __future__ import annotations

import functools

from forge.edits import EditBlock, apply_edits, render_blocks
from forge.replies import ConditionalEdit, ExplanationReply, MechanismClaim, ProposalReply
from forge.reply_writing import write_explanation, write_proposal
from hypotheses.predictions import Control, Explanation, Hypothesis, Prediction
from hypotheses.probe_kinds import AbsentProbe, KnockoutProbe, Place
from hypotheses.required_edits import RequiredEdit

__all__ = ["EXAMPLE_PROGRAM", "example_child", "example_explanation", "example_proposal"]

EXAMPLE_PROGRAM = '''"""Round every weight to the nearest code."""

from forge_kernels import ActivationRule, encode

MECHANISMS = ()


def quantize(session):
    for layer in session.layers:
        weight = encode(session.weight(layer), scale_rule="even")
        session.install(layer, weight, activation=ActivationRule(scale_rule="even"))
'''

_PROPOSAL = ProposalReply(
    analysis="The error map shows that weights cost more than activations, most of all in `down`.",
    mechanisms=(
        MechanismClaim(
            name="scale_search",
            cause="scale_choice",
            statement="A scale chosen by its squared error clips the largest weight when that saves the others more.",
        ),
    ),
    edits=(
        EditBlock(
            search="MECHANISMS = ()",
            replace="""MECHANISMS = ("scale_search",)


def scale_search(weight):
    return encode(weight, scale_rule="search")


def without_scale_search(weight):
    return encode(weight, scale_rule="even")""",
        ),
        EditBlock(
            search='        weight = encode(session.weight(layer), scale_rule="even")',
            replace="        weight = scale_search(session.weight(layer))",
        ),
    ),
)

_SEARCH = '    return encode(weight, scale_rule="search")'
_ROUND_DOWN = EditBlock(search=_SEARCH, replace='    return encode(weight, scale_rule="floor")')
_ROUND_UP = EditBlock(search=_SEARCH, replace='    return encode(weight, scale_rule="rceil")')


@functools.cache
def example_proposal() -> str:
    """Return a reply that proposes a change of `EXAMPLE_PROGRAM`."""
    return write_proposal(_PROPOSAL)


@functools.cache
def example_child() -> str:
    """Return `EXAMPLE_PROGRAM` with the example proposal applied."""
    return apply_edits(EXAMPLE_PROGRAM, _PROPOSAL.edits)


@functools.cache
def example_explanation() -> str:
    """Return a reply that explains the gain of `example_child` over `EXAMPLE_PROGRAM`."""
    intervals = {
        ("scale_choice", "always_smaller"): (-0.5, 0.4),
        ("scale_choice", "never_clipping"): (-0.5, 0.4),
        ("smaller_scales", "always_smaller"): (0.7, 1.2),
        ("smaller_scales", "never_clipping"): (-1.0, 0.1),
    }
    hypotheses = (
        Hypothesis(
            key="scale_choice",
            cause="scale_choice",
            mechanism="scale_search",
            statement="Choosing block by block helps: some blocks gain by the smaller scale, others would lose.",
        ),
        Hypothesis(
            key="smaller_scales",
            cause="smaller_scales",
            mechanism="scale_search",
            statement="Smaller scales help in every block, and the choice adds nothing.",
        ),
    )
    controls = (
        Control(
            key="always_smaller",
            kind="substitute",
            removes=("scale_search",),
            edits=render_blocks([_ROUND_DOWN]),
            description="The smaller scale in every block, at the same bits.",
        ),
        Control(
            key="never_clipping",
            kind="substitute",
            removes=("scale_search",),
            edits=render_blocks([_ROUND_UP]),
            description="A scale so large that nothing is clipped, in every block.",
        ),
    )
    wishes = (
        ConditionalEdit(
            hypothesis="scale_choice",
            verdict="supported",
            edit=RequiredEdit(
                kind="refine",
                mechanism="scale_search",
                cause="scale_choice",
                place=Place(roles=("down",)),
                wording="Weigh the search in down by the second moment of the inputs.",
                probe=KnockoutProbe(mechanism="scale_search", place=Place(roles=("down",))),
            ),
        ),
        ConditionalEdit(
            hypothesis="scale_choice",
            verdict="refuted",
            edit=RequiredEdit(
                kind="remove",
                mechanism="scale_search",
                cause="scale_choice",
                wording="Drop the search: the smaller scale alone does it.",
                probe=AbsentProbe(mechanism="scale_search"),
            ),
        ),
    )
    return write_explanation(
        ExplanationReply(
            analysis="The gain may come from choosing, or only from scales that are smaller on average.",
            explanation=Explanation(
                hypotheses=hypotheses,
                controls=controls,
                predictions=tuple(
                    Prediction(hypothesis=cause, control=control, low=low, high=high)
                    for (cause, control), (low, high) in intervals.items()
                ),
            ),
            required_edits=wishes,
        )
    )
