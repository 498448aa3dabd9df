"""Whether the edits of a control change what it says that it removes, and leave everything else alone.

A control that removes A and in fact alters B would be taken for evidence about A. So A must have other code, or nothing may
call it any more; and apart from A and the code that A alone uses, only statements that mention A may change. New statements
may come in a function that mentions A: what stands in for it has to stand somewhere.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from forge import program_source
from forge.program_identity import imported_names, own_fingerprint, reached_beside
from forge.program_syntax import parse

_Binding = ast.FunctionDef | ast.Assign | ast.AnnAssign
_Holding = ast.stmt | ast.ExceptHandler | ast.match_case


class _Line(NamedTuple):
    """A statement, or the head of one that holds others: its text without layout, and the names in it."""

    text: str
    names: frozenset[str]


def removal_problems(removes: Sequence[str], source: str, *, child: str) -> list[str]:
    """Return which of the mechanisms stand in the control as they stand in the child."""
    declared = program_source.mechanisms(source)
    mentioned = {
        node.id
        for name, binding in _bindings(source).items()
        for node in ast.walk(binding)
        if isinstance(node, ast.Name) and node.id != name
    }
    return [
        f"{name!r} is still there as it was; change its body, or replace the calls of it"
        for name in removes
        if name in declared and name in mentioned and own_fingerprint(source, name) == own_fingerprint(child, name)
    ]


def foreign_changes(removes: Sequence[str], source: str, *, base: str) -> list[str]:
    """Return what the edits change in `base` besides the mechanisms that they remove."""
    before, after = _bindings(base), _bindings(source)
    parts = {*program_source.mechanisms(base), *(f"without_{name}" for name in program_source.mechanisms(base))}
    is_there = any(name in before for name in removes)
    problems = []
    for name in sorted((reached_beside(base, removes) & before.keys()) - {*removes, "MECHANISMS"}):
        if name not in after:
            problems.append(f"it takes {name!r} out")
            continue
        old, new = list(_lines(before[name])), list(_lines(after[name]))
        if [line.text for line in old] == [line.text for line in new]:
            continue
        kept = [line.text for line in old if not line.names & set(removes)]
        # Where the program never had the mechanism, nothing mentions it: there something stands in for what is not there.
        stands_in = len(kept) < len(old) and _is_subsequence(kept, [line.text for line in new])
        if not stands_in and (is_there or name in parts):
            problems.append(f"it changes {name!r} too")
    known, now = imported_names(base), imported_names(source)
    problems += [f"it gives {name!r} another meaning" for name in known if now.get(name, known[name]) != known[name]]
    # A second binding of an imported name is no program at all; that of a builtin is one.
    anew = sorted(name for name in after.keys() - before.keys() if hasattr(builtins, name))
    return problems + [f"it binds {name!r} anew" for name in anew]


def _bindings(source: str) -> dict[str, _Binding]:
    """Return top-level functions and values by name."""
    found: dict[str, _Binding] = {}
    for node in parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {part.id: node for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
    return found


def _lines(binding: _Binding) -> Iterator[_Line]:
    """Yield the lines of a binding; docstrings do not count."""
    if isinstance(binding, ast.FunctionDef):
        yield _line("def", [binding.args, *binding.decorator_list])
        yield from _flat(binding.body)
    else:
        yield _line("", [binding])


def _flat(body: Sequence[_Holding]) -> Iterator[_Line]:
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        fields = list(ast.iter_fields(statement))
        inner = [(name, value) for name, value in fields if _holds_statements(value)]
        if not inner:
            yield _line("", [statement])
            continue
        items = [item for _, value in fields for item in (value if isinstance(value, list) else [value])]
        heads = [item for item in items if isinstance(item, ast.AST) and not isinstance(item, _Holding)]
        named = " ".join(item for item in items if isinstance(item, str))
        yield _line(f"{type(statement).__name__} {named}", heads)
        for name, value in inner:
            yield _line(f"{name}:", [])
            yield from _flat(value)
        yield _line("end", [])


def _holds_statements(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], _Holding)


def _line(head: str, nodes: Sequence[ast.AST]) -> _Line:
    names = {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}
    return _Line(" ".join([head, *(ast.dump(node) for node in nodes)]), frozenset(names))


def _is_subsequence(part: Sequence[str], whole: Sequence[str]) -> bool:
    left = iter(whole)
    return all(line in left for line in part)
