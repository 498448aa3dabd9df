"""From a message's op and arguments to a method of the session server, and back to a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from evaluators.errors import ContractError
from evaluators.wire import decode_install, encode_hello, encode_value

if TYPE_CHECKING:
    from evaluators.session_server import SessionServer


def serve_call(
    server: SessionServer, op: str, args: dict[str, Any], tensors: Sequence[Tensor]
) -> tuple[dict[str, Any], list[Tensor]]:
    """Serve one request that `wire.check_request` has passed.

    Returns:
        The reply as JSON, and the tensors that go with it.

    Raises:
        ContractError, ProgramError: as the server's methods.
        ProtocolError: an install whose description no honest client sends.
    """
    if op == "hello":
        server.count_call()
        return encode_hello(server.hello()), []
    if op == "weight":
        return {}, [server.weight(args["layer"])]
    if op in ("inputs", "second_moment"):
        measure = server.inputs if op == "inputs" else server.second_moment
        return {}, [measure(args["group"], stream=args["stream"], max_tokens=args["max_tokens"])]
    if op == "gate_loss":
        return encode_value(server.gate_loss()), []
    if op == "fold":
        server.fold(args["site"], tensors[0])
        return {}, []
    if op == "log":
        server.log(args["message"])
        return {}, []
    try:
        given = decode_install(args, tensors)
    except ContractError:
        server.count_call()
        raise
    serve = server.install if op == "install" else server.output_error
    value = serve(
        args["layer"],
        given.weight,
        transform=given.transform,
        activation=given.activation,
        low_rank=given.low_rank,
    )
    return ({} if value is None else encode_value(value)), []
