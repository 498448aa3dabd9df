from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.edits import EditBlock, parse_blocks
from forge.errors import ReplyProblem, TruncatedReply
from forge.replies import parse_explanation, parse_place, parse_proposal
from forge.reply_writing import write_explanation, write_place, write_proposal
from hypotheses.probe_kinds import AbsentProbe, Place

PROPOSAL = """## Analysis
The error map shows outliers in down.

## Mechanisms
- block_rotation: outlier_spreading | Spreads one large value over its block, so the scale shrinks | a lot.
- `block_rotation`: error_averaging | Averages errors.

## Discharges
- edit-1a2b3c4d

## Edits
<<<<<<< SEARCH
a = 1
=======
## Controls
a = 2
>>>>>>> REPLACE
"""

EXPLANATION = """## Analysis
Two readings.

## Hypotheses
- outlier_spreading: block_rotation | One large value no longer sets the scale of its block.
- error_averaging: block_rotation | Rotation averages independent rounding errors.

## Controls
- no_rotation: knockout block_rotation | The child without the rotation.
- rotation_alone: knock-in block_rotation | The rotation alone on the parent.
- rotate_plain: substitute block_rotation in child | Rotate only blocks without outliers.

## Predictions
- outlier_spreading @ no_rotation: -0.10 .. 0.15
- outlier_spreading @ rotation_alone: 0.8 .. 1.2
- outlier_spreading @ rotate_plain: [-0.2, 0.2]
- error_averaging @ no_rotation: -0.10 .. 0.15
- error_averaging @ rotation_alone: 0.8 to 1.2
- error_averaging @ rotate_plain: 0.6 .. 1.1

## Edits rotate_plain
<<<<<<< SEARCH
a = 1
=======
a = 2
>>>>>>> REPLACE

## Required edits
- if outlier_spreading refuted: replace block_rotation at down in blocks 0, 3 | Drop it. | probe {"kind": "absent",
"mechanism": "block_rotation"}
"""


def problems_of(text: str, **arguments: str) -> str:
    parse = parse_explanation if "## Hypotheses" in text else parse_proposal
    with pytest.raises(ReplyProblem) as info:
        parse(text, **arguments)
    return str(info.value)


def test_a_proposal_is_read_whole() -> None:
    reply = parse_proposal(PROPOSAL)
    assert reply.analysis.startswith("The error map")
    assert [(claim.name, claim.cause) for claim in reply.mechanisms] == [
        ("block_rotation", "outlier_spreading"),
        ("block_rotation", "error_averaging"),
    ]
    assert reply.mechanisms[0].statement.endswith("the scale shrinks | a lot.")
    assert reply.discharges == ("edit-1a2b3c4d",)
    assert reply.edits == (EditBlock(search="a = 1", replace="## Controls\na = 2", line=12),)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: f"```markdown\n{text}```\n",
        lambda text: f"<think>\n## Edits\n<<<<<<< SEARCH\nevil\n</think>\n{text}",
        lambda text: f"swallowed reasoning with ## Edits\n</think>\n\n{text}",
        lambda text: f"Sure, here it is:\n\n{text}",
        lambda text: text.replace("## ", "### ").replace("### Controls", "## Controls").replace("Edits", "**Edits:**"),
        lambda text: text.replace("<<<<<<< SEARCH", "```python\n<<<<<<< SEARCH").replace("REPLACE", "REPLACE\n```"),
        lambda text: text.replace("\n", "   \n"),
    ],
)
def test_dress_does_not_matter(wrap: object) -> None:
    plain, dressed = parse_proposal(PROPOSAL), parse_proposal(wrap(PROPOSAL))  # type: ignore[operator]
    assert [(e.search, e.replace) for e in dressed.edits] == [(e.search, e.replace) for e in plain.edits]
    assert dressed.mechanisms == plain.mechanisms
    assert dressed.discharges == plain.discharges


