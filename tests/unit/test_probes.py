from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hypotheses.probes import (
    AbsentProbe,
    Place,
    Probe,
    ProbeEvidence,
    ProbeResult,
    ProbeStatus,
    Removal,
    check_control,
    check_probe,
    installs_the_same,
    probe_mechanism,
    probe_problems,
    with_fingerprint,
)

ROLES = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o", "gate": "gate_up", "up": "gate_up", "down": "down"}
READ: TypeAdapter[Probe] = TypeAdapter(Probe)


def probe(**data: Any) -> Probe:
    """Read a probe as it comes from a reply."""
    return READ.validate_python(data)


def events(num_blocks: int = 2) -> list[dict[str, Any]]:
    """Measure each group's input, install its layers, one group after the other."""
    log: list[dict[str, Any]] = []
    for block in range(num_blocks):
        for group in ("qkv", "o", "gate_up", "down"):
            log.append({"op": "second_moment", "group": f"blocks.{block}.{group}", "block": block, "role": group,
                        "stream": "quantized"})  # fmt: skip
            for role in (role for role, owner in ROLES.items() if owner == group):
                log.append({"op": "install", "layer": f"blocks.{block}.{role}", "block": block, "role": role,
                            "rank": 0, "transform": ["hadamard:32"]})  # fmt: skip
    return [event | {"index": index} for index, event in enumerate(log)]


def layers(num_blocks: int = 2, version: str = "a", **changes: Any) -> dict[str, dict[str, Any]]:
    plain = {"transform": ["hadamard:32"], "scale_rule": "even", "code_rule": "nearest", "rank": 0, "bits": 4.25,
             "weight_error": 0.01}  # fmt: skip
    return {
        f"blocks.{block}.{role}": plain | {"digest": f"{version}{block}{role}"} | changes
        for block in range(num_blocks)
        for role in ROLES
    }


def run(**changes: Any) -> ProbeEvidence:
    plain: dict[str, Any] = {
        "events": tuple(events()),
        "layers": layers(),
        "mechanisms": ("rotation", "code_search"),
        "source_names": frozenset({"quantize", "rotation", "without_rotation", "code_search", "without_code_search"}),
    }
    return ProbeEvidence(**(plain | changes))


def status(asked: Probe, evidence: ProbeEvidence, twin: ProbeEvidence | None = None) -> str:
    return check_probe(asked, evidence, knocked_out=twin).status.value


# Places


def test_places() -> None:
    assert Place().has_layer("blocks.3.gate")
    assert Place(roles=("q",), blocks=(3,)).has_layer("blocks.3.q")
    assert not Place(roles=("q",), blocks=(3,)).has_layer("blocks.13.q")
    assert Place(groups=("gate_up",)).has_layer("blocks.0.up")
    assert not Place(groups=("gate_up",)).has_layer("blocks.0.down")
    assert not Place(blocks=(0,)).has_layer("lm_head")
    assert Place(roles=("q",)).overlaps(Place(groups=("qkv",), blocks=(1,)))
    assert not Place(blocks=(0,)).overlaps(Place(blocks=(1,)))
    assert Place(roles=("q",), blocks=(1,)).is_within(Place(groups=("qkv",)))
    assert not Place(roles=("q",)).is_within(Place(roles=("q",), blocks=(1,)))
    assert str(Place()) == "everywhere"
    assert str(Place(roles=("up", "down"), blocks=(1, 2))) == "down, up of blocks 1, 2"
    with pytest.raises(ValidationError):
        Place(blocks=(-1,))


# call


def test_call_counts_events_at_a_place() -> None:
    measured = probe(kind="call", event={"op": "second_moment", "place": {"groups": ["down"]}}, at_least=2)
    assert status(measured, run()) == "executed"
    more = probe(kind="call", event={"op": "second_moment", "place": {"groups": ["down"]}}, at_least=3)
    result = check_probe(more, run())
    assert result.status is ProbeStatus.NOT_EXECUTED
    assert result.detail == "2 of 3 calls of second_moment at down of all blocks"


