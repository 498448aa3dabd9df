"""Replies of a proposer, from text to data: strict, whole or nothing, never prose taken for a program.

The format is documented for the writer in ``prompts/proposal_format.md.j2`` and ``prompts/explanation_format.md.j2``,
and `forge.reply_writing` writes it. This module checks form and everything that one reply can contradict in itself;
whether edits apply, claims are barred or a probe can run is decided where the facts are (screening, `hypotheses`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import ValidationError

from forge.edits import EditBlock, EditProblem, parse_blocks, render_blocks
from forge.errors import ReplyProblem, TruncatedReply
from forge.reply_sections import ListLine, Section, clean_reply, list_lines, split_sections
from hypotheses.predictions import Control, ControlKind, Explanation, ExplanationProblem, Hypothesis, Prediction
from hypotheses.probe_kinds import ROLES_OF_GROUP, Place
from hypotheses.required_edits import RequiredEdit, check_required_edit
from hypotheses.verdicts import Verdict, VerdictStatus

__all__ = [
    "ConditionalEdit",
    "ExplanationReply",
    "MechanismClaim",
    "ProposalReply",
    "ReplyProblem",
    "TruncatedReply",
    "awaited_verdict",
    "parse_explanation",
    "parse_place",
    "parse_proposal",
]

Trigger = Literal["supported", "refuted", "inconclusive", "not_executed", "invalid"]

PROPOSAL_SECTIONS = ("Analysis", "Mechanisms", "Discharges", "Edits", "Controls")
EXPLANATION_SECTIONS = ("Analysis", "Hypotheses", "Controls", "Predictions", "Edits", "Required edits")

_SLUG = r"[a-z0-9]+(?:[-_][a-z0-9]+)*"
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_NUMBER = r"[-+]?(?:\d{1,40}+(?:\.\d{0,40}+)?|\.\d{1,40}+)(?:[eE][-+]?\d{1,4}+)?"
"""Bounded and possessive: a long run of digits is read once, and not again from each of its places."""
_MECHANISM = re.compile(rf"(?P<name>{_NAME})\s*:\s*(?P<cause>{_SLUG})\s*\|\s*(?P<statement>.+)")
_DISCHARGE = re.compile(r"(edit-[0-9a-z]{4,64})(?:\s.*)?")
_HYPOTHESIS = re.compile(
    rf"(?P<cause>{_SLUG})\s*:\s*(?P<mechanism>{_NAME})(?:\s+revises\s+(?P<predecessor>hyp-[0-9a-z]{{4,64}}))?"
    r"\s*\|\s*(?P<statement>.+)"
)
_CONTROL = re.compile(
    rf"(?P<key>{_SLUG})\s*:\s*(?P<kind>knock-?out|knock-?in|substitute)\s+(?:of\s+)?"
    rf"(?P<names>{_NAME}(?:\s*,\s*{_NAME})*)"
    r"(?:\s+in\s+(?:the\s+)?(?P<base>child|parent))?\s*(?:\|\s*(?P<description>.+))?"
)
_PREDICTION = re.compile(
    rf"(?P<cause>{_SLUG})\s*@\s*(?P<control>{_SLUG})\s*:\s*"
    rf"\[?\s*(?P<low>{_NUMBER})\s*(?:\.\.+|\u2026|\u2013|\u2014|to|,)\s*(?P<high>{_NUMBER})\s*\]?"
)
_CONDITIONAL = re.compile(
    rf"if\s+(?P<cause>{_SLUG})\s+(?:is\s+)?(?P<verdict>supported|refuted|inconclusive|not_executed|invalid)\s*:\s*"
    rf"(?P<kind>remove|replace|extend|refine|retest)\s+(?P<mechanism>{_NAME})"
    rf"(?:\s+(?:with|by)\s+(?P<part>{_NAME}))?\s+at\s+(?P<place>[^|\s](?:[^|]*[^|\s])?)\s*"
    r"\|(?P<wording>[^|]+)\|\s*probe\s*:?\s*(?P<probe>\{.*\})"
)
_PLACE = re.compile(r"(?P<roles>[a-z_]+(?:\s*,\s*[a-z_]+)*)?\s*(?:(?:in\s+)?blocks?\s+(?P<blocks>\d+(?:\s*,\s*\d+)*))?")
_LAYER = re.compile(r"blocks\.(\d{1,5})\.([a-z_]+)")


@dataclass(frozen=True, kw_only=True)
class MechanismClaim:
    """A mechanism of the candidate, the cause it is claimed to act on (a slug), and why in a sentence."""

    name: str
    cause: str
    statement: str


@dataclass(frozen=True, kw_only=True)
class ProposalReply:
    """A candidate: edits of the incumbent, what they rely on, which required edits they discharge (ids).

    controls: those that a retest asks for, of the candidate against the incumbent; `Control.edits` as in an explanation.
    """

    analysis: str = ""
    mechanisms: tuple[MechanismClaim, ...] = ()
    discharges: tuple[str, ...] = ()
    edits: tuple[EditBlock, ...]
    controls: tuple[Control, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ConditionalEdit:
    """What later programs must do if the hypothesis gets this verdict."""

    hypothesis: str
    verdict: Trigger
    edit: RequiredEdit


@dataclass(frozen=True, kw_only=True)
class ExplanationReply:
    """Rivals, controls and predictions (a hypothesis's key is its cause), and conditional required edits.

    `Control.edits` of a substitute holds its blocks as text: `forge.edits.parse_blocks` reads them.
    """

    analysis: str = ""
    explanation: Explanation
    required_edits: tuple[ConditionalEdit, ...] = ()


def parse_proposal(text: str, *, finish_reason: str = "stop") -> ProposalReply:
    """Return the proposal, or raise with every problem found.

    Raises:
        TruncatedReply: cut off.
        ReplyProblem: not in the format.
    """
    sections = _sections(clean_reply(text, finish_reason=finish_reason), PROPOSAL_SECTIONS, ("Mechanisms", "Edits"))
    problems: list[str] = []
    claims: dict[tuple[str, str], MechanismClaim] = {}
    for line in list_lines(sections["Mechanisms", ""]):
        match = _MECHANISM.fullmatch(_plain(line))
        if match is None:
            problems.append(_misread(line, "Mechanisms", "name: cause_slug | one sentence why"))
        elif (match["name"], match["cause"]) in claims:
            problems.append(f"Line {line.number}: mechanism {match['name']!r} claims cause {match['cause']!r} twice.")
        else:
            claims[match["name"], match["cause"]] = MechanismClaim(**match.groupdict())
    discharges: dict[str, None] = {}
    for line in list_lines(sections["Discharges", ""]) if ("Discharges", "") in sections else ():
        match = _DISCHARGE.fullmatch(_plain(line))
        if match is None:
            problems.append(_misread(line, "Discharges", "edit-1a2b3c4d, an id from the list of open required edits"))
        else:
            discharges[match[1]] = None
    controls: tuple[Control, ...] = ()
    if ("Controls", "") in sections:
        controls = _controls(sections, problems, beside_edits=True)
    else:
        problems += [f"A proposal has one section '## Edits', not '## Edits {key}'." for _, key in sections if key]
    edits = _blocks(sections["Edits", ""], problems)
    _raise_if(problems)
    return ProposalReply(
        analysis=_analysis(sections),
        mechanisms=tuple(claims.values()),
        discharges=tuple(discharges),
        edits=edits,
        controls=controls,
    )


def parse_explanation(text: str, *, finish_reason: str = "stop") -> ExplanationReply:
    """Return the explanation, or raise with every problem found.

    Raises:
        TruncatedReply: cut off.
        ReplyProblem: not in the format, or refused by `hypotheses.predictions` (too few rivals, missing or vacuous
            predictions, rivals that nothing separates, a control that is none of its kind).
    """
    required = ("Hypotheses", "Controls", "Predictions")
    sections = _sections(clean_reply(text, finish_reason=finish_reason), EXPLANATION_SECTIONS, required)
    problems: list[str] = []
    hypotheses = _hypotheses(sections["Hypotheses", ""], problems)
    controls = _controls(sections, problems)
    predictions = _predictions(sections["Predictions", ""], problems)
    wishes: tuple[ConditionalEdit, ...] = ()
    if ("Required edits", "") in sections:
        wishes = _conditional_edits(sections["Required edits", ""], hypotheses, problems)
    # Lines that could not be read leave gaps; complaints about the gaps would only bury the cause.
    _raise_if(problems)
    try:
        explanation = Explanation(
            hypotheses=tuple(Hypothesis.model_validate(claim) for claim in hypotheses),
            controls=controls,
            predictions=predictions,
        )
    except ExplanationProblem as problem:
        raise ReplyProblem(_sentence(text) for text in problem.problems) from problem
    except ValidationError as err:
        raise ReplyProblem(_validation_problems("hypothesis", err)) from err
    return ExplanationReply(analysis=_analysis(sections), explanation=explanation, required_edits=wishes)


def parse_place(text: str) -> Place:
    """Return the place named: ``everywhere``, ``down``, ``q, k in blocks 0, 3``, ``blocks 2`` or a layer's name.

    Raises:
        ReplyProblem: none of these.
    """
    text = text.strip().strip("`").strip()
    layer = _LAYER.fullmatch(text)
    if layer:
        text = f"{layer[2]} in blocks {layer[1]}"
    match = _PLACE.fullmatch(text)
    names = re.split(r"\s*,\s*", match["roles"]) if match and match["roles"] else []
    if names in (["everywhere"], ["all"]):
        names = []
    single = {role for roles in ROLES_OF_GROUP.values() for role in roles}
    if not text or match is None or any(name not in single and name not in ROLES_OF_GROUP for name in names):
        raise ReplyProblem(
            f"{text[:80]!r} is no place; known: 'everywhere', roles ({', '.join(sorted(single))}, qkv, gate_up) "
            "separated by commas, 'blocks 0, 3', roles 'in blocks 0, 3'."
        )
    roles = [role for name in names for role in ROLES_OF_GROUP.get(name, (name,))]
    blocks = [int(number) for number in re.split(r"\s*,\s*", match["blocks"])] if match["blocks"] else []
    return Place.model_validate({"roles": tuple(dict.fromkeys(roles)), "blocks": tuple(dict.fromkeys(blocks))})


def awaited_verdict(wish: ConditionalEdit, mechanism: str) -> Verdict:
    """Return the verdict that the edit waits for, as if it had been given on the claim about `mechanism`."""
    return Verdict(
        rule="",
        hypothesis=wish.hypothesis,
        mechanism=mechanism,
        cause=wish.edit.cause,
        status=VerdictStatus(wish.verdict),
        reason="",
        alpha=0.0,
        checks=(),
        survivors=(),
    )


def _hypotheses(section: Section, problems: list[str]) -> list[dict[str, str | None]]:
    claims: list[dict[str, str | None]] = []
    for line in list_lines(section):
        match = _HYPOTHESIS.fullmatch(_plain(line))
        if match is None:
            form = (
                "cause_slug: mechanism | one sentence' or '- cause_slug: mechanism revises hyp-1a2b3c4d | one sentence"
            )
            problems.append(_misread(line, "Hypotheses", form))
        else:
            claims.append({"key": match["cause"], **match.groupdict()})
    return claims


def _controls(
    sections: Mapping[tuple[str, str], Section], problems: list[str], *, beside_edits: bool = False
) -> tuple[Control, ...]:
    """Return the controls of a reply; `beside_edits` where a section '## Edits' of the candidate itself belongs to it."""
    controls: list[Control] = []
    keys: set[str] = set()
    for line in list_lines(sections["Controls", ""]):
        match = _CONTROL.fullmatch(_plain(line))
        if match is None:
            form = "key: knockout A | text' or '- key: knockin A | text' or '- key: substitute A in child | text"
            problems.append(_misread(line, "Controls", form))
            continue
        key, kind = match["key"], match["kind"].replace("-", "")
        keys.add(key)
        section = sections.get(("Edits", key))
        if kind == "substitute" and section is None:
            problems.append(f"Control {key!r} is a substitute, so it needs a section '## Edits {key}' with its blocks.")
            continue
        if kind != "substitute" and (section is not None or match["base"]):
            problems.append(f"Control {key!r} is a {kind}, made mechanically: it takes neither edits nor 'in child'.")
            continue
        mechanisms = tuple(dict.fromkeys(re.split(r"\s*,\s*", match["names"])))
        edits = _blocks(section, problems) if section is not None else ()
        try:
            controls.append(
                Control(
                    key=key,
                    kind=next(known for known in get_args(ControlKind) if known == kind),
                    removes=() if kind == "knockin" else mechanisms,
                    keeps=mechanisms if kind == "knockin" else (),
                    against="parent" if match["base"] == "parent" else "child",
                    edits=render_blocks(edits) if kind == "substitute" else None,
                    description=match["description"] or "",
                )
            )
        except ValidationError as err:
            problems += _validation_problems(f"control {key!r}", err)
    for name, argument in sections:
        if name == "Edits" and argument not in keys and not (beside_edits and not argument):
            problems.append(
                f"'## Edits {argument}' belongs to no control of '## Controls'."
                if argument
                else "'## Edits' in an explanation needs the key of its control: '## Edits <key>'."
            )
    return tuple(controls)


def _predictions(section: Section, problems: list[str]) -> tuple[Prediction, ...]:
    predictions: list[Prediction] = []
    for line in list_lines(section):
        match = _PREDICTION.fullmatch(_plain(line).replace("\u2212", "-"))
        if match is None:
            problems.append(_misread(line, "Predictions", "cause_slug @ control_key: low .. high"))
        else:
            predictions.append(
                Prediction(
                    hypothesis=match["cause"],
                    control=match["control"],
                    low=float(match["low"]),
                    high=float(match["high"]),
                )
            )
    return tuple(predictions)


def _conditional_edits(
    section: Section, hypotheses: list[dict[str, str | None]], problems: list[str]
) -> tuple[ConditionalEdit, ...]:
    wishes: list[ConditionalEdit] = []
    mechanisms = {str(claim["key"]): str(claim["mechanism"]) for claim in hypotheses}
    for line in list_lines(section):
        match = _CONDITIONAL.fullmatch(line.text)
        if match is None:
            form = "if cause_slug refuted: replace mechanism at place | what to do | probe {...}"
            problems.append(_misread(line, "Required edits", form))
        elif match["cause"] not in mechanisms:
            listed = ", ".join(mechanisms) or "none"
            problems.append(f"Line {line.number}: no hypothesis {match['cause']!r} is listed; listed: {listed}.")
        else:
            try:
                wish = _conditional_edit(match)
                misfits = _misfits(wish, mechanisms[wish.hypothesis])
                problems += [f"Line {line.number}, required edit: {problem}." for problem in misfits]
                wishes.append(wish)
            except ValidationError as err:
                problems += _validation_problems(f"line {line.number}, required edit", err)
            except (ValueError, RecursionError) as err:  # ReplyProblem of the place included
                problems.append(f"Line {line.number}, required edit: {err}")
    return tuple(wishes)


def _conditional_edit(match: re.Match[str]) -> ConditionalEdit:
    try:
        probe = json.loads(match["probe"], object_pairs_hook=_without_repeats)
        # An escape can spell half of a character, which no ledger stores and no prompt can show.
        json.dumps(probe, ensure_ascii=False).encode("utf-8")
    except ValueError as err:
        raise ReplyProblem(f"the probe is no JSON object on one line ({err}).") from err
    data = {
        "kind": match["kind"],
        "mechanism": match["mechanism"],
        "cause": match["cause"],
        "part": match["part"],
        "place": parse_place(match["place"]),
        "wording": match["wording"].strip(),
        "probe": probe,
        # A verdict that decides nothing cannot hold up a lineage.
        "blocking": match["verdict"] in ("supported", "refuted"),
    }
    verdict = next(known for known in get_args(Trigger) if known == match["verdict"])
    return ConditionalEdit(hypothesis=match["cause"], verdict=verdict, edit=RequiredEdit.model_validate(data))


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    keys = [key for key, _ in pairs]
    repeated = next((key for key in keys if keys.count(key) > 1), None)
    if repeated is not None:
        raise ValueError(f"the key {repeated[:40]!r} stands twice")
    return dict(pairs)


def _misfits(wish: ConditionalEdit, mechanism: str) -> list[str]:
    """Return why the edit could not follow from the verdict it waits for; told now, while it can be mended."""
    return check_required_edit(wish.edit, awaited_verdict(wish, mechanism))


def _sections(text: str, names: tuple[str, ...], required: tuple[str, ...]) -> dict[tuple[str, str], Section]:
    sections = {(section.name, section.argument): section for section in split_sections(text, names)}
    missing = [f"'## {name}'" for name in required if (name, "") not in sections]
    if not sections:
        raise ReplyProblem(
            "The reply has no section of the format, so it is prose and nothing of it is adopted. "
            f"It needs {', '.join(missing)}, each heading alone on its line."
        )
    if missing:
        raise ReplyProblem(f"The reply lacks {', '.join(missing)}.")
    return sections


def _blocks(section: Section, problems: list[str]) -> tuple[EditBlock, ...]:
    heading = f"'## {f'{section.name} {section.argument}'.strip()}'"
    try:
        blocks = parse_blocks(section.body, first_line=section.first_line)
    except TruncatedReply:
        raise
    except EditProblem as problem:
        problems += [f"{heading}: {reason}" for reason in problem.problems]
        return ()
    if not blocks:
        problems.append(f"{heading} holds no SEARCH/REPLACE block; code in any other form is not adopted.")
    return blocks


def _analysis(sections: Mapping[tuple[str, str], Section]) -> str:
    section = sections.get(("Analysis", ""))
    return section.body.strip() if section else ""


def _plain(line: ListLine) -> str:
    """The entry without Markdown emphasis, which models like to put around names."""
    head, bar, tail = line.text.partition("|")
    return (head.replace("`", "").replace("**", "") + bar + tail).strip()


def _misread(line: ListLine, section: str, form: str) -> str:
    shown = line.text if len(line.text) <= 100 else line.text[:97] + "..."
    return f"Line {line.number}, in '## {section}', {shown!r}, does not read as '- {form}'."


def _validation_problems(what: str, err: ValidationError) -> list[str]:
    return [
        _sentence(f"{what}: {'.'.join(str(part) for part in detail['loc']) or 'value'}: {detail['msg']}")
        for detail in err.errors(include_url=False)
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _raise_if(problems: list[str]) -> None:
    if problems:
        raise ReplyProblem(problems)