def test_none_is_no_entry() -> None:
    text = PROPOSAL.replace("- edit-1a2b3c4d", "none")
    assert parse_proposal(text).discharges == ()
    lines = [line for line in text.split("\n") if "outlier_spreading" not in line and "error_averaging" not in line]
    assert parse_proposal("\n".join(lines).replace("## Mechanisms", "## Mechanisms\n- None.")).mechanisms == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ("   \n", "empty"),
        ("I would rotate the blocks.\n```python\ndef quantize(session): pass\n```", "prose"),
        ("def quantize(session):\n    pass\n", "prose"),
        (PROPOSAL.split("## Edits")[0], "lacks '## Edits'"),
        (PROPOSAL.split("<<<<<<<")[0] + "```python\na = 2\n```\n", "holds no SEARCH/REPLACE block"),
        (PROPOSAL.replace("outlier_spreading |", "outlier spreading |"), "does not read as"),
        (PROPOSAL.replace("edit-1a2b3c4d", "the rotation one"), "'the rotation one', does not read as"),
        (PROPOSAL + "\n## Edits\n", "stands twice"),
        (PROPOSAL.replace("## Edits", "## Edits control"), "lacks '## Edits'"),
        (PROPOSAL + "x" * 400_001, "at most 400000"),
        (PROPOSAL.replace("Averages errors.", "x" * 5000), "more than 4000 characters"),
    ],
)
def test_what_is_no_proposal_is_told(text: str, words: str) -> None:
    assert words in problems_of(text)


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (PROPOSAL, "length", "token limit"),
        (PROPOSAL, "content_filter", "content filter"),
        (PROPOSAL.split(">>>>>>>")[0], "stop", "ends inside the block"),
        ("<think>\n" + PROPOSAL, "stop", "inside its reasoning"),
        (PROPOSAL + "<think>\nmore", "stop", "inside its reasoning"),
    ],
)
def test_truncated_replies_are_told_apart(text: str, reason: str, words: str) -> None:
    with pytest.raises(TruncatedReply, match=words):
        parse_proposal(text, finish_reason=reason)


def test_code_inside_reasoning_is_never_adopted() -> None:
    assert "empty" in problems_of(f"<think>{PROPOSAL}</think>")
    assert "prose" in problems_of(f"<think>{PROPOSAL}</think>\nThat is my answer.")


def test_an_explanation_is_read_whole() -> None:
    reply = parse_explanation(EXPLANATION)
    explanation = reply.explanation
    assert [h.claim for h in explanation.hypotheses] == [
        ("block_rotation", "outlier_spreading"),
        ("block_rotation", "error_averaging"),
    ]
    knockout, knockin, substitute = explanation.controls
    assert (knockout.kind, knockout.removes, knockout.edits) == ("knockout", ("block_rotation",), None)
    assert (knockin.kind, knockin.keeps, knockin.removes) == ("knockin", ("block_rotation",), ())
    assert substitute.edits is not None
    assert parse_blocks(substitute.edits)[0].replace == "a = 2"
    assert explanation.prediction("outlier_spreading", "rotate_plain").low == -0.2
    (wish,) = reply.required_edits
    assert (wish.hypothesis, wish.verdict, wish.edit.kind) == ("outlier_spreading", "refuted", "replace")
    assert wish.edit.place == Place(roles=("down",), blocks=(0, 3))
    assert wish.edit.probe == AbsentProbe(mechanism="block_rotation")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("- error_averaging: block", "- error averaging: block", "does not read as '- cause_slug: mechanism"),
        ("- error_averaging @ rotate_plain: 0.6 .. 1.1\n", "", "makes no prediction for control 'rotate_plain'"),
        ("0.6 .. 1.1", "1.1 .. 0.6", "reversed"),
        ("0.6 .. 1.1", "-9 .. 9", "vacuous"),
        ("0.6 .. 1.1", "nan .. 1.1", "does not read as"),
        ("0.6 .. 1.1", "0.1 .. 1e999", "not finite"),
        ("error_averaging @ rotate_plain", "third @ rotate_plain", "unknown hypothesis 'third'"),
        ("## Edits rotate_plain", "## Edits other", "belongs to no control"),
        ("## Edits rotate_plain", "## Edits no_rotation", "made mechanically"),
        ("knockout block_rotation |", "ablate block_rotation |", "does not read as '- key: knockout"),
        ("knockout block_rotation |", "knockout block_rotation in child |", "neither edits nor"),
        ("at down in blocks 0, 3", "at the MLP", "is no place"),
        ("if outlier_spreading refuted", "if capacity refuted", "no hypothesis 'capacity' is listed"),
        ('"block_rotation"}', '"block_rotation"', "does not read as '- if"),
        ('"kind": "absent"', '"kind": absent', "no JSON object"),
        ('"kind": "absent"', '"kind": "wish"', "probe"),
        ('{"kind": "absent"', '{"where": 1, "kind": "absent"', "Extra inputs"),
        ("0.6 .. 1.1", "-0.2 .. 0.2", "predict the same for every control"),
    ],
)
def test_what_is_no_explanation_is_told(old: str, new: str, words: str) -> None:
    assert old in EXPLANATION
    assert words in problems_of(EXPLANATION.replace(old, new))


