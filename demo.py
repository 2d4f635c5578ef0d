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
import tokenize
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import transformers

import design
import toy
from data import DataError, OneLineParser, Task, load
from engine import find_model, open_engine
from evaluate import (
    EVALUATION_STEP,
    SAMPLING,
    TOY_TASKS,
    UsageError,
    device_of,
    evaluation_score,
    forced_structure,
    is_toy,
    one_line_errors,
    read_settings,
    reward_names,
    settings_of,
    write_text,
)
from execute import DESIGNER, Call, Rollout, question_text, rollout
from reward import usable_tasks
from sandbox import ScriptPool, configure

HOST, PORT = "127.0.0.1", 8333
MAX_QUESTION = 20_000  # characters
MAX_BODY = 128 * 1024  # bytes of a request
PING_S = 15.0  # a silent stream says this often that it lives, and so learns who is gone
WAKE_S = 0.5  # the server's main thread looks up this often
SHOWN_LINES = 12  # of a text in the terminal
SHADES = (0.1, 0.5, 1.0, 2.0, 4.0)  # nats
NODE_W, NODE_H, GAP_X, GAP_Y, SIDE = 158, 46, 22, 44, 60  # pixels of the graph
WINDOW = 5  # steps that a curve is the mean of, as in curve.png


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
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    def take(self, event: dict) -> None:
        self.seconds = time.monotonic() - self.started
        if event["event"] == "call_started":
            asked = event["role"], event["agent"], event["messages"], event["turn"]
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

    def finish(self, rolled: Rollout) -> None:
        """Takes over what the events don't tell: ids, log-probs, errors."""
        drawn = rolled.designs[0]
        execution = drawn.executions[0]
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
        calls = [*self.calls, *([self.designed] if self.designed else [])]
        parts = [self.structure] if self.structure else []
        parts += [self.status or "running", f"{len(calls)} call{'s' * (len(calls) != 1)}"]
        tokens = sum(call.tokens() for call in calls)
        parts += [f"{tokens} tokens"] if tokens else []
        parts += [f"reward {self.reward:g}"] if self.status and self.graded else []
        return [*parts, f"{self.seconds:.2f} s"]


