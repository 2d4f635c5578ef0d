r"""Designs of the published checkpoint's form, played from the designer's reply to the reward.

Each case is one task of a single rollout in the real sandbox: the scripted engine answers the
designer's prompt with the case's script, in the dress that the checkpoint gives it (<think>, then
<code> with a Python fence), and every agent with the case's next reply, with its habits
(<delivery>, FINAL ANSWER, <solution>). The scripts were written for this file. They use what
published scripts use: these imports, a retyped question, a tool registry, triple-quoted prompts,
banners around a printed result.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import design
import reward
import sandbox
import workflow as wf
from data import Task
from engine import ScriptedEngine
from execute import rollout, shares, tally

IMPORTS = """from workflow import AgentNode, Workflow, ToolRegistry
from workflow.nodes import EnsembleNode, ReflectionNode, DebateNode, RouterNode
"""
RUN = """
print("=" * 40)
print("FINAL ANSWER:")
result = workflow.run(question)
print(result.content)
print("=" * 40)
"""
FENCED = "<think>\n{plan}\n</think>\n<code>\n```python\n{script}\n```\n</code>"
PLAN = """Problem Type: MATH
Workflow Pattern: as below; `from workflow import AgentNode` comes first, then workflow.run(...)
```python
workflow = Workflow(name="a draft")
```"""


@dataclass
class Case:
    """script: between the imports and RUN (`whole`: all of it). replies: of the agents, in the
    order of the calls. turns: the agents of each message. sees: call -> what its user message
    holds ("-" in front: does not hold)."""

    script: str
    replies: list[str]
    turns: list[list[str]]
    structure: str
    gold: str | dict = "42"
    question: str = "What is 6 times 7?"
    sees: dict[int, list[str]] = field(default_factory=dict)
    dress: str = FENCED
    whole: bool = False
    starter: str = ""
    reward: float = 1.0

    def task(self, name: str) -> Task:
        is_code = isinstance(self.gold, dict)
        answer, tests = (None, self.gold) if is_code else (self.gold, None)
        kind = "code" if is_code else "math"
        return Task(name, kind, self.question, answer=answer, tests=tests, starter=self.starter)

    def designer_reply(self) -> str:
        script = self.script if self.whole else IMPORTS + self.script + RUN
        return self.dress.format(plan=PLAN, script=script)


def final(value, delivery="6 sevens are 42"):
    return f"Some work.\n<delivery>\n{delivery}\n</delivery>\nFINAL ANSWER: \\boxed{{{value}}}"


def solution(program, delivery="read n, add one"):
    return f"<delivery>{delivery}</delivery>\n<solution>\n```python\n{program}\n```\n</solution>"


PLUS_ONE = {"inputs": ["1\n", "41\n"], "outputs": ["2\n", "42\n"], "fn_name": None}
GOOD, BAD = "print(int(input()) + 1)", "print(2)"

CASES = {}

# --- one agent

CASES["single, LaTeX in a triple-quoted prompt"] = Case(
    r'''
question = "What is 6 times 7?"
tool_registry = ToolRegistry()

solver = AgentNode(
    name="Solver",
    system_prompt="""You are a careful solver.

FORM:
- Show the steps, e.g. \frac{a}{b} \times c
- End with the result in \boxed{}, for example \boxed{\frac{3}{4}}
```
\boxed{7}
```""",
    tool_registry=tool_registry,
    max_turns=1,
)
workflow = Workflow(name="one")
workflow.add_node(solver)
''',
    [final(42)],
    [["Solver"]],
    "single",
    sees={0: ["What is 6 times 7?"]},
)
CASES["single, a question whose LaTeX Python reads as control characters"] = Case(
    r'''
question = """Let $\theta \neq 0$ and $\left(\frac{6}{1}\right) \times 7 = \text{x}$.
Find x."""
solver = AgentNode(name="Solver", system_prompt="Solve it.", tool_registry=ToolRegistry())
workflow = Workflow(name="one")
workflow.add_node(solver)
''',
    [final(42)],
    [["Solver"]],
    "single",
    sees={
        0: [r"Let $\theta \neq 0$ and $\left(\frac{6}{1}\right) \times 7 = \text{x}$." + "\nFind"]
    },
)
CASES["single, a question that Python refuses in a plain string"] = Case(
    r"""
