"""sft.py collect: a teacher over HTTP, the file of traces, and the command from tasks to ids.

The endpoint is a real server on 127.0.0.1 that speaks chat/completions, and misbehaves when asked.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import sft
from data import DataError
from engine import random_tiny
from execute import Call, Design, Execution, Rollout
from sft import ApiEngine, BudgetSpent, TeacherError, TraceFile, encode, read_examples

ROOT = Path(__file__).resolve().parent.parent
KEY = "sk-Secret0123456789"
ASK = [{"role": "user", "content": "2+2?"}]


# --- the endpoint


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            number = len(server.seen)
            server.seen.append((time.monotonic(), self.path, dict(self.headers), body))
            server.running += 1
            server.most = max(server.most, server.running)
        try:
            answer = server.script(number, body)
            answer = say(answer) if isinstance(answer, str) else answer
            answer(self)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has left
        finally:
            with server.lock:
                server.running -= 1

    def log_message(self, *_):
        pass


class Endpoint(ThreadingHTTPServer):
    """script(number of the request, its body) -> a text, or a function that writes the response."""

    daemon_threads = True

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.seen, self.lock = script, [], threading.Lock()
        self.running = self.most = 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def serve():
    started = []

    def start(script) -> Endpoint:
        started.append(Endpoint(script))
        return started[-1]

    yield start
    for endpoint in started:
        endpoint.shutdown()
        endpoint.server_close()


@pytest.fixture
def engine(serve):
    """engine(script, ...) -> (ApiEngine, Endpoint), with short waits."""
    opened = []

    def make(script, **options):
        endpoint = script if isinstance(script, Endpoint) else serve(script)
        options = {"backoff_s": 0.001, "concurrency": 1, "timeout_s": 20} | options
        opened.append(ApiEngine(sft.chat_url(endpoint.url), "teacher", **options))
        return opened[-1], endpoint

    yield make
    for each in opened:
        each.close()


def write(status, body, headers=(), length=None):
    """A response; `length` may lie about the body's."""
    body = body if isinstance(body, bytes) else body.encode()

    def respond(handler):
        handler.send_response(status)
        for name, value in dict(headers).items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True

    return respond


def completion(content, reason="stop", **more):
    choice = {"index": 0, "message": {"role": "assistant", "content": content}}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    return json.dumps({"choices": [choice | {"finish_reason": reason}], "usage": usage} | more)


def say(content, reason="stop", **more):
    return write(200, completion(content, reason, **more))


def hang_up(handler):
    handler.connection.close()
    handler.close_connection = True