def test_call_looks_at_what_was_passed() -> None:
    reference = {"op": "second_moment", "stream": "reference"}
    assert status(probe(kind="call", event=reference), run()) == "not_executed"
    hadamard = {"op": "install", "transform": "hadamard", "place": {"blocks": [1]}}
    assert status(probe(kind="call", event=hadamard), run()) == "executed"
    assert status(probe(kind="call", event=hadamard | {"transform": "hadamard:64"}), run()) == "not_executed"
    assert status(probe(kind="call", event={"op": "install", "min_rank": 8}), run()) == "not_executed"
    fold = {"index": 99, "op": "fold", "site": "blocks.1.value_output", "block": 1}
    folded = run(events=(fold, *events()))
    assert status(probe(kind="call", event={"op": "fold", "site": "value_output"}), folded) == "executed"
    assert status(probe(kind="call", event={"op": "fold", "site": "norm_diagonal"}), folded) == "not_executed"
    assert status(probe(kind="call", event={"op": "fold", "place": {"blocks": [1]}}), folded) == "executed"
    assert status(probe(kind="call", event={"op": "fold", "place": {"blocks": [0]}}), folded) == "not_executed"


def test_call_at_a_share_of_the_layers() -> None:
    half = tuple(event for event in events() if event["block"] == 0)
    everywhere = probe(kind="call", event={"op": "second_moment"}, share=1.0)
    assert status(everywhere, run()) == "executed"
    assert status(everywhere, run(events=half)) == "not_executed"
    assert status(probe(kind="call", event={"op": "second_moment"}, share=0.5), run(events=half)) == "executed"


def test_an_install_that_was_replaced_does_not_count() -> None:
    """The program installs a branch and then installs the layer again without it."""
    first = {"index": 0, "op": "install", "layer": "blocks.0.down", "block": 0, "role": "down", "rank": 8}
    branch = probe(kind="call", event={"op": "install", "min_rank": 8})
    assert status(branch, run(events=(first, *events()))) == "not_executed"
    assert status(branch, run(events=(*events(), first))) == "executed"


def test_a_measurement_thrown_away_does_not_count() -> None:
    """The call is in the log, yet without the mechanism the same tensors are installed."""
    used = probe(kind="call", event={"op": "second_moment"}, mechanism="code_search")
    assert status(used, run(), run(layers=layers(version="b"))) == "executed"
    thrown_away = check_probe(used, run(), knocked_out=run())
    assert thrown_away.status is ProbeStatus.NOT_EXECUTED
    assert thrown_away.detail.startswith("8 calls of second_moment everywhere; knocking out 'code_search' changes 0 of")
    assert status(used, run(), None) == "undetermined"


# order


def test_order_within_each_block() -> None:
    asked = probe(
        kind="order",
        first={"op": "install", "place": {"roles": ["o"]}},
        then={"op": "second_moment", "place": {"groups": ["down"]}},
    )
    assert status(asked, run()) == "executed"
    early = {"index": 0, "op": "second_moment", "group": "blocks.1.down", "block": 1, "role": "down"}
    measured_first = check_probe(asked, run(events=(early, *events())))
    assert measured_first.status is ProbeStatus.NOT_EXECUTED
    assert measured_first.detail == "second_moment came before the last install in block 1"
    without = run(events=tuple(e for e in events() if e["op"] == "install" or e["block"] == 0))
    assert check_probe(asked, without).detail == "no second_moment at down of all blocks in block 1 as described"


def test_order_over_the_model() -> None:
    asked = probe(
        kind="order",
        scope="model",
        first={"op": "install", "place": {"blocks": [0]}},
        then={"op": "second_moment", "place": {"blocks": [1]}},
    )
    assert status(asked, run()) == "executed"
    backwards = probe(kind="order", scope="model", first={"op": "install"}, then={"op": "second_moment"})
    assert status(backwards, run()) == "not_executed"
    never = probe(kind="order", scope="model", first={"op": "fold"}, then={"op": "install"})
    assert status(never, run()) == "not_executed"


