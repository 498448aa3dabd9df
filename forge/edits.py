"""SEARCH/REPLACE blocks: how a proposer changes a program.

A block names lines that stand exactly once in the program and the lines that take their place::

    <<<<<<< SEARCH
    lines of the program
    =======
    lines that replace them
    >>>>>>> REPLACE

All blocks of a reply apply, in order and each to the text the blocks before it left, or none does. Matching is by whole
lines; line endings and blanks at the end of a line never count. Lost indentation is recovered only when one uniform
shift at one place explains it. Nothing here reads the program's meaning: that is `forge.program_source`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from forge.errors import EditProblem, TruncatedReply

__all__ = [
    "EditBlock",
    "EditProblem",
    "apply_edits",
    "is_divider",
    "is_end",
    "is_start",
    "normalize_newlines",
    "parse_blocks",
    "render_blocks",
]

_START = re.compile(r" {0,3}<{5,9}[ \t]*SEARCH[ \t]*$")
_DIVIDER = re.compile(r"={7}[ \t]*$")
_END = re.compile(r" {0,3}>{5,9}[ \t]*REPLACE[ \t]*$")
_STRAY_MARKER = re.compile(r"\s*(<{4,}|>{4,}|={7,}\s*$)")
_LISTING_PREFIX = re.compile(r"\s*\d+ ?[|:]")

MAX_SHOWN_LINES = 12
MAX_SHOWN_CHARS = 160
MAX_BLOCKS = 64


@dataclass(frozen=True, kw_only=True)
class EditBlock:
    """One replacement; texts without the final newline. `line` is where it began in the reply, 0 when unknown."""

    search: str
    replace: str
    line: int = 0


def normalize_newlines(text: str) -> str:
    r"""Return `text` with ``\r\n`` and ``\r`` as ``\n``."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def is_start(line: str) -> bool:
    """Whether `line` opens a block."""
    return _START.match(line) is not None


def is_divider(line: str) -> bool:
    """Whether `line` separates SEARCH from REPLACE."""
    return _DIVIDER.match(line) is not None


def is_end(line: str) -> bool:
    """Whether `line` closes a block."""
    return _END.match(line) is not None


def parse_blocks(text: str, *, first_line: int = 1) -> tuple[EditBlock, ...]:
    """Return the blocks of `text` in order; other lines around them are comments of the writer and ignored.

    Args:
        text: the body of an edits section.
        first_line: number of its first line in the reply, for messages.

    Raises:
        TruncatedReply: the text ends inside a block.
        EditProblem: a marker is misplaced or misspelt, so that a block would be lost.
    """
    blocks: list[EditBlock] = []
    search: list[str] | None = None
    replace: list[str] | None = None
    opened = 0
    for number, raw in enumerate(normalize_newlines(text).split("\n"), first_line):
        line = raw.rstrip()
        if search is None:
            if is_start(line):
                search, replace, opened = [], None, number
            elif _STRAY_MARKER.match(line):
                raise EditProblem(
                    f"Line {number} of the reply, {_quote(line)}, is a marker outside a block; a block is "
                    "'<<<<<<< SEARCH', old lines, '=======', new lines, '>>>>>>> REPLACE', each marker on its own line."
                )
        elif is_start(line):
            raise EditProblem(
                f"The block begun in line {opened} of the reply is not closed before the one of line {number}."
            )
        elif is_divider(line):
            if replace is not None:
                raise EditProblem(
                    f"The block begun in line {opened} of the reply has a second '=======' in line {number}."
                )
            replace = []
        elif is_end(line):
            if replace is None:
                raise EditProblem(f"The block begun in line {opened} of the reply has no '=======' before its end.")
            blocks.append(EditBlock(search="\n".join(search), replace="\n".join(replace), line=opened))
            search = None
        elif replace is not None:
            replace.append(line)
        else:
            search.append(line)
    if search is not None:
        missing = "'======='" if replace is None else "'>>>>>>> REPLACE'"
        raise TruncatedReply(f"The reply ends inside the block begun in line {opened}: its {missing} is missing.")
    return tuple(blocks)


