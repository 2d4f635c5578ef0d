"""data.py: every trap of the raw formats on rows made here, the payload's fences, and the mix.

The rows have the shape of the benchmarks' rows; none of them is one.
"""

import base64
import io
import json
import pickle
import random
import subprocess
import sys
import zlib
from datetime import datetime
from pathlib import Path

import pytest

import data
from data import (
    BadRow,
    DataError,
    Task,
    golds,
    load,
    load_mix,
    parse_mix,
    read_ids,
    step_tasks,
)

ROOT = Path(data.__file__).parent


def payload(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def cases(testtype: str, *pairs: tuple) -> list[dict]:
    return [{"input": i, "output": o, "testtype": testtype} for i, o in pairs]


APPS = {
    "problem_id": 7,
    "question": "Print n doubled.",
    "solutions": json.dumps(["print(2 * int(input()))", "n = int(input())\nprint(n + n)"]),
    "input_output": json.dumps({"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"]}),
    "difficulty": "introductory",
    "url": "",
    "starter_code": "",
}
CONTEST = {
    "name": "1_A. Halves",
    "description": "Print half of n.",
    "public_tests": {"input": ["2\n"], "output": ["1\n"]},
    "private_tests": {"input": ["4\n", "6\n", "8\n"], "output": ["2 \n", "3\n", "4\n"]},
    "generated_tests": {"input": [f"{2 * i}\n" for i in range(5, 10)], "output": list("56789")},
    "solutions": {"language": [1, 3, 2], "solution": ["print input()/2", "py3", "int main"]},
    "time_limit": None,
    "input_file": "",
    "output_file": "",
}
LCB = {
    "question_title": "sum",
    "question_content": "Return a + b.",
    "question_id": "77",
    "contest_date": "2025-02-01T00:00:00",
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "public_test_cases": json.dumps(cases("functional", ("1\n2", "3"))),
    "private_test_cases": payload(json.dumps(cases("functional", ("4\n5", "9")))),
    "metadata": json.dumps({"func_name": "add"}),
}
HUMAN = {
    "task_id": "Human/0",
    "prompt": 'def half(n):\n    return n // 2\n\n\ndef quarter(n):\n    """ A quarter. """\n',
    "entry_point": "quarter",
    "canonical_solution": "    return half(half(n))\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(8) == half(4)\n",
}
OLYMPIAD = {
    "id": 5,
    "context": None,
    "question": "How far?",
    "final_answer": ["$\\frac{1}{2}$"],
    "is_multiple_answer": False,
    "unit": "km",
    "error": None,
}
POLARIS = {"problem": "What is 1+1?", "answer": "2", "difficulty": "7/8"}
AIME = {"id": 60, "problem": "Find x.", "answer": "025", "question": "Find x.", "url": ""}
MATH = {"problem": "Who?", "answer": "\\text{Eve}", "unique_id": "test/algebra/1.json", "level": 2}


