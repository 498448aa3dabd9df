from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hypotheses.predictions import Explanation
from hypotheses.probes import Place, ProbeEvidence, ProbeResult, ProbeStatus
from hypotheses.required_edits import (
    MAX_PAID_ATTEMPTS,
    MAX_REFUSED_TURNS,
    BarredClaim,
    EditRecord,
    EditState,
    EditStateError,
    JudgedClaim,
    RequiredEdit,
    attempt,
    barred_claims,
    check_carried_out,
    check_required_edit,
    claim_is_barred,
    close_costly,
    contradict,
    default_edits,
    discharge,
    expire,
    refuse,
    settle,
    supersede,
)
from hypotheses.verdicts import ALPHA, RULE, Verdict, VerdictStatus

EXECUTED = ProbeResult(status=ProbeStatus.EXECUTED, detail="14 of 14 layers")
IDLE = ProbeResult(status=ProbeStatus.NOT_EXECUTED, detail="0 of 14 layers")
OPEN_QUESTION = ProbeResult(status=ProbeStatus.UNDETERMINED, detail="the twin crashed")
ADVISORY = ProbeResult(status=ProbeStatus.EXECUTED, detail="5 line hits", advisory=True)


def verdict(status: str, mechanism: str = "branch", cause: str = "selection") -> Verdict:
    return Verdict(
        rule=RULE,
        hypothesis=f"{mechanism}-{cause}".replace("_", "-"),
        mechanism=mechanism,
        cause=cause,
        status=VerdictStatus(status),
        reason="",
        alpha=ALPHA,
        checks=(),
        survivors=(),
    )


def edit(**changes: Any) -> RequiredEdit:
    plain: dict[str, Any] = {
        "kind": "replace",
        "mechanism": "branch",
        "cause": "selection",
        "wording": "Spend the bits on a plain branch instead.",
        "probe": {"kind": "absent", "mechanism": "branch"},
    }
    return RequiredEdit.model_validate(plain | changes)


def knockout(mechanism: str = "branch", **changes: Any) -> dict[str, Any]:
    return {"kind": "knockout", "mechanism": mechanism} | changes


def record(key: str = "e1", order: int = 1, lineage: str = "main", **changes: Any) -> EditRecord:
    return EditRecord(key=key, edit=edit(**changes), lineage=lineage, order=order)


# The grammar


@pytest.mark.parametrize(
    ("status", "kind", "probe"),
    [
        ("refuted", "remove", {"kind": "absent", "mechanism": "branch"}),
        ("refuted", "remove", knockout(expect="unchanged")),
        ("refuted", "replace", knockout("plain_branch") | {"part": "plain_branch"}),
        ("refuted", "replace", {"kind": "artifact", "property": "rank", "value": 0}),
        ("refuted", "retest", knockout()),
        ("supported", "extend", knockout()),
        ("supported", "refine", {"kind": "artifact", "property": "weight_error", "comparison": "<", "value": 0.01}),
        ("supported", "extend", {"kind": "call", "event": {"op": "second_moment"}, "mechanism": "branch"}),
        ("supported", "extend", {"kind": "call", "event": {"op": "install", "min_rank": 8}}),
    ],
)
def test_edits_that_follow_from_their_verdict(status: str, kind: str, probe: dict[str, Any]) -> None:
    part = probe.pop("part", None)
    wanted = edit(kind=kind, probe=probe, part=part)
    assert check_required_edit(wanted, verdict(status), mechanisms=("branch",)) == []


