"""The catalogue: its entries are real edits that weave into staged programs, its replies read like any other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forge import program_source
from forge.controls import build_control
from forge.edits import apply_edits
from forge.errors import ProposerExhausted
from forge.execution import touched_mechanisms
from forge.program_identity import ast_hash
from forge.proposers.base import ExplanationRequest, MeasuredEffect, ProposalRequest
from forge.proposers.catalogue import CatalogueProposer, catalogue_hash
from forge.proposers.catalogue.entry import Entry, load_entries
from forge.proposers.catalogue.proposer import _conditional
from forge.proposers.catalogue.weave import weave
from forge.replies import ReplyProblem, awaited_verdict, parse_explanation, parse_proposal
from forge.static_checks import static_problems
from hypotheses.probe_kinds import AbsentProbe
from hypotheses.required_edits import MAX_REFUSED_TURNS, EditRecord, RequiredEdit, check_required_edit

ROOT = Path(__file__).resolve().parents[2]
SEED = (ROOT / "forge" / "programs" / "rtn.py").read_text()
ENTRIES = {entry.key: entry for entry in load_entries()}
FROZEN = (ROOT / "tests" / "golden" / "catalogue.sha256").read_text().strip()


def woven(*keys: str) -> str:
    source = SEED
    for key in keys:
        source = apply_edits(source, weave(ENTRIES[key], source))
    return source


def with_needs(entry: Entry) -> str:
    """Return the seed with whatever the entry needs woven in."""
    adders = {
        mechanism: e.key for e in ENTRIES.values() if not e.carries_out for mechanism in e.adds if len(e.adds) == 1
    }
    return woven(*(adders[name] for name in entry.needs))


def request(source: str, **changes: object) -> ProposalRequest:
    facts: dict[str, object] = {
        "prompt": "",
        "turn": 1,
        "incumbent_source": source,
        "mechanisms": program_source.mechanisms(source),
    }
    return ProposalRequest(**(facts | changes))  # type: ignore[arg-type]


def test_it_is_frozen() -> None:
    """Figures are quoted for this catalogue. A changed entry means new figures: run them, then update the golden hash."""
    assert catalogue_hash() == FROZEN


def test_it_holds_enough_to_search() -> None:
    assert sum(not entry.carries_out for entry in ENTRIES.values()) >= 12
    families = {
        hypothesis.cause
        for entry in ENTRIES.values()
        if entry.explanation
        for hypothesis in entry.explanation.hypotheses
    }
    assert {"error_directions", "branch_capacity"} <= families
    assert {"outlier_spreading", "error_averaging"} <= families
    assert {"weight_side", "activation_side"} <= families
    assert {"calibration_volume", "input_correlation"} <= families


@pytest.mark.parametrize("key", ENTRIES)
def test_every_entry_weaves_into_a_valid_and_different_program(key: str) -> None:
    entry = ENTRIES[key]
    before = with_needs(entry)
    after = apply_edits(before, weave(entry, before))
    assert program_source.check_convention(after) == ()
    assert static_problems(after) == ()
    assert ast_hash(after) != ast_hash(before)
    declared = set(program_source.mechanisms(after))
    assert set(entry.adds) <= declared
    assert not set(entry.drops) & declared
    assert set(touched_mechanisms(before, after).altered) <= {claim.mechanism for claim in entry.claims}
    for name in entry.adds:
        assert ast_hash(program_source.knock_out(after, [name])) != ast_hash(after)


@pytest.mark.parametrize("key", [key for key, entry in ENTRIES.items() if entry.explanation])
def test_every_explanation_reads_and_its_controls_apply(key: str) -> None:
    entry = ENTRIES[key]
    parent = with_needs(entry)
    child = apply_edits(parent, weave(entry, parent))
    reply = CatalogueProposer().explain(
        ExplanationRequest(
            prompt="",
            observation="obs-1",
            turn=1,
            parent_source=parent,
            child_source=child,
            mechanisms_added=entry.adds,
            effect=MeasuredEffect(name="child", effect=0.1, standard_error=0.01),
            claims=tuple((claim.mechanism, claim.cause) for claim in entry.claims),
        )
    )
    parsed = parse_explanation(reply.text)
    assert entry.explanation is not None
    assert len(parsed.explanation.controls) == len(entry.explanation.controls)
    assert len(parsed.explanation.hypotheses) >= 2
    for control in parsed.explanation.controls:
        assert ast_hash(build_control(control, parent=parent, child=child)) != ast_hash(child)


def test_every_wish_follows_from_its_verdict_and_its_entry_brings_the_part() -> None:
    for entry in ENTRIES.values():
        for wish in entry.explanation.wishes if entry.explanation else ():
            assert wish.then in ENTRIES, f"{entry.key} wishes for {wish.then}"
            wanted = _conditional(wish, entry)
            verdict = awaited_verdict(wanted, wanted.edit.mechanism)
            mechanisms = {*entry.adds, *entry.needs, *(claim.mechanism for claim in entry.claims)}
            assert check_required_edit(wanted.edit, verdict, mechanisms=tuple(mechanisms)) == [], entry.key
            assert wish.part is None or wish.part in ENTRIES[wish.then].adds


def test_to_a_blocking_edit_that_no_entry_carries_out_it_answers_without_an_edit() -> None:
    foreign = RequiredEdit(
        kind="remove", mechanism="x", cause="y", wording="no entry does", probe=AbsentProbe(mechanism="x")
    )
    record = EditRecord(key="edit-1a2b3c4d", edit=foreign, lineage="main", order=1)
    reply = CatalogueProposer().propose(request(SEED, open_edits=(record,)))
    with pytest.raises(ReplyProblem):
        parse_proposal(reply.text)
    patient = replace(record, refused_turns=MAX_REFUSED_TURNS)
    assert parse_proposal(CatalogueProposer().propose(request(SEED, open_edits=(patient,))).text).edits


def test_the_refuted_balancing_returns_under_another_name() -> None:
    after = woven("balancing", "stronger_balancing")
    first, second = (program_source.mechanism_fingerprint(after, name) for name in ("balancing", "range_migration"))
    assert first == second


def test_same_request_same_answer_and_seeds_differ() -> None:
    answers = [CatalogueProposer().propose(request(SEED, seed=seed)).text for seed in (1, 1, 2, 3, 4, 5)]
    assert answers[0] == answers[1]
    assert len(set(answers)) > 1


def test_it_walks_to_an_end() -> None:
    source, tried = SEED, ()
    proposer = CatalogueProposer()
    for _ in range(100):
        try:
            reply = parse_proposal(proposer.propose(request(source, tried=tried)).text)
        except ProposerExhausted:
            break
        claims = tuple((claim.name, claim.cause) for claim in reply.mechanisms)
        assert not set(claims[:1]) & set(tried), "an entry came back"
        tried += claims
        before, source = source, apply_edits(source, reply.edits)
        assert program_source.check_convention(source) == ()
        assert set(touched_mechanisms(before, source).altered) <= {claim.name for claim in reply.mechanisms}, claims
    else:
        pytest.fail("the catalogue never ends")
    assert len(tried) >= 10
