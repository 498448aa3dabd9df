"""A program's source as data: its convention, its mechanisms, their knock-outs. Nothing here executes a program.

The convention: ``MECHANISMS`` is a top-level tuple of names; each names a top-level function M whose declared neutral
is the top-level function ``without_M`` with the same parameters; ``quantize(session)`` is where the evaluator enters.
Knocking M out splices ``return without_M(...)`` in place of M's body and leaves every other character alone. Identity
of programs and mechanisms (hashes, fingerprints): `forge.program_identity`.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Sequence
from functools import lru_cache

from forge.edits import normalize_newlines
from forge.errors import ProgramProblem
from forge.program_identity import ast_hash, mechanism_fingerprint, normalized_ast_hash
from forge.program_syntax import parse, top_level_bindings

__all__ = [
    "ProgramProblem",
    "ast_hash",
    "check_convention",
    "delegate",
    "diff",
    "knock_out",
    "mechanism_fingerprint",
    "mechanisms",
    "normalized_ast_hash",
    "parse",
    "top_level_bindings",
]


@lru_cache(maxsize=1024)
def mechanisms(source: str) -> tuple[str, ...]:
    """Return the names in ``MECHANISMS``.

    Raises:
        ProgramProblem: does not parse, or ``MECHANISMS`` is not one top-level tuple of distinct names.
    """
    return _mechanisms(parse(source))


def check_convention(source: str) -> tuple[str, ...]:
    """Return what breaks the program convention, as whole sentences; empty when nothing does."""
    try:
        tree = parse(source)
    except ProgramProblem as problem:
        return problem.problems
    problems: list[str] = []
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    entry = functions.get("quantize")
    if entry is None:
        problems.append("The program has no top-level function quantize(session).")
    elif [arg.arg for arg in _all_parameters(entry.args)] != ["session"]:
        problems.append(f"Line {entry.lineno}: quantize takes exactly one parameter, session.")
    try:
        names = _mechanisms(tree)
    except ProgramProblem as problem:
        return (*problems, *problem.problems)
    for name in names:
        problems += _check_mechanism(name, functions)
    bindings = top_level_bindings(tree)
    for name in ("quantize", "MECHANISMS", *names, *(f"without_{name}" for name in names)):
        lines = bindings.get(name, [])
        if len(lines) > 1:
            problems.append(f"{name} is bound {len(lines)} times at top level (lines {', '.join(map(str, lines))}).")
    fixed = {*names, *(f"without_{name}" for name in names), "quantize", "MECHANISMS"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global) and fixed & set(node.names):
            problems.append(
                f"Line {node.lineno}: {', '.join(sorted(fixed & set(node.names)))} is rebound through 'global'."
            )
    return tuple(problems)


def knock_out(source: str, names: Iterable[str]) -> str:
    r"""Return `source` with the body of every named mechanism replaced by ``return without_<name>(...)``.

    Signature, decorators, comments and everything else stay to the character, except that line ends become ``\n``.

    Raises:
        ProgramProblem: a name is no mechanism of the program, or the program breaks the convention.
    """
    problems = check_convention(source)
    if problems:
        raise ProgramProblem(problems)
    source = normalize_newlines(source)
    tree = parse(source)
    wanted = tuple(dict.fromkeys(names))
    known = _mechanisms(tree)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        listed = ", ".join(known) or "none"
        raise ProgramProblem(
            f"{', '.join(map(repr, unknown))} is no mechanism of the program; its mechanisms: {listed}."
        )
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    # From the last to the first, so that the positions of those still to do stay valid.
    for node in sorted((functions[name] for name in wanted), key=lambda node: node.lineno, reverse=True):
        source = _splice_body(source, node, f"without_{node.name}")
    parse(source)
    return source


def delegate(source: str, name: str, target: str) -> str:
    """Return `source` with the body of the top-level function `name` replaced by a call of `target` with its parameters.

    Raises:
        ProgramProblem: there is no such function.
    """
    source = normalize_newlines(source)
    found = [node for node in parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    if not found:
        raise ProgramProblem(f"The program has no top-level function {name}.")
    return _splice_body(source, found[-1], target)


def diff(parent: str, child: str, *, context: int = 3) -> str:
    """Return the unified diff from `parent` to `child`, empty when they are the same text."""
    return "".join(
        difflib.unified_diff(
            normalize_newlines(parent).splitlines(keepends=True),
            normalize_newlines(child).splitlines(keepends=True),
            "parent.py",
            "child.py",
            n=context,
        )
    )


def _mechanisms(tree: ast.Module) -> tuple[str, ...]:
    values = [value for target, value in _top_level_assignments(tree) if target == "MECHANISMS"]
    if len(values) != 1:
        raise ProgramProblem(
            f"MECHANISMS is assigned {len(values)} times at top level; once is needed, ('a', 'b') or ()."
        )
    value = values[0]
    if not isinstance(value, ast.Tuple):
        raise ProgramProblem("MECHANISMS is not a tuple written out, such as ('block_rotation',) or ().")
    names: list[str] = []
    for element in value.elts:
        name = element.value if isinstance(element, ast.Constant) else None
        if not isinstance(name, str) or not name.isidentifier():
            raise ProgramProblem(
                f"Line {element.lineno}: an entry of MECHANISMS is not the name of a function in quotes."
            )
        if name in names:
            raise ProgramProblem(f"Line {element.lineno}: MECHANISMS lists {name!r} twice.")
        names.append(name)
    return tuple(names)


def _top_level_assignments(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    pairs: list[tuple[str, ast.expr]] = []
    for node in tree.body:
        if isinstance(node, ast.Assign):
            pairs += [(target.id, node.value) for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            pairs.append((node.target.id, node.value))
    return pairs


def _check_mechanism(name: str, functions: dict[str, ast.FunctionDef]) -> list[str]:
    if name == "quantize" or name.startswith("without_"):
        return [f"MECHANISMS lists {name!r}, a name that the convention keeps for itself."]
    function, neutral = functions.get(name), functions.get(f"without_{name}")
    if function is None:
        return [f"MECHANISMS lists {name!r}, but there is no top-level function {name}."]
    if neutral is None:
        return [f"Mechanism {name!r} lacks its neutral: a top-level function without_{name} with the same parameters."]
    if _shape(function.args) != _shape(neutral.args):
        return [
            f"Line {neutral.lineno}: without_{name}({ast.unparse(neutral.args)}) must take the parameters of "
            f"{name}({ast.unparse(function.args)}): same names, same kinds, same order."
        ]
    if f"without_{name}" in [arg.arg for arg in _all_parameters(function.args)]:
        return [f"Line {function.lineno}: a parameter of {name} hides the function without_{name}."]
    return []


def _all_parameters(arguments: ast.arguments) -> list[ast.arg]:
    stars = [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars]


def _shape(arguments: ast.arguments) -> Sequence[object]:
    return (
        [arg.arg for arg in arguments.posonlyargs],
        [arg.arg for arg in arguments.args],
        arguments.vararg.arg if arguments.vararg else None,
        [arg.arg for arg in arguments.kwonlyargs],
        arguments.kwarg.arg if arguments.kwarg else None,
    )


def _call(target: str, arguments: ast.arguments) -> str:
    passed = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args)]
    if arguments.vararg:
        passed.append(f"*{arguments.vararg.arg}")
    passed += [f"{arg.arg}={arg.arg}" for arg in arguments.kwonlyargs]
    if arguments.kwarg:
        passed.append(f"**{arguments.kwarg.arg}")
    return f"return {target}({', '.join(passed)})"


def _splice_body(source: str, node: ast.FunctionDef, target: str) -> str:
    # Positions of the syntax tree are UTF-8 offsets within lines.
    lines = [line.encode() for line in source.split("\n")]
    first, last = node.body[0], node.body[-1]
    first_line, first_column = first.lineno, first.col_offset
    decorators = getattr(first, "decorator_list", None)
    if decorators:
        # A decorated definition begins at its '@', which stands alone before the expression on its line.
        first_line = decorators[0].lineno
        while not lines[first_line - 1].lstrip().startswith(b"@"):
            first_line -= 1
        first_column = lines[first_line - 1].index(b"@")
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    head = lines[: first_line - 1] + [lines[first_line - 1][:first_column] + _call(target, node.args).encode()]
    tail = lines[last.end_lineno - 1][last.end_col_offset :]
    head[-1] += tail
    return b"\n".join([*head, *lines[last.end_lineno :]]).decode()
