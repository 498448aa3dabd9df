"""Reading what is not a program's, writing where it must not."""

from __future__ import annotations

from evaluators.results import Outcome
from tests.attacks.attack import Attack, program

THEME = "secrets_and_files"
SCORED = (Outcome.SCORED,)

FIND = '''
def show(data):
    """Print what follows each known first half of a secret."""
    for half in @HALVES@:
        at = data.find(bytes.fromhex(half))
        while at >= 0:
            print("found", data[at:at + 80], data[at:at + 80].hex())
            at = data.find(bytes.fromhex(half), at + 1)


def read(path):
    try:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                show(file.read(1 << 24))
    except OSError:
        pass


def walk(root, end):
    for folder, _, names in os.walk(root):
        for name in names:
            if time.time() > end:
                return
            read(os.path.join(folder, name))
'''

WRITE = """
places = @TARGETS@
for place in places:
    for way in (place, "/proc/1/root" + place, "/proc/self/root" + place, "../" * 12 + place):
        tried(lambda: open(way + "/@MARK@", "w").write("x"))
        tried(lambda: os.mkdir(way + "/@MARK@-folder"))
        tried(lambda: os.symlink("/", way + "/@MARK@-link"))
    tried(lambda: os.symlink(place, "here"))
    tried(lambda: open("here/@MARK@-through", "w").write("x"))
    tried(lambda: os.unlink("here"))
    tried(lambda: os.link("program.py", place + "/@MARK@-hard"))
    tried(lambda: os.rename("program.py", place + "/@MARK@-moved"))
honest(session)
"""

ATTACKS = (
    Attack(
        name="environment_secrets",
        theme=THEME,
        property="no variable of the host's environment is readable: in os.environ, in any process, in any command line",
        source=program(
            """
            show(repr(dict(os.environ)).encode())
            for name in os.listdir("/proc"):
                for file in ("environ", "cmdline"):
                    read(f"/proc/{name}/{file}")
            print(sorted(os.environ), open("/proc/1/cmdline").read())
            honest(session)
            """,
            head=FIND,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        quick=True,
        needs_isolation=True,
    ),
    Attack(
        name="home_folder",
        theme=THEME,
        property="the home folder of the host's user is not readable",
        source=program(
            """
            for home in ("@HOME@", "/proc/1/root@HOME@", "../../../..@HOME@"):
                walk(home, time.time() + 10)
                read(home + "/.netrc")
            honest(session)
            """,
            head=FIND,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        needs_isolation=True,
    ),
    Attack(
        name="ledger",
        theme=THEME,
        property="the ledger of a run is neither read nor written",
        source=program(
            """
            import sqlite3
            read("@LEDGER@")
            for mode in ("ro", "rw"):
                with_ledger = lambda: sqlite3.connect("file:@LEDGER@?mode=" + mode, uri=True)
                rows = tried(lambda: with_ledger().execute("SELECT text FROM notes").fetchall())
                show(repr(rows).encode())
                connection = tried(with_ledger)
                tried(lambda: connection.execute("UPDATE notes SET text = 'forged'"))
                tried(lambda: connection.commit())
            honest(session)
            """,
            head=FIND,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        needs_isolation=True,
    ),
    Attack(
        name="artifact_of_another_run",
        theme=THEME,
        property="artifacts of other runs are neither read nor replaced",
        source=program(
            """
            walk("@ARTIFACTS@", time.time() + 10)
            tried(lambda: open("@OTHER@", "ab").write(b"forged"))
            tried(lambda: os.replace("program.py", "@OTHER@"))
            honest(session)
            """,
            head=FIND,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        needs_isolation=True,
    ),
    Attack(
        name="every_readable_file",
        theme=THEME,
        property="no file that a program can open anywhere holds a secret, a ledger, an artifact or a text",
        source=program(
            """
            end = time.time() + 15
            for name in os.listdir("/"):
                if name not in ("sys", "proc"):
                    walk("/" + name, end)
            walk("/proc/self/", end)
            honest(session)
            """,
            head=FIND.replace("for folder, _, names in", "for folder, folders, names in").replace(
                "        for name in names:\n",
                "        folders[:] = [name for name in folders if name not in ('torch', 'triton', 'nvidia', 'task')]\n"
                "        for name in names:\n",
            ),
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        harm="reads every file of the machine",
    ),
    Attack(
        name="writing_outside",
        theme=THEME,
        property="nothing is written, made, linked or moved outside of its folder, whatever the path says",
        source=program(WRITE),
        outcomes=SCORED,
        scores_as_honest=True,
        quick=True,
        needs_isolation=True,
    ),
    Attack(
        name="core_files",
        theme=THEME,
        property="a crash leaves no core file and calls no handler of core files on the host",
        source=program(
            """
            import ctypes, resource
            limit = resource.RLIMIT_CORE
            for size in (0, resource.RLIM_INFINITY):
                tried(lambda: resource.setrlimit(limit, (size, size)))
                tried(lambda: resource.prlimit(0, limit, (size, size)))
            assert resource.getrlimit(limit) == (1, 1), resource.getrlimit(limit)
            ctypes.string_at(0)
            """
        ),
        outcomes=(Outcome.CRASHED,),
        reason="SIGSEGV",
        needs_isolation=True,
    ),
)
