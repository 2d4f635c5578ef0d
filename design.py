r"""The designer's side of a task: its prompt, and its script extracted, checked and classified.

The idea
--------
The designer is a language model that answers a task with a short Python script (the API is in
workflow.py). This file turns text into a script and says what the script is, without running it:

    messages = designer_messages(question, kind)      what the designer is sent
    source   = extract_script(response)               the script in its answer, or DesignError
    check_script(source)                              DesignError if it can't work
    structure = structure_of(source)                  "single", "pipeline", "ensemble", ...

    >>> reply = "<think>Two solvers?</think>One is enough.\n<code>\n```python\n" + SCRIPTS["single"]
    >>> source = extract_script(reply + "```\n</code>\nIt ends with a box.")
    >>> check_script(source), structure_of(source)
    (None, 'single')

Extraction does not trust tags. `<code>`, a fence, and a line that starts with `from workflow
import` only say where a script *may* begin, and prompts inside a script may hold any of these
marks. Of the candidates, the first that parses and runs a workflow is taken, the last one of the
answer first. If none does, the best looking one is returned and `check_script` names its fault.

The check is a courtesy, not a boundary: it saves N executions of a script that can't work, and
counts why. What a script may really do is limited by sandbox.py. Every refusal is a DesignError
whose `kind` is "no_script", "syntax", "forbidden_import", "unknown_name", "unsupported",
"no_agent" or "no_run".

`structure_of` reads the syntax tree: which nodes are put into the workflow, and what is in them.
It follows names through assignments, aliases, lists, loops and functions. It ignores scopes and
the order of statements, because it needs a label and not a proof.

Different from the reference, and why
-------------------------------------
It takes the first fence by a regular expression, which a fence inside a prompt cuts short, and it
patches the script's text before running it. Here the script runs as it was written, but for one
repair: where Python refuses it for a LaTeX "\xi" or "\underline" in a plain string, backslashes
of that kind are doubled in all of it.

How to run it alone: `python design.py` prints the designer's prompt and the six fixed scripts with
their structures. Standard library only.
"""

import ast
import contextlib
import re
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice, zip_longest

MAX_SCRIPT = 40_000  # characters; a longer script is refused before it is parsed
MAX_TRIES = 40  # candidates parsed of one answer

# The names that workflow.py has for scripts: nodes and the structure that each makes, the classes
# that are refused, and the rest.
STRUCTURES = {
    "AgentNode": "single",
    "EnsembleNode": "ensemble",
    "ReflectionNode": "reflection",
    "DebateNode": "debate",
    "RouterNode": "router",
}
REFUSED = ("AgentGraph", "ConditionalWorkflow", "LoopWorkflow")
OTHER_NAMES = ("Context", "Message", "ToolRegistry", "WorkflowNode", "core", "nodes")
OTHER_NAMES += ("MathEnvironment", "python_execute")
CLASSES = (*STRUCTURES, *REFUSED, "Workflow")
MODULES = ("workflow", "workflow.core", "workflow.nodes", "workflow.workflow")
MODULES += ("utils.environments.math_env",)  # published scripts take their Python tool from it

_BLOCKS = ("body", "orelse", "finalbody")


class DesignError(ValueError):
    """A design that can't run. `kind` is counted; `str()` also says what is wrong."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


# ---------------------------------------------------------------------------------------------
# The prompt
# ---------------------------------------------------------------------------------------------

_API = """You design teams of language-model agents. For the task you are given, write one short \
Python script that builds a team and runs it. Don't solve the task yourself.

`question` already holds the task. The parts, all imported from `workflow`:
AgentNode(name, system_prompt)
    One agent. It sees the question and what earlier nodes of the chain handed on.
Workflow(name), .add_node(node), .run(question)
    A chain of nodes. The reply of its last node is the answer.
EnsembleNode(name, agents, strategy="majority_vote", consensus_agent=None)
    The agents answer apart and vote. The consensus_agent decides when they differ.
ReflectionNode(name, agent, critic_agent=None, num_iterations=2)
    The agent answers, the critic judges, the agent mends its answer. The critic has to end with
    VERDICT: CORRECT or VERDICT: INCORRECT.
