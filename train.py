"""MetaAgent-X: one model learns by reinforcement to design multi-agent systems and to execute them.

    python train.py                            # preset toy: a laptop, minutes, all of this for real
    python train.py --help                     # every setting, with a line of help
    python train.py --train joint --model runs/toy/cold_start     # an ablation, from the same start
    python train.py --resume runs/toy          # go on after the last checkpoint
    torchrun --nproc_per_node 8 train.py --preset qwen3-8b        # a full run on 8 GPUs
    python train.py --preset qwen3-8b --dry-run                   # does it fit, how long? a plan

One step, in seven parts:

    1  tasks      B tasks, shared out over the ranks
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
  is cut into micro-batches and ranks.
- `updates_per_step` = U cuts the calls of a step into U disjoint parts, one optimizer step
  each. At 1 the ratio is exactly 1 and the clip idle; then `logp_old` is the same forward,
  detached. At more it is computed for all parts before the first update.
- If no call of an update has a non-zero advantage, the optimizer does not step: AdamW would move
  by its momentum and its decay alone. Such updates are counted (`skipped`).
- A loss or a gradient that is not finite raises. Nothing is skipped with a print.

Many ranks, one program. Under torchrun every rank plays its part of the tasks with an engine of
its own; then all ranks get all calls (ids and log-probs are small beside the model), make the same
plan of micro-batches, and take every R-th of it. So advantages, token counts and metrics are those
of a single process, and no rank can wait for a micro-batch that another one doesn't have: where
calls are too few, it runs an empty one. FSDP2 shards weights, gradients and moments; it averages
gradients over ranks, so the loss is multiplied by their number:

    4 ranks hold loss sums 1, 2, 3, 6 of 12 tokens; the token mean is 12 / 12 = 1.
    Each divides by 12; FSDP averages: (1 + 2 + 3 + 6) / 12 / 4 = 0.25; times 4 it is 1.

Files of a run, in runs/NAME/: config.json; log.jsonl, a line a step; curve.png; designs.md,
samples before and after; before.json and after.json, the held-out tasks one by one; sandbox.json,
the layers in force; table.md, the final tables;
cold_start/ and final/, Hugging Face folders; checkpoint-STEP/, the last ones, each whole.
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
import re
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.utils.logging import disable_progress_bar

import design
import toy
from advantage import designer_advantages, executor_advantages
from data import (
    DATASETS,
    DataError,
    OneLineParser,
    data_names,
    load_evaluation,
    load_mix,
    normalise_text,
    parse_mix,
    read_prompt,
    step_tasks,
)
from engine import (
    CHAT_KWARGS,
    HUB_NAME,
    EngineError,
    ModelError,
    TorchEngine,
    VLLMEngine,
    check_folder,
    choose_engine,
    find_model,
    load_model,
    lost_rank,
    vllm_missing,
)
from evaluate import (
    EVALUATION_STEP,
    Result,
    Row,
    UsageError,
    draw_curve,
    evaluate,
    markdown_table,
    mean_so_far,
    oracle_table,
    oracle_text,
    progress_line,
    reward_names,
    shares_table,
    success_table,
    write_json,
    write_text,
)
from execute import Rollout, open_pool, rewards_of, rollout, shares, tally
from grpo import (
    LOGPROB_CHUNK,
    Batch,
    ScoringModel,
    active_role,
    empty_batch,
    micro_batches,
    pack,
    padding_waste,
    policy_loss,
    tokens_and_forwards,
)
from reward import score, usable_tasks
from sandbox import SandboxError, configure, in_force
from sft import Example, batches, collect, cosine, encode, read_examples, supervised_loss

BETAS = (0.9, 0.95)  # of every AdamW here
ORACLE_TASKS = 240  # held-out tasks on which every structure is tried
ZERO_STEPS = 10  # so many steps in a row without any reward are worth a warning
GRACE_S = 5.0  # a rank that lost another one lets it end first
GAP_BOUND = {"float32": 1e-3, "bfloat16": 0.05}  # mean |trainer - sampler| log-prob at the start
# train -> whose optimizers there are; the others have one, the executor's
ROLES_OF = {
    "stagewise": ["designer", "executor"],
    "designer": ["designer"],
    "joint": ["joint"],
    "sft": ["sft"],
}
NOT_SETTINGS = ("out", "name", "resume", "dry_run", "export")  # flags that change no result


def setting(default, text: str, **metadata):
    """A field of Config. metadata: choices, or least or above of a number."""
    return field(default=default, metadata={"help": text, **metadata})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Config:
    """Every setting of a run. The defaults are the paper's; a preset overrides some."""

    preset: str = setting("toy", "a set of defaults: toy | qwen3-0.6b | -1.7b | -4b | -8b")
    name: str = setting("", "the run's folder under --out; default: the preset's name and a number")
    out: str = setting("runs", "where run folders go")
    resume: str = setting(
        "",
        "a run folder: go on after its last checkpoint, with its settings; auto: the folder of"
        " --name (or the preset) if it is there, else a new run (for jobs that are restarted)",
    )
    dry_run: bool = setting(
        False, "print memory plan, tokens and estimated time of a step and data mix, and exit"
    )
    export: str = setting("", "a checkpoint folder: write it as a Hugging Face folder, and exit")
    seed: int = setting(0, "all sampling seeds and the toy's first weights derive from it")
    model: str = setting(
        "", "folder or hub name to start from; toy without it: new weights, cold start"
    )
    data: str = setting(
        "",
        "training tasks: a file (JSONL, Parquet), a data set of data.py, or a mix with tasks a step"
        " such as polaris=4,apps=2,codecontests=2; with --train sft a file of traces",
    )
    eval_data: str = setting(
        "", "held-out tasks: files or data sets, with commas; default: some of the training tasks"
    )
    keep: str = setting("", "a file of task ids to train on (evaluate.py --check-golds makes it)")
    difficulty: str = setting(
        "", "keep math tasks that a model solves k times of 8, k in this range, such as 1-7"
    )
    max_tests: int = setting(16, "tests a training program is judged by, at most", least=1)

    train: str = setting(
        "stagewise",
        "whose calls train: stagewise (roles in turn) | joint (both) | designer | executor"
        " | single (no designs, one agent) | sft (cold start only)",
        choices=("stagewise", "joint", "designer", "executor", "single", "sft"),
    )
    steps: int = setting(400, "RL steps", least=0)
    stage_length: int = setting(30, "K: steps until the active role swaps", least=1)
    first_role: str = setting(
        "executor", "the first stage's role", choices=("executor", "designer")
    )
    tasks_per_step: int = setting(8, "B: tasks a step", least=1)
    n_designs: int = setting(4, "M: designs a task", least=1)
    n_executions: int = setting(4, "N: executions a design", least=1)

    lr: float = setting(5e-6, "learning rate of both roles' AdamW", above=0)
    warmup_steps: int = setting(0, "linear warm-up, counted in a role's own updates", least=0)
    weight_decay: float = setting(0.01, "AdamW's decay", least=0)
    grad_clip: float = setting(1.0, "largest gradient norm", above=0)
    clip_low: float = setting(0.2, "the ratio is clipped at 1 - this", least=0)
    clip_high: float = setting(0.2, "the ratio is clipped at 1 + this", least=0)
    tis_cap: float = setting(2.0, "largest importance weight between sampler and trainer", above=0)
    gap_bound: float = setting(
        0.0,
        "at the start, mean |log-prob of trainer - of sampler| allowed (20 times that for a single"
        " token); 0: 0.001 in float32, 0.05 in bfloat16",
        least=0,
    )
    updates_per_step: int = setting(
        4, "optimizer steps a rollout, on disjoint parts of its calls", least=1
    )
    normalize_std: bool = setting(True, "divide advantages by the group's standard deviation")
    mask_truncated: bool = setting(True, "leave replies that hit their token limit out of the loss")
    code_reward: str = setting(
        "all", "a program's reward: all tests, or their fraction", choices=("all", "fraction")
    )
    token_budget: int = setting(16384, "tokens a micro-batch, padding included", least=1)

    temperature: float = setting(1.0, "of sampling, in training and evaluation")
    designer_max_tokens: int = setting(8192, "output tokens of a design", least=1)
    executor_max_tokens: int = setting(8192, "output tokens of an agent's reply", least=1)
    max_context: int = setting(16384, "prompt and reply together", least=1)
    max_calls: int = setting(32, "calls an execution may make", least=1)
    designer_prompt: str = setting("", "a file with a designer prompt; default: the preset's")
    isolation: str = setting(
        "strict", "sandbox: every layer or an error, or what there is", choices=("strict", "best")
    )
    deterministic: bool = setting(False, "run scripts in rounds: the same bits for the same seed")

    sft_traces: int = setting(
        0, "cold start: executions by the teacher (correct ones are kept)", least=0
    )
    sft_steps: int = setting(0, "cold start: optimizer steps", least=0)
    sft_batch: int = setting(128, "cold start: examples a step", least=1)
    sft_lr: float = setting(1e-5, "cold start: peak learning rate", above=0)

    eval_tasks: int = setting(512, "held-out tasks, before and after", least=0)
    tables: bool = setting(
        False, "at the end: who contributed, and every structure forced (needs a second engine)"
    )
    checkpoint_every: int = setting(10, "steps between checkpoints", least=1)
    keep_checkpoints: int = setting(2, "how many of the last checkpoints stay", least=1)
    device: str = setting("auto", "where the model lives", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "float32",
        "of the forward pass and the engine; master weights and moments are float32",
        choices=("float32", "bfloat16"),
    )
    recompute: bool = setting(False, "activation checkpointing: less memory, a third more compute")
    engine: str = setting(
        "auto",
        "who generates; auto: vllm where CUDA and vLLM are, else torch",
        choices=("auto", "torch", "vllm"),
    )
    vllm_memory: float = setting(0.6, "share of the GPU's memory that vLLM may take")
    timeout_minutes: float = setting(
        60.0, "a rank that waits longer for another one gives up", above=0
    )
    threads: int = setting(
        0, "torch threads; 0: torch's choice. OMP_NUM_THREADS overrides", least=0
    )


