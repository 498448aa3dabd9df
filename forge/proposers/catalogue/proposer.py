"""The catalogue: a proposer without a language model, deterministic and offline.

It walks a fixed list of real edits in an order drawn from the campaign's seed, answers open required edits first, and
explains the gains of its entries with the rivals, controls and intervals that were written down with them. It exists so that
the whole loop runs on a machine with no key, in tests and in benchmarks. It answers in the same text format as a language
model and is held to the same parsing and screening; nothing that it finds says anything about language models.
"""

from __future__ import annotations

import hashlib

from forge import program_source
from forge.edits import render_blocks
from forge.errors import ProposerExhausted
from forge.proposers.base import ExplanationRequest, ProposalRequest, Reply
from forge.proposers.catalogue.entry import ControlText, Entry, Wish, load_entries
from forge.proposers.catalogue.weave import NotApplicable, weave, weave_control
from forge.replies import ConditionalEdit, ExplanationReply, MechanismClaim, ProposalReply, parse_place
from forge.reply_writing import write_explanation, write_proposal
from hypotheses.predictions import Control, Explanation, ExplanationProblem, Hypothesis, Prediction
from hypotheses.required_edits import EditRecord, RequiredEdit

__all__ = ["CatalogueProposer"]


class CatalogueProposer:
    """Answers from the catalogue; see the module's text."""

    name = "catalogue"
    label = "catalogue of fixed edits (deterministic, offline; not a language model)"

    def __init__(self, entries: tuple[Entry, ...] | None = None) -> None:
        self._entries = load_entries() if entries is None else entries

    def propose(self, request: ProposalRequest) -> Reply:
        """Answer with the next entry that can be woven into the incumbent; open required edits come first.

        To one that blocks and that no entry carries out the answer is no edit, until it blocks no more.
        """
        for record in sorted(request.open_edits, key=lambda record: not record.blocks):
            entry = self._entry_for(record)
            if entry is not None and (entry.claims[0].mechanism, entry.claims[0].cause) not in request.tried:
                try:
                    return self._proposal(entry, request, discharges=(record.key,))
                except NotApplicable:
                    continue
            if record.blocks:
                # Any edit of the catalogue would be refused, and with it lost for later.
                return _reply(f"## Analysis\nThe catalogue has no edit that carries out {record.key}.\n")
        for entry in self._order(request.seed):
            if self._is_open(entry, request):
                try:
                    return self._proposal(entry, request)
                except NotApplicable:
                    continue
        raise ProposerExhausted("the catalogue has no further edit that fits the incumbent")

    def explain(self, request: ExplanationRequest) -> Reply:
        """Answer with the explanation of the entry whose mechanism the child added, as far as it fits the child."""
        entry = self._entry_of(request)
        if request.inseparable:
            return _reply("## Analysis\nThe catalogue has no further control for these rivals.\n")
        if entry is None or entry.explanation is None:
            return _reply("## Analysis\nThe catalogue has no explanation for this change.\n")
        texts = entry.explanation
        controls = [control for text in texts.controls if (control := _control(text, entry, request.child_source))]
        kept = {control.key for control in controls}
        try:
            explanation = Explanation(
                hypotheses=tuple(
                    Hypothesis(
                        key=rival.cause,
                        cause=rival.cause,
                        mechanism=_mechanism_of(rival.cause, entry),
                        statement=rival.statement,
                    )
                    for rival in texts.hypotheses
                ),
                controls=tuple(controls),
                predictions=tuple(
                    Prediction(hypothesis=text.cause, control=text.control, low=text.low, high=text.high)
                    for text in texts.predictions
                    if text.control in kept
                ),
            )
        except ExplanationProblem as problem:
            return _reply(f"## Analysis\nThe rivals of entry {entry.key!r} do not fit this program: {problem}\n")
        reply = ExplanationReply(
            analysis=f"Rivals written down with the catalogue's entry {entry.key!r}.",
            explanation=explanation,
            required_edits=tuple(
                _conditional(wish, entry)
                for wish in texts.wishes
                # A wish that was refused cannot be reworded here.
                if request.attempt == 0 and self._can_carry_out(wish, request.child_source)
            ),
        )
        return _reply(write_explanation(reply))

    def _proposal(self, entry: Entry, request: ProposalRequest, discharges: tuple[str, ...] = ()) -> Reply:
        reply = ProposalReply(
            analysis=entry.analysis,
            mechanisms=_claims(entry),
            discharges=discharges,
            edits=weave(entry, request.incumbent_source),
        )
        return _reply(write_proposal(reply))

    def _order(self, seed: int) -> list[Entry]:
        """Entries by tier; inside a tier by a hash of seed and key, so that each seed walks its own way."""

        def rank(entry: Entry) -> tuple[int, str]:
            return entry.tier, hashlib.sha256(f"{seed}|{entry.key}".encode()).hexdigest()

        return sorted((entry for entry in self._entries if not entry.carries_out), key=rank)

    def _is_open(self, entry: Entry, request: ProposalRequest) -> bool:
        present = set(request.mechanisms)
        first = entry.claims[0]
        return (
            set(entry.needs) <= present
            and not set(entry.conflicts) & present
            and (first.mechanism, first.cause) not in request.tried
        )

    def _wishes(self) -> list[tuple[Entry, Wish]]:
        return [(entry, wish) for entry in self._entries if entry.explanation for wish in entry.explanation.wishes]

    def _entry_for(self, record: EditRecord) -> Entry | None:
        edit = record.edit
        for entry, wish in self._wishes():
            mechanism = _mechanism_of(wish.cause, entry)
            if (wish.kind, mechanism, wish.cause, wish.wording) == (
                edit.kind,
                edit.mechanism,
                edit.cause,
                edit.wording,
            ):
                return self._by_key(wish.then)
        return None

    def _by_key(self, key: str) -> Entry:
        return next(entry for entry in self._entries if entry.key == key)

    def _entry_of(self, request: ExplanationRequest) -> Entry | None:
        claims = set(request.claims)
        for entry in self._entries:
            if claims and claims == {(claim.mechanism, claim.cause) for claim in entry.claims}:
                return entry
        return None

    def _can_carry_out(self, wish: Wish, child: str) -> bool:
        entry = self._by_key(wish.then)
        present = set(program_source.mechanisms(child))
        if not set(entry.needs) <= present or set(entry.conflicts) & present:
            return False
        try:
            weave(entry, child)
        except NotApplicable:
            return False
        return True


