"""What screens a reply before anything runs: the first stage that fails refuses it, with exact reasons."""

from __future__ import annotations

import pytest

from evaluators.results import EvaluationResult, Evidence, Outcome
from forge.edits import EditBlock
from forge.program_identity import ast_hash, mechanism_fingerprint
from forge.proposers.base import Reply
from forge.replies import MechanismClaim, ProposalReply
from forge.reply_writing import write_proposal
from forge.screening import Refusal, Rules, added_mechanisms, read_draft, smoke_digest
from forge.worked_examples import EXAMPLE_PROGRAM, example_child, example_proposal
from hypotheses.probe_kinds import KnockoutProbe
from hypotheses.required_edits import BarredClaim, EditKind, EditRecord, RequiredEdit

CHILD = example_child()


def rules(**changes: object) -> Rules:
    fields: dict[str, object] = {
        "incumbent": EXAMPLE_PROGRAM,
        "open_edits": (),
        "barred": frozenset(),
        "earlier_ast_hashes": frozenset({ast_hash(EXAMPLE_PROGRAM)}),
        "earlier_smoke_digests": frozenset(),
        "allowed_class": "online",
    }
    return Rules(**(fields | changes))  # type: ignore[arg-type]


def record(*, kind: EditKind = "extend", blocking: bool = True, mechanism: str = "scale_search") -> EditRecord:
    edit = RequiredEdit(
        kind=kind,
        mechanism=mechanism,
        cause="scale_choice",
        wording="carry it on",
        probe=KnockoutProbe(mechanism=mechanism),
        blocking=blocking,
    )
    return EditRecord(key="edit-1a2b3c4d", edit=edit, lineage="main", order=1)


def reply(
    *edits: tuple[str, str], mechanisms: tuple[MechanismClaim, ...] = (), discharges: tuple[str, ...] = ()
) -> str:
    return write_proposal(
        ProposalReply(
            analysis="a",
            mechanisms=mechanisms,
            discharges=discharges,
            edits=tuple(EditBlock(search=search, replace=replace) for search, replace in edits),
        )
    )


LINE = '        weight = encode(session.weight(layer), scale_rule="even")'
FLOOR = (LINE, LINE.replace("even", "floor"))


def refusal(text: str, held_to: Rules | None = None, *, finish_reason: str = "stop") -> Refusal:
    with pytest.raises(Refusal) as info:
        read_draft(Reply(text=text, model="m", finish_reason=finish_reason), held_to or rules())
    assert info.value.problems
    assert str(info.value).startswith(info.value.stage)
    return info.value


def test_a_good_reply_becomes_a_draft() -> None:
    draft = read_draft(Reply(text=example_proposal(), model="m"), rules())
    assert ast_hash(draft.source) == ast_hash(CHILD)
    assert draft.added == ("scale_search",)
    assert [claim.name for claim in draft.proposal.mechanisms] == ["scale_search"]


@pytest.mark.parametrize(
    ("text", "stage", "words"),
    [
        ("I think that rotation helps.", "format", "no section of the format"),
        ("", "format", "empty"),
        (reply(("    nowhere()", "    somewhere()")), "edits", "nowhere()"),
        (reply(("MECHANISMS = ()", 'MECHANISMS = ("gone",)')), "convention", "no top-level function gone"),
        (reply((LINE, "        weight = (")), "convention", "does not parse"),
        (reply((LINE, f"        open('/etc/passwd')\n{LINE}")), "static", "open"),
        (reply((LINE, f"{LINE}  # the same again")), "duplicate", "tried before"),
        (
            reply(FLOOR, mechanisms=(MechanismClaim(name="ghost", cause="magic", statement="s"),)),
            "mechanisms",
            "'ghost' is relied on but is not in MECHANISMS",
        ),
        (reply(FLOOR, discharges=("edit-99999999",)), "required edit", "'edit-99999999' is no open required edit"),
        (reply((LINE, "        weight = '\ud800'")), "convention", "parse"),
    ],
)
def test_each_stage_refuses_with_its_reason(text: str, stage: str, words: str) -> None:
    refused = refusal(text)
    assert refused.stage == stage
    assert words in " ".join(refused.problems)


