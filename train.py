"""MetaAgent-X: one model learns by reinforcement to design multi-agent systems and to execute them.

    python train.py                            # preset toy: a laptop, minutes, all of this for real
    python train.py --help                     # every setting, with a line of help
    python train.py --train joint --model runs/toy/cold_start     # an ablation, from the same start
    python train.py --resume runs/toy          # go on after the last checkpoint

One step, in seven parts:

    1  tasks      B tasks
    2  rollout    M designs a task, N executions a design: rewards[B, M, N]        execute.py
    3  reward     a math verifier or unit tests: 0 or 1                           reward.py
    4  advantage  designer: a design's mean against the M designs of its task     advantage.py
                  executor: an execution against all executions of its task
    5  role       only one role's calls train in a stage of K steps               grpo.active_role
    6  loss       clipped, mean over all trained tokens of the update             grpo.policy_loss
    7  sync       the new weights go to the engine                              engine.load_weights

What holds the parts together, and where it differs from the reference implementation:

- The stage mask is hard. The other role's calls never pass through the model in training, and
  each role has its own AdamW over the shared weights (own moments, own bias correction, own
  warm-up). The reference keeps one Adam and a learning rate of 1e-9, so the "frozen" role still
  moves its moments.
- The token mean is one number for an update: sum over its trained tokens / n_tokens, however it
  is cut into micro-batches.
- `updates_per_step` = U cuts the calls of a step into U disjoint parts, one optimizer step
  each. At 1 the ratio is exactly 1 and the clip idle; then `logp_old` is the same forward,
  detached. At more it is computed for all parts before the first update.
- If no call of an update has a non-zero advantage, the optimizer does not step: AdamW would move
  by its momentum and its decay alone. Such updates are counted (`skipped`).
- A loss or a gradient that is not finite raises. Nothing is skipped with a print.

Files of a run, in runs/NAME/: config.json; log.jsonl, a line a step; curve.png; designs.md,
samples before and after; sandbox.json, the layers in force; table.md, the final tables;
cold_start/ and final/, Hugging Face folders; checkpoint-STEP/, the last two, each whole.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

import design
import toy
from advantage import designer_advantages, executor_advantages
from data import DATASETS, DataError, load, normalise_text, step_tasks
from engine import TorchEngine
from evaluate import (
    CHAT_KWARGS,
    EVALUATION_STEP,
    OneLineParser,
    Result,
    UsageError,
    evaluate,
    load_model,
    markdown_table,
    oracle_table,
    oracle_text,
    read_prompt,
    structure_shares,
    usable_tasks,
    write_json,
)
from execute import rewards_of, rollout, shares, tally
from grpo import (
    Batch,
    ScoringModel,
    active_role,
    micro_batches,
    pack,
    policy_loss,
    tokens_and_forwards,
)
from reward import score
from sandbox import SandboxError, ScriptPool, configure, in_force
from sft import Example, batches, collect, cosine, encode, supervised_loss

BETAS = (0.9, 0.95)  # of every AdamW here
ORACLE_TASKS = 240  # held-out tasks on which every structure is tried
ZERO_STEPS = 10  # so many steps in a row without any reward are worth a warning


def setting(default, text: str, **metadata):
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True)
class Config:
    """Every setting of a run. The defaults are the paper's; a preset overrides some."""

    preset: str = setting("toy", "a set of defaults: toy")
    name: str = setting("", "the run's folder under --out; default: the preset's name and a number")
    out: str = setting("runs", "where run folders go")
    resume: str = setting("", "a run folder: go on after its last checkpoint, with its settings")
    seed: int = setting(0, "all sampling seeds and the toy's first weights derive from it")
    model: str = setting("", "model folder to start from; toy without it: new weights, cold start")
    data: str = setting(
        "",
        "training tasks: a file (JSONL, Parquet) or a data set of data.py; default: the preset's",
    )

    train: str = setting(
        "stagewise",
        "whose calls train: stagewise (roles in turn) | joint (both) | designer | executor"
        " | single (no designs, one agent) | sft (cold start only)",
        choices=("stagewise", "joint", "designer", "executor", "single", "sft"),
    )
    steps: int = setting(400, "RL steps")
    stage_length: int = setting(30, "K: steps until the active role swaps")
    first_role: str = setting(
        "executor", "the first stage's role", choices=("executor", "designer")
    )
    tasks_per_step: int = setting(8, "B: tasks a step")
    n_designs: int = setting(4, "M: designs a task")
    n_executions: int = setting(4, "N: executions a design")

    lr: float = setting(5e-6, "learning rate of both roles' AdamW")
    warmup_steps: int = setting(0, "linear warm-up, counted in a role's own updates")
    weight_decay: float = setting(0.01, "AdamW's decay")
    grad_clip: float = setting(1.0, "largest gradient norm")
    clip_low: float = setting(0.2, "the ratio is clipped at 1 - this")
    clip_high: float = setting(0.2, "the ratio is clipped at 1 + this")
    tis_cap: float = setting(2.0, "largest importance weight between sampler and trainer")
    updates_per_step: int = setting(4, "optimizer steps a rollout, on disjoint parts of its calls")
    normalize_std: bool = setting(True, "divide advantages by the group's standard deviation")
    mask_truncated: bool = setting(True, "leave replies that hit their token limit out of the loss")
    code_reward: str = setting(
        "all", "a program's reward: all tests, or their fraction", choices=("all", "fraction")
    )
    token_budget: int = setting(16384, "tokens a micro-batch, padding included")

    temperature: float = setting(1.0, "of sampling, in training and evaluation")
    designer_max_tokens: int = setting(8192, "output tokens of a design")
    executor_max_tokens: int = setting(8192, "output tokens of an agent's reply")
    max_context: int = setting(16384, "prompt and reply together")
    max_calls: int = setting(32, "calls an execution may make")
    designer_prompt: str = setting("", "a file with a designer prompt; default: the preset's")
    isolation: str = setting(
        "strict", "sandbox: every layer or an error, or what there is", choices=("strict", "best")
    )
    deterministic: bool = setting(False, "run scripts in rounds: the same bits for the same seed")

    sft_traces: int = setting(0, "cold start: executions by the teacher (correct ones are kept)")
    sft_steps: int = setting(0, "cold start: optimizer steps")
    sft_batch: int = setting(128, "cold start: examples a step")
    sft_lr: float = setting(1e-5, "cold start: peak learning rate")

    eval_tasks: int = setting(512, "held-out tasks, before and after")
    checkpoint_every: int = setting(10, "steps between checkpoints")
    device: str = setting("auto", "where the model lives", choices=("auto", "cpu", "cuda"))
    threads: int = setting(0, "torch threads; 0: torch's choice. OMP_NUM_THREADS overrides")


