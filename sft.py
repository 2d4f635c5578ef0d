"""Cold start: collect correct traces from a teacher, then imitate them.

The idea. RL can only choose among what the model already does. So first a teacher designs and
executes, through the same `rollout` that RL uses, and the model imitates what *worked*: a trace
(one design, the calls of its one execution) is kept if and only if its reward is 1. The teacher
need not be good, only right sometimes; the verifier does the filtering.

    tasks -> rollout(teacher, 1 design, 1 execution) -> reward 1? -> one designer example,
                                                                     one executor example a call

The loss is the mean cross-entropy over response tokens, prompts carry none:

    loss = - sum over response tokens of logp / n_tokens        n_tokens: of the whole update

Worked number: two responses with token probabilities (1/2, 1/4) and (1/8): the loss is
(ln 2 + ln 4 + ln 8) / 3 = 2 ln 2, not the mean of the two responses' means, 2.25 ln 2:

    >>> logp = torch.tensor([[0.5, 0.25], [0.125, 0.9]]).log()
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> round(supervised_loss(logp, mask, 3).item() / math.log(2), 4)
    2.0

Filtering also tilts the choice of designs: a structure that works more often is kept more often.
With success .6 and .2 and both drawn half of the time, the kept share is .6 / (.6 + .2) = 75 %.

The teacher of `collect` is any endpoint that speaks the OpenAI protocol (`ApiEngine`: a hosted
model, or your own `vllm serve MODEL`), or a model folder. What became of a call is never guessed:

    stop       a whole reply: it may become an example
    length     cut at the token limit: the script goes on with it, it is no example
    refused    the endpoint won't take this prompt (too long, filtered): an empty reply, and nothing
               of its execution is kept
    failed     no reply after all tries: nothing of its task is kept, and the task is not done: the
               next start tries it again

Costs, worked: half of the tasks solved, 4 agent calls an execution. 3,000 designer examples take
6,000 tasks = 6,000 * (1 + 4) = 30,000 calls. On the way 3,000 * 4 = 12,000 agent calls of correct
executions come by, of which 8,000 are written. At 1,500 prompt and 1,000 output tokens a call that
is 45 and 30 million tokens; at 20 s a call and 16 at a time 30,000 * 20 / 16 s = 10.4 hours.

The file. FILE holds the examples, a JSON line each; FILE.done a line for each finished task, with
the size that FILE had then. Examples go first. After a kill -9 whatever lies behind the last
finished task is cut off, so the next start goes on and no task counts twice.

Where it differs from the paper: there the teacher is DeepSeek-V3.2 (3K designer and 8K executor
traces: the defaults here); the embedded toy has a programmatic one (toy.py). The training loop is
train.py's. Source: MetaAgent-X (arXiv 2605.14212), supervised cold start.

    python sft.py collect --endpoint https://api.deepseek.com --teacher deepseek-chat --out t.jsonl
    python sft.py collect --endpoint http://127.0.0.1:8000 --teacher MODEL --data tasks.jsonl
    python train.py --train sft --data traces.jsonl --model FOLDER
"""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import fcntl
import hashlib
import http.client
import json
import math
import os
import queue
import random
import re
import ssl
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data import (
    DATASETS,
    DataError,
    OneLineParser,
    Task,
    data_names,
    load_evaluation,
    load_mix,
    parse_mix,
    read_prompt,
)
from engine import (
    Completion,
    EngineError,
    ModelError,
    TorchEngine,
    VLLMEngine,
    check_folder,
    choose_engine,
    open_engine,
)
from execute import Call, Design, Rollout, open_pool, rollout
from reward import score, usable_tasks
from sandbox import SandboxError, configure

NO_REPLY = ("refused", "failed")  # finish reasons of ApiEngine, see the header


@dataclass(frozen=True, slots=True)
class Example:
    """What was asked, and the reply to imitate."""

    messages: list[dict]
    response: str


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """An example as token ids, with the fields that grpo.pack reads. The reply ends with EOS."""

    prompt_ids: list[int]
    output_ids: list[int]
    logp_sampler: None = None
    finish_reason: str = "stop"


def correct_calls(rolled: Rollout) -> Iterator[tuple[Design, Call]]:
    """The correct traces of a task: for each execution of reward 1 its design's call and its own.

    A reply that ran into its token limit is left out: it has no end to imitate. An execution with
    a call that got no reply is left out whole: its agents worked with an empty text.
    """
    for design in rolled.designs:
        for execution in design.executions:
            calls = ([design.call] if design.call else []) + execution.calls
            if execution.reward < 1 or any(call.finish_reason in NO_REPLY for call in calls):
                continue
            for call in calls:
                if call.finish_reason == "stop" and call.text.strip():
                    yield design, call


def examples_of(rollouts: Sequence[Rollout]) -> list[Example]:
    """`correct_calls` of all tasks, as examples."""
    calls = [call for rolled in rollouts for _, call in correct_calls(rolled)]
    return [Example(call.messages, call.text) for call in calls]


