"""Evaluators that score as they are told, for tests of what is done with scores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from evaluators.pool import EvaluatorPool
from evaluators.results import EvaluationResult, Evidence, Outcome, Split

Losses = Callable[[str, Split, int], tuple[float, ...] | Exception]


@dataclass
class Record:
    """What all evaluators of one pool saw: starts in order, and how many ran at a time."""

    starts: list[tuple[str, Split, int]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    aborted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class ToldEvaluator:
    """Chunk losses by source, split and draw; an exception is a failure of the host; no losses is a crash of the program."""

    def __init__(self, losses: Losses, record: Record, seconds: Callable[[str], float] = lambda source: 0.0) -> None:
        self._losses = losses
        self._seconds = seconds
        self.record = record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def abort(self) -> None:
        self.record.aborted += 1

    def evaluate(
        self, source: str, *, split: Split, draw: int = 0, seed: int = 0, reference_artifact: str | None = None
    ) -> EvaluationResult:
        record = self.record
        with record.lock:
            record.starts.append((source, split, draw))
            record.running += 1
            record.most = max(record.most, record.running)
        try:
            time.sleep(self._seconds(source))
            losses = self._losses(source, split, draw)
            if isinstance(losses, Exception):
                raise losses
            reference = self._losses(str(reference_artifact), split, 0) if reference_artifact and losses else ()
            assert not isinstance(reference, Exception)
        finally:
            with record.lock:
                record.running -= 1
        return EvaluationResult(
            outcome=Outcome.SCORED if losses else Outcome.CRASHED,
            reason="" if losses else "of its own",
            split=split,
            draw=draw,
            seed=seed,
            chunk_nll=losses,
            reference_chunk_nll=reference,
            contract_class="online" if losses else None,
            effective_bits=4.25 if losses else None,
            artifact_hash=source if losses else None,
            evidence=Evidence(),
        )

    def has_artifact(self, artifact_hash: str) -> bool:
        return True


def told_pool(
    losses: Losses, *, workers: int = 1, seconds: Callable[[str], float] = lambda source: 0.0
) -> tuple[EvaluatorPool, Record]:
    """Return a pool of told evaluators and what they see. The artifact of a program is named by its source."""
    record = Record()
    return EvaluatorPool(lambda: ToldEvaluator(losses, record, seconds), workers), record  # type: ignore[arg-type,return-value]
