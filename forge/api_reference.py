"""The reference of what a program can call, made from the docstrings of the code itself, so that it cannot drift."""

from __future__ import annotations

import dataclasses
import functools
import inspect

import forge_kernels
from evaluators import session

__all__ = ["kernels_reference", "session_reference"]

_ALIASES = ("Stream", "LayerRole", "GroupRole", "SiteKind")


@functools.cache
def session_reference() -> str:
    """Return the reference of `evaluators.session`: layers, groups, sites, and every method of `Session`."""
    parts = [
        "\n".join(f"{name} = {_plain(repr(getattr(session, name)))}" for name in _ALIASES),
        *(_class(cls) for cls in (session.Layer, session.Group, session.Site)),
    ]
    body = [f"class Session:  # the argument of quantize(session)\n{_indent(_doc(session.Session))}", ""]
    body += [f"    {name}: {text}" for name, text in session.Session.__annotations__.items()]
    methods = [
        member
        for name, member in vars(session.Session).items()
        if inspect.isfunction(member) and not name.startswith("_")
    ]
    body += [f"\n{_indent(_function(method))}" for method in methods]
    return "\n\n".join([*parts, "\n".join(body)])


@functools.cache
def kernels_reference() -> str:
    """Return the reference of everything that `forge_kernels` exports."""
    parts = []
    for name in sorted(forge_kernels.__all__, key=lambda name: (name.islower(), name)):
        member = getattr(forge_kernels, name)
        if inspect.isclass(member):
            parts.append(_class(member))
        elif inspect.isfunction(member):
            parts.append(_function(member))
        else:
            parts.append(f"{name} = {_plain(repr(member))}")
    return "\n\n".join(parts)


def _class(cls: type) -> str:
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    lines = [f"class {cls.__name__}:", _indent(_doc(cls))]
    for field in fields:
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        lines.append(f"    {field.name}: {field.type}{default}")
    return "\n".join(lines)


def _function(function: object) -> str:
    assert inspect.isfunction(function)
    parameters: list[str] = []
    star = False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        text = parameter.name
        if parameter.annotation is not parameter.empty:
            text += f": {parameter.annotation}"
        if parameter.default is not parameter.empty:
            text += f" = {parameter.default!r}"
        parameters.append(text)
    result = function.__annotations__.get("return", "")
    return f"def {function.__name__}({', '.join(parameters)}) -> {result}:\n{_indent(_doc(function))}"


def _doc(member: object) -> str:
    text = inspect.getdoc(member) or ""
    return f'"""{text}"""' if "\n" not in text else f'"""{text}\n"""'


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.split("\n"))


def _plain(text: str) -> str:
    return text.replace("forge_kernels.transforms.", "").replace("typing.", "")
