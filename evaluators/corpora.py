"""Corpora: the token sequences that a subject is calibrated, gated and scored on.

`load_corpus` turns a specification (`evaluators.corpus_spec`) into five tensors of tokens, one per split. The sealed
split is kept apart: it can only be had through `Corpus.sealed`, which takes the reader's name and counts, because every
look at it wears it out.

Text is tokenized in one piece, without special tokens, and cut into chunks that do not overlap; the tail is dropped.
With ``bos`` a chunk has one token more than `sequence_length`, and the text in it stays the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from evaluators.corpus_spec import SPLIT_NAMES, CorpusSpec, DatasetCorpus, SampledCorpus, SplitName, TextCorpus
from evaluators.errors import CorpusError
from evaluators.subjects import Subject

__all__ = ["Corpus", "CorpusSpec", "corpus_from_tensors", "load_corpus"]

SPLITS_FILE = "splits.safetensors"
SAVED_DATASET_FILES = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves in a folder
TOKEN_DTYPES = (torch.uint16, torch.int32, torch.int64)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens of the five splits.

    Attributes:
        splits: calibration, gate, search and confirm, each (chunks, sequence_length) int64 on the CPU. The sealed split
            is not among them.
        hash: sha256 (hex) over the tokens of all five splits.
        source: where the tokens come from, for people.
        sequence_length: tokens per chunk, a beginning-of-sequence token included.
        starts_with_bos: whether every chunk begins with the subject's beginning-of-sequence token.
        sealed_readers: who has read the sealed split so far, in order.
    """

    splits: Mapping[str, Tensor]
    hash: str
    source: str
    sequence_length: int
    starts_with_bos: bool
    _sealed: Tensor = field(repr=False)
    sealed_readers: list[str] = field(default_factory=list)

    @property
    def num_sealed_chunks(self) -> int:
        """Number of chunks of the sealed split; asking does not count as reading."""
        return int(self._sealed.shape[0])

    @property
    def protocol(self) -> str:
        """What a perplexity on this corpus means, in one sentence."""
        sizes = ", ".join(f"{name} {len(self.splits[name])}" for name in SPLIT_NAMES if name in self.splits)
        bos = "each beginning with BOS" if self.starts_with_bos else "no BOS"
        return (
            f"Token perplexity on {self.source}: chunks of {self.sequence_length} tokens that do not overlap, {bos}, "
            f"{self.sequence_length - 1} predicted per chunk ({sizes}, sealed {self.num_sealed_chunks} chunks), "
            f"corpus {self.hash[:12]}."
        )

    def sealed(self, reader: str) -> Tensor:
        """Return the sealed split, (chunks, sequence_length) int64; the read is counted and logged.

        Args:
            reader: who reads it and what for; kept in `sealed_readers`.

        Raises:
            ValueError: the reader has no name.
        """
        if not reader.strip():
            raise ValueError("a read of the sealed split needs the name of its reader")
        self.sealed_readers.append(reader)
        logger.info("sealed split of corpus %s, read %d: %s", self.hash[:12], len(self.sealed_readers), reader)
        return self._sealed.clone()


def load_corpus(spec: SampledCorpus | TextCorpus | DatasetCorpus, subject: Subject) -> Corpus:
    """Load the tokens of all splits.

    Args:
        spec: what to load; paths are taken as they are.
        subject: gives the tokenizer, the vocabulary, the BOS token, and for sampled corpora the file.

    Raises:
        CorpusError: file, data set or text field not there; not enough tokens; tokens outside the subject's
            vocabulary; no tokenizer; or BOS asked for and unknown or already there.
    """
    if isinstance(spec, SampledCorpus):
        splits, source = _load_sampled(spec, subject), f"sequences sampled from {subject.name}"
    else:
        if isinstance(spec, TextCorpus):
            text, source = _read_text(spec.path), spec.path.name
        else:
            text, source = _read_dataset(spec), " ".join(filter(None, (spec.name, spec.config, spec.split)))
        chunks = _cut(_tokenize(text, subject), spec.sequence_length, spec.num_chunks, source)
        splits = {split: chunks[slice(*spec.chunk_range(split))] for split in SPLIT_NAMES}
    if spec.bos:
        splits = _prepend_bos(splits, subject)
    return corpus_from_tensors(splits, subject, source=source)


