"""execute.py: the tree is whole, nothing is mixed up, failures are counted, nothing is left behind.

Most tests play scripts as Python generators in a FakePool, because then the test decides when
each event comes. The tests at the end run real scripts in the real sandbox.
"""

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import execute
import sandbox
from design import SCRIPTS
from engine import Completion, PromptTooLong, ScriptedEngine, TorchEngine, random_tiny
from execute import (
    STATUSES,
    Call,
    Design,
    Execution,
    Rollout,
    call_seed,
    rewards_of,
    rollout,
    shares,
    tally,
)


def make_task(question, kind="math", source="", starter=""):
    return SimpleNamespace(id="t", kind=kind, question=question, source=source, starter=starter)


def script(name):
    """A script that every check accepts; FakePool plays the generator that its last line names."""
    return SCRIPTS["single"] + f"\n# {name}"


def reply_with(name):
    return f"<code>\n```python\n{script(name)}\n```\n</code>"


def ask(*questions, agent="solver"):
    return [{"agent": agent, "messages": [{"role": "user", "content": q}]} for q in questions]


class Pause:
    """Yielded by a fake script: be silent for this many polls."""

    def __init__(self, polls):
        self.polls = polls


class Crash(Exception):
    pass


class FakePool:
    """Scripts as generators: they yield calls (or a Pause), get texts, and return their answer."""

    def __init__(self, programs, max_live=512, jitter=None):
        self.programs, self.max_live, self.jitter = programs, max_live, jitter
        self.alive, self.events, self.paused = {}, [], {}
        self.started, self.killed = [], []

    def start(self, key, source, *, variables, seed):
        assert len(self.alive) < self.max_live
        assert key not in self.alive
        self.started.append((key, seed))
        program = self.programs[source.splitlines()[-1].removeprefix("# ")]
        self.alive[key] = program(variables["question"])
        self._advance(key, None)

    def _advance(self, key, texts):
        event = SimpleNamespace(
            key=key, kind="ended", status="ok", answer=None, error="", stdout=""
        )
        try:
            asked = self.alive[key].send(texts)
            if isinstance(asked, Pause):
                self.paused[key] = asked.polls
                return
            event.kind, event.calls = "calls", asked
        except StopIteration as end:
            event.answer = end.value
        except Crash:
            event.status, event.error = "crashed", "RuntimeError: crash"
        except TimeoutError:
            event.status, event.error = "timeout", "cpu"
        self.events.append(event)

    def poll(self, timeout=None):
        for key in [key for key, left in self.paused.items() if left <= 1]:
            del self.paused[key]
            self._advance(key, None)
        self.paused = {key: left - 1 for key, left in self.paused.items()}
        out = self.events
        if self.jitter:
            self.jitter.shuffle(out)
            out = out[: self.jitter.randint(0, len(out))]
        self.events = [event for event in self.events if event not in out]
        for event in out:
            if event.kind == "ended":
                self.alive.pop(event.key, None)
        return out

    def reply(self, key, texts):
        if key in self.alive:
            self._advance(key, texts)

    def kill(self, key):
        self.killed.append(key)
        self.alive.pop(key, None)
        self.paused.pop(key, None)
        self.events = [event for event in self.events if event.key != key]

    def live(self):
        return len(self.alive)


class FakeEngine:
    """Replies in `order(keys)` one at a time; ids and log-probs are made from the key."""

    def __init__(self, reply, per_step=1, order=sorted, too_long=()):
        self.reply, self.per_step, self.order, self.too_long = reply, per_step, order, too_long
        self.waiting, self.log = {}, []

    def submit(self, key, messages, *, max_tokens, temperature, seed):
        if any(word in messages[-1]["content"] for word in self.too_long):
            raise PromptTooLong("prompt of 99 tokens and 1 more don't fit in 64")
        assert key not in self.waiting
        place = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        self.log.append(("submit", key, {"messages": messages, **place}))
        self.waiting[key] = (messages, seed)

    def step(self):
        done = self.order(list(self.waiting))[: self.per_step]
        out = []
        for key in done:
            messages, seed = self.waiting.pop(key)
            self.log.append(("done", key, {}))
            text = self.reply(key, messages, seed)
            ids = [abs(part) for part in key]
            out.append(Completion(key, ids, ids + [7], text, [-0.5] * 5, "stop"))
        return out

    def cancel_all(self):
        self.waiting.clear()

    def submitted(self):
        return [(key, given) for kind, key, given in self.log if kind == "submit"]


def echo(question):
    texts = yield ask(question)
    return texts[0]


def play(tasks, programs, reply=None, score=None, engine=None, pool=None, **kwargs):
    """A rollout with fakes: every design is the program "echo" unless `scripts` says otherwise."""
    engine = engine or FakeEngine(reply or (lambda key, messages, seed: messages[-1]["content"]))
    pool = pool or FakePool({"echo": echo, **programs})
    score = score or (lambda task, answer: 1.0)
    kwargs.setdefault("scripts", [script("echo")])
    kwargs.setdefault("n_executions", 2)
    return rollout(tasks, engine, pool, score, **kwargs)


def statuses(rollouts):
    return [[[x.status for x in d.executions] for d in r.designs] for r in rollouts]


# The tree and its records.


def test_every_call_is_recorded_with_the_engines_own_ids():
    def designer_or_agent(key, messages, seed):
        return reply_with("two") if key[2] == execute.DESIGNER else f"r{key[3]}"

    def two(question):
        first = yield ask("a", "b", agent="solver")
        second = yield ask(f"{first}", agent="judge")
        return second[0]

    rollouts = play([make_task("q")], {"two": two}, designer_or_agent, scripts=None, n_designs=2)
    designs = rollouts[0].designs
    assert [d.call.role for d in designs] == ["designer", "designer"]
    assert [d.call.output_ids for d in designs] == [[0, 0, 1, 0, 7], [0, 1, 1, 0, 7]]
    calls = designs[1].executions[0].calls
    assert [(c.agent, c.turn, c.text) for c in calls] == [
        ("solver", 0, "r0"),
        ("solver", 0, "r1"),
        ("judge", 1, "r2"),
    ]
    assert [c.prompt_ids for c in calls] == [[0, 1, 0, i] for i in range(3)]
    assert [c.output_ids for c in calls] == [[0, 1, 0, i, 7] for i in range(3)]
    assert all(c.logp_sampler == [-0.5] * 5 and c.role == "executor" for c in calls)
    assert calls[2].messages[-1]["content"] == "['r0', 'r1']"
    assert designs[1].executions[0].answer == "r2"


def test_no_task_gets_anything_of_another():
    """Reward = the number in the question: constant in a task, also in one with the same text."""
    tasks = [make_task(q) for q in ("3", "5", "3", "8")]
    seen = []

    def score(task, answer):
        seen.append((task.question, answer))
        return float(answer)

    rollouts = play(tasks, {}, score=score, scripts=[script("echo")] * 3)
    rewards, ran = rewards_of(rollouts)
    assert rewards.shape == (4, 3, 2) and rewards.dtype == np.float64
    assert ran.dtype == bool and ran.all()
    assert (rewards == np.array([3.0, 5, 3, 8])[:, None, None]).all()
    assert all(question == answer for question, answer in seen)
    assert [r.task is t for r, t in zip(rollouts, tasks, strict=True)] == [True] * 4


def test_scores_are_keyed_not_in_order_of_arrival():
    def score(task, answer):
        time.sleep(0.05 if answer == "0" else 0)
        return float(answer)

    rewards, _ = rewards_of(play([make_task(str(i)) for i in range(4)], {}, score=score))
    assert rewards[:, 0].tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


def test_score_runs_on_threads_beside_the_scripts():
    """The first answer's score waits for the last script to ask: a blocking score would hang."""
    last_asked = threading.Event()

    def late(question):
        yield Pause(5)
        texts = yield ask("late")
        last_asked.set()
        return texts[0]

    def score(task, answer):
        assert last_asked.wait(5)
        return 1.0

    scripts = [script("echo"), script("late")]
    rewards, _ = rewards_of(play([make_task("q")], {"late": late}, score=score, scripts=scripts))
    assert rewards.tolist() == [[[1.0, 1.0], [1.0, 1.0]]]


