"""Subjects: the language models that programs quantize, loaded in full precision and ready to be measured.

A reference is the name of a model that ships with the package, a folder in Hugging Face format, a ``.gguf`` file, or a
hub id. Whatever it is, the subject is a plain transformers model in float32, in eval mode, without gradients and
without a key-value cache; a cache would make a decoder layer called twice attend to its own earlier keys.

Attention runs through torch's scaled dot product: on the CPU it gave the same bits for a sequence of 1024 whatever the
batch was made of, like the eager implementation, in about 60% of its time (135M parameters).

Files are checked before transformers sees them, and what transformers had to invent or ignore is an error, not a
warning.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.resources
import importlib.util
import io
import json
import logging
import re
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from evaluators.architecture import FAMILIES, DecoderMap, map_decoder
from evaluators.errors import SubjectError
from evaluators.safetensors_check import check_whole, weight_files

SHIPPED = ("nano-llama", "nano-qwen3")
ATTENTION = "sdpa"
MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""`model_type` of a config.json to the class that is loaded for it."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# A config.json that contradicts itself or its weights ends transformers in any of these.
LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ArithmeticError)
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
        subject = _load_folder(shipped_folder(text), text)
    elif path.suffix == ".gguf":
        subject = _load_gguf(path)
    elif path.is_dir():
        subject = _load_folder(path, path.resolve().name)
    elif path.exists():
        raise SubjectError(
            f"{text} is a file; give the folder that holds config.json and model.safetensors, or a .gguf file"
        )
    elif isinstance(reference, str) and HUB_ID.fullmatch(text):
        subject = _load_folder(_download(text), text)
    else:
        raise SubjectError(
            f"no subject {text!r}; give one of {', '.join(SHIPPED)}, an existing model folder, a .gguf file, or a hub "
            "id organization/name"
        )
    subject.model.to(device)
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


def _load_folder(folder: Path, name: str) -> Subject:
    config = _read_config(folder)
    dtypes = [check_whole(path) for path in weight_files(folder)]
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with _quiet_transformers():
        try:
            model, report = auto.from_pretrained(
                str(folder),
                dtype=torch.float32,
                attn_implementation=ATTENTION,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (*LOAD_ERRORS, StrictDataclassError, SafetensorError) as error:
            raise SubjectError(
                f"{folder} cannot be loaded: {_one_line(error)}; check config.json against the weights"
            ) from error
    _check_report(folder, report)
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    return subject_from_model(
        model,
        name=name,
        config=config,
        dtype_on_disk=max(set(dtypes), key=dtypes.count),
        folder=folder,
        load_tokenizer=(lambda: _read_tokenizer(folder, {})) if has_tokenizer else None,
    )


def _load_gguf(path: Path) -> Subject:
    if not path.is_file():
        raise SubjectError(f"no file {path}; give an existing .gguf file")
    with path.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise SubjectError(f"{path} does not begin with the GGUF mark (found {magic!r}); copy or download it again")
    absent = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if absent:
        raise SubjectError(f"reading {path.name} needs {' and '.join(absent)}: pip install {' '.join(absent)}")
    from transformers import AutoModelForCausalLM

    with _quiet_transformers():
        try:
            # Its dequantizer draws a bar of its own, which no setting of transformers turns off.
            with contextlib.redirect_stderr(io.StringIO()):
                loaded = AutoModelForCausalLM.from_pretrained(
                    str(path.parent), gguf_file=path.name, dtype=torch.float32
                )
        except (*LOAD_ERRORS, IndexError, ImportError, struct.error) as error:
            raise SubjectError(
                f"{path} cannot be read as a GGUF model: {_one_line(error)}; download it again"
            ) from error
        model_class: Any = type(loaded)
        if model_class.__name__ not in FAMILIES:
            raise SubjectError(
                f"architecture {model_class.__name__!r} cannot be mapped; known: {', '.join(sorted(FAMILIES))}"
            )
        # The loaded model calls itself quantized, and refuses to be converted: its weights move into a plain one.
        config = loaded.config.to_dict()
        config.pop("quantization_config", None)
        plain = model_class._from_config(type(loaded.config)(**config), attn_implementation=ATTENTION)
        plain.load_state_dict(loaded.state_dict())
        plain.tie_weights()
    return subject_from_model(
        plain,
        name=path.stem,
        dtype_on_disk="gguf",
        load_tokenizer=lambda: _read_tokenizer(path.parent, {"gguf_file": path.name}),
    )


def _download(hub_id: str) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, allow_patterns=["*.json", "model*.safetensors", "tokenizer.model"]
            )
        )
    # Not reachable, offline mode, no such model, gated: all end in one of these.
    except (OSError, ValueError, RuntimeError) as error:
        raise SubjectError(
            f"no folder {hub_id!r} here, and the hub does not give a model of that id ({_one_line(error)}); give the "
            "path of a downloaded model folder, or check the id and the network"
        ) from error


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise SubjectError(f"{folder} has no config.json; give a model folder as `save_pretrained` writes it")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SubjectError(f"{path} is not JSON ({error}); copy or download it again") from error
    if not isinstance(config, dict):
        raise SubjectError(f"{path} holds no JSON object; copy or download it again")
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        hint = "; of Gemma 3 only the text models are read" if model_type == "gemma3" else ""
        known = ", ".join(sorted(MODEL_TYPES))
        raise SubjectError(f"{path} says model_type {model_type!r}, which cannot be mapped; known: {known}{hint}")
    if config.get("quantization_config") is not None:
        raise SubjectError(f"{path} describes a model that is already quantized; give the full-precision model")
    return config


def _check_report(folder: Path, report: dict[str, Any]) -> None:
    for key, what in (
        ("missing_keys", "lacks weights that the architecture needs"),
        ("unexpected_keys", "holds weights that the architecture does not use"),
        ("mismatched_keys", "holds weights of another shape than config.json says"),
    ):
        keys = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in report.get(key) or ())
        if keys:
            raise SubjectError(
                f"{folder} {what}: {len(keys)}, first {keys[:3]}; give the weights that belong to its config.json"
            )


def _read_tokenizer(folder: Path, arguments: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    with _quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, **arguments)
        except Exception as error:  # tokenizers raises bare Exception on a damaged tokenizer.json
            raise SubjectError(
                f"the tokenizer in {folder} cannot be read: {_one_line(error)}; download it again"
            ) from error


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


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:200].rstrip(".;: ")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from printing while it loads; what it would warn about is checked and raised by us."""
    import transformers

    transformers_logging: Any = transformers.utils.logging
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
