"""evaluate.py: figures worked by hand, rows that are nobody else's, and errors that say what to do.

A FakePool plays the scripts by their structure, so that these tests need no sandbox; the last ones
run the command on a tiny random model, with the real one.
"""

import doctest
import json
import os
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
    Result,
    Row,
    UsageError,
    bootstrap_interval,
    check_golds,
    describe,
    evaluate,
    evaluation_score,
    forced_structure,
    main,
    markdown_table,
    oracle_table,
    oracle_text,
    read_settings,
    result_text,
    structure_shares,
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
    price = {"calls": 1, "tokens": 10, "prompt_tokens": 20, "answer": None, "error": None, **more}
    return Row(task, "math", source, sample, reward, status, structure, **price)


# --- the estimate ------------------------------------------------------------------------------


def test_doctests():
    assert doctest.testmod(module).failed == 0


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
    shares = structure_shares(Result("designed", rows))
    assert shares == {
        "sum": {"pipeline": 2 / 3, "single": 1 / 3},
        "product": {},
        "math": {"single": 1.0},
    }


def test_describe_and_the_table():
    rows = [
        make_row("a", 1.0, source="sum", calls=5, tokens=100, prompt_tokens=300),
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
        "structures": {"single": 0.5, "pipeline": 0.5},
        "statuses": {"ok": 1, "crashed": 1},
    }
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in result_text(result).split("\n")
    ]
    assert lines[0] == "source,tasks,mean,95 % interval,calls,tokens,structures,statuses".split(",")
    assert lines[2] == ["sum", "1", "1.000", "1.000 to 1.000", "5.0", "100", "single 1.00", "ok 1"]
    assert lines[4][:6] == ["all", "2", "0.500", "0.000 to 1.000", "3.0", "55"]
    assert lines[4][6:] == ["single 0.50, pipeline 0.50", "ok 1, crashed 1"]


def test_a_cell_with_a_bar_stays_one_cell():
    table = markdown_table([["a|b", 1]], ["x", "y"])
    assert table.split("\n")[2] == "| a\\|b | 1   |"
    assert len({len(line) for line in table.split("\n")}) == 1


# --- the systems -------------------------------------------------------------------------------


def test_unknown_systems_are_refused_with_the_known_ones():
    for system in ("debate", "structure:", "structure:debate", "Single", "pipeline", ""):
        with pytest.raises(UsageError, match="designed, single, structure:single"):
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
    assert said.out == "" and said.err == "\nevaluate.py: stopped, nothing was written\n"
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
    assert report["all"]["tasks"] == 4 and report["settings"]["executor_max_tokens"] == 4
    assert set(report["sources"]) == set(toy.KINDS)
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
    assert json.loads(out.read_text())["all"]["statuses"] == {"context_overflow": 3}

    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Design.\n[user]\n{question}")
    designed = [*flags, "--designer-prompt", prompt, "--executor-model", tiny, "--out", out]
    assert main([str(x) for x in designed]) == 0
    assert json.loads(out.read_text())["all"]["statuses"] == {"invalid_design": 4}
    assert {row["calls"] for row in json.loads(out.read_text())["rows"]} == {1}


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