@dataclass
class Player:
    """Who plays: an engine, the sandbox's scripts, and how to sample (options of rollout)."""

    engine: object
    pool: ScriptPool
    model: str
    options: dict

    def play(self, live: LiveRun, show: Callable[[LiveRun, dict], None], **more) -> None:
        """A design of the live run's task and its execution; show(live, event) at each event."""

        def on_event(event: dict) -> None:
            live.take(event)
            show(live, event)

        def score(task, answer: str) -> float:
            return evaluation_score(task, answer) if live.graded else 0.0

        plan = {"n_designs": 1, "n_executions": 1, "step": EVALUATION_STEP, "on_event": on_event}
        plan |= self.options | more
        [rolled] = rollout([live.task], self.engine, self.pool, score, **plan)
        live.finish(rolled)


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

    >>> tag("text", esc("a<b"), x=1.25, class_="dim", text_anchor='"')
    '<text x="1.2" class="dim" text-anchor="&quot;">a&lt;b</text>'
    """
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    texts = {key: f"{x:.1f}" if isinstance(x, float) else x for key, x in named.items()}
    listed = "".join(f' {key}="{esc(text)}"' for key, text in texts.items())
    return f"<{name}{listed}>{''.join(inside)}</{name}>"


def pre(*inside: str) -> str:
    return tag("pre", "\n", *inside)  # the parser drops a line break at the start: not theirs


def highlight(source: str) -> str:
    """A script as HTML: keywords, strings, comments and, strongest, what makes its structure.

    Only marks are added: the text of the result is the source, whatever it holds.

    >>> highlight("x = AgentNode('a')")
    'x = <b>AgentNode</b>(<span class=q>&#x27;a&#x27;</span>)'
    """
    lines = list(io.StringIO(source))
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    try:
        tokens = list(tokenize.generate_tokens(iter(lines).__next__))
    except (tokenize.TokenError, SyntaxError):  # a refused script may be no Python at all
        return esc(source)
    parts, done = [], 0
    for token in tokens:
        start, end = (min(starts[min(row - 1, len(lines))] + column, len(source))
                      for row, column in (token.start, token.end))  # fmt: skip
        mark = _mark(token)
        if mark and done <= start < end:
            parts += [esc(source[done:start]), mark.format(esc(source[start:end]))]
            done = end
    return "".join(parts) + esc(source[done:])


def _mark(token: tokenize.TokenInfo) -> str:
    kind = tokenize.tok_name[token.type]
    if kind == "NAME":
        if token.string in (*design.CLASSES, "add_node", "add_nodes", "run"):
            return "<b>{}</b>"
        return "<span class=k>{}</span>" if keyword.iskeyword(token.string) else ""
    is_text = "STRING" in kind  # also the parts of an f-string
    return "<span class=q>{}</span>" if is_text else "<i>{}</i>" if kind == "COMMENT" else ""


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
:root{color-scheme:light dark;--bg:#fbfaf7;--card:#fff;--ink:#1d2330;--soft:#667085;--line:#d9d6cd;
--hot:224,122,60;--key:#8250df;--text:#0a6b4d;--node:#b3401c;--good:#1a7f37;--bad:#b42318}
@media(prefers-color-scheme:dark){:root{--bg:#14171d;--card:#1c2129;--ink:#e4e7ec;--soft:#98a2b3;
--line:#363d49;--hot:240,140,70;--key:#c297ff;--text:#6fd3a8;--node:#ff9e64;--good:#56d364;
--bad:#ff7b72}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.2rem;max-width:62rem;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
h1{font-size:1.25rem;margin:0 0 .6rem}h2{font-size:1rem;margin:1.6rem 0 .5rem}
h3{font-size:.9rem;margin:.6rem 0 .2rem}small,.soft,summary{color:var(--soft);font-size:.85rem}
pre{margin:.3rem 0;padding:.6rem .8rem;background:var(--card);border:1px solid var(--line);
border-radius:6px;font:13px/1.5 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;
max-height:32rem;overflow:auto;tab-size:4}
pre b{color:var(--node)}.k{color:var(--key)}.q{color:var(--text)}pre i{color:var(--soft)}
.chip,.key{display:inline-block;max-width:100%;font-size:.85rem}
.chip{margin:.1rem .3rem .1rem 0;padding:.05rem .6rem;border-radius:1rem;
border:1px solid var(--line);background:var(--card)}
.good{color:var(--good);border-color:currentcolor}.bad{color:var(--bad);border-color:currentcolor}
.call{margin:.7rem 0;padding:.5rem .8rem;border:1px solid var(--line);background:var(--card);
border-left:4px solid var(--c,var(--line));border-radius:6px}
.call:target{outline:2px solid var(--c)}.call pre{background:var(--bg)}
.head{display:flex;flex-wrap:wrap;gap:.2rem .8rem;align-items:baseline;overflow-wrap:anywhere}
.head svg{margin-left:auto;flex:none}
.s1{background:rgba(var(--hot),.14)}.s2{background:rgba(var(--hot),.28)}
.s3{background:rgba(var(--hot),.42)}.s4{background:rgba(var(--hot),.58)}
.s5{background:rgba(var(--hot),.78)}
.shades{font-size:.85rem}.shades span{display:inline-block;padding:0 .5rem}
.wide{overflow-x:auto;padding:2px}.wide svg{display:block;overflow:visible}
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .dim{fill:var(--soft);font-size:11px}svg rect.node{fill:var(--card);stroke:var(--c,var(--line));
stroke-width:1.5}.wait{stroke-dasharray:4 3}.edge{fill:none;stroke:var(--soft);stroke-width:1.3}
.edge.count{stroke-dasharray:3 4}svg .tip{fill:var(--soft)}svg .grid{stroke:var(--line)}
svg .band{fill:var(--line);opacity:.45}svg .bar{fill:var(--c,var(--soft))}
.curve{fill:none;stroke:var(--c);stroke-width:2}
.key{margin-right:1rem}
.key:before{content:"";display:inline-block;width:.8rem;height:.25rem;margin:0 .35rem .2rem 0;
background:var(--c)}
table{border-collapse:collapse;font-size:.85rem;margin:.5rem 0}
td,th{padding:.2rem .7rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr));gap:0 1rem}
textarea{width:100%;padding:.6rem;font:14px ui-monospace,monospace;color:inherit;
background:var(--card);border:1px solid var(--line);border-radius:6px}
button,select{padding:.3rem .9rem;font:inherit;color:inherit;background:var(--card);
border:1px solid var(--line);border-radius:6px}
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


def run_html(live: LiveRun, tokenizer=None) -> str:
    """All of a run that is known so far."""
    looks = {"ok": "chip good", "reward 1": "chip good", "reward 0": "chip bad"}
    looks |= {live.status: "chip bad"} if live.status != "ok" else {}
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
    agents = {name: i for i, name in enumerate(dict.fromkeys(c.agent for c in live.calls))}
    if live.designed:
        parts.append(call_html(live.designed, "designer", len(agents), live.seconds, tokenizer))
    if live.calls:
        graph = tag("div", graph_svg(live, agents), class_="wide")
        surest = ["p > 0.9", "0.9", "0.6", "0.37", "0.14", "p < 0.02"]
        shades = [tag("span", esc(text), class_=f"s{i}") for i, text in enumerate(surest)]
        parts += ["<h2>Agents</h2>", graph, tag("p", LEGEND, class_="soft"), "<h2>Calls</h2>"]
        parts.append(tag("p", "The shade of a token: ", *shades, class_="shades"))
    for i, call in enumerate(live.calls, 1):
        parts.append(call_html(call, str(i), agents[call.agent], live.seconds, tokenizer))
    return "\n".join(parts)


LEGEND = """A row is a turn: its calls were asked for together and answered side by side. An arrow:
this reply stands in that prompt. Dashed: it was counted or judged, not quoted."""


def call_html(live: LiveCall, name: str, hue: int, seconds: float, tokenizer) -> str:
    """One call: what it cost and when, its reply, and behind a click its prompt."""
    facts, title = ["running"], name
    if live.ended is not None:
        facts = [f"{live.ended - live.began:.2f} s from {live.began:.2f} s"]
    if live.role == "executor":
        facts.insert(0, f"turn {live.turn + 1}")
        title = f"{name} {live.agent}"
    if live.tokens():
        mean = math.fsum(live.call.logp_sampler) / live.tokens()
        facts.append(f"{len(live.call.prompt_ids)} + {live.tokens()} tokens")
        facts.append(f"mean log-prob {mean:.2f}")
    if live.call and live.call.finish_reason == "length":
        facts.append("cut at the limit")
    scale = 120 / max(seconds, 1e-9)
    left, right = scale * live.began, scale * (live.ended or seconds)
    rail = tag("rect", class_="band", width=120, height=6)
    bar = tag("rect", class_="bar", x=left, width=max(right - left, 2.0), height=6)
    head = tag("strong", esc(title)) + tag("small", esc(" · ".join(facts)))
    head += tag("svg", rail, bar, width=120, height=6)
    sent = [tag("h3", esc(each["role"])) + pre(esc(each["content"])) for each in live.messages]
    prompt = tag("details", "<summary>prompt</summary>", *sent, id=f"prompt-{name}")
    reply = "" if live.ended is None else reply_html(live, tokenizer)
    body = tag("div", head, class_="head") + reply + prompt
    return tag("div", body, class_="call", id=f"call-{name}", style=colour(hue))


def places(turns: Sequence[int]) -> tuple[list[tuple[float, float]], float, float]:
    """Turns of calls -> their centres in the graph, its width and its height. Rows are centred.

    >>> places([0, 0, 1])
    ([(139.0, 113.0), (319.0, 113.0), (229.0, 203.0)], 458, 316)
    """
    rows = [[i for i, turn in enumerate(turns) if turn == t] for t in sorted(set(turns))]
    width = max(map(len, rows)) * (NODE_W + GAP_X) - GAP_X + 2 * SIDE
    centres = {}
    for y, row in enumerate(rows, 1):
        left = width / 2 - (len(row) - 1) * (NODE_W + GAP_X) / 2
        for x, i in enumerate(row):
            centres[i] = left + x * (NODE_W + GAP_X), y * (NODE_H + GAP_Y) + NODE_H / 2
    height = (len(rows) + 2) * (NODE_H + GAP_Y) - GAP_Y
    return [centres[i] for i in range(len(turns))], width, height


def graph_svg(live: LiveRun, agents: dict[str, int]) -> str:
    """The calls of a run as a graph, from the question above to the answer below."""
    calls, sources = live.calls, flows(live.calls, question_text(live.task))
    centres, width, height = places([call.turn for call in calls])
    top, bottom = (width / 2, NODE_H / 2), (width / 2, height - NODE_H / 2)
    edges = [(top, centres[k], "edge") for k, found in enumerate(sources) if not found]
    edges += [(centres[j], centres[k], "edge") for k, found in enumerate(sources) for j in found]
    if live.status:
        answer = (live.answer or "").strip()
        saying = [j for j, call in enumerate(calls) if answer in handed_on(call.text)]
        saying = [j for j in saying if calls[j].turn == calls[saying[-1]].turn]
        edges += [(centres[j], bottom, "edge") for j in saying]
        counted = set(range(len(calls))) - set().union(saying, *sources)
        edges += [(centres[j], bottom, "edge count") for j in sorted(counted)]
    nodes = [_node(top, "question")]
    for i, (call, centre) in enumerate(zip(calls, centres, strict=True), 1):
        detail = "running" if call.ended is None else f"{call.ended - call.began:.2f} s"
        detail = f"{call.tokens()} tokens, {detail}" if call.tokens() else detail
        node = _node(centre, f"{i} {call.agent}", detail, call.ended, colour(agents[call.agent]))
        nodes.append(tag("a", node, href=f"#call-{i}"))
    for turn, y in sorted({(call.turn, y) for call, (_, y) in zip(calls, centres, strict=True)}):
        nodes.append(tag("text", f"turn {turn + 1}", x=0, y=y + 4, class_="dim"))
    reward = f"reward {live.reward:g}" if live.graded and live.status else live.status
    nodes.append(_node(bottom, "answer", reward, live.status or None))
    tip = tag("path", d="M0,0 L8,4 L0,8 z", class_="tip")
    size = {"refX": 7, "refY": 4, "markerWidth": 7, "markerHeight": 7, "orient": "auto"}
    tip = tag("defs", tag("marker", tip, id="tip", viewBox="0 0 8 8", **size))
    lines = [_edge(*edge, width) for edge in edges]
    return tag("svg", tip, *lines, *nodes, width=width, height=height)


def _node(centre: tuple, name: str, detail: str = "", ended: object = "", style: str = "") -> str:
    x, y = centre
    short = name if len(name) <= 20 else f"{name[:19]}…"
    shape = {"x": x - NODE_W / 2, "y": y - NODE_H / 2, "width": NODE_W, "height": NODE_H, "rx": 7}
    inside = [tag("title", esc(name))]
    inside.append(tag("rect", class_="node wait" if ended is None else "node", **shape))
    middle = {"x": x, "text_anchor": "middle"}
    inside.append(tag("text", esc(short), y=y - 3 if detail else y + 4, **middle))
    inside.append(tag("text", esc(detail), y=y + 14, class_="dim", **middle))
    return tag("g", *inside, style=style)


def _edge(start: tuple, end: tuple, kind: str, width: float) -> str:
    """From below one node to above another; around the nodes of the rows between them."""
    (x0, y0), (x1, y1) = start, end
    y0, y1 = y0 + NODE_H / 2, y1 - NODE_H / 2 - 2
    bend, aside = (y1 - y0) / 2, 0.0
    if y1 - y0 > GAP_Y:
        aside = NODE_W * (1 if x0 + x1 >= width else -1)
        x0, x1 = x0 + aside / 4, x1 + aside / 4
    path = (x0, y0), (x0 + aside, y0 + bend), (x1 + aside, y1 - bend), (x1, y1)
    [m, *c] = (f"{x:.0f},{y:.0f}" for x, y in path)
    return tag("path", d=f"M{m} C{' '.join(c)}", class_=kind, marker_end="url(#tip)")


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
<form><textarea name=question rows=3 required autofocus placeholder="{hint}"></textarea>
<select name=kind><option>math<option>code</select> <button>ask</button>
<small id=note role=status></small></form><main><p class=soft>No question yet.</p></main>"""
CLIENT = """
const view = document.querySelector("main"), form = document.querySelector("form");
const note = document.getElementById("note"), stream = new EventSource("/events");
stream.onmessage = (event) => {
  const open = [...view.querySelectorAll("details[open]")].map((each) => each.id);
  view.innerHTML = JSON.parse(event.data);
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
};
stream.onopen = () => { note.textContent = ""; };
stream.onerror = () => { note.textContent = "not connected: is demo.py still running?"; };
form.onsubmit = async (event) => {
  event.preventDefault();
  const body = JSON.stringify({question: form.question.value, kind: form.kind.value});
  const headers = {"Content-Type": "application/json"};
  const reply = await fetch("/ask", {method: "POST", headers, body}).catch(() => null);
  note.textContent = !reply ? "not connected" : reply.ok ? "" : await reply.text();
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
    if not isinstance(asked, dict) or asked.keys() != {"question", "kind"}:
        raise UsageError("give question and kind, and nothing else")
    if not isinstance(asked["question"], str) or asked["kind"] not in ("math", "code"):
        raise UsageError("question is a text, kind is math or code")
    return Task("question", asked["kind"], check_question(asked["question"]))


HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class Site(ThreadingHTTPServer):
    """The served page: takes questions, one at a time, and shows what is published.

    The model's work stays on the main thread; requests are answered on their own.
    """

    daemon_threads = True

    def __init__(self, port: int, hint: str = ""):
        super().__init__((HOST, port), Handler)
        self.home = page("MetaAgent-X", FORM.format(hint=esc(hint)), CLIENT)
        self.asked: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self.busy = threading.Lock()  # held from a question to its answer
        self.changed = threading.Condition()
        self.version, self.view = 0, ""

    def next_question(self) -> Task:
        """Waits for one, but never for long: a Ctrl-C just before a wait is only seen after it."""
        while True:
            with suppress(queue.Empty):
                return self.asked.get(timeout=WAKE_S)

    def publish(self, view: str) -> None:
        with self.changed:
            self.version, self.view = self.version + 1, view
            self.changed.notify_all()

    def news(self, known: int) -> tuple[int, str]:
        """(version, view), as soon as the version is not the known one, or after PING_S."""
        with self.changed:
            self.changed.wait_for(lambda: self.version != known, timeout=PING_S)
            return self.version, self.view

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that left is no error
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """GET / and /events, POST /ask, for our own page only."""

    server: Site
    timeout = 30

    def refusal(self) -> str:
        """Why this request is not answered, or "": see the header, what is trusted."""
        hosts = self.headers.get_all("Host") or [""]
        if len(hosts) > 1 or not re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", hosts[0]):
            return f"this is {HOST}: open it by that address"
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            return "another origin may not ask here"
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "another site may not ask here: type the address yourself"
        return ""

    def reply(self, status: int, text: str, kind: str = "text/plain") -> None:
        self.start(status, kind)
        self.wfile.write(text.encode())  # HTTP/1.0: the end of the connection ends the text

    def start(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        refusal = self.refusal()
        if refusal:
            self.reply(403, refusal)
        elif self.path == "/":
            self.reply(200, self.server.home, "text/html")
        elif self.path == "/events":
            self.stream()
        else:
            self.reply(404, "there is only /")

    def stream(self) -> None:
        """Server-sent events: the view, whenever it changes, until the client leaves."""
        self.start(200, "text/event-stream")
        sent = 0
        while True:
            version, view = self.server.news(sent)
            line = f"data: {json.dumps(view)}" if version != sent else ": still here"
            self.wfile.write(f"{line}\n\n".encode())
            sent = version

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        refusal = self.refusal()
        if refusal:
            return self.reply(403, refusal)
        if self.path != "/ask":
            return self.reply(404, "there is only /ask")
        if self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            return self.reply(415, "give application/json")
        if not re.fullmatch(r"[0-9]{1,9}", length) or self.headers.get("Transfer-Encoding"):
            return self.reply(411, "give a Content-Length")
        if int(length) > MAX_BODY:
            return self.reply(413, f"give at most {MAX_BODY} bytes")
        try:
            task = read_ask(self.rfile.read(int(length)))
        except UsageError as error:
            return self.reply(400, str(error))
        if not self.server.busy.acquire(blocking=False):
            return self.reply(409, "one question is being answered: wait for its end")
        self.server.asked.put(task)
        self.reply(202, "asked")

    def log_message(self, *_) -> None:
        """Standard error is for errors."""


def open_site(port: int, hint: str) -> Site:
    try:
        return Site(port, hint)
    except OSError as error:
        raise UsageError(f"port {port} can't be used ({error.strerror}): give --port N") from error


def serve(site: Site, player: Player) -> None:
    """Answers the site's questions on this thread, until Ctrl-C."""
    threading.Thread(target=site.serve_forever, daemon=True).start()
    print(f"open http://{HOST}:{site.server_port} in a browser; Ctrl-C ends it", flush=True)
    try:
        for number in itertools.count():
            task = site.next_question()
            live = LiveRun(task, "", player.model)
            player.play(live, lambda now, event: site.publish(run_html(now)), places=[number])
            site.busy.release()
            site.publish(run_html(live, player.engine.tokenizer))
    except KeyboardInterrupt:
        print("\nstopped")
    finally:
        site.shutdown()
        site.server_close()