@pytest.mark.parametrize(
    ("status", "changes", "message"),
    [
        ("refuted", {"kind": "extend", "probe": knockout()},
         "a claim that is refuted does not call for 'extend'; it calls for remove or replace or retest"),
        ("supported", {"kind": "remove"},
         "a claim that is supported does not call for 'remove'; it calls for extend or refine"),
        ("inconclusive", {"kind": "retest", "probe": knockout()},
         "a verdict of 'inconclusive' decides nothing, so its edit cannot be blocking"),
        ("not_executed", {"blocking": False},
         "a claim that is not_executed does not call for 'replace'; it calls for retest"),
        ("refuted", {"cause": "capacity"},
         "the edit is about (branch, capacity), its verdict about (branch, selection)"),
        ("refuted", {"probe": {"kind": "line", "function": "branch"}},
         "a probe of kind 'line' cannot show that 'replace' was done (line hits are advisory); "
         "use absent or artifact or call or order or knockout"),
        ("supported", {"kind": "extend"},
         "a probe of kind 'absent' cannot show that 'extend' was done; use knockout or artifact or call"),
        ("refuted", {"kind": "remove", "probe": knockout()},
         "a knockout probe of 'remove' expects 'unchanged', not 'changed'"),
        ("supported", {"kind": "extend", "probe": knockout(expect="unchanged")},
         "a knockout probe of 'extend' expects 'changed', not 'unchanged'"),
        ("refuted", {"kind": "remove", "probe": {"kind": "absent", "mechanism": "rotation"}},
         "the probe is about 'rotation', the edit about 'branch'"),
        ("refuted", {"probe": knockout()},
         "knocking out 'branch' cannot show that it was replaced; name what replaces it"),
        ("supported", {"kind": "refine", "probe": {"kind": "call", "event": {"op": "second_moment"}}},
         "the result of a call of 'second_moment' may be thrown away; name the mechanism that uses it in the probe"),
        ("supported", {"kind": "extend", "place": {"roles": ["down"]}, "probe": knockout(place={"roles": ["q"]})},
         "the probe looks at q of all blocks, which does not cover down of all blocks"),
        ("supported", {"kind": "extend", "place": {"roles": ["q", "down"]}, "probe": knockout(place={"roles": ["q"]})},
         "the probe looks at q of all blocks, which does not cover down, q of all blocks"),
        ("supported", {"kind": "extend", "probe": knockout("ghost")},
         "the probe is about 'ghost', the edit about 'branch'; a part that is to come is declared, "
         "as in 'extend branch with ghost at ...'"),
        ("supported", {"kind": "refine", "part": "finer", "probe": knockout("ghost")},
         "the probe is about 'ghost', the edit about 'branch' with 'finer'"),
        ("refuted", {"kind": "retest", "probe": knockout("ghost")}, "the probe is about 'ghost', the edit about 'branch'"),
        ("refuted", {"kind": "replace", "part": "ghost", "probe": {"kind": "absent", "mechanism": "ghost"}},
         "the probe is about 'ghost', the edit about 'branch'"),
        ("refuted", {"kind": "remove", "part": "finer"}, "'remove' brings no part, so 'finer' has no place in it"),
        ("supported", {"kind": "refine", "part": "branch", "probe": knockout()},
         "the part that is to come is named 'branch' like the mechanism itself"),
    ],
)  # fmt: skip
def test_edits_that_do_not(status: str, changes: dict[str, Any], message: str) -> None:
    assert check_required_edit(edit(**changes), verdict(status)) == [message]


def test_edits_against_the_incumbent() -> None:
    whole = edit(kind="remove", mechanism="quantize", probe={"kind": "absent", "mechanism": "quantize"})
    assert check_required_edit(whole, verdict("refuted", "quantize"), mechanisms=("branch",)) == [
        "'quantize' is the program itself; the incumbent stays whatever becomes of its explanation"
    ]
    assert check_required_edit(edit(), verdict("refuted"), mechanisms=("rotation",)) == [
        "mechanism 'branch' is not in the incumbent; declared there: 'rotation'"
    ]


def test_a_refinement_may_bring_a_part_of_its_own() -> None:
    refined = edit(kind="refine", part="finer", probe={"kind": "knockout", "mechanism": "finer"})
    assert check_required_edit(refined, verdict("supported"), mechanisms=("branch",)) == []
    assert check_required_edit(refined, verdict("supported"), mechanisms=("branch", "finer")) == [
        "part 'finer' is in the incumbent already; name the part that is to come"
    ]


