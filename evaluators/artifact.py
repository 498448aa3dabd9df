"""The artifact: a quantized subject as one safetensors file, and the only thing that is ever scored.

Tensors: ``layers.<layer>.packed`` (N, K / 2) uint8 and ``.scales`` (N, K / 32) uint8, ``.a`` and ``.b`` bfloat16 for a
branch; ``groups.<group>.<i>`` for transform step i; ``changed.<parameter>`` for high-precision parameters that folds
changed; ``folds.<i>`` the matrix of fold i, from which the folded full-precision weights can be made again (for error
maps; nothing at run time reads it). The description is JSON under the metadata key ``quantforge``. The hash covers
description and tensors, not the file's layout.

`Artifact.load` trusts nothing in a file. Ranges of codes, scales and transforms are checked by `check_artifact` against
the subject and the contract, with the same code that checks installs.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from evaluators.errors import UserError
from evaluators.installs import NARROW_INDEX_LIMIT, Install, step_kind, step_tensor
from forge_kernels.ops.pack import pack, unpack
from forge_kernels.rules import ActivationRule, CodeRule, Encoded, LowRank, ScaleRule
from forge_kernels.transforms import BlockMatrix, Diagonal, Hadamard, Permutation, Step, Transform

FORMAT: Literal["quantforge-artifact/1"] = "quantforge-artifact/1"
METADATA_KEY = "quantforge"
StepKind = Literal["diagonal", "permutation", "hadamard", "block_matrix"]


class ArtifactError(UserError, ValueError):
    """The file is no artifact, is damaged, or does not belong to the subject."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _StepText(_Strict):
    kind: StepKind
    size: int | None = None


class _LayerText(_Strict):
    scale_rule: ScaleRule
    code_rule: CodeRule
    rank: int = Field(ge=0)


class _GroupText(_Strict):
    steps: list[_StepText]
    layers: dict[str, _LayerText] = Field(min_length=1)


class _Description(_Strict):
    format: Literal["quantforge-artifact/1"]
    contract: str
    subject_name: str
    subject_hash: str
    groups: dict[str, _GroupText]
    folds: list[str]
    changed: list[str]


