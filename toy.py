"""The embedded default: a world so small that a laptop learns to design and to execute in it.

The idea. RL does not teach facts, it chooses among behaviours that the model already has. So the
teacher of the cold start shows the skills (sums and products on a clock of seven hours, checking a
program against an example), works carefully in 60 % of its replies and carelessly in the others,
and draws the four structures with equal chance. What is left to RL is choice: which structure for
which task (designer), careful or careless (executor).

All arithmetic is modulo 7, from left to right: `3*5=1`, `4+6=3`. Three kinds of task, and one
natural limit: a reply of an agent has at most `EXECUTOR_TOKENS` = 24 tokens.

    kind      question        worked form
    product   2*3*4*5         2*3=6;6*4=3;3*5=1;\\boxed{1}       22 tokens, it just fits
    sum       1+2+4+5+6       1+2=3;3+4=0;...                  28 tokens, no single reply holds it
    program   f(3,4,2,1)=1    18 tokens for each of 3 programs; what is asked for takes 5

The best structures differ by nature. `sum`: a pipeline, since its first agent can hand on `5+6`.
`program`: reflection, since one check fits into a reply, and the search does not. `product`: an
ensemble while the executor slips, since slips are independent and a vote removes them; once RL has
taught it not to slip, a single agent does as well for a third of the calls.

A worked example of the last kind. On (2,3,4,5) the three programs a+b+c+d, a*b+c+d, a*b*c+d give
0, 1 and 1: two agree, so this is never asked. On (3,4,2,1) they give 3, 1 and 4: `f(3,4,2,1)=1`
can be asked, its program is the second, and unit tests on other numbers judge the reply.

No structure is preferred by hand: rewards are the verifier's, and the limit is a number of tokens.
The cold start keeps correct traces only, so a structure that works more often is seen more often:
that is all the head start the designer gets.

The tokenizer: one token a byte, and one for each whole line that the teacher writes again and
again. So a script of four lines is six tokens and an end; the model still writes
it token by token, and can still write it wrong.

    python toy.py            # prints tasks, the teacher's replies and token counts
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

from data import Task
from engine import ScriptedEngine

KINDS = ("product", "sum", "program")
# The teacher's tasks: more of the kinds that leave fewer correct traces.
COLD_START_KINDS = ("product", "sum", "program", "sum", "program", "sum", "program")
MODULUS = 7
EXECUTOR_TOKENS = 24
DESIGNER_TOKENS = 16
MAX_CONTEXT = 2048
CARELESS = 0.4  # share of the teacher's replies without working
LUCK = 0.15  # a careless reply knows the result this often; else it is one of 7 at random
SLIP = 0.03  # share of the teacher's multiplications that are off, in tasks of kind `product`

DESIGNER_PROMPT = "Design a multi-agent system.\n[user]\n{question}"
_IMPORTS = 'from workflow import AgentNode, {}Workflow\nflow = Workflow(name="toy")\n'
_RUN = "print(flow.run(question).content)\n"
SCRIPTS = {
    "single": _IMPORTS.format("")
    + 'flow.add_node(AgentNode(name="solver", system_prompt="Solve."))\n'
    + _RUN,
    "pipeline": _IMPORTS.format("")
    + 'flow.add_node(AgentNode(name="first", system_prompt="Solve."))\n'
    + 'flow.add_node(AgentNode(name="second", system_prompt="Solve."))\n'
    + _RUN,
    "ensemble": _IMPORTS.format("EnsembleNode, ")
    + 'solvers = [AgentNode(name="solver", system_prompt="Solve.") for _ in range(3)]\n'
    + 'flow.add_node(EnsembleNode(name="vote", agents=solvers, strategy="majority_vote"))\n'
    + _RUN,
    "reflection": _IMPORTS.format("ReflectionNode, ")
    + 'solver = AgentNode(name="solver", system_prompt="Solve.")\n'
    + 'critic = AgentNode(name="critic", system_prompt="Check.")\n'
    + 'flow.add_node(ReflectionNode(name="loop", agent=solver, critic_agent=critic, '
    + "num_iterations=2, include_history=True))\n"
    + _RUN,
}
FORMULAS = ("a+b+c+d", "a*b+c+d", "a*b*c+d")
PROGRAMS = {f: f"```python\ndef f(a, b, c, d):\n    return ({f}) % 7\n```" for f in FORMULAS}


def value(expression: str) -> int:
    """A chain of digits and operators, read from left to right, modulo 7.

    >>> value("2*3*4*5"), value("1+2+4+5+6"), value("2*3+4")
    (1, 4, 3)
    """
    total = int(expression[0])
    for operator, digit in zip(expression[1::2], expression[2::2], strict=True):
        total = total * int(digit) if operator == "*" else total + int(digit)
    return total % MODULUS


def fill(formula: str, numbers: str) -> str:
    """Digits into a formula.

    >>> fill("a*b+c+d", "2345")
    '2*3+4+5'
    """
    return formula.translate(str.maketrans("abcd", numbers))


def reduce_once(expression: str) -> tuple[str, str]:
    """One worked step and the expression that is left.

    >>> reduce_once("5+3+2+6")
    ('5+3=1;', '1+2+6')
    """
    result = value(expression[:3])
    return f"{expression[:3]}={result};", f"{result}{expression[3:]}"


def make_tasks(n: int, seed: object, *, kinds=KINDS, held_out: bool = False) -> list[Task]:
    """n tasks, the kinds in turn; training and held-out tasks never share a question.

    seed: anything that prints. A question belongs to the held-out part when its own hash says so
    (one in five), so the two parts are disjoint for every pair of seeds. Held-out questions don't
    repeat, as long as new ones turn up (512 always do); training questions may.
    """
    rng = random.Random(f"{seed} {held_out}")
    tasks: list[Task] = []
    asked: set[str] = set()
    repeats = 0
    while len(tasks) < n:
        task = _draw_task(kinds[len(tasks) % len(kinds)], rng)
        if (random.Random(task.question).random() < 0.2) != held_out:
            continue
        if held_out and task.question in asked and repeats < 100:
            repeats += 1
            continue
        asked.add(task.question)
        repeats = 0
        tasks.append(replace(task, id=f"{task.source}:{len(tasks)}:{task.question}"))
    return tasks


def held_out_tasks(n: int, seed: int) -> list[Task]:
    """The tasks that a run of this seed is measured on, by train.py, evaluate.py and demo.py."""
    return make_tasks(n, f"{seed} eval", held_out=True)


def _draw_task(kind: str, rng: random.Random) -> Task:
    def digits(n):
        return "".join(str(rng.randint(1, MODULUS - 1)) for _ in range(n))

    if kind == "product":
        question = "*".join(digits(4))
        return Task("", "math", question, answer=str(value(question)), source=kind)
    if kind == "sum":
        question = "+".join(digits(5))
        return Task("", "math", question, answer=str(value(question)), source=kind)
    while True:  # only examples that a single program explains
        numbers, formula = digits(4), rng.choice(FORMULAS)
        if len({value(fill(f, numbers)) for f in FORMULAS}) == len(FORMULAS):
            break
    hidden = []
    while len(hidden) < 2:  # each hidden test tells the programs apart
        other = digits(4)
        if other != numbers and len({value(fill(f, other)) for f in FORMULAS}) == len(FORMULAS):
            hidden.append(other)
    tests = {
        "inputs": ["\n".join(h) for h in hidden],
        "outputs": [str(value(fill(formula, h))) for h in hidden],
        "fn_name": "f",
    }
    question = f"f({','.join(numbers)})={value(fill(formula, numbers))}"
    return Task("", "code", question, tests=tests, source=kind)


# --- the noisy programmatic teacher ---
_CHAIN = re.compile(r"(?<![\d=+*])\d(?:[+*]\d)+(?![\d=+*])")
_EXAMPLE = re.compile(r"f\((\d),(\d),(\d),(\d)\)=(\d)")


def teacher_reply(key, messages: list[dict], seed: int) -> str:
    """What the teacher says to these messages: sometimes careful, sometimes not, sometimes wrong.

    It sees what an agent sees and no more: it looks for the question, the formulas that were
    already proposed, and the expression that is left, in the text of its prompt.
    """
    rng = random.Random(seed)
    system, text = messages[0]["content"], messages[-1]["content"]
    careful = rng.random() >= CARELESS
    if system.startswith("Design"):
        return f"```python\n{SCRIPTS[rng.choice(sorted(SCRIPTS))]}```"
    if example := _EXAMPLE.search(text):
        return _program_reply(system, text, example.groups(), careful, rng)
    return _chain_reply(system, text, careful, rng)


def _program_reply(system, text, example, careful, rng) -> str:
    numbers, target = "".join(example[:4]), example[4]
    tried = re.findall(r"return \((.*?)\)", text)
    if system == "Check.":
        if not careful:
            return "CORRECT"
        worked, result = _steps(fill(tried[-1], numbers), rng)
        verdict = "CORRECT" if result == target else "INCORRECT"
        return f"{worked}{result}?{target};{verdict}"
    untried = [f for f in FORMULAS if f not in tried]
    return PROGRAMS[rng.choice(untried if careful and untried else FORMULAS)]


def _chain_reply(system, text, careful, rng) -> str:
    chain, boxed = _CHAIN.search(text).group(), re.findall(r"\\boxed\{(\d)\}", text)
    if system == "Check.":
        return "CORRECT"  # checking a chain would be the same work as finding it: not done
    handed_on = text.partition("[first]")[2]
    if handed_on and boxed:
        return rf"\boxed{{{boxed[-1]}}}"  # the agent before has finished it
    if not careful:
        right = rng.random() < LUCK
        return rf"\boxed{{{value(chain) if right else rng.randrange(MODULUS)}}}"
    worked, left = _steps(_CHAIN.findall(handed_on)[-1] if handed_on else chain, rng)
    return worked + (left if len(left) > 1 else rf"\boxed{{{left}}}")


def _steps(chain: str, rng: random.Random) -> tuple[str, str]:
    worked = ""
    while len(chain) > 1 and len(worked) < 18:
        step, left = reduce_once(chain)
        if "*" in chain and "+" not in chain and rng.random() < SLIP:
            wrong = str((int(step[-2]) + rng.randrange(1, MODULUS)) % MODULUS)
            step, left = step[:-2] + wrong + ";", wrong + left[1:]
        worked, chain = worked + step, left
    return worked, chain


def teacher() -> ScriptedEngine:
    """The teacher behind the same two calls as every engine."""
    return ScriptedEngine(teacher_reply)


# --- tokenizer and model ---
def make_tokenizer(texts: list[str]):
    """Bytes, and one token for each line without arithmetic that occurs in at least 20 texts.

    texts: prompts and replies of the cold start's traces. Lines of the known scripts and programs
    are always tokens. Returns a transformers tokenizer; its chat template has a token a turn.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", bos_token=None
    )
    counts: dict[str, int] = {}
    for text in texts:
        for line in set(text.splitlines(keepends=True)):
            counts[line] = counts.get(line, 0) + 1
    arithmetic = re.compile(r"\d[+*=;?]|[+*=(,]\d|boxed")
    lines = {line for line, n in counts.items() if n >= 20 and not arithmetic.search(line)}
    known = [*SCRIPTS.values(), *PROGRAMS.values()]
    lines |= {line for text in known for line in text.splitlines(keepends=True)}
    lines |= {"\\boxed{", "CORRECT", "INCORRECT"}
    tokenizer.add_tokens(["<|system|>", "<|user|>", "<|assistant|>"], special_tokens=True)
    tokenizer.add_tokens([AddedToken(x, normalized=False) for x in sorted(lines) if len(x) > 1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer


def make_model(tokenizer, seed: int = 0):
    """A Qwen3 of 0.43 million parameters with random weights, the same for the same seed."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.1,  # 1 / sqrt(hidden size); the default 0.02 is for large models
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
