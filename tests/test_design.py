"""design.py: the designer's messages, and scripts extracted, checked and classified."""

import ast
import time
import warnings
from pathlib import Path

import pytest

import design
import sandbox
import workflow
from design import DesignError, check_script, extract_script, structure_of

HEAD = "from workflow import AgentNode, Workflow\nfrom workflow.nodes import *\n"
SCRIPT = (
    HEAD + 'w = Workflow("w")\nw.add_node(AgentNode("a", "p"))\nprint(w.run(question).content)\n'
)


def kind_of_error(function, *args):
    with pytest.raises(DesignError) as caught:
        function(*args)
    assert str(caught.value) == f"{caught.value.kind}: {caught.value.detail}"
    assert "\n" not in str(caught.value)
    return caught.value.kind


# --- the prompt


@pytest.mark.parametrize("kind", ["math", "code"])
def test_default_prompts(kind):
    question = (
        r"Braces {question} {kind} {} \frac{1}{2}" + "\n[user]\nand a line that looks like a mark"
    )
    system, user = design.designer_messages(question, kind)
    assert (system["role"], user["role"]) == ("system", "user")
    assert question in user["content"] and question not in system["content"]
    assert kind in user["content"]
    assert "{kind}" not in system["content"] + user["content"].replace(question, "")
    example = extract_script(system["content"])
    check_script(example)
    assert structure_of(example) == {"math": "ensemble", "code": "reflection"}[kind]
    for name in design.STRUCTURES:
        assert name in system["content"]


def test_custom_prompts():
    assert design.designer_messages("Q", "code", "Design for {question}.") == [
        {"role": "user", "content": "Design for Q."}
    ]
    assert design.designer_messages(
        "Q", "code", "A [user] {kind}\n[user]\n{question}\n[user]\n"
    ) == [
        {"role": "system", "content": "A [user] code"},
        {"role": "user", "content": "Q\n[user]"},
    ]
    published = design.designer_messages("1+1?", "math", design.PUBLISHED_PROMPT)
    assert [m["role"] for m in published] == ["system", "user"]
    assert published[1]["content"] == "Design Multi Agent System for the Question: 1+1?"
    with pytest.raises(ValueError, match="no {question}"):
        design.designer_messages("Q", "math", "no place for it\n[agents]\n{question}")
    with pytest.raises(ValueError, match="unknown kind"):
        design.designer_messages("Q", "chess")


def test_what_a_template_adds_to_every_agent():
    """Sections at the end, for one kind or for both; they are no part of the designer's prompt."""
    template = "S\n[user]\nD {question}\n[agents math]\nA box.\n\n[agents code] \nA\nprogram.\n"
    assert design.agent_suffix(template, "math") == "\n\nA box."
    assert design.agent_suffix(template, "code") == "\n\nA\nprogram."
    assert design.designer_messages("Q\n[agents]\n", "math", template) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "D Q\n[agents]"},
    ]
    assert design.agent_suffix("{question}\n[agents]\nBoth.", "code") == "\n\nBoth."
    assert design.agent_suffix("{question}\n[agents math]\nx", "code") == ""
    for nothing in (None, "{question} [agents]\nx", *design.DESIGNER_PROMPTS.values()):
        assert design.agent_suffix(nothing, "math") == ""


# --- extraction

