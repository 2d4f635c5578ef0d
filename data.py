r"""data.py - tasks: what the model is trained and measured on, read from the hub or from a file.

THE IDEA
    Every benchmark has its own row format and its own traps. This file turns each of them into one
    `Task` and says of every row what became of it:
        rows = tasks + filtered (by a filter that was asked for) + overlap (also in an evaluation
               set) + dropped (broken, named by its line)
    A broken row never stops a run; a file without a single usable row does.

WHAT A TASK HOLDS
    math   `answer`, the gold as a string: "025" stays "025" (the verifier compares integers), a
           list of one is unwrapped, `$` signs and the closing full stop go, the row's own unit
           goes, and an OlympiadBench `error` becomes `tolerance`.
    code   `tests` = {"inputs": [str], "outputs": [str], "fn_name": str | None}. Without fn_name an
           input is stdin and an output is stdout. With it (call mode) an input holds one JSON
           value a line, one line an argument, and an output is one JSON value.
           HumanEval is the exception: `tests` = {"check": source} and `starter` is its prompt; run
           run_asserts(task.starter + "\n" + program, task.tests["check"]). The check shares a
           process with the program, so it is good for measuring only: step_tasks() refuses it.

WHERE THE TESTS COME FROM, and how many
    CodeContests: private, then generated, then public ones. LiveCodeBench: private, then public.
    Without `max_tests` all are kept (evaluation). With it (training: 4 to 16) they are drawn in
    that order, with a seeded choice inside each kind: 3 private, 5 generated and 1 public test
    under max_tests=4 give the 3 private ones and 1 generated one. Public tests come last because
    the question prints them, so a program of constants passes them; generated ones are needed
    because many rows have no private test.
    APPS call mode: outputs may be bare ([9]) or wrapped once ([[false]]), see `is_wrapped`. Many
    APPS golds fail their own tests: `golds()` hands them out for a self-check, and `read_ids()`
    reads the list of tasks that passed it.

THE MIX of a training step is 4 Polaris, 2 APPS and 2 CodeContests tasks by default. `parse_mix`
reads such a mix, `load_mix` loads what it names (less what an evaluation set holds too), and
`step_tasks` draws from that.

    >>> parse_mix("polaris=4,apps=2,codecontests=2") == DEFAULT_MIX
    True

DIFFERENT from the reference implementation, which trains on rows 500-4500 of the APPS *test* file,
tests on the public tests of CodeContests and LiveCodeBench, and loads LiveCodeBench payloads with
pickle.loads (which runs code). Here training uses the train split, hidden tests count, a task that
occurs in an evaluation set is left out of training, and a payload is one string or it is refused.

TRY IT
    python data.py FILE_OR_NAME     prints the report and two example tasks
"""

import argparse
import base64
import io
import itertools
import json
import pickle
import pickletools
import random
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path


@dataclass
class Task:
    """One question with the means to score an answer to it; the header says what each kind holds.

    `id` is unique within a data set and stable: source:own id of the row, or source:line.
    `starter` is code that the question asks to start from. `tolerance` is an absolute error that
    a numeric answer may have.
    """

    id: str
    kind: str  # "math" or "code"
    question: str
    answer: str | None = None
    tests: dict | None = None
    source: str = ""
    starter: str = ""
    tolerance: float | None = None


@dataclass
class LoadReport:
    """What became of each row: rows == tasks + filtered + overlap + dropped.

    `filtered` counts rows by the stated filter that left them out; `dropped` holds (line, reason).
    """

    source: str
    rows: int = 0
    tasks: int = 0
    overlap: int = 0
    filtered: Counter[str] = field(default_factory=Counter)
    dropped: list[tuple[int, str]] = field(default_factory=list)

    def __str__(self) -> str:
        why = ", ".join(f"{reason}: {n}" for reason, n in self.filtered.items())
        lines = [
            f"{self.source}: {self.rows} rows = {self.tasks} tasks"
            f" + {self.filtered.total()} filtered{f' ({why})' if why else ''}"
            f" + {self.overlap} also in an evaluation set + {len(self.dropped)} dropped"
        ]
        lines += [f"  dropped line {line}: {reason}" for line, reason in self.dropped[:10]]
        if len(self.dropped) > 10:
            lines.append(f"  dropped: {len(self.dropped) - 10} more")
        return "\n".join(lines)


