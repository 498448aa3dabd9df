"""Compile every Triton kernel for a Hopper GPU, on any machine, and print what came out: ``python -m tests.kernel_compiling``.

Triton needs no GPU to compile for one. Prints one JSON object: by kernel and case, bytes of shared memory; ``--few`` leaves out
those that take long. Run it without TRITON_INTERPRET, which replaces the compiler.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.experimental.gluon._runtime import GluonASTSource

from forge_kernels.ops.block_matrix_kernel import _encode_block_matrix_kernel
from forge_kernels.ops.block_swap_kernel import _encode_with_swap_kernel
from forge_kernels.ops.encode_kernel import _encode_kernel, _fake_quantize_kernel, hadamard_arguments
from forge_kernels.ops.few_rows_kernel import _few_rows_kernel
from forge_kernels.ops.lift_kernel import _encode_lifted_kernel, _lift_arguments, _lift_packed_kernel
from forge_kernels.ops.lifted_product_kernel import _lifted_product_kernel
from forge_kernels.ops.one_row_kernel import _one_row_kernel
from forge_kernels.ops.scaled_product_kernel import _scaled_product_kernel
from forge_kernels.solvers.gptq_kernel import _encode_panel_kernel

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "x_ptr": "*bf16", "diagonal_ptr": "*fp32", "matrix_ptr": "*bf16", "gram_ptr": "*fp32", "packed_ptr": "*u8",
    "bytes_ptr": "*u8", "scales_ptr": "*u8", "values_ptr": "*bf16", "weight_ptr": "*i32", "weight_scales_ptr": "*u8",
    "y_ptr": "*fp32", "is_exact_ptr": "*i1", "x_scales_ptr": "*fp32", "references_ptr": "*u8", "parts_ptr": "*fp32",
    "counters_ptr": "*i32", "a_ptr": "*u8", "b_ptr": "*u8", "a_scales_ptr": "*fp32", "b_scales_ptr": "*fp32",
    "bias_ptr": "*fp32", "u_ptr": "*fp32", "v_ptr": "*fp32", "target_ptr": "*fp64", "feedback_ptr": "*fp64",
    "rounded_ptr": "*fp32", "difference_ptr": "*fp64",
}  # fmt: skip
"""By argument; all others that are no constants are int32."""


def shared_memory(kernel: Any, constants: dict[str, Any], *, num_warps: int = 4, **types: str) -> int:
    """Compile a kernel for Hopper and return the bytes of shared memory that a program of it takes."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, TYPES.get(name, "i32"))
        if signature[name] != "constexpr" and not signature[name].startswith("tensordesc") and name != "column_stride":
            attributes[(index,)] = [["tt.divisibility", 16]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    source = form(kernel, signature, values, attributes)
    compiled = compile(source, target=HOPPER, options={"num_warps": num_warps, "enable_fp_fusion": False})
    return int(compiled.metadata.shared)


def all_kernels(*, few: bool) -> dict[str, int]:
    """Compile kernels in the shapes they run in and return their shared memory by name and case."""
    tile = {"N": 128, "C": 4, "E": 8}
    plain = {"RULE": 0, "HAS_DIAGONAL": False}
    lift = _lift_arguments("e4m3") | {"ROUNDS_FIRST": False}
    found: dict[str, int] = {}
    for size in (1, 32) if few else (1, 32, 64, 512):
        constants = plain | hadamard_arguments(size) | tile
        found[f"encode, hadamard {size}"] = shared_memory(_encode_kernel, constants)
        found[f"fake_quantize, hadamard {size}"] = shared_memory(_fake_quantize_kernel, constants)
    found["encode search"] = shared_memory(_encode_kernel, plain | hadamard_arguments(1) | tile | {"RULE": 3})
    for size in (1, 32):
        constants = (
            plain
            | hadamard_arguments(size)
            | tile
            | lift
            | {"FOR_FEW_ROWS": False, "IS_FOLLOWED": False, "R": 1, "P": 128}
        )
        found[f"encode and lift, hadamard {size}"] = shared_memory(
            _encode_lifted_kernel, constants, values_ptr="*fp8e4nv", scales_ptr="*fp32"
        )
    found["lift packed"] = shared_memory(
        _lift_packed_kernel, lift | {"R": 1, "P": 128}, values_ptr="*fp8e4nv", scales_ptr="*fp32"
    )
    if few:
        return found
    found["gptq panel"] = shared_memory(
        _encode_panel_kernel, {"P": 32, "N": 32}, num_warps=1, weight_ptr="*fp64", scales_ptr="*u8"
    )
    found["block matrix"] = shared_memory(_encode_block_matrix_kernel, plain | {"IS_BF16": True, "R": 64})
    found["block swap"] = shared_memory(_encode_with_swap_kernel, plain | hadamard_arguments(1) | tile)
    one_row = plain | hadamard_arguments(1) | {"TILES": 2, "N": 16, "B": 256, "C": 4, "E": 8, "IS_INTERPRETED": False}
    found["one row"] = shared_memory(_one_row_kernel, one_row, num_warps=8)
    for rows, warps, steps, is_even in ((8, 4, 16, True), (16, 8, 16, True), (16, 8, 4, False)):
        found[f"{rows} rows, {steps} steps, even {is_even}"] = shared_memory(
            _few_rows_kernel,
            {"M": rows, "W": warps, "T": steps, "P": 4, "EARLY": 2, "AHEAD": 3, "IS_EVEN": is_even},
            num_warps=warps,
            x_ptr="*fp8e5",
        )
    for is_fast, k in ((False, 128), (True, 64)):
        found[f"lifted product, fast {is_fast}"] = shared_memory(
            _lifted_product_kernel,
            {
                "HAS_BIAS": True, "RANK": 16, "R": 16, "IS_FAST": is_fast, "GROUP": 8, "M": 128, "N": 256, "K": k,
            },
            num_warps=8,
            a_descriptor=f"tensordesc<fp8e4nv[128, {k}]>",
            b_descriptor=f"tensordesc<fp8e4nv[256, {k}]>",
        )  # fmt: skip
    found["scaled product"] = shared_memory(
        _scaled_product_kernel, {"M": 128, "N": 128, "K": 128}, num_warps=8, a_scales_ptr="*u8", b_scales_ptr="*u8"
    )
    return found


if __name__ == "__main__":
    print(json.dumps(all_kernels(few="--few" in sys.argv)))