def _reply(text: str) -> Reply:
    return Reply(text=text, model="catalogue", prompt_tokens=0, completion_tokens=0, cost=0.0)


def _claims(entry: Entry) -> tuple[MechanismClaim, ...]:
    return tuple(
        MechanismClaim(name=claim.mechanism, cause=claim.cause, statement=claim.statement) for claim in entry.claims
    )


def _mechanism_of(cause: str, entry: Entry) -> str:
    """Return the mechanism that the entry's hypothesis of that cause is about."""
    assert entry.explanation is not None
    rival = next(rival for rival in entry.explanation.hypotheses if rival.cause == cause)
    return rival.mechanism or entry.claims[0].mechanism


def _control(text: ControlText, entry: Entry, child: str) -> Control | None:
    """Return the control as a reply states it; None when a substitute does not fit this child."""
    mechanisms = text.mechanisms or (entry.claims[0].mechanism,)
    if text.kind == "knockin":
        return Control(key=text.key, kind="knockin", keeps=mechanisms, description=text.description)
    if text.kind == "knockout":
        return Control(key=text.key, kind="knockout", removes=mechanisms, description=text.description)
    try:
        edits = render_blocks(weave_control(text, child))
    except NotApplicable:
        return None
    return Control(key=text.key, kind="substitute", removes=mechanisms, edits=edits, description=text.description)


def _conditional(wish: Wish, entry: Entry) -> ConditionalEdit:
    return ConditionalEdit(
        hypothesis=wish.cause,
        verdict=wish.when,
        edit=RequiredEdit.model_validate(
            {
                "kind": wish.kind,
                "mechanism": _mechanism_of(wish.cause, entry),
                "cause": wish.cause,
                "part": wish.part,
                "place": parse_place(wish.place),
                "wording": wish.wording,
                "probe": wish.probe,
            }
        ),
    )