PRESETS = {
    "toy": dict(
        steps=100,
        stage_length=10,
        tasks_per_step=12,
        lr=2e-4,
        updates_per_step=1,
        designer_max_tokens=toy.DESIGNER_TOKENS,
        executor_max_tokens=toy.EXECUTOR_TOKENS,
        max_context=toy.MAX_CONTEXT,
        isolation="best",
        deterministic=True,
        token_budget=2048,
        sft_traces=9000,
        sft_steps=1000,
        sft_batch=64,
        sft_lr=3e-3,
        device="cpu",
        threads=1,
    ),
}


def parse(argv: list[str] | None = None) -> Config:
    """Command line -> Config, in two passes: the preset first, then what the user gave.

    >>> parse(["--steps", "3"]).steps, parse([]).lr
    (3, 0.0002)
    """
    first = OneLineParser(prog="train.py", add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="toy")
    preset = first.parse_known_args(argv)[0].preset
    parser = OneLineParser(
        prog="train.py",
        description="Train a model to design and to execute multi-agent systems (MetaAgent-X).",
        epilog="Without arguments: the toy preset, a complete run on a laptop in minutes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    if preset not in PRESETS:
        parser.error(f"no preset {preset}: give one of {', '.join(PRESETS)}")
    defaults = {"preset": preset, **PRESETS[preset]}
    for f in dataclasses.fields(Config):
        kind = {"int": int, "float": float, "str": str, "bool": None}[f.type]
        options = {"default": defaults.get(f.name, f.default), "help": f.metadata["help"]}
        if kind is None:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options.update(type=kind, choices=f.metadata.get("choices"))
        parser.add_argument("--" + f.name.replace("_", "-"), **options)
    config = Config(**vars(parser.parse_args(argv)))
    try:
        check(config)
        if config.resume and config != Config(**defaults | {"resume": config.resume}):
            raise UsageError("--resume goes on with the run's own settings: give no other flag")
        if config.designer_prompt:
            prompt = read_prompt(config.designer_prompt)
            config = dataclasses.replace(config, designer_prompt=prompt)
    except UsageError as error:
        parser.error(str(error))
    return config


def check(config: Config) -> None:
    """Raises UsageError for settings that can't work, before anything is made."""
    at_least_1 = (
        "tasks_per_step n_designs n_executions stage_length updates_per_step token_budget max_calls"
        " designer_max_tokens executor_max_tokens max_context checkpoint_every sft_batch"
    )
    for name in at_least_1.split():
        if getattr(config, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(config, name)}: at least 1")
    for name in "steps warmup_steps sft_traces sft_steps eval_tasks threads".split():
        if getattr(config, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(config, name)}: at least 0")
    if config.temperature != 1.0:
        raise UsageError("--temperature must be 1 in training: another one trains another policy")
    for name in ("model", "data", "resume", "designer_prompt"):
        given = getattr(config, name)
        if given and not Path(given).exists() and not (name == "data" and given in DATASETS):
            raise UsageError(f"--{name.replace('_', '-')}: there is no {given}: give a path")
    for name in "lr sft_lr grad_clip tis_cap".split():
        if not 0 < getattr(config, name) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(config, name)}: more than 0")
    for name in "weight_decay clip_low clip_high".split():
        if not 0 <= getattr(config, name) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(config, name)}: at least 0")
    if config.preset != "toy" and not (config.model and config.data):
        raise UsageError("give --model, a folder, and --data, a file with training tasks")
    if not config.model and (config.data or config.designer_prompt):
        raise UsageError("the toy's teacher knows only its own tasks: give --model as well")
    if not config.model and not (config.sft_steps and config.sft_traces):
        raise UsageError("a cold start needs --sft-steps and --sft-traces, or give --model")
    if config.train == "sft":
        if config.model:
            raise UsageError("--train sft makes a cold start from scratch: leave out --model")
    elif config.n_designs * config.n_executions < 2:
        raise UsageError("one execution a task has nothing to compare with: M x N of at least 2")
    elif config.train in ("stagewise", "joint", "designer") and config.n_designs < 2:
        raise UsageError("--n-designs is 1: a designer learns by comparing 2 designs or more")