def render_blocks(blocks: Sequence[EditBlock]) -> str:
    """Return the text that `parse_blocks` reads back."""
    return "\n".join(
        "\n".join(
            ["<<<<<<< SEARCH"]
            + ([block.search] if block.search else [])
            + ["======="]
            + ([block.replace] if block.replace else [])
            + [">>>>>>> REPLACE"]
        )
        for block in blocks
    )


def apply_edits(source: str, blocks: Sequence[EditBlock]) -> str:
    r"""Return `source` with every block applied, or raise with all the reasons why not.

    Untouched lines stay as they are, except that line endings become ``\n``; a final newline is kept or added.

    Raises:
        EditProblem: no block, or one is empty, changes nothing, or does not match exactly once. Lines are counted in
            the program as the blocks before left it.
    """
    if not blocks:
        raise EditProblem("There is no SEARCH/REPLACE block.")
    if len(blocks) > MAX_BLOCKS:
        raise EditProblem(f"There are {len(blocks)} SEARCH/REPLACE blocks; at most {MAX_BLOCKS} are applied at once.")
    text = normalize_newlines(source)
    lines = text.removesuffix("\n").split("\n") if text else []
    before = [line.rstrip() for line in lines]
    problems: list[str] = []
    for index, block in enumerate(blocks, 1):
        place = f"Block {index}" + (f" (line {block.line} of the reply)" if block.line else "")
        try:
            lines = _apply_one(lines, block)
        except EditProblem as problem:
            problems += [f"{place}: {reason}" for reason in problem.problems]
    if problems:
        if len(blocks) > 1:
            problems.append("Nothing was applied: all blocks apply or none does.")
        raise EditProblem(problems)
    if [line.rstrip() for line in lines] == before:
        raise EditProblem("The blocks together change nothing: a later one undoes an earlier one.")
    return "\n".join(lines) + "\n"


def _apply_one(lines: list[str], block: EditBlock) -> list[str]:
    search, replace = _split(block.search), _split(block.replace)
    if not any(search):
        raise EditProblem(
            "SEARCH is empty; to insert lines, search for a line beside the place and repeat it in REPLACE."
        )
    if search == replace:
        raise EditProblem("SEARCH and REPLACE are the same, so it changes nothing.")
    matches = _matches(lines, search)
    if not matches:
        # Blank lines around the block are the commonest slip of a writer, and mean nothing.
        search, replace = _strip_blank(search), _strip_blank(replace)
        if search == replace:
            raise EditProblem("SEARCH and REPLACE differ in blank lines only.")
        matches = _matches(lines, search)
    if len(matches) > 1:
        raise EditProblem(
            f"SEARCH stands {len(matches)} times in the program, at lines {_numbers(matches)}; "
            "add lines before or after it until it stands once."
        )
    if not matches:
        start, replace = _recover_indentation(lines, search, replace)
    else:
        start = matches[0]
    return [*lines[:start], *replace, *lines[start + len(search) :]]


def _split(text: str) -> list[str]:
    """Lines without line endings and trailing blanks; the empty text has none."""
    text = normalize_newlines(text)
    return [line.rstrip() for line in text.split("\n")] if text else []


def _strip_blank(lines: list[str]) -> list[str]:
    while lines and not lines[0]:
        lines = lines[1:]
    while lines and not lines[-1]:
        lines = lines[:-1]
    return lines


def _matches(lines: Sequence[str], search: Sequence[str]) -> list[int]:
    """Return every index where `search` stands, overlapping ones included."""
    stripped = [line.rstrip() for line in lines]
    size = len(search)
    return [start for start in range(len(stripped) - size + 1) if stripped[start : start + size] == search]


def _recover_indentation(lines: Sequence[str], search: list[str], replace: list[str]) -> tuple[int, list[str]]:
    """Return where `search` stands up to one uniform shift, and `replace` shifted alike; one such place only."""
    found: list[tuple[int, int]] = []
    for start in range(len(lines) - len(search) + 1):
        shift = _uniform_shift(lines[start : start + len(search)], search)
        if shift is not None:
            found.append((start, shift))
    if len(found) > 1:
        raise EditProblem(
            f"SEARCH matches only with another indentation, and then {len(found)} times, at lines "
            f"{_numbers([start for start, _ in found])}; copy the indentation and add lines around."
        )
    if not found:
        raise EditProblem(_absent(lines, search))
    start, shift = found[0]
    shifted = [_shift(line, shift) for line in replace]
    if any(line is None for line in shifted):
        raise EditProblem(
            f"SEARCH matches lines {start + 1} to {start + len(search)} with another indentation, but REPLACE cannot "
            "be shifted alike; copy the lines with their indentation."
        )
    return start, [line for line in shifted if line is not None]


