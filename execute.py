"""The hierarchical rollout: M designs a task, N executions a design, every call recorded.

The idea. One model plays two roles. As *designer* it reads a task and writes a script; as
*executor* it answers every call that the running script makes. `rollout` plays both and keeps
what training needs: for each call the ids that the engine saw and drew and its log-probs, for each
execution one reward. With B tasks this is a tree:

    task b --M designer calls--> design m --N runs of its script--> execution n --> its calls

    B = 8, M = N = 4: 32 designer calls, 128 executions. Is every script an ensemble of three
    agents and a judge, an execution makes two messages: turn 0 with three calls (they are
    drawn together), turn 1 with one. In all 32 + 128 * 4 = 544 calls and 128 rewards.

The protocol. Scripts are processes of a `sandbox.ScriptPool`. A script sends a message with one or
more calls and waits; it gets its texts when *all* calls of this message are done. Messages of
different scripts don't wait for one another, a script starts as soon as its design is there, and
answers are scored on a thread pool, so nothing slow holds up the rest. One loop does it all:

    1. step the engine while it owes replies  -> designs are read, texts go back to their scripts
    2. start queued scripts, in the order of their keys, while the pool has room
    3. poll the pool                          -> calls go to the engine, answers to `score`

The pool says one thing of a script at a time: it asked, and then nothing until it is answered or
killed, or it ended.

With `deterministic=True` the same loop runs in rounds: step 1 runs the engine until it owes
nothing, step 3 waits until every live script has asked or ended, and takes them in the order of
their keys. Then the order of submissions, and with it every batch, depends on nothing but the
seed: two runs give the same rollouts, bit for bit (if the engine gives equal results for equal
batches, as ours does).

Statuses, each counted by `tally`; any but "ok" has reward 0:

    invalid_design    no script in the designer's reply, or one that check_script refuses
    no_call           the script called no agent, whatever else happened (an answer is a literal)
    ok                it ended well and sent an answer
    crashed           it called, but raised, died, broke the channel's rules, or sent no answer
    timeout           it called, but ran out of CPU or wall time
    call_budget       its next message would exceed `max_calls`: killed, nothing of it is generated
    context_overflow  a prompt that the engine's context can't hold: killed

What an execution called before it failed stays recorded and trains the executor. Rewards are
always full: [B, M, N], with 0 for what failed.

Where it differs from the reference, and why. There, executor rollouts were greedy with a
repetition penalty, so that the N executions hardly differed; here N executions share all but
their seeds. There, stdout was graded, also that of a crashed script or of one that called nobody;
here only an answer sent over the channel by a script that called and ended well. There, results
lay in files that a failed run found again one step later; here a result is returned or an exception
is raised, and nothing is left behind: scripts are killed, pending calls dropped. A failed engine
is an exception, never a sample.

The engine is anything with `submit(key, messages, max_tokens=, temperature=, seed=)` and `step()`
that returns what is done (engine.Completion); with `cancel_all()` it can be used again after a
failed rollout. A prompt that doesn't fit is refused by `submit` with a PromptTooLong. Rollouts
don't share an engine or a pool at the same time.

    python execute.py         # two designs of one task, the model's part played by a few lines
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import queue
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from design import (
    DesignError,
    agent_suffix,
    check_script,
    designer_messages,
    extract_script,
    structure_of,
)
from sandbox import SandboxError, ScriptPool

STATUSES = (
    "ok",
    "invalid_design",
    "no_call",
    "crashed",
    "timeout",
    "call_budget",
    "context_overflow",
)
DESIGNER = -1  # stands for the execution in the key of a designer call
POLL_S = 1.0  # how long an idle loop waits for scripts before it looks at the scores again


@dataclass(slots=True)
class Call:
    """One reply of the model: what it was asked, what it drew.

    `prompt_ids`, `output_ids` and `logp_sampler` (one log-prob an output id) are the engine's own,
    never encoded again; None where the engine has none (an API, a scripted one). `turn` is the
    index of the script's message that asked for it; calls of one message share it.
    """

    role: str
    agent: str
    messages: list[dict]
    text: str
    prompt_ids: list[int] | None
    output_ids: list[int] | None
    logp_sampler: list[float] | None
    finish_reason: str
    turn: int = 0


@dataclass(slots=True)
class Execution:
    """One run of a design's script. `answer`: what it sent, also if it failed then (reward 0)."""

    answer: str | None
    calls: list[Call]
    reward: float
    status: str
    error: str | None = None
    stdout: str = ""


