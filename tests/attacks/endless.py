"""Programs without an end: each is over at its limit, with everything that it started."""

from __future__ import annotations

from evaluators.results import Outcome
from tests.attacks.attack import PRELUDE, Attack, program

THEME = "endless"


def _endless(name: str, what: str, body: str, *, quick: bool = False, escapes: bool = False, harm: str = "") -> Attack:
    return Attack(
        name=name,
        theme=THEME,
        property=f"{what} ends at the time limit",
        source=program(body),
        outcomes=(Outcome.TIMED_OUT,),
        pace="hasty",
        quick=quick,
        needs_isolation=escapes,
        harm=harm,
    )


ATTACKS = (
    _endless("loop", "a loop in Python", "while True:\n    pass\n"),
    _endless("sleep_in_c", "a sleep inside C that holds the interpreter's lock", """
        import ctypes
        ctypes.PyDLL(None).sleep(1000)
    """),
    _endless("loop_in_c", "a regular expression that needs exponential time", """
        import re
        re.match("(a*)*b", "a" * 64)
    """),
    _endless("ignored_signals", "a program that ignores and blocks every signal", """
        import signal
        for number in range(1, 65):
            tried(lambda: signal.signal(number, signal.SIG_IGN))
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
        while True:
            time.sleep(1)
    """, quick=True),
    _endless("stopped", "a program that stops itself", """
        import signal
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
    """),
    _endless("daemon", "a daemon in a session of its own", """
        if os.fork() == 0:
            os.setsid()
            while True:
                time.sleep(1)
        time.sleep(1000)
    """),
    _endless("double_fork", "a program that forked twice and changed what it runs", """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execve(sys.executable, ["python", "-ISc", "import time; time.sleep(1000)"], {})
            os._exit(0)
        time.sleep(1000)
    """, escapes=True),
    _endless("fleeing_process", "a process that forks and exits before it can be found", """
        if os.fork() == 0:
            os.setsid()
            while True:
                if os.fork():
                    os._exit(0)
        while True:
            time.sleep(1)
    """, harm="a process that cannot be caught by its id"),
    _endless("half_a_message", "a program that sends half a message", """
        session._channel._socket.sendall(b"\\x10\\0")
        time.sleep(1000)
    """),
    _endless("unread_replies", "a program that floods the channel with calls and reads no reply", """
        import json, struct
        text = json.dumps({"body": {"op": "weight", "args": {"layer": "blocks.0.q"}}, "tensors": []}).encode()
        while True:
            session._channel._socket.sendall((struct.pack("<I", len(text)) + text) * 100)
    """),
    Attack(
        name="endless_import",
        theme=THEME,
        property="a program that never gets to quantize ends at the time limit",
        source=PRELUDE + "while True:\n    time.sleep(0.01)\n",
        outcomes=(Outcome.TIMED_OUT,),
        pace="hasty",
    ),
    Attack(
        name="daemon_of_a_finished_program",
        theme=THEME,
        property="a daemon does not outlive the program that finished",
        source=program("""
            import subprocess
            subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(1000)"], start_new_session=True, env={})
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(1000)
                os._exit(0)
            honest(session)
        """),
        outcomes=(Outcome.SCORED,),
        scores_as_honest=True,
        quick=True,
        needs_isolation=True,
    ),
)  # fmt: skip
