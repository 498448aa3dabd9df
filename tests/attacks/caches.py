"""Leaving something for a later program or for the evaluator: caches of the compiler, bytecode, temporary files."""

from __future__ import annotations

from evaluators.results import Outcome
from tests.attacks.attack import Attack, program

THEME = "caches"
SCORED = (Outcome.SCORED,)

PLACES = """
PLACES = [
    *("/tmp", "/dev/shm", "/var/tmp", ".", os.path.expanduser("~"), "/tmp/torchinductor_root", "/run", "/quantforge"),
    *(os.environ.get(name, ".") for name in (
        "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH", "TMPDIR")),
    "@HOME@/.triton/cache", "@HOME@/.cache", "@CWD@",
    os.path.dirname(torch.__file__) + "/__pycache__",
]
"""

ATTACKS = (
    Attack(
        name="poisoned_bytecode",
        theme=THEME,
        property="no bytecode of torch, the standard library or our packages can be written",
        source=program("""
            import importlib.util, json, py_compile, forge_kernels, evaluators.wire
            open("evil.py", "w").write("raise SystemError('poisoned')")
            code = open(py_compile.compile("evil.py", doraise=True), "rb").read()
            for module in (torch, json, forge_kernels, evaluators.wire):
                for path in (importlib.util.cache_from_source(module.__file__), module.__file__):
                    tried(lambda: os.makedirs(os.path.dirname(path), exist_ok=True))
                    tried(lambda: open(path, "wb").write(code) and session.log(f"wrote {path}"))
                    tried(lambda: os.replace("evil.py", path) or session.log(f"replaced {path}"))
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [result.program_log] if result.program_log else [],
        quick=True,
        harm="overwrites the packages of the interpreter",
    ),
    Attack(
        name="poisoned_compiler_caches",
        theme=THEME,
        property="caches of Triton, inductor and CUDA that a program fills are gone with it",
        source=program(
            """
            for place in PLACES:
                if "@" not in place:
                    tried(lambda: os.makedirs(place, exist_ok=True))
                    tried(lambda: open(place + "/@MARK@.so", "w").write("poisoned"))
            honest(session)
            """,
            head=PLACES,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        then=program(
            """
            for place in PLACES:
                names = tried(lambda: os.listdir(place))
                if isinstance(names, list) and "@MARK@.so" in names:
                    session.log(f"found in {place}")
            honest(session)
            """,
            head=PLACES,
        ),
        harm="writes to caches of the user and of the interpreter",
    ),
    Attack(
        name="left_for_the_next",
        theme=THEME,
        property="a program finds nothing of an earlier one: no file, no process, no shared memory, no lock",
        source=program("""
            import fcntl
            for place in ("/tmp", "/dev/shm", "."):
                tried(lambda: open(place + "/@MARK@", "w").write("a message"))
            if os.fork() == 0:
                os.setsid()
                time.sleep(1000)
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        then=program("""
            for place in ("/tmp", "/dev/shm", "."):
                if os.path.exists(place + "/@MARK@"):
                    session.log(f"found in {place}")
            pids = [name for name in os.listdir("/proc") if name.isdigit()]
            if len(pids) > 3:  # the first one, the one that waits, and this one
                session.log(f"{len(pids)} processes")
            honest(session)
        """),
        needs_isolation=True,
    ),
)  # fmt: skip
