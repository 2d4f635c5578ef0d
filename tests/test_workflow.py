"""workflow.py: what agents are sent, what nodes hand on, and what crosses the channel.

Most tests drive a node by hand (`play`), because every node is a generator. The channel tests run
real scripts in a subprocess whose descriptor 3 is one end of a socket pair.
"""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sandbox
import workflow as wf

ROOT = Path(wf.__file__).parent


def play(node, text, model):
    """Run a node against `model(agent, messages) -> str`: (reply, the requests of each step)."""
    steps, results, turns = node.steps(text), None, []
    while True:
        try:
            requests = steps.send(results)
        except StopIteration as end:
            return end.value, turns
        turns.append(requests)
        results = [
            "ran: " + r["python"] if "python" in r else model(r["agent"], r["messages"])
            for r in requests
        ]


def agent(name, prompt="P"):
    return wf.AgentNode(name=name, system_prompt=prompt)


def saying(**replies):
    """A model in which each agent gives its replies in turn."""
    left = {name: list(texts) for name, texts in replies.items()}
    return lambda name, messages: left[name].pop(0)


# --- messages of an agent, deliveries, chains


def test_messages_of_a_chain():
    chain = wf.Workflow("chain").add_nodes([agent("A", "one"), agent("B", "two"), agent("C", "3")])
    model = saying(
        A=["<think>t</think>long <delivery>old</delivery> <delivery> x=1 </delivery> bye"],
        B=["<think>no <delivery>hidden</delivery></think>plain reply "],
        C=["end"],
    )
    reply, turns = play(chain, "Q?", model)
    assert reply == "end"
    assert turns == [
        [{"agent": "A", "messages": [system("one"), user("Q?")]}],
        [{"agent": "B", "messages": [system("two"), user("Q?\n\n[A]\nx=1")]}],
        [{"agent": "C", "messages": [system("3"), user("Q?\n\n[A]\nx=1\n\n[B]\nplain reply")]}],
    ]


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "reply, handed_on",
    [
        ("<delivery>a</delivery> <delivery>never closed", "a"),
        ("</delivery> only closed", "</delivery> only closed"),
        ("<delivery>never closed", "<delivery>never closed"),
        ("x <think>unfinished", "x"),
        ("a<think>1</think>b<think>2</think>c", "abc"),
        ("", ""),
    ],
)
def test_delivery(reply, handed_on):
    assert wf.delivery(reply) == handed_on


def test_no_sampling_parameters():
    with pytest.raises(TypeError, match="temperature"):
        wf.AgentNode(name="A", system_prompt="P", temperature=0.0)
    tolerated = wf.AgentNode("A", "P", None, 3, ai_client=object(), enable_conversation_logging=0)
    _, [[request]] = play(tolerated, "Q", saying(A=["r"]))
    assert set(request) == {"agent", "messages"}


def test_latex_lost_to_escapes_is_mended_once_at_the_border():
    solver = agent("A", "Use \boxed{} and \frac{1}{2}, \alpha and \vec v.")
    _, [[request]] = play(solver, "Q", saying(A=["r"]))
    assert request["messages"][0]["content"] == r"Use \boxed{} and \frac{1}{2}, \alpha and \vec v."
    assert wf.mend_escapes("a\tb\nc") == "a\tb\nc"


@pytest.mark.parametrize("name", wf._COMMANDS.split())
def test_every_command_that_a_plain_string_loses_is_mended(name):
    lost = eval(f'"a \\{name} b, \\{name}{{c}}"')  # as Python reads it
    assert "\\" not in lost
    assert wf.mend_escapes(lost) == rf"a \{name} b, \{name}{{c}}"


@pytest.mark.parametrize(
    "text",
    ["a\timeshare", "x\textile", "1.\trace", "line\nequal", "\r\nright", "\tan apple", "\nu = 1"]
    + ["if x:\n\treturn\n\tau()", "col\ttop\tbottom"],
)
def test_white_space_that_may_be_meant_stays(text):
    meant = text.replace("\tau", "TAU")
    assert wf.mend_escapes(meant) == meant


# --- ensemble


def vote(replies, **kwargs):
    names = [f"a{i}" for i in range(len(replies))]
    node = wf.EnsembleNode("E", [agent(name) for name in names], **kwargs)
    judge = {"judge": ["judged"]}
    return play(node, "Q", saying(**{n: [r] for n, r in zip(names, replies, strict=True)}, **judge))


def test_ensemble_calls_go_in_one_message_and_the_winner_is_handed_on_whole():
    replies = [r"no \boxed{2}", r"first \boxed{ 1}", r"second \boxed{1 } <delivery>d</delivery>"]
    reply, turns = vote(replies)
    assert reply == replies[1]
    assert [[r["agent"] for r in turn] for turn in turns] == [["a0", "a1", "a2"]]
    assert all(r["messages"][1] == user("Q") for r in turns[0])


@pytest.mark.parametrize(
    "replies, winner",
    [
        ([r"\boxed{1}", r"\boxed{2}"], 0),  # a tie: the first seen
        ([r"\boxed{2}", r"\boxed{1}", r"\boxed{2}", r"\boxed{1}"], 0),
        ([r"\boxed{1} or \boxed{3}", r"\boxed{1}", r"\boxed{3}"], 0),  # the last box counts
        ([r"\boxed{\frac{1}{2}}", r"x", r"\boxed{ \frac {1} {2} }"], 0),
        (["7", "```\n8\n```", "```python\n8\n```"], 1),  # the last code block
        (["<think>5</think>6", "5", "<think>7</think>5"], 1),  # thinking does not vote
        (["", "<think>cut", "5"], 2),  # empty replies abstain
        (["", ""], 0),
        ([r"\boxed{cut", r"\boxed{3}", r"a \boxed{3}"], 1),
        ([r"\boxed{7}", r"\boxed{$42$}", r"\boxed{42.00}"], 1),
        ([r"\boxed{9007199254740993}", r"\boxed{9007199254740992}"], 0),  # equal as floats
        ([r"\boxed{100}", r"\boxed{10}", r"\boxed{010}"], 1),
        ([r"\boxed{-5}", r"\boxed{5}", r"\boxed{5.0}"], 1),
        ([r"\boxed{\leftarrow}", r"\boxed{\left[1\,\right]}", r"\boxed{[1]}"], 1),
    ],
)
def test_majority_vote(replies, winner):
    assert vote(replies)[0] == replies[winner]


def test_the_judge_decides_a_split_vote_only():
    judge = agent("judge", "J")
    unanimous, turns = vote([r"\boxed{1}", r"so \boxed{1}", ""], consensus_agent=judge)
    assert (unanimous, len(turns)) == (r"\boxed{1}", 1)
    reply, turns = vote(["<think>t</think>one", "two", "one"], consensus_agent=judge)
    assert reply == "judged"
    text = f"Q\n\n[a0]\none\n\n[a1]\ntwo\n\n[a2]\none\n\n{wf.JUDGE_PROMPT}"
    assert turns[1] == [{"agent": "judge", "messages": [system("J"), user(text)]}]


def test_consensus_always_asks_the_judge():
    reply, turns = vote(["one", "one"], strategy="consensus", consensus_agent=agent("judge"))
    assert (reply, len(turns)) == ("judged", 2)


@pytest.mark.parametrize(
    "weights, expected",
    [([1, 1, 1], "y"), ([3, 1, 1], "x"), ([2, 1, 1], "x"), (None, "y")],
)
def test_weighted_vote(weights, expected):
    reply, turns = vote(["x", "y", "y"], strategy="weighted_vote", weights=weights)
    assert (reply, len(turns)) == (expected, 1)