def collect(
    tasks: Sequence,
    teacher,
    pool,
    score: Callable,
    *,
    batch: int = 256,
    places: Sequence[int] | None = None,
    on_progress: Callable[[int, int, int], None] | None = None,
    **options,
) -> list[Example]:
    """One design and one execution a task by `teacher`, kept where correct.

    places and options: those of execute.rollout. on_progress(tasks done, tasks, examples kept).
    """
    places = range(len(tasks)) if places is None else places
    examples: list[Example] = []
    for start in range(0, len(tasks), batch):
        part, where = tasks[start : start + batch], places[start : start + batch]
        plan = {"n_designs": 1, "n_executions": 1, "places": where}
        rolled = rollout(part, teacher, pool, score, **plan, **options)
        examples += examples_of(rolled)
        if on_progress:
            on_progress(start + len(part), len(tasks), len(examples))
    return examples


def read_examples(path: str | Path) -> list[Example]:
    """The examples of a JSONL file: {"messages": [{"role", "content"}, ...], "response": text}.

    Other fields of a line are for people and are not read. Raises DataError, in one line that
    names the first line that is not of this form.
    """
    try:
        # Not splitlines: JSON may hold U+2028 and its like as they are.
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(read_example(line))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}, line {number}: {error!r}; a line is"
                    ' {"messages": [{"role": ..., "content": ...}], "response": ...}'
                ) from error
    if not examples:
        raise DataError(f"{path} holds no example: give one JSON object a line")
    return examples


def read_example(line: str) -> Example:
    """One line of the file. Raises ValueError, KeyError or TypeError where it is of another form.

    >>> read_example('{"messages": [{"role": "user", "content": "2+2"}], "response": "4"}').response
    '4'
    """
    row = json.loads(line)
    messages = [{part: turn[part] for part in ("role", "content")} for turn in row["messages"]]
    texts = [row["response"], *(text for turn in messages for text in turn.values())]
    if not messages or not all(isinstance(text, str) for text in texts):
        raise TypeError("texts must be strings, and there must be a message")
    return Example(messages, row["response"])


def encode(
    examples: Sequence[Example], tokenizer, *, max_context: int, chat_kwargs: dict | None = None
) -> list[EncodedExample]:
    """Examples -> ids, through the engine's chat template; those too long are left out."""
    encoded = []
    for example in examples:
        prompt_ids = tokenizer.apply_chat_template(
            example.messages, add_generation_prompt=True, return_dict=False, **(chat_kwargs or {})
        )
        output_ids = tokenizer(example.response, add_special_tokens=False).input_ids
        output_ids = [*output_ids, tokenizer.eos_token_id]
        if len(prompt_ids) + len(output_ids) <= max_context:
            encoded.append(EncodedExample(list(prompt_ids), output_ids))
    return encoded


