"""One message channel between the trusted evaluator and an untrusted worker.

Headers travel over a Unix stream socket, tensors through two shared-memory arenas, one per direction:

    frame   = length (4 bytes, little endian) | UTF-8 JSON ``{"body": {...}, "tensors": [{"dtype", "shape"}, ...]}``
    tensors = raw bytes in row order, each at the next multiple of 64, in the sender's outgoing arena

The evaluator makes both arenas (memfd, sealed against growing and shrinking) and hands them over once, by SCM_RIGHTS,
before the worker starts. The protocol is strict request and reply, so one arena per direction is enough: a message
has been copied out before the next one is written. Why not one memfd per message: the evaluator would have to take
file descriptors from an untrusted peer, and memory parked in descriptors that are in flight belongs to no process and
escapes a watchdog. Here every byte lies in a file whose use the evaluator can read, and descriptors that a hostile
peer attaches to its messages are refused by the kernel where it can (SO_PASSRIGHTS), and else dropped, because the
evaluator receives without room for ancillary data. The worker gets open files of its own for the arenas: flags of a
file that both sides had open (O_APPEND) would change what the evaluator's writes do.

What the receiving side never does: unpickle, map memory that the other side can change while it is being read (bytes
are read once, into a fresh buffer, and checked afterwards), trust a length, allocate for bytes that were not written,
or accept JSON with NaN, infinities, repeated keys, lone surrogates or deep nesting. All of these are `ProtocolError`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from evaluators.errors import EvaluatorError, ProgramError
from evaluators.results import Outcome

REQUEST_LIMIT: Final = 1 << 20
"""Largest header a worker may send, bytes."""
REPLY_LIMIT: Final = 16 << 20
"""Largest header the evaluator may send: the hello of a large model lists thousands of layers."""
REQUEST_ARENA_BYTES: Final = 1 << 30
REPLY_ARENA_BYTES: Final = 8 << 30
"""Address space of the arenas; pages exist only once written."""
KEEP_BYTES: Final = 64 << 20
"""An arena larger than this is given back to the system after use, a smaller one kept warm."""
MAX_TENSORS: Final = 256
MAX_DIMENSIONS: Final = 8
MAX_DEPTH: Final = 16
MAX_VALUES: Final = 100_000

DTYPES: Final[dict[str, torch.dtype]] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH: Final = struct.Struct("<I")
_SO_PASSRIGHTS: Final = 83  # Linux 6.16 and later
_ALIGNMENT: Final = 64
_HANDOVER: Final = b"A"


class ProtocolError(ProgramError):
    """The peer broke the protocol of the channel; the worker's run ends with this as its outcome."""

    outcome = Outcome.CONTRACT


class ChannelClosedError(EvaluatorError):
    """The other side is gone."""


class MessageTooLargeError(EvaluatorError, ValueError):
    """What should be sent does not fit a message; nothing was sent."""


class Message(NamedTuple):
    """One message: a JSON object and its tensors (CPU, contiguous, owned by the receiver)."""

    body: dict[str, Any]
    tensors: list[Tensor]