def test_a_retest_of_what_is_not_there_is_told() -> None:
    retest = edit(kind="retest", mechanism="gone", probe=knockout("gone"))
    (problem,) = check_required_edit(retest, verdict("refuted", "gone"), mechanisms=("branch",))
    assert problem == "probe names mechanism 'gone', which the program does not declare; declared: 'branch'"


def test_a_probe_that_holds_already_could_not_show_the_edit() -> None:
    layers = {f"blocks.0.{role}": {"digest": role, "rank": 0, "transform": []} for role in ("q", "down")}
    incumbent = ProbeEvidence(layers=layers, mechanisms=("branch",))
    probe = {"kind": "artifact", "property": "rank", "value": 0}
    (problem,) = check_required_edit(edit(probe=probe), verdict("refuted"), incumbent=incumbent)
    assert problem.startswith("its probe holds for the incumbent already (rank == 0 holds for 2 of 2 layers")
    changed = edit(probe=probe | {"value": 8})
    assert check_required_edit(changed, verdict("refuted"), incumbent=incumbent) == []
    elsewhere = edit(place={"blocks": [9]}, probe=probe | {"value": 8})
    assert check_required_edit(elsewhere, verdict("refuted"), incumbent=incumbent) == [
        "the subject has no layer at all roles of blocks 9"
    ]


@pytest.mark.parametrize("kind", ["extend", "refine"])
@pytest.mark.parametrize(
    ("twin", "words"),
    [
        ({"q": "x", "down": "x"}, "its probe holds for the incumbent already"),
        ({"q": "q", "down": "down"}, None),
        ({}, "its probe has no answer for the incumbent"),
        (None, None),
    ],
)
def test_a_knockout_of_what_is_there_needs_the_incumbents_twin(
    kind: str, twin: dict[str, str] | None, words: str | None
) -> None:
    def run(digests: dict[str, str]) -> ProbeEvidence:
        layers = {f"blocks.0.{role}": {"digest": digest} for role, digest in digests.items()}
        return ProbeEvidence(layers=layers, mechanisms=("branch",))

    problems = check_required_edit(
        edit(kind=kind, probe=knockout()),
        verdict("supported"),
        mechanisms=("branch",),
        incumbent=run({"q": "q", "down": "down"}),
        incumbent_knocked_out=None if twin is None else run(twin),
    )
    if kind == "refine" or words is None:
        assert problems == []
    else:
        (problem,) = problems
        assert words in problem


# Carrying an edit out


def run_of(*mechanisms: str, **digests: str) -> ProbeEvidence:
    layers = {f"blocks.0.{role}": {"digest": digest} for role, digest in digests.items()}
    return ProbeEvidence(layers=layers, mechanisms=mechanisms)


@pytest.mark.parametrize(
    ("changes", "altered", "run", "status", "words"),
    [
        ({}, ("branch",), {"q": "new", "down": "new"}, "executed", "changes 2 of 2"),
        ({}, (), {"q": "new", "down": "new"}, "not_executed", "'branch' has the code that it has in the incumbent"),
        ({}, ("branch",), {"q": "q", "down": "down"}, "not_executed", "is what the incumbent installs"),
        ({"place": {"roles": ["q"]}}, ("branch",), {"q": "q", "down": "new"}, "not_executed", "at q of all blocks"),
        ({"part": "finer"}, (), {"q": "new", "down": "new"}, "not_executed", "and 'finer' is no new mechanism"),
        ({"part": "finer"}, ("finer",), {"q": "new", "down": "new"}, "executed", ""),
    ],
)
@pytest.mark.parametrize("kind", ["extend", "refine"])
def test_what_builds_on_a_mechanism_must_change_it_and_what_is_installed(
    kind: str, changes: dict[str, Any], altered: tuple[str, ...], run: dict[str, str], status: str, words: str
) -> None:
    answer = check_carried_out(
        edit(kind=kind, probe=knockout(), **changes),
        run_of("branch", "finer", **run),
        incumbent=run_of("branch", q="q", down="down"),
        altered=altered,
        knocked_out=run_of("branch", "finer", q="without", down="without"),
    )
    assert (answer.status, words in answer.detail) == (status, True), answer.detail


