"""`evaluate` and `compare`: programs scored outside any campaign, with one protocol."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluators.corpora import load_corpus
from evaluators.evaluator import Evaluator
from evaluators.results import EvaluationResult
from evaluators.subjects import load_subject
from forge.cli.printing import in_cell, make_table, print_block, print_line, print_table
from forge.errors import RecipeError
from forge.launch import make_isolation, open_evaluators, require_pairs
from forge.program_files import read_program
from forge.recipe import Overrides, load_recipe
from hypotheses.effects import paired_effect

Emit = Callable[[Any], None]
MAX_NLL = 700.0
"""Nats per token; the exponential of more overflows."""
OPEN_SPLITS = ("search", "confirm")


def evaluate_program(
    program: str,
    recipe: Path,
    *,
    subject: str | None,
    corpus: Path | None,
    split: str,
    draw: int,
    sandbox: str | None,
    console: Console,
    emit: Emit | None,
) -> bool:
    """Evaluate one program; return whether it was scored."""
    source = read_program(program)
    with _evaluator(recipe, subject, corpus, sandbox, split) as evaluator:
        print_line(
            Console(stderr=True), f"evaluating {program} on the {split} split, calibration draw {draw}", style="dim"
        )
        result = evaluator.evaluate(source, split=_split(split), draw=draw)
        base = evaluator.full_precision_nll(_split(split))
        protocol = evaluator.corpus.protocol
    row = _row(program, result, base, None)
    if emit is not None:
        emit(row | {"protocol": protocol, "chunk_nll": list(result.chunk_nll), "log": result.program_log})
    else:
        _print_rows([row], protocol, console, full_precision=_mean(base))
        if result.program_log:
            print_block(console, "the program's own words:\n" + result.program_log, style="dim")
    return result.outcome.is_scored


def compare_programs(
    programs: list[str],
    recipe: Path,
    *,
    subject: str | None,
    corpus: Path | None,
    split: str,
    sandbox: str | None,
    console: Console,
    emit: Emit | None,
) -> None:
    """Evaluate programs one after another and print them side by side; effects are against the first."""
    sources = {program: read_program(program) for program in programs}
    rows: list[dict[str, Any]] = []
    first: EvaluationResult | None = None
    progress = Console(stderr=True)
    with _evaluator(recipe, subject, corpus, sandbox, split) as evaluator:
        require_pairs(evaluator.corpus, split)
        base = evaluator.full_precision_nll(_split(split))
        for number, (program, source) in enumerate(sources.items(), 1):
            print_line(progress, f"{number} of {len(sources)}: {program}")
            result = evaluator.evaluate(source, split=_split(split))
            first = first or result
            rows.append(_row(program, result, base, first if result is not first else None))
        protocol = evaluator.corpus.protocol
    if emit is not None:
        emit({"protocol": protocol, "full_precision_nll": _mean(base), "programs": rows})
    else:
        _print_rows(rows, protocol, console, full_precision=_mean(base))


@contextmanager
def _evaluator(
    recipe: Path, subject: str | None, corpus: Path | None, sandbox: str | None, split: str
) -> Iterator[Evaluator]:
    if split not in OPEN_SPLITS:
        raise RecipeError(f"split {split!r} cannot be scored here; give {' or '.join(OPEN_SPLITS)}")
    loaded = load_recipe(recipe, Overrides(subject=subject, corpus_path=corpus, sandbox=sandbox))
    isolation = make_isolation(loaded)
    model = load_subject(loaded.subject.reference, device=loaded.subject.device)
    tokens = load_corpus(loaded.corpus, model)
    with (
        tempfile.TemporaryDirectory(prefix="quantforge-evaluate-") as folder,
        open_evaluators(loaded, model, tokens, isolation, Path(folder)) as evaluators,
    ):
        yield evaluators.first


def _split(name: str) -> Any:
    return name


def _perplexity(nll: float | None) -> float | None:
    """Return exp(nll); None where there is none, or none that a float can hold."""
    return math.exp(nll) if nll is not None and nll < MAX_NLL else None


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)


def _row(
    program: str, result: EvaluationResult, base: tuple[float, ...], first: EvaluationResult | None
) -> dict[str, Any]:
    full = _mean(base)
    row: dict[str, Any] = {
        "program": program,
        "outcome": result.outcome.value,
        "reason": result.reason,
        "split": result.split,
        "draw": result.draw,
        "nll": result.nll,
        "perplexity": _perplexity(result.nll),
        "damage": None if result.nll is None else result.nll - full,
        "recovery": None,
        "effective_bits": result.effective_bits,
        "contract_class": result.contract_class,
        "effect_on_first": None,
        "standard_error": None,
        "metered_tokens": result.metered_tokens,
        "wall_s": result.wall_s,
        "route": result.route,
        "device": result.device,
        "versions": result.versions,
        "sandbox": result.sandbox,
    }
    if first is not None and first.nll is not None and result.nll is not None:
        effect = paired_effect(first.chunk_nll, result.chunk_nll, program_variance=0.0)
        row["effect_on_first"], row["standard_error"] = effect.mean, effect.standard_error
        lost = first.nll - full
        row["recovery"] = (first.nll - result.nll) / lost if lost else None
    return row


def _print_rows(
    rows: list[dict[str, Any]], protocol: str, console: Console, *, full_precision: float | None = None
) -> None:
    print_line(console, protocol, style="dim")
    compares = ("effect on first", "recovery") if len(rows) > 1 else ()
    table = make_table(
        "program", "nats/token", "perplexity", "damage", *compares, "bits", "class", "seconds",
        text=frozenset({"program", "class"}),
    )  # fmt: skip
    dashes = ["-"] * (len(compares) + 3)
    if full_precision is not None:
        table.add_row("full precision", f"{full_precision:.4f}", f"{math.exp(full_precision):.3f}", "-", *dashes)
    for row in rows:
        if row["nll"] is None:
            table.add_row(in_cell(row["program"]), in_cell(row["outcome"]), "-", "-", *dashes)
            continue
        effect, error, recovery = row["effect_on_first"], row["standard_error"], row["recovery"]
        paired = (
            "-" if effect is None else f"{effect:+.4f} +- {error:.4f}",
            "-" if recovery is None else f"{100 * recovery:.1f}%",
        )[: len(compares)]
        table.add_row(
            in_cell(row["program"]),
            f"{row['nll']:.4f}",
            "-" if row["perplexity"] is None else f"{row['perplexity']:.3f}",
            f"{row['damage']:.4f}",
            *paired,
            f"{row['effective_bits']:.2f}",
            row["contract_class"],
            f"{row['wall_s']:.1f}",
        )
    print_table(console, table)
    for row in rows:
        if row["nll"] is None:
            print_block(console, f"{row['program']}: {row['outcome']}: {row['reason']}")
    if len(rows) > 1:
        print_line(
            console,
            "recovery and effects are against the first program; +- is one standard error over chunks",
            style="dim",
        )
