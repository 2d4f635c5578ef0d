r"""Run untrusted Python: programs (standard input -> standard output, or one function call) and
long-lived scripts that may ask their host for text.

The idea
--------
Code that a model wrote runs in a process of its own, which is given nothing but its input and can
reach nothing else. No container, no privilege and no package is needed: only what any process may
do to itself. Layers, from the outside in:

    fork server    A small interpreter with an explicit environment (no tokens), started once. It
                   forks one child a job. The trainer (CUDA, many threads) is never forked, and no
                   state passes from one job to the next.
    rlimits        Address space, CPU seconds, bytes written, descriptors, stack, no core files.
    capabilities   Root stays uid 0 (its interpreter may lie in a 0700 home) without any privilege.
    landlock       Reads the interpreter's own library folders and /usr/lib; writes nothing.
    seccomp        No exec, no fork (threads stay), no socket (a socketpair stays: asyncio needs
                   it), no ptrace, no signal to others, no renice, no mount, no chmod, no new files
                   in memory, and nothing of the kernel that is newer than system call 424.

The server drops the capabilities and takes on what seccomp refuses to both; the child then adds,
in this order: descriptors 0 to 2 (files in memory, so nothing ever blocks); its own session; a
death signal from the server; Landlock; descriptor 3, if any, and everything else closed; rlimits;
seccomp. Then it writes its pid into a pipe that the code never sees: ready. A child that ends
without that is our fault, not the model's: SandboxError. Only now the code runs, as a fresh
`__main__`.

What may be believed afterwards: the exit code and the CPU seconds come from the kernel; output is
just bytes. Expected outputs never enter the child, so there is nothing to find or to fake in there.

    status "timeout"  more CPU seconds than the limit, or the wall limit (a backstop for sleepers:
                      make it >= 3 x cpu_s, because a loaded machine slows healthy programs)
    status "error"    any other end but exit code 0
    1.02 s used of cpu_s = 1 -> "timeout"; SIGKILL after 0.3 s of 5 -> "error" (it killed itself)

Scripts: the channel
--------------------
A script has descriptor 3: JSON lines, one message at a time.

    script -> host                                                            host -> script
    {"calls": [{"agent": str, "messages": [{"role", "content"}, ...]}, ...]}  {"texts": [str, ...]}
    {"python": str}     the pool runs it as a program of its own              {"output": str}
    {"answer": str}     the last one counts                                   nothing

Exact fields; role is system, user or assistant; at most 1 MiB a line, 64 calls a message, 64 chat
messages a call, 4,096 lines and 32 tool runs a script; no message while one is open. Else it ends:
status "crashed", error "channel: ...". So does leaving before the reply. The events of one script
alternate strictly: "calls", reply(), "calls", reply(), ..., "ended". A script that dies with an
open question is reported after that question's reply, so what a rollout sees does not depend on
timing.

Isolation
---------
`strict` (the default): every layer, or a SandboxError that names the missing one. `best`: every
layer that this machine has, at least the fork server and rlimits, for a laptop with macOS or a
container without Landlock; `in_force()` says what is missing. Then a program can do what that
layer would have stopped: without seccomp it can start processes, without Landlock it can read and
write your files. macOS ignores RLIMIT_AS too. Windows has none of this: use WSL2.

If the fork server dies, it is started again and programs that were in flight run again. Live
scripts are lost: `poll` first reports those that had ended, then raises SandboxError once, and the
next `start` opens a new server. Each job has a leash, a socket to the host: when the host closes
it (Ctrl-C, an exception, kill -9), the server ends the job. The server ends with its own socket.

Cost
----
A fork costs what the server's memory weighs, and a child pays for each page that it writes. So the
server is sent compiled code of the first half of this file only and imports little; the modules
are loaded, the caches warm, the Landlock rules and both seccomp filters ready before the first
fork. The modules' after-fork hooks are left out: they renew locks that a single-threaded server
never held and a seed that each job sets, at 150 page faults a child. Together (host, server,
child) a program or a script with one call costs about 1.5 bare forks of the same process, a third
of a fresh `python -I -S`. tests/bench_sandbox.py prints this machine's figures.

Not protected
-------------
Kernel bugs; `stat()` of any path; timing; what lies in the server's memory at the fork (source and
input of other jobs, never an expected output); memory beyond live children x (memory_mb + output).

Different from the reference: it runs model code by `exec` with the trainer's whole environment,
and results come back as pickles that the model's own code wrote.

How to run it alone: `python sandbox.py`. Standard library; Python >= 3.11; x86_64 and aarch64.
"""

import atexit
import builtins
import collections
import contextlib
import ctypes
import gc
import json
import marshal
import math
import os
import random
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import types

if os.name == "nt":
    raise ImportError("sandbox.py needs Linux (or macOS with isolation 'best'): use WSL2")
import resource

if __name__ != "fork_server":  # the host's half
    import queue
    import subprocess
    import weakref
    from dataclasses import dataclass, field

LINUX = sys.platform.startswith("linux")
LAYERS = ("fork server", "rlimits", "capabilities", "landlock", "seccomp")
STDERR_CAP = 1 << 16  # bytes of standard error that come back: the last ones
_LENGTH = struct.Struct("=Q")
# The server's report of one job: exit code or -signal, CPU seconds, wall seconds, whether the wall
# limit ended it, and the sizes of what follows: standard output, standard error, result, fault.
_REPORT = struct.Struct("=idd?4Q")


# ---------------------------------------------------------------------------------------------
# Between the host and the fork server: frames of a length and that many bytes
# ---------------------------------------------------------------------------------------------


def _pack(payload: bytes) -> bytes:
    """
    >>> buffer = bytearray(_pack(b"ab")) + b"rest"
    >>> _unpack(buffer), bytes(buffer)
    (b'ab', b'rest')
    """
    return _LENGTH.pack(len(payload)) + payload


def _unpack(buffer: bytearray) -> bytes | None:
    """Takes one payload off the front of `buffer`; None if it is not all there yet."""
    if len(buffer) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    payload = bytes(memoryview(buffer)[_LENGTH.size : end])
    del buffer[:end]
    return payload


def _receive(sock: socket.socket) -> bytes:
    """Waits for one payload, as long as the socket's timeout allows. EOFError: the peer ended."""
    buffer = bytearray()
    while (payload := _unpack(buffer)) is None:
        data = sock.recv(1 << 16)
        if not data:
            raise EOFError
        buffer += data
    return payload


