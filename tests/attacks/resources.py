"""Taking memory, disk, processes, descriptors and output beyond the limits, also where a watchdog does not look."""

from __future__ import annotations

from evaluators.results import Outcome
from tests.attacks.attack import Attack, program

THEME = "resources"
TOO_MUCH = (Outcome.OUT_OF_MEMORY,)
SCORED = (Outcome.SCORED,)

LIBC = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
PRIVATE_UNRESERVED, SHARED_ANONYMOUS, HUGE = 0x4022, 0x21, 0x40022
"""

ATTACKS = (
    Attack(
        name="fork_bomb",
        theme=THEME,
        property="processes beyond the limit are refused, and all of them end with the run",
        source=program("while True:\n    tried(os.fork)\n"),
        outcomes=(Outcome.CRASHED, Outcome.TIMED_OUT),
        pace="hasty",
        quick=True,
        harm="a fork bomb",
    ),
    Attack(
        name="thread_bomb",
        theme=THEME,
        property="threads count as processes",
        source=program("""
            import threading
            while True:
                threading.Thread(target=time.sleep, args=(1000,)).start()
        """),
        outcomes=(Outcome.CRASHED,),
        harm="ten thousands of threads where nothing counts them in time",
    ),
    Attack(
        name="private_64_gb",
        theme=THEME,
        property="64 GB of private memory end the run at the memory limit",
        source=program("""
            kept = []
            while len(kept) < 64_000:
                kept.append(torch.ones(250_000))
        """),
        outcomes=TOO_MUCH,
    ),
    Attack(
        name="children_64_gb",
        theme=THEME,
        property="memory of all processes together counts",
        source=program("""
            for _ in range(8):
                if os.fork() == 0:
                    kept = [bytearray(b"x") * 10_000_000 for _ in range(800)]
                    time.sleep(1000)
            time.sleep(1000)
        """),
        outcomes=TOO_MUCH,
    ),
    Attack(
        name="shared_64_gb",
        theme=THEME,
        property="shared memory that no process keeps mapped cannot be had: memfd, anonymous, /dev/zero, System V, huge pages",
        source=program(
            """
            import mmap
            def fill(fd, size=1 << 31):
                os.ftruncate(fd, size)
                for at in range(0, size, 1 << 20):
                    os.pwrite(fd, bytes(1 << 20), at)
                session.log("memfd or a file")
            def shared(flags, fd=-1, size=1 << 31):
                address = libc.mmap(None, size, 3, flags, fd, 0)
                if address != ctypes.c_void_p(-1).value:
                    session.log(f"mmap {flags:#x} {fd}")
                    for at in range(0, size, 4096):
                        ctypes.c_char.from_address(address + at).value = b"x"
                        if at % (1 << 24) == 0:
                            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), 4)
            tried(lambda: fill(os.memfd_create("x")))
            shared(SHARED_ANONYMOUS)
            shared(HUGE, size=1 << 21)
            tried(lambda: shared(1, os.open("/dev/zero", os.O_RDWR)))
            if libc.shmget(0, 4096, 0o1600) != -1:
                session.log("shmget")
            honest(session)
            """,
            head=LIBC,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [f"it had {result.program_log}"] if result.program_log else [],
        harm="takes memory that nothing counts",
    ),
    Attack(
        name="page_tables",
        theme=THEME,
        property="page tables count as memory, though no page is resident",
        source=program(
            """
            size = 1 << 43
            address = libc.mmap(None, size, 1, PRIVATE_UNRESERVED, -1, 0)
            libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), 15)
            for at in range(0, size, 1 << 21):
                ctypes.string_at(address + at, 1)
            """,
            head=LIBC,
        ),
        outcomes=TOO_MUCH,
        quick=True,
    ),
    Attack(
        name="empty_files",
        theme=THEME,
        property="what the kernel keeps for empty files and links counts as memory, though they hold no block",
        source=program("""
            for folder in range(10_000):
                os.mkdir(f"/tmp/{folder}")
                for name in range(400):
                    os.symlink("x" * 120, f"/tmp/{folder}/{name}")
        """),
        outcomes=TOO_MUCH,
        harm="fills the host's temporary folder",
    ),
    Attack(
        name="socket_buffers",
        theme=THEME,
        property="no memory can be had in buffers of sockets, and little in those of pipes",
        source=program("""
            import socket
            kept = []
            def fill(write):
                try:
                    while True:
                        write(bytes(1 << 16))
                except BlockingIOError:
                    pass
            def pair():
                ends = socket.socketpair()
                for end in ends:
                    end.setblocking(False)
                    fill(end.send)
                kept.append(ends)
                session.log("socketpair")
            tried(pair)
            for _ in range(100):
                reader, writer = os.pipe()
                os.set_blocking(writer, False)
                kept.append((reader, writer))
                fill(lambda data: os.write(writer, data))
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [f"it had a {result.program_log}"] if result.program_log else [],
        needs_isolation=True,
    ),
    Attack(
        name="messages_as_memory",
        theme=THEME,
        property="what lies in the shared memory of the channel counts, in both directions",
        source=program("""
            import mmap
            for arena in (session._channel.outgoing, session._channel.incoming):
                with mmap.mmap(arena.fd, arena.num_bytes) as mapping:
                    for at in range(0, 1 << 30, 4096):
                        mapping[at] = 1
            time.sleep(1000)
        """),
        outcomes=TOO_MUCH,
    ),
    Attack(
        name="file_100_gb",
        theme=THEME,
        property="no file grows beyond its limit, sparse or not, and the temporary folders have an end",
        source=program("""
            def grow(path, size):
                with open(path, "wb") as file:
                    for at in range(0, size, 1 << 20):
                        file.write(bytes(1 << 20))
                session.log(f"{path} of {size}")
            def sparse(path, size):
                with open(path, "wb") as file:
                    file.seek(size)
                    file.write(b"x")
                session.log(f"{path} of {size}")
            tried(lambda: grow("big", 100 << 30))
            tried(lambda: sparse("far", 100 << 30))
            tried(lambda: os.posix_fallocate(os.open("held", os.O_CREAT | os.O_RDWR), 0, 100 << 30))
            tried(lambda: os.truncate("far", 100 << 30) or session.log("truncate"))
            for name in ("big", "far", "held"):
                if tried(lambda: os.stat(name).st_size > 1 << 27) is True:
                    session.log(f"{name} is {os.stat(name).st_size} bytes long")
                tried(lambda: os.unlink(name))
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [f"it wrote {result.program_log}"] if result.program_log else [],
    ),
    Attack(
        name="many_files",
        theme=THEME,
        property="all temporary files together have an end, also unlinked ones",
        source=program("""
            kept = []
            for folder in ("/tmp", "/dev/shm", "."):
                for number in range(64):
                    def write():
                        path = f"{folder}/{number}"
                        kept.append(open(path, "wb"))
                        os.unlink(path)
                        kept[-1].write(bytes(1 << 25))
                        kept[-1].flush()
                    tried(write)
            held = sum(os.fstat(file.fileno()).st_blocks * 512 for file in kept)
            if held > (1 << 28):
                session.log(f"{held} bytes")
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [f"it wrote {result.program_log}"] if result.program_log else [],
        harm="fills the host's temporary folder",
    ),
    Attack(
        name="output_500_mb",
        theme=THEME,
        property="output beyond its limit ends the run and is kept at both ends only",
        source=program("""
            print("first")
            for _ in range(500_000):
                print("x" * 1000)
        """),
        outcomes=(Outcome.OUTPUT_LIMIT,),
        check=lambda world, evaluator, result: (
            [] if len(result.program_log) < 1 << 17 else [f"{len(result.program_log)} characters of output were kept"]
        ),
        quick=True,
    ),
    Attack(
        name="output_taken_back",
        theme=THEME,
        property="a program that reads its own output back does not stop the clock",
        source=program("""
            import random
            reader = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
            while True:
                os.write(1, b"x")
                for _ in range(random.randrange(3000)):
                    pass
                tried(lambda: os.read(reader, 1 << 16))
        """),
        outcomes=(Outcome.TIMED_OUT, Outcome.OUTPUT_LIMIT),
        pace="hasty",
    ),
    Attack(
        name="descriptors",
        theme=THEME,
        property="open files have a limit per process and end with the run",
        source=program("""
            kept = []
            error = tried(lambda: [kept.append(os.open("/dev/null", 0)) for _ in range(100_000)])
            assert len(kept) < 1000, len(kept)
            for fd in kept:
                os.close(fd)
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
    ),
    Attack(
        name="deceptive_name",
        theme=THEME,
        property="a process whose name looks like the fields of its own record is measured as what it is",
        source=program(
            r"""
            libc.prctl(15, b") R 1 1 1 \xff\n", 0, 0, 0)
            kept = []
            while True:
                kept.append(torch.ones(250_000))
        """,
            head=LIBC,
        ),
        outcomes=TOO_MUCH,
    ),
    Attack(
        name="swapped_memory",
        theme=THEME,
        property="pages that a program sends to swap count as memory",
        source=program("""
            import mmap
            kept = []
            for _ in range(4000):
                kept.append(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
                kept[-1].write(os.urandom(4096) * 256)
                kept[-1].madvise(21)
            time.sleep(1000)
        """),
        outcomes=TOO_MUCH,
    ),
)  # fmt: skip
