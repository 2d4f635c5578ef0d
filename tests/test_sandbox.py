"""The sandbox: attacks that must fail, programs that must pass, the channel's rules, and that
nothing is left over. The attacks are cases from public reports, rewritten."""

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import sandbox

HERE = Path(sandbox.__file__).parent
ON_LINUX = pytest.mark.skipif(not sandbox.LINUX, reason="Linux only")

# ---------------------------------------------------------------------------------------------
# Attacks and programs. name | must | (input, expected output) or (arguments, result, "f")
# "blocked": anything but a pass. @PORT@, @PID@ (a victim), @HOST@ and @DIR@ are put in.
# ---------------------------------------------------------------------------------------------

LIBC = """
import ctypes, os, sys
L = ctypes.CDLL(None, use_errno=True)
L.syscall.restype = ctypes.c_long
"""
CASES_TEXT = r"""
### loop_catch_all | timeout
while True:
    try:
        while True: pass
    except BaseException: pass
### alarm_cancel | timeout
import signal
signal.alarm(0); signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
while True: pass
### ignore_signals | timeout
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
### regex_backtrack | timeout
import re; re.match(r'(a+)+$', 'a' * 40 + 'b')
### sigstop_self | timeout
import os, signal; os.kill(os.getpid(), signal.SIGSTOP)
### atexit_loop | timeout
import atexit
@atexit.register
def f():
    while True: pass
### del_loop | timeout
class A:
    def __del__(self):
        while True: pass
a = A()
del a
### mem_grow_swallow | timeout
x = []
while True:
    try: x.append(bytearray(1 << 20))
    except MemoryError: pass
### mem_double_str | fail
s = 'a'
while True: s += s
### stack_overflow_c | fail
import sys
sys.setrecursionlimit(10**9)
class A:
    def __getattr__(s, n): return getattr(s, n + 'x')
A().y
### recursion_forever | fail
import sys
sys.setrecursionlimit(10**9)
def f(n): return f(n + 1) + 1
f(0)
### fork_bomb | blocked
import os
pid = os.fork()
if pid == 0: os._exit(0)
print('ESCAPED')
### stderr_flood | fail
import sys
while True: sys.stderr.write('x' * 1000)
### stdout_flood | fail
while True: print('x' * 1000)
### dev_shm_fill | blocked
open('/dev/shm/sandbox_test_x', 'wb').write(b'x'); print('ESCAPED')
### tmp_fill | blocked
import tempfile
tempfile.NamedTemporaryFile(delete=False).write(b'x'); print('ESCAPED')
### memfd_fill | blocked
import os
os.memfd_create('a'); print('ESCAPED')
### sysv_shm | blocked
@LIBC@
if L.shmget(0, 1 << 20, 0o1600) >= 0: print('ESCAPED')
### rlimit_raise | blocked
import resource
resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('ESCAPED')
### read_secret | blocked
if open('@DIR@/secret').read(): print('ESCAPED')
### proc_environ | blocked
import os
for p in ('self', os.getppid(), @HOST@, @PID@):
    try: open(f'/proc/{p}/environ', 'rb').read(); print('ESCAPED'); break
    except OSError: pass
### ptrace_victim | blocked
@LIBC@
for p in (os.getppid(), @HOST@, @PID@):
    if L.ptrace(16, p, 0, 0) == 0: print('ESCAPED'); break
### process_vm_readv | blocked
@LIBC@
b = ctypes.create_string_buffer(8)
class V(ctypes.Structure): _fields_ = [('a', ctypes.c_void_p), ('n', ctypes.c_size_t)]
l = V(ctypes.addressof(b), 8); r = V(id(0), 8)
for p in (os.getppid(), @HOST@, @PID@):
    if L.process_vm_readv(p, ctypes.byref(l), 1, ctypes.byref(r), 1, 0) > 0:
        print('ESCAPED'); break
### kill_parent | blocked
import os
for p in (os.getppid(), @HOST@, @PID@):
    try: os.kill(p, 0); print('ESCAPED'); break
    except OSError: pass
### kill_all | blocked
import os
os.kill(-1, 0); print('ESCAPED')
### killpg | blocked
import os
os.killpg(os.getpgid(@HOST@), 0); print('ESCAPED')
### sigio_victim | blocked
import fcntl, os, signal, socket
a, b = socket.socketpair()
fcntl.fcntl(a, fcntl.F_SETOWN, @PID@); print('ESCAPED')
### prlimit_victim | blocked
import resource
resource.prlimit(@PID@, resource.RLIMIT_NOFILE); print('ESCAPED')
### renice_victim | blocked
import os
os.setpriority(os.PRIO_PROCESS, @PID@, 5); print('ESCAPED')
### affinity_victim | blocked
import os
os.sched_setaffinity(@PID@, {0}); print('ESCAPED')
### abstract_unix | blocked
import socket
s = socket.socket(socket.AF_UNIX); s.connect('\0sandbox-victim-@PORT@'); print('ESCAPED')
### tcp | blocked
import socket
socket.create_connection(('127.0.0.1', @PORT@)); print('ESCAPED')
### dns | blocked
import socket
socket.getaddrinfo('localhost', 80); socket.socket(); print('ESCAPED')
### datagram_pair | blocked
import socket
socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); print('ESCAPED')
### unlink_secret | blocked
import os
os.rename('@DIR@/secret', '@DIR@/s2'); print('ESCAPED')
### truncate_secret | blocked
import os
os.truncate('@DIR@/secret', 0); print('ESCAPED')
### chmod_secret | blocked
import os
os.chmod('@DIR@/secret', 0o777); print('ESCAPED')
### exec_shell | blocked
import os
os.execv('/bin/echo', ['echo', 'ESCAPED'])
### multiprocessing | blocked
import multiprocessing as m
p = m.get_context('fork').Process(target=print, args=('ESCAPED',)); p.start(); p.join()
### x32_abi | blocked
@LIBC@
import platform
r = L.syscall(0x40000000 | 39) if platform.machine() == 'x86_64' else -1
if r > 0: print('ESCAPED')
### int80_abi | blocked
@LIBC@
import mmap, platform
if platform.machine() == 'x86_64':
    m = mmap.mmap(-1, 4096, prot=7); m.write(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3')
    f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
    if f() > 0: print('ESCAPED')
### io_uring | blocked
@LIBC@
if L.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0: print('ESCAPED')
### second_filter_listener | blocked
@LIBC@
if L.syscall(317, 2, 0, 0) == 0 or L.prctl(1, 0, 0, 0, 0) == 0: print('ESCAPED')
### inherited_fds | blocked
import os
for fd in range(3, 1024):
    try: os.fstat(fd); print('ESCAPED'); break
    except OSError: pass
### import_project | blocked
import sys
sys.path[:0] = ['@DIR@', '']
import secretmod; print('ESCAPED')
### capset | blocked
@LIBC@
if L.chroot(b'/') == 0: print('ESCAPED')
### gpu_device | blocked
import os
for d in ('/dev/nvidia0', '/dev/nvidiactl', '/dev/kvm', '/dev/vda', '/dev/mem', '/dev/tty'):
    try: os.open(d, os.O_RDONLY); print('ESCAPED'); break
    except OSError: pass
### token_in_environment | blocked
import os
if 'SANDBOX_TEST_TOKEN' in os.environ: print('ESCAPED')
### exit0_early | fail | "3\n" | SECRET-7391
import sys; sys.exit(0)
### os_exit0 | fail | "3\n" | SECRET-7391
import os; os._exit(0)
### print_markers | fail | "3\n" | SECRET-7391
print('passed'); print('{"status": 0, "passed": true}'); print('ALL TESTS PASSED')
### scan_memory | fail | "3\n" | SECRET-7391
import gc, re
hit = None
for o in gc.get_objects():
    for r in gc.get_referents(o):
        if isinstance(r, (str, bytes)) and len(r) < 10**6:
            s = r if isinstance(r, str) else r.decode('latin1')
            m = re.search('SECRET' + '-[0-9]+', s)
            if m: hit = m.group()
print(hit)
### setup_marker | fail | "3\n" | SECRET-7391
import os, sys
sys.stderr.write('SANDBOX SETUP FAILED'); sys.stderr.flush(); os._exit(125)
### all_answers | fail | "" | 7
for i in range(10): print(i)
### state_across_tests | fail | "" | second
import builtins
n = getattr(builtins, '_n', 0); builtins._n = n + 1
print('second' if n else 'first')
### always_equal | fail | "1" | 2 | f
class E:
    def __eq__(s, o): return True
    def __ne__(s, o): return False
    def __bool__(s): return True
    def __sub__(s, o): return s
    def __abs__(s): return 0.0
class Solution:
    def f(self, x): return E()
### int_repr | fail | "1" | 2 | f
class I(int):
    def __repr__(s): return '2'
    __str__ = __repr__
class Solution:
    def f(self, x): return I(7)
### spoof_result_fd | fail | "1" | 2 | f
import os
for fd in range(3, 64):
    try: os.write(fd, b'true')
    except OSError: pass
class Solution:
    def f(self, x): os._exit(0)
### deep_json | fail | "1" | 2 | f
class Solution:
    def f(self, x):
        import os
        os.write(3, b'[' * 200000); os._exit(0)
### bool_for_int | fail | "1" | 1 | f
class Solution:
    def f(self, x): return True
### no_function | fail | "1" | 1 | f
def g(x): return x
### ok_tuple_result | pass | "2" | [1, 2] | f
def f(n): return (1, n)
### ok_two_arguments | pass | "[1, 2]\n\"\u2028\"\n" | "3\u2028" | f
class Solution:
    def f(self, xs: List[int], s: str) -> str: return str(reduce(add, xs)) + s
### ok_pow_is_builtin | pass | "3" | 4 | f
def f(n): return pow(n, 4, 7)
### ok_sum | pass | "1 2 3\n" | 6
print(sum(map(int, input().split())))
### ok_recursion | pass | "" | 100000
import sys
sys.setrecursionlimit(10**6)
def f(n): return 0 if n == 0 else 1 + f(n - 1)
print(f(10**5))
### ok_recursion_without_limit | pass | "" | 5000
def f(n): return 0 if n == 0 else 1 + f(n - 1)
print(f(5000))
### ok_lru_cache_deep | pass | "" | 20000
import sys
from functools import lru_cache
if sys.version_info >= (3, 12): print(20000); sys.exit()  # a fixed C limit: fails in any judge
sys.setrecursionlimit(10**6)
@lru_cache(None)
def f(n): return 0 if n == 0 else 1 + f(n - 1)
print(f(20000))
### ok_buffer_read | pass | "1 2\n3\n" | 6
import sys
print(sum(map(int, sys.stdin.buffer.read().split())))
### ok_buffer_readline | pass | "1\n2\n" | 3
import sys
r = sys.stdin.buffer.readline
print(int(r()) + int(r()))
### ok_open0 | pass | "1 2\n" | 3
print(sum(map(int, open(0).read().split())))
### ok_for_line | pass | "ab\ncd\n" | ba dc
import sys
for l in sys.stdin: print(l.strip()[::-1])
### ok_eof | pass | "1\n2\n" | 3
s = 0
while True:
    try: s += int(input())
    except EOFError: break
print(s)
### ok_main_guard | pass | "4\n" | 8
def main(): print(int(input()) * 2)
if __name__ == '__main__':
    main()
### ok_crlf_out | pass | "" | 1 2
import sys; sys.stdout.buffer.write(b'1\r\n2\r\n')
### ok_exit_after | pass | "" | 7
import sys
print(7)
sys.exit()
### ok_exit_builtin | pass | "" | 7
print(7)
exit()
### ok_os_exit_flush | pass | "" | 7
import os, sys
print(7); sys.stdout.flush(); os._exit(0)
### ok_atexit | pass | "" | 7
import atexit, io, sys
b = io.StringIO()
sys.stdout = b
atexit.register(lambda: sys.__stdout__.write(b.getvalue()))
print(7)
### ok_bigint_print | pass | "" | 12042
print(len(str(2**40000)))
### ok_unicode | pass | "héß€→\n" | →€ßéh
print(input()[::-1])
### ok_threads | pass | "" | [0, 1, 4]
import asyncio
async def main(): print(await asyncio.gather(*[asyncio.to_thread(pow, i, 2) for i in range(3)]))
asyncio.run(main())
### ok_thread_at_exit | pass | "" | late
import threading, time
threading.Thread(target=lambda: (time.sleep(0.05), print('late'))).start()
### ok_devnull | pass | "" | 7
import os, sys
sys.stderr = open(os.devnull, 'w'); print(7)
### ok_own_signal | pass | "" | 7
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: print(7)); signal.raise_signal(signal.SIGUSR1)
"""


