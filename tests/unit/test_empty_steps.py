"""Steps and branches that change nothing are no evidence of a change; what acts stays, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from evaluators.empty_steps import branch_rank, essence
from evaluators.installs import Install, install_digest
from forge_kernels import ActivationRule, BlockMatrix, Diagonal, Hadamard, LowRank, Permutation, decode, encode
from forge_kernels.transforms import Transform, apply_transform, transform_weight

K, N = 128, 8
NEAREST, SWAP = ActivationRule(scale_rule="even"), ActivationRule(scale_rule="even", code_rule="block_swap")
BACKWARDS = torch.arange(K - 1, -1, -1)  # blocks and their insides reversed: every block stays together
SCATTER = torch.randperm(K, generator=torch.Generator().manual_seed(3))
SIGNS = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(K // 4)
POWERS = torch.tensor([0.5, 2.0, 4.0, 1.0]).repeat_interleave(32)


def diagonal(scale_K: Tensor) -> Diagonal:
    return Diagonal(scale_K=scale_K)


def permutation(index_K: Tensor) -> Permutation:
    return Permutation(index_K=index_K)


ONES, IN_ORDER = diagonal(torch.ones(K)), permutation(torch.arange(K))
EYE = BlockMatrix(matrix_Bij=torch.eye(32).expand(1, 32, 32))
ROTATION = Hadamard(size=32)
EMPTY: dict[str, Transform] = {
    "nothing": (),
    "ones": (ONES,),
    "in order": (IN_ORDER,),
    "identity blocks": (EYE,),
    "all of them": (IN_ORDER, ONES, EYE),
    "a rotation and its inverse": (ROTATION, ROTATION),
    "nested inverses": (permutation(SCATTER), ROTATION, ONES, ROTATION, permutation(SCATTER.argsort())),
    "diagonals that undo each other": (diagonal(torch.full((K,), 0.5)), diagonal(torch.full((K,), 2.0))),
    "one power of two": (diagonal(torch.full((K,), 8.0)),),
    "a power of two on each block": (diagonal(POWERS),),
    "blocks and their insides in another order": (permutation(BACKWARDS),),
    "signs": (diagonal(SIGNS),),
    "signed powers": (diagonal(POWERS * SIGNS),),
    "powers and order": (diagonal(POWERS), permutation(BACKWARDS), diagonal(POWERS)),
}
ACTING: dict[str, tuple[Transform, list[str]]] = {
    "a rotation": ((ROTATION,), ["Hadamard"]),
    "two sizes": ((ROTATION, Hadamard(size=16)), ["Hadamard", "Hadamard"]),
    "a scatter": ((permutation(SCATTER),), ["Permutation"]),
    "an order before a rotation": ((permutation(BACKWARDS), ROTATION), ["Permutation", "Hadamard"]),
    "no power of two": ((diagonal(torch.full((K,), 3.0)),), ["Diagonal"]),
    "signs before a rotation": ((diagonal(SIGNS), ROTATION), ["Diagonal", "Hadamard"]),
    "powers inside a block": ((diagonal(torch.tensor([1.0, 2.0]).repeat(K // 2)),), ["Diagonal"]),
    "powers before a wide rotation": ((diagonal(POWERS), Hadamard(size=64)), ["Diagonal", "Hadamard"]),
    "powers before a block rotation": ((diagonal(POWERS), ROTATION), ["Hadamard"]),
    "ones around a rotation": ((ONES, ROTATION, IN_ORDER), ["Hadamard"]),
}


def install(transform: Transform, *, rule: ActivationRule = NEAREST, low_rank: LowRank | None = None) -> Install:
    weight_NK = torch.randn(N, K, generator=torch.Generator().manual_seed(1))
    encoded = encode(transform_weight(transform, weight_NK), scale_rule="even")
    return Install(weight=encoded, transform=transform, activation=rule, low_rank=low_rank)


def output(made: Install) -> Tensor:
    """What the layer computes, in float64 so that the order of the sum does not show."""
    x_TK = torch.randn(16, K, generator=torch.Generator().manual_seed(2))
    turned_TK = decode(encode(apply_transform(made.transform, x_TK), scale_rule="even"))
    return turned_TK.double() @ decode(made.weight).double().T


@pytest.mark.parametrize("name", EMPTY)
def test_empty_steps_are_dropped_and_the_digest_is_that_of_the_plain_layer(name: str) -> None:
    made = install(EMPTY[name])
    assert essence(made.transform, NEAREST).steps == ()
    assert install_digest(made) == install_digest(install(()))
    torch.testing.assert_close(output(made), output(install(())), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ACTING)
def test_what_acts_stays(name: str) -> None:
    transform, left = ACTING[name]
    assert [type(step).__name__ for step in essence(transform, NEAREST).steps] == left
    assert install_digest(install(transform)) != install_digest(install(()))


def test_a_permutation_before_a_block_swap_is_never_empty() -> None:
    assert essence((permutation(BACKWARDS),), SWAP).steps != ()
    assert essence((diagonal(SIGNS),), SWAP).steps != ()
    assert essence((IN_ORDER,), SWAP).steps == ()


EVERY_STEP = [step for transform in EMPTY.values() for step in transform]
EVERY_STEP += [step for transform, _ in ACTING.values() for step in transform]
STEPS = st.sampled_from(EVERY_STEP)


@given(st.lists(STEPS, max_size=5))
def test_the_essence_is_the_same_layer(steps: list[object]) -> None:
    """Property: with the moved weight and the steps that are left, the layer computes what it computed before."""
    made = install(tuple(steps))  # type: ignore[arg-type]
    acting = essence(made.transform, NEAREST)
    x_TK = torch.randn(16, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    # Without encoding: where a step may be dropped despite the encoding is what the cases above show, to the bit.
    before_TN = apply_transform(made.transform, x_TK) @ decode(made.weight).double().T
    after_TN = apply_transform(acting.steps, x_TK) @ acting.weight(decode(made.weight)).double().T
    torch.testing.assert_close(after_TN, before_TN, rtol=1e-9, atol=1e-9)


def branch(a_RK: Tensor, b_NR: Tensor) -> LowRank:
    return LowRank(a_RK=a_RK.bfloat16(), b_NR=b_NR.bfloat16())


def test_the_rank_of_a_branch_is_that_of_what_it_adds() -> None:
    generator = torch.Generator().manual_seed(5)
    a_RK, b_NR = torch.randn(8, K, generator=generator), torch.randn(N, 8, generator=generator)
    assert branch_rank(None) == 0
    assert branch_rank(branch(a_RK, b_NR)) == 8
    assert branch_rank(branch(torch.zeros(8, K), b_NR)) == 0
    assert branch_rank(branch(a_RK, torch.zeros(N, 8))) == 0
    assert branch_rank(branch(a_RK[:1].expand(8, K), b_NR)) == 1
    half = b_NR * torch.tensor([1.0, 0.0] * 4)
    assert branch_rank(branch(a_RK, half)) == 4


def test_a_branch_of_zeros_leaves_the_digest() -> None:
    zeros = branch(torch.zeros(8, K), torch.ones(N, 8))
    assert install_digest(install((), low_rank=zeros)) == install_digest(install(()))
    ones = branch(torch.ones(8, K), torch.ones(N, 8))
    assert install_digest(install((), low_rank=ones)) != install_digest(install(()))
