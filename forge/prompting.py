"""Prompts: what a language model or a person is told, rendered from a request by the templates in ``forge/prompts``.

A prompt is complete in itself: contract, API, program, evidence, format with a worked example. What binds the writer
stands first (required edits, barred claims, the problems of the last attempt). Texts that programs and models wrote
come in as data, through `forge.prompt_data`. A template that misses a value fails instead of leaving a gap.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from typing import TypeVar

import jinja2

from evaluators.contract import MXFP4_W4A4, Contract
from evaluators.results import LayerError
from forge import program_source, worked_examples
from forge.api_reference import kernels_reference, session_reference
from forge.prompt_data import as_block, as_quoted, numbered
from forge.proposers.base import ExplanationRequest, ProposalRequest
from forge.reply_writing import write_control, write_place, write_probe
from forge.static_checks import ALLOWED_IMPORTS, MAX_SOURCE_BYTES
from hypotheses.design import AT_ODDS, SHARE

__all__ = ["explanation_prompt", "proposal_prompt", "with_prompt"]

WORST_LAYERS = 16
MAX_DIGEST_CHARS = 12_000

_Request = TypeVar("_Request", bound=ProposalRequest | ExplanationRequest)


def with_prompt(request: _Request) -> _Request:
    """Return the request with its prompt rendered."""
    if isinstance(request, ProposalRequest):
        prompt = proposal_prompt(request)
    else:
        prompt = explanation_prompt(request)
    return replace(request, prompt=prompt)


def proposal_prompt(request: ProposalRequest, *, contract: Contract = MXFP4_W4A4) -> str:
    """Return the prompt that asks for a candidate, or, with problems of the previous attempt, for its repair."""
    return _render(
        "proposal.md.j2",
        request=request,
        contract=contract,
        max_bits=_max_bits(contract, request.contract_class),
        roles=_by_role(request.error_map),
        worst=sorted(request.error_map, key=lambda row: (-row.joint, row.layer))[:WORST_LAYERS],
        digest=keep_newest(request.digest, MAX_DIGEST_CHARS),
        session_api=session_reference(),
        kernels_api=kernels_reference(),
        allowed_imports=ALLOWED_IMPORTS,
        max_source_kb=MAX_SOURCE_BYTES // 1024,
        example_program=worked_examples.EXAMPLE_PROGRAM,
        example=worked_examples.example_proposal(),
    )


def explanation_prompt(request: ExplanationRequest) -> str:
    """Return the prompt that asks for rivals, controls and predictions on an observation, or for their repair."""
    return _render(
        "explanation.md.j2",
        share=SHARE,
        at_odds=AT_ODDS,
        request=request,
        difference=program_source.diff(request.parent_source, request.child_source),
        child_mechanisms=program_source.mechanisms(request.child_source),
        example_parent=worked_examples.EXAMPLE_PROGRAM,
        example_child=worked_examples.example_child(),
        example=worked_examples.example_explanation(),
    )


def keep_newest(digest: str, max_chars: int) -> str:
    """Return the digest within `max_chars`: list lines of its later sections go first, oldest first; verdicts stay.

    The digest is sections of a heading line and list lines, oldest first; the first section holds the verdicts.
    """
    lines = digest.split("\n")
    size = len(digest)
    headings = [index for index, line in enumerate(lines) if line and not line.lstrip().startswith("-")]
    dropped = 0
    for index in range(headings[1] if len(headings) > 1 else len(lines), len(lines)):
        if size <= max_chars:
            break
        if index not in headings:
            size -= len(lines[index]) + 1
            lines[index] = ""
            dropped += 1
    kept = [line for line in lines if line]
    return "\n".join([*kept, f"({dropped} older lines left out)"] if dropped else kept)


def _max_bits(contract: Contract, contract_class: str) -> float:
    for name, bits in contract.max_bits.items():
        if name == contract_class:
            return bits
    raise ValueError(f"contract class {contract_class!r} is none of {', '.join(contract.max_bits)}")


def _by_role(error_map: Sequence[LayerError]) -> list[tuple[str, float, float, float, float]]:
    """Return (role, weight, activation, joint, clip rate), means over the layers of each role, worst first."""
    rows = []
    for role in dict.fromkeys(row.role for row in error_map):
        mine = [row for row in error_map if row.role == role]
        rows.append(
            (
                role,
                statistics.fmean(row.weight for row in mine),
                statistics.fmean(row.activation for row in mine),
                statistics.fmean(row.joint for row in mine),
                statistics.fmean(row.clip_rate for row in mine),
            )
        )
    return sorted(rows, key=lambda row: -row[3])


def _render(template: str, **values: object) -> str:
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    # Markdown for a model, not HTML for a browser: escaping is the business of the data filters.
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template_source),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["block"] = as_block
    environment.filters["quoted"] = as_quoted
    environment.filters["numbered"] = numbered
    environment.filters["control"] = write_control
    environment.filters["place"] = write_place
    environment.filters["probe"] = write_probe
    return environment


def _template_source(name: str) -> str:
    return (resources.files("forge") / "prompts" / name).read_text(encoding="utf-8")
