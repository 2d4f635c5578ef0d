"""How good is a model at designing and executing? A mean with its interval, and what it cost.

The idea. Every task is tried K times (samples). Under the system `designed` each sample is a fresh
design and one execution of it; under `single` or `structure:NAME` no designer is asked, and the
fixed script of that structure is executed K times by the same model. A sample has a reward (0 or
1), a status (execute.py lists them; any but "ok" has reward 0) and a price: its calls and output
tokens, the designer's included. The difference between `designed` and `single` is what designing
is worth; read it together with the price.

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

What the interval does not say. It is about other tasks, not about another training run. Where all
tasks score alike the bootstrap sees no spread and gives a point, though 30 tasks that all fail
still allow a true rate of 3/30 (the rule of three).

Where it differs from the paper, and why. The paper gives points without intervals, and its AIME
figures are multiples of 1/30: one try a task. 12 of 30 is its 40.00. Here samples are drawn as in
training, statuses stand beside the mean, tasks whose gold can't be graded are left out and named,
and what fails on our side is an exception, never a score.

The model folder is what train.py writes: weights, tokenizer, and run_config.json, which says how
this model is sampled and in which sandbox. Any folder of a causal LM with a chat template will do.
All sampling seeds derive from (seed, task, sample). Toy tasks are train.py's held-out ones.

    python evaluate.py --model runs/toy/final --samples 4
    python evaluate.py --model runs/toy/final --system structure:ensemble --n-tasks 60
    python evaluate.py --model MODEL_FOLDER --data aime24,aime25 --samples 8 --out aime.json

Golds first. A row whose own gold fails can't be learnt from, and there are many. This keeps the
rows of a data set or a file that pass, and writes their ids, one a line, for data.load(keep=...):

    python evaluate.py --check-golds apps --out apps.kept.txt

A math gold has to be usable (reward.usable_gold). A code row needs one of its first 3 Python 3
programs to pass all of its tests, each within the very limits that a reward has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
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
from engine import ModelError, check_folder, find_model, open_engine
from execute import Rollout, rollout
from reward import code_reward, extract_code, run_asserts, score, usable_gold, usable_tasks
from sandbox import SandboxError, ScriptPool, configure, cores, in_force
from sandbox import close as close_sandbox

EVALUATION_STEP = -1  # in the seeds: training steps count from 0, so no draw is used twice
TOY_TASKS = 512
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

    def interval(self, *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
        """The bootstrap interval of the mean."""
        return bootstrap_interval(self.by_task().values(), level=level, seed=seed)


def _task_means(values: Iterable[Sequence[float]]) -> np.ndarray:
    means = np.array([np.mean(samples) for samples in values])  # (tasks,)
    if not len(means):
        raise ValueError("no samples to take a mean of: evaluate at least one task")
    return means


def bootstrap_interval(
    values: Iterable[Sequence[float]],
    *,
    level: float = 0.95,
    draws: int = 4000,
    seed: int = 0,
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


def structure_shares(result: Result) -> dict[str, dict[str, float]]:
    """Source -> {structure: its share of the valid designs}, the most frequent first.

    {} for a source without a valid design; the status invalid_design counts those that are not.
    """
    return {source: _shares(part.rows) for source, part in result.by_source().items()}


def _shares(rows: Sequence[Row]) -> dict[str, float]:
    counts = Counter(row.structure for row in rows if row.structure)
    return {name: n / counts.total() for name, n in counts.most_common()}


def rows_of(rollouts: Sequence[Rollout]) -> list[Row]:
    """Rollouts -> rows: every execution of every design of a task is one sample.

    With several executions a design, the designer's call would count once for each: evaluate
    asks for one execution a design, or for no designer at all.
    """
    rows = []
    for rolled in rollouts:
        pairs = [(d, execution) for d in rolled.designs for execution in d.executions]
        for sample, (drawn, execution) in enumerate(pairs):
            calls = execution.calls + ([drawn.call] if drawn.call else [])
            rows.append(
                Row(
                    task=rolled.task.id,
                    kind=rolled.task.kind,
                    source=rolled.task.source,
                    sample=sample,
                    reward=execution.reward,
                    status=execution.status,
                    structure=drawn.structure,
                    calls=len(calls),
                    tokens=sum(len(call.output_ids or ()) for call in calls),
                    prompt_tokens=sum(len(call.prompt_ids or ()) for call in calls),
                    answer=execution.answer,
                    error=execution.error,
                )
            )
    return rows


# --- evaluation --------------------------------------------------------------------------------


def forced_structure(system: str, scripts: dict[str, str]) -> str | None:
    """The structure that a system forces; None for `designed`.

    >>> scripts = {"single": "...", "debate": "..."}
    >>> [forced_structure(s, scripts) for s in ("designed", "single", "structure:debate")]
    [None, 'single', 'debate']
    """
    if system == "designed":
        return None
    name = "single" if system == "single" else system.removeprefix("structure:")
    if name in scripts and system in ("single", f"structure:{name}"):
        return name
    known = ["designed", "single", *(f"structure:{name}" for name in scripts)]
    raise UsageError(f"unknown system {system!r}: give one of {', '.join(known)}")


def _check_request(tasks: Sequence, samples: int, batch: int) -> None:
    if not tasks or samples < 1 or batch < 1:
        raise UsageError(f"{len(tasks)} tasks, {samples=}, {batch=}: give at least 1 of each")
    repeated = [name for name, n in Counter(task.id for task in tasks).items() if n > 1]
    if repeated:
        raise UsageError(
            f"{len(repeated)} task ids repeat, such as {repeated[0]!r}: make them unique"
        )


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
    first_task: int = 0,
    on_progress: Callable[[int, int, Result], None] | None = None,
    **options,
) -> Result:
    """Try every task `samples` times under one system.

    engine, pool, score, executor_engine: as execute.rollout takes them.
    system: "designed", "single" or "structure:NAME"; scripts: structure -> script, design.SCRIPTS
      by default.
    batch: about so many samples are rolled out together.
    first_task: the place of tasks[0] among all tasks, for the seeds: give it where several
      processes share the tasks; their rows, one after the other, are the rows of one process.
    on_progress(done, total, result): after each sample, and after each batch with its rows in
      `result`; with done == total only once, and then all rows are there.
    options: designer_prompt, deterministic, seed, temperature, designer_max_tokens,
      executor_max_tokens and max_calls, as in execute.rollout.

    Raises UsageError for an unknown system, no task, or two tasks with one id.
    """
    scripts = design.SCRIPTS if scripts is None else scripts
    forced = forced_structure(system, scripts)
    _check_request(tasks, samples, batch)
    if forced is None:
        plan = {"n_designs": samples, "n_executions": 1}
    else:
        plan = {"scripts": [scripts[forced]], "n_executions": samples}

    result, done, total = Result(system), 0, len(tasks) * samples

    def count(event: dict) -> None:
        nonlocal done
        invalid = event["event"] == "design" and event["error"] is not None
        if invalid or event["event"] == "answer":
            done += plan["n_executions"] if invalid else 1
            if done < total:
                on_progress(done, total, result)

    size = max(1, batch // samples)
    for start in range(0, len(tasks), size):
        rollouts = rollout(
            tasks[start : start + size],
            engine,
            pool,
            score,
            executor_engine=executor_engine,
            step=EVALUATION_STEP,
            first_task=first_task + start,
            on_event=count if on_progress else None,
            **plan,
            **options,
        )
        result.rows += rows_of(rollouts)
        if on_progress:
            on_progress(done, total, result)
    return result


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
    """The figures of a result as a dict for JSON. calls and tokens: means over samples."""
    low, high = result.interval()
    prices = {
        name: float(np.mean([getattr(row, name) for row in result.rows]))
        for name in ("calls", "tokens", "prompt_tokens")
    }
    return {
        "tasks": len(result.by_task()),
        "mean": result.mean(),
        "low": low,
        "high": high,
        **prices,
        "structures": _shares(result.rows),
        "statuses": dict(Counter(row.status for row in result.rows).most_common()),
    }


def result_text(result: Result) -> str:
    """The table that the command prints: a row a source, and one for all if there are several."""

    def listed(counts: dict) -> str:
        return ", ".join(
            f"{name} {n:.2f}" if isinstance(n, float) else f"{name} {n}"
            for name, n in counts.items()
        )

    parts = result.by_source()
    if len(parts) > 1:
        parts["all"] = result
    rows = []
    for source, part in parts.items():
        d = describe(part)
        interval = f"{d['low']:.3f} to {d['high']:.3f}"
        prices = [f"{d['calls']:.1f}", f"{d['tokens']:.0f}"]
        shares, statuses = listed(d["structures"]), listed(d["statuses"])
        rows.append([source, d["tasks"], d["mean"], interval, *prices, shares, statuses])
    header = "source, tasks, mean, 95 % interval, calls, tokens, structures, statuses"
    return markdown_table(rows, header.split(", "))


def draw_curve(log: list[dict], points: list[tuple[int, Result]], path: Path) -> None:
    """curve.png: rewards, valid designs and structure shares over the steps, stages as bands.

    points: (step, result on held-out tasks), drawn with their bootstrap intervals. Of supervised
    training: loss and gradient norm.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    steps = [line["step"] + 1 for line in log]

    def draw(axes, name: str, style: str = "-", **options) -> None:
        missing = 0.0 if name.startswith("structure/") else None  # a share, or a kind not asked
        known = [(x, line.get(name, missing)) for x, line in zip(steps, log, strict=True)]
        known = [(x, value) for x, value in known if value is not None]
        values = [value for _, value in known]
        recent = [values[max(0, i - 4) : i + 1] for i in range(len(values))]
        means = [sum(part) / len(part) for part in recent]
        axes.plot([x for x, _ in known], means, style, **options)

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
    top.set(**limits, ylabel="mean of 5 steps", title=title)
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
    shares = {name: structure_shares(result) for name, result in results.items()}
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
        if value is not None and (not isinstance(value, int) or value < 1):
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
        "Compare `--system designed` with `--system single` to see what designing is worth. "
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
    add("--system", default="designed",
        help="designed (default): the model designs anew for each sample; single: one agent; "
        "structure:NAME: a fixed script of that structure, such as structure:ensemble")  # fmt: skip
    add("--samples", type=int, default=1, metavar="K", help="samples a task (default 1)")
    add("--n-tasks", type=int, metavar="N",
        help=f"the first N tasks of each data set (default: all; toy: {TOY_TASKS})")  # fmt: skip
    add("--executor-model", metavar="FOLDER", help="another model plays the agents")
    add("--designer-prompt", metavar="FILE", help="a text file with {question} in it")
    add("--temperature", type=float, metavar="T", help="of sampling, 0: the likeliest token")
    add("--max-tokens", type=int, metavar="N", help="output tokens a call, for both roles")
    add("--max-context", type=int, metavar="N", help="tokens of prompt and reply together")
    add("--seed", type=int, metavar="S", help="of the sampling, and of the toy tasks")
    isolation = "strict: all layers of the sandbox or an error; best: those that are there"
    add("--isolation", choices=("strict", "best"), help=isolation)
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    add("--out", metavar="FILE", help="write figures and rows as JSON, whole or not at all")
    return parser


def check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises UsageError for what can't work or would not be read, before anything is loaded."""
    if args.out and (Path(args.out).is_dir() or not Path(args.out).absolute().parent.is_dir()):
        raise UsageError(f"--out {args.out}: give a file in a folder that exists")
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
    if args.system != "designed":
        for name in ("executor_model", "designer_prompt"):
            if getattr(args, name):
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} needs --system designed: {args.system} asks no designer")
    for folder in (args.model, args.executor_model):
        if folder and Path(folder).exists():  # or it is a name on the hub, fetched after all this
            check_folder(folder)
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
            tasks += toy.make_tasks(args.n_tasks or TOY_TASKS, f"{seed} eval", held_out=True)
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
        start, end = "\r" if live else "", "\n" if whole or not live else ""
        line = f"{start}{done} of {total} {noun}, {now - began:.0f} s{more(state)}"
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
    given = {name: getattr(args, name) for name in ("temperature", "max_context", "seed")}
    given |= {"isolation": args.isolation, "designer_prompt": read_prompt(args.designer_prompt)}
    given |= {f"{role}_max_tokens": args.max_tokens for role in ("designer", "executor")}
    return read_settings(folder, given)


def is_toy(settings: dict) -> bool:
    """Was this model trained on the toy's own tasks?"""
    return settings["preset"] == "toy" and not settings["data"]