@pytest.mark.parametrize("probe", [knockout(), {"kind": "artifact", "property": "rank", "value": 8}])
@pytest.mark.parametrize(
    ("altered", "not_neutral", "idle", "words"),
    [
        (("branch",), "", {}, ""),
        (("branch",), "the neutral harms", {}, "the neutral harms"),
        (("branch", "finer"), "", {"finer": "nothing hangs on it"}, ""),
        (("finer",), "", {"finer": "nothing hangs on it"}, "'finer' does not act: nothing hangs on it"),
    ],
)
def test_what_builds_on_a_mechanism_acts_and_its_neutral_is_one(
    probe: dict[str, Any], altered: tuple[str, ...], not_neutral: str, idle: dict[str, str], words: str
) -> None:
    """Whatever the probe looks at: what the artifact shows says nothing of where it comes from."""
    run = ProbeEvidence(layers={"blocks.0.q": {"digest": "new", "rank": 8}}, mechanisms=("branch", "finer"))
    answer = check_carried_out(
        edit(kind="refine", part="finer", probe=probe),
        run,
        incumbent=run_of("branch", q="q"),
        altered=altered,
        knocked_out=run_of("branch", "finer", q="without"),
        not_neutral=not_neutral,
        idle=idle,
    )
    assert answer.is_decisive is (words == "")
    assert words in answer.detail


def test_what_is_to_go_may_be_idle() -> None:
    gone = edit(kind="remove", probe=knockout(expect="unchanged"))
    run = run_of("branch", q="q")
    idle = {"branch": "nothing hangs on it"}
    assert check_carried_out(gone, run, incumbent=run, altered=(), knocked_out=run, idle=idle).is_decisive


def test_a_removal_needs_its_probe_alone() -> None:
    gone = edit(kind="remove")
    incumbent = run_of("branch", q="q")
    assert check_carried_out(gone, run_of(q="q"), incumbent=incumbent, altered=()).is_decisive
    idle = edit(kind="refine", probe=knockout())
    same = check_carried_out(
        idle, run_of("branch", q="a"), incumbent=incumbent, altered=("branch",), knocked_out=run_of(q="a")
    )
    assert same.status is ProbeStatus.NOT_EXECUTED


def test_wording_is_required_and_the_probe_is_typed() -> None:
    with pytest.raises(ValidationError, match="at least 1 character"):
        edit(wording="  ")
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        edit(probe={"kind": "prose"})
    assert RequiredEdit.model_validate_json(edit().model_dump_json()) == edit()


# Default edits


def explanation(*claims: tuple[str, str]) -> Explanation:
    keys = [f"{mechanism}-{cause}".replace("_", "-") for mechanism, cause in claims]
    return Explanation.model_validate(
        {
            "hypotheses": [
                {"key": key, "mechanism": mechanism, "cause": cause, "statement": f"{cause} it is."}
                for key, (mechanism, cause) in zip(keys, claims, strict=True)
            ],
            "controls": [{"key": "x", "kind": "knockout", "removes": ["branch"]}],
            "predictions": [
                {"hypothesis": key, "control": "x", "low": n / 2, "high": n / 2 + 0.1} for n, key in enumerate(keys)
            ],
        }
    )


