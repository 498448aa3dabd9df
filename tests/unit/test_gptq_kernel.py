"""The Triton kernel that encodes one panel of channels against its reference."""

from __future__ import annotations

import pytest
import torch

from forge_kernels.solvers.gptq import encode_panel_reference
from forge_kernels.solvers.gptq_kernel import encode_panel_triton
from tests.kernel_cases import DEVICE, assert_equal


@pytest.mark.parametrize("num_outputs", [1, 32, 70])
def test_a_panel_is_encoded_as_the_reference_does(num_outputs: int) -> None:
    generator = torch.Generator().manual_seed(num_outputs)
    target_PN = torch.randn(32, num_outputs, generator=generator, dtype=torch.float64)
    weight_PN = target_PN + 0.1 * torch.randn(32, num_outputs, generator=generator, dtype=torch.float64)
    scales_PN = torch.randint(120, 128, (32, num_outputs), generator=generator, dtype=torch.uint8)
    feedback_PP = (0.3 * torch.randn(32, 64, generator=generator, dtype=torch.float64))[:, 16:48]
    results = []
    for encode_panel, device in ((encode_panel_reference, "cpu"), (encode_panel_triton, DEVICE)):
        rounded_PN = torch.full((32, num_outputs), torch.nan, device=device)
        difference_PN = torch.full((32, num_outputs), torch.nan, dtype=torch.float64, device=device)
        arguments = (target_PN.clone(), weight_PN, scales_PN, feedback_PP)
        encode_panel(*(part.to(device) for part in arguments), rounded_PN, difference_PN)
        results.append((rounded_PN, difference_PN))
    assert_equal(results[1][0], results[0][0], "rounded value")
    torch.testing.assert_close(results[1][1].cpu(), results[0][1], rtol=0, atol=1e-12)


def test_a_weight_without_outputs_is_nothing_to_do() -> None:
    empty = torch.empty(32, 0, dtype=torch.float64, device=DEVICE)
    encode_panel_triton(
        empty, empty, empty.to(torch.uint8), torch.eye(32, dtype=torch.float64, device=DEVICE), empty.float(), empty
    )