class _Stream:
    """A socket in a selector, with buffers: nobody ever waits for a peer that doesn't read."""

    def __init__(self, sock: socket.socket, selector, owner=None):
        sock.setblocking(False)
        self.sock, self.selector, self.owner = sock, selector, owner
        self.received, self.unsent = bytearray(), bytearray()
        self.open, self.events = True, selectors.EVENT_READ
        self.last = False  # close when all is sent
        self.refused = False  # the peer ended without reading all that was sent
        selector.register(sock, self.events, self)

    def fill(self, fds: collections.deque | None = None) -> bool:
        """Reads once, with descriptors if `fds` is given. False: nothing now, or the peer ended."""
        try:
            if fds is None:
                data = self.sock.recv(1 << 16)
            else:
                data, passed, _, _ = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(8))
                for _, _, numbers in passed:
                    fds.extend(struct.unpack(f"={len(numbers) // 4}i", numbers))
        except BlockingIOError:
            return False
        except OSError:
            self.refused, data = True, b""
        self.received += data
        if not data:
            self.close()
        return bool(data)

    def send(self, data: bytes = b"") -> None:
        """Sends what the peer takes now, and the rest when it can."""
        self.unsent += data
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.refused = True
            self.unsent.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0)
        if self.last and not self.unsent:
            self.close()
        elif events != self.events:
            self.events = events
            self.selector.modify(self.sock, events, self)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.selector.unregister(self.sock)
            self.sock.close()


# ---------------------------------------------------------------------------------------------
# The layers
# ---------------------------------------------------------------------------------------------

# What is refused with EPERM. name: (number on x86_64, number on aarch64; None: no such call).
# The server needs none of these either, so it takes this filter on once and children inherit it.
_REFUSED = {
    "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117), "kcmp": (312, 272),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "syslog": (103, 116),
    # sockets
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "accept": (43, 202), "accept4": (288, 242),
    # other processes
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # files: attributes and truncation (Landlock does not cover them), then names
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "truncate": (76, 45), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None), "mkdir": (83, None),
    "mkdirat": (258, 34), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # memory and objects that outlive a process
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    # the kernel's less trodden paths
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "io_setup": (206, 0), "acct": (163, 89),
    "inotify_init": (253, None), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "personality": (135, 92), "modify_ldt": (154, None), "iopl": (172, None),
    "ioperm": (173, None), "quotactl": (179, 60), "splice": (275, 76), "tee": (276, 77),
    "vmsplice": (278, 75),
}  # fmt: skip
# What the server itself needs, so that only children are refused it.
_REFUSED_IN_CHILD = {
    "fork": (57, None), "vfork": (58, None), "setsid": (112, 157), "setpgid": (109, 154),
    "memfd_create": (319, 279), "seccomp": (317, 277),
}  # fmt: skip
# Decided by one argument: (numbers, which argument, mask, values, is a listed value allowed?)
_OWN_PID = object()
_BY_ARGUMENT = (
    ((56, 220), 0, 0x00010000, (0,), False),  # clone: only with CLONE_THREAD
    ((62, 129), 0, None, (_OWN_PID,), True),  # kill
    ((234, 131), 0, None, (_OWN_PID,), True),  # tgkill
    ((302, 261), 0, None, (0, _OWN_PID), True),  # prlimit64
    ((203, 122), 0, None, (0,), True),  # sched_setaffinity
    ((53, 199), 1, 0xF, (1,), True),  # socketpair: SOCK_STREAM (a datagram one can be re-aimed)
    ((157, 167), 0, None, (15, 16), True),  # prctl: PR_SET_NAME, PR_GET_NAME
    ((72, 25), 1, None, (8, 10, 15, 1024, 1026), False),  # fcntl: F_SETOWN(_EX), F_SETSIG, leases
    ((16, 29), 1, None, (0x5412, 0x541C, 0x8901, 0x8902), False),  # ioctl: TIOCSTI, FIOSETOWN
)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column, AUDIT_ARCH_*
_LOAD, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF operations
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


def _seccomp_filter(machine: str, *, child: bool) -> tuple[bytearray, list[int]]:
    """A seccomp program: an array of struct sock_filter (code, jump if true, if false, k).

    Returns it with the byte offsets at which a child has to write its own pid. struct
    seccomp_data: the call's number at byte 0, the architecture at 4, argument i at 16 + 8 i.
    """
    column, architecture = _MACHINES[machine]
    code = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]  # fmt: skip
    if child:
        # The x32 table would be a second set of numbers. From 424 on everything is newer than
        # 2019 (io_uring, pidfd, the mount API, clone3): "not there" makes libraries fall back.
        code += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
        code += [(_AT_LEAST, 0, 1, 424), (_RETURN, 0, 0, _ENOSYS)]
    for numbers in (_REFUSED_IN_CHILD if child else _REFUSED).values():
        if numbers[column] is not None:
            code += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _EPERM)]
    pid_offsets = []
    for numbers, argument, mask, values, allowed in _BY_ARGUMENT if child else ():
        body = [(_LOAD, 0, 0, 16 + 8 * argument), *([(_AND, 0, 0, mask)] if mask else [])]
        for i, value in enumerate(values):
            if value is _OWN_PID:
                pid_offsets.append(8 * (len(code) + 1 + len(body)) + 4)
            body.append((_EQUAL, len(values) - i, 0, 0 if value is _OWN_PID else value))
        body += [(_RETURN, 0, 0, _EPERM if allowed else _ALLOW)]
        body += [(_RETURN, 0, 0, _ALLOW if allowed else _EPERM)]
        code += [(_EQUAL, 0, len(body), numbers[column]), *body]
    code.append((_RETURN, 0, 0, _ALLOW))
    return bytearray(b"".join(struct.pack("=HBBI", *each) for each in code)), pid_offsets