question = "If $\xi = 6$, find $7\xi$ for \underline{all} \\xi in \N."
solver = AgentNode(name="Solver", system_prompt='Use \\boxed{}.', max_turns=1)
workflow = Workflow(name="one")
workflow.add_node(solver)
""",
    [final(42)],
    [["Solver"]],
    "single",
    sees={0: [r"If $\xi = 6$, find $7\xi$ for \underline{all} \xi in \N."]},
)
CASES["single, path set-up, a main guard and sys.exit"] = Case(
    """import os
import sys
sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""
    + IMPORTS
    + """
question = "What is 6 times 7?"

def main():
    solver = AgentNode(name="Solver", system_prompt="Solve.", tool_registry=ToolRegistry())
    workflow = Workflow(name="guarded (one)")
    workflow.add_node(solver)
    print("Question:", question)
    try:
        result = workflow.run(question)
        print("FINAL ANSWER:", result.content)
    except Exception as error:
        print(f"Error during the run: {error}")
        sys.exit(1)

if __name__ == "__main__":
    main()
""",
    [final(42)],
    [["Solver"]],
    "single",
    whole=True,
)

# --- chains

CASES["pipeline, only the delivery is handed on"] = Case(
    """
question = "What is 6 times 7?"
tool_registry = ToolRegistry()
planner = AgentNode(name="Planner", system_prompt="Plan it.", tool_registry=tool_registry)
solver = AgentNode(name="Solver", system_prompt="Carry it out.", tool_registry=tool_registry)
workflow = Workflow(name="two")
workflow.add_node(planner)
workflow.add_node(solver)
""",
    ["<think>easy</think>Long plan.\n<delivery>add 7 six times</delivery>\nFINAL", final(42)],
    [["Planner"], ["Solver"]],
    "pipeline",
    sees={1: ["What is 6 times 7?\n\n[Planner]\nadd 7 six times", "-Long plan", "-easy"]},
)
CASES["pipeline, three nodes at once, one without a delivery"] = Case(
    '''
question = """What is 6 times 7?"""
agents = [
    AgentNode(name=f"Step{i}", system_prompt=f"You do step {i} of 3.", max_turns=1)
    for i in range(1, 4)
]
workflow = Workflow(name="three")
workflow.add_nodes(agents)
''',
    ["<think>a</think>6 + 6 = 12", "<delivery>36</delivery> then <delivery>36 + 6</delivery>"]
    + [final(42)],
    [["Step1"], ["Step2"], ["Step3"]],
    "pipeline",
    sees={2: ["[Step1]\n6 + 6 = 12", "[Step2]\n36 + 6", "-<think>", "-<delivery>"]},
    dress="<think>short</think>\n\n```python\n{script}\n```\nThis workflow has three agents.",
)

# --- ensembles

