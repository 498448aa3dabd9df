"""The commands. Each is a thin layer: arguments in, one call of the library, a table (or ``--json``) out.

Progress goes to standard error, results to standard output. Exit codes: 0 done; 1 the campaign could not go on, or the host
failed; 2 the user's mistake, told in one sentence without a traceback; 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from evaluators.errors import UserError
from forge import __version__
from forge.cli.errors import told_in_one_sentence

app = typer.Typer(
    name="quantforge",
    help="Search for the algorithm that quantizes a language model to strict MXFP4 W4A4, and explain every gain it keeps.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Run = Annotated[Path, typer.Argument(help="Folder of a run, as `run` printed it.", show_default=False)]


def _emit(data: Any) -> None:
    json.dump(data, sys.stdout, indent=2, sort_keys=True, allow_nan=False)
    sys.stdout.write("\n")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quantforge {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Search for the algorithm that quantizes a language model to strict MXFP4 W4A4, and explain every gain it keeps."""


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="Recipe of the campaign, a TOML file.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Run folder to make (default: under runs/out).")] = None,
    budget: Annotated[int | None, typer.Option(help="Evaluator calls, in place of the recipe's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed, in place of the recipe's.")] = None,
    subject: Annotated[str | None, typer.Option(help="Shipped name, folder, GGUF file or hub id of the model.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Text file, for a recipe whose corpus is a text.")] = None,
    proposer: Annotated[str | None, typer.Option(help="catalogue or openai.")] = None,
    sandbox: Annotated[
        str | None, typer.Option(help="bubblewrap, or none (shown in the ledger and every report).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Evaluations side by side, in place of the recipe's.")] = None,
    as_json: Json = False,
) -> None:
    """Run a campaign: search, explain, and leave ledger, report and best program in the run folder."""
    with told_in_one_sentence():
        from forge.cli.campaigns import run_campaign

        _finish(
            run_campaign(
                recipe,
                out=out,
                budget=budget,
                seed=seed,
                subject=subject,
                corpus=corpus,
                proposer=proposer,
                sandbox=sandbox,
                workers=workers,
            ),
            as_json,
        )


@app.command()
def resume(run: Run, as_json: Json = False) -> None:
    """Go on with a campaign that was stopped or killed; nothing that was paid for is paid again."""
    with told_in_one_sentence():
        from forge.cli.campaigns import resume_campaign

        _finish(resume_campaign(run), as_json)