QWEN3 = dict(
    data="polaris=4,apps=2,codecontests=2",
    eval_data="aime24,aime25,olympiadbench,livecodebench",
    eval_tasks=64,
    checkpoint_every=30,
    dtype="bfloat16",
    recompute=True,
    sft_steps=250,  # 11,000 traces, about three times each
)
# One GPU: shorter replies, and memory shared between the engine and the trainer (see --dry-run).
ONE_GPU = dict(max_context=6144, designer_max_tokens=2048, executor_max_tokens=4096)

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
        tables=True,
        device="cpu",
        engine="torch",
        threads=1,
    ),
    # The paper's two models and numbers, 8 GPUs of 141 GB.
    "qwen3-8b": QWEN3 | dict(model="Qwen/Qwen3-8B"),
    "qwen3-4b": QWEN3 | dict(model="Qwen/Qwen3-4B"),
    # One GPU of 80 GB, one of 24 GB.
    "qwen3-1.7b": QWEN3 | ONE_GPU | dict(model="Qwen/Qwen3-1.7B", vllm_memory=0.3),
    "qwen3-0.6b": QWEN3
    | ONE_GPU
    | dict(model="Qwen/Qwen3-0.6B", vllm_memory=0.25, token_budget=8192),
}
# preset -> (GPUs, GB of each), which --dry-run plans for
CARDS = {"qwen3-8b": (8, 141), "qwen3-4b": (8, 141), "qwen3-1.7b": (1, 80), "qwen3-0.6b": (1, 24)}


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
        options = {"default": defaults.get(f.name, f.default), "help": f.metadata["help"]}
        if f.type == "bool":
            options["action"] = argparse.BooleanOptionalAction
        else:
            kind = {"int": int, "float": float, "str": str}[f.type]
            options.update(type=kind, choices=f.metadata.get("choices"))
        parser.add_argument(flag(f.name), **options)
    config = Config(**vars(parser.parse_args(argv)))
    try:
        check(config)
        given = config != Config(**defaults | {"resume": config.resume})
        if config.resume not in ("", "auto") and given:
            raise UsageError("--resume goes on with the run's own settings: give no other flag")
        if config.designer_prompt:
            prompt = read_prompt(config.designer_prompt)
            config = dataclasses.replace(config, designer_prompt=prompt)
    except (UsageError, DataError) as error:
        parser.error(str(error))
    return config


def check(config: Config) -> None:
    """Raises UsageError for settings that can't work, before anything is made."""
    check_numbers(config)
    if config.temperature != 1.0:
        raise UsageError("--temperature must be 1 in training: another one trains another policy")
    for name in ("model", "resume", "designer_prompt", "keep", "export"):
        given = getattr(config, name)
        on_hub = name == "model" and HUB_NAME.fullmatch(given)
        if given and not (Path(given).exists() or on_hub or (name == "resume" and given == "auto")):
            raise UsageError(f"{flag(name)}: there is no {given}: give a path")
    if Path(config.name).name != config.name:
        raise UsageError(f"--name {config.name}: give one folder's name, --out says where it is")
    mixed = config.data and config.train != "sft"
    names = list(parse_mix(config.data)) if mixed else []
    for given in names + data_names(config.eval_data):
        if not Path(given).is_file() and given not in DATASETS:
            raise UsageError(
                f"--data, --eval-data: no file {given} and no data set of that name: give a file,"
                f" or one of {', '.join(DATASETS)}"
            )
    if config.preset != "toy" and not (config.model and config.data):
        raise UsageError("give --model, a folder, and --data, a file with training tasks")
    if not config.model and (config.data or config.designer_prompt):
        raise UsageError("the toy's teacher knows only its own tasks: give --model as well")
    if not config.model and not (config.sft_steps and config.sft_traces):
        raise UsageError("a cold start needs --sft-steps and --sft-traces, or give --model")
    if config.train == "sft":
        if bool(config.model) != bool(config.data):
            raise UsageError(
                "--train sft imitates the traces of --data FILE from --model, or, without both,"
                " makes the toy's cold start: give both or none"
            )
        if config.data and not (Path(config.data).is_file() and config.sft_steps):
            raise UsageError("--train sft: --data must be a file of traces, --sft-steps at least 1")
    elif config.n_designs * config.n_executions < 2:
        raise UsageError("one execution a task has nothing to compare with: M x N of at least 2")
    elif config.train in ("stagewise", "joint", "designer") and config.n_designs < 2:
        raise UsageError("--n-designs is 1: a designer learns by comparing 2 designs or more")


def check_numbers(config: Config) -> None:
    """Raises UsageError for a number out of its range."""
    for f in dataclasses.fields(Config):
        value = getattr(config, f.name)
        least, above = f.metadata.get("least"), f.metadata.get("above")
        if least is not None and not least <= value < math.inf:
            raise UsageError(f"{flag(f.name)} is {value}: at least {least}")
        if above is not None and not above < value < math.inf:
            raise UsageError(f"{flag(f.name)} is {value}: more than {above}")
    if not 0 < config.vllm_memory <= 1:
        raise UsageError(f"--vllm-memory is {config.vllm_memory}: a share, above 0 and at most 1")
    difficulty_range(config.difficulty)


def difficulty_range(text: str) -> tuple[int, int] | None:
    """
    >>> difficulty_range("1-7"), difficulty_range("")
    ((1, 7), None)
    """
    if not text:
        return None
    found = re.fullmatch(r"([0-8])-([0-8])", text)
    if not found:
        raise UsageError(f"--difficulty is {text!r}: give two of 0 to 8, such as 1-7")
    return int(found[1]), int(found[2])


# --- ranks: the only part of the project that knows of several processes ---


joined = False  # start_ranks() joined a process group (vLLM alone makes one for itself)


def rank() -> int:
    """This process's number among all; as torchrun says it, so also before the group is joined."""
    return int(os.environ.get("RANK", 0))


def ranks() -> int:
    return dist.get_world_size() if joined else 1


def start_ranks(config: Config) -> None:
    """Joins the processes that torchrun started; on a GPU without torchrun, a group of one.

    Without either there is no group and no FSDP: a plain model on a CPU.
    """
    global joined
    cuda = config.device == "cuda"
    if "RANK" not in os.environ:
        if not cuda:
            return
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if cuda:
        devices = torch.cuda.device_count()
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > devices:  # on all of them, so it is said
            raise UsageError(
                f"{devices} CUDA devices are here, one process each: fewer processes, or --device"
                " cpu"
            )
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timedelta(minutes=config.timeout_minutes),
    )
    joined = True


def not_the_file(error: BaseException) -> bool:
    """Is it memory or another rank that failed while a file was written or read?"""
    return lost_rank(error) or isinstance(error, torch.OutOfMemoryError)


def say(text: str) -> None:
    """Prints, on the first rank only."""
    if rank() == 0:
        print(text, flush=True)


def gather(part: list) -> list:
    """The lists of all ranks, one after the other, on every rank."""
    if ranks() == 1:
        return part
    parts = [None] * ranks()
    dist.all_gather_object(parts, part)
    return [item for part in parts for item in part]


def barrier() -> None:
    gather([])


def exists(path: Path) -> bool:
    """The same answer on all ranks, also where a network's file system lags."""
    return all(gather([path.exists()]))


def sum_over_ranks(values: list[float]) -> list[float]:
    return [sum(column) for column in zip(*gather([values]), strict=True)]


def my_share(items: list) -> tuple[range, list]:
    """(places, items) of this rank's stretch of `items`."""
    first, last = (r * len(items) // ranks() for r in (rank(), rank() + 1))
    return range(first, last), items[first:last]


def shard(policy: ScoringModel, config: Config) -> ScoringModel:
    """FSDP2 over all ranks, layer by layer and then the rest; nothing to do in a plain process.

    The master weights are float32 whatever was loaded, and a layer's are whole in memory only
    while it is cast here, and while it computes. Gradients are summed in float32.
    """
    device = torch.device(config.device)
    if config.recompute:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
        policy.train()  # or Transformers computes without checkpoints; there is no dropout
    if not joined:
        return policy.to(device)
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32
    )
    # Resharded after forward, the root too: else a scoring pass without gradient would leave the
    # root whole, and neither a step nor a push would see the same weights.
    how = {
        "mesh": dist.init_device_mesh(device.type, (ranks(),)),
        "mp_policy": precision,
        "reshard_after_forward": True,
    }
    for layer in policy.model.base_model.layers:
        fully_shard(layer.to(device, torch.float32), **how)
    fully_shard(policy.to(device, torch.float32), **how)
    return policy


