"""reward.py, code: extraction, verdicts test by test, batches, and HumanEval's form."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

import reward
import sandbox
from reward import code_reward, extract_code, run_asserts, score, score_batch


@pytest.fixture(scope="module", autouse=True)
def best_isolation():
    sandbox.configure("best")
    yield
    sandbox.configure()


def as_tests(*pairs, fn_name=None):
    inputs, outputs = zip(*pairs, strict=True) if pairs else ([], [])
    return {"inputs": list(inputs), "outputs": list(outputs), "fn_name": fn_name}


def judge(program, *pairs, fn_name=None, **limits):
    return code_reward(program, as_tests(*pairs, fn_name=fn_name), **limits)


# ------------------------------------------------------------------ the program in a response

EXTRACTED = {
    "def f():\n    return 1\n```": "def f():\n    return 1",  # an unpaired closing fence
    "```python\nprint(1)\n": "print(1)",  # cut off
    "```python\nprint(1)\n```\nOutput:\n```\n1\n```": "print(1)",
    "The answer is 1": "",
    '```python\ns = "a```b"\nprint(s)\n```': 's = "a```b"\nprint(s)',
    "```Python3\r\nprint(1)\r\n```": "print(1)",
    "```py\nprint(1)\n```": "print(1)",
    "``` python\nprint(1)\n``` \n": "print(1)",
    "```python title=a.py\nprint(1)\n```": "print(1)",
    "```{.python}\nprint(1)\n```": "print(1)",
    "~~~python\nprint(1)\n~~~": "print(1)",
    "First\n```python\nprint(1)\n```\nbetter\n```python\nprint(2)\n```\nDone.": "print(2)",
    "```\nprint(1)\n```": "print(1)",
    "```python\nprint(1)\n```\n```cpp\nint main() {}\n```": "print(1)",
    "```cpp\nint main() {}\n```": "",
    "```python\nprint(1)\n```\n```python\nprint(2)": "print(2)",
    "   ```python\n   if 1:\n       print(1)\n   ```": "if 1:\n    print(1)",
    "````python\ns = '''\n```\n'''\n````": "s = '''\n```\n'''",
    "<think>```python\nprint(0)\n```</think>\n```python\nprint(1)\n```": "print(1)",
    "<solution>\n```python\nprint(1)\n```\n</solution> like\n```python\nprint(2)\n```": "print(1)",
    "<solution>\nprint(1)\n</solution>": "print(1)",
    "```python\n\n```": "",
    "": "",
}


def test_extract_code():
    assert {text: extract_code(text) for text in EXTRACTED} == EXTRACTED


def test_extract_code_takes_any_length():
    start = time.process_time()
    assert extract_code("```\n" * 50_000) == ""
    assert extract_code("`" * 300_000) == ""
    assert time.process_time() - start < 60  # CPU seconds; what is quadratic takes far more


# ------------------------------------------------------------------ verdicts


def test_one_verdict_a_test_and_the_stop_at_the_first_failure():
    program = """
n = int(input())
if n == 1: print("wrong")
elif n == 2: raise SystemExit(3)
elif n == 3:
    while True: pass
