"""demo.py: what is drawn is what happened, nobody's text becomes markup, the server refuses others.

Scripts run in the real sandbox, requests go over real HTTP on 127.0.0.1. The last test drives a
headless chromium where there is one.
"""

import contextlib
import http.client
import json
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import demo
import design
import sandbox
import toy
from data import Task
from demo import LiveCall, LiveRun, Site, UsageError
from engine import ScriptedEngine, TorchEngine, random_tiny

REPO = Path(__file__).resolve().parents[1]
HOSTILE = [
    "</script><script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>",
    "</pre></textarea></style><iframe src=https://example.org></iframe><!--",
    "javascript:alert(1)//{0}{x}&lt;&amp;%3Cscript%3E",
    "W" * 300,
    "zero\x00 escape\x1b[2J rtl\u202e\u2066 \u00e9\U0001f642 \u4f60\u597d",
]
HEAD = "from workflow import AgentNode, DebateNode, EnsembleNode, ReflectionNode, Workflow\n"
NESTED = (
    HEAD
    + """
def agent(name):
    return AgentNode(name=name, system_prompt=name)

chains = [Workflow(name=side).add_nodes([agent("plan " + side), agent("solve " + side)])
          for side in ("left", "right")]
checked = ReflectionNode("review", agent("third"), critic_agent=agent("critic"), num_iterations=1)
team = EnsembleNode("vote", [*chains, checked], consensus_agent=agent("judge"))
debate = DebateNode("debate", [agent("pro"), agent("con")], num_rounds=2)
workflow = Workflow(name="all").add_nodes([team, debate, agent("last")])
print(workflow.run(question).content)
"""
)
VOTE = (
    HEAD
    + """
solvers = [AgentNode(name=name, system_prompt=name) for name in ("a", "b", "c")]
print(Workflow(name="w").add_node(EnsembleNode("vote", solvers)).run(question).content)
"""
)


@pytest.fixture(scope="module")
def pool():
    sandbox.configure("best")
    workflow = (REPO / "workflow.py").read_text()
    with sandbox.ScriptPool({"workflow": workflow}, max_live=1) as scripts:
        yield scripts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a random model that is sampled as the toy is."""
    folder = tmp_path_factory.mktemp("run") / "final"
    model, tokenizer = random_tiny()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"preset": "toy", "isolation": "best", "max_context": 512}
    settings |= {"designer_max_tokens": 8, "executor_max_tokens": 8}
    (folder / "run_config.json").write_text(json.dumps(settings))
    return folder


def play(pool, script, reply=lambda key, messages, seed: messages[0]["content"], **more):
    """(the live run at its end, the turns that its events told)."""
    told = []

    def show(live, event):
        told[:] = [call.turn for call in live.calls]

    options = {"scripts": [script]} if script else {}
    live = LiveRun(more.pop("task", Task("t", "math", "3*4?")), **more)
    live.play(ScriptedEngine(reply), pool, show, **options)
    return live, told


def live_call(agent, turn, prompt, reply, role="user"):
    messages = [{"role": role, "content": prompt}]
    return LiveCall("executor", agent, messages, turn, 0.0, 1.0, reply)


class Parsed(HTMLParser):
    """The tags with their attributes, and all text outside of <style> and <title>."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self.inside = [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        self.inside.append("/" + tag)

    def handle_data(self, text):
        if self.inside[-1:] not in (["style"], ["title"]):
            self.text += text


def assert_harmless(text, scripts=0):
    """No element that runs or loads anything, no handler, no address but a place on the page."""
    parsed = Parsed(text)
    names = [tag for tag, _ in parsed.tags]
    assert names.count("script") == scripts
    assert not {"img", "iframe", "link", "object", "base", "embed"} & set(names)
    for _, attributes in parsed.tags:
        assert not [key for key in attributes if key.startswith("on") or key == "src"]
        assert re.fullmatch(r"#call-\d+", attributes.get("href", "#call-1"))
    return parsed


def svgs(text):
    return [ElementTree.fromstring(each) for each in re.findall(r"<svg.*?</svg>", text, re.S)]


def named(svg, path, **attributes):
    found = svg.iter(path)
    return [x for x in found if all(x.get(k.rstrip("_")) == v for k, v in attributes.items())]


# --- what happened


def test_turns_and_arrows_of_a_nested_design(pool):
    """Worked by hand. Ensemble of two chains and a review, then a debate, then one agent."""
    live, told = play(pool, NESTED, lambda key, m, seed: f"{m[0]['content']} {key}: INCORRECT")
    names = "plan left, plan right, third, solve left, solve right, critic, third, judge"
    names += ", pro, con, pro, con, pro, last"
    assert [call.agent for call in live.calls] == names.split(", ")
    turns = [0, 0, 0, 1, 1, 1, 2, 3, 4, 4, 5, 5, 6, 7]
    assert told == turns == [call.call.turn for call in live.calls]
    arrows = [set(), set(), set(), {0}, {1}, {2}, {5}, {3, 4, 6}]
    arrows += [{7}, {7}, {8, 9}, {8, 9}, {10, 11}, {12}]
    assert demo.flows(live.calls, "3*4?") == arrows
    assert (live.status, live.structure) == ("ok", "mixed")