# artifact


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"property": "transform_kind", "value": "hadamard"}, "executed"),
        ({"property": "transform_kind", "value": "hadamard:32"}, "executed"),
        ({"property": "transform_kind", "value": "hadamard:64"}, "not_executed"),
        ({"property": "transform_kind", "comparison": "!=", "value": "block_matrix"}, "executed"),
        ({"property": "has_transform", "value": True}, "executed"),
        ({"property": "has_transform", "comparison": "!=", "value": True}, "not_executed"),
        ({"property": "rank", "comparison": "<=", "value": 0}, "executed"),
        ({"property": "rank", "comparison": ">", "value": 0}, "not_executed"),
        ({"property": "scale_rule", "value": "even"}, "executed"),
        ({"property": "scale_rule", "comparison": "!=", "value": "search"}, "executed"),
        ({"property": "code_rule", "value": "nearest"}, "executed"),
        ({"property": "bits", "comparison": "<", "value": 4.3}, "executed"),
        ({"property": "weight_error", "comparison": "<", "value": 0.005}, "not_executed"),
        ({"property": "distinct_digests", "value": 14}, "executed"),
        ({"property": "distinct_digests", "comparison": ">=", "value": 8, "place": {"blocks": [0]}}, "not_executed"),
    ],
)
def test_artifact_properties(asked: dict[str, Any], expected: str) -> None:
    assert status(probe(kind="artifact", **asked), run()) == expected


