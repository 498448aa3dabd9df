"""What a running campaign tells the person who watches it: one interface, a live terminal view and a quiet one.

Everything goes to standard error; results go to standard output when the run ends. Text that a program or a model wrote is
shown as plain text on one line, never as markup, and its control characters are spelt out.
"""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forge.plain_text import first_line, one_line
from hypotheses.ledger import Budget, Evaluation, Program


class Progress(Protocol):
    """Events of a campaign, in the order they happen."""

    def say(self, message: str) -> None:
        """A step that costs no call."""

    def evaluating(self, program: Program, kind: str, split: str, draw: int, why: str) -> None:
        """A call begins."""

    def evaluated(self, program: Program, evaluation: Evaluation) -> None:
        """A call ended."""

    def replayed(self, evaluation: Evaluation) -> None:
        """A call of an earlier process was found in the ledger."""

    def spent(self, budget: Budget) -> None:
        """The budget after a call was reserved or settled."""

    def state(self, budget: Budget, incumbent: str, figures: str) -> None:
        """Where the campaign stands."""

    def milestone(self, message: str) -> None:
        """A promotion, an observation, a verdict, a required edit: worth a line that stays."""


class QuietProgress:
    """Says nothing."""

    def say(self, message: str) -> None: ...

    def evaluating(self, program: Program, kind: str, split: str, draw: int, why: str) -> None: ...

    def evaluated(self, program: Program, evaluation: Evaluation) -> None: ...

    def replayed(self, evaluation: Evaluation) -> None: ...

    def spent(self, budget: Budget) -> None: ...

    def state(self, budget: Budget, incumbent: str, figures: str) -> None: ...

    def milestone(self, message: str) -> None: ...


class TerminalProgress:
    """A live panel on a terminal, plain lines elsewhere: call n of N, incumbent, what is being tested and why, time left."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live: Live | None = None
        self._budget = Budget(total=0, used=0, reserved=0, num_setup=0)
        self._incumbent = ""
        self._figures = ""
        self._doing = "starting"
        self._began = time.monotonic()
        self._call_began = self._began
        self._call_seconds: list[float] = []
        self._num_replayed = 0

    def __enter__(self) -> TerminalProgress:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, message: str) -> None:
        self._doing = message
        if self._live is None:
            self._line(message, style="dim")

    def evaluating(self, program: Program, kind: str, split: str, draw: int, why: str) -> None:
        if self._num_replayed:
            self._line(
                f"{self._stamp()} caught up: {self._num_replayed} evaluations were found in the ledger", style="bold"
            )
            # The pace of the calls to come is not that of reading the ledger.
            self._began, self._num_replayed = time.monotonic(), 0
        self._call_began = time.monotonic()
        reason = f": {why}" if why else ""
        self.say(f"{kind} {program.id} ({program.title or 'untitled'}) on {split}, calibration draw {draw}{reason}")

    def evaluated(self, program: Program, evaluation: Evaluation) -> None:
        self._call_seconds.append(time.monotonic() - self._call_began)
        result = evaluation.result
        if result is None:
            return
        if result.is_scored and result.effective_bits is not None:
            outcome = f"{result.nll:.4f} nats/token, {result.effective_bits:.2f} bits ({result.contract_class})"
        else:
            outcome = f"{result.outcome}: {first_line(result.reason)}"
        self._line(f"{self._stamp()} {evaluation.kind:<12} {program.title or program.id:<34} {outcome}")

    def replayed(self, evaluation: Evaluation) -> None:
        self._num_replayed += 1
        self._doing = f"found {evaluation.kind} {evaluation.id} in the ledger"

    def spent(self, budget: Budget) -> None:
        self._budget = budget

    def state(self, budget: Budget, incumbent: str, figures: str) -> None:
        self._budget, self._incumbent, self._figures = budget, incumbent, figures

    def milestone(self, message: str) -> None:
        self._line(f"{self._stamp()} {message}", style="bold")

    def _stamp(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        return f"{minutes:02d}:{seconds:02d} [{self._budget.used}/{self._budget.total}]"

    def _line(self, message: str, style: str = "") -> None:
        self._console.print(Text(one_line(message), style=style), soft_wrap=True)

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        table.add_row(
            Text("calls"), ProgressBar(total=max(1, self._budget.total), completed=self._budget.used, width=40)
        )
        table.add_row(Text(""), Text(f"{self._budget.used} of {self._budget.total} used, {self._left()}"))
        table.add_row(Text("incumbent"), Text(one_line(f"{self._incumbent}  {self._figures}")))
        table.add_row(Text("now"), Text(one_line(self._doing)))
        return Group(table)

    def _left(self) -> str:
        if not self._call_seconds:
            return "time left unknown"
        # Screening, smoke runs and error maps lie between the calls: the pace counts them too.
        pace = (time.monotonic() - self._began) / max(1, len(self._call_seconds))
        minutes, seconds = divmod(int(pace * self._budget.free), 60)
        return f"about {minutes} min {seconds:02d} s left"