DebateNode(name, debaters, judge=None, num_rounds=2)
    The debaters answer in rounds, each seeing all replies, then the judge gives the answer.
RouterNode(name, routes, routing_func, default_route)
    routes is a dict of nodes; routing_func(question) returns the key of the one to use.

Nodes nest. An agent knows only its system prompt and what it sees, so say in the prompt what it
should do and in which form. If a reply holds <delivery>...</delivery>, only that is handed on.
Use as few agents as the task needs: an easy task needs one.
"""

_FORM = {
    "math": r"The answer has to end with the result in \boxed{}. Tell the agents so.",
    "code": "The answer has to hold the complete Python program in one fenced code block, which\n"
    "is judged by unit tests. Tell the agents so.",
}

_EXAMPLE = {
    "math": r"""from workflow import AgentNode, EnsembleNode, Workflow

styles = ["Work forward from what is given.", "Work back from the goal.", "Go case by case."]
solvers = [
    AgentNode(name=f"solver{i}", system_prompt=style + r" End with the result in \boxed{}.")
    for i, style in enumerate(styles)
]
judge = AgentNode(
    name="judge",
    system_prompt=r"Find the error in the solutions that differ. End with the result in \boxed{}.",
)
workflow = Workflow(name="vote")
workflow.add_node(EnsembleNode(name="vote", agents=solvers, consensus_agent=judge))
result = workflow.run(question)
print(result.content)
""",
    "code": r"""from workflow import AgentNode, ReflectionNode, Workflow

