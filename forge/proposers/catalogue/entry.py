"""One entry of the catalogue: an edit that can be made to a staged program, and the rival explanations of its effect.

Entries are data, one TOML file each under ``entries/``, so that the catalogue can be read, reviewed and frozen by hash. The
models here only say what an entry may hold; `forge.proposers.catalogue.weave` turns one into SEARCH/REPLACE blocks.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Literal

from pydantic import BaseModel, ConfigDict

Stage = Literal["coordinates", "codes", "corrections", "activation"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Hook(_Strict):
    """One change of existing lines.

    search: a whole line, or with `fragment` a part of a line that is replaced wherever it stands (outside `keep_out_of`).
    returned: replaces what the named stage function returns; the old expression is ``{returned}`` in `Entry.code`.
    """

    search: str = ""
    replace: str
    fragment: bool = False
    keep_out_of: Stage | None = None
    returned: Stage | None = None


class Edit(_Strict):
    """Lines of a program and what takes their place."""

    search: str
    replace: str


class HypothesisText(_Strict):
    """One rival: the cause it claims for the effect of `mechanism` (the entry's first one unless named)."""

    cause: str
    statement: str
    mechanism: str = ""


class ControlText(_Strict):
    """One control. Mechanical kinds name `mechanisms`; a substitute carries `edits` against the child."""

    key: str
    kind: Literal["knockout", "knockin", "substitute"]
    description: str
    mechanisms: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    imports: tuple[str, ...] = ()


class PredictionText(_Strict):
    """The interval in which a hypothesis expects the retained effect of a control."""

    cause: str
    control: str
    low: float
    high: float


class Wish(_Strict):
    """A required edit asked for when a verdict falls as `when` says. `then` names the entry that carries it out.

    part: mechanism that this entry adds for it, where the probe or the change needs one.
    """

    cause: str
    when: Literal["supported", "refuted"]
    kind: Literal["remove", "replace", "extend", "refine", "retest"]
    part: str | None = None
    place: str = "everywhere"
    wording: str
    probe: dict[str, object]
    then: str


class ExplanationText(_Strict):
    """What the catalogue answers when it is asked to explain the entry's effect."""

    hypotheses: tuple[HypothesisText, ...]
    controls: tuple[ControlText, ...]
    predictions: tuple[PredictionText, ...]
    wishes: tuple[Wish, ...] = ()


class ClaimText(_Strict):
    """One mechanism that the entry relies on, and the cause it claims for it."""

    mechanism: str
    cause: str
    statement: str


class Entry(_Strict):
    """One edit of the catalogue.

    claims: the mechanisms it relies on; the first one names the entry's idea.
    adds: mechanisms that `code` defines. drops: mechanisms whose functions and names are taken out.
    tier: entries of a lower tier are proposed first; within a tier the campaign's seed decides.
    carries_out: True for entries that only answer a required edit (named by `Wish.then`).
    needs, conflicts: mechanisms that the incumbent must or must not have.
    code: the functions to add before the stage function, ``{returned}`` standing for the stage's old return expression.
    edits: changes of lines that earlier entries wove in.
    """

    key: str = ""
    analysis: str
    claims: tuple[ClaimText, ...]
    adds: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    tier: int = 1
    carries_out: bool = False
    needs: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    stage: Stage | None = None
    imports: tuple[str, ...] = ()
    torch: bool = False
    code: str = ""
    hooks: tuple[Hook, ...] = ()
    edits: tuple[Edit, ...] = ()
    explanation: ExplanationText | None = None


def _files() -> Iterator[tuple[str, bytes]]:
    folder = resources.files("forge.proposers.catalogue").joinpath("entries")
    for file in sorted(folder.iterdir(), key=lambda item: item.name):
        if file.name.endswith(".toml"):
            yield file.name.removesuffix(".toml"), file.read_bytes()


@cache
def load_entries() -> tuple[Entry, ...]:
    """Return all entries in the order of their file names; the key of an entry is its file name."""
    return tuple(Entry(**{"key": key, **tomllib.loads(text.decode())}) for key, text in _files())


def catalogue_hash() -> str:
    """Return the sha256 over all entry files: a run records it, and a test holds it to the frozen value."""
    digest = hashlib.sha256()
    for key, text in _files():
        digest.update(key.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()