def test_artifact_share_and_place() -> None:
    mixed = layers() | {"blocks.0.down": layers(scale_rule="search")["blocks.0.down"]}
    searched = {"kind": "artifact", "property": "scale_rule", "value": "search"}
    assert status(probe(**searched), run(layers=mixed)) == "not_executed"
    assert status(probe(**searched, place={"roles": ["down"]}), run(layers=mixed)) == "not_executed"
    assert status(probe(**searched, place={"roles": ["down"]}, share=0.5), run(layers=mixed)) == "executed"
    assert status(probe(**searched, place={"roles": ["down"], "blocks": [0]}), run(layers=mixed)) == "executed"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"property": "rank", "value": "8"}, "rank is compared with a number"),
        ({"property": "bits", "value": True}, "bits is compared with a number"),
        ({"property": "bits", "value": float("nan")}, "bits is compared with a number"),
        ({"property": "scale_rule", "value": 3}, "scale_rule is compared with text"),
        ({"property": "has_transform", "value": 1}, "has_transform is compared with true or false"),
        ({"property": "scale_rule", "comparison": "<", "value": "even"}, "can be compared by == or != only"),
        ({"property": "digest", "value": "x"}, "Input should be"),
        ({"property": "rank", "value": 1, "share": 0}, "greater than 0"),
    ],
)
def test_artifact_probes_that_make_no_sense(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        probe(kind="artifact", **asked)


def test_a_value_that_is_missing_satisfies_nothing() -> None:
    asked = probe(kind="artifact", property="weight_error", comparison="<", value=1.0)
    for value in (None, float("nan")):
        assert status(asked, run(layers=layers(weight_error=value))) == "not_executed"


# knockout


def test_knockout_must_change_the_place() -> None:
    down = layers() | {name: row for name, row in layers(version="b").items() if name.endswith("down")}
    asked = {"kind": "knockout", "mechanism": "rotation"}
    assert status(probe(**asked), run(), run(layers=layers(version="b"))) == "executed"
    assert status(probe(**asked), run(), run(layers=down)) == "not_executed"
    assert status(probe(**asked, place={"roles": ["down"]}), run(), run(layers=down)) == "executed"
    assert status(probe(**asked, share=0.1), run(), run(layers=down)) == "executed"
    unchanged = {"expect": "unchanged", "place": {"roles": ["q", "k"]}}
    assert status(probe(**asked, **unchanged), run(), run(layers=down)) == "executed"
    assert status(probe(**asked, expect="unchanged"), run(), run(layers=down)) == "not_executed"


def test_a_difference_to_a_neutral_that_is_none_says_nothing() -> None:
    """The neutral harms, so knocking the dead mechanism out changes every layer."""
    why = "with 'rotation' at its neutral it installs other tensors than its parent"
    twin = run(layers=layers(version="b"))
    for asked in (
        probe(kind="knockout", mechanism="rotation"),
        probe(kind="knockout", mechanism="rotation", expect="unchanged"),
        probe(kind="call", event={"op": "second_moment"}, mechanism="rotation"),
        probe(kind="order", first={"op": "second_moment"}, then={"op": "install"}, mechanism="rotation"),
        probe(kind="absent", mechanism="rotation"),
    ):
        result = check_probe(asked, run(), knocked_out=twin, not_neutral=why)
        assert (result.status, result.detail) == (ProbeStatus.NOT_EXECUTED, why)
    installed = probe(kind="artifact", property="rank", value=0)
    assert check_probe(installed, run(), not_neutral=why).status is ProbeStatus.EXECUTED
    plain = probe(kind="call", event={"op": "second_moment"})
    assert check_probe(plain, run(), not_neutral=why).status is ProbeStatus.EXECUTED


def test_knockout_without_a_twin_is_open() -> None:
    asked = probe(kind="knockout", mechanism="rotation")
    assert status(asked, run(), None) == "undetermined"
    assert status(asked, run(), run(layers={})) == "undetermined"  # the twin crashed
    assert status(asked, run(), run(layers=layers(num_blocks=1))) == "undetermined"  # the twin is another subject


def test_knockout_of_a_function_that_is_not_there() -> None:
    twin = run(layers=layers(version="b"))
    assert status(probe(kind="knockout", mechanism="swap"), run(), twin) == "not_executed"
    assert status(probe(kind="knockout", mechanism="swap", expect="unchanged"), run(), None) == "executed"


def test_a_place_the_subject_does_not_have_is_open() -> None:
    """A smoke run on two blocks says nothing about block 9."""
    twin, far = run(layers=layers(version="b")), {"place": {"blocks": [9]}}
    assert status(probe(kind="knockout", mechanism="rotation", **far), run(), twin) == "undetermined"
    assert status(probe(kind="artifact", property="rank", value=0, **far), run()) == "undetermined"
    assert status(probe(kind="call", event={"op": "install", **far}), run()) == "undetermined"
    order = probe(kind="order", first={"op": "install", **far}, then={"op": "second_moment"})
    assert status(order, run()) == "undetermined"


def test_good_behaviour_on_the_smoke_run_only_is_caught_on_the_paid_run() -> None:
    asked = probe(kind="artifact", property="transform_kind", value="hadamard", place={"roles": ["down"]})
    smoke = run()
    paid = run(events=tuple(events(6)), layers=layers(6) | {"blocks.5.down": layers(6, transform=[])["blocks.5.down"]})
    assert status(asked, smoke) == "executed"
    assert status(asked, paid) == "not_executed"


# line


def test_lines_are_advisory() -> None:
    asked = probe(kind="line", function="rotation", at_least=2)
    for hits, expected in (({"rotation": 5}, "executed"), ({"rotation": 1}, "not_executed"), ({}, "undetermined")):
        result = check_probe(asked, run(line_hits=hits))
        assert result.status.value == expected
        assert result.advisory
        assert not result.is_decisive


# absent


def test_absent() -> None:
    asked = {"kind": "absent", "mechanism": "rotation"}
    gone = run(mechanisms=("code_search",), source_names=frozenset({"quantize", "code_search"}))
    assert status(probe(**asked), gone) == "executed"
    assert status(probe(**asked), run()) == "undetermined"  # defined, and nobody looked whether it acts
    assert status(probe(**asked), run(), run()) == "executed"  # defined, and nothing depends on it
    assert status(probe(**asked), run(), run(layers=layers(version="b"))) == "not_executed"
    elsewhere = layers() | {"blocks.0.q": layers(version="b")["blocks.0.q"]}
    assert status(probe(**asked, place={"roles": ["down"]}), run(), run(layers=elsewhere)) == "executed"


def test_absent_finds_the_mechanism_under_another_name() -> None:
    renamed = run(
        mechanisms=("spread",),
        source_names=frozenset({"quantize", "spread"}),
        fingerprints={"spread": "f00d", "quantize": "beef"},
    )
    assert status(probe(kind="absent", mechanism="rotation"), renamed) == "executed"
    by_code = check_probe(probe(kind="absent", mechanism="rotation", fingerprint="f00d"), renamed)
    assert by_code.status is ProbeStatus.NOT_EXECUTED
    assert by_code.detail == "'spread' is the same mechanism under another name"
    mark = {"kind": "artifact", "property": "transform_kind", "value": "hadamard"}
    by_mark = check_probe(probe(kind="absent", mechanism="rotation", mark=mark), renamed)
    assert by_mark.status is ProbeStatus.NOT_EXECUTED
    assert by_mark.detail == "14 layers still bear its mark, such as blocks.0.down"
    clean = run(mechanisms=(), source_names=frozenset({"quantize"}), layers=layers(transform=[]))
    assert status(probe(kind="absent", mechanism="rotation", mark=mark), clean) == "executed"


def test_what_is_to_be_absent_is_known_by_its_code_whatever_the_proposer_gave() -> None:
    asked = probe(kind="absent", mechanism="rotation", fingerprint="made up")
    filled = with_fingerprint(asked, {"rotation": "f00d", "quantize": "beef"}, {"rotation": "5ha9e"})
    assert isinstance(filled, AbsentProbe)
    assert (filled.fingerprint, filled.shape, filled.others) == ("f00d", "5ha9e", ("beef",))
    knockout = probe(kind="knockout", mechanism="rotation")
    assert with_fingerprint(knockout, {"rotation": "f00d"}) is knockout
    assert with_fingerprint(asked, {"quantize": "beef"}) is asked
    assert READ.validate_json(READ.dump_json(filled)) == filled


def test_absent_finds_the_mechanism_with_another_number_in_it() -> None:
    asked = with_fingerprint(
        probe(kind="absent", mechanism="rotation"), {"rotation": "f00d", "twist": "cafe"}, {"rotation": "5ha9e"}
    )
    retuned = run(
        mechanisms=("spread",),
        source_names=frozenset({"quantize", "spread"}),
        fingerprints={"spread": "f00e"},
        shapes={"spread": "5ha9e"},
    )
    found = check_probe(asked, retuned)
    assert found.detail == "'spread' is the same mechanism under another name"
    # A mechanism that was there beside it may look like it, and so may a function that is no mechanism.
    beside = run(mechanisms=("twist",), source_names=frozenset({"twist"}), fingerprints={"twist": "cafe"},
                 shapes={"twist": "5ha9e"})  # fmt: skip
    assert status(asked, beside) == "executed"
    helper = run(mechanisms=(), source_names=frozenset({"helper"}), fingerprints={"helper": "f00e"},
                 shapes={"helper": "5ha9e"})  # fmt: skip
    assert status(asked, helper) == "executed"


def test_absent_compares_what_is_installed_with_the_program_before() -> None:
    """Rewritten so that no code gives it away: the layers tell."""
    before, without = run(), run(layers=layers(version="b", transform=[], weight_error=0.03))
    removal = Removal(before=before, without=without)
    asked = probe(kind="absent", mechanism="rotation")

    def gone(rows: dict[str, dict[str, Any]]) -> ProbeResult:
        program = run(mechanisms=(), source_names=frozenset({"quantize"}), layers=rows)
        return check_probe(asked, program, removal=removal)

    assert gone(layers(version="b", transform=[], weight_error=0.03)).status is ProbeStatus.EXECUTED
    assert gone(layers(version="c", transform=["permutation"])).status is ProbeStatus.EXECUTED  # something else
    assert gone(layers(version="c", weight_error=0.02)).status is ProbeStatus.EXECUTED
    retuned = gone(layers(version="c", weight_error=0.0101))
    assert retuned.status is ProbeStatus.NOT_EXECUTED
    assert retuned.detail == (
        "14 of the 14 layers that 'rotation' changed everywhere are still installed as with it, such as blocks.0.down"
    )
    assert gone(layers()).status is ProbeStatus.NOT_EXECUTED


# all


def test_events_that_were_cut_leave_calls_and_orders_open() -> None:
    cut = run(events=tuple(events())[:3], events_left_out=9)
    for asked in (
        probe(kind="call", event={"op": "second_moment"}),
        probe(kind="call", event={"op": "fold"}),
        probe(kind="order", first={"op": "second_moment"}, then={"op": "install"}),
    ):
        result = check_probe(asked, cut)
        assert result.status is ProbeStatus.UNDETERMINED
        assert result.detail == "the last 9 calls of the run were too many to be kept"
    assert status(probe(kind="artifact", property="rank", value=0), cut) == "executed"


def test_runs_install_the_same_or_not() -> None:
    assert installs_the_same(run(), run(events=()))
    assert not installs_the_same(run(), run(layers=layers(version="b")))
    assert not installs_the_same(run(), run(layers=layers(num_blocks=1)))
    assert not installs_the_same(run(layers={}), run(layers={}))


def test_a_run_without_an_artifact_answers_nothing() -> None:
    crashed = run(layers={})
    for asked in (
        probe(kind="call", event={"op": "second_moment"}),
        probe(kind="order", first={"op": "install"}, then={"op": "install"}),
        probe(kind="artifact", property="rank", value=0),
        probe(kind="knockout", mechanism="rotation", expect="unchanged"),
        probe(kind="absent", mechanism="swap"),
    ):
        assert status(asked, crashed) == "undetermined", asked.kind


def test_control_changes_the_artifact_or_is_void() -> None:
    assert check_control(run(layers=layers(version="b")), run()).is_decisive
    idle = check_control(run(), run())
    assert idle.status is ProbeStatus.NOT_EXECUTED
    assert idle.detail == "the control changes 0 of 14 layers everywhere"
    assert check_control(run(layers={}), run()).status is ProbeStatus.UNDETERMINED
    one = layers() | {"blocks.0.q": layers(version="b")["blocks.0.q"]}
    assert check_control(run(layers=one), run()).is_decisive
    assert not check_control(run(layers=one), run(), place=Place(roles=("down",))).is_decisive


def test_probes_name_functions_that_are_there() -> None:
    names: dict[str, Any] = {"mechanisms": ("rotation",), "source_names": frozenset({"rotation", "quantize"})}
    assert probe_problems(probe(kind="knockout", mechanism="rotation"), **names) == []
    assert probe_problems(probe(kind="absent", mechanism="swap"), **names) == []
    assert probe_problems(probe(kind="knockout", mechanism="swap"), **names) == [
        "probe names mechanism 'swap', which the program does not declare; declared: 'rotation'"
    ]
    assert probe_problems(probe(kind="line", function="swap"), **names) == [
        "probe names function 'swap', which is not there"
    ]
    assert probe_mechanism(probe(kind="call", event={"op": "install"}, mechanism="swap")) == "swap"
    assert probe_mechanism(probe(kind="artifact", property="rank", value=0)) is None


def test_unknown_kinds_and_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="does not match any of the expected tags"):
        probe(kind="trust_me", mechanism="rotation")
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        probe(kind="knockout", mechanism="rotation", verdict="executed")
    with pytest.raises(ValidationError, match="should match pattern"):
        probe(kind="knockout", mechanism="os.system('x')")


def test_probes_survive_json() -> None:
    asked = probe(kind="order", first={"op": "install", "min_rank": 4}, then={"op": "inputs", "place": {"blocks": [1]}})
    assert READ.validate_json(READ.dump_json(asked)) == asked
