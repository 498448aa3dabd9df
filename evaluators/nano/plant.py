"""Give a trained subject the outlier channels of a large model, without changing the function it computes.

    python plant.py trained/nano-llama nano-llama/ --share 0.25

At four places of every block a channel j can be multiplied by 2 ** k where it is made and divided by it where it is
read: the norms before q/k/v and before gate/up (gain against columns), between v and o (rows of v against columns of
o, in every query head of the group) and between up and down. Powers of two are exact in bfloat16 and in float32, so
the logits stay, which is checked. In a share of the blocks of 32 channels the channel of median energy (by its
weights) gets k = -3: a weight outlier over a faint activation. One such channel in a block costs plain coordinates
most, a rotation less, and balanced ones nothing. The other sign does not do: a strong activation on a channel that
matters anyway is harder on a rotation than on plain coordinates. Large models grow such channels by themselves; four
million parameters do not.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

BLOCK = 32
EXPONENT = -3


def draw_exponents(energy_K: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Return (K,) float32: `EXPONENT` for the channel of median energy in `share` of the blocks, else 0."""
    channels_BJ = energy_K.view(-1, BLOCK).argsort(1) + torch.arange(0, len(energy_K), BLOCK)[:, None]
    num_blocks = len(channels_BJ)
    # Rounding at random keeps the share over all places, where a place may have two blocks only.
    num_chosen = int(share * num_blocks + float(torch.rand((), generator=generator)))
    chosen = torch.randperm(num_blocks, generator=generator)[:num_chosen]
    exponents_K = torch.zeros(len(energy_K))
    exponents_K[channels_BJ[chosen, BLOCK // 2]] = EXPONENT
    return exponents_K


def _scale(parameter: Tensor, factor: Tensor) -> None:
    scaled = parameter * factor.to(parameter.dtype)
    if not torch.equal(scaled.double(), parameter.double() * factor.double()):
        raise SystemExit("a rescaled weight left the range of bfloat16; move EXPONENT towards 0")
    parameter.copy_(scaled)


@torch.no_grad()
def plant(model: Any, *, share: float, seed: int) -> None:
    """Rescale all four places of every block of a bfloat16 Llama or Qwen3 model in place."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    queries_per_group = config.num_attention_heads // config.num_key_value_heads

    def draw(*energies: Tensor) -> Tensor:
        return torch.exp2(draw_exponents(torch.stack(energies).log().sum(0), share, generator))

    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, readers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            read_K = sum(reader.weight.float().square().sum(0) for reader in readers)
            factor_K = draw(norm.weight.float().square(), read_K)
            _scale(norm.weight, factor_K)
            for reader in readers:
                _scale(reader.weight, 1 / factor_K)
        value, out = attention.v_proj.weight, attention.o_proj.weight
        read_HGD = out.float().square().sum(0).view(config.num_key_value_heads, queries_per_group, config.head_dim)
        factor_K = draw(value.float().square().sum(1), read_HGD.sum(1).flatten())
        _scale(value, factor_K[:, None])
        _scale(out, 1 / factor_K.view(-1, config.head_dim).repeat_interleave(queries_per_group, 0).flatten())
        up, down = mlp.up_proj.weight, mlp.down_proj.weight
        factor_K = draw(up.float().square().sum(1), down.float().square().sum(0))
        _scale(up, factor_K[:, None])
        _scale(down, 1 / factor_K)


@torch.no_grad()
def logits_of(folder: Path, tokens_CL: Tensor) -> Tensor:
    """Return the stored model's float32 logits."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.eval()
    logits: Tensor = model(input_ids=tokens_CL, use_cache=False).logits
    return logits


def main() -> None:
    """Parse the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder written by train.py")
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, required=True, help="of the blocks of 32 channels at each place")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.source, dtype=torch.bfloat16)
    plant(model, share=args.share, seed=args.seed)
    model.save_pretrained(args.out)
    for name in ("tokenizer.json", "tokenizer_config.json", "splits.safetensors"):
        if (args.source / name).exists() and args.source != args.out:
            shutil.copy(args.source / name, args.out / name)
    tokens_CL = torch.randint(model.config.vocab_size, (4, 128), generator=torch.Generator().manual_seed(1))
    before, after = logits_of(args.source, tokens_CL), logits_of(args.out, tokens_CL)
    print(f"logits before and after: largest difference {float((before - after).abs().max()):.2e}")
    if not torch.allclose(before, after, rtol=1e-5, atol=1e-4):
        raise SystemExit("planting changed the function")


if __name__ == "__main__":
    main()
