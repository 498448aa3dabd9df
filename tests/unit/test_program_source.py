from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from forge import program_source as ps
from forge.program_identity import mechanism_shape

PROGRAM = '''"""A program."""

import torch
from forge_kernels import encode as enc, hadamard

MECHANISMS = ("rotate", "search_scales")
SIZE = 32


def helper(value):
    """Double it."""
    return value * 2  # twice


def rotate(x, *, size=SIZE):
    """Rotate."""
    y = hadamard(x, size)
    return helper(y)


def without_rotate(x, *, size=SIZE):
    return x


def search_scales(w): return enc(w, scale_rule="search")  # one line


def without_search_scales(w):
    return enc(w)


def quantize(session):
    for layer in session.layers:
        session.install(layer, search_scales(rotate(session.weight(layer))))
'''


def test_a_sound_program_has_no_problems() -> None:
    assert ps.check_convention(PROGRAM) == ()
    assert ps.mechanisms(PROGRAM) == ("rotate", "search_scales")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("def quantize(session)", "def quantise(session)", "no top-level function quantize"),
        ("def quantize(session)", "def quantize(session, x)", "exactly one parameter"),
        ('MECHANISMS = ("rotate", "search_scales")', "", "assigned 0 times"),
        ('MECHANISMS = ("rotate", "search_scales")', 'MECHANISMS = ["rotate"]', "not a tuple"),
        ('("rotate", "search_scales")', '("rotate", NAME)', "not the name of a function"),
        ('("rotate", "search_scales")', '("rotate", "rotate")', "twice"),
        ('("rotate", "search_scales")', '("rotate", "absent")', "no top-level function absent"),
        ('("rotate", "search_scales")', '("rotate", "without_rotate")', "keeps for itself"),
        ("def without_rotate(x, *, size=SIZE)", "def other(x, *, size=SIZE)", "lacks its neutral"),
        ("def without_rotate(x, *, size=SIZE)", "def without_rotate(x, size=SIZE)", "must take the parameters"),
        ("def without_rotate(x, *, size=SIZE)", "def without_rotate(y, *, size=SIZE)", "must take the parameters"),
        ("SIZE = 32\n", "SIZE = 32\nrotate = None\n", "bound 2 times"),
        ("SIZE = 32\n", "SIZE = 32\nif SIZE:\n    from forge_kernels import rotate\n", "bound 2 times"),
        ("    for layer", "    global rotate\n    for layer", "through 'global'"),
        ("def helper(value):", "def helper(value:", "does not parse: line"),
    ],
)
def test_what_breaks_the_convention_is_told(old: str, new: str, words: str) -> None:
    assert old in PROGRAM
    assert any(words in problem for problem in ps.check_convention(PROGRAM.replace(old, new)))


@pytest.mark.parametrize(
    "source", ["x = " + "(" * 300 + "1" + ")" * 300, "x = " + "+".join("a" * 5000), "\0", "x = " + "-" * 5000 + "1"]
)
def test_hostile_nesting_is_refused_and_never_crashes(source: str) -> None:
    with pytest.raises(ps.ProgramProblem):
        ps.ast_hash(source)


def test_odd_escapes_and_comparisons_are_read_without_a_warning() -> None:
    assert ps.parse("x = '\\d' is 1\n")


def test_any_change_of_reached_code_changes_the_normalized_hash() -> None:
    tree = ast.parse(PROGRAM)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    changed = 0
    for index, node in enumerate(ast.walk(tree)):
        if id(node) in docstrings:
            continue
        mutant = list(ast.walk(copy := ast.parse(PROGRAM)))[index]
        if isinstance(mutant, ast.Constant) and isinstance(mutant.value, int):
            mutant.value += 1
        elif isinstance(mutant, ast.Attribute):
            mutant.attr += "_x"
        elif isinstance(mutant, ast.Name) and isinstance(mutant.ctx, ast.Load):
            mutant.id = "elsewhere"
        elif isinstance(mutant, ast.BinOp):
            mutant.left, mutant.right = mutant.right, mutant.left
        elif isinstance(mutant, ast.keyword) and mutant.arg == "scale_rule":
            mutant.arg += "_x"
        elif isinstance(mutant, ast.Return):
            mutant.value = None
        else:
            continue
        assert ps.normalized_ast_hash(ast.unparse(copy)) != ps.normalized_ast_hash(PROGRAM), ast.unparse(mutant)
        changed += 1
    assert changed > 25


