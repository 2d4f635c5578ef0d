r"""reward.py - is this answer right? A verifier for math, a judge for code.

THE IDEA
    The reward is correctness and nothing else: 1 or 0 for math, all tests (or the share of them)
    for code. A grader that can be fooled, stalled or killed ruins a run without a sound, so each
    half of this file is built around one rule.

    >>> math_reward(r"First \boxed{12}, no: \boxed{15}, so \boxed{12}.", "12")
    1.0
    >>> math_equal("541", "540"), math_equal("0.5", r"\frac{1}{2}")
    (False, True)

MATH: exact and cheap first; algebra last, and only in a process that may be killed
    1. The answer is the last `\boxed{...}`. `math_reward` pays nothing without one.
    2. Equal text, integers, decimals and fractions are decided here, exactly, in microseconds.
    3. All else goes to a worker as one JSON line, {"prediction", "gold", "tolerance", "cpu_s"}, and
       comes back as 1 or 0. The worker gives both sides one spelling (`_clean`), takes them apart
       (lists, sets, tuples, equations, units; `_same`) and compares the pieces: math-verify's
       parser, then evaluation to 50 digits, at sample points if there are variables. What that
       leaves open (matrices, inequalities, unions) goes to `math_verify.verify`.
    Workers are started when needed, at most one a core, and kept. Each has a memory limit and 3 s
    of CPU time an answer, which the kernel enforces, so C code and a dead host make no difference.
    A worker that breaks a limit or dies is replaced; its verdict is False and `counts()` tells.
    Threads would not do: sympy can hang in C code while it holds the interpreter's lock.

    DIFFERENT from plain math-verify: that joins boxes that stand close, takes `5=6` for 6, drops
    letters as units (`6m` for 6), compares 15 places after the point (1/2006! for 1/2004!), and
    power towers hang it. On AIME 2024 and 200 rows of MATH-500 this file judged 5 times as many
    pairs a CPU second (tests/bench_reward.py).
    DIFFERENT from the reference implementation: it accepts an error of 0.5 % (541 for 540) and
    drops repeated boxes before it takes the last (12, 15, 12 gives 15).

CODE: the host compares
    Only a test's input enters the sandbox; the expected output never does. Each test is one fresh
    fork, and its verdict comes from comparing what came back, never from what the program says
    about itself. Zero tests is never a pass. Floats have a tolerance of 1e-6, and only where a
    float is expected: 50000000000000000 is not 50000000000000001.

NOT COVERED
    Prose: a text answer counts if its words are the gold's. Radians against degrees, unit
    conversion, decimal commas and problems that need their own checker count as wrong. The table
    POLICY in tests/test_reward_math.py has every such choice. Without a fork server (Windows)
    nothing here runs.

TRY IT
    python reward.py                        a few answers of each kind, judged
    python tests/bench_reward.py FILE...    speed and disagreements against plain math-verify
"""

import atexit
import contextlib
import json
import logging
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import sandbox

MAX_ANSWER = 10_000  # characters; a longer gold is unusable, a longer answer wrong
MAX_DEPTH = 12  # nested brackets of what the parser gets; it takes seconds beyond
MAX_PARENTHESES = 100  # nested around an answer
MAX_LEAF = 1_000  # characters that the parser is given at once
MAX_ITEMS = 64  # of an unordered list: matching takes the square of it
MAX_DIGITS = 20_000  # of a number on the way; more is a power tower or the like
MATH_CPU_S = 3.0
MATH_WALL_S = 30.0  # a backstop: on a busy machine a short one would make right answers wrong
MATH_MEMORY_MB = 2048  # of address space, and on Linux only
START_S = 120.0  # importing sympy takes a second or two, or much longer on a cold disk


# ------------------------------------------------------------------ the answer in a response

# A backslash escapes what follows, but `\\boxed` (a response that escapes too much) is still a box.
_BRACES = re.compile(r"\\boxed\s*\{|\\[{}\\](?!boxed)|[{}]")


def extract_answer(response: str) -> str | None:
    r"""What the last complete `\boxed{...}` holds; None without one. One pass, any length.

    >>> extract_answer(r"\boxed{3}, or rather \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    >>> extract_answer(r"\boxed{\boxed{5}}"), extract_answer(r"\boxed{}"), extract_answer("5")
    ('5', '', None)
    """
    if "\\boxed" not in response:
        return None
    opened: list[int] = []  # where the content of a box starts, or -1 for any other brace
    start, end = -1, None
    for match in _BRACES.finditer(response):
        token = match.group()
        if token == "{":
            opened.append(-1)
        elif token.startswith("\\boxed"):
            opened.append(match.end())
        elif token == "}" and opened:
            inner = opened.pop()
            if inner > start:
                start, end = inner, match.start()
    return None if end is None else response[start:end].strip()


# ------------------------------------------------------------------ plain numbers, exactly

_INTEGER = re.compile(r"([+-]?)(\d+|[1-9]\d{0,2}(?:,\d{3})+)", re.ASCII)
_DECIMAL = re.compile(
    r"[+-]?(?:(?:\d+|[1-9]\d{0,2}(?:,\d{3})+)\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?",
    re.ASCII | re.IGNORECASE,
)
_RATIO = re.compile(
    r"([+-]?)\\[dt]?frac\{([+-]?\d+)\}\{([+-]?\d+)\}|([+-]?\d+)/([+-]?\d+)", re.ASCII
)


def _bare(text: str) -> str:
    return text.lstrip(" \t\r\n$").rstrip(" \t\r\n$.")


def _integer(text: str) -> str | None:
    """Sign and digits of an integer of any length; as text, for `int` takes quadratic time.

    >>> _integer("025"), _integer("-1,234."), _integer("-0"), _integer("12,34"), _integer("1.0")
    ('25', '-1234', '0', None, None)
    """
    match = _INTEGER.fullmatch(_bare(text))
    if match is None:
        return None
    digits = match[2].replace(",", "").lstrip("0")
    return ("-" if match[1] == "-" else "") + digits if digits else "0"


def _rational(text: str) -> Fraction | None:
    r"""The exact value of an integer, a decimal, `a/b` or `\frac{a}{b}`.

    >>> _rational("-.5"), _rational(r"-\frac{1}{-2}"), _rational("1/0"), _rational("x")
    (Fraction(-1, 2), Fraction(1, 2), None, None)
    """
    text = _bare(text)
    if len(text) > 400:
        return None
    if whole := _integer(text):
        return Fraction(whole)
    if _DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    match = _RATIO.fullmatch(text)
    if match is None:
        return None
    top, bottom = int(match[2] or match[4]), int(match[3] or match[5])
    return Fraction(-top if match[1] == "-" else top, bottom) if bottom else None