def test_all_problems_are_told_at_once() -> None:
    text = EXPLANATION.replace("at down in", "at nowhere in").replace("knockout block_rotation |", "ablate it |")
    assert len(problems_of(text).split("\n")) == 2


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("everywhere", Place()),
        ("`down`", Place(roles=("down",))),
        ("qkv, o", Place(roles=("q", "k", "v", "o"))),
        ("blocks 0, 3", Place(blocks=(0, 3))),
        ("everywhere in blocks 1", Place(blocks=(1,))),
        ("blocks.7.gate_up", Place(roles=("gate", "up"), blocks=(7,))),
    ],
)
def test_places_read_and_write(text: str, place: Place) -> None:
    assert parse_place(text) == place
    assert parse_place(write_place(place)) == place


def test_written_replies_read_back() -> None:
    proposal = parse_proposal(PROPOSAL.replace("shrinks | a lot", "shrinks a lot"))
    again = parse_proposal(write_proposal(proposal))
    assert again.mechanisms == proposal.mechanisms
    assert again.discharges == proposal.discharges
    assert again.analysis == proposal.analysis
    assert [(e.search, e.replace) for e in again.edits] == [(e.search, e.replace) for e in proposal.edits]
    explanation = parse_explanation(EXPLANATION)
    assert parse_explanation(write_explanation(explanation)) == explanation


FRAGMENTS = st.sampled_from(
    [*PROPOSAL.splitlines(), *EXPLANATION.splitlines(), "<think>", "</think>", "```", "\r", "## Edits", "=======", "- "]
)


@given(st.lists(FRAGMENTS | st.text(max_size=20), max_size=40))
def test_any_reply_is_data_or_a_problem(parts: list[str]) -> None:
    for parse in (parse_proposal, parse_explanation):
        told: tuple[str, ...] = ("data",)
        try:
            parse("\n".join(parts))
        except ReplyProblem as problem:
            told = problem.problems
        assert told
        assert all(text.strip() for text in told)


@pytest.mark.parametrize(
    "unit", ["<think>", "</think>", "## " + " " * 50 + "\n", "- a: b |\n", "<<<<<<< SEARCH\n", " | "]
)
def test_runaway_replies_are_answered_quickly(unit: str) -> None:
    text = "## Mechanisms\n" + unit * (390_000 // len(unit))
    start = time.perf_counter()
    with pytest.raises(ReplyProblem):
        parse_proposal(text)
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## Discharges\n- edit-1a2b3c4d", "## Discharges: edit-1a2b3c4d"),
        ("## Mechanisms", "**Mechanisms**"),
        ("## Edits", "# **Edits**:"),
        ("## Analysis\n", "## ANALYSIS: "),
    ],
)
def test_headings_may_be_dressed(old: str, new: str) -> None:
    assert old in PROPOSAL
    read, dressed = parse_proposal(PROPOSAL), parse_proposal(PROPOSAL.replace(old, new))
    assert (dressed.analysis, dressed.mechanisms, dressed.discharges) == (
        read.analysis,
        read.mechanisms,
        read.discharges,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## Edits rotate_plain", "## Edits for `rotate_plain`:"),
        ("## Edits rotate_plain", "## Edits: rotate_plain"),
        ("0.8 to 1.2", "0.8 \u2013 1.2"),
        ("rotate_plain: [-0.2, 0.2]", "rotate_plain: [\u22120.2, 0.2]"),
        ("knockout block_rotation |", "knockout of block_rotation |"),
    ],
)
def test_entries_may_be_dressed(old: str, new: str) -> None:
    assert old in EXPLANATION
    assert parse_explanation(EXPLANATION.replace(old, new)) == parse_explanation(EXPLANATION)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("refuted: replace", "supported: replace", "does not call for 'replace'; it calls for extend or refine"),
        ('"kind": "absent"', '"kind": "knockout"', "cannot show that it was replaced"),
        ("replace block_rotation at", "replace other at", "its verdict about (block_rotation, outlier_spreading)"),
        ('"block_rotation"}', '"block_rotation", "place": {"roles": ["q"]}}', "the probe looks at q"),
    ],
)
def test_a_required_edit_that_could_never_follow_is_told_while_it_can_be_mended(old: str, new: str, words: str) -> None:
    assert old in EXPLANATION
    assert words in problems_of(EXPLANATION.replace(old, new))