# --- what a preset brings: model, tasks, scripts ---


@dataclass
class World:
    """Where tasks come from and how they are asked. Steps and evaluation know no more than this."""

    tasks_of: Callable[[int], list]  # step -> its B tasks
    eval_tasks: list
    scripts: dict[str, str]  # structure -> script: baselines and the oracle table
    designer_prompt: str | None


def make_world(config: Config) -> World:
    """Tasks and scripts of the preset, or of the file that --data names. Raises UsageError."""
    prompt = config.designer_prompt
    if not config.data:
        return World(
            tasks_of=lambda step: toy.make_tasks(config.tasks_per_step, f"{config.seed} {step}"),
            eval_tasks=toy.make_tasks(config.eval_tasks, f"{config.seed} eval", held_out=True),
            scripts=toy.SCRIPTS,
            designer_prompt=prompt or toy.DESIGNER_PROMPT,
        )
    tasks, report = load(config.data)
    print(report)
    tasks, unusable = usable_tasks(tasks)
    if unusable:
        print(f"{len(unusable)} golds can't be graded, the first is {unusable[0].id}: left out")
    if any("check" in (task.tests or {}) for task in tasks):
        raise UsageError(f"{config.data}: HumanEval is for evaluation, give rows with tests")
    random.Random(config.seed).shuffle(tasks)
    held_out, tasks = tasks[: config.eval_tasks], tasks[config.eval_tasks :]
    asked = {normalise_text(task.question) for task in held_out}
    tasks = [task for task in tasks if normalise_text(task.question) not in asked]
    if len(tasks) < config.tasks_per_step:
        raise UsageError(
            f"{config.data}: {len(tasks)} tasks are left after {len(held_out)} held-out ones, a "
            f"step takes {config.tasks_per_step}: give more rows, or a smaller --eval-tasks"
        )
    mix = {"file": config.tasks_per_step}
    return World(
        tasks_of=lambda step: step_tasks({"file": tasks}, step, config.seed, mix=mix),
        eval_tasks=held_out,
        scripts=design.SCRIPTS,
        designer_prompt=prompt or None,
    )


def rollout_options(config: Config, world: World) -> dict:
    """What every rollout of a run has in common, in training, evaluation and cold start."""
    return {
        "designer_prompt": world.designer_prompt,
        "deterministic": config.deterministic,
        "temperature": config.temperature,
        "designer_max_tokens": config.designer_max_tokens,
        "executor_max_tokens": config.executor_max_tokens,
        "max_calls": config.max_calls,
    }


# --- one step ---


def check_finite(name: str, value: float, update: int) -> None:
    """Raises FloatingPointError: a NaN must not reach the weights, and nothing skips it."""
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the {name} is {value} at update {update} of this optimizer: lower its learning rate; "
            "what was saved before is intact"
        )


def roles_to_train(config: Config, step: int) -> tuple[str, ...]:
    """Whose calls carry gradient in this step.

    >>> [roles_to_train(Config(train="stagewise", stage_length=1), step) for step in (0, 1)]
    [('executor',), ('designer',)]
    >>> roles_to_train(Config(train="joint"), 0)
    ('designer', 'executor')
    """
    if config.train == "stagewise":
        return (active_role(step, config.stage_length, config.first_role),)
    if config.train == "joint":
        return ("designer", "executor")
    return ("designer",) if config.train == "designer" else ("executor",)


def training_calls(rollouts: list, role: str, *, normalize_std: bool = True) -> tuple[list, list]:
    """(calls of this role, the advantage of each). An execution's calls share its advantage."""
    rewards, ran = rewards_of(rollouts)
    if role == "designer":
        advantage = designer_advantages(rewards, normalize_std=normalize_std)  # (B, M)
        pairs = [
            (design.call, advantage[b, m])
            for b, rolled in enumerate(rollouts)
            for m, design in enumerate(rolled.designs)
            if design.call is not None
        ]
    else:
        advantage = executor_advantages(rewards, ran, normalize_std=normalize_std)  # (B, M, N)
        pairs = [
            (call, advantage[b, m, n])
            for b, rolled in enumerate(rollouts)
            for m, design in enumerate(rolled.designs)
            for n, execution in enumerate(design.executions)
            for call in execution.calls
        ]
    return [call for call, _ in pairs], [float(a) for _, a in pairs]


@dataclass(frozen=True)
class MicroBatch:
    """Some calls of one role, packed; `n_tokens` is that of the role's whole update."""

    batch: Batch
    advantage: torch.Tensor  # (B,)
    n_tokens: int


