"""Programs by name or by path: those that ship, and files of the user's."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from forge.errors import RecipeError
from forge.screening import Refusal, check_source


def read_program(reference: str) -> str:
    """Return the source of a shipped program by name, or of a file by path.

    Raises:
        RecipeError: there is no such program, or it is no valid one.
    """
    shipped = shipped_programs()
    if reference in shipped:
        return (resources.files("forge") / "programs" / f"{reference}.py").read_text(encoding="utf-8")
    try:
        source = Path(reference).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as err:  # RuntimeError: '~' of a user who is not there
        raise RecipeError(
            f"program {reference!r} is neither a shipped one ({', '.join(shipped)}) nor a readable file: {err}"
        ) from err
    try:
        check_source(source)
    except Refusal as refusal:
        raise RecipeError(f"program {reference!r} cannot be run: {'; '.join(refusal.problems)}") from refusal
    return source


def shipped_programs() -> tuple[str, ...]:
    """Return the names of the shipped programs."""
    folder = resources.files("forge") / "programs"
    return tuple(sorted(file.name.removesuffix(".py") for file in folder.iterdir() if file.name.endswith(".py")))