def test_ast_hash_ignores_comments_docstrings_and_layout_only() -> None:
    dressed = PROGRAM.replace("  # twice", "").replace('"""Double it."""', '"""Twice the value."""\n    pass')
    dressed = dressed.replace("return helper(y)", "return (helper( y ))").replace("\n", "\r\n")
    assert ps.ast_hash(dressed) == ps.ast_hash(PROGRAM)
    assert ps.ast_hash(PROGRAM.replace("* 2", "* 3")) != ps.ast_hash(PROGRAM)
    assert ps.ast_hash(PROGRAM.replace("helper", "twice")) != ps.ast_hash(PROGRAM)
    assert ps.ast_hash(PROGRAM.replace("* 2", "* 2.0")) != ps.ast_hash(PROGRAM)


RENAMED = (
    PROGRAM.replace("helper", "twice")
    .replace("rotate", "spin")
    .replace("value", "v")
    .replace("size", "n")
    .replace("SIZE", "WIDTH")
    .replace("encode as enc", "encode as to_codes")
    .replace("enc(", "to_codes(")
    .replace("layer in", "item in")
    .replace("layer,", "item,")
    .replace("(layer)", "(item)")
)


def test_normalized_hash_sees_through_names_aliases_order_and_dead_code() -> None:
    assert ps.ast_hash(RENAMED) != ps.ast_hash(PROGRAM)
    assert ps.normalized_ast_hash(RENAMED) == ps.normalized_ast_hash(PROGRAM)
    blocks = PROGRAM.split("\n\n\n")
    reordered = "\n\n\n".join([blocks[0], *reversed(blocks[1:]), "def never_called(x):\n    return x"])
    assert ps.normalized_ast_hash(reordered) == ps.normalized_ast_hash(PROGRAM)
    annotated = PROGRAM.replace("def helper(value):", "def helper(value: torch.Tensor) -> torch.Tensor:")
    assert ps.normalized_ast_hash(annotated) == ps.normalized_ast_hash(PROGRAM)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value * 2", "value * 3"),  # a helper far below
        ("SIZE = 32", "SIZE = 64"),  # a constant
        ('scale_rule="search"', 'scale_rule="floor"'),
        ("scale_rule", "rule"),  # keyword of a foreign function
        ("session.layers", "session.groups"),
        ("import encode as enc", "import decode as enc"),
        ("return x\n", "return x + 0\n"),  # a neutral
        ("helper(y)", "helper(x)"),  # another local
    ],
)
def test_normalized_hash_keeps_what_matters(old: str, new: str) -> None:
    assert old in PROGRAM
    assert ps.normalized_ast_hash(PROGRAM.replace(old, new)) != ps.normalized_ast_hash(PROGRAM)


def test_renaming_in_one_function_alone_does_not_hide_a_program() -> None:
    changed = PROGRAM.replace("y = hadamard(x, size)", "z = hadamard(x, size)").replace("helper(y)", "helper(z)")
    assert ps.normalized_ast_hash(changed) == ps.normalized_ast_hash(PROGRAM)


def test_keywords_of_own_functions_follow_their_renamed_parameters() -> None:
    one = PROGRAM.replace("return helper(y)", "return helper(value=y)")
    two = one.replace("value", "amount")
    assert ps.normalized_ast_hash(one) == ps.normalized_ast_hash(two)
    assert ps.mechanism_fingerprint(one, "rotate") == ps.mechanism_fingerprint(two, "rotate")


def test_a_fingerprint_is_of_the_function_and_what_it_calls() -> None:
    print_ = ps.mechanism_fingerprint
    assert print_(RENAMED, "spin") == print_(PROGRAM, "rotate")
    assert print_(PROGRAM, "rotate") != print_(PROGRAM, "without_rotate")
    elsewhere = PROGRAM.replace('"search"', '"floor"')
    assert print_(elsewhere, "rotate") == print_(PROGRAM, "rotate")
    assert print_(PROGRAM.replace("* 2", "* 3"), "rotate") != print_(PROGRAM, "rotate")
    with pytest.raises(ps.ProgramProblem, match="no top-level function absent"):
        print_(PROGRAM, "absent")


