r"""The API that designed scripts import: agents, ways to combine them, and the workflow that runs.

The idea
--------
A designed script is ordinary Python that says `from workflow import AgentNode, Workflow`, builds
nodes, and calls `workflow.run(question)`. This module runs *inside the sandbox*, next to that
script. It has no model, no network and no files. All it can do is send one of three messages to
the host on descriptor 3 (one JSON object a line) and wait for the reply:

    {"calls": [{"agent": str, "messages": [{"role": str, "content": str}, ...]}, ...]}
                          ->  {"texts": [str, ...]}     one text a call, in the same order
    {"python": str}       ->  {"output": str}           the host runs the program
    {"answer": str}           no reply                  the last one counts

Sampling parameters are not in the schema, so no agent can set them.

Every node is a generator
-------------------------
`node.steps(text)` yields lists of requests, is sent the list of their results, and returns the
node's reply. A chain is `yield from`, one after the other. `side_by_side` merges the lists of
several generators into one, so three agents of an ensemble cost one message, and so do three
nested chains inside an ensemble, step by step. `drive` is the only place that talks to the host.

    EnsembleNode of 3 agents:  -> {"calls": [a, b, c]}   <- {"texts": [.., .., ..]}   (one message)
    chain of 3 agents:         three messages with one call each

What an agent is sent
---------------------
    [{"role": "system", "content": system_prompt}, {"role": "user", "content": text}]

where `text` is the question, and after it, for each earlier node of the chain,

    "\n\n[" + name + "]\n" + delivery

A *delivery* is what stands in the reply's last <delivery>...</delivery>, or else the whole
*visible* reply: the reply without <think>...</think>, stripped. Critics, debaters and judges see
whole visible replies, in the same `[name]` form, because they have to check the work.

With a Python tool (a tool registered under a name that holds "python" or "code") and only then,
the system prompt ends with `PYTHON_TOOL`, and a visible reply that holds

    <python>
    print(6 * 7)
    </python>

outside <solution>...</solution> is a tool call. Two turns are added, the assistant's visible reply
up to the end of that call and the user's "Output:\n42\n", and the agent is asked again: at most
`max_turns` runs, so `max_turns + 1` calls. A code fence is never a tool call.

Different from the reference, and why
-------------------------------------
* It runs the first fenced block of *any* reply as a tool, even the answer inside <solution>, and
  asks again: 3 calls instead of 1. Here a call needs its own tag and a registered tool.
* It stops reflecting when a critique ends with "CORRECT", which "INCORRECT" does. See `accepts`.
* It patches scripts with regular expressions, which a `)` in a name breaks. Nothing is patched
  here. One repair is made to texts, not to code: see `mend_escapes`.
* LoopWorkflow, ConditionalWorkflow and AgentGraph are broken there with agents, and refused here.
* It appends output instructions to every system prompt. Here the designer writes all of it.

How to run it alone: `python workflow.py` plays the host by hand and prints the messages of an
ensemble in front of a checker. Only the standard library is imported, and little of that,
because a training run loads this file for hundreds of thousands of scripts.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable, Generator

CHANNEL = 3  # the descriptor that the sandbox gives to a script
MAX_OUTPUT = 4000  # characters of a tool's output that an agent is shown

# What a generator of this file yields, is sent, and returns.
Steps = Generator[list[dict], list[str], str]

PYTHON_TOOL = """

You can run Python. Write the program between <python> and </python> and stop there.
What it prints comes back as the next message. Nothing is kept from one run to the next.
Reply without <python> when you know the answer."""

REFLECTION_PROMPT = """{question}

Proposed answer:
{response}

Check this answer step by step and say what to fix.
End with the line VERDICT: CORRECT or the line VERDICT: INCORRECT"""

REFINEMENT_PROMPT = """{question}

Your earlier answer:
{response}

The critic says:
{reflection}

