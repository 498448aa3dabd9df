"""Screening: everything that a candidate must pass before an evaluator call is spent on it.

In order: the reply reads, its edits apply whole and uniquely, the program keeps the convention and the static rules, differs
from every earlier program, addresses the blocking required edit, claims nothing that stands refuted, runs on the truncated
subject inside the sandbox, installs something that no earlier program installs there, really executes each mechanism it adds
(replaced by its neutral, the installed tensors must change), claims nothing refuted of what installs the same, and passes the
probes of the required edits that it discharges.
The first stage that fails refuses the candidate with exact reasons, which the proposer is shown once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from evaluators.results import ContractClass, EvaluationResult
from forge import program_source
from forge.desk import Desk, probe_evidence
from forge.edits import apply_edits
from forge.errors import ProgramProblem, ReplyProblem
from forge.grafting import graft
from forge.program_identity import ast_hash, mechanism_fingerprint, normalized_ast_hash, own_fingerprint
from forge.proposers.base import Reply
from forge.replies import ProposalReply, parse_proposal
from forge.retaining import is_class_allowed
from forge.static_checks import static_problems
from hypotheses.ledger import Ledger, NewProbeResult, NewProgram, NewScreening, Program
from hypotheses.ledger.records import ProgramOrigin
from hypotheses.probe_kinds import Place, split_name
from hypotheses.probes import ProbeEvidence, ProbeResult, ProbeStatus, probe_mechanism
from hypotheses.required_edits import (
    BarredClaim,
    EditRecord,
    check_carried_out,
    claim_is_barred,
    new_part,
    same_cause,
)


class Refusal(Exception):
    """A candidate was refused before any call: at which stage, and every reason as a sentence.

    proposal: what the reply said, as far as it could be read.
    """

    def __init__(self, stage: str, problems: Iterable[str]) -> None:
        self.stage = stage
        self.problems = tuple(problems)
        self.proposal: ProposalReply | None = None
        super().__init__(f"{stage}: {'; '.join(self.problems)}")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a candidate is held to at this moment of the campaign."""

    incumbent: str
    open_edits: tuple[EditRecord, ...]
    barred: frozenset[BarredClaim]
    earlier_ast_hashes: frozenset[str]
    earlier_smoke_digests: frozenset[str]
    allowed_class: ContractClass


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A candidate that passed everything that needs no run."""

    source: str
    proposal: ProposalReply
    added: tuple[str, ...]


def read_draft(reply: Reply, rules: Rules) -> Draft:
    """Return the candidate that a reply makes of the incumbent.

    Raises:
        Refusal: with the stage and the reasons.
    """
    try:
        proposal = parse_proposal(reply.text, finish_reason=reply.finish_reason)
    except ReplyProblem as problem:
        raise Refusal("format", problem.problems) from problem
    try:
        source = _edited(proposal, rules)
    except Refusal as refusal:
        refusal.proposal = proposal
        raise
    return Draft(source=source, proposal=proposal, added=added_mechanisms(rules.incumbent, source))


def _edited(proposal: ProposalReply, rules: Rules) -> str:
    """Return the edited program, held to everything that needs no run."""
    try:
        source = apply_edits(rules.incumbent, proposal.edits)
    except ReplyProblem as problem:
        raise Refusal("edits", problem.problems) from problem
    check_source(source)
    if ast_hash(source) in rules.earlier_ast_hashes:
        raise Refusal("duplicate", ["The edited program is one that was tried before (comments and layout aside)."])
    declared = program_source.mechanisms(source)
    undeclared = [claim.name for claim in proposal.mechanisms if claim.name not in declared]
    if undeclared:
        raise Refusal(
            "mechanisms",
            [f"Mechanism {name!r} is relied on but is not in MECHANISMS {declared}." for name in undeclared],
        )
    claimed = {claim.name for claim in proposal.mechanisms}
    silent = [name for name in altered_mechanisms(rules.incumbent, source) if name not in claimed]
    if silent:
        raise Refusal(
            "mechanisms",
            [
                f"Mechanism {name!r} is added or altered without a claim; say under Mechanisms what for: "
                f"'- {name}: cause_slug | one sentence'."
                for name in silent
            ],
        )
    _check_required(proposal, rules)
    _check_claims(source, proposal, rules)
    return source


def check_source(source: str) -> None:
    """Raise `Refusal` unless the source keeps the program convention and the static rules."""
    problems = program_source.check_convention(source)
    if problems:
        raise Refusal("convention", problems)
    problems = static_problems(source)
    if problems:
        raise Refusal("static", problems)


def added_mechanisms(parent: str, child: str) -> tuple[str, ...]:
    """Return the mechanisms that the child declares and the parent lacks, or has with other code."""
    before = set(program_source.mechanisms(parent))
    return tuple(
        name
        for name in program_source.mechanisms(child)
        if name not in before or mechanism_fingerprint(parent, name) != mechanism_fingerprint(child, name)
    )


def altered_mechanisms(parent: str, child: str) -> tuple[str, ...]:
    """Return the mechanisms that the child declares and the parent lacks, or has with other code of their own."""
    before = set(program_source.mechanisms(parent))
    return tuple(
        name
        for name in program_source.mechanisms(child)
        if name not in before or own_fingerprint(parent, name) != own_fingerprint(child, name)
    )


def smoke_digest(result: EvaluationResult) -> str:
    """Return a hash of everything that a smoke run installed."""
    digests = {name: layer.get("digest") for name, layer in sorted(result.evidence.layers.items())}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


class Screener:
    """The part of screening that runs programs on the truncated subject, and keeps what it saw in the ledger."""

    def __init__(self, ledger: Ledger, desk: Desk, seed: int) -> None:
        self._ledger = ledger
        self._desk = desk
        self._seed = seed

    def store(self, source: str, *, origin: ProgramOrigin, title: str, parent: Program | None) -> Program:
        """Put a program into the ledger."""
        return self._ledger.add_program(
            NewProgram(
                source=source,
                origin=origin,
                ast_hash=ast_hash(source),
                normalized_ast_hash=normalized_ast_hash(source),
                title=title,
                parent_id=parent.id if parent else None,
                mechanisms=program_source.mechanisms(source),
            )
        )

    def smoke(self, program: Program, *, allowed_class: ContractClass) -> tuple[bool, str, dict[str, object]]:
        """Run a program on the truncated subject, once; return whether it passed, why not, and the evidence."""
        stored = self._ledger.find_screening(program.id)
        if stored is None:
            result = self._desk.smoke(program.source, seed=self._seed)
            passed = result.outcome.is_scored and is_class_allowed(result.contract_class, allowed_class)
            reason = result.reason
            if result.outcome.is_scored and not passed:
                reason = f"class {result.contract_class!r} is beyond {allowed_class!r}, which this campaign searches"
            stored = self._ledger.record_screening(
                NewScreening(
                    program_id=program.id,
                    passed=passed,
                    smoke_outcome=result.outcome.value,
                    reason=reason,
                    evidence=result.evidence.to_json()
                    | {"smoke_digest": smoke_digest(result), "effective_bits": result.effective_bits},
                )
            )
        return stored.passed, f"{stored.smoke_outcome}: {stored.reason}" if stored.reason else "", stored.evidence

    def run_draft(self, draft: Draft, program: Program, rules: Rules) -> dict[str, ProbeResult]:
        """Hold a stored draft to the stages that run it; return the provisional answers by required edit.

        Raises:
            Refusal: with the stage and the reasons.
        """
        passed, reason, evidence = self.smoke(program, allowed_class=rules.allowed_class)
        if not passed:
            raise Refusal("smoke", [f"The smoke run on the truncated subject ended so: {reason}"])
        own = probe_evidence(evidence, program.source)
        addressed = [record for record in rules.open_edits if record.key in draft.proposal.discharges]
        # What an edit wants beyond the truncated subject, only the paid run can show.
        beyond = [record.edit for record in addressed if _reaches_beyond(record.edit.place, own)]
        if evidence["smoke_digest"] in rules.earlier_smoke_digests and not beyond:
            raise Refusal(
                "duplicate", ["On the truncated subject it installs exactly what an earlier program installs there."]
            )
        before = set(program_source.mechanisms(rules.incumbent))
        twins = {name: self._twin(program, name, rules) for name in draft.added if name not in before}
        idle = [name for name, twin in twins.items() if twin is not None and not _differs(own, twin)]
        idle = [name for name in idle if name not in {new_part(edit) for edit in beyond}]
        if idle:
            raise Refusal(
                "execution",
                [
                    f"Mechanism {name!r} does not execute: with its neutral in its place the smoke run installs the same."
                    for name in idle
                ],
            )
        self._check_artifacts(draft, program, rules, own)
        incumbent = self._parent_evidence(program)
        altered = altered_mechanisms(rules.incumbent, program.source)
        answers: dict[str, ProbeResult] = {}
        for record in addressed:
            # A retest is settled by a verdict and by no run of its own.
            if record.edit.kind == "retest" or record.edit in beyond:
                continue
            name = probe_mechanism(record.edit.probe)
            twin = twins.get(name) if name in twins else self._twin(program, name, rules) if name else None
            answer = check_carried_out(record.edit, own, incumbent=incumbent, altered=altered, knocked_out=twin)
            answers[record.key] = answer
            self._ledger.record_probe_result(
                NewProbeResult(
                    target_id=record.key,
                    program_id=program.id,
                    kind=record.edit.probe.kind,
                    status=answer.status.value,
                    detail=answer.detail,
                    provisional=True,
                )
            )
        failed = [(key, answer) for key, answer in answers.items() if answer.status is ProbeStatus.NOT_EXECUTED]
        if failed:
            raise Refusal(
                "probe", [f"Required edit {key} is not carried out: {answer.detail}." for key, answer in failed]
            )
        return answers

    def _check_artifacts(self, draft: Draft, program: Program, rules: Rules, own: ProbeEvidence) -> None:
        """Refuse a claim that stands refuted of a mechanism which installs the same, whatever its code and name."""

        def installs_the_same(name: str, barred: BarredClaim) -> bool:
            if barred.program is None or name not in draft.added:
                return False
            source = graft(program.source, name, self._ledger.program(barred.program).source, barred.mechanism)
            if source is None:
                return False
            title = f"{program.title} with {barred.mechanism} for {name}"
            twin = self.store(source, origin="knockout", title=title, parent=program)
            passed, _, evidence = self.smoke(twin, allowed_class="corrected")
            return passed and not _differs(own, probe_evidence(evidence, twin.source))

        _check_claims(program.source, draft.proposal, rules, installs_the_same)

    def _parent_evidence(self, program: Program) -> ProbeEvidence:
        """Return the smoke evidence of the program that this one was made from; empty where there is none."""
        if program.parent_id is None:
            return ProbeEvidence()
        parent = self._ledger.program(program.parent_id)
        _, _, evidence = self.smoke(parent, allowed_class="corrected")
        return probe_evidence(evidence, parent.source)

    def _twin(self, program: Program, mechanism: str, rules: Rules) -> ProbeEvidence | None:
        """Return the smoke evidence of the program with a mechanism at its neutral; None when it cannot run."""
        twin = self.twin_program(program, (mechanism,))
        if twin is None:
            return None
        passed, _, evidence = self.smoke(twin, allowed_class="corrected")
        return probe_evidence(evidence, twin.source) if passed else None

    def twin_program(self, program: Program, mechanisms: Sequence[str]) -> Program | None:
        """Return the stored program with mechanisms at their neutrals; None when it declares no such mechanism."""
        if not set(mechanisms) <= set(program.mechanisms):
            return None
        try:
            source = program_source.knock_out(program.source, mechanisms)
        except ProgramProblem:
            return None
        return self.store(
            source, origin="knockout", title=f"{program.title} without {', '.join(mechanisms)}", parent=program
        )


def _differs(own: ProbeEvidence, twin: ProbeEvidence) -> bool:
    return any(layer.get("digest") != twin.layers.get(name, {}).get("digest") for name, layer in own.layers.items())


def _check_required(proposal: ProposalReply, rules: Rules) -> None:
    known = {record.key: record for record in rules.open_edits}
    problems = [
        f"{key!r} is no open required edit; open: {', '.join(known) or 'none'}."
        for key in proposal.discharges
        if key not in known
    ]
    problems += [
        f"Required edit {record.key} blocks: {record.edit.wording}. The candidate must carry it out and list it under Discharges."
        for record in rules.open_edits
        if record.blocks and record.key not in proposal.discharges
    ]
    if problems:
        raise Refusal("required edit", problems)


def _reaches_beyond(place: Place, truncated: ProbeEvidence) -> bool:
    """Whether a place names blocks that the truncated subject lacks."""
    blocks = {split_name(name)[0] for name in truncated.layers}
    return any(block not in blocks for block in place.blocks)


def _check_claims(
    source: str,
    proposal: ProposalReply,
    rules: Rules,
    installs_the_same: Callable[[str, BarredClaim], bool] = lambda name, barred: False,
) -> None:
    retested = {
        (record.edit.mechanism, same_cause(record.edit.cause))
        for record in rules.open_edits
        if record.edit.kind == "retest" and record.key in proposal.discharges
    }
    binding = [claim for claim in rules.barred if (claim.mechanism, same_cause(claim.cause)) not in retested]
    problems = []
    for claim in proposal.mechanisms:
        fingerprint = mechanism_fingerprint(source, claim.name)
        same = partial(installs_the_same, claim.name)
        barred = claim_is_barred(claim.name, fingerprint, claim.cause, binding, installs_the_same=same)
        if barred is not None:
            problems.append(
                f"The claim that {claim.name!r} acts through {claim.cause!r} stands refuted (as {barred.mechanism!r}); "
                "lean on another cause, or leave the mechanism as it is."
            )
    if problems:
        raise Refusal("barred claim", problems)