def _sock_fprog(code: bytearray) -> bytes:
    """struct sock_fprog: how many instructions, and where they are. `code` must stay alive."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(code))
    return struct.pack("HxxxxxxP", len(code) // 8, start)


_LIBC = ctypes.CDLL(None, use_errno=True)


def _libc(name: str, *arguments) -> int:
    """Calls the C library; OSError if it fails."""
    result = getattr(_LIBC, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _no_new_privileges() -> None:
    _libc("prctl", 38, 1, 0, 0, 0)


def _enter_seccomp(program: bytes) -> None:
    _libc("prctl", 22, 2, program, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _drop_capabilities() -> None:
    """Root without any privilege, for good. Nothing to do for anybody else."""
    for capability in range(64):
        _LIBC.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP; fails above the last one
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _libc("capset", header, (ctypes.c_uint32 * 6)())


def _landlock_ruleset(folders: list[str]) -> int:
    """A descriptor of the rules: read `folders` and a few files, write /dev/null. No more."""
    create_ruleset, add_rule = 444, 445
    abi = _libc("syscall", create_ruleset, None, ctypes.c_size_t(0), 1)
    rights = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1  # all that this kernel knows
    tcp, scope = 3 if abi >= 4 else 0, 3 if abi >= 6 else 0  # scope: abstract sockets, signals
    attributes = struct.pack("=QQQ", rights, tcp, scope)
    size = ctypes.c_size_t(24 if abi >= 6 else 16 if abi >= 4 else 8)
    ruleset = _libc("syscall", create_ruleset, attributes, size, 0)
    write_file, read_file, read_folder = 1 << 1, 1 << 2, 1 << 3
    access = dict.fromkeys(folders, read_file | read_folder)
    access |= dict.fromkeys(("/dev/urandom", "/dev/zero", "/etc/ld.so.cache"), read_file)
    access["/dev/null"] = read_file | write_file
    for path, allowed in access.items():
        if os.path.exists(path):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed &= -1 if os.path.isdir(path) else read_file | write_file
            _libc("syscall", add_rule, ruleset, 1, struct.pack("=Qi", allowed, fd), 0)
            os.close(fd)
    return ruleset


# ---------------------------------------------------------------------------------------------
# The child
# ---------------------------------------------------------------------------------------------


def _child(server, job, source: bytes, stdin: bytes, third: int | None) -> None:
    """Locks itself in, says that it is ready, runs the source. Never returns."""
    code = 1
    try:
        for number, fd in enumerate((job.stdin, *job.files[:2])):
            os.dup2(fd, number)
        sys.set_int_max_str_digits(0)
        arguments = []
        if job.kind == "call":  # before "ready": input that is not JSON is our fault
            lines = stdin.decode().split("\n")
            arguments = [json.loads(line) for line in lines if line.strip()]
        _lock_in(server, job, third)
        os.write(server.ready, struct.pack("=i", os.getpid()))
        os.close(server.ready)
        if job.kind == "script":
            os.write(3, b"\n")  # starts the host's step clock
        code = _run(server, job, source.decode(), arguments)
    except BaseException as error:  # noqa: BLE001  the boundary: whatever it was, it ends here
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        os._exit(code)


def _lock_in(server, job, third: int | None) -> None:
    signal.set_wakeup_fd(-1)
    os.setsid()
    if LINUX:
        _libc("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != server.pid:
        raise ProcessLookupError("the fork server ended")
    if server.ruleset is not None:
        _libc("syscall", 446, server.ruleset, 0)  # landlock_restrict_self
    if third is not None:
        os.dup2(third, 3)
    os.closerange(3 if third is None else 4, server.ready)
    os.closerange(server.ready + 1, server.highest_fd + 1)
    _limit(resource.RLIMIT_FSIZE, job.output_cap)
    _limit(resource.RLIMIT_NOFILE, 32)
    if LINUX:
        _limit(resource.RLIMIT_AS, job.memory_mb << 20)
    else:
        _limit(resource.RLIMIT_NPROC, 1)  # no forks; on Linux it would count threads
    cpu_s = math.ceil(job.cpu_s)
    _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU says why; SIGKILL if it is ignored
    gc.enable()
    if server.child_filter is not None:
        for offset in server.pid_offsets:
            struct.pack_into("=I", server.child_code, offset, os.getpid())
        _enter_seccomp(server.child_filter)


def _limit(which: int, soft: int, hard: int | None = None) -> None:
    """Sets a limit, never above the hard one that is there."""
    most, hard = resource.getrlimit(which)[1], soft if hard is None else hard
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(which, (soft, hard))


def _run(server, job, source: str, arguments: list) -> int:
    """Runs the source as a fresh __main__ with all that a normal end has; the exit code."""
    main = types.ModuleType("__main__")
    if job.kind == "call":
        main.__builtins__ = server.prelude  # not copied: that would touch 300 objects
    main.__dict__.update(job.variables)
    sys.modules["__main__"] = main
    random.seed(job.seed)
    code = 0
    try:
        exec(compile(source, "main.py", "exec", dont_inherit=True), main.__dict__)
        if job.kind == "call":
            _call(main.__dict__, job.fn_name, arguments)
    except SystemExit as stop:
        code = stop.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:  # noqa: BLE001  as the interpreter's own top level does
        BaseException.with_traceback(error, error.__traceback__.tb_next)  # without this frame
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for name in ("stdout", "__stdout__", "stderr", "__stderr__"):
        stream = getattr(sys, name)
        if stream is not None and not stream.closed:
            stream.flush()
    return (code or 0) & 0xFF


def _call(names: dict, fn_name: str, arguments: list) -> None:
    """Calls the function (or the method of `Solution`) and writes its result as JSON."""
    solution = names.get("Solution")
    if solution is not None and hasattr(solution, fn_name):
        function = getattr(solution(), fn_name)
    elif fn_name in names:
        function = names[fn_name]
    else:
        raise NameError(f"there is no function {fn_name!r}")
    result = json.dumps(function(*arguments), default=lambda array: array.tolist()).encode()
    os.ftruncate(3, 0)
    os.pwrite(3, result, 0)


# ---------------------------------------------------------------------------------------------
# The fork server
# ---------------------------------------------------------------------------------------------


def _blank_file() -> int:
    """A descriptor of an empty file without a name: it is gone with its last descriptor."""
    if LINUX:
        return os.memfd_create("sandbox")
    import tempfile  # large, and not needed elsewhere

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# Run in the server before the first fork: what the interpreter then has in its caches (types,
# interned names, specialised code) it need not write, and so copy, in every child.
_WARM_UP = """
import json, os, re, sys
class Agent:
    def __init__(self, name, value=None): self.name, self.value = name, value
    def run(self, *rest, **named): return f"{self.name} {self.value!r} {rest}".strip().encode()
def f(x, y=1):
    try: return {str(i): [i * y for i in range(x) if i % 2] for i in range(x)}
    except (ValueError, KeyError) as error: raise RuntimeError("no") from error
for key, value in sorted(f(5).items()):
    text = json.dumps({"calls": [{"agent": key, "messages": value}]}).replace("x", "y")
    json.loads(Agent(key, value=3).run(1, a=2) and re.sub("<x>.*?</x>", "", text))