def test_a_reply_cut_off_by_the_token_limit_is_refused_by_its_format() -> None:
    assert refusal(example_proposal(), finish_reason="length").stage == "format"


def test_an_earlier_program_is_refused_whatever_its_comments() -> None:
    held_to = rules(earlier_ast_hashes=frozenset({ast_hash(CHILD)}))
    assert refusal(example_proposal(), held_to).stage == "duplicate"


def test_the_blocking_required_edit_must_be_addressed() -> None:
    refused = refusal(reply(FLOOR), rules(open_edits=(record(),)))
    assert refused.stage == "required edit"
    assert "edit-1a2b3c4d blocks: carry it on" in refused.problems[0]
    answered = Reply(text=reply(FLOOR, discharges=("edit-1a2b3c4d",)), model="m")
    assert read_draft(answered, rules(open_edits=(record(),))).proposal.discharges == ("edit-1a2b3c4d",)
    assert read_draft(Reply(text=reply(FLOOR), model="m"), rules(open_edits=(record(blocking=False),)))


def test_a_barred_claim_is_refused_by_name() -> None:
    barred = frozenset({BarredClaim(mechanism="scale_search", cause="scale-choice")})
    refused = refusal(example_proposal(), rules(barred=barred))
    assert refused.stage == "barred claim"
    assert "'scale_search' acts through 'scale_choice' stands refuted" in refused.problems[0]


def test_a_barred_claim_is_known_again_under_another_name() -> None:
    barred = frozenset(
        {
            BarredClaim(
                mechanism="scale_search",
                cause="scale_choice",
                fingerprint=mechanism_fingerprint(CHILD, "scale_search"),
            )
        }
    )
    renamed = example_proposal().replace("scale_search", "wholly_new").replace("(weight)", "(tensor)")
    refused = refusal(renamed.replace("encode(weight, scale_rule", "encode(tensor, scale_rule"), rules(barred=barred))
    assert refused.stage == "barred claim"
    assert "'wholly_new'" in refused.problems[0]
    assert "(as 'scale_search')" in refused.problems[0]


def test_another_cause_or_a_retest_may_lean_on_the_mechanism() -> None:
    barred = frozenset({BarredClaim(mechanism="scale_search", cause="scale_choice")})
    other = example_proposal().replace("scale_choice", "clipping")
    assert read_draft(Reply(text=other, model="m"), rules(barred=barred)).added == ("scale_search",)
    retest = example_proposal().replace("## Edits", "## Discharges\n- edit-1a2b3c4d\n\n## Edits")
    if "## Discharges\nnone" in retest:
        retest = example_proposal().replace("## Discharges\nnone", "## Discharges\n- edit-1a2b3c4d")
    held_to = rules(barred=barred, open_edits=(record(kind="retest", blocking=False),))
    assert read_draft(Reply(text=retest, model="m"), held_to).proposal.discharges == ("edit-1a2b3c4d",)
    assert refusal(example_proposal(), held_to).stage == "barred claim"


def test_added_mechanisms_are_new_ones_and_those_with_other_code() -> None:
    assert added_mechanisms(EXAMPLE_PROGRAM, CHILD) == ("scale_search",)
    assert added_mechanisms(CHILD, CHILD) == ()
    assert added_mechanisms(CHILD, EXAMPLE_PROGRAM) == ()
    assert added_mechanisms(CHILD, CHILD.replace("# ", "# other ")) == ()
    assert added_mechanisms(CHILD, CHILD.replace('"search")', '"floor")')) == ("scale_search",)


def test_a_smoke_digest_names_what_was_installed_whatever_the_order() -> None:
    def result(**layers: str) -> EvaluationResult:
        evidence = Evidence(layers={name: {"digest": digest} for name, digest in layers.items()})
        return EvaluationResult(outcome=Outcome.SCORED, split="search", draw=0, seed=0, evidence=evidence)

    assert smoke_digest(result(a="1", b="2")) == smoke_digest(result(b="2", a="1"))
    assert smoke_digest(result(a="1", b="2")) != smoke_digest(result(a="2", b="1"))
