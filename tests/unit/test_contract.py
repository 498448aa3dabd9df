"""Every rule of the contract, broken one at a time; and what a whole model is counted as."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluators.contract import MXFP4_W4A4, check_install, measure_contract
from evaluators.errors import ContractError
from evaluators.installs import Install, coordinates_digest, install_digest, step_names, transform_bits
from evaluators.session import Group, Layer
from forge_kernels import ActivationRule, BlockMatrix, Diagonal, Encoded, Hadamard, LowRank, Permutation, decode, encode
from forge_kernels.transforms import Transform

N, K = 40, 64
B = K // 32
RULE = ActivationRule()


def make_layer(role: Any = "q", num_outputs: int = N) -> Layer:
    group = "qkv" if role in "qkv" else role
    return Layer(
        name=f"blocks.0.{role}", block=0, role=role, group=f"blocks.0.{group}", num_outputs=num_outputs, num_inputs=K
    )


LAYER = make_layer()
GROUP = Group(
    name="blocks.0.qkv",
    block=0,
    role="qkv",
    layers=(make_layer("q"), make_layer("k"), make_layer("v")),
    num_inputs=K,
)


def make_weight(seed: int = 0) -> Encoded:
    return encode(torch.randn(N, K, generator=torch.Generator().manual_seed(seed)))


def make_branch(rank: int = 2) -> LowRank:
    generator = torch.Generator().manual_seed(1)
    return LowRank(
        a_RK=torch.randn(rank, K, generator=generator).bfloat16(),
        b_NR=torch.randn(N, rank, generator=generator).bfloat16(),
    )


def check(**changes: Any) -> Install:
    given: dict[str, Any] = {"weight": make_weight(), "transform": (), "activation": RULE, "low_rank": None} | changes
    return check_install(MXFP4_W4A4, LAYER, given.pop("weight"), **given)


def with_codes(change: Callable[[torch.Tensor], Any]) -> Encoded:
    weight = make_weight()
    return Encoded(codes_NK=change(weight.codes_NK), scales_NB=weight.scales_NB)


def with_scales(change: Callable[[torch.Tensor], Any]) -> Encoded:
    weight = make_weight()
    return Encoded(codes_NK=weight.codes_NK, scales_NB=change(weight.scales_NB))


def put(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a change that writes `value` into the first element."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


class Lookalike:
    """Has an Encoded's attributes, and would pass for one where types are not checked."""

    codes_NK = make_weight().codes_NK
    scales_NB = make_weight().scales_NB


