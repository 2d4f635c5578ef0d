r"""Math verification: speed per core and every disagreement with plain math-verify. And how math
verification and code judging scale with cores.

    python tests/bench_reward.py aime2024.jsonl math500.jsonl apps.jsonl [--threads 1 2 4]

Math rows need `answer`; a `solution` that boxes the answer is used as the response, as a model's
would be (`--responses answer`: the bare box only). Each row gives two pairs: its own response,
right, and the next row's, wrong unless the golds agree. Without files: golds made up in the manner
of AIME and MATH-500. Plain means verify(parse(gold in a box), parse(response)) in one process,
timeouts on, as math-verify's README has it. Code rows (APPS, CodeContests) are judged by their own
golds; without any, made-up programs of some 20 ms.

All is measured in this one run, `--repeat` times in turns, the best time of each counting: CPU
seconds (workers included), which other load on the machine hardly changes, for the ratio to plain;
wall seconds for the scaling.
"""

import argparse
import json
import logging
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor

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


def cpu_s() -> float:
    """CPU seconds of this process and of its workers, of these also while they live."""
    ticks = os.sysconf("SC_CLK_TCK")
    spent = resource.getrusage(resource.RUSAGE_SELF)
    total = spent.ru_utime + spent.ru_stime
    for worker in reward._workers().idle:
        with open(f"/proc/{worker.process.pid}/stat") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        total += (int(user) + int(system)) / ticks
    return total


def timed(run, *arguments) -> tuple[list, float, float]:
    """(what it returns, wall seconds, CPU seconds)."""
    start, start_cpu = time.perf_counter(), cpu_s()
    result = run(*arguments)
    return result, time.perf_counter() - start, cpu_s() - start_cpu


def timed_math(pairs: list, threads: int) -> tuple[list, float, float]:
    reward.close()  # fresh workers: they keep what they parsed
    ours([(rf"\boxed{{{n}(k+1)}}", f"{n}k+{n}", True) for n in range(20 * threads)], threads)
    return timed(ours, pairs, threads)


def best(runs: list[tuple]) -> tuple[list, float, float]:
    """The result of the last of some timed runs, the least wall and the least CPU seconds."""
    return runs[-1][0], min(run[1] for run in runs), min(run[2] for run in runs)


def show_math(pairs: list, plain_run: tuple, runs: dict[int, tuple]) -> None:
    print(f"{'math':<22}{'pairs/CPU-s':>12}{'x plain':>9}{'pairs/s':>9}{'scaling':>9}{'right':>7}")
    base = min(runs)
    rows = [("math-verify, plain", plain_run)]
    rows += [(f"reward.py, {n} threads", run) for n, run in runs.items()]
    for name, (verdicts, wall, cpu) in rows:
        right = sum(verdict == pair[2] for verdict, pair in zip(verdicts, pairs, strict=True))
        print(
            f"{name:<22}{len(pairs) / cpu:12.0f}{plain_run[2] / cpu:9.1f}{len(pairs) / wall:9.0f}"
            f"{runs[base][1] / wall:9.2f}{right:7} of {len(pairs)}"
        )
    print(reward.counts())
    print("disagreements (response's box | gold):")
    for (text, gold, truth), mine, other in zip(pairs, runs[base][0], plain_run[0], strict=True):
        if mine != other:
            who = "reward.py" if mine == truth else "math-verify"
            print(f"  {reward.extract_answer(text)!r} | {gold!r}: reward.py {mine}; right: {who}")


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
    plain(pairs[:5])  # both sides start with their imports done and the parser warm

    plain_runs, math_runs, code_runs = [], {}, {}
    for _ in range(options.repeat):
        plain_runs.append(timed(plain, pairs))
        for n in options.threads:
            math_runs.setdefault(n, []).append(timed_math(pairs, n))
            judge = timed(lambda n=n: reward.score_batch(programs, workers=n))
            assert set(judge[0]) == {1.0}
            code_runs.setdefault(n, []).append(judge)
    show_math(pairs, best(plain_runs), {n: best(runs) for n, runs in math_runs.items()})

    tests = sum(len(task.tests["inputs"]) for task, _ in programs)
    base = best(code_runs[min(code_runs)])[1]
    print(f"\n{'code':<22}{'tests/s':>12}{'scaling':>9}")
    for n, runs in code_runs.items():
        wall = best(runs)[1]
        print(f"{f'score_batch, {n}':<22}{tests / wall:12.0f}{base / wall:9.2f}")


if __name__ == "__main__":
    main()