SOLVERS = """
question = "What is 6 times 7?"
tool_registry = ToolRegistry()
forward = AgentNode(name="ForwardSolver", system_prompt="Reason forward. Use \\\\boxed{}.",
                    tool_registry=tool_registry, max_turns=1)
backward = AgentNode(name="BackwardSolver", system_prompt="Reason backward. Use \\\\boxed{}.",
                     tool_registry=tool_registry, max_turns=1)
cases = AgentNode(name="CaseAnalyzer", system_prompt="Go case by case. Use \\\\boxed{}.",
                  tool_registry=tool_registry, max_turns=1)
judge = AgentNode(name="Judge", system_prompt="Judge the solutions.", tool_registry=tool_registry)
"""
THREE = ["ForwardSolver", "BackwardSolver", "CaseAnalyzer"]
VOTE = (
    SOLVERS
    + """
ensemble = EnsembleNode(
    name="Ensemble",
    agents=[forward, backward, cases],
    strategy="majority_vote",
    consensus_agent=judge
)
workflow = Workflow(name="vote")
workflow.add_node(ensemble)
"""
)
CASES["ensemble, all agree: the judge is not asked"] = Case(
    VOTE,
    [final("42"), final("42.0"), final(" $042$ ")],
    [THREE],
    "ensemble",
)
CASES["ensemble, fractions that look different agree"] = Case(
    VOTE,
    [final(r"\frac{1}{2}"), final(r"\dfrac{1}{2}"), final(r"\frac{1} {2}")],
    [THREE],
    "ensemble",
    gold=r"\frac12",
)
CASES["ensemble, a split vote goes to the judge"] = Case(
    VOTE,
    [final(41), final(42), final(42), final(42, "the first one slipped")],
    [THREE, ["Judge"]],
    "ensemble",
    sees={3: ["[ForwardSolver]\nSome work.", r"\boxed{41}", r"[BackwardSolver]"]},
    dress="<think>\n{plan}\n</think>\n<code>\n{script}\n</code>",
)
CASES["ensemble, consensus always asks"] = Case(
    SOLVERS
    + """
ensemble = EnsembleNode(name="Ensemble", agents=[forward, backward], strategy="consensus",
                        consensus_agent=judge)
workflow = Workflow(name="consensus")
workflow.add_nodes([ensemble])
""",
    [final(42), final(42), final(42)],
    [THREE[:2], ["Judge"]],
    "ensemble",
)
CASES["ensemble, weights outvote a majority"] = Case(
    SOLVERS
    + """
workflow = Workflow(name="weights")
workflow.add_node(EnsembleNode(name="Ensemble", agents=[forward, backward, cases],
                               strategy="weighted_vote", weights=[3.0, 1.0, 1.0]))
""",
    [final(42), final(41), final(41)],
    [THREE],
    "ensemble",
)
CASES["ensemble, five of one kind, no judge"] = Case(
    """
question = "What is 6 times 7?"
solvers = []
for letter in "ABCDE":
    solvers.append(AgentNode(
        name="Solver_" + letter,
        system_prompt=("You solve problems step by step.\\n"
                       "Put the result in \\\\boxed{}."),
        tool_registry=ToolRegistry(),
    ))
ensemble = EnsembleNode(name="SelfConsistency", agents=solvers, strategy="majority_vote")
workflow = Workflow(name="self_consistency")
workflow.add_node(ensemble)
""",
    [final(41), final(42), "I give up.", final(42), final(40)],
    [["Solver_A", "Solver_B", "Solver_C", "Solver_D", "Solver_E"]],
    "ensemble",
)

# --- reflection

CASES["reflection, INCORRECT goes on, CORRECT stops"] = Case(
    '''
question = "What is 6 times 7?"
solver = AgentNode(name="Solver", system_prompt="Solve. If a verifier objects, mend it.")
verifier = AgentNode(
    name="Verifier",
    system_prompt="""Check each constraint: PASS or FAIL.
Final verdict: CORRECT or INCORRECT
If INCORRECT, say what is wrong.""",
)
reflection = ReflectionNode(name="Review", agent=solver, critic_agent=verifier, num_iterations=3)
workflow = Workflow(name="review")
workflow.add_node(reflection)
''',
    [final(41), "<delivery>off by one</delivery>\nFinal verdict: INCORRECT", final(42)]
    + ["All PASS.\n**Final verdict:** CORRECT\n<delivery>fine</delivery>"],
    [["Solver"], ["Verifier"], ["Solver"], ["Verifier"]],
    "reflection",
    sees={1: [r"\boxed{41}", "What is 6 times 7?"], 2: ["off by one", r"\boxed{41}"]},
)
CASES["reflection, own templates and history"] = Case(
    r'''
question = "What is 6 times 7?"
solver = AgentNode(name="Solver", system_prompt="Solve.")
critic = AgentNode(name="Critic", system_prompt="Criticise.")
reflection = ReflectionNode(
    name="Review",
    agent=solver,
    critic_agent=critic,
    num_iterations=1,
    reflection_prompt="""Task: {question}
Proposed: {response}
Is \boxed{} right, as in {x : x > 0}?""",
    refinement_prompt="""Task: {question}
Was: {response}
Critic: {reflection}
Before: {history}""",
    include_history=True,
)
workflow = Workflow(name="review")
workflow.add_node(reflection)
''',
    [final(41), "No: INCORRECT", final(42)],
    [["Solver"], ["Critic"], ["Solver"]],
    "reflection",
    sees={
        1: [
            "Task: What is 6 times 7?\nProposed: Some work.",
            r"Is \boxed{} right, as in {x : x > 0}?",
        ],
        2: ["Was: Some work.", "Critic: No: INCORRECT\nBefore: "],
    },
)
CASES["reflection, the agent criticises itself"] = Case(
    """
question = "What is 6 times 7?"
solver = AgentNode(name="Solver", system_prompt="Solve, and judge your own work strictly.")
workflow = Workflow(name="alone")
workflow.add_node(ReflectionNode(name="Review", agent=solver, num_iterations=2))
""",
    [final(42), "I checked it.\nVERDICT: CORRECT"],
    [["Solver"], ["Solver"]],
    "reflection",
    dress="Design:\n\n{script}\nThis workflow solves it: one agent (twice).",
)

# --- debate

CASES["debate, two rounds and a judge"] = Case(
    """
question = "What is 6 times 7?"
pro = AgentNode(name="Optimist", system_prompt="Defend the obvious answer.")
con = AgentNode(name="Skeptic", system_prompt="Attack it.")
judge = AgentNode(name="Judge", system_prompt="Decide.")
debate = DebateNode(name="Debate", debaters=[pro, con], judge=judge, num_rounds=2)
workflow = Workflow(name="debate")
workflow.add_node(debate)
""",
    [final(42), final(41), final(42), final(42), final(42)],
    [["Optimist", "Skeptic"], ["Optimist", "Skeptic"], ["Judge"]],
    "debate",
    sees={
        2: ["[Optimist, round 1]", "[Skeptic, round 1]", r"\boxed{41}"],
        4: ["[Optimist]", "[Skeptic]", r"-\boxed{41}"],
    },
)
CASES["debate, decided by the first debater"] = Case(
    """
question = "What is 6 times 7?"
debaters = [AgentNode(name=n, system_prompt=f"You are {n}.") for n in ("Ada", "Bob", "Cleo")]
workflow = Workflow(name="debate")
workflow.add_node(DebateNode(name="Debate", debaters=debaters, num_rounds=1))
""",
    [final(41), final(42), final(43), final(42)],
    [["Ada", "Bob", "Cleo"], ["Ada"]],
    "debate",
)

# --- router

ROUTES = """
question = "What is 6 times 7?"
algebra = AgentNode(name="Algebraist", system_prompt="Algebra.")
geometry = AgentNode(name="Geometer", system_prompt="Geometry.")
"""
CASES["router, by the words of the question"] = Case(
    ROUTES
    + """
def pick(text):
    return "geometry" if "triangle" in text.lower() else "algebra"

router = RouterNode(name="Router", routes={"algebra": algebra, "geometry": geometry},
                    routing_func=pick, default_route="algebra")
workflow = Workflow(name="router")
workflow.add_node(router)
""",
    [final(42)],
    [["Algebraist"]],
    "router",
)
CASES["router, by the context's latest message, to the default"] = Case(
    ROUTES
    + """
router = RouterNode(
    name="Router",
    routes={"algebra": algebra, "default": geometry},
    routing_func=lambda context: "algebra"
    if "equation" in context.get_latest_message().content
    else "nothing known",
)
workflow = Workflow(name="router")
workflow.add_node(router)
""",
    [final(42)],
    [["Geometer"]],
    "router",
)

# --- nested