"""


class _Job(types.SimpleNamespace):
    """One job: the fields that the host sent (see `_job_frame`), and in the server:"""

    leash = None  # the job's stream to the host: whatever comes on it, even its end, ends the job
    wall_hit = False
    stdin = 0  # descriptor; 0: the server's own, /dev/null
    files = ()  # descriptors of standard output, standard error and, in call mode, the result


class _ForkServer:
    """Reads jobs, forks, reports how they ended. One thread, and it never waits for a peer."""

    def __init__(self, main: socket.socket, config: dict):
        self.pid, self.selector = os.getpid(), selectors.DefaultSelector()
        self.jobs: dict[int, _Job] = {}  # by pid
        self.deadlines: dict[int, float] = {}  # by pid; scripts have a step clock in the host
        self.ready_pids: set[int] = set()  # of children that said so and are not reaped yet
        self.fds: collections.deque[int] = collections.deque()  # passed by the host for its jobs
        self.ready_out, self.ready = os.pipe()
        self.wake, self.wake_in = os.pipe()
        for fd in (self.ready_out, self.wake, self.wake_in):
            os.set_blocking(fd, False)
        self.prelude: dict = {}
        exec(config["prelude"], self.prelude)
        self.prelude |= builtins.__dict__
        for name, code in config["modules"].items():
            sys.modules[name] = module = types.ModuleType(name)
            exec(code, module.__dict__)
        self.ruleset = self.child_filter = None
        self.missing = self._take_layers(config)
        self.highest_fd = max(main.fileno(), self.wake_in, self.ruleset or 0)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_STACK, 64 << 20)
        _limit(resource.RLIMIT_NOFILE, 10_000)
        sys.setrecursionlimit(200_000)
        sys.argv[:] = ["main.py"]
        self.main = _Stream(main, self.selector)

    def _take_layers(self, config: dict) -> dict[str, str]:
        """Takes or prepares what the machine has; {layer: why} of what it has not."""
        missing = {} if LINUX else {"memory limit": f"{sys.platform} ignores RLIMIT_AS"}
        for name, take in (
            ("landlock", self._take_landlock),
            ("capabilities", lambda _: _drop_capabilities()),
            ("seccomp", self._take_seccomp),
        ):
            try:
                if name in config["without"]:
                    raise OSError("left out by configure(without=...)")
                if not LINUX:
                    raise OSError(f"{sys.platform} has none")
                take(config["folders"])
            except OSError as error:
                missing[name] = str(error)
        return missing

    def _take_landlock(self, folders: list[str]) -> None:
        _no_new_privileges()
        self.ruleset = _landlock_ruleset(folders)

    def _take_seccomp(self, _) -> None:
        machine = os.uname().machine
        if machine not in _MACHINES or sys.maxsize < 1 << 32:
            raise OSError(f"no table of system calls for {machine}")
        _no_new_privileges()
        own_code, _ = _seccomp_filter(machine, child=False)
        _enter_seccomp(_sock_fprog(own_code))
        self.child_code, self.pid_offsets = _seccomp_filter(machine, child=True)
        self.child_filter = _sock_fprog(self.child_code)

    def serve(self) -> None:
        """Until the host closes the main socket."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)
        self.selector.register(self.wake, selectors.EVENT_READ, None)
        for _ in range(2):
            exec(compile(_WARM_UP, "warm-up", "exec"), {"__name__": "__main__"})
        gc.collect()
        gc.freeze()  # a collection in a child would touch, and so copy, every page
        while self.main.open:
            first = min(self.deadlines.values(), default=None)
            wait_s = None if first is None else max(0.0, first - time.monotonic())
            for item, mask in self.selector.select(wait_s):
                if item.data is None:
                    os.read(self.wake, 4096)
                    self._reap()
                elif item.data.open:
                    self._serve_stream(item.data, mask)
            now = time.monotonic()
            for pid in [pid for pid, end in self.deadlines.items() if now > end]:
                self.jobs[pid].wall_hit = True
                del self.deadlines[pid]
                _kill(pid)
        for pid in self.jobs:
            _kill(pid)

    def _serve_stream(self, stream: _Stream, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            stream.send()
        elif stream is self.main:
            stream.fill(self.fds)
            while (payload := _unpack(stream.received)) is not None:
                self._start(*marshal.loads(payload))
        else:
            stream.fill()
            for pid, job in self.jobs.items():
                if job.leash is stream:
                    _kill(pid)

    def _start(self, header: dict, source: bytes, stdin: bytes) -> None:
        job = _Job(**header, started=time.monotonic())
        passed = [self.fds.popleft() for _ in range(2 if job.kind == "script" else 1)]
        job.leash = _Stream(socket.socket(fileno=passed[0]), self.selector)
        try:
            job.files = [_blank_file() for _ in range(3 if job.kind == "call" else 2)]
            if stdin:
                job.stdin = _blank_file()
                os.pwrite(job.stdin, stdin, 0)
            self.highest_fd = max(self.highest_fd, *passed, job.stdin, *job.files)
            pid = os.fork()
            if pid == 0:
                third = [*passed[1:], *job.files[2:], None][0]
                _child(self, job, source, stdin, third)
            self.jobs[pid] = job
            if job.wall_s is not None:
                self.deadlines[pid] = job.started + job.wall_s
        except OSError as error:
            self._report(job, fault=f"no process for a job: {error}")
        for channel in passed[1:]:
            os.close(channel)

    def _reap(self) -> None:
        while self.jobs:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
            if pid == 0:
                return
            _kill_group(pid)  # what it may have forked where seccomp is missing
            job, fault = self.jobs.pop(pid), ""
            self.deadlines.pop(pid, None)
            with contextlib.suppress(BlockingIOError):
                while data := os.read(self.ready_out, 4096):
                    self.ready_pids.update(struct.unpack(f"={len(data) // 4}i", data))
            if pid not in self.ready_pids:
                why = _contents(job.files[1], STDERR_CAP).decode("utf-8", "replace").strip()
                fault = f"a sandbox could not be set up: {why or status}"
            self.ready_pids.discard(pid)
            code = os.waitstatus_to_exitcode(status)
            self._report(job, code, usage.ru_utime + usage.ru_stime, fault)

    def _report(self, job: _Job, code: int = 0, cpu_s: float = 0.0, fault: str = "") -> None:
        caps = (job.output_cap, STDERR_CAP, job.output_cap)
        blobs = [_contents(fd, cap) for fd, cap in zip(job.files, caps, strict=False)]
        blobs += [b""] * (3 - len(blobs)) + [fault.encode()]
        for fd in (*job.files, job.stdin):
            if fd:
                os.close(fd)
        if job.leash.open:
            wall_s = time.monotonic() - job.started
            numbers = _REPORT.pack(code, cpu_s, wall_s, job.wall_hit, *map(len, blobs))
            job.leash.last = True
            job.leash.send(_pack(numbers + b"".join(blobs)))


def _kill(pid: int) -> None:
    """Ends a child that is not reaped yet, so that its pid is still its own."""
    _kill_group(pid)
    os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none yet, or no longer
        os.killpg(pid, signal.SIGKILL)


def _contents(fd: int, cap: int) -> bytes:
    """The last `cap` bytes of a file."""
    size = os.fstat(fd).st_size
    return os.pread(fd, min(size, cap), max(0, size - cap))


def _serve(main: socket.socket) -> None:
    """The fork server's main function."""
    config = marshal.loads(_receive(main))
    sys.path += config["site"]
    config["folders"] += sys.path
    builtins.exit = builtins.quit = sys.exit  # else added by site, which runs .pth files
    server = _ForkServer(main, config)
    main.setblocking(True)
    main.sendall(_pack(json.dumps(server.missing).encode()))
    main.setblocking(False)
    server.serve()


# ---- host ---- (the fork server does not read on: see "Cost")

OUTPUT_CAP = 16 << 20  # bytes that a program may write to standard output; also its result
SCRIPT_OUTPUT_CAP = 1 << 16  # the same for a script
LINE_CAP = 1 << 20  # bytes of one channel message
MAX_CALLS = 64  # calls in one channel message
MAX_MESSAGES = 64  # chat messages in one call
MAX_LINES = 4096  # channel messages of one script
MAX_TOOL_RUNS = 32  # {"python": ...} messages of one script: each may run for 15 s
TOOL_OUTPUT_CAP = 10_000  # characters of the output that a {"python": ...} message is sent
GRACE_S = 60.0  # how long the host waits for its server beyond what it asked for

# The server is sent its code, so a server that is started again, hours later, is the same. It
# does not compile any: that would leave it 2 MB larger.
with open(__file__, encoding="utf-8") as _file:
    _SERVER_SOURCE = _file.read().partition("# ---- host ----")[0]
_START = """\
import os, sys
os.register_at_fork = lambda **hooks: None
import marshal, socket
main = socket.socket(fileno=int(sys.argv[1]))
names = {"__name__": "fork_server"}
exec(marshal.loads(main.recv(int(sys.argv[2]), socket.MSG_WAITALL)), names)
names["_serve"](main)
"""
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LANG": "C.UTF-8", "HOME": "/",
    "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
}  # fmt: skip
# Names that LeetCode-style answers expect; the builtins last, because math and operator have
# another `pow`.
_PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string
from bisect import *; from collections import *; from copy import *; from functools import *
from heapq import *; from itertools import *; from math import *; from operator import *
from typing import *
from builtins import *
"""


class SandboxError(RuntimeError):
    """The sandbox itself failed or is unavailable. Raised, never a score."""


class _ServerGone(Exception):
    """The fork server ended, or its socket is unusable."""


class _ServerProcess:
    """The host's side of one fork server."""

    def __init__(self, modules: dict[str, str], prelude: str = ""):
        if not sys.executable:
            raise SandboxError("sys.executable is empty: run from a Python interpreter")
        code = marshal.dumps(compile(_SERVER_SOURCE, "sandbox.py", "exec", optimize=2))
        config = {
            "modules": {name: compile(text, name, "exec") for name, text in modules.items()},
            "prelude": prelude,
            "site": [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))],
            "folders": ["/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo"],
            "without": _settings["without"],
        }
        self.lock, self.stopped = threading.Lock(), False
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(GRACE_S)
        with theirs:
            fd = theirs.fileno()
            options = {"env": _environment(), "cwd": "/", "pass_fds": [fd]}
            options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            # In a session of its own: Ctrl-C reaches the host alone, and the host decides.
            self.process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", "-c", _START, str(fd), str(len(code))],
                start_new_session=True,
                **options,
            )
        _servers.add(self)
        try:
            self.sock.sendall(code + _pack(marshal.dumps(config)))
            self.missing: dict[str, str] = json.loads(_receive(self.sock))
        except (EOFError, OSError) as error:
            self.close()
            raise SandboxError("the fork server did not start: see its message above") from error
        except BaseException:
            self.close()
            raise
        if _settings["isolation"] == "strict" and self.missing:
            self.close()
            why = "; ".join(f"{name} ({reason})" for name, reason in self.missing.items())
            raise SandboxError(
                f"isolation 'strict' lacks {why}: run on Linux >= 5.13 with Landlock and "
                "seccomp, or accept less with configure('best')"
            )

    def send(self, frame: bytes, *passed: socket.socket) -> None:
        """Hands over one job with its sockets. Raises _ServerGone."""
        fds = [sock.fileno() for sock in passed]
        with self.lock:
            try:
                sent = socket.send_fds(self.sock, [frame], fds)
                self.sock.sendall(memoryview(frame)[sent:])
            except OSError as error:
                self.sock.close()
                raise _ServerGone from error
            except BaseException:  # half a frame is sent: nobody can use this socket any more
                self.sock.close()
                raise

    def close(self) -> None:
        """Ends the server and its children, by force if it doesn't end by itself."""
        self.sock.close()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _environment() -> dict[str, str]:
    """All that the server and its children see of the host's environment."""
    needed = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # the interpreter may need them
    return _ENVIRONMENT | {name: os.environ[name] for name in needed if name in os.environ}


