"""From the text of a program to a score: worker, session, artifact, file, pristine subject, loss.

A program is text here: it is handed to a worker and never imported, compiled or run in this process. What it installed
becomes an artifact that is saved under its hash, loaded back and checked; class, effective bits, evidence and score are
computed from the loaded one. How a program failed is part of the result; exceptions are for the user's and the host's
failures.
"""

from __future__ import annotations

import importlib.metadata
import math
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import transformers
from torch import Tensor

from evaluators.apply import apply_artifact, check_artifact
from evaluators.artifact import Artifact, ArtifactError
from evaluators.artifact_store import ArtifactStore
from evaluators.contract import Contract
from evaluators.corpora import Corpus
from evaluators.error_map import error_map
from evaluators.errors import HostError, ProgramError, SubjectError
from evaluators.evidence import collect_evidence
from evaluators.leak_checks import find_leak
from evaluators.limits import Limits
from evaluators.results import SPLITS, EvaluationResult, Evidence, LayerError, Outcome, Split
from evaluators.sandbox import Isolation
from evaluators.scorer import score
from evaluators.session_server import SessionServer, draw_chunks
from evaluators.streams import BATCH_TOKENS
from evaluators.subjects import Subject
from evaluators.worker_host import WorkerHost
from forge_kernels.ops.routes import Route

DISTRIBUTION = "quantforge"
SMOKE_BLOCKS = 2
SMOKE_CHUNKS = 2
SMOKE_TOKENS = 128
SMOKE_WALL_S = 60.0


