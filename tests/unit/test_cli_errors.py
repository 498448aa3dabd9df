"""Whose mistake it is decides the exit code; what is told is one message without control characters or traceback."""

from __future__ import annotations

import os
import signal

import pytest
import typer

from evaluators.errors import CorpusError, HostError, SandboxUnavailableError, SubjectError
from forge.cli.errors import told_in_one_sentence
from forge.errors import ProposerError, RecipeError
from forge.run_folder import RunFolderError
from hypotheses.ledger.errors import LedgerBusy, LedgerStorageError

FULL = "the host failed: No space left on device"
MEND = "mend that and resume, nothing recorded so far is lost"


def noted(error: BaseException, note: str) -> BaseException:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (RecipeError("no such key"), 2, "quantforge: no such key\n"),
        (RunFolderError("it exists"), 2, "quantforge: it exists\n"),
        (ProposerError("no key"), 2, "quantforge: no key\n"),
        (SubjectError("no model"), 2, "quantforge: no model\n"),
        (CorpusError("too short"), 2, "quantforge: too short\n"),
        (SandboxUnavailableError("no bwrap"), 2, "quantforge: no bwrap\n"),
        (LedgerBusy("in use"), 2, "quantforge: in use\n"),
        (LedgerStorageError("the disk is full"), 1, "quantforge: the host failed: the disk is full\n"),
        (OSError(28, "No space left on device", "/run/x"), 1, f"quantforge: {FULL} (/run/x); {MEND}\n"),
        (OSError(28, "No space left on device"), 1, f"quantforge: {FULL}; {MEND}\n"),
        (HostError("no memory"), 1, "quantforge: the host failed: no memory\n"),
        (KeyboardInterrupt(), 130, "quantforge: interrupted\n"),
        (
            noted(KeyboardInterrupt(), "`quantforge resume r` goes on"),
            130,
            "quantforge: interrupted; `quantforge resume r` goes on\n",
        ),
        (noted(HostError("no disk"), "go on"), 1, "quantforge: the host failed: no disk; go on\n"),
        (RecipeError("a\nb \x1b[2J\udc80"), 2, "quantforge: a\nb \\x1b[2J\\udc80\n"),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as info, told_in_one_sentence():
        raise error
    assert info.value.exit_code == code
    assert capsys.readouterr() == ("", told)


def test_sigterm_walks_the_same_way_out_as_an_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("the signal raised nothing")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # an impatient second one must not disturb the way out
            cleaned.append(True)

    with pytest.raises(typer.Exit) as info, told_in_one_sentence():
        work()
    assert cleaned
    assert info.value.exit_code == 143
    assert capsys.readouterr() == ("", "quantforge: terminated\n")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("error", [ZeroDivisionError(), FileNotFoundError(2, "No such file"), OSError("no number")])
def test_a_mistake_of_ours_is_not_hidden(error: Exception) -> None:
    with pytest.raises(type(error)), told_in_one_sentence():
        raise error