def cores() -> int:
    """The CPUs of this process; its part of them where torchrun runs several on the machine."""
    here = len(os.sched_getaffinity(0)) if LINUX else os.cpu_count() or 1
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


_settings: dict = {"isolation": "strict", "without": []}
_servers: weakref.WeakSet = weakref.WeakSet()
_lock = threading.Lock()
_free = threading.BoundedSemaphore(cores())
_program_server: _ServerProcess | None = None


def configure(isolation: str = "strict", *, workers: int | None = None, without=()) -> None:
    """Sets the isolation of all servers that start from now on. Call it once, before first use.

    isolation: "strict" | "best". workers: how many programs may run at the same time (default:
    `cores()`). without:
    layers that count as missing ("capabilities", "landlock", "seccomp"), to see what happens.
    """
    global _free
    if isolation not in ("strict", "best"):
        raise ValueError(f"isolation is 'strict' or 'best', not {isolation!r}")
    unknown = set(without) - set(LAYERS[2:])
    if unknown:
        raise ValueError(f"without: {sorted(unknown)} can't be left out, only {LAYERS[2:]}")
    close()
    _settings.update(isolation=isolation, without=list(without))
    _free = threading.BoundedSemaphore(workers or cores())


def in_force() -> dict:
    """{"isolation": str, "layers": [names], "missing": [names], "reasons": {name: why}}.

    Starts the fork server if none is running. Raises SandboxError like `run_program`.
    """
    missing = _get_server().missing
    return {
        "isolation": _settings["isolation"],
        "layers": [name for name in LAYERS if name not in missing],
        "missing": list(missing),
        "reasons": dict(missing),
    }


def _get_server() -> _ServerProcess:
    """The running server of the programs; a new one if there is none or it died."""
    global _program_server
    with _lock:
        if _program_server is not None and _program_server.sock.fileno() < 0:
            _program_server.close()
            _program_server = None
        if _program_server is None:
            _program_server = _ServerProcess({}, _PRELUDE)
        return _program_server


def close() -> None:
    """Ends the fork server of the programs; the next use starts a new one. Runs at exit too."""
    global _program_server
    with _lock:
        server, _program_server = _program_server, None
    if server is not None:
        server.stopped = True
        server.close()