def test_executions_differ_in_nothing_but_seeds():
    """Fault 1 of the reference: greedy executions. Temperature is the given one, seeds differ."""

    def reply(key, messages, seed):
        return reply_with("echo") if key[2] == execute.DESIGNER else "x"

    engine = FakeEngine(reply)
    pool = FakePool({"echo": echo})
    play(
        [make_task("q"), make_task("q")],
        {},
        engine=engine,
        pool=pool,
        scripts=None,
        n_designs=3,
        n_executions=4,
        temperature=0.7,
        designer_max_tokens=11,
        executor_max_tokens=5,
    )
    given = engine.submitted()
    assert len(given) == 2 * 3 + 2 * 3 * 4
    assert {g["temperature"] for _, g in given} == {0.7}
    assert {g["max_tokens"] for key, g in given if key[2] < 0} == {11}
    assert {g["max_tokens"] for key, g in given if key[2] >= 0} == {5}
    seeds = [g["seed"] for _, g in given] + [seed for _, seed in pool.started]
    assert len(set(seeds)) == len(seeds) == 30 + 24
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_come_from_the_place_in_the_global_batch():
    """Two ranks with the same two questions draw what one rank with all four would draw."""
    tasks = [make_task("q")] * 4

    def seeds(part, **kwargs):
        engine = FakeEngine(lambda key, messages, seed: "x")
        play(part, {}, engine=engine, seed=3, step=9, **kwargs)
        return sorted(given["seed"] for _, given in engine.submitted())

    low, high = seeds(tasks[:2]), seeds(tasks[2:], places=[2, 3])
    assert not set(low) & set(high)
    assert sorted(low + high) == seeds(tasks)
    assert seeds(tasks, places=range(len(tasks))) == seeds(tasks)
    places = [(s, t) for s in range(3) for t in range(3)]
    assert len({call_seed(s, t, 0, 0, 0, 0) for s, t in places}) == 9


def test_designer_and_executor_may_be_two_engines():
    designer = FakeEngine(lambda key, messages, seed: reply_with("echo"))
    executor = FakeEngine(lambda key, messages, seed: "x")
    play([make_task("q")], {}, engine=designer, executor_engine=executor, scripts=None, n_designs=2)
    assert {key[2] for key, _ in designer.submitted()} == {execute.DESIGNER}
    assert len(executor.submitted()) == 4 and all(key[2] >= 0 for key, _ in executor.submitted())


def test_given_scripts_ask_no_designer():
    def scripts(task):
        return [script("echo"), script(task.question)]

    def other(question):
        texts = yield ask("other")
        return texts[0]

    tasks = [make_task("echo"), make_task("other")]
    rollouts = play(tasks, {"other": other}, scripts=scripts)
    assert [[d.executions[0].answer for d in r.designs] for r in rollouts] == [
        ["echo", "echo"],
        ["other", "other"],
    ]
    assert all(d.call is None and d.structure == "single" for r in rollouts for d in r.designs)
    with pytest.raises(ValueError, match="as many for each task"):
        play(tasks, {}, scripts=lambda task: [script("echo")] * len(task.question))


def test_starter_code_reaches_designer_and_agents():
    seen = []

    def reply(key, messages, seed):
        seen.append(messages[-1]["content"])
        return reply_with("echo")

    task = make_task("Add two numbers.", kind="code", starter="def add(a, b):\n")
    play([task], {}, reply, scripts=None, n_designs=1, n_executions=1)
    assert len(seen) == 2
    assert all("Add two numbers." in text and "def add(a, b):\n```" in text for text in seen)


# Order: who waits for whom.


def test_a_message_waits_for_all_its_calls_and_keeps_their_order():
    def three(question):
        texts = yield ask("a", "b", "c")
        return " ".join(texts)

    engine = FakeEngine(
        lambda key, messages, seed: messages[-1]["content"],
        order=lambda keys: sorted(keys, reverse=True),
    )
    rollouts = play([make_task("q")], {"three": three}, engine=engine, scripts=[script("three")])
    execution = rollouts[0].designs[0].executions[0]
    assert execution.answer == "a b c"
    assert [call.text for call in execution.calls] == ["a", "b", "c"]
    assert {call.turn for call in execution.calls} == {0}


def test_a_slow_script_holds_up_nobody():
    def slow(question):
        yield Pause(50)
        texts = yield ask("slow")
        return texts[0]

    def quick(question):
        for _ in range(3):
            texts = yield ask("quick")
        return texts[0]

    events = []
    play(
        [make_task("q")],
        {"slow": slow, "quick": quick},
        scripts=[script("slow"), script("quick")],
        on_event=events.append,
    )
    order = [(e["event"], e["design"]) for e in events]
    last_quick = max(i for i, e in enumerate(order) if e == ("answer", 1))
    assert last_quick < order.index(("call_started", 0))


