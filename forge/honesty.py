"""Honesty over a campaign: how often predictions held, where the calls went, what each verdict changed.

A prediction holds when the measured retained effect lies inside its interval. That is not the same as not being refuted: what
lies outside, but not beyond the noise, is counted apart. Rivals contradict each other by design, so of all predictions many must
miss; the ones that say how far a proposer can be trusted are those of hypotheses that survived, and of the cause that the
proposer had claimed itself when it proposed the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from scipy.special import betaincinv

from hypotheses.barred_claims import same_cause
from hypotheses.interval import Interval
from hypotheses.ledger import Hypothesis, LedgerReader, Observation, Proposal, RequiredEdit, Verdict

CONFIDENCE: Final = 0.95
WIDTH_BINS: Final = (0.0, 0.2, 0.4, 0.8, 2.0)
"""Edges of the calibration curve, in widths of registered intervals; the last one is the widest that is taken."""
Group = Literal["all", "surviving", "claimed"]
GROUPS: Final[tuple[Group, ...]] = ("all", "surviving", "claimed")


@dataclass(frozen=True, kw_only=True)
class Share:
    """So many of so many, with the exact binomial interval (Clopper and Pearson) at 95%; no interval of nothing."""

    count: int
    of: int
    low: float | None
    high: float | None

    @classmethod
    def counted(cls, count: int, of: int) -> Share:
        """Return the share with its interval."""
        if of == 0:
            return cls(count=0, of=0, low=None, high=None)
        tail = (1 - CONFIDENCE) / 2
        low = float(betaincinv(count, of - count + 1, tail)) if count > 0 else 0.0
        high = float(betaincinv(count + 1, of - count, 1 - tail)) if count < of else 1.0
        return cls(count=count, of=of, low=low, high=high)


@dataclass(frozen=True, kw_only=True)
class CalibrationBin:
    """Predictions whose registered width lies above `over`, up to `up_to`: how many held, and how far off they were.

    mean_half_width, mean_distance: of the intervals, and of what was measured from their middles. Intervals that are as wide as
    their author's knowledge is good hold, and are not much wider than the distance.
    """

    over: float
    up_to: float
    inside: Share
    mean_half_width: float
    mean_distance: float


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """How predictions of one group fared: inside + undecided + refuted of them were measured.

    undecided: measured outside the interval, but not beyond the noise. refuted: the prediction failed by the rule.
    """

    group: Group
    inside: Share
    undecided: int
    refuted: int
    bins: tuple[CalibrationBin, ...]


@dataclass(frozen=True, kw_only=True)
class Author:
    """One proposer or model, and how its predictions fared.

    hypotheses: by the status of their last verdict. coverage: of the groups in `GROUPS`.
    """

    name: str
    observations: int
    hypotheses: dict[str, int]
    coverage: tuple[Coverage, ...]


@dataclass(frozen=True, kw_only=True)
class SpentCalls:
    """Settled evaluator calls by what they were for. other: the last measurements of a campaign."""

    candidates: int
    confirmations: int
    controls: int
    other: int


@dataclass(frozen=True, kw_only=True)
class Consequence:
    """What one verdict changed afterwards.

    barred: its claim is barred from then on (`lifted` when a later verdict supported it). edits: (id, kind, how it stands).
    refused: replies refused because of its bar or its edits, as (turn, attempt). promoted: titles of programs that carried out
    one of its edits and became incumbent.
    """

    verdict: str
    observation: str
    mechanism: str
    cause: str
    status: str
    barred: bool
    lifted: bool
    edits: tuple[tuple[str, str, str], ...]
    refused: tuple[tuple[int, int], ...]
    promoted: tuple[str, ...]

    @property
    def is_nothing(self) -> bool:
        """Whether nothing followed."""
        return not (self.barred or self.edits or self.refused or self.promoted)


@dataclass(frozen=True, kw_only=True)
class Honesty:
    """The whole account."""

    authors: tuple[Author, ...]
    calls: SpentCalls
    consequences: tuple[Consequence, ...]


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """One prediction that was measured."""

    author: str
    predicted: Interval
    estimate: float
    failed: bool
    groups: frozenset[Group]


def account(ledger: LedgerReader) -> Honesty:
    """Return the account of a campaign from its ledger."""
    return Honesty(
        authors=tuple(_authors(ledger)),
        calls=_calls(ledger),
        consequences=tuple(_consequences(ledger)),
    )


def followed(row: Consequence) -> list[str]:
    """Return what followed from a verdict, one phrase each."""
    phrases = []
    if row.barred:
        phrases.append("barred, lifted later" if row.lifted else "barred")
    phrases += [f"{kind} {edit_id} {state}" for edit_id, kind, state in row.edits]
    if row.refused:
        turns = ", ".join(f"{turn}.{attempt}" for turn, attempt in row.refused)
        phrases.append(f"refused because of it: turn {turns}")
    phrases += [f"promoted because of it: {title}" for title in row.promoted]
    return phrases


def share(value: Share) -> str:
    """Return a share as people read it: counts, percent, interval."""
    if value.low is None or value.high is None:
        return "none measured"
    percent = f"{100 * value.count / value.of:.0f}%"
    return f"{value.count} of {value.of} ({percent}, {100 * value.low:.0f} to {100 * value.high:.0f}%)"


def calls_for_controls(ledger: LedgerReader, observation_id: str) -> int:
    """Return the settled calls of an observation's controls."""
    runs = ledger.evaluations(kind="control", observation_id=observation_id)
    return sum(evaluation.is_settled for evaluation in runs)