@app.command()
def show(
    run: Run,
    what: Annotated[
        str,
        typer.Argument(help="summary, observations, edits, refusals, honesty, calls, notes, or the id of a program."),
    ] = "summary",
    recompute: Annotated[
        bool,
        typer.Option("--recompute", help="Derive every verdict again from what was measured; exit 1 if any differs."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Read the ledger of a run, finished or running, without disturbing it."""
    with told_in_one_sentence():
        if recompute:
            if what != "summary":
                raise UserError(f"--recompute stands in place of a part; give it without {what!r}")
            from forge.cli.showing import show_recomputation

            if not show_recomputation(run, Console(), _emit if as_json else None):
                raise typer.Exit(1)
            return
        from forge.cli.showing import show_run

        show_run(run, what, Console(), _emit if as_json else None)


@app.command()
def evaluate(
    program: Annotated[str, typer.Argument(help="Shipped program by name, or the path of one.", show_default=False)],
    recipe: Annotated[Path, typer.Option(help="Recipe that says how to evaluate.")] = Path(
        "runs/recipes/quickstart.toml"
    ),
    subject: Annotated[str | None, typer.Option(help="Shipped name, folder, GGUF file or hub id of the model.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Text file, for a recipe whose corpus is a text.")] = None,
    split: Annotated[str, typer.Option(help="search or confirm.")] = "search",
    draw: Annotated[int, typer.Option(min=0, help="Calibration draw.")] = 0,
    sandbox: Annotated[str | None, typer.Option(help="bubblewrap or none.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate one program once, outside any campaign."""
    with told_in_one_sentence():
        from forge.cli.evaluating import evaluate_program

        ok = evaluate_program(
            program, recipe, subject=subject, corpus=corpus, split=split, draw=draw, sandbox=sandbox,
            console=Console(), emit=_emit if as_json else None,
        )  # fmt: skip
        if not ok:
            raise typer.Exit(1)


@app.command()
def compare(
    programs: Annotated[list[str], typer.Argument(help="Shipped programs by name, or paths.", show_default=False)],
    recipe: Annotated[Path, typer.Option(help="Recipe that says how to evaluate.")] = Path(
        "runs/recipes/quickstart.toml"
    ),
    subject: Annotated[str | None, typer.Option(help="Shipped name, folder, GGUF file or hub id of the model.")] = None,
    corpus: Annotated[Path | None, typer.Option(help="Text file, for a recipe whose corpus is a text.")] = None,
    split: Annotated[str, typer.Option(help="search or confirm.")] = "search",
    sandbox: Annotated[str | None, typer.Option(help="bubblewrap or none.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate programs side by side with one protocol: loss, perplexity, damage, recovery, bits, paired effects."""
    with told_in_one_sentence():
        from forge.cli.evaluating import compare_programs

        compare_programs(
            programs, recipe, subject=subject, corpus=corpus, split=split, sandbox=sandbox,
            console=Console(), emit=_emit if as_json else None,
        )  # fmt: skip


bench_app = typer.Typer(
    help="Time the kernels; count how often verdicts are right; try to get past the probes.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(bench_app, name="bench")


@bench_app.callback()
def bench() -> None:
    """Measure what the project is made of: how fast kernels are, how often verdicts are right, what gets past the probes."""


@bench_app.command()
def kernels(
    device: Annotated[str | None, typer.Option(help="cpu or cuda (default: cuda where there is one).")] = None,
    out: Annotated[Path | None, typer.Option(help="Also keep the document in this JSON file.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed calls per side.")] = 25,
    as_json: Json = False,
) -> None:
    """Time every op against its floor and against what one would call instead (minutes)."""
    with told_in_one_sentence():
        from forge.cli.benching import bench_kernels, bench_table

        document = bench_kernels(device, out=out, repeats=repeats)
        if as_json:
            _emit(document)
        else:
            Console().print(bench_table(document))


@bench_app.command()
def verdicts(
    worlds: Annotated[int, typer.Option(help="Observations to judge.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the worlds.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Also keep the document in this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Judge generated worlds whose true causes are known, and count how often verdicts are wrong (a minute or two)."""
    with told_in_one_sentence():
        from forge.cli.verdict_benching import bench_verdicts, print_verdicts

        document = bench_verdicts(worlds, seed=seed, out=out)
        if as_json:
            _emit(document)
        else:
            print_verdicts(document, Console())


@bench_app.command()
def probes(
    out: Annotated[Path | None, typer.Option(help="Also keep the document in this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Try every known way to claim a change that does nothing, and show what screening and probes say (two minutes)."""
    with told_in_one_sentence():
        from forge.cli.probe_benching import bench_probes, print_probes

        document = bench_probes(out=out)
        if as_json:
            _emit(document)
        else:
            print_probes(document, Console())


@app.command()
def doctor(as_json: Json = False) -> None:
    """Check this machine: sandbox, packages, devices, keys. Exit code 1 when a campaign could not run."""
    with told_in_one_sentence():
        from forge.cli.doctor import examine

        if not examine(Console(), _emit if as_json else None):
            raise typer.Exit(1)


def _finish(outcome: Any, as_json: bool) -> None:
    from forge.cli.campaigns import print_outcome

    if as_json:
        _emit(
            outcome.summary.to_json()
            | {"folder": str(outcome.folder.root), "ending": outcome.ending.reason, "failed": outcome.ending.failed}
        )
    else:
        print_outcome(outcome, Console())
    if outcome.ending.failed:
        raise typer.Exit(1)


def main() -> NoReturn:
    """Entry point of the command."""
    app()
    raise SystemExit(0)