@dataclass(frozen=True, kw_only=True)
class Artifact:
    """A quantized subject as data.

    Attributes:
        contract: name of the contract it was made under.
        subject_name, subject_hash: the full-precision model it applies to.
        groups: by group name, its layers' installs by layer name. All installs of a group share one transform.
        folds: site name and matrix of each fold, in order.
        changed: by state-dict name, float32 values of high-precision parameters that the folds changed.
    """

    contract: str
    subject_name: str
    subject_hash: str
    groups: Mapping[str, Mapping[str, Install]]
    folds: tuple[tuple[str, Tensor], ...] = ()
    changed: Mapping[str, Tensor]

    @property
    def installs(self) -> dict[str, Install]:
        """Installs by layer name."""
        return {name: install for layers in self.groups.values() for name, install in layers.items()}

    @cached_property
    def hash(self) -> str:
        """Hex sha256 of the description and of every stored tensor's name, dtype, shape and bytes."""
        digest = hashlib.sha256(self._description_text().encode())
        for name, tensor in sorted(self.stored_tensors().items()):
            digest.update(f"|{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def stored_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the file, contiguous and on the CPU."""
        tensors: dict[str, Tensor] = {}
        for group, layers in self.groups.items():
            transform = next(iter(layers.values())).transform
            for index, step in enumerate(transform):
                tensor = step_tensor(step)
                if tensor is not None:
                    tensors[f"groups.{group}.{index}"] = _narrow(tensor) if isinstance(step, Permutation) else tensor
            for layer, install in layers.items():
                tensors[f"layers.{layer}.packed"] = pack(install.weight.codes_NK)
                tensors[f"layers.{layer}.scales"] = install.weight.scales_NB
                if install.low_rank is not None:
                    tensors[f"layers.{layer}.a"] = install.low_rank.a_RK
                    tensors[f"layers.{layer}.b"] = install.low_rank.b_NR
        tensors.update({f"folds.{index}": matrix for index, (_, matrix) in enumerate(self.folds)})
        tensors.update({f"changed.{name}": tensor for name, tensor in self.changed.items()})
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def save(self, path: Path) -> None:
        """Write the file whole or not at all: a temporary file beside it, flushed to disk, then renamed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.close(handle)
        try:
            save_file(self.stored_tensors(), temporary, metadata={METADATA_KEY: self._description_text()})
            with open(temporary, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @classmethod
    def load(cls, path: Path) -> Artifact:
        """Read a file written by `save`.

        Raises:
            ArtifactError: missing or damaged file, tensors that do not match the description in name, dtype or shape.
        """
        description, tensors = _read_file(path)
        take = _TensorTaker(path, tensors)
        groups = {group: _read_group(take, group, text) for group, text in description.groups.items()}
        names = [layer for text in description.groups.values() for layer in text.layers]
        if len(names) != len(set(names)):
            raise ArtifactError(f"{path} lists a layer in two groups; make the artifact again")
        folds = tuple((site, take(f"folds.{index}")) for index, site in enumerate(description.folds))
        changed = {name: take(f"changed.{name}", torch.float32) for name in description.changed}
        take.require_all_taken()
        return cls(
            contract=description.contract,
            subject_name=description.subject_name,
            subject_hash=description.subject_hash,
            groups=groups,
            folds=folds,
            changed=changed,
        )

    def _description_text(self) -> str:
        groups = {
            group: {
                "steps": _step_texts(next(iter(layers.values())).transform),
                "layers": {
                    layer: {
                        "scale_rule": install.activation.scale_rule,
                        "code_rule": install.activation.code_rule,
                        "rank": install.rank,
                    }
                    for layer, install in layers.items()
                },
            }
            for group, layers in self.groups.items()
        }
        description = {
            "format": FORMAT,
            "contract": self.contract,
            "subject_name": self.subject_name,
            "subject_hash": self.subject_hash,
            "groups": groups,
            "folds": [site for site, _ in self.folds],
            "changed": sorted(self.changed),
        }
        return json.dumps(description, separators=(",", ":"))


class _TensorTaker:
    """Hands out each tensor of a file once, with its dtype and rank checked, and knows which were never asked for."""

    def __init__(self, path: Path, tensors: dict[str, Tensor]) -> None:
        self._path = path
        self._tensors = tensors

    def __call__(self, name: str, *dtypes: torch.dtype) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ArtifactError(f"{self._path} lacks the tensor {name!r} that its description names; make it again")
        if dtypes and tensor.dtype not in dtypes:
            raise ArtifactError(
                f"{self._path}: tensor {name!r} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}"
            )
        return tensor

    def require_all_taken(self) -> None:
        if self._tensors:
            raise ArtifactError(
                f"{self._path} holds tensors that its description does not name: {sorted(self._tensors)[:3]}"
            )


def _read_file(path: Path) -> tuple[_Description, dict[str, Tensor]]:
    if not path.is_file():
        raise ArtifactError(f"no artifact at {path}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path} is not a whole safetensors file ({error}); make the artifact again") from error
    text = metadata.get(METADATA_KEY)
    if text is None:
        raise ArtifactError(f"{path} has no {METADATA_KEY!r} metadata, so it is no artifact")
    try:
        return _Description.model_validate(json.loads(text, object_pairs_hook=_without_duplicates)), tensors
    except (ValidationError, ValueError, RecursionError) as error:
        raise ArtifactError(f"the description in {path} is malformed: {error}") from error


def _read_group(take: _TensorTaker, group: str, text: _GroupText) -> dict[str, Install]:
    transform = tuple(_read_step(take, f"groups.{group}.{index}", step) for index, step in enumerate(text.steps))
    installs: dict[str, Install] = {}
    for layer, layer_text in text.layers.items():
        packed = take(f"layers.{layer}.packed", torch.uint8)
        scales_NB = take(f"layers.{layer}.scales", torch.uint8)
        if packed.ndim != 2:
            raise ArtifactError(f"layer {layer!r}: packed codes are {tuple(packed.shape)}; expected (N, K / 2)")
        branch = None
        if layer_text.rank:
            a_RK = take(f"layers.{layer}.a", torch.bfloat16)
            b_NR = take(f"layers.{layer}.b", torch.bfloat16)
            if a_RK.ndim != 2 or a_RK.shape[0] != layer_text.rank:
                raise ArtifactError(
                    f"layer {layer!r}: branch has shape {tuple(a_RK.shape)}, not rank {layer_text.rank}"
                )
            branch = LowRank(a_RK=a_RK, b_NR=b_NR)
        installs[layer] = Install(
            weight=Encoded(codes_NK=unpack(packed), scales_NB=scales_NB),
            transform=transform,
            activation=ActivationRule(scale_rule=layer_text.scale_rule, code_rule=layer_text.code_rule),
            low_rank=branch,
        )
    return installs


def _read_step(take: _TensorTaker, name: str, text: _StepText) -> Step:
    if (text.kind == "hadamard") != (text.size is not None):
        raise ArtifactError(f"{name}: only a Hadamard step has a size, and it must have one")
    if text.size is not None:
        return Hadamard(size=text.size)
    if text.kind == "diagonal":
        return Diagonal(scale_K=take(name, torch.float32, torch.bfloat16))
    if text.kind == "permutation":
        return Permutation(index_K=take(name, torch.int16, torch.int32).to(torch.int64))
    return BlockMatrix(matrix_Bij=take(name, torch.float32, torch.bfloat16))


def _step_texts(transform: Transform) -> list[dict[str, Any]]:
    return [
        {"kind": step_kind(step), "size": step.size} if isinstance(step, Hadamard) else {"kind": step_kind(step)}
        for step in transform
    ]


def _narrow(index_K: Tensor) -> Tensor:
    return index_K.to(torch.int16 if index_K.numel() <= NARROW_INDEX_LIMIT else torch.int32)


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    items = list(pairs)
    table = dict(items)
    if len(table) != len(items):
        raise ValueError("a key appears twice")
    return table
