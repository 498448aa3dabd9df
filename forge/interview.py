"""What the proposer is told and asked: requests built from the ledger, answers read, one repair for each.

A request holds only what stands in the ledger at that moment, so that a resumed campaign asks the very same question and
finds the answer recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from forge import prompting, retesting
from forge.asking import Asker
from forge.desk import Desk, probe_evidence
from forge.digest import ledger_digest
from forge.errors import ReplyProblem
from forge.program_identity import mechanism_fingerprint
from forge.program_source import mechanisms
from forge.proposers.base import ExplanationRequest, MeasuredEffect, ProposalRequest, Reply
from forge.recipe import Recipe
from forge.replies import ExplanationReply, awaited_verdict, parse_explanation
from forge.scored import Scored
from forge.screening import Rules, added_mechanisms
from hypotheses.design import SHARE
from hypotheses.effects import PairedEffect
from hypotheses.ledger import Ledger, NewNote, NewProposal, Observation
from hypotheses.predictions import Control, Explanation, same_problems, vacuous_problems
from hypotheses.required_edits import BarredClaim, JudgedClaim, barred_claims, check_required_edit
from hypotheses.verdicts import VerdictStatus


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

    def explanation(
        self,
        turn: int,
        observation: Observation,
        parent: Scored,
        child: Scored,
        claims: tuple[tuple[str, str], ...],
        search: PairedEffect,
        confirmed: PairedEffect,
        width: float,
        *,
        idle: Mapping[str, str],
        trial: Callable[[Sequence[Control]], Mapping[str, str]],
    ) -> ExplanationReply | None:
        """Ask for rivals, controls and predictions; None when the answer could not be used, also after one repair.

        width: what to expect of a measured retained effect, shown so that predictions are not closer together.
        idle: mechanisms that do not execute, with what showed it.
        trial: makes and tries controls at no evaluator call; returns by key why one cannot be used.
        """
        problems: tuple[str, ...] = ()
        previous = ""
        again, brought = self._retests(turn, idle, trial)
        for attempt in (0, 1):
            added = tuple(
                name for name in added_mechanisms(parent.program.source, child.program.source) if name not in idle
            )
            request = ExplanationRequest(
                prompt="",
                observation=observation.id,
                turn=turn,
                attempt=attempt,
                problems=problems,
                previous_reply=previous,
                parent_source=parent.program.source,
                child_source=child.program.source,
                mechanisms_added=added,
                claims=claims,
                effect=MeasuredEffect(
                    name="child",
                    effect=confirmed.mean,
                    standard_error=confirmed.standard_error,
                    split="confirm",
                ),
                known_effects=(
                    MeasuredEffect(
                        name="child", effect=search.mean, standard_error=search.standard_error, split="search"
                    ),
                ),
                noise_floor=self._noise_floor,
                expected_width=width,
                mechanical_controls=tuple(f"knockout {name}" for name in added if len(added) > 1)
                + tuple(f"knockin {name}" for name in added if len(added) > 1),
                barred_claims=tuple(sorted(self.barred(), key=lambda claim: (claim.mechanism, claim.cause))),
                retested=again,
                brought_controls=brought,
                budget_left=self._ledger.budget().free,
                seed=self._recipe.campaign.seed,
            )
            reply = self._asker.explain(f"turn-{turn}/explain/{attempt}", prompting.with_prompt(request))
            try:
                parsed = parse_explanation(reply.text, finish_reason=reply.finish_reason)
                problems = (
                    *_control_problems(parsed, parent, child, idle, trial),
                    *_prediction_problems(parsed.explanation, width, is_repair=attempt > 0),
                    *_edit_problems(parsed, child),
                    *retesting.explanation_problems(
                        parsed.explanation, again, brought, parent=parent.program.source, child=child.program.source
                    ),
                )
                if problems:
                    raise ReplyProblem(problems)
            except ReplyProblem as problem:
                problems, previous = problem.problems, reply.text
                self._record(turn, attempt, problems)
                continue
            self._record(turn, attempt, ())
            return parsed
        self._ledger.add_note(
            NewNote(turn=turn, topic="explanation", text=f"{observation.id} stays unexplained: {'; '.join(problems)}")
        )
        return None

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

    def _retests(
        self, turn: int, idle: Mapping[str, str], trial: Callable[[Sequence[Control]], Mapping[str, str]]
    ) -> tuple[tuple[tuple[str, str], ...], tuple[Control, ...]]:
        """Return the claims that a turn tests again and the controls it brought, but for what no explanation may hold."""
        claims, brought = retesting.of_turn(self._ledger, turn)
        claims = tuple(claim for claim in claims if claim[0] not in idle)
        if not claims:
            return (), ()
        unusable = trial(brought)
        for key, reason in unusable.items():
            text = f"control {key!r}, which the proposal brought for a retest, cannot be used: {reason}"
            self._ledger.add_note(NewNote(turn=turn, topic="control", text=text))
        return claims, tuple(control for control in brought if control.key not in unusable)

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


def _prediction_problems(explanation: Explanation, width: float, *, is_repair: bool) -> list[str]:
    """Return which predictions the noise leaves nothing of, against the width that the proposer was told.

    Rivals that predict the same within it are sent back once. A repair that still has some is taken as long as some pair
    parts, since the others can be judged; the design names the pairs that nothing separates.
    """
    same = same_problems(explanation, SHARE * width)
    num_pairs = math.comb(len(explanation.hypotheses), 2)
    problems = vacuous_problems(explanation, width) + (same if not is_repair or len(same) == num_pairs else [])
    return [problem[:1].upper() + problem[1:] + "." for problem in problems]


def _control_problems(
    reply: ExplanationReply,
    parent: Scored,
    child: Scored,
    idle: Mapping[str, str],
    trial: Callable[[Sequence[Control]], Mapping[str, str]],
) -> list[str]:
    """Return which mechanisms of a reply are not there, and which of its controls cannot be used."""
    problems = _unknown_mechanisms(reply, parent, child, idle)
    for key, reason in trial(reply.explanation.controls).items():
        # What keeps a control from being made at all names it already.
        problems.append(reason if repr(key) in reason else f"control {key!r} cannot be used: {reason}")
    return problems


def _unknown_mechanisms(reply: ExplanationReply, parent: Scored, child: Scored, idle: Mapping[str, str]) -> list[str]:
    known = tuple(dict.fromkeys((*child.program.mechanisms, *parent.program.mechanisms)))
    listed = ", ".join(map(repr, known)) or "none"
    problems = [
        f"Hypothesis {h.key!r} is about mechanism {h.mechanism!r}, which neither program has; they have: {listed}."
        for h in reply.explanation.hypotheses
        if h.mechanism not in known
    ]
    problems += [
        f"Hypothesis {h.key!r} is about mechanism {h.mechanism!r}, which does not execute: {idle[h.mechanism]}."
        for h in reply.explanation.hypotheses
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
