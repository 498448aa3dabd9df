"""Worlds: a gain with a known cause, what a proposer predicts about it, and losses with the noise of real ones.

A program's loss on a chunk is that of a real program, less its effect, plus its luck:

    loss_c = base_c - r mu h_c + luck_c,    h a pattern of a real effect over chunks, mean 1

r is 0 for the parent, 1 for the child, and the retained effect for a control, whose own pattern is mostly the child's. Luck is
the difference that another calibration draw made to a real program, chunk by chunk: turned over or not, dealt to other chunks,
and in proportion to the program's damage (see `forge.noise`), up to a sixth more or less than that says.

Three kinds of worlds. *Well specified*: every prediction of the true cause contains what its control retains. *Misspecified*: at
least one of them does not, by up to half of the gain. *None of these*: the true cause is no hypothesis; luck is one such cause: a
gain that was never there, picked for having looked like one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from evaluators.results import Split
from forge.noise import LARGEST_SCALE, NoiseModel
from forge.worlds.causes import CAUSES, CONTROLS, LUCK, KnownControl
from forge.worlds.losses import CONFIRM, SEARCH, SPLITS, Array, SubjectLosses
from hypotheses.effects import noise_floor, program_variance
from hypotheses.ledger import Settlement
from hypotheses.predictions import Explanation, ExplanationProblem, Hypothesis, Prediction

Kind = Literal["well specified", "misspecified", "none of these"]
KINDS: Final[tuple[Kind, ...]] = ("well specified", "misspecified", "none of these")
WEIGHTS: Final = (0.5, 0.3, 0.2)
LUCKY: Final = 0.25
"""Share of the worlds without a true hypothesis whose gain is luck."""
NOISE_DRAWS: Final = 8
VARIETY: Final = 0.08
"""Standard deviation of what a control retains about the table of causes."""
SIXTH: Final = 1 / 6


@dataclass(frozen=True, kw_only=True)
class World:
    """One gain.

    cause: what really did it. truth: key of the hypothesis that claims it; None where none does. retained: by control, what it
    really retains. search_parent, search_child: runs on the search split; confirmation: of the child, the parent beside it.
    controls: what running each would show.
    """

    kind: Kind
    subject: str
    cause: str
    truth: str | None
    explanation: Explanation
    retained: Mapping[str, float]
    noise: NoiseModel
    search_parent: Settlement
    search_child: Settlement
    confirmation: Settlement
    controls: Mapping[str, Settlement]


def make_world(number: int, seed: int, losses: Mapping[str, SubjectLosses]) -> World:
    """Return world `number` of a seed; the same for the same arguments, whatever else was made before."""
    dice = random.Random(f"{seed}/{number}")
    kind = dice.choices(KINDS, WEIGHTS)[0]
    name = dice.choice(sorted(losses))
    is_luck = kind == "none of these" and dice.random() < LUCKY
    cause = LUCK if is_luck else dice.choice(CAUSES)
    while True:
        try:
            explanation, retained = _explain(dice, kind, cause)
            break
        except ExplanationProblem:
            continue  # such a reply is refused and asked for again
    truth = cause if kind != "none of these" else None
    return _measure(dice, kind, name, losses[name], cause, truth, explanation, retained)


def _explain(dice: random.Random, kind: Kind, cause: str) -> tuple[Explanation, dict[str, float]]:
    """Return what a proposer writes down, and what the controls really retain."""
    others = [other for other in CAUSES if other != cause]
    rivals = dice.sample(others, dice.randint(1, 3) + (kind == "none of these"))
    claimed = sorted(rivals if kind == "none of these" else [*rivals, cause])
    known = dice.sample(CONTROLS, dice.randint(3, 8))
    retained = {
        control.key: (0.0 if cause == LUCK else _table(control, cause)) + dice.gauss(0, VARIETY) for control in known
    }
    wrong = {control.key for control in known if dice.random() < 0.5} or {dice.choice(known).key}
    predictions = []
    for control in known:
        for hypothesis in claimed:
            half = dice.uniform(0.08, 0.3)
            if hypothesis != cause:
                centre = _table(control, hypothesis) + dice.gauss(0, VARIETY)
            elif kind == "misspecified" and control.key in wrong:
                centre = retained[control.key] + dice.choice((-1, 1)) * (half + dice.uniform(0.02, 0.5))
            else:
                centre = retained[control.key] + dice.uniform(-half, half)
            predictions.append(
                Prediction(hypothesis=hypothesis, control=control.key, low=centre - half, high=centre + half)
            )
    explanation = Explanation(
        hypotheses=tuple(
            Hypothesis(key=key, cause=key.replace("_", "-"), mechanism="mechanism", statement=f"It is the {key}.")
            for key in claimed
        ),
        controls=tuple(control.control() for control in known),
        predictions=tuple(predictions),
    )
    return explanation, retained


def _table(control: KnownControl, cause: str) -> float:
    return control.retained[CAUSES.index(cause)]


def _measure(
    dice: random.Random,
    kind: Kind,
    name: str,
    losses: SubjectLosses,
    cause: str,
    truth: str | None,
    explanation: Explanation,
    retained: Mapping[str, float],
) -> World:
    """Return the world with the losses that its programs would have."""
    base = losses.bases[dice.choice(sorted(losses.bases))]
    pattern, own_pattern = (losses.patterns[index] for index in dice.choices(range(len(losses.patterns)), k=2))
    damage = {split: float((base[split] - losses.full_precision[split]).mean()) for split in SPLITS}
    gain = damage[SEARCH] * 10 ** dice.uniform(-1.5, -0.15)
    if cause == LUCK:
        gain = 0.0
    own_weight = dice.uniform(0.05, 0.3)
    parent_is_calibrated = dice.random() < 0.7
    noise = _noise(dice, losses)

    def run(share: float, luck: Mapping[Split, Array], *, is_control: bool = False) -> dict[Split, Array]:
        found = {}
        for split in SPLITS:
            mixed = (1 - own_weight) * pattern[split] + own_weight * own_pattern[split]
            effect = share * gain * (mixed if is_control else pattern[split])
            scale = min(max((damage[split] - share * gain) / losses.reference_damage, 1 / LARGEST_SCALE), LARGEST_SCALE)
            found[split] = base[split] - effect + scale * luck[split]
        return found

    quiet = {split: np.zeros_like(base[split]) for split in SPLITS}
    parent = run(0.0, _luck(dice, losses) if parent_is_calibrated else quiet)
    child, again = run(1.0, _luck(dice, losses)), run(1.0, _luck(dice, losses))
    if cause == LUCK:
        # It was picked for its score: so many standard errors, whatever it took.
        error = noise.floor
        picked = dice.uniform(5.5, 8.0) * error + float((child[SEARCH] - parent[SEARCH]).mean())
        child = {split: child[split] - picked for split in child}
    return World(
        kind=kind,
        subject=name,
        cause=cause,
        truth=truth,
        explanation=explanation,
        retained=retained,
        noise=noise,
        search_parent=_settled(parent[SEARCH], is_calibrated=parent_is_calibrated),
        search_child=_settled(child[SEARCH]),
        confirmation=_settled(again[CONFIRM], beside=parent[CONFIRM]),
        controls={
            key: _settled(run(share, _luck(dice, losses), is_control=True)[CONFIRM])
            for key, share in sorted(retained.items())
        },
    )


def _luck(dice: random.Random, losses: SubjectLosses) -> dict[Split, Array]:
    """Return the luck of one run, (C,) by split: its mean over chunks goes along with the calibration draw on both splits."""
    luck = dice.choice(losses.lucks)
    factor = dice.choice((-1, 1)) * dice.uniform(1 - SIXTH, 1 + SIXTH)
    return {split: factor * np.asarray(dice.sample(list(values), len(values))) for split, values in luck.items()}


def _noise(dice: random.Random, losses: SubjectLosses) -> NoiseModel:
    """Return the noise as a campaign would have measured it, from a few draws."""
    draws = [_luck(dice, losses)[SEARCH] for _ in range(NOISE_DRAWS)]
    variance = program_variance([float(draw.mean()) for draw in draws])
    chunks = float(np.var(draws[0] - draws[1], ddof=1)) / len(draws[0])
    return NoiseModel(
        draw_variance=variance,
        num_draws=NOISE_DRAWS,
        floor=noise_floor(chunks, 2 * variance),
        full_precision=float(losses.full_precision[SEARCH].mean()),
        reference_damage=losses.reference_damage,
    )


def _settled(losses_C: Array, *, beside: Array | None = None, is_calibrated: bool = True) -> Settlement:
    return Settlement(
        outcome="scored",
        chunk_nll=tuple(map(float, losses_C)),
        reference_chunk_nll=() if beside is None else tuple(map(float, beside)),
        evidence={"events": [{"op": "second_moment"}] if is_calibrated else []},
    )
