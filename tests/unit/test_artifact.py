"""Artifacts survive their file unchanged, and a damaged or forged file is refused with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from evaluators.apply import apply_artifact, check_artifact
from evaluators.artifact import METADATA_KEY, Artifact, ArtifactError
from evaluators.contract import MXFP4_W4A4
from evaluators.errors import ContractError
from evaluators.installs import install_digest
from evaluators.scorer import score
from evaluators.session_server import SessionServer
from evaluators.subjects import Subject
from forge_kernels import (
    ActivationRule,
    BlockMatrix,
    Diagonal,
    Hadamard,
    LowRank,
    Permutation,
    encode,
    transform_weight,
)
from tests.tiny_models import KINDS, Kind, make_tiny_subject, make_tiny_tokens

TOKENS = make_tiny_tokens(3, 32)


def make_server(subject: Subject, *, folds: bool = True) -> SessionServer:
    """Serve a walk that uses every kind of step, a branch, several rules and several folds."""
    server = SessionServer(subject, calibration_CL=TOKENS, gate_CL=TOKENS, contract=MXFP4_W4A4)
    generator = torch.Generator().manual_seed(0)
    if folds:
        for site in server.sites:
            if site.kind == "residual_rotation":
                server.fold(site.name, torch.linalg.qr(torch.randn(site.shape, generator=generator)).Q)
            elif site.kind == "up_down_permutation":
                server.fold(site.name, torch.randperm(site.shape[0], generator=generator))
            elif site.kind != "value_output":
                server.fold(site.name, (0.2 * torch.randn(site.shape, generator=generator)).exp())
    for group in server.groups:
        size = group.num_inputs
        steps = {
            "qkv": (Diagonal(scale_K=torch.rand(size, generator=generator).add(0.5).bfloat16()), Hadamard(size=32)),
            "o": (BlockMatrix(matrix_Bij=torch.linalg.qr(torch.randn(1, 32, 32, generator=generator)).Q.bfloat16()),),
            "gate_up": (Permutation(index_K=torch.randperm(size, generator=generator)),),
            "down": (),
        }[group.role]
        for layer in group.layers:
            weight_NK = server.reference_weight(layer.name)
            branch = None
            if layer.role == "down":
                branch = LowRank(
                    a_RK=torch.randn(1, size, generator=generator).bfloat16() / 64,
                    b_NR=torch.randn(layer.num_outputs, 1, generator=generator).bfloat16() / 64,
                )
            server.install(
                layer.name,
                encode(transform_weight(steps, weight_NK)),
                transform=steps,
                activation=ActivationRule(scale_rule="rceil" if group.role == "o" else "even"),
                low_rank=branch,
            )
    return server


@pytest.fixture(scope="module")
def subject() -> Subject:
    return make_tiny_subject("llama", tied=True)


@pytest.fixture(scope="module")
def server(subject: Subject) -> SessionServer:
    return make_server(subject)


@pytest.fixture(scope="module")
def artifact(server: SessionServer) -> Artifact:
    return server.finish()


def test_saving_and_loading_changes_nothing(artifact: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "a.safetensors"
    artifact.save(path)
    artifact.save(path)
    loaded = Artifact.load(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert loaded.hash == artifact.hash
    assert list(loaded.installs) == list(artifact.installs)
    for name, install in artifact.installs.items():
        assert install_digest(loaded.installs[name]) == install_digest(install)
        assert torch.equal(loaded.installs[name].weight.codes_NK, install.weight.codes_NK)
    assert {site for site, _ in artifact.folds} == {site for site, _ in loaded.folds}
    assert loaded.changed.keys() == artifact.changed.keys()
    assert "lm_head.weight" in loaded.changed


def test_codes_take_half_a_byte_on_disk(artifact: Artifact) -> None:
    stored = artifact.stored_tensors()
    install = artifact.installs["blocks.0.q"]
    assert stored["layers.blocks.0.q.packed"].numel() * 2 == install.weight.codes_NK.numel()
    assert stored["groups.blocks.0.gate_up.0"].dtype is torch.int16
    assert not any(name.startswith("groups.blocks.0.down") for name in stored)


@pytest.mark.parametrize("kind", KINDS)
def test_the_applied_model_is_what_the_session_measured(kind: Kind, tmp_path: Path) -> None:
    subject = make_tiny_subject(kind)
    server = make_server(subject)
    loss = server.gate_loss()
    server.finish().save(tmp_path / "a")
    with apply_artifact(Artifact.load(tmp_path / "a"), subject, MXFP4_W4A4).fully_quantized() as model:
        losses = score(model, TOKENS)
    assert sum(losses) / len(losses) == pytest.approx(loss, abs=1e-6)
    assert make_tiny_subject(kind).hash == subject.hash


def test_an_artifact_belongs_to_one_subject_and_one_contract(artifact: Artifact, subject: Subject) -> None:
    assert check_artifact(artifact, subject, MXFP4_W4A4).contract_class == "corrected"
    with pytest.raises(ArtifactError, match="made for subject 'tiny-llama'"):
        check_artifact(artifact, make_tiny_subject("llama", seed=1), MXFP4_W4A4)
    with pytest.raises(ArtifactError, match="contract 'mxfp4-w4a4/1'"):
        check_artifact(artifact, subject, replace(MXFP4_W4A4, name="other/1"))
    renamed = replace(artifact, groups={"blocks.9.qkv": artifact.groups["blocks.0.qkv"]})
    with pytest.raises(ArtifactError, match=r"blocks\.9\.qkv"):
        check_artifact(renamed, subject, MXFP4_W4A4)
    partial = replace(artifact, groups={k: v for k, v in artifact.groups.items() if k != "blocks.1.o"})
    with pytest.raises(ContractError, match=r"blocks\.1\.o"):
        check_artifact(partial, subject, MXFP4_W4A4)


def test_applying_checks_first(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match="made for subject 'tiny-llama'"):
        apply_artifact(artifact, make_tiny_subject("llama", seed=1), MXFP4_W4A4)


def test_stored_parameters_win_over_replayed_ones(artifact: Artifact, subject: Subject) -> None:
    stored = {name: tensor * (1 + 2e-6) for name, tensor in artifact.changed.items()}
    model = apply_artifact(replace(artifact, changed=stored), subject, MXFP4_W4A4)
    parameters = model.map.high_precision_parameters()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in stored.items())


def test_changed_parameters_must_follow_from_the_folds(artifact: Artifact, subject: Subject) -> None:
    name = "model.norm.weight"
    for changed, message in [
        ({**artifact.changed, name: artifact.changed[name] * 1.01}, "does not follow"),
        ({**artifact.changed, name: artifact.changed[name][:-1]}, "not"),
        ({**artifact.changed, name: torch.full_like(artifact.changed[name], torch.nan)}, "not finite"),
        ({**artifact.changed, "model.extra": torch.ones(3)}, "no high-precision parameter"),
        ({k: v for k, v in artifact.changed.items() if k != name}, "does not follow"),
    ]:
        with pytest.raises(ArtifactError, match=message):
            apply_artifact(replace(artifact, changed=changed), subject, MXFP4_W4A4)
    with pytest.raises(ArtifactError, match="cannot be made"):
        apply_artifact(replace(artifact, folds=(("blocks.7.value_output", torch.ones(1)),)), subject, MXFP4_W4A4)


Forge = Callable[[dict[str, Tensor], dict[str, Any]], Any]


def drop(name: str) -> Forge:
    return lambda tensors, _: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Forge:
    return lambda tensors, _: tensors.update({name: tensor})


def describe(*path: str, value: Any) -> Forge:
    def change(_: dict[str, Tensor], description: dict[str, Any]) -> None:
        place: Any = description
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return change


Q, OUTPUT, DOWN = "layers.blocks.0.q", "layers.blocks.0.o", "layers.blocks.0.down"
Q_TEXT = ("groups", "blocks.0.qkv", "layers", "blocks.0.q")
FORGERIES: dict[str, tuple[Forge, str]] = {
    "missing codes": (drop(f"{Q}.packed"), "lacks the tensor"),
    "missing step": (drop("groups.blocks.0.qkv.0"), "lacks the tensor"),
    "surplus tensor": (put("layers.extra", torch.ones(1)), "does not name"),
    "signed codes": (put(f"{Q}.packed", torch.zeros(128, 32, dtype=torch.int8)), "expected torch.uint8"),
    "flat codes": (put(f"{Q}.packed", torch.zeros(128 * 32, dtype=torch.uint8)), r"expected \(N, K / 2\)"),
    "step dtype": (put("groups.blocks.0.qkv.0", torch.ones(64).double()), "float64"),
    "wide indices": (put("groups.blocks.0.gate_up.0", torch.arange(64)), "int64"),
    "rank": (describe("groups", "blocks.0.down", "layers", "blocks.0.down", "rank", value=2), "not rank 2"),
    "negative rank": (describe(*Q_TEXT, "rank", value=-1), "malformed"),
    "unknown rule": (describe(*Q_TEXT, "scale_rule", value="oracle"), "malformed"),
    "extra key": (describe(*Q_TEXT, "note", value="hello"), "malformed"),
    "rank as text": (describe(*Q_TEXT, "rank", value="0"), "malformed"),
    "format": (describe("format", value="quantforge-artifact/2"), "malformed"),
    "step without size": (describe("groups", "blocks.0.down", "steps", value=[{"kind": "hadamard"}]), "has a size"),
    "step of code": (describe("groups", "blocks.0.down", "steps", value=[{"kind": "lambda"}]), "malformed"),
    "layer twice": (
        describe(
            "groups",
            "blocks.0.o",
            "layers",
            value={"blocks.0.q": {"scale_rule": "even", "code_rule": "nearest", "rank": 0}},
        ),
        "lacks the tensor",
    ),
    "no layers": (describe("groups", "blocks.0.o", "layers", value={}), "malformed"),
}


def forge(artifact: Artifact, path: Path, change: Forge) -> None:
    artifact.save(path)
    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()[METADATA_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    change(tensors, description)
    save_file(tensors, path, metadata={METADATA_KEY: json.dumps(description)})


@pytest.mark.parametrize("case", FORGERIES)
def test_forged_files_are_refused(case: str, artifact: Artifact, tmp_path: Path) -> None:
    change, message = FORGERIES[case]
    forge(artifact, tmp_path / "a", change)
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(f"{Q}.packed", torch.full((128, 32), 0x88, dtype=torch.uint8)), "minus zero"),
        (put(f"{Q}.scales", torch.full((128, 2), 255, dtype=torch.uint8)), "255"),
        (put(f"{Q}.packed", torch.zeros(96, 32, dtype=torch.uint8)), "give uint8"),
        (put("groups.blocks.0.qkv.0", torch.zeros(64)), "condition number"),
        (put("groups.blocks.0.gate_up.0", torch.zeros(64, dtype=torch.int16)), "not a permutation"),
        (put(f"{DOWN}.a", torch.full((1, 96), torch.nan).bfloat16()), "not finite"),
        (describe("groups", "blocks.0.down", "steps", value=[{"kind": "hadamard", "size": 33}]), "power of two"),
    ],
)
def test_forged_values_are_refused_by_the_contract(
    change: Forge, message: str, artifact: Artifact, subject: Subject, tmp_path: Path
) -> None:
    forge(artifact, tmp_path / "a", change)
    with pytest.raises(ContractError, match=message):
        check_artifact(Artifact.load(tmp_path / "a"), subject, MXFP4_W4A4)


def test_damaged_files_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(ArtifactError, match="no artifact at"):
        Artifact.load(path)
    artifact.save(path)
    whole = path.read_bytes()
    for length in (0, 7, 500, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match="whole safetensors file"):
            Artifact.load(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ArtifactError, match="no 'quantforge' metadata"):
        Artifact.load(path)
    for text in ("[]", "{", '{"format": 1, "format": 2}', "[" * 100_000):
        save_file({"x": torch.ones(1)}, path, metadata={METADATA_KEY: text})
        with pytest.raises(ArtifactError, match="malformed"):
            Artifact.load(path)


def test_a_flipped_bit_changes_the_hash(artifact: Artifact, tmp_path: Path) -> None:
    def flip(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors[f"{OUTPUT}.scales"][3, 1] ^= 1

    forge(artifact, tmp_path / "a", flip)
    assert Artifact.load(tmp_path / "a").hash != artifact.hash


def test_a_failed_save_leaves_nothing_behind(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        artifact.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_without_folds_nothing_is_stored_beside_the_layers(subject: Subject) -> None:
    artifact = make_server(subject, folds=False).finish()
    assert (artifact.folds, artifact.changed) == ((), {})