def jsonl(path: Path, *rows: object) -> Path:
    """One line a row; bytes go in as they are."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.fixture
def file(tmp_path):
    return lambda *rows, name="rows.jsonl": jsonl(tmp_path / name, *rows)


def only(path: Path, **options) -> Task:
    tasks, report = load(path, **options)
    assert len(tasks) == 1 and not report.dropped, report
    return tasks[0]


# ------------------------------------------------------------------ rows and the report


def test_every_row_is_accounted_for(file):
    path = file(
        b"{broken",
        POLARIS,
        b"",  # a blank line is no row, but it counts as a line
        b"[1, 2]",
        b'{"problem": "\xff", "answer": "1"}',
        POLARIS | {"answer": None},
        {"problem": "no answer"},
        POLARIS | {"problem": "  "},
        POLARIS | {"answer": ["1", "2"]},
        POLARIS | {"answer": True},
        POLARIS | {"answer": "$ $"},
        POLARIS | {"problem": "half a pair \ud800"},
        b"[" * 100_000,
        POLARIS | {"difficulty": "hard"},
        POLARIS | {"difficulty": "1/8"},
        POLARIS | {"problem": "what is $1 + 1$"},
        POLARIS | {"problem": "what is 2 \u2212 1"},
        AIME | {"difficulty": "6/8"},
    )
    held_out = [Task("e:1", "math", "What is\n1+1 ?"), Task("e:2", "math", "What is $2-1$?")]
    tasks, report = load(path, difficulty=(5, 7), exclude=held_out)
    assert [task.id for task in tasks] == ["rows:60"]
    assert [line for line, _ in report.dropped] == [1, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert report.filtered == {"difficulty outside 5/8..7/8": 1} and report.overlap == 3
    assert report.rows == 17 == report.tasks + 1 + report.overlap + len(report.dropped)
    assert "dropped line 1: not JSON" in str(report) and "2 more" in str(report)


@pytest.mark.parametrize("rows", [[], [b"{"], [{"a": 1}], [POLARIS | {"answer": ""}], [b"3"]])
def test_a_file_without_a_usable_row_is_an_error_of_one_line(file, rows):
    with pytest.raises(DataError, match="no usable row") as error:
        load(file(*rows))
    assert "\n" not in str(error.value)


def test_unknown_names_splits_and_caps_are_errors(tmp_path):
    with pytest.raises(DataError, match="no such file.*polaris, apps"):
        load(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="aime24 has no split train, only test"):
        load("aime24", "train")
    with pytest.raises(DataError, match="max_tests is 0"):
        load("apps", max_tests=0)


def junk(value: object):
    yield from [None, 5, True, [], {}, "", " ", "x", "[1", [None], {"a": 1}, [[[1]]], 1e400]
    yield from ["\ud800", "[" * 50_000]
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            return
        yield from (json.dumps(j) for j in junk(inner))
    if isinstance(value, dict):
        for key in value:
            yield {k: v for k, v in value.items() if k != key}
            yield from (value | {key: j} for j in junk(value[key]))


@pytest.mark.parametrize("row", [APPS, CONTEST, LCB, HUMAN, OLYMPIAD, POLARIS])
def test_no_broken_field_stops_a_run(file, row):
    """Every field in turn is missing or holds something else: a task or a named drop."""
    broken = [{k: v for k, v in row.items() if k != key} for key in row]
    broken += [row | {key: j} for key in row for j in junk(row[key])]
    for options in ({}, {"difficulty": (0, 8), "level": None, "dates": None, "max_tests": 2}):
        tasks, report = load(file(row, *broken), **options)
        assert report.rows == 1 + len(broken)
        left = report.tasks + report.filtered.total() + len(report.dropped)
        assert left == report.rows and len({task.id for task in tasks}) == report.tasks
        assert all(reason for _, reason in report.dropped)
        tests = [task.tests for task in tasks if task.tests and "inputs" in task.tests]
        assert all(type(text) is str for t in tests for text in t["inputs"] + t["outputs"])
    if row not in (LCB, OLYMPIAD, POLARIS):
        assert len(list(golds(file(row, *broken)))) == 1 + len(broken)


def test_ids_are_stable_and_unique(file):
    ids = [task.id for task in load(file(AIME, POLARIS, AIME, MATH, AIME | {"id": "60#3"}))[0]]
    assert ids == ["rows:60", "rows:2", "rows:60#3", "rows:test/algebra/1.json", "rows:60#3#5"]
    assert only(file(APPS, name="anything.jsonl")).id == "apps:7"
    assert only(file(CONTEST)).id == "codecontests:1_A. Halves"
    assert only(file(HUMAN)).id == "humaneval:Human/0"
    assert only(file(LCB)).id == "livecodebench:77"


def test_kept_ids(file, tmp_path):
    path = file(APPS, APPS | {"problem_id": 8}, APPS | {"problem_id": 9})
    one_list = tmp_path / "ids.json"
    one_list.write_text(json.dumps(["apps:8", "apps:9"]))
    lines = tmp_path / "ids.txt"
    lines.write_text("apps:8\n\napps:9\n")
    assert read_ids(one_list) == read_ids(lines) == {"apps:8", "apps:9"}
    tasks, report = load(path, keep=read_ids(lines))
    assert [task.id for task in tasks] == ["apps:8", "apps:9"]
    assert report.filtered == {"not in the kept ids": 1} and not report.dropped
    one_list.write_text("[1, 2]")
    for wrong in (one_list, tmp_path / "nothing"):
        with pytest.raises(DataError, match=wrong.name):
            read_ids(wrong)


# ------------------------------------------------------------------ math


def test_math_golds(file):
    task = only(file(AIME, name="aime.jsonl"))
    assert (task.kind, task.question, task.answer) == ("math", "Find x.", "025")
    assert (task.source, task.id, task.tests) == ("aime", "aime:60", None)
    assert only(file({"question": "q", "answer": 25})).answer == "25"
    assert only(file({"question": "q", "answer": 0.5})).answer == "0.5"
    assert only(file(MATH)).answer == "\\text{Eve}"


@pytest.mark.parametrize(
    "gold, unit, clean",
    [
        ("$(2,4)$", None, "(2,4)"),
        ("$1$,$\\frac{3}{2}$", None, "1,\\frac{3}{2}"),
        ("$221,$8$", None, "221,8"),
        ("$8 \\%$", None, "8 \\%"),
        ("$[1, 2)$.", None, "[1, 2)"),
        ("45", "minute", "45"),
        ("$90^{\\circ}$,$60^{\\circ}$", "^{\\circ}", "90,60"),
        ("$166\\mathrm{~cm}^2$", "$cm^2$", "166\\mathrm{~cm}^2"),
        ("$166 \\text{ cm^2}$", "$cm^2$", "166"),
        ("5 km", "m", "5 km"),
        ("5m", "m", "5"),
    ],
)
def test_olympiad_golds(file, gold, unit, clean):
    task = only(file(OLYMPIAD | {"final_answer": [gold], "unit": unit}))
    assert (task.answer, task.tolerance, task.id) == (clean, None, "olympiadbench:5")


def test_olympiad_tolerance_and_context(file):
    task = only(file(OLYMPIAD | {"error": "1e-1", "context": "On a road."}))
    assert task.tolerance == 0.1 and task.question == "On a road.\n\nHow far?"
    bad = [OLYMPIAD | {"error": e} for e in ("inf", "-1", "1e-1,1e-2", "nan")]
    _, report = load(file(OLYMPIAD, OLYMPIAD | {"final_answer": None}, *bad))
    assert [line for line, _ in report.dropped] == [2, 3, 4, 5, 6]


# ------------------------------------------------------------------ APPS


def apps(fn_name=None, inputs=(), outputs=(), **fields) -> dict:
    tests = {"fn_name": fn_name} if fn_name else {}
    tests |= {"inputs": inputs, "outputs": outputs}
    return APPS | {"input_output": json.dumps(tests)} | fields


def test_apps_stdin_tests_stay_as_they_are(file):
    task = only(file(APPS))
    assert task.tests == {"inputs": ["1\n", "4\n"], "outputs": ["2\n", "8\n"], "fn_name": None}
    # a list of lines is joined, never taken for a wrapping
    task = only(file(apps(inputs=[["1", "2"]], outputs=[["3"]])))
    assert task.tests == {"inputs": ["1\n2"], "outputs": ["3"], "fn_name": None}


@pytest.mark.parametrize(
    "outputs, starter, expected",
    [
        ([9, 7], "", ["9", "7"]),
        ([[False], [True]], "def f(n):", ["false", "true"]),
        ([[[1, 2]], [[3]]], "", ["[1, 2]", "[3]"]),
        ([[1, 2], [3]], "", ["[1, 2]", "[3]"]),
        ([[5], [6]], "def f(n) -> List[int]:", ["[5]", "[6]"]),
        ([[], []], "", ["[]", "[]"]),
        ([["a\nb"], ["c"]], "", ['"a\\nb"', '"c"']),
    ],
)
def test_apps_call_mode(file, outputs, starter, expected):
    row = apps("f", [[[1, 2], "x\ny"], ["z"]], outputs, starter_code=starter)
    task = only(file(row))
    assert task.tests["inputs"] == ['[1, 2]\n"x\\ny"', '"z"']  # one JSON value a line
    assert task.tests["outputs"] == expected and task.tests["fn_name"] == "f"
    assert task.starter == (starter or "# Write a function named f.")
    assert only(file(row), max_tests=1).tests["fn_name"] == "f"


def test_apps_rows_without_tests_and_other_levels(file):
    rows = [APPS, APPS | {"input_output": ""}, apps(), apps(inputs=["1"], outputs=[])]
    _, report = load(file(*rows, APPS | {"difficulty": "interview"}))
    assert [line for line, _ in report.dropped] == [2, 3, 4]
    assert report.filtered == {"not introductory": 1}
    assert len(load(file(APPS, APPS | {"difficulty": "interview"}), level=None)[0]) == 2


def test_expected_outputs_that_nothing_can_equal_are_broken_rows(file):
    """The judge refuses to compare with them, so a task that had one would end a run."""
    infinite = apps("f", [[1]], [[9]])
    infinite["input_output"] = infinite["input_output"].replace("9", "1e400")
    bad = [apps("f", [[1], [2]], [1.5, float("nan")]), infinite]
    _, report = load(file(apps("f", [[1]], [1.5]), *bad, apps("f", [[1]], ["nan"])))
    assert [line for line, _ in report.dropped] == [2, 3] and report.tasks == 2
    not_json = payload(json.dumps(cases("functional", ("4\n5", "9 9"))))
    _, report = load(file(LCB, LCB | {"private_test_cases": not_json}))
    assert [line for line, why in report.dropped] == [2] and "not JSON" in report.dropped[0][1]
    long = payload(json.dumps(cases("functional", ("4", "9" * 5000))))
    assert len(only(file(LCB | {"private_test_cases": long})).tests["outputs"][0]) == 5000


def test_deep_nesting_is_a_broken_row(file):
    """json reads a value that is too deep for a Python function to walk: still only one row."""
    rows = []
    for depth in range(300, 1000, 50):
        tests = '{"fn_name": "f", "inputs": [[1]], "outputs": [%s]}' % ("[" * depth + "]" * depth)
        rows.append(APPS | {"problem_id": depth, "input_output": tests})
    tasks, report = load(file(*rows))
    assert report.tasks and report.dropped and report.tasks + len(report.dropped) == len(rows)


# ------------------------------------------------------------------ CodeContests


def test_contest_tests_hidden_ones_first_then_seeded(file):
    path = file(CONTEST)
    everything = only(path).tests
    assert everything["inputs"] == ["4\n", "6\n", "8\n"] + [f"{2 * i}\n" for i in range(5, 10)] + [
        "2\n"
    ]
    assert everything["outputs"][0] == "2 \n" and everything["fn_name"] is None  # blanks stay
    answers = dict(zip(everything["inputs"], everything["outputs"], strict=True))
    fourth = set()
    for seed in range(20):
        tests = only(path, max_tests=4, seed=seed).tests
        assert tests == only(path, max_tests=4, seed=seed).tests
        assert tests["inputs"][:3] == ["4\n", "6\n", "8\n"]
        assert all(answers[i] == o for i, o in zip(tests["inputs"], tests["outputs"], strict=True))
        fourth |= set(tests["inputs"][3:])
    assert len(fourth) > 2 and "2\n" not in fourth
    assert "2\n" in only(path, max_tests=9).tests["inputs"]
    assert len({tuple(only(path, max_tests=2, seed=s).tests["inputs"]) for s in range(20)}) == 3


def test_contest_rows_that_cannot_be_judged(file):
    _, report = load(
        file(
            CONTEST | {"time_limit": {"seconds": 2, "nanos": 5}},
            CONTEST | {"input_file": "input.txt"},
            CONTEST | {"private_tests": {"input": ["1"], "output": []}},
            CONTEST | dict.fromkeys(["public_tests", "private_tests", "generated_tests"]),
        )
    )
    assert report.filtered == {"reads or writes a file": 1}
    assert [line for line, _ in report.dropped] == [3, 4]


# ------------------------------------------------------------------ LiveCodeBench


def test_live_tests_of_both_kinds_and_both_encodings(file):
    task = only(file(LCB))
    assert task.tests == {"inputs": ["4\n5", "1\n2"], "outputs": ["9", "3"], "fn_name": "add"}
    assert task.starter.startswith("class Solution")
    private = json.dumps(cases("stdin", ("a\n", "b\n")))
    stdin = LCB | {"public_test_cases": "[]", "metadata": "{}", "starter_code": ""}
    for encoded in (private, payload(private)):
        task = only(file(stdin | {"private_test_cases": encoded}))
        assert task.tests == {"inputs": ["a\n"], "outputs": ["b\n"], "fn_name": None}


def test_live_rows_are_pinned_by_date(file):
    days = ["2024-12-31", "2025-01-01", "2025-04-30T23:59:00", "2025-05-01"]
    rows = [LCB | {"contest_date": day, "question_id": day} for day in days]
    tasks, report = load(file(*rows, LCB | {"contest_date": None}))
    assert [task.id[14:24] for task in tasks] == ["2025-01-01", "2025-04-30"]
    assert report.filtered.total() == 2 and [line for line, _ in report.dropped] == [5]
    assert len(load(file(*rows), dates=None)[0]) == 4


def test_live_rows_that_cannot_be_judged(file):
    other = payload(json.dumps(cases("stdin", ("1", "2"))))
    broken = [
        LCB | {"private_test_cases": other},  # two types in one row
        LCB | {"metadata": "{}"},
        LCB | {"private_test_cases": "not base64!"},
        LCB | {"private_test_cases": payload({"input": "1"})},
        LCB | {"private_test_cases": payload("{}")},
        LCB | {"private_test_cases": LCB["private_test_cases"][:-8]},
    ]
    _, report = load(file(LCB, *broken))
    assert [line for line, _ in report.dropped] == [2, 3, 4, 5, 6, 7]


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_payload_that_names_a_global_is_refused_and_not_run(file, tmp_path):
    victim = tmp_path / "victim"
    pickle.loads(pickle.dumps(Evil(victim))).close()
    assert victim.exists()  # so the payload does what it should be kept from
    victim.unlink()
    rows = [LCB, LCB | {"private_test_cases": payload(Evil(victim))}]
    _, report = load(file(*rows))
    assert [line for line, _ in report.dropped] == [2] and not victim.exists()
    for attack in (pickle.dumps(Evil(victim)), b"cbuiltins\nopen\n."):  # the unpickler on its own
        with pytest.raises(pickle.UnpicklingError, match="open"):
            data._NoGlobals(io.BytesIO(attack)).load()
    assert not victim.exists()


def test_payload_bounds(monkeypatch):
    def unpack(raw: bytes) -> str:
        return data.unpack_private_tests(base64.b64encode(zlib.compress(raw)).decode())

    for protocol in (1, 2, 3, 4, 5):
        assert unpack(pickle.dumps("é[]", protocol)) == "é[]"
    claims_34_gb = b"\x80\x02X\x01\x00\x00\x00ar\xff\xff\xff\x7f."
    for raw in (claims_34_gb, pickle.dumps(5), pickle.dumps(["a"]), b"", b"\x80\x04.", b"."):
        with pytest.raises(BadRow, match="a payload is refused"):
            unpack(raw)
    monkeypatch.setattr(data, "MAX_PAYLOAD", 1000)
    assert unpack(pickle.dumps("a" * 900)) == "a" * 900
    with pytest.raises(BadRow, match="over 1000 bytes"):
        unpack(pickle.dumps("a" * 10**7))


def test_mutated_payloads_are_text_or_refused():
    rng = random.Random(0)
    raw = pickle.dumps('[{"input": "1"}]')
    outcomes = {"text": 0, "refused": 0}
    for _ in range(5_000):
        mutated = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(len(raw))] = rng.randrange(256)
        if rng.random() < 0.3:
            del mutated[rng.randrange(len(raw)) :]
        encoded = base64.b64encode(zlib.compress(bytes(mutated))).decode()
        try:
            assert isinstance(data.unpack_private_tests(encoded), str)
            outcomes["text"] += 1
        except BadRow:
            outcomes["refused"] += 1
    assert outcomes["text"] > 100 and outcomes["refused"] > 100


def test_nothing_else_is_unpickled():
    source = Path(data.__file__).read_text()
    assert "pickle.load" not in source.split('"""', 2)[2]
    assert source.count(".load()") == 1