def parse_cases():
    for block in CASES_TEXT.split("\n### ")[1:]:
        title, _, code = block.partition("\n")
        name, must, stdin, expected, fn_name, *_ = [*title.split(" | "), *[None] * 3]
        stdin = json.loads(stdin) if stdin else ""
        yield name, (must, code.replace("@LIBC@", LIBC), stdin, expected or "ESCAPED", fn_name)


CASES = dict(parse_cases())

# Runs on its own, also as another user: cases as JSON on standard input -> results as JSON.
DRIVER = r"""
import concurrent.futures, json, os, socket, subprocess, sys, tempfile
sys.path.insert(0, sys.argv[1])
import sandbox

isolation, without, cases = json.load(sys.stdin)
os.environ["SANDBOX_TEST_TOKEN"] = "t"
sandbox.configure(isolation, without=without, workers=4)
folder = tempfile.mkdtemp()
for name in ("secret", "secretmod.py"):
    open(os.path.join(folder, name), "w").write("x = 1")
listener = socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
unix = socket.socket(socket.AF_UNIX)
unix.bind(f"\0sandbox-victim-{port}")
unix.listen()
victim = subprocess.Popen(["sleep", "600"])
known = {"@PORT@": port, "@PID@": victim.pid, "@HOST@": os.getpid(), "@DIR@": folder}

def run(case):
    code, stdin, fn_name, limits = case
    for name, value in known.items():
        code = code.replace(name, str(value))
    result = sandbox.run_program(code, stdin, fn_name=fn_name, **limits)
    return result.status, result.result if fn_name else result.stdout, result.error

try:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, cases))
    unharmed = victim.poll() is None and open(os.path.join(folder, "secret")).read() == "x = 1"
    mode = os.stat(os.path.join(folder, "secret")).st_mode & 0o777
finally:
    victim.kill()
    victim.wait()
    sandbox.close()
json.dump({"results": results, "unharmed": unharmed and mode != 0o777}, sys.stdout)
"""