class Evaluator:
    """Evaluates programs on one subject, one corpus and one contract; a context manager, used by one thread at a time.

    Args:
        subject: the full-precision model.
        corpus: its five splits.
        contract: the rules.
        isolation: how programs are kept away from this process.
        limits: of every run of a program.
        artifacts_dir: where artifacts are kept, as ``<hash>.safetensors``.
        calibration_chunks: chunks of the calibration split that one draw takes (all of them if there are fewer).
        threads: CPU threads of torch in a worker.
    """

    def __init__(
        self,
        subject: Subject,
        corpus: Corpus,
        contract: Contract,
        isolation: Isolation,
        limits: Limits,
        artifacts_dir: Path,
        *,
        calibration_chunks: int = 32,
        threads: int = 1,
    ) -> None:
        self.subject = subject
        self.corpus = corpus
        self.contract = contract
        self.isolation = isolation
        self.limits = limits
        self.artifacts_dir = artifacts_dir
        self.calibration_chunks = calibration_chunks
        smoke_limits = replace(limits, wall_s=min(limits.wall_s, SMOKE_WALL_S))
        self._host = WorkerHost(isolation, limits, threads=threads)
        self._smoke_host = WorkerHost(isolation, smoke_limits, threads=threads)
        self._smoke_subject: Subject | None = None
        self._full_precision: dict[Split, tuple[float, ...]] = {}
        self._references: dict[tuple[str, Split], tuple[float, ...]] = {}

    def __enter__(self) -> Self:
        self._host.prestart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def abort(self) -> None:
        """End the program that runs now, from any thread: its evaluation is over soon and means nothing."""
        self._host.abort()
        self._smoke_host.abort()

    def close(self) -> None:
        """End the workers that wait for the next program."""
        self._host.close()
        self._smoke_host.close()

    def evaluate(
        self, source: str, *, split: Split, draw: int = 0, seed: int = 0, reference_artifact: str | None = None
    ) -> EvaluationResult:
        """Run a program in a worker of its own and score what it made.

        Args:
            source: the program's text.
            split: where to score; every read of ``sealed`` is counted by the corpus.
            draw: which choice of calibration chunks the program measures on.
            seed: seed of the program's generators.
            reference_artifact: hash of an earlier artifact, to be scored on the same split in the same way.

        Raises:
            ArtifactError: there is no such reference artifact, or it belongs to another subject or contract.
            HostError, SandboxUnavailableError: the machine failed; says nothing about the program.
        """
        start = time.monotonic()
        reference = None if reference_artifact is None else self.load_artifact(reference_artifact)
        if reference is not None:
            check_artifact(reference, self.subject, self.contract)
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
        calibration_CL = draw_chunks(self.corpus.splits["calibration"], self.calibration_chunks, draw)
        result, artifact = self._run(
            source, self.subject, calibration_CL, self.corpus.splits["gate"], seed, self._host, self.artifacts_dir
        )
        result = replace(result, split=split, draw=draw)
        if artifact is not None:
            tokens_CL = self._tokens(split, f"evaluation of artifact {artifact.hash}")
            chunk_nll, routes = self._score_artifact(artifact, tokens_CL)
            result = _with_routes(result, routes)
            if all(map(math.isfinite, chunk_nll)):
                paired = () if reference is None else self._score_reference(reference, split, tokens_CL)
                result = replace(
                    result,
                    chunk_nll=chunk_nll,
                    reference_chunk_nll=paired,
                    tokens_per_chunk=int(tokens_CL.shape[1]) - 1,
                )
            else:
                result = replace(result, outcome=Outcome.NON_FINITE, reason=_non_finite_reason(chunk_nll))
        return replace(result, wall_s=time.monotonic() - start)

    def trace(self, source: str, *, draw: int = 0, seed: int = 0) -> EvaluationResult:
        """Run a program on the whole subject as `evaluate` does, without scoring or keeping what it made.

        The outcome is ``SCORED`` if the program finishes and keeps the contract. The evidence is what probes compare.

        Raises:
            HostError, SandboxUnavailableError: the machine failed; says nothing about the program.
        """
        start = time.monotonic()
        calibration_CL = draw_chunks(self.corpus.splits["calibration"], self.calibration_chunks, draw)
        gate_CL = self.corpus.splits["gate"]
        with self._scratch("trace") as folder:
            result, _ = self._run(source, self.subject, calibration_CL, gate_CL, seed, self._host, Path(folder))
        return replace(result, draw=draw, artifact_hash=None, wall_s=time.monotonic() - start)

    def smoke(self, source: str, *, seed: int = 0) -> EvaluationResult:
        """Try a program on the first blocks of the subject and a little text; nothing is scored or kept.

        The outcome is ``SCORED`` if the program finishes, keeps the contract and leaves a model with finite logits. The
        evidence is complete, so that the effect of an edit on the layers can be compared.

        Raises:
            HostError, SandboxUnavailableError: the machine failed; says nothing about the program.
        """
        start = time.monotonic()
        if self._smoke_subject is None:
            self._smoke_subject = self.subject.truncated(min(SMOKE_BLOCKS, self.subject.map.num_blocks))
        subject = self._smoke_subject
        calibration_CL = self.corpus.splits["calibration"][:SMOKE_CHUNKS, :SMOKE_TOKENS]
        gate_CL = self.corpus.splits["gate"][:1, :SMOKE_TOKENS]
        with self._scratch("smoke") as folder:
            result, artifact = self._run(source, subject, calibration_CL, gate_CL, seed, self._smoke_host, Path(folder))
        if artifact is not None:
            with apply_artifact(artifact, subject, self.contract).fully_quantized() as model:
                losses = score(model, gate_CL.to(subject.device))
            if not all(map(math.isfinite, losses)):
                result = replace(result, outcome=Outcome.NON_FINITE, reason=_non_finite_reason(losses))
        return replace(result, artifact_hash=None, wall_s=time.monotonic() - start)

    def error_map(self, artifact_hash: str) -> tuple[LayerError, ...]:
        """Return the layer errors of an artifact on the gate split, in execution order.

        Raises:
            ArtifactError: no such artifact, or one of another subject or contract.
        """
        artifact = self.load_artifact(artifact_hash)
        return tuple(error_map(self.subject, artifact, self.corpus.splits["gate"], self.contract))

    def full_precision_nll(self, split: Split) -> tuple[float, ...]:
        """Return the full-precision subject's loss per chunk, nats per token; every split is scored once."""
        if split not in self._full_precision:
            self._full_precision[split] = self._score_subject(self._tokens(split, "full-precision subject"))
        return self._full_precision[split]

    def score_artifact(self, artifact_hash: str, split: Split) -> tuple[float, ...]:
        """Return a kept artifact's loss per chunk on a split, nats per token.

        Raises:
            ArtifactError: no such artifact, or one of another subject or contract.
        """
        tokens_CL = self._tokens(split, f"artifact {artifact_hash}")
        return self._score_artifact(self.load_artifact(artifact_hash), tokens_CL)[0]

    def has_artifact(self, artifact_hash: str) -> bool:
        """Whether an artifact is kept (its content is checked when it is loaded)."""
        return ArtifactStore(self.artifacts_dir).has(artifact_hash)

    def load_artifact(self, artifact_hash: str) -> Artifact:
        """Return a kept artifact.

        Raises:
            ArtifactError: no such artifact, or its file no longer has that hash.
        """
        return ArtifactStore(self.artifacts_dir).load(artifact_hash)

    def _run(
        self,
        source: str,
        subject: Subject,
        calibration_CL: Tensor,
        gate_CL: Tensor,
        seed: int,
        host: WorkerHost,
        folder: Path,
    ) -> tuple[EvaluationResult, Artifact | None]:
        """Run a program and return all but its score, with the artifact as loaded back from `folder` if it made one."""
        server = SessionServer(
            subject, calibration_CL=calibration_CL, gate_CL=gate_CL, contract=self.contract, seed=seed
        )
        report = host.run(source, server, seed=seed, count_lines=host is self._smoke_host)
        result = EvaluationResult(
            outcome=Outcome.SCORED if report.outcome is None else report.outcome,
            reason=report.reason,
            split="search",
            draw=0,
            seed=seed,
            contract=self.contract.name,
            evidence=Evidence(events=tuple(server.events)),
            metered_tokens=server.meter.tokens,
            device=str(subject.device),
            versions=runtime_versions(),
            sandbox=self.isolation.name,
            program_log=server.program_log + report.log_tail,
        )
        if report.outcome is not None:
            return result, None
        try:
            made = server.finish()
        except ProgramError as error:
            return replace(result, outcome=error.outcome, reason=str(error)), None
        artifact = ArtifactStore(folder).keep(made)
        try:
            measure = check_artifact(artifact, subject, self.contract)
        except ArtifactError as error:
            raise HostError(f"an artifact just written does not fit its subject: {error}") from error
        except ProgramError as error:
            return replace(result, outcome=error.outcome, reason=str(error)), None
        return (
            replace(
                result,
                contract_class=measure.contract_class,
                effective_bits=measure.effective_bits,
                artifact_hash=artifact.hash,
                evidence=replace(
                    collect_evidence(server.events, artifact, server.reference_weight), line_hits=report.line_hits
                ),
            ),
            artifact,
        )

    def _scratch(self, purpose: str) -> tempfile.TemporaryDirectory[str]:
        """Return a folder for what is thrown away; it lies with the artifacts, where a killed run's is found and removed."""
        self.artifacts_dir.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{purpose}-", suffix=".tmp", dir=self.artifacts_dir)

    def _tokens(self, split: Split, reader: str) -> Tensor:
        if split == "sealed":
            return self.corpus.sealed(reader).to(self.subject.device)
        return self.corpus.splits[split].to(self.subject.device)

    def _score_reference(self, artifact: Artifact, split: Split, tokens_CL: Tensor) -> tuple[float, ...]:
        """Score an artifact once per split: scores are deterministic, and a parent is asked for many times."""
        key = (artifact.hash, split)
        if key not in self._references:
            self._references[key] = self._score_artifact(artifact, tokens_CL)[0]
        return self._references[key]

    def _score_subject(self, tokens_CL: Tensor) -> tuple[float, ...]:
        """Score the subject itself after checks for leaks.

        Raises:
            SubjectError: it is not causal, or its losses depend on the batch.
        """
        leak = find_leak(self.subject.model, tokens_CL, check_batches=True)
        if leak is not None:
            raise SubjectError(f"{self.subject.name!r} cannot be scored: {leak}")
        return score(self.subject.model, tokens_CL, _batch_size(tokens_CL))

    def _score_artifact(self, artifact: Artifact, tokens_CL: Tensor) -> tuple[tuple[float, ...], dict[str, Route]]:
        """Score an artifact on a pristine subject after checks for leaks; return the losses and each layer's route.

        Raises:
            HostError: the subject is causal, but the quantized model is not: a fault of ours.
        """
        streams = apply_artifact(artifact, self.subject, self.contract)
        with streams.fully_quantized() as model:
            leak = find_leak(model, tokens_CL, check_batches=False)
            if leak is not None:
                raise HostError(f"artifact {artifact.hash} cannot be scored: {leak}")
            return score(model, tokens_CL, _batch_size(tokens_CL)), streams.routes


def _batch_size(tokens_CL: Tensor) -> int:
    # On a CPU small batches are as fast as large ones, and a chunk alone is scored the same in any company, bit for bit.
    return max(1, BATCH_TOKENS // int(tokens_CL.shape[1])) if tokens_CL.is_cuda else 1


def _with_routes(result: EvaluationResult, routes: dict[str, Route]) -> EvaluationResult:
    """Return the result with each layer's route in its evidence, and all routes that occur in `route`, the commonest first."""
    layers = {name: layer | {"route": routes[name]} for name, layer in result.evidence.layers.items()}
    counts = Counter(routes.values()).most_common()
    return replace(
        result,
        route=", ".join(f"{route} ({count} layers)" for route, count in counts),
        evidence=replace(result.evidence, layers=layers),
    )


def runtime_versions() -> dict[str, str]:
    """Return the versions of what a score depends on."""
    try:
        own = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        DISTRIBUTION: own,
    }


def _non_finite_reason(losses: Sequence[float]) -> str:
    count = sum(not math.isfinite(loss) for loss in losses)
    return f"the quantized model returns logits that are not finite on {count} of {len(losses)} chunks"