class DataError(ValueError):
    """Nothing usable can be loaded. The message is one line that says what to do."""


class BadRow(ValueError):
    """This row cannot become a task. The message is the reason that the report gives."""


# ------------------------------------------------------------------ the data sets and their names


@dataclass(frozen=True)
class DataSet:
    """A public data set and the format of its rows. `splits`: our split (the first is the default)
    -> (its name on the hub, the file that holds the same rows). Where the name is None the file
    itself is fetched, because `datasets` refuses repositories with a loading script."""

    repo: str
    form: str
    splits: dict[str, tuple[str | None, str]]
    config: str | None = None


# LiveCodeBench grows, so "v6" means what it added: the 175 rows of test6.jsonl, January to April
# 2025. Rows of earlier releases, and all that its ERRATA.md lists, fall outside this window.
LCB_V6 = ("2025-01-01", "2025-05-01")

# fmt: off
DATASETS = {
    "polaris": DataSet("POLARIS-Project/Polaris-Dataset-53K", "math",
        {"train": ("train", "polaris-data-53K.jsonl")}),
    "apps": DataSet("codeparrot/apps", "apps",
        {"train": (None, "train.jsonl"), "test": (None, "test.jsonl")}),
    "codecontests": DataSet("deepmind/code_contests", "codecontests",
        {s: (s, f"data/{s}-*.parquet") for s in ("train", "valid", "test")}),
    "aime24": DataSet("HuggingFaceH4/aime_2024", "math",
        {"test": ("train", "data/train-00000-of-00001.parquet")}),
    "aime25": DataSet("math-ai/aime25", "math", {"test": ("test", "test.jsonl")}),
    "olympiadbench": DataSet("Hothan/OlympiadBench", "olympiadbench",
        {"test": ("train", "OlympiadBench/OE_TO_maths_en_COMP/OE_TO_maths_en_COMP.parquet")},
        config="OE_TO_maths_en_COMP"),
    "livecodebench": DataSet("livecodebench/code_generation_lite", "livecodebench",
        {"test": (None, "test6.jsonl")}),
    "math500": DataSet("HuggingFaceH4/MATH-500", "math", {"test": ("test", "test.jsonl")}),
    "humaneval": DataSet("openai/openai_humaneval", "humaneval",
        {"test": ("test", "openai_humaneval/test-00000-of-00001.parquet")}),
}
# fmt: on

DEFAULT_MIX = {"polaris": 4, "apps": 2, "codecontests": 2}

# A large part of CodeContests, and of no use here.
UNUSED_COLUMNS = {"incorrect_solutions"}

# Bytes that a payload may inflate to: far more than the tests of a task need, and a zip bomb's end.
MAX_PAYLOAD = 512 * 2**20


# ------------------------------------------------------------------ fields of a row