FENCED = f"```python\n{SCRIPT}```"
# A script whose prompts hold every mark that extraction looks for.
TRICKY = (
    HEAD
    + '''
a = AgentNode("a", """Think in <think>...</think>. Write
<code>
```python
from workflow import nothing
print(")")
```
</code>
or <solution>``` ```</solution> with \\\\boxed{\\\\frac{1}{2}}.""")
w = Workflow("w)")  # ``` here and </code> there
w.add_node(a)
print(w.run(question).content)
'''
)
FORMS = {
    "code and fence": "<code>\n{fenced}\n</code>",
    "code and fence on one line": "<code>{fenced}</code>",
    "code only": "<code>\n{script}</code>",
    "bare fence": "Here:\n\n{fenced}\n\nIt uses one agent.",
    "fence without a language": "```\n{script}\n```",
    "fence py": "```py\n{script}\n```",
    "fence never closed": "```python\n{script}",
    "code never closed": "<code>\n{script}",
    "both never closed": "Sure.\n<code>\n```python\n{script}",
    "raw": "{script}",
    "raw and prose": "{script}\nThis isn't big: it (only) has one agent.\nWait, but 1 = 2?",
    "raw and a word": "{script}\nDone\n",
    "raw and a note": "{script}\nNote: this\n\nHope it helps",
    "prose, raw, prose": "Problem Type: MATH\nimport the tools\n\n{script}\nHowever, it's done.",
    "raw with closing marks": "{script}```\n</code>",
    "prose inside code": "<code>\nThe script is:\n{script}\nGood luck!\n</code>",
    "thought before": "<think>\nIs one enough? It's fine.</think>\n\n<code>\n{fenced}\n</code>",
    "thought with drafts": "<think>```\nfrom workflow import X\nx.run(1)\n```</think>{fenced}",
    "thought opened by the template": "Hm, <code>draft</code>.</think>\n{script}",
    "thought never closed": "<think>Let me write it.\n<code>\n{fenced}\n</code>",
    "an earlier draft": "```python\nfrom workflow import A\nA.run(0)\n```\nBetter:\n{fenced}",
    "another fence after": "{fenced}\nIt prints\n```\n42\n```\nor ```7```.",
    "other code before": "First\n```python\nprint(1)\n```\nthen\n{fenced}",
    "code talk in prose": "It is in <code> tags:\n<code>\n{fenced}\n</code>\nSee <code>w</code>.",
}


# Not with "thought never closed": a prompt of the tricky script would close the thought.
FORM_CASES = [(form, SCRIPT) for form in FORMS] + [
    (form, TRICKY) for form in FORMS if form != "thought never closed"
]


@pytest.mark.parametrize("form, script", FORM_CASES)
def test_forms(form, script):
    source = extract_script(FORMS[form].format(script=script, fenced=f"```python\n{script}```"))
    check_script(source)
    assert ast.dump(ast.parse(source)) == ast.dump(ast.parse(script))


@pytest.mark.parametrize(
    "form",
    ["code and fence", "code only", "code never closed", "fence never closed", "both never closed"],
)
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_marks_keep_what_stands_before_the_imports(form, line_end):
    script = 'PROMPT = "p"\n' + SCRIPT.replace('"p"', "PROMPT")
    text = FORMS[form].format(script=script, fenced=f"```python\n{script}```")
    source = extract_script(text.replace("\n", line_end))
    assert source.replace(line_end, "\n").strip() == script.strip()


def test_imports_before_the_workflow_import_are_kept():
    raw = "I import what I need.\nimport re\nfrom math import pi\n" + SCRIPT + "That is all, folks."
    assert extract_script(raw) == "import re\nfrom math import pi\n" + SCRIPT.rstrip("\n")


def test_indented_fence():
    indented = "1. The script:\n" + "".join(f"   {line}\n" for line in FENCED.split("\n"))
    assert ast.dump(ast.parse(extract_script(indented))) == ast.dump(ast.parse(SCRIPT))


@pytest.mark.parametrize(
    "text, meant",
    [
        (r"\xi \underline{x} \Upsilon \N", r"\xi \underline{x} \Upsilon \N"),
        (r"\\xi and \x", r"\xi and \x"),  # what is escaped already stays
        (r"\x41 \u0042 \N{DIGIT ONE} \uparrow", r"A B 1 \uparrow"),  # so do real escapes
    ],
)
@pytest.mark.parametrize("form", ["code and fence", "bare fence", "code only"])
def test_latex_that_python_takes_for_a_broken_escape(form, text, meant):
    script = SCRIPT.replace('"p"', f'"{text}"')
    with pytest.raises(SyntaxError, match="unicodeescape"):
        ast.parse(script)
    source = extract_script(FORMS[form].format(script=script, fenced=f"```python\n{script}```"))
    strings = [n.value for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Constant)]
    assert meant in strings


