from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import ProposerError, ReplyProblem, TruncatedReply
from forge.proposers.base import ProposalRequest, Proposer
from forge.proposers.openai_answers import Answer, Failure, Kind, classify, read_answer
from forge.proposers.openai_client import ClientSettings, OpenAIProposer
from forge.recipe import LanguageModel
from forge.replies import parse_proposal

KEY = "sk-secret-0123456789"
Step = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Plays the next step of the server's script for every request; the last step repeats."""

    server: ScriptedServer

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(length))
        self.server.requests.append(
            {"path": self.path, "headers": {name.lower(): value for name, value in self.headers.items()}, "body": body}
        )
        step = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        try:
            step(self)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, data: object, **headers: str) -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-type", headers.pop("content_type", "application/json"))
        self.send_header("content-length", headers.pop("length", str(len(body))))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Step] = []
        self.requests: list[dict[str, Any]] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield scripted
    scripted.released.set()
    scripted.shutdown()
    scripted.server_close()


@pytest.fixture(autouse=True)
def no_real_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            raise AssertionError(f"a test tried to reach {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


def say(text: object = "hello", *, finish_reason: str = "stop", **extra: object) -> Step:
    data = {
        "model": "served-model",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7},
        **extra,
    }
    return lambda handler: handler.answer(200, data)


def fail(status: int, message: str = "no", *, code: str = "", param: str = "", **headers: str) -> Step:
    error = {"message": message, "code": code, "param": param}
    return lambda handler: handler.answer(status, {"error": error}, **headers)


class Waits(list[float]):
    """A clock that real time moves, and sleeps that only move the clock."""

    def sleep(self, seconds: float) -> None:
        self.append(seconds)

    def clock(self) -> float:
        return time.monotonic() + sum(self)


def proposer(server: ScriptedServer, waits: Waits | None = None, *, url: str = "", **settings: Any) -> OpenAIProposer:
    waits = Waits() if waits is None else waits
    return OpenAIProposer(
        ClientSettings(model="m1", **settings),
        environment={"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": url or server.url},
        sleep=waits.sleep,
        clock=waits.clock,
    )


def test_an_answer_comes_with_its_model_tokens_and_finish_reason(server: ScriptedServer) -> None:
    server.script = [say("text")]
    client = proposer(server, prompt_price=1.0, completion_price=2.0)
    request = ProposalRequest(prompt="ask", turn=0, incumbent_source="", mechanisms=())
    reply = client.propose(request)
    assert isinstance(client, Proposer)
    assert (reply.text, reply.model, reply.finish_reason, reply.calls) == ("text", "served-model", "stop", 1)
    assert (reply.prompt_tokens, reply.completion_tokens) == (11, 7)
    assert reply.cost == pytest.approx((11 + 2 * 7) / 1e6)
    (sent,) = server.requests
    assert sent["path"] == "/v1/chat/completions"
    assert sent["body"] == {"model": "m1", "messages": [{"role": "user", "content": "ask"}], "max_tokens": 16384}
    assert sent["headers"]["authorization"] == f"Bearer {KEY}"


def test_unknown_price_and_counts_stay_unknown(server: ScriptedServer) -> None:
    server.script = [say(usage=None)]
    reply = proposer(server, prompt_price=1.0, completion_price=1.0).complete("ask")
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cost) == (None, None, None)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (fail(401, "Incorrect API key provided"), "refuses the key"),
        (fail(403, "forbidden"), "refuses the key"),
        (fail(404, "The model `m1` does not exist", code="model_not_found"), r"does not know the model 'm1'"),
        (fail(400, "Unknown model m1"), "does not know the model"),
        (fail(429, "You exceeded your quota", code="insufficient_quota"), "no credit left"),
        (fail(400, "maximum context length is 8192 tokens, max_tokens asks more"), "does not fit the model"),
        (fail(400, "messages: unexpected field"), "refuses the request"),
    ],
)
def test_what_the_user_must_mend_stops_at_once(server: ScriptedServer, step: Step, words: str) -> None:
    server.script = [step]
    waits = Waits()
    with pytest.raises(ProposerError, match=words):
        proposer(server, waits).complete("ask")
    assert len(server.requests) == 1
    assert waits == []


def test_retry_after_is_honoured(server: ScriptedServer) -> None:
    server.script = [fail(429, "slow down", retry_after="7"), fail(429, retry_after_ms="1500"), say()]
    waits = Waits()
    told: list[str] = []
    client = proposer(server, waits)
    client._on_wait = told.append
    assert client.complete("ask").calls == 3
    assert waits == [7.0, 1.5]
    assert "attempt 2 of 8 in 7.0 s" in told[0]