CASES["an ensemble of a reflection and an agent, then a verifier"] = Case(
    SOLVERS
    + """
critic = AgentNode(name="Critic", system_prompt="Criticise.")
careful = ReflectionNode(name="Careful", agent=forward, critic_agent=critic, num_iterations=1)
ensemble = EnsembleNode(name="Ensemble", agents=[careful, backward], strategy="majority_vote",
                        consensus_agent=judge)
verifier = AgentNode(name="Verifier", system_prompt="Restate or mend the answer.")
workflow = Workflow(name="ensemble_verify")
workflow.add_node(ensemble)
workflow.add_node(verifier)
""",
    [final(41), final(42), "INCORRECT", final(42, "six sevens"), final(42)],
    [["ForwardSolver", "BackwardSolver"], ["Critic"], ["ForwardSolver"], ["Verifier"]],
    "mixed",
    sees={4: ["[Ensemble]\nsix sevens", "-Some work"]},
)
CASES["a router to a debate or a reflection"] = Case(
    ROUTES
    + """
critic = AgentNode(name="Critic", system_prompt="Criticise.")
routes = {
    "hard": DebateNode(name="Debate", debaters=[algebra, geometry], judge=critic, num_rounds=1),
    "easy": ReflectionNode(name="Review", agent=algebra, critic_agent=critic),
}
workflow = Workflow(name="nested_router")
workflow.add_node(RouterNode(name="Router", routes=routes, default_route="easy",
                             routing_func=lambda text: "hard" if len(text) > 10 else "easy"))
""",
    [final(42), final(41), final(42)],
    [["Algebraist", "Geometer"], ["Critic"]],
    "mixed",
)
CASES["a debate of chains, judged by an ensemble"] = Case(
    SOLVERS
    + """
first = Workflow(name="FirstTeam")
first.add_nodes([forward, backward])
second = Workflow(name="SecondTeam").add_node(cases)
jury = EnsembleNode(name="Jury", agents=[
    AgentNode(name="JurorA", system_prompt="Decide."),
    AgentNode(name="JurorB", system_prompt="Decide."),
], strategy="majority_vote")
debate = DebateNode(name="Debate", debaters=[first, second], judge=jury, num_rounds=1)
workflow = Workflow(name="teams")
workflow.add_node(debate)
""",
    [final(41), final(42), final(42), final(42), final(42)],
    [["ForwardSolver", "CaseAnalyzer"], ["BackwardSolver"], ["JurorA", "JurorB"]],
    "mixed",
    sees={2: ["[ForwardSolver]\n6 sevens are 42"], 3: ["[FirstTeam]", "[SecondTeam]"]},
)
CASES["an ensemble, then a reflection, with the examples' Python tool"] = Case(
    """import sys
from workflow import AgentNode, Workflow, ToolRegistry
from workflow.nodes import EnsembleNode, ReflectionNode
from utils.environments.math_env import MathEnvironment

question = "What is 6 times 7?"
math_env = MathEnvironment(timeout=60)
tool_registry = ToolRegistry()
tool_registry.register(
    name="python_execute",
    func=math_env.execute,
    description="Run Python.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}},
)
own = tool_registry.call_tool("python_execute", {"code": "print(6*7)"})
print("checked by the script itself:", own)
counter = AgentNode(name="Counter", system_prompt="Count.", tool_registry=tool_registry,
                    max_turns=2)
thinker = AgentNode(name="Thinker", system_prompt="Think.", max_turns=1)
decider = AgentNode(name="Decider", system_prompt="Decide.", tool_registry=tool_registry)
checker = AgentNode(name="Checker", system_prompt="Check.", tool_registry=tool_registry,
                    max_turns=6)
workflow = Workflow(name="ensemble_reflection")
workflow.add_nodes([
    EnsembleNode(name="Both", agents=[counter, thinker], strategy="consensus",
                 consensus_agent=decider),
    ReflectionNode(name="Check", agent=checker, num_iterations=1),
])
try:
    result = workflow.run(question)
    print("FINAL ANSWER:")
    print(result.content)
except Exception as error:
    print(f"Error: {error}")
    sys.exit(1)
""",
    ["<python>\nprint(sum([7] * 6))\n</python>", final(41), final(42), final(42)]
    + [final(42), "Right.\nVERDICT: CORRECT"],
    [["Counter", "Thinker"], ["Counter"], ["Decider"], ["Checker"], ["Checker"]],
    "mixed",
    sees={2: ["Output:\n42"]},
    whole=True,
)