coder = AgentNode(
    name="coder",
    system_prompt="Solve the task. Give the complete Python program in one fenced code block.",
)
tester = AgentNode(
    name="tester",
    system_prompt=(
        "Run the program by hand on the examples, on the smallest and on the largest input. "
        "List what fails. End with VERDICT: CORRECT or VERDICT: INCORRECT."
    ),
)
workflow = Workflow(name="test")
workflow.add_node(ReflectionNode(name="test", agent=coder, critic_agent=tester, num_iterations=1))
result = workflow.run(question)
print(result.content)
""",
}

# One template a kind. A line that is just "[user]" ends the system turn.
DESIGNER_PROMPTS = {
    kind: f"{_API}{_FORM[kind]}\n\nAn example:\n<code>\n```python\n{_EXAMPLE[kind]}```\n</code>\n"
    "\n[user]\nThe task ({kind}):\n\n{question}\n\n"
    "Design a team for this task. Think briefly, then write the script like the example, inside "
    "<code> tags."
    for kind in ("math", "code")
}

# What the published checkpoint Mercury7353/MetaAgent-X is used to. Its designer leaves the form of
# the answer to the framework, which asks every agent for it.
PUBLISHED_PROMPT = """You are an expert Python developer specializing in \
multi-agent workflow systems.
[user]
Design Multi Agent System for the Question: {question}
[agents math]
When you are done, put the steps that the next agent needs into <delivery>...</delivery>. Then give
the result as FINAL ANSWER: \\boxed{...}
[agents code]
When you are done, put the steps that the next agent needs into <delivery>...</delivery>. Then give
the complete program, and nothing else, in <solution>...</solution>.
"""

_AGENTS = re.compile(r"^\[agents(?: (math|code))?\][ \t]*(?:\n|\Z)", re.MULTILINE)


def agent_suffix(prompt: str | None, kind: str) -> str:
    """What a template adds to the system prompt of every agent, for tasks of this kind.

    That is what stands after its last line "[agents math]" (or code), or after "[agents]" for both
    kinds; such sections come at the end of a template. The default template has none.

    >>> agent_suffix("Design for {question}.\\n[agents]\\nUse a box.", "math")
    '\\n\\nUse a box.'
    """
    sections = _AGENTS.split(prompt or "")[1:]
    texts = [
        text
        for name, text in zip(sections[::2], sections[1::2], strict=True)
        if name in (None, kind)
    ]
    return "\n\n" + texts[-1].strip() if texts else ""


def designer_messages(question: str, kind: str, prompt: str | None = None) -> list[dict]:
    """The designer's chat messages for one task of `kind` "math" or "code".

    `prompt` replaces the default template. {question} and {kind} are put in literally, in one
    pass, so a question may hold braces. What stands before a line that is just "[user]" is the
    system turn; sections for `agent_suffix` are left out. Raises ValueError for a template without
    {question} or an unknown kind.

    >>> designer_messages("1+1?", "math", "Be brief.\\n[user]\\nA {kind} task: {question}")
    ... # doctest: +NORMALIZE_WHITESPACE
    [{'role': 'system', 'content': 'Be brief.'},
     {'role': 'user', 'content': 'A math task: 1+1?'}]
    """
    if kind not in DESIGNER_PROMPTS:
        raise ValueError(f"unknown kind of task {kind!r}: use 'math' or 'code'")
    template = DESIGNER_PROMPTS[kind] if prompt is None else _AGENTS.split(prompt)[0]
    if "{question}" not in template:
        raise ValueError("the designer prompt has no {question}: say where the task goes")
    parts = re.split(r"^\[user\][ \t]*\n", template, maxsplit=1, flags=re.MULTILINE)
    fields = {"{question}": question, "{kind}": kind}
    texts = [re.sub(r"\{question\}|\{kind\}", lambda m: fields[m[0]], part) for part in parts]
    roles = ["system", "user"][-len(parts) :]
    return [
        {"role": role, "content": text.strip()} for role, text in zip(roles, texts, strict=True)
    ]


# ---------------------------------------------------------------------------------------------
# Extraction
# ---------------------------------------------------------------------------------------------

_OPENING = re.compile(r"```[ \t]*\w*[ \t\r]*\n")
_IMPORT = re.compile(r"^(?:from|import)[ \t]+workflow\b", re.MULTILINE)
_MARK = re.compile(rf"```|<code>|{_IMPORT.pattern}", re.MULTILINE)
# \underline, \xi or \N in a plain string: no escape, and Python refuses the whole script for it.
_NO_ESCAPE = re.compile(
    r"(?<!\\)\\(?:u(?![\da-fA-F]{4})|U(?![\da-fA-F]{8})|x(?![\da-fA-F]{2})|N(?!\{))"
)
_ANY_IMPORT = re.compile(r"(?:from|import)[ \t]+\w")


def extract_script(response: str) -> str:
    """The script in a designer's answer. Raises DesignError("no_script") if there is none.

    Copes with <think> before it, <code> with or without a fence, a bare fence, marks that are
    never closed, raw text from its imports on, prose around it, and with any hostile text.
    """
    text = _after_thought(response)
    if len(text) > 10 * MAX_SCRIPT:
        raise DesignError("no_script", f"the answer is longer than {10 * MAX_SCRIPT} characters")
    first = first_that_runs = None
    tries = 0
    for candidate in _candidates(text):
        if not candidate.strip():
            continue
        first = first or candidate
        if "workflow" not in candidate or ".run(" not in candidate:
            continue
        first_that_runs = first_that_runs or candidate
        try:
            _tree(candidate)
            return candidate
        except SyntaxError as error:
            tries += 1
            if tries == MAX_TRIES:
                break
            if "unicodeescape" in str(error):
                candidate = _NO_ESCAPE.sub(r"\\\g<0>", candidate)
                with contextlib.suppress(SyntaxError):
                    _tree(candidate)
                    return candidate
    if first is None:
        raise DesignError("no_script", "no <code>, no fence and no import of workflow to start at")
    return first_that_runs or first


def _after_thought(response: str) -> str:
    """The response after its leading thought; a thought that never ends is searched as well."""
    thought, closed, rest = response.partition("</think>")
    before, opened, _ = thought.partition("<think>")
    in_script = opened and _MARK.search(before)  # a prompt of the script speaks of these tags
    return rest if closed and not in_script else response


def _candidates(text: str) -> Iterator[str]:
    """Texts that may be the script, the likeliest first: of each mark the last 8 are tried."""
    starts = [match.end() for match in re.finditer("<code>", text)][-8:]
    regions = [text[start:].partition("</code>")[0] for start in reversed(starts)]
    for region in [*regions, text]:
        for opening in list(_OPENING.finditer(region))[:-9:-1]:
            body = region[opening.end() :]
            for end in islice(re.finditer("```", body), 16):
                yield body[: end.start()]
            yield _without_prose(textwrap.dedent(body))
        if region is not text:
            yield textwrap.dedent(region)
        found = _IMPORT.search(region)
        if found:
            yield _without_prose(_imports_before(region, found.start()) + region[found.start() :])


def _imports_before(text: str, position: int) -> str:
    """The unbroken lines of imports that end at `position`."""
    lines = text[:position].split("\n")[:-1]
    first = len(lines)
    while first > 0 and _ANY_IMPORT.match(lines[first - 1]):
        first -= 1
    return "".join(line + "\n" for line in lines[first:])


def _without_prose(text: str) -> str:
    """Cut what follows a script that starts at the top of `text`: everything from the first line
    that is not Python, then last statements that do nothing (a word alone is an expression)."""
    lines = text.split("\n")
    for _ in range(MAX_TRIES):
        try:
            body = _tree("\n".join(lines)).body
        except SyntaxError as error:
            lines = lines[: max(0, min(error.lineno or 0, len(lines)) - 1)]
            continue
        while body and _does_nothing(body[-1]):
            lines = lines[: body.pop().lineno - 1]
        script = "\n".join(lines)
        return script if ".run(" in script else text
    return text


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Call)


def _tree(source: str) -> ast.Module:
    """Parse; whatever the parser can't take is a SyntaxError (NUL bytes, lone surrogates, nesting
    beyond its stack). Warnings about escapes such as "\\(" are the script's own business."""
    if len(source) > MAX_SCRIPT:
        raise SyntaxError(f"the script is longer than {MAX_SCRIPT} characters")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
            compile(tree, "script", "exec")  # also finds a `return` outside a function
    except (RecursionError, MemoryError, ValueError) as error:
        raise SyntaxError(f"{type(error).__name__}: {error}") from error
    return tree


