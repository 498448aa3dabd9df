"""What the proposer is told and asked: requests built from the ledger, answers read, one repair for each.

A request holds only what stands in the ledger at that moment, so that a resumed campaign asks the very same question and
finds the answer recorded.
"""

from __future__ import annotations

import math
from dataclasses import replace

from forge import prompting
from forge.asking import Asker
from forge.controls import ControlProblem, build_control
from forge.desk import Desk
from forge.digest import ledger_digest
from forge.errors import ReplyProblem
from forge.extending import Extension, extend
from forge.program_identity import mechanism_fingerprint
from forge.program_source import mechanisms
from forge.proposers.base import ExplanationRequest, MeasuredEffect, ProposalRequest, Reply
from forge.recipe import Recipe
from forge.replies import ExplanationReply, parse_explanation
from forge.reply_writing import write_explanation
from forge.scored import Scored
from forge.screening import Rules, added_mechanisms
from hypotheses.effects import PairedEffect
from hypotheses.ledger import Ledger, NewNote, NewProposal, Observation
from hypotheses.predictions import Explanation, ExplanationProblem, same_problems, vacuous_problems
from hypotheses.required_edits import BarredClaim, barred_claims
from hypotheses.verdicts import Verdict, VerdictStatus

EXTENSION_ATTEMPT = 2
"""Number of the answer that may add controls, after the first and its repair."""


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
    ) -> ExplanationReply | None:
        """Ask for rivals, controls and predictions; None when the answer could not be used, also after one repair.

        width: what to expect of a measured retained effect, shown so that predictions are not closer together.
        """
        problems: tuple[str, ...] = ()
        previous = ""
        for attempt in (0, 1):
            request = self._why(turn, observation, parent, child, claims, search, confirmed, width)
            request = replace(request, attempt=attempt, problems=problems, previous_reply=previous)
            reply = self._asker.explain(f"turn-{turn}/explain/{attempt}", prompting.with_prompt(request))
            try:
                parsed = parse_explanation(reply.text, finish_reason=reply.finish_reason)
                _check_controls(parsed.explanation, parent, child)
                _check_first(parsed.explanation)
                _check_predictions(parsed.explanation, width, is_repair=attempt > 0)
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

    def extension(
        self,
        turn: int,
        observation: Observation,
        parent: Scored,
        child: Scored,
        claims: tuple[tuple[str, str], ...],
        search: PairedEffect,
        confirmed: PairedEffect,
        width: float,
        registered: Explanation,
        ids: dict[str, str],
        inseparable: tuple[tuple[str, str], ...],
    ) -> tuple[Extension, ExplanationReply] | None:
        """Ask once for controls that separate rivals which no registered control separates; None when nothing came of it.

        registered: its hypotheses and usable controls, as they stand in the ledger under `ids`.
        """
        request = replace(
            self._why(turn, observation, parent, child, claims, search, confirmed, width),
            attempt=EXTENSION_ATTEMPT,
            previous_reply=write_explanation(ExplanationReply(explanation=registered)),
            inseparable=inseparable,
            registered=tuple(ids.items()),
        )
        reply = self._asker.explain(f"turn-{turn}/explain/{EXTENSION_ATTEMPT}", prompting.with_prompt(request))
        try:
            parsed = parse_explanation(reply.text, finish_reason=reply.finish_reason)
            extension = extend(registered, ids, parsed.explanation)
            _check_controls(parsed.explanation, parent, child)
            _check_predictions(extension.explanation, width, is_repair=True)
        except (ReplyProblem, ExplanationProblem) as problem:
            self._record(turn, EXTENSION_ATTEMPT, tuple(problem.problems))
            return None
        self._record(turn, EXTENSION_ATTEMPT, ())
        return extension, parsed

    def _why(
        self,
        turn: int,
        observation: Observation,
        parent: Scored,
        child: Scored,
        claims: tuple[tuple[str, str], ...],
        search: PairedEffect,
        confirmed: PairedEffect,
        width: float,
    ) -> ExplanationRequest:
        """Return the request for an explanation, without what depends on earlier answers."""
        added = added_mechanisms(parent.program.source, child.program.source)
        return ExplanationRequest(
            prompt="",
            observation=observation.id,
            turn=turn,
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
                MeasuredEffect(name="child", effect=search.mean, standard_error=search.standard_error, split="search"),
            ),
            noise_floor=self._noise_floor,
            expected_width=width,
            mechanical_controls=tuple(f"knockout {name}" for name in added if len(added) > 1)
            + tuple(f"knockin {name}" for name in added if len(added) > 1),
            barred_claims=tuple(sorted(self.barred(), key=lambda claim: (claim.mechanism, claim.cause))),
            budget_left=self._ledger.budget().free,
            seed=self._recipe.campaign.seed,
        )

    def barred(self) -> frozenset[BarredClaim]:
        """Return every claim that stands refuted, with the fingerprint of the mechanism where it was refuted."""
        barred: set[BarredClaim] = set()
        rows = {row.id: row for row in self._ledger.hypotheses()}
        for observation in self._ledger.observations():
            source = self._ledger.program(observation.program_id).source
            declared = mechanisms(source)
            verdicts = [
                _verdict(rows[row.hypothesis_id].mechanism, rows[row.hypothesis_id].cause, row.status, row.reason)
                for row in self._ledger.verdicts(observation.id)
            ]
            barred |= barred_claims(
                verdicts, fingerprints={name: mechanism_fingerprint(source, name) for name in declared}
            )
        return frozenset(barred)

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


def _check_first(explanation: Explanation) -> None:
    """Refuse revisions where nothing is registered yet.

    Raises:
        ReplyProblem: naming each.
    """
    revisions = [hypothesis for hypothesis in explanation.hypotheses if hypothesis.predecessor is not None]
    if revisions:
        raise ReplyProblem(
            f"Hypothesis {hypothesis.key!r} revises {hypothesis.predecessor}, but nothing is registered for this observation yet."
            for hypothesis in revisions
        )


def _check_predictions(explanation: Explanation, width: float, *, is_repair: bool) -> None:
    """Refuse predictions that the noise leaves nothing of, against the width that the proposer was told.

    Rivals that predict the same within it are sent back once. A repair that still has some is taken as long as some pair
    parts, since the others can be judged; the design names the pairs that nothing separates.

    Raises:
        ReplyProblem: with every reason.
    """
    same = same_problems(explanation, width)
    num_pairs = math.comb(len(explanation.hypotheses), 2)
    problems = vacuous_problems(explanation, width) + (same if not is_repair or len(same) == num_pairs else [])
    if problems:
        raise ReplyProblem(problem[:1].upper() + problem[1:] + "." for problem in problems)


def _check_controls(explanation: Explanation, parent: Scored, child: Scored) -> None:
    """Raise `ReplyProblem` when not one control can be made of the two programs."""
    problems = []
    for control in explanation.controls:
        try:
            build_control(control, parent=parent.program.source, child=child.program.source)
        except ControlProblem as problem:
            problems.append(str(problem))
    if len(problems) == len(explanation.controls):
        raise ReplyProblem(problems)


def _verdict(mechanism: str, cause: str, status: str, reason: str) -> Verdict:
    """Return a stored verdict as far as barring needs it."""
    return Verdict(
        rule="",
        hypothesis=cause,
        mechanism=mechanism,
        cause=cause,
        status=VerdictStatus(status),
        reason=reason,
        alpha=0.0,
        checks=(),
        survivors=(),
    )