def full_weights(policy: ScoringModel, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor), one at a time. All ranks must take all of them: each is a collective.

    The cast comes first: half the bytes travel, and an engine of that dtype need not cast.
    """
    for name, weight in policy.model.named_parameters():
        weight = weight.detach().to(dtype)
        yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


# --- SIGTERM: save, and go ---


class Preempted(Exception):
    """SIGTERM came: the machine is wanted back. What is done is saved, and the exit status is 0."""


class Preemption:
    """Notes SIGTERM. Raises Preempted at once where nothing can be lost, else learn() asks."""

    def __init__(self):
        self.asked, self.at_once = False, False

    def __call__(self, signum, frame) -> None:
        self.asked = True
        if self.at_once:
            raise Preempted

    @contextlib.contextmanager
    def raising(self, at_once: bool) -> Iterator[None]:
        before, self.at_once = self.at_once, at_once
        try:
            if at_once and self.asked:
                raise Preempted
            yield
        finally:
            self.at_once = before


preemption = Preemption()


# --- what a preset brings: model, tasks, scripts ---


@dataclass
class World:
    """Where tasks come from and how they are asked. Steps and evaluation know no more than this."""

    tasks_of: Callable[[int], list]  # step -> its B tasks, of all ranks
    eval_tasks: list
    scripts: dict[str, str]  # structure -> script: baselines and the oracle table
    designer_prompt: str | None


def make_world(config: Config) -> World:
    """Tasks and scripts of the preset, or of what --data names. Raises UsageError, DataError."""
    prompt = config.designer_prompt
    if not config.data:
        return World(
            tasks_of=lambda step: toy.make_tasks(config.tasks_per_step, f"{config.seed} {step}"),
            eval_tasks=toy.held_out_tasks(config.eval_tasks, config.seed),
            scripts=toy.SCRIPTS,
            designer_prompt=prompt or toy.DESIGNER_PROMPT,
        )
    held_out = []
    for name in data_names(config.eval_data):
        tasks, report = load_evaluation(name)
        say(str(report))
        held_out += usable(tasks)
    mix = {name: count or config.tasks_per_step for name, count in parse_mix(config.data).items()}
    if sum(mix.values()) != config.tasks_per_step:
        raise UsageError(
            f"--data makes {sum(mix.values())} tasks a step, --tasks-per-step is"
            f" {config.tasks_per_step}: make them equal"
        )
    sources, reports = load_mix(
        mix,
        exclude=held_out,
        difficulty=difficulty_range(config.difficulty),
        keep=config.keep or None,
        max_tests=config.max_tests,
        seed=config.seed,
    )
    for report in reports:
        say(str(report))
    sources = {name: usable(tasks) for name, tasks in sources.items()}
    rng = random.Random(config.seed)
    if config.eval_data:
        held_out = rng.sample(held_out, min(config.eval_tasks, len(held_out)))
    else:
        held_out, sources = hold_out(sources, config.eval_tasks, rng)
    for name, count in mix.items():
        if len(sources[name]) < count:
            raise UsageError(
                f"{name}: {len(sources[name])} tasks are left to train on beside {len(held_out)}"
                f" held-out ones, a step takes {count}: give more rows, or a smaller --eval-tasks"
            )
    return World(
        tasks_of=lambda step: step_tasks(sources, step, config.seed, mix=mix),
        eval_tasks=held_out,
        scripts=design.SCRIPTS,
        designer_prompt=prompt or None,
    )


def usable(tasks: list) -> list:
    """Tasks that can be graded; says how many can't."""
    kept, bad = usable_tasks(tasks)
    if bad:
        say(f"{len(bad)} golds can't be graded, the first is {bad[0].id}: left out")
    return kept


def hold_out(sources: dict[str, list], n: int, rng: random.Random) -> tuple[list, dict[str, list]]:
    """(n held-out tasks, the sources without them and without tasks that ask the same)."""
    pool = [task for tasks in sources.values() for task in tasks]
    held_out = rng.sample(pool, min(n, len(pool)))
    asked = {normalise_text(task.question) for task in held_out}
    left = {
        name: [task for task in tasks if normalise_text(task.question) not in asked]
        for name, tasks in sources.items()
    }
    return held_out, left


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
            f"the {name} is {value} at update {update + 1} of this optimizer: lower its learning"
            " rate; what was saved before is intact"
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
    """Some calls of one role, packed; `n_tokens` is that of the role's whole update, all ranks."""

    batch: Batch
    advantage: torch.Tensor  # (B,)
    n_tokens: int


def my_batches(
    calls: list, forward: list[int], config: Config, pad_id: int
) -> tuple[list[tuple[list[int], Batch]], float]:
    """This rank's micro-batches of calls[i] for i in forward -> ([(rows, batch)], padding waste).

    Every rank cuts the same list and takes every R-th batch, so all have the same number; a rank
    whose turn has no calls gets an empty batch, whose loss and gradients are exactly 0.
    """
    lengths = [len(calls[i].prompt_ids) + len(calls[i].output_ids) for i in forward]
    cut = micro_batches(lengths, config.token_budget, ranks())
    mine, how = [], {"mask_truncated": config.mask_truncated, "device": config.device}
    for part in cut[rank() :: ranks()]:
        rows = [forward[i] for i in part]
        batch = empty_batch(pad_id, config.device)
        if rows:
            batch = pack([calls[i] for i in rows], pad_id, **how)
        mine.append((rows, batch))
    return mine, padding_waste(lengths, cut)


def plan_updates(
    parts: list[tuple[list, list]], config: Config, pad_id: int, seed: str
) -> tuple[list[list[MicroBatch]], float]:
    """The calls of a step, of all ranks -> `updates_per_step` lists of this rank's micro-batches.

    parts: (calls, advantages) of each role that trains. Every call is in exactly one update. Each
    role has its own token mean in an update (joint training sums the two losses). Also returns the
    largest share of padding in an update.
    """
    updates, waste = [[] for _ in range(config.updates_per_step)], 0.0
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
            cut, share = my_batches(my_calls, forward, config, pad_id)
            waste = max(waste, share)
            for rows, batch in cut:
                advantage = torch.tensor([my_advantages[i] for i in rows] or [0.0])
                update.append(MicroBatch(batch, advantage.to(config.device), n_tokens))
    return updates, waste


def score_tokens(policy: ScoringModel, batch: Batch) -> torch.Tensor:
    """Log-probs [B, T] of the batch's response tokens, 0 elsewhere."""
    return policy(batch.input_ids, batch.attention_mask, None, batch.response_mask)


def train_on(
    policy: ScoringModel, optimizer: Optimizer, updates: list[list[MicroBatch]], config: Config
) -> dict:
    """All updates of one step; returns metrics. Moves no weight where there is nothing to learn."""
    # logp_old is older than the first update; of a single update it is that update's own forward.
    logp_old = [[None] * len(update) for update in updates]
    if len(updates) > 1:
        with torch.no_grad():
            logp_old = [[score_tokens(policy, m.batch) for m in update] for update in updates]
    totals, losses, norms, largest_gap = Counter(), [], [], 0.0
    for update, olds in zip(updates, logp_old, strict=True):
        if not update:
            continue
        update_loss = 0.0
        for micro, old in zip(update, olds, strict=True):
            logp = score_tokens(policy, micro.batch)
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
            (loss * ranks()).backward()  # FSDP averages over ranks
            largest_gap = max(largest_gap, metrics.pop("sampler_gap_max").item())
            totals.update({name: value.item() for name, value in metrics.items()})
            update_loss += loss.item()
        (update_loss,) = sum_over_ranks([update_loss])  # known to all, so all stop at a NaN
        check_finite("loss", update_loss, optimizer.updates)
        losses.append(update_loss)
        norms.append(optimizer.step(config))
    names = sorted(totals)
    totals = dict(zip(names, sum_over_ranks([totals[name] for name in names]), strict=True))
    return training_metrics(totals) | {
        "loss": sum(losses) / max(1, len(losses)),
        "grad_norm": max(norms, default=0.0),
        "sampler_gap_max": max(gather([largest_gap])),
        "skipped": len(updates) - len(losses),
        "lr": optimizer.lr,
    }


def training_metrics(totals: dict[str, float]) -> dict:
    """Sums over micro-batches and ranks -> means over trained tokens. {}: nothing was trained."""
    tokens = totals.get("tokens", 0.0)

    def mean(name: str, nothing: float = 0.0) -> float:
        return totals[name] / tokens if tokens else nothing

    return {
        "trained_tokens": int(tokens),
        "clip_fraction": mean("clipped"),
        "approx_kl": mean("kl_sum"),
        "ratio": mean("ratio_sum", 1.0),
        "tis_weight": mean("tis_weight_sum", 1.0),
        "tis_capped": mean("tis_capped"),
        "sampler_gap": mean("sampler_gap_sum"),
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
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.grad_clip)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        check_finite("gradient norm", norm, self.updates)
        self.lr = self.peak * self.schedule(self.updates)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.updates += 1
        return norm


