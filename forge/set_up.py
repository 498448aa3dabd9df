"""What stands before the first turn: the scored seed, and the noise floor; see `forge.noise`."""

from __future__ import annotations

from pathlib import Path

from forge import program_source
from forge.desk import Call, Desk
from forge.errors import RecipeError
from forge.noise import NoiseFigures, NoiseModel
from forge.program_files import read_program
from forge.program_identity import ast_hash, normalized_ast_hash
from forge.progress import Progress
from forge.recipe import Recipe
from forge.scored import scored
from forge.screening import Screener
from hypotheses.ledger import Ledger, NewIncumbent, NewNoise, NewProgram

NOISE_PROGRAM = "gptq"
"""Shipped program whose calibration draws measure the program-level variance; see `forge.noise`."""


class SetUpError(RecipeError):
    """The seed or the noise floor cannot be measured with this recipe: there is no campaign to resume."""


def set_up(
    recipe: Recipe, ledger: Ledger, desk: Desk, screener: Screener, seed_source: str, progress: Progress
) -> NoiseModel:
    """Score the subject and the seed, make it the incumbent, and measure the noise; set-up, not budget.

    Args:
        recipe: of the campaign.
        ledger: its record.
        desk: where the runs are bought.
        screener: stores the seed and runs it on the truncated subject.
        seed_source: source of the seed program.
        progress: told what happens.

    Raises:
        SetUpError: the seed or the program behind the noise floor cannot be scored.
    """
    name = recipe.campaign.seed_program
    desk.full_precision("search")
    seed = screener.store(seed_source, origin="seed", title=Path(name).stem, parent=None)
    first = desk.evaluate(Call(program=seed, kind="setup", seed=recipe.campaign.seed, why="the seed of the search"))
    result = scored(first)
    if result is None:
        reason = first.result.reason if first.result else ""
        raise SetUpError(f"seed program {name!r} cannot be scored on this subject: {reason}")
    screener.smoke(seed, allowed_class="corrected")
    if ledger.incumbent() is None:
        ledger.set_incumbent(
            NewIncumbent(turn=0, program_id=seed.id, evaluation_id=first.id, reason="seed of the search")
        )
    reference = ledger.add_program(_noise_program())
    num_draws = recipe.evaluation.noise_draws
    draws = list(
        desk.evaluate_all(
            Call(
                program=reference,
                kind="setup",
                draw=draw,
                seed=recipe.campaign.seed,
                why=f"noise floor, calibration draw {draw + 1} of {num_draws}",
            )
            for draw in range(num_draws)
        )
    )
    losses = [scored(draw) for draw in draws]
    if any(loss is None for loss in losses):
        failed = next(draw for draw in draws if scored(draw) is None)
        raise SetUpError(
            f"the noise floor cannot be measured: program {NOISE_PROGRAM!r} ended "
            f"{failed.result.outcome if failed.result else ''}: {failed.result.reason if failed.result else ''}"
        )
    figures = NoiseFigures.measured(result, [loss for loss in losses if loss is not None])
    ledger.record_noise(
        NewNoise(
            program_id=reference.id,
            split="search",
            floor=figures.floor,
            chunk_variance=figures.chunk_variance,
            draw_variance=figures.draw_variance,
            num_chunks=figures.num_chunks,
            evaluation_ids=tuple(draw.id for draw in draws),
            body={"draw_means": list(figures.draw_means), "paired_with": first.id},
        )
    )
    sd = figures.draw_variance**0.5
    progress.milestone(f"noise floor {figures.floor:.5f} nats/token (calibration draws: sd {sd:.5f})")
    noise = NoiseModel.of(ledger)
    assert noise is not None
    return noise


def _noise_program() -> NewProgram:
    source = read_program(NOISE_PROGRAM)
    return NewProgram(
        source=source,
        origin="control",
        ast_hash=ast_hash(source),
        normalized_ast_hash=normalized_ast_hash(source),
        title=NOISE_PROGRAM,
        mechanisms=program_source.mechanisms(source),
    )
