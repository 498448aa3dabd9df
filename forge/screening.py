"""Screening: everything that a candidate must pass before an evaluator call is spent on it.

In order: the reply reads, its edits apply whole and uniquely, the program keeps the convention and the static rules, differs
from every earlier program, addresses the blocking required edit, claims nothing that stands refuted, runs on the truncated
subject inside the sandbox, installs what its parent installs when the mechanisms that it touches are at their neutrals, really
executes each of them (`forge.execution`), installs something that no earlier program installs, claims nothing refuted of what
installs the same (`forge.grafting`), and carries out the required edits that it discharges. What the truncated subject does not
show may stand in its later blocks: before a candidate is refused for that, the whole subject is asked, unscored and at no
evaluator call. The first stage that fails refuses the candidate with exact reasons, which the proposer is shown once.
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
from forge.execution import Execution, Look, examine, touched_mechanisms
from forge.grafting import graft
from forge.program_identity import ast_hash, mechanism_fingerprint, normalized_ast_hash
from forge.proposers.base import Reply
from forge.replies import ProposalReply, parse_proposal
from forge.retaining import is_class_allowed
from forge.scored import Scored, scored
from forge.static_checks import static_problems
from hypotheses.ledger import Evaluation, Ledger, NewProbeResult, NewProgram, NewScreening, Program
from hypotheses.ledger.records import ProgramOrigin
from hypotheses.probes import (
    LineProbe,
    ProbeEvidence,
    ProbeResult,
    ProbeStatus,
    check_probe,
    installs_the_same,
    probe_mechanism,
)
from hypotheses.required_edits import (
    BarredClaim,
    EditRecord,
    RequiredEdit,
    check_carried_out,
    claim_is_barred,
    same_cause,
)

WHOLE_RUN = "the run on the whole subject"


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
    silent = [name for name in touched_mechanisms(rules.incumbent, source).altered if name not in claimed]
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
        parent = self._parent(program)
        # A retest is settled by a verdict and by no run of its own.
        addressed = [
            record
            for record in rules.open_edits
            if record.key in draft.proposal.discharges and record.edit.kind != "retest"
        ]
        leaning_on = [claim.name for claim in draft.proposal.mechanisms]
        leaning_on += [name for record in addressed if (name := probe_mechanism(record.edit.probe))]
        whole = self._whole(parent, evidence)
        shown = examine(
            program, parent, twins=self.twin_program, look=self._smoked, where="the smoke run", leaning_on=leaning_on
        )
        if shown.idle and whole is not None:
            shown = examine(
                program, parent, twins=self.twin_program, look=whole, where=WHOLE_RUN, leaning_on=leaning_on
            )
        _require_execution(shown, self._smoked(program))
        self._require_new(program, evidence, rules, whole)
        self._require_unbarred(draft, program, rules, whole)
        answers: dict[str, ProbeResult] = {}
        for record in addressed:
            answer = self._answer(record.edit, program, parent, self._smoked)
            if not answer.is_decisive and whole is not None:
                answer = self._answer(record.edit, program, parent, whole)
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

    def examine_paid(
        self, program: Program, evaluation: Evaluation, parent: Scored, *, turn: int, leaning_on: Sequence[str]
    ) -> Execution:
        """Return what a candidate's paid run shows of its mechanisms, its twins run on the whole subject beside it."""
        return examine(
            program,
            parent.program,
            twins=self.twin_program,
            look=lambda other: self.paid_evidence(other, evaluation, parent, turn=turn),
            where=WHOLE_RUN,
            leaning_on=leaning_on,
        )

    def paid_evidence(
        self, program: Program, evaluation: Evaluation, parent: Scored, *, turn: int
    ) -> ProbeEvidence | str:
        """Return the evidence of a program run as the candidate of `evaluation` was, or how the run ended."""
        for paid in (evaluation, parent.evaluation):
            result = scored(paid)
            if paid.program_id == program.id and result is not None and _same_run(paid, evaluation):
                return probe_evidence(result.evidence, program.source)
        traced = self._desk.trace(program, draw=evaluation.draw, seed=evaluation.seed, turn=turn)
        return probe_evidence(traced, program.source) if traced is not None else "it does not run to its end"

    def _parent(self, program: Program) -> Program:
        assert program.parent_id is not None, "a draft is an edit of a program"
        return self._ledger.program(program.parent_id)

    def _smoked(self, program: Program) -> ProbeEvidence | str:
        passed, reason, evidence = self.smoke(program, allowed_class="corrected")
        return probe_evidence(evidence, program.source) if passed else reason

    def _whole(self, parent: Program, smoked: dict[str, object]) -> Look | None:
        """Return how to run programs as the parent's score was measured; None where the smoke run shows it all already."""
        evaluations = self._ledger.evaluations(program_id=parent.id)
        paid = next((paid for paid in evaluations if paid.split == "search" and scored(paid) is not None), None)
        result = scored(paid) if paid is not None else None
        if paid is None or result is None or not is_deeper(result.evidence, smoked):
            return None
        draw, seed, evidence = paid.draw, paid.seed, result.evidence

        def look(program: Program) -> ProbeEvidence | str:
            if program.id == parent.id:
                return probe_evidence(evidence, program.source)
            traced = self._desk.look(program, draw=draw, seed=seed)
            if not traced.outcome.is_scored:
                return f"{traced.outcome.value}: {traced.reason}"
            return probe_evidence(traced.evidence.to_json(), program.source)

        return look

    def _require_new(self, program: Program, smoked: dict[str, object], rules: Rules, whole: Look | None) -> None:
        """Raise `Refusal` if the program installs what an earlier one installs, as far as any run can show."""
        if smoked["smoke_digest"] not in rules.earlier_smoke_digests:
            return
        if whole is None:
            raise Refusal(
                "duplicate", ["On the truncated subject it installs exactly what an earlier program installs there."]
            )
        own = whole(program)
        if isinstance(own, str):
            raise Refusal(
                "smoke", [f"On the truncated subject it does what an earlier program does; the whole one: {own}"]
            )
        for paid in self._ledger.evaluations():
            result = scored(paid)
            if result is None or paid.program_id in (None, program.id):
                continue
            assert paid.program_id is not None
            earlier = self._ledger.program(paid.program_id)
            if installs_the_same(own, probe_evidence(result.evidence, earlier.source)):
                raise Refusal(
                    "duplicate", ["On the whole subject it installs exactly what an earlier program installs."]
                )

    def _require_unbarred(self, draft: Draft, program: Program, rules: Rules, whole: Look | None) -> None:
        """Raise `Refusal` for a refuted claim of a mechanism that installs the same, whatever its code and name."""

        def is_the_same(name: str, barred: BarredClaim) -> bool:
            if barred.program is None or name not in draft.added:
                return False
            source = graft(program.source, name, self._ledger.program(barred.program).source, barred.mechanism)
            if source is None:
                return False
            title = f"{program.title} with {barred.mechanism} for {name}"
            twin = self.store(source, origin="knockout", title=title, parent=program)
            looks = [self._smoked] if whole is None else [self._smoked, whole]
            return all(_install_the_same(look(program), look(twin)) for look in looks)

        _check_claims(program.source, draft.proposal, rules, is_the_same)

    def _answer(self, edit: RequiredEdit, program: Program, parent: Program, look: Look) -> ProbeResult:
        """Return whether a run of the program carries an edit out."""
        own, before = look(program), look(parent)
        if isinstance(own, str):
            return ProbeResult(status=ProbeStatus.NOT_EXECUTED, detail=f"{WHOLE_RUN} ended so: {own}")
        name = probe_mechanism(edit.probe)
        twin = self.twin_program(program, (name,)) if name else None
        knocked_out = look(twin) if twin is not None else None
        return check_carried_out(
            edit,
            own,
            incumbent=ProbeEvidence() if isinstance(before, str) else before,
            altered=touched_mechanisms(parent.source, program.source).altered,
            knocked_out=None if isinstance(knocked_out, str) else knocked_out,
        )

    def twin_program(self, program: Program, mechanisms: Sequence[str]) -> Program | None:
        """Return the stored program with mechanisms at their neutrals; None when it declares no such mechanism."""
        if not set(mechanisms) <= set(program.mechanisms):
            return None
        names = [name for name in program.mechanisms if name in mechanisms]
        try:
            source = program_source.knock_out(program.source, names)
        except ProgramProblem:
            return None
        return self.store(
            source, origin="knockout", title=f"{program.title} without {', '.join(names)}", parent=program
        )


