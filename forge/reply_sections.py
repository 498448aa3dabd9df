"""The outer layer of a reply: reasoning parts and an outer fence removed, sections split, list lines read.

A reply is a text of sections, each begun by a line ``## Name``. Only the names given count as headings, and none counts
inside a SEARCH/REPLACE block, so that a program may contain any comment. What a section means: `forge.replies`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from forge.edits import is_end, is_start, normalize_newlines
from forge.errors import ReplyProblem, TruncatedReply

MAX_REPLY_CHARS = 400_000
"""Far beyond any reply in this format (a program has at most 64 KB); more is a runaway model."""

MAX_ENTRY_CHARS = 4000
MAX_ENTRIES = 1000
MAX_SECTIONS = 64
MAX_HEADING_CHARS = 160

_TAG = re.compile(r"<(/?)(?:think|thinking|reasoning)>", re.IGNORECASE)
_FENCE = re.compile(r"\s*(`{3,}|~{3,})[\w.+-]*\s*$")
_HEADING = re.compile(r"(?:#{1,4}\s*|(?=\*\*))(?P<words>[^#\s].*)$")
_EDITS = re.compile(r"edits(?:\s*:\s*|\s+)(?:for\s+)?\(?(?P<key>[\w-]+)\)?", re.IGNORECASE)
_BULLET = re.compile(r"\s*(?:[-*+]|\d{1,2}[.)])\s+")


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section. argument: what follows the name in the heading (``Edits <key>``). first_line: of the body."""

    name: str
    argument: str
    body: str
    first_line: int


@dataclass(frozen=True, kw_only=True)
class ListLine:
    """One entry of a list section, bullet removed; `number` is its line in the reply."""

    text: str
    number: int


def clean_reply(text: str, *, finish_reason: str = "stop") -> str:
    r"""Return the reply without reasoning parts and without a fence around the whole, with ``\n`` line ends.

    Lines that are removed leave empty ones behind, so that line numbers stay those of the reply as written.

    Raises:
        TruncatedReply: cut off by the token limit, or in the middle of its reasoning.
        ReplyProblem: empty, or far too long.
    """
    if finish_reason in ("length", "max_tokens"):
        raise TruncatedReply("The reply was cut off by the token limit (finish_reason 'length'); write a shorter one.")
    if finish_reason == "content_filter":
        raise TruncatedReply("The reply was withheld in part by the server's content filter.")
    if len(text) > MAX_REPLY_CHARS:
        raise ReplyProblem(f"The reply has {len(text)} characters; at most {MAX_REPLY_CHARS} are read.")
    text = _without_reasoning(normalize_newlines(text))
    if not text.strip():
        raise ReplyProblem("The reply is empty.")
    return _without_outer_fence(text)


def split_sections(text: str, names: Iterable[str]) -> tuple[Section, ...]:
    """Return the sections in order; what stands before the first is dropped.

    Raises:
        ReplyProblem: two sections of the same name and argument, or far too many.
    """
    known = {name.lower(): name for name in names}
    sections: list[Section] = []
    current: tuple[str, str] | None = None
    first_line = 1
    body: list[str] = []
    in_block = False

    def close() -> None:
        if current is None:
            return
        name, argument = current
        if any(other.name == name and other.argument == argument for other in sections):
            raise ReplyProblem(
                f"The section '## {' '.join([name, argument]).strip()}' stands twice (line {first_line})."
            )
        if len(sections) == MAX_SECTIONS:
            raise ReplyProblem(f"The reply has more than {MAX_SECTIONS} sections (line {first_line}).")
        sections.append(Section(name=name, argument=argument, body="\n".join(body), first_line=first_line))

    for number, line in enumerate(text.split("\n"), 1):
        heading = None if in_block else _heading(line, known)
        if heading is not None:
            close()
            # The body begins on the heading's own line, so that line numbers count from there.
            current, body, first_line = heading[:2], [heading[2]], number
            continue
        in_block = not is_end(line) if in_block else is_start(line)
        body.append(line)
    close()
    return tuple(sections)


def list_lines(section: Section) -> tuple[ListLine, ...]:
    """Return the entries of a list section; ``none`` alone, empty lines and fences are no entries.

    A line without bullet continues the entry before it when it is indented, or while that entry's braces are open.

    Raises:
        ReplyProblem: an entry is too long to be one, or there are far too many.
    """
    entries: list[ListLine] = []
    for number, raw in enumerate(section.body.split("\n"), section.first_line):
        line = raw.strip()
        if not line or _FENCE.match(line):
            continue
        bullet = _BULLET.match(raw)
        if bullet is None and entries and (raw[:1].isspace() or _is_open(entries[-1].text)):
            last = entries.pop()
            entries.append(ListLine(text=f"{last.text} {line}", number=last.number))
            continue
        entries.append(ListLine(text=(raw[bullet.end() :] if bullet else line).strip(), number=number))
        if len(entries) > MAX_ENTRIES:
            raise ReplyProblem(f"'## {section.name}' has more than {MAX_ENTRIES} entries (line {number}).")
    long = [entry.number for entry in entries if len(entry.text) > MAX_ENTRY_CHARS]
    if long:
        raise ReplyProblem(f"The entry of line {long[0]} has more than {MAX_ENTRY_CHARS} characters.")
    if len(entries) == 1 and entries[0].text.strip("()*_`. ").lower() in ("none", "nothing", "n/a"):
        return ()
    return tuple(entries)


def _is_open(entry: str) -> bool:
    return entry.count("{") > entry.count("}")


def _heading(line: str, known: dict[str, str]) -> tuple[str, str, str] | None:
    """Return (name, argument, rest of the line) of a known heading, as in ``## Discharges: none``."""
    match = _HEADING.match(line) if len(line) <= MAX_HEADING_CHARS else None
    if match is None:
        return None
    words = re.sub(r"[*`]+", "", match["words"]).strip().rstrip("#").strip()
    name, _, rest = (part.strip() for part in words.partition(":"))
    # Bold words that begin a line of prose are no heading; alone on their line they are.
    is_prose = rest and line.startswith("**")
    if name.lower() in known and not is_prose and not (rest and name.lower() == "edits"):
        return known[name.lower()], "", rest
    edits = _EDITS.fullmatch(words.rstrip(":").strip())
    if edits is not None and "edits" in known:
        return known["edits"], edits["key"], ""
    return None


def _without_reasoning(text: str) -> str:
    """Drop ``<think>...</think>``; a closing tag whose opening one a server swallowed drops all before it."""
    kept: list[str] = []
    depth = position = 0
    for tag in _TAG.finditer(text):
        between = text[position : tag.start()]
        position = tag.end()
        if tag[1] and not depth:
            kept = ["\n" * ("".join(kept) + between).count("\n")]
            continue
        kept.append("\n" * between.count("\n") if depth else between)
        depth += -1 if tag[1] else 1
    if depth:
        raise TruncatedReply("The reply ends inside its reasoning (<think> is not closed): no answer follows it.")
    return "".join([*kept, text[position:]])


def _without_outer_fence(text: str) -> str:
    """Blank the first and last line when they are one fence around the whole reply."""
    lines = text.split("\n")
    filled = [index for index, line in enumerate(lines) if line.strip()]
    if len(filled) < 2:
        return text
    first, last = filled[0], filled[-1]
    fence = _FENCE.match(lines[first])
    if fence is None or lines[last].strip() != fence[1]:
        return text
    return "\n".join([*([""] * (first + 1)), *lines[first + 1 : last], ""])