def corpus_from_tensors(splits: Mapping[SplitName, Tensor], subject: Subject, *, source: str) -> Corpus:
    """Make a corpus of tokens in memory.

    Args:
        splits: all five, each (chunks, length) of an integer dtype, one length of at least 2.
        subject: what the tokens are for.
        source: where they come from, for people.

    Raises:
        CorpusError: a split is missing, empty or of another length, sequences are longer than the subject's context, or
            a token is outside its vocabulary.
    """
    missing = [name for name in SPLIT_NAMES if name not in splits]
    if missing:
        raise CorpusError(f"{source} lacks the splits {missing}; needed: {', '.join(SPLIT_NAMES)}")
    lengths = {tuple(splits[name].shape[1:]) for name in SPLIT_NAMES}
    if len(lengths) != 1 or any(splits[name].ndim != 2 or len(splits[name]) == 0 for name in SPLIT_NAMES):
        shapes = {name: tuple(splits[name].shape) for name in SPLIT_NAMES}
        raise CorpusError(f"{source} has splits of shapes {shapes}; needed: (chunks, length) with one length")
    ((length,),) = lengths
    if length < 2:
        raise CorpusError(f"{source} has sequences of {length} tokens; at least 2 are needed to predict one")
    if subject.context_length is not None and length > subject.context_length:
        raise CorpusError(
            f"{source} has sequences of {length} tokens, but {subject.name} was made for at most "
            f"{subject.context_length}; give a shorter sequence_length"
        )
    digest = hashlib.sha256(f"{length}".encode())
    tokens: dict[str, Tensor] = {}
    for name in SPLIT_NAMES:
        tokens[name] = splits[name].to("cpu", torch.int64, copy=True).contiguous()
        low, high = int(tokens[name].min()), int(tokens[name].max())
        if low < 0 or high >= subject.map.vocab_size:
            raise CorpusError(
                f"{source}, split {name}: token ids from {low} to {high}, but {subject.name} knows 0 to "
                f"{subject.map.vocab_size - 1}; use the tokenizer and the corpus that belong to the subject"
            )
        digest.update(f"\n{name} {len(tokens[name])}\n".encode())
        digest.update(tokens[name].numpy().data)
    bos = subject.bos_token_id
    starts_with_bos = bos is not None and all(bool((tokens[name][:, 0] == bos).all()) for name in SPLIT_NAMES)
    sealed = tokens.pop("sealed")
    return Corpus(
        splits=MappingProxyType(tokens),
        hash=digest.hexdigest(),
        source=source,
        sequence_length=length,
        starts_with_bos=starts_with_bos,
        _sealed=sealed,
    )


def _load_sampled(spec: SampledCorpus, subject: Subject) -> dict[SplitName, Tensor]:
    if subject.folder is None or not (subject.folder / SPLITS_FILE).is_file():
        raise CorpusError(
            f"subject {subject.name!r} has no sampled sequences ({SPLITS_FILE} in its folder), which only the "
            "shipped subjects have; give a corpus of kind 'text' or 'dataset'"
        )
    path = subject.folder / SPLITS_FILE
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CorpusError(f"{path} cannot be read ({error}); reinstall or sample it again") from error
    splits: dict[SplitName, Tensor] = {}
    for name in SPLIT_NAMES:
        tokens = stored.get(name)
        if tokens is None or tokens.ndim != 2 or tokens.dtype not in TOKEN_DTYPES:
            raise CorpusError(f"{path} has no tensor {name!r} of token sequences; reinstall or sample it again")
        count = len(tokens) if (asked := spec.count(name)) is None else asked
        length = tokens.shape[1] if spec.sequence_length is None else spec.sequence_length
        if count > len(tokens) or length > tokens.shape[1]:
            raise CorpusError(
                f"split {name} of {subject.name} holds {len(tokens)} sequences of {tokens.shape[1]} tokens, but "
                f"{count} of {length} are asked for; ask for fewer or shorter ones"
            )
        splits[name] = tokens.to(torch.int64)[:count, :length]
    return splits


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CorpusError(f"no text file {path}; give an existing UTF-8 file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path} cannot be read as UTF-8 text ({error}); give a plain text file") from error