def test_a_vote_is_dashed_for_who_lost(pool):
    replies = {"a": r"\boxed{1}", "b": r"\boxed{2}", "c": r"\boxed{1}"}
    live, told = play(pool, VOTE, lambda key, messages, seed: replies[messages[0]["content"]])
    assert told == [0, 0, 0] and live.answer == r"\boxed{1}"
    (graph,) = svgs(demo.graph_svg(live, {"a": 0, "b": 1, "c": 2}))
    assert len(named(graph, "path", class_="edge")) == 3 + 2  # from the question; a and c
    [dashed] = named(graph, "path", class_="edge count")
    places = [a.find("g").get("transform") for a in graph.iter("a")]
    places = [re.fullmatch(r"translate\((\S+) (\S+)\)", place).groups() for place in places]
    assert dashed.get("d").startswith(f"M{float(places[1][0]):.0f},")  # from b
    assert len({x for x, _ in places}) == 3 and len({y for _, y in places}) == 1  # side by side
    assert [a.get("href") for a in graph.iter("a")] == ["#call-1", "#call-2", "#call-3"]


def test_arrows_need_the_reply_itself():
    first = live_call("a", 0, "q\n7", "7")
    same_turn = live_call("b", 0, "q\n\n[a]\n7", "x")
    inside_a_word = live_call("c", 1, "q\n17 and 77", "")
    in_the_question = live_call("d", 1, "q\n7\n\n[e]\n8", "")
    quoted = live_call("f", 1, "q\n7\n\n[a]\n7", "")
    calls = [first, same_turn, inside_a_word, in_the_question, quoted]
    assert demo.flows(calls, "q\n7") == [set(), set(), set(), set(), {0}]


def test_of_equal_replies_the_named_or_the_latest_counts():
    calls = [live_call("a", 0, "q", "7"), live_call("b", 0, "q", "7"), live_call("c", 1, "q", "7")]
    asked = live_call("d", 2, "q\n\n[b]\n7", "")
    template = live_call("d", 2, "Proposed answer:\n7\n\nCheck it.", "")
    assert demo.flows([*calls, asked], "q")[3] == {1}
    assert demo.flows([*calls, template], "q")[3] == {2}


def test_a_tool_turn_is_an_arrow_from_the_agent_to_itself():
    call = live_call("a", 0, "q", "<think>hm</think><python>print(1)</python>\nthen more")
    again = live_call("a", 1, "q", "1")
    again.messages.append({"role": "assistant", "content": "<python>print(1)</python>"})
    again.messages.append({"role": "user", "content": "Output:\n1\n"})
    assert demo.flows([call, again], "q") == [set(), {0}]


@pytest.mark.parametrize(
    "script, status",
    [
        (HEAD + 'Workflow().add_node(AgentNode("a", "a")).run(question)\nraise ValueError("x")',
         "crashed"),
        ("print(", "invalid_design"),
        (HEAD + 'if 0: Workflow().add_node(AgentNode("a", "a")).run(question)', "no_call"),
    ],
)  # fmt: skip
def test_a_failed_run_is_a_page_too(pool, script, status, capsys):
    live, _ = play(pool, script, graded=True)
    assert live.status == status
    text = assert_harmless(demo.page("x", demo.run_html(live))).text
    assert status in text and (live.error or "") in text and "reward 0" in text
    demo.print_end(live)
    assert status in capsys.readouterr().out


def test_a_refused_design_shows_its_reply(pool):
    live, _ = play(pool, None, lambda *_: "I would rather not.")
    text = Parsed(demo.run_html(live)).text
    assert live.status == "invalid_design" and "I would rather not." in text


def test_the_terminal_shows_the_tree(pool, capsys):
    live = LiveRun(Task("t", "math", "3*4?"))
    engine = ScriptedEngine(lambda key, messages, seed: "x\x1b[2J\n" * 20)
    live.play(engine, pool, demo.print_event, scripts=[VOTE])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "design: ensemble"
    assert [line for line in lines if "turn" in line] == ["├─ turn 1"]
    asked = [line[-10:] for line in lines if line.endswith("is asked")]
    assert asked == ["a is asked", "b is asked", "c is asked"]
    assert lines.count("│   │      x\\x1b[2J") == 3 * demo.SHOWN_LINES
    assert lines.count("│   │      ... 8 more lines") == 3


# --- pages


def hostile_run():
    """A run in which everything that can be anybody's text is hostile."""
    joined = "\n".join(["", *HOSTILE])
    script = f"# {HOSTILE[0]}\nname = {joined!r}\n{joined}"
    run = LiveRun(Task("t", "math", joined, answer=joined), joined, joined, graded=True)
    run.script, run.structure, run.error, run.answer = script, joined, joined, joined
    run.status, run.reward = joined, 0.0
    run.calls = [live_call(text, i, joined, joined) for i, text in enumerate(HOSTILE)]
    run.designed = LiveCall("designer", joined, run.calls[0].messages, 0, 0.0, 1.0, joined)
    return run


