"""Run every case through the real screening and the real sandbox, and write down what each check said.

A case is screened as a candidate of a campaign would be, and then run on the whole subject whatever screening said, to see
what the probes of a paid run would answer. Nothing here is scored but the seed, so no verdict can come of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from evaluators.corpora import load_corpus
from evaluators.subjects import load_subject
from forge.desk import Call, Desk
from forge.edits import apply_edits
from forge.errors import ForgeError
from forge.evasions.cases import CASES, INSTALLED, Case
from forge.execution import Execution
from forge.launch import campaign_record, make_isolation, open_evaluators
from forge.program_files import read_program
from forge.program_identity import ast_hash
from forge.progress import QuietProgress
from forge.proposers.base import Reply
from forge.recipe import parse_recipe
from forge.replies import MechanismClaim, ProposalReply
from forge.reply_writing import write_proposal
from forge.scored import Scored
from forge.screening import Refusal, Rules, Screener, check_source, read_draft
from hypotheses.ledger import Evaluation, Ledger, NewProposal, Program
from hypotheses.probes import Probe, check_probe, probe_mechanism

RECIPE: Final[dict[str, Any]] = {
    "campaign": {"name": "probes", "seed": 12, "budget_calls": 1, "contract_class": "corrected"},
    "subject": {"reference": "nano-llama"},
    "corpus": {
        "kind": "sampled", "calibration": 4, "gate": 1, "search": 2, "confirm": 2, "sequence_length": 64,
    },
    "evaluation": {"calibration_chunks": 2},
}  # fmt: skip
"""The probes look at what is installed and not at losses, so a little text is enough."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was said of one case.

    screening: ``accepted``, or the stage that refused it with its reason.
    knockout, call, artifact: answers of probes on the whole subject; empty where there is no program to run.
    why: what the knock-out showed. explained: mechanisms that hypotheses about an effect of it could be about; of the others
    no verdict can come, so none of them is ever refuted.
    reads: ``executed``, ``not executed`` or ``refused``: what becomes of it in a campaign.
    """

    key: str
    what: str
    is_sound: bool
    screening: str
    knockout: str = ""
    call: str = ""
    artifact: str = ""
    why: str = ""
    explained: tuple[str, ...] = ()
    reads: str

    @property
    def is_right(self) -> bool:
        """Whether the sound reads as executed, and nothing else does."""
        return (self.reads == "executed") == self.is_sound

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"is_right": self.is_right}


def probe_rows(
    cases: Iterable[Case] = CASES, *, told: Callable[[Iterable[Case]], Iterable[Case]] = iter
) -> Iterator[Row]:
    """Yield a row for each case as it is done.

    Raises:
        SandboxUnavailableError: this host cannot isolate.
    """
    recipe = parse_recipe(RECIPE)
    subject = load_subject(recipe.subject.reference)
    corpus = load_corpus(recipe.corpus, subject)
    isolation = make_isolation(recipe)
    with tempfile.TemporaryDirectory(prefix="quantforge-probes-") as folder:
        campaign = campaign_record(recipe, subject, corpus, "cases", isolation)
        with (
            Ledger.create(Path(folder) / "ledger.sqlite", campaign) as ledger,
            open_evaluators(recipe, subject, corpus, isolation, Path(folder) / "artifacts") as evaluators,
        ):
            bench = _Bench(ledger, Desk(ledger, evaluators, QuietProgress()), recipe.campaign.seed)
            for turn, case in enumerate(told(cases), start=1):
                yield bench.row(turn, case)


class _Bench:
    """One seed program, scored, and cases tried on it."""

    def __init__(self, ledger: Ledger, desk: Desk, seed: int) -> None:
        self._ledger = ledger
        self._desk = desk
        self._seed = seed
        self._screener = Screener(ledger, desk, seed)
        program = self._screener.store(read_program("rtn"), origin="seed", title="rtn", parent=None)
        evaluation = desk.evaluate(Call(program=program, kind="setup", seed=seed))
        self._parent = Scored(program=program, evaluation=evaluation)
        _, _, evidence = self._screener.smoke(program, allowed_class="corrected")
        self._rules = Rules(
            incumbent=program.source,
            open_edits=(),
            barred=frozenset(),
            earlier_ast_hashes=frozenset({ast_hash(program.source)}),
            earlier_smoke_digests=frozenset({str(evidence["smoke_digest"])}),
            allowed_class="corrected",
        )

    def row(self, turn: int, case: Case) -> Row:
        screening = self._screen(case)
        row = Row(key=case.key, what=case.what, is_sound=case.is_sound, screening=screening, reads="refused")
        program = self._program(case)
        if program is None:
            return row
        self._ledger.record_proposal(
            NewProposal(turn=turn, attempt=0, kind="candidate", status="accepted", program_id=program.id)
        )
        paid = self._parent.evaluation
        shown = self._screener.examine_paid(program, paid, self._parent, turn=turn, leaning_on=case.claims)
        knockout = self._answer(turn, case.knockout, program, paid, shown)
        call = self._answer(turn, INSTALLED, program, paid, shown)
        artifact = self._answer(turn, case.artifact, program, paid, shown)
        reads = "refused" if screening != "accepted" else "executed" if knockout[0] == "executed" else "not executed"
        return replace(
            row,
            knockout=knockout[0],
            call=call[0],
            artifact=artifact[0],
            why=knockout[1],
            explained=shown.acting,
            reads=reads,
        )

    def _screen(self, case: Case) -> str:
        reply = ProposalReply(
            analysis="a case of the table",
            mechanisms=tuple(MechanismClaim(name=name, cause="claimed", statement=case.what) for name in case.claims),
            discharges=(),
            edits=case.edits,
        )
        try:
            draft = read_draft(Reply(text=write_proposal(reply), model="cases"), self._rules)
            program = self._screener.store(
                draft.source, origin="candidate", title=case.key, parent=self._parent.program
            )
            self._screener.run_draft(draft, program, self._rules)
        except Refusal as refusal:
            return f"refused ({refusal.stage}): {refusal.problems[0]}"
        return "accepted"

    def _program(self, case: Case) -> Program | None:
        """Return the program of a case that can be run and claims something, also when screening refused it."""
        try:
            source = apply_edits(self._rules.incumbent, case.edits)
            check_source(source)
        except (ForgeError, Refusal):
            return None
        if not case.claims:
            return None
        return self._screener.store(source, origin="candidate", title=case.key, parent=self._parent.program)

    def _answer(self, turn: int, probe: Probe, program: Program, paid: Evaluation, shown: Execution) -> tuple[str, str]:
        own = self._screener.paid_evidence(program, paid, self._parent, turn=turn)
        if isinstance(own, str):
            return "undetermined", own
        name = probe_mechanism(probe)
        twin = self._screener.twin_program(program, (name,)) if name else None
        evidence = self._screener.paid_evidence(twin, paid, self._parent, turn=turn) if twin is not None else ""
        answer = check_probe(
            probe,
            own,
            knocked_out=None if isinstance(evidence, str) else evidence,
            not_neutral=shown.not_neutral or shown.idle.get(name or "", ""),
        )
        return answer.status.value.replace("_", " "), answer.detail
