"""The channel between evaluator and worker: honest messages arrive whole, hostile ones end as ProtocolError."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evaluators.results import Outcome
from evaluators.transport import (
    DTYPES,
    MAX_TENSORS,
    REQUEST_LIMIT,
    Arena,
    Channel,
    ChannelClosedError,
    MessageTooLargeError,
    ProtocolError,
    connect_channel,
    open_channel,
    parse_header,
)


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    host, inherited = open_channel()
    client = connect_channel(inherited)
    yield host, client
    host.close()
    client.close()


@pytest.fixture
def hostile() -> Iterator[tuple[Channel, socket.socket, Arena]]:
    """The evaluator's end, and the bare socket and outgoing arena of a peer that speaks its own protocol."""
    host, inherited = open_channel()
    client = connect_channel(inherited)
    yield host, inherited, client.outgoing
    host.close()
    client.close()


def send_raw(peer: socket.socket, data: bytes, length: int | None = None) -> None:
    peer.sendall(struct.pack("<I", len(data) if length is None else length) + data)


def send_tensors(peer: socket.socket, tensors: object) -> None:
    send_raw(peer, json.dumps({"body": {"op": "x"}, "tensors": tensors}).encode())


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_arrives_unchanged(pair: tuple[Channel, Channel], name: str) -> None:
    host, client = pair
    tensor = torch.randint(0, 2, (3, 5, 7)).to(DTYPES[name])
    scalar, empty = torch.ones((), dtype=DTYPES[name]), torch.empty((0, 4), dtype=DTYPES[name])
    client.send({"op": "install"}, [tensor, scalar, empty, tensor.mT])
    body, received = host.receive()
    assert body == {"op": "install"}
    for sent, got in zip([tensor, scalar, empty, tensor.mT], received, strict=True):
        assert got.dtype is sent.dtype
        assert torch.equal(got, sent)


def test_special_floats_arrive_bit_for_bit(pair: tuple[Channel, Channel]) -> None:
    host, client = pair
    bits = torch.tensor([0x7FC00001, -0x400000, 0x7F800000, -0x80000000, 1], dtype=torch.int32)
    host.send({}, [bits.view(torch.float32)])
    (got,) = client.receive().tensors
    assert torch.equal(got.view(torch.int32), bits)


def test_both_directions_and_reuse_of_the_arena(pair: tuple[Channel, Channel]) -> None:
    host, client = pair
    kept = []
    for index in range(5):
        client.send({"index": index}, [torch.full((10, index + 1), float(index))])
        kept.append(host.receive().tensors[0])
        host.send({"index": index}, [torch.full((3,), index)])
        assert client.receive().tensors[0].tolist() == [index] * 3
    for index, tensor in enumerate(kept):
        assert torch.equal(tensor, torch.full((10, index + 1), float(index)))


def test_memory_of_a_large_message_is_given_back(pair: tuple[Channel, Channel]) -> None:
    host, client = pair
    host.send({}, [torch.ones(20_000_000)])
    assert host.used_bytes() >= 80_000_000
    assert client.receive().tensors[0].sum() == 20_000_000
    assert host.used_bytes() < 1_000_000


def test_what_does_not_fit_is_refused_before_anything_is_sent(pair: tuple[Channel, Channel]) -> None:
    host, client = pair
    with pytest.raises(MessageTooLargeError, match="complex64"):
        client.send({}, [torch.ones(2, dtype=torch.complex64)])
    with pytest.raises(MessageTooLargeError, match="tensors in one message"):
        client.send({}, [torch.ones(1)] * (MAX_TENSORS + 1))
    with pytest.raises(MessageTooLargeError, match="at most"):
        client.send({}, [torch.empty(1 << 30, dtype=torch.uint8)] * 2)
    with pytest.raises(MessageTooLargeError, match="header"):
        client.send({"message": "x" * (REQUEST_LIMIT + 1)})
    client.send({"op": "still usable"})
    assert host.receive().body == {"op": "still usable"}


def test_a_closed_peer_is_reported_as_closed(pair: tuple[Channel, Channel]) -> None:
    host, client = pair
    client.shutdown()
    with pytest.raises(ChannelClosedError):
        host.receive()
    with pytest.raises(ChannelClosedError):
        host.send({})


