"""From an artifact and a pristine subject to a model that can be scored, checking everything on the way.

The contract's class and effective bits are computed here, from the artifact alone: what the session held in memory
while the program ran does not enter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evaluators.architecture import DecoderMap
from evaluators.artifact import Artifact, ArtifactError
from evaluators.contract import Contract, ContractMeasure, check_install, measure_contract
from evaluators.errors import ContractError
from evaluators.folds import fold
from evaluators.quantized_linear import QuantizedLinear
from evaluators.subjects import Subject
from evaluators.two_streams import TwoStreamModel

REPLAY_TOLERANCE = 1e-4
"""Largest relative difference between a stored changed parameter and the same parameter after replaying the folds."""


def check_artifact(artifact: Artifact, subject: Subject, contract: Contract) -> ContractMeasure:
    """Check an artifact against its subject and contract, and return its class and effective bits.

    Raises:
        ArtifactError: made for another subject or contract, or with layers or groups that the subject does not have.
        ContractError: a rule is broken.
    """
    if artifact.subject_hash != subject.hash:
        raise ArtifactError(
            f"the artifact was made for subject {artifact.subject_name!r} with hash {artifact.subject_hash}; "
            f"this is {subject.name!r} with hash {subject.hash}"
        )
    if artifact.contract != contract.name:
        raise ArtifactError(f"the artifact was made under contract {artifact.contract!r}, not {contract.name!r}")
    known = {group.name: {layer.name for layer in group.layers} for group in subject.map.groups}
    for name, installs in artifact.groups.items():
        if not set(installs) <= known.get(name, set()):
            raise ArtifactError(f"the artifact's group {name!r} with {sorted(installs)} is none of {subject.name!r}")
    for name, install in artifact.installs.items():
        check_install(
            contract,
            subject.map.layer(name),
            install.weight,
            transform=install.transform,
            activation=install.activation,
            low_rank=install.low_rank,
        )
    return measure_contract(contract, subject.map.groups, artifact.installs)


def apply_artifact(artifact: Artifact, subject: Subject, contract: Contract) -> TwoStreamModel:
    """Return a fresh model with the artifact's folds made and its layers installed.

    Every weight of a quantized layer is decoded from the artifact's codes. High-precision parameters take the stored
    values, after these were compared with a replay of the folds.

    Raises:
        ArtifactError: as `check_artifact`, or changed parameters that do not follow from the folds.
        ContractError: a rule is broken.
    """
    check_artifact(artifact, subject, contract)
    decoder_map = subject.pristine().map
    for name, matrix in artifact.folds:
        try:
            fold(decoder_map, decoder_map.site(name), matrix)
        except (KeyError, ContractError) as error:
            raise ArtifactError(f"fold {name!r} of the artifact cannot be made: {error}") from error
    _set_changed(artifact, subject.map, decoder_map)
    model = TwoStreamModel(decoder_map)
    for name, install in artifact.installs.items():
        linear = decoder_map.linear(name)
        model.install(name, QuantizedLinear(install, linear.bias, device=linear.weight.device))
    return model


def changed_parameters(pristine: DecoderMap, folded: DecoderMap) -> dict[str, Tensor]:
    """Return float32 copies of the high-precision parameters that differ from the pristine model's, by name."""
    before = pristine.high_precision_parameters()
    changed: dict[str, Tensor] = {}
    for name, parameter in folded.high_precision_parameters().items():
        old = before.get(name)
        if old is None or not torch.equal(old, parameter):
            changed[name] = parameter.detach().to("cpu", torch.float32).clone()
    return changed


def _set_changed(artifact: Artifact, pristine: DecoderMap, folded: DecoderMap) -> None:
    expected = changed_parameters(pristine, folded)
    # A fold may leave values untouched up to rounding, which another machine may round the other way.
    parameters = folded.high_precision_parameters()
    for name in expected.keys() | artifact.changed.keys():
        if name not in parameters:
            raise ArtifactError(f"the artifact changes {name!r}, which is no high-precision parameter of the subject")
        current = parameters[name]
        stored = artifact.changed.get(name, pristine.high_precision_parameters().get(name))
        if stored is None or stored.shape != current.shape or not bool(stored.isfinite().all()):
            raise ArtifactError(f"the artifact's {name!r} is missing, not finite, or not {tuple(current.shape)}")
        difference = (stored.to(current) - current).double().norm()
        if float(difference) > REPLAY_TOLERANCE * float(current.double().norm()):
            raise ArtifactError(f"the artifact's {name!r} does not follow from its folds")
        with torch.no_grad():
            current.copy_(stored.to(current))