def _read_dataset(spec: DatasetCorpus) -> str:
    import datasets  # slow to import, and needed by this kind of corpus alone

    try:
        with _quiet_datasets(datasets):
            if any((Path(spec.name) / file).is_file() for file in SAVED_DATASET_FILES):
                loaded = datasets.load_from_disk(spec.name)
            else:
                files = list(spec.data_files) if isinstance(spec.data_files, tuple) else spec.data_files
                loaded = datasets.load_dataset(
                    spec.name, spec.config, data_files=files, split=spec.split, revision=spec.revision
                )
    # Network, unknown name or config, damaged files: the library has a class for each, most of them under these.
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CorpusError(
            f"data set {spec.name!r} cannot be loaded ({reason}); check name, config and network, or download it and "
            "give its folder"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        split = next(iter(loaded)) if spec.split is None and len(loaded) == 1 else spec.split
        if split not in loaded:
            raise CorpusError(f"data set {spec.name!r} has no split {split!r}; known: {', '.join(loaded)}")
        loaded = loaded[split]
    if spec.field not in loaded.column_names:
        known = ", ".join(loaded.column_names)
        raise CorpusError(f"data set {spec.name!r} has no field {spec.field!r}; known: {known}")
    if spec.max_documents is not None:
        loaded = loaded.select(range(min(spec.max_documents, len(loaded))))
    texts = loaded[spec.field]
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise CorpusError(f"field {spec.field!r} of {spec.name!r} holds {type(wrong).__name__}; give a field of text")
    return spec.separator.join(texts)


def _tokenize(text: str, subject: Subject) -> list[int]:
    tokenizer = subject.tokenizer
    if tokenizer is None:
        raise CorpusError(f"subject {subject.name!r} has no tokenizer, which text needs; add its tokenizer.json")
    # verbose=False: a whole corpus is longer than the model's context, which is no mistake here.
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return tokens


def _cut(tokens: list[int], length: int, num_chunks: int, source: str) -> Tensor:
    found = len(tokens) // length
    if found == 0:
        raise CorpusError(
            f"{source} holds {len(tokens)} tokens, less than one sequence of {length}; give a longer text or a shorter "
            "sequence_length"
        )
    if found < num_chunks:
        raise CorpusError(
            f"{source} holds {len(tokens)} tokens, {found} chunks of {length}, but the splits reach to chunk "
            f"{num_chunks}, {num_chunks * length} tokens; give a longer text, shorter sequences or lower ranges"
        )
    return torch.tensor(tokens[: num_chunks * length], dtype=torch.int64).view(num_chunks, length)


def _prepend_bos(splits: Mapping[SplitName, Tensor], subject: Subject) -> dict[SplitName, Tensor]:
    bos = subject.bos_token_id
    if bos is None:
        raise CorpusError(f"subject {subject.name!r} has no BOS token; set bos = false")
    if all(bool((tokens[:, 0] == bos).all()) for tokens in splits.values()):
        raise CorpusError(f"every chunk begins with the BOS token of {subject.name!r} already; set bos = false")
    return {name: torch.nn.functional.pad(tokens, (1, 0), value=bos) for name, tokens in splits.items()}


@contextlib.contextmanager
def _quiet_datasets(datasets: Any) -> Iterator[None]:
    """Keep the library's bars and warnings off the terminal while it loads."""
    verbosity = datasets.logging.get_verbosity()
    had_bars = not datasets.utils.are_progress_bars_disabled()
    datasets.logging.set_verbosity(logging.CRITICAL)
    datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if had_bars:
            datasets.utils.enable_progress_bars()