# ---------------------------------------------------------------------------------------------
# Check and structure
# ---------------------------------------------------------------------------------------------


def check_script(source: str) -> None:
    r"""Raise DesignError if this script can't work. It is parsed, never run.

    >>> check_script("from workflow import AgentNode, Workflow\nimport torch")
    Traceback (most recent call last):
    design.DesignError: forbidden_import: torch: only the standard library and workflow
    """
    script = _Script(source)
    for module in script.modules:
        if module.split(".")[0] not in sys.stdlib_module_names and module not in MODULES:
            raise DesignError(
                "forbidden_import", f"{module}: only the standard library and workflow"
            )
    if script.unknown_names:
        raise DesignError("unknown_name", f"workflow has no {', '.join(script.unknown_names)}")
    used = {script.class_of(node) for node in ast.walk(script.tree)}
    for name in REFUSED:
        if name in used:
            raise DesignError("unsupported", f"{name}: use Workflow, and RouterNode for a choice")
    if "AgentNode" not in used:
        raise DesignError("no_agent", "no AgentNode is made")
    if "Workflow" not in used or not script.runs_something():
        raise DesignError("no_run", "no Workflow is run: call workflow.run(question)")


def structure_of(source: str) -> str:
    r"""The structure of a script: "single", "pipeline" (at least 2 agents in a chain), "ensemble",
    "reflection", "debate", "router", or "mixed" (nested, two kinds of node, or not to be told).
    Raises DesignError for a script that does not parse or has no node at all.

    >>> head = "from workflow import *\na, b = AgentNode('a', ''), AgentNode('b', '')\n"
    >>> structure_of(head + "Workflow().add_node(a).run(question)")
    'single'
    >>> structure_of(head + "Workflow().add_nodes([a, b]).run(question)")
    'pipeline'
    >>> structure_of(head + "Workflow().add_node(EnsembleNode('e', [a, b])).run(question)")
    'ensemble'
    >>> nested = "EnsembleNode('e', [a, ReflectionNode('r', b)])"
    >>> structure_of(head + f"Workflow().add_node({nested}).run(question)")
    'mixed'
    """
    script = _Script(source)
    slots = script.slots(script.tree.body)
    tops = script.nodes_in(expression for slot in slots for expression in slot)
    if not tops:  # nothing could be followed to a workflow: judge by what is made at all
        made = [c for c in ast.walk(script.tree) if script.node_class(c) in STRUCTURES]
        tops = slots = [c for c in made if script.node_class(c) != "AgentNode"] or made
    if not tops and not any(script.class_of(node) for node in ast.walk(script.tree)):
        raise DesignError("no_agent", "no node is made")
    classes = {script.node_class(call) for call in tops}
    if classes == {"AgentNode"}:
        return "single" if len(slots) == 1 else "pipeline"
    arguments = (value for top in tops for value in [*top.args, *(k.value for k in top.keywords)])
    inner = {script.node_class(call) for call in script.nodes_in(arguments)}
    plain = len(classes) == len(slots) == 1 and inner <= {"AgentNode"}
    return STRUCTURES.get(classes.pop(), "mixed") if plain else "mixed"