def supervised_loss(logp: torch.Tensor, mask: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """logp, mask: [B, T]; -(masked sum of logp) / n_tokens, a scalar. Micro-batches add up."""
    return -torch.where(mask, logp, logp.new_zeros(())).sum() / n_tokens


def batches(n: int, batch: int, steps: int, seed: int) -> Iterator[list[int]]:
    """`steps` lists of `batch` indices below n; every epoch is a new order of all of them.

    What is left at the end of an epoch opens the next one. `batch` may exceed n.

    >>> [sorted(rows) for rows in batches(2, 3, 2, seed=0)][1] in ([0, 0, 1], [0, 1, 1])
    True
    """
    rng, left = random.Random(seed), []
    for _ in range(steps):
        while len(left) < batch:
            left += rng.sample(range(n), n)
        yield left[:batch]
        del left[:batch]


def cosine(step: int, steps: int, warmup: int) -> float:
    """Factor on the learning rate: linear warm-up, then half a cosine down to 0.02.

    >>> [round(cosine(s, 100, 10), 3) for s in (0, 9, 55, 99)]
    [0.1, 1.0, 0.493, 0.02]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup + 1) / max(1, steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))


# --- a teacher over HTTP -----------------------------------------------------------------------

FREE_TRIES = 8  # of a request that was turned away: rate limits, 5xx, no connection
COSTLY_TRIES = 3  # of a request that may have been worked on: timed out, or answered brokenly
FAILURES_IN_A_ROW = 5  # calls without a reply, and none with one between: the endpoint is down
LONGEST_BACKOFF_S = 60.0
LONGEST_WAIT_S = 900.0  # of a Retry-After; a longer one ends the start
MAX_REPLY = 16 * 2**20  # bytes
STEP_S = 0.05
# In the body of a 400, 413 or 422 that is about this prompt, not about how we ask.
_ABOUT_PROMPT = re.compile(
    r"context.{0,3}(?:length|window)|maximum context|too long|too many tokens|prompt.{0,20}length"
    r"|content.{0,3}(?:filter|policy|management|exists.risk)|moderation|inappropriate",
    re.IGNORECASE,
)
_HINTS = {
    400: "look at --teacher and --request-fields",
    401: "look at the key in the variable that --key-variable names",
    402: "the account has to be topped up",
    403: "look at the key in the variable that --key-variable names, and what it may use",
    404: "look at --endpoint and --teacher",
}


class TeacherError(RuntimeError):
    """The teacher can't be asked. One line that says what to do."""


class BudgetSpent(RuntimeError):
    """The bound on calls or tokens is reached: not one more request is sent."""


class _Trouble(Exception):
    """This try gave nothing, another one may. costly: the teacher may have worked for it."""

    def __init__(self, what: str, *, costly: bool, after: float = 0.0) -> None:
        super().__init__(what)
        self.costly, self.after = costly, after


class _EveryStatus(urllib.request.HTTPErrorProcessor):
    """Hands on every response as it is. So no redirect is followed: it would take the key along."""

    def http_response(self, request, response):
        return response

    https_response = http_response


def chat_url(base: str) -> str:
    """The address of chat/completions, from a base URL with or without its version.

    >>> chat_url("https://api.deepseek.com"), chat_url("http://127.0.0.1:8000/v1/")
    ... # doctest: +NORMALIZE_WHITESPACE
    ('https://api.deepseek.com/v1/chat/completions',
     'http://127.0.0.1:8000/v1/chat/completions')
    >>> chat_url("https://x.org/v1beta/openai"), chat_url("https://x.org/v2/chat/completions")
    ('https://x.org/v1beta/openai/chat/completions', 'https://x.org/v2/chat/completions')
    """
    try:
        parts = urllib.parse.urlsplit(base)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or re.search(r"[^!-~]|[?#@]", base):
        # Not repeated: there might be a password in it.
        raise DataError("--endpoint: give http(s)://HOST, with /v1 or without, and nothing else")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path += "" if re.search(r"/v\d\w*(/|$)", path) else "/v1"
        path += "/chat/completions"
    return f"{parts.scheme}://{parts.netloc}{path}"


def retry_after(value: str | None, now: float) -> float:
    """Seconds to wait by a Retry-After header, a number or a date; 0 without a readable one.

    >>> retry_after("3", 0), retry_after("Thu, 01 Jan 1970 00:01:00 GMT", 20.0), retry_after("x", 0)
    (3.0, 40.0, 0.0)
    """
    text = (value or "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", text, re.ASCII):
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def read_reply(reply: object) -> tuple[str, str]:
    """(text, finish reason) of a decoded chat completion. ValueError where it is none.

    >>> read_reply({"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]})
    ('4', 'stop')
    >>> read_reply({"choices": []})
    Traceback (most recent call last):
    ValueError: no choices[0].message.content
    """
    try:
        choice = reply["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError("no choices[0].message.content") from error
    if reason == "content_filter":
        return "", "refused"
    if reason == "length" and text is None:  # all went into hidden reasoning
        return "", "length"
    if reason not in ("stop", "length") or not isinstance(text, str):
        raise ValueError(f"finish_reason {str(reason)[:40]!r}, content {type(text).__name__}")
    if reason == "stop" and not text.strip():
        raise ValueError("an empty reply")
    text.encode()  # half a surrogate pair is a UnicodeEncodeError, which is a ValueError
    return text, reason


def used_tokens(reply: object) -> int | None:
    """Prompt and output tokens that a reply says it took; None if it doesn't say.

    >>> used_tokens({"usage": {"prompt_tokens": 7, "completion_tokens": 2}}), used_tokens({})
    (9, None)
    """
    usage = reply.get("usage") if isinstance(reply, dict) else None
    names = ("prompt_tokens", "completion_tokens")
    counts = [usage.get(name) if isinstance(usage, dict) else None for name in names]
    return sum(counts) if all(type(n) is int and n >= 0 for n in counts) else None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A submitted call. `cancelled` is set by cancel_all."""

    key: object
    body: bytes
    cancelled: threading.Event


class ApiEngine:
    """A model behind an OpenAI-compatible endpoint, as an engine: submit and step.

    url: of chat/completions (`chat_url`). key: sent in the Authorization header and nowhere else.
    concurrency: requests at a time, one thread each. timeout_s: of one try. backoff_s: the wait
    before a second try; it doubles with each, and is jittered. fields: are put into each request's
    body, over our own; None takes a field out. Set on_step to have it called by each step.

    max_requests, max_tokens: no request is sent once so many were (retries count) or once the
    replies say that so many tokens were used; `step` then raises BudgetSpent. Ids and log-probs of
    completions are None; seeds are not sent, because an API promises nothing for them.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str = "",
        concurrency: int = 16,
        timeout_s: float = 300.0,
        backoff_s: float = 1.0,
        max_requests: int | None = None,
        max_tokens: int | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        self.url, self.model, self.timeout_s, self.backoff_s = url, model, timeout_s, backoff_s
        self.max_requests, self.max_tokens = max_requests, max_tokens
        self.fields = dict(fields or {})
        self.on_step: Callable[[], None] = lambda: None
        self.requests = self.tokens = self.retries = 0
        self.last_trouble = ""
        self._key = key
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._opener = urllib.request.build_opener(_EveryStatus)
        self._lock = threading.Lock()  # of the counts, and of the time before which all are quiet
        self._quiet_until = 0.0
        self._jitter = random.Random()
        self._pending = self._failures = 0
        self._cancelled = threading.Event()
        # The last one first: a task that is begun is ended before the budget goes to others.
        self._waiting: queue.LifoQueue[_Asked | None] = queue.LifoQueue()
        self._ended: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        # Daemons: Ctrl-C must not wait for replies that nobody will read.
        self._threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ApiEngine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # The seam, called from one thread.

    def submit(self, key, messages: list[dict], *, max_tokens: int, temperature: float, seed: int):
        """Queues a call; a later `step` returns its Completion under this key."""
        own = {"model": self.model, "messages": messages, "temperature": temperature}
        fields = own | {"max_tokens": max_tokens, "stream": False} | self.fields
        body = json.dumps({name: x for name, x in fields.items() if x is not None}).encode()
        self._waiting.put(_Asked(key, body, self._cancelled))
        self._pending += 1

    def pending(self) -> int:
        """Calls submitted whose Completion has not come out yet."""
        return self._pending

    def cancel_all(self) -> None:
        """Drops every pending call. What the endpoint works on already is paid, and not read."""
        self._cancelled.set()
        self._cancelled = threading.Event()
        self._pending = 0

    def close(self) -> None:
        """Drops every call and ends the threads, each after the request that it is in."""
        self.cancel_all()
        for _ in self._threads:
            self._waiting.put(None)

    def step(self) -> list[Completion]:
        """What has ended. Waits a moment if nothing has, so that a loop around it doesn't spin.

        Raises TeacherError where the endpoint can't be used, BudgetSpent at the bound.
        """
        self.on_step()
        done: list[Completion] = []
        while self._pending:
            try:
                call, outcome = self._ended.get(block=not done, timeout=STEP_S)
            except queue.Empty:
                break
            if call.cancelled.is_set():
                continue
            self._pending -= 1
            if outcome is None:
                raise RuntimeError("a thread of ApiEngine died: its traceback is above")
            if isinstance(outcome, Exception):
                raise outcome
            self._watch(outcome)
            done.append(outcome)
        return done

    def _watch(self, completion: Completion) -> None:
        self._failures = self._failures + 1 if completion.finish_reason == "failed" else 0
        if self._failures == FAILURES_IN_A_ROW:
            self._failures = 0
            raise TeacherError(
                f"{FAILURES_IN_A_ROW} calls in a row got no reply ({self.last_trouble}): see that"
                " the endpoint runs, then start again"
            )

    # One call, on a thread of its own.

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            outcome = None
            try:
                outcome = self._ask(call)
            except (TeacherError, BudgetSpent) as error:
                outcome = error
            finally:
                self._ended.put((call, outcome))

    def _ask(self, call: _Asked) -> Completion:
        """All tries of a call."""
        left = {True: COSTLY_TRIES, False: FREE_TRIES}
        backoff = self.backoff_s
        text, reason = "", "failed"
        while self._may_send(call):
            try:
                text, reason = self._try(call.body)
                break
            except _Trouble as trouble:
                left[trouble.costly] -= 1
                with self._lock:
                    self.last_trouble = str(trouble)
                    if not left[trouble.costly]:
                        break
                    self.retries += 1
                    until = time.monotonic() + trouble.after
                    self._quiet_until = max(self._quiet_until, until if trouble.after else 0.0)
                call.cancelled.wait(backoff * self._jitter.uniform(0.5, 1.5))
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)
        return Completion(call.key, None, None, text, None, reason)

    def _may_send(self, call: _Asked) -> bool:
        """Waits while the endpoint wants quiet, then counts the request. False: cancelled."""
        while not call.cancelled.is_set():
            with self._lock:
                quiet = self._quiet_until - time.monotonic()
                if quiet <= 0:
                    if self.max_requests is not None and self.requests >= self.max_requests:
                        raise BudgetSpent(f"{self.requests} requests are sent")
                    if self.max_tokens is not None and self.tokens >= self.max_tokens:
                        raise BudgetSpent(f"{self.tokens:,} tokens are used")
                    self.requests += 1
                    return True
            call.cancelled.wait(quiet * self._jitter.uniform(1.0, 1.1))
        return False

    def _try(self, body: bytes) -> tuple[str, str]:
        """(text, finish reason) by one request. Raises _Trouble or TeacherError."""
        status, headers, raw = self._send(body)
        if status != 200:
            return self._refusal(status, headers, raw)
        try:
            reply = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise _Trouble(f"a reply that is no JSON, {len(raw)} bytes", costly=True) from error
        tokens = used_tokens(reply)
        if tokens is None and self.max_tokens is not None:
            raise TeacherError("the endpoint reports no usage of tokens: bound --max-calls instead")
        with self._lock:
            self.tokens += tokens or 0
        try:
            return read_reply(reply)
        except ValueError as error:
            raise _Trouble(f"a broken reply, {error}: {self._excerpt(raw)}", costly=True) from error

    def _send(self, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
        """(status, headers, body) of the response, whatever its status."""
        request = urllib.request.Request(self.url, body, self._headers)
        deadline = time.monotonic() + self.timeout_s
        late = f"no whole reply within {self.timeout_s:g} s"
        try:
            with self._opener.open(request, timeout=self.timeout_s) as response:
                raw = bytearray()
                while chunk := response.read1(1 << 16):
                    raw += chunk
                    if time.monotonic() > deadline:  # the socket's own clock restarts with a byte
                        raise _Trouble(late, costly=True)
                    if len(raw) > MAX_REPLY:
                        raise _Trouble(f"a reply of over {MAX_REPLY} bytes", costly=True)
                return response.status, response.headers, bytes(raw)
        except TimeoutError as error:
            raise _Trouble(late, costly=True) from error
        except OSError as error:
            why = getattr(error, "reason", error)
            if isinstance(why, ssl.SSLCertVerificationError):
                raise TeacherError(f"the endpoint's certificate is not accepted: {why}") from error
            raise _Trouble(f"no connection: {why}", costly=False) from error
        except http.client.HTTPException as error:
            raise _Trouble(f"a broken response: {type(error).__name__}", costly=True) from error

    def _refusal(self, status: int, headers: Mapping[str, str], raw: bytes) -> tuple[str, str]:
        said = f"HTTP {status} {self._excerpt(raw)}".strip()
        if status in (408, 429) or status >= 500:
            after = retry_after(headers.get("Retry-After"), time.time())
            if after > LONGEST_WAIT_S:
                raise TeacherError(f"{said}: it wants {after:.0f} s of quiet; start again then")
            raise _Trouble(said, costly=False, after=after)
        if status in (400, 413, 422) and _ABOUT_PROMPT.search(raw.decode("utf-8", "replace")):
            return "", "refused"
        if 300 <= status < 400:
            raise TeacherError(f"{said}: the endpoint has moved; give its new address")
        raise TeacherError(f"{said}: {_HINTS.get(status, _HINTS[400])}")

    def _excerpt(self, raw: bytes) -> str:
        """What an endpoint says, short, in one line, and without the key, should it repeat it."""
        text = raw.decode("utf-8", "replace")
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            error = json.loads(text)["error"]
            text = error if isinstance(error, str) else str(error["message"])
        if self._key:
            text = text.replace(self._key, "[key]")
        return "".join(c if c.isprintable() else " " for c in text)[:200].strip()


# --- the file of traces ------------------------------------------------------------------------


def trace_rows(rolled: Rollout, teacher: str) -> list[dict]:
    """The lines of a task: its correct calls, each with what it was for."""
    task = rolled.task
    return [
        {
            "role": call.role,
            "messages": call.messages,
            "response": call.text,
            "task": task.id,
            "source": task.source,
            "kind": task.kind,
            "structure": design.structure,
            "agent": call.agent,
            "turn": call.turn,
            "teacher": teacher,
        }
        for design, call in correct_calls(rolled)
    ]


def _digest(row: dict) -> bytes:
    text = json.dumps([row["messages"], row["response"]])
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


class TraceFile:
    """Examples on disk, and which tasks are done; see the header for what a kill leaves.

    goals: role -> examples wanted; more of a role are not written. counts: role -> how many there
    are. done: ids of finished tasks. cut: bytes of an unfinished task that were removed. Raises
    DataError for files that are not ours or that another process writes.
    """

    def __init__(self, path: str | Path, goals: Mapping[str, int]) -> None:
        self.path, self.done_path = Path(path), Path(f"{path}.done")
        if self.path.exists() and not self.done_path.exists():
            raise DataError(f"{path} is there without {self.done_path}: give another --out")
        self.goals, self.counts = dict(goals), Counter()
        self.done: set[str] = set()
        self._seen: set[bytes] = set()
        self._done_file = self.done_path.open("a+b")
        try:
            fcntl.flock(self._done_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._done_file.close()
            raise DataError(f"another process writes to {path}: wait for it") from error
        self._file = self.path.open("a+b")
        self._recover()

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        self._done_file.close()

    def _recover(self) -> None:
        """Reads both files up to the last task whose line in FILE.done is whole and covered."""
        self._done_file.seek(0)
        *lines, _torn = self._done_file.read().split(b"\n")
        size, kept, committed = self._file.seek(0, os.SEEK_END), 0, 0
        try:
            for line in lines:
                record = json.loads(line)
                if record["bytes"] > size:
                    break
                self.done.add(record["task"])
                kept, committed = kept + len(line) + 1, record["bytes"]
            self._file.seek(0)
            *rows, rest = self._file.read(committed).split(b"\n")
            for row in map(json.loads, rows):
                self._seen.add(_digest(row))
                self.counts[row["role"]] += 1
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.path} or {self.done_path} was edited ({error!r})") from error
        if rest:
            raise DataError(f"{self.path} was edited: its lines don't end where tasks do")
        self._done_file.truncate(kept)
        self._file.truncate(committed)
        self.cut = size - committed

    def _is_wanted(self, row: dict) -> bool:
        """Notes the row, unless it is a copy or its role has enough."""
        digest, role = _digest(row), row["role"]
        if digest in self._seen or self.counts[role] >= self.goals[role]:
            return False
        self._seen.add(digest)
        self.counts[role] += 1
        return True

    def add(self, task: Task, rows: Sequence[dict], **notes) -> None:
        """Writes a finished task: its new rows, then its line in FILE.done, with the notes."""
        new = [row for row in rows if self._is_wanted(row)]
        self._append(self._file, new)
        done = {"task": task.id, "kept": len(new), **notes, "bytes": self._file.tell()}
        self._append(self._done_file, [done])
        self.done.add(task.id)

    def _append(self, file, rows: Sequence[dict]) -> None:
        file.seek(0, os.SEEK_END)
        file.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())  # in this order also if the power fails

    def full(self) -> bool:
        return all(self.counts[role] >= goal for role, goal in self.goals.items())


# --- the command -------------------------------------------------------------------------------


CLEAR = "\r\x1b[K"  # a terminal's progress line makes room


class _Enough(Exception):
    """Both amounts are reached: what is still running is dropped."""


def task_order(sources: Mapping[str, Sequence], mix: Mapping[str, int | None], seed: int) -> list:
    """All tasks, each once: every source shuffled, then dealt out in the proportions of the mix.

    >>> order = task_order({"m": ["m1", "m2", "m3", "m4"], "c": ["c1"]}, {"m": 2, "c": 1}, seed=0)
    >>> [name[0] for name in order]
    ['m', 'c', 'm', 'm', 'm']
    """
    places = []
    for name, tasks in sources.items():
        shuffled = random.Random(f"{seed}:{name}").sample(list(tasks), len(tasks))
        places += [((j + 0.5) / (mix[name] or 1), task) for j, task in enumerate(shuffled)]
    return [task for _, task in sorted(places, key=lambda place: place[0])]


def read_tasks(args: argparse.Namespace) -> list[Task]:
    """The training tasks that --data names, less evaluation tasks and golds that can't be graded.

    Says on standard error what was left out. Raises DataError.
    """
    mix, held_out = parse_mix(args.data), []
    for name in data_names(args.exclude):
        try:
            held_out += load_evaluation(name)[0]
        except DataError as error:
            raise DataError(f"--exclude (files will do, '' for none): {error}") from error
    sources, reports = load_mix(
        mix, exclude=held_out, keep=args.keep, max_tests=args.max_tests, seed=args.seed
    )
    for report in reports:
        print(report, file=sys.stderr)
    tasks = task_order(sources, mix, args.seed)
    tasks, bad = usable_tasks(tasks)
    if bad:
        print(f"{len(bad)} golds can't be graded: left out", file=sys.stderr)
    return tasks


def read_key(variable: str | None) -> str:
    """The API key in this variable of the environment. None: OPENAI_API_KEY, if it is set."""
    key = os.environ.get(variable or "OPENAI_API_KEY", "").strip()
    if variable and not key:
        raise DataError(f"--key-variable: {variable} is not set, or empty")
    if re.search(r"[^!-~]", key):
        raise DataError(f"the key in {variable or 'OPENAI_API_KEY'} holds spaces or odd characters")
    return key


def read_fields(text: str | None) -> dict:
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise DataError(f"--request-fields is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError("--request-fields: give one JSON object, such as '{\"top_p\": 0.9}'")
    return fields


def open_teacher(args: argparse.Namespace) -> ApiEngine | TorchEngine | VLLMEngine:
    """The teacher as an engine. Raises DataError, TeacherError, ModelError or EngineError."""
    if args.endpoint:
        return ApiEngine(
            chat_url(args.endpoint),
            args.teacher,
            key=read_key(args.key_variable),
            concurrency=args.concurrency,
            timeout_s=args.timeout,
            max_requests=args.max_calls,
            max_tokens=args.max_tokens_total,
            fields=read_fields(args.request_fields),
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = choose_engine("auto", device)
    return open_engine(args.model, device, kind=kind, max_batch=args.concurrency)


@dataclass
class Progress:
    """What this start has done, and the line that says so."""

    file: TraceFile
    teacher: ApiEngine | TorchEngine | VLLMEngine
    tasks: int = 0
    correct: int = 0
    failed: int = 0
    calls: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.at_start = Counter(self.file.counts)
        self.began = self.said = time.monotonic()

    def line(self) -> str:
        """Tasks, examples of each role, calls, tokens, rate, and how long it will still take."""
        seconds = time.monotonic() - self.began
        share = f" ({self.correct / self.tasks:.0%})" if self.tasks else ""
        failed = f", {self.failed} failed" if self.failed else ""
        roles = [f"{role} {self.file.counts[role]}/{n}" for role, n in self.file.goals.items()]
        calls, tokens, troubles = self.calls, self.tokens, ""
        if isinstance(self.teacher, ApiEngine):
            calls, tokens = self.teacher.requests, self.teacher.tokens
            if self.teacher.retries:
                last = self.teacher.last_trouble[:60]
                troubles = f", {self.teacher.retries} retries (last: {last})"
        return (
            f"{self.tasks} tasks, {self.correct} correct{share}{failed}; {', '.join(roles)};"
            f" {calls} calls, {tokens:,} tokens{troubles};"
            f" {60 * self.tasks / max(seconds, 1e-9):.1f} tasks/min, {self.left(seconds)}"
        )

    def left(self, seconds: float) -> str:
        """How long the slower role still takes at the pace of this start."""
        worst = 0.0
        for role, goal in self.file.goals.items():
            missing = goal - self.file.counts[role]
            gained = self.file.counts[role] - self.at_start[role]
            if missing > 0:
                worst = max(worst, seconds * missing / gained if gained else math.inf)
        return f"{worst / 60:.0f} min left" if worst < math.inf else "time left unknown"

    def show(self, *, last: bool = False) -> None:
        """Over and over in a terminal, else every 30 seconds."""
        live, now = sys.stderr.isatty(), time.monotonic()
        if last or now - self.said > (0.2 if live else 30.0):
            self.said = now
            start, end = (CLEAR if live else ""), ("" if live and not last else "\n")
            print(f"{start}{self.line()}", end=end, file=sys.stderr, flush=True)

    def record(self, rolled: Rollout, name: str) -> None:
        """Keeps what a finished task has brought. Raises _Enough when both amounts are reached."""
        executions = [x for design in rolled.designs for x in design.executions]
        calls = [design.call for design in rolled.designs if design.call]
        calls += [call for x in executions for call in x.calls]
        self.calls += len(calls)
        self.tokens += sum(len(c.prompt_ids or ()) + len(c.output_ids or ()) for c in calls)
        if any(call.finish_reason == "failed" for call in calls):
            self.failed += 1
            return
        self.tasks += 1
        self.correct += any(x.reward >= 1 for x in executions)
        outcomes = {"statuses": [x.status for x in executions]}
        outcomes |= {"rewards": [x.reward for x in executions], "calls": len(calls)}
        self.file.add(rolled.task, trace_rows(rolled, name), **outcomes)
        self.show()
        if self.file.full():
            raise _Enough


def collect_into(
    file: TraceFile, tasks: Sequence[Task], teacher, progress: Progress, args: argparse.Namespace
) -> str:
    """Rolls out what is not done yet until both amounts are reached; returns why it ended."""
    todo = [(place, task) for place, task in enumerate(tasks) if task.id not in file.done]
    options = {
        "n_designs": args.n_designs,
        "n_executions": args.n_executions,
        "designer_prompt": read_prompt(args.designer_prompt),
        "seed": args.seed,
        "temperature": args.temperature,
        "designer_max_tokens": args.max_tokens,
        "executor_max_tokens": args.max_tokens,
        "on_task": lambda _, rolled: progress.record(rolled, args.teacher or args.model),
    }
    try:
        if file.full():
            raise _Enough
        with open_pool() as pool:
            # Twice as many tasks as requests at a time: most scripts ask one agent after another.
            for start in range(0, len(todo), 2 * args.concurrency):
                batch = todo[start : start + 2 * args.concurrency]
                places, part = zip(*batch, strict=True)
                rollout(part, teacher, pool, score, places=places, **options)
    except _Enough:
        return "both amounts are reached"
    except BudgetSpent as error:
        return f"the budget is spent, {error}: raise it and start again to go on"
    return "the tasks are used up, more --data brings more"


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="sft.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    collect = commands.add_parser(
        "collect",
        help="collect correct traces of a teacher into a JSONL file",
        description="A teacher designs and executes on training tasks; correct traces are kept. "
        "The same command goes on where it was stopped, killed or out of budget.",
        epilog="Exit status: 0, also when tasks or budget are used up; 2 if what was asked for "
        "can't be done, 1 if it failed on the way, 130 after Ctrl-C. The key is read from the "
        "environment only.",
        allow_abbrev=False,
    )
    add = collect.add_argument
    add("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, with /v1 or without")
    add("--teacher", metavar="NAME", help="the model's name at the endpoint")
    add("--model", metavar="FOLDER", help="instead of an endpoint: a model folder is the teacher, "
        "through vLLM on CUDA if it is installed")  # fmt: skip
    add("--key-variable", metavar="NAME",
        help="the environment variable with the key (default: OPENAI_API_KEY)")  # fmt: skip
    add("--request-fields", metavar="JSON",
        help="put into every request, over our own fields; null takes one out, such as "
        '\'{"max_completion_tokens": 8192, "max_tokens": null}\'')  # fmt: skip
    add("--out", default="traces.jsonl", metavar="FILE", help="default: %(default)s; FILE.done "
        "beside it says which tasks are done")  # fmt: skip
    add("--data", default="polaris=4,apps=2,codecontests=2",
        help="training tasks: a data set, a file, or a mix; default: %(default)s")  # fmt: skip
    add("--exclude", default="aime24,aime25,olympiadbench,livecodebench", metavar="NAMES",
        help="evaluation sets, names or files, whose tasks are left out; '' for none; default: "
        "%(default)s")  # fmt: skip
    add("--keep", metavar="FILE", help="ids of tasks whose golds pass (evaluate.py --check-golds)")
    add("--max-tests", type=int, default=16, help="tests a program has to pass (%(default)s)")
    add("--designer-examples", type=int, default=3000, metavar="N",
        help="stop when there are so many of each role, as in the paper (%(default)s)")  # fmt: skip
    add("--executor-examples", type=int, default=8000, metavar="N", help="(%(default)s)")
    add("--max-calls", type=int, metavar="N", help="requests of this start, retries included")
    add("--max-tokens-total", type=int, metavar="N", help="prompt and output tokens of this start")
    add("--n-designs", type=int, default=1, metavar="M", help="designs a task (%(default)s)")
    add("--n-executions", type=int, default=1, metavar="N", help="of a design (%(default)s)")
    add("--designer-prompt", metavar="FILE", help="a text file with {question} in it")
    add("--temperature", type=float, default=1.0, metavar="T", help="(%(default)s)")
    add("--max-tokens", type=int, default=8192, metavar="N", help="output of a call (%(default)s)")
    add("--concurrency", type=int, default=16, metavar="N", help="calls at a time (%(default)s)")
    add("--timeout", type=float, default=300.0, metavar="S", help="of one request (%(default)s)")
    add("--seed", type=int, default=0, help="order of the tasks, choice of tests (%(default)s)")
    isolation = "strict: all layers of the sandbox or an error; best: those that are there"
    add("--isolation", choices=("strict", "best"), default="strict", help=isolation)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raises DataError, in one line, for what can't work, before anything is loaded."""
    if bool(args.endpoint) == bool(args.model):
        raise DataError("give --endpoint URL with --teacher NAME, or --model FOLDER")
    if args.endpoint:
        if not args.teacher:
            raise DataError("--teacher NAME: say which model of the endpoint")
        chat_url(args.endpoint)
        read_key(args.key_variable)
        read_fields(args.request_fields)
    else:
        for name in ("teacher", "key_variable", "request_fields", "max_calls", "max_tokens_total"):
            if getattr(args, name) is not None:
                raise DataError(f"--{name.replace('_', '-')} is for an --endpoint")
    for name in (
        "max_tests n_designs n_executions max_tokens concurrency timeout max_calls max_tokens_total"
    ).split():
        value = getattr(args, name)
        if value is not None and not 1 <= value < math.inf:
            raise DataError(f"--{name.replace('_', '-')} is {value}: give at least 1")
    if min(args.designer_examples, args.executor_examples, args.temperature) < 0:
        raise DataError("--designer-examples, --executor-examples and --temperature: at least 0")
    if Path(args.out).is_dir() or not Path(args.out).absolute().parent.is_dir():
        raise DataError(f"--out {args.out}: give a file in a folder that exists")
    read_prompt(args.designer_prompt)
    for name in (*parse_mix(args.data), *data_names(args.exclude)):
        if name not in DATASETS and not Path(name).is_file():
            raise DataError(f"--data, --exclude: no such file {name}, and no data set of that name")
    if args.model:
        check_folder(args.model)


def run_collect(args: argparse.Namespace) -> None:
    check_arguments(args)
    goals = {"designer": args.designer_examples, "executor": args.executor_examples}
    tasks, teacher = read_tasks(args), open_teacher(args)  # before any file is made
    with TraceFile(args.out, goals) as file:
        if file.done or file.cut:
            print(
                f"{args.out}: {len(file.done)} tasks are done, {file.cut} bytes of unfinished ones"
                " were cut off; going on",
                file=sys.stderr,
            )
        configure(args.isolation)
        progress = Progress(file, teacher)
        with teacher if isinstance(teacher, ApiEngine) else contextlib.nullcontext():
            if isinstance(teacher, ApiEngine):
                teacher.on_step = progress.show
            ended = collect_into(file, tasks, teacher, progress, args)
        progress.show(last=True)
        found = " and ".join(f"{file.counts[role]} {role}" for role in goals)
        print(f"{ended}; {args.out} has {found} examples")
        if progress.failed:
            print(f"{progress.failed} tasks got no reply: the next start tries them again")


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)

    def say(text: str) -> None:
        print(f"{CLEAR if sys.stderr.isatty() else ''}sft.py: {text}", file=sys.stderr)

    try:
        run_collect(args)
    except (DataError, ModelError) as error:
        say(str(error))
        return 2
    except (OSError, SandboxError, EngineError, TeacherError, torch.OutOfMemoryError) as error:
        say(f"failed: {' '.join(str(error).split())}")
        return 1
    except KeyboardInterrupt:
        say(f"stopped; {args.out} keeps what is done, the same command goes on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
