"""A folder of artifacts, each under its own hash."""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError

from evaluators.artifact import Artifact, ArtifactError
from evaluators.errors import HostError

ARTIFACT_HASH = re.compile(r"[0-9a-f]{64}")


class ArtifactStore:
    """Keeps artifacts as ``<hash>.safetensors``, so that a file that was changed is noticed.

    folder: where they are; made when the first one is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, artifact_hash: str) -> Path:
        """Return where an artifact is, or would be.

        Raises:
            ArtifactError: the text is no hash, so it could name a file elsewhere.
        """
        if not ARTIFACT_HASH.fullmatch(artifact_hash):
            raise ArtifactError(f"{artifact_hash!r} is no artifact hash (64 hex digits)")
        return self.folder / f"{artifact_hash}.safetensors"

    def has(self, artifact_hash: str) -> bool:
        """Whether there is a file for an artifact (its content is checked when it is loaded); False for what is no hash."""
        return bool(ARTIFACT_HASH.fullmatch(artifact_hash)) and self.path(artifact_hash).is_file()

    def keep(self, artifact: Artifact) -> Artifact:
        """Save an artifact, and return it as loaded back from the disk.

        Raises:
            HostError: it cannot be written, or what is read back is something else.
        """
        path = self.path(artifact.hash)
        try:
            artifact.save(path)
            loaded = Artifact.load(path)
        except (OSError, SafetensorError, ArtifactError) as error:
            # A full disk is a SafetensorError while tensors are written.
            raise HostError(f"cannot keep an artifact in {self.folder}: {error}; check the disk") from error
        if loaded.hash != artifact.hash:
            raise HostError(f"{path} does not hold what was written to it; check the disk")
        return loaded

    def load(self, artifact_hash: str) -> Artifact:
        """Return a kept artifact.

        Raises:
            ArtifactError: no such artifact, or its file no longer has that hash.
        """
        artifact = Artifact.load(self.path(artifact_hash))
        if artifact.hash != artifact_hash:
            raise ArtifactError(f"the file of artifact {artifact_hash} was changed: it now has hash {artifact.hash}")
        return artifact
