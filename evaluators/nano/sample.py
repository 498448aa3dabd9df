"""Sample the text splits of a shipped subject from itself: temperature 1, full distribution, from the begin token.

    python sample.py nano-llama/            writes nano-llama/splits.safetensors

Text drawn from the model's own distribution has two uses. It is nobody's text, so it can be shipped; and the model's
mean loss on it is the model's entropy, the floor below which no quantized model can fall in expectation, so that the
damage of quantization is never mixed with a lack of fit. The seed comes from the operating system and is neither
printed nor stored: nobody can draw the sealed split again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

SPLITS = {"calibration": 192, "gate": 24, "search": 128, "confirm": 128, "sealed": 192}
LENGTH = 256


@torch.no_grad()
def sample(folder: Path, num_sequences: int, length: int = LENGTH, device: str = "cpu") -> Tensor:
    """Return (num_sequences, length) int32 token ids, drawn in float32, each row starting with the begin token."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model = model.eval().to(device)
    generator = torch.Generator(device).manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    tokens = torch.full((num_sequences, 1), model.config.bos_token_id, device=device)
    last, cache = tokens, None
    for _ in range(length - 1):
        output = model(input_ids=last, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        probabilities = torch.softmax(output.logits[:, -1].double(), -1)
        last = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, last], 1)
    return tokens.int().cpu()


def main() -> None:
    """Parse the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    tokens = sample(args.folder, sum(SPLITS.values()), device=args.device)
    if len(torch.unique(tokens, dim=0)) != len(tokens):
        raise SystemExit("two sampled sequences are equal: sample again")
    parts = torch.split(tokens, list(SPLITS.values()))
    save_file(
        {name: part.contiguous() for name, part in zip(SPLITS, parts, strict=True)},
        args.folder / "splits.safetensors",
        metadata={"recipe": "temperature 1, full distribution, from the begin token, float32", "tokens": str(LENGTH)},
    )
    print(", ".join(f"{name} {tuple(part.shape)}" for name, part in zip(SPLITS, parts, strict=True)))


if __name__ == "__main__":
    main()
