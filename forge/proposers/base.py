"""What a proposer is asked and what it answers: one wire format for all of them.

A request holds the prompt, which is all that a language model or a person sees, and beside it the same facts as data,
for proposers that are code (the catalogue). Both lead to a `Reply` whose text goes through the same parser
(`forge.replies`), screening and ledger, whoever wrote it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from evaluators.results import LayerError
from forge.errors import ProposerError, ProposerExhausted
from hypotheses.predictions import Control
from hypotheses.required_edits import BarredClaim, EditRecord

__all__ = [
    "ExplanationRequest",
    "MeasuredEffect",
    "ProposalRequest",
    "Proposer",
    "ProposerError",
    "ProposerExhausted",
    "Reply",
]


@dataclass(frozen=True, kw_only=True)
class MeasuredEffect:
    """A measured difference: effect = NLL(parent) - NLL(program), nats per token, and its standard error."""

    name: str
    effect: float
    standard_error: float
    split: str = "search"
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ProposalRequest:
    """What is asked for a candidate.

    turn: turns of the campaign so far, from 0. attempt: 0 for the first answer of the turn, 1 for its repair.
    problems: the exact problems of the previous attempt of this turn, and previous_reply its text.
    earlier_ast_hashes: `program_source.ast_hash` of every program tried so far, the incumbent's included.
    tried: (mechanism, claimed cause) of every earlier proposal, accepted or refused, in order.
    """

    prompt: str
    turn: int
    incumbent_source: str
    mechanisms: tuple[str, ...]
    attempt: int = 0
    problems: tuple[str, ...] = ()
    previous_reply: str = ""
    error_map: tuple[LayerError, ...] = ()
    open_edits: tuple[EditRecord, ...] = ()
    barred_claims: tuple[BarredClaim, ...] = ()
    earlier_ast_hashes: frozenset[str] = frozenset()
    tried: tuple[tuple[str, str], ...] = ()
    digest: str = ""
    contract_class: str = "online"
    budget_left: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ExplanationRequest:
    """What is asked about an observation: rivals, controls, predicted intervals.

    mechanisms_added: mechanisms of the child that the parent lacks, or has with another fingerprint. claims:
    (mechanism, cause) pairs that the proposal itself made. effect: the confirmed effect of child against parent.
    known_effects: results that stand already; shown, never evidence. noise_floor: one standard error of an effect, nats
    per token.
    expected_width: the expected width of a measured retained effect (a ratio). inseparable: pairs of hypotheses that no
    control of the registered answer, `previous_reply`, separates: controls may be added for them once. registered: id in the
    ledger of each hypothesis of that answer, by cause, for a revision to name. retested: refuted claims, (mechanism, cause), that
    the child tests again; brought_controls: what its proposal brought for that.
    """

    prompt: str
    observation: str
    turn: int
    parent_source: str
    child_source: str
    mechanisms_added: tuple[str, ...]
    effect: MeasuredEffect
    attempt: int = 0
    problems: tuple[str, ...] = ()
    previous_reply: str = ""
    claims: tuple[tuple[str, str], ...] = ()
    known_effects: tuple[MeasuredEffect, ...] = ()
    noise_floor: float = 0.0
    expected_width: float = 0.0
    mechanical_controls: tuple[str, ...] = ()
    barred_claims: tuple[BarredClaim, ...] = ()
    inseparable: tuple[tuple[str, str], ...] = ()
    retested: tuple[tuple[str, str], ...] = ()
    brought_controls: tuple[Control, ...] = ()
    registered: tuple[tuple[str, str], ...] = ()
    budget_left: int = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer as it came, before any parsing.

    finish_reason: as the server said it (``stop``, ``length``, ...). Token counts and cost are None where unknown,
    never 0.
    calls: requests sent for it, failed and retried ones included.
    """

    text: str
    model: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cost: float | None = None
    finish_reason: str = "stop"
    calls: int = 1
    wall_s: float = 0.0


@runtime_checkable
class Proposer(Protocol):
    """Whatever answers prompts. `name` is the recipe's word for it, `label` is shown wherever its work appears."""

    @property
    def name(self) -> str:
        """The recipe's word: ``catalogue``, ``openai``, ..."""

    @property
    def label(self) -> str:
        """One line that says honestly what this is, for the ledger and every report."""

    def propose(self, request: ProposalRequest) -> Reply:
        """Answer a proposal prompt.

        Raises:
            ProposerExhausted: nothing left to propose; the campaign ends normally.
            ProposerError: it cannot answer; the message holds the repair.
        """

    def explain(self, request: ExplanationRequest) -> Reply:
        """Answer an explanation prompt. Raises as `propose` does."""