def plan_updates(parts: list[tuple[list, list]], config: Config, pad_id: int, seed: str) -> list:
    """The calls of a step -> `updates_per_step` lists of micro-batches.

    parts: (calls, advantages) of each role that trains. Every call is in exactly one update. Each
    role has its own token mean in an update (joint training sums the two losses).
    """
    updates = [[] for _ in range(config.updates_per_step)]
    for calls, advantages in parts:
        if any(call.output_ids is None or call.logp_sampler is None for call in calls):
            raise ValueError("calls without ids and log-probs can't be trained on: is it an API?")
        order = list(range(len(calls)))
        random.Random(seed).shuffle(order)
        for u, update in enumerate(updates):
            mine = sorted(order[u :: len(updates)])
            my_calls, my_advantages = [calls[i] for i in mine], [advantages[i] for i in mine]
            n_tokens, forward = tokens_and_forwards(
                my_calls, my_advantages, mask_truncated=config.mask_truncated
            )
            lengths = [len(my_calls[i].prompt_ids) + len(my_calls[i].output_ids) for i in forward]
            for rows in micro_batches(lengths, config.token_budget):
                rows = [forward[r] for r in rows]
                batch = pack(
                    [my_calls[i] for i in rows],
                    pad_id,
                    mask_truncated=config.mask_truncated,
                    device=config.device,
                )
                advantage = torch.tensor([my_advantages[i] for i in rows], device=config.device)
                update.append(MicroBatch(batch, advantage, n_tokens))
    return updates


def train_on(policy: ScoringModel, optimizer: Optimizer, updates: list, config: Config) -> dict:
    """All updates of one step; returns metrics. Moves no weight where there is nothing to learn."""

    def score_tokens(micro: MicroBatch) -> torch.Tensor:
        batch = micro.batch
        return policy(batch.input_ids, batch.attention_mask, None, batch.response_mask)

    # logp_old is older than the first update; of a single update it is that update's own forward.
    logp_old = [[None] * len(update) for update in updates]
    if len(updates) > 1:
        with torch.no_grad():
            logp_old = [[score_tokens(micro) for micro in update] for update in updates]
    totals, norms, skipped, largest_gap = Counter(), [], 0, 0.0
    for update, olds in zip(updates, logp_old, strict=True):
        if not update:
            skipped += 1
            continue
        for micro, old in zip(update, olds, strict=True):
            logp = score_tokens(micro)
            loss, metrics = policy_loss(
                logp,
                logp.detach() if old is None else old,
                micro.advantage,
                micro.batch.loss_mask,
                micro.n_tokens,
                logp_sampler=micro.batch.logp_sampler,
                clip_low=config.clip_low,
                clip_high=config.clip_high,
                tis_cap=config.tis_cap,
            )
            check_finite("loss", loss.item(), optimizer.updates)
            loss.backward()
            largest_gap = max(largest_gap, metrics.pop("sampler_gap_max").item())
            totals.update({name: value.item() for name, value in metrics.items()})
            totals["loss"] += loss.item()
        norms.append(optimizer.step(config))
    tokens = max(1.0, totals["tokens"])
    return {
        "loss": totals["loss"] / max(1, len(norms)),
        "trained_tokens": int(totals["tokens"]),
        "clip_fraction": totals["clipped"] / tokens,
        "approx_kl": totals["kl_sum"] / tokens,
        "ratio": totals["ratio_sum"] / tokens if totals["tokens"] else 1.0,
        "tis_weight": totals["tis_weight_sum"] / tokens if totals["tokens"] else 1.0,
        "tis_capped": totals["tis_capped"] / tokens,
        "sampler_gap": totals["sampler_gap_sum"] / tokens,
        "sampler_gap_max": largest_gap,
        "grad_norm": max(norms, default=0.0),
        "skipped": skipped,
        "lr": optimizer.lr,
    }


class Optimizer:
    """AdamW of one role (or of both, in joint training) over the shared weights.

    Bias correction and warm-up count this role's own updates. Gradients are set to None before any
    other optimizer could see them, so a role's moments stand still while the other one trains.
    """

    def __init__(self, policy: torch.nn.Module, lr: float, weight_decay: float, schedule: Callable):
        self.policy, self.peak, self.schedule = policy, lr, schedule
        self.adamw = torch.optim.AdamW(
            policy.parameters(), lr=lr, betas=BETAS, weight_decay=weight_decay
        )
        self.updates, self.lr = 0, 0.0

    def step(self, config: Config) -> float:
        """One update from the gradients that are there; returns their norm before clipping."""
        parameters = self.policy.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip).item()
        check_finite("gradient norm", norm, self.updates)
        self.lr = self.peak * self.schedule(self.updates)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.updates += 1
        return norm


# --- the cold start ---


def teacher_traces(config: Config, world: World, pool) -> list[Example]:
    """The toy teacher's correct traces, through the same rollout as everything else."""
    tasks = toy.make_tasks(
        config.sft_traces, f"{config.seed} cold start", kinds=toy.COLD_START_KINDS
    )
    began = time.monotonic()

    def show(done: int, total: int, kept: int) -> None:
        seconds = time.monotonic() - began
        text = f"teacher: {done}/{total} tasks, {kept} examples kept, {seconds:.0f} s"
        progress(text, last=done == total)

    options = rollout_options(config, world) | {"seed": config.seed}
    return collect(tasks, toy.teacher(), pool, score, on_progress=show, **options)


