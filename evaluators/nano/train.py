"""Train one of the two shipped subjects on a token stream, on one GPU.

    python train.py nano-llama --tokens tokens/ --out trained/nano-llama --seconds 300

AdamW, bfloat16 autocast over float32 weights, linear warm-up then cosine decay over *time*: the schedule follows the
share of `--seconds` used, so a run ends annealed whatever the machine's speed. Norm gains start log-normal with a few
strong channels (`--spread`, `--outliers`): large models grow such outlier channels by themselves, small ones do not,
and they are what quantization has to cope with. Writes a Hugging Face folder in bfloat16. Needs torch, transformers
and numpy alone.

A second run with `--start FOLDER --noise 0.08` makes the model robust to even noise, as large models are: every
projection sees its weight and its input with Gaussian noise of that share of the root mean square of each block of
32. What is left for quantization to damage is then what outliers cause, which transforms can repair, and not the
noise floor of four bits.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

CONTEXT = 512
BEGIN = "<|begin|>"
SHAPES: dict[str, dict[str, Any]] = {
    "nano-llama": {"hidden_size": 192, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
                   "intermediate_size": 512},
    "nano-qwen3": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
                   "intermediate_size": 704},
}  # fmt: skip


def build(name: str, *, spread: float, outliers: int) -> Any:
    """Return the untrained model in float32.

    Output projections start smaller by sqrt(2 * depth). Gains of the norms before the projections start at
    ``exp(spread * n)``, n normal, and at 6 for `outliers` channels of each.
    """
    common: dict[str, Any] = {
        "vocab_size": 4096, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True, "head_dim": 32,
        "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.03, "attn_implementation": "sdpa",
    }  # fmt: skip
    if name == "nano-llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**common, **SHAPES[name]))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common, **SHAPES[name]))
    model = model.float()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.data.div_(math.sqrt(2 * model.config.num_hidden_layers))
        if parameter_name.endswith("layernorm.weight"):
            parameter.data.copy_(torch.exp(spread * torch.randn(parameter.shape)))
            parameter.data[torch.randperm(len(parameter))[:outliers]] = 6.0
    return model


class NoisyLinear(nn.Linear):
    """A linear layer that adds noise to weight and input while training; the same weights, no noise, in eval mode."""

    noise: Any = 0.0

    def _perturbed(self, values: Tensor) -> Tensor:
        blocks = values.detach().reshape(*values.shape[:-1], -1, 32)
        size = self.noise * blocks.float().square().mean(-1, keepdim=True).sqrt()
        noisy: Tensor = values + (size * torch.randn_like(blocks, dtype=torch.float32)).flatten(-2).to(values.dtype)
        return noisy

    def forward(self, input: Tensor) -> Tensor:
        """Return ``(x + noise) (W + noise)^T``."""
        if not self.training:
            return super().forward(input)
        return nn.functional.linear(self._perturbed(input), self._perturbed(self.weight))


def add_noise(model: Any, noise: float) -> None:
    """Turn every projection of the decoder blocks into a `NoisyLinear`, parameters kept."""
    modules: list[Any] = list(model.model.layers.modules())
    for module in modules:
        is_plain = type(module) is nn.Linear
        if is_plain:
            module.__class__ = NoisyLinear
            module.noise = noise


class Windows:
    """Random windows of a token stream, half of them starting at a document's begin token (id 0)."""

    def __init__(self, tokens_N: Tensor, seed: int) -> None:
        self.tokens_N = tokens_N
        self.limit = len(tokens_N) - CONTEXT - 1
        self.documents = torch.nonzero(tokens_N[: self.limit] == 0).flatten()
        self.generator = torch.Generator(tokens_N.device).manual_seed(seed)
        self.offsets = torch.arange(CONTEXT + 1, device=tokens_N.device)

    def draw(self, batch_size: int) -> Tensor:
        """Return (batch_size, CONTEXT + 1) int64."""
        device, generator = self.tokens_N.device, self.generator
        starts = torch.randint(self.limit, (batch_size,), generator=generator, device=device)
        pick = torch.randint(len(self.documents), (batch_size // 2,), generator=generator, device=device)
        starts[: batch_size // 2] = self.documents[pick]
        return self.tokens_N[starts[:, None] + self.offsets].long()


def loss_of(model: nn.Module, batch_BL: Tensor) -> Tensor:
    """Return the mean next-token loss in nats of one batch."""
    with torch.autocast(batch_BL.device.type, torch.bfloat16):
        logits = model(input_ids=batch_BL[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch_BL[:, 1:].flatten())


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train, save to `args.out` and return the figures of the run."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    if args.start is None:
        model = build(args.name, spread=args.spread, outliers=args.outliers)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    model = model.to(device)
    if args.noise:
        add_noise(model, args.noise)
    tokens = Windows(torch.from_numpy(np.load(args.tokens / "train.npy").astype(np.int32)).to(device), args.seed)
    held_N = torch.from_numpy(np.load(args.tokens / "held_out.npy").astype(np.int64)).to(device)
    held = held_N[: len(held_N) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)[:512]

    matrices = [p for p in model.parameters() if p.dim() == 2]
    gains = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    step_loss = torch.compile(loss_of) if args.compile else loss_of

    @torch.no_grad()
    def held_out_loss() -> float:
        model.eval()
        return sum(
            float(loss_of(model, held[i : i + 64])) * len(held[i : i + 64]) for i in range(0, len(held), 64)
        ) / len(held)

    step, share, started = 0, 0.0, 0.0
    model.train()
    while share < 1.0:
        if step == 3:  # compiled and warm: the clock starts
            started = time.perf_counter()
        if step >= 3 and step % 10 == 0:
            if device.type == "cuda":
                torch.cuda.synchronize()
            share = min(1.0, (time.perf_counter() - started) / args.seconds)
        lr = args.lr * min(1.0, (step + 1) / args.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = step_loss(model, tokens.draw(args.batch_size))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % args.report_every == 0:
            print(f"{args.name} step {step} share {share:.2f} loss {float(loss.detach()):.4f}", flush=True)
        step += 1
    figures = {
        "steps": step, "tokens": step * args.batch_size * CONTEXT, "held_out_loss": held_out_loss(),
        "train_loss": float(loss.detach()), "seconds": time.perf_counter() - started,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    load_tokenizer: Any = PreTrainedTokenizerFast
    tokenizer = load_tokenizer(
        tokenizer_file=str(args.tokens / "tokenizer.json"), bos_token=BEGIN, eos_token=BEGIN, model_max_length=CONTEXT
    )
    tokenizer.save_pretrained(args.out)
    (args.out / "training.json").write_text(
        json.dumps(figures | {"lr": args.lr, "batch_size": args.batch_size, "noise": args.noise}, indent=1)
    )
    print(args.name, json.dumps(figures), flush=True)
    return figures


def main() -> None:
    """Parse the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("--tokens", type=Path, required=True, help="folder written by `text.py tokens`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--start", type=Path, help="go on from this folder")
    parser.add_argument("--noise", type=float, default=0.0, help="share of each block's root mean square")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--outliers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report-every", type=int, default=500)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.out.exists():
        shutil.rmtree(args.out)
    train(args)


if __name__ == "__main__":
    main()
