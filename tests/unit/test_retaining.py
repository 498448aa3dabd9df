"""Promotion goes by score alone, beyond the noise, within the class that is searched."""

from __future__ import annotations

import pytest

from evaluators.results import ContractClass
from forge.retaining import CLASS_ORDER, is_class_allowed, is_gain, is_loss, judge
from hypotheses.effects import PairedEffect
from tests.ledger_builders import scored


def effect(z: float) -> PairedEffect:
    return PairedEffect(mean=z * 0.01, standard_error=0.01, num_chunks=8, chunk_variance=8e-4, program_variance=0.0)


def retention(
    z: float, *, bits: float | None = 4.25, simplifies: bool = False, contract_class: str = "online", floor: float = 0.0
):  # type: ignore[no-untyped-def]
    return judge(
        effect(z),
        scored(3.0, 3.1, effective_bits=bits, contract_class=contract_class),
        scored(3.1, 3.2, effective_bits=4.25),
        promotion_sigma=2.0,
        noise_floor=floor,
        allowed="online",
        simplifies=simplifies,
    )


@pytest.mark.parametrize(
    ("z", "promoted", "worse"), [(2.5, True, False), (1.5, False, False), (-1.5, False, False), (-2.5, False, True)]
)
def test_beyond_the_noise_or_not(z: float, promoted: bool, worse: bool) -> None:
    result = retention(z)
    assert (result.promoted, result.worse) == (promoted, worse)
    assert f"{z:+.1f} standard errors" in result.reason


@pytest.mark.parametrize(("floor", "promoted"), [(0.0, True), (0.012, True), (0.013, False), (0.1, False)])
def test_a_sharp_comparison_does_not_undercut_the_noise_floor(floor: float, promoted: bool) -> None:
    result = retention(2.5, floor=floor)
    assert result.promoted is promoted, result.reason


@pytest.mark.parametrize(("floor", "worse"), [(0.0, True), (0.012, True), (0.013, False), (0.1, False)])
def test_a_sharp_loss_is_held_to_the_noise_floor_like_a_gain(floor: float, worse: bool) -> None:
    assert is_loss(effect(-2.5), promotion_sigma=2.0, noise_floor=floor) is worse
    assert is_gain(effect(2.5), promotion_sigma=2.0, noise_floor=floor) is worse
    result = retention(-2.5, floor=floor)
    assert result.worse is worse, result.reason
    assert retention(-2.5, floor=floor, simplifies=True).promoted is not worse


@pytest.mark.parametrize(
    ("z", "bits", "promoted"),
    [(-1.5, 4.25, True), (-1.5, 4.0, True), (-1.5, 4.5, False), (-2.5, 4.0, False), (-1.5, None, False)],
)
def test_a_simplification_needs_only_not_to_be_worse_at_no_more_bits(
    z: float, bits: float | None, promoted: bool
) -> None:
    result = retention(z, bits=bits, simplifies=True)
    assert result.promoted is promoted, result.reason


def test_a_wider_class_is_never_promoted() -> None:
    result = retention(50.0, contract_class="corrected", simplifies=True)
    assert not result.promoted
    assert "'corrected' is beyond 'online'" in result.reason
    assert retention(-50.0, contract_class="corrected").worse


@pytest.mark.parametrize("allowed", CLASS_ORDER)
def test_each_class_contains_those_before_it(allowed: ContractClass) -> None:
    expected = CLASS_ORDER[: CLASS_ORDER.index(allowed) + 1]
    assert tuple(name for name in CLASS_ORDER if is_class_allowed(name, allowed)) == expected
    assert not is_class_allowed(None, allowed)
    assert not is_class_allowed("unheard of", allowed)