def _text(row: dict, key: str) -> str:
    """The field as text; a broken row where it is missing, blank or something else."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"`{key}` is missing or not text")
    return value


def _json(row: dict, key: str) -> object:
    """The field, decoded if it is JSON in a string (APPS and LiveCodeBench store it so)."""
    value = row.get(key)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"`{key}` is not JSON: {error}") from error


def _check_json(output: str) -> None:
    """Raises BadRow unless a result can be compared with this output: JSON without NaN."""

    def refuse(constant: str):
        raise ValueError(f"{constant} equals nothing")

    try:
        json.loads(output, parse_constant=refuse, parse_int=str)  # int() refuses long numbers
    except ValueError as error:
        raise BadRow(f"an expected output is not JSON: {error}") from error


def _pairs(tests: object, inputs: str, outputs: str, name: str) -> tuple[list, list]:
    """The two parallel lists of a struct of tests."""
    columns = [tests.get(inputs), tests.get(outputs)] if isinstance(tests, dict) else []
    if not columns or not all(isinstance(column, list) for column in columns):
        raise BadRow(f"`{name}` is not two lists")
    if len(columns[0]) != len(columns[1]):
        raise BadRow(f"`{name}` has {len(columns[0])} inputs and {len(columns[1])} outputs")
    return columns[0], columns[1]


def clean_gold(value: object, unit: str | None = None) -> str:
    r"""The gold answer as a bare string. Raises BadRow if there is none.

    >>> clean_gold("025"), clean_gold(["$(2,4)$"]), clean_gold("$221,$8$"), clean_gold(r"\$5")
    ('025', '(2,4)', '221,8', '\\$5')
    >>> clean_gold(r"$\frac{41}{12}\text{ km}$", unit="km"), clean_gold(r"7 cm", unit="m")
    ('\\frac{41}{12}', '7 cm')
    >>> clean_gold(r"$(-\infty, 0) \cup\{1\}$."), clean_gold(204.0)
    ('(-\\infty, 0) \\cup\\{1\\}', '204')
    """
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of integers with gaps comes out of Parquet as floats
    if type(value) not in (str, int, float) or value != value:  # and gaps come out as NaN
        raise BadRow(f"no single answer: {value!r:.60}")
    gold = re.sub(r"(?<!\\)\$", "", str(value)).strip()
    gold = re.sub(r"(?<!\.)\.$", "", gold)
    if unit:  # bare or in \text{}, but not the m of a cm
        name = re.escape(unit.replace("$", "").strip())
        name = rf"(?:\\(?:text|mathrm)\{{[\s~]*{name}[\s~]*\}}|(?<![A-Za-z]){name})"
        gold = re.sub(rf"(?:\s|~|\\[,;: ])*{name}(?=\s*(?:,|$))", "", gold)
    if not gold:
        raise BadRow("the answer is empty")
    return gold


def _depth(value: object) -> int:
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def is_wrapped(outputs: list, starter: str = "") -> bool:
    """Whether all outputs of a call-mode APPS row sit in a list of one that is not theirs.

    A list of one may also be the value itself: the return annotation of the starter code says how
    deep a value is, and without an annotation the list is taken for a wrapping.

    >>> is_wrapped([[False], [True]]), is_wrapped([9]), is_wrapped([[1], [1, 2]])
    (True, False, False)
    >>> is_wrapped([[5]], "def f(self) -> List[int]:"), is_wrapped([[[5]]], "def f() -> List[int]:")
    (False, True)
    """
    annotation = re.search(r"->(.*)", starter)
    own = annotation.group(1).lower().count("list[") if annotation else 0
    return all(isinstance(out, list) and len(out) == 1 and _depth(out) > own for out in outputs)


class _NoGlobals(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def unpack_private_tests(payload: str) -> str:
    """The JSON text in a LiveCodeBench payload, base64(zlib(pickle(text))). Raises BadRow.

    Loading a pickle runs whatever it names, so the unpickler refuses every global. A real payload
    is a pickled string and nothing else, so opcodes beyond what one string needs do not even reach
    it (LONG_BINPUT alone can claim 34 GB), and no more than MAX_PAYLOAD bytes are inflated.
    """
    allowed = {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "STOP"}
    allowed |= {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(payload, validate=True), MAX_PAYLOAD)
        if not inflate.eof:
            raise ValueError(f"it is cut short or over {MAX_PAYLOAD} bytes")
        extra = {opcode.name for opcode, _, _ in pickletools.genops(data)} - allowed
        if extra:
            raise ValueError(f"it holds {', '.join(sorted(extra))}, not one string")
        text = _NoGlobals(io.BytesIO(data)).load()
        if not isinstance(text, str):
            raise ValueError("it is not one string")
    except (zlib.error, pickle.UnpicklingError, EOFError, OverflowError, ValueError) as error:
        raise BadRow(f"a payload is refused: {error}") from error
    return text


# ------------------------------------------------------------------ one reader a format
# Each takes (row, draw) and gives the fields of a Task. draw(groups, fn_name) makes the `tests`
# dict of lists of (input, output) pairs, one list a kind of test, in the order to draw them.


def _math(row: dict, draw: Callable) -> dict:
    question = _text(row, "problem" if row.get("problem") else "question")
    return {"kind": "math", "question": question, "answer": clean_gold(row.get("answer"))}


def _olympiadbench(row: dict, draw: Callable) -> dict:
    unit = _text(row, "unit") if row.get("unit") else None
    tolerance = str(row["error"]) if row.get("error") else None
    if tolerance and not re.fullmatch(r"\d+(\.\d+)?(e-?\d\d?)?", tolerance):
        raise BadRow(f"`error` is not a number: {tolerance!r:.60}")
    context = [_text(row, "context")] if row.get("context") else []
    return {
        "kind": "math",
        "question": "\n\n".join([*context, _text(row, "question")]),
        "answer": clean_gold(row.get("final_answer"), unit),
        "tolerance": float(tolerance) if tolerance else None,
    }


def _stream(value: object) -> object:
    """stdin or stdout of an APPS test: text as it is, a list of lines joined."""
    lines = isinstance(value, list) and all(isinstance(line, str) for line in value)
    return "\n".join(value) if lines else value


def _apps(row: dict, draw: Callable) -> dict:
    if not row.get("input_output"):
        raise BadRow("no tests")  # 195 rows of the train split
    cases = _json(row, "input_output")
    inputs, outputs = _pairs(cases, "inputs", "outputs", "input_output")
    fn_name, starter = cases.get("fn_name"), row.get("starter_code") or ""
    if not isinstance(starter, str) or not isinstance(fn_name, str | None):
        raise BadRow("`starter_code` or `fn_name` is not text")
    if fn_name:
        if is_wrapped(outputs, starter):
            outputs = [out[0] for out in outputs]
        outputs = [json.dumps(out) for out in outputs]
        calls = [call if isinstance(call, list) else [call] for call in inputs]
        inputs = ["\n".join(map(json.dumps, call)) for call in calls]
        starter = starter or f"# Write a function named {fn_name}."
    else:
        inputs, outputs = list(map(_stream, inputs)), list(map(_stream, outputs))
    tests = draw([list(zip(inputs, outputs, strict=True))], fn_name or None)
    return {"kind": "code", "question": _text(row, "question"), "starter": starter, "tests": tests}


def _codecontests(row: dict, draw: Callable) -> dict:
    groups = []
    for key in ("private_tests", "generated_tests", "public_tests"):
        tests = row.get(key) or {"input": [], "output": []}
        inputs, outputs = _pairs(tests, "input", "output", key)
        groups.append(list(zip(inputs, outputs, strict=True)))
    return {"kind": "code", "question": _text(row, "description"), "tests": draw(groups, None)}


def _livecodebench(row: dict, draw: Callable) -> dict:
    groups, types = [], set()
    for key in ("private_test_cases", "public_test_cases"):
        text = row.get(key)
        if isinstance(text, str) and not text.lstrip().startswith("["):
            text = unpack_private_tests(text)
        cases = _json({key: text}, key)
        if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
            raise BadRow(f"`{key}` is not a list of tests")
        types |= {str(case.get("testtype")) for case in cases}
        groups.append([(case.get("input"), case.get("output")) for case in cases])
    if types not in ({"stdin"}, {"functional"}):
        raise BadRow(f"tests of the types {sorted(types)}, not all stdin or all functional")
    metadata, fn_name = _json(row, "metadata"), None
    if types == {"functional"}:
        fn_name = _text(metadata if isinstance(metadata, dict) else {}, "func_name")
    return {
        "kind": "code",
        "question": _text(row, "question_content"),
        "starter": row["starter_code"] if isinstance(row.get("starter_code"), str) else "",
        "tests": draw(groups, fn_name),
    }


def _humaneval(row: dict, draw: Callable) -> dict:
    name = _text(row, "entry_point")
    return {
        "kind": "code",
        "question": f"Complete the Python function `{name}` below. Give the whole program.",
        "starter": _text(row, "prompt"),
        "tests": {"check": f"{_text(row, 'test').rstrip()}\n\n\ncheck({name})\n"},
    }


# Name -> any of these sets of columns, the field with the row's own id, its reader. The first that
# fits is taken. "math" is Polaris, AIME, MATH-500, and any file of plain rows.
FORMATS = {
    "livecodebench": ([{"question_content", "private_test_cases"}], "question_id", _livecodebench),
    "codecontests": ([{"description", "generated_tests"}], "name", _codecontests),
    "apps": ([{"question", "input_output"}], "problem_id", _apps),
    "humaneval": ([{"prompt", "test", "entry_point"}], "task_id", _humaneval),
    "olympiadbench": ([{"question", "final_answer"}], "id", _olympiadbench),
    "math": ([{"problem", "answer"}, {"question", "answer"}], "unique_id", _math),
}


# ------------------------------------------------------------------ rows, with number and id


def _read_file(path: Path) -> Iterator[tuple[int, dict | str]]:
    """(line from 1, row), or (line, why it is no row), of a JSONL or Parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet  # slow, and only needed here

        try:
            table = pyarrow.parquet.ParquetFile(path)
            columns = [name for name in table.schema_arrow.names if name not in UNUSED_COLUMNS]
            batches = table.iter_batches(batch_size=64, columns=columns)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
        except (OSError, ValueError) as error:  # pyarrow's errors are one or the other
            why = str(error).splitlines()[0]
            raise DataError(f"{path}: broken Parquet file ({why}); fetch it again") from error
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = f"not JSON: {error}"
            else:
                row = row if isinstance(row, dict) else "not a JSON object"
            yield number, row


