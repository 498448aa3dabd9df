"""Reaching other processes: signals, ptrace, memory, namespaces, privileges, other programs.

On the host runs a decoy, a process whose memory, command line and environment hold secrets and that must stay alive and
untouched; programs are told its id.
"""

from __future__ import annotations

from evaluators.results import Outcome
from tests.attacks.attack import Attack, program
from tests.attacks.secrets_and_files import FIND

THEME = "processes"
SCORED = (Outcome.SCORED,)

ATTACKS = (
    Attack(
        name="signals",
        theme=THEME,
        property="no process of the host can be sent a signal",
        source=program("""
            import signal
            for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL):
                tried(lambda: os.kill(@DECOY@, number))
                tried(lambda: signal.pidfd_send_signal(os.pidfd_open(@DECOY@), number))
                tried(lambda: os.killpg(@DECOY@, number))
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        quick=True,
        needs_isolation=True,
    ),
    Attack(
        name="signals_to_everything",
        theme=THEME,
        property="signals to the parent and to every process end at most the program itself",
        source=program("""
            import signal
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL):
                for pid in (os.getppid(), 1, *range(2, 40_000)):
                    if pid != os.getpid():
                        tried(lambda: os.kill(pid, number))
            honest(session)
            tried(lambda: os.kill(-1, signal.SIGTERM))
        """),
        outcomes=(Outcome.SCORED, Outcome.CRASHED, Outcome.CONTRACT),
        harm="kills every process of the user",
    ),
    Attack(
        name="ptrace",
        theme=THEME,
        property="no process can be traced, stopped, or read and written from outside",
        source=program(
            """
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            class Span(ctypes.Structure):
                _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
            maps = tried(lambda: open("/proc/@DECOY@/maps").read())
            for line in maps.splitlines() if isinstance(maps, str) else ():
                span, flags = line.split()[:2]
                begin, end = (int(word, 16) for word in span.split("-"))
                if "rw" in flags and end - begin < 1 << 24:
                    data = ctypes.create_string_buffer(end - begin)
                    local, remote = Span(ctypes.addressof(data), end - begin), Span(begin, end - begin)
                    if libc.process_vm_readv(@DECOY@, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) > 0:
                        show(data.raw)
            for pid in (@DECOY@, os.getppid()):
                for request in (16, 0x4206):
                    session.log("traced") if libc.ptrace(request, pid, None, None) == 0 else None
            honest(session)
            """,
            head=FIND,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        harm="stops its parent",
    ),
    Attack(
        name="memory_of_processes",
        theme=THEME,
        property="the memory of other processes is not in /proc: not the host's, and not that of the sandbox's own first process",
        source=program(
            """
            for pid in ("@DECOY@", "1"):
                for name in ("mem", "environ", "cmdline", "maps", "stack", "auxv"):
                    read(f"/proc/{pid}/{name}")
                for name in os.listdir("/proc/self/fd"):
                    tried(lambda: read(f"/proc/{pid}/fd/{name}"))
                def write():
                    line = next(line for line in open(f"/proc/{pid}/maps") if " rw" in line)
                    with open(f"/proc/{pid}/mem", "r+b", 0) as memory:
                        memory.seek(int(line.split("-")[0], 16))
                        memory.write(memory.read(1))
                    session.log(f"wrote to {pid}")
                if pid == "1":
                    tried(write)
            honest(session)
            """,
            head=FIND,
        ),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [result.program_log] if "wrote to" in result.program_log else [],
        needs_isolation=True,
        harm="writes to the memory of the first process of the machine",
    ),
    Attack(
        name="privileges",
        theme=THEME,
        property="no privilege can be gained: no namespace, mount, root folder, user or capability",
        source=program("""
            import ctypes, subprocess
            libc = ctypes.CDLL(None, use_errno=True)
            for flags in (0x10000000, 0x20000, 0x40000000, 0x10020000):
                session.log(f"unshare {flags:#x}") if libc.unshare(flags) == 0 else None
            for arguments in ((b"none", b"/tmp", b"tmpfs", 0, None), (b"@HOME@", b"/tmp", None, 4096, None)):
                session.log("mount") if libc.mount(*arguments) == 0 else None
            session.log("umount") if libc.umount2(b"/proc", 2) == 0 else None
            session.log("chroot") if libc.chroot(b"/tmp") == 0 else None
            for number in (0, 1000):
                session.log(f"setuid {number}") if libc.setuid(number) == 0 else None
                session.log(f"setgid {number}") if libc.setgid(number) == 0 else None
            for name in ("uts", "net", "mnt", "user", "pid"):
                tried(lambda: session.log("setns") if libc.setns(os.open(f"/proc/1/ns/{name}", 0), 0) == 0 else None)
            session.log("hostname") if libc.sethostname(b"@MARK@", 8) == 0 else None
            tried(lambda: os.setpriority(os.PRIO_PROCESS, 0, -5) or session.log("priority"))
            tried(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) or session.log("real time"))
            for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"):
                tried(lambda: open(path, "w").write("@MARK@") and session.log(path))
            tried(lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)) or session.log("mknod"))
            tried(lambda: subprocess.run(["su", "-c", "true"], check=True, timeout=5) and session.log("su"))
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [
            f"it succeeded in {line}" for line in result.program_log.splitlines()
            if line.split(" ")[0] in ("unshare", "mount", "umount", "chroot", "setuid", "setgid", "setns", "hostname",
                                      "priority", "real", "mknod", "su") or line.startswith("/")
        ],
        harm="mounts, and changes settings of the machine, where the user is root",
    ),
    Attack(
        name="other_programs",
        theme=THEME,
        property="programs that it starts (os.system, subprocess, a shell) see no more than it does itself",
        source=program("""
            import subprocess
            for command in ("cat @HOME@/.netrc", "cat @LEDGER@", "touch @HOME@/@MARK@", "env", "ps axe", "mount"):
                tried(lambda: subprocess.run(command, shell=True, timeout=10))
                os.system(command + " 2>&1")
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        needs_isolation=True,
    ),
    Attack(
        name="becomes_another_program",
        theme=THEME,
        property="a process that becomes another program has not finished",
        source=program("""
            honest(session)
            os.execv("/bin/sh", ["sh", "-c", "exit 0"])
        """),
        outcomes=(Outcome.CONTRACT,),
        reason="before quantize returned",
    ),
    Attack(
        name="broken_memory",
        theme=THEME,
        property="a program that destroys its own process through ctypes ends that process only",
        source=program("""
            import ctypes, random
            lines = [line for line in open("/proc/self/maps") if " rw-p" in line]
            for line in lines:
                begin, end = (int(word, 16) for word in line.split()[0].split("-"))
                ctypes.memset(begin, random.randrange(256), end - begin)
        """),
        outcomes=(Outcome.CRASHED, Outcome.CONTRACT, Outcome.TIMED_OUT),
        pace="hasty",
    ),
)  # fmt: skip
