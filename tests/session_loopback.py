"""Programs run in this process, through the client and the wire format but without a worker: fast, for tests only."""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from evaluators.errors import ProgramError
from evaluators.results import Outcome
from evaluators.session_client import RemoteSession
from evaluators.session_server import SessionServer
from evaluators.transport import Message
from evaluators.worker_host import WorkerReport


class LoopbackChannel:
    """Answers what is sent by calling the server, with JSON text and copied tensors in between."""

    def __init__(self, server: SessionServer) -> None:
        self._server = server
        self._reply: Message | None = None

    def send(self, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        request = json.loads(json.dumps(body))
        reply, reply_tensors = self._server.dispatch(request["op"], request["args"], [t.clone() for t in tensors])
        self._reply = Message(json.loads(json.dumps(reply, allow_nan=False)), [t.clone() for t in reply_tensors])

    def receive(self) -> Message:
        assert self._reply is not None
        return self._reply


def open_loopback(server: SessionServer) -> RemoteSession:
    return RemoteSession(LoopbackChannel(server))  # type: ignore[arg-type]


class LoopbackHost:
    """Takes the place of a `WorkerHost`."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def prestart(self) -> None: ...

    def close(self) -> None: ...

    def run(self, source: str, server: SessionServer, *, seed: int = 0, count_lines: bool = False) -> WorkerReport:
        outcome, reason = None, ""
        module = types.ModuleType("program")
        try:
            exec(source, module.__dict__)
            module.quantize(open_loopback(server))
        except ProgramError as error:
            outcome, reason = error.outcome, str(error)
        except Exception as error:
            outcome, reason = Outcome.CRASHED, f"{type(error).__name__}: {error}"
        return WorkerReport(outcome=outcome, reason=reason, log_tail="walking\n", wall_s=0.0)