@pytest.mark.parametrize("verdict", ["inconclusive", "not_executed", "invalid"])
def test_an_undecided_verdict_may_ask_for_a_retest_and_never_blocks(verdict: str) -> None:
    text = EXPLANATION.replace("refuted: replace", f"{verdict}: retest").replace('"absent"', '"knockout"')
    reply = parse_explanation(text)
    (wish,) = reply.required_edits
    assert (wish.verdict, wish.edit.kind, wish.edit.blocking) == (verdict, "retest", False)
    assert parse_explanation(write_explanation(reply)) == reply


@pytest.mark.parametrize("word", ["with", "by"])
def test_a_part_that_is_to_come_is_declared_and_read_back(word: str) -> None:
    text = EXPLANATION.replace("replace block_rotation at", f"replace block_rotation {word} sorting at")
    reply = parse_explanation(
        text.replace('"absent", "mechanism": "block_rotation"', '"knockout", "mechanism": "sorting"')
    )
    (wish,) = reply.required_edits
    assert (wish.edit.mechanism, wish.edit.part) == ("block_rotation", "sorting")
    assert parse_explanation(write_explanation(reply)) == reply


def test_bold_words_in_prose_are_no_headings() -> None:
    text = PROPOSAL.replace("The error map", "**Mechanisms:** one may help.\n**Edits** are below.\nThe error map")
    assert parse_proposal(text).mechanisms == parse_proposal(PROPOSAL).mechanisms


def _entries(*lines: str, form: str = "- {}\n") -> str:
    return "".join(form.format(line) for line in lines)


CONTROL_LINE = "## Controls\n- c: knockout m\n"
HOSTILE = {
    "cross": "## Hypotheses\n" + _entries(*(f"a{n}: m | x" for n in range(3000))) + CONTROL_LINE + "## Predictions\n",
    "predictions": "## Hypotheses\n- a: m | x\n"
    + CONTROL_LINE
    + "## Predictions\n"
    + _entries(*(f"a{n} @ c: 0 .. 1" for n in range(900))),
    "sections": "## Hypotheses\n- a: m | x\n" + _entries(*map(str, range(9000)), form="## Edits {}\n"),
    "digits": "## Hypotheses\n- a: m | x\n"
    + CONTROL_LINE
    + "## Predictions\n"
    + ("- a @ c: " + "0" * 3900 + "\n") * 95,
    "blanks": "## Hypotheses\n- a: m | x\n"
    + CONTROL_LINE
    + "## Predictions\n- a @ c: 0 .. 1\n## Required edits\n"
    + ("- if a refuted: remove a at" + " " * 3900 + "!\n") * 95,
    "names": "## Hypotheses\n- a: m | x\n## Controls\n"
    + ("- c: knockout a" + " , a" * 990 + "!\n") * 95
    + "## Predictions\n",
}


@pytest.mark.timeout(30)  # every one of these took minutes, or for ever
@pytest.mark.parametrize("name", HOSTILE)
def test_no_reply_is_read_for_long(name: str) -> None:
    with pytest.raises(ReplyProblem) as caught:
        parse_explanation(HOSTILE[name])
    assert 1 <= len(caught.value.problems) <= 21


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        ('{"kind": "artifact", "property": "bits", "comparison": "<", "value": -1e999}', "with a number, not with -inf"),
        ('{"kind": "artifact", "property": "bits", "comparison": "<", "value": Infinity}', "not with inf"),
        ('{"kind": "artifact", "property": "scale_rule", "comparison": "!=", "value": "\\ud800"}', "surrogates not allowed"),
        ('{"kind": "call", "event": {"op": "install", "site": "\\ud800"}, "mechanism": "m"}', "surrogates not allowed"),
        ('{"kind": "knockout", "mechanism": "ghost", "mechanism": "m"}', "the key 'mechanism' stands twice"),
    ],
)  # fmt: skip
def test_a_probe_that_no_ledger_could_hold_is_refused(probe: str, words: str) -> None:
    reply = (
        "## Hypotheses\n- a: m | x\n- b: m | y\n## Controls\n- c: knockout m\n## Predictions\n- a @ c: 0 .. 0.1\n"
        f"- b @ c: 0.8 .. 1\n## Required edits\n- if a supported: refine m at everywhere | do it | probe {probe}\n"
    )
    with pytest.raises(ReplyProblem) as caught:
        parse_explanation(reply)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems
