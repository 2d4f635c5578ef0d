"""evaluate.py: figures worked by hand, rows that are nobody else's, and errors that say what to do.

A FakePool plays the scripts by their structure, so that these tests need no sandbox; the last ones
run the command on a tiny random model, with the real one.
"""

import dataclasses
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import evaluate as module
import sandbox
import toy
from data import DataError, Task, data_names, load, read_ids
from engine import ModelError, ScriptedEngine, load_model, random_tiny
from evaluate import (
    DEFAULTS,
    Partial,
    Result,
    Row,
    UsageError,
    behaviour,
    bootstrap_interval,
    check_golds,
    complete,
    describe,
    differences_of,
    differences_text,
    evaluate,
    evaluation_score,
    forced_structure,
    main,
    majority,
    markdown_table,
    oracle_table,
    oracle_text,
    paired_difference,
    parse_systems,
    pass_at_k,
    passes,
    read_report,
    read_settings,
    results_text,
    shares_table,
    write_json,
)
from execute import call_seed
from reward import usable_tasks

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = {name: toy.SCRIPTS[name] for name in ("single", "pipeline", "ensemble")}


class FakePool:
    """single: one call. pipeline: two messages of a call. ensemble: one message of three calls.

    The answer is the last text. The structure is read off the script: it is one of SCRIPTS.
    """

    max_live = 512
    messages = {"single": [1], "pipeline": [1, 1], "ensemble": [3]}

    def __init__(self):
        self.left, self.question, self.last, self.events = {}, {}, {}, []

    def start(self, key, source, *, variables, seed):
        structure = next(
            name for name, script in SCRIPTS.items() if script.strip() == source.strip()
        )
        self.left[key] = list(self.messages[structure])
        self.question[key], self.last[key] = f"{structure} {variables['question']}", None
        self._advance(key)

    def _advance(self, key):
        event = SimpleNamespace(key=key, kind="ended", status="ok", error="", stdout="")
        event.answer = self.last[key]
        if self.left[key]:
            event.kind = "calls"
            messages = [{"role": "user", "content": self.question[key]}]
            n = self.left[key].pop(0)
            event.calls = [{"agent": f"agent{i}", "messages": messages} for i in range(n)]
        self.events.append(event)

    def poll(self, timeout=None):
        events, self.events = self.events, []
        for event in events:
            if event.kind == "ended":
                del self.left[event.key]
        return events

    def reply(self, key, texts):
        self.last[key] = texts[-1]
        self._advance(key)

    def kill(self, key):
        del self.left[key]

    def live(self):
        return len(self.left)


def make_task(question, source, kind="math"):
    return Task(f"{source}:{question}", kind, question, answer="8", source=source)


TASKS = [make_task(q, source) for source, q in (("sum", "s1"), ("sum", "s2"), ("product", "p1"))]


def grade(task, answer):
    return float(answer == f"right {task.id}")


def engine_of(designs, answer):
    """Designs with designs(question, seed) -> reply, plays agents with answer(prompt, seed)."""
    log = []

    def reply(key, messages, seed):
        log.append((key, seed))
        text = messages[-1]["content"]
        if messages[0]["role"] == "system":  # toy.DESIGNER_PROMPT has a system turn, agents none
            return designs(text, seed)
        return answer(text, seed)

    engine = ScriptedEngine(reply)
    engine.log = log
    return engine


def fenced(name):
    return f"```python\n{SCRIPTS[name]}```"


def answer_right(text, seed):
    question = text.split()[-1]
    return "right " + {"s": "sum", "p": "product"}[question[0]] + ":" + question


def run(engine, tasks=TASKS, **options):
    options = {"scripts": SCRIPTS, "designer_prompt": toy.DESIGNER_PROMPT, **options}
    return evaluate(tasks, engine, FakePool(), grade, **options)


def make_row(task="t", reward=0.0, source="sum", sample=0, status="ok", structure="single", **more):
    price = {"calls": 1, "tokens": 10, "prompt_tokens": 20, "seconds": 0.5}
    price |= {"answer": None, "error": None, **more}
    return Row(task, "math", source, sample, reward, status, structure, **price)


# --- the estimate ------------------------------------------------------------------------------


def test_the_interval_of_six_coins_is_the_binomial_one():
    """Means of 6 draws from three 0 and three 1: P(0) = 1/64, P(<= 1/6) = 7/64, P(<= 2/6) = 22/64.

    2.5 % lies between the first two, 20 % between the last two.
    """
    coins = [[1], [1], [1], [0], [0], [0]]
    assert bootstrap_interval(coins) == pytest.approx((1 / 6, 5 / 6))
    assert bootstrap_interval(coins, level=0.6) == pytest.approx((2 / 6, 4 / 6))


def test_tasks_are_drawn_not_samples():
    assert bootstrap_interval([[1, 0] * 100, [0, 1] * 100]) == (0.5, 0.5)
    assert bootstrap_interval([[1] * 200, [0] * 200]) == (0.0, 1.0)


def test_a_task_weighs_the_same_however_many_samples_it_has():
    rows = [make_row("a", 1.0, sample=i) for i in range(9)] + [make_row("b", 0.0)]
    assert Result("designed", rows).mean() == 0.5


def test_many_tasks_give_the_normal_interval():
    values = [[x] for x in [1] * 120 + [0] * 280]
    low, high = bootstrap_interval(values)
    half = 1.96 * np.sqrt(0.3 * 0.7 / 400)  # 0.045
    assert (low, high) == pytest.approx((0.3 - half, 0.3 + half), abs=0.005)
    assert bootstrap_interval(values) == (low, high)
    assert bootstrap_interval(values, seed=1) != (low, high)


def test_nothing_has_no_mean():
    for values in (lambda: bootstrap_interval([]), Result("designed").mean):
        with pytest.raises(ValueError, match="no samples"):
            values()


def test_shares_are_of_the_valid_designs_by_source():
    rows = [
        make_row("a", source="sum", structure="pipeline"),
        make_row("a", source="sum", structure="pipeline", sample=1),
        make_row("b", source="sum", structure="single"),
        make_row("b", source="sum", structure=None, status="invalid_design", sample=1),
        make_row("c", source="product", structure=None, status="invalid_design"),
        make_row("d", source="", structure="single"),  # no source: its kind stands for it
    ]
    lines = cells(shares_table({"after": Result("designed", rows)}))
    assert lines[0] == ["structure shares", "pipeline", "single"]
    assert lines[2:] == [
        ["sum, after", "0.667", "0.333"],
        ["product, after", "0.000", "0.000"],
        ["math, after", "0.000", "1.000"],
    ]


def test_describe_and_the_table():
    rows = [
        make_row("a", 1.0, source="sum", calls=5, tokens=100, prompt_tokens=300, seconds=1.5),
        make_row("b", 0.0, source="product", status="crashed", structure="pipeline"),
    ]
    result = Result("designed", rows)
    assert describe(result) == {
        "tasks": 2,
        "mean": 0.5,
        "low": 0.0,
        "high": 1.0,
        "calls": 3.0,
        "tokens": 55.0,
        "prompt_tokens": 160.0,
        "seconds": 1.0,
        "pass_at": {"1": 0.5},
        "structures": {"single": 0.5, "pipeline": 0.5},
        "statuses": {"ok": 1, "crashed": 1},
    }
    lines = cells(results_text({"designed": result}))
    header = "source,system,tasks,mean,95 % interval,calls,tokens,seconds,structures,statuses"
    assert lines[0] == header.split(",")
    first = "sum,designed,1,1.000,1.000 to 1.000,5.0,100,1.5,single 1.00,ok 1"
    assert lines[2] == first.split(",")
    last = "all,designed,2,0.500,0.000 to 1.000,3.0,55,1.0".split(",")
    assert lines[4] == [*last, "single 0.50, pipeline 0.50", "ok 1, crashed 1"]
    twice = [*rows, make_row("a", 0.0, sample=1), make_row("b", 0.0, sample=1, source="product")]
    lines = cells(results_text({"designed": Result("designed", twice)}))
    assert lines[0][5] == "pass@k (k)"
    assert [line[3:6:2] for line in lines[2:]] == [
        ["0.500", "1.000 (2)"],
        ["0.000", "0.000 (2)"],
        ["0.250", "0.500 (2)"],
    ]


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n")]


def test_pass_at_k_is_the_share_of_the_subsets_with_a_right_sample():
    for n in range(1, 7):
        for right in range(n + 1):
            rewards = [1.0] * right + [0.0] * (n - right)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(rewards, k))
                expected = sum(max(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(rewards, k) == pytest.approx(expected)


def test_pass_at_k_is_a_mean_over_tasks_for_powers_of_two_and_all():
    """Tasks with 1 and 0 right of 6: pass@2 is 1 - C(5,2)/C(6,2) = 1/3, halved."""
    rows = [make_row("a", float(i == 3), sample=i) for i in range(6)]
    rows += [make_row("b", 0.0, sample=i) for i in range(6)]
    expected = {"1": 1 / 12, "2": 1 / 6, "4": 1 / 3, "6": 0.5}
    assert passes(Result("designed", rows)) == pytest.approx(expected)
    assert set(passes(Result("designed", [*rows, make_row("c", 1.0)]))) == {"1"}  # all have one
    assert pass_at_k([0.5, 1.0], 1) == 0.5  # half a reward is not right


def test_a_paired_difference_is_taken_task_by_task():
    """a: 1, 1, 0.5; b: 1, 0, 0. The differences are 0, 1, 0.5: mean 0.5, extremes 0 and 1."""
    a = [make_row("x", 1), make_row("y", 1), make_row("z", 1), make_row("z", 0, sample=1)]
    b = [make_row("z", 0), make_row("y", 0), make_row("x", 1)]  # another order
    first, second = Result("a", a), Result("b", b)
    assert paired_difference(first, second) == (0.5, 0.0, 1.0)
    assert paired_difference(second, first) == (-0.5, -1.0, 0.0)
    always = Result("c", [make_row(task, 1) for task in "xyz"])
    never = Result("d", [make_row(task, 0) for task in "xyz"])
    assert paired_difference(always, never) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="different tasks"):
        paired_difference(first, Result("e", b[:2]))
    with pytest.raises(ValueError, match="different tasks"):
        paired_difference(always, Result("f", [make_row(task, 1) for task in "wyz"]))


def test_differences_are_the_first_systems_minus_the_others_by_source():
    a = Result("a", [make_row("x", 1, source="sum"), make_row("y", 0, source="product")])
    b = Result("b", [make_row("x", 0, source="sum"), make_row("y", 1, source="product")])
    got = differences_of({"a": a, "b": b})
    assert [(d["of"], d["minus"], d["source"], d["mean"]) for d in got] == [
        ("a", "b", "sum", 1.0),
        ("a", "b", "product", -1.0),
        ("a", "b", "all", 0.0),
    ]
    assert (got[2]["low"], got[2]["high"]) == (-1.0, 1.0)
    assert cells(differences_text(got))[4] == ["a - b", "all", "+0.000", "-1.000 to +1.000"]
    assert differences_of({"a": a}) == []


def test_a_cell_with_a_bar_stays_one_cell():
    table = markdown_table([["a|b", 1]], ["x", "y"])
    assert table.split("\n")[2] == "| a\\|b | 1   |"
    assert len({len(line) for line in table.split("\n")}) == 1


# --- the systems -------------------------------------------------------------------------------


def test_unknown_systems_are_refused_with_the_known_ones():
    for system in ("debate", "structure:", "structure:debate", "Single", "pipeline", ""):
        with pytest.raises(
            UsageError, match="designed, single, vote:calls, vote:tokens, structure:single"
        ):
            forced_structure(system, SCRIPTS)


def test_designed_takes_a_fresh_design_a_sample_and_counts_its_call():
    replies = ["single", "pipeline", "ensemble", None]

    def designs(question, seed):
        index = len(drawn) % 4
        drawn.append(question)
        return fenced(replies[index]) if replies[index] else "I would rather not."

    drawn = []
    result = run(engine_of(designs, answer_right), samples=4)
    assert Counter(drawn) == {"s1": 4, "s2": 4, "p1": 4}
    assert [(row.task, row.sample) for row in result.rows] == [
        (task.id, sample) for task in TASKS for sample in range(4)
    ]
    first = result.rows[:4]
    assert [row.structure for row in first] == ["single", "pipeline", "ensemble", None]
    assert [row.calls for row in first] == [2, 3, 4, 1]
    assert [row.reward for row in first] == [1.0, 1.0, 1.0, 0.0]
    assert [row.status for row in first] == ["ok", "ok", "ok", "invalid_design"]
    assert first[0].answer == "right sum:s1" and "no_script" in first[3].error
    assert result.mean() == 0.75


@pytest.mark.parametrize(
    "system, calls", [("single", 1), ("structure:pipeline", 2), ("structure:ensemble", 3)]
)
def test_a_forced_structure_asks_no_designer(system, calls):
    def designs(question, seed):
        raise AssertionError("a designer was asked")

    result = run(engine_of(designs, answer_right), system=system, samples=3)
    assert [row.calls for row in result.rows] == [calls] * 9
    assert {row.structure for row in result.rows} == {system.removeprefix("structure:")}
    assert result.mean() == 1.0 and result.system == system


def test_tokens_and_prompt_tokens_are_those_of_all_calls():
    class Counting(ScriptedEngine):
        def step(self):
            return [
                SimpleNamespace(**{**vars(c), "output_ids": [1] * 3, "prompt_ids": [1] * 5})
                for c in super().step()
            ]

    def reply(key, messages, seed):
        designing = messages[0]["role"] == "system"
        return fenced("ensemble") if designing else answer_right(messages[-1]["content"], seed)

    result = run(Counting(reply))
    assert {(row.calls, row.tokens, row.prompt_tokens) for row in result.rows} == {(4, 12, 20)}


def test_another_engine_plays_the_agents():
    designer = engine_of(lambda q, seed: fenced("single"), lambda text, seed: "never")
    executor = engine_of(lambda q, seed: "never", answer_right)
    assert run(designer, executor_engine=executor).mean() == 1.0
    assert len(designer.log) == len(executor.log) == 3


def by_seed(text, seed):
    return answer_right(text, seed) if seed % 2 else "wrong"


@pytest.mark.parametrize("system", ["designed", "structure:pipeline"])
def test_rows_depend_neither_on_the_batch_nor_on_who_has_which_tasks(system):
    def rows(tasks=TASKS, **options):
        engine = engine_of(lambda q, seed: fenced(sorted(SCRIPTS)[seed % 3]), by_seed)
        return run(engine, tasks, system=system, samples=5, seed=3, **options).rows

    whole = rows()
    assert 0 < sum(row.reward for row in whole) < len(whole)
    assert rows(batch=1) == rows(batch=10) == whole
    assert rows(TASKS[:1]) + rows(TASKS[1:], places=[1, 2]) == whole
    assert rows(TASKS[1:]) != whole[5:]


def test_every_call_has_its_own_seed_and_none_of_training():
    engine = engine_of(lambda q, seed: fenced("ensemble"), answer_right)
    run(engine, samples=2, seed=3, batch=2)
    seeds = [seed for _, seed in engine.log]
    assert len(set(seeds)) == len(seeds) == 3 * 2 * 4
    assert seeds[0] == call_seed(3, -1, 0, 0, -1, 0)
    budgets = [make_row(task.id, sample=k, calls=3) for task in TASKS for k in range(2)]
    single, vote = engine_of(None, answer_right), engine_of(None, answer_right)
    run(single, samples=2, seed=3, system="single")
    run(vote, samples=2, seed=3, system="vote:calls", budgets=budgets)
    votes = {seed for _, seed in vote.log}
    assert len(votes) == 3 * 2 * 3 and not votes & {*seeds, *(seed for _, seed in single.log)}


def test_progress_reaches_the_total_and_hands_out_the_rows():
    seen = []
    result = run(
        engine_of(lambda q, seed: fenced("single") if q != "s2" else "no", answer_right),
        samples=2,
        batch=2,
        on_progress=lambda done, total, result: seen.append((done, total, len(result.rows))),
    )
    assert all(total == 6 for _, total, _ in seen)
    assert [done for done, _, _ in seen] == [1, 2, 2, 3, 4, 4, 5, 6]
    assert [rows for _, _, rows in seen] == [0, 0, 2, 2, 2, 4, 4, 6]
    assert result.rows[2].status == "invalid_design"


def test_an_invalid_fixed_script_counts_all_its_samples_in_the_progress():
    seen = []
    scripts = {"single": "print('no agent')"}
    show = lambda done, total, result: seen.append(done)  # noqa: E731
    result = run(
        engine_of(None, None), scripts=scripts, system="single", samples=4, on_progress=show
    )
    assert seen[-1] == 12 and {row.status for row in result.rows} == {"invalid_design"}


@pytest.mark.parametrize(
    "tasks, options, says",
    [
        ([], {}, "0 tasks"),
        (TASKS, {"samples": 0}, "samples=0"),
        (TASKS, {"batch": 0}, "batch=0"),
        (TASKS, {"system": "structure:moa"}, "unknown system"),
        (TASKS + TASKS[:1], {}, "'sum:s1'"),
        (TASKS, {"system": "vote:calls"}, "a vote needs a budget: no row of task 'sum:s1'"),
    ],
)
def test_what_can_not_be_evaluated_is_refused(tasks, options, says):
    with pytest.raises(UsageError, match=says):
        run(engine_of(None, None), tasks, **options)


def test_the_oracle_table_forces_every_structure_on_every_source():
    def answer(text, seed):
        structure, question = text.split()
        works = {"ensemble": "p", "pipeline": "s"}.get(structure) == question[0]
        return answer_right(text, seed) if works or question == "s1" else "wrong"

    table = oracle_table(
        TASKS, engine_of(None, answer), FakePool(), grade, SCRIPTS, samples=2, seed=1
    )
    assert table == {
        "single": {"sum": 0.5, "product": 0.0},
        "pipeline": {"sum": 1.0, "product": 0.0},
        "ensemble": {"sum": 0.5, "product": 1.0},
    }
    lines = oracle_text(table).split("\n")
    assert [line.split("|")[-2].strip() for line in lines[2:]] == ["pipeline", "ensemble"]


def test_tasks_whose_gold_can_not_be_graded_are_left_out():
    golds = ["025", "", None, "x" * 10_001, r"\frac{1}{2}"]
    tasks = [Task(f"t{i}", "math", "?", answer=gold) for i, gold in enumerate(golds)]
    code = Task("code", "code", "?", tests={"inputs": [], "outputs": [], "fn_name": None})
    kept, bad = usable_tasks([*tasks, code])
    assert [task.id for task in kept] == ["t0", "t4", "code"]
    assert [task.id for task in bad] == ["t1", "t2", "t3"]


# --- majority votes ----------------------------------------------------------------------------


def test_systems_are_named_once_and_a_vote_follows_what_it_is_compared_with():
    assert parse_systems("designed, vote:calls,structure:pipeline", SCRIPTS) == [
        "designed",
        "vote:calls",
        "structure:pipeline",
    ]
    for text, says in [
        ("designed,designed", "once"),
        ("vote:tokens,designed", "--system designed,vote:tokens"),
        ("designed,,single", "unknown system ''"),
        ("designed,vote", "unknown system 'vote'"),
    ]:
        with pytest.raises(UsageError, match=says):
            parse_systems(text, SCRIPTS)


def question(answer="1/2", kind="math", **more):
    return Task("q", kind, "?", answer=answer, **more)


@pytest.mark.parametrize(
    "answers, winner",
    [
        (["3", "1/2", "0.5", "3", r"\frac{1}{2}"], 1),  # three ways to write one half
        (["3", "1/2", "0.5", "3"], 0),  # of two groups of one size the earlier
        (["3", None, "", None, "7", "7"], 4),  # no answer, no vote
        ([None, None], 0),
        (["x" * 20_000, "5", "x" * 20_000], 0),  # too long for the verifier, yet equal texts
        (["10", "010", "10.0", "3", "3"], 0),
    ],
)
def test_the_largest_group_of_equal_answers_wins(answers, winner):
    replies = ["I give up." if a is None else rf"So \boxed{{{a}}}." for a in answers]
    assert majority(question(), replies) == winner


def test_answers_may_be_as_far_apart_as_the_task_allows():
    replies = [r"\boxed{7}", r"\boxed{0.33}", r"\boxed{0.34}"]
    assert majority(question("0.335", tolerance=0.02), replies) == 1
    assert majority(question("0.335"), replies) == 0


DOUBLE = {"inputs": ["1\n", "2\n", "0\n"], "outputs": ["9", "9", "9"], "fn_name": None}


def test_programs_vote_by_what_they_print_not_by_what_was_expected(best_isolation):
    programs = {
        "triple": "print(int(input()) * 3)",
        "dies": "1 / 0",
        "double": "n = int(input())\nprint(n * 2)",
        "nines": "print(9)",  # all that the tests ask for, which is not looked at
        "plus": "n = int(input())\nprint( n + n , '' )",
        "dies too": "1 / 0",
        "dies as well": "[][0]",
    }
    replies = [f"```python\n{program}\n```" for program in programs.values()] + ["No idea."]
    winner = majority(question(kind="code", tests=DOUBLE), replies)
    assert list(programs)[winner] == "double"
    call = {"inputs": ["1", "[2]"], "outputs": ["0", "0"], "fn_name": "f"}
    codes = ["def f(x): return x", "def f(x): return [x]", "def f(y):\n    return y"]
    replies = [f"```python\n{code}\n```" for code in (codes[1], codes[0], codes[2])]
    assert majority(question(kind="code", tests=call), replies) == 1


def test_a_program_that_several_replies_give_runs_once(monkeypatch):
    ran = []
    monkeypatch.setattr(module, "behaviour", lambda program, tests: ran.append(program) or [1])
    replies = [f"```python\nprint({n})\n```" for n in (1, 2, 1, 1)]
    assert majority(question(kind="code", tests=DOUBLE), replies) == 0
    assert ran == ["print(1)", "print(2)"]


def test_a_program_that_sometimes_works_has_a_vote_and_is_told_apart(best_isolation):
    half = behaviour("n = int(input())\nprint(1 // n)", DOUBLE)
    assert half == [["1"], ["0"], "error"]
    assert behaviour("1 / 0", DOUBLE) == behaviour("", DOUBLE) == []
    many = DOUBLE | {"inputs": ["1\n"] * 20}
    assert len(behaviour("print(1)", many)) == module.VOTE_INPUTS
    assert behaviour("def f(): pass", {"check": "..."}) == ["def f(): pass"]
    assert behaviour("", {"check": "..."}) == []


class Lengths(ScriptedEngine):
    """Every reply has a number of tokens that depends on its seed: 1 to 7."""

    def __init__(self, reply):
        super().__init__(reply)
        self.seeds = {}

    def submit(self, key, messages, *, max_tokens, temperature, seed):
        self.seeds[key] = seed
        super().submit(key, messages, max_tokens=max_tokens, temperature=temperature, seed=seed)

    def step(self):
        return [
            SimpleNamespace(**{**vars(c), "output_ids": [1] * (1 + self.seeds[c.key] % 7)})
            for c in super().step()
        ]


def box(key, messages, seed):
    if messages[0]["role"] == "system":
        return fenced(sorted(SCRIPTS)[seed % 3])
    return rf"\boxed{{{8 if seed % 5 < 2 else 100 + seed % 7}}}"  # 8 is right and most frequent


def vote(system, budgets, tasks=TASKS, samples=4, **options):
    grade = lambda task, answer: float(answer == r"\boxed{8}")  # noqa: E731
    options = {"scripts": SCRIPTS, "designer_prompt": toy.DESIGNER_PROMPT, **options}
    return evaluate(
        tasks, Lengths(box), FakePool(), grade,
        system=system, budgets=budgets, samples=samples, seed=3, **options,
    )  # fmt: skip


def test_a_vote_makes_as_many_calls_as_the_sample_that_it_is_compared_with():
    designed = vote("designed", ()).rows
    rows = vote("vote:calls", designed).rows
    assert [(row.task, row.sample, row.calls) for row in rows] == [
        (row.task, row.sample, row.calls) for row in designed
    ]
    assert len({row.calls for row in rows}) > 1
    assert {row.structure for row in rows} == {"single"} and {row.status for row in rows} == {"ok"}
    more = [make_row(task.id, sample=k, calls=40) for task in TASKS for k in range(4)]
    alone = [make_row(task.id, sample=k, calls=1) for task in TASKS for k in range(4)]
    assert vote("vote:calls", more).mean() == 1.0  # 40 % of 40 against at most 10 % each
    assert 0 < vote("vote:calls", alone).mean() < 1


def test_a_vote_has_at_least_the_tokens_and_only_its_last_reply_goes_over():
    budgets = [
        make_row(task.id, sample=k, tokens=n)
        for task in TASKS
        for k, n in enumerate((1, 12, 50, 200))
    ]
    rows = vote("vote:tokens", budgets).rows
    for row, budget in zip(rows, budgets, strict=True):
        assert budget.tokens <= row.tokens < budget.tokens + 7
        assert row.calls <= budget.tokens
    assert len({row.calls for row in rows}) > 4
    # The replies are those of a vote by calls of the same number: the draws are the same.
    calls = [make_row(row.task, sample=row.sample, calls=row.calls) for row in rows]
    assert vote("vote:calls", calls).rows == rows


class Fives(ScriptedEngine):
    """Every reply has 5 tokens, or `length`. `rounds`: how many were asked together."""

    length, rounds = 5, ()

    def step(self):
        done = super().step()
        self.rounds = (*self.rounds, len(done))
        return [SimpleNamespace(**{**vars(c), "output_ids": [1] * self.length}) for c in done]


def rounds_of(system, tasks=1, batch=512, length=5, **budget):
    engine = Fives(box)
    engine.length = length
    budgets = [make_row(task.id, **budget) for task in TASKS[:tasks]]
    options = {"scripts": SCRIPTS, "deterministic": True, "budgets": budgets, "batch": batch}
    result = evaluate(TASKS[:tasks], engine, FakePool(), grade, system=system, **options)
    return engine.rounds, [row.calls for row in result.rows]


def test_a_vote_asks_for_what_fits_and_for_no_more():
    """By tokens the first reply shows how long replies are; 50 tokens are 9 more of 5."""
    assert rounds_of("vote:tokens", tokens=50) == ((1, 9), [10])
    assert rounds_of("vote:tokens", tokens=52) == ((1, 9, 1), [11])
    assert rounds_of("vote:calls", calls=10) == ((10,), [10])
    assert rounds_of("vote:calls", tasks=3, batch=20, calls=10) == ((20, 10), [10] * 3)
    assert rounds_of("vote:calls", calls=0) == ((1,), [1])  # a vote of nobody elects nobody
    assert rounds_of("vote:tokens", tokens=4, length=0) == ((1, 3), [4])  # it ends


@pytest.mark.parametrize("system", ["vote:calls", "vote:tokens"])
def test_a_vote_depends_neither_on_the_batch_nor_on_which_tasks_are_left(system):
    budgets = [
        make_row(task.id, sample=k, tokens=9 * k + 3, calls=k + 1)
        for task in TASKS
        for k in range(4)
    ]
    kept = []
    whole = vote(system, budgets, on_rows=kept.append).rows
    kept.sort(key=lambda rows: [task.id for task in TASKS].index(rows[0].task))  # as they end
    assert [row for rows in kept for row in rows] == whole and len(kept) == len(TASKS)
    assert vote(system, budgets, batch=1).rows == whole
    assert vote(system, budgets, tasks=TASKS[1:], places=[1, 2]).rows == whole[4:]


def test_a_reply_whose_execution_failed_has_no_vote():
    """The first of three equal answers came from a script that then ran out of time."""

    class Late(FakePool):
        def poll(self, timeout=None):
            events = super().poll(timeout)
            for event in events:
                if event.kind == "ended" and event.key[0] == 0:
                    event.status = "timeout"
            return events

    right = ScriptedEngine(lambda key, messages, seed: r"\boxed{8}")
    options = {"scripts": SCRIPTS, "system": "vote:calls"}
    result = evaluate(
        TASKS[:1], right, Late(), lambda task, answer: 1.0,
        budgets=[make_row("sum:s1", calls=3)], **options,
    )  # fmt: skip
    assert [(row.status, row.reward, row.calls) for row in result.rows] == [("ok", 1.0, 3)]


def test_only_the_winner_of_a_vote_is_scored_and_a_failed_one_has_none():
    """Prompts that don't fit: each ballot ends after one try, without a call."""

    class PromptTooLong(ValueError):
        pass

    class Full(ScriptedEngine):
        def submit(self, key, messages, **more):
            raise PromptTooLong("too long")

    scored = []

    def grade(task, answer):
        scored.append(answer)
        return 1.0

    budgets = [make_row(task.id, calls=5) for task in TASKS]
    options = {"scripts": SCRIPTS, "system": "vote:calls", "budgets": budgets}
    result = evaluate(TASKS, Full(box), FakePool(), grade, **options)
    assert {(row.status, row.reward, row.calls) for row in result.rows} == {
        ("context_overflow", 0.0, 0)
    }
    assert scored == []
    nothing = [make_row(task.id, calls=0, tokens=0) for task in TASKS]  # the designs' own rows
    options |= {"system": "vote:tokens", "budgets": nothing}
    result = evaluate(TASKS, Full(box), FakePool(), grade, **options)
    assert {(row.status, row.calls) for row in result.rows} == {("context_overflow", 0)}
    assert {row.seconds for row in result.rows} == {0.0} and scored == []
    options |= {"system": "vote:calls", "budgets": budgets}
    evaluate(TASKS, Lengths(box), FakePool(), grade, **options)
    assert len(scored) == 3


def test_ctrl_c_ends_a_vote_of_programs_at_once(best_isolation):
    """Each program sleeps to its limit of 15 s, on 8 inputs: nobody waits for that."""
    tests = DOUBLE | {"inputs": ["1\n"] * 8, "outputs": ["1"] * 8}
    tasks = [question(kind="code", tests=tests)]
    engine = engine_of(None, lambda text, seed: "```python\nimport time\ntime.sleep(60)\n```")
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    began, threads = time.monotonic(), threading.active_count()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(engine, tasks, system="vote:calls", budgets=[make_row("q", calls=3)])
    assert time.monotonic() - began < 60 and threading.active_count() <= threads


def test_a_vote_by_tokens_needs_an_engine_that_counts_them():
    budgets = [make_row(task.id, tokens=0) for task in TASKS]
    with pytest.raises(UsageError, match="counts tokens"):
        run(engine_of(None, None), system="vote:tokens", budgets=budgets)


@pytest.fixture
def slow(monkeypatch):
    """A ScriptedEngine whose steps take 10 s each of a clock that nothing else moves."""
    now = 0.0

    class Slow(ScriptedEngine):
        def step(self):
            nonlocal now
            now += 10.0
            return super().step()

    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    return Slow


def test_seconds_go_from_the_first_call_of_a_sample_to_its_answer(slow):
    def seconds(system, **more):
        engine = slow(box)
        options = {"scripts": SCRIPTS, "designer_prompt": toy.DESIGNER_PROMPT, **more}
        rows = evaluate(TASKS[:1], engine, FakePool(), grade, system=system, **options).rows
        return [(row.structure, row.seconds) for row in rows]

    assert seconds("structure:pipeline", samples=2) == [("pipeline", 20.0)] * 2
    steps = {"single": 20.0, "ensemble": 20.0, "pipeline": 30.0}
    designed = seconds("designed", samples=6)
    assert len(set(designed)) > 1 and all(steps[name] == took for name, took in designed)
    assert seconds("vote:calls", budgets=[make_row("sum:s1", calls=5)]) == [("single", 10.0)]

    class LastFirst(slow):
        """A reply of 5 tokens a step: of those asked together the first waits longest."""

        held = ()

        def step(self):
            *self.held, last = [*self.held, *super().step()]
            return [SimpleNamespace(**{**vars(last), "output_ids": [1] * 5})]

    def of_vote(system, **budget):
        options = {"scripts": SCRIPTS, "budgets": [make_row("sum:s1", **budget)]}
        engine = LastFirst(box)
        return evaluate(TASKS[:1], engine, FakePool(), grade, system=system, **options).rows

    assert [row.seconds for row in of_vote("vote:calls", calls=3)] == [30.0]
    assert [row.seconds for row in of_vote("vote:tokens", tokens=15)] == [10.0 + 20.0]  # rounds


# --- what is there of an interrupted one -------------------------------------------------------


def test_rows_come_back_from_the_file_and_a_cut_line_does_not(tmp_path):
    path, request = tmp_path / "out.partial.jsonl", {"samples": 1, "model": "m"}
    with pytest.raises(KeyboardInterrupt), Partial(path, request) as partial:
        partial.add("single", 2.0, [make_row("a", 1.0, answer="\ud800")])
        partial.add("single", 3.0, [make_row("b", 0.0)])
        raise KeyboardInterrupt
    path.write_bytes(path.read_bytes() + b'{"system": "single", "seconds": 9')
    with pytest.raises(KeyboardInterrupt), Partial(path, request) as partial:
        assert partial.rows == {"single": [make_row("a", 1.0, answer="\ud800"), make_row("b", 0.0)]}
        assert partial.wall_seconds == {"single": 5.0}
        partial.add("designed", 1.0, [make_row("a", 1.0)])
        raise KeyboardInterrupt
    with Partial(path, request) as partial:
        assert [len(partial.rows[name]) for name in ("single", "designed")] == [2, 1]
    assert not path.exists()


def test_the_file_of_another_evaluation_is_refused_and_left(tmp_path):
    path = tmp_path / "out.partial.jsonl"
    cases = [
        (json.dumps({"request": {"samples": 2, "model": "m"}}) + "\n", "with other samples: rem"),
        ("# notes\n", "no file of this program"),
        ("[1]\n", "no file of this program"),
        ("{}\n", "no file of this program"),
        ('{"request": [1]}\n', "no file of this program"),
        (json.dumps({"request": {"samples": 1}}) + '\n{"system": "x"}\n', "no file of this pr"),
    ]
    for text, says in cases:
        path.write_text(text)
        with pytest.raises(UsageError, match=says), Partial(path, {"samples": 1}):
            pass
        assert path.read_text() == text


def test_only_what_lacks_is_evaluated_with_its_own_seeds_and_in_order(slow):
    """A step takes 10 s, a task one step: the times of the tasks add up, none counts twice."""

    def all_of(partial):
        engine = slow(lambda key, messages, seed: by_seed(messages[-1]["content"], seed))
        options = {"scripts": SCRIPTS, "samples": 2, "batch": 1, "seed": 3, "score": grade}
        systems = ["structure:pipeline", "vote:calls"]
        return complete(partial, systems, TASKS, engine=engine, pool=FakePool(), **options)

    whole = all_of(Partial(None, {}))
    partial = Partial(None, {})
    partial.add("structure:pipeline", 5.0, whole["structure:pipeline"].rows[2:4])
    assert all_of(partial) == whole
    assert {row.calls for row in whole["vote:calls"].rows} == {2}
    assert partial.wall_seconds == {"structure:pipeline": 5.0 + 2 * 20.0, "vote:calls": 3 * 10.0}


def test_the_digest_is_of_all_that_a_task_is_and_of_the_order():
    others = [TASKS[::-1], [*TASKS[:2], dataclasses.replace(TASKS[2], answer="9")]]
    digests = {module.digest(tasks) for tasks in (TASKS, *others)}
    assert len(digests) == 3 and module.digest(list(TASKS)) in digests


def test_a_full_disk_keeps_the_lines_that_are_whole(tmp_path, capsys):
    """The limit on the size of a file, which fails as a full disk does: in the middle of a line."""
    path, request = tmp_path / "out.partial.jsonl", {"samples": 1}
    size, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(OSError, match="File too large"), Partial(path, request) as partial:
            partial.add("single", 1.0, [make_row("a")])
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, hard))
            partial.add("single", 1.0, [make_row("b")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    assert "\n1 samples are kept in" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), Partial(path, request) as partial:
        assert partial.rows == {"single": [make_row("a")]}
        partial.add("single", 1.0, [make_row("b")])
        raise KeyboardInterrupt
    with Partial(path, request) as partial:
        assert [row.task for row in partial.rows["single"]] == ["a", "b"]


def test_no_rows_leave_no_file_and_nothing_to_say(tmp_path, capsys):
    path = tmp_path / "out.partial.jsonl"
    for each in (path, None):
        with pytest.raises(ModelError), Partial(each, {}):
            raise ModelError("no weights")
    assert not path.exists() and capsys.readouterr().err == ""
    with pytest.raises(ModelError), Partial(None, {}) as partial:
        partial.add("single", 1.0, [make_row("a")])
        raise ModelError("no weights")
    assert "no row is kept: with --out FILE" in capsys.readouterr().err


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "out.partial.jsonl"
    held = f"import fcntl; f = open({str(path)!r}, 'a+'); fcntl.lockf(f, fcntl.LOCK_SH); print(1)"
    other = subprocess.Popen(
        [sys.executable, "-u", "-c", f"{held}; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        other.stdout.readline()
        with pytest.raises(UsageError, match="another process writes to"), Partial(path, {}):
            pass
        other.communicate(b"\n")
    with Partial(path, {}):
        path.unlink()  # whoever tidies up too early loses no report


# --- HumanEval and golds -----------------------------------------------------------------------


@pytest.fixture
def best_isolation():
    sandbox.configure("best")
    yield
    sandbox.configure()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


HUMAN = {
    "task_id": "Human/0",
    "prompt": 'def half(n):\n    return n // 2\n\n\ndef quarter(n):\n    """ A quarter. """\n',
    "entry_point": "quarter",
    "canonical_solution": "    return half(half(n))\n",
    "test": "\ndef check(candidate):\n    assert candidate(8) == half(4)\n",
}


def test_a_humaneval_row_is_scored_with_the_helpers_of_its_prompt(tmp_path, best_isolation):
    (task,), _ = load(write_rows(tmp_path / "rows.jsonl", [HUMAN]))
    replies = {
        "def quarter(n):\n    return half(half(n))": 1.0,
        "    return half(half(n))": 1.0,  # the prompt goes on with it
        "def quarter(n):\n    return n": 0.0,
        "def quarter(n:": 0.0,
        "raise SystemExit(0)": 0.0,
    }
    scores = {code: evaluation_score(task, f"So:\n```python\n{code}\n```") for code in replies}
    assert scores == replies
    assert evaluation_score(task, "No program.") == 0.0
    with pytest.raises(ValueError, match="run_asserts"):  # training can't pay for it
        module.score(task, "```python\npass\n```")
    math = Task("m", "math", "?", answer="7")
    assert evaluation_score(math, r"\boxed{7}") == 1.0 and evaluation_score(math, "7") == 0.0


def apps_row(number, golds, pairs=(("1\n", "2\n"), ("4\n", "8\n")), level="introductory"):
    inputs, outputs = zip(*pairs, strict=True)
    tests = {"inputs": inputs, "outputs": outputs}
    return {"problem_id": number, "question": "Double n.", "difficulty": level} | {
        "solutions": json.dumps(golds) if golds is not None else "",
        "input_output": json.dumps(tests),
    }


GOOD, BAD = "print(2 * int(input()))", "print(2)"  # BAD passes the first test, not the second


def test_a_row_is_kept_if_one_of_three_golds_passes_all_its_tests(tmp_path, best_isolation):
    rows = [
        apps_row(1, [GOOD]),
        apps_row(2, [BAD, BAD, GOOD]),
        apps_row(3, [BAD] * 3 + [GOOD]),  # the fourth is not tried
        apps_row(4, [BAD]),
        apps_row(5, None),
        apps_row(6, ["raise SystemExit(1)", GOOD]),
        apps_row(7, [GOOD], level="interview"),
        apps_row(8, [GOOD], pairs=[("1\n", 2)]),
        apps_row(9, [BAD, GOOD]),
    ]
    path, seen = write_rows(tmp_path / "rows.jsonl", rows), []
    result = check_golds(path, lambda *line: seen.append(line))
    assert result.kept == ["apps:1", "apps:2", "apps:6", "apps:9"]
    assert result.failed == {"gold fails": 2, "no gold": 1}
    assert [done for done, _, _ in seen] == [1, 2, 3, 4, 5, 6, 7]
    assert seen[-1] == (7, 7, 4) and seen[2] == (3, 7, 2)
    text = str(result)
    assert "9 rows = 7 tasks" in text
    assert "7 tasks = 4 kept + 3 failed (gold fails: 2, no gold: 1)" in text


def test_contest_humaneval_and_math_golds(tmp_path, best_isolation):
    contest = {
        "name": "1_A",
        "description": "Print half of n.",
        "generated_tests": {"input": ["4\n"], "output": ["2 \n"]},
        "solutions": {"language": [1, 3], "solution": ["print 2", "print(int(input())//2)"]},
    }
    python_2_only = contest | {"name": "1_B"}
    python_2_only["solutions"] = {"language": [1], "solution": ["print(2)"]}
    result = check_golds(write_rows(tmp_path / "contest.jsonl", [contest, python_2_only]))
    assert result.kept == ["codecontests:1_A"] and result.failed == {"no gold": 1}
    gutted = HUMAN | {"task_id": "Human/1", "canonical_solution": "    return None\n"}
    result = check_golds(write_rows(tmp_path / "human.jsonl", [gutted, HUMAN]))
    assert result.kept == ["humaneval:Human/0"] and result.failed == {"gold fails": 1}
    result = check_golds(write_rows(tmp_path / "golds.jsonl", ROWS))
    assert result.kept == ["golds:1", "golds:2", "golds:4"]
    assert result.failed == {"unusable answer": 1}


def test_many_golds_stay_in_row_order_and_few_wait(monkeypatch):
    """The window: a pair is taken only once an earlier one is done. No sandbox in here."""
    monkeypatch.setattr(module, "cores", lambda: 2)
    taken, done = [], []

    def pairs():
        for n in range(200):
            taken.append(n)
            assert n - len(done) <= 33
            yield n, -n

    for item, judged in module._in_order(pairs(), lambda n, minus: minus):
        assert judged == -item
        done.append(item)
    assert done == taken == list(range(200))


def test_the_command_writes_ids_that_the_loader_takes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [apps_row(n, [GOOD if n % 2 else BAD]) for n in range(5)]
    path = write_rows(tmp_path / "train.jsonl", rows)
    flags = ["--check-golds", str(path), "--isolation", "best"]
    assert main(flags) == 0
    said = capsys.readouterr()
    assert "5 tasks = 2 kept + 3 failed (gold fails: 3)" in said.out
    assert "train.kept.txt" in said.out and "5 of 5 tasks" in said.err
    ids = read_ids("train.kept.txt")
    assert (tmp_path / "train.kept.txt").read_text() == "apps:1\napps:3\n"
    assert [task.id for task in load(path, keep=ids)[0]] == ["apps:1", "apps:3"]
    assert main([*flags, "--out", "ids.txt"]) == 0 and read_ids("ids.txt") == ids
    capsys.readouterr()
    write_rows(path, rows[:1])
    assert main([*flags, "--out", "none.txt"]) == 2
    assert "no gold can be rewarded" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "ids.txt",
        "train.jsonl",
        "train.kept.txt",
    ]
    with pytest.raises(DataError, match="no gold programs"):
        check_golds(write_rows(path, [LIVE]))


LIVE = {
    "question_content": "Echo.",
    "contest_date": "2025-02-01",
    "public_test_cases": "[]",
    "private_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}]),
}


def test_ctrl_c_ends_the_golds_at_once_and_writes_nothing(tmp_path, capsys, monkeypatch):
    sleepers = [apps_row(n, ["import time\ntime.sleep(12)"]) for n in range(40 * sandbox.cores())]
    path = write_rows(tmp_path / "rows.jsonl", [apps_row("first", [GOOD]), *sleepers])

    def ctrl_c(done, total, kept):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(module, "progress_line", lambda noun, more: ctrl_c)
    monkeypatch.chdir(tmp_path)
    began, threads = time.monotonic(), threading.active_count()
    assert main(["--check-golds", str(path), "--isolation", "best"]) == 130
    assert time.monotonic() - began < 60  # to run them all takes eight minutes, on any machine
    said = capsys.readouterr()
    assert said.out == "" and said.err == "\nevaluate.py: stopped\n"
    assert list(tmp_path.iterdir()) == [path]
    assert threading.active_count() <= threads


# --- model folders and settings ----------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model, tokenizer = random_tiny(max_position_embeddings=1024)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(saved, tmp_path):
    """A fresh copy of the saved folder, to be damaged."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_saved_model_comes_back_with_the_same_weights(saved):
    model, tokenizer = load_model(saved, "cpu")
    expected, _ = random_tiny(max_position_embeddings=1024)
    loaded = dict(model.named_parameters())
    assert all(torch.equal(loaded[name], p) for name, p in expected.named_parameters())
    assert model.dtype == torch.float32 and not model.training
    assert tokenizer.decode(tokenizer.encode("7*8")) == "7*8"
    assert load_model(saved, "cpu", torch.bfloat16)[0].dtype == torch.bfloat16


def drop_weight(folder):
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, {"format": "pt"})


def drop_template(folder):
    (folder / "chat_template.jinja").unlink()


def shrink_vocabulary(folder):
    model, _ = random_tiny(vocab_size=200)
    model.config.eos_token_id = 3
    model.generation_config.eos_token_id = 3
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "config.json").write_text("{"), "can't be loaded"),
        (lambda f: (f / "config.json").write_text('{"model_type": "abacus"}'), "can't be loaded"),
        (lambda f: (f / "model.safetensors").write_bytes(b"no weights"), "can't be loaded"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "can't be loaded"),
        (drop_weight, "lacks 1 weights, such as model.layers.1.mlp.up_proj.weight"),
        (drop_template, "no chat template"),
        (shrink_vocabulary, "the tokenizer knows 258 tokens, the model 200"),
    ],
)
def test_a_damaged_model_folder_is_told_in_one_line(tiny, damage, says):
    damage(tiny)
    with pytest.raises(ModelError, match=says) as error:
        load_model(tiny, "cpu")
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


def test_no_folder_and_no_device(tiny):
    with pytest.raises(ModelError, match="hf download"):
        load_model(tiny / "nothing", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="--device cpu"):
            load_model(tiny, "cuda")


def test_what_is_given_beats_the_run_beats_the_defaults(tmp_path):
    assert read_settings(tmp_path, {}) == DEFAULTS
    config = {"temperature": 0.5, "seed": 7, "max_context": 99, "lr": 1.0, "isolation": "best"}
    (tmp_path / "run_config.json").write_text(json.dumps(config))
    settings = read_settings(tmp_path, {"temperature": 0.0, "max_calls": None})
    ours = {"temperature": 0.0, "seed": 7, "max_context": 99, "isolation": "best"}
    assert settings == {**DEFAULTS, **ours}


@pytest.mark.parametrize(
    "config, says",
    [
        ("[", "can't be read"),
        ("[]", "no JSON object"),
        ('{"max_calls": 0}', "max_calls is 0"),
        ('{"max_calls": null}', "max_calls is None"),
        ('{"designer_max_tokens": "many"}', "designer_max_tokens is 'many'"),
        ('{"temperature": -1}', "temperature is -1"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"isolation": "none"}', "isolation is 'none'"),
    ],
)
def test_a_run_config_that_can_not_work_is_refused(tmp_path, config, says):
    (tmp_path / "run_config.json").write_text(config)
    with pytest.raises(UsageError, match=says):
        read_settings(tmp_path, {})


def test_half_a_surrogate_pair_in_an_answer_can_be_written(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"answer": "\ud800"})
    assert json.loads(path.read_text()) == {"answer": "\ud800"}


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"mean": 1})
    with pytest.raises(TypeError):
        write_json(path, {"mean": object()})
    assert json.loads(path.read_text()) == {"mean": 1}
    assert list(tmp_path.iterdir()) == [path]


# --- the command -------------------------------------------------------------------------------


ROWS = [
    {"id": 1, "problem": "How many sides has a square?", "answer": "004"},
    {"id": 2, "problem": "How many sides has a triangle?", "answer": "3"},
    {"id": 3, "problem": "Name something.", "answer": "x" * 10_001},
    {"id": 4, "problem": "What is half of seven?", "answer": r"$\frac{7}{2}$"},
]


def test_the_command_on_the_toy_tasks(tiny, tmp_path):
    config = {"preset": "toy", "isolation": "best", "deterministic": True, "executor_max_tokens": 4}
    (tiny / "run_config.json").write_text(json.dumps(config))
    out = tmp_path / "out.json"
    flags = ["--model", tiny, "--system", "structure:pipeline", "--n-tasks", 4, "--samples", 2]
    done = subprocess.run(
        [sys.executable, REPO / "evaluate.py", *map(str, flags), "--out", out],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "8 of 8 samples" in done.stderr and "| product " in done.stdout
    report = json.loads(out.read_text())
    assert (
        report["systems"]["structure:pipeline"]["all"]["tasks"] == 4
        and report["settings"]["executor_max_tokens"] == 4
    )
    (figures,) = report["systems"].values()
    assert set(figures["sources"]) == set(toy.KINDS) and figures["wall_seconds"] > 0
    assert out.with_suffix(".md").read_text().strip() == done.stdout.strip()
    assert not list(tmp_path.glob("*partial*"))
    assert [row["sample"] for row in report["rows"]] == [0, 1] * 4
    assert {row["structure"] for row in report["rows"]} == {"pipeline"}
    assert {row["status"] for row in report["rows"]} == {"ok"}
    assert {row["calls"] for row in report["rows"]} == {2}
    assert all(2 <= row["tokens"] <= 8 for row in report["rows"])
    held_out = toy.make_tasks(4, "0 eval", held_out=True)
    assert [row["task"] for row in report["rows"][::2]] == [task.id for task in held_out]


def test_the_command_on_a_file_of_rows(tiny, tmp_path, capsys):
    """Two systems in one process: the gold of 10,001 characters is left out and named."""
    names = [write_rows(tmp_path / name, rows) for name, rows in (("rows", ROWS), ("b", [HUMAN]))]
    both = ", ".join(map(str, names))
    flags = ["--model", tiny, "--data", both, "--isolation", "best", "--max-tokens", 3]
    out = tmp_path / "out.json"
    assert main([str(x) for x in [*flags, "--system", "single", "--out", out]]) == 0
    said = capsys.readouterr()
    assert "left out 1 tasks" in said.err and "rows:3" in said.err
    rows = json.loads(out.read_text())["rows"]
    ids = ["rows:1", "rows:2", "rows:4", "humaneval:Human/0"]
    assert [row["task"] for row in rows] == ids
    assert {(row["status"], row["reward"], row["calls"]) for row in rows} == {("ok", 0.0, 1)}

    small = [*flags, "--system", "single", "--max-context", 30, "--out", out, "--n-tasks", 2]
    assert main([str(x) for x in small]) == 0
    statuses = lambda name: json.loads(out.read_text())["systems"][name]["all"]["statuses"]  # noqa
    assert statuses("single") == {"context_overflow": 3}

    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Design.\n[user]\n{question}")
    designed = [*flags, "--designer-prompt", prompt, "--executor-model", tiny, "--out", out]
    assert main([str(x) for x in designed]) == 0
    assert statuses("designed") == {"invalid_design": 4}
    assert {row["calls"] for row in json.loads(out.read_text())["rows"]} == {1}


def test_the_command_gives_each_role_its_model_and_the_designer_its_prompt(
    tiny, saved, tmp_path, monkeypatch
):
    def taken(partial, systems, tasks, **options):
        seen.update(options)
        raise KeyboardInterrupt

    seen = {}
    monkeypatch.setattr(module, "complete", taken)
    monkeypatch.setattr(
        module, "open_engine", lambda folder, device, **limits: (folder, limits["gpu_memory"])
    )
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Design.\n[user]\n{question}")
    flags = ["--model", tiny, "--n-tasks", 1, "--isolation", "best", "--designer-prompt", prompt]
    assert main([str(x) for x in [*flags, "--executor-model", saved]]) == 130
    assert seen["engine"] == (tiny, 0.425) and seen["executor_engine"] == (saved, 0.425)
    assert seen["designer_prompt"] == prompt.read_text()
    assert main([str(x) for x in flags]) == 130
    assert seen["engine"] == seen["executor_engine"] == (tiny, 0.85)


KILLED_IN_THE_VOTE = """
import os, signal, sys
import evaluate

add = evaluate.Partial.add

def killed(self, system, seconds, rows):
    add(self, system, seconds, rows)
    if system.startswith("vote"):
        os.kill(os.getpid(), signal.SIGKILL)

evaluate.Partial.add = killed
evaluate.main(sys.argv[1:])
"""


def test_an_interrupted_evaluation_goes_on_where_it_was(tiny, tmp_path, capsys, monkeypatch):
    """Ctrl-C after the fifth task, then kill -9 in the vote: the rows of a run that had neither."""
    config = {"preset": "toy", "isolation": "best", "deterministic": True, "executor_max_tokens": 4}
    (tiny / "run_config.json").write_text(json.dumps(config | {"designer_max_tokens": 4}))
    flags = ["--model", tiny, "--n-tasks", 6, "--samples", 2, "--system"]
    systems = "structure:ensemble,vote:calls"
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    flags = [str(flag) for flag in [*flags, systems, "--out"]]
    assert main([*flags, str(whole)]) == 0

    add = Partial.add

    def interrupted(self, system, seconds, rows):
        add(self, system, seconds, rows)
        if sum(map(len, self.rows.values())) == 10:
            raise KeyboardInterrupt

    monkeypatch.setattr(Partial, "add", interrupted)
    assert main([*flags, str(out)]) == 130
    said = capsys.readouterr()
    assert "10 samples are kept in" in said.err and "the same command goes on" in said.err
    assert not out.exists()
    lines = Path(f"{out}.partial.jsonl").read_text().splitlines()
    assert len(lines) == 6

    done = subprocess.run(
        [sys.executable, "-c", KILLED_IN_THE_VOTE, *flags, str(out)], cwd=REPO, timeout=300
    )
    assert done.returncode == -signal.SIGKILL
    monkeypatch.setattr(Partial, "add", add)
    played = []

    def counting(tasks, *args, **options):
        played.append((options["system"], len(tasks)))
        return evaluate(tasks, *args, **options)

    monkeypatch.setattr(module, "evaluate", counting)
    assert main([*flags, str(out)]) == 0
    assert played == [("vote:calls", 5)]

    def rows(path):
        report = json.loads(path.read_text())
        return [{k: v for k, v in row.items() if k != "seconds"} for row in report["rows"]]

    assert rows(out) == rows(whole) and len(rows(out)) == 24
    assert [path.name for path in tmp_path.glob("out*")] == ["out.json", "out.md"]
    Path(f"{out}.partial.jsonl").write_text(lines[0] + "\n")
    for more, other in [
        (["--samples", "3"], "samples"),
        (["--system", "single"], "system"),
        (["--temperature", "0.5"], "settings"),
        (["--n-tasks", "5"], "tasks_digest"),
    ]:
        assert main([*flags, str(out), *more]) == 2
        assert f"is of an evaluation with other {other}:" in capsys.readouterr().err
    for name in ("model.safetensors", "chat_template.jinja"):
        (tiny / name).touch()
        assert main([*flags, str(out)]) == 2
        assert "is of an evaluation with other weights" in capsys.readouterr().err


def test_two_reports_on_the_same_tasks_are_compared(tiny, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl", ROWS[:2])
    flags = ["--model", tiny, "--data", data, "--isolation", "best", "--max-tokens", "3"]
    first, second = tmp_path / "before.json", tmp_path / "after.json"
    flags = [str(flag) for flag in [*flags, "--system", "single", "--out"]]
    assert main([*flags, str(first)]) == 0
    capsys.readouterr()
    report = json.loads(first.read_text())
    for row in report["rows"]:
        row["reward"] = 1.0
    first.write_text(json.dumps(report))
    assert main([*flags, str(second), "--compare", str(first)]) == 0
    said = capsys.readouterr()
    row = f"single - single of {tmp_path}/before,rows,-1.000,-1.000 to -1.000"
    assert row.split(",") in cells(said.out)
    assert [d["mean"] for d in json.loads(second.read_text())["differences"]] == [-1.0]
    assert len(json.loads(second.read_text())["rows"]) == 2
    one = [*flags, str(second), "--compare", str(first), "--n-tasks", "1"]
    assert main(one) == 2
    assert "is of other tasks" in capsys.readouterr().err
    cases = [(text, "give a report that --out wrote") for text in ("{}", "[1]", "no json")]
    cases += [
        (report | {"rows": 1}, "give a report that --out wrote"),
        (report | {"rows": [report["rows"][0] | {"reward": None}]}, "give a report that --out"),
        (report | {"rows": [{"system": "single", "task": "a"}]}, "give a report that --out wrote"),
        (report, "is of other tasks"),  # the digest is right, its rows are not
    ]
    for damaged, says in cases:
        first.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
        with pytest.raises(UsageError, match=says):
            read_report(str(first), [], report["tasks_digest"])


def test_reports_of_one_name_in_two_folders_are_two(tmp_path):
    task = make_task("s1", "sum")
    reports = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        reports.append(tmp_path / name / "out.json")
        rows = [{"system": "single", "later": 1, **dataclasses.asdict(make_row(task.id))}]
        write_json(reports[-1], {"rows": rows, "tasks_digest": "1"})
    found = [name for path in reports for name in read_report(str(path), [task], "1")]
    assert found == [f"single of {tmp_path}/{name}/out" for name in ("a", "b")]
    with pytest.raises(UsageError, match="other tasks"):  # the same ids, another text
        read_report(str(reports[0]), [task], "2")


def test_data_names_may_be_a_file_with_a_comma(tmp_path):
    path = write_rows(tmp_path / "a,b.jsonl", ROWS)
    assert data_names(str(path)) == [str(path)]
    assert data_names(f"{path},toy") == [*str(path).split(","), "toy"]


def test_usage_errors_are_one_line_and_exit_2(tiny, tmp_path, capsys):
    data = write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    empty = write_rows(tmp_path / "empty.jsonl", [])
    bad = write_rows(tmp_path / "bad.jsonl", [{**ROWS[2]}])
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("no place for it")
    bare = tmp_path / "bare"
    bare.mkdir()
    cases = [
        ([], "--model"),
        (["--model", tiny, "--modle", "x"], "--modle"),
        (["--model", tiny, "--sys", "single"], "--sys"),
        (["--model", tiny, "--samples", "many"], "--samples"),
        (["--model", tiny, "--samples", "0"], "--samples is 0"),
        (["--model", tiny, "--n-tasks", "-1"], "--n-tasks is -1"),
        (["--model", tiny, "--system", "moa"], "unknown system 'moa'"),
        (["--model", tiny, "--system", "structure:moa"], "structure:debate"),
        (["--model", tmp_path / "none"], "no model folder"),
        (["--model", bare], "no config.json"),
        (["--model", tiny, "--executor-model", bare], "no config.json"),
        (["--model", tiny, "--system", "single", "--executor-model", tiny], "asks no designer"),
        (["--model", tiny, "--data", tmp_path / "none.jsonl"], "no such file"),
        (["--model", tiny, "--data", empty], "empty"),
        (["--model", tiny, "--data", "aime24,aime26"], "--data aime26: no such file"),
        (["--model", tiny, "--data", ""], "no task is left"),
        (["--check-golds", data, "--model", tiny], "not --model"),
        (["--check-golds", data, "--samples", "2", "--seed", "1"], "not --samples, --seed"),
        (["--check-golds", tmp_path / "none.jsonl"], "no such file"),
        (["--check-golds", data, "--out", tmp_path / "no" / "x"], "folder"),
        (["--model", tiny, "--data", bad, "--isolation", "best"], "no task is left"),
        (["--model", tiny, "--data", data, "--designer-prompt", prompt], "{question}"),
        (["--model", tiny, "--data", data, "--designer-prompt", bare], "can't be read"),
        (["--model", tiny, "--data", data, "--temperature", "-1"], "temperature is -1"),
        (["--model", tiny, "--data", data, "--max-tokens", "0"], "max_tokens is 0"),
        (["--model", tiny, "--data", data, "--max-context", "5000"], "knows 1024 positions"),
        (["--model", tiny, "--data", data, "--out", tmp_path / "no" / "x.json"], "folder"),
        (["--model", tiny, "--data", data, "--out", tmp_path], "--out"),
        (["--model", tiny, "--data", data, "--out", tmp_path / "x.md"], ".md is for its tables"),
        (["--model", tiny, "--system", "vote:calls"], "--system designed,vote:calls"),
        (["--model", tiny, "--data", data, "--isolation", "best", "--compare", data], "--compare"),
        (["--model", tiny, "--data", data, "--isolation", "none"], "--isolation"),
    ]
    for flags, says in cases:
        try:
            code = main([str(flag) for flag in flags])
        except SystemExit as stop:
            code = stop.code
        said = capsys.readouterr()
        errors = [line for line in said.err.splitlines() if line.startswith("evaluate.py: ")]
        assert code == 2, (flags, said.err)
        assert len(errors) == 1 and says in errors[0], (flags, said.err)
        assert said.out == ""


def test_a_failure_on_the_way_is_one_line_and_exit_1(tiny, tmp_path, capsys, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(module, "write_json", full)
    data = write_rows(tmp_path / "rows.jsonl", ROWS[:1])
    flags = ["--model", tiny, "--data", data, "--isolation", "best", "--max-tokens", 3]
    flags += ["--system", "single", "--out", tmp_path / "out.json"]
    assert main([str(flag) for flag in flags]) == 1
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith("evaluate.py: failed: [Errno 28] No space left")
    assert "| rows " in said.out  # the figures were printed before


def test_help_teaches(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    for word in ("designed", "structure:NAME", "bootstrap", "run_config.json", "Exit status"):
        assert word in said


def test_progress_says_how_long_it_will_take(capsys, monkeypatch):
    times = iter([0.0, 10.0, 29.0, 40.0, 50.0, 100.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    show = module.progress_line("golds", lambda kept: f", {kept} kept")
    for done in (0, 1, 2, 3, 8):
        show(done, 8, done)
    assert capsys.readouterr().err.splitlines() == [
        "2 of 8 golds, 40 s, about 120 s to go, 2 kept",
        "8 of 8 golds, 100 s, 8 kept",
    ]