def check_sampler(policy: ScoringModel, calls: list, config: Config, pad_id: int, engine) -> float:
    """Before the first update of a process: do engine and trainer hold the same model?

    Scores some of this rank's calls and compares. Returns the mean gap over all ranks' tokens;
    raises EngineError where it is past --gap-bound, or a single token past 20 times that.
    """
    bound = config.gap_bound or GAP_BOUND[config.dtype]
    # One forward a rank, whatever it has: as many of its first calls as the budget takes.
    longest = max((len(c.prompt_ids) + len(c.output_ids) for c in calls), default=1)
    calls = calls[: max(1, config.token_budget // longest)]
    batch = empty_batch(pad_id, config.device)
    if calls:
        batch = pack(calls, pad_id, mask_truncated=False, device=config.device)
    with torch.no_grad():
        logp = score_tokens(policy, batch)
    gap = torch.where(batch.loss_mask, (logp - batch.logp_sampler).abs(), 0.0)
    total, tokens = sum_over_ranks([gap.sum().item(), batch.loss_mask.sum().item()])
    mean, (worst, where) = total / max(1.0, tokens), max(gather([worst_token(calls, gap, logp)]))
    if not (mean <= bound and worst <= 20 * bound):
        raise EngineError(
            f"{type(engine).__name__} and the trainer disagree before any update: mean |log-prob"
            f" gap| {mean:.2g} over {tokens:.0f} tokens (bound {bound:g}), largest {worst:.2g}"
            f" (bound {20 * bound:g}): {where}. Both saw the same ids, so look at the weights"
            " in the engine, its temperature and dtype; --gap-bound sets the bound"
        )
    return mean


def worst_token(calls: list, gap: torch.Tensor, logp: torch.Tensor) -> tuple[float, str]:
    """(largest gap, where it is). Infinity for a gap that is no number."""
    if not calls:
        return 0.0, "no calls"
    gap = gap.nan_to_num(nan=math.inf)
    row, column = divmod(int(gap.argmax()), gap.shape[1])
    call = calls[row]
    t = column - len(call.prompt_ids)
    return gap[row, column].item(), (
        f"{call.role} call of {len(call.prompt_ids)} + {len(call.output_ids)} tokens, output token"
        f" {t} (id {call.output_ids[t]}): engine {call.logp_sampler[t]:.4f}, trainer"
        f" {logp[row, column].item():.4f}"
    )


# --- the cold start ---


def teacher_traces(config: Config, world: World, pool) -> list[Example]:
    """The toy teacher's correct traces, through the same rollout as everything else."""
    tasks = toy.make_tasks(
        config.sft_traces, f"{config.seed} cold start", kinds=toy.COLD_START_KINDS
    )
    show = counter("tasks by the teacher", lambda kept: f", {kept} examples kept")
    options = rollout_options(config, world) | {"seed": config.seed}
    places, mine = my_share(tasks)
    return gather(
        collect(mine, toy.teacher(), pool, score, places=places, on_progress=show, **options)
    )


def sft_step(
    policy: ScoringModel, optimizer: Optimizer, calls: list, pad_id: int, config: Config
) -> dict:
    """One update on the replies of `calls` (all ranks'); returns its metrics."""
    began = time.monotonic()
    n_tokens, loss = sum(len(call.output_ids) for call in calls), 0.0
    cut, waste = my_batches(calls, list(range(len(calls))), config, pad_id)
    for _, batch in cut:
        logp = score_tokens(policy, batch)
        part = supervised_loss(logp, batch.loss_mask, n_tokens)
        (part * ranks()).backward()  # FSDP averages over ranks
        loss += part.item()
    (loss,) = sum_over_ranks([loss])
    check_finite("loss", loss, optimizer.updates)
    norm = optimizer.step(config)
    seconds = time.monotonic() - began
    metrics = {"loss": loss, "trained_tokens": n_tokens, "grad_norm": norm, "lr": optimizer.lr}
    return metrics | {"padding": waste, "seconds/step": seconds}


def imitation(
    policy: ScoringModel, tokenizer, examples: list[Example], config: Config
) -> tuple[Optimizer, Callable]:
    """(the optimizer, step_of(step) -> metrics of one update). Raises UsageError: nothing fits."""
    encoded = encode(examples, tokenizer, max_context=config.max_context, chat_kwargs=CHAT_KWARGS)
    if len(encoded) < len(examples):
        say(f"{len(examples) - len(encoded)} examples exceed --max-context: left out")
    if not encoded:
        raise UsageError("every example exceeds --max-context: give a larger one")
    order = list(batches(len(encoded), config.sft_batch, config.sft_steps, config.seed))
    warmup = min(30, config.sft_steps)
    schedule = functools.partial(cosine, steps=config.sft_steps, warmup=warmup)
    optimizer = Optimizer(policy, config.sft_lr, config.weight_decay, schedule)

    def step_of(step: int, *, first: bool = False) -> dict:
        calls = [encoded[i] for i in order[step]]
        metrics = sft_step(policy, optimizer, calls, tokenizer.pad_token_id or 0, config)
        return {"step": step, "role": "sft", **metrics}

    return optimizer, step_of


def counter(noun: str, more: Callable = mean_so_far) -> Callable:
    """For on_progress: how far it is, said by the first rank only."""
    return progress_line(noun, more) if rank() == 0 else lambda *_: None


# --- checkpoints and files ---


@dataclass
class State:
    """What changes in a run: the weights, who steps them, and the engine that plays them."""

    policy: ScoringModel
    tokenizer: object
    engine: TorchEngine | VLLMEngine | None  # None: supervised training draws nothing
    optimizers: dict[str, Optimizer]


def read_config(folder: Path) -> Config:
    """The settings of a run. Raises UsageError for a folder that is none."""
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return Config(**saved | {"resume": str(folder)})
    except (OSError, TypeError) as error:
        raise UsageError(f"{folder} is no run folder, give one like runs/toy: {error}") from error
    except ValueError as error:
        raise UsageError(
            f"{folder}/config.json can't be read: put it back (it is \"config\" in a checkpoint's"
            f" state.json), or begin anew with another --name: {error}"
        ) from error


def require_same(folder: Path, saved: dict, config: Config) -> None:
    """Raises UsageError where the configuration saved in `folder` differs in a setting."""
    others = [
        f"{flag(name)} was {saved.get(name)!r}, is {value!r}"
        for name, value in dataclasses.asdict(config).items()
        if name not in NOT_SETTINGS and saved.get(name) != value
    ]
    if others:
        raise UsageError(f"{folder} is of another configuration: {'; '.join(others)}")


@contextlib.contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Fill the folder that this yields; only then it becomes `folder`. OSError if it can't be.

    On all ranks together; the first one makes and renames. A kill leaves at most a hidden
    partial folder, which the next run removes.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        barrier()
        yield partial
        barrier()
        if rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        barrier()
    except (SafetensorError, RuntimeError, CheckpointException) as error:
        if not_the_file(error):
            raise
        free = shutil.disk_usage(folder.parent).free / 1e6  # the libraries don't say "disk full"
        raise OSError(
            f"{folder} could not be written, {free:.1f} MB are free there: {one_line(error)}"
        ) from error
    finally:
        if rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)


def one_line(error: BaseException | str) -> str:
    """The message without line breaks; of a failed save or load, what failed on which rank."""
    if isinstance(error, CheckpointException):
        error = "; ".join(f"rank {r}: {why}" for r, (why, _) in error.failures.items())
    return " ".join(str(error).split())[:400]


def save_model(policy: ScoringModel, tokenizer, folder: Path, config: Config) -> None:
    """A Hugging Face folder that says how it is to be sampled (run_config.json)."""
    with whole(folder) as partial:
        weights = {}
        for name, weight in full_weights(policy, getattr(torch, config.dtype)):
            if rank() == 0:
                weights[name] = weight.cpu()
        if rank() == 0:
            policy.model.save_pretrained(partial, state_dict=weights)
            tokenizer.save_pretrained(partial)
            write_json(partial / "run_config.json", dataclasses.asdict(config))


def tensors(state: State) -> dict:
    """Every tensor of a checkpoint, by name: weights, and the moments of optimizers that stepped.

    Under FSDP each is a shard, and so it is saved and loaded, by any number of ranks.
    """
    named = list(state.policy.model.named_parameters())
    found = {"model": {name: weight.detach() for name, weight in named}}
    for role, optimizer in state.optimizers.items():
        if optimizer.updates:
            moments = optimizer.adamw.state
            for part in ("exp_avg", "exp_avg_sq"):
                found[f"{role}/{part}"] = {name: moments[weight][part] for name, weight in named}
    return found


def save_checkpoint(folder: Path, step: int, state: State, config: Config) -> None:
    """Weights and moments, sharded, and what each optimizer counts. Keeps the last ones."""
    with whole(folder / f"checkpoint-{step:06}") as partial:
        dcp.save(tensors(state), checkpoint_id=partial, no_dist=not joined)
        counts = {role: {"updates": o.updates, "lr": o.lr} for role, o in state.optimizers.items()}
        if rank() == 0:
            saved = {"step": step, "optimizers": counts, "config": dataclasses.asdict(config)}
            write_json(partial / "state.json", saved)
    if rank() == 0:
        for old in checkpoints_of(folder)[: -config.keep_checkpoints]:
            shutil.rmtree(old)


def checkpoints_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"))


def load_checkpoint(folder: Path, state: State, config: Config) -> int:
    """The checkpoint `folder` into `state`, whatever number of ranks wrote it; the steps done.

    Raises UsageError for the checkpoint of another configuration or one that can't be read.
    """
    try:
        saved = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        require_same(folder, saved["config"], config)
        for role, optimizer in state.optimizers.items():
            counts = saved["optimizers"][role]
            optimizer.updates, optimizer.lr = counts["updates"], counts["lr"]
            if optimizer.updates:  # room for what is loaded in place
                for weight in state.policy.parameters():
                    optimizer.adamw.state[weight] = {
                        "step": torch.tensor(float(optimizer.updates)),
                        "exp_avg": torch.zeros_like(weight),
                        "exp_avg_sq": torch.zeros_like(weight),
                    }
        dcp.load(tensors(state), checkpoint_id=folder, no_dist=not joined)
        return saved["step"]
    except UsageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, CheckpointException) as error:
        if not_the_file(error):
            raise
        raise UsageError(
            f"{folder} can't be read; remove it to go on after the one before: {one_line(error)}"
        ) from error


