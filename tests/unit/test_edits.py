from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.edits import EditBlock, EditProblem, apply_edits, parse_blocks, render_blocks
from forge.errors import TruncatedReply

SOURCE = """def first(x):
    y = x + 1
    return y


def second(x):
    if x:
        y = x + 2
        return y
    return x
"""


def edit(search: str, replace: str) -> EditBlock:
    return EditBlock(search=search, replace=replace)


def problem_of(source: str, *blocks: EditBlock) -> str:
    with pytest.raises(EditProblem) as info:
        apply_edits(source, blocks)
    return str(info.value)


def test_a_block_replaces_the_lines_it_names_and_nothing_else() -> None:
    assert apply_edits(SOURCE, [edit("    y = x + 1", "    y = x + 3")]) == SOURCE.replace("x + 1", "x + 3")


def test_blocks_apply_in_order_to_the_text_the_earlier_ones_left() -> None:
    result = apply_edits(SOURCE, [edit("    y = x + 1", "    y = x + 3"), edit("    y = x + 3", "    y = x + 4")])
    assert "y = x + 4" in result
    assert "x + 3" not in result


def test_all_apply_or_none_and_every_reason_is_told() -> None:
    told = problem_of(SOURCE, edit("    y = x + 1", "    y = 0"), edit("absent()", "z"), edit("", "z"))
    assert "Block 2" in told
    assert "Block 3" in told
    assert "Block 1" not in told
    assert "Nothing was applied" in told


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (edit("", "x = 1"), "SEARCH is empty"),
        (edit("\n\n", "x = 1"), "SEARCH is empty"),
        (edit("    y = x + 1", "    y = x + 1"), "changes nothing"),
        (edit("    y = x + 1  ", "    y = x + 1"), "changes nothing"),
        (edit("\n    y = x + 1\n\n", "    y = x + 1"), "blank lines only"),
        (edit("    return x_absent", "z"), "Nearest are lines"),
        (edit("2 |     y = x + 1\n3 |     return y", "z"), "line numbers of the listing"),
    ],
)
def test_what_cannot_apply_is_told(block: EditBlock, words: str) -> None:
    assert words in problem_of(SOURCE, block)


def test_an_ambiguous_search_names_the_lines() -> None:
    told = problem_of("a = 1\nb = 2\na = 1\n", edit("a = 1", "a = 2"))
    assert "2 times" in told
    assert "lines 1, 3" in told


def test_what_is_told_stays_short() -> None:
    source = "".join(f"line_{number} = {'x' * 5000}\n" for number in range(30))
    wide = "\n".join(f"line_{number} = {'x' * 4999}" for number in range(20))
    assert len(problem_of(source, edit(wide, "z"))) < 3000
    assert len(problem_of(source, *[edit(f"absent_{n}", "z") for n in range(30)]).split("\n")) < 20 * 5


def test_overlapping_matches_are_ambiguous_too() -> None:
    assert "2 times" in problem_of("a\na\na\n", edit("a\na", "b"))


def test_the_nearest_lines_are_shown_with_their_numbers() -> None:
    told = problem_of(SOURCE, edit("def second(x):\n    if x:\n        y = x + 5", "pass"))
    assert "lines 6 to 8" in told
    assert "    8 |         y = x + 2" in told
    assert "its line 3, 'y = x + 5', does not match" in told


def test_blocks_that_undo_each_other_are_no_edit() -> None:
    blocks = [edit("    y = x + 1", "    y = 7"), edit("    y = 7", "    y = x + 1")]
    assert "together change nothing" in problem_of(SOURCE, *blocks)


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_line_ends_and_trailing_blanks_never_count(newline: str) -> None:
    source = SOURCE.replace("y = x + 1", "y = x + 1   ").replace("\n", newline)
    block = edit(f"def first(x):  {newline}    y = x + 1{newline}", f"def first(x):{newline}    y = 0")
    assert apply_edits(source, [block]) == SOURCE.replace("y = x + 1", "y = 0")


def test_lost_indentation_is_recovered_by_one_uniform_shift() -> None:
    block = edit("if x:\n    y = x + 2\n    return y", "if x > 0:\n    y = x + 2\n\n    return -y")
    result = apply_edits(SOURCE, [block])
    assert "    if x > 0:\n        y = x + 2\n\n        return -y\n    return x\n" in result


