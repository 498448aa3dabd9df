"""A mechanism of one program put in the place of another program's: what tells that two mechanisms install the same.

Code can be rewritten without end, and its fingerprint changes each time; what it installs does not. The function that is to
be compared gets a body that calls the other one, which comes along with everything at the top level of its own file, closed
in a function so that no names meet.
"""

from __future__ import annotations

import ast

from forge import program_source
from forge.errors import ProgramProblem
from forge.program_syntax import parse


def graft(source: str, name: str, donor: str, donor_name: str) -> str | None:
    """Return `source` with function `name` doing what `donor_name` of the program `donor` does.

    None where the two cannot stand for each other: one is missing, their parameters differ in number or kind, or the donor's
    code only works at the top level of its file.
    """
    try:
        own, other = _function(source, name), _function(donor, donor_name)
    except ProgramProblem:
        return None
    if own is None or other is None or _kinds(own.args) != _kinds(other.args):
        return None
    carried = [statement for statement in parse(donor).body if not _stays(statement)]
    if any(isinstance(node, ast.Global) for statement in carried for node in ast.walk(statement)):
        return None
    made = f"grafted_{name}"
    maker = ast.parse(f"def make_{made}():\n    return {donor_name}")
    (function,) = maker.body
    assert isinstance(function, ast.FunctionDef)
    function.body[:0] = carried
    text = ast.unparse(ast.fix_missing_locations(maker))
    return f"{program_source.delegate(source, name, made)}\n\n\n{text}\n\n\n{made} = make_{made}()\n"


def _function(source: str, name: str) -> ast.FunctionDef | None:
    found = [node for node in parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found[-1] if found else None


def _kinds(arguments: ast.arguments) -> tuple[object, ...]:
    """What a call by position, and by name where that is the only way, depends on."""
    return (
        len(arguments.posonlyargs) + len(arguments.args),
        arguments.vararg is not None,
        sorted(arg.arg for arg in arguments.kwonlyargs),
        arguments.kwarg is not None,
    )


def _stays(statement: ast.stmt) -> bool:
    """Whether a statement of the donor is of no use inside a function: its entry, its list of mechanisms, its text."""
    if isinstance(statement, ast.ImportFrom):
        return statement.module == "__future__"
    if isinstance(statement, ast.FunctionDef):
        return statement.name == "quantize"
    if isinstance(statement, ast.Assign):
        return [getattr(target, "id", "") for target in statement.targets] == ["MECHANISMS"]
    return isinstance(statement, ast.Expr)
