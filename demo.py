r"""See it think: one question, the design, every call of every agent, and the answer.

    python demo.py --question "2*3*4*5"                     # the newest toy run under runs/
    python demo.py --task toy:3 --html out.html             # a task with a gold, so with a reward
    python demo.py --task rows.jsonl:17 --model MODEL       # line 17 of a data file
    python demo.py --serve                                  # type questions in a browser
    python demo.py --report runs/toy                        # a training run as a page

The idea. Nothing is staged for the show: a question is one execution of one design, rolled out by
execute.rollout as in training, and what is seen is what its events say. A `LiveRun` takes the
events in; the terminal, the page and the served page are three views of it. A page is one file
without a script and without anything from elsewhere, so it can be mailed.

The graph. Its nodes are the calls that were made, a row a turn: calls of one turn were asked for
in one message and answered side by side. Its arrows are facts too, read off the prompts: an arrow
from a to b says that a's reply stands in b's prompt, on lines of its own. What follows from other
arrows is left out. A dashed arrow leaves a reply that no later prompt and no answer holds: it was
counted (a vote) or judged (a critic's verdict). Two chains side by side in an ensemble:

    turn 1    1 plan    2 try       3 is shown 1's reply, 4 is shown 2's. The vote takes
                 |         |        the reply of 3: an arrow from 3 to the answer, and
    turn 2    3 solve   4 solve     a dashed one from 4

    >>> def call(agent, turn, prompt, reply):
    ...     messages = [{"role": "user", "content": prompt}]
    ...     return LiveCall("executor", agent, messages, turn, 0.0, 1.0, reply)
    >>> plan, attempt = call("plan", 0, "3+4?", "count on"), call("try", 0, "3+4?", "about 6")
    >>> third = call("solve", 1, "3+4?\n\n[plan]\ncount on", "7")
    >>> flows([plan, attempt, third, call("solve", 1, "3+4?\n\n[try]\nabout 6", "6")], "3+4?")
    [set(), set(), {0}, {1}]

The shade of a token is how much it surprised the sampler: -log p passes 0.1, 0.5, 1, 2 and 4 nats.
One that was drawn at p = 0.5 has 0.69 nats, the second shade:

    >>> shade(math.log(0.5)), shade(math.log(0.99)), shade(-9.0)
    (2, 0, 5)

What is trusted: nobody's text. Question, script, replies, agents' names, logs and tables are
escaped; control characters and direction marks are shown as what they are (also in the terminal);
the page's own policy forbids every script but ours. The server listens on 127.0.0.1 alone, knows
three addresses, takes a question and its kind and nothing else, one at a time, in at most
MAX_BODY bytes. It answers only if Host says 127.0.0.1 or localhost (so a name that was rebound to
this address gets nothing), and only to its own page, not to that of another origin. The designed
script runs in the sandbox, as always.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import io
import itertools
import json
import keyword
import math
import queue
import re
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import transformers

import design
import evaluate
import toy
from data import OneLineParser, Task, load, read_prompt
from engine import find_model, open_engine
from evaluate import UsageError, curve
from execute import DESIGNER, Call, open_pool, question_text, rollout
from reward import usable_gold
from sandbox import configure

HOST, PORT = "127.0.0.1", 8333
MAX_QUESTION = 20_000  # characters
MAX_BODY = 128 * 1024  # bytes of a request
SHOWN_LINES = 12  # of a text in the terminal
SHADES = (0.1, 0.5, 1.0, 2.0, 4.0)  # nats
NODE_W, NODE_H, GAP_X, GAP_Y, SIDE = 158, 46, 22, 44, 60  # pixels of the graph


# --- what happens, as it happens ---------------------------------------------------------------


@dataclass
class LiveCall:
    """A call: what was asked and, once `ended` is set, what came back. Seconds since the start.

    turn: as Call.turn. call: with ids and log-probs, known when the rollout is over.
    """

    role: str
    agent: str
    messages: list[dict]
    turn: int
    began: float
    ended: float | None = None
    text: str = ""
    call: Call | None = None

    def tokens(self) -> int:
        """Output tokens; 0 while they are not known, or where the engine has no ids."""
        return len(self.call.output_ids or ()) if self.call else 0


@dataclass
class LiveRun:
    """One execution of one design of one task, filled by the events of execute.rollout."""

    task: object
    label: str = ""  # where the task is from
    model: str = ""
    graded: bool = False  # has a gold, so the reward says something
    designed: LiveCall | None = None
    calls: list[LiveCall] = field(default_factory=list)
    script: str | None = None
    structure: str | None = None
    answer: str | None = None
    status: str = ""  # "" while it runs
    error: str | None = None
    reward: float | None = None
    tokenizer: object = None  # of the engine, once it is over
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def take(self, event: dict) -> None:
        self.seconds = time.monotonic() - self.started
        if event["event"] == "call_started":
            asked = [event[name] for name in ("role", "agent", "messages", "turn")]
            call = LiveCall(*asked, self.seconds)
            if event["execution"] == DESIGNER:
                self.designed = call
            else:
                self.calls.append(call)
        elif event["event"] == "call_finished":
            call = self.call_of(event)
            call.ended, call.text = self.seconds, event["text"]
        elif event["event"] == "design":
            self.script, self.structure = event["script"], event["structure"]
            self.error = event["error"]

    def call_of(self, event: dict) -> LiveCall:
        return self.designed if event["execution"] == DESIGNER else self.calls[event["call"]]

    def play(self, engine, pool, show: Callable[[LiveRun, dict], None], **options) -> None:
        """A design of the task and its execution; show(self, event) at each event of rollout."""

        def on_event(event: dict) -> None:
            self.take(event)
            show(self, event)

        score = evaluate.evaluation_score if self.graded else lambda task, answer: 0.0
        options |= {"step": evaluate.EVALUATION_STEP, "on_event": on_event}
        [rolled] = rollout([self.task], engine, pool, score, n_designs=1, n_executions=1, **options)
        # What the events don't tell: ids, log-probs, errors.
        [drawn], self.tokenizer = rolled.designs, engine.tokenizer
        [execution] = drawn.executions
        if self.designed:
            self.designed.call = drawn.call
        for live, call in zip(self.calls, execution.calls, strict=True):
            live.call = call
        self.answer, self.status, self.error = execution.answer, execution.status, execution.error
        self.reward, self.seconds = execution.reward, time.monotonic() - self.started

    def figures(self) -> list[str]:
        """How it stands, in short.

        >>> LiveRun(None, structure="single", status="ok", reward=1.0, graded=True).figures()
        ['single', 'ok', '0 calls', 'reward 1', '0.00 s']
        """
        calls = [call for call in (self.designed, *self.calls) if call]
        tokens = sum(call.tokens() for call in calls)
        parts = [self.structure, self.status or "running"]
        parts.append(f"{len(calls)} call{'s' * (len(calls) != 1)}")
        parts.append(f"{tokens} tokens" if tokens else None)
        parts.append(f"reward {self.reward:g}" if self.status and self.graded else None)
        return [part for part in parts if part] + [f"{self.seconds:.2f} s"]


def handed_on(reply: str) -> set[str]:
    """The forms in which a later prompt may hold a reply: whole, without its thought, delivered.

    >>> sorted(handed_on("<think>hm</think> so <delivery> 7 </delivery>"))
    ['7', '<think>hm</think> so <delivery> 7 </delivery>', 'so <delivery> 7 </delivery>']
    """
    visible = reply.rpartition("</think>")[2]
    delivery = visible.rpartition("<delivery>")[2].partition("</delivery>")[0]
    return {part.strip() for part in (reply, visible, delivery)} - {""}


def flows(calls: Sequence[LiveCall], question: str) -> list[set[int]]:
    """For each call the earlier ones whose replies stand in its prompt, less what follows.

    Of equal replies the one under its agent's name counts, else those of the latest turn. What
    stands in the question is no reply.
    """
    direct, reach = [], []  # reach: all that leads to a call, by any way
    for call in calls:
        prompt = "".join(f"\n{m['content']}\n" for m in call.messages).replace(question, "")
        turns = [m["content"] for m in call.messages if m["role"] == "assistant" and m["content"]]
        found: dict[str, list[int]] = {}
        for j, earlier in enumerate(calls):
            for part in handed_on(earlier.text) if earlier.turn < call.turn else ():
                if f"\n{part}\n" in prompt or any(part.startswith(turn) for turn in turns):
                    found.setdefault(part, []).append(j)
        sources = set()
        for part, same in found.items():
            named = [j for j in same if f"\n[{calls[j].agent}]\n{part}\n" in prompt]
            latest = max(calls[j].turn for j in same)
            sources |= set(named or [j for j in same if calls[j].turn == latest])
        direct.append({j for j in sources if not any(j in reach[i] for i in sources)})
        reach.append(sources.union(*(reach[i] for i in sources)))
    return direct


# --- texts -------------------------------------------------------------------------------------

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def seen(text: str) -> str:
    r"""Control characters, direction marks and lone surrogates as their escapes.

    >>> print(seen("a\x1b[2J \u202ecod.exe"))
    a\x1b[2J \u202ecod.exe
    """
    return UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def esc(text: object) -> str:
    """Anybody's text as HTML text, or as the value of a quoted attribute.

    >>> esc("</script><img src=x onerror='alert(1)'>")
    '&lt;/script&gt;&lt;img src=x onerror=&#x27;alert(1)&#x27;&gt;'
    """
    return html.escape(seen(str(text)))


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element of HTML or SVG. `inside` is HTML already; attributes are anybody's text.

    >>> tag("text", esc("a<b"), x=1.25, class_="dim", marker_end='"')
    '<text x="1.25" class="dim" marker-end="&quot;">a&lt;b</text>'
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    listed = "".join(f' {key}="{esc(value)}"' for key, value in named.items())
    return f"<{name}{listed}>{''.join(inside)}</{name}>"


def pre(*inside: str) -> str:
    return tag("pre", "\n", *inside)  # the parser drops a line break at the start: not theirs


STRUCTURE = (*design.CLASSES, "add_node", "add_nodes", "run")
# A group's name is the element that marks it. A text without an end is one up to the script's end,
# for a refused script may be no Python.
LEXER = re.compile(
    r"(?P<i>#[^\n]*)"
    r"|(?P<q>(?:\b[bfrtuBFRTU]{1,2})?(?P<quote>\"{3}|'{3}|[\"'])"
    r"(?:\\.?|(?!(?P=quote))[^\\])*(?:(?P=quote)|\Z))"
    rf"|\b(?:(?P<b>{'|'.join(STRUCTURE)})|(?P<em>{'|'.join(keyword.kwlist)}))\b"
    r"|\w+|.",
    re.S,
)


def highlight(source: str) -> str:
    """A script as HTML: keywords, strings, comments and, strongest, what makes its structure.

    Only marks are added: the text of the result is the source, whatever it holds.

    >>> highlight("x = AgentNode('a')")
    'x = <b>AgentNode</b>(<q>&#x27;a&#x27;</q>)'
    """

    def mark(found: re.Match) -> str:
        return tag(found.lastgroup, esc(found[0])) if found.lastgroup else esc(found[0])

    return LEXER.sub(mark, source)


def token_pieces(tokenizer, ids: list[int], logps: list[float]) -> list[tuple[str, int, float]]:
    """Output ids -> (text, number of tokens, log-prob) of each piece, in order.

    A piece is one token, or the few that make one character together. Each is decoded behind
    the piece before it, because some tokenizers drop the space at the start of a text.
    """

    def text(start: int, end: int) -> str:
        return tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)

    pieces, before, start = [], 0, 0
    for end in range(1, len(ids) + 1):
        so_far = text(before, end)
        if so_far.endswith("\ufffd") and end - start < 8 and end < len(ids):
            continue  # a part of a character
        known = len(text(before, start))
        pieces.append((so_far[known:], end - start, math.fsum(logps[start:end])))
        before, start = start, end
    return pieces


def shade(logp: float) -> int:
    """How deep a token is shaded: 0 (sure) to 5 (a surprise)."""
    return sum(-logp >= nats for nats in SHADES)


def reply_html(live: LiveCall, tokenizer) -> str:
    """A reply, token by token where its ids and log-probs are known."""
    call = live.call
    if call is None or not call.logp_sampler:
        return pre(esc(live.text))
    parts = []
    for text, n, logp in token_pieces(tokenizer, call.output_ids, call.logp_sampler):
        title = f"{n} token{'s' * (n > 1)}, p {math.exp(logp):.3f}, log-prob {logp:.3f}"
        parts.append(tag("span", esc(text), class_=f"s{shade(logp)}", title=title))
    return pre(*parts)


# --- the page of a run -------------------------------------------------------------------------

STYLE = """
:root{color-scheme:light dark;--bg:light-dark(#fbfaf7,#14171d);--card:light-dark(#fff,#1c2129);
--ink:light-dark(#1d2330,#e4e7ec);--soft:light-dark(#667085,#98a2b3);
--line:light-dark(#d9d6cd,#363d49)}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:62rem;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.25rem;margin:0 0 .6rem}h2{font-size:1rem;margin:1.6rem 0 .5rem}
h3{font-size:.9rem;margin:.6rem 0 .2rem}small,.soft,summary{color:var(--soft)}
small,.soft,summary,.chip,table,.small{font-size:.85rem}
pre,.chip,.call,textarea,button,select{color:inherit;background:var(--card);
border:1px solid var(--line);border-radius:6px}
pre{margin:.3rem 0;padding:.6rem .8rem;font:13px/1.5 ui-monospace,monospace;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:32rem;overflow:auto;tab-size:4}
pre b{color:light-dark(#b3401c,#ff9e64)}pre em{font-style:normal;color:light-dark(#8250df,#c297ff)}
pre q{quotes:none;color:light-dark(#0a6b4d,#6fd3a8)}pre i{color:var(--soft)}
.chip{display:inline-block;max-width:100%;margin:.1rem .3rem .1rem 0;padding:.05rem .6rem;
border-radius:1rem}
.good{color:light-dark(#1a7f37,#56d364);border-color:currentcolor}
.bad{color:light-dark(#b42318,#ff7b72);border-color:currentcolor}
.call{margin:.7rem 0;padding:.5rem .8rem;border-left:4px solid var(--c)}
.call:target{outline:2px solid var(--c)}.call pre{background:var(--bg)}
.head{display:flex;flex-wrap:wrap;gap:.2rem .8rem;align-items:baseline;overflow-wrap:anywhere}
.bar{margin-left:auto;flex:none;width:120px;height:6px;background:linear-gradient(90deg,var(--line)
var(--from),var(--c) 0 calc(var(--to) + 2px),var(--line) 0)}
.s1{background:#e07a3c24}.s2{background:#e07a3c47}.s3{background:#e07a3c6b}
.s4{background:#e07a3c94}.s5{background:#e07a3cc7}.small span{display:inline-block;padding:0 .5rem}
.wide{overflow-x:auto;padding:2px}.wide svg{display:block;overflow:visible}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}.node~text{text-anchor:middle}
svg .dim{fill:var(--soft);font-size:11px}
.node{fill:var(--card);stroke:var(--c,var(--line));stroke-width:1.5}.wait{stroke-dasharray:4 3}
.edge{fill:none;stroke:var(--soft);stroke-width:1.3}.count{stroke-dasharray:3 4}
table{border-collapse:collapse;margin:.5rem 0}
td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid var(--line)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:0 1rem}
textarea{width:100%;padding:.6rem;font:14px ui-monospace,monospace}
button,select{padding:.3rem .9rem;font:inherit}
"""


def page(title: str, body: str, script: str = "") -> str:
    """A whole page. Its policy allows no script but this very one, and nothing from elsewhere."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'; connect-src 'self'"
        script = f"<script>{script}</script>\n"
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{esc(title)}</title>\n<style>{STYLE}</style>\n{body}\n{script}</html>\n"
    )


def colour(i: int) -> str:
    """A style for the i-th of any number of things: the golden angle keeps neighbours apart."""
    return f"--c:hsl({(212 + 137.5 * i) % 360:.0f} 60% 55%)"


def run_html(live: LiveRun) -> str:
    """All of a run that is known so far."""
    looks = {live.status: "chip bad", "reward 0": "chip bad"}
    looks |= {"ok": "chip good", "reward 1": "chip good"}
    chips = [tag("span", esc(text), class_=looks.get(text, "chip")) for text in live.figures()]
    origin = ", ".join(part for part in (live.label, live.model) if part)
    parts = ["<h2>Question</h2>", pre(esc(question_text(live.task)))]
    parts.append(tag("p", *chips, tag("small", esc(origin))))
    if live.status:
        parts += ["<h2>Answer</h2>", pre(esc("none" if live.answer is None else live.answer))]
    if live.graded and live.task.answer:
        parts.append(tag("p", "gold: ", esc(live.task.answer), class_="soft"))
    if live.error:
        parts.append(tag("p", esc(live.error), class_="bad"))
    parts.append("<h2>Design</h2>")
    if live.script is not None:
        parts.append(pre(highlight(live.script)))
    hues = {name: i for i, name in enumerate(dict.fromkeys(call.agent for call in live.calls))}
    if live.designed:
        parts.append(call_html(live.designed, "designer", len(hues), live))
    if live.calls:
        surest = ["p > 0.9", "0.9", "0.6", "0.37", "0.14", "p < 0.02"]
        shades = [tag("span", esc(text), class_=f"s{i}") for i, text in enumerate(surest)]
        parts += ["<h2>Agents</h2>", tag("div", graph_svg(live, hues), class_="wide"), LEGEND]
        parts += ["<h2>Calls</h2>", tag("p", "The shade of a token: ", *shades, class_="small")]
    for i, call in enumerate(live.calls, 1):
        parts.append(call_html(call, str(i), hues[call.agent], live))
    return "\n".join(parts)


LEGEND = """<p class=soft>A row is a turn: its calls were asked for together and answered side by
side. An arrow: this reply stands in that prompt. Dashed: it was counted or judged, not quoted."""


def call_html(call: LiveCall, name: str, hue: int, live: LiveRun) -> str:
    """One call: what it cost and when, its reply, and behind a click its prompt."""
    facts, title = ["running"], name
    if call.ended is not None:
        facts = [f"{call.ended - call.began:.2f} s from {call.began:.2f} s"]
    if call.role == "executor":
        facts.insert(0, f"turn {call.turn + 1}")
        title = f"{name} {call.agent}"
    if call.tokens():
        mean = math.fsum(call.call.logp_sampler) / call.tokens()
        facts.append(f"{len(call.call.prompt_ids)} + {call.tokens()} tokens")
        facts.append(f"mean log-prob {mean:.2f}")
    if call.call and call.call.finish_reason == "length":
        facts.append("cut at the limit")
    began, ended = (x / max(live.seconds, 1e-9) for x in (call.began, call.ended or live.seconds))
    bar = tag("span", class_="bar", style=f"--from:{began:.1%};--to:{ended:.1%}")
    head = tag("strong", esc(title)) + tag("small", esc(" · ".join(facts))) + bar
    sent = [tag("h3", esc(each["role"])) + pre(esc(each["content"])) for each in call.messages]
    prompt = tag("details", "<summary>prompt</summary>", *sent, id=f"prompt-{name}")
    reply = "" if call.ended is None else reply_html(call, live.tokenizer)
    body = tag("div", head, class_="head") + reply + prompt
    return tag("div", body, class_="call", id=f"call-{name}", style=colour(hue))


def places(turns: Sequence[float]) -> tuple[list[tuple[float, float]], float, float]:
    """Turns of boxes -> their centres in the graph, its width and its height. Rows are centred.

    >>> places([0, 0, 1])
    ([(139.0, 23.0), (319.0, 23.0), (229.0, 113.0)], 458, 136)
    """
    rows = [[i for i, turn in enumerate(turns) if turn == t] for t in sorted(set(turns))]
    width = max(map(len, rows)) * (NODE_W + GAP_X) - GAP_X + 2 * SIDE
    centres = {}
    for y, row in enumerate(rows):
        left = width / 2 - (len(row) - 1) * (NODE_W + GAP_X) / 2
        for x, i in enumerate(row):
            centres[i] = left + x * (NODE_W + GAP_X), y * (NODE_H + GAP_Y) + NODE_H / 2
    return [centres[i] for i in range(len(turns))], width, len(rows) * (NODE_H + GAP_Y) - GAP_Y


def graph_svg(live: LiveRun, hues: dict[str, int]) -> str:
    """The calls of a run as a graph. Box 0 is the question; the calls follow; then the answer."""
    calls, end = live.calls, len(live.calls) + 1
    sources = flows(calls, question_text(live.task))
    centres, width, height = places([-1, *(call.turn for call in calls), math.inf])
    edges = [(j + 1, k, "edge") for k, found in enumerate(sources, 1) for j in found or {-1}]
    if live.status:
        answer = (live.answer or "").strip()
        saying = [j for j, call in enumerate(calls) if answer in handed_on(call.text)]
        saying = [j for j in saying if calls[j].turn == calls[saying[-1]].turn]
        edges += [(j + 1, end, "edge") for j in saying]
        counted = set(range(len(calls))) - set().union(saying, *sources)
        edges += [(j + 1, end, "edge count") for j in sorted(counted)]
    reward = f"reward {live.reward:g}" if live.graded and live.status else live.status
    nodes = [_node(centres[0], "question"), _node(centres[end], "answer", reward, live.status)]
    for i, call in enumerate(calls, 1):
        detail = "running" if call.ended is None else f"{call.ended - call.began:.2f} s"
        detail = f"{call.tokens()} tokens, {detail}" if call.tokens() else detail
        hue = colour(hues[call.agent])
        node = _node(centres[i], f"{i} {call.agent}", detail, call.ended is not None, hue)
        nodes.append(tag("a", node, href=f"#call-{i}"))
    for turn, y in {call.turn: y for call, (_, y) in zip(calls, centres[1:], strict=False)}.items():
        nodes.append(tag("text", f"turn {turn + 1}", x=0, y=y + 4, class_="dim"))
    size = {"refX": 7, "refY": 4, "markerWidth": 7, "markerHeight": 7, "orient": "auto"}
    tip = tag("path", d="M0,0 L8,4 L0,8 z", style="fill:var(--soft)")
    tip = tag("marker", tip, id="tip", viewBox="0 0 8 8", **size)
    lines = [_edge(centres[start], centres[to], kind, width) for start, to, kind in edges]
    return tag("svg", tip, *lines, *nodes, width=width, height=height)


def _node(centre: tuple, name: str, detail: str = "", done: object = True, style: str = "") -> str:
    short = name if len(name) <= 20 else f"{name[:19]}…"
    shape = {"x": -NODE_W / 2, "y": -NODE_H / 2, "width": NODE_W, "height": NODE_H, "rx": 7}
    box = tag("rect", class_="node" if done else "node wait", **shape)
    text = tag("text", esc(short), y=-3 if detail else 4)
    more = tag("text", esc(detail), y=14, class_="dim")
    place = "translate({:.1f} {:.1f})".format(*centre)
    return tag("g", tag("title", esc(name)), box, text, more, style=style, transform=place)


def _edge(start: tuple, end: tuple, kind: str, width: float) -> str:
    """From below one node to above another; around the nodes of the rows between them."""
    (x0, y0), (x1, y1) = start, end
    y0, y1 = y0 + NODE_H / 2, y1 - NODE_H / 2 - 2
    bend, aside = (y1 - y0) / 2, 0.0
    if y1 - y0 > GAP_Y:
        aside = NODE_W * (1 if x0 + x1 >= width else -1)
        x0, x1 = x0 + aside / 4, x1 + aside / 4
    bends = f"{x0 + aside:.0f},{y0 + bend:.0f} {x1 + aside:.0f},{y1 - bend:.0f}"
    path = f"M{x0:.0f},{y0:.0f} C{bends} {x1:.0f},{y1:.0f}"
    return tag("path", d=path, class_=kind, marker_end="url(#tip)")


# --- the terminal ------------------------------------------------------------------------------


def say(text: str, indent: str = "") -> None:
    print(textwrap.indent(seen(text), indent, lambda line: True), flush=True)


def clip(text: str) -> str:
    lines = text.strip("\n").split("\n")
    more = [f"... {len(lines) - SHOWN_LINES} more lines"] if len(lines) > SHOWN_LINES else []
    return "\n".join(lines[:SHOWN_LINES] + more)


def print_event(live: LiveRun, event: dict) -> None:
    """The tree of calls, a few lines an event."""
    if event["event"] == "design":
        cost = f", {live.seconds:.2f} s" if live.designed else ""
        say(f"design: {live.structure or 'refused'}{cost}")
        for text in filter(None, (live.script, live.error)):
            say(text.strip("\n"), "│   ")
    elif event["event"].startswith("call") and event["execution"] != DESIGNER:
        call, number = live.call_of(event), event["call"] + 1
        if event["event"] == "call_finished":
            say(f"{number} {call.agent}, {call.ended - call.began:.2f} s", "│   ├─ ")
            say(clip(call.text), "│   │      ")
        else:
            if [each.turn for each in live.calls].count(call.turn) == 1:
                say(f"turn {call.turn + 1}", "├─ ")
            say(f"{number} {call.agent} is asked", "│   ├─ ")


def print_end(live: LiveRun) -> None:
    say("answer", "└─ ")
    say(live.answer or f"none: {live.error or live.status}", "    ")
    say(", ".join(live.figures()))


# --- the browser -------------------------------------------------------------------------------

FORM = """<h1>MetaAgent-X: see it think</h1>
<form><textarea name=question rows=3 required autofocus></textarea>
<select name=kind><option>math<option>code</select> <button>ask</button> <small>{hint}</small>
<small id=note role=status></small> <small id=lost class=bad hidden>not connected: is demo.py
still running?</small></form><main><p class=soft>No question yet.</p></main>"""
CLIENT = """
const view = document.querySelector("main"), form = document.querySelector("form");
const note = document.getElementById("note"), lost = document.getElementById("lost");
let shown = "";
setInterval(async () => {
  const seen = await fetch("/view").then((reply) => reply.text()).catch(() => null);
  lost.hidden = seen !== null;
  if (seen === null || seen == shown) return;
  const open = [...view.querySelectorAll("details[open]")].map((each) => each.id);
  view.innerHTML = shown = seen;
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
}, 250);
form.onsubmit = async (event) => {
  event.preventDefault();
  const body = JSON.stringify({question: form.question.value, kind: form.kind.value});
  const headers = {"Content-Type": "application/json"};
  const reply = await fetch("/ask", {method: "POST", headers, body}).catch(() => null);
  note.textContent = reply && !reply.ok ? await reply.text() : "";
};
form.question.onkeydown = (event) => {
  if (event.key == "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
};
"""


def check_question(text: str) -> str:
    """The question, stripped. Raises UsageError for one that no model can be asked."""
    if not text.strip():
        raise UsageError("the question is empty: type one")
    if len(text) > MAX_QUESTION:
        raise UsageError(f"the question has {len(text)} characters: give at most {MAX_QUESTION}")
    if re.search(r"[\ud800-\udfff]", text):
        raise UsageError("the question is no valid Unicode: type it again")
    return text.strip()


def read_ask(body: bytes) -> Task:
    """The body of POST /ask -> a task without a gold. Raises UsageError for anything else.

    >>> read_ask(b'{"question": " 6*7? ", "kind": "math"}').question
    '6*7?'
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError("the body is not JSON") from error
    match asked:
        case {"question": str(question), "kind": "math" | "code" as kind} if len(asked) == 2:
            return Task("question", kind, check_question(question))
    raise UsageError("give a question (a text), a kind (math or code), and nothing else")


class Site(ThreadingHTTPServer):
    """The served page: takes questions, one at a time, and shows the view.

    The model's work stays on the main thread; requests are answered on their own.
    """

    daemon_threads = True

    def __init__(self, port: int, hint: str = ""):
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            why = f"port {port} can't be used ({error.strerror})"
            raise UsageError(f"{why}: give --port N") from error
        self.home = page("MetaAgent-X", FORM.format(hint=esc(hint)), CLIENT)
        self.view = ""  # HTML of the run that is shown; the page asks for it again and again
        self.asked: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self.busy = threading.Lock()  # held from a question to its answer

    def next_question(self) -> Task:
        """Waits for one, but never for long: a Ctrl-C just before a wait is only seen after it."""
        while True:
            with suppress(queue.Empty):
                return self.asked.get(timeout=0.5)

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that left is no error
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """GET / and /view, POST /ask, for our own page only."""

    server: Site
    timeout = 30

    def refusal(self) -> tuple[int, str] | None:
        """Why this request is not answered: see the header, what is trusted."""
        hosts = self.headers.get_all("Host") or [""]
        if len(hosts) > 1 or not re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", hosts[0]):
            return 403, f"this is {HOST}: open it by that address"
        if self.headers.get("Origin") not in (None, f"http://{hosts[0]}"):
            return 403, "another origin may not ask here"
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return 403, "another site may not ask here: type the address yourself"
        return None

    def reply(self, status: int, text: str, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.end_headers()
        self.wfile.write(text.encode())  # HTTP/1.0: the end of the connection ends the text

    def do_GET(self) -> None:
        known = {"/": (200, self.server.home, "text/html"), "/view": (200, self.server.view)}
        self.reply(*(self.refusal() or known.get(self.path, (404, "there is only /"))))

    def do_POST(self) -> None:
        self.reply(*(self.refusal() or self.ask()))

    def ask(self) -> tuple[int, str]:
        """Takes the question, unless it can't: (status, why)."""
        length = self.headers.get("Content-Length", "")
        if self.path != "/ask":
            return 404, "there is only /ask"
        if self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            return 415, "give application/json"
        if not re.fullmatch(r"[0-9]{1,9}", length) or self.headers.get("Transfer-Encoding"):
            return 411, "give a Content-Length"
        if int(length) > MAX_BODY:
            return 413, f"give at most {MAX_BODY} bytes"
        try:
            task = read_ask(self.rfile.read(int(length)))
        except UsageError as error:
            return 400, str(error)
        if not self.server.busy.acquire(blocking=False):
            return 409, "one question is being answered: wait for its end"
        self.server.asked.put(task)
        return 202, "asked"

    def log_message(self, *_) -> None:
        """Standard error is for errors."""


def serve(site: Site, play: Callable, model: str) -> None:
    """Answers the site's questions on this thread, until Ctrl-C."""
    threading.Thread(target=site.serve_forever, daemon=True).start()
    print(f"open http://{HOST}:{site.server_port} in a browser; Ctrl-C ends it", flush=True)

    def show(live: LiveRun, event: dict) -> None:
        site.view = run_html(live)

    try:
        for number in itertools.count():
            live = LiveRun(site.next_question(), "", model)
            play(live, show=show, places=[number])
            site.busy.release()
            site.view = run_html(live)
    except KeyboardInterrupt:
        print("\nstopped")
    finally:
        site.shutdown()


# --- a training run as a page ------------------------------------------------------------------


def read_step(written: str) -> dict | None:
    """Role and finite numbers of a line of log.jsonl. None if it is no step: a crash tears one.

    >>> read_step('{"step": 0, "role": "executor", "reward": 0.5, "loss": NaN}')
    {'step': 0, 'reward': 0.5, 'role': 'executor'}
    >>> read_step('{"step": 1, "re')
    """
    try:
        line = json.loads(written)
    except (ValueError, RecursionError):
        return None
    line = line if isinstance(line, dict) else {}
    numbers = {n: x for n, x in line.items() if isinstance(x, int | float) and abs(x) < 1e15}
    is_step = isinstance(numbers.get("step"), int)
    return numbers | {"role": str(line.get("role"))} if is_step else None


BOTH_ROLES = {
    "designer: mean over all designs": "reward",
    "executor: mean over executions that ran": "executor_reward",
    "valid designs": "valid_designs",
}


def charts(log: list[dict]) -> Iterator[tuple[str, dict[str, list]]]:
    """(title, label -> curve) of each chart that this log has values for."""
    names = sorted({name for line in log for name in line})
    kinds = [name.removeprefix("reward/") for name in evaluate.reward_names(names)]
    wanted = {"Reward of both roles": BOTH_ROLES}  # title -> {label: name}
    wanted["Reward by kind of task"] = {kind: f"reward/{kind}" for kind in kinds}
    groups = {"structure": "Structure shares of the valid designs"}
    groups |= {f"structure/{kind}": f"Structure shares, tasks {kind}" for kind in kinds}
    groups |= {"constant_groups": "Constant groups of both roles"}
    groups |= {"length": "Output tokens a call of both roles"}
    for group, title in groups.items():
        inside = [name for name in names if name.rpartition("/")[0] == group]
        wanted[title] = {name.rpartition("/")[2]: name for name in inside}
    if any(line["role"] == "sft" for line in log):  # in RL the loss is near 0 and says nothing
        wanted["Loss"] = {"loss": "loss"}
    for title, labels in wanted.items():
        curves = {label: curve(log, name) for label, name in labels.items() if name in names}
        if curves:
            yield title, curves


def stage_bands(log: list[dict]) -> list[tuple[float, float]]:
    """The steps (from, to) of each stage of the designer.

    >>> stage_bands([{"step": s, "role": r} for s, r in enumerate(["executor", "designer"] * 2)])
    [(1.5, 2.5), (3.5, 4.5)]
    """
    runs = itertools.groupby(log, lambda line: line["role"])
    stages = [list(lines) for role, lines in runs if role == "designer"]
    return [(lines[0]["step"] + 0.5, lines[-1]["step"] + 1.5) for lines in stages]


INK = "#010203"  # what matplotlib draws in it has the page's own colour of text, light or dark


def chart_html(title: str, curves: dict[str, list], bands: list[tuple[float, float]]) -> str:
    """Curves over the steps, stages as bands, the legend with the last values below."""
    import matplotlib  # slow, and only needed here
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.2), layout="constrained")
    axes = figure.subplots()
    for begin, end in bands:
        axes.axvspan(begin, end, color=INK, alpha=0.08, lw=0)
    keys = []
    for name, points in curves.items():
        [line] = axes.plot(*zip(*points, strict=True), marker="o", ms=4, markevery=[-1])
        dot = tag("b", "\u25cf ", style=f"color:{to_hex(line.get_color())}")
        keys.append(tag("span", dot, esc(f"{name} {points[-1][1]:.3g}")))
    axes.set_ylim(0, 1.03 * max(1, *(y for points in curves.values() for _, y in points)))
    axes.margins(x=0)
    axes.grid(axis="y", color=INK, alpha=0.15)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "demo"}):
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    svg = "".join(drawn.getvalue().partition("<svg")[1:]).replace(INK, "currentcolor")
    chart = tag("div", svg, class_="wide", role="img", aria_label=title)
    return tag("h2", esc(title)) + chart + tag("p", *keys, class_="small")


def markdown_html(text: str) -> str:
    """The markdown that a run writes (headings, tables, lines, fences of Python) as HTML."""
    parts = []
    for i, part in enumerate(re.split(r"^```python\n(.*?)```$", text, flags=re.S | re.M)):
        if i % 2:
            parts.append(pre(highlight(part)))
            continue
        for block in filter(None, re.split(r"\n\s*\n", part.strip())):
            if block.startswith("#"):
                parts.append(tag("h3", esc(block.lstrip("# "))))
            elif block.startswith("|"):
                parts.append(_table_html(block.splitlines()))
            else:
                parts.append(tag("p", "<br>".join(map(esc, block.splitlines())), class_="soft"))
    return "\n".join(parts)


def _table_html(lines: list[str]) -> str:
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in lines]
    rows = [[cell.strip().replace("\\|", "|") for cell in row] for row in rows]
    rows = [row for row in rows if not all(re.fullmatch("-+", cell) for cell in row)]
    cells = [[tag("td" if i else "th", esc(cell)) for cell in row] for i, row in enumerate(rows)]
    return tag("div", tag("table", *(tag("tr", *row) for row in cells)), class_="wide")


def report_html(folder: Path) -> str:
    """The page of a run folder. Raises UsageError for a folder that has nothing of a run."""
    files = ("log.jsonl", "config.json", "table.md", "designs.md")
    there = [name for name in files if (folder / name).is_file()]
    if not there:
        raise UsageError(f"{folder} is no run folder (no {', '.join(files)}): give runs/NAME")
    texts = {name: (folder / name).read_text("utf-8", "replace") for name in there}
    steps = [read_step(line) for line in texts.get("log.jsonl", "").splitlines()]
    log, bad = [step for step in steps if step], steps.count(None)
    drawn, bands = list(charts(log)), stage_bands(log)
    notes = [f"{len(log)} steps", *(f"no {name} yet" for name in files if name not in there)]
    notes += [f"{bad} lines of log.jsonl are no steps and left out"] if bad else []
    notes += [f"curves are means of {evaluate.WINDOW} steps"] if drawn else []
    notes += ["grey bands are stages of the designer"] if bands else []
    name = f"Run {folder.resolve().name}"
    parts = [tag("h1", esc(name)), tag("p", esc("; ".join(notes)), class_="soft")]
    parts += [chart_html(title, curves, bands) for title, curves in drawn]
    if "table.md" in there:
        parts += ["<h2>Held-out tasks</h2>", markdown_html(texts["table.md"])]
    if "designs.md" in there:
        before, heading, after = texts["designs.md"].partition("\n# after\n")
        halves = [tag("div", markdown_html(half)) for half in (before, heading + after) if half]
        parts += ["<h2>Designs, before and after</h2>", tag("div", *halves, class_="pair")]
    if "config.json" in there:
        config = tag("details", "<summary>config.json</summary>", pre(esc(texts["config.json"])))
        parts += ["<h2>Settings</h2>", config]
    return page(name, "\n".join(parts))


# --- the command -------------------------------------------------------------------------------

# What is asked for: a model plays it, but for the report.
MODES = ("question", "task", "serve", "report")
# Flag -> what it is read for. Any other is read wherever a model plays.
READ_FOR = {"html": {"question", "task", "report"}, "kind": {"question"}, "port": {"serve"}}


def newest_toy_run(runs: Path) -> Path:
    """The model of the toy run that ended last. Raises UsageError where there is none."""
    tables = sorted(runs.glob("*/table.md"), key=lambda path: path.stat().st_mtime)
    for table in reversed(tables):
        folder = table.parent / "final"
        if folder.is_dir() and evaluate.is_toy(evaluate.read_settings(folder, {})):
            return folder
    raise UsageError(f"no finished toy run in {runs}/: run `python train.py`, or give --model")


def read_task(name: str, seed: int) -> Task:
    """`FILE:ROW`, or `toy:ROW`: a held-out task of the toy. Rows count from 1, as lines do."""
    path, _, row = name.rpartition(":")
    if not path or not re.fullmatch("[1-9][0-9]{0,8}", row):
        raise UsageError(f"--task {name}: give FILE:ROW (rows count from 1), or toy:ROW")
    if path == "toy":
        if int(row) > evaluate.TOY_TASKS:
            raise UsageError(f"--task {name}: the toy has rows 1 to {evaluate.TOY_TASKS}")
        return toy.held_out_tasks(int(row), seed)[-1]
    if not Path(path).is_file():
        raise UsageError(f"--task {name}: no such file as {path}")
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / Path(path).name
        try:
            copy_row(Path(path), int(row), alone)
            return load(alone, level=None, dates=None)[0][0]
        except ValueError as error:  # of data.py, or of pyarrow for a broken file
            why = " ".join(str(error).replace(str(alone), path).split())
            raise UsageError(f"--task {name}: that row can't be used: {why}") from error


def copy_row(source: Path, row: int, target: Path) -> None:
    """A data file with one row of another one; an empty one if the row is not there."""
    if source.suffix == ".parquet":
        import pyarrow.parquet  # slow, and only needed here

        table = pyarrow.parquet.read_table(source).slice(row - 1, 1)
        return pyarrow.parquet.write_table(table, target)
    with source.open("rb") as lines:
        target.write_bytes(b"".join(itertools.islice(lines, row - 1, row)))


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="demo.py",
        description=__doc__.partition("\n")[0],
        epilog="The toy model answers 2*3*4*5 and 1+2+4+5+6 (both modulo 7) and f(3,4,2,1)=1. "
        "Another --seed is another draw. Exit status: 0, 2 if what was asked for can't be done, "
        "1 if it failed on the way, 130 after Ctrl-C.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--question", metavar="TEXT", help="ask this")
    rows = "ask a row of a JSONL or Parquet file (from 1), or toy:ROW; a gold in it gives a reward"
    what.add_argument("--task", metavar="FILE:ROW", help=rows)
    asked = f"answer questions typed in a browser, at {HOST} only, until Ctrl-C"
    what.add_argument("--serve", action="store_true", help=asked)
    what.add_argument("--report", metavar="RUN", help="make a page of a run folder: runs/NAME")
    add = parser.add_argument
    add("--html", metavar="FILE", help="write the page there (--report: default RUN/report.html)")
    add("--port", type=int, default=PORT, metavar="N", help=f"of --serve (default {PORT})")
    kinds = "of --question: what the designer is told to answer with (default math)"
    add("--kind", choices=("math", "code"), default="math", help=kinds)
    model = "the model, or its name on the hub (default: the newest finished toy run in runs/)"
    add("--model", metavar="FOLDER|NAME", help=model)
    system = "designed (default); single: one agent; structure:NAME: a fixed script"
    add("--system", default="designed", help=system)
    evaluate.add_settings(parser)
    return parser


def check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises UsageError for what can't work or would not be read, before anything is loaded."""
    [mode] = [name for name in MODES if getattr(args, name) not in (None, False)]
    for name, value in vars(args).items():
        read = mode in READ_FOR.get(name, {"question", "task", "serve"})
        if value != parser.get_default(name) and name != mode and not read:
            raise UsageError(f"--{mode} does not read --{name.replace('_', '-')}: leave it out")
    if args.html and (Path(args.html).is_dir() or not Path(args.html).absolute().parent.is_dir()):
        raise UsageError(f"--html {args.html}: give a file in a folder that exists")
    if args.question is not None:
        check_question(args.question)
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: give 1 to 65535, or 0 for any that is free")
    if args.system in evaluate.VOTES:
        raise UsageError(f"--system {args.system} is many runs, this shows one: give single")
    if args.system != "designed" and args.designer_prompt:
        raise UsageError(f"--designer-prompt: {args.system} asks no designer, leave it out")
    read_prompt(args.designer_prompt)


@contextmanager
def open_player(args: argparse.Namespace, folder: Path, settings: dict) -> Iterator[Callable]:
    """LiveRun.play with the model of a folder; the sandbox is closed at the end."""
    scripts, prompt = evaluate.scripts_and_prompt(settings)
    forced = evaluate.forced_structure(args.system, scripts)
    # Not in rounds, which show the replies of a turn when the last of them is done.
    options = {name: settings[name] for name in evaluate.SAMPLING if name != "deterministic"}
    options |= {"designer_prompt": prompt, "scripts": [scripts[forced]] if forced else None}
    configure(settings["isolation"])
    engine = open_engine(folder, evaluate.device_of(args), max_context=settings["max_context"])
    with open_pool(max_live=1) as pool:
        yield partial(LiveRun.play, engine=engine, pool=pool, **options)


def run(args: argparse.Namespace) -> None:
    """The command, but for --report."""
    folder = find_model(args.model) if args.model else newest_toy_run(Path("runs"))
    if not args.model:
        print(f"model: {folder}, of the newest finished toy run", file=sys.stderr)
    settings = evaluate.settings_of(args, folder)
    model = args.model or str(folder)
    if args.serve:
        hint = "such as 2*3*4*5 or 1+2+4+5+6 or f(3,4,2,1)=1" if evaluate.is_toy(settings) else ""
        with Site(args.port, hint) as site, open_player(args, folder, settings) as play:
            return serve(site, play, model)
    if args.task is not None:
        task = read_task(args.task, settings["seed"])
    else:
        task = Task("question", args.kind, check_question(args.question))
    live = LiveRun(task, args.task or "", model, graded=has_gold(task))
    with open_player(args, folder, settings) as play:
        say(clip(question_text(task)))
        play(live, show=print_event)
        print_end(live)
    if args.html:
        body = f"<h1>MetaAgent-X: see it think</h1>{run_html(live)}"
        evaluate.write_text(args.html, page("MetaAgent-X: a run", body))
        print(f"the page is {args.html}")


def has_gold(task: Task) -> bool:
    """Can an answer to this task be scored?"""
    return bool(task.tests) if task.kind == "code" else usable_gold(task.answer or "")


def report(args: argparse.Namespace) -> None:
    folder = Path(args.report)
    out = args.html or folder / "report.html"
    evaluate.write_text(out, report_html(folder))
    print(f"the page is {out}")


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    sys.stdout.reconfigure(errors="backslashreplace")  # a reply may hold what a terminal can't show

    def work() -> None:
        check_arguments(args, parser)
        (report if args.report is not None else run)(args)

    return evaluate.one_line_errors("demo.py", work, shown=seen)


if __name__ == "__main__":
    sys.exit(main())