def test_shutdown_wakes_a_thread_that_waits(pair: tuple[Channel, Channel]) -> None:
    host, _ = pair
    threading.Timer(0.05, host.shutdown).start()
    with pytest.raises(ChannelClosedError):
        host.receive()


def test_a_frame_cut_off_is_closed_not_accepted(hostile: tuple[Channel, socket.socket, Arena]) -> None:
    host, peer, _ = hostile
    peer.sendall(struct.pack("<I", 100) + b'{"body"')
    peer.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ChannelClosedError):
        host.receive()


@pytest.mark.parametrize("length", [REQUEST_LIMIT + 1, 0xFFFFFFFF])
def test_an_oversized_length_is_refused_unread(hostile: tuple[Channel, socket.socket, Arena], length: int) -> None:
    host, peer, _ = hostile
    send_raw(peer, b"{}", length)
    with pytest.raises(ProtocolError, match="announced") as caught:
        host.receive()
    assert caught.value.outcome is Outcome.CONTRACT


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{",
        b'{"body": {}}',
        b'{"body": [], "tensors": []}',
        b'{"body": {}, "tensors": [], "more": 1}',
        b'{"body": {"a": NaN}, "tensors": []}',
        b'{"body": {"a": -Infinity}, "tensors": []}',
        b'{"body": {"a": 1e999}, "tensors": []}',
        b'{"body": {"a": 1, "a": 2}, "tensors": []}',
        b'{"body": {"a": "\\ud800"}, "tensors": []}',
        b'{"body": {"\\udfff": 1}, "tensors": []}',
        b'{"body": {"a": "\xed\xa0\x80"}, "tensors": []}',
        b'{"body": {"a": ' + b"1" * 5000 + b'}, "tensors": []}',
        b'{"body": {"a": ' + b"[" * 40 + b"]" * 40 + b'}, "tensors": []}',
        b'{"body": {"a": ' + b"[" * 200_000 + b'}, "tensors": []}',
        b'{"body": {"a": [' + b"0," * 200_000 + b'0]}, "tensors": []}',
    ],
    ids=lambda data: data[:40].decode("latin-1"),
)
def test_a_header_that_is_not_one_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse_header(data)


@pytest.mark.parametrize(
    "tensors",
    [
        None,
        {},
        [1],
        [{}],
        [{"dtype": "float32"}],
        [{"dtype": "float32", "shape": [1], "offset": 0}],
        [{"dtype": "complex64", "shape": [1]}],
        [{"dtype": "object", "shape": [1]}],
        [{"dtype": None, "shape": [1]}],
        [{"dtype": ["float32"], "shape": [1]}],
        [{"dtype": "float32", "shape": 4}],
        [{"dtype": "float32", "shape": [-1]}],
        [{"dtype": "float32", "shape": [-1, -4]}],
        [{"dtype": "float32", "shape": [1.0]}],
        [{"dtype": "float32", "shape": [True]}],
        [{"dtype": "float32", "shape": ["1"]}],
        [{"dtype": "float32", "shape": [1 << 62, 4]}],
        [{"dtype": "float32", "shape": [1 << 20, 1 << 20]}],
        [{"dtype": "float32", "shape": [0, 1 << 29, 1 << 29, 1 << 29]}],
        [{"dtype": "float32", "shape": [1] * 9}],
        [{"dtype": "float64", "shape": [1 << 27]}, {"dtype": "uint8", "shape": [1]}],
        [{"dtype": "uint8", "shape": [1]}] * (MAX_TENSORS + 1),
        [{"dtype": "uint8", "shape": [1 << 30]}],
        [{"dtype": "float32", "shape": [2_000_000]}],
    ],
    ids=lambda tensors: str(tensors)[:60],
)
def test_absurd_tensors_are_refused(hostile: tuple[Channel, socket.socket, Arena], tensors: object) -> None:
    host, peer, arena = hostile
    os.pwrite(arena.fd, b"\0" * 4096, 0)
    send_tensors(peer, tensors)
    with pytest.raises(ProtocolError):
        host.receive()