@dataclass(slots=True)
class Design:
    """One script of the designer. A valid one has `structure` and no `error`; else it is reversed.

    `script` is None if the reply had none. `call` is None if the script was given, or if the
    question did not fit the engine's context.
    """

    script: str | None
    structure: str | None
    error: str | None
    call: Call | None
    executions: list[Execution]


@dataclass(slots=True)
class Rollout:
    """A task with its M designs, in the order of their index."""

    task: object
    designs: list[Design]


def question_text(task) -> str:
    """What designer and agents see: the question, and the starter code if the task has some.

    >>> from types import SimpleNamespace
    >>> question_text(SimpleNamespace(question="Add two numbers.", starter="def add(a, b):\\n"))
    'Add two numbers.\\n\\nStart from this code:\\n```python\\ndef add(a, b):\\n```'
    """
    if not task.starter:
        return task.question
    return f"{task.question}\n\nStart from this code:\n```python\n{task.starter.rstrip()}\n```"


def call_seed(seed: int, step: int, task: int, design: int, execution: int, call: int) -> int:
    """The sampling seed of one call: a stable hash of its place, 63 bits.

    `task` counts over the global batch, so ranks differ; the designer's call has execution -1;
    call -1 of an execution is the seed of its script's own `random`.

    >>> call_seed(0, 0, 0, 0, 0, 0)
    8951266809413379367
    >>> call_seed(0, 0, 0, 0, 0, 0) == call_seed(0, 0, 0, 0, 0, 1)
    False
    """
    place = f"{seed},{step},{task},{design},{execution},{call}"
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big") >> 1


# Kept, because both are pure, parsing takes milliseconds, and a trained designer repeats itself.
@functools.lru_cache(maxsize=4096)
def read_design(reply: str) -> tuple[str | None, str | None, str | None]:
    """A designer's reply -> (script, structure, error); the error says why there is no structure.

    >>> read_design("I would rather not.")[0] is None
    True
    """
    try:
        script = extract_script(reply)
    except DesignError as error:
        return None, None, str(error)
    return read_script(script)


@functools.lru_cache(maxsize=4096)
def read_script(script: str) -> tuple[str, str | None, str | None]:
    """As read_design, for a script that is given as it is.

    >>> read_script("print(")[1:]
    (None, "syntax: '(' was never closed (line 1)")
    """
    try:
        check_script(script)
        return script, structure_of(script), None
    except DesignError as error:
        return script, None, str(error)


def unfit(messages: list[dict]) -> str:
    """Why these are no chat, or "". Chat templates raise on what a script may send by itself.

    >>> unfit([{"role": "user", "content": "1+1?"}])
    ''
    >>> unfit([{"role": "system", "content": "Be brief."}])
    'a call needs a user message, and its system message first'
    """
    roles = [message["role"] for message in messages]
    if "user" in roles and "system" not in roles[1:]:
        return ""
    return "a call needs a user message, and its system message first"


def with_suffix(messages: list[dict], suffix: str) -> list[dict]:
    """The messages with `suffix` at the end of the system prompt.

    >>> with_suffix([{"role": "system", "content": "Solve."}], " Use a box.")
    [{'role': 'system', 'content': 'Solve. Use a box.'}]
    """
    if not suffix:
        return messages
    system, *rest = messages
    if system["role"] != "system":
        system, rest = {"role": "system", "content": ""}, messages
    return [{**system, "content": (system["content"] + suffix).strip()}, *rest]


