"""Corpora: specifications, splits that do not overlap, the protocol sentence, the count of sealed reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import save_file

from evaluators.corpora import Corpus, corpus_from_tensors, load_corpus
from evaluators.corpus_spec import SPLIT_NAMES, CorpusSpec, DatasetCorpus, SampledCorpus, TextCorpus
from evaluators.errors import CorpusError
from evaluators.subjects import Subject, subject_from_model
from tests.tiny_models import (
    BOS_ID,
    make_tiny_corpus,
    make_tiny_model,
    make_tiny_subject,
    make_tiny_tokenizer,
    make_tiny_tokens,
)

TEXT = "".join(chr(32 + (7 * i + i // 90) % 95) for i in range(505))
RANGES: dict[str, Any] = {
    "calibration": [0, 4], "gate": [4, 5], "search": [6, 8], "confirm": [8, 9], "sealed": [9, 10]
}  # fmt: skip


@pytest.fixture(scope="module")
def subject() -> Subject:
    return subject_from_model(make_tiny_model("llama"), name="tiny", load_tokenizer=make_tiny_tokenizer)


def parse(**fields: Any) -> Any:
    spec: Any = TypeAdapter(CorpusSpec).validate_python(fields)
    return spec


def text_spec(tmp_path: Path, text: str = TEXT, **changes: Any) -> TextCorpus:
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8")
    spec: TextCorpus = parse(**{"kind": "text", "path": path, "sequence_length": 50} | RANGES | changes)
    return spec


def decode(subject: Subject, corpus: Corpus, split: str) -> str:
    tokens = corpus.sealed("test") if split == "sealed" else corpus.splits[split]
    return "".join(subject.tokenizer.convert_ids_to_tokens(tokens.flatten().tolist()))  # type: ignore[union-attr]


@pytest.mark.parametrize(("kind", "expected"), [("sampled", SampledCorpus), ("text", TextCorpus)])
def test_the_kind_picks_the_specification(kind: str, expected: type) -> None:
    fields = {} if kind == "sampled" else {"path": "x", "sequence_length": 8} | RANGES
    assert isinstance(parse(kind=kind, **fields), expected)
    assert isinstance(parse(kind="dataset", name="x", sequence_length=8, **RANGES), DatasetCorpus)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "book"}, "'sampled', 'text', 'dataset'"),
        ({"colour": "red"}, "Extra inputs are not permitted"),
        ({"sequence_length": 1}, "greater than or equal to 2"),
        ({"gate": [5, 5]}, r"gate = \[5, 5\] is empty or negative"),
        ({"gate": [6, 5]}, r"gate = \[6, 5\] is empty"),
        ({"gate": [-3, -1]}, "empty or negative"),
        ({"gate": [3, 6]}, r"calibration = \[0, 4\] and gate = \[3, 6\] overlap"),
        ({"sealed": [0, 100]}, "overlap"),
        ({"gate": [4]}, "Field required"),
        ({"gate": [4, 5, 6]}, "at most 2 items"),
        ({"gate": ["a", 5]}, "valid integer"),
        ({"gate": None}, "valid tuple"),
        ({"bos": "maybe"}, "valid boolean"),
    ],
)
def test_a_wrong_specification_is_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"kind": "text", "path": "x.txt", "sequence_length": 8} | RANGES | changes
    with pytest.raises(ValidationError, match=message):
        parse(**fields)


def test_a_split_cannot_be_left_out() -> None:
    for split in SPLIT_NAMES:
        with pytest.raises(ValidationError, match=f"{split}\n  Field required"):
            parse(kind="text", path="x", sequence_length=8, **{k: v for k, v in RANGES.items() if k != split})


@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.integers(0, 12), min_size=5, max_size=5),
    sizes=st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
def test_accepted_ranges_never_share_a_chunk(starts: list[int], sizes: list[int]) -> None:
    ranges = {name: [start, start + size] for name, start, size in zip(SPLIT_NAMES, starts, sizes, strict=True)}
    chunks = [chunk for start, stop in ranges.values() for chunk in range(start, stop)]
    if len(set(chunks)) == len(chunks):
        assert parse(kind="text", path="x", sequence_length=8, **ranges).num_chunks == max(chunks) + 1
    else:
        with pytest.raises(ValidationError, match="overlap"):
            parse(kind="text", path="x", sequence_length=8, **ranges)


def test_a_text_is_cut_into_its_stated_chunks(
    tmp_path: Path, subject: Subject, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = load_corpus(text_spec(tmp_path), subject)
    assert list(corpus.splits) == ["calibration", "gate", "search", "confirm"]
    assert decode(subject, corpus, "calibration") == TEXT[:200]
    assert decode(subject, corpus, "gate") == TEXT[200:250]
    assert decode(subject, corpus, "search") == TEXT[300:400]
    assert decode(subject, corpus, "sealed") == TEXT[450:500]
    assert corpus.splits["search"].dtype == torch.int64
    assert corpus.splits["search"].shape == (2, 50)
    assert not corpus.starts_with_bos
    assert corpus.protocol == (
        "Token perplexity on text.txt: chunks of 50 tokens that do not overlap, no BOS, 49 predicted per chunk "
        f"(calibration 4, gate 1, search 2, confirm 1, sealed 1 chunks), corpus {corpus.hash[:12]}."
    )
    assert capfd.readouterr() == ("", "")


def test_bos_is_put_in_front_and_the_text_stays(tmp_path: Path, subject: Subject) -> None:
    plain, with_bos = load_corpus(text_spec(tmp_path), subject), load_corpus(text_spec(tmp_path, bos=True), subject)
    assert with_bos.sequence_length == 51
    assert with_bos.starts_with_bos
    assert "each beginning with BOS" in with_bos.protocol
    assert bool((with_bos.sealed("test")[:, 0] == BOS_ID).all())
    for split in with_bos.splits:
        assert torch.equal(with_bos.splits[split][:, 1:], plain.splits[split])
    assert with_bos.hash != plain.hash


def test_the_hash_names_tokens_and_splits(tmp_path: Path, subject: Subject) -> None:
    first = load_corpus(text_spec(tmp_path), subject)
    assert load_corpus(text_spec(tmp_path), subject).hash == first.hash
    assert load_corpus(text_spec(tmp_path, TEXT + "more"), subject).hash == first.hash
    assert load_corpus(text_spec(tmp_path, gate=[5, 6]), subject).hash != first.hash
    assert load_corpus(text_spec(tmp_path, "!" + TEXT[1:]), subject).hash != first.hash
    changed = TEXT[:480] + "?" + TEXT[481:]
    assert load_corpus(text_spec(tmp_path, changed), subject).hash != first.hash


def test_reads_of_the_sealed_split_are_counted_and_cannot_change_it(subject: Subject) -> None:
    corpus = make_tiny_corpus(subject)
    assert corpus.num_sealed_chunks == 3
    assert "sealed" not in corpus.splits
    assert corpus.sealed_readers == []
    corpus.sealed("export of cand-1").zero_()
    assert int(corpus.sealed("table 2").min()) >= 3
    assert corpus.sealed_readers == ["export of cand-1", "table 2"]
    with pytest.raises(ValueError, match="needs the name of its reader"):
        corpus.sealed(" ")
    with pytest.raises(TypeError):
        corpus.splits["search"] = torch.zeros(1, 2)  # type: ignore[index]
    assert "sealed=" not in repr(corpus)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text.txt holds 0 tokens, less than one sequence of 50"),
        ("short", "text.txt holds 5 tokens, less than one sequence of 50"),
        (TEXT[:499], "holds 499 tokens, 9 chunks of 50, but the splits reach to chunk 10, 500 tokens"),
    ],
)
def test_a_text_too_short_says_what_was_found_and_needed(
    text: str, message: str, tmp_path: Path, subject: Subject
) -> None:
    with pytest.raises(CorpusError, match=message):
        load_corpus(text_spec(tmp_path, text), subject)


def test_files_that_cannot_be_read_are_named(tmp_path: Path, subject: Subject) -> None:
    spec = text_spec(tmp_path)
    spec.path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorpusError, match="cannot be read as UTF-8 text"):
        load_corpus(spec, subject)
    spec.path.unlink()
    with pytest.raises(CorpusError, match=r"no text file .*text.txt; give an existing UTF-8 file"):
        load_corpus(spec, subject)
    spec.path.mkdir()
    with pytest.raises(CorpusError, match="cannot be read"):
        load_corpus(spec, subject)


def test_a_subject_without_tokenizer_or_bos_or_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="'tiny-llama' has no tokenizer"):
        load_corpus(text_spec(tmp_path), make_tiny_subject())
    small = subject_from_model(make_tiny_model(vocab_size=64), name="small", load_tokenizer=make_tiny_tokenizer)
    with pytest.raises(CorpusError, match=r"split calibration: token ids from \d+ to \d+, but small knows 0 to 63"):
        load_corpus(text_spec(tmp_path), small)
    without = subject_from_model(make_tiny_model(bos_token_id=None), name="without")
    with pytest.raises(CorpusError, match="'sampling' has no BOS token"):
        load_corpus(parse(kind="sampled", bos=True), with_splits(without, tmp_path))


def with_splits(subject: Subject, folder: Path, **changes: torch.Tensor) -> Subject:
    tokens = make_tiny_tokens(10, 24).to(torch.uint16)
    counts = zip(SPLIT_NAMES, torch.split(tokens, 2), strict=True)
    tensors = {name: part.clone() for name, part in counts} | {name: part.clone() for name, part in changes.items()}
    save_file(tensors, folder / "splits.safetensors")
    return subject_from_model(subject.model, name="sampling", folder=folder)


def test_sampled_sequences_come_from_the_subjects_folder(tmp_path: Path, subject: Subject) -> None:
    sampling = with_splits(subject, tmp_path)
    full = load_corpus(parse(kind="sampled"), sampling)
    assert full.sequence_length == 24
    assert torch.equal(full.splits["search"], make_tiny_tokens(10, 24)[4:6])
    assert full.source == "sequences sampled from sampling"
    part = load_corpus(parse(kind="sampled", sequence_length=8, search=1, sealed=1), sampling)
    assert torch.equal(part.splits["search"], full.splits["search"][:1, :8])
    assert part.num_sealed_chunks == 1
    assert load_corpus(parse(kind="sampled", bos=True), sampling).sequence_length == 25


def test_sequences_that_begin_with_bos_say_so_and_get_no_second_one(tmp_path: Path, subject: Subject) -> None:
    begun = torch.nn.functional.pad(make_tiny_tokens(2, 23), (1, 0), value=BOS_ID).to(torch.int32)
    sampling = with_splits(subject, tmp_path, **dict.fromkeys(SPLIT_NAMES, begun))
    assert load_corpus(parse(kind="sampled"), sampling).starts_with_bos
    with pytest.raises(CorpusError, match="begins with the BOS token of 'sampling' already"):
        load_corpus(parse(kind="sampled", bos=True), sampling)


def test_sampled_data_missing_or_too_small_is_refused(tmp_path: Path, subject: Subject) -> None:
    with pytest.raises(CorpusError, match="'tiny' has no sampled sequences"):
        load_corpus(parse(kind="sampled"), subject)
    sampling = with_splits(subject, tmp_path)
    with pytest.raises(
        CorpusError, match="split gate of sampling holds 2 sequences of 24 tokens, but 3 of 24 are asked"
    ):
        load_corpus(parse(kind="sampled", gate=3), sampling)
    with pytest.raises(CorpusError, match="but 2 of 25 are asked for"):
        load_corpus(parse(kind="sampled", sequence_length=25), sampling)
    for wrong in (torch.zeros(2, 24), torch.zeros(24, dtype=torch.int32)):
        with pytest.raises(CorpusError, match="no tensor 'gate' of token sequences"):
            load_corpus(parse(kind="sampled"), with_splits(subject, tmp_path, gate=wrong))
    (tmp_path / "splits.safetensors").write_bytes(b"12345678123")
    with pytest.raises(CorpusError, match=r"splits.safetensors cannot be read"):
        load_corpus(parse(kind="sampled"), sampling)


def test_tensors_that_make_no_corpus_are_refused(subject: Subject) -> None:
    good: dict[Any, torch.Tensor] = dict.fromkeys(SPLIT_NAMES, make_tiny_tokens(2, 8))
    with pytest.raises(CorpusError, match=r"lacks the splits \['gate'\]"):
        corpus_from_tensors({k: v for k, v in good.items() if k != "gate"}, subject, source="x")
    for wrong in (make_tiny_tokens(2, 9), make_tiny_tokens(2, 8)[:0], make_tiny_tokens(2, 8)[0]):
        with pytest.raises(CorpusError, match="has splits of shapes"):
            corpus_from_tensors(good | {"gate": wrong}, subject, source="x")
    for token in (-1, 128):
        with pytest.raises(CorpusError, match="split gate: token ids from"):
            corpus_from_tensors(good | {"gate": torch.full((2, 8), token)}, subject, source="x")
    with pytest.raises(CorpusError, match="sequences of 257 tokens, but tiny was made for at most 256"):
        corpus_from_tensors(dict.fromkeys(good, make_tiny_tokens(2, 257)), subject, source="x")
    with pytest.raises(CorpusError, match="sequences of 1 tokens; at least 2"):
        corpus_from_tensors(dict.fromkeys(good, make_tiny_tokens(2, 1)), subject, source="x")


@pytest.fixture
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Point the library's cache into the test's own folder, and keep it off the network."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_data_set_of_local_files_gives_the_same_tokens_as_the_text(
    dataset_cache: Path, subject: Subject, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [TEXT[i : i + 50] for i in range(0, 505, 50)]
    file = dataset_cache / "rows.jsonl"
    file.write_text("".join(json.dumps({"body": line, "number": i}) + "\n" for i, line in enumerate(lines)))
    spec = {"kind": "dataset", "name": "json", "data_files": str(file), "field": "body", "separator": "",
            "split": "train", "sequence_length": 50} | RANGES  # fmt: skip
    capfd.readouterr()
    corpus = load_corpus(parse(**spec), subject)
    assert capfd.readouterr() == ("", "")
    assert corpus.hash == load_corpus(text_spec(dataset_cache), subject).hash
    assert corpus.source == "json train"
    assert load_corpus(parse(**spec | {"split": None, "data_files": [str(file)]}), subject).hash == corpus.hash
    joined = load_corpus(parse(**spec | {"separator": "\n\n"}), subject)
    assert decode(subject, joined, "calibration") == "\n\n".join(lines)[:200]
    with pytest.raises(CorpusError, match="holds 200 tokens, 4 chunks of 50, but the splits reach to chunk 10"):
        load_corpus(parse(**spec | {"max_documents": 4}), subject)
    with pytest.raises(CorpusError, match=r"no field 'text'; known: body, number"):
        load_corpus(parse(**spec | {"field": "text"}), subject)
    with pytest.raises(CorpusError, match="field 'number' of 'json' holds int"):
        load_corpus(parse(**spec | {"field": "number"}), subject)
    with pytest.raises(CorpusError, match="data set 'json' cannot be loaded"):
        load_corpus(parse(**spec | {"split": "test"}), subject)


def test_a_saved_data_set_is_read_from_its_folder(dataset_cache: Path, subject: Subject) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [TEXT[:300], TEXT[300:]]})
    rows.save_to_disk(str(dataset_cache / "one"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(dataset_cache / "two"))
    fields = {"kind": "dataset", "separator": "", "sequence_length": 50} | RANGES
    expected = load_corpus(text_spec(dataset_cache), subject).hash
    assert load_corpus(parse(name=str(dataset_cache / "one"), **fields), subject).hash == expected
    assert load_corpus(parse(name=str(dataset_cache / "two"), split="test", **fields), subject).hash == expected
    with pytest.raises(CorpusError, match=r"has no split None; known: train, test"):
        load_corpus(parse(name=str(dataset_cache / "two"), **fields), subject)


def test_a_data_set_that_is_nowhere_is_one_clear_sentence(dataset_cache: Path, subject: Subject) -> None:
    with pytest.raises(CorpusError, match=r"data set '.*nowhere' cannot be loaded \(.*; check name") as caught:
        load_corpus(parse(kind="dataset", name=str(dataset_cache / "nowhere"), sequence_length=50, **RANGES), subject)
    assert "\n" not in str(caught.value)