# --- a training run as a page ------------------------------------------------------------------


def read_log(text: str) -> tuple[list[dict], int]:
    """(role and finite numbers of each step, number of other lines): a crash tears the last one.

    >>> read_log('{"step": 0, "role": "executor", "reward": 0.5, "loss": NaN}\\n{"step": 1, "re')
    ([{'step': 0, 'reward': 0.5, 'role': 'executor'}], 1)
    """
    lines, bad = [], 0
    for written in text.splitlines():
        try:
            line = json.loads(written)
        except (ValueError, RecursionError):
            line = None
        line = line if isinstance(line, dict) else {}
        numbers = {n: x for n, x in line.items() if isinstance(x, int | float) and abs(x) < 1e15}
        if isinstance(numbers.get("step"), int):
            lines.append(numbers | {"role": str(line.get("role"))})
        else:
            bad += 1
    return lines, bad


def curve(log: list[dict], value: Callable[[dict], object]) -> list[tuple[int, float]]:
    """(step from 1, mean of the last WINDOW values), where there is a value.

    >>> curve([{"step": 0, "x": 1.0}, {"step": 1}, {"step": 2, "x": 0}], lambda m: m.get("x"))
    [(1, 1.0), (3, 0.5)]
    """
    known = [(line["step"] + 1, value(line)) for line in log]
    known = [(x, y) for x, y in known if y is not None]
    means = []
    for i, (x, _) in enumerate(known):
        recent = [y for _, y in known[max(0, i + 1 - WINDOW) : i + 1]]
        means.append((x, math.fsum(recent) / len(recent)))
    return means