def test_a_wait_beyond_the_deadline_is_not_begun(server: ScriptedServer) -> None:
    server.script = [fail(429, "slow down", retry_after="3600")]
    waits = Waits()
    with pytest.raises(ProposerError, match=r"wait 3600 s, which is beyond the deadline"):
        proposer(server, waits).complete("ask")
    assert waits == []


def test_a_burst_of_server_errors_passes(server: ScriptedServer) -> None:
    server.script = [fail(500), fail(502), fail(503), say("at last")]
    waits = Waits()
    reply = proposer(server, waits).complete("ask")
    assert (reply.text, reply.calls) == ("at last", 4)
    assert waits == sorted(waits)
    assert 0.5 < waits[0] < 1.5


def test_a_server_that_stays_down_ends_within_the_attempts(server: ScriptedServer) -> None:
    server.script = [fail(500, "boom")]
    with pytest.raises(ProposerError, match=r"no answer in 4 attempts .*status 500: boom.*resume the run"):
        proposer(server, max_attempts=4).complete("ask")
    assert len(server.requests) == 4


def test_refused_parameters_are_changed_once_and_remembered(server: ScriptedServer) -> None:
    server.script = [
        fail(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", param="max_tokens"),
        fail(400, "Unsupported value: 'temperature' does not support 0.2 with this model.", param="temperature"),
        say(),
    ]
    client = proposer(server, temperature=0.2)
    assert client.complete("ask").calls == 3
    assert client.complete("again").calls == 1
    bodies = [set(request["body"]) - {"model", "messages"} for request in server.requests]
    assert bodies == [
        {"max_tokens", "temperature"},
        {"max_completion_tokens", "temperature"},
        {"max_completion_tokens"},
        {"max_completion_tokens"},
    ]


def test_a_server_that_refuses_everything_does_not_loop(server: ScriptedServer) -> None:
    server.script = [fail(400, "bad max_tokens max_completion_tokens temperature")]
    with pytest.raises(ProposerError, match="refuses the request"):
        proposer(server, temperature=1.0).complete("ask")
    assert len(server.requests) == 4


@pytest.mark.parametrize("suffix", ["", "/", "/v1/", "/v1/chat/completions"])
def test_the_base_url_may_be_written_as_users_write_it(server: ScriptedServer, suffix: str) -> None:
    def step(handler: Handler) -> None:
        right = handler.path == "/v1/chat/completions"
        (say("found") if right else fail(404, "Not Found"))(handler)

    server.script = [step]
    client = proposer(server, url=server.url.removesuffix("/v1") + suffix)
    assert client.complete("ask").text == "found"
    assert client.complete("again").calls == 1


def test_a_wrong_address_is_told_with_its_repair(server: ScriptedServer) -> None:
    server.script = [fail(404, "Not Found")]
    with pytest.raises(ProposerError, match=r"no /chat/completions at http://127.*mend OPENAI_BASE_URL"):
        proposer(server).complete("ask")
    server.script = [lambda handler: handler.answer(200, b"<html>hi</html>", content_type="text/html")]
    with pytest.raises(ProposerError, match="no /chat/completions"):
        proposer(server).complete("ask")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "b"}], "b"),
        (["a", "b"], "ab"),
        ([{"type": "output_text", "text": {"value": "v"}}], "v"),
        ([{"type": "image_url"}, 5, None], ""),
        (None, ""),
        (5, ""),
    ],
)
def test_content_of_any_shape_is_read(server: ScriptedServer, content: object, text: str) -> None:
    server.script = [say(content)]
    assert proposer(server).complete("ask").text == text


def test_empty_and_cut_answers_are_paid_for_and_typed_by_the_parser(server: ScriptedServer) -> None:
    server.script = [say("", finish_reason="length"), say("## Mechanisms\nno", finish_reason="length"), say(None)]
    client = proposer(server)
    for kind in (TruncatedReply, TruncatedReply, ReplyProblem):
        reply = client.complete("ask")
        assert reply.completion_tokens == 7
        with pytest.raises(kind):
            parse_proposal(reply.text, finish_reason=reply.finish_reason)


def test_a_hanging_server_ends_at_the_deadline(server: ScriptedServer) -> None:
    def hang(handler: Handler) -> None:
        server.released.wait(20)

    server.script = [hang]
    start = time.monotonic()
    with pytest.raises(ProposerError, match="no answer"):
        proposer(server, request_timeout_s=0.3, deadline_s=1.0).complete("ask")
    assert time.monotonic() - start < 5