def test_weighted_vote_asks_the_judge_on_a_tie_only():
    options = {"strategy": "weighted_vote", "consensus_agent": agent("judge")}
    assert vote(["x", "y", "y"], weights=[2, 1, 1], **options)[0] == "judged"
    assert vote(["x", "y", "y"], weights=[3, 1, 1], **options)[0] == "x"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda a: wf.EnsembleNode("E", [a], strategy="mean"), "mean"),
        (lambda a: wf.EnsembleNode("E", [a], strategy="consensus"), "consensus_agent"),
        (lambda a: wf.EnsembleNode("E", [a], weights=[1, 2]), "2 weights for 1"),
        (lambda a: wf.EnsembleNode("E", []), "needs nodes"),
        (lambda a: wf.EnsembleNode("E", [a, "b"]), "str"),
        (lambda a: wf.DebateNode("D", [a], judge="j"), "str"),
        (lambda a: wf.ReflectionNode("R", None), "NoneType"),
        (lambda a: wf.Workflow().add_node([a]), "list"),
        (lambda a: wf.RouterNode("R", {}, len), "needs nodes"),
        (lambda a: wf.LoopWorkflow(name="l"), "LoopWorkflow is not supported"),
        (lambda a: wf.ConditionalWorkflow(), "ConditionalWorkflow is not supported"),
        (lambda a: wf.AgentGraph("g", max_steps=3), "AgentGraph is not supported"),
    ],
)
def test_misuse_is_a_clear_error(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(agent("a"))


# --- reflection


def test_reflection_stops_when_the_critic_accepts():
    node = wf.ReflectionNode("R", agent("S", "s"), critic_agent=agent("C", "c"))
    model = saying(S=["<think>t</think>one", "two"], C=["bad\nVERDICT: INCORRECT", "CORRECT"])
    reply, turns = play(node, "Q", model)
    assert reply == "two"
    assert [turn[0]["agent"] for turn in turns] == ["S", "C", "S", "C"]
    contents = [turn[0]["messages"][1]["content"] for turn in turns]
    fields = {"question": "Q", "response": "one", "reflection": "bad\nVERDICT: INCORRECT"}
    assert contents[0] == "Q"
    assert contents[1] == wf.REFLECTION_PROMPT.format(**fields)
    assert contents[2] == wf.REFINEMENT_PROMPT.format(**fields)
    assert contents[3] == wf.REFLECTION_PROMPT.format(**fields | {"response": "two"})


@pytest.mark.parametrize("iterations, calls", [(0, 1), (1, 3), (2, 5), (3, 7)])
def test_reflection_call_budget(iterations, calls):
    """Fault 11: INCORRECT ends with CORRECT and must not stop the loop."""
    node = wf.ReflectionNode("R", agent("S"), num_iterations=iterations)
    _, turns = play(node, "Q", lambda name, messages: "Final verdict: INCORRECT")
    assert len(turns) == calls


def test_reflection_templates_and_history():
    node = wf.ReflectionNode(
        "R",
        agent("S"),
        critic_agent=agent("C"),
        reflection_prompt=r"{question}|{response}|{history}|\frac{1}{2}|{other}",
        refinement_prompt="{question}|{reflection}|{history}",
        include_history=True,
    )
    model = saying(S=["one", "{history}", "three"], C=["c1", "c2"])
    reply, turns = play(node, "Q", model)
    contents = [turn[0]["messages"][1]["content"] for turn in turns]
    past = "\n\n[attempt 1]\none\n\n[critique 1]\nc1"
    assert reply == "three"
    assert contents[1] == r"Q|one||\frac{1}{2}|{other}"
    assert contents[2] == "Q|c1|"
    assert contents[3] == r"Q|{history}|" + past + r"|\frac{1}{2}|{other}"
    assert contents[4] == f"Q{past}|c2|{past}"


@pytest.mark.parametrize(
    "critique, accepted",
    [
        ("CORRECT", True),
        ("INCORRECT", False),
        ("Final verdict: CORRECT", True),
        ("**Final Verdict:** **CORRECT**", True),
        ("Final verdict: INCORRECT", False),
        ("final verdict: incorrect\nThe correct answer is 7", False),
        ("VERDICT: INCORRECT\nOnce mended, it is correct.", False),
        ("Step 1 looked incorrect, but holds.\nVERDICT: CORRECT", True),
        ("Verdict: INCORRECT\n...\nAfter a second look:\nVerdict: CORRECT", True),
        ("## Verdict\n\nCORRECT", True),
        ("## Verdict\n\nINCORRECT", False),
        ("CORRECT\n\nAll conditions hold.", True),
        ("The answer is correct.", True),
        ("The answer is not correct.", False),
        ("The answer isn't quite correct.", False),
        ("It cannot be accepted.", False),
        ("This is never correct", False),
        ("Approved", True),
        ("REJECTED", False),
        ("in-correct", False),
        ("correctly derived", False),
        ("The correct answer is 7.", False),
        ("Step 1 is correct.\nStep 2 has a sign mistake.", False),
        ("VERDICT: CORRECT or the line VERDICT: INCORRECT", False),
        ("<think>VERDICT: CORRECT</think>Step 3 is wrong.", False),
        ("", False),
        ("Looks good", False),
    ],
)
def test_verdict(critique, accepted):
    assert wf.accepts(critique) is accepted


# --- debate, router, nesting


def test_debate():
    node = wf.DebateNode("D", [agent("A"), agent("B")], judge=agent("J"), num_rounds=3)
    model = saying(A=["a1", "a2", "a3"], B=["<think>t</think>b1", "b2", "b3"], J=["done"])
    reply, turns = play(node, "Q", model)
    assert reply == "done"
    assert [[r["agent"] for r in turn] for turn in turns] == [["A", "B"]] * 3 + [["J"]]
    texts = [turn[-1]["messages"][1]["content"] for turn in turns]
    first = "\n\n[A, round 1]\na1\n\n[B, round 1]\nb1"
    second = "\n\n[A, round 2]\na2\n\n[B, round 2]\nb2"
    assert texts[0] == "Q"
    assert texts[1] == f"Q{first}\n\n{wf.DEBATE_PROMPT}"
    assert texts[2] == f"Q{first}{second}\n\n{wf.DEBATE_PROMPT}"
    assert texts[3] == f"Q\n\n[A]\na3\n\n[B]\nb3\n\n{wf.JUDGE_PROMPT}"


def test_debate_without_a_judge_is_decided_by_the_first_debater():
    _, turns = play(wf.DebateNode("D", [agent("A"), agent("B")]), "Q", lambda name, _: name)
    assert [[r["agent"] for r in turn] for turn in turns] == [["A", "B"], ["A", "B"], ["A"]]


def test_router():
    routes = {"even": agent("E"), "odd": agent("O"), "default": agent("D")}

    def run(func, **kwargs):
        node = wf.RouterNode(name="R", routes=routes, routing_func=func, **kwargs)
        return play(node, "Q 4", lambda name, _: name)[0]

    assert run(lambda question: "even" if question.endswith("4") else "odd") == "E"
    assert run(lambda context: "odd" if "Q" in context.get_latest_message().content else "x") == "O"
    assert run(lambda context: context.messages[0].content[:0]) == "D"
    assert run(lambda question: None, default_route="even") == "E"
    with pytest.raises(ValueError, match="no route 'x'"):
        run(lambda question: "x", default_route="y")


def test_nested_chains_of_an_ensemble_advance_together():
    """Three chains of 1, 2 and 3 agents: 3 steps with 3, 2 and 1 calls."""
    chains = [
        wf.Workflow(f"w{n}").add_nodes([agent(f"w{n}.{i}") for i in range(n)]) for n in (1, 2, 3)
    ]
    reply, turns = play(wf.EnsembleNode("E", chains), "Q", lambda name, _: name[:2])
    asked = [[r["agent"] for r in turn] for turn in turns]
    assert asked == [["w1.0", "w2.0", "w3.0"], ["w2.1", "w3.1"], ["w3.2"]]
    assert turns[2][0]["messages"][1] == user("Q\n\n[w3.0]\nw3\n\n[w3.1]\nw3")
    assert reply == "w1"


def test_every_node_nests_in_every_other():
    makers = [
        lambda inner: wf.EnsembleNode("E", [inner, inner]),
        lambda inner: wf.ReflectionNode("R", inner, num_iterations=1),
        lambda inner: wf.DebateNode("D", [inner, agent("x")], num_rounds=1),
        lambda inner: wf.RouterNode("N", {"default": inner}, lambda question: "default"),
        lambda inner: wf.Workflow().add_nodes([inner, agent("y")]),
    ]
    for outer in makers:
        for inner in makers:
            reply, turns = play(outer(inner(agent("a"))), "Q", lambda name, _: "same")
            assert reply == "same"
            assert all(set(r) == {"agent", "messages"} for turn in turns for r in turn)


# --- the Python tool


def tool(name="python_execute"):
    registry = wf.ToolRegistry()
    registry.register(name=name, func=None, description="runs Python", parameters={})
    return registry


def test_tool_loop():
    solver = wf.AgentNode("A", "P", tool_registry=tool(), max_turns=2)
    calls = [
        "a<python>\n```python\n1\n```\n</python> Output: 9",
        "<python>2</python>",
        "\\boxed{3}",
    ]
    reply, turns = play(solver, "Q", saying(A=calls))
    assert reply == r"\boxed{3}"
    assert [r for turn in turns for r in turn if "python" in r] == [
        {"python": "1\n"},
        {"python": "2"},
    ]
    assert turns[0][0]["messages"] == [system("P" + wf.PYTHON_TOOL), user("Q")]
    assert turns[4][0]["messages"][2:] == [
        {"role": "assistant", "content": "a<python>\n```python\n1\n```\n</python>"},
        user("Output:\nran: 1\n"),
        {"role": "assistant", "content": "<python>2</python>"},
        user("Output:\nran: 2\nThat was the last run. Answer now."),
    ]


def test_tool_runs_are_bounded():
    solver = wf.AgentNode("A", "P", tool_registry=tool(), max_turns=3)
    _, turns = play(solver, "Q", lambda *_: "<python>1</python>")
    assert ["python" in turn[0] for turn in turns] == [False, True] * 3 + [False]


@pytest.mark.parametrize(
    "reply",
    [
        "<solution>\n```python\nprint(1)\n```\n</solution>",  # fault 12: 3 calls in the reference
        "```python\nprint(1)\n```",
        "<think><python>1</python></think>4",
        "<solution><python>1</python></solution>",
        "<python>never closed",
    ],
)
def test_what_is_not_a_tool_call(reply):
    for solver in (wf.AgentNode("A", "P", tool_registry=tool()), agent("A")):
        got, turns = play(solver, "Q", saying(A=[reply]))
        assert (got, len(turns)) == (reply, 1)


def test_without_a_python_tool_nothing_is_offered_or_obeyed(capsys):
    registries = [None, wf.ToolRegistry(), tool("search")]
    assert "'search'" in capsys.readouterr().err
    for registry in registries:
        solver = wf.AgentNode("A", "P", tool_registry=registry)
        _, turns = play(solver, "Q", saying(A=["<python>1</python>"]))
        assert [turn[0]["messages"][0] for turn in turns] == [system("P")]
    adder = wf.ToolRegistry()
    adder.register("add", lambda a, b: a + b, "adds", {})
    assert adder.call_tool("add", {"a": 1, "b": 2}) == 3


def test_tool_of_one_agent_of_an_ensemble():
    with_tool = wf.AgentNode("A", "P", tool_registry=tool())
    node = wf.EnsembleNode("E", [with_tool, agent("B")])
    reply, turns = play(node, "Q", saying(A=["<python>1</python>", "4"], B=["4"]))
    assert [[r.get("agent", "tool") for r in turn] for turn in turns] == [
        ["A", "B"],
        ["tool"],
        ["A"],
    ]
    assert reply == "4"


# --- the channel

PRELUDE = """\
import os, sys
os.dup2({descriptor}, 3)
sys.path.insert(0, {root!r})
source = sys.stdin.read()
exec(compile(source, "script", "exec"), {{"__name__": "__main__", "question": "predefined"}})
"""


def run_script(source, model):
    """Run a script with a fake host on descriptor 3: (messages, returncode, stdout, stderr)."""
    host, guest = socket.socketpair()
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE.format(root=str(ROOT), descriptor=guest.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[guest.fileno()],
    )
    guest.close()
    process.stdin.write(textwrap.dedent(source))
    process.stdin.close()
    messages = []
    with process, host, host.makefile("rw") as channel:
        for line in channel:
            message = json.loads(line)
            messages.append(message)
            if "calls" in message:
                texts = [model(c["agent"], c["messages"]) for c in message["calls"]]
                channel.write(json.dumps({"texts": texts}) + "\n")
            elif "python" in message:
                channel.write(json.dumps({"output": "42\n"}) + "\n")
            channel.flush()
        out, err = process.stdout.read(), process.stderr.read()
    return messages, process.returncode, out, err


PUBLISHED = r'''
# Example: ensemble with a judge
import re, json
from typing import List
from workflow import AgentNode, Workflow, ToolRegistry
from workflow.nodes import EnsembleNode, ReflectionNode, DebateNode, RouterNode
from workflow.core import Message, Context

question = """Find $\sum_{k=1}^{3} \frac{k}{1}$ if (a) holds)."""
tool_registry = ToolRegistry()

solvers = []
for label in ["forward", "backward"]:
    solvers.append(AgentNode(
        name=f"Solver ({label})",
        system_prompt="""You are an expert (in sums).
Put the answer in \\boxed{}: e.g. \\boxed{\\frac{1}{2}} or \boxed{42}.
```python
print(")")
```""",
        tool_registry=tool_registry,
        max_turns=1,
        enable_conversation_logging=False
    ))
judge = AgentNode(name="Judge", system_prompt="Decide {nothing}.", tool_registry=tool_registry)
ensemble = EnsembleNode(name="Vote (2 solvers)", agents=solvers, strategy="majority_vote",
                        consensus_agent=judge, weights=None)
verifier = AgentNode(name="Verifier", system_prompt="Verify.", max_turns=1)

workflow = Workflow(name="math_vote (with :) inside)")
workflow.add_node(ensemble)
workflow.add_node(verifier)
print("=" * 48)
print("FINAL ANSWER:")
result = workflow.run(question)
print(result.content)
print("=" * 48)
'''


def test_published_script_runs_unchanged():
    """Fault 14, and the forms that published scripts have."""

    def model(name, messages):
        return "<think>é ∑</think>" + rf"{name}: \boxed{{6}}"

    messages, code, out, err = run_script(PUBLISHED, model)
    assert code == 0, err
    first, second, answer = messages
    assert [c["agent"] for c in first["calls"]] == ["Solver (forward)", "Solver (backward)"]
    asked = first["calls"][0]["messages"]
    assert asked[0]["content"].splitlines()[1] == (
        r"Put the answer in \boxed{}: e.g. \boxed{\frac{1}{2}} or \boxed{42}."
    )
    assert asked[1]["content"] == r"Find $\sum_{k=1}^{3} \frac{k}{1}$ if (a) holds)."
    assert second["calls"][0]["messages"][1]["content"].endswith(
        "\n\n[Vote (2 solvers)]\n" + r"Solver (forward): \boxed{6}"
    )
    assert answer == {"answer": r"Verifier: \boxed{6}"}
    assert r"Verifier: \boxed{6}" in out


def test_every_name_of_the_api_can_be_imported():
    messages, code, _, err = run_script(
        """
        import workflow, workflow.nodes
        from workflow import *
        from workflow import AgentGraph, ConditionalWorkflow, LoopWorkflow, WorkflowNode
        from workflow import AgentNode as A, nodes, core
        from workflow.workflow import Workflow as W
        from workflow.nodes import AgentNode as B, RouterNode
        assert A is B is workflow.nodes.AgentNode is nodes.AgentNode
        print(W().add_node(A("a", "p")).run(question))
        """,
        lambda name, messages: messages[1]["content"],
    )
    assert (code, messages[-1]) == (0, {"answer": "predefined"}), err


def test_tool_and_last_answer_over_the_channel():
    messages, code, out, err = run_script(
        """
        from workflow import *
        registry = ToolRegistry()
        registry.register("python", None, "runs Python", {})
        a = AgentNode("a", "p", registry)
        print(Workflow().add_node(EnsembleNode("e", [a, a])).run("one").content)
        print(Workflow().add_node(AgentNode("b", "p")).run("two"))
        """,
        lambda name, messages: (
            "<python>6*7</python>"
            if name == "a" and len(messages) == 2
            else messages[-1]["content"]
        ),
    )
    assert code == 0, err
    assert [next(iter(m)) for m in messages] == ["calls", "python", "python", "calls"] + [
        "answer",
        "calls",
        "answer",
    ]
    assert messages[-1] == {"answer": "two"}
    assert out == "Output:\n42\ntwo\n"


def test_threads_send_one_message_at_a_time():
    """The fake host reads a message only after it has answered the one before: interleaved bytes
    or replies given to the wrong thread would break the sum."""
    messages, code, out, err = run_script(
        """
        from threading import Thread
        from workflow import AgentNode, Workflow
        got = {}
        def work(i):
            node = AgentNode(f"t{i}", "p" * 100_000)
            got[i] = Workflow().add_node(node).run(f"question {i}").content
        threads = [Thread(target=work, args=(i,)) for i in range(12)]
        for t in threads: t.start()
        for t in threads: t.join()
        print(all(got[i] == f"question {i}" for i in range(12)))
        """,
        lambda name, messages: messages[1]["content"],
    )
    assert (code, out) == (0, "True\n"), err
    assert len(messages) == 24


def test_errors_reach_the_script_and_no_answer_is_sent():
    messages, code, _, err = run_script("from workflow import *\nWorkflow('w').run(question)", None)
    assert (messages, code) == ([], 1)
    assert "workflow 'w' has no node" in err


def test_a_message_may_be_taken_and_given_in_pieces(monkeypatch):
    host, guest = socket.socketpair()
    monkeypatch.setattr(wf, "CHANNEL", guest.fileno())
    write = os.write
    monkeypatch.setattr(wf.os, "write", lambda fd, data: write(fd, data[:7]))
    monkeypatch.setattr(wf.os, "read", lambda fd, size: guest.recv(3))
    with host, guest:
        host.sendall(b'{"texts": ["a long reply"]}\n')
        assert wf.Workflow().add_node(agent("a")).run("Q").content == "a long reply"
        guest.shutdown(socket.SHUT_WR)
        call, answer = map(json.loads, host.makefile("r"))
    assert call == {"calls": [{"agent": "a", "messages": [system("P"), user("Q")]}]}
    assert answer == {"answer": "a long reply"}


def test_a_closed_channel_is_a_clear_error(monkeypatch):
    host, guest = socket.socketpair()
    monkeypatch.setattr(wf, "CHANNEL", guest.fileno())
    with host, guest:
        host.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError, match="closed the channel"):
            wf.Workflow().add_node(agent("a")).run("Q")


