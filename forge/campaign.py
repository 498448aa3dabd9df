"""A campaign: set up, then turn after turn until calls, turns or ideas run out.

One turn: diagnose the incumbent, ask for an edit, screen it, buy one evaluation, retain by score, explain a clear difference,
run the controls, decide, require. With several evaluators as many turns are drafted from one incumbent, evaluated side by side
and then judged one after the other, each against the incumbent of that moment.

`resume` walks the same way again: every reply, run and verdict that the ledger holds is taken from there, so a killed campaign
goes on where it stopped and pays for nothing twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge import program_source
from forge.confirming import Confirmer, Declaration
from forge.continuity import require_all_met
from forge.desk import Call, Desk
from forge.discharging import Discharger
from forge.errors import ProposerError, ProposerExhausted
from forge.execution import Execution
from forge.explaining import Explainer
from forge.interview import Interview
from forge.measured_effects import effect_on
from forge.noise import NoiseModel
from forge.progress import Progress
from forge.recipe import Recipe
from forge.replies import ProposalReply
from forge.required import EditBoard
from forge.retaining import Retention, is_loss, judge
from forge.retesting import check_retests, to_proposal_body
from forge.scored import Scored, scored
from forge.screening import Draft, Refusal, Rules, Screener, read_draft
from hypotheses.ledger import (
    ENDED,
    STOPPED,
    BudgetExhausted,
    Evaluation,
    Ledger,
    NewIncumbent,
    NewNote,
    NewProposal,
    Program,
)
from hypotheses.probes import probe_mechanism
from hypotheses.required_edits import EditRecord

SIMPLIFYING = ("remove", "replace")


@dataclass(frozen=True, kw_only=True)
class _Drafted:
    """An accepted candidate that waits for its evaluation."""

    turn: int
    program: Program
    proposal: ProposalReply


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Why a campaign stopped.

    failed: the proposer could not be used, for now or at all: the exit code says so, and the campaign can be resumed. Else it
        is over: its calls, turns or ideas are spent.
    """

    reason: str
    failed: bool = False