def test_executions_start_as_soon_as_their_design_is_there():
    """One completion a step: the first script's call is submitted before the last design is in."""

    def reply(key, messages, seed):
        return reply_with("echo") if key[2] == execute.DESIGNER else "x"

    def order(keys):
        return sorted(keys, key=lambda key: (key[2] == execute.DESIGNER, key))

    engine = FakeEngine(reply, order=order)
    play([make_task("q")], {}, engine=engine, scripts=None, n_designs=3)
    log = [(kind, key) for kind, key, _ in engine.log]
    first_execution = min(i for i, (_, key) in enumerate(log) if key[2] != execute.DESIGNER)
    assert first_execution < log.index(("done", (0, 2, execute.DESIGNER, 0)))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_full_pool_queues_the_rest_in_key_order(deterministic):
    pool = FakePool({"echo": echo}, max_live=3)
    tasks = [make_task(str(i)) for i in range(3)]
    rollouts = play(tasks, {}, pool=pool, n_executions=4, deterministic=deterministic)
    assert [key for key, _ in pool.started] == [(t, 0, n) for t in range(3) for n in range(4)]
    assert shares(tally(rollouts))["status/ok"] == 12


def jittered(seed, deterministic):
    """A rollout in a pool with random delays and an engine whose replies depend on the batch."""
    jitter = random.Random(seed)
    engine = None

    def reply(key, messages, seed):
        return f"{len(engine.waiting)} waiting, {len(engine.log)} done, {seed}"

    def slow(question):
        yield Pause(jitter.randint(1, 4))
        texts = yield ask("slow", question)
        yield Pause(jitter.randint(1, 4))
        texts = yield ask(*texts)
        return texts[1]

    engine = FakeEngine(reply, per_step=2, order=list)
    pool = FakePool({"slow": slow, "echo": echo, "bad": crash_later}, max_live=5, jitter=jitter)
    scripts = [script("slow"), script("echo"), script("bad")]
    tasks = [make_task("a"), make_task("b")]
    return play(tasks, {}, engine=engine, pool=pool, scripts=scripts, deterministic=deterministic)


def test_rounds_depend_on_nothing_but_the_seed():
    runs = [[r.designs for r in jittered(seed, deterministic=True)] for seed in range(12)]
    assert all(run == runs[0] for run in runs)
    loose = [[r.designs for r in jittered(seed, deterministic=False)] for seed in range(12)]
    assert any(run != loose[0] for run in loose)  # else the test above shows nothing


# Failures are data, counted; any but "ok" has reward 0.


def crash_first(question):
    raise Crash
    yield


def crash_later(question):
    yield ask("q")
    raise Crash


def timeout_first(question):
    raise TimeoutError
    yield


def timeout_later(question):
    yield ask("q")
    raise TimeoutError


def literal(question):
    return "42"
    yield


def silent(question):
    yield ask("q")


def greedy(question):
    yield ask("q")
    texts = yield ask(*["q"] * 4)
    return texts[0]


def overflow_first(question):
    yield ask("ok", "HUGE", "never")


def overflow_later(question):
    yield ask("q")
    texts = yield ask("HUGE")
    return texts[0]