def export(folder: Path) -> Path:
    """A checkpoint folder -> a Hugging Face folder beside it, in this one process."""
    config = read_config(folder.parent)
    start = find_model(config.model) if config.model else folder.parent / "cold_start"
    model, tokenizer = load_model(start, "cpu", torch.float32)
    state = State(ScoringModel(model), tokenizer, None, {})
    load_checkpoint(folder, state, config)
    target = folder.with_name(folder.name.replace("checkpoint", "export"))
    save_model(state.policy, tokenizer, target, config)
    return target


def cut_log(path: Path, step: int) -> None:
    """Leaves the lines of steps before `step`: what came after the checkpoint is done again.

    A last line that was torn by a crash comes after the checkpoint too. Raises UsageError where a
    step before it is missing, on all ranks; the first one writes. A removed log begins anew.
    """
    if not path.exists():
        return
    kept, steps = [], []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] < step:
                steps.append(json.loads(line)["step"])
                kept.append(line + "\n")
        except (ValueError, TypeError, KeyError):
            break
    if steps != list(range(min(steps, default=0), step)):
        raise UsageError(
            f"{path} has not every step before {step} once and in order: mend it, or remove it to"
            " log only what comes now"
        )
    if rank() == 0:
        write_text(path, "".join(kept))


def new_folder(config: Config) -> Path:
    """Makes runs/NAME with its config.json, both or none; says its name to all ranks.

    Without --name it is the first of toy, toy-2, toy-3, ... that is free.
    """
    out, made = Path(config.out), None
    names = [config.name or config.preset]
    if not config.name and config.resume != "auto":
        names += [f"{config.preset}-{i}" for i in range(2, 1000)]
    if rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        partial = out / f".{names[0]}.{os.getpid()}.partial"
        partial.mkdir()
        try:
            write_json(partial / "config.json", dataclasses.asdict(config))
            free = [out / name for name in names if not (out / name).exists()]
            if free:
                made = str(partial.rename(free[0]))
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    (made,) = gather([made] if rank() == 0 else [])
    if made is None:
        taken = out / names[0]
        raise UsageError(f"{taken} exists: give another --name, or --resume {taken}")
    return Path(made)


def sample_designs(world: World, pool, config: Config, engine) -> str:
    """A design and its execution for one task of each source, as markdown; the first rank asks."""
    if rank() != 0:
        return ""
    tasks = {task.source or task.kind: task for task in reversed(world.eval_tasks[:64])}
    asked = list(tasks.values()) or world.tasks_of(0)[:3]
    plan = {"n_designs": 1, "n_executions": 1, "seed": config.seed, "step": EVALUATION_STEP}
    rollouts = rollout(asked, engine, pool, score, **plan, **rollout_options(config, world))
    parts = []
    for rolled in rollouts:
        drawn = rolled.designs[0]
        execution = drawn.executions[0]
        calls = "".join(f"    {call.agent}: {call.text!r}\n" for call in execution.calls)
        parts.append(
            f"## {rolled.task.question}\n\n```python\n{drawn.script or ''}```\n"
            f"{drawn.structure or drawn.error}; {execution.status}, "
            f"reward {execution.reward:g}\n\n{calls}\n"
        )
    return "".join(parts)


# --- the run ---


def make_state(start: Path, config: Config) -> State:
    """Engine, policy and optimizers, all with the weights of the folder `start`."""
    model, tokenizer = load_model(start, "cpu", getattr(torch, config.dtype))
    engine = make_engine(start, model, tokenizer, config)
    policy = shard(ScoringModel(model, temperature=config.temperature), config)
    schedule = functools.partial(warm_up, warmup=config.warmup_steps)
    optimizers = {
        role: Optimizer(policy, config.lr, config.weight_decay, schedule)
        for role in ROLES_OF.get(config.train, ["executor"])
    }
    return State(policy, tokenizer, engine, optimizers)


def warm_up(update: int, warmup: int) -> float:
    """Factor on the learning rate: up to 1 in `warmup` updates, then 1."""
    return min(1.0, (update + 1) / warmup) if warmup else 1.0


def make_engine(start: Path, model, tokenizer, config: Config) -> TorchEngine | VLLMEngine:
    """An engine of this rank with weights of its own: those of `model`, which lies in `start`."""
    limits = {"max_context": config.max_context, "chat_kwargs": CHAT_KWARGS}
    if config.engine == "vllm":
        return VLLMEngine(
            start,
            dtype=config.dtype,
            gpu_memory=config.vllm_memory,
            distributed=joined,
            **limits,
        )
    return TorchEngine(copy.deepcopy(model).to(config.device), tokenizer, **limits)


def push_weights(state: State, config: Config) -> None:
    state.engine.load_weights(full_weights(state.policy, getattr(torch, config.dtype)))


def roll_out(
    step: int, state: State, world: World, pool, config: Config
) -> tuple[list[Rollout], float]:
    """(the rollouts of all ranks' tasks, seconds of scoring over all threads and ranks).

    Every rank plays its stretch of the tasks; designs and calls then go to all. Raises Preempted
    on all ranks if SIGTERM came to one.
    """
    tasks = world.tasks_of(step)
    plan = {"n_designs": config.n_designs, "n_executions": config.n_executions}
    if config.train == "single":
        runs = config.n_designs * config.n_executions
        plan = {"scripts": [world.scripts["single"]], "n_executions": runs}
    scoring: list[float] = []  # they run beside the rollout

    def timed_score(task, response: str) -> float:
        started = time.monotonic()
        reward = score(task, response, code=config.code_reward)
        scoring.append(time.monotonic() - started)
        return reward

    places, mine = my_share(tasks)
    rolled = []
    try:
        with preemption.raising(at_once=True):
            if mine:
                rolled = rollout(
                    mine,
                    state.engine,
                    pool,
                    timed_score,
                    seed=config.seed,
                    step=step,
                    places=places,
                    **plan,
                    **rollout_options(config, world),
                )
        designs = gather([each.designs for each in rolled])
    except Preempted:
        designs = gather([None])
    if None in designs:
        raise Preempted
    rollouts = [Rollout(task, each) for task, each in zip(tasks, designs, strict=True)]
    return rollouts, sum_over_ranks([sum(scoring)])[0]


def train_step(
    step: int, state: State, world: World, pool, config: Config, *, first: bool = False
) -> dict:
    """The seven parts of a step; returns its metrics. first: the first step of this process."""
    began = time.monotonic()
    rolled, scoring = roll_out(step, state, world, pool, config)
    rolled_out = time.monotonic()
    if isinstance(state.engine, VLLMEngine):
        state.engine.sleep()  # its memory is the trainer's until the weights are pushed
    roles = roles_to_train(config, step)
    parts = [training_calls(rolled, role, normalize_std=config.normalize_std) for role in roles]
    pad_id = state.tokenizer.pad_token_id or 0  # any will do: masks come from lengths
    if first:
        _, mine = my_share(parts[0][0])
        gap = check_sampler(state.policy, mine, config, pad_id, state.engine)
        say(f"sampler and trainer agree: mean log-prob gap {gap:.1e}")
    updates, waste = plan_updates(parts, config, pad_id, f"{config.seed} {step}")
    role = "joint" if len(roles) > 1 else roles[0]
    metrics = train_on(state.policy, state.optimizers[role], updates, config)
    trained = time.monotonic()
    push_weights(state, config)
    synced = time.monotonic()
    rewards, ran = rewards_of(rolled)
    constant = {  # a group is constant where all its advantages are exactly 0
        "designer": (designer_advantages(rewards) == 0).all(axis=1).mean(),
        "executor": (executor_advantages(rewards, ran) == 0).all(axis=(1, 2)).mean(),
    }
    total = tally(rolled)
    tokens = total["tokens/designer"] + total["tokens/executor"]
    seconds = {
        "rollout": rolled_out - began,  # of the slowest rank: all wait for it
        "reward": scoring,
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
        "padding": waste,
        **{f"seconds/{name}": value for name, value in seconds.items()},
        "tokens_per_second": tokens / seconds["rollout"],
    }


def console_line(m: dict, steps: int) -> str:
    """One line a step."""
    head = f"{m['step'] + 1:4}/{steps} {m['role']:8}"
    tail = f"grad {m['grad_norm']:.2f}  {m['seconds/step']:.1f} s"
    if m["role"] == "sft":
        return f"{head} loss {m['loss']:.3f}  lr {m['lr']:.1e}  {tail}"
    by_source = " ".join(
        f"{name.removeprefix('reward/')} {m[name]:.2f}" for name in reward_names(m)
    )
    return (
        f"{head} reward {m['reward']:.2f} ({by_source})"
        f"  valid {m['valid_designs']:.2f}  calls {m['calls_per_execution']:.1f}"
        f"  truncated {m['truncated/executor']:.2f}  kl {m['approx_kl']:.0e}"
        f"  gap {m['sampler_gap_max']:.0e}  {tail}"
    )