def drive(cases, *, isolation="strict", without=(), user=None, python=sys.executable, home=HERE):
    done = subprocess.run(
        [python, "-c", DRIVER, str(home)],
        input=json.dumps([isolation, list(without), cases]),
        capture_output=True,
        text=True,
        user=user,
        cwd="/",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def as_driver_case(must, code, stdin, expected, fn_name):
    limits = {"cpu_s": 20, "wall_s": 100, "memory_mb": 256}
    if must == "timeout":
        limits |= {"cpu_s": 1, "wall_s": 15}
    if "SIGSTOP" in code:
        limits["wall_s"] = 1
    return [code, stdin, fn_name, limits]


def verdict(status, output, expected, fn_name) -> str:
    """As strict as reward.py needs to be for these cases."""
    if status != "ok":
        return status
    if fn_name is None:
        return "pass" if output.split() == expected.split() else "fail"
    try:
        given, wanted = json.loads(output), json.loads(expected)
    except (ValueError, RecursionError):
        return "fail"
    return "pass" if given == wanted and type(given) is type(wanted) else "fail"


def check_all(**options) -> None:
    outcome = drive([as_driver_case(*case) for case in CASES.values()], **options)
    assert outcome["unharmed"]
    wrong = []
    for (name, case), result in zip(CASES.items(), outcome["results"], strict=True):
        must, _, _, expected, fn_name = case
        got = verdict(*result[:2], expected, fn_name)
        fine = {"pass": got == "pass", "timeout": got == "timeout"}.get(must, got != "pass")
        if not fine or (must == "blocked" and "ESCAPED" in (result[1] or "")):
            wrong.append((name, must, result))
    assert not wrong


@ON_LINUX
def test_every_case_as_this_user():
    check_all()


@ON_LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_every_case_as_an_ordinary_user(tmp_path):
    home = Path("/tmp") / f"sandbox-test-{os.getpid()}"  # tmp_path lies in a 0700 folder
    home.mkdir(mode=0o755)
    try:
        shutil.copy(sandbox.__file__, home)
        for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
            probe = "import sys; sys.exit(sys.version_info < (3, 11))"
            with contextlib.suppress(OSError):
                done = subprocess.run([python, "-I", "-c", probe], user=65534, cwd="/")
                if done.returncode == 0:
                    break
        else:
            pytest.skip("no Python >= 3.11 that an ordinary user may run")
        check_all(user=65534, python=python, home=home)
    finally:
        shutil.rmtree(home)


@ON_LINUX
@pytest.mark.parametrize(
    "layer, name",
    [
        ("seccomp", "fork_bomb"),
        ("seccomp", "kill_parent"),
        ("seccomp", "sigio_victim"),
        ("seccomp", "datagram_pair"),
        ("landlock", "read_secret"),
        ("landlock", "import_project"),
        ("capabilities", "capset"),
    ],
)
def test_each_layer_is_what_stops_a_case(layer, name):
    # The cases are real: without the layer they escape. And the layer alone stops them.
    if layer == "capabilities" and os.geteuid() != 0:
        pytest.skip("only root has any")
    must, code, stdin, expected, fn_name = CASES[name]
    case = [code, stdin, fn_name, {}]
    # Landlock scopes signals, too; seccomp refuses chroot to root and everybody.
    others = {"kill_parent": ["landlock"], "capset": ["seccomp"]}.get(name, [])
    outcome = drive([case], isolation="best", without=[layer, *others])
    assert outcome["results"][0][1] == "ESCAPED\n"
    outcome = drive([case], isolation="best", without=set(sandbox.LAYERS[2:]) - {layer})
    assert "ESCAPED" not in outcome["results"][0][1]


# ---------------------------------------------------------------------------------------------
# Programs
# ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def isolation():
    sandbox.configure("strict" if sandbox.LINUX else "best")
    yield
    sandbox.close()


def test_result_fields():
    result = sandbox.run_program("import sys\nprint(input())\nprint('e', file=sys.stderr)", "hé\n")
    assert (result.status, result.stdout, result.stderr) == ("ok", "hé\n", "e\n")
    assert (result.result, result.error) == (None, "")
    assert 0 < result.cpu_s < 5 and 0 < result.wall_s < 15


@pytest.mark.parametrize(
    "code, error",
    [
        ("1/0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "exit code 3"),
        ("raise SystemExit('no')", "no"),
        ("import os; os._exit(256 + 7)", "exit code 7"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys\ndel sys.stdout.flush\nsys.exit(1)", None),
        ("a\0b", None),
    ],
)
def test_bad_ends_are_errors(code, error):
    result = sandbox.run_program(code)
    assert result.status == "error"
    assert error is None or result.error == error


def test_traceback_shows_the_program_alone():
    stderr = sandbox.run_program("def f():\n    1/0\nf()").stderr
    assert 'File "main.py", line 2, in f' in stderr and "sandbox" not in stderr


def test_cpu_time_decides_over_exit_code_and_rounding():
    spin = "import time\nwhile time.process_time() < {}: pass"
    assert sandbox.run_program(spin.format(0.4), cpu_s=0.2).status == "timeout"
    assert sandbox.run_program(spin.format(0.1), cpu_s=5).status == "ok"
    sleeper = sandbox.run_program("import time; time.sleep(60)", cpu_s=5, wall_s=0.3)
    assert (sleeper.status, sleeper.error) == ("timeout", "the wall limit")
    assert sleeper.wall_s < 10


def test_large_input_and_output_and_caps():
    big = "x" * 3_000_000
    assert sandbox.run_program("print(input())", big + "\n").stdout == big + "\n"
    result = sandbox.run_program("import sys\nsys.stderr.write('a' * 200_000 + 'end')")
    assert len(result.stderr) == sandbox.STDERR_CAP and result.stderr.endswith("aend")
    result = sandbox.run_program("import os\nwhile True: os.write(1, b'x' * (1 << 20))", cpu_s=9)
    assert result.status == "error" and len(result.stdout) == sandbox.OUTPUT_CAP
    assert sandbox.run_program("import os; os.write(1, b'\\xff')").stdout == "\ufffd"


def test_memory_limit():
    code = "x = bytearray(200 << 20)"
    assert sandbox.run_program(code, memory_mb=512, cpu_s=60, wall_s=200).status == "ok"
    assert sandbox.run_program(code, memory_mb=128).error == "MemoryError"


def test_call_mode():
    def call(code, stdin):
        return sandbox.run_program(code, stdin, fn_name="f").result

    assert call("def f(a, b): print('noise'); return [a, b]", '"x"\n{"k": null}\n') == (
        '["x", {"k": null}]'
    )
    assert call("class Solution:\n def f(self): return Counter('aab')['a']", "") == "2"
    assert call("def f(n): return 10 ** n", "5000") == "1" + "0" * 5000
    result = sandbox.run_program("def f(): return {1, 2}", fn_name="f")
    assert (result.status, result.result) == ("error", None)
    with pytest.raises(sandbox.SandboxError, match="could not be set up.*JSON"):
        sandbox.run_program("def f(a): return a", "not json", fn_name="f")


def test_numpy_can_be_imported():
    pytest.importorskip("numpy")
    code = "import numpy as np\nprint(np.arange(4) @ np.arange(4))"
    assert sandbox.run_program(code, cpu_s=30, wall_s=100).stdout == "14\n"
    code = "import numpy as np\ndef f(): return np.arange(3)"
    assert sandbox.run_program(code, fn_name="f", cpu_s=30, wall_s=100).result == "[0, 1, 2]"


def test_a_sandbox_that_cannot_be_set_up_is_our_fault():
    with pytest.raises(sandbox.SandboxError, match="could not be set up"):
        sandbox.run_program("print(1)", cpu_s=1e30)


def test_threads_share_the_workers():
    sandbox.configure(sandbox.in_force()["isolation"], workers=2)
    began, results = time.monotonic(), {}

    def run(i):
        code = f"import time; time.sleep(0.2); print({i})"
        results[i] = sandbox.run_program(code, wall_s=60).stdout

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"{i}\n" for i in range(6)}
    assert time.monotonic() - began > 0.6  # three rounds of two
    sandbox.configure(sandbox.in_force()["isolation"])


# ---------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------


@ON_LINUX
def test_strict_names_the_missing_layer_and_best_goes_on():
    try:
        for layer in ("landlock", "seccomp", "capabilities"):
            sandbox.configure("strict", without=[layer])
            with pytest.raises(sandbox.SandboxError, match=f"strict.*{layer}.*configure"):
                sandbox.run_program("print(1)")
            with pytest.raises(sandbox.SandboxError, match=layer):
                sandbox.ScriptPool({})
            sandbox.configure("best", without=[layer])
            force = sandbox.in_force()
            assert (force["isolation"], force["missing"]) == ("best", [layer])
            assert force["layers"] == [name for name in sandbox.LAYERS if name != layer]
            assert sandbox.run_program("print(1)").stdout == "1\n"
    finally:
        sandbox.configure("strict")
    assert sandbox.in_force()["missing"] == []
    with pytest.raises(ValueError, match="rlimits"):
        sandbox.configure("best", without=["rlimits"])
    with pytest.raises(ValueError, match="sloppy"):
        sandbox.configure("sloppy")


@ON_LINUX
def test_the_path_of_macos(monkeypatch):
    # The server believes that it is not on Linux: no memfd, no Landlock, no seccomp, no prctl.
    test, otherwise = 'LINUX = sys.platform.startswith("linux")', "LINUX = False"
    assert test in sandbox._SERVER_SOURCE
    source = sandbox._SERVER_SOURCE.replace(test, otherwise)
    monkeypatch.setattr(sandbox, "_SERVER_SOURCE", source)
    try:
        sandbox.configure("strict")
        with pytest.raises(sandbox.SandboxError, match="landlock.*seccomp"):
            sandbox.in_force()
        sandbox.configure("best")
        assert sandbox.in_force()["layers"] == ["fork server", "rlimits"]
        assert sandbox.run_program("print(int(input()) + 1)", "41").stdout == "42\n"
        assert sandbox.run_program("def f(x): return x", "7", fn_name="f").result == "7"
        assert sandbox.run_program("while True: pass", cpu_s=1).status == "timeout"
        with sandbox.ScriptPool({}) as pool:
            assert run_scripts(pool, {"a": TWO_CALLS})["a"].answer == "critic:solver:hi"
    finally:
        sandbox.configure("strict")


def decide(code: bytes, number: int, arguments=(), architecture=0xC000003E) -> str:
    """A BPF machine for the operations that the filter uses."""
    words = [number, architecture, 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        words += [argument & 0xFFFFFFFF, argument >> 32]
    program = list(struct.iter_unpack("=HBBI", code))
    at = value = 0
    while True:
        operation, if_true, if_false, k = program[at]
        at += 1
        if operation == 0x20:
            value = words[k // 4]
        elif operation == 0x54:
            value &= k
        elif operation == 0x06:
            return {0x7FFF0000: "allow", 0x80000000: "kill", 0x50001: "EPERM", 0x50026: "ENOSYS"}[k]
        else:
            assert operation in (0x15, 0x35)
            at += if_true if (value == k if operation == 0x15 else value >= k) else if_false


@pytest.mark.parametrize("machine, column", [("x86_64", 0), ("aarch64", 1)])
def test_filter_decides_as_the_tables_say(machine, column):
    own, architecture = 4242, sandbox._MACHINES[machine][1]
    code, offsets = sandbox._seccomp_filter(machine, child=True)
    assert len(offsets) == 3
    for offset in offsets:
        struct.pack_into("=I", code, offset, own)
    outer = sandbox._seccomp_filter(machine, child=False)[0]

    def ask(numbers, *arguments):
        number = numbers[column]
        both = {decide(bytes(c), number, arguments, architecture) for c in (outer, code)}
        return max(both, key=["allow", "ENOSYS", "EPERM", "kill"].index)

    for name, numbers in {**sandbox._REFUSED, **sandbox._REFUSED_IN_CHILD}.items():
        if numbers[column] is not None:
            assert ask(numbers, 0) == "EPERM", name
    clone, kill, tgkill, prlimit = (56, 220), (62, 129), (234, 131), (302, 261)
    socketpair, prctl, fcntl = (53, 199), (157, 167), (72, 25)
    assert ask(clone, 17) == "EPERM" and ask(clone, 0x3D0F00) == "allow"
    for number in (kill, tgkill):
        assert ask(number, own) == "allow"
        assert {ask(number, pid) for pid in (0, 1, own + 1, 2**64 - 1)} == {"EPERM"}
    assert ask(prlimit, 0) == ask(prlimit, own) == "allow" and ask(prlimit, 1) == "EPERM"
    assert ask(socketpair, 1, 1 | 0o2000000) == "allow" and ask(socketpair, 1, 2) == "EPERM"
    assert ask(prctl, 15) == "allow" and {ask(prctl, n) for n in (1, 4, 22, 38)} == {"EPERM"}
    assert ask(fcntl, 3, 1) == "allow" and ask(fcntl, 3, 8) == "EPERM"
    read, futex, mmap = (0, 63), (202, 98), (9, 222)
    assert {ask(n) for n in (read, futex, mmap)} == {"allow"}
    assert {ask((n, n)) for n in (424, 425, 435, 1000)} == {"ENOSYS"}
    assert ask((0x40000027, 0x40000027)) == "kill"
    assert decide(bytes(code), 0, (), 0x40000003) == "kill"  # i386


@pytest.mark.parametrize(
    "column, headers",
    [
        (0, ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h"]),
        (1, ["/usr/include/asm-generic/unistd.h"]),
    ],
)
def test_numbers_are_those_of_the_kernel_headers(column, headers):
    header = next((h for h in headers if os.path.exists(h)), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    known = {}
    for line in Path(header).read_text().splitlines():
        parts = line.split()
        if len(parts) == 3 and parts[0] == "#define" and parts[1].startswith("__NR"):
            name = parts[1].removeprefix("__NR_").removeprefix("__NR3264_")
            if parts[2].isdigit():
                known.setdefault(name, int(parts[2]))
    known.setdefault("umount2", known.get("umount"))
    table = {**sandbox._REFUSED, **sandbox._REFUSED_IN_CHILD}
    names = ("clone", "kill", "tgkill", "prlimit64", "sched_setaffinity", "socketpair", "prctl")
    for name, (numbers, *_) in zip((*names, "fcntl", "ioctl"), sandbox._BY_ARGUMENT, strict=True):
        table[name] = numbers
    assert {n: t[column] for n, t in table.items() if t[column] is not None} == {
        n: known[n] for n, t in table.items() if t[column] is not None
    }
    assert {n for n, t in table.items() if t[column] is None}.isdisjoint(known)


# ---------------------------------------------------------------------------------------------
# Scripts
# ---------------------------------------------------------------------------------------------

API = """
import json, os
def tell(message):
    raw = message if isinstance(message, bytes) else json.dumps(message).encode()
    os.write(3, raw + b'\\n')
def reply():
    line = b''
    while not line.endswith(b'\\n'): line += os.read(3, 1 << 16)
    return json.loads(line)
def call(agent, text): return {'agent': agent, 'messages': [{'role': 'user', 'content': text}]}
def llm(agent, text):
    tell({'calls': [call(agent, text)]})
    return reply()['texts'][0]
"""
TWO_CALLS = "tell({'answer': llm('critic', llm('solver', 'hi'))})"


@pytest.fixture(scope="module")
def pool(isolation):
    with sandbox.ScriptPool({"api": API}, cpu_s=2, step_wall_s=60) as pool:
        yield pool


def run_scripts(
    pool, sources, answer=lambda call: f"{call['agent']}:{call['messages'][-1]['content']}"
):
    """Runs scripts to their ends; {key: the "ended" event}."""
    ended = {}
    for key, source in sources.items():
        pool.start(key, (API if "api" not in pool.modules else "from api import *\n") + source)
    while pool.live():
        for event in pool.poll(60):
            if event.kind == "calls":
                pool.reply(event.key, [answer(call) for call in event.calls])
            else:
                ended[event.key] = event
    assert pool.poll() == []
    return ended


def test_scripts_that_must_pass(pool):
    ended = run_scripts(
        pool,
        {
            "two": TWO_CALLS,
            "asyncio": textwrap.dedent(
                """
                import asyncio, threading
                lock = threading.Lock()
                def one(i):
                    with lock: return llm('solver', str(i))
                async def main():
                    return await asyncio.gather(*[asyncio.to_thread(one, i) for i in range(3)])
                tell({'answer': str(asyncio.run(main()))})
                """
            ),
            "ensemble": "tell({'calls': [call('a', 'x'), call('b', 'y')]})\n"
            "tell({'answer': '+'.join(reply()['texts'])})",
            "last answer": "tell({'answer': 'old'})\ntell({'answer': llm('a', 'new')})",
            "none": "print('out'); import sys; print('err', file=sys.stderr)",
            "unicode": "tell({'answer': llm('é', '\\u2028→\\U0001f600')})",
            "surrogate": r"""tell(b'{"answer": "a\\ud800b"}')""",
            "closing": "tell({'answer': 'x'})\nos.close(3)\nprint('on')",
            "brackets": "tell({'answer': llm('a', '[{' * 20000)[-2:]})",
        },
    )
    assert {event.status for event in ended.values()} == {"ok"}, ended
    assert {key: event.answer for key, event in ended.items()} == {
        "two": "critic:solver:hi",
        "asyncio": "['solver:0', 'solver:1', 'solver:2']",
        "ensemble": "a:x+b:y",
        "last answer": "a:new",
        "none": None,
        "unicode": "é:\u2028→\U0001f600",
        "surrogate": "a?b",
        "closing": "x",
        "brackets": "[{",
    }
    assert (ended["none"].stdout, ended["none"].stderr) == ("out\n", "err\n")
    assert (ended["none"].error, ended["closing"].stdout) == ("", "on\n")
    assert all(0 < event.cpu_s < 2 for event in ended.values())


STAY = "\nimport time; time.sleep(600)"
VIOLATIONS = {
    "extra field": ("tell({'role': 'a', 'messages': [], 'reward': 1})" + STAY, "not one field"),
    "reward": ("tell({'calls': [call('a', 'x')], 'reward': 1})" + STAY, "not one field"),
    "call field": ("tell({'calls': [{**call('a', 'x'), 'temperature': 0}]})" + STAY, "a call is"),
    "chat field": (
        "c = call('a', 'x'); c['messages'][0]['name'] = 'n'; tell({'calls': [c]})" + STAY,
        "a chat message",
    ),
    "role": (
        "tell({'calls': [{'agent': 'a', 'messages': [{'role': 'tool', 'content': ''}]}]})" + STAY,
        "role is not",
    ),
    "content": ("tell({'calls': [call('a', True)]})" + STAY, "content is not a string"),
    "agent": ("tell({'calls': [call(1, 'x')]})" + STAY, "agent is not a string"),
    "answer": ("tell({'answer': 7})" + STAY, "answer is not a string"),
    "no call": ("tell({'calls': []})" + STAY, "list of 1 to 64"),
    "too many calls": ("tell({'calls': [call('a', 'x')] * 65})" + STAY, "list of 1 to 64"),
    "too many messages": (
        "c = call('a', 'x'); c['messages'] *= 65; tell({'calls': [c]})" + STAY,
        "list of 1 to 64",
    ),
    "list": ("tell([1])" + STAY, "not one field"),
    "garbage": ("tell(b'\\xff\\xfe{')" + STAY, "not a line of JSON"),
    "empty line": ("tell(b'')" + STAY, "not a line of JSON"),
    "nan": ("tell(b'{\"answer\": NaN}')" + STAY, "not a line of JSON"),
    "long number": ("tell(b'{\"answer\": ' + b'1' * 10000 + b'}')" + STAY, "not a"),
    "deep": ("tell(b'[' * 4000)" + STAY, ""),  # too deep for 3.11, unfinished for 3.13
    "deeper": ("tell(b'[' * 200000)" + STAY, "nested too deep"),
    "oversized": ("tell(b'x' * 2_000_000)" + STAY, "more than 1048576 bytes"),
    "no end": (
        "while True: os.write(3, b'x' * 65536)",
        "more than 1048576 bytes",
    ),
    "flood": ("while True: tell({'answer': 'x'})", "more than 4096 messages"),
    "tools": (
        "for _ in range(40): tell({'python': '1'}); os.read(3, 9999)",
        "more than 32 tool runs",
    ),
    "out of turn": ("tell({'calls': [call('a', 'x')]})\n" * 2 + STAY, "before the reply"),
    "half a message early": (
        "tell({'calls': [call('a', 'x')]}); os.write(3, b'{')" + STAY,
        "before the reply",
    ),
    "python and more": ("tell({'python': '1'}); tell({'answer': 'x'})" + STAY, "before the reply"),
    "asking and leaving": ("tell({'calls': [call('a', 'x')]})", "left before the reply"),
    "asking and closing": (
        "tell({'calls': [call('a', 'x')]}); os.close(3)\nimport time; time.sleep(0.1)",
        "left before the reply",
    ),
}


def test_channel_violations_crash_the_script(pool):
    ended = run_scripts(pool, {key: source for key, (source, _) in VIOLATIONS.items()})
    for key, (_, error) in VIOLATIONS.items():
        assert ended[key].status == "crashed", (key, ended[key])
        assert ended[key].error.startswith("channel: ") and error in ended[key].error, key
    assert ended["flood"].answer == "x"


def test_the_parser_survives_a_raised_recursion_limit():
    # json recurses in C: one million brackets overflow the host's stack if it lets them.
    code = "import sys, sandbox; sys.setrecursionlimit(10**6)\nsandbox._parse_message(b'[' * 10**6)"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert "_Violation: nested too deep" in done.stderr


def test_other_ends_of_scripts(pool):
    ended = run_scripts(
        pool,
        {
            "loop": "tell({'answer': llm('a', 'x')})\nwhile True: pass",
            "raise": "tell({'answer': 'early'})\nraise RuntimeError('why')",
            "exit": "import sys; sys.exit(3)",
            "kill": "import signal; os.kill(os.getpid(), signal.SIGKILL)",
            "flood": "import sys\nwhile True: sys.stdout.write('x' * 10000)",
        },
    )
    got = {key: (e.status, e.answer, e.error) for key, e in ended.items()}
    assert got["loop"] == ("timeout", "a:x", "more than 2 s of CPU time")
    assert got["raise"] == ("crashed", "early", "RuntimeError: why")
    assert got["exit"] == ("crashed", None, "exit code 3")
    assert got["kill"] == ("crashed", None, "SIGKILL")
    assert ended["flood"].status == "crashed"
    assert len(ended["flood"].stdout) <= sandbox.SCRIPT_OUTPUT_CAP


def test_python_messages_are_run_by_the_pool(pool):
    code = "tell({'python': %r}); tell({'answer': reply()['output']})"
    ended = run_scripts(
        pool,
        {
            "ok": code % "print(6 * 7)",
            "error": code % "print('a'); 1/0",
            "locked": code % "open('/etc/passwd')",
            "long": code % "print('x' * 10**6)",
        },
    )
    assert ended["ok"].answer == "42"
    assert ended["error"].answer == "a\n[ZeroDivisionError: division by zero]"
    assert "Permission denied" in ended["locked"].answer
    assert len(ended["long"].answer) == sandbox.TOOL_OUTPUT_CAP


def test_an_end_never_overtakes_an_open_question(pool):
    pool.start("k", "from api import *\ntell({'calls': [call('a', 'x')]}); os._exit(5)")
    (event,) = pool.poll()
    assert (event.key, event.kind, event.calls[0]["agent"]) == ("k", "calls", "a")
    time.sleep(0.2)  # long dead
    assert pool.poll(0.1) == [] and pool.live() == 1
    pool.reply("k", ["too late"])
    (event,) = pool.poll()
    assert (event.kind, event.status, event.error) == ("ended", "crashed", "exit code 5")
    assert pool.live() == 0 and pool.poll() == []


def test_a_message_sent_while_the_host_thinks_is_out_of_turn(pool):
    late = "tell({'calls': [call('a', 'x')]})\nimport time; time.sleep(0.1); tell({'answer': 'x'})"
    pool.start("k", "from api import *\n" + late + STAY)
    assert [event.kind for event in pool.poll()] == ["calls"]
    time.sleep(1.0)
    pool.reply("k", ["y"])
    (event,) = pool.poll()
    assert (event.status, event.answer) == ("crashed", None)
    assert event.error == "channel: a message before the reply to the last one"


def test_many_live_scripts_answered_in_any_order(pool):
    source = "from api import *\ntell({'answer': llm('a', name) + llm('b', name)})"
    for i in range(60):
        pool.start(i, source, variables={"name": f"n{i}"})
    asked, answers = {}, {}
    while len(asked) < 60:
        for event in pool.poll():
            asked[event.key] = event.calls[0]["messages"][0]["content"]
    assert asked == {i: f"n{i}" for i in range(60)} and pool.live() == 60
    assert pool.poll(0.05) == []
    for i in reversed(range(60)):
        pool.reply(i, [f"<{i}>"])
    while pool.live():
        for event in pool.poll():
            if event.kind == "calls":
                pool.reply(event.key, ["."])
            else:
                answers[event.key] = event.answer
    assert answers == {i: f"<{i}>." for i in range(60)}


def test_wrong_use_is_a_value_error(pool):
    pool.start("k", "from api import *\nllm('a', 'x')")
    with pytest.raises(ValueError, match="is live"):
        pool.start("k", "")
    with pytest.raises(ValueError, match="no open question"):
        pool.reply("other", ["x"])
    pool.poll()
    with pytest.raises(ValueError, match="asked 1 calls, not 2"):
        pool.reply("k", ["x", "y"])
    pool.kill("k")
    pool.kill("k")
    assert pool.live() == 0 and pool.poll() == []
    pool.start("k", "")  # the key is free again
    assert [event.status for event in pool.poll()] == ["ok"]
    with sandbox.ScriptPool({}, max_live=1) as small:
        small.start(1, "")
        with pytest.raises(ValueError, match="1 scripts are live"):
            small.start(2, "")


def test_a_sleeper_times_out_and_holds_nobody_up():
    with sandbox.ScriptPool({"api": API}, step_wall_s=1.5) as pool:
        began = time.monotonic()
        for i in range(3):
            pool.start(
                i, "import time; time.sleep(600)" if i == 0 else "from api import *\n" + TWO_CALLS
            )
        ended = []
        while pool.live():
            for event in pool.poll(0.2):
                if event.kind == "calls":
                    time.sleep(0.6)  # waiting for a reply doesn't count: 1.2 s of it
                    pool.reply(event.key, ["r"])
                else:
                    ended.append(event)
        assert sorted((e.key, e.status, e.answer) for e in ended) == [
            (0, "timeout", None),
            (1, "ok", "r"),
            (2, "ok", "r"),
        ]
        assert {e.error for e in ended if e.key == 0} == {"no message within 1.5 s"}
        assert time.monotonic() - began < 30


def test_deterministic_hashes_and_random_numbers():
    source = "import random\nfrom api import *\ntell({'answer': str((hash('x'), random.random()))})"
    seen = []
    for _ in range(2):
        with sandbox.ScriptPool({"api": API}, deterministic=True) as pool:
            assert pool.step_wall_s == 300
            for key, seed in (("a", 1), ("b", 1), ("c", 2)):
                pool.start(key, source, seed=seed)
            answers = {}
            while pool.live():
                answers |= {event.key: event.answer for event in pool.poll()}
        seen.append(answers)
    assert seen[0] == seen[1]
    assert seen[0]["a"] == seen[0]["b"] != seen[0]["c"]


# ---------------------------------------------------------------------------------------------
# Nothing is left over, and the fork server may die
# ---------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pids, seconds=10.0) -> bool:
    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    until = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(map(alive, pids))


def wait_for_children(pid: int, count: int) -> list[int]:
    until = time.monotonic() + 20
    while len(children(pid)) < count and time.monotonic() < until:
        time.sleep(0.02)
    return children(pid)


@ON_LINUX
def test_close_kill_and_exceptions_leave_no_process_and_no_descriptor():
    sandbox.run_program("")
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.suppress(ZeroDivisionError), sandbox.ScriptPool({}) as pool:
        server = pool._server.process.pid
        for i in range(3):
            pool.start(i, "import time; time.sleep(600)")
        scripts = wait_for_children(server, 3)
        pool.kill(0)
        until = time.monotonic() + 10
        while len(children(server)) > 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert len(children(server)) == 2
        pool.start("tool", API + "tell({'python': 'import time; time.sleep(9)'}); reply()")
        assert pool.poll(0.5) == []
        1 / 0  # noqa: B018
    assert gone([server, *scripts])
    programs = sandbox._get_server().process.pid
    sandbox.close()
    assert gone([programs])
    assert len(os.listdir("/proc/self/fd")) <= before


HOST = r"""
import os, sys, threading, time
sys.path.insert(0, sys.argv[1])
import sandbox
sandbox.configure("best")
pool = sandbox.ScriptPool({})
pool.start("s", "import time; time.sleep(600)")
server = sandbox._get_server().process.pid
threading.Thread(
    target=sandbox.run_program, args=("import time; time.sleep(600)",), kwargs={"wall_s": 600},
    daemon=True,
).start()
def children(pid):
    return open(f"/proc/{pid}/task/{pid}/children").read().split()
servers = [server, pool._server.process.pid]
while not all(children(pid) for pid in servers): time.sleep(0.01)
print(*servers, *children(servers[0]), *children(servers[1]), flush=True)
"""


@ON_LINUX
@pytest.mark.parametrize("how", ["kill -9", "exit", "exception", "kill -9 of the servers"])
def test_nothing_outlives_the_host(how):
    end = {"exit": "sys.exit()", "exception": "1/0"}.get(how, "time.sleep(600)")
    host = subprocess.Popen(
        [sys.executable, "-c", HOST + end, str(HERE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with host, host.stdout:
        pids = [int(word) for word in host.stdout.readline().split()]
        assert len(pids) == 4
        if how == "kill -9":
            host.kill()
        elif how == "kill -9 of the servers":
            for pid in pids[:2]:
                os.kill(pid, signal.SIGKILL)
        assert gone(pids)
        host.kill()


@ON_LINUX
def test_ctrl_c_reaches_the_host_alone():
    code = HOST.split("pool = ")[0] + textwrap.dedent(
        r"""
        import signal
        server = sandbox._get_server().process.pid
        def interrupt():
            while not (child := open(f"/proc/{server}/task/{server}/children").read().split()):
                time.sleep(0.01)
            os.killpg(0, signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            sandbox.run_program("import time; time.sleep(600)", wall_s=600)
        except KeyboardInterrupt:
            pass
        until = time.monotonic() + 10
        while open(f"/proc/{server}/task/{server}/children").read() and time.monotonic() < until:
            time.sleep(0.01)
        left = open(f"/proc/{server}/task/{server}/children").read()
        print(repr(left), sandbox.run_program("print(1)").stdout)
        print(server == sandbox._get_server().process.pid)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(HERE)],
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=100,
    )
    assert done.stdout == "'' 1\n\nTrue\n", done.stderr


@ON_LINUX
def test_programs_survive_the_death_of_their_server():
    sandbox.configure("strict", workers=4)
    server = sandbox._get_server().process.pid
    results = {}

    def run(i):
        code = f"import time; time.sleep(0.5); print({i})"
        results[i] = sandbox.run_program(code, wall_s=60).stdout

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    victims = wait_for_children(server, 4)
    os.kill(server, signal.SIGKILL)
    for thread in threads:
        thread.join()
    assert results == {i: f"{i}\n" for i in range(4)}
    assert gone([server, *victims])
    sandbox.configure("strict")


@ON_LINUX
def test_a_program_that_kills_the_server_again_and_again_is_reported(monkeypatch):
    sandbox.configure("best", without=["seccomp", "landlock"])
    try:
        with pytest.raises(sandbox.SandboxError, match="died three times"):
            sandbox.run_program("import os, time; os.kill(os.getppid(), 9); time.sleep(9)")
        assert sandbox.run_program("print(1)").stdout == "1\n"
    finally:
        sandbox.configure("strict")


@ON_LINUX
def test_a_stopped_server_does_not_hang_the_host(monkeypatch):
    server = sandbox._get_server().process.pid
    monkeypatch.setattr(sandbox, "GRACE_S", 0.3)
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(sandbox.SandboxError, match="did not answer"):
        sandbox.run_program("print(1)", wall_s=0.2)
    monkeypatch.undo()
    assert sandbox.run_program("print(1)").stdout == "1\n"
    assert gone([server])


@ON_LINUX
def test_the_pool_reports_lost_scripts_and_starts_again():
    with sandbox.ScriptPool({"api": API}) as pool:
        pool.start("done", "from api import *\ntell({'answer': 'kept'})")
        assert select.select([pool._scripts["done"].leash.sock], [], [], 60)[0]  # reported
        pool.start("lost", "import time; time.sleep(600)")
        scripts = wait_for_children(pool._server.process.pid, 1)
        os.kill(pool._server.process.pid, signal.SIGKILL)
        assert gone(scripts)
        assert [event.answer for event in pool.poll()] == ["kept"]  # nobody's result is lost
        with pytest.raises(sandbox.SandboxError, match="died: 1 live scripts are lost"):
            pool.poll()
        assert pool.live() == 0 and pool.poll() == []
        assert run_scripts(pool, {"next": TWO_CALLS})["next"].answer == "critic:solver:hi"


@ON_LINUX
def test_close_ends_programs_that_run():
    failed = []

    def run():
        with pytest.raises(sandbox.SandboxError, match="close"):
            sandbox.run_program("import time; time.sleep(600)", wall_s=600)
        failed.append(True)

    server = sandbox._get_server().process.pid
    thread = threading.Thread(target=run)
    thread.start()
    programs = wait_for_children(server, 1)
    sandbox.close()
    thread.join()
    assert failed and gone([server, *programs])
    assert sandbox._program_server is None  # nobody started another


@ON_LINUX
def test_a_server_ends_although_a_fork_of_its_host_lives():
    pool = sandbox.ScriptPool({})
    process = pool._server.process
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    try:
        pool.close()
        assert process.returncode == 0  # by itself, not by force
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@ON_LINUX
def test_a_forked_host_leaves_its_parents_server_alone():
    sandbox.run_program("")
    server = sandbox._get_server().process.pid
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            fine = sandbox.run_program("print(1)").stdout == "1\n"
            code = 0 if fine and sandbox._get_server().process.pid != server else 2
            sandbox.close()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert sandbox.run_program("print(2)").stdout == "2\n"
    assert sandbox._get_server().process.pid == server


@ON_LINUX
def test_long_use_leaks_neither_descriptors_nor_memory(pool):
    def used():
        pids = [os.getpid(), sandbox._get_server().process.pid, pool._server.process.pid]
        files = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
        return files, pages

    def work(count):
        for _ in range(count):
            sandbox.run_program("print(1)", "x")
        for i in range(count):
            pool.start(i, "pass")
        while pool.live():
            pool.poll()

    def settled():  # the server closes its ends a little later than the host
        before = used()
        while time.sleep(0.3) or (now := used())[0] != before[0]:
            before = now
        return now

    work(20)
    files, pages = settled()
    work(80)
    files_later, pages_later = settled()
    assert all(later <= first for first, later in zip(files, files_later, strict=True))
    assert all(later - first < 256 for first, later in zip(pages, pages_later, strict=True))


@ON_LINUX
def test_high_descriptor_numbers_are_closed_too():
    # The server's own socket keeps the number that it had in the host.
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]
    code = "import os\nfor fd in range(3, 2000):\n try: os.fstat(fd); print(fd)\n except OSError: 0"
    try:
        with sandbox.ScriptPool({}) as pool:
            assert run_scripts(pool, {"a": code})["a"].stdout == "3\n"  # its channel
        sandbox.close()
        assert sandbox.run_program(code).stdout == ""
    finally:
        for fd in held:
            os.close(fd)
        sandbox.close()


def test_the_file_is_a_leaf(tmp_path):
    shutil.copy(sandbox.__file__, tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sandbox\n"
        "sandbox.configure('best'); print(sandbox.run_program('print(1)').stdout)\n"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.stdout == "1\n\n[]\n", done.stderr


def test_host_descriptors_are_raised_or_refused(monkeypatch):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    sandbox._allow_descriptors(100)
    sandbox._allow_descriptors(1000)
    assert asked == [(1000, 4096)]
    with pytest.raises(sandbox.SandboxError, match="ulimit"):
        sandbox._allow_descriptors(5000)


def test_no_socket_of_the_host_is_inherited_by_programs_it_starts():
    sandbox.run_program("")
    numbers = [server.sock.fileno() for server in sandbox._servers if server.sock.fileno() >= 0]
    assert numbers and not any(os.get_inheritable(number) for number in numbers)
    assert isinstance(socket.socket, type)
