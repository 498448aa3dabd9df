"""Which way a product of MXFP4 operands is computed: decided here, by what the device can do, and nowhere else.

fp8_lift    both operands lifted to FP8 (`forge_kernels.ops.lift`), exact but for summation: Ada and Hopper, whose matrix units
multiply FP8 twice as fast as bfloat16 and know no E2M1
dot_scaled  packed codes and scale bytes straight to the matrix units: Blackwell and later
bf16        both operands decoded to bfloat16, which holds every value of theirs exactly: any other CUDA device, and weights that
the lift cannot hold
float32     decoded to float32: CPUs; the reference that the others are compared with
"""

from __future__ import annotations

from typing import Final, Literal

import torch

Route = Literal["fp8_lift", "dot_scaled", "bf16", "float32"]
ROUTES: Final[tuple[Route, ...]] = ("fp8_lift", "dot_scaled", "bf16", "float32")

_LIFTING: Final = ((8, 9), (9, 0))
_TAKING_REGISTERS: Final = (9, 0)
_FIRST_NATIVE_MAJOR: Final = 10


def choose_route(device: torch.device) -> Route:
    """Return the route for a device: by its type, and by the compute capability of a CUDA device."""
    if device.type != "cuda":
        return "float32"
    return route_of_capability(torch.cuda.get_device_capability(device))


def route_of_capability(capability: tuple[int, int]) -> Route:
    """Return the route for a CUDA compute capability (major, minor)."""
    if capability in _LIFTING:
        return "fp8_lift"
    return "dot_scaled" if capability[0] >= _FIRST_NATIVE_MAJOR else "bf16"


def most_packed_rows(device: torch.device) -> int:
    """Return how many rows the route fp8_lift multiplies with a weight as it is stored: 16 on Hopper, else 1.

    Hopper's matrix units alone take what other threads need not see straight from registers.
    """
    if device.type != "cuda":
        return 1
    return 16 if torch.cuda.get_device_capability(device) == _TAKING_REGISTERS else 1


def require_known_route(route: str) -> None:
    """Raise where the route is not one of `ROUTES`.

    Raises:
        ValueError: names the known routes.
    """
    if route not in ROUTES:
        raise ValueError(f"unknown route {route!r}; known: {', '.join(ROUTES)}")
