"""Measure what the shipped subjects are for: quantization costs enough, and each known remedy wins enough back.

    python -m evaluators.nano.verify evaluators/nano/nano-llama

Scores plain programs built from `forge_kernels` on the `search` split, all seven projections of every block W4A4
MXFP4, and prints the table of the model card. It walks the decoder by itself, apart from the evaluator's Session, so
that the two confirm each other. Unit: the noise floor of a comparison,

    floor = sqrt(s_chunk^2 / n + 2 * s_draw^2)

s_chunk: standard deviation over the n chunks of the difference between two programs of similar quality (GPTQ and
balance); s_draw: standard deviation of GPTQ's mean loss over calibration draws of 32 sequences each.

Legend: T tokens, N output features, K input features, C chunks, L tokens of a chunk.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from forge_kernels import (
    BlockMatrix,
    Diagonal,
    Hadamard,
    Transform,
    apply_transform,
    decode,
    encode,
    fake_quantize,
    gptq,
    smooth_scales,
    transform_weight,
    wush_matrices,
)

CALIBRATION_CHUNKS = 32
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
Rule = Callable[[Tensor, list[Tensor]], Transform]


def _balance(x_TK: Tensor, weights: list[Tensor]) -> Transform:
    weight_max_K = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
    return (Diagonal(scale_K=smooth_scales(x_TK.abs().amax(0), weight_max_K, exponent=0.5)),)


def _rotate(x_TK: Tensor, weights: list[Tensor]) -> Transform:
    return (Hadamard(size=32),)


def _wush(x_TK: Tensor, weights: list[Tensor]) -> Transform:
    return (BlockMatrix(matrix_Bij=wush_matrices((x_TK.double().T @ x_TK.double()) / len(x_TK), weights)),)


RULES: dict[str, Rule] = {
    "none": lambda x_TK, weights: (),
    "balance": _balance,
    "rotation": _rotate,
    "balance, rotation": lambda x_TK, weights: _balance(x_TK, weights) + _rotate(x_TK, weights),
    "wush": _wush,
}
PROGRAMS: dict[str, tuple[str, bool]] = {  # coordinate rule, whether GPTQ chooses the codes
    "rtn": ("none", False),
    "balance": ("balance", False),
    "rotation": ("rotation", False),
    "gptq": ("none", True),
    "balance + rotation": ("balance, rotation", False),
    "wush": ("wush", False),
    "rotation + gptq": ("rotation", True),
    "balance + gptq": ("balance", True),
    "balance + rotation + gptq": ("balance, rotation", True),
    "wush + gptq": ("wush", True),
}


class _Quantized(nn.Module):
    """``y = Q(T x) What^T``, `What` decoded."""

    def __init__(self, weight_NK: Tensor, transform: Transform) -> None:
        super().__init__()
        self.weight_NK, self.transform = weight_NK, transform

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(fake_quantize(apply_transform(self.transform, x)), self.weight_NK)


class _Stop(Exception):
    """Raised by the hook once a group's input is captured, so that nothing after it runs."""


