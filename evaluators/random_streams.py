"""Random generators keyed by what they are for, so that adding one draw never shifts another."""

from __future__ import annotations

import hashlib

import torch


def keyed_generator(seed: int, *key: str) -> torch.Generator:
    """Return a CPU generator whose state depends on the seed and the key alone.

    The generator's seed is the first 63 bits of ``sha256(seed, key)``, parts separated by a zero byte.
    """
    text = "\0".join([str(int(seed)), *key])
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator
