r"""Math verification: speed per core and every disagreement with plain math-verify. And how math
verification and code judging scale with cores.

    python tests/bench_reward.py aime2024.jsonl math500.jsonl apps.jsonl [--threads 1 2 4]

Math rows need `answer`; a `solution` that boxes the answer is used as the response, as a model's
would be (`--responses answer`: the bare box only). Each row gives two pairs: its own response,
right, and the next row's, wrong unless the golds agree. Without files: golds made up in the manner
of AIME and MATH-500. Plain means verify(parse(gold in a box), parse(response)) in one process,
timeouts on, as math-verify's README has it. Code rows (APPS, CodeContests) are judged by their own
golds; without any, made-up programs of some 20 ms.

First each process judges all pairs once: these verdicts are compared, and afterwards parsers and
caches are as warm as in a long run. What is timed are the same pairs with every number changed (no
cache knows them), `--repeat` times in turns, in this one run, the best time of each counting: CPU
seconds (workers included), which other load on the machine changes little, for the ratio to plain;
wall seconds for the scaling. The share of the CPU seconds that are the host's says what scaling is
possible: a host with 5 % keeps 20 workers busy. Last, workers and programs that only wait: what the
machinery itself allows, also on a machine with few or busy cores.
"""

import argparse
import json
import logging
import os
import re
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import BoundedSemaphore

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import data  # noqa: E402 - after the path
import reward  # noqa: E402
import sandbox  # noqa: E402

MADE_UP = r"""204|025|073|321|809|7|-50|1.25|\frac{14}{3}|3\sqrt{13}|6-5i|\frac{\pi}{6}|2516_8
90^\circ|\text{Evelyn}|x^3+3x-6|(a+5)(b+2)|1,-2|3, 5, 7|1 \pm \sqrt{19}|( 3, \frac{\pi}{2} )|(3,4]
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}|5x - 7y + 11z + 4 = 0|10,\!080|\cot x|(2,\infty)|540"""
LOOP = "n = int(input())\nprint(sum(i * i % 7 for i in range(n)))"
CODE_RUNS = 200  # runs of a test at least


def read_rows(paths: list[str]) -> tuple[list[dict], list[str]]:
    """(the rows of the math files, the other files)."""
    rows, others = [], []
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            found = [json.loads(line) for line in lines]
        if "answer" in found[0]:
            rows += found
        else:
            others.append(path)
    return rows, others


def math_pairs(rows: list[dict], style: str) -> list[tuple[str, str, bool]]:
    rows = rows or [{"answer": gold} for gold in MADE_UP.replace("\n", "|").split("|")]
    golds = [str(row["answer"]) for row in rows]
    responses = [rf"The answer is \boxed{{{gold}}}." for gold in golds]
    if style == "solution":
        own = [row.get("solution") or "" for row in rows]
        responses = [
            text if "\\boxed{" in text else box for text, box in zip(own, responses, strict=True)
        ]
    own = [(text, gold, True) for text, gold in zip(responses, golds, strict=True)]
    after = zip(responses[1:] + responses[:1], golds, golds[1:] + golds[:1], strict=True)
    values = [
        (text, gold, *(g.rpartition("=")[2] for g in (gold, other))) for text, gold, other in after
    ]
    return own + [(text, gold, value == other) for text, gold, value, other in values]


def code_pairs(paths: list[str]) -> list[tuple[data.Task, str]]:
    """Tasks with a program that passes, so that each test runs; CODE_RUNS of them at least."""
    pairs = []
    for path in paths:
        tasks = {task.id: task for task in data.load(path, level=None)[0]}
        for name, golds in data.golds(path):
            response = f"```python\n{golds[0]}\n```" if golds else ""
            if name in tasks and reward.score(tasks[name], response) == 1.0:
                pairs.append((tasks[name], response))
    if not pairs:
        sums = [(f"{n}\n", f"{sum(i * i % 7 for i in range(n))}\n") for n in (200_000, 300_000)]
        inputs, outputs = map(list, zip(*sums, strict=True))
        tests = {"inputs": inputs, "outputs": outputs, "fn_name": None}
        pairs = [(data.Task("loop", "code", "?", tests=tests), f"```python\n{LOOP}\n```")]
    return pairs * -(-CODE_RUNS // sum(len(task.tests["inputs"]) for task, _ in pairs))


def plain(pairs: list) -> list[bool]:
    from math_verify import parse, verify

    return [verify(parse(rf"\boxed{{{gold}}}"), parse(text)) for text, gold, _ in pairs]


def ours(pairs: list, threads: int) -> list[bool]:
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda pair: reward.math_reward(*pair[:2]) == 1.0, pairs))


def cpu_s() -> tuple[float, float]:
    """CPU seconds of this process, and of its math workers."""
    spent, workers = resource.getrusage(resource.RUSAGE_SELF), 0.0
    for worker in reward._idle:
        with open(f"/proc/{worker.process.pid}/stat") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        workers += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return spent.ru_utime + spent.ru_stime, workers


def timed(run, *arguments) -> tuple[list, float, float, float]:
    """(what it returns, wall seconds, CPU seconds with workers, CPU seconds without)."""
    start, (host, workers) = time.perf_counter(), cpu_s()
    result = run(*arguments)
    wall, (host_after, workers_after) = time.perf_counter() - start, cpu_s()
    own = host_after - host
    return result, wall, own + workers_after - workers, own


def with_workers(pairs: list, threads: int) -> None:
    """So many fresh workers, each of which has judged all pairs once."""
    reward.close()
    reward._idle.extend(reward._Worker() for _ in range(threads))
    for worker in reward._idle:
        for text, gold, _ in pairs:
            given = reward.extract_answer(text)
            request = {"prediction": given, "gold": gold, "tolerance": None, "cpu_s": 3.0}
            worker.ask(json.dumps(request).encode() + b"\n", 30.0)


def renumbered(pairs: list, shift: int) -> list:
    """Every integer is larger: pairs of the same kind, of which no cache knows one.

    By how much changes from pair to pair, for a text stands in two of them: the second time a
    single worker would remember what two workers may not.
    """

    def renumber(text: str, more: int) -> str:
        return re.sub(r"\d+", lambda match: str(int(match[0]) + more), text, flags=re.ASCII)

    moved = [(pair, shift + number % 7) for number, pair in enumerate(pairs)]
    return [(renumber(text, n), renumber(gold, n), truth) for (text, gold, truth), n in moved]


def best(runs: list[tuple]) -> tuple[float, float, float]:
    """The least wall, CPU and host's CPU seconds of some timed runs."""
    return tuple(min(run[i] for run in runs) for i in (1, 2, 3))


def show_math(n_pairs: int, runs: dict[str, list[tuple]]) -> None:
    """runs: name -> its timed runs; plain first, then reward.py with its least threads."""
    heads = ("pairs/CPU-s", "x plain", "host", "pairs/s", "scaling")
    print(f"{'math':<22}{''.join(f'{head:>12}' for head in heads)}")
    (_, plain_cpu, _), (base, _, _), *_ = map(best, runs.values())
    for name, timed_runs in runs.items():
        wall, cpu, host = best(timed_runs)
        print(
            f"{name:<22}{n_pairs / cpu:12.0f}{plain_cpu / cpu:12.1f}{host / cpu:12.1%}"
            f"{n_pairs / wall:12.0f}{base / wall:12.2f}"
        )


class WaitingWorker:
    """In the place of a math worker: 5 ms of nobody's CPU."""

    def ask(self, line: bytes, wall_s: float) -> bytes:
        time.sleep(0.005)
        return b"1\n"

    def close(self) -> str:
        return ""


def show_waiting(counts: list[int]) -> None:
    print(f"\n{'waiting':<22}{'pairs/s':>12}{'scaling':>12}{'tests/s':>12}{'scaling':>12}")
    tests = {"inputs": ["1\n"] * 4, "outputs": ["1\n"] * 4, "fn_name": None}
    task = data.Task("wait", "code", "?", tests=tests)
    program = "```python\nimport time\ntime.sleep(0.05)\nprint(input())\n```"
    bases = None
    for n in counts:
        reward.close()
        reward._slots, reward._idle[:] = BoundedSemaphore(n), [WaitingWorker() for _ in range(n)]
        pairs = [(rf"\boxed{{{k}(k+1)}}", f"{k}k+{k}", True) for k in range(100 * n)]
        start = time.perf_counter()
        ours(pairs, n)
        per_s = len(pairs) / (time.perf_counter() - start)
        reward.close()
        sandbox.configure("best", workers=n)
        reward.score_batch([(task, program)])
        start = time.perf_counter()
        reward.score_batch([(task, program)] * 5 * n, workers=n)
        tests_per_s = 20 * n / (time.perf_counter() - start)
        bases = bases or (per_s, tests_per_s)
        scaling = (per_s / bases[0], tests_per_s / bases[1])
        print(f"{n:<22}{per_s:12.0f}{scaling[0]:12.2f}{tests_per_s:12.0f}{scaling[1]:12.2f}")


def show_disagreements(pairs: list, mine: list, theirs: list) -> None:
    for name, verdicts in (("reward.py", mine), ("math-verify, plain", theirs)):
        right = sum(verdict == truth for verdict, (*_, truth) in zip(verdicts, pairs, strict=True))
        print(f"{name}: {right} of {len(pairs)} right")
    print("disagreements (response's box | gold):")
    for (text, gold, truth), my, their in zip(pairs, mine, theirs, strict=True):
        if my != their:
            who = "reward.py" if my == truth else "math-verify"
            print(f"  {reward.extract_answer(text)!r} | {gold!r}: reward.py {my}; right: {who}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="JSONL files of math rows or of code rows")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--responses", choices=("solution", "answer"), default="solution")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sandbox.configure("best")
    rows, code_files = read_rows(options.files)
    pairs, programs = math_pairs(rows, options.responses), code_pairs(code_files)
    theirs, mine = plain(pairs), ours(pairs, 1)

    math_runs, code_runs = {}, {}
    fresh = sum((renumbered(pairs, shift) for shift in (1, 8, 15)), [])
    for _ in range(options.repeat):
        for n in (0, *options.threads):
            name = f"reward.py, {n} threads" if n else "math-verify, plain"
            with_workers(pairs, n)
            run = timed(ours, fresh, n) if n else timed(plain, fresh)
            math_runs.setdefault(name, []).append(run)
        for n in options.threads:
            judged = timed(partial(reward.score_batch, workers=n), programs)
            assert set(judged[0]) == {1.0}
            code_runs.setdefault(n, []).append(judged)
    show_math(len(fresh), math_runs)

    tests = sum(len(task.tests["inputs"]) for task, _ in programs)
    base = best(code_runs[options.threads[0]])[0]
    print(f"\n{'code':<22}{'tests/s':>12}{'scaling':>12}")
    for n, runs in code_runs.items():
        wall = best(runs)[0]
        print(f"{f'score_batch, {n}':<22}{tests / wall:12.0f}{base / wall:12.2f}")
    print(reward.counts())
    show_disagreements(pairs, mine, theirs)
    show_waiting([1, 2, 4, 8, 16])


if __name__ == "__main__":
    main()
