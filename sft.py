"""Cold start: collect correct traces from a teacher, then imitate them.

The idea. RL can only choose among what the model already does. So first a teacher designs and
executes, through the same `rollout` that RL uses, and the model imitates what *worked*: a trace
(one design, the calls of its one execution) is kept if and only if its reward is 1. The teacher
need not be good, only right sometimes; the verifier does the filtering.

    tasks -> rollout(teacher, 1 design, 1 execution) -> reward 1? -> one designer example,
                                                                     one executor example a call

The loss is the mean cross-entropy over response tokens, prompts carry none:

    loss = - sum over response tokens of logp / n_tokens        n_tokens: of the whole update

Worked number: two responses with token probabilities (1/2, 1/4) and (1/8): the loss is
(ln 2 + ln 4 + ln 8) / 3 = 2 ln 2, not the mean of the two responses' means, 2.25 ln 2:

    >>> logp = torch.tensor([[0.5, 0.25], [0.125, 0.9]]).log()
    >>> mask = torch.tensor([[True, True], [True, False]])
    >>> round(supervised_loss(logp, mask, 3).item() / math.log(2), 4)
    2.0

Filtering also tilts the choice of designs: a structure that works more often is kept more often.
With success .6 and .2 and both drawn half of the time, the kept share is .6 / (.6 + .2) = 75 %.

Where it differs from the paper: there the teacher is DeepSeek-V3.2 (3K designer and 8K executor
traces); the embedded toy has a programmatic one (toy.py). The training loop is train.py's.
Source: MetaAgent-X (arXiv 2605.14212), supervised cold start.

    python -m doctest sft.py
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from data import DataError
from execute import Rollout, rollout


@dataclass(frozen=True, slots=True)
class Example:
    """What was asked, and the reply to imitate."""

    messages: list[dict]
    response: str


@dataclass(frozen=True, slots=True)
class EncodedExample:
    """An example as token ids, with the fields that grpo.pack reads. The reply ends with EOS."""

    prompt_ids: list[int]
    output_ids: list[int]
    logp_sampler: None = None
    finish_reason: str = "stop"


def examples_of(rollouts: Sequence[Rollout]) -> list[Example]:
    """The correct traces: for each execution of reward 1 its design's call and its own calls.

    A reply that ran into its token limit is left out: it has no end to imitate.
    """
    examples = []
    for rolled in rollouts:
        for design in rolled.designs:
            for execution in design.executions:
                if execution.reward < 1:
                    continue
                calls = ([design.call] if design.call else []) + execution.calls
                examples += [
                    Example(c.messages, c.text) for c in calls if c.finish_reason == "stop"
                ]
    return examples


def collect(
    tasks: Sequence,
    teacher,
    pool,
    score: Callable,
    *,
    batch: int = 256,
    first_task: int = 0,
    on_progress: Callable[[int, int, int], None] | None = None,
    **options,
) -> list[Example]:
    """One design and one execution a task by `teacher`, kept where correct.

    options: those of execute.rollout. first_task: the place of tasks[0] among all tasks, for the
    seeds. on_progress(tasks done, tasks, examples kept).
    """
    examples: list[Example] = []
    for start in range(0, len(tasks), batch):
        part = tasks[start : start + batch]
        plan = {"n_designs": 1, "n_executions": 1, "first_task": first_task + start}
        rolled = rollout(part, teacher, pool, score, **plan, **options)
        examples += examples_of(rolled)
        if on_progress:
            on_progress(start + len(part), len(tasks), len(examples))
    return examples


def read_examples(path: str | Path) -> list[Example]:
    """The examples of a JSONL file: {"messages": [{"role", "content"}, ...], "response": text}.

    Other fields of a line are for people and are not read. Raises DataError, in one line that
    names the first line that is not of this form.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                examples.append(read_example(line))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}, line {number}: {error!r}; a line is"
                    ' {"messages": [{"role": ..., "content": ...}], "response": ...}'
                ) from error
    if not examples:
        raise DataError(f"{path} holds no example: give one JSON object a line")
    return examples


def read_example(line: str) -> Example:
    """One line of the file. Raises ValueError, KeyError or TypeError where it is of another form.

    >>> read_example('{"messages": [{"role": "user", "content": "2+2"}], "response": "4"}').response
    '4'
    """
    row = json.loads(line)
    messages = [{part: turn[part] for part in ("role", "content")} for turn in row["messages"]]
    texts = [row["response"], *(text for turn in messages for text in turn.values())]
    if not messages or not all(isinstance(text, str) for text in texts):
        raise TypeError("texts must be strings, and there must be a message")
    return Example(messages, row["response"])


def encode(
    examples: Sequence[Example], tokenizer, *, max_context: int, chat_kwargs: dict | None = None
) -> list[EncodedExample]:
    """Examples -> ids, through the engine's chat template; those too long are left out."""
    encoded = []
    for example in examples:
        prompt_ids = tokenizer.apply_chat_template(
            example.messages, add_generation_prompt=True, return_dict=False, **(chat_kwargs or {})
        )
        output_ids = tokenizer(example.response, add_special_tokens=False).input_ids
        output_ids = [*output_ids, tokenizer.eos_token_id]
        if len(prompt_ids) + len(output_ids) <= max_context:
            encoded.append(EncodedExample(list(prompt_ids), output_ids))
    return encoded


def supervised_loss(logp: torch.Tensor, mask: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """logp, mask: [B, T]; -(masked sum of logp) / n_tokens, a scalar. Micro-batches add up."""
    return -torch.where(mask, logp, logp.new_zeros(())).sum() / n_tokens


def batches(n: int, batch: int, steps: int, seed: int) -> Iterator[list[int]]:
    """`steps` lists of `batch` indices below n; every epoch is a new order of all of them.

    What is left at the end of an epoch opens the next one. `batch` may exceed n.

    >>> [sorted(rows) for rows in batches(2, 3, 2, seed=0)][1] in ([0, 0, 1], [0, 1, 1])
    True
    """
    rng, left = random.Random(seed), []
    for _ in range(steps):
        while len(left) < batch:
            left += rng.sample(range(n), n)
        yield left[:batch]
        del left[:batch]


def cosine(step: int, steps: int, warmup: int) -> float:
    """Factor on the learning rate: linear warm-up, then half a cosine down to 0.02.

    >>> [round(cosine(s, 100, 10), 3) for s in (0, 9, 55, 99)]
    [0.1, 1.0, 0.493, 0.02]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup + 1) / max(1, steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