def _forget_servers() -> None:
    """In a process forked from the host: the servers are the parent's, and end with it alone."""
    global _program_server, _lock
    _program_server, _lock = None, threading.Lock()
    for server in list(_servers):
        server.sock.close()


atexit.register(close)
os.register_at_fork(after_in_child=_forget_servers)


# ---------------------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------------------


@dataclass
class RunResult:
    """How a program ended. Text is what the program wrote: never to be believed, only compared."""

    status: str  # "ok" | "error" | "timeout"
    stdout: str  # undecodable bytes are replaced; at most OUTPUT_CAP bytes
    stderr: str  # the last STDERR_CAP bytes
    result: str | None  # call mode and "ok": JSON text, not yet parsed
    cpu_s: float
    wall_s: float
    error: str = ""  # one line: the last line of the traceback, the signal, the limit


def _verdict(code: int, cpu_s: float, limit_s: float, stderr: str) -> tuple[str, str]:
    r"""(status, one line why) of a child that ended by itself or by its own limits.

    code: the exit code, or minus the signal. The kernel sends SIGXCPU at the limit (in whole
    seconds), SIGKILL a second later. It counts in clock ticks: on a loaded machine the time that
    it measures may lie below the limit then.

    >>> _verdict(0, 0.2, 1.0, ""), _verdict(0, 1.02, 1.0, "")
    (('ok', ''), ('timeout', 'more than 1 s of CPU time'))
    >>> _verdict(-signal.SIGXCPU, 0.9, 1.0, ""), _verdict(-signal.SIGKILL, 0.3, 5.0, "")
    (('timeout', 'more than 1 s of CPU time'), ('error', 'SIGKILL'))
    >>> _verdict(1, 0.1, 5.0, "Traceback ...\nValueError: no\n"), _verdict(3, 0.1, 5.0, "")
    (('error', 'ValueError: no'), ('error', 'exit code 3'))
    """
    if cpu_s > limit_s or code == -signal.SIGXCPU:
        return "timeout", f"more than {limit_s:g} s of CPU time"
    if code < 0:
        names = {int(each): each.name for each in signal.Signals}
        return "error", names.get(-code, f"signal {-code}")
    lines = stderr.strip().splitlines() or [f"exit code {code}"]
    return ("error", lines[-1]) if code else ("ok", "")


def _read_report(report: bytes, limit_s: float) -> RunResult:
    """What the server says about an ended child. Raises SandboxError if it was never ready."""
    code, cpu_s, wall_s, wall_hit, *sizes = _REPORT.unpack_from(report)
    at, texts = _REPORT.size, []
    for size in sizes:
        texts.append(report[at : at + size].decode("utf-8", "replace"))
        at += size
    stdout, stderr, result, fault = texts
    if fault:
        raise SandboxError(fault)
    status, error = _verdict(code, cpu_s, limit_s, stderr)
    if wall_hit:
        status, error = "timeout", "the wall limit"
    return RunResult(status, stdout, stderr, result or None, cpu_s, wall_s, error)


def _job_frame(kind: str, source: str, stdin: str = "", **fields) -> bytes:
    """A job: kind "program", "call" or "script", and what the server and the child read of it."""
    header = {"kind": kind, "fn_name": None, "seed": 0, "variables": {}, **fields}
    texts = (text.encode("utf-8", "replace") for text in (source, stdin))
    return _pack(marshal.dumps((header, *texts)))


def run_program(
    source: str,
    stdin: str = "",
    *,
    fn_name: str | None = None,
    cpu_s: float = 5.0,
    wall_s: float = 15.0,
    memory_mb: int = 1024,
) -> RunResult:
    """Runs one program in a fresh child. From any thread; waits while all workers are busy.

    fn_name: call mode. The source defines that function, or a class `Solution` with that method;
    `stdin` holds one JSON value a line, one line an argument. wall_s counts from the fork.
    Raises SandboxError when the sandbox failed, whatever the program did.

    A program that the fork server's death interrupts is run again, three times in all.
    """
    limits = {"cpu_s": cpu_s, "wall_s": wall_s, "memory_mb": memory_mb, "output_cap": OUTPUT_CAP}
    kind = "call" if fn_name else "program"
    frame = _job_frame(kind, source, stdin, fn_name=fn_name, **limits)
    with _free:
        result = _read_report(_run_frame(frame, wall_s), cpu_s)
    if result.status != "ok":
        result.result = None
    return result


def _run_frame(frame: bytes, wall_s: float) -> bytes:
    """Hands a job to the server and waits for the report on the job's leash.

    If this thread leaves (Ctrl-C), the leash closes, and the server ends the job.
    """
    for _ in range(3):
        server = _get_server()
        leash, theirs = socket.socketpair()
        with leash:
            try:
                with theirs:
                    server.send(frame, theirs)
                leash.settimeout(wall_s + GRACE_S)
                return _receive(leash)
            except TimeoutError as error:
                server.process.kill()
                server.sock.close()
                raise SandboxError(
                    f"the fork server did not answer within {wall_s + GRACE_S:g} s and was "
                    "ended: is the machine overloaded, or the server stopped?"
                ) from error
            except (_ServerGone, EOFError, ConnectionError) as error:
                server.sock.close()
                if server.stopped:
                    raise SandboxError("close() was called while a program ran") from error
    raise SandboxError("the fork server died three times under the same program")


# ---------------------------------------------------------------------------------------------
# Scripts
# ---------------------------------------------------------------------------------------------


@dataclass
class ScriptEvent:
    """What a script did: it asks ("calls": answer with `ScriptPool.reply`) or has ended."""

    key: object
    kind: str  # "calls" | "ended"
    calls: list[dict] = field(default_factory=list)  # [{"agent": str, "messages": [...]}, ...]
    status: str = ""  # "ended": "ok" | "crashed" | "timeout"
    answer: str | None = None  # the last one, whatever the status
    error: str = ""  # one line
    stdout: str = ""
    stderr: str = ""
    cpu_s: float = 0.0


class _Violation(ValueError):
    """A message that breaks the rules of the channel."""


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_MOST_BRACKETS = 2 + MAX_CALLS * (2 + MAX_MESSAGES)


