"""Real losses, taken apart into what generated worlds are put together from: bases, patterns of effects, and luck.

Source: `forge.worlds.measure`, on the shipped subjects; ``nano_losses.json`` beside this file.

Legend: C chunks of a split, D calibration draws.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np

from evaluators.results import Split
from forge.confirming import CONFIRMATION_SPLIT
from forge.set_up import NOISE_PROGRAM

Array = np.ndarray[Any, np.dtype[np.float64]]
SEARCH: Final = "search"
CONFIRM: Final = CONFIRMATION_SPLIT
SPLITS: Final[tuple[Split, ...]] = (SEARCH, CONFIRM)
_CLEAR: Final = 5.0
"""Standard errors that the difference of two programs must have to be taken for the pattern of an effect."""


@dataclass(frozen=True, kw_only=True)
class SubjectLosses:
    """What is known of one subject, by split.

    full_precision: (C,) losses of the subject itself, nats per token. bases: by program, (C,) its mean over draws.
    patterns: (C,) per pair of programs: the difference of their bases over its mean over chunks, so that its mean is 1 on the
    search split. lucks: (C,) per program and draw: its loss less its mean over draws, widened by sqrt(D / (D - 1)) for having
    been estimated with it. reference_damage: of the noise program beyond full precision on the search split.
    """

    full_precision: Mapping[Split, Array]
    bases: Mapping[str, Mapping[Split, Array]]
    patterns: tuple[Mapping[Split, Array], ...]
    lucks: tuple[Mapping[Split, Array], ...]
    reference_damage: float


def load_losses() -> dict[str, SubjectLosses]:
    """Return what ships, by subject."""
    text = (resources.files("forge") / "worlds" / "nano_losses.json").read_text(encoding="utf-8")
    return {name: take_apart(data) for name, data in json.loads(text)["subjects"].items()}


def take_apart(data: Mapping[str, Any]) -> SubjectLosses:
    """Return bases, patterns and lucks of one subject's measurements, see `forge.worlds.measure.measure`."""
    full_precision = {split: np.asarray(data["full_precision"][split]) for split in SPLITS}
    losses = {
        name: {split: np.asarray(by_split[split]) for split in SPLITS} for name, by_split in data["programs"].items()
    }
    bases = {name: {split: losses[name][split].mean(axis=0) for split in SPLITS} for name in losses}
    names = sorted(bases)
    patterns = []
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            difference = {split: bases[first][split] - bases[second][split] for split in SPLITS}
            mean = float(difference[SEARCH].mean())
            error = float(difference[SEARCH].std(ddof=1)) / math.sqrt(len(difference[SEARCH]))
            if abs(mean) > _CLEAR * error:
                patterns.append({split: difference[split] / mean for split in SPLITS})
    lucks = []
    for name in names:
        num_draws = len(losses[name][SEARCH])
        if num_draws < 2:
            continue
        widened = math.sqrt(num_draws / (num_draws - 1))
        for draw in range(num_draws):
            lucks.append({split: widened * (losses[name][split][draw] - bases[name][split]) for split in SPLITS})
    return SubjectLosses(
        full_precision=full_precision,
        bases=bases,
        patterns=tuple(patterns),
        lucks=tuple(lucks),
        reference_damage=float((bases[NOISE_PROGRAM][SEARCH] - full_precision[SEARCH]).mean()),
    )