# ------------------------------------------------------------------ HumanEval, golds


def test_humaneval_runs_with_the_helpers_of_its_prompt(file):
    task = only(file(HUMAN))
    assert task.starter == HUMAN["prompt"] and "`quarter`" in task.question

    def passes(program: str) -> bool:
        source = f"{task.starter}\n{program}\n{task.tests['check']}"
        return not subprocess.run([sys.executable, "-c", source], capture_output=True).returncode

    assert passes("def quarter(n):\n    return half(half(n))")
    assert not passes("def quarter(n):\n    return n")
    assert not passes("")
    ((task_id, programs),) = golds(file(HUMAN))
    assert task_id == task.id and passes(programs[0])


def test_golds_are_python_3_and_bear_the_ids_of_load(file):
    path = file(APPS, APPS | {"solutions": ""}, b"{", APPS | {"problem_id": 8})
    found = dict(golds(path))
    assert {task.id for task in load(path)[0]} == set(found) == {"apps:7", "apps:7#2", "apps:8"}
    assert [len(programs) for programs in found.values()] == [2, 0, 2]
    assert list(golds(file(CONTEST))) == [("codecontests:1_A. Halves", ["py3"])]
    with pytest.raises(DataError, match="hold no gold programs"):
        golds(file(LCB))


# ------------------------------------------------------------------ Parquet, the hub, the command