def test_indentation_is_not_guessed_when_two_places_fit() -> None:
    told = problem_of(SOURCE, edit("return y", "return z"))
    assert "another indentation" in told
    assert "2 times" in told


def test_indentation_that_is_not_one_shift_is_not_guessed() -> None:
    assert "not by one shift" in problem_of(SOURCE, edit("if x:\ny = x + 2\nreturn y", "pass"))


def test_a_replacement_that_cannot_be_shifted_is_refused() -> None:
    told = problem_of("a = 1\nb = 2\n", edit("    a = 1", "z = 3"))
    assert "cannot be shifted" in told


def test_no_block_at_all_is_a_problem() -> None:
    assert "no SEARCH/REPLACE block" in problem_of(SOURCE)


def test_blocks_are_read_with_fences_prose_and_crlf_around_them() -> None:
    text = "Here it is:\r\n```python\r\n<<<<<<< SEARCH  \r\na = 1\r\n=======\r\na = 2\r\n>>>>>>> REPLACE\r\n```\r\n"
    assert parse_blocks(text, first_line=10) == (EditBlock(search="a = 1", replace="a = 2", line=12),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<<<<<<< SEARCH\na\n=======\nb", "ends inside the block begun in line 1: its '>>>>>>> REPLACE'"),
        ("<<<<<<< SEARCH\na", "its '=======' is missing"),
    ],
)
def test_a_block_cut_off_is_a_truncated_reply(text: str, words: str) -> None:
    with pytest.raises(TruncatedReply, match=words):
        parse_blocks(text)


@pytest.mark.parametrize(
    "text",
    [
        "<<<<<<< SERCH\na\n=======\nb\n>>>>>>> REPLACE",
        "<<<<<<< SEARCH\na\n>>>>>>> REPLACE",
        "<<<<<<< SEARCH\na\n=======\nb\n=======\nc\n>>>>>>> REPLACE",
        "<<<<<<< SEARCH\na\n<<<<<<< SEARCH\nb\n=======\nc\n>>>>>>> REPLACE",
        "=======\nb\n>>>>>>> REPLACE",
    ],
)
def test_misplaced_markers_are_never_skipped(text: str) -> None:
    with pytest.raises(EditProblem):
        parse_blocks(text)


LINES = st.lists(st.from_regex(r" {0,8}[a-z=()]{0,6}", fullmatch=True).map(str.rstrip), min_size=1, max_size=12)


@given(LINES, st.data())
def test_a_block_applies_exactly_when_its_lines_stand_once(lines: list[str], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lines) - 1))
    stop = data.draw(st.integers(start + 1, len(lines)))
    search = lines[start:stop]
    replace = [*search, "inserted = 1"]
    source = "\n".join(lines) + "\n"
    places = [i for i in range(len(lines) - len(search) + 1) if lines[i : i + len(search)] == search]
    block = edit("\n".join(search), "\n".join(replace))
    if any(search) and len(places) == 1 and search != [""]:
        assert apply_edits(source, [block]) == "\n".join([*lines[:start], *replace, *lines[stop:]]) + "\n"
    elif len(places) > 1 and any(search):
        with pytest.raises(EditProblem):
            apply_edits(source, [block])


@given(st.text(max_size=200), st.lists(st.tuples(st.text(max_size=30), st.text(max_size=30)), max_size=3))
def test_any_text_applies_or_is_refused_but_never_crashes(source: str, pairs: list[tuple[str, str]]) -> None:
    blocks = [edit(search, replace) for search, replace in pairs]
    told: tuple[str, ...] = ()
    result = ""
    try:
        result = apply_edits(source, blocks)
    except EditProblem as problem:
        told = problem.problems
    assert told or result != source


@given(LINES, LINES)
def test_rendered_blocks_read_back(search: list[str], replace: list[str]) -> None:
    blocks = (edit("\n".join(search), "\n".join(replace)),)
    read = parse_blocks("text before\n" + render_blocks(blocks) + "\ntext after")
    assert [(block.search, block.replace) for block in read] == [(b.search, b.replace) for b in blocks]