def _last_place(text: str) -> Fraction | None:
    """One unit in the last place of a decimal of six or more significant digits, else None."""
    match = re.fullmatch(r"[+-]?(\d*)\.(\d+)", _bare(text), re.ASCII)
    if match is None or len((match[1] + match[2]).lstrip("0")) < 6:
        return None
    return Fraction(1, 10 ** len(match[2]))


def _close(prediction: str, gold: str, tolerance: float | None) -> bool | None:
    r"""Are two plain numbers equal? None if one of them is none.

    Exactly, with one exception: a decimal of six or more digits may stand for a number that no
    decimal can write. 0.333333 is 1/3, but 0.33 is not, and 0.999999 is not 1.

    >>> _close("0.333333", r"\frac{1}{3}", None), _close("0.999999", "1", None)
    (True, False)
    >>> _close("4.3", "4.2", 0.1), _close("4.31", "4.2", 0.1), _close("x", "1", None)
    (True, False, None)
    """
    a, b = _rational(prediction), _rational(gold)
    if a is None or b is None:
        return None
    if tolerance is not None:
        return abs(a - b) <= Fraction(str(tolerance))
    for text, exact in ((prediction, b), (gold, a)):
        place, bottom = _last_place(text), exact.denominator
        endless = pow(10, bottom.bit_length(), bottom) != 0  # has another prime than 2 and 5
        if place is not None and endless:
            return abs(a - b) < place
    return a == b


# ------------------------------------------------------------------ in the worker: normalising

# spelling -> the characters that are other spellings of it; then the same for commands
_CHARACTERS = {
    **{"-": "−–—‐‑", "/": "÷⁄∕", r"\cdot ": "·⋅∙", r"\times ": "×", r"\pm ": "±", r"\mp ": "∓"},
    **{r"\sqrt ": "√", r"\infty ": "∞", r"^\circ ": "°", r"\mathbb{R}": "ℝ", r"\emptyset ": "∅"},
    **{r"\le ": "≤", r"\ge ": "≥", r"\ne ": "≠", r"\in ": "∈", r"\cup ": "∪", r"\cap ": "∩"},
}
_CHARACTERS = str.maketrans({old: new for new, olds in _CHARACTERS.items() for old in olds})
_COMMANDS = {
    "": "left right displaystyle textstyle limits nolimits rm bf it big Big bigg Bigg bigl Bigl "
    "biggl Biggl bigm Bigm biggm Biggm bigr Bigr biggr Biggr",
    **{r"\frac": "dfrac tfrac cfrac", r"\binom": "dbinom tbinom", r"\emptyset ": "varnothing"},
    **{r"\le ": "leq leqslant", r"\ge ": "geq geqslant", "<": "lt", ">": "gt", " ": "quad qquad"},
    **{"|": "vert lvert rvert mid", "(": "langle", ")": "rangle", r"\{": "lbrace", r"\}": "rbrace"},
    '"degree"': "degree textdegree",
}
_COMMANDS = {old: new for new, olds in _COMMANDS.items() for old in olds.split()}


def _nfkc(text: str) -> str:
    return unicodedata.normalize("NFKC", text)