def test_parquet_gives_the_same_tasks(file, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    rows = {
        "contest": CONTEST | {"incorrect_solutions": {"language": [3], "solution": ["no"]}},
        "live": LCB | {"contest_date": datetime(2025, 2, 1)},
        "olympiad": OLYMPIAD,
    }
    for name, row in rows.items():
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.Table.from_pylist([row]), path)
        expected = only(file(row | {"contest_date": "2025-02-01"}))
        assert only(path) == expected
    assert "incorrect_solutions" not in next(data._read_file(tmp_path / "contest.parquet"))[1]
    (tmp_path / "contest.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="broken Parquet"):
        load(tmp_path / "contest.parquet")


class Rows(list):
    """The part of a datasets.Dataset that is used."""

    @property
    def column_names(self):
        return list(self[0])

    def remove_columns(self, names):
        return Rows({k: v for k, v in row.items() if k not in names} for row in self)


def test_hub_names_and_splits(monkeypatch, file):
    import datasets
    import huggingface_hub

    asked = []
    rows = {
        "Hothan/OlympiadBench": OLYMPIAD,
        "deepmind/code_contests": CONTEST | {"incorrect_solutions": 0},
        "openai/openai_humaneval": HUMAN,
    }

    def load_dataset(repo, config, split):
        asked.append((repo, config, split))
        return Rows([rows.get(repo, POLARIS)])

    def download(repo, name, repo_type):
        asked.append((repo, name, repo_type))
        return str(file(APPS if "apps" in repo else LCB, name="fetched.jsonl"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    ids = [load(name)[0][0].id for name in data.DATASETS]
    assert ids[:3] == ["polaris:1", "apps:7", "codecontests:1_A. Halves"]
    assert ids[3:] == [
        "aime24:1",
        "aime25:1",
        "olympiadbench:5",
        "livecodebench:77",
        "math500:1",
        "humaneval:Human/0",
    ]
    load("apps", "test"), load("codecontests", "test")
    assert asked == [
        ("POLARIS-Project/Polaris-Dataset-53K", None, "train"),
        ("codeparrot/apps", "train.jsonl", "dataset"),
        ("deepmind/code_contests", None, "train"),
        ("HuggingFaceH4/aime_2024", None, "train"),
        ("math-ai/aime25", None, "test"),
        ("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train"),
        ("livecodebench/code_generation_lite", "test6.jsonl", "dataset"),
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("openai/openai_humaneval", None, "test"),
        ("codeparrot/apps", "test.jsonl", "dataset"),
        ("deepmind/code_contests", None, "test"),
    ]


def test_an_unreachable_hub_is_one_line_that_names_the_file(monkeypatch):
    import datasets
    import huggingface_hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    for name, file in (("polaris", "polaris-data-53K.jsonl"), ("livecodebench", "test6.jsonl")):
        with pytest.raises(DataError, match=f"--data {file}") as error:
            load(name)
        assert "\n" not in str(error.value) and "no route" in str(error.value)


def test_command_and_lazy_imports(file):
    def run(*args):
        return subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=ROOT)

    done = run("data.py", str(file(AIME, b"{", AIME, AIME)))
    assert done.returncode == 0 and done.stdout.count("025") == 2
    assert "4 rows = 3 tasks" in done.stdout and "dropped line 2" in done.stdout
    done = run("data.py", str(file(b"{")))
    assert done.returncode == 2 and done.stderr.startswith("data.py: ") and not done.stdout
    slow = "import data, sys; print({'datasets', 'pyarrow', 'torch', 'numpy'} & set(sys.modules))"
    assert run("-c", slow).stdout.strip() == "set()"


# ------------------------------------------------------------------ the mix


def make(source: str, size: int) -> list[Task]:
    return [Task(f"{source}:{i}", "math", "?", answer="1", source=source) for i in range(size)]


POOL = {"polaris": make("polaris", 22), "apps": make("apps", 7), "codecontests": make("cc", 5)}


def ids(step: int, **options) -> list[str]:
    return [task.id for task in step_tasks(POOL, step, **options)]


def test_a_step_has_the_default_proportion_spread_evenly():
    for step in range(40):
        sources = [task.source[0] for task in step_tasks(POOL, step)]
        assert sources == list("pacppacp")


def test_no_repeats_within_an_epoch_and_another_order_in_the_next():
    # 22 tasks at 4 a step: 5 steps an epoch, 2 left over
    epochs = [[ids(e * 5 + s)[j] for s in range(5) for j in (0, 3, 4, 7)] for e in range(4)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert len(set().union(*epochs)) == 22  # what one epoch leaves over, another has
    # 7 APPS tasks at 2 a step turn over on their own, after 3 steps
    apps = [[ids(e * 3 + s)[j] for s in range(3) for j in (1, 5)] for e in range(4)]
    assert all(len(set(epoch)) == 6 for epoch in apps)


def test_a_step_depends_on_nothing_but_its_number_and_the_seed():
    forward = [ids(step) for step in range(12)]
    random.seed(1)
    assert [ids(step) for step in reversed(range(12))] == forward[::-1]
    assert ids(0, seed=1) != ids(0)
    assert len({tuple(ids(0, seed=seed)) for seed in range(10)}) == 10


def test_other_mixes_and_impossible_ones():
    assert [task[0] for task in ids(0, mix={"polaris": 1, "codecontests": 3})] == list("cpcc")
    assert len(set(ids(0, mix={"codecontests": 5}))) == 5  # all of them, once
    for mix in ({"codecontests": 6}, {"olympiads": 1}, {"apps": 0}):
        with pytest.raises(DataError, match="change the mix"):
            step_tasks(POOL, 0, mix=mix)


@pytest.mark.parametrize(
    "text",
    ["", " ", "a,b", "a=1,b", "a=1,a=2", "a=0,b=1", "a=1,", "=1,b=1", "a=1,b=-1", "a=\u0663,b=1"],
)
def test_a_mix_that_can_not_be_read_is_one_line(text):
    with pytest.raises(DataError, match="polaris=4,apps=2") as error:
        parse_mix(text)
    assert "\n" not in str(error.value)


def test_a_mix_is_loaded_filtered_and_drawn_from(file, tmp_path):
    math = file(*(POLARIS | {"problem": f"What is {n}+1?"} for n in range(6)), name="math.jsonl")
    code = file(*(APPS | {"problem_id": n, "question": f"Add {n}."} for n in range(5)), name="c.x")
    asked = [Task("e", "math", "What is $3 + 1$"), Task("e2", "code", "add 0")]
    kept = tmp_path / "kept.txt"
    kept.write_text("apps:0\napps:2\napps:3\n")
    mix = parse_mix(f"{math}=2,{code}=1")
    sources, reports = load_mix(mix, exclude=asked, keep=kept, max_tests=1, seed=3)
    assert list(sources) == list(mix) == [str(math), str(code)]
    assert [task.id for task in sources[str(math)]] == [f"math:{n}" for n in (1, 2, 3, 5, 6)]
    assert [task.id for task in sources[str(code)]] == ["apps:2", "apps:3"]
    assert [report.overlap for report in reports] == [1, 1]
    assert [report.filtered.total() for report in reports] == [0, 2]
    drawn = [task.tests["inputs"] for task in sources[str(code)]]
    assert all(len(inputs) == 1 for inputs in drawn)
    again, _ = load_mix(mix, exclude=asked, keep=kept, max_tests=1, seed=3)
    assert [task.tests["inputs"] for task in again[str(code)]] == drawn
    batch = step_tasks(sources, 0, mix=mix)
    assert [task.kind for task in batch] == ["math", "code", "math"]

    everything = tmp_path / "all.txt"
    everything.write_text("math:1\napps:2\n")
    sources, _ = load_mix(mix, keep=everything)
    assert [task.id for tasks in sources.values() for task in tasks] == ["math:1", "apps:2"]
    with pytest.raises(DataError, match="keeps apps:0, and the mix has no such source"):
        load_mix({str(math): 2}, keep=kept)
    kept.write_text("\n")
    with pytest.raises(DataError, match="has no ids"):  # not all tasks, because none is named
        load_mix(mix, keep=kept)
    with pytest.raises(DataError, match="no usable row"):
        load_mix(mix, difficulty=(0, 6))


def test_a_mix_has_no_id_twice_and_no_humaneval(file, tmp_path):
    (tmp_path / "other").mkdir()
    twice = [file(POLARIS), jsonl(tmp_path / "other" / "rows.jsonl", POLARIS)]
    with pytest.raises(DataError, match="both have a task rows:1: rename a file"):
        load_mix(dict.fromkeys(map(str, twice), 1))
    with pytest.raises(DataError, match="evaluation only"):
        load_mix({str(file(HUMAN)): None})


def test_humaneval_tasks_are_not_trained_on(file):
    with pytest.raises(DataError, match="evaluation only"):
        step_tasks({"h": load(file(HUMAN))[0]}, 0, mix={"h": 1})
