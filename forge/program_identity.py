"""When two programs, or two mechanisms, are the same: hashes of the syntax tree at three depths.

`ast_hash` ignores comments, docstrings and formatting. `normalized_ast_hash` also ignores names, annotations, the order
of definitions and code that is never reached: the same program under other words. `mechanism_fingerprint` does that for
one function with all it calls, so that a refuted mechanism is known again under another name; `mechanism_shape` also leaves
out the numbers, so that it is known again with another constant. `own_fingerprint` leaves out what the mechanism shares
with other code, so that a mechanism counts as altered only where its own code was.

The canonical text is our own (not `ast.dump`, whose form changes between Python versions): every node as
``(Type field ...)`` without empty fields. Local names become numbers in the order they appear within their scope; names
defined in the file become numbers in the order they are first reached from the root; imported names become the thing
imported (``import torch as t`` and ``from math import sqrt as s`` lose their aliases); attributes, keywords of foreign
functions and builtins keep their names.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache

from forge.errors import ProgramProblem
from forge.program_syntax import parse

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


_remembered = lru_cache(maxsize=1024)
"""A campaign asks the same of the same few programs at every step."""


@_remembered
def ast_hash(source: str) -> str:
    """Return the sha256 of the tree, names kept; comments, docstrings, formatting and ``pass`` do not count."""
    return _digest(_Writer(None).write(parse(source)))


@_remembered
def normalized_ast_hash(source: str) -> str:
    """Return the sha256 of what the program does: ``quantize``, all it reaches, its mechanisms and their neutrals."""
    definitions = _definitions(source)
    neutrals = sorted(
        definitions.canonical((name, f"without_{name}"))
        for name in definitions.mechanism_names()
        if name in definitions
    )
    return _digest("\n".join([definitions.canonical(("quantize",)), *neutrals, *definitions.loose_statements()]))


@_remembered
def mechanism_fingerprint(source: str, name: str) -> str:
    """Return the sha256 of the top-level function `name` and everything it reaches, whatever it is all called.

    Raises:
        ProgramProblem: does not parse, or has no such function.
    """
    definitions = _definitions(source)
    if name not in definitions:
        raise ProgramProblem(f"The program has no top-level function {name}.")
    return _digest(definitions.canonical((name,)))


@_remembered
def mechanism_shape(source: str, name: str) -> str:
    """Return what `mechanism_fingerprint` returns with every number replaced by one and the same.

    Raises:
        ProgramProblem: does not parse, or has no such function.
    """
    definitions = _definitions(source)
    if name not in definitions:
        raise ProgramProblem(f"The program has no top-level function {name}.")
    return _digest(definitions.canonical((name,), numbers=False))


def reached_beside(source: str, names: Collection[str]) -> frozenset[str]:
    """Return what ``quantize`` and the mechanisms and neutrals that are not in `names` reach without entering `names`."""
    definitions = _definitions(source)
    others = [name for name in definitions.mechanism_names() if name not in names]
    roots = ["quantize", *others, *(f"without_{name}" for name in others)]
    return definitions.reached([name for name in roots if name in definitions], leave_out=names)


def imported_names(source: str) -> dict[str, str]:
    """Return the names that a program imports at top level, and what each means, as dotted paths."""
    return dict(_definitions(source).imports)


@_remembered
def own_fingerprint(source: str, name: str) -> str:
    """Return the sha256 of a mechanism and its neutral with the code that only mechanisms use.

    Other mechanisms, and what the program uses outside its mechanisms, count by their names: changing them changes no mechanism
    in particular, while going over from one to another does.

    Raises:
        ProgramProblem: does not parse, or has no such function.
    """
    definitions = _definitions(source)
    if name not in definitions:
        raise ProgramProblem(f"The program has no top-level function {name}.")
    mechanisms = set(definitions.mechanism_names())
    shared = mechanisms | definitions.reached(("quantize",), leave_out=mechanisms)
    texts = [
        definitions.canonical((root,), leave_out=shared - {root})
        for root in (name, f"without_{name}")
        if root in definitions
    ]
    return _digest("\n".join(texts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@lru_cache(maxsize=64)
def _definitions(source: str) -> _Definitions:
    return _Definitions(parse(source))


class _Definitions:
    """The top-level bindings of a program: names to the statements that bind them, and imports to what they mean."""

    def __init__(self, tree: ast.Module) -> None:
        self.statements: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, str] = {}
        self._loose: list[ast.stmt] = []
        for statement in tree.body:
            names = list(_bound_by(statement))
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self.imports.update(_imported(statement))
            elif names:
                for name in names:
                    self.statements.setdefault(name, []).append(statement)
            elif not _is_inert(statement):
                self._loose.append(statement)

    def __contains__(self, name: str) -> bool:
        return name in self.statements

    def mechanism_names(self) -> list[str]:
        return [
            element.value
            for statement in self.statements.get("MECHANISMS", [])
            for element in ast.walk(statement)
            if isinstance(element, ast.Constant) and isinstance(element.value, str)
        ]

    def function(self, name: str) -> _FunctionNode | None:
        statements = self.statements.get(name, [])
        last = statements[-1] if statements else None
        return last if isinstance(last, _FunctionNode) else None

    def canonical(self, roots: Iterable[str], *, numbers: bool = True, leave_out: Collection[str] = ()) -> str:
        """Return the canonical text of `roots` and all they reach, breadth first in order of first mention.

        Definitions in `leave_out` are not entered and keep their names.
        """
        return self._walk(roots, numbers=numbers, leave_out=leave_out)[0]

    def reached(self, roots: Iterable[str], *, leave_out: Collection[str] = ()) -> frozenset[str]:
        """Return the names that `canonical` enters."""
        return frozenset(self._walk(roots, numbers=True, leave_out=leave_out)[1])

    def _walk(self, roots: Iterable[str], *, numbers: bool, leave_out: Collection[str]) -> tuple[str, list[str]]:
        writer = _Writer(self, numbers=numbers, leave_out=leave_out)
        for root in roots:
            writer.number(root)
        written = 0
        parts: list[str] = []
        while written < len(writer.reached):
            name = writer.reached[written]
            parts += [writer.write(statement) for statement in self.statements.get(name, [])]
            written += 1
        return "\n".join(parts), writer.reached

    def loose_statements(self) -> list[str]:
        return [_Writer(self).write(statement) for statement in self._loose]


class _Scope:
    """Names local to a function, lambda or comprehension, numbered as they are first written."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))