def test_fingerprints_of_recursive_and_wide_call_graphs_end() -> None:
    names = [f"f{i}" for i in range(60)]
    source = "\n".join(f"def {a}(x):\n    return {' + '.join(f'{b}(x)' for b in names)}" for a in names)
    assert len(ps.mechanism_fingerprint(source, "f0")) == 64


@pytest.mark.parametrize(
    "function",
    [
        "def m(a, /, b, *rest, c=1, **more):\n    '''Doc.'''\n    # comment\n    return (a, b, rest, c, more)",
        "def m(a, /, b, *rest, c=1, **more): return (a, b, rest, c, more)",
        "def m(a, /, b, *rest, c=1, **more): x = a; return x;",
        "@keep\n@keep\ndef m(\n    a,\n    /,\n    b,\n    *rest,\n    c=1,\n    **more,\n) -> tuple:\n\n    x = (\n"
        "        a\n    )\n    return x",
        "def m(a, /, b, *rest, c=1, **more):\n    @keep\n    def inner():\n        return a\n    return inner()",
        "def m(a, /, b, *rest, c=1, **more):\n    x = 'ä' + str(a)\n    if a:\n        return x",
        "def m(a, /, b, *rest, c=1, **more):\n    if a:\n        return 'ä'; x = 1",
    ],
)
def test_knocking_out_calls_the_neutral_with_every_argument(function: str) -> None:
    source = (
        "MECHANISMS = ('m',)\ndef keep(f): return f\n"
        "def without_m(a, /, b, *rest, c, **more): return ('neutral', a, b, rest, c, more)\n"
        f"{function}\n"
        "AFTER = 'ü'  # kept\ndef quantize(session): return m(1, 2, 3, 4, c=5, d=6), m(1, b=2)\n"
    )
    result = ps.knock_out(source, ["m"])
    assert ps.check_convention(result) == ()
    assert result.split("def m")[0] == source.split("def m")[0]
    assert result.endswith(source.split("AFTER")[1])
    names: dict[str, object] = {}
    exec(compile(result, "knocked_out", "exec"), names)  # our own text above
    expected: object = (("neutral", 1, 2, (3, 4), 5, {"d": 6}), ("neutral", 1, 2, (), 1, {}))
    assert names["quantize"](None) == expected  # type: ignore[operator]
    assert ps.knock_out(result, ["m"]) == result


def test_knocking_out_several_leaves_the_rest_to_the_character() -> None:
    result = ps.knock_out(PROGRAM, ["search_scales", "rotate"])
    assert "def search_scales(w): return without_search_scales(w)  # one line" in result
    assert "def rotate(x, *, size=SIZE):\n    return without_rotate(x, size=size)\n\n\ndef without_rotate" in result
    assert ps.knock_out(PROGRAM, []) == PROGRAM


def test_knocking_out_what_is_not_there_is_refused() -> None:
    with pytest.raises(
        ps.ProgramProblem, match=r"'helper' is no mechanism of the program; its mechanisms: rotate, search"
    ):
        ps.knock_out(PROGRAM, ["helper"])


@pytest.mark.parametrize("path", sorted(Path("forge/programs").glob("*.py")), ids=lambda path: path.stem)
def test_shipped_programs_keep_the_convention(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    if not re.search(r"^MECHANISMS", source, re.MULTILINE):
        return
    assert ps.check_convention(source) == ()
    ast.parse(ps.knock_out(source, ps.mechanisms(source)))


def test_diff_is_unified_and_empty_for_the_same_text() -> None:
    assert ps.diff(PROGRAM, PROGRAM.replace("\n", "\r\n")) == ""
    text = ps.diff(PROGRAM, PROGRAM.replace("* 2", "* 3"))
    assert "-    return value * 2  # twice\n+    return value * 3  # twice\n" in text


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("value * 2", "value * 2.0001", True),
        ("SIZE = 32", "SIZE = -64", True),
        ("value * 2", "value + 2", False),
        ("value * 2", "value * True", False),
        ("hadamard(x, size)", "hadamard(x, 'size')", False),
    ],
)
def test_a_shape_leaves_numbers_out_and_nothing_else(old: str, new: str, same: bool) -> None:
    changed = PROGRAM.replace(old, new).replace("rotate", "turn")
    assert changed != PROGRAM
    assert (mechanism_shape(changed, "turn") == mechanism_shape(PROGRAM, "rotate")) is same
    assert ps.mechanism_fingerprint(changed, "turn") != ps.mechanism_fingerprint(PROGRAM, "rotate")