class Arena:
    """A shared-memory file of fixed length through which one side passes tensors to the other."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes

    @classmethod
    def create(cls, num_bytes: int) -> Arena:
        """Make a sparse arena whose length nobody can change."""
        fd = os.memfd_create("quantforge-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(fd, num_bytes)

    def used_bytes(self) -> int:
        """Return the memory that the arena holds now, whoever wrote it."""
        return os.fstat(self.fd).st_blocks * 512

    def trim(self) -> None:
        """Give memory back to the system when the last message was large; the content becomes zeros."""
        if self.used_bytes() > KEEP_BYTES:
            with mmap.mmap(self.fd, self.num_bytes) as mapping:
                mapping.madvise(mmap.MADV_REMOVE)

    def write(self, tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Copy the tensors into the arena and return their descriptions.

        Raises:
            MessageTooLargeError: a dtype that cannot travel, or more bytes than the arena holds.
        """
        if len(tensors) > MAX_TENSORS:
            raise MessageTooLargeError(f"{len(tensors)} tensors in one message; at most {MAX_TENSORS} fit")
        flat = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
        offsets, end = [], 0
        for tensor in flat:
            if tensor.dtype not in _DTYPE_NAMES:
                raise MessageTooLargeError(f"dtype {tensor.dtype} cannot be sent; known: {', '.join(DTYPES)}")
            offsets.append(_next_offset(end))
            end = offsets[-1] + tensor.nbytes
        if end > self.num_bytes:
            raise MessageTooLargeError(f"the tensors of one message need {end} bytes; at most {self.num_bytes} fit")
        for tensor, offset in zip(flat, offsets, strict=True):
            if tensor.nbytes:
                buffer = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
                _write_fully(self.fd, memoryview(buffer), offset)
        descriptions = [{"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape)} for tensor in flat]
        return descriptions

    def read(self, descriptions: object) -> list[Tensor]:
        """Copy the described tensors out of the arena.

        Raises:
            ProtocolError: a description that is malformed or not covered by the bytes that were written.
        """
        specs = _check_descriptions(descriptions, self.num_bytes)
        announced = sum(spec.num_bytes for spec in specs)
        if announced > self.used_bytes():
            raise ProtocolError(f"tensors of {announced} bytes announced, but not that many bytes were written")
        tensors = []
        offset = 0
        for spec in specs:
            tensors.append(self._read_one(spec, offset))
            offset = _next_offset(offset + spec.num_bytes)
        return tensors

    def _read_one(self, spec: _TensorSpec, offset: int) -> Tensor:
        if not spec.num_bytes:
            return torch.empty(spec.shape, dtype=spec.dtype)
        if spec.dtype is torch.bool:
            raw = torch.empty(spec.num_bytes, dtype=torch.uint8)
        else:
            raw = torch.empty(spec.num_bytes // spec.dtype.itemsize, dtype=spec.dtype)
        buffer = (ctypes.c_char * spec.num_bytes).from_address(raw.data_ptr())
        view = memoryview(buffer).cast("B")
        done = 0
        while done < spec.num_bytes:
            count = os.preadv(self.fd, [view[done:]], offset + done)
            if count <= 0:
                raise ProtocolError("the arena ends inside a tensor")
            done += count
        if spec.dtype is torch.bool:
            # A byte other than 0 and 1 is not a bool; comparing makes one.
            raw = raw != 0
        return raw.reshape(spec.shape)

    def close(self) -> None:
        """Close the descriptor."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Channel:
    """One end of the connection; use it from one thread, except for `shutdown`."""

    def __init__(
        self, connection: socket.socket, *, incoming: Arena, outgoing: Arena, send_limit: int, receive_limit: int
    ) -> None:
        self._socket = connection
        self.incoming = incoming
        self.outgoing = outgoing
        self._send_limit = send_limit
        self._receive_limit = receive_limit

    def send(self, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send one message.

        Raises:
            MessageTooLargeError: it does not fit; nothing was sent.
            ChannelClosedError: the other side is gone.
        """
        descriptions = self.outgoing.write(tensors)
        text = json.dumps({"body": body, "tensors": descriptions}, allow_nan=False)
        data = text.encode("ascii")
        if len(data) > self._send_limit:
            raise MessageTooLargeError(f"message header of {len(data)} bytes; at most {self._send_limit} fit")
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as err:
            raise ChannelClosedError("the other side of the channel is gone") from err

    def receive(self) -> Message:
        """Wait for one message.

        Raises:
            ProtocolError: the peer sent something else.
            ChannelClosedError: the other side is gone.
        """
        (length,) = _LENGTH.unpack(self._receive_fully(_LENGTH.size))
        if length > self._receive_limit:
            raise ProtocolError(f"message header of {length} bytes announced; at most {self._receive_limit} are read")
        body, descriptions = parse_header(self._receive_fully(length))
        tensors = self.incoming.read(descriptions)
        self.incoming.trim()
        return Message(body, tensors)

    def used_bytes(self) -> int:
        """Return the memory that messages hold now, in both directions."""
        return self.incoming.used_bytes() + self.outgoing.used_bytes()

    def shutdown(self) -> None:
        """End both directions, so that a thread blocked in `send` or `receive` returns; safe from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close socket and arenas; closing twice is allowed."""
        self._socket.close()
        self.incoming.close()
        self.outgoing.close()

    def _receive_fully(self, num_bytes: int) -> bytes:
        chunks = []
        missing = num_bytes
        while missing:
            try:
                chunk = self._socket.recv(min(missing, 1 << 16))
            except OSError as err:
                raise ChannelClosedError("the other side of the channel is gone") from err
            if not chunk:
                raise ChannelClosedError("the other side of the channel is gone")
            chunks.append(chunk)
            missing -= len(chunk)
        return b"".join(chunks)


def open_channel() -> tuple[Channel, socket.socket]:
    """Make the evaluator's end, and the socket that the worker inherits (the caller closes it after the start)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    outgoing, incoming = Arena.create(REPLY_ARENA_BYTES), Arena.create(REQUEST_ARENA_BYTES)
    fds: list[int] = []
    try:
        for arena in (outgoing, incoming):
            fds.append(os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR | os.O_CLOEXEC))
        socket.send_fds(ours, [_HANDOVER], fds)
    finally:
        for fd in fds:
            os.close(fd)
    # A descriptor in flight is closed by whoever receives it, and closing a socket that lingers takes as long as it says.
    with contextlib.suppress(OSError):
        ours.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    channel = Channel(ours, incoming=incoming, outgoing=outgoing, send_limit=REPLY_LIMIT, receive_limit=REQUEST_LIMIT)
    return channel, theirs


def connect_channel(connection: socket.socket) -> Channel:
    """Make the worker's end from the socket that it inherited.

    Raises:
        ChannelClosedError: the evaluator did not hand over two arenas.
    """
    data, fds, _, _ = socket.recv_fds(connection, 1, 2)
    if data != _HANDOVER or len(fds) != 2:
        raise ChannelClosedError("the evaluator did not hand over two arenas")
    incoming, outgoing = (Arena(fd, os.fstat(fd).st_size) for fd in fds)
    return Channel(
        connection, incoming=incoming, outgoing=outgoing, send_limit=REQUEST_LIMIT, receive_limit=REPLY_LIMIT
    )


def parse_header(data: bytes) -> tuple[dict[str, Any], object]:
    """Return body and tensor descriptions of a header.

    Raises:
        ProtocolError: not the JSON object that a header is.
    """
    try:
        header = json.loads(
            data.decode("utf-8"),
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
            object_pairs_hook=_unique_keys,
        )
    except ProtocolError:
        raise
    except (ValueError, RecursionError) as err:
        raise ProtocolError(f"message header is not JSON: {type(err).__name__}") from err
    if not isinstance(header, dict) or header.keys() != {"body", "tensors"} or not isinstance(header["body"], dict):
        raise ProtocolError("message header is not an object with a body and tensors")
    _check_values(header)
    return header["body"], header["tensors"]


class _TensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int


def _check_descriptions(descriptions: object, limit: int) -> list[_TensorSpec]:
    if not isinstance(descriptions, list) or len(descriptions) > MAX_TENSORS:
        raise ProtocolError(f"tensors of a message are not a list of at most {MAX_TENSORS}")
    specs = []
    offset = 0
    for description in descriptions:
        if not isinstance(description, dict) or description.keys() != {"dtype", "shape"}:
            raise ProtocolError("a tensor is not described by dtype and shape")
        name, shape = description["dtype"], description["shape"]
        if not isinstance(name, str) or name not in DTYPES:
            raise ProtocolError(f"tensor dtype {str(name)[:40]!r} is not allowed; known: {', '.join(DTYPES)}")
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
            raise ProtocolError(f"tensor shape is not a list of at most {MAX_DIMENSIONS} lengths")
        if not all(type(length) is int and 0 <= length <= limit for length in shape):
            raise ProtocolError(f"tensor shape {str(shape)[:80]} has a length outside 0..{limit}")
        itemsize = DTYPES[name].itemsize
        # Zeros count as ones here: an empty dimension must not hide absurd ones, whose strides would overflow.
        if offset + math.prod(max(length, 1) for length in shape) * itemsize > limit:
            raise ProtocolError(f"tensors of a message exceed {limit} bytes")
        num_bytes = math.prod(shape) * itemsize
        specs.append(_TensorSpec(DTYPES[name], tuple(shape), num_bytes))
        offset = _next_offset(offset + num_bytes)
    return specs


def _next_offset(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _write_fully(fd: int, data: memoryview, offset: int) -> None:
    view = data.cast("B")
    done = 0
    while done < len(view):
        try:
            done += os.pwrite(fd, view[done:], offset + done)
        except OSError as err:
            if err.errno != errno.EFBIG:
                raise
            raise MessageTooLargeError(f"{len(view)} bytes exceed the file size limit of this process") from err


def _refuse_constant(name: str) -> float:
    raise ProtocolError(f"message header holds {name}")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ProtocolError(f"message header holds the non-finite number {text[:40]}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ProtocolError("message header repeats a key")
    return result


def _check_values(root: object) -> None:
    stack: list[tuple[object, int]] = [(root, 0)]
    seen = 0
    while stack:
        value, depth = stack.pop()
        seen += 1
        if depth > MAX_DEPTH or seen > MAX_VALUES:
            raise ProtocolError("message header is nested too deep or holds too many values")
        if isinstance(value, str):
            _check_text(value)
        elif isinstance(value, dict):
            for key in value:
                _check_text(key)
            stack.extend((child, depth + 1) for child in value.values())
        elif isinstance(value, list):
            stack.extend((child, depth + 1) for child in value)


def _check_text(text: str) -> None:
    # Lone surrogates survive JSON escapes and would fail later, when a log or the ledger encodes them.
    if not text.isascii() and any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ProtocolError("message header holds a lone surrogate")
