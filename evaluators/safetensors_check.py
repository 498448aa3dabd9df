"""Whether the weight files of a model folder are whole, judged from their headers before anything is loaded.

A safetensors file is an 8-byte little-endian header length, a JSON header with dtype, shape and byte range of every
tensor, and the bytes. A download that broke off is caught by comparing the ranges with the size of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evaluators.errors import SubjectError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format itself."""

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
FLOAT_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files that hold the weights of a model folder, in name order.

    Raises:
        SubjectError: there are none, the index is unreadable, or a shard that the index names is missing.
    """
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        kinds = "only pickled ones" if any(folder.glob("*.bin")) else "none"
        raise SubjectError(
            f"{folder} has no model.safetensors and no model.safetensors.index.json (weight files found: {kinds}); "
            "save the model with `save_pretrained`, which writes safetensors"
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SubjectError(f"{index} is not an index of weight files ({error}); download it again") from error
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing or not shards:
        raise SubjectError(
            f"{folder} lacks {len(missing)} of {len(shards)} weight files, first {missing[:1]}; download it again"
        )
    return tuple(folder / name for name in shards)


def check_whole(path: Path) -> str:
    """Check one safetensors file, without reading its tensors.

    Returns:
        The dtype of most of its elements, as torch names it (``bfloat16``).

    Raises:
        SubjectError: truncated or malformed file, or tensors that are not floating point.
    """
    size = path.stat().st_size
    header, start = _read_header(path, size)
    elements: dict[str, int] = {}
    needed = start
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, end = _read_entry(path, name, entry)
        if dtype not in FLOAT_DTYPES:
            raise SubjectError(
                f"{path} stores {name!r} as {dtype}; give a full-precision model (one of {', '.join(FLOAT_DTYPES)})"
            )
        count = math.prod(shape)
        if end - begin != count * DTYPE_BYTES[dtype]:
            raise SubjectError(f"{path} is damaged: {name!r} has {end - begin} bytes for {count} x {dtype}; {_AGAIN}")
        elements[dtype] = elements.get(dtype, 0) + count
        needed = max(needed, start + end)
    if not elements:
        raise SubjectError(f"{path} holds no tensors; {_AGAIN}")
    if size < needed:
        raise SubjectError(f"{path} is truncated: {size} bytes of the {needed} that its header announces; {_AGAIN}")
    return FLOAT_DTYPES[max(elements, key=lambda dtype: elements[dtype])]


_AGAIN = "copy or download it again"


def _read_header(path: Path, size: int) -> tuple[Mapping[str, Any], int]:
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES:
            raise SubjectError(f"{path} is not a safetensors file ({size} bytes, header length {length}); {_AGAIN}")
        text = stream.read(length)
    if len(text) < length:
        raise SubjectError(f"{path} is truncated: {size} bytes of at least {8 + length}, inside its header; {_AGAIN}")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise SubjectError(f"{path} is not a safetensors file (its header is no JSON); {_AGAIN}") from error
    if not isinstance(header, dict):
        raise SubjectError(f"{path} is not a safetensors file (its header is no JSON object); {_AGAIN}")
    return header, 8 + length


def _read_entry(path: Path, name: str, entry: Any) -> tuple[str, list[int], int, int]:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        return str(dtype), [int(side) for side in shape], int(begin), int(end)
    except (KeyError, TypeError, ValueError) as error:
        raise SubjectError(f"{path} is damaged: the header entry of {name!r} is malformed; {_AGAIN}") from error