Give the complete corrected answer."""

DEBATE_PROMPT = "Weigh the replies above, correct yourself if others are right, and answer again."
JUDGE_PROMPT = "Decide which reply is right, or mend the best one. Give the complete final answer."


# ---------------------------------------------------------------------------------------------
# The channel
# ---------------------------------------------------------------------------------------------

_one_message_at_a_time = threading.Lock()


def exchange(message: dict, reply_field: str | None) -> list[str] | str | None:
    """Send one message to the host and return `reply_field` of its reply (None: no reply comes).

    The lock holds from the message to its reply, so a script may use threads.
    Raises EOFError when the host has closed the channel, OSError when there is none.
    """
    line = memoryview(json.dumps(message).encode() + b"\n")
    with _one_message_at_a_time:
        while line:
            line = line[os.write(CHANNEL, line) :]
        if reply_field is None:
            return None
        received = bytearray()
        while not received.endswith(b"\n"):
            chunk = os.read(CHANNEL, 1 << 16)
            if not chunk:
                raise EOFError("the host closed the channel: the script can't go on")
            received += chunk
    return json.loads(received)[reply_field]


def drive(steps: Steps) -> str:
    """Run a generator to its end against the host: all calls of a step go in one message."""
    results: list[str] | None = None
    while True:
        try:
            requests = steps.send(results)
        except StopIteration as end:
            return end.value
        calls = [request for request in requests if "python" not in request]
        texts = iter(exchange({"calls": calls}, "texts") if calls else [])
        results = [exchange(r, "output") if "python" in r else next(texts) for r in requests]


def side_by_side(running: list[Steps]) -> Generator[list[dict], list[str], list[str]]:
    """Advance several generators in step; each yielded list holds the requests of all of them."""
    replies: list[str] = [""] * len(running)
    results: dict[int, list[str] | None] = dict.fromkeys(range(len(running)))
    while True:
        requests: dict[int, list[dict]] = {}
        for i, sent in results.items():
            try:
                requests[i] = running[i].send(sent)
            except StopIteration as end:
                replies[i] = end.value
        if not requests:
            return replies
        merged = yield [request for asked in requests.values() for request in asked]
        flat = iter(merged)
        results = {i: [next(flat) for _ in asked] for i, asked in requests.items()}


# ---------------------------------------------------------------------------------------------
# Texts
# ---------------------------------------------------------------------------------------------

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_SOLUTION = re.compile(r"<solution>.*?(?:</solution>|\Z)", re.DOTALL)
_TOOL_CALL = re.compile(r"<python>\s*?\n?(.*?)</python>", re.DOTALL)
_FENCE = re.compile(r"```[^\n]*\n(.*?)```", re.DOTALL)
_FIELD = re.compile(r"\{(question|response|reflection|history)\}")
# What Python makes of \times, \neq or \right in a plain string, where no text goes on so by chance.
_COMMANDS = "times theta text textbf textit tau tfrac triangle neq nabla notin right rightarrow rho"
_COMMANDS += " rangle rfloor rceil"
_CONTROL = {"t": "\t", "n": "\n", "r": "\r"}
_LOST = {_CONTROL[name[0]] + name[1:]: "\\" + name for name in _COMMANDS.split()}
_LOST_COMMAND = re.compile(f"(?:{'|'.join(_LOST)})(?![A-Za-z])")


def visible(reply: str) -> str:
    r"""The reply without its thinking, stripped. A thought that never ends is dropped whole.

    >>> visible("<think>2+2 is 4</think> It is 4. ")
    'It is 4.'
    >>> visible("opened by the chat template</think>4"), visible("<think>cut off")
    ('4', '')
    """
    head, closed, tail = reply.partition("</think>")
    if closed and "<think>" not in head:
        reply = tail
    return _THOUGHT.sub("", reply).strip()


def delivery(reply: str) -> str:
    """What a reply hands on to the next node of a chain.

    >>> delivery("long work <delivery> x = 3 </delivery> bye"), delivery("<think>hm</think>x = 3")
    ('x = 3', 'x = 3')
    """
    text = visible(reply)
    end = text.rfind("</delivery>")
    start = text.rfind("<delivery>", 0, max(end, 0))
    return text if start < 0 else text[start + len("<delivery>") : end].strip()


def with_replies(text: str, names: list[str], replies: list[str]) -> str:
    r"""`text` followed by each reply under its name.

    >>> with_replies("2+2?", ["a", "b"], ["4", "5"])
    '2+2?\n\n[a]\n4\n\n[b]\n5'
    """
    return text + "".join(f"\n\n[{n}]\n{r}" for n, r in zip(names, replies, strict=True))


def mend_escapes(text: str) -> str:
    r"""Give back the backslash that Python took from LaTeX in a plain string.

    Scripts write "\boxed{}" and "\frac" in strings that are not raw, and Python reads a backspace
    and a form feed. No prompt means these four control characters, so they are turned back. Tab,
    newline and carriage return are turned back where the rest of a common command follows.

    >>> mend_escapes("use \boxed{} for \frac{1}{2}") == r"use \boxed{} for \frac{1}{2}"
    True
    >>> mend_escapes("2 \times \theta \neq 3,\nnot\to") == "2 \\times \\theta \\neq 3,\nnot\to"
    True
    """
    text = _LOST_COMMAND.sub(lambda match: _LOST[match[0]], str(text))
    return text.translate({7: r"\a", 8: r"\b", 11: r"\v", 12: r"\f"})


def fill(template: str, **fields: str) -> str:
    r"""Put fields into a template in one pass; every other brace (LaTeX) stays as it is.

    >>> fill(r"{question} Answer in \boxed{}.", question="What is {history}?")
    'What is {history}? Answer in \\boxed{}.'
    """
    return _FIELD.sub(lambda match: fields.get(match[1], match[0]), template)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} that closes, or None.

    >>> last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}} and \boxed{cut")
    '\\frac{1}{2}'
    """
    start = text.rfind(r"\boxed{")
    while start >= 0:
        first, depth = start + len(r"\boxed{"), 1
        for brace in re.finditer(r"\\.|[{}]", text[first:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return text[first : first + brace.start()]
        start = text.rfind(r"\boxed{", 0, start)
    return None


def ballot(reply: str) -> str:
    r"""What a reply votes for: its last box, else its last code block, else all of its visible
    text. Boxes that differ in white space, sizes, dollar signs or zeros are one choice.

    >>> ballot(r"so \boxed{ x + 1 }") == ballot(r"\boxed{x+1}")
    True
    >>> [ballot(rf"\boxed{{{x}}}") for x in (r"\dfrac{1}{2}", "$42.0$", "042", r"\left(0,1\right)")]
    ['\\frac{1}{2}', '42', '42', '(0,1)']
    >>> ballot("```python\nprint(1)\n``` or ```python\nprint(2)\n```"), ballot(" yes ")
    ('print(2)', 'yes')
    """
    text = visible(reply)
    boxed = last_boxed(text)
    if boxed is not None:
        plain = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|[\s$]", "", boxed)
        plain = re.sub(r"\\[dt]frac", r"\\frac", plain)
        number = re.fullmatch(r"(-?)(\d+)(?:\.(\d*))?", plain, re.ASCII)
        if number is None:
            return plain
        sign, whole, part = number[1], number[2].lstrip("0") or "0", (number[3] or "").rstrip("0")
        return f"{sign}{whole}.{part}" if part else sign + whole
    blocks = _FENCE.findall(text)
    return blocks[-1].strip() if blocks else text


# An accepting word after "the" speaks of another answer ("the correct value is 7"), and a
# hyphen in front makes another word ("in-correct").
_ACCEPT = re.compile(r"(?<![\w-])(?<!the )(?:correct|accept(?:ed)?|approved?|valid)\b")
_REJECT = re.compile(
    r"\b(?:incorrect|wrong|reject(?:ed)?|invalid)\b"
    r"|(?:\bnot|n[’']t|\bcannot|\bnever)\s+(?:\w+\s+){0,2}(?:correct|accept|approve|valid)"
)
_LABEL = re.compile(r"\bverdict\b(.*)")


def accepts(critique: str) -> bool:
    """Does this critique accept the answer? In doubt it does not: one more round does no harm.

    Only one line of the visible critique decides:
    1. the last line with a verdict word after the label "verdict" (that part of the line),
    2. else the last line, if it has a verdict word,
    3. else the last line that is nothing but a verdict word.
    It accepts when it holds an accepting word (correct, accept, accepted, approve, approved,
    valid) and neither a rejecting one (incorrect, wrong, reject, rejected, invalid) nor a negated
    one ("not", "n't", "cannot" or "never", at most two words before it). Whole words, any case.

    >>> accepts("VERDICT: CORRECT"), accepts("VERDICT: INCORRECT")
    (True, False)
    >>> accepts("Verdict: CORRECT\\nStep 2 looked wrong at first."), accepts("It is not correct.")
    (True, False)
    >>> accepts("INCORRECT\\nThe correct value is 7."), accepts("No mistakes, so it is correct.")
    (False, True)
    """
    lines = [line for line in visible(critique).lower().split("\n") if line.strip()]
    labelled = [label[1] for label in map(_LABEL.search, lines) if label]
    bare = [line for line in lines if len(re.findall(r"\w+", line)) == 1]
    for candidates in (labelled, lines[-1:], bare):
        ruling = [line for line in candidates if _ACCEPT.search(line) or _REJECT.search(line)]
        if ruling:
            return not _REJECT.search(ruling[-1])
    return False


# ---------------------------------------------------------------------------------------------
# Nodes
# ---------------------------------------------------------------------------------------------


class Message:
    """What `Workflow.run` returns: `.content` is the answer's text, `.sender` the node's name."""

    def __init__(self, content: str, sender: str = "") -> None:
        self.content = content
        self.sender = sender

    def __str__(self) -> str:
        return self.content


class Context(str):
    """What a routing function is given: the text so far. It is a string, and it also answers
    `context.messages` and `context.get_latest_message().content`, which published scripts use."""

    @property
    def messages(self) -> list[Message]:
        return [Message(str(self))]

    def get_latest_message(self) -> Message:
        return self.messages[-1]


class ToolRegistry:
    """The tools of an agent. A name that holds "python" or "code" stands for the Python tool,
    which the host runs, whatever `func` is. Agents are offered no other tool (a line on stderr
    says so); the script itself can use any by `call_tool`."""

    def __init__(self) -> None:
        self.tools: dict[str, Callable | None] = {}

    def register(
        self,
        name: str,
        func: Callable | None = None,
        description: str = "",
        parameters: dict | None = None,
    ) -> None:
        self.tools[name] = func
        if not _is_python(name):
            print(f"workflow: agents are not offered the tool {name!r}", file=sys.stderr)

    def call_tool(self, name: str, arguments: dict) -> object:
        return self.tools[name](**arguments)

    def has_python(self) -> bool:
        return any(_is_python(name) for name in self.tools)


class MathEnvironment:
    """`utils.environments.math_env` of the published scripts: its `execute` is registered as the
    Python tool, or called by the script itself. The host runs the program, within its own limits.
    """

    def __init__(self, timeout: float = 0) -> None:
        pass

    def execute(self, code: str) -> str:
        return exchange({"python": code}, "output")


def python_execute(code: str) -> str:
    """The same as a function; published scripts import it too."""
    return MathEnvironment().execute(code)


def _is_python(tool_name: str) -> bool:
    return "python" in tool_name.lower() or "code" in tool_name.lower()


class WorkflowNode:
    """Anything that turns a text into a reply by asking agents."""

    def __init__(self, name: str) -> None:
        self.name = str(name)

    def steps(self, text: str) -> Steps:
        raise TypeError(f"{type(self).__name__} is not a node: use AgentNode, EnsembleNode, ...")


def _check_nodes(owner: str, nodes: list) -> list[WorkflowNode]:
    nodes = list(nodes)
    wrong = [type(node).__name__ for node in nodes if not isinstance(node, WorkflowNode)]
    if wrong or not nodes:
        raise TypeError(f"{owner} needs nodes (AgentNode, ...), but got {wrong or 'none'}")
    return nodes


class AgentNode(WorkflowNode):
    """One agent: one call, or a loop of calls and tool runs if `tool_registry` has the Python
    tool. `max_turns` is the most tool runs. The last two arguments are accepted and unused."""

    def __init__(
        self,
        name: str,
        system_prompt: str,
        tool_registry: ToolRegistry | None = None,
        max_turns: int = 10,
        ai_client: object = None,
        enable_conversation_logging: bool = True,
    ) -> None:
        super().__init__(name)
        self.system_prompt = mend_escapes(system_prompt)
        self.tool_registry = tool_registry
        self.max_turns = max_turns

    def steps(self, text: str) -> Steps:
        has_tool = self.tool_registry is not None and self.tool_registry.has_python()
        runs_left = self.max_turns if has_tool else 0
        system = self.system_prompt + (PYTHON_TOOL if runs_left > 0 else "")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        while True:
            [reply] = yield [{"agent": self.name, "messages": list(messages)}]
            answer = _SOLUTION.sub("", visible(reply))
            call = _TOOL_CALL.search(answer) if runs_left > 0 else None
            if call is None:
                return reply
            runs_left -= 1
            fenced = _FENCE.search(call[1])
            [output] = yield [{"python": fenced[1] if fenced else call[1]}]
            output = "Output:\n" + output[:MAX_OUTPUT]
            if runs_left == 0:
                output += "\nThat was the last run. Answer now."
            messages.append({"role": "assistant", "content": answer[: call.end()]})
            messages.append({"role": "user", "content": output})


class EnsembleNode(WorkflowNode):
    """Agents answer independently, then vote by `ballot`. What is handed on is the whole reply of
    the first agent of the winning group; empty replies do not vote.

    "majority_vote": the largest group; the first seen on a tie. With a `consensus_agent`, it
                     decides whenever the vote is not unanimous, as in the reference.
    "weighted_vote": the largest sum of `weights`; a tie goes to `consensus_agent`, else the first.
    "consensus":     `consensus_agent` always decides.
    """

    def __init__(
        self,
        name: str,
        agents: list[WorkflowNode],
        strategy: str = "majority_vote",
        consensus_agent: WorkflowNode | None = None,
        weights: list[float] | None = None,
    ) -> None:
        super().__init__(name)
        self.agents = _check_nodes("EnsembleNode.agents", agents)
        if strategy not in ("majority_vote", "weighted_vote", "consensus"):
            raise ValueError(f"no strategy {strategy!r}: majority_vote, weighted_vote, consensus")
        if strategy == "consensus" and consensus_agent is None:
            raise ValueError('strategy "consensus" needs a consensus_agent')
        if weights is not None and len(weights) != len(self.agents):
            raise ValueError(f"{len(weights)} weights for {len(self.agents)} agents")
        if consensus_agent is not None:
            _check_nodes("EnsembleNode.consensus_agent", [consensus_agent])
        self.strategy = strategy
        self.consensus_agent = consensus_agent
        self.weights = list(weights) if weights is not None else [1.0] * len(self.agents)

    def steps(self, text: str) -> Steps:
        replies = yield from side_by_side([agent.steps(text) for agent in self.agents])
        winner = self.elect(replies)
        if winner is not None:
            return replies[winner]
        names = [agent.name for agent in self.agents]
        seen = with_replies(text, names, [visible(reply) for reply in replies])
        return (yield from self.consensus_agent.steps(f"{seen}\n\n{JUDGE_PROMPT}"))

    def elect(self, replies: list[str]) -> int | None:
        """The index of the elected reply, or None where the consensus agent has to decide."""
        if self.strategy == "consensus":
            return None
        weighted = self.strategy == "weighted_vote"
        ballots = [ballot(reply) for reply in replies]
        votes: dict[str, float] = {}
        for choice, weight in zip(ballots, self.weights, strict=True):
            if choice:
                votes[choice] = votes.get(choice, 0.0) + (weight if weighted else 1.0)
        if not votes:
            return 0
        top = [choice for choice, total in votes.items() if total == max(votes.values())]
        split = len(top) > 1 if weighted else len(votes) > 1
        return None if split and self.consensus_agent is not None else ballots.index(top[0])


class ReflectionNode(WorkflowNode):
    """Solve, criticise, refine: at most 1 + 2 x `num_iterations` calls, fewer if the critic
    `accepts`. Without a `critic_agent` the agent criticises itself. Templates may use {question}
    (the text so far), {response}, {reflection} and {history} (the attempts before this one);
    `include_history` puts the history after the question of every refinement."""

    def __init__(
        self,
        name: str,
        agent: WorkflowNode,
        num_iterations: int = 2,
        reflection_prompt: str | None = None,
        critic_agent: WorkflowNode | None = None,
        refinement_prompt: str | None = None,
        include_history: bool = False,
    ) -> None:
        super().__init__(name)
        self.agent = agent
        self.critic_agent = critic_agent if critic_agent is not None else agent
        _check_nodes("ReflectionNode", [self.agent, self.critic_agent])
        self.num_iterations = num_iterations
        self.include_history = include_history
        self.reflection_prompt = mend_escapes(reflection_prompt or REFLECTION_PROMPT)
        self.refinement_prompt = mend_escapes(refinement_prompt or REFINEMENT_PROMPT)

    def steps(self, text: str) -> Steps:
        reply = yield from self.agent.steps(text)
        history = ""
        for attempt in range(1, self.num_iterations + 1):
            fields = {"question": text, "response": visible(reply), "history": history}
            asked = fill(self.reflection_prompt, reflection="", **fields)
            critique = yield from self.critic_agent.steps(asked)
            if accepts(critique):
                break
            if self.include_history:
                fields["question"] += history
            asked = fill(self.refinement_prompt, reflection=visible(critique), **fields)
            history = with_replies(
                history,
                [f"attempt {attempt}", f"critique {attempt}"],
                [fields["response"], visible(critique)],
            )
            reply = yield from self.agent.steps(asked)
        return reply


class DebateNode(WorkflowNode):
    """Rounds in which all debaters answer at once, each seeing all replies of all earlier rounds;
    then the judge (default: the first debater) sees the last round and gives the answer."""

    def __init__(
        self,
        name: str,
        debaters: list[WorkflowNode],
        judge: WorkflowNode | None = None,
        num_rounds: int = 2,
    ) -> None:
        super().__init__(name)
        self.debaters = _check_nodes("DebateNode.debaters", debaters)
        self.judge = judge if judge is not None else self.debaters[0]
        _check_nodes("DebateNode.judge", [self.judge])
        self.num_rounds = max(1, num_rounds)

    def steps(self, text: str) -> Steps:
        names = [debater.name for debater in self.debaters]
        history, shown, replies = text, text, []
        for number in range(1, self.num_rounds + 1):
            given = yield from side_by_side([debater.steps(shown) for debater in self.debaters])
            replies = [visible(reply) for reply in given]
            history = with_replies(history, [f"{n}, round {number}" for n in names], replies)
            shown = f"{history}\n\n{DEBATE_PROMPT}"
        seen = with_replies(text, names, replies)
        return (yield from self.judge.steps(f"{seen}\n\n{JUDGE_PROMPT}"))


class RouterNode(WorkflowNode):
    """`routing_func(text)` names the route to take; a name that is not in `routes` means
    `default_route`. The function is given the text so far, as a `Context`."""

    def __init__(
        self,
        name: str,
        routes: dict[str, WorkflowNode],
        routing_func: Callable[[Context], str],
        default_route: str = "default",
    ) -> None:
        super().__init__(name)
        _check_nodes("RouterNode.routes", routes.values())
        self.routes = dict(routes)
        self.routing_func = routing_func
        self.default_route = default_route

    def steps(self, text: str) -> Steps:
        route = self.routing_func(Context(text))
        node = self.routes.get(route) or self.routes.get(self.default_route)
        if node is None:
            raise ValueError(f"no route {route!r} and no default route in {sorted(self.routes)}")
        return (yield from node.steps(text))


class Workflow(WorkflowNode):
    """A linear chain of nodes, itself a node, so it can stand inside another one."""

    def __init__(self, name: str = "workflow") -> None:
        super().__init__(name)
        self.nodes: list[WorkflowNode] = []

    def add_node(self, node: WorkflowNode) -> Workflow:
        return self.add_nodes([node])

    def add_nodes(self, nodes: list[WorkflowNode]) -> Workflow:
        self.nodes += _check_nodes("Workflow.add_node", nodes)
        return self

    def steps(self, text: str) -> Steps:
        if not self.nodes:
            raise ValueError(f"workflow {self.name!r} has no node: call add_node before run")
        reply = ""
        for node in self.nodes:
            reply = yield from node.steps(text)
            text = with_replies(text, [node.name], [delivery(reply)])
        return reply

    def run(self, question: str) -> Message:
        """Run the chain; the visible reply of the last node is sent as the script's answer."""
        content = visible(drive(self.steps(mend_escapes(question))))
        exchange({"answer": content}, None)
        return Message(content, self.nodes[-1].name)


class _Refused:
    def __init__(self, *_args: object, **_kwargs: object) -> None:
        name = type(self).__name__
        raise ValueError(f"{name} is not supported: use Workflow, and RouterNode for a choice")


class ConditionalWorkflow(_Refused):
    """Refused: a RouterNode does this."""


class LoopWorkflow(_Refused):
    """Refused: a ReflectionNode does this."""


class AgentGraph(_Refused):
    """Refused: nest nodes instead."""


# Published scripts import from these names too; all are this one module.
core = nodes = sys.modules[__name__]
sys.modules.update({f"workflow.{part}": nodes for part in ("core", "nodes", "workflow")})
sys.modules.update(
    {f"utils{part}": nodes for part in ("", ".environments", ".environments.math_env")}
)


def _demo() -> None:
    """Play the host by hand: every request of an ensemble and a checker, answered by a rule."""
    voters = [AgentNode(name, "Solve the task.") for name in ("Ann", "Bob", "Clara")]
    team = Workflow("demo").add_nodes([EnsembleNode("vote", voters), AgentNode("Dan", "Check it.")])
    steps = team.steps("How many letters has your name?")
    requests = next(steps)
    while requests:
        texts = [rf"I say \boxed{{{len(request['agent'])}}}" for request in requests]
        print("->", json.dumps({"calls": requests}))
        print("<-", json.dumps({"texts": texts}))
        try:
            requests = steps.send(texts)
        except StopIteration as end:
            print("answer:", visible(end.value))
            break


if __name__ == "__main__":
    _demo()
