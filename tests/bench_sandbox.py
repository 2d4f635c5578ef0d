"""What one sandboxed item costs, in CPU milliseconds: in the host, in the fork server (which
pays for the fork) and in the child. Linux only; run it as `python tests/bench_sandbox.py [N]`.

The first two lines are the floor: a bare `fork` + `_exit` from a Python process of the server's
size, and a fresh interpreter. Compare with them, not with another machine's numbers.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import sandbox

ONE_CALL = """
import json, os
call = {"agent": "solver", "messages": [{"role": "user", "content": question}]}
os.write(3, json.dumps({"calls": [call]}).encode() + b"\\n")
text = json.loads(os.read(3, 1 << 20))["texts"][0]
os.write(3, json.dumps({"answer": text}).encode() + b"\\n")
"""


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def running_s(pid: int) -> float:
    """CPU seconds that the process `pid` itself has used (nanoseconds in schedstat)."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def floor(count: int) -> dict[str, float]:
    def fork_once():
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def fresh_once():
        subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)

    rows = {}
    for name, action in {
        "fork + _exit from here": fork_once,
        "fresh python -I -S": fresh_once,
    }.items():
        began = time.process_time() + children_cpu_s()
        for _ in range(count):
            action()
        rows[name] = 1e3 * (time.process_time() + children_cpu_s() - began) / count
    return rows


def cost(pid: int, count: int, items) -> tuple[float, float, float, float]:
    """Host, server, child and wall milliseconds an item; `items()` returns the children's CPU."""
    wall, host, server = time.perf_counter(), time.process_time(), running_s(pid)
    child = items()
    return tuple(
        1e3 * seconds / count
        for seconds in (
            time.process_time() - host,
            running_s(pid) - server,
            child,
            time.perf_counter() - wall,
        )
    )


def programs(count: int, source: str, stdin: str, **options) -> float:
    results = [sandbox.run_program(source, stdin, **options) for _ in range(count)]
    assert all(result.status == "ok" for result in results), results[0]
    return sum(result.cpu_s for result in results)


def scripts(pool, count: int, live: int) -> float:
    child, started = 0.0, 0
    while started < count or pool.live():
        while started < count and pool.live() < live:
            pool.start(started, ONE_CALL, variables={"question": "What is 6 x 7?"})
            started += 1
        for event in pool.poll():
            if event.kind == "calls":
                pool.reply(event.key, ["42"])
            else:
                assert event.status == "ok", event
                child += event.cpu_s
    return child


def main(count: int) -> None:
    for name, ms in floor(count).items():
        print(f"{name:44s}{ms:28.2f}")
    print(f"{'CPU ms an item':44s}{'host':>7}{'server':>7}{'child':>7}{'sum':>7}{'wall':>7}")
    pid = sandbox._get_server().process.pid
    rows = {
        "program, print(1)": lambda: programs(count, "print(1)", ""),
        "program, 100 kB of input": lambda: programs(
            count, "print(sum(map(int, input().split())))", "12345 " * 17000
        ),
        "function call": lambda: programs(count, "def f(a, b): return a + b", "1\n2", fn_name="f"),
    }
    for name, items in rows.items():
        show(name, cost(pid, count, items))
    for live in (1, 16, 256):
        with sandbox.ScriptPool({}) as pool:
            pid = pool._server.process.pid
            show(
                f"script with one call, {live} live",
                cost(pid, count, lambda pool=pool, live=live: scripts(pool, count, live)),
            )


def show(name: str, milliseconds) -> None:
    host, server, child, wall = milliseconds
    total = host + server + child
    print(f"{name:44s}{host:7.2f}{server:7.2f}{child:7.2f}{total:7.2f}{wall:7.2f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