def test_bools_are_made_of_any_byte(hostile: tuple[Channel, socket.socket, Arena]) -> None:
    host, peer, arena = hostile
    os.pwrite(arena.fd, bytes([0, 1, 2, 255]), 0)
    send_tensors(peer, [{"dtype": "bool", "shape": [4]}])
    (tensor,) = host.receive().tensors
    assert tensor.view(torch.uint8).tolist() == [0, 1, 1, 1]


def test_nobody_can_resize_an_arena(hostile: tuple[Channel, socket.socket, Arena]) -> None:
    _, _, arena = hostile
    for length in (0, 10, 1 << 31):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, length)


def test_what_the_peer_changes_later_does_not_reach_a_tensor(
    hostile: tuple[Channel, socket.socket, Arena],
) -> None:
    host, peer, arena = hostile
    os.pwrite(arena.fd, bytes([7] * 100), 0)
    send_tensors(peer, [{"dtype": "uint8", "shape": [100]}])
    (tensor,) = host.receive().tensors
    os.pwrite(arena.fd, bytes([9] * 100), 0)
    assert tensor.tolist() == [7] * 100


def test_flags_that_the_peer_sets_on_its_arenas_are_its_own(pair: tuple[Channel, Channel]) -> None:
    host, client = pair
    for arena in (client.incoming, client.outgoing):
        fcntl.fcntl(arena.fd, fcntl.F_SETFL, os.O_APPEND)
    host.send({"op": "weight"}, [torch.arange(1000)])
    assert torch.equal(client.receive().tensors[0], torch.arange(1000))
    for arena in (host.incoming, host.outgoing):
        assert not fcntl.fcntl(arena.fd, fcntl.F_GETFL) & os.O_APPEND, "the peer changed a flag of the evaluator's file"


def test_descriptors_attached_to_a_message_are_not_received(
    hostile: tuple[Channel, socket.socket, Arena],
) -> None:
    host, peer, _ = hostile
    data = json.dumps({"body": {}, "tensors": []}).encode()
    before = open_fds()
    with open("/dev/null", "rb") as file:
        for _ in range(20):
            frame = struct.pack("<I", len(data)) + data
            try:
                socket.send_fds(peer, [frame], [file.fileno()] * 50)
            except PermissionError:
                # Linux 6.16 and later lets the receiver refuse them, so that it need not even close them.
                peer.sendall(frame)
            host.receive()
    assert open_fds() == before


def test_descriptors_are_refused_where_the_kernel_can(hostile: tuple[Channel, socket.socket, Arena]) -> None:
    _, peer, _ = hostile
    release = tuple(int(number) for number in os.uname().release.split("-")[0].split(".")[:2])
    with open("/dev/null", "rb") as file:
        try:
            socket.send_fds(peer, [b"x"], [file.fileno()])
            was_refused = False
        except PermissionError:
            was_refused = True
    assert was_refused == (release >= (6, 16)), f"kernel {release}: refused {was_refused}"


def test_a_flood_waits_in_the_kernel(hostile: tuple[Channel, socket.socket, Arena]) -> None:
    host, peer, _ = hostile
    data = json.dumps({"body": {"op": "log"}, "tensors": []}).encode()
    frame = struct.pack("<I", len(data)) + data
    peer.setblocking(False)
    sent = 0
    for _ in range(1_000_000):
        try:
            sent += peer.send(frame * 100)
        except BlockingIOError:
            break
    assert 0 < sent < 8 << 20
    assert host.receive().body == {"op": "log"}


def test_channels_leave_no_descriptor_open() -> None:
    before = open_fds()
    for _ in range(5):
        host, inherited = open_channel()
        client = connect_channel(inherited)
        client.send({}, [torch.ones(3)])
        host.receive()
        host.close()
        client.close()
        host.close()
    assert open_fds() == before


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_protocol_error(data: bytes) -> None:
    try:
        body, _ = parse_header(data)
    except ProtocolError:
        return
    assert isinstance(body, dict)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_any_description_is_tensors_or_a_protocol_error(value: object) -> None:
    arena = Arena.create(1 << 16)
    try:
        os.pwrite(arena.fd, b"\0" * (1 << 16), 0)
        for description in (value, [value], [{"dtype": "uint8", "shape": value}]):
            try:
                tensors = arena.read(description)
            except ProtocolError:
                continue
            assert sum(tensor.numel() for tensor in tensors) <= 1 << 16
    finally:
        arena.close()