FAILURES = [  # program, status, recorded calls, part of the error
    (crash_first, "no_call", 0, "RuntimeError: crash"),
    (crash_later, "crashed", 1, "RuntimeError: crash"),
    (timeout_first, "no_call", 0, "cpu"),
    (timeout_later, "timeout", 1, "cpu"),
    (literal, "no_call", 0, None),
    (silent, "crashed", 1, "no answer"),
    (greedy, "call_budget", 1, "1 calls done, 4 more asked, 4 allowed"),
    (overflow_first, "context_overflow", 1, "don't fit"),
    (overflow_later, "context_overflow", 1, "don't fit"),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("program, status, n_calls, error", FAILURES)
def test_failures_have_a_status_no_reward_and_keep_their_calls(
    program, status, n_calls, error, deterministic
):
    scored = []

    def score(task, answer):
        scored.append(answer)
        return 1.0

    engine = FakeEngine(lambda key, messages, seed: "x", too_long=["HUGE"])
    pool = FakePool({"bad": program, "echo": echo})
    rollouts = play(
        [make_task("q")],
        {},
        score=score,
        engine=engine,
        pool=pool,
        scripts=[script("bad"), script("echo")],
        max_calls=4,
        deterministic=deterministic,
    )
    assert statuses(rollouts) == [[[status] * 2, ["ok"] * 2]]
    rewards, ran = rewards_of(rollouts)
    assert rewards.tolist() == [[[0.0, 0.0], [1.0, 1.0]]]
    assert ran.tolist() == [[[n_calls > 0] * 2, [True, True]]]
    failed = rollouts[0].designs[0].executions
    assert [len(x.calls) for x in failed] == [n_calls] * 2
    assert all(call.text == "x" for x in failed for call in x.calls)
    assert failed[0].error is None if error is None else error in failed[0].error
    assert scored == ["x", "x"]
    assert pool.live() == 0 and not engine.waiting
    assert bool(pool.killed) == (status in ("call_budget", "context_overflow"))


def test_an_invalid_design_fills_its_row():
    def reply(key, messages, seed):
        if key[2] != execute.DESIGNER:
            return "x"
        return ["I can't.", "```python\nprint(\n```", reply_with("echo")][key[1]]

    rollouts = play([make_task("q")], {}, reply, scripts=None, n_designs=3)
    designs = rollouts[0].designs
    assert statuses(rollouts) == [[["invalid_design"] * 2, ["invalid_design"] * 2, ["ok"] * 2]]
    assert [d.error.split(":")[0] for d in designs[:2]] == ["no_script", "syntax"]
    assert designs[0].script is None and "print(" in designs[1].script
    assert [d.structure for d in designs] == [None, None, "single"]
    assert all(d.call.output_ids for d in designs)
    assert all(x.error == d.error for d in designs[:2] for x in d.executions)
    rewards, ran = rewards_of(rollouts)
    assert rewards.tolist() == [[[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]]
    assert ran.tolist() == [[[False, False], [False, False], [True, True]]]


def test_a_question_that_fits_no_context_overflows_it():
    engine = FakeEngine(lambda key, messages, seed: reply_with("echo"), too_long=["HUGE"])
    tasks = [make_task("HUGE"), make_task("q")]
    rollouts = play(tasks, {}, engine=engine, scripts=None, n_designs=1)
    assert statuses(rollouts) == [[["context_overflow"] * 2], [["ok"] * 2]]
    assert rollouts[0].designs[0].error.startswith("question_too_long: ")
    assert rollouts[0].designs[0].call is None


def test_rewards_are_counted_once_an_execution_however_many_calls():
    """Fault 13 of the reference: a baseline that weighs an execution by its calls."""

    def many(question):
        for _ in range(4):
            texts = yield ask("q")
        return texts[0]

    rollouts = play([make_task("q")], {"many": many}, scripts=[script("many"), script("echo")])
    assert rewards_of(rollouts)[0].shape == (1, 2, 2)


# Our own failures are exceptions, and leave nothing behind.


@pytest.mark.parametrize("culprit", ["engine", "score", "on_event", "pool"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_exception_kills_the_scripts_and_drops_the_calls(culprit, deterministic):
    def forever(question):
        while True:
            yield ask("again")

    class Broken(BaseException):  # like KeyboardInterrupt: no "except Exception" sees it
        pass

    def fail_if(who):
        if who == culprit:
            raise Broken

    def reply(key, messages, seed):
        if key[3] == 3:
            fail_if("engine")
        return "x"

    def score(task, answer):
        fail_if("score")
        return 1.0

    def on_event(event):
        if event["event"] == "call_finished" and event["call"] == 3:
            fail_if("on_event")

    engine = FakeEngine(reply, per_step=3, order=list)
    pool = FakePool({"forever": forever, "echo": echo})
    if culprit == "pool":
        pool.reply = lambda key, texts: fail_if("pool")
    with pytest.raises(Broken):
        play(
            [make_task("q")],
            {},
            engine=engine,
            pool=pool,
            score=score,
            scripts=[script("forever"), script("echo")],
            n_executions=4,
            max_calls=10**6,
            on_event=on_event,
            deterministic=deterministic,
        )
    assert pool.live() == 0 and not engine.waiting
    again = play(
        [make_task("q")],
        {},
        lambda key, messages, seed: "new",
        pool=pool if culprit != "pool" else None,
    )
    assert again[0].designs[0].executions[0].answer == "new"


def test_a_pool_that_loses_scripts_is_an_error_not_an_endless_wait():
    class Lossy(FakePool):
        def poll(self, timeout=None):
            self.alive.clear()
            return []

    for deterministic in (False, True):
        with pytest.raises(execute.SandboxError, match="lost 2 live scripts"):
            play([make_task("q")], {}, pool=Lossy({"echo": echo}), deterministic=deterministic)


def test_a_reply_that_nobody_asked_for_is_an_error():
    engine = FakeEngine(lambda key, messages, seed: "x")
    engine.waiting[9, 9, 9, 9] = ([], 0)
    engine.order = lambda keys: sorted(keys, reverse=True)
    with pytest.raises(RuntimeError, match=r"\(9, 9, 9, 9\), which this rollout never asked"):
        play([make_task("q")], {}, engine=engine)


def test_other_value_errors_of_the_engine_are_not_taken_for_an_overflow():
    class Misconfigured(FakeEngine):
        def submit(self, key, messages, **kwargs):
            raise ValueError("the tokenizer has no chat template")

    with pytest.raises(ValueError, match="chat template"):
        play([make_task("q")], {}, engine=Misconfigured(None))


@pytest.mark.parametrize(
    "tasks, kwargs, message",
    [
        ([], {}, "0 tasks"),
        (["q"], {"n_designs": 0}, "n_designs=0, .* give at least 1"),
        (["q"], {"n_executions": 0}, "n_executions=0, .* give at least 1"),
        (["q"], {"max_calls": 0}, "max_calls=0: give at least 1"),
        (["q"], {"scripts": []}, "give at least one"),
    ],
)
def test_empty_batches_are_refused(tasks, kwargs, message):
    with pytest.raises(ValueError, match=message):
        play([make_task(q) for q in tasks], {}, **kwargs)


def test_events_tell_the_whole_story():
    def reply(key, messages, seed):
        return reply_with("echo") if key[2] == execute.DESIGNER else "8"

    events = []
    play(
        [make_task("q")],
        {},
        reply,
        scripts=None,
        n_designs=1,
        n_executions=1,
        on_event=events.append,
    )
    story = [(e["event"], e["task"], e["design"], e["execution"], e["call"]) for e in events]
    assert story == [
        ("call_started", 0, 0, -1, 0),
        ("call_finished", 0, 0, -1, 0),
        ("design", 0, 0, -1, -1),
        ("call_started", 0, 0, 0, 0),
        ("call_finished", 0, 0, 0, 0),
        ("answer", 0, 0, 0, -1),
        ("reward", 0, 0, 0, -1),
    ]
    assert events[2]["structure"] == "single" and events[2]["error"] is None
    assert events[3]["agent"] == "solver" and events[4]["text"] == "8"
    assert events[5]["answer"] == "8" and events[5]["status"] == "ok" and events[6]["reward"] == 1.0


@pytest.mark.parametrize("deterministic", [False, True])
def test_on_task_comes_once_a_task_when_it_is_whole(deterministic):
    """Of three tasks: all ok (scored), one crash among them, an invalid design."""

    def good(question):
        yield ask(question)
        return "8"

    def bad(question):
        yield ask(question)
        raise Crash

    def reply(key, messages, seed):
        t, m, n, _ = key
        if n >= 0:
            return "8"
        return (
            "no script" if t == 2 or (t, m) == (1, 1) else reply_with("bad" if t == 1 else "good")
        )

    seen = []

    def on_task(index, rolled):
        executions = [x for design in rolled.designs for x in design.executions]
        assert len(executions) == 4
        assert all(x.status != "ok" or x.reward == 1.0 for x in executions)
        seen.append((index, rolled))

    rolled = rollout(
        [make_task(f"q{i}") for i in range(3)],
        FakeEngine(reply),
        FakePool({"good": good, "bad": bad}),
        lambda task, answer: 1.0,
        n_designs=2,
        n_executions=2,
        deterministic=deterministic,
        on_task=on_task,
    )
    assert sorted(index for index, _ in seen) == [0, 1, 2]
    assert all(each is rolled[index] for index, each in seen)


def test_what_on_task_raises_ends_the_rollout_and_leaves_nothing():
    def slow(question):
        if question == "q1":
            yield Pause(10_000)
        yield ask(question)
        return "8"

    def enough(index, rolled):
        raise KeyboardInterrupt

    engine = FakeEngine(lambda key, messages, seed: "8")
    pool = FakePool({"slow": slow})
    with pytest.raises(KeyboardInterrupt):
        rollout(
            [make_task("q0"), make_task("q1")],
            engine,
            pool,
            lambda task, answer: 1.0,
            scripts=[script("slow")],
            n_executions=1,
            on_task=enough,
        )
    assert pool.live() == 0 and not engine.waiting


def test_the_templates_part_for_agents_ends_their_system_prompt():
    """By the kind of the task, in what the engine sees and in what is recorded; never twice."""

    def talk(question):
        system = {"role": "system", "content": "Solve."}
        [text] = yield [{"agent": "a", "messages": [system, *ask(question)[0]["messages"]]}]
        yield ask(text)
        return "8"

    engine = FakeEngine(lambda key, messages, seed: "8")
    rolled = rollout(
        [make_task("m"), make_task("c", kind="code")],
        engine,
        FakePool({"talk": talk}),
        lambda task, answer: 1.0,
        scripts=[script("talk")],
        n_executions=1,
        designer_prompt="{question}\n[agents math]\nBox it.\n[agents code]\nA program.",
    )
    for each, ending in zip(rolled, ["Box it.", "A program."], strict=True):
        first, second = each.designs[0].executions[0].calls
        assert first.messages[0] == {"role": "system", "content": f"Solve.\n\n{ending}"}
        assert second.messages[0] == {"role": "system", "content": ending}
        assert [m["role"] for m in second.messages] == ["system", "user"]
    sent = {key: details["messages"] for kind, key, details in engine.log if kind == "submit"}
    assert sent[0, 0, 0, 0] == rolled[0].designs[0].executions[0].calls[0].messages


# Metrics, worked by hand.


def hand_made():
    def call(role, n_prompt, n_output, reason="stop"):
        ids = [0] * n_prompt, [0] * n_output
        return Call(role, role, [], "x", *ids, [0.0] * n_output, reason)

    def execution(reward, status, *lengths):
        calls = [call("executor", 10, n, "length" if n == 8 else "stop") for n in lengths]
        return Execution("a", calls, reward, status)

    def design(script, structure, n_output, *executions):
        error = None if structure else "no_script: nothing there"
        return Design(script, structure, error, call("designer", 5, n_output), list(executions))

    math = make_task("m", source="polaris")
    code = make_task("c", kind="code", source="apps")
    failed = execution(0.0, "invalid_design")
    return [
        Rollout(
            math,
            [
                design("s", "single", 4, execution(1.0, "ok", 2), execution(0.0, "crashed", 8)),
                design("s", "single", 4, execution(1.0, "ok", 2), execution(0.0, "no_call")),
            ],
        ),
        Rollout(
            code,
            [
                design("e", "ensemble", 4, execution(1.0, "ok", 1, 1, 2), execution(1.0, "ok", 4)),
                design(None, None, 2, failed, failed),
            ],
        ),
    ]


def test_summary_of_a_small_batch():
    assert shares(tally(hand_made())) == pytest.approx(
        {
            "reward": 4 / 8,
            "reward/math": 2 / 4,
            "reward/polaris": 2 / 4,
            "reward/code": 2 / 4,
            "reward/apps": 2 / 4,
            "valid_designs": 3 / 4,
            "valid_designs/math": 1.0,
            "valid_designs/polaris": 1.0,
            "valid_designs/code": 1 / 2,
            "valid_designs/apps": 1 / 2,
            "unique_designs": 3 / 4,
            "structure/single": 2 / 3,
            "structure/ensemble": 1 / 3,
            "structure/math/single": 1.0,
            "structure/polaris/single": 1.0,
            "structure/code/ensemble": 1.0,
            "structure/apps/ensemble": 1.0,
            "calls_per_execution": 7 / 5,
            "tokens_per_execution": 20 / 5,
            "executor_reward": 4 / 5,
            "truncated/designer": 0.0,
            "truncated/executor": 1 / 7,
            "length/designer": 14 / 4,
            "length/executor": 20 / 7,
            "prompt_length/designer": 5.0,
            "prompt_length/executor": 10.0,
            "status/ok": 4,
            "status/invalid_design": 2,
            "status/crashed": 1,
            "status/timeout": 0,
            "status/no_call": 1,
            "status/call_budget": 0,
            "status/context_overflow": 0,
        }
    )


def test_every_execution_has_one_status():
    assert sum(tally(hand_made())[f"status/{status}"] for status in STATUSES) == 8


# Real scripts in the real sandbox.


@pytest.fixture(scope="module")
def pool():
    workflow = Path(execute.__file__).with_name("workflow.py").read_text()
    sandbox.configure("best")
    with sandbox.ScriptPool({"workflow": workflow}, cpu_s=1, step_wall_s=10) as pool:
        yield pool


BUILD = """from workflow import AgentNode, Workflow
import json, os, time
def send(*messages): os.write(3, "".join(json.dumps(m) + "\\n" for m in messages).encode())
def call(role, text):
    return {"calls": [{"agent": "a", "messages": [{"role": role, "content": text}]}]}
workflow = Workflow(name="w")
workflow.add_node(AgentNode("a", "Solve."))
"""
RUN = "print(workflow.run(question).content)\n"
REAL = [  # what the script does, status, recorded calls, paid
    (RUN, "ok", 1, 1.0),
    ("send({'answer': '8'}); os._exit(0)\n" + RUN, "no_call", 0, 0.0),
    ("1 / 0\n" + RUN, "no_call", 0, 0.0),
    (RUN + "1 / 0", "crashed", 1, 0.0),
    (RUN + "while True: pass", "timeout", 1, 0.0),
    (RUN * 5, "call_budget", 4, 0.0),
    (RUN + "workflow.run('HUGE')", "context_overflow", 1, 0.0),
    ("send(call('user', 'q')); os._exit(0)\n" + RUN, "crashed", 1, 0.0),  # asks and leaves
    ("send(call('user', 'q'), call('user', 'q'))\n" + RUN, "crashed", 1, 0.0),  # out of turn
    ("send(call('tool', 'q')); time.sleep(9)\n" + RUN, "no_call", 0, 0.0),
    ("send(call('system', 'q')); time.sleep(9)\n" + RUN, "no_call", 0, 0.0),
    (RUN + "send(call('system', 'q')); time.sleep(9)", "crashed", 1, 0.0),
    (RUN + "send(7)", "crashed", 1, 0.0),
    (RUN + "workflow.run(", "invalid_design", 0, 0.0),
]


@pytest.mark.parametrize("deterministic", [False, True])
def test_real_scripts_of_every_status(pool, deterministic):
    engine = FakeEngine(lambda key, messages, seed: r"\boxed{8}", too_long=["HUGE"])
    [rolled] = rollout(
        [make_task("5+3?")],
        engine,
        pool,
        lambda task, answer: float(answer == r"\boxed{8}"),
        scripts=[BUILD + does for does, *_ in REAL],
        n_executions=1,
        max_calls=4,
        deterministic=deterministic,
    )
    executions = [design.executions[0] for design in rolled.designs]
    got = [(x.status, len(x.calls), x.reward) for x in executions]
    assert got == [tuple(expected) for _, *expected in REAL]
    assert executions[0].calls[0].messages == [
        {"role": "system", "content": "Solve."},
        {"role": "user", "content": "5+3?"},
    ]
    assert executions[1].answer == "8"  # sent, but not paid
    assert pool.live() == 0


def test_a_real_sleeping_script_holds_up_nobody(pool):
    answered = []

    def on_event(event):
        if event["event"] == "answer":
            answered.append(event["design"])

    scripts = [BUILD + "time.sleep(2)\n" + RUN, BUILD + RUN * 3]
    tasks = [make_task("q")]
    engine = ScriptedEngine(lambda key, messages, seed: "x")
    rollout(tasks, engine, pool, lambda *_: 1.0, scripts=scripts, n_executions=3, on_event=on_event)
    assert answered == [1, 1, 1, 0, 0, 0]


def test_a_rollout_of_every_structure_is_the_same_twice_bit_for_bit(pool):
    """The real stack: a random tiny model plays every agent of the fixed scripts."""
    model, tokenizer = random_tiny(max_position_embeddings=2048)

    def run():
        engine = TorchEngine(model, tokenizer, max_batch=7)
        [rolled] = rollout(
            [make_task("5+3?")],
            engine,
            pool,
            lambda task, answer: float(len(answer)),
            scripts=list(SCRIPTS.values()),
            n_executions=2,
            executor_max_tokens=4,
            deterministic=True,
        )
        assert engine.pending() == pool.live() == 0
        return rolled

    first = run()
    assert statuses([first]) == [[["ok", "ok"]] * len(SCRIPTS)]
    assert [design.structure for design in first.designs] == list(SCRIPTS)
    calls = [call for design in first.designs for x in design.executions for call in x.calls]
    assert all(1 <= len(call.output_ids) == len(call.logp_sampler) <= 4 for call in calls)
    assert len({tuple(call.output_ids) for call in calls}) > len(calls) / 2
    assert run().designs == first.designs


def test_a_failed_rollout_leaves_a_real_pool_and_engine_usable(pool):
    model, tokenizer = random_tiny(max_position_embeddings=2048)
    engine = TorchEngine(model, tokenizer, max_batch=1)

    def interrupt(event):
        if event["event"] == "call_finished":
            assert engine.pending() > 0 and pool.live() > 0
            raise KeyboardInterrupt

    def run(**kwargs):
        scripts = [SCRIPTS["ensemble"]]
        return rollout([make_task("q")], engine, pool, lambda *_: 1.0, scripts=scripts, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        run(n_executions=3, executor_max_tokens=2, on_event=interrupt)
    assert engine.pending() == pool.live() == 0
    assert statuses(run(n_executions=1, executor_max_tokens=2)) == [[["ok"]]]
