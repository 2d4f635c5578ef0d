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
- If no call of the step has a non-zero advantage, the optimizer does not step: AdamW would move
  by its momentum and its decay alone. Such steps are counted (`skipped`).
- A loss or a gradient that is not finite raises. Nothing is skipped with a print.

Files of a run, in runs/NAME/: config.json; log.jsonl, a line a step; curve.png; designs.md,
samples before and after; sandbox.json, the layers in force; table.md, the final tables;
cold_start/ and final/, Hugging Face folders; checkpoint-STEP/, the last two, each whole.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar

import design
import toy
from advantage import designer_advantages, executor_advantages
from data import DATASETS, DataError, load, step_tasks
from engine import TorchEngine
from evaluate import (
    CHAT_KWARGS,
    Result,
    UsageError,
    check_folder,
    evaluate,
    load_model,
    markdown_table,
    oracle_table,
    oracle_text,
    structure_shares,
    usable_tasks,
    write_json,
)
from execute import Rollout, rewards_of, rollout, summary
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
    device: str = setting("auto", "cpu, cuda, or auto")
    threads: int = setting(0, "torch threads; 0: torch's choice. OMP_NUM_THREADS overrides")


PRESETS = {
    "toy": dict(
        steps=80,
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


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line; the usage of 40 flags would hide it."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def parse(argv: list[str] | None = None) -> Config:
    """Command line -> Config, in two passes: the preset first, then what the user gave.

    >>> parse(["--steps", "3"]).steps, parse([]).lr
    (3, 0.0002)
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
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
            prompt = Path(config.designer_prompt).read_text(encoding="utf-8")
            config = dataclasses.replace(config, designer_prompt=prompt)
    except (UsageError, OSError) as error:
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
    if config.resume and not (Path(config.resume) / "config.json").exists():
        raise UsageError(f"{config.resume} has no config.json: give a run folder, like runs/toy")
    if config.preset != "toy" and not config.model:
        raise UsageError("--model is missing: give a model folder")
    if config.preset != "toy" and not config.data:
        raise UsageError("--data is missing: give a file with training tasks")
    if config.train != "sft" and not config.model and not config.sft_steps:
        raise UsageError("without --model there must be a cold start: give --sft-steps")
    if config.n_designs * config.n_executions < 2 and config.train != "sft":
        raise UsageError("one execution a task has nothing to compare with: M x N of at least 2")


# --- what a preset brings: model, tasks, scripts ---


@dataclass
class World:
    """Where tasks come from and how they are asked; the rest of this file does not know the toy."""

    step_tasks: Callable[[int], list]  # step -> its B tasks
    eval_tasks: list
    scripts: dict[str, str]  # structure -> script: baselines and the oracle table
    designer_prompt: str | None


def make_world(config: Config) -> World:
    """Tasks and scripts of the preset, or of the file that --data names. Raises UsageError."""
    prompt = config.designer_prompt
    if not config.data:
        return World(
            step_tasks=lambda step: toy.make_tasks(config.tasks_per_step, f"{config.seed} {step}"),
            eval_tasks=toy.make_tasks(config.eval_tasks, f"{config.seed} eval", held_out=True),
            scripts=toy.SCRIPTS,
            designer_prompt=prompt or toy.DESIGNER_PROMPT,
        )
    tasks, report = load(config.data)
    print(report)
    tasks, unusable = usable_tasks(tasks)
    if unusable:
        print(f"{len(unusable)} golds can't be graded, the first is {unusable[0].id}: left out")
    held_out, tasks = tasks[: config.eval_tasks], tasks[config.eval_tasks :]
    if len(tasks) < config.tasks_per_step:
        raise UsageError(
            f"{config.data}: {len(tasks)} tasks are left after {len(held_out)} held-out ones, a "
            f"step takes {config.tasks_per_step}: give more rows, or a smaller --eval-tasks"
        )
    mix = {"file": config.tasks_per_step}
    return World(
        step_tasks=lambda step: step_tasks({"file": tasks}, step, config.seed, mix=mix),
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
        order = list(range(len(calls)))
        random.Random(seed).shuffle(order)
        for u, update in enumerate(updates):
            mine = sorted(order[u :: len(updates)])
            some, a = [calls[i] for i in mine], [advantages[i] for i in mine]
            n_tokens, forward = tokens_and_forwards(some, a, mask_truncated=config.mask_truncated)
            lengths = [len(some[i].prompt_ids) + len(some[i].output_ids) for i in forward]
            for rows in micro_batches(lengths, config.token_budget):
                rows = [forward[r] for r in rows]
                batch = pack(
                    [some[i] for i in rows],
                    pad_id,
                    mask_truncated=config.mask_truncated,
                    device=config.device,
                )
                advantage = torch.tensor([a[i] for i in rows], device=config.device)
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
            loss.backward()
            largest_gap = max(largest_gap, metrics.pop("sampler_gap_max").item())
            totals.update({name: value.item() for name, value in metrics.items()})
            totals["loss"] += loss.item()
        norms.append(optimizer.step(config))
    tokens = max(1.0, totals["tokens"])
    return {
        "loss": totals["loss"],
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
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm} at update {self.updates}: lower --lr, or look at the "
                "last lines of log.jsonl; the last checkpoint is intact"
            )
        self.lr = self.peak * self.schedule(self.updates)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.updates += 1
        return norm


# --- the cold start ---


def teacher_traces(config: Config, world: World, pool, score) -> list[Example]:
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
    examples = collect(tasks, toy.teacher(), pool, score, on_progress=show, **options)
    return examples


def imitate(policy: ScoringModel, tokenizer, examples: list[Example], config: Config) -> None:
    """The cold start: `sft_steps` steps on the traces, with a cosine learning rate."""
    encoded = encode(examples, tokenizer, max_context=config.max_context, chat_kwargs=CHAT_KWARGS)
    if not encoded:
        raise UsageError("the teacher left no correct trace: give more --sft-traces")
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
    print(("\r" if on_terminal else "") + text, end="" if on_terminal and not last else "\n")
    sys.stdout.flush()


# --- checkpoints and files ---


def save_model(model, tokenizer, folder: Path, config: Config) -> None:
    """A Hugging Face folder that says how it is to be sampled (run_config.json)."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (SafetensorError, RuntimeError) as error:  # how a full disk looks from in there
        raise OSError(f"{folder} could not be written: {error}") from error
    write_json(folder / "run_config.json", dataclasses.asdict(config))


def save_checkpoint(folder: Path, step: int, state: State, config: Config) -> None:
    """Written under another name, then renamed: a checkpoint is whole or not there. Keeps two."""
    partial = folder / f".checkpoint-{step:06}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        save_model(state.policy.model, state.tokenizer, partial, config)
        optimizers = {
            role: {"adamw": o.adamw.state_dict(), "updates": o.updates}
            for role, o in state.optimizers.items()
        }
        try:
            torch.save({"step": step, "optimizers": optimizers}, partial / "optimizers.pt")
        except RuntimeError as error:
            raise OSError(f"{partial} could not be written: {error}") from error
        partial.rename(folder / f"checkpoint-{step:06}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in sorted(folder.glob("checkpoint-*"))[:-2]:
        shutil.rmtree(old)


def load_checkpoint(folder: Path, state: State) -> int:
    """Optimizers of the checkpoint `folder` into `state`; returns the steps that were done."""
    saved = torch.load(folder / "optimizers.pt", weights_only=True)
    for role, optimizer in state.optimizers.items():
        optimizer.adamw.load_state_dict(saved["optimizers"][role]["adamw"])
        optimizer.updates = saved["optimizers"][role]["updates"]
    return saved["step"]


def cut_log(path: Path, step: int) -> None:
    """Leaves the lines of steps before `step`: what came after the checkpoint is done again."""
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] < step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(line + "\n" for line in kept))
    partial.rename(path)


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
        values = [line.get(name, 0.0) for line in log]
        recent = [values[max(0, i - 4) : i + 1] for i in range(len(values))]
        axes.plot(steps, [sum(part) / len(part) for part in recent], style, **options)

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


def sample_designs(name: str, rollouts: list[Rollout]) -> str:
    """One design and its execution a kind of task, as markdown."""
    seen, parts = set(), [f"# {name}\n"]
    for rolled in rollouts:
        if (rolled.task.source or rolled.task.kind) in seen:
            continue
        seen.add(rolled.task.source or rolled.task.kind)
        drawn = rolled.designs[0]
        execution = drawn.executions[0]
        parts.append(f"## {rolled.task.question}\n\n```python\n{drawn.script or ''}```\n")
        parts.append(f"{drawn.structure or drawn.error}; {execution.status}, ")
        parts.append(f"reward {execution.reward:g}\n\n")
        parts += [f"    {call.agent}: {call.text!r}\n" for call in execution.calls]
        parts.append("\n")
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
    ramp = functools.partial(warm_up, warmup=warmup)
    roles = {"stagewise": ["designer", "executor"], "designer": ["designer"], "joint": ["joint"]}
    optimizers = {
        role: Optimizer(policy, config.lr, config.weight_decay, ramp)
        for role in roles.get(config.train, ["executor"])
    }
    engine = make_engine(copy.deepcopy(model), tokenizer, config)
    return State(policy, tokenizer, engine, optimizers)


def warm_up(update: int, warmup: int) -> float:
    """Factor on the learning rate: up to 1 in `warmup` updates, then 1."""
    return min(1.0, (update + 1) / warmup) if warmup else 1.0


def make_engine(model, tokenizer, config: Config) -> TorchEngine:
    return TorchEngine(model, tokenizer, max_context=config.max_context, chat_kwargs=CHAT_KWARGS)


def train_step(step: int, state: State, world: World, pool, config: Config) -> tuple[dict, list]:
    """The seven parts of a step; returns its metrics and its rollouts."""
    began = time.monotonic()
    tasks = world.step_tasks(step)
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
    rewards, ran = rewards_of(rolled)
    constant = (rewards.max(axis=(1, 2)) == rewards.min(axis=(1, 2))).mean()
    of_designs = rewards.mean(axis=2)  # (B, M)
    constant_designs = (of_designs.max(axis=1) - of_designs.min(axis=1) < 1e-6).mean()
    metrics = {
        "step": step,
        "role": role,
        **summary(rolled),
        "constant_groups/executor": float(constant),
        "constant_groups/designer": float(constant_designs),
        **metrics,
    }
    done = time.monotonic()
    tokens = sum(
        len(call.output_ids)
        for each in rolled
        for d in each.designs
        for call in [d.call, *(c for x in d.executions for c in x.calls)]
        if call
    )
    metrics |= {
        "seconds/rollout": rolled_out - began,
        "seconds/reward": sum(scoring),
        "seconds/train": trained - rolled_out,
        "seconds/sync": done - trained,
        "seconds/step": done - began,
        "tokens_per_second": tokens / (rolled_out - began),
    }
    return metrics, rolled


def reward_names(names: Iterable[str]) -> list[str]:
    """The rewards of the data sets; of math and code where tasks name no data set.

    >>> reward_names(["reward", "reward/math", "reward/sum"]), reward_names(["reward/math"])
    (['reward/sum'], ['reward/math'])
    """
    found = [name for name in names if name.startswith("reward/")]
    return [name for name in found if name not in ("reward/math", "reward/code")] or found


def console_line(m: dict, steps: int) -> str:
    """One line a step."""
    by_source = " ".join(f"{name[7:]} {m[name]:.2f}" for name in reward_names(m))
    return (
        f"{m['step'] + 1:4}/{steps} {m['role']:8} reward {m['reward']:.2f} ({by_source})"
        f"  valid {m['valid_designs']:.2f}  calls {m['calls_per_execution']:.1f}"
        f"  truncated {m['truncated/executor']:.2f}  kl {m['approx_kl']:.0e}"
        f"  gap {m['sampler_gap_max']:.0e}  grad {m['grad_norm']:.2f}  {m['seconds/step']:.1f} s"
    )


def first_model(config: Config, folder: Path, world: World, pool) -> tuple:
    """(model, tokenizer) that RL starts from: --model, or the cold start of this run."""
    if config.model:
        return load_model(config.model, config.device)
    if (folder / "cold_start").exists():
        return load_model(folder / "cold_start", config.device)
    examples = teacher_traces(config, world, pool, score)
    if not examples:
        raise UsageError("the teacher left no correct trace: give more --sft-traces")
    texts = [m["content"] for e in examples for m in e.messages] + [e.response for e in examples]
    tokenizer = toy.make_tokenizer(texts)
    model = toy.make_model(tokenizer, config.seed)
    imitate(ScoringModel(model), tokenizer, examples, config)
    partial = folder / ".cold_start.partial"
    save_model(model, tokenizer, partial, config)
    partial.rename(folder / "cold_start")
    return model, tokenizer


def held_out(engine, world: World, pool, config: Config, executor_engine=None) -> Result:
    """What is trained (designing, or the single agent) on the held-out tasks, one try each."""
    return evaluate(
        world.eval_tasks,
        engine,
        pool,
        score,
        system="single" if config.train == "single" else "designed",
        scripts=world.scripts,
        executor_engine=executor_engine,
        seed=config.seed,
        **rollout_options(config, world),
    )


def run(config: Config, folder: Path, world: World) -> None:
    """A whole run, or the rest of one: what is there in `folder` is not done again."""
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
        first_engine = make_engine(copy.deepcopy(model).to(config.device), tokenizer, config)
        checkpoints = sorted(folder.glob("checkpoint-*"))
        if checkpoints:
            model, tokenizer = load_model(checkpoints[-1], config.device)
        state = make_state(model, tokenizer, config)
        done = load_checkpoint(checkpoints[-1], state) if checkpoints else 0
        cut_log(folder / "log.jsonl", done)
        before = held_out(first_engine, world, pool, config) if config.eval_tasks else None
        if before:
            print(f"held-out success before RL: {before.mean():.3f}")
        first_samples = sample_designs("before", look(first_engine, world, pool, config))
        learn(state, world, pool, config, folder, done)
        save_model(state.policy.model, tokenizer, folder / "final", config)
        samples = sample_designs("after", look(state.engine, world, pool, config))
        (folder / "designs.md").write_text(first_samples + samples, encoding="utf-8")
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        after = held_out(state.engine, world, pool, config) if config.eval_tasks else None
        points = [(0, before), (config.steps, after)] if before and after else []
        draw_curve(log, points, folder / "curve.png")
        if before and after:
            engines = (first_engine, state.engine)
            text = final_tables(engines, (before, after), world, pool, config)
            (folder / "table.md").write_text(text, encoding="utf-8")
            print("\n" + text)
    minutes = (time.monotonic() - began) / 60
    print(f"{minutes:.1f} minutes. Curve, samples, tables, checkpoints: {folder}")


def learn(state: State, world: World, pool, config: Config, folder: Path, done: int) -> None:
    """Steps `done` to `config.steps`: train, log, save."""
    without_reward = 0
    with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
        for step in range(done, config.steps):
            metrics, _ = train_step(step, state, world, pool, config)
            log.write(json.dumps(metrics) + "\n")
            log.flush()
            print(console_line(metrics, config.steps), flush=True)
            without_reward = 0 if metrics["reward"] else without_reward + 1
            if without_reward == ZERO_STEPS:
                print(
                    f"no reward in {ZERO_STEPS} steps: nothing can be learned so. Look at the "
                    "statuses in log.jsonl, and at designs with evaluate.py"
                )
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                save_checkpoint(folder, step + 1, state, config)


def look(engine, world: World, pool, config: Config) -> list[Rollout]:
    """A few designs, one a kind of task, to read."""
    tasks = world.eval_tasks[:3] or world.step_tasks(0)[:3]
    options = rollout_options(config, world) | {"seed": config.seed}
    return rollout(tasks, engine, pool, score, n_designs=1, n_executions=1, **options)


def final_tables(engines: tuple, results: tuple, world: World, pool, config: Config) -> str:
    """Success, who contributed, structure shares, and every structure forced on every task."""
    (first, last), (before, after) = engines, results
    success = {"before": before}
    if config.train != "single":
        success["new designer, old executor"] = held_out(last, world, pool, config, first)
        success["old designer, new executor"] = held_out(first, world, pool, config, last)
    success["after"] = after
    options = rollout_options(config, world) | {"seed": config.seed}
    tasks = world.eval_tasks[:ORACLE_TASKS]
    oracles = {
        name: oracle_table(tasks, engine, pool, score, world.scripts, **options)
        for name, engine in (("before", first), ("after", last))
    }
    parts = [success_table(success), shares_table({"before": before, "after": after})]
    parts += [f"every structure forced, {name}\n\n{oracle_text(o)}" for name, o in oracles.items()]
    return "\n\n".join(parts) + "\n"


def print_header(config: Config, folder: Path) -> None:
    """What this run is, and what protects the machine from its scripts."""
    force = in_force()
    missing = ", ".join(force["missing"]) or "nothing"
    print(f"run {folder}: preset {config.preset}, train {config.train}, seed {config.seed}")
    print(f"{config.steps} steps of {config.tasks_per_step} tasks x {config.n_designs} designs")
    print(f"  x {config.n_executions} executions, stages of {config.stage_length}")
    print(f"sandbox {force['isolation']}: {', '.join(force['layers'])}; missing: {missing}")


def main(argv: list[str] | None = None) -> int:
    config, folder = parse(argv), None
    disable_progress_bar()  # of Transformers, whose bars would break ours
    try:
        if config.resume:
            folder = Path(config.resume)
            saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config = Config(**saved | {"resume": config.resume})
        if config.device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
            config = dataclasses.replace(config, device=device)
        configure(config.isolation)
        world = make_world(config)  # before the folder: what can't work leaves nothing behind
        if config.model:
            check_folder(config.model)
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
        print(f"\ninterrupted; {go_on}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