# --- programs

CODE_QUESTION = "Read n from the input and print n + 1."
CASES["code, one agent: a fence inside <solution> is an answer, not a tool call"] = Case(
    '''
import subprocess

question = """Read n from the input and print n + 1."""

def execute_code(code):
    return subprocess.run(["python3", "-c", code], capture_output=True, text=True).stdout

tool_registry = ToolRegistry()
tool_registry.register(name="execute_code", func=execute_code, description="Run code",
                       parameters={"type": "object"})
coder = AgentNode(name="Coder", system_prompt="Write the program.", tool_registry=tool_registry,
                  max_turns=3)
workflow = Workflow(name="code")
workflow.add_node(coder)
''',
    [solution(GOOD)],
    [["Coder"]],
    "single",
    gold=PLUS_ONE,
    question=CODE_QUESTION,
)
CASES["code, a tester sends the program back"] = Case(
    """
question = "Read n from the input and print n + 1."
coder = AgentNode(name="CodeSolver", system_prompt="Write the program.")
tester = AgentNode(name="UnitTestAgent", system_prompt="Try the examples. CORRECT or INCORRECT?")
workflow = Workflow(name="solver_tester")
workflow.add_node(ReflectionNode(name="Test", agent=coder, critic_agent=tester, num_iterations=2))
""",
    [solution(BAD), "n = 41 prints 2.\nFinal verdict: INCORRECT"]
    + [f"<delivery>mended</delivery>\n<solution>\n{GOOD}\n</solution>", "Final verdict: CORRECT"],
    [["CodeSolver"], ["UnitTestAgent"], ["CodeSolver"], ["UnitTestAgent"]],
    "reflection",
    gold=PLUS_ONE,
    question=CODE_QUESTION,
    sees={1: ["print(2)", "<solution>"], 2: ["n = 41 prints 2."]},
)
CASES["code, starter code, programs vote and the judge decides"] = Case(
    '''
question = """Return n + 1."""
coders = [AgentNode(name=f"Coder{i}", system_prompt="Write it.") for i in range(2)]
judge = AgentNode(name="CodeJudge", system_prompt="Pick the right program and give it whole.")
workflow = Workflow(name="code_vote")
workflow.add_node(EnsembleNode(name="Vote", agents=coders, consensus_agent=judge))
''',
    [solution("def inc(n):\n    return n"), solution("def inc(n):\n    return n + 1")]
    + [solution("def inc(n):\n    return n + 1", "the second is right")],
    [["Coder0", "Coder1"], ["CodeJudge"]],
    "ensemble",
    gold={"inputs": ["1", "41"], "outputs": ["2", "42"], "fn_name": "inc"},
    question="Return n + 1.",
    starter="def inc(n):",
)
CASES["code, a wrong program is worth nothing"] = Case(
    '''
question = """Read n from the input and print n + 1."""
workflow = Workflow(name="wrong")
workflow.add_node(AgentNode(name="Coder", system_prompt="Write the program."))
''',
    [solution(BAD)],
    [["Coder"]],
    "single",
    gold=PLUS_ONE,
    question=CODE_QUESTION,
    reward=0.0,
)
CASES["names with brackets, colons and accents"] = Case(
    '''
question = "What is 6 times 7?"
workflow = Workflow(name="Plan (a): check) it")
solver = AgentNode(name="Solver (é): first)", system_prompt="""Solve it: ')' \\"quoted\\".""")
workflow.add_node(solver)
''',
    [final(42)],
    [["Solver (é): first)"]],
    "single",
)


# --- the rollout