def test_default_edits_follow_from_their_verdicts() -> None:
    claims = (("rotation", "spreading"), ("branch", "selection"), ("rotation", "averaging"))
    verdicts = [verdict("supported", *claims[0]), verdict("refuted", *claims[1]), verdict("refuted", *claims[2])]
    edits = default_edits(verdicts, explanation(*claims), worst=Place(roles=("down",)))
    assert [(e.kind, e.mechanism, e.blocking) for e in edits] == [
        ("extend", "rotation", True),
        ("remove", "branch", False),
    ]
    assert str(edits[0].place) == "down of all blocks"
    for found in edits:
        owner = next(v for v in verdicts if v.claim == (found.mechanism, found.cause))
        assert check_required_edit(found, owner, mechanisms=("branch", "rotation")) == []


def test_default_edits_where_nothing_is_supported() -> None:
    claims = (("branch", "capacity"), ("branch", "selection"))
    verdicts = [verdict("refuted", *claim) for claim in claims]
    edits = default_edits(verdicts, explanation(*claims))
    assert [(e.kind, e.cause, e.blocking) for e in edits] == [
        ("retest", "capacity", False),
        ("retest", "selection", False),
    ]
    assert all(check_required_edit(e, v, mechanisms=("branch",)) == [] for e, v in zip(edits, verdicts, strict=True))
    assert default_edits([verdict("inconclusive", *claim) for claim in claims], explanation(*claims)) == []


# Life of an edit


def test_smoke_runs_are_provisional() -> None:
    assert attempt(record(), EXECUTED, paid=False) == record()


def test_a_paid_run_discharges() -> None:
    done = attempt(record(), EXECUTED, paid=True)
    assert (done.state, done.paid_attempts, done.note) == (EditState.DISCHARGED, 1, "executed: 14 of 14 layers")
    assert not done.blocks


def test_a_paid_run_that_costs_quality_closes_as_costly() -> None:
    assert attempt(record(), EXECUTED, paid=True, worse=True).state is EditState.COSTLY
    assert attempt(record(), IDLE, paid=True, worse=True).state is EditState.OPEN  # nothing executed, nothing to blame


@pytest.mark.parametrize("result", [IDLE, OPEN_QUESTION, ADVISORY])
def test_three_paid_attempts_in_vain_expire(result: ProbeResult) -> None:
    one = attempt(record(), result, paid=True)
    two = attempt(attempt(one, result, paid=False), result, paid=True)
    assert (one.paid_attempts, two.paid_attempts, two.state) == (1, 2, EditState.OPEN)
    three = attempt(two, result, paid=True)
    assert (three.paid_attempts, three.state) == (MAX_PAID_ATTEMPTS, EditState.EXPIRED)
    assert three.note.startswith("3 paid attempts in vain; ")


def test_transitions_that_are_not_allowed() -> None:
    with pytest.raises(EditStateError, match="has 0 paid attempts; it expires after 3"):
        expire(record())
    with pytest.raises(EditStateError, match="cannot be discharged by a probe that reads 'not_executed'"):
        discharge(record(), IDLE)
    with pytest.raises(EditStateError, match="cannot be discharged by a probe"):
        discharge(record(), ADVISORY)
    with pytest.raises(EditStateError, match="did not execute, so what it costs is not known"):
        close_costly(record(), IDLE)
    closed = attempt(record(), EXECUTED, paid=True)
    for step in (
        lambda: attempt(closed, EXECUTED, paid=True),
        lambda: discharge(closed, EXECUTED),
        lambda: expire(closed),
    ):
        with pytest.raises(EditStateError, match="'e1' is discharged and cannot be"):
            step()


def test_newer_verdicts_supersede() -> None:
    old, new = (
        record("old", 1),
        record("new", 2, mechanism="rotation", probe={"kind": "absent", "mechanism": "rotation"}),
    )
    states = {r.key: (r.state, r.note) for r in supersede((old,), new)}
    assert states == {"old": (EditState.SUPERSEDED, "superseded by new"), "new": (EditState.OPEN, "")}
    late = {r.key: r.state for r in supersede((new,), old)}
    assert late == {"old": EditState.SUPERSEDED, "new": EditState.OPEN}
    with pytest.raises(EditStateError, match="'old' is there already"):
        supersede((old,), old)