def load(folder: Path, device: str = "cpu") -> Any:
    """Return the stored model in float32, ready to score."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval().to(device)


def _run_block(model: Any, block: nn.Module, hidden_CLK: Tensor) -> Tensor:
    positions_1L = torch.arange(hidden_CLK.shape[1], device=hidden_CLK.device)[None]
    rotary = model.model.rotary_emb(hidden_CLK, positions_1L)
    output: Tensor | tuple[Tensor, ...] = block(
        hidden_CLK, attention_mask=None, position_ids=positions_1L, position_embeddings=rotary, use_cache=False
    )
    return output if isinstance(output, Tensor) else output[0]


def _capture(model: Any, block: nn.Module, module: nn.Module, hidden_CLK: Tensor) -> Tensor:
    """Return the input of `module` within `block`, (T, K)."""
    seen: list[Tensor] = []

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].flatten(0, -2))
        raise _Stop

    handle = module.register_forward_pre_hook(hook)
    try:
        _run_block(model, block, hidden_CLK)
    except _Stop:
        pass
    finally:
        handle.remove()
    return seen[0]


@torch.no_grad()
def quantize(model: Any, tokens_CL: Tensor, rule: Rule, use_gptq: bool) -> None:
    """Quantize in place, group by group in execution order, every input measured on the model as quantized so far."""
    hidden_CLK = model.model.embed_tokens(tokens_CL)
    for block in model.model.layers:
        for names in GROUPS:
            linears = [block.get_submodule(name) for name in names]
            weights = [linear.weight.data for linear in linears]
            x_TK = _capture(model, block, linears[0], hidden_CLK)
            transform = rule(x_TK, weights)
            x_TK = apply_transform(transform, x_TK).double()
            moment_KK = x_TK.T @ x_TK / len(x_TK)
            for name, weight_NK in zip(names, weights, strict=True):
                moved_NK = transform_weight(transform, weight_NK)
                encoded = gptq(moved_NK, moment_KK, scale_rule="even") if use_gptq else encode(moved_NK)
                parent, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(parent), leaf, _Quantized(decode(encoded), transform))
        hidden_CLK = _run_block(model, block, hidden_CLK)


@torch.no_grad()
def chunk_losses(model: Any, tokens_CL: Tensor, batch: int = 16) -> list[float]:
    """Return each chunk's mean loss in nats per token."""
    losses: list[float] = []
    for part_CL in torch.split(tokens_CL, batch):
        logits = model(input_ids=part_CL, use_cache=False).logits[:, :-1]
        nll = nn.functional.cross_entropy(logits.transpose(1, 2), part_CL[:, 1:], reduction="none")
        losses += nll.double().mean(1).tolist()
    return losses


def measure(
    folder: Path, split: str, num_chunks: int, draws: int, programs: list[str], device: str = "cpu"
) -> dict[str, Any]:
    """Score the programs; returns ``losses`` by program (list per chunk), ``full``, and ``gptq_draws`` (means)."""
    splits = {name: tensor.long().to(device) for name, tensor in load_file(folder / "splits.safetensors").items()}
    tokens_CL = splits[split][:num_chunks]

    def run(program: str, draw: int) -> list[float]:
        rule, use_gptq = PROGRAMS[program]
        order = torch.randperm(len(splits["calibration"]), generator=torch.Generator().manual_seed(draw))
        model = load(folder, device)
        quantize(
            model, splits["calibration"][order[:CALIBRATION_CHUNKS].sort().values.to(device)], RULES[rule], use_gptq
        )
        return chunk_losses(model, tokens_CL)

    full = chunk_losses(load(folder, device), tokens_CL)
    losses = {program: run(program, 0) for program in programs}
    repeats = [statistics.fmean(losses["gptq"])] + [statistics.fmean(run("gptq", draw)) for draw in range(1, draws)]
    return {"full": full, "losses": losses, "gptq_draws": repeats}


def report(name: str, figures: dict[str, Any]) -> str:
    """Format the table of the model card."""
    full, losses, repeats = figures["full"], figures["losses"], figures["gptq_draws"]
    difference = [a - b for a, b in zip(losses["gptq"], losses["balance"], strict=True)]
    s_chunk, s_draw = statistics.stdev(difference), statistics.stdev(repeats) if len(repeats) > 1 else 0.0
    floor = math.sqrt(s_chunk**2 / len(difference) + 2 * s_draw**2)
    base, damage = statistics.fmean(full), statistics.fmean(losses["rtn"]) - statistics.fmean(full)
    lines = [
        f"{name}: full precision {base:.4f} nats per token over {len(full)} chunks; "
        f"RTN costs {damage:.4f} = {damage / floor:.0f} floors",
        f"noise floor {floor:.5f} (s_chunk {s_chunk:.4f}, s_draw {s_draw:.5f} over {len(repeats)} draws)",
        "",
        "| program | nats per token | damage | won back from RTN, floors | recovery |",
        "| --- | --- | --- | --- | --- |",
    ]
    for program, values in losses.items():
        mean = statistics.fmean(values)
        won = damage - (mean - base)
        lines.append(f"| {program} | {mean:.4f} | {mean - base:.4f} | {won / floor:.1f} | {100 * won / damage:.0f}% |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--split", default="search", choices=["search", "confirm"])
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), help="must hold rtn, balance and gptq")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    for folder in args.folders:
        print(
            report(folder.name, measure(folder, args.split, args.chunks, args.draws, args.programs, args.device)),
            flush=True,
        )


if __name__ == "__main__":
    main()
