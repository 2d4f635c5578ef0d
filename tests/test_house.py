"""The house rules as tests: who imports whom, leaves alone, doctests, the README's commands."""

import ast
import doctest
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# file -> the project files that it may import. Arrows never point back.
IMPORTS = {
    "sandbox": set(),
    "workflow": set(),
    "design": set(),
    "advantage": set(),
    "grpo": set(),
    "engine": set(),
    "data": set(),
    "reward": {"sandbox"},
    "execute": {"design", "sandbox"},
    "toy": {"data", "design", "engine"},
    "sft": {"data", "design", "execute", "engine", "grpo", "reward", "sandbox", "toy"},
    "evaluate": {"data", "design", "execute", "engine", "reward", "sandbox", "toy"},
    "demo": {"data", "design", "engine", "execute", "evaluate", "reward", "sandbox", "toy"},
    "train": {
        *("sandbox", "workflow", "design", "advantage", "grpo", "engine", "data"),
        *("reward", "execute", "toy", "sft", "evaluate"),
    },
}
FILES = sorted(path.stem for path in ROOT.glob("*.py"))
LEAVES = sorted(name for name in FILES if not IMPORTS.get(name, {"?"}))


def imported(name: str) -> set[str]:
    """Project files that this file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return (found & set(FILES)) - {name}


@pytest.mark.parametrize("name", FILES)
def test_import_table(name):
    assert name in IMPORTS, f"{name}.py is not in the table"
    assert imported(name) <= IMPORTS[name]


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_can_be_copied_alone(name, tmp_path):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_leaves_are_those_of_the_design():
    want = "advantage data design engine grpo sandbox workflow"
    assert LEAVES == want.split()


@pytest.mark.parametrize("name", FILES)
def test_doctests(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert (result.attempted > 0) == (">>> " in (ROOT / f"{name}.py").read_text())


def test_every_component_explains_itself_first():
    for name in FILES:
        text = ast.get_docstring(ast.parse((ROOT / f"{name}.py").read_text()))
        assert text and len(text.splitlines()) >= 8, name


def test_every_trainer_bug_has_its_test():
    """tests/trainer_bugs.md lists them by number; what it names must be there."""
    rows = re.findall(
        r"^\| (\d+) \|.*\|(.*)\|$", (ROOT / "tests/trainer_bugs.md").read_text(), re.M
    )
    assert [int(number) for number, _ in rows] == list(range(1, 51))
    for number, where in rows:
        named = re.findall(r"(test_\w+)\.py::(test_\w+)", where)
        assert named or "can't happen" in where, number
        for file, name in named:
            assert f"def {name}(" in (ROOT / "tests" / f"{file}.py").read_text(), (number, name)


# --- the README


def readme_commands() -> list[str]:
    """Every line of a shell block of the README."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_readme_names_only_files_that_exist():
    text = (ROOT / "README.md").read_text()
    for path in re.findall(r"\]\(([\w./-]+)\)", text):
        assert (ROOT / path).exists(), path
    for name in re.findall(r"`(\w+\.py)`", text):
        assert (ROOT / name).exists() or (ROOT / "tests" / name).exists(), name


def test_readme_commands_have_only_flags_that_exist(capsys):
    """Each `python FILE ...` of the README is accepted by that file's own argument parser."""
    helps = {}
    seen = 0
    for line in readme_commands():
        for part in re.split(r"&&|;", line):
            words = part.split()
            if "python" not in words and "torchrun" not in words:
                continue
            script = next(
                (w for w in words if re.fullmatch(r"(train|evaluate|demo|sft)\.py", w)), None
            )
            if script is None:
                continue
            if script not in helps:
                with pytest.raises(SystemExit):
                    module = importlib.import_module(script.removesuffix(".py"))
                    module.main([*(["collect"] if script == "sft.py" else []), "--help"])
                helps[script] = capsys.readouterr().out
            known = re.findall(r"--[\w-]+", helps[script])
            for flag in re.findall(r"(?<=\s)--[\w-]+", part.split(script, 1)[1]):
                assert flag in known, f"{line}: {flag}"
            seen += 1
    text = (ROOT / "README.md").read_text()
    written = re.findall(r"^(?:python|torchrun) .*?\b(?:train|evaluate|demo|sft)\.py", text, re.M)
    assert seen >= len(written) > 25  # none was overlooked
