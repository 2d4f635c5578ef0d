"""How good is a model at designing and executing? A mean with its interval, and what it cost.

The idea. Every task is tried K times (samples) under one or several systems:

    designed         each sample is a fresh design and one execution of it
    single           no designer: one agent answers
    structure:NAME   no designer: the fixed script of that structure
    vote:calls       one agent is asked again and again, until it has made as many calls as the
                     first system's sample of this task (designer included); the majority wins
    vote:tokens      the same until it has as many output tokens; its last reply may go over

A sample has a reward (0 or 1), a status (execute.py lists them; any but "ok" has reward 0) and a
price: calls, output tokens, seconds. `designed` minus `single` is what designing is worth at any
price; `designed` minus `vote:calls` or `vote:tokens` is what it is worth at the same price.

The estimate. First the mean over a task's samples, then the mean over tasks. The interval is a
percentile bootstrap over *tasks*: draw as many tasks as there are, with repetition, and take the
mean; the middle 95 % of many such means is the interval. The samples of a task are not drawn
again: they share its difficulty, so 8 samples of 30 tasks are 30 observations, not 240.

    rewards [[1, 1], [0, 1], [0, 0]]: 3 tasks of 2 samples, means 1, 0.5, 0, together 0.5.
    A draw has the mean 0 only if it is the third task three times, 1 in 27. That is more than
    2.5 %, so the interval is 0 to 1: three tasks say nearly nothing. 12 right of 30 say more.

    >>> bootstrap_interval([[1, 1], [0, 1], [0, 0]])
    (0.0, 1.0)
    >>> low, high = bootstrap_interval([[1]] * 12 + [[0]] * 18)
    >>> round(low, 2), round(high, 2)
    (0.23, 0.57)

The comparison. Two systems are compared task by task: a hard task is hard for both, so the
differences of a task's two means vary less than the means do. Of the 30 tasks above another
system gets the same 12 right and 4 more: 16 of 30, interval 0.37 to 0.70, which overlaps. But the
difference is 0 for 26 tasks and 1 for 4, and its interval excludes 0:

    >>> low, high = bootstrap_interval([[1]] * 16 + [[0]] * 14)
    >>> round(low, 2), round(high, 2)
    (0.37, 0.7)
    >>> low, high = bootstrap_interval([[0]] * 26 + [[1]] * 4)
    >>> round(low, 2), round(high, 2)
    (0.03, 0.27)

What the interval does not say. It is about other tasks, not about another training run. Where all
tasks score alike the bootstrap sees no spread and gives a point, though 30 tasks that all fail
still allow a true rate of 3/30 (the rule of three).

Where it differs from the paper, and why. The paper gives points without intervals, its AIME
figures are multiples of 1/30 (one try a task; 12 of 30 is its 40.00), and its single agent has one
call where a design has several. Here samples are drawn as in training, statuses stand beside the
mean, a single agent may spend what a design spends, tasks whose gold can't be graded are left out
and named, and what fails on our side is an exception, never a score.

The model folder is what train.py writes: weights, tokenizer, and run_config.json, which says how
this model is sampled and in which sandbox. Any folder of a causal LM with a chat template will do.
All sampling seeds derive from (seed, task, sample). Toy tasks are train.py's held-out ones.

    python evaluate.py --model runs/toy/final --samples 4
    python evaluate.py --model runs/toy/final --system designed,single,vote:calls --n-tasks 60
    python evaluate.py --model MODEL_FOLDER --data aime24,aime25 --samples 8 --out aime.json

With --out FILE the rows go to FILE.partial.jsonl, a line a task, until all are there: after
Ctrl-C, a crash or a kill the same command goes on. --compare FILE.json puts the systems of an
earlier report on the same tasks beside this one's: two checkpoints, or the four pairs of a
designer (--model) and an executor (--executor-model) before and after training, which say which
role the gain comes from.

Golds first. A row whose own gold fails can't be learnt from, and there are many. This keeps the
rows of a data set or a file that pass, and writes their ids, one a line, for data.load(keep=...):

    python evaluate.py --check-golds apps --out apps.kept.txt

A math gold has to be usable (reward.usable_gold). A code row needs one of its first 3 Python 3
programs to pass all of its tests, each within the very limits that a reward has.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch
import transformers

import design
import toy
from data import (
    DATASETS,
    DataError,
    LoadReport,
    OneLineParser,
    Task,
    data_names,
    golds,
    load,
    load_evaluation,
    read_prompt,
)
from engine import EngineError, ModelError, choose_engine, find_model, open_engine, vllm_missing
from execute import Execution, Rollout, open_pool, rollout
from reward import (
    code_reward,
    extract_answer,
    extract_code,
    math_equal,
    run_asserts,
    score,
    usable_gold,
    usable_tasks,
)
from sandbox import SandboxError, configure, cores, in_force, run_program
from sandbox import close as close_sandbox

# In the seeds: training steps count from 0, so no draw is used twice.
EVALUATION_STEP, VOTE_STEP = -1, -2
VOTES = ("vote:calls", "vote:tokens")
VOTE_INPUTS = 8  # test inputs on which programs that vote are compared
TOY_TASKS = 512
WINDOW = 5  # steps that a curve is the mean of
MAX_GOLDS = 3  # of a row are tried at most
# What a model folder without run_config.json is sampled with.
DEFAULTS = {
    "preset": "",
    "data": "",  # what the run trained on; "" is the preset's own
    "isolation": "strict",
    "deterministic": False,
    "temperature": 1.0,
    "designer_max_tokens": 2048,
    "executor_max_tokens": 2048,
    "max_calls": 32,
    "max_context": None,
    "designer_prompt": None,
    "seed": 0,
}
SAMPLING = ("deterministic", "seed", "temperature", "designer_max_tokens", "executor_max_tokens")
SAMPLING += ("max_calls",)


class UsageError(ValueError):
    """What was asked for can't be done. The message is one line that says what to give."""