def test_a_script_that_python_takes_is_not_touched():
    script = SCRIPT.replace('"p"', r'r"\xi" + "\\u"')
    assert extract_script(f"```python\n{script}```") == script


def test_a_broken_script_is_returned_for_its_error():
    broken = SCRIPT.replace('Workflow("w")', 'Workflow("w"')
    for form in ("code and fence", "code only", "bare fence", "raw", "both never closed"):
        source = extract_script(FORMS[form].format(script=broken, fenced=f"```python\n{broken}```"))
        assert kind_of_error(check_script, source) == "syntax"
        assert "AgentNode" in source


@pytest.mark.parametrize(
    "text", ["", "I can't.", "<think>x</think>", "<code></code>", "``` ```", "\0"]
)
def test_no_script(text):
    assert kind_of_error(extract_script, text) == "no_script"


CALL = HEAD + 'AgentNode("a", "p")\nWorkflow().run('
HOSTILE = {
    "NUL": CALL + '"\0")',
    "lone surrogate": CALL + '"\ud800")',
    "brackets": CALL + "(" * 30_000,
    "minus signs": CALL + "-" * 30_000 + "1)",
    "attributes": CALL + "x" + ".a" * 18_000 + ")",
    "calls": CALL + "x" + "()" * 18_000 + ")",
    "sums": CALL + "1" + "+1" * 18_000 + ")",
    "lambdas": CALL + "lambda:" * 5_000 + "1)",
    "huge integer": CALL + "9" * 10_000 + ")",
    "very long": CALL + "'" + "x" * 10_000_000 + "')",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_are_syntax_errors(name):
    assert kind_of_error(check_script, HOSTILE[name]) == "syntax"
    assert kind_of_error(structure_of, HOSTILE[name]) == "syntax"


@pytest.mark.parametrize(
    "text",
    [
        *(f"<code>\n{text}\n</code>" for text in HOSTILE.values()),
        "```python\n" * 20_000,
        "<code>\nfrom workflow import x\nw.run(1\n" * 3000,
        "```\nfrom workflow import x\nw.run(1\n" * 3000,
        "import a\n" * 20_000 + "from workflow import x\nw.run(1)",
        "from workflow import x\nw.run(1)\n" + "so (I think\n" * 3000,
        "<think>" * 50_000,
        "</think>" * 20_000 + SCRIPT,
    ],
)
def test_hostile_answers_take_little_time(text):
    begun = time.process_time()
    try:
        check_script(extract_script(text))
    except DesignError:
        pass
    assert time.process_time() - begun < 60  # CPU seconds; what is quadratic takes far more


def test_long_valid_scripts_do_not_recurse():
    chain = 'if 1:\n  w.add_node(AgentNode("a", "p"))\n' + "elif 1:\n  pass\n" * 400
    for body in (chain, "x" + "[0]" * 400 + " = 1\nw.add_node(AgentNode('a', 'p'))\n"):
        script = HEAD + "w = Workflow()\n" + body + "w.run(question)\n"
        check_script(script)
        assert structure_of(script) == "single"


def test_a_long_thought_is_no_obstacle():
    assert extract_script("<think>" + "hm " * 1_000_000 + "</think>" + FENCED) == SCRIPT


def test_no_warning_of_a_script_reaches_the_host():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_script(extract_script("<code>\n" + SCRIPT.replace('"p"', r'"\(x\)"') + "</code>"))


# --- check


@pytest.mark.parametrize(
    "kind, script",
    [
        ("syntax", "print("),
        ("syntax", SCRIPT + "return 1\n"),
        ("forbidden_import", "import torch\n" + SCRIPT),
        ("forbidden_import", "import os, numpy as np\n" + SCRIPT),
        ("forbidden_import", "from utils.environments.code_env import run\n" + SCRIPT),
        ("unknown_name", "from utils.environments.math_env import run\n" + SCRIPT),
        ("forbidden_import", "from . import x\n" + SCRIPT),
        ("forbidden_import", "import workflow.graph\n" + SCRIPT),
        ("forbidden_import", SCRIPT + "def f():\n    import sandbox\n"),
        ("unknown_name", "from workflow.nodes import create_keyword_router\n" + SCRIPT),
        ("unsupported", HEAD + "from workflow import LoopWorkflow as L\nL()\n" + SCRIPT),
        ("unsupported", "import workflow as wf\nwf.AgentGraph()\n" + SCRIPT),
        ("no_agent", "print(42)"),
        ("no_agent", HEAD + "Workflow().run(question)"),
        ("no_run", HEAD + 'w = Workflow()\nw.add_node(AgentNode("a", "p"))'),
        (
            "no_run",
            HEAD + 'import subprocess\nWorkflow()\nAgentNode("a", "p")\nsubprocess.run("ls")',
        ),
        ("no_run", HEAD + 'AgentNode("a", "p").run(question)'),
    ],
)
def test_what_cannot_work_is_refused(kind, script):
    assert kind_of_error(check_script, script) == kind


@pytest.mark.parametrize(
    "script",
    [
        SCRIPT,
        TRICKY,
        "from __future__ import annotations\nimport re, json, asyncio, typing as t\n" + SCRIPT,
        "import workflow\nworkflow = workflow.Workflow()\n"
        "from workflow import AgentNode as A, LoopWorkflow\n"
        "workflow.add_node(A('a', 'p'))\nworkflow.run(question)",
        "from workflow import *\nprint(Workflow().add_node(AgentNode('a', 'p')).run(question))",
        "from workflow.core import Message, Context\nfrom workflow.workflow import Workflow\n"
        + SCRIPT,
        "from utils.environments.math_env import MathEnvironment, python_execute\n" + SCRIPT,
    ],
)
def test_what_can_work_passes(script):
    check_script(script)


def test_the_names_of_the_api_are_those_of_workflow():
    names = {*design.CLASSES, *design.OTHER_NAMES}
    assert all(hasattr(workflow, name) for name in names)
    classes = {
        n for n, v in vars(workflow).items() if isinstance(v, type) and v.__module__ == "workflow"
    }
    others = {"core", "nodes", "python_execute"}
    assert {n for n in classes if not n.startswith("_")} == names - others
    for module in design.MODULES:
        __import__(module)


# --- structure

AGENTS = HEAD + "a, b, c = [AgentNode(n, 'p') for n in 'abc']\nw = Workflow('w')\n"
STRUCTURE_CASES = [
    ("single", "w.add_node(a)"),
    ("single", "w.add_nodes([a])"),
    ("single", "w.add_node(a if len(question) > 9 else b)"),
    (
        "single",
        "if question:\n  w.add_node(a)\nelif 1:\n  w.add_node(b)\nelse:\n  w.add_node(c)",
    ),
    ("single", "unused = EnsembleNode('e', [a, b])\nw.add_node(c)"),
    ("single", "if __name__ == '__main__':\n    w.add_node(node=a)"),
    ("pipeline", "w.add_node(a)\nw.add_node(b)"),
    ("pipeline", "w.add_node(a).add_node(b)"),
    ("pipeline", "w.add_nodes([a, b])"),
    ("pipeline", "w.add_node(a)\nif 'x' in question:\n    w.add_node(b)"),
    ("pipeline", "for node in [a, b]:\n    w.add_node(node)"),
    ("pipeline", "w.add_nodes([AgentNode(n, 'p') for n in ('x', 'y')])"),
    ("pipeline", "[w.add_node(n) for n in (a, b)]"),
    (
        "pipeline",
        "team = []\nfor n in 'ab':\n    team.append(AgentNode(n, 'p'))\nw.add_nodes(team)",
    ),
    ("pipeline", "team = [a, b]\nw.add_nodes(nodes=team)"),
    ("pipeline", "v = Workflow('v')\nv.add_node(a)\nx = v.run(question)\nw.add_node(b)"),
    ("ensemble", "w.add_node(EnsembleNode('e', [a, b]))"),
    ("ensemble", "w.add_node(EnsembleNode('e', [a, b], consensus_agent=c))"),
    (
        "ensemble",
        "e = EnsembleNode('e', agents=[AgentNode(str(i), 'p') for i in 'ab'])\nw.add_node(e)",
    ),
    ("ensemble", "team = [a] * 3\nteam += [b]\ne = f = EnsembleNode('e', team)\nw.add_nodes([f])"),
    ("ensemble", "def team(x):\n    return EnsembleNode('e', x)\nw.add_node(team([a, b]))"),
    ("ensemble", "make = lambda x: EnsembleNode('e', x)\nw.add_node(make([a, b]))"),
    ("ensemble", "Vote = EnsembleNode\nV = Vote\nw.add_node(V('e', [a, b]))"),
    ("ensemble", "class Vote(EnsembleNode):\n    pass\nw.add_node(Vote('e', [a, b]))"),
    ("ensemble", "import workflow.nodes as n\nw.add_node(n.EnsembleNode('e', [a, b]))"),
    (
        "ensemble",
        "with x as f:\n  try:\n    w.add_node(EnsembleNode('e', [a]))\n  except OSError:\n    1",
    ),
    ("reflection", "w.add_node(ReflectionNode('r', agent=a, critic_agent=b))"),
    ("reflection", "from workflow import ReflectionNode as R\nw.add_node(R('r', a))"),
    ("debate", "d = {'d': [a, b]}\nw.add_node(DebateNode('d', d['d'], judge=c))"),
    (
        "debate",
        "d, unused = {}, EnsembleNode('e', [c])\n"
        "d['x'] = DebateNode('d', [a, b])\nw.add_node(d['x'])",
    ),
    (
        "reflection",
        "unused, r = EnsembleNode('e', [a]), ReflectionNode('r', b)\nw.add_node(r)",
    ),
    (
        "router",
        "routes = {'x': a}\nroutes['y'] = b\nw.add_node(RouterNode('r', routes, lambda q: 'x'))",
    ),
    (
        "router",
        "def f(q):\n  return 'x' if q else 'y'\nw.add_node(RouterNode('r', {'x': a, 'y': b}, f))",
    ),
    ("mixed", "w.add_node(EnsembleNode('e', [a, b]))\nw.add_node(c)"),
    ("mixed", "w.add_node(EnsembleNode('e', [a]))\nw.add_node(EnsembleNode('f', [b]))"),
    ("mixed", "w.add_node(EnsembleNode('e', [a, ReflectionNode('r', b)]))"),
    (
        "mixed",
        "r = ReflectionNode('r', b)\nt = [a]\nt.append(r)\nw.add_node(EnsembleNode('e', t))",
    ),
    ("mixed", "w.add_node(RouterNode('r', {'x': a, 'y': DebateNode('d', [b, c])}, len))"),
    ("mixed", "w.add_node(EnsembleNode('e', [Workflow('v').add_nodes([a, b]), c]))"),
    (
        "mixed",
        "def f(x):\n    return ReflectionNode('r', x)\nw.add_node(DebateNode('d', [f(a), f(b)]))",
    ),
    ("mixed", "for node in [EnsembleNode('e', [a]), b]:\n    w.add_node(node)"),
    ("mixed", "if 1:\n    w.add_node(a)\nelse:\n    w.add_node(EnsembleNode('e', [b]))"),
    (
        "mixed",
        "make = lambda x: EnsembleNode('e', [x, b])\nw.add_node(make(ReflectionNode('r', a)))",
    ),
]


@pytest.mark.parametrize("structure, body", STRUCTURE_CASES)
def test_structure(structure, body):
    script = AGENTS + body + "\nprint(w.run(question).content)\n"
    check_script(script)
    assert structure_of(script) == structure


@pytest.mark.parametrize("structure", ["single", "ensemble"])
def test_structure_of_scripts_written_as_classes(structure):
    node = {"single": "self.a", "ensemble": "EnsembleNode('e', [self.a, self.make('b')])"}[
        structure
    ]
    script = (
        HEAD
        + f"""
class Team:
    def __init__(self):
        self.a = self.make('a')
        self.flow = Workflow(name='f')
    def make(self, name):
        return AgentNode(name=name, system_prompt='p')
    def solve(self, text):
        self.flow.add_node({node})
        return self.flow.run(text)
print(Team().solve(question))
"""
    )
    check_script(script)
    assert structure_of(script) == structure


def test_structure_that_cannot_be_followed():
    lost = HEAD + "w = Workflow()\ngetattr(w, 'add_node')({})\nw.run(question)\n"
    assert structure_of(lost.format("AgentNode('a', 'p')")) == "single"
    assert structure_of(lost.format("EnsembleNode('e', [AgentNode('a', 'p')])")) == "ensemble"
    assert structure_of(lost.format("list(map(AgentNode, 'a', 'p'))[0]")) == "mixed"


def test_structure_of_no_script():
    assert kind_of_error(structure_of, "print(1)") == "no_agent"
    assert kind_of_error(structure_of, "print(") == "syntax"


# --- the fixed scripts, in the real sandbox


def test_fixed_scripts_are_valid():
    assert list(design.SCRIPTS) == [
        "single",
        "pipeline",
        "ensemble",
        "reflection",
        "debate",
        "router",
    ]
    for structure, script in design.SCRIPTS.items():
        check_script(script)
        assert structure_of(script) == structure
        assert extract_script(f"<code>\n```python\n{script}```\n</code>") == script


MATH, CODE = "What is 6 * 7?", "Write a program: the input is n, the output is n + 1."
CALLS = {  # agents of each message when every solver agrees and the critic accepts
    "single": [["solver"]],
    "pipeline": [["planner"], ["solver"], ["checker"]],
    "ensemble": [["forward", "backward", "cases"]],
    "reflection": [["solver"], ["critic"]],
    "debate": [["first", "second"], ["first", "second"], ["judge"]],
    "router": [["mathematician"]],
}


def test_fixed_scripts_run_in_the_sandbox():
    source = Path(workflow.__file__).read_text()
    sandbox.configure("best")
    asked, ends = {}, {}
    with sandbox.ScriptPool({"workflow": source}) as pool:
        for structure, script in design.SCRIPTS.items():
            pool.start((structure, "math"), script, variables={"question": MATH})
        pool.start(("router", "code"), design.SCRIPTS["router"], variables={"question": CODE})
        while pool.live():
            for event in pool.poll(timeout=30):
                if event.kind == "ended":
                    ends[event.key] = (event.status, event.answer, event.stdout, event.error)
                    continue
                agents = [call["agent"] for call in event.calls]
                asked.setdefault(event.key, []).append(agents)
                replies = {"critic": "I agree.\nVERDICT: CORRECT"}
                pool.reply(
                    event.key, [replies.get(a, r"<think>!</think>\boxed{42}") for a in agents]
                )
    assert asked == {
        **{(structure, "math"): calls for structure, calls in CALLS.items()},
        ("router", "code"): [["programmer"]],
    }
    assert set(ends.values()) == {("ok", r"\boxed{42}", "\\boxed{42}\n", "")}
