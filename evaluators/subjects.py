"""Subjects: the language models that programs quantize, loaded in full precision and ready to be measured.

A reference is the name of a model that ships with the package, a folder in Hugging Face format, a ``.gguf`` file, or a
hub id. Whatever it is, the subject is a plain transformers model in float32, in eval mode, without gradients and
without a key-value cache; a cache would make a decoder layer called twice attend to its own earlier keys.

Attention runs through torch's scaled dot product: on the CPU it gave the same bits for a sequence of 1024 whatever the
batch was made of, like the eager implementation, in about 60% of its time (135M parameters).
"""

from __future__ import annotations

import copy
import hashlib
import importlib.resources
import importlib.util
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from evaluators.architecture import DecoderMap, map_decoder
from evaluators.errors import SubjectError
from evaluators.subject_files import download, load_folder, load_gguf

SHIPPED = ("nano-llama", "nano-qwen3")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What a config.json says about the software that wrote it, and not about the model.
VOLATILE_CONFIG_KEYS = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A loaded model and what must be stated beside every number measured on it.

    Nothing may change `model`; whoever wants to fold or install works on `pristine()`.

    Attributes:
        model: transformers causal LM, float32, eval, no gradients, no cache.
        map: its layers, groups and sites.
        name: for people; the shipped name, folder name, file stem or hub id.
        hash: sha256 (hex) over the config and every weight as float32, independent of file layout and stored dtype.
        dtype_on_disk: dtype of most stored weights, ``bfloat16`` say, or ``gguf``.
        folder: the model folder, if there is one.
    """

    model: nn.Module
    map: DecoderMap
    name: str
    hash: str
    dtype_on_disk: str
    folder: Path | None = None
    load_tokenizer: Callable[[], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.map.embedding.weight.device

    @property
    def num_parameters(self) -> int:
        """Number of distinct parameters; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def bos_token_id(self) -> int | None:
        """Id that starts a text, from the config, else from the tokenizer; None if neither knows one."""
        config: Any = self.model.config
        if config.bos_token_id is not None:
            return int(config.bos_token_id)
        found = getattr(self.tokenizer, "bos_token_id", None)
        return None if found is None else int(found)

    @property
    def context_length(self) -> int | None:
        """Longest sequence that the model was made for, in tokens; None if its config does not say."""
        config: Any = self.model.config
        length = getattr(config, "max_position_embeddings", None)
        return None if length is None else int(length)

    @property
    def config_summary(self) -> dict[str, str | int]:
        """What the model is, in printable form and in printing order."""
        return {
            "architecture": type(self.model).__name__,
            "blocks": self.map.num_blocks,
            "hidden": self.map.hidden_size,
            "heads": f"{self.map.num_heads} ({self.map.num_kv_heads} key-value) x {self.map.head_dim}",
            "vocabulary": self.map.vocab_size,
            "tied_head": "yes" if self.map.is_tied else "no",
            "parameters": self.num_parameters,
            "stored_as": self.dtype_on_disk,
        }

    @cached_property
    def tokenizer(self) -> Any | None:
        """The tokenizer, loaded when first asked for; None if the subject has none.

        Raises:
            SubjectError: there are tokenizer files, but they cannot be read.
        """
        return None if self.load_tokenizer is None else self.load_tokenizer()

    def pristine(self) -> Subject:
        """Return an independent copy whose weights may be changed; the hash still names the weights it started from."""
        return self._with_model(copy.deepcopy(self.model), self.hash, self.name)

    def truncated(self, num_blocks: int) -> Subject:
        """Return an independent subject made of the first blocks, with the same embedding, final norm and head.

        It is meant for trying out whether a program runs; its losses mean nothing.

        Raises:
            SubjectError: fewer than one block, or more than the subject has.
        """
        if not 1 <= num_blocks <= self.map.num_blocks:
            raise SubjectError(
                f"cannot keep {num_blocks} of {self.map.num_blocks} blocks; give at least 1 and no more than all"
            )
        # deepcopy skips what its memo already holds: the blocks left out are never copied.
        body = cast(nn.Module, self.model.model)
        kept = nn.ModuleList(copy.deepcopy(block) for block in self.map.block_modules[:num_blocks])
        model = copy.deepcopy(self.model, {id(body.layers): kept})
        config: Any = model.config
        for block in kept:
            _share_config(block, config)
        config.num_hidden_layers = num_blocks
        if getattr(config, "layer_types", None):
            config.layer_types = list(config.layer_types)[:num_blocks]
        digest = hashlib.sha256(f"{self.hash}:first {num_blocks} blocks".encode()).hexdigest()
        return self._with_model(model, digest, f"{self.name}[:{num_blocks}]")

    def _with_model(self, model: nn.Module, digest: str, name: str) -> Subject:
        return Subject(
            model=model,
            map=map_decoder(model),
            name=name,
            hash=digest,
            dtype_on_disk=self.dtype_on_disk,
            folder=self.folder,
            load_tokenizer=None if self.load_tokenizer is None else lambda: self.tokenizer,
        )