def _uniform_shift(window: Sequence[str], search: Sequence[str]) -> int | None:
    """Return the number of spaces that the window has more than `search` (negative: fewer), the same in every line."""
    shifts: set[int] = set()
    for have, want in zip(window, search, strict=True):
        if have.strip() != want.strip() or "\t" in _indentation(have) + _indentation(want):
            return None
        if have.strip():
            shifts.add(len(_indentation(have)) - len(_indentation(want)))
    return shifts.pop() if len(shifts) == 1 else None


def _shift(line: str, shift: int) -> str | None:
    if not line:
        return line
    if shift >= 0:
        return " " * shift + line
    return line[-shift:] if line[:-shift].isspace() and "\t" not in line[:-shift] else None


def _indentation(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _absent(lines: Sequence[str], search: Sequence[str]) -> str:
    """Say that `search` stands nowhere, why if it can be told, and show the lines most like it."""
    if all(_LISTING_PREFIX.match(line) for line in search if line):
        return "SEARCH repeats the line numbers of the listing; leave them out and copy the code alone."
    start, size = _nearest(lines, search)
    if not size:
        return f"SEARCH stands nowhere in the program, which has nothing like it. It begins {_quote(search[0])}."
    window = [line.rstrip() for line in lines[start : start + size]]
    if [line.strip() for line in window] == [line.strip() for line in search]:
        reason = "SEARCH differs from the program in its indentation, and not by one shift"
    else:
        reason = "SEARCH stands nowhere in the program"
        if len(search) > 1:
            ahead = next(
                (i for i, (a, b) in enumerate(zip(window, search, strict=False)) if a != b), min(size, len(search))
            )
            if ahead < len(search):
                reason += f"; its line {ahead + 1}, {_quote(search[ahead])}, does not match"
    shown = [
        f"{number:5d} | {line[:MAX_SHOWN_CHARS]}" for number, line in enumerate(window[:MAX_SHOWN_LINES], start + 1)
    ]
    if size > MAX_SHOWN_LINES:
        shown.append(f"      ... {size - MAX_SHOWN_LINES} more lines")
    return f"{reason}. Nearest are lines {start + 1} to {start + size} of the program:\n" + "\n".join(shown)


def _nearest(lines: Sequence[str], search: Sequence[str]) -> tuple[int, int]:
    """Return (start, size) of the window most like `search`; size 0 when nothing is alike."""
    size = min(len(search), len(lines))
    wanted = {line.strip() for line in search if line.strip()}
    stripped = [line.strip() for line in lines]
    equal = [
        sum(line in wanted for line in stripped[start : start + size] if line) for start in range(len(lines) - size + 1)
    ]
    if not equal:
        return 0, 0
    # Whole equal lines first; the slower character ratio decides among the best of them.
    best = max(equal)
    starts = [start for start, count in enumerate(equal) if count == best][:400]
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2("\n".join(line.strip() for line in search)[:2000])
    ratios: list[tuple[float, int]] = []
    for start in starts:
        matcher.set_seq1("\n".join(stripped[start : start + size])[:2000])
        top = max(ratios)[0] if ratios else 0.0
        if matcher.real_quick_ratio() > top and matcher.quick_ratio() > top:
            ratios.append((matcher.ratio(), -start))
    ratio, negative = max(ratios, default=(0.0, 0))
    return (-negative, size) if ratio >= 0.3 or best else (0, 0)


def _numbers(starts: Sequence[int]) -> str:
    shown = ", ".join(str(start + 1) for start in starts[:8])
    return shown + (", ..." if len(starts) > 8 else "")


def _quote(line: str) -> str:
    line = line.strip()
    return repr(line if len(line) <= 80 else line[:77] + "...")
