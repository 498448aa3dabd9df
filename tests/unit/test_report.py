"""Reports and terminals show what a program or a model wrote, and nothing it wrote can be more than text."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forge.cli.campaigns import print_summary
from forge.cli.showing import PARTS, show_run
from forge.progress import TerminalProgress
from forge.report import cell, number, percent, render_report
from forge.run_folder import RunFolder
from forge.summary import Summary, summarize
from hypotheses.ledger import (
    Budget,
    Ledger,
    NewHypothesis,
    NewIncumbent,
    NewNote,
    NewProbeResult,
    NewProposal,
    NewRequiredEdit,
    NewVerdict,
    Settlement,
)
from tests.ledger_builders import candidate, evaluate, new_campaign, new_program, observe, play, register, scored

HOSTILE = (
    "a | b ||\n\n# Heading\r\n| x | y |\n<script>alert(1)</script> <img src=x> [link](http://e.vil) ![i](j) "
    "`code` ``` *b* _i_ ~~s~~ \\ \x1b[2J\x1b]0;owned\x07\x1b[31m \x9b1m \x08\x08 \u202e \u2028 [bold]markup[/bold] &amp; "
)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2028\ud800-\udfff]")
OWN_CODES = re.compile(r"\x1b\[[0-9;]*m")


def write_hostile(ledger: Ledger) -> None:
    """Put the hostile text wherever a program or a model decides what stands."""
    seed = ledger.add_program(new_program(0, title=HOSTILE, source=f"# {HOSTILE!r}\nMECHANISMS = ()\n"))
    base = evaluate(ledger, candidate(seed, kind="setup"), scored(3.0, 3.5))
    ledger.set_incumbent(NewIncumbent(turn=0, program_id=seed.id, evaluation_id=base.id, reason=HOSTILE))
    observation = observe(ledger)
    registration = register(
        ledger,
        observation,
        hypotheses=(
            NewHypothesis(name="spreading", mechanism="rotation", cause=HOSTILE, statement=HOSTILE),
            NewHypothesis(name="averaging", mechanism=HOSTILE, cause="other", statement=HOSTILE),
        ),
    )
    ledger.record_verdicts(
        [
            NewVerdict(hypothesis_id=item.id, status="inconclusive", rule="verdict/1", reason=HOSTILE)
            for item in registration.hypotheses
        ]
    )
    edit = ledger.add_required_edit(
        NewRequiredEdit(
            observation_id=observation.id, kind="extend", mechanism=HOSTILE, cause="c", text=HOSTILE, turn=1
        )
    )
    ledger.record_probe_result(
        NewProbeResult(
            target_id=edit.id, program_id=seed.id, kind="call", status="executed", detail=HOSTILE, provisional=True
        )
    )
    ledger.record_proposal(NewProposal(turn=1, attempt=0, status="refused", stage="format", reason=HOSTILE))
    ledger.record_proposal(NewProposal(turn=1, attempt=1, status="refused", stage="format", reason="\n"))
    ledger.add_note(NewNote(turn=1, topic="control", text=HOSTILE))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    folder = RunFolder.create(tmp_path / "run", recipe_toml="", environment={})
    campaign = new_campaign(subject_name=HOSTILE, corpus_protocol=HOSTILE, proposer=HOSTILE)
    with Ledger.create(folder.ledger, campaign) as ledger:
        write_hostile(ledger)
        yield folder


@pytest.fixture
def hostile(folder: RunFolder) -> Summary:
    with Ledger.open(folder.ledger, read_only=True) as ledger:
        return summarize(ledger)


def unescaped_bars(line: str) -> int:
    return len(re.findall(r"(?<!\\)(?:\\\\)*\|", line))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b\n# c", r"a\|b \# c"),
        ("<b> & `x`", r"&lt;b&gt; &amp; \`x\`"),
        ("\\|", r"\\\|"),
        ("\x1b[2J", r"\\x1b\[2J"),
        ("[a](b)", r"\[a\](b)"),
        (12, "12"),
    ],
)
def test_a_cell_is_inert_text(text: object, shown: str) -> None:
    assert cell(text) == shown


@given(st.text(alphabet=st.characters()))
def test_a_cell_is_one_line_without_markup_whatever_it_holds(text: str) -> None:
    shown = cell(text)
    assert len(f"x{shown}x".splitlines()) == 1
    assert unescaped_bars(shown) == 0
    assert "<" not in shown
    assert not CONTROL.search(shown)


def test_numbers_and_shares_have_a_dash_for_none() -> None:
    assert (number(None, 2), number(1.005, 1), percent(None), percent(0.375)) == ("-", "1.0", "-", "37.5%")


def test_hostile_text_stays_inside_its_cell_of_the_report(hostile: Summary) -> None:
    report = render_report(replace(hostile, violations=(HOSTILE,)))
    assert not CONTROL.search(report)
    assert "<script" not in report
    assert "<img" not in report
    columns = 0
    for index, line in enumerate(report.splitlines()):
        if not line.startswith("|"):
            columns = 0
            continue
        found = unescaped_bars(line)
        columns = columns or found
        assert found == columns, f"line {index + 1} has {found} bars for {columns}: {line}"
    headings = [line for line in report.splitlines() if line.startswith("#")]
    assert [line.split(":")[0].rstrip() for line in headings] == [
        "# Campaign report",
        "## Observations",
        f"### {hostile.observations[0].id}",
        "## Required edits",
        "## Refused before any call",
        "## Honesty",
        "## Calls",
        "## Notes",
    ]


def test_a_plain_report_holds_what_was_found(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign()) as ledger:
        play(ledger)
        summary = summarize(ledger)
    report = render_report(summary)
    for words in (
        "| full precision | 2.0500 | 7.768 | - | - | 4.25 | online |",
        "| best: program 1 | 2.5000 |",
        "outlier\\_spreading (rotation)",
        "**refuted**",
        "0.00 to 0.20 | no evidence",
        "State: **discharged** in turn 2.",
        "turn 1, attempt 0, candidate: edits: no match",
        summary.content_hash,
    ):
        assert words in report, words
    assert "No improvement" not in report
    assert "Invariants violated" not in report


def test_a_report_of_a_campaign_that_has_only_begun(tmp_path: Path) -> None:
    with Ledger.create(tmp_path / "ledger.sqlite", new_campaign(sandbox="none")) as ledger:
        report = render_report(summarize(ledger))
    assert "No improvement over the seed was found" in report
    assert "treat every figure as self-reported" in report
    assert "not measured nats per token" in report


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=120, color_system="standard", legacy_windows=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def assert_harmless(console: Console, *, may_style: bool = True) -> str:
    text = printed(console)
    plain = OWN_CODES.sub("", text) if may_style else text
    assert not CONTROL.search(plain), repr(CONTROL.search(plain))
    return plain


def test_hostile_text_reaches_no_terminal_as_control_characters(hostile: Summary) -> None:
    console = terminal()
    print_summary(replace(hostile, violations=(HOSTILE,)), console)
    plain = assert_harmless(console)
    assert r"\x1b[2J" in plain
    assert "[bold]markup[/bold]" in plain, "markup of the terminal library is text as well"
    assert not re.search(r"^# Heading", plain, re.MULTILINE), "a text of foreign origin begins no line"


@pytest.mark.parametrize("what", PARTS)
def test_every_part_of_a_run_is_shown_harmlessly(folder: RunFolder, what: str) -> None:
    console = terminal()
    show_run(folder.root, what, console, None)
    assert_harmless(console)


def test_a_program_is_shown_harmlessly(folder: RunFolder) -> None:
    with Ledger.open(folder.ledger, read_only=True) as ledger:
        program = ledger.programs()[0]
    console = terminal()
    show_run(folder.root, program.id, console, None)
    assert_harmless(console)


def test_progress_lines_are_harmless(folder: RunFolder) -> None:
    with Ledger.open(folder.ledger, read_only=True) as ledger:
        program = ledger.programs()[0]
        evaluation = ledger.evaluations()[0]
    plain = Console(file=io.StringIO(), force_terminal=False, width=120)
    live = terminal()
    for console in (plain, live):
        with TerminalProgress(console) as progress:
            progress.state(Budget(total=4, used=1, reserved=0, num_setup=2), HOSTILE, HOSTILE)
            progress.say(HOSTILE)
            progress.evaluating(program, "candidate", "search", 0, HOSTILE)
            progress.evaluated(program, evaluation)
            crashed = Settlement(outcome="crashed", reason=HOSTILE)
            progress.evaluated(program, replace(evaluation, result=crashed))
            progress.evaluated(program, replace(evaluation, result=replace(crashed, reason="")))
            progress.milestone(HOSTILE)
            render = io.StringIO()
            Console(file=render, width=120, no_color=True).print(progress._render())
            assert not CONTROL.search(render.getvalue())
    lines = printed(plain).splitlines()
    assert len(lines) == 6, lines
    assert_harmless(plain, may_style=False)
    cursor = re.compile(r"\x1b\[\??[0-9;]*[A-Za-z]|\r")
    assert not CONTROL.search(cursor.sub("", printed(live)))
    assert "\x1b]0;" not in printed(live)
    assert "\x1b[2J" not in printed(live)
