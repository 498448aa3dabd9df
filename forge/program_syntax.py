"""A program's text as a syntax tree that is safe to walk, and the names its top level binds. Nothing is executed."""

from __future__ import annotations

import ast
import warnings

from forge.edits import normalize_newlines
from forge.errors import ProgramProblem

MAX_DEPTH = 100
"""Deepest nesting of the syntax tree; a program that needs more is built to break its readers."""


def parse(source: str) -> ast.Module:
    """Return the syntax tree.

    Raises:
        ProgramProblem: it does not parse, or is nested too deeply to be walked safely.
    """
    try:
        with warnings.catch_warnings():
            # Odd escapes and the like are the program's own business, not a message of ours.
            warnings.simplefilter("ignore")
            tree = ast.parse(normalize_newlines(source))
    except SyntaxError as err:
        shown = f": {err.text.strip()[:80]!r}" if err.text else ""
        raise ProgramProblem(f"The program does not parse: line {err.lineno}: {err.msg}{shown}.") from err
    except (ValueError, RecursionError, MemoryError) as err:
        raise ProgramProblem(f"The program does not parse: {type(err).__name__}: {err}.") from err
    level: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return tree
    raise ProgramProblem(f"The program's expressions or blocks are nested more than {MAX_DEPTH} deep.")


def top_level_bindings(tree: ast.Module) -> dict[str, list[int]]:
    """Return the lines that bind each name at the top level (definitions, assignments, imports)."""
    bindings: dict[str, list[int]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bindings.setdefault(statement.name, []).append(statement.lineno)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                bindings.setdefault(alias.asname or alias.name.split(".")[0], []).append(statement.lineno)
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                    bindings.setdefault(node.id, []).append(node.lineno)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    bindings.setdefault(node.name, []).append(node.lineno)
                elif isinstance(node, ast.Import | ast.ImportFrom):
                    for alias in node.names:
                        bindings.setdefault(alias.asname or alias.name.split(".")[0], []).append(node.lineno)
    return bindings