def _authors(ledger: LedgerReader) -> Iterable[Author]:
    checked: list[_Checked] = []
    observations: dict[str, int] = {}
    statuses: dict[str, dict[str, int]] = {}
    for observation in ledger.observations():
        hypotheses = ledger.hypotheses(observation.id)
        if not hypotheses:
            continue
        author = author_of(ledger, observation)
        observations[author] = observations.get(author, 0) + 1
        revised = {hypothesis.predecessor_id for hypothesis in hypotheses}
        last = {verdict.hypothesis_id: verdict for verdict in ledger.verdicts(observation.id)}
        for hypothesis in hypotheses:
            verdict = last.get(hypothesis.id)
            status = verdict.status if verdict is not None else "revised" if hypothesis.id in revised else "no verdict"
            counted = statuses.setdefault(author, {})
            counted[status] = counted.get(status, 0) + 1
            if verdict is not None:
                groups = _groups(ledger, observation, hypothesis, verdict)
                checked += _checks(ledger, hypothesis, verdict, author, groups)
    for name, num_observations in observations.items():
        mine = [check for check in checked if check.author == name]
        yield Author(
            name=name,
            observations=num_observations,
            hypotheses=dict(sorted(statuses[name].items())),
            coverage=tuple(_coverage(group, [check for check in mine if group in check.groups]) for group in GROUPS),
        )


def author_of(ledger: LedgerReader, observation: Observation) -> str:
    """Return the model that wrote the explanation of an observation, or the campaign's proposer where none is recorded."""
    calls = {call.id: call.model for call in ledger.llm_calls()}
    for proposal in ledger.proposals(turn=observation.turn, status="accepted"):
        if proposal.kind == "explanation" and proposal.llm_call_id in calls:
            return calls[proposal.llm_call_id]
    return ledger.campaign().proposer


def _groups(
    ledger: LedgerReader, observation: Observation, hypothesis: Hypothesis, verdict: Verdict
) -> frozenset[Group]:
    groups: set[Group] = {"all"}
    if verdict.status in ("supported", "inconclusive"):
        groups.add("surviving")
    for proposal in ledger.proposals(turn=observation.turn, status="accepted"):
        if proposal.kind != "candidate" or proposal.program_id != observation.program_id:
            continue
        if any(_is_claim(claim, hypothesis.mechanism, hypothesis.cause) for claim in proposal.claims):
            groups.add("claimed")
    return frozenset(groups)


def _is_claim(claim: dict[str, Any], mechanism: str, cause: str) -> bool:
    return claim.get("mechanism") == mechanism and same_cause(str(claim.get("cause"))) == same_cause(cause)


def _checks(
    ledger: LedgerReader, hypothesis: Hypothesis, verdict: Verdict, author: str, groups: frozenset[Group]
) -> Iterable[_Checked]:
    names = {control.id: control.name for control in ledger.controls(hypothesis.observation_id)}
    registered = {
        names[prediction.control_id]: Interval(low=prediction.low, high=prediction.high)
        for prediction in ledger.predictions(hypothesis.observation_id)
        if prediction.hypothesis_id == hypothesis.id
    }
    for check in verdict.evidence.get("verdict", {}).get("checks", ()):
        if check["estimate"] is not None and check["control"] in registered:
            yield _Checked(
                author=author,
                predicted=registered[check["control"]],
                estimate=float(check["estimate"]),
                failed=bool(check["failed"]),
                groups=groups,
            )


