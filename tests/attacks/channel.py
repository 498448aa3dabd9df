"""A hostile peer on the Session socket: it speaks the protocol itself, and wrongly."""

from __future__ import annotations

import torch

from evaluators.evaluator import Evaluator
from evaluators.results import EvaluationResult, Outcome
from tests.attacks.attack import Attack, program
from tests.attacks.world import World

THEME = "channel"
SCORED = (Outcome.SCORED,)
CONTRACT = (Outcome.CONTRACT,)

RAW = """
import fcntl, json, mmap, socket, struct
def frame(body, tensors=()):
    text = json.dumps({"body": body, "tensors": list(tensors)}).encode()
    return struct.pack("<I", len(text)) + text
def request(op, tensors=(), **args):
    return frame({"op": op, "args": args}, tensors)
"""
INSTALL = '"install", layer="blocks.0.q", transform=[], activation={"scale_rule": "even", "code_rule": "nearest"}, low_rank=False'


def _codes_are_legal(world: World, evaluator: Evaluator, result: EvaluationResult) -> list[str]:
    if result.artifact_hash is None:
        return []
    problems = []
    for name, install in evaluator.load_artifact(result.artifact_hash).installs.items():
        codes, scales = install.weight.codes_NK, install.weight.scales_NB
        if int(codes.max()) > 15 or bool((codes == 8).any()) or int(scales.max()) == 255:
            problems.append(f"{name} holds codes {torch.unique(codes).tolist()}, scales up to {int(scales.max())}")
    return problems


def _raw(name: str, what: str, body: str, reason: str = "", *, quick: bool = False) -> Attack:
    return Attack(
        name=name,
        theme=THEME,
        property=f"{what} end the run as an offence against the protocol",
        source=program(body, head=RAW),
        outcomes=CONTRACT,
        reason=reason,
        quick=quick,
    )


