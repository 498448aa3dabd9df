"""Writes replies in the one wire format: for proposers that are code, for worked examples in prompts, for tests.

What is written here reads back through `forge.replies` as the same data, or is refused on writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from forge.edits import render_blocks
from forge.replies import ConditionalEdit, ExplanationReply, ProposalReply
from hypotheses.predictions import Control, Explanation, Hypothesis
from hypotheses.probe_kinds import ROLES_OF_GROUP, Place, Probe

__all__ = ["write_control", "write_explanation", "write_place", "write_probe", "write_proposal"]


def write_proposal(reply: ProposalReply) -> str:
    """Return the text that `forge.replies.parse_proposal` reads back as `reply`."""
    sections = [
        ("Analysis", [reply.analysis] if reply.analysis else []),
        (
            "Mechanisms",
            _entries(f"{claim.name}: {claim.cause} | {_line(claim.statement)}" for claim in reply.mechanisms),
        ),
        ("Discharges", _entries(reply.discharges)),
        ("Edits", [render_blocks(reply.edits)]),
    ]
    if reply.controls:
        sections.append(("Controls", _entries(_control(control) for control in reply.controls)))
        sections += [(f"Edits {c.key}", [c.edits]) for c in reply.controls if c.edits is not None]
    return _join(sections)


def write_explanation(reply: ExplanationReply) -> str:
    """Return the text that `forge.replies.parse_explanation` reads back as `reply`."""
    explanation: Explanation = reply.explanation
    sections = [
        ("Analysis", [reply.analysis] if reply.analysis else []),
        ("Hypotheses", _entries(_hypothesis(h) for h in explanation.hypotheses)),
        ("Controls", _entries(_control(control) for control in explanation.controls)),
        (
            "Predictions",
            _entries(f"{p.hypothesis} @ {p.control}: {p.low!r} .. {p.high!r}" for p in explanation.predictions),
        ),
    ]
    sections += [(f"Edits {c.key}", [c.edits]) for c in explanation.controls if c.edits is not None]
    if reply.required_edits:
        sections.append(("Required edits", _entries(_conditional_edit(wish) for wish in reply.required_edits)))
    return _join(sections)


def write_control(control: Control) -> str:
    """Return a control as an explanation lists it, its blocks below their heading."""
    line = f"- {_control(control)}"
    return line if control.edits is None else f"{line}\n\n## Edits {control.key}\n{control.edits}"


def write_place(place: Place) -> str:
    """Return the words that `forge.replies.parse_place` reads back as an equal place, groups spelt as their roles."""
    grouped = [role for group in place.groups for role in ROLES_OF_GROUP[group]]
    # Roles and groups together mean what both hold.
    roles = [role for role in place.roles if not grouped or role in grouped] or grouped
    words = ", ".join(roles) or "everywhere"
    if place.blocks:
        blocks = f"blocks {', '.join(map(str, place.blocks))}"
        words = f"{words} in {blocks}" if roles else blocks
    return words


def write_probe(probe: Probe) -> str:
    """Return the probe as JSON on one line, what is left at its default left out."""
    return json.dumps({"kind": probe.kind, **probe.model_dump(mode="json", exclude_defaults=True)}, ensure_ascii=False)


def _hypothesis(hypothesis: Hypothesis) -> str:
    revises = f" revises {hypothesis.predecessor}" if hypothesis.predecessor else ""
    return f"{hypothesis.cause}: {hypothesis.mechanism}{revises} | {_line(hypothesis.statement)}"


def _control(control: Control) -> str:
    names = ", ".join(control.keeps if control.kind == "knockin" else control.removes)
    base = f" in {control.against}" if control.kind == "substitute" else ""
    return f"{control.key}: {control.kind} {names}{base} | {_line(control.description) or control.kind}"


def _conditional_edit(wish: ConditionalEdit) -> str:
    edit = wish.edit
    probe = write_probe(edit.probe)
    change = f"{edit.kind} {edit.mechanism}" + (f" with {edit.part}" if edit.part else "")
    condition = f"if {wish.hypothesis} {wish.verdict}: {change} at {write_place(edit.place)}"
    return f"{condition} | {_line(edit.wording)} | probe {probe}"


def _line(text: str) -> str:
    """One line; a bar inside would end the field."""
    return " ".join(text.replace("|", "/").split())


def _entries(lines: Iterable[str]) -> list[str]:
    entries = [f"- {line}" for line in lines]
    return entries or ["none"]


def _join(sections: Sequence[tuple[str, list[str]]]) -> str:
    return "\n\n".join("\n".join([f"## {heading}", *body]) for heading, body in sections if body) + "\n"
