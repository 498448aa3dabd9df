"""Checks of a program's text before anything runs: they spare evaluator calls and catch slips early.

They are no defence. Whoever wants around them gets around them, and the sandbox is built for that: the worker has no
network, no files of ours and no split, and scores are computed elsewhere. What these rules buy is a clear sentence for
the honest writer, and programs that a reader and the probes can trust to be what they look like.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from forge.errors import ProgramProblem
from forge.program_syntax import parse, top_level_bindings

__all__ = ["ALLOWED_IMPORTS", "MAX_SOURCE_BYTES", "static_problems"]

MAX_SOURCE_BYTES = 64 * 1024
ALLOWED_IMPORTS = ("torch", "math", "forge_kernels")

_FORBIDDEN_NAMES = frozenset("exec eval compile open breakpoint globals locals vars setattr delattr".split())
_FORBIDDEN_TORCH = frozenset(
    "load save hub multiprocessing distributed package utils ops classes jit compile cpp_extension _C _ops".split()
)
_DUNDER = re.compile(r"__[A-Za-z0-9_]*__")
_CODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_TOP_LEVEL = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


def static_problems(source: str) -> tuple[str, ...]:
    """Return what the text may not hold, as whole sentences; empty when nothing is wrong.

    The program convention is checked apart, by `forge.program_source.check_convention`.
    """
    try:
        size = len(source.encode("utf-8"))
    except UnicodeEncodeError as err:
        return (f"The program holds a character that is no Unicode text, at position {err.start}.",)
    if size > MAX_SOURCE_BYTES:
        return (f"The program has {size} bytes; at most {MAX_SOURCE_BYTES} are allowed.",)
    try:
        tree = parse(source)
    except ProgramProblem as problem:
        return problem.problems
    problems = [*_coding(source), *_top_level(tree), *_duplicates(tree)]
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    torch_names = _names_of_torch(tree)
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        problems += [f"Line {getattr(node, 'lineno', 0)}: {text}" for text in _node_problems(node, torch_names)]
    return tuple(dict.fromkeys(problems))


def _coding(source: str) -> Iterator[str]:
    for line in source.split("\n")[:2]:
        match = _CODING.match(line)
        if match and match[1].lower().replace("_", "-") not in ("utf-8", "ascii", "us-ascii"):
            yield f"The program declares the source encoding {match[1]!r}; it is always UTF-8."


def _top_level(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not isinstance(node, _TOP_LEVEL) and not is_text:
            yield (
                f"Line {node.lineno}: a top-level {type(node).__name__} statement; the top level holds imports, "
                "constants, functions and classes only, everything else belongs into quantize(session)."
            )


def _duplicates(tree: ast.Module) -> Iterator[str]:
    for name, lines in top_level_bindings(tree).items():
        if len(lines) > 1:
            listed = ", ".join(map(str, lines))
            yield f"{name} is defined {len(lines)} times at top level (lines {listed}); only the last would count."


def _names_of_torch(tree: ast.Module) -> frozenset[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names if alias.name == "torch"}
    return frozenset(names)


def _node_problems(node: ast.AST, torch_names: frozenset[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _import_problems(alias.name)
    elif isinstance(node, ast.ImportFrom):
        yield from _import_from_problems(node)
    elif isinstance(node, ast.Name):
        if node.id in _FORBIDDEN_NAMES or _DUNDER.fullmatch(node.id):
            yield f"the name {node.id} may not be used in a program."
    elif isinstance(node, ast.Attribute):
        if _DUNDER.fullmatch(node.attr):
            yield f"the attribute .{node.attr} may not be used in a program."
        elif node.attr in _FORBIDDEN_TORCH and isinstance(node.value, ast.Name) and node.value.id in torch_names:
            yield f"torch.{node.attr} may not be used in a program."
    elif isinstance(node, ast.Constant):
        text = node.value
        if isinstance(text, str | bytes) and _DUNDER.search(text if isinstance(text, str) else text.decode("latin-1")):
            yield "a string with a double-underscore name may not be used in a program."
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        name = node.args[1] if len(node.args) > 1 else None
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            yield f"{node.func.id} takes an attribute name written out in quotes, or better: write object.name."
    elif isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
        yield "asynchronous code has no place in a program."


def _import_problems(module: str) -> Iterator[str]:
    root, _, rest = module.partition(".")
    if root not in ALLOWED_IMPORTS:
        yield f"import of {module}; a program may import {', '.join(ALLOWED_IMPORTS)} and nothing else."
    elif root == "torch" and set(rest.split(".")) & _FORBIDDEN_TORCH:
        yield f"import of {module}, which may not be used in a program."


def _import_from_problems(node: ast.ImportFrom) -> Iterator[str]:
    module = "." * node.level + (node.module or "")
    if module == "__future__":
        return
    yield from _import_problems(module)
    for alias in node.names:
        if alias.name == "*":
            yield f"from {module} import *; name what is imported."
        elif _DUNDER.fullmatch(alias.name) or (module.split(".")[0] == "torch" and alias.name in _FORBIDDEN_TORCH):
            yield f"import of {module}.{alias.name}, which may not be used in a program."