def test_nobodys_text_becomes_markup():
    text = demo.page(HOSTILE[0], demo.run_html(hostile_run()))
    parsed = assert_harmless(text)
    for line in HOSTILE[:-1]:
        # question, answer, gold, status, error, label, model, structure; 6 calls and the designer
        assert parsed.text.count(line) >= 8 + 2 * 7
    assert r"zero\x00 escape\x1b[2J rtl\u202e\u2066 é🙂 你好" in parsed.text
    assert not re.search("[\x00\x1b\u202e\u2066]", text)
    assert any("default-src 'none'" in a.get("content", "") for _, a in parsed.tags)
    assert "http" not in re.sub("https://example.org|http-equiv", "", text)


def test_attributes_cannot_be_left():
    call = live_call("x", 0, "q", HOSTILE[1])
    for text in HOSTILE:
        made = demo.tag("g", class_=text, id=text)
        [(name, attributes)] = Parsed(made).tags
        assert name == "g" and attributes == {"class": demo.seen(text), "id": demo.seen(text)}
    assert "<img" not in demo.reply_html(call, None)


SOURCES = [
    *design.SCRIPTS.values(),
    *toy.SCRIPTS.values(),
    NESTED,
    "x = f\"{{a}} {b!r:>{w}} {f'{c}'}\" # {{x}}\ny = rb\"\\x00\" '''a\n{b}'''\n",
    "\n\n  leading = 1\n",
    "if 1:\n\tx = 'é🙂你' ; y = \"<b>\"\r\nz\x0c = 1 # \u2028 run",
    "unfinished = '''",
    '"' + "\\\\" * 20_000,  # no end, and nothing to go back for
    '"' + '\\"' * 20_000 + "\\",
    "a\x00b",
    "  bad\n indent $ ? !",
    "",
    *HOSTILE,
]


@pytest.mark.parametrize("source", SOURCES)
def test_highlighting_only_adds_marks(source):
    """The text of a highlighted script is the script; what is marked is nothing but marks."""
    marked = demo.highlight(source)
    assert Parsed(marked).text == demo.seen(source)
    assert {tag for tag, _ in Parsed(marked).tags} <= {"b", "em", "i", "q"}


def test_highlighting_finds_the_structure():
    marked = demo.highlight(design.SCRIPTS["debate"])
    assert "<b>DebateNode</b>" in marked and "<b>add_node</b>" in marked
    assert "<em>import</em>" in marked
    assert "<em>import</em>" in demo.highlight("x = 1 # \u2028 \x0c\nimport a\n")


def test_pieces_are_tokens_and_whole_characters():
    _, tokenizer = random_tiny()
    text = "a é🙂b"
    ids = tokenizer.encode(text) + [tokenizer.eos_token_id]
    logps = [-(i + 1) / 8 for i in range(len(ids))]
    pieces = demo.token_pieces(tokenizer, ids, logps)
    want = [("a", 1), (" ", 1), ("é", 2), ("🙂", 4), ("b", 1), ("<|im_end|>", 1)]
    assert [(text, n) for text, n, _ in pieces] == want
    assert [logp for _, _, logp in pieces] == [-1 / 8, -2 / 8, -7 / 8, -26 / 8, -9 / 8, -10 / 8]


def test_pieces_of_broken_bytes_lose_no_token():
    _, tokenizer = random_tiny()
    ids = [i % 256 for i in range(0, 7 * 256, 7)]
    pieces = demo.token_pieces(tokenizer, ids, [-1.0] * len(ids))
    assert sum(n for _, n, _ in pieces) == len(ids)
    assert math.fsum(logp for *_, logp in pieces) == -len(ids)
    assert "".join(text for text, _, _ in pieces) == tokenizer.decode(ids)


def test_pieces_keep_the_spaces_that_a_tokenizer_drops_in_front():
    class Words:
        def decode(self, ids, **_):
            return " ".join(f"w{i}" for i in ids)

    pieces = demo.token_pieces(Words(), [1, 2, 3], [0.0, -1.0, -2.0])
    assert [text for text, _, _ in pieces] == ["w1", " w2", " w3"]


def test_a_page_shades_what_the_engine_drew(pool):
    """Ids and log-probs of a real model: the shades are those of its own numbers."""
    torch.manual_seed(0)
    engine = TorchEngine(*random_tiny())
    live = LiveRun(Task("t", "math", "3*4?"))
    live.play(engine, pool, lambda *_: None, scripts=[VOTE], executor_max_tokens=6)
    page = demo.run_html(live)
    spans = [
        a for tag, a in Parsed(page).tags if tag == "span" and "log-prob" in a.get("title", "")
    ]
    shown = [float(a["title"].rsplit(" ", 1)[1]) for a in spans]
    drawn = [logp for call in live.calls for logp in call.call.logp_sampler]
    assert math.fsum(shown) == pytest.approx(math.fsum(drawn), abs=0.02)
    for attributes, logp in zip(spans, shown, strict=True):
        assert attributes["class"] == f"s{sum(-logp >= x for x in (0.1, 0.5, 1, 2, 4))}"
    assert f"{len(drawn)} tokens" in live.figures()
    assert sum(int(a["title"].split()[0]) for a in spans) == len(drawn)