def start_folder(config: Config, folder: Path, world: World, pool) -> Path:
    """The model folder that RL starts from: --model, or the cold start of this run."""
    if config.model:
        return find_model(config.model)
    start = folder / "cold_start"
    if not exists(start):
        examples = teacher_traces(config, world, pool)
        if not examples:
            raise UsageError("the teacher left no correct trace: give more --sft-traces")
        texts = [m["content"] for e in examples for m in e.messages]
        tokenizer = toy.make_tokenizer(texts + [e.response for e in examples])
        policy = shard(ScoringModel(toy.make_model(tokenizer, config.seed)), config)
        _, step_of = imitation(policy, tokenizer, examples, config)
        show = counter("steps of the cold start", lambda loss: f", loss {loss:.3f}")
        for step in range(config.sft_steps):
            show(step + 1, config.sft_steps, step_of(step)["loss"])
        save_model(policy, tokenizer, start, config)
    return start


def held_out(
    label: str, world: World, pool, config: Config, engine, executor_engine=None
) -> Result | None:
    """What is trained (designing, or the single agent) on the held-out tasks, one try each."""
    if not world.eval_tasks:
        return None
    places, mine = my_share(world.eval_tasks)
    system = "single" if config.train == "single" else "designed"
    result = Result(system)
    if mine:
        result = evaluate(
            mine,
            engine,
            pool,
            score,
            system=system,
            scripts=world.scripts,
            executor_engine=executor_engine,
            seed=config.seed,
            places=places,
            on_progress=counter(label),
            **rollout_options(config, world),
        )
    return Result(system, gather(result.rows))


def measure(name: str, folder: Path, world: World, pool, config: Config, engine) -> Result | None:
    """Held-out success and sample designs, "before" or "after"; what is in its file stays."""
    saved = folder / f"{name}.json"
    if exists(saved):
        try:
            rows = [Row(**row) for row in json.loads(saved.read_text(encoding="utf-8"))]
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{saved} can't be read; remove it to evaluate again: {error}"
            ) from error
        return Result(name, rows) if rows else None
    result = held_out(f"held-out tasks {name}", world, pool, config, engine)
    if result:
        say(f"held-out success {name} RL: {result.mean():.3f}")
    samples = sample_designs(world, pool, config, engine)
    if rank() == 0:
        page = folder / "designs.md"
        shown = page.read_text(encoding="utf-8") if page.exists() else ""
        first_part = shown.split(f"# {name}\n")[0]
        write_text(page, f"{first_part}# {name}\n\n{samples}")
        write_json(saved, [dataclasses.asdict(row) for row in result.rows] if result else [])
    barrier()
    return result


def run(config: Config, folder: Path, world: World) -> None:
    """A whole run, or the rest of one: cold start and steps that are done are not done again."""
    began = time.monotonic()
    with open_pool(deterministic=config.deterministic) as pool:
        print_header(config, folder)
        if rank() == 0:
            write_json(folder / "sandbox.json", in_force())
        start = start_folder(config, folder, world, pool)
        if config.train == "sft":
            say(f"cold start saved in {start}")
            return
        state = make_state(start, config)
        before = measure("before", folder, world, pool, config, state.engine)
        done = go_on(folder, state, config)
        push_weights(state, config)
        rl_step = functools.partial(train_step, state=state, world=world, pool=pool, config=config)
        learn(rl_step, state, config, folder, done, config.steps)
        save_model(state.policy, state.tokenizer, folder / "final", config)
        after = measure("after", folder, world, pool, config, state.engine)
        points = [(0, before), (config.steps, after)] if before and after else []
        draw_log(folder, points)
        if before and after:
            text = final_tables(start, state, before, after, world, pool, config)
            if rank() == 0:
                write_text(folder / "table.md", text)
            say("\n" + text)
    minutes = (time.monotonic() - began) / 60
    say(f"{minutes:.1f} minutes. Everything is in {folder}: look at curve.png and designs.md")


def imitate_file(config: Config, folder: Path, examples: list[Example]) -> None:
    """--train sft on the traces of a file: the cold start of a real model, or the rest of one."""
    model, tokenizer = load_model(find_model(config.model), "cpu", getattr(torch, config.dtype))
    policy = shard(ScoringModel(model), config)
    say(f"run {folder}: {len(examples)} examples, {config.sft_steps} steps of {config.sft_batch}")
    optimizer, step_of = imitation(policy, tokenizer, examples, config)
    state = State(policy, tokenizer, None, {"sft": optimizer})
    learn(step_of, state, config, folder, go_on(folder, state, config), config.sft_steps)
    draw_log(folder, [])
    save_model(policy, tokenizer, folder / "final", config)  # the last: by it a run is finished
    say(f"the model is in {folder / 'final'}: go on with --model {folder / 'final'}")


def go_on(folder: Path, state: State, config: Config) -> int:
    """Loads the last checkpoint if there is one and cuts the log to it; returns the steps done."""
    saved = gather(checkpoints_of(folder) if rank() == 0 else [])  # one view of the file system
    done = load_checkpoint(saved[-1], state, config) if saved else 0
    cut_log(folder / "log.jsonl", done)
    barrier()
    return done


def draw_log(folder: Path, points: list) -> None:
    """curve.png from the log; where there is none, as after --steps 0, there is no curve."""
    log = folder / "log.jsonl"
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    if lines and rank() == 0:
        draw_curve([json.loads(line) for line in lines], points, folder / "curve.png")


def learn(
    step_of: Callable, state: State, config: Config, folder: Path, done: int, steps: int
) -> None:
    """Steps `done` to `steps` by step_of(step, first=...): train, log, save.

    Raises Preempted after SIGTERM, with everything saved up to the last whole step.
    """
    without_reward, saved = 0, done
    with preemption.raising(at_once=False):
        for step in range(done, steps):
            try:
                if any(gather([preemption.asked])):
                    raise Preempted
                metrics = step_of(step, first=step == done)
            except Preempted:
                if step > saved:
                    save_checkpoint(folder, step, state, config)
                raise
            except FloatingPointError as error:
                raise FloatingPointError(f"step {step + 1}/{steps}: {error}") from error
            if rank() == 0:
                with (folder / "log.jsonl").open("a", encoding="utf-8") as log:
                    log.write(json.dumps(metrics) + "\n")
            say(console_line(metrics, steps))
            without_reward = 0 if metrics.get("reward", 1.0) else without_reward + 1
            if without_reward == ZERO_STEPS:
                say(
                    f"no reward in {ZERO_STEPS} steps: nothing can be learned so. Look at status/* "
                    f"in {folder / 'log.jsonl'}, and at {folder / 'designs.md'}"
                )
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == steps:
                save_checkpoint(folder, step + 1, state, config)
                saved = step + 1
        if any(gather([preemption.asked])):  # in the last step
            raise Preempted


def final_tables(
    start: Path, state: State, before: Result, after: Result, world: World, pool, config: Config
) -> str:
    """Success and structure shares; with --tables who contributed, and every structure forced."""
    success = {"before": before}
    cold = None
    if config.tables:
        model, tokenizer = load_model(start, "cpu", getattr(torch, config.dtype))
        cold = make_engine(start, model, tokenizer, config)
    if cold and config.train != "single":
        for name, designer, executor in (
            ("new designer, old executor", state.engine, cold),
            ("old designer, new executor", cold, state.engine),
        ):
            label = f"held-out tasks, {name}"
            success[name] = held_out(label, world, pool, config, designer, executor)
    success["after"] = after
    parts = [success_table(success), shares_table({"before": before, "after": after})]
    if cold and rank() == 0:
        tasks = world.eval_tasks[:ORACLE_TASKS]
        options = rollout_options(config, world) | {"seed": config.seed}
        for name, engine in (("before", cold), ("after", state.engine)):
            label = f"every structure forced, {name}"
            show = counter(f"tasks, {label}")
            table = oracle_table(
                tasks, engine, pool, score, world.scripts, on_progress=show, **options
            )
            parts.append(f"{label}\n\n{oracle_text(table)}")
    return "\n\n".join(parts) + "\n"


def print_header(config: Config, folder: Path) -> None:
    """What this run is, and what protects the machine from its scripts."""
    force = in_force()
    missing = ", ".join(force["missing"]) or "nothing"
    several = f", {ranks()} ranks" if ranks() > 1 else ""
    stages = f", stages of {config.stage_length}" if config.train == "stagewise" else ""
    say(
        f"run {folder}: preset {config.preset}, train {config.train}, seed {config.seed}{several}\n"
        f"{config.steps} steps of {config.tasks_per_step} tasks x {config.n_designs} designs x "
        f"{config.n_executions} executions{stages}\n"
        f"sandbox {force['isolation']}: {', '.join(force['layers'])}; missing: {missing}"
    )


def find_run(config: Config) -> tuple[Config, Path | None]:
    """(settings, run folder) of what --resume names; the folder is None for a new run."""
    if not config.resume:
        return config, None
    auto = config.resume == "auto"
    folder = Path(config.out) / (config.name or config.preset) if auto else Path(config.resume)
    if auto and not folder.exists():
        return config, None
    saved = read_config(folder)
    if auto:
        require_same(folder, dataclasses.asdict(saved), config)
    return saved, folder