BAD_WEIGHTS = {
    "no Encoded": (Lookalike(), "give an Encoded"),
    "minus zero": (with_codes(put(8)), "never be 8"),
    "code 16": (with_codes(put(16)), "0..15"),
    "NaN scale": (with_scales(put(255)), "255"),
    "overflow": (
        Encoded(codes_NK=torch.full((N, K), 7, dtype=torch.uint8), scales_NB=with_scales(put(254)).scales_NB),
        "overflow",
    ),
    "signed codes": (with_codes(lambda t: t.to(torch.int8)), "int8"),
    "float codes": (with_codes(lambda t: t.float()), "float32"),
    "transposed": (with_codes(lambda t: t.T), "(64, 40)"),
    "short scales": (with_scales(lambda t: t[:, :1]), "(40, 1)"),
    "no tensor": (with_codes(lambda t: t.tolist()), "dense tensor"),
    "sparse": (with_codes(lambda t: t.to_sparse()), "dense tensor"),
    "meta": (with_codes(lambda t: t.to("meta")), "dense tensor"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_refused(case: str) -> None:
    weight, message = BAD_WEIGHTS[case]
    with pytest.raises(ContractError) as caught:
        check(weight=weight)
    assert message in str(caught.value)
    assert LAYER.name in str(caught.value)


EYE = torch.eye(32)
SINGULAR = torch.ones(1, 32, 32)
SKEWED = torch.diag(torch.tensor([1.01e4] + [1.0] * 31))[None]
BAD_TRANSFORMS: dict[str, tuple[Any, str]] = {
    "a tensor": (torch.eye(K), "tuple of steps"),
    "a function": ((torch.relu,), "use Diagonal"),
    "hadamard 24": ((Hadamard(size=24),), "power of two"),
    "hadamard beyond K": ((Hadamard(size=128),), "divides 64"),
    "hadamard of a bool": ((Hadamard(size=True),), "power of two"),
    "hadamard 1": ((Hadamard(size=1),), "power of two"),
    "diagonal zero": ((Diagonal(scale_K=put(0)(torch.ones(K))),), "condition number of infinite"),
    "diagonal NaN": ((Diagonal(scale_K=put(float("nan"))(torch.ones(K))),), "not finite"),
    "diagonal inf": ((Diagonal(scale_K=put(float("inf"))(torch.ones(K))),), "not finite"),
    "diagonal ratio": ((Diagonal(scale_K=put(-1.1e4)(torch.ones(K))),), "1.1e+04"),
    "diagonal float64": ((Diagonal(scale_K=torch.ones(K).double()),), "float32 or bfloat16"),
    "diagonal short": ((Diagonal(scale_K=torch.ones(1)),), "(64,)"),
    "permutation twice": ((Permutation(index_K=torch.zeros(K, dtype=torch.int64)),), "not a permutation"),
    "permutation int32": ((Permutation(index_K=torch.arange(K, dtype=torch.int32)),), "int64"),
    "permutation negative": ((Permutation(index_K=torch.arange(K) - 1),), "not a permutation"),
    "block matrix singular": ((BlockMatrix(matrix_Bij=SINGULAR),), "condition number"),
    "block matrix skewed": ((BlockMatrix(matrix_Bij=SKEWED),), "condition number of 1.01e+04"),
    "block matrix zero": ((BlockMatrix(matrix_Bij=torch.zeros(B, 32, 32)),), "infinite"),
    "block matrix too many": ((BlockMatrix(matrix_Bij=EYE.repeat(3, 1, 1)),), "(2, 32, 32)"),
    "block matrix flat": ((BlockMatrix(matrix_Bij=EYE),), "(2, 32, 32)"),
    "too costly": ((BlockMatrix(matrix_Bij=EYE[None]),) * 2 + (Hadamard(size=2),), "65 multiply-adds"),
    "too long": ((Permutation(index_K=torch.arange(K)),) * 9, "at most 8"),
}


@pytest.mark.parametrize("case", BAD_TRANSFORMS)
def test_bad_transforms_are_refused(case: str) -> None:
    transform, message = BAD_TRANSFORMS[case]
    with pytest.raises(ContractError) as caught:
        check(transform=transform)
    assert message in str(caught.value)


BAD_BRANCHES: dict[str, tuple[Any, str]] = {
    "a tuple": ((1, 2), "give a LowRank"),
    "float32": (replace(make_branch(), a_RK=torch.ones(2, K)), "bfloat16"),
    "NaN": (replace(make_branch(), b_NR=torch.full((N, 2), torch.nan).bfloat16()), "not finite"),
    "rank 10 of 40": (make_branch(10), "below 10"),
    "rank 0": (make_branch(0), "at least 1"),
    "ranks differ": (replace(make_branch(2), b_NR=make_branch(3).b_NR), "(40, 2)"),
    "a vector": (replace(make_branch(), a_RK=torch.ones(K).bfloat16()), "(R, 64)"),
}


@pytest.mark.parametrize("case", BAD_BRANCHES)
def test_bad_branches_are_refused(case: str) -> None:
    branch, message = BAD_BRANCHES[case]
    with pytest.raises(ContractError) as caught:
        check(low_rank=branch)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "rule",
    [ActivationRule(scale_rule="ceil"), ActivationRule(code_rule="oracle"), "even", {"scale_rule": "even"}],  # type: ignore[arg-type]
)
def test_bad_activation_rules_are_refused(rule: Any) -> None:
    with pytest.raises(ContractError):
        check(activation=rule)


def test_what_is_accepted_is_a_copy() -> None:
    weight, scale_K, branch = make_weight(), torch.ones(K), make_branch()
    install = check(weight=weight, transform=[Diagonal(scale_K=scale_K)], low_rank=branch, activation=None)
    before = install_digest(install)
    weight.codes_NK.fill_(8)
    weight.scales_NB.fill_(255)
    scale_K.fill_(torch.nan)
    branch.a_RK.fill_(torch.inf)
    assert install_digest(install) == before
    assert install.activation == RULE
    assert isinstance(install.transform, tuple)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.integers(0, 255), largest=st.sampled_from([7, 15, 16, 255]))
