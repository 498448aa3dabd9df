"""Judge many worlds and count: how often the truth was refuted or supported, how often something false was, at how many calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from forge.recipe import Statistics
from forge.worlds.causes import LUCK
from forge.worlds.generate import KINDS, Kind, make_world
from forge.worlds.judge import WAYS, Judgement, Way, is_triggered, judge, observe
from forge.worlds.losses import load_losses
from hypotheses.verdicts import RULE, VerdictStatus

MOST_TRIES: Final = 20
"""Worlds made per world wanted before giving up: gains too small to be explained are no observations."""


@dataclass
class Count:
    """Of one way and one kind of worlds.

    worlds: observations. separated: of these, the controls that ran separate the true cause from every rival;
    supported_separated: and it was supported. Verdicts are counted one by one: true_* of the hypothesis that claims the true
    cause, false_* of its rivals.
    """

    worlds: int = 0
    calls: int = 0
    separated: int = 0
    supported_separated: int = 0
    true_supported: int = 0
    true_refuted: int = 0
    true_inconclusive: int = 0
    false_supported: int = 0
    false_refuted: int = 0
    false_inconclusive: int = 0

    @property
    def given(self) -> int:
        """Verdicts that say something."""
        return self.true_supported + self.true_refuted + self.false_supported + self.false_refuted

    def add(self, truth: str | None, judgement: Judgement) -> None:
        """Count one world."""
        self.worlds += 1
        self.calls += judgement.calls
        for key, status in judgement.statuses.items():
            what = status.value if status in (VerdictStatus.SUPPORTED, VerdictStatus.REFUTED) else "inconclusive"
            name = f"{'true' if key == truth else 'false'}_{what}"
            setattr(self, name, getattr(self, name) + 1)
        self.separated += judgement.is_separated
        is_supported = truth is not None and judgement.statuses[truth] is VerdictStatus.SUPPORTED
        self.supported_separated += judgement.is_separated and is_supported

    def __add__(self, other: Count) -> Count:
        return Count(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    def rates(self) -> dict[str, float | None]:
        """Return the figures; None where nothing was counted.

        false_refutation, false_support: refuted truths, and supported hypotheses that are not true, of all verdicts given.
        """
        hypotheses = self.given + self.true_inconclusive + self.false_inconclusive
        return {
            "false_refutation": _share(self.true_refuted, self.given),
            "false_support": _share(self.false_supported, self.given),
            "false_of_supports": _share(self.false_supported, self.false_supported + self.true_supported),
            "inconclusive": _share(self.true_inconclusive + self.false_inconclusive, hypotheses),
            "supported_where_separated": _share(self.supported_separated, self.separated),
            "calls_per_world": _share(self.calls, self.worlds),
        }


def _empty_counts() -> dict[Way, dict[Kind, Count]]:
    return {way: {kind: Count() for kind in KINDS} for way in WAYS}


@dataclass
class Tally:
    """Of a whole run.

    made: worlds. triggered: clear gains. luck_*: of gains that were never there, the clear and the confirmed ones.
    """

    made: int = 0
    triggered: int = 0
    luck_triggered: int = 0
    luck_confirmed: int = 0
    counts: dict[Way, dict[Kind, Count]] = field(default_factory=_empty_counts)

    def to_json(self, *, worlds: int, seed: int) -> dict[str, Any]:
        """Return all counts and rates as plain JSON."""
        ways: dict[str, Any] = {}
        for way, by_kind in self.counts.items():
            kinds = {str(kind): count for kind, count in by_kind.items()}
            kinds["all"] = sum(by_kind.values(), Count())
            ways[way] = {kind: asdict(count) | {"given": count.given} | count.rates() for kind, count in kinds.items()}
        return {
            "rule": RULE,
            "worlds": worlds,
            "seed": seed,
            "made": self.made,
            "triggered": self.triggered,
            "luck": {"triggered": self.luck_triggered, "confirmed": self.luck_confirmed},
            "ways": ways,
        }


def judge_worlds(worlds: int, seed: int, *, progress: Callable[[Iterable[int]], Iterable[int]] = iter) -> Tally:
    """Return the counts over so many observations.

    Raises:
        RuntimeError: hardly any world has a gain that is clear enough.
    """
    losses, statistics = load_losses(), Statistics()
    tally = Tally()
    for _ in progress(range(worlds)):
        while True:
            number = tally.made
            tally.made += 1
            if tally.made > MOST_TRIES * worlds:
                raise RuntimeError(f"{tally.made} worlds gave fewer than {worlds} observations")
            world = make_world(number, seed, losses)
            is_luck = world.cause == LUCK
            triggered = is_triggered(world, statistics)
            tally.triggered += triggered
            tally.luck_triggered += triggered and is_luck
            confirmed = observe(world, statistics)
            if confirmed is not None:
                break
        tally.luck_confirmed += is_luck
        for way, judgement in judge(world, confirmed, statistics, number).items():
            tally.counts[way][world.kind].add(world.truth, judgement)
    return tally


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