def test_a_running_page_shows_what_is_open():
    run = LiveRun(Task("t", "math", "q"))
    run.calls = [live_call("a", 0, "q", "done"), live_call("b", 0, "q", "")]
    run.calls[1].ended = None
    page = demo.run_html(run)
    (graph,) = [svg for svg in svgs(page) if list(svg.iter("a"))]
    waiting = named(graph, "rect", class_="node wait")
    assert len(waiting) == 2  # b and the answer
    assert page.count("<pre>") == 1 + 1 + 2  # the question, a's reply, two prompts
    assert "running" in Parsed(page).text and "Answer" not in Parsed(page).text


# --- tasks and models


def test_rows_count_as_lines_do(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = '{{"question": "q{0}", "answer": "{0}"}}'
    file.write_text(f"{row.format(1)}\n\nnot json\n{row.format(4)}\n")
    assert demo.read_task(f"{file}:1", 0).question == "q1"
    task = demo.read_task(f"{file}:4", 0)
    assert (task.question, task.answer, task.source) == ("q4", "4", "rows")
    for bad in (2, 3, 5):
        with pytest.raises(UsageError) as caught:
            demo.read_task(f"{file}:{bad}", 0)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_rows_of_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    file = tmp_path / "rows.parquet"
    table = {"question": ["q1", "q2"], "answer": ["1", "2"]}
    parquet.write_table(pyarrow.table(table), file)
    assert demo.read_task(f"{file}:2", 0).question == "q2"
    with pytest.raises(UsageError):
        demo.read_task(f"{file}:3", 0)


def test_rows_of_the_toy_are_those_of_evaluation():
    tasks = toy.make_tasks(512, "5 eval", held_out=True)
    assert demo.read_task("toy:7", 5) == tasks[6]


def test_the_newest_finished_toy_run_is_taken(tmp_path):
    def make(name, age, **settings):
        (tmp_path / name / "final").mkdir(parents=True)
        (tmp_path / name / "final/run_config.json").write_text(json.dumps(settings))
        (tmp_path / name / "table.md").write_text("x")
        os.utime(tmp_path / name / "table.md", (age, age))

    with pytest.raises(UsageError, match="no finished toy run"):
        demo.newest_toy_run(tmp_path)
    make("old", 1000, preset="toy")
    make("new", 3000, preset="toy")
    make("other", 4000, preset="qwen3-4b")
    make("data", 5000, preset="toy", data="rows.jsonl")
    make("unfinished", 6000, preset="toy")
    (tmp_path / "unfinished/table.md").unlink()
    assert demo.newest_toy_run(tmp_path) == tmp_path / "new/final"


# --- the command


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "--question"),
        (["--question", "q", "--serve"], "not allowed"),
        (["--question", " "], "empty"),
        (["--question", "q"], "python train.py"),
        (["--question", "q", "--port", "80"], "does not read --port"),
        (["--serve", "--html", "x.html"], "does not read --html"),
        (["--report", "runs/none"], "no run folder"),
        (["--report", ""], "no run folder"),
        (["--report", "x", "--model", "m"], "does not read --model"),
        (["--question", "q", "--html", "no/such/x.html"], "--html"),
        (["--serve", "--port", "70000"], "--port"),
        (["--question", "q", "--model", "no/such/folder"], "no model folder"),
        (["--question", "q", "--system", "single", "--designer-prompt", "x"], "no designer"),
        (["--task", "toy:513", "--model", "{tiny}"], "1 to 512"),
        (["--task", "", "--model", "{tiny}"], "FILE:ROW"),
        (["--task", "none.jsonl:1", "--model", "{tiny}"], "no such file"),
        (["--question", "q", "--system", "choir", "--model", "{tiny}"], "unknown system"),
        (["--question", "q", "--system", "vote:calls", "--model", "{tiny}"], "many runs"),
        (["--question", "q", "--quest"], "unrecognized"),
    ],
)
def test_errors_are_one_line(arguments, says, tmp_path, tiny, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = demo.main([word.format(tiny=tiny) for word in arguments])
    except SystemExit as left:
        status = left.code
    said = capsys.readouterr()
    assert status == 2 and says in said.err
    assert len([line for line in said.err.splitlines() if not line.startswith("model:")]) == 1


def test_the_command_writes_one_page(tiny, tmp_path, monkeypatch, capsys):
    run = tmp_path / "runs/tiny"
    shutil.copytree(tiny, run / "final")
    (run / "table.md").write_text("")
    monkeypatch.chdir(tmp_path)
    arguments = ["--task", "toy:1", "--system", "structure:ensemble", "--html", "out.html"]
    assert demo.main(arguments) == 0
    said = capsys.readouterr()
    assert "model: runs/tiny/final" in said.err
    assert "turn 1" in said.out and "out.html" in said.out
    assert re.search(
        r"^ensemble, ok, 3 calls, \d+ tokens, reward [01], \d+\.\d\d s$", said.out, re.M
    )
    parsed = assert_harmless((tmp_path / "out.html").read_text())
    task = toy.make_tasks(1, "0 eval", held_out=True)[0]
    assert task.question in parsed.text and f"gold: {task.answer}" in parsed.text


# --- the server


@contextlib.contextmanager
def serving():
    site = Site(0, "say <b>")
    thread = threading.Thread(target=site.serve_forever, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.shutdown()
        site.server_close()
        thread.join()


@pytest.fixture()
def site():
    with serving() as running:
        yield running


def request(port, method, path, body=None, headers=(), host="127.0.0.1"):
    """(status, text, headers) of a request with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    given = {"Host": f"{host}:{port}"} | dict(headers)
    if body is not None and "Content-Length" not in given:
        given["Content-Length"] = str(len(body))
    for name, value in given.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, answer.headers


ASK = json.dumps({"question": "3*4?", "kind": "math"}).encode()
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "method, path, body, headers, status",
    [
        ("GET", "/", None, {}, 200),
        ("GET", "/", None, {"Sec-Fetch-Site": "none"}, 200),
        ("GET", "/", None, {"Host": "localhost:9000"}, 200),  # a tunnel's port
        ("GET", "/", None, {"Host": "rebound.example.org"}, 403),
        ("GET", "/", None, {"Host": "127.0.0.1.example.org"}, 403),
        ("GET", "/", None, {"Host": "localhost@example.org"}, 403),
        ("GET", "/", None, {"Host": None}, 403),
        ("GET", "/", None, {"Sec-Fetch-Site": "cross-site"}, 403),
        ("GET", "/view", None, {"Sec-Fetch-Site": "same-site"}, 403),
        ("GET", "/view", None, {"Origin": "http://localhost:1"}, 403),
        ("GET", "/../demo.py", None, {}, 404),
        ("GET", "/?file=/etc/passwd", None, {}, 404),
        ("GET", "/ask", None, {}, 404),
        ("POST", "/ask", ASK, JSON, 202),
        ("POST", "/ask", ASK, JSON | {"Origin": "SELF", "Sec-Fetch-Site": "same-origin"}, 202),
        ("POST", "/ask", ASK, JSON | {"Origin": "http://example.org"}, 403),
        ("POST", "/ask", ASK, JSON | {"Origin": "null"}, 403),
        ("POST", "/ask", ASK, JSON | {"Host": "example.org", "Origin": "http://example.org"}, 403),
        ("POST", "/ask", ASK, {"Content-Type": "text/plain"}, 415),
        ("POST", "/ask", ASK, {}, 415),
        ("POST", "/ask", ASK, JSON | {"Content-Length": None}, 411),
        ("POST", "/ask", None, JSON | {"Content-Length": "-1"}, 411),
        ("POST", "/ask", None, JSON | {"Content-Length": "131073"}, 413),
        ("POST", "/ask", None, JSON | {"Transfer-Encoding": "chunked"}, 411),
        ("POST", "/ask", ASK, JSON | {"Transfer-Encoding": "chunked"}, 411),
        ("POST", "/", ASK, JSON, 404),
        ("PUT", "/ask", ASK, JSON, 501),
        ("OPTIONS", "/ask", None, {"Origin": "http://example.org"}, 501),
        ("POST", "/ask", b"{", JSON, 400),
        ("POST", "/ask", b"[" * 100_000, JSON, 400),
        ("POST", "/ask", b"\xff\xfe", JSON, 400),
        ("POST", "/ask", b'["question", "kind"]', JSON, 400),
        ("POST", "/ask", b'{"question": "q"}', JSON, 400),
        ("POST", "/ask", b'{"question": "q", "kind": "math", "model": "/etc"}', JSON, 400),
        ("POST", "/ask", b'{"question": "q", "kind": "../x"}', JSON, 400),
        ("POST", "/ask", b'{"question": 7, "kind": "math"}', JSON, 400),
        ("POST", "/ask", b'{"question": "q", "kind": ["math"]}', JSON, 400),
        ("POST", "/ask", b'{"question": " ", "kind": "math"}', JSON, 400),
        ("POST", "/ask", b'{"question": "\\ud800", "kind": "math"}', JSON, 400),
        ("POST", "/ask", b'{"question": "%s", "kind": "math"}' % (b"q" * 20_001), JSON, 400),
    ],
)
def test_what_the_server_answers(site, method, path, body, headers, status):
    own = {"SELF": f"http://127.0.0.1:{site.server_port}"}
    headers = {name: own.get(value, value) for name, value in headers.items()}
    got, text, answered = request(site.server_port, method, path, body, headers)
    assert got == status, text
    assert "Access-Control-Allow-Origin" not in answered
    assert site.asked.empty() == (status != 202)
    if status not in (200, 501):
        assert len(text.splitlines()) == 1


def test_the_served_page_is_ours_alone(site):
    assert site.server_address[0] == "127.0.0.1"
    status, text, headers = request(site.server_port, "GET", "/")
    parsed = assert_harmless(text, scripts=1)
    assert "say <b>" in parsed.text
    assert headers["X-Frame-Options"] == "DENY"
    assert "script-src 'sha256-" in text and "unsafe-inline'; script" not in text


def test_one_question_at_a_time(site):
    assert request(site.server_port, "POST", "/ask", ASK, JSON)[0] == 202
    status, text, _ = request(site.server_port, "POST", "/ask", ASK, JSON)
    assert status == 409 and "wait" in text
    assert site.asked.get().question == "3*4?" and site.asked.empty()
    site.busy.release()
    assert request(site.server_port, "POST", "/ask", ASK, JSON)[0] == 202


def views(port):
    """What the page is shown, whenever it is something new."""
    known = None
    while True:
        status, view, _ = request(port, "GET", "/view")
        assert status == 200
        if view != known:
            known = view
            yield view
        time.sleep(0.005)


def test_everyone_is_shown_the_view(site):
    assert request(site.server_port, "GET", "/view")[1] == ""
    site.view = "one\n<b>"
    first, second = views(site.server_port), views(site.server_port)
    assert next(first) == next(second) == "one\n<b>"
    for view in ("two", "three", "four", "five"):
        site.view = view
        assert next(first) == next(second) == view
    assert request(site.server_port, "GET", "/view")[2]["Cache-Control"] == "no-store"


def test_a_taken_port_is_one_line(site):
    with pytest.raises(UsageError, match=rf"port {site.server_port} can't be used .*--port"):
        Site(site.server_port)


def test_serve_answers_until_ctrl_c(tiny):
    """The command itself: asks twice, watches the calls come in, then Ctrl-C."""
    command = [sys.executable, "demo.py", "--serve", "--port", "0", "--model", str(tiny)]
    command += ["--system", "structure:ensemble", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True, env=environment)  # fmt: skip
    try:
        port = int(re.search(r":(\d+) in a browser", process.stdout.readline())[1])
        shown = views(port)
        assert next(shown) == ""
        for _ in range(2):
            assert request(port, "POST", "/ask", ASK, JSON)[0] == 202
            seen = []
            while not seen or "<h2>Answer</h2>" not in seen[-1]:
                seen.append(next(shown))
            assert len(seen) > 2 and "3*4?" in seen[0] and "running" in seen[0]
            assert_harmless(seen[-1])
            assert seen[-1].count('class="call"') == 3
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and said == "\nstopped\n" and errors == ""
    finally:
        process.kill()
        process.communicate()


# --- a run folder


def write_run(folder, *, steps=12, torn=False):
    folder.mkdir()
    lines = []
    for step in range(steps):
        line = {"step": step, "role": "designer" if step // 3 % 2 else "executor"}
        line |= {"reward": 0.25, "reward/math": 0.25, "reward/sum": step / 20, "valid_designs": 0.5}
        line |= {
            "status/ok": 6,
            "status/invalid_design": 8,
            "status/crashed": 2,
            "length/designer": 30,
            "executor_reward": 0.5,
        }
        line |= {"structure/sum/single": 1.0, "loss": -0.01, "approx_kl": math.nan}
        line |= {"structure/single": 1.0} if step else {}  # a share of 0 is not written
        lines.append(json.dumps(line))
    text = "\n".join(lines) + "\n"
    (folder / "log.jsonl").write_text(text + '{"step": 12, "rol' if torn else text)
    (folder / "config.json").write_text(json.dumps({"name": HOSTILE[0]}))
    (folder / "table.md").write_text(
        "| held-out | all |\n| --- | --- |\n| a\\|b<i> | 0.5 |\n\nnote\n"
    )
    script = f'# {HOSTILE[0]}\nx = AgentNode("a")'
    sample = f"## {HOSTILE[1]}\n\n```python\n{script}\n```\nsingle; ok, reward 1\n\n"
    sample += f"    a: {HOSTILE[2]!r}\n\n"
    (folder / "designs.md").write_text(f"# before\n\n{sample}# after\n\n{sample}")
    return folder


def drawn(page):
    """Title -> (the x of the begin and end of each band, the points of each curve) of a chart."""
    titles = [a["aria-label"] for _, a in Parsed(page).tags if "aria-label" in a]
    found = {}
    for title, svg in zip(titles, svgs(page), strict=True):
        bands, curves = [], []
        for path in svg.iter("{http://www.w3.org/2000/svg}path"):
            points = [tuple(map(float, p)) for p in re.findall(r"[ML] (\S+) (\S+)", path.get("d"))]
            style = path.get("style") or ""
            if "fill: currentcolor; opacity: 0.08" in style:
                bands.append((points[0][0], points[1][0]))
            elif "stroke-width: 1.5" in style:
                curves.append(points)
        found[title] = bands, curves
    return found


def test_the_report_draws_the_log(tmp_path):
    page = demo.report_html(write_run(tmp_path / "run"))
    parsed = assert_harmless(page)
    titles = ["Reward of both roles", "Reward by kind of task"]
    titles += ["Structure shares of the valid designs", "Structure shares, tasks sum"]
    titles += ["Output tokens a call of both roles"]
    charts = drawn(page)
    assert list(charts) == titles
    assert [len(curves) for _, curves in charts.values()] == [3, 1, 1, 1, 1]
    assert all(len(bands) == 2 for bands, _ in charts.values())
    assert "executions that ran 0.5" in parsed.text and "all designs 0.25" in parsed.text
    assert "sum 0.45" in parsed.text  # the mean of the last 5: steps 7 to 11 of step / 20
    for designer, executor, valid in zip(*charts[titles[0]][1], strict=True):
        assert designer[1] > executor[1] == valid[1]  # y grows downwards: 0.25, 0.5 and 0.5
    keys = [a["style"].removeprefix("color:") for tag, a in parsed.tags if tag == "b" and a]
    assert len(keys) == 7 and all(f"stroke: {colour}" in page for colour in keys)
    [shares] = charts[titles[2]][1]
    assert shares[0][1] > shares[1][1] > shares[-1][1]  # from 0, where it is not written
    assert [x for x in ("a|b<i>", "note", HOSTILE[0], HOSTILE[1]) if x not in parsed.text] == []
    assert page.count("<b>AgentNode</b>") == 2
    assert (
        page.index("before</h3>") < page.index("after</h3>") < page.index("config.json</summary>")
    )


def test_bands_are_the_designers_stages(tmp_path):
    for bands, curves in drawn(demo.report_html(write_run(tmp_path / "run"))).values():
        first, last = curves[0][0][0], curves[0][-1][0]
        step = (last - first) / 11
        want = [(2.5, 5.5), (8.5, 11.5)]  # steps 4 to 6 and 10 to 12, counted from 1
        want = [(first + begin * step, first + end * step) for begin, end in want]
        assert bands == [pytest.approx(band, abs=0.1) for band in want]


def test_curves_are_means_and_a_share_that_is_not_written_is_zero():
    log = [{"step": s, "role": "executor", "reward": s / 10} for s in range(8)]
    log[1]["structure/router"] = 0.5
    charts = dict(demo.charts(log))
    [rewards, shares] = charts.values()
    assert rewards == {"designer: mean over all designs": demo.curve(log, "reward")}
    assert [y for _, y in rewards["designer: mean over all designs"]] == pytest.approx(
        [0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5]
    )
    assert shares["router"][:3] == [(1, 0.0), (2, 0.25), (3, pytest.approx(1 / 6))]


@pytest.mark.parametrize("missing", ["log.jsonl", "table.md", "designs.md", "config.json"])
def test_a_report_without_one_file(tmp_path, missing):
    folder = write_run(tmp_path / "run")
    (folder / missing).unlink()
    assert f"no {missing} yet" in assert_harmless(demo.report_html(folder)).text


@pytest.mark.parametrize("log", ["", "\n", "torn", '[1]\n"x"\n{"step": "1"}\n{"step": 1e400}\n'])
def test_a_report_of_a_log_without_steps(tmp_path, log):
    folder = write_run(tmp_path / "run")
    (folder / "log.jsonl").write_text(log)
    page = demo.report_html(folder)
    assert "0 steps" in page and svgs(page) == []


def test_a_torn_line_is_said(tmp_path):
    page = demo.report_html(write_run(tmp_path / "run", torn=True))
    assert "12 steps; 1 lines of log.jsonl are no steps and left out" in page


def test_a_report_of_supervised_training(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 0, "role": "sft", "loss": 2.5, "lr": 1e-4}\n')
    page = demo.report_html(tmp_path)
    assert list(drawn(page)) == ["Loss"] and "loss 2.5" in Parsed(page).text
    assert "designer" not in Parsed(page).text


def test_the_command_writes_the_report_into_the_run(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert demo.main(["--report", str(folder)]) == 0
    assert "Reward of both roles" in (folder / "report.html").read_text()
    assert str(folder / "report.html") in capsys.readouterr().out


# --- a real browser

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """A headless chromium on a pipe (its DevTools protocol: JSON texts, each ended by a zero)."""

    def __init__(self, folder):
        to_read, self.write = os.pipe()
        self.read, to_write = os.pipe()

        command = [CHROMIUM, "--headless", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        # It only ever opens our own pages, and its sandbox does not start in every container.
        command += ["--no-sandbox", "--disable-gpu", "--window-size=1000,1400"]
        wired = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *command]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(
            wired, pass_fds=(to_read, to_write), start_new_session=True, **quiet
        )
        os.close(to_read)
        os.close(to_write)
        self.buffer, self.last, self.session, self.events = b"", 0, None, []

    def start(self):
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def receive(self):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], 60)
            chunk = os.read(self.read, 1 << 16) if ready else b""
            assert chunk, "chromium says nothing"
            self.buffer += chunk
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def send(self, method, **parameters):
        self.last += 1
        message = {"id": self.last, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            got = self.receive()
            if got.get("id") == self.last:
                assert "error" not in got, got
                return got["result"]
            self.events.append(got)

    def run(self, expression):
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    def wait(self, expression):
        deadline = time.monotonic() + 60
        while not self.run(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.05)

    def goto(self, address):
        self.events.clear()
        self.send("Page.navigate", url=address)
        self.wait(f"location.href == {json.dumps(address)} && document.readyState == 'complete'")

    def resize(self, width, scheme="light"):
        size = {"width": width, "height": 1400, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def happened(self, method):
        return [event["params"] for event in self.events if event.get("method") == method]

    def assert_quiet(self, own):
        """No dialog, no error, no refused script, and no request but to `own`."""
        assert self.happened("Page.javascriptDialogOpening") == []
        assert self.happened("Runtime.exceptionThrown") == []
        entries = [event["entry"] for event in self.happened("Log.entryAdded")]
        assert [e["text"] for e in entries if "favicon" not in e.get("url", "")] == []
        asked = [event["request"]["url"] for event in self.happened("Network.requestWillBeSent")]
        assert [url for url in asked if not url.startswith(own)] == []

    def close(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.read)
        os.close(self.write)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no chromium here: on Debian, apt-get install chromium")
    running = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        running.start()
    except (AssertionError, BrokenPipeError) as error:
        running.close()
        pytest.skip(f"{CHROMIUM} does not start here: {error}")
    yield running
    running.close()


FITS = "document.documentElement.scrollWidth == document.documentElement.clientWidth"


def test_a_hostile_page_in_a_browser(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(demo.page("x", demo.run_html(hostile_run())))
    browser.goto(file.as_uri())
    assert browser.run("document.scripts.length + document.images.length") == 0
    shown = browser.run("document.querySelector('.call pre').textContent")
    assert shown == demo.seen("\n".join(["", *HOSTILE]))
    browser.resize(340)
    assert browser.run(FITS)
    # A handler that a mistake of ours let through would still be refused by the page's policy.
    browser.run("document.body.innerHTML = '<img src=x onerror=\"window.ran = 1\">'")
    time.sleep(0.2)
    assert browser.run("window.ran") is None
    blocked = [event["entry"]["text"] for event in browser.happened("Log.entryAdded")]
    assert blocked and all("Content Security Policy" in text for text in blocked)


def test_asking_in_a_browser(browser, site):
    home = f"http://127.0.0.1:{site.server_port}/"
    browser.goto(home)
    browser.run("document.querySelector('textarea').focus()")
    browser.send("Input.insertText", text="3*4? <b>")
    key = {"key": "Enter", "code": "Enter", "text": "\r", "windowsVirtualKeyCode": 13}
    browser.send("Input.dispatchKeyEvent", type="keyDown", **key)
    asked = site.asked.get(timeout=60)
    assert (asked.question, asked.kind) == ("3*4? <b>", "math")
    run = LiveRun(asked, calls=[live_call("a", 0, HOSTILE[0], "")])
    run.calls[0].ended = None
    site.view = demo.run_html(run)
    browser.wait("document.querySelectorAll('.call').length == 1")
    browser.run("document.querySelector('summary').click()")
    browser.run("document.querySelector('form').requestSubmit()")
    browser.wait("document.getElementById('note').textContent.includes('wait')")
    hostile = hostile_run()
    site.view = demo.run_html(hostile)
    browser.wait(f"document.querySelectorAll('.call').length == {len(HOSTILE) + 1}")
    assert browser.run("document.querySelector('#prompt-1').open")
    assert not browser.run("document.querySelector('#prompt-2').open")
    assert browser.run("document.scripts.length") == 1
    entries = [event["entry"] for event in browser.happened("Log.entryAdded")]
    assert [
        e["text"] for e in entries if "409" not in e["text"] and "favicon" not in e["url"]
    ] == []
    browser.events[:] = [e for e in browser.events if e.get("method") != "Log.entryAdded"]
    browser.assert_quiet(home)
    assert browser.run("document.getElementById('lost').hidden")
    browser.run("window.fetch = () => Promise.reject(new TypeError())")  # as if the server is gone
    browser.wait("!document.getElementById('lost').hidden")
    assert browser.run("document.querySelectorAll('.call').length") == len(HOSTILE) + 1


EVIL_PAGE = """
<form method=post action=ADDRESS/ask enctype=text/plain target=frame>
<input name='{"question": "q", "kind": "math", "x": "' value='"}'></form>
<iframe name=frame></iframe>
<script>
const body = '{"question": "q", "kind": "math"}', method = "POST";
const headers = {"Content-Type": "application/json"};
const tries = [{mode: "no-cors", method, body}, {method, body, headers}, {method, body}];
Promise.allSettled(tries.map((each) => fetch("ADDRESS/ask", each).then((got) => got.text())))
  .then((all) => { window.read = all.filter((each) => each.value).length; });
document.forms[0].submit();
</script>"""


def test_another_origin_in_a_browser(browser, site, tmp_path):
    """A page from elsewhere sends what a page may send: a form, and a request without its reply."""
    evil = tmp_path / "evil.html"
    evil.write_text(
        EVIL_PAGE.replace("ADDRESS", f"http://127.0.0.1:{site.server_port}"), encoding="utf-8"
    )
    browser.goto(evil.as_uri())
    browser.wait("window.read !== undefined")
    time.sleep(0.2)
    assert browser.run("window.read") == 0 and site.asked.empty()


def test_a_report_in_a_browser(browser, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "report.html").write_text(demo.report_html(folder))
    browser.goto((folder / "report.html").as_uri())
    boxes = browser.run(
        "[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().width)"
    )
    assert boxes == [768] * 5
    for width, scheme in ((1000, "light"), (340, "dark")):
        browser.resize(width, scheme)
        assert browser.run(FITS), width
    browser.assert_quiet("file:///")