def test_random_bytes_are_refused_or_decode_to_finite_values(seed: int, scale: int, largest: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes_NK = torch.randint(0, largest + 1, (N, K), generator=generator).to(torch.uint8)
    weight = Encoded(codes_NK=codes_NK, scales_NB=torch.full((N, B), scale, dtype=torch.uint8))
    try:
        install = check(weight=weight)
    except ContractError:
        assert scale >= 253 or bool(((codes_NK == 8) | (codes_NK > 15)).any())
    else:
        assert bool(decode(install.weight).isfinite().all())


def measure(
    transform: Transform = (), branch: LowRank | None = None, activation: ActivationRule = RULE, **own: Install
) -> tuple[str, Any]:
    everyone = {"weight": make_weight(), "transform": transform, "low_rank": branch, "activation": activation}
    installs = {layer.name: own.get(layer.role, check(**everyone)) for layer in GROUP.layers}
    result = measure_contract(MXFP4_W4A4, [GROUP], installs)
    return result.contract_class, result.effective_bits


def test_codes_and_scales_alone_are_the_folded_class_at_4_25_bits() -> None:
    assert measure() == ("folded", 4.25)


def test_a_hadamard_step_is_online_and_costs_no_bits() -> None:
    assert measure((Hadamard(size=32),)) == ("online", 4.25)


@pytest.mark.parametrize(
    ("step", "bits"),
    [
        (Diagonal(scale_K=torch.ones(K).bfloat16()), 16 * K),
        (Diagonal(scale_K=torch.ones(K)), 32 * K),
        (Permutation(index_K=torch.arange(K)), 16 * K),
        (BlockMatrix(matrix_Bij=EYE[None].bfloat16()), 16 * 1024),
        (BlockMatrix(matrix_Bij=EYE.repeat(B, 1, 1)), 32 * 1024 * B),
    ],
)
def test_stored_tensors_are_counted_once_per_group(step: Any, bits: int) -> None:
    assert transform_bits((step,)) == bits
    expected = 4.25 + bits / (3 * N * K)
    if expected <= 5.5:
        assert measure((step,)) == ("online", pytest.approx(expected))
    else:
        with pytest.raises(ContractError, match="'online' allows 5.5"):
            measure((step,))


def test_a_block_swap_is_online_and_stores_nothing() -> None:
    assert measure(activation=ActivationRule(code_rule="block_swap")) == ("online", 4.25)


def test_a_block_swap_counts_among_the_online_multiply_adds() -> None:
    swap = ActivationRule(code_rule="block_swap")
    check(transform=(BlockMatrix(matrix_Bij=EYE[None]),), activation=swap)
    with pytest.raises(ContractError, match="transform and block_swap costs 65 multiply-adds per element; at most 64"):
        check(transform=(BlockMatrix(matrix_Bij=EYE[None]), Hadamard(size=2)), activation=swap)


def test_a_branch_makes_the_corrected_class() -> None:
    assert measure(branch=make_branch(1)) == ("corrected", pytest.approx(4.25 + 16 * (N + K) / (N * K)))
    with pytest.raises(ContractError, match="'corrected' allows 6"):
        measure(branch=make_branch(9))


def test_layers_of_a_group_must_agree_by_content() -> None:
    transform = (Diagonal(scale_K=torch.full((K,), 2.0)),)
    same = check(transform=(Diagonal(scale_K=torch.full((K,), 2.0).bfloat16()),))
    assert measure(transform, v=same)[0] == "online"
    other = check(transform=(Diagonal(scale_K=torch.full((K,), 2.5)),))
    with pytest.raises(ContractError, match="disagree"):
        measure(transform, v=other)
    with pytest.raises(ContractError, match="disagree"):
        measure(v=check(activation=ActivationRule(scale_rule="rceil")))


def test_missing_layers_and_classes_that_are_not_allowed_are_refused() -> None:
    with pytest.raises(ContractError, match=r"blocks\.0\.k, blocks\.0\.v"):
        measure_contract(MXFP4_W4A4, [GROUP], {"blocks.0.q": check()})
    narrow = replace(MXFP4_W4A4, allowed_classes=("folded",))
    installs = {layer.name: check(transform=(Hadamard(size=32),)) for layer in GROUP.layers}
    with pytest.raises(ContractError, match="class 'online'; allowed here: folded"):
        measure_contract(narrow, [GROUP], installs)


def test_digests_see_decoded_content_and_nothing_else() -> None:
    base = check()
    assert install_digest(check()) == install_digest(base)
    # The same values under other codes: halve every code that stays exact and double the scale.
    codes_NK = torch.where(torch.arange(N * K).view(N, K) % 2 == 0, 2, 4).to(torch.uint8)
    halved_NK = torch.where(codes_NK == 2, 1, 2).to(torch.uint8)
    scales_NB = torch.full((N, B), 120, dtype=torch.uint8)
    one = check(weight=Encoded(codes_NK=codes_NK, scales_NB=scales_NB))
    two = check(weight=Encoded(codes_NK=halved_NK, scales_NB=scales_NB + 1))
    assert install_digest(one) == install_digest(two)
    # Minus zero in a matrix is zero.
    plus, minus = (torch.where(EYE == 0, zero, EYE)[None] for zero in (0.0, -0.0))
    assert install_digest(check(transform=(BlockMatrix(matrix_Bij=plus),))) == install_digest(
        check(transform=(BlockMatrix(matrix_Bij=minus),))
    )
    changed = [
        check(weight=make_weight(1)),
        check(transform=(Hadamard(size=32),)),
        check(transform=(Hadamard(size=16),)),
        check(activation=ActivationRule(scale_rule="rceil")),
        check(low_rank=make_branch()),
        one,
    ]
    digests = {install_digest(install) for install in changed} | {install_digest(base)}
    assert len(digests) == len(changed) + 1


def test_step_names_give_the_size_of_a_hadamard() -> None:
    transform = (Diagonal(scale_K=torch.ones(K)), Hadamard(size=32), Permutation(index_K=torch.arange(K)))
    assert step_names(transform) == ["diagonal", "hadamard:32", "permutation"]
    assert coordinates_digest(transform, RULE) != coordinates_digest(transform[::-1], RULE)