def test_the_real_sandbox_accepts_every_message():
    """The published script, and one with a tool, through the real channel and its checks."""
    source = Path(wf.__file__).read_text()
    with_tool = (
        "from workflow import *\n"
        "registry = ToolRegistry()\n"
        "registry.register('python', None, '', {})\n"
        "Workflow().add_node(AgentNode('a', 'p', registry)).run(question)\n"
    )
    ends = {}
    sandbox.configure("best")
    with sandbox.ScriptPool({"workflow": source}) as pool:
        pool.start("published", PUBLISHED)
        pool.start("tool", with_tool, variables={"question": "6*7?"})
        while pool.live():
            for event in pool.poll(timeout=30):
                if event.kind == "ended":
                    ends[event.key] = (event.status, event.answer, event.error)
                    continue
                for call in event.calls:
                    assert set(call) == {"agent", "messages"}
                last = event.calls[0]["messages"][-1]["content"]
                first_of_tool = event.key == "tool" and "Output" not in last
                text = "<python>print(6 * 7)</python>" if first_of_tool else last[-15:]
                pool.reply(event.key, [text] * len(event.calls))
    assert ends == {
        "published": ("ok", "if (a) holds).", ""),
        "tool": ("ok", "Output:\n42", ""),
    }


def test_only_a_few_modules_are_imported():
    """The import is paid in every sandbox: next to nothing beyond what json and re need."""
    code = (
        "import sys, json, re, threading; before = set(sys.modules); import workflow;"
        "print(sorted(n for n in set(sys.modules) - before if sys.modules[n] is not workflow))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['__future__', 'collections.abc']\n"
