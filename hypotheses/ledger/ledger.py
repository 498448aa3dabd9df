"""The ledger of one campaign: everything that was proposed, measured, claimed, predicted and decided.

**Writing is idempotent.** Each record has a natural key. Writing the same content again returns the stored record;
other content under the same key is a `LedgerConflict`. So a campaign resumes by running again from its first step.

**A writer reads as of its position**, the last event that it has written or met again. A campaign that replays
therefore sees the budget, the incumbent and the open edits exactly as they were at that step the first time. A `Ledger`
opened read-only, and a writer that has met every event, see everything. The methods called `find_*`, and
`reserve_evaluation`, look up work by its key wherever the position is, so that nothing that was measured or answered is
asked for again.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from hypotheses.ledger import claims, evaluations, explanations, models, records, schema, spending, tables
from hypotheses.ledger.database import Database
from hypotheses.ledger.errors import LedgerConflict, LedgerSchemaError, LedgerStorageError
from hypotheses.ledger.evidence import clean_text, fit_evidence
from hypotheses.ledger.file_systems import require_local, warn_of_network
from hypotheses.ledger.lock import RunLock, boot_id
from hypotheses.ledger.reader import LedgerReader
from hypotheses.ledger.tables import fields_of
from hypotheses.ledger.transaction import END, Transaction, keep_if_long, text_of


class Ledger(LedgerReader):
    """One open ledger. Made by `create` or `open`; a context manager.

    **Threads.** Any method may be called from any thread. Writes queue, each is one short transaction; reads run beside
    them, each on one snapshot. What a thread wrote or met, it and all that it tells about it see from then on: the
    position is one for the opening and only grows. So several threads may each go on reserving, running and settling
    evaluations, and the budget is exact. A lease belongs to the opening and not to a thread: a key that one thread holds
    is `EvaluationInProgress` for all others until it is settled or released, by whichever thread. A thread that ends
    without either leaves the call reserved until the ledger is opened again. While several threads replay, one may see
    what another has met ahead of it; what must be the same in every replay is decided by one thread. `close` waits for
    the write in progress and refuses every later call.

    Every method may raise `LedgerStorageError` or `LedgerBusy`; every writer `LedgerConflict` (other content under the
    same key), `LedgerNotFound` (names a record that does not exist), `LedgerRefused` (a rule forbids it) and
    `LedgerValueError` (NaN, infinity, a text above 1 MiB). A failed write stores nothing.
    """

    def __init__(self, database: Database, lock: RunLock | None) -> None:
        super().__init__(database, position=END if lock is None else 0)
        self._lock = lock
        self._owner = evaluations.Owner(token=uuid.uuid4().hex, pid=os.getpid(), boot_id=boot_id())

    @classmethod
    def create(cls, path: Path | str, campaign: records.NewCampaign) -> Self:
        """Make a new ledger with its campaign, and open it for writing; a failed or killed creation makes none.

        Raises:
            LedgerConflict: a ledger is there already.
            LedgerBusy: another process writes to it.
            LedgerSchemaError: some other file is there.
            LedgerStorageError: no such folder, or one on a network file system.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise LedgerStorageError(f"the folder {str(path.parent)!r} does not exist; make it first")
        require_local(path)
        lock = RunLock(path)
        try:
            if path.exists() and schema.version_of(path) > 0:
                raise LedgerConflict(f"there is a ledger at {str(path)!r} already; resume it, or choose another folder")
        except BaseException:
            lock.release()
            raise
        ledger = cls(Database(path, read_only=False), lock)
        try:
            with ledger._write() as tx:
                schema.create(tx.session.connection())
                tx.insert(tables.CAMPAIGN, fields_of(campaign))
        except BaseException:
            ledger._database.close()
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            lock.release()
            raise
        return ledger

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False) -> Self:
        """Open a ledger: to go on with the campaign (one process at a time), or to read it beside the writer.

        Raises:
            LedgerNotFound: no file.
            LedgerBusy: another process writes to it.
            LedgerSchemaError: no ledger, of a newer schema, or (read-only) of an older one, which a writer migrates.
            LedgerStorageError: it lies on a network file system; a reader only logs a warning.
        """
        path = Path(path)
        version = schema.version_of(path)
        if read_only:
            warn_of_network(path)
        else:
            require_local(path)
        if version == 0:
            raise LedgerSchemaError(f"{str(path)!r} is empty: its creation was interrupted; start the run again")
        if read_only:
            if version < schema.SCHEMA_VERSION:
                raise LedgerSchemaError(f"{str(path)!r} has the older schema {version}; resume it once to migrate it")
            return cls(Database(path, read_only=True), None)
        lock = RunLock(path)
        try:
            schema.migrate(path)
            ledger = cls(Database(path, read_only=False), lock)
            with ledger._read(as_of=END) as tx:
                ledger._move(tx.row(tables.CAMPAIGN, ledger._campaign_id(tx)).seq)
        except BaseException:
            lock.release()
            raise
        return ledger

    def close(self) -> None:
        """Close connections and give the run lock back; harmless when done twice."""
        self._database.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_read_only(self) -> bool:
        """Whether this ledger was opened for reading."""
        return self._lock is None

    # Writers

    def record_environment(self, *, device: str, versions: records.Json, details: records.Json | None = None) -> None:
        """Record where this process runs; once for each opening. Not part of the content hash."""
        with self._write() as tx:
            tx.session.add(
                models.Environment(
                    pid=self._owner.pid,
                    boot_id=self._owner.boot_id,
                    device=device,
                    versions=versions,
                    details=details or {},
                    at=datetime.now(UTC),
                )
            )

    def add_program(self, program: records.NewProgram) -> records.Program:
        """Store a program; its parent must be stored."""
        return self._add(tables.PROGRAMS, program)

    def record_llm_call(self, call: records.NewLlmCall) -> records.LlmCall:
        """Store a reply under its purpose, for a replay to find."""
        return self._add(tables.LLM_CALLS, call)

    def record_llm_failure(
        self,
        purpose: str,
        *,
        model: str,
        error: str,
        tokens_in: int | None = None,
        tokens_out: int | None = None,
        cost: float | None = None,
    ) -> None:
        """Store a call that gave no reply. Each one is kept and counted; none is replayed or hashed."""
        with self._write() as tx:
            spending.add_failure(
                tx, purpose=purpose, model=model, error=error, tokens_in=tokens_in, tokens_out=tokens_out, cost=cost
            )

    def record_proposal(self, proposal: records.NewProposal) -> records.Proposal:
        """Store what became of one reply."""
        return self._add(tables.PROPOSALS, proposal)

    def record_screening(self, screening: records.NewScreening) -> records.Screening:
        """Store a smoke run with its provisional checks."""
        fit = {
            "evidence": fit_evidence(screening.evidence),
            "reason": clean_text(screening.reason)[: evaluations.MAX_REASON_CHARACTERS],
        }
        return self._insert(tables.SCREENINGS, fields_of(screening) | fit)

    def reserve_evaluation(self, evaluation: records.NewEvaluation) -> records.Evaluation:
        """Reserve one evaluator call, in the transaction that creates its row.

        Returns the settled evaluation when it was settled before: check `is_settled` and do not run it again. One that
        a dead process left reserved, or that was released, comes back reserved with the next `attempt`, at no charge.

        Raises:
            BudgetExhausted: nothing is free. Never for ``setup`` evaluations, nor for a key reserved before.
            EvaluationInProgress: this process holds it already.
            LedgerRefused: a control without registered predictions, or with another program than registered.
        """
        with self._write() as tx:
            return evaluations.reserve(tx, evaluation, self._owner)

    def settle_evaluation(self, evaluation_id: str, result: records.Settlement) -> records.Evaluation:
        """Store the result of an evaluation that this process reserved.

        The same result again changes nothing; log tail, wall time, device and versions are not compared. What a
        program can make long or odd is cut and cleaned and never refused: the log keeps its last 16 Ki characters, for
        evidence see `evidence.fit_evidence`.

        Raises:
            LedgerConflict: settled before with another result.
            LedgerRefused: not reserved by this process.
            LedgerValueError: scored without losses, failed with losses, or a number that is not finite.
        """
        content = evaluations.fit_result(evaluation_id, result)
        self._keep_long_texts(tables.EVALUATIONS, content)
        with self._write() as tx:
            return evaluations.settle(tx, evaluation_id, content, self._owner, nll=result.nll)

    def release_evaluation(self, evaluation_id: str, *, reason: str) -> records.Evaluation:
        """Give back an evaluation after a failure of the host; reserving it again is no charge."""
        with self._write() as tx:
            return evaluations.release(tx, evaluation_id, self._owner, reason)

    def record_noise(self, noise: records.NewNoise) -> records.Noise:
        """Store the noise floor."""
        return self._add(tables.NOISE, noise)

    def record_error_map(self, error_map: records.NewErrorMap) -> records.ErrorMap:
        """Store the error map of an artifact."""
        return self._add(tables.ERROR_MAPS, error_map)

    def set_incumbent(self, incumbent: records.NewIncumbent) -> records.Incumbent:
        """Append a promotion."""
        return self._add(tables.INCUMBENTS, incumbent)

    def add_observation(self, observation: claims.NewObservation) -> claims.Observation:
        """Store a confirmed difference."""
        return self._add(tables.OBSERVATIONS, observation)

    def register_explanation(
        self,
        observation_id: str,
        *,
        hypotheses: Sequence[claims.NewHypothesis],
        controls: Sequence[claims.NewControl],
        predictions: Sequence[claims.NewPrediction],
        design: claims.NewDesign,
        round: int = 0,
    ) -> claims.Registration:
        """Register rivals, controls, one prediction for every pair, and the design: all in one transaction, or nothing.

        A later `round` may add controls, and hypotheses that each name the one that they revise, which stands no longer. Its
        predictions name hypotheses of any round so far; each new control needs one from every hypothesis that stands.

        Raises:
            LedgerRefused: fewer than two rivals, a pair without its prediction, a repeated name, a reversed interval,
                a later hypothesis without a predecessor, or a prediction for a control that was evaluated already.
        """
        with self._write() as tx:
            return explanations.register(
                tx,
                observation_id,
                hypotheses=hypotheses,
                controls=controls,
                predictions=predictions,
                design=design,
                round=round,
            )

    def record_verdicts(self, verdicts: Sequence[claims.NewVerdict]) -> tuple[claims.Verdict, ...]:
        """Append verdicts, all in one transaction."""
        with self._write() as tx:
            return explanations.add_verdicts(tx, verdicts)

    def add_required_edit(
        self,
        edit: claims.NewRequiredEdit,
        *,
        state: str = "open",
        reason: str = "",
        supersedes: Sequence[str] = (),
    ) -> claims.RequiredEdit:
        """Store a required edit with its first state, and close those (by id) that it supersedes, as one step."""
        with self._write() as tx:
            return explanations.add_edit(tx, edit, state=state, reason=reason, supersedes=supersedes)

    def change_required_edit(
        self,
        edit_id: str,
        state: str,
        *,
        turn: int,
        reason: str,
        program_id: str | None = None,
        body: records.Json | None = None,
    ) -> claims.RequiredEditState:
        """Append a state to the history of a required edit; at most once for each state, turn and program."""
        with self._write() as tx:
            return explanations.change_edit(
                tx, edit_id, state, turn=turn, reason=reason, program_id=program_id, body=body or {}
            )

    def record_probe_result(self, result: claims.NewProbeResult) -> claims.ProbeResult:
        """Store what a probe of a required edit or of a control found."""
        return self._add(tables.PROBE_RESULTS, result)

    def add_note(self, note: records.NewNote) -> records.Note:
        """Store a sentence for readers."""
        return self._add(tables.NOTES, note)

    # Work found again by its key, wherever the position is

    def find_llm_call(self, purpose: str, *, prompt: str) -> records.LlmCall | None:
        """Return the reply recorded for this purpose.

        Raises:
            LedgerConflict: it was recorded for another prompt, so the campaign does not replay what it did.
        """
        with self._read(as_of=END, moves=True) as tx:
            call = tx.find(tables.LLM_CALLS, purpose)
        if call is not None and call.prompt != prompt:
            raise LedgerConflict(
                f"the reply for {purpose!r} was recorded for another prompt; the replay took another way"
            )
        return call

    def find_screening(self, program_id: str, proposal_id: str | None = None) -> records.Screening | None:
        """Return the screening of this program for this proposal."""
        with self._read(as_of=END, moves=True) as tx:
            return tx.find(tables.SCREENINGS, program_id, proposal_id)

    def find_error_map(self, artifact_hash: str) -> records.ErrorMap | None:
        """Return the error map of an artifact."""
        with self._read(as_of=END, moves=True) as tx:
            return tx.find(tables.ERROR_MAPS, artifact_hash)

    def find_noise(self, program_id: str, split: str) -> records.Noise | None:
        """Return the noise floor measured with this program."""
        with self._read(as_of=END, moves=True) as tx:
            return tx.find(tables.NOISE, program_id, split)

    def _add(self, table: tables.Table[tables.R], record: object) -> tables.R:
        return self._insert(table, fields_of(record))

    def _insert(self, table: tables.Table[tables.R], content: records.Json) -> tables.R:
        self._keep_long_texts(table, content)
        with self._write() as tx:
            return tx.insert(table, content)

    def _keep_long_texts(self, table: tables.Table[tables.R], content: records.Json) -> None:
        """Write the files of long texts before the transaction, which then finds them: other threads need not wait."""
        for name in (*table.texts, *table.jsons):
            keep_if_long(self._database.files, text_of(table, name, content[name]), name=f"{table.event}.{name}")

    @contextmanager
    def _write(self) -> Iterator[Transaction]:
        with self._database.write(as_of=self._position) as tx:
            yield tx
        self._move(tx.touched)