# --- results -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """One sample of one task. `calls` and tokens count the designer's call too.

    `tokens` are output tokens; both token counts are 0 where the engine has no ids (an API).
    `seconds`: from the first call to the answer, with the whole batch at work beside it.
    `structure` is None if the design was invalid.
    """

    task: str
    kind: str
    source: str
    sample: int
    reward: float
    status: str
    structure: str | None
    calls: int
    tokens: int
    prompt_tokens: int
    seconds: float = field(compare=False)  # the rest is the same in every run
    answer: str | None
    error: str | None


@dataclass(slots=True)
class Result:
    """What one system did on some tasks: one row a (task, sample), in the order of the tasks."""

    system: str
    rows: list[Row] = field(default_factory=list)

    def by_task(self) -> dict[str, list[float]]:
        """Task id -> the rewards of its samples."""
        rewards: dict[str, list[float]] = {}
        for row in self.rows:
            rewards.setdefault(row.task, []).append(row.reward)
        return rewards

    def by_source(self) -> dict[str, Result]:
        """Data set, or the kind of tasks that have none -> the result on its tasks."""
        parts: dict[str, Result] = {}
        for row in self.rows:
            part = parts.setdefault(row.source or row.kind, Result(self.system))
            part.rows.append(row)
        return parts

    def mean(self) -> float:
        """Mean reward: over a task's samples, then over tasks. ValueError without rows."""
        return float(_task_means(self.by_task().values()).mean())

    def interval(self) -> tuple[float, float]:
        """The bootstrap interval of the mean."""
        return bootstrap_interval(self.by_task().values())


def _task_means(values: Iterable[Sequence[float]]) -> np.ndarray:
    means = np.array([np.mean(samples) for samples in values])  # (tasks,)
    if not len(means):
        raise ValueError("no samples to take a mean of: evaluate at least one task")
    return means


def bootstrap_interval(
    values: Iterable[Sequence[float]], *, level: float = 0.95, draws: int = 4000, seed: int = 0
) -> tuple[float, float]:
    """(low, high): the percentile bootstrap interval of the mean over tasks.

    values: for each task its samples (any number, at least one). Seeded, so the same values give
    the same interval. One task, or tasks that all score alike, give a point (see the header).

    >>> bootstrap_interval([[1, 1, 1, 1], [1]])
    (1.0, 1.0)
    """
    means, rng = _task_means(values), np.random.default_rng(seed)
    n = len(means)
    drawn = [means[rng.integers(n, size=n)].mean() for _ in range(draws)]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_difference(a: Result, b: Result) -> tuple[float, float, float]:
    """(mean, low, high) of a's reward minus b's, task by task, with the bootstrap interval.

    Raises ValueError where the two have not tried the same tasks.
    """
    first, second = a.by_task(), b.by_task()
    if first.keys() != second.keys():
        raise ValueError(f"{a.system} and {b.system} have tried different tasks")
    differences = [[np.mean(first[task]) - np.mean(second[task])] for task in first]
    return float(np.mean(differences)), *bootstrap_interval(differences)


def pass_at_k(rewards: Sequence[float], k: int) -> float:
    """The chance that k of these samples, drawn without repetition, hold a right one.

    1 - C(wrong, k) / C(n, k), the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374). With
    1 right of 4, a pair misses it in C(3, 2) = 3 of C(4, 2) = 6 cases:

    >>> pass_at_k([0, 1, 0, 0], 1), pass_at_k([0, 1, 0, 0], 2), pass_at_k([0, 1, 0, 0], 4)
    (0.25, 0.5, 1.0)
    """
    wrong = sum(reward < 1 for reward in rewards)
    return 1 - math.comb(wrong, k) / math.comb(len(rewards), k)


def passes(result: Result) -> dict[str, float]:
    """pass@k, the mean over tasks, for k = 1, 2, 4, ... and the number of samples."""
    tasks = result.by_task().values()
    samples = min(map(len, tasks))
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    return {str(k): float(np.mean([pass_at_k(rewards, k) for rewards in tasks])) for k in ks}


def structure_shares(rows: Sequence[Row]) -> dict[str, float]:
    """{structure: its share of the valid designs}, the most frequent first; {} without any."""
    counts = Counter(row.structure for row in rows if row.structure)
    return {name: n / counts.total() for name, n in counts.most_common()}


def make_row(
    task, sample: int, ran: Execution, structure: str | None, calls: list, seconds: float
) -> Row:
    """One sample as a row; calls: all that it took to get there."""
    return Row(
        task=task.id,
        kind=task.kind,
        source=task.source,
        sample=sample,
        reward=ran.reward,
        status=ran.status,
        structure=structure,
        calls=len(calls),
        tokens=count_tokens(calls),
        prompt_tokens=sum(len(call.prompt_ids or ()) for call in calls),
        seconds=seconds,
        answer=ran.answer,
        error=ran.error,
    )


def count_tokens(calls: Iterable) -> int:
    return sum(len(call.output_ids or ()) for call in calls)


# --- evaluation --------------------------------------------------------------------------------


def forced_structure(system: str, scripts: dict[str, str]) -> str | None:
    """The structure that a system forces; None for `designed`.

    >>> scripts = {"single": "...", "debate": "..."}
    >>> names = ("designed", "single", "structure:debate", "vote:calls")
    >>> [forced_structure(name, scripts) for name in names]
    [None, 'single', 'debate', 'single']
    """
    forced = {"designed": None, "single": "single"} | dict.fromkeys(VOTES, "single")
    forced |= {f"structure:{name}": name for name in scripts}
    if system not in forced:
        raise UsageError(f"unknown system {system!r}: give one of {', '.join(forced)}")
    return forced[system]


def parse_systems(text: str, scripts: dict[str, str]) -> list[str]:
    """The systems of a list with commas; `all` is every one. Raises UsageError.

    >>> parse_systems("all", {"single": "...", "debate": "..."})
    ['designed', 'single', 'vote:calls', 'vote:tokens', 'structure:debate']
    """
    others = [f"structure:{name}" for name in scripts if name != "single"]
    every = ["designed", "single", *VOTES, *others]
    names = every if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        forced_structure(name, scripts)
    if len(set(names)) < len(names):
        raise UsageError(f"--system {text}: name each system once")
    if names[0] in VOTES:
        raise UsageError(
            f"{names[0]} gets the budget of the first system: give --system designed,{names[0]}"
        )
    return names


