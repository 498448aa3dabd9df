"""Model files of every kind, read into a transformers model: folders, GGUF files, the hub.

Files are checked before transformers sees them, and what transformers had to invent or ignore is an error, not a
warning. Everything that goes wrong leaves here as a `SubjectError` of one sentence.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import struct
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from evaluators.architecture import FAMILIES
from evaluators.errors import SubjectError
from evaluators.safetensors_check import check_whole, weight_files

ATTENTION = "sdpa"
MODEL_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")  # in config.json, of the classes in `FAMILIES`
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# A config.json that contradicts itself or its weights ends transformers in any of these.
LOAD_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model as read from its files.

    model: transformers causal LM, float32. config: what config.json holds. dtype_on_disk: of most stored weights, or
    ``gguf``. folder: the model folder, if there is one. load_tokenizer: reads the tokenizer; None if there is none.
    """

    model: nn.Module
    config: dict[str, Any]
    dtype_on_disk: str
    folder: Path | None = None
    load_tokenizer: Callable[[], Any] | None = None


def load_folder(folder: Path) -> LoadedModel:
    """Load a folder in Hugging Face format; see `evaluators.subjects.load_subject` for what is refused."""
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
    return LoadedModel(
        model=model,
        config=config,
        dtype_on_disk=max(set(dtypes), key=dtypes.count),
        folder=folder,
        load_tokenizer=(lambda: _read_tokenizer(folder, {})) if has_tokenizer else None,
    )


def load_gguf(path: Path) -> LoadedModel:
    """Load a GGUF file, its weights dequantized to float32."""
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
    return LoadedModel(
        model=plain,
        config=plain.config.to_dict(),
        dtype_on_disk="gguf",
        load_tokenizer=lambda: _read_tokenizer(path.parent, {"gguf_file": path.name}),
    )


def download(hub_id: str) -> Path:
    """Return the folder of a model of the hub, fetched if it is not in the local cache.

    Raises:
        SubjectError: the hub cannot be reached, or has no such model.
    """
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
        known = ", ".join(MODEL_TYPES)
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