def load_subject(reference: str | Path, *, device: str | torch.device = "cpu") -> Subject:
    """Load a subject.

    Args:
        reference: a name in `SHIPPED`; a folder with config.json and safetensors; a ``.gguf`` file; or a hub id
            ``organization/name``, which is looked up only if no such path exists.
        device: where the weights go.

    Raises:
        SubjectError: the reference leads nowhere, a file is missing, truncated or damaged, the architecture cannot be
            mapped, a layer's input is not a multiple of 32, or a weight is not finite.
    """
    text = str(reference)
    path = Path(text).expanduser()
    if text in SHIPPED:
        loaded, name = load_folder(shipped_folder(text)), text
    elif path.suffix == ".gguf":
        loaded, name = load_gguf(path), path.stem
    elif os.path.isdir(path):
        loaded, name = load_folder(path), path.resolve().name
    elif os.path.exists(path):
        raise SubjectError(
            f"{text} is a file; give the folder that holds config.json and model.safetensors, or a .gguf file"
        )
    elif isinstance(reference, str) and HUB_ID.fullmatch(text):
        loaded, name = load_folder(download(text)), text
    else:
        raise SubjectError(
            f"no subject {text!r}; give one of {', '.join(SHIPPED)}, an existing model folder, a .gguf file, or a hub "
            "id organization/name"
        )
    subject = subject_from_model(
        loaded.model,
        name=name,
        config=loaded.config,
        dtype_on_disk=loaded.dtype_on_disk,
        folder=loaded.folder,
        load_tokenizer=loaded.load_tokenizer,
    )
    try:
        subject.model.to(device)
    except (RuntimeError, AssertionError) as error:  # no such device, no driver, no room on it
        reason = " ".join(str(error).split())[:200].rstrip(".;: ")
        raise SubjectError(f'device {str(device)!r} cannot hold the subject ({reason}); set device = "cpu"') from error
    return subject


def subject_from_model(
    model: nn.Module,
    *,
    name: str,
    config: dict[str, Any] | None = None,
    dtype_on_disk: str = "float32",
    folder: Path | None = None,
    load_tokenizer: Callable[[], Any] | None = None,
) -> Subject:
    """Make a subject of a transformers model in memory; the model is changed to float32 and eval in place.

    Args:
        model: a causal LM of a known architecture.
        name: name of the subject.
        config: what is hashed as its configuration; the model's own by default.
        dtype_on_disk: see `Subject`.
        folder: see `Subject`.
        load_tokenizer: see `Subject`.

    Raises:
        SubjectError: the model cannot be mapped, or a weight is not finite.
    """
    model.to(torch.float32).eval().requires_grad_(False)
    model_config: Any = model.config
    model_config.use_cache = False
    decoder_map = map_decoder(model)
    decoder_map.check_finite()
    return Subject(
        model=model,
        map=decoder_map,
        name=name,
        hash=_hash_model(model, model_config.to_dict() if config is None else config),
        dtype_on_disk=dtype_on_disk,
        folder=folder,
        load_tokenizer=load_tokenizer,
    )


def shipped_folder(name: str) -> Path:
    """Return the folder of a model that ships with the package.

    Raises:
        SubjectError: unknown name, or the files are not installed.
    """
    if name not in SHIPPED:
        raise SubjectError(f"no shipped subject {name!r}; known: {', '.join(SHIPPED)}")
    folder = Path(str(importlib.resources.files("evaluators") / "nano" / name))
    if not (folder / "config.json").is_file():
        raise SubjectError(f"the shipped subject {name!r} is not installed ({folder} lacks it); reinstall quantforge")
    return folder


def _hash_model(model: nn.Module, config: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    kept = {key: value for key, value in config.items() if key not in VOLATILE_CONFIG_KEYS}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"\n{name} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _share_config(block: nn.Module, config: Any) -> None:
    """Let every module of a copied block point to the copied model's config, as in the original."""
    for module in block.modules():
        if hasattr(module, "config"):
            module.config = config
