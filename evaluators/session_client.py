"""The Session that a program holds inside the sandbox: every call is one message to the evaluator.

Nothing here is trusted: the program shares this process and may change it at will. It only turns calls into messages;
the evaluator checks each of them and keeps the log that counts. Replies are copies, so changing a returned tensor
changes nothing elsewhere.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from evaluators.errors import ContractError
from evaluators.random_streams import keyed_generator
from evaluators.session import Group, Layer, Session, Site, Stream
from evaluators.transport import Channel, Message, MessageTooLargeError
from evaluators.wire import MAX_LOG_MESSAGE, STREAMS, decode_hello, decode_value, encode_install
from forge_kernels.rules import ActivationRule, Encoded, LowRank
from forge_kernels.transforms import IDENTITY, Transform


class RemoteSession(Session):
    """Serves a program over a channel; construction asks the evaluator what the session is about."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        hello = decode_hello(self._call("hello").body)
        self.layers = hello.layers
        self.groups = hello.groups
        self.sites = hello.sites
        self.device = torch.device(hello.device)
        self._seed = hello.seed

    def weight(self, layer: Layer | str) -> Tensor:
        """See `Session.weight`."""
        return self._tensor(self._call("weight", layer=_name(layer)))

    def inputs(self, group: Group | str, *, stream: Stream = "quantized", max_tokens: int | None = None) -> Tensor:
        """See `Session.inputs`."""
        return self._tensor(self._call("inputs", **_measure_arguments(group, stream, max_tokens)))

    def second_moment(
        self, group: Group | str, *, stream: Stream = "quantized", max_tokens: int | None = None
    ) -> Tensor:
        """See `Session.second_moment`."""
        return self._tensor(self._call("second_moment", **_measure_arguments(group, stream, max_tokens)))

    def output_error(
        self,
        layer: Layer | str,
        weight: Encoded,
        *,
        transform: Transform = IDENTITY,
        activation: ActivationRule | None = None,
        low_rank: LowRank | None = None,
    ) -> float:
        """See `Session.output_error`."""
        arguments, tensors = encode_install(weight, transform=transform, activation=activation, low_rank=low_rank)
        return decode_value(self._call("output_error", tensors, layer=_name(layer), **arguments).body)

    def gate_loss(self) -> float:
        """See `Session.gate_loss`."""
        return decode_value(self._call("gate_loss").body)

    def fold(self, site: Site | str, matrix: Tensor) -> None:
        """See `Session.fold`."""
        if not isinstance(matrix, Tensor):
            raise ContractError(f"matrix of a fold is {type(matrix).__name__}, not a tensor")
        self._call("fold", [matrix], site=_name(site))

    def install(
        self,
        layer: Layer | str,
        weight: Encoded,
        *,
        transform: Transform = IDENTITY,
        activation: ActivationRule | None = None,
        low_rank: LowRank | None = None,
    ) -> None:
        """See `Session.install`."""
        arguments, tensors = encode_install(weight, transform=transform, activation=activation, low_rank=low_rank)
        self._call("install", tensors, layer=_name(layer), **arguments)

    def rng(self, layer: Layer | Group | str, purpose: str) -> torch.Generator:
        """See `Session.rng`."""
        return keyed_generator(self._seed, _name(layer), purpose)

    def log(self, message: str) -> None:
        """See `Session.log`."""
        text = str(message)[:MAX_LOG_MESSAGE].encode("utf-8", "replace").decode("utf-8")
        self._call("log", message=text)

    def _call(self, op: str, tensors: list[Tensor] | None = None, **arguments: Any) -> Message:
        with self._lock:
            try:
                self._channel.send({"op": op, "args": arguments}, tensors or [])
            except MessageTooLargeError as err:
                raise ContractError(f"{op}: {err}") from err
            reply = self._channel.receive()
        if "error" in reply.body:
            raise ContractError(reply.body["error"]["message"])
        return reply

    def _tensor(self, reply: Message) -> Tensor:
        (tensor,) = reply.tensors
        return tensor.to(self.device)


def _name(named: object) -> str:
    name = named if isinstance(named, str) else getattr(named, "name", None)
    if not isinstance(name, str):
        raise ContractError(f"{type(named).__name__} is not a layer, group or site, nor the name of one")
    return name


def _measure_arguments(group: Group | str, stream: str, max_tokens: int | None) -> dict[str, Any]:
    if stream not in STREAMS:
        raise ContractError(f"unknown stream {stream!r}; known: {', '.join(STREAMS)}")
    if max_tokens is not None:
        if not isinstance(max_tokens, int) or max_tokens <= 0:
            raise ContractError(f"max_tokens={max_tokens!r} is not a positive int")
        max_tokens = int(max_tokens)
    return {"group": _name(group), "stream": stream, "max_tokens": max_tokens}
