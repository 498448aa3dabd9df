"""A campaign out of its parts, wired in one place."""

from __future__ import annotations

from forge.asking import Asker
from forge.campaign import Campaign
from forge.confirming import Confirmer
from forge.desk import Desk
from forge.explaining import Explainer
from forge.interview import Interview
from forge.noise import NoiseModel
from forge.progress import Progress
from forge.recipe import Recipe
from forge.required import EditBoard
from forge.screening import Screener
from hypotheses.ledger import Ledger


def assemble(
    recipe: Recipe,
    ledger: Ledger,
    desk: Desk,
    screener: Screener,
    asker: Asker,
    noise: NoiseModel,
    progress: Progress,
) -> Campaign:
    """Return the campaign of a ledger that is set up."""
    seed, statistics = recipe.campaign.seed, recipe.statistics
    interview = Interview(ledger, asker, recipe, noise.floor)
    board = EditBoard(ledger)
    confirmer = Confirmer(ledger, noise, statistics, seed)
    explainer = Explainer(ledger, desk, screener, interview, board, confirmer, noise, statistics, progress, seed)
    return Campaign(recipe, ledger, desk, screener, interview, board, explainer, confirmer, noise, progress)