def judge_end(ended: str, answer: str | None, called: bool) -> str:
    """How a script ended by itself -> the status of its execution.

    >>> judge_end("ok", "8", called=True), judge_end("ok", "8", called=False)
    ('ok', 'no_call')
    >>> judge_end("ok", None, called=True), judge_end("timeout", "8", called=True)
    ('crashed', 'timeout')
    """
    if not called:
        return "no_call"
    if ended == "ok" and answer is None:
        return "crashed"
    return ended


def open_pool(**options) -> ScriptPool:
    """A pool whose scripts can import workflow.py; options: those of sandbox.ScriptPool."""
    workflow = Path(__file__).with_name("workflow.py").read_text(encoding="utf-8")
    return ScriptPool({"workflow": workflow}, **options)


def rollout(
    tasks: Sequence,
    engine,
    pool,
    score: Callable[[object, str], float],
    *,
    n_designs: int = 4,
    n_executions: int = 4,
    executor_engine=None,
    scripts: list[str] | Callable[[object], list[str]] | None = None,
    designer_prompt: str | None = None,
    deterministic: bool = False,
    seed: int = 0,
    step: int = 0,
    places: Sequence[int] | None = None,
    temperature: float = 1.0,
    designer_max_tokens: int = 2048,
    executor_max_tokens: int = 2048,
    max_calls: int = 32,
    on_event: Callable[[dict], None] | None = None,
    on_task: Callable[[int, Rollout], None] | None = None,
) -> list[Rollout]:
    """Play `n_designs` designs a task and `n_executions` executions a design; one Rollout a task.

    engine, executor_engine: who designs, and who answers the scripts (None: the same one).
    pool: a sandbox.ScriptPool. score(task, answer) -> reward: called from several threads.
    scripts: design m of every task is scripts[m], or scripts(task)[m], and no designer is asked;
      M is then their number, the same for all tasks.
    designer_prompt: see design.designer_messages; None is the default prompt. What it has for the
      agents (design.agent_suffix) ends their system prompts, also where `scripts` are given.
    seed, step, places: all seeds derive from these. places: of each task its number among all
      tasks (default 0, 1, ...), so that ranks draw differently, and what is left draws the same.
    max_calls: calls an execution may make. *_max_tokens: output tokens a call.
    on_event(dict): for a live view, called on this thread. "event" is "call_started",
      "call_finished", "design", "answer" or "reward"; "task", "design", "execution", "call" are
      indices (execution -1: the designer's call; call -1: not about a call).
    on_task(index, rollout): called on this thread when a task's last execution has its reward, so
      that what is done can be kept before the rest is.

    Raises ValueError for an empty batch or a number below 1, and whatever the engine, the sandbox,
    `score` or a callback raise. Whatever it raises, its scripts are killed, its calls dropped.
    """
    if not tasks or min(n_designs, n_executions, max_calls) < 1:
        raise ValueError(
            f"{len(tasks)} tasks, {n_designs=}, {n_executions=}, {max_calls=}: give at least 1 each"
        )
    places = range(len(tasks)) if places is None else places
    run = _Run(
        tasks=tasks,
        engines=[(engine, {})],
        pool=pool,
        score=score,
        n_executions=n_executions,
        deterministic=deterministic,
        max_calls=max_calls,
        max_tokens={"designer": designer_max_tokens, "executor": executor_max_tokens},
        temperature=temperature,
        suffixes=[agent_suffix(designer_prompt, task.kind) for task in tasks],
        seed_of=lambda task, *place: call_seed(seed, step, places[task], *place),
        on_event=on_event,
        on_task=on_task,
    )
    if executor_engine is not None and executor_engine is not engine:
        run.engines.append((executor_engine, {}))
    try:
        if scripts is None:
            run.ask_designer(n_designs, designer_prompt)
        else:
            run.take_scripts(scripts)
        run.loop()
    finally:
        run.close()
    return run.rollouts