def cut_chunks(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{")
    hang_up(handler)


def asked(engine, n=1):
    """Submits n calls and steps until all are answered: completions in the order of keys."""
    for key in range(n):
        engine.submit(key, ASK, max_tokens=9, temperature=0.5, seed=key)
    done = []
    while engine.pending():
        done += engine.step()
    return sorted(done, key=lambda completion: completion.key)


# --- the engine


def test_what_is_sent_and_what_comes_back(engine):
    teacher, endpoint = engine(lambda number, body: say("four é"), key=KEY)
    [done] = asked(teacher)
    assert (done.key, done.text, done.finish_reason) == (0, "four é", "stop")
    assert done.prompt_ids is done.output_ids is done.logp_sampler is None
    [(_, path, headers, body)] = endpoint.seen
    assert path == "/v1/chat/completions"
    assert [name for name, value in headers.items() if KEY in value] == ["Authorization"]
    assert headers["Authorization"] == f"Bearer {KEY}"
    sent = {"temperature": 0.5, "max_tokens": 9, "stream": False}
    assert body == {"model": "teacher", "messages": ASK, **sent}
    assert (teacher.requests, teacher.tokens, teacher.retries) == (1, 10, 0)


def test_without_a_key_no_header_and_fields_replace_ours(engine):
    fields = {"max_completion_tokens": 9, "max_tokens": None, "temperature": 0.2}
    teacher, endpoint = engine(lambda number, body: "x", fields=fields)
    asked(teacher)
    [(_, _, headers, body)] = endpoint.seen
    assert "Authorization" not in headers
    assert "max_tokens" not in body
    assert (body["max_completion_tokens"], body["temperature"]) == (9, 0.2)


TROUBLES = {
    "429": write(429, "slow down"),
    "500": write(500, '{"error": {"message": "oops"}}'),
    "503": write(503, ""),
    "408": write(408, ""),
    "cut body": write(200, completion("cut")[:-9], length=500),
    "cut at once": write(200, "", length=500),
    "cut chunks": cut_chunks,
    "hang-up": hang_up,
    "no HTTP": lambda handler: (handler.wfile.write(b"hello\r\n\r\n"), hang_up(handler)),
    "no JSON": write(200, "<html>busy</html>"),
    "no text": write(200, b"\xff\xfe\x00"),
    "nested": write(200, "[" * 100_000),
    "a list": write(200, "[1]"),
    "an error in 200": write(200, '{"error": {"message": "overloaded"}}'),
    "no choices": say("x", choices=[]),
    "choices null": say("x", choices=None),
    "choice of text": say("x", choices=["x"]),
    "content null": say(None),
    "content of parts": say([{"type": "text", "text": "x"}]),
    "empty": say(" \n"),
    "no reason": say("x", None),
    "interrupted": say("x", "insufficient_system_resource"),
    "tool call": say("x", "tool_calls"),
    "half a surrogate": say("\ud83d"),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_one_trouble_is_tried_again(engine, name):
    teacher, endpoint = engine(lambda number, body: TROUBLES[name] if number == 0 else "fine")
    [done] = asked(teacher)
    assert (done.text, done.finish_reason) == ("fine", "stop")
    assert (len(endpoint.seen), teacher.requests, teacher.retries) == (2, 2, 1)
    assert endpoint.seen[0][3] == endpoint.seen[1][3]


def test_cut_replies_are_replies(engine):
    answers = [say("half a", "length"), say(None, "length"), say("", "length")]
    teacher, _ = engine(lambda number, body: answers[number])
    got = sorted((done.text, done.finish_reason) for done in asked(teacher, 3))
    assert got == [("", "length"), ("", "length"), ("half a", "length")]


def test_retry_after_is_quiet_for_everyone(engine):
    """Two calls at a time: after a 429 none is sent for the second that it asks for."""
    once = threading.Event()

    def script(number, body):
        if number == 0:
            once.set()
            return write(429, "", {"Retry-After": "1"})
        once.wait(5)
        return "fine"

    teacher, endpoint = engine(script, concurrency=2)
    assert [done.text for done in asked(teacher, 6)] == ["fine"] * 6
    times = sorted(seen[0] for seen in endpoint.seen)
    gap = max(b - a for a, b in zip(times, times[1:], strict=False))
    assert gap > 0.8
    before = sum(b < times[0] + 0.8 for b in times)
    assert before <= 3  # the 429, what was on its way, and what that thread took up just before


def test_a_long_retry_after_ends_the_start(engine):
    teacher, endpoint = engine(lambda *_: write(429, "daily limit", {"Retry-After": "90000"}))
    with pytest.raises(TeacherError, match="daily limit: it wants 90000 s of quiet"):
        asked(teacher)
    assert len(endpoint.seen) == 1


@pytest.mark.parametrize("drips", [False, True])
def test_a_reply_that_never_ends(engine, drips):
    gone = threading.Event()

    def slow(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n")
        for _ in range(300):
            if drips:  # each byte restarts the socket's clock
                handler.wfile.write(b" ")
            gone.wait(0.1)

    teacher, endpoint = engine(lambda *_: slow, timeout_s=0.4)
    began = time.monotonic()
    [done] = asked(teacher)
    gone.set()
    assert (done.text, done.finish_reason) == ("", "failed")
    assert len(endpoint.seen) == sft.COSTLY_TRIES
    assert "no whole reply within 0.4 s" in teacher.last_trouble
    assert time.monotonic() - began < 15  # three tries of 0.4 s, not of 30


def test_a_slow_reply_in_time_is_fine(engine):
    def slow(handler):
        time.sleep(0.3)
        say("late")(handler)

    teacher, _ = engine(lambda *_: slow)
    assert asked(teacher)[0].text == "late" and teacher.retries == 0


def test_tries_end(engine):
    teacher, endpoint = engine(lambda *_: write(500, ""))
    assert asked(teacher)[0].finish_reason == "failed"
    assert len(endpoint.seen) == sft.FREE_TRIES
    teacher, endpoint = engine(lambda *_: write(200, "{}"))
    assert asked(teacher)[0].finish_reason == "failed"
    assert len(endpoint.seen) == sft.COSTLY_TRIES


def test_backoff_doubles(engine):
    teacher, endpoint = engine(lambda n, _: "x" if n == 5 else write(503, ""), backoff_s=0.04)
    asked(teacher)
    times = [seen[0] for seen in endpoint.seen]
    assert times[5] - times[4] > 0.9 * 0.5 * 16 * 0.04  # the fifth wait, at least half of it


def test_nobody_there(engine, serve):
    endpoint = serve(lambda *_: "x")
    endpoint.shutdown()
    endpoint.server_close()
    teacher, _ = engine(endpoint)
    assert asked(teacher)[0].finish_reason == "failed"
    assert "no connection" in teacher.last_trouble and teacher.requests == sft.FREE_TRIES


def test_an_endpoint_that_is_down_ends_the_start(engine):
    """Five calls in a row without a reply; one reply between them starts the count again."""
    bad = {"n": 0}

    def script(number, body):
        bad["n"] += 1
        return "x" if bad["n"] == 4 * sft.COSTLY_TRIES + 1 else write(200, "")

    teacher, _ = engine(script)
    with pytest.raises(TeacherError, match=r"5 calls in a row got no reply \(a reply that is no"):
        asked(teacher, 20)
    assert 0 <= teacher.requests - (9 * sft.COSTLY_TRIES + 1) <= 2  # the thread is a bit ahead
    teacher.cancel_all()
    assert teacher.pending() == 0


@pytest.mark.parametrize(
    "status, hint",
    [
        (400, "--teacher"),
        (401, "--key-variable"),
        (402, "topped up"),
        (403, "--key-variable"),
        (404, "--endpoint"),
        (405, "--teacher"),
        (301, "has moved"),
        (307, "has moved"),
    ],
)
def test_what_no_second_try_mends(engine, serve, status, hint):
    """One clear line at once, without the key that the endpoint repeats; no redirect takes it."""
    elsewhere = serve(lambda *_: "stolen")
    said = f"bad key\n\x1b[31m {KEY}" + "x" * 999
    error = json.dumps({"error": {"message": said}})
    headers = {"Location": elsewhere.url + "/v1/chat/completions"}
    teacher, endpoint = engine(lambda *_: write(status, error, headers), key=KEY)
    with pytest.raises(TeacherError, match=hint) as caught:
        asked(teacher, 3)
    line = str(caught.value)
    assert line.startswith(f"HTTP {status} bad key  [31m [key]xxx") and KEY not in line
    assert "\n" not in line and "\x1b" not in line and len(line) < 400
    time.sleep(0.1)
    assert len(endpoint.seen) <= 3 and not elsewhere.seen


@pytest.mark.parametrize(
    "answer",
    [
        write(400, '{"error": {"message": "x", "code": "context_length_exceeded"}}'),
        write(400, "This model's maximum context length is 4096 tokens"),
        write(400, '{"error": {"message": "Content Exists Risk"}}'),
        write(413, "the prompt is too long"),
        say("half", "content_filter"),
    ],
)
def test_a_prompt_that_is_refused_is_not_tried_again(engine, answer):
    teacher, endpoint = engine(lambda *_: answer)
    [done] = asked(teacher)
    assert (done.text, done.finish_reason, len(endpoint.seen)) == ("", "refused", 1)


def test_no_request_beyond_the_budget(engine):
    """Four threads, and retries count: the endpoint sees 5 requests, not one more."""
    teacher, endpoint = engine(
        lambda number, body: write(500, "") if number % 2 else "x", concurrency=4, max_requests=5
    )
    with pytest.raises(BudgetSpent, match="5 requests are sent"):
        asked(teacher, 20)
    time.sleep(0.1)
    assert len(endpoint.seen) == teacher.requests == 5


def test_the_budget_of_tokens(engine):
    teacher, endpoint = engine(lambda *_: "x", max_tokens=25)  # 10 a reply
    with pytest.raises(BudgetSpent, match="30 tokens are used"):
        asked(teacher, 9)
    assert len(endpoint.seen) == 3
    teacher, _ = engine(lambda *_: say("x", usage={"prompt_tokens": "7"}), max_tokens=25)
    with pytest.raises(TeacherError, match="no usage of tokens: bound --max-calls"):
        asked(teacher)


def test_broken_replies_count_their_tokens(engine):
    teacher, _ = engine(lambda n, _: say("" if n == 0 else "x"))
    asked(teacher)
    assert teacher.tokens == 20


def test_concurrency_is_bounded_and_reached(engine):
    """Three at a time: each waits until three are there, and a fourth would be counted."""
    three = threading.Barrier(3, timeout=60)

    def together(handler):
        three.wait()
        say("x")(handler)

    teacher, endpoint = engine(lambda *_: together, concurrency=3)
    asked(teacher, 9)
    assert endpoint.most == 3


def test_cancelled_calls_never_come_out(engine):
    go = threading.Event()

    def slow(handler):
        go.wait(10)
        say("old")(handler)

    teacher, _ = engine(lambda number, _: slow if number == 0 else "new")
    for key in "ab":
        teacher.submit(key, ASK, max_tokens=9, temperature=1, seed=0)
    assert (teacher.step(), teacher.pending()) == ([], 2)
    teacher.cancel_all()
    teacher.submit("c", ASK, max_tokens=9, temperature=1, seed=0)
    go.set()
    done = []
    while teacher.pending():
        done += teacher.step()
    assert [(each.key, each.text) for each in done] == [("c", "new")]
    assert teacher.step() == []


def test_a_fault_of_ours_is_no_hang(engine, monkeypatch):
    told = []
    monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_type))
    teacher, _ = engine(lambda *_: "x")
    monkeypatch.setattr(teacher, "_ask", lambda call: 1 / 0)
    with pytest.raises(RuntimeError, match="thread of ApiEngine died"):
        asked(teacher)
    teacher._threads[0].join(10)
    assert told == [ZeroDivisionError]


@pytest.mark.parametrize(
    "url",
    ["", "api.x.org", "ftp://x.org", "file:///etc/passwd", "http://", "http://x.org:port"]
    + ["https://u:secret@x.org", "https://x.org/v1?key=secret", "http://x.org/ v1", "http://ü.org"],
)
def test_bad_addresses(url):
    with pytest.raises(DataError, match="--endpoint: give http") as caught:
        sft.chat_url(url)
    assert "secret" not in str(caught.value)


# --- which calls are kept


def call(role, text, reason="stop"):
    return Call(role, role, [{"role": "user", "content": role}], text, None, None, None, reason)


def task_of(name, *executions):
    """A task with one design; executions are (reward, its calls)."""
    runs = [Execution("a", calls, reward, "ok") for reward, calls in executions]
    task = sft.Task(name, "math", "q", answer="1", source="s")
    return Rollout(task, [Design("d", "single", None, call("designer", f"D{name}"), runs)])


@pytest.mark.parametrize(
    "reward, calls, kept",
    [
        (1.0, [call("executor", "x"), call("executor", "y")], ["Dt", "x", "y"]),
        (0.0, [call("executor", "x")], []),
        (0.5, [call("executor", "x")], []),
        (1.0, [call("executor", "x"), call("executor", "y", "length")], ["Dt", "x"]),
        (1.0, [call("executor", "x"), call("executor", "")], ["Dt", "x"]),
        (1.0, [call("executor", "x"), call("executor", "", "refused")], []),
        (1.0, [call("executor", "x"), call("executor", "", "failed")], []),
    ],
)
def test_only_correct_whole_traces(reward, calls, kept):
    rolled = task_of("t", (reward, calls))
    assert [row["response"] for row in sft.trace_rows(rolled, "T")] == kept
    assert [example.response for example in sft.examples_of([rolled])] == kept


# --- the file


def rows(*texts, role="executor"):
    return [{"role": role, "messages": ASK, "response": text} for text in texts]


GOALS = {"designer": 2, "executor": 99}


def responses(path):
    return [json.loads(line)["response"] for line in path.read_text().split("\n") if line]


def test_copies_and_surplus_are_not_written(tmp_path):
    path = tmp_path / "t.jsonl"
    with TraceFile(path, GOALS) as file:
        file.add(sft.Task("1", "math", "q"), rows("a", "a", "b") + rows("d1", role="designer"))
        file.add(sft.Task("2", "math", "q"), rows("b", "c") + rows("d2", "d3", role="designer"))
        assert file.counts == {"executor": 3, "designer": 2} and not file.full()
    with TraceFile(path, GOALS | {"executor": 3}) as file:
        assert file.full() and file.done == {"1", "2"}
        file.add(sft.Task("3", "math", "q"), rows("c", "e"))
    assert responses(path) == ["a", "b", "d1", "c", "d2"]
    with TraceFile(path, GOALS) as file:
        file.add(sft.Task("4", "math", "q"), rows("a", "f", "\u2028\x85 é"))
    assert responses(path)[5:] == ["f", "\u2028\x85 é"]
    assert [example.response for example in read_examples(path)] == responses(path)


def test_every_torn_tail_is_mended(tmp_path):
    """Cut FILE or FILE.done anywhere: what is done has its rows, whole and once; the rest is gone.

    That is what a kill -9 can leave: rows are written before the line that says they are done.
    """
    whole = tmp_path / "whole.jsonl"
    texts = {"1": ["a", "b"], "2": [], "3": ["c"]}
    with TraceFile(whole, GOALS) as file:
        for name, given in texts.items():
            file.add(sft.Task(name, "math", "q"), rows(*given))
    data, done = whole.read_bytes(), Path(f"{whole}.done").read_bytes()
    path = tmp_path / "torn.jsonl"
    cuts = [(i, len(done)) for i in range(0, len(data), 3)] + [(len(data), 0), (len(data), 1)]
    cuts += [(len(data), j) for j in range(0, len(done) + 1, 3)]
    for data_end, done_end in cuts:
        path.write_bytes(data[:data_end])
        Path(f"{path}.done").write_bytes(done[:done_end])
        with TraceFile(path, GOALS) as file:
            finished = sorted(file.done)
            assert finished == sorted(texts)[: len(finished)]
            assert responses(path) == [text for name in finished for text in texts[name]]
            for name in sorted(texts)[len(finished) :]:
                file.add(sft.Task(name, "math", "q"), rows(*texts[name]))
        assert path.read_bytes() == data and Path(f"{path}.done").read_bytes() == done


def test_files_that_are_not_ours_are_left_alone(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("precious\n")
    with pytest.raises(DataError, match="is there without"):
        TraceFile(path, GOALS)
    path.unlink()
    with TraceFile(path, GOALS) as file:
        file.add(sft.Task("1", "math", "q"), rows("abc", "d"))
        with pytest.raises(DataError, match="another process writes"):
            TraceFile(path, GOALS)
    edited = path.read_text() + "x\n"
    path.write_text(edited[2:])
    with pytest.raises(DataError, match="was edited"):
        TraceFile(path, GOALS)
    assert path.read_text() == edited[2:]
    Path(f"{path}.done").write_text("1\n")
    with pytest.raises(DataError, match="was edited"):
        TraceFile(path, GOALS)


# --- the command

SUM = re.compile(r"What is (\d+) \+ (\d+)\?")
HEAD = "from workflow import AgentNode, EnsembleNode, ReflectionNode, Workflow\nw = Workflow('w')\n"
RUN = "\nprint(w.run(question).content)\n"
DESIGNS = [
    "w.add_node(AgentNode('solver', 'Solve.'))",
    "w.add_node(EnsembleNode('e', [AgentNode('solver', 'Solve.') for _ in range(2)]))",
    "w.add_node(ReflectionNode('r', AgentNode('solver', 'Solve.'), "
    "critic_agent=AgentNode('critic', 'Check.')))",
]
STRUCTURES = ["single", "ensemble", "reflection"]


def solves(a, b):
    """Which sums the scripted teacher knows; of the others it is one off."""
    return (a + b) % 4 != 3


def teacher(number, body):
    """The scripted teacher: the design depends on a, the answer on a + b, and on nothing else."""
    system, user = (message["content"] for message in body["messages"])
    a, b = map(int, SUM.search(user).groups())
    if "AgentNode" in system:
        return f"<think>a sum</think><code>\n```python\n{HEAD}{DESIGNS[a % 3]}{RUN}```\n</code>"
    if system == "Check.":
        return "VERDICT: CORRECT"
    return rf"{a} + {b} = \boxed{{{a + b + (not solves(a, b))}}}"


PAIRS = [(a, b) for a in range(4) for b in range(5, 8)]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "sums.jsonl"
    made = [{"problem": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in PAIRS]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def expected():
    """(designer examples, executor examples) of all the sums."""
    known = [(a, b) for a, b in PAIRS if solves(a, b)]
    # An ensemble's two agents say the same to the same prompt: one example; a critic is another.
    return len(known), sum([1, 1, 2][a % 3] for a, b in known)


def arguments(endpoint, data, out, *more):
    line = ["collect", "--endpoint", endpoint.url, "--teacher", "t", "--data", data, "--out", out]
    return [*map(str, line), "--exclude", "", "--isolation", "best", *map(str, more)]


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def test_full_circle(serve, data, tmp_path, monkeypatch, capsys):
    """From an endpoint, with a 429 first, to ids that the trainer takes; the key stays in RAM."""
    monkeypatch.setenv("MY_KEY", KEY)
    out = tmp_path / "traces.jsonl"
    once = write(429, KEY, {"Retry-After": "0"})
    endpoint = serve(lambda n, body: once if n == 0 else teacher(n, body))
    assert sft.main(arguments(endpoint, data, out, "--key-variable", "MY_KEY")) == 0
    said = capsys.readouterr()
    assert "the tasks are used up" in said.out and "1 retries (last: HTTP 429 [key])" in said.err
    assert {seen[2]["Authorization"] for seen in endpoint.seen} == {f"Bearer {KEY}"}
    written = "".join(path.read_text() for path in tmp_path.iterdir())
    assert KEY not in written + said.out + said.err

    found = lines(out)
    by_role = {r: [row for row in found if row["role"] == r] for r in ("designer", "executor")}
    assert tuple(map(len, by_role.values())) == expected()
    for row in found:
        a, b = map(int, SUM.search(row["messages"][1]["content"]).groups())
        assert solves(a, b) and row["structure"] == STRUCTURES[a % 3]
        assert (row["source"], row["kind"], row["teacher"]) == ("sums", "math", "t")
        assert row["response"] == teacher(0, row)
    done = lines(f"{out}.done")
    assert sorted(row["task"] for row in done) == sorted(f"sums:{i + 1}" for i in range(len(PAIRS)))
    assert sum(row["kept"] for row in done) == len(found)
    assert {row["rewards"][0] for row in done} == {0.0, 1.0}

    examples = read_examples(out)
    _, tokenizer = random_tiny()
    encoded = encode(examples, tokenizer, max_context=100_000)
    assert [tokenizer.decode(e.output_ids, skip_special_tokens=True) for e in encoded] == [
        row["response"] for row in found
    ]
    prompts = [tokenizer.decode(e.prompt_ids) for e in encoded]
    assert all(row["messages"][1]["content"] in p for row, p in zip(found, prompts, strict=True))

    before = out.read_bytes(), len(endpoint.seen)
    assert sft.main(arguments(endpoint, data, out)) == 0  # nothing is left to do, or asked again
    assert (out.read_bytes(), len(endpoint.seen)) == before


def test_it_stops_at_the_amounts(serve, data, tmp_path, capsys):
    out = tmp_path / "t.jsonl"
    endpoint = serve(teacher)
    amounts = ("--designer-examples", 2, "--executor-examples", 4, "--concurrency", 1)
    assert sft.main(arguments(endpoint, data, out, *amounts)) == 0
    assert f"both amounts are reached; {out} has 2 designer and 4" in capsys.readouterr().out
    assert [row["role"] for row in lines(out)].count("designer") == 2 == len(lines(out)) - 4
    assert 2 <= len(lines(f"{out}.done")) < len(PAIRS)
    seen = len(endpoint.seen)
    assert sft.main(arguments(endpoint, data, out, *amounts)) == 0 and len(endpoint.seen) == seen


def test_out_of_budget_and_on(serve, data, tmp_path, capsys):
    """Also where the first requests of all tasks would use the budget up: begun tasks go first."""
    out = tmp_path / "t.jsonl"
    endpoint = serve(teacher)
    argv = arguments(endpoint, data, out, "--max-calls", len(PAIRS), "--concurrency", 2)
    for start in (1, 2):
        assert sft.main(argv) == 0
        assert f"the budget is spent, {len(PAIRS)} requests are sent" in capsys.readouterr().out
        assert len(endpoint.seen) == len(PAIRS) * start
        assert 0 < len(lines(f"{out}.done")) < len(PAIRS)


def test_tasks_without_a_reply_are_tried_again_by_the_next_start(
    serve, data, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sft, "FREE_TRIES", 2)
    out = tmp_path / "t.jsonl"
    endpoint = serve(
        lambda n, body: (
            write(500, "")
            if "What is 2 + 5?" in body["messages"][1]["content"]
            and body["messages"][0]["content"] == "Check."
            else teacher(n, body)
        )
    )
    assert sft.main(arguments(endpoint, data, out)) == 0
    assert "1 tasks got no reply: the next start tries them again" in capsys.readouterr().out
    assert len(lines(f"{out}.done")) == len(PAIRS) - 1
    assert "What is 2 + 5?" not in out.read_text()
    endpoint.script = teacher
    asked_before = len(endpoint.seen)
    assert sft.main(arguments(endpoint, data, out)) == 0
    assert len(endpoint.seen) == asked_before + 3  # designer, solver, critic of that task
    roles = [row["role"] for row in lines(out)]
    assert (roles.count("designer"), roles.count("executor")) == expected()


def test_evaluation_tasks_are_left_out(serve, data, tmp_path, capsys):
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"problem": "what is $3 + 6$ ?", "answer": "9"}\n')
    endpoint = serve(teacher)
    argv = arguments(endpoint, data, tmp_path / "t.jsonl")
    argv[argv.index("--exclude") + 1] = str(held_out)
    assert sft.main(argv) == 0
    assert "1 also in an evaluation set" in capsys.readouterr().err
    assert not any("3 + 6" in seen[3]["messages"][1]["content"] for seen in endpoint.seen)


def test_a_model_folder_as_teacher(data, tmp_path, capsys):
    """A random model designs nothing that runs: every task is done, and nothing is kept."""
    model, tokenizer = random_tiny(max_position_embeddings=8192)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    out = tmp_path / "t.jsonl"
    argv = ["collect", "--model", folder, "--data", data, "--out", out, "--max-tokens", 4]
    argv = [*map(str, argv), "--exclude", "", "--isolation", "best"]
    assert sft.main(argv) == 0
    assert f"used up, more --data brings more; {out} has 0 designer" in capsys.readouterr().out
    done = lines(f"{out}.done")
    assert {row["statuses"][0] for row in done} == {"invalid_design"} and len(done) == len(PAIRS)
    (folder / "model.safetensors").unlink()
    assert sft.main([*argv[:-4], "--out", str(tmp_path / "u"), *argv[-4:]]) == 2
    assert not (tmp_path / "u").exists()
    assert "has no weights" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "more, says",
    [
        ([], "give --endpoint URL"),
        (["--endpoint", "http://x", "--model", "m"], "give --endpoint URL"),
        (["--endpoint", "http://x"], "--teacher NAME"),
        (["--endpoint", "x", "--teacher", "t"], "--endpoint: give http"),
        (["--endpoint", "http://x", "--teacher", "t", "--key-variable", "NOPE"], "NOPE is not set"),
        (["--endpoint", "http://x", "--teacher", "t", "--key-variable", "ODD"], "odd characters"),
        (["--endpoint", "http://x", "--teacher", "t", "--request-fields", "[1]"], "one JSON"),
        (["--endpoint", "http://x", "--teacher", "t", "--request-fields", "{"], "no JSON"),
        (["--endpoint", "http://x", "--teacher", "t", "--max-calls", "0"], "--max-calls is 0"),
        (["--endpoint", "http://x", "--teacher", "t", "--timeout", "nan"], "--timeout is nan"),
        (["--endpoint", "http://x", "--teacher", "t", "--temperature", "-1"], "--temperature"),
        (["--model", "nowhere"], "no model folder nowhere"),
        (["--model", ".", "--max-calls", "9"], "--max-calls is for an --endpoint"),
        (["--model", ".", "--designer-prompt", "nowhere"], "can't be read"),
        (["--model", ".", "--data", "nowhere.jsonl", "--exclude", ""], "no such file"),
        (["--model", ".", "--exclude", "nowhere.jsonl"], "--exclude: no such file nowhere.jsonl"),
        (["--model", ".", "--out", "no/folder/t.jsonl"], "--out"),
        (["--model", ".", "--nonsense"], "unrecognized"),
    ],
)
def test_usage_errors_are_one_line(more, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ODD", "sk secret")
    try:
        code = sft.main(["collect", *more])
    except SystemExit as end:  # argparse's own
        code = end.code
    said = capsys.readouterr()
    assert code == 2 and says in said.err and "secret" not in said.err
    assert said.err.count("\n") == 1 and said.out == ""


# --- signals


def start(argv):
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENAI_API_KEY=KEY)
    environment["no_proxy"] = environment["NO_PROXY"] = "127.0.0.1"
    return subprocess.Popen(
        [sys.executable, str(ROOT / "sft.py"), *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def ended(process):
    try:
        return process.communicate(timeout=120)
    finally:
        process.kill()


def wait_until(happened, process):
    deadline = time.monotonic() + 120
    while not happened() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def test_kill_9_and_on(serve, data, tmp_path):
    """Killed in the middle, then started again: every task once, the same examples."""
    out = tmp_path / "t.jsonl"
    done = Path(f"{out}.done")

    def slow(number, body):
        time.sleep(0.1)
        return teacher(number, body)

    endpoint = serve(slow)
    argv = arguments(endpoint, data, out, "--concurrency", 1)
    process = start(argv)
    wait_until(lambda: done.exists() and done.read_bytes().count(b"\n") >= 3, process)
    process.send_signal(signal.SIGKILL)
    ended(process)
    assert 3 <= done.read_bytes().count(b"\n") < len(PAIRS)
    with out.open("a") as file:
        file.write('{"role": "executor", "mess')  # as if it had died in the middle of a line

    endpoint.script = teacher
    process = start(argv)
    printed, said = ended(process)
    assert process.returncode == 0, said
    assert "tasks are done, 26 bytes" in said
    tasks = [row["task"] for row in lines(done)]
    assert len(tasks) == len(set(tasks)) == len(PAIRS)
    roles = [row["role"] for row in lines(out)]
    assert (roles.count("designer"), roles.count("executor")) == expected()
    assert KEY not in printed + said + out.read_text() + done.read_text()


def test_ctrl_c_is_one_line_and_does_not_wait_for_replies(serve, data, tmp_path):
    out, never = tmp_path / "t.jsonl", threading.Event()
    done = Path(f"{out}.done")

    def script(number, body):
        if number > 12:
            never.wait(100)
        return teacher(number, body)

    endpoint = serve(script)
    process = start(arguments(endpoint, data, out, "--concurrency", 2))
    wait_until(lambda: endpoint.running == 2 and len(endpoint.seen) > 14, process)
    time.sleep(0.2)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    printed, said = ended(process)
    never.set()
    assert time.monotonic() - began < 30 and process.returncode == 130
    last = f"sft.py: stopped; {out} keeps what is done, the same command goes on"
    assert said.splitlines()[-1] == last and "Traceback" not in said and printed == ""
    assert said.count("\n") == 2  # the report of the data, and this
    assert lines(done) and len(lines(out)) == sum(row["kept"] for row in lines(done))


def test_a_model_folder_teaches_through_the_engine_that_is_chosen(monkeypatch):
    monkeypatch.setattr(sft, "choose_engine", lambda wanted, device: f"{wanted} on {device}")
    monkeypatch.setattr(sft, "open_engine", lambda folder, device, **more: (folder, device, more))
    monkeypatch.setattr(sft.torch.cuda, "is_available", lambda: True)
    args = sft.build_parser().parse_args(["collect", "--model", "m", "--concurrency", "3"])
    opened = sft.open_teacher(args)
    assert opened == ("m", "cuda", {"kind": "auto on cuda", "max_batch": 3})
