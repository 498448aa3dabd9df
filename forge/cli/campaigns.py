"""`run` and `resume`, and what they print at the end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from forge.cli.honesty import print_honesty
from forge.cli.printing import in_cell, make_table, print_line, print_table
from forge.explanation_tables import ObservationRow, PlanTable
from forge.plain_text import first_line
from forge.progress import TerminalProgress
from forge.recipe import Overrides, Recipe, load_recipe
from forge.summary import DeclaredRow, EditRow, Figure, Summary

if TYPE_CHECKING:  # with torch, which whoever only prints a summary need not load
    from forge.launch import Outcome

RUNS = Path("runs/out")


def run_campaign(
    recipe: Path,
    *,
    out: Path | None,
    budget: int | None,
    seed: int | None,
    subject: str | None,
    corpus: Path | None,
    proposer: str | None,
    sandbox: str | None,
    workers: int | None = None,
) -> Outcome:
    """Run a recipe with the command line's overrides."""
    from forge.launch import launch

    loaded = load_recipe(
        recipe,
        Overrides(
            budget_calls=budget,
            seed=seed,
            subject=subject,
            corpus_path=corpus,
            proposer=proposer,
            sandbox=sandbox,
            workers=workers,
            out=out,
        ),
    )
    with TerminalProgress() as progress:
        return launch(loaded, loaded.campaign.out or _next_folder(loaded), progress)


def resume_campaign(run: Path) -> Outcome:
    """Go on with a run."""
    from forge.launch import relaunch

    with TerminalProgress() as progress:
        return relaunch(run, progress)


def _next_folder(recipe: Recipe) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    base = RUNS / f"{recipe.campaign.name}-{stamp}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Print figures, observations, required edits and where things are."""
    print_summary(outcome.summary, console)
    print_line(console, f"ended:        {outcome.ending.reason}")
    print_line(console, f"report:       {outcome.folder.report}")
    print_line(console, f"best program: {outcome.folder.best}")
    print_line(console, f"ledger:       {outcome.folder.ledger}")


def print_summary(summary: Summary, console: Console) -> None:
    """Print what a campaign found, for people."""
    print_figures(summary, console)
    for observation in summary.observations:
        print_observation(observation, console)
    print_edits(summary.required_edits, console)
    refused = [row for row in summary.refusals if row.kind == "candidate"]
    if refused:
        noun = "candidate" if len(refused) == 1 else "candidates"
        print_line(console, f"{len(refused)} {noun} refused before any call:", style="bold", gap=True)
        for row in refused:
            print_line(console, f"  turn {row.turn}: {row.stage}: {first_line(row.reason)}")
    print_honesty(summary.honesty, console)
    for violation in summary.violations:
        print_line(console, f"INVARIANT VIOLATED: {violation}", style="bold red")
    console.print()


def print_figures(summary: Summary, console: Console) -> None:
    """Print the table of scores and the state of the budget."""
    print_line(
        console, f"{summary.subject} under {summary.contract}, seed {summary.seed}; {summary.proposer}", gap=True
    )
    print_line(console, summary.corpus_protocol, style="dim")
    if summary.sandbox == "none":
        print_line(console, "NO SANDBOX: programs ran without isolation", style="bold red")
    if summary.figures:
        print_table(console, _figures_table(summary.figures + summary.best_by_class))
        print_line(
            console, "on the search split, which chose the programs; confirmed effects are on other text", style="dim"
        )
    else:
        print_line(console, "nothing is scored yet")
    if summary.declared is not None and summary.declared.is_final:
        _print_declared(summary.declared, console)
    budget = summary.budget
    floor = "not measured" if summary.noise_floor is None else f"{summary.noise_floor:.5f} nats/token"
    print_line(
        console,
        f"calls: {budget.used} of {budget.total} used, {budget.reserved} reserved, {budget.free} free; "
        f"{budget.num_setup} set-up runs apart; noise floor {floor}",
    )


def _print_declared(declared: DeclaredRow, console: Console) -> None:
    if declared.effect is None or declared.standard_error is None:
        print_line(console, f"declared: {declared.program}, the seed")
    else:
        print_line(
            console,
            f"declared: {declared.program}; measured again on other text with another calibration draw "
            f"{declared.effect:+.4f} +- {declared.standard_error:.4f} nats/token from its parent",
        )
    for title, reason in declared.passed_over:
        print_line(console, f"not declared: {title}: {reason}")