def imitate(policy: ScoringModel, tokenizer, examples: list[Example], config: Config) -> None:
    """The cold start: `sft_steps` steps on the traces, with a cosine learning rate."""
    encoded = encode(examples, tokenizer, max_context=config.max_context, chat_kwargs=CHAT_KWARGS)
    if len(encoded) < len(examples):
        print(f"{len(examples) - len(encoded)} examples exceed --max-context: left out")
    if not encoded:
        raise UsageError("every example exceeds --max-context: give a larger one")
    warmup = min(30, config.sft_steps)
    schedule = functools.partial(cosine, steps=config.sft_steps, warmup=warmup)
    optimizer = Optimizer(policy, config.sft_lr, config.weight_decay, schedule)
    lengths = [len(example.prompt_ids) + len(example.output_ids) for example in encoded]
    order = batches(len(encoded), config.sft_batch, config.sft_steps, config.seed)
    began, losses = time.monotonic(), []
    for step, rows in enumerate(order):
        calls = [encoded[i] for i in rows]
        n_tokens = sum(len(call.output_ids) for call in calls)
        loss = 0.0
        for part in micro_batches([lengths[i] for i in rows], config.token_budget):
            batch = pack([calls[i] for i in part], tokenizer.pad_token_id, device=config.device)
            logp = policy(batch.input_ids, batch.attention_mask, None, batch.response_mask)
            part_loss = supervised_loss(logp, batch.loss_mask, n_tokens)
            check_finite("loss", part_loss.item(), optimizer.updates)
            part_loss.backward()
            loss += part_loss.item()
        optimizer.step(config)
        losses.append(loss)
        if (step + 1) % 50 == 0 or step + 1 == config.sft_steps:
            mean, seconds = sum(losses) / len(losses), time.monotonic() - began
            left = seconds / (step + 1) * (config.sft_steps - step - 1)
            text = f"cold start: step {step + 1}/{config.sft_steps}, loss {mean:.3f}"
            progress(f"{text}, {seconds:.0f} s, {left:.0f} s to go", last=left == 0)
            losses.clear()


def progress(text: str, *, last: bool) -> None:
    """A line that the next one overwrites; in a file or a pipe, a line each."""
    on_terminal = sys.stdout.isatty()
    print(("\r\x1b[K" if on_terminal else "") + text, end="" if on_terminal and not last else "\n")
    sys.stdout.flush()


def counter(label: str) -> Callable:
    """For evaluate's on_progress: at most a line a second, or every ten seconds in a file."""
    pause, shown = (1.0 if sys.stdout.isatty() else 10.0), [time.monotonic()]

    def show(done: int, total: int, result: Result) -> None:
        finished = done == total and len(result.rows) == total
        if finished or time.monotonic() - shown[0] > pause:
            shown[0] = time.monotonic()
            progress(f"{label}: {done}/{total}", last=finished)

    return show


# --- checkpoints and files ---


def read_config(folder: Path) -> Config:
    """The settings of a run. Raises UsageError for a folder that is none."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return Config(**saved | {"resume": str(folder)})
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{folder} is no run folder, give one like runs/toy: {error}") from error


@contextlib.contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Fill the folder that this yields; only then it becomes `folder`. OSError if it can't be."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (SafetensorError, RuntimeError) as error:  # how torch and safetensors say "disk full"
        raise OSError(f"{folder} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_model(model, tokenizer, folder: Path, config: Config) -> None:
    """A Hugging Face folder that says how it is to be sampled (run_config.json)."""
    with whole(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / "run_config.json", dataclasses.asdict(config))


def save_checkpoint(folder: Path, step: int, state: State, config: Config) -> None:
    """The model, and what each optimizer remembers. Keeps the last two."""
    optimizers = {
        role: {"adamw": o.adamw.state_dict(), "updates": o.updates, "lr": o.lr}
        for role, o in state.optimizers.items()
    }
    with whole(folder / f"checkpoint-{step:06}") as partial:
        save_model(state.policy.model, state.tokenizer, partial / "model", config)
        torch.save({"step": step, "optimizers": optimizers}, partial / "optimizers.pt")
    for old in sorted(folder.glob("checkpoint-*"))[:-2]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, state: State) -> int:
    """Optimizers of the checkpoint `folder` into `state`; returns the steps that were done."""
    saved = torch.load(folder / "optimizers.pt", weights_only=True)
    for role, optimizer in state.optimizers.items():
        optimizer.adamw.load_state_dict(saved["optimizers"][role]["adamw"])
        optimizer.updates = saved["optimizers"][role]["updates"]
        optimizer.lr = saved["optimizers"][role]["lr"]
    return saved["step"]


def cut_log(path: Path, step: int) -> None:
    """Leaves the lines of steps before `step`: what came after the checkpoint is done again.

    A last line that was torn by a crash comes after the checkpoint too.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = []
    for line in lines:
        try:
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            break
    write_text(path, "".join(kept))


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def new_folder(config: Config) -> Path:
    """Makes runs/NAME; without --name the first of toy, toy-2, toy-3, ... that is free."""
    out = Path(config.out)
    if config.name:
        names = [config.name]
    else:
        names = [config.preset, *(f"{config.preset}-{i}" for i in range(2, 1000))]
    for name in names:
        try:
            (out / name).mkdir(parents=True)
            return out / name
        except FileExistsError:
            continue
    raise UsageError(f"{out / names[0]} exists: give another --name, or --resume {out / names[0]}")