def finished(folder: Path, config: Config) -> bool:
    made = "table.md" if config.eval_tasks else "after.json"  # each the last of its run
    if config.train == "sft" and config.data:
        made = "final"
    return (folder / made).exists()


def settle(config: Config) -> Config:
    """What was left open is decided, and paths hold from anywhere: so config.json is complete."""
    if config.device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        config = dataclasses.replace(config, device=device)
    changes = {name: absolute_names(getattr(config, name)) for name in ("data", "eval_data")}
    for name in ("model", "keep"):
        given = getattr(config, name)
        if given and Path(given).exists():
            changes[name] = str(Path(given).resolve())
    changes["engine"] = choose_engine(config.engine, config.device)
    if config.engine == "auto":
        why = vllm_missing() if config.device == "cuda" else f"device {config.device}"
        say(f"engine auto: {changes['engine']}" + (f" ({why})" if why else ""))
    if config.tables and changes["engine"] == "vllm":
        raise UsageError("--tables needs two engines, vLLM takes the GPU for one: --no-tables")
    return dataclasses.replace(config, **changes)


def absolute_names(text: str) -> str:
    """
    >>> absolute_names("polaris=4,apps=2")
    'polaris=4,apps=2'
    """
    parts = []
    for part in data_names(text):
        name, count = re.fullmatch(r"(.+?)(=\d+)?", part).groups("")
        parts.append((str(Path(name).resolve()) if Path(name).exists() else name) + count)
    return ",".join(parts)


def ingredients(config: Config) -> tuple[World | None, list[Example]]:
    """What a run is made of: its tasks, or the traces of --train sft.

    Raises UsageError, DataError; so what can't work leaves no folder behind.
    """
    if config.model:
        check_folder(find_model(config.model))
    if config.train == "sft" and config.data:
        return None, read_examples(config.data)
    return make_world(config), []


def work(config: Config, folder: Path, world: World | None, examples: list[Example]) -> None:
    """The run in its folder, from where it stands to its end or to SIGTERM."""
    if config.threads and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(config.threads)
    if rank() == 0:
        for left in folder.glob(".*.partial"):  # of a save that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    try:
        with preemption.raising(at_once=True):
            run(config, folder, world) if world else imitate_file(config, folder, examples)
    except Preempted:
        kept = checkpoints_of(folder)
        last = f"saved {kept[-1].name}" if kept else "no step was done yet"
        say(f"SIGTERM: {last}; go on with: python train.py --resume {folder}")


# --- does it fit? ---


@dataclass(frozen=True)
class Shape:
    """The numbers of a Qwen3 model's config.json that decide its size."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    tied: bool
    head_dim: int = 128
    vocabulary: int = 151_936

    def layer(self) -> int:
        """Parameters of a decoder layer: attention with its two head norms, MLP, two norms."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        norms = 2 * self.hidden + 2 * self.head_dim
        return attention + 3 * self.hidden * self.intermediate + norms

    def outside(self) -> int:
        """Parameters outside of the layers: embedding, head where it is not tied, last norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    def parameters(self) -> int:
        """
        >>> SHAPES["Qwen/Qwen3-8B"].parameters(), SHAPES["Qwen/Qwen3-0.6B"].parameters()
        (8190735360, 596049920)
        """
        return self.layers * self.layer() + self.outside()

    def kv_bytes(self) -> int:
        """Bytes of keys and values that a token takes in the engine, in 16 bits.

        >>> SHAPES["Qwen/Qwen3-8B"].kv_bytes()     # 2 x 36 layers x 8 heads x 128 x 2 bytes
        147456
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * 2

    def forward_flops(self, length: int) -> int:
        """FLOPs of the forward of one token in a sequence of this length, on average.

        Two a parameter. Attention adds a product with the keys and one with the values of the
        tokens before it, length / 2 on average: 2 x 2 x layers x heads x head_dim x length / 2.

        >>> SHAPES["Qwen/Qwen3-8B"].forward_flops(2500)     # 16.38e9 + 0.74e9
        17118750720
        """
        attention = 2 * self.layers * self.heads * self.head_dim * length
        return 2 * self.parameters() + attention


SHAPES = {
    "Qwen/Qwen3-0.6B": Shape(1024, 28, 3072, 16, 8, tied=True),
    "Qwen/Qwen3-1.7B": Shape(2048, 28, 6144, 16, 8, tied=True),
    "Qwen/Qwen3-4B": Shape(2560, 36, 9728, 32, 8, tied=True),
    "Qwen/Qwen3-8B": Shape(4096, 36, 12288, 32, 8, tied=False),
}


def memory_plan(shape: Shape, config: Config, *, ranks: int) -> dict[str, float]:
    """What a GPU holds while it trains -> bytes, by arithmetic.

    With P parameters, R ranks and A optimizers (stagewise training has one AdamW a role, A = 2),
    each rank holds float32 master weights 4P/R, gradients 4P/R, moments 8PA/R. What computes is
    gathered in 16 bits, and its gradient exists in 16 and in 32 bits until it is reduced: 2 + 2 + 4
    bytes a parameter for two layers (one computes, the next one comes) and for what lies outside
    of the layers. A micro-batch keeps one hidden state a layer and, with recomputation, the inside
    of one layer at a time. Chunked log-probs hold up to three chunks of float32 logits. Allocators
    and kernels take some more: tests/gpu_check.py measures.

    >>> P = SHAPES["Qwen/Qwen3-8B"].parameters()
    >>> [round(part * P / 8 / 1e9, 1) for part in (4, 4, 8 * 2)]
    [4.1, 4.1, 16.4]
    """
    p, optimizers = shape.parameters(), len(ROLES_OF.get(config.train, ["executor"]))
    inside = shape.head_dim * 2 * (shape.heads + shape.kv_heads) + 3 * shape.intermediate
    layers = 1 if config.recompute else shape.layers
    return {
        "master weights, float32": 4 * p / ranks,
        "gradients, float32": 4 * p / ranks,
        f"AdamW moments, {optimizers} x": 8 * p * optimizers / ranks,
        "gathered layers and head": 8 * (2 * shape.layer() + shape.outside()),
        "hidden states": 2 * config.token_budget * shape.hidden * (shape.layers + 1),
        "inside a layer": 2 * config.token_budget * (inside + 6 * shape.hidden) * layers,
        "chunks of logits": 3 * 4 * LOGPROB_CHUNK * shape.vocabulary,
    }


# GPU -> (GB, dense bfloat16 TFLOP/s, TB/s of memory), as published
GPUS = {
    "H200": (141, 989, 4.8),
    "H100 80 GB": (80, 989, 3.35),
    "A100 80 GB": (80, 312, 2.04),
    "RTX 4090": (24, 165, 1.01),
}
# Assumptions of time_plan. A run's log.jsonl says what is true of it: put that here.
CALLS = 4  # calls_per_execution; one after the other
PROMPT, OUTPUT = 1500, 1000  # tokens a call of either role: prompt_length/ROLE, length/ROLE
FLOPS_SHARE = 0.35  # of the peak, in training and in reading prompts
BANDWIDTH_SHARE = 0.6  # of the peak, in writing replies


