"""What the proposer is told and asked: requests built from the ledger, answers read, one repair for each.

A request holds only what stands in the ledger at that moment, so that a resumed campaign asks the very same question and
finds the answer recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forge import prompting, retesting
from forge.asking import Asker
from forge.desk import Desk, probe_evidence
from forge.digest import ledger_digest
from forge.errors import ReplyProblem
from forge.extending import Extension, extend
from forge.program_identity import mechanism_fingerprint
from forge.program_source import mechanisms
from forge.proposers.base import ExplanationRequest, MeasuredEffect, ProposalRequest, Reply
from forge.recipe import Recipe
from forge.replies import ExplanationReply, awaited_verdict, parse_explanation
from forge.reply_writing import write_explanation
from forge.scored import Scored
from forge.screening import Rules, added_mechanisms
from hypotheses.design import SHARE
from hypotheses.effects import PairedEffect
from hypotheses.ledger import Ledger, NewNote, NewProposal, Observation
from hypotheses.predictions import Control, Explanation, ExplanationProblem, same_problems, vacuous_problems
from hypotheses.required_edits import BarredClaim, JudgedClaim, barred_claims, check_required_edit
from hypotheses.verdicts import VerdictStatus

EXTENSION_ATTEMPT = 2
"""Number of the answer that may add controls, after the first and its repair."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A confirmed difference between a program and its parent, which wants an explanation.

    claims: what the child's proposer said of it, as pairs of mechanism and cause. search: the effect that drew attention;
    confirmed: the one that is explained. width: what to expect of a measured retained effect, shown so that predictions are not
    closer together. idle: mechanisms that do not execute, with what showed it. trial: makes and tries controls at no evaluator
    call; returns by key why one cannot be used.
    """

    turn: int
    observation: Observation
    parent: Scored
    child: Scored
    claims: tuple[tuple[str, str], ...]
    search: PairedEffect
    confirmed: PairedEffect
    width: float
    idle: Mapping[str, str]
    trial: Callable[[Sequence[Control]], Mapping[str, str]]


class Interview:
    """Asks one proposer on behalf of one campaign."""

    def __init__(self, ledger: Ledger, asker: Asker, recipe: Recipe, noise_floor: float) -> None:
        self._ledger = ledger
        self._asker = asker
        self._recipe = recipe
        self._noise_floor = noise_floor

    @property
    def last_call_id(self) -> str:
        """Id of the ledger's record of the last answer."""
        return self._asker.last_call_id

    def proposal(
        self,
        turn: int,
        attempt: int,
        incumbent: Scored,
        desk: Desk,
        rules: Rules,
        problems: tuple[str, ...],
        previous: str,
    ) -> Reply:
        """Ask for a candidate; `problems` and `previous` make it a repair."""
        artifact = incumbent.result.artifact_hash
        request = ProposalRequest(
            prompt="",
            turn=turn,
            attempt=attempt,
            problems=problems,
            previous_reply=previous,
            incumbent_source=incumbent.program.source,
            mechanisms=mechanisms(incumbent.program.source),
            error_map=desk.error_map(artifact) if artifact else (),
            open_edits=rules.open_edits,
            barred_claims=tuple(sorted(rules.barred, key=lambda claim: (claim.mechanism, claim.cause))),
            earlier_ast_hashes=rules.earlier_ast_hashes,
            tried=tuple(
                (str(claim["mechanism"]), str(claim["cause"]))
                for proposal in self._ledger.proposals()
                if proposal.kind == "candidate"
                for claim in proposal.claims
            ),
            digest=ledger_digest(self._ledger),
            contract_class=self._recipe.campaign.contract_class,
            budget_left=self._ledger.budget().free,
            seed=self._recipe.campaign.seed,
        )
        return self._asker.propose(f"turn-{turn}/propose/{attempt}", prompting.with_prompt(request))

    def explanation(self, finding: Finding) -> ExplanationReply | None:
        """Ask for rivals, controls and predictions; None when the answer could not be used, also after one repair."""
        problems: tuple[str, ...] = ()
        again, brought, lost = self._retests(finding)
        request = self._why(finding, again, brought)
        for key, reason in lost.items():
            text = f"control {key!r}, which the proposal brought for a retest, cannot be used: {reason}"
            self._ledger.add_note(NewNote(turn=finding.turn, topic="control", text=text))
        for attempt in (0, 1):
            reply = self._ask(finding, replace(request, attempt=attempt, problems=problems))
            try:
                parsed = parse_explanation(reply.text, finish_reason=reply.finish_reason)
                problems = (
                    *_early_revisions(parsed.explanation),
                    *_problems(parsed, parsed.explanation, finding, request, is_last=attempt > 0),
                )
                if problems:
                    raise ReplyProblem(problems)
            except ReplyProblem as problem:
                problems = problem.problems
                request = replace(request, previous_reply=reply.text)
                self._record(finding.turn, attempt, problems)
                continue
            self._record(finding.turn, attempt, ())
            return parsed
        text = f"{finding.observation.id} stays unexplained: {'; '.join(problems)}"
        self._ledger.add_note(NewNote(turn=finding.turn, topic="explanation", text=text))
        return None

    def extension(
        self,
        finding: Finding,
        registered: Explanation,
        ids: Mapping[str, str],
        inseparable: tuple[tuple[str, str], ...],
    ) -> tuple[Extension, ExplanationReply] | None:
        """Ask once for controls that separate rivals which no registered control separates; None when nothing came of it.

        Args:
            finding: that the explanation is about.
            registered: its hypotheses, and those of its controls that can be evidence.
            ids: of the hypotheses in the ledger, by cause.
            inseparable: the pairs.
        """
        again, brought, _ = self._retests(finding)
        request = replace(
            self._why(finding, again, brought),
            attempt=EXTENSION_ATTEMPT,
            previous_reply=write_explanation(ExplanationReply(explanation=registered)),
            inseparable=inseparable,
            registered=tuple(ids.items()),
        )
        reply = self._ask(finding, request)
        try:
            parsed = parse_explanation(reply.text, finish_reason=reply.finish_reason)
            extension = extend(registered, ids, parsed.explanation)
            problems = _problems(parsed, extension.explanation, finding, request, is_last=True)
            if problems:
                raise ReplyProblem(problems)
        except (ReplyProblem, ExplanationProblem) as problem:
            self._record(finding.turn, EXTENSION_ATTEMPT, tuple(problem.problems))
            return None
        self._record(finding.turn, EXTENSION_ATTEMPT, ())
        return extension, parsed

    def _ask(self, finding: Finding, request: ExplanationRequest) -> Reply:
        return self._asker.explain(f"turn-{finding.turn}/explain/{request.attempt}", prompting.with_prompt(request))

    def _why(
        self, finding: Finding, again: tuple[tuple[str, str], ...], brought: tuple[Control, ...]
    ) -> ExplanationRequest:
        """Return the request for an explanation, without what depends on earlier answers; `again`, `brought`: see `_retests`."""
        confirmed, search = finding.confirmed, finding.search
        added = tuple(
            name
            for name in added_mechanisms(finding.parent.program.source, finding.child.program.source)
            if name not in finding.idle
        )
        return ExplanationRequest(
            prompt="",
            observation=finding.observation.id,
            turn=finding.turn,
            parent_source=finding.parent.program.source,
            child_source=finding.child.program.source,
            mechanisms_added=added,
            claims=finding.claims,
            effect=MeasuredEffect(
                name="child", effect=confirmed.mean, standard_error=confirmed.standard_error, split="confirm"
            ),
            known_effects=(
                MeasuredEffect(name="child", effect=search.mean, standard_error=search.standard_error, split="search"),
            ),
            noise_floor=self._noise_floor,
            expected_width=finding.width,
            mechanical_controls=tuple(f"knockout {name}" for name in added if len(added) > 1)
            + tuple(f"knockin {name}" for name in added if len(added) > 1),
            barred_claims=tuple(sorted(self.barred(), key=lambda claim: (claim.mechanism, claim.cause))),
            retested=again,
            brought_controls=brought,
            budget_left=self._ledger.budget().free,
            seed=self._recipe.campaign.seed,
        )

    def barred(self) -> frozenset[BarredClaim]:
        """Return every claim that stands refuted, with the mechanism as it was where it was refuted last."""
        rows = {row.id: row for row in self._ledger.hypotheses()}
        programs = {row.id: row.program_id for row in self._ledger.observations()}
        judged = []
        for verdict in self._ledger.verdicts():
            hypothesis = rows[verdict.hypothesis_id]
            program = programs[verdict.observation_id]
            source = self._ledger.program(program).source
            judged.append(
                JudgedClaim(
                    mechanism=hypothesis.mechanism,
                    cause=hypothesis.cause,
                    status=VerdictStatus(verdict.status),
                    fingerprint=mechanism_fingerprint(source, hypothesis.mechanism)
                    if hypothesis.mechanism in mechanisms(source)
                    else None,
                    program=program,
                )
            )
        return barred_claims(judged)

    def _retests(self, finding: Finding) -> tuple[tuple[tuple[str, str], ...], tuple[Control, ...], Mapping[str, str]]:
        """Return the claims that a turn tests again, the controls it brought for that, and why others of these cannot be used."""
        claims, brought = retesting.of_turn(self._ledger, finding.turn)
        claims = tuple(claim for claim in claims if claim[0] not in finding.idle)
        if not claims:
            return (), (), {}
        lost = finding.trial(brought)
        return claims, tuple(control for control in brought if control.key not in lost), lost

    def _record(self, turn: int, attempt: int, problems: tuple[str, ...]) -> None:
        self._ledger.record_proposal(
            NewProposal(
                turn=turn,
                attempt=attempt,
                kind="explanation",
                status="refused" if problems else "accepted",
                llm_call_id=self.last_call_id,
                stage="explanation" if problems else "",
                reason="\n".join(problems),
            )
        )


