"""What a recipe says about a corpus, validated before any file is opened.

Three kinds: token sequences that ship with the subject, a text file, a data set that the `datasets` library can load.
The five splits never overlap: sequences sampled for one split are in no other, and chunk ranges of a text are checked
here.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

SplitName = Literal["calibration", "gate", "search", "confirm", "sealed"]
SPLIT_NAMES: tuple[SplitName, ...] = get_args(SplitName)

ChunkRange = Annotated[tuple[int, int], Field(description="half-open range of chunks [start, stop)")]
SequenceLength = Annotated[
    int, Field(ge=2, description="tokens per chunk, the beginning-of-sequence token not counted")
]
SequenceCount = Annotated[int, Field(ge=1)]


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    bos: bool = Field(default=False, description="put a beginning-of-sequence token in front of every chunk")


class SampledCorpus(_Spec):
    """Token sequences sampled from the subject itself, in ``splits.safetensors`` of its folder.

    A count keeps the first sequences of a split; `sequence_length` keeps the first tokens of each sequence.
    """

    kind: Literal["sampled"]
    sequence_length: SequenceLength | None = None
    calibration: SequenceCount | None = None
    gate: SequenceCount | None = None
    search: SequenceCount | None = None
    confirm: SequenceCount | None = None
    sealed: SequenceCount | None = None

    def count(self, split: SplitName) -> int | None:
        """Return how many sequences of the split to keep; None for all."""
        count: int | None = getattr(self, split)
        return count


class _ChunkedCorpus(_Spec):
    sequence_length: SequenceLength
    calibration: ChunkRange
    gate: ChunkRange
    search: ChunkRange
    confirm: ChunkRange
    sealed: ChunkRange

    def chunk_range(self, split: SplitName) -> tuple[int, int]:
        """Return the half-open range of chunks of the split."""
        chunks: tuple[int, int] = getattr(self, split)
        return chunks

    @property
    def num_chunks(self) -> int:
        """Number of chunks that the text must hold."""
        return max(self.chunk_range(split)[1] for split in SPLIT_NAMES)

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        ranges = {split: self.chunk_range(split) for split in SPLIT_NAMES}
        for split, (start, stop) in ranges.items():
            if not 0 <= start < stop:
                raise ValueError(f"{split} = [{start}, {stop}] is empty or negative; give 0 <= start < stop")
        for (first, one), (second, other) in combinations(ranges.items(), 2):
            if max(one[0], other[0]) < min(one[1], other[1]):
                raise ValueError(
                    f"{first} = {list(one)} and {second} = {list(other)} overlap; ranges are half-open, [0, 48] and "
                    "[48, 64] do not"
                )
        return self


class TextCorpus(_ChunkedCorpus):
    """A UTF-8 text file, tokenized in one piece and cut into chunks of `sequence_length` tokens, without the tail."""

    kind: Literal["text"]
    path: Path


class DatasetCorpus(_ChunkedCorpus):
    """A data set by the name that `datasets.load_dataset` takes, or a folder that `save_to_disk` wrote.

    The texts of `field` are joined by `separator` in the order of the data set, then treated like a text file.
    `data_files` is for the file readers (``name = "text"``, ``"json"``, ``"parquet"``); `max_documents` keeps the first
    rows; `split` may be a slice (``train[:1000]``), and may be left out if there is only one.
    """

    kind: Literal["dataset"]
    name: str = Field(min_length=1)
    config: str | None = None
    split: str | None = None
    field: str = "text"
    separator: str = "\n\n"
    data_files: str | tuple[str, ...] | None = None
    revision: str | None = None
    max_documents: Annotated[int, Field(ge=1)] | None = None


CorpusSpec = Annotated[SampledCorpus | TextCorpus | DatasetCorpus, Field(discriminator="kind")]