def device_of(args: argparse.Namespace) -> str:
    return args.device or ("cuda" if torch.cuda.is_available() else "cpu")


def run(args: argparse.Namespace) -> None:
    """The command, from checked arguments to the printed table and the file."""
    read_prompt(args.designer_prompt)  # a wrong path is told before a model is fetched
    forced_structure(args.system, design.SCRIPTS | toy.SCRIPTS)
    folder = find_model(args.model)
    settings = settings_of(args, folder)
    scripts = toy.SCRIPTS if is_toy(settings) else design.SCRIPTS
    default_prompt = toy.DESIGNER_PROMPT if is_toy(settings) else None
    forced_structure(args.system, scripts)  # the toy has fewer
    configure(settings["isolation"])
    tasks, dropped = read_tasks(args, settings["seed"])
    limits = {"max_context": settings["max_context"]}
    engine = open_engine(folder, device_of(args), **limits)
    executor_engine = None
    if args.executor_model:
        executor_engine = open_engine(find_model(args.executor_model), device_of(args), **limits)
    began = time.monotonic()
    workflow = Path(__file__).with_name("workflow.py").read_text(encoding="utf-8")
    with ScriptPool({"workflow": workflow}, deterministic=settings["deterministic"]) as pool:
        result = evaluate(
            tasks,
            engine,
            pool,
            evaluation_score,
            system=args.system,
            scripts=scripts,
            samples=args.samples,
            executor_engine=executor_engine,
            designer_prompt=settings["designer_prompt"] or default_prompt,
            on_progress=progress_line("samples", mean_so_far),
            **{name: settings[name] for name in SAMPLING},
        )
    seconds = time.monotonic() - began
    print(f"\n{args.system}, {args.samples} samples a task, {seconds:.0f} s\n")
    print(result_text(result))
    if args.out:
        asked = {name: getattr(args, name) for name in ("model", "executor_model", "data")}
        figures = {name: describe(part) for name, part in result.by_source().items()}
        report = {
            **asked,
            "system": args.system,
            "samples": args.samples,
            "settings": settings,
            "sandbox": in_force(),
            "dropped_golds": dropped,
            "seconds": seconds,
            "all": describe(result),
            "sources": figures,
            "rows": [asdict(row) for row in result.rows],
        }
        write_json(args.out, report)


def one_line_errors(program: str, work: Callable[[], None], shown: Callable = str) -> int:
    """Runs `work`; its exit status. What fails is one line on standard error, by `shown`."""
    try:
        work()
    except (UsageError, DataError, ModelError) as error:
        print(f"{program}: {shown(str(error))}", file=sys.stderr)
        return 2
    except (OSError, SandboxError, torch.OutOfMemoryError) as error:
        print(f"{program}: failed: {shown(' '.join(str(error).split()))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{program}: stopped, nothing was written", file=sys.stderr)
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
