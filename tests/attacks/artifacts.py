"""Names that lead elsewhere, and artifact files that are not what they say.

Programs never write an artifact, they only name layers and sites; so the files are forged here by the host's hand, as
another user of its disk could, and handed to the evaluator as a reference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluators.results import Outcome
from tests.attacks.attack import Attack, program

THEME = "artifacts"

ATTACKS = (
    Attack(
        name="extreme_names",
        theme=THEME,
        property="names with .., /, NUL, control characters, wide or very many characters name no layer, site or file",
        source=program(r"""
            from evaluators.errors import ContractError
            names = ["", ".", "..", "../../@MARK@", "/tmp/@MARK@", "@ARTIFACTS@/@MARK@", "blocks.0.q\0", "blocks.0.q\n",
                     "blocks.0.q/../blocks.1.q", "blocks.00.q", "blocks.-1.q", "BLOCKS.0.Q", "blocks.0.q ", "\x1b[2J",
                     chr(0x202E) + "blocks.0.q", "\uff42locks.0.q", "x" * 256, "\U0001f600" * 256, "__class__", "%s%n{0}"]
            encoded = encode(session.weight("blocks.0.q"))
            for name in names:
                for call in (lambda: session.weight(name), lambda: session.install(name, encoded),
                             lambda: session.inputs(name), lambda: session.fold(name, torch.eye(64)),
                             lambda: session.output_error(name, encoded)):
                    try:
                        call()
                        session.log(f"{name!r} passed")
                    except ContractError:
                        pass
            honest(session)
        """),
        outcomes=(Outcome.SCORED,),
        scores_as_honest=True,
        check=lambda world, evaluator, result: [result.program_log] if "passed" in result.program_log else [],
        quick=True,
    ),
    Attack(
        name="endless_name",
        theme=THEME,
        property="a name of a hundred thousand characters ends the run, and its record is short",
        source=program("session.weight('x' * 100_000)\n"),
        outcomes=(Outcome.CONTRACT,),
        check=lambda world, evaluator, result: [] if len(result.reason) < 5000 else [f"reason of {len(result.reason)}"],
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FileAttack:
    """An artifact file that was tampered with.

    forge: takes header and tensor bytes of a good file and returns those of the bad one.
    """

    name: str
    property: str
    forge: Callable[[dict[str, Any], bytes], tuple[Any, bytes]]


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and tensor bytes of a file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_safetensors(path: Path, header: Any, tensors: bytes) -> None:
    """Write a file from a header (JSON, or its text as it stands) and tensor bytes."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def _packed(header: dict[str, Any]) -> str:
    return next(name for name in sorted(header) if name.endswith(".packed"))


def _with_entry(header: dict[str, Any], **changes: Any) -> dict[str, Any]:
    name = _packed(header)
    return header | {name: header[name] | changes}


def _with_bytes(header: dict[str, Any], tensors: bytes, ending: str, value: int) -> tuple[dict[str, Any], bytes]:
    begin, end = next(entry["data_offsets"] for name, entry in sorted(header.items()) if name.endswith(ending))
    return header, tensors[:begin] + bytes([value]) * (end - begin) + tensors[end:]


def _without_layer(header: dict[str, Any], tensors: bytes) -> tuple[dict[str, Any], bytes]:
    name = _packed(header)
    return {key: value for key, value in header.items() if key != name}, tensors


def _with_description(
    change: Callable[[dict[str, Any]], object], header: dict[str, Any], tensors: bytes
) -> tuple[dict[str, Any], bytes]:
    description = json.loads(header["__metadata__"]["quantforge"])
    change(description)
    return header | {"__metadata__": {"quantforge": json.dumps(description)}}, tensors


FILE_ATTACKS = (
    FileAttack(
        name="absurd_shape",
        property="a header with a shape beyond its bytes is refused",
        forge=lambda header, tensors: (_with_entry(header, shape=[1 << 40, 1 << 40]), tensors),
    ),
    FileAttack(
        name="overflowing_offsets",
        property="a header with offsets beyond the file is refused",
        forge=lambda header, tensors: (_with_entry(header, data_offsets=[0, (1 << 64) - 1]), tensors),
    ),
    FileAttack(
        name="negative_shape",
        property="a header with a negative length is refused",
        forge=lambda header, tensors: (_with_entry(header, shape=[-1, 64]), tensors),
    ),
    FileAttack(
        name="lying_dtype",
        property="codes that are stored as floats are refused",
        forge=lambda header, tensors: (_with_entry(header, dtype="F8_E4M3"), tensors),
    ),
    FileAttack(
        name="header_without_end",
        property="a header that is longer than the file is refused",
        forge=lambda header, tensors: (json.dumps(header) + " " * 10 + "{", b""),
    ),
    FileAttack(
        name="truncated_file",
        property="a file that breaks off is refused",
        forge=lambda header, tensors: (header, tensors[:-1]),
    ),
    FileAttack(
        name="duplicate_layer",
        property="a header that holds a tensor twice is refused",
        forge=lambda header, tensors: (
            json.dumps(header)[:-1] + "," + json.dumps({_packed(header): header[_packed(header)]})[1:],
            tensors + tensors,
        ),
    ),
    FileAttack(
        name="missing_layer",
        property="a file that lacks a layer that it describes is refused",
        forge=_without_layer,
    ),
    FileAttack(
        name="layer_of_another_group",
        property="a description that puts a layer into two groups is refused",
        forge=lambda header, tensors: _with_description(
            lambda text: text["groups"]["blocks.0.o"]["layers"].update(text["groups"]["blocks.0.down"]["layers"]),
            header,
            tensors,
        ),
    ),
    FileAttack(
        name="undescribed_rule",
        property="a description with an activation rule or key that does not exist is refused",
        forge=lambda header, tensors: _with_description(
            lambda text: text["groups"]["blocks.0.o"]["layers"]["blocks.0.o"].update(scale_rule="table"),
            header,
            tensors,
        ),
    ),
    FileAttack(
        name="scale_255",
        property="a file with the scale byte of NaN is refused",
        forge=lambda header, tensors: _with_bytes(header, tensors, ".scales", 255),
    ),
    FileAttack(
        name="minus_zero_codes",
        property="a file with codes that are never written is refused",
        forge=lambda header, tensors: _with_bytes(header, tensors, ".packed", 0x88),
    ),
    FileAttack(
        name="changed_codes",
        property="a file whose codes were changed into other legal ones no longer has its name",
        forge=lambda header, tensors: _with_bytes(header, tensors, ".packed", 0x33),
    ),
)


def path_attacks(folder: Path, artifact: Path) -> dict[str, str]:
    """Return names that lead out of the folder, by what they try; makes the links that they need.

    artifact: a good file, a copy of which lies outside under another name.
    """
    outside = folder.parent / "outside.safetensors"
    outside.write_bytes(artifact.read_bytes()[:-1] + b"\0")
    link = folder / f"{'a' * 64}.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to(outside)
    return {
        "dots": os.path.relpath(outside, folder).removesuffix(".safetensors"),
        "absolute": str(outside).removesuffix(".safetensors"),
        "link": "a" * 64,
        "nul": "a" * 63 + "\0",
        "upper case": artifact.stem.upper(),
        "new line": artifact.stem + "\n",
    }
