r"""Math verification: speed per core, scaling, and every disagreement with plain math-verify.

    python tests/bench_reward.py aime2024.jsonl math500.jsonl [--threads 1 2 4] [--responses answer]

Rows need `answer`; a `solution` that boxes the answer is used as the response, as a model's would
be (`--responses answer`: the bare box only). Each row gives two pairs: its own response, right, and
the next row's, wrong unless the golds agree. Without files: golds made up in the manner of AIME and
MATH-500. Plain means verify(parse(gold in a box), parse(response)) in one process, timeouts on, as
math-verify's README has it. Both are measured in this one run, in CPU seconds (workers included),
which other load on the machine hardly changes; then in wall seconds, for the scaling.
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

import reward  # noqa: E402 - after the path

MADE_UP = r"""204|025|073|321|809|7|-50|1.25|\frac{14}{3}|3\sqrt{13}|6-5i|\frac{\pi}{6}|2516_8
90^\circ|\text{Evelyn}|x^3+3x-6|(a+5)(b+2)|1,-2|3, 5, 7|1 \pm \sqrt{19}|( 3, \frac{\pi}{2} )|(3,4]
\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}|5x - 7y + 11z + 4 = 0|10,\!080|\cot x|(2,\infty)|540"""


def read_pairs(paths: list[str], style: str) -> list[tuple[str, str, bool]]:
    rows = []
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            rows += [json.loads(line) for line in lines]
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


def measure(name: str, run, pairs: list) -> tuple[list[bool], float]:
    start, start_cpu = time.perf_counter(), cpu_s()
    verdicts = run(pairs)
    wall, cpu = time.perf_counter() - start, cpu_s() - start_cpu
    per_cpu = len(pairs) / max(cpu, 1e-9)
    right = sum(verdict == pair[2] for verdict, pair in zip(verdicts, pairs, strict=True))
    print(f"{name:<22}{per_cpu:10.0f}{len(pairs) / wall:12.0f}{right:9} of {len(pairs)}")
    return verdicts, per_cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="JSONL files with answer and perhaps solution")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--responses", choices=("solution", "answer"), default="solution")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    pairs = read_pairs(options.files, options.responses)
    plain(pairs[:5])  # both sides start with their imports done and the parser warm
    print(f"{'':<22}{'pairs/CPU-s':>10}{'pairs/s':>12}{'right':>9}")
    theirs, plain_speed = measure("math-verify, plain", plain, pairs)
    for threads in options.threads:
        reward.close()  # fresh workers: theirs keep what they parsed
        ours([(rf"\boxed{{{n}(k+1)}}", f"{n}k+{n}", True) for n in range(20 * threads)], threads)
        name = f"reward.py, {threads} threads"
        verdicts, speed = measure(name, lambda pairs, n=threads: ours(pairs, n), pairs)
        print(f"{'':<22}{speed / plain_speed:9.1f}x per core")
    print(reward.counts())
    print("disagreements (response's box | gold):")
    for (text, gold, truth), mine, other in zip(pairs, verdicts, theirs, strict=True):
        if mine != other:
            who = "reward.py" if mine == truth else "math-verify"
            print(f"  {reward.extract_answer(text)!r} | {gold!r}: reward.py {mine}; right: {who}")


if __name__ == "__main__":
    main()