class _Script:
    """A script's syntax tree, and what the names in it may stand for.

    modules: what it imports. classes: name -> class of workflow.py. values: name (a variable's,
    an attribute's, a parameter's or a function's) -> the expressions it may hold or return.
    """

    def __init__(self, source: str) -> None:
        try:
            self.tree = _tree(source)
        except SyntaxError as error:
            line = f" (line {error.lineno})" if error.lineno else ""
            raise DesignError("syntax", f"{error.msg}{line}") from error
        self.modules: list[str] = []
        self.module_names: set[str] = set()
        self.unknown_names: list[str] = []
        self.classes: dict[str, str] = {}
        self.values: dict[str, list[ast.AST]] = {}
        self.functions: dict[str, ast.FunctionDef | ast.Lambda] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                self.functions |= {
                    t.id: node.value for t in node.targets if isinstance(t, ast.Name)
                }
        for node in ast.walk(self.tree):
            self._read_imports(node)
            self._read_values(node)
        self._spread_classes()

    def _read_imports(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.modules.append(alias.name)
                self.module_names.add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            self.modules.append(module)
            if module not in MODULES:
                return
            for alias in node.names:
                if alias.name in CLASSES:
                    self.classes[alias.asname or alias.name] = alias.name
                elif alias.name == "*":
                    self.classes |= {name: name for name in CLASSES}
                elif alias.name not in OTHER_NAMES:
                    self.unknown_names.append(alias.name)

    def _read_values(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            self._bind(node.target, node.iter)
        elif isinstance(node, ast.ClassDef):
            self.values.setdefault(node.name, []).extend(node.bases)
        elif isinstance(node, ast.FunctionDef):
            returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return | ast.Yield)]
            self.values.setdefault(node.name, []).extend(value for value in returns if value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("append", "extend", "insert", "add", "update"):
                for argument in node.args:
                    self._bind(node.func.value, argument)
        elif isinstance(node, ast.Call) and self._is_local(node):
            parameters = self.functions[node.func.id].args.args
            given = [(p.arg, a) for p, a in zip(parameters, node.args, strict=False)]
            for name, value in [*given, *((k.arg, k.value) for k in node.keywords if k.arg)]:
                self.values.setdefault(name, []).append(value)

    def _bind(self, target: ast.AST, value: ast.AST) -> None:
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        if isinstance(target, ast.Name | ast.Attribute):
            name = target.id if isinstance(target, ast.Name) else target.attr
            self.values.setdefault(name, []).append(value)
        elif isinstance(target, ast.Tuple | ast.List):
            paired = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            values = value.elts if paired else [value] * len(target.elts)
            for element, element_value in zip(target.elts, values, strict=True):
                self._bind(element, element_value)

    def _spread_classes(self) -> None:
        """A name that may hold a class, or derives from it, stands for that class as well."""
        users: dict[str, list[str]] = {}
        for name, values in self.values.items():
            for value in values:
                if isinstance(value, ast.Name):
                    users.setdefault(value.id, []).append(name)
                elif self.class_of(value):
                    self.classes.setdefault(name, self.class_of(value))
        todo = list(self.classes)
        while todo:
            name = todo.pop()
            new = [user for user in users.get(name, []) if user not in self.classes]
            self.classes |= dict.fromkeys(new, self.classes[name])
            todo += new

    def _is_local(self, call: ast.Call) -> bool:
        return isinstance(call.func, ast.Name) and call.func.id in self.functions

    def class_of(self, node: ast.AST) -> str | None:
        """The class of workflow.py that an expression names, if it names one, by any alias."""
        if isinstance(node, ast.Name):
            return self.classes.get(node.id)
        return node.attr if isinstance(node, ast.Attribute) and node.attr in CLASSES else None

    def node_class(self, node: ast.AST) -> str | None:
        """The class of the node that a call makes, if it makes one."""
        return self.class_of(node.func) if isinstance(node, ast.Call) else None

    def nodes_in(self, expressions: Iterable[ast.AST]) -> list[ast.Call]:
        """The calls that make the nodes which these expressions may hold; not what is in them."""
        found, seen, todo = [], set(), list(expressions)
        while todo:
            node = todo.pop()
            key = node.id if isinstance(node, ast.Name) else id(node)
            if key in seen:
                continue
            seen.add(key)
            if self.node_class(node):
                found.append(node)
            elif isinstance(node, ast.Name):
                todo += self.values.get(node.id, [])
            elif isinstance(node, ast.Attribute):
                todo += [node.value, *self.values.get(node.attr, [])]
            elif isinstance(node, ast.Call) and self._is_local(node):
                todo.append(node.func)
            else:
                todo += ast.iter_child_nodes(node)
        return found

    def slots(self, body: list[ast.stmt]) -> list[list[ast.AST]]:
        """The places of the chain that these statements fill, each with the expressions that may
        stand there. A loop fills each of its places twice, which stands for "many"; the branches
        of an `if` fill the same places."""
        found: list[list[ast.AST]] = []
        for statement in body:
            if isinstance(statement, ast.If):
                branches = [self.slots(branch) for branch in _branches(statement)]
                found += [sum(same, []) for same in zip_longest(*branches, fillvalue=[])]
                continue
            handlers = [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]
            parts = [getattr(part, b, []) for part in (statement, *handlers) for b in _BLOCKS]
            inner = [slot for part in parts for slot in self.slots(part)]
            if not any(parts):
                inner = self._slots_of_line(statement)
            loops = isinstance(statement, ast.For | ast.While)
            found += inner * 2 if loops and len(inner) == 1 else inner
        return found

    def _slots_of_line(self, statement: ast.stmt) -> list[list[ast.AST]]:
        found: list[list[ast.AST]] = []
        for call in ast.walk(statement):
            name = call.func.attr if isinstance(getattr(call, "func", None), ast.Attribute) else ""
            arguments = [*call.args, *(k.value for k in call.keywords)] if name else []
            if name == "add_node":
                found += [[argument] for argument in arguments[:1]]
            elif name == "add_nodes":
                for argument in arguments[:1]:
                    found += [[element] for element in self._elements(argument)]
        loops = isinstance(getattr(statement, "value", None), ast.ListComp)
        return found * 2 if loops and len(found) == 1 else found

    def _elements(self, expression: ast.AST) -> list[ast.AST]:
        """The elements of a list that is written out; of any other list, twice the list."""
        if isinstance(expression, ast.Name) and len(self.values.get(expression.id, [])) == 1:
            expression = self.values[expression.id][0]
        if isinstance(expression, ast.List | ast.Tuple):
            if not any(isinstance(element, ast.Starred) for element in expression.elts):
                return expression.elts
        return [expression, expression]

    def runs_something(self) -> bool:
        """Is there a `.run` on anything but an imported module?"""
        modules = self.module_names - set(self.values)
        return any(
            isinstance(node, ast.Attribute)
            and node.attr == "run"
            and not (isinstance(node.value, ast.Name) and node.value.id in modules)
            for node in ast.walk(self.tree)
        )


def _branches(statement: ast.If) -> Iterator[list[ast.stmt]]:
    """The bodies of if, elif, ... and else (without recursion: a chain may be very long)."""
    yield statement.body
    while len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If):
        statement = statement.orelse[0]
        yield statement.body
    yield statement.orelse


