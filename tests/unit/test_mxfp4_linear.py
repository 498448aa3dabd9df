"""Every route of the product against float64, in every coordinate system and with both code rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forge_kernels import block_gram, decode, encode, pack
from forge_kernels.ops.block_swap import fake_quantize_with_swap
from forge_kernels.ops.encode_activation import encode_activation, fused_steps
from forge_kernels.ops.fake_quantize import fake_quantize
from forge_kernels.ops.mxfp4_linear import multiply, mxfp4_linear, prepare_weight
from forge_kernels.ops.routes import ROUTES, Route, choose_route, most_packed_rows, route_of_capability
from forge_kernels.rules import CODE_RULES, ActivationRule, CodeRule, Encoded, LowRank
from forge_kernels.transforms import BlockMatrix, Diagonal, Hadamard, Permutation, Transform, apply_transform
from tests.kernel_cases import DEVICE, relative_error

N, K, R = 40, 192, 3
GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = encode(torch.randn(N, K, generator=GENERATOR) * torch.randn(N, 1, generator=GENERATOR).exp())
BIAS = torch.randn(N, generator=GENERATOR)
BRANCH = LowRank(
    a_RK=torch.randn(R, K, generator=GENERATOR).bfloat16() / 8, b_NR=torch.randn(N, R, generator=GENERATOR).bfloat16()
)
TRANSFORMS: dict[str, Transform] = {
    "none": (),
    "hadamard 64": (Hadamard(size=64),),
    "diagonal, hadamard 32": (
        Diagonal(scale_K=torch.randn(K, generator=GENERATOR).exp()),
        Hadamard(size=32),
    ),
    "permutation, block matrices": (
        Permutation(index_K=torch.randperm(K, generator=GENERATOR)),
        BlockMatrix(matrix_Bij=torch.randn(6, 32, 32, generator=GENERATOR) / 6),
    ),
}


def moved(transform: Transform) -> Transform:
    steps: list[Diagonal | Permutation | Hadamard | BlockMatrix] = []
    for step in transform:
        if isinstance(step, Diagonal):
            steps.append(Diagonal(scale_K=step.scale_K.to(DEVICE)))
        elif isinstance(step, Permutation):
            steps.append(Permutation(index_K=step.index_K.to(DEVICE)))
        elif isinstance(step, BlockMatrix):
            steps.append(BlockMatrix(matrix_Bij=step.matrix_Bij.to(DEVICE)))
        else:
            steps.append(step)
    return tuple(steps)


def product_of_decoded(x: Tensor, transform: Transform, code_rule: CodeRule, gram_Bij: Tensor) -> Tensor:
    transformed = apply_transform(transform, x)
    swaps = code_rule == "block_swap"
    values = fake_quantize_with_swap(transformed, gram_Bij) if swaps else fake_quantize(transformed)
    return values.double() @ decode(WEIGHT).double().T


@pytest.mark.parametrize("code_rule", CODE_RULES)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_rows", [1, 5, 23])
def test_every_route_gives_the_product_of_the_decoded_operands(
    num_rows: int, route: Route, name: str, code_rule: CodeRule
) -> None:
    x = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(num_rows))
    gram_Bij = block_gram((decode(WEIGHT),))
    weight = prepare_weight(WEIGHT, device=DEVICE, route=route)
    assert weight.route == route
    y = mxfp4_linear(
        x.to(DEVICE),
        weight,
        transform=moved(TRANSFORMS[name]),
        activation=ActivationRule(code_rule=code_rule),
        gram_Bij=gram_Bij.to(DEVICE) if code_rule == "block_swap" else None,
    )
    wanted = product_of_decoded(x, TRANSFORMS[name], code_rule, gram_Bij)
    # Block matrices may put a value on the other side of a tie, and so may two ways to add up a Hadamard transform.
    assert relative_error(y, wanted) < (3e-4 if name == "none" else 3e-3)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_rows", [1, 23])
def test_bias_and_branch_are_added(num_rows: int, route: Route) -> None:
    x = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(num_rows))
    weight = prepare_weight(WEIGHT, device=DEVICE, route=route)
    y = mxfp4_linear(x.to(DEVICE), weight, bias_N=BIAS.to(DEVICE), low_rank=BRANCH)
    branch = x.double() @ BRANCH.a_RK.double().T @ BRANCH.b_NR.double().T
    wanted = product_of_decoded(x, (), "nearest", torch.empty(0)) + BIAS.double() + branch
    assert relative_error(y, wanted) < 3e-4
    assert relative_error(y - BIAS.to(DEVICE), wanted) > 1e-2


def test_leading_axes_and_dtypes_are_kept() -> None:
    x = torch.randn(2, 9, K, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    for route in ROUTES:
        weight = prepare_weight(WEIGHT, device=DEVICE, route=route)
        flat = mxfp4_linear(x.flatten(0, 1), weight)
        assert torch.equal(mxfp4_linear(x, weight), flat.view(2, 9, N))
        narrow = mxfp4_linear(x.bfloat16(), weight)
        assert narrow.dtype == torch.bfloat16
        assert mxfp4_linear(x.bfloat16(), weight, dtype=torch.float32).dtype == torch.float32
        assert relative_error(narrow.flatten(0, 1), flat) < 0.2
        assert mxfp4_linear(x[:, :0], weight).shape == (2, 0, N)


def test_fast_accumulation_is_close() -> None:
    x = torch.randn(64, K, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    weight = prepare_weight(WEIGHT, device=DEVICE, route="fp8_lift")
    fast = mxfp4_linear(x, weight, accumulation="fast")
    assert relative_error(fast, mxfp4_linear(x, weight)) < 5e-3


def test_rows_that_are_not_finite_are_nan_on_every_route() -> None:
    x = torch.randn(20, K, generator=torch.Generator().manual_seed(6))
    x[3, 7], x[11, 100] = torch.nan, torch.inf
    wanted = [row in (3, 11) for row in range(20)]
    for route in ROUTES:
        weight = prepare_weight(WEIGHT, device=DEVICE, route=route)
        for transform in ((), TRANSFORMS["permutation, block matrices"]):
            y = mxfp4_linear(x.to(DEVICE), weight, transform=moved(transform))
            assert y.isnan().any(dim=1).tolist() == wanted
            assert y.isfinite().all(dim=1).tolist() == [not bad for bad in wanted]


def test_a_weight_of_many_octaves_takes_the_format_that_holds_it() -> None:
    cases = ((12, "fp8_lift", torch.float8_e4m3fn), (25, "fp8_lift", torch.float8_e5m2), (40, "bf16", None))
    for octaves, route, element in cases:
        values = torch.randn(N, 4, 32, generator=torch.Generator().manual_seed(7)).clamp(0.5, 3)
        values[:, 1] *= 2.0**-octaves
        encoded = encode(values.flatten(1))
        weight = prepare_weight(encoded, device=DEVICE, route="fp8_lift")
        assert weight.route == route
        assert (None if weight.lifted is None else weight.lifted.values_MK.dtype) == element
        x = torch.randn(30, 128, generator=torch.Generator().manual_seed(8))
        wanted = decode(encode(x)).double() @ decode(encoded).double().T
        assert relative_error(mxfp4_linear(x.to(DEVICE), weight), wanted) < 3e-4


def test_a_weight_for_few_rows_keeps_four_and_a_quarter_bits_and_refuses_many() -> None:
    weight = prepare_weight(WEIGHT, device=DEVICE, route="fp8_lift", few_rows_only=True)
    assert weight.lifted is None
    assert weight.values_NK is None
    assert 8 * (weight.packed_NH.numel() + weight.scales_NB.numel()) == 4.25 * N * K
    most = most_packed_rows(torch.device(DEVICE))
    assert mxfp4_linear(torch.ones(most, K, device=DEVICE), weight).shape == (most, N)
    with pytest.raises(ValueError, match=rf"prepared for 1 to {most} rows under nearest codes .* and got 17"):
        mxfp4_linear(torch.ones(17, K, device=DEVICE), weight)


def test_the_route_follows_from_the_capability() -> None:
    routes = {
        capability: route_of_capability(capability) for capability in [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
    }
    assert list(routes.values()) == ["bf16", "bf16", "fp8_lift", "fp8_lift", "dot_scaled", "dot_scaled"]
    assert choose_route(torch.device("cpu")) == "float32"
    assert prepare_weight(WEIGHT, device="cpu").route == "float32"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_what_does_not_fit_is_refused_on_every_route_and_for_any_number_of_rows(num_rows: int, route: Route) -> None:
    weight = prepare_weight(WEIGHT, device=DEVICE, route=route)
    x = torch.randn(num_rows, K, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    swaps = ActivationRule(code_rule="block_swap")
    gram_Bij = block_gram((decode(WEIGHT),)).to(DEVICE)
    bad_branch = LowRank(a_RK=BRANCH.a_RK, b_NR=BRANCH.b_NR[:, :2])
    refused: list[tuple[str, dict[str, Any]]] = [
        ("block_swap needs the Gram matrices", {"activation": swaps}),
        (r"Gram matrices are \(1, 32, 32\)", {"activation": swaps, "gram_Bij": gram_Bij[:1]}),
        ("unknown code rule 'blockswap'", {"activation": ActivationRule(code_rule="blockswap")}),  # type: ignore[arg-type]
        ("unknown scale rule 'evn'", {"activation": ActivationRule(scale_rule="evn")}),  # type: ignore[arg-type]
        ("unknown accumulation 'fp32'", {"accumulation": "fp32"}),
        (r"bias is \(39,\)", {"bias_N": torch.ones(N - 1, device=DEVICE)}),
        (r"bias is \(40, 1\)", {"bias_N": torch.ones(N, 1, device=DEVICE)}),
        (r"branch is \(3, 192\) and \(40, 2\)", {"low_rank": bad_branch}),
        (r"Hadamard, has \(3,\); it needs a power of two", {"transform": (Hadamard(size=3),)}),
        (r"Hadamard, has \(256,\)", {"transform": (Hadamard(size=256),)}),
        (r"Hadamard, has \(0,\)", {"transform": (Hadamard(size=0),)}),
        (
            r"Diagonal, has \(32,\); it needs \(192,\)",
            {"transform": (Diagonal(scale_K=torch.ones(32, device=DEVICE)),)},
        ),
        (r"Permutation, has \(32,\)", {"transform": (Permutation(index_K=torch.arange(32, device=DEVICE)),)}),
        (r"BlockMatrix, has \(32, 32\)", {"transform": (BlockMatrix(matrix_Bij=torch.eye(32, device=DEVICE)),)}),
    ]
    for message, arguments in refused:
        with pytest.raises(ValueError, match=message):
            mxfp4_linear(x, weight, **arguments)
    for wrong in (x.double(), x.int(), torch.ones((), device=DEVICE)):
        with pytest.raises(ValueError, match="cannot multiply|does not end in"):
            mxfp4_linear(wrong, weight)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("num_rows", [1, 3, 17])
def test_strided_operands_and_an_unread_gram_change_nothing(num_rows: int, route: Route) -> None:
    generator = torch.Generator().manual_seed(10)
    weight = prepare_weight(WEIGHT, device=DEVICE, route=route)
    x = torch.randn(num_rows, K, generator=generator).to(DEVICE)
    wide_K = torch.randn(2 * K, generator=generator).exp().to(DEVICE)
    wide_N = torch.randn(2 * N, generator=generator).to(DEVICE)
    plain: dict[str, Any] = {
        "transform": (Diagonal(scale_K=wide_K[::2].contiguous()),),
        "bias_N": wide_N[::2].contiguous(),
    }
    strided: dict[str, Any] = {"transform": (Diagonal(scale_K=wide_K[::2]),), "bias_N": wide_N[::2]}
    for accumulation in ("float32", "fast"):
        wanted = mxfp4_linear(x, weight, accumulation=accumulation, **plain)  # type: ignore[arg-type]
        got = mxfp4_linear(x, weight, accumulation=accumulation, **strided)  # type: ignore[arg-type]
        assert torch.equal(got, wanted)
    gram_Bij = block_gram((decode(WEIGHT),)).to(DEVICE)
    assert torch.equal(mxfp4_linear(x, weight, gram_Bij=gram_Bij), mxfp4_linear(x, weight))
    assert not mxfp4_linear(x.clone().requires_grad_(), weight, low_rank=BRANCH).requires_grad


def test_another_default_dtype_changes_nothing() -> None:
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(11)).to(DEVICE)
    results = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            encoded = encode(torch.randn(N, K, generator=torch.Generator().manual_seed(12), dtype=torch.float32))
            weights = [prepare_weight(encoded, device=DEVICE, route=route) for route in ROUTES]
            results.append([mxfp4_linear(x, weight) for weight in weights])
        finally:
            torch.set_default_dtype(torch.float32)
    for got, wanted in zip(*results, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted)


def test_few_rows_leave_weights_of_many_octaves_to_others() -> None:
    for span in (26, 27, 40):
        codes = torch.full((16, 64), 2, dtype=torch.uint8)
        encoded = Encoded(codes_NK=codes, scales_NB=torch.tensor([[150, 150 - span]], dtype=torch.uint8).repeat(16, 1))
        x = torch.ones(16, 64)
        x[:, :32] = 0
        wanted = decode(encode(x)).double() @ decode(encoded).double().T
        weight = prepare_weight(encoded, device=DEVICE, route="fp8_lift")
        assert (weight.references_N is None) == (span > 26 or weight.route != "fp8_lift")
        assert prepare_weight(encoded, device=DEVICE, route="fp8_lift", few_rows_only=True).route == (
            "fp8_lift" if span <= 26 else "bf16"
        )
        if span != 27 or DEVICE == "cuda":  # the interpreter loses subnormals of E5M2
            for num_rows in (1, 2, 16):
                assert relative_error(mxfp4_linear(x[:num_rows].to(DEVICE), weight), wanted[:num_rows]) < 3e-4


def test_what_cannot_be_is_refused() -> None:
    weight = prepare_weight(WEIGHT, device=DEVICE, route="float32")
    with pytest.raises(ValueError, match=r"unknown route 'tf32'; known: fp8_lift"):
        prepare_weight(WEIGHT, route="tf32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"input \(2, 64\) does not end in the weight's 192 inputs"):
        mxfp4_linear(torch.ones(2, 64, device=DEVICE), weight)
    x_MK = torch.ones(20, K, device=DEVICE)
    with pytest.raises(ValueError, match="encoded for route 'bf16', the weight for 'float32'"):
        multiply(encode_activation(x_MK, "bf16"), weight, x_MK=x_MK)
    encoded = encode_activation(x_MK, "float32")
    with pytest.raises(ValueError, match=r"encoded activation is \(20, 192\) and its input \(3, 192\)"):
        multiply(encoded, weight, x_MK=x_MK[:3])
    with pytest.raises(ValueError, match="unknown route 'fp4'"):
        encode_activation(x_MK, "fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"activation is torch\.float32 \(192,\); give rows"):
        encode_activation(x_MK[0], "float32")
    for route in ROUTES:
        none = prepare_weight(
            Encoded(codes_NK=WEIGHT.codes_NK[:0], scales_NB=WEIGHT.scales_NB[:0]), device=DEVICE, route=route
        )
        assert mxfp4_linear(x_MK, none).shape == (20, 0)
        turned = Encoded(codes_NK=WEIGHT.codes_NK.T.contiguous().T, scales_NB=WEIGHT.scales_NB)
        assert torch.equal(prepare_weight(turned, device=DEVICE, route=route).packed_NH.cpu(), pack(WEIGHT.codes_NK))


def test_only_the_end_of_a_transform_is_left_to_the_kernels() -> None:
    diagonal, rotation = TRANSFORMS["diagonal, hadamard 32"]
    permutation, matrices = TRANSFORMS["permutation, block matrices"]
    fused = fused_steps((rotation, permutation, diagonal, matrices))
    assert fused.before == (rotation, permutation)
    assert fused.matrix_Bij is not None
    assert fused.diagonal_K is not None
    assert fused_steps((diagonal, rotation), longest_hadamard=16).before == (diagonal, rotation)
    assert fused_steps((diagonal,)).before == ()
    assert fused_steps((matrices, diagonal, rotation)).before == (matrices,)