class Campaign:
    """The loop over one ledger."""

    def __init__(
        self,
        recipe: Recipe,
        ledger: Ledger,
        desk: Desk,
        screener: Screener,
        interview: Interview,
        board: EditBoard,
        explainer: Explainer,
        confirmer: Confirmer,
        noise: NoiseModel,
        progress: Progress,
    ) -> None:
        self._recipe = recipe
        self._ledger = ledger
        self._desk = desk
        self._screener = screener
        self._interview = interview
        self._board = board
        self._explainer = explainer
        self._confirmer = confirmer
        self._noise = noise
        self._progress = progress
        self._discharger = Discharger(ledger, desk, screener, board, progress)

    def run(self) -> Ending:
        """Walk turns until something ends the campaign, declare its best, and note what ended it: for good, or for now.

        One that was only stopped declares nothing, because it can be resumed.

        Raises:
            ReplayError: the walk ended before it had met everything that was recorded.
        """
        ending = self._walk()
        turn = max((proposal.turn for proposal in self._ledger.proposals()), default=0)
        if not ending.failed:
            self._declare(turn)
        require_all_met(self._ledger, ending.reason)
        self._ledger.add_note(NewNote(turn=turn, topic=STOPPED if ending.failed else ENDED, text=ending.reason))
        self._progress.milestone(f"{'stopped' if ending.failed else 'ended'}: {ending.reason}")
        return ending

    def _walk(self) -> Ending:
        rules = self._recipe.campaign
        refused_in_a_row = 0
        turn = 1
        while turn <= rules.max_turns:
            if self._ledger.budget().free < 1:
                return Ending(reason="all evaluator calls are spent")
            if self._confirmer.spendable() < 1:
                return Ending(reason="the last evaluator call is kept to measure the best program again")
            size = self._turns_at_once(turn)
            blocking = self._blocking()
            try:
                spent = self._turns(range(turn, turn + size))
            except ProposerExhausted as done:
                return Ending(reason=str(done))
            except ProposerError as error:
                return Ending(reason=f"the proposer cannot go on: {error}", failed=True)
            except BudgetExhausted:
                return Ending(reason="all evaluator calls are spent")
            if blocking is not None and not spent:
                # Whether the edit or the proposer is to blame, nobody can tell; the edit gives way first.
                after = self._board.refused(blocking, turn=turn)
                if not after.blocks:
                    self._progress.milestone(f"required edit {blocking.key} blocks no more: {after.note}")
            else:
                refused_in_a_row = 0 if spent else refused_in_a_row + size
            turn += size
            if refused_in_a_row >= rules.max_consecutive_refusals:
                return Ending(
                    reason=f"{refused_in_a_row} turns in a row ended without a program to evaluate", failed=True
                )
        return Ending(reason=f"{rules.max_turns} turns are over")

    def _turns_at_once(self, turn: int) -> int:
        """Return how many turns to draft before any is evaluated; one while a required edit blocks the line."""
        if self._blocking() is not None:
            return 1
        return min(
            self._recipe.evaluation.workers, self._confirmer.spendable(), self._recipe.campaign.max_turns - turn + 1
        )

    def _blocking(self) -> EditRecord | None:
        """Return the required edit that every candidate of the incumbent must address now."""
        first = next(iter(self._board.open(program_source.mechanisms(self.incumbent().program.source))), None)
        return first if first is not None and first.blocks else None

    def _declare(self, turn: int) -> None:
        """Measure the best program again where that is due, and say which one the campaign stands for."""
        declaration = self._confirmer.declare(self._desk)
        assert declaration is not None, "the seed is scored at set-up"
        text = f"{declaration.best.program.id} ({declaration.best.program.title}) is declared the best: "
        effect = declaration.confirmation.effect if declaration.confirmation else None
        if effect is None:
            text += "it is the seed"
        else:
            text += f"measured again it is {effect.mean:+.4f} +- {effect.standard_error:.4f} nats/token from its parent"
        for title, reason in declaration.passed_over:
            text += f"; not {title}: {reason}"
        self._ledger.add_note(NewNote(turn=turn, topic="declared", text=text))
        self._progress.milestone(text)

    def declared(self) -> Declaration:
        """Return what the ended campaign stands for."""
        declaration = self._confirmer.declare()
        assert declaration is not None, "the seed is scored at set-up"
        return declaration

    def incumbent(self) -> Scored:
        """Return the best valid program so far."""
        stored = self._ledger.incumbent()
        assert stored is not None, "the seed is made incumbent at set-up"
        return Scored(
            program=self._ledger.program(stored.program_id), evaluation=self._ledger.evaluation(stored.evaluation_id)
        )

    def _turns(self, turns: range) -> bool:
        """Walk some turns that start from one incumbent; return whether a candidate was evaluated."""
        parent = self.incumbent()
        self._show_state(parent)
        drafts: list[_Drafted] = []
        ended: ProposerError | ProposerExhausted | None = None
        for turn in turns:
            try:
                accepted = self._propose(turn, parent)
            except (ProposerError, ProposerExhausted) as error:
                # What was drafted before is evaluated all the same.
                ended = error
                break
            if accepted is not None:
                drafts.append(_Drafted(turn=turn, program=accepted[0], proposal=accepted[1]))
        evaluations = list(self._desk.evaluate_all(self._candidate(draft) for draft in drafts))
        for draft, evaluation in zip(drafts, evaluations, strict=True):
            self._judge(draft, parent, evaluation)
        if ended is not None:
            raise ended
        return bool(drafts)

    def _candidate(self, draft: _Drafted) -> Call:
        claims = "; ".join(f"{claim.name} through {claim.cause}" for claim in draft.proposal.mechanisms)
        return Call(
            program=draft.program,
            kind="candidate",
            seed=self._recipe.campaign.seed,
            turn=draft.turn,
            why=claims or "a plain edit",
        )

    def _propose(self, turn: int, incumbent: Scored) -> tuple[Program, ProposalReply] | None:
        """Ask for a candidate, with one repair; return it stored and screened, or None when it was refused twice."""
        problems: tuple[str, ...] = ()
        previous = ""
        for attempt in (0, 1):
            rules = self._rules(incumbent)
            reply = self._interview.proposal(turn, attempt, incumbent, self._desk, rules, problems, previous)
            draft: Draft | None = None
            program: Program | None = None
            try:
                draft = read_draft(reply, rules)
                check_retests(draft, rules, self._controls_run())
                program = self._screener.store(
                    draft.source,
                    origin="candidate",
                    title=" + ".join(claim.name for claim in draft.proposal.mechanisms) or f"turn {turn}",
                    parent=incumbent.program,
                )
                self._screener.run_draft(draft, program, rules)
            except Refusal as refusal:
                self._record(turn, attempt, draft, program, refusal, rules)
                self._progress.milestone(f"refused before any call ({refusal.stage}): {refusal.problems[0]}")
                problems, previous = refusal.problems, reply.text
                continue
            self._record(turn, attempt, draft, program, None, rules)
            return program, draft.proposal
        return None

    def _controls_run(self) -> frozenset[str]:
        """Return the hashes of the controls that were run so far."""
        ran = {evaluation.program_id for evaluation in self._ledger.evaluations(kind="control")}
        return frozenset(program.ast_hash for program in self._ledger.programs(origin="control") if program.id in ran)

    def _record(
        self,
        turn: int,
        attempt: int,
        draft: Draft | None,
        program: Program | None,
        refusal: Refusal | None,
        rules: Rules,
    ) -> None:
        proposal = draft.proposal if draft else refusal.proposal if refusal else None
        self._ledger.record_proposal(
            NewProposal(
                turn=turn,
                attempt=attempt,
                status="refused" if refusal else "accepted",
                llm_call_id=self._interview.last_call_id,
                program_id=program.id if program else None,
                stage=refusal.stage if refusal else "",
                reason="\n".join(refusal.problems) if refusal else "",
                claims=tuple({"mechanism": c.name, "cause": c.cause} for c in proposal.mechanisms) if proposal else (),
                discharges=proposal.discharges if proposal else (),
                body=to_proposal_body(draft, rules) if draft and not refusal else {},
            )
        )

    def _rules(self, incumbent: Scored) -> Rules:
        # What was refused may come back mended in its claims alone. A control that was written down but never run has been
        # tried by nobody; twins exist to be compared, not to be tried.
        taken = {evaluation.program_id for evaluation in self._ledger.evaluations()}
        taken |= {proposal.program_id for proposal in self._ledger.proposals(status="accepted")}
        tried = [p for p in self._ledger.programs() if p.origin == "seed" or p.id in taken]
        digests = {
            str(screening.evidence.get("smoke_digest"))
            for program in tried
            for screening in self._ledger.screenings(program_id=program.id)
            if screening.passed
        }
        return Rules(
            incumbent=incumbent.program.source,
            open_edits=self._board.open(program_source.mechanisms(incumbent.program.source)),
            barred=self._interview.barred(),
            earlier_ast_hashes=frozenset(program.ast_hash for program in tried),
            earlier_smoke_digests=frozenset(digests),
            allowed_class=self._recipe.campaign.contract_class,
        )

    def _judge(self, draft: _Drafted, parent: Scored, evaluation: Evaluation) -> None:
        """Retain a candidate by its score against the incumbent of this moment, and explain a clear effect on its parent."""
        turn, program, proposal = draft.turn, draft.program, draft.proposal
        result = scored(evaluation)
        records = {record.key: record for record in self._board.open()}
        addressed = [records[key] for key in proposal.discharges if key in records]
        if result is None:
            assert evaluation.result is not None
            self._progress.milestone(f"{program.title}: {evaluation.result.outcome}. {evaluation.result.reason}")
            self._discharger.check(turn, program, evaluation, parent, addressed)
            self._discharger.count_untested(turn, program, evaluation, addressed)
            return
        effect = effect_on(parent.result, result, self._noise)
        sigma = self._recipe.statistics.promotion_sigma
        surprising = effect.z <= -self._recipe.statistics.trigger_sigma and self._recipe.statistics.explain_losses
        is_clear = effect.z >= self._recipe.statistics.trigger_sigma or surprising
        shown = self._examine(draft, parent, evaluation, addressed, is_clear=is_clear)
        worse = is_loss(effect, promotion_sigma=sigma, noise_floor=self._noise.floor)
        executed = self._discharger.check(turn, program, evaluation, parent, addressed, shown=shown, worse=worse)
        incumbent = self.incumbent()
        retention = judge(
            effect_on(incumbent.result, result, self._noise),
            result,
            incumbent.result,
            promotion_sigma=sigma,
            noise_floor=self._noise.floor,
            allowed=self._recipe.campaign.contract_class,
            simplifies=any(record.edit.kind in SIMPLIFYING for record in executed),
        )
        self._retain(turn, program, evaluation, retention)
        child = Scored(program=program, evaluation=evaluation)
        if is_clear and self._is_executed(turn, shown):
            claims = tuple((claim.name, claim.cause) for claim in proposal.mechanisms if claim.name not in shown.idle)
            self._explainer.explain(turn, parent, child, claims, idle=shown.idle)
        self._discharger.count_untested(turn, program, evaluation, addressed)

    def _examine(
        self, draft: _Drafted, parent: Scored, evaluation: Evaluation, addressed: list[EditRecord], *, is_clear: bool
    ) -> Execution:
        """Return what the paid run shows of the mechanisms; nothing where no answer hangs on it."""
        probes = [record.edit.probe for record in addressed if record.edit.kind != "retest"]
        if not is_clear and not probes:
            return Execution()
        leaning_on = [claim.name for claim in draft.proposal.mechanisms]
        leaning_on += [name for probe in probes if (name := probe_mechanism(probe))]
        return self._screener.examine_paid(draft.program, evaluation, parent, turn=draft.turn, leaning_on=leaning_on)

    def _is_executed(self, turn: int, shown: Execution) -> bool:
        """Whether there is a mechanism to explain the effect by; says which ones did not execute."""
        reasons = [f"{name!r} is not executed: {why}" for name, why in shown.idle.items()]
        if shown.not_neutral:
            reasons = [f"the effect cannot be laid to {', '.join(map(repr, shown.mechanisms))}: {shown.not_neutral}"]
        for reason in reasons:
            self._ledger.add_note(NewNote(turn=turn, topic="execution", text=reason))
            self._progress.milestone(reason)
        return shown.is_explainable

    def _retain(self, turn: int, program: Program, evaluation: Evaluation, retention: Retention) -> None:
        if retention.promoted:
            self._ledger.set_incumbent(
                NewIncumbent(turn=turn, program_id=program.id, evaluation_id=evaluation.id, reason=retention.reason)
            )
            self._progress.milestone(f"new incumbent {program.id} ({program.title}): {retention.reason}")
        else:
            self._ledger.add_note(
                NewNote(turn=turn, topic="retain", text=f"{program.id} not promoted: {retention.reason}")
            )
            self._progress.milestone(f"{program.title} not promoted: {retention.reason}")

    def _show_state(self, incumbent: Scored) -> None:
        result = incumbent.result
        bits = f"{result.effective_bits:.2f} bits" if result.effective_bits is not None else ""
        self._progress.state(
            self._ledger.budget(),
            f"{incumbent.program.title} {incumbent.program.id}",
            f"{result.nll:.4f} nats/token, {bits}",
        )