@dataclass(slots=True)
class _Running:
    """An execution while it runs. A slot of `calls` is None until the engine has filled it."""

    calls: list[Call | None] = field(default_factory=list)
    turn: int = -1
    first: int = 0  # where the current message's calls begin
    waiting: int = 0  # how many of them the engine still owes
    ended: Execution | None = None  # set when the script is gone, open until waiting is 0


@dataclass
class _Run:
    """The state of one rollout. Keys are (task, design, execution), for a call with its index."""

    tasks: Sequence
    engines: list[tuple]  # the designer's, then the executor's if it has its own; each with the
    #                       calls that it owes: key -> (agent, messages, turn)
    pool: object
    score: Callable
    n_executions: int
    deterministic: bool
    max_calls: int
    max_tokens: dict[str, int]
    temperature: float
    suffixes: list[str]  # a task each: the end of its agents' system prompts
    seed_of: Callable[..., int]
    on_event: Callable | None
    on_task: Callable | None

    def __post_init__(self):
        self.rollouts = [Rollout(task, []) for task in self.tasks]
        self.questions = [question_text(task) for task in self.tasks]
        self.queued: list[tuple] = []  # a heap of keys
        self.running: dict[tuple, _Running] = {}  # not finished: queued, live, or owed a call
        self.live: set[tuple] = set()  # started, neither killed nor reported as ended
        self.open = 0  # executions without a final status
        self.unrewarded = Counter()  # task -> its executions without a final reward
        self.threads = ThreadPoolExecutor(thread_name_prefix="score")
        self.scoring: dict[Future, tuple] = {}
        self.scored: queue.SimpleQueue[Future] = queue.SimpleQueue()

    # Designs.

    def expect(self, n_designs: int) -> None:
        for t, rolled in enumerate(self.rollouts):
            rolled.designs = [None] * n_designs
            self.unrewarded[t] = n_designs * self.n_executions
        self.open = self.unrewarded.total()

    def ask_designer(self, n_designs: int, prompt: str | None) -> None:
        self.expect(n_designs)
        for t, rolled in enumerate(self.rollouts):
            messages = designer_messages(self.questions[t], rolled.task.kind, prompt)
            for m in range(n_designs):
                refused = self.submit((t, m, DESIGNER, 0), "designer", messages, 0)
                if refused:
                    error = f"question_too_long: {refused}"
                    self.put_design(t, m, None, (None, None, error), "context_overflow")

    def take_scripts(self, scripts) -> None:
        given = [scripts(r.task) if callable(scripts) else scripts for r in self.rollouts]
        if not given[0] or any(len(each) != len(given[0]) for each in given):
            counts = sorted({len(each) for each in given})
            raise ValueError(f"scripts: {counts} a task; give at least one, as many for each task")
        self.expect(len(given[0]))
        for t, its_scripts in enumerate(given):
            for m, script in enumerate(its_scripts):
                self.put_design(t, m, None, read_script(script))

    def put_design(
        self, t: int, m: int, call: Call | None, read: tuple, status: str = "invalid_design"
    ) -> None:
        script, structure, error = read
        self.rollouts[t].designs[m] = Design(script, structure, error, call, [])
        self.emit("design", (t, m, -1), script=script, structure=structure, error=error)
        if error is not None:
            self.rollouts[t].designs[m].executions = [
                Execution(None, [], 0.0, status, error) for _ in range(self.n_executions)
            ]
            self.open -= self.n_executions
            return self.rewarded(t, self.n_executions)
        self.rollouts[t].designs[m].executions = [None] * self.n_executions  # filled by finish
        for n in range(self.n_executions):
            self.running[t, m, n] = _Running()
            heapq.heappush(self.queued, (t, m, n))

    # The loop.

    def loop(self) -> None:
        while self.open:
            self.step_engines()
            self.start_queued()
            for event in self.next_events():
                if event.kind == "calls":
                    self.ask(event.key, event.calls)
                else:
                    called = bool(self.running[event.key].calls)
                    status = judge_end(event.status, event.answer, called)
                    error = event.error or ("no answer" if status == "crashed" else None)
                    self.end(event.key, status, error, event.answer, event.stdout)
            while not self.scored.empty():
                self.take_score(self.scored.get())
        for future in as_completed(list(self.scoring)):
            self.take_score(future)

    def step_engines(self) -> None:
        for engine, owed in self.engines:
            done = engine.step() if owed else []
            if self.deterministic:
                while len(done) < len(owed):
                    done.extend(engine.step())
            for completion in done:
                self.take_completion(completion, owed)

    def start_queued(self) -> None:
        while self.queued and len(self.live) < self.pool.max_live:
            t, m, _ = key = heapq.heappop(self.queued)
            script, question = self.rollouts[t].designs[m].script, self.questions[t]
            seed = self.seed_of(*key, -1)
            # Scripts of the published form put the folder of __file__ on their path.
            variables = {"question": question, "__file__": "/script.py"}
            self.pool.start(key, script, variables=variables, seed=seed)
            self.live.add(key)

    def next_events(self) -> list:
        if not self.live:
            return []
        if not self.deterministic:
            return self.poll(0 if any(owed for _, owed in self.engines) else POLL_S)
        awaited, events = len(self.live), []  # the pool says one thing of each
        while len(events) < awaited:
            events += self.poll(POLL_S)
        return sorted(events, key=lambda event: event.key)

    def poll(self, timeout: float) -> list:
        events = self.pool.poll(timeout)
        if not events and not self.pool.live():
            raise SandboxError(f"the pool lost {len(self.live)} live scripts: start it again")
        self.live.difference_update(event.key for event in events if event.kind == "ended")
        return events

    # Calls and ends.

    def submit(self, key: tuple, role: str, messages: list[dict], turn: int, agent="") -> str:
        """Hand a call to its engine; the reason if the prompt doesn't fit, else ''."""
        engine, owed = self.engines[0] if role == "designer" else self.engines[-1]
        try:
            engine.submit(
                key,
                messages,
                seed=self.seed_of(*key),
                max_tokens=self.max_tokens[role],
                temperature=self.temperature,
            )
        except ValueError as error:
            # By name, because any engine may be plugged in: this file imports none.
            if type(error).__name__ != "PromptTooLong":
                raise
            return str(error)
        owed[key] = (agent or role, messages, turn)
        self.emit("call_started", key, role=role, agent=agent or role, messages=messages, turn=turn)
        return ""

    def ask(self, key: tuple, asked: list[dict]) -> None:
        x = self.running[key]
        x.turn, x.first = x.turn + 1, len(x.calls)
        if x.first + len(asked) > self.max_calls:
            error = f"{x.first} calls done, {len(asked)} more asked, {self.max_calls} allowed"
            return self.stop(key, "call_budget", error)
        for each in asked:
            fault = unfit(each["messages"])
            if fault:
                status = judge_end("crashed", None, called=bool(x.calls))
                return self.stop(key, status, f"channel: {fault}")
            place = (*key, len(x.calls))
            messages = with_suffix(each["messages"], self.suffixes[key[0]])
            refused = self.submit(place, "executor", messages, x.turn, each["agent"])
            if refused:
                return self.stop(key, "context_overflow", refused)
            x.calls.append(None)
            x.waiting += 1

    def take_completion(self, done, owed: dict) -> None:
        if done.key not in owed:
            raise RuntimeError(f"the engine returned {done.key!r}, which this rollout never asked")
        agent, messages, turn = owed.pop(done.key)
        t, m, n, index = done.key
        role = "designer" if n == DESIGNER else "executor"
        ids = done.prompt_ids, done.output_ids, done.logp_sampler
        call = Call(role, agent, messages, done.text, *ids, done.finish_reason, turn)
        self.emit("call_finished", done.key, role=role, agent=agent, text=done.text)
        if n == DESIGNER:
            return self.put_design(t, m, call, read_design(call.text))
        x = self.running[t, m, n]
        x.calls[index] = call
        x.waiting -= 1
        if x.waiting:
            return
        if x.ended:
            self.finish((t, m, n))
        else:
            self.pool.reply((t, m, n), [c.text for c in x.calls[x.first :]])

    def stop(self, key: tuple, status: str, error: str) -> None:
        self.pool.kill(key)
        self.live.remove(key)
        self.end(key, status, error, None, "")

    def end(self, key: tuple, status: str, error, answer, stdout) -> None:
        """The script is gone. The execution is whole when the engine owes it nothing more."""
        x = self.running[key]
        x.ended = Execution(answer, x.calls, 0.0, status, error, stdout)
        if not x.waiting:
            self.finish(key)

    def finish(self, key: tuple) -> None:
        t, m, n = key
        execution = self.running.pop(key).ended
        self.rollouts[t].designs[m].executions[n] = execution
        self.open -= 1
        self.emit("answer", key, answer=execution.answer, status=execution.status)
        if execution.status == "ok":
            task = self.rollouts[t].task
            future = self.threads.submit(self.score, task, execution.answer)
            self.scoring[future] = key
            future.add_done_callback(self.scored.put)
        else:
            self.rewarded(t, 1)

    def take_score(self, future: Future) -> None:
        t, m, n = key = self.scoring.pop(future)
        reward = float(future.result())
        self.rollouts[t].designs[m].executions[n].reward = reward
        self.emit("reward", key, reward=reward)
        self.rewarded(t, 1)

    def rewarded(self, t: int, executions: int) -> None:
        self.unrewarded[t] -= executions
        if self.on_task and not self.unrewarded[t]:
            self.on_task(t, self.rollouts[t])

    def emit(self, event: str, key: tuple, **details) -> None:
        if self.on_event:
            t, m, n, index = (*key, -1)[:4]
            place = {"task": t, "design": m, "execution": n, "call": index}
            self.on_event({"event": event, **place, **details})

    def close(self) -> None:
        """Leave nothing behind. After a clean end there is nothing left to drop or to kill."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for engine, owed in self.engines:
            # An engine of two calls (an API) has nothing to drop.
            if owed and hasattr(engine, "cancel_all"):
                engine.cancel_all()
        for key in self.live:
            self.pool.kill(key)


def rewards_of(rollouts: list[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    """(rewards, ran), both [B, M, N]; float64, and bool: at least one recorded call.

    >>> call = Call("executor", "a", [], "8", None, None, None, "stop")
    >>> runs = [Execution("8", [call], 1.0, "ok"), Execution(None, [], 0.0, "no_call")]
    >>> rewards_of([Rollout(None, [Design("...", "single", None, None, runs)])])
    (array([[[1., 0.]]]), array([[[ True, False]]]))
    """
    executions = [[design.executions for design in rolled.designs] for rolled in rollouts]
    rewards = [[[x.reward for x in row] for row in designs] for designs in executions]
    ran = [[[bool(x.calls) for x in row] for row in designs] for designs in executions]
    return np.array(rewards, dtype=np.float64), np.array(ran, dtype=bool)


def tally(rollouts: list[Rollout]) -> dict[str, float]:
    """What happened, in counts and sums only; `shares` makes means of them."""
    total = Counter({f"status/{status}": 0 for status in STATUSES})
    total.update({"tokens/designer": 0, "tokens/executor": 0})
    for rolled in rollouts:
        # The task counts in all, in its kind and in its data set ("" stands for all).
        groups = {"", f"/{rolled.task.kind}", f"/{rolled.task.source}"} - {"/"}
        total["unique_designs"] += len({design.script for design in rolled.designs})
        for design in rolled.designs:
            for group in groups:
                total[f"designs{group}"] += 1
                total[f"executions{group}"] += len(design.executions)
                total[f"reward{group}"] += sum(x.reward for x in design.executions)
                total[f"valid_designs{group}"] += design.error is None
                if design.error is None:
                    total[f"structure{group}/{design.structure}"] += 1
            for execution in design.executions:
                total["executions_ran"] += bool(execution.calls)
                total[f"status/{execution.status}"] += 1
            executor_calls = [call for x in design.executions for call in x.calls]
            for call in executor_calls + ([design.call] if design.call else []):
                total[f"calls/{call.role}"] += 1
                total[f"truncated/{call.role}"] += call.finish_reason == "length"
                total[f"tokens/{call.role}"] += len(call.output_ids or ())
                total[f"prompt_tokens/{call.role}"] += len(call.prompt_ids or ())
    return dict(total)


def shares(tallied: dict[str, float]) -> dict[str, float]:
    """A tally -> the metrics to log. G: a kind of task or a data set (Task.source).

    reward, reward/G                  mean over all executions
    valid_designs, valid_designs/G    share of the designs
    unique_designs                    share of different scripts among the designs of a task
    structure/S, structure/G/S        share of the valid designs
    calls_per_execution, tokens_per_execution (output tokens), executor_reward: means over the
                                      executions that ran, which are what the executor is paid for
    truncated/ROLE                    share of the role's calls cut off at the token limit
    length/ROLE, prompt_length/ROLE   mean tokens a call
    status/S                          number of executions; all seven are always there

    >>> shares({"reward": 3, "executions": 12})["reward"]
    0.25
    """
    total = Counter(tallied)

    def ratio(part: str, whole: str) -> float:
        return total[part] / total[whole] if total[whole] else 0.0

    metrics = {
        "unique_designs": ratio("unique_designs", "designs"),
        "calls_per_execution": ratio("calls/executor", "executions_ran"),
        "tokens_per_execution": ratio("tokens/executor", "executions_ran"),
        "executor_reward": ratio("reward", "executions_ran"),
    }
    for role in ("designer", "executor"):
        metrics[f"truncated/{role}"] = ratio(f"truncated/{role}", f"calls/{role}")
        metrics[f"length/{role}"] = ratio(f"tokens/{role}", f"calls/{role}")
        metrics[f"prompt_length/{role}"] = ratio(f"prompt_tokens/{role}", f"calls/{role}")
    for name in sorted(total):
        head, *rest = name.split("/")
        group = "".join(f"/{part}" for part in (rest[:-1] if head == "structure" else rest))
        if head == "status":
            metrics[name] = total[name]
        elif head == "structure":
            metrics[name] = ratio(name, f"valid_designs{group}")
        elif head == "valid_designs":
            metrics[name] = ratio(name, f"designs{group}")
        elif head == "reward":
            metrics[name] = ratio(name, f"executions{group}")
    return metrics


def main() -> None:
    """Two designs of one task, two executions each; a few lines play the model."""
    from types import SimpleNamespace

    import sandbox
    from design import SCRIPTS

    class Actor:
        """An engine of two calls: agents answer 56 or, with an odd seed, 54."""

        def __init__(self):
            self.waiting = []

        def submit(self, key, messages, *, max_tokens, temperature, seed):
            self.waiting.append((key, rf"It is \boxed{{{54 if seed % 2 else 56}}}."))

        def step(self):
            done, self.waiting = self.waiting, []
            ids = {"prompt_ids": None, "output_ids": None, "logp_sampler": None}
            return [
                SimpleNamespace(key=key, text=text, finish_reason="stop", **ids)
                for key, text in done
            ]

    sandbox.configure("best")
    task = SimpleNamespace(id="7x8", kind="math", question="7*8?", starter="", source="")
    with open_pool() as pool:
        [rolled] = rollout(
            [task],
            Actor(),
            pool,
            lambda task, answer: float(r"\boxed{56}" in answer),
            scripts=[SCRIPTS["single"], SCRIPTS["ensemble"]],
            n_executions=2,
            deterministic=True,
            seed=2,
        )
    for design in rolled.designs:
        for x in design.executions:
            agents = ", ".join(call.agent for call in x.calls)
            print(f"{design.structure:9} {x.status} reward {x.reward}  {x.answer}  <- {agents}")
    print(rewards_of([rolled])[0].tolist())


if __name__ == "__main__":
    main()