def _problems(
    reply: ExplanationReply, standing: Explanation, finding: Finding, request: ExplanationRequest, *, is_last: bool
) -> tuple[str, ...]:
    """Return why an answer cannot be used.

    Args:
        reply: the answer.
        standing: everything that would be registered if it is taken.
        finding: what it explains.
        request: what it answers.
        is_last: nothing of it can be mended any more.
    """
    return (
        *_unknown_mechanisms(standing, finding),
        # What keeps a control from being made at all names it already.
        *(
            reason if repr(key) in reason else f"control {key!r} cannot be used: {reason}"
            for key, reason in finding.trial(standing.controls).items()
        ),
        *_prediction_problems(standing, finding.width, is_last=is_last),
        *_edit_problems(reply, finding.child),
        *retesting.explanation_problems(
            standing,
            request.retested,
            request.brought_controls,
            parent=finding.parent.program.source,
            child=finding.child.program.source,
        ),
    )


def _early_revisions(explanation: Explanation) -> list[str]:
    return [
        f"Hypothesis {hypothesis.key!r} revises {hypothesis.predecessor}, but nothing is registered for this observation yet."
        for hypothesis in explanation.hypotheses
        if hypothesis.predecessor is not None
    ]


def _prediction_problems(explanation: Explanation, width: float, *, is_last: bool) -> list[str]:
    """Return which predictions the noise leaves nothing of, against the width that the proposer was told.

    Rivals that predict the same within it are sent back once. A later answer that still has some is taken as long as some pair
    parts, since the others can be judged; the design names the pairs that nothing separates.
    """
    same = same_problems(explanation, SHARE * width)
    num_pairs = math.comb(len(explanation.hypotheses), 2)
    problems = vacuous_problems(explanation, width) + (same if not is_last or len(same) == num_pairs else [])
    return [problem[:1].upper() + problem[1:] + "." for problem in problems]


