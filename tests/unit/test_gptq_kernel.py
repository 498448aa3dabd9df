"""The Triton kernel that encodes one panel of channels against its reference."""

from __future__ import annotations

import importlib

import pytest
import torch

from forge_kernels.solvers.gptq import encode_panel_reference
from forge_kernels.solvers.gptq_kernel import encode_panel_triton
from tests.kernel_cases import DEVICE, assert_equal

gptq_module = importlib.import_module("forge_kernels.solvers.gptq")  # the package has a function of that name


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


def test_a_whole_weight_gets_the_codes_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(600, 192, generator=generator) * torch.randn(192, generator=generator).mul(0.7).exp()
    weight_NK = (0.05 * torch.randn(40, 192, generator=generator)).to(DEVICE)
    moment_KK = (x_TK.double().T @ x_TK.double() / 600).to(DEVICE)
    codes = []
    for encode_panel in (encode_panel_reference, encode_panel_triton):
        monkeypatch.setattr(gptq_module, "choose_panel_encoder", lambda device, chosen=encode_panel: chosen)
        codes.append(gptq_module.gptq(weight_NK, moment_KK).codes_NK)
    assert_equal(codes[1], codes[0], "code")


def test_where_the_kernel_cannot_be_compiled_the_reference_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise PermissionError("no compiler")

    class Device:
        type = "cuda"

    gptq_module.choose_panel_encoder.cache_clear()
    monkeypatch.setattr(gptq_module, "encode_panel_triton", fail)
    monkeypatch.setattr(gptq_module.torch, "zeros", lambda *shape, **rest: torch.ones(*shape, dtype=rest["dtype"]))
    monkeypatch.setattr(gptq_module.torch, "eye", lambda size, **rest: torch.ones(size, size))
    assert gptq_module.choose_panel_encoder(Device()) is encode_panel_reference
    gptq_module.choose_panel_encoder.cache_clear()
    assert "its kernel cannot be compiled here: no compiler" in caplog.text


def test_a_weight_without_outputs_is_nothing_to_do() -> None:
    empty = torch.empty(32, 0, dtype=torch.float64, device=DEVICE)
    encode_panel_triton(
        empty, empty, empty.to(torch.uint8), torch.eye(32, dtype=torch.float64, device=DEVICE), empty.float(), empty
    )