def charts(log: list[dict]) -> list[tuple[str, dict[str, list]]]:
    """(title, name -> curve) of each chart that this log has values for."""
    names = sorted({name for line in log for name in line})

    def group(head: str, missing: float | None = None) -> dict[str, list]:
        found = [n for n in names if n.startswith(f"{head}/") and "/" not in n[len(head) + 1 :]]
        return {n[len(head) + 1 :]: curve(log, lambda m, n=n: m.get(n, missing)) for n in found}

    shown = {name.removeprefix("reward/") for name in reward_names(names)}
    kinds = {name: line for name, line in group("reward").items() if name in shown}
    rewards = {
        "designer: mean over all designs": curve(log, lambda m: m.get("reward")),
        "executor: mean over executions that ran": curve(log, lambda m: m.get("executor_reward")),
        "valid designs": curve(log, lambda m: m.get("valid_designs")),
    }
    wanted = [
        ("Reward of both roles", rewards),
        ("Reward by kind of task", kinds),
        ("Structure shares of the valid designs", group("structure", 0.0)),
    ]
    for kind in kinds:
        wanted.append((f"Structure shares, tasks {kind}", group(f"structure/{kind}", 0.0)))
    wanted.append(("Constant groups of both roles", group("constant_groups")))
    wanted.append(("Output tokens a call of both roles", group("length")))
    if any(line.get("role") == "sft" for line in log):  # in RL the loss is near 0 and says nothing
        wanted.append(("Loss", {"loss": curve(log, lambda m: m.get("loss"))}))
    wanted = [(title, {n: c for n, c in curves.items() if c}) for title, curves in wanted]
    return [(title, curves) for title, curves in wanted if curves]