def _parse_message(line: bytes) -> dict:
    """One channel message, checked. Raises _Violation.

    >>> _parse_message(b'{"answer": "42"}')
    {'answer': '42'}
    >>> _parse_message(b'{"answer": "42", "reward": 1}')
    Traceback (most recent call last):
    sandbox._Violation: not one field of calls, python, answer
    """
    if line.count(b"[") + line.count(b"{") > _MOST_BRACKETS:
        # Brackets outside strings bound the depth: the parser recurses in C, where the host's
        # recursion limit may have been raised above what its stack holds.
        bare = line.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2]
        if sum(part.count(b"[") + part.count(b"{") for part in bare) > _MOST_BRACKETS:
            raise _Violation("nested too deep, or too many messages")
    try:
        message = _DECODER.decode(line.decode())
    except RecursionError as error:
        raise _Violation("nested too deep") from error
    except (ValueError, OverflowError) as error:
        raise _Violation("not a line of JSON") from error
    if not isinstance(message, dict) or list(message) not in (["calls"], ["python"], ["answer"]):
        raise _Violation("not one field of calls, python, answer")
    if "calls" in message:
        calls = message["calls"]
        if not isinstance(calls, list) or not 1 <= len(calls) <= MAX_CALLS:
            raise _Violation(f"calls is not a list of 1 to {MAX_CALLS}")
        return {"calls": [_checked_call(call) for call in calls]}
    return {name: _text(value, name) for name, value in message.items()}


def _checked_call(call) -> dict:
    if not isinstance(call, dict) or call.keys() != {"agent", "messages"}:
        raise _Violation("a call is not just agent and messages")
    messages = call["messages"]
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise _Violation(f"messages is not a list of 1 to {MAX_MESSAGES}")
    for message in messages:
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise _Violation("a chat message is not just role and content")
        if message["role"] not in ("system", "user", "assistant"):
            raise _Violation("role is not system, user or assistant")
        message["content"] = _text(message["content"], "content")
    return {"agent": _text(call["agent"], "agent"), "messages": messages}


def _text(value, name: str) -> str:
    """A string that can be encoded: lone surrogates, which JSON allows, become "?"."""
    if not isinstance(value, str):
        raise _Violation(f"{name} is not a string")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


class _Script:
    """One live script, in the host."""

    def __init__(self, key, channel: _Stream, leash: _Stream):
        self.key, self.channel, self.leash = key, channel, leash
        channel.owner = leash.owner = self
        self.state = "starting"  # "running" | "asked" (waits for texts) | "tool" (for an output)
        self.deadline = time.monotonic() + 2 * GRACE_S  # of the server, until "ready"
        self.lines = self.tool_runs = self.asked = 0
        self.answer: str | None = None
        self.killed = ""  # why we ended it
        self.end: RunResult | None = None


