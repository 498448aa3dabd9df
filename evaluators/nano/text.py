"""Gather English prose, train the tokenizer of the shipped subjects, and write their training tokens.

    python text.py gather FOLDER... --out text/          unpacked documentation packages -> one .txt per source
    python text.py tokens text/*.txt --out tokens/       .txt -> tokenizer.json, train.npy, held_out.npy (uint16)

A source is any folder with HTML, POD, manual pages in plain text, dictionaries (dictd) or WordNet data. Only
paragraphs that read as English prose are kept, each once over all sources. The text itself never enters the
repository.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import re
from collections.abc import Iterator
from pathlib import Path

BEGIN = "<|begin|>"
"""The one special token: it opens every document, and every sampled sequence."""

_DROPPED = re.compile(r"<(script|style|head|nav|pre|footer|svg)\b.*?</\1>", re.S | re.I)
_BLOCK_TAG = re.compile(
    r"</?(p|div|li|ul|ol|dl|dt|dd|h[1-6]|tr|td|th|table|section|blockquote|br\s*/?|hr)\b[^>]*>", re.I
)
_TAG = re.compile(r"<[^>]*>")
_POD_CODE = re.compile(r"[A-Z]<+\s?([^<>|]*)(?:\|[^<>]*)?\s?>+")
_WORD = re.compile(r"[A-Za-z']+")
_COMMON = frozenset(
    "the of and to in a is that for it as was with be by on not he his are this or have from at which but they you had "
    "all one were their an has been there will would who when what if can so no out up we do its may any than them "
    "these into other some then only such your my more i she her him me thou thy shall unto our".split()
)
_SUFFIXES = {".html", ".htm", ".txt", ".pod", ".en", ".rst", ".md", ".info", ".adj", ".adv", ".noun", ".verb", ".dict"}


def is_prose(paragraph: str) -> bool:
    """Tell English prose from code, tables, navigation and other languages: by letters, common words and symbols."""
    if not 60 <= len(paragraph) <= 6000:
        return False
    words = _WORD.findall(paragraph)
    if len(words) < 10 or sum(map(len, words)) < 0.68 * len(paragraph):
        return False
    common = sum(word.lower() in _COMMON for word in words)
    symbols = sum(paragraph.count(symbol) for symbol in "{}[]<>|\\=_*#$@~^+/")
    return common >= 0.24 * len(words) and symbols <= 0.02 * len(paragraph)


def paragraphs_of(path: Path, text: str) -> Iterator[str]:
    """Split a file's text into paragraphs with single spaces, markup taken off."""
    name = path.name.removesuffix(".gz")
    if "<html" in text[:3000].lower() or name.endswith((".html", ".htm")):
        text = html.unescape(_TAG.sub("", _BLOCK_TAG.sub("\n\n", _DROPPED.sub("", text))))
    elif name.endswith(".pod"):
        text = _POD_CODE.sub(r"\1", re.sub(r"(?m)^=\w+.*$|^[ \t]+.*$", "\n", text))
    elif name.startswith("data."):  # WordNet: offset, lexical file, type, count, word, ... | gloss
        for line in text.splitlines():
            fields = line.split(" ", 5)
            if "|" in line and len(fields) == 6 and fields[0].isdigit():
                yield f"{fields[4].replace('_', ' ')}: {line.split('|', 1)[1].strip()}."
        return
    elif "fortunes" in path.parts:
        text = re.sub(r"(?m)^%$", "\n", text)
    for paragraph in re.split(r"\n\s*\n", text):
        joined = " ".join(paragraph.replace("[1913 Webster]", "").split())
        joined = joined.translate(
            {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"', 0x2013: "-", 0x2014: "-", 0xB6: ""}
        )
        yield joined


def read_file(path: Path) -> str | None:
    """Return the text of a plain or gzipped file, or None when it is not text."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    if b"\0" in raw[:4096]:
        return None
    return raw.decode("utf-8", errors="replace")


def gather(folder: Path, seen: set[bytes]) -> Iterator[str]:
    """Yield one document per file: its new prose paragraphs, joined by newlines; `seen` spans all sources."""
    is_fortune = "fortunes" in folder.name
    for path in sorted(folder.rglob("*")):
        suffix = Path(path.name.removesuffix(".gz").removesuffix(".dz")).suffix
        if not path.is_file() or path.is_symlink() or not (suffix in _SUFFIXES or (is_fortune and not suffix)):
            continue
        if path.name.startswith(("changelog", "copyright", "genindex", "NEWS")) or "_sources" in path.parts:
            continue
        text = read_file(path)
        kept = []
        for paragraph in paragraphs_of(path, text) if text else ():
            key = hashlib.blake2b(re.sub(r"\W+|\d+", "", paragraph.lower()).encode(), digest_size=8).digest()
            is_gloss = path.name.startswith("data.") and len(paragraph) > 40
            if (is_gloss or is_prose(paragraph)) and key not in seen:
                seen.add(key)
                kept.append(paragraph)
        # Dictionaries and books are one file; a document of some pages keeps the begin token frequent enough to learn.
        for start in range(0, len(kept), 40):
            yield "\n".join(kept[start : start + 40])


def wikitext_documents(text: str) -> Iterator[str]:
    """Split WikiText's token file into articles, with its spaced-out punctuation and ``@-@`` marks undone."""
    text = re.sub(r" @(.)@ ", r"\1", text).replace("<unk>", "unknown")
    text = re.sub(r" ([,.;:!?%)\]']|'s|n't)", r"\1", text)
    text = re.sub(r"([(\[$]) ", r"\1", text)
    for article in re.split(r"(?m)^ = (?=[^=])", text):
        lines = [line.strip(" =") for line in article.splitlines()]
        body = "\n".join(line for line in lines if line)
        if len(body) > 200:
            yield body


def run_gather(folders: list[Path], out: Path) -> None:
    """Write ``<out>/<source>.txt``, documents separated by a form feed, and print the size of each."""
    out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    for folder in folders:
        is_wikitext = folder.is_file()
        documents = wikitext_documents(folder.read_text("utf-8")) if is_wikitext else gather(folder, seen)
        text = "\f".join(documents)
        (out / f"{folder.stem if is_wikitext else folder.name}.txt").write_text(text, "utf-8")
        print(f"{folder.name:24} {len(text) / 1e6:8.2f} MB", flush=True)


def run_tokens(files: list[Path], out: Path, vocab_size: int, repeat: dict[str, int], held_out_every: int) -> None:
    """Train a byte-level BPE and write the token streams: every `held_out_every`-th document is held out."""
    import numpy as np
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    documents = {file.stem: [d for d in file.read_text("utf-8").split("\f") if d] for file in files}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = [d for stem, docs in documents.items() for d in docs[:: 1 if repeat.get(stem, 1) > 1 else 3]]
    tokenizer.train_from_iterator(sample, trainer)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    begin = tokenizer.token_to_id(BEGIN)
    train: list[np.ndarray] = []
    held: list[np.ndarray] = []
    for stem, docs in documents.items():
        ids = [np.array([begin, *e.ids], dtype=np.uint16) for e in tokenizer.encode_batch(docs)]
        held += ids[::held_out_every]
        kept = [a for index, a in enumerate(ids) if index % held_out_every]
        train += kept * repeat.get(stem, 1)
        print(f"{stem:24} {sum(map(len, ids)) / 1e6:7.2f} M tokens x{repeat.get(stem, 1)}", flush=True)
    order = np.random.default_rng(0).permutation(len(train))
    np.save(out / "train.npy", np.concatenate([train[i] for i in order]))
    np.save(out / "held_out.npy", np.concatenate(held))
    print(f"train {sum(map(len, train))} held out {sum(map(len, held))} tokens, begin token {begin}")


def main() -> None:
    """Parse the command line; see the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    gather_parser = commands.add_parser("gather", help="plain text from unpacked documentation and WikiText files")
    gather_parser.add_argument("folders", type=Path, nargs="+")
    gather_parser.add_argument("--out", type=Path, required=True)
    tokens_parser = commands.add_parser("tokens", help="tokenizer and token streams from plain text")
    tokens_parser.add_argument("files", type=Path, nargs="+")
    tokens_parser.add_argument("--out", type=Path, required=True)
    tokens_parser.add_argument("--vocab-size", type=int, default=4096)
    tokens_parser.add_argument("--repeat", action="append", default=[], metavar="SOURCE=TIMES")
    tokens_parser.add_argument("--held-out-every", type=int, default=100)
    args = parser.parse_args()
    if args.command == "gather":
        run_gather(args.folders, args.out)
    else:
        repeat = {stem: int(times) for stem, times in (item.split("=") for item in args.repeat)}
        run_tokens(args.files, args.out, args.vocab_size, repeat, args.held_out_every)


if __name__ == "__main__":
    main()
