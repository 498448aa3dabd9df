"""Weave an entry of the catalogue into a staged program, as the SEARCH/REPLACE blocks of a reply.

A staged program has the four stage functions of ``forge/programs/rtn.py``. An entry adds its mechanism and the neutral of
that mechanism before the stage it belongs to, names it in ``MECHANISMS`` and hooks it into the stage. Everything goes
through `forge.edits.apply_edits` like an answer of a language model: a block whose lines are not there, or are there twice,
makes the entry not applicable to that program.
"""

from __future__ import annotations

import ast

from forge.edits import EditBlock, EditProblem, apply_edits
from forge.proposers.catalogue.entry import ControlText, Edit, Entry, Hook


class NotApplicable(Exception):
    """The entry cannot be woven into this program."""


def weave(entry: Entry, source: str) -> tuple[EditBlock, ...]:
    """Return the blocks that put `entry` into `source`.

    Raises:
        NotApplicable: a line that the entry hooks into is missing or ambiguous, or the program has no such stage.
    """
    blocks: list[EditBlock] = []
    code = entry.code
    tree = ast.parse(source)
    for hook in entry.hooks:
        hooked, returned = _hook_blocks(hook, source, tree)
        blocks += hooked
        code = code.replace("{returned}", returned) if returned else code
    # Before anything is inserted: the line after a removed function must still be the one that follows it here.
    for mechanism in entry.drops:
        blocks += [_removal_block(name, source, tree) for name in (mechanism, f"without_{mechanism}")]
    if code:
        if entry.stage is None:
            raise NotApplicable(f"{entry.key!r} adds functions but names no stage")
        anchor = _definition_line(entry.stage, source, tree)
        blocks.append(EditBlock(search=anchor, replace=f"{code.strip()}\n\n\n{anchor}"))
    if entry.adds or entry.drops:
        blocks.append(_mechanisms_block(entry.adds, entry.drops, source, tree))
    blocks += [EditBlock(search=edit.search, replace=edit.replace) for edit in entry.edits]
    blocks += _import_blocks(entry.imports, entry.torch, source, tree)
    _check(blocks, source)
    return tuple(blocks)


def weave_control(control: ControlText, child: str) -> tuple[EditBlock, ...]:
    """Return the blocks of a substitute control against the child's source."""
    tree = ast.parse(child)
    blocks = [EditBlock(search=edit.search, replace=edit.replace) for edit in control.edits]
    blocks += _import_blocks(control.imports, False, child, tree)
    _check(blocks, child)
    return tuple(blocks)


def is_edit_applicable(edit: Edit, source: str) -> bool:
    """Whether the lines of `edit` stand exactly once in `source`."""
    try:
        apply_edits(source, [EditBlock(search=edit.search, replace=edit.replace)])
    except EditProblem:
        return False
    return True


def _check(blocks: list[EditBlock], source: str) -> None:
    try:
        apply_edits(source, blocks)
    except EditProblem as err:
        raise NotApplicable(str(err)) from err


def _function(name: str, tree: ast.Module) -> ast.FunctionDef:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise NotApplicable(f"the program has no function {name!r}")


def _definition_line(name: str, source: str, tree: ast.Module) -> str:
    return source.splitlines()[_function(name, tree).lineno - 1]


def _hook_blocks(hook: Hook, source: str, tree: ast.Module) -> tuple[list[EditBlock], str]:
    """Return the blocks of one hook, and the expression that `hook.returned` displaced."""
    lines = source.splitlines()
    if hook.returned is not None:
        last = _function(hook.returned, tree).body[-1]
        if not isinstance(last, ast.Return) or last.value is None or last.end_lineno is None:
            raise NotApplicable(f"{hook.returned!r} does not end by returning a value")
        old = "\n".join(lines[last.lineno - 1 : last.end_lineno])
        returned = ast.get_source_segment(source, last.value)
        if returned is None:
            raise NotApplicable(f"the value that {hook.returned!r} returns has no source")
        return [EditBlock(search=old, replace=hook.replace)], returned
    if not hook.fragment:
        return [EditBlock(search=hook.search, replace=hook.replace)], ""
    kept: range = range(0)
    if hook.keep_out_of is not None:
        outside = _function(hook.keep_out_of, tree)
        kept = range(outside.lineno, (outside.end_lineno or outside.lineno) + 1)
    blocks = []
    for number, line in enumerate(lines, 1):
        if hook.search in line and number not in kept:
            blocks.append(EditBlock(search=line, replace=line.replace(hook.search, hook.replace)))
    if not blocks:
        raise NotApplicable(f"{hook.search!r} stands nowhere in the program")
    return blocks, ""


def _mechanisms_block(added: tuple[str, ...], dropped: tuple[str, ...], source: str, tree: ast.Module) -> EditBlock:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MECHANISMS":
            old = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
            names = [name for name in ast.literal_eval(node.value) if name not in dropped] + list(added)
            listed = ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")
            return EditBlock(search=old, replace=f"MECHANISMS = ({listed})")
    raise NotApplicable("the program has no MECHANISMS")


def _removal_block(name: str, source: str, tree: ast.Module) -> EditBlock:
    node = _function(name, tree)
    lines = source.splitlines()
    end = node.end_lineno or node.lineno
    while end < len(lines) and not lines[end].strip():
        end += 1
    following = lines[end] if end < len(lines) else ""
    return EditBlock(search="\n".join(lines[node.lineno - 1 : end] + [following]), replace=following)


def _import_blocks(imports: tuple[str, ...], torch: bool, source: str, tree: ast.Module) -> list[EditBlock]:
    """Return the block that brings the `forge_kernels` import (and ``import torch``) up to date, if anything is missing."""
    has_torch = any(isinstance(node, ast.Import) and node.names[0].name == "torch" for node in tree.body)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "forge_kernels":
            old = "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])
            present = {alias.name for alias in node.names}
            names = sorted(present | set(imports), key=lambda name: (name.lower(), name))
            new = f"from forge_kernels import {', '.join(names)}"
            if len(new) > 120:
                new = "from forge_kernels import (\n" + "".join(f"    {name},\n" for name in names) + ")"
            if torch and not has_torch:
                new = f"import torch\n{new}"
            return [] if new == old else [EditBlock(search=old, replace=new)]
    raise NotApplicable("the program does not import forge_kernels")
