"""What must stay the same for a campaign to go on, and whether a replay met everything that was recorded.

A campaign pairs figures that were measured hours or days apart. It goes on only with the recipe it began with and with the
software, device and catalogue that its first process had; what differs is named, key by key. Keys that only say how to reach
a language model or when to give up may change, and are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from evaluators.evaluator import runtime_versions
from forge.errors import ForgeError, RecipeError
from forge.progress import Progress
from forge.proposers.catalogue import catalogue_hash
from forge.recipe import Recipe, parse_recipe
from hypotheses.ledger import ENDED, STOPPED, Event, Ledger

CHANGEABLE = frozenset(
    {
        "[campaign] max_consecutive_refusals",
        "[llm] base_url_env",
        "[llm] key_env",
        "[llm] max_tokens_total",
        "[llm] max_cost",
        "[llm] prompt_price",
        "[llm] completion_price",
        "[llm] request_timeout_s",
        "[llm] deadline_s",
    }
)
"""Keys that change no figure and no reply."""

REPAIR = "figures would not be comparable; bring back what it was, or start a new run"


class ReplayError(ForgeError, RuntimeError):
    """The walk over a recorded campaign took another way than the one that was recorded."""


def recorded_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return what the ledger keeps of a recipe: everything but the folder that the run lies in."""
    return recipe.model_dump(mode="json", exclude={"campaign": {"out"}})


def require_same_recipe(recorded: Mapping[str, Any], recipe: Recipe, progress: Progress) -> None:
    """Check that the recipe in a run folder is the one that the ledger recorded; say which harmless keys have changed.

    Raises:
        RecipeError: names every key that differs, with both values.
    """
    try:
        then = dict(_values(recorded_recipe(parse_recipe(recorded, name="the recipe in the ledger"))))
    except RecipeError as err:
        raise RecipeError(
            f"{err}; this run was begun by another version of QuantForge: resume it with that one"
        ) from err
    now = dict(_values(recorded_recipe(recipe)))
    changes = {
        key: f"{key} was {then.get(key)!r} and is now {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key)
    }
    refused = [text for key, text in changes.items() if key not in CHANGEABLE]
    if refused:
        raise RecipeError(f"recipe.toml was changed since this run began: {'; '.join(refused)}: {REPAIR}")
    if changes:
        progress.milestone(f"going on with a changed recipe: {'; '.join(changes.values())}")


def require_same_surroundings(ledger: Ledger, recipe: Recipe, progress: Progress) -> None:
    """Check software, device and catalogue against the first process that wrote to the ledger.

    Another processor of a CPU subject rounds a little differently, which is told; another GPU is refused.

    Raises:
        RecipeError: names everything that differs.
    """
    if not (begun := ledger.environments()):
        return
    first = begun[0]
    then = dict(first.versions) | {"device": first.device} | dict(first.details)
    now = runtime_versions() | {"device": recipe.subject.device} | surroundings(recipe)
    changes = {
        key: f"{key} was {then[key]!r} and is now {now[key]!r}"
        for key in sorted(then.keys() & now.keys())
        if then[key] != now[key]
    }
    # A patch release of Python changes no program's AST and no figure.
    harmless = {"python"} if _minor(then.get("python")) == _minor(now["python"]) else set()
    if recipe.subject.device == "cpu":
        harmless.add("processor")
    refused = [text for key, text in changes.items() if key not in harmless]
    if refused:
        raise RecipeError(f"this run began in other surroundings: {'; '.join(refused)}: {REPAIR}")
    if changes:
        progress.milestone(f"going on in other surroundings, last digits may differ: {'; '.join(changes.values())}")


def surroundings(recipe: Recipe) -> dict[str, Any]:
    """Return what a process records about itself beside its versions: the processor, and the catalogue where it proposes."""
    details = {"processor": _processor(recipe.subject.device)}
    if recipe.campaign.proposer == "catalogue":
        details["catalogue"] = catalogue_hash()
    return details


def require_all_met(ledger: Ledger, reason: str) -> None:
    """Check at the end of a walk that it met every recorded event; `reason` is why it ended.

    Raises:
        ReplayError: events were recorded after the last one that was met, so this walk ended where the first did not.
    """
    left = _unmet(ledger, reason)
    if left:
        raise ReplayError(
            f"the replay took another way: it ended ({reason}) before {len(left)} recorded events, the first of them "
            f"{left[0].kind} {left[0].ref}; nothing was written: resume with the version and files that this run began with"
        )


def _unmet(ledger: Ledger, reason: str) -> list[Event]:
    later = ledger.events(after=ledger.position)
    if not later:
        return []
    with Ledger.open(ledger.path, read_only=True) as reader:
        own = {
            note.id for note in reader.notes() if note.topic == STOPPED or (note.topic == ENDED and note.text == reason)
        }
    return [event for event in later if event.ref not in own]


def _values(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, table in recipe.items():
        for key, value in table.items():
            yield f"[{section}] {key}", value


def _minor(version: object) -> str:
    return ".".join(str(version).split(".")[:2])


def _processor(device: str) -> str:
    """Return the name of the processor that a subject on this device runs on."""
    if device != "cpu":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "none"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