else: print(n)
"""
    pairs = [(f"{n}\n", f"{n}\n") for n in range(5)]
    verdict = judge(program, *pairs, cpu_s=1.0, wall_s=10.0)
    assert verdict.per_test == ["ok", "wrong", "error", "timeout", "ok"]
    assert (verdict.passed, verdict.total, verdict.ok) == (2, 5, False)
    stopped = judge(program, *pairs, stop_early=True)
    assert stopped.per_test == ["ok", "wrong"] and (stopped.passed, stopped.total) == (1, 5)


def test_no_tests_is_no_pass():
    assert judge("print(1)").ok is False
    assert score(code_task(as_tests()), "```python\nprint(1)\n```", code="fraction") == 0.0


RIGHT = {
    "buffers": ("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", "a\n", "a\n"),
    "buffer lines": (
        "import sys\nr=sys.stdin.buffer.readline\nprint(sum(int(r()) for _ in range(int(r()))))",
        "2\n5\n7\n",
        "12\n",
    ),
    "stdin iterates": ("import sys\nprint(sum(int(l) for l in sys.stdin))", "5\n7\n", "12\n"),
    "no last newline": ('import sys\nsys.stdout.write("1")', "x", "1"),
    "stdin not read": ("print('ok')", "1 " * 200_000, "ok\n"),
    "UTF-8": ("print('\u00e9')", "x\n", "\u00e9\n"),
    "main guard": (
        "def main():\n    print(int(input())*2)\nif __name__ == '__main__':\n    main()\nx=1",
        "3\n",
        "6\n",
    ),
    "blanks and CRLF": ("print('1 2  \\r\\n3\\n\\n')", "", "1 2\n3\n"),
    "float": ("print(0.1+0.2)", "", "0.3"),
    "whole number for a float": ("print(2)", "", "2.0"),
}
WRONG = {
    "integers have no tolerance": ("print(50000000000000000)", "", "50000000000000001\n"),
    "also against a float": ("print(1000000.5)", "", "1000000\n"),
    "a set of words": ("print('Christmas Eve')", "", "Christmas Eve Eve Eve\n"),
    "lines are lines": ("print(1, 2)", "", "1\n2\n"),
    "underscore": ("print('1_000')", "", "1000\n"),
    "underscore in a float": ("print('1_0.5')", "", "10.5\n"),
    "other digits": ("print('\\u0661\\u0660')", "", "10\n"),
    "nan": ("print('nan')", "", "1.5\n"),
    "infinite": ("print('1e999')", "", "1e998\n"),
    "no output": ("import os\nos._exit(0)", "", "1\n"),
    "exit before the end": ("exit(0)\nprint(1)", "", "1\n"),
    "no frame holds the answer": (
        "import sys\nf=sys._getframe()\nwhile f:\n    print(f.f_locals.get('expected'))\n"
        "    f=f.f_back",
        "",
        "42\n",
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    program, stdin, expected = RIGHT[name]
    assert judge(program, (stdin, expected)).per_test == ["ok"]


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    program, stdin, expected = WRONG[name]
    assert judge(program, (stdin, expected)).per_test == ["wrong"]


def test_crashes_are_errors_and_the_next_program_runs():
    programs = [
        "import ctypes\nctypes.string_at(0)",
        "x=bytearray(64*10**9)\nprint(1)",
        'import subprocess,sys\nsubprocess.Popen([sys.executable,"-c","1"])\nprint(1)',
        "def f(:",
        "print(1)\nraise SystemExit(1)",  # right output, but it failed
        "",
    ]
    assert [judge(p, ("", "1\n")).per_test[0] for p in programs] == ["error"] * 5 + ["wrong"]
    assert judge("print(1)", ("", "1\n")).ok


def test_limits_are_per_test_and_all_tests_run():
    """Eight tests of 0.3 s under a wall limit of 2 s; a program that fails on the twelfth only."""
    sleeper = "import time\ntime.sleep(0.3)\nprint(input())"
    pairs = [(f"{n}\n", f"{n}\n") for n in range(8)]
    assert judge(sleeper, *pairs, wall_s=10.0).ok
    pairs = [(f"{n}\n", f"{n}\n") for n in range(12)]
    verdict = judge("n=int(input())\nprint(n if n<11 else 0)", *pairs)
    assert (verdict.passed, verdict.total, verdict.ok) == (11, 12, False)


def test_standard_input_programs_run_as_written():
    """A policy: names without an import are an error there; only call mode has a prelude."""
    assert judge("print(Counter())", ("", "Counter()")).per_test == ["error"]


# ------------------------------------------------------------------ call mode

ADD = (("1\n2", "3"),)
CALLS = {
    "method": (
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
        ADD,
        "ok",
    ),
    "typing without import": ("def add(a: List[int], b: Optional[int]): return a + b", ADD, "ok"),
    "collections too": ("def add(a, b): return sum(Counter({0: a, 1: b}).values())", ADD, "ok"),
    "floats in a list": (
        "def add(a, ks): return [k * 3 for k in ks]",
        (("1\n[0.1, 0.2]", "[0.3, 0.6]"),),
        "ok",
    ),
    "nested tuples": (
        "def add(n): return [(i, i + 1) for i in range(n)]",
        (("2", "[[0, 1], [1, 2]]"),),
        "ok",
    ),
    "the argument changed": (
        "def add(a):\n    a.append(3)\n    return a",
        (("[1, 2]", "[1, 2, 3]"),),
        "ok",
    ),
    "a whole float": ("def add(a, b): return float(a + b)", ADD, "ok"),
    "text": ("def add(a): return a + '\u00e9'", (('"x"', '"x\u00e9"'),), "ok"),
    "mapping": ("def add(a): return {1: a}", (("2", '{"1": 2}'),), "ok"),
    "null": ("def add(a): pass", (("2", "null"),), "ok"),
    "printed only": ("def add(a, b): print(a + b)", ADD, "wrong"),
    "bool is no number": ("def add(a): return True", (("1", "1"),), "wrong"),
    "number is no bool": ("def add(a): return 1", (("1", "true"),), "wrong"),
    "NaN": ("def add(a): return float('nan')", (("1", "1.5"),), "wrong"),
    "list of another length": ("def add(a): return [1]", (("1", "[1, 1]"),), "wrong"),
    "too long for int()": ("def add(a): return 10 ** 5000", (("1", "1"),), "wrong"),
    "equal to everything": (
        "class E(int):\n    def __eq__(self, other): return True\ndef add(a, b): return E(5)",
        ADD,
        "wrong",
    ),
    "no such function": ("def plus(a, b): return a + b", ADD, "error"),
    "not JSON": ("def add(a, b): return {1, 2}", ADD, "error"),
    "exit": ("def add(a, b): raise SystemExit(0)", ADD, "wrong"),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_mode(name):
    program, pairs, expected = CALLS[name]
    assert judge(program, *pairs, fn_name="add").per_test == [expected]


def test_broken_tests_raise():
    with pytest.raises(ValueError, match="1 inputs but 2 outputs"):
        code_reward("print(1)", {"inputs": [""], "outputs": ["1", "2"], "fn_name": None})
    with pytest.raises(ValueError):
        judge("def add(a): return 1", ("1", "not JSON"), fn_name="add")


# ------------------------------------------------------------------ HumanEval's form

HUMANEVAL = [
    ("def twice(x):\n", "    return 2 * x\n", "    assert candidate(2) == 4\n", "twice"),
    (
        "from typing import List\n\n\ndef longest(words: List[str]) -> str:\n"
        '    """The first longest word. >>> longest(["a", "bc"]) is "bc"."""\n',
        "    return max(words, key=len)\n",
        "    assert candidate(['a', 'bc', 'de']) == 'bc'\n    assert candidate(['x']) == 'x'\n",
        "longest",
    ),
    (
        "import math\n\n\ndef area(r):\n",
        "    return math.pi * r * r\n",
        "    assert abs(candidate(1.0) - 3.14159) < 1e-4\n",
        "area",
    ),
]


@pytest.mark.parametrize("prompt, body, asserts, name", HUMANEVAL)
def test_run_asserts(prompt, body, asserts, name):
    check = f"METADATA = {{}}\n\n\ndef check(candidate):\n{asserts}\n\ncheck({name})"
    assert run_asserts(prompt + body, check)
    assert not run_asserts(prompt + "    return None\n", check)
    assert not run_asserts(prompt + "    raise SystemExit(0)\n", check)
    assert not run_asserts(prompt + body + "\nimport os\nos._exit(0)", check)
    assert not run_asserts(prompt + "    while True: pass\n", check, cpu_s=1.0, wall_s=5.0)


# ------------------------------------------------------------------ score and batches


def code_task(tests):
    return SimpleNamespace(id="c", kind="code", question="", answer=None, tests=tests)


def test_score_of_a_code_task():
    task = code_task(as_tests(("1\n", "1\n"), ("2\n", "2\n"), ("3\n", "3\n"), ("4\n", "5\n")))
    response = "Like so:\n```python\nprint(input())\n```"
    assert score(task, response) == 0.0
    assert score(task, response, code="fraction") == 0.75
    task.tests["outputs"][3] = "4\n"
    assert score(task, response) == score(task, response, code="fraction") == 1.0
    assert score(task, "print(input())") == 0.0  # no block
    with pytest.raises(ValueError, match="'all' or 'fraction'"):
        score(task, response, code="some")
    with pytest.raises(ValueError, match="run_asserts"):
        score(code_task({"check": "assert True"}), response)


def test_a_batch_is_in_order_and_bounded(monkeypatch):
    live, most, lock = 0, 0, threading.Lock()
    run = sandbox.run_program

    def counted(*args, **kw):
        nonlocal live, most
        with lock:
            live += 1
            most = max(most, live)
        result = run(*args, **kw)
        with lock:
            live -= 1
        return result

    monkeypatch.setattr(sandbox, "run_program", counted)
    tasks = [code_task(as_tests((f"{n}\n", f"{n}\n"))) for n in range(12)]
    program = "```python\nn = int(input())\nprint(n if n % 3 else 'no')\n```"
    rewards = score_batch([(task, program) for task in tasks], workers=3)
    assert rewards == [float(n % 3 > 0) for n in range(12)] and 1 < most <= 3
    assert score_batch([]) == []


def test_a_batch_survives_the_death_of_its_fork_server():
    tasks = [code_task(as_tests((f"{n}\n", f"{n}\n"))) for n in range(6)]
    slow = "```python\nimport time\ntime.sleep(0.2)\nprint(input())\n```"
    assert score(tasks[0], slow) == 1.0
    server = sandbox._get_server().process
    killer = threading.Timer(0.3, os.kill, (server.pid, signal.SIGKILL))
    killer.start()
    assert score_batch([(task, slow) for task in tasks], workers=2) == [1.0] * 6
    killer.join()
    assert server.wait(5) == -signal.SIGKILL


def test_math_and_code_in_one_batch():
    task = SimpleNamespace(id="m", kind="math", question="", answer="7", tests=None)
    pairs = [(task, r"\boxed{7}"), (code_task(as_tests(("", "1"))), "```python\nprint(1)\n```")]
    assert score_batch(pairs) == [1.0, 1.0]
    assert reward.math_equal("7", "7")
