"""Named moments of a campaign at which a process can end itself, put around the product from outside.

Nothing in the product knows of them: `arm` wraps a function, or listens to what SQLAlchemy sends to SQLite, and sends the
signal just before or just after the wanted passage. The order of `POINTS` is the order in which a campaign meets them.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.engine.default import DefaultDialect

Matches = Callable[..., bool]
LEDGER = "hypotheses.ledger.ledger:Ledger."
ARTIFACT_SUFFIX = ".safetensors"


def always(*args: object, **kwargs: object) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A call of a function, `module:qualified.name`, whose arguments match."""

    target: str
    matches: Matches = always


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where a process ends itself.

    passage: a call; or the beginning of a statement that SQLite has executed in a transaction that is still open.
    when: before or after the call; ``sent``: after the COMMIT of the transaction with that statement.
    count: at which passage, counted from 1, in a process that walks the whole campaign or walks again over its beginning.
    since: passages before this one are not counted.
    setup: it lies before the first turn.
    """

    name: str
    passage: Passage | str
    when: Literal["before", "after", "inside", "sent"]
    count: int = 1
    since: Passage | None = None
    setup: bool = False


def reserves(kind: str) -> Passage:
    return Passage(target=f"{LEDGER}reserve_evaluation", matches=lambda ledger, new: new.kind == kind)


def ledger(name: str, matches: Matches = always) -> Passage:
    return Passage(target=LEDGER + name, matches=matches)


def noted(topic: str) -> Passage:
    return ledger("add_note", lambda ledger, note: note.topic == topic)


def replaces(prefix: str) -> Passage:
    return Passage(target="pathlib:Path.replace", matches=lambda path, target: path.name.startswith(prefix))


RUN_FOLDER = Passage(target="forge.run_folder:RunFolder.create")
NAMING = Passage(target="pathlib:Path.rename", matches=lambda path, target: path.name.startswith("."))
KEEPING = Passage(target="os:replace", matches=lambda source, target: str(target).endswith(ARTIFACT_SUFFIX))
SERVING = Passage(
    target="evaluators.session_server:SessionServer.dispatch", matches=lambda s, op, *rest: op == "install"
)
TRACE = Passage(target="evaluators.evaluator:Evaluator.trace")
EXPLAINED = ledger("record_llm_call", lambda ledger, call: "/explain/" in call.purpose)
PROVISIONAL = ledger("record_probe_result", lambda ledger, result: result.provisional)
PAID = ledger("record_probe_result", lambda ledger, result: not result.provisional and result.kind == "knockout")
SETTLES = "UPDATE evaluations"
CANDIDATE, CONFIRMATION, CONTROL = reserves("candidate"), reserves("confirmation"), reserves("control")

POINTS = (
    Point(name="run-folder-before", passage=RUN_FOLDER, when="before", setup=True),
    Point(name="ledger-inside", passage="CREATE TRIGGER", when="inside", count=9, setup=True),
    Point(name="run-folder-unnamed", passage=NAMING, when="before", setup=True),
    Point(name="run-folder-after", passage=RUN_FOLDER, when="after", setup=True),
    Point(name="artifact-half-written", passage=KEEPING, when="before", count=2, setup=True),
    Point(name="between-noise-draws", passage=reserves("setup"), when="before", count=4, setup=True),
    Point(name="set-up-over", passage=ledger("record_noise"), when="after", setup=True),
    Point(name="reply-before-record", passage=ledger("record_llm_call"), when="before", count=2),
    Point(name="reply-after-record", passage=ledger("record_llm_call"), when="after", count=1),
    Point(name="refusal-after-record", passage=ledger("record_proposal"), when="after", count=1),
    Point(name="smoke-before-record", passage=ledger("record_screening"), when="before", count=1),
    Point(name="smoke-after-record", passage=ledger("record_screening"), when="after", count=1),
    Point(name="proposal-after-record", passage=ledger("record_proposal"), when="after", count=2),
    Point(name="reserved-not-run", passage=CANDIDATE, when="after"),
    Point(name="program-running", passage=SERVING, when="after", count=5, since=CANDIDATE),
    Point(name="run-not-settled", passage=ledger("settle_evaluation"), when="before", since=CANDIDATE),
    Point(name="settle-inside-commit", passage=SETTLES, when="inside", since=CANDIDATE),
    Point(name="settle-commit-sent", passage=SETTLES, when="sent", since=CANDIDATE),
    Point(name="settled", passage=ledger("settle_evaluation"), when="after", since=CANDIDATE),
    Point(name="incumbent-before", passage=ledger("set_incumbent"), when="before", count=2),
    Point(name="incumbent-after", passage=ledger("set_incumbent"), when="after", count=2),
    Point(name="confirmation-before", passage=CONFIRMATION, when="before"),
    Point(name="confirmation-after", passage=ledger("settle_evaluation"), when="after", since=CONFIRMATION),
    Point(name="explanation-recorded", passage=EXPLAINED, when="after"),
    Point(name="registration-before", passage=ledger("register_explanation"), when="before"),
    Point(name="registration-inside", passage="INSERT INTO predictions", when="inside", count=3),
    Point(name="registration-after", passage=ledger("register_explanation"), when="after"),
    Point(name="between-controls", passage=CONTROL, when="before", count=2),
    Point(name="verdicts-before", passage=ledger("record_verdicts"), when="before"),
    Point(name="verdicts-inside", passage="INSERT INTO verdicts", when="inside", count=2),
    Point(name="verdicts-after", passage=ledger("record_verdicts"), when="after"),
    Point(name="edit-before", passage=ledger("add_required_edit"), when="before"),
    Point(name="edit-after", passage=ledger("add_required_edit"), when="after"),
    Point(name="probe-provisional-after", passage=PROVISIONAL, when="after"),
    Point(name="trace-running", passage=SERVING, when="after", count=5, since=TRACE),
    Point(name="trace-not-recorded", passage=TRACE, when="after"),
    Point(name="probe-before", passage=PAID, when="before"),
    Point(name="probe-after", passage=PAID, when="after"),
    Point(name="edit-discharged", passage=ledger("change_required_edit"), when="after"),
    Point(name="end-before", passage=noted("end"), when="before"),
    Point(name="end-after", passage=noted("end"), when="after"),
    Point(name="best-half-written", passage=replaces(".best.py"), when="before"),
    Point(name="report-half-written", passage=replaces(".report.md"), when="before"),
)
BY_NAME = {point.name: point for point in POINTS}


@dataclass
class _Trigger:
    """Counts passages and sends the signal at the wanted one."""

    count: int
    number: signal.Signals
    open: bool
    seen: int = field(default=0)

    def pass_by(self) -> None:
        if not self.open:
            return
        self.seen += 1
        if self.seen != self.count:
            return
        if self.number is signal.SIGINT:
            os.killpg(os.getpgrp(), self.number)  # as a terminal does: to everything in the foreground
        else:
            os.kill(os.getpid(), self.number)


def arm(point: Point, *, number: signal.Signals = signal.SIGKILL, count: int | None = None) -> None:
    """Make this process send itself a signal at a point."""
    trigger = _Trigger(count=count or point.count, number=number, open=point.since is None)
    if point.since is not None:
        _wrap(point.since, before=lambda: setattr(trigger, "open", True))
    if isinstance(point.passage, str):
        _listen(point.passage, trigger, sent=point.when == "sent")
    elif point.when == "before":
        _wrap(point.passage, before=trigger.pass_by)
    else:
        _wrap(point.passage, after=trigger.pass_by)


def _wrap(
    passage: Passage, *, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    module, _, path = passage.target.partition(":")
    *parents, name = path.split(".")
    owner: Any = functools.reduce(getattr, parents, importlib.import_module(module))
    function = getattr(owner, name)
    bound = isinstance(vars(owner).get(name), classmethod)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        matches = passage.matches(*args, **kwargs)
        if matches:
            before()
        result = function(*args, **kwargs)
        if matches:
            after()
        return result

    setattr(owner, name, staticmethod(wrapped) if bound else wrapped)


def _listen(statement: str, trigger: _Trigger, *, sent: bool) -> None:
    executed: list[bool] = []

    def after_execute(connection: Any, cursor: Any, text: str, *rest: Any) -> None:
        if text.startswith(statement):
            executed.append(True)
            if not sent:
                trigger.pass_by()

    event.listen(Engine, "after_cursor_execute", after_execute)
    if not sent:
        return
    commit = DefaultDialect.do_commit

    def do_commit(dialect: Any, connection: Any) -> None:
        commit(dialect, connection)
        if executed:
            executed.clear()
            trigger.pass_by()

    DefaultDialect.do_commit = do_commit  # type: ignore[method-assign]