def _each_in_turn(name: str, what: str, cases: str, *, quick: bool = False) -> Attack:
    """Every case is refused as a mistake that a program may go on from, and changes nothing."""
    return Attack(
        name=name,
        theme=THEME,
        property=f"{what} are refused, and change nothing",
        source=program(
            "honest(session)\n"
            + cases
            + """
for number, (tensors, arguments) in enumerate(CASES):
    with mmap.mmap(session._channel.outgoing.fd, 1 << 20) as arena:
        arena[:] = bytes([7]) * len(arena)
    session._channel._socket.sendall(request(*arguments[0], tensors=tensors, **arguments[1]))
    reply = session._channel.receive()
    if "error" not in reply.body:
        session.log(f"case {number} passed")
""",
            head=RAW,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [result.program_log] if "passed" in result.program_log else [],
        quick=quick,
    )


ATTACKS = (
    _raw("wrong_length", "lengths beyond the limit", """
        honest(session)
        session._channel._socket.sendall(struct.pack("<I", 0xFFFFFFFF) + b"x" * 1000)
        time.sleep(1000)
    """, "bytes announced"),
    _raw("no_header", "headers that are no JSON object of the right form", r"""
        session._channel._socket.sendall(struct.pack("<I", 4) + b"\xff\xfe[]")
        time.sleep(1000)
    """, "not JSON"),
    _raw("json_bomb", "headers that are nested deep, hold huge numbers, NaN or repeated keys", """
        bombs = (b"[" * 500_000 + b"]" * 500_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"1" * 1_000_000)
        text = b'{"body": {"op": ' + bombs[int.from_bytes(os.urandom(1), "big") % 3] + b'}, "tensors": []}'
        session._channel._socket.sendall(struct.pack("<I", len(text)) + text)
        time.sleep(1000)
    """),
    _raw("unknown_calls", "calls that do not exist, however much they sound like ours", """
        for op in ("score", "search", "tokens", "evaluate", "exec", "__class__", "finish", "dispatch"):
            session._channel._socket.sendall(request(op))
            session._channel.receive()
    """, "unknown op"),
    _raw("surplus_arguments", "arguments that a call does not have", """
        session._channel._socket.sendall(request("inputs", group="blocks.0.qkv", stream="search", max_tokens=None))
        time.sleep(1000)
    """, "stream of inputs"),
    _raw("absurd_shapes", "tensors of absurd shape, with negative, overflowing, fractional or too many lengths", """
        shapes = ([1 << 62, 4], [-1, 64], [1 << 31, 1 << 31, 0], [2.5], ["64"], [True, True], [1] * 9, [[64]], None, [1 << 29])
        shape = shapes[int.from_bytes(os.urandom(1), "big") % len(shapes)]
        tensors = [{"dtype": "uint8", "shape": shape}] * 2
        session._channel._socket.sendall(request(@INSTALL@, tensors=tensors))
        time.sleep(1000)
    """.replace("@INSTALL@", INSTALL)),
    _raw("unwritten_tensors", "tensors whose bytes were never written", """
        tensors = [{"dtype": "uint8", "shape": [1 << 28]}, {"dtype": "uint8", "shape": [1 << 28]}]
        session._channel._socket.sendall(request(@INSTALL@, tensors=tensors))
        time.sleep(1000)
    """.replace("@INSTALL@", INSTALL), "not that many bytes were written"),
    _raw("too_many_tensors", "more tensors than a call has", """
        tensors = [{"dtype": "uint8", "shape": [0]}] * 100_000
        session._channel._socket.sendall(request(@INSTALL@, tensors=tensors[:15_000]))
        time.sleep(1000)
    """.replace("@INSTALL@", INSTALL)),
    _each_in_turn("lying_dtypes", "tensors of another dtype or shape than they should have", """
rule = {"scale_rule": "even", "code_rule": "nearest"}
plain = dict(layer="blocks.0.q", transform=[], activation=rule, low_rank=False)
def two(*given):
    return [{"dtype": dtype, "shape": shape} for dtype, shape in given]
codes, scales = ("uint8", [128, 64]), ("uint8", [128, 2])
CASES = [
    (two(("float32", [128, 64]), scales), (["install"], plain)),
    (two(("int8", [128, 64]), scales), (["install"], plain)),
    (two(("bool", [128, 64]), scales), (["install"], plain)),
    (two(("float64", [64, 16]), scales), (["install"], plain)),
    (two(("uint8", [64, 128]), scales), (["install"], plain)),
    (two(("uint8", [0, 64]), scales), (["install"], plain)),
    (two(codes, ("uint8", [128, 0])), (["install"], plain)),
    (two(codes, ("int64", [128, 2])), (["install"], plain)),
    (two(codes, scales, ("int64", [64])), (["install"], plain | {"transform": [{"kind": "permutation"}]})),
    (two(codes, scales, ("uint8", [64])), (["install"], plain | {"transform": [{"kind": "permutation"}]})),
    (two(codes, scales, ("float64", [64])), (["install"], plain | {"transform": [{"kind": "diagonal"}]})),
    (two(codes, scales, ("float32", [65])), (["install"], plain | {"transform": [{"kind": "diagonal"}]})),
    (two(codes, scales), (["install"], plain | {"activation": rule | {"scale_rule": "table"}})),
    (two(codes, scales), (["install"], plain | {"activation": rule | {"code_rule": ["reference"]}})),
    (two(codes, scales), (["install"], plain | {"layer": "blocks.0.q/../../blocks.1.q"})),
    (two(("uint8", [64])), (["fold"], {"site": "blocks.0.up_down_permutation"})),
    (two(("bool", [96])), (["fold"], {"site": "blocks.0.up_down_permutation"})),
    (two(("int64", [96])), (["fold"], {"site": "blocks.0.up_down_diagonal"})),
]
"""),
    Attack(
        name="changed_after_sending",
        theme=THEME,
        property="what a program changes in the shared memory while it is read is either refused or legal: never half checked",
        source=program("""
            import mmap
            from evaluators.errors import ContractError
            codes = {layer.name: encode(session.weight(layer)) for layer in session.layers}
            if os.fork() == 0:
                arena = mmap.mmap(session._channel.outgoing.fd, 1 << 16)
                while True:
                    arena[::7] = b"\\xff" * len(arena[::7])
                    arena[::7] = b"\\x03" * len(arena[::7])
            begin, refused = time.time(), 0
            while time.time() - begin < 3:
                for name, encoded in codes.items():
                    try:
                        session.install(name, encoded)
                    except ContractError:
                        refused += 1
            print("refused", refused)
        """),
        outcomes=(Outcome.SCORED, Outcome.CONTRACT),
        check=_codes_are_legal,
        quick=True,
    ),
    Attack(
        name="flags_of_the_arena",
        theme=THEME,
        property="flags, seals, holes, leases and lengths that a program sets on the shared memory do not reach the evaluator",
        source=program("""
            import ctypes
            for arena in (session._channel.incoming, session._channel.outgoing):
                for flags in (os.O_APPEND, os.O_DIRECT, os.O_NONBLOCK | os.O_ASYNC, os.O_APPEND | os.O_NOATIME):
                    tried(lambda: fcntl.fcntl(arena.fd, fcntl.F_SETFL, flags))
                for seal in (fcntl.F_SEAL_WRITE, fcntl.F_SEAL_GROW, 16):
                    tried(lambda: fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, seal))
                tried(lambda: fcntl.fcntl(arena.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK))
                tried(lambda: fcntl.flock(arena.fd, fcntl.LOCK_EX))
                tried(lambda: os.ftruncate(arena.fd, 0))
                tried(lambda: os.fchmod(arena.fd, 0))
                ctypes.CDLL(None).fallocate(arena.fd, 3, ctypes.c_long(0), ctypes.c_long(1 << 29))
                os.lseek(arena.fd, 12345, 0)
            fcntl.fcntl(session._channel.outgoing.fd, fcntl.F_SETFL, 0)
            honest(session)
            assert session.weight("blocks.0.q").shape == (128, 64)
        """, head=RAW),
        outcomes=SCORED,
        scores_as_honest=True,
        quick=True,
    ),
    Attack(
        name="descriptors_in_flight",
        theme=THEME,
        property="descriptors attached to messages are not received, nor do they stay open",
        source=program("""
            with open("/dev/null") as file:
                for _ in range(100):
                    data = request("log", message="x")
                    way = session._channel._socket
                    if isinstance(tried(lambda: socket.send_fds(way, [data], [file.fileno()] * 50)), OSError):
                        way.sendall(data)
                    session._channel.receive()
            honest(session)
        """, head=RAW),
        outcomes=SCORED,
        scores_as_honest=True,
    ),
    Attack(
        name="urgent_data",
        theme=THEME,
        property="out-of-band bytes in the stream end the run at worst",
        source=program("""
            for _ in range(20):
                tried(lambda: session._channel._socket.send(b"x", socket.MSG_OOB))
            honest(session)
        """, head=RAW),
        outcomes=(Outcome.SCORED, Outcome.CONTRACT, Outcome.CRASHED),
    ),
    Attack(
        name="half_closed",
        theme=THEME,
        property="a program that closes its end of the channel has not finished",
        source=program("""
            honest(session)
            session._channel._socket.shutdown(socket.SHUT_RDWR)
            time.sleep(1000)
        """, head=RAW),
        outcomes=CONTRACT,
        reason="closed its session",
    ),
    Attack(
        name="two_speakers",
        theme=THEME,
        property="processes that speak at once on one channel end their own run at worst",
        source=program("""
            for _ in range(3):
                if os.fork() == 0:
                    while True:
                        session._channel._socket.sendall(request("weight", layer="blocks.1.down"))
            for _ in range(300):
                session.second_moment("blocks.0.qkv")
        """, head=RAW),
        outcomes=(Outcome.CONTRACT, Outcome.CRASHED, Outcome.TIMED_OUT),
        pace="hasty",
    ),
    Attack(
        name="flood_of_calls",
        theme=THEME,
        property="calls beyond the contract's limit end the run",
        source=program("""
            flood = request("log", message="") * 500
            while True:
                session._channel._socket.sendall(flood)
                for _ in range(500):
                    session._channel.receive()
        """, head=RAW),
        outcomes=CONTRACT,
        reason="session calls",
    ),
    Attack(
        name="out_of_order",
        theme=THEME,
        property="calls in any order, repeated greetings and installs after measurements give no program more than an honest one",
        source=program("""
            for _ in range(3):
                session._channel._socket.sendall(request("hello"))
                session._channel.receive()
            for layer in reversed(session.layers):
                session.install(layer, encode(session.weight(layer) * 0))
            session.gate_loss()
            honest(session)
            session._channel._socket.sendall(request("hello"))
            session._channel.receive()
        """, head=RAW),
        outcomes=SCORED,
        scores_as_honest=True,
    ),
)  # fmt: skip