# --- pictures and tables ---


def draw_curve(log: list[dict], points: list[tuple[int, Result]], path: Path) -> None:
    """curve.png: rewards, valid designs and structure shares over the steps, stages as bands.

    points: (step, result on held-out tasks), drawn with their bootstrap intervals.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    steps = [line["step"] + 1 for line in log]

    def draw(axes, name: str, style: str = "-", **options) -> None:
        missing = 0.0 if name.startswith("structure/") else None  # a share, or a kind not asked
        known = [(x, line.get(name, missing)) for x, line in zip(steps, log, strict=True)]
        known = [(x, value) for x, value in known if value is not None]
        values = [value for _, value in known]
        recent = [values[max(0, i - 4) : i + 1] for i in range(len(values))]
        means = [sum(part) / len(part) for part in recent]
        axes.plot([x for x, _ in known], means, style, **options)

    for line in log:
        if line["role"] == "designer":
            for axes in (top, bottom):
                axes.axvspan(line["step"] + 0.5, line["step"] + 1.5, color="0.92", lw=0)
    names = sorted({name for line in log for name in line})
    draw(top, "reward", color="black", label="reward, all")
    for name in reward_names(names):
        draw(top, name, lw=1, label=name.removeprefix("reward/"))
    for name in names:
        if name.startswith("structure/") and name.count("/") == 1:
            draw(bottom, name, label=name.removeprefix("structure/"))
    draw(top, "valid_designs", ":", color="0.4", label="valid designs")
    for step, result in points:
        low, high = result.interval()
        error = [[result.mean() - low], [high - result.mean()]]
        top.errorbar([step], [result.mean()], error, fmt="o", color="black", capsize=3)
    title = "grey: designer stages; dots: held-out tasks with 95 % intervals"
    top.set(ylim=(0, 1.02), ylabel="mean of 5 steps", title=title)
    bottom.set(ylim=(0, 1.02), ylabel="share of valid designs", xlabel="step")
    for axes in (top, bottom):
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def success_table(results: dict[str, Result]) -> str:
    """A row a model pair, a column a kind of task: mean reward on the held-out tasks."""
    sources = list(next(iter(results.values())).by_source())
    rows = []
    for name, result in results.items():
        parts = result.by_source()
        low, high = result.interval()
        means = [parts[source].mean() for source in sources]
        rows.append([name, *means, result.mean(), f"{low:.3f} to {high:.3f}"])
    return markdown_table(rows, ["held-out success", *sources, "all", "95 % interval"])


def shares_table(results: dict[str, Result]) -> str:
    """Structure shares of the valid designs by kind of task."""
    shares = {name: structure_shares(result) for name, result in results.items()}
    sources = list(next(iter(shares.values())))
    structures = sorted({s for each in shares.values() for part in each.values() for s in part})
    rows = [
        [f"{source}, {name}", *(each[source].get(s, 0.0) for s in structures)]
        for source in sources
        for name, each in shares.items()
    ]
    return markdown_table(rows, ["structure shares", *structures])


def sample_designs(world: World, pool, config: Config, engine) -> str:
    """A design and its execution for one task of each source, as markdown."""
    tasks = {task.source or task.kind: task for task in reversed(world.eval_tasks[:64])}
    rollouts = rollout(
        list(tasks.values()) or world.tasks_of(0)[:3],
        engine,
        pool,
        score,
        n_designs=1,
        n_executions=1,
        seed=config.seed,
        step=EVALUATION_STEP,
        **rollout_options(config, world),
    )
    parts = []
    for rolled in rollouts:
        drawn = rolled.designs[0]
        execution = drawn.executions[0]
        parts += [
            f"## {rolled.task.question}\n\n```python\n{drawn.script or ''}```\n",
            f"{drawn.structure or drawn.error}; {execution.status}, ",
            f"reward {execution.reward:g}\n\n",
            *(f"    {call.agent}: {call.text!r}\n" for call in execution.calls),
            "\n",
        ]
    return "".join(parts)


# --- the run ---


@dataclass
class State:
    """What changes in a run: the weights, who steps them, and the engine that plays them."""

    policy: ScoringModel
    tokenizer: object
    engine: TorchEngine
    optimizers: dict[str, Optimizer]


def make_state(model, tokenizer, config: Config) -> State:
    """Policy, optimizers, and an engine with weights of its own."""
    model.to(config.device)
    policy = ScoringModel(model, temperature=config.temperature)
    warmup = config.warmup_steps
    schedule = functools.partial(warm_up, warmup=warmup)
    roles = {"stagewise": ["designer", "executor"], "designer": ["designer"], "joint": ["joint"]}
    optimizers = {
        role: Optimizer(policy, config.lr, config.weight_decay, schedule)
        for role in roles.get(config.train, ["executor"])
    }
    engine = make_engine(copy.deepcopy(model), tokenizer, config)
    return State(policy, tokenizer, engine, optimizers)


def warm_up(update: int, warmup: int) -> float:
    """Factor on the learning rate: up to 1 in `warmup` updates, then 1."""
    return min(1.0, (update + 1) / warmup) if warmup else 1.0


def make_engine(model, tokenizer, config: Config) -> TorchEngine:
    return TorchEngine(model, tokenizer, max_context=config.max_context, chat_kwargs=CHAT_KWARGS)


def train_step(step: int, state: State, world: World, pool, config: Config) -> dict:
    """The seven parts of a step; returns its metrics."""
    began = time.monotonic()
    tasks = world.tasks_of(step)
    plan = {"n_designs": config.n_designs, "n_executions": config.n_executions}
    if config.train == "single":
        runs = config.n_designs * config.n_executions
        plan = {"scripts": [world.scripts["single"]], "n_executions": runs}
    scoring: list[float] = []  # seconds, over all threads; they run beside the rollout

    def timed_score(task, response: str) -> float:
        started = time.monotonic()
        reward = score(task, response, code=config.code_reward)
        scoring.append(time.monotonic() - started)
        return reward

    rolled = rollout(
        tasks,
        state.engine,
        pool,
        timed_score,
        seed=config.seed,
        step=step,
        **plan,
        **rollout_options(config, world),
    )
    rolled_out = time.monotonic()
    roles = roles_to_train(config, step)
    parts = [training_calls(rolled, role, normalize_std=config.normalize_std) for role in roles]
    seed = f"{config.seed} {step}"
    updates = plan_updates(parts, config, state.tokenizer.pad_token_id, seed)
    role = "joint" if len(roles) > 1 else roles[0]
    metrics = train_on(state.policy, state.optimizers[role], updates, config)
    trained = time.monotonic()
    state.engine.load_weights(state.policy.model.named_parameters())
    synced = time.monotonic()
    rewards, ran = rewards_of(rolled)
    constant = {  # a group is constant where all its advantages are exactly 0
        "designer": (designer_advantages(rewards) == 0).all(axis=1).mean(),
        "executor": (executor_advantages(rewards, ran) == 0).all(axis=(1, 2)).mean(),
    }
    total = tally(rolled)
    tokens = total["tokens/designer"] + total["tokens/executor"]
    seconds = {
        "rollout": rolled_out - began,
        "reward": sum(scoring),
        "train": trained - rolled_out,
        "sync": synced - trained,
        "step": synced - began,
    }
    return {
        "step": step,
        "role": role,
        **shares(total),
        **{f"constant_groups/{name}": float(share) for name, share in constant.items()},
        **metrics,
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "tokens_per_second": tokens / seconds["rollout"],
    }


def reward_names(names: Iterable[str]) -> list[str]:
    """The rewards of the data sets; of math and code where tasks name no data set.

    >>> reward_names(["reward", "reward/math", "reward/sum"]), reward_names(["reward/math"])
    (['reward/sum'], ['reward/math'])
    """
    found = [name for name in names if name.startswith("reward/")]
    return [name for name in found if name not in ("reward/math", "reward/code")] or found


def console_line(m: dict, steps: int) -> str:
    """One line a step."""
    by_source = " ".join(
        f"{name.removeprefix('reward/')} {m[name]:.2f}" for name in reward_names(m)
    )
    return (
        f"{m['step'] + 1:4}/{steps} {m['role']:8} reward {m['reward']:.2f} ({by_source})"
        f"  valid {m['valid_designs']:.2f}  calls {m['calls_per_execution']:.1f}"
        f"  truncated {m['truncated/executor']:.2f}  kl {m['approx_kl']:.0e}"
        f"  gap {m['sampler_gap_max']:.0e}  grad {m['grad_norm']:.2f}  {m['seconds/step']:.1f} s"
    )


def first_model(config: Config, folder: Path, world: World, pool) -> tuple:
    """(model, tokenizer) that RL starts from: --model, or the cold start of this run."""
    if config.model or (folder / "cold_start").exists():
        return load_model(config.model or folder / "cold_start", config.device)
    examples = teacher_traces(config, world, pool)
    if not examples:
        raise UsageError("the teacher left no correct trace: give more --sft-traces")
    texts = [m["content"] for e in examples for m in e.messages] + [e.response for e in examples]
    tokenizer = toy.make_tokenizer(texts)
    model = toy.make_model(tokenizer, config.seed).to(config.device)
    imitate(ScoringModel(model), tokenizer, examples, config)
    save_model(model, tokenizer, folder / "cold_start", config)
    return model, tokenizer


def held_out(
    label: str, world: World, pool, config: Config, engine, executor_engine=None
) -> Result | None:
    """What is trained (designing, or the single agent) on the held-out tasks, one try each."""
    if not world.eval_tasks:
        return None
    return evaluate(
        world.eval_tasks,
        engine,
        pool,
        score,
        system="single" if config.train == "single" else "designed",
        scripts=world.scripts,
        executor_engine=executor_engine,
        seed=config.seed,
        on_progress=counter(label),
        **rollout_options(config, world),
    )


def run(config: Config, folder: Path, world: World) -> None:
    """A whole run, or the rest of one: cold start and steps that are done are not done again."""
    if config.threads and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.threads)
    began = time.monotonic()
    workflow = Path(__file__).with_name("workflow.py").read_text(encoding="utf-8")
    with ScriptPool({"workflow": workflow}, deterministic=config.deterministic) as pool:
        print_header(config, folder)
        write_json(folder / "sandbox.json", in_force())
        model, tokenizer = first_model(config, folder, world, pool)
        if config.train == "sft":
            print(f"cold start saved in {folder / 'cold_start'}")
            return
        cold = make_engine(copy.deepcopy(model), tokenizer, config)
        checkpoints = sorted(folder.glob("checkpoint-*"))
        if checkpoints:
            model, tokenizer = load_model(checkpoints[-1] / "model", config.device)
        state = make_state(model, tokenizer, config)
        done = load_checkpoint(checkpoints[-1], state) if checkpoints else 0
        cut_log(folder / "log.jsonl", done)
        before = held_out("held-out tasks before", world, pool, config, cold)
        if before:
            print(f"held-out success before RL: {before.mean():.3f}")
        samples = "# before\n\n" + sample_designs(world, pool, config, cold)
        write_text(folder / "designs.md", samples)
        learn(state, world, pool, config, folder, done)
        save_model(state.policy.model, tokenizer, folder / "final", config)
        samples += "# after\n\n" + sample_designs(world, pool, config, state.engine)
        write_text(folder / "designs.md", samples)
        after = held_out("held-out tasks after", world, pool, config, state.engine)
        points = [(0, before), (config.steps, after)] if before and after else []
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        draw_curve(log, points, folder / "curve.png")
        if before and after:
            text = final_tables(cold, state.engine, before, after, world, pool, config)
            write_text(folder / "table.md", text)
            print("\n" + text)
    minutes = (time.monotonic() - began) / 60
    print(f"{minutes:.1f} minutes. Everything is in {folder}: look at curve.png and designs.md")


def learn(state: State, world: World, pool, config: Config, folder: Path, done: int) -> None:
    """Steps `done` to `config.steps`: train, log, save."""
    without_reward = 0
    with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
        for step in range(done, config.steps):
            metrics = train_step(step, state, world, pool, config)
            log.write(json.dumps(metrics) + "\n")
            log.flush()
            print(console_line(metrics, config.steps), flush=True)
            without_reward = 0 if metrics["reward"] else without_reward + 1
            if without_reward == ZERO_STEPS:
                print(
                    f"no reward in {ZERO_STEPS} steps: nothing can be learned so. Look at status/* "
                    f"in {folder / 'log.jsonl'}, and at {folder / 'designs.md'}"
                )
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                save_checkpoint(folder, step + 1, state, config)


def final_tables(
    cold, trained, before: Result, after: Result, world: World, pool, config: Config
) -> str:
    """Success, who contributed, structure shares, and every structure forced on every task."""
    success = {"before": before}
    if config.train != "single":
        for name, designer, executor in (
            ("new designer, old executor", trained, cold),
            ("old designer, new executor", cold, trained),
        ):
            success[name] = held_out(name, world, pool, config, designer, executor)
    success["after"] = after
    tasks = world.eval_tasks[:ORACLE_TASKS]
    options = rollout_options(config, world) | {"seed": config.seed}
    parts = [success_table(success), shares_table({"before": before, "after": after})]
    for name, engine in (("before", cold), ("after", trained)):
        label = f"every structure forced, {name}"
        table = oracle_table(
            tasks, engine, pool, score, world.scripts, on_progress=counter(label), **options
        )
        parts.append(f"{label}\n\n{oracle_text(table)}")
    return "\n\n".join(parts) + "\n"


def print_header(config: Config, folder: Path) -> None:
    """What this run is, and what protects the machine from its scripts."""
    force = in_force()
    missing = ", ".join(force["missing"]) or "nothing"
    print(
        f"run {folder}: preset {config.preset}, train {config.train}, seed {config.seed}\n"
        f"{config.steps} steps of {config.tasks_per_step} tasks x {config.n_designs} designs x "
        f"{config.n_executions} executions, stages of {config.stage_length}\n"
        f"sandbox {force['isolation']}: {', '.join(force['layers'])}; missing: {missing}"
    )


def main(argv: list[str] | None = None) -> int:
    folder = None
    try:
        config = parse(argv)
        disable_progress_bar()  # of Transformers, whose bars would break ours
        if config.resume:
            folder = Path(config.resume)
            config = read_config(folder)
            if (folder / "table.md").exists():
                raise UsageError(f"{folder} is finished: see its table.md")
        if config.device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
            config = dataclasses.replace(config, device=device)
        configure(config.isolation)
        world = make_world(config)
        if config.model:
            load_model(config.model, config.device)  # what can't work leaves no folder behind
        if not config.resume:
            folder = new_folder(config)
            write_json(folder / "config.json", dataclasses.asdict(config))
        run(config, folder, world)
    except (UsageError, DataError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except (OSError, SandboxError, FloatingPointError, torch.OutOfMemoryError) as error:
        print(f"train.py: failed: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        go_on = f"go on with: python train.py --resume {folder}" if folder else "nothing was made"
        print(f"\ninterrupted; {go_on}", file=sys.stderr, flush=True)
        os._exit(130)  # at once: Python would wait for threads that are still scoring
    return 0


if __name__ == "__main__":
    sys.exit(main())