def test_other_lineages_and_edits_that_agree_are_left_alone() -> None:
    there = (record("a", 1, lineage="left"), record("b", 1, blocking=False))
    assert [r.state for r in supersede(there, record("c", 2))] == [EditState.OPEN] * 3


def test_contradictions() -> None:
    extend = edit(kind="extend", cause="capacity", probe=knockout(), place={"roles": ["down"]})
    assert contradict(edit(kind="remove"), extend)  # another claim, but the same code cannot go and grow
    assert not contradict(edit(kind="remove", place={"roles": ["q"]}), extend)
    assert not contradict(edit(kind="replace"), extend)  # drop the selection, carry the capacity on
    assert contradict(edit(kind="replace", cause="capacity"), extend)
    assert not contradict(edit(kind="retest", probe=knockout()), edit(kind="remove"))
    assert not contradict(edit(kind="remove"), edit(kind="remove"))


steps = st.lists(
    st.tuples(
        st.sampled_from(["require", "paid", "smoke"]),
        st.sampled_from([EXECUTED, IDLE, OPEN_QUESTION, ADVISORY]),
        st.booleans(),
        st.sampled_from(["left", "right"]),
        st.sampled_from(["remove", "replace", "extend", "refine", "retest"]),
        st.sampled_from(["branch", "rotation"]),
        st.integers(0, 30),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_no_sequence_of_verdicts_and_attempts_deadlocks(sequence: list[tuple[Any, ...]]) -> None:
    """At most one blocking edit per lineage; closed ones stay closed; three paid attempts close whatever is open."""
    records: tuple[EditRecord, ...] = ()
    for number, (what, result, flag, lineage, kind, mechanism, order) in enumerate(sequence):
        closed = [r for r in records if not r.is_open]
        if what == "require":
            demand = edit(kind=kind, mechanism=mechanism, probe=knockout(mechanism), blocking=flag)
            records = supersede(records, EditRecord(key=f"e{number}", edit=demand, lineage=lineage, order=order))
        else:
            records = tuple(
                attempt(r, result, paid=what == "paid", worse=flag) if r.is_open and r.lineage == lineage else r
                for r in records
            )
        assert all(r in records for r in closed)
        for line in ("left", "right"):
            assert sum(r.blocks for r in records if r.lineage == line) <= 1
        assert all(r.paid_attempts <= MAX_PAID_ATTEMPTS for r in records)
        contradictions = [
            (a.key, b.key)
            for a in records
            for b in records
            if a.key < b.key and a.is_open and b.is_open and a.lineage == b.lineage and contradict(a.edit, b.edit)
        ]
        assert not contradictions
    # The laziest proposer pays for three programs that do nothing, and nothing binds it any more.
    for _ in range(MAX_PAID_ATTEMPTS):
        records = tuple(attempt(r, IDLE, paid=True) if r.is_open else r for r in records)
    assert not any(r.is_open for r in records)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["left", "right"])), max_size=8), st.randoms())
def test_the_newest_blocking_edit_stands_whatever_the_order(rows: list[tuple[int, str]], rng: random.Random) -> None:
    wanted = [record(f"e{n}", order, lineage) for n, (order, lineage) in enumerate(rows)]
    rng.shuffle(wanted)
    records: tuple[EditRecord, ...] = ()
    for new in wanted:
        records = supersede(records, new)
    for line in ("left", "right"):
        mine = [r for r in wanted if r.lineage == line]
        standing = [r.key for r in records if r.lineage == line and r.blocks]
        assert standing == ([max(mine, key=lambda r: (r.order, r.key)).key] if mine else [])


# Barred claims