def _figures_table(figures: tuple[Figure, ...]) -> Table:
    table = make_table(
        "", "nats/token", "perplexity", "damage", "recovery", "bits", "class", text=frozenset({"", "class"})
    )
    for figure in figures:
        table.add_row(
            in_cell(figure.name),
            f"{figure.nll:.4f}",
            f"{figure.perplexity:.3f}",
            "-" if figure.damage is None else f"{figure.damage:.4f}",
            "-" if figure.recovery is None else f"{100 * figure.recovery:.1f}%",
            "-" if figure.effective_bits is None else f"{figure.effective_bits:.2f}",
            figure.contract_class or "-",
        )
    return table


def print_observation(observation: ObservationRow, console: Console) -> None:
    """Print one observation with its rivals, predictions beside measurements, and verdicts."""
    print_line(
        console,
        f"observation {observation.id}, turn {observation.turn}: {observation.program} "
        f"{observation.confirmed_effect:+.4f} +- {observation.confirmed_se:.4f} nats/token confirmed",
        style="bold",
        gap=True,
    )
    if observation.parent_nll is not None and observation.child_nll is not None:
        print_line(
            console,
            f"  confirm split: parent {observation.parent_nll:.4f} (calibration draw 0), child {observation.child_nll:.4f} "
            f"(draw {observation.child_draw}); a control retains (parent - control) / (parent - child)",
        )
    if observation.registered is not None and observation.first_control is not None:
        first = f"first control reserved at event {observation.first_control}"
        print_line(console, f"  predictions registered by event {observation.registered}, {first}")
    if not observation.rivals:
        print_line(console, "  not explained")
    for rival in observation.rivals:
        revises = f", revises {rival.revises}" if rival.revises else ""
        print_line(console, f"  {rival.status:<12} {rival.cause} ({rival.mechanism}{revises}): {rival.statement}")
        for row in rival.predictions:
            predicted = f"{row.low:.2f} .. {row.high:.2f}"
            if row.measured is None:
                measured = "not run" if not row.chosen else "without evidence"
            else:
                low, high = row.measured_low, row.measured_high
                around = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
                said = "fails" if row.failed else "fits" if row.fits else "neither fits nor fails"
                measured = f"{row.measured:.2f}{around}: {said}"
            verb = "" if row.measured is None else "measured "
            print_line(console, f"    {row.control}: predicted {predicted}, {verb}{measured}")
        if rival.reason:
            print_line(console, f"    why: {rival.reason}")
    for plan in observation.plans:
        _print_plan(plan, console)
    for reason in observation.void:
        print_line(console, f"  no evidence: {reason}")
    for pair in observation.interactions:
        clear = "clear of the noise" if pair.significant else "not clear of the noise"
        print_line(
            console,
            f"  interaction of {pair.knockout} and {pair.knockin}: {pair.excess:+.2f} of the effect is left by both "
            f"(p = {pair.p_value:.2g}, {clear}); it refutes nothing by itself",
        )
    if observation.rules:
        print_line(
            console, f"  {calls(observation.calls_for_controls)} for controls; by rule {', '.join(observation.rules)}"
        )


def _print_plan(plan: PlanTable, console: Console) -> None:
    aside = sum(row.standing in ("known", "unusable") for row in plan.controls)
    everything = "" if plan.cost_of_all is None else f"; running every usable control costs {plan.cost_of_all}"
    print_line(
        console,
        f"  plan{f', round {plan.round}' if plan.round else ''}: {calls(plan.cost)}{everything}"
        f"{f' ({aside} more could not be used)' if aside else ''}. {plan.reason}",
    )
    for row in plan.controls:
        told = f"separates {_pairs(row.separates)}" if row.separates else "separates no pair"
        width = "" if row.width is None else f", expected width {row.width:.2f}"
        said = f": {row.reason}" if row.reason else ""
        facts = f" ({told}{width})" if row.standing in ("chosen", "not chosen") else ""
        print_line(console, f"    {row.standing}: {row.control}{facts}{said}")
    for name, pairs in (("no control separates", plan.unseparated), ("too dear to separate", plan.unaffordable)):
        if pairs:
            print_line(console, f"    {name} {_pairs(pairs)}")


def calls(number: int) -> str:
    """Return a number of calls in words."""
    return f"{number} call{'' if number == 1 else 's'}"


def _pairs(pairs: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{a}/{b}" for a, b in pairs)


def print_edits(edits: tuple[EditRow, ...], console: Console) -> None:
    """Print required edits with the evidence of their probes."""
    if edits:
        print_line(console, "required edits", style="bold", gap=True)
    for edit in edits:
        closed = "" if edit.closed_turn is None else f" in turn {edit.closed_turn}"
        print_line(console, f"  {edit.id} from turn {edit.turn}: {edit.kind} {edit.mechanism}: {edit.wording}")
        print_line(console, f"    {edit.state}{closed}")
        for probe in edit.probes:
            print_line(console, f"    probe, {probe}")