# ---------------------------------------------------------------------------------------------
# Fixed scripts
# ---------------------------------------------------------------------------------------------

_FORM_SCRIPT = r"""
FORM = (
    " If it asks for a result, end with the result in \\boxed{}."
    " If it asks for a program, end with the complete Python program in one fenced code block."
)


def agent(name, prompt):
    return AgentNode(name=name, system_prompt=prompt + FORM)


workflow = Workflow(name="team")
"""

_RUN_SCRIPT = """result = workflow.run(question)
print(result.content)
"""

_PARTS = {
    "single": """
workflow.add_node(agent("solver", "Solve the task step by step and check the result."))
""",
    "pipeline": """
planner = AgentNode(
    name="planner",
    system_prompt="Plan how to solve the task: the method, its steps, and what is easily missed."
    " Don't carry the plan out.",
)
solver = agent("solver", "Carry out the plan you are given, step by step.")
checker = agent("checker", "Check the solution you are given and mend it. Give it whole.")
workflow.add_nodes([planner, solver, checker])
""",
    "ensemble": """
solvers = [
    agent("forward", "Solve the task step by step from what is given."),
    agent("backward", "Solve the task. Start from what the answer has to satisfy."),
    agent("cases", "Solve the task. Go through its cases, and test small ones by hand."),
]
judge = agent("judge", "The solutions differ. Find the errors, then give the right one whole.")
workflow.add_node(EnsembleNode(name="vote", agents=solvers, consensus_agent=judge))
""",
    "reflection": """
solver = agent("solver", "Solve the task step by step. If a critic found a fault, mend it.")
critic = AgentNode(
    name="critic",
    system_prompt="Check the answer against every condition of the task, work it out again where"
    " you doubt it, and try the examples. Name each fault. End with the line VERDICT: CORRECT or"
    " the line VERDICT: INCORRECT.",
)
workflow.add_node(ReflectionNode(name="review", agent=solver, critic_agent=critic))
""",
    "debate": """
debaters = [
    agent("first", "Solve the task step by step. Give up your view only for a better argument."),
    agent("second", "Solve the task in an unusual way. Attack the weakest step of the others."),
]
judge = agent("judge", "Weigh the arguments of the debate, then give the right solution whole.")
workflow.add_node(DebateNode(name="debate", debaters=debaters, judge=judge, num_rounds=2))
""",
    "router": """
SIGNS = {"input", "output", "print", "program", "stdin", "def", "string", "array", "return"}


def kind_of(question):
    words = {word.strip("-:.,;`*#()") for word in question.lower().split()}
    return "code" if len(words & SIGNS) >= 2 else "math"


routes = {
    "math": agent("mathematician", "Solve the task step by step and check the result."),
    "code": agent("programmer", "Find a method that is fast enough, then write the program."),
}
workflow.add_node(
    RouterNode(name="choice", routes=routes, routing_func=kind_of, default_route="math")
)
""",
}


def _script(structure: str) -> str:
    used = [name for name, makes in STRUCTURES.items() if makes == structure != "single"]
    imports = ", ".join(["AgentNode", *used, "Workflow"])
    return f"from workflow import {imports}\n{_FORM_SCRIPT}{_PARTS[structure]}{_RUN_SCRIPT}"


# One fixed script a structure: few-shot examples, baselines and the oracle table. They work for
# both kinds of task.
SCRIPTS: dict[str, str] = {structure: _script(structure) for structure in _PARTS}


if __name__ == "__main__":
    for message in designer_messages("What is 6 * 7?", "math"):
        print(f"--- {message['role']}\n{message['content']}\n")
    for script in SCRIPTS.values():
        print(f"--- {structure_of(script)}\n{script}")