def judged(status: str, mechanism: str = "branch", fingerprint: str | None = None) -> JudgedClaim:
    return JudgedClaim(
        mechanism=mechanism, cause="selection", status=VerdictStatus(status), fingerprint=fingerprint, program="prog-1"
    )


def test_refuted_claims_are_barred_and_support_lifts_the_bar() -> None:
    history = [judged("supported"), judged("refuted", fingerprint="f00d"), judged("inconclusive")]
    barred = barred_claims(history)
    assert barred == {BarredClaim(mechanism="branch", cause="selection", fingerprint="f00d", program="prog-1")}
    assert barred_claims([*history, judged("supported")]) == frozenset()
    assert len(barred_claims([*history, judged("supported"), judged("refuted")])) == 1
    assert barred_claims([*history, judged("supported", "salient", "f00d")]) == frozenset(), "the same code renamed"
    assert barred_claims([*history, judged("supported", "salient", "beef")]) == barred


def test_a_claim_is_recognised_under_another_name() -> None:
    barred = barred_claims([judged("refuted", fingerprint="f00d")])
    (claim,) = barred
    assert claim_is_barred("branch", "beef", "selection", barred) == claim  # tuned, under the old name
    assert claim_is_barred("salient", "f00d", "selection", barred) == claim
    assert claim_is_barred("salient", "f00d", "Selection", barred) == claim
    assert claim_is_barred("salient", "beef", "selection", barred, installs_the_same=lambda other: True) == claim
    assert claim_is_barred("salient", "beef", "selection", barred, installs_the_same=lambda other: False) is None
    assert claim_is_barred("salient", "beef", "capacity", barred, installs_the_same=lambda other: True) is None
    assert claim_is_barred("salient", None, "selection", barred) is None


def test_inherited_code_under_another_claim_is_legal() -> None:
    """What is refuted is the pair, not the code: the same mechanism may be used for what it does do."""
    barred = barred_claims([judged("refuted", fingerprint="f00d")])
    assert claim_is_barred("branch", "f00d", "capacity", barred) is None


def test_unknown_fingerprints_do_not_match_each_other() -> None:
    assert claim_is_barred("salient", None, "selection", barred_claims([judged("refuted")])) is None


# Refused turns and newer verdicts


def test_an_edit_that_nobody_addresses_stops_blocking_and_stays_open() -> None:
    ignored = record()
    for turn in range(MAX_REFUSED_TURNS):
        assert ignored.blocks, turn
        ignored = refuse(ignored)
    assert ignored.is_open
    assert not ignored.blocks
    assert attempt(ignored, EXECUTED, paid=True).state is EditState.DISCHARGED
    with pytest.raises(EditStateError, match="cannot be refused"):
        refuse(attempt(record(), EXECUTED, paid=True))


def test_an_edit_of_what_the_incumbent_lacks_does_not_block() -> None:
    assert record().blocks
    assert not dataclasses.replace(record(), set_aside=True).blocks


@pytest.mark.parametrize(
    ("kind", "status", "state"),
    [
        ("retest", "supported", "discharged"),
        ("retest", "refuted", "discharged"),
        ("retest", "inconclusive", "open"),
        ("retest", "not_executed", "open"),
        ("extend", "refuted", "superseded"),
        ("refine", "refuted", "superseded"),
        ("extend", "supported", "open"),
        ("remove", "supported", "superseded"),
        ("replace", "supported", "superseded"),
        ("remove", "refuted", "open"),
        ("remove", "inconclusive", "open"),
    ],
)
def test_a_newer_verdict_on_its_claim_settles_an_edit(kind: str, status: str, state: str) -> None:
    open_edit = record(kind=kind, probe=knockout())
    after = settle(open_edit, verdict(status, cause="Selection"))
    assert after.state == state
    assert (after == open_edit) == (state == "open")
    assert settle(open_edit, verdict(status, cause="capacity")) == open_edit
    assert settle(open_edit, verdict(status, mechanism="rotation")) == open_edit