# (pattern, replacement) in the order of use; what NFKC would flatten (x² to x2) comes before it
_TYPOGRAPHY = [
    ('[\u200b-\u200f\u2060-\u2064\ufeff\u00ad\0"]', ""),
    (r"[\\\s]+$", ""),
    ("[⁰¹²³⁴-⁹⁺⁻⁽⁾ⁿ]+", lambda m: "^{" + _nfkc(m[0]) + "}"),
    ("[₀-₉₊₋₍₎]+", lambda m: "_{" + _nfkc(m[0]) + "}"),
    ("[¼-¾⅐-⅞]", lambda m: r" \frac{%s}{%s}" % tuple(_nfkc(m[0]).split("⁄"))),
    (r"√\s*(\d+)", r"\\sqrt{\1}"),
]
_WORD_MACRO = r"\\(?:text(?:bf|it|rm|sf|normal)?|mbox|math(?:rm|bf|it|sf)|boldsymbol|bm|fbox)\s*"
# Afterwards a double quote marks words: \text{ cm} is "cm". 1,\!234 and 10\,000 are whole numbers.
_LATEX = [
    (r"^\s*\*\*(.*?)\*\*\s*$", r"\1"),
    (r"(?<=\d)(?:\{,\}|,\s*\\!\s*|\\[, ]|\s)(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\[\[\]()]|\\?[$€£]", ""),
    (r"(?<!\\)\\[,;:!> ]|~", " "),
    (r"\\([a-zA-Z]+)", lambda m: _COMMANDS.get(m[1], m[0])),
    (r"<=|>=|(?<= )!=", lambda m: {"<": r"\le ", ">": r"\ge ", "!": r"\ne "}[m[0][0]]),
    (r"\\\{\s*\\\}", r"\\emptyset"),
    (r"\\mathbb\s*\{?\s*R\s*\}?|\ball real numbers\b", r"(-\\infty,\\infty)"),
    (r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?[|:](.*)\\\}", r"\1"),  # {x | x > 2}
    (r"\^\s*\{?\s*\\circ\s*\}?", '"degree"'),
    (rf"\\%|(?:{_WORD_MACRO}\{{)?\s*\bper\s?cent(?:age)?\b\s*\}}?", "%"),
    (r",?\s*(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ","),
    (r"^([A-Z])(?=\([^()]*,[^()]*\)$)", r"\1="),  # the point E(2,3)
    (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\math(?:rm|bf|it|sf)\s*\{\s*([a-zA-Z])\s*\}", r"\1"),
    (_WORD_MACRO + r"\{([^{}\"\d]*[a-zA-Z][^{}\"]*)\}", r'"\1"'),
    (_WORD_MACRO + r"\{([^{}]*)\}", r"\1"),
    (r"(?<=\d)[eE]([+-]?\d+)(?!\w)", r"\\cdot 10^{\1}"),
    (r"(?<![\d./])(\d+) (\d+)/(\d+)(?![\d/])", r"\1\\frac{\2}{\3}"),
    (r"\\sqrt\s*\[([3579])\]\s*\{-([\d.]+)\}", r"(-\\sqrt[\1]{\2})"),
    (r"\*\*", "^"),
    (
        r"(?<![\\a-zA-Z])(sqrt|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|pi|theta|alpha"
        r"|beta|infty)(?![a-zA-Z])",
        r"\\\1 ",
    ),
    (r"(?<![\\a-zA-Z])(?:infinity|inf)(?![a-zA-Z])", r"\\infty "),
    (r"\\(begin|end)\{(?:[bpB]?matrix|smallmatrix|array)\}(?:\{[lcr|]*\})?", r"\\\1{pmatrix}"),
]
_TYPOGRAPHY = [(re.compile(pattern), new) for pattern, new in _TYPOGRAPHY]
_LATEX = [(re.compile(pattern, re.ASCII), new) for pattern, new in _LATEX]

_TEX_ARGUMENT = re.compile(r"\s*([({]|\d|[a-zA-Z]|\\[a-zA-Z]+)")
_EXPONENT = re.compile(r"\s*([({]|[+-]?\d+|[+-][a-zA-Z])")


def _clean(text: str) -> str:
    r"""One spelling for what means the same.

    >>> _clean(r"\left( 3,\; \dfrac\pi2 \right)"), _clean("√12 × x²")
    ('( 3, \\frac{\\pi}{2} )', '\\sqrt{12} \\times x^{2}')
    """
    for pattern, new in _TYPOGRAPHY:
        text = pattern.sub(new, text)
    text = _nfkc(text.translate(_CHARACTERS))
    for pattern, new in _LATEX:
        text = pattern.sub(new, text)
    for command, count in (("\\frac", 2), ("\\binom", 2), ("\\sqrt", 1)):
        text = _brace(text, command, count, _TEX_ARGUMENT)
    return " ".join(_brace(text, "^", 1, _EXPONENT).split())


def _brace(text: str, command: str, count: int, argument: re.Pattern) -> str:
    r"""Gives a command's arguments their braces: \frac12, \sqrt(x+1), x^-1, 2^10."""
    at = text.rfind(command)
    while at >= 0:
        start, end, braced = at + len(command), at + len(command), ""
        for _ in range(count):
            match = argument.match(text, end)
            if match is None:
                break
            inside, end = match[1], match.end()
            if inside in ("(", "{"):
                close = _closing(text, match.start(1))
                if close is None:
                    break
                inside, end = text[end:close], close + 1
            braced += "{" + inside + "}"
        else:
            text = text[:start] + braced + text[end:]
        at = text.rfind(command, 0, at)
    return text


# ------------------------------------------------------------------ in the worker: structure

_TOKEN = re.compile(r'"[^"]*"|\\[a-zA-Z]+|\\.|.', re.DOTALL)
_OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}"}
_CLOSING = set(_OPENING.values())
_NUMERIC_COMMANDS = re.compile(r"\\(?:frac|binom|sqrt|cdot|times|pi|log|ln|sin|cos|tan|left|right)")
_SET_OR_MATRIX = re.compile(r"[<>]|\\(?:le|ge|ne|in|cap|setminus|mathbb|begin)(?![a-zA-Z])")
_RELATIONS = {"=", "<", ">", "\\le", "\\ge", "\\in"}


def _nesting(text: str) -> Iterable[tuple[str, int, int]]:
    """(token, its position, how many brackets are open around it)."""
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _CLOSING:
            depth -= 1
        yield token, match.start(), depth
        if token in _OPENING:
            depth += 1


def _depth(text: str) -> int:
    return max((depth for _, _, depth in _nesting(text)), default=0)


def _closing(text: str, start: int) -> int | None:
    """Where the bracket that opens at `start` closes; `[1,2)` closes too."""
    for token, at, depth in _nesting(text[start:]):
        if depth == 0 and token in _CLOSING:
            return start + at
    return None


def _split(text: str, separators: set[str]) -> tuple[list[str], list[str]]:
    """The parts of a text between separators outside all brackets, and these separators."""
    parts, found, start = [], [], 0
    for token, at, depth in _nesting(text):
        if depth == 0 and token in separators:
            parts.append(text[start:at].strip())
            found.append(token)
            start = at + len(token)
    return [*parts, text[start:].strip()], found


@dataclass(frozen=True)
class _Shape:
    """kind: leaf (one item), list, set, group (`mark`: its brackets), names (items: (name, value)),
    equation (items: left, right), never (equal to nothing)."""

    kind: str
    items: tuple = ()
    mark: str = ""


@lru_cache(maxsize=4096)
def _shape(text: str) -> _Shape:
    text = text.lstrip("= ").rstrip(" .,;:")
    if not text:
        return _Shape("never")
    if _rational(text) is not None:
        return _Shape("leaf", (text,))  # 1,234 is no list
    for separators in ({";"}, {",", "\\cup"}):
        parts = [part for part in _split(text, separators)[0] if part]
        if len(parts) > 1:
            return _listed(parts)
    if "\\pm" in text:
        plus = text.replace("\\pm", "+").replace("\\mp", "-")
        return _Shape("list", (plus, text.replace("\\pm", "-").replace("\\mp", "+")))
    opening = next(token for token, _, _ in _nesting(text))
    if opening in _OPENING:
        close = _closing(text, 0)
        if close is not None and close + len(_OPENING[opening]) >= len(text):
            return _bracketed(opening, text[len(opening) : close], text[close:])
    return _related(text)


def _listed(parts: list[str]) -> _Shape:
    """x=1, y=2 are names with values; x=1, x=2 is a list."""
    pairs = [_split(part, {"="})[0] for part in parts]
    if all(len(pair) == 2 and _is_name(pair[0]) for pair in pairs):
        values = {_squash(name): value for name, value in pairs}
        if len(values) == len(pairs):
            return _Shape("names", tuple(values.items()))
    return _Shape("list", tuple(parts))


def _bracketed(opening: str, inside: str, closing: str) -> _Shape:
    if opening == "{":
        return _shape(inside)
    items = tuple(part for part in _split(inside, {","})[0] if part)
    if opening == "\\{":
        return _Shape("set", items)
    if len(items) < 2 and (opening == "(" or inside.startswith("\\begin")):
        return _shape(inside)
    return _Shape("group", items, opening + closing)


def _related(text: str) -> _Shape:
    """Equations, chains of them, ratios, membership."""
    parts, found = _split(text, _RELATIONS)
    if not found:
        terms = _split(text, {":"})[0]
        ratio = tuple(rf"\frac{{{term}}}{{{terms[-1]}}}" for term in terms[:-1])
        return _Shape("group", ratio, ":") if len(ratio) > 1 else _Shape("leaf", ratio or (text,))
    if set(found) == {"="}:
        numbers = not re.search("[a-zA-Z]", _NUMERIC_COMMANDS.sub("", text))
        checked = parts[:-1] if numbers else parts[1:-1]
        if not all(_same(part, parts[-1], None) for part in checked):
            return _Shape("never")  # 5=6, x=5=6
        if numbers:
            return _shape(parts[-1])
        left, right = parts[0], parts[-1]
        swap = _is_name(right) and not _is_name(left, may_add=True)  # 5=x
        return _Shape("equation", (right, left) if swap else (left, right))
    if found == ["\\in"] and _is_name(parts[0]):
        return _shape(parts[1])
    return _Shape("leaf", (text,))  # algebra knows inequalities, and that x < 2 is (-oo, 2)


def _is_name(text: str, *, may_add: bool = False) -> bool:
    r"""Is the left side of `...=5` a name for the answer? x, f(x), f(2), S_{ABC}, m_{\max}, AB:BC.

    With `may_add` also what a question may ask for: a+b, x^2+y^2; never 2x.
    """
    bare = re.sub(r"[_^](\{[^{}]*\}|.)|(?<=[a-zA-Z])\([^()]*\)", "", text)
    plain = not re.search(r"[+/^-]|\\frac|\\sqrt|\\cdot", text.replace("^{-1}", ""))
    return not re.search(r"\d", bare) and (may_add or plain)


def _squash(text: str) -> str:
    return re.sub('[ "]', "", text).rstrip(".,;:")


def _same(prediction: str, gold: str, tolerance: float | None) -> bool:
    """The comparison of two cleaned texts, by structure first."""
    if _squash(prediction) == _squash(gold):
        return True
    a, b = _shape(prediction), _shape(gold)
    kinds = {a.kind, b.kind}
    if "never" in kinds:
        return False
    if kinds == {"equation"}:
        return _same_equation(a.items, b.items, tolerance)
    if a.kind == "equation":
        return _is_name(a.items[0], may_add=True) and _same(a.items[1], gold, tolerance)
    if b.kind == "equation":
        return _is_name(b.items[0]) and _same(prediction, b.items[1], tolerance)
    if kinds == {"names"}:
        x, y = dict(a.items), dict(b.items)
        return x.keys() == y.keys() and all(_same(x[k], y[k], tolerance) for k in x)
    if kinds == {"leaf"}:
        return _same_leaf(a.items[0], b.items[0], tolerance)
    if "names" in kinds or kinds in ({"group"}, {"group", "list"}):
        same = _same_in_order(a, b, tolerance)
    else:
        same = "group" not in kinds and _same_in_any_order(a, b, tolerance)
    # unions, an interval against x != 3 and the like
    both = prediction + gold
    sets = "\\cup" in both or ("leaf" in kinds and _SET_OR_MATRIX.search(both))
    return bool(same or (sets and _algebra(prediction, gold, tolerance)))


def _same_in_order(a: _Shape, b: _Shape, tolerance) -> bool:
    """Tuples, intervals, ratios; also x=1, y=2 for (1, 2), and 1, 2 for (1, 2)."""
    x, y = (
        list(dict(shape.items).values()) if shape.kind == "names" else shape.items
        for shape in (a, b)
    )
    marks = {shape.mark for shape in (a, b) if shape.kind == "group"}
    fits = len(marks) < 2 and (a.kind == b.kind or marks <= {"()"}) and len(x) == len(y)
    return fits and all(_same(one, other, tolerance) for one, other in zip(x, y, strict=True))


def _elements(shape: _Shape) -> list[str]:
    if shape.kind == "leaf":
        text = shape.items[0]
        return text.split(",") if _integer(text) else [text]  # 100,200,300 among lists
    inner = [(_shape(item), item) for item in shape.items]
    return sum((_elements(s) if s.kind == "list" else [item] for s, item in inner), [])


def _same_in_any_order(a: _Shape, b: _Shape, tolerance) -> bool:
    """Lists with their repetitions; as soon as one side has braces, sets."""
    x, y = _elements(a), _elements(b)
    if max(len(x), len(y)) > MAX_ITEMS:
        return False
    if "set" in (a.kind, b.kind):
        pairs = [[_same(one, other, tolerance) for other in y] for one in x]
        return all(map(any, pairs)) and all(map(any, zip(*pairs, strict=True)))
    if len(x) != len(y):
        return False
    for one in x:
        match = next((other for other in y if _same(one, other, tolerance)), None)
        if match is None:
            return False
        y.remove(match)
    return True


def _same_equation(a: tuple, b: tuple, tolerance) -> bool:
    """x=..., twice: the right sides decide. Else one is a multiple of the other: -x=1, 2x+2=0."""
    (left, right), (gold_left, gold_right) = a, b
    if _squash(left) == _squash(gold_left):
        return _same(right, gold_right, tolerance)
    sides = [f"({x})-({y})" for x, y in (a, b)]
    return _algebra(*sides, tolerance, multiple=True)


# ------------------------------------------------------------------ in the worker: single values

_UNITS = """cm centimeter centimetre|mm millimeter millimetre|km kilometer kilometre|m meter metre
ml milliliter|l liter litre|ft foot feet|in inch inche|mi mile|yd yard|kg kilogram|g gram|lb pound
oz ounce|h hr hour|min minute|s sec second|mph|kmh kmph|deg degree|day|year|dollar|cent|unit
2 square sq|3 cubic cu"""
_UNIT_OF = {word: words.split()[0] for words in re.split("[|\n]", _UNITS) for word in words.split()}
_BARE_WORDS = re.compile(r"(.*[\d})])(\s*)([a-zA-Z][a-zA-Z ./]*(?:\^\{\d\})?)", re.ASCII)
_QUOTED_WORDS = re.compile(r'([^"]*[^\s"/])\s*((?:/?\s*"[^"]*"\s*(?:\^\{?\d\}?)?\s*)+)')
_BASE = re.compile(r"([0-9A-Z]+)\s*_\s*\{?\s*(\d+)\s*\}?", re.ASCII)
_CHOICE = re.compile(r'"?\s*\(?([A-H])[).:]+\s*"?\s*(.+)')


def _unit(text: str, *, loose: bool) -> tuple[str, str]:
    r"""A value and the words after it. `loose`: `5 m` is five metres too, not five times m.

    >>> _unit('5 "cm"^{2}', loose=False), _unit("5 m", loose=False), _unit("5 m", loose=True)
    (('5', '"cm"^{2}'), ('5 m', ''), ('5', 'm'))
    """
    if text.endswith("%"):
        return text[:-1].strip(), "%"
    if match := _QUOTED_WORDS.fullmatch(text):
        in_degrees = match[2].strip() == '"degree"' and re.search(r"\\(sin|cos|tan|cot)", text)
        return (text, "") if in_degrees else (match[1], match[2])
    if match := _BARE_WORDS.fullmatch(text):
        word = re.match("[a-zA-Z]+", match[3])[0].lower()
        known = len(word) > 3 or (word.rstrip("s") or word) in _UNIT_OF
        if known and (len(word) > 1 or (loose and match[2])):
            return match[1], match[3]
    return text, ""


def _unit_words(unit: str) -> set[str]:
    """
    >>> _unit_words("square feet") == _unit_words("ft^2"), _unit_words("cm^2") == _unit_words("cm")
    (True, False)
    """
    words = (word.rstrip("s") or word for word in re.findall(r"[a-z]+|\d", unit.lower()))
    return {_UNIT_OF.get(word, word) for word in words} - {"per", "unit"}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s.,;:!?'\"(){}]", text.casefold())


def _is_words(text: str) -> bool:
    """Text, or an expression? Four letters in a row are a word, `ab` is a product."""
    rest = text.replace('"degree"', " ")
    rest = re.sub(r"\\(?:begin|end|operatorname)\{\w+\}|\\[a-zA-Z]+|_\{[^{}]*\}", " ", rest)
    return '"' in rest or bool(re.search(r"[^\W\d_]{4,}", rest))


def _same_leaf(prediction: str, gold: str, tolerance: float | None) -> bool:
    if choice := _CHOICE.fullmatch(prediction):  # (B) 12
        if _words(gold) == _words(choice[1]):
            return True
        prediction = choice[2].strip()
    bases = [_BASE.fullmatch(side) for side in (prediction, gold)]
    if any(bases):  # 2516_8 is 2516_8 or 2516 without its base, but not 2516_7
        digits = [m[1] if m else side for m, side in zip(bases, (prediction, gold), strict=True)]
        return digits[0] == digits[1] and (not all(bases) or bases[0][2] == bases[1][2])
    prediction, unit = _unit(prediction, loose=True)
    gold, gold_unit = _unit(gold, loose=False)
    percent = (unit == "%") - (gold_unit == "%")
    if unit and gold_unit and _unit_words(unit) != _unit_words(gold_unit):
        return False
    if _is_words(prediction) or _is_words(gold):
        return _words(prediction) == _words(gold) != []
    close = _close(prediction, gold, tolerance)
    if percent and not close and (a := _rational(prediction)) is not None:
        b = _rational(gold)
        return b is not None and (a / 100 == b if percent > 0 else a == b / 100)
    return _algebra(prediction, gold, tolerance) if close is None else close


# ------------------------------------------------------------------ in the worker: algebra


def _exact_decimal(match: re.Match) -> str:
    r"""0.25 -> \frac{25}{100}, 0.1\overline{6} -> \frac{16-1}{90}: floats would round."""
    whole, fixed, repeated = match[1], match[2], match[3] or ""
    bottom = 10 ** len(fixed) * (10 ** len(repeated) - 1 if repeated else 1)
    top = int(whole + fixed + repeated or 0) - (int(whole + fixed or 0) if repeated else 0)
    return r"\frac{%d}{%d}" % (top, bottom)


@lru_cache(maxsize=4096)
def _parse(text: str):
    """A sympy object, unevaluated. Raises ValueError, or whatever the parser raises."""
    from latex2sympy2_extended import latex2sympy
    from sympy import I

    text = text.replace('"degree"', r"\cdot\frac{\pi}{180}")
    odd = re.search(r"(?<![_\d])\d+\s+\d|['\"%#]", text)
    if odd or len(text) > MAX_LEAF or _depth(text) > MAX_DEPTH:
        raise ValueError("no expression")
    text = re.sub(
        r"(\d+(?=\.)|(?=\.\d))\.(\d*)(?:\\(?:overline|dot)\{(\d+)\})?",
        _exact_decimal,
        text,
        flags=re.ASCII,
    )
    # the parser takes R and r for one symbol, so R becomes r with a hat
    text = re.sub(
        r"\\[a-zA-Z]+|[A-Z]",
        lambda m: m[0] if m[0][0] == "\\" else rf"\hat{{{m[0].lower()}}}",
        text,
    )
    tree = latex2sympy(text, is_real=True, convert_degrees=False, normalization_config=None)
    return tree.xreplace({symbol: I for symbol in tree.free_symbols if symbol.name == "i"})


def _size(tree) -> float:
    """An upper bound of log10 of a subtree's value, symbols taken as 10; OverflowError early."""
    import sympy

    sizes = [_size(part) for part in tree.args]
    if tree.is_Rational:
        size = max(abs(tree.p), tree.q).bit_length() * 0.302
    elif isinstance(tree, sympy.Pow):
        size = sizes[0] * 10 ** min(sizes[1], 9)
    elif isinstance(tree, sympy.factorial | sympy.binomial | sympy.gamma | sympy.exp):
        size = 10 ** min(sizes[0], 9) * sizes[0]
    elif isinstance(tree, sympy.Sum | sympy.Product) and max(sizes[1:]) > 5:
        raise OverflowError("a long sum")
    else:
        size = max(sizes) + 1 if sizes else 1.0
    if size > MAX_DIGITS:
        raise OverflowError("a huge number")
    return size


def _algebra(prediction: str, gold: str, tolerance: float | None, *, multiple=False) -> bool:
    """Equal by evaluation, else by math-verify; False if a side cannot be parsed or evaluated.

    `multiple`: may one be a constant multiple of the other (two equations, each as left - right)?
    """
    from math_verify import verify
    from sympy import Expr

    try:
        a, b = _parse(prediction), _parse(gold)
        if all(isinstance(side, Expr) and not side.is_Matrix for side in (a, b)):
            _size(a), _size(b)
            symbols = sorted(a.free_symbols | b.free_symbols, key=str)
            if not symbols:
                return _same_number(a.doit(), b.doit(), (prediction, gold), tolerance)
            verdict = _same_function(a, b, symbols, multiple)
            if verdict is not None:
                return verdict
        if multiple:
            return False
        return verify(b, a, allow_set_relation_comp=True, timeout_seconds=None)
    except Exception:  # noqa: BLE001 - latex2sympy raises bare Exceptions; this is a child process
        return False


def _same_number(a, b, texts: tuple[str, str], tolerance: float | None) -> bool:
    """Exact if both are rational, else to 40 of 50 digits, or within a decimal's last place."""
    if (tolerance is None and a.is_Rational and b.is_Rational) or a.is_infinite or b.is_infinite:
        return a == b
    x, y = a.evalf(50), b.evalf(50)
    scale = max(abs(x), abs(y))
    # a zero in disguise comes out as something tiny without one digit of precision
    zero = scale < 10**-45 and any(getattr(value, "_prec", 0) == 1 for value in (x, y))
    allowed = scale if zero else scale * 10**-40
    if tolerance is not None:
        allowed = tolerance
    elif not (a.is_Rational and b.is_Rational):
        allowed = max([allowed, *filter(None, map(_last_place, texts))])
    return bool(abs(x - y) <= allowed)


def _same_function(a, b, symbols: list, multiple: bool) -> bool | None:
    """Equal at sample points where all is real; None if there are fewer than three such points.

    Real points of both signs, so that x is not |x|; whole ones where a floor, a factorial or a sum
    says that the variable is whole.
    """
    import random

    import sympy

    pair = sympy.Tuple(a, b)
    rounded = pair.atoms(sympy.floor, sympy.ceiling)
    integers = pair.has(sympy.factorial, sympy.binomial, sympy.Sum, sympy.Product)
    integers |= bool(rounded) and not any(part.args[0].is_Symbol for part in rounded)
    powers = pair.atoms(sympy.Pow, sympy.log)
    roots = [part for part in powers if not (part.is_Pow and part.exp.is_Integer)]
    draw, values = random.Random(0), []
    for trial in range(10):
        numbers = [sympy.Rational(draw.randint(1, 1000), 97) for _ in symbols]
        if integers:
            numbers = [sympy.Integer(draw.randint(2, 12)) for _ in symbols]
        elif trial % 2:
            numbers = [number * draw.choice((-1, 1)) for number in numbers]
        point = dict(zip(symbols, numbers, strict=True))
        x, y = (side.xreplace(point).doit().evalf(50) for side in (a, b))
        parts = (x, y, *(root.xreplace(point).evalf(15) for root in roots))
        real = pair.has(sympy.I) or all(part.is_real for part in parts)
        if not (real and x.is_number and x.is_finite and y.is_number and y.is_finite):
            continue
        values.append((x, y))
        if multiple and min(abs(x), abs(y)) < 10**-30:
            return False
        left, right = (x * values[0][1], y * values[0][0]) if multiple else (x, y)
        if abs(left - right) > 10**-30 * max(abs(left), abs(right), 10**-9):
            return False
    return True if len(values) > 2 else None


# ------------------------------------------------------------------ the worker process


def _compare(request: dict) -> bool:
    prediction, gold = _clean(request["prediction"]), _clean(request["gold"])
    deep = max(_depth(prediction), _depth(gold)) > MAX_PARENTHESES
    return not deep and _same(prediction, gold, request["tolerance"])


def _worker() -> None:
    """Answers requests on descriptor 0 until the host's end closes.

    The default action of the CPU timer's signal ends the process even inside C code, and even when
    the host is gone.
    """
    channel = socket.socket(fileno=os.dup(0))
    if sys.platform == "linux":
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MATH_MEMORY_MB << 20
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.set_int_max_str_digits(0)
    logging.disable(logging.CRITICAL)
    # the first parse builds the grammar's tables, which takes longer than any parse after it
    _algebra(r"\frac{x+1}{2}-\sqrt{2}", r"(1,2]\cup\{3\}", None)
    with contextlib.suppress(ConnectionError):  # the host is gone
        channel.sendall(b"ready\n")
        for line in channel.makefile("rb"):
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_PROF, request["cpu_s"])
            equal = _compare(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            channel.sendall(b"1\n" if equal else b"0\n")


class _Worker:
    """The host's side of one worker process."""

    def __init__(self):
        self.channel, theirs = socket.socketpair()
        self.answers, self.timed_out = self.channel.makefile("rb"), False
        path = os.pathsep.join(filter(None, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--math-worker"],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # and none of the host's secrets
            start_new_session=True,  # Ctrl-C is the host's business
        )
        theirs.close()
        if self.ask(b"", START_S) != b"ready\n":
            self.close()
            raise sandbox.SandboxError(
                "the math worker did not start, see its message above; is math-verify installed? "
                "(pip install -r requirements.txt)"
            )

    def ask(self, line: bytes, wall_s: float) -> bytes:
        """The line that it answers; b"" if it died or the time is up: it is of no use then."""
        try:
            self.channel.settimeout(wall_s)
            self.channel.sendall(line)
            return self.answers.readline()
        except OSError as error:
            self.timed_out = isinstance(error, TimeoutError)
            return b""

    def close(self) -> str:
        """Ends the process; what it ended of, as `counts` calls it."""
        self.answers.close()
        self.channel.close()
        if self.timed_out:
            self.process.kill()
        try:
            code = self.process.wait(1.0)  # with its channel closed it ends by itself
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return "math_limit" if self.timed_out or code == -signal.SIGPROF else "math_worker_died"


_idle: list[_Worker] = []
_slots = threading.BoundedSemaphore(sandbox.cores())
_lock = threading.Lock()
_counts = {"math_asked": 0, "math_limit": 0, "math_worker_died": 0, "math_unusable_gold": 0}


def _ask(request: dict) -> bool:
    """A worker's verdict. At most one worker a core, started when all others are busy, and kept."""
    line = json.dumps(request).encode() + b"\n"
    with _slots:
        try:
            worker = _idle.pop()
        except IndexError:
            worker = _Worker()
        verdict = None
        try:
            verdict = {b"1\n": True, b"0\n": False}.get(worker.ask(line, MATH_WALL_S))
        finally:  # after a KeyboardInterrupt too: nobody may read that answer later
            if verdict is None:
                _count(worker.close())
            else:
                _idle.append(worker)
    return bool(verdict)


def _count(name: str) -> None:
    with _lock:
        _counts[name] += 1


def counts() -> dict[str, int]:
    """Since the start: comparisons that needed a worker, how many of these ended at a limit or with
    the worker's death (both are False), and golds that were found unusable."""
    with _lock:
        return dict(_counts)


def close() -> None:
    """Ends the idle math workers; the next comparison starts new ones."""
    while _idle:
        _idle.pop().close()


def _forget_workers() -> None:
    """A forked child must not talk to its parent's workers."""
    global _idle, _slots, _lock
    _idle, _slots, _lock = [], threading.BoundedSemaphore(sandbox.cores()), threading.Lock()


atexit.register(close)
os.register_at_fork(after_in_child=_forget_workers)


# ------------------------------------------------------------------ math


def _answer(text: str) -> str:
    box = extract_answer(text)
    return text.strip() if box is None else box


def usable_gold(gold: str) -> bool:
    r"""May this gold be graded against? It has a letter or digit, its braces pair, and it is no
    longer than 10,000 characters unless it is an integer. Ask once after loading.

    >>> [usable_gold(gold) for gold in ("025", r"\{1,2\}", "", "$$", r"\frac{1}{", "x" * 10_001)]
    [True, True, False, False, False, False]
    """
    answer = _answer(gold)
    if not re.search(r"[^\W_]|∞|∅|\\\{\s*\\\}", answer):
        return False
    braces = re.findall(r"(?<!\\)[{}]", answer.replace("\\\\", ""))
    paired = braces.count("{") == braces.count("}")
    return _integer(answer) is not None or (len(answer) <= MAX_ANSWER and paired)


def usable_tasks(tasks: Iterable) -> tuple[list, list]:
    """(tasks that can be graded, math tasks whose gold can't)."""
    kept, bad = [], []
    for task in tasks:
        usable = task.kind != "math" or usable_gold(task.answer or "")
        (kept if usable else bad).append(task)
    return kept, bad


def _decide(given: str, gold: str, tolerance: float | None) -> bool | None:
    """`given` is the bare answer, `gold` the whole gold; see math_equal."""
    wanted = _answer(gold)
    if given == wanted and wanted:
        return True
    if tolerance is None:
        whole, gold_whole = _integer(given), _integer(wanted)
        if whole is not None and gold_whole is not None:
            return whole == gold_whole
    if not usable_gold(gold):
        _count("math_unusable_gold")
        return None
    if not given or max(len(given), len(wanted)) > MAX_ANSWER:
        return False
    close = _close(given, wanted, tolerance)
    if close is not None:
        return close
    _count("math_asked")
    request = {"prediction": given, "gold": wanted, "tolerance": tolerance, "cpu_s": MATH_CPU_S}
    return _ask(request)


def math_equal(prediction: str, gold: str, *, tolerance: float | None = None) -> bool | None:
    r"""Is the prediction the gold's answer? Each side is its last box, or the whole text without.

    None if the gold is unusable (see `usable_gold`) and neither equal text nor two integers settle
    the matter. `tolerance`: absolute, for numbers. Blocking and thread-safe; it takes 3 s of CPU
    time at most, and once some seconds for the start of a worker.

    >>> math_equal("025", "25"), math_equal("541", "540"), math_equal("1,234", "(1,234)")
    (True, False, False)
    """
    return _decide(_answer(prediction), gold, tolerance)


def math_reward(response: str, gold: str, *, tolerance: float | None = None) -> float | None:
    r"""1.0 or 0.0; 0.0 without a box; None if the gold is unusable. Otherwise as math_equal.

    >>> math_reward(r"\boxed{5}", "5"), math_reward("It is 5.", "5"), math_reward(r"\boxed{5}", "")
    (1.0, 0.0, None)
    """
    equal = _decide(extract_answer(response) or "", gold, tolerance)
    return None if equal is None else float(equal)


# ------------------------------------------------------------------ code

_FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})[ \t]*\{?\.?([\w+#-]*)(.*)")
_PYTHON = {"python", "python3", "py", "py3", "pypy", "pypy3", "python2"}


def extract_code(response: str) -> str:
    r"""The last Python block of a response, or its last block without a language; "" without one.

    After `</think>`, and inside the last `<solution>` if there is one (there it needs no fence). A
    block that the end of the text cuts off counts. A lone closing fence ends what stands before it.
    A fence is a line of its own: ``` inside of a line belongs to the program.

    >>> extract_code("```python\nprint(1)\n```\nOutput:\n```\n1\n```")
    'print(1)'
    >>> extract_code("def f():\n    return 1\n```"), extract_code("The answer is 1")
    ('def f():\n    return 1', '')
    """
    text = response.replace("\r\n", "\n").rpartition("</think>")[2]
    _, tag, solution = text.rpartition("<solution>")
    if tag:
        text = solution.partition("</solution>")[0]
    lines, blocks, fence, first = text.split("\n"), [], None, None
    for number, line in enumerate(lines):
        match = _FENCE.fullmatch(line)
        if fence is None and match:
            fence, first = match, number if first is None else first
            blocks.append((match[3].lower(), []))
        elif match and match[2].startswith(fence[2]) and not match[3] and not match[4].strip():
            fence = None
        elif fence:
            indent = len(fence[1])
            blocks[-1][1].append(line if line[:indent].strip() else line[indent:])
    if first is None:
        return text.strip("\n") if tag else ""
    if fence and len(blocks) == 1 and not blocks[0][0] and not "".join(blocks[0][1]).strip():
        return "\n".join(lines[:first]).strip("\n")
    for languages in (_PYTHON, {""}):
        for language, body in reversed(blocks):
            if language in languages:
                return "\n".join(body).strip("\n")
    return ""


@dataclass(frozen=True)
class CodeVerdict:
    """`per_test`: "ok" | "wrong" | "error" | "timeout" for each test that ran, in order.

    `total` counts all tests, also those that a stop at the first failure left out.

    >>> CodeVerdict(0, 0, []).ok
    False
    """

    passed: int
    total: int
    per_test: list[Literal["ok", "wrong", "error", "timeout"]]

    @property
    def ok(self) -> bool:
        return self.passed == self.total > 0


_FLOAT = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
TOLERANCE = 1e-6  # absolute or relative, only where a float is expected


def _same_stdout(given: str, expected: str) -> bool:
    r"""Token by token, line by line; blanks at the end of lines and of the output do not matter.

    >>> _same_stdout("1 2 \r\n3\n\n", "1 2\n3"), _same_stdout("1\n2", "1 2")
    (True, False)
    >>> [_same_stdout(given, "1.5") for given in ("1.5000001", "1.50", "nan", "1_000")]
    [True, True, False, False]
    >>> _same_stdout("50000000000000000", "50000000000000001"), _same_stdout("1.0", "1")
    (False, False)
    """
    lines, wanted = (
        [line.split() for line in text.rstrip().split("\n")] for text in (given, expected)
    )
    return len(lines) == len(wanted) and all(
        len(line) == len(other) and all(map(_same_token, line, other))
        for line, other in zip(lines, wanted, strict=True)
    )


def _same_token(given: str, expected: str) -> bool:
    if given == expected:
        return True
    floats = _FLOAT.fullmatch(given) and _FLOAT.fullmatch(expected)
    return bool(floats) and not expected.lstrip("+-").isdigit() and _near(given, expected)


def _near(given: str | float, expected: str | float) -> bool:
    x, y = float(given), float(expected)
    finite = math.isfinite(x) and math.isfinite(y)
    return finite and math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _refuse(constant: str):
    raise ValueError(f"{constant} is not JSON")


def _from_json(text: str):
    # int() refuses more than 4300 digits, so those stay text
    return json.loads(
        text,
        parse_constant=_refuse,
        parse_int=lambda digits: int(digits) if len(digits) < 4000 else digits,
    )


def _same_result(given: str | None, expected: str) -> bool:
    """Two JSON values: floats near, the rest equal. Raises ValueError if `expected` is not JSON.

    >>> _same_result("[0.30000000000000004, [1, 2]]", "[0.3, [1, 2]]"), _same_result("true", "1")
    (True, False)
    """
    wanted = _from_json(expected)
    try:
        return given is not None and _same_value(_from_json(given), wanted)
    except (ValueError, RecursionError, OverflowError):
        return False


def _same_value(given, expected) -> bool:
    if isinstance(expected, bool) or isinstance(given, bool):  # True == 1 in Python
        return given is expected
    if isinstance(expected, float):
        return isinstance(given, int | float) and _near(given, expected)
    if isinstance(expected, list) and isinstance(given, list):
        return len(given) == len(expected) and all(map(_same_value, given, expected))
    if isinstance(expected, dict) and isinstance(given, dict):
        same = (_same_value(given.get(key), value) for key, value in expected.items())
        return given.keys() == expected.keys() and all(same)
    return given == expected


def code_reward(
    program: str,
    tests: dict,
    *,
    stop_early: bool = False,
    cpu_s: float = 5.0,
    wall_s: float = 15.0,
    memory_mb: int = 1024,
) -> CodeVerdict:
    """Runs a program on every test, each in a fresh sandboxed process with its own limits.

    `tests`: {"inputs": [str], "outputs": [str], "fn_name": str | None}. Without fn_name an input is
    standard input and an output standard output; with it (call mode) an input holds one JSON value
    a line, one line an argument, and an output is one JSON value. `stop_early`: not on after the
    first failure, which is all that an all-or-nothing reward needs.

    Raises SandboxError if the sandbox itself fails, ValueError if the tests are malformed.
    """
    inputs, outputs, fn_name = tests["inputs"], tests["outputs"], tests.get("fn_name")
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs but {len(outputs)} outputs: drop this task")
    same = _same_result if fn_name else _same_stdout
    limits = {"cpu_s": cpu_s, "wall_s": wall_s, "memory_mb": memory_mb}
    per_test: list[str] = []
    for stdin, expected in zip(inputs, outputs, strict=True):
        run = sandbox.run_program(program, stdin, fn_name=fn_name, **limits)
        verdict = run.status
        if verdict == "ok" and not same(run.result if fn_name else run.stdout, expected):
            verdict = "wrong"
        per_test.append(verdict)
        if stop_early and verdict != "ok":
            break
    return CodeVerdict(per_test.count("ok"), len(inputs), per_test)


def run_asserts(program: str, check: str, **limits) -> bool:
    """HumanEval's form: do the asserts of `check` hold after the program? For evaluation only.

    The check runs in the program's own process, so a program that sets out to fool it can. It does
    have to reach the end: the last line defines a function, and only its result counts as a pass.
    `limits`: cpu_s, wall_s, memory_mb as in code_reward.
    """
    token = os.urandom(8).hex()
    source = f"{program}\n\n{check}\n\ndef checked_{token}():\n    return '{token}'\n"
    run = sandbox.run_program(source, fn_name=f"checked_{token}", **limits)
    return run.status == "ok" and run.result == f'"{token}"'


# ------------------------------------------------------------------ one number for a task


def score(task, response: str, *, code: Literal["all", "fraction"] = "all") -> float:
    """The reward of a response, 0 to 1. Blocking and thread-safe.

    task: any object with the fields of data.Task. A code task pays for passing all tests, or with
    code="fraction" for the share that it passes. Raises ValueError if the task cannot be scored.
    """
    if code not in ("all", "fraction"):
        raise ValueError(f"code must be 'all' or 'fraction', not {code!r}")
    if task.kind == "math":
        reward = math_reward(
            response, task.answer or "", tolerance=getattr(task, "tolerance", None)
        )
        if reward is None:
            raise ValueError(f"{task.id}: the gold is unusable, drop it with usable_gold()")
        return reward
    if "inputs" not in (task.tests or {}):
        raise ValueError(f"{task.id}: has no tests to score with (a check is for run_asserts only)")
    verdict = code_reward(extract_code(response), task.tests, stop_early=code == "all")
    return float(verdict.ok) if code == "all" else verdict.passed / max(verdict.total, 1)


def score_batch(pairs: Iterable, *, workers: int | None = None, **kw) -> list[float]:
    """`score` for many (task, response) pairs, in order, on all cores; at most `workers` at once.

    The first that raises ends the batch.
    """
    with ThreadPoolExecutor(workers or sandbox.cores()) as threads:
        return list(threads.map(lambda pair: score(*pair, **kw), pairs))


def _show() -> None:
    """A few answers of each kind, judged."""
    pairs = [("541", "540"), ("025", "25"), (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}")]
    pairs += [("5=6", "6"), ("2, -1", "-1,2"), ("y = -x/2 + 3/4", "2x+4y-3=0"), ("5 km", "5 m")]
    for prediction, gold in pairs:
        print(f"{prediction:>18}  for  {gold:<20} {math_equal(prediction, gold)}")
    sandbox.configure("best")
    tests = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"], "fn_name": None}
    for line in ("print(sum(map(int, input().split())))", "print(3)", "while True: pass"):
        print(f"{line:>40}  {code_reward(line, tests, cpu_s=1.0)}")


if __name__ == "__main__":
    _worker() if sys.argv[1:] == ["--math-worker"] else _show()