def _coverage(group: Group, checked: Sequence[_Checked]) -> Coverage:
    inside = [check for check in checked if check.predicted.contains(check.estimate)]
    refuted = sum(check.failed for check in checked)
    return Coverage(
        group=group,
        inside=Share.counted(len(inside), len(checked)),
        undecided=sum(not check.failed and not check.predicted.contains(check.estimate) for check in checked),
        refuted=refuted,
        bins=tuple(_bins(checked)),
    )


def _bins(checked: Sequence[_Checked]) -> Iterable[CalibrationBin]:
    for over, up_to in pairwise(WIDTH_BINS):
        # Widths are differences of what was written in decimals: 0.5 - 0.3 belongs to "up to 0.2".
        mine = [check for check in checked if _in_bin(round(check.predicted.width, 9), over, up_to)]
        if mine:
            yield CalibrationBin(
                over=over,
                up_to=up_to,
                inside=Share.counted(sum(check.predicted.contains(check.estimate) for check in mine), len(mine)),
                mean_half_width=sum(check.predicted.width for check in mine) / len(mine) / 2,
                mean_distance=sum(
                    abs(check.estimate - (check.predicted.low + check.predicted.high) / 2) for check in mine
                )
                / len(mine),
            )


def _in_bin(width: float, over: float, up_to: float) -> bool:
    return over < width <= up_to or (over == width == WIDTH_BINS[0])


def _calls(ledger: LedgerReader) -> SpentCalls:
    kinds = [evaluation.kind for evaluation in ledger.evaluations() if evaluation.is_settled]
    return SpentCalls(
        candidates=kinds.count("candidate"),
        confirmations=kinds.count("confirmation"),
        controls=kinds.count("control"),
        other=kinds.count("final"),
    )


def _consequences(ledger: LedgerReader) -> Iterable[Consequence]:
    hypotheses = {hypothesis.id: hypothesis for hypothesis in ledger.hypotheses()}
    verdicts = ledger.verdicts()
    edits = ledger.required_edits()
    refusals = [proposal for proposal in ledger.proposals(status="refused") if proposal.kind == "candidate"]
    promoted = {incumbent.program_id for incumbent in ledger.incumbents()}
    for verdict in verdicts:
        hypothesis = hypotheses[verdict.hypothesis_id]
        mine = [
            edit
            for edit in edits
            if edit.hypothesis_id == hypothesis.id
            and edit.seq > verdict.seq
            and verdict.round == _last_round(verdicts, verdict)
        ]
        barred = verdict.status == "refuted"
        yield Consequence(
            verdict=verdict.id,
            observation=verdict.observation_id,
            mechanism=hypothesis.mechanism,
            cause=hypothesis.cause,
            status=verdict.status,
            barred=barred,
            lifted=barred
            and any(_lifts(later, hypotheses, hypothesis) for later in verdicts if later.seq > verdict.seq),
            edits=tuple((edit.id, edit.kind, _standing(edit)) for edit in mine),
            refused=tuple(
                (proposal.turn, proposal.attempt)
                for proposal in refusals
                if proposal.seq > verdict.seq
                and ((barred and _leans_on(proposal, hypothesis)) or any(_names(proposal, edit) for edit in mine))
            ),
            promoted=tuple(
                ledger.program(state.program_id).title
                for edit in mine
                for state in edit.history
                if state.state == "discharged" and state.program_id in promoted and state.program_id is not None
            ),
        )


def _last_round(verdicts: Sequence[Verdict], verdict: Verdict) -> int:
    return max(other.round for other in verdicts if other.hypothesis_id == verdict.hypothesis_id)


def _lifts(later: Verdict, hypotheses: dict[str, Hypothesis], refuted: Hypothesis) -> bool:
    other = hypotheses[later.hypothesis_id]
    return (
        later.status == "supported"
        and other.mechanism == refuted.mechanism
        and same_cause(other.cause) == same_cause(refuted.cause)
    )


def _leans_on(proposal: Proposal, hypothesis: Hypothesis) -> bool:
    """Whether a reply was refused for claiming this again, under its own name or another one that the refusal tells."""
    if proposal.stage != "barred claim":
        return False
    return any(
        same_cause(str(claim.get("cause"))) == same_cause(hypothesis.cause)
        and (claim.get("mechanism") == hypothesis.mechanism or repr(hypothesis.mechanism) in proposal.reason)
        for claim in proposal.claims
    )


def _names(proposal: Proposal, edit: RequiredEdit) -> bool:
    return proposal.stage in ("required edit", "probe") and edit.id in proposal.reason


def _standing(edit: RequiredEdit) -> str:
    return "open" if edit.state in ("open", "attempted") else edit.state