class ScriptPool:
    r"""Live scripts, each a process that asks for text and waits. Use it from one thread.

    modules: {"workflow": its source, ...}, importable in the scripts; no other file of the
    project is. max_live: scripts at the same time. cpu_s, memory_mb: of one script. step_wall_s:
    seconds from "ready" or the last reply to the next message or the end; `deterministic`
    makes it ten times longer, so that only CPU time decides.

    >>> script = "import os; os.write(3, b'{\"answer\": \"' + word.encode() + b'\"}\\n')"
    >>> configure("best")
    >>> with ScriptPool({}) as pool:
    ...     pool.start("a", script, variables={"word": "hello"})
    ...     [(event.status, event.answer) for event in pool.poll()]
    [('ok', 'hello')]
    """

    def __init__(
        self,
        modules: dict[str, str],
        *,
        max_live: int = 512,
        cpu_s: float = 5.0,
        step_wall_s: float = 30.0,
        memory_mb: int = 512,
        deterministic: bool = False,
    ):
        self.modules, self.max_live, self.cpu_s = dict(modules), max_live, cpu_s
        self.step_wall_s = step_wall_s * (10 if deterministic else 1)
        self._limits = {"cpu_s": cpu_s, "memory_mb": memory_mb, "output_cap": SCRIPT_OUTPUT_CAP}
        self._limits["wall_s"] = None  # this pool's step clock instead
        _allow_descriptors(2 * max_live + 256)
        self._selector = selectors.DefaultSelector()
        self._scripts: dict[object, _Script] = {}
        self._events: list[ScriptEvent] = []
        self._outputs: queue.SimpleQueue = queue.SimpleQueue()  # of {"python": ...} messages
        self._wake, self._wake_in = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._next_check, self._dead = 0.0, False
        self._server: _ServerProcess | None = _ServerProcess(self.modules)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def live(self) -> int:
        """Scripts that were started and neither reported as ended by `poll` nor killed."""
        return len(self._scripts) + sum(event.kind == "ended" for event in self._events)

    def start(
        self, key, source: str, *, variables: dict[str, str] | None = None, seed: int = 0
    ) -> None:
        """Starts a script. variables: its predefined globals. seed: of its `random`.

        Raises ValueError for a key that is live or above max_live, SandboxError if the fork
        server died.
        """
        if key in self._scripts:
            raise ValueError(f"a script with the key {key!r} is live: use another key")
        if len(self._scripts) >= self.max_live:
            raise ValueError(f"{self.max_live} scripts are live: poll until one has ended")
        if self._server is None:
            self._server = _ServerProcess(self.modules)
        frame = _job_frame("script", source, seed=seed, variables=variables or {}, **self._limits)
        (channel, their_channel), (leash, their_leash) = socket.socketpair(), socket.socketpair()
        self._scripts[key] = _Script(
            key, _Stream(channel, self._selector), _Stream(leash, self._selector)
        )
        with their_channel, their_leash:
            try:
                self._server.send(frame, their_leash, their_channel)
            except _ServerGone:
                self._lose("died")

    def poll(self, timeout: float | None = None) -> list[ScriptEvent]:
        """Waits for at least one event, at most `timeout` seconds; [] if nothing is live.

        Raises SandboxError if a sandbox failed; if the fork server died, all live scripts are
        lost with it.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        while self._scripts:
            if self._dead and not self._events:  # first what had ended before
                self._lose("died")
            left = 0.0 if self._events else max(0.0, until - time.monotonic())
            for item, mask in self._selector.select(min(left, 1.0)):
                stream = item.data
                if stream is None:
                    self._take_outputs()
                elif stream.open and mask & selectors.EVENT_WRITE:
                    stream.send()
                elif stream.open and stream is stream.owner.leash:
                    self._read_leash(stream.owner)
                elif stream.open:
                    self._read_channel(stream.owner)
            self._check_deadlines()
            if self._events or left == 0.0:
                break
        events, self._events = self._events, []
        return events

    def reply(self, key, texts: list[str]) -> None:
        """Answers the script's open question: one text for each of its calls, in their order."""
        script = self._scripts.get(key)
        if script is None or script.state != "asked":
            raise ValueError(f"the script {key!r} has no open question")
        if len(texts) != script.asked:
            raise ValueError(f"the script {key!r} asked {script.asked} calls, not {len(texts)}")
        self._drain(script)  # what it sent without waiting for this
        self._answer(script, {"texts": list(texts)})

    def kill(self, key) -> None:
        """Ends a script. There will be no further event for this key."""
        self._events = [event for event in self._events if event.key != key]
        if key in self._scripts:
            self._forget(self._scripts[key])

    def close(self) -> None:
        """Ends all scripts and the fork server."""
        self._shut()
        self._events.clear()
        if self._wake.fileno() >= 0:
            self._selector.close()
            self._wake.close()
            self._wake_in.close()

    def _shut(self) -> None:
        for script in list(self._scripts.values()):
            self._forget(script)
        if self._server is not None:
            self._server.close()
            self._server, self._dead = None, False

    def _lose(self, why: str) -> None:
        lost = len(self._scripts)
        self._shut()
        raise SandboxError(f"the fork server {why}: {lost} live scripts are lost, start them again")

    def _forget(self, script: _Script) -> None:
        script.channel.close()
        script.leash.close()  # ends it, if it has not ended
        del self._scripts[script.key]

    def _kill(self, script: _Script, why: str) -> None:
        """Has the server end a script; its report follows."""
        script.killed = script.killed or why
        script.deadline = time.monotonic() + GRACE_S
        script.channel.close()
        script.leash.send(b"x")

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + 0.25
        for script in list(self._scripts.values()):
            waits = script.state in ("asked", "tool") and not script.killed
            if script.end or waits or now < script.deadline:
                continue
            if script.killed or script.state == "starting":
                self._lose("does not answer")
            self._kill(script, f"no message within {self.step_wall_s:g} s")

    def _read_leash(self, script: _Script) -> None:
        script.leash.fill()
        report = _unpack(script.leash.received)
        if report is not None:
            script.leash.close()
            self._drain(script)
            script.channel.close()
            script.end = _read_report(report, self.cpu_s)
            self._finish(script)
        elif not script.leash.open:
            self._dead = True

    def _drain(self, script: _Script) -> None:
        while script.channel.open and self._read_channel(script):
            pass

    def _read_channel(self, script: _Script) -> bool:
        """Reads once and takes what is complete. False: nothing more now."""
        if not script.channel.fill():
            return False
        try:
            self._take_lines(script)
        except _Violation as error:
            self._kill(script, f"channel: {error}")
        return script.channel.open

    def _take_lines(self, script: _Script) -> None:
        received = script.channel.received
        while (cut := received.find(b"\n", 0, LINE_CAP + 1)) >= 0:
            line = bytes(received[:cut])
            del received[: cut + 1]
            if script.state == "starting":  # the child's own line: it is ready
                self._resume(script)
                continue
            if script.state != "running":
                raise _Violation("a message before the reply to the last one")
            script.lines += 1
            if script.lines > MAX_LINES:
                raise _Violation(f"more than {MAX_LINES} messages")
            self._take_message(script, _parse_message(line))
        if len(received) > LINE_CAP:
            raise _Violation(f"a message of more than {LINE_CAP} bytes")
        if received and script.state in ("asked", "tool"):
            raise _Violation("a message before the reply to the last one")

    def _take_message(self, script: _Script, message: dict) -> None:
        if "answer" in message:
            script.answer = message["answer"]
        elif "python" in message:
            script.tool_runs += 1
            if script.tool_runs > MAX_TOOL_RUNS:
                raise _Violation(f"more than {MAX_TOOL_RUNS} tool runs")
            script.state = "tool"
            work = (script, message["python"])
            threading.Thread(target=self._run_tool, args=work, daemon=True).start()
        else:
            script.state, script.asked = "asked", len(message["calls"])
            self._events.append(ScriptEvent(script.key, "calls", message["calls"]))

    def _run_tool(self, script: _Script, source: str) -> None:
        """On a thread of its own (run_program bounds how many run): {"python": source}."""
        try:
            result = run_program(source)
            output = result.stdout[:TOOL_OUTPUT_CAP].rstrip("\n")
            output += f"\n[{result.error}]" if result.error else ""
        except SandboxError as error:
            output = error
        self._outputs.put((script, output))
        with contextlib.suppress(OSError):  # the pool was closed meanwhile
            self._wake_in.send(b"x")

    def _take_outputs(self) -> None:
        self._wake.recv(4096)
        while not self._outputs.empty():
            script, output = self._outputs.get()
            if isinstance(output, SandboxError):
                raise output
            if self._scripts.get(script.key) is script:
                self._answer(script, {"output": output})

    def _resume(self, script: _Script) -> None:
        script.state = "running"
        if not script.killed:
            script.deadline = time.monotonic() + self.step_wall_s

    def _answer(self, script: _Script, message: dict) -> None:
        self._resume(script)
        if script.channel.open:
            script.channel.send(json.dumps(message).encode() + b"\n")
        else:
            script.channel.refused = True
        self._finish(script)

    def _finish(self, script: _Script) -> None:
        """Reports the end, if the script has ended and no question of it is open."""
        end = script.end
        if end is None or script.state in ("asked", "tool"):
            return
        status, error = {"error": "crashed"}.get(end.status, end.status), end.error
        if script.killed:
            status = "crashed" if script.killed.startswith("channel") else "timeout"
            error = script.killed
        elif status == "ok" and script.channel.refused:
            status, error = "crashed", "channel: the script left before the reply"
        self._forget(script)
        event = ScriptEvent(script.key, "ended", [], status, script.answer, error)
        event.stdout, event.stderr, event.cpu_s = end.stdout, end.stderr, end.cpu_s
        self._events.append(event)


def _allow_descriptors(count: int) -> None:
    """Raises this process's soft limit of open files if it is below `count`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            raise SandboxError(f"only {hard} open files are allowed: raise `ulimit -n` to {count}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _show() -> None:
    """A program, some attacks, and a script that asks for text."""
    configure("best")
    print(in_force())
    for source in (
        "print(sum(map(int, input().split())))",
        "import os; os.fork()",
        "import socket; socket.socket()",
        "open('/etc/passwd')",
        "while True: pass",
        "print('x' * 10**10)",
    ):
        result = run_program(source, "1 2 3\n", cpu_s=1.0)
        print(f"{source:40} {result.status:8} {result.stdout.strip()}{result.error}")
    script = """
import json, os
ask = {"agent": "solver", "messages": [{"role": "user", "content": question}]}
os.write(3, json.dumps({"calls": [ask]}).encode() + b"\\n")
text = json.loads(os.read(3, 1 << 20))["texts"][0]
os.write(3, json.dumps({"answer": text}).encode() + b"\\n")
"""
    with ScriptPool({}) as pool:
        pool.start("a", script, variables={"question": "What is 6 x 7?"})
        while pool.live():
            for event in pool.poll():
                print(event)
                if event.kind == "calls":
                    pool.reply(event.key, ["42"])
    close()


if __name__ == "__main__":
    _show()