class _Writer:
    """Writes nodes canonically. Without definitions nothing is renamed; without `numbers` all numbers are one."""

    def __init__(
        self, definitions: _Definitions | None, *, numbers: bool = True, leave_out: Collection[str] = ()
    ) -> None:
        self._definitions = definitions
        self._numbers = numbers
        self._leave_out = leave_out
        self._scopes: list[_Scope] = []
        self.reached: list[str] = []

    def number(self, name: str) -> int:
        """Return the number of a name defined in the file, noting that it is reached."""
        if name not in self.reached:
            self.reached.append(name)
        return self.reached.index(name)

    def write(self, node: ast.AST) -> str:
        if self._definitions is None:
            return self._fields(node)
        if isinstance(node, ast.Name):
            return f"(Name {self._name(node.id)} {type(node.ctx).__name__})"
        if isinstance(node, ast.Global | ast.Nonlocal):
            return f"({type(node).__name__} {' '.join(self._name(name) for name in node.names)})"
        if not self._numbers and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
            return self.write(node.operand)
        if isinstance(node, ast.AnnAssign) and node.value is not None and node.simple:
            return f"(Assign targets=[{self.write(node.target)}] value={self.write(node.value)})"
        if isinstance(node, _FunctionNode):
            return self._function(node)
        if isinstance(node, ast.Lambda):
            defaults = self._defaults(node.args)
            with_names = _Scope([*_parameters(node.args), *_bound_in([node.body])])
            return f"(Lambda {defaults} {self._scoped(with_names, [node.args, node.body])})"
        if isinstance(node, _Comprehension):
            return self._comprehension(node)
        if isinstance(node, ast.arguments):
            return self._arguments(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.ClassDef):
            return self._class(node)
        if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            return f"({self._name(node.name)} {self._fields(node, skip=('name',))})"
        if isinstance(node, ast.Import | ast.ImportFrom):
            return " ".join(f"({self._name(local)} = {meant})" for local, meant in sorted(_imported(node).items()))
        return self._fields(node)

    def _fields(self, node: ast.AST, skip: tuple[str, ...] = ()) -> str:
        if isinstance(node, ast.Constant):
            if not self._numbers and isinstance(node.value, int | float | complex) and not isinstance(node.value, bool):
                return "(Constant number)"
            return f"(Constant {type(node.value).__name__} {node.value!r})"
        parts = [type(node).__name__]
        for name, value in ast.iter_fields(node):
            if name in skip or name in ("type_comment", "kind", "type_params") or value is None:
                continue
            if isinstance(value, list):
                if name in ("body", "orelse", "finalbody"):
                    value = [item for item in value if not _is_inert(item)]
                if value:
                    parts.append(f"{name}=[{' '.join(self._value(item) for item in value)}]")
            else:
                parts.append(f"{name}={self._value(value)}")
        return f"({' '.join(parts)})"

    def _value(self, value: object) -> str:
        return self.write(value) if isinstance(value, ast.AST) else repr(value)

    def _name(self, name: str) -> str:
        for depth, scope in enumerate(reversed(self._scopes)):
            if name in scope.names:
                return f"local:{depth}:{scope.number(name)}"
        assert self._definitions is not None
        if name in self._definitions.imports:
            return f"import:{self._definitions.imports[name]}"
        if name in self._leave_out:
            return f"shared:{name}"
        if name in self._definitions:
            return f"own:{self.number(name)}"
        return f"name:{name}"

    def _scoped(self, scope: _Scope, nodes: Iterable[ast.AST]) -> str:
        self._scopes.append(scope)
        try:
            return " ".join(self.write(node) for node in nodes)
        finally:
            self._scopes.pop()

    def _function(self, node: _FunctionNode) -> str:
        outside = [self.write(decorator) for decorator in node.decorator_list]
        outside += [self._name(node.name), self._defaults(node.args)]
        outer = {name for part in ast.walk(node) if isinstance(part, ast.Global | ast.Nonlocal) for name in part.names}
        names = {*_parameters(node.args), *(name for name in _bound_in(node.body) if name not in outer)}
        body = [statement for statement in node.body if not _is_inert(statement)]
        return f"({type(node).__name__} {' '.join(outside)} {self._scoped(_Scope(names), [node.args, *body])})"

    def _defaults(self, arguments: ast.arguments) -> str:
        defaults = [*arguments.defaults, *arguments.kw_defaults]
        return f"[{' '.join('-' if default is None else self.write(default) for default in defaults)}]"

    def _arguments(self, node: ast.arguments) -> str:
        groups = [node.posonlyargs, node.args, node.kwonlyargs]
        parts = [" ".join(self._name(argument.arg) for argument in group) for group in groups]
        parts += ["" if star is None else self._name(star.arg) for star in (node.vararg, node.kwarg)]
        return f"(arguments {' / '.join(parts)})"

    def _comprehension(self, node: _Comprehension) -> str:
        # The first iterable belongs to the scope outside; the rest sees the comprehension's own names.
        first = self.write(node.generators[0].iter)
        names = [name for part in node.generators for name in _bound_in([part.target])]
        inner: list[ast.AST] = [node.generators[0].target, *node.generators[0].ifs, *node.generators[1:]]
        inner += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return f"({type(node).__name__} {len(node.generators[0].ifs)} {first} {self._scoped(_Scope(names), inner)})"

    def _call(self, node: ast.Call) -> str:
        parameters: list[str] = []
        if isinstance(node.func, ast.Name) and not any(node.func.id in scope.names for scope in self._scopes):
            assert self._definitions is not None
            function = self._definitions.function(node.func.id)
            parameters = _parameters(function.args) if function is not None else []
        keywords = []
        for keyword in node.keywords:
            name = f"parameter:{parameters.index(keyword.arg)}" if keyword.arg in parameters else repr(keyword.arg)
            keywords.append(f"{name}={self.write(keyword.value)}")
        arguments = " ".join(self.write(argument) for argument in node.args)
        return f"(Call {self.write(node.func)} [{arguments}] [{' '.join(keywords)}])"

    def _class(self, node: ast.ClassDef) -> str:
        # Names in a class body are attributes: they are reached by name from anywhere, so they stay.
        return f"(ClassDef {self._name(node.name)} {self._fields(node, skip=('name',))})"


def _is_inert(node: ast.AST) -> bool:
    """Docstrings, other bare constants and ``pass``."""
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _parameters(arguments: ast.arguments) -> list[str]:
    stars = [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
    return [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars)]


def _bound_by(statement: ast.stmt) -> Iterator[str]:
    yield from dict.fromkeys(_bound_in([statement]))


def _bound_in(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that `nodes` bind in their own scope, not in functions or comprehensions inside it."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, _FunctionNode | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, _Comprehension):
            # Only ':=' inside a comprehension binds outside it.
            yield from (part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
            continue
        pending.extend(ast.iter_child_nodes(node))


def _imported(statement: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Return local names and what they mean, as dotted paths."""
    if isinstance(statement, ast.Import):
        return {
            alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0]
            for alias in statement.names
        }
    module = "." * statement.level + (statement.module or "")
    return {alias.asname or alias.name: f"{module}.{alias.name}" for alias in statement.names}
