"""The session's trusted side: what a program may do, what it is refused, and what is remembered of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evaluators.contract import MXFP4_W4A4
from evaluators.errors import ContractError, ProgramError
from evaluators.local_session import LocalSession
from evaluators.results import Outcome
from evaluators.scorer import score
from evaluators.session import Session
from evaluators.session_server import MAX_LOG_CHARACTERS, SessionServer
from evaluators.transport import ProtocolError
from forge_kernels import (
    ActivationRule,
    BlockMatrix,
    Encoded,
    Hadamard,
    LowRank,
    apply_transform,
    decode,
    encode,
    fake_quantize,
    transform_weight,
)
from tests.session_loopback import open_loopback
from tests.tiny_models import KINDS, Kind, make_tiny_subject, make_tiny_tokens

SUBJECT = make_tiny_subject("llama")
CALIBRATION = make_tiny_tokens(4, 20)
GATE = make_tiny_tokens(3, 30, seed=1)


def open_server(**changes: Any) -> SessionServer:
    given: dict[str, Any] = {
        "subject": SUBJECT,
        "calibration_CL": CALIBRATION,
        "gate_CL": GATE,
        "contract": MXFP4_W4A4,
        "seed": 5,
    } | changes
    return SessionServer(given.pop("subject"), **given)


@pytest.fixture(params=["local", "remote"])
def session(request: pytest.FixtureRequest) -> Session:
    server = open_server()
    opened = LocalSession(server) if request.param == "local" else open_loopback(server)
    opened.server = server  # type: ignore[union-attr]
    return opened


def server_of(session: Session) -> SessionServer:
    return session.server  # type: ignore[attr-defined, no-any-return]


def test_a_session_describes_the_subject(session: Session) -> None:
    assert session.layers == SUBJECT.map.layers
    assert session.groups == SUBJECT.map.groups
    assert session.sites == SUBJECT.map.sites
    assert session.device == torch.device("cpu")


def test_weights_are_copies(session: Session) -> None:
    weight_NK = session.weight("blocks.1.up")
    expected_NK = SUBJECT.map.linear("blocks.1.up").weight
    assert torch.equal(weight_NK, expected_NK)
    weight_NK.zero_()
    assert torch.equal(session.weight("blocks.1.up"), expected_NK)


def test_inputs_are_rows_in_text_order_and_copies(session: Session) -> None:
    group = session.groups[1]
    inputs_TK = session.inputs(group)
    assert inputs_TK.shape == (80, group.num_inputs)
    assert torch.equal(session.inputs(group, max_tokens=59), inputs_TK[:40])
    assert torch.equal(session.inputs(group, stream="reference"), inputs_TK)
    inputs_TK.fill_(torch.nan)
    assert bool(session.inputs(group).isfinite().all())


def test_the_second_moment_is_that_of_the_inputs(session: Session) -> None:
    for group in session.groups[:4]:
        inputs_TK = session.inputs(group).double()
        moment_KK = session.second_moment(group)
        assert moment_KK.dtype is torch.float64
        assert torch.equal(moment_KK, moment_KK.T)
        torch.testing.assert_close(moment_KK, inputs_TK.T @ inputs_TK / len(inputs_TK), rtol=1e-5, atol=1e-6)
    half_KK = session.second_moment(group, max_tokens=40)
    torch.testing.assert_close(half_KK, inputs_TK[:40].T @ inputs_TK[:40] / 40, rtol=1e-5, atol=1e-6)


def test_output_error_is_that_of_the_formula_and_installs_nothing(session: Session) -> None:
    layer = "blocks.0.gate"
    steps = (Hadamard(size=32),)
    weight_NK, inputs_TK = session.weight(layer), session.inputs("blocks.0.gate_up")
    encoded = encode(transform_weight(steps, weight_NK))
    branch = LowRank(a_RK=torch.ones(1, 64).bfloat16() / 64, b_NR=torch.ones(96, 1).bfloat16())
    rule = ActivationRule(scale_rule="rceil")
    error = session.output_error(layer, encoded, transform=steps, activation=rule, low_rank=branch)
    encoded_TK = fake_quantize(apply_transform(steps, inputs_TK), scale_rule="rceil")
    given_TN = encoded_TK @ decode(encoded).T + inputs_TK @ branch.a_RK.float().T @ branch.b_NR.float().T
    expected_TN = inputs_TK @ weight_NK.T
    ratio = (given_TN - expected_TN).square().sum() / expected_TN.square().sum()
    assert error == pytest.approx(float(ratio), rel=1e-4)
    assert server_of(session).installs == {}


@pytest.mark.parametrize("kind", KINDS)
def test_gate_loss_is_the_loss_of_the_model_as_installed(kind: Kind) -> None:
    subject = make_tiny_subject(kind)
    server = open_server(subject=subject)
    session = LocalSession(server)
    full = score(subject.model, GATE)
    assert session.gate_loss() == pytest.approx(sum(full) / 3, abs=1e-6)
    for layer in session.layers:
        session.install(layer, encode(session.weight(layer)))
    with server.model.fully_quantized() as model:
        losses = score(model, GATE)
    assert session.gate_loss() == pytest.approx(sum(losses) / 3, abs=1e-6)
    assert losses != full


def test_events_tell_what_happened_and_only_that(session: Session) -> None:
    session.weight("blocks.0.q")
    session.second_moment("blocks.1.o", stream="reference")
    with pytest.raises(ContractError):
        session.install("blocks.0.q", encode(torch.zeros(3, 64)))
    with pytest.raises(ContractError):
        session.weight("blocks.0.router")
    steps = (Hadamard(size=16),)
    session.install("blocks.0.q", encode(transform_weight(steps, session.weight("blocks.0.q"))), transform=steps)
    session.log("not an event")
    session.fold("blocks.1.up_down_diagonal", torch.full((96,), 2.0))
    session.gate_loss()
    place = {"block": 0, "role": "q", "layer": "blocks.0.q", "group": "blocks.0.qkv"}
    assert server_of(session).events == [
        {"index": 0, "op": "weight", **place},
        {"index": 1, "op": "second_moment", "block": 1, "role": "o", "group": "blocks.1.o", "stream": "reference"},
        {"index": 2, "op": "weight", **place},
        {"index": 3, "op": "install", **place, "rank": 0, "transform": ["hadamard:16"]},
        {"index": 4, "op": "fold", "site": "blocks.1.up_down_diagonal", "block": 1},
        {"index": 5, "op": "gate_loss"},
    ]
    assert server_of(session).program_log == "not an event\n"


def bad_calls(session: Session) -> dict[str, Any]:
    good = encode(session.weight("blocks.0.q"))
    return {
        "unknown layer": lambda: session.weight("blocks.7.q"),
        "unknown group": lambda: session.inputs("blocks.0.attention"),
        "unknown site": lambda: session.fold("blocks.0.qkv.bias", torch.ones(64)),
        "no name": lambda: session.weight(3),  # type: ignore[arg-type]
        "unknown stream": lambda: session.inputs("blocks.0.o", stream="oracle"),  # type: ignore[arg-type]
        "too few tokens": lambda: session.inputs("blocks.0.o", max_tokens=19),
        "no tokens": lambda: session.second_moment("blocks.0.o", max_tokens=0),
        "tokens as text": lambda: session.second_moment("blocks.0.o", max_tokens="40"),  # type: ignore[arg-type]
        "weight of another layer": lambda: session.install("blocks.0.down", good),
        "no weight": lambda: session.install("blocks.0.q", None),  # type: ignore[arg-type]
        "float weight": lambda: session.install("blocks.0.q", session.weight("blocks.0.q")),  # type: ignore[arg-type]
        "transform too costly": lambda: session.install(
            "blocks.0.q", good, transform=(BlockMatrix(matrix_Bij=torch.eye(32)[None]),) * 3
        ),
        "fold of zeros": lambda: session.fold("blocks.0.qkv.norm_diagonal", torch.zeros(64)),
        "fold of NaN": lambda: session.fold("blocks.0.qkv.norm_diagonal", torch.full((64,), torch.nan)),
        "fold without tensor": lambda: session.fold("blocks.0.qkv.norm_diagonal", [1.0] * 64),  # type: ignore[arg-type]
        "fold singular": lambda: session.fold("blocks.0.value_output", torch.zeros(2, 32, 32)),
        "fold no rotation": lambda: session.fold("residual_rotation", 2 * torch.eye(64)),
        "fold no permutation": lambda: session.fold("blocks.0.up_down_permutation", torch.zeros(96, dtype=torch.int64)),
    }


@pytest.mark.parametrize("case", sorted(bad_calls(LocalSession(open_server()))))
def test_bad_calls_are_refused_and_the_program_can_go_on(session: Session, case: str) -> None:
    weights = {layer.name: session.weight(layer) for layer in session.layers}
    before = len(server_of(session).events)
    with pytest.raises(ContractError) as caught:
        bad_calls(session)[case]()
    assert len(str(caught.value)) > 20
    assert [event["op"] for event in server_of(session).events[before:] if event["op"] not in ("weight",)] == []
    assert all(torch.equal(session.weight(name), weight_NK) for name, weight_NK in weights.items())
    session.install("blocks.0.q", encode(session.weight("blocks.0.q")))


def test_folds_come_before_installs_of_what_they_touch(session: Session) -> None:
    session.install("blocks.0.up", encode(session.weight("blocks.0.up")))
    for site, matrix in [
        ("blocks.0.gate_up.norm_diagonal", torch.full((64,), 2.0)),
        ("blocks.0.up_down_diagonal", torch.full((96,), 2.0)),
        ("blocks.0.up_down_permutation", torch.arange(96)),
        ("residual_rotation", torch.eye(64)),
    ]:
        with pytest.raises(ContractError, match="'blocks.0.up', which is installed"):
            session.fold(site, matrix)
    session.fold("blocks.0.qkv.norm_diagonal", torch.full((64,), 2.0))
    session.fold("blocks.0.value_output", 2 * torch.eye(32).repeat(2, 1, 1))
    session.fold("blocks.1.up_down_diagonal", torch.full((96,), 2.0))


def test_a_fold_shows_in_weights_and_inputs_and_keeps_the_loss(session: Session) -> None:
    scale_K = torch.linspace(0.5, 2.0, 64)
    weight_NK, inputs_TK, loss = session.weight("blocks.1.k"), session.inputs("blocks.1.qkv"), session.gate_loss()
    session.fold("blocks.1.qkv.norm_diagonal", scale_K)
    torch.testing.assert_close(session.weight("blocks.1.k"), weight_NK / scale_K)
    torch.testing.assert_close(session.inputs("blocks.1.qkv"), inputs_TK * scale_K)
    assert session.gate_loss() == pytest.approx(loss, abs=1e-5)
    rotation_KK = torch.linalg.qr(torch.randn(64, 64, generator=session.rng("blocks.0.q", "rotation"))).Q
    session.fold("residual_rotation", rotation_KK)
    assert session.gate_loss() == pytest.approx(loss, abs=1e-5)


def test_folds_at_one_site_are_counted(session: Session) -> None:
    for _ in range(MXFP4_W4A4.max_folds_per_site):
        session.fold("blocks.1.up_down_permutation", torch.arange(96).flip(0))
    with pytest.raises(ContractError, match="4 folds were made already"):
        session.fold("blocks.1.up_down_permutation", torch.arange(96))
    session.fold("blocks.0.up_down_permutation", torch.arange(96))


def test_a_fold_that_moves_the_logits_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = open_server(subject=make_tiny_subject("llama", tied=True))
    session = LocalSession(server)
    before = {name: value.clone() for name, value in server.model.model.state_dict().items()}

    def wrong_fold(decoder_map: Any, site: Any, matrix: Tensor) -> None:
        decoder_map.untie()
        with torch.no_grad():
            decoder_map.linear("blocks.0.q").weight.mul_(1.5)
            decoder_map.final_norm.module.weight.mul_(1.5)

    monkeypatch.setattr("evaluators.fold_guard.fold", wrong_fold)
    with pytest.raises(ContractError, match="changes the model's logits by"):
        session.fold("residual_rotation", torch.eye(64))
    assert server.model.map.is_tied
    after = server.model.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_generators_depend_on_seed_layer_and_purpose_alone(session: Session) -> None:
    def draw(generator: torch.Generator) -> list[float]:
        return torch.rand(4, generator=generator).tolist()

    first = draw(session.rng("blocks.0.q", "swap"))
    assert draw(session.rng(session.layers[0], "swap")) == first
    assert draw(LocalSession(open_server()).rng("blocks.0.q", "swap")) == first
    others = [
        session.rng("blocks.0.q", "code"),
        session.rng("blocks.0.k", "swap"),
        LocalSession(open_server(seed=6)).rng("blocks.0.q", "swap"),
    ]
    assert all(draw(generator) != first for generator in others)


def test_a_run_over_the_meter_is_over_for_good() -> None:
    server = open_server(contract=replace(MXFP4_W4A4, max_forward_passes=1))
    session = LocalSession(server)
    session.second_moment("blocks.1.down")
    for layer in session.layers:
        session.install(layer, encode(SUBJECT.map.linear(layer).weight))
    for _ in range(3):
        with pytest.raises(ProgramError, match="subject-forward tokens") as caught:
            session.second_moment("blocks.1.down")
        assert caught.value.outcome is Outcome.OVER_METERED
    for call in (session.gate_loss, lambda: session.weight("blocks.0.q"), server.finish):
        with pytest.raises(ProgramError, match="subject-forward tokens"):
            call()


def test_folds_are_metered_also_when_they_are_refused() -> None:
    server = open_server(contract=replace(MXFP4_W4A4, max_forward_passes=1))
    session = LocalSession(server)
    spent = []
    for matrix in (torch.arange(96), torch.zeros(96, dtype=torch.int64), torch.arange(96)):
        try:
            session.fold("blocks.0.up_down_permutation", matrix)
        except ContractError:
            pass
        spent.append(server.meter.tokens)
    assert spent == [40, 60, 80], f"two passes over 20 tokens for the first fold, one for each later one, not {spent}"
    with pytest.raises(ProgramError, match="subject-forward tokens") as caught:
        session.fold("blocks.0.up_down_permutation", torch.arange(96))
    assert caught.value.outcome is Outcome.OVER_METERED
    with pytest.raises(ProgramError, match="subject-forward tokens"):
        server.finish()


def test_a_run_with_too_many_calls_is_over_even_if_they_are_refused() -> None:
    server = open_server(contract=replace(MXFP4_W4A4, max_calls=10))
    session = LocalSession(server)
    for index in range(10):
        with pytest.raises(ContractError):
            session.install(f"blocks.{index}.nothing", encode(torch.zeros(1, 32)))
    with pytest.raises(ProgramError, match="more than 10 session calls") as caught:
        session.log("eleventh")
    assert not isinstance(caught.value, ContractError)
    assert caught.value.outcome is Outcome.CONTRACT
    assert server.events == []


def test_the_log_is_capped_and_harmless() -> None:
    session = LocalSession(open_server())
    session.log("\x1b[2J\ttwo\nlines")
    assert session.server.program_log == "?[2J\ttwo\nlines\n"
    for _ in range(40):
        session.log("x" * 8000)
    assert len(session.server.program_log) == MAX_LOG_CHARACTERS


def test_a_model_that_overflows_is_told_and_can_be_mended(session: Session) -> None:
    weight = encode(session.weight("blocks.0.down"))
    huge = Encoded(codes_NK=weight.codes_NK, scales_NB=torch.full_like(weight.scales_NB, 252))
    session.install("blocks.0.down", huge)
    with pytest.raises(ContractError, match="loss on the gate split is not finite"):
        session.gate_loss()
    with pytest.raises(ContractError, match="input of group 'blocks.1.o' is not finite"):
        session.second_moment("blocks.1.o")
    with pytest.raises(ContractError, match="not finite"):
        session.output_error("blocks.0.down", huge)
    session.install("blocks.0.down", weight)
    assert math.isfinite(session.gate_loss())


def test_finishing_needs_every_layer_and_agreement(session: Session) -> None:
    with pytest.raises(ContractError, match=r"blocks\.0\.q"):
        server_of(session).finish()
    for layer in session.layers:
        session.install(layer, encode(session.weight(layer)))
    assert server_of(session).finish().installs.keys() == {layer.name for layer in session.layers}
    session.install("blocks.1.v", encode(session.weight("blocks.1.v")), activation=ActivationRule(scale_rule="floor"))
    with pytest.raises(ContractError, match=r"blocks\.1\.qkv"):
        server_of(session).finish()


def test_the_subject_stays_as_it_was() -> None:
    before = {name: value.clone() for name, value in SUBJECT.model.state_dict().items()}
    session = LocalSession(open_server())
    session.fold("residual_rotation", torch.linalg.qr(torch.randn(64, 64)).Q)
    for layer in session.layers:
        session.install(layer, encode(session.weight(layer)))
    session.gate_loss()
    assert all(torch.equal(SUBJECT.model.state_dict()[name], value) for name, value in before.items())
    assert not any(SUBJECT.map.is_replaced(layer) for layer in SUBJECT.map.layers)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("layer", "group", "site", "stream", "max_tokens", "message", "transform", "activation", "low_rank")
VALUES = JSON | st.sampled_from(
    [
        "blocks.0.q",
        "blocks.0.qkv",
        "residual_rotation",
        "quantized",
        40,
        [{"kind": "diagonal"}],
        [{"kind": "hadamard", "size": 32}],
        {"scale_rule": "even", "code_rule": "nearest"},
        False,
    ]
)
TENSORS = st.sampled_from(
    [
        torch.zeros(()),
        torch.zeros(0),
        torch.ones(64),
        torch.full((64,), torch.nan),
        torch.eye(64),
        torch.zeros(128, 64, dtype=torch.uint8),
        torch.zeros(128, 2, dtype=torch.uint8),
        torch.arange(96),
        torch.zeros(128, 64, dtype=torch.bool),
        torch.zeros(2, 32, 32),
        torch.full((128, 2), 255, dtype=torch.uint8),
    ]
)
HOSTILE = open_server(contract=replace(MXFP4_W4A4, max_calls=10**6))


@settings(max_examples=150, deadline=None)
@given(
    op=st.sampled_from(
        ["hello", "weight", "inputs", "second_moment", "output_error", "gate_loss", "fold", "install", "log"]
    )
    | st.text(max_size=8),
    args=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    tensors=st.lists(TENSORS, max_size=4),
)
def test_hostile_messages_never_crash_the_server(op: str, args: dict[str, Any], tensors: list[Tensor]) -> None:
    try:
        reply, _ = HOSTILE.dispatch(op, args, tensors)
    except ProtocolError:
        return
    assert "error" not in reply or set(reply["error"]) == {"kind", "message"}


@settings(max_examples=100, deadline=None)
@given(tensors=st.lists(TENSORS, min_size=2, max_size=5), steps=st.lists(VALUES, max_size=2), branch=st.booleans())
def test_hostile_installs_never_crash_the_server(tensors: list[Tensor], steps: list[Any], branch: bool) -> None:
    args = {
        "layer": "blocks.0.q",
        "transform": steps,
        "activation": {"scale_rule": "even", "code_rule": "nearest"},
        "low_rank": branch,
    }
    try:
        reply, _ = HOSTILE.dispatch("install", args, tensors)
    except ProtocolError:
        return
    assert "error" not in reply or reply["error"]["kind"] == "contract"