def stage_bands(log: list[dict]) -> list[tuple[float, float]]:
    """The steps (from, to) of each stage of the designer.

    >>> stage_bands([{"step": s, "role": r} for s, r in enumerate(["executor", "designer"] * 2)])
    [(1.5, 2.5), (3.5, 4.5)]
    """
    runs = itertools.groupby(log, lambda line: line.get("role"))
    stages = [list(lines) for role, lines in runs if role == "designer"]
    return [(lines[0]["step"] + 0.5, lines[-1]["step"] + 1.5) for lines in stages]


def chart_html(title: str, curves: dict[str, list], bands: list[tuple[float, float]]) -> str:
    """Curves over the steps, stages as bands, the legend with the last values below."""
    left, right, top, bottom = 44, 740, 8, 196
    steps = [x for points in curves.values() for x, _ in points]
    first, last = min(steps), max(max(steps), min(steps) + 1)
    most = max(y for points in curves.values() for _, y in points)
    unit = 10 ** math.floor(math.log10(most)) if most > 1 else 1
    high = max(math.ceil(most / unit), 1) * unit

    def across(step: float) -> float:
        return left + (min(max(step, first), last) - first) / (last - first) * (right - left)

    parts, keys = [], []
    for begin, end in bands:
        size = {"width": across(end) - across(begin), "height": bottom - top}
        parts.append(tag("rect", class_="band", x=across(begin), y=top, **size))
    for i in range(5):
        y = bottom - i / 4 * (bottom - top)
        parts.append(tag("path", class_="grid", d=f"M{left},{y} H{right}"))
        name = {"class_": "dim", "text_anchor": "end"}
        parts.append(tag("text", f"{high * i / 4:g}", x=left - 6, y=y + 4, **name))
    for step in sorted({first + round((last - first) * i / 4) for i in range(5)}):
        name = {"class_": "dim", "text_anchor": "middle"}
        parts.append(tag("text", str(step), x=across(step), y=bottom + 18, **name))
    for i, (name, points) in enumerate(curves.items()):
        at = [(across(x), bottom - y / high * (bottom - top)) for x, y in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        dot = tag("circle", class_="bar", cx=at[-1][0], cy=at[-1][1], r=3)
        parts.append(tag("g", tag("polyline", points=line, class_="curve"), dot, style=colour(i)))
        keys.append(tag("span", esc(f"{name} {points[-1][1]:.3g}"), class_="key", style=colour(i)))
    svg = tag("svg", *parts, width=760, height=bottom + 24, role="img", aria_label=title)
    return tag("h2", esc(title)) + tag("div", svg, class_="wide") + tag("p", *keys)


def markdown_html(text: str) -> str:
    """The markdown that a run writes (headings, tables, lines, fences of Python) as HTML."""
    parts: list[str] = []
    for i, part in enumerate(re.split(r"^```python\n(.*?)```$", text, flags=re.S | re.M)):
        if i % 2:
            parts.append(pre(highlight(part)))
            continue
        for kind, lines in itertools.groupby(part.splitlines(), key=_kind_of_line):
            if kind == "table":
                parts.append(_table_html(lines))
            elif kind == "heading":
                parts += [tag("h3", esc(line.lstrip("# "))) for line in lines]
            elif kind == "text":
                parts.append(tag("p", "<br>".join(map(esc, lines)), class_="soft"))
    return "\n".join(parts)


def _kind_of_line(line: str) -> str:
    if not line.strip():
        return "blank"
    return {"|": "table", "#": "heading"}.get(line[0], "text")


def _table_html(lines: Iterable[str]) -> str:
    rows = [re.split(r"(?<!\\)\|", line.strip())[1:-1] for line in lines]
    rows = [[cell.strip().replace("\\|", "|") for cell in row] for row in rows]
    rows = [row for row in rows if not all(re.fullmatch("-+", cell) for cell in row)]
    cells = [[tag("td" if i else "th", esc(cell)) for cell in row] for i, row in enumerate(rows)]
    return tag("div", tag("table", *(tag("tr", *row) for row in cells)), class_="wide")


def report_html(folder: Path) -> str:
    """The page of a run folder. Raises UsageError for a folder that has nothing of a run."""
    names = ("log.jsonl", "config.json", "table.md", "designs.md")
    paths = [folder / name for name in names]
    texts = [path.read_text("utf-8", "replace") if path.is_file() else "" for path in paths]
    if not any(path.is_file() for path in paths):
        raise UsageError(f"{folder} is no run folder (no {', '.join(names)}): give runs/NAME")
    log, bad = read_log(texts[0])
    _, config, table, designs = texts
    notes = [f"{len(log)} steps"]
    notes += [f"no {path.name} yet" for path in paths if not path.is_file()]
    notes += [f"{bad} lines of log.jsonl are no steps and left out"] if bad else []
    drawn, bands = charts(log), stage_bands(log)
    notes += [f"curves are means of {WINDOW} steps"] if drawn else []
    notes += ["grey bands are stages of the designer"] if bands else []
    title = f"Run {folder.resolve().name}"
    parts = [tag("h1", esc(title)), tag("p", esc("; ".join(notes)), class_="soft")]
    parts += [chart_html(name, curves, bands) for name, curves in drawn]
    if table:
        parts += ["<h2>Held-out tasks</h2>", markdown_html(table)]
    if designs:
        before, heading, after = designs.partition("\n# after\n")
        halves = [tag("div", markdown_html(half)) for half in (before, heading + after) if half]
        parts += ["<h2>Designs, before and after</h2>", tag("div", *halves, class_="pair")]
    if config:
        summary = "<summary>config.json</summary>"
        parts += ["<h2>Settings</h2>", tag("details", summary, pre(esc(config)))]
    return page(title, "\n".join(parts))


# --- the command -------------------------------------------------------------------------------

MODEL_FLAGS = {"model", "system", "designer_prompt", "temperature", "max_tokens", "max_context"}
MODEL_FLAGS |= {"seed", "isolation", "device"}
READ_BY = {  # what is asked for -> the flags that it reads
    "question": MODEL_FLAGS | {"html", "kind"},
    "task": MODEL_FLAGS | {"html"},
    "serve": MODEL_FLAGS | {"port"},
    "report": {"html"},
}


def newest_toy_run(runs: Path) -> Path:
    """The model of the toy run that ended last. Raises UsageError where there is none."""
    tables = sorted(runs.glob("*/table.md"), key=lambda path: path.stat().st_mtime)
    for table in reversed(tables):
        folder = table.parent / "final"
        if folder.is_dir() and is_toy(read_settings(folder, {})):
            return folder
    raise UsageError(f"no finished toy run in {runs}/: run `python train.py`, or give --model")


def read_task(name: str, seed: int) -> Task:
    """`FILE:ROW`, or `toy:ROW`: a held-out task of the toy. Rows count from 1, as lines do."""
    path, _, row = name.rpartition(":")
    if not path or not re.fullmatch("[1-9][0-9]{0,8}", row):
        raise UsageError(f"--task {name}: give FILE:ROW (rows count from 1), or toy:ROW")
    if path == "toy":
        if int(row) > TOY_TASKS:
            raise UsageError(f"--task {name}: the toy has rows 1 to {TOY_TASKS}")
        return toy.make_tasks(int(row), f"{seed} eval", held_out=True)[-1]
    if not Path(path).is_file():
        raise UsageError(f"--task {name}: no such file as {path}")
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / Path(path).name
        copy_row(Path(path), int(row), alone)
        try:
            return load(alone, level=None, dates=None)[0][0]
        except DataError as error:
            why = str(error).replace(str(alone), path)
            raise UsageError(f"--task {name}: that row can't be used: {why}") from error


def copy_row(source: Path, row: int, target: Path) -> None:
    """A data file with one row of another one; an empty one if the row is not there."""
    if source.suffix != ".parquet":
        with source.open("rb") as lines:
            target.write_bytes(b"".join(itertools.islice(lines, row - 1, row)))
        return
    import pyarrow.parquet  # slow, and only needed here

    try:
        table = pyarrow.parquet.read_table(source).slice(row - 1, 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{source}: broken Parquet file, fetch it again") from error
    pyarrow.parquet.write_table(table, target)


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="demo.py",
        description="See it think: one question, the script that the designer writes for it, the "
        "calls of its agents as they run, the answer. In the terminal, as one HTML file that "
        "needs nothing else, or live in a browser on this machine. A run folder as a page, too.",
        epilog="What the page shows: the script; the graph of the calls that were made (a row a "
        "turn, an arrow where a reply stands in a prompt); each call's prompt, reply, time, and "
        "its tokens shaded by how unlikely they were. The toy model answers 2*3*4*5 and "
        "1+2+4+5+6 (both modulo 7) and f(3,4,2,1)=1. Another --seed is another draw. Exit status: "
        "0, 2 if what was asked for can't be done, 1 if it failed on the way, 130 after Ctrl-C.",
        allow_abbrev=False,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--question", metavar="TEXT", help="ask this")
    what.add_argument("--task", metavar="FILE:ROW",
        help="ask a row of a JSONL or Parquet file (rows count from 1), or toy:ROW; with a gold "
        "in it there is a reward")  # fmt: skip
    what.add_argument("--serve", action="store_true",
        help=f"answer questions typed in a browser, at {HOST} only, until Ctrl-C")  # fmt: skip
    what.add_argument("--report", metavar="RUN", help="make a page of a run folder: runs/NAME")
    add = parser.add_argument
    add("--html", metavar="FILE", help="write the page there (--report: default RUN/report.html)")
    add("--port", type=int, default=PORT, metavar="N", help=f"of --serve (default {PORT})")
    add("--kind", choices=("math", "code"), default="math",
        help="of --question: what the designer is told to answer with (default math)")  # fmt: skip
    add("--model", metavar="FOLDER|NAME",
        help="the model, or its name on the hub (default: the newest finished toy run in runs/)",
        )  # fmt: skip
    add("--system", default="designed",
        help="designed (default); single: one agent; structure:NAME: a fixed script")  # fmt: skip
    add("--designer-prompt", metavar="FILE", help="a text file with {question} in it")
    add("--temperature", type=float, metavar="T", help="of sampling, 0: the likeliest token")
    add("--max-tokens", type=int, metavar="N", help="output tokens a call, for both roles")
    add("--max-context", type=int, metavar="N", help="tokens of prompt and reply together")
    add("--seed", type=int, metavar="S", help="of the sampling, and of the toy tasks")
    isolation = "strict: all layers of the sandbox or an error; best: those that are there"
    add("--isolation", choices=("strict", "best"), help=isolation)
    add("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    return parser


def check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Raises UsageError for what can't work or would not be read, before anything is loaded."""
    [mode] = [name for name in READ_BY if getattr(args, name) not in (None, False)]
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    unread = ", ".join(f"--{n.replace('_', '-')}" for n in sorted(given - READ_BY[mode] - {mode}))
    if unread:
        raise UsageError(f"--{mode} does not read {unread}: leave it out")
    if args.html and (Path(args.html).is_dir() or not Path(args.html).absolute().parent.is_dir()):
        raise UsageError(f"--html {args.html}: give a file in a folder that exists")
    if args.question is not None:
        check_question(args.question)
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port {args.port}: give 1 to 65535, or 0 for any that is free")
    if args.system != "designed" and args.designer_prompt:
        raise UsageError(f"--designer-prompt: {args.system} asks no designer, leave it out")


@contextmanager
def open_player(args: argparse.Namespace, folder: Path, settings: dict) -> Iterator[Player]:
    """The model of a folder, ready to play; the sandbox is closed at the end."""
    scripts = toy.SCRIPTS if is_toy(settings) else design.SCRIPTS
    forced = forced_structure(args.system, scripts)
    prompt = settings["designer_prompt"] or (toy.DESIGNER_PROMPT if is_toy(settings) else None)
    # Not in rounds, which show the replies of a turn when the last of them is done.
    options = {name: settings[name] for name in SAMPLING if name != "deterministic"}
    options |= {"designer_prompt": prompt, "scripts": [scripts[forced]] if forced else None}
    configure(settings["isolation"])
    engine = open_engine(folder, device_of(args), max_context=settings["max_context"])
    workflow = Path(__file__).with_name("workflow.py").read_text(encoding="utf-8")
    with ScriptPool({"workflow": workflow}, max_live=1) as pool:
        yield Player(engine, pool, args.model or str(folder), options)


def run(args: argparse.Namespace) -> None:
    """The command, but for --report."""
    folder = find_model(args.model) if args.model else newest_toy_run(Path("runs"))
    if not args.model:
        print(f"model: {folder}, of the newest finished toy run", file=sys.stderr)
    settings = settings_of(args, folder)
    if args.serve:
        hint = "2*3*4*5   or   1+2+4+5+6   or   f(3,4,2,1)=1" if is_toy(settings) else "a question"
        with open_site(args.port, hint) as site, open_player(args, folder, settings) as player:
            return serve(site, player)
    if args.task is not None:
        task = read_task(args.task, settings["seed"])
    else:
        task = Task("question", args.kind, check_question(args.question))
    with open_player(args, folder, settings) as player:
        live = LiveRun(task, args.task or "", player.model, graded=has_gold(task))
        say(clip(question_text(task)))
        player.play(live, print_event)
        print_end(live)
        if args.html:
            tokenizer = player.engine.tokenizer
            body = f"<h1>MetaAgent-X: see it think</h1>{run_html(live, tokenizer)}"
            write_text(args.html, page("MetaAgent-X: a run", body))
            print(f"the page is {args.html}")


def has_gold(task: Task) -> bool:
    """Can an answer to this task be scored?"""
    return bool(task.tests) if task.kind == "code" else usable_tasks([task])[1] == []


def report(args: argparse.Namespace) -> None:
    folder = Path(args.report)
    out = args.html or folder / "report.html"
    write_text(out, report_html(folder))
    print(f"the page is {out}")


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    sys.stdout.reconfigure(errors="backslashreplace")  # a reply may hold what a terminal can't show

    def work() -> None:
        check_arguments(args, parser)
        (report if args.report is not None else run)(args)

    return one_line_errors("demo.py", work, shown=seen)


if __name__ == "__main__":
    sys.exit(main())