def time_plan(
    shape: Shape, config: Config, *, tflops: float, bandwidth: float, kv_tokens: float, ranks: int
) -> dict[str, float]:
    """Seconds of a step's parts by arithmetic, not measured.

    tflops and bandwidth (TB/s) are the GPU's peaks. Training and reading prompts reach FLOPS_SHARE
    of the first, writing replies BANDWIDTH_SHARE of the second. kv_tokens: the engine's room.

    Generating, on a rank with the most tasks: prompts cost their forward. Then each token of a
    reply reads all weights once for all sequences that run, and the keys and values of each (half
    of the reply is there on average). As many sequences run as kv_tokens holds, else in waves. An
    execution's calls follow one another. Reading is what binds, not FLOPs: a sequence's keys and
    values alone take longer to read than its token takes to compute.

    Training, counted in forwards of a token: one, two for its backward, one more where the forward
    is recomputed, one for logp_old where a step has several updates. Five at most, so 10 FLOPs a
    parameter (and attention). All ranks share the tokens evenly.

    Left out: replies longer than the mean (a rank waits for its longest, all wait for the slowest
    rank), scoring and sandboxes, pushing the weights, padding, checkpoints, evaluation. Calls of
    constant groups are counted, though their forward is skipped; so is a prompt's part that the
    engine has cached.

    >>> shape = SHAPES["Qwen/Qwen3-8B"]
    >>> config = Config(recompute=True)    # 8 tasks, 4 x 4, 4 updates
    >>> plan = time_plan(shape, config, tflops=989, bandwidth=4.8, kv_tokens=462_637, ranks=8)
    >>> [f"{name} {seconds:.1f}" for name, seconds in plan.items()]
    ['generate 40.4', 'train designer 2.5', 'train executor 39.6']
    """
    flops, read = FLOPS_SHARE * tflops * 1e12, BANDWIDTH_SHARE * bandwidth * 1e12
    single = config.train == "single"  # it has no designs, and an execution is one call
    designs, calls = (0, 1) if single else (config.n_designs, CALLS)
    executions = config.n_designs * config.n_executions
    at_once = max(1, kv_tokens // (PROMPT + OUTPUT))
    here = math.ceil(config.tasks_per_step / ranks)
    generate = 0.0
    for sequences, turns in ((here * designs, 1), (here * executions, calls)):
        prompts = turns * sequences * PROMPT * shape.forward_flops(PROMPT)
        weights = 2 * shape.parameters() * math.ceil(sequences / at_once)
        kept = sequences * (PROMPT + OUTPUT / 2) * shape.kv_bytes()
        generate += prompts / flops + turns * OUTPUT * (weights + kept) / read
    forwards = 3 + config.recompute + (config.updates_per_step > 1)
    one_call = forwards * (PROMPT + OUTPUT) * shape.forward_flops(PROMPT + OUTPUT) / flops / ranks
    return {
        "generate": generate,
        "train designer": config.tasks_per_step * designs * one_call,
        "train executor": config.tasks_per_step * executions * calls * one_call,
    }


def time_text(config: Config, shape: Shape, ranks: int, gpu: float, kv_tokens: float) -> str:
    """time_plan for the GPUs of this memory (GB), and what it assumes."""
    trained = Counter(r for step in range(config.steps) for r in roles_to_train(config, step))
    nearest = min((memory for memory, *_ in GPUS.values()), key=lambda memory: abs(memory - gpu))
    rows = []
    for name, (memory, tflops, bandwidth) in GPUS.items():
        if memory == nearest:
            peaks = {"tflops": tflops, "bandwidth": bandwidth}
            plan = time_plan(shape, config, **peaks, kv_tokens=kv_tokens, ranks=ranks)
            seconds = config.steps * plan["generate"]
            seconds += sum(n * plan[f"train {role}"] for role, n in trained.items())
            hours = seconds / 3600
            parts = [f"{part:.1f}" for part in plan.values()]
            rows.append([f"{ranks} x {name}", *parts, f"{hours:.1f}", f"{hours * ranks:.0f}"])
    titles = ["GPUs", "generate, s", "train designer, s", "train executor, s"]
    table = markdown_table(rows, [*titles, "all steps, hours", "GPU-hours"])
    counts = ", ".join(f"{n} train the {role}" for role, n in trained.items())
    return (
        f"seconds of a step, by arithmetic, not measured; of {config.steps} steps {counts}:\n\n"
        f"{table}\n\n"
        f"assumed, in train.py: {CALLS} calls an execution (one of a single agent), one after the"
        f" other; {PROMPT:,} tokens of prompt\nand {OUTPUT:,} of reply a call;"
        f" {FLOPS_SHARE:.0%} of the GPU's bfloat16 peak"
        f" in training and reading prompts, {BANDWIDTH_SHARE:.0%} of its memory bandwidth\nin"
        " writing replies. Put in what your log.jsonl says: calls_per_execution,"
        " prompt_length/ROLE, length/ROLE.\nLeft out: waiting for the longest reply, scoring,"
        " pushing weights, evaluation; time_plan says more.\n"
    )


def shape_of(config: Config) -> Shape:
    """The shape of --model: of a known name, else of its folder's config.json."""
    if config.model in SHAPES:
        return SHAPES[config.model]
    if not config.model:
        raise UsageError("--dry-run plans for a given model: give --model, or a Qwen preset")
    try:
        c = AutoConfig.from_pretrained(config.model).get_text_config()  # of the hub only this file
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return Shape(
            *(c.hidden_size, c.num_hidden_layers, c.intermediate_size, c.num_attention_heads),
            *(c.num_key_value_heads, c.tie_word_embeddings, head_dim, c.vocab_size),
        )
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"--model {config.model} has no shape to plan for: {error}") from error


def plan_text(config: Config) -> str:
    """--dry-run: memory of a GPU, work and time of a step, data mix, what a checkpoint takes."""
    shape, (n_ranks, gpu) = shape_of(config), CARDS.get(config.preset, (1, 80))
    n_ranks = int(os.environ.get("WORLD_SIZE", n_ranks))
    sft = config.train == "sft"  # which draws nothing
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0).total_memory / 1e9
    training = memory_plan(shape, config, ranks=n_ranks)
    # Generating and training take turns: gradients and activations don't exist now.
    stay = ("master weights", "AdamW moments")
    generation = {name: size for name, size in training.items() if name.startswith(stay)}
    checkpoint = n_ranks * sum(generation.values())
    weights = 2 * shape.parameters()
    room = max(0.0, config.vllm_memory * gpu * 1e9 - weights)
    generation |= {"engine: weights, 16 bits": weights, "engine: keys and values": room}
    if config.engine == "torch" and not sft:
        training["the torch engine's weights, 16 bits"] = weights
    plans = {"trains": training} | ({} if sft else {"generates": generation})
    tables = []
    for what, plan in plans.items():
        rows = [[name, f"{size / 1e9:.1f}"] for name, size in plan.items()]
        rows.append(["together", f"{sum(plan.values()) / 1e9:.1f} of {gpu:.0f}"])
        tables.append(markdown_table(rows, [f"while a GPU {what}", "GB"]))
    kv_tokens = room / shape.kv_bytes()
    most = max(sum(plan.values()) for plan in plans.values())
    fits = most < gpu * 1e9 and (sft or kv_tokens >= config.max_context)
    timed = fits and config.device != "cpu" and not sft
    room_line = (
        f"the engine has room for {kv_tokens:,.0f} tokens ({shape.kv_bytes():,} bytes each):"
        f" {kv_tokens / config.max_context:.0f} sequences of {config.max_context:,}"
    )
    return "\n".join(
        [
            f"{config.model}: {shape.parameters() / 1e9:.2f} B parameters,"
            f" {n_ranks} ranks of one GPU each; memory by arithmetic:\n",
            "\n\n".join(tables) + "\n",
            *([] if sft else [room_line]),
            "it fits\n"
            if fits
            else "IT DOES NOT FIT: more ranks, or another --token-budget,"
            " --vllm-memory, --max-context\n",
            *step_plan(config),
            *([f"\n{time_text(config, shape, n_ranks, gpu, kv_tokens)}"] if timed else []),
            f"a checkpoint: {checkpoint / 1e9:.0f} GB, every"
            f" {config.checkpoint_every} steps; {config.keep_checkpoints} are kept, and one more"
            " while it is written",
        ]
    )


def step_plan(config: Config) -> list[str]:
    """What a step asks for, in lines."""
    if config.train == "sft":
        return [f"a step: {config.sft_batch} examples; {config.sft_steps} steps"]
    executions = config.tasks_per_step * config.n_designs * config.n_executions
    single = config.train == "single"  # no designs, and an execution is one call
    designs = 0 if single else config.tasks_per_step * config.n_designs
    calls = 1 if single else config.max_calls
    mix = parse_mix(config.data) if config.data else {"toy": None}
    listed = ", ".join(f"{n or config.tasks_per_step} {name}" for name, n in mix.items())
    stages = f" in stages of {config.stage_length}" if config.train == "stagewise" else ""
    most = designs * config.designer_max_tokens, executions * calls * config.executor_max_tokens
    return [
        f"a step: {config.tasks_per_step} tasks ({listed}), {designs} designs, {executions}"
        f" executions; training tasks that occur in {config.eval_data or 'held-out tasks'} are"
        " left out",
        f"output tokens of a step, at most: {most[0]:,} of designers, {most[1]:,} of executors"
        f" (calls an execution: {calls}; each call at its limit)",
        f"{config.updates_per_step} updates a step, micro-batches of {config.token_budget:,}"
        f" tokens; {config.steps} steps" + stages,
    ]


# --- the command ---


def main(argv: list[str] | None = None) -> int:
    folder = None
    try:
        config = parse(argv)
        disable_progress_bar()  # of Transformers, whose bars would break ours
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process
        if config.export:
            print(f"exported to {export(Path(config.export))}")
            return 0
        if config.dry_run:
            say(plan_text(config))
            return 0
        config, folder = find_run(settle(config))
        if folder and finished(folder, config):
            raise UsageError(f"{folder} is finished: look at it, or give another --name")
        start_ranks(config)
        configure(config.isolation)
        world, examples = ingredients(config)
        folder = folder or new_folder(config)
        signal.signal(signal.SIGTERM, preemption)
        work(config, folder, world, examples)
        if joined:
            dist.destroy_process_group()
    except (UsageError, DataError, ModelError) as error:
        return fail("error", error, 2)
    except (OSError, SandboxError, EngineError, FloatingPointError) as error:
        return fail("failed", error, 1)
    except torch.OutOfMemoryError as error:
        return fail("failed", f"{error}; see --dry-run, and lower --token-budget", 1)
    except RuntimeError as error:
        if not lost_rank(error):
            raise
        time.sleep(GRACE_S)  # torchrun names the rank that ended first: let that be the other one
        return fail("failed", f"lost another rank ({error}); the first to end has the cause", 1)
    except KeyboardInterrupt:
        then = f"go on with: python train.py --resume {folder}" if folder else "nothing was made"
        print(f"\ninterrupted; {then}", file=sys.stderr, flush=True)
        os._exit(130)  # at once: Python would wait for threads that are still scoring
    return 0


def fail(what: str, error: BaseException | str, status: int) -> int:
    """One line on standard error, with the rank where there are several.

    What can't work (status 2) fails on every rank alike until they have joined: one a machine
    says it.
    """
    where = f"rank {rank()}: " if ranks() > 1 else ""
    if status == 1 or joined or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"train.py: {where}{what}: {one_line(error)}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