def is_deeper(evidence: dict[str, object], smoked: dict[str, object]) -> bool:
    """Whether a run installed layers that the smoke run's truncated subject does not have."""
    layers, seen = evidence.get("layers", {}), smoked.get("layers", {})
    assert isinstance(layers, dict)
    assert isinstance(seen, dict)
    return bool(layers.keys() - seen.keys())


def _require_execution(shown: Execution, smoked: ProbeEvidence | str) -> None:
    """Raise `Refusal` unless the mechanisms of a draft act and their neutrals are neutral.

    smoked: the draft's smoke run; its lines tell the author which it is, code that is not reached or a result that is not used.
    """
    if shown.not_neutral:
        raise Refusal(
            "neutral",
            [
                f"Either a neutral does something, or the edit changes something outside its mechanisms: {shown.not_neutral}. "
                "Let each neutral do what the program does without the mechanism, and put every change into a mechanism."
            ],
        )
    if shown.idle:
        raise Refusal(
            "execution",
            [
                f"Mechanism {name!r} does not execute: {why}.{_reached(name, smoked)}"
                for name, why in shown.idle.items()
            ],
        )


def _reached(mechanism: str, smoked: ProbeEvidence | str) -> str:
    """Say whether the lines of a mechanism ran, as far as anything was counted."""
    if isinstance(smoked, str):
        return ""
    answer = check_probe(LineProbe(function=mechanism), smoked)
    if answer.status is ProbeStatus.UNDETERMINED:
        return ""
    found = "its lines ran" if answer.status is ProbeStatus.EXECUTED else "none of its lines ran"
    return f" In the smoke run {found} (advisory)."


def _install_the_same(one: ProbeEvidence | str, other: ProbeEvidence | str) -> bool:
    return not isinstance(one, str) and not isinstance(other, str) and installs_the_same(one, other)


def _same_run(one: Evaluation, other: Evaluation) -> bool:
    return (one.draw, one.seed) == (other.draw, other.seed)


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


def _check_claims(
    source: str,
    proposal: ProposalReply,
    rules: Rules,
    is_the_same: Callable[[str, BarredClaim], bool] = lambda name, barred: False,
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
        same = partial(is_the_same, claim.name)
        barred = claim_is_barred(claim.name, fingerprint, claim.cause, binding, installs_the_same=same)
        if barred is not None:
            problems.append(
                f"The claim that {claim.name!r} acts through {claim.cause!r} stands refuted (as {barred.mechanism!r}); "
                "lean on another cause, or leave the mechanism as it is."
            )
    if problems:
        raise Refusal("barred claim", problems)