@pytest.fixture(scope="module")
def played():
    """name -> its Rollout. One rollout for all, in the real sandbox, with the real rewards."""
    names = list(CASES)

    def reply(key, messages, seed):
        t, _, n, index = key
        case = CASES[names[t]]
        return case.designer_reply() if n == -1 else case.replies[index]

    sandbox.configure("best")
    source = Path(wf.__file__).read_text()
    with sandbox.ScriptPool({"workflow": source}) as pool:
        rolled = rollout(
            [CASES[name].task(name) for name in names],
            ScriptedEngine(reply),
            pool,
            reward.score,
            n_designs=1,
            n_executions=1,
            designer_prompt=design.PUBLISHED_PROMPT,
        )
    return dict(zip(names, rolled, strict=True))


def test_there_are_enough_and_of_all_kinds():
    assert len(CASES) >= 20
    text = "".join(case.script for case in CASES.values())
    for node in design.STRUCTURES:
        assert text.count(f"{node}(") >= 3, node
    assert {case.structure for case in CASES.values()} >= {*design.STRUCTURES.values(), "mixed"}


@pytest.mark.parametrize("name", CASES)
def test_played(played, name):
    case, rolled = CASES[name], played[name]
    [made] = rolled.designs
    assert (made.error, made.structure) == (None, case.structure)
    [execution] = made.executions
    assert (execution.status, execution.error) == ("ok", None)
    turns = [[] for _ in case.turns]
    for call in execution.calls:
        turns[call.turn].append(call.agent)
    assert turns == case.turns
    assert [call.text for call in execution.calls] == case.replies
    for index, texts in case.sees.items():
        shown = execution.calls[index].messages[-1]["content"]
        for text in texts:
            assert (text.removeprefix("-") in shown) is not text.startswith("-"), (index, text)
    assert execution.reward == case.reward
    assert execution.answer in execution.stdout  # what the script prints is what is graded


def test_the_shares_of_all(played):
    metrics = shares(tally(list(played.values())))
    assert metrics["valid_designs"] == 1.0 and metrics["status/ok"] == len(CASES)


def test_the_designer_gets_the_published_prompt(played):
    for name, rolled in played.items():
        system, user = rolled.designs[0].call.messages
        assert system["content"].startswith("You are an expert Python developer")
        question = CASES[name].question
        asked = "Design Multi Agent System for the Question: " + question
        assert user["content"].startswith(asked) and "[agents" not in user["content"]


def test_every_agent_is_asked_for_the_form(played):
    """The framework's part of an agent's prompt: a delivery, and a box or a <solution>."""
    for name, rolled in played.items():
        wanted = "<solution>" if isinstance(CASES[name].gold, dict) else r"\boxed{...}"
        other = r"\boxed{...}" if wanted == "<solution>" else "<solution>"
        for call in rolled.designs[0].executions[0].calls:
            [system, *_] = call.messages
            assert system["role"] == "system"
            ending = system["content"].rpartition("\n\n")[2]
            assert "<delivery>" in ending and wanted in ending and other not in ending


def test_latex_in_prompts_reaches_the_agent(played):
    name = "single, LaTeX in a triple-quoted prompt"
    [call] = played[name].designs[0].executions[0].calls
    prompt = call.messages[0]["content"]
    assert r"e.g. \frac{a}{b} \times c" in prompt
    assert "for example \\boxed{\\frac{3}{4}}\n```\n\\boxed{7}\n```\n\nWhen you are done" in prompt
    assert not re.search(r"[\x00-\x08\x0b-\x1f\t\r]", prompt)


def test_the_examples_tool_runs_on_the_host(played):
    name = "an ensemble, then a reflection, with the examples' Python tool"
    execution = played[name].designs[0].executions[0]
    assert "checked by the script itself: 42\n" in execution.stdout
    prompts = {call.agent: call.messages[0]["content"] for call in execution.calls}
    assert {agent for agent, text in prompts.items() if "You can run Python" in text} == {
        "Counter",
        "Decider",
        "Checker",
    }