def _unknown_mechanisms(explanation: Explanation, finding: Finding) -> list[str]:
    parent, child, idle = finding.parent, finding.child, finding.idle
    known = tuple(dict.fromkeys((*child.program.mechanisms, *parent.program.mechanisms)))
    listed = ", ".join(map(repr, known)) or "none"
    problems = [
        f"Hypothesis {h.key!r} is about mechanism {h.mechanism!r}, which neither program has; they have: {listed}."
        for h in explanation.hypotheses
        if h.mechanism not in known
    ]
    problems += [
        f"Hypothesis {h.key!r} is about mechanism {h.mechanism!r}, which does not execute: {idle[h.mechanism]}."
        for h in explanation.hypotheses
        if h.mechanism in idle
    ]
    return problems


def _edit_problems(reply: ExplanationReply, child: Scored) -> list[str]:
    """Return why required edits could not be taken whatever the verdict: told while it can be mended."""
    evidence = probe_evidence(child.result.evidence, child.program.source)
    problems = []
    for wish in reply.required_edits:
        verdict = awaited_verdict(wish, reply.explanation.hypothesis(wish.hypothesis).mechanism)
        found = check_required_edit(wish.edit, verdict, mechanisms=child.program.mechanisms, incumbent=evidence)
        name = f"'if {wish.hypothesis} {wish.verdict}: {wish.edit.kind} {wish.edit.mechanism} ...'"
        problems += [f"Required edit {name}: {problem}." for problem in found]
    return problems