def evaluate(
    tasks: Sequence,
    engine,
    pool,
    score: Callable[[object, str], float],
    *,
    system: str = "designed",
    scripts: dict[str, str] | None = None,
    samples: int = 1,
    executor_engine=None,
    batch: int = 512,
    places: Sequence[int] | None = None,
    budgets: Sequence[Row] = (),
    on_rows: Callable[[list[Row]], None] | None = None,
    on_progress: Callable[[int, int, Result], None] | None = None,
    **options,
) -> Result:
    """Try every task `samples` times under one system.

    engine, pool, score, executor_engine: as execute.rollout takes them.
    system: "designed", "single", "structure:NAME", "vote:calls" or "vote:tokens".
    scripts: structure -> script, design.SCRIPTS by default.
    batch: about so many samples are rolled out together; of a vote, so many replies.
    places: as in execute.rollout: the rows of some tasks at their places are those of a run of all.
    budgets: for a vote, rows of another system: what each (task, sample) may spend.
    on_rows(rows): when all samples of a task are done, so that they can be kept.
    on_progress(done, total, result): after each sample, and after each batch with its rows in
      `result`; with done == total only once, and then all rows are there.
    options: designer_prompt, deterministic, seed, temperature, designer_max_tokens,
      executor_max_tokens and max_calls, as in execute.rollout.

    Raises UsageError for an unknown system, no task, two tasks with one id, or a vote without the
    budgets of all its samples.
    """
    scripts = design.SCRIPTS if scripts is None else scripts
    forced = forced_structure(system, scripts)
    if not tasks or samples < 1 or batch < 1:
        raise UsageError(f"{len(tasks)} tasks, {samples=}, {batch=}: give at least 1 of each")
    twice = [name for name, n in Counter(task.id for task in tasks).items() if n > 1]
    if twice:
        raise UsageError(f"{len(twice)} task ids repeat, such as {twice[0]!r}: make them unique")
    places = range(len(tasks)) if places is None else places
    result, done, total = Result(system), 0, len(tasks) * samples

    def count(n: int) -> None:
        nonlocal done
        done += n
        if on_progress and done < total:
            on_progress(done, total, result)

    play = functools.partial(
        rollout, engine=engine, pool=pool, executor_engine=executor_engine, **options
    )
    on_rows = on_rows or (lambda rows: None)
    size = max(1, batch // samples)
    if system in VOTES:
        unit = system.removeprefix("vote:")
        limits = vote_limits(tasks, samples, budgets, unit)
        replies = sum(row.calls for row in budgets) / len(budgets)
        size = max(1, int(size / max(1, replies)))
        way = functools.partial(
            _vote, samples=samples, unit=unit, limits=limits, script=scripts["single"]
        )
    elif forced:
        way = functools.partial(_try, scripts=[scripts[forced]], n_executions=samples)
    else:
        way = functools.partial(_try, n_designs=samples, n_executions=1)
    for start in range(0, len(tasks), size):
        part = slice(start, start + size)
        result.rows += way(
            tasks[part], places[part], play=play, score=score, count=count, on_rows=on_rows
        )
        if on_progress:
            on_progress(done, total, result)
    return result


class _Stopwatch:
    """An on_event of rollout: how long each execution took, from its first call to its answer.

    The designer's call counts as the first call of its design's first execution.
    """

    def __init__(self, count: Callable[[int], None] = lambda n: None, n_executions: int = 1):
        self.count, self.n_executions = count, n_executions  # count(samples that are done)
        self.began: dict[tuple, float] = {}
        self.seconds: Counter[tuple] = Counter()  # of (task, design, execution); 0 without a call

    def __call__(self, event: dict) -> None:
        place, now = (event["task"], event["design"], max(0, event["execution"])), time.monotonic()
        invalid = event["event"] == "design" and event["error"] is not None
        if event["event"] == "call_started":
            self.began.setdefault(place, now)
        elif invalid or event["event"] == "answer":
            self.seconds[place] = now - self.began.get(place, now)
            self.count(self.n_executions if invalid else 1)


def _try(tasks, places, *, play, score, count, on_rows, **plan) -> list[Row]:
    """One batch of a system that is no vote."""
    watch = _Stopwatch(count, plan["n_executions"])
    rows: list[list[Row]] = [[] for _ in tasks]

    def keep(t: int, rolled: Rollout) -> None:
        for m, drawn in enumerate(rolled.designs):
            for n, ran in enumerate(drawn.executions):
                calls = ran.calls + ([drawn.call] if drawn.call else [])
                sample, seconds = len(rows[t]), watch.seconds[t, m, n]
                rows[t].append(make_row(rolled.task, sample, ran, drawn.structure, calls, seconds))
        on_rows(rows[t])

    plan |= {"step": EVALUATION_STEP, "on_event": watch, "on_task": keep}
    play(tasks, score=score, places=places, **plan)
    return [row for each in rows for row in each]


# --- majority votes ----------------------------------------------------------------------------


@dataclass(slots=True)
class _Ballot:
    """The replies of one (task, sample) until its budget is spent. limit: calls or tokens."""

    limit: int
    unit: str
    replies: list[Execution] = field(default_factory=list)
    spent: int = 0
    closed: bool = False
    seconds: float = 0.0

    def more(self) -> int:
        """So many replies fit into what is left, if they are like those so far; at least one."""
        if not self.replies:
            return max(1, self.limit) if self.unit == "calls" else 1
        mean = self.spent / len(self.replies)
        return max(1, int((self.limit - self.spent) / mean))

    def add(self, reply: Execution) -> None:
        """Counts a reply, unless the budget is spent."""
        if not self.closed:
            self.replies.append(reply)
            tokens = max(1, count_tokens(reply.calls))
            self.spent += len(reply.calls) if self.unit == "calls" else tokens
            # Without a call nothing is spent, and the next reply would fare no better.
            self.closed = self.spent >= self.limit or not reply.calls


def vote_limits(
    tasks: Sequence, samples: int, budgets: Sequence[Row], unit: str
) -> dict[tuple[str, int], int]:
    """(task id, sample) -> the calls or tokens a vote may spend. UsageError where one lacks."""
    limits = {(row.task, row.sample): getattr(row, unit) for row in budgets}
    for place in ((task.id, k) for task in tasks for k in range(samples)):
        if place not in limits:
            raise UsageError(f"a vote needs a budget: no row of task {place[0]!r} was given")
    if unit == "tokens" and any(row.calls for row in budgets) and not any(limits.values()):
        raise UsageError("vote:tokens needs an engine that counts tokens: take vote:calls")
    return limits


def behaviour(program: str, tests: dict) -> list:
    """What a program makes of the first test inputs. Their expected outputs are not looked at.

    [] for a program that fails on all of them. Without inputs (HumanEval) the program's text.
    """
    if "inputs" not in tests:
        return [program] if program else []
    fn_name, outputs, worked = tests.get("fn_name"), [], False
    for stdin in tests["inputs"][:VOTE_INPUTS] if program else []:
        run = run_program(program, stdin, fn_name=fn_name)
        worked |= run.status == "ok"
        output = run.result if fn_name else run.stdout.split()
        outputs.append(output if run.status == "ok" else run.status)
    return outputs if worked else []


def majority(task, replies: Sequence[str]) -> int:
    r"""The index of the reply that wins: the first one of the largest group of equal answers.

    Math answers are equal where the verifier says so (self-consistency, Wang et al. 2022), programs
    where they do the same on the task's first test inputs (Shi et al. 2022, arXiv 2204.11454). A
    reply without an answer has no vote; of two groups of one size the earlier wins; 0 if no reply
    has an answer.

    >>> task = Task("t", "math", "What is 1/2 + 1/4?", answer="3/4")
    >>> majority(task, [r"\boxed{2/6}", "I don't know.", r"\boxed{0.75}", r"\boxed{\frac34}"])
    2
    """
    if task.kind == "math":
        answers = [extract_answer(reply) for reply in replies]
        same = functools.partial(math_equal, tolerance=task.tolerance)
    else:
        programs = [extract_code(reply) for reply in replies]
        shown = {program: behaviour(program, task.tests) for program in dict.fromkeys(programs)}
        answers = [shown[program] for program in programs]
        same = list.__eq__
    groups: list[list[int]] = []
    for i, answer in enumerate(answers):
        if answer:
            alike = (group for group in groups if same(answer, answers[group[0]]))
            group = next(alike, None)
            if group is None:
                groups.append(group := [])
            group.append(i)
    return max(groups, key=len)[0] if groups else 0  # max: the first of the largest


def _vote(
    tasks, places, *, samples, unit, limits, script, play, score, count, on_rows
) -> list[Row]:
    """One batch of a vote. In rounds: every open ballot gets the replies that still fit."""
    ballots = {
        (t, k): _Ballot(limits[task.id, k], unit)
        for t, task in enumerate(tasks)
        for k in range(samples)
    }
    rows: dict[tuple[int, int], Row] = {}

    def elect(place: tuple[int, int]) -> Row:
        (t, k), ballot = place, ballots[place]
        answered = [ran.answer if ran.status == "ok" else None for ran in ballot.replies]
        winner = ballot.replies[majority(tasks[t], [answer or "" for answer in answered])]
        if winner.status == "ok":
            winner = replace(winner, reward=score(tasks[t], winner.answer))
        calls = [call for ran in ballot.replies for call in ran.calls]
        return make_row(tasks[t], k, winner, "single", calls, ballot.seconds)

    while len(rows) < len(ballots):
        asked = [
            (place, len(ballot.replies) + i)
            for place, ballot in ballots.items()
            if not ballot.closed
            for i in range(ballot.more())
        ]
        watch = _Stopwatch()
        rolled = play(
            [tasks[t] for (t, _), _ in asked],
            score=lambda task, answer: 0.0,  # only the winner is scored
            scripts=[script],
            n_executions=1,
            step=VOTE_STEP,
            # Task 12, sample 3, reply 7 has the place 12000003000007.
            places=[places[t] * 10**12 + k * 10**6 + i for (t, k), i in asked],
            on_event=watch,
        )
        slowest: dict[tuple[int, int], float] = {}
        for number, ((place, _), each) in enumerate(zip(asked, rolled, strict=True)):
            ballots[place].add(each.designs[0].executions[0])
            slowest[place] = max(slowest.get(place, 0.0), watch.seconds[number, 0, 0])
        for place, seconds in slowest.items():
            ballots[place].seconds += seconds
        closed = [(place,) for place in slowest if ballots[place].closed]
        for place, row in _in_order(closed, elect):
            rows[place] = row
            count(1)
            its_rows = [rows.get((place[0], k)) for k in range(samples)]
            if None not in its_rows:
                on_rows(its_rows)
    return [rows[place] for place in ballots]


def oracle_table(
    tasks: Sequence, engine, pool, score, scripts: dict[str, str], **options
) -> dict[str, dict[str, float]]:
    """{structure: {source: mean reward}}, every structure forced on every task.

    What a designer could know: the best structure of each source. options: as for evaluate.
    """
    table = {}
    for name in scripts:
        result = evaluate(
            tasks, engine, pool, score, system=f"structure:{name}", scripts=scripts, **options
        )
        table[name] = {source: part.mean() for source, part in result.by_source().items()}
    return table


def evaluation_score(task: Task, response: str) -> float:
    """reward.score, and 0 or 1 for a HumanEval row too.

    Its check shares a process with the program, which could fool it: no reward, only a figure.
    """
    check = (task.tests or {}).get("check")
    if check is None:
        return score(task, response)
    program = extract_code(response)
    return float(program != "" and run_asserts(f"{task.starter}\n{program}", check))


# --- golds -------------------------------------------------------------------------------------


@dataclass(slots=True)
class GoldCheck:
    """Which tasks of a data set can be rewarded. kept: their ids, in row order."""

    report: LoadReport
    kept: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # by reason

    def __str__(self) -> str:
        why = ", ".join(f"{reason}: {n}" for reason, n in self.failed.items())
        lost = f"{self.failed.total()} failed{f' ({why})' if why else ''}"
        return f"{self.report}\n{self.report.tasks} tasks = {len(self.kept)} kept + {lost}"


def gold_fault(task: Task, programs: Sequence[str]) -> str:
    """Why this task can't be rewarded; "" if it can.

    programs: the gold programs of a code task. MAX_GOLDS are tried, each up to its first failure.
    """
    if task.kind == "math":
        return "" if usable_gold(task.answer or "") else "unusable answer"
    if not programs:
        return "no gold"
    for program in programs[:MAX_GOLDS]:
        if "check" in task.tests:
            passed = run_asserts(program, task.tests["check"])
        else:
            passed = code_reward(program, task.tests, stop_early=True).ok
        if passed:
            return ""
    return "gold fails"


def check_golds(
    name_or_path: str | Path, on_progress: Callable[[int, int, int], None] | None = None
) -> GoldCheck:
    """Tries the golds of a data set of data.py or of a file, on all cores.

    on_progress(done, total, kept): after each task. Raises DataError as data.load does, and for
    code without gold programs (LiveCodeBench).
    """
    tasks, report = load(name_or_path)
    result = GoldCheck(report)
    pairs = ((task, []) for task in tasks)
    if tasks[0].kind == "code":
        by_id = {task.id: task for task in tasks}
        found = golds(name_or_path)  # of all rows, also of those that load leaves out
        pairs = ((by_id[name], programs) for name, programs in found if name in by_id)
    for done, (task, fault) in enumerate(_in_order(pairs, gold_fault), 1):
        if fault:
            result.failed[fault] += 1
        else:
            result.kept.append(task.id)
        if on_progress:
            on_progress(done, len(tasks), len(result.kept))
    return result


def _in_order(pairs: Iterable[tuple], judge: Callable) -> Iterator[tuple]:
    """(pair[0], judge(*pair)) for each pair, in order. Few are read ahead: golds are long.

    The sandbox bounds how many programs run at once. Whoever leaves early (Ctrl-C) does not wait
    for their limits: closing the sandbox ends them.
    """
    running: deque = deque()
    with ThreadPoolExecutor(cores()) as threads:
        try:
            for pair in pairs:
                running.append((pair[0], threads.submit(judge, *pair)))
                if len(running) > 16 * cores():
                    yield running[0][0], running[0][1].result()
                    running.popleft()
            for item, future in running:
                yield item, future.result()
        finally:
            for _, future in running:
                future.cancel()
            while not all(future.done() for _, future in running):
                close_sandbox()
                time.sleep(0.05)


# --- tables ------------------------------------------------------------------------------------


def markdown_table(rows: Sequence[Sequence], header: Sequence[str]) -> str:
    """A table that reads well in a terminal and renders as markdown. Floats get three decimals.

    >>> print(markdown_table([["sum", 0.5], ["product", 1]], ["source", "mean"]))
    | source  | mean  |
    | ------- | ----- |
    | sum     | 0.500 |
    | product | 1     |
    """
    cells = [
        [f"{x:.3f}" if isinstance(x, float) else str(x).replace("|", "\\|") for x in row]
        for row in (header, *rows)
    ]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    padded = [[cell.ljust(w) for cell, w in zip(row, widths, strict=True)] for row in cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def oracle_text(table: dict[str, dict[str, float]]) -> str:
    """An oracle table as markdown: a row a source, a column a structure, the best one named.

    Of equals the first is named: list cheap structures first.

    >>> print(oracle_text({"single": {"sum": 0.1}, "pipeline": {"sum": 0.75}}))
    | source | single | pipeline | best     |
    | ------ | ------ | -------- | -------- |
    | sum    | 0.100  | 0.750    | pipeline |
    """
    rows = []
    for source in next(iter(table.values())):
        means = {name: column[source] for name, column in table.items()}
        rows.append([source, *means.values(), max(means, key=means.get)])
    return markdown_table(rows, ["source", *table, "best"])


def describe(result: Result) -> dict:
    """The figures of a result as a dict for JSON. calls, tokens, seconds: means over samples."""
    low, high = result.interval()
    prices = {
        name: float(np.mean([getattr(row, name) for row in result.rows]))
        for name in ("calls", "tokens", "prompt_tokens", "seconds")
    }
    return {
        "tasks": len(result.by_task()),
        "mean": result.mean(),
        "low": low,
        "high": high,
        "pass_at": passes(result),
        **prices,
        "structures": structure_shares(result.rows),
        "statuses": dict(Counter(row.status for row in result.rows).most_common()),
    }


def figures_of(result: Result) -> dict:
    """`describe` of all and of each source."""
    sources = {source: describe(part) for source, part in result.by_source().items()}
    return {"all": describe(result), "sources": sources}


def parts_of(result: Result) -> dict[str, Result]:
    """Source -> its part of a result, and "all" for the whole if there are several."""
    parts = result.by_source()
    return parts | ({"all": result} if len(parts) > 1 else {})


def results_text(results: dict[str, Result]) -> str:
    """The table that the command prints: a row a source and system; pass@k for several samples."""

    def listed(counts: dict) -> str:
        return ", ".join(
            f"{name} {n:.2f}" if isinstance(n, float) else f"{name} {n}"
            for name, n in counts.items()
        )

    parts = {name: parts_of(result) for name, result in results.items()}
    several = any(row.sample for result in results.values() for row in result.rows)
    header = ["source", "system", "tasks", "mean", "95 % interval"]
    header += ["pass@k (k)"] * several + ["calls", "tokens", "seconds", "structures", "statuses"]
    rows = []
    for source in next(iter(parts.values())):
        for name in results:
            d = describe(parts[name][source])
            interval = f"{d['low']:.3f} to {d['high']:.3f}"
            cells = [source, name, d["tasks"], d["mean"], interval]
            if several:
                k, best = list(d["pass_at"].items())[-1]
                cells.append(f"{best:.3f} ({k})")
            cells += [f"{d['calls']:.1f}", f"{d['tokens']:.0f}", f"{d['seconds']:.1f}"]
            rows.append([*cells, listed(d["structures"]), listed(d["statuses"])])
    return markdown_table(rows, header)


def differences_of(results: dict[str, Result]) -> list[dict]:
    """The first system's reward minus every other's, by source and for all, with intervals."""
    (name, first), *others = results.items()
    differences = []
    for other, result in others:
        theirs = parts_of(result)
        for source, part in parts_of(first).items():
            mean, low, high = paired_difference(part, theirs[source])
            names = {"of": name, "minus": other, "source": source}
            differences.append({**names, "mean": mean, "low": low, "high": high})
    return differences


def differences_text(differences: Sequence[dict]) -> str:
    rows = [
        [f"{d['of']} - {d['minus']}", d["source"], f"{d['mean']:+.3f}",
         f"{d['low']:+.3f} to {d['high']:+.3f}"]
        for d in differences
    ]  # fmt: skip
    return markdown_table(rows, ["paired difference", "source", "mean", "95 % interval"])


def curve(log: list[dict], name: str) -> list[tuple[int, float]]:
    """(step from 1, mean of the last WINDOW values). A share of 0 is not written.

    >>> curve([{"step": 0, "x": 1.0}, {"step": 1}, {"step": 2, "x": 0}], "x")
    [(1, 1.0), (3, 0.5)]
    """
    missing = 0.0 if name.startswith("structure/") else None
    known = [(line["step"] + 1, line.get(name, missing)) for line in log]
    known = [(x, y) for x, y in known if y is not None]
    recent = [[y for _, y in known[max(0, i - WINDOW) : i]] for i in range(1, len(known) + 1)]
    return [(x, math.fsum(ys) / len(ys)) for (x, _), ys in zip(known, recent, strict=True)]


def draw_curve(log: list[dict], points: list[tuple[int, Result]], path: Path) -> None:
    """curve.png: rewards, valid designs and structure shares over the steps, stages as bands.

    points: (step, result on held-out tasks), drawn with their bootstrap intervals. Of supervised
    training: loss and gradient norm.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)

    def draw(axes, name: str, style: str = "-", **options) -> None:
        known = curve(log, name)
        axes.plot([x for x, _ in known], [y for _, y in known], style, **options)

    for line in log:
        if line["role"] == "designer":
            for axes in (top, bottom):
                axes.axvspan(line["step"] + 0.5, line["step"] + 1.5, color="0.92", lw=0)
    names = sorted({name for line in log for name in line})
    if log[0]["role"] == "sft":
        draw(top, "loss", label="loss")
        draw(bottom, "grad_norm", label="gradient norm")
        limits, title = {}, "supervised training"
    else:
        draw(top, "reward", color="black", label="reward, all")
        draw(top, "valid_designs", ":", color="0.4", label="valid designs")
        limits = {"ylim": (0, 1.02)}
        title = "grey: designer stages; dots: held-out tasks with 95 % intervals"
    for name in reward_names(names):
        draw(top, name, lw=1, label=name.removeprefix("reward/"))
    for name in names:
        if name.startswith("structure/") and name.count("/") == 1:
            draw(bottom, name, label=name.removeprefix("structure/"))
    for step, result in points:
        low, high = result.interval()
        error = [[result.mean() - low], [high - result.mean()]]
        top.errorbar([step], [result.mean()], error, fmt="o", color="black", capsize=3)
    top.set(**limits, ylabel=f"mean of {WINDOW} steps", title=title)
    bottom.set(**limits, ylabel="share of valid designs" if limits else "", xlabel="step")
    for axes in (top, bottom):
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def success_table(results: dict[str, Result]) -> str:
    """A row a model pair, a column a kind of task: mean reward on the held-out tasks."""
    sources = list(next(iter(results.values())).by_source())
    rows = []
    for name, result in results.items():
        parts = result.by_source()
        low, high = result.interval()
        means = [parts[source].mean() for source in sources]
        rows.append([name, *means, result.mean(), f"{low:.3f} to {high:.3f}"])
    return markdown_table(rows, ["held-out success", *sources, "all", "95 % interval"])


def shares_table(results: dict[str, Result]) -> str:
    """Structure shares of the valid designs by kind of task."""
    shares = {
        name: {source: structure_shares(part.rows) for source, part in result.by_source().items()}
        for name, result in results.items()
    }
    sources = list(next(iter(shares.values())))
    structures = sorted({s for each in shares.values() for part in each.values() for s in part})
    rows = [
        [f"{source}, {name}", *(each[source].get(s, 0.0) for s in structures)]
        for source in sources
        for name, each in shares.items()
    ]
    return markdown_table(rows, ["structure shares", *structures])


def reward_names(names: Iterable[str]) -> list[str]:
    """The rewards of the data sets; of math and code where tasks name no data set.

    >>> reward_names(["reward", "reward/math", "reward/sum"]), reward_names(["reward/math"])
    (['reward/sum'], ['reward/math'])
    """
    found = [name for name in names if name.startswith("reward/")]
    return [name for name in found if name not in ("reward/math", "reward/code")] or found


# --- settings -----------------------------------------------------------------------------------


def read_settings(folder: Path, given: dict) -> dict:
    """How to sample: what was `given` (not None), else the folder's run_config.json, else DEFAULTS.

    Raises UsageError for a file that can't be read or a value that can't work.
    """
    path, saved = folder / "run_config.json", {}
    if path.exists():
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{path} can't be read ({error}): copy the run's config.json"
            ) from error
        if not isinstance(saved, dict):
            raise UsageError(f"{path} holds no JSON object: copy the run's config.json there")
    settings = {name: saved.get(name, default) for name, default in DEFAULTS.items()}
    settings |= {name: value for name, value in given.items() if value is not None}
    for name in ("designer_max_tokens", "executor_max_tokens", "max_calls", "max_context"):
        value = settings[name]
        if value is None and name == "max_context":
            continue  # the model's own
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name} is {value!r}: give a number of at least 1")
    if settings["isolation"] not in ("strict", "best"):
        raise UsageError(f"isolation is {settings['isolation']!r}: give strict or best")
    temperature = settings["temperature"]
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise UsageError(f"temperature is {temperature!r}: give a number of at least 0")
    return settings


# --- the command -------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="evaluate.py",
        description="Evaluate a model folder on toy tasks, data sets or files: mean reward "
        "with a bootstrap interval over tasks, calls and output tokens a sample, the structures "
        "of its designs, and how the executions ended.",
        epilog="What is not given comes from the model folder's run_config.json, if it has one. "
        "Exit status: 0, 2 if what was asked for can't be done, 1 if it failed on the way, 130 "
        "after Ctrl-C.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", metavar="FOLDER|NAME",
        help="the model, a folder or its name on the hub: it designs and executes")  # fmt: skip
    add("--data", default="toy", metavar="toy|DATA",
        help="toy (held-out tasks, the default), or data sets and JSONL or Parquet files, with "
        f"commas between them; the data sets are {', '.join(DATASETS)}")  # fmt: skip
    add("--check-golds", metavar="NAME|FILE",
        help="needs no model: keep the rows of a data set or file whose golds can be rewarded, "
        "and write their ids to --out FILE (default: NAME.kept.txt in the current folder)",
        )  # fmt: skip
    add("--system", default="designed", metavar="NAMES",
        help="with commas: designed (default): the model designs anew for each sample; single: one "
        "agent; structure:NAME: a fixed script of that structure, such as structure:ensemble; "
        "vote:calls, vote:tokens: one agent with majority vote at the first system's number of "
        "calls or output tokens; all: each of these")  # fmt: skip
    add("--samples", type=int, default=1, metavar="K", help="samples a task (default 1)")
    add("--n-tasks", type=int, metavar="N",
        help=f"the first N tasks of each data set (default: all; toy: {TOY_TASKS})")  # fmt: skip
    add("--executor-model", metavar="FOLDER|NAME",
        help="another model plays the agents, those of the other systems too")  # fmt: skip
    add("--compare", metavar="FILES", default="",
        help="reports of earlier evaluations (--out) of the same tasks, with commas between "
        "them: their systems are listed too, with paired differences")  # fmt: skip
    add_settings(parser)
    add("--engine", choices=("auto", "torch", "vllm"), default="auto",
        help="auto: vllm on cuda where it is installed, else torch")  # fmt: skip
    add("--out", metavar="FILE",
        help="write figures and rows to this JSON file and the tables to a .md beside it; until "
        "then the rows are in FILE.partial.jsonl, from which the same command goes on")  # fmt: skip
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The flags that settings_of and device_of read."""
    add = parser.add_argument
    add("--designer-prompt", metavar="FILE", help="a text file with {question} in it")
    add("--temperature", type=float, metavar="T", help="of sampling, 0: the likeliest token")
    add("--max-tokens", type=int, metavar="N", help="output tokens a call, for both roles")
    add("--max-context", type=int, metavar="N", help="tokens of prompt and reply together")
    add("--seed", type=int, metavar="S", help="of the sampling, and of the toy tasks")
    isolation = "strict: all layers of the sandbox or an error; best: those that are there"
    add("--isolation", choices=("strict", "best"), help=isolation)
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")


def check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises UsageError for what can't work or would not be read, before anything is loaded."""
    out = Path(args.out).absolute() if args.out else None
    if out and (out.is_dir() or out.suffix == ".md" or not out.parent.is_dir()):
        raise UsageError(f"--out {out}: name a file in a folder that exists; .md is for its tables")
    if args.check_golds:
        unread = [name for name, value in vars(args).items() if value != parser.get_default(name)]
        unread = set(unread) - {"check_golds", "out", "isolation"}
        if unread:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(unread))
            raise UsageError(f"--check-golds takes only --out and --isolation, not {flags}")
        return
    if not args.model:
        raise UsageError("give --model FOLDER, or --check-golds NAME|FILE")
    for name in ("samples", "n_tasks"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}: give at least 1")
    systems = parse_systems(args.system, design.SCRIPTS | toy.SCRIPTS)
    if "designed" not in systems:
        for name in ("executor_model", "designer_prompt"):
            if getattr(args, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} needs --system designed: {args.system} asks no designer")
    read_prompt(args.designer_prompt)
    if args.engine == "vllm" and vllm_missing():
        raise UsageError(vllm_missing())
    if args.engine == "vllm" and args.device == "cpu" and torch.cuda.is_available():
        raise UsageError("vLLM takes the GPU that is here: leave out --device, or --engine torch")
    for name in data_names(args.data):
        if name not in ("toy", *DATASETS) and not Path(name).is_file():
            known = ", ".join(("toy", *DATASETS))
            raise UsageError(f"--data {name}: no such file, and the data sets are {known}")


def read_tasks(args: argparse.Namespace, seed: int) -> tuple[list, int]:
    """(tasks, how many were left out); says on standard error what was left out and why.

    Of a data set with a test split that one.
    """
    tasks = []
    for name in data_names(args.data):
        if name == "toy":
            tasks += toy.held_out_tasks(args.n_tasks or TOY_TASKS, seed)
        else:
            loaded, report = load_evaluation(name)
            print(report, file=sys.stderr)
            tasks += loaded[: args.n_tasks]
    tasks, bad = usable_tasks(tasks)
    if bad:
        ids = ", ".join(task.id for task in bad[:10])
        print(f"left out {len(bad)} tasks whose gold can't be graded: {ids}", file=sys.stderr)
    if not tasks:
        raise UsageError(f"--data {args.data}: no task is left to evaluate")
    return tasks, len(bad)


def progress_line(noun: str, more: Callable[..., str]) -> Callable[[int, int, object], None]:
    """Says on standard error how far it is: over and over in a terminal, else every 30 seconds.

    more: the function's third argument -> what else the line says.
    """
    live, began = sys.stderr.isatty(), time.monotonic()
    said = began

    def show(done: int, total: int, state: object) -> None:
        nonlocal said
        now, whole = time.monotonic(), done == total
        if not whole and now - said < (0.2 if live else 30.0):
            return
        said = now
        start, end = "\r\x1b[K" if live else "", "\n" if whole or not live else ""
        to_go = (now - began) * (total - done) / max(done, 1)
        left = "" if whole else f", about {to_go:.0f} s to go"
        line = f"{start}{done} of {total} {noun}, {now - began:.0f} s{left}{more(state)}"
        print(line, end=end, file=sys.stderr, flush=True)

    return show


def mean_so_far(result: Result) -> str:
    return f", mean so far {result.mean():.3f}" if result.rows else ""


def write_json(path: str | Path, value) -> None:
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Writes a file whole or not at all: under another name first, then renamed."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def run_gold_check(args: argparse.Namespace) -> None:
    """`--check-golds`: the counts on standard output, the kept ids in a file."""
    configure(args.isolation or "strict")
    show = progress_line("tasks", lambda kept: f", {kept} kept")
    result = check_golds(args.check_golds, show)
    print(result)
    if not result.kept:
        raise DataError(f"{args.check_golds}: no gold can be rewarded, so no ids are written")
    out = args.out or f"{Path(args.check_golds).stem}.kept.txt"
    write_text(out, "".join(f"{task_id}\n" for task_id in result.kept))
    print(f"their ids are in {out}")


def settings_of(args: argparse.Namespace, folder: Path) -> dict:
    """How the command samples: its flags, else the folder's run_config.json, else DEFAULTS."""
    names = ("temperature", "max_context", "seed", "isolation")
    given = {name: getattr(args, name) for name in names}
    given |= {f"{role}_max_tokens": args.max_tokens for role in ("designer", "executor")}
    given["designer_prompt"] = read_prompt(args.designer_prompt)
    return read_settings(folder, given)


def is_toy(settings: dict) -> bool:
    """Was this model trained on the toy's own tasks?"""
    return settings["preset"] == "toy" and not settings["data"]


def scripts_and_prompt(settings: dict) -> tuple[dict[str, str], str | None]:
    """(structure -> script, designer prompt) of this model's world; None: design.py's own."""
    if is_toy(settings):
        return toy.SCRIPTS, settings["designer_prompt"] or toy.DESIGNER_PROMPT
    return design.SCRIPTS, settings["designer_prompt"] or None


def device_of(args: argparse.Namespace) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


# --- reports and what is there of them ---------------------------------------------------------


def digest(tasks: Sequence[Task]) -> str:
    """Equal for the same tasks in the same order only."""
    text = json.dumps([asdict(task) for task in tasks], sort_keys=True)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def weights_of(folder: Path) -> list:
    """Names, sizes and times of the files that make the model: another training leaves others."""
    patterns = ("*.safetensors", "*.bin", "*config.json", "tokenizer*", "vocab.*", "*.jinja")
    files = sorted({path for pattern in patterns for path in folder.glob(pattern)})
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


class Partial:
    """The rows of an evaluation as they come, one JSON line a task, so that it can go on.

    path: None keeps them in memory only. request: what was asked, as JSON; a file of another
    request, or one that another process writes, is refused with a UsageError. Used with `with`: a
    good end removes the file, and so does one without rows.
    """

    def __init__(self, path: Path | None, request: dict):
        self.path, self.request = path, request
        self.rows: dict[str, list[Row]] = {}  # by system
        self.wall_seconds: Counter[str] = Counter()  # by system
        self._file = None

    def __enter__(self) -> Partial:
        if self.path:
            self._file = self.path.open("a+b")
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(f"another process writes to {self.path}: wait for it") from error
            self._read()
        return self

    def _read(self) -> None:
        """Takes the lines that are whole; begins a new file with the request."""
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        try:
            lines = [json.loads(line) for line in data[:whole].splitlines()]
            there = dict(lines[0]["request"]) if lines else self.request
            batches = [
                (x["system"], x["seconds"], [Row(**row) for row in x["rows"]]) for x in lines[1:]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.path} is no file of this program: remove it") from error
        other = [name for name, value in self.request.items() if there.get(name) != value]
        if other:
            raise UsageError(
                f"{self.path} is of an evaluation with other {', '.join(other)}: remove it to start"
                " anew, or give another --out"
            )
        self._file.truncate(whole)  # a line that a kill or a full disk has cut
        if not whole:
            self._write({"request": self.request})
        for system, seconds, rows in batches:
            self._keep(system, seconds, rows)

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _keep(self, system: str, seconds: float, rows: list[Row]) -> None:
        self.rows.setdefault(system, []).extend(rows)
        self.wall_seconds[system] += seconds

    def add(self, system: str, seconds: float, rows: list[Row]) -> None:
        """Keeps the rows of one task, which took so long since the last ones."""
        if self._file:
            its_rows = [asdict(row) for row in rows]
            self._write({"system": system, "seconds": seconds, "rows": its_rows})
        self._keep(system, seconds, rows)

    def __exit__(self, kind, error, trace) -> None:
        n = sum(map(len, self.rows.values()))
        if self.path and (kind is None or not n):
            self.path.unlink(missing_ok=True)  # while it is locked, so that it is nobody else's
        elif n and self.path:
            print(
                f"\n{n} samples are kept in {self.path}: the same command goes on", file=sys.stderr
            )
        elif n and kind:
            print("\nno row is kept: with --out FILE the same command would go on", file=sys.stderr)
        if self._file:
            self._file.close()  # last: on a full disk it fails again


def read_report(path: str, tasks: Sequence[Task], tasks_digest: str) -> dict[str, Result]:
    """The systems of an earlier report, under names that say where they are from."""
    names = [each.name for each in fields(Row)]
    results: dict[str, Result] = {}
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        theirs = report["tasks_digest"]
        for each in report["rows"]:
            system = f"{each['system']} of {Path(path).with_suffix('')}"
            row = Row(**{name: each[name] for name in names})
            row.reward = float(row.reward)
            results.setdefault(system, Result(system)).rows.append(row)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--compare {path}: give a report that --out wrote ({error!r})") from error
    wanted = {task.id for task in tasks}
    if theirs != tasks_digest or any(x.by_task().keys() != wanted for x in results.values()):
        raise UsageError(
            f"--compare {path} is of other tasks: give the same --data, --n-tasks and --seed"
        )
    return results


def complete(
    partial: Partial, systems: Sequence[str], tasks: Sequence, **options
) -> dict[str, Result]:
    """Evaluates what `partial` lacks, one system after the other; options: as for evaluate."""
    order = {task.id: place for place, task in enumerate(tasks)}
    results = {}
    for system in systems:
        there = {row.task for row in partial.rows.get(system, ())}
        places = [place for place, task in enumerate(tasks) if task.id not in there]
        last = time.monotonic()

        def keep(rows: list[Row], system: str = system) -> None:
            nonlocal last
            now = time.monotonic()
            partial.add(system, now - last, rows)
            last = now

        if places:
            evaluate(
                [tasks[place] for place in places],
                system=system,
                places=places,
                budgets=partial.rows.get(systems[0], ()),
                on_rows=keep,
                on_progress=progress_line(f"samples of {system}", mean_so_far),
                **options,
            )
        rows = sorted(partial.rows[system], key=lambda row: (order[row.task], row.sample))
        results[system] = Result(system, rows)
    return results


def run(args: argparse.Namespace) -> None:
    """The command, from checked arguments to the printed tables and the files."""
    folders = [find_model(name) for name in (args.model, args.executor_model) if name]
    settings = settings_of(args, folders[0])
    scripts, designer_prompt = scripts_and_prompt(settings)
    systems = parse_systems(args.system, scripts)  # the toy has fewer
    configure(settings["isolation"])
    tasks, dropped = read_tasks(args, settings["seed"])
    tasks_digest, earlier = digest(tasks), {}
    for path in data_names(args.compare):
        earlier |= read_report(path, tasks, tasks_digest)
    device = device_of(args)
    kind = choose_engine(args.engine, device)
    print(f"{len(tasks)} tasks, {kind} engine on {device}", file=sys.stderr)
    request = {
        **{name: getattr(args, name) for name in ("model", "executor_model", "data", "samples")},
        "system": ",".join(systems),  # budgets and differences are about the first
        "engine": f"{kind} on {device}",
        "settings": settings,
        "tasks_digest": tasks_digest,
        "weights": [weights_of(folder) for folder in folders],
    }
    out = Path(args.out) if args.out else None
    with (
        Partial(out and out.with_name(f"{out.name}.partial.jsonl"), request) as partial,
        open_pool(deterministic=settings["deterministic"]) as pool,
    ):
        limits = {"max_context": settings["max_context"], "gpu_memory": 0.85 / len(folders)}
        engines = [open_engine(folder, device, kind=kind, **limits) for folder in folders]
        results = complete(
            partial,
            systems,
            tasks,
            engine=engines[0],
            executor_engine=engines[-1],
            pool=pool,
            score=evaluation_score,
            scripts=scripts,
            samples=args.samples,
            designer_prompt=designer_prompt,
            **{name: settings[name] for name in SAMPLING},
        )
        differences = differences_of(results | earlier)
        tables = [f"{args.model}, {args.samples} samples a task", results_text(results | earlier)]
        tables += [differences_text(differences)] if differences else []
        times = (f"{name} {partial.wall_seconds[name]:.0f}" for name in systems)
        text = "\n\n".join([*tables, f"wall seconds: {', '.join(times)}"])
        print(f"\n{text}")
        if out:
            report = {**request, "sandbox": in_force(), "dropped_golds": dropped}
            report["systems"] = {
                name: {"wall_seconds": partial.wall_seconds[name], **figures_of(result)}
                for name, result in results.items()
            }
            report["differences"] = differences
            rows = [(name, row) for name in systems for row in results[name].rows]
            report["rows"] = [{"system": name, **asdict(row)} for name, row in rows]
            write_text(out.with_suffix(".md"), f"{text}\n")
            write_json(out, report)


def one_line_errors(program: str, work: Callable[[], None], shown: Callable = str) -> int:
    """Runs `work`; its exit status. What fails is one line on standard error, by `shown`."""
    try:
        work()
    except (UsageError, DataError, ModelError) as error:
        print(f"{program}: {shown(str(error))}", file=sys.stderr)
        return 2
    except (OSError, SandboxError, EngineError, torch.OutOfMemoryError) as error:
        print(f"{program}: failed: {shown(' '.join(str(error).split()))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{program}: stopped", file=sys.stderr)
        return 130
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()  # one progress line is enough

    def work() -> None:
        check_arguments(args, parser)
        (run_gold_check if args.check_golds else run)(args)

    return one_line_errors("evaluate.py", work)


if __name__ == "__main__":
    sys.exit(main())
