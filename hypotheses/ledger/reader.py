"""Reading a ledger: frozen records in the order of events.

What a reader sees ends at its position: the end of the record for a `Ledger` opened read-only; for a writer the last
event that it has written or met again (see `hypotheses.ledger.ledger`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import func, select

from hypotheses.ledger import claims, evaluations, explanations, hashing, invariants, models, records, spending, tables
from hypotheses.ledger.database import Database
from hypotheses.ledger.transaction import END, Transaction


class LedgerReader:
    """The reading half of a `Ledger`. Methods may be called from several threads; each sees one snapshot."""

    def __init__(self, database: Database, *, position: int) -> None:
        self.path = database.path
        self._database = database
        self._position = position
        self._position_lock = threading.Lock()

    @property
    def position(self) -> int:
        """The last event that reads see."""
        return self._position

    def pin(self) -> None:
        """Let later reads end at the last event recorded now: several reads beside a writer then agree with each other."""
        with self._read(as_of=END) as tx, self._position_lock:
            self._position = min(self._position, tx.session.scalar(select(func.max(models.Event.seq))) or 0)

    def as_of(self, position: int) -> LedgerReader:
        """Return a reader that sees what was recorded up to an event; it lives as long as this one."""
        return LedgerReader(self._database, position=position)

    def campaign(self) -> records.Campaign:
        """Return the campaign."""
        with self._read(as_of=END) as tx:
            return tx.get(tables.CAMPAIGN, self._campaign_id(tx))

    def budget(self) -> records.Budget:
        """Count evaluator calls."""
        with self._read() as tx:
            return evaluations.budget(tx, as_of=tx.horizon)

    def llm_spend(self) -> records.LlmSpend:
        """Sum tokens and cost of all replies and failed calls, also of earlier processes, wherever the position is."""
        with self._read(as_of=END) as tx:
            return spending.total(tx)

    def environments(self) -> tuple[records.Environment, ...]:
        """Return every process that recorded its environment, in order."""
        with self._read(as_of=END) as tx:
            rows = tx.session.scalars(select(models.Environment).order_by(models.Environment.number))
            names = [name for name in records.Environment.__dataclass_fields__]
            return tuple(records.Environment(**{name: getattr(row, name) for name in names}) for row in rows)

    def program(self, program_id: str) -> records.Program:
        """Return one program."""
        with self._read() as tx:
            return tx.get(tables.PROGRAMS, program_id)

    def programs(
        self, *, origin: str | None = None, normalized_ast_hash: str | None = None
    ) -> tuple[records.Program, ...]:
        """Return programs in the order they came, optionally of one origin or of one normalized AST."""
        with self._read() as tx:
            return tx.all(tables.PROGRAMS, origin=origin, normalized_ast_hash=normalized_ast_hash)

    def llm_calls(self) -> tuple[records.LlmCall, ...]:
        """Return all replies."""
        with self._read() as tx:
            return tx.all(tables.LLM_CALLS)

    def proposals(self, *, turn: int | None = None, status: str | None = None) -> tuple[records.Proposal, ...]:
        """Return proposals, refused ones included."""
        with self._read() as tx:
            return tx.all(tables.PROPOSALS, turn=turn, status=status)

    def screenings(self, *, program_id: str | None = None) -> tuple[records.Screening, ...]:
        """Return screenings."""
        with self._read() as tx:
            return tx.all(tables.SCREENINGS, program_id=program_id)

    def evaluation(self, evaluation_id: str) -> records.Evaluation:
        """Return one evaluation."""
        with self._read() as tx:
            return evaluations.load(tx, tx.row(tables.EVALUATIONS, evaluation_id))

    def evaluations(
        self,
        *,
        program_id: str | None = None,
        kind: str | None = None,
        control_id: str | None = None,
        observation_id: str | None = None,
    ) -> tuple[records.Evaluation, ...]:
        """Return evaluations in the order they were reserved."""
        with self._read() as tx:
            rows = tx.rows(
                tables.EVALUATIONS,
                program_id=program_id,
                kind=kind,
                control_id=control_id,
                observation_id=observation_id,
            )
            return evaluations.load_all(tx, rows)

    def noise(self) -> tuple[records.Noise, ...]:
        """Return the noise floors."""
        with self._read() as tx:
            return tx.all(tables.NOISE)

    def error_maps(self) -> tuple[records.ErrorMap, ...]:
        """Return the error maps."""
        with self._read() as tx:
            return tx.all(tables.ERROR_MAPS)

    def incumbent(self) -> records.Incumbent | None:
        """Return the last promotion; None before the first."""
        history = self.incumbents()
        return history[-1] if history else None

    def incumbents(self) -> tuple[records.Incumbent, ...]:
        """Return all promotions."""
        with self._read() as tx:
            return tx.all(tables.INCUMBENTS)

    def observation(self, observation_id: str) -> claims.Observation:
        """Return one observation."""
        with self._read() as tx:
            return tx.get(tables.OBSERVATIONS, observation_id)

    def observations(self) -> tuple[claims.Observation, ...]:
        """Return all observations."""
        with self._read() as tx:
            return tx.all(tables.OBSERVATIONS)

    def hypotheses(self, observation_id: str | None = None) -> tuple[claims.Hypothesis, ...]:
        """Return registered hypotheses, of one observation or of all."""
        with self._read() as tx:
            return tx.all(tables.HYPOTHESES, observation_id=observation_id)

    def controls(self, observation_id: str | None = None) -> tuple[claims.Control, ...]:
        """Return registered controls, run or not."""
        with self._read() as tx:
            return tx.all(tables.CONTROLS, observation_id=observation_id)

    def predictions(
        self, observation_id: str | None = None, *, control_id: str | None = None
    ) -> tuple[claims.Prediction, ...]:
        """Return registered predictions."""
        with self._read() as tx:
            return tx.all(tables.PREDICTIONS, observation_id=observation_id, control_id=control_id)

    def designs(self, observation_id: str | None = None) -> tuple[claims.Design, ...]:
        """Return registered designs."""
        with self._read() as tx:
            return tx.all(tables.DESIGNS, observation_id=observation_id)

    def verdicts(
        self, observation_id: str | None = None, *, hypothesis_id: str | None = None, status: str | None = None
    ) -> tuple[claims.Verdict, ...]:
        """Return verdicts of all rounds; the newest of a hypothesis is its last."""
        with self._read() as tx:
            return tx.all(tables.VERDICTS, observation_id=observation_id, hypothesis_id=hypothesis_id, status=status)

    def required_edits(self, *, state: str | None = None) -> tuple[claims.RequiredEdit, ...]:
        """Return required edits with their history; `state` filters by the state now."""
        with self._read() as tx:
            edits = (explanations.load_edit(tx, row) for row in tx.rows(tables.REQUIRED_EDITS))
            return tuple(edit for edit in edits if state in (None, edit.state))

    def probe_results(
        self, *, target_id: str | None = None, program_id: str | None = None
    ) -> tuple[claims.ProbeResult, ...]:
        """Return findings of probes, provisional ones included."""
        with self._read() as tx:
            return tx.all(tables.PROBE_RESULTS, target_id=target_id, program_id=program_id)

    def notes(self) -> tuple[records.Note, ...]:
        """Return all notes."""
        with self._read() as tx:
            return tx.all(tables.NOTES)

    def events(self, *, after: int = 0) -> tuple[records.Event, ...]:
        """Return all events after a place in the order, wherever the position is."""
        with self._read(as_of=END) as tx:
            rows = tx.session.scalars(select(models.Event).where(models.Event.seq > after).order_by(models.Event.seq))
            return tuple(records.Event(seq=row.seq, kind=row.kind, ref=row.ref, at=row.at) for row in rows)

    def num_unreplayed(self) -> int:
        """Count recorded events after the position: above 0 while a resumed campaign replays."""
        with self._read(as_of=END) as tx:
            statement = select(func.count()).select_from(models.Event).where(models.Event.seq > self._position)
            return tx.session.scalar(statement) or 0

    def content_hash(self) -> str:
        """Return the sha256 of everything recorded, apart from clock, host and order of arrival; see `hashing`."""
        with self._read(as_of=END) as tx:
            return hashing.content_hash(tx.session)

    def check_invariants(self) -> list[str]:
        """Check by SQL what must hold in every ledger; return one sentence for each violation."""
        with self._read(as_of=END) as tx:
            return invariants.violations(tx.session, tx.files)

    @contextmanager
    def _read(self, *, as_of: int | None = None, moves: bool = False) -> Iterator[Transaction]:
        with self._database.read(as_of=self._position if as_of is None else as_of) as tx:
            yield tx
        if moves:
            self._move(tx.touched)

    def _move(self, seq: int) -> None:
        with self._position_lock:
            self._position = max(self._position, seq)

    @staticmethod
    def _campaign_id(tx: Transaction) -> str:
        return tx.session.scalars(select(models.Campaign.id)).one()