def _read_hub(data: DataSet, split: str) -> Iterator[tuple[int, dict | str]]:
    """The same from the hub; DataError when it cannot be reached."""
    import datasets  # slow, and only needed here
    import huggingface_hub

    hub_split, file = data.splits[split]
    try:
        if hub_split is None:
            path = huggingface_hub.hf_hub_download(data.repo, file, repo_type="dataset")
            return _read_file(Path(path))
        rows = datasets.load_dataset(data.repo, data.config, split=hub_split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(
            f"the hub gives no {data.repo} ({why}); fetch its {file} where there is a network "
            f"and give the file instead: --data {Path(file).name}"
        ) from error
    unused = [name for name in rows.column_names if name in UNUSED_COLUMNS]
    return enumerate(rows.remove_columns(unused), 1)


def _recognise(row: dict | str) -> str | None:
    columns = set(row) if isinstance(row, dict) else set()
    fits = (form for form, (known, *_) in FORMATS.items() if any(c <= columns for c in known))
    return next(fits, None)


def _open(name_or_path: str | Path, split: str | None) -> tuple[Iterable, str, str]:
    """(rows, format, source) of a data set or a file."""
    data = DATASETS.get(str(name_or_path))
    if data:
        split = split or next(iter(data.splits))
        if split not in data.splits:
            raise DataError(f"{name_or_path} has no split {split}, only {', '.join(data.splits)}")
        return _read_hub(data, split), data.form, str(name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; data sets by name are: {', '.join(DATASETS)}")
    rows, head = _read_file(path), []
    for item in rows:  # up to the first row of a known format; the broken ones before it count
        head.append(item)
        form = _recognise(item[1])
        if form:
            return itertools.chain(head, rows), form, path.stem if form == "math" else form
    first = head[0][1] if head else "it is empty"
    first = f"columns {', '.join(first)}" if isinstance(first, dict) else first
    raise DataError(f"{path}: no usable row ({first}); give JSONL or Parquet of a raw format")


def _identified(rows: Iterable, form: str, source: str) -> Iterator[tuple[int, str, dict | str]]:
    """(line, task id, row); the line makes an id unique where a row's own id comes again."""
    used = set()
    for line, row in rows:
        own = [row.get(FORMATS[form][1]), row.get("id")] if isinstance(row, dict) else []
        own = [" ".join(str(x).split()) for x in own if isinstance(x, str | int)]
        task_id = f"{source}:{next(filter(None, own), line)}"
        while task_id in used:
            task_id += f"#{line}"
        used.add(task_id)
        yield line, task_id, row


# ------------------------------------------------------------------ loading


def normalise_text(text: str) -> str:
    r"""The text without what differs between two copies of one problem: case, spaces, dollar signs,
    LaTeX spacing and sizes, punctuation. Operators stay, for x+1 and x-1 are two problems.

    >>> normalise_text(r"If  $x=\dfrac{1}{2}\,y$."), normalise_text(r"if x=\frac12y")
    ('ifx=frac12y', 'ifx=frac12y')
    >>> normalise_text("x+1") == normalise_text("x-1")
    False
    """
    text = unicodedata.normalize("NFKC", text).casefold().replace("\u2212", "-")
    text = re.sub(r"\\(?:left|right|displaystyle|quad|[,;:! ])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return re.sub(r"[^\w+\-*/=<>^]|_", "", text)


def _left_out(form: str, row: dict, difficulty, level, dates) -> str | None:
    """The stated filter that leaves the row out, if one does."""
    if form == "math" and difficulty is not None:
        match = re.fullmatch(r"([0-8])/8", str(row.get("difficulty")))
        if not match:
            raise BadRow(f"the difficulty is {row.get('difficulty')!r}, not k/8")
        if not difficulty[0] <= int(match[1]) <= difficulty[1]:
            return f"difficulty outside {difficulty[0]}/8..{difficulty[1]}/8"
    if form == "apps" and level is not None and row.get("difficulty") != level:
        return f"not {level}"
    if form == "livecodebench" and dates is not None:
        day = str(row.get("contest_date"))[:10]  # text, or a datetime out of Parquet
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", day):
            raise BadRow(f"no contest_date: {row.get('contest_date')!r}")
        if not dates[0] <= day < dates[1]:
            return f"contest_date outside {dates[0]}..{dates[1]}"
    if form == "codecontests" and (row.get("input_file") or row.get("output_file")):
        return "reads or writes a file"
    return None


def _draw_tests(groups: list[list], fn_name: str | None, *, max_tests, key: str) -> dict:
    """At most max_tests pairs, earlier groups first, a seeded choice inside a group."""
    rng, drawn = random.Random(key), []
    for group in groups:
        room = len(group) if max_tests is None else max_tests - len(drawn)
        chosen = sorted(rng.sample(range(len(group)), min(room, len(group))))
        drawn += [group[i] for i in chosen]
    if not drawn:
        raise BadRow("no tests")
    if not all(isinstance(text, str) for pair in drawn for text in pair):
        raise BadRow("a test is not text")
    inputs, outputs = map(list, zip(*drawn, strict=True))
    if fn_name:
        for output in outputs:
            _check_json(output)
    return {"inputs": inputs, "outputs": outputs, "fn_name": fn_name}


def _make_task(form: str, row: dict, task_id: str, source: str, draw: Callable) -> Task:
    _, _, read = FORMATS[form]
    task = Task(id=task_id, source=source, **read(row, draw))
    try:
        json.dumps(vars(task), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a surrogate pair: no tokenizer takes it
        raise BadRow("the text is not valid Unicode") from error
    return task


def load(
    name_or_path: str | Path,
    split: str | None = None,
    *,
    difficulty: tuple[int, int] | None = None,
    level: str | None = "introductory",
    dates: tuple[str, str] | None = LCB_V6,
    keep: set[str] | None = None,
    exclude: Iterable[Task] = (),
    max_tests: int | None = None,
    seed: int = 0,
) -> tuple[list[Task], LoadReport]:
    """The tasks of a data set (a name of DATASETS) or of a file in a raw format, and the report.

    split       of a data set; by default its first. A file has none.
    difficulty  Polaris: keep k/8 with lowest <= k <= highest (7/8 is the hardest).
    level       APPS: keep this level; None keeps all.
    dates       LiveCodeBench: keep first day <= contest_date < last day; None keeps all.
    keep        the ids to keep, see read_ids().
    exclude     evaluation tasks: a row with the text of one (normalise_text) is left out.
    max_tests   at most so many tests a task; None keeps all. seed: of that choice.
    Raises DataError when nothing usable is left.
    """
    if max_tests is not None and max_tests < 1:
        raise DataError(f"max_tests is {max_tests}; give 1 or more, or None for all tests")
    rows, form, source = _open(name_or_path, split)
    held_out = {normalise_text(task.question) for task in exclude}
    tasks, report = [], LoadReport(source)
    for line, task_id, row in _identified(rows, form, source):
        report.rows += 1
        try:
            if isinstance(row, str):
                raise BadRow(row)
            reason = _left_out(form, row, difficulty, level, dates)
            if reason is None and keep is not None and task_id not in keep:
                reason = "not in the kept ids"
            draw = partial(_draw_tests, max_tests=max_tests, key=f"{seed}:{task_id!a}")
            task = None if reason else _make_task(form, row, task_id, source, draw)
        except (BadRow, RecursionError) as error:
            report.dropped.append((line, str(error)))
            continue
        if task is None:
            report.filtered[reason] += 1
        elif normalise_text(task.question) in held_out:
            report.overlap += 1
        else:
            tasks.append(task)
    report.tasks = len(tasks)
    if not tasks:
        found = " ".join(str(report).split())
        raise DataError(f"{name_or_path}: no usable row, check the filters and the file; {found}")
    return tasks, report


def golds(name_or_path: str | Path, split: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """(task id, its gold programs in Python 3) for every row that can be read, ids as in load().

    For the gold self-check: a row none of whose golds passes its own tests teaches nothing.
    HumanEval golds are whole programs. DataError for a format that has no gold programs.
    """
    rows, form, source = _open(name_or_path, split)
    if form not in ("apps", "codecontests", "humaneval"):
        raise DataError(f"{name_or_path}: {form} rows hold no gold programs; nothing to check here")
    identified = _identified(rows, form, source)
    return ((task_id, _programs(form, row)) for _, task_id, row in identified if type(row) is dict)


def _programs(form: str, row: dict) -> list[str]:
    try:
        if form == "humaneval":
            return [_text(row, "prompt") + _text(row, "canonical_solution")]
        found = _json(row, "solutions") if row.get("solutions") else []
        if form == "codecontests":
            pairs = zip(*_pairs(found, "language", "solution", "solutions"), strict=True)
            found = [program for language, program in pairs if language == 3]  # 1 is Python 2
    except BadRow:  # load() names what is wrong with the row
        return []
    return [p for p in found if isinstance(p, str)] if isinstance(found, list) else []


def read_ids(path: str | Path) -> set[str]:
    """The task ids in a file: one JSON list of strings, or one id a line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        ids = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a list of ids ({error})") from error
    if not all(isinstance(task_id, str) for task_id in ids):
        raise DataError(f"{path}: give one JSON list of strings, or one id a line")
    return {task_id.strip() for task_id in ids} - {""}


def load_evaluation(name_or_path: str | Path) -> tuple[list[Task], LoadReport]:
    """A data set or file to measure on: of a data set with a test split, that one."""
    has_test = name_or_path in DATASETS and "test" in DATASETS[name_or_path].splits
    return load(name_or_path, "test" if has_test else None)


def read_prompt(path: str | None) -> str | None:
    """The designer prompt in a file, None for None. DataError where it has no {question}."""
    if path is None:
        return None
    try:
        prompt = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--designer-prompt {path} can't be read: {error}") from error
    if "{question}" not in prompt:
        raise DataError(f"--designer-prompt {path} has no {{question}}: say where the task goes")
    return prompt


def data_names(data: str) -> list[str]:
    """The data sets and files of a list with commas; a file's own name may hold one.

    >>> data_names("aime24, rows.jsonl"), data_names("")
    (['aime24', 'rows.jsonl'], [])
    """
    names = [data] if Path(data).is_file() else data.split(",")
    return [name.strip() for name in names if name.strip()]


# ------------------------------------------------------------------ the mix of a training step


def parse_mix(text: str) -> dict[str, int | None]:
    """A mix as one writes it: names or files, each with its tasks a step; None where one has all.

    Raises DataError. The last = counts, so a file name may hold one, but no comma.

    >>> parse_mix("polaris=4,runs/k=1/rows.jsonl=2"), parse_mix("rows.jsonl")
    ({'polaris': 4, 'runs/k=1/rows.jsonl': 2}, {'rows.jsonl': None})
    """
    parts = [part.strip() for part in text.split(",")]
    matches = [re.fullmatch(r"(.+)=(\d+)", part, re.ASCII) for part in parts]
    if matches == [None] and text.strip():
        return {text.strip(): None}
    mix = {match[1].strip(): int(match[2]) for match in matches if match}
    if not all(matches) or len(mix) < len(parts) or not all(mix.values()):
        raise DataError(
            f"the mix {text!r} can't be read: give NAME or FILE, or several, each once and with "
            "its tasks a step: polaris=4,apps=2,codecontests=2"
        )
    return mix


def load_mix(
    mix: Mapping[str, int | None],
    *,
    exclude: Iterable[Task] = (),
    difficulty: tuple[int, int] | None = None,
    keep: str | Path | None = None,
    max_tests: int | None = None,
    seed: int = 0,
) -> tuple[dict[str, list[Task]], list[LoadReport]]:
    """The tasks of each name or file of a mix, for `step_tasks`, and their reports.

    exclude, difficulty, max_tests, seed: as in `load`; give `exclude` all evaluation tasks. A
    difficulty asks for it in every math row, not only in those of Polaris.
    keep: a file of kept ids (`read_ids`). It filters the sources of which it names a task, so that
      the golds of one can be checked and those of another left alone.
    Raises DataError, also for HumanEval and if two sources share an id.
    """
    kept = read_ids(keep) if keep else set()
    if keep and not kept:
        raise DataError(f"{keep} has no ids: nothing would be kept")
    exclude, sources, reports, owners, filtered = list(exclude), {}, [], {}, set()
    for name in mix:
        source = name if name in DATASETS else _open(name, None)[2]
        mine = {task_id for task_id in kept if task_id.startswith(f"{source}:")}
        filtered |= mine
        sources[name], report = load(
            name,
            difficulty=difficulty,
            keep=mine or None,
            exclude=exclude,
            max_tests=max_tests,
            seed=seed,
        )
        reports.append(report)
        _refuse_checks(sources[name])
        for task in sources[name]:
            if owners.setdefault(task.id, name) != name:
                raise DataError(
                    f"{owners[task.id]} and {name} both have a task {task.id}: rename a file, or "
                    "give only one of them"
                )
    if kept - filtered:
        stray = min(kept - filtered)
        raise DataError(f"{keep} keeps {stray}, and the mix has no such source: {', '.join(mix)}")
    return sources, reports


def _refuse_checks(tasks: Iterable[Task]) -> None:
    if any("check" in (task.tests or {}) for task in tasks):
        raise DataError("HumanEval rows are for evaluation only: train on tasks with tests")


def step_tasks(
    sources: Mapping[str, Sequence[Task]],
    step: int,
    seed: int = 0,
    mix: Mapping[str, int] | None = None,
) -> list[Task]:
    """The tasks of a step: a pure function, so a resumed run needs nothing but the step.

    mix: source -> tasks a step (DEFAULT_MIX). Each source runs through its own epochs, reshuffled
    each time: with n tasks and c a step an epoch is n // c steps, without a repeat; the n % c tasks
    left over are others in the next epoch. 53,291 Polaris tasks at 4 a step are an epoch of 13,322
    steps. The kinds are spread evenly, so that the stretches of ranks are alike: 4 + 2 + 2 lie as
    m a c m m a c m.

    >>> tasks = {"m": [Task(f"m{i}", "math", "?") for i in range(5)],
    ...          "c": [Task(f"c{i}", "code", "?") for i in range(2)]}
    >>> [t.kind for t in step_tasks(tasks, 0, mix={"m": 2, "c": 1})]
    ['math', 'code', 'math']
    >>> epoch = [t.id for s in (0, 1) for t in step_tasks(tasks, s, mix={"m": 2})]
    >>> len(set(epoch)), epoch[2:] == [t.id for t in step_tasks(tasks, 1, mix={"m": 2})]
    (4, True)
    """
    mix = DEFAULT_MIX if mix is None else mix
    places = []
    for source, count in mix.items():
        tasks = sources.get(source, ())
        if not 0 < count <= len(tasks):
            raise DataError(f"{source} has {len(tasks)} tasks, not {count} a step: change the mix")
        epoch, turn = divmod(step, len(tasks) // count)
        order = random.Random(f"{seed}:{source}:{epoch}").sample(range(len(tasks)), len(tasks))
        drawn = order[turn * count : (turn + 1) * count]
        places += [((j + 0.5) / count, tasks[i]) for j, i in enumerate(drawn)]
    batch = [task for _, task in sorted(places, key=lambda place: place[0])]
    _refuse_checks(batch)
    return batch


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one line, and exits with 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message} (--help explains all flags)\n")


def main() -> None:
    parser = OneLineParser(description="Load a data set or a file and say what is in it.")
    parser.add_argument("data", help=f"a file, or one of: {', '.join(DATASETS)}")
    parser.add_argument("--split", help="train, valid or test; default: the data set's first")
    args = parser.parse_args()
    try:
        tasks, report = load(args.data, args.split)
    except DataError as error:
        parser.error(str(error))
    print(report)
    for task in tasks[:2]:
        print()
        for name, value in vars(task).items():
            print(f"{name:>9}: {str(value)[:300]!r}")


if __name__ == "__main__":
    main()