def test_a_dripping_server_ends_at_the_deadline(server: ScriptedServer) -> None:
    def drip(handler: Handler) -> None:  # never silent for long, never done
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", "100000")
        handler.end_headers()
        while not server.released.wait(0.05):
            handler.wfile.write(b" " * 100)
            handler.wfile.flush()

    server.script = [drip]
    start = time.monotonic()
    with pytest.raises(ProposerError, match=r"deadline"):
        proposer(server, request_timeout_s=5.0, deadline_s=0.6, max_attempts=2).complete("ask")
    assert time.monotonic() - start < 5


def test_cut_and_broken_bodies_are_tried_again(server: ScriptedServer) -> None:
    server.script = [
        lambda handler: handler.answer(200, b'{"choices": [', length="500"),
        lambda handler: handler.answer(200, b'{"choices": ['),
        lambda handler: handler.answer(200, {"error": {"code": 429, "message": "upstream is busy"}}),
        lambda handler: handler.connection.close(),
        say("whole"),
    ]
    reply = proposer(server).complete("ask")
    assert (reply.text, reply.calls) == ("whole", 5)


def test_a_huge_answer_is_not_read_to_its_end(server: ScriptedServer) -> None:
    def huge(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.end_headers()
        for _ in range(64):
            handler.wfile.write(b" " * (1 << 20))

    server.script = [huge]
    with pytest.raises(ProposerError, match="exceeds 8388608 bytes"):
        proposer(server, max_attempts=1).complete("ask")


def test_nobody_listening_is_no_crash() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    waits = Waits()
    client = OpenAIProposer(
        ClientSettings(model="m1", max_attempts=2),
        environment={"OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1"},
        sleep=waits.sleep,
        clock=waits.clock,
    )
    with pytest.raises(ProposerError, match="no connection"):
        client.complete("ask")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "OPENAI_API_KEY is not set"),
        ({"OPENAI_API_KEY": "  "}, "OPENAI_API_KEY is not set"),
        ({"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": "localhost:8080"}, "OPENAI_BASE_URL is no address"),
    ],
)
def test_a_missing_key_or_address_is_told_before_any_call(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ProposerError, match=words):
        OpenAIProposer(ClientSettings(model="m1"), environment=environment)


def test_the_key_reaches_nothing_but_the_header(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    server.script = [fail(500, f"echo {KEY}"), fail(401, f"Incorrect API key: {KEY}")]
    url = server.url.replace("http://", "http://user:hunter2@") + "?token=hunter2"
    told: list[str] = []
    client = proposer(server, url=url)
    client._on_wait = told.append
    with pytest.raises(ProposerError) as info:
        client.complete("ask")
    server.script = [say()]
    reply = proposer(server).complete("ask")
    shown = " ".join([str(info.value), repr(client), client.label, *told, caplog.text, *capsys.readouterr()])
    shown += json.dumps(dataclasses.asdict(reply))
    assert KEY not in shown
    assert "hunter2" not in shown.replace(caplog.text, "")


@given(
    st.binary(max_size=200)
    | st.recursive(st.none() | st.integers() | st.text(max_size=8), st.lists).map(json.dumps).map(str.encode)
)
def test_any_body_is_an_answer_or_a_failure(body: bytes) -> None:
    assert isinstance(read_answer(body, "application/json"), Answer | Failure)


@given(
    st.integers(400, 599),
    st.recursive(
        st.none() | st.text(max_size=8),
        lambda c: st.dictionaries(st.sampled_from(["error", "message", "code", "param", "type"]), c),
    ),
)
def test_any_error_is_sorted(status: int, body: object) -> None:
    failure = classify(status, body, model="m1")
    assert failure.kind in Kind
    assert str(status) in failure.message


def test_a_recipe_names_model_and_variables_and_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", KEY)
    client = OpenAIProposer.from_recipe(LanguageModel(model="m1", key_env="OTHER_KEY"))
    assert client.label == "language model m1 at https://api.openai.com/v1"
    monkeypatch.delenv("OTHER_KEY")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ProposerError, match="OTHER_KEY is not set"):
        OpenAIProposer.from_recipe(LanguageModel(model="m1", key_env="OTHER_KEY"))
    with pytest.raises(ProposerError, match="needs the name of a model"):
        OpenAIProposer.from_recipe(LanguageModel())
