"""Claiming a result, and acting after the end."""

from __future__ import annotations

from evaluators.evaluator import Evaluator
from evaluators.results import EvaluationResult, Outcome
from tests.attacks.attack import Attack, program
from tests.attacks.world import World

THEME = "endings"
SCORED = (Outcome.SCORED,)


def _nothing_late(world: World, evaluator: Evaluator, result: EvaluationResult) -> list[str]:
    expected = 2 * len(evaluator.subject.map.layers)
    problems = [] if "late" not in result.program_log else [f"it spoke after its end: {result.program_log[:200]!r}"]
    if result.outcome.is_scored and len(result.evidence.events) != expected:
        problems.append(f"{len(result.evidence.events)} events instead of {expected}")
    return problems


LATE = """
def late():
    from forge_kernels import Encoded
    worse = {layer.name: torch.zeros((layer.num_outputs, layer.num_inputs), dtype=torch.uint8) for layer in session.layers}
    while True:
        tried(lambda: session.log("late"))
        for name, codes in worse.items():
            tried(lambda: session.install(name, Encoded(codes_NK=codes, scales_NB=codes[:, ::32].clone())))
"""

ATTACKS = (
    Attack(
        name="exit_hooks",
        theme=THEME,
        property="atexit, sys.exitfunc, finalizers and daemon threads change nothing after quantize returned",
        source=program(LATE + """
import atexit, threading, weakref
atexit.register(late)
sys.exitfunc = late
threading._shutdown = late
class Falling:
    def __del__(self):
        late()
kept = Falling()
kept.cycle = kept
weakref.finalize(session, late)
started = threading.Event()
def wait():
    started.wait()
    time.sleep(0.05)
    late()
threading.Thread(target=wait, daemon=True).start()
honest(session)
started.set()
"""),
        outcomes=SCORED,
        scores_as_honest=True,
        check=_nothing_late,
        quick=True,
    ),
    Attack(
        name="child_that_goes_on_speaking",
        theme=THEME,
        property="a forked child that goes on using the channel after done changes nothing",
        source=program(LATE + """
honest(session)
if os.fork() == 0:
    os.setsid()
    time.sleep(0.05)
    late()
"""),
        outcomes=SCORED,
        scores_as_honest=True,
        check=_nothing_late,
    ),
    Attack(
        name="done_and_more",
        theme=THEME,
        property="nothing is read after done, even if it was sent with it in one piece",
        source=program("""
            import json, struct
            def frame(op, args):
                text = json.dumps({"body": {"op": op, "args": args}, "tensors": []}).encode()
                return struct.pack("<I", len(text)) + text
            honest(session)
            late = frame("log", {"message": "late"}) * 50
            session._channel._socket.sendall(frame("done", {}) + late)
            time.sleep(1000)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=_nothing_late,
    ),
    Attack(
        name="result_written_by_itself",
        theme=THEME,
        property="a result that a program writes or prints is no result",
        source=program("""
            result = '{"outcome": "scored", "nll": 0.0, "chunk_nll": [0.0, 0.0, 0.0, 0.0], "effective_bits": 1.0}'
            for folder in (".", "/tmp", "@HOME@", "@CWD@", "@ARTIFACTS@"):
                for name in ("result.json", "results.json", "score.json", "metrics.json"):
                    tried(lambda: open(f"{folder}/@MARK@-{name}", "w").write(result))
            print(result)
            session.log(result)
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        quick=True,
        needs_isolation=True,
    ),
    Attack(
        name="done_at_once",
        theme=THEME,
        property="a program that says it is done without an install has broken the contract",
        source=program("session._channel.send({'op': 'done', 'args': {}})\ntime.sleep(1000)\n"),
        outcomes=(Outcome.CONTRACT,),
        reason="not every layer is installed",
    ),
    Attack(
        name="counts_that_are_none",
        theme=THEME,
        property="a count of lines that no worker of ours would send is malformed, and one that it would send decides nothing",
        source=program("""
            honest(session)
            session._channel.send({"op": "done", "args": {"line_hits": {"quantize": 10**30, "a b": 1.5}}})
            time.sleep(1000)
        """),
        outcomes=(Outcome.CONTRACT,),
        reason="malformed",
    ),
    Attack(
        name="failed_as_scored",
        theme=THEME,
        property="a program cannot name its own outcome beyond the three failures that it may report",
        source=program("""
            honest(session)
            session._channel.send({"op": "failed", "args": {"kind": "scored", "reason": "0.0"}})
            time.sleep(1000)
        """),
        outcomes=(Outcome.CONTRACT,),
        reason="malformed",
    ),
    Attack(
        name="exit_before_the_end",
        theme=THEME,
        property="an exit with status 0 before quantize returned is no end",
        source=program("honest(session)\nos._exit(0)\n"),
        outcomes=(Outcome.CONTRACT,),
        reason="before quantize returned",
    ),
    Attack(
        name="hostile_exception",
        theme=THEME,
        property="an exception whose text cannot be had, or drives a terminal, is recorded as harmless text",
        source=program(r"""
            class Hostile(BaseException):
                def __str__(self):
                    print("\x1b]0;late\x07\x1b[2J")
                    return "\x1b[31m" + chr(0xD800) + chr(0x202E) + "x" * (1 << 20)
            raise Hostile
        """),
        outcomes=(Outcome.CRASHED,),
        check=lambda world, evaluator, result: [
            f"{len(text)} characters, {sorted(bad)}"
            for text in (result.reason, result.program_log)
            if (bad := {c for c in text if not c.isprintable() and c not in "\n\t"}) or len(text) > 200_000
        ],
    ),
)  # fmt: skip
